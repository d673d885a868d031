/*
 * The forward for Hopper where V is the first columns of K, as in multi-head latent attention (MLA): head_dim to 576, head_dim_v to 512, float16 and
 * bfloat16, any number of queries. Rows of a tile are queries of all heads that share a key head, so K, which is V too, is read once for 64 of them.
 *
 *     warpgroup 0, warp 0   producer: keeps two slots of 64 keys full by TMA, each in two parts: columns 0-255, and 256-575
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
 * As in FlashMLA (DeepSeek, 2025), which takes turns likewise; ours follows maxima that may lag (softmax.cuh), so that O is hardly ever scaled.
 */
#include "forward_work.cuh"
#include "fragment_sm90.cuh"
#include "store_sm90.cuh"

static_assert(FA_TILE_Q == 64 && FA_TILE_K == 64 && FA_WARPS == 12 && PACKED, "a consumer owns 64 rows");
static_assert(FA_HEAD_DIM == 576 && FA_HEAD_DIM_V == 512 && FA_STAGES == 2, "nine panels, the first eight in two halves");
static_assert(FA_DTYPE == FA_F16 || FA_DTYPE == FA_BF16, "two bytes an element");

constexpr int PANEL_BYTES = 64 * 128, Q_BYTES = 9 * PANEL_BYTES, SLOT_BYTES = Q_BYTES, HALF_PANELS = 4, HALF_BYTES = HALF_PANELS * PANEL_BYTES;
constexpr int K_AT = Q_BYTES, P_AT = K_AT + 2 * SLOT_BYTES, MAXIMA_AT = P_AT + PANEL_BYTES, SUMS_AT = MAXIMA_AT + 64 * 4;
constexpr int BARRIERS_AT = SUMS_AT + 2 * 64 * 4, CLEARED_AT = BARRIERS_AT + 8 * 8, WORK_AT = CLEARED_AT + 16;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232; /* 504 a lane of three warpgroups */
constexpr int S_COUNT = FA_TILE_K / 2, O_COUNT = 128, P_STEPS = FA_TILE_K / 16; /* of a thread */

extern "C" __constant__ int fa_shared_bytes = WORK_AT + (int)sizeof(work);
extern __shared__ __align__(1024) char shared[];

/* ---- barriers. A slot is filled in parts 0 and 1, of 4 and 5 panels, and consumer c gives back part c, when both have made S of it ---- */

FA_DEVICE unsigned full(int n, int part) { return shared_address(shared) + BARRIERS_AT + 8 * (n % 2 * 2 + part); }
FA_DEVICE unsigned empty(int n, int part) { return shared_address(shared) + BARRIERS_AT + 32 + 8 * (n % 2 * 2 + part); }
FA_DEVICE unsigned slot(int n) { return shared_address(shared) + K_AT + n % 2 * SLOT_BYTES; }

/* Named ones: P of consumer 0 and of consumer 1 is there; one consumer's threads alone; both consumers'. */
enum { P_OF = 1, ALONE = 3, CONSUMERS = 5 };

FA_DEVICE void start_barriers()
{
    for (int n = 0; n < 2; n++)
        for (int part = 0; part < 2; part++) {
            barrier_init(full(n, part), 1);
            barrier_init(empty(n, part), 4);
        }
    barrier_init_done();
}

/* Tile n of a work, from the right. */
FA_DEVICE int right_tile(const work &w) { return (w.keys.end - 1) / FA_TILE_K; }
FA_DEVICE int tiles_of(const work &w) { return w.keys.begin < w.keys.end ? right_tile(w) + 1 - w.first_tile : 0; }

/* ---- producer: one warp ---- */

/* Rows of K that lie side by side, of which each lane knows one piece of a tile. Page -1, as any that is out of range: TMA brings zeros. */
struct key_piece {
    int entry, row;
};

FA_DEVICE key_piece piece_of_lane(const fa_args &args, const work &w, int tile)
{
    int first = tile * FA_TILE_K;
    if (!FA_HAS_PAGED)
        return {w.seq.kv_entry, w.seq.kv_row + first};
    first += (int)threadIdx.x * args.page_piece;
    if ((int)threadIdx.x * args.page_piece >= FA_TILE_K || first >= w.keys.end || first + args.page_piece <= w.keys.begin)
        return {-1, 0};
    int page = first / args.kv_rows;
    return {args.page_table[w.b * args.page_row_stride + page], first - page * args.kv_rows};
}

/* Panels [first, first + PANELS) of a tile; a whole warp calls it. */
template <int PANELS> FA_DEVICE void fetch_panels(const fa_args &args, const fa_map &map, const work &w, unsigned to, unsigned barrier, key_piece piece, int first)
{
    if (threadIdx.x == 0)
        barrier_expect(barrier, PANELS * PANEL_BYTES);
    __syncwarp();
    int rows = FA_HAS_PAGED ? args.page_piece : FA_TILE_K;
#pragma unroll 1
    for (int row = 0, lane = 0; row < FA_TILE_K; row += rows, lane++) {
        key_piece of = {__shfl_sync(~0u, piece.entry, lane), __shfl_sync(~0u, piece.row, lane)};
        if (elected())
#pragma unroll
            for (int panel = first; panel < first + PANELS; panel++)
                tma_load(to + panel * PANEL_BYTES + row * 128, map, barrier, 64 * panel, of.row, w.kv_head, of.entry);
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps, const work &w)
{
    int       tiles = tiles_of(w), right = right_tile(w);
    key_piece next = piece_of_lane(args, w, right);
    for (int n = 0; n < tiles; n++) {
        key_piece piece = next;
        if (n + 1 < tiles)
            next = piece_of_lane(args, w, right - n - 1);
        barrier_wait(empty(n, 0), n / 2 % 2 ^ 1);
        fetch_panels<HALF_PANELS>(args, maps.k, w, slot(n), full(n, 0), piece, 0);
        barrier_wait(empty(n, 1), n / 2 % 2 ^ 1);
        fetch_panels<HALF_PANELS + 1>(args, maps.k, w, slot(n), full(n, 1), piece, HALF_PANELS);
    }
}

/* ---- consumers ---- */

template <int NUMBER> struct consumer {
    static constexpr int group = NUMBER;

    float o[O_COUNT];     /* this consumer's columns */
    float max[2], sum[2]; /* of rows h = 0, 1: the maximum of dot products that both consumers follow; the sum of this one's exponentials */
};

FA_DEVICE int consumer_thread() { return threadIdx.x % 128; }

/* The tile's rows of Q, each with all that the two consumers' threads copy of it side by side. */
FA_DEVICE void load_queries(const fa_args &args, const work &w)
{
    auto rows = queries_from(args, w);
    int  thread = threadIdx.x - 128, used = rows_used(args, w);
    for (int n = thread; n < 64 * 72; n += 256) {
        int      row = n / 72, chunk = n % 72;
        unsigned to = shared_address(shared) + chunk / 8 * PANEL_BYTES + row * 128 + (((chunk ^ row) % 8) << 4);
        copy_async(to, row < used ? rows.row(row) + chunk * 8 : (const fa_element *)args.q.data, row < used && chunk * 8 < args.head_dim);
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
    named_sync(CONSUMERS, 256);
}

/* S = Q K^T of tile n, started. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], int n)
{
    matrix q = matrix_of(shared_address(shared), 0), k = matrix_of(slot(n), 0);
    barrier_wait(full(n, 0), n / 2 % 2);
    hold(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * HALF_PANELS; step++)
        wgmma_shared(s, q.from(step / 4 * PANEL_BYTES + step % 4 * 32), k.from(step / 4 * PANEL_BYTES + step % 4 * 32), step > 0);
    barrier_wait(full(n, 1), n / 2 % 2);
    wgmma_fence();
#pragma unroll
    for (int step = 4 * HALF_PANELS; step < FA_HEAD_DIM / 16; step++)
        wgmma_shared(s, q.from(step / 4 * PANEL_BYTES + step % 4 * 32), k.from(step / 4 * PANEL_BYTES + step % 4 * 32), 1);
    wgmma_commit();
}

/* This consumer's columns of V of tile n. */
template <int GROUP> FA_DEVICE unsigned values_at(const consumer<GROUP> &c, int n) { return slot(n) + c.group * HALF_BYTES; }

/* O += P V of tile n, started: its own P, or the other's. */
template <int GROUP> FA_DEVICE void start_own_values(consumer<GROUP> &c, unsigned (&p)[P_STEPS][4], int n)
{
    matrix v = matrix_of(values_at(c, n), PANEL_BYTES);
    hold(c.o);
    hold(p);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_registers(c.o, p[step], v.from(step * 2048), 1);
    wgmma_commit();
}

template <int GROUP> FA_DEVICE void start_others_values(consumer<GROUP> &c, int n)
{
    matrix p = matrix_of(shared_address(shared) + P_AT, 0), v = matrix_of(values_at(c, n), PANEL_BYTES);
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
    named_arrive(P_OF + c.group, 256);
}

/* Waits for the other's P, and follows its maxima. */
template <int GROUP> FA_DEVICE void hear(consumer<GROUP> &c, float unit)
{
    named_sync(P_OF + 1 - c.group, 256);
    float max[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        max[h] = shared_load_float(shared_address(shared) + MAXIMA_AT + 4 * (fragment_row() + 8 * h));
    follow(c, max, unit);
}

FA_DEVICE bool is_masked(const work &w, int tile) { return tile < w.clean.begin || tile >= w.clean.end; }

/* In an edge tile P is 0 for rows that do not see a key, but 0 * NaN is NaN: this consumer's columns of V must hold nothing there that is not finite, and zeros
 * in rows that are nobody's. S of the tile has been made. What is taken away add_nonfinite gives to the rows that see it. */
template <int GROUP> FA_DEVICE void clear_values(const work &w, const consumer<GROUP> &c, int n, int tile)
{
    constexpr int STRIDE = 128 * 16;
    int           begin = w.keys.begin - tile * FA_TILE_K, end = w.keys.end - tile * FA_TILE_K;
    unsigned      from = values_at(c, n) + consumer_thread() * 16;
#pragma unroll 1
    for (int offset = 0; offset < HALF_BYTES; offset += STRIDE) {
        int row = (offset + consumer_thread() * 16) / 128 % FA_TILE_K;
        if (row < begin || row >= end)
            shared_store(from + offset, make_uint4(0, 0, 0, 0));
    }
    if (FA_MASK != FA_MASK_NONE && holds_nonfinite<HALF_BYTES, STRIDE>(from)) {
        clear_nonfinite_of_lane<HALF_BYTES, STRIDE>(from);
        shared_store(shared_address(shared) + CLEARED_AT, 1.0f);
    }
    fence_async();
    named_sync(ALONE + c.group, 128);
}

template <int GROUP> FA_DEVICE void values_done(consumer<GROUP> &c, int n)
{
    wgmma_wait<0>();
    hold(c.o);
    release(empty(n, c.group));
}

/* The other's tile n: O += P V. */
template <int GROUP> FA_DEVICE void take_others(const fa_args &args, const work &w, consumer<GROUP> &c, int n)
{
    hear(c, args.scale_log2);
    int tile = right_tile(w) - n;
    if (is_masked(w, tile))
        clear_values(w, c, n, tile);
    start_others_values(c, n);
}

/* Its own tile n, of which S is there, but for the products: P, which the other is told of. BESIDE: the other's tile before is being added. */
template <bool BESIDE, int GROUP> FA_DEVICE void make_own(const fa_args &args, const work &w, consumer<GROUP> &c, float (&s)[S_COUNT], unsigned (&p)[P_STEPS][4], int n)
{
    float max[2], sum[2];
    int   tile = right_tile(w) - n;
    if (is_masked(w, tile))
        mask_scores(args, w, s, tile);
    softmax(s, c, max, sum, p, args.scale_log2);
    if constexpr (BESIDE)
        values_done(c, n - 1);
    tell(c, p, max);
    follow(c, max, args.scale_log2);
    c.sum[0] += sum[0];
    c.sum[1] += sum[1];
    if (is_masked(w, tile))
        clear_values(w, c, n, tile);
}

FA_DEVICE void consume(const fa_args &args, const work &w, consumer<0> &c)
{
    float    s[S_COUNT];
    unsigned p[P_STEPS][4];
    int      tiles = same_for_all(tiles_of(w));
    for (int n = 0; n < tiles; n += 2) {
        start_scores(s, n);
        wgmma_wait<0>();
        hold(s);
        make_own<false>(args, w, c, s, p, n);
        start_own_values(c, p, n);
        values_done(c, n);
        if (n + 1 < tiles) {
            take_others(args, w, c, n + 1);
            values_done(c, n + 1);
        }
    }
}

FA_DEVICE void consume(const fa_args &args, const work &w, consumer<1> &c)
{
    float    s[S_COUNT];
    unsigned p[P_STEPS][4];
    int      tiles = same_for_all(tiles_of(w));
    for (int n = 1; n < tiles; n += 2) {
        start_scores(s, n);
        wgmma_wait<0>(); /* not behind the other's P: where a branch changes O while products are under way, the compiler waits for them */
        hold(s);
        take_others(args, w, c, n - 1);
        make_own<true>(args, w, c, s, p, n);
        start_own_values(c, p, n);
        values_done(c, n);
    }
    if (tiles % 2 == 1) {
        take_others(args, w, c, tiles - 1);
        values_done(c, tiles - 1);
    }
}

/* ---- the way out ---- */

/* The two consumers as redo_far_rows and add_nonfinite want them. */
struct both_consumers {
    static constexpr int WARPS = 8;
    static __device__ __forceinline__ int  thread() { return threadIdx.x - 128; }
    static __device__ __forceinline__ void sync() { named_sync(CONSUMERS, 32 * WARPS); }
};

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. */
template <int GROUP> FA_DEVICE void store_result(const fa_args &args, work &w, consumer<GROUP> &c)
{
    unsigned sums = shared_address(shared) + SUMS_AT;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = quad_sum(c.sum[h]);
        if (threadIdx.x % 4 == 0)
            shared_store(sums + 4 * (64 * c.group + fragment_row() + 8 * h), sum);
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
        if (threadIdx.x % 4 == 0 && used && c.group == 0) {
            store_lse(args, w, head, i, end.lse);
            w.far[row] = is_far(top);
        }
        if (!used || (FA_HAS_SPLIT && end.lse == -infinity())) /* an empty part's O is not read */
            used = false;
        fa_i64 at = o_place(args, w, head, i, c.group * (FA_HEAD_DIM_V / 2));
        if constexpr (FA_HAS_SPLIT)
            store_row<FA_F32, FA_HEAD_DIM_V / 2>(used ? (char *)(args.o_partial + at) : nullptr, c.o, h, end.scale, FA_HEAD_DIM_V / 2);
        else
            store_row<FA_DTYPE_O, FA_HEAD_DIM_V / 2>(used ? (char *)args.o.data + at * (FA_DTYPE_O == FA_F32 ? 4 : 2) : nullptr, c.o, h, end.scale,
                                                     args.head_dim_v - c.group * (FA_HEAD_DIM_V / 2));
    }
    if (__any_sync(~0u, far))
        shared_store(shared_address(shared) + CLEARED_AT + 4, 1.0f);
    both_consumers::sync();
    if (shared_load_float(shared_address(shared) + CLEARED_AT + 4) != 0.0f)
        redo_far_rows<both_consumers>(args, w);
    if (shared_load_float(shared_address(shared) + CLEARED_AT) != 0.0f)
        add_nonfinite<both_consumers>(args, w);
}

template <int GROUP> FA_DEVICE void work_as(const fa_args &args, work &w)
{
    consumer<GROUP> c;
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        c.o[n] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        c.max[h] = -infinity();
        c.sum[h] = 0.0f;
    }
    consume(args, w, c);
    store_result(args, w, c);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_latent_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    work &w = *(work *)(shared + WORK_AT);
    if (threadIdx.x == 0) {
        start_barriers();
        shared_store(shared_address(shared) + CLEARED_AT, make_uint4(0, 0, 0, 0));
        w = work_of(args);
    }
    __syncthreads(); /* the barriers are set up, the work is known */
    if (w.rows <= 0)
        return;
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            produce(args, maps, w);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        load_queries(args, w);
        if (same_for_all(threadIdx.x / 128) == 1)
            work_as<0>(args, w);
        else
            work_as<1>(args, w);
    }
}
