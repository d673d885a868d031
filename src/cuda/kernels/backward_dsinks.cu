/*
 * The gradient of a head's sink. A sink is one more logit without a value, so its dP is 0 and
 *     dsink = sum over queries of P_sink (0 - delta),   P_sink = exp(sink - LSE).
 * One block a head, over all sequences in a fixed order: the same bits every time. FA_VARIANT 1: behind backward_sm90, whose delta lies by tiles.
 */
#include "packed_sm90.cuh"

/* Delta of query i, and LSE in log2 units. */
FA_DEVICE float2 delta_and_lse(const fa_args &args, const sequence &s, int head, int b, int i)
{
#if FA_VARIANT == 1
    int number = head * args.all_tiles_q + first_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, b) + i / FA_TILE_Q;
    const float *lse = args.row_stats + (fa_i64)number * (2 * FA_TILE_Q) + i % FA_TILE_Q;
    return {lse[FA_TILE_Q], lse[0]};
#else
    fa_i64 row = s.q_row + i;
    return {args.delta[((fa_i64)head * args.q_entries + s.q_entry) * args.q_rows + row],
            ((const float *)args.lse.data)[s.q_entry * args.lse.stride[0] + head * args.lse.stride[1] + row * args.lse.stride[2]] * FA_LOG2E};
#endif
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) backward_dsinks(const __grid_constant__ fa_args args)
{
    __shared__ float part[FA_WARPS];
    int              head = blockIdx.x;
    float sink_log2 = load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype) * FA_LOG2E, sum = 0.0f;
    for (int b = 0; b < args.batch; b++) {
        sequence s = sequence_at(args, b);
        for (int i = threadIdx.x; i < s.seqlen_q; i += 32 * FA_WARPS) {
            float2 row = delta_and_lse(args, s, head, b, i);
            if (row.y != -infinity())
                sum -= exp2_fast(sink_log2 - row.y) * row.x;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < FA_WARPS; warp++)
            sum += part[warp];
        ((float *)args.dsinks.data)[head * args.dsinks.stride[1]] = sum;
    }
}
