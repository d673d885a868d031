/*
 * How Hopper's forward for float32 sees Q, K and V: x = 2^e (high + low), two float16 of 11 bits each, which hold 22 of x's 24 bits and a sign more, so that
 * a product is three of the tensor cores', high high + high low + low high, but for 2^-23 of it (three planes of bfloat16 take six: decisions 0043, 0085).
 *
 * float16 has few exponents, so e is chosen where numbers meet: of Q one for each row, of K and V one for each tile of keys, such that the largest is
 * below 2^15. What is smaller than 2^-17 of that loses bits, all of it at 2^-40. A tile in which a row is smaller than 2^-20 of another, or which has an Inf or
 * NaN, says so in its note, and the rows that meet it are computed again (far_rows.cuh); so is a row of Q with an Inf or NaN, whose 2^e is NaN.
 *
 * A tile in memory is as shared memory is to hold it: panels (panels_sm90.cuh) of `high`, then of `low`, then a note: of Q each row's 2^e, of K and V a tile's and
 * whether rows are to be computed again (0 or 1). Tiles of a head are neighbours, numbered as in packed_sm90.cuh.
 *
 * The backward (FA_VARIANT 1 of planes_sm90.cu) sums over queries too: there a tile of Q or dO has one exponent, in its note behind each row's LSE or delta, and one tile that
 * says so leaves the whole call to the portable kernel (args.lost).
 */
#ifndef FA_PLANES_SM90_CUH
#define FA_PLANES_SM90_CUH

#include "packed_sm90.cuh"
#include "tma_sm90.cuh"

constexpr int NOTE_FLOATS = 32; /* of K and V: 128 bytes, of which the first 16 are fetched; of queries beside a float a row */

template <int ROWS, int COLS, int FLOATS> struct cut_tile {
    static constexpr int PLANE = ROWS * held_columns(COLS) * 2, BYTES = 2 * PLANE, NOTE = FLOATS * 4, APART = BYTES + NOTE;
};
using cut_queries = cut_tile<FA_TILE_Q, FA_HEAD_DIM, FA_TILE_Q + NOTE_FLOATS>;
using cut_dout    = cut_tile<FA_TILE_Q, FA_HEAD_DIM_V, FA_TILE_Q + NOTE_FLOATS>;
using cut_keys    = cut_tile<FA_TILE_K, FA_HEAD_DIM, NOTE_FLOATS>;
using cut_values  = cut_tile<FA_TILE_K, FA_HEAD_DIM_V, NOTE_FLOATS>;

/* Two neighbours, no larger than 2^15. */
FA_DEVICE void cut_two(unsigned &high, unsigned &low, float a, float b)
{
    high        = pack_f16(a, b);
    float2 kept = unpack<FA_F16>(high);
    low         = pack_f16(a - kept.x, b - kept.y);
}

/* The number of a sequence's first tile among a head's. */
FA_DEVICE int first_tile_of_queries(const fa_args &args, int b) { return first_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, b); }
FA_DEVICE int first_tile_of_keys(const fa_args &args, int b) { return first_tile<FA_TILE_K>(args.cu_seqlens_k, args.all_rows_k, args.tiles_k, b); }

/* Tile `number` of those at `tiles`, and so much of its note, by one thread. */
template <class TILE> FA_DEVICE void fetch(unsigned to, unsigned note, int note_bytes, const unsigned char *tiles, fa_i64 number, unsigned full)
{
    const unsigned char *from = tiles + number * TILE::APART;
    barrier_expect(full, TILE::BYTES + note_bytes);
    bulk_load(to, from, TILE::BYTES, full);
    bulk_load(note, from + TILE::BYTES, note_bytes, full);
}

/* ---- three products of planes, small ones first, for tensor cores cut off what they add up (decision 0043): started here, finished by wgmma_wait ---- */
#if FA_ARCH == 90

/* c = A B^T of COLS columns; rows of tiles of A_ROWS and B_ROWS. */
template <int A_ROWS, int A_PLANE, int B_ROWS, int B_PLANE, int COLS, int COUNT> FA_DEVICE void start_cut_rows_by_rows(float (&c)[COUNT], matrix a, matrix b)
{
    hold(c);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
        for (int step = 0; step < COLS / 16; step++)
            wgmma_shared(c, a.from((product == 0 ? A_PLANE : 0) + step / 4 * (A_ROWS * 128) + step % 4 * 32),
                         b.from((product == 1 ? B_PLANE : 0) + step / 4 * (B_ROWS * 128) + step % 4 * 32), product + step > 0);
    wgmma_commit();
}

/* c = A B over 16 STEPS rows of B, down which it lies; A's rows along memory's or, with A_DOWN, down them too. Both in one panel of columns. */
template <int A_DOWN, int A_PLANE, int B_PLANE, int STEPS, int COUNT> FA_DEVICE void start_cut_down(float (&c)[COUNT], matrix a, matrix b)
{
    hold(c);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            wgmma_shared<1, A_DOWN>(c, a.from((product == 0 ? A_PLANE : 0) + step * (A_DOWN ? 2048 : 32)), b.from((product == 1 ? B_PLANE : 0) + step * 2048), product + step > 0);
    wgmma_commit();
}

/* c = A B, A's planes, high and low, in registers; b: down the rows of a tile. */
template <int B_PLANE, int STEPS, int COUNT> FA_DEVICE void start_cut_registers(float (&c)[COUNT], unsigned (&a)[2][STEPS][4], matrix b)
{
    hold(c);
    hold(a[0]);
    hold(a[1]);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            wgmma_registers(c, a[product == 0][step], b.from((product == 1 ? B_PLANE : 0) + step * 2048), product + step > 0);
    wgmma_commit();
}

#endif
#endif
