/*
 * Split keys: the parts' O and LSE into one (the merge of Algorithm 1's partial results),
 *     LSE = log sum_p exp(LSE_p),    O = sum_p exp(LSE_p - LSE) O_p,
 * with the sink as one more part that has no O. Parts p, p + 8, ... of O make one sum, and the eight sums are added in their order: by
 * one warp, or each by one of its own where parts are many. So bits depend neither on that nor on how many parts are empty.
 */
#include "merge_parts.cuh"

/* The sequence that owns row `row` of entry `entry`: the last one that starts at or before it. */
FA_DEVICE int sequence_of(const fa_args &args, int entry, int row)
{
    if (!args.cu_seqlens_q)
        return entry;
    int low = 0, high = args.batch; /* cu_seqlens_q[low] <= row < cu_seqlens_q[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (args.cu_seqlens_q[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* True if the row belongs to a sequence; counts: it is also one of the queries that count. */
FA_DEVICE bool find_row(const fa_args &args, int entry, int row, bool &counts)
{
    counts = true;
    if (args.cu_seqlens_q && row >= args.cu_seqlens_q[args.batch])
        return false;
    if (args.seqused_q) {
        int b = sequence_of(args, entry, row);
        counts = row - (args.cu_seqlens_q ? args.cu_seqlens_q[b] : 0) < args.seqused_q[b];
    }
    return true;
}

/* The row's LSE, by each warp. */
FA_DEVICE float lse_of_row(const fa_args &args, fa_i64 part_rows, fa_i64 n, float sink)
{
    int   lane = threadIdx.x % 32;
    float maximum = -infinity();
    for (int p = lane; p < args.num_splits; p += 32)
        maximum = fmaxf(maximum, args.lse_partial[p * part_rows + n]); /* passes NaN over; the sum does not */
    return lse_of_lanes<32>(maximum, sink, [&](float shift) {
        float sum = 0.0f;
        for (int p = lane; p < args.num_splits; p += 32)
            sum += expf(args.lse_partial[p * part_rows + n] - shift);
        return sum;
    });
}

/* Two blocks a multiprocessor: 128 registers, in which the compiler spills for 10.0 and 12.0 (160 and 212 bytes). */
constexpr int BLOCKS = FA_ARCH < 100 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, BLOCKS) combine(const __grid_constant__ fa_args args)
{
    __shared__ float4 shared[FA_COMBINE_WARPS][FA_HEAD_DIM_V / 4];
    wait_for_launch_before();
    let_next_launch_begin();
    int    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool   together = args.row_warps > 1;
    fa_i64 tokens = (fa_i64)args.q_entries * args.q_rows, part_rows = tokens * args.heads_q;
    fa_i64 n      = together ? (fa_i64)blockIdx.x : (fa_i64)blockIdx.x * FA_WARPS + warp;
    if (n >= part_rows)
        return;
    int    head  = (int)(n / tokens);
    fa_i64 token = n % tokens;
    int    entry = (int)(token / args.q_rows), row = (int)(token % args.q_rows);
    bool   counts;
    if (!find_row(args, entry, row, counts))
        return;
    float sink = -infinity();
    if (args.sinks.data && counts)
        sink = load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype);
    float  lse = lse_of_row(args, part_rows, n, sink);
    fa_i64 at  = entry * args.o.stride[0] + row * args.o.stride[1] + head * args.o.stride[2];
    auto lse_of = [&](int p) { return args.lse_partial[p * part_rows + n]; };
    if (together) {
        for (int col = lane * 4; col < args.head_dim_v; col += 128) {
            float4 sum[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
            for (int p = warp; p < args.num_splits; p += 4 * FA_COMBINE_WARPS)
                add_parts<4, FA_COMBINE_WARPS>(sum, args, p, part_rows, n, col, lse, lse_of);
            shared[warp][col / 4] = sum[0];
        }
        __syncthreads();
        if (warp > 0)
            return;
    }
    for (int col = lane * 4; col < args.head_dim_v; col += 128) {
        float4 sum[FA_COMBINE_WARPS];
#pragma unroll
        for (int i = 0; i < FA_COMBINE_WARPS; i++)
            sum[i] = together ? shared[i][col / 4] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int p = 0; p < (together ? 0 : args.num_splits); p += FA_COMBINE_WARPS)
            add_parts<FA_COMBINE_WARPS, 1>(sum, args, p, part_rows, n, col, lse, lse_of);
        store_columns(args, at, col, sum_of(sum));
    }
    if (lane == 0 && args.lse.data)
        ((float *)args.lse.data)[entry * args.lse.stride[0] + head * args.lse.stride[1] + row * args.lse.stride[2]] = lse;
}
