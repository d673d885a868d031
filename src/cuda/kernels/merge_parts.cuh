/* Split keys: parts of a row's O and LSE into one, by combine.cu or by the blocks of a cluster themselves (forward_sm80.cu). */
#ifndef FA_MERGE_PARTS_CUH
#define FA_MERGE_PARTS_CUH

#include "part_rows.cuh"

/* Eight sums in their order, or those of them that there are. */
template <int SUMS> FA_DEVICE float4 sum_of(const float4 (&sums)[SUMS])
{
    float4 sum = sums[0];
#pragma unroll
    for (int i = 1; i < SUMS; i++)
        sum = make_float4(sum.x + sums[i].x, sum.y + sums[i].y, sum.z + sums[i].z, sum.w + sums[i].w);
    return sum;
}

/* Each part of O to its sum. factor: exp(its LSE - LSE), or below 0 if it is empty, whose O may be anything. */
template <int COUNT, int SUMS> FA_DEVICE void add_each(float4 (&sums)[SUMS], const float (&factor)[COUNT], const float4 (&part)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float   f   = factor[i] < 0.0f ? 0.0f : factor[i]; /* NaN stays */
        float4 &sum = sums[i % SUMS];
        sum = make_float4(sum.x + f * part[i].x, sum.y + f * part[i].y, sum.z + f * part[i].z, sum.w + f * part[i].w);
    }
}

/* Columns col to col + 3, and those 128 and more behind them, of parts first, first + STEP, ..., which are all asked for before one is used. */
template <int COUNT, int STEP, int SUMS, int CHUNKS>
FA_DEVICE void add_parts(float4 (&sums)[CHUNKS][SUMS], const fa_args &args, int first, fa_i64 part_rows, fa_i64 n, int col, const float (&factor)[COUNT])
{
    float4 part[CHUNKS][COUNT];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            part[c][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!(factor[i] < 0.0f) && (c == 0 || col + 128 * c < args.head_dim_v))
                part[c][i] = *(const float4 *)&args.o_partial[((first + i * STEP) * part_rows + n) * FA_HEAD_DIM_V + col + 128 * c];
        }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        add_each(sums[c], factor, part[c]);
}

/* LSE of part p of row n, -inf past the last of `parts`. */
FA_DEVICE float lse_of_part(const fa_args &args, fa_i64 part_rows, fa_i64 n, int p, int parts)
{
    return p < parts ? args.lse_partial[p * part_rows + n] : -infinity();
}

FA_DEVICE float factor_of_part(float lse_of_part, float lse) { return lse_of_part == -infinity() ? -1.0f : expf(lse_of_part - lse); }

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

/* LSE of row n, whose parts are dealt to eight neighbouring lanes. own: of the lane's first; FEW: it has no other. */
template <bool FEW> FA_DEVICE float merged_lse(const fa_args &args, fa_i64 part_rows, fa_i64 n, int parts, float own, float sink)
{
    constexpr int AHEAD = FEW ? 0 : 3; /* that are asked for at once */
    int   next = threadIdx.x % 8 + 8, rest = next + 8 * AHEAD;
    float maximum = own, more[AHEAD + 1]; /* fmaxf passes NaN over; the sum does not */
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        more[i] = lse_of_part(args, part_rows, n, next + 8 * i, parts);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        maximum = fmaxf(maximum, more[i]);
    for (int p = rest; !FEW && p < parts; p += 8)
        maximum = fmaxf(maximum, lse_of_part(args, part_rows, n, p, parts));
#pragma unroll
    for (int step = 4; step > 0; step /= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    maximum = fmaxf(maximum, sink);
    /* A row that saw nothing has maximum -inf; subtract 0 instead, or exp(-inf + inf) is NaN. */
    float shift = maximum == -infinity() ? 0.0f : maximum, sum = expf(own - shift);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        sum += expf(more[i] - shift);
    for (int p = rest; !FEW && p < parts; p += 8)
        sum += expf(lse_of_part(args, part_rows, n, p, parts) - shift);
#pragma unroll
    for (int step = 4; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    sum += expf(sink - shift);
    return sum == 0.0f ? -infinity() : shift + logf(sum);
}

FA_DEVICE float sink_of(const fa_args &args, int head)
{
    return args.sinks.data ? load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype) : -infinity();
}

FA_DEVICE void store_merged_lse(const fa_args &args, int entry, int row, int head, float lse)
{
    if (args.lse.data)
        ((float *)args.lse.data)[entry * args.lse.stride[0] + head * args.lse.stride[1] + row * args.lse.stride[2]] = lse;
}

FA_DEVICE fa_i64 row_of_o(const fa_args &args, int entry, int row, int head)
{
    return entry * args.o.stride[0] + row * args.o.stride[1] + head * args.o.stride[2];
}

/* Columns of a row that has so few parts, in CHUNKS pieces at once: where each part is little, what is asked for at once decides. of_lane: factors in
 * the lanes from `from` on. The parts that are not there would add zeros. */
template <int COUNT, int CHUNKS>
FA_DEVICE void merge_few_parts(const fa_args &args, bool is_one, float of_lane, int from, fa_i64 part_rows, fa_i64 n, fa_i64 o_at)
{
    float factor[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        factor[e] = __shfl_sync(~0u, of_lane, from + e);
#pragma unroll
    for (int first = 0; first < FA_HEAD_DIM_V; first += 128 * CHUNKS) {
        int    col = first + threadIdx.x % 32 * 4;
        float4 sums[CHUNKS][COUNT] = {};
        if (!is_one || col >= args.head_dim_v)
            return;
        add_parts<COUNT, 1>(sums, args, 0, part_rows, n, col, factor);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (col + 128 * c < args.head_dim_v)
                store_columns(args, o_at, col + 128 * c, sum_of(sums[c]));
    }
}

/* At most four rows by a warp. Eight neighbouring lanes know each and have its parts p, p + 8, ...; `mine`: theirs is one. counts: of the queries that
 * count, others have no sink. FEW: at most eight parts. AT_ONCE: FEW, so many times 128 columns are asked for
 * at once. */
template <bool FEW, int AT_ONCE = 1> FA_DEVICE void merge_rows(const fa_args &args, bool mine, int head, fa_i64 token, int entry, int row, bool counts)
{
    constexpr int LANES = FA_HEAD_DIM_V <= 32 ? 8 : FA_HEAD_DIM_V <= 64 ? 16 : 32; /* of a row's columns */
    int           lane = threadIdx.x % 32, parts = mine ? args.num_splits : 0;
    fa_i64        tokens = tokens_of_parts(args), part_rows = tokens * args.heads_q, n = mine ? head * tokens + token : 0;
    float         own       = lse_of_part(args, part_rows, n, lane % 8, parts);
    float         lse       = merged_lse<FEW>(args, part_rows, n, parts, own, mine && counts ? sink_of(args, head) : -infinity());
    if (lane % 8 == 0 && mine)
        store_merged_lse(args, entry, row, head, lse);
    fa_i64 o_at = row_of_o(args, entry, row, head);
#pragma unroll
    for (int r = 0; r < 4; r += 32 / LANES) {
        int    from  = (r + lane / LANES) * 8; /* a lane that knows the row */
        fa_i64 its_n = __shfl_sync(~0u, n, from), its_o = __shfl_sync(~0u, o_at, from);
        bool   is_one = __shfl_sync(~0u, parts, from) > 0;
        if (!__any_sync(~0u, is_one)) /* those behind may be: of two kinds of sequences a call has one */
            continue;
        if (!FEW && FA_HEAD_DIM_V > 128 && args.num_splits <= 4) { /* a warp has a row */
            float of_lane = factor_of_part(own, lse);
            if (args.num_splits <= 2)
                merge_few_parts<2, 4>(args, is_one, of_lane, from, part_rows, its_n, its_o);
            else
                merge_few_parts<4, 2>(args, is_one, of_lane, from, part_rows, its_n, its_o);
            continue;
        }
        if constexpr (AT_ONCE > 1) {
            merge_few_parts<8, AT_ONCE>(args, is_one, factor_of_part(own, lse), from, part_rows, its_n, its_o);
            continue;
        }
        for (int first = 0; first < FA_HEAD_DIM_V; first += 128) {
            int    col       = first + lane % LANES * 4;
            float4 sum[1][8] = {};
            for (int p = 0; FEW ? p == 0 : p < args.num_splits; p += 8) {
                float of_lane = factor_of_part(p == 0 ? own : lse_of_part(args, part_rows, n, p + lane % 8, parts), lse), factor[8];
#pragma unroll
                for (int e = 0; e < 8; e++)
                    factor[e] = __shfl_sync(~0u, of_lane, from + e);
                if (is_one && col < args.head_dim_v)
                    add_parts<8, 1>(sum, args, p, part_rows, its_n, col, factor);
            }
            if (is_one && col < args.head_dim_v)
                store_columns(args, its_o, col, sum_of(sum[0]));
        }
    }
}

/* A tile's rows, whose parts the blocks of a cluster have stored: up to four by a warp of one of them, the warp's number and so on by how many there are. */
template <int AT_ONCE = 1, class WORK> FA_DEVICE void merge_tile(const fa_args &args, const WORK &w, int warp, int warps)
{
    for (int first = warp; first < w.rows; first += 4 * warps) {
        int row = first + threadIdx.x % 32 / 8 * warps, i = query_of(args, w, row);
        merge_rows<true, AT_ONCE>(args, row < w.rows, head_of(args, w, row), token_of_part(args, w.b, w.seq.q_entry, w.seq.q_row, i), w.seq.q_entry, w.seq.q_row + i, i < w.seq.seqlen_q);
    }
}

/* As merge_rows, of one row whose parts a warp has kept: lse in lane p and those 8 apart, o in the lanes' columns. */
template <int COUNT>
FA_DEVICE void merge_kept(const fa_args &args, float own, const float4 (&o)[COUNT], int head, int entry, int row, bool counts)
{
    int   lane = threadIdx.x % 32;
    float lse = merged_lse<true>(args, 0, 0, 0, own, counts ? sink_of(args, head) : -infinity()), of_lane = factor_of_part(own, lse), factor[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        factor[e] = __shfl_sync(~0u, of_lane, e);
    float4 sum[8] = {};
    add_each(sum, factor, o);
    if (lane == 0)
        store_merged_lse(args, entry, row, head, lse);
    if (lane * 4 < args.head_dim_v)
        store_columns(args, row_of_o(args, entry, row, head), lane * 4, sum_of(sum));
}

#endif
