/* Where a sequence lies, which key tiles a tile of queries meets, and which elements of an edge tile are visible. The
 * rules are mask.h's. */
#ifndef FA_MASK_CUH
#define FA_MASK_CUH

#include "part_rows.cuh"

/* fa_sequence of call.h, from device memory. Lengths are forced into the tensors' sizes. */
struct sequence {
    int q_entry, q_row, kv_entry, kv_row;
    int rows_q;               /* rows of q that belong to it; those from seqlen_q on get 0 */
    int seqlen_q;
    int key_begin, seqlen_k;  /* keys [key_begin, seqlen_k) count */
    int diagonal;
    int rows_k;               /* rows of k and v that belong to it */
};

FA_DEVICE int clamp_int(int x, int low, int high) { return fa_max_int(low, fa_min_int(x, high)); }

FA_DEVICE sequence sequence_at(const fa_args &args, int b)
{
    sequence s = {b, 0, b, 0, args.q_rows, 0, 0, 0, 0, args.kv_rows};
    if (args.cu_seqlens_q) {
        s.q_row  = clamp_int(args.cu_seqlens_q[b], 0, args.all_rows_q);
        s.rows_q = clamp_int(args.cu_seqlens_q[b + 1], s.q_row, args.all_rows_q) - s.q_row;
#pragma unroll 1 /* a division would need registers that a producer has not; mostly there is one entry */
        for (s.q_entry = 0; args.q_entries > 1 && s.q_row >= args.q_rows; s.q_entry++)
            s.q_row -= args.q_rows;
        if (!has_length(args, s.rows_q))
            s.rows_q = 0;
        s.rows_q = fa_min_int(s.rows_q, args.max_seqlen_q);
    }
    if (args.cu_seqlens_k) {
        s.kv_entry = args.cu_seqlens_q ? s.q_entry : 0; /* of documents the same */
        s.kv_row   = clamp_int(args.cu_seqlens_k[b], 0, args.all_rows_k);
        s.rows_k   = clamp_int(args.cu_seqlens_k[b + 1], s.kv_row, args.all_rows_k) - s.kv_row;
        s.kv_row -= s.kv_entry * args.kv_rows;
    }
    if (args.cache_batch_idx)
        s.kv_entry = args.cache_batch_idx[b];
    if (FA_HAS_PAGED)
        s.rows_k = args.pages_per_seq * args.kv_rows;
    else if ((unsigned)s.kv_entry >= (unsigned)args.kv_entries)
        s.kv_entry = s.rows_k = 0;
    s.rows_k    = fa_min_int(s.rows_k, args.max_seqlen_k);
    s.seqlen_q  = args.seqused_q ? clamp_int(args.seqused_q[b], 0, s.rows_q) : s.rows_q;
    s.seqlen_k  = args.seqused_k ? clamp_int(args.seqused_k[b], 0, s.rows_k) : s.rows_k;
    s.key_begin = args.leftpad_k ? clamp_int(args.leftpad_k[b], 0, s.rows_k) : 0;
    s.diagonal  = s.seqlen_k - s.seqlen_q;
    return s;
}

/* Who finds its work reads device memory, which a launch that has not ended may write. */
FA_DEVICE bool reads_lengths(const fa_args &args)
{
    return FA_DTYPE == FA_F8E4M3 || args.cu_seqlens_q || args.cu_seqlens_k || args.cache_batch_idx || args.seqused_q || args.seqused_k || args.leftpad_k;
}

/* The window with what FA_MASK says of it folded in, so that the compiler drops the tests that cannot matter. */
FA_DEVICE fa_window window_of(const fa_args &args)
{
    fa_window window = {FA_UNLIMITED, FA_UNLIMITED};
    if (FA_MASK == FA_MASK_WINDOW || FA_MASK == FA_MASK_LISTED)
        window.left = args.window.left;
    if (FA_MASK != FA_MASK_NONE)
        window.right = args.window.right;
    return window;
}

/* The key tiles of which every query sees every key (slices apart): they need no mask, and they are neighbours. */
template <int TILE_K>
FA_DEVICE fa_range clean_tiles(const fa_args &args, const sequence &s, fa_range queries, fa_range keys)
{
    fa_window window = window_of(args);
    int       begin = keys.begin, end = keys.end;
    if (FA_MASK == FA_MASK_WINDOW)
        begin = fa_max_int(begin, queries.end - 1 + s.diagonal - window.left);
    if (FA_MASK != FA_MASK_NONE)
        end = fa_min_int(end, queries.begin + s.diagonal + window.right + 1);
    return {(begin + TILE_K - 1) / TILE_K, end < 0 ? 0 : end / TILE_K};
}

/* Which tile of which of the grid's heads, sequences and splits block `n` takes. Causal tiles (0: the longest) come in up to
 * eight rounds over all heads, so that the last blocks of the grid are short ones; within a round a head's tiles are
 * neighbours, 256 rows of them or more, which read the same rows through L2 (decision 0044). */
struct grid_place {
    unsigned tile, other;
};

template <unsigned ROWS> FA_DEVICE grid_place grid_place_of(unsigned n, unsigned tiles)
{
    if (FA_MASK != FA_MASK_CAUSAL)
        return {n % tiles, n / tiles};
    unsigned others = gridDim.x / tiles, width = max((tiles + 7) / 8, 256 / ROWS);
    unsigned round = n / (width * others), first = round * width;
    n -= first * others;
    width = min(width, tiles - first);
    return {first + n % width, n / width};
}

/* The slices of sequence b. */
FA_DEVICE fa_range slices_of(const fa_args &args, int b)
{
    fa_range all = {0, args.num_slices};
    if (args.slice_offsets) {
        all.begin = args.slice_offsets[b];
        all.end   = args.slice_offsets[b + 1];
    }
    return all;
}

FA_DEVICE bool slices_see(const fa_args &args, fa_range own, int i, int j)
{
    for (int n = own.begin; n < own.end; n++) {
        fa_slice s = args.slices[n];
        if (fa_slice_sees(s.q_begin, s.q_end, s.k_begin, s.k_end, s.kind, i, j))
            return true;
    }
    return false;
}

/* What a slice shows of a tile of queries x keys: 0 nothing, 1 some, 2 all of it. */
FA_DEVICE int slice_of_tile(fa_slice s, fa_range queries, fa_range keys)
{
    int i0 = fa_max_int(queries.begin, s.q_begin), i1 = fa_min_int(queries.end, s.q_end) - 1;
    int j0 = fa_max_int(keys.begin, s.k_begin), j1 = fa_min_int(keys.end, s.k_end) - 1;
    if (i0 > i1 || j0 > j1)
        return 0;
    /* Of the common rectangle, causal sees its lower left corner (i1, j0) first, inverse causal (i0, j1). Both at
     * once make a band: some pair is on it iff each half meets the rectangle and the band is not empty. */
    bool causal = s.kind & 1, inverse = s.kind & 2;
    if ((causal && j0 - s.k_end > i1 - s.q_end) || (inverse && j1 - s.k_begin < i0 - s.q_begin))
        return 0;
    bool whole = i0 == queries.begin && i1 == queries.end - 1 && j0 == keys.begin && j1 == keys.end - 1 &&
                 (!causal || j1 - s.k_end <= i0 - s.q_end) && (!inverse || j0 - s.k_begin >= i1 - s.q_begin);
    return whole ? 2 : 1;
}

/* What the slices do to a tile of queries x keys: 0 nothing visible, 1 some, 2 all of it (one slice holds it whole). */
FA_DEVICE int slices_tile(const fa_args &args, fa_range own, fa_range queries, fa_range keys)
{
    int seen = 0;
    for (int n = own.begin; n < own.end && seen < 2; n++)
        seen = fa_max_int(seen, slice_of_tile(args.slices[n], queries, keys));
    return seen;
}

/* One element, the plain way: for what is rare. */
FA_DEVICE bool sees(const fa_args &args, const sequence &s, fa_range slices, int i, int j)
{
    return i < s.seqlen_q && j >= s.key_begin && j < s.seqlen_k &&
           fa_window_sees(window_of(args), s.diagonal, i, j) && (!FA_HAS_SLICES || slices_see(args, slices, i, j));
}

/* The keys [first, last] that query i sees by window and lengths. */
struct row_limits {
    int first, last;
};

FA_DEVICE row_limits row_limits_of(fa_window window, const sequence &s, fa_range keys, int i)
{
    row_limits limits = {keys.begin, keys.end - 1};
    if (FA_MASK == FA_MASK_WINDOW)
        limits.first = fa_max_int(limits.first, i + s.diagonal - window.left);
    if (FA_MASK != FA_MASK_NONE)
        limits.last = fa_min_int(limits.last, i + s.diagonal + window.right);
    return limits;
}

#endif
