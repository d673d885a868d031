/*
 * Split keys: the parts' O and LSE into one (the merge of Algorithm 1's partial results),
 *     LSE = log sum_p exp(LSE_p),    O = sum_p exp(LSE_p - LSE) O_p,
 * with the sink as one more part that has no O. One warp a row of O; parts are added in their order, so the bits do not
 * depend on how many of them are empty.
 */
#include "numbers.cuh"

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

/* Eight blocks a multiprocessor: without a number ptxas spills around its 64-bit division to save registers. */
extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 8) combine(const __grid_constant__ fa_args args)
{
    fa_i64 tokens = (fa_i64)args.q_entries * args.q_rows;
    fa_i64 n      = (fa_i64)blockIdx.x * FA_WARPS + threadIdx.x / 32;
    int    lane   = threadIdx.x % 32;
    if (n >= tokens * args.heads_q)
        return;
    int    head  = (int)(n / tokens);
    fa_i64 token = n % tokens;
    int    entry = (int)(token / args.q_rows), row = (int)(token % args.q_rows);
    bool   counts;
    if (!find_row(args, entry, row, counts))
        return;
    fa_i64 part_rows = tokens * args.heads_q;

    float sink = -infinity(), maximum = -infinity(), sum = 0.0f;
    if (args.sinks.data && counts)
        sink = load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype);
    for (int p = lane; p < args.num_splits; p += 32)
        maximum = fmaxf(maximum, args.lse_partial[p * part_rows + n]); /* passes NaN over; the sum below does not */
    for (int step = 16; step > 0; step /= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    maximum = fmaxf(maximum, sink);
    /* A row that saw nothing has maximum -inf; subtract 0 instead, or exp(-inf + inf) is NaN. */
    float shift = maximum == -infinity() ? 0.0f : maximum;
    for (int p = 0; p < args.num_splits; p++)
        sum += expf(args.lse_partial[p * part_rows + n] - shift);
    sum += expf(sink - shift);
    float lse = sum == 0.0f ? -infinity() : shift + logf(sum);

    fa_i64 at = entry * args.o.stride[0] + row * args.o.stride[1] + head * args.o.stride[2];
    for (int col = lane; col < args.head_dim_v; col += 32) {
        float total = 0.0f;
        for (int p = 0; p < args.num_splits; p++) {
            float own = args.lse_partial[p * part_rows + n];
            if (own != -infinity()) /* an empty part's O may be anything */
                total += expf(own - lse) * args.o_partial[(p * part_rows + n) * FA_HEAD_DIM_V + col];
        }
        store_element(args.o.data, at + col * args.o.stride[3], FA_DTYPE_O, total);
    }
    if (lane == 0 && args.lse.data)
        ((float *)args.lse.data)[entry * args.lse.stride[0] + head * args.lse.stride[1] + row * args.lse.stride[2]] = lse;
}
