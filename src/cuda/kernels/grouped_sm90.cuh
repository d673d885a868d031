/*
 * Hopper's kernels whose tiles have the queries of all heads that share a key head for rows (forward_latent_sm90.cu, forward_few_sm90.cu): pieces of work, Q, masks, the
 * way out of a part. Of the kernel, which includes this behind its block, it names PAIRS, WORKS, item, item_at, and the barriers found and done.
 */
#ifndef FA_GROUPED_SM90_CUH
#define FA_GROUPED_SM90_CUH

/* Tile n of a work, from the right. */
FA_DEVICE int right_tile(const work &w) { return (w.keys.end - 1) / FA_TILE_K; }
FA_DEVICE int tiles_of(const work &w) { return w.keys.begin < w.keys.end ? right_tile(w) + 1 - w.first_tile : 0; }

/* Of which no mask hides a key. */
FA_DEVICE bool is_masked(fa_range clean, int tile) { return tile < clean.begin || tile >= clean.end; }

/* Waiting for item k and, with the other parity, for its place to be free, which it is at first. */
FA_DEVICE unsigned filled(int k) { return k / WORKS & 1; }
FA_DEVICE unsigned freed(int k) { return filled(k) ^ 1; }

/* What all lanes of this warp have written is there, and what they were to read has been. */
FA_DEVICE void tell(unsigned barrier, bool told = true)
{
    __syncwarp();
    if (told)
        release(barrier);
}

/* ---- planner: one thread ---- */

/* Item k of this block is piece of work n; true if there is one. */
FA_DEVICE bool find_item(const fa_args &args, int k, unsigned n)
{
    bool  more   = n < (unsigned)args.tiles_q * args.heads_k * (FA_FOLDS && FA_ONE_LAUNCH > 1 ? runs_of(args) : args.num_splits) * args.batch;
    item &next   = item_at(k);
    next.none    = !more;
    next.cleared = next.far = 0;
    if (more)
        next.w = work_of<PAIRS ? 2 * FA_TILE_Q : FA_TILE_Q>(args, n);
    return more;
}

/* The k-th piece of work of a block that stays: as far on as there are blocks. BY_LENGTH: where the longest come first there and back by turns, so that who has a long one
 * has a short one next; and each time further round, for lengths that begin anew with other heads would give the same blocks long ones twice each time. */
FA_DEVICE unsigned number_of_item(const fa_args &args, int k)
{
    if (!BY_LENGTH || args.order_heads == 0)
        return blockIdx.x + k * gridDim.x;
    constexpr unsigned TOGETHER = PAIRS ? 2 : 1;
    unsigned           count = gridDim.x / TOGETHER, place = (blockIdx.x / TOGETHER + k / 2 * (3 * count / 8)) % count;
    return (k * count + (k % 2 ? count - 1 - place : place)) * TOGETHER + blockIdx.x % TOGETHER;
}

/* Where all sequences are alike blocks stay; else each has one piece. The first has been found. */
FA_DEVICE void plan(const fa_args &args)
{
    int k = 0;
    for (bool more = !item_at(0).none; more; more = find_item(args, k, number_of_item(args, k))) {
        barrier_arrive(found(k++));
        barrier_wait(done(k), freed(k));
    }
    barrier_arrive(found(k));
}

/* ---- Q ---- */

/* Q by TMA, where a tile's rows are so many whole queries of a group's heads, or heads of one query: a box has what is neighbours. Rows that are nobody's hold
 * anything, and nobody stores them. Otherwise consumers copy rows themselves, to the same place. */
FA_DEVICE bool has_boxes(const fa_args &args) { return args.q_boxes; }

/* Where a tile's box begins. */
FA_DEVICE int first_head(const fa_args &args, const work &w) { return w.head + w.first_row - w.first_q * args.group; }

/* The tile's rows of Q by COUNT threads: to panel_at(panel), where one begins. */
template <int COLS, int COUNT, class AT> FA_DEVICE void copy_rows_of_q(const fa_args &args, const work &w, int thread, AT panel_at)
{
    constexpr int CHUNKS = COLS / 8; /* of 16 bytes, of a row */
    auto rows = queries_from(args, w);
    int  used = rows_used(args, w);
    for (int n = thread; n < FA_TILE_Q * CHUNKS; n += COUNT) {
        int      row = n / CHUNKS, chunk = n % CHUNKS;
        unsigned to  = panel_at(chunk / 8) + row * 128 + (((chunk ^ row) % 8) << 4);
        copy_async(to, row < used ? rows.row(row) + chunk * 8 : (const fa_element *)args.q.data, row < used && chunk * 8 < args.head_dim);
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
}

/* ---- scores and values of a tile that a mask or an end cuts ---- */

/* S of keys that a row does not see becomes -inf. first: this warpgroup's first row. */
template <int COUNT> FA_DEVICE void mask_scores(const fa_args &args, const work &w, float (&s)[COUNT], int first, int tile)
{
    int col = tile * FA_TILE_K + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, query_of(args, w, first + fragment_row() + 8 * h));
        int        left = limits.first - col, right = limits.last - col;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e > right || 8 * j + e < left)
                    s[4 * j + 2 * h + e] = -infinity();
    }
}

/* In an edge tile P is 0 for rows that do not see a key, but 0 * NaN is NaN: columns of V, BYTES of panels, which COUNT threads share, must hold nothing there that is
 * not finite, and zeros in rows that are nobody's. S of the tile has been made. What is taken away add_nonfinite gives to the rows that see it. */
template <int BYTES, int COUNT> FA_DEVICE void clear_values(item &own, unsigned values, int thread, int tile, int barrier)
{
    const work   &w = own.w;
    constexpr int STRIDE = COUNT * 16;
    int           begin = w.keys.begin - tile * FA_TILE_K, end = w.keys.end - tile * FA_TILE_K;
    unsigned      from = values + thread * 16;
#pragma unroll 1
    for (int offset = 0; offset < BYTES; offset += STRIDE) {
        int row = (offset + thread * 16) / 128 % FA_TILE_K;
        if (row < begin || row >= end)
            shared_store(from + offset, make_uint4(0, 0, 0, 0));
    }
    if (FA_MASK != FA_MASK_NONE && holds_nonfinite<BYTES, STRIDE>(from)) {
        clear_nonfinite_of_lane<BYTES, STRIDE>(from);
        own.cleared = 1;
    }
    fence_async();
    named_sync(barrier, COUNT);
}

/* ---- the way out ---- */

/* A part's O of row h, 16 columns of four neighbouring lanes after the other: of two lanes one stores four of the first eight, the other four of the rest. A store
 * writes whole sectors, for halves of sectors take as long. scale below 0: the row is not stored. */
template <int COUNT> FA_DEVICE void store_part(float *to, const float (&o)[COUNT], int h, float scale)
{
    bool odd = threadIdx.x % 2;
    to += odd * 8 + threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < COUNT / 4; j += 2) {
        float mine[2], got[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float first = o[4 * j + 2 * h + e] * scale, second = o[4 * (j + 1) + 2 * h + e] * scale;
            mine[e] = odd ? second : first;
            got[e]  = __shfl_xor_sync(~0u, odd ? first : second, 1);
        }
        if (!(scale < 0.0f))
            *(float4 *)(to + 8 * j) = odd ? make_float4(got[0], got[1], mine[0], mine[1]) : make_float4(mine[0], mine[1], got[0], got[1]);
    }
}

#endif
