/*
 * Algorithm 1 over tiles. A task is some tiles of queries of one key head (a block); it walks over the keys and uses
 * each tile of K and V for all its queries, also those of the group's other heads:
 *
 *     for each tile of keys        pack K, V
 *         for each tile of queries     S = Q K^T;  P, m, l = softmax step(S);  O = O * rescale + P V
 *
 * A head with one block packs its keys as it goes, into memory that stays in the cache. Where several threads work at
 * blocks of one head, or heads lie side by side in so many pages that page tables cost more than this (choices.c), K and V
 * are packed once for all: those tasks come first, tile by tile with all heads, and a block waits for a tile that is not
 * ready (a task that was handed out earlier is always running).
 *
 * What a row computes depends on the row, the keys and the positions of key tiles alone, so blocks may be cut to suit
 * the number of threads and no bit changes. Few queries on long keys: tasks are also parts of the keys (decode.c).
 */
#include "cpu/forward.h"
#include "cpu/passes.h"
#include "cpu/split.h"

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
    bool              fresh; /* o, m and l hold nothing yet */
} step;

static bool fused_step(const step *t, const scratch *s)
{
    const fa_tile   *tile = t->tile;
    const fa_call   *call = t->call;
    fa_block_options options;
    fa_forward_block block = {.q          = t->q,
                              .k          = s->keys.k,
                              .v          = s->keys.v,
                              .o          = t->o,
                              .ldo        = t->ldo,
                              .m          = t->m,
                              .l          = t->l,
                              .fresh      = t->fresh,
                              .rows       = fa_tile_rows(tile),
                              .keys       = fa_tile_keys(tile),
                              .head_dim   = (int)call->head_dim,
                              .head_dim_v = (int)call->head_dim_v,
                              .window     = call->window,
                              .diagonal   = tile->seq.diagonal + tile->queries.begin - tile->keys.begin,
                              .queries    = fa_tile_queries(tile),
                              .multiplier = fa_multiplier(call, t->scale),
                              .scratch    = s->fused,
                              .options    = fa_options_of(&options, call, tile, t->visible, t->scale)};
    return t->kernels->forward_block(&block);
}

/* Rows of V with NaN or Inf are not in the packed V: the fused kernel leaves them to its caller, who knows their P from
 * the shifts that it left. Other rows keep their bits. */
static void add_bad_rows_after_fused(const step *t, const scratch *s)
{
    int   rows = fa_tile_rows(t->tile), keys = fa_tile_keys(t->tile);
    float multiplier = fa_multiplier(t->call, t->scale);
    t->kernels->scores(s->s, t->lds, t->q, s->keys.k, rows, keys, (int)t->call->head_dim);
    fa_apply_options(t->kernels, t->call, t->tile, t->visible, t->scale, s->s, NULL, t->lds);
    for (int r = 0; r < rows; r++) {
        for (int n = 0; n < *s->keys.num_bad; n++) {
            float *p = s->s + (int64_t)r * t->lds + s->keys.bad[n];
            *p       = *p == -INFINITY || t->m[r] == -INFINITY ? 0.0f : exp2f(*p * multiplier - t->m[r]);
        }
    }
    if (t->call->dropout.threshold)
        fa_apply_dropout(t->kernels, t->call, t->tile, s->s, NULL, t->lds);
    fa_add_bad_rows(t->kernels, t->o, t->ldo, rows, s->s, t->lds, 1, &s->v_rows, s->keys.bad, *s->keys.num_bad,
                    s->temp);
}

static void composed_step(const step *t, const scratch *s)
{
    const fa_kernels *k    = t->kernels;
    const fa_call    *call = t->call;
    int               all = fa_tile_rows(t->tile), num_bad = t->in_place ? 0 : *s->keys.num_bad;
    bool              whole   = t->in_place || num_bad > 0; /* P of bad rows is needed for all rows at the end */
    bool              few     = t->in_place && k->accumulate_few_packed && all > k->few_packed && call->head_dim_v > FA_WIDE_HEAD;
    bool              packed  = (few || (k->accumulate_packed && !whole)) && !call->dropout.threshold; /* P is looked at by nobody else */
    int               at_once = whole ? all : fa_rows_at_once(k, call, t->tile, t->visible, t->scale);
    for (int row = 0; row < all; row += at_once) {
        fa_tile     tile;
        fa_visible  visible = fa_part_of_tile(k, call, t->tile, t->visible, row, at_once, &tile);
        int         rows = fa_tile_rows(&tile), keys = fa_tile_keys(&tile), first = tile.keys.begin - t->tile->keys.begin;
        const void *q        = fa_packed_part(k, FA_ROLE_Q, t->q, row, call->head_dim);
        const void *packed_k = fa_packed_part(k, FA_ROLE_K, s->keys.k, first, call->head_dim);
        const void *packed_v = fa_packed_part(k, FA_ROLE_V, s->keys.v, first, call->head_dim_v);
        float      *o        = t->o + (int64_t)row * t->ldo;
        if (visible == FA_VISIBLE_NONE)
            continue;
        if (t->in_place)
            k->scores_few(s->s, t->lds, q, &s->k_rows, rows, &s->k_soon);
        else
            k->scores(s->s, t->lds, q, packed_k, rows, keys, (int)call->head_dim);
        fa_apply_options(k, call, &tile, visible, t->scale, s->s, NULL, t->lds);
        if (packed) {
            k->softmax_packed(s->s, t->lds, rows, keys, fa_multiplier(call, t->scale), t->m + row, t->l + row, s->rescale);
            if (few)
                k->accumulate_few_packed(o, t->ldo, s->rescale, s->s, t->lds, &s->v_rows, rows, &s->v_soon, s->fused);
            else
                k->accumulate_packed(o, t->ldo, s->rescale, s->s, t->lds, packed_v, rows, keys, (int)call->head_dim_v);
            continue;
        }
        k->softmax(s->s, t->lds, rows, keys, fa_multiplier(call, t->scale), t->m + row, t->l + row, s->rescale);
        if (call->dropout.threshold)
            fa_apply_dropout(k, call, &tile, s->s, NULL, t->lds);
        if (t->in_place)
            k->accumulate_few(o, t->ldo, s->rescale, s->s, t->lds, &s->v_rows, rows, &s->v_soon, s->fused);
        else
            k->accumulate(o, t->ldo, s->rescale, s->s, t->lds, packed_v, rows, keys, (int)call->head_dim_v, s->fused);
    }
    if (num_bad > 0)
        fa_add_bad_rows(k, t->o, t->ldo, all, s->s, t->lds, 1, &s->v_rows, s->keys.bad, num_bad, s->temp);
}

static void forward_step(const step *t, const scratch *s)
{
    if (t->kernels->forward_block && !t->in_place && fused_step(t, s)) {
        if (*s->keys.num_bad > 0)
            add_bad_rows_after_fused(t, s);
        return;
    }
    if (t->fresh) {
        fa_partial empty = {t->o, t->m, t->l, fa_tile_rows(t->tile), t->ldo};
        fa_partial_clear(&empty);
    }
    composed_step(t, s);
}

/* ---- a block: some tiles of queries of one key head ---- */

static float *tile_floats(float *base, const plan *p, int t) { return base + t * fa_row_array(p->tile_q); }

/* A tile's place among its block's packed Q and O. */
static int slot_of(const block *b, int t) { return b->lone ? 0 : t; }

static void *packed_q(const block *b, int t) { return b->s->q + (size_t)slot_of(b, t) * b->run->plan.q_bytes; }

/* Rows of tile number `first + t`. Tiles run over the group's heads first, so that a block's tiles see much the same
 * keys. */
static void place_tile(const block *b, int first, int t)
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
}

static fa_partial tile_result(const block *b, int t, bool sum)
{
    const plan *p = &b->run->plan;
    float      *o = sum ? b->s->sum_o : b->s->o, *m = sum ? b->s->sum_m : b->s->m, *l = sum ? b->s->sum_l : b->s->l;
    int         slot = slot_of(b, t);
    return (fa_partial){o + (int64_t)slot * p->tile_q * p->ldo, tile_floats(m, p, slot), tile_floats(l, p, slot),
                        fa_tile_rows(&b->s->tiles[t]), p->ldo};
}

static void pack_q(const block *b, int t)
{
    const fa_call *call = b->run->plan.call;
    fa_rows        rows = fa_query_rows(call, &call->q, &b->s->tiles[t], b->s->row_q);
    b->shape->kernels->pack(FA_ROLE_Q, packed_q(b, t), &rows, NULL);
}

static void begin_block(block *b, int first)
{
    fa_range queries = {INT32_MAX, 0};
    for (int t = 0; t < b->tiles; t++) {
        place_tile(b, first, t);
        queries.begin = fa_min_int(queries.begin, b->s->tiles[t].queries.begin);
        queries.end   = fa_max_int(queries.end, b->s->tiles[t].queries.end);
    }
    b->at.queries = queries;
    b->at.slices  = b->s->slices;
    b->at.num_slices =
        fa_slices_touching(b->run->plan.call, b->at.b, queries, (fa_range){0, FA_UNLIMITED}, b->s->slices);
    b->whole = b->shape->splits == 1 && !b->shape->turns;
    for (int t = 0; t < b->tiles; t++) {
        b->s->tiles[t].slices     = b->at.slices;
        b->s->tiles[t].num_slices = b->at.num_slices;
        if (!b->whole)
            pack_q(b, t);
    }
}

/* K and V of the tile at hand, packed: this thread's own work, or all threads'. The caller's rows of V are known where
 * `keys` says that some of them are not in it. */
static void need_packed(const block *b, const fa_tile *tile)
{
    const run        *r       = b->run;
    const fa_call    *call    = r->plan.call;
    const fa_kernels *kernels = b->shape->kernels;
    scratch          *s       = b->s;
    if (b->shape->shared) {
        int64_t number = tile->keys.begin / b->shape->tile.k, pair = tile->b * call->heads_k + tile->head_k;
        fa_wait_for(&r->shared_done[pair * r->plan.shared_tiles + number], 2);
        s->keys = fa_forward_shared_keys(r, b->shape, pair, number);
        if (*s->keys.num_bad > 0)
            s->v_rows = fa_key_rows(call, &call->v, tile, s->row_v);
        return;
    }
    s->k_rows        = fa_key_rows(call, &call->k, tile, s->row_k);
    s->v_rows        = fa_key_rows(call, &call->v, tile, s->row_v);
    s->keys          = s->own;
    *s->keys.num_bad = kernels->pack(FA_ROLE_V, s->keys.v, &s->v_rows, s->keys.bad);
    kernels->pack(FA_ROLE_K, s->keys.k, &s->k_rows, NULL);
}

bool fa_rows_by_steps(const block *b)
{
    const fa_call *call   = b->run->plan.call;
    bool           latent = call->k.data == call->v.data; /* a list of its keys is halved below */
    return b->shape->kernels->few_steps && !latent && call->head_dim <= FA_WIDE_HEAD &&
           call->head_dim_v <= FA_WIDE_HEAD;
}

fa_rows fa_rows_in_place(const block *b, const flash_attn_tensor *t, const fa_tile *tile, const void **row)
{
    const fa_call *call = b->run->plan.call;
    return fa_rows_by_steps(b) ? fa_key_rows_by_steps(call, t, tile, row) : fa_key_rows(call, t, tile, row);
}

/* Rows of a tile that is read in place, and where those are that are read next. */
static void need_rows(const block *b, const fa_tile *tile)
{
    const fa_call *call = b->run->plan.call;
    scratch       *s    = b->s;
    fa_tile        next = *tile;
    next.keys           = (fa_range){tile->keys.end, fa_min_int(tile->keys.end + b->shape->tile.k, b->keys_end)};
    s->k_rows           = fa_rows_in_place(b, &call->k, tile, s->row_k);
    s->v_rows           = fa_rows_in_place(b, &call->v, tile, s->row_v);
    bool far            = b->run->plan.cpu->isa.asks_far;
    s->k_soon           = (fa_soon){s->v_rows, false, far};
    s->v_soon           = (fa_soon){fa_rows_in_place(b, &call->k, &next, s->row_next), false, far};
    if (call->k.data != call->v.data || call->k.dtype == FLASH_ATTN_F32)
        return;
    /* Latent attention's V is in the cache since K was read: the next tile of K comes meanwhile, or the first half, and
     * the second during K. float32 lost 8% by it. */
    const fa_kernels *kernels = b->shape->kernels;
    s->v_soon.each            = kernels->few_next_keys || (far && kernels->few_keys_far);
    if (kernels->few_next_keys) {
        int half             = s->v_soon.rows.count / 2;
        s->k_soon            = s->v_soon;
        s->v_soon.rows.count = half;
        s->k_soon.rows.row += half;
        s->k_soon.rows.count -= half;
    }
}

typedef struct key_tile {
    fa_range keys;
    bool     first, last; /* of all that a whole block sees */
    bool     have_rows, packed;
} key_tile;

/* One tile of keys for one tile of queries. Packed when the first needs it. */
static void walk_tile(const block *b, int t, key_tile *at)
{
    const plan    *p    = &b->run->plan;
    const fa_call *call = p->call;
    scratch       *s    = b->s;
    fa_tile       *tile = &s->tiles[t];
    tile->keys          = at->keys;
    fa_visible visible  = fa_tile_visible(call, tile);
    if (visible == FA_VISIBLE_NONE)
        return;
    bool in_place = b->shape->few && visible == FA_VISIBLE_ALL;
    if (in_place && !at->have_rows) {
        need_rows(b, tile);
        at->have_rows = true;
    }
    if (!in_place && !at->packed) {
        need_packed(b, tile);
        at->packed = true;
    }
    fa_partial result = tile_result(b, t, false);
    step       one    = {b->shape->kernels,
                         call,
                         tile,
                         visible,
                         in_place,
                         b->scale,
                         packed_q(b, t),
                         result.o,
                         result.m,
                         result.l,
                         fa_score_ld(p->tile_k),
                         p->ldo,
                         tile->fresh};
    forward_step(&one, s);
    tile->fresh = false;
}

/* The same for all tiles of the block. */
static void walk_key_tile(const block *b, key_tile at)
{
    for (int t = 0; t < b->tiles; t++) {
        fa_partial result = tile_result(b, t, false);
        if (at.first) {
            pack_q(b, t);
            b->s->tiles[t].fresh = true;
        }
        if (at.keys.begin < at.keys.end)
            walk_tile(b, t, &at);
        if (at.last && b->s->tiles[t].fresh)
            fa_partial_clear(&result);
        if (at.last)
            fa_forward_store_tile(b, t, &result);
    }
}

/* The keys of `part` that queries of the block see. */
static fa_range keys_of_block(const block *b, fa_range part)
{
    const fa_sequence *seq  = &b->at.seq;
    fa_range           keys = {fa_max_int(part.begin, seq->key_begin), fa_min_int(part.end, seq->seqlen_k)};
    if (b->at.queries.begin >= b->at.queries.end)
        return (fa_range){0, 0};
    return fa_keys_seen(b->run->plan.call->window, seq->diagonal, b->at.queries, keys);
}

/* Tiles start at multiples of their size whatever is seen, so that their sums do not depend on the block. */
static fa_range key_tile_at(const block *b, fa_range part, int key)
{
    const fa_sequence *seq = &b->at.seq;
    return (fa_range){fa_max_int(key, fa_max_int(part.begin, seq->key_begin)),
                      fa_min_int(key + b->shape->tile.k, fa_min_int(part.end, seq->seqlen_k))};
}

/* Algorithm 1, lines 5 to 11, over the keys of `part`, for blocks of the same queries of several key heads. */
static void walk_keys(const block *b, int blocks, fa_range part)
{
    int      step = b->shape->tile.k;
    fa_range seen = keys_of_block(b, part);
    for (int n = 0; n < blocks; n++)
        for (int t = 0; t < b->tiles; t++) {
            fa_partial result = tile_result(&b[n], t, false);
            fa_partial_clear(&result);
        }
    for (int key = seen.begin / step * step; key < seen.end; key += step) {
        key_tile tile = {.keys = key_tile_at(b, part, key)};
        if (b->shape->turns && fa_walk_turns(b, blocks, tile.keys))
            continue;
        for (int n = 0; n < blocks; n++)
            walk_key_tile(&b[n], tile);
    }
}

/* ---- tasks ---- */

static int64_t head_of(const run *r, const block *b) { return b->at.b * r->plan.call->heads_k + b->at.head_k; }

static fa_partial part_at(const run *r, const block *b, int part)
{
    const plan *p    = &r->plan;
    float      *at   = r->parts + (head_of(r, b) * (p->max_splits + 1) + part) * r->part_floats;
    int64_t     rows = (int64_t)r->part_rows;
    return (fa_partial){at, at + rows * p->ldo, at + rows * p->ldo + fa_row_array(r->part_rows),
                        fa_tile_rows(&b->s->tiles[0]), p->ldo};
}

static fa_range part_keys(const block *b, int part)
{
    int64_t begin = (int64_t)part * b->shape->split_keys, end = begin + b->shape->split_keys;
    return (fa_range){(int)begin, end < FA_MAX_SEQLEN ? (int)end : FA_MAX_SEQLEN};
}

/* What the parts of the block's head have been folded into; parts_folded says how many. */
static fa_partial parts_sum(const run *r, const block *b) { return part_at(r, b, r->plan.max_splits); }

static void fold_part(run *r, const block *b, int part, const fa_partial *one)
{
    fa_partial sum = parts_sum(r, b);
    if (part == 0)
        fa_partial_clear(&sum);
    fa_partial_fold(&sum, one);
    atomic_store_explicit(&r->parts_folded[head_of(r, b)], part + 1, memory_order_release);
}

/* Parts of a sequence of one tile, of several heads. A part whose turn it is, as it always is on one thread, is folded
 * where it is; others are kept until all are there. */
static void run_parts(run *r, block *b, int heads, fa_range parts)
{
    for (int part = parts.begin; part < parts.end; part++) {
        walk_keys(b, heads, part_keys(b, part));
        for (int n = 0; n < heads; n++) {
            fa_partial own = tile_result(&b[n], 0, false), kept = part_at(r, &b[n], part);
            if (atomic_load_explicit(&r->parts_folded[head_of(r, &b[n])], memory_order_acquire) == part)
                fold_part(r, &b[n], part, &own);
            else
                fa_partial_copy(&kept, &own);
        }
    }
}

/* Whoever finishes the last part of a head folds those that are left, in order. */
static void fold_parts(run *r, block *b, int count)
{
    if (atomic_fetch_add(&r->parts_done[head_of(r, b)], count) + count < b->shape->splits)
        return;
    for (int n = atomic_load(&r->parts_folded[head_of(r, b)]); n < b->shape->splits; n++) {
        fa_partial one = part_at(r, b, n);
        fold_part(r, b, n, &one);
    }
    fa_partial sum = parts_sum(r, b);
    fa_forward_store_tile(b, 0, &sum);
}

/* All keys of a block in one walk. */
static void run_whole_block(block *b)
{
    fa_range part = part_keys(b, 0), seen = keys_of_block(b, part);
    int      step = b->shape->tile.k, key = seen.begin / step * step;
    b->lone = seen.end - key <= step;
    do {
        key_tile tile = {.first = key <= seen.begin, .last = key + step >= seen.end};
        if (seen.begin < seen.end)
            tile.keys = key_tile_at(b, part, key);
        walk_key_tile(b, tile);
        key += step;
    } while (key < seen.end);
}

static void run_block(block *b)
{
    if (b->whole) {
        run_whole_block(b);
        return;
    }
    bool split = b->shape->splits > 1;
    for (int part = 0; part < b->shape->splits; part++) {
        walk_keys(b, 1, part_keys(b, part));
        for (int t = 0; t < b->tiles && split; t++) {
            fa_partial own = tile_result(b, t, false), sum = tile_result(b, t, true);
            if (part == 0)
                fa_partial_clear(&sum);
            fa_partial_fold(&sum, &own);
        }
    }
    for (int t = 0; t < b->tiles; t++) {
        fa_partial result = tile_result(b, t, split);
        fa_forward_store_tile(b, t, &result);
    }
}

/* Scratch of the task's head number n: its own tile of queries and scores, the rest is shared. */
static scratch scratch_of_head(const plan *p, const scratch *s, int n)
{
    scratch one = *s;
    one.tiles += n;
    one.q += (size_t)n * p->q_bytes;
    one.o += (int64_t)n * p->tile_q * p->ldo;
    one.m = tile_floats(s->m, p, n);
    one.l = tile_floats(s->l, p, n);
    one.s += (int64_t)n * FA_TURN_ROWS * fa_score_ld(p->tile_k);
    one.rescale += n * FA_TURN_ROWS;
    return one;
}

static block begin_head(run *r, scratch *s, const shape *shape, int64_t b, int64_t head_k, fa_range tiles)
{
    const fa_call *call = r->plan.call;
    block          one  = {.run = r, .s = s, .shape = shape};
    one.at              = (fa_tile){.b = b, .head_k = head_k, .seq = fa_sequence_at(call, b)};
    one.scale           = fa_score_scale(call, b, head_k);
    one.to_natural =
        (fa_has_options(call, one.scale) ? 1.0 : (double)one.scale) / (double)fa_multiplier(call, one.scale);
    one.tiles = tiles.end - tiles.begin;
    begin_block(&one, tiles.begin);
    return one;
}

/* Parts of the keys of task_heads key heads from `first` on. */
static void run_part_task(run *r, scratch *s, const shape *shape, int64_t b, int64_t first, int64_t slot)
{
    int      heads = fa_min_int(shape->task_heads, (int)(r->plan.call->heads_k - first));
    int      begin = (int)slot * shape->task_parts;
    fa_range parts = {begin, fa_min_int(begin + shape->task_parts, shape->splits)};
    scratch  own[FA_TASK_HEADS];
    block    of[FA_TASK_HEADS];
    for (int n = 0; n < heads; n++) {
        own[n]         = scratch_of_head(&r->plan, s, n);
        of[n]          = begin_head(r, &own[n], shape, b, first + n, (fa_range){0, 1});
        of[n].keys_end = fa_min_int(part_keys(&of[n], parts.end - 1).end, of[n].at.seq.seqlen_k);
        if (slot == 0)
            fa_forward_store_unused_rows(&of[n]);
    }
    run_parts(r, of, heads, parts);
    for (int n = 0; n < heads; n++)
        fold_parts(r, &of[n], parts.end - parts.begin);
}

/* Tasks of a sequence: the last queries, which see most keys under a causal mask, come first, but parts of the keys in
 * their order. */
static void run_task(run *r, scratch *s, int64_t b, int64_t task)
{
    const plan *p      = &r->plan;
    fa_sequence seq    = fa_sequence_at(p->call, b);
    shape       shape  = fa_forward_shape(p, seq.seqlen_q, seq.seqlen_k);
    int64_t     groups = fa_forward_head_groups(p->call, &shape), head_k = task % groups * shape.task_heads;
    if (shape.parts_are_tasks) {
        run_part_task(r, s, &shape, b, head_k, task / groups);
        return;
    }
    int64_t slot = fa_forward_tasks_per_head(&shape) - 1 - task / groups;
    block   one  = begin_head(r, s, &shape, b, head_k, fa_forward_block_tiles(p, &shape, slot));
    one.keys_end = seq.seqlen_k;
    if (slot == 0)
        fa_forward_store_unused_rows(&one);
    run_block(&one);
}

/* K or V of one tile that all blocks of its head share. First tiles of all heads come first: blocks begin there. */
static void run_pack(run *r, scratch *s, int64_t task)
{
    const plan    *p     = &r->plan;
    const fa_call *call  = p->call;
    int64_t        pairs = call->batch * call->heads_k, pair = task / 2 % pairs, number = task / 2 / pairs;
    fa_tile        tile = {.b = pair / call->heads_k, .head_k = pair % call->heads_k};
    tile.seq            = fa_sequence_at(call, tile.b);
    shape    shape      = fa_forward_shape(p, tile.seq.seqlen_q, tile.seq.seqlen_k);
    fa_range queries = {0, tile.seq.seqlen_q}, keys = {tile.seq.key_begin, tile.seq.seqlen_k};
    fa_range seen  = fa_keys_seen(call->window, tile.seq.diagonal, queries, keys);
    int64_t  begin = number * shape.tile.k, end = begin + shape.tile.k;
    if (!shape.shared || begin >= seen.end || end <= seen.begin)
        return;
    tile.keys          = (fa_range){fa_max_int((int)begin, keys.begin), fa_min_int((int)end, keys.end)};
    packed_keys packed = fa_forward_shared_keys(r, &shape, pair, number);
    if (task % 2 == 0) {
        fa_rows rows = fa_key_rows(call, &call->k, &tile, s->row_k);
        shape.kernels->pack(FA_ROLE_K, packed.k, &rows, NULL);
    } else {
        fa_rows rows    = fa_key_rows(call, &call->v, &tile, s->row_v);
        *packed.num_bad = shape.kernels->pack(FA_ROLE_V, packed.v, &rows, packed.bad);
    }
    atomic_fetch_add_explicit(&r->shared_done[pair * p->shared_tiles + number], 1, memory_order_release);
}

static void run_thread(void *arg, int64_t index)
{
    run              *r       = arg;
    const fa_call    *call    = r->plan.call;
    fa_arena          arena   = {r->scratch + (size_t)index * r->scratch_bytes, 0};
    scratch           s       = fa_forward_carve_scratch(&arena, &r->plan);
    const fa_kernels *kernels = fa_forward_table(r->plan.cpu, call);
    int64_t           b       = 0, task;
    bool              entered = false;
    while ((task = atomic_fetch_add(&r->next, 1) - r->pack_tasks) < r->task_begin[call->batch]) {
        if (task < 0) {
            run_pack(r, &s, task + r->pack_tasks);
            continue;
        }
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

flash_attn_status fa_cpu_forward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    int       threads = fa_min_int(exec->num_threads, cpu->num_threads);
    run       r       = {.plan = fa_forward_plan(cpu, call, threads)};
    fa_memory memory;
    FA_TRY(fa_memory_get(&memory, cpu, exec, fa_forward_carve_run(&r, NULL)));
    fa_forward_carve_run(&r, memory.base);
    if (r.plan.parallel_splits) {
        memset(r.parts_done, 0, (size_t)(call->batch * call->heads_k) * sizeof(atomic_int));
        memset(r.parts_folded, 0, (size_t)(call->batch * call->heads_k) * sizeof(atomic_int));
    }
    for (int64_t n = 0; n < call->batch * call->heads_k * r.plan.shared_tiles; n++)
        atomic_store_explicit(&r.shared_done[n], 0, memory_order_relaxed);
    int64_t tasks = fa_forward_count_tasks(&r) + r.pack_tasks;
    atomic_store(&r.next, 0);
    fa_threads_run(cpu->threads, (int)(tasks < threads ? tasks : threads), run_thread, &r);
    fa_memory_free(&memory, cpu);
    return FLASH_ATTN_OK;
}
