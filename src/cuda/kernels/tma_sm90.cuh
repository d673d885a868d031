/* Tiles of panels by TMA. */
#ifndef FA_TMA_SM90_CUH
#define FA_TMA_SM90_CUH

#include "ptx_sm90.cuh"

/* A tile of ROWS rows and COLS columns by TMA, asked for by one thread; its box has ROWS rows. `barrier` must expect
 * ROWS * held_columns(COLS) elements' bytes. */
template <int ROWS, int COLS>
FA_DEVICE void fetch_tile(unsigned tile, const fa_map &map, unsigned barrier, int entry, int head, int first)
{
    constexpr int HELD = held_columns(COLS), BYTES = panel_bytes(HELD);
#pragma unroll
    for (int panel = 0; panel < HELD * ELEMENT_BYTES / BYTES; panel++)
        tma_load(tile + panel * (ROWS * BYTES), map, barrier, BYTES / ELEMENT_BYTES * panel, first, head, entry);
}

/* As fetch_tile, of a ragged map into L2 alone, or into shared memory. */
template <int ROWS, int COLS> FA_DEVICE void prefetch_ragged(const fa_map &map, int head, int end, int left)
{
#pragma unroll
    for (int panel = 0; panel < held_columns(COLS) / 64; panel++)
        tma_prefetch_ragged(map, 64 * panel, left, head, end);
}

template <int ROWS, int COLS>
FA_DEVICE void fetch_ragged(unsigned tile, const fa_map &map, unsigned barrier, int head, int end, int left)
{
#pragma unroll
    for (int panel = 0; panel < held_columns(COLS) / 64; panel++)
        tma_load_ragged(tile + panel * (ROWS * 128), map, barrier, 64 * panel, left, head, end);
}

#endif
