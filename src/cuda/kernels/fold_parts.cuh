/*
 * Split keys of forward_few_sm90: a row's parts are folded, groups of FA_FOLD_GROUP neighbours by themselves, then the groups, both from the last to the first, the order
 * in which a block walks that has several. So a row has the same bits whether one block has all of its parts, or each block a group or a part, and fold.cu folds
 * what these left in memory. A part, or a group, is its maximum m in log2, its sum l and O = P V, unscaled; of one that saw nothing m is -inf, and O may
 * be anything.
 */
#ifndef FA_FOLD_PARTS_CUH
#define FA_FOLD_PARTS_CUH

#include "softmax.cuh"

/* A part's maximum as it is kept. Of a row all of whose scores are NaN it is -inf too, as if the row had seen nothing, but its sum is NaN. */
FA_DEVICE float kept_maximum(float max, float sum) { return max == -infinity() && !(sum == 0.0f) ? 0.0f : max; }

/* What is kept of a row that has been computed by itself (far_rows.cuh), with O = P V / l. */
FA_DEVICE float2 sums_of_lse(float lse) { return lse == lse ? make_float2(lse * FA_LOG2E, 1.0f) : make_float2(0.0f, lse); }

/* What has been folded. */
struct row_fold {
    float max = -infinity(), sum = 0.0f;
};

/* exp2(x - top), so large that Inf stays Inf; 0 if there is nothing. */
FA_DEVICE float fold_factor(float x, float top) { return x == -infinity() ? 0.0f : fmaxf(exp2_fast(x - top), 1.17549435e-38f); }

/* A part more: what O so far and the part's are multiplied by. */
FA_DEVICE void fold_row(row_fold &all, float max, float sum, float &of_all, float &of_part)
{
    float top = fmaxf(all.max, max);
    of_all    = fold_factor(all.max, top);
    of_part   = fold_factor(max, top);
    all.max   = top;
    all.sum   = fmaf(sum, of_part, all.sum * of_all);
}

FA_DEVICE float folded(float all, float part, float of_all, float of_part) { return fmaf(part, of_part, all * of_all); }

/* Folded with nothing -0 may have become 0: always does here. */
FA_DEVICE float without_sign_of_0(float x) { return x + 0.0f; }

#endif
