/* What the backward's tiles have added up, to the caller's dQ, dK and dV. */
#include "cpu/backward.h"

/* Rows of a gradient: `sums` of composed steps, or `tiled` of fused ones. */
static void store_sums(const plan *p, const flash_attn_tensor *grad, char *at, int rows, const float *sums,
                       const float *tiled, bool turned, float factor)
{
    int            cols = (int)grad->shape[3];
    int64_t        step = grad->stride[1] * (int64_t)fa_dtype_bytes(grad->dtype);
    fa_stored_rows to   = {at, step, grad->stride[3], rows, cols, grad->dtype, factor, true};
    if (p->fused)
        p->kernels->store_tiled(&to, tiled, turned);
    for (int n = 0; n < rows && !p->fused; n++)
        p->kernels->store(at + n * step, grad->stride[3], grad->dtype, sums + n * fa_accumulator_ld(cols), cols,
                          factor);
}

void fa_backward_store_dq(const plan *p, const fa_tile *tile, const query_tile *t, float scale)
{
    const flash_attn_tensor *dq = &p->call->dq;
    char                    *at = fa_at(dq, tile->seq.q_entry, tile->seq.q_row + tile->queries.begin, tile->head, 0);
    store_sums(p, dq, at, fa_tile_queries(tile), t->dq, t->dq_tiled, true, scale);
}

/* Sums of parts that no query saw. */
static void clear_fresh_parts(const plan *p, scratch *s, int keys)
{
    for (int begin = 0; p->fused && begin < keys; begin += p->kernels->part_keys) {
        int count = fa_min_int(p->kernels->part_keys, keys - begin);
        if (!(s->fresh_parts >> begin / p->kernels->part_keys & 1))
            continue;
        memset(s->dk_tiled + fa_tiled_at(p->ldq, begin, 0), 0, sizeof(float) * (size_t)fa_tiled_floats(count, p->ldq));
        memset(s->dv_tiled + fa_tiled_at(p->ldv, begin, 0), 0, sizeof(float) * (size_t)fa_tiled_floats(count, p->ldv));
    }
}

/* Keys [begin, end) of grad: zeros. */
static void store_zeros(const plan *p, const flash_attn_tensor *grad, const fa_tile *tile, int begin, int end,
                        float *zeros)
{
    if (!grad->data)
        return;
    memset(zeros, 0, sizeof(float) * (size_t)grad->shape[3]);
    for (int j = begin; j < end; j++)
        p->kernels->store(fa_kv_at(p->call, grad, &tile->seq, tile->b, j, tile->head_k), grad->stride[3], grad->dtype,
                          zeros, (int)grad->shape[3], 1.0f);
}

/* The tile's keys of grad: its sums times factor. A backward has no pages, so they lie at equal distances. */
static void store_keys_of(const plan *p, const flash_attn_tensor *grad, const fa_tile *tile, const float *sums,
                          const float *tiled, float factor)
{
    if (grad->data)
        store_sums(p, grad, fa_kv_at(p->call, grad, &tile->seq, tile->b, tile->keys.begin, tile->head_k),
                   fa_tile_keys(tile), sums, tiled, false, factor);
}

void fa_backward_store_unused_keys(const plan *p, const fa_tile *tile, float *zeros)
{
    const fa_sequence *seq   = &tile->seq;
    int                begin = fa_min_int(seq->key_begin, seq->rows_k), end = fa_max_int(seq->seqlen_k, begin);
    store_zeros(p, &p->call->dk, tile, 0, begin, zeros);
    store_zeros(p, &p->call->dk, tile, end, seq->rows_k, zeros);
    store_zeros(p, &p->call->dv, tile, 0, begin, zeros);
    store_zeros(p, &p->call->dv, tile, end, seq->rows_k, zeros);
}

void fa_backward_store_keys(const plan *p, const fa_tile *tile, scratch *s, float scale, fa_scales times)
{
    clear_fresh_parts(p, s, fa_tile_keys(tile));
    store_keys_of(p, &p->call->dk, tile, s->dk, s->dk_tiled, ldexpf(scale, -times.ds_log2));
    store_keys_of(p, &p->call->dv, tile, s->dv, s->dv_tiled, ldexpf(1.0f, -times.p_log2));
}
