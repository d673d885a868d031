/* forward_sm90.cu: what a block works on. */
#ifndef FA_WORK_SM90_CUH
#define FA_WORK_SM90_CUH

#include "fragment_sm90.cuh"
#include "packed_sm90.cuh"
#include "pairs_sm90.cuh"
#include "softmax.cuh"

/* A tile of queries of one head, and the key tiles that it meets. In shared memory: registers are for S and O. */
struct work {
    int       b, head, kv_head;
    int       first_q;                /* first row of the tile */
    fa_range  keys;                   /* keys that some of its rows may see */
    int       right, tiles;           /* key tiles right, right - 1, ...: step n has tile right - n */
    int       first_clean, end_clean; /* steps [first_clean, end_clean) need no mask */
    int       cleared;                /* an inspector found Inf or NaN in V and took it away */
    int       more;                   /* the block has an item behind this one: who computes that for himself divides for 300 cycles */
    sequence  seq;
#if FA_DTYPE == FA_F8E4M3
    float     unit, descale; /* log2 units of a dot product; what O is to be multiplied with */
#endif
#if FA_HAS_ALIBI
    float     slope; /* in units of unit_of */
#endif
};

/* Where every sequence is as long as the others (args.order_heads 0), causal tiles come in pairs, the last ones by their length. Otherwise a block has one tile, and the
 * longest come first over args.order_heads heads whose K and V stay in L2, then over the next heads; or, where sequences are short, it has
 * args.block_tiles neighbours of a head's list (packed_sm90.cuh), so that one is begun while the one before ends. */
FA_DEVICE bool in_pairs(const fa_args &args) { return FA_MASK == FA_MASK_CAUSAL && args.order_heads == 0; }

/* The block's n-th tile. */
FA_DEVICE bool has_item(const fa_args &args, unsigned n)
{
    unsigned heads = args.heads_q * args.batch, tiles = args.tiles_q, own = args.block_tiles;
    if (own > 0)
        return n < own && blockIdx.x * own + n < (unsigned)args.all_tiles_q * args.heads_q;
    if (in_pairs(args))
        return has_causal_item(tiles, heads, n);
    return n * gridDim.x + blockIdx.x < tiles * heads;
}

constexpr unsigned NO_TILE = (1u << 30) / FA_TILE_Q; /* past every row */

FA_DEVICE grid_place place_of(const fa_args &args, unsigned n)
{
    unsigned tiles = args.tiles_q;
    if (args.block_tiles > 0) {
        unsigned   number = blockIdx.x * args.block_tiles + n, head = number / args.all_tiles_q;
        tile_place at     = place_of_queries(args, number - head * args.all_tiles_q);
        return {at.tile < 0 ? NO_TILE : at.tile, at.b * args.heads_q + head};
    }
    if (in_pairs(args))
        return place_of_causal_item(tiles, args.heads_q * args.batch, n);
    unsigned number = n * gridDim.x + blockIdx.x;
    if (FA_MASK == FA_MASK_NONE || args.order_heads == 0)
        return {number % tiles, number / tiles};
    unsigned heads = args.order_heads, first = number / (heads * tiles) * heads;
    number -= first * tiles;
    heads = min(heads, args.heads_q * args.batch - first);
    return {tiles - 1 - number / heads, first + number % heads};
}

/* Log2 units of what softmax takes. Elsewhere than with FP8 the same for all: from the arguments, not from shared memory. */
FA_DEVICE float unit_of(const fa_args &args, const work &w)
{
#if FA_DTYPE == FA_F8E4M3
    return w.unit;
#else
    return FA_HAS_SOFTCAP ? args.cap_unit : args.scale_log2;
#endif
}

FA_DEVICE void find_work(const fa_args &args, unsigned n, work &w)
{
    grid_place at = place_of(args, n);
    w.head        = at.other % args.heads_q;
    w.b           = at.other / args.heads_q;
    w.kv_head     = w.head / args.group;
    w.first_q     = at.tile * FA_TILE_Q;
    w.cleared     = 0;
    w.more        = has_item(args, n + 1);
    w.tiles       = 0;
    w.seq         = sequence_at(args, w.b);
#if FA_DTYPE == FA_F8E4M3
    w.unit    = args.scale_log2 * descale_of_scores(args, w.b, w.kv_head);
    w.descale = descale_of(args.descale_v, w.b, w.kv_head);
#endif
#if FA_HAS_ALIBI
    w.slope = score_terms_of(args, w.b, w.head).slope_log2 / unit_of(args, w);
#endif
    fa_range queries = {w.first_q, fa_min_int(w.first_q + FA_TILE_Q, w.seq.seqlen_q)};
    w.keys           = fa_keys_seen(window_of(args), w.seq.diagonal, queries, {w.seq.key_begin, w.seq.seqlen_k});
    if (queries.begin >= queries.end || w.keys.begin >= w.keys.end)
        return;
    fa_range clean = clean_tiles<FA_TILE_K>(args, w.seq, queries, w.keys);
    int      right = (w.keys.end - 1) / FA_TILE_K, tiles = right + 1 - w.keys.begin / FA_TILE_K;
    w.right        = right;
    w.tiles        = tiles;
    w.first_clean  = fa_min_int(fa_max_int(right + 1 - clean.end, 0), tiles);
    if (w.first_clean > 0 && row_limits_of(window_of(args), w.seq, w.keys, w.first_q).last < clean.end * FA_TILE_K)
        w.first_clean = fa_min_int(w.first_clean + 1, tiles); /* a clean step's rows have seen keys before (softmax_ahead): the first row has not */
    w.end_clean    = fa_max_int(right + 1 - clean.begin, w.first_clean);
}

/* What O is to be multiplied with besides. */
FA_DEVICE float factor_of_o(const fa_args &args, const work &w)
{
#if FA_DTYPE == FA_F8E4M3
    return w.descale;
#else
    return FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f;
#endif
}

FA_DEVICE bool is_masked(const work &w, int step) { return step < w.first_clean || step >= w.end_clean; }

#endif
