/*
 * FlashAttention's backward for Hopper where a block holds a sequence's queries and keys: up to 128 of each, or at head_dim 64 256. float16 and bfloat16.
 * Then nothing is added to by others: one launch makes delta, P, dS and stores dQ, dK and dV in their own type, in the same order each time, and what it takes is,
 * up to 128, what memory takes to read five tensors and to write three.
 *
 *     warpgroup 0, warp 0    one thread finds this block's steps, heads of sequences, and has TMA fetch their tiles
 *                  warp 1    LSE of a step's queries
 *     warpgroups 1, 2        consumers: 64 keys each (LARGE: of 128 keys, and then of the others)
 *
 * A pass, of 128 or 64 queries, transposed as in backward_sm90.cu (Algorithm 2, its inner loop):
 *
 *     S^T = K Q^T, dP^T = V dO^T      before the first: delta = rowsum(dO * O)
 *     P^T = exp(S^T - LSE)            dS^T = P^T (dP^T - delta), to shared memory for dQ
 *     dV += P^T dO, dK += dS^T Q      of all heads of the key head
 *     dQ (+)= dS K                    as soon as both consumers' dS is there: of 128 queries 64, of 64 64 columns, LARGE of every second pass all 64, which stay in registers
 *
 * Under a mask P and dS are 0 where a query does not see a key, but 0 * NaN is NaN: while the first products run the consumers look whether Q, K or dO hold
 * what is not finite. Then (rare) all of it becomes 0 before the other products begin: LSE and delta are NaN for who sees it, and dV of keys that a query sees whose dO it was is
 * made NaN on its way out.
 *
 * Or a key head's queries are several tiles (MANY: cross attention to a text's few keys), each a step, whose dK and dV stay in registers as those of a group's heads do. Where
 * key heads are fewer than multiprocessors, shares of the steps are blocks of their own, which store floats for backward_convert_sm90.cu to add up.
 *
 * Shared memory: stages of Q, dO, O, K and V (at head_dim 64 with 128 rows two, else one), dS of a pass (LARGE of two), dK on its way out. dQ leaves by way of O, which nobody reads
 * behind delta, and dV by way of its consumer's rows of V.
 */
#include "short_block_sm90.cuh"

constexpr int S_COUNT = PASS_Q / 2, P_STEPS = PASS_Q / 16, GRADIENT_COUNT = FA_HEAD_DIM / 2, DQ_COUNT = 32, DQ_KEPT = LARGE ? PASSES / CONSUMERS : 1; /* of a thread; 16 queries a step */

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

/* This consumer's part of dS K; k: the 128 keys. */
FA_DEVICE void start_dq(float (&dq)[DQ_COUNT], unsigned ds, unsigned k, int group)
{
    matrix a = matrix_of(ds + (PASS_Q == 128 ? group * HALF : 0), 0), b = matrix_of(k + (LARGE || PASS_Q == 128 ? 0 : group * PANEL_BYTES), 0);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 128 / 16; i++)
        wgmma_shared<1>(dq, a.from(i / 4 * DS_PANEL + i % 4 * 32), b.from(i * 2048), LARGE || i > 0);
    wgmma_commit();
}

/* Keys past the last are zeros, but their P may be anything, and 0 * Inf is NaN. */
FA_DEVICE void clear_hidden_keys(unsigned (&ds)[P_STEPS][4], int first_key, int keys)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (first_key + fragment_row() + 8 * h >= keys)
#pragma unroll
            for (int i = 0; i < P_STEPS; i++)
                ds[i][h] = ds[i][2 + h] = 0;
}

/* Of a pass's dQ this consumer's first query, and where it is staged: where O of the same rows was, or of a pass's rows 64 columns. */
FA_DEVICE int first_query(int pass, int group) { return PASS_Q == 128 ? 64 * group : 64 * pass; }
FA_DEVICE unsigned dq_at(unsigned n, int pass, int group) { return tile_at(n, O) + first_query(pass, group) * 128 + (PANELS == 1 ? 0 : group * PANEL_BYTES); }

FA_DEVICE void stage_dq(const fa_args &args, const step &w, const float (&dq)[DQ_COUNT], unsigned n, int pass, int group)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    stage_panel(dq, 0, args.scale, lane, queries_of(w) - first_query(pass, group) - 16 * warp, dq_at(n, pass, group) + warp * 2048);
}

/* TMA takes 64 rows from the `first` on, of one panel, from where they are staged; one thread asks. Rows of the sequence that do not count are zeros there. */
FA_DEVICE void store_rows(const fa_map &map, int apart, unsigned from, int column, int head, int entry_row, int rows, int first)
{
    if (apart >= 0 && first < rows)
        tma_store_ragged(map, from, column, rows - first, head, entry_row + rows);
}

FA_DEVICE void store_dq(const fa_args &args, const fa_maps &maps, const step &w, unsigned n, int pass, int group)
{
    store_rows(maps.dq, args.apart_dq, dq_at(n, pass, group), PANELS == 1 ? 0 : 64 * group, w.head, w.seq.q_entry * args.apart_dq + w.seq.q_row, w.seq.rows_q, first_query_of(w) + first_query(pass, group));
}

/* This consumer's 64 keys of dK and dV. */
FA_DEVICE void store_keys(const fa_args &args, const fa_maps &maps, const step &w, unsigned n, int first_key, int group)
{
    const sequence &seq = w.seq;
    for (int panel = 0; panel < PANELS; panel++) {
        store_rows(maps.dv, args.apart_dv, tile_at(n, V) + panel * PANEL_BYTES + first_key * 128, 64 * panel, w.kv_head, seq.kv_entry * args.apart_dv + seq.kv_row, seq.rows_k, first_key);
        store_rows(maps.dk, args.apart_dk, dk_at(group) + panel * HALF, 64 * panel, w.kv_head, seq.kv_entry * args.apart_dk + seq.kv_row, seq.rows_k, first_key);
    }
}

FA_DEVICE void stage_keys(const fa_args &args, unsigned n, const float (&dk)[GRADIENT_COUNT], const float (&dv)[GRADIENT_COUNT], int first_key, int keys, int group)
{
    int      lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, counting = keys - first_key - 16 * warp;
    unsigned staged = tile_at(n, V) + first_key * 128 + warp * 2048;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        stage_panel(dv, panel, 1.0f, lane, counting, staged + panel * PANEL_BYTES);
        stage_panel(dk, panel, args.scale, lane, counting, dk_at(group) + panel * HALF + warp * 2048);
    }
    if (MASKED)
        give_back_nonfinite(staged, first_key + 16 * warp);
}

/* A share's sums of this consumer's keys, as floats; keys that do not count get 0. */
FA_DEVICE void store_share(const fa_args &args, const fa_view &view, const step &w, const float (&x)[GRADIENT_COUNT], float factor, int first_key, int keys)
{
    if (!view.data)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int    row = first_key + fragment_row() + 8 * h;
        float *to  = (float *)view.data + w.seq.kv_entry * view.stride[0] + (w.seq.kv_row + row) * view.stride[1] + (w.kv_head * args.group_blocks + w.share) * view.stride[2];
        float  f   = row < keys ? factor : 0.0f;
        if (row < w.seq.rows_k)
#pragma unroll
            for (int j = 0; j < GRADIENT_COUNT / 4; j++)
                *(float2 *)(to + 8 * j + threadIdx.x % 4 * 2) = f == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(x[4 * j + 2 * h] * f, x[4 * j + 2 * h + 1] * f);
    }
}

FA_DEVICE void consume(const fa_args &args, const fa_maps &maps, int group)
{
    float dk[GRADIENT_COUNT], dv[GRADIENT_COUNT], dq[DQ_KEPT][DQ_COUNT];
    bool  asks = threadIdx.x % 128 == 0;
    for (unsigned n = 0;; n++) {
        barrier_wait(full(n), filled<STAGES>(n));
        const step &w = step_at(n);
        if (same_for_all(w.head) < 0)
            break;
        int keys = w.seq.seqlen_q > 0 ? w.seq.seqlen_k : 0; /* what nobody sees may be NaN */
        int made = 0;                                       /* passes of the step */
        if (MASKED && w.first) /* its own keys' */
            mark_of_key(threadIdx.x % 128 / 64 % KEY_TILES * 128 + 64 * group + threadIdx.x % 64) = 0.0f;
        if (LARGE)
#pragma unroll
            for (int i = 0; i < DQ_KEPT; i++)
#pragma unroll
                for (int j = 0; j < DQ_COUNT; j++)
                    dq[i][j] = 0.0f;
#pragma unroll 1
        for (int tile = 0; tile < KEY_TILES; tile++) {
            int first_key = 128 * tile + 64 * group;
            if (w.first)
#pragma unroll
                for (int i = 0; i < GRADIENT_COUNT; i++)
                    dk[i] = dv[i] = 0.0f;
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) {
                float    s[S_COUNT], dp[S_COUNT];
                unsigned p[P_STEPS][4], ds[P_STEPS][4], q = tile_at(n, Q) + pass * HALF, dout = tile_at(n, DOUT) + pass * HALF, k = tile_at(n, K) + tile * (128 * 128);
                bool     first = pass == 0 && tile == 0;
                if (LARGE && !first && !meets(args, w, pass * PASS_Q, 128 * tile, keys))
                    continue;
                start_rows_by_rows<ROWS, ROWS>(s, tile_at(n, K) + first_key * 128, q);
                start_rows_by_rows<ROWS, ROWS>(dp, tile_at(n, V) + first_key * 128, dout);
                if (first) {
                    if (MASKED)
                        look_for_nonfinite(n);
#pragma unroll
                    for (int i = 0; i < ROWS; i += 128)
                        make_delta(n, i + 64 * group);
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
                columns seen = columns_of(args, w, first_key);
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
                clear_hidden_keys(ds, first_key, keys);
                if (MASKED && first && same_for_all(spoilt_at(n))) {
                    clear_nonfinite(n);
                    mark_keys(args, w, keys);
                }
                if (!LARGE && pass > 0) /* the other consumer has made dQ of it; LARGE has another */
                    named_sync(DS_IS_FREE, THREADS);
                int      buffer = made % DS_BUFFERS;
                unsigned to     = turned_at(ds_at(buffer, group));
#pragma unroll
                for (int i = 0; i < P_STEPS; i++)
                    store_matrix_transposed(to + i * 2048, ds[i]);
                fence_async();
                start_gradient(dv, p, dout);
                start_gradient(dk, ds, q);
                named_sync(DS_IS_THERE, THREADS);
                if (!LARGE || pass % CONSUMERS == group)
                    start_dq(dq[LARGE ? pass / CONSUMERS : 0], ds_at(buffer, 0), k, group);
                wgmma_wait<0>();
                hold(dv);
                hold(p);
                hold(dk);
                hold(ds);
                hold(dq[LARGE ? pass / CONSUMERS : 0]);
                if (!LARGE)
                    stage_dq(args, w, dq[0], n, pass, group);
                made++;
            }
            bool last = tile == KEY_TILES - 1;
            if (tile > 0) { /* dK of the keys before has left */
                if (asks)
                    bulk_added_was_read();
                named_sync(OWN + group, 128);
            }
            if (LARGE && last)
#pragma unroll
                for (int i = 0; i < DQ_KEPT; i++)
                    stage_dq(args, w, dq[i], n, CONSUMERS * i + group, group);
            if (MANY && w.last && args.group_blocks > 1) {
                store_share(args, args.dk_stored, w, dk, args.scale, first_key, keys);
                store_share(args, args.dv_stored, w, dv, 1.0f, first_key, keys);
            } else if (w.last)
                stage_keys(args, n, dk, dv, first_key, keys, group);
            named_sync(OWN + group, 128);
            if (!asks)
                continue;
            for (int pass = LARGE ? group : 0; pass < PASSES && last; pass += LARGE ? CONSUMERS : 1)
                store_dq(args, maps, w, n, pass, group);
            if (w.last)
                store_keys(args, maps, w, n, first_key, group);
        }
        if (STAGES == 1 && asks) { /* nothing else could be fetched meanwhile */
            bulk_added_was_read();
            barrier_arrive(empty(n));
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
