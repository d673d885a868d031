/* P and dS of one tile, recomputed from the forward's LSE. */
#include "cpu/gradient.h"

void fa_fill_delta(const fa_kernels *kernels, const fa_call *call, float *delta, const fa_sequence *seq, int64_t head,
                   fa_range queries, const void **row_o, const void **row_dout)
{
    fa_tile tile = {.seq = *seq, .head = head, .heads = 1, .queries = queries};
    fa_rows o    = fa_query_rows(call, &call->o, &tile, row_o);
    fa_rows dout = fa_query_rows(call, &call->dout, &tile, row_dout);
    kernels->row_dots(fa_delta_at(call, delta, seq, head, queries.begin), &o, &dout);
}

void fa_gather_rows(const fa_call *call, float *delta, const fa_tile *tile, float scale, float *row_lse,
                    float *row_lse_log2, float *row_delta)
{
    double to_log2 = fa_has_options(call, scale) ? (double)FA_LOG2_E : (double)(scale * FA_LOG2_E) / (double)scale;
    for (int r = 0; r < fa_tile_queries(tile); r++) {
        int     i       = tile->queries.begin + r;
        int64_t row     = tile->seq.q_row + i;
        float   lse     = *(const float *)fa_at(&call->lse, tile->seq.q_entry, tile->head, row, 0);
        row_lse[r]      = lse == -INFINITY ? INFINITY : lse;
        row_lse_log2[r] = (float)((double)row_lse[r] * to_log2);
        row_delta[r]    = *fa_delta_at(call, delta, &tile->seq, tile->head, i);
    }
}

/* All of [0, count) but `keys` numbers from `first` on. */
static void clear_but(float *row, int first, int keys, int count)
{
    memset(row, 0, sizeof(float) * (size_t)first);
    memset(row + first + keys, 0, sizeof(float) * (size_t)(count - first - keys));
}

/* Keys that no row of a part sees are left out of its products, and 0 in P and dS. */
const float *fa_score_gradient(const fa_tile_gradient *t)
{
    const fa_kernels *k       = t->kernels;
    const fa_call    *call    = t->call;
    int               at_once = fa_rows_at_once(k, call, t->tile, t->visible, t->scale), all = fa_tile_rows(t->tile);
    int               all_keys = fa_tile_keys(t->tile), padded = (int)fa_round_up(all_keys, k->key_step);
    float             scale   = fa_has_options(call, t->scale) ? 1.0f : t->scale;
    const float      *p_of_dv = t->p;
    for (int row = 0; row < all; row += at_once) {
        fa_tile     tile;
        fa_visible  visible = fa_part_of_tile(k, call, t->tile, t->visible, row, at_once, &tile);
        int         first = tile.keys.begin - t->tile->keys.begin;
        int         rows = fa_tile_rows(&tile), keys = visible == FA_VISIBLE_NONE ? 0 : fa_tile_keys(&tile);
        const void *q    = fa_packed_part(k, FA_ROLE_Q, t->q, row, call->head_dim);
        const void *dout = fa_packed_part(k, FA_ROLE_DO, t->dout, row, call->head_dim_v);
        float      *p = t->p + (int64_t)row * t->ld, *ds = t->ds + (int64_t)row * t->ld;
        if (keys > 0) {
            k->scores(p + first, t->ld, q, fa_packed_part(k, FA_ROLE_K, t->k, first, call->head_dim), rows, keys, (int)call->head_dim);
            fa_apply_options(k, call, &tile, visible, t->scale, p + first, t->slope, t->ld);
            if (!t->packed)
                k->probabilities(p + first, t->ld, rows, keys, scale, t->lse + row);
            k->scores(ds + first, t->ld, dout, fa_packed_part(k, FA_ROLE_V_T, t->v_t, first, call->head_dim_v), rows, keys, (int)call->head_dim_v);
            if (call->dropout.threshold) { /* the whole tile at once */
                memcpy(t->dropped, p, sizeof(float) * (size_t)rows * (size_t)t->ld);
                fa_apply_dropout(k, call, &tile, t->dropped, ds, t->ld);
                p_of_dv = t->dropped;
            }
            if (!t->packed)
                k->gradient(p + first, ds + first, t->ld, rows, keys, t->delta + row);
        }
        if (t->packed)
            k->gradient_packed(p, ds, t->ld, rows, (fa_range){first, first + keys}, all_keys, scale, t->lse + row, t->delta + row);
        for (int r = 0; r < rows && keys < all_keys && !t->packed; r++) {
            clear_but(p + (int64_t)r * t->ld, first, keys, padded);
            clear_but(ds + (int64_t)r * t->ld, first, keys, padded);
        }
    }
    return p_of_dv;
}

void fa_softcap_gradient(const fa_tile_gradient *t)
{
    if (!(t->call->softcap > 0.0f))
        return;
    int rows = fa_tile_rows(t->tile), keys = fa_tile_keys(t->tile);
    for (int r = 0; r < rows; r++) {
        float       *ds    = t->ds + (int64_t)r * t->ld;
        const float *slope = t->slope + (int64_t)r * t->ld;
        for (int n = 0; n < keys; n++) /* the slope of a masked pair may be NaN */
            ds[n] = ds[n] == 0.0f ? 0.0f : ds[n] * slope[n];
    }
}

float fa_dot_of_nonzero(const fa_rows *a, const fa_rows *b, int row)
{
    float sum = 0.0f;
    for (int col = 0; col < a->cols; col++) {
        float x = fa_load(a->row[row], col * a->stride, a->dtype);
        sum += x == 0.0f ? 0.0f : x * fa_load(b->row[row], col * b->stride, b->dtype);
    }
    return sum;
}
