/* forward_sm90.cu: what a block works on. */
#ifndef FA_WORK_SM90_CUH
#define FA_WORK_SM90_CUH

#include "fragment_sm90.cuh"
#include "listed.cuh"
#include "pairs_sm90.cuh"
#include "softmax.cuh"

/* A tile of queries of one head, or (GROUPED) of all heads of a key head, and the key tiles that it meets. In shared memory: registers are for S and O. */
struct work {
    int       b, head, kv_head;       /* GROUPED: the first head */
#if FA_HAS_SPLIT
    int       part, part_tiles;       /* of the sequence's keys (WHOLE: it has all); tiles of each but the last */
#endif
    int       first_row;              /* of the tile, counted from the sequence's first */
    fa_range  keys;                   /* keys that some of its rows may see */
    int       right, tiles;           /* key tiles right, right - 1, ... (tile_of). tiles < 0: no item, nor is there one behind it */
    int       first_clean, end_clean; /* steps [first_clean, end_clean) need no mask */
    int       spoilt;                 /* an inspector found Inf or NaN in V of an edge tile; WHOLE: a bit for each part */
    sequence  seq;
#if FA_DTYPE == FA_F8E4M3
    float     unit, descale; /* log2 units of a dot product; what O is to be multiplied with */
#endif
#if FA_HAS_ALIBI
    float     slope; /* in units of unit_of */
#endif
#if FA_MASK == FA_MASK_LISTED
    const fa_listed *list; /* of its steps */
#endif
};

/* A sequence's rows: its queries or, GROUPED, its queries of all heads of a key head, query by query. These are a power of two: to divide by them takes long before a tile can be asked for. */
constexpr bool GROUPED = FA_HAS_GROUPS;
FA_DEVICE int log2_of_group(const fa_args &args) { return 31 - __clz(args.group); }
FA_DEVICE int rows_of_query(const fa_args &args) { return GROUPED ? args.group : 1; }
FA_DEVICE int query_of(const fa_args &args, int row) { return GROUPED ? row >> log2_of_group(args) : row; }

/* Whose row is which. */
struct row_owner {
    int head, i; /* query */
};

FA_DEVICE row_owner owner_of(const fa_args &args, const work &w, int row)
{
    int i = query_of(args, row);
    return {GROUPED ? w.head + row - (i << log2_of_group(args)) : w.head, i};
}

/* Queries of rows [begin, end) that count. */
FA_DEVICE fa_range queries_of(const fa_args &args, const work &w, int begin, int end)
{
    return {query_of(args, begin), fa_min_int(GROUPED ? query_of(args, end - 1) + 1 : end, w.seq.seqlen_q)};
}

/* The key tile of a step. */
FA_DEVICE int tile_of(const work &w, int step)
{
#if FA_MASK == FA_MASK_LISTED
    return w.list[step].tile;
#else
    return w.right - step;
#endif
}

/* A head's parts are counted as heads of their own; or a block has all parts of its tile, and folds them (parts_sm90.cuh). */
constexpr bool WHOLE = FA_HAS_SPLIT && FA_ONE_LAUNCH == 2, SPLIT = FA_HAS_SPLIT && !WHOLE;

/* Calls whose keys are parted are short: a block finds its first item while the launch before is at its end (launch.c). */
constexpr bool BEGINS_EARLY = FA_HAS_SPLIT;
FA_DEVICE unsigned heads_of_parts(const fa_args &args)
{
    unsigned heads = GROUPED ? args.heads_k : args.heads_q;
    return SPLIT ? heads * args.num_splits : heads;
}

FA_DEVICE void place_head(const fa_args &args, unsigned head, work &w)
{
#if FA_HAS_SPLIT
    w.part = SPLIT ? head % args.num_splits : 0;
    head /= SPLIT ? args.num_splits : 1;
#endif
    w.head = head * rows_of_query(args);
}

/* Keys of a part, and how many tiles each has: whole tiles, of as many parts as have args.split_keys or more, by the sequence's own length alone. */
FA_DEVICE fa_range keys_of_part(const fa_args &args, work &w)
{
    fa_range all = {w.seq.key_begin, w.seq.seqlen_k};
#if FA_HAS_SPLIT
    int parts = clamp_int(w.seq.seqlen_k / args.split_keys, 1, args.num_splits), tiles = (w.seq.seqlen_k + FA_TILE_K - 1) / FA_TILE_K, keys = (tiles + parts - 1) / parts * FA_TILE_K;
    w.part_tiles = keys / FA_TILE_K;
    if (WHOLE)
        return all;
    if (w.part >= parts)
        return {0, 0};
    all.begin = fa_max_int(all.begin, w.part * keys);
    all.end   = fa_min_int(all.end, (w.part + 1) * keys);
#endif
    return all;
}

/* Causal tiles in the order of their lengths: not of pieces of a prompt, all of whose tiles are long (args.order_heads 0). Of these few tiles have the same keys, and are taken at the
 * same time, so that memory is read once for them. */
FA_DEVICE bool by_length(const fa_args &args) { return FA_MASK == FA_MASK_CAUSAL && !FA_HAS_SPLIT && (!GROUPED || args.order_heads > 0); }

/* Where every sequence is as long as the others and tiles are few a block's n-th tile is known: causal ones come in pairs, the last ones by their length, others in the order of
 * their heads. */
FA_DEVICE bool own_place(const fa_args &args, unsigned n, work &w)
{
    unsigned   own = heads_of_parts(args), heads = own * args.batch, tiles = args.tiles_q, number = n * gridDim.x + blockIdx.x;
    grid_place of;
    bool       ordered = by_length(args);
    if (ordered ? !has_causal_item(tiles, heads, n) : number >= tiles * heads)
        return false;
    if (ordered)
        of = place_of_causal_item(tiles, heads, n);
    else
        of = {number % tiles, number / tiles};
    w.b       = of.other / own;
    place_head(args, of.other % own, w);
    if (FA_HAS_BIAS && args.bias.stride[0] == 0) { /* a bias of all sequences is read by them at the same time, and then lies in L2 */
        w.b    = of.other % args.batch;
        w.head = of.other / args.batch;
    }
    w.first_row = of.tile * FA_TILE_Q;
    return true;
}

/* Elsewhere (args.all_items) who is free takes the next one, of a head, causal ones of args.order_heads at once, the tiles of all sequences (packed_sm90.cuh) from the last to the first:
 * under a mask a sequence's longest first. Each block's first has its own number. A tile may be nobody's. */
FA_DEVICE bool dealt_place(const fa_args &args, bool first_of_all, work &w)
{
    unsigned number = blockIdx.x, tiles = args.all_tiles_q;
    if (!first_of_all) {
        if (!args.next_item) /* there are as many blocks */
            return false;
        wait_for_launch_before(); /* deal.cu, list_tiles.cu */
        number = atomicAdd(args.next_item, 1) + gridDim.x;
    }
    if (number >= (unsigned)args.all_items)
        return false;
    grid_place dealt = place_of_dealt(tiles, heads_of_parts(args), by_length(args) ? args.order_heads : 1, number);
    place_head(args, dealt.other, w);
    w.first_row        = tiles - 1 - dealt.tile;
    asm volatile("" ::: "memory"); /* the planner's registers are short: from memory */
    tile_place of = place_of_queries(args, w.first_row, rows_of_query(args));
    w.b           = of.b;
    w.first_row     = of.tile * FA_TILE_Q;
    return true;
}

/* Of the block's n-th item: which it is, or that there is none. */
FA_DEVICE bool place_work(const fa_args &args, unsigned n, work &w)
{
    bool first_of_all = n == 0;
    for (;;) {
        if (!(args.all_items > 0 ? dealt_place(args, first_of_all, w) : own_place(args, n, w)))
            return false;
        first_of_all = false;
        if (BEGINS_EARLY && (FA_HAS_ALIBI || reads_lengths(args)))
            wait_for_launch_before();
        w.seq = sequence_at(args, w.b);
        if (args.all_items == 0 || (unsigned)w.first_row < (unsigned)(w.seq.rows_q * rows_of_query(args)))
            return true;
    }
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

/* True if there is an item n. */
FA_DEVICE bool find_work(const fa_args &args, unsigned n, work &w)
{
    w.tiles = -1;
    if (!place_work(args, n, w))
        return false;
    w.kv_head = GROUPED ? w.head >> log2_of_group(args) : w.head / args.group;
    w.spoilt  = 0;
    w.tiles   = 0;
#if FA_MASK == FA_MASK_LISTED
    w.first_clean = w.end_clean = 0; /* who goes one step after the other does not ask for tiles first */
#endif
#if FA_DTYPE == FA_F8E4M3
    w.unit    = args.scale_log2 * descale_of_scores(args, w.b, w.kv_head);
    w.descale = descale_of(args.descale_v, w.b, w.kv_head);
#endif
#if FA_HAS_ALIBI
    w.slope = score_terms_of(args, w.b, w.head).slope_log2 / unit_of(args, w);
#endif
    fa_range queries = queries_of(args, w, w.first_row, w.first_row + FA_TILE_Q);
    w.keys           = fa_keys_seen(window_of(args), w.seq.diagonal, queries, keys_of_part(args, w));
    if (queries.begin >= queries.end || w.keys.begin >= w.keys.end)
        return true;
#if FA_MASK == FA_MASK_LISTED
    wait_for_launch_before(); /* list_tiles */
    const fa_listed *list = list_of_tile(args, number_of_queries(args, w.b, w.first_row / FA_TILE_Q));
    w.list                = list + 1;
    w.tiles = w.end_clean = list->tile;
    w.first_clean         = list->mask;
    return true;
#endif
    fa_range clean = clean_tiles<FA_TILE_K>(args, w.seq, queries, w.keys);
    int      right = (w.keys.end - 1) / FA_TILE_K, tiles = right + 1 - w.keys.begin / FA_TILE_K;
    w.right        = right;
    w.tiles        = tiles;
    w.first_clean  = fa_min_int(fa_max_int(right + 1 - clean.end, 0), tiles);
    if (w.first_clean > 0 && row_limits_of(window_of(args), w.seq, w.keys, queries.begin).last < clean.end * FA_TILE_K)
        w.first_clean = fa_min_int(w.first_clean + 1, tiles); /* a clean step's rows have seen keys before (softmax_ahead): the first row has not */
    w.end_clean    = fa_max_int(right + 1 - clean.begin, w.first_clean);
    return true;
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

/* Of a consumer's 64 rows. */
FA_DEVICE fa_range queries_of_consumer(const fa_args &args, const work &w, int group) { return queries_of(args, w, w.first_row + 64 * group, w.first_row + 64 * group + 64); }

/* Steps in which this consumer's rows see nothing yet, being above the others, or at all, for there are none. */
FA_DEVICE int blind_steps(const fa_args &args, const work &w, int group)
{
    fa_range queries = queries_of_consumer(args, w, group);
    if (queries.begin >= queries.end)
        return w.tiles;
    if (LISTED)
        return 0;
    int last = row_limits_of(window_of(args), w.seq, w.keys, queries.end - 1).last;
    return last < w.keys.begin ? w.tiles : w.right - last / FA_TILE_K;
}

/* Steps up to the last in which this consumer's rows see something, being below others that see earlier keys. */
FA_DEVICE int seen_steps(const fa_args &args, const work &w, int group)
{
    int first = row_limits_of(window_of(args), w.seq, w.keys, queries_of_consumer(args, w, group).begin).first;
    return FA_MASK == FA_MASK_WINDOW ? clamp_int(w.right + 1 - first / FA_TILE_K, 0, w.tiles) : w.tiles;
}

/* Steps that need no mask for this consumer's rows. */
FA_DEVICE fa_range clean_steps(const fa_args &args, const work &w, int group)
{
    if (LISTED)
        return {w.first_clean, w.end_clean};
    fa_range clean = clean_tiles<FA_TILE_K>(args, w.seq, queries_of_consumer(args, w, group), w.keys);
    int      first = clamp_int(w.right + 1 - clean.end, 0, w.tiles);
    return {first, clamp_int(w.right + 1 - clean.begin, first, w.tiles)};
}

/* Of these, those whose rows have seen keys before (softmax_ahead): the first row has not, if a clean tile has its last key. find_work says it of all rows. */
FA_DEVICE fa_range steps_after_others(const fa_args &args, const work &w, int group)
{
    fa_range clean = clean_steps(args, w, group);
    if (!LISTED && clean.begin > 0 && row_limits_of(window_of(args), w.seq, w.keys, queries_of_consumer(args, w, group).begin).last < (w.right + 1 - clean.begin) * FA_TILE_K)
        clean.begin = fa_min_int(clean.begin + 1, w.tiles);
    return {clean.begin, fa_max_int(clean.begin, clean.end)};
}

FA_DEVICE bool is_masked(const work &w, int step) { return step < w.first_clean || step >= w.end_clean; }

#endif
