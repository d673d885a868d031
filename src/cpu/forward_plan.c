/*
 * How the forward cuts a call into tasks, and what memory it takes. Sequences are cut by their own shape; how many
 * tiles of queries make a block, and whether blocks share packed keys, depends on the threads too and changes no bit.
 */
#include "cpu/forward.h"
#include "cpu/passes.h"
#include "cpu/split.h"

#include <stdio.h>

#define MAX_PARTS_BYTES (32 << 20)
#define MAX_SHARED_BYTES (64 << 20)
#define MOST_TASK_PARTS 8
#define LEAST_THREAD_TASKS 8 /* so that threads end together */
#define PAGE_BYTES 4096

/* ---- one sequence ---- */

/* The direct path reads whole vectors, or rows of tiles, in place. */
static bool readable_in_place(const fa_kernels *kernels, const flash_attn_tensor *t)
{
    return t->stride[3] == 1 && t->shape[3] % kernels->few_cols == 0 && t->dtype != FLASH_ATTN_F8E4M3;
}

/* The most rows for which K and V are read in place. */
static int few_rows(const fa_kernels *kernels, const fa_call *call)
{
    return call->head_dim > FA_WIDE_HEAD && kernels->few_rows_wide ? kernels->few_rows_wide : kernels->few_rows;
}

/* The table that reads K and V where they lie, for `rows` rows; NULL: none does. */
static const fa_kernels *few_kernels(const plan *p, int64_t rows)
{
    const fa_call    *call   = p->call;
    const fa_kernels *two[2] = {fa_forward_table(p->cpu, call), p->cpu->vector};
    for (int n = 0; n < 2; n++) {
        const fa_kernels *one = two[n];
        if (one->scores_few && rows >= one->few_least && rows <= few_rows(one, call) &&
            readable_in_place(one, &call->k) && readable_in_place(one, &call->v))
            return one;
    }
    return NULL;
}

/* Blocks that share packed keys: the first quarter of the tiles, whose tasks come last, in blocks a quarter as long, so
 * that threads finish together. */
static void cut_blocks(const plan *p, shape *s)
{
    s->small       = fa_max_int(1, p->tiles_per_block / 4);
    s->small_tiles = s->shared ? fa_min_int(s->tiles, (int)fa_round_up(s->tiles / 4, s->small)) : 0;
    s->blocks      = (s->small_tiles + s->small - 1) / s->small +
                (s->tiles - s->small_tiles + p->tiles_per_block - 1) / p->tiles_per_block;
}

fa_range fa_forward_block_tiles(const plan *p, const shape *s, int64_t block)
{
    int64_t small = (s->small_tiles + s->small - 1) / s->small, first = block * s->small, size = s->small;
    if (block >= small)
        first = s->small_tiles + (block - small) * p->tiles_per_block, size = p->tiles_per_block;
    int64_t most = block < small ? s->small_tiles : s->tiles, end = first + size;
    return (fa_range){(int)first, (int)(end < most ? end : most)};
}

/* Whether a key's heads lie side by side: then they take turns at few keys, so that memory is read in its own order. */
static bool heads_side_by_side(const fa_call *call)
{
    return call->heads_k > 1 && call->k.stride[1] >= call->k.stride[2] && call->v.stride[1] >= call->v.stride[2];
}

/* A task's parts follow one another: K of the next is asked for during V of the last. Where heads lie side by side and
 * take no turns, tasks of the same keys follow one another instead. */
static int parts_of_task(const plan *p, const shape *s)
{
    int64_t tasks = p->call->batch * fa_forward_head_groups(p->call, s) * s->splits;
    int64_t most  = tasks / (LEAST_THREAD_TASKS * p->threads);
    if (!s->turns && heads_side_by_side(p->call))
        return 1;
    return most < 1 ? 1 : most < MOST_TASK_PARTS ? (int)most : MOST_TASK_PARTS;
}

shape fa_forward_shape(const plan *p, int seqlen_q, int seqlen_k)
{
    const fa_call    *call = p->call;
    int64_t           rows = call->group * seqlen_q;
    shape             s    = {0};
    const fa_kernels *few  = few_kernels(p, rows);
    s.few                  = few != NULL;
    s.kernels              = few ? few : fa_forward_kernels(p->cpu, call, rows, seqlen_k);
    s.tile                 = fa_tiles(p->cpu, s.kernels, call);
    s.heads_per_tile       = seqlen_q < s.tile.q ? fa_min_int((int)call->group, s.tile.q / fa_max_int(seqlen_q, 1)) : 1;
    s.head_tiles           = (int)((call->group + s.heads_per_tile - 1) / s.heads_per_tile);
    s.tiles                = fa_max_int(1, (seqlen_q + s.tile.q - 1) / s.tile.q) * s.head_tiles;
    s.shared               = p->shared_tiles > 0 && !s.few && s.tiles > (p->heads_together ? 1 : p->tiles_per_block);
    int least              = fa_least_split_keys(p->cpu, call->group * fa_max_int(seqlen_q, 1)); /* max_splits counts with one query */
    s.split_keys           = fa_split_keys(call->num_splits, least, rows, s.tile, seqlen_k);
    s.splits               = fa_max_int(1, (seqlen_k + s.split_keys - 1) / s.split_keys);
    s.parts_are_tasks      = p->parallel_splits && s.tiles == 1 && s.splits > 1;
    s.turns                = s.few && rows <= FA_TURN_ROWS && heads_side_by_side(call);
    s.task_heads           = s.turns && s.parts_are_tasks ? fa_min_int((int)call->heads_k, FA_TASK_HEADS) : 1;
    s.task_parts           = parts_of_task(p, &s);
    cut_blocks(p, &s);
    return s;
}

int64_t fa_forward_tasks_per_head(const shape *s)
{
    return s->parts_are_tasks ? (s->splits + s->task_parts - 1) / s->task_parts : s->blocks;
}

int64_t fa_forward_head_groups(const fa_call *call, const shape *s)
{
    return (call->heads_k + s->task_heads - 1) / s->task_heads;
}

/* ---- the call ---- */

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

/* Rows of a split sequence: at most a tile, or all there are. */
static int64_t part_rows(const plan *p)
{
    int64_t rows = p->call->group * p->call->max_seqlen_q;
    return rows < p->tile_q ? rows : p->tile_q;
}

static packed_keys carve_keys(fa_arena *arena, size_t k_bytes, size_t v_bytes, int tile_k)
{
    packed_keys keys;
    keys.k       = fa_carve(arena, k_bytes);
    keys.v       = fa_carve(arena, v_bytes);
    keys.bad     = fa_carve(arena, (size_t)tile_k * sizeof(int));
    keys.num_bad = fa_carve(arena, sizeof(int));
    return keys;
}

/* A packed tile of the sequences that take this table. */
static packed_keys carve_keys_of(fa_arena *arena, const plan *p, const fa_kernels *kernels)
{
    int tile_k = fa_tiles(p->cpu, kernels, p->call).k;
    return carve_keys(arena, kernels->packed_bytes(FA_ROLE_K, tile_k, (int)p->call->head_dim),
                      kernels->packed_bytes(FA_ROLE_V, tile_k, (int)p->call->head_dim_v), tile_k);
}

static size_t packed_tile_bytes(const plan *p, const fa_kernels *kernels)
{
    fa_arena arena = {NULL, 0};
    carve_keys_of(&arena, p, kernels);
    return arena.used;
}

/* Room for the packed keys of a head, whichever table its sequence takes; none if all heads' take too much. */
static void make_room_to_share(plan *p)
{
    int64_t tiles_of_head = 0, bytes_of_head = 0, pairs = p->call->batch * p->call->heads_k;
    for (int n = 0; n < 2; n++) {
        const fa_kernels *kernels = n ? p->cpu->vector : fa_forward_table(p->cpu, p->call);
        int64_t           tile_k  = fa_tiles(p->cpu, kernels, p->call).k;
        int64_t           tiles   = (p->call->max_seqlen_k + tile_k - 1) / tile_k;
        int64_t           bytes   = tiles * (int64_t)packed_tile_bytes(p, kernels);
        tiles_of_head             = tiles > tiles_of_head ? tiles : tiles_of_head;
        bytes_of_head             = bytes > bytes_of_head ? bytes : bytes_of_head;
    }
    if (bytes_of_head > 0 && pairs <= MAX_SHARED_BYTES / bytes_of_head) {
        p->shared_tiles = tiles_of_head;
        p->shared_bytes = (size_t)bytes_of_head;
    }
}

/* Whether heads lie side by side and one's keys touch so many pages that all heads' are packed first. */
static bool packs_heads_together(const plan *p)
{
    const fa_call *call  = p->call;
    int64_t        row   = call->k.stride[1] * (int64_t)fa_dtype_bytes(call->k.dtype);
    int64_t        pages = call->max_seqlen_k * (row < PAGE_BYTES ? row : PAGE_BYTES) / PAGE_BYTES;
    return heads_side_by_side(call) && fa_packs_heads_together(fa_forward_table(p->cpu, call), pages,
                                                               call->group * call->max_seqlen_q / p->tile_q);
}

static int64_t second_level_bytes(const plan *p) { return p->cpu->isa.l2_bytes > 0 ? p->cpu->isa.l2_bytes : 512 << 10; }

/* As many tiles as fill half of the second-level cache (or what was measured) with Q and O, but enough blocks for the
 * context's threads. Where these cut heads into short blocks, or heads' keys are packed together, the blocks share packed
 * keys: two for each thread, the last of them cut smaller (cut_blocks), for a block still reads all its keys. Else four,
 * to be even. */
static void choose_blocks(plan *p)
{
    const fa_call *call  = p->call;
    int64_t        l2    = second_level_bytes(p);
    int64_t        bytes = (int64_t)p->q_bytes + (int64_t)p->tile_q * p->ldo * 4;
    int64_t        share = fa_block_l2_percent(p->cpu);
    int64_t        least = fa_least_block_rows(p->cpu, fa_forward_table(p->cpu, call)) / p->tile_q;
    int64_t        fit = l2 * share / 100 / bytes, threads = p->cpu->num_threads;
    int64_t        all     = call->q.shape[0] * call->q.shape[1] * call->heads_q / p->tile_q;
    int64_t        longest = (call->max_seqlen_q / p->tile_q + 1) * call->group; /* no block has more */
    int64_t        tiles   = threads > 1 ? all / (2 * threads) : all;
    bool           several = call->group * call->max_seqlen_q > p->tile_q; /* tiles of a key head */
    fit                    = fit > least ? fit : least;
    p->heads_together = packs_heads_together(p);
    if (p->heads_together || (threads > 1 && several && tiles < fit && tiles < longest))
        make_room_to_share(p);
    if (threads > 1 && p->shared_tiles == 0)
        tiles = all / (4 * threads);
    tiles              = tiles < fit ? tiles : fit;
    tiles              = tiles < longest ? tiles : longest;
    p->tiles_per_block = (int)(tiles < 1 ? 1 : tiles > 64 ? 64 : tiles);
}

plan fa_forward_plan(const fa_cpu *cpu, const fa_call *call, int threads)
{
    plan p = {.cpu = cpu, .call = call, .threads = threads, .ldo = fa_accumulator_ld(call->head_dim_v)};
    add_table_sizes(&p, fa_forward_table(cpu, call));
    add_table_sizes(&p, cpu->vector);
    choose_blocks(&p);
    double bytes  = fa_tensor_bytes(&call->q) + fa_tensor_bytes(&call->k) + fa_tensor_bytes(&call->v) + fa_tensor_bytes(&call->o);
    p.past_caches = bytes / threads > (double)second_level_bytes(&p);
    p.max_splits  = fa_max_splits(call->num_splits, fa_least_split_keys(cpu, call->group), 16, call->max_seqlen_k);
    if (p.max_splits > 1) {
        /* Parts as tasks: threads have something to do, and tasks of the same keys follow one another, which saves page
         * walks where heads lie side by side. With many heads neither is worth the memory. */
        int64_t heads = call->batch * call->heads_k, rows = part_rows(&p);
        p.parallel_splits = heads < 4 * cpu->num_threads || heads * p.max_splits * rows * p.ldo * 4 <= MAX_PARTS_BYTES;
    }
    return p;
}

static int64_t tasks_of(const fa_call *call, const fa_sequence *seq, const shape *s)
{
    return seq->rows_q > 0 ? fa_forward_tasks_per_head(s) * fa_forward_head_groups(call, s) : 0;
}

int64_t fa_forward_count_tasks(run *r)
{
    const fa_call *call  = r->plan.call;
    int64_t        total = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        fa_sequence seq   = fa_sequence_at(call, b);
        shape       shape = fa_forward_shape(&r->plan, seq.seqlen_q, seq.seqlen_k);
        r->task_begin[b]  = total;
        total += tasks_of(call, &seq, &shape);
    }
    r->task_begin[call->batch] = total;
    r->pack_tasks              = 2 * call->batch * call->heads_k * r->plan.shared_tiles;
    return total;
}

/* ---- memory ---- */

scratch fa_forward_carve_scratch(fa_arena *arena, const plan *p)
{
    int64_t heads = p->parallel_splits && heads_side_by_side(p->call) ? FA_TASK_HEADS : 1;
    int64_t tiles = fa_max_int(p->tiles_per_block, (int)heads), sums = p->max_splits > 1 ? tiles : 0;
    int64_t rows = fa_row_array(p->tile_q), score_rows = fa_max_int(p->tile_q, (int)heads * FA_TURN_ROWS);
    scratch s  = {0};
    s.tiles    = fa_carve(arena, (size_t)tiles * sizeof(fa_tile));
    s.q        = fa_carve(arena, (size_t)tiles * p->q_bytes);
    s.o        = fa_carve_floats(arena, tiles * p->tile_q * p->ldo);
    s.m        = fa_carve_floats(arena, tiles * rows);
    s.l        = fa_carve_floats(arena, tiles * rows);
    s.own      = carve_keys(arena, p->k_bytes, p->v_bytes, p->tile_k);
    s.s        = fa_carve_floats(arena, score_rows * fa_score_ld(p->tile_k));
    s.rescale  = fa_carve_floats(arena, rows + heads * FA_TURN_ROWS);
    s.temp     = fa_carve_floats(arena, p->ldo);
    s.row_q    = fa_carve(arena, (size_t)p->tile_q * sizeof(void *));
    s.row_next = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    for (int n = 0; n < 2; n++)
        s.row_turn[n] = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    s.row_k  = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    s.row_v  = fa_carve(arena, (size_t)p->tile_k * sizeof(void *));
    s.slices = fa_carve(arena, (size_t)p->call->slices.count * sizeof(int32_t));
    s.fused  = fa_carve(arena, p->fused_bytes);
    s.sum_o  = fa_carve_floats(arena, sums * p->tile_q * p->ldo);
    s.sum_m  = fa_carve_floats(arena, sums * rows);
    s.sum_l  = fa_carve_floats(arena, sums * rows);
    return s;
}

size_t fa_forward_carve_run(run *r, char *base)
{
    const plan *p     = &r->plan;
    int64_t     pairs = p->call->batch * p->call->heads_k, heads = p->parallel_splits ? pairs : 0, rows = part_rows(p);
    fa_arena    arena = {base, 0}, one = {NULL, 0};
    fa_forward_carve_scratch(&one, p);
    r->part_rows     = (int)rows;
    r->part_floats   = rows * p->ldo + 2 * fa_row_array((int)rows);
    r->scratch_bytes = one.used;
    r->task_begin    = fa_carve(&arena, (size_t)(p->call->batch + 1) * sizeof(int64_t));
    r->scratch       = fa_carve(&arena, r->scratch_bytes * (size_t)p->threads);
    r->parts         = fa_carve_floats(&arena, heads * (p->max_splits + 1) * r->part_floats);
    r->parts_done    = fa_carve(&arena, (size_t)heads * sizeof(atomic_int));
    r->parts_folded  = fa_carve(&arena, (size_t)heads * sizeof(atomic_int));
    r->shared_done   = fa_carve(&arena, (size_t)(pairs * p->shared_tiles) * sizeof(atomic_int));
    r->shared        = fa_carve(&arena, (size_t)pairs * p->shared_bytes);
    return arena.used;
}

packed_keys fa_forward_shared_keys(const run *r, const shape *s, int64_t pair, int64_t number)
{
    const plan *p     = &r->plan;
    fa_arena    arena = {r->shared + (size_t)pair * p->shared_bytes, 0};
    arena.used        = (size_t)number * packed_tile_bytes(p, s->kernels);
    return carve_keys_of(&arena, p, s->kernels);
}

/* ---- what cpu.c asks ---- */

size_t fa_forward_bytes(const fa_cpu *cpu, const fa_call *call, int threads)
{
    run r = {.plan = fa_forward_plan(cpu, call, threads)};
    return fa_forward_carve_run(&r, NULL);
}

void fa_forward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation)
{
    run         r     = {.plan = fa_forward_plan(cpu, call, threads)};
    fa_sequence seq   = {0};
    int64_t     count = fa_num_lengths(call);
    fa_forward_carve_run(&r, NULL);
    for (int64_t b = 0; b < count; b++) {
        fa_sequence one   = fa_sequence_at(call, b);
        shape       shape = fa_forward_shape(&r.plan, one.seqlen_q, one.seqlen_k);
        explanation->num_tasks += tasks_of(call, &one, &shape) * (call->batch / count);
        if ((int64_t)one.seqlen_q * one.seqlen_k >= (int64_t)seq.seqlen_q * seq.seqlen_k)
            seq = one;
    }
    shape shape                = fa_forward_shape(&r.plan, seq.seqlen_q, seq.seqlen_k);
    explanation->tile_q        = shape.tile.q;
    explanation->tile_k        = shape.tile.k;
    explanation->num_splits    = shape.splits;
    explanation->scratch_bytes = (int64_t)r.scratch_bytes;
    snprintf(explanation->kernel, sizeof explanation->kernel, "%s_%s", shape.few ? "decode" : "forward",
             shape.kernels->name);
    snprintf(explanation->reason, sizeof explanation->reason, "%s; a packed tile of keys serves %d tile%s of queries%s",
             shape.few                               ? "few rows: K and V are read in place"
             : shape.shared && r.plan.heads_together ? "K and V of all heads, side by side, are packed first by tiles"
             : shape.shared                          ? "K and V are packed once by tiles, for all blocks"
                                                     : "K and V are packed by tiles",
             r.plan.tiles_per_block, r.plan.tiles_per_block == 1 ? "" : "s", fa_tiles_origin(cpu, shape.kernels, call));
}
