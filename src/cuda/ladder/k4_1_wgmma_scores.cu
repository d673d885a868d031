/*
 * K4.1: K3.2 with S = Q K^T by WGMMA; P V stays on the CUDA cores.
 *
 * A warpgroup of four warps multiplies 64 queries with all keys of the tile: one instruction each 16 columns of head_dim, both
 * operands read from shared memory in the layout in which TMA put them there. S comes out in WGMMA's layout of registers
 * (two neighbours of every eight columns a thread), takes a turn through shared memory into the rows and columns of
 * ladder_fma.cuh, and goes on from there.
 *
 * What it shows: half of the arithmetic is almost free now, so the time is that of the other half and of the detour.
 */
#include "ladder_ring.cuh"

/* s = Q K^T for this thread's rows and keys; `turn` is P's place. q: this warpgroup's 64 rows. */
FA_DEVICE void scores_by_wgmma(float (&s)[ROWS][KEYS], unsigned q, unsigned k, float *turn)
{
    float c[FA_TILE_K / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 16; step++)
        wgmma_shared(c, matrix_of(q + step / 4 * (FA_TILE_Q * 128) + step % 4 * 32, 0),
                     matrix_of(k + step / 4 * (FA_TILE_K * 128) + step % 4 * 32, 0), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(c);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < FA_TILE_K / 8; n++) {
        float *low = turn + row * P_STRIDE + 8 * n + lane % 4 * 2;
        *(float2 *)low                    = make_float2(c[4 * n], c[4 * n + 1]);
        *(float2 *)(low + 8 * P_STRIDE) = make_float2(c[4 * n + 2], c[4 * n + 3]);
    }
    __syncwarp(); /* the 16 rows are this warp's in both layouts */
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int n = 0; n < KEYS; n++)
            s[r][n] = turn[own_row(r) * P_STRIDE + threadIdx.x % 16 + 16 * n];
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    k4_1_wgmma_scores(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    unsigned   at = shared_address(shared), own_q = at + threadIdx.x / 128 * (64 * 128);
    float     *p  = (float *)(shared + P_AT);
    block_work w  = block_work_of(args);
    fma_state  state;
    clear(state);
    start_ring(maps, w, at);
    for (int n = 0; n < w.tiles; n++) {
        int   stage = n % FA_STAGES, tile = w.tiles - 1 - n, k = Q_BYTES + stage * 2 * KV_BYTES;
        float s[ROWS][KEYS];
        wait_for_step(at, n);
        scores_by_wgmma(s, own_q, at + k, p);
        softmax_step(args, state, s, p, w.first_q, tile * FA_TILE_K, tile >= w.clean);
        accumulate_by_fma(state.o, p, shared + k + KV_BYTES);
        __syncthreads(); /* all have done with this stage */
        if (threadIdx.x == 0 && n + FA_STAGES < w.tiles)
            fetch_step(maps, w, at, n + FA_STAGES);
    }
    store_rows(args, w, state);
}
