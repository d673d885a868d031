/*
 * Matrix products over packed tiles: C = A B or C += A B with C float32, row major. Values of several pieces are
 * multiplied as sums of products of pieces (fa_amx_products).
 */
#ifndef FA_CPU_AMX_MULTIPLY_H
#define FA_CPU_AMX_MULTIPLY_H

#include "cpu/amx.h"

/* ---- the products: C[2 x 16 rows][2 x 16 columns] in tiles 0 to 3 ---- */

typedef struct operand {
    const char *base;
    int64_t     outer, inner; /* bytes from one tile to the next across C, and along the contraction; pieces between */
} operand;

typedef struct matrix {
    float *at;
    int    ld, rows, cols; /* columns: a multiple of 16 */
} matrix;

/* A tile of C may lack rows: then work on a copy. */
typedef struct corner {
    float *at;
    int    ld;
    float *copy;
} corner;

static corner corner_begin(const matrix *c, int row, int col, bool add, float copy[FA_AMX_TILE_FLOATS])
{
    corner place = {c->at + (int64_t)row * c->ld + col, c->ld, NULL};
    if (row + 16 <= c->rows)
        return place;
    place.copy = copy;
    memset(copy, 0, FA_AMX_TILE);
    for (int r = 0; add && r < c->rows - row; r++)
        memcpy(copy + 16 * r, place.at + (int64_t)r * c->ld, 64);
    return place;
}

static void corner_end(const matrix *c, const corner *place, int row)
{
    for (int r = 0; place->copy && r < c->rows - row; r++)
        memcpy(place->at + (int64_t)r * c->ld, place->copy + 16 * r, 64);
}

static void *corner_data(const corner *place) { return place->copy ? place->copy : place->at; }
static int   corner_stride(const corner *place) { return place->copy ? 64 : place->ld * 4; }

FA_AMX_INLINE void dot_block(const char *a, const operand *left, const char *b, const operand *right, int steps,
                             int pieces, bool second_row, bool second_col)
{
    for (int k = 0; k < steps; k++, a += left->inner, b += right->inner) {
        _Pragma("GCC unroll 6") for (int n = 0; n < fa_amx_num_products[pieces]; n++)
        {
            const fa_amx_product *now = &fa_amx_products[pieces][n];
            const char    *a0 = a + now->left * FA_AMX_TILE, *b0 = b + now->right * FA_AMX_TILE;
            bool           new_a = n == 0 || now->left != fa_amx_products[pieces][n - 1].left;
            bool           new_b = n == 0 || now->right != fa_amx_products[pieces][n - 1].right;
            if (new_a)
                TILE_LOAD(4, a0, 64);
            if (new_b)
                TILE_LOAD(6, b0, 64);
            TILE_DOT(0, 4, 6);
            if (second_col) {
                if (new_b)
                    TILE_LOAD(7, b0 + right->outer, 64);
                TILE_DOT(1, 4, 7);
            }
            if (second_row) {
                if (new_a)
                    TILE_LOAD(5, a0 + left->outer, 64);
                TILE_DOT(2, 5, 6);
                if (second_col)
                    TILE_DOT(3, 5, 7);
            }
        }
    }
}

/* C = left right, or C += left right. */
FA_AMX_INLINE void multiply(const matrix *c, const operand *left, const operand *right, int steps, int pieces, bool add)
{
    _Alignas(64) float copy[4][FA_AMX_TILE_FLOATS];
    for (int row = 0; row < c->rows; row += 32) {
        bool second_row = row + 16 < c->rows;
        for (int col = 0; col < c->cols; col += 32) {
            bool        second_col = col + 16 < c->cols;
            corner      at[4]      = {{0}};
            const char *a = left->base + row / 16 * left->outer, *b = right->base + col / 16 * right->outer;
            at[0] = corner_begin(c, row, col, add, copy[0]);
            at[1] = second_col ? corner_begin(c, row, col + 16, add, copy[1]) : at[0];
            at[2] = second_row ? corner_begin(c, row + 16, col, add, copy[2]) : at[0];
            at[3] = second_row && second_col ? corner_begin(c, row + 16, col + 16, add, copy[3]) : at[0];
            if (add) {
                TILE_LOAD(0, corner_data(&at[0]), corner_stride(&at[0]));
                TILE_LOAD(1, corner_data(&at[1]), corner_stride(&at[1]));
                TILE_LOAD(2, corner_data(&at[2]), corner_stride(&at[2]));
                TILE_LOAD(3, corner_data(&at[3]), corner_stride(&at[3]));
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            }
            if (second_row && second_col)
                dot_block(a, left, b, right, steps, pieces, true, true);
            else
                dot_block(a, left, b, right, steps, pieces, second_row, second_col);
            TILE_STORE(0, corner_data(&at[0]), corner_stride(&at[0]));
            corner_end(c, &at[0], row);
            if (second_col) {
                TILE_STORE(1, corner_data(&at[1]), corner_stride(&at[1]));
                corner_end(c, &at[1], row);
            }
            if (second_row) {
                TILE_STORE(2, corner_data(&at[2]), corner_stride(&at[2]));
                corner_end(c, &at[2], row + 16);
            }
            if (second_row && second_col) {
                TILE_STORE(3, corner_data(&at[3]), corner_stride(&at[3]));
                corner_end(c, &at[3], row + 16);
            }
        }
    }
}

#endif
