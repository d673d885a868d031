/*
 * How Hopper's kernels keep tiles in shared memory.
 *
 * A tile in shared memory is made of panels: 64 columns of 16 bits, 128 bytes a row, rows one behind the other, each panel
 * 1024-byte aligned. Inside a row the 16-byte chunk c lies at chunk c ^ (row % 8): TMA's 128-byte swizzle, which WGMMA reads.
 * Of FP8 a panel is 128 columns, or 64 where a row has no whole number of those: then chunk c lies at c ^ (row / 2 % 4).
 * FA_HEAD_DIM and FA_HEAD_DIM_V are what products count, multiples of 32; a tile is whole panels all the same, which TMA fills with zeros.
 */
#ifndef FA_PANELS_SM90_CUH
#define FA_PANELS_SM90_CUH

#include "numbers.cuh"

constexpr int ELEMENT_BYTES = FA_DTYPE == FA_F8E4M3 ? 1 : 2;
__device__ constexpr int held_columns(int columns) { return (columns + 63) / 64 * 64; }
__device__ constexpr int panel_bytes(int columns) { return columns * ELEMENT_BYTES % 128 == 0 ? 128 : 64; }

/* A matrix of panels for WGMMA. Start address, "leading" and "stride" offset in units of 16 bytes in bits 0, 16, 32; swizzle
 * in bits 62-63, 1: of 128 bytes, 2: of 64.
 *   Rows are the product's M or N, columns its K (Q, and K of Q K^T): the stride offset is from 8 rows to the next 8; the
 *   leading one is not used, for 16 columns lie in one panel. 16 columns (of FP8 32) on: + 32 bytes; after four of them the next panel.
 *   Rows are the product's K, columns its N (V of P V, "transposed"): the stride offset likewise, 8 keys to the next; the
 *   leading one is from a panel to the next. 16 keys on: + 2048 bytes. */
struct matrix {
    unsigned low, high;

    __device__ __forceinline__ matrix from(int bytes) const { return {low + (bytes >> 4), high}; } /* addresses are below 2^18: no carry */
    __device__ __forceinline__ unsigned long long word() const { return (unsigned long long)high << 32 | low; }
};

template <int ROW_BYTES = 128> FA_DEVICE matrix matrix_of(unsigned address, unsigned leading)
{
    return {(address & 0x3FFFF) >> 4 | (leading >> 4) << 16, 8 * ROW_BYTES >> 4 | (ROW_BYTES == 128 ? 1u : 2u) << 30};
}

#endif
