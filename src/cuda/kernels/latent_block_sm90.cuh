/* A block of forward_latent_sm90.cu: what lies where in shared memory, its barriers, what it works on. */
#ifndef FA_LATENT_BLOCK_SM90_CUH
#define FA_LATENT_BLOCK_SM90_CUH

#include "forward_work.cuh"
#include "fragment_sm90.cuh"

static_assert(FA_TILE_Q == 64 && FA_TILE_K == 64 && FA_WARPS == 12 && PACKED, "a consumer owns 64 rows");
static_assert(FA_HEAD_DIM == 576 && FA_HEAD_DIM_V == 512 && FA_STAGES == 2, "nine panels, the first eight in two halves");
static_assert(FA_DTYPE == FA_F16 || FA_DTYPE == FA_BF16, "two bytes an element");

constexpr bool PAIRS = FA_VARIANT & 1;
constexpr int  LOAD_ROWS = PAIRS ? FA_TILE_K / 2 : FA_TILE_K; /* of a panel, that a block asks for */
constexpr int PANEL_BYTES = 64 * 128, PANELS = 9, Q_BYTES = PANELS * PANEL_BYTES, SLOT_BYTES = Q_BYTES, ROTARY = PANELS - 1; /* the panel that is not V's */
constexpr int HALF_BYTES = 4 * PANEL_BYTES;
constexpr int K_AT = Q_BYTES, P_AT = K_AT + 2 * SLOT_BYTES, MAXIMA_AT = P_AT + PANEL_BYTES, SUMS_AT = MAXIMA_AT + 64 * 4;
constexpr int BARRIERS_AT = SUMS_AT + 2 * 64 * 4, NUM_BARRIERS = 2 * PANELS + 2 * 3 + 6, WORKS = 2;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224; /* 504 a lane of three warpgroups */
constexpr int S_COUNT = FA_TILE_K / 2, O_COUNT = FA_HEAD_DIM_V / 4, P_STEPS = FA_TILE_K / 16; /* of a thread */

/* What a block works on. */
struct item {
    work w;
    int  none;         /* there is nothing more, and no work here */
    int  cleared, far; /* Inf or NaN were taken away from V; a row is far */
};

constexpr int ITEMS_AT = (BARRIERS_AT + 8 * NUM_BARRIERS + 15) / 16 * 16;

extern "C" __constant__ int fa_shared_bytes = ITEMS_AT + WORKS * (int)sizeof(item);
extern __shared__ __align__(1024) char shared[];

FA_DEVICE item &item_at(int k) { return ((item *)(shared + ITEMS_AT))[k % WORKS]; }

/* ---- barriers; a slot has even or odd tiles of an item, so that its address is a constant; `use` counts how often it has been filled, k items, q tiles of Q,
 * since the kernel began. Phases alternate, nothing is reset ---- */

FA_DEVICE unsigned barrier_at(int number) { return shared_address(shared) + BARRIERS_AT + 8 * number; }
FA_DEVICE unsigned full(int slot, int panel) { return barrier_at(slot * PANELS + panel); }
/* Four panels of V, which consumer `part` has read last, or, 2, the one that is not V's. */
FA_DEVICE unsigned empty(int slot, int part) { return barrier_at(2 * PANELS + slot * 3 + part); }
FA_DEVICE unsigned q_full() { return barrier_at(2 * PANELS + 6); }
FA_DEVICE unsigned q_empty() { return barrier_at(2 * PANELS + 7); }
FA_DEVICE unsigned found(int k) { return barrier_at(2 * PANELS + 8 + k % WORKS); }
FA_DEVICE unsigned done(int k) { return barrier_at(2 * PANELS + 10 + k % WORKS); }

/* Waiting for one of `stages` to be filled for the n-th time and, with the other parity, for it to be free, which it is at first. */
FA_DEVICE unsigned filled(int n, int stages) { return n / stages & 1; }
FA_DEVICE unsigned freed(int n, int stages) { return filled(n, stages) ^ 1; }

FA_DEVICE unsigned slot_at(int slot) { return shared_address(shared) + K_AT + slot * SLOT_BYTES; }

/* Named ones: P of consumer 0 and of consumer 1 is there; one consumer's threads alone; both consumers'; the even one's product by an
 * odd tile has been started, behind which the odd one's is: its half of the slot is free first then. */
enum { P_OF = 1, ALONE = 3, CONSUMERS = 5, AFTER = 6 };

FA_DEVICE void start_barriers()
{
    for (int slot = 0; slot < 2; slot++) {
        for (int panel = 0; panel < PANELS; panel++)
            barrier_init(full(slot, panel), 1);
        for (int part = 0; part < 3; part++)
            barrier_init(empty(slot, part), PAIRS ? 8 : 4);
    }
    barrier_init(q_full(), 1);
    barrier_init(q_empty(), 8);
    for (int n = 0; n < WORKS; n++) {
        barrier_init(found(n), 1);
        barrier_init(done(n), 8 + 1);
    }
    barrier_init_done();
}

/* Tile n of a work, from the right. */
FA_DEVICE int right_tile(const work &w) { return (w.keys.end - 1) / FA_TILE_K; }
FA_DEVICE int tiles_of(const work &w) { return w.keys.begin < w.keys.end ? right_tile(w) + 1 - w.first_tile : 0; }

#endif
