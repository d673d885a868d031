/* V in FP8 turned round for forward_sm90 (turn_sm90.cuh) ahead of it, FA_VARIANT 2: a block a tile. Keys that are nobody's become zeros: P is 0 there, and 0 * NaN is NaN. */
#include "mask.cuh"
#include "turn_sm90.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) values_sm90(const __grid_constant__ fa_args args)
{
    int      tile = blockIdx.x % args.tiles_k, head = blockIdx.x / args.tiles_k % args.heads_k, b = blockIdx.x / args.tiles_k / args.heads_k;
    sequence s    = sequence_at(args, b);
    int      first = tile * FA_TILE_K;
    const fa_element *v = (const fa_element *)args.v.data + s.kv_entry * args.v.stride[0] + s.kv_row * args.v.stride[1] + head * args.v.stride[2];
#pragma unroll 8
    for (int n = threadIdx.x; n < FA_TILE_K * ROW_CHUNKS; n += THREADS) {
        int  key = n / ROW_CHUNKS, chunk = n % ROW_CHUNKS, j = first + key;
        bool valid = j >= s.key_begin && j < s.seqlen_k && 16 * chunk < args.head_dim_v;
        *(uint4 *)word_at(key, 4 * chunk) = valid ? *(const uint4 *)(v + j * args.v.stride[1] + 16 * chunk) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    turn_rows(args.v_turned + (fa_i64)blockIdx.x * (FA_TILE_K * FA_HEAD_DIM_V));
}
