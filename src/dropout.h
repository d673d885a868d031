/*
 * Which probabilities dropout keeps: the one definition for every backend and both passes. Compiled as C and by NVRTC.
 *
 * Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). One call yields eight 16-bit
 * numbers, one for each of eight elements of S. They are dealt so that a GPU thread's share of a 16x16 block in the
 * tensor cores' accumulator layout (rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9, lane = 4 g + t) comes from
 * one call: element (i, j) takes number (i/8 % 2) + 2 (j % 2) + 4 (j/8 % 2) of the call for
 *     counter = { j / 16, (i / 16) * 32 + lane, batch * heads_q + head, offset low }, key = seed ^ (offset high << 32).
 * An element is dropped iff its number is below threshold = p * 65536.
 */
#ifndef FA_DROPOUT_H
#define FA_DROPOUT_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
typedef unsigned int       fa_u32;
typedef unsigned long long fa_u64;
#define FA_DROPOUT_INLINE static __device__ __forceinline__
#else
#include <stdint.h>
typedef uint32_t fa_u32;
typedef uint64_t fa_u64;
#define FA_DROPOUT_INLINE static inline
#endif

/* Philox4x32's factors, and by what its keys grow from round to round. */
#define FA_PHILOX_FACTOR_0 0xD2511F53u
#define FA_PHILOX_FACTOR_1 0xCD9E8D57u
#define FA_PHILOX_STEP_0 0x9E3779B9u
#define FA_PHILOX_STEP_1 0xBB67AE85u

typedef struct fa_philox {
    fa_u32 word[4];
} fa_philox;

FA_DROPOUT_INLINE fa_philox fa_philox4x32_10(fa_u32 c0, fa_u32 c1, fa_u32 c2, fa_u32 c3, fa_u32 k0, fa_u32 k1)
{
    for (int round = 0; round < 10; round++) {
        fa_u64 p0 = (fa_u64)FA_PHILOX_FACTOR_0 * c0, p1 = (fa_u64)FA_PHILOX_FACTOR_1 * c2;
        fa_u32 n0 = (fa_u32)(p1 >> 32) ^ c1 ^ k0, n2 = (fa_u32)(p0 >> 32) ^ c3 ^ k1;
        c1 = (fa_u32)p1;
        c3 = (fa_u32)p0;
        c0 = n0;
        c2 = n2;
        k0 += FA_PHILOX_STEP_0;
        k1 += FA_PHILOX_STEP_1;
    }
    fa_philox out = {{c0, c1, c2, c3}};
    return out;
}

typedef struct fa_dropout {
    fa_u32 threshold; /* p * 65536, 1 .. 65535; 0: off */
    fa_u32 seed_low, seed_high, offset_low; /* offset's high half is folded into seed_high */
    float  keep_scale;                      /* 1 / (1 - threshold / 65536) */
} fa_dropout;

/* The eight numbers that lane (0 .. 31) of 16x16 block (row_block, col_block) deals. */
FA_DROPOUT_INLINE fa_philox fa_dropout_block(const fa_dropout *dropout, fa_u32 batch_head, fa_u32 row_block,
                                             fa_u32 col_block, fa_u32 lane)
{
    return fa_philox4x32_10(col_block, row_block * 32u + lane, batch_head, dropout->offset_low, dropout->seed_low,
                            dropout->seed_high);
}

/* Number n (0 .. 7) of a call. Chosen, not indexed: an array indexed at run time would leave a GPU's registers. */
FA_DROPOUT_INLINE fa_u32 fa_dropout_number(fa_philox numbers, int n)
{
    fa_u32 low = n & 2 ? numbers.word[1] : numbers.word[0], high = n & 2 ? numbers.word[3] : numbers.word[2];
    return ((n & 4 ? high : low) >> (16 * (n & 1))) & 0xFFFFu;
}

/* One element, the slow and plain way. */
FA_DROPOUT_INLINE int fa_dropout_keeps(const fa_dropout *dropout, fa_u32 batch_head, int i, int j)
{
    fa_u32    lane    = (fa_u32)((i % 8) * 4 + (j % 8) / 2);
    fa_philox numbers = fa_dropout_block(dropout, batch_head, (fa_u32)i / 16u, (fa_u32)j / 16u, lane);
    int       n       = ((i >> 3) & 1) + 2 * (j & 1) + 4 * ((j >> 3) & 1);
    return fa_dropout_number(numbers, n) >= dropout->threshold;
}

#endif
