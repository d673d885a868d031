/* forward_sm90.cu: from a tile's dot products to what its softmax takes, in units of unit_of (softcap, bias, ALiBi), and -inf where the mask hides. */
#ifndef FA_SCORES_SM90_CUH
#define FA_SCORES_SM90_CUH

#include "warpgroup.cuh"
#include "work_sm90.cuh"

/* 1 + exp2(x), no larger than 2^30 or so; NaN stays. */
FA_DEVICE float one_and_power(float x)
{
    return 1.0f + exp2_fast(at_most_30(x));
}

/* Softcap. tanh(x) = 2 / (1 + exp(-2 x)) - 1, so cap * tanh is 2 cap / (1 + exp(...)) but for a constant, which only LSE has to know
 * (store_result). Four neighbours of a row share a reciprocal. */
FA_DEVICE void cap_scores(float (&s)[S_COUNT], float slope_log2)
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n += n % 4 == 0 ? 2 : 6) { /* row h of columns 16 j ...: n, n + 1, n + 4, n + 5 */
        float a = one_and_power(s[n] * slope_log2), b = one_and_power(s[n + 1] * slope_log2);
        float c = one_and_power(s[n + 4] * slope_log2), d = one_and_power(s[n + 5] * slope_log2);
        reciprocals(a, b, c, d);
        s[n]     = a;
        s[n + 1] = b;
        s[n + 4] = c;
        s[n + 5] = d;
    }
}

/* The first of this thread's columns in step `step` of its rows' walk. */
FA_DEVICE int first_column(const work &w, int step) { return tile_of(w, step) * FA_TILE_K + threadIdx.x % 4 * 2; }

#if FA_HAS_BIAS && FA_DTYPE != FA_F32 /* which has it from memory (forward_f32_sm90.cu) */
/* In 16 bits a thread's elements of S lie as ldmatrix hands them out. tile: of keys, counted since the kernel began. */
FA_DEVICE void add_bias(const fa_args &args, float (&s)[S_COUNT], int group, unsigned tile)
{
    float    factor = args.bias_factor;
    unsigned from = bias_tile(tile);
    barrier_wait(bias_full(tile), filled<BIAS_STAGES>(tile));
#pragma unroll
    for (int j = 0; j < FA_TILE_K / 8; j += 2) {
        if constexpr (F32_BIAS) {
#pragma unroll
            for (int n = 4 * j; n < 4 * j + 8; n += 2) {
                float2 two = shared_load_float2(bias_float_at(args, from, 64 * group + fragment_row() + n / 2 % 2 * 8, n / 4 * 8 + threadIdx.x % 4 * 2));
                s[n] += two.x * factor;
                s[n + 1] += two.y * factor;
            }
        } else {
            unsigned four[4];
            load_matrix(four, bias_at(args, from, 64 * group + threadIdx.x % 128 / 32 * 16, j));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 two = unpack<FA_DTYPE_BIAS>(four[i]);
                s[4 * j + 2 * i] += two.x * factor;
                s[4 * j + 2 * i + 1] += two.y * factor;
            }
        }
    }
    release(bias_empty(tile));
}
#endif

/* ALiBi: less slope * |distance from the diagonal|. */
FA_DEVICE void add_alibi(const work &w, float (&s)[S_COUNT], int group, int step)
{
#if FA_HAS_ALIBI
    float slope = w.slope;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float distance = (float)(w.first_row + 64 * group + fragment_row() + 8 * h + w.seq.diagonal - first_column(w, step));
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                s[4 * j + 2 * h + e] -= slope * fabsf(distance - (float)(8 * j + e));
    }
#endif
}

/* Visible columns as bits, of which seven at once become predicates: half of the instructions. Two blocks a multiprocessor have no registers for it, nor has dropout. */
constexpr bool MASK_BY_BITS = FA_MIN_BLOCKS == 1 && FA_TILE_K <= 128 && !FA_HAS_DROPOUT && !FA_HAS_BIAS;

/* What this thread sees of step `step` under a block mask, if it is one: asked for before S is waited for. */
FA_DEVICE seen_words seen_of_step(const fa_args &args, const work &w, int group, int step, bool masked)
{
#if FA_MASK == FA_MASK_LISTED
    if (masked)
        return load_seen<FA_TILE_Q>(args, w.list[step].mask, 64 * group + fragment_row());
#endif
    return {};
}

/* S of keys that a row does not see becomes -inf. */
FA_DEVICE void mask_scores(const fa_args &args, const work &w, float (&s)[S_COUNT], int group, int step, const seen_words &words)
{
    if constexpr (LISTED) {
#pragma unroll
        for (int n = 0; n < S_COUNT; n++)
            if (!sees(words, n))
                s[n] = -infinity();
        return;
    }
    int col = first_column(w, step);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, query_of(args, w.first_row + 64 * group + fragment_row() + 8 * h));
        int        first = limits.first - col, last = limits.last - col;
        unsigned   seen = MASK_BY_BITS ? columns_below<FA_TILE_K>(last + 1) & ~columns_below<FA_TILE_K>(first) : 0;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (MASK_BY_BITS ? !(seen >> (2 * j + e) & 1) : 8 * j + e > last || 8 * j + e < first)
                    s[4 * j + 2 * h + e] = -infinity();
    }
}

/* Under a softcap keys are hidden twice: first for their neighbours, or a NaN of theirs would reach these. tile: of keys, counted since the kernel began. */
FA_DEVICE void finish_scores(const fa_args &args, const work &w, float (&s)[S_COUNT], int group, int step, bool masked, unsigned tile, const seen_words &words)
{
    if constexpr (FA_HAS_SOFTCAP) {
        if (masked)
            mask_scores(args, w, s, group, step, words);
        cap_scores(s, args.cap_slope);
    }
#if FA_HAS_BIAS && FA_DTYPE != FA_F32
    add_bias(args, s, group, tile);
#endif
    if constexpr (FA_HAS_ALIBI)
        add_alibi(w, s, group, step);
    if (masked)
        mask_scores(args, w, s, group, step, words);
}

#endif
