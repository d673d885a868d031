/*
 * Split keys of forward_few_sm90, where blocks have a part each, or a group, and of forward_sm90: a row's results into one (fold_parts.cuh). A warp has FOLD_ROWS rows or, of forward_sm90,
 * args.fold_rows times as many; of few rows of forward_few_sm90 with many results (args.row_warps) a block has one row and its warps a group each, so that the results are asked for at once. Bits do
 * not depend on that.
 */
#include "fold_parts.cuh"
#include "merge_parts.cuh"
#include "row_owner.cuh"

constexpr int CHUNKS = (FA_HEAD_DIM_V + 127) / 128; /* of 128 columns, of which a lane has four each */
constexpr int FOLD_LANES = FA_HEAD_DIM_V <= 64 ? 16 : 32, FOLD_ROWS = 32 / FOLD_LANES; /* a warp folds so many rows at once, so many lanes each */

FA_DEVICE float4 no_columns() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

/* Of a row: what has been folded, in a lane's columns. */
struct folded_row {
    row_fold sums;
    float4   o[CHUNKS];
};

FA_DEVICE folded_row nothing_folded()
{
    folded_row row;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        row.o[c] = no_columns();
    return row;
}

FA_DEVICE void fold_into(folded_row &all, float max, float sum, const float4 (&part)[CHUNKS])
{
    float of_all, of_part;
    fold_row(all.sums, max, sum, of_all, of_part);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        all.o[c] = make_float4(folded(all.o[c].x, part[c].x, of_all, of_part), folded(all.o[c].y, part[c].y, of_all, of_part),
                               folded(all.o[c].z, part[c].z, of_all, of_part), folded(all.o[c].w, part[c].w, of_all, of_part));
}

/* Row n of a part, and whose it is. */
struct row_of_results {
    unsigned n;
    int      head, entry, row;
    bool     counts; /* a query that counts: others have no sink */
    fa_i64   part_rows;
};

FA_DEVICE bool find_results(const fa_args &args, unsigned n, row_of_results &of)
{
    int tokens   = tokens_of_parts(args);
    of.n         = n;
    of.head      = (int)(n / (unsigned)tokens);
    of.counts    = false;
    of.part_rows = (fa_i64)tokens * args.heads_q;
    return of.head < args.heads_q && find_row(args, (int)(n % (unsigned)tokens), of.entry, of.row, of.counts);
}

/* A result, which is nothing if it is not there; O, which may be anything where the part saw nothing, only if `asked`. */
FA_DEVICE float2 load_sums(const fa_args &args, const row_of_results &of, int n, bool there)
{
    return there ? ((const float2 *)args.lse_partial)[n * of.part_rows + of.n] : make_float2(-infinity(), 0.0f);
}

FA_DEVICE void load_columns(const fa_args &args, const row_of_results &of, int n, bool asked, int col, float4 (&o)[CHUNKS])
{
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        o[c] = asked && col + 128 * c < args.head_dim_v ? *(const float4 *)&args.o_partial[(n * of.part_rows + of.n) * FA_HEAD_DIM_V + col + 128 * c] : no_columns();
}

/* Results last, last - 1, ... down to `first`, which are all asked for before one is used; past that there is nothing. */
template <int COUNT> FA_DEVICE void load_results(const fa_args &args, const row_of_results &of, int last, int first, int col, float2 (&stats)[COUNT], float4 (&part)[COUNT][CHUNKS])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        stats[i] = load_sums(args, of, last - i, last - i >= first);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        load_columns(args, of, last - i, stats[i].x != -infinity(), col, part[i]);
}

FA_DEVICE void fold_result(folded_row &group, float2 stats, const float4 (&part)[CHUNKS])
{
    fold_into(group, stats.x, stats.x == -infinity() ? 0.0f : stats.y, part);
}

FA_DEVICE void store_folded(const fa_args &args, const row_of_results &of, const folded_row &all, int col)
{
    row_end end = end_of_row(all.sums.max, all.sums.sum, of.counts ? sink_of(args, of.head) * FA_LOG2E : -infinity(), !of.counts);
    if (col == 0)
        store_merged_lse(args, of.entry, of.row, of.head, end.lse);
    fa_i64 at = row_of_o(args, of.entry, of.row, of.head);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        if (col + 128 * c < args.head_dim_v) {
            float4 v = all.o[c];
            v = end.scale == 0.0f ? no_columns()
                                  : make_float4(without_sign_of_0(v.x) * end.scale, without_sign_of_0(v.y) * end.scale, without_sign_of_0(v.z) * end.scale, without_sign_of_0(v.w) * end.scale);
            store_columns(args, at, col + 128 * c, v);
        }
}

FA_DEVICE void fold_by_warp(const fa_args &args, const row_of_results &of, int results, int group)
{
    constexpr int AT_ONCE = 8;
    int           col = threadIdx.x % FOLD_LANES * 4;
    folded_row    all = nothing_folded(), of_group = nothing_folded();
    for (int last = results - 1; last >= 0; last -= AT_ONCE) {
        float2 stats[AT_ONCE];
        float4 part[AT_ONCE][CHUNKS];
        load_results(args, of, last, 0, col, stats, part);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) { /* past the first result: nothing, and a group of it is folded with nothing */
            fold_result(of_group, stats[i], part[i]);
            if (((last - i) & (group - 1)) == 0) {
                fold_into(all, of_group.sums.max, of_group.sums.sum, of_group.o);
                of_group = nothing_folded();
            }
        }
    }
    store_folded(args, of, all, col);
}

/* Results that are no group's parts, of ROWS rows: all are asked for at once, whether there is something or not, and of one row RESULTS, and then as many. */
template <int RESULTS, int ROWS> FA_DEVICE void fold_each(const fa_args &args, unsigned first, unsigned apart, int results)
{
    int            col = threadIdx.x % FOLD_LANES * 4;
    row_of_results of[ROWS];
    float2         stats[ROWS][RESULTS];
    float4         part[ROWS][RESULTS][CHUNKS];
    bool           some[ROWS];
    auto           load = [&](int r, int last) {
#pragma unroll
        for (int i = 0; i < RESULTS; i++) {
            bool there  = some[r] && i <= last;
            stats[r][i] = load_sums(args, of[r], last - i, there);
            load_columns(args, of[r], last - i, there, col, part[r][i]);
        }
    };
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        some[r] = find_results(args, first + r * apart, of[r]);
        load(r, results - 1);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        folded_row all = nothing_folded();
        for (int last = results - 1;;) {
#pragma unroll
            for (int i = 0; i < RESULTS; i++) {
                if (stats[r][i].x == -infinity())
#pragma unroll
                    for (int c = 0; c < CHUNKS; c++)
                        part[r][i][c] = no_columns();
                fold_result(all, stats[r][i], part[r][i]);
            }
            last -= RESULTS;
            if (ROWS > 1 || last < 0)
                break;
            load(r, last);
        }
        if (some[r])
            store_folded(args, of[r], all, col);
    }
}

FA_DEVICE void fold_by_block(const fa_args &args, const row_of_results &of, int results, int group)
{
    __shared__ float4   shared_o[FA_WARPS][CHUNKS][32];
    __shared__ float2   shared_stats[FA_WARPS];
    int                 warp = threadIdx.x / 32, lane = threadIdx.x % 32, col = lane * 4;
    folded_row          all = nothing_folded();
    for (int last = (results - 1) / group; last >= 0; last -= FA_WARPS) {
        folded_row own   = nothing_folded();
        int        first = (last - warp) * group;
        if (first >= 0) {
            float2 stats[FA_FOLD_GROUP];
            float4 part[FA_FOLD_GROUP][CHUNKS];
            load_results(args, of, min(first + group, results) - 1, first, col, stats, part);
#pragma unroll
            for (int i = 0; i < FA_FOLD_GROUP; i++)
                fold_result(own, stats[i], part[i]);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            shared_o[warp][c][lane] = own.o[c];
        if (lane == 0)
            shared_stats[warp] = make_float2(own.sums.max, own.sums.sum);
        __syncthreads();
        for (int w = 0; w < FA_WARPS && warp == 0; w++) {
            float4 its[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                its[c] = shared_o[w][c][lane];
            fold_into(all, shared_stats[w].x, shared_stats[w].y, its);
        }
        __syncthreads();
    }
    if (warp == 0)
        store_folded(args, of, all, col);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, CHUNKS == 1 ? 3 : 2) fold(const __grid_constant__ fa_args args)
{
    wait_for_launch_before();
    let_next_launch_begin();
    bool     by_block = args.row_warps > 1;
    int      results  = (args.num_splits + args.run_parts - 1) / args.run_parts; /* a result may be a group's */
    unsigned row = by_block ? blockIdx.x : (blockIdx.x * FA_WARPS + threadIdx.x / 32) * FOLD_ROWS + threadIdx.x % 32 / FOLD_LANES, apart = gridDim.x * FA_WARPS * FOLD_ROWS;
    if (CHUNKS == 1 && args.fold_rows == 4)
        fold_each<FA_FOLD_RESULTS / 4, CHUNKS == 1 ? 4 : 1>(args, row, apart, results);
    else if (CHUNKS == 1 && args.fold_rows == 2)
        fold_each<FA_FOLD_RESULTS / 2, CHUNKS == 1 ? 2 : 1>(args, row, apart, results);
    else if (args.fold_rows == 1)
        fold_each<FA_FOLD_RESULTS, 1>(args, row, apart, results);
    else {
        int            group = args.run_parts > 1 ? 1 : FA_FOLD_GROUP;
        row_of_results of;
        if (!find_results(args, row, of))
            return;
        if (by_block)
            fold_by_block(args, of, results, group);
        else
            fold_by_warp(args, of, results, group);
    }
}
