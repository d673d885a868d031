/*
 * Forward on AMX: one tile of queries against one tile of keys, products and softmax overlapped. bfloat16, and float16
 * and float32 as two and three pieces of it; amx_fp16_forward.c compiles it once more for float16 as it is.
 *
 * The work is a sequence of units, 32 queries by 32 keys each: all keys that 32 queries see, then the next queries.
 * Both products have 2 x 2 tiles of accumulators, so a tile product costs one tile load:
 *
 *   - scores: S of a later unit goes to one of two slots of 4 KiB. A tile is stored where the next block of
 *     accumulators needs its register, so that the store finds its data ready.
 *   - softmax, vectors, a row at a time among the tile instructions: P of this unit, as pairs of bfloat16.
 *   - values: O += P V, blocks of 32 queries by 32 columns over a chunk of units.
 *
 * A chunk's values run beside the next chunk's softmax where O and all buffers fit the first-level cache together
 * (bfloat16 at head_dim 64, chunks of four units); else a chunk is 4 to 16 units and its values follow it, so that O
 * moves rarely. Whole units of bfloat16 at head_dim 64 and 128 are also in assembly (amx_forward_units.S and
 * amx_forward_chunk.S).
 * What decides is cache lines: a store that misses the first level costs four cycles, a load 1.3; see docs/cpu-amx.md.
 */
#include "cpu/amx_forward_whole.h"

/* ---- shifts ---- */

/* The shifts that suit a unit's masked scores of 16 rows; -inf if a row sees none of them; NaN, +Inf: 0. */
FA_AMX_INLINE __m512 shifts_of(const walk *w, const float *s)
{
    const __m512 lowest  = _mm512_set1_ps(-INFINITY);
    __m512       largest = largest_of_rows(s, w->k.multiplier);
    __mmask16    finite  = _mm512_cmp_ps_mask(_mm512_abs_ps(largest), _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ);
    __m512       shift   = _mm512_maskz_add_ps(finite, largest, _mm512_set1_ps(w->margin));
    return _mm512_mask_mov_ps(shift, _mm512_cmp_ps_mask(largest, lowest, _CMP_EQ_OQ), lowest);
}

static float shift_of(const walk *w, const float *s, int r)
{
    _Alignas(64) float shift[16];
    _mm512_store_ps(shift, shifts_of(w, s + r / 16 * 2 * FA_AMX_TILE_FLOATS));
    return shift[r % 16];
}

/* Rows of which nothing was seen so far take their shift from the unit's scores. */
static void begin_rows(walk *w, const float *s, int rows)
{
    w->unset = false;
    for (int r = 0; r < UNIT; r += 16) {
        __m512    m     = _mm512_load_ps(w->own->m + r);
        __mmask16 unset = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        m               = _mm512_mask_mov_ps(m, unset, shifts_of(w, s + r / 16 * 2 * FA_AMX_TILE_FLOATS));
        w->unset |= set_shifts(w, r, rows, m);
    }
}

/* P of a row once more, alone. */
FA_AMX_INLINE __m512i one_row(const walk *w, const unit *u, int r, int PIECES)
{
    float m = w->own->m[r];
    if (w->fixed)
        return any_fixed_row(r, u->s, u->p, u->p_down, &u->state, m, &w->k);
    if (is_far(m))
        return far_row(r, u->s, u->p, u->p_down, &u->state, m, w->bonus, &w->k, PIECES);
    return softmax_row(r, u->s, u->p, u->p_down, &u->state, &w->k, PIECES);
}

/* A row outgrew its margin in this unit: a new shift for all that it has so far, and the unit once more. */
FA_AMX_INLINE void redo_row(const walk *w, place at, const unit *done, int r, int PIECES)
{
    int    row = at.group * UNIT + r, ld;
    float *o   = rows_of_o(w, at.group, &ld) + (int64_t)r * ld;
    float  m = shift_of(w, done->s, r), old = w->own->m[r];
    if (!(m > old))
        m = old; /* NaN or Inf: nothing helps */
    if (w->fixed && old != -INFINITY)
        m = old + ceilf(m - old); /* P so far is scaled exactly */
    float factor = exp2f(old - m);
    w->own->m[r] = m;
    set_shifts(w, r / 16 * 16, rows_of_group(w, at.group), _mm512_load_ps(w->own->m + r / 16 * 16));
    scale_row(o, w->columns * 16, _mm512_set1_ps(factor));
    scale_row((float *)done->state.sum_from + 16 * r, 16, _mm512_set1_ps(factor));
    w->block->l[row] *= factor;
    for (int unit = at.first; unit < at.unit; unit++)
        scale_p(done->p + (unit - at.unit) * PIECES * FA_AMX_TILE_HALVES + r / 16 * done->p_down + r % 16 * 32,
                _mm512_set1_ps(factor), PIECES);
    one_row(w, done, r, PIECES);
}

FA_AMX_INLINE void redo_rows(const walk *w, place at, const unit *done, int PIECES)
{
    for (int r = 0; r < rows_of_group(w, at.group); r++) {
        __m512i sums = one_row(w, done, r, PIECES);
        if (outgrew(check_rows(sums, sums, sums), w->fixed))
            redo_row(w, at, done, r, PIECES);
    }
}

/* By value: a place whose address is taken would live in memory in the main loop. O must be in memory first, and scores
 * that are on their way to where this unit's are wait elsewhere. */
static __attribute__((noinline)) void redo_unit(const walk *w, place at, const unit *done, values *v, target *held)
{
    bool late = held->columns && held->at == (const char *)done->s;
    if (late) {
        held->at = (char *)w->own->later_s;
        store_held(held);
    }
    finish_values(v, held, w->pieces);
    if (held->unit < 0)
        store_held(held);
    switch (fa_amx_pieces(w->pieces)) {
    case 1: redo_rows(w, at, done, 1); break;
    case 2: redo_rows(w, at, done, 2); break;
    default: redo_rows(w, at, done, 3); break;
    }
    if (late)
        memcpy(done->s, w->own->later_s, sizeof w->own->later_s);
}

/* ---- the walk ---- */

static void begin_group(walk *w, place at, float *sum)
{
    const fa_forward_block *b     = w->block;
    int                     group = at.group, rows = rows_of_group(w, group);
    memset(sum, 0, sizeof(float) * UNIT * 16);
    w->first_unit = at.unit;
    w->unset      = false;
    for (int r = 0; r < UNIT; r += 16)
        w->unset |= set_shifts(w, r, rows, fa_amx_load16(b->m + group * UNIT, 1, FLASH_ATTN_F32, r, rows));
    if (b->options)
        set_option_rows(&w->own->options, b, group * UNIT, rows);
}

static void end_group(const walk *w, int group, const float *sum)
{
    const fa_forward_block *b    = w->block;
    int                     rows = rows_of_group(w, group);
    for (int r = 0; r < rows; r += 16) {
        __mmask16 mask = rows - r >= 16 ? 0xFFFF : (__mmask16)((1u << (rows - r)) - 1);
        float    *m = b->m + group * UNIT + r, *l = b->l + group * UNIT + r;
        __m512    sums  = _mm512_mul_ps(sums_of_rows(sum + 16 * r), _mm512_set1_ps(w->inverse));
        __m512    total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, l), sums);
        total           = _mm512_fmadd_ps(total, _mm512_setzero_ps(), total); /* Inf: NaN, as exp(Inf - Inf) is */
        __mmask16 empty = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_EQ_OQ);
        _mm512_mask_storeu_ps(l, mask, total);
        _mm512_mask_storeu_ps(m, mask,
                              _mm512_mask_mov_ps(_mm512_load_ps(w->own->m + r), empty, _mm512_set1_ps(-INFINITY)));
    }
}

FA_AMX_INLINE void set_softmax(unit *u, const walk *w, place at, int n, bool alternate)
{
    u->s      = w->own->s[n % SLOTS];
    u->p      = p_of_unit(w, at, alternate);
    u->p_down = w->chunk * w->pieces * FA_AMX_TILE_HALVES;
    u->state  = (row_state){w->own->shift, w->own->sum[n % 2], w->own->sum[(n + 1) % 2]};
}

/* Unit number n with what runs beside it: scores of the unit after the next, or, if values are BESIDE, scores of the
 * next two beside even ones and values of the chunk before beside odd ones, so that O moves half as often as if each had
 * both. A block of values is a whole one of a whole chunk, or none; finish_values takes the rest. */
FA_AMX_INLINE bool run_unit_with(int n, const unit *u, values *v, target *held, const constants *k, int PIECES, int KS,
                                 bool BESIDE, int CHUNK, int FIXED)
{
    if (!BESIDE)
        return run_unit(u, v, held, k, PIECES, KS, 1, 0, FIXED);
    if (n % 2 == 0)
        return run_unit(u, v, held, k, PIECES, KS, 2, 0, FIXED);
    if (v->units < CHUNK || v->col + 2 > v->columns)
        return run_unit(u, v, held, k, PIECES, KS, 0, 0, FIXED);
    bool again = run_unit(u, v, held, k, PIECES, KS, 0, CHUNK, FIXED);
    v->col += 2;
    return again;
}

/* A chunk that its group's keys do not fill gets units whose P is 0, so that its values are a whole block beside the next
 * group's units. Their V is there: rows that packing left out are zeros. */
FA_AMX_INLINE void fill_chunk(const walk *w, place at, values *v, int CHUNK)
{
    int units = v->units;
    if (at.first % CHUNK || (at.first + CHUNK) * UNIT > w->block->keys)
        return;
    for (int down = 0; down < 2 && units < CHUNK; down++)
        memset((char *)v->p + down * v->p_down + units * FA_AMX_TILE, 0, (size_t)(CHUNK - units) * FA_AMX_TILE);
    v->units = CHUNK;
}

/* ---- all units ---- */

/* How units and their values take turns: values after each chunk; beside every other unit; the same two with whole units
 * in assembly. */
typedef enum turns { VALUES_AFTER, VALUES_BESIDE, IN_ASSEMBLY, CHUNKS_IN_ASSEMBLY } turns;

FA_AMX_INLINE bool values_are_beside(turns turns) { return turns == VALUES_BESIDE || turns == IN_ASSEMBLY; }

/* Where the scores go that stand beside unit number n, if they do: one unit's, or with values BESIDE two units' every
 * other time. Units have scores beside them even where none are left, of themselves once more, so that nothing need ask. */
FA_AMX_INLINE int scores_due(int n, bool BESIDE) { return !BESIDE ? 1 : n % 2 ? 0 : 2; }

FA_AMX_INLINE void set_later(scores *x, const walk *w, const progress *at, int later, bool BESIDE)
{
    set_scores(x, w, at->ahead.group < w->groups ? at->ahead : at->at, at->n + later + (BESIDE ? 1 : 2));
}

FA_AMX_INLINE progress run_one(const walk *w, progress x, unit *u, values *v, target *held, const constants *k,
                               int PIECES, int KS, bool BESIDE, int CHUNK, int FIXED)
{
    for (int later = 0; later < scores_due(x.n, BESIDE); later++) {
        set_later(&u->later[later], w, &x, later, BESIDE);
        if (x.ahead.group < w->groups)
            x.ahead = place_next(w, x.ahead);
    }
    x.again = run_unit_with(x.n, u, v, held, k, PIECES, KS, BESIDE, CHUNK, FIXED);
    return x;
}

/* Among whole units in assembly, at head_dim 64, one that is not, whatever its rows see, one thing after the other. */
FA_AMX_INLINE progress run_other(const walk *w, progress x, unit *u, target *held, const constants *k, int KS, int FIXED)
{
    x.again = run_unit(u, &(values){0}, held, k, 1, 0, 0, 0, FIXED);
    for (int later = 0; later < scores_due(x.n, true); later++) {
        set_later(&u->later[0], w, &x, later, true);
        scores_alone(&u->later[0], held, KS, 1);
        x.ahead = place_after(w, x.ahead, 1);
    }
    return x;
}

/* The same at head_dim 128, where scores beside it pay. A function of its own, for run_walk needs its registers. */
static __attribute__((noinline)) progress run_other_of_chunk(const walk *w, progress x, unit *u, target *held)
{
    constants k    = w->k;
    values    none = {0};
    return w->fixed ? run_one(w, x, u, &none, held, &k, 1, 4, false, 16, 1)
                    : run_one(w, x, u, &none, held, &k, 1, 4, false, 16, 0);
}

FA_AMX_INLINE void run_walk(walk *w, int PIECES, int KS, turns TURNS, int CHUNK, int FIXED)
{
    const bool BESIDE = values_are_beside(TURNS);
    constants k    = w->k;
    target    held = {0};
    values    v    = {0};
    unit      u    = {0};
    progress  x    = {.at = group_begin(w, 0, 0)};
    x.ahead        = x.at;
    for (int n = 0; n < (BESIDE ? 1 : 2) && x.ahead.group < w->groups; n++, x.ahead = place_next(w, x.ahead)) {
        set_scores(&u.later[0], w, x.ahead, n);
        scores_alone(&u.later[0], &held, KS, PIECES);
    }
    if (w->block->rows % UNIT) {
        memset(w->own->last_o, 0, sizeof(float) * UNIT * 16 * (size_t)w->columns);
        copy_last_rows(w, false);
    }
    if (x.at.group < w->groups)
        begin_group(w, x.at, w->own->sum[0]);
    for (; x.at.group < w->groups; x.n++) {
        if (held.unit == x.n && held.columns)
            store_held(&held);
        set_softmax(&u, w, x.at, x.n, BESIDE);
        if (w->changed)
            change_scores(w, x.at.group, x.at.unit, u.s);
        if (!all_seen(w, x.at))
            mask_unit(w, u.s, x.at);
        if (w->unset)
            begin_rows(w, u.s, rows_of_group(w, x.at.group));
        int whole = TURNS >= IN_ASSEMBLY ? whole_units(w, x.at) : 0;
        if (whole > 0) {
            x = BESIDE ? run_whole(w, x, whole, &v, &held) : run_chunk(w, x, whole, &held);
            set_softmax(&u, w, x.at, x.n, BESIDE);
        } else if (TURNS == CHUNKS_IN_ASSEMBLY) {
            x = run_other_of_chunk(w, x, &u, &held);
        } else if (TURNS == IN_ASSEMBLY) {
            x = run_other(w, x, &u, &held, &k, KS, FIXED);
        } else {
            x = run_one(w, x, &u, &v, &held, &k, PIECES, KS, BESIDE, CHUNK, FIXED);
        }
        if (x.again || (FIXED && w->risky))
            redo_unit(w, x.at, &u, &v, &held);
        if (w->block->options && w->block->options->call->dropout.threshold)
            drop_from_unit(w->block, &w->own->options, x.at.unit * UNIT, u.p, u.p_down, PIECES);
        place next = place_next(w, x.at);
        if (next.chunk_number != x.at.chunk_number) {
            finish_values(&v, &held, PIECES);
            v = values_of(w, x.at, BESIDE);
            if (BESIDE && next.group < w->groups)
                fill_chunk(w, x.at, &v, CHUNK);
            if (TURNS == CHUNKS_IN_ASSEMBLY && v.units == CHUNK)
                chunk_values(w, &v, &held);
            else if (!BESIDE)
                finish_values(&v, &held, PIECES);
        }
        if (next.group != x.at.group) {
            end_group(w, x.at.group, w->own->sum[(x.n + 1) % 2]);
            if (next.group < w->groups)
                begin_group(w, next, w->own->sum[(x.n + 1) % 2]);
        }
        x.at = next;
    }
    finish_values(&v, &held, PIECES);
    store_held(&held);
    if (w->block->rows % UNIT)
        copy_last_rows(w, true);
}

/* ---- one kernel a shape ---- */

/* Chunks: P of one stays in the first-level cache, and O moves once a chunk. */
#define DEFINE_RUN(PIECES, KS, TURNS, CHUNK)                                                                           \
    static void run_##PIECES##_##KS##_##TURNS(walk *w) { run_walk(w, PIECES, KS, TURNS, CHUNK, 0); }
#define DEFINE_FIXED(KS, TURNS, CHUNK)                                                                                 \
    static void run_fixed_##KS##_##TURNS(walk *w) { run_walk(w, 1, KS, TURNS, CHUNK, 1); }
#define DEFINE_PIECES(PIECES, CHUNK, CHUNK_4)                                                                          \
    DEFINE_RUN(PIECES, 1, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 2, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 3, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 4, 0, CHUNK_4)                                                                                  \
    DEFINE_RUN(PIECES, 5, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 6, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 7, 0, CHUNK)                                                                                    \
    DEFINE_RUN(PIECES, 8, 0, CHUNK)

DEFINE_RUN(1, 2, 1, 4)
DEFINE_PIECES(1, 8, 16)
#ifndef FA_AMX_FP16
DEFINE_PIECES(2, 8, 8)
DEFINE_PIECES(3, 4, 4)
DEFINE_FIXED(2, 1, 4)
DEFINE_FIXED(1, 0, 8)
DEFINE_FIXED(2, 0, 8)
DEFINE_FIXED(3, 0, 8)
DEFINE_FIXED(4, 0, 16)
#endif

typedef struct shape {
    int pieces, depth_steps, columns, chunk;
    void (*run)(walk *w);
} shape;

#define SHAPE(PIECES, KS, CHUNK)                                                                                       \
    {                                                                                                                  \
        PIECES, KS, INT32_MAX, CHUNK, run_##PIECES##_##KS##_0                                                          \
    }
#define SHAPES(PIECES, CHUNK, CHUNK_4)                                                                                 \
    SHAPE(PIECES, 1, CHUNK), SHAPE(PIECES, 2, CHUNK), SHAPE(PIECES, 3, CHUNK), SHAPE(PIECES, 4, CHUNK_4),              \
        SHAPE(PIECES, 5, CHUNK), SHAPE(PIECES, 6, CHUNK), SHAPE(PIECES, 7, CHUNK), SHAPE(PIECES, 8, CHUNK)

/* Data: the first that fits is taken. columns: the most tiles of 16 columns of O. */
#ifdef FA_AMX_FP16
static const shape shapes[] = {{1, 2, 4, 4, run_1_2_1}, SHAPES(1, 8, 16)};
#else
static const shape shapes[] = {{1, 2, 4, 4, run_1_2_1}, SHAPES(1, 8, 16), SHAPES(2, 8, 8), SHAPES(3, 4, 4)};

static const shape  fixed_shapes[] = {{1, 2, 4, 4, run_fixed_2_1},
                                      {1, 1, INT32_MAX, 8, run_fixed_1_0},
                                      {1, 2, INT32_MAX, 8, run_fixed_2_0},
                                      {1, 3, INT32_MAX, 8, run_fixed_3_0},
                                      {1, 4, INT32_MAX, 16, run_fixed_4_0}};
#endif

static const shape *find_shape(const shape *among, size_t count, const walk *w)
{
    for (size_t n = 0; n < count; n++) {
        if (among[n].pieces == w->pieces && among[n].depth_steps == w->depth_steps && w->columns <= among[n].columns)
            return &among[n];
    }
    return NULL;
}

#if defined(FA_AMX_UNITS) && !defined(FA_AMX_FP16)
static void run_whole_exact(walk *w) { run_walk(w, 1, 2, IN_ASSEMBLY, 4, 0); }
static void run_whole_fixed(walk *w) { run_walk(w, 1, 2, IN_ASSEMBLY, 4, 1); }
static void run_chunks_exact(walk *w) { run_walk(w, 1, 4, CHUNKS_IN_ASSEMBLY, 16, 0); }
static void run_chunks_fixed(walk *w) { run_walk(w, 1, 4, CHUNKS_IN_ASSEMBLY, 16, 1); }

/* Where the assembly runs: bfloat16 at head dims that make as many tiles as 64 or 128, without options. Shorter rows,
 * fewer units than LEAST_UNITS, do better with run_1_2_1, run_1_4_0 and those in fixed point, which give the same bits. */
static const shape *find_whole(walk *w, bool fixed)
{
    enum { LEAST_UNITS = 16 };

    static const shape shapes_in_assembly[2][2] = {{{1, 2, 4, 4, run_whole_exact}, {1, 2, 4, 4, run_whole_fixed}},
                                                   {{1, 4, 8, 16, run_chunks_exact}, {1, 4, 8, 16, run_chunks_fixed}}};
    static const chunk_functions chunks[2] = {
        {fa_amx_chunk_units, fa_amx_chunk_values, fa_amx_chunk_first_values},
        {fa_amx_chunk_units_fixed, fa_amx_chunk_values, fa_amx_chunk_first_values}};
    const fa_forward_block      *b         = w->block;
    const shape                 *at        = &shapes_in_assembly[w->depth_steps == 4][fixed];
    if (w->pieces > 1 || b->options || w->depth_steps != at->depth_steps || w->columns != at->columns)
        return NULL;
    fa_range middle = {b->queries / 2, b->queries / 2 + 1};
    fa_range seen   = fa_keys_seen(b->window, b->diagonal, middle, (fa_range){0, b->keys});
    if (seen.end - seen.begin < LEAST_UNITS * UNIT)
        return NULL;
    w->whole  = fixed ? fa_amx_whole_units_fixed : fa_amx_whole_units;
    w->chunks = &chunks[fixed];
    return at;
}
#else
static const shape *find_whole(walk *w, bool fixed) { return (void)w, (void)fixed, NULL; }
#endif

static walk walk_of(const fa_forward_block *block, int pieces)
{
    bool infinite =
        fa_amx_pieces(pieces) > 1 && fa_amx_any_infinite(FA_ROLE_Q, block->q, block->rows, FA_ROLE_K, block->k,
                                                         block->keys, block->head_dim, pieces);
    return (walk){.block       = block,
                  .own         = block->scratch,
                  .k           = constants_make(block->multiplier, pieces),
                  .pieces      = pieces,
                  .groups      = (block->rows + UNIT - 1) / UNIT,
                  .depth_steps = (block->head_dim + 31) / 32,
                  .columns     = (block->head_dim_v + 15) / 16,
                  .infinite    = infinite,
                  .changed     = infinite || block->options,
                  .inverse     = 1.0f,
                  .margin      = MARGIN};
}

/* What run_walk leaves out of a fresh block: sums of all rows, and O of groups that see no key. */
static void begin_rows_of_block(const walk *w)
{
    const fa_forward_block *b = w->block;
    for (int r = 0; r < b->rows; r++) {
        b->m[r] = -INFINITY;
        b->l[r] = 0.0f;
    }
    for (int group = 0; group < w->groups; group++) {
        fa_range seen = fa_keys_seen(b->window, b->diagonal, queries_of_group(w, group), (fa_range){0, b->keys});
        int      rows = rows_of_group(w, group);
        if (seen.begin >= seen.end || rows < UNIT)
            memset(b->o + (int64_t)group * UNIT * b->ldo, 0, sizeof(float) * (size_t)rows * (size_t)b->ldo);
    }
}

static void run(const shape *fit, walk *w)
{
    w->chunk       = fit->chunk;
    if (w->block->fresh)
        begin_rows_of_block(w);
    unsigned modes = _mm_getcsr(); /* P far below its row's largest is 0: denormals would take 100 times as long */
    _mm_setcsr(modes | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    fit->run(w);
    _mm_setcsr(modes);
}

static bool forward_block(const fa_forward_block *block, int pieces)
{
    walk         w     = walk_of(block, pieces);
    const shape *whole = find_whole(&w, false),
                *fit   = whole ? whole : find_shape(shapes, sizeof shapes / sizeof shapes[0], &w);
    bool dropout       = block->options && block->options->call->dropout.threshold;
    if (!fit || (dropout && !can_drop(block)) || (block->options && !alibi_is_flat(block)))
        return false;
    bool  alibi      = block->options && block->options->call->alibi_slopes.data;
    float keep_scale = dropout ? block->options->call->dropout.keep_scale : 1.0f;
    w.bonus          = log2f(keep_scale) + cut_log2[pieces];
    w.inverse        = cut_inverse[pieces] / keep_scale;
    w.margin += alibi ? ALIBI_MARGIN : 0;
    run(fit, &w);
    return true;
}

#ifdef FA_AMX_FP16
bool fa_amx_fp16_forward_block(const fa_forward_block *block) { return forward_block(block, 1); }
#else
size_t              fa_amx_forward_scratch(int rows, int keys, int head_dim, int head_dim_v)
{
    (void)rows, (void)keys, (void)head_dim;
    return sizeof(scratch) + (size_t)((head_dim_v + 15) / 16) * 2 * FA_AMX_TILE;
}

bool fa_amx_forward_block(const fa_forward_block *block, int pieces) { return forward_block(block, pieces); }

bool fa_amx_forward_block_fixed(const fa_forward_block *block)
{
    walk         w     = walk_of(block, 1);
    const shape *whole = find_whole(&w, true);
    const shape *fit   = whole ? whole : find_shape(fixed_shapes, sizeof fixed_shapes / sizeof fixed_shapes[0], &w);
    if (!fit)
        return false;
    w.fixed   = true;
    w.risky   = !fixed_is_safe(block);
    w.k.units = _mm512_set1_ps(block->multiplier * FIXED_UNITS);
    w.k.bends = _mm512_loadu_si512(fixed_bends);
    run(fit, &w);
    return true;
}
#endif
