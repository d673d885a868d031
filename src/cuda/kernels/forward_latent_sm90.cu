/*
 * The forward for Hopper where V is the first columns of K, as in multi-head latent attention (MLA): head_dim to 576, head_dim_v to 512, float16 and
 * bfloat16, any number of queries. Rows of a tile are queries of all heads that share a key head, so K, which is V too, is read once for 64 of them.
 *
 *     warpgroup 0, warp 0   producer: fills three slots by turns by TMA, with a tile of Q and then with its tiles of 48 keys; of keys in pages, which come in
 *                           more boxes, warps 2 and 3 are producers too, and each fetches other rows of a tile
 *                  warp 1   planner: one thread finds this block's items, tiles of rows and parts of their keys, ahead, the first while barriers are set up
 *     warpgroup 1           scores: S and P of all 64 rows; has two thirds of Q in registers, so that memory has room for three slots
 *     warpgroups 2, 3       values: all 64 rows of O, columns 0-255 and 256-511
 *
 * FlashAttention-2's Algorithm 1, by its lines:
 *
 *         scores:      S = Q K^T of tile n + 1 (line 8)     P of n + 1 by softmax (line 9)     S of n + 2 ...
 *         values:      follow the maxima of n               O += P V of n (line 10)            follow those of n + 1 ...
 *
 *                  slot: 9 panels of K, 8 of them V      P, of each slot: 1 panel      Q: 3 panels
 *                        48 x 64 each                    64 x 48                       64 x 64 each
 *
 * So the tensor cores make either S or O += P V, and both warpgroups of the values' take longer for theirs than the scores' for a softmax. Let alone, the tensor
 * cores take products of all three by turns, and S, of which the next P is made, would wait behind O's: that is why values wait for their turn, of which they
 * are told just before S is there. What has grown by a new maximum goes over with P, 64 factors; maxima may lag (softmax.cuh), so that O is hardly ever
 * scaled. The scores' warpgroup goes on with the next item while the values' store O.
 *
 * With FA_VARIANT bit 0 blocks are in pairs (clusters), which have neighbouring tiles of rows and walk the same keys: each asks TMA for every other panel,
 * for both, so that L2 is read half as much (decision 0070). With FA_ONE_LAUNCH the blocks of a cluster are the parts of a tile's keys, each block has one, and they merge
 * their results themselves.
 */
#include "latent_roles_sm90.cuh"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_latent_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    run(args, maps);
}
