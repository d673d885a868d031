/*
 * forward_sm90.cu: V in FP8, whose products take both operands with the inner dimension, here keys, along the rows. A tile is made of squares of
 * 64 keys by 64 columns, 64 bytes a row with the swizzle of panels_sm90.cuh: all columns of 64 keys, then those of the next. The inspectors turn each square
 * round in its place: V^T of 64 keys is a panel then. 16 keys stand in the order of P's registers (warpgroup.cuh), which is that in which
 * bytes of two matrices of 16 bits, turned round as they are read, come together in a register.
 */
#ifndef FA_VALUES_SM90_CUH
#define FA_VALUES_SM90_CUH

#include "fragment_sm90.cuh"

constexpr int SQUARE = 64, SQUARE_BYTES = SQUARE * SQUARE, SQUARE_COLUMNS = FA_HEAD_DIM_V / SQUARE; /* of a tile */

/* As fetch_tile; a box is a square. */
FA_DEVICE void fetch_values(unsigned tile, const fa_map &map, unsigned barrier, int entry, int head, int first)
{
#pragma unroll
    for (int n = 0; n < FA_TILE_K / SQUARE * SQUARE_COLUMNS; n++)
        tma_load(tile + n * SQUARE_BYTES, map, barrier, n % SQUARE_COLUMNS * SQUARE, first + n / SQUARE_COLUMNS * SQUARE, head, entry);
}

/* The key of a byte of a tile that is not yet turned. */
FA_DEVICE int key_of_byte(int offset) { return offset / (SQUARE_COLUMNS * SQUARE_BYTES) * SQUARE + offset % SQUARE_BYTES / SQUARE; }

/* Two blocks of each of COUNT neighbouring squares. */
template <int COUNT> FA_DEVICE void turn_blocks(unsigned from, unsigned to, unsigned bytes)
{
    unsigned r[COUNT][4];
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        load_matrix_transposed(r[n], from + n * SQUARE_BYTES);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        unsigned turned[4];
#pragma unroll
        for (int m = 0; m < 4; m++)
            turned[m] = __byte_perm(r[n][m / 2 * 2], r[n][m / 2 * 2 + 1], m % 2 ? bytes ^ 0x1111 : bytes);
        store_matrix(to + n * SQUARE_BYTES, turned);
    }
}

/*
 * By two warps, each a half. A square's blocks of 16 by 16 bytes go in pairs: block (i, i ^ k) changes places with its mirror image, those of the
 * diagonal (k = 0) stay where they are; half 0 has k = 0 and 1, half 1 the others. Lane 4 g + t gets keys 2 t and 2 t + 1 of columns 2 g and 2 g + 1, of
 * eight keys in each register. Even columns alone would be written to half of the banks, so lanes 16 and up begin with the odd one.
 */
FA_DEVICE void turn_values(unsigned tile, unsigned half)
{
    constexpr int SQUARES = FA_TILE_K / SQUARE * SQUARE_COLUMNS, AT_ONCE = SQUARES % 4 == 0 ? 4 : SQUARES % 3 == 0 ? 3 : SQUARES;
#pragma unroll 1
    for (unsigned pair = 0; pair < 4; pair++) {
        unsigned lane = threadIdx.x % 32, g = lane % 8, k = 2 * half + pair / 2; /* of the addresses that this lane gives */
        unsigned i    = (lane < 16 ? 0 : k == 0 ? 1 : k) ^ pair % 2 * (2 - half);
        unsigned from = tile + i * 1024 + lane % 16 * 64 + ((i ^ k ^ lane / 2 % 4) << 4);
        unsigned to   = tile + (i ^ k) * 1024 + (2 * g + (g / 4 ^ lane / 8 % 2)) * 64 + ((i ^ g % 4) << 4);
#pragma unroll
        for (int n = 0; n < SQUARES; n += AT_ONCE)
            turn_blocks<AT_ONCE>(from + n * SQUARE_BYTES, to + n * SQUARE_BYTES, lane < 16 ? 0x6420 : 0x7531);
    }
}

#endif
