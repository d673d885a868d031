/*
 * After the backward: sums in float workspace become the caller's gradients. FA_TILE_Q rows a block, of
 *     rows [0, heads_q * tokens)       dq_accum -> dq, times the scale
 *     then heads_k * kv tokens         dk_accum -> dk, times the scale; dv_accum -> dv, times what dropout keeps
 *     then dbias_extent[0 .. 2]        dbias -> dbias_out
 */
#include "backward_rows.cuh"

constexpr int PIECES       = (FA_HEAD_DIM > FA_HEAD_DIM_V ? FA_HEAD_DIM : FA_HEAD_DIM_V) / 8; /* of eight elements, up to 256 columns one a lane */
constexpr int LANES        = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4;         /* that share a row */
constexpr int ROWS_AT_ONCE = 32 * FA_WARPS / LANES;

FA_DEVICE void convert(const fa_args &args, fa_i64 row)
{
    fa_i64 tokens = (fa_i64)args.q_entries * args.q_rows;
    if (row < tokens * args.heads_q) {
        int    head  = row / tokens;
        fa_i64 token = row - head * tokens;
        if (!args.dq.data || (args.cu_seqlens_q && token >= args.cu_seqlens_q[args.batch]))
            return; /* a row of no sequence */
        int    entry  = args.q_entries == 1 ? 0 : token / args.q_rows;
        fa_i64 offset = entry * args.dq.stride[0] + (token - (fa_i64)entry * args.q_rows) * args.dq.stride[1] +
                        head * args.dq.stride[2];
        convert_row<LANES>(args.dq, offset, args.dq_accum + row * FA_HEAD_DIM, args.scale, args.head_dim);
        return;
    }
    row -= tokens * args.heads_q;
    tokens = (fa_i64)args.kv_entries * args.kv_rows;
    if (FA_HAS_KV_ACCUM) {
        if (row < tokens * args.heads_k) {
            int    head = row / tokens;
            fa_i64 token = row % tokens, entry = token / args.kv_rows, in_entry = token % args.kv_rows;
            if (args.cu_seqlens_k && token >= args.cu_seqlens_k[args.batch])
                return;
            float v_factor = args.dropout.threshold ? args.dropout.keep_scale : 1.0f;
            if (args.dk.data)
                convert_row<LANES>(args.dk, entry * args.dk.stride[0] + in_entry * args.dk.stride[1] + head * args.dk.stride[2],
                            args.dk_accum + row * FA_HEAD_DIM, args.scale, args.head_dim);
            if (args.dv.data)
                convert_row<LANES>(args.dv, entry * args.dv.stride[0] + in_entry * args.dv.stride[1] + head * args.dv.stride[2],
                            args.dv_accum + row * FA_HEAD_DIM_V, v_factor, args.head_dim_v);
            return;
        }
        row -= tokens * args.heads_k;
    }
    if (FA_HAS_DBIAS)
        convert_dbias<LANES>(args, row);
}

/* Eight blocks a multiprocessor: without a number ptxas spills two registers on 12.0 to save others. */
extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 8) backward_convert(const __grid_constant__ fa_args args)
{
    fa_i64 first = (fa_i64)blockIdx.x * FA_TILE_Q;
    for (int r = threadIdx.x / LANES; r < FA_TILE_Q; r += ROWS_AT_ONCE)
        convert(args, first + r);
}
