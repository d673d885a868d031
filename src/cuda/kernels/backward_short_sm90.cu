/*
 * FlashAttention's backward for Hopper where a sequence's queries and its keys are one tile each: up to 128. float16 and bfloat16.
 * Then nothing is added to by others: one launch makes delta, P, dS and stores dQ, dK and dV in their own type, in the same order each time, and what it takes is
 * what memory takes to read five tensors and to write three.
 *
 *     warpgroup 0, warp 0    one thread finds this block's steps, heads of sequences, and has TMA fetch their tiles
 *                  warp 1    LSE of a step's queries
 *     warpgroups 1, 2        consumers: 64 keys each
 *
 * A step, transposed as in backward_sm90.cu (Algorithm 2 with one tile of each):
 *
 *     S^T = K Q^T, dP^T = V dO^T      delta = rowsum(dO * O), each consumer of 64 queries
 *     P^T = exp(S^T - LSE)            dS^T = P^T (dP^T - delta), to shared memory for dQ
 *     dV += P^T dO, dK += dS^T Q      of all heads of the key head
 *     dQ = dS K                       as soon as both consumers' dS is there: 64 queries, or 64 columns
 *
 * At head_dim 128 S and dP of 64 queries at a time are what registers hold beside dK and dV: two passes over the same tiles.
 *
 * Under a mask P and dS are 0 where a query does not see a key, but 0 * NaN is NaN: while the first products run the consumers look whether Q, K or dO hold
 * what is not finite. Then (rare) all of it becomes 0 before the other products begin: LSE and delta are NaN for who sees it, and dV of keys that a query sees whose dO it was is
 * made NaN on its way out.
 *
 * Shared memory: stages of Q, dO, O, K and V (at head_dim 64 two, else one), dS of a pass, dK on its way out. dQ leaves by way of O, which nobody reads behind
 * delta, and dV by way of its consumer's rows of V.
 */
#include "gradients_sm90.cuh"
#include "mask.cuh"

constexpr int CONSUMERS = 2, PANELS = FA_HEAD_DIM / 64, PASSES = PANELS, PASS_Q = FA_TILE_Q / PASSES, STAGES = 2 / PANELS;
constexpr int S_COUNT = PASS_Q / 2, P_STEPS = PASS_Q / 16, GRADIENT_COUNT = FA_HEAD_DIM / 2, DQ_COUNT = 32; /* of a thread; 16 queries a step */
static_assert(FA_TILE_Q == 128 && FA_TILE_K == 128 && FA_WARPS == 12 && FA_HEAD_DIM == FA_HEAD_DIM_V && (PANELS == 1 || PANELS == 2), "what the text is written for");
enum { Q, DOUT, O, K, V, TILES };
constexpr int PANEL_BYTES = 128 * 128, TILE_BYTES = PANELS * PANEL_BYTES, HALF = PANEL_BYTES / 2 /* 64 rows of a panel */, DS_PANEL = PASS_Q * 128 /* of a consumer's keys */;
constexpr int DS_AT = STAGES * TILES * TILE_BYTES, DK_AT = DS_AT + CONSUMERS * DS_PANEL, LSE_AT = DK_AT + CONSUMERS * PANELS * HALF, DELTA_AT = LSE_AT + STAGES * 512;
constexpr int MARKS_AT = DELTA_AT + 512, SPOILT_AT = MARKS_AT + 2 * 512, BARRIERS_AT = SPOILT_AT + 16, STEPS_AT = BARRIERS_AT + 8 * 2 * STAGES;

/* A head of a sequence. In its stage. */
struct step {
    int head, kv_head; /* head < 0: there is no step, nor one behind it */
    int first, last;   /* of the key head's heads */
    sequence seq;
};

constexpr int SHARED_BYTES = STEPS_AT + STAGES * (int)sizeof(step);
static_assert(SHARED_BYTES <= 227 * 1024, "what a block may have");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;
extern __shared__ __align__(1024) char shared[];

/* ---- what a block has; n counts its steps. Phases of a stage's barriers alternate ---- */

FA_DEVICE unsigned full(unsigned n) { return shared_address(shared) + BARRIERS_AT + n % STAGES * 16; }
FA_DEVICE unsigned empty(unsigned n) { return full(n) + 8; }
FA_DEVICE unsigned tile_at(unsigned n, int which) { return shared_address(shared) + (n % STAGES * TILES + which) * TILE_BYTES; }
FA_DEVICE unsigned ds_at(int group) { return shared_address(shared) + DS_AT + group * DS_PANEL; }
FA_DEVICE unsigned dk_at(int group) { return shared_address(shared) + DK_AT + group * (PANELS * HALF); }
FA_DEVICE unsigned lse_at(unsigned n) { return shared_address(shared) + LSE_AT + n % STAGES * 512; }
FA_DEVICE unsigned delta_at() { return shared_address(shared) + DELTA_AT; }
FA_DEVICE float &mark_of_query(int i) { return ((float *)(shared + MARKS_AT))[i]; } /* not 0: its dO is not finite */
FA_DEVICE float &mark_of_key(int j) { return ((float *)(shared + MARKS_AT))[128 + j]; } /* not 0: some such query of the key head sees it */
FA_DEVICE int &spoilt_at(unsigned n) { return ((int *)(shared + SPOILT_AT))[n % 2]; }
FA_DEVICE step &step_at(unsigned n) { return ((step *)(shared + STEPS_AT))[n % STAGES]; }

enum { DELTA_IS_THERE = 1, DS_IS_THERE, DS_IS_FREE, ALL_ARE_HERE, OWN /* and one more: a consumer's */ };
constexpr bool MASKED = FA_MASK != FA_MASK_NONE;
constexpr int  THREADS = 128 * CONSUMERS;

/* The n-th step of a block: every gridDim.x-th key head of all sequences, and of each the heads. */
FA_DEVICE bool find_step(const fa_args &args, unsigned n, step &s)
{
    unsigned group = args.group, item = blockIdx.x + n / group * gridDim.x, of_group = n % group;
    s.head = -1;
    if (item >= (unsigned)args.batch * args.heads_k)
        return false;
    s.kv_head = item % args.heads_k;
    s.head    = s.kv_head * group + of_group;
    s.first   = of_group == 0;
    s.last    = of_group == group - 1;
    s.seq     = sequence_at(args, item / args.heads_k);
    return true;
}

/* ---- warpgroup 0 ---- */

FA_DEVICE void fetch(unsigned n, int which, const fa_map &map, int head, int entry_row, int length)
{
    fetch_ragged<128, FA_HEAD_DIM>(tile_at(n, which), map, full(n), head, entry_row + length, length);
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    for (unsigned n = 0;; n++) {
        step &s = step_at(n);
        barrier_wait(empty(n), freed<STAGES>(n));
        if (!find_step(args, n, s)) {
            barrier_arrive(full(n));
            return;
        }
        sequence seq = s.seq;
        barrier_expect(full(n), TILES * TILE_BYTES);
        fetch(n, Q, maps.q, s.head, seq.q_entry * args.apart_q + seq.q_row, seq.seqlen_q);
        fetch(n, K, maps.k, s.kv_head, seq.kv_entry * args.apart_k + seq.kv_row, seq.seqlen_k);
        fetch(n, DOUT, maps.dout, s.head, seq.q_entry * args.apart_dout + seq.q_row, seq.seqlen_q);
        fetch(n, V, maps.v, s.kv_head, seq.kv_entry * args.apart_v + seq.kv_row, seq.seqlen_k);
        fetch(n, O, maps.o, s.head, seq.q_entry * args.apart_o + seq.q_row, seq.seqlen_q);
    }
}

/* By a warp. Past the last query P is 0. */
FA_DEVICE void fetch_lse(const fa_args &args)
{
    int lane = threadIdx.x % 32;
    for (unsigned n = 0;; n++) {
        step  s;
        bool  some = find_step(args, n, s);
        float x[4] = {};
        if (some) {
            const float *lse = (const float *)args.lse.data + s.seq.q_entry * args.lse.stride[0] + s.head * args.lse.stride[1] + s.seq.q_row * args.lse.stride[2];
            for (int i = 0; i < 4; i++)
                x[i] = lane + 32 * i < s.seq.seqlen_q ? lse_log2(lse[(lane + 32 * i) * args.lse.stride[2]]) : infinity();
        }
        barrier_wait(empty(n), freed<STAGES>(n));
        for (int i = 0; i < 4; i++)
            shared_store(lse_at(n) + (lane + 32 * i) * 4, x[i]);
        __syncwarp();
        release(full(n));
        if (!some)
            return;
    }
}

/* ---- consumers ---- */

/* delta of 64 queries, two threads a row, each every other eight columns of it. */
FA_DEVICE void make_delta(unsigned n, int group)
{
    int      row = 64 * group + threadIdx.x % 128 / 2, half = threadIdx.x % 2;
    unsigned from = row * 128;
    float    sum = 0.0f;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            unsigned at = from + panel * PANEL_BYTES + ((chunk + half ^ row % 8) << 4);
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

/* ---- what is not finite; MASKED ---- */

template <typename EACH> FA_DEVICE void for_each_tile(unsigned n, EACH each)
{
#pragma unroll
    for (int i = 0; i < 3; i++)
        each(tile_at(n, i == 0 ? Q : i == 1 ? DOUT : K) + threadIdx.x % THREADS * 16);
}

FA_DEVICE void look_for_nonfinite(unsigned n)
{
    bool some = false;
    for_each_tile(n, [&](unsigned from) { some |= holds_nonfinite<TILE_BYTES, THREADS * 16>(from); });
    if (__any_sync(~0u, some) && threadIdx.x % 32 == 0)
        spoilt_at(n) = 1;
}

/* By all consumers, whose first products are over. Rare. */
FA_DEVICE void clear_nonfinite(unsigned n)
{
    int  row = threadIdx.x % THREADS / 2, half = threadIdx.x % 2;
    bool odd = false;
    named_sync(ALL_ARE_HERE, THREADS);
    for (int panel = 0; panel < PANELS; panel++)
        odd |= holds_nonfinite<64, 16>(tile_at(n, DOUT) + panel * PANEL_BYTES + row * 128 + half * 64);
    odd |= __shfl_xor_sync(~0u, (int)odd, 1);
    mark_of_query(row) = odd ? 1.0f : 0.0f;
    named_sync(ALL_ARE_HERE, THREADS);
    for_each_tile(n, [&](unsigned from) { clear_nonfinite_of_lane<TILE_BYTES, THREADS * 16>(from); });
    fence_async();
    named_sync(ALL_ARE_HERE, THREADS);
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

/* Of this consumer's keys those that a marked query sees. Rare. */
FA_DEVICE void mark_keys(const fa_args &args, const step &w, int keys, int group)
{
    fa_window window = window_of(args);
    int       key    = 64 * group + threadIdx.x % 64, same = key - w.seq.diagonal;
    for (int i = fa_max_int(same - window.right, 0); i < w.seq.seqlen_q && key < keys; i++)
        if ((FA_MASK != FA_MASK_WINDOW || i <= same + window.left) && mark_of_query(i) != 0.0f)
            mark_of_key(key) = 1.0f;
}

/* Their dV, which is staged: 0x7FFF is NaN in both formats. */
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

/* LSE or delta of this thread's columns 8 j and 8 j + 1 of a pass. */
FA_DEVICE float2 stats_of(unsigned from, int j) { return shared_load_float2(from + threadIdx.x % 4 * 8 + 32 * j); }

/* c += X^T Y; y: a pass's rows of a tile of dO or Q. */
FA_DEVICE void start_gradient(float (&c)[GRADIENT_COUNT], unsigned (&x)[P_STEPS][4], unsigned y)
{
    matrix b = matrix_of(y, PANEL_BYTES);
    hold(c);
    hold(x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < P_STEPS; i++)
        wgmma_registers(c, x[i], b.from(i * 2048), 1);
    wgmma_commit();
}

/* This consumer's part of dS K: of 128 queries 64, of 64 queries 64 columns. */
FA_DEVICE void start_dq(float (&dq)[DQ_COUNT], unsigned n, int group)
{
    matrix a = matrix_of(ds_at(0) + (PASSES == 1 ? group * HALF : 0), 0), b = matrix_of(tile_at(n, K) + (PASSES == 1 ? 0 : group * PANEL_BYTES), 0);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < FA_TILE_K / 16; i++)
        wgmma_shared<1>(dq, a.from(i / 4 * DS_PANEL + i % 4 * 32), b.from(i * 2048), i > 0);
    wgmma_commit();
}

/* Keys past the last are zeros, but their P may be anything, and 0 * Inf is NaN. */
FA_DEVICE void clear_hidden_keys(unsigned (&ds)[P_STEPS][4], int first_key, int seqlen_k)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (first_key + fragment_row() + 8 * h >= seqlen_k)
#pragma unroll
            for (int i = 0; i < P_STEPS; i++)
                ds[i][h] = ds[i][2 + h] = 0;
}

/* Of a pass's dQ a consumer's first. */
FA_DEVICE int first_query(int pass, int group) { return 64 * (PASSES == 1 ? group : pass); }

/* dQ to where O of the same rows was, or of a pass's rows 64 columns. */
FA_DEVICE unsigned dq_at(unsigned n, int pass, int group) { return tile_at(n, O) + (PASSES == 1 ? group * HALF : group * PANEL_BYTES + pass * HALF); }

/* TMA takes 64 rows from the `first` on, of one panel, from where they are staged; one thread asks. Rows of the sequence that do not count are zeros there. */
FA_DEVICE void store_rows(const fa_map &map, int apart, unsigned from, int column, int head, int entry_row, int rows, int first)
{
    if (apart >= 0 && first < rows)
        tma_store_ragged(map, from, column, rows - first, head, entry_row + rows);
}

FA_DEVICE void consume(const fa_args &args, const fa_maps &maps, int group)
{
    float    dk[GRADIENT_COUNT], dv[GRADIENT_COUNT];
    int      lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    bool     asks = threadIdx.x % 128 == 0;
    for (unsigned n = 0;; n++) {
        barrier_wait(full(n), filled<STAGES>(n));
        const step &w = step_at(n);
        if (same_for_all(w.head) < 0)
            break;
        int keys = w.seq.seqlen_q > 0 ? w.seq.seqlen_k : 0; /* what nobody sees may be NaN */
        if (w.first)
#pragma unroll
            for (int i = 0; i < GRADIENT_COUNT; i++)
                dk[i] = dv[i] = 0.0f;
        if (MASKED && w.first && lane < 16)
            mark_of_key(64 * group + 16 * warp + lane) = 0.0f;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            float    s[S_COUNT], dp[S_COUNT], dq[DQ_COUNT];
            unsigned p[P_STEPS][4], ds[P_STEPS][4], q = tile_at(n, Q) + pass * HALF, dout = tile_at(n, DOUT) + pass * HALF;
            start_rows_by_rows<128, 128>(s, tile_at(n, K) + group * HALF, q);
            start_rows_by_rows<128, 128>(dp, tile_at(n, V) + group * HALF, dout);
            if (pass == 0) {
                if (MASKED)
                    look_for_nonfinite(n);
                make_delta(n, group);
                if (asks && n > 0) { /* the step before has left */
                    bulk_added_was_read();
                    if (STAGES > 1)
                        barrier_arrive(empty(n - 1));
                }
                named_sync(DELTA_IS_THERE, THREADS);
                if (MASKED && threadIdx.x == 128) /* all have read the step's before */
                    spoilt_at(n + 1) = 0;
            }
            wgmma_wait<1>();
            hold(s);
#pragma unroll
            for (int i = 0; i < S_COUNT; i += 4) {
                float2 row = stats_of(lse_at(n) + pass * PASS_Q * 4, i / 4);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[i + e] = exp2_fast(s[i + e] * args.scale_log2 - (e % 2 ? row.y : row.x));
            }
            wgmma_wait<0>();
            hold(dp);
            columns seen = columns_of(args, w, 64 * group);
#pragma unroll
            for (int i = 0; i < S_COUNT; i += 4) {
                float2 row = stats_of(delta_at() + pass * PASS_Q * 4, i / 4);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    bool some = !MASKED || sees(seen, e / 2, pass * PASS_Q + 2 * i + e % 2);
                    dp[i + e] = some ? s[i + e] * (dp[i + e] - (e % 2 ? row.y : row.x)) : 0.0f;
                    s[i + e]  = some ? s[i + e] : 0.0f;
                }
            }
            pack_operand(p, s);
            pack_operand(ds, dp);
            clear_hidden_keys(ds, 64 * group, keys);
            if (MASKED && pass == 0 && same_for_all(spoilt_at(n))) {
                clear_nonfinite(n);
                mark_keys(args, w, keys, group);
            }
            if (pass > 0) /* the other consumer has made dQ of it */
                named_sync(DS_IS_FREE, THREADS);
            unsigned to = turned_at(ds_at(group));
#pragma unroll
            for (int i = 0; i < P_STEPS; i++)
                store_matrix_transposed(to + i * 2048, ds[i]);
            fence_async();
            start_gradient(dv, p, dout);
            start_gradient(dk, ds, q);
            named_sync(DS_IS_THERE, THREADS);
            start_dq(dq, n, group);
            wgmma_wait<0>();
            hold(dv);
            hold(p);
            hold(dk);
            hold(ds);
            hold(dq);
            stage_panel(dq, 0, args.scale, lane, w.seq.seqlen_q - first_query(pass, group) - 16 * warp, dq_at(n, pass, group) + warp * 2048);
        }
        if (w.last) {
            int      counting = keys - 64 * group - 16 * warp;
            unsigned staged   = tile_at(n, V) + group * HALF + warp * 2048;
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                stage_panel(dv, panel, 1.0f, lane, counting, staged + panel * PANEL_BYTES);
                stage_panel(dk, panel, args.scale, lane, counting, dk_at(group) + panel * HALF + warp * 2048);
            }
            if (MASKED)
                give_back_nonfinite(staged, 64 * group + 16 * warp);
        }
        named_sync(OWN + group, 128);
        if (asks) {
            const sequence &seq = w.seq;
            for (int pass = 0; pass < PASSES; pass++)
                store_rows(maps.dq, args.apart_dq, dq_at(n, pass, group), PASSES == 1 ? 0 : 64 * group, w.head, seq.q_entry * args.apart_dq + seq.q_row, seq.rows_q,
                           first_query(pass, group));
            for (int panel = 0; panel < PANELS && w.last; panel++) {
                store_rows(maps.dv, args.apart_dv, tile_at(n, V) + panel * PANEL_BYTES + group * HALF, 64 * panel, w.kv_head, seq.kv_entry * args.apart_dv + seq.kv_row,
                           seq.rows_k, 64 * group);
                store_rows(maps.dk, args.apart_dk, dk_at(group) + panel * HALF, 64 * panel, w.kv_head, seq.kv_entry * args.apart_dk + seq.kv_row, seq.rows_k, 64 * group);
            }
            if (STAGES == 1) { /* nothing else could be fetched meanwhile */
                bulk_added_was_read();
                barrier_arrive(empty(n));
            }
        }
    }
    if (asks)
        bulk_added_was_read();
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    backward_short_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0) {
        spoilt_at(0) = 0;
        for (int n = 0; n < STAGES; n++) {
            barrier_init(full(n), 2);
            barrier_init(empty(n), CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<40>(); /* of the 504 that three threads have */
        if (threadIdx.x == 0)
            produce(args, maps);
        else if (threadIdx.x / 32 == 1)
            fetch_lse(args);
    } else {
        registers_up<232>();
        consume(args, maps, same_for_all(threadIdx.x / 128 - 1));
    }
}
