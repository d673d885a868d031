/*
 * Gradients of what is added to the scores. dbias is dS, summed where the bias broadcasts: a task owns some elements of
 * dbias and walks over everything that adds to them, in a fixed order, computing dS once more. That costs two products
 * of seven, only when dbias is wanted, and needs neither atomics nor a dS in memory.
 */
#include "cpu/gradient.h"

typedef struct dbias_scratch {
    void        *q, *dout, *k, *v_t;
    float       *p, *ds, *slope, *dropped, *lse, *lse_log2, *delta;
    double      *sum; /* [tile.q or 1][tile.k] */
    const void **row;
    int32_t     *slices;
} dbias_scratch;

static dbias_scratch carve(fa_arena *arena, const fa_kernels *kernels, fa_tile_shape tile, const fa_call *call)
{
    int           d = (int)call->head_dim, dv = (int)call->head_dim_v;
    int64_t       scores = (int64_t)tile.q * fa_score_ld(tile.k);
    dbias_scratch s;
    s.q        = fa_carve(arena, kernels->packed_bytes(FA_ROLE_Q, tile.q, d));
    s.dout     = fa_carve(arena, kernels->packed_bytes(FA_ROLE_DO, tile.q, dv));
    s.k        = fa_carve(arena, kernels->packed_bytes(FA_ROLE_K, tile.k, d));
    s.v_t      = fa_carve(arena, kernels->packed_bytes(FA_ROLE_V_T, tile.k, dv));
    s.p        = fa_carve_floats(arena, scores);
    s.ds       = fa_carve_floats(arena, scores);
    s.slope    = fa_carve_floats(arena, call->softcap > 0.0f ? scores : 0);
    s.dropped  = fa_carve_floats(arena, call->dropout.threshold ? scores : 0);
    s.lse      = fa_carve_floats(arena, fa_row_array(tile.q));
    s.lse_log2 = fa_carve_floats(arena, fa_row_array(tile.q));
    s.delta    = fa_carve_floats(arena, fa_row_array(tile.q));
    s.sum      = fa_carve(arena, (size_t)tile.q * (size_t)tile.k * sizeof(double));
    s.row      = fa_carve(arena, (size_t)fa_max_int(tile.q, tile.k) * sizeof(void *));
    s.slices   = fa_carve(arena, (size_t)call->slices.count * sizeof(int32_t));
    return s;
}

size_t fa_dbias_scratch_bytes(const fa_kernels *kernels, fa_tile_shape tile, const fa_call *call)
{
    fa_arena arena = {NULL, 0};
    carve(&arena, kernels, tile, call);
    return arena.used;
}

/* The extents of dbias in memory: 1 where it broadcasts. */
typedef struct extents {
    int64_t batch, heads, queries, query_tiles, key_tiles;
} extents;

static extents extents_of(fa_tile_shape tile, const fa_call *call)
{
    const flash_attn_tensor *t = &call->dbias;
    extents n = {t->stride[0] ? t->shape[0] : 1, t->stride[1] ? t->shape[1] : 1, t->stride[2] ? t->shape[2] : 1, 0, 0};
    n.query_tiles = (n.queries + tile.q - 1) / tile.q;
    n.key_tiles   = (t->shape[3] + tile.k - 1) / tile.k;
    return n;
}

int64_t fa_dbias_tasks(fa_tile_shape tile, const fa_call *call)
{
    if (!call->dbias.data)
        return 0;
    extents n = extents_of(tile, call);
    return n.batch * n.heads * n.query_tiles * n.key_tiles;
}

typedef struct part {
    const fa_kernels *kernels;
    const fa_call    *call;
    float            *delta;
    dbias_scratch     s;
    fa_tile_shape     tile;
    bool              one_query;     /* all queries add to one row of dbias */
    fa_range          queries, keys; /* positions of the task's elements; with one_query all queries */
} part;

/* One tile's dS onto the sums. */
static void add_tile(const part *p, const fa_tile *tile, fa_visible visible, float scale)
{
    const fa_call   *call = p->call;
    fa_rows          q    = fa_query_rows(call, &call->q, tile, p->s.row);
    fa_tile_gradient t    = {.kernels = p->kernels,
                             .call    = call,
                             .tile    = tile,
                             .visible = visible,
                             .scale   = scale,
                             .q       = p->s.q,
                             .dout    = p->s.dout,
                             .k       = p->s.k,
                             .v_t     = p->s.v_t,
                             .lse     = p->s.lse,
                             .delta   = p->s.delta,
                             .p       = p->s.p,
                             .ds      = p->s.ds,
                             .slope   = call->softcap > 0 ? p->s.slope : NULL,
                             .dropped = p->s.dropped,
                             .ld      = fa_score_ld(p->tile.k)};
    p->kernels->pack(FA_ROLE_Q, p->s.q, &q, NULL);
    fa_rows dout = fa_query_rows(call, &call->dout, tile, p->s.row);
    p->kernels->pack(FA_ROLE_DO, p->s.dout, &dout, NULL);
    fa_gather_rows(call, p->delta, tile, scale, p->s.lse, p->s.lse_log2, p->s.delta);
    fa_score_gradient(&t);
    for (int r = 0; r < fa_tile_rows(tile); r++) {
        int     row = p->one_query ? 0 : tile->queries.begin + r - p->queries.begin;
        double *sum = p->s.sum + (int64_t)row * p->tile.k + (tile->keys.begin - p->keys.begin);
        for (int n = 0; n < fa_tile_keys(tile); n++)
            sum[n] += t.ds[(int64_t)r * t.ld + n];
    }
}

/* Heads [begin, end) of key head head_k of sequence b. */
static void add_heads(const part *p, int64_t b, int64_t head_k, int64_t begin, int64_t end)
{
    const fa_call *call = p->call;
    fa_tile        tile = {.b = b, .head_k = head_k, .heads = 1, .seq = fa_sequence_at(call, b), .slices = p->s.slices};
    tile.keys = (fa_range){fa_max_int(p->keys.begin, tile.seq.key_begin), fa_min_int(p->keys.end, tile.seq.seqlen_k)};
    fa_range queries = {p->queries.begin, fa_min_int(p->queries.end, tile.seq.seqlen_q)};
    if (tile.keys.begin >= tile.keys.end || queries.begin >= queries.end)
        return;
    tile.num_slices = fa_slices_touching(call, b, queries, tile.keys, p->s.slices);
    fa_rows k       = fa_key_rows(call, &call->k, &tile, p->s.row);
    p->kernels->pack(FA_ROLE_K, p->s.k, &k, NULL);
    fa_rows v = fa_key_rows(call, &call->v, &tile, p->s.row);
    p->kernels->pack(FA_ROLE_V_T, p->s.v_t, &v, NULL);
    for (tile.head = begin; tile.head < end; tile.head++) {
        for (int i = queries.begin; i < queries.end; i += p->tile.q) {
            tile.queries       = (fa_range){i, fa_min_int(i + p->tile.q, queries.end)};
            fa_visible visible = fa_tile_visible(call, &tile);
            if (visible != FA_VISIBLE_NONE)
                add_tile(p, &tile, visible, fa_score_scale(call, b, head_k));
        }
    }
}

void fa_dbias_task(const fa_kernels *kernels, fa_tile_shape tile, const fa_call *call, float *delta, int64_t task,
                   char *scratch)
{
    fa_arena arena    = {scratch, 0};
    extents  n        = extents_of(tile, call);
    part     p        = {.kernels   = kernels,
                         .call      = call,
                         .delta     = delta,
                         .s         = carve(&arena, kernels, tile, call),
                         .tile      = tile,
                         .one_query = call->dbias.stride[2] == 0};
    int64_t  key_tile = task % n.key_tiles, query_tile = task / n.key_tiles % n.query_tiles;
    int64_t  head = task / n.key_tiles / n.query_tiles % n.heads, b = task / n.key_tiles / n.query_tiles / n.heads;
    p.keys =
        (fa_range){(int)key_tile * p.tile.k, fa_min_int(((int)key_tile + 1) * p.tile.k, (int)call->dbias.shape[3])};
    p.queries =
        (fa_range){(int)query_tile * p.tile.q, fa_min_int(((int)query_tile + 1) * p.tile.q, (int)call->dbias.shape[2])};
    if (p.one_query)
        p.queries = (fa_range){0, FA_MAX_SEQLEN};
    memset(p.s.sum, 0, (size_t)p.tile.q * (size_t)p.tile.k * sizeof(double));

    int64_t b_end = n.batch == 1 ? call->batch : b + 1, head_end = n.heads == 1 ? call->heads_q : head + 1;
    for (; b < b_end; b++) {
        for (int64_t begin = head; begin < head_end;) {
            int64_t head_k = begin / call->group, end = (head_k + 1) * call->group;
            end = end < head_end ? end : head_end;
            add_heads(&p, b, head_k, begin, end);
            begin = end;
        }
    }
    b        = task / n.key_tiles / n.query_tiles / n.heads;
    int rows = p.one_query ? 1 : p.queries.end - p.queries.begin, first = p.one_query ? 0 : p.queries.begin;
    for (int r = 0; r < rows; r++) {
        for (int j = p.keys.begin; j < p.keys.end; j++)
            fa_store(fa_at(&call->dbias, b, head, first + r, j), 0, call->dbias.dtype,
                     (float)p.s.sum[(int64_t)r * p.tile.k + j - p.keys.begin]);
    }
}

/* dsink = -sum over rows of exp(sink - LSE) * Delta. */
void fa_dsinks_task(const fa_call *call, float *delta, int64_t head)
{
    double sum  = 0.0;
    float  sink = fa_load(fa_at(&call->sinks, 0, head, 0, 0), 0, call->sinks.dtype);
    for (int64_t b = 0; b < call->batch && sink != -INFINITY; b++) {
        fa_sequence seq = fa_sequence_at(call, b);
        for (int i = 0; i < seq.seqlen_q; i++) {
            float lse = *(const float *)fa_at(&call->lse, seq.q_entry, head, seq.q_row + i, 0);
            sum -= exp((double)sink - (double)lse) * (double)*fa_delta_at(call, delta, &seq, head, i);
        }
    }
    fa_store(fa_at(&call->dsinks, 0, head, 0, 0), 0, call->dsinks.dtype, (float)sum);
}
