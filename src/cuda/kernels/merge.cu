/*
 * flash_attn_merge: results over disjoint sets of keys into one,
 *     LSE = log sum_n exp(LSE_n),    O = sum_n exp(LSE_n - LSE) O_n.
 * One warp a row. The result may be part 0: every element is read before it is written, by the same lane.
 * Parts without LSE are added up, each with weight 1.
 */
#include "numbers.cuh"

FA_DEVICE float part_lse(const fa_merge_part &part, int b, int h, int i)
{
    return part.lse[b * part.lse_stride[0] + h * part.lse_stride[1] + i * part.lse_stride[2]];
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) merge(const __grid_constant__ fa_merge_args args)
{
    fa_i64 n    = (fa_i64)blockIdx.x * FA_WARPS + threadIdx.x / 32;
    int    lane = threadIdx.x % 32;
    if (n >= (fa_i64)args.batch * args.seqlen_q * args.heads)
        return;
    int i = (int)(n % args.seqlen_q);
    int h = (int)(n / args.seqlen_q % args.heads), b = (int)(n / args.seqlen_q / args.heads);

    /* Each lane holds one part's LSE: FA_MERGE_MAX_PARTS is 32. */
    bool  plain = args.num_parts > 0 && !args.part[0].lse;
    float own   = lane >= args.num_parts ? -infinity() : plain ? 0.0f : part_lse(args.part[lane], b, h, i), maximum = own;
    for (int step = 16; step > 0; step /= 2) /* passes NaN over; the sum below does not */
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    float shift = maximum == -infinity() ? 0.0f : maximum; /* all empty: 0 in place of -inf, or the difference is NaN */
    float sum   = expf(own - shift);
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    float lse    = sum == 0.0f ? -infinity() : shift + logf(sum);
    float weight = own == -infinity() ? 0.0f : plain ? 1.0f : expf(own - lse);

    const fa_view &o = args.result.o;
    for (int first = 0; first < args.head_dim_v; first += 32) {
        int   col   = first + lane;
        float total = 0.0f;
        for (int part = 0; part < args.num_parts; part++) {
            float          w    = __shfl_sync(~0u, weight, part);
            const fa_view &from = args.part[part].o;
            bool           used = __shfl_sync(~0u, own, part) != -infinity(); /* an empty part's O may be anything */
            if (used && col < args.head_dim_v)
                total += w * load_element(from.data,
                                          b * from.stride[0] + i * from.stride[1] + h * from.stride[2] + col * from.stride[3],
                                          from.dtype);
        }
        if (col < args.head_dim_v)
            store_element(o.data, b * o.stride[0] + i * o.stride[1] + h * o.stride[2] + col * o.stride[3], o.dtype, total);
    }
    __syncwarp(); /* part 0's LSE may be the result's */
    if (lane == 0 && args.result.lse)
        args.result.lse[b * args.result.lse_stride[0] + h * args.result.lse_stride[1] + i * args.result.lse_stride[2]] = lse;
}
