/* Hopper's forwards: what a consumer's 64 rows leave with. */
#ifndef FA_RESULT_SM90_CUH
#define FA_RESULT_SM90_CUH

#include "rare_sm90.cuh"
#include "softmax_sm90.cuh"
#include "store_sm90.cuh"

/* Stores LSE = m + log l (line 13) of row h of this thread. Returns what its O is to be multiplied with (line 12): rows that saw nothing have -inf and 0. far: a ballot, as in struct far_rows. */
FA_DEVICE float end_of_rows(const fa_args &args, const work &w, const row_state &rows, int h, row_owner of, float sink_log2, unsigned &far)
{
    float   top = rows.max[h] * unit_of(args, w) - (FA_HAS_SOFTCAP ? 0.5f * args.cap_unit : 0.0f);
    float   sum = quad_sum(rows.sum[h]);
    row_end end = end_of_row(top - P_LOG2, sum, sink_log2, of.i >= w.seq.seqlen_q);
    if (threadIdx.x % 4 == 0 && of.i < w.seq.rows_q)
        store_lse(args, w, of, end.lse);
    far = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 4 == 1 ? sum != 0.0f : is_far(top) || (rows.lost >> h & 1) || (FP8 && !(unit_of(args, w) > 0.0f)));
    return end.scale * factor_of_o(args, w);
}

/* O = O / l by threads; which rows are far. */
FA_DEVICE far_rows store_result(const fa_args &args, const work &w, const float (&o)[O_COUNT], const row_state &rows, int group)
{
    int      first = w.first_row + 64 * group + fragment_row();
    float    sink_log2 = GROUPED ? 0.0f : sink_log2_of(args, w.head);
    unsigned far[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_owner of    = owner_of(args, w, first + 8 * h);
        float     scale = end_of_rows(args, w, rows, h, of, GROUPED ? sink_log2_of(args, of.head) : sink_log2, far[h]);
        char     *to    = base_of_o(args) + offset_of_o(args, w, of) * (DTYPE_OUT == FA_F32 ? 4 : 2);
        bool      some  = of.i < w.seq.rows_q && !(SPLIT && scale == 0.0f); /* who saw nothing of a part has an LSE that says so */
        store_row<DTYPE_OUT, FA_HEAD_DIM_V>(some ? to : nullptr, o, h, scale, args.head_dim_v);
    }
    return {far[0], far[1]};
}

#endif
