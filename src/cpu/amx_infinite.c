/*
 * Scores of infinite numbers, float16 and float32 on AMX. A product of numbers is there a sum of products of their
 * pieces, and where one number is infinite the other's pieces make NaN of it: Inf times a piece that is 0, or Inf - Inf
 * where pieces differ in sign. So packing sees whether an operand has such a number, and if Q or K has, scores that are
 * NaN are looked at again. Gradients have no need of it: a dP of Inf or NaN makes dS of either, or of neither where P
 * is 0.
 *
 * Beside an infinite product finite ones count for nothing: the sum of the products that are not finite is the score.
 * Where there are none NaN stays, so that a row's bits do not depend on whether another row or key is infinite.
 */
#include "cpu/amx.h"

enum { INFINITE = 0x18, NOT_FINITE = 0x99 }; /* as VFPCLASSPS has it */

/* ---- packing ---- */

/* Pieces but the first of one number of a left operand or of keys, which is Inf alone. */
static void clear_rests(char *packed, int cols, int r, int col, bool keys, int pieces)
{
    int64_t tile = (int64_t)r / 16 * fa_tiles_of(cols, 32) + col / 32;
    int     at   = keys ? col % 32 / 2 * 64 + r % 16 * 4 + col % 2 * 2 : r % 16 * 64 + col % 32 * 2;
    for (int n = 1; n < pieces; n++)
        memset(packed + (tile * pieces + n) * FA_AMX_TILE + at, 0, 2);
}

void fa_amx_end_pieces(char *end, bool not_finite, char *packed, fa_rows src, bool keys, int pieces)
{
    uint32_t infinite = 0;
    for (int r = 0; not_finite && r < src.count; r++) {
        for (int col = 0; src.row[r] && col < src.cols; col += 16) {
            __m512   x     = fa_amx_load16(src.row[r], src.stride, src.dtype, col, src.cols);
            unsigned found = _mm512_fpclass_ps_mask(x, INFINITE);
            infinite |= found;
            for (; found; found &= found - 1)
                clear_rests(packed, src.cols, r, col + __builtin_ctz(found), keys, pieces);
        }
    }
    memcpy(end, &infinite, sizeof infinite);
}

static bool has_infinite(fa_role role, const void *packed, int rows, int cols, int pieces)
{
    uint32_t infinite;
    memcpy(&infinite, (const char *)packed + fa_amx_bytes(role, rows, cols, pieces) - FA_AMX_END, sizeof infinite);
    return infinite != 0;
}

bool fa_amx_any_infinite(fa_role q_role, const void *q, int rows, fa_role k_role, const void *k, int keys, int depth,
                         int pieces)
{
    return has_infinite(q_role, q, rows, depth, pieces) || has_infinite(k_role, k, keys, depth, pieces);
}

/* ---- scores ---- */

/* Numbers, a row of dwords of two columns, by their first two pieces: infinite, NaN, 0, and above or below 0 as they
 * are. */
FA_AMX_INLINE __m512 numbers_of(__m512i first, __m512i second, int col)
{
    __m128i bits = _mm_cvtsi32_si128(col % 2 ? 0 : 16);
    return _mm512_add_ps(fa_amx_cut(_mm512_castsi512_ps(_mm512_sll_epi32(first, bits))),
                         fa_amx_cut(_mm512_castsi512_ps(_mm512_sll_epi32(second, bits))));
}

/* Up to 16 rows by 16 keys. */
static __attribute__((noinline)) void mend_tile(float *s, int64_t ld, int rows, const char *left, const char *right,
                                                int steps, int pieces)
{
    for (int r = 0; r < rows; r++) {
        __m512    sum = _mm512_loadu_ps(s + r * ld), again = _mm512_setzero_ps();
        __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), found = 0;
        for (int col = 0; nan && col < 32 * steps; col++) {
            int64_t     tile = (int64_t)(col / 32 * pieces) * FA_AMX_TILE;
            const char *at_a = left + tile + 64 * r + col % 32 / 2 * 4, *at_b = right + tile + col % 32 / 2 * 64;
            int32_t     two[2];
            memcpy(two, at_a, sizeof *two);
            memcpy(two + 1, at_a + FA_AMX_TILE, sizeof *two);
            __m512    a   = numbers_of(_mm512_set1_epi32(two[0]), _mm512_set1_epi32(two[1]), col);
            __m512    b   = numbers_of(_mm512_load_si512(at_b), _mm512_load_si512(at_b + FA_AMX_TILE), col);
            __mmask16 odd = _mm512_fpclass_ps_mask(a, NOT_FINITE) | _mm512_fpclass_ps_mask(b, NOT_FINITE);
            again         = _mm512_mask3_fmadd_ps(a, b, again, odd);
            found |= odd;
        }
        _mm512_mask_storeu_ps(s + r * ld, nan & found, again);
    }
}

void fa_amx_mend_unit(float *s, const char *left, int64_t left_down, const char *right, int steps, int pieces)
{
    for (int t = 0; t < 4; t++)
        mend_tile(s + t * FA_AMX_TILE_FLOATS, 16, 16, left + t / 2 * left_down,
                  right + (int64_t)(t % 2 * steps * pieces) * FA_AMX_TILE, steps, pieces);
}

void fa_amx_mend_scores(float *s, int lds, const char *left, const char *right, int rows, int keys, int steps,
                        int pieces)
{
    int64_t row_tile = (int64_t)(steps * pieces) * FA_AMX_TILE;
    for (int row = 0; row < rows; row += 16)
        for (int key = 0; key < keys; key += 16)
            mend_tile(s + (int64_t)row * lds + key, lds, fa_min_int(rows - row, 16), left + row / 16 * row_tile,
                      right + key / 16 * row_tile, steps, pieces);
}
