/*
 * Algorithm 2 over tiles, the keys outside. A task is one tile of keys of one key head:
 *
 *     pack K, V                                                                    lines 5 to 7
 *     for each head of the group, for each tile of queries that sees the keys      lines 8, 9
 *         P = exp(S - LSE);  dP = dO V^T;  dS = P (dP - Delta)                     lines 10, 11, 13, 14
 *         dV += P^T dO;   dK += dS^T Q   the task's own, in float32                lines 12, 16
 *         dQ += dS K   shared, in float32: tiles of keys take turns, rising        line 15
 *
 * Taking turns keeps the order of dQ's sums fixed at any number of threads without a copy of dQ for each. Tasks are
 * handed out in rising order, so the one whose turn it is has always been started. Threads walk heads of their own side
 * by side; at one head they fall in step one tile of queries apart and then hardly wait. Packed Q and dO are made once
 * by whoever comes first, or before all else where several threads meet at one head, and shared. Both live in a slot of
 * their key head; there are slots for a few more key heads than can be in flight.
 */
#include "cpu/backward.h"
#include "cpu/gradient.h"
#include "cpu/passes.h"

#include <stdio.h>

/* ---- tiles of queries ---- */

/* Tiles of keys that may see these queries: numbers; empty if none. */
static fa_range key_tiles_of(const plan *p, const fa_sequence *seq, fa_range queries)
{
    fa_range keys = {seq->key_begin, seq->seqlen_k};
    fa_range seen = fa_keys_seen(p->call->window, seq->diagonal, queries, keys);
    if (seen.begin >= seen.end || queries.begin >= queries.end)
        return (fa_range){0, 0};
    return (fa_range){seen.begin / p->tile.k, (seen.end - 1) / p->tile.k + 1};
}

static fa_range tile_queries(const plan *p, const fa_sequence *seq, int number)
{
    return (fa_range){number * p->tile.q, fa_min_int((number + 1) * p->tile.q, seq->seqlen_q)};
}

static query_state *state_of(const run *r, int64_t pair, int64_t head_in_group, int number)
{
    return &r->state[(pair * r->plan.call->group + head_in_group) * r->plan.query_tiles + number];
}

static query_tile tile_in_slot(const run *r, int64_t pair, int64_t head_in_group, int number)
{
    const plan *p     = &r->plan;
    size_t      index = (size_t)(head_in_group * p->query_tiles + number);
    fa_arena    arena = {r->slots + (size_t)(pair % p->slots) * r->slot_bytes + index * fa_backward_query_tile_bytes(p),
                         0};
    return fa_backward_query_tile(&arena, p);
}

static void pack_queries(const run *r, const fa_tile *tile, const query_tile *t, scratch *s)
{
    const plan       *p    = &r->plan;
    const fa_call    *call = p->call;
    const fa_kernels *k    = p->kernels;
    fa_rows           rows = fa_query_rows(call, &call->q, tile, s->row);
    if (p->q_right_bytes && !p->fused)
        k->pack(FA_ROLE_Q, t->q, &rows, NULL);
    t->num_bad[0] = k->pack(p->q_right_bytes ? FA_ROLE_Q_RIGHT : FA_ROLE_Q, t->q_right, &rows, t->bad_q);
    rows          = fa_query_rows(call, &call->dout, tile, s->row);
    if (p->dout_right_bytes && !p->fused)
        k->pack(FA_ROLE_DO, t->dout, &rows, NULL);
    t->num_bad[1] = k->pack(p->dout_right_bytes ? FA_ROLE_DO_RIGHT : FA_ROLE_DO, t->dout_right, &rows, t->bad_dout);
    if (p->late_delta) {
        fa_rows o   = fa_query_rows(call, &call->o, tile, s->row_dout);
        float  *out = fa_delta_at(call, r->delta, &tile->seq, tile->head, tile->queries.begin);
        k->packed_row_dots(out, &o, &rows, t->dout_right);
    }
    fa_gather_rows(call, r->delta, tile, fa_score_scale(call, tile->b, tile->head_k), t->lse, t->lse_log2,
                   t->row_delta);
    for (int n = 0; n < t->num_bad[1]; n++) /* dP is made of zeros there; and where O is 0, Delta knows nothing of it */
        if (isfinite(t->row_delta[t->bad_dout[n]]))
            t->row_delta[t->bad_dout[n]] = NAN;
}

/* Packed Q and dO, by the first who needs them. */
static void need_packed(const run *r, const fa_tile *tile, const query_tile *t, query_state *state, scratch *s)
{
    int expected = 0;
    if (atomic_load_explicit(&state->packed, memory_order_acquire) == 2)
        return;
    if (atomic_compare_exchange_strong(&state->packed, &expected, 1)) {
        pack_queries(r, tile, t, s);
        atomic_store_explicit(&state->packed, 2, memory_order_release);
    } else {
        fa_wait_for(&state->packed, 2);
    }
}

/* ---- one tile of queries against one of keys ---- */

typedef struct step {
    const run *run;
    scratch   *s;
    fa_tile    tile;
    query_tile query;
    fa_visible visible;
    fa_range   shown; /* keys of the tile outside of which P and dS are 0; for all but fused steps */
    float      scale;
    fa_scales  times; /* of fused sums */
} step;

/* Nobody but the products looks at P and dS. */
static bool is_packed(const step *t)
{
    const plan    *p    = &t->run->plan;
    const fa_call *call = p->call;
    bool           bad  = t->query.num_bad[0] > 0 || t->query.num_bad[1] > 0 || t->s->num_bad_k > 0;
    return p->kernels->gradient_packed && !bad && !call->dropout.threshold && !(call->softcap > 0.0f);
}

static void add_dkv_packed(const step *t)
{
    const plan       *p    = &t->run->plan;
    const fa_kernels *k    = p->kernels;
    const scratch    *s    = t->s;
    int               rows = fa_tile_rows(&t->tile), first = t->shown.begin, keys = t->shown.end - first, ld = fa_score_ld(p->tile.k);
    const float      *at = s->p + first;
    if (p->call->dv.data)
        k->accumulate_t_packed(s->dv + first * p->ldv, p->ldv, at, ld, t->query.dout_right, rows, keys, (int)p->call->head_dim_v);
    if (p->call->dk.data)
        k->accumulate_t_packed(s->dk + first * p->ldq, p->ldq, at + ld, ld, t->query.q_right, rows, keys, (int)p->call->head_dim);
}

static void add_dkv(const step *t, const float *p_of_dv)
{
    const plan       *p    = &t->run->plan;
    const fa_call    *call = p->call;
    const fa_kernels *k    = p->kernels;
    scratch          *s    = t->s;
    int               rows = fa_tile_rows(&t->tile), keys = fa_tile_keys(&t->tile), ld = fa_score_ld(p->tile.k);
    int               first = t->shown.begin, shown = t->shown.end - first;
    if (call->dv.data) {
        k->accumulate_t(s->dv + first * p->ldv, p->ldv, p_of_dv + first, ld, t->query.dout_right, rows, shown, (int)call->head_dim_v, s->fused);
        if (t->query.num_bad[1] > 0) {
            fa_rows source = fa_query_rows(call, &call->dout, &t->tile, s->row);
            fa_add_bad_rows(k, s->dv, p->ldv, keys, p_of_dv, 1, ld, &source, t->query.bad_dout, t->query.num_bad[1],
                            s->temp);
        }
    }
    if (call->dk.data) {
        k->accumulate_t(s->dk + first * p->ldq, p->ldq, s->ds + first, ld, t->query.q_right, rows, shown, (int)call->head_dim, s->fused);
        if (t->query.num_bad[0] > 0) {
            fa_rows source = fa_query_rows(call, &call->q, &t->tile, s->row);
            fa_add_bad_rows(k, s->dk, p->ldq, keys, s->ds, 1, ld, &source, t->query.bad_q, t->query.num_bad[0],
                            s->temp);
        }
    }
}

static void add_dq(const step *t)
{
    const plan       *p    = &t->run->plan;
    const fa_kernels *k    = p->kernels;
    scratch          *s    = t->s;
    int               rows = fa_tile_rows(&t->tile), first = t->shown.begin, keys = t->shown.end - first, ld = fa_score_ld(p->tile.k);
    const void       *right = fa_packed_part(k, FA_ROLE_K_RIGHT, s->k_right, first, p->call->head_dim);
    if (is_packed(t)) { /* dS is 16 bits */
        k->accumulate_packed(t->query.dq, p->ldq, NULL, s->ds + first / 2, ld, right, rows, keys, (int)p->call->head_dim);
        return;
    }
    k->accumulate(t->query.dq, p->ldq, NULL, s->ds + first, ld, right, rows, keys, (int)p->call->head_dim, s->fused);
    fa_add_bad_rows(k, t->query.dq, p->ldq, rows, s->ds, ld, 1, &s->k_rows, s->bad_k, s->num_bad_k, s->temp);
}

static fa_backward_block fused_block(const step *t, fa_range part)
{
    const plan    *p    = &t->run->plan;
    const fa_call *call = p->call;
    const scratch *s    = t->s;
    return (fa_backward_block){.q_right    = t->query.q_right,
                               .dout_right = t->query.dout_right,
                               .k          = s->k_right,
                               .v          = s->v_t,
                               .lse_log2   = t->query.lse_log2,
                               .delta      = t->query.row_delta,
                               .dk         = s->dk_tiled,
                               .dv         = s->dv_tiled,
                               .dq         = t->query.dq_tiled,
                               .rows       = fa_tile_rows(&t->tile),
                               .keys       = fa_tile_keys(&t->tile),
                               .part       = part,
                               .head_dim   = (int)call->head_dim,
                               .head_dim_v = (int)call->head_dim_v,
                               .window     = call->window,
                               .diagonal   = t->tile.seq.diagonal + t->tile.queries.begin - t->tile.keys.begin,
                               .multiplier = fa_multiplier(call, t->scale),
                               .p_log2     = t->times.p_log2,
                               .ds_log2    = t->times.ds_log2,
                               .scratch    = s->fused};
}

/* Adds to dK and dV, and leaves dS for dQ. Rows of Q and K that are not finite need no more than their place among the
 * scores: where they are seen P is NaN. */
static void run_fused(const step *t, fa_range part)
{
    const plan       *p     = &t->run->plan;
    fa_backward_block block = fused_block(t, part);
    fa_block_options  options;
    fa_rows           dout;
    uint32_t          bit = 1u << part.begin / p->kernels->part_keys;
    block.options         = fa_options_of(&options, p->call, &t->tile, t->visible, t->scale);
    block.fresh_keys      = (t->s->fresh_parts & bit) != 0;
    t->s->fresh_parts &= ~bit;
    if (t->query.num_bad[1] > 0) {
        dout               = fa_query_rows(p->call, &p->call->dout, &t->tile, t->s->row);
        block.dout_rows    = &dout;
        block.bad_dout     = t->query.bad_dout;
        block.num_bad_dout = t->query.num_bad[1];
    }
    p->kernels->backward_block(&block);
}

static void run_composed(const step *t)
{
    const plan      *p       = &t->run->plan;
    const fa_call   *call    = p->call;
    scratch         *s       = t->s;
    fa_tile_gradient g       = {.kernels = p->kernels,
                                .call    = call,
                                .tile    = &t->tile,
                                .visible = t->visible,
                                .scale   = t->scale,
                                .q       = t->query.q,
                                .dout    = t->query.dout,
                                .k       = s->k,
                                .v_t     = s->v_t,
                                .lse     = t->query.lse,
                                .delta   = t->query.row_delta,
                                .p       = s->p,
                                .ds      = s->ds,
                                .slope   = call->softcap > 0.0f ? s->slope : NULL,
                                .dropped = s->dropped,
                                .ld      = fa_score_ld(p->tile.k),
                                .packed  = is_packed(t)};
    const float     *p_of_dv = fa_score_gradient(&g);
    if (g.packed) {
        add_dkv_packed(t);
        return;
    }
    fa_softcap_gradient(&g);
    add_dkv(t, p_of_dv);
}

/* The tile's turn at dQ: the first of those that may see these queries finds nothing in it, the last one stores it. */
static void clear_dq(const step *t)
{
    const plan *p = &t->run->plan;
    if (p->fused)
        memset(t->query.dq_tiled, 0, sizeof(float) * (size_t)fa_tiled_floats(p->tile.q, p->ldq));
    else
        memset(t->query.dq, 0, sizeof(float) * (size_t)fa_tile_rows(&t->tile) * (size_t)p->ldq);
}

static void end_turn(const step *t, query_state *state, fa_range turns, int turn)
{
    if (turn == turns.end - 1)
        fa_backward_store_dq(&t->run->plan, &t->tile, &t->query, ldexpf(t->scale, -t->times.ds_log2));
    atomic_store_explicit(&state->turn, turn + 1, memory_order_release);
}

/* Fused steps go part by part, so that P and dS of one part are all that there is. */
static void run_parts(const step *t, query_state *state, fa_range turns, int turn)
{
    const plan *p    = &t->run->plan;
    int         keys = fa_tile_keys(&t->tile), step = p->fused ? p->kernels->part_keys : keys;
    for (int begin = 0; begin < keys; begin += step) {
        fa_range part = {begin, fa_min_int(begin + step, keys)};
        if (p->fused)
            run_fused(t, part);
        else
            run_composed(t);
        if (!p->call->dq.data)
            continue;
        bool fresh = begin == 0 && turn == turns.begin;
        if (begin == 0)
            fa_wait_for(&state->turn, turn);
        if (p->fused) {
            fa_backward_block block = fused_block(t, part);
            block.fresh_dq          = fresh;
            p->kernels->backward_dq(&block);
        } else {
            if (fresh)
                clear_dq(t);
            add_dq(t);
        }
    }
}

static void run_step(step *t, int64_t pair, int64_t head_in_group, int number, int key_tile)
{
    const plan *p     = &t->run->plan;
    fa_range    turns = key_tiles_of(p, &t->tile.seq, t->tile.queries);
    if (key_tile < turns.begin || key_tile >= turns.end)
        return;
    query_state *state = state_of(t->run, pair, head_in_group, number);
    t->query           = tile_in_slot(t->run, pair, head_in_group, number);
    t->visible         = fa_tile_visible(p->call, &t->tile);
    t->shown           = fa_keys_shown(p->kernels, p->call, &t->tile, t->tile.queries);
    if (t->visible != FA_VISIBLE_NONE && t->shown.begin < t->shown.end) {
        need_packed(t->run, &t->tile, &t->query, state, t->s);
        run_parts(t, state, turns, key_tile);
    } else if (p->call->dq.data) {
        fa_wait_for(&state->turn, key_tile);
        if (key_tile == turns.begin)
            clear_dq(t);
    }
    if (p->call->dq.data)
        end_turn(t, state, turns, key_tile);
}

/* ---- a task: one tile of keys ---- */

static void pack_keys(const plan *p, const fa_tile *tile, scratch *s)
{
    fa_rows rows = fa_key_rows(p->call, &p->call->v, tile, s->row);
    p->kernels->pack(fa_role_of_v(p), s->v_t, &rows, NULL);
    s->k_rows = fa_key_rows(p->call, &p->call->k, tile, s->row_k);
    if (!p->fused)
        p->kernels->pack(FA_ROLE_K, s->k, &s->k_rows, NULL);
    s->num_bad_k = p->kernels->pack(FA_ROLE_K_RIGHT, s->k_right, &s->k_rows, s->bad_k);
    s->fresh_parts = ~0u;
    if (!p->fused) {
        memset(s->dk, 0, sizeof(float) * (size_t)fa_tile_keys(tile) * (size_t)p->ldq);
        memset(s->dv, 0, sizeof(float) * (size_t)fa_tile_keys(tile) * (size_t)p->ldv);
    }
}

static int64_t key_tiles(const plan *p, const fa_sequence *seq)
{
    int64_t tiles = (seq->seqlen_k + p->tile.k - 1) / p->tile.k;
    return tiles > 0 ? tiles : 1; /* one to write zeros */
}

/* Set the task's key head and return its tile of keys. As many heads as there are threads go side by side, tile by
 * tile, so that threads seldom meet at one head's dQ. Within a head tiles still rise. */
static int take_task(const plan *p, fa_tile *tile, int64_t task)
{
    int64_t tiles = key_tiles(p, &tile->seq), heads = p->call->heads_k;
    int64_t begin = task / (tiles * p->threads) * p->threads; /* of the heads that go together */
    int64_t width = heads - begin < p->threads ? heads - begin : p->threads;
    task -= begin * tiles;
    tile->head_k = begin + task % width;
    return (int)(task / width);
}

static void run_task(run *r, scratch *s, int64_t b, int64_t task)
{
    const plan    *p    = &r->plan;
    const fa_call *call = p->call;
    step t = {.run = r, .s = s, .tile = {.b = b, .heads = 1, .seq = fa_sequence_at(call, b), .slices = s->slices}};
    int  key_tile = take_task(p, &t.tile, task), first = key_tile * p->tile.k;
    t.tile.keys =
        (fa_range){fa_max_int(first, t.tile.seq.key_begin), fa_min_int(first + p->tile.k, t.tile.seq.seqlen_k)};
    t.scale      = fa_score_scale(call, b, t.tile.head_k);
    int64_t pair = b * call->heads_k + t.tile.head_k;
    if (p->kernels->row_norm)
        t.times = fa_backward_scales(r, pair);
    for (int64_t user = pair - p->slots; user >= 0; user -= p->slots) { /* all who used the slot must have left */
        fa_wait_for(&r->tasks_left[user], 0);
        if (r->task_begin[user / call->heads_k + 1] > r->task_begin[user / call->heads_k])
            break; /* its tasks have waited for those before it */
    }

    fa_range all      = {0, t.tile.seq.seqlen_q};
    fa_range seeing   = fa_queries_seeing(call->window, t.tile.seq.diagonal, all, t.tile.keys);
    t.tile.num_slices = fa_slices_touching(call, b, all, t.tile.keys, s->slices);
    if (key_tile == 0)
        fa_backward_store_unused_keys(p, &t.tile, s->temp);
    if (t.tile.keys.begin < t.tile.keys.end) {
        pack_keys(p, &t.tile, s);
        for (int64_t g = 0; g < call->group; g++) {
            t.tile.head = t.tile.head_k * call->group + g;
            for (int number = seeing.begin / p->tile.q; number * p->tile.q < seeing.end; number++) {
                t.tile.queries = tile_queries(p, &t.tile.seq, number);
                run_step(&t, pair, g, number, key_tile);
            }
        }
        fa_backward_store_keys(p, &t.tile, s, t.scale, t.times);
    }
    atomic_fetch_sub_explicit(&r->tasks_left[pair], 1, memory_order_acq_rel);
}

/* ---- before and after: Delta (line 4) and the state of tiles; gradients of bias and sinks ---- */

/* True if the run is the one of this sequence. */
static bool takes(const plan *p, const fa_sequence *seq)
{
    return p->kernels == fa_backward_kernels(p->cpu, p->call, p->call->group * seq->seqlen_q, seq->seqlen_k);
}

/* Of one head; one where there are none, for what is not about queries. */
static int64_t prepared_tiles(const plan *p) { return p->query_tiles > 0 ? p->query_tiles : 1; }

/* One tile of queries of one head: Delta, the tile's state, and zeros where nothing is seen. Where heads are fewer than
 * threads, which then meet at one head, also packed Q and dO: the first thread at a head would do it for all the others
 * while they wait. Else whoever comes first packs, and finds it in its cache. */
static void prepare_tile(run *r, scratch *s, int64_t b, int64_t head, int number)
{
    const plan    *p       = &r->plan;
    const fa_call *call    = p->call;
    fa_sequence    seq     = fa_sequence_at(call, b);
    int64_t        pair    = b * call->heads_k + head / call->group;
    fa_range       queries = tile_queries(p, &seq, number);
    if (head % call->group == 0 && number == 0)
        atomic_store_explicit(&r->tasks_left[pair], seq.rows_k > 0 && takes(p, &seq) ? (int)key_tiles(p, &seq) : 0,
                              memory_order_relaxed);
    if (!takes(p, &seq) || number * p->tile.q >= seq.rows_q)
        return;
    fa_range     turns = key_tiles_of(p, &seq, queries);
    query_state *state = state_of(r, pair, head % call->group, number);
    if (queries.begin < queries.end && !p->late_delta)
        fa_fill_delta(p->kernels, call, r->delta, &seq, head, queries, s->row, s->row_dout);
    fa_tile tile = {.b = b, .head_k = head / call->group, .seq = seq, .head = head, .heads = 1, .queries = queries};
    if (queries.begin < queries.end && p->kernels->row_norm)
        fa_backward_find_norms(r, s, &tile, pair);
    atomic_store_explicit(&state->packed, 0, memory_order_relaxed);
    atomic_store_explicit(&state->turn, turns.begin, memory_order_relaxed);
    if (turns.begin < turns.end && p->pairs < p->threads) {
        query_tile t = tile_in_slot(r, pair, head % call->group, number);
        need_packed(r, &tile, &t, state, s);
    }
    int unseen = turns.begin < turns.end ? queries.end : queries.begin; /* from here on dQ is zero */
    int end    = fa_min_int((number + 1) * p->tile.q, seq.rows_q);
    memset(s->temp, 0, sizeof(float) * (size_t)p->ldq);
    for (int i = fa_max_int(unseen, number * p->tile.q); call->dq.data && i < end; i++)
        p->kernels->store(fa_at(&call->dq, seq.q_entry, seq.q_row + i, head, 0), call->dq.stride[3], call->dq.dtype,
                          s->temp, (int)call->head_dim, 1.0f);
}

static scratch thread_scratch(const run *r, int64_t index)
{
    fa_arena arena = {r->scratch + (size_t)index * r->scratch_bytes, 0};
    return fa_backward_scratch(&arena, &r->plan);
}

static void prepare_thread(void *arg, int64_t index)
{
    run           *r     = arg;
    const fa_call *call  = r->plan.call;
    scratch        s     = thread_scratch(r, index);
    int64_t        tiles = prepared_tiles(&r->plan), task;
    if (r->plan.kernels->enter)
        r->plan.kernels->enter();
    while ((task = atomic_fetch_add(&r->next_delta, 1)) < call->batch * call->heads_q * tiles) {
        int64_t head = task / tiles;
        prepare_tile(r, &s, head / call->heads_q, head % call->heads_q, (int)(task % tiles));
    }
    if (r->plan.kernels->leave)
        r->plan.kernels->leave();
}

static void main_thread(void *arg, int64_t index)
{
    run           *r    = arg;
    const fa_call *call = r->plan.call;
    scratch        s    = thread_scratch(r, index);
    int64_t        b    = 0, task;
    if (r->plan.kernels->enter)
        r->plan.kernels->enter();
    while ((task = atomic_fetch_add(&r->next, 1)) < r->task_begin[call->batch]) {
        while (r->task_begin[b + 1] <= task)
            b++;
        run_task(r, &s, b, task - r->task_begin[b]);
    }
    int64_t bias_tasks = r->last ? fa_dbias_tasks(r->plan.tile, call) : 0;
    int64_t sinks      = r->last && call->dsinks.data ? call->heads_q : 0;
    while ((task = atomic_fetch_add(&r->next_bias, 1)) < bias_tasks)
        fa_dbias_task(r->plan.kernels, r->plan.tile, call, r->delta, task,
                      r->scratch + (size_t)index * r->scratch_bytes);
    while ((task = atomic_fetch_add(&r->next_sink, 1)) < sinks)
        fa_dsinks_task(call, r->delta, task);
    if (r->plan.kernels->leave)
        r->plan.kernels->leave();
}

static int64_t count_tasks(run *r)
{
    const fa_call *call  = r->plan.call;
    int64_t        total = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        fa_sequence seq  = fa_sequence_at(call, b);
        r->task_begin[b] = total;
        total += seq.rows_k > 0 && takes(&r->plan, &seq) ? key_tiles(&r->plan, &seq) * call->heads_k : 0;
    }
    r->task_begin[call->batch] = total;
    return total;
}

/* ---- the entry points ---- */

/* The tables that sequences of the call may take, the usual one first; sets how many. */
typedef struct tables {
    const fa_kernels *list[2];
    int               count;
} tables;

static tables tables_of(const fa_cpu *cpu, const fa_call *call)
{
    const fa_kernels *large = fa_backward_kernels(cpu, call, FA_MAX_SEQLEN, FA_MAX_SEQLEN);
    const fa_kernels *small = fa_backward_kernels(cpu, call, 1, 1);
    return (tables){{large, small}, large == small ? 1 : 2};
}

size_t fa_backward_bytes(const fa_cpu *cpu, const fa_call *call, int threads)
{
    tables t     = tables_of(cpu, call);
    size_t bytes = 0;
    for (int n = 0; n < t.count; n++) {
        run    r   = {.plan = fa_backward_plan(cpu, call, t.list[n], threads)};
        size_t one = fa_backward_carve(&r, NULL);
        bytes      = one > bytes ? one : bytes;
    }
    return bytes;
}

void fa_backward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation)
{
    const fa_kernels *k =
        fa_backward_kernels(cpu, call, call->group * call->max_seqlen_q, call->max_seqlen_k); /* of the longest */
    run r = {.plan = fa_backward_plan(cpu, call, k, threads)};
    fa_backward_carve(&r, NULL);
    int64_t count = fa_num_lengths(call);
    for (int64_t b = 0; b < count; b++) {
        fa_sequence seq = fa_sequence_at(call, b);
        explanation->num_tasks += seq.rows_k > 0 ? key_tiles(&r.plan, &seq) * call->heads_k * (call->batch / count) : 0;
    }
    explanation->tile_q        = r.plan.tile.q;
    explanation->tile_k        = r.plan.tile.k;
    explanation->scratch_bytes = (int64_t)r.scratch_bytes;
    snprintf(explanation->kernel, sizeof explanation->kernel, "backward_%s", r.plan.kernels->name);
    snprintf(explanation->reason, sizeof explanation->reason,
             "keys outside; packed Q and dO shared by all tiles of keys; dQ summed in the order of the keys%s",
             fa_tiles_origin(cpu, r.plan.kernels, call));
}

/* True if some sequence takes the table, and of the first also if there is none. */
static bool is_used(const fa_cpu *cpu, const fa_call *call, const tables *t, int n)
{
    bool any = false;
    for (int64_t b = 0; b < call->batch && t->count > 1; b++) {
        fa_sequence       seq = fa_sequence_at(call, b);
        const fa_kernels *k   = fa_backward_kernels(cpu, call, call->group * seq.seqlen_q, seq.seqlen_k);
        if (k == t->list[n])
            return true;
        any = true;
    }
    return n == 0 && !any;
}

/* The sequences of one table. */
static void run_table(run *r, fa_cpu *cpu)
{
    const fa_call *call    = r->plan.call;
    int            threads = r->plan.threads;
    atomic_store(&r->next_delta, 0);
    atomic_store(&r->next, 0);
    atomic_store(&r->next_bias, 0);
    atomic_store(&r->next_sink, 0);
    for (int64_t n = 0; r->plan.kernels->row_norm && n < 2 * r->plan.pairs; n++)
        atomic_store_explicit(&r->norms[n], 0, memory_order_relaxed);
    int64_t first = call->batch * call->heads_q * prepared_tiles(&r->plan);
    int64_t tasks = count_tasks(r) + fa_dbias_tasks(r->plan.tile, call) + call->heads_q;
    fa_threads_run(cpu->threads, (int)(first < threads ? first : threads), prepare_thread, r);
    fa_threads_run(cpu->threads, (int)(tasks < threads ? tasks : threads), main_thread, r);
}

flash_attn_status fa_cpu_backward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    int       threads = fa_min_int(exec->num_threads, cpu->num_threads);
    tables    t       = tables_of(cpu, call);
    fa_memory memory;
    FA_TRY(fa_memory_get(&memory, cpu, exec, fa_backward_bytes(cpu, call, threads)));
    bool second = t.count > 1 && is_used(cpu, call, &t, 1);
    for (int n = 0; n < t.count; n++) {
        if (n == 0 ? !is_used(cpu, call, &t, 0) : !second)
            continue;
        run r = {.plan = fa_backward_plan(cpu, call, t.list[n], threads), .last = n == 1 || !second};
        fa_backward_carve(&r, memory.base);
        run_table(&r, cpu);
    }
    fa_memory_free(&memory, cpu);
    return FLASH_ATTN_OK;
}
