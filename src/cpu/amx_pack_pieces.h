/*
 * Packing of numbers that are several bfloat16 pieces: how they are cut, and whole rows in both forms that the backward
 * wants at once. amx.c does the rest; both give the same bytes.
 */
#ifndef FA_CPU_AMX_PACK_PIECES_H
#define FA_CPU_AMX_PACK_PIECES_H

#include "cpu/amx_pack.h"

/* What a piece leaves, exact; 0 where x is Inf, NaN where it is NaN. */
FA_AMX_INLINE __m512 rest_of(__m512 x, __m512 piece)
{
    __mmask16 infinite = _mm512_fpclass_ps_mask(x, 0x18);
    return _mm512_maskz_sub_ps((__mmask16)~infinite, x, piece);
}

/* x so that cutting it rounds to nearest, but for what is not finite and what would not be then. */
FA_AMX_INLINE __m512 nearest_of(__m512 x)
{
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
    __mmask16     can       = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x7F7F8000));
    return _mm512_mask_mov_ps(x, can, fa_amx_half_up(x));
}

/* Lane n: a[n] and b[n], each as its pieces of 8 bits: three hold a float32, two a float16, one a bfloat16, or the nearest
 * to a float32 (dO may be one). The first of two is the nearest bfloat16, so that products of the second ones are small: no
 * float16 is too large for it. finite: a and b are taken to be; rests, several pieces: a sum that is NaN then if some were
 * not, or NULL. */
FA_AMX_INLINE void split_pairs(__m512i piece[MAX_PIECES], __m512 a, __m512 b, int pieces, bool finite, __m512 *rests)
{
    _Pragma("GCC unroll 3") for (int n = 0; n < pieces; n++)
    {
        __m512 high_a = a, high_b = b;
        if (pieces == 1) {
            high_a = nearest_of(a);
            high_b = nearest_of(b);
        } else if (pieces == 2 && n == 0) {
            high_a = fa_amx_half_up(a);
            high_b = fa_amx_half_up(b);
        }
        piece[n] = fa_amx_pair(high_a, high_b);
        if (n == 0 && pieces > 1 && finite) {
            a = _mm512_sub_ps(a, fa_amx_cut(high_a));
            b = _mm512_sub_ps(b, fa_amx_cut(high_b));
            if (rests)
                *rests = _mm512_add_ps(*rests, _mm512_add_ps(a, b));
        } else if (n == 0 && pieces > 1) {
            a = rest_of(a, fa_amx_cut(high_a));
            b = rest_of(b, fa_amx_cut(high_b));
        } else if (n + 1 < pieces) {
            a = _mm512_sub_ps(a, fa_amx_cut(a));
            b = _mm512_sub_ps(b, fa_amx_cut(b));
        }
    }
}

/* 16 rows from `first` on by 32 columns, as dwords of two columns. rests: as in split_pairs; not NULL: what is infinite
 * has NaN in its pieces but the first. */
FA_AMX_INLINE void load_pairs_of(__m512i piece[MAX_PIECES][16], const fa_rows *src, int first, int col, int pieces,
                                 __m512 *rests)
{
    /* Lane n takes columns 2n and 2n + 1. */
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd  = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int r = 0; r < 16; r++) {
        const void *row = first + r < src->count ? src->row[first + r] : NULL;
        __m512      lo = _mm512_setzero_ps(), hi = lo;
        if (row) {
            lo = fa_amx_load16(row, src->stride, src->dtype, col, src->cols);
            if (col + 16 < src->cols)
                hi = fa_amx_load16(row, src->stride, src->dtype, col + 16, src->cols);
        }
        __m512i split[MAX_PIECES];
        split_pairs(split, _mm512_permutex2var_ps(lo, even, hi), _mm512_permutex2var_ps(lo, odd, hi), pieces,
                    rests != NULL, rests);
        for (int n = 0; n < pieces; n++)
            piece[n][r] = split[n];
    }
}

FA_AMX_INLINE void load_pairs(__m512i piece[MAX_PIECES][16], const fa_rows *src, int first, int col, int pieces)
{
    load_pairs_of(piece, src, first, col, pieces, NULL);
}

/* 32 rows as keys and as values, at once: values turned are keys but for which halves make a pair. False: some number
 * is not finite, and what was written is not to be used. */
FA_AMX_INLINE bool pack_both_forms(char *keys, char *values, const fa_rows *src, int first, layout at, int pieces)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i       largest   = _mm512_setzero_si512();
    int64_t       row_tile  = (int64_t)fa_tiles_of(src->cols, 32) * pieces * FA_AMX_TILE;
    for (int col = 0; col < src->cols; col += 16) {
        char *out    = values + col / 32 * at.columns + (int64_t)(col % 32 / 16 * pieces) * FA_AMX_TILE;
        char *turned = keys + (int64_t)(col / 32 * pieces) * FA_AMX_TILE + col % 32 / 2 * 64;
        for (int r = 0; r < 16; r++) {
            __m512  a = fa_amx_load16(src->row[first + r], src->stride, src->dtype, col, src->cols);
            __m512  b = fa_amx_load16(src->row[first + r + 16], src->stride, src->dtype, col, src->cols);
            __m512i split[MAX_PIECES];
            largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(a), magnitude));
            largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(b), magnitude));
            split_pairs(split, a, b, pieces, true, NULL);
            for (int n = 0; n < pieces; n++)
                _mm512_store_si512(out + n * FA_AMX_TILE + 64 * r, split[n]);
        }
        for (int n = 0; n < pieces; n++) {
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
            {
                char   *to = turned + n * FA_AMX_TILE + 128 * c;
                __m512i x[4];
                fa_amx_turn_chunks(x, out + n * FA_AMX_TILE, c);
                for (int p = 0; p < 2; p++) {
                    __m512i one = x[2 * p], two = x[2 * p + 1], up = _mm512_slli_epi32(two, 16);
                    _mm512_store_si512(to + 64 * p, _mm512_mask_mov_epi16(one, 0xAAAAAAAA, up));
                    _mm512_store_si512(to + row_tile + 64 * p,
                                       fa_amx_pair(_mm512_castsi512_ps(one), _mm512_castsi512_ps(two)));
                }
            }
        }
    }
    return _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(0x7F800000)) == 0;
}

/* False: not such rows. */
FA_AMX_COPIES bool pack_whole_both(char *keys, char *values, const fa_rows *src, layout at, int pieces, char *end)
{
    int64_t key_rows = 2 * (int64_t)fa_tiles_of(src->cols, 32) * pieces * FA_AMX_TILE;
    bool    whole    = pieces > 1 && src->stride == 1 && src->dtype != FLASH_ATTN_F8E4M3 && src->cols % 32 == 0 &&
                 src->count % 32 == 0 && fa_amx_rows_exist(src, 0, src->count);
    for (int first = 0; whole && first < src->count; first += 32)
        whole = pack_both_forms(keys + first / 32 * key_rows, values + first / 32 * at.rows, src, first, at, pieces);
    if (whole)
        memset(end, 0, sizeof(uint32_t));
    return whole;
}

#endif
