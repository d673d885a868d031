/*
 * Block masks (FA_MASK_LISTED): which tiles of keys a tile of queries meets, and of those that it does not see wholly, a bit for each pair.
 * All heads have the same, so it is found once, before the kernel that works by it. One block for each tile. In a list come first a tile that is seen wholly, if there
 * is one, for rows that have seen something need fewer tests (softmax_ahead), then those that are cut, then the others, each from right to left.
 *
 * FA_VARIANT 1 and 2: for the backward, which tiles of queries a tile of keys meets. Blocks that have neighbouring keys begin as far apart as these, and go round the end (FA_DQ_FIRST_COMES). Rows of the masks are queries; with FA_VARIANT 1 keys, for S^T.
 * With FA_DETERMINISTIC they come to a tile of queries in the order of their keys: all begin at the last; and blocks behind those of the lists say which is whose turn.
 */
#include "listed.cuh"
#include "ptx_sm80.cuh"

constexpr bool OF_KEYS = FA_VARIANT > 0, KEYS_DOWN = FA_VARIANT == 1;
constexpr int  THREADS = 32 * FA_WARPS, MOST_NEAR = 256, ROWS = KEYS_DOWN ? FA_TILE_K : FA_TILE_Q, COLUMNS = KEYS_DOWN ? FA_TILE_Q : FA_TILE_K;

/* The slices of a sequence that have some of the tile's rows; more than MOST_NEAR: all of them. */
struct near_slices {
    fa_slice slice[MOST_NEAR];
    int      count;
};

/* A tile of a sequence: of queries, or OF_KEYS of keys. */
struct own_tile {
    sequence seq;
    fa_range slices;
    int      tile;
};

/* Those of the sequence's tiles. */
FA_DEVICE fa_range queries_of(const own_tile &own, int tile) { return {tile * FA_TILE_Q, fa_min_int((tile + 1) * FA_TILE_Q, own.seq.seqlen_q)}; }
FA_DEVICE fa_range keys_of(const own_tile &own, int tile) { return {fa_max_int(tile * FA_TILE_K, own.seq.key_begin), fa_min_int((tile + 1) * FA_TILE_K, own.seq.seqlen_k)}; }

/* Calls look(slice) for each slice near the tile until it says true. */
template <typename LOOK> FA_DEVICE void for_slices(const fa_args &args, const near_slices &near, fa_range all, LOOK look)
{
    const fa_slice *from = near.count <= MOST_NEAR ? near.slice : args.slices + all.begin;
    int             count = near.count <= MOST_NEAR ? near.count : all.end - all.begin;
    for (int n = 0; n < count; n++)
        if (look(from[n]))
            return;
}

/* Of the pairs with another tile are seen 0: none, 1: some, 2: all. A tile that has fewer keys, or in a backward fewer queries, is never seen wholly. */
FA_DEVICE int seen_of_tile(const fa_args &args, const near_slices &near, const own_tile &own, int other)
{
    int      tile_k = OF_KEYS ? own.tile : other;
    fa_range queries = queries_of(own, OF_KEYS ? other : own.tile), keys = keys_of(own, tile_k);
    fa_range some = fa_keys_seen(args.window, own.seq.diagonal, queries, keys);
    if (queries.begin >= queries.end || some.begin >= some.end)
        return 0;
    int seen = 0;
    for_slices(args, near, own.slices, [&](const fa_slice &s) {
        seen = fa_max_int(seen, slice_of_tile(s, queries, keys));
        return seen == 2;
    });
    bool whole = keys.end - keys.begin == FA_TILE_K && (!OF_KEYS || queries.end - queries.begin == FA_TILE_Q) && fa_window_covers(args.window, own.seq.diagonal, queries, keys);
    return whole ? seen : fa_min_int(seen, 1);
}

/* Of a row those of a lane's columns that see it or are seen, the first of which is `first`. */
FA_DEVICE unsigned seen_columns(const fa_args &args, const near_slices &near, const own_tile &own, int row, int first)
{
    unsigned seen = 0;
    fa_range all;
    if (KEYS_DOWN)
        all = fa_queries_seeing(args.window, own.seq.diagonal, {0, own.seq.seqlen_q}, {row, row + 1});
    else
        all = fa_keys_seen(args.window, own.seq.diagonal, {row, row + 1}, {own.seq.key_begin, own.seq.seqlen_k});
    if (KEYS_DOWN ? row < own.seq.key_begin || row >= own.seq.seqlen_k : row >= own.seq.seqlen_q)
        return 0;
    for_slices(args, near, own.slices, [&](const fa_slice &s) {
        fa_range of = KEYS_DOWN ? fa_queries_of_slice(s.q_begin, s.q_end, s.k_begin, s.k_end, s.kind, row) : fa_keys_of_slice(s.q_begin, s.q_end, s.k_begin, s.k_end, s.kind, row);
        int      begin = fa_max_int(of.begin, all.begin), end = fa_min_int(of.end, all.end);
        if (begin < end)
            seen |= columns_below<COLUMNS>(end - first) & ~columns_below<COLUMNS>(begin - first);
        return false;
    });
    return seen;
}

FA_DEVICE void find_near(const fa_args &args, near_slices &near, fa_range all, fa_range rows, bool of_keys)
{
    if (threadIdx.x == 0)
        near.count = 0;
    __syncthreads();
    for (int n = all.begin + threadIdx.x; n < all.end; n += THREADS) {
        fa_slice s = args.slices[n];
        if ((of_keys ? s.k_begin : s.q_begin) >= rows.end || (of_keys ? s.k_end : s.q_end) <= rows.begin)
            continue;
        int place = atomicAdd(&near.count, 1);
        if (place < MOST_NEAR)
            near.slice[place] = s;
    }
    __syncthreads();
}

/* By one warp: the list, of the other tiles in `tiles`. */
FA_DEVICE void write_list(const fa_args &args, const near_slices &near, const own_tile &own, fa_listed *list, fa_range tiles)
{
    int lane = threadIdx.x, whole = 0, cut = 0;
    int  count = tiles.end - tiles.begin, start = own.tile * FA_TILE_K / FA_TILE_Q % count;
    auto tile_at = [&](int n) { return OF_KEYS && !FA_DETERMINISTIC ? tiles.begin + (n + start) % count : tiles.end - 1 - n; };
    auto seen_at = [&](int n) { return n < count ? seen_of_tile(args, near, own, tile_at(n)) : 0; };
    for (int n = 0; n < count; n += 32) {
        int seen = seen_at(n + lane);
        whole += __popc(__ballot_sync(~0u, seen == 2));
        cut += __popc(__ballot_sync(~0u, seen == 1));
    }
    int masks = 0;
    if (lane == 0) {
        list[0]               = {whole + cut, cut + (whole > 0)};
        list[1 + whole + cut] = {-1, -1};
        masks   = cut > 0 ? atomicAdd(args.masks_taken, cut) : 0;
    }
    masks             = __shfl_sync(~0u, masks, 0);
    fa_listed *wholly = list + 1, *others = wholly + (whole > 0);
    int        wholes = 0, cuts = 0; /* so far */
    for (int n = 0; n < count; n += 32) {
        int      seen = seen_at(n + lane), tile = tile_at(n + lane);
        unsigned whole_lanes = __ballot_sync(~0u, seen == 2), cut_lanes = __ballot_sync(~0u, seen == 1), before = (1u << lane) - 1;
        int      a = wholes + __popc(whole_lanes & before), b = cuts + __popc(cut_lanes & before);
        if (seen == 2)
            *(OF_KEYS ? wholly + a + b : a == 0 ? wholly : others + cut + a - 1) = {tile, -1};
        if (seen == 1)
            *(OF_KEYS ? wholly + a + b : others + b) = {tile, masks + b};
        wholes += __popc(whole_lanes);
        cuts += __popc(cut_lanes);
    }
}

FA_DEVICE void write_masks(const fa_args &args, const near_slices &near, const own_tile &own, const fa_listed *list)
{
    for (int n = 1; n <= list[0].tile; n++) {
        fa_listed at = list[n];
        int       tile_q = OF_KEYS ? at.tile : own.tile, tile_k = OF_KEYS ? own.tile : at.tile;
        int       first_row = KEYS_DOWN ? tile_k * FA_TILE_K : tile_q * FA_TILE_Q, first_column = KEYS_DOWN ? tile_q * FA_TILE_Q : tile_k * FA_TILE_K;
        if (at.mask >= 0 && at.mask < args.most_masks)
            for (int word = threadIdx.x; word < ROWS * 4; word += THREADS)
                words_of_row<ROWS>(args, at.mask, 0)[word] = seen_columns(args, near, own, first_row + word / 4, first_column + word % 4 * 2);
        else if (!OF_KEYS && n > list[0].mask) /* those that are cut stand before */
            return;
    }
}

/* Of a tile of queries: whose turn comes when. By one warp. */
FA_DEVICE void write_turns(const fa_args &args, near_slices &near, int number)
{
    tile_place at  = place_of_queries(args, number);
    own_tile   own = {sequence_at(args, at.b), slices_of(args, at.b), at.tile};
    int        turns = 0, lane = threadIdx.x;
    if (at.tile < 0 || at.tile * FA_TILE_Q >= own.seq.seqlen_q)
        return;
    find_near(args, near, own.slices, queries_of(own, at.tile), false);
    for (int first = 0; first * FA_TILE_K < own.seq.seqlen_k && lane < 32; first += 32) {
        own.tile      = first + lane;
        bool     meets = own.tile < args.tiles_k && seen_of_tile(args, near, own, at.tile) > 0;
        unsigned some  = __ballot_sync(~0u, meets);
        if (meets)
            turn_of_keys(args, number, own.tile) = turns + __popc(some & ((1u << lane) - 1));
        turns += __popc(some);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) list_tiles(const __grid_constant__ fa_args args)
{
    __shared__ near_slices near;
    let_next_launch_begin(); /* forward_sm90 waits for this one */
    if (blockIdx.x == 0 && threadIdx.x == 0 && args.next_item)
        *args.next_item = 0; /* which deal.cu has no need to do then; in a backward backward_rowsum.cu does too */
    int lists = OF_KEYS ? args.all_tiles_k : args.all_tiles_q, number = blockIdx.x;
    if (FA_DETERMINISTIC && number >= lists) {
        write_turns(args, near, number - lists);
        return;
    }
    tile_place at   = OF_KEYS ? place_of_tile<FA_TILE_K>(args.cu_seqlens_k, args.all_rows_k, args.tiles_k, args.batch, number) : place_of_queries(args, number);
    fa_listed *list = list_of_tile(args, number);
    own_tile   own  = {sequence_at(args, at.b), slices_of(args, at.b), at.tile};
    fa_range   keys = {own.seq.key_begin, own.seq.seqlen_k}, queries = {0, own.seq.seqlen_q};
    (OF_KEYS ? keys : queries) = OF_KEYS ? keys_of(own, at.tile) : queries_of(own, at.tile);
    fa_range seen = OF_KEYS ? fa_queries_seeing(args.window, own.seq.diagonal, queries, keys) : fa_keys_seen(args.window, own.seq.diagonal, queries, keys);
    if (at.tile < 0 || queries.begin >= queries.end || keys.begin >= keys.end || seen.begin >= seen.end) {
        if (threadIdx.x == 0) {
            list[0] = {0, 0};
            list[1] = {-1, -1};
        }
        return;
    }
    find_near(args, near, own.slices, OF_KEYS ? keys : queries, OF_KEYS);
    constexpr int OTHER = OF_KEYS ? FA_TILE_Q : FA_TILE_K;
    if (threadIdx.x < 32)
        write_list(args, near, own, list, {seen.begin / OTHER, (seen.end - 1) / OTHER + 1});
    __syncthreads();
    write_masks(args, near, own, list);
}
