/*
 * Before the backward: delta = rowsum(dO * O) for every query (Algorithm 2, line 4), and zeros in the float dQ that blocks
 * add to. Bound by memory: each row is read once, 16 bytes a lane. FA_VARIANT 1: for backward_sm90.cu, by its tiles of queries, with LSE.
 */
#include "backward_rows.cuh"

constexpr int PIECES        = FA_HEAD_DIM_V / 8; /* of eight elements, one a lane */
constexpr int LANES         = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4; /* that share a row */
constexpr int ROWS_AT_ONCE  = 32 * FA_WARPS / LANES;

/* Row i of a tile: delta and LSE to args.row_stats, zeros to a part of dQ as large as a row. Rows past the last have P = 0. */
FA_DEVICE void store_in_tile(const fa_args &args, const sequence &s, fa_i64 head, int i, float delta)
{
    fa_i64 tile = head * args.tiles_q + i / FA_TILE_Q;
    int    lane = threadIdx.x % LANES, row = i % FA_TILE_Q;
    if (lane == 0) {
        float lse = infinity();
        if (i < s.seqlen_q)
            lse = ((const float *)args.lse.data)[s.q_entry * args.lse.stride[0] + head % args.heads_q * args.lse.stride[1] +
                                                 i * args.lse.stride[2]] * FA_LOG2E;
        args.row_stats[(2 * tile) * FA_TILE_Q + row]     = lse;
        args.row_stats[(2 * tile + 1) * FA_TILE_Q + row] = delta;
    }
    for (int col = lane * 4; col < FA_HEAD_DIM; col += LANES * 4)
        *(float4 *)(args.dq_accum + (tile * FA_TILE_Q + row) * FA_HEAD_DIM + col) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) backward_rowsum(const __grid_constant__ fa_args args)
{
    unsigned n     = blockIdx.x;
    unsigned tiles = (args.max_seqlen_q + FA_TILE_Q - 1) / FA_TILE_Q;
    int      first = n % tiles * FA_TILE_Q;
    n /= tiles;
    int      head = n % args.heads_q, lane = threadIdx.x % LANES;
    sequence s    = sequence_at(args, n / args.heads_q);
    for (int i = first + threadIdx.x / LANES; i < first + FA_TILE_Q; i += ROWS_AT_ONCE) {
        float sum = row_delta<LANES>(args, s, head, i);
        if (FA_VARIANT == 1) {
            store_in_tile(args, s, n, i, sum);
            continue;
        }
        if (i >= s.rows_q)
            continue;
        fa_i64 token = (fa_i64)head * args.q_entries * args.q_rows + (fa_i64)s.q_entry * args.q_rows + s.q_row + i;
        if (lane == 0)
            args.delta[token] = sum;
        if (args.dq.data)
            for (int col = lane * 4; col < FA_HEAD_DIM; col += LANES * 4)
                *(float4 *)(args.dq_accum + token * FA_HEAD_DIM + col) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}
