/*
 * A bias in Hopper's own kernels: it comes by TMA tile by tile, like K, [queries][keys] in panels of 128 bytes a row, or of 32 where a tile of keys is no whole number of those (then chunk c of
 * a row lies at c ^ (row / 4 % 2)). Where it is the same for all queries a tile has one row; for all heads or sequences the map has one.
 */
#ifndef FA_BIAS_SM90_CUH
#define FA_BIAS_SM90_CUH

#include "fragment_sm90.cuh"

constexpr int  BIAS_ELEMENT = FA_DTYPE_BIAS == FA_F32 ? 4 : 2, BIAS_BYTES = FA_HAS_BIAS ? FA_TILE_Q * FA_TILE_K * BIAS_ELEMENT : 0;
constexpr int  BIAS_ROW = FA_TILE_K * BIAS_ELEMENT % 128 == 0 ? 128 : 32, BIAS_COLUMNS = BIAS_ROW / BIAS_ELEMENT; /* of a panel */
constexpr bool F32_BIAS = FA_HAS_BIAS && FA_DTYPE_BIAS == FA_F32;
static_assert(FA_TILE_K % BIAS_COLUMNS == 0 || !FA_HAS_BIAS, "whole panels");

FA_DEVICE bool has_one_row(const fa_args &args) { return args.bias.stride[2] == 0; }

/* By the producer, into a stage that is free. */
FA_DEVICE void fetch_bias_tile(const fa_args &args, const fa_maps &maps, unsigned tile, unsigned full, int b, int head, int first_q, int first_k)
{
    barrier_expect(full, has_one_row(args) ? FA_TILE_K * BIAS_ELEMENT : BIAS_BYTES);
#pragma unroll
    for (int panel = 0; panel < FA_TILE_K / BIAS_COLUMNS; panel++)
        tma_load(tile + panel * (FA_TILE_Q * BIAS_ROW), maps.bias, full, first_k + panel * BIAS_COLUMNS, has_one_row(args) ? 0 : first_q, args.bias.stride[1] ? head : 0,
                 args.bias.stride[0] ? b : 0);
}

/* Where a lane reads by ldmatrix for 16 queries from `first` on and the keys of chunks `chunk` and the next: of these the upper half of the lanes has the second. */
FA_DEVICE unsigned bias_at(const fa_args &args, unsigned tile, int first, int chunk)
{
    int lane = threadIdx.x % 32, row = has_one_row(args) ? 0 : first + lane % 16, at = lane / 16;
    if constexpr (BIAS_ROW == 128)
        return tile + chunk / 8 * (FA_TILE_Q * 128) + row * 128 + ((chunk % 8 + at ^ row % 8) << 4);
    else
        return tile + chunk / 2 * (FA_TILE_Q * 32) + row * 32 + ((at ^ row / 4 % 2) << 4);
}

/* The same for elements with keys down: 16 queries from 8 j on, and of the keys the second chunk in each second eight of the lanes. */
FA_DEVICE unsigned turned_bias_at(const fa_args &args, unsigned tile, int j, int chunk)
{
    int lane = threadIdx.x % 32, row = has_one_row(args) ? 0 : 8 * j + lane / 16 * 8 + lane % 8;
    return tile + chunk / 8 * (FA_TILE_Q * 128) + row * 128 + ((chunk % 8 + lane / 8 % 2 ^ row % 8) << 4);
}

/* A float of it. */
FA_DEVICE unsigned bias_float_at(const fa_args &args, unsigned tile, int query, int key)
{
    int row = has_one_row(args) ? 0 : query;
    return tile + key / 32 * (FA_TILE_Q * 128) + row * 128 + ((key % 32 / 4 ^ row % 8) << 4) + key % 4 * 4;
}

#endif
