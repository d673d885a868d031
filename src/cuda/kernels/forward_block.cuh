/* A block of forward_sm80.cu: how its warps share a tile, what lies where in shared memory, its running state. */
#ifndef FA_FORWARD_BLOCK_CUH
#define FA_FORWARD_BLOCK_CUH

#include "forward_work.cuh"
#include "tile.cuh"

/* Warps that share a row and its keys, each with own columns of V and O, for a thread's registers hold no more than 288 of a row, and beside three planes half
 * of that; or where a tile has fewer rows than warps have. Each makes S and P of its rows for itself. Blocks of 16 columns go to them by turns, so that an address is an XOR away as without (decision 0069). */
constexpr bool WIDE      = FA_HEAD_DIM > 256 || FA_HEAD_DIM_V > 256;
constexpr int  COL_WARPS = WIDE ? (PLANES > 1 ? 4 : 2) : !PACKED && FA_WARPS * 16 > FA_TILE_Q ? FA_WARPS * 16 / FA_TILE_Q : 1;
constexpr int  ROW_WARPS = FA_WARPS / (KEY_WARPS * COL_WARPS); /* warps with rows of their own */
constexpr int  ROWS16 = FA_TILE_Q / (16 * ROW_WARPS); /* blocks of 16 rows of a warp */
constexpr int  WARP_KEYS = FA_TILE_K / KEY_WARPS, KEYS8 = WARP_KEYS / 8;
constexpr int  DIM16  = FA_HEAD_DIM / 16;
constexpr int  COLS8  = FA_HEAD_DIM_V / 8 / COL_WARPS; /* blocks of 8 columns of a warp */
constexpr bool Q_STAYS = FA_VARIANT & 1;
/* A tile's pages are looked up a step before it is copied. */
constexpr bool LOOKED_UP = PACKED && FA_STAGES > 1 && FA_HAS_PAGED && tile<FA_HEAD_DIM>::GROUP == tile<FA_HEAD_DIM_V>::GROUP &&
                           THREADS >= FA_TILE_K;

constexpr int Q_BYTES = PLANES * FA_TILE_Q * 2 * (FA_HEAD_DIM > FA_HEAD_DIM_V ? FA_HEAD_DIM : FA_HEAD_DIM_V); /* O leaves through it */
constexpr int Q_PLANE = FA_TILE_Q * 2 * FA_HEAD_DIM;
constexpr int K_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM, K_BYTES = PLANES * K_PLANE;
constexpr int V_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM_V, V_BYTES = PLANES * V_PLANE;
static_assert(PLANES == 1 || !Q_STAYS, "three planes of Q do not fit into registers");

constexpr int TILES_BYTES = Q_BYTES + FA_STAGES * (K_BYTES + V_BYTES);

/* PACKED: what warps leave to each other where a part of the keys ends: each row's maximum and sum, and of ROUND rows at a time O. A row is eight
 * floats longer than O's, so that lanes of eight rows meet different banks. With 16 rows it lies behind the tiles, for those of the next part are on
 * their way; more leave no room, and take that of the tiles, where they do not fit 16 by 16. */
constexpr bool RUNS = PACKED && FA_TILE_Q == 16;
static_assert(!RUNS || FA_STAGES > 1, "the next part's tiles are on their way when a part ends");
static_assert(COL_WARPS == 1 || (FA_HEAD_DIM_V % (16 * COL_WARPS) == 0 && KEY_WARPS == 1), "each has as many blocks of columns");
constexpr int  SHARE_PITCH = FA_HEAD_DIM_V + 8, SHARE_ROWS = PACKED ? KEY_WARPS * FA_TILE_Q : 0;
constexpr int  ROUND       = RUNS ? 4 : COL_WARPS > 1 && SHARE_ROWS * (SHARE_PITCH + 2) * 4 > TILES_BYTES ? 16 : FA_TILE_Q;
constexpr int  SHARE_BYTES = 4 * (2 * SHARE_ROWS + (PACKED ? KEY_WARPS * ROUND * SHARE_PITCH : 0));
constexpr int  SHARE_AT = RUNS ? TILES_BYTES : 0;

/* K and V leave L2 first. 64 rows are bound by their products: there it costs more than it brings, as ASKS_AHEAD does. */
constexpr bool ONCE = RUNS && !AS_BYTES;

/* What a block may not read before the launch in front of it has ended, it may ask for (decision 0058). */
constexpr bool ASKS_AHEAD = RUNS && !FA_HAS_PAGED;

constexpr int TILES_AHEAD = PACKED && FA_STAGES > 1 ? FA_STAGES - 1 : 1;

using q_fragments = unsigned[ROWS16][DIM16][4];

/* This warp's place among those that share a tile's rows, among those that share its keys, and among those that share V's columns. */
FA_DEVICE int row_warp() { return PACKED || COL_WARPS > 1 ? threadIdx.x / 32 % ROW_WARPS : threadIdx.x / 32; }
FA_DEVICE int key_warp() { return PACKED && COL_WARPS == 1 ? threadIdx.x / 32 / ROW_WARPS : 0; }
FA_DEVICE int col_warp() { return COL_WARPS > 1 ? threadIdx.x / 32 / ROW_WARPS : 0; }

/* Row of the tile that this lane's element (m, upper or lower half h) lies in. */
FA_DEVICE int row_of(int m, int h) { return row_warp() * 16 * ROWS16 + m * 16 + h * 8 + threadIdx.x % 32 / 4; }

/* First column of the row's that this warp's columns 8 n ... 8 n + 7 are. */
FA_DEVICE int col_of(int n) { return (n / 2 * COL_WARPS + col_warp()) * 16 + n % 2 * 8; }

/* KEEPS: a block has all parts, and where a warp has one row it keeps what that leaves in them: O in the lanes' columns, the LSE of part p in lane p and
 * those 8 apart. A kernel of its own, for it costs others 3%; three blocks a multiprocessor have no registers for it. */
constexpr bool KEEPS = RUNS && FA_HAS_SPLIT && FA_ONE_LAUNCH == 2 && FA_HEAD_DIM_V <= 128 && FA_MIN_BLOCKS <= 2;
struct kept_row {
    bool   good; /* no row was finished otherwise */
    float  lse;
    float4 o[KEEPS ? 8 : 1];
};

/* A block's operands in shared memory and its running state. */
struct block_state {
    score_terms terms;
    bool        cleared;    /* V had Inf or NaN in an edge tile */
    unsigned    k_shared, v_shared;
    int         tile, stage; /* the present key tile and its buffer */
    key_place   place;       /* LOOKED_UP: in the next tile to be copied */
#if FA_MASK == FA_MASK_LISTED
    int         number, mask; /* of the tile in its list */
#endif
    float       maximum[2 * ROWS16], sum[2 * ROWS16];
    float       o[ROWS16][COLS8][4];
    kept_row    kept;
};

FA_DEVICE void begin_rows(block_state &state)
{
    state.cleared = false;
    clear(state.o);
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        state.maximum[r] = -infinity();
        state.sum[r]     = 0.0f;
    }
}

#endif
