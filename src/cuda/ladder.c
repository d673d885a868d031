/* The rungs of the ladder: data, and what they can do. */
#include "cuda/ladder.h"

#include "cuda/cuda.h"

#define ROW_OF(variant, arch_min, arch_max, kernel, head_dim, masks, tile_q, tile_k, warps, stages, min_blocks, why)       \
    {                                                                                                                      \
        arch_min, arch_max, FA_KERNEL_##kernel, FA_IN_16_BIT, head_dim, masks, FA_FOR_ALIGNED, 0, tile_q, tile_k, warps,    \
            stages, min_blocks, variant, 0, why                                                                            \
    }
#define ROW(...) ROW_OF(0, __VA_ARGS__)
#define BOTH (FA_ON_NONE | FA_ON_CAUSAL)

/* TMA is there from 9.0 on, but the rungs' tiles need more shared memory than 12.0 has; WGMMA is 9.0's alone. */
const fa_rung fa_rungs[] = {
    /*    arch     kernel     d    masks tile_q tile_k warps stages blocks why */
    {"k1", false, false, 2,
     {ROW(80, 129, K1_SCORES, 64, BOTH, 16, 16, 8, 1, 1, "standard attention: S and P in memory"),
      ROW(80, 129, K1_SCORES, 128, BOTH, 16, 16, 8, 1, 1, "standard attention: S and P in memory")}},
    {"fa1", false, false, 2,
     {ROW(80, 129, FA1, 64, BOTH, 16, 128, 4, 1, 1, "FlashAttention-1: keys outside, O scaled in memory, split-K warps"),
      ROW(80, 129, FA1, 128, BOTH, 16, 96, 4, 1, 1, "FlashAttention-1: keys outside, O scaled in memory, split-K warps")}},
    {"k2", false, false, 2,
     {ROW(80, 129, K2, 64, BOTH, 128, 64, 8, 1, 1, "FlashAttention-2's loops on CUDA cores"),
      ROW(80, 129, K2, 128, BOTH, 128, 64, 8, 1, 1, "FlashAttention-2's loops on CUDA cores")}},
    {"k3.1", true, false, 2,
     {ROW(90, 109, K3, 64, BOTH, 128, 64, 8, 1, 1, "TMA, one stage"),
      ROW(90, 109, K3, 128, BOTH, 128, 64, 8, 1, 1, "TMA, one stage")}},
    {"k3.2", true, false, 2,
     {ROW(90, 109, K3, 64, BOTH, 128, 64, 8, 2, 1, "TMA, two stages"),
      ROW(90, 109, K3, 128, BOTH, 128, 64, 8, 2, 1, "TMA, two stages")}},
    {"k3.3", true, false, 2,
     {ROW(90, 109, K3, 64, BOTH, 128, 64, 8, 5, 1, "TMA, five stages"),
      ROW(90, 109, K3, 128, BOTH, 128, 64, 8, 5, 1, "TMA, five stages")}},
    {"k4.1", true, false, 2,
     {ROW(90, 90, K4_1, 64, BOTH, 128, 64, 8, 2, 1, "Q K^T by WGMMA"),
      ROW(90, 90, K4_1, 128, BOTH, 128, 64, 8, 2, 1, "Q K^T by WGMMA")}},
    {"k4.2", true, false, 2,
     {ROW(90, 90, K4_2, 64, BOTH, 128, 128, 8, 2, 1, "both products by WGMMA, P from registers"),
      ROW(90, 90, K4_2, 128, BOTH, 128, 64, 8, 2, 2, "both products by WGMMA, P from registers; two blocks a multiprocessor")}},
    {"k5", true, false, 2,
     {ROW(90, 90, K5, 64, BOTH, 192, 128, 16, 2, 1, "a producer warpgroup and three consumers"),
      ROW(90, 90, K5, 128, BOTH, 128, 128, 12, 2, 1, "a producer warpgroup and two consumers")}},
    {"k6", true, false, 2,
     {ROW(90, 90, K6, 64, BOTH, 192, 128, 16, 2, 1, "ping-pong of three consumers, softmax under P V"),
      ROW(90, 90, K6, 128, BOTH, 128, 128, 12, 2, 1, "ping-pong of two consumers, softmax under P V")}},
    {"k7", false, true, 2,
     {ROW(90, 90, K7, 64, BOTH, 192, 128, 16, 3, 1, "k6 in FP8"),
      ROW(90, 90, K7, 128, BOTH, 128, 192, 12, 2, 1, "k6 in FP8")}},
    {"k8", false, true, 2,
     {ROW_OF(1, 90, 90, K7, 64, BOTH, 192, 128, 16, 3, 1, "k7, Q and K rotated before they are rounded"),
      ROW_OF(1, 90, 90, K7, 128, BOTH, 128, 192, 12, 2, 1, "k7, Q and K rotated before they are rounded")}},
    {"fd", false, false, 2,
     {ROW(80, 129, FD, 64, BOTH, 1, 64, 4, 1, 1, "flash decoding: keys split over blocks, parts merged"),
      ROW(80, 129, FD, 128, BOTH, 1, 64, 4, 1, 1, "flash decoding: keys split over blocks, parts merged")}},
};
const int fa_num_rungs = sizeof fa_rungs / sizeof *fa_rungs;

const fa_rung *fa_ladder_find(const char *name)
{
    for (int i = 0; i < fa_num_rungs; i++)
        if (strcmp(fa_rungs[i].name, name) == 0)
            return &fa_rungs[i];
    return NULL;
}

/* NULL, or what a rung does not do. */
static const char *lacks(const fa_call *call, const fa_key *key, const fa_rung *rung)
{
    if (call->pass != FLASH_ATTN_FORWARD)
        return "the backward";
    if (key->dtype != FLASH_ATTN_F16 && key->dtype != FLASH_ATTN_BF16)
        return "inputs other than float16 and bfloat16";
    if (key->dtype_o != key->dtype)
        return "o in another dtype than q";
    if ((call->head_dim != 64 && call->head_dim != 128) || call->head_dim_v != call->head_dim)
        return "head dims other than 64 and 128";
    if (key->mask == FA_MASK_WINDOW)
        return "windows";
    if (key->has_slices || key->has_softcap || key->has_bias || key->has_alibi || key->has_dropout || key->has_paged ||
        call->sinks.data)
        return "softcap, bias, ALiBi, sinks, dropout, slices or pages";
    if (call->cu_seqlens_q || call->cu_seqlens_k || call->seqused_q || call->seqused_k || call->leftpad_k ||
        call->cache_batch_idx || call->num_splits > 1)
        return "lengths that differ, left padding or splits";
    if (!key->aligned || (rung->has_maps && !fa_maps_fit(call)))
        return "rows that are not 16-byte aligned and in one piece, or strides of 0 or below";
    if (!(call->scale > 0))
        return "a scale of 0 or below";
    return NULL;
}

flash_attn_status fa_ladder_choose(const fa_call *call, const fa_key *key, const fa_rung *rung, const fa_tune_row **row)
{
    const char *what = lacks(call, key, rung);
    if (what)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "rung %s of the ladder does not do %s", rung->name, what);
    for (int i = 0; i < rung->num_rows; i++) {
        *row = &rung->row[i];
        if (key->arch >= (*row)->arch_min && key->arch <= (*row)->arch_max && key->head_dim == (*row)->head_dim &&
            ((*row)->masks >> key->mask & 1))
            return FLASH_ATTN_OK;
    }
    return fa_fail(FLASH_ATTN_UNSUPPORTED, "rung %s of the ladder is not for compute capability %d.%d", rung->name,
                   key->arch / 10, key->arch % 10);
}
