/*
 * Products of the AMX backward: blocks of 2 x 2 tiles of C, with rows of the vector stage (amx_gradient.h) among them.
 *
 * A tile store right behind its product stalls all that follows, a product later it is nearly free: so the accumulators
 * of a block are stored among the first products of the next one (struct pending).
 *
 * How far ahead the processor looks is what decides beside that: 16 instructions that write a tile, or about 180 that
 * write a vector. So one operand is loaded for each product, one or two products before it is needed.
 *
 * What limits then is the first-level cache, through which a cell passes more than it holds. An operand that is read
 * once before others of its kind comes with a hint (TILELOADDT1) and leaves the cache to those that come again: the
 * other operand, S, P and dS.
 */
#ifndef FA_CPU_AMX_BACKWARD_BLOCKS_H
#define FA_CPU_AMX_BACKWARD_BLOCKS_H

#include "cpu/amx_gradient.h"

/* Which products of pieces a block adds up. turned: left and right trade places in the list, so that S^T and dP^T are
 * the bits of S and dP. Of float16 ll' is 2^-18 of the whole: with logits of 1e4 S needs it, nothing else does. */
typedef struct piece_sum {
    int  pieces;
    bool turned, all;
    bool b_once; /* of a block's operands b is the one that is read once while the other comes again; else a */
} piece_sum;

static const fa_amx_product float16_products[3] = {{0, 1}, {0, 0}, {1, 0}};

FA_AMX_INLINE int num_products(piece_sum sum)
{
    return sum.pieces == 2 && !sum.all ? 3 : fa_amx_num_products[sum.pieces];
}

FA_AMX_INLINE fa_amx_product product_at(piece_sum sum, int n)
{
    fa_amx_product x = sum.pieces == 2 && !sum.all ? float16_products[n] : fa_amx_products[sum.pieces][n];
    return sum.turned ? (fa_amx_product){x.right, x.left} : x;
}

/* Four tiles of C that still are in registers 0 to 3. c NULL: none. */
typedef struct pending {
    float  *c;
    int64_t row, col; /* floats from one tile to the next */
} pending;

typedef struct block {
    const char  *a, *b;
    int64_t      a_row, a_step, b_col, b_step; /* bytes from one tile to the next, across C and along the contraction */
    pending      c;
    bool         add;   /* else C starts at 0 */
    const float *soon;  /* where the next block's sums lie, as c; NULL: not known */
    const char  *later; /* where asks: lines to ask for, one after each product */
} block;

/* 0.3 us without a product and the tile unit goes to sleep; it takes as long to wake up. What this one computes is
 * overwritten. */
#define KEEP_AWAKE() TILE_DOT(4, 5, 6)

#define STORE_PENDING(t, offset)                                                                                       \
    if (last->c)                                                                                                       \
    TILE_STORE(t, last->c + (offset), 64)
#define BEGIN_C(t, offset)                                                                                             \
    if (x->add)                                                                                                        \
        TILE_LOAD(t, x->c.c + (offset), 64);                                                                           \
    else                                                                                                               \
        TILE_ZERO(t)

/* Rows of P and dS of one cell that go between the products of the next, three pieces. */
typedef struct beside {
    const gradient *g;
    bool            special;
    int             row, credit, groups; /* 16 rows among so many groups of four products */
} beside;

#define BESIDE_PIECES 3 /* 4 to 9% faster with three pieces, slower with two */
#define BESIDE_AFTER 2  /* groups; then what the rows read has been stored */

/* Functions of their own, for there are many places to put a row. */
static __attribute__((noinline)) void row_beside(const gradient *g, int row)
{
    gradient_row(g, row, false, BESIDE_PIECES);
}

static __attribute__((noinline)) void special_row_beside(const gradient *g, int row)
{
    gradient_row(g, row, true, BESIDE_PIECES);
}

static beside beside_make(const gradient *g, bool special, int groups)
{
    return (beside){g, special, 0, -16 * BESIDE_AFTER, groups + BESIDE_AFTER};
}

FA_AMX_INLINE void next_row(beside *v)
{
    if (v->special)
        special_row_beside(v->g, v->row++);
    else
        row_beside(v->g, v->row++);
}

FA_AMX_INLINE void next_rows(beside *v)
{
    for (v->credit += 16; v->credit >= v->groups && v->row < 16; v->credit -= v->groups)
        next_row(v);
}

#define LOAD_A(t, p)                                                                                                   \
    if (sum.b_once)                                                                                                    \
        TILE_LOAD(t, p, 64);                                                                                           \
    else                                                                                                               \
        TILE_LOAD_ONCE(t, p, 64)
#define LOAD_B(t, p)                                                                                                   \
    if (sum.b_once)                                                                                                    \
        TILE_LOAD_ONCE(t, p, 64);                                                                                      \
    else                                                                                                               \
        TILE_LOAD(t, p, 64)

/* A step of the contraction, two or three pieces. last: C begins here, and what was in its registers is stored. */
FA_AMX_INLINE void block_step(const block *x, int step, const pending *last, piece_sum sum, beside *v)
{
    const char *a = x->a + step * x->a_step, *b = x->b + step * x->b_step;
    _Pragma("GCC unroll 6") for (int n = 0; n < num_products(sum); n++)
    {
        const fa_amx_product now = product_at(sum, n), before = product_at(sum, n == 0 ? 0 : n - 1);
        const char          *a0 = a + now.left * FA_AMX_TILE, *b0 = b + now.right * FA_AMX_TILE;
        const bool           new_a = n == 0 || now.left != before.left, new_b = n == 0 || now.right != before.right;
        const bool           begin = last && n == 0;
        if (new_a) {
            LOAD_A(4, a0);
        }
        if (new_b) {
            LOAD_B(6, b0);
        }
        if (begin) {
            STORE_PENDING(0, 0);
            BEGIN_C(0, 0);
        }
        TILE_DOT(0, 4, 6);
        if (new_b) {
            LOAD_B(7, b0 + x->b_col);
        }
        if (begin) {
            STORE_PENDING(1, last->col);
            BEGIN_C(1, x->c.col);
        }
        TILE_DOT(1, 4, 7);
        if (new_a) {
            LOAD_A(5, a0 + x->a_row);
        }
        if (begin) {
            STORE_PENDING(2, last->row);
            BEGIN_C(2, x->c.row);
        }
        TILE_DOT(2, 5, 6);
        if (begin) {
            STORE_PENDING(3, last->row + last->col);
            BEGIN_C(3, x->c.row + x->c.col);
        }
        TILE_DOT(3, 5, 7);
        if (v)
            next_rows(v);
    }
}

/* Steps from `first` on; those before have been done. */
FA_AMX_INLINE void run_block_from(const block *x, int first, int steps, pending *last, piece_sum sum, beside *v)
{
    if (first == 0)
        block_step(x, 0, last, sum, v);
    for (int n = fa_max_int(first, 1); n < steps; n++)
        block_step(x, n, NULL, sum, v);
    *last = x->c;
}

/* ---- one piece ---- */

/* A line that is needed later, from the third-level cache to the second. */
FA_AMX_INLINE void ask_line(const char *from, int line) { _mm_prefetch(from + 64 * line, _MM_HINT_T1); }

/* Rows of P and dS of one cell among the products of the next: 16 in so many places, one after each product of the
 * block from step `from` on. Their constants are in registers and their places are known when this is compiled: a
 * branch that is guessed wrong throws away the tile loads that have begun. */
typedef struct among {
    const gradient *g;
    int             from, first, places; /* step and place of the block; of the cell */
    bool            asks;
    const char     *later[2]; /* where asks: 16 lines each */
} among;

FA_AMX_INLINE void row_at(const among *v, int row)
{
    if (v->asks) {
        ask_line(v->later[0], row);
        ask_line(v->later[1], row);
    }
    gradient_row_ahead(v->g, row);
}

FA_AMX_INLINE void rows_at(const among *v, int place)
{
    /* at most two rows; places beyond the last have none */
    const int begin = place * 16 / v->places, end = fa_min_int((place + 1) * 16 / v->places, 16);
    UNROLL(2) for (int row = begin; row < end; row++) row_at(v, row);
}

/* A tile of the next block's sums in each of the steps 1 to 4, four lines after each product. */
FA_AMX_INLINE void fetch_sums(const block *x, int step, int quarter)
{
    if (!x->soon || step < 1 || step > 4)
        return;
    const float *tile = x->soon + (step - 1) / 2 * x->c.row + (step - 1) % 2 * x->c.col;
    for (int line = 4 * quarter; line < 4 * quarter + 4; line++)
        __builtin_prefetch(tile + 16 * line, 1);
}

/* asks: for x->later. */
FA_AMX_INLINE void after_product(const block *x, int step, int quarter, const among *v, bool asks)
{
    if (v) {
        if (step >= v->from)
            rows_at(v, v->first + 4 * (step - v->from) + quarter);
        return;
    }
    if (asks)
        ask_line(x->later, 4 * step + quarter);
    fetch_sums(x, step, quarter);
}

#define STORE_AND_BEGIN(t, offset_last, offset)                                                                        \
    if (step == 0) {                                                                                                   \
        STORE_PENDING(t, offset_last);                                                                                 \
        BEGIN_C(t, offset);                                                                                            \
    }

/* Tiles of C are passed there and back, 0 2 3 1 in an even step and 2 0 1 3 in an odd one. The first operands of a step
 * are loaded in the one before; more: there is one after. */
FA_AMX_INLINE void even_step(const block *x, int step, bool more, const pending *last, piece_sum sum, const among *v,
                             bool asks)
{
    const char *a = x->a + step * x->a_step, *b = x->b + step * x->b_step;
    LOAD_A(5, a + x->a_row);
    STORE_AND_BEGIN(0, 0, 0);
    TILE_DOT(0, 4, 6);
    after_product(x, step, 0, v, asks);
    LOAD_B(7, b + x->b_col);
    STORE_AND_BEGIN(2, last->row, x->c.row);
    TILE_DOT(2, 5, 6);
    after_product(x, step, 1, v, asks);
    if (more) {
        LOAD_B(6, b + x->b_step);
    }
    STORE_AND_BEGIN(3, last->row + last->col, x->c.row + x->c.col);
    TILE_DOT(3, 5, 7);
    after_product(x, step, 2, v, asks);
    if (more) {
        LOAD_A(5, a + x->a_step + x->a_row);
    }
    STORE_AND_BEGIN(1, last->col, x->c.col);
    TILE_DOT(1, 4, 7);
    after_product(x, step, 3, v, asks);
}

FA_AMX_INLINE void odd_step(const block *x, int step, bool more, piece_sum sum, const among *v, bool asks)
{
    const char *a = x->a + step * x->a_step, *b = x->b + step * x->b_step;
    LOAD_A(4, a);
    TILE_DOT(2, 5, 6);
    after_product(x, step, 0, v, asks);
    LOAD_B(7, b + x->b_col);
    TILE_DOT(0, 4, 6);
    after_product(x, step, 1, v, asks);
    if (more) {
        LOAD_B(6, b + x->b_step);
    }
    TILE_DOT(1, 4, 7);
    after_product(x, step, 2, v, asks);
    if (more) {
        LOAD_A(4, a + x->a_step);
    }
    TILE_DOT(3, 5, 7);
    after_product(x, step, 3, v, asks);
}

FA_AMX_INLINE void two_steps(const block *x, int step, int steps, piece_sum sum, const among *v, bool asks)
{
    odd_step(x, step, step + 1 < steps, sum, v, asks);
    if (step + 1 < steps)
        even_step(x, step + 1, step + 2 < steps, NULL, sum, v, asks);
}

/* run_block of one piece. v NULL: no rows. */
FA_AMX_INLINE void run_block_of_one(const block *x, int steps, pending *last, piece_sum sum, const among *v, bool asks)
{
    LOAD_A(4, x->a);
    LOAD_B(6, x->b);
    even_step(x, 0, steps > 1, last, sum, v, asks);
    if (v) {
        _Pragma("GCC unroll 4") for (int n = 1; n < steps; n += 2) two_steps(x, n, steps, sum, v, asks);
    } else {
        for (int n = 1; n < steps; n += 2)
            two_steps(x, n, steps, sum, NULL, asks);
    }
    *last = x->c;
}

FA_AMX_INLINE void run_block(const block *x, int steps, pending *last, piece_sum sum)
{
    if (sum.pieces == 1)
        run_block_of_one(x, steps, last, sum, NULL, false);
    else
        run_block_from(x, 0, steps, last, sum, NULL);
}

/* A step of 4 tiles of columns by 16 queries of dQ^T. dS of it is in tile `now`, that of the next goes to `then`; the
 * first tile of K^T is in 6. */
#define DQ_STEP(now, then)                                                                                             \
    TILE_LOAD(7, k + x->a_row, 64);                                                                                    \
    STORE_AND_BEGIN(0, 0, 0);                                                                                          \
    TILE_DOT(0, 6, now);                                                                                               \
    fetch_sums(x, step, 0);                                                                                            \
    TILE_LOAD(6, k + 2 * x->a_row, 64);                                                                                \
    STORE_AND_BEGIN(1, last->col, x->c.col);                                                                           \
    TILE_DOT(1, 7, now);                                                                                               \
    fetch_sums(x, step, 1);                                                                                            \
    if (step + 1 < steps)                                                                                              \
        TILE_LOAD_ONCE(then, x->b + (step + 1) * x->b_step, 64);                                                       \
    TILE_LOAD(7, k + 3 * x->a_row, 64);                                                                                \
    STORE_AND_BEGIN(2, last->row, x->c.row);                                                                           \
    TILE_DOT(2, 6, now);                                                                                               \
    fetch_sums(x, step, 2);                                                                                            \
    if (step + 1 < steps)                                                                                              \
        TILE_LOAD(6, k + x->a_step, 64);                                                                               \
    STORE_AND_BEGIN(3, last->row + last->col, x->c.row + x->c.col);                                                    \
    TILE_DOT(3, 7, now);                                                                                               \
    fetch_sums(x, step, 3)

/* 4 tiles of columns by 16 queries: K^T stays in the first-level cache and dS is read once. */
FA_AMX_INLINE void run_tall_block(const block *x, int steps, pending *last)
{
    TILE_LOAD_ONCE(4, x->b, 64);
    TILE_LOAD(6, x->a, 64);
    for (int step = 0; step < steps; step++) {
        const char *k = x->a + step * x->a_step;
        if (step % 2 == 0) {
            DQ_STEP(4, 5);
        } else {
            DQ_STEP(5, 4);
        }
    }
    *last = x->c;
}
#undef DQ_STEP
#undef STORE_AND_BEGIN

FA_AMX_INLINE void store_pending(pending *last)
{
    STORE_PENDING(0, 0);
    STORE_PENDING(1, last->col);
    STORE_PENDING(2, last->row);
    STORE_PENDING(3, last->row + last->col);
    last->c = NULL;
}

#endif
