/* The keys that a block of the backward owns, and its way through the query tiles that see them. */
#ifndef FA_BACKWARD_WORK_CUH
#define FA_BACKWARD_WORK_CUH

#include "listed.cuh"
#include "mask.cuh"
#include "softmax.cuh"

/* What a block works on. */
struct work {
    int      b, kv_head, first_head, num_heads, first_k;
    fa_range keys;            /* of the tile, that count */
    fa_range tiles;           /* query tiles that may see some of them */
    int      start;           /* the tile that the block begins with */
    fa_range clean;           /* those of which every query sees every key (slices apart): they need no mask */
    sequence seq;
    fa_range slices;
#if FA_MASK == FA_MASK_LISTED
    const fa_listed *list; /* `tiles` and `start` are places there */
#endif
    /* query 0 of head 0 of the sequence: the loop adds a head and a tile */
    const fa_element *q;
    const char       *dout;
    const float      *lse, *delta;
    float            *dq;
};

/* A query past the last counts as clean where nothing comes of it: its rows of Q and dO are zeros. */
FA_DEVICE fa_range clean_tiles(const fa_args &args, const work &w)
{
    fa_window window = window_of(args);
    fa_range  keys   = {w.first_k, w.first_k + FA_TILE_K};
    int       begin = 0, end = w.seq.seqlen_q;
    if (keys.begin < w.keys.begin || keys.end > w.keys.end)
        return {0, 0};
    if (FA_MASK != FA_MASK_NONE)
        begin = fa_max_int(0, keys.end - 1 - w.seq.diagonal - window.right);
    if (FA_MASK == FA_MASK_WINDOW)
        end = fa_min_int(end, keys.begin - w.seq.diagonal + window.left + 1);
    bool whole = MODIFIED || end < w.seq.seqlen_q; /* the last tile's other queries would see a key too many */
    return {(begin + FA_TILE_Q - 1) / FA_TILE_Q, end <= 0 ? 0 : (end + (whole ? 0 : FA_TILE_Q - 1)) / FA_TILE_Q};
}

FA_DEVICE work work_of(const fa_args &args, grid_place at)
{
    work     w;
    unsigned n    = at.other;
    w.first_k     = at.tile * FA_TILE_K;
    int share = 0;
    if (FA_HAS_KV_ACCUM) {
        share = n % args.group_blocks;
        n /= args.group_blocks;
    }
    w.kv_head    = n % args.heads_k;
    w.b          = n / args.heads_k;
    w.num_heads  = FA_HAS_KV_ACCUM ? args.group / args.group_blocks : args.group;
    w.first_head = w.kv_head * args.group + share * w.num_heads;
    w.seq        = sequence_at(args, w.b);
    w.slices     = FA_HAS_SLICES ? slices_of(args, w.b) : fa_range{0, 0};
    w.keys = {fa_max_int(w.first_k, w.seq.key_begin), fa_min_int(w.first_k + FA_TILE_K, w.seq.seqlen_k)};
    fa_range queries = fa_queries_seeing(window_of(args), w.seq.diagonal, {0, w.seq.seqlen_q}, w.keys);
    w.tiles = {queries.begin / FA_TILE_Q, (queries.end + FA_TILE_Q - 1) / FA_TILE_Q};
    if (w.keys.begin >= w.keys.end || queries.begin >= queries.end)
        w.tiles = {0, 0};
    w.clean = clean_tiles(args, w);
    /* Blocks that run at the same time begin apart, or all would add to the same dQ at once. Turns need one order, and few
     * tiles are soon done. */
    int count = w.tiles.end - w.tiles.begin;
    w.start   = w.tiles.begin + (!FA_DETERMINISTIC && count > 16 ? (int)at.tile % count : 0);

#if FA_MASK == FA_MASK_LISTED
    w.list  = list_of_tile(args, number_of_keys(args, w.b, at.tile));
    w.tiles = {0, count > 0 ? w.list->tile : 0};
    w.start = 0; /* list_tiles begins apart */
    w.list++;
#endif
    fa_i64 token = (fa_i64)w.seq.q_entry * args.q_rows + w.seq.q_row;
    w.q     = (const fa_element *)args.q.data + w.seq.q_entry * args.q.stride[0] + w.seq.q_row * args.q.stride[1];
    w.dout  = (const char *)args.dout.data + (w.seq.q_entry * args.dout.stride[0] + w.seq.q_row * args.dout.stride[1]) *
                                                 (FA_DTYPE_DOUT == FA_F32 ? 4 : 2);
    w.lse   = (const float *)args.lse.data + w.seq.q_entry * args.lse.stride[0] + w.seq.q_row * args.lse.stride[2];
    w.delta = args.delta + token;
    w.dq    = args.dq_accum + token * FA_HEAD_DIM;
    return w;
}

/* Queries [first, last] of the whole sequence that key j is seen by. */
FA_DEVICE row_limits query_limits(const fa_args &args, const work &w, int j)
{
    fa_window  window = window_of(args);
    row_limits limits = {0, w.seq.seqlen_q - 1};
    if (FA_MASK != FA_MASK_NONE)
        limits.first = fa_max_int(0, j - w.seq.diagonal - window.right);
    if (FA_MASK == FA_MASK_WINDOW)
        limits.last = fa_min_int(limits.last, j - w.seq.diagonal + window.left);
    if (j < w.keys.begin || j >= w.keys.end)
        limits.last = -1;
    return limits;
}

FA_DEVICE fa_range queries_of_tile(const work &w, int tile)
{
    return {tile * FA_TILE_Q, fa_min_int((tile + 1) * FA_TILE_Q, w.seq.seqlen_q)};
}

/* In a fixed order: so many tiles of keys come to a tile of queries before this block's. */
FA_DEVICE int turn_number(const fa_args &args, const work &w, int tile)
{
    if (LISTED)
        return turn_of_keys(args, number_of_queries(args, w.b, tile), w.first_k / FA_TILE_K);
    fa_range keys = fa_keys_seen(window_of(args), w.seq.diagonal, queries_of_tile(w, tile), {w.seq.key_begin, w.seq.seqlen_k});
    return w.first_k / FA_TILE_K - keys.begin / FA_TILE_K;
}

FA_DEVICE fa_range keys_of_block(const work &w) { return {w.first_k, w.first_k + FA_TILE_K}; }

FA_DEVICE bool clean_tile(const fa_args &args, const work &w, int tile)
{
    return tile >= w.clean.begin && tile < w.clean.end &&
           (!FA_HAS_SLICES || slices_tile(args, w.slices, queries_of_tile(w, tile), keys_of_block(w)) == 2);
}

/* A query tile of one head. */
struct place {
    int head, tile;
#if FA_MASK == FA_MASK_LISTED
    int number, mask; /* in the list */
#endif
};

FA_DEVICE place first_place(const work &w)
{
#if FA_MASK == FA_MASK_LISTED
    return {w.first_head, w.list[0].tile, 0, w.list[0].mask};
#else
    return {w.first_head, w.start};
#endif
}

FA_DEVICE bool clean_place(const fa_args &args, const work &w, place at)
{
#if FA_MASK == FA_MASK_LISTED
    return at.mask < 0;
#else
    return clean_tile(args, w, at.tile);
#endif
}

FA_DEVICE bool inside(const work &w, place at) { return at.head < w.first_head + w.num_heads; }

/* The next query tile of the head, round to the one where the block began; then the next head. */
FA_DEVICE place next_place(const work &w, place at)
{
#if FA_MASK == FA_MASK_LISTED
    at.number = at.number + 1 == w.tiles.end ? 0 : at.number + 1;
    at.head += at.number == 0;
    at.tile = w.list[at.number].tile;
    at.mask = w.list[at.number].mask;
#else
    at.tile = at.tile + 1 == w.tiles.end ? w.tiles.begin : at.tile + 1;
    at.head += at.tile == w.start;
#endif
    return at;
}

/* The first place from `at` on where something is visible; outside when there is none. */
FA_DEVICE place settle(const fa_args &args, const work &w, place at)
{
    while (FA_HAS_SLICES && !LISTED && inside(w, at) &&
           slices_tile(args, w.slices, queries_of_tile(w, at.tile), keys_of_block(w)) == 0)
        at = next_place(w, at);
    return at;
}

/* Row 0 of a head's delta and dq_accum lies this many rows behind head 0's. */
FA_DEVICE fa_i64 head_rows(const fa_args &args, int head) { return (fa_i64)head * args.q_entries * args.q_rows; }

#endif
