/* Bad input is refused before data is touched: a table of small changes to valid problems. For each, the status, a word
 * of the sentence, every byte of the caller's memory unchanged, and the next valid call works. */
#include "check.h"
#include "flashattn.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { B = 2, SQ = 5, SK = 7, HQ = 4, HK = 2, D = 8, DV = 6, TOTAL_Q = 8, TOTAL_K = 11, PAGES = 6, PAGE = 4 };

/* All memory of a call in one block, so that "nothing changed" is one comparison. */
typedef struct memory {
    float q[B * 8 * HQ * D], k[64 * HK * D], v[64 * HK * DV], o[B * 8 * HQ * DV], lse[B * HQ * 8];
    float bias[B * HQ * 8 * 11], slopes[HQ], sinks[HQ];
    float dout[B * 8 * HQ * DV], dq[B * 8 * HQ * D], dk[64 * HK * D], dv[64 * HK * DV], dbias[B * HQ * 8 * 11],
        dsinks[HQ], cosines[16 * 2], sines[16 * 2];
    float    k_new[B * 2 * HK * D], v_new[B * 2 * HK * DV], k_cache[B * 8 * HK * D], v_cache[B * 8 * HK * DV];
    int32_t  cu_q[B + 1], cu_k[B + 1], used[B], used_q[B], pad[B], index[B], table[B * 2], held[B], offsets[B + 1];
    char     workspace[64];
    uint64_t end;
} memory;

typedef enum base { PADDED, VARLEN, PAGED, CACHED, BACKWARD, SLICED, FP8, APPEND, APPEND_PAGED, MERGE } base;

typedef struct world {
    memory            *m;
    flash_attn_problem p;
    flash_attn_grads   g;
    flash_attn_exec    e;
    flash_attn_append  a;
    flash_attn_partial part[2], result;
    flash_attn_slice   slice[2];
    int32_t            num_parts;
    bool               null_problem, null_grads;
} world;

#define TENSOR(where, ...) ((flash_attn_tensor){.data = (where), .shape = {__VA_ARGS__}})

static void fill_memory(memory *m)
{
    memset(m, 0, sizeof *m);
    float *numbers = m->q;
    for (size_t i = 0; i < offsetof(memory, cu_q) / sizeof(float); i++)
        numbers[i] = (float)(i * 7919 % 64) / 64.0f - 0.5f;
    memcpy(m->cu_q, (int32_t[]){0, 3, TOTAL_Q}, sizeof m->cu_q);
    memcpy(m->cu_k, (int32_t[]){0, 4, TOTAL_K}, sizeof m->cu_k);
    memcpy(m->used, (int32_t[]){3, 7}, sizeof m->used);
    memcpy(m->used_q, (int32_t[]){5, 2}, sizeof m->used_q);
    memcpy(m->pad, (int32_t[]){1, 0}, sizeof m->pad);
    memcpy(m->index, (int32_t[]){1, 0}, sizeof m->index);
    memcpy(m->table, (int32_t[]){5, -1, 2, 0}, sizeof m->table); /* sequence 0 needs one page of its two */
    memcpy(m->held, (int32_t[]){3, 6}, sizeof m->held);
    memcpy(m->offsets, (int32_t[]){0, 1, 2}, sizeof m->offsets);
}

static void set_problem(world *w, base kind)
{
    memory             *m = w->m;
    flash_attn_problem *p = &w->p;
    p->q                  = TENSOR(m->q, B, SQ, HQ, D);
    p->k                  = TENSOR(m->k, B, SK, HK, D);
    p->v                  = TENSOR(m->v, B, SK, HK, DV);
    p->o                  = TENSOR(m->o, 0, 0, 0, 0);
    p->lse                = TENSOR(m->lse, 0, 0, 0, 0);
    p->bias               = TENSOR(m->bias, B, HQ, SQ, SK);
    p->alibi_slopes       = TENSOR(m->slopes, 1, HQ, 1, 1);
    p->sinks              = TENSOR(m->sinks, 1, HQ, 1, 1);
    p->mask               = FLASH_ATTN_CAUSAL;
    p->dropout            = (flash_attn_dropout){.p = 0.25f, .seed = 1};
    switch (kind) {
    case VARLEN:
        p->q            = TENSOR(m->q, 1, TOTAL_Q, HQ, D);
        p->k            = TENSOR(m->k, 1, TOTAL_K, HK, D);
        p->v            = TENSOR(m->v, 1, TOTAL_K, HK, DV);
        p->bias         = TENSOR(m->bias, 1, HQ, 1, 8);
        p->cu_seqlens_q = m->cu_q;
        p->cu_seqlens_k = m->cu_k;
        p->batch        = B;
        break;
    case PAGED:
        p->k         = TENSOR(m->k, PAGES, PAGE, HK, D);
        p->v         = TENSOR(m->v, PAGES, PAGE, HK, DV);
        p->seqused_k = m->used;
        p->pages     = (flash_attn_pages){.table = m->table, .pages_per_seq = 2};
        break;
    case CACHED:
        p->cache_batch_idx = m->index;
        p->seqused_k       = m->used;
        p->seqused_q       = m->used_q;
        p->leftpad_k       = m->pad;
        break;
    case SLICED:
        w->slice[0] = (flash_attn_slice){0, 3, 0, 4, FLASH_ATTN_SLICE_FULL};
        w->slice[1] = (flash_attn_slice){1, SQ, 2, SK, FLASH_ATTN_SLICE_BOTH};
        p->slices   = (flash_attn_slices){.list = w->slice, .count = 2, .offsets = m->offsets};
        break;
    case FP8:
        p->q.dtype = p->k.dtype = p->v.dtype = FLASH_ATTN_F8E4M3;
        p->o.dtype                           = FLASH_ATTN_BF16;
        p->descale.k                         = TENSOR(m->slopes, 1, HK, 1, 1);
        break;
    default: break;
    }
}

static void set_world(world *w, base kind, flash_attn_device_type device)
{
    memory *m = w->m;
    *w        = (world){.m = m, .num_parts = 2};
    fill_memory(m);
    set_problem(w, kind);
    w->p.device.type = w->a.device.type = device;

    w->g = (flash_attn_grads){.dout   = TENSOR(m->dout, B, SQ, HQ, DV),
                              .dq     = {.data = m->dq},
                              .dk     = {.data = m->dk},
                              .dv     = {.data = m->dv},
                              .dbias  = {.data = m->dbias},
                              .dsinks = {.data = m->dsinks}};

    w->a.k_new         = TENSOR(m->k_new, B, 2, HK, D);
    w->a.v_new         = TENSOR(m->v_new, B, 2, HK, DV);
    w->a.k_cache       = TENSOR(m->k_cache, B, 8, HK, D);
    w->a.v_cache       = TENSOR(m->v_cache, B, 8, HK, DV);
    w->a.cache_seqlens = m->held;
    w->a.rotary.cos    = TENSOR(m->cosines, 16, 2, 1, 1);
    w->a.rotary.sin    = TENSOR(m->sines, 16, 2, 1, 1);
    w->a.q             = TENSOR(m->q, B, SQ, HQ, D);
    w->a.q_out         = TENSOR(m->q, 0, 0, 0, 0);
    if (kind == APPEND)
        w->a.cache_batch_idx = m->index;
    if (kind == APPEND_PAGED) {
        w->a.k_cache = TENSOR(m->k, PAGES, PAGE, HK, D);
        w->a.v_cache = TENSOR(m->v, PAGES, PAGE, HK, DV);
        w->a.pages   = (flash_attn_pages){.table = m->table, .pages_per_seq = 2};
        m->table[1]  = 1;
    }

    for (int n = 0; n < 2; n++) {
        w->part[n].o   = TENSOR(n ? m->dout : m->dq, B, SQ, HQ, DV);
        w->part[n].lse = TENSOR(n ? m->bias : m->dbias, B, HQ, SQ, 1);
    }
    w->result.o   = TENSOR(m->o, 0, 0, 0, 0);
    w->result.lse = TENSOR(m->lse, 0, 0, 0, 0);
}

static flash_attn_status call(const world *w, base kind)
{
    const flash_attn_problem *p = w->null_problem ? NULL : &w->p;
    switch (kind) {
    case BACKWARD: return flash_attn_backward(NULL, p, w->null_grads ? NULL : &w->g, &w->e);
    case APPEND:
    case APPEND_PAGED: return flash_attn_append_kv(NULL, w->null_problem ? NULL : &w->a, &w->e);
    case MERGE:
        return flash_attn_merge(NULL, w->a.device, w->null_problem ? NULL : w->part, w->num_parts,
                                w->null_grads ? NULL : &w->result, &w->e);
    default: return flash_attn_forward(NULL, p, &w->e);
    }
}

#define P w->p
#define G w->g
#define A w->a
#define AT(data, bytes) ((char *)(data) + (bytes))
#define STRIDE(tensor, ...) memcpy((tensor).stride, (int64_t[4]){__VA_ARGS__}, sizeof(tensor).stride)

/* base, promise, status, word of the message, change */
#define MUTATIONS(X)                                                                                                   \
    X(PADDED, null_problem, INVALID, "problem", w->null_problem = true)                                                \
    X(PADDED, device_unknown, INVALID, "device.type is 9", P.device.type = (flash_attn_device_type)9)                  \
    X(PADDED, device_index, INVALID, "device.index is 1", P.device.index = 1)                                          \
    X(PADDED, cuda_index_negative, INVALID, "device.index is -1", P.device.type = FLASH_ATTN_CUDA;                     \
      P.device.index = -1)                                                                                             \
    X(PADDED, problem_reserved, INVALID, "older than the caller", P.reserved[7] = 3)                                   \
    X(PADDED, tensor_reserved, INVALID, "q.reserved is 1", P.q.reserved = 1)                                           \
    X(PADDED, absent_tensor_reserved, INVALID, "sinks.reserved", P.sinks = (flash_attn_tensor){.reserved = 1})         \
    X(PADDED, slices_reserved, INVALID, "slices.reserved", P.slices.reserved = 1)                                      \
    X(PADDED, pages_reserved, INVALID, "pages.reserved", P.pages.reserved = 1)                                         \
    X(PADDED, dropout_reserved, INVALID, "dropout.reserved", P.dropout.reserved = -1)                                  \
    X(PADDED, exec_reserved, INVALID, "exec.reserved[0] is 1", w->e.reserved[0] = 1)                                   \
    X(PADDED, exec_reserved_int, INVALID, "exec.reserved is 2", w->e.reserved0 = 2)                                    \
    X(PADDED, threads_negative, INVALID, "num_threads is -1", w->e.num_threads = -1)                                   \
    X(PADDED, stream_on_host, INVALID, "exec.stream", w->e.stream = w->m)                                              \
    X(PADDED, allocator_alone, INVALID, "exec.allocator is given with exec.allocate NULL", w->e.allocator = w->m)        \
    X(PADDED, workspace_size_alone, INVALID, "exec.workspace is NULL", w->e.workspace_bytes = 10)                      \
    X(PADDED, workspace_in_o, INVALID, "share memory", w->e.workspace = w->m->o; w->e.workspace_bytes = 1 << 26)       \
    X(PADDED, workspace_in_q, INVALID, "exec.workspace and q",                                                         \
      P.device.type = FLASH_ATTN_REFERENCE; w->e.workspace = w->m->q; w->e.workspace_bytes = 64)                       \
    X(PADDED, workspace_endless, INVALID, "leaves the address space", w->e.workspace = w->m->workspace;                \
      w->e.workspace_bytes = SIZE_MAX)                                                                                 \
    X(PADDED, workspace_huge, INVALID, "leaves the address space", w->e.workspace = w->m->workspace;                   \
      w->e.workspace_bytes = SIZE_MAX / 4)                                                                             \
    X(PADDED, q_missing, INVALID, "q.data is NULL", P.q.data = NULL)                                                   \
    X(PADDED, v_missing, INVALID, "v.data is NULL", P.v.data = NULL)                                                   \
    X(PADDED, o_missing, INVALID, "o.data is NULL", P.o.data = NULL)                                                   \
    X(PADDED, bias_without_data, INVALID, "bias.data is NULL", P.bias.data = NULL)                                     \
    X(PADDED, q_misaligned, INVALID, "q.data", P.q.data = (char *)P.q.data + 2)                                        \
    X(PADDED, lse_misaligned, INVALID, "lse.data", P.lse.data = (char *)P.lse.data + 1)                                \
    X(PADDED, q_dtype_unknown, INVALID, "q.dtype is unknown (7)", P.q.dtype = (flash_attn_dtype)7)                     \
    X(PADDED, q_dtype_negative, INVALID, "q.dtype", P.q.dtype = (flash_attn_dtype)-1)                                  \
    X(PADDED, k_dtype_differs, INVALID, "k.dtype is F16", P.k.dtype = FLASH_ATTN_F16)                                  \
    X(PADDED, o_dtype_differs, INVALID, "o.dtype is BF16 (2), expected F32", P.o.dtype = FLASH_ATTN_BF16)              \
    X(PADDED, lse_dtype, INVALID, "lse.dtype", P.lse.dtype = FLASH_ATTN_F16)                                           \
    X(PADDED, bias_dtype, INVALID, "bias.dtype", P.bias.dtype = FLASH_ATTN_BF16)                                       \
    X(PADDED, zeroed_problem, INVALID, "heads_q", memset(&P, 0, sizeof P))                                             \
    X(PADDED, batch_negative, INVALID, "q.shape[0] (batch) is -1", P.q.shape[0] = -1)                                  \
    X(PADDED, seqlen_negative, INVALID, "q.shape[1] (seqlen_q) is -3", P.q.shape[1] = -3)                              \
    X(PADDED, seqlen_too_long, INVALID, "q.shape[1] (seqlen_q)", P.q.shape[1] = FA_MAX_SEQLEN + 1LL)                   \
    X(PADDED, seqlen_k_too_long, INVALID, "k.shape[1] (seqlen_k)", P.k.shape[1] = FA_MAX_SEQLEN + 1LL)                 \
    X(PADDED, group_too_long, INVALID, "times the queries of a sequence, 536870911, is over 2^31 - 1",                 \
      P.q.shape[1] = FA_MAX_SEQLEN; P.q.shape[2] = 64)                                                                 \
    X(PADDED, heads_zero, INVALID, "q.shape[2] (heads_q) is 0", P.q.shape[2] = 0)                                      \
    X(PADDED, heads_k_zero, INVALID, "k.shape[2] (heads_k) is 0", P.k.shape[2] = 0)                                    \
    X(PADDED, heads_not_multiple, INVALID, "multiple of heads_k 3", P.k.shape[2] = P.v.shape[2] = 3)                   \
    X(PADDED, head_dim_zero, INVALID, "q.shape[3] (head_dim) is 0", P.q.shape[3] = P.k.shape[3] = 0)                   \
    X(PADDED, head_dim_over, INVALID, "is 577, expected 1 to 576", P.q.shape[3] = P.k.shape[3] = 577)                  \
    X(PADDED, head_dim_v_over, INVALID, "v.shape[3] (head_dim_v)", P.v.shape[3] = 577)                                 \
    X(PADDED, head_dim_k_differs, INVALID, "k.shape", P.k.shape[3] = 9)                                                \
    X(PADDED, k_batch_differs, INVALID, "k.shape", P.k.shape[0] = 3)                                                   \
    X(PADDED, v_rows_differ, INVALID, "v.shape", P.v.shape[1] = 6)                                                     \
    X(PADDED, v_heads_differ, INVALID, "v.shape", P.v.shape[2] = 4)                                                    \
    X(PADDED, o_shape, INVALID, "o.shape is [2, 5, 4, 8], expected [2, 5, 4, 6]",                                      \
      P.o = TENSOR(P.o.data, B, SQ, HQ, D))                                                                            \
    X(PADDED, lse_shape, INVALID, "lse.shape", P.lse = TENSOR(P.lse.data, B, SQ, HQ, 1))                               \
    X(PADDED, batch_field, INVALID, "batch is 3", P.batch = 3)                                                         \
    X(PADDED, batch_field_negative, INVALID, "batch is -1", P.batch = -1)                                              \
    X(PADDED, batch_heads_over, INVALID, "batch", P.q.shape[0] = 1 << 30; P.q.shape[2] = 4)                            \
    X(PADDED, max_seqlen_q_negative, INVALID, "max_seqlen_q is -1", P.max_seqlen_q = -1)                               \
    X(PADDED, max_seqlen_q_small, INVALID, "max_seqlen_q is 4", P.max_seqlen_q = 4)                                    \
    X(PADDED, max_seqlen_k_small, INVALID, "max_seqlen_k is 4", P.max_seqlen_k = 4)                                    \
    X(PADDED, max_seqlen_k_over, INVALID, "max_seqlen_k", P.max_seqlen_k = INT32_MAX)                                  \
    X(PADDED, splits_negative, INVALID, "num_splits is -2", P.num_splits = -2)                                         \
    X(PADDED, splits_over, INVALID, "num_splits is 257", P.num_splits = 257)                                           \
    X(PADDED, stride_product_over, INVALID, "q.stride[1]", STRIDE(P.q, 1, INT64_MAX, 1, 1))                            \
    X(PADDED, stride_bytes_over, INVALID, "q.stride[0]", STRIDE(P.q, INT64_MAX / 4 + 1, 1, 1, 1))                      \
    X(PADDED, stride_min, INVALID, "k.stride[1]", STRIDE(P.k, 1, INT64_MIN, 1, 1))                                     \
    X(PADDED, stride_of_one_row_min, INVALID, "either way", P.bias.shape[2] = 1; STRIDE(P.bias, 1, 1, INT64_MIN, 1))   \
    X(PADDED, stride_of_one_row_over, INVALID, "either way", P.bias.shape[2] = 1; STRIDE(P.bias, 1, 1, 1LL << 59, 1))  \
    X(PADDED, stride_reach_over, INVALID, "it reaches over 2^58 bytes", STRIDE(P.q, 1LL << 57, HQ *D, D, 1))           \
    X(PADDED, stride_reach_wraps, INVALID, "it reaches over 2^58 bytes",                                               \
      P.q.shape[1] = 33; STRIDE(P.q, 1, 1LL << 57, D, 1))                                                              \
    X(PADDED, data_at_the_end, INVALID, "leave the address space",                                                     \
      P.q.data = (void *)(UINTPTR_MAX - (sizeof(float) * B * SQ * HQ * D - 1)))                                        \
    X(PADDED, stride_below_zero_address, INVALID, "leave the address space", P.q.data = (void *)64;                    \
      STRIDE(P.q, 1, 1, 1, -1000))                                                                                     \
    X(PADDED, o_broadcast, INVALID, "o.stride[0] is 0", STRIDE(P.o, 0, HQ *DV, DV, 1))                                 \
    X(PADDED, o_rows_interleave, INVALID, "share memory", STRIDE(P.o, SQ *HQ *DV, HQ *DV - 1, DV, 1))                  \
    X(PADDED, o_heads_too_close, INVALID, "o.stride[2] is 5", STRIDE(P.o, SQ *HQ *DV, HQ *DV, DV - 1, 1))              \
    X(PADDED, lse_broadcast, INVALID, "lse.stride", STRIDE(P.lse, 0, 0, 1, 1))                                         \
    X(PADDED, o_is_q, INVALID, "o and q share memory", P.o.data = P.q.data)                                            \
    X(PADDED, o_reaches_v, INVALID, "share memory", P.o.data = AT(P.v.data, 4 * (B * SK * HK * DV - 1)))               \
    X(PADDED, o_in_bias, INVALID, "share memory", P.o.data = AT(P.bias.data, 40))                                      \
    X(PADDED, lse_in_o, INVALID, "share memory", P.lse.data = AT(P.o.data, 8))                                         \
    X(PADDED, lse_in_sinks, INVALID, "share memory", P.lse.data = P.sinks.data)                                        \
    X(PADDED, lse_in_slopes, INVALID, "lse and alibi_slopes", P.lse.data = P.alibi_slopes.data)                        \
    X(VARLEN, lse_at_end_of_cu_q, INVALID, "lse and cu_seqlens_q", P.lse.data = &w->m->cu_q[B])                        \
    X(VARLEN, lse_at_end_of_cu_k, INVALID, "lse and cu_seqlens_k", P.lse.data = &w->m->cu_k[B])                        \
    X(CACHED, lse_at_end_of_used_q, INVALID, "lse and seqused_q", P.lse.data = &w->m->used_q[B - 1])                   \
    X(CACHED, lse_at_end_of_used, INVALID, "lse and seqused_k", P.lse.data = &w->m->used[B - 1]; P.seqused_q = NULL)   \
    X(CACHED, lse_at_end_of_pad, INVALID, "lse and leftpad_k", P.lse.data = &w->m->pad[B - 1])                         \
    X(CACHED, lse_at_end_of_index, INVALID, "lse and cache_batch_idx", P.lse.data = &w->m->index[B - 1])               \
    X(PAGED, lse_at_end_of_table, INVALID, "lse and pages.table", P.lse.data = &w->m->table[B * 2 - 1])                \
    X(SLICED, lse_at_end_of_offsets, INVALID, "lse and slices.offsets", P.lse.data = &w->m->offsets[B])                \
    X(SLICED, lse_at_end_of_slices, INVALID, "lse and slices.list",                                                    \
      P.slices.list = memcpy(w->m->k_cache, w->slice, sizeof w->slice); P.lse.data = &w->m->k_cache[9])                \
    X(FP8, lse_in_descale_q, INVALID, "lse and descale.q",                                                             \
      P.descale.q = TENSOR(w->m->dsinks, 1, 1, 1, 1); P.lse.data = w->m->dsinks)                                       \
    X(FP8, lse_in_descale_k, INVALID, "lse and descale.k", P.descale.k.data = w->m->dsinks; P.lse.data = w->m->dsinks) \
    X(FP8, lse_in_descale_v, INVALID, "lse and descale.v",                                                             \
      P.descale.v = TENSOR(w->m->dsinks, 1, 1, 1, 1); P.lse.data = w->m->dsinks)                                       \
    X(CACHED, lse_in_lengths, INVALID, "seqused_k", P.seqused_k = P.lse.data; P.leftpad_k = NULL;                      \
      memset(P.lse.data, 0, 8))                                                                                        \
    X(PADDED, scale_nan, INVALID, "scale is nan", P.scale = NAN)                                                       \
    X(PADDED, scale_infinite, INVALID, "scale is -inf", P.scale = -INFINITY)                                           \
    X(PADDED, scale_too_large, INVALID, "scale is -2.4e+38", P.scale = -2.4e38f)                                       \
    X(PADDED, softcap_too_small, INVALID, "softcap is 1e-39", P.softcap = 1e-39f)                                      \
    X(PADDED, softcap_nan, INVALID, "softcap is", P.softcap = NAN)                                                     \
    X(PADDED, softcap_negative, INVALID, "softcap is -1", P.softcap = -1.0f)                                           \
    X(PADDED, softcap_infinite, INVALID, "softcap is inf", P.softcap = INFINITY)                                       \
    X(PADDED, dropout_one, INVALID, "dropout.p is 1", P.dropout.p = 1.0f)                                              \
    X(PADDED, dropout_negative, INVALID, "dropout.p", P.dropout.p = -0.1f)                                             \
    X(PADDED, dropout_nan, INVALID, "dropout.p", P.dropout.p = NAN)                                                    \
    X(PADDED, mask_unknown, INVALID, "mask is 3", P.mask = (flash_attn_mask)3)                                         \
    X(PADDED, window_without_mask, INVALID, "window_left is 4", P.window_left = 4)                                     \
    X(PADDED, window_below, INVALID, "window_right is -2", P.mask = FLASH_ATTN_WINDOW; P.window_right = -2)            \
    X(PADDED, bias_heads, INVALID, "bias.shape", P.bias.shape[1] = 3)                                                  \
    X(PADDED, bias_one_key, INVALID, "bias.shape[3] is 1", P.bias.shape[3] = 1)                                        \
    X(PADDED, bias_short, INVALID, "bias.shape", P.bias.shape[3] = 6)                                                  \
    X(PADDED, alibi_heads, INVALID, "alibi_slopes.shape", P.alibi_slopes.shape[1] = 1)                                 \
    X(PADDED, alibi_dtype, INVALID, "alibi_slopes.dtype", P.alibi_slopes.dtype = FLASH_ATTN_F16)                       \
    X(PADDED, sinks_batch, INVALID, "sinks.shape", P.sinks.shape[0] = B)                                               \
    X(PADDED, sinks_heads, INVALID, "sinks.shape", P.sinks.shape[1] = 1)                                               \
    X(PADDED, descale_without_fp8, INVALID, "descale.k", P.descale.k = TENSOR(w->m->slopes, 1, 1, 1, 1))               \
    X(PADDED, pages_without_table, INVALID, "pages.table is NULL", P.pages.pages_per_seq = 2)                          \
    X(PADDED, array_misaligned, INVALID, "is misaligned", P.seqused_k = (void *)AT(w->m->used, 2))                         \
    X(FP8, fp8_out, INVALID, "o.dtype is F8E4M3", P.o.dtype = FLASH_ATTN_F8E4M3)                                       \
    X(FP8, fp8_k_differs, INVALID, "k.dtype", P.k.dtype = FLASH_ATTN_F16)                                              \
    X(FP8, fp8_descale_heads, INVALID, "descale.k.shape", P.descale.k.shape[1] = HQ)                                   \
    X(FP8, fp8_descale_dtype, INVALID, "descale.q.dtype", P.descale.q = TENSOR(w->m->slopes, 1, 1, 1, 1);              \
      P.descale.q.dtype = FLASH_ATTN_BF16)                                                                             \
    X(VARLEN, cu_start, INVALID, "cu_seqlens_q[0] is 1", w->m->cu_q[0] = 1)                                            \
    X(VARLEN, cu_falls, INVALID, "cu_seqlens_q[2] is 2", w->m->cu_q[2] = 2)                                            \
    X(VARLEN, cu_short_of_total, INVALID, "expected the total, 8", w->m->cu_q[2] = 7)                                  \
    X(VARLEN, cu_over_total, INVALID, "cu_seqlens_k[2] is 12", w->m->cu_k[2] = 12)                                     \
    X(VARLEN, cu_negative, INVALID, "cu_seqlens_k[1] is -4", w->m->cu_k[1] = -4)                                       \
    X(VARLEN, cu_wraps, INVALID, "cu_seqlens_q", w->m->cu_q[1] = INT32_MAX)                                            \
    X(VARLEN, cu_over_max, INVALID, "at most max_seqlen_q 4", P.max_seqlen_q = 4)                                      \
    X(VARLEN, cu_k_over_max, INVALID, "at most max_seqlen_k 6", P.max_seqlen_k = 6)                                    \
    X(VARLEN, cu_without_batch, INVALID, "batch is 0", P.batch = 0)                                                    \
    X(VARLEN, cu_two_entries, INVALID, "q.shape[0]", P.q.shape[0] = 2)                                                 \
    X(VARLEN, cu_k_two_entries, INVALID, "k.shape", P.k.shape[0] = P.v.shape[0] = 2)                                   \
    X(VARLEN, cu_with_pages, INVALID, "cu_seqlens_k", P.pages.table = w->m->table; P.pages.pages_per_seq = 1)          \
    X(CACHED, index_into_too_many, INVALID, "k.shape[0] (entries of the cache) is 4294967296",                         \
      P.k.shape[0] = P.v.shape[0] = INT64_C(4294967296))                                                               \
    X(VARLEN, cu_with_index, INVALID, "cache_batch_idx", P.cache_batch_idx = w->m->index)                              \
    X(VARLEN, bias_below_longest, INVALID, "bias.shape[3] is 6, expected at least 7", P.bias.shape[3] = 6)             \
    X(VARLEN, bias_rows_below_longest, INVALID, "bias.shape[2] is 4", P.bias.shape[2] = 4)                             \
    X(VARLEN, cu_cuda_needs_max, INVALID, "max_seqlen_q is 0", P.device.type = FLASH_ATTN_CUDA)                        \
    X(CACHED, used_over, INVALID, "seqused_k[1] is 8", w->m->used[1] = 8)                                              \
    X(CACHED, used_negative, INVALID, "seqused_k[0] is -1", w->m->used[0] = -1)                                        \
    X(CACHED, used_over_max, INVALID, "at most max_seqlen_k 6", P.max_seqlen_k = 6)                                    \
    X(CACHED, used_q_over, INVALID, "seqused_q[0] is 6", w->m->used_q[0] = 6)                                          \
    X(CACHED, leftpad_over, INVALID, "leftpad_k[0] is 4", w->m->pad[0] = 4)                                            \
    X(CACHED, leftpad_negative, INVALID, "leftpad_k[1] is -1", w->m->pad[1] = -1)                                      \
    X(CACHED, index_over, INVALID, "cache_batch_idx[0] is 2", w->m->index[0] = 2)                                      \
    X(CACHED, index_negative, INVALID, "cache_batch_idx[1] is -1", w->m->index[1] = -1)                                \
    X(PAGED, page_over, INVALID, "pages.table[0][0] is 6", w->m->table[0] = PAGES)                                     \
    X(PAGED, page_negative, INVALID, "pages.table[1][1] is -1", w->m->table[3] = -1)                                   \
    X(PAGED, page_needed_by_length, INVALID, "pages.table[0][1] is -1", w->m->used[0] = 5)                             \
    X(PAGED, page_size_zero, INVALID, "k.shape[1] (page_size) is 0", P.k.shape[1] = P.v.shape[1] = 0)                  \
    X(PAGED, pages_negative, INVALID, "pages_per_seq is -1", P.pages.pages_per_seq = -1)                               \
    X(PAGED, pages_over, INVALID, "pages_per_seq is 536870911", P.pages.pages_per_seq = FA_MAX_SEQLEN)                 \
    X(PAGED, pages_just_over, INVALID, "pages_per_seq is 134217728", P.pages.pages_per_seq = 1 << 27)                  \
    X(PAGED, page_stride_small, INVALID, "row_stride is 1", P.pages.row_stride = 1)                                    \
    X(PAGED, page_stride_negative, INVALID, "row_stride is -2", P.pages.row_stride = -2)                               \
    X(PAGED, page_stride_huge, INVALID, "row_stride", P.pages.row_stride = INT64_MAX)                                  \
    X(PAGED, used_over_pages, INVALID, "seqused_k[1] is 9", w->m->used[1] = 9)                                         \
    X(PAGED, pages_with_index, INVALID, "cache_batch_idx", P.cache_batch_idx = w->m->index)                            \
    X(SLICED, slice_count_negative, INVALID, "slices.count is -1", P.slices.count = -1)                                \
    X(SLICED, slice_list_missing, INVALID, "slices.list is NULL", P.slices.list = NULL)                                \
    X(SLICED, slice_offsets_alone, INVALID, "slices.offsets", P.slices.count = 0)                                      \
    X(SLICED, slice_turned, INVALID, "slices.list[0] has q_begin 4 and q_end 3", w->slice[0].q_begin = 4)              \
    X(SLICED, slice_negative, INVALID, "k_begin -1", w->slice[1].k_begin = -1)                                         \
    X(SLICED, slice_over, INVALID, "q_end 6", w->slice[1].q_end = 6)                                                   \
    X(SLICED, slice_over_k, INVALID, "k_end 8", w->slice[1].k_end = 8)                                                 \
    X(PAGED, slice_over_all_pages, INVALID, "k_end 9, expected 0 <= begin <= end <= 8",                                \
      w->slice[0] = ((flash_attn_slice){0, 1, 0, 9, 0}); P.slices.list = w->slice; P.slices.count = 1)                 \
    X(SLICED, slice_kind, INVALID, "slices.list[1].kind is 4", w->slice[1].kind = 4)                                   \
    X(SLICED, slice_kind_negative, INVALID, "slices.list[0].kind is -1", w->slice[0].kind = -1)                        \
    X(SLICED, slice_offsets_start, INVALID, "slices.offsets", w->m->offsets[0] = 1)                                    \
    X(SLICED, slice_offsets_end, INVALID, "slices.offsets", w->m->offsets[2] = 3)                                      \
    X(SLICED, slice_offsets_fall, INVALID, "slices.offsets", w->m->offsets[1] = 3)                                     \
    X(BACKWARD, no_grads, INVALID, "grads is NULL", w->null_grads = true)                                              \
    X(BACKWARD, grads_reserved, INVALID, "grads.reserved", G.reserved[3] = 1)                                          \
    X(BACKWARD, lse_missing, INVALID, "lse.data is NULL", P.lse.data = NULL)                                           \
    X(BACKWARD, dout_missing, INVALID, "grads.dout.data is NULL", G.dout.data = NULL)                                  \
    X(BACKWARD, dout_shape, INVALID, "grads.dout.shape", G.dout.shape[3] = D)                                          \
    X(BACKWARD, dout_dtype, INVALID, "grads.dout.dtype", G.dout.dtype = FLASH_ATTN_F16)                                \
    X(BACKWARD, dq_shape, INVALID, "grads.dq.shape", G.dq = TENSOR(G.dq.data, B, SQ, HQ, DV))                          \
    X(BACKWARD, dk_heads_of_q, INVALID, "grads.dk.shape", G.dk = TENSOR(G.dk.data, B, SK, HQ, D))                      \
    X(BACKWARD, dv_broadcast, INVALID, "grads.dv.stride", STRIDE(G.dv, 0, HK *DV, DV, 1))                              \
    X(BACKWARD, dq_is_q, INVALID, "share memory", G.dq.data = P.q.data)                                                \
    X(BACKWARD, dq_is_dk, INVALID, "grads.dq and grads.dk share memory", G.dk.data = G.dq.data)                        \
    X(BACKWARD, dq_in_o, INVALID, "share memory", G.dq.data = P.o.data)                                                \
    X(BACKWARD, dq_in_lse, INVALID, "grads.dq and lse", G.dq.data = AT(P.lse.data, 4))                                 \
    X(BACKWARD, dk_is_k, INVALID, "grads.dk and k", G.dk.data = P.k.data)                                              \
    X(BACKWARD, dv_is_v, INVALID, "grads.dv and v", G.dv.data = P.v.data)                                              \
    X(BACKWARD, dv_in_dout, INVALID, "grads.dv and grads.dout", G.dv.data = G.dout.data)                               \
    X(BACKWARD, dbias_is_bias, INVALID, "grads.dbias and bias", G.dbias.data = P.bias.data)                            \
    X(BACKWARD, dsinks_is_sinks, INVALID, "grads.dsinks and sinks", G.dsinks.data = P.sinks.data)                      \
    X(BACKWARD, dbias_without_bias, INVALID, "grads.dbias", P.bias = (flash_attn_tensor){0})                           \
    X(BACKWARD, dbias_shape, INVALID, "grads.dbias.shape", G.dbias = TENSOR(G.dbias.data, 1, HQ, SQ, SK))              \
    X(BACKWARD, dsinks_without_sinks, INVALID, "grads.dsinks", P.sinks = (flash_attn_tensor){0})                       \
    X(BACKWARD, dsinks_dtype, INVALID, "grads.dsinks.dtype", G.dsinks.dtype = FLASH_ATTN_F16)                          \
    X(BACKWARD, paged_backward, UNSUPPORTED, "pages.table", P.pages.table = w->m->table; P.pages.pages_per_seq = 2)    \
    X(BACKWARD, index_backward, UNSUPPORTED, "cache_batch_idx", P.cache_batch_idx = w->m->index)                       \
    X(BACKWARD, fp8_backward, UNSUPPORTED, "F8E4M3", P.q.dtype = P.k.dtype = P.v.dtype = FLASH_ATTN_F8E4M3)            \
    X(APPEND, append_null, INVALID, "append is NULL", w->null_problem = true)                                          \
    X(APPEND, append_nothing, INVALID, "nothing to do", A.k_new.data = A.v_new.data = A.q.data = A.q_out.data = NULL)  \
    X(APPEND, append_reserved, INVALID, "append.reserved", A.reserved[0] = 1)                                          \
    X(APPEND, append_threads_negative, INVALID, "num_threads is -1", w->e.num_threads = -1)                            \
    X(APPEND, rotary_reserved, INVALID, "rotary.reserved", A.rotary.reserved[1] = 1)                                   \
    X(APPEND, append_overflow, INVALID, "do not fit", w->m->held[1] = 7)                                               \
    X(APPEND, append_held_negative, INVALID, "cache_seqlens[0] is -1", w->m->held[0] = -1)                             \
    X(APPEND, append_index_twice, INVALID, "same rows", w->m->index[0] = 0)                                            \
    X(APPEND, append_index_over, INVALID, "cache_batch_idx[0] is 2", w->m->index[0] = 2)                               \
    X(APPEND, append_index_with_pages, INVALID, "cache_batch_idx", A.pages.table = w->m->table)                        \
    X(APPEND, append_leftpad_over, INVALID, "leftpad_k[0] is 4", A.leftpad_k = w->m->pad; w->m->pad[0] = 4)            \
    X(APPEND, append_without_v, INVALID, "v_new", A.v_new.data = NULL)                                                 \
    X(APPEND, append_without_k, INVALID, "k_new", A.k_new.data = NULL)                                                 \
    X(APPEND, append_without_cache, INVALID, "v_cache.data is NULL", A.v_cache.data = NULL)                            \
    X(APPEND, append_cache_dtype, INVALID, "k_cache.dtype", A.k_cache.dtype = FLASH_ATTN_BF16)                         \
    X(APPEND, append_cache_heads, INVALID, "k_cache.shape", A.k_cache.shape[2] = 1)                                    \
    X(APPEND, append_cache_capacity_differs, INVALID, "v_cache.shape", A.v_cache.shape[1] = 7)                         \
    X(APPEND, append_cache_broadcast, INVALID, "k_cache.stride", STRIDE(A.k_cache, 0, HK *D, D, 1))                    \
    X(APPEND, append_k_in_cache, INVALID, "share memory", A.k_new.data = A.k_cache.data)                               \
    X(APPEND, append_v_in_cache, INVALID, "v_cache and v_new", A.v_new.data = A.v_cache.data)                          \
    X(APPEND, append_cos_in_q_out, INVALID, "q_out and rotary.cos", A.rotary.cos.data = AT(A.q_out.data, 8))           \
    X(APPEND, append_sin_in_q_out, INVALID, "q_out and rotary.sin", A.rotary.sin.data = AT(A.q_out.data, 8))           \
    X(APPEND, append_lengths_in_cache, INVALID, "k_cache and cache_seqlens", A.cache_seqlens = A.k_cache.data)         \
    X(APPEND, append_index_in_cache, INVALID, "k_cache and cache_batch_idx", A.cache_batch_idx = A.k_cache.data)       \
    X(APPEND, append_pad_in_cache, INVALID, "v_cache and leftpad_k", A.leftpad_k = A.v_cache.data)                     \
    X(APPEND, append_q_out_shifted, INVALID, "share memory", A.q_out.data = AT(A.q.data, 4))                           \
    X(APPEND, append_q_out_alone, INVALID, "q.data is NULL", A.q.data = NULL)                                          \
    X(APPEND, append_q_out_missing, INVALID, "q_out.data is NULL", A.q_out.data = NULL)                                \
    X(APPEND, append_q_batch, INVALID, "q.shape", A.q.shape[0] = 1)                                                    \
    X(APPEND, rotary_sin_missing, INVALID, "rotary.sin", A.rotary.sin.data = NULL)                                     \
    X(APPEND, rotary_sin_shape, INVALID, "rotary.sin.shape", A.rotary.sin.shape[0] = 15)                               \
    X(APPEND, rotary_too_wide, INVALID, "half of head_dim", A.rotary.cos.shape[1] = A.rotary.sin.shape[1] = 5)         \
    X(APPEND, rotary_without_positions, INVALID, "rotary.cos.shape[0] is 0",                                           \
      A.rotary.cos.shape[0] = A.rotary.sin.shape[0] = 0)                                                               \
    X(APPEND, append_array_misaligned, INVALID, "cache_seqlens", A.cache_seqlens = (void *)AT(A.cache_seqlens, 2))     \
    X(APPEND, rotary_too_short, INVALID, "rotary.cos.shape[0] is 10",                                                  \
      A.rotary.cos.shape[0] = A.rotary.sin.shape[0] = 10)                                                              \
    X(APPEND, rotary_dtype, INVALID, "rotary.cos.dtype", A.rotary.cos.dtype = FLASH_ATTN_F16)                          \
    X(APPEND_PAGED, append_page_over, INVALID, "pages.table[1][1] is 6", w->m->table[3] = 6)                           \
    X(APPEND_PAGED, append_table_in_cache, INVALID, "v_cache and pages.table", A.pages.table = A.v_cache.data)         \
    X(APPEND_PAGED, append_page_twice, INVALID, "same rows", w->m->table[1] = 0; w->m->held[0] = 5)                    \
    X(APPEND_PAGED, append_page_twice_in_one, INVALID, "same rows", w->m->held[0] = 0; A.k_new.shape[1] = 2;           \
      A.k_cache.shape[1] = A.v_cache.shape[1] = 1; w->m->held[1] = 0; w->m->table[0] = w->m->table[1])                 \
    X(APPEND_PAGED, append_pages_overflow, INVALID, "do not fit", w->m->held[0] = 7)                                   \
    X(APPEND, append_heads_over, INVALID, "k_new.shape[2] (heads) is 4294967296",                                      \
      A.k_new.shape[2] = A.v_new.shape[2] = A.k_cache.shape[2] = A.v_cache.shape[2] = 1LL << 32)                       \
    X(APPEND, append_batch_heads_over, INVALID, "q has batch 2 times heads 1073741824", A.q.shape[2] = 1 << 30)        \
    X(APPEND, append_q_head_dim_over, INVALID, "q.shape[3] (head_dim) is 2147483648",                                  \
      A.k_new.data = A.v_new.data = NULL; A.q.shape[3] = 1LL << 31)                                                    \
    X(APPEND, rotary_positions_over, INVALID, "rotary.cos.shape[0] (positions) is 2147483648",                         \
      A.rotary.cos.shape[0] = A.rotary.sin.shape[0] = 1LL << 31)                                                       \
    X(APPEND_PAGED, append_page_size_zero, INVALID, "(page_size) is 0", A.k_cache.shape[1] = A.v_cache.shape[1] = 0)   \
    X(APPEND_PAGED, append_page_size_over, INVALID, "(page_size) is 9223372036854775807",                              \
      A.k_cache.shape[0] = A.v_cache.shape[0] = 0; A.k_cache.shape[1] = A.v_cache.shape[1] = INT64_MAX;                \
      STRIDE(A.k_cache, 1, 1, 1, 1); STRIDE(A.v_cache, 1, 1, 1, 1))                                                    \
    X(MERGE, merge_parts_null, INVALID, "parts is NULL", w->null_problem = true)                                       \
    X(MERGE, merge_result_null, INVALID, "result is NULL", w->null_grads = true)                                       \
    X(MERGE, merge_none, INVALID, "num_parts is 0", w->num_parts = 0)                                                  \
    X(MERGE, merge_device, INVALID, "device.type", A.device.type = (flash_attn_device_type)5)                          \
    X(MERGE, merge_shapes_differ, INVALID, "parts[1].o.shape", w->part[1].o.shape[1] = 4)                              \
    X(MERGE, merge_extent_over, INVALID, "parts[0].o.shape[0] is 2147483648", w->part[0].o.shape[0] = 1LL << 31)       \
    X(MERGE, merge_lse_shape, INVALID, "parts[0].lse.shape", w->part[0].lse.shape[2] = 4)                              \
    X(MERGE, merge_lse_missing, INVALID, "parts[1].lse.data", w->part[1].lse.data = NULL)                              \
    X(MERGE, merge_fp8, INVALID, "parts[0].o.dtype", w->part[0].o.dtype = FLASH_ATTN_F8E4M3)                           \
    X(MERGE, merge_into_second, INVALID, "parts[1].o", w->result.o.data = w->part[1].o.data)                           \
    X(MERGE, merge_shifted, INVALID, "parts[0].o", w->result.o.data = AT(w->part[0].o.data, 4))                        \
    X(MERGE, merge_crossed, INVALID, "share memory", w->result.lse.data = w->result.o.data)

#define DEFINE(kind, name, status, word, ...)                                                                          \
    static void change_##name(world *w) { __VA_ARGS__; }
MUTATIONS(DEFINE)

typedef struct mutation {
    base              kind;
    const char       *name;
    flash_attn_status status;
    const char       *word;
    void (*change)(world *);
} mutation;

static const mutation mutations[] = {
#define ROW(kind, name, status, word, ...) {kind, #name, FLASH_ATTN_##status, word, change_##name},
    MUTATIONS(ROW)};

/* Prints what is wrong; the number of faults. */
static int faults_of_mutation(const mutation *row, flash_attn_device_type device)
{
    static memory used, before;
    world         w = {.m = &used};
    set_world(&w, row->kind, device);
    row->change(&w);
    before                   = used;
    flash_attn_status status = call(&w, row->kind);
    if (status != row->status || !strstr(flash_attn_last_error(), row->word))
        return print_error("%s: status %d (%s), expected %d and \"%s\"\n", row->name, status,
                           status ? flash_attn_last_error() : "ok", row->status, row->word),
               1;
    if (memcmp(&before, &used, sizeof used) != 0)
        return print_error("%s: refused, but memory was written\n", row->name), 1;
    return 0;
}

static void check_valid(base kind, flash_attn_device_type device)
{
    static memory used;
    world         w = {.m = &used};
    set_world(&w, kind, device);
    flash_attn_status status = call(&w, kind);
    if (status != FLASH_ATTN_OK)
        fail_msg("valid problem %d on device %d: %d, %s", kind, device, status, flash_attn_last_error());
}

static void bad_input_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    const flash_attn_device_type devices[] = {FLASH_ATTN_CPU, FLASH_ATTN_REFERENCE};
    int                          faults    = 0;
    for (int n = 0; n < 2; n++)
        for (size_t i = 0; i < sizeof mutations / sizeof *mutations; i++)
            faults += faults_of_mutation(&mutations[i], devices[n]);
    assert_int_equal(faults, 0);
}

static void next_call_works_after_each_refusal(void **state)
{
    (void)state;
    for (base kind = PADDED; kind <= MERGE; kind++) {
        check_valid(kind, FLASH_ATTN_CPU);
        check_valid(kind, FLASH_ATTN_REFERENCE);
    }
    for (size_t i = 0; i < sizeof mutations / sizeof *mutations; i++) {
        assert_int_equal(faults_of_mutation(&mutations[i], FLASH_ATTN_CPU), 0);
        check_valid(mutations[i].kind, FLASH_ATTN_CPU);
    }
}

/* A plan looks at shapes and options as a call does, though it reads no data. */
static void plans_refuse_what_calls_refuse(void **state)
{
    (void)state;
    static memory used;
    world         w = {.m = &used};
    size_t        bytes;
    set_world(&w, PADDED, FLASH_ATTN_CPU);
    w.p.q.data = w.p.k.data = w.p.v.data = w.p.o.data = w.p.lse.data = w.p.bias.data = NULL;
    assert_int_equal(flash_attn_prepare(NULL, &w.p, FLASH_ATTN_FORWARD), FLASH_ATTN_OK);
    assert_int_equal(flash_attn_prepare(NULL, &w.p, FLASH_ATTN_BACKWARD), FLASH_ATTN_OK);
    assert_int_equal(flash_attn_prepare(NULL, &w.p, (flash_attn_pass)2), FLASH_ATTN_INVALID);
    assert_int_equal(flash_attn_workspace_size(NULL, &w.p, FLASH_ATTN_FORWARD, NULL), FLASH_ATTN_INVALID);
    assert_int_equal(flash_attn_explain(NULL, &w.p, FLASH_ATTN_FORWARD, NULL), FLASH_ATTN_INVALID);
    w.p.bias.shape[1] = 3;
    bytes             = 77;
    assert_int_equal(flash_attn_workspace_size(NULL, &w.p, FLASH_ATTN_FORWARD, &bytes), FLASH_ATTN_INVALID);
    assert_non_null(strstr(flash_attn_last_error(), "bias.shape"));
    assert_int_equal(bytes, 77);
}

/* Any words in place of fields: a plan, which reads no memory but the problem itself, answers or refuses. Pointers that
 * are read (slices) and the bool, which C cannot hold other values of, stay. */
static void a_plan_of_garbage_is_answered_or_refused(void **state)
{
    (void)state;
    static const int64_t words[] = {0,         1,         -1,        2,         3,         7,        8,
                                    64,        576,       577,       41,        -8,        4,        INT32_MAX,
                                    INT32_MIN, INT64_MAX, INT64_MIN, 1LL << 29, 1LL << 33, 1LL << 40};
    static memory        used;
    uint64_t             random   = 99;
    int                  answered = 0, refused = 0;
    for (int n = 0; n < 200000; n++) {
        world w = {.m = &used};
        set_world(&w, (base)(n % (FP8 + 1)), FLASH_ATTN_CPU);
        flash_attn_problem keep = w.p;
        for (int changes = 1 + n % 4; changes > 0; changes--) {
            random       = random * 6364136223846793005u + 1442695040888963407u;
            size_t where = (size_t)(random >> 33) % (sizeof w.p / 4);
            memcpy((char *)&w.p + 4 * where, &words[(random >> 20) % (sizeof words / sizeof *words)],
                   where + 1 < sizeof w.p / 4 && (random >> 60) % 2 ? 8 : 4);
        }
        w.p.slices        = keep.slices;
        w.p.deterministic = false;
        for (flash_attn_pass pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
            size_t            bytes  = 0;
            flash_attn_status status = flash_attn_workspace_size(NULL, &w.p, pass, &bytes);
            answered += status == FLASH_ATTN_OK;
            refused += status == FLASH_ATTN_INVALID || status == FLASH_ATTN_UNSUPPORTED;
            assert_true(bytes <= (size_t)1 << 60);
        }
    }
    assert_true(answered > 10000 && refused > 10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_input_is_refused_and_changes_nothing),
        cmocka_unit_test(next_call_works_after_each_refusal),
        cmocka_unit_test(plans_refuse_what_calls_refuse),
        cmocka_unit_test(a_plan_of_garbage_is_answered_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
