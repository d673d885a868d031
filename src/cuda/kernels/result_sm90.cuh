/* Hopper's forwards: what a consumer's 64 rows leave with. */
#ifndef FA_RESULT_SM90_CUH
#define FA_RESULT_SM90_CUH

#include "rare_sm90.cuh"
#include "softmax_sm90.cuh"
#include "store_sm90.cuh"

/* Row h of this thread: its maximum in log2 and its sum. far: a ballot, as in struct far_rows. */
FA_DEVICE row_fold sums_of_row(const fa_args &args, const work &w, const row_state &rows, int h, unsigned &far)
{
    float top = rows.max[h] * unit_of(args, w) - (FA_HAS_SOFTCAP ? 0.5f * args.cap_unit : 0.0f), sum = quad_sum(rows.sum[h]);
    far = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 4 == 1 ? sum != 0.0f : is_far(top) || (rows.lost >> h & 1) || (FP8 && !(unit_of(args, w) > 0.0f)));
    return {top - P_LOG2, sum};
}

/* Stores LSE = m + log l (line 13), or a part's sums as fold.cu wants them. Returns what the row's O is to be multiplied with (line 12), `factor` included: a row that saw nothing has -inf and 0. */
FA_DEVICE float end_of_row(const fa_args &args, const work &w, row_fold sums, row_owner of, float sink_log2, float factor)
{
    bool stores = threadIdx.x % 4 == 0 && of.i < w.seq.rows_q;
#if FA_HAS_SPLIT
    if constexpr (SPLIT) {
        float max = kept_maximum(sums.max, sums.sum);
        if (stores)
            ((float2 *)args.lse_partial)[partial_row(args, w, of)] = make_float2(max, sums.sum);
        return max == -infinity() ? 0.0f : factor;
    }
#endif
    row_end end = end_of_row(sums.max, sums.sum, sink_log2, of.i >= w.seq.seqlen_q);
    if (stores)
        store_lse(args, w, of, end.lse);
    return end.scale * factor;
}

FA_DEVICE float end_of_row(const fa_args &args, const work &w, const row_state &rows, int h, row_owner of, float sink_log2, unsigned &far)
{
    return end_of_row(args, w, sums_of_row(args, w, rows, h, far), of, sink_log2, factor_of_o(args, w));
}

/* O = O / l by threads. */
FA_DEVICE void store_rows(const fa_args &args, const work &w, const float (&o)[O_COUNT], const row_fold (&sums)[2], int group, float factor)
{
    int   first     = w.first_row + 64 * group + fragment_row();
    float sink_log2 = GROUPED ? 0.0f : sink_log2_of(args, w.head);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_owner of    = owner_of(args, w, first + 8 * h);
        float     scale = end_of_row(args, w, sums[h], of, GROUPED ? sink_log2_of(args, of.head) : sink_log2, factor);
        char     *to    = base_of_o(args) + offset_of_o(args, w, of) * (DTYPE_OUT == FA_F32 ? 4 : 2);
        bool      some  = of.i < w.seq.rows_q && !(SPLIT && scale == 0.0f); /* who saw nothing of a part has a maximum that says so */
        store_row<DTYPE_OUT, FA_HEAD_DIM_V>(some ? to : nullptr, o, h, scale, args.head_dim_v);
    }
}

/* The same of an item that has been walked; which of its rows are far. */
FA_DEVICE far_rows store_result(const fa_args &args, const work &w, const float (&o)[O_COUNT], const row_state &rows, int group)
{
    unsigned far[2];
    row_fold sums[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        sums[h] = sums_of_row(args, w, rows, h, far[h]);
    store_rows(args, w, o, sums, group, factor_of_o(args, w));
    return {far[0], far[1]};
}

#endif
