/* Hopper's forwards where a block has several parts of a tile's keys: what has been folded of a consumer's 64 rows (fold_parts.cuh), kept while the next part is walked. */
#ifndef FA_FOLD_BLOCK_SM90_CUH
#define FA_FOLD_BLOCK_SM90_CUH

#include "fold_parts.cuh"
#include "warpgroup.cuh"

constexpr int KEPT_THREADS = 2 * FA_TILE_Q; /* a block's consumers. Each has its own places, four floats next to its neighbour's */

FA_DEVICE void keep(float4 *place, const float (&o)[O_COUNT])
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n += 4)
        place[n / 4 * KEPT_THREADS] = make_float4(o[n], o[n + 1], o[n + 2], o[n + 3]);
}

/* What has been kept, and O. */
FA_DEVICE void fold_kept(const float4 *place, float (&o)[O_COUNT], const float (&of_all)[2], const float (&of_part)[2])
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n += 4) {
        float4 all = place[n / 4 * KEPT_THREADS];
        o[n]       = folded(all.x, o[n], of_all[0], of_part[0]);
        o[n + 1]   = folded(all.y, o[n + 1], of_all[0], of_part[0]);
        o[n + 2]   = folded(all.z, o[n + 2], of_all[1], of_part[1]);
        o[n + 3]   = folded(all.w, o[n + 3], of_all[1], of_part[1]);
    }
}

/* A part, or a group, into what has been folded: then max and sum are those of all. */
FA_DEVICE void fold_sums(row_fold (&all)[2], float (&max)[2], float (&sum)[2], float (&of_all)[2], float (&of_part)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        fold_row(all[h], max[h], sum[h], of_all[h], of_part[h]);
        max[h] = all[h].max;
        sum[h] = all[h].sum;
    }
}

#endif
