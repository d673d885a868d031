/* What the backward does for single rows, before and after its main loop: delta, and dQ from its float sums. In kernels of
 * their own (backward_rowsum.cu, backward_convert.cu) or, with FA_ONE_LAUNCH, in the main one. */
#ifndef FA_BACKWARD_ROWS_CUH
#define FA_BACKWARD_ROWS_CUH

#include "accumulate.cuh"
#include "mask.cuh"

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

/* delta of query i by LANES neighbouring threads, each of which gets it; 0 where it does not exist. Where dO is not finite in a column for which O is 0,
 * delta is not either, or, if it is 0, it is -0, which it is for no other reason: the query may see no key, and then its delta is 0. */
template <int LANES> FA_DEVICE float row_delta(const fa_args &args, const sequence &s, int head, int i)
{
    int   lane = threadIdx.x % LANES;
    float sum  = 0.0f, nothing = 0.0f; /* or NaN */
    if (i < s.seqlen_q) {
        fa_i64 row = s.q_row + i, o_at = s.q_entry * args.o.stride[0] + row * args.o.stride[1] + head * args.o.stride[2];
        fa_i64 dout_at = s.q_entry * args.dout.stride[0] + row * args.dout.stride[1] + head * args.dout.stride[2];
        for (int col = lane * 8; col < args.head_dim_v; col += LANES * 8) {
            float o[8], dout[8];
            load_eight<FA_DTYPE_O>(o, args.o, o_at, col, args.head_dim_v);
            load_eight<FA_DTYPE_DOUT>(dout, args.dout, dout_at, col, args.head_dim_v);
            round_to_operand(dout);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                sum += o[c] != 0.0f ? o[c] * dout[c] : 0.0f; /* a row that sees nothing has O 0, whatever dO holds */
                nothing = dout[c] * 0.0f + nothing;
            }
        }
    }
    float delta = sum_of_lanes<LANES>(sum + nothing);
    if (__any_sync(0xFFFFFFFFu, !finite(delta)) && sum_of_lanes<LANES>(sum) == 0.0f && !finite(delta))
        return -0.0f;
    return delta;
}

/* Row of `from` (in accumulate.cuh's order) to `offset` of a view, by LANES neighbouring threads. */
template <int LANES> FA_DEVICE void convert_row(const fa_view &to, fa_i64 offset, const float *from, float factor, int cols)
{
    int lane = threadIdx.x % LANES;
    if (FA_ALIGNED && to.dtype != FA_F32) {
        /* places 4 t + 2 u + e of 16: a lane takes columns 8 u ... 8 u + 7, which lie four floats apart in pairs */
        for (int col = lane * 8; col < cols; col += LANES * 8) {
            const float *base = from + col / 16 * 16 + (col / 8 % 2) * 2;
            unsigned     word[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                float2 e = __ldcg((const float2 *)(base + 4 * t)); /* other blocks have added to it */
                word[t]  = pack<FA_DTYPE>(e.x * factor, e.y * factor);
            }
            *(uint4 *)((fa_u16 *)to.data + offset + col) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    } else
        for (int col = lane; col < cols; col += LANES)
            store_element(to.data, offset + col * to.stride[3], to.dtype, __ldcg(from + accumulated_place(col)) * factor);
}

#endif
