/*
 * K6: K5 with the overlap arranged, between consumers and inside each.
 *
 *     warpgroup 0    producer, as in K5
 *     warpgroup 1..  consumers, 64 queries each, that take turns:
 *
 *         step n:   on this consumer's turn start S' = Q K_n^T, then O += P V_(n-1), and pass the turn on
 *                   when S' is there: softmax of S', while O += P V_(n-1) runs
 *                   when O is there:  scale O, P = S'
 *
 * The turn goes round by named barriers, so that one consumer's softmax falls into the products of another (ping-pong), and
 * inside a consumer the exponentials of one tile fall into the second product of the tile before. The price is a second
 * tile of S in registers.
 */
#include "ladder_pingpong.cuh"

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    k6_pingpong(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    unsigned   at = shared_address(shared);
    block_work w  = block_work_of(args);
    if (threadIdx.x == 0)
        start_barriers(at, 4 * CONSUMERS);
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 3 ? 32 : 24>();
        if (threadIdx.x == 0)
            produce(maps, w, at);
    } else {
        registers_up<CONSUMERS == 3 ? 160 : 240>();
        consume(args, w, at, threadIdx.x / 128 - 1);
    }
}
