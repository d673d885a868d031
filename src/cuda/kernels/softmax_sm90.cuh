/* forward_sm90.cu: the online softmax of a consumer's 64 rows. */
#ifndef FA_SOFTMAX_SM90_CUH
#define FA_SOFTMAX_SM90_CUH

#include "softmax.cuh"
#include "warpgroup.cuh"

/* P is 2^P_LOG2 times as large: in float32 so that float16 holds its second half; with FP8 up to 2^(P_LOG2 + P_LAG), below its largest, 448 = 2^8.8. A smaller lag moves a row of some warp in nearly each step. */
constexpr float P_LOG2 = FP8 || FA_DTYPE == FA_F32 ? 6.0f : 0.0f, P_LAG = FP8 ? 2.75f : MAX_LAG;

struct row_state {
    float    max[2], sum[2]; /* of dot products; this thread's part of the sum of exponentials. Of rows h = 0, 1 */
    unsigned lost;           /* bit h: softmax_ahead could not follow the maximum */
};

/* The first half of line 9: the row's maximum. It may lag behind (softmax.cuh), so lanes tell each other theirs only where one has moved too far: true then,
 * and alpha is what O has to be multiplied with. A row that has not moved keeps its bits, whatever the warp's others do. */
FA_DEVICE bool move_rows(const float (&s)[S_COUNT], row_state &rows, float (&alpha)[2], float unit)
{
    float highest[2]; /* of this lane */
    bool  far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        highest[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
        for (int j = 1; j < FA_TILE_K / 8; j++)
            highest[h] = fmaxf(highest[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        far |= (highest[h] - rows.max[h]) * unit > P_LAG; /* -inf - -inf is NaN: not far */
        alpha[h] = 1.0f;
    }
    bool moved = __any_sync(0xFFFFFFFFu, far);
    if (moved) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = quad_max(highest[h]), old = rows.max[h];
            if ((top - old) * unit > P_LAG) {
                rows.max[h] = top;
                alpha[h]    = exp2_fast((old - top) * unit);
            }
            rows.sum[h] *= alpha[h];
        }
    }
    return moved;
}

/* The second: S becomes P = exp2(unit * (S - max)), and the row's sum takes it in. GUARD: a row may have seen nothing. */
template <bool GUARD> FA_DEVICE void shift_scores(float (&s)[S_COUNT], const row_state &rows, float unit)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float shift = rows.max[h] * unit - P_LOG2;
        if (GUARD && rows.max[h] == -infinity())
            shift = 0.0f;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++)
                s[4 * j + e] = s[4 * j + e] * unit - shift;
    }
}

FA_DEVICE void exponentials(float (&s)[S_COUNT], row_state &rows)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                s[4 * j + e] = exp2_fast(s[4 * j + e]);
                sum += s[4 * j + e];
            }
        rows.sum[h] += sum;
    }
}

/* Shift and exponentials for consumers that take turns at them (one_by_one_sm90.cuh), both rows side by side: the first scores by `unit`, so that they need not wait, the
 * others by `later`, the same from behind the barrier. Returns what is there when most are done: so early the next consumer may begin. */
template <bool GUARD> FA_DEVICE float exponentials_in_turn(float (&s)[S_COUNT], row_state &rows, float unit, float later)
{
    constexpr int FREE = S_COUNT / 4, EARLY = S_COUNT * 5 / 8; /* found by trying: decision 0059, fifth round */
    float         sum[2] = {0.0f, 0.0f}, early = 0.0f;
#pragma unroll
    for (int n = 0; n < S_COUNT; n++) {
        int   h = n / 2 % 2;
        float by = n < FREE ? unit : later, shift = rows.max[h] * by - P_LOG2;
        if (GUARD && rows.max[h] == -infinity())
            shift = 0.0f;
        if (n == EARLY)
            early = sum[0] + sum[1];
        s[n] = exp2_fast(s[n] * by - shift);
        sum[h] += s[n];
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows.sum[h] += sum[h];
    return early;
}

template <bool GUARD>
FA_DEVICE bool softmax_step(float (&s)[S_COUNT], row_state &rows, float (&alpha)[2], float unit)
{
    bool moved = move_rows(s, rows, alpha, unit);
    shift_scores<GUARD>(s, rows, unit);
    exponentials(s, rows);
    return moved;
}

/* Exponentials by maxima of before, this lane's sums of them, eight and then their sums, and what none of them is larger than: the sum itself (`bound` is `sum` then) or, with
 * FP8, whose P has no room for sums as large, the largest sum of four. */
FA_DEVICE void exponentials_ahead(float (&s)[S_COUNT], const row_state &rows, float (&sum)[2], float (&bound)[2], float unit)
{
    constexpr int GROUP = 4; /* pairs */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float shift = rows.max[h] * unit - P_LOG2;
        sum[h]      = 0.0f;
        if constexpr (FP8)
            bound[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j += GROUP) {
#pragma unroll
            for (int i = j; i < j + GROUP && i < FA_TILE_K / 8; i++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    s[4 * i + e] = exp2_fast(s[4 * i + e] * unit - shift);
#pragma unroll
            for (int i = j; i < j + GROUP && i < FA_TILE_K / 8; i += FP8 ? 2 : 1) {
                float two = s[4 * i + 2 * h] + s[4 * i + 2 * h + 1];
                if constexpr (FP8) {
                    float four = two + (s[4 * i + 4 + 2 * h] + s[4 * i + 5 + 2 * h]);
                    bound[h]   = fmaxf(bound[h], four);
                    sum[h] += four;
                } else
                    sum[h] += two;
            }
        }
    }
}

constexpr int MOST_LAG = 100; /* octaves: beyond, P of a row may not fit a float, and far_rows.cuh computes it again */

/*
 * Says by a step's sums whether a row of the warp has moved too far from the maximum that its P was taken by, and what P and O are to be multiplied with then. No P is larger
 * than its lane's bound, so scores need not be compared at all: where that is at most MOST no row has moved too far. Else its maximum goes up by whole octaves, until the
 * largest bound is below 2^TOP. A row that has not moved keeps its bits, whatever the warp's others do.
 */
FA_DEVICE bool move_rows_by_sums(const float (&sum)[2], const float (&bound)[2], row_state &rows, float (&alpha)[2], float unit)
{
    constexpr float MOST = FP8 ? 430.0f : 256.0f; /* P of FP8 is at most 448 */
    constexpr int   TOP = FP8 ? 8 : 0;
    static_assert(FP8 || P_LAG == 8.0f, "MOST is 2^P_LAG");
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.sum[h] += sum[h];
        far |= bound[h] > MOST; /* not of NaN */
        alpha[h] = 1.0f;
    }
    bool moved = __any_sync(0xFFFFFFFFu, far);
    if (moved)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = quad_max(bound[h]);
            if (most > MOST) {
                int lag = (__float_as_int(most) >> 23) - 126 - TOP;
                rows.max[h] += (float)lag * reciprocal(unit);
                rows.lost |= lag > MOST_LAG ? 1u << h : 0;
                alpha[h] = __int_as_float(fa_max_int(127 - lag, 1) << 23);
                rows.sum[h] *= alpha[h];
            }
        }
    return moved;
}

FA_DEVICE void scale_scores(float (&s)[S_COUNT], const float (&alpha)[2])
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n++)
        s[n] *= alpha[n / 2 % 2];
}

/* The same of packed P in bfloat16, exactly, for alpha is a power of two. */
FA_DEVICE void scale_packed(unsigned (&p)[P_STEPS][4], const float (&alpha)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int step = 0; step < P_STEPS; step++)
#pragma unroll
            for (int i = h; i < 4; i += 2)
                p[step][i] = pack_bf16(__int_as_float((int)(p[step][i] << 16)) * alpha[h], __int_as_float((int)(p[step][i] & 0xFFFF0000u)) * alpha[h]);
}

/* Before steps by maxima of before: a row all of whose scores were -inf has none, and far_rows.cuh computes it again. */
FA_DEVICE void lose_rows_without_maximum(row_state &rows)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows.lost |= rows.max[h] == -infinity() ? 1u << h : 0;
}

/* Scores may rise by as much as they like from a tile to the next, and a row may have seen none but -inf: not by maxima of before. */
constexpr bool RISES = FA_HAS_ALIBI || FA_HAS_BIAS;

/* The same as softmax_step where the rows have seen keys before: by the maximum as it was then, so that no exponential waits for this step's. If a row has moved too far, P
 * is multiplied as well. */
FA_DEVICE bool softmax_ahead(float (&s)[S_COUNT], row_state &rows, float (&alpha)[2], float unit)
{
    float sum[2], most[2], (&bound)[2] = FP8 ? most : sum;
    exponentials_ahead(s, rows, sum, bound, unit);
    bool moved = move_rows_by_sums(sum, bound, rows, alpha, unit);
    if (moved)
        scale_scores(s, alpha);
    return moved;
}

FA_DEVICE row_state no_rows() { return {{-infinity(), -infinity()}, {0.0f, 0.0f}, 0}; }

#endif
