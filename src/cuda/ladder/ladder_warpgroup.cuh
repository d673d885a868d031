/* What K4.2 and the rungs above share beside the products of kernels/warpgroup.cuh. Shared memory: Q, FA_STAGES tiles of K, as many of V,
 * barriers. */
#ifndef FA_LADDER_WARPGROUP_CUH
#define FA_LADDER_WARPGROUP_CUH

#include "ladder.cuh"
#include "warpgroup.cuh"

constexpr int Q_BYTES = FA_TILE_Q * D * ELEMENT_BYTES, KV_BYTES = FA_TILE_K * D * ELEMENT_BYTES, O_BYTES = FA_TILE_Q * D * 2;
constexpr int Q_GROUP = 64 * panel_bytes(D);  /* a warpgroup's rows of Q */
constexpr int O_AT = FP8 ? Q_BYTES : 0; /* O leaves through Q's place, or if that is too small through one of its own */
constexpr int K_AT = O_AT + O_BYTES, V_AT = K_AT + FA_STAGES * KV_BYTES, BARRIERS_AT = V_AT + FA_STAGES * KV_BYTES;

/* Barriers: Q, then FA_STAGES each of K full, V full, K empty, V empty. */
FA_DEVICE unsigned q_full(unsigned at) { return at + BARRIERS_AT; }
FA_DEVICE unsigned k_full(unsigned at, int stage) { return at + BARRIERS_AT + 8 * (1 + stage); }
FA_DEVICE unsigned v_full(unsigned at, int stage) { return at + BARRIERS_AT + 8 * (1 + FA_STAGES + stage); }
FA_DEVICE unsigned k_empty(unsigned at, int stage) { return at + BARRIERS_AT + 8 * (1 + 2 * FA_STAGES + stage); }
FA_DEVICE unsigned v_empty(unsigned at, int stage) { return at + BARRIERS_AT + 8 * (1 + 3 * FA_STAGES + stage); }
constexpr int BARRIERS = 1 + 4 * FA_STAGES, SHARED_BYTES = BARRIERS_AT + 8 * BARRIERS;

/* Two barriers' users: how many arrivals free a stage. One thread; a __syncthreads must follow. */
FA_DEVICE void start_barriers(unsigned at, int readers)
{
    for (int n = 0; n < BARRIERS; n++)
        barrier_init(at + BARRIERS_AT + 8 * n, n < 1 + 2 * FA_STAGES ? 1 : readers);
    barrier_init_done();
}

FA_DEVICE void fetch_q(const fa_maps &maps, const block_work &w, unsigned at)
{
    barrier_expect(q_full(at), Q_BYTES);
    fetch_tile<FA_TILE_Q, D>(at, maps.q, q_full(at), w.entry, w.head, w.first_q);
}

/* Tile number n of the walk, from the right. */
FA_DEVICE void fetch_k(const fa_maps &maps, const block_work &w, unsigned at, int n)
{
    int stage = n % FA_STAGES;
    barrier_expect(k_full(at, stage), KV_BYTES);
    fetch_tile<FA_TILE_K, D>(at + K_AT + stage * KV_BYTES, maps.k, k_full(at, stage), w.entry, w.kv_head,
                          (w.tiles - 1 - n) * FA_TILE_K);
}

FA_DEVICE void fetch_v(const fa_maps &maps, const block_work &w, unsigned at, int n)
{
    int stage = n % FA_STAGES;
    barrier_expect(v_full(at, stage), KV_BYTES);
    fetch_tile<FA_TILE_K, D>(at + V_AT + stage * KV_BYTES, maps.v, v_full(at, stage), w.entry, w.kv_head,
                          (w.tiles - 1 - n) * FA_TILE_K);
}

/* All of a producer's work: Q, then K and V as consumers free their stages. */
FA_DEVICE void produce(const fa_maps &maps, const block_work &w, unsigned at)
{
    fetch_q(maps, w, at);
    for (int n = 0; n < w.tiles; n++) {
        int stage = n % FA_STAGES, parity = (n / FA_STAGES & 1) ^ 1;
        barrier_wait(k_empty(at, stage), parity);
        fetch_k(maps, w, at, n);
        barrier_wait(v_empty(at, stage), parity);
        fetch_v(maps, w, at, n);
    }
}

FA_DEVICE void wait_for_k(unsigned at, int n) { barrier_wait(k_full(at, n % FA_STAGES), n / FA_STAGES & 1); }
FA_DEVICE void wait_for_v(unsigned at, int n) { barrier_wait(v_full(at, n % FA_STAGES), n / FA_STAGES & 1); }

/* s = Q K^T of step n. q: this warpgroup's rows. */
FA_DEVICE void start_scores(float (&s)[S_COUNT], unsigned q, unsigned at, int n)
{
    start_scores(s, q, at + K_AT + n % FA_STAGES * KV_BYTES);
}

/* o += P V of step n. */
FA_DEVICE void start_output(float (&o)[O_COUNT], unsigned (&p)[P_STEPS][4], unsigned at, int n)
{
    start_output(o, p, at + V_AT + n % FA_STAGES * KV_BYTES, true);
}

/* ---- softmax ---- */

struct row_state {
    float max[2], sum[2]; /* of dot products; this thread's part of the sum of exponentials. Of rows h = 0, 1 */
};

/* S of keys that a row does not see becomes -inf. first_q: this warpgroup's. */
FA_DEVICE void mask_scores(const fa_args &args, float (&s)[S_COUNT], int first_q, int first_key)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int limit = key_limit(args, first_q + fragment_row() + 8 * h) - first_key - threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e >= limit)
                    s[4 * j + 2 * h + e] = -infinity();
    }
}

constexpr float P_LOG2 = FP8 ? 8.0f : 0.0f, P_UNIT = FP8 ? 256.0f : 1.0f; /* P, and with it its sum and O, is P_UNIT = 2^P_LOG2 times as large */

/* S becomes exp(S - max) and the row's maximum and sum take it in; alpha is what O has to be multiplied with. MASKED: a row may
 * see nothing. */
template <bool MASKED>
FA_DEVICE void softmax_step(float (&s)[S_COUNT], row_state &state, float (&alpha)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = state.max[h];
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
            max = fmaxf(max, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        max         = quad_max(max);
        float top   = MASKED && max == -infinity() ? 0.0f : max * scale_log2; /* exp2(-inf + inf) is NaN */
        float shift = top - P_LOG2, sum = 0.0f;
        alpha[h]    = exp2_fast(state.max[h] * scale_log2 - top);
#pragma unroll
        for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[4 * j + 2 * h + e];
                x        = exp2_fast(x * scale_log2 - shift);
                sum += x;
            }
        state.max[h] = max;
        state.sum[h] = state.sum[h] * alpha[h] + sum;
    }
}

FA_DEVICE void clear(row_state &state, float (&o)[O_COUNT])
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        o[n] = 0.0f;
    state = {{-infinity(), -infinity()}, {0.0f, 0.0f}};
}

/* ---- the way out ---- */

/* O / l through this warp's 16 rows of O's place, so that whole rows go to memory; LSE. place: this warpgroup's rows. */
FA_DEVICE void store_rows(const fa_args &args, const block_work &w, float (&o)[O_COUNT], const row_state &state, char *place,
                          int first_q)
{
    int row = fragment_row(), lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = quad_sum(state.sum[h]), inverse = sum == 0.0f ? 0.0f : w.descale_v / sum;
        int   i   = first_q + row + 8 * h;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *(unsigned *)(place + chunk_at<FA_TILE_Q>(row + 8 * h, j) + lane % 4 * 4) =
                pack<FA_DTYPE_O>(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
        if (lane % 4 == 0 && i < args.max_seqlen_q)
            store_lse(args, w, i, state.max[h], sum / P_UNIT);
    }
    __syncwarp();
    constexpr int CHUNKS = D / 8;
    int           first_row = row - lane / 4;
#pragma unroll
    for (int n = lane; n < 16 * CHUNKS; n += 32) {
        int r = first_row + n / CHUNKS, chunk = n % CHUNKS, i = first_q + r;
        if (i < args.max_seqlen_q)
            *(uint4 *)(row_of(args.o, w.entry, i, w.head) + 8 * chunk) = *(const uint4 *)(place + chunk_at<FA_TILE_Q>(r, chunk));
    }
}

#endif
