/* What the backward does for single rows, before and after its main loop: delta, and dQ from its float sums. In kernels of
 * their own (backward_rowsum.cu, backward_convert.cu) or, with FA_ONE_LAUNCH, in the main one. */
#ifndef FA_BACKWARD_ROWS_CUH
#define FA_BACKWARD_ROWS_CUH

#include "accumulate.cuh"
#include "mask.cuh"

/* Eight elements as they are loaded: 16 bytes as they lie, or one by one. */
template <int DTYPE> constexpr bool IN_WORDS = FA_ALIGNED && DTYPE != FA_F32;
template <bool WORDS> struct raw_eight {
    float x[8];
};
template <> struct raw_eight<true> {
    uint4 words;
};

/* From column `col` on; 0 past the last. */
template <int DTYPE> FA_DEVICE void load_raw(raw_eight<IN_WORDS<DTYPE>> &raw, const fa_view &view, fa_i64 offset, int col, int cols)
{
    if constexpr (IN_WORDS<DTYPE>)
        raw.words = col < cols ? *(const uint4 *)((const fa_u16 *)view.data + offset + col) : make_uint4(0, 0, 0, 0);
    else
#pragma unroll
        for (int c = 0; c < 8; c++)
            raw.x[c] = col + c < cols ? load_element(view.data, offset + (col + c) * view.stride[3], DTYPE) : 0.0f;
}

template <int DTYPE> FA_DEVICE void unpack_eight(float (&x)[8], const raw_eight<IN_WORDS<DTYPE>> &raw)
{
    if constexpr (IN_WORDS<DTYPE>) {
        unsigned word[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float2 e     = unpack<DTYPE>(word[w]);
            x[2 * w]     = e.x;
            x[2 * w + 1] = e.y;
        }
    } else
#pragma unroll
        for (int c = 0; c < 8; c++)
            x[c] = raw.x[c];
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

/* Eight neighbouring numbers of a row of O and of dO. */
struct row_piece {
    raw_eight<IN_WORDS<FA_DTYPE_O>>    o;
    raw_eight<IN_WORDS<FA_DTYPE_DOUT>> dout;
};

/* Where row 0 of a sequence's head is in O and dO. */
struct row_places {
    fa_i64 o, dout;
};

FA_DEVICE row_places places_of_rows(const fa_args &args, const sequence &s, int head)
{
    return {s.q_entry * args.o.stride[0] + s.q_row * args.o.stride[1] + head * args.o.stride[2],
            s.q_entry * args.dout.stride[0] + s.q_row * args.dout.stride[1] + head * args.dout.stride[2]};
}

FA_DEVICE void load_piece(row_piece &piece, const fa_args &args, const row_places &from, int i, int col)
{
    load_raw<FA_DTYPE_O>(piece.o, args.o, from.o + i * args.o.stride[1], col, args.head_dim_v);
    load_raw<FA_DTYPE_DOUT>(piece.dout, args.dout, from.dout + i * args.dout.stride[1], col, args.head_dim_v);
}

/* A thread's part of delta, and 0, or NaN where dO is not finite. */
struct row_sums {
    float delta, nothing;
};

FA_DEVICE void add_piece(row_sums &own, const row_piece &piece)
{
    float o[8], dout[8];
    unpack_eight<FA_DTYPE_O>(o, piece.o);
    unpack_eight<FA_DTYPE_DOUT>(dout, piece.dout);
    round_to_operand(dout);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        own.delta += o[c] != 0.0f ? o[c] * dout[c] : 0.0f; /* a row that sees nothing has O 0, whatever dO holds */
        own.nothing = dout[c] * 0.0f + own.nothing;
    }
}

/* delta of rows, which each of a row's LANES threads gets. Where dO is not finite in a column for which O is 0, delta is not either, or, if it is 0, it is -0,
 * which it is for no other reason: the query may see no key, and then its delta is 0. */
template <int LANES, int ROWS> FA_DEVICE void deltas_of(float (&delta)[ROWS], const row_sums (&own)[ROWS])
{
    bool odd = false;
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
        delta[n] = sum_of_lanes<LANES>(own[n].delta + own[n].nothing);
        odd |= !finite(delta[n]);
    }
    if (__any_sync(0xFFFFFFFFu, odd))
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            if (sum_of_lanes<LANES>(own[n].delta) == 0.0f && !finite(delta[n]))
                delta[n] = -0.0f;
}

/* delta of query i; 0 where it does not exist. */
template <int LANES> FA_DEVICE float row_delta(const fa_args &args, const sequence &s, int head, int i)
{
    row_sums own[1] = {};
    float    delta[1];
    if (i < s.seqlen_q)
        for (int col = threadIdx.x % LANES * 8; col < args.head_dim_v; col += LANES * 8) {
            row_piece piece;
            load_piece(piece, args, places_of_rows(args, s, head), i, col);
            add_piece(own[0], piece);
        }
    deltas_of<LANES>(delta, own);
    return delta[0];
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

/* An element of dbias: all its terms, in the order of the sequences, heads, queries and keys. */
FA_DEVICE float sum_of_dbias(const fa_args &args, const float *from)
{
    const int    *terms  = args.dbias_terms;
    const fa_i64 *stride = args.dbias.stride;
    float         sum    = 0.0f;
    for (int b = 0; b < terms[0]; b++)
        for (int h = 0; h < terms[1]; h++)
            for (int i = 0; i < terms[2]; i++)
                for (int j = 0; j < terms[3]; j++)
                    sum += from[b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]];
    return sum;
}

/* The row-th row of dbias by LANES neighbouring threads, if there is one: an extent may be 0. */
template <int LANES> FA_DEVICE void convert_dbias(const fa_args &args, fa_i64 row)
{
    if (row >= (fa_i64)args.dbias_extent[0] * args.dbias_extent[1] * args.dbias_extent[2])
        return;
    int          lane = threadIdx.x % LANES;
    fa_i64       i2 = row % args.dbias_extent[2], i1 = row / args.dbias_extent[2] % args.dbias_extent[1], i0 = row / args.dbias_extent[2] / args.dbias_extent[1];
    fa_i64       to = i0 * args.dbias_out.stride[0] + i1 * args.dbias_out.stride[1] + i2 * args.dbias_out.stride[2];
    if (args.dbias_direct) { /* what was not seen has been left out */
        sequence   s    = sequence_at(args, i0);
        row_limits seen = row_limits_of(window_of(args), s, {0, s.seqlen_k}, i2);
        for (int j = lane; j < args.dbias_extent[3]; j += LANES)
            if (i2 >= s.seqlen_q || j < seen.first || j > seen.last)
                ((fa_u16 *)args.dbias_out.data)[to + j] = 0;
        return;
    }
    const float *from = (const float *)args.dbias.data + i0 * args.dbias.stride[0] + i1 * args.dbias.stride[1] + i2 * args.dbias.stride[2];
    for (int j = lane; j < args.dbias_extent[3]; j += LANES)
        store_element(args.dbias_out.data, to + j * args.dbias_out.stride[3], args.dbias_out.dtype, sum_of_dbias(args, from + j * args.dbias.stride[3]));
}

#endif
