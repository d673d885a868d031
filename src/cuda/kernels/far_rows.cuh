/*
 * Rows whose scores lie far from zero. exp2(score * unit - maximum * unit) is one multiply-add, so that the largest score's
 * exponent is what maximum * unit lost by rounding: a factor that all keys share, and no more than 2^16 while the product is
 * below 2^28. From 2^31 on it is more octaves than a float has, and O is NaN. So such rows are computed again with the maximum
 * taken off before the multiplication. Rare, slow, in double, and kept out of the registers of the rest.
 */
#ifndef FA_FAR_ROWS_CUH
#define FA_FAR_ROWS_CUH

#include "softmax.cuh"

/* maximum * unit of such a row. Not +Inf: that is NaN, as it should be. */
FA_DEVICE bool is_far(float top) { return fabsf(top) >= 0x1p28f && finite(top); }

/* In the order of the columns. */
FA_DEVICE double add_eight(double sum, uint4 a, uint4 b)
{
    unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float2 u = unpack<FA_DTYPE>(x[n]), v = unpack<FA_DTYPE>(y[n]);
        sum += (double)u.x * (double)v.x;
        sum += (double)u.y * (double)v.y;
    }
    return sum;
}

/* A row's score with key j, in units of log2; -inf if it does not see the key. */
template <typename WORK> FA_DEVICE double far_score(const fa_args &args, const WORK &w, int head, int i, int j)
{
    if (!sees(args, w.seq, w.slices, i, j))
        return -infinity();
    const fa_element *q = (const fa_element *)args.q.data + w.seq.q_entry * args.q.stride[0] + (w.seq.q_row + i) * args.q.stride[1] + head * args.q.stride[2];
    const fa_element *k = rows_from(args, w, w.k, args.k, j).row(0);
    double            dot = 0.0;
    int               d = 0;
    if constexpr (sizeof(fa_element) == 2) /* a lane has a key: each load is of 32 lines, however few bytes it takes of them */
        if (args.q.stride[3] == 1 && args.k.stride[3] == 1 && ((fa_i64)q | (fa_i64)k) % 16 == 0)
#pragma unroll 1
            for (; d + 8 <= args.head_dim; d += 8)
                dot = add_eight(dot, *(const uint4 *)(q + d), *(const uint4 *)(k + d));
#pragma unroll 1
    for (; d < args.head_dim; d++)
        dot += (double)load_element(q, d * args.q.stride[3], FA_DTYPE) * (double)load_element(k, d * args.k.stride[3], FA_DTYPE);
    if constexpr (!MODIFIED)
        return dot * args.scale_log2 * descale_of_scores(args, w.b, w.kv_head);
    score_terms terms = score_terms_of(args, w.b, head);
    float       capped;
    double      score = FA_HAS_SOFTCAP ? capped_score(args, (float)dot, capped) * FA_LOG2E : dot * args.scale_log2;
    if (FA_HAS_BIAS)
        score += (double)load_element(terms.bias, i * args.bias.stride[2] + j * args.bias.stride[3], FA_DTYPE_BIAS) * FA_LOG2E;
    return score - (double)terms.slope_log2 * abs(i + w.seq.diagonal - j);
}

FA_DEVICE double warp_max(double x)
{
    for (int lane = 16; lane > 0; lane /= 2) {
        double other = __shfl_xor_sync(0xFFFFFFFFu, x, lane);
        x            = other > x ? other : x;
    }
    return x;
}

/* Query i sees key j, of which V is NaN in all columns. */
template <typename WORK> FA_DEVICE bool sees_only_nan(const fa_args &args, const WORK &w, int head, int i, int j)
{
    bool              nan = sees(args, w.seq, w.slices, i, j) && (!FA_HAS_DROPOUT || fa_dropout_keeps(&args.dropout, w.b * args.heads_q + head, i, j));
    const fa_element *v   = rows_from(args, w, w.v, args.v, j).row(0);
#pragma unroll 1
    for (int col = 0; col < args.head_dim_v && nan; col++) {
        float value = load_element(v, col * args.v.stride[3], FA_DTYPE);
        nan         = value != value;
    }
    return nan;
}

/* Query i by one warp: O (unscaled, this lane's columns), the row's largest score and its sum. may_stop: false, and none of these, where it sees a key of which V is NaN in
 * all columns, for then so is O already. It mostly is among the last. */
template <int COLS, typename WORK>
FA_DEVICE bool far_row(const fa_args &args, const WORK &w, int head, int i, double (&o)[COLS], double &peak, double &total, bool may_stop = false)
{
    int lane = threadIdx.x % 32;
    peak     = -infinity();
    for (int last = w.keys.end - 1; last >= w.keys.begin; last -= 32) {
        int j = fa_max_int(last - lane, w.keys.begin);
        if (may_stop && __any_sync(0xFFFFFFFFu, sees_only_nan(args, w, head, i, j)))
            return false;
        double score = far_score(args, w, head, i, j);
        peak         = score > peak ? score : peak;
    }
    peak  = warp_max(peak);
    total = 0.0;
    for (int c = 0; c < COLS; c++)
        o[c] = 0.0;
    for (int first = w.keys.begin; first < w.keys.end; first += 32) {
        int    mine  = first + lane;
        double score = mine < w.keys.end ? far_score(args, w, head, i, mine) : -infinity();
        float  p     = exp2_fast((float)(peak == -infinity() ? score : score - peak)); /* -inf: all of them are, or NaN */
        for (int n = 0; n < 32 && first + n < w.keys.end; n++) {
            int   j = first + n;
            float weight = __shfl_sync(0xFFFFFFFFu, p, n);
            total += weight;
            if (!sees(args, w.seq, w.slices, i, j) ||
                (FA_HAS_DROPOUT && !fa_dropout_keeps(&args.dropout, w.b * args.heads_q + head, i, j)))
                continue;
            const fa_element *v = rows_from(args, w, w.v, args.v, j).row(0);
            for (int c = 0; c < COLS; c++) {
                int col = lane + 32 * c;
                if (col < args.head_dim_v)
                    o[c] += (double)weight * (double)load_element(v, col * args.v.stride[3], FA_DTYPE);
            }
        }
    }
    return true;
}

/* The row with its sink, if there is one: LSE, and what O is to be multiplied by. Scores that are all -inf count as none. */
FA_DEVICE float end_far_row(double peak, double total, float sink_log2, float &lse)
{
    double top    = fmax(peak, (double)sink_log2);
    float  shrink = peak == -infinity() ? 0.0f : exp2_fast((float)(peak - top)), all = (float)total * shrink;
    if (sink_log2 != -infinity())
        all += exp2_fast((float)(sink_log2 - top));
    lse = (float)((top + log2_fast(all)) * FA_LN2);
    return all == 0.0f ? 0.0f : shrink / all;
}

#endif
