/*
 * The softmax of the AMX forward: P of a unit of 32 queries by 32 keys from S as tile stores leave it.
 *
 * The row's shift m is set from the first 32 keys that it sees, MARGIN above their maximum, and kept. No later maximum
 * is taken: what outgrows the margin shows as a sum with bit 30 set (2.0 or more, Inf, NaN), and only then the unit is
 * redone for those rows with a new shift.
 *
 * P of float16 where AMX has it (FA_AMX_FP16) is rounded, its shift lies MARGIN below the maximum, and a sum above
 * MOST_P is what outgrew it.
 *
 * P of one or two pieces of bfloat16 is cut to 8 or 16 bits instead of rounded, after scaling by 1 and 0.72 of the last
 * bit, which takes the mean error to zero and leaves a power of two, as the row's maximum gives, what it is. Three
 * pieces hold all.
 */
#ifndef FA_CPU_AMX_SOFTMAX_H
#define FA_CPU_AMX_SOFTMAX_H

#include "cpu/amx.h"

#include <float.h>

enum { UNIT = 32 };
#ifdef FA_AMX_FP16
/* P fills float16's range: it begins at most at 2^8, is good to 11 bits down to 2^-14, and what is below 2^-25, 33
 * octaves below the row's first maximum, is 0. Its sums, in float32, are of P before it is rounded. */
enum { MARGIN = -8 };
#define MOST_P 65504.0f
#else
enum { MARGIN = 8 };
#endif

/* A row whose shift is this large or larger is far: half of its last place may be more octaves than a float has, and
 * what a multiply-add leaves of the largest score with it. */
#define FAR 0x1p28f

/* m: a row's; -inf: it has none yet. */
static bool is_far(float m) { return m != -INFINITY && fabsf(m) >= FAR; }

/* 1 + 0.72 * 2^-8 and 1 + 0.72 * 2^-16, as a logarithm and its inverse, by pieces. */
#ifdef FA_AMX_FP16 /* P is rounded */
static const float cut_log2[2]    = {0, 0};
static const float cut_inverse[2] = {1, 1};
#else
static const float cut_log2[MAX_PIECES + 1]    = {0, 0.00406f, 0x1.09ea84p-16f, 0};
static const float cut_inverse[MAX_PIECES + 1] = {1, 0x1.fe8fa8p-1f, 0x1.fffe8fp-1f, 1};
#endif

/* ---- exp2 ---- */

typedef struct constants {
    __m512  multiplier, magic, table, c0, c1, c2;
    __m512  units; /* amx_fixed.h */
    __m512i bends;
} constants;

/* 2^y is 2^n 2^(i / 16) 2^r, r in [0, 1/16), the middle factor from a table. 2^r: scale ((r + c1)^2 + c0), 4e-7, with
 * scale in the table, or for three pieces 1 + r (c0 + c1 r + c2 r^2), 1e-9. Adding magic leaves 16 y in the low bits.
 */
static constants constants_make(float multiplier, int pieces)
{
    bool   exact = pieces == 3;
    __m512 table = _mm512_setr_ps(0x1p0f, 0x1.0b5586p0f, 0x1.172b84p0f, 0x1.2387a6p0f, 0x1.306fep0f, 0x1.3dea64p0f,
                                  0x1.4bfdaep0f, 0x1.5ab07ep0f, 0x1.6a09e6p0f, 0x1.7a1148p0f, 0x1.8ace54p0f,
                                  0x1.9c4918p0f, 0x1.ae89fap0f, 0x1.c199bep0f, 0x1.d5818ep0f, 0x1.ea4afap0f);
    return (constants){
        .multiplier = _mm512_set1_ps(multiplier),
        .magic      = _mm512_set1_ps(0x1.8p19f),
        .table      = exact ? table : _mm512_mul_ps(table, _mm512_set1_ps(0x1.f6be0p-3f)),
        .c0         = _mm512_set1_ps(exact ? 0x1.62e43ep-1f : 0x1.0a624cp1f),
        .c1         = _mm512_set1_ps(exact ? 0x1.ebe5b8p-3f : 0x1.695cc8p0f),
        .c2         = _mm512_set1_ps(0x1.d03d66p-5f),
    };
}

/* 2^y; y = -inf gives 0. With the multiply-add of exp2_of five operations for the FMA ports (seven with three pieces)
 * and three for port 5 or any: with tiles at work each port is a limit of its own. */
FA_AMX_INLINE __m512 exp2_only(__m512 y, const constants *k, int pieces)
{
    __m512 t    = _mm512_add_round_ps(y, k->magic, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 r    = _mm512_reduce_ps(y, 4 << 4 | _MM_FROUND_TO_NEG_INF); /* y less a multiple of 1/16 */
    __m512 base = _mm512_permutexvar_ps(_mm512_castps_si512(t), k->table);
    if (pieces == 3) {
        __m512 q = _mm512_fmadd_ps(_mm512_fmadd_ps(k->c2, r, k->c1), r, k->c0);
        return _mm512_scalef_ps(_mm512_fmadd_ps(base, _mm512_mul_ps(q, r), base), y);
    }
    r = _mm512_add_ps(r, k->c1);
    return _mm512_scalef_ps(_mm512_mul_ps(base, _mm512_fmadd_ps(r, r, k->c0)), y);
}

/* 2^(s * multiplier + shift) */
FA_AMX_INLINE __m512 exp2_of(__m512 s, __m512 shift, const constants *k, int pieces)
{
    return exp2_only(_mm512_fmadd_ps(s, k->multiplier, shift), k, pieces);
}

/* 2^(s * multiplier - m + bonus), whatever m: of the row's largest score the bonus is left, for m was rounded as this
 * product is. */
static __m512 exp2_far(__m512 s, float m, float bonus, const constants *k, int pieces)
{
    __m512 left = _mm512_sub_ps(_mm512_mul_ps(s, k->multiplier), _mm512_set1_ps(m));
    return exp2_only(_mm512_add_ps(left, _mm512_set1_ps(bonus)), k, pieces);
}

/* ---- rows of a unit ---- */

/* S of a unit: [row tile][key tile] of 16 x 16. */
FA_AMX_INLINE float *scores_row(float *s, int row) { return s + row / 16 * 2 * FA_AMX_TILE_FLOATS + row % 16 * 16; }

typedef struct row_state {
    const float *shift;    /* [32] minus the shift, plus cut_log2; in fixed point plus FIXED_BEGIN; NaN: the row is far */
    const float *sum_from; /* [32][16] sums of P by lane; never in place, for a unit may have to be redone */
    float       *sum_to;
} row_state;

/* 32 values of P as tiles of pieces, each the upper halves of what is left. */
FA_AMX_INLINE void store_pieces(uint16_t *p, __m512 a, __m512 b, int pieces)
{
#ifdef FA_AMX_FP16
    (void)pieces;
    fa_amx_store_halves(p, a, b);
#else
    _Pragma("GCC unroll 3") for (int n = 0; n < pieces; n++)
    {
        _mm512_store_si512(p + n * FA_AMX_TILE_HALVES, fa_amx_pair(a, b));
        a = _mm512_sub_ps(a, fa_amx_cut(a));
        b = _mm512_sub_ps(b, fa_amx_cut(b));
    }
#endif
}

/* check with two rows' sums, or P in fixed point: lanes that outgrew the shift set a bit for good. */
FA_AMX_INLINE __m512i check_rows(__m512i check, __m512i a, __m512i b)
{
#ifdef FA_AMX_FP16 /* the sign of what is left up to MOST_P, also of NaN; or of NaN itself */
    const __m512i most = _mm512_castps_si512(_mm512_set1_ps(MOST_P));
    check              = _mm512_ternarylogic_epi32(check, _mm512_sub_epi32(most, a), _mm512_sub_epi32(most, b), 0xFE);
#endif
    return _mm512_ternarylogic_epi32(check, a, b, 0xFE);
}

/* 32 values of P to row `row` of a unit. p: its two row tiles, p_down apart. Returns what check_rows takes. */
FA_AMX_INLINE __m512i store_row(int row, __m512 a, __m512 b, uint16_t *p, int p_down, const row_state *state,
                                int pieces)
{
    __m512 sum = _mm512_add_ps(a, b);
    store_pieces(p + row / 16 * p_down + row % 16 * 32, a, b, pieces);
    _mm512_store_ps(state->sum_to + 16 * row, _mm512_add_ps(_mm512_load_ps(state->sum_from + 16 * row), sum));
    return _mm512_castps_si512(sum);
}

FA_AMX_INLINE __m512i softmax_row(int row, float *s, uint16_t *p, int p_down, const row_state *state,
                                  const constants *k, int pieces)
{
    const float *at    = scores_row(s, row);
    __m512       shift = _mm512_set1_ps(state->shift[row]);
    __m512       a     = exp2_of(_mm512_load_ps(at), shift, k, pieces);
    __m512       b     = exp2_of(_mm512_load_ps(at + FA_AMX_TILE_FLOATS), shift, k, pieces);
    return store_row(row, a, b, p, p_down, state, pieces);
}

/* The same for a row that is far. */
static __m512i far_row(int row, float *s, uint16_t *p, int p_down, const row_state *state, float m, float bonus,
                       const constants *k, int pieces)
{
    const float *at = scores_row(s, row);
    __m512       a  = exp2_far(_mm512_load_ps(at), m, bonus, k, pieces);
    __m512       b  = exp2_far(_mm512_load_ps(at + FA_AMX_TILE_FLOATS), m, bonus, k, pieces);
    return store_row(row, a, b, p, p_down, state, pieces);
}

FA_AMX_INLINE __m512 joined(__m512 a, __m512 b, bool largest)
{
    return largest ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b);
}

/* Lane n: the sum of x[n][0 .. 15], or the largest, of all rows in the same order. */
FA_AMX_INLINE __m512 fold_rows(const __m512 *x, bool largest)
{
    __m512 v[4];
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) /* four rows in the four lanes, a quarter folded each */
    {
        __m512 a = x[n], b = x[n + 4], c = x[n + 8], d = x[n + 12];
        __m512 ab = joined(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE), largest);
        __m512 cd = joined(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE), largest);
        v[n]      = joined(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD), largest);
    }
    __m512 low  = joined(_mm512_shuffle_ps(v[0], v[1], 0x44), _mm512_shuffle_ps(v[0], v[1], 0xEE), largest);
    __m512 high = joined(_mm512_shuffle_ps(v[2], v[3], 0x44), _mm512_shuffle_ps(v[2], v[3], 0xEE), largest);
    return joined(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD), largest);
}

static __m512 sums_of_rows(const float *x)
{
    __m512 row[16];
    _Pragma("GCC unroll 16") for (int n = 0; n < 16; n++) row[n] = _mm512_load_ps(x + 16 * n);
    return fold_rows(row, false);
}

/* Lane n: the largest of 32 scores of row n, each times multiplier. s: 16 rows of the left tile, then of the right. */
static __m512 largest_of_rows(const float *s, __m512 multiplier)
{
    __m512 row[16];
    _Pragma("GCC unroll 16") for (int n = 0; n < 16; n++)
    {
        row[n] = _mm512_max_ps(_mm512_mul_ps(_mm512_load_ps(s + 16 * n), multiplier),
                               _mm512_mul_ps(_mm512_load_ps(s + FA_AMX_TILE_FLOATS + 16 * n), multiplier));
    }
    return fold_rows(row, true);
}

/* Bit 30 in some lane, or 31 of float16, or 14 or 15 of pairs of P, saturated as they are: the row, or one of the
 * unit's, is to be redone.
 */
FA_AMX_INLINE bool outgrew(__m512i check, bool fixed)
{
#ifdef FA_AMX_FP16
    (void)fixed;
    return _mm512_movepi32_mask(check) != 0;
#endif
    return _mm512_test_epi32_mask(check, _mm512_set1_epi32(fixed ? (int)0xC000C000 : 0x40000000)) != 0;
}

static void scale_row(float *x, int n, __m512 factor)
{
    for (int col = 0; col < n; col += 16)
        _mm512_storeu_ps(x + col, _mm512_mul_ps(_mm512_loadu_ps(x + col), factor));
}

/* 32 values of P, times factor. */
FA_AMX_INLINE void scale_p(uint16_t *p, __m512 factor, int pieces)
{
#ifdef FA_AMX_FP16
    __m512 a = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)p));
    __m512 b = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)p + 1));
#else
    __m512i high = _mm512_set1_epi32((int)0xFFFF0000);
    __m512  a = _mm512_setzero_ps(), b = a;
    for (int n = pieces - 1; n >= 0; n--) {
        __m512i bits = _mm512_load_si512(p + n * FA_AMX_TILE_HALVES);
        a            = _mm512_add_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        b            = _mm512_add_ps(b, _mm512_castsi512_ps(_mm512_and_si512(bits, high)));
    }
#endif
    store_pieces(p, _mm512_mul_ps(a, factor), _mm512_mul_ps(b, factor), pieces);
}

#endif
