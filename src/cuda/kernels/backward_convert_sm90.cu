/*
 * After backward_sm90.cu: its float dQ becomes the caller's. A block has a tile of queries of one head, a warp 16 rows x 64 columns at once, which
 * it finds in the order of an accumulator; of 80 or 48 queries 8 rows x 64 columns, in the order of a dQ^T. Where no key was seen there is none, and dQ is 0.
 * Where blocks have shared key heads, other blocks add up their dK and dV, in the order of the shares; more of them bring dbias to the caller, a warp a row.
 */
#include "backward_rows.cuh"
#include "fragment_sm90.cuh"
#include "packed_sm90.cuh"

constexpr bool DQ_TURNED = FA_TILE_Q == 80 || FA_TILE_Q == 48;
constexpr bool HALF      = FA_HEAD_DIM == 96; /* of the second panel */
constexpr int  PIECES    = FA_TILE_Q / (DQ_TURNED ? 8 : 16) * (held_columns(FA_HEAD_DIM) / 64); /* of a warp */
static_assert(DQ_TURNED || PIECES % 4 == 0, "a consumer has four warps");

constexpr bool THIRD_SHARED = DQ_TURNED && FA_HEAD_DIM == 192;
constexpr int  PANEL_PIECES = FA_TILE_Q / 8; /* of a dQ^T's 64 columns */

FA_DEVICE float4 load_piece(const float4 *from, bool there) { return there ? __ldcs(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

/* This warp's pieces of dQ^T: lane 4 g + t has of 16 columns the g-th and the one 8 on, of rows 2 t and 2 t + 1. */
FA_DEVICE void convert_turned(const fa_args &args, const sequence &s, const float4 *all, int first, int head, bool there)
{
    int   lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    float f    = args.scale * args.dropout.keep_scale;
    for (int piece = threadIdx.x / 32; piece < PIECES; piece += FA_WARPS) {
        int col = piece / PANEL_PIECES * 64, row = first + piece % PANEL_PIECES * 8;
        if (THIRD_SHARED) { /* a consumer's pieces are those of a panel, and of the third half */
            int half = piece % (PIECES / 2) - PANEL_PIECES, group = piece / (PIECES / 2);
            col = half < 0 ? group * 64 : 128;
            row = first + (half < 0 ? half + PANEL_PIECES : group * (PANEL_PIECES / 2) + half) * 8;
        }
        float4 x[4];
        int    in_half = HALF && col > 0 ? piece - PANEL_PIECES : -1;
#pragma unroll
        for (int w = 0; w < 4; w++)
            x[w] = load_piece(all + piece * 128 - max(in_half, 0) * 64 + w * 32 + lane, there && (w < 2 || in_half < 0));
        fa_i64 at = s.q_entry * args.dq.stride[0] + (s.q_row + row) * args.dq.stride[1] + head * args.dq.stride[2] + col;
        if (args.dq.dtype == FA_F32) {
#pragma unroll
            for (int n = 0; n < 16; n++) { /* 16 columns, their halves, two rows */
                int i = 2 * t + n % 2, j = n / 4 * 16 + n / 2 % 2 * 8 + g;
                if (row + i < s.rows_q && col + j < args.head_dim)
                    ((float *)args.dq.data)[at + i * args.dq.stride[1] + j] = (&x[n / 4].x)[n % 4] * f;
            }
            continue;
        }
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            unsigned a[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float4 y = x[w + n / 2];
                a[n]     = transpose_matrix(n % 2 ? pack<FA_DTYPE>(y.z * f, y.w * f) : pack<FA_DTYPE>(y.x * f, y.y * f)); /* row g, columns 2 t, + 1 of eight */
            }
            transpose_quad(a);
            int j = w * 16 + t * 8;
            if (row + g < s.rows_q && col + j < args.head_dim)
                *(uint4 *)((fa_u16 *)args.dq.data + at + g * args.dq.stride[1] + j) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

/* A row of dK or dV by LANES neighbouring threads: all its shares, which lie one behind the other. */
template <int LANES, int COLS> FA_DEVICE void add_shares(const fa_view &to, const fa_view &stored, fa_i64 at, fa_i64 from, int shares, int cols)
{
    if (!to.data)
        return;
    for (int col = threadIdx.x % LANES * 8; col < cols; col += LANES * 8) {
        const float4 *x      = (const float4 *)((const float *)stored.data + from + col);
        float         sum[8] = {};
#pragma unroll 2
        for (int share = 0; share < shares; share++) {
            float4 a = __ldcs(x + share * (COLS / 4)), b = __ldcs(x + share * (COLS / 4) + 1);
            sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
            sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
        }
        if (to.dtype == FA_F32) {
#pragma unroll
            for (int n = 0; n < 8; n += 4)
                *(float4 *)((float *)to.data + at + col + n) = make_float4(sum[n], sum[n + 1], sum[n + 2], sum[n + 3]);
        } else
            *(uint4 *)((fa_u16 *)to.data + at + col) =
                make_uint4(pack<FA_DTYPE>(sum[0], sum[1]), pack<FA_DTYPE>(sum[2], sum[3]), pack<FA_DTYPE>(sum[4], sum[5]), pack<FA_DTYPE>(sum[6], sum[7]));
    }
}

/* The n-th FA_SHARED_ROWS rows of keys of a head, heads side by side. A tensor map has no 2^31 rows. */
FA_DEVICE void add_shares_of_rows(const fa_args &args, unsigned n)
{
    constexpr int LANES  = 8;
    unsigned      tokens = args.kv_entries * args.kv_rows, head = n % args.heads_k, first = n / args.heads_k * FA_SHARED_ROWS;
    fa_i64        share  = (fa_i64)head * args.group_blocks;
    if (args.cu_seqlens_k)
        tokens = clamp_int(args.cu_seqlens_k[args.batch], 0, tokens); /* behind these are rows of no sequence */
    for (unsigned token = first + threadIdx.x / LANES; token < tokens && token < first + FA_SHARED_ROWS; token += 32 * FA_WARPS / LANES) {
        unsigned entry = token / args.kv_rows, row = token - entry * args.kv_rows;
        add_shares<LANES, FA_HEAD_DIM>(args.dk, args.dk_stored, entry * args.dk.stride[0] + row * args.dk.stride[1] + head * args.dk.stride[2],
                                       token * args.dk_stored.stride[1] + share * FA_HEAD_DIM, args.group_blocks, args.head_dim);
        add_shares<LANES, FA_HEAD_DIM_V>(args.dv, args.dv_stored, entry * args.dv.stride[0] + row * args.dv.stride[1] + head * args.dv.stride[2],
                                         token * args.dv_stored.stride[1] + share * FA_HEAD_DIM_V, args.group_blocks, args.head_dim_v);
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) backward_convert_sm90(const __grid_constant__ fa_args args)
{
    unsigned of_queries = (unsigned)args.all_tiles_q * args.heads_q;
    if (blockIdx.x >= of_queries + args.share_blocks) {
        for (int r = threadIdx.x / 32; FA_HAS_DBIAS && r < FA_DBIAS_ROWS; r += FA_WARPS)
            convert_dbias<32>(args, (fa_i64)(blockIdx.x - of_queries - args.share_blocks) * FA_DBIAS_ROWS + r);
        return;
    }
    if (blockIdx.x >= of_queries) {
        add_shares_of_rows(args, blockIdx.x - of_queries);
        return;
    }
    if (!args.dq.data)
        return;
    int        head = blockIdx.x % args.heads_q, number = args.all_tiles_q - 1 - (int)blockIdx.x / args.heads_q; /* heads side by side, as they lie */
    tile_place place = place_of_queries(args, number);
    sequence   s     = sequence_at(args, place.b);
    int        lane  = threadIdx.x % 32, t = lane % 4;
    if (place.tile < 0 || place.tile * FA_TILE_Q >= s.rows_q)
        return;
    bool there = args.dq_turn[(fa_i64)head * args.all_tiles_q + number] != 0;
    if constexpr (DQ_TURNED) {
        convert_turned(args, s, (const float4 *)(args.dq_accum + ((fa_i64)head * args.all_tiles_q + number) * (FA_TILE_Q * FA_HEAD_DIM)), place.tile * FA_TILE_Q, head, there);
        return;
    }
    for (int piece = threadIdx.x / 32; piece < PIECES; piece += FA_WARPS) {
        int           group = piece / 4, row = piece % 4 * 16 + lane / 4, col = 0;
        const float4 *from  = (const float4 *)(args.dq_accum + ((fa_i64)head * args.all_tiles_q + number) * (FA_TILE_Q * FA_HEAD_DIM)) + group * 1024 + piece % 4 * 32 + lane;
        float4        x[8]; /* columns 8 j + 2 t, + 1 of rows `row` and row + 8 */
        if (FA_TILE_Q == 128)
            row += 64 * group;
        else
            col = 64 * group;
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = load_piece(from + 128 * j, there && (j < 4 || !HALF || group == 0));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int    i  = place.tile * FA_TILE_Q + row + 8 * h;
            bool   in = i < s.rows_q;
            fa_i64 at = s.q_entry * args.dq.stride[0] + (s.q_row + i) * args.dq.stride[1] + head * args.dq.stride[2] + col;
            float  f  = args.scale * args.dropout.keep_scale;
            if (args.dq.dtype == FA_F32) {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (in && col + 8 * j < args.head_dim)
                        *(float2 *)((float *)args.dq.data + at + 8 * j + 2 * t) = h ? make_float2(x[j].z * f, x[j].w * f) : make_float2(x[j].x * f, x[j].y * f);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                unsigned a[4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    a[n] = h ? pack<FA_DTYPE>(x[j + n].z * f, x[j + n].w * f) : pack<FA_DTYPE>(x[j + n].x * f, x[j + n].y * f);
                transpose_quad(a);
                if (in && col + 8 * (j + t) < args.head_dim)
                    *(uint4 *)((fa_u16 *)args.dq.data + at + 8 * (j + t)) = make_uint4(a[0], a[1], a[2], a[3]);
            }
        }
    }
}
