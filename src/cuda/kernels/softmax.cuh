/* From dot products to scores (softcap, bias, ALiBi), and the online softmax of a warp's rows. */
#ifndef FA_SOFTMAX_CUH
#define FA_SOFTMAX_CUH

#include "mask.cuh"

/* Scores need work of their own before the maximum; otherwise they stay unscaled dot products and the scale is folded
 * into one multiply-add in front of exp2. */
constexpr bool MODIFIED = FA_HAS_SOFTCAP || FA_HAS_BIAS || FA_HAS_ALIBI;

/* tanh to a few float32 roundings of 1 (tanh.approx has eleven bits, too few for a float32 LSE). */
FA_DEVICE float tanh_accurate(float x)
{
    float ax = fabsf(x), x2 = x * x;
    float e     = exp2_fast(-2.0f * FA_LOG2E * ax); /* in (0, 1]: no overflow */
    float large = copysignf(__fdividef(1.0f - e, 1.0f + e), x);
    float small = x * (1.0f + x2 * (-0.33333333f + x2 * (0.13333333f + x2 * (-0.05396825f + x2 * 0.02186949f))));
    return ax < 0.3f ? small : large;
}

/* What FP8's elements are to be multiplied by; 1 for the other dtypes. */
FA_DEVICE float descale_of(const fa_view &view, int b, int kv_head)
{
    bool has = FA_DTYPE == FA_F8E4M3 && view.data;
    return has ? ((const float *)view.data)[b * view.stride[0] + kv_head * view.stride[1]] : 1.0f;
}

FA_DEVICE float descale_of_scores(const fa_args &args, int b, int kv_head)
{
    return descale_of(args.descale_q, b, kv_head) * descale_of(args.descale_k, b, kv_head);
}

/* One head's additions to the scores. */
struct score_terms {
    const char *bias; /* [i, j] at i * stride[2] + j * stride[3] */
    float       slope_log2, descale; /* of the dot products */
};

FA_DEVICE score_terms score_terms_of(const fa_args &args, int b, int head)
{
    score_terms terms = {nullptr, 0.0f, descale_of_scores(args, b, head / args.group)};
    if (FA_HAS_BIAS)
        terms.bias = (const char *)args.bias.data +
                     (b * args.bias.stride[0] + head * args.bias.stride[1]) * (FA_DTYPE_BIAS == FA_F32 ? 4 : 2);
    if (FA_HAS_ALIBI)
        terms.slope_log2 = ((const float *)args.alibi_slopes.data)[b * args.alibi_slopes.stride[0] +
                                                                   head * args.alibi_slopes.stride[1]] * FA_LOG2E;
    return terms;
}

/* Softcap of a dot product, in units of the score; `capped` is the tanh, for the derivative 1 - tanh^2. */
FA_DEVICE float capped_score(const fa_args &args, float dot, float &capped)
{
    capped = tanh_accurate(dot * args.scale / args.softcap);
    return args.softcap * capped;
}

FA_DEVICE int last_of(int length) { return max(length, 1) - 1; }

/* The bias in units of log2; outside the lengths the last one's, for behind a test each load would wait for the one before. */
FA_DEVICE float bias_of(const fa_args &args, const score_terms &terms, const sequence &s, int i, int j)
{
    if (!FA_HAS_BIAS)
        return 0.0f;
    return load_element(terms.bias, min(i, last_of(s.seqlen_q)) * args.bias.stride[2] + min(j, last_of(s.seqlen_k)) * args.bias.stride[3], FA_DTYPE_BIAS) * FA_LOG2E;
}

/* The score in units of log2, where MODIFIED. */
FA_DEVICE float modified_score(const fa_args &args, const score_terms &terms, const sequence &s, float dot, int i, int j, float bias, float &capped)
{
    dot *= terms.descale;
    float score = FA_HAS_SOFTCAP ? capped_score(args, dot, capped) * FA_LOG2E : dot * args.scale_log2;
    if (FA_HAS_BIAS)
        score += bias;
    if (FA_HAS_ALIBI) {
        int distance = i + s.diagonal - j;
        score -= terms.slope_log2 * (float)(distance < 0 ? -distance : distance);
    }
    return score;
}

/* What a row leaves with (lines 12-13): LSE and the factor of O; -inf and 0 if it saw nothing. top: its maximum in log2. */
struct row_end {
    float lse, scale;
};

FA_DEVICE row_end end_of_row(float top, float total, float sink_log2, bool empty)
{
    float peak = fmaxf(top, sink_log2), shrink = 1.0f;
    if (peak != top) { /* the sink is the largest logit */
        shrink = exp2_fast(top - peak);
        total *= shrink;
    }
    if (sink_log2 != -infinity())
        total += exp2_fast(sink_log2 - peak);
    if (empty || total == 0.0f)
        return {-infinity(), 0.0f};
    return {(peak + log2_fast(total)) * FA_LN2, shrink * reciprocal(total)};
}

/* How far the running maximum may lag behind, in units of log2. While it lags less, P grows up to 2^8, which every
 * format holds with the same relative error, and O need not be scaled again. */
constexpr float MAX_LAG = 8.0f;

/*
 * One step of the online softmax (Algorithm 1, lines 8-10) for ROWS16 blocks of 16 rows.
 *   scores  in: scores; out: P = exp2(unit * (score - maximum))
 *   maximum, sum, o   the rows' state; index 2 * row16 + (lower half); sum is this lane's share
 *   unit    > 0: log2 units of one score
 *   GUARD   a row may have seen nothing yet: its maximum is -inf; subtract 0 instead, or exp2(-inf + inf) is NaN
 * Each row decides by itself when its maximum moves, so that a row's bits depend on nothing but the row.
 */
template <bool GUARD, int ROWS16, int KEYS8, int COLS8>
FA_DEVICE void softmax_step(float (&scores)[ROWS16][KEYS8][4], float (&maximum)[2 * ROWS16], float (&sum)[2 * ROWS16],
                            float (&o)[ROWS16][COLS8][4], float unit)
{
    float rescale[2 * ROWS16];
    bool  moved = false;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float highest = fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < KEYS8; n++)
                highest = fmaxf(highest, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            highest   = quad_max(highest);
            int   r   = 2 * m + h;
            float old = maximum[r];
            bool  far = (highest - old) * unit > MAX_LAG; /* -inf - -inf is NaN: not far */
            maximum[r] = far ? highest : old;
            rescale[r] = far ? exp2_fast((old - highest) * unit) : 1.0f;
            moved |= far;
        }
    if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float factor = rescale[2 * m + h];
                sum[2 * m + h] *= factor;
#pragma unroll
                for (int n = 0; n < COLS8; n++) {
                    o[m][n][2 * h] *= factor;
                    o[m][n][2 * h + 1] *= factor;
                }
            }
    }
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float shift = maximum[2 * m + h] * unit;
            if (GUARD && maximum[2 * m + h] == -infinity())
                shift = 0.0f;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    scores[m][n][e] = exp2_fast(scores[m][n][e] * unit - shift);
                    total += scores[m][n][e];
                }
            sum[2 * m + h] += total;
        }
}

#endif
