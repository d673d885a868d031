/*
 * P of bfloat16 in 16-bit fixed point, where no LSE is asked for and no option changes S: 13 instructions for 32 scores
 * in place of 24.
 *
 * A bfloat16's bits, taken as an integer, are 128 (127 + its logarithm to base 2), bent a little inside each octave. So
 * the score in units of 1/256 octave, an integer that saturates at 0 below and at 65535 above, needs a number from a
 * table of 64 by its place in the octave, and half of the sum is P. P errs by 0.00195 (root mean square) where cutting
 * to bfloat16 alone errs by 0.00175; sums are of P as it is multiplied, so that what all keys share cancels.
 *
 * The integer comes from an addition of 2^23, not from a conversion, for those have one port beside tiles. NaN and what
 * is beyond 2^22 units are not for this arithmetic: rows that hold such are odd and take exp2_of or exp2_far. Whether a
 * tile can have any is known from the largest magnitudes of its packed Q and K.
 */
#ifndef FA_CPU_AMX_FIXED_H
#define FA_CPU_AMX_FIXED_H

#include "cpu/amx_softmax.h"

#define FIXED_UNITS 256.0f /* an octave */
#define FIXED_MOST 0x1p22f
/* P = 1 less LOWERED, which takes the bends above 0 and the table's places to whole ones. */
enum { FIXED_LOWERED = 24, FIXED_ONE = 127 * 256 - FIXED_LOWERED };

/* LOWERED plus 256 (2^f - 1 - f) for the 64 parts of an octave, from f = LOWERED / 256 on: the integers for which the
 * logarithm of P errs least. */
static const uint8_t fixed_bends[64] = {16, 15, 14, 13, 13, 11, 11, 10, 9,  8,  8,  7,  6,  6,  5,  5,
                                        4,  4,  3,  3,  3,  2,  2,  2,  2,  2,  1,  1,  1,  1,  2,  2,
                                        2,  2,  2,  3,  3,  3,  4,  4,  5,  6,  6,  7,  8,  8,  9,  10,
                                        11, 12, 13, 14, 16, 17, 18, 20, 21, 22, 23, 22, 21, 19, 19, 17};

/* A shift that score units can be taken from without rounding. */
static inline __m512 fixed_rounded(__m512 m)
{
    __m512    units = _mm512_mul_ps(m, _mm512_set1_ps(FIXED_UNITS));
    __mmask16 can   = _mm512_cmp_ps_mask(_mm512_abs_ps(units), _mm512_set1_ps(FIXED_MOST), _CMP_LT_OQ);
    __m512    whole = _mm512_roundscale_ps(units, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_mask_mul_ps(m, can, whole, _mm512_set1_ps(1.0f / FIXED_UNITS));
}

/* What is added to score units, less the shift: 2^23 and what stands for P = 1. */
#define FIXED_BEGIN (0x1p23f + (float)FIXED_ONE)

/* Scores of this tile of queries with these keys are finite and within FIXED_MOST / 2 units, whichever they are. */
static inline bool fixed_is_safe(const fa_forward_block *b)
{
    float most = fa_amx_largest(b->q, b->rows, b->head_dim) * fa_amx_largest(b->k, b->keys, b->head_dim);
    return most * (float)b->head_dim * b->multiplier * FIXED_UNITS < FIXED_MOST / 2;
}

/* The row's 32 values, already in the order of the packed V, and their sum. Returns what check_rows takes. */
FA_AMX_INLINE __m512i store_fixed_row(int row, __m512i p_row, uint16_t *p, int p_down, const row_state *state)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    _mm512_store_si512(p + row / 16 * p_down + row % 16 * 32, p_row);
    _mm512_store_ps(state->sum_to + 16 * row,
                    _mm512_dpbf16_ps(_mm512_load_ps(state->sum_from + 16 * row), (__m512bh)p_row, ones));
    return p_row;
}

/* As softmax_row; P of less than 2^-126 is a denormal, which products take for 0. */
FA_AMX_INLINE __m512i fixed_row(int row, float *s, uint16_t *p, int p_down, const row_state *state, const constants *k)
{
    const float  *at    = scores_row(s, row);
    const __m512i zero  = _mm512_castps_si512(_mm512_set1_ps(0x1p23f));
    __m512        shift = _mm512_set1_ps(state->shift[row]);
    __m512        a     = _mm512_fmadd_ps(_mm512_load_ps(at), k->units, shift);
    __m512        b     = _mm512_fmadd_ps(_mm512_load_ps(at + FA_AMX_TILE_FLOATS), k->units, shift);
    __m512i       line  = _mm512_packus_epi32(_mm512_sub_epi32(_mm512_castps_si512(a), zero),
                                              _mm512_sub_epi32(_mm512_castps_si512(b), zero));
    __m512i       bend  = _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(line, 2), k->bends);
    return store_fixed_row(row, _mm512_avg_epu16(line, bend), p, p_down, state);
}

/* NaN, +Inf, or too far from 0: not for fixed_row. */
static bool row_is_odd(const float *at, float m, const constants *k)
{
    const __m512 most = _mm512_set1_ps(FIXED_MOST), least = _mm512_set1_ps(-FIXED_MOST);
    __mmask16    odd = 0;
    for (int t = 0; t < 2; t++) {
        __m512 units = _mm512_mul_ps(_mm512_load_ps(at + t * FA_AMX_TILE_FLOATS), k->units);
        odd |= _mm512_cmp_ps_mask(units, most, _CMP_NLT_UQ);
        odd |= _mm512_cmp_ps_mask(units, least, _CMP_LE_OQ) &
               _mm512_cmp_ps_mask(units, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    }
    return odd || (m != -INFINITY && !(fabsf(m) * FIXED_UNITS < FIXED_MOST));
}

/* A row, odd or not, by its own numbers alone: as fixed_row where that can be. */
static __m512i any_fixed_row(int row, float *s, uint16_t *p, int p_down, const row_state *state, float m,
                             const constants *k)
{
    const float *at = scores_row(s, row);
    if (!row_is_odd(at, m, k))
        return fixed_row(row, s, p, p_down, state, k);
    bool   far   = is_far(m);
    __m512 shift = _mm512_set1_ps(m == -INFINITY ? 0.0f : -m);
    __m512 a = _mm512_load_ps(at), b = _mm512_load_ps(at + FA_AMX_TILE_FLOATS);
    a             = far ? exp2_far(a, m, 0.0f, k, 1) : exp2_of(a, shift, k, 1);
    b             = far ? exp2_far(b, m, 0.0f, k, 1) : exp2_of(b, shift, k, 1);
    __m512i p_row = _mm512_packus_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                                        _mm512_srli_epi32(_mm512_castps_si512(b), 16));
    return store_fixed_row(row, p_row, p, p_down, state);
}

#endif
