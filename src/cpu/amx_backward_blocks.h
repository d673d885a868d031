/*
 * Products of the AMX backward: blocks of 2 x 2 tiles of C, with rows of the vector stage (amx_gradient.h) among them.
 *
 * A tile store right behind its product stalls all that follows, a product later it is nearly free: so the accumulators
 * of a block are stored among the first products of the next one (struct pending).
 *
 * What limits is the first-level cache, through which a cell passes more than it holds. An operand that is read once
 * before others of its kind comes with a hint (TILELOADDT1) and leaves the cache to those that come again: the other
 * operand, S, P and dS.
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
    const char *a, *b;
    int64_t     a_row, a_step, b_col, b_step; /* bytes from one tile to the next, across C and along the contraction */
    pending     c;
    bool        add; /* else C starts at 0 */
} block;

#define TILE_LOAD_ONCE(t, p, stride)                                                                                   \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")

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

/* Rows of P and dS of one cell that go between the products of the next. */
typedef struct beside {
    const gradient *g;
    bool            special;
    int             row, credit, groups; /* 16 rows among so many groups of four products */
} beside;

#define BESIDE_PIECES 3 /* 4 to 9% faster with three pieces, slower with fewer */
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

/* One step of the contraction. last: C begins here, and what was in its registers is stored. */
FA_AMX_INLINE void block_step(const block *x, const char *a, const char *b, const pending *last, piece_sum sum,
                              beside *v)
{
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
        block_step(x, x->a, x->b, last, sum, v);
    for (int n = fa_max_int(first, 1); n < steps; n++)
        block_step(x, x->a + n * x->a_step, x->b + n * x->b_step, NULL, sum, v);
    *last = x->c;
}

FA_AMX_INLINE void run_block(const block *x, int steps, pending *last, piece_sum sum, beside *v)
{
    run_block_from(x, 0, steps, last, sum, v);
}

FA_AMX_INLINE void store_pending(pending *last)
{
    STORE_PENDING(0, 0);
    STORE_PENDING(1, last->col);
    STORE_PENDING(2, last->row);
    STORE_PENDING(3, last->row + last->col);
    last->c = NULL;
}

#endif
