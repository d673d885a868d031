/* What a block of the forward works on: rows of a tile, keys, where they lie and where results go. For rows that are computed again
 * (far scores, Inf and NaN in V) too. */
#ifndef FA_FORWARD_WORK_CUH
#define FA_FORWARD_WORK_CUH

#include "far_rows.cuh"
#include "fold_parts.cuh"
#include "listed.cuh"
#include "tile.cuh"

constexpr bool PACKED    = FA_VARIANT > 1;                  /* rows of a tile: query by query, each of all heads of a key head */
#ifndef FA_FOLDS /* forward_few_sm90: parts are folded (fold_parts.cuh); with FA_ONE_LAUNCH 2 a block has all of a tile's, with 3 a group of them */
#define FA_FOLDS 0
#endif
#ifndef FA_BY_LENGTH /* forward_wide_sm90: of args.order_heads key heads at once the tiles of all that have most keys come first */
#define FA_BY_LENGTH 0
#endif
constexpr bool BY_LENGTH = FA_BY_LENGTH && FA_MASK != FA_MASK_NONE && !FA_HAS_SPLIT;
constexpr bool TO_PARTS = FA_HAS_SPLIT && !(FA_FOLDS && FA_ONE_LAUNCH == 2); /* results are partial ones */
constexpr int  KEY_WARPS = PACKED ? FA_VARIANT / 2 : 1;     /* warps that share a row, each with its own keys */

/* K or V as a block sees it. */
struct kv_source {
    const fa_element *data; /* the head's row 0 of this sequence; paged: of page 0 */
    const int        *pages; /* this sequence's */
};

/* What a block works on. */
struct work {
    int        b, head, kv_head, split; /* PACKED: the first head */
    int        first_q;            /* query of the tile's first row */
    int        first_row, rows;    /* PACKED: the tile's first row, counted from the sequence's first; rows of the tile */
    fa_range   queries, keys;      /* rows that count, keys that some of them may see; of the part that ends, */
    fa_range   run;                /* and of all parts of the block */
    int        parts, part_keys;   /* from `split` on */
    fa_range   clean;              /* tiles of which every query sees every key (slices apart): they need no mask */
    int        first_tile;         /* the last to visit; the walk goes from right to left */
    float      unit;               /* log2 units of one score, > 0 always: a scale of 0 or below goes into Q */
    sequence   seq;
    fa_range   slices;
    kv_source  k, v;
#if FA_MASK == FA_MASK_LISTED
    const fa_listed *list;         /* the tiles to visit */
#endif
    bool       far[FA_TILE_Q];     /* rows to be computed again (far_rows.cuh) */
};

FA_DEVICE kv_source kv_source_of(const fa_args &args, const fa_view &view, const work &w)
{
    const fa_element *data = (const fa_element *)view.data + w.kv_head * view.stride[2];
    if (FA_HAS_PAGED)
        return {data, args.page_table + w.b * args.page_row_stride};
    return {data + w.seq.kv_entry * view.stride[0] + w.seq.kv_row * view.stride[1], nullptr};
}

FA_DEVICE float scale_log2_of(const fa_args &args, const work &w)
{
    return args.scale_log2 * descale_of_scores(args, w.b, w.kv_head);
}

/* A block has neighbouring parts. */
FA_DEVICE int runs_of(const fa_args &args) { return args.run_parts == 1 ? args.num_splits : (args.num_splits + args.run_parts - 1) / args.run_parts; }
constexpr bool RUN_BY_RUN = FA_HAS_SPLIT && FA_ONE_LAUNCH && !FA_FOLDS; /* neighbouring blocks have a tile's runs, else its number changes first */

/* Of block n, as args.h counts them. WALK_ROWS: so many neighbouring rows, whole tiles, walk the keys together: those that any of them sees. */
template <int WALK_ROWS = FA_TILE_Q> FA_DEVICE work work_of(const fa_args &args, unsigned n = blockIdx.x)
{
    work     w;
    int      tile;
    int      runs = runs_of(args);
    auto     take = [&](unsigned count) { /* the next digit of the block's number */
        if (count == 1) /* a division is a hundred cycles */
            return 0;
        unsigned digit = n % count;
        n /= count;
        return (int)digit;
    };
    w.split = 0;
    if (BY_LENGTH && args.order_heads > 0) {
        constexpr int NEIGHBOURS = WALK_ROWS / FA_TILE_Q; /* tiles that walk the keys together */
        unsigned      neighbour = n % NEIGHBOURS, of_heads = args.tiles_q * args.order_heads, first_head = n / of_heads * args.order_heads;
        unsigned      heads = min((unsigned)args.order_heads, (unsigned)(args.heads_k * args.batch) - first_head), place = n % of_heads / NEIGHBOURS, head = first_head + place % heads;
        tile   = place / heads * NEIGHBOURS + neighbour;
        w.head = head % args.heads_k;
        n      = head / args.heads_k;
    } else if (PACKED) {
        if (RUN_BY_RUN)
            w.split = take(runs);
        tile   = take(args.tiles_q);
        w.head = take(args.heads_k);
        if (FA_HAS_SPLIT && !RUN_BY_RUN)
            w.split = take(runs);
        w.split *= args.run_parts;
    } else {
        grid_place at = grid_place_of<FA_TILE_Q>(n, args.tiles_q);
        n             = at.other;
        tile          = at.tile;
        if (FA_HAS_SPLIT)
            w.split = take(args.num_splits);
        w.head = take(args.heads_q);
    }
    w.b = n;
    w.kv_head = PACKED || args.group == 1 ? w.head : w.head / args.group;
    if (FA_MASK != FA_MASK_NONE)
        tile = args.tiles_q - 1 - tile;
    w.seq     = sequence_at(args, w.b);
    w.slices  = FA_HAS_SLICES ? slices_of(args, w.b) : fa_range{0, 0};
    if (PACKED) {
        w.head *= args.group;
        w.first_row = tile * FA_TILE_Q;
        w.rows      = fa_min_int(FA_TILE_Q, w.seq.rows_q * args.group - w.first_row);
        w.first_q   = quotient(w.first_row, args.group);
        w.queries   = {w.first_q, args.tiles_q == 1 ? w.seq.seqlen_q : fa_min_int(quotient(w.first_row + w.rows - 1, args.group) + 1, w.seq.seqlen_q)};
    } else {
        w.first_q = tile * FA_TILE_Q;
        w.queries = {w.first_q, fa_min_int(w.first_q + FA_TILE_Q, w.seq.seqlen_q)};
        w.rows    = w.queries.end - w.first_q;
    }
    fa_range all = {w.seq.key_begin, w.seq.seqlen_k};
    w.parts      = PACKED ? fa_min_int(args.run_parts, args.num_splits - w.split) : 1;
    if (FA_HAS_SPLIT) {
        int part = args.split_keys;
        for (int n = 0; n < args.part_doublings && (fa_i64)part * part < (fa_i64)args.part_growth * w.seq.seqlen_k && (!FA_FOLDS || FA_FOLD_PARTS * part < w.seq.seqlen_k); n++)
            part *= 2;
        w.part_keys = part;
        all.begin   = fa_max_int(all.begin, w.split * part);
        all.end     = fa_min_int(all.end, (w.split + w.parts) * part);
    }
    fa_range walked = w.queries;
    if constexpr (WALK_ROWS > FA_TILE_Q) {
        int first = w.first_row / WALK_ROWS * WALK_ROWS;
        walked    = {quotient(first, args.group), fa_min_int(quotient(first + WALK_ROWS - 1, args.group) + 1, w.seq.seqlen_q)};
    }
    w.keys = fa_keys_seen(window_of(args), w.seq.diagonal, walked, all);
    if (walked.begin >= walked.end)
        w.keys.end = w.keys.begin;
    w.run        = w.keys;
    w.clean      = clean_tiles<FA_TILE_K>(args, w.seq, w.queries, w.keys);
    w.first_tile = w.keys.begin / FA_TILE_K;
    w.unit       = MODIFIED || scale_log2_of(args, w) == 0 ? 1.0f : fabsf(scale_log2_of(args, w));
#if FA_MASK == FA_MASK_LISTED
    w.list       = list_of_tile(args, number_of_queries(args, w.b, tile)) + 1;
#endif
    w.k          = kv_source_of(args, args.k, w);
    w.v          = kv_source_of(args, args.v, w);
    return w;
}

/* The query and the head of a row of the tile. */
FA_DEVICE int query_of(const fa_args &args, const work &w, int row)
{
    return PACKED ? (w.first_row + row) / args.group : w.first_q + row;
}
FA_DEVICE int head_of(const fa_args &args, const work &w, int row)
{
    return PACKED ? w.head + (w.first_row + row) % args.group : w.head;
}

/* Rows of queries that count. */
FA_DEVICE int rows_used(const fa_args &args, const work &w)
{
    return PACKED ? fa_min_int(w.rows, w.seq.seqlen_q * args.group - w.first_row) : w.rows;
}

/* PACKED: row r of the tile is a query of one of the heads. */
struct rows_of_heads {
    const fa_element *first; /* query 0, first head */
    fa_i64            query_stride, head_stride, stride;
    int               first_row, group;

    static constexpr bool PLAIN = false;
    __device__ __forceinline__ const fa_element *row(int r) const
    {
        return first + (first_row + r) / group * query_stride + (first_row + r) % group * head_stride;
    }
};

/* The tile's rows of Q. */
FA_DEVICE auto queries_from(const fa_args &args, const work &w)
{
    const fa_element *q = (const fa_element *)args.q.data + w.seq.q_entry * args.q.stride[0] + w.head * args.q.stride[2];
    if constexpr (PACKED)
        return rows_of_heads{q + w.seq.q_row * args.q.stride[1], args.q.stride[1], args.q.stride[2], 0, w.first_row, args.group};
    else
        return rows_of{q + (fa_i64)(w.seq.q_row + w.first_q) * args.q.stride[1], args.q.stride[1]};
}

/* Row j of the sequence and those after it. */
FA_DEVICE auto rows_from(const fa_args &args, const work &w, const kv_source &source, const fa_view &view, int j)
{
    if constexpr (FA_HAS_PAGED)
        return rows_of_pages{source.data, source.pages, view.stride[0], view.stride[1], j, args.kv_rows, args.kv_entries,
                             w.seq.rows_k};
    else
        return rows_of{source.data + j * view.stride[1], view.stride[1]};
}

/* PACKED: where a key in pages lies, in elements from page 0 on. Each lane of those that copy a row side by side knows it of another of their rows. */
struct key_place {
    fa_i64 k, v;
};
constexpr int PLACE_LANES = tile<FA_HEAD_DIM>::GROUP, PLACE_STEP = THREADS / PLACE_LANES;

FA_DEVICE key_place place_of_lane(const fa_args &args, const work &w, int first)
{
    int r = threadIdx.x / PLACE_LANES + threadIdx.x % PLACE_LANES * PLACE_STEP, j = first + r;
    if (r >= FA_TILE_K || (unsigned)j >= (unsigned)w.seq.rows_k)
        return {0, 0}; /* not read */
    int page = j / args.kv_rows, found = w.k.pages[page], row = j - page * args.kv_rows;
    if ((unsigned)found >= (unsigned)args.kv_entries)
        return {0, 0};
    return {found * args.k.stride[0] + row * args.k.stride[1], found * args.v.stride[0] + row * args.v.stride[1]};
}

struct rows_of_places {
    const fa_element *data; /* page 0, row 0, this head */
    fa_i64            place, stride = 0;

    static constexpr bool PLAIN = false;
    __device__ __forceinline__ const fa_element *row(int r) const
    {
        return data + __shfl_sync(~0u, place, (int)(threadIdx.x & (32 - PLACE_LANES)) + r / PLACE_STEP);
    }
};

/* Row of o_partial and lse_partial for query i. */
FA_DEVICE fa_i64 partial_row(const fa_args &args, const work &w, int head, int i)
{
    int n = FA_FOLDS && FA_ONE_LAUNCH == 3 ? w.split / FA_FOLD_GROUP : w.split;
    return row_of_part(args, n, head, w.b, w.seq.q_entry, w.seq.q_row, i);
}

/* Of a part that is folded a maximum in log2, and 1 for its sum. */
template <bool PART = TO_PARTS> FA_DEVICE void store_lse(const fa_args &args, const work &w, int head, int i, float lse)
{
    if (PART && FA_FOLDS)
        ((float2 *)args.lse_partial)[partial_row(args, w, head, i)] = sums_of_lse(lse);
    else if (PART)
        args.lse_partial[partial_row(args, w, head, i)] = lse;
    else if (args.lse.data)
        ((float *)args.lse.data)[w.seq.q_entry * args.lse.stride[0] + head * args.lse.stride[1] +
                                 (w.seq.q_row + i) * args.lse.stride[2]] = lse;
}

template <bool PART = TO_PARTS> FA_DEVICE float sink_log2_of(const fa_args &args, int head)
{
    if (PART || !args.sinks.data)
        return -infinity();
    return load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype) * FA_LOG2E;
}

/* Index of O's element (i, col), or of o_partial's. */
template <bool PART = TO_PARTS> FA_DEVICE fa_i64 o_place(const fa_args &args, const work &w, int head, int i, int col)
{
    return PART ? partial_row(args, w, head, i) * FA_HEAD_DIM_V + col
                        : w.seq.q_entry * args.o.stride[0] + (w.seq.q_row + i) * args.o.stride[1] +
                              head * args.o.stride[2] + col * args.o.stride[3];
}

/* Who has stored a block's rows: all of its threads. */
struct whole_block {
    static constexpr int WARPS = FA_WARPS;
    static __device__ __forceinline__ int  thread() { return threadIdx.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
};

/* Far rows once more, a warp a row. */
template <class WHO = whole_block, bool PART = TO_PARTS> static __device__ __noinline__ void redo_far_rows(const fa_args &args, const work &w)
{
    WHO::sync();
    for (int row = WHO::thread() / 32; row < w.rows; row += WHO::WARPS) {
        int i = query_of(args, w, row), head = head_of(args, w, row);
        if (!w.far[row] || i >= w.queries.end)
            continue;
        constexpr int COLS = FA_HEAD_DIM_V / 32;
        double        o[COLS], peak, total;
        float         lse;
        far_row<COLS>(args, w, head, i, o, peak, total);
        float scale = end_far_row(peak, total, sink_log2_of<PART>(args, head), lse) * (FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f) *
                      descale_of(args.descale_v, w.b, w.kv_head);
        if (threadIdx.x % 32 == 0)
            store_lse<PART>(args, w, head, i, lse);
        for (int c = 0, col = threadIdx.x % 32; c < COLS; c++, col += 32)
            if (col < args.head_dim_v)
                store_element(PART ? args.o_partial : args.o.data, o_place<PART>(args, w, head, i, col), PART ? FA_F32 : FA_DTYPE_O, (float)o[c] * scale);
    }
}

/*
 * Inf and NaN of V were cleared from edge tiles, for 0 * NaN would reach rows that do not see the key. Here the rows that
 * do see it get it, in what was just stored. From a clean tile nothing was taken, and NaN stays what it is. Rare, slow, and
 * kept out of the registers of the rest.
 */
template <class WHO = whole_block> static __device__ __noinline__ void add_nonfinite(const fa_args &args, const work &w)
{
    constexpr bool SLICED = FA_HAS_SLICES || FA_MASK == FA_MASK_LISTED; /* which cut clean tiles too */
    fa_range       clean  = {SLICED ? 0 : w.clean.begin * FA_TILE_K, SLICED ? 0 : w.clean.end * FA_TILE_K};
    WHO::sync();
    for (int n = WHO::thread(); n < w.rows * args.head_dim_v; n += 32 * WHO::WARPS) {
        int    row = n / args.head_dim_v, col = n % args.head_dim_v;
        int    i = query_of(args, w, row), head = head_of(args, w, row);
        float  total = 0.0f;
        fa_i64 at    = o_place(args, w, head, i, col);
        for (int j = w.keys.end - 1; j >= w.keys.begin && total == total; j--) {
            if (j >= clean.begin && j < clean.end) {
                j = clean.begin;
                continue;
            }
            float value = load_element(rows_from(args, w, w.v, args.v, j).row(0), col * args.v.stride[3], FA_DTYPE);
            if (!finite(value) && sees(args, w.seq, w.slices, i, j) &&
                (!FA_HAS_DROPOUT || fa_dropout_keeps(&args.dropout, w.b * args.heads_q + head, i, j)))
                total += value;
        }
        void *o     = TO_PARTS ? args.o_partial : args.o.data;
        int   dtype = TO_PARTS ? FA_F32 : FA_DTYPE_O;
        if (!finite(total))
            store_element(o, at, dtype, load_element(o, at, dtype) + total);
    }
}

#endif
