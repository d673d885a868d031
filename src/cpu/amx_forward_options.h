/*
 * Options in the AMX forward, unit by unit: on S between the product and the softmax (softcap, ALiBi, bias, block
 * masks), and dropout on P after it. The window is the kernel's own.
 */
#ifndef FA_CPU_AMX_FORWARD_OPTIONS_H
#define FA_CPU_AMX_FORWARD_OPTIONS_H

#include "cpu/amx_options.h"
#include "cpu/amx_softmax.h"

/* More would eat up the shift's margin, for P is computed with this factor. */
#define MOST_KEEP_SCALE 64.0f

/* ALiBi's scores rise from unit to unit, and each time that they outgrow the shift rows are redone: steeper ones, with
 * their maximum taken for each tile, are faster composed. */
#define MOST_ALIBI_SLOPE 0.125f
#ifdef FA_AMX_FP16
#define ALIBI_MARGIN 12 /* what float16's range can give */
#else
#define ALIBI_MARGIN 32
#endif

static bool alibi_is_flat(const fa_forward_block *b)
{
    const fa_call *call = b->options->call;
    const fa_tile *tile = b->options->tile;
    for (int h = 0; call->alibi_slopes.data && h < tile->heads; h++) {
        float slope = *(const float *)fa_at(&call->alibi_slopes, tile->b, tile->head + h, 0, 0);
        if (!(fabsf(slope) <= MOST_ALIBI_SLOPE))
            return false;
    }
    return true;
}

/* The 32 queries at hand. */
typedef struct option_rows {
    int         count;
    int         query[UNIT];
    float       slope[UNIT];
    const void *bias[UNIT]; /* for the tile's first key */
    bool        one_bias;   /* they are all the same */
} option_rows;

static void set_option_rows(option_rows *rows, const fa_forward_block *b, int first, int count)
{
    const fa_call *call = b->options->call;
    const fa_tile *tile = b->options->tile;
    rows->count         = count;
    for (int r = 0; r < count; r++) {
        int64_t head = tile->head + (first + r) / b->queries;
        int     i = rows->query[r] = tile->queries.begin + (first + r) % b->queries;
        if (call->alibi_slopes.data)
            rows->slope[r] = *(const float *)fa_at(&call->alibi_slopes, tile->b, head, 0, 0);
        if (call->bias.data)
            rows->bias[r] = fa_at(&call->bias, tile->b, head, i, tile->keys.begin);
    }
    rows->one_bias = call->bias.data && call->bias.stride[2] == 0 && (call->bias.stride[1] == 0 || tile->heads == 1);
}

/* A bias of -inf masks: whatever the score holds there, it is not seen. */
FA_AMX_INLINE __m512 with_bias(__m512 s, __m512 bias)
{
    return _mm512_mask_add_ps(bias, _mm512_cmp_ps_mask(bias, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), s, bias);
}

/* The bias of a row two units ahead: rows are too far apart for the processor to guess. */
FA_AMX_INLINE void prefetch_bias(const fa_forward_block *b, const void *row, int key)
{
    const flash_attn_tensor *bias  = &b->options->call->bias;
    int64_t                  bytes = (int64_t)fa_dtype_bytes(bias->dtype);
    if (bias->stride[3] == 1 && key + 2 * UNIT < b->keys) {
        const char *at = (const char *)row + (key + 2 * UNIT) * bytes;
        _mm_prefetch(at, _MM_HINT_T0);
        if (bytes == 4)
            _mm_prefetch(at + 64, _MM_HINT_T0);
    }
}

/* A row of a unit, `key` its first key's number in the tile. */
FA_AMX_INLINE void apply_options_to_row(const fa_forward_block *b, const option_rows *rows, int r, int key, float *s)
{
    const __m512i  lanes    = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const fa_call *call     = b->options->call;
    const fa_tile *tile     = b->options->tile;
    int            first    = tile->keys.begin + key;
    int            distance = rows->query[r] + tile->seq.diagonal - first;
    uint32_t       seen     = UINT32_MAX;
    if (b->options->slices)
        seen = fa_slices_seen(call, tile, rows->query[r], first);
    if (call->bias.data)
        prefetch_bias(b, rows->bias[r], key);
    for (int t = 0; t < 2 && key + 16 * t < b->keys; t++) {
        float *at = scores_row(s, r) + t * FA_AMX_TILE_FLOATS;
        __m512 x  = _mm512_load_ps(at);
        if (call->alibi_slopes.data)
            x = fa_amx_with_alibi(x, rows->slope[r], _mm512_sub_epi32(_mm512_set1_epi32(distance - 16 * t), lanes));
        if (call->bias.data)
            x = with_bias(x,
                          fa_amx_load16(rows->bias[r], call->bias.stride[3], call->bias.dtype, key + 16 * t, b->keys));
        _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(seen >> (16 * t)), x));
    }
}

/* A bias alone, to a whole unit: what fa_amx_scale_scores and apply_options_to_row make of it, to the bit, in a tenth of their instructions, and without asking ahead,
 * for rows' lines would meet in few sets of the first-level cache. */
static bool takes_bias_alone(const fa_forward_block *b, int key)
{
    const fa_call *call = b->options->call;
    return call->bias.data && call->bias.stride[3] == 1 && key + UNIT <= b->keys && !(call->softcap > 0.0f) && !call->alibi_slopes.data && !b->options->slices;
}

FA_AMX_INLINE void add_bias_to_unit(const fa_forward_block *b, const option_rows *rows, int key, float *s, flash_attn_dtype dtype)
{
    const __m512 scale = _mm512_set1_ps(b->options->scale);
    __m512       bias[2];
    for (int r = 0; r < rows->count; r++) {
        const char *row = (const char *)rows->bias[r] + (size_t)key * fa_dtype_bytes(dtype);
        for (int t = 0; t < 2 && (r == 0 || !rows->one_bias); t++)
            bias[t] = fa_amx_load16(row, 1, dtype, 16 * t, 32);
        for (int t = 0; t < 2; t++) {
            float *at = scores_row(s, r) + t * FA_AMX_TILE_FLOATS;
            _mm512_store_ps(at, with_bias(_mm512_mul_ps(_mm512_load_ps(at), scale), bias[t]));
        }
    }
}

/* S of the unit whose first key is number `key` of the tile's; see fa_apply_options. */
static void apply_options_to_unit(const fa_forward_block *b, const option_rows *rows, int key, float *s)
{
    const fa_call *call = b->options->call;
    if (takes_bias_alone(b, key)) {
        if (call->bias.dtype == FLASH_ATTN_F32)
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_F32);
        else if (call->bias.dtype == FLASH_ATTN_BF16)
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_BF16);
        else
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_F16);
        return;
    }
    fa_amx_scale_scores(b->options, s, NULL, UNIT * UNIT);
    bool by_row = call->alibi_slopes.data || call->bias.data || b->options->slices;
    for (int r = 0; r < rows->count && by_row; r++)
        apply_options_to_row(b, rows, r, key, s);
}

/* ---- dropout ---- */

/* Units begin at blocks of 16 x 16 of one head, and the factor is not too large. */
static bool can_drop(const fa_forward_block *b)
{
    const fa_tile *tile = b->options->tile;
    return tile->heads == 1 && tile->queries.begin % 16 == 0 && tile->keys.begin % 16 == 0 &&
           b->options->call->dropout.keep_scale <= MOST_KEEP_SCALE;
}

/* What is kept of row r of a row block, in the order of P: pairs (n, n + 16), so bit 2 n + t for key n of key block t;
 * float16 as the keys lie, bit n + 16 t. */
FA_AMX_INLINE uint32_t kept_pairs(uint64_t keep[2][4], int r)
{
    uint32_t bits = 0;
    for (int t = 0; t < 2; t++) {
        for (int w = 0; w < 4; w++) {
            uint32_t lanes = (uint32_t)(keep[t][w] >> (r % 8 * 8 + r / 8)) & 0x55; /* four, two bits apart */
#ifdef FA_AMX_FP16
            bits |= lanes << (w % 2 + 8 * (w / 2) + 16 * t);
#else
            lanes = (lanes | lanes << 4) & 0x0505;
            lanes = (lanes | lanes << 2) & 0x1111; /* four bits apart */
            bits |= lanes << (2 * (w % 2) + 16 * (w / 2) + t);
#endif
        }
    }
    return bits;
}

/* P of a unit, [row tile][piece]: what is dropped becomes 0. first_row: of the tile's rows, which are one head's. */
static __attribute__((noinline)) void drop_from_unit(const fa_forward_block *b, int first_row, int first_key,
                                                     uint16_t *p, int p_down, int pieces)
{
    const fa_call *call       = b->options->call;
    const fa_tile *tile       = b->options->tile;
    uint32_t       batch_head = (uint32_t)(tile->b * call->heads_q + tile->head);
    uint32_t       row_block  = (uint32_t)(tile->queries.begin + first_row) / 16,
             col_block        = (uint32_t)(tile->keys.begin + first_key) / 16;
    for (int down = 0; down < 2; down++) {
        uint64_t keep[2][4];
        for (uint32_t t = 0; t < 2; t++)
            fa_amx_kept(keep[t], &call->dropout, batch_head, row_block + (uint32_t)down, col_block + t);
        for (int r = 0; r < 16; r++) {
            __mmask32 kept = kept_pairs(keep, r);
            for (int n = 0; n < pieces; n++) {
                uint16_t *at = p + down * p_down + n * FA_AMX_TILE_HALVES + 32 * r;
                _mm512_store_si512(at, _mm512_maskz_mov_epi16(kept, _mm512_load_si512(at)));
            }
        }
    }
}

#endif
