/*
 * Before the backward: delta = rowsum(dO * O) for every query (Algorithm 2, line 4), and zeros in the float dQ that blocks
 * add to. Bound by memory: each row is read once, 16 bytes a lane.
 */
#include "mask.cuh"

constexpr int PIECES        = FA_HEAD_DIM_V / 8; /* of eight elements, one a lane */
constexpr int LANES         = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4; /* that share a row */
constexpr int ROWS_AT_ONCE  = 32 * FA_WARPS / LANES;

/* Eight elements from column `col` on; 0 past the last. */
template <int DTYPE> FA_DEVICE void load_eight(float (&x)[8], const fa_view &view, fa_i64 offset, int col, int cols)
{
    if constexpr (FA_ALIGNED && DTYPE != FA_F32) {
        uint4    v       = col < cols ? *(const uint4 *)((const fa_u16 *)view.data + offset + col) : make_uint4(0, 0, 0, 0);
        unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float2 e     = unpack<DTYPE>(word[w]);
            x[2 * w]     = e.x;
            x[2 * w + 1] = e.y;
        }
    } else {
#pragma unroll
        for (int c = 0; c < 8; c++)
            x[c] = col + c < cols ? load_element(view.data, offset + (col + c) * view.stride[3], DTYPE) : 0.0f;
    }
}

/* As dP's operand holds them: a float32 dO of 16-bit inputs is rounded there, and delta must lose the same. */
FA_DEVICE void round_to_operand(float (&x)[8])
{
    if constexpr (FA_DTYPE_DOUT == FA_F32 && FA_DTYPE != FA_F32)
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
            float2 e = unpack<FA_DTYPE>(pack<FA_DTYPE>(x[c], x[c + 1]));
            x[c]     = e.x;
            x[c + 1] = e.y;
        }
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
        float sum = 0.0f;
        if (i < s.seqlen_q)
            for (int col = lane * 8; col < args.head_dim_v; col += LANES * 8) {
                fa_i64 row = s.q_row + i;
                float  o[8], dout[8];
                load_eight<FA_DTYPE_O>(o, args.o, s.q_entry * args.o.stride[0] + row * args.o.stride[1] +
                                                      head * args.o.stride[2], col, args.head_dim_v);
                load_eight<FA_DTYPE_DOUT>(dout, args.dout, s.q_entry * args.dout.stride[0] + row * args.dout.stride[1] +
                                                               head * args.dout.stride[2], col, args.head_dim_v);
                round_to_operand(dout);
#pragma unroll
                for (int c = 0; c < 8; c++)
                    sum += o[c] != 0.0f ? o[c] * dout[c] : 0.0f; /* a row that sees nothing has O 0, whatever dO holds */
            }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
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
