/* A block of forward_latent_sm90.cu: what lies where in shared memory, its barriers, what it works on. */
#ifndef FA_LATENT_BLOCK_SM90_CUH
#define FA_LATENT_BLOCK_SM90_CUH

#include "forward_work.cuh"
#include "fragment_sm90.cuh"

static_assert(FA_TILE_Q == 64 && FA_TILE_K == 48 && FA_WARPS == 16 && PACKED, "the scores' warpgroup owns 64 rows");
constexpr bool APART = FA_HEAD_DIM <= FA_HEAD_DIM_V; /* V is a tensor of its own: forward_wide_sm90 */
static_assert((APART ? FA_HEAD_DIM % 64 == 0 && FA_HEAD_DIM > 256 : FA_HEAD_DIM == 576) && FA_HEAD_DIM_V == 512, "nine panels, or up to eight, the first eight in two halves");
static_assert(FA_DTYPE == FA_F16 || FA_DTYPE == FA_BF16, "two bytes an element");

constexpr bool PAIRS = FA_VARIANT & 1, MERGES = FA_HAS_SPLIT && FA_ONE_LAUNCH;
static_assert(!(PAIRS && MERGES), "a cluster is one or the other");
constexpr int  PANELS = FA_HEAD_DIM / 64, HALF = 4, PARTS = APART ? 2 : 3; /* of 64 columns; V's, in two halves, and one that is not V's */
constexpr int  PANEL_BYTES = FA_TILE_K * 128, HALF_BYTES = HALF * PANEL_BYTES, ROWS_BYTES = FA_TILE_Q * 128; /* of keys; ROWS_BYTES: a panel of Q or P */
constexpr int  PRODUCERS = FA_HAS_PAGED ? 3 : 1;                                                            /* threads, each of a warp of its own */
constexpr int  KEPT = 6, TAKEN = PANELS < KEPT ? PANELS : KEPT;                                             /* panels of Q in registers, if there are so many */
constexpr int  SLOTS = FA_STAGES, SLOT_BYTES = (APART ? 2 * HALF : PANELS) * PANEL_BYTES;
constexpr int  VALUES_FROM = APART ? SLOTS : 0, ALL_SLOTS = VALUES_FROM + SLOTS; /* slots of V, and of P */
static_assert(HALF_BYTES == KEPT / 2 * ROWS_BYTES, "what is kept of Q comes in a slot's halves, and as much besides");
constexpr int  P_AT = ALL_SLOTS * SLOT_BYTES, Q_AT = P_AT + SLOTS * ROWS_BYTES, FACTORS_AT = Q_AT + (PANELS - TAKEN) * ROWS_BYTES;
constexpr int  BARRIERS_AT = FACTORS_AT + SLOTS * 64 * 4, WORKS = 2, NUM_BARRIERS = ALL_SLOTS * 7 + 1 + 3 * WORKS;
constexpr int  PRODUCER_REGISTERS = 40, SCORES_REGISTERS = 152, VALUES_REGISTERS = 160; /* 512 a lane of four warpgroups, values' twice */
constexpr int  S_COUNT = FA_TILE_K / 2, O_COUNT = FA_HEAD_DIM_V / 8; /* of a thread; O's of 128 columns */
constexpr int  STEPS = 4 * PANELS, P_STEPS = FA_TILE_K / 16;         /* of Q K^T and of P V */

/* What a block works on. */
struct item {
    work  w;
    int   none;             /* there is nothing more, and no work here */
    int   cleared, far;     /* Inf or NaN were taken away from V; a row is far */
    float scale[FA_TILE_Q]; /* of O's rows on the way out; below 0: the row is not stored */
};

constexpr int ITEMS_AT = (BARRIERS_AT + 8 * NUM_BARRIERS + 15) / 16 * 16;

extern "C" __constant__ int fa_shared_bytes = ITEMS_AT + WORKS * (int)sizeof(item);
extern __shared__ __align__(1024) char shared[];

FA_DEVICE item &item_at(int k) { return ((item *)(shared + ITEMS_AT))[k % WORKS]; }

/* ---- slots, filled by turns with an item's Q and the tiles of its keys; APART: and those behind with V's ---- */

struct place {
    int slot;
    int phase; /* parity of its being filled; nothing is reset */
};

template <int FIRST = 0> FA_DEVICE void go_on(place &p)
{
    if (++p.slot == FIRST + SLOTS) {
        p.slot = FIRST;
        p.phase ^= 1;
    }
}

FA_DEVICE unsigned slot_at(int slot) { return shared_address(shared) + slot * SLOT_BYTES; }
FA_DEVICE unsigned panel_at(int slot, int panel) { return slot_at(slot) + panel * PANEL_BYTES; }
FA_DEVICE unsigned p_at(int slot) { return shared_address(shared) + P_AT + (slot - VALUES_FROM) * ROWS_BYTES; } /* of the slot's tile */
/* A panel of Q: on its way to registers in a slot, or for good. */
FA_DEVICE unsigned q_at(int slot, int panel)
{
    return panel < KEPT ? slot_at(slot) + panel * ROWS_BYTES : shared_address(shared) + Q_AT + (panel - KEPT) * ROWS_BYTES;
}
FA_DEVICE unsigned factors_at(int slot) { return shared_address(shared) + FACTORS_AT + (slot - VALUES_FROM) * (64 * 4); }

/* ---- barriers ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
/* Four panels of V, which warpgroup `part` of the values' reads, or, 2, the one that is not V's, are there; of Q three each, APART three and what is left. */
FA_DEVICE unsigned full(int slot, int part) { return barrier_at(7 * slot + part); }
/* They have been read; the third panel when both have. */
FA_DEVICE unsigned empty(int slot, int part) { return barrier_at(7 * slot + 3 + part); }
/* P of the slot's tile is there ... */
FA_DEVICE unsigned told(int slot) { return barrier_at(7 * slot + 5); }
/* ... and the tensor cores have soon made S of the next tile. */
FA_DEVICE unsigned turn(int slot) { return barrier_at(7 * slot + 6); }
FA_DEVICE unsigned q_empty() { return barrier_at(7 * ALL_SLOTS); }
FA_DEVICE unsigned found(int k) { return barrier_at(7 * ALL_SLOTS + 1 + k % WORKS); }
FA_DEVICE unsigned summed(int k) { return barrier_at(7 * ALL_SLOTS + 1 + WORKS + k % WORKS); }
FA_DEVICE unsigned done(int k) { return barrier_at(7 * ALL_SLOTS + 1 + 2 * WORKS + k % WORKS); }

/* Named ones: threads of one warpgroup of the values' alone; of both; of the scores'. */
enum { ALONE = 1, VALUES = 3, SCORES = 4 };

FA_DEVICE void start_barriers()
{
    for (int slot = 0; slot < ALL_SLOTS; slot++) {
        for (int part = 0; part < 3; part++)
            barrier_init(full(slot, part), PRODUCERS);
        for (int part = 0; part < 2; part++)
            barrier_init(empty(slot, part), PAIRS ? 8 : 4);
        barrier_init(told(slot), 4);
        barrier_init(turn(slot), 4);
    }
    barrier_init(q_empty(), 4);
    for (int n = 0; n < WORKS; n++) {
        barrier_init(found(n), 1);
        barrier_init(summed(n), 4);
        barrier_init(done(n), 12 + PRODUCERS);
    }
    barrier_init_done();
}

#include "grouped_sm90.cuh"

#endif
