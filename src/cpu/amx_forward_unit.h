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

/* Unrolled whole, a unit is some 2000 instructions; sanitizers make that many times more, and minutes of compiling. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#endif

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
#define SWITCH_TILE(t, a, b)                                                                                           \
    if (first && held->columns > (t) % 2)                                                                              \
        STORE_TO(held, t);                                                                                             \
    if (scores || next->columns > (t) % 2) {                                                                           \
        if (first && scores)                                                                                           \
            TILE_ZERO(t);                                                                                              \
        if (first && !scores)                                                                                          \
            LOAD_FROM(next, t);                                                                                        \
        TILE_DOT(t, a, b);                                                                                             \
    }

/* Q is read again for the next keys; P, and K and V, which other rows need much later, are not. */
#define LOAD_LEFT(t, p)                                                                                                \
    if (scores)                                                                                                        \
        TILE_LOAD(t, p, 64);                                                                                           \
    else                                                                                                               \
        TILE_LOAD_ONCE(t, p, 64)

/* Product t of the four of a step, of scores or of values; first: tile t goes home to `held` and becomes next's. */
FA_AMX_INLINE void product(int t, const operands *x, bool scores, const target *held, const target *next, bool first)
{
    switch (t) {
    case 0:
        if (x->new_a) {
            LOAD_LEFT(4, x->a[0]);
        }
        if (x->new_b)
            TILE_LOAD_ONCE(6, x->b[0], 64);
        SWITCH_TILE(0, 4, 6)
        break;
    case 1:
        if ((scores || next->columns > 1) && x->new_b)
            TILE_LOAD_ONCE(7, x->b[1], 64);
        SWITCH_TILE(1, 4, 7)
        break;
    case 2:
        if (x->new_a) {
            LOAD_LEFT(5, x->a[1]);
        }
        SWITCH_TILE(2, 5, 6)
        break;
    default: SWITCH_TILE(3, 5, 7) break;
    }
}

/* All four of each product of pieces, with nothing beside them. */
FA_AMX_INLINE void products_alone(operands x, bool scores, const target *held, const target *next, bool first,
                                  int PIECES)
{
    UNROLL(6) for (int n = 0; n < num_products(scores, PIECES); n++)
    {
        operands one = operands_of(x, scores, PIECES, n);
        UNROLL(4) for (int t = 0; t < 4; t++) product(t, &one, scores, held, next, first && n == 0);
    }
}

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

/* ---- the values of a chunk ---- */

typedef struct values {
    const char *p, *v; /* P of the chunk: [row tile][unit][piece], p_down bytes between; V from its first key */
    int64_t     p_down;
    float      *o;            /* 32 rows */
    int         ldo, columns; /* tiles of 16 columns */
    int         units, col;   /* col: the next column tile */
} values;

FA_AMX_INLINE target values_target(const values *v)
{
    return (target){(char *)(v->o + 16 * v->col), 4 * v->ldo, 64, 64 * v->ldo, fa_min_int(2, v->columns - v->col), -1};
}

FA_AMX_INLINE operands values_operands(const values *v, int unit, int PIECES)
{
    const char *p     = v->p + unit * PIECES * FA_AMX_TILE,
               *right = v->v + (unit * v->columns + v->col) * PIECES * FA_AMX_TILE;
    return (operands){.a = {p, p + v->p_down}, .b = {right, right + PIECES * FA_AMX_TILE}};
}

FA_AMX_INLINE void finish_values_of(values *v, target *held, int PIECES)
{
    for (; v->col < v->columns; v->col += 2) {
        target next = values_target(v);
        for (int unit = 0; unit < v->units; unit++)
            products_alone(values_operands(v, unit, PIECES), false, held, &next, unit == 0, PIECES);
        *held = next;
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

typedef struct unit {
    const char *q, *k; /* scores of a later unit; q NULL: none, not with values beside */
    int64_t     q_down;
    target      s_next;
    float      *s; /* softmax */
    uint16_t   *p;
    int         p_down;
    row_state   state;
} unit;

FA_AMX_INLINE operands scores_operands(const unit *u, int part, int KS, int PIECES)
{
    const char *q = u->q + part * PIECES * FA_AMX_TILE, *k = u->k + part * PIECES * FA_AMX_TILE;
    return (operands){.a = {q, q + u->q_down}, .b = {k, k + KS * PIECES * FA_AMX_TILE}};
}

/* The rows that are due beside tile product number `slot` of the unit's. */
#define SOFTMAX_ROWS(slot)                                                                                             \
    UNROLL(32) for (int n = 0; n < most_rows; n++)                                                                     \
    {                                                                                                                  \
        if (row < ((slot) + 1) * UNIT / slots) {                                                                       \
            check = FIXED ? fixed_row(row, u->s, u->p, u->p_down, &u->state, k, check)                                 \
                          : softmax_row(row, u->s, u->p, u->p_down, &u->state, k, check, PIECES);                      \
            row++;                                                                                                     \
        }                                                                                                              \
    }

/* KS: 32-column steps of head_dim. BESIDE: blocks of values of the chunk before that run beside this unit, chunks of
 * CHUNK units. FIXED: P in fixed point. */
FA_AMX_INLINE bool run_unit(const unit *u, values *v, target *held, const constants *k, int PIECES, int KS, int BESIDE,
                            int CHUNK, int FIXED)
{
    __m512i   check     = _mm512_setzero_si512();
    const int in_scores = num_products(true, PIECES), in_values = num_products(false, PIECES);
    const int slots = 4 * (KS * in_scores + BESIDE * CHUNK * in_values), most_rows = (UNIT + slots - 1) / slots;
    int       row = 0;
    UNROLL(8) for (int part = 0; part < KS; part++)
    {
        UNROLL(6) for (int i = 0; i < in_scores; i++)
        {
            operands x = {0};
            if (BESIDE || u->q)
                x = operands_of(scores_operands(u, part, KS, PIECES), true, PIECES, i);
            UNROLL(4) for (int t = 0; t < 4; t++)
            {
                if (BESIDE || u->q)
                    product(t, &x, true, held, &u->s_next, part == 0 && i == 0);
                SOFTMAX_ROWS(4 * (part * in_scores + i) + t)
            }
        }
    }
    if (BESIDE || u->q)
        *held = u->s_next;
    UNROLL(4) for (int b = 0; b < BESIDE; b++)
    {
        bool   some = v->col < v->columns;
        target next = values_target(v);
        UNROLL(4) for (int m = 0; m < CHUNK; m++)
        {
            UNROLL(6) for (int i = 0; i < in_values; i++)
            {
                operands x = operands_of(values_operands(v, m, PIECES), false, PIECES, i);
                UNROLL(4) for (int t = 0; t < 4; t++)
                {
                    if (some && m < v->units)
                        product(t, &x, false, held, &next, m == 0 && i == 0);
                    SOFTMAX_ROWS(4 * (KS * in_scores + (b * CHUNK + m) * in_values + i) + t)
                }
            }
        }
        if (some) {
            *held = next;
            v->col += 2;
        }
    }
    return outgrew(check, FIXED);
}

#endif
