/* forward_sm90.cu, whose barriers and tiles it names: planner and producer where keys are in pages. A tile is fetched in pieces of args.page_piece rows,
 * which divides both a page and a tile; each lane looks up one. K and V have a warp each. */
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

/* By a whole warp, after its first lane has told `barrier` what it is to expect. TMA takes numbers of a warp, not of lanes: of few panels each lane asks
 * for its own, one after the other; of many one lane asks for all, which others tell it of, two pieces at once (decision 0061). */
template <int COLS> FA_DEVICE void fetch_pages(const fa_args &args, unsigned tile, const fa_map &map, unsigned barrier, page_piece piece, int head)
{
    constexpr int PANELS = COLS / 64, AT_ONCE = 2;
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

/* Tile n of an item, of K or V, by a whole warp; `tile` counts them since the kernel began. */
template <bool VALUES> FA_DEVICE void fetch_paged_tile(const fa_args &args, const fa_map &map, const work &w, int n, unsigned tile)
{
    unsigned   full = VALUES ? v_full(tile) : k_full(tile);
    page_piece piece = piece_of_lane(args, w, n); /* comes while a stage is waited for */
    barrier_wait(VALUES ? v_empty(tile) : k_empty(tile), freed<VALUES ? V_STAGES : FA_STAGES>(tile));
    if (threadIdx.x % 32 == 0)
        barrier_expect(full, VALUES ? V_BYTES : K_BYTES);
    fetch_pages<VALUES ? FA_HEAD_DIM_V : FA_HEAD_DIM>(args, VALUES ? v_tile(tile) : k_tile(tile), map, full, piece, w.kv_head);
}

/* Items are found two ahead, when values of this one fill all stages; Q of the next one comes as soon as it has a stage. */
FA_DEVICE void plan(const fa_args &args, const fa_maps &maps)
{
    unsigned tile = 0;
    for (int item = -2; item < 0 || has_item(args, item); item++) {
        if (threadIdx.x == 0 && (Q_STAGES > 1 ? item >= -1 : item == -1) && has_item(args, item + 1))
            fetch_queries(maps, item + 1);
        __syncwarp();
        if (item >= 0) {
            const work &w = work_at(item);
            for (int n = 0; n < w.tiles; n++, tile++)
                fetch_paged_tile<true>(args, maps.v, w, n, tile);
        }
        if (threadIdx.x == 0 && has_item(args, item + 2))
            find_item(args, item + 2);
        if (threadIdx.x == 0 && Q_STAGES == 1 && item >= 0 && has_item(args, item + 1))
            fetch_queries(maps, item + 1);
        __syncwarp();
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned tile = 0;
    for (unsigned item = 0; has_item(args, item); item++) {
        barrier_wait(found(item), filled<WORKS>(item));
        const work &w = work_at(item);
        for (int n = 0, tiles = w.tiles; n < tiles; n++, tile++)
            fetch_paged_tile<false>(args, maps.k, w, n, tile);
        release(asked(item));
    }
}

#endif
