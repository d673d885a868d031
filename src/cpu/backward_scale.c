/* How large P and dS can be, for kernels that keep them as float16: each key head of a sequence takes them times powers
 * of two that fill its range. */
#include "cpu/backward.h"

#include <math.h>

/* Floats from 0 on rise as their bits do. */
static void raise_to(atomic_int *largest, float value)
{
    int bits, before = atomic_load_explicit(largest, memory_order_relaxed);
    memcpy(&bits, &value, sizeof bits);
    while (before < bits &&
           !atomic_compare_exchange_weak_explicit(largest, &before, bits, memory_order_relaxed, memory_order_relaxed)) {
    }
}

static float norm_at(const atomic_int *largest)
{
    float value;
    int   bits = atomic_load_explicit(largest, memory_order_relaxed);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What sees nothing, or is not seen, must change nothing: of dO the rows that see some key by the window and their LSE,
 * of V those that some query may see. */
void fa_backward_find_norms(const run *r, scratch *s, const fa_tile *tile, int64_t pair)
{
    const plan    *p       = &r->plan;
    const fa_call *call    = p->call;
    fa_rows        rows    = fa_query_rows(call, &call->dout, tile, s->row_dout);
    fa_range       queries = {0, tile->seq.seqlen_q}, keys = {tile->seq.key_begin, tile->seq.seqlen_k};
    fa_range       seeing = fa_queries_seeing(call->window, tile->seq.diagonal, tile->queries, keys);
    for (int n = 0; n < rows.count; n++) {
        int         i   = tile->queries.begin + n;
        const float lse = *(const float *)fa_at(&call->lse, tile->seq.q_entry, tile->head, tile->seq.q_row + i, 0);
        if (i < seeing.begin || i >= seeing.end || lse == -INFINITY)
            s->row_dout[n] = NULL;
    }
    raise_to(&r->norms[2 * pair], p->kernels->row_norm(&rows));
    if (tile->head % call->group != 0 || tile->queries.begin != 0)
        return;
    fa_range seen = fa_keys_seen(call->window, tile->seq.diagonal, queries, keys);
    fa_tile  part = *tile;
    for (int key = seen.begin; key < seen.end; key += p->tile.k) {
        part.keys = (fa_range){key, fa_min_int(key + p->tile.k, seen.end)};
        rows      = fa_key_rows(call, &call->v, &part, s->row);
        raise_to(&r->norms[2 * pair + 1], p->kernels->row_norm(&rows));
    }
}

/* P of dV is at most keep_scale, and |dS| at most |dP| + |Delta|, each no more than that times the norms of dO and V;
 * 2^-9 is for Delta's own rounding. 15: below 2^15, half of what float16 holds. */
fa_scales fa_backward_scales(const run *r, int64_t pair)
{
    const fa_call *call = r->plan.call;
    float          keep = call->dropout.threshold ? call->dropout.keep_scale : 1.0f;
    float most = 2.0f * (1.0f + 0x1p-9f) * keep * norm_at(&r->norms[2 * pair]) * norm_at(&r->norms[2 * pair + 1]);
    return (fa_scales){15 - (int)ceilf(log2f(keep)), most > 0.0f ? 15 - (ilogbf(most) + 1) : 0};
}
