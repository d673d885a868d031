/* The end of Algorithm 1, lines 12 to 15: a tile's sums to the caller's O and LSE. */
#include "cpu/forward.h"
#include "cpu/split.h"

/* m is scores times a float32 multiplier, so what takes it back is that multiplier's own inverse and not ln 2: large
 * scores would feel the difference. A NaN row has m = -inf, and l = NaN. */
static float natural_lse(float m, float l, double to_natural)
{
    return l == 0.0f ? -INFINITY : (float)((double)m * to_natural + (double)logf(l));
}

/* Sums to which the sink belongs, and what O is then to be multiplied with. */
static void add_sink(const block *b, int64_t head, float *m, float *l, float *factor, int rows)
{
    const flash_attn_tensor *sinks = &b->run->plan.call->sinks;
    float                    sink  = fa_load(fa_at(sinks, 0, head, 0, 0), 0, sinks->dtype) / (float)b->to_natural;
    for (int r = 0; r < rows; r++) {
        float max = sink > m[r] ? sink : m[r], shift = max == -INFINITY ? 0.0f : max, times = exp2f(m[r] - shift);
        l[r] = l[r] * times + exp2f(sink - shift);
        m[r] = max;
        factor[r] *= times;
    }
}

static void store_rows(const fa_kernels *k, const fa_stored_rows *to, const float *from, int ld, const float *factor)
{
    if (k->store_rows) {
        k->store_rows(to, from, ld, factor);
        return;
    }
    for (int r = 0; r < to->rows; r++)
        k->store(to->at + r * to->step, to->stride, to->dtype, from + (int64_t)r * ld, to->cols, factor[r]);
}

static void store_lse(const block *b, float *lse, int64_t stride, const float *m, const float *l, int rows)
{
    const fa_kernels *k = b->shape->kernels;
    float             own[16];
    for (int first = 0; first < rows; first += 16) {
        int    count = fa_min_int(16, rows - first);
        float *at    = stride == 1 ? lse + first : own;
        for (int r = 0; r < count && !k->natural_lse; r++)
            at[r] = natural_lse(m[first + r], l[first + r], b->to_natural);
        if (k->natural_lse)
            k->natural_lse(at, m + first, l + first, count, b->to_natural);
        for (int r = 0; r < count && stride != 1; r++)
            lse[(first + r) * stride] = own[r];
    }
}

/* Algorithm 1, lines 12 to 15: add the sink, divide by l, store. */
void fa_forward_store_tile(const block *b, int t, const fa_partial *result)
{
    const fa_call *call    = b->run->plan.call;
    const fa_tile *tile    = &b->s->tiles[t];
    int            rows    = fa_tile_queries(tile);
    int64_t        row     = tile->seq.q_row + tile->queries.begin;
    float          descale = 1.0f, *factor = b->s->rescale;
    if (call->descale_v.data)
        descale = *(const float *)fa_at(&call->descale_v, tile->b, tile->head_k, 0, 0);
    for (int h = 0; h < tile->heads; h++) {
        float *m = result->m + h * rows, *l = result->l + h * rows;
        for (int r = 0; r < rows; r++)
            factor[r] = descale;
        if (call->sinks.data)
            add_sink(b, tile->head + h, m, l, factor, rows);
        for (int r = 0; r < rows; r++)
            factor[r] = l[r] == 0.0f ? 0.0f : factor[r] / l[r];
        fa_stored_rows to = {.at          = fa_at(&call->o, tile->seq.q_entry, row, tile->head + h, 0),
                             .step        = call->o.stride[1] * (int64_t)fa_dtype_bytes(call->o.dtype),
                             .stride      = call->o.stride[3],
                             .rows        = rows,
                             .cols        = (int)call->head_dim_v,
                             .dtype       = call->o.dtype,
                             /* O of few rows is soon read, however many keys it took */
                             .past_caches = b->run->plan.past_caches && !b->shape->few};
        store_rows(b->shape->kernels, &to, result->o + (int64_t)h * rows * result->ldo, result->ldo, factor);
        if (call->lse.data)
            store_lse(b, (float *)fa_at(&call->lse, tile->seq.q_entry, tile->head + h, row, 0), call->lse.stride[2], m,
                      l, rows);
    }
}

/* Rows that belong to the sequence but do not count: output 0, LSE -inf. */
void fa_forward_store_unused_rows(const block *b)
{
    const fa_call     *call = b->run->plan.call;
    const fa_sequence *seq  = &b->at.seq;
    for (int64_t h = 0; h < call->group; h++) {
        int64_t head = b->at.head_k * call->group + h;
        for (int i = seq->seqlen_q; i < seq->rows_q; i++) {
            char *o = fa_at(&call->o, seq->q_entry, seq->q_row + i, head, 0);
            for (int64_t c = 0; c < call->head_dim_v; c++)
                fa_store(o, c * call->o.stride[3], call->o.dtype, 0.0f);
            if (call->lse.data)
                *(float *)fa_at(&call->lse, seq->q_entry, head, seq->q_row + i, 0) = -INFINITY;
        }
    }
}
