/*
 * Algorithm 1 over tiles. A task is some tiles of queries of one key head (a block); it walks over the keys, packs each
 * tile of K and V once and uses it for all its queries, also those of the group's other heads:
 *
 *     for each tile of keys        pack K, V
 *         for each tile of queries     S = Q K^T;  P, m, l = softmax step(S);  O = O * rescale + P V
 *
 * What a row computes depends on the row, the keys and the positions of key tiles alone, so blocks may be cut to suit
 * the number of threads and no bit changes. Few queries on long keys: tasks are also parts of the keys (decode.c).
 */
#include "cpu/passes.h"
#include "cpu/split.h"
#include "cpu/tile.h"

#include <stdio.h>

#define MAX_PARTS_BYTES (32 << 20)

/* ---- how a sequence is cut ---- */

typedef struct shape {
    const fa_kernels *kernels;
    bool              few; /* rows are so few that K and V are read in place */
    fa_tile_shape     tile;
    int               heads_per_tile, head_tiles, tiles;
    int64_t           blocks;
    int               splits, split_keys;
    bool              parts_are_tasks; /* else a task does all parts of its block */
} shape;

/* Sizes that hold for every sequence of the call. */
typedef struct plan {
    const fa_cpu  *cpu;
    const fa_call *call;
    int            threads;
    int            tiles_per_block;
    bool           parallel_splits;
    int            max_splits;
    size_t         q_bytes, k_bytes, v_bytes, fused_bytes;
    int            tile_q, tile_k, ldo;
} plan;

/* The direct path reads whole vectors in place. */
static bool readable_in_place(const flash_attn_tensor *t)
{
    return t->stride[3] == 1 && t->shape[3] % 16 == 0 && t->dtype != FLASH_ATTN_F8E4M3;
}

static shape shape_of(const plan *p, int seqlen_q, int seqlen_k)
{
    const fa_call    *call   = p->call;
    const fa_kernels *vector = p->cpu->vector;
    int64_t           rows   = call->group * seqlen_q;
    shape             s      = {0};
    s.few                    = rows <= vector->few_rows && readable_in_place(&call->k) && readable_in_place(&call->v);
    s.kernels                = s.few ? vector : fa_forward_kernels(p->cpu, call, rows, seqlen_k);
    s.tile                   = fa_tiles(p->cpu, s.kernels, call);
    s.heads_per_tile  = seqlen_q < s.tile.q ? fa_min_int((int)call->group, s.tile.q / fa_max_int(seqlen_q, 1)) : 1;
    s.head_tiles      = ((int)call->group + s.heads_per_tile - 1) / s.heads_per_tile;
    s.tiles           = fa_max_int(1, (seqlen_q + s.tile.q - 1) / s.tile.q) * s.head_tiles;
    s.blocks          = (s.tiles + p->tiles_per_block - 1) / p->tiles_per_block;
    s.split_keys      = fa_split_keys(call->num_splits, p->cpu->tuning.split_keys, rows, s.tile, seqlen_k);
    s.splits          = fa_max_int(1, (seqlen_k + s.split_keys - 1) / s.split_keys);
    s.parts_are_tasks = p->parallel_splits && s.tiles == 1 && s.splits > 1;
    return s;
}

static int64_t tasks_per_head(const shape *s) { return s->parts_are_tasks ? s->splits : s->blocks; }

static void add_table_sizes(plan *p, const fa_kernels *kernels)
{
    int           d = (int)p->call->head_dim, dv = (int)p->call->head_dim_v;
    fa_tile_shape tile  = fa_tiles(p->cpu, kernels, p->call);
    size_t        fused = 0, q = kernels->packed_bytes(FA_ROLE_Q, tile.q, d);
    size_t        k = kernels->packed_bytes(FA_ROLE_K, tile.k, d), v = kernels->packed_bytes(FA_ROLE_V, tile.k, dv);
    if (kernels->forward_scratch_bytes)
        fused = kernels->forward_scratch_bytes(tile.q, tile.k, d, dv);
    p->q_bytes     = q > p->q_bytes ? q : p->q_bytes;
    p->k_bytes     = k > p->k_bytes ? k : p->k_bytes;
    p->v_bytes     = v > p->v_bytes ? v : p->v_bytes;
    p->fused_bytes = fused > p->fused_bytes ? fused : p->fused_bytes;
    p->tile_q      = fa_max_int(p->tile_q, tile.q);
    p->tile_k      = fa_max_int(p->tile_k, tile.k);
}

/* As many tiles as fill half of the second-level cache (or what was measured) with Q and O, but no fewer than four tasks for each of the
 * context's threads. */
static int choose_tiles_per_block(const plan *p)
{
    const fa_call *call     = p->call;
    int64_t        l2       = p->cpu->isa.l2_bytes > 0 ? p->cpu->isa.l2_bytes : 512 << 10;
    int64_t        bytes    = (int64_t)p->q_bytes + (int64_t)p->tile_q * p->ldo * 4;
    int64_t        share    = p->cpu->tuning.block_l2_percent ? p->cpu->tuning.block_l2_percent : 50;
    int64_t        fit      = l2 * share / 100 / bytes;
    int64_t        rows     = call->q.shape[0] * call->q.shape[1] * call->heads_q;
    int64_t        balanced = rows / p->tile_q / (p->cpu->num_threads > 1 ? 4 * p->cpu->num_threads : 1);
    int64_t        longest  = (call->max_seqlen_q / p->tile_q + 1) * call->group; /* no block has more */
    int64_t        tiles    = fit < balanced ? fit : balanced;
    tiles                   = tiles < longest ? tiles : longest;
    return (int)(tiles < 1 ? 1 : tiles > 64 ? 64 : tiles);
}

/* Rows of a split sequence: at most a tile, or all there are. */
static int64_t part_rows(const plan *p)
{
    int64_t rows = p->call->group * p->call->max_seqlen_q;
    return rows < p->tile_q ? rows : p->tile_q;
}

static plan plan_make(const fa_cpu *cpu, const fa_call *call, int threads)
{
    plan p = {.cpu = cpu, .call = call, .threads = threads, .ldo = fa_accumulator_ld(call->head_dim_v)};
    add_table_sizes(&p, cpu->kernels[call->q.dtype]);
    add_table_sizes(&p, cpu->vector);
    p.tiles_per_block = choose_tiles_per_block(&p);
    p.max_splits      = fa_max_splits(call->num_splits, cpu->tuning.split_keys, 16, call->max_seqlen_k);
    if (p.max_splits > 1) {
        /* Parts as tasks: threads have something to do, and tasks of the same keys follow one another, which saves page
         * walks where heads lie side by side. With many heads neither is worth the memory. */
        int64_t heads = call->batch * call->heads_k, rows = part_rows(&p);
        p.parallel_splits = heads < 4 * cpu->num_threads || heads * p.max_splits * rows * p.ldo * 4 <= MAX_PARTS_BYTES;
    }
    return p;
}

/* ---- memory ---- */

typedef struct scratch {
    fa_tile     *tiles; /* [tiles_per_block] */
    char        *q;     /* packed, [tiles_per_block] */
    float       *o, *m, *l;
    void        *k, *v;
    float       *s, *rescale, *temp;
    const void **row_q, **row_k, **row_v;
    fa_rows      k_rows, v_rows; /* the key tile at hand */
    int         *bad, num_bad;
    int32_t     *slices;
    void        *fused;
    float       *sum_o, *sum_m, *sum_l; /* as o, m, l: over the parts of a split sequence */
} scratch;

static scratch carve_scratch(fa_arena *arena, const plan *p)
{
    int64_t tiles = p->tiles_per_block, rows = fa_row_array(p->tile_q), sums = p->max_splits > 1 ? tiles : 0;
    scratch s = {0};
    s.tiles   = fa_carve(arena, (size_t)tiles * sizeof(fa_tile));
    s.q       = fa_carve(arena, (size_t)tiles * p->q_bytes);
    s.o       = fa_carve_floats(arena, tiles * p->tile_q * p->ldo);
    s.m       = fa_carve_floats(arena, tiles * rows);
    s.l       = fa_carve_floats(arena, tiles * rows);
    s.k       = fa_carve(arena, p->k_bytes);
    s.v       = fa_carve(arena, p->v_bytes);
    s.s       = fa_carve_floats(arena, (int64_t)p->tile_q * fa_score_ld(p->tile_k));
    s.rescale = fa_carve_floats(arena, rows);
    s.temp    = fa_carve_floats(arena, p->ldo);
    s.row_q   = fa_carve(arena, (size_t)p->tile_q * sizeof(void *));
    s.row_k   = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    s.row_v   = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    s.bad     = fa_carve(arena, (size_t)p->tile_k * sizeof(int));
    s.slices  = fa_carve(arena, (size_t)p->call->slices.count * sizeof(int32_t));
    s.fused   = fa_carve(arena, p->fused_bytes);
    s.sum_o   = fa_carve_floats(arena, sums * p->tile_q * p->ldo);
    s.sum_m   = fa_carve_floats(arena, sums * rows);
    s.sum_l   = fa_carve_floats(arena, sums * rows);
    return s;
}

typedef struct run {
    plan         plan;
    int64_t     *task_begin; /* [batch + 1] */
    atomic_llong next;
    char        *scratch; /* of all threads */
    size_t       scratch_bytes;
    float       *parts; /* [batch, heads_k, max_splits] of part_floats */
    int64_t      part_floats;
    int          part_rows;
    atomic_int  *parts_done; /* [batch, heads_k] */
} run;

/* Lay out a call's memory; base NULL: only measure. */
static size_t carve_run(run *r, char *base)
{
    const plan *p     = &r->plan;
    int64_t     heads = p->parallel_splits ? p->call->batch * p->call->heads_k : 0, rows = part_rows(p);
    fa_arena    arena = {base, 0}, one = {NULL, 0};
    carve_scratch(&one, p);
    r->part_rows     = (int)rows;
    r->part_floats   = rows * p->ldo + 2 * fa_row_array((int)rows);
    r->scratch_bytes = one.used;
    r->task_begin    = fa_carve(&arena, (size_t)(p->call->batch + 1) * sizeof(int64_t));
    r->scratch       = fa_carve(&arena, r->scratch_bytes * (size_t)p->threads);
    r->parts         = fa_carve_floats(&arena, heads * p->max_splits * r->part_floats);
    r->parts_done    = fa_carve(&arena, (size_t)heads * sizeof(atomic_int));
    return arena.used;
}

/* ---- one tile of queries against one tile of keys: Algorithm 1, lines 8 to 10 ---- */

typedef struct step {
    const fa_kernels *kernels;
    const fa_call    *call;
    const fa_tile    *tile;
    fa_visible        visible;
    bool              in_place; /* K and V are not packed */
    float             scale;
    const void       *q;
    float            *o, *m, *l;
    int               lds, ldo;
} step;

static bool fused_step(const step *t, const scratch *s)
{
    const fa_tile   *tile  = t->tile;
    fa_forward_block block = {.q          = t->q,
                              .k          = s->k,
                              .v          = s->v,
                              .o          = t->o,
                              .ldo        = t->ldo,
                              .m          = t->m,
                              .l          = t->l,
                              .rows       = fa_tile_rows(tile),
                              .keys       = fa_tile_keys(tile),
                              .head_dim   = (int)t->call->head_dim,
                              .head_dim_v = (int)t->call->head_dim_v,
                              .window     = t->call->window,
                              .diagonal   = tile->seq.diagonal + tile->queries.begin - tile->keys.begin,
                              .queries    = fa_tile_queries(tile),
                              .multiplier = t->scale * FA_LOG2_E,
                              .scratch    = s->fused};
    return t->kernels->forward_block(&block);
}

/* Rows of V with NaN or Inf are not in the packed V: the fused kernel leaves them to its caller, who knows their P from
 * the shifts that it left. Other rows keep their bits. */
static void add_bad_rows_after_fused(const step *t, const scratch *s)
{
    int   rows = fa_tile_rows(t->tile), keys = fa_tile_keys(t->tile);
    float multiplier = fa_multiplier(t->call, t->scale);
    t->kernels->scores(s->s, t->lds, t->q, s->k, rows, keys, (int)t->call->head_dim);
    fa_apply_options(t->kernels, t->call, t->tile, t->visible, t->scale, s->s, NULL, t->lds);
    for (int r = 0; r < rows; r++) {
        for (int n = 0; n < s->num_bad; n++) {
            float *p = s->s + (int64_t)r * t->lds + s->bad[n];
            *p       = *p == -INFINITY || t->m[r] == -INFINITY ? 0.0f : exp2f(*p * multiplier - t->m[r]);
        }
    }
    fa_add_bad_rows(t->kernels, t->o, t->ldo, rows, s->s, t->lds, 1, &s->v_rows, s->bad, s->num_bad, s->temp);
}

static void forward_step(const step *t, const scratch *s)
{
    const fa_kernels *k    = t->kernels;
    const fa_call    *call = t->call;
    int               rows = fa_tile_rows(t->tile), keys = fa_tile_keys(t->tile);
    bool window = t->visible == FA_VISIBLE_ALL || call->slices.count == 0; /* all that masks this tile */
    bool plain  = window && !fa_has_options(call, t->scale) && call->dropout.threshold == 0;
    if (plain && k->forward_block && !t->in_place && fused_step(t, s)) {
        if (s->num_bad > 0)
            add_bad_rows_after_fused(t, s);
        return;
    }
    if (t->in_place)
        k->scores_few(s->s, t->lds, t->q, &s->k_rows, rows, &s->v_rows);
    else
        k->scores(s->s, t->lds, t->q, s->k, rows, keys, (int)call->head_dim);
    fa_apply_options(k, call, t->tile, t->visible, t->scale, s->s, NULL, t->lds);
    k->softmax(s->s, t->lds, rows, keys, fa_multiplier(call, t->scale), t->m, t->l, s->rescale);
    if (call->dropout.threshold)
        fa_apply_dropout(k, call, t->tile, s->s, NULL, t->lds);
    if (t->in_place) {
        k->accumulate_few(t->o, t->ldo, s->rescale, s->s, t->lds, &s->v_rows, rows);
        return;
    }
    k->accumulate(t->o, t->ldo, s->rescale, s->s, t->lds, s->v, rows, keys, (int)call->head_dim_v, s->fused);
    fa_add_bad_rows(k, t->o, t->ldo, rows, s->s, t->lds, 1, &s->v_rows, s->bad, s->num_bad, s->temp);
}

/* ---- a block: some tiles of queries of one key head ---- */

typedef struct block {
    const run   *run;
    scratch     *s;
    const shape *shape;
    fa_tile      at; /* whose block: b, head_k, seq */
    int          tiles;
    float        scale;
    double       to_natural; /* what takes m from base 2 */
} block;

static float *tile_floats(float *base, const plan *p, int t) { return base + t * fa_row_array(p->tile_q); }

/* Rows of tile number `first + t`, packed Q, and an empty O. Tiles run over the group's heads first, so that a block's
 * tiles see much the same keys. */
static void begin_tile(const block *b, int first, int t)
{
    const plan  *p      = &b->run->plan;
    const shape *shape  = b->shape;
    fa_tile     *tile   = &b->s->tiles[t];
    int          number = first + t, head = number % shape->head_tiles * shape->heads_per_tile;
    int          query = number / shape->head_tiles * shape->tile.q;
    *tile              = b->at;
    tile->head         = b->at.head_k * p->call->group + head;
    tile->heads        = fa_min_int(shape->heads_per_tile, (int)p->call->group - head);
    tile->queries      = (fa_range){query, fa_min_int(query + shape->tile.q, b->at.seq.seqlen_q)};
    if (tile->queries.end < query)
        tile->queries.end = query;
    fa_rows rows = fa_query_rows(p->call, &p->call->q, tile, b->s->row_q);
    shape->kernels->pack(FA_ROLE_Q, b->s->q + (size_t)t * p->q_bytes, &rows, NULL);
}

static fa_partial tile_result(const block *b, int t, bool sum)
{
    const plan *p = &b->run->plan;
    float      *o = sum ? b->s->sum_o : b->s->o, *m = sum ? b->s->sum_m : b->s->m, *l = sum ? b->s->sum_l : b->s->l;
    return (fa_partial){o + (int64_t)t * p->tile_q * p->ldo, tile_floats(m, p, t), tile_floats(l, p, t),
                        fa_tile_rows(&b->s->tiles[t]), p->ldo};
}

static void begin_block(block *b, int first)
{
    fa_range queries = {INT32_MAX, 0};
    for (int t = 0; t < b->tiles; t++) {
        begin_tile(b, first, t);
        queries.begin = fa_min_int(queries.begin, b->s->tiles[t].queries.begin);
        queries.end   = fa_max_int(queries.end, b->s->tiles[t].queries.end);
    }
    b->at.queries = queries;
    b->at.slices  = b->s->slices;
    b->at.num_slices =
        fa_slices_touching(b->run->plan.call, b->at.b, queries, (fa_range){0, FA_UNLIMITED}, b->s->slices);
    for (int t = 0; t < b->tiles; t++) {
        b->s->tiles[t].slices     = b->at.slices;
        b->s->tiles[t].num_slices = b->at.num_slices;
    }
}

/* One tile of keys for all tiles of the block. Packed when the first needs it. */
static void walk_key_tile(const block *b, fa_range keys)
{
    const plan       *p         = &b->run->plan;
    const fa_call    *call      = p->call;
    const fa_kernels *kernels   = b->shape->kernels;
    scratch          *s         = b->s;
    bool              have_rows = false, packed = false;
    s->num_bad = 0;
    for (int t = 0; t < b->tiles; t++) {
        fa_tile *tile      = &s->tiles[t];
        tile->keys         = keys;
        fa_visible visible = fa_tile_visible(call, tile);
        if (visible == FA_VISIBLE_NONE)
            continue;
        if (!have_rows) {
            s->k_rows = fa_key_rows(call, &call->k, tile, s->row_k);
            s->v_rows = fa_key_rows(call, &call->v, tile, s->row_v);
            have_rows = true;
        }
        bool in_place = b->shape->few && visible == FA_VISIBLE_ALL;
        if (!in_place && !packed) {
            kernels->pack(FA_ROLE_K, s->k, &s->k_rows, NULL);
            s->num_bad = kernels->pack(FA_ROLE_V, s->v, &s->v_rows, s->bad);
            packed     = true;
        }
        fa_partial result = tile_result(b, t, false);
        step       one    = {kernels,
                             call,
                             tile,
                             visible,
                             in_place,
                             b->scale,
                             s->q + (size_t)t * p->q_bytes,
                             result.o,
                             result.m,
                             result.l,
                             fa_score_ld(p->tile_k),
                             p->ldo};
        forward_step(&one, s);
    }
}

/* Algorithm 1, lines 5 to 11, over the keys of `part`. */
static void walk_keys(const block *b, fa_range part)
{
    const fa_sequence *seq  = &b->at.seq;
    int                step = b->shape->tile.k;
    for (int t = 0; t < b->tiles; t++) {
        fa_partial result = tile_result(b, t, false);
        fa_partial_clear(&result);
    }
    fa_range keys = {fa_max_int(part.begin, seq->key_begin), fa_min_int(part.end, seq->seqlen_k)};
    fa_range seen = fa_keys_seen(b->run->plan.call->window, seq->diagonal, b->at.queries, keys);
    if (b->at.queries.begin >= b->at.queries.end)
        return;
    /* Tiles start at multiples of `step` whatever is seen, so that their sums do not depend on the block. */
    for (int key = seen.begin / step * step; key < seen.end; key += step)
        walk_key_tile(b, (fa_range){fa_max_int(key, keys.begin), fa_min_int(key + step, keys.end)});
}

/* m is scores times a float32 multiplier, so what takes it back is that multiplier's own inverse and not ln 2: large
 * scores would feel the difference. A NaN row has m = -inf, and l = NaN. */
static float natural_lse(float m, float l, double to_natural)
{
    return l == 0.0f ? -INFINITY : (float)((double)m * to_natural + log((double)l));
}

/* Algorithm 1, lines 12 to 15: divide by l, add the sink, store. */
static void store_tile(const block *b, int t, const fa_partial *result)
{
    const fa_call *call    = b->run->plan.call;
    const fa_tile *tile    = &b->s->tiles[t];
    int            queries = fa_tile_queries(tile);
    float          descale = 1.0f;
    if (call->descale_v.data)
        descale = *(const float *)fa_at(&call->descale_v, tile->b, tile->head_k, 0, 0);
    for (int r = 0; r < result->rows; r++) {
        int64_t head = tile->head + r / queries, row = tile->seq.q_row + tile->queries.begin + r % queries;
        float   m = result->m[r], l = result->l[r], factor = 1.0f;
        if (call->sinks.data) {
            float sink = fa_load(fa_at(&call->sinks, 0, head, 0, 0), 0, call->sinks.dtype) / (float)b->to_natural;
            float max = sink > m ? sink : m, shift = max == -INFINITY ? 0.0f : max;
            factor = exp2f(m - shift);
            l      = l * factor + exp2f(sink - shift);
            m      = max;
        }
        factor = l == 0.0f ? 0.0f : factor * descale / l;
        b->shape->kernels->store(fa_at(&call->o, tile->seq.q_entry, row, head, 0), call->o.stride[3], call->o.dtype,
                                 result->o + (int64_t)r * result->ldo, (int)call->head_dim_v, factor);
        if (call->lse.data)
            *(float *)fa_at(&call->lse, tile->seq.q_entry, head, row, 0) = natural_lse(m, l, b->to_natural);
    }
}

/* Rows that belong to the sequence but do not count: output 0, LSE -inf. */
static void store_unused_rows(const block *b)
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

/* ---- tasks ---- */

static fa_partial part_at(const run *r, const block *b, int part)
{
    const plan *p    = &r->plan;
    int64_t     head = b->at.b * p->call->heads_k + b->at.head_k;
    float      *at   = r->parts + (head * p->max_splits + part) * r->part_floats;
    int64_t     rows = (int64_t)r->part_rows;
    return (fa_partial){at, at + rows * p->ldo, at + rows * p->ldo + fa_row_array(r->part_rows),
                        fa_tile_rows(&b->s->tiles[0]), p->ldo};
}

static fa_range part_keys(const block *b, int part)
{
    int64_t begin = (int64_t)part * b->shape->split_keys, end = begin + b->shape->split_keys;
    return (fa_range){(int)begin, end < FA_MAX_SEQLEN ? (int)end : FA_MAX_SEQLEN};
}

/* One part of a sequence of one tile. Whoever finishes the last part folds them all, in order. */
static void run_part(run *r, block *b, int part)
{
    fa_partial own = tile_result(b, 0, false), sum = tile_result(b, 0, true), shared = part_at(r, b, part);
    walk_keys(b, part_keys(b, part));
    fa_partial_copy(&shared, &own);
    int64_t head = b->at.b * r->plan.call->heads_k + b->at.head_k;
    if (atomic_fetch_add(&r->parts_done[head], 1) + 1 < b->shape->splits)
        return;
    fa_partial_clear(&sum);
    for (int n = 0; n < b->shape->splits; n++) {
        fa_partial one = part_at(r, b, n);
        fa_partial_fold(&sum, &one);
    }
    store_tile(b, 0, &sum);
}

static void run_block(block *b)
{
    bool split = b->shape->splits > 1;
    for (int part = 0; part < b->shape->splits; part++) {
        walk_keys(b, part_keys(b, part));
        for (int t = 0; t < b->tiles && split; t++) {
            fa_partial own = tile_result(b, t, false), sum = tile_result(b, t, true);
            if (part == 0)
                fa_partial_clear(&sum);
            fa_partial_fold(&sum, &own);
        }
    }
    for (int t = 0; t < b->tiles; t++) {
        fa_partial result = tile_result(b, t, split);
        store_tile(b, t, &result);
    }
}

/* Tasks of a sequence: the last queries, which see most keys under a causal mask, come first. */
static void run_task(run *r, scratch *s, int64_t b, int64_t task)
{
    const plan *p     = &r->plan;
    fa_sequence seq   = fa_sequence_at(p->call, b);
    shape       shape = shape_of(p, seq.seqlen_q, seq.seqlen_k);
    int64_t     slot = tasks_per_head(&shape) - 1 - task / p->call->heads_k, first = slot * p->tiles_per_block;
    block one = {.run = r, .s = s, .shape = &shape, .at = {.b = b, .head_k = task % p->call->heads_k, .seq = seq}};
    if (shape.parts_are_tasks)
        first = 0;
    one.scale = fa_score_scale(p->call, b, one.at.head_k);
    one.to_natural =
        (fa_has_options(p->call, one.scale) ? 1.0 : (double)one.scale) / (double)fa_multiplier(p->call, one.scale);
    one.tiles = fa_min_int(p->tiles_per_block, shape.tiles - (int)first);
    begin_block(&one, (int)first);
    if (slot == 0)
        store_unused_rows(&one);
    if (shape.parts_are_tasks)
        run_part(r, &one, (int)slot);
    else
        run_block(&one);
}

static void run_thread(void *arg, int64_t index)
{
    run              *r       = arg;
    const fa_call    *call    = r->plan.call;
    fa_arena          arena   = {r->scratch + (size_t)index * r->scratch_bytes, 0};
    scratch           s       = carve_scratch(&arena, &r->plan);
    const fa_kernels *kernels = r->plan.cpu->kernels[call->q.dtype];
    int64_t           b       = 0, task;
    bool              entered = false;
    while ((task = atomic_fetch_add(&r->next, 1)) < r->task_begin[call->batch]) {
        if (!entered && kernels->enter)
            kernels->enter();
        entered = true;
        while (r->task_begin[b + 1] <= task)
            b++;
        run_task(r, &s, b, task - r->task_begin[b]);
    }
    if (entered && kernels->leave)
        kernels->leave();
}

static int64_t count_tasks(run *r)
{
    const fa_call *call  = r->plan.call;
    int64_t        total = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        fa_sequence seq   = fa_sequence_at(call, b);
        shape       shape = shape_of(&r->plan, seq.seqlen_q, seq.seqlen_k);
        r->task_begin[b]  = total;
        total += seq.rows_q > 0 ? tasks_per_head(&shape) * call->heads_k : 0;
    }
    r->task_begin[call->batch] = total;
    return total;
}

/* ---- the entry points ---- */

size_t fa_forward_bytes(const fa_cpu *cpu, const fa_call *call, int threads)
{
    run r = {.plan = plan_make(cpu, call, threads)};
    return carve_run(&r, NULL);
}

void fa_forward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation)
{
    run         r   = {.plan = plan_make(cpu, call, threads)};
    fa_sequence seq = {0};
    carve_run(&r, NULL);
    for (int64_t b = 0; b < call->batch; b++) {
        fa_sequence one   = fa_sequence_at(call, b);
        shape       shape = shape_of(&r.plan, one.seqlen_q, one.seqlen_k);
        explanation->num_tasks += one.rows_q > 0 ? tasks_per_head(&shape) * call->heads_k : 0;
        if ((int64_t)one.seqlen_q * one.seqlen_k >= (int64_t)seq.seqlen_q * seq.seqlen_k)
            seq = one;
    }
    shape shape                = shape_of(&r.plan, seq.seqlen_q, seq.seqlen_k);
    explanation->tile_q        = shape.tile.q;
    explanation->tile_k        = shape.tile.k;
    explanation->num_splits    = shape.splits;
    explanation->scratch_bytes = (int64_t)r.scratch_bytes;
    snprintf(explanation->kernel, sizeof explanation->kernel, "%s_%s", shape.few ? "decode" : "forward",
             shape.kernels->name);
    snprintf(explanation->reason, sizeof explanation->reason, "%s; %d tiles of queries share a packed tile of keys%s",
             shape.few ? "few rows: K and V are read in place" : "K and V are packed by tiles", r.plan.tiles_per_block,
             fa_tiles_origin(cpu, shape.kernels, call));
}

flash_attn_status fa_cpu_forward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    int       threads = fa_min_int(exec->num_threads, cpu->num_threads);
    run       r       = {.plan = plan_make(cpu, call, threads)};
    fa_memory memory;
    FA_TRY(fa_memory_get(&memory, exec, carve_run(&r, NULL)));
    carve_run(&r, memory.base);
    if (r.plan.parallel_splits)
        memset(r.parts_done, 0, (size_t)(call->batch * call->heads_k) * sizeof(atomic_int));
    int64_t tasks = count_tasks(&r);
    atomic_store(&r.next, 0);
    fa_threads_run(cpu->threads, (int)(tasks < threads ? tasks : threads), run_thread, &r);
    fa_memory_free(&memory);
    return FLASH_ATTN_OK;
}
