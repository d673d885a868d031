/*
 * The step of backward_sm80.cu where a team of four warps shares keys and queries (FA_VARIANT 3): each multiplies its own quarter of the columns, for S^T and dP^T as for dV and dK.
 * Of S^T and dP^T that gives sums over a quarter, which meet in shared memory: each warp adds up those of a quarter of the queries (of 16 queries two warps
 * half each), makes P^T and dS^T of them and leaves these to all.
 */
#ifndef FA_BACKWARD_COLUMNS_SM80_CUH
#define FA_BACKWARD_COLUMNS_SM80_CUH

#include "backward_block_sm80.cuh"

constexpr int MAKERS   = FA_TILE_Q / 8 / QUERIES8; /* warps of a team that make P^T and dS^T */
constexpr int GIVEN    = KEYS16 * QUERIES8 * 512;  /* bytes that a warp leaves to a maker */
static_assert((FA_HEAD_DIM | FA_HEAD_DIM_V) % (16 * TEAM) == 0, "each warp has as many columns");
static_assert(KEY_WARPS * MAKERS * (TEAM - 1) * GIVEN == SUMS_BYTES, "a float for each key and query of each other warp");

/* Where warp `giver` of this team leaves to `maker` what that adds up, this lane's sixteen bytes of each block. */
FA_DEVICE unsigned sums_of(unsigned sums, int maker, int giver)
{
    int place = (giver - maker + TEAM) % TEAM - 1;
    return sums + ((key_warp() * MAKERS + maker) * (TEAM - 1) + place) * GIVEN + threadIdx.x % 32 * 16;
}

/* A B^T over this warp's columns: its own queries' to `own`, the others' to shared memory. */
template <int COLS, int A_PLANE, int B_PLANE>
FA_DEVICE void multiply_columns(float (&own)[KEYS16][QUERIES8][4], unsigned a, unsigned b, unsigned sums)
{
    constexpr int BLOCKS = COLS / 16 / TEAM;
    int           first  = 2 * BLOCKS * team_member();
    float         c[KEYS16][FA_TILE_Q / 8][4];
    multiply_rows<BLOCKS, A_PLANE, B_PLANE, COLS>(c, {a, rows_first_row(), rows_first_half() + first}, {b, halves_first_row(), halves_first_half() + first});
#pragma unroll
    for (int maker = 0; maker < MAKERS; maker++) {
        bool     mine = maker == team_member();
        unsigned to   = sums_of(sums, maker, team_member());
#pragma unroll
        for (int m = 0; m < KEYS16; m++)
#pragma unroll
            for (int n = 0; n < QUERIES8; n++) {
                const float(&x)[4] = c[m][maker * QUERIES8 + n];
                if (!mine)
                    shared_store(to + (m * QUERIES8 + n) * 512, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    own[m][n][e] = mine ? x[e] : own[m][n][e];
            }
    }
}

FA_DEVICE void add_sums(float (&own)[KEYS16][QUERIES8][4], unsigned sums)
{
#pragma unroll
    for (int other = 1; other < TEAM; other++) {
        unsigned from = sums_of(sums, team_member(), (team_member() + other) % TEAM);
#pragma unroll
        for (int m = 0; m < KEYS16; m++)
#pragma unroll
            for (int n = 0; n < QUERIES8; n++) {
                float4 x = shared_load_float4(from + (m * QUERIES8 + n) * 512);
                own[m][n][0] += x.x;
                own[m][n][1] += x.y;
                own[m][n][2] += x.z;
                own[m][n][3] += x.w;
            }
    }
}

/* To a tile of keys x queries in shared memory. */
FA_DEVICE void share_block(unsigned to, const float (&x)[KEYS16][QUERIES8][4])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < KEYS16; m++)
#pragma unroll
        for (int n = 0; n < QUERIES8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned plane[PLANES];
                pack_planes(plane, x[m][n][2 * h], x[m][n][2 * h + 1]);
#pragma unroll
                for (int p = 0; p < PLANES; p++)
                    shared_store(to + p * S_PLANE + tile<FA_TILE_Q>::offset((key_warp() * KEYS16 + m) * 16 + h * 8 + g, team_member() * QUERIES8 + n) + t * 4, plane[p]);
            }
}

/* Lines 11-14 and dV, dK for the query tile that lies at q and dout; dS^T goes to ds. */
template <bool MASKED>
FA_DEVICE void step_part(block_state &state, const fa_args &args, const work &w, unsigned shared, int, unsigned q, unsigned dout, unsigned ds, unsigned stats)
{
    int   key_row = key_warp() * KEYS16 * 16;
    float s[KEYS16][QUERIES8][4], dp[KEYS16][QUERIES8][4];
    clear(s); /* who makes none has nothing else in them */
    clear(dp);
    multiply_columns<FA_HEAD_DIM, K_PLANE, Q_PLANE>(s, shared + key_row * FA_HEAD_DIM * 2, q, shared + SUMS_AT);
    multiply_columns<FA_HEAD_DIM_V, V_PLANE, DO_PLANE>(dp, shared + V_AT + key_row * FA_HEAD_DIM_V * 2, dout, shared + SUMS_AT + SUMS_BYTES);
    team_barrier();
    if (team_member() < MAKERS) {
        add_sums(s, shared + SUMS_AT);
        add_sums(dp, shared + SUMS_AT + SUMS_BYTES);
        probabilities<MASKED>(s, dp, args, w, state.at, 0, stats);
        share_block(shared + P_AT, s);
        share_block(ds, dp);
    }
    team_barrier();
    add_shared_product<MAKERS, FA_HEAD_DIM_V, DO_PLANE>(state.dv, shared + P_AT + key_row * FA_TILE_Q * 2, dout, 0);
    add_shared_product<MAKERS, FA_HEAD_DIM, Q_PLANE>(state.dk, ds + key_row * FA_TILE_Q * 2, q, 0);
}

#endif
