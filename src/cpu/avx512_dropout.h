/*
 * The numbers of dropout.h on AVX-512: eight of a block's 32 lanes in a vector, a word in the lower half of each 64
 * bits, where VPMULUDQ takes it and leaves its product; upper halves hold what is left of products. A round of eight
 * lanes is six instructions.
 *
 * Lanes of a block differ in counter 1 alone, which enters a product in round 1, and the other words' products until
 * then, and one of round 2, are the same for all: they are scalars.
 */
#ifndef FA_CPU_AVX512_DROPOUT_H
#define FA_CPU_AVX512_DROPOUT_H

#include "dropout.h"

#include <immintrin.h>

#define FA_AVX512_INLINE static inline __attribute__((always_inline))

/* Of 16 rows: what does not depend on the keys. */
typedef struct fa_dropout_rows {
    __m512i product[4]; /* of word 0 in round 1; four times eight lanes */
    fa_u32  key[10][2]; /* of each round, in memory: from there each is spread over a vector for nothing */
    fa_u32  low;        /* of word 2's product in round 0 */
    fa_u32  offset;
} fa_dropout_rows;

/* Vector v is of lanes first + step * v. */
FA_AVX512_INLINE void fa_dropout_begin_rows(fa_dropout_rows *rows, const fa_dropout *dropout, fa_u32 batch_head,
                                            fa_u32 row_block, __m512i first, int step)
{
    fa_u64 p1    = (fa_u64)FA_PHILOX_FACTOR_1 * batch_head;
    rows->low    = (fa_u32)p1;
    rows->offset = dropout->offset_low;
    for (fa_u32 n = 0; n < 10; n++) {
        rows->key[n][0] = dropout->seed_low + n * FA_PHILOX_STEP_0;
        rows->key[n][1] = dropout->seed_high + n * FA_PHILOX_STEP_1;
    }
    for (int v = 0; v < 4; v++) {
        __m512i lane     = _mm512_add_epi64(first, _mm512_set1_epi64(row_block * 32u + (fa_u32)(step * v)));
        __m512i x        = _mm512_xor_si512(lane, _mm512_set1_epi64((fa_u32)(p1 >> 32) ^ rows->key[0][0]));
        rows->product[v] = _mm512_mul_epu32(x, _mm512_set1_epi64(FA_PHILOX_FACTOR_0));
    }
}

/* Of 16 rows and 16 columns: what is xored to a word in rounds 1 to 3, the key with it. */
typedef struct fa_dropout_block_words {
    fa_u32 word2_of_1, word0_of_2, word2_of_2, word2_of_3;
} fa_dropout_block_words;

FA_AVX512_INLINE fa_dropout_block_words fa_dropout_begin_block(const fa_dropout_rows *rows, fa_u32 col_block)
{
    const fa_u32(*key)[2]        = rows->key;
    fa_u64                 p0    = (fa_u64)FA_PHILOX_FACTOR_0 * col_block;
    fa_u64                 p1    = (fa_u64)FA_PHILOX_FACTOR_1 * ((fa_u32)(p0 >> 32) ^ rows->offset ^ key[0][1]);
    fa_u64                 p2    = (fa_u64)FA_PHILOX_FACTOR_0 * ((fa_u32)(p1 >> 32) ^ rows->low ^ key[1][0]);
    fa_dropout_block_words words = {(fa_u32)p0 ^ key[1][1], (fa_u32)p1 ^ key[2][0], (fa_u32)(p2 >> 32) ^ key[2][1],
                                    (fa_u32)p2 ^ key[3][1]};
    return words;
}

FA_AVX512_INLINE __m512i fa_dropout_xor(__m512i a, __m512i b, fa_u32 c)
{
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi32((int)c), 0x96);
}

/* Numbers of four times eight lanes, vectors v[n] of blocks at[n]: words 0 and 1 of each lane in out[n][0], words 2 and
 * 3 in out[n][1]. */
FA_AVX512_INLINE void fa_dropout_numbers(__m512i out[4][2], const fa_dropout_rows *const rows[4],
                                         const fa_dropout_block_words *const at[4], const int v[4])
{
    const __m512i   m0 = _mm512_set1_epi64(FA_PHILOX_FACTOR_0), m1 = _mm512_set1_epi64(FA_PHILOX_FACTOR_1);
    const __mmask16 lower = 0x5555;
    const fa_u32(*key)[2] = rows[0]->key;
    __m512i x0[4], x1[4], x2[4], x3[4];
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) /* rounds 1 to 3 */
    {
        __m512i p = rows[n]->product[v[n]];
        __m512i y = _mm512_xor_si512(_mm512_srli_epi64(p, 32), _mm512_set1_epi32((int)at[n]->word2_of_1));
        x1[n]     = _mm512_mul_epu32(y, m1);
        x0[n]     = _mm512_xor_si512(_mm512_srli_epi64(x1[n], 32), _mm512_set1_epi32((int)at[n]->word0_of_2));
        x2[n]     = _mm512_xor_si512(p, _mm512_set1_epi32((int)at[n]->word2_of_2));
        x3[n]     = _mm512_mul_epu32(x0[n], m0);
        p         = _mm512_mul_epu32(x2[n], m1);
        x0[n]     = fa_dropout_xor(_mm512_srli_epi64(p, 32), x1[n], key[3][0]);
        x2[n]     = _mm512_xor_si512(_mm512_srli_epi64(x3[n], 32), _mm512_set1_epi32((int)at[n]->word2_of_3));
        x1[n]     = p;
    }
    _Pragma("GCC unroll 5") for (int round = 4; round < 9; round++)
    {
        _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
        {
            __m512i p0 = _mm512_mul_epu32(x0[n], m0), p1 = _mm512_mul_epu32(x2[n], m1);
            x0[n] = fa_dropout_xor(_mm512_srli_epi64(p1, 32), x1[n], key[round][0]);
            x2[n] = fa_dropout_xor(_mm512_srli_epi64(p0, 32), x3[n], key[round][1]);
            x1[n] = p1;
            x3[n] = p0;
        }
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) /* halves change places, and the lower ones are xored */
    {
        __m512i p0 = _mm512_ror_epi64(_mm512_mul_epu32(x0[n], m0), 32);
        __m512i p1 = _mm512_ror_epi64(_mm512_mul_epu32(x2[n], m1), 32);
        out[n][0]  = _mm512_mask_ternarylogic_epi32(p1, lower, x1[n], _mm512_set1_epi32((int)key[9][0]), 0x96);
        out[n][1]  = _mm512_mask_ternarylogic_epi32(p0, lower, x3[n], _mm512_set1_epi32((int)key[9][1]), 0x96);
    }
}

/* What a block's elements are multiplied by: keep_scale or 0. */
static inline void fa_avx512_dropout_factors(float factor[16][16], const fa_dropout *dropout, fa_u32 batch_head,
                                             fa_u32 row_block, fa_u32 col_block)
{
    const __m512i   threshold = _mm512_set1_epi32((int)(dropout->threshold << 16));
    const __m512    keep      = _mm512_set1_ps(dropout->keep_scale);
    fa_dropout_rows rows;
    __m512i         out[4][2];
    fa_dropout_begin_rows(&rows, dropout, batch_head, row_block, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), 8);
    const fa_dropout_block_words words = fa_dropout_begin_block(&rows, col_block);
    fa_dropout_numbers(out, (const fa_dropout_rows *const[4]){&rows, &rows, &rows, &rows},
                       (const fa_dropout_block_words *const[4]){&words, &words, &words, &words},
                       (const int[4]){0, 1, 2, 3});
    _Pragma("GCC unroll 8") for (int g = 0; g < 8; g++) /* rows g, by lower halves, and g + 8 */
    {
        const __m512i *of = out[g / 2];
        __m512i   both    = g % 2 ? _mm512_shuffle_i64x2(of[0], of[1], 0xEE) : _mm512_shuffle_i64x2(of[0], of[1], 0x44);
        __mmask16 low     = _mm512_cmpge_epu32_mask(_mm512_slli_epi32(both, 16), threshold);
        _mm512_storeu_ps(factor[g], _mm512_maskz_mov_ps(low, keep));
        _mm512_storeu_ps(factor[g + 8], _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(both, threshold), keep));
    }
}

#endif
