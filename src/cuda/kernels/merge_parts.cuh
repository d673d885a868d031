/* Split keys: parts of a row's O and LSE into one, by combine.cu or by the blocks of a cluster themselves (forward_sm80.cu). */
#ifndef FA_MERGE_PARTS_CUH
#define FA_MERGE_PARTS_CUH

#include "numbers.cuh"

/* Eight sums in their order. */
FA_DEVICE float4 sum_of(const float4 (&sums)[FA_COMBINE_WARPS])
{
    float4 sum = sums[0];
#pragma unroll
    for (int i = 1; i < FA_COMBINE_WARPS; i++)
        sum = make_float4(sum.x + sums[i].x, sum.y + sums[i].y, sum.z + sums[i].z, sum.w + sums[i].w);
    return sum;
}

/* Parts first, first + STEP, ... of O, columns col to col + 3, each added to its sum. All are asked for before one is used. lse_of(p): a part's. */
template <int COUNT, int STEP, int SUMS, class LSE>
FA_DEVICE void add_parts(float4 (&sums)[SUMS], const fa_args &args, int first, fa_i64 part_rows, fa_i64 n, int col, float lse, const LSE &lse_of)
{
    float  weight[COUNT];
    float4 part[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int p     = first + i * STEP;
        weight[i] = p < args.num_splits ? lse_of(p) : -infinity();
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (weight[i] != -infinity()) /* an empty part's O may be anything */
            part[i] = *(const float4 *)&args.o_partial[((first + i * STEP) * part_rows + n) * FA_HEAD_DIM_V + col];
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float   factor = weight[i] == -infinity() ? 0.0f : expf(weight[i] - lse);
        float4 &sum    = sums[i % SUMS];
        sum = make_float4(sum.x + factor * part[i].x, sum.y + factor * part[i].y, sum.z + factor * part[i].z, sum.w + factor * part[i].w);
    }
}

FA_DEVICE void store_columns(const fa_args &args, fa_i64 at, int col, float4 v)
{
    float each[4] = {v.x, v.y, v.z, v.w};
    if (FA_ALIGNED) {
        store_four(args.o.data, at + col, FA_DTYPE_O, v, 1.0f);
        return;
    }
    for (int c = 0; c < 4; c++)
        if (col + c < args.head_dim_v)
            store_element(args.o.data, at + (col + c) * args.o.stride[3], FA_DTYPE_O, each[c]);
}

/* LSE of a row whose parts are dealt to LANES neighbouring lanes. maximum: of this lane's; sum_from(shift): of its exp(LSE_p - shift). */
template <int LANES, class SUM> FA_DEVICE float lse_of_lanes(float maximum, float sink, const SUM &sum_from)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    maximum = fmaxf(maximum, sink);
    /* A row that saw nothing has maximum -inf; subtract 0 instead, or exp(-inf + inf) is NaN. */
    float shift = maximum == -infinity() ? 0.0f : maximum, sum = sum_from(shift);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    sum += expf(sink - shift);
    return sum == 0.0f ? -infinity() : shift + logf(sum);
}

#endif
