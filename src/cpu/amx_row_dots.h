/* Delta = rowsum(dO * O) by the products of dP, added up in their order (decision 0004). */
#ifndef FA_CPU_AMX_ROW_DOTS_H
#define FA_CPU_AMX_ROW_DOTS_H

#include "cpu/amx_multiply.h"
#include "cpu/amx_pack_pieces.h"

/* Row r of b times row r of a by the products of S and dP, added up in their order: where a is V's row of a key that
 * has all the weight, dP - Delta is 0 exactly. b is cut into as many pieces as dP's operand is, for what that drops dP
 * drops too; a, which nothing cuts elsewhere, into three where b has fewer. */
FA_AMX_INLINE void row_dots_pieces(float *out, const fa_rows *a, const fa_rows *b, int pieces)
{
    for (int first = 0; first < a->count; first += 16) {
        _Alignas(64) float   c[FA_AMX_TILE_FLOATS];
        _Alignas(64) __m512i left[MAX_PIECES][16], right[MAX_PIECES][16];
        matrix               sums = {c, 16, 16, 16};
        memset(c, 0, sizeof c);
        for (int col = 0; col < a->cols; col += 32) {
            load_pairs(left, b, first, col, pieces);
            load_pairs(right, a, first, col, MAX_PIECES);
            for (int n = 0; n < MAX_PIECES; n++)
                fa_amx_transpose(right[n]);
            operand x = {(const char *)left, 0, 0}, y = {(const char *)right, 0, 0};
            if (pieces == MAX_PIECES) {
                multiply(&sums, &x, &y, 1, MAX_PIECES, true);
                continue;
            }
            for (int m = 0; m < pieces * MAX_PIECES; m++) {
                x.base = (const char *)left[m / MAX_PIECES];
                y.base = (const char *)right[m % MAX_PIECES];
                multiply(&sums, &x, &y, 1, 1, true);
            }
        }
        for (int r = 0; r < 16 && first + r < a->count; r++)
            out[first + r] = isfinite(c[17 * r]) ? c[17 * r] : fa_dot_of_nonzero(a, b, first + r);
    }
}

enum { DOTS_AT_ONCE = 64 };

/* Of the 16 x 16 products of so many rows from `first` on. */
static void diagonals(float *out, const fa_rows *a, const fa_rows *b, int first, const float *c)
{
    for (int r = 0; r < DOTS_AT_ONCE && first + r < a->count; r++) {
        float sum      = c[r / 16 * FA_AMX_TILE_FLOATS + 17 * (r % 16)];
        out[first + r] = isfinite(sum) ? sum : fa_dot_of_nonzero(a, b, first + r);
    }
}

/* row_dots_pieces of three pieces, with b as packed for dP: only a is cut, and four tiles of rows go side by side. */
FA_AMX_INLINE void packed_row_dots(float *out, const fa_rows *a, const fa_rows *b, const void *packed)
{
    enum { ROWS = DOTS_AT_ONCE };
    int         depth = fa_tiles_of(b->cols, 32);
    const char *keys  = (const char *)packed + depth * layout_by_columns(b->count, MAX_PIECES).columns;
    for (int first = 0; first < a->count; first += ROWS) {
        _Alignas(64) __m512i left[4][MAX_PIECES][16];
        _Alignas(64) float   c[4][FA_AMX_TILE_FLOATS];
        int                  tiles = fa_min_int(4, fa_tiles_of(a->count - first, 16));
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int step = 0; step < depth; step++) {
            for (int t = 0; t < tiles; t++)
                load_pairs(left[t], a, first + 16 * t, 32 * step, MAX_PIECES);
            for (int n = 0; n < fa_amx_num_products[MAX_PIECES]; n++) {
                fa_amx_product x     = fa_amx_products[MAX_PIECES][n];
                int64_t        next  = (int64_t)depth * MAX_PIECES * FA_AMX_TILE;
                const char    *right = keys + first / 16 * next + (step * MAX_PIECES + x.left) * FA_AMX_TILE;
#define DOT_ROWS(t, l, r)                                                                                              \
    if (t < tiles) {                                                                                                   \
        TILE_LOAD(l, left[t][x.right], 64);                                                                            \
        TILE_LOAD(r, right + t * next, 64);                                                                            \
        TILE_DOT(t, l, r);                                                                                             \
    }
                DOT_ROWS(0, 4, 5)
                DOT_ROWS(1, 6, 7)
                DOT_ROWS(2, 4, 5)
                DOT_ROWS(3, 6, 7)
#undef DOT_ROWS
            }
        }
        TILE_STORE(0, c[0], 64);
        TILE_STORE(1, c[1], 64);
        TILE_STORE(2, c[2], 64);
        TILE_STORE(3, c[3], 64);
        diagonals(out, a, b, first, c[0]);
    }
}

/* The same of one piece; a is bfloat16. */
static void packed_row_dots_of_one(float *out, const fa_rows *a, const fa_rows *b, const void *packed)
{
    int         depth = fa_tiles_of(b->cols, 32);
    const char *keys  = (const char *)packed + depth * layout_by_columns(b->count, 1).columns;
    for (int first = 0; first < a->count; first += DOTS_AT_ONCE) {
        _Alignas(64) float c[4][FA_AMX_TILE_FLOATS];
        for (int t = 0; t < fa_tiles_of(fa_min_int(a->count - first, DOTS_AT_ONCE), 16); t++) {
            const int at = first + 16 * t;
            TILE_ZERO(0);
            for (int step = 0; step < depth; step++) {
                _Alignas(64) __m512i left[MAX_PIECES][16];
                if (a->stride == 1 && 32 * step + 32 <= a->cols && fa_amx_rows_exist(a, at, 16)) {
                    fa_amx_prefetch_rows(a, at, 16, 32 * step);
                    fa_amx_copy_tile((char *)left[0], a->row + at, 32 * step);
                } else {
                    load_pairs(left, a, at, 32 * step, 1);
                }
                TILE_LOAD(4, left[0], 64);
                TILE_LOAD(5, keys + ((int64_t)(at / 16) * depth + step) * FA_AMX_TILE, 64);
                TILE_DOT(0, 4, 5);
            }
            TILE_STORE(0, c[t], 64);
        }
        diagonals(out, a, b, first, c[0]);
    }
}

#endif
