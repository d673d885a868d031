/*
 * Split keys of forward_few_sm90, where blocks have a part each, or a group, and of forward_sm90: a row's results into one (fold_parts.cuh). A warp has 32 places for
 * results of one row or, of many rows, 16 for those of two or four. Its lanes know a result each, and find by how much it and what is before it are multiplied, for a
 * maximum so far does not need the sums; then all lanes go from result to result in their columns of O, with AHEAD results on their way. Few rows of many parts have a block each,
 * whose warps have a group of parts each. Bits do not depend on any of this.
 */
#include "fold_parts.cuh"
#include "merge_parts.cuh"
#include "row_owner.cuh"

constexpr int WIDTH = FA_HEAD_DIM_V <= 64 ? 2 : 4, PIECE = 32 * WIDTH, PIECES = (FA_HEAD_DIM_V + PIECE - 1) / PIECE; /* of a row's columns; a lane has WIDTH of each */
constexpr int AHEAD = PIECES == 1 ? 16 : 8;

struct __align__(16) columns {
    float x[PIECES][WIDTH];
};

FA_DEVICE int first_column() { return threadIdx.x % 32 * WIDTH; }

FA_DEVICE void clear(columns &o)
{
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            o.x[p][i] = 0.0f;
}

/* From where a lane loads: one without columns has another's. */
FA_DEVICE int column_to_load(const fa_args &args) { return first_column() < args.head_dim_v ? first_column() : 0; }

FA_DEVICE void find_pieces(const fa_args &args, int (&piece)[PIECES])
{
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        piece[p] = first_column() + p * PIECE < args.head_dim_v ? p * PIECE : 0;
}

/* Its columns of a row at `from`; of pieces that a row has not, others'. */
FA_DEVICE void load(columns &o, const float *from, const int (&piece)[PIECES])
{
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if constexpr (WIDTH == 4)
            *(float4 *)o.x[p] = *(const float4 *)(from + piece[p]);
        else
            *(float2 *)o.x[p] = *(const float2 *)(from + piece[p]);
}

/* Maximum and sum of result `result` of row n; there: else it has none. */
FA_DEVICE float2 load_sums(const fa_args &args, fa_i64 rows, int result, unsigned n, bool there)
{
    return there ? ((const float2 *)args.lse_partial)[result * rows + n] : make_float2(-infinity(), 0.0f);
}

/* What all lanes must know of a result, or of a group: what O and the sum before it are multiplied by, what its own are; and its sum. */
struct __align__(16) factors {
    float of_all, of_part, sum;
};

/* Whose a row is, and where its O goes. */
struct row_known {
    fa_i64 o_at;
    int    head, entry, row;
    bool   there, counts; /* a query that counts: others have no sink */
    float  sink_log2;
};

constexpr int MOST_ROWS = 4; /* of a warp */

struct known_by_warp {
    factors   of_results[32], of_groups[32 / FA_FOLD_GROUP];
    row_known rows[MOST_ROWS];
};

FA_DEVICE float folded(float all, float part, const factors &f) { return folded(all, part, f.of_all, f.of_part); }

FA_DEVICE void fold_into(columns &all, const columns &part, const factors &f)
{
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            all.x[p][i] = folded(all.x[p][i], part.x[p][i], f);
}

/* The largest of lanes STEP, 2 * STEP, ... below this one, down to that whose place is 0 of COUNT, and of this one. */
template <int STEP, int COUNT> FA_DEVICE float maximum_so_far(float own, int place)
{
#pragma unroll
    for (int step = STEP; step < COUNT; step *= 2) {
        float below = __shfl_sync(~0u, own, (threadIdx.x - step) % 32);
        own         = place >= step ? fmaxf(own, below) : own;
    }
    return own;
}

/* The maximum before a lane's own, where that of lane - STEP is with its own; `before`: of the first. */
template <int STEP> FA_DEVICE float maximum_before(float with_own, int place, float before)
{
    float below = __shfl_sync(~0u, with_own, (threadIdx.x - STEP) % 32);
    return place >= STEP ? below : before;
}

/* Behind it the launch before has ended. */
FA_DEVICE row_known find_row_of_results(const fa_args &args, unsigned n)
{
    row_known of;
    unsigned  tokens = tokens_of_parts(args);
    if (reads_lengths(args))
        wait_for_launch_before();
    of.head   = n / tokens;
    of.there  = of.head < args.heads_q && find_row(args, n - of.head * tokens, of.entry, of.row, of.counts);
    of.counts = of.there && of.counts;
    of.o_at   = of.there ? row_of_o(args, of.entry, of.row, of.head) : 0;
    wait_for_launch_before();
    let_next_launch_begin();
    of.sink_log2 = of.counts ? sink_of(args, of.head) * FA_LOG2E : -infinity();
    return of;
}

FA_DEVICE row_end end_and_lse(const fa_args &args, const row_known &of, bool stores, float max, float sum)
{
    row_end end = end_of_row(max, sum, of.sink_log2, !of.counts);
    if (of.there && stores)
        store_merged_lse(args, of.entry, of.row, of.head, end.lse);
    return end;
}

FA_DEVICE void store_folded(const fa_args &args, const row_known &of, float scale, const columns &all)
{
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            v[i] = scale == 0.0f ? 0.0f : without_sign_of_0(all.x[p][i]) * scale;
        if constexpr (WIDTH == 2) /* a lane stores its neighbour's too */
            for (int i = 0; i < 2; i++)
                v[2 + i] = __shfl_xor_sync(~0u, v[i], 1);
        int col = first_column() + p * PIECE;
        if (of.there && col % 4 == 0 && col < args.head_dim_v)
            store_columns(args, of.o_at, col, make_float4(v[0], v[1], v[2], v[3]));
    }
}

/* ROWS rows from `first` on, each with PLACES for results; of more results one row alone. GROUPS: results are parts, and groups of FA_FOLD_GROUP neighbours are folded first. */
template <int PLACES, int ROWS, bool GROUPS = false> FA_DEVICE void fold_rows(const fa_args &args, known_by_warp &shared, unsigned first, int results)
{
    constexpr int ALL = PLACES * ROWS, GROUP = GROUPS ? FA_FOLD_GROUP : 1, SPAN = GROUPS ? GROUP : PLACES; /* SPAN: of the maxima that O is folded by first */
    static_assert(ALL <= 32 && ALL % AHEAD == 0 && ROWS <= MOST_ROWS && (ROWS == 1 || AHEAD % PLACES == 0) && AHEAD % GROUP == 0, "rows and groups end in the same places of each round");
    int       lane = threadIdx.x % ALL /* who is beyond does the same as a lane before */, place = lane % PLACES, row = lane / PLACES, highest = (results - 1) / GROUP * GROUP + GROUP - 1; /* the result of place 0, if there is one: groups begin with the last of GROUP */
    unsigned  n    = first + row;
    fa_i64    rows = (fa_i64)tokens_of_parts(args) * args.heads_q, apart = rows * FA_HEAD_DIM_V; /* floats from a result to the next one */
    float     max = -infinity(), sum = 0.0f, sum_of_group = 0.0f;
    columns   part[AHEAD], all, group;
    int       piece[PIECES];
    row_end   end;
    if (first >= rows)
        return;
    find_pieces(args, piece);
#pragma unroll
    for (int s = 0; s < AHEAD; s++)
        clear(part[s]);
    clear(all);
    clear(group);
    shared.rows[row] = find_row_of_results(args, n); /* all lanes of a row the same */
    __syncwarp();
    const row_known &own = shared.rows[row];
    fa_i64 from  = (highest * rows + first) * FA_HEAD_DIM_V + column_to_load(args);
    for (int top = highest; top >= 0; top -= PLACES) {
        auto ask = [&](int round, int s) { /* for place s of a round, one after the other; what comes behind the last round's is the first one's of the next results */
            int  its_row = (round * AHEAD + s) / PLACES, result = round * AHEAD + s - (ROWS > 1 ? its_row * PLACES : 0);
            bool there   = result <= top && (s >= GROUP - 1 || top - result < results) && (ROWS == 1 || (its_row < ROWS && first + its_row < rows));
            if (there)
                load(part[s], args.o_partial + from, piece);
            from += s % PLACES == PLACES - 1 ? (PLACES - 1) * apart + FA_HEAD_DIM_V : -apart;
            asm volatile("" : "+l"(from)); /* one number, not one for each place */
        };
        bool   is_one = top >= place && top - place < results && n < rows;
        float2 stats  = load_sums(args, rows, top - place, n, is_one);
        if (top == highest)
#pragma unroll
            for (int s = 0; s < AHEAD; s++)
                ask(0, s);
        float with_own = maximum_so_far<1, SPAN>(stats.x, place % SPAN);
        if (!GROUPS)
            with_own = fmaxf(with_own, max);
        float of_part = fold_factor(stats.x, with_own);
        __syncwarp();
        shared.of_results[lane] = {fold_factor(maximum_before<1>(with_own, place % SPAN, GROUPS ? -infinity() : max), with_own), of_part, of_part == 0.0f ? 0.0f : stats.y};
        if constexpr (GROUPS) {
            float of_group = __shfl_sync(~0u, with_own, lane | (GROUP - 1));
            with_own       = fmaxf(maximum_so_far<GROUP, PLACES>(of_group, place), max);
            float of_all = fold_factor(maximum_before<GROUP>(with_own, place, max), with_own);
            if (place % GROUP == 0)
                shared.of_groups[lane / GROUP] = {of_all, fold_factor(of_group, with_own), 0.0f};
        }
        max = __shfl_sync(~0u, with_own, lane | (PLACES - 1));
        __syncwarp();
        /* Places whose O may be anything: of parts that saw nothing, and those that have no result now but had one before. */
        unsigned nothing = __ballot_sync(~0u, of_part == 0.0f && (is_one || (ROWS == 1 && (place >= AHEAD || top != highest))));
        if (ROWS > 1) { /* of one row alone beside O */
#pragma unroll
            for (int i = 0; i < PLACES; i++)
                sum = folded(sum, shared.of_results[row * PLACES + i].sum, shared.of_results[row * PLACES + i]);
            end = end_and_lse(args, own, place == 0 && threadIdx.x % 32 < ALL, max, sum);
        }
#pragma unroll 1
        for (int round = 0; round < ALL / AHEAD && (ROWS > 1 || round * AHEAD <= top); round++) {
            if (nothing << (32 - AHEAD - round * AHEAD) >> (32 - AHEAD)) {
                asm volatile("" ::: "memory"); /* a branch: rare */
#pragma unroll
                for (int s = 0; s < AHEAD; s++)
                    if (nothing >> (round * AHEAD + s) & 1)
                        clear(part[s]);
            }
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                factors f = shared.of_results[round * AHEAD + s];
                fold_into(GROUPS ? group : all, part[s], f);
                if (ROWS == 1)
                    (GROUPS ? sum_of_group : sum) = folded(GROUPS ? sum_of_group : sum, f.sum, f);
                if (GROUPS && s % GROUP == GROUP - 1) {
                    f = shared.of_groups[(round * AHEAD + s) / GROUP];
                    fold_into(all, group, f);
                    sum = folded(sum, sum_of_group, f);
                    clear(group);
                    sum_of_group = 0.0f;
                }
                if (ROWS > 1 && s % PLACES == PLACES - 1) {
                    store_folded(args, shared.rows[(round * AHEAD + s) / PLACES], __shfl_sync(~0u, end.scale, round * AHEAD + s), all);
                    clear(all);
                }
                ask(round + 1, s);
            }
        }
    }
    if (ROWS == 1)
        store_folded(args, own, end_and_lse(args, own, lane == 0, max, sum).scale, all);
}

/* A row whose results are parts by a block: its warps have a group each, the first those of all. */
FA_DEVICE void fold_by_block(const fa_args &args, unsigned n, int results)
{
    __shared__ columns shared_o[FA_WARPS][32];
    __shared__ float2  shared_stats[FA_WARPS];
    int       warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    fa_i64    rows = (fa_i64)tokens_of_parts(args) * args.heads_q, from = column_to_load(args);
    row_known of   = find_row_of_results(args, n);
    row_fold  sums;
    columns   all;
    int       piece[PIECES];
    find_pieces(args, piece);
    clear(all);
    for (int last = (results - 1) / FA_FOLD_GROUP; last >= 0; last -= FA_WARPS) {
        int      first = (last - warp) * FA_FOLD_GROUP;
        float2   stats[FA_FOLD_GROUP];
        columns  part[FA_FOLD_GROUP], group;
        row_fold own;
#pragma unroll
        for (int i = 0; i < FA_FOLD_GROUP; i++) {
            bool there = first >= 0 && first + i < results;
            stats[i]   = load_sums(args, rows, first + i, n, there);
            if (there)
                load(part[i], args.o_partial + ((first + i) * rows + n) * FA_HEAD_DIM_V + from, piece);
        }
        clear(group);
#pragma unroll
        for (int i = FA_FOLD_GROUP - 1; i >= 0; i--) {
            factors f;
            if (stats[i].x == -infinity()) {
                clear(part[i]);
                stats[i].y = 0.0f;
            }
            fold_row(own, stats[i].x, stats[i].y, f.of_all, f.of_part);
            fold_into(group, part[i], f);
        }
        shared_o[warp][lane] = group;
        if (lane == 0)
            shared_stats[warp] = make_float2(own.max, own.sum);
        __syncthreads();
        for (int w = 0; w < FA_WARPS && warp == 0; w++) {
            factors f;
            fold_row(sums, shared_stats[w].x, shared_stats[w].y, f.of_all, f.of_part);
            fold_into(all, shared_o[w][lane], f);
        }
        __syncthreads();
    }
    if (warp == 0)
        store_folded(args, of, end_and_lse(args, of, lane == 0, sums.max, sums.sum).scale, all);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, PIECES == 1 ? 2 : 1) fold(const __grid_constant__ fa_args args)
{
    __shared__ known_by_warp shared[FA_WARPS];
    int      results = (args.num_splits + args.run_parts - 1) / args.run_parts; /* a result may be a group's */
    unsigned own = threadIdx.x / 32, warp = blockIdx.x * FA_WARPS + own;
    if (args.row_warps > 1)
        fold_by_block(args, blockIdx.x, results);
    else if (args.fold_rows == 0)
        fold_rows<32, 1, true>(args, shared[own], warp, results);
    else if (PIECES == 1 && args.fold_rows == 4)
        fold_rows<PIECES == 1 ? 4 : 32, PIECES == 1 ? 4 : 1>(args, shared[own], 4 * warp, results);
    else if (PIECES == 1 && args.fold_rows == 2)
        fold_rows<PIECES == 1 ? 8 : 32, PIECES == 1 ? 2 : 1>(args, shared[own], 2 * warp, results);
    else
        fold_rows<32, 1>(args, shared[own], warp, results);
}
