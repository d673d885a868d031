/* Rows of a warpgroup's accumulator on their way to global memory. */
#ifndef FA_STORE_SM90_CUH
#define FA_STORE_SM90_CUH

#include "fragment_sm90.cuh"

/* O's elements of row h of this thread, 16 bytes a lane. to: row of O, null if it is none; its first `cols` columns are stored. scale 0: zeros, whatever O
 * holds (rows of Q that do not count may be NaN). */
template <int DTYPE, int COLS, int COUNT> FA_DEVICE void store_row(char *to, const float (&o)[COUNT], int h, float scale, int cols)
{
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < COLS / 8; j += DTYPE == FA_F32 ? 1 : 4) {
        if constexpr (DTYPE == FA_F32) {
            if (to && 8 * j + (FA_DTYPE == FA_F32 ? 2 * lane : 0) < cols) /* of 16 bits rows are a multiple of eight */
                *(float2 *)(to + (8 * j + 2 * lane) * 4) =
                    scale == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(o[4 * j + 2 * h] * scale, o[4 * j + 2 * h + 1] * scale);
        } else {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = scale == 0.0f ? 0 : pack<DTYPE>(o[4 * (j + i) + 2 * h] * scale, o[4 * (j + i) + 2 * h + 1] * scale);
            transpose_quad(a);
            if (to && 8 * (j + lane) < cols)
                *(uint4 *)(to + (8 * (j + lane)) * 2) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

#endif
