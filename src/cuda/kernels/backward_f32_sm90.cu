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
 * Above 128 columns both consumers have the same 64 keys, one dV, the other dK: backward_f32_wide_sm90.cuh.
 *
 * Each product has accumulators of its own, 64 columns at a time, and is added up in float, times what its planes' exponents leave out: decision 0043. P is at most 1; dS is
 * cut by the largest of a consumer's. Where planes say that numbers are lost (args.lost) nothing is done here, and backward_sm80.cu does it all behind this launch.
 *
 * Shared memory: K, V, FA_STAGES tiles of Q and of dO, dS of each consumer, notes, barriers.
 */
#include "backward_work.cuh"
#include "accumulate.cuh"
#include "dropout_sm90.cuh"
#include "planes_sm90.cuh"
#include "store_sm90.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1;
constexpr bool WIDE = FA_HEAD_DIM > 128 || FA_HEAD_DIM_V > 128;
static_assert(CONSUMERS == 2 && FA_TILE_K == (WIDE ? 64 : 128) && FA_TILE_Q == (WIDE ? 32 : 64), "a consumer owns 64 keys, above 128 columns with the other; dS is a panel");
static_assert(FA_DTYPE == FA_F32 && FA_HEAD_DIM % 64 == 0 && FA_HEAD_DIM_V % 64 == 0, "planes of float32, panel by panel");

constexpr int S_COUNT = FA_TILE_Q / 2, STEPS = FA_TILE_Q / 16; /* of a thread; of 16 queries */
constexpr int DS_PLANE = 64 * 128, DS_TILES = WIDE ? 1 : CONSUMERS, P_BYTES = WIDE ? 64 * FA_TILE_Q * 4 : 0;
constexpr int NOTE = 4 * (FA_TILE_Q + 4), KEY_NOTE = 16;
constexpr int V_AT = cut_keys::BYTES, Q_AT = V_AT + cut_values::BYTES, DOUT_AT = Q_AT + FA_STAGES * cut_queries::BYTES, DS_AT = DOUT_AT + FA_STAGES * cut_dout::BYTES;
constexpr int P_AT = DS_AT + DS_TILES * 2 * DS_PLANE, NOTES_AT = P_AT + P_BYTES, LARGEST_AT = NOTES_AT + 2 * KEY_NOTE + 2 * FA_STAGES * NOTE, BARRIERS_AT = LARGEST_AT + 16 * CONSUMERS; /* P: wide */

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

/* Keys and queries of this thread's elements: the first ones. */
FA_DEVICE int first_key(const work &w, int group) { return w.first_k + 64 * group + fragment_row(); }
FA_DEVICE int first_query(place at) { return at.tile * FA_TILE_Q + threadIdx.x % 4 * 2; }

/* The bias of a thread's elements, from memory, of any strides: all loads are on their way before the first is used. Queries and keys beyond the last have the last one's. */
FA_DEVICE void load_bias(const fa_args &args, const work &w, float (&bias)[S_COUNT], place at, int group)
{
    static_assert(!FA_HAS_BIAS || FA_DTYPE_BIAS == FA_F32, "float");
    const float *from = (const float *)score_terms_of(args, w.b, at.head).bias, *keys[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        keys[h] = from + min(first_key(w, group) + 8 * h, last_of(w.seq.seqlen_k)) * args.bias.stride[3];
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        bias[i] = keys[i / 2 % 2][min(first_query(at) + i / 4 * 8 + i % 2, last_of(w.seq.seqlen_q)) * args.bias.stride[2]];
}

/* P^T from S^T, in place. */
FA_DEVICE void exponentials(const fa_args &args, const work &w, float (&s)[S_COUNT], unsigned n, place at, int group)
{
    const float *note = q_note(n);
    float        bias[S_COUNT], unit = note[FA_TILE_Q] * k_note()[0] * args.scale, slope = 0.0f;
    if (FA_HAS_ALIBI)
        slope = ((const float *)args.alibi_slopes.data)[w.b * args.alibi_slopes.stride[0] + at.head * args.alibi_slopes.stride[1]];
    if (FA_HAS_BIAS)
        load_bias(args, w, bias, at, group);
#pragma unroll
    for (int j = 0; j < S_COUNT / 4; j++) {
        float2 lse = *(const float2 *)(note + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) { /* the difference first: a large LSE in log2 would be rounded */
            float score = s[i] * unit;
            if (FA_HAS_BIAS)
                score += bias[i];
            if (FA_HAS_ALIBI)
                score -= slope * fabsf((float)(first_query(at) + 8 * j + i % 2 + w.seq.diagonal - first_key(w, group) - i / 2 % 2 * 8));
            s[i] = exp2_fast((score - (i % 2 ? lse.y : lse.x)) * FA_LOG2E);
        }
    }
}

/* What dropout drops of a thread's pairs. */
struct dropped {
    dropped_bits<S_COUNT> bits;

    __device__ __forceinline__ bool at(int i) const { return bits.word[i / 32] >> (i / 2 % 16 + i % 2 * 16) & 1; }
};

FA_DEVICE dropped dropped_of(const fa_args &args, const work &w, place at, int group)
{
    dropped of;
    if constexpr (FA_HAS_DROPOUT)
        find_dropped<S_COUNT>(args, of.bits, w.b * args.heads_q + at.head, at.tile * (FA_TILE_Q / 16), (w.first_k + 64 * group) / 16 + threadIdx.x % 128 / 32);
    return of;
}

/* P^T as dV takes it. */
FA_DEVICE void drop(float (&p)[S_COUNT], const dropped &dropped)
{
    if constexpr (FA_HAS_DROPOUT)
#pragma unroll
        for (int i = 0; i < S_COUNT; i++)
            p[i] = dropped.at(i) ? 0.0f : p[i];
}

/* dS^T from P^T and dP^T, in place. */
FA_DEVICE void gradients_of_scores(const fa_args &args, const float (&p)[S_COUNT], float (&dp)[S_COUNT], unsigned n, const dropped &dropped)
{
    const float *note = dout_note(n);
    float        unit = note[FA_TILE_Q] * v_note()[0] * (FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f);
#pragma unroll
    for (int j = 0; j < S_COUNT / 4; j++) {
        float2 delta = *(const float2 *)(note + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++)
            dp[i] = p[i] * ((FA_HAS_DROPOUT && dropped.at(i) ? 0.0f : dp[i] * unit) - (i % 2 ? delta.y : delta.x));
    }
}

/* What a key is not seen by is 0. */
FA_DEVICE void mask_elements(const fa_args &args, const work &w, float (&x)[S_COUNT], place at, int group)
{
    int col = first_query(at);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = query_limits(args, w, first_key(w, group) + 8 * h);
        int        first = limits.first - col, last = limits.last - col;
#pragma unroll
        for (int j = 0; j < S_COUNT / 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e < first || 8 * j + e > last)
                    x[4 * j + 2 * h + e] = 0.0f;
    }
}

constexpr float P_FACTOR = 0x1p14f; /* P is cut so many times as large */

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

/* dS^T of this warp's 16 keys. */
FA_DEVICE void store_ds(unsigned tile, const unsigned (&ds)[2][STEPS][4])
{
    int      lane = threadIdx.x % 32, row = lane % 16;
    unsigned to   = tile + (threadIdx.x % 128 / 32 * 16 + row) * 128;
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            store_matrix(to + plane * DS_PLANE + ((2 * step + lane / 16 ^ row % 8) << 4), ds[plane][step]);
    fence_async();
}

template <int COUNT> FA_DEVICE void add_part(float (&sum)[COUNT], const float (&part)[32], int panel, float unit)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[32 * panel + i] += part[i] * unit;
}

/* sum += unit X^T Y, X^T in registers, Y a tile of queries. */
template <class TILE, int COUNT> FA_DEVICE void add_product(float (&sum)[COUNT], unsigned (&x)[2][STEPS][4], unsigned y, float unit)
{
    float part[32];
#pragma unroll
    for (int panel = 0; panel < COUNT / 32; panel++) {
        start_cut_registers<TILE::PLANE>(part, x, matrix_of(y + panel * (FA_TILE_Q * 128), 0));
        wgmma_wait<0>();
        hold(part);
        add_part(sum, part, panel, unit);
    }
}

/* Rows of dK or dV of this consumer's keys, times `factor`; where blocks share a key head, which have a share each of its query heads, they are added up in float at `shared_sum`. */
template <int COLS, int COUNT>
FA_DEVICE void store_gradient(const fa_args &args, const fa_view &view, float *shared_sum, const work &w, float (&sum)[COUNT], int group, float factor, int cols)
{
    if (!view.data)
        return;
    if constexpr (FA_HAS_KV_ACCUM) {
        if (factor == 0.0f)
            return;
        int    first = w.first_k + 64 * group + threadIdx.x % 128 / 32 * 16;
        fa_i64 row   = ((fa_i64)w.kv_head * args.kv_entries + w.seq.kv_entry) * args.kv_rows + w.seq.kv_row + first;
        accumulate<1, COLS / 8>(shared_sum + row * COLS, COLS, reinterpret_cast<const float(&)[1][COLS / 8][4]>(sum), w.seq.rows_k - first);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int    j  = first_key(w, group) + 8 * h;
        float *to = (float *)view.data + w.seq.kv_entry * view.stride[0] + (fa_i64)(w.seq.kv_row + j) * view.stride[1] + w.kv_head * view.stride[2];
        store_row<FA_F32, COLS>(j < w.seq.rows_k ? (char *)to : nullptr, sum, h, factor, cols);
    }
}

FA_DEVICE void store_dk(const fa_args &args, const work &w, float (&dk)[FA_HEAD_DIM / 2], int group, bool some)
{
    store_gradient<FA_HEAD_DIM>(args, args.dk, args.dk_accum, w, dk, group, some ? args.scale : 0.0f, args.head_dim);
}
FA_DEVICE void store_dv(const fa_args &args, const work &w, float (&dv)[FA_HEAD_DIM_V / 2], int group, bool some)
{
    store_gradient<FA_HEAD_DIM_V>(args, args.dv, args.dv_accum, w, dv, group, !some ? 0.0f : FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f, args.head_dim_v);
}

#if FA_HEAD_DIM > 128 || FA_HEAD_DIM_V > 128
#include "backward_f32_wide_sm90.cuh"
#else
#include "backward_f32_narrow_sm90.cuh"
#endif

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
