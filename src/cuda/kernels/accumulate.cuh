/*
 * Sums over blocks in float workspace: dQ over key tiles, dK and dV over the heads of a group.
 *
 * A lane of an accumulator holds two neighbouring columns of each 8. Two such blocks make 16 columns; stored in the
 * order of the lanes (column 8 u + 2 t + e at place 4 t + 2 u + e) a lane's four floats are neighbours, and Hopper adds
 * four at once. Only backward_convert.cu reads this order back.
 */
#ifndef FA_ACCUMULATE_CUH
#define FA_ACCUMULATE_CUH

#include "numbers.cuh"

/* Where column `col` of a row is kept. */
FA_DEVICE int accumulated_place(int col)
{
    int in16 = col % 16, u = in16 / 8, t = in16 % 8 / 2, e = in16 % 2;
    return col - in16 + 4 * t + 2 * u + e;
}

/* Adds 16 ROWS16 x 8 COLS8 of a warp to rows of `row_floats`: row r at to + r * row_floats, for r < end. `to` is
 * the first of these columns, a multiple of 16. */
template <int ROWS16, int COLS8>
FA_DEVICE void accumulate(float *to, int row_floats, const float (&acc)[ROWS16][COLS8][4], int end)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int    row = m * 16 + h * 8 + g;
            float *at  = to + (fa_i64)row * row_floats + 4 * t;
            if (row < end)
#pragma unroll
                for (int n = 0; n < COLS8; n += 2)
                    reduce_add_4(at + n * 8, acc[m][n][2 * h], acc[m][n][2 * h + 1], acc[m][n + 1][2 * h],
                                 acc[m][n + 1][2 * h + 1]);
        }
}

#endif
