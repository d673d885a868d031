/*
 * FlashAttention-3's forward for few queries on Hopper (flash decoding, several tokens drafted at once, pieces of a prompt): float16 and bfloat16. Rows of a tile are
 * queries of all heads that share a key head, so each key is read once for 64 or 128 of them.
 *
 *     warpgroup 0, warp 0    producer: one thread fetches tiles of K and V by TMA; of keys in pages all lanes look up pages, and fetch K
 *                  warp 1    planner: one thread finds this block's items, tiles of rows and parts of their keys, ahead, the first while barriers are set up
 *                  warp 2    of keys in pages: all lanes fetch V
 *                  warp 3    one thread fetches Q
 *     warpgroup 1..          consumers: 64 rows each; all of them walk the same keys, from right to left
 *
 * A consumer's step, by the lines of FlashAttention-2's Algorithm 1:
 *
 *         start S' = Q K^T of the next tile (line 8), then O += P V of this one (line 10)
 *         when S' is there: softmax of S' (line 9), while P V runs
 *         when O is there:  P = S'
 *
 * With 64 rows tensor cores and exponentials take a third of the time that memory takes for the keys. So what counts is that memory never waits: with up to 128 columns a
 * block of 64 rows leaves room for another one on its multiprocessor, and the next item's Q and first keys are on their way while this one's last are multiplied and its O
 * is stored.
 *
 * Long keys are parted by their number alone, and a row's parts are folded in one order (fold_parts.cuh). With FA_ONE_LAUNCH 2 a block has all parts of its tile: where one
 * ends, O is folded into what those before left; with 3 it has a group of them. Results of groups, or with 0 of parts, fold.cu folds.
 * Shared memory: a tile of Q, FA_STAGES tiles of K and of V (panels as in panels_sm90.cuh), barriers, items; where a block has several parts, O of what has been folded of
 * a group in place of the last tiles, if two stages are left, else in memory.
 */
#define FA_FOLDS 1
#define FA_STREAMS
#include "forward_work.cuh"
#include "fold_block_sm90.cuh"
#include "softmax_sm90.cuh"
#include "store_sm90.cuh"

constexpr bool PAIRS = false; /* of blocks: grouped_sm90.cuh */
constexpr bool WHOLE = FA_HAS_SPLIT && FA_ONE_LAUNCH == 2, FOLDS_PARTS = FA_HAS_SPLIT && FA_ONE_LAUNCH > 1;
constexpr int  CONSUMERS = FA_WARPS / 4 - 1, CONSUMING = 128 * CONSUMERS; /* CONSUMING: their threads */
constexpr int  PANEL = FA_TILE_Q * 128, Q_PANELS = FA_HEAD_DIM / 64, STEPS = FA_HEAD_DIM / 16;  /* of Q; STEPS: of Q K^T */
constexpr bool KEEPS_Q = FA_HEAD_DIM <= 128; /* in registers, where there are as many besides O */
static_assert(FA_TILE_Q == 64 * CONSUMERS && PACKED, "a consumer owns 64 rows");
static_assert(FA_DTYPE == FA_F16 || FA_DTYPE == FA_BF16, "two bytes an element");
static_assert(FA_HEAD_DIM % 64 == 0 && FA_HEAD_DIM_V % 64 == 0 && !MODIFIED, "tiles are made of panels; scores are dot products");

/* Of 512 registers that a lane of each of a block's warpgroups has, or 256 if there are two blocks; of one consumer alone there is nothing to take. */
constexpr bool MOVES_REGISTERS = FA_MIN_BLOCKS > 1 || CONSUMERS > 1;
constexpr int  PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = FA_MIN_BLOCKS > 1 ? 216 : 232;

constexpr int Q_BYTES = Q_PANELS * PANEL, K_BYTES = FA_TILE_K * FA_HEAD_DIM * 2, V_BYTES = FA_TILE_K * FA_HEAD_DIM_V * 2;
constexpr int O_BYTES = FA_TILE_Q * FA_HEAD_DIM_V * 4, STAGES_BYTES = FA_STAGES * (K_BYTES + V_BYTES);
constexpr bool KEEPS_HERE = FOLDS_PARTS && STAGES_BYTES - O_BYTES >= 2 * (K_BYTES + V_BYTES); /* a tile is multiplied while the next one comes */
constexpr int KEPT_BYTES = KEEPS_HERE ? O_BYTES : 0, LEFT_BYTES = STAGES_BYTES - KEPT_BYTES;
constexpr int K_STAGES = LEFT_BYTES / (K_BYTES + V_BYTES), V_STAGES = (LEFT_BYTES - K_STAGES * K_BYTES) / V_BYTES;
constexpr int K_AT = Q_BYTES, V_AT = K_AT + K_STAGES * K_BYTES, KEPT_AT = V_AT + V_STAGES * V_BYTES, BARRIERS_AT = KEPT_AT + KEPT_BYTES;
constexpr int WORKS = 2, PRODUCERS = FA_HAS_PAGED ? 3 : 2, NUM_BARRIERS = 2 + 2 * K_STAGES + 2 * V_STAGES + 2 * WORKS;
constexpr int ITEMS_AT = (BARRIERS_AT + 8 * NUM_BARRIERS + 15) / 16 * 16;

/* What a block works on. */
struct item {
    work w;
    int  none;         /* there is nothing more, and no work here */
    int  cleared, far; /* Inf or NaN were taken away from V; a row is far */
};

extern "C" __constant__ int fa_shared_bytes = ITEMS_AT + WORKS * (int)sizeof(item);
extern __shared__ __align__(1024) char shared[];

FA_DEVICE item &item_at(int k) { return ((item *)(shared + ITEMS_AT))[k % WORKS]; }

/* ---- barriers; `n` counts tiles of keys since the kernel began. Phases alternate, nothing is reset ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned q_full() { return barrier_at(0); }
FA_DEVICE unsigned q_empty() { return barrier_at(1); }
FA_DEVICE unsigned k_full(unsigned n) { return barrier_at(2 + n % K_STAGES); }
FA_DEVICE unsigned k_empty(unsigned n) { return barrier_at(2 + K_STAGES + n % K_STAGES); }
FA_DEVICE unsigned v_full(unsigned n) { return barrier_at(2 + 2 * K_STAGES + n % V_STAGES); }
FA_DEVICE unsigned v_empty(unsigned n) { return barrier_at(2 + 2 * K_STAGES + V_STAGES + n % V_STAGES); }
FA_DEVICE unsigned found(int k) { return barrier_at(2 + 2 * K_STAGES + 2 * V_STAGES + k % WORKS); }
FA_DEVICE unsigned done(int k) { return barrier_at(2 + 2 * K_STAGES + 2 * V_STAGES + WORKS + k % WORKS); }

FA_DEVICE void start_barriers()
{
    barrier_init(q_full(), 1);
    barrier_init(q_empty(), 4 * CONSUMERS);
    for (int n = 0; n < K_STAGES; n++) {
        barrier_init(k_full(n), 1);
        barrier_init(k_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < V_STAGES; n++) {
        barrier_init(v_full(n), 1);
        barrier_init(v_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < WORKS; n++) {
        barrier_init(found(n), 1);
        barrier_init(done(n), 4 * CONSUMERS + PRODUCERS);
    }
    barrier_init_done();
}

enum { TOGETHER = 1 }; /* named: all consumers */

FA_DEVICE unsigned q_tile() { return shared_address(shared); }
FA_DEVICE unsigned k_tile(unsigned n) { return shared_address(shared) + K_AT + n % K_STAGES * K_BYTES; }
FA_DEVICE unsigned v_tile(unsigned n) { return shared_address(shared) + V_AT + n % V_STAGES * V_BYTES; }

#include "grouped_sm90.cuh"
#include "page_pieces_sm90.cuh"

/* ---- producers ---- */

/* Q of all items that have keys, by one thread. */
FA_DEVICE void produce_queries(const fa_args &args, const fa_map &map)
{
    unsigned items = 0;
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        const work &w = item_at(k).w;
        if (item_at(k).none)
            return;
        if (tiles_of(w) > 0) {
            barrier_wait(q_empty(), freed<1>(items++));
            barrier_expect(q_full(), has_boxes(args) ? Q_BYTES : 0);
            if (has_boxes(args)) /* else consumers fill it */
#pragma unroll
                for (int panel = 0; panel < Q_PANELS; panel++)
                    tma_load(q_tile() + panel * PANEL, map, q_full(), 64 * panel, first_head(args, w), w.seq.q_row + w.first_q, w.seq.q_entry);
        }
        barrier_arrive(done(k));
    }
}

/* Keys that lie in one piece, by one thread. */
FA_DEVICE void fetch_keys(const fa_maps &maps, const work &w, int tile, unsigned n)
{
    int row = w.seq.kv_row + tile * FA_TILE_K;
    barrier_wait(k_empty(n), freed<K_STAGES>(n));
    barrier_expect(k_full(n), K_BYTES);
    fetch_tile<FA_TILE_K, FA_HEAD_DIM>(k_tile(n), maps.k, k_full(n), w.seq.kv_entry, w.kv_head, row);
    barrier_wait(v_empty(n), freed<V_STAGES>(n));
    barrier_expect(v_full(n), V_BYTES);
    fetch_tile<FA_TILE_K, FA_HEAD_DIM_V>(v_tile(n), maps.v, v_full(n), w.seq.kv_entry, w.kv_head, row);
}

/* VALUES: keys in pages, whose V this warp fetches; else K, and V too where it lies in one piece. */
template <bool VALUES> FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned n = 0; /* tiles of keys */
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        const work &w = item_at(k).w;
        if (item_at(k).none)
            return;
        int tiles = tiles_of(w), tile = right_tile(w);
        for (; tiles > 0; tiles--, tile--, n++)
            if constexpr (FA_HAS_PAGED)
                fetch_paged_tile<VALUES>(args, VALUES ? maps.v : maps.k, w, tile, n);
            else
                fetch_keys(maps, w, tile, n);
        if constexpr (FA_HAS_PAGED)
            tell(done(k));
        else
            barrier_arrive(done(k));
    }
}

/* ---- consumers ---- */

/* What a consumer has at hand. */
struct consumer {
    float     o[O_COUNT];
    unsigned  q[KEEPS_Q ? STEPS + 1 : 1][4], p[P_STEPS][4];
    row_state rows;
    row_fold  sums[2], total[2]; /* rows h = 0, 1 of what has been folded of a group, and of the groups before */
    bool      kept[2];           /* there is something */
    int       group;
    unsigned  tile, items; /* tiles of keys and items that have some, since the kernel began */
};

/* Consumers as redo_far_rows and add_nonfinite want them. */
struct all_consumers {
    static constexpr int WARPS = 4 * CONSUMERS;
    static __device__ __forceinline__ int  thread() { return threadIdx.x - 128; }
    static __device__ __forceinline__ void sync() { named_sync(TOGETHER, 32 * WARPS); }
};

/* The item's Q, into registers if it fits there; then its place is free. */
FA_DEVICE void take_queries(const fa_args &args, const work &w, consumer &c)
{
    barrier_wait(q_full(), filled<1>(c.items++));
    if (!has_boxes(args)) {
        copy_rows_of_q<FA_HEAD_DIM, CONSUMING>(args, w, all_consumers::thread(), [](int panel) { return q_tile() + panel * PANEL; });
        all_consumers::sync();
    }
    if constexpr (KEEPS_Q) {
        int lane = threadIdx.x % 32, row = c.group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            load_matrix(c.q[step], q_tile() + step / 4 * PANEL + row * 128 + (((step % 4 * 2 + lane / 16) ^ (row % 8)) << 4));
        tell(q_empty());
    }
}

FA_DEVICE void wait_for_k(unsigned n) { barrier_wait(k_full(n), filled<K_STAGES>(n)); }
FA_DEVICE void wait_for_v(unsigned n) { barrier_wait(v_full(n), filled<V_STAGES>(n)); }

/* S = Q K^T of a tile. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], consumer &c, unsigned n)
{
    start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, c.q, q_tile() + c.group * (64 * 128), k_tile(n));
}

/* O += P V of this consumer's next tile, which is number `tile` of its sequence. */
FA_DEVICE void start_values(item &own, consumer &c, fa_range clean, int tile)
{
    if (is_masked(clean, tile))
        clear_values<V_BYTES, CONSUMING>(own, v_tile(c.tile), all_consumers::thread(), tile, TOGETHER);
    start_output(c.o, c.p, v_tile(c.tile), true);
}

FA_DEVICE void finish_values(consumer &c)
{
    wgmma_wait<0>();
    hold(c.o);
    hold(c.p);
    release(v_empty(c.tile));
    c.tile++;
}

/* ---- parts ---- */

FA_DEVICE int row_of_thread(const consumer &c, int h) { return 64 * c.group + fragment_row() + 8 * h; }

struct own_warp {
    static constexpr int WARPS = 1;
    static __device__ __forceinline__ int  thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
};

/* Those of a warp's 16 rows, from `first` on, that `far` has a bit for, once more for a part with these keys: into the place for a partial result. */
static __device__ __noinline__ void redo_far_part(const fa_args &args, const work &w, fa_range keys, int first, unsigned far)
{
    work part = w;
    part.keys = keys;
    for (int row = 0; row < FA_TILE_Q; row++)
        part.far[row] = row >= first && row < first + 16 && (far >> (row - first) & 1);
    redo_far_rows<own_warp, true>(args, part);
    __syncwarp();
}

/* Places for O, four floats of a thread's, then the next thread's: what has been folded of a group, which each part's end reads and writes, and in memory the groups before,
 * and one for far rows. */
enum { GROUP, GROUPS, SPARE };

FA_DEVICE float4 *place_of(const fa_args &args, int which)
{
    if (KEEPS_HERE && which == GROUP)
        return (float4 *)(shared + KEPT_AT) + all_consumers::thread();
    return (float4 *)(args.folded_o + ((fa_i64)blockIdx.x * FA_FOLD_PLACES + which) * FA_TILE_Q * FA_HEAD_DIM_V) + all_consumers::thread();
}

/* A part has far rows: its warp computes them again, and who has them takes them from memory, O by way of where it is kept, for registers have no numbers. Rare. */
FA_DEVICE void take_far_rows(const fa_args &args, const work &w, consumer &c, float (&max)[2], float (&sum)[2], const bool (&is_far)[2], int tile)
{
    unsigned votes[2] = {__ballot_sync(~0u, is_far[0]), __ballot_sync(~0u, is_far[1])}, far = 0; /* four lanes a row */
#pragma unroll 1
    for (int n = 0; n < 16; n++)
        far |= ((n < 8 ? votes[0] : votes[1]) >> (n % 8 * 4) & 1) << n;
    int     part  = tile * FA_TILE_K / w.part_keys;
    float4 *place = place_of(args, SPARE);
    keep(place, c.o);
    redo_far_part(args, w, {fa_max_int(w.keys.begin, part * w.part_keys), fa_min_int(w.keys.end, (part + 1) * w.part_keys)}, 64 * c.group + threadIdx.x % 128 / 32 * 16, far);
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
        int row = row_of_thread(c, h), i = query_of(args, w, row);
        if (!(h ? is_far[1] : is_far[0]) || i >= w.queries.end)
            continue;
        fa_i64 at    = partial_row(args, w, head_of(args, w, row), i);
        float2 stats = ((const float2 *)args.lse_partial)[at];
        (h ? max[1] : max[0]) = stats.x;
        (h ? sum[1] : sum[0]) = stats.y;
#pragma unroll 1
        for (int j = 0; j < O_COUNT / 4; j++) {
            int col = 8 * j + threadIdx.x % 4 * 2;
            for (int e = 0; e < 2; e++)
                ((float *)&place[j * KEPT_THREADS])[2 * h + e] = col + e < args.head_dim_v ? args.o_partial[at * FA_HEAD_DIM_V + col + e] : 0.0f;
        }
    }
#pragma unroll
    for (int n = 0; n < O_COUNT; n += 4) {
        float4 o   = place[n / 4 * KEPT_THREADS];
        c.o[n]     = o.x;
        c.o[n + 1] = o.y;
        c.o[n + 2] = o.z;
        c.o[n + 3] = o.w;
    }
    __syncwarp();
}

/* The part that tile `tile` is the last of has been walked: its rows had these sums. O is for the next one then; of the last it is what has been folded. */
template <bool LAST> FA_DEVICE void end_part(const fa_args &args, const work &w, consumer &c, const row_state &rows, int tile)
{
    float max[2], sum[2], of_all[2], of_part[2];
    bool  far[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        max[h] = rows.max[h] * args.scale_log2;
        sum[h] = quad_sum(rows.sum[h]);
        far[h] = row_of_thread(c, h) < w.rows && is_far(max[h]);
    }
    if (__builtin_expect(__any_sync(~0u, far[0] || far[1]), false))
        take_far_rows(args, w, c, max, sum, far, tile);
    if (__any_sync(~0u, max[0] == -infinity() || max[1] == -infinity())) /* of nothing O may be NaN */
#pragma unroll
        for (int n = 0; n < O_COUNT; n++)
            c.o[n] = max[n / 2 % 2] == -infinity() ? 0.0f : c.o[n];
    bool ends = WHOLE && (LAST ? c.kept[1] : tile * FA_TILE_K / w.part_keys % FA_FOLD_GROUP == 0); /* the group, of which few tiles have several */
    fold_sums(c.sums, max, sum, of_all, of_part);
    if (c.kept[0])
        fold_kept(place_of(args, GROUP), c.o, of_all, of_part);
    if (WHOLE && ends) {
        fold_sums(c.total, max, sum, of_all, of_part);
        if (c.kept[1])
            fold_kept(place_of(args, GROUPS), c.o, of_all, of_part);
    }
    if constexpr (LAST) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            c.sums[h] = {max[h], sum[h]};
        return;
    }
    c.kept[0] = !ends;
    if (WHOLE && ends) {
        c.kept[1] = true;
        c.sums[0] = c.sums[1] = row_fold();
        keep(place_of(args, GROUPS), c.o);
    } else
        keep(place_of(args, GROUP), c.o);
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        c.o[n] = 0.0f;
}

/* All tiles of an item. */
FA_DEVICE void walk(const fa_args &args, item &own, consumer &c, int tiles)
{
    const work &w     = own.w;
    fa_range    clean = {same_for_all(w.clean.begin), same_for_all(w.clean.end)};
    int         tile  = same_for_all(right_tile(w)), last = tile - tiles + 1;
    int         part_tiles = FOLDS_PARTS ? same_for_all(w.part_keys / FA_TILE_K) : 1, left = tile % part_tiles + 1; /* of the part */
    float       s[S_COUNT], alpha[2], unit = args.scale_log2;
    take_queries(args, w, c);
    wait_for_k(c.tile);
    start_scores(s, c, c.tile);
    wgmma_wait<0>();
    hold(s);
    release(k_empty(c.tile));
    if (is_masked(clean, tile))
        mask_scores(args, w, s, 64 * c.group, tile);
    softmax_step<true>(s, c.rows, alpha, unit);
    pack_p(c.p, s);
    wait_for_v(c.tile);
    if (tile > last)
        wait_for_k(c.tile + 1);
#pragma unroll 1
    for (; tile > last; tile--) {
        if constexpr (FOLDS_PARTS)
            c.tile = same_for_all(c.tile); /* for the compiler, which loses sight of that here */
        start_scores(s, c, c.tile + 1);
        start_values(own, c, clean, tile);
        wgmma_wait<1>();
        hold(s);
        release(k_empty(c.tile + 1));
        if (is_masked(clean, tile - 1))
            mask_scores(args, w, s, 64 * c.group, tile - 1);
        row_state before = c.rows;
        bool      ends   = FOLDS_PARTS && --left == 0; /* this tile is its part's last */
        if (ends)
            c.rows = no_rows();
        bool moved = softmax_step<true>(s, c.rows, alpha, unit);
        wait_for_v(c.tile + 1); /* here, for a branch keeps the compiler from moving exponentials behind the wait that follows */
        if (tile - 1 > last)
            wait_for_k(c.tile + 2);
        finish_values(c);
        if (__builtin_expect(ends, false)) {
            end_part<false>(args, w, c, before, tile);
            left = part_tiles;
        } else if (moved)
            scale_output(c.o, alpha);
        pack_p(c.p, s);
    }
    if constexpr (!KEEPS_Q)
        release(q_empty());
    start_values(own, c, clean, last);
    finish_values(c);
    if constexpr (FOLDS_PARTS) {
        end_part<true>(args, w, c, c.rows, last);
#pragma unroll
        for (int n = 0; n < O_COUNT; n++)
            c.o[n] = without_sign_of_0(c.o[n]);
    }
}

/* ---- the way out ---- */

/* A part's row as fold_parts.cuh wants it. */
FA_DEVICE void store_part_row(const fa_args &args, const work &w, const consumer &c, int h, fa_i64 place, bool used, float top, float sum)
{
    top = kept_maximum(top, sum);
    if (used && threadIdx.x % 4 == 0)
        ((float2 *)args.lse_partial)[place] = make_float2(top, sum);
    store_part(args.o_partial + place * FA_HEAD_DIM_V, c.o, h, !used || top == -infinity() ? -1.0f : 1.0f);
}

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. */
FA_DEVICE void store_row_of_o(const fa_args &args, const work &w, const consumer &c, int h, int head, int i, bool used, float top, float sum)
{
    row_end end = end_of_row(top, sum, used ? sink_log2_of(args, head) : -infinity(), i >= w.seq.seqlen_q);
    if (used && threadIdx.x % 4 == 0)
        store_lse(args, w, head, i, end.lse);
    char *to = used ? (char *)args.o.data + o_place(args, w, head, i, 0) * (FA_DTYPE_O == FA_F32 ? 4 : 2) : nullptr;
    store_row<FA_DTYPE_O, FA_HEAD_DIM_V>(to, c.o, h, end.scale, args.head_dim_v);
}

FA_DEVICE void store_result(const fa_args &args, item &own, const consumer &c)
{
    work &w   = own.w;
    bool  far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int   row = row_of_thread(c, h), i = query_of(args, w, row), head = head_of(args, w, row);
        bool  used = row < w.rows, is_one = used && threadIdx.x % 4 == 0;
        float top = FOLDS_PARTS ? c.sums[h].max : c.rows.max[h] * args.scale_log2, sum = FOLDS_PARTS ? c.sums[h].sum : quad_sum(c.rows.sum[h]);
        if constexpr (TO_PARTS)
            store_part_row(args, w, c, h, partial_row(args, w, head, i), used, top, sum);
        else
            store_row_of_o(args, w, c, h, head, i, used, top, sum);
        far |= used && is_far(top);
        if (is_one)
            w.far[row] = is_far(top);
    }
    if (!FOLDS_PARTS && far)
        own.far = 1;
    all_consumers::sync();
    if (!FOLDS_PARTS && own.far)
        redo_far_rows<all_consumers>(args, w);
    if (own.cleared)
        add_nonfinite<all_consumers>(args, w);
}

FA_DEVICE void consume(const fa_args &args, int group)
{
    consumer c;
    c.group = group;
    c.tile = c.items = 0;
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        item &own = item_at(k);
        if (same_for_all(own.none))
            return;
        c.rows    = no_rows();
        c.sums[0] = c.sums[1] = c.total[0] = c.total[1] = row_fold();
        c.kept[0] = c.kept[1] = false;
#pragma unroll
        for (int n = 0; n < O_COUNT; n++)
            c.o[n] = 0.0f;
        int tiles = same_for_all(tiles_of(own.w));
        if (tiles > 0)
            walk(args, own, c, tiles);
        store_result(args, own, c);
        tell(done(k));
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_few_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    else if (threadIdx.x == 64) {
        if (has_boxes(args))
            tma_prefetch_map(maps.q);
        tma_prefetch_map(maps.k);
        tma_prefetch_map(maps.v);
    }
    if (threadIdx.x == 32) {
        if (reads_lengths(args))
            wait_for_launch_before();
        find_item(args, 0, blockIdx.x);
    }
    wait_for_launch_before();
    let_next_launch_begin();
    __syncthreads();
    int warp = same_for_all(threadIdx.x / 32);
    if (warp < 4) {
        if constexpr (MOVES_REGISTERS)
            registers_down<PRODUCER_REGISTERS>();
        if (warp == 0 && (FA_HAS_PAGED || elected()))
            produce<false>(args, maps);
        else if (threadIdx.x == 32)
            plan(args);
        else if (FA_HAS_PAGED && warp == 2)
            produce<true>(args, maps);
        else if (warp == 3 && elected())
            produce_queries(args, maps.q);
    } else {
        if constexpr (MOVES_REGISTERS)
            registers_up<CONSUMER_REGISTERS>();
        consume(args, warp / 4 - 1);
    }
}
