/* backward_short_sm90.cu: a block's shared memory, its steps and who fetches them; delta; what is not finite; masks. */
#ifndef FA_SHORT_BLOCK_SM90_CUH
#define FA_SHORT_BLOCK_SM90_CUH

#include "gradients_sm90.cuh"
#include "mask.cuh"

/* LARGE: 256 rows, of which the consumers have 64 keys each and then another 64. */
constexpr int  ROWS = FA_TILE_Q, CONSUMERS = 2, THREADS = 128 * CONSUMERS, PANELS = FA_HEAD_DIM / 64;
constexpr bool LARGE = ROWS == 256, MASKED = FA_MASK != FA_MASK_NONE, MANY = FA_VARIANT == 1; /* heads have several tiles of queries, each a step */
constexpr int  KEY_TILES = ROWS / 128, PASS_Q = LARGE || PANELS == 2 ? 64 : 128, PASSES = ROWS / PASS_Q, STAGES = LARGE || PANELS == 2 ? 1 : 2;
static_assert(FA_TILE_K == ROWS && (ROWS == 128 || ROWS == 256) && FA_WARPS == 12 && FA_HEAD_DIM == FA_HEAD_DIM_V && (PANELS == 1 || (PANELS == 2 && !LARGE)) && !(MANY && (LARGE || MASKED)), "what the text is written for");
enum { Q, DOUT, O, K, V, TILES };
constexpr int PANEL_BYTES = ROWS * 128, TILE_BYTES = PANELS * PANEL_BYTES, HALF = 64 * 128 /* 64 rows of a panel */, STAT_BYTES = ROWS * 4;
constexpr int DS_PANEL = PASS_Q * 128 /* of a consumer's keys */, DS_BYTES = CONSUMERS * DS_PANEL, DS_BUFFERS = LARGE ? 2 : 1;
constexpr int DS_AT = STAGES * TILES * TILE_BYTES, DK_AT = DS_AT + DS_BUFFERS * DS_BYTES, LSE_AT = DK_AT + CONSUMERS * PANELS * HALF, DELTA_AT = LSE_AT + STAGES * STAT_BYTES;
constexpr int MARKS_AT = DELTA_AT + STAT_BYTES, SPOILT_AT = MARKS_AT + 2 * STAT_BYTES, BARRIERS_AT = SPOILT_AT + 16, STEPS_AT = BARRIERS_AT + 8 * 2 * STAGES;

/* A head of a sequence, or MANY a tile of its queries. In its stage. */
struct step {
    int head, kv_head;  /* head < 0: there is no step, nor one behind it */
    int first, last;    /* of those whose dK and dV are one sum: a key head's, or MANY a share's of it */
    int first_q, share; /* MANY */
    sequence seq;
};

constexpr int SHARED_BYTES = STEPS_AT + STAGES * (int)sizeof(step);
static_assert(SHARED_BYTES <= 227 * 1024, "what a block may have");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;
extern __shared__ __align__(1024) char shared[];

/* ---- n counts a block's steps; phases of a stage's barriers alternate ---- */

FA_DEVICE unsigned full(unsigned n) { return shared_address(shared) + BARRIERS_AT + n % STAGES * 16; }
FA_DEVICE unsigned empty(unsigned n) { return full(n) + 8; }
FA_DEVICE unsigned tile_at(unsigned n, int which) { return shared_address(shared) + (n % STAGES * TILES + which) * TILE_BYTES; }
FA_DEVICE unsigned ds_at(int buffer, int group) { return shared_address(shared) + DS_AT + buffer * DS_BYTES + group * DS_PANEL; }
FA_DEVICE unsigned dk_at(int group) { return shared_address(shared) + DK_AT + group * (PANELS * HALF); }
FA_DEVICE unsigned lse_at(unsigned n) { return shared_address(shared) + LSE_AT + n % STAGES * STAT_BYTES; }
FA_DEVICE unsigned delta_at() { return shared_address(shared) + DELTA_AT; }
FA_DEVICE float &mark_of_query(int i) { return ((float *)(shared + MARKS_AT))[i]; } /* not 0: its dO is not finite */
FA_DEVICE float &mark_of_key(int j) { return ((float *)(shared + MARKS_AT))[ROWS + j]; } /* not 0: some such query of the key head sees it */
FA_DEVICE int &spoilt_at(unsigned n) { return ((int *)(shared + SPOILT_AT))[n % 2]; }
FA_DEVICE step &step_at(unsigned n) { return ((step *)(shared + STEPS_AT))[n % STAGES]; }

enum { DELTA_IS_THERE = 1, DS_IS_THERE, DS_IS_FREE, ALL_ARE_HERE, OWN /* and one more: a consumer's */ };

/* Where a block is in its work: the step behind those that were found. */
struct walk {
    unsigned item = blockIdx.x, left = 0; /* steps of the item before */
    int      b, kv_head, share, head, first_q;
};

/* Every gridDim.x-th key head of all sequences, or share of it, and of each the heads, MANY with all tiles of queries; at least one step, for dK and dV may have to be 0. */
FA_DEVICE bool find_step(const fa_args &args, walk &at, step &s)
{
    unsigned shares = MANY ? args.group_blocks : 1, key_head = at.item / shares;
    s.first = LARGE /* no groups */ || at.left == 0;
    s.head  = -1;
    if (s.first && key_head >= (unsigned)args.batch * args.heads_k)
        return false;
    if (s.first) {
        at.b       = key_head / args.heads_k;
        at.kv_head = key_head % args.heads_k;
        at.share   = at.item % shares;
    }
    s.seq = sequence_at(args, at.b);
    if (s.first) {
        unsigned tiles = MANY ? fa_max_int((s.seq.rows_q + ROWS - 1) / ROWS, 1) : 1, all = args.group * tiles, begin = at.share * all / shares, end = (at.share + 1) * all / shares;
        bool     none  = MANY && begin == end;
        at.head    = at.kv_head * args.group + (none ? 0 : begin / tiles);
        at.first_q = none ? s.seq.rows_q : begin % tiles * ROWS;
        at.left    = none ? 1 : end - begin;
        at.item += gridDim.x;
    }
    s.kv_head = at.kv_head;
    s.share   = at.share;
    s.head    = at.head;
    s.first_q = at.first_q;
    s.last    = LARGE || --at.left == 0;
    at.first_q += ROWS;
    if (!MANY || at.first_q >= s.seq.rows_q) {
        at.first_q = 0;
        at.head++;
    }
    return true;
}

/* Queries of a step, and the first of them. */
FA_DEVICE int queries_of(const step &s) { return MANY ? clamp_int(s.seq.seqlen_q - s.first_q, 0, ROWS) : s.seq.seqlen_q; }
FA_DEVICE int first_query_of(const step &s) { return MANY ? s.first_q : 0; }

/* ---- warpgroup 0 ---- */

/* bring(tile, map, head, row past the last that counts, rows) for each tile of a step, in the order in which they are wanted. */
template <typename BRING> FA_DEVICE void for_tiles(const fa_args &args, const fa_maps &maps, const step &s, BRING bring)
{
    const sequence &q    = s.seq;
    int             left = MANY ? fa_max_int(q.seqlen_q - s.first_q, 0) : q.seqlen_q;
    bring(Q, maps.q, s.head, q.q_entry * args.apart_q + q.q_row + q.seqlen_q, left);
    bring(K, maps.k, s.kv_head, q.kv_entry * args.apart_k + q.kv_row + q.seqlen_k, q.seqlen_k);
    bring(DOUT, maps.dout, s.head, q.q_entry * args.apart_dout + q.q_row + q.seqlen_q, left);
    bring(V, maps.v, s.kv_head, q.kv_entry * args.apart_v + q.kv_row + q.seqlen_k, q.seqlen_k);
    bring(O, maps.o, s.head, q.q_entry * args.apart_o + q.q_row + q.seqlen_q, left);
}

/* By one thread. LARGE the next step comes into L2 while this one is worked on: 3% faster, at head_dim 128 8% slower. */
FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    walk at;
    for (unsigned n = 0;; n++) {
        step &s = step_at(n);
        barrier_wait(empty(n), freed<STAGES>(n));
        if (!find_step(args, at, s)) {
            barrier_arrive(full(n));
            return;
        }
        barrier_expect(full(n), TILES * TILE_BYTES);
        for_tiles(args, maps, s, [&](int which, const fa_map &map, int head, int end, int rows) {
            fetch_ragged<ROWS, FA_HEAD_DIM>(tile_at(n, which), map, full(n), head, end, rows);
        });
        step next;
        walk behind = at;
        if (LARGE && find_step(args, behind, next))
            for_tiles(args, maps, next, [&](int, const fa_map &map, int head, int end, int rows) { prefetch_ragged<ROWS, FA_HEAD_DIM>(map, head, end, rows); });
    }
}

/* By a warp. Past the last query P is 0. */
FA_DEVICE void fetch_lse(const fa_args &args)
{
    constexpr int EACH = ROWS / 32;
    int           lane = threadIdx.x % 32;
    walk          at;
    for (unsigned n = 0;; n++) {
        step  s;
        bool  some = find_step(args, at, s);
        float x[EACH] = {};
        if (some) {
            const float *lse = (const float *)args.lse.data + s.seq.q_entry * args.lse.stride[0] + s.head * args.lse.stride[1] + (s.seq.q_row + first_query_of(s)) * args.lse.stride[2];
            int          queries = queries_of(s);
            for (int i = 0; i < EACH; i++)
                x[i] = lane + 32 * i < queries ? lse_log2(lse[(lane + 32 * i) * args.lse.stride[2]]) : infinity();
        }
        barrier_wait(empty(n), freed<STAGES>(n));
        for (int i = 0; i < EACH; i++)
            shared_store(lse_at(n) + (lane + 32 * i) * 4, x[i]);
        __syncwarp();
        release(full(n));
        if (!some)
            return;
    }
}

/* ---- consumers: delta ---- */

/* Of 64 queries from the `first` on, two threads a row, each every other eight columns of it. */
FA_DEVICE void make_delta(unsigned n, int first)
{
    int   row = first + threadIdx.x % 128 / 2, half = threadIdx.x % 2;
    float sum = 0.0f;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            unsigned at = row * 128 + panel * PANEL_BYTES + ((chunk + half ^ row % 8) << 4);
            uint4    o = shared_load_16(tile_at(n, O) + at), dout = shared_load_16(tile_at(n, DOUT) + at);
            unsigned a[4] = {o.x, o.y, o.z, o.w}, b[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 x = unpack<FA_DTYPE>(a[i]), y = unpack<FA_DTYPE>(b[i]);
                sum += x.x * y.x;
                sum += x.y * y.y;
            }
        }
    sum = sum_of_lanes<2>(sum);
    if (half == 0)
        shared_store(delta_at() + row * 4, sum);
}

/* LSE or delta of this thread's columns 8 j and 8 j + 1 of a pass. */
FA_DEVICE float2 stats_of(unsigned from, int j) { return shared_load_float2(from + threadIdx.x % 4 * 8 + 32 * j); }

/* ---- what is not finite; MASKED ---- */

/* each(address of this thread's first 16 bytes), of those tiles that are multiplied by P or dS. */
template <typename EACH> FA_DEVICE void for_each_factor(unsigned n, EACH each)
{
#pragma unroll
    for (int i = 0; i < 3; i++)
        each(tile_at(n, i == 0 ? Q : i == 1 ? DOUT : K) + threadIdx.x % THREADS * 16);
}

FA_DEVICE void look_for_nonfinite(unsigned n)
{
    bool some = false;
    for_each_factor(n, [&](unsigned from) { some |= holds_nonfinite<TILE_BYTES, THREADS * 16>(from); });
    if (__any_sync(~0u, some) && threadIdx.x % 32 == 0)
        spoilt_at(n) = 1;
}

/* By all consumers, whose first products are over. Rare. */
FA_DEVICE void clear_nonfinite(unsigned n)
{
    named_sync(ALL_ARE_HERE, THREADS);
    for (int row = threadIdx.x % THREADS / 2; row < ROWS; row += THREADS / 2) {
        bool odd = false;
        for (int panel = 0; panel < PANELS; panel++)
            odd |= holds_nonfinite<64, 16>(tile_at(n, DOUT) + panel * PANEL_BYTES + row * 128 + threadIdx.x % 2 * 64);
        odd |= __shfl_xor_sync(~0u, (int)odd, 1);
        mark_of_query(row) = odd ? 1.0f : 0.0f;
    }
    named_sync(ALL_ARE_HERE, THREADS);
    for_each_factor(n, [&](unsigned from) { clear_nonfinite_of_lane<TILE_BYTES, THREADS * 16>(from); });
    fence_async();
    named_sync(ALL_ARE_HERE, THREADS);
}

/* Keys that a marked query sees, by all consumers. Rare. */
FA_DEVICE void mark_keys(const fa_args &args, const step &w, int keys)
{
    int      key = threadIdx.x % THREADS;
    fa_range seeing = fa_queries_seeing(window_of(args), w.seq.diagonal, {0, w.seq.seqlen_q}, {key, key + 1});
    for (int i = seeing.begin; i < seeing.end && key < keys; i++)
        if (mark_of_query(i) != 0.0f)
            mark_of_key(key) = 1.0f;
    named_sync(ALL_ARE_HERE, THREADS);
}

/* Their dV, of a warp's 16 keys, which is staged: 0x7FFF is NaN in both formats. */
FA_DEVICE void give_back_nonfinite(unsigned staged, int first_key)
{
    int lane = threadIdx.x % 32;
    __syncwarp();
    if (!__any_sync(~0u, mark_of_key(first_key + lane % 16) != 0.0f))
        return;
    for (int row = 0; row < 16; row++)
        for (int panel = 0; panel < PANELS && mark_of_key(first_key + row) != 0.0f; panel++)
            shared_store(staged + panel * PANEL_BYTES + row * 128 + lane * 4, 0x7FFF7FFFu);
    fence_async();
}

/* ---- masks ---- */

/* Of a thread's first key, which queries see it: [first, last] less its own first column; of the second, eight behind, as many more. */
struct columns {
    int first, last;
};

FA_DEVICE columns columns_of(const fa_args &args, const step &w, int first_key)
{
    fa_window window = window_of(args);
    int       same   = first_key + fragment_row() - w.seq.diagonal - threadIdx.x % 4 * 2;
    return {same - window.right, FA_MASK == FA_MASK_WINDOW ? same + window.left : 0};
}

FA_DEVICE bool sees(const columns &seen, int h, int col) { return col - 8 * h >= seen.first && (FA_MASK != FA_MASK_WINDOW || col - 8 * h <= seen.last); }

/* LARGE: some query of the pass sees some of the 128 keys from the first on. */
FA_DEVICE bool meets(const fa_args &args, const step &w, int first_query, int first_key, int keys)
{
    fa_range queries = {first_query, fa_min_int(first_query + PASS_Q, w.seq.seqlen_q)};
    fa_range seen    = fa_keys_seen(window_of(args), w.seq.diagonal, queries, {first_key, fa_min_int(first_key + 128, keys)});
    return queries.begin < queries.end && seen.begin < seen.end;
}

#endif
