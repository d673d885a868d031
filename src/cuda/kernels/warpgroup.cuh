/*
 * Both products by WGMMA: a warpgroup owns 64 rows of the tile of queries, and everything of a row lies in the four neighbouring
 * lanes of one warp. Thread 32 w + 4 g + t holds of S, P and O the rows 16 w + g + 8 h (h = 0, 1) and the columns
 * 8 j + 2 t + e (e = 0, 1), in element 4 j + 2 h + e. As this is also the layout in which WGMMA takes its left operand from
 * registers, P never leaves them: two neighbours of S become one register of P.
 */
#ifndef FA_WARPGROUP_CUH
#define FA_WARPGROUP_CUH

#include "fragment_sm90.cuh"

constexpr int S_COUNT = FA_TILE_K / 2, O_COUNT = FA_HEAD_DIM_V / 2, P_STEPS = FA_TILE_K / 16; /* of a thread; 16 keys a step */

/* ---- the two products: started here, finished by wgmma_wait ---- */

/* s = Q K^T. q: this warpgroup's rows of the tile of FA_TILE_Q; k: the tile. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], unsigned q, unsigned k) { start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, q, k); }

/* o += P V, or without `add` o = P V. */
FA_DEVICE void start_output(float (&o)[O_COUNT], unsigned (&p)[P_STEPS][4], unsigned v, bool add)
{
    matrix b = matrix_of(v, FA_TILE_K * 128);
    hold(o);
    hold(p);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_registers(o, p[step], b.from(step * 2048), step > 0 || add);
    wgmma_commit();
}

FA_DEVICE void pack_p(unsigned (&p)[P_STEPS][4], const float (&s)[S_COUNT])
{
#pragma unroll
    for (int n = 0; n < S_COUNT / 2; n++)
        p[n / 4][n % 4] = pack<FA_DTYPE>(s[2 * n], s[2 * n + 1]);
}

FA_DEVICE void scale_output(float (&o)[O_COUNT], const float (&alpha)[2])
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        o[n] *= alpha[n / 2 % 2];
}

#endif
