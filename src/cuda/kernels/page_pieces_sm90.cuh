/* Tiles of keys in pages by TMA, in pieces of args.page_piece rows, which divides both a page and a tile; each lane looks up one. Of the kernel, which includes this behind
 * its block, it names work, the tiles of K and V and their barriers. */
#ifndef FA_PAGE_PIECES_SM90_CUH
#define FA_PAGE_PIECES_SM90_CUH

/* A lane's piece. Page -1: TMA finds no such page and brings zeros, as it does for every id that is out of range. */
struct page_piece {
    int page, row;
};

/* Of tile `tile` of the sequence. Only pages that hold keys of the work are looked up: entries past them may be anything. */
FA_DEVICE page_piece piece_of_lane(const fa_args &args, const work &w, int tile)
{
    int first = tile * FA_TILE_K + (int)threadIdx.x % 32 * args.page_piece, page = first / args.kv_rows;
    if (first >= w.keys.end || first + args.page_piece <= w.keys.begin)
        return {-1, 0};
    return {args.page_table[w.b * args.page_row_stride + page], first - page * args.kv_rows};
}

/* By a whole warp, after its first lane has told `barrier` what it is to expect. TMA takes numbers of a warp, not of lanes: of few panels each lane asks
 * for its own, one after the other; of many one lane asks for all, which others tell it of, two pieces at once (decision 0061). */
template <int COLS> FA_DEVICE void fetch_pages(const fa_args &args, unsigned tile, const fa_map &map, unsigned barrier, page_piece piece, int head)
{
    constexpr int PANELS = held_columns(COLS) / 64, AT_ONCE = 2;
    int           rows = args.page_piece, own = (int)threadIdx.x % 32 * rows; /* first row of the tile */
    __syncwarp();
    if constexpr (PANELS <= 2) {
        if (own < FA_TILE_K)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                tma_load(tile + panel * (FA_TILE_K * 128) + own * 128, map, barrier, 64 * panel, piece.row, head, piece.page);
    } else {
#pragma unroll 1
        for (int row = 0, lane = 0; row < FA_TILE_K; row += AT_ONCE * rows, lane += AT_ONCE) {
            page_piece of[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                of[i] = {__shfl_sync(0xFFFFFFFFu, piece.page, lane + i), __shfl_sync(0xFFFFFFFFu, piece.row, lane + i)};
            if (elected())
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (row + i * rows < FA_TILE_K)
#pragma unroll
                        for (int panel = 0; panel < PANELS; panel++)
                            tma_load(tile + panel * (FA_TILE_K * 128) + (row + i * rows) * 128, map, barrier, 64 * panel, of[i].row, head, of[i].page);
        }
    }
}

/* Of K or V, by a whole warp; `n` counts tiles since the kernel began. */
template <bool VALUES> FA_DEVICE void fetch_paged_tile(const fa_args &args, const fa_map &map, const work &w, int tile, unsigned n)
{
    unsigned   full = VALUES ? v_full(n) : k_full(n);
    page_piece piece = piece_of_lane(args, w, tile); /* comes while a stage is waited for */
    barrier_wait(VALUES ? v_empty(n) : k_empty(n), freed<VALUES ? V_STAGES : K_STAGES>(n));
    if (threadIdx.x % 32 == 0)
        barrier_expect(full, VALUES ? V_BYTES : K_BYTES);
    fetch_pages<VALUES ? FA_HEAD_DIM_V : FA_HEAD_DIM>(args, VALUES ? v_tile(n) : k_tile(n), map, full, piece, w.kv_head);
}

#endif
