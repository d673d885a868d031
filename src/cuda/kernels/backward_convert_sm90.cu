/*
 * After backward_sm90.cu: its float dQ becomes the caller's. A block has a tile of queries of one head, a warp 16 rows x 64 columns at once, which
 * it finds in the order of an accumulator. Where no key was seen there is none, and dQ is 0.
 */
#include "fragment_sm90.cuh"
#include "packed_sm90.cuh"

constexpr int PIECES = FA_TILE_Q / 16 * (FA_HEAD_DIM / 64); /* of a warp */
static_assert(PIECES % 8 == 0, "two consumers of four warps");

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) backward_convert_sm90(const __grid_constant__ fa_args args)
{
    int        head = blockIdx.x % args.heads_q, number = args.all_tiles_q - 1 - (int)blockIdx.x / args.heads_q; /* heads side by side, as they lie */
    tile_place place = place_of_queries(args, number);
    sequence   s     = sequence_at(args, place.b);
    int        lane  = threadIdx.x % 32, t = lane % 4;
    if (place.tile < 0 || place.tile * FA_TILE_Q >= s.rows_q)
        return;
    bool there = args.dq_turn[(fa_i64)head * args.all_tiles_q + number] != 0;
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
            x[j] = there ? __ldcs(from + 128 * j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
