/*
 * Split keys: the parts' O and LSE into one (the merge of Algorithm 1's partial results),
 *     LSE = log sum_p exp(LSE_p),    O = sum_p exp(LSE_p - LSE) O_p,
 * with the sink as one more part that has no O. Parts p, p + 8, ... of O make one sum, and the eight sums are added in their order: by
 * one warp, or each by one of its own where parts are many. So bits depend neither on that nor on how many parts are empty.
 */
#include "merge_parts.cuh"
#include "row_owner.cuh"

/* Two blocks a multiprocessor: 128 registers, in which the compiler spills for 10.0 and 12.0 (160 and 212 bytes). */
constexpr int BLOCKS = FA_ARCH < 100 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, BLOCKS) combine(const __grid_constant__ fa_args args)
{
    __shared__ float4 shared[FA_COMBINE_WARPS][FA_HEAD_DIM_V / 4];
    wait_for_launch_before();
    let_next_launch_begin();
    int      lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool     together = args.row_warps > 1;
    unsigned n    = together ? blockIdx.x : blockIdx.x * FA_WARPS + warp + lane / 8 * gridDim.x * FA_WARPS;
    int      tokens = tokens_of_parts(args), head = (int)(n / (unsigned)tokens), token = (int)(n % (unsigned)tokens), entry, row;
    bool     counts = false, mine = head < args.heads_q && find_row(args, token, entry, row, counts);
    if (!together) {
        merge_rows<false>(args, mine, head, token, entry, row, counts);
        return;
    }
    if (!mine)
        return;
    fa_i64 part_rows = (fa_i64)tokens * args.heads_q;
    float  own = lse_of_part(args, part_rows, n, lane % 8, args.num_splits), lse = merged_lse<false>(args, part_rows, n, args.num_splits, own, counts ? sink_of(args, head) : -infinity());
    constexpr int CHUNKS = (FA_HEAD_DIM_V + 127) / 128;
    int           col    = lane * 4;
    if (col < args.head_dim_v) {
        float4 sum[CHUNKS][1] = {};
        for (int p = warp; p < args.num_splits; p += 4 * FA_COMBINE_WARPS) {
            float factor[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                factor[i] = factor_of_part(lse_of_part(args, part_rows, n, p + i * FA_COMBINE_WARPS, args.num_splits), lse);
            add_parts<4, FA_COMBINE_WARPS>(sum, args, p, part_rows, n, col, factor);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (col + 128 * c < args.head_dim_v)
                shared[warp][col / 4 + 32 * c] = sum[c][0];
    }
    __syncthreads();
    for (col = (int)threadIdx.x * 4; col < args.head_dim_v; col += 128 * FA_COMBINE_WARPS) {
        float4 each[FA_COMBINE_WARPS];
#pragma unroll
        for (int i = 0; i < FA_COMBINE_WARPS; i++)
            each[i] = shared[i][col / 4];
        store_columns(args, row_of_o(args, entry, row, head), col, sum_of(each));
    }
    if (threadIdx.x == 0)
        store_merged_lse(args, entry, row, head, lse);
}
