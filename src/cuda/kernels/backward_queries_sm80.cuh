/* The step of backward_sm80.cu where warps that share keys share out a tile's queries, FA_VARIANT 0 to 2. */
#ifndef FA_BACKWARD_QUERIES_SM80_CUH
#define FA_BACKWARD_QUERIES_SM80_CUH

#include "backward_block_sm80.cuh"

using operand = unsigned[PLANES][KEYS16][QUERIES8 / 2][4]; /* P^T or dS^T as A */

/* add_product for this warp's own queries, from its registers. b: the query tile from this warp's first column on, x: this team's keys of P^T or dS^T. */
template <int COLS, int B_PLANE, int N8>
FA_DEVICE void add_own_product(float (&c)[KEYS16][N8][4], const operand &x, unsigned b, int share)
{
    lane_addresses<COLS> b_at(b + share * QUERIES8 * 16 * COLS, rows_first_row(), rows_first_half() + team_member() * N8);
    add_product<QUERIES8 / 2, COLS, B_PLANE>(c, [&](blocks_of<KEYS16> &a, int q) {
#pragma unroll
        for (int p = 0; p < PLANES; p++)
#pragma unroll
            for (int m = 0; m < KEYS16; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    a[p][m][e] = x[p][m][q][e];
    }, b_at);
}

/* As A operands. */
FA_DEVICE void pack_operand(operand &a, const float (&x)[KEYS16][QUERIES8][4])
{
#pragma unroll
    for (int m = 0; m < KEYS16; m++)
#pragma unroll
        for (int q = 0; q < QUERIES8 / 2; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                unsigned plane[PLANES];
                pack_planes(plane, x[m][2 * q + e / 2][e % 2 * 2], x[m][2 * q + e / 2][e % 2 * 2 + 1]);
#pragma unroll
                for (int p = 0; p < PLANES; p++)
                    a[p][m][q][e] = plane[p];
            }
}

/* To a tile of keys x queries in shared memory. */
FA_DEVICE void share_operand(unsigned to, const operand &a, int part)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < KEYS16; m++)
#pragma unroll
        for (int q = 0; q < QUERIES8 / 2; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row   = (key_warp() * KEYS16 + m) * 16 + (e & 1) * 8 + g;
                int chunk = (team_member() + part) * QUERIES8 + 2 * q + (e >> 1);
#pragma unroll
                for (int p = 0; p < PLANES; p++)
                    shared_store(to + p * S_PLANE + tile<FA_TILE_Q>::offset(row, chunk) + t * 4, a[p][m][q][e]);
            }
}

/* Lines 11-14 and dV, dK for a part of the query tile that lies at q and dout; dS^T goes to ds. */
template <bool MASKED>
FA_DEVICE void step_part(block_state &state, const fa_args &args, const work &w, unsigned shared, int part, unsigned q,
                         unsigned dout, unsigned ds, unsigned stats)
{
    int   key_row = key_warp() * KEYS16 * 16, query16 = (team_member() + part) * QUERIES8 / 2;
    float s[KEYS16][QUERIES8][4], dp[KEYS16][QUERIES8][4];
    multiply_rows<FA_HEAD_DIM / 16, K_PLANE, Q_PLANE, FA_HEAD_DIM>(s, {shared + key_row * FA_HEAD_DIM * 2, rows_first_row(), rows_first_half()},
                               {q + query16 * 16 * FA_HEAD_DIM * 2, halves_first_row(), halves_first_half()});
    multiply_rows<FA_HEAD_DIM_V / 16, V_PLANE, DO_PLANE, FA_HEAD_DIM_V>(dp, {shared + V_AT + key_row * FA_HEAD_DIM_V * 2, rows_first_row(), rows_first_half()},
                                 {dout + query16 * 16 * FA_HEAD_DIM_V * 2, halves_first_row(), halves_first_half()});
    probabilities<MASKED>(s, dp, args, w, state.at, part, stats);
    operand p_operand, ds_operand;
    pack_operand(p_operand, s);
    pack_operand(ds_operand, dp);
    share_operand(ds, ds_operand, part);
    if (TEAM > 1)
        share_operand(shared + P_AT, p_operand, part);
    int share = TEAM > 1 ? team_member() : part;
    if constexpr (TEAM == 4) {
        team_barrier();
        add_shared_product<TEAM, FA_HEAD_DIM_V, DO_PLANE>(state.dv, shared + P_AT + key_row * FA_TILE_Q * 2, dout, 0);
        add_shared_product<TEAM, FA_HEAD_DIM, Q_PLANE>(state.dk, ds + key_row * FA_TILE_Q * 2, q, 0);
        return;
    }
    /* What is in registers needs no barrier, and the others arrive meanwhile. */
    add_own_product<FA_HEAD_DIM_V, DO_PLANE>(state.dv, p_operand, dout, share);
    add_own_product<FA_HEAD_DIM, Q_PLANE>(state.dk, ds_operand, q, share);
    if constexpr (TEAM == 2) {
        team_barrier();
        add_shared_product<1, FA_HEAD_DIM_V, DO_PLANE>(state.dv, shared + P_AT + key_row * FA_TILE_Q * 2, dout, 1 - share);
        add_shared_product<1, FA_HEAD_DIM, Q_PLANE>(state.dk, ds + key_row * FA_TILE_Q * 2, q, 1 - share);
    }
}

#endif
