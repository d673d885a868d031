/*
 * V in FP8 turned round for Hopper's products, which take both operands with the inner dimension, here keys, along the rows: a block writes one tile's
 * V^T as shared memory is to hold it (panels and swizzle of panels_sm90.cuh), so that one bulk copy brings it. Every 16 keys stand in the order of P's registers
 * (warpgroup.cuh).
 */
#ifndef FA_TURN_SM90_CUH
#define FA_TURN_SM90_CUH

#include "numbers.cuh"

constexpr int ROW_CHUNKS = FA_HEAD_DIM_V / 16, THREADS = 32 * FA_WARPS, PANEL = 64; /* chunks of 16 bytes */
constexpr int KEYS16 = FA_TILE_K / 16, PANEL_CHUNKS = PANEL / 16;

extern "C" __constant__ int fa_shared_bytes = FA_TILE_K * FA_HEAD_DIM_V;
extern __shared__ __align__(16) unsigned char rows[];

/* Where V's rows are put first. Chunks of a row are turned by its group of 16 keys, so that neighbouring groups are read from different banks. */
FA_DEVICE unsigned *word_at(int key, int word)
{
    return (unsigned *)rows + (key * ROW_CHUNKS + (word / 4 + key / 16) % ROW_CHUNKS) * 4 + word % 4;
}

/* Byte n of each of four words: a column of four keys. */
FA_DEVICE unsigned column(const unsigned (&key)[4], int n)
{
    unsigned low = __byte_perm(key[0], key[1], n | (4 + n) << 4), high = __byte_perm(key[2], key[3], n | (4 + n) << 4);
    return __byte_perm(low, high, 0x5410);
}

/* The block's tile from `rows` to memory, after a __syncthreads. */
FA_DEVICE void turn_rows(unsigned char *to)
{
    for (int n = threadIdx.x; n < KEYS16 * FA_HEAD_DIM_V / 4; n += THREADS) { /* 16 keys of four columns; neighbours have neighbouring keys */
        int      group = n % KEYS16, word = n / KEYS16, panel = group / PANEL_CHUNKS, chunk = group % PANEL_CHUNKS;
        unsigned turned[4][4]; /* column, four keys */
#pragma unroll
        for (int t = 0; t < 4; t++) {
            unsigned key[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                key[e] = *word_at(16 * group + 8 * (e / 2) + 2 * t + e % 2, word);
#pragma unroll
            for (int c = 0; c < 4; c++)
                turned[c][t] = column(key, c);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int row = 4 * word + c, swizzle = row / 2 % 4;
            *(uint4 *)(to + panel * (FA_HEAD_DIM_V * PANEL) + row * PANEL + ((chunk ^ swizzle) << 4)) =
                make_uint4(turned[c][0], turned[c][1], turned[c][2], turned[c][3]);
        }
    }
}

#endif
