/*
 * A unit of the AMX forward: 32 queries by 32 keys. Its softmax, vectors, runs a row at a time among the tile
 * instructions of a later unit's scores and of the values of units before.
 *
 * PIECES, 1 to 3, is how many bfloat16 pieces a value of Q, K, P and V is; a product of values is then several of
 * pieces, and since each shares an operand with the one before they need 0.6 tile loads each in place of one.
 */
#ifndef FA_CPU_AMX_FORWARD_UNIT_H
#define FA_CPU_AMX_FORWARD_UNIT_H

#include "cpu/amx_fixed.h"

/* ---- products of pieces ---- */

/* float16's O = P V leaves out ll', 2^-16 of the whole and less than what P is cut by. The scores keep it: LSE is as
 * exact as float32. */
FA_AMX_INLINE int num_products(bool scores, int pieces)
{
    return !scores && pieces == 2 ? 3 : fa_amx_num_products[pieces];
}

FA_AMX_INLINE fa_amx_product product_at(bool scores, int pieces, int n)
{
    static const fa_amx_product without_last[3] = {{0, 1}, {0, 0}, {1, 0}};
    return !scores && pieces == 2 ? without_last[n] : fa_amx_products[pieces][n];
}

/* ---- blocks of accumulators: tiles 0 to 3, [row tile][column tile] ---- */

/* Where they belong in memory. */
typedef struct target {
    char   *at;
    int64_t ld, right, down; /* bytes: from row to row, to the tile on the right, to the tile below */
    int     columns;         /* 0: nothing, 1, 2 */
    int     unit;            /* S of this unit; -1: O */
    bool    fresh;           /* begins as zeros, whatever is there */
} target;

typedef struct operands {
    const char *a[2], *b[2];
    bool        new_a, new_b; /* false: the step before has left it in its tiles */
} operands;

/* Of the n-th product of pieces; x: of the first piece of either side. */
FA_AMX_INLINE operands operands_of(operands x, bool scores, int pieces, int n)
{
    fa_amx_product now = product_at(scores, pieces, n), before = product_at(scores, pieces, n > 0 ? n - 1 : 0);
    for (int t = 0; t < 2; t++) {
        x.a[t] += now.left * FA_AMX_TILE;
        x.b[t] += now.right * FA_AMX_TILE;
    }
    x.new_a = n == 0 || now.left != before.left;
    x.new_b = n == 0 || now.right != before.right;
    return x;
}

#define STORE_TO(x, t) TILE_STORE(t, (x)->at + ((t) % 2) * (x)->right + ((t) / 2) * (x)->down, (x)->ld)
#define LOAD_FROM(x, t) TILE_LOAD(t, (x)->at + ((t) % 2) * (x)->right + ((t) / 2) * (x)->down, (x)->ld)

static void store_held(target *held)
{
    if (held->columns > 0) {
        STORE_TO(held, 0);
        STORE_TO(held, 2);
    }
    if (held->columns > 1) {
        STORE_TO(held, 1);
        STORE_TO(held, 3);
    }
    held->columns = 0;
}

/* ---- steps: four products ----
 *
 * What stands beside vectors must be ready soon after the processor meets it: it looks only some 180 vector results and
 * 16 tiles ahead, and whoever waits for a tile from the second-level cache and then for a product waits as long. So
 * nothing is loaded where it is used. Steps take turns at which row of tiles is first, f, so that registers are free
 * early:
 *
 *     product              0                        1           2             3
 *     row, column          f, 0                     1 - f, 0    1 - f, 1      f, 1
 *     loads before it      left 1 - f, right 1                  next right 0  next left 1 - f
 *     accumulators before  that of product 1, 2, and 3 go home and begin anew; that of the next step's first at 3
 *
 * Found by trying orders, docs/decisions/0030-amx-forward.md, seventh round. */

typedef struct step {
    operands      x;
    bool          there, scores, first; /* there: else nothing of it is done; first: of its accumulators */
    const target *home;                 /* of its accumulators */
} step;

FA_AMX_INLINE int accumulator(int t, int f) { return 2 * (t == 0 || t == 3 ? f : 1 - f) + t / 2; }

/* Q is read again for the next keys; P, and K and V, which other rows need much later, are not. */
#define LOAD_LEFT(t, p)                                                                                                \
    if (s->scores)                                                                                                     \
        TILE_LOAD(t, p, 64);                                                                                           \
    else                                                                                                               \
        TILE_LOAD_ONCE(t, p, 64)

FA_AMX_INLINE void load_left(int row, const step *s)
{
    if (!s->x.new_a)
        return;
    if (row == 0) {
        LOAD_LEFT(4, s->x.a[0]);
    } else {
        LOAD_LEFT(5, s->x.a[1]);
    }
}

FA_AMX_INLINE void load_right(int column, const step *s)
{
    if (!s->x.new_b)
        return;
    if (column == 0)
        TILE_LOAD_ONCE(6, s->x.b[0], 64);
    else if (s->scores || s->home->columns > 1)
        TILE_LOAD_ONCE(7, s->x.b[1], 64);
}

/* Tile t goes home to `held` and becomes the step's. */
#define SWITCH_TILE(t)                                                                                                 \
    if (held->columns > (t) % 2)                                                                                       \
        STORE_TO(held, t);                                                                                             \
    if (s->home->fresh)                                                                                                \
        TILE_ZERO(t);                                                                                                  \
    else if (s->home->columns > (t) % 2)                                                                               \
    LOAD_FROM(s->home, t)

FA_AMX_INLINE void switch_tile(int t, const step *s, const target *held)
{
    switch (t) {
    case 0: SWITCH_TILE(0); break;
    case 1: SWITCH_TILE(1); break;
    case 2: SWITCH_TILE(2); break;
    default: SWITCH_TILE(3); break;
    }
}

FA_AMX_INLINE void dot(int t, const step *s)
{
    if (!s->scores && s->home->columns <= t % 2)
        return;
    switch (t) {
    case 0: TILE_DOT(0, 4, 6); break;
    case 1: TILE_DOT(1, 4, 7); break;
    case 2: TILE_DOT(2, 5, 6); break;
    default: TILE_DOT(3, 5, 7); break;
    }
}

/* What a first step, f = 0, needs before it. */
FA_AMX_INLINE void begin_steps(const step *s, const target *held)
{
    if (!s->there)
        return;
    load_left(0, s);
    load_right(0, s);
    switch_tile(0, s, held);
}

/* Product t of step `now`, with what belongs before it. */
FA_AMX_INLINE void product(int t, int f, const step *now, const step *after, target *held)
{
    if (!now->there)
        return;
    if (t == 0) {
        load_left(1 - f, now);
        load_right(1, now);
    }
    if (t == 2 && after->there)
        load_right(0, after);
    if (t == 3 && after->there)
        load_left(1 - f, after);
    if (t < 3 && now->first)
        switch_tile(accumulator(t + 1, f), now, held);
    if (t == 2 && now->first)
        *held = *now->home;
    if (t == 3 && after->there && after->first)
        switch_tile(accumulator(0, 1 - f), after, held);
    dot(accumulator(t, f), now);
}

/* ---- the values of a chunk ---- */

typedef struct values {
    const char *p, *v; /* P of the chunk: [row tile][unit][piece], p_down bytes between; V from its first key, */
    int64_t     p_down, v_step; /* so many bytes a unit */
    float      *o;              /* 32 rows */
    int         ldo, columns;   /* tiles of 16 columns */
    int         units, col;     /* col: the next column tile */
    bool        fresh;          /* of O is nothing there yet */
} values;

FA_AMX_INLINE target values_target(const values *v, int columns)
{
    return (target){(char *)(v->o + 16 * v->col), 4 * v->ldo, 64, 64 * v->ldo, columns, -1, v->fresh};
}

FA_AMX_INLINE operands values_operands(const values *v, int unit, int64_t p_down, int PIECES)
{
    const char *p     = v->p + unit * PIECES * FA_AMX_TILE,
               *right = v->v + (int64_t)v->col * PIECES * FA_AMX_TILE + unit * v->v_step;
    return (operands){.a = {p, p + p_down}, .b = {right, right + PIECES * FA_AMX_TILE}};
}

/* Step number n, counted from unit `unit`, of a block whose accumulators belong to home. */
FA_AMX_INLINE step values_step(const values *v, const target *home, int unit, int n, int PIECES)
{
    const int each = num_products(false, PIECES);
    unit += n / each;
    return (step){.x     = operands_of(values_operands(v, unit, v->p_down, PIECES), false, PIECES, n % each),
                  .there = unit < v->units,
                  .first = unit == 0 && n % each == 0,
                  .home  = home};
}

/* Line number n of the next block of O is asked for, one beside each product. After the last block, those of the first. */
FA_AMX_INLINE void fetch_line(const values *v, int n)
{
    int col = v->col + 2 < v->columns ? v->col + 2 : 0;
    __builtin_prefetch(v->o + n % 32 * (int64_t)v->ldo + 16 * (col + n / 32 % 2));
}

FA_AMX_INLINE void finish_values_of(values *v, target *held, int PIECES)
{
    const int steps = 2 * num_products(false, PIECES);
    for (; v->col < v->columns; v->col += 2) {
        target home = values_target(v, fa_min_int(2, v->columns - v->col));
        step   now  = values_step(v, &home, 0, 0, PIECES);
        begin_steps(&now, held);
        for (int unit = 0; unit < v->units; unit += 2) {
            UNROLL(6) for (int n = 0; n < steps; n++)
            {
                now        = values_step(v, &home, unit, n, PIECES);
                step after = values_step(v, &home, unit, n + 1, PIECES);
                UNROLL(4) for (int t = 0; t < 4; t++)
                {
                    product(t, n % 2, &now, &after, held);
                    if (PIECES == 1)
                        fetch_line(v, 4 * (unit + n) + t);
                }
            }
        }
    }
}

/* What is left of a chunk's values, with nothing beside it. */
static __attribute__((noinline)) void finish_values(values *v, target *held, int pieces)
{
    switch (fa_amx_pieces(pieces)) {
    case 1: finish_values_of(v, held, 1); break;
    case 2: finish_values_of(v, held, 2); break;
    default: finish_values_of(v, held, 3); break;
    }
}

/* ---- a unit ---- */

/* Scores of a later unit. */
typedef struct scores {
    const char *q, *k;
    int64_t     q_down;
    float      *s; /* where they go */
    int         unit;
} scores;

typedef struct unit {
    scores    later[2];
    float    *s; /* softmax */
    uint16_t *p;
    int       p_down;
    row_state state;
} unit;

FA_AMX_INLINE target scores_target(const scores *x)
{
    return (target){(char *)x->s, 64, FA_AMX_TILE, 2 * FA_AMX_TILE, 2, x->unit, true};
}

/* Step number n of a unit's scores. */
FA_AMX_INLINE step scores_step(const scores *x, const target *home, int n, int KS, int PIECES)
{
    const int   each = num_products(true, PIECES), part = n / each;
    const char *q = x->q + part * PIECES * FA_AMX_TILE, *k = x->k + part * PIECES * FA_AMX_TILE;
    operands    first = {.a = {q, q + x->q_down}, .b = {k, k + KS * PIECES * FA_AMX_TILE}};
    return (step){.x      = operands_of(first, true, PIECES, n % each),
                  .there  = part < KS,
                  .scores = true,
                  .first  = n == 0,
                  .home   = home};
}

/* The scores of a unit with nothing beside them. */
static __attribute__((noinline)) void scores_alone(const scores *x, target *held, int KS, int pieces)
{
    target home = scores_target(x);
    step   now  = scores_step(x, &home, 0, KS, pieces);
    begin_steps(&now, held);
    for (int n = 0; n < KS * num_products(true, pieces); n++) {
        step after = scores_step(x, &home, n + 1, KS, pieces);
        for (int t = 0; t < 4; t++)
            product(t, n % 2, &now, &after, held);
        now = after;
    }
}

/* Step number n of a unit: scores of SCORES units, home[0] and [1], then a block of values of CHUNK units, home[2]. */
FA_AMX_INLINE step unit_step(const unit *u, const values *v, const target home[3], int n, int PIECES, int KS,
                             int SCORES, int CHUNK)
{
    const int in_scores = KS * num_products(true, PIECES), in_values = num_products(false, PIECES);
    if (n < SCORES * in_scores)
        return scores_step(&u->later[n / in_scores], &home[n / in_scores], n % in_scores, KS, PIECES);
    n -= SCORES * in_scores;
    if (n >= CHUNK * in_values)
        return (step){.there = false};
    operands x = values_operands(v, n / in_values, (int64_t)CHUNK * PIECES * FA_AMX_TILE, PIECES);
    return (step){.x = operands_of(x, false, PIECES, n % in_values), .there = true, .first = n == 0, .home = &home[2]};
}

/* x, computed here: a compiler that puts it off has to keep what it is made of in memory. */
FA_AMX_INLINE __m512i now_and_not_later(__m512i x)
{
    __asm__ volatile("" : "+v"(x));
    return x;
}

/* The rows that are due beside tile product number `slot` of the unit's. Two rows are checked by one instruction. */
#define SOFTMAX_ROWS(slot)                                                                                             \
    UNROLL(32) for (int due = 0; due < most_rows; due++)                                                               \
    {                                                                                                                  \
        if (row < ((slot) + 1) * UNIT / slots) {                                                                       \
            __m512i sums = FIXED ? fixed_row(row, u.s, u.p, u.p_down, &u.state, k)                                     \
                                 : softmax_row(row, u.s, u.p, u.p_down, &u.state, k, PIECES);                          \
            if (row % 2)                                                                                               \
                check = now_and_not_later(check_rows(check, before, sums));                                            \
            before = sums;                                                                                             \
            row++;                                                                                                     \
        }                                                                                                              \
    }

/* KS: 32-column steps of head_dim. SCORES: of how many later units; CHUNK: of how many units the block of values is,
 * two columns of tiles, or 0. FIXED: P in fixed point. All is copied first: what tile instructions may change would be
 * read again after each. */
FA_AMX_INLINE bool run_unit(const unit *unit_at, const values *values_at, target *held_at, const constants *k,
                            int PIECES, int KS, int SCORES, int CHUNK, int FIXED)
{
    const unit   u       = *unit_at;
    const values v       = *values_at;
    target       held    = *held_at;
    target       home[3] = {0};
    __m512i      check = _mm512_setzero_si512(), before = check;
    const int    steps = SCORES * KS * num_products(true, PIECES) + CHUNK * num_products(false, PIECES);
    const int    slots = fa_max_int(4 * steps, 1), most_rows = (UNIT + slots - 1) / slots;
    int          row                                   = 0;
    UNROLL(2) for (int n = 0; n < SCORES; n++) home[n] = scores_target(&u.later[n]);
    if (CHUNK)
        home[2] = values_target(&v, 2);
    step now = unit_step(&u, &v, home, 0, PIECES, KS, SCORES, CHUNK);
    begin_steps(&now, &held);
    UNROLL(48) for (int n = 0; n < steps; n++)
    {
        now        = unit_step(&u, &v, home, n, PIECES, KS, SCORES, CHUNK);
        step after = unit_step(&u, &v, home, n + 1, PIECES, KS, SCORES, CHUNK);
        UNROLL(4) for (int t = 0; t < 4; t++)
        {
            product(t, n % 2, &now, &after, &held);
            SOFTMAX_ROWS(4 * n + t)
        }
    }
    if (steps == 0)
        SOFTMAX_ROWS(0)
    *held_at = held;
    return outgrew(check, FIXED);
}

#endif
