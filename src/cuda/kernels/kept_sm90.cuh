/*
 * forward_sm90.cu in FP8: what has been taken out of O, in shared memory, as floats, or beside 256 columns as their upper 24 bits, which leaves room for a
 * third tile of K and of V: the fourth of four floats is in the other three's lowest bytes. Bits that are not there count as half of what they may be.
 * Each thread has its own place, where its neighbour's 16 bytes are next to its own.
 */
#ifndef FA_KEPT_SM90_CUH
#define FA_KEPT_SM90_CUH

#include "fold_block_sm90.cuh"
#include "work_sm90.cuh"

constexpr bool KEPT_24_BITS = FA_HEAD_DIM_V > 128;
constexpr int  KEPT_BYTES = FP8 ? FA_TILE_Q * FA_HEAD_DIM_V * (KEPT_24_BITS ? 3 : 4) : WHOLE ? FA_TILE_Q * FA_HEAD_DIM_V * 4 : 0; /* WHOLE: parts_sm90.cuh */

/* `to` and `from`: the first thread's place. */
FA_DEVICE void store_kept(char *to, const float (&o)[O_COUNT])
{
    if constexpr (!KEPT_24_BITS)
        keep((float4 *)to + (threadIdx.x - 128), o);
    else {
        uint4 *at = (uint4 *)to + (threadIdx.x - 128);
#pragma unroll
        for (int i = 0; i < O_COUNT; i += 16) {
            unsigned word[12];
#pragma unroll
            for (int n = 0; n < 12; n++) {
                const float *four = o + i + n / 3 * 4;
                word[n]           = __byte_perm(__float_as_int(four[n % 3]), __float_as_int(four[3]), 0x3210 | 7 - n % 3);
            }
#pragma unroll
            for (int n = 0; n < 3; n++)
                at[(i / 16 * 3 + n) * KEPT_THREADS] = make_uint4(word[4 * n], word[4 * n + 1], word[4 * n + 2], word[4 * n + 3]);
        }
    }
}

/* o += what was kept, times its row's factor. */
FA_DEVICE void add_kept(float (&o)[O_COUNT], const char *from, const float (&factor)[2])
{
    if constexpr (!KEPT_24_BITS) {
        const float4 *at = (const float4 *)from + (threadIdx.x - 128);
#pragma unroll
        for (int i = 0; i < O_COUNT; i += 4) {
            float4 kept = at[i / 4 * KEPT_THREADS];
            o[i] += kept.x * factor[0];
            o[i + 1] += kept.y * factor[0];
            o[i + 2] += kept.z * factor[1];
            o[i + 3] += kept.w * factor[1];
        }
    } else {
        const uint4 *at = (const uint4 *)from + (threadIdx.x - 128);
#pragma unroll
        for (int i = 0; i < O_COUNT; i += 16) {
            unsigned word[12];
#pragma unroll
            for (int n = 0; n < 3; n++) {
                uint4 four  = at[(i / 16 * 3 + n) * KEPT_THREADS];
                word[4 * n] = four.x, word[4 * n + 1] = four.y, word[4 * n + 2] = four.z, word[4 * n + 3] = four.w;
            }
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const unsigned *three = word + n / 4 * 3;
                unsigned bits = n % 4 < 3 ? three[n % 4] : __byte_perm(__byte_perm(three[0], three[1], 0x0444), three[2], 0x3244);
                o[i + n] += float_of_bits(__byte_perm(bits, 0x80, 0x3214)) * factor[n % 4 / 2];
            }
        }
    }
}

#endif
