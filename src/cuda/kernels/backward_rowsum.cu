/*
 * Before the backward: delta = rowsum(dO * O) for every query (Algorithm 2, line 4), and zeros in the float dQ that blocks
 * add to. Bound by memory: each row is read once, 16 bytes a lane. FA_VARIANT 1: for backward_sm90.cu, by its tiles of queries, with LSE
 * and without those zeros.
 */
#include "backward_rows.cuh"
#include "packed_sm90.cuh"

constexpr int PIECES        = FA_HEAD_DIM_V / 8; /* of eight elements */
constexpr int LANES         = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4; /* that share a row */
constexpr int ROWS_AT_ONCE  = 32 * FA_WARPS / LANES;
constexpr int OF_LANE       = (PIECES + LANES - 1) / LANES; /* pieces of a row that a thread has: one up to 256 columns */
constexpr int ON_THEIR_WAY  = 2; /* rows of a thread, whose loads do not wait for each other */

/* store(i, delta) of the tile's rows, by all threads of each. */
template <typename STORE> FA_DEVICE void delta_of_tile(const fa_args &args, const sequence &s, int head, int first, STORE store)
{
    row_places from = places_of_rows(args, s, head);
#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < FA_TILE_Q; row += ON_THEIR_WAY * ROWS_AT_ONCE) {
        row_piece piece[ON_THEIR_WAY][OF_LANE];
        row_sums  own[ON_THEIR_WAY] = {};
        float     delta[ON_THEIR_WAY];
#pragma unroll
        for (int n = 0; n < ON_THEIR_WAY; n++) /* some row, without a branch */
#pragma unroll
            for (int p = 0; p < OF_LANE; p++)
                load_piece(piece[n][p], args, from, fa_max_int(0, fa_min_int(first + row + n * ROWS_AT_ONCE, s.seqlen_q - 1)), (threadIdx.x % LANES + p * LANES) * 8);
#pragma unroll
        for (int n = 0; n < ON_THEIR_WAY; n++) {
#pragma unroll
            for (int p = 0; p < OF_LANE; p++)
                add_piece(own[n], piece[n][p]);
            if (first + row + n * ROWS_AT_ONCE >= s.seqlen_q)
                own[n] = {0.0f, 0.0f};
        }
        deltas_of<LANES>(delta, own);
#pragma unroll
        for (int n = 0; n < ON_THEIR_WAY; n++)
            if (row + n * ROWS_AT_ONCE < FA_TILE_Q)
                store(first + row + n * ROWS_AT_ONCE, delta[n]);
    }
}

/* A tile of all heads and sequences; those that are nobody's are not looked at again. */
FA_DEVICE void fill_tile(const fa_args &args, unsigned n)
{
    int        head = n % args.heads_q, number = args.all_tiles_q - 1 - (int)n / args.heads_q; /* heads side by side, as they lie */
    tile_place at   = place_of_queries(args, number);
    sequence   s     = sequence_at(args, at.b);
    int        first = at.tile * FA_TILE_Q;
    if (threadIdx.x == 0 && n == 0 && args.next_item)
        *args.next_item = 0;
    n = head * args.all_tiles_q + number;
    if (threadIdx.x == 0)
        args.dq_turn[n] = 0;
    if (at.tile < 0 || first >= s.rows_q)
        return;
    float       *stats = args.row_stats + (fa_i64)n * (2 * FA_TILE_Q);
    const float *lse   = (const float *)args.lse.data + s.q_entry * args.lse.stride[0] + head * args.lse.stride[1] + s.q_row * args.lse.stride[2];
#pragma unroll 1
    for (int row = threadIdx.x; row < FA_TILE_Q; row += 32 * FA_WARPS)
        stats[row] = first + row < s.seqlen_q ? lse_log2(lse[(first + row) * args.lse.stride[2]]) : infinity(); /* past the last P is 0 */
    delta_of_tile(args, s, head, first, [&](int i, float delta) {
        if (is_minus_0(delta) && sees_a_key(args, at.b, s, i))
            delta = __int_as_float(0x7FFFFFFF);
        if (threadIdx.x % LANES == 0)
            stats[FA_TILE_Q + i - first] = delta;
    });
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) backward_rowsum(const __grid_constant__ fa_args args)
{
    unsigned n = blockIdx.x;
    if (FA_VARIANT == 1) {
        fill_tile(args, n);
        return;
    }
    unsigned tiles = (args.max_seqlen_q + FA_TILE_Q - 1) / FA_TILE_Q;
    int      first = n % tiles * FA_TILE_Q;
    n /= tiles;
    int      head = n % args.heads_q, lane = threadIdx.x % LANES;
    sequence s    = sequence_at(args, n / args.heads_q);
    if (first >= s.rows_q)
        return;
    delta_of_tile(args, s, head, first, [&](int i, float delta) {
        if (i >= s.rows_q)
            return;
        fa_i64 token = (fa_i64)head * args.q_entries * args.q_rows + (fa_i64)s.q_entry * args.q_rows + s.q_row + i;
        if (lane == 0)
            args.delta[token] = delta;
        if (args.dq.data)
            for (int col = lane * 4; col < FA_HEAD_DIM; col += LANES * 4)
                *(float4 *)(args.dq_accum + token * FA_HEAD_DIM + col) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    });
}
