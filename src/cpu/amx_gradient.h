/*
 * The vector stage of the AMX backward: P and dS of a cell of 32 keys by 32 queries, from S^T and dP^T as tile stores
 * leave them, cut into bfloat16 pieces as the products want them.
 */
#ifndef FA_CPU_AMX_GRADIENT_H
#define FA_CPU_AMX_GRADIENT_H

#include "cpu/amx.h"

/* P = 2^y is made in the integer domain: i = (y - 1) 2^23 rounded, f = its fraction, and the bits of P are i plus those
 * of h(1 + f) = 2 + (2^f - 1 - f), a polynomial. With one piece it is a cubic (1.1e-4) and holds 2^-8 more, half a unit
 * of bfloat16, so that cutting rounds; with two it has degree 4 (3.4e-6), with three 5 (1.7e-7), and h(1) is 2 exactly:
 * P of y = 0 is 1. */
typedef struct exponential {
    __m512  multiplier; /* 2^23 times that of the scores */
    __m512i fraction, one, lowest;
    __m512  c[6];
} exponential;

#define EXPONENT_UNIT 8388608.0f /* 2^23 */
#define LSE_LARGE 65536.0f       /* here y still is right to 2^-7 */

/* float16 is rounded by its conversion and holds what two bfloat16 pieces nearly do. */
FA_AMX_INLINE int exponential_pieces(int pieces)
{
#ifdef FA_AMX_FP16
    return (void)pieces, 2;
#endif
    return pieces;
}

FA_AMX_INLINE exponential exponential_make(float multiplier, int pieces)
{
    static const float c[3][6] = {
        {2.45284304f, -0.51538504f, -0.01274076f, 0.0790857f},
        {0x1.414374p+1f, -0x1.602e4cp-1f, 0x1.553b56p-3f, -0x1.1f20acp-9f, 0x1.bc31d8p-7f},
        {0x1.3fc85p+1f, -0x1.4ae4fap-1f, 0x1.b9c744p-4f, 0x1.3c9a78p-5f, -0x1.a94c9p-12f, 0x1.eca6f2p-10f},
    };
    exponential e   = {_mm512_set1_ps(multiplier * EXPONENT_UNIT),
                       _mm512_set1_epi32(0x7FFFFF),
                       _mm512_set1_epi32(0x3F800000),
                       _mm512_set1_epi32(-127 * (1 << 23)), /* y = -126; below it P is 0 */
                       {{0}}};
    int         row = exponential_pieces(pieces) - 1;
    for (int n = 0; n < 4 + row; n++)
        e.c[n] = _mm512_set1_ps(c[row][n]);
    return e;
}

/* So few pointers that all of them stay in registers, with those of the products that rows stand among. */
typedef struct gradient {
    exponential     e;
    __m512          shift[2], delta[2]; /* of the cell's 2 x 16 queries */
    __m512          dp_scale;           /* float16: dS of P and dP as they are scaled; delta has it too */
    const float    *s;                  /* dP^T is DP_BEHIND_S floats behind */
    uint16_t       *p_t, *ds_t, *ds;    /* first pieces; the others follow. Of the first half: second_half, second_ds */
    const uint32_t *seen;               /* [32] a bit for each query of a key */
    __m512i         limit[2];           /* largest i of each query */
    const uint32_t *kept;               /* likewise, with dropout; NULL: all */
    __m512          keep_scale;
    const float    *slope; /* of the softcap, as s; NULL: none */
} gradient;

enum { DP_BEHIND_S = 2 * 4 * FA_AMX_TILE_FLOATS };

/* P^T, dS^T and dS: tiles from one row of so many tiles to the next. With one piece an odd number, so that the lines
 * which a row of vectors writes lie in all sets of the first-level cache, not in a quarter: they come again every 4
 * tiles. With more, whose tiles are as many times larger, it is no faster. */
FA_AMX_INLINE int pitch(int tiles, int pieces) { return pieces == 1 ? tiles | 1 : tiles; }
FA_AMX_INLINE int skew(int pieces) { return pieces == 1 ? 2 : 0; } /* of dS^T behind P^T, for the same reason */

/* Of a strip, a part of the tile's keys. */
FA_AMX_INLINE int strip_cells(int pieces) { return fa_amx_part_keys(pieces) / 32; }

/* From the first 16 keys of P^T and dS^T to the second, and from the first 16 queries of dS. */
FA_AMX_INLINE int second_half(int pieces) { return pieces * FA_AMX_TILE_HALVES; }
FA_AMX_INLINE int second_ds(int pieces) { return pitch(strip_cells(pieces), pieces) * pieces * FA_AMX_TILE_HALVES; }

/* The largest i of a query. One piece: P is at most 1, but for a rounding, where LSE is so large that y is not to be
 * trusted. More: P is at most 1. */
FA_AMX_INLINE __m512i largest_exponent(__m512 lse, int pieces)
{
    pieces          = exponential_pieces(pieces);
    __m512i   one   = _mm512_set1_epi32(-(int)EXPONENT_UNIT);
    __mmask16 large = _mm512_cmp_ps_mask(_mm512_abs_ps(lse), _mm512_set1_ps(LSE_LARGE), _CMP_GT_OQ);
    return pieces > 1 ? one : _mm512_mask_mov_epi32(_mm512_set1_epi32((int)(-0.9375f * EXPONENT_UNIT)), large, one);
}

/* dP - Delta; float16: with its scale, a power of two, which changes no rounding. */
FA_AMX_INLINE __m512 less_delta(const gradient *g, __m512 dp, int tile)
{
#ifdef FA_AMX_FP16
    return _mm512_fmsub_ps(dp, g->dp_scale, g->delta[tile % 2]);
#endif
    return _mm512_sub_ps(dp, g->delta[tile % 2]);
}

/* 16 queries of one key. special: pairs are masked, LSE is NaN or so large that its rounding counts, or there are
 * options. Where nothing is special both give the same bits. */
FA_AMX_INLINE void gradient_vector(const gradient *g, int tile, int row, bool special, int pieces, __m512 *p,
                                   __m512 *ds)
{
    const exponential *e    = &g->e;
    const int          at   = tile * FA_AMX_TILE_FLOATS + 16 * row;
    __m512             y    = _mm512_fmadd_ps(_mm512_load_ps(g->s + at), e->multiplier, g->shift[tile % 2]);
    __m512i            i    = _mm512_cvtps_epi32(y);
    __mmask16          seen = 0, nan = 0;
    if (special) {
        seen = (__mmask16)(g->seen[row + tile / 2 * 16] >> (tile % 2 * 16));
        nan  = _mm512_mask_cmp_ps_mask(seen, y, y, _CMP_UNORD_Q);
    }
    const int terms = exponential_pieces(pieces);
    if (special || terms > 1)
        i = _mm512_min_epi32(i, g->limit[tile % 2]);
    __m512 m = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(i, e->fraction, e->one, 0xEA)); /* (i & f) | 1.0 */
    __m512 h = e->c[2 + terms];
    _Pragma("GCC unroll 5") for (int n = 1 + terms; n >= 0; n--) h = _mm512_fmadd_ps(h, m, e->c[n]);
    __mmask16 some                                                 = _mm512_cmpgt_epi32_mask(i, e->lowest);
    if (special)
        some = (some & seen) | nan;
    *p = _mm512_castsi512_ps(_mm512_maskz_add_epi32(some, i, _mm512_castps_si512(h)));
    if (special)
        *p = _mm512_mask_mov_ps(*p, nan, y);
    __m512 dp = _mm512_load_ps(g->s + DP_BEHIND_S + at);
    if (special && g->kept) {
        __mmask16 kept = (__mmask16)(g->kept[row + tile / 2 * 16] >> (tile % 2 * 16));
        dp             = _mm512_maskz_mul_ps(kept, dp, g->keep_scale);
        *ds            = _mm512_maskz_mul_ps(some, *p, less_delta(g, dp, tile));
        *p             = _mm512_maskz_mul_ps(kept, *p, g->keep_scale); /* what dV takes */
    } else {
        *ds = _mm512_maskz_mul_ps(some, *p, less_delta(g, dp, tile));
    }
    if (special && g->slope)
        *ds = _mm512_maskz_mul_ps(some, *ds, _mm512_load_ps(g->slope + at));
}

/* fa_amx_pair by one shuffle that replaces lower halves, where that takes a shift and a blend: with one piece fewer
 * operations are faster, with two or three, which wait for port 5 too, slower. */
FA_AMX_INLINE __m512i gradient_pair(__m512 a, __m512 b, int pieces)
{
    const __m512i   upper_down = _mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302);
    const __mmask64 lower      = 0x3333333333333333;
    if (pieces > 1)
        return fa_amx_pair(a, b);
    return _mm512_mask_shuffle_epi8(_mm512_castps_si512(b), lower, _mm512_castps_si512(a), upper_down);
}

/* In fa_amx_fp16_order_of_ds. */
FA_AMX_INLINE __m512i ds_halves(__m512 a, __m512 b)
{
    const __m512i turns = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    return _mm512_permutex2var_epi64(_mm512_castsi256_si512(fa_amx_half(a)), turns,
                                     _mm512_castsi256_si512(fa_amx_half(b)));
}

/* Keys `row` and `row` + 16 of a cell. */
FA_AMX_INLINE void gradient_row(const gradient *g, int row, bool special, int pieces)
{
    __m512 p[4], ds[4];
    _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) gradient_vector(g, t, row, special, pieces, &p[t], &ds[t]);
#ifdef FA_AMX_FP16
    const __m512i a = ds_halves(ds[0], ds[1]), b = ds_halves(ds[2], ds[3]);
    fa_amx_store_halves(g->p_t + 32 * row, p[0], p[1]);
    fa_amx_store_halves(g->p_t + second_half(pieces) + 32 * row, p[2], p[3]);
    _mm512_store_si512(g->ds_t + 32 * row, a);
    _mm512_store_si512(g->ds_t + second_half(pieces) + 32 * row, b);
    _mm512_store_si512(g->ds + 32 * row, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(g->ds + second_ds(pieces) + 32 * row, _mm512_unpackhi_epi16(a, b));
    return;
#endif
    _Pragma("GCC unroll 3") for (int n = 0; n < pieces; n++)
    {
        const int at = n * FA_AMX_TILE_HALVES + 32 * row;
        _mm512_store_si512(g->p_t + at, gradient_pair(p[0], p[1], pieces));
        _mm512_store_si512(g->p_t + second_half(pieces) + at, gradient_pair(p[2], p[3], pieces));
        _mm512_store_si512(g->ds_t + at, gradient_pair(ds[0], ds[1], pieces));
        _mm512_store_si512(g->ds_t + second_half(pieces) + at, gradient_pair(ds[2], ds[3], pieces));
        _mm512_store_si512(g->ds + at, gradient_pair(ds[0], ds[2], pieces));
        _mm512_store_si512(g->ds + second_ds(pieces) + at, gradient_pair(ds[1], ds[3], pieces));
        if (n + 1 == pieces)
            break;
        _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++)
        {
            p[t]  = _mm512_sub_ps(p[t], fa_amx_cut(p[t]));
            ds[t] = _mm512_sub_ps(ds[t], fa_amx_cut(ds[t]));
        }
    }
}

/* A row of one piece, not special, among tile loads: its stores then wait for lines that the loads keep away, so those
 * of the next row are asked for. Two rows ahead is too early, they leave again. */
FA_AMX_INLINE void gradient_row_ahead(const gradient *g, int row)
{
    const int next = 32 * (row + 1);
    for (int half = 0; half < 2; half++) {
        __builtin_prefetch(g->p_t + half * second_half(1) + next, 1);
        __builtin_prefetch(g->ds_t + half * second_half(1) + next, 1);
        __builtin_prefetch(g->ds + half * second_ds(1) + next, 1);
    }
    gradient_row(g, row, false, 1);
}

/* P of a score of -inf is 0 where LSE is NaN too. s, seen: as a cell's gradient has them. */
static __attribute__((noinline)) void hide_minus_infinity(const float *s, uint32_t seen[32])
{
    for (int n = 0; n < 4 * 16; n++) { /* rows of tiles */
        __m512    row  = _mm512_load_ps(s + 16 * n);
        __mmask16 none = _mm512_cmp_ps_mask(row, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        seen[n / 32 * 16 + n % 16] &= ~((uint32_t)none << n / 16 % 2 * 16);
    }
}

/* P of one pair, from its pieces. p_t: of its 16 keys and 32 queries. */
static float p_of(const uint16_t *p_t, int key, int query, int pieces)
{
#ifdef FA_AMX_FP16
    return (void)pieces, fa_float_of_f16(p_t[key * 32 + query]);
#endif
    float p = 0.0f;
    for (int n = pieces - 1; n >= 0; n--)
        p += fa_float_of_bf16(p_t[n * FA_AMX_TILE_HALVES + key * 32 + query % 16 * 2 + query / 16 % 2]);
    return p;
}

#endif
