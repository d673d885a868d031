/* backward_sm90.cu: a block's shared memory, its barriers, its tiles of keys and their walks over query tiles. */
#ifndef FA_BACKWARD_BLOCK_SM90_CUH
#define FA_BACKWARD_BLOCK_SM90_CUH

#include "backward_work.cuh"
#include "bias_sm90.cuh"
#include "fragment_sm90.cuh"
#include "listed.cuh"
#include "pairs_sm90.cuh"

/* A work, or the share of it that a block has where several have its keys. */
struct share_work : work {
    int stored_head; /* of dk_stored and dv_stored */
};

/* What the warps that add dQ are to do next. */
constexpr int NOTHING = -1, NO_MORE = -2;
struct turn {
    int      number; /* of the query tile, as in struct walk, or one of these: the item has no steps; there is none */
    unsigned item;
    int      stores, last; /* nobody has come to the tile before; an item's last step */
};

/* BY_COLUMNS: both consumers have the same 80 keys (or 64), and each some columns of dK, dV and dQ; one makes P, the other dS. */
constexpr bool BY_COLUMNS = FA_HEAD_DIM > 128 && FA_TILE_K < 128;
/* DQ_TURNED: dQ^T = K^T dS^T, 80 queries across, for which shared memory reads less than for 64; or 48, beside which dK of 192 columns has room. Of its three panels a consumer has
 * one, and of the third half of the queries (THIRD_SHARED). */
constexpr bool DQ_TURNED = FA_TILE_Q == 80 || FA_TILE_Q == 48, THIRD_SHARED = DQ_TURNED && FA_HEAD_DIM == 192;
constexpr int CONSUMERS = 2, STAGES = FA_HEAD_DIM == 256 || FA_HEAD_DIM_V == 256 ? 1 : 2 /* of dO */, Q_STAGES = BY_COLUMNS || FA_TILE_Q == 80 || FA_HAS_BIAS ? 2 : 3, DS_STAGES = FA_TILE_Q == 48 ? 1 : 2, WORKS = FA_HAS_BIAS && FA_TILE_Q == 128 ? 4 /* memory is short */ : 8;
/* DQ_LATE: a step makes dQ of the one before. So no consumer waits for dS that the other is about to write: one is up to half a step ahead, and the tensor cores have its
 * products while the other is at its elements. With 64 queries it loses (decision 0056, eleventh round). */
constexpr bool DQ_LATE = FA_TILE_Q == 128 || FA_TILE_Q == 80;
constexpr bool FIRST_APART = BY_COLUMNS || DQ_LATE; /* an item's first step has a text of its own: it makes no dQ */
static_assert(!DQ_LATE || (DS_STAGES == 2 && !BY_COLUMNS), "dS of a step lies until the next one's products");
constexpr bool HAS_NOTED = FA_HAS_SOFTCAP || FA_HAS_DROPOUT; /* dS is made of something else than P */
static_assert(!THIRD_SHARED || !(HAS_NOTED || FA_HAS_ALIBI), "for which there are no registers");
constexpr int ADDERS = BY_COLUMNS ? 2 : 1; /* warps that add dQ */
constexpr bool ADDER_FENCES = !BY_COLUMNS && !DQ_TURNED; /* one fence where dQ is taken from shared memory, not one of each warp that puts it there: 1% faster, elsewhere 2% slower */
constexpr bool PASSES_DBIAS = FA_HAS_DBIAS && !BY_COLUMNS; /* the bias's gradient has a warp: backward_dbias_sm90.cuh */
constexpr int SLOTS = 2, PIECES = SLOTS * ADDERS / CONSUMERS; /* of dQ's memory: of such a warp, of a consumer, who in a round fills each of its own once */
static_assert(PIECES == SLOTS || ADDERS == 1, "a warp's slots are one consumer's, or it has all");
/* Panels of dK and dV, and those that the first consumer has: the second has as many, or BY_COLUMNS what is left. */
constexpr bool HALF_PANEL = FA_HEAD_DIM == 96; /* of dQ's second panel half is made of zeros, and stays here */
constexpr int HELD = held_columns(FA_HEAD_DIM), HELD_V = held_columns(FA_HEAD_DIM_V), K_PANELS = HELD / 64, V_PANELS = HELD_V / 64, FIRST_OF_K = BY_COLUMNS ? 2 : K_PANELS, FIRST_OF_V = BY_COLUMNS ? (V_PANELS + 1) / 2 : V_PANELS;
static_assert(!BY_COLUMNS || V_PANELS > 1, "both have some");
__device__ constexpr int panels_of(int group, bool of_v)
{
    return BY_COLUMNS && group == 1 ? (of_v ? V_PANELS - FIRST_OF_V : K_PANELS - FIRST_OF_K) : of_v ? FIRST_OF_V : FIRST_OF_K;
}
static_assert(FA_WARPS == 4 * (CONSUMERS + 1) && (BY_COLUMNS ? FA_TILE_K == 80 || FA_TILE_K == 64 : FA_TILE_K == 64 * CONSUMERS), "a consumer has 64 keys, or all");
constexpr int PANEL_COUNT = BY_COLUMNS ? FA_TILE_K / 2 : 32; /* of dK or dV, of a thread */
constexpr int S_COUNT = (BY_COLUMNS ? FA_TILE_K : FA_TILE_Q) / 2, P_STEPS = S_COUNT / 8; /* of a thread; 16 queries a step, BY_COLUMNS keys */
constexpr int DK_COUNT = BY_COLUMNS ? PANEL_COUNT * FIRST_OF_K : FA_HEAD_DIM / 2, DV_COUNT = BY_COLUMNS ? PANEL_COUNT * FIRST_OF_V : FA_HEAD_DIM_V / 2, DQ_COUNT = DQ_TURNED ? S_COUNT : 32, THIRD_COUNT = 12, ROUND_COUNT = DQ_COUNT + THIRD_SHARED * THIRD_COUNT /* of dQ in a round */;
static_assert(FA_TILE_Q * 64 * K_PANELS == (BY_COLUMNS ? K_PANELS : 2) * 128 * ROUND_COUNT, "a consumer has 64 x 64 of dQ a round, or DQ_TURNED half of it");
constexpr int K_BYTES = FA_TILE_K * HELD * 2, V_BYTES = FA_TILE_K * HELD_V * 2, Q_BYTES = FA_TILE_Q * HELD * 2, DO_BYTES = FA_TILE_Q * HELD_V * 2, DS_BYTES = FA_TILE_Q * FA_TILE_K * 2;
/* dQ's way out: a round in pieces of so many times 16 bytes a thread, each in a slot, of which one leaves while the other is filled: what there is room for. */
__device__ constexpr int piece_of(int group) { return !BY_COLUMNS ? ROUND_COUNT / 4 / PIECES : K_PANELS < 4 ? 4 : HAS_NOTED || FA_HAS_BIAS ? 2 : group == 1 ? 4 : 3; }
__device__ constexpr int pieces_of(int group) { return (ROUND_COUNT / 4 + piece_of(group) - 1) / piece_of(group); } /* of a round */
constexpr int DQ_BYTES = 128 * 16 * piece_of(0) /* of a slot of the first consumer's */, STAT_BYTES = FA_TILE_Q * 4;
constexpr int V_AT = K_BYTES, Q_AT = V_AT + V_BYTES, DO_AT = Q_AT + Q_STAGES * Q_BYTES, DS_AT = DO_AT + STAGES * DO_BYTES;
constexpr int DQ_AT = DS_AT + DS_STAGES * DS_BYTES, LSE_AT = DQ_AT + SLOTS * (DQ_BYTES + (ADDERS - 1) * 128 * 16 * piece_of(1)), DELTA_AT = LSE_AT + Q_STAGES * STAT_BYTES;
constexpr int PASSED_AT = DELTA_AT + STAGES * STAT_BYTES /* from one consumer to the other: what dS is made of in place of P */;
constexpr int BARRIERS_AT = PASSED_AT + (BY_COLUMNS && HAS_NOTED ? DS_BYTES : 0), BIAS_STAGES = FA_HAS_BIAS, BARRIERS = 6 + 2 * WORKS + 2 * (Q_STAGES + STAGES + BIAS_STAGES + PASSES_DBIAS * DS_STAGES);
constexpr int TURN_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16, WORKS_AT = TURN_AT + (int)sizeof(turn);
constexpr int STAGED_AT = (WORKS_AT + WORKS * (int)sizeof(share_work) + 1023) / 1024 * 1024;
/* dK and dV on their way out, panels of 64 keys (BY_COLUMNS of 80): at head_dim 64 both in the memory of dS that nobody reads, at 128 half of dK there and half behind all else, dV
 * where V of the same keys was; BY_COLUMNS both where V was, one after the other; DQ_TURNED dK in the memory of dQ, dV where V was. */
constexpr int  PANEL_BYTES  = (BY_COLUMNS ? FA_TILE_K : 64) * 128;
constexpr bool DK_BY_DQ     = DQ_TURNED;
constexpr bool STAGED_IN_DS = !BY_COLUMNS && FA_TILE_Q * 128 == 2 * PANEL_BYTES;
constexpr bool V_IS_EARLY   = STAGED_IN_DS; /* given back before dV leaves, which does not pass through it */
constexpr int  STAGED_BYTES = DK_BY_DQ || BY_COLUMNS || STAGED_IN_DS ? 0 : CONSUMERS * PANEL_BYTES;

constexpr int BIAS_AT = STAGED_AT + STAGED_BYTES, SHARED_BYTES = BIAS_AT + BIAS_STAGES * BIAS_BYTES;
static_assert(SHARED_BYTES <= 227 * 1024, "what a block may have");
static_assert(!F32_BIAS && !(FA_HAS_BIAS && BY_COLUMNS && HAS_NOTED), "for which there is no memory");
static_assert(!DK_BY_DQ || PANEL_BYTES <= DQ_BYTES, "dK goes where dQ goes");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;
extern __shared__ __align__(1024) char shared[];

FA_DEVICE turn &next_turn() { return *(turn *)(shared + TURN_AT); }
FA_DEVICE share_work &work_at(unsigned item) { return ((share_work *)(shared + WORKS_AT))[item % WORKS]; }

/* ---- barriers; `item` counts the block's tiles of keys, `n` query tiles, since the kernel began. Phases alternate ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned k_full() { return barrier_at(0); }
FA_DEVICE unsigned k_empty() { return barrier_at(1); }
FA_DEVICE unsigned v_full() { return barrier_at(2); }
FA_DEVICE unsigned v_empty() { return barrier_at(3); }
FA_DEVICE unsigned found(unsigned item) { return barrier_at(4 + item % WORKS); } /* the work is known */
FA_DEVICE unsigned q_barrier(int which, unsigned n) { return barrier_at(4 + WORKS + which * Q_STAGES + n % Q_STAGES); }
FA_DEVICE unsigned q_full(unsigned n) { return q_barrier(0, n); } /* with LSE */
FA_DEVICE unsigned q_empty(unsigned n) { return q_barrier(1, n); }
FA_DEVICE unsigned dout_barrier(int which, unsigned n) { return barrier_at(4 + WORKS + 2 * Q_STAGES + which * STAGES + n % STAGES); }
FA_DEVICE unsigned dout_full(unsigned n) { return dout_barrier(0, n); } /* with delta */
FA_DEVICE unsigned dout_empty(unsigned n) { return dout_barrier(1, n); }

FA_DEVICE unsigned turn_full() { return barrier_at(4 + WORKS + 2 * (Q_STAGES + STAGES)); }
FA_DEVICE unsigned turn_empty() { return barrier_at(5 + WORKS + 2 * (Q_STAGES + STAGES)); }
FA_DEVICE unsigned added(unsigned item) { return barrier_at(6 + WORKS + 2 * (Q_STAGES + STAGES) + item % WORKS); } /* its dQ: nobody asks for the work any more */

FA_DEVICE unsigned bias_full() { return barrier_at(BARRIERS - 2); }
FA_DEVICE unsigned bias_empty() { return barrier_at(BARRIERS - 1); }
FA_DEVICE unsigned ds_there(unsigned n) { return barrier_at(BARRIERS - 2 - 2 * DS_STAGES + n % DS_STAGES); } /* PASSES_DBIAS */
FA_DEVICE unsigned ds_passed(unsigned n) { return barrier_at(BARRIERS - 2 - DS_STAGES + n % DS_STAGES); }

constexpr bool INSPECTED = FA_MASK != FA_MASK_NONE;

/* True of the delta of a query whose dO is not finite: it is not either, or, if the query sees no key, -0 (row_delta). */
FA_DEVICE bool is_marked(float delta) { return !finite(delta) || is_minus_0(delta); }

FA_DEVICE void start_barriers()
{
    barrier_init(k_full(), 1);
    barrier_init(k_empty(), 4 * CONSUMERS);
    barrier_init(v_full(), 1);
    barrier_init(v_empty(), V_IS_EARLY ? 4 * CONSUMERS : CONSUMERS);
    for (int n = 0; n < WORKS; n++) {
        barrier_init(found(n), 1);
        barrier_init(added(n), ADDERS + PASSES_DBIAS);
    }
    for (int n = 0; n < Q_STAGES; n++) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 4 * CONSUMERS);
    }
    for (int n = 0; n < STAGES; n++) {
        barrier_init(dout_full(n), 1);
        barrier_init(dout_empty(n), 4 * CONSUMERS);
    }
    if constexpr (FA_HAS_BIAS) {
        barrier_init(bias_full(), 1);
        barrier_init(bias_empty(), BY_COLUMNS ? 4 : 4 * CONSUMERS); /* of who makes P */
    }
    for (int n = 0; n < PASSES_DBIAS * DS_STAGES; n++) {
        barrier_init(ds_there(n), 4 * CONSUMERS);
        barrier_init(ds_passed(n), 1);
    }
    barrier_init(turn_full(), 1);
    barrier_init(turn_empty(), ADDERS);
    barrier_init_done();
}

FA_DEVICE unsigned k_tile() { return shared_address(shared); }
FA_DEVICE unsigned v_tile() { return shared_address(shared) + V_AT; }
FA_DEVICE unsigned q_tile(unsigned n) { return shared_address(shared) + Q_AT + n % Q_STAGES * Q_BYTES; }
FA_DEVICE unsigned dout_tile(unsigned n) { return shared_address(shared) + DO_AT + n % STAGES * DO_BYTES; }
FA_DEVICE unsigned ds_tile(unsigned n) { return shared_address(shared) + DS_AT + n % DS_STAGES * DS_BYTES; }
FA_DEVICE unsigned bias_tile() { return shared_address(shared) + BIAS_AT; }
FA_DEVICE unsigned lse_at(unsigned n) { return shared_address(shared) + LSE_AT + n % Q_STAGES * STAT_BYTES; }
FA_DEVICE unsigned delta_at(unsigned n) { return shared_address(shared) + DELTA_AT + n % STAGES * STAT_BYTES; }

/* Of a consumer: its first key in the tile, its first panel of dK or dV. */
FA_DEVICE int first_key_of(int group) { return BY_COLUMNS ? 0 : 64 * group; }
FA_DEVICE int first_panel_of(int group, bool of_v) { return BY_COLUMNS ? group * (of_v ? FIRST_OF_V : FIRST_OF_K) : 0; }

FA_DEVICE unsigned dq_at(int slot)
{
    int second = BY_COLUMNS && slot >= SLOTS ? slot - SLOTS : 0; /* slots behind the second consumer's first */
    return shared_address(shared) + DQ_AT + slot * DQ_BYTES + second * 128 * 16 * (piece_of(1) - piece_of(0));
}

/* Named barriers; of DQ one a slot, of OWN, MINE and DS_IS_FREE one a consumer. BY_COLUMNS alone:
 * P_IS_THERE, P_IS_USED, DOUT_IS_CLEAN (before P_IS_USED in each step, so nobody is there twice), MINE; elsewhere OWN and, with one stage of dS, DS_IS_FREE. DQ_LATE has four of DS_IS_THERE (step_is_over). */
enum { DS_IS_THERE = 1, P_IS_USED = 2, DQ_IS_THERE = 3, P_IS_THERE = 7, OWN = 8, DOUT_IS_CLEAN = 8, DS_IS_FREE = 10, MINE = 10, DQ_IS_FREE = 12 };

/* DQ_LATE: a consumer's dS of step n is there, and dQ of step n - 1 is made, so that the other may write over what it was made of. One may come here twice before the
 * other has once: hence two for each. */
FA_DEVICE int step_is_over(int group, unsigned n) { return DS_IS_THERE + n % 2 * 4 + group; }

/* ---- the block's tiles of keys ---- */

/* Blocks that share a tile of keys count as key heads of their own: of the group's heads, and then of their queries, each has a part. So within such a head all tiles of
 * keys have the same queries, which FA_DQ_FIRST_KEYS asks for. */
FA_DEVICE void find_share(const fa_args &args, grid_place at, share_work &w)
{
    unsigned shares = args.group_blocks, share = at.other % shares;
    at.other /= shares;
    if (FA_HAS_BIAS && args.bias.stride[0] == 0 && !args.cu_seqlens_k) /* a bias of all sequences is read, and its gradient added to, by them at the same time: in L2 */
        at.other = at.other % args.batch * args.heads_k + at.other / args.batch;
    (work &)w = work_of(args, at);
    asm volatile("" ::: "memory"); /* registers are short: from memory */
    w.stored_head = w.kv_head * shares + share;
    if (shares > 1) {
        unsigned parts = args.part_shares;
        int      part = share % parts, begin = w.tiles.begin, count = w.tiles.end - begin;
        w.num_heads = args.group * parts / shares;
        w.first_head += share / parts * w.num_heads;
        w.tiles = {begin + count * part / (int)parts, begin + count * (part + 1) / (int)parts};
    }
}

/* Lengths that are all alike: each block has every gridDim.x-th tile of the first args.own_heads heads; causal ones come in pairs, and the first
 * are the longest, for they are seen by most queries; then own_heads is even. */
FA_DEVICE bool own_place(const fa_args &args, unsigned n, grid_place &at)
{
    unsigned heads = args.own_heads, tiles = args.tiles_k, number = n * gridDim.x + blockIdx.x, pair = n / 2 * gridDim.x + blockIdx.x;
    if (FA_MASK == FA_MASK_CAUSAL ? pair >= heads / 2 * tiles : number >= tiles * heads)
        return false;
    at = {number % tiles, number / tiles};
    if (FA_MASK == FA_MASK_CAUSAL) {
        at      = place_of_pair(tiles, pair, n % 2);
        at.tile = tiles - 1 - at.tile;
    }
    return true;
}

/* Each block's first tile has its own number, where nobody waits for a block that has not begun: of the grid some may, if others have the GPU too. */
FA_DEVICE bool begins_by_itself(const fa_args &args) { return args.own_heads == 0 && args.dq_order == FA_DQ_FIRST_COMES; }

/* The other heads; all of them where lengths differ or blocks wait for each other: who is free takes the next tile. Those of args.order_heads heads (packed:
 * of all sequences; else of one) come together, by their numbers. So in a head earlier tiles are begun first, and who waits for their dQ waits for a block that runs. */
FA_DEVICE bool dealt_place(const fa_args &args, bool first_of_all, grid_place &at)
{
    unsigned number = blockIdx.x, tiles = args.dealt_tiles, heads = args.dealt_heads;
    if (!first_of_all)
        number = atomicAdd(args.next_item, 1) + (begins_by_itself(args) ? gridDim.x : 0);
    at = place_of_dealt(tiles, heads, args.order_heads, number);
    at.other += args.own_heads;
    if (number >= tiles * heads)
        return false;
    if (args.cu_seqlens_k) {
        tile_place of = place_of_tile<FA_TILE_K>(args.cu_seqlens_k, args.all_rows_k, 0, args.batch, at.tile);
        at            = {(unsigned)of.tile, of.b * args.heads_k * args.group_blocks + at.other};
    }
    return true;
}

/* By the producer: the block's n-th work, or the sign that there is none. A tile of packed sequences may be nobody's. */
FA_DEVICE bool find_item(const fa_args &args, unsigned n, share_work &w)
{
    bool some, first_of_all = n == 0 && begins_by_itself(args);
    for (;;) {
        grid_place at;
        bool       own = own_place(args, n, at);
        some           = own || (args.next_item && dealt_place(args, first_of_all, at));
        first_of_all   = false;
        if (some)
            find_share(args, at, w);
        if (!some || own || (unsigned)w.first_k < (unsigned)w.seq.rows_k)
            break;
    }
    if (!some)
        w.num_heads = 0;
    barrier_arrive(found(n));
    return some;
}

/* By the others. */
FA_DEVICE bool has_item(unsigned n)
{
    barrier_wait(found(n), filled<WORKS>(n));
    return work_at(n).num_heads > 0;
}

/* Steps of a work: query tiles of one head after the other (backward_walk_sm90.cuh). */
FA_DEVICE int steps_of(const work &w) { return (w.tiles.end - w.tiles.begin) * w.num_heads; }

#endif
