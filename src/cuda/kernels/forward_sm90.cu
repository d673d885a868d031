/*
 * FlashAttention-3's forward for Hopper: TMA brings tiles, WGMMA multiplies them, warps have roles. float16 and bfloat16.
 *
 *     warpgroup 0, warp 0    planner: one thread finds this block's tiles of queries (struct work) and fetches Q ahead
 *                  warp 1    producer: one thread keeps the rings of K and V tiles full
 *                  warps 2-3 inspectors: in tiles on the mask's edge they clear from V what only some rows, or none, may see
 *     warpgroup 1..          consumers: 64 queries each. They take turns at the tensor cores (ping-pong):
 *
 *         a step:  on this consumer's turn start S' = Q K^T of the next tile, then O += P V of this one, and pass the turn on
 *                  when S' is there: softmax of S', while P V runs
 *                  when O is there:  P = S'
 *
 * Key tiles are walked from right to left: those on the mask's right edge, then the clean ones in a loop without mask code, then
 * the window's left edge. With two stages of Q the walk does not stop between tiles of queries: S' of the next one's first
 * key tile goes with P V of the last (FA_VARIANT bit 0). A block stays on its multiprocessor and takes one tile of queries after
 * the other.
 *
 * Shared memory: FA_Q stages of Q, FA_STAGES tiles of K, as many of V (panels as in ptx_sm90.cuh), barriers, works.
 */
#include "mask.cuh"
#include "softmax.cuh"
#include "warpgroup.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1; /* warpgroups */
constexpr int Q_STAGES = FA_VARIANT & 1 ? 2 : 1, WORKS = 8, INSPECTORS = 2; /* warps */
static_assert(FA_TILE_Q == 64 * CONSUMERS && CONSUMERS > 1, "a consumer owns 64 rows, and takes turns with another");
static_assert(FA_DTYPE != FA_F32 && FA_HEAD_DIM % 64 == 0 && FA_HEAD_DIM_V % 64 == 0, "tiles are made of panels");

constexpr int Q_BYTES = FA_TILE_Q * FA_HEAD_DIM * 2, K_BYTES = FA_TILE_K * FA_HEAD_DIM * 2, V_BYTES = FA_TILE_K * FA_HEAD_DIM_V * 2;
constexpr int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + FA_STAGES * K_BYTES, BARRIERS_AT = V_AT + FA_STAGES * V_BYTES;
constexpr int BARRIERS = 2 * Q_STAGES + WORKS + 5 * FA_STAGES, WORKS_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16;

/* A tile of queries of one head, and the key tiles that it meets. In shared memory: registers are for S and O. */
struct work {
    int       b, head, kv_head;
    int       first_q;                /* first row of the tile */
    fa_range  keys;                   /* keys that some of its rows may see */
    int       right, tiles;           /* key tiles right, right - 1, ...: step n has tile right - n */
    int       first_clean, end_clean; /* steps [first_clean, end_clean) need no mask */
    int       cleared;                /* an inspector found Inf or NaN in V and took it away */
    sequence  seq;
};

extern "C" __constant__ int fa_shared_bytes = WORKS_AT + WORKS * (int)sizeof(work);
extern __shared__ __align__(1024) char shared[];

FA_DEVICE work &work_at(unsigned item) { return ((work *)(shared + WORKS_AT))[item % WORKS]; }

/* ---- barriers; `n` counts tiles of queries or key tiles since the kernel began. Phases alternate, nothing is reset ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned q_full(unsigned n) { return barrier_at(n % Q_STAGES); }
FA_DEVICE unsigned q_empty(unsigned n) { return barrier_at(Q_STAGES + n % Q_STAGES); }
FA_DEVICE unsigned found(unsigned n) { return barrier_at(2 * Q_STAGES + n % WORKS); } /* the work is known */
FA_DEVICE unsigned kv_barrier(int which, unsigned n) { return barrier_at(2 * Q_STAGES + WORKS + which * FA_STAGES + n % FA_STAGES); }
FA_DEVICE unsigned k_full(unsigned n) { return kv_barrier(0, n); }
FA_DEVICE unsigned k_empty(unsigned n) { return kv_barrier(1, n); }
FA_DEVICE unsigned v_full(unsigned n) { return kv_barrier(2, n); }
FA_DEVICE unsigned v_ready(unsigned n) { return kv_barrier(3, n); } /* inspected */
FA_DEVICE unsigned v_empty(unsigned n) { return kv_barrier(4, n); }

/* Waiting for a stage to be filled for the n-th time and, with the other parity, for it to be free, which it is at first. */
template <int STAGES> FA_DEVICE unsigned filled(unsigned n) { return n / STAGES & 1; }
template <int STAGES> FA_DEVICE unsigned freed(unsigned n) { return filled<STAGES>(n) ^ 1; }

FA_DEVICE void start_barriers()
{
    for (int n = 0; n < Q_STAGES; n++) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 4 * CONSUMERS + INSPECTORS);
    }
    for (int n = 0; n < WORKS; n++)
        barrier_init(found(n), 1);
    for (int n = 0; n < FA_STAGES; n++) {
        barrier_init(k_full(n), 1);
        barrier_init(k_empty(n), 4 * CONSUMERS);
        barrier_init(v_full(n), 1);
        barrier_init(v_ready(n), INSPECTORS);
        barrier_init(v_empty(n), 4 * CONSUMERS);
    }
    barrier_init_done();
}

FA_DEVICE unsigned q_tile(unsigned n) { return shared_address(shared) + n % Q_STAGES * Q_BYTES; }
FA_DEVICE unsigned k_tile(unsigned n) { return shared_address(shared) + K_AT + n % FA_STAGES * K_BYTES; }
FA_DEVICE unsigned v_tile(unsigned n) { return shared_address(shared) + V_AT + n % FA_STAGES * V_BYTES; }

/* ---- which work ---- */

/* Where every sequence is as long as the others (args.order_heads 0), causal tiles come in pairs, the n-th from the right and the
 * n-th from the left: pairs are all alike, so blocks that take every gridDim.x-th need no more than that to end together. Otherwise
 * a block has one tile; the longest come first, over args.order_heads heads whose K and V stay in L2, then the next heads. */
FA_DEVICE bool in_pairs(const fa_args &args) { return FA_MASK == FA_MASK_CAUSAL && args.order_heads == 0; }

/* The block's n-th tile, or pair with its first and second tile. */
FA_DEVICE bool has_item(const fa_args &args, unsigned n)
{
    unsigned heads = args.heads_q * args.batch;
    if (in_pairs(args))
        return n / 2 * gridDim.x + blockIdx.x < (args.tiles_q + 1) / 2 * heads;
    return n * gridDim.x + blockIdx.x < args.tiles_q * heads;
}

FA_DEVICE grid_place place_of(const fa_args &args, unsigned n)
{
    unsigned tiles = args.tiles_q;
    if (in_pairs(args)) {
        unsigned pairs = (tiles + 1) / 2, number = n / 2 * gridDim.x + blockIdx.x, left = number % pairs;
        return {n % 2 == 0 ? tiles - 1 - left : left, number / pairs};
    }
    unsigned number = n * gridDim.x + blockIdx.x;
    if (FA_MASK == FA_MASK_NONE || args.order_heads == 0)
        return {number % tiles, number / tiles};
    unsigned heads = args.order_heads, first = number / (heads * tiles) * heads;
    number -= first * tiles;
    heads = min(heads, args.heads_q * args.batch - first);
    return {tiles - 1 - number / heads, first + number % heads};
}

FA_DEVICE void find_work(const fa_args &args, unsigned n, work &w)
{
    grid_place at = place_of(args, n);
    w.head        = at.other % args.heads_q;
    w.b           = at.other / args.heads_q;
    w.kv_head     = w.head / args.group;
    w.first_q     = at.tile * FA_TILE_Q;
    w.cleared     = 0;
    w.tiles       = 0;
    w.seq         = sequence_at(args, w.b);
    if (in_pairs(args) && n % 2 == 1 && 2 * at.tile + 1 == args.tiles_q)
        w.seq.rows_q = w.seq.seqlen_q = 0; /* the tile in the middle is its own pair, and done */
    fa_range queries = {w.first_q, fa_min_int(w.first_q + FA_TILE_Q, w.seq.seqlen_q)};
    w.keys           = fa_keys_seen(window_of(args), w.seq.diagonal, queries, {w.seq.key_begin, w.seq.seqlen_k});
    if (queries.begin >= queries.end || w.keys.begin >= w.keys.end)
        return;
    fa_range clean = clean_tiles<FA_TILE_K>(args, w.seq, queries, w.keys);
    int      right = (w.keys.end - 1) / FA_TILE_K, tiles = right + 1 - w.keys.begin / FA_TILE_K;
    w.right        = right;
    w.tiles        = tiles;
    w.first_clean  = fa_min_int(fa_max_int(right + 1 - clean.end, 0), tiles);
    w.end_clean    = fa_max_int(right + 1 - clean.begin, w.first_clean);
}

FA_DEVICE bool is_masked(const work &w, int step) { return step < w.first_clean || step >= w.end_clean; }

/* ---- planner and producer: one thread each ---- */

FA_DEVICE void plan(const fa_args &args, const fa_maps &maps)
{
    for (unsigned item = 0; has_item(args, item); item++) {
        work &w = work_at(item); /* its last readers are done: nobody is WORKS - Q_STAGES items behind */
        find_work(args, item, w);
        barrier_arrive(found(item));
        barrier_wait(q_empty(item), freed<Q_STAGES>(item));
        if (w.tiles == 0) {
            barrier_arrive(q_full(item));
            continue;
        }
        barrier_expect(q_full(item), Q_BYTES);
        fetch_tile<FA_TILE_Q, FA_HEAD_DIM>(q_tile(item), maps.q, q_full(item), w.seq.q_entry, w.head, w.seq.q_row + w.first_q);
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned k = 0, v = 0; /* tiles asked for */
    for (unsigned item = 0; has_item(args, item); item++) {
        barrier_wait(found(item), filled<WORKS>(item));
        const work &w   = work_at(item);
        int         row = w.seq.kv_row + w.right * FA_TILE_K, entry = w.seq.kv_entry, head = w.kv_head, tiles = w.tiles;
        for (int n = 0; n <= tiles && tiles > 0; n++) { /* K of a step is needed before V of the one before */
            if (n < tiles) {
                barrier_wait(k_empty(k), freed<FA_STAGES>(k));
                barrier_expect(k_full(k), K_BYTES);
                fetch_tile<FA_TILE_K, FA_HEAD_DIM>(k_tile(k), maps.k, k_full(k), entry, head, row - n * FA_TILE_K);
                k++;
            }
            if (n > 0) {
                barrier_wait(v_empty(v), freed<FA_STAGES>(v));
                barrier_expect(v_full(v), V_BYTES);
                fetch_tile<FA_TILE_K, FA_HEAD_DIM_V>(v_tile(v), maps.v, v_full(v), entry, head, row - (n - 1) * FA_TILE_K);
                v++;
            }
        }
    }
}

/* ---- inspectors ---- */

/* In an edge tile P is 0 for rows that do not see a key, but 0 * NaN is NaN: rows of V that are not the sequence's become zeros,
 * and so do Inf and NaN, which add_nonfinite gives to the rows that see them. True if there were any of these. */
FA_DEVICE bool inspect_tile(unsigned tile, fa_range rows)
{
    bool found = false;
#pragma unroll 1
    for (int offset = 16 * (threadIdx.x - 64); offset < V_BYTES; offset += 16 * 32 * INSPECTORS) {
        int row = offset / 128 % FA_TILE_K;
        if (row < rows.begin || row >= rows.end)
            shared_store(tile + offset, make_uint4(0, 0, 0, 0));
        else if (FA_MASK != FA_MASK_NONE) {
            uint4    v    = shared_load_16(tile + offset);
            unsigned note = 0;
            note_nonfinite(note, v.x);
            note_nonfinite(note, v.y);
            note_nonfinite(note, v.z);
            note_nonfinite(note, v.w);
            if (note & 0x7FFF7FFFu) { /* not +-0 in both halves */
                found = true;
                shared_store(tile + offset, make_uint4(without_nonfinite(v.x), without_nonfinite(v.y), without_nonfinite(v.z),
                                                       without_nonfinite(v.w)));
            }
        }
    }
    return found;
}

FA_DEVICE void inspect(const fa_args &args)
{
    unsigned tile = 0;
    for (unsigned item = 0; has_item(args, item); item++) {
        barrier_wait(q_full(item), filled<Q_STAGES>(item));
        work &w = work_at(item);
        for (int n = 0; n < w.tiles; n++, tile++) {
            int first_key = (w.right - n) * FA_TILE_K;
            barrier_wait(v_full(tile), filled<FA_STAGES>(tile));
            if (is_masked(w, n)) {
                if (inspect_tile(v_tile(tile), {w.keys.begin - first_key, w.keys.end - first_key}))
                    w.cleared = 1;
                fence_async();
                __syncwarp();
            }
            release(v_ready(tile));
        }
        release(q_empty(item));
    }
}

/* ---- consumers ---- */

struct row_state {
    float max[2], sum[2]; /* of dot products; this thread's part of the sum of exponentials. Of rows h = 0, 1 */
};

/* What a consumer has at hand. */
struct consumer {
    float     o[O_COUNT];
    unsigned  p[P_STEPS][4]; /* of key tile `tile`, counted since the kernel began */
    row_state rows;
    int       group;
    unsigned  tile;
};

/* Named barrier 1 + c: consumer c waits there, and the one before it arrives. The last one's first arrival starts the round. */
FA_DEVICE void await_turn(int group) { named_sync(1 + group, 256); }
FA_DEVICE void pass_turn(int group) { named_arrive(1 + (group + 1) % CONSUMERS, 256); }

/* S of keys that a row does not see becomes -inf. */
FA_DEVICE void mask_scores(const fa_args &args, const work &w, float (&s)[S_COUNT], int group, int step)
{
    int col = (w.right - step) * FA_TILE_K + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, w.first_q + 64 * group + fragment_row() + 8 * h);
        int        first = limits.first - col, last = limits.last - col;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e > last || 8 * j + e < first)
                    s[4 * j + 2 * h + e] = -infinity();
    }
}

/* Line 9: S becomes P = exp2(unit * (S - max)), and the row's maximum and sum take it in. The maximum may lag behind (softmax.cuh);
 * where it moves, alpha is what O has to be multiplied with: true then, for some row of the warp. GUARD: a row may have seen nothing. */
template <bool GUARD>
FA_DEVICE bool softmax_step(float (&s)[S_COUNT], row_state &rows, float (&alpha)[2], float unit)
{
    bool moved = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float highest = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
        for (int j = 1; j < FA_TILE_K / 8; j++)
            highest = fmaxf(highest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        highest   = quad_max(highest);
        float old = rows.max[h];
        bool  far = (highest - old) * unit > MAX_LAG; /* -inf - -inf is NaN: not far */
        rows.max[h] = far ? highest : old;
        alpha[h]    = far ? exp2_fast((old - highest) * unit) : 1.0f;
        moved |= far;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float shift = rows.max[h] * unit, sum = 0.0f;
        if (GUARD && rows.max[h] == -infinity())
            shift = 0.0f;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                s[4 * j + e] = exp2_fast(s[4 * j + e] * unit - shift);
                sum += s[4 * j + e];
            }
        rows.sum[h] = rows.sum[h] * alpha[h] + sum;
    }
    return __any_sync(0xFFFFFFFFu, moved);
}

FA_DEVICE row_state no_rows() { return {{-infinity(), -infinity()}, {0.0f, 0.0f}}; }

FA_DEVICE void wait_for_k(unsigned n) { barrier_wait(k_full(n), filled<FA_STAGES>(n)); }
FA_DEVICE void wait_for_v(unsigned n) { barrier_wait(v_ready(n), filled<FA_STAGES>(n)); }

/* The first key tile of an item, with nothing to overlap. */
FA_DEVICE void first_tile(const fa_args &args, const work &w, consumer &c, unsigned item)
{
    float s[S_COUNT], alpha[2];
    wait_for_k(c.tile);
    start_scores(s, q_tile(item) + c.group * (64 * 128), k_tile(c.tile));
    wgmma_wait<0>();
    hold(s);
    release(k_empty(c.tile));
    if (w.tiles == 1)
        release(q_empty(item));
    if (is_masked(w, 0))
        mask_scores(args, w, s, c.group, 0);
    c.rows = no_rows();
    softmax_step<true>(s, c.rows, alpha, args.scale_log2);
    pack_p(c.p, s);
    if (w.tiles > 1)
        wait_for_k(c.tile + 1);
}

/* Step n > 0 of an item: scores of its tile while P V of the one before is under way. */
template <bool MASKED> FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, unsigned item, int n)
{
    float s[S_COUNT], alpha[2];
    await_turn(c.group);
    start_scores(s, q_tile(item) + c.group * (64 * 128), k_tile(c.tile + 1));
    wait_for_v(c.tile);
    start_output(c.o, c.p, v_tile(c.tile), n > 1);
    pass_turn(c.group);
    wgmma_wait<1>();
    hold(s);
    release(k_empty(c.tile + 1));
    if (n + 1 == w.tiles)
        release(q_empty(item));
    if (MASKED)
        mask_scores(args, w, s, c.group, n);
    bool moved = softmax_step<MASKED>(s, c.rows, alpha, args.scale_log2);
    if (n + 1 < w.tiles) /* here, for a branch keeps the compiler from moving exponentials behind the wait that follows */
        wait_for_k(c.tile + 2);
    wgmma_wait<0>();
    hold(c.o);
    hold(c.p);
    release(v_empty(c.tile));
    if (moved)
        scale_output(c.o, alpha);
    pack_p(c.p, s);
    c.tile++;
}

/* ---- the way out ---- */

/* Four words of each of four lanes that are neighbours: word w of lane t becomes word t of lane w. */
FA_DEVICE void transpose_quad(unsigned (&a)[4])
{
#pragma unroll
    for (int stride = 1; stride < 4; stride *= 2) {
        bool upper = threadIdx.x & stride;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & stride) == 0) {
                unsigned got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a[i] : a[i + stride], stride);
                a[i]          = upper ? got : a[i];
                a[i + stride] = upper ? a[i + stride] : got;
            }
    }
}

/* O's elements of row h of this thread, 16 bytes a lane. to: row of O, null if it is none. scale 0: zeros, whatever O holds (rows of
 * Q that do not count may be NaN). */
FA_DEVICE void store_row(const fa_args &args, char *to, const float (&o)[O_COUNT], int h, float scale)
{
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < FA_HEAD_DIM_V / 8; j += FA_DTYPE_O == FA_F32 ? 1 : 4) {
        if constexpr (FA_DTYPE_O == FA_F32) {
            if (to && 8 * j < args.head_dim_v)
                *(float2 *)(to + (8 * j + 2 * lane) * 4) =
                    scale == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(o[4 * j + 2 * h] * scale, o[4 * j + 2 * h + 1] * scale);
        } else {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = scale == 0.0f ? 0 : pack<FA_DTYPE_O>(o[4 * (j + i) + 2 * h] * scale, o[4 * (j + i) + 2 * h + 1] * scale);
            transpose_quad(a);
            if (to && 8 * (j + lane) < args.head_dim_v)
                *(uint4 *)(to + (8 * (j + lane)) * 2) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

FA_DEVICE fa_i64 offset_of_o(const fa_args &args, const work &w, int i)
{
    return w.seq.q_entry * args.o.stride[0] + (fa_i64)(w.seq.q_row + i) * args.o.stride[1] + w.head * args.o.stride[2];
}

/* Inf and NaN of V that the inspectors took away, for the rows of this warp that see them, in what was just stored. Rare and slow. */
static __device__ __noinline__ void add_nonfinite(const fa_args &args, const work &w, int first)
{
    __syncwarp();
    const fa_u16 *v = (const fa_u16 *)args.v.data + w.seq.kv_entry * args.v.stride[0] + w.kv_head * args.v.stride[2];
    for (int i = first; i < fa_min_int(w.seq.seqlen_q, first + 16); i++)
        for (int col = threadIdx.x % 32; col < args.head_dim_v; col += 32) {
            float total = 0.0f;
            for (int j = w.keys.begin; j < w.keys.end; j++) {
                float value = load_element(v + (fa_i64)(w.seq.kv_row + j) * args.v.stride[1], col, FA_DTYPE);
                if (!finite(value) && sees(args, w.seq, {0, 0}, i, j))
                    total += value;
            }
            fa_i64 at = offset_of_o(args, w, i) + col;
            if (!finite(total))
                store_element(args.o.data, at, FA_DTYPE_O, load_element(args.o.data, at, FA_DTYPE_O) + total);
        }
}

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. */
FA_DEVICE void store_result(const fa_args &args, const work &w, const float (&o)[O_COUNT], const row_state &rows, int group)
{
    int   first = w.first_q + 64 * group + fragment_row();
    float sink_log2 = -infinity();
    if (args.sinks.data)
        sink_log2 = load_element(args.sinks.data, w.head * args.sinks.stride[1], args.sinks.dtype) * FA_LOG2E;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int     i   = first + 8 * h;
        row_end end = end_of_row(rows.max[h] * args.scale_log2, quad_sum(rows.sum[h]), sink_log2, i >= w.seq.seqlen_q);
        char   *to  = (char *)args.o.data + offset_of_o(args, w, i) * (FA_DTYPE_O == FA_F32 ? 4 : 2);
        store_row(args, i < w.seq.rows_q ? to : nullptr, o, h, end.scale);
        if (args.lse.data && threadIdx.x % 4 == 0 && i < w.seq.rows_q)
            ((float *)args.lse.data)[w.seq.q_entry * args.lse.stride[0] + w.head * args.lse.stride[1] +
                                     (w.seq.q_row + i) * args.lse.stride[2]] = end.lse;
    }
    if (w.cleared)
        add_nonfinite(args, w, w.first_q + 64 * group + fragment_row() - threadIdx.x % 32 / 4);
}

/* P V of an item's last tile, then its result. NEXT: together with the scores of the next item's first tile. */
template <bool NEXT> FA_DEVICE void last_tile(const fa_args &args, const work &w, consumer &c, unsigned item)
{
    float       s[NEXT ? S_COUNT : 1], alpha[2];
    const work &next = work_at(item + 1);
    row_state   rows = no_rows();
    if constexpr (NEXT)
        wait_for_k(c.tile + 1);
    await_turn(c.group);
    if constexpr (NEXT)
        start_scores(s, q_tile(item + 1) + c.group * (64 * 128), k_tile(c.tile + 1));
    wait_for_v(c.tile);
    start_output(c.o, c.p, v_tile(c.tile), w.tiles > 1);
    pass_turn(c.group);
    if constexpr (NEXT) {
        wgmma_wait<1>();
        hold(s);
        release(k_empty(c.tile + 1));
        if (next.tiles == 1)
            release(q_empty(item + 1));
        if (is_masked(next, 0))
            mask_scores(args, next, s, c.group, 0);
        softmax_step<true>(s, rows, alpha, args.scale_log2);
        if (next.tiles > 1)
            wait_for_k(c.tile + 2);
    }
    wgmma_wait<0>();
    hold(c.o);
    hold(c.p);
    release(v_empty(c.tile));
    store_result(args, w, c.o, c.rows, c.group);
    if constexpr (NEXT)
        pack_p(c.p, s);
    c.rows = rows;
    c.tile++;
}

FA_DEVICE void consume(const fa_args &args, int group)
{
    consumer c;
    bool     begun = false; /* this item's first tile went with the last of the one before */
    c.group = group;
    c.tile  = 0;
    if (group == CONSUMERS - 1)
        pass_turn(group);
    for (unsigned item = 0; has_item(args, item); item++) {
        const work &w = work_at(item);
        int         n = 1;
        if (!begun)
            barrier_wait(q_full(item), filled<Q_STAGES>(item));
        if (w.tiles == 0) {
            release(q_empty(item));
#pragma unroll
            for (int i = 0; i < O_COUNT; i++)
                c.o[i] = 0.0f;
            store_result(args, w, c.o, no_rows(), group);
            continue;
        }
        if (!begun)
            first_tile(args, w, c, item);
        for (int end = w.first_clean; n < end; n++)
            step<true>(args, w, c, item, n);
        for (int end = w.end_clean; n < end; n++)
            step<false>(args, w, c, item, n);
        for (int end = w.tiles; n < end; n++)
            step<true>(args, w, c, item, n);
        begun = false;
        if constexpr (Q_STAGES > 1)
            if (has_item(args, item + 1)) {
                barrier_wait(q_full(item + 1), filled<Q_STAGES>(item + 1));
                begun = work_at(item + 1).tiles > 0;
            }
        if (Q_STAGES > 1 && begun)
            last_tile<Q_STAGES != 1>(args, w, c, item);
        else
            last_tile<false>(args, w, c, item);
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    forward_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 3 ? 32 : 40>(); /* of the 512 (3 consumers) or 504 that four or three threads have */
        if (threadIdx.x == 0)
            plan(args, maps);
        else if (threadIdx.x == 32)
            produce(args, maps);
        else if (threadIdx.x >= 64)
            inspect(args);
    } else {
        registers_up<CONSUMERS == 3 ? 160 : 232>();
        consume(args, __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0)); /* told to be the same for all lanes */
    }
}
