/* forward_sm90.cu: keys in pages. A tile is fetched in pieces of args.page_piece rows, which divides both a page and a tile, a lane a piece. */
#ifndef FA_PAGES_SM90_CUH
#define FA_PAGES_SM90_CUH

#include "work_sm90.cuh"

/* A lane's piece. Page -1: TMA finds no such page and brings zeros, as it does for every id that is out of range. */
struct page_piece {
    int page, row;
};

/* Of step `step`. Only pages that hold keys of the work are looked up: entries past them may be anything. */
FA_DEVICE page_piece piece_of_lane(const fa_args &args, const work &w, int step)
{
    int first = (w.right - step) * FA_TILE_K + (int)threadIdx.x % 32 * args.page_piece, page = first / args.kv_rows;
    if (first >= w.keys.end || first + args.page_piece <= w.keys.begin)
        return {-1, 0};
    return {args.page_table[w.b * args.page_row_stride + page], first - page * args.kv_rows};
}

/* By a whole warp, after its first lane has told `barrier` what it is to expect. */
template <int COLS> FA_DEVICE void fetch_pages(const fa_args &args, unsigned tile, const fa_map &map, unsigned barrier, page_piece piece, int head)
{
    int row = (int)threadIdx.x % 32 * args.page_piece; /* of the tile */
    __syncwarp();
    if (row < FA_TILE_K)
#pragma unroll
        for (int panel = 0; panel < COLS / 64; panel++)
            tma_load(tile + panel * (FA_TILE_K * 128) + row * 128, map, barrier, 64 * panel, piece.row, head, piece.page);
}

#endif
