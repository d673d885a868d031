/* Merge and append over host memory: plain loops, any strides and dtypes. What they are given is checked. */
#include "call.h"

/* ---- merge ---- */

#define MERGE_BLOCK 64 /* columns accumulated at once, so that a part's weight is computed once for all of them */

/* log sum exp over the parts of one row; -inf if all are empty. Without LSE: 0, so that each weighs 1. */
static double merged_lse(const flash_attn_partial *parts, int32_t num_parts, int64_t b, int64_t h, int64_t i)
{
    double highest = -INFINITY, sum = 0.0;
    if (num_parts > 0 && !parts->lse.data)
        return 0.0;
    for (int32_t n = 0; n < num_parts; n++) {
        float lse = *(const float *)fa_at(&parts[n].lse, b, h, i, 0);
        if (isnan(lse))
            return (double)NAN;
        highest = lse > highest ? lse : highest;
    }
    if (highest == -INFINITY)
        return -INFINITY;
    for (int32_t n = 0; n < num_parts; n++)
        sum += exp(*(const float *)fa_at(&parts[n].lse, b, h, i, 0) - highest);
    return highest + log(sum);
}

/* Columns [begin, end) of one row. All parts are read before the result is written, which may be parts[0]. */
static void merge_columns(const flash_attn_partial *parts, int32_t num_parts, const flash_attn_tensor *o, double lse,
                          int64_t b, int64_t h, int64_t i, int64_t begin, int64_t end)
{
    double sum[MERGE_BLOCK] = {0};
    for (int32_t n = 0; n < num_parts; n++) {
        float own = parts[n].lse.data ? *(const float *)fa_at(&parts[n].lse, b, h, i, 0) : 0.0f;
        if (own == -INFINITY)
            continue; /* its o may hold anything */
        double           weight = exp(own - lse);
        const char      *row    = fa_at(&parts[n].o, b, i, h, 0);
        int64_t          stride = parts[n].o.stride[3];
        flash_attn_dtype dtype  = parts[n].o.dtype;
        for (int64_t c = begin; c < end; c++)
            sum[c - begin] += weight * fa_load(row, c * stride, dtype);
    }
    char *row = fa_at(o, b, i, h, 0);
    for (int64_t c = begin; c < end; c++)
        fa_store(row, c * o->stride[3], o->dtype, (float)sum[c - begin]);
}

void fa_host_merge(const flash_attn_partial *parts, int32_t num_parts, const flash_attn_partial *result)
{
    const flash_attn_tensor *o = &result->o;
    for (int64_t b = 0; b < o->shape[0]; b++)
        for (int64_t h = 0; h < o->shape[2]; h++)
            for (int64_t i = 0; i < o->shape[1]; i++) {
                double lse = merged_lse(parts, num_parts, b, h, i);
                for (int64_t c = 0; c < o->shape[3]; c += MERGE_BLOCK) {
                    int64_t end = c + MERGE_BLOCK < o->shape[3] ? c + MERGE_BLOCK : o->shape[3];
                    merge_columns(parts, num_parts, o, lse, b, h, i, c, end);
                }
                if (result->lse.data)
                    *(float *)fa_at(&result->lse, b, h, i, 0) = (float)lse;
            }
}

/* ---- append ---- */

/* Elements [begin, end) of a row, bit by bit. `to` may be `from`. */
static void copy_elements(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t begin,
                          int64_t end, flash_attn_dtype dtype)
{
    size_t bytes = fa_dtype_bytes(dtype);
    if (to_stride == 1 && from_stride == 1) {
        memmove(to + begin * (int64_t)bytes, from + begin * (int64_t)bytes, (size_t)(end - begin) * bytes);
        return;
    }
    for (int64_t c = begin; c < end; c++)
        memmove(to + c * to_stride * (int64_t)bytes, from + c * from_stride * (int64_t)bytes, bytes);
}

/* One head's row at `position`, rotated if there are tables. */
static void append_row(char *to, const flash_attn_tensor *to_view, const char *from, const flash_attn_tensor *from_view,
                       const flash_attn_rotary *rotary, int64_t position)
{
    flash_attn_dtype dtype = from_view->dtype;
    int64_t          half  = rotary && rotary->cos.data ? rotary->cos.shape[1] : 0;
    for (int64_t c = 0; c < half; c++) {
        int64_t first = rotary->interleaved ? 2 * c : c, second = rotary->interleaved ? 2 * c + 1 : c + half;
        double  cosine = fa_load(fa_at(&rotary->cos, position, c, 0, 0), 0, rotary->cos.dtype);
        double  sine   = fa_load(fa_at(&rotary->sin, position, c, 0, 0), 0, rotary->sin.dtype);
        double  x      = fa_load(from, first * from_view->stride[3], dtype);
        double  y      = fa_load(from, second * from_view->stride[3], dtype);
        fa_store(to, first * to_view->stride[3], dtype, (float)(x * cosine - y * sine));
        fa_store(to, second * to_view->stride[3], dtype, (float)(x * sine + y * cosine));
    }
    copy_elements(to, to_view->stride[3], from, from_view->stride[3], 2 * half, from_view->shape[3], dtype);
}

/* Where key `position` of sequence b lies in a cache. */
static char *cache_at(const flash_attn_append *append, const flash_attn_tensor *cache, int64_t b, int64_t position,
                      int64_t h)
{
    if (append->pages.table) {
        int64_t page_size = cache->shape[1];
        int64_t page      = append->pages.table[b * append->pages.row_stride + position / page_size];
        return fa_at(cache, page, position % page_size, h, 0);
    }
    return fa_at(cache, append->cache_batch_idx ? append->cache_batch_idx[b] : b, position, h, 0);
}

void fa_host_append(const flash_attn_append *append)
{
    const flash_attn_tensor *k = &append->k_new, *v = &append->v_new, *q = &append->q;
    int64_t                  batch = k->data ? k->shape[0] : q->shape[0];
    for (int64_t b = 0; b < batch; b++) {
        int64_t held = append->cache_seqlens ? append->cache_seqlens[b] : 0;
        int64_t turn = held - (append->leftpad_k ? append->leftpad_k[b] : 0); /* rotary position of the first new row */
        for (int64_t t = 0; k->data && t < k->shape[1]; t++)
            for (int64_t h = 0; h < k->shape[2]; h++) {
                append_row(cache_at(append, &append->k_cache, b, held + t, h), &append->k_cache, fa_at(k, b, t, h, 0),
                           k, &append->rotary, turn + t);
                append_row(cache_at(append, &append->v_cache, b, held + t, h), &append->v_cache, fa_at(v, b, t, h, 0),
                           v, NULL, 0);
            }
        for (int64_t i = 0; q->data && i < q->shape[1]; i++)
            for (int64_t h = 0; h < q->shape[2]; h++)
                append_row(fa_at(&append->q_out, b, i, h, 0), &append->q_out, fa_at(q, b, i, h, 0), q, &append->rotary,
                           append->q_at_end ? turn : turn + i);
    }
}
