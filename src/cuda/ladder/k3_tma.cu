/*
 * K3.1, K3.2, K3.3: K2 with the loads by TMA, FA_STAGES (1, 2, 5) tiles of K and V in a ring.
 *
 * One thread asks for a whole tile with a single instruction; the copy engine computes the addresses, swizzles the rows,
 * writes zeros past the end and counts the bytes on the stage's mbarrier, on which all threads wait. No register and no
 * instruction of the multiplying threads goes into loads.
 *
 *     stage    0   1   0   1       K3.1: the next tile is asked for when this one has been used, and all wait for it.
 *     loaded   j  j-1 j-2 j-3      K3.2: it arrives during the products of this one.
 *     used         j  j-1 j-2      K3.3: four are under way. What one could not hide, four do not hide better.
 */
#include "ladder_ring.cuh"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    k3_tma(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    unsigned   at = shared_address(shared);
    float     *p  = (float *)(shared + P_AT);
    block_work w  = block_work_of(args);
    fma_state  state;
    clear(state);
    start_ring(maps, w, at);
    for (int n = 0; n < w.tiles; n++) {
        int   stage = n % FA_STAGES, tile = w.tiles - 1 - n;
        char *k = shared + Q_BYTES + stage * 2 * KV_BYTES;
        float s[ROWS][KEYS];
        wait_for_step(at, n);
        scores_by_fma(s, shared, k);
        softmax_step(args, state, s, p, w.first_q, tile * FA_TILE_K, tile >= w.clean);
        accumulate_by_fma(state.o, p, k + KV_BYTES);
        __syncthreads(); /* all have done with this stage */
        if (threadIdx.x == 0 && n + FA_STAGES < w.tiles)
            fetch_step(maps, w, at, n + FA_STAGES);
    }
    store_rows(args, w, state);
}
