/* backward_sm90.cu: a block's way through the query tiles that see its keys. */
#ifndef FA_BACKWARD_WALK_SM90_CUH
#define FA_BACKWARD_WALK_SM90_CUH

#include "backward_block_sm90.cuh"

#if FA_MASK == FA_MASK_LISTED

/* A place in the list of the work's tiles, of which so many are left to the end, and the query tile there. `base`: the number of the head's first tile among those of all heads and sequences, by which
 * LSE, delta and float dQ are found. Registers are short: where blocks begin list_tiles.cu says. */
struct walk {
    const fa_listed *place;
    int              left, count, base, tile, mask, number, head;
};

FA_DEVICE void look_up(walk &at)
{
    at.tile   = at.place->tile;
    at.mask   = at.place->mask;
    at.number = at.base + at.tile;
}

FA_DEVICE walk start_walk(const fa_args &args, const work &w)
{
    walk at  = {};
    at.count = at.left = w.tiles.end - w.tiles.begin;
    at.place = w.list + w.tiles.begin;
    at.head  = w.first_head;
    at.base  = w.first_head * args.all_tiles_q + first_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, w.b);
    if (at.count > 0)
        look_up(at);
    return at;
}

FA_DEVICE void advance(const fa_args &args, walk &at)
{
    at.place++;
    if (--at.left == 0) {
        at.place -= at.count;
        at.left = at.count;
        at.base += args.all_tiles_q;
        at.head++;
    }
    look_up(at);
}

/* What is the same for all lanes, though they cannot know. */
FA_DEVICE void settle(walk &at)
{
    at.left  = same_for_all(at.left);
    at.count = same_for_all(at.count);
}

FA_DEVICE bool is_masked(const walk &at, int, int) { return same_for_all(at.mask) >= 0; }

#else

/* Where a work's walk is: a query tile, and its number among those of all heads and sequences, by which its LSE, delta and float dQ are found. With
 * FA_DQ_FIRST_COMES blocks that have neighbouring keys begin at different query tiles, so that each finds some to which it comes first: without a mask as far apart
 * as their keys and round the end, with one at its edge. Else they go downwards, to come to a tile in the order of their keys. */
struct walk {
    int begin, end, start, tile, number, head, way;
};

FA_DEVICE walk start_walk(const fa_args &args, const work &w)
{
    bool apart   = args.dq_order == FA_DQ_FIRST_COMES, upwards = FA_MASK != FA_MASK_WINDOW && apart;
    int  start   = upwards ? w.tiles.begin : w.tiles.end - 1;
    if (FA_MASK == FA_MASK_NONE && apart && w.tiles.end > w.tiles.begin)
        start += w.first_k / FA_TILE_Q % (w.tiles.end - w.tiles.begin);
    int first = w.first_head * args.all_tiles_q + first_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, w.b);
    return {w.tiles.begin, w.tiles.end, start, start, first + start, w.first_head, upwards ? 1 : -1};
}

/* The next query tile of the head, round to the one where it began; then the next head. */
FA_DEVICE void advance(const fa_args &args, walk &at)
{
    at.tile += at.way;
    at.number += at.way;
    if (at.way < 0 ? at.tile < at.begin : at.tile >= at.end) {
        int back = at.way * (at.begin - at.end);
        at.tile += back;
        at.number += back;
    }
    if (at.tile == at.start) {
        at.number += args.all_tiles_q;
        at.head++;
    }
}

/* What is the same for all lanes, though they cannot know. */
FA_DEVICE void settle(walk &at)
{
    at.begin  = same_for_all(at.begin);
    at.end    = same_for_all(at.end);
    at.tile   = same_for_all(at.tile);
    at.start  = same_for_all(at.start);
    at.way    = FA_MASK == FA_MASK_WINDOW ? -1 : same_for_all(at.way);
    at.number = same_for_all(at.number);
    if constexpr (FA_HAS_ALIBI || FA_HAS_DROPOUT || FA_HAS_DBIAS)
        at.head = same_for_all(at.head);
}

FA_DEVICE bool is_masked(const walk &at, int clean_begin, int clean_end) { return at.tile < clean_begin || at.tile >= clean_end; }

#endif

#endif
