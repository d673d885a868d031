/*
 * FlashAttention's forward for Hopper where a block holds all of a head's queries and keys: up to 64 of each, 128 or 256. float16 and bfloat16. Up to 128 keys all scores of a row are
 * there at once, so its softmax is no online one, and what a call takes is what memory takes to read Q, K and V and to write O; more are two steps, as registers allow.
 *
 *     warpgroup 0, warp 0      one thread finds this block's heads (struct work) and has TMA fetch their tiles; heads of 64 rows take two, of warps 0 and 1
 *                  warps 2-3   inspectors, under a mask: they look for Inf and NaN in V
 *     warpgroup 1..            consumers: the block's passes, of 64 queries of a head, one to each by turns
 *
 * Or a head has several tiles of queries (MANY: cross attention to a text's few keys), and each is to a block what else a head is: K and V come from L2.
 *
 * Algorithm 1 with one tile of keys:  S = Q K^T;  m = rowmax(S);  P = exp(S - m), l = rowsum(P);  O = P V / l, LSE = m + log l. Of the tile a pass takes those chunks of 64 keys (or all, if they are no multiple)
 * that some of its queries see. P V of a chunk begins as soon as its P is there. O leaves by TMA, by way of its queries' Q.
 *
 * Rows of Q, K and V behind a sequence's last arrive as zeros (ragged maps, launch.c). Under a mask P is 0 where a query does not see a key, but 0 * NaN is NaN: where inspectors
 * found some, all rows are computed again, as those are whose scores are far from zero (rare_sm90.cuh).
 *
 * Shared memory: FA_STAGES of K and V, and as many of Q, which is held until O has left, or more (panels as in panels_sm90.cuh); barriers, works.
 */
#include "gradients_sm90.cuh"
#include "result_sm90.cuh"

constexpr int  CONSUMERS = FA_WARPS / 4 - 1, PANELS = FA_HEAD_DIM / 64, PASSES = FA_TILE_Q / 64, PRODUCERS = PASSES == 1 ? 2 : 1, INSPECTORS = 2 /* warps */;
constexpr int  CHUNK = FA_TILE_K % 64 == 0 ? 64 : FA_TILE_K, MOST_CHUNKS = FA_TILE_K / CHUNK;
constexpr bool MASKED = FA_MASK != FA_MASK_NONE, MANY = FA_VARIANT == 1; /* heads have several tiles of queries, each fetched with all keys */
/* A consumer waits at its next pass for its O to leave, by way of Q: that is to be none of a head that comes to the same place. And the head that was in that place before is to have been the
 * consumer's too: a barrier tells neighbouring phases apart, no others, and of a head that it passed by it does not know whether its Q has come (decision 0089, second round). */
constexpr int NEXT_PASS = (CONSUMERS + PASSES - 1) / PASSES, STAGES = FA_STAGES, LEAST = STAGES > NEXT_PASS ? STAGES : NEXT_PASS + 1;
constexpr int TURN = PASSES % 2 == 0 && CONSUMERS % 2 == 0 ? CONSUMERS / 2 : CONSUMERS; /* heads until the same consumers come again */
constexpr int Q_STAGES = PASSES >= CONSUMERS ? LEAST : (LEAST + TURN - 1) / TURN * TURN, WORKS = Q_STAGES + PRODUCERS;
constexpr int Q_PANEL = FA_TILE_Q * 128, Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * FA_TILE_K * 128;
constexpr int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES, BARRIERS_AT = V_AT + STAGES * KV_BYTES;
static_assert(FA_TILE_Q % 64 == 0 && (MOST_CHUNKS == 1 || MOST_CHUNKS == 2 || MOST_CHUNKS == 4) && CHUNK % 16 == 0 && PASSES <= 4 && FA_WARPS % 4 == 0 && FA_HEAD_DIM == FA_HEAD_DIM_V && FA_DTYPE_O == FA_DTYPE, "what the text is written for");

/* Heads that there are not, of each producer: every consumer is to meet one. Nobody gives their places back, so they are to be different ones; and a stage is to be the same producer's
 * always, or it might take the phase before the last for the last. */
constexpr int NONES = (CONSUMERS + PRODUCERS * PASSES - 1) / (PRODUCERS * PASSES);
static_assert(STAGES >= PRODUCERS * NONES && STAGES % PRODUCERS == 0, "fewer stages end in a launch that does not");

/* Registers of a thread: what a block is launched with, eight at a time, is shared out. Who asks for more waits for ever. */
constexpr int LEFT = 32, REGISTERS = CONSUMERS == 3 ? 160 : 112;
static_assert(LEFT + CONSUMERS * REGISTERS <= FA_WARPS / 4 * (65536 / (32 * FA_WARPS) / 8 * 8), "more registers than a block has");

/* Of a stage. Phases alternate, nothing is reset. */
enum { K_FULL, V_FULL, INSPECTED, K_EMPTY, V_EMPTY, BARRIERS };
enum { Q_FULL = BARRIERS, Q_EMPTY }; /* of a place of Q */
constexpr int WORKS_AT = BARRIERS_AT + ((STAGES * BARRIERS + 2 * Q_STAGES) * 8 + 15) / 16 * 16, SHARED_BYTES = WORKS_AT + WORKS * (int)sizeof(work);
static_assert(SHARED_BYTES <= 227 * 1024, "what a block may have");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;
extern __shared__ __align__(1024) char shared[];

/* n counts a block's heads. */
FA_DEVICE unsigned barrier_of(unsigned n, int which)
{
    int number = which < BARRIERS ? n % STAGES * BARRIERS + which : STAGES * BARRIERS + n % Q_STAGES * 2 + which - Q_FULL;
    return shared_address(shared) + BARRIERS_AT + number * 8;
}
FA_DEVICE unsigned filled_at(unsigned n, int which) { return which < BARRIERS ? filled<STAGES>(n) : filled<Q_STAGES>(n); }
FA_DEVICE bool     has_filled(unsigned n, int which) { return barrier_passed(barrier_of(n, which), filled_at(n, which)); }
FA_DEVICE void     await_full(unsigned n, int which) { barrier_wait(barrier_of(n, which), filled_at(n, which)); }
FA_DEVICE void     await_empty(unsigned n, int which) { barrier_wait(barrier_of(n, which), filled_at(n, which) ^ 1); }
FA_DEVICE unsigned q_tile(unsigned n) { return shared_address(shared) + n % Q_STAGES * Q_BYTES; }
FA_DEVICE unsigned k_tile(unsigned n) { return shared_address(shared) + K_AT + n % STAGES * KV_BYTES; }
FA_DEVICE unsigned v_tile(unsigned n) { return shared_address(shared) + V_AT + n % STAGES * KV_BYTES; }
FA_DEVICE work    &work_at(unsigned n) { return ((work *)(shared + WORKS_AT))[n % WORKS]; }

FA_DEVICE void start_barriers()
{
    for (int n = 0; n < STAGES; n++)
        for (int which = K_FULL; which < BARRIERS; which++)
            barrier_init(barrier_of(n, which), which <= V_FULL ? 1 : which == INSPECTED ? INSPECTORS : 4 * PASSES);
    for (int n = 0; n < Q_STAGES; n++) {
        barrier_init(barrier_of(n, Q_FULL), 1);
        barrier_init(barrier_of(n, Q_EMPTY), 4 * PASSES);
    }
    barrier_init_done();
}

/* Every gridDim.x-th head of all sequences, or tile of one. False: there is none, nor one behind it. */
FA_DEVICE bool find_head(const fa_args &args, unsigned n, work &w)
{
    unsigned number = blockIdx.x + n * gridDim.x, tiles = MANY ? args.tiles_q : 1, head = number / tiles;
    w.tiles         = -1;
    if (head >= (unsigned)args.batch * args.heads_q)
        return false;
    w.b       = head / args.heads_q;
    w.head    = head % args.heads_q;
    w.kv_head = w.head / args.group;
    w.first_row = number % tiles * FA_TILE_Q;
    w.right = w.spoilt = 0;
    w.tiles   = 1;
    w.seq     = sequence_at(args, w.b);
    w.keys    = fa_keys_seen(window_of(args), w.seq.diagonal, {0, w.seq.seqlen_q}, {0, w.seq.seqlen_k});
    return true;
}

/* By a thread of each producer: every PRODUCERS-th of the block's heads. Finding one and asking for its tiles takes a thread a microsecond, and memory less for 64 rows. */
FA_DEVICE void produce(const fa_args &args, const fa_maps &maps, unsigned producer)
{
    int none = 0;
    for (unsigned n = producer;; n += PRODUCERS) {
        work &w = work_at(n);
        await_empty(n, K_EMPTY);
        if (!find_head(args, n, w)) {
            await_empty(n, Q_EMPTY);
            barrier_arrive(barrier_of(n, Q_FULL));
            if (MASKED) { /* inspectors wait for V alone */
                await_empty(n, V_EMPTY);
                barrier_arrive(barrier_of(n, V_FULL));
            }
            if (++none == NONES)
                return;
            continue;
        }
        const sequence &s = w.seq;
        barrier_expect(barrier_of(n, K_FULL), KV_BYTES);
        fetch_ragged<FA_TILE_K, FA_HEAD_DIM>(k_tile(n), maps.k, barrier_of(n, K_FULL), w.kv_head, s.kv_entry * args.apart_k + s.kv_row + s.seqlen_k, s.seqlen_k);
        await_empty(n, Q_EMPTY);
        await_empty(n, V_EMPTY); /* so whoever has seen Q does not mistake the phases of K and V */
        barrier_expect(barrier_of(n, Q_FULL), Q_BYTES);
        fetch_ragged<FA_TILE_Q, FA_HEAD_DIM>(q_tile(n), maps.q, barrier_of(n, Q_FULL), w.head, s.q_entry * args.apart_q + s.q_row + s.seqlen_q, s.seqlen_q - (MANY ? w.first_row : 0));
        barrier_expect(barrier_of(n, V_FULL), KV_BYTES);
        fetch_ragged<FA_TILE_K, FA_HEAD_DIM>(v_tile(n), maps.v, barrier_of(n, V_FULL), w.kv_head, s.kv_entry * args.apart_v + s.kv_row + s.seqlen_k, s.seqlen_k);
    }
}

FA_DEVICE void inspect()
{
    constexpr int AT_ONCE = 16 * 32 * INSPECTORS;
    for (unsigned n = 0;; n++) {
        work &w = work_at(n);
        await_full(n, V_FULL);
        if (w.tiles < 0)
            return;
        if (holds_nonfinite<KV_BYTES, AT_ONCE>(v_tile(n) + 16 * (threadIdx.x - 64)))
            w.spoilt = 1;
        __syncwarp();
        release(barrier_of(n, INSPECTED));
    }
}

/* ---- consumers ---- */

/* What the 64 queries from the `first` on see: some of them keys [some.begin, some.end), each of them [all.begin, all.end). */
struct seen_keys {
    fa_range some, all;
};

FA_DEVICE seen_keys seen_by_pass(const fa_args &args, const work &w, int first)
{
    int       last = fa_min_int(first + 64, w.seq.seqlen_q);
    fa_window window = window_of(args);
    return {fa_keys_seen(window, w.seq.diagonal, {first, last}, w.keys), {row_limits_of(window, w.seq, w.keys, last - 1).first, row_limits_of(window, w.seq, w.keys, first).last + 1}};
}

/* S of keys of a chunk that a row does not see becomes -inf: visible columns as bits, of which seven at once become predicates. */
FA_DEVICE void hide_keys(const fa_args &args, const work &w, float *s, int first, int first_key)
{
    int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, first + fragment_row() + 8 * h);
        unsigned   seen   = columns_below<CHUNK>(limits.last + 1 - column) & ~columns_below<CHUNK>(limits.first - column);
#pragma unroll
        for (int n = 0; n < CHUNK / 4; n++) {
            float &score = s[n / 2 * 4 + 2 * h + n % 2];
            score        = seen >> n & 1 ? score : -infinity();
        }
    }
}

/* m of both rows, of the scores in s and those before. */
template <int COUNT> FA_DEVICE void find_maxima(const float (&s)[COUNT], row_state &rows)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most[4]; /* they need not wait for each other */
#pragma unroll
        for (int i = 0; i < 4; i++)
            most[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
        for (int j = 4; j < COUNT / 4; j++)
            most[j % 4] = fmaxf(most[j % 4], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        rows.max[h] = fmaxf(rows.max[h], quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))));
    }
}

/* P of a chunk, and l. shift: m * unit, or 0 where a row has seen nothing. */
FA_DEVICE void exponentials_of_chunk(float *s, row_state &rows, const float (&shift)[2], float unit)
{
#pragma unroll
    for (int n = 0; n < CHUNK / 2; n++)
        s[n] = exp2_fast(s[n] * unit - shift[n / 2 % 2]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j++)
            sum[j % 2] += s[4 * j + 2 * h] + s[4 * j + 2 * h + 1];
        rows.sum[h] += sum[0] + sum[1];
    }
}

/* O (+)= P V of a chunk; v: its first row. */
FA_DEVICE void start_chunk(float (&o)[O_COUNT], const float *s, unsigned (&p)[CHUNK / 16][4], unsigned v, bool add)
{
    matrix b = matrix_of(v, FA_TILE_K * 128);
#pragma unroll
    for (int n = 0; n < CHUNK / 4; n++)
        p[n / 4][n % 4] = pack<FA_DTYPE>(s[2 * n], s[2 * n + 1]);
    hold(o);
    hold(p);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
        wgmma_registers(o, p[step], b.from(step * 2048), step > 0 || add);
    wgmma_commit();
}

/* A warp's 16 rows of O, from the query `first` on, staged where its rows of Q were, which nobody else reads. */
FA_DEVICE far_rows stage_result(const fa_args &args, const work &w, float (&o)[O_COUNT], const row_state &rows, unsigned to, int first)
{
    int      lane = threadIdx.x % 32;
    float    sink_log2 = sink_log2_of(args, w.head), scale[2];
    unsigned far[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        scale[h] = end_of_row(args, w, rows, h, {w.head, first + lane / 4 + 8 * h}, sink_log2, far[h]);
#pragma unroll
    for (int n = 0; n < O_COUNT; n++) /* a row that is nobody's may be NaN */
        o[n] = scale[n / 2 % 2] == 0.0f ? 0.0f : o[n] * scale[n / 2 % 2];
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        stage_panel(o, panel, 1.0f, lane, 16, to + panel * Q_PANEL);
    __syncwarp();
    return {far[0], far[1]};
}

/* By TMA. */
FA_DEVICE void store_rows(const fa_args &args, const fa_maps &maps, const work &w, unsigned from, int first)
{
    int left = w.seq.rows_q - first;
    if (threadIdx.x % 32 == 0 && left > 0)
        for (int panel = 0; panel < PANELS; panel++)
            tma_store_ragged(maps.o, from + panel * Q_PANEL, 64 * panel, left, w.head, w.seq.q_entry * args.apart_o + w.seq.q_row + w.seq.rows_q);
}

/* Rare, and not by TMA: rows that are computed again are written after the others. */
FA_DEVICE void store_far_rows(const fa_args &args, const work &w, const far_rows &far, unsigned from, int first)
{
    for (int n = threadIdx.x % 32; n < 16 * 8 * PANELS; n += 32) { /* 16 bytes */
        int chunk = n % 8, row = n / 8 % 16, panel = n / 128, column = 64 * panel + 8 * chunk;
        if (first + row < w.seq.rows_q && column < args.head_dim_v)
            *(uint4 *)((fa_element *)args.o.data + offset_of_o(args, w, {w.head, first + row}) + column) = shared_load_16(from + panel * Q_PANEL + row * 128 + ((chunk ^ row % 8) << 4));
    }
    redo_far_rows(args, w, w.keys, first, far);
}

/* A pass's results so far. */
struct result {
    float     o[O_COUNT];
    row_state rows;
};

/* CHUNKS chunks of keys, the first of them the `from`-th, for the queries from the `first` on. FRESH: the pass's first. last: its last, and K is given back. */
template <int CHUNKS, bool FRESH> FA_DEVICE void attend(const fa_args &args, const work &w, result &r, unsigned n, int first, int from, fa_range clean, bool last)
{
    float    s[CHUNK / 2 * CHUNKS], shift[2], unit = unit_of(args, w);
    unsigned p[CHUNKS][CHUNK / 16][4];
    start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, q_tile(n) + first % FA_TILE_Q * 128, k_tile(n) + from * (CHUNK * 128));
    wgmma_wait<0>();
    hold(s);
    if (last)
        release(barrier_of(n, K_EMPTY));
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        int first_key = CHUNK * (from + chunk);
        if (first_key < clean.begin || first_key + CHUNK > clean.end)
            hide_keys(args, w, s + CHUNK / 2 * chunk, first, first_key);
    }
    float before[2] = {r.rows.max[0], r.rows.max[1]};
    find_maxima(s, r.rows);
#pragma unroll
    for (int h = 0; h < 2; h++)
        shift[h] = r.rows.max[h] == -infinity() ? 0.0f : r.rows.max[h] * unit;
    if constexpr (!FRESH) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            alpha[h] = exp2_fast(before[h] * unit - shift[h]);
            r.rows.sum[h] *= alpha[h];
        }
        scale_output(r.o, alpha);
    } else
        await_full(n, V_FULL);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        exponentials_of_chunk(s + CHUNK / 2 * chunk, r.rows, shift, unit);
        start_chunk(r.o, s + CHUNK / 2 * chunk, p[chunk], v_tile(n) + (from + chunk) * (CHUNK * 128), !FRESH || chunk > 0);
    }
    wgmma_wait<0>();
    hold(r.o);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        hold(p[chunk]);
}

/* A pass: the queries from the `first` on. Two chunks at once, as registers allow: of more the softmax is an online one. */
FA_DEVICE void attend_seen(const fa_args &args, const fa_maps &maps, const work &w, unsigned n, int first)
{
    seen_keys seen = seen_by_pass(args, w, first);
    int       from = FA_MASK == FA_MASK_WINDOW ? clamp_int(seen.some.begin / CHUNK, 0, MOST_CHUNKS - 1) : 0, chunks = same_for_all((seen.some.end + CHUNK - 1) / CHUNK - from);
    result    r;
    r.rows = no_rows();
    if (MOST_CHUNKS == 1 || chunks <= 1) /* or none */
        attend<1, true>(args, w, r, n, first, from, seen.all, true);
    else if constexpr (MOST_CHUNKS > 1)
        attend<2, true>(args, w, r, n, first, from, seen.all, MOST_CHUNKS == 2 || chunks == 2);
    if constexpr (MOST_CHUNKS > 2) {
        if (chunks == 3)
            attend<1, false>(args, w, r, n, first, from + 2, seen.all, true);
        else if (chunks > 3)
            attend<2, false>(args, w, r, n, first, from + 2, seen.all, true);
    }
    bool spoilt = false;
    if constexpr (MASKED) {
        await_full(n, INSPECTED);
        spoilt = w.spoilt;
        __syncwarp(); /* all lanes have seen this phase */
    }
    release(barrier_of(n, V_EMPTY));
    first += threadIdx.x % 128 / 32 * 16;
    unsigned at  = q_tile(n) + first % FA_TILE_Q * 128;
    far_rows far = stage_result(args, w, r.o, r.rows, at, first);
    if (spoilt)
        far = {far.upper >> 1, far.lower >> 1};
    if ((far.upper | far.lower) & 0x11111111u)
        store_far_rows(args, w, far, at, first);
    else
        store_rows(args, maps, w, at, first);
}

FA_DEVICE void consume(const fa_args &args, const fa_maps &maps, int consumer)
{
    bool     asks = threadIdx.x % 32 == 0; /* TMA, of a warp */
    unsigned before = ~0u;                 /* the head of the pass before, whose O may not have left yet */
    auto     give_back = [&](unsigned n) {
        bulk_added_was_read();
        barrier_arrive(barrier_of(n, Q_EMPTY));
    };
    for (unsigned number = consumer;; number += CONSUMERS) {
        unsigned n = number / PASSES;
        if (PASSES == 1 && before != ~0u && asks && !has_filled(n, Q_FULL)) { /* there is time */
            give_back(before);
            before = ~0u;
        }
        await_full(n, Q_FULL);
        const work &w = work_at(n);
        if (same_for_all(w.tiles) < 0)
            break;
        await_full(n, K_FULL);
        if (before != ~0u && asks)
            give_back(before);
        int first = (MANY ? same_for_all(w.first_row) : 0) + number % PASSES * 64;
        if (first < same_for_all(w.seq.rows_q))
            attend_seen(args, maps, w, n, first);
        else {
            release(barrier_of(n, K_EMPTY));
            await_full(n, MASKED ? INSPECTED : V_FULL);
            __syncwarp(); /* all lanes have seen this phase */
            release(barrier_of(n, V_EMPTY));
        }
        before = n;
    }
    if (before != ~0u && asks) /* a producer may wait for it, to say that there is nothing else */
        give_back(before);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    forward_short_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<LEFT>();
        if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < PRODUCERS)
            produce(args, maps, threadIdx.x / 32);
        else if (MASKED && threadIdx.x >= 64)
            inspect();
    } else {
        registers_up<REGISTERS>();
        consume(args, maps, same_for_all(threadIdx.x / 128 - 1));
    }
}
