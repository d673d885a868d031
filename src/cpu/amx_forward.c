/*
 * Forward on AMX: one tile of queries against one tile of keys, products and softmax overlapped.
 *
 * The work is a sequence of steps, 16 queries by 32 keys each. In program order, instruction by instruction, a step
 * interleaves three stages that do not depend on each other:
 *
 *   - scores, tiles 4 and 5: S of two steps ahead. It goes to a ring of three buffers one step late, so that the store
 *     finds its data ready.
 *   - softmax, vectors: P of this step from the ring, as pairs of bfloat16, one kilobyte a step.
 *   - values, tiles 0 to 3: O += P V, 16 x 64 of O, for the group before. A group is 16 queries by `group_keys` steps.
 *
 * A group's keys stay in the first-level cache while all 16-row groups of the tile use them; O is loaded and stored
 * once a group. Vector ports are the bound: with tiles at work there is one port for FMA-like operations and both for
 * add, subtract and logic, so exp2 is done by a table of 16 and a polynomial of degree 2 (4e-7),
 * five and a half operations on each port for 16 scores; see docs/cpu-amx.md.
 *
 * The row's shift m is set from the first 32 keys, MARGIN above their maximum, and kept. No later maximum is taken:
 * what outgrows the margin shows as a sum with bit 30 set (2.0 or more, Inf, NaN), and only then the step is redone for
 * those rows with a new shift. P is cut to bfloat16 instead of rounded, after scaling by 1 + 0.72 * 2^-8, which takes
 * the mean error to zero and leaves a power of two, as the row's maximum gives, what it is.
 */
#include "cpu/amx.h"

#include <float.h>

enum { MARGIN = 8, MAX_GROUP_STEPS = 4, RING = 3, MAX_ROWS = 128 };

#define SMALLEST_MULTIPLIER 1e-7f /* mask_tail divides by it */

/* ---- a step ---- */

typedef struct row_state {
    float *shift;    /* [16] minus the shift, plus CUT_LOG2 */
    float *sum_from; /* [16][16] sums of P by lane */
    float *sum_to;
} row_state;

/* Row `row` of a step. s: two tiles of 16 keys side by side. */
FA_AMX_INLINE __m512i softmax_row(int row, const float *s, uint16_t *p, const row_state *state, const constants *k,
                                  __m512i check)
{
    __m512 shift  = _mm512_set1_ps(state->shift[row]);
    __m512 before = _mm512_load_ps(state->sum_from + 16 * row);
    __m512 a      = exp2_of(_mm512_load_ps(s + 16 * row), shift, k);
    __m512 b      = exp2_of(_mm512_load_ps(s + FA_AMX_TILE_FLOATS + 16 * row), shift, k);
    __m512 sum    = _mm512_add_ps(a, b);
    _mm512_store_si512(p + 32 * row, fa_amx_pair(a, b));
    _mm512_store_ps(state->sum_to + 16 * row, _mm512_add_ps(before, sum));
    return _mm512_or_si512(check, _mm512_castps_si512(sum));
}

/* What a step does; NULL: that stage has nothing to do. */
typedef struct step {
    const char  *q, *k;   /* scores: left tiles of 16 queries, right tiles of 32 keys */
    float       *s_store; /* where the S that is still in tiles 4 and 5 goes */
    const float *s;       /* softmax */
    uint16_t    *p;
    row_state    state;
} step;

/* The values stage: NCH items a step. An item is a chunk of 64 columns and 32 keys; all keys of a chunk, then the next.
 */
typedef struct values {
    const char *p, *v; /* P of the group, V's tiles of the group's keys */
    float      *o;
    int         ldo, columns;      /* tiles of 16 columns */
    int         steps, chunk, key; /* the next item */
    float      *o_held;            /* where tiles 0 .. held - 1 belong */
    int         ld_held, held;
} values;

#define STORE_HELD(t)                                                                                                  \
    if (held > t)                                                                                                      \
        TILE_STORE(t, v->o_held + 16 * t, v->ld_held * 4L);

/* Before the first keys of a chunk: tile t goes home and the chunk's comes. */
#define SWITCH_TILE(t)                                                                                                 \
    if (first) {                                                                                                       \
        STORE_HELD(t)                                                                                                  \
        if (count > t)                                                                                                 \
            TILE_LOAD(t, o + 16 * t, v->ldo * 4L);                                                                     \
    }

#define VALUES_TILE(t)                                                                                                 \
    if (count > t) {                                                                                                   \
        TILE_LOAD(7, tile_v + (t)*FA_AMX_TILE, 64);                                                                    \
        TILE_DOT(t, 6, 7);                                                                                             \
    }

#define SOFTMAX_ROWS(n)                                                                                                \
    _Pragma("GCC unroll 8") for (int x = 0; x < (n); x++, row++) if (row < 16) check =                                 \
        softmax_row(row, w->s, w->p, &w->state, k, check);

FA_AMX_INLINE void next_item(values *v)
{
    if (++v->key == v->steps) {
        v->key = 0;
        v->chunk++;
    }
}

/* Half of a values item. */
#define VALUES_HALF(t0, t1, rows)                                                                                      \
    if (v) {                                                                                                           \
        SWITCH_TILE(t0)                                                                                                \
        TILE_LOAD(6, tile_p, 64);                                                                                      \
        VALUES_TILE(t0)                                                                                                \
    }                                                                                                                  \
    SOFTMAX_ROWS(rows)                                                                                                 \
    if (v) {                                                                                                           \
        SWITCH_TILE(t1)                                                                                                \
        VALUES_TILE(t1)                                                                                                \
    }                                                                                                                  \
    SOFTMAX_ROWS(rows)

/* KS: 32-column steps of head_dim; NCH: 64-column chunks of head_dim_v. Returns nonzero if a sum outgrew its margin. */
FA_AMX_INLINE int run_step(const step *w, values *v, const constants *k, int KS, int NCH)
{
    __m512i   check = _mm512_setzero_si512();
    int       row   = 0;
    const int slots = 2 * KS + 4 * NCH, rows = (16 + slots - 1) / slots;
    /* A part of each stage in turn; `part` counts the larger of the two tile stages. */
    const int   parts = KS > NCH * 2 ? KS : NCH * 2;
    int         held = 0, count = 0;
    bool        first  = false;
    float      *o      = NULL;
    const char *tile_p = NULL, *tile_v = NULL;
    _Pragma("GCC unroll 16") for (int part = 0; part < parts; part++)
    {
        if (part < KS) {
            if (w->q) {
                if (part == 0) {
                    if (w->s_store)
                        TILE_STORE(4, w->s_store, 64);
                    TILE_ZERO(4);
                }
                TILE_LOAD(6, w->q + part * FA_AMX_TILE, 64);
                TILE_LOAD(7, w->k + part * FA_AMX_TILE, 64);
                TILE_DOT(4, 6, 7);
            }
            SOFTMAX_ROWS(rows)
            if (w->q) {
                if (part == 0) {
                    if (w->s_store)
                        TILE_STORE(5, w->s_store + FA_AMX_TILE_FLOATS, 64);
                    TILE_ZERO(5);
                }
                TILE_LOAD(7, w->k + (KS + part) * FA_AMX_TILE, 64);
                TILE_DOT(5, 6, 7);
            }
            SOFTMAX_ROWS(rows)
        }
        if (part < NCH * 2) {
            if (v && part % 2 == 0) {
                o      = v->o + v->chunk * 64;
                count  = v->columns - v->chunk * 4;
                first  = v->key == 0;
                held   = v->held;
                tile_p = v->p + v->key * FA_AMX_TILE;
                tile_v = v->v + (v->key * v->columns + v->chunk * 4) * FA_AMX_TILE;
                next_item(v);
            }
            if (part % 2 == 0) {
                VALUES_HALF(0, 1, rows)
            } else {
                VALUES_HALF(2, 3, rows)
                if (v && first) {
                    v->o_held  = o;
                    v->ld_held = v->ldo;
                    v->held    = count;
                }
            }
        }
    }
    SOFTMAX_ROWS(16)
    return _mm512_test_epi32_mask(check, _mm512_set1_epi32(0x40000000));
}

/* ---- a tile: groups of 16 queries by some steps of 32 keys ---- */

typedef struct scratch {
    _Alignas(64) float s[RING][2 * FA_AMX_TILE_FLOATS];
    _Alignas(64) uint16_t p[2][MAX_GROUP_STEPS][FA_AMX_TILE_HALVES];
    _Alignas(64) float sum_step[2][16 * 16];
    _Alignas(64) float shift[MAX_ROWS], m[MAX_ROWS];
    _Alignas(64) float sum[MAX_ROWS * 16];
    _Alignas(64) float last_o[]; /* [16][columns]: the last group of rows if it is short */
} scratch;

size_t fa_amx_forward_scratch(int rows, int keys, int head_dim, int head_dim_v)
{
    (void)rows, (void)keys, (void)head_dim;
    return sizeof(scratch) + (size_t)((head_dim_v + 15) / 16) * FA_AMX_TILE;
}

typedef struct walk {
    const fa_forward_block *block;
    int                     group_keys; /* steps of 32 keys in a group */
    scratch                *own;
    constants               k;
    int                     row_groups, depth_steps, columns, all_steps; /* all_steps: of 32 keys */
    uint32_t                unset; /* row groups with rows that have no shift yet */
} walk;

/* Step number n of the tile: which group and which step in it. */
typedef struct place {
    int row_group, key_step; /* first of 16 rows / 16, step of 32 keys in the tile */
    int in_group, group_steps, group;
} place;

FA_AMX_INLINE place place_next(const walk *w, place at)
{
    at.in_group++;
    at.key_step++;
    if (at.in_group < at.group_steps)
        return at;
    at.group++;
    at.in_group = 0;
    at.key_step -= at.group_steps;
    if (++at.row_group == w->row_groups) {
        at.row_group = 0;
        at.key_step += at.group_steps;
        at.group_steps = fa_min_int(w->group_keys, w->all_steps - at.key_step);
    }
    return at;
}

static float *rows_of_o(const walk *w, int row_group, int *ld)
{
    const fa_forward_block *b    = w->block;
    bool                    last = row_group * 16 + 16 > b->rows;
    *ld                          = last ? w->columns * 16 : b->ldo;
    return last ? w->own->last_o : b->o + (int64_t)row_group * 16 * b->ldo;
}

static void copy_last_rows(const walk *w, bool back)
{
    const fa_forward_block *b = w->block;
    for (int r = b->rows / 16 * 16; r < b->rows; r++) {
        float *theirs = b->o + (int64_t)r * b->ldo, *ours = w->own->last_o + r % 16 * w->columns * 16;
        memcpy(back ? theirs : ours, back ? ours : theirs, (size_t)w->columns * 64);
    }
}

/* Columns without a key must not count. Finite: exp2_of makes NaN of an infinity. */
static void mask_tail(const walk *w, float *s, int first_key)
{
    __m512 hidden = _mm512_set1_ps(-1e30f / w->block->multiplier);
    for (int t = 0; t < 2; t++) {
        int       left = w->block->keys - first_key - 16 * t;
        __mmask16 mask = left >= 16 ? 0 : left <= 0 ? 0xFFFF : (__mmask16)(0xFFFFu << left);
        for (int r = 0; mask && r < 16; r++)
            _mm512_mask_store_ps(s + t * FA_AMX_TILE_FLOATS + 16 * r, mask, hidden);
    }
}

/* The shift that suits these 32 scores of a row. NaN, or no finite score: 0. */
static float shift_of(const walk *w, const float *s, int row)
{
    __m512 a   = _mm512_mul_ps(_mm512_load_ps(s + 16 * row), w->k.multiplier);
    __m512 b   = _mm512_mul_ps(_mm512_load_ps(s + FA_AMX_TILE_FLOATS + 16 * row), w->k.multiplier);
    float  max = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    return fabsf(max) <= FLT_MAX ? max + MARGIN : 0.0f;
}

static void set_shift(const walk *w, int row, float m)
{
    w->own->m[row]     = m;
    w->own->shift[row] = CUT_LOG2 - m;
}

static void scale_row(float *x, int n, __m512 factor)
{
    for (int col = 0; col < n; col += 16)
        _mm512_storeu_ps(x + col, _mm512_mul_ps(_mm512_loadu_ps(x + col), factor));
}

static __m512 exp2_scalar(float x) { return _mm512_set1_ps(exp2f(x)); }

/* Rows of which nothing was seen so far take their shift from the step's scores. */
static void begin_rows(walk *w, const float *s, int row_group)
{
    if (!(w->unset >> row_group & 1))
        return;
    w->unset &= ~(1u << row_group);
    for (int r = 0; r < 16; r++) {
        if (w->own->m[row_group * 16 + r] == -INFINITY)
            set_shift(w, row_group * 16 + r, shift_of(w, s, r));
    }
}

/* A row outgrew its margin in this step: a new shift for all that it has so far, and the step once more. */
static void redo_row(const walk *w, place at, const step *done, int r)
{
    scratch *own = w->own;
    int      row = at.row_group * 16 + r, ld;
    float   *o   = rows_of_o(w, at.row_group, &ld) + (int64_t)r * ld;
    float    m = shift_of(w, done->s, r), old = own->m[row];
    if (!(m > old))
        m = old; /* NaN or Inf: nothing helps */
    __m512 factor = exp2_scalar(old - m);
    set_shift(w, row, m);
    scale_row(o, w->columns * 16, factor);
    scale_row(done->state.sum_from + 16 * r, 16, factor);
    w->block->l[row] *= _mm512_cvtss_f32(factor);
    for (int n = 0; n < at.in_group; n++) {
        uint16_t *p    = own->p[at.group & 1][n] + 32 * r;
        __m512i   bits = _mm512_load_si512(p);
        __m512    low  = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), factor);
        __m512    high =
            _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xFFFF0000))), factor);
        _mm512_store_si512(p, fa_amx_pair(low, high));
    }
    softmax_row(r, done->s, done->p, &done->state, &w->k, _mm512_setzero_si512());
}

/* By value: a place whose address is taken would live in memory in the main loop. */
static __attribute__((noinline)) void redo_step(const walk *w, place at, const step *done)
{
    for (int r = 0; r < 16 && at.row_group * 16 + r < w->block->rows; r++) {
        __m512i check = softmax_row(r, done->s, done->p, &done->state, &w->k, _mm512_setzero_si512());
        if (_mm512_test_epi32_mask(check, _mm512_set1_epi32(0x40000000)))
            redo_row(w, at, done, r);
    }
}

static void begin_walk(walk *w)
{
    const fa_forward_block *b   = w->block;
    scratch                *own = w->own;
    memset(own->sum, 0, sizeof(float) * 256 * (size_t)w->row_groups);
    if (b->rows % 16 != 0) {
        memset(own->last_o, 0, sizeof(float) * 256 * (size_t)w->columns);
        copy_last_rows(w, false);
    }
    for (int r = 0; r < w->row_groups * 16; r++) {
        float m = r < b->rows ? b->m[r] : 2.0f * MARGIN; /* rows of padding score 0: far inside the margin */
        set_shift(w, r, m);
        if (m == -INFINITY)
            w->unset |= 1u << r / 16;
    }
}

static void end_walk(const walk *w)
{
    const fa_forward_block *b = w->block;
    if (b->rows % 16 != 0)
        copy_last_rows(w, true);
    for (int r = 0; r < b->rows; r++) {
        b->l[r] += _mm512_reduce_add_ps(_mm512_load_ps(w->own->sum + 16 * r)) * 0x1.fe8fa8p-1f /* 2^-CUT_LOG2 */;
        b->m[r] = b->l[r] == 0.0f ? -INFINITY : w->own->m[r];
    }
}

FA_AMX_INLINE const char *k_at(const walk *w, place at)
{
    return (const char *)w->block->k + (int64_t)at.key_step * 2 * w->depth_steps * FA_AMX_TILE;
}

FA_AMX_INLINE const char *q_at(const walk *w, place at)
{
    return (const char *)w->block->q + (int64_t)at.row_group * w->depth_steps * FA_AMX_TILE;
}

static values values_of(const walk *w, place group, const values *before)
{
    int    ld;
    float *o = rows_of_o(w, group.row_group, &ld);
    return (values){.p       = (const char *)w->own->p[group.group & 1],
                    .v       = (const char *)w->block->v + (int64_t)group.key_step * w->columns * FA_AMX_TILE,
                    .o       = o,
                    .ldo     = ld,
                    .columns = w->columns,
                    .steps   = group.group_steps,
                    .o_held  = before->o_held,
                    .ld_held = before->ld_held,
                    .held    = before->held};
}

static void store_held(values *v)
{
    int held = v->held;
    STORE_HELD(0)
    STORE_HELD(1)
    STORE_HELD(2)
    STORE_HELD(3)
    v->held = 0;
}

/* The rest of a group's values, with no softmax beside it. */
static void drain_values(values *v)
{
    while (v->chunk * 4 < v->columns) {
        int         count = v->columns - v->chunk * 4, held = v->held;
        float      *o      = v->o + v->chunk * 64;
        bool        first  = v->key == 0;
        const char *tile_v = v->v + (v->key * v->columns + v->chunk * 4) * FA_AMX_TILE;
        SWITCH_TILE(0)
        SWITCH_TILE(1)
        SWITCH_TILE(2)
        SWITCH_TILE(3)
        TILE_LOAD(6, v->p + v->key * FA_AMX_TILE, 64);
        VALUES_TILE(0)
        VALUES_TILE(1)
        VALUES_TILE(2)
        VALUES_TILE(3)
        if (first) {
            v->o_held  = o;
            v->ld_held = v->ldo;
            v->held    = count;
        }
        next_item(v);
    }
}

/* S of a step with nothing beside it, left in tiles 4 and 5. */
static void scores_alone(const walk *w, place at, float *store)
{
    const char *q = q_at(w, at), *k = k_at(w, at);
    if (store) {
        TILE_STORE(4, store, 64);
        TILE_STORE(5, store + FA_AMX_TILE_FLOATS, 64);
    }
    TILE_ZERO(4);
    TILE_ZERO(5);
    for (int n = 0; n < w->depth_steps; n++) {
        TILE_LOAD(6, q + n * FA_AMX_TILE, 64);
        TILE_LOAD(7, k + n * FA_AMX_TILE, 64);
        TILE_DOT(4, 6, 7);
        TILE_LOAD(7, k + (w->depth_steps + n) * FA_AMX_TILE, 64);
        TILE_DOT(5, 6, 7);
    }
}

/* The softmax stage of step number n, at `at`. */
FA_AMX_INLINE step softmax_of(const walk *w, place at, int n)
{
    scratch *own  = w->own;
    step     made = {.s = own->s[n % RING], .p = own->p[at.group & 1][at.in_group]};
    /* Never in place: a step may have to be redone. */
    float *sum   = own->sum + at.row_group * 256;
    bool   first = at.in_group == 0, last = at.in_group + 1 == at.group_steps;
    made.state = (row_state){own->shift + at.row_group * 16, first ? sum : own->sum_step[at.in_group & 1],
                             last && !first ? sum : own->sum_step[(at.in_group + 1) & 1]};
    return made;
}

FA_AMX_INLINE void run_walk(walk *w, int KS, int NCH)
{
    scratch  *own   = w->own;
    int       total = w->row_groups * w->all_steps;
    place     now = {.group_steps = fa_min_int(w->group_keys, w->all_steps)}, ahead = now;
    values    v           = {0};
    bool      have_values = false;
    constants k           = w->k;
    for (int n = 0; n < 2 && n < total; n++) {
        scores_alone(w, ahead, n == 0 ? NULL : own->s[0]);
        ahead = place_next(w, ahead);
    }
    for (int n = 0; n < total; n++) {
        step one = softmax_of(w, now, n);
        if (n + 2 < total) {
            one.q       = q_at(w, ahead);
            one.k       = k_at(w, ahead);
            one.s_store = own->s[(n + 1) % RING];
        } else if (n + 2 == total || total == 1) {
            float *last = own->s[(total - 1) % RING];
            TILE_STORE(4, last, 64);
            TILE_STORE(5, last + FA_AMX_TILE_FLOATS, 64);
        }
        if (now.key_step * 32 + 32 > w->block->keys)
            mask_tail(w, own->s[n % RING], now.key_step * 32);
        begin_rows(w, one.s, now.row_group);
        if (run_step(&one, have_values ? &v : NULL, &k, KS, NCH))
            redo_step(w, now, &one);
        place next = place_next(w, now);
        if (next.group != now.group) {
            if (now.in_group == 0)
                memcpy(own->sum + now.row_group * 256, one.state.sum_to, 16 * 64);
            place group = now;
            group.key_step -= group.in_group;
            drain_values(&v);
            v           = values_of(w, group, &v);
            have_values = w->row_groups > 1;
            if (w->row_groups == 1) {
                drain_values(&v);
                store_held(&v);
            }
        }
        now   = next;
        ahead = place_next(w, ahead);
    }
    drain_values(&v);
    store_held(&v);
}

/* ---- one kernel a shape ---- */

#define DEFINE_RUN(KS, NCH)                                                                                            \
    static void run_##KS##_##NCH(walk *w) { run_walk(w, KS, NCH); }
DEFINE_RUN(1, 1)
DEFINE_RUN(2, 1)
DEFINE_RUN(3, 2)
DEFINE_RUN(4, 2)
DEFINE_RUN(6, 3)
DEFINE_RUN(8, 4)

/* Data: group_keys * 32 keys of K and V are to fit the first-level cache beside the buffers. */
static const struct shape {
    int depth_steps, chunks, group_keys;
    void (*run)(walk *w);
} shapes[] = {
    {1, 1, 4, run_1_1}, {2, 1, 2, run_2_1}, {3, 2, 2, run_3_2},
    {4, 2, 2, run_4_2}, {6, 3, 1, run_6_3}, {8, 4, 1, run_8_4},
};

static const struct shape *find_shape(int head_dim, int head_dim_v)
{
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        if (shapes[n].depth_steps == (head_dim + 31) / 32 && shapes[n].chunks == (head_dim_v + 63) / 64)
            return &shapes[n];
    }
    return NULL;
}

bool fa_amx_forward_block(const fa_forward_block *block)
{
    const struct shape *shape = find_shape(block->head_dim, block->head_dim_v);
    if (!shape || !(block->multiplier > SMALLEST_MULTIPLIER) || block->rows > MAX_ROWS)
        return false;
    walk w = {.block       = block,
              .group_keys  = shape->group_keys,
              .own         = block->scratch,
              .k           = constants_make(block->multiplier),
              .row_groups  = (block->rows + 15) / 16,
              .depth_steps = (block->head_dim + 31) / 32,
              .columns     = (block->head_dim_v + 15) / 16,
              .all_steps   = (block->keys + 31) / 32};
    begin_walk(&w);
    shape->run(&w);
    end_walk(&w);
    return true;
}
