/*
 * FlashAttention-2's backward (Algorithm 2) for Hopper in float32: three products of float16 planes for each of float32 (planes_sm90.cuh), by WGMMA. Q, K, V and dO have been cut
 * before.
 *
 *     warpgroup 0       producer: one thread fetches the block's tile of K and V, then tiles of Q and dO with LSE and delta, by bulk copies
 *     warpgroup 1, 2    consumers: 64 keys each, keys down and queries across, so that P^T and dS^T are left operands in registers
 *
 *         a step, lines 10-16:   S^T = K Q^T, dP^T = V dO^T;   P^T = exp(S^T - LSE), dS^T = P^T (dP^T - delta)
 *                                dV += P^T dO;   dK += dS^T Q;   dQ += dS K, from shared memory, to float dQ in global memory
 *
 * Each product has accumulators of its own, 64 columns at a time, and is added up in float, times what its planes' exponents leave out: decision 0043. P is at most 1; dS is
 * cut by the largest of a consumer's 64 x 64. Where planes say that numbers are lost (args.lost) nothing is done here, and backward_sm80.cu does it all behind this launch.
 *
 * Shared memory: K, V, FA_STAGES tiles of Q and of dO, dS of each consumer, notes, barriers.
 */
#include "backward_work.cuh"
#include "accumulate.cuh"
#include "planes_sm90.cuh"
#include "store_sm90.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1;
static_assert(CONSUMERS == 2 && FA_TILE_K == 64 * CONSUMERS && FA_TILE_Q == 64, "a consumer owns 64 keys; its dS is a panel");
static_assert(FA_DTYPE == FA_F32 && FA_HEAD_DIM % 64 == 0 && FA_HEAD_DIM_V % 64 == 0, "planes of float32, panel by panel");

constexpr int S_COUNT = FA_TILE_Q / 2, STEPS = FA_TILE_Q / 16; /* of a thread; of 16 queries */
constexpr int DS_PLANE = 64 * 128;
constexpr int NOTE = 4 * (FA_TILE_Q + 4), KEY_NOTE = 16;
constexpr int V_AT = cut_keys::BYTES, Q_AT = V_AT + cut_values::BYTES, DOUT_AT = Q_AT + FA_STAGES * cut_queries::BYTES, DS_AT = DOUT_AT + FA_STAGES * cut_dout::BYTES;
constexpr int NOTES_AT = DS_AT + CONSUMERS * 2 * DS_PLANE, LARGEST_AT = NOTES_AT + 2 * KEY_NOTE + 2 * FA_STAGES * NOTE, BARRIERS_AT = LARGEST_AT + 16 * CONSUMERS;

extern "C" __constant__ int fa_shared_bytes = BARRIERS_AT + 8 * (1 + 4 * FA_STAGES);
extern __shared__ __align__(1024) char shared[];

/* ---- barriers; `n` counts tiles of queries ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned keys_full() { return barrier_at(0); }
FA_DEVICE unsigned q_full(unsigned n) { return barrier_at(1 + n % FA_STAGES); }
FA_DEVICE unsigned q_empty(unsigned n) { return q_full(n) + 8 * FA_STAGES; }
FA_DEVICE unsigned dout_full(unsigned n) { return q_full(n) + 16 * FA_STAGES; }
FA_DEVICE unsigned dout_empty(unsigned n) { return q_full(n) + 24 * FA_STAGES; }

FA_DEVICE void start_barriers()
{
    barrier_init(keys_full(), 2);
    for (int n = 0; n < FA_STAGES; n++) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 4 * CONSUMERS);
        barrier_init(dout_full(n), 1);
        barrier_init(dout_empty(n), 4 * CONSUMERS);
    }
    barrier_init_done();
}

FA_DEVICE unsigned k_tile() { return shared_address(shared); }
FA_DEVICE unsigned v_tile() { return shared_address(shared) + V_AT; }
FA_DEVICE unsigned q_tile(unsigned n) { return shared_address(shared) + Q_AT + n % FA_STAGES * cut_queries::BYTES; }
FA_DEVICE unsigned dout_tile(unsigned n) { return shared_address(shared) + DOUT_AT + n % FA_STAGES * cut_dout::BYTES; }
FA_DEVICE unsigned ds_tile(int group) { return shared_address(shared) + DS_AT + group * (2 * DS_PLANE); }

/* Each tile's 2^e; of queries each row's LSE or delta before that. */
FA_DEVICE const float *k_note() { return (const float *)(shared + NOTES_AT); }
FA_DEVICE const float *v_note() { return k_note() + KEY_NOTE / 4; }
FA_DEVICE const float *q_note(unsigned n) { return (const float *)(shared + NOTES_AT + 2 * KEY_NOTE + n % FA_STAGES * NOTE); }
FA_DEVICE const float *dout_note(unsigned n) { return q_note(n) + FA_STAGES * NOTE / 4; }

/* ---- producer: one thread ---- */

FA_DEVICE void produce(const fa_args &args, const work &w)
{
    fa_i64 key_tile = (fa_i64)w.kv_head * args.all_tiles_k + first_tile_of_keys(args, w.b) + w.first_k / FA_TILE_K;
    fetch<cut_keys>(k_tile(), shared_address(k_note()), KEY_NOTE, args.k_tiles, key_tile, keys_full());
    fetch<cut_values>(v_tile(), shared_address(v_note()), KEY_NOTE, args.v_turned, key_tile, keys_full());
    unsigned n = 0;
    for (place at = {w.first_head, w.start}; inside(w, at); at = next_place(w, at), n++) {
        fa_i64 tile = (fa_i64)at.head * args.all_tiles_q + first_tile_of_queries(args, w.b) + at.tile;
        barrier_wait(q_empty(n), freed<FA_STAGES>(n));
        fetch<cut_queries>(q_tile(n), shared_address(q_note(n)), NOTE, args.q_tiles, tile, q_full(n));
        barrier_wait(dout_empty(n), freed<FA_STAGES>(n));
        fetch<cut_dout>(dout_tile(n), shared_address(dout_note(n)), NOTE, args.dout_tiles, tile, dout_full(n));
    }
}

/* ---- consumers. Elements as in warpgroup.cuh, keys down and queries across ---- */

struct consumer {
    float    dk[FA_HEAD_DIM / 2], dv[FA_HEAD_DIM_V / 2];
    unsigned p[2][STEPS][4]; /* P^T, high and low */
    float    ds_unit;                         /* 2^e that dS was cut by */
    int      group;
    unsigned n; /* query tiles since the kernel began */
};

/* P^T from S^T, in place. */
FA_DEVICE void exponentials(const fa_args &args, float (&s)[S_COUNT], unsigned n)
{
    const float *note = q_note(n);
    float        unit = note[FA_TILE_Q] * k_note()[0] * args.scale;
#pragma unroll
    for (int j = 0; j < S_COUNT / 4; j++) {
        float2 lse = *(const float2 *)(note + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) /* the difference first: a large LSE in log2 would be rounded */
            s[i] = exp2_fast((s[i] * unit - (i % 2 ? lse.y : lse.x)) * FA_LOG2E);
    }
}

/* dS^T from P^T and dP^T, in place. */
FA_DEVICE void gradients_of_scores(const float (&p)[S_COUNT], float (&dp)[S_COUNT], unsigned n)
{
    const float *note = dout_note(n);
    float        unit = note[FA_TILE_Q] * v_note()[0];
#pragma unroll
    for (int j = 0; j < S_COUNT / 4; j++) {
        float2 delta = *(const float2 *)(note + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++)
            dp[i] = p[i] * (dp[i] * unit - (i % 2 ? delta.y : delta.x));
    }
}

/* What a key is not seen by is 0 in both. */
FA_DEVICE void mask_elements(const fa_args &args, const work &w, float (&p)[S_COUNT], float (&ds)[S_COUNT], int tile, int group)
{
    int col = tile * FA_TILE_Q + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = query_limits(args, w, w.first_k + 64 * group + fragment_row() + 8 * h);
        int        first = limits.first - col, last = limits.last - col;
#pragma unroll
        for (int j = 0; j < S_COUNT / 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e < first || 8 * j + e > last)
                    p[4 * j + 2 * h + e] = ds[4 * j + 2 * h + e] = 0.0f;
    }
}

FA_DEVICE void consumer_barrier(int group) { named_sync(1 + group, 128); }

/* 2^e of the largest |x| of a consumer's, no less than 2^-100: what float16 wants it divided by, so that it is below 2^15. */
FA_DEVICE float unit_of_largest(const float (&x)[S_COUNT], int group)
{
    int  most = 0, *of_warps = (int *)(shared + LARGEST_AT) + 4 * group;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        most = max(most, __float_as_int(x[i]) & 0x7FFFFFFF);
    for (int step = 16; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32 % 4] = most;
    consumer_barrier(group); /* and all warps' products with dS of the step before are over */
#pragma unroll
    for (int warp = 0; warp < 4; warp++)
        most = max(most, of_warps[warp]);
    return float_of_bits((unsigned)(fa_max_int(most >> 23, 27) - 14) << 23);
}

FA_DEVICE void cut_operand(unsigned (&planes)[2][STEPS][4], const float (&x)[S_COUNT], float factor)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        cut_two(planes[0][i / 4][i % 4], planes[1][i / 4][i % 4], x[2 * i] * factor, x[2 * i + 1] * factor);
}

/* dS^T of this warp's 16 keys, to where dK and dQ take it from: registers would not hold it beside P. */
FA_DEVICE void share_ds(const consumer &c, const float (&x)[S_COUNT])
{
    unsigned ds[2][STEPS][4];
    int      lane = threadIdx.x % 32, row = lane % 16;
    unsigned to   = ds_tile(c.group) + (threadIdx.x % 128 / 32 * 16 + row) * 128;
    cut_operand(ds, x, 1.0f / c.ds_unit);
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            store_matrix(to + plane * DS_PLANE + ((2 * step + lane / 16 ^ row % 8) << 4), ds[plane][step]);
    fence_async();
    consumer_barrier(c.group);
}

template <int COUNT> FA_DEVICE void add_part(float (&sum)[COUNT], const float (&part)[32], int panel, float unit)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[32 * panel + i] += part[i] * unit;
}

/* part = of dS^T Q or, DOWN, of dS K, 64 columns of Q or K: their rows from `y` on are a plane's, the other plane's Y_PLANE behind. */
template <int DOWN, int Y_PLANE> FA_DEVICE void multiply_ds(float (&part)[32], const consumer &c, unsigned y)
{
    matrix ds = matrix_of(ds_tile(c.group), 0), b = matrix_of(y, 0);
    hold(part);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
        for (int step = 0; step < 4; step++)
            wgmma_shared<1, DOWN>(part, ds.from((product == 0 ? DS_PLANE : 0) + step * (DOWN ? 2048 : 32)), b.from((product == 1 ? Y_PLANE : 0) + step * 2048), product + step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(part);
}

FA_DEVICE void add_dv(consumer &c, float unit)
{
    float part[32];
#pragma unroll
    for (int panel = 0; panel < FA_HEAD_DIM_V / 64; panel++) {
        start_cut_registers<cut_dout::PLANE>(part, c.p, matrix_of(dout_tile(c.n) + panel * (FA_TILE_Q * 128), 0));
        wgmma_wait<0>();
        hold(part);
        add_part(c.dv, part, panel, unit);
    }
}

FA_DEVICE void add_dk(consumer &c, float unit)
{
    float part[32];
#pragma unroll
    for (int panel = 0; panel < FA_HEAD_DIM / 64; panel++) {
        multiply_ds<0, cut_queries::PLANE>(part, c, q_tile(c.n) + panel * (FA_TILE_Q * 128));
        add_part(c.dk, part, panel, unit);
    }
}

FA_DEVICE void add_dq(const fa_args &args, const work &w, const consumer &c, place at)
{
    float  dq[1][8][4], (&part)[32] = reinterpret_cast<float(&)[32]>(dq), unit = c.ds_unit * k_note()[0];
    int    first = at.tile * FA_TILE_Q + threadIdx.x % 128 / 32 * 16;
    float *to    = w.dq + (head_rows(args, at.head) + first) * FA_HEAD_DIM;
#pragma unroll
    for (int panel = 0; panel < FA_HEAD_DIM / 64; panel++) {
        multiply_ds<1, cut_keys::PLANE>(part, c, k_tile() + panel * (FA_TILE_K * 128) + c.group * (64 * 128));
#pragma unroll
        for (int i = 0; i < 32; i++)
            part[i] *= unit;
        accumulate<1, 8>(to + panel * 64, FA_HEAD_DIM, dq, w.seq.seqlen_q - first);
    }
}

FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, place at)
{
    constexpr float P_FACTOR = 0x1p14f;
    float           s[S_COUNT], dp[S_COUNT];
    barrier_wait(q_full(c.n), filled<FA_STAGES>(c.n));
    start_cut_rows_by_rows<FA_TILE_K, cut_keys::PLANE, FA_TILE_Q, cut_queries::PLANE, FA_HEAD_DIM>(s, matrix_of(k_tile() + c.group * (64 * 128), 0), matrix_of(q_tile(c.n), 0));
    barrier_wait(dout_full(c.n), filled<FA_STAGES>(c.n));
    start_cut_rows_by_rows<FA_TILE_K, cut_values::PLANE, FA_TILE_Q, cut_dout::PLANE, FA_HEAD_DIM_V>(dp, matrix_of(v_tile() + c.group * (64 * 128), 0), matrix_of(dout_tile(c.n), 0));
    wgmma_wait<1>();
    hold(s);
    exponentials(args, s, c.n);
    wgmma_wait<0>();
    hold(dp);
    gradients_of_scores(s, dp, c.n);
    if (!clean_tile(args, w, at.tile))
        mask_elements(args, w, s, dp, at.tile, c.group);
    c.ds_unit = unit_of_largest(dp, c.group);
    cut_operand(c.p, s, P_FACTOR);
    share_ds(c, dp);
    float dv_unit = dout_note(c.n)[FA_TILE_Q] / P_FACTOR, dk_unit = q_note(c.n)[FA_TILE_Q] * c.ds_unit;
    add_dv(c, dv_unit);
    release(dout_empty(c.n));
    add_dk(c, dk_unit);
    release(q_empty(c.n));
    if (args.dq.data)
        add_dq(args, w, c, at);
    c.n++;
}

/* Rows of dK or dV of this consumer's keys. */
template <int COLS, int COUNT> FA_DEVICE void store_gradient(const fa_view &view, const work &w, const float (&sum)[COUNT], int group, float scale, int cols)
{
    if (!view.data)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int    j  = w.first_k + 64 * group + fragment_row() + 8 * h;
        float *to = (float *)view.data + w.seq.kv_entry * view.stride[0] + (fa_i64)(w.seq.kv_row + j) * view.stride[1] + w.kv_head * view.stride[2];
        store_row<FA_F32, COLS>(j < w.seq.rows_k ? (char *)to : nullptr, sum, h, scale, cols);
    }
}

FA_DEVICE void store_gradients(const fa_args &args, const work &w, const consumer &c, float factor)
{
    store_gradient<FA_HEAD_DIM>(args.dk, w, c.dk, c.group, args.scale * factor, args.head_dim);
    store_gradient<FA_HEAD_DIM_V>(args.dv, w, c.dv, c.group, factor, args.head_dim_v);
}

FA_DEVICE void consume(const fa_args &args, const work &w, int group)
{
    consumer c;
    c.group = group;
    c.n     = 0;
#pragma unroll
    for (int i = 0; i < FA_HEAD_DIM / 2; i++)
        c.dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < FA_HEAD_DIM_V / 2; i++)
        c.dv[i] = 0.0f;
    if (same_for_all(w.tiles.begin >= w.tiles.end)) { /* apart, or ptxas spills where it meets the other way */
        store_gradients(args, w, c, 0.0f);
        return;
    }
    barrier_wait(keys_full(), 0);
    place at = {w.first_head, w.start};
    do {
        step(args, w, c, at);
        at = next_place(w, at);
    } while (inside(w, at));
    store_gradients(args, w, c, 1.0f);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1) backward_f32_sm90(const __grid_constant__ fa_args args)
{
    __shared__ work w;
    if (*args.lost)
        return;
    if (threadIdx.x == 0) {
        w = work_of(args, grid_place_of<FA_TILE_K>(blockIdx.x, args.tiles_k));
        start_barriers();
    }
    __syncthreads(); /* the barriers are set up */
    if (w.first_k >= w.seq.rows_k)
        return;
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0 && w.tiles.begin < w.tiles.end)
            produce(args, w);
    } else {
        registers_up<240>();
        consume(args, w, same_for_all(threadIdx.x / 128 - 1));
    }
}
