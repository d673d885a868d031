/*
 * flash_attn_merge: results over disjoint sets of keys into one,
 *     LSE = log sum_n exp(LSE_n),    O = sum_n exp(LSE_n - LSE) O_n.
 * The result may be part 0: every element is read before it is written, by the same lane.
 * Parts without LSE are added up, each with weight 1.
 */
#include "numbers.cuh"

struct merged_row {
    int b, i, h;
};

FA_DEVICE float part_lse(const fa_merge_part &part, merged_row r)
{
    return part.lse[r.b * part.lse_stride[0] + r.h * part.lse_stride[1] + r.i * part.lse_stride[2]];
}

FA_DEVICE fa_i64 offset_of(const fa_view &o, merged_row r)
{
    return r.b * o.stride[0] + r.i * o.stride[1] + r.h * o.stride[2];
}

FA_DEVICE bool is_plain(const fa_merge_args &args) { return args.num_parts > 0 && !args.part[0].lse; }

/* Behind the barrier, for part 0's LSE may be the result's, and other lanes of the row read it. */
FA_DEVICE void store_lse(const fa_merge_args &args, merged_row r, bool writes, float lse)
{
    __syncwarp();
    if (writes && args.result.lse)
        args.result.lse[r.b * args.result.lse_stride[0] + r.h * args.result.lse_stride[1] + r.i * args.result.lse_stride[2]] = lse;
}

/* ---- any strides, any number of parts: a warp a row, a lane an element ---- */

FA_DEVICE void merge_elements(const fa_merge_args &args, fa_i64 n, int lane)
{
    if (n >= (fa_i64)args.batch * args.seqlen_q * args.heads)
        return;
    merged_row r = {(int)(n / args.seqlen_q / args.heads), (int)(n % args.seqlen_q), (int)(n / args.seqlen_q % args.heads)};

    /* Each lane holds one part's LSE: FA_MERGE_MAX_PARTS is 32. */
    bool  plain = is_plain(args);
    float own   = lane >= args.num_parts ? -infinity() : plain ? 0.0f : part_lse(args.part[lane], r), maximum = own;
    for (int step = 16; step > 0; step /= 2) /* passes NaN over; the sum below does not */
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    float shift = maximum == -infinity() ? 0.0f : maximum; /* all empty: 0 in place of -inf, or the difference is NaN */
    float sum   = expf(own - shift);
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    float lse    = sum == 0.0f ? -infinity() : shift + logf(sum);
    float weight = own == -infinity() ? 0.0f : plain ? 1.0f : expf(own - lse);

    const fa_view &o = args.result.o;
    for (int first = 0; first < args.head_dim_v; first += 32) {
        int   col   = first + lane;
        float total = 0.0f;
        for (int part = 0; part < args.num_parts; part++) {
            float          w    = __shfl_sync(~0u, weight, part);
            const fa_view &from = args.part[part].o;
            bool           used = __shfl_sync(~0u, own, part) != -infinity(); /* an empty part's O may be anything */
            if (used && col < args.head_dim_v)
                total += w * load_element(from.data, offset_of(from, r) + col * from.stride[3], from.dtype);
        }
        if (col < args.head_dim_v)
            store_element(o.data, offset_of(o, r) + col * o.stride[3], o.dtype, total);
    }
    store_lse(args, r, lane == 0, lse);
}

/* ---- rows of whole pieces, few parts: args.row_lanes lanes a row, a lane four pieces of args.columns neighbours ---- */

constexpr int PIECES = FA_MERGE_PIECES, FEW = FA_MERGE_FEW_PARTS;

/* first: of the lane's columns; apart: from one piece to the next. */
template <int COLUMNS> FA_DEVICE void load_pieces(uint4 (&piece)[PIECES], const fa_view &from, fa_i64 row, int first, int apart, int end)
{
    if (COLUMNS == 4 && from.dtype == FA_F32) {
        const float *data = (const float *)from.data + row;
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (first + p * apart < end)
                piece[p] = *(const uint4 *)(data + first + p * apart);
        return;
    }
    const fa_u16 *data = (const fa_u16 *)from.data + row;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (first + p * apart < end) {
            if constexpr (COLUMNS == 8) {
                piece[p] = *(const uint4 *)(data + first + p * apart);
            } else {
                uint2 four = *(const uint2 *)(data + first + p * apart);
                piece[p]   = make_uint4(four.x, four.y, 0, 0);
            }
        }
}

template <int COLUMNS, int DTYPE> FA_DEVICE void add_halves(float (&total)[COLUMNS], const unsigned (&word)[4], float weight)
{
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; n++) {
        float2 two = unpack<DTYPE>(word[n]);
        total[2 * n] += weight * two.x;
        total[2 * n + 1] += weight * two.y;
    }
}

template <int COLUMNS> FA_DEVICE void add_piece(float (&total)[COLUMNS], uint4 piece, int dtype, float weight)
{
    unsigned word[4] = {piece.x, piece.y, piece.z, piece.w};
    if (COLUMNS == 4 && dtype == FA_F32) {
#pragma unroll
        for (int n = 0; n < 4; n++)
            total[n] += weight * float_of_bits(word[n]);
    } else if (dtype == FA_BF16)
        add_halves<COLUMNS, FA_BF16>(total, word, weight);
    else
        add_halves<COLUMNS, FA_F16>(total, word, weight);
}

template <int COLUMNS> FA_DEVICE void store_piece(const fa_view &to, fa_i64 index, const float (&v)[COLUMNS])
{
    if constexpr (COLUMNS == 8)
        *(uint4 *)((fa_u16 *)to.data + index) =
            to.dtype == FA_BF16 ? make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]))
                                : make_uint4(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
    else
        store_four(to.data, index, to.dtype, make_float4(v[0], v[1], v[2], v[3]), 1.0f);
}

struct few_weights {
    float own[FEW], weight[FEW], lse;
};

/* As merge_elements has them, bit by bit: a warp's shuffles add four parts in this order. */
FA_DEVICE few_weights weights_of(const fa_merge_args &args, merged_row r)
{
    few_weights w;
    bool        plain   = is_plain(args);
    float       maximum = -infinity(), term[FEW];
#pragma unroll
    for (int n = 0; n < FEW; n++) {
        w.own[n] = n >= args.num_parts ? -infinity() : plain ? 0.0f : part_lse(args.part[n], r);
        maximum  = fmaxf(maximum, w.own[n]);
    }
    float shift = maximum == -infinity() ? 0.0f : maximum;
#pragma unroll
    for (int n = 0; n < FEW; n++)
        term[n] = n < args.num_parts ? expf(w.own[n] - shift) : 0.0f;
    float sum = (term[0] + term[2]) + (term[1] + term[3]);
    w.lse     = sum == 0.0f ? -infinity() : shift + logf(sum);
#pragma unroll
    for (int n = 0; n < FEW; n++)
        w.weight[n] = w.own[n] == -infinity() ? 0.0f : plain ? 1.0f : expf(w.own[n] - w.lse);
    return w;
}

/* O of an empty part is read, as that of its neighbours, but counts nothing. */
template <int COLUMNS> FA_DEVICE void merge_columns(const fa_merge_args &args, merged_row r, const few_weights &w, int first, int apart)
{
    constexpr int AT_ONCE = COLUMNS == 4 ? 2 : 1; /* parts on their way: registers */
    float         total[PIECES][COLUMNS] = {};
#pragma unroll
    for (int begin = 0; begin < FEW; begin += AT_ONCE) {
        uint4 piece[AT_ONCE][PIECES] = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (begin + n < args.num_parts)
                load_pieces<COLUMNS>(piece[n], args.part[begin + n].o, offset_of(args.part[begin + n].o, r), first, apart, args.head_dim_v);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (w.own[begin + n] != -infinity())
#pragma unroll
                for (int p = 0; p < PIECES; p++)
                    add_piece<COLUMNS>(total[p], piece[n][p], args.part[begin + n].o.dtype, w.weight[begin + n]);
    }
    fa_i64 row = offset_of(args.result.o, r);
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (first + p * apart < args.head_dim_v)
            store_piece<COLUMNS>(args.result.o, row + first + p * apart, total[p]);
}

/* Rows as O mostly has them, heads side by side. A row's lanes are of one warp. */
template <int COLUMNS> FA_DEVICE void merge_pieces(const fa_merge_args &args, unsigned warp, int lane)
{
    int         lanes = args.row_lanes, rows = 32 / lanes, of_warp = lane / lanes, own = lane % lanes;
    unsigned    n = warp * rows + of_warp, heads = args.heads, queries = args.seqlen_q;
    merged_row  r    = {(int)(n / heads / queries), (int)(n / heads % queries), (int)(n % heads)};
    bool        some = of_warp < rows && n < args.batch * queries * heads;
    few_weights w    = {};
    if (some) {
        w = weights_of(args, r);
        for (int first = own * COLUMNS; first < args.head_dim_v; first += PIECES * lanes * COLUMNS)
            merge_columns<COLUMNS>(args, r, w, first, lanes * COLUMNS);
    }
    store_lse(args, r, some && own == 0, w.lse);
}

/* Six blocks a multiprocessor: 80 registers, with which nothing spills. */
extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 6) merge(const __grid_constant__ fa_merge_args args)
{
    fa_i64 warp = (fa_i64)blockIdx.x * FA_WARPS + threadIdx.x / 32;
    int    lane = threadIdx.x % 32;
    if (args.columns == 8)
        merge_pieces<8>(args, (unsigned)warp, lane);
    else if (args.columns == 4)
        merge_pieces<4>(args, (unsigned)warp, lane);
    else
        merge_elements(args, warp, lane);
}
