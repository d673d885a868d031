/*
 * The forward for Hopper of heads above 256 columns, of Q and K, of V or of both, to 512: float16 and bfloat16, any number of queries, without softcap, bias, ALiBi, dropout
 * and block masks. The block of forward_latent_sm90.cu, whose text it shares, with V as a tensor of its own: two slots of K and two of V, and eight panels of each.
 *
 *     warpgroup 0    producer: Q, then K of a tile of 48 keys and V of the tile before, for S of a tile is made while O += P V of the one before is; planner
 *     warpgroup 1    scores: S and P of all 64 rows; gives back a slot of K when S is there
 *     warpgroups 2, 3    values: all 64 rows of O, columns 0-255 and 256-511; P, factors and turns belong to slots of V
 *
 * 64 rows use a tile of K and V, 96 KB, for 1,536 cycles of the tensor cores. Long causal calls have blocks in pairs (FA_VARIANT bit 0), each of which asks for half of
 * what both read; elsewhere one would wait for the other longer than for L2 (decision 0106).
 */
#define FA_BY_LENGTH 1
#include "latent_roles_sm90.cuh"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_wide_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    run(args, maps);
}
