/*
 * The forward for Hopper where V is the first columns of K, as in multi-head latent attention (MLA): head_dim to 576, head_dim_v to 512, float16 and
 * bfloat16, any number of queries. Rows of a tile are queries of all heads that share a key head, so K, which is V too, is read once for 64 of them.
 *
 *     warpgroup 0, warp 0   producer: brings the tiles of Q and keeps two slots of 64 keys full by TMA, panel by panel: memory has no room for a third slot, so
 *                           what is read and free is asked for at once, and S of a tile is begun when its first panel is there
 *                  warp 1   planner: one thread finds this block's items, tiles of rows and parts of their keys, ahead
 *     warpgroups 1, 2       consumers: both have all 64 rows, and of O consumer 0 columns 0-255, consumer 1 columns 256-511. Even tiles of keys
 *                           (counted from the right) are consumer 0's to make S and P of, odd ones consumer 1's. Lines are those of
 *                           FlashAttention-2's Algorithm 1:
 *
 *         consumer 0, tile a:   S = Q K^T (line 8), P by softmax (line 9), tells of P; O += P V (line 10) by a, then by b
 *         consumer 1, tile b:   S = Q K^T, O += P V by a, beside which P by softmax, tells of P; O += P V by b
 *
 *                  Q: 9 panels       K, V: 2 slots of 9 panels      P: 1 panel
 *                  64 x 64 each      64 x 64 each                   64 x 64
 *
 * So one has products under way while the other is at its softmax, and a slot's next keys are on their way while the other slot is worked on. P goes to the
 * other consumer through shared memory, with the rows' maxima, which both follow; its own is the left operand as it lies in registers. Whoever writes P has
 * read the other's before, so one place is enough.
 *
 * With FA_VARIANT bit 0 blocks are in pairs (clusters), which have neighbouring tiles of rows and walk the same keys: each asks TMA for half of every panel's rows,
 * for both, so that L2 is read half as much (1 to 3% fewer cycles, decision 0070).
 *
 * As in FlashMLA (DeepSeek, 2025), which takes turns likewise; ours follows maxima that may lag (softmax.cuh), so that O is hardly ever scaled.
 */
#include "latent_block_sm90.cuh"
#include "store_sm90.cuh"

/* ---- planner: one thread ---- */

/* Where all sequences are alike blocks stay, and go on with the item that is as far on as there are blocks; else each has one. */
FA_DEVICE void plan(const fa_args &args)
{
    unsigned items = (unsigned)args.tiles_q * args.heads_k * args.num_splits * args.batch, n = blockIdx.x;
    for (int k = 0;; k++) {
        barrier_wait(done(k), freed(k, WORKS));
        item &next   = item_at(k);
        next.none    = n >= items;
        next.cleared = next.far = 0;
        if (n < items)
            next.w = work_of<PAIRS ? 2 * FA_TILE_Q : FA_TILE_Q>(args, n);
        barrier_arrive(found(k));
        if (n >= items)
            return;
        n += gridDim.x;
    }
}

/* ---- producer: one warp ---- */

/* Q by TMA, where 64 rows are so many whole queries of a group's heads, or heads of one query: a box has what is neighbours, and there are nine. Rows that are
 * nobody's hold anything, and nobody stores them. Otherwise the consumers copy rows themselves. */
FA_DEVICE bool has_boxes(const fa_args &args) { return args.q_boxes; }

FA_DEVICE void fetch_queries(const fa_args &args, const fa_maps &maps, const work &w)
{
    barrier_expect(q_full(), Q_BYTES);
    int query = w.first_row / args.group, head = w.head + w.first_row % args.group;
#pragma unroll 1
    for (int panel = 0; panel < PANELS; panel++)
        tma_load(shared_address(shared) + panel * PANEL_BYTES, maps.q, q_full(), 64 * panel, head, w.seq.q_row + query, w.seq.q_entry);
}

/* Rows of K that lie side by side, of which each lane knows one piece of a tile. Page -1, as any that is out of range: TMA brings zeros. */
struct key_piece {
    int entry, row;
};

/* The first row of a panel that this block asks for. */
FA_DEVICE int first_load() { return PAIRS ? (int)(blockIdx.x % 2) * LOAD_ROWS : 0; }

FA_DEVICE key_piece piece_of_lane(const fa_args &args, const work &w, int tile)
{
    int first = tile * FA_TILE_K + first_load();
    if (!FA_HAS_PAGED)
        return {w.seq.kv_entry, w.seq.kv_row + first};
    first += (int)threadIdx.x * args.page_piece;
    if ((int)threadIdx.x * args.page_piece >= LOAD_ROWS || first >= w.keys.end || first + args.page_piece <= w.keys.begin)
        return {-1, 0};
    int page = first / args.kv_rows;
    return {args.page_table[w.b * args.page_row_stride + page], first - page * args.kv_rows};
}

/* Panels [first, first + COUNT) of a tile; a whole warp calls it. */
template <int COUNT>
FA_DEVICE void fetch_panels(const fa_args &args, const fa_map &map, const work &w, int slot, int use, key_piece piece, int part, int first)
{
    barrier_wait(empty(slot, part), freed(use, 1));
    if (threadIdx.x < COUNT)
        barrier_expect(full(slot, first + threadIdx.x), PANEL_BYTES);
    __syncwarp();
    int rows = FA_HAS_PAGED ? args.page_piece : LOAD_ROWS;
#pragma unroll 1
    for (int row = 0, lane = 0; row < LOAD_ROWS; row += rows, lane++) {
        key_piece of = {__shfl_sync(~0u, piece.entry, lane), __shfl_sync(~0u, piece.row, lane)};
        if (elected())
#pragma unroll
            for (int panel = first; panel < first + COUNT; panel++) {
                unsigned to = slot_at(slot) + panel * PANEL_BYTES + (first_load() + row) * 128;
                if constexpr (PAIRS)
                    tma_load_both(to, map, full(slot, panel), 64 * panel, of.row, w.kv_head, of.entry);
                else
                    tma_load(to, map, full(slot, panel), 64 * panel, of.row, w.kv_head, of.entry);
            }
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    int uses[2] = {0, 0}, q = 0;
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k, WORKS));
        const work &w = item_at(k).w;
        if (item_at(k).none)
            return;
        int tiles = tiles_of(w), right = right_tile(w);
        if (has_boxes(args) && tiles > 0) {
            barrier_wait(q_empty(), freed(q++, 1));
            if (elected())
                fetch_queries(args, maps, w);
        }
        key_piece next = piece_of_lane(args, w, right);
        for (int n = 0; n < tiles; n++) {
            key_piece piece = next;
            if (n + 1 < tiles)
                next = piece_of_lane(args, w, right - n - 1);
            int use = (n % 2 ? uses[1] : uses[0]) + n / 2;
            fetch_panels<1>(args, maps.k, w, n % 2, use, piece, 2, ROTARY); /* free since S of the tile before */
            fetch_panels<4>(args, maps.k, w, n % 2, use, piece, 0, 0);
            fetch_panels<4>(args, maps.k, w, n % 2, use, piece, 1, 4);
        }
        uses[0] += (tiles + 1) / 2;
        uses[1] += tiles / 2;
        release(done(k));
    }
}

/* ---- consumers ---- */

template <int GROUP> struct consumer {
    float o[O_COUNT];     /* this consumer's columns */
    float max[2], sum[2]; /* of rows h = 0, 1: the maximum of dot products that both consumers follow; the sum of this one's exponentials */
    int   use;            /* of its own slot, before this item's */
};

/* This warp has read a part of a slot, which both blocks of a pair fill. */
FA_DEVICE void give_back(unsigned empty)
{
    release(empty);
    if (PAIRS && threadIdx.x % 32 == 1)
        barrier_arrive_at(empty, blockIdx.x % 2 ^ 1);
}

FA_DEVICE int consumer_thread() { return threadIdx.x % 128; }

/* The tile's rows of Q, by the threads of both consumers, who have read those before. */
FA_DEVICE void load_queries(const fa_args &args, const work &w)
{
    constexpr int CHUNKS = PANELS * 8; /* of 16 bytes, of a row */
    auto rows = queries_from(args, w);
    int  thread = threadIdx.x - 128, used = rows_used(args, w);
    for (int n = thread; n < FA_TILE_Q * CHUNKS; n += 256) {
        int      row = n / CHUNKS, chunk = n % CHUNKS;
        unsigned to = shared_address(shared) + chunk / 8 * PANEL_BYTES + row * 128 + (((chunk ^ row) % 8) << 4);
        copy_async(to, row < used ? rows.row(row) + chunk * 8 : (const fa_element *)args.q.data, row < used && chunk * 8 < args.head_dim);
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
    named_sync(CONSUMERS, 256);
}

/* S = Q K^T of the tile in a slot, started, in the order in which its panels come. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], int slot, int use)
{
    matrix q = matrix_of(shared_address(shared), 0), k = matrix_of(slot_at(slot), 0);
    hold(s);
#pragma unroll
    for (int n = 0; n < PANELS; n++) {
        int panel = (n + ROTARY) % PANELS;
        barrier_wait(full(slot, panel), filled(use, 1));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            wgmma_shared(s, q.from(panel * PANEL_BYTES + step * 32), k.from(panel * PANEL_BYTES + step * 32), n + step > 0);
    }
    wgmma_commit();
}

/* This consumer's columns of V in a slot. */
template <int GROUP> FA_DEVICE unsigned values_at(const consumer<GROUP> &, int slot) { return slot_at(slot) + GROUP * HALF_BYTES; }

/* O += P V of a tile, started: its own P, or the other's. */
template <int GROUP> FA_DEVICE void start_own_values(consumer<GROUP> &c, unsigned (&p)[P_STEPS][4])
{
    matrix v = matrix_of(values_at(c, GROUP), PANEL_BYTES);
    hold(c.o);
    hold(p);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_registers(c.o, p[step], v.from(step * 2048), 1);
    wgmma_commit();
}

template <int GROUP> FA_DEVICE void start_others_values(consumer<GROUP> &c)
{
    matrix p = matrix_of(shared_address(shared) + P_AT, 0), v = matrix_of(values_at(c, 1 - GROUP), PANEL_BYTES);
    hold(c.o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_shared<1>(c.o, p.from(step * 32), v.from(step * 2048), 1);
    wgmma_commit();
}

/* S of keys that a row does not see becomes -inf. */
FA_DEVICE void mask_scores(const fa_args &args, const work &w, float (&s)[S_COUNT], int tile)
{
    int col = tile * FA_TILE_K + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, query_of(args, w, fragment_row() + 8 * h));
        int        first = limits.first - col, last = limits.last - col;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e > last || 8 * j + e < first)
                    s[4 * j + 2 * h + e] = -infinity();
    }
}

/* Follows the rows' maximum: what was summed by the old one. No product that adds to O may be under way. */
template <int GROUP> FA_DEVICE void follow(consumer<GROUP> &c, const float (&max)[2], float unit)
{
    if (!__any_sync(~0u, max[0] != c.max[0] || max[1] != c.max[1]))
        return;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        factor[h] = max[h] == c.max[h] ? 1.0f : exp2_fast((c.max[h] - max[h]) * unit);
        c.max[h]  = max[h];
        c.sum[h] *= factor[h];
    }
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        c.o[n] *= factor[n / 2 % 2];
}

/* Line 9 of tile n: the maxima that the rows have then, and S becomes P in registers. Sums take it in when the maxima are followed. */
template <int GROUP> FA_DEVICE void softmax(float (&s)[S_COUNT], const consumer<GROUP> &c, float (&max)[2], float (&sum)[2], unsigned (&p)[P_STEPS][4], float unit)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float highest = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
        for (int j = 1; j < FA_TILE_K / 8; j++)
            highest = fmaxf(highest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        highest = quad_max(highest);
        max[h]  = (highest - c.max[h]) * unit > MAX_LAG ? highest : c.max[h]; /* -inf - -inf is NaN: not far */
        /* A row that has seen nothing has maximum -inf; subtract 0 instead, or exp2(-inf + inf) is NaN. */
        float shift = max[h] == -infinity() ? 0.0f : max[h] * unit;
        sum[h]      = 0.0f;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                s[4 * j + e] = exp2_fast(s[4 * j + e] * unit - shift);
                sum[h] += s[4 * j + e];
            }
    }
#pragma unroll
    for (int n = 0; n < S_COUNT / 2; n++)
        p[n / 4][n % 4] = pack<FA_DTYPE>(s[2 * n], s[2 * n + 1]);
}

/* Tells the other consumer of P and of the rows' maxima. */
template <int GROUP> FA_DEVICE void tell(const consumer<GROUP> &c, const unsigned (&p)[P_STEPS][4], const float (&max)[2])
{
    int      lane = threadIdx.x % 32, row = consumer_thread() / 32 * 16 + lane % 16;
    unsigned to = shared_address(shared) + P_AT + row * 128;
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        store_matrix(to + (((2 * step + lane / 16) ^ (row % 8)) << 4), p[step]);
    if (lane % 4 == 0)
#pragma unroll
        for (int h = 0; h < 2; h++)
            shared_store(shared_address(shared) + MAXIMA_AT + 4 * (fragment_row() + 8 * h), max[h]);
    fence_async();
    named_arrive(P_OF + GROUP, 256);
}

/* Waits for the other's P, and follows its maxima. */
template <int GROUP> FA_DEVICE void hear(consumer<GROUP> &c, float unit)
{
    named_sync(P_OF + 1 - GROUP, 256);
    float max[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        max[h] = shared_load_float(shared_address(shared) + MAXIMA_AT + 4 * (fragment_row() + 8 * h));
    follow(c, max, unit);
}

FA_DEVICE bool is_masked(const work &w, int tile) { return tile < w.clean.begin || tile >= w.clean.end; }

/* In an edge tile P is 0 for rows that do not see a key, but 0 * NaN is NaN: this consumer's columns of V must hold nothing there that is not finite, and zeros
 * in rows that are nobody's. S of the tile has been made. What is taken away add_nonfinite gives to the rows that see it. */
template <int GROUP> FA_DEVICE void clear_values(item &own, const consumer<GROUP> &c, int slot, int tile)
{
    const work   &w = own.w;
    constexpr int STRIDE = 128 * 16;
    int           begin = w.keys.begin - tile * FA_TILE_K, end = w.keys.end - tile * FA_TILE_K;
    unsigned      from = values_at(c, slot) + consumer_thread() * 16;
#pragma unroll 1
    for (int offset = 0; offset < HALF_BYTES; offset += STRIDE) {
        int row = (offset + consumer_thread() * 16) / 128 % FA_TILE_K;
        if (row < begin || row >= end)
            shared_store(from + offset, make_uint4(0, 0, 0, 0));
    }
    if (FA_MASK != FA_MASK_NONE && holds_nonfinite<HALF_BYTES, STRIDE>(from)) {
        clear_nonfinite_of_lane<HALF_BYTES, STRIDE>(from);
        own.cleared = 1;
    }
    fence_async();
    named_sync(ALONE + GROUP, 128);
}

template <int GROUP> FA_DEVICE void values_done(consumer<GROUP> &c, int slot)
{
    wgmma_wait<0>();
    hold(c.o);
    give_back(empty(slot, GROUP));
}

/* The other's tile n: O += P V. */
template <int GROUP> FA_DEVICE void take_others(const fa_args &args, item &own, consumer<GROUP> &c, int n)
{
    hear(c, args.scale_log2);
    int tile = right_tile(own.w) - n;
    if (is_masked(own.w, tile))
        clear_values(own, c, 1 - GROUP, tile);
    start_others_values(c);
}

/* Its own tile n, of which S is there, but for the products: P, which the other is told of. BESIDE: the other's tile before is being added. */
template <bool BESIDE, int GROUP> FA_DEVICE void make_own(const fa_args &args, item &own, consumer<GROUP> &c, float (&s)[S_COUNT], unsigned (&p)[P_STEPS][4], int n)
{
    const work &w = own.w;
    float       max[2], sum[2];
    int         tile = right_tile(w) - n;
    if (is_masked(w, tile))
        mask_scores(args, w, s, tile);
    softmax(s, c, max, sum, p, args.scale_log2);
    if constexpr (BESIDE)
        values_done(c, 1 - GROUP);
    tell(c, p, max);
    follow(c, max, args.scale_log2);
    c.sum[0] += sum[0];
    c.sum[1] += sum[1];
    if (is_masked(w, tile))
        clear_values(own, c, GROUP, tile);
}

/* Its own tile n: S, with nothing of its own under way beside it. The last one gives Q back. */
template <int GROUP> FA_DEVICE void scores_of_own(consumer<GROUP> &c, float (&s)[S_COUNT], int n, int tiles)
{
    start_scores(s, GROUP, c.use + n / 2);
    wgmma_wait<0>();
    hold(s);
    give_back(empty(GROUP, 2));
    if (n + 2 >= tiles)
        release(q_empty());
}

FA_DEVICE void consume(const fa_args &args, item &own, consumer<0> &c, int tiles)
{
    float    s[S_COUNT];
    unsigned p[P_STEPS][4];
    for (int n = 0; n < tiles; n += 2) {
        scores_of_own(c, s, n, tiles);
        make_own<false>(args, own, c, s, p, n);
        start_own_values(c, p);
        values_done(c, 0);
        if (n + 1 < tiles) {
            take_others(args, own, c, n + 1);
            named_arrive(AFTER, 256);
            values_done(c, 1);
        }
    }
}

FA_DEVICE void consume(const fa_args &args, item &own, consumer<1> &c, int tiles)
{
    float    s[S_COUNT];
    unsigned p[P_STEPS][4];
    if (tiles == 1)
        release(q_empty());
    for (int n = 1; n < tiles; n += 2) {
        scores_of_own(c, s, n, tiles); /* not behind the other's P: where a branch changes O while products are under way, the compiler waits for them */
        take_others(args, own, c, n - 1);
        make_own<true>(args, own, c, s, p, n);
        named_sync(AFTER, 256);
        start_own_values(c, p);
        values_done(c, 1);
    }
    if (tiles % 2 == 1) {
        take_others(args, own, c, tiles - 1);
        values_done(c, 0);
    }
}

/* ---- the way out ---- */

/* The two consumers as redo_far_rows and add_nonfinite want them. */
struct both_consumers {
    static constexpr int WARPS = 8;
    static __device__ __forceinline__ int  thread() { return threadIdx.x - 128; }
    static __device__ __forceinline__ void sync() { named_sync(CONSUMERS, 32 * WARPS); }
};

/* A part's O: four neighbouring lanes' columns 8 j ... 8 j + 31 of row h, of which each stores eight. */
FA_DEVICE void store_part(float *to, const float (&o)[O_COUNT], int h, float scale)
{
#pragma unroll
    for (int j = 0; j < O_COUNT / 4; j += 4) {
        unsigned even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            even[i] = (unsigned)__float_as_int(o[4 * (j + i) + 2 * h] * scale);
            odd[i]  = (unsigned)__float_as_int(o[4 * (j + i) + 2 * h + 1] * scale);
        }
        transpose_quad(even);
        transpose_quad(odd);
        if (to) {
            uint4 *at = (uint4 *)(to + 8 * (j + threadIdx.x % 4));
            at[0]     = make_uint4(even[0], odd[0], even[1], odd[1]);
            at[1]     = make_uint4(even[2], odd[2], even[3], odd[3]);
        }
    }
}

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. */
template <int GROUP> FA_DEVICE void store_result(const fa_args &args, item &own, consumer<GROUP> &c)
{
    work    &w    = own.w;
    unsigned sums = shared_address(shared) + SUMS_AT;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = quad_sum(c.sum[h]);
        if (threadIdx.x % 4 == 0)
            shared_store(sums + 4 * (64 * GROUP + fragment_row() + 8 * h), sum);
    }
    both_consumers::sync();
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int     row = fragment_row() + 8 * h, i = query_of(args, w, row), head = head_of(args, w, row);
        bool    used = row < w.rows;
        float   top = c.max[h] * args.scale_log2;
        row_end end = end_of_row(top, shared_load_float(sums + 4 * row) + shared_load_float(sums + 4 * (64 + row)), used ? sink_log2_of(args, head) : -infinity(),
                                 i >= w.seq.seqlen_q);
        far |= used && is_far(top);
        if (threadIdx.x % 4 == 0 && used && GROUP == 0) {
            store_lse(args, w, head, i, end.lse);
            w.far[row] = is_far(top);
        }
        bool   stored = used && !(FA_HAS_SPLIT && end.lse == -infinity()); /* an empty part's O is not read */
        fa_i64 at = o_place(args, w, head, i, GROUP * (FA_HEAD_DIM_V / 2));
        if constexpr (FA_HAS_SPLIT)
            store_part(stored ? args.o_partial + at : nullptr, c.o, h, end.scale);
        else
            store_row<FA_DTYPE_O, FA_HEAD_DIM_V / 2>(stored ? (char *)args.o.data + at * (FA_DTYPE_O == FA_F32 ? 4 : 2) : nullptr, c.o, h, end.scale,
                                                     args.head_dim_v - GROUP * (FA_HEAD_DIM_V / 2));
    }
    if (far)
        own.far = 1;
    both_consumers::sync();
    if (own.far)
        redo_far_rows<both_consumers>(args, w);
    if (own.cleared)
        add_nonfinite<both_consumers>(args, w);
}

template <int GROUP> FA_DEVICE void consume_all(const fa_args &args)
{
    consumer<GROUP> c;
    int             q = 0;
    c.use = 0;
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k, WORKS));
        item &own = item_at(k);
        if (same_for_all(own.none))
            return;
#pragma unroll
        for (int n = 0; n < O_COUNT; n++)
            c.o[n] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            c.max[h] = -infinity();
            c.sum[h] = 0.0f;
        }
        int tiles = same_for_all(tiles_of(own.w));
        if (tiles > 0) {
            if (has_boxes(args))
                barrier_wait(q_full(), filled(q++, 1));
            else
                load_queries(args, own.w);
            consume(args, own, c, tiles);
            c.use += (tiles + 1 - GROUP) / 2;
        }
        store_result(args, own, c);
        release(done(k));
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_latent_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    if constexpr (PAIRS)
        cluster_barrier(); /* the barriers are set up, the other block's too */
    else
        __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            produce(args, maps);
        else if (threadIdx.x == 32)
            plan(args);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        if (same_for_all(threadIdx.x / 128) == 1)
            consume_all<0>(args);
        else
            consume_all<1>(args);
    }
    if constexpr (PAIRS)
        cluster_barrier(); /* the other block arrives at barriers of this one */
}
