/*
 * FlashAttention-3's forward for Hopper in float32: forward_sm90.cu's roles and turns, and three products of float16 for each of float32 (planes_sm90.cuh;
 * planes_sm90.cu has cut Q, K and V before). Twice as fast as three planes of bfloat16 would be, and five times as float32 without tensor cores.
 *
 *     warpgroup 0       producer: one thread finds the block's tiles of queries and keeps the rings of K and V full, by bulk copies
 *     warpgroup 1, 2    consumers: 64 queries each. Lines are those of FlashAttention-2's Algorithm 1:
 *
 *         a step:  softmax of S (line 9), which the other consumer's products hide; P is cut in two
 *                  on this consumer's turn start P V of this tile (line 10), then S = Q K^T of the next one (line 8), and pass the turn on
 *                  when P V is there: O += P V
 *
 * P V of a tile has accumulators of its own: tensor cores cut off what they add up, which over a long sequence would add up too (decision 0043), and each tile of V has
 * an exponent of its own. Small products come before large ones for the same reason.
 *
 * Shared memory: Q, K_STAGES tiles of K, V_STAGES of V, their notes, barriers, works.
 */
#include "dropout_sm90.cuh"
#include "planes_sm90.cuh"
#include "result_sm90.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1, WORKS = 2; /* warpgroups */
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
static_assert(FA_TILE_Q == 64 * CONSUMERS && CONSUMERS > 1, "a consumer owns 64 rows, and takes turns with another");
static_assert(FA_DTYPE == FA_F32 && FA_HEAD_DIM % 32 == 0 && FA_HEAD_DIM_V % 32 == 0, "planes of float32");

constexpr int BIAS_COUNT = FA_HAS_BIAS ? FA_TILE_K / 2 : 1; /* of a thread */

/* Columns of P V that have accumulators at the same time. */
constexpr int PV_COLS = FA_HEAD_DIM_V <= 128 ? FA_HEAD_DIM_V : 64, PV_COUNT = PV_COLS / 2, PV_PARTS = FA_HEAD_DIM_V / PV_COLS;

constexpr int Q_NOTE = 4 * FA_TILE_Q, KEY_NOTE = 16; /* of a tile of K or V */
/* V has one stage less where there is no memory: it is wanted half a turn later. */
constexpr int K_STAGES = FA_STAGES, V_STAGES = FA_STAGES - (cut_queries::BYTES + FA_STAGES * (cut_keys::BYTES + cut_values::BYTES) > 225 * 1024);
constexpr int K_AT = cut_queries::BYTES, V_AT = K_AT + K_STAGES * cut_keys::BYTES, NOTES_AT = V_AT + V_STAGES * cut_values::BYTES;
constexpr int BARRIERS_AT = NOTES_AT + Q_NOTE + (K_STAGES + V_STAGES) * KEY_NOTE;
constexpr int BARRIERS = 2 + WORKS + 2 * (K_STAGES + V_STAGES), WORKS_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16;

extern "C" __constant__ int fa_shared_bytes = WORKS_AT + WORKS * (int)sizeof(work);
extern __shared__ __align__(1024) char shared[];

FA_DEVICE work &work_at(unsigned item) { return ((work *)(shared + WORKS_AT))[item % WORKS]; }

/* ---- barriers; `n` counts tiles of queries or key tiles since the kernel began. Phases alternate, nothing is reset ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned q_full() { return barrier_at(0); } /* the work is known too */
FA_DEVICE unsigned q_empty() { return barrier_at(1); }
FA_DEVICE unsigned work_empty(unsigned n) { return barrier_at(2 + n % WORKS); }
FA_DEVICE unsigned k_full(unsigned n) { return barrier_at(2 + WORKS + n % K_STAGES); }
FA_DEVICE unsigned k_empty(unsigned n) { return k_full(n) + 8 * K_STAGES; }
FA_DEVICE unsigned v_full(unsigned n) { return barrier_at(2 + WORKS + 2 * K_STAGES + n % V_STAGES); }
FA_DEVICE unsigned v_empty(unsigned n) { return v_full(n) + 8 * V_STAGES; }

FA_DEVICE void start_barriers()
{
    barrier_init(q_full(), 1);
    barrier_init(q_empty(), 4 * CONSUMERS);
    for (int n = 0; n < WORKS; n++)
        barrier_init(work_empty(n), 4 * CONSUMERS);
    for (int n = 0; n < K_STAGES; n++) {
        barrier_init(k_full(n), 1);
        barrier_init(k_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < V_STAGES; n++) {
        barrier_init(v_full(n), 1);
        barrier_init(v_empty(n), 4 * CONSUMERS);
    }
    barrier_init_done();
}

FA_DEVICE unsigned k_tile(unsigned n) { return shared_address(shared) + K_AT + n % K_STAGES * cut_keys::BYTES; }
FA_DEVICE unsigned v_tile(unsigned n) { return shared_address(shared) + V_AT + n % V_STAGES * cut_values::BYTES; }
FA_DEVICE const float *q_note() { return (const float *)(shared + NOTES_AT); }
FA_DEVICE const float *k_note(unsigned n) { return (const float *)(shared + NOTES_AT + Q_NOTE + n % K_STAGES * KEY_NOTE); }
FA_DEVICE const float *v_note(unsigned n) { return (const float *)(shared + NOTES_AT + Q_NOTE + (K_STAGES + n % V_STAGES) * KEY_NOTE); }

#include "scores_sm90.cuh"

/* ---- producer: one thread ---- */

FA_DEVICE void produce(const fa_args &args)
{
    unsigned n    = 0; /* tiles of keys asked for */
    bool     some = true;
    wait_for_launch_before(); /* planes_sm90; what consumers do comes behind what they get from here */
    for (unsigned item = 0; some; item++) {
        work &w = work_at(item);
        barrier_wait(work_empty(item), freed<WORKS>(item));
        some = find_work(args, item, w);
        barrier_wait(q_empty(), freed<1>(item));
        if (w.tiles <= 0) {
            barrier_arrive(q_full());
            continue;
        }
        fa_i64 q_tiles = (fa_i64)w.head * args.all_tiles_q + first_tile_of_queries(args, w.b), k_tiles = (fa_i64)w.kv_head * args.all_tiles_k + first_tile_of_keys(args, w.b);
        fetch<cut_queries>(shared_address(shared), shared_address(q_note()), Q_NOTE, args.q_tiles, q_tiles + w.first_row / FA_TILE_Q, q_full());
        for (int left = w.tiles, next = w.right; left > 0; left--, next--, n++) {
            barrier_wait(k_empty(n), freed<K_STAGES>(n));
            fetch<cut_keys>(k_tile(n), shared_address(k_note(n)), KEY_NOTE, args.k_tiles, k_tiles + next, k_full(n));
            barrier_wait(v_empty(n), freed<V_STAGES>(n));
            fetch<cut_values>(v_tile(n), shared_address(v_note(n)), KEY_NOTE, args.v_turned, k_tiles + next, v_full(n));
        }
    }
}

/* ---- consumers ---- */

struct consumer {
    float     o[O_COUNT], q_unit[2]; /* 2^e of the rows of Q */
    unsigned  p[2][P_STEPS][4];      /* high, low */
    row_state rows;
    int       group;
    unsigned  tile; /* of keys, counted since the kernel began */
};

/* Named barrier 1 + c: consumer c waits there, and the one before it arrives. */
FA_DEVICE void await_turn(int group) { named_sync(1 + group, 256); }
FA_DEVICE void pass_turn(int group) { named_arrive(1 + (group + 1) % CONSUMERS, 256); }

/* s = Q K^T of a tile of keys. */
FA_DEVICE void start_cut_scores(float (&s)[S_COUNT], const consumer &c, unsigned tile)
{
    barrier_wait(k_full(tile), filled<K_STAGES>(tile));
    start_cut_rows_by_rows<FA_TILE_Q, cut_queries::PLANE, FA_TILE_K, cut_keys::PLANE, FA_HEAD_DIM>(s, matrix_of(shared_address(shared) + c.group * (64 * 128), 0), matrix_of(k_tile(tile), 0));
}

/*
 * The bias of a thread's scores of step `n`, from memory, of any strides and alignment: all loads are on their way before the first is used. Rows and keys beyond the last have
 * the last one's; the mask hides these keys, and nobody stores these rows.
 */
FA_DEVICE void load_bias(const fa_args &args, const work &w, float (&bias)[BIAS_COUNT], int group, int n)
{
    if constexpr (!FA_HAS_BIAS)
        return;
    static_assert(!FA_HAS_BIAS || FA_DTYPE_BIAS == FA_F32, "float");
    const float *from = (const float *)score_terms_of(args, w.b, w.head).bias, *rows[2];
    int          col = first_column(w, n), row = w.first_row + 64 * group + fragment_row(), last = last_of(w.seq.seqlen_k);
    bool         pairs = args.bias.stride[3] == 1 && (((fa_i64)from | 4 * args.bias.stride[2]) & 7) == 0 && (w.right - n + 1) * FA_TILE_K <= w.seq.seqlen_k;
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows[h] = from + min(row + 8 * h, last_of(w.seq.seqlen_q)) * args.bias.stride[2];
    if (same_for_all(pairs)) {
#pragma unroll
        for (int i = 0; i < BIAS_COUNT; i += 2) {
            float2 two  = *(const float2 *)(rows[i / 2 % 2] + col + i / 4 * 8);
            bias[i]     = two.x;
            bias[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BIAS_COUNT; i++)
            bias[i] = rows[i / 2 % 2][min(col + i / 4 * 8 + i % 2, last) * args.bias.stride[3]];
    }
}

/* Softmax of tile `n` of the item, whose products are in s, and whose bias in `bias`; O is scaled where a row's maximum has moved. */
FA_DEVICE void softmax_of_tile(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], const float (&bias)[BIAS_COUNT], int n)
{
    float unit[2], alpha[2], k_unit = k_note(c.tile)[0];
    if (k_note(c.tile)[1] != 0.0f)
        c.rows.lost = 3;
    release(k_empty(c.tile));
#pragma unroll
    for (int h = 0; h < 2; h++)
        unit[h] = c.q_unit[h] * k_unit;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = FA_HAS_BIAS ? s[i] * unit[i / 2 % 2] + bias[i % BIAS_COUNT] * args.bias_factor : s[i] * unit[i / 2 % 2];
    finish_scores(args, w, s, c.group, n, is_masked(w, n), c.tile, {});
    if (softmax_step<true>(s, c.rows, alpha, unit_of(args, w)))
        scale_output(c.o, alpha);
    if constexpr (FA_HAS_DROPOUT) /* the sum knows nothing of it; what it leaves is made larger on the way out */
        drop_elements(args, s, w.b * args.heads_q + w.head, w.first_row / 16 + c.group * 4 + threadIdx.x / 32 % 4, same_for_all(w.right - n) * (FA_TILE_K / 16));
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        cut_two(c.p[0][i / 4][i % 4], c.p[1][i / 4][i % 4], s[2 * i], s[2 * i + 1]);
}

/* Step n: NEXT: the scores of the next tile too. */
template <bool NEXT> FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], float (&bias)[BIAS_COUNT], int n)
{
    float pv[PV_COUNT];
    softmax_of_tile(args, w, c, s, bias, n);
    await_turn(c.group);
    barrier_wait(v_full(c.tile), filled<V_STAGES>(c.tile));
    float v_unit = v_note(c.tile)[0];
    if (v_note(c.tile)[1] != 0.0f)
        c.rows.lost = 3;
#pragma unroll
    for (int part = 0; part < PV_PARTS; part++) {
        bool last = part == PV_PARTS - 1;
        start_cut_registers<cut_values::PLANE>(pv, c.p, matrix_of(v_tile(c.tile) + part * (PV_COLS / 64) * (FA_TILE_K * 128), FA_TILE_K * 128));
        if (NEXT && last)
            start_cut_scores(s, c, c.tile + 1);
        if (last)
            pass_turn(c.group);
        if (NEXT && last)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
        hold(pv);
        if (last)
            release(v_empty(c.tile));
#pragma unroll
        for (int i = 0; i < PV_COUNT; i++)
            c.o[part * PV_COUNT + i] += pv[i] * v_unit;
    }
    if (NEXT)
        load_bias(args, w, bias, c.group, n + 1);
    wgmma_wait<0>();
    hold(s);
    c.tile++;
}

/* A step without work: only its stages and its turn are passed on. */
FA_DEVICE void blind_step(consumer &c)
{
    barrier_wait(k_full(c.tile), filled<K_STAGES>(c.tile));
    release(k_empty(c.tile));
    await_turn(c.group);
    pass_turn(c.group);
    barrier_wait(v_full(c.tile), filled<V_STAGES>(c.tile));
    release(v_empty(c.tile));
    c.tile++;
}

/* An item's steps; all consumers take as many turns. */
FA_DEVICE void walk(const fa_args &args, const work &w, consumer &c, int tiles)
{
    float s[S_COUNT], bias[BIAS_COUNT];
    int   n = 0;
    for (int end = same_for_all(blind_steps(args, w, c.group)); n < end; n++)
        blind_step(c);
    if (n == tiles) {
        await_turn(c.group);
        pass_turn(c.group);
        release(q_empty());
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        c.q_unit[h] = q_note()[64 * c.group + fragment_row() + 8 * h];
        c.rows.lost |= finite(c.q_unit[h]) ? 0 : 1u << h;
    }
    await_turn(c.group);
    start_cut_scores(s, c, c.tile);
    pass_turn(c.group);
    load_bias(args, w, bias, c.group, n);
    wgmma_wait<0>();
    hold(s);
    for (; n < tiles - 1; n++)
        step<true>(args, w, c, s, bias, n);
    release(q_empty());
    step<false>(args, w, c, s, bias, n);
}

FA_DEVICE void consume(const fa_args &args, int group)
{
    consumer c;
    c.group = group;
    c.tile  = 0;
    if (group == CONSUMERS - 1) /* the round starts */
        pass_turn(group);
    for (unsigned item = 0;; item++) {
        const work &w = work_at(item);
        barrier_wait(q_full(), filled<1>(item));
        int tiles = same_for_all(w.tiles);
        if (tiles < 0)
            break;
        c.rows = no_rows();
#pragma unroll
        for (int i = 0; i < O_COUNT; i++)
            c.o[i] = 0.0f;
        if (tiles > 0)
            walk(args, w, c, tiles);
        else
            release(q_empty());
        far_rows far = store_result(args, w, c.o, c.rows, group);
        if ((far.upper | far.lower) & 0x11111111u)
            redo_far_rows(args, w, w.keys, w.first_row + 64 * group + threadIdx.x % 128 / 32 * 16, far);
        release(work_empty(item));
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1) forward_f32_sm90(const __grid_constant__ fa_args args)
{
    if (threadIdx.x == 0)
        start_barriers();
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            produce(args);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(args, same_for_all(threadIdx.x / 128 - 1));
    }
}
