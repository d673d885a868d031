/*
 * Both products by WGMMA: a warpgroup owns 64 rows of the tile of queries, and everything of a row lies in the four neighbouring
 * lanes of one warp. Thread 32 w + 4 g + t holds of S, P and O the rows 16 w + g + 8 h (h = 0, 1) and the columns
 * 8 j + 2 t + e (e = 0, 1), in element 4 j + 2 h + e. As this is also the layout in which WGMMA takes its left operand from
 * registers, P never leaves them: two neighbours of S become one register of P.
 *
 * FP8's left operand has another layout, lane t's columns being 4 t ... 4 t + 3: there position 4 t + 2 n + e of 16 keys holds key 8 n + 2 t + e,
 * in P by taking it for that and in V because values_sm90.cuh has put the keys into that order.
 */
#ifndef FA_WARPGROUP_CUH
#define FA_WARPGROUP_CUH

#include "fragment_sm90.cuh"

constexpr bool FP8 = FA_DTYPE == FA_F8E4M3;
constexpr int  S_COUNT = FA_TILE_K / 2, O_COUNT = FA_HEAD_DIM_V / 2, P_STEPS = FA_TILE_K * ELEMENT_BYTES / 32; /* of a thread; 32 bytes of keys a step */

/* ---- the two products: started here, finished by wgmma_wait ---- */

/* s = Q K^T. q: this warpgroup's rows of the tile of FA_TILE_Q; k: the tile. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], unsigned q, unsigned k) { start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, q, k); }

/* o += P V, or without `add` o = P V. */
FA_DEVICE void start_output(float (&o)[O_COUNT], unsigned (&p)[P_STEPS][4], unsigned v, bool add)
{
    constexpr int PANEL = FP8 ? 64 : 128, STEPS = FP8 ? PANEL / 32 : P_STEPS, APART = FP8 ? 32 : 2048; /* FP8: V^T */
    matrix b = matrix_of<PANEL>(v, FP8 ? 0 : FA_TILE_K * 128);
    hold(o);
    hold(p);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_registers(o, p[step], b.from(step / STEPS * (FA_HEAD_DIM_V * PANEL) + step % STEPS * APART), step > 0 || add);
    wgmma_commit();
}

FA_DEVICE void pack_p(unsigned (&p)[P_STEPS][4], const float (&s)[S_COUNT])
{
    if constexpr (FP8) {
#pragma unroll
        for (int n = 0; n < S_COUNT / 4; n++) { /* row n % 2 of 16 keys */
            const float *from = s + n / 2 * 8 + n % 2 * 2;
            p[n / 4][n % 4]   = pack_e4m3(from[0], from[1], from[4], from[5]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < S_COUNT / 2; n++)
            p[n / 4][n % 4] = pack<FA_DTYPE>(s[2 * n], s[2 * n + 1]);
    }
}

FA_DEVICE void scale_output(float (&o)[O_COUNT], const float (&alpha)[2])
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        o[n] *= alpha[n / 2 % 2];
}

#endif
