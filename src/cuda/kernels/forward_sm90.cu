/*
 * FlashAttention-3's forward for Hopper: TMA brings tiles, WGMMA multiplies them, warps have roles. float16, bfloat16 and FP8.
 *
 *     warpgroup 0, warp 0    planner: one thread finds this block's tiles of queries (struct work) and fetches Q ahead; with pages all fetch V
 *                  warp 1    producer: one thread, with pages all, keeps the rings of K and V tiles full
 *                  warps 2-3 inspectors: in tiles on the mask's edge they clear keys of V that are nobody's, and look for Inf and NaN
 *     warpgroup 1..          consumers: 64 queries each. They take turns at the tensor cores (ping-pong). Lines are those of FlashAttention-2's Algorithm 1:
 *
 *         a step:  on this consumer's turn start S' = Q K^T of the next tile (line 8), then O += P V of this one (line 10), and pass the turn on
 *                  when S' is there: softmax of S' (line 9), while P V runs
 *                  when O is there:  P = S'
 *
 * Key tiles are walked from right to left: those on the mask's right edge, then the clean ones in a loop without mask code, then
 * the window's left edge. With two stages of Q the walk does not stop between tiles of queries: S' of the next one's first
 * key tile goes with P V of the last (FA_VARIANT bit 0); with one, a consumer passes by key tiles that only rows below its own see. A block
 * stays on its multiprocessor and takes one tile of queries after the other.
 *
 * With FA_HAS_GROUPS a tile's rows are queries of all heads that share a key head (decision 0096). With FA_HAS_SPLIT an item is a part of a tile's keys, whose results fold.cu folds;
 * with FA_ONE_LAUNCH 2 too a block walks all parts of a tile one after the other and folds them itself, to the same bits (parts_sm90.cuh, decision 0097).
 *
 * With FA_MIN_BLOCKS 2 two such blocks share a multiprocessor, which has no registers for S' beside P then: a step is S, softmax, P V, one after the
 * other and without turns, and what fills the waits is the other three consumers'. Starts and ends of tiles hide likewise. So do three consumers of 128
 * columns in FP8, whose P takes few registers, and with turns at the exponentials of 96 under a causal mask; of 64 under ALiBi's the next step's S begins behind P V, in
 * the registers that P has left.
 *
 * Clean steps take exponentials by the rows' maxima of before and compare no scores (softmax_ahead, decision 0081).
 *
 * FP8: the inspectors turn every tile of V round (values_sm90.cuh), or with FA_VARIANT bit 1 values_sm90.cu has done it. P is rounded to E4M3, 2^6
 * times as large, so that it stays above FP8's smallest numbers down to 2^-12.
 * Hopper's sums of FP8 products keep few bits, so every KEPT_STEPS steps O is taken out of the accumulators and added up in float, in shared memory.
 *
 * Shared memory: Q_STAGES of Q, K_STAGES tiles of K, V_STAGES of V (panels as in panels_sm90.cuh), BIAS_STAGES of a bias, barriers, works, what is kept of O: in FP8, or of parts before.
 */
#include "bias_sm90.cuh"
#include "dropout_sm90.cuh"
#include "kept_sm90.cuh"
#include "result_sm90.cuh"
#include "values_sm90.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1; /* warpgroups */
constexpr int Q_STAGES = FA_VARIANT & 1 ? 2 : 1, WORKS = 8, INSPECTORS = 2; /* warps */
constexpr bool TURNS_V = FP8 && !(FA_VARIANT & 2);
constexpr bool BESIDE_ANOTHER = FA_MIN_BLOCKS > 1; /* two blocks a multiprocessor */
/* A step's products and exponentials one after the other: no registers for S' beside P, or three consumers, which hide each other's waits (decisions 0047, 0059). */
constexpr bool ONE_BY_ONE = BESIDE_ANOTHER || (CONSUMERS == 3 && (FA_HEAD_DIM_V > 96 || (FA_MASK == FA_MASK_CAUSAL && (FA_HAS_ALIBI || FA_HEAD_DIM_V > 64))));
/* Of the registers that a lane of each of a block's warpgroups has in all: 512 with 3 consumers, 504 with 2, 240 if there are two blocks. */
constexpr int PRODUCER_REGISTERS = BESIDE_ANOTHER ? (FP8 ? 48 : 32) : CONSUMERS == 3 ? (FP8 && FA_HEAD_DIM_V <= 64 ? 56 : 32) : FP8 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = BESIDE_ANOTHER ? (FP8 ? 96 : 104) : CONSUMERS == 3 ? (FP8 && FA_HEAD_DIM_V <= 64 ? 152 : 160) : FP8 ? 224 : 232;
static_assert(FA_TILE_Q == 64 * CONSUMERS && CONSUMERS > 1, "a consumer owns 64 rows, and takes turns with another");
static_assert(FA_DTYPE != FA_F32 && FA_HEAD_DIM % 32 == 0 && FA_HEAD_DIM_V % 32 == 0, "a row of O is stored by 32 columns");

constexpr int  KEPT_STEPS = FP8 ? 512 / FA_TILE_K : 1 << 30;

constexpr int ROW_BYTES = held_columns(FA_HEAD_DIM) * ELEMENT_BYTES, Q_BYTES = FA_TILE_Q * ROW_BYTES, K_BYTES = FA_TILE_K * ROW_BYTES,
              V_BYTES = FA_TILE_K * held_columns(FA_HEAD_DIM_V) * ELEMENT_BYTES, Q_GROUP = 64 * panel_bytes(held_columns(FA_HEAD_DIM)); /* a consumer's rows */
constexpr int LEFT_BYTES = 227 * 1024 - 2048 - KEPT_BYTES - Q_STAGES * Q_BYTES - FA_STAGES * (K_BYTES + V_BYTES);
/* The bias of a tile of queries and keys: two stages, or one of float32 where there is no memory for more. */
constexpr int BIAS_STAGES = !FA_HAS_BIAS ? 0 : LEFT_BYTES >= 2 * BIAS_BYTES ? 2 : 1, BIAS_RING = FA_HAS_BIAS ? BIAS_STAGES : 1;
/* A stage more where there is memory: of V, for turning it round takes time, and at head_dim 64 under a window; under masks of K where a tile is as large as here, elsewhere that is slower (decision 0080). */
constexpr int FREE_BYTES = BESIDE_ANOTHER || FA_HAS_BIAS ? 0 : LEFT_BYTES;
constexpr int K_STAGES   = FA_STAGES + (!FP8 && FA_MASK != FA_MASK_NONE && FA_HEAD_DIM >= 128 && FREE_BYTES >= K_BYTES),
              V_STAGES   = FA_STAGES + ((FP8 || (FA_MASK == FA_MASK_WINDOW && FA_HEAD_DIM <= 64)) && FREE_BYTES >= V_BYTES);
constexpr int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + K_STAGES * K_BYTES;
constexpr int BIAS_AT = V_AT + V_STAGES * V_BYTES, BARRIERS_AT = BIAS_AT + BIAS_STAGES * BIAS_BYTES;
constexpr int BARRIERS = 2 * Q_STAGES + 3 * WORKS + 2 * K_STAGES + 3 * V_STAGES + 2 * BIAS_STAGES, WORKS_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16;

static_assert(!WHOLE || (!FP8 && !ONE_BY_ONE && Q_STAGES == 1 && FA_MASK <= FA_MASK_CAUSAL && LEFT_BYTES >= 0), "parts that a block walks are those of plain calls with up to 128 columns");

constexpr int KEPT_AT = WORKS_AT + (WORKS * (int)sizeof(work) + 15) / 16 * 16;

extern "C" __constant__ int fa_shared_bytes = KEPT_AT + KEPT_BYTES;
extern __shared__ __align__(1024) char shared[];

FA_DEVICE work &work_at(unsigned item) { return ((work *)(shared + WORKS_AT))[item % WORKS]; }

/* ---- barriers; `n` counts tiles of queries or key tiles since the kernel began. Phases alternate, nothing is reset ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned q_full(unsigned n) { return barrier_at(n % Q_STAGES); }
FA_DEVICE unsigned q_empty(unsigned n) { return barrier_at(Q_STAGES + n % Q_STAGES); }
FA_DEVICE unsigned found(unsigned n) { return barrier_at(2 * Q_STAGES + n % WORKS); } /* the work is known */
FA_DEVICE unsigned asked(unsigned n) { return barrier_at(2 * Q_STAGES + WORKS + n % WORKS); } /* the producer has asked for all of its keys, or is about to */
FA_DEVICE unsigned inspected(unsigned n) { return barrier_at(2 * Q_STAGES + 2 * WORKS + n % WORKS); } /* all of its V has been looked at */
FA_DEVICE unsigned k_barrier(int which, unsigned n) { return barrier_at(2 * Q_STAGES + 3 * WORKS + which * K_STAGES + n % K_STAGES); }
FA_DEVICE unsigned v_barrier(int which, unsigned n) { return barrier_at(2 * Q_STAGES + 3 * WORKS + 2 * K_STAGES + which * V_STAGES + n % V_STAGES); }
FA_DEVICE unsigned k_full(unsigned n) { return k_barrier(0, n); }
FA_DEVICE unsigned k_empty(unsigned n) { return k_barrier(1, n); }
FA_DEVICE unsigned v_full(unsigned n) { return v_barrier(0, n); }
FA_DEVICE unsigned v_ready(unsigned n) { return v_barrier(1, n); } /* by the inspectors */
FA_DEVICE unsigned v_empty(unsigned n) { return v_barrier(2, n); }

FA_DEVICE unsigned bias_full(unsigned n) { return barrier_at(BARRIERS - 2 * BIAS_STAGES + n % BIAS_RING); }
FA_DEVICE unsigned bias_empty(unsigned n) { return bias_full(n) + 8 * BIAS_STAGES; }

FA_DEVICE void start_barriers()
{
    for (int n = 0; n < Q_STAGES; n++) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < WORKS; n++) {
        barrier_init(found(n), 1);
        barrier_init(asked(n), 1);
        barrier_init(inspected(n), INSPECTORS);
    }
    for (int n = 0; n < K_STAGES; n++) {
        barrier_init(k_full(n), 1);
        barrier_init(k_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < V_STAGES; n++) {
        barrier_init(v_full(n), 1);
        barrier_init(v_ready(n), INSPECTORS);
        barrier_init(v_empty(n), 4 * CONSUMERS + INSPECTORS);
    }
    for (int n = 0; n < BIAS_STAGES; n++) {
        barrier_init(bias_full(n), 1);
        barrier_init(bias_empty(n), 4 * CONSUMERS);
    }
    barrier_init_done();
}

FA_DEVICE unsigned q_tile(unsigned n) { return shared_address(shared) + n % Q_STAGES * Q_BYTES; }
FA_DEVICE unsigned k_tile(unsigned n) { return shared_address(shared) + K_AT + n % K_STAGES * K_BYTES; }
FA_DEVICE unsigned bias_tile(unsigned n) { return shared_address(shared) + BIAS_AT + n % BIAS_RING * BIAS_BYTES; }
FA_DEVICE unsigned v_tile(unsigned n) { return shared_address(shared) + V_AT + n % V_STAGES * V_BYTES; }

#include "scores_sm90.cuh"

/* ---- planner and producer: one thread each; with pages a warp each, and the planner's fetches V ---- */

/* False: what is said of it is that there is none. */
FA_DEVICE bool find_item(const fa_args &args, unsigned item)
{
    barrier_wait(asked(item), freed<WORKS>(item)); /* items without tiles may pass the producer by; consumers free Q's stage, so are not so many behind */
    barrier_wait(inspected(item), freed<WORKS>(item));
    bool some = find_work(args, item, work_at(item));
    if (BEGINS_EARLY)
        wait_for_launch_before(); /* what others do comes behind what they get from here */
    barrier_arrive(found(item));
    return some;
}

FA_DEVICE void fetch_queries(const fa_args &args, const fa_maps &maps, unsigned item)
{
    const work &w = work_at(item);
    barrier_wait(q_empty(item), freed<Q_STAGES>(item));
    if (w.tiles <= 0) {
        barrier_arrive(q_full(item));
        return;
    }
    barrier_expect(q_full(item), Q_BYTES);
    if constexpr (GROUPED) /* a box has so many whole queries of all heads of a key head */
        fetch_tile<FA_TILE_Q, FA_HEAD_DIM>(q_tile(item), maps.q, q_full(item), w.seq.q_entry, w.seq.q_row + query_of(args, w.first_row), w.head);
    else
        fetch_tile<FA_TILE_Q, FA_HEAD_DIM>(q_tile(item), maps.q, q_full(item), w.seq.q_entry, w.head, w.seq.q_row + w.first_row);
}

#if FA_HAS_PAGED
#include "pages_sm90.cuh"
#else

FA_DEVICE void plan(const fa_args &args, const fa_maps &maps)
{
    bool some = true;
    for (unsigned item = 0; some; item++) {
        if (args.all_items > 0 && item > 0) /* who takes an item long before he can begin it takes it from those who could */
            barrier_wait(asked(item - 1), filled<WORKS>(item - 1));
        some = find_item(args, item);
        fetch_queries(args, maps, item);
    }
}

/* A tile of V, of which `tile` is the number in its sequence. */
FA_DEVICE void fetch_values_of(const fa_args &args, const fa_maps &maps, unsigned n, int entry, int head, int tile, int kv_row)
{
    barrier_wait(v_empty(n), freed<V_STAGES>(n));
    barrier_expect(v_full(n), V_BYTES);
    if constexpr (FP8 && !TURNS_V)
        bulk_load(v_tile(n), args.v_turned + (((fa_i64)entry * args.heads_k + head) * args.tiles_k + tile) * V_BYTES, V_BYTES, v_full(n));
    else if constexpr (FP8)
        fetch_values(v_tile(n), maps.v, v_full(n), entry, head, kv_row + tile * FA_TILE_K);
    else
        fetch_tile<FA_TILE_K, FA_HEAD_DIM_V>(v_tile(n), maps.v, v_full(n), entry, head, kv_row + tile * FA_TILE_K);
}

constexpr int CLAIMED_STEPS = 384 / FA_TILE_K; /* so many tiles of an item's keys are still to be asked for when the next item is taken */

/* With the n-th tile of keys, which is the sequence's `next`. */
FA_DEVICE void fetch_bias(const fa_args &args, const fa_maps &maps, unsigned n, const work &w, int next)
{
    if constexpr (FA_HAS_BIAS) {
        barrier_wait(bias_empty(n), freed<BIAS_STAGES>(n));
        fetch_bias_tile(args, maps, bias_tile(n), bias_full(n), w.b, w.head, w.first_row, next * FA_TILE_K);
    }
}

/* K of a step is needed before V of the one before, also where that is the last of the item before, but with one stage of Q under a mask, where V need not wait until the
 * next item is found. Nor may it behind items without tiles, for then the planner may wait until the inspectors have seen all of V. */
FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned k = 0, v = 0; /* tiles asked for */
    int      entry = 0, head = 0, tile = 0, row = 0, tiles = 0; /* but for `tiles`, of the last of K */
    for (unsigned item = 0; tiles >= 0; item++) {
        barrier_wait(found(item), filled<WORKS>(item));
        const work &w = work_at(item);
        tiles         = w.tiles;
        int soon      = fa_min_int(tiles, CLAIMED_STEPS);
        for (int left = tiles, next = tiles > 0 ? tile_of(w, 0) : 0; left > 0; left--, next = LISTED ? tile_of(w, tiles - left) : next - 1) {
            barrier_wait(k_empty(k), freed<K_STAGES>(k));
            barrier_expect(k_full(k), K_BYTES);
            fetch_tile<FA_TILE_K, FA_HEAD_DIM>(k_tile(k), maps.k, k_full(k), w.seq.kv_entry, w.kv_head, w.seq.kv_row + next * FA_TILE_K);
            fetch_bias(args, maps, k, w, next);
            if (v < k++)
                fetch_values_of(args, maps, v++, entry, head, tile, row);
            entry = w.seq.kv_entry;
            head  = w.kv_head;
            tile  = next;
            row   = w.seq.kv_row;
            if (left == soon)
                barrier_arrive(asked(item));
        }
        if (tiles <= 0)
            barrier_arrive(asked(item));
        if (v < k && ((Q_STAGES == 1 && FA_MASK != FA_MASK_NONE) || tiles <= 0))
            fetch_values_of(args, maps, v++, entry, head, tile, row);
    }
}

#endif

/* A clean tile of V is as TMA left it: without a mask, where most are, it is not waited for by way of the inspectors. Who has not waited for them then waits for TMA first
 * where he does, for they may be a round of V's stages behind. */
constexpr bool DIRECT_V = !FP8 && !ONE_BY_ONE && FA_MASK == FA_MASK_NONE;

#include "inspect_sm90.cuh"

/* ---- consumers ---- */

/* Of Q's columns a consumer keeps the first 16 Q_HELD of its rows in registers, as left operands: S then reads the less of shared memory. All at head_dim 128. At 256 as many
 * as there are registers for: that takes no fewer cycles, but less power, which holds long calls back (decision 0082). Elsewhere registers are short or it is no faster. */
constexpr bool HOLDS_Q = !FP8 && !ONE_BY_ONE && FA_HEAD_DIM == FA_HEAD_DIM_V && (FA_DTYPE_O != FA_F32 || FA_HAS_SPLIT) && !FA_HAS_SOFTCAP && !FA_HAS_DROPOUT && !(FA_HAS_BIAS && (FA_MASK != FA_MASK_NONE || F32_BIAS));
constexpr int  Q_HELD = !HOLDS_Q ? 0 : FA_HEAD_DIM == 128 ? 8 : FA_HEAD_DIM == 256 ? 6 : 0;

/* What a consumer has at hand. */
struct consumer {
    float     o[O_COUNT], kept_max[2]; /* kept_max: the rows' maximum when O was last taken out */
    unsigned  p[P_STEPS][4]; /* of key tile `tile`, counted since the kernel began */
    unsigned  q[Q_HELD + 1][4]; /* load_held */
    row_state rows;
    int       group;
    bool      fresh, has_kept; /* O holds nothing yet, or since it was taken out */
    unsigned  tile;
    row_fold  folded[2]; /* WHOLE: rows of the parts so far, of which O is kept where has_kept */
};

constexpr bool TAKES_TURNS = !BESIDE_ANOTHER && !(FP8 && ONE_BY_ONE);

/* Named barrier 1 + c: consumer c waits there, and the one before it arrives. Turns are for products, or,
 * of 16-bit consumers that go one step after the other, for exponentials: else all of them would be at the same. zero: is 0, by a computation that is to be over before (one_by_one_sm90.cuh). */
FA_DEVICE void await_turn(int group)
{
    if (TAKES_TURNS)
        named_sync(1 + group, 256);
}
FA_DEVICE void pass_turn(int group, int zero = 0)
{
    if (TAKES_TURNS)
        named_arrive(1 + (group + 1) % CONSUMERS + zero, 256);
}

/* What a consumer begins with; the last one's first arrival starts the round. */
FA_DEVICE void begin_turns(consumer &c, int group)
{
    c.group = group;
    c.tile  = 0;
    if (group == CONSUMERS - 1)
        pass_turn(group);
}

FA_DEVICE void wait_for_k(unsigned n) { barrier_wait(k_full(n), filled<K_STAGES>(n)); }
FA_DEVICE void wait_for_clean_v(unsigned n) { barrier_wait(DIRECT_V ? v_full(n) : v_ready(n), filled<V_STAGES>(n)); }
FA_DEVICE void wait_for_v(unsigned n)
{
    if (DIRECT_V)
        barrier_wait(v_full(n), filled<V_STAGES>(n));
    barrier_wait(v_ready(n), filled<V_STAGES>(n));
}

FA_DEVICE void pass_bias(unsigned n)
{
    if constexpr (FA_HAS_BIAS) {
        barrier_wait(bias_full(n), filled<BIAS_STAGES>(n));
        release(bias_empty(n));
    }
}

/* A step without work: only its stages and its turn are passed on. */
FA_DEVICE void blind_step(consumer &c)
{
    wait_for_k(c.tile);
    release(k_empty(c.tile));
    pass_bias(c.tile);
    await_turn(c.group);
    pass_turn(c.group);
    wait_for_v(c.tile);
    release(v_empty(c.tile));
    c.tile++;
}

/* O is there, of all tiles up to this one. */
FA_DEVICE void finish_output(consumer &c, unsigned tile)
{
    wgmma_wait<0>();
    hold(c.o);
    hold(c.p);
    release(same_for_all(v_empty(tile)));
}

/* After a step's softmax: the sum knows nothing of dropout. What it leaves is made larger on the way out. */
FA_DEVICE void drop(const fa_args &args, const work &w, float (&p)[S_COUNT], int group, int step)
{
    if constexpr (FA_HAS_DROPOUT)
        drop_elements(args, p, w.b * args.heads_q + w.head, w.first_row / 16 + group * 4 + threadIdx.x / 32 % 4,
                      same_for_all(tile_of(w, step)) * (FA_TILE_K / 16));
}

/* This consumer's rows of Q. */
FA_DEVICE unsigned own_queries(const consumer &c, unsigned item) { return q_tile(item) + c.group * Q_GROUP; }

/* Q K^T with nothing under way beside it. last: the item's last step of which this consumer's rows see something. */
FA_DEVICE void scores_alone(float (&s)[S_COUNT], consumer &c, unsigned item, bool last)
{
    wait_for_k(c.tile);
    start_scores(s, own_queries(c, item), k_tile(c.tile));
    load_held<FA_TILE_Q>(c.q, own_queries(c, item), 0); /* an item's first scores come from memory, in whose shadow Q comes into registers */
    wgmma_wait<0>();
    hold(s);
    release(k_empty(c.tile));
    if (last)
        release(q_empty(item));
}

/* Step n, the first of an item of which this consumer sees something, up to step `seen`, with nothing to overlap. */
FA_DEVICE void first_tile(const fa_args &args, const work &w, consumer &c, unsigned item, int n, int seen)
{
    float      s[S_COUNT], alpha[2];
    seen_words words = seen_of_step(args, w, c.group, n, is_masked(w, n));
    scores_alone(s, c, item, n + 1 == seen);
    finish_scores(args, w, s, c.group, n, is_masked(w, n), c.tile, words);
    c.rows  = no_rows();
    c.fresh = true;
    softmax_step<true>(s, c.rows, alpha, unit_of(args, w));
    drop(args, w, s, c.group, n);
    pack_p(c.p, s);
    if (n + 1 < seen)
        wait_for_k(c.tile + 1);
}

/* O takes in what has been taken out of it. */
FA_DEVICE void add_kept(consumer &c, float unit)
{
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        factor[h] = c.kept_max[h] == -infinity() ? 0.0f : exp2_fast((c.kept_max[h] - c.rows.max[h]) * unit);
    add_kept(c.o, shared + KEPT_AT, factor);
}

/* Takes it out: the tensor cores go on from nothing. */
FA_DEVICE void keep_output(consumer &c, float unit)
{
    if (c.has_kept)
        add_kept(c, unit);
    store_kept(shared + KEPT_AT, c.o);
#pragma unroll
    for (int h = 0; h < 2; h++)
        c.kept_max[h] = c.rows.max[h];
    c.fresh = c.has_kept = true;
}

#include "parts_sm90.cuh"

/* A later step, before step `seen`: scores of its tile while P V of the one before is under way. BEGINS: of a part, with the rows of which it begins. */
template <bool MASKED, bool BEGINS = false> FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, unsigned item, int n, int seen)
{
    float      s[S_COUNT], alpha[2];
    seen_words words = seen_of_step(args, w, c.group, n, MASKED);
    await_turn(c.group);
    start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, c.q, own_queries(c, item), k_tile(c.tile + 1));
    if constexpr (MASKED)
        wait_for_v(c.tile);
    else
        wait_for_clean_v(c.tile);
    start_output(c.o, c.p, v_tile(c.tile), !c.fresh);
    pass_turn(c.group);
    c.fresh = false;
    wgmma_wait<1>();
    hold(s);
    hold_held(c.q);
    /* Of all lanes, or ptxas finds the address lane by lane and gives K back behind most exponentials. */
    release(same_for_all(k_empty(c.tile + 1)));
    if (n + 1 == seen)
        release(q_empty(item));
    finish_scores(args, w, s, c.group, n, MASKED, c.tile + 1, words);
    row_state before = c.rows;
    if (BEGINS)
        c.rows = no_rows();
    bool moved = MASKED || RISES ? softmax_step<MASKED || FA_HAS_BIAS>(s, c.rows, alpha, unit_of(args, w)) : softmax_ahead(s, c.rows, alpha, unit_of(args, w));
    drop(args, w, s, c.group, n);
    if (n + 1 < seen) /* here, for a branch keeps the compiler from moving exponentials behind the wait that follows */
        wait_for_k(c.tile + 2);
    finish_output(c, c.tile);
    if constexpr (BEGINS) {
        end_part(args, w, c, before, n - 1);
        keep_part(c);
    } else if (moved)
        scale_output(c.o, alpha);
    if (FP8 && n % KEPT_STEPS == 0)
        keep_output(c, unit_of(args, w));
    pack_p(c.p, s);
    c.tile++;
}

/* ---- the way out ---- */

/* What store_result could not know, when few registers are in use. */
FA_DEVICE void store_rare(const fa_args &args, const work &w, far_rows far, int group, unsigned item)
{
    int  first  = w.first_row + 64 * group + threadIdx.x % 128 / 32 * 16;
    bool spoilt = false;
    if constexpr (FA_MASK != FA_MASK_NONE) {
        barrier_wait(inspected(item), filled<WORKS>(item));
        spoilt = w.spoilt;
    }
    if ((far.upper | far.lower) & (spoilt ? 0x33333333u : 0x11111111u))
        redo_far_rows(args, w, w.keys, first, far, spoilt);
}

/* A consumer's last steps may be blind ones. Inspectors wait for their V too, so it goes through them before it asks what these have found. */
constexpr bool TRAILS = Q_STAGES == 1 && FA_MASK == FA_MASK_WINDOW;

/* P V of an item's last tile, then its result, in which there may be far rows. NEXT: together with the scores of the next item's first tile. */
template <bool NEXT> FA_DEVICE far_rows last_tile(const fa_args &args, const work &w, consumer &c, unsigned item)
{
    float       s[NEXT ? S_COUNT : 1], alpha[2];
    const work &next = work_at(item + 1);
    row_state   rows = no_rows();
    seen_words  words;
    if constexpr (NEXT) {
        words = seen_of_step(args, next, c.group, 0, is_masked(next, 0));
        wait_for_k(c.tile + 1);
    }
    await_turn(c.group);
    if constexpr (NEXT)
        start_scores(s, own_queries(c, item + 1), k_tile(c.tile + 1));
    wait_for_v(c.tile);
    start_output(c.o, c.p, v_tile(c.tile), !c.fresh);
    pass_turn(c.group);
    if constexpr (NEXT) {
        wgmma_wait<1>();
        hold(s);
        release(k_empty(c.tile + 1));
        if (next.tiles == 1)
            release(q_empty(item + 1));
        finish_scores(args, next, s, c.group, 0, is_masked(next, 0), c.tile + 1, words);
        softmax_step<true>(s, rows, alpha, unit_of(args, next));
        drop(args, next, s, c.group, 0);
        if (next.tiles > 1)
            wait_for_k(c.tile + 2);
    }
    finish_output(c, c.tile);
    if (FP8 && c.has_kept)
        add_kept(c, unit_of(args, w));
    far_rows far = {0, 0};
    if constexpr (WHOLE) {
        end_part(args, w, c, c.rows, w.tiles - 1);
        store_folded(args, w, c);
    } else
        far = store_result(args, w, c.o, c.rows, c.group);
    c.has_kept = false;
    if constexpr (NEXT)
        pack_p(c.p, s);
    if constexpr (!TRAILS && !WHOLE)
        store_rare(args, w, far, c.group, item);
    if (NEXT && next.tiles > 1)
        load_held<FA_TILE_Q>(c.q, own_queries(c, item + 1), 0);
    c.rows  = rows;
    c.fresh = true;
    c.tile++;
    return far;
}

FA_DEVICE void consume(const fa_args &args, int group)
{
    consumer c;
    bool     begun = false; /* this item's first tile went with the last of the one before */
    c.has_kept = false;
    begin_turns(c, group);
    for (unsigned item = 0;; item++) {
        const work &w = work_at(item);
        if (!begun)
            barrier_wait(q_full(item), filled<Q_STAGES>(item));
        int tiles = same_for_all(w.tiles), n = 0;
        if (tiles < 0)
            break;
        if (tiles == 0)
            release(q_empty(item));
        int seen = tiles;
        if constexpr (Q_STAGES == 1) {
            seen = same_for_all(tiles > 0 ? seen_steps(args, w, group) : 0);
            int end = same_for_all(tiles > 0 ? blind_steps(args, w, group) : 0);
            for (end = end < seen ? end : tiles; n < end; n++)
                blind_step(c);
        }
        if (n == tiles) {
            if (tiles > 0)
                release(q_empty(item));
#pragma unroll
            for (int i = 0; i < O_COUNT; i++)
                c.o[i] = 0.0f;
            store_result(args, w, c.o, no_rows(), group);
            continue;
        }
        if constexpr (WHOLE)
            c.folded[0] = c.folded[1] = row_fold();
        if (!begun)
            first_tile(args, w, c, item, n, seen);
        n++;
        constexpr bool BY_ITSELF = Q_STAGES == 1 && FA_MASK != FA_MASK_NONE; /* a consumer has clean steps of its own */
        fa_range       clean     = {0, 0};
        if constexpr (BY_ITSELF)
            clean = steps_after_others(args, w, group);
        int first_clean = same_for_all(BY_ITSELF ? clean.begin : w.first_clean);
        for (;;) { /* parts: one, or WHOLE all */
            int end = WHOLE ? fa_min_int(end_of_part(w, n - 1), seen) : seen;
            for (int masked = fa_min_int(first_clean, end); n < masked; n++)
                step<true>(args, w, c, item, n, seen);
            if (DIRECT_V && n - 1 < first_clean) /* V of the tile before is not clean */
                wait_for_v(c.tile);
            int end_clean = fa_min_int(same_for_all(BY_ITSELF ? clean.end : w.end_clean), end);
            if (!FA_HAS_BIAS && n < end_clean) /* whose steps are guarded */
                lose_rows_without_maximum(c.rows);
            for (; n < end_clean; n++)
                step<false>(args, w, c, item, n, seen);
            for (; n < end; n++)
                step<true>(args, w, c, item, n, seen);
            if (!WHOLE || n >= seen)
                break;
            step<true, true>(args, w, c, item, n++, seen);
        }
        begun = false;
        if constexpr (Q_STAGES > 1) {
            barrier_wait(q_full(item + 1), filled<Q_STAGES>(item + 1));
            begun = same_for_all(work_at(item + 1).tiles) > 0;
        }
        if (Q_STAGES > 1 && begun)
            last_tile<Q_STAGES != 1>(args, w, c, item);
        else {
            far_rows far = last_tile<false>(args, w, c, item);
            if constexpr (TRAILS) {
                for (; n < tiles; n++)
                    blind_step(c);
                store_rare(args, w, far, group, item);
            }
        }
    }
}

#include "one_by_one_sm90.cuh"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    forward_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    if (BEGINS_EARLY)
        let_next_launch_begin();
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x < (FA_HAS_PAGED ? 32 : 1))
            plan(args, maps);
        else if (FA_HAS_PAGED ? threadIdx.x < 64 : threadIdx.x == 32)
            produce(args, maps);
        else if (threadIdx.x >= 64)
            inspect();
    } else {
        registers_up<CONSUMER_REGISTERS>();
        int group = same_for_all(threadIdx.x / 128 - 1);
        if constexpr (ONE_BY_ONE)
            consume_one_by_one(args, group);
        else
            consume(args, group);
    }
}
