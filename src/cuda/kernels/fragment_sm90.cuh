/* What Hopper's kernels share beside the instructions: threads of a warpgroup and their part of an accumulator. */
#ifndef FA_FRAGMENT_SM90_CUH
#define FA_FRAGMENT_SM90_CUH

#include "tma_sm90.cuh"

/* A number that is the same for all lanes, so that the compiler knows it: what branches by it stays together, and addresses that come
 * of it are found once a warp. */
FA_DEVICE int same_for_all(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

/* This warp has done with a stage. */
FA_DEVICE void release(unsigned empty)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(empty);
}

/* Waiting for a stage to be filled for the n-th time and, with the other parity, for it to be free, which it is at first. */
template <int STAGES> FA_DEVICE unsigned filled(unsigned n) { return n / STAGES & 1; }
template <int STAGES> FA_DEVICE unsigned freed(unsigned n) { return filled<STAGES>(n) ^ 1; }

/* The first of a thread's two rows, in its warpgroup's 64. */
FA_DEVICE int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

/* Four words of each of four lanes that are neighbours: word w of lane t becomes word t of lane w. */
FA_DEVICE void transpose_quad(unsigned (&a)[4])
{
#pragma unroll
    for (int stride = 1; stride < 4; stride *= 2) {
        bool upper = threadIdx.x & stride;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & stride) == 0) {
                unsigned got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a[i] : a[i + stride], stride);
                a[i]          = upper ? got : a[i];
                a[i + stride] = upper ? a[i + stride] : got;
            }
    }
}

/* 1 / x of four by one reciprocal, which takes as long as an exponential. Their product must be finite; a NaN reaches all. */
FA_DEVICE void reciprocals(float &a, float &b, float &c, float &d)
{
    float ab = a * b, cd = c * d, all = reciprocal(ab * cd), of_ab = all * cd, of_cd = all * ab, old_a = a, old_c = c;
    a = of_ab * b;
    b = of_ab * old_a;
    c = of_cd * d;
    d = of_cd * old_c;
}

/* Columns that stay in registers as left operands, in 16 bits: of a warpgroup's 64 rows, from the `first` of a tile of X_ROWS on, the first 16 (ALL - 1); the last place is
 * nothing, for no array has no elements. */
template <int X_ROWS, int ALL> FA_DEVICE void load_held(unsigned (&held)[ALL][4], unsigned tile, int first)
{
    int lane = threadIdx.x % 32, row = first + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < ALL - 1; step++)
        load_matrix(held[step], tile + step / 4 * (X_ROWS * 128) + row * 128 + ((step % 4 * 2 + lane / 16 ^ row % 8) << 4));
}

template <int ALL> FA_DEVICE void hold_held(unsigned (&held)[ALL][4])
{
    if constexpr (ALL > 1)
        hold(reinterpret_cast<unsigned(&)[ALL - 1][4]>(held));
}

/* s = X Y^T, started here, finished by wgmma_wait. x, y: rows of tiles that have X_ROWS and Y_ROWS in all, and COLS columns, of which `held` has the first of X's. */
template <int X_ROWS, int Y_ROWS, int COLS = FA_HEAD_DIM, int COUNT, int ALL>
FA_DEVICE void start_rows_by_rows(float (&s)[COUNT], unsigned (&held)[ALL][4], unsigned x, unsigned y)
{
    constexpr int PANEL = panel_bytes(held_columns(COLS)), STEPS = PANEL / 32; /* of a panel */
    matrix a = matrix_of<PANEL>(x, 0), b = matrix_of<PANEL>(y, 0);
    hold(s);
    hold_held(held);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < COLS * ELEMENT_BYTES / 32; step++) {
        matrix of_y = b.from(step / STEPS * (Y_ROWS * PANEL) + step % STEPS * 32);
        if constexpr (ALL > 1)
            if (step < ALL - 1) {
                wgmma_registers<0>(s, held[step], of_y, step > 0);
                continue;
            }
        wgmma_shared(s, a.from(step / STEPS * (X_ROWS * PANEL) + step % STEPS * 32), of_y, step > 0);
    }
    wgmma_commit();
}

template <int X_ROWS, int Y_ROWS, int COLS = FA_HEAD_DIM, int COUNT> FA_DEVICE void start_rows_by_rows(float (&s)[COUNT], unsigned x, unsigned y)
{
    unsigned none[1][4];
    start_rows_by_rows<X_ROWS, Y_ROWS, COLS>(s, none, x, y);
}

/* Bit 7 of each E4M3 that is NaN. */
FA_DEVICE unsigned nan_of_e4m3(unsigned four) { return (four & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u; }

FA_DEVICE void note_nonfinite_word(unsigned &note, unsigned word)
{
    if constexpr (FA_DTYPE == FA_F8E4M3)
        note |= nan_of_e4m3(word);
    else
        note_nonfinite(note, word);
}

FA_DEVICE unsigned finite_word(unsigned word)
{
    return FA_DTYPE == FA_F8E4M3 ? word & ~((nan_of_e4m3(word) >> 7) * 0xFFu) : without_nonfinite(word);
}

/* ---- Inf and NaN in a tile of BYTES, of which each lane sees 16 bytes, then those STRIDE on; `from`: its first ---- */

/* True if this lane's part holds some. Loads in flight together: somebody waits for this. */
template <int BYTES, int STRIDE> FA_DEVICE bool holds_nonfinite(unsigned from)
{
    unsigned note = 0;
#pragma unroll 4
    for (int offset = 0; offset < BYTES; offset += STRIDE) {
        uint4 v = shared_load_16(from + offset);
        note_nonfinite_word(note, v.x);
        note_nonfinite_word(note, v.y);
        note_nonfinite_word(note, v.z);
        note_nonfinite_word(note, v.w);
    }
    return FA_DTYPE == FA_F8E4M3 ? note != 0 : (note & 0x7FFF7FFFu) != 0; /* not +-0 in both halves */
}

/* They become zeros. Rare. */
template <int BYTES, int STRIDE> FA_DEVICE void clear_nonfinite_of_lane(unsigned from)
{
#pragma unroll 1
    for (int offset = 0; offset < BYTES; offset += STRIDE) {
        uint4 v = shared_load_16(from + offset);
        shared_store(from + offset, make_uint4(finite_word(v.x), finite_word(v.y), finite_word(v.z), finite_word(v.w)));
    }
}

#endif
