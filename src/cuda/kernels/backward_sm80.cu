/*
 * FlashAttention-2 backward (Algorithm 2) by mma.sync, for every GPU from Ampere on; float16, bfloat16,
 * and float32 in three pieces of bfloat16 (numbers.cuh).
 *
 * A block owns FA_TILE_K keys of one key head, with K and V in shared memory and dK, dV in registers, and walks the
 * query tiles that see them, for each query head of its share of the group. Everything is computed transposed, keys down
 * and queries across, so that P^T and dS^T leave the tensor cores as the A operands of dV and dK:
 *
 *     S^T  = K Q^T              dV += P^T  dO        A step waits once: for Q and dO of this tile, which were copied
 *     P^T  = exp(S^T - LSE)     dK += dS^T Q         during the step before, and for dS of the step before, which all
 *     dP^T = V dO^T             dQ += dS   K         warps wrote to shared memory. dQ of the step before is then summed
 *     dS^T = P^T (dP^T - delta)                      over keys and added to float dQ in global memory.
 *
 * delta = rowsum(dO * O) comes from backward_rowsum.cu; backward_convert.cu makes the caller's dQ of the float one. A small
 * problem (FA_ONE_LAUNCH) would wait for their launches longer than for their work: there a step makes delta itself, and
 * the blocks of a key head are a cluster, which clears dQ before the first block adds to it and converts it after the last.
 *
 * FA_VARIANT 1 and 2: two or four warps share their keys: each computes P^T and dS^T for a part of the queries, and dK and
 * dV for a part of the columns; they meet in shared memory. A warp then has more keys and reads less of Q and dO, and dK
 * and dV of 16 rows fit into a thread's registers for head_dim above 128.
 * FA_STAGES: buffers of Q and dO.
 */
#include "backward_rows.cuh"
#include "backward_work.cuh"
#include "softmax.cuh"
#include "tile.cuh"

/* Warps that share their keys; four only where each gets a whole number of 16 columns. */
constexpr int TEAM      = FA_VARIANT == 2 && (FA_HEAD_DIM | FA_HEAD_DIM_V) % 64 != 0 ? 2 : 1 << FA_VARIANT;
constexpr int KEY_WARPS = FA_WARPS / TEAM;
constexpr int KEYS16    = FA_TILE_K / (16 * KEY_WARPS); /* blocks of 16 keys of a warp */
constexpr int COLS8     = FA_HEAD_DIM / 8 / TEAM;       /* of dK */
constexpr int COLS8_V   = FA_HEAD_DIM_V / 8 / TEAM;     /* of dV */
/* A warp does its queries in two halves where S, dP, dK and dV together would not fit into the registers. */
constexpr int PARTS     = TEAM == 1 && KEYS16 * (FA_TILE_Q + 4 * (COLS8 + COLS8_V)) > 192 ? 2 : 1;
constexpr int QUERIES8  = FA_TILE_Q / 8 / TEAM / PARTS;       /* blocks of 8 queries of a warp's S^T */
constexpr int QUERIES16 = FA_TILE_Q / 16;

/* dQ is cut into blocks of 16 DQ_ROWS16 rows by 8 DQ_COLS8 columns, one a warp; half of the warps have none where its blocks of 16 by 16 are too few for all. */
constexpr int DQ_WARPS      = FA_HEAD_DIM * FA_TILE_Q % (256 * FA_WARPS) == 0 ? FA_WARPS : FA_WARPS / 2;
constexpr int DQ_ROWS16     = FA_TILE_Q >= 32 && FA_HEAD_DIM % (16 * DQ_WARPS * 32 / FA_TILE_Q) == 0 ? 2 : 1;
constexpr int DQ_ROW_WARPS  = QUERIES16 / DQ_ROWS16;
constexpr int DQ_COLS8      = FA_HEAD_DIM / 8 / (DQ_WARPS / DQ_ROW_WARPS);
static_assert(DQ_WARPS % DQ_ROW_WARPS == 0 && DQ_COLS8 % 2 == 0 && QUERIES8 % 2 == 0 && COLS8 % 2 == 0 && COLS8_V % 2 == 0,
              "the warps do not divide the tile");

constexpr int K_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM, V_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM_V;
constexpr int Q_PLANE = FA_TILE_Q * 2 * FA_HEAD_DIM, DO_PLANE = FA_TILE_Q * 2 * FA_HEAD_DIM_V;
constexpr int S_PLANE = FA_TILE_K * 2 * FA_TILE_Q; /* of dS^T, or P^T */
constexpr int K_BYTES = PLANES * K_PLANE, V_BYTES = PLANES * V_PLANE, Q_BYTES = PLANES * Q_PLANE;
constexpr int DO_BYTES = PLANES * DO_PLANE, S_BYTES = PLANES * S_PLANE;
constexpr int STAT_BYTES = 2 * 4 * FA_TILE_Q;      /* LSE and delta of a tile */

constexpr int V_AT = K_BYTES, Q_AT = V_AT + V_BYTES, DO_AT = Q_AT + FA_STAGES * Q_BYTES;
constexpr int DS_AT   = DO_AT + FA_STAGES * DO_BYTES;
constexpr int P_AT    = DS_AT + 2 * S_BYTES;
constexpr int STAT_AT = P_AT + (TEAM > 1 ? S_BYTES : 0);

extern "C" __constant__ int fa_shared_bytes = STAT_AT + FA_STAGES * STAT_BYTES;

/* Q, dO, LSE and delta of a query tile to buffer `stage`. */
FA_DEVICE void copy_queries(const fa_args &args, const work &w, unsigned shared, int stage, place at)
{
    int      first = at.tile * FA_TILE_Q, count = w.seq.seqlen_q - first;
    rows_of  q     = {w.q + at.head * args.q.stride[2] + first * args.q.stride[1], args.q.stride[1]};
    fa_i64   dout_offset = at.head * args.dout.stride[2] + first * args.dout.stride[1];
    unsigned q_to = shared + Q_AT + stage * Q_BYTES, dout_to = shared + DO_AT + stage * DO_BYTES;
    copy_tile<FA_TILE_Q, FA_HEAD_DIM>(q_to, q, 0, count, args.head_dim, args.q.stride[3]);
    if constexpr (FA_DTYPE_DOUT == FA_DTYPE) {
        rows_of dout = {(const fa_element *)w.dout + dout_offset, args.dout.stride[1]};
        copy_tile<FA_TILE_Q, FA_HEAD_DIM_V>(dout_to, dout, 0, count, args.head_dim_v, args.dout.stride[3]);
    } else
        convert_tile<FA_TILE_Q, FA_HEAD_DIM_V>(dout_to, (const float *)w.dout + dout_offset, args.dout.stride[1],
                                               args.dout.stride[3], count, args.head_dim_v);
    static_assert(THREADS >= FA_TILE_Q, "a thread for each query");
    if (threadIdx.x < FA_TILE_Q) {
        int      i     = threadIdx.x;
        unsigned to    = shared + STAT_AT + stage * STAT_BYTES + i * 4;
        bool     valid = i < count;
        copy_async_4(to, w.lse + at.head * args.lse.stride[1] + (first + i) * args.lse.stride[2], valid);
        if (!FA_ONE_LAUNCH)
            copy_async_4(to + 4 * FA_TILE_Q, w.delta + head_rows(args, at.head) + first + i, valid);
    }
    if constexpr (FA_ONE_LAUNCH) {
        constexpr int LANES = THREADS / FA_TILE_Q;
        int           i     = threadIdx.x / LANES;
        float         delta = row_delta<LANES>(args, w.seq, at.head, first + i);
        if (threadIdx.x % LANES == 0)
            shared_store(shared + STAT_AT + stage * STAT_BYTES + (FA_TILE_Q + i) * 4, delta);
    }
}

/* c = A B^T for A: KEYS16 blocks of rows of one tile, B: QUERIES8 blocks of rows of another. */
template <int COLS, int A_PLANE, int B_PLANE>
FA_DEVICE void multiply_rows(float (&c)[KEYS16][QUERIES8][4], const lane_addresses<COLS> &a_at,
                             const lane_addresses<COLS> &b_at)
{
    clear(c);
#pragma unroll
    for (int d = 0; d < COLS / 16; d++) {
        blocks_of<KEYS16> a;
        load_rows<KEYS16, A_PLANE>(a, a_at, d);
        multiply_step<false>(c, a, [&](unsigned(&b)[4], int n, int p) { load_matrix(b, b_at.at(n, d) + p * B_PLANE); });
    }
}

/* Four that share keys are on four schedulers; two are on one (decision 0042). */
FA_DEVICE int key_warp() { return TEAM == 4 ? threadIdx.x / 32 / TEAM : threadIdx.x / 32 % KEY_WARPS; }
FA_DEVICE int team_member() { return TEAM == 4 ? threadIdx.x / 32 % TEAM : threadIdx.x / 32 / KEY_WARPS; }

using operand = unsigned[PLANES][KEYS16][QUERIES8 / 2][4]; /* P^T or dS^T as A */

/* c += X^T B over 16 COUNT queries. load(a, q): X^T (P^T or dS^T, keys down) of the q-th 16 of them; b_at: their rows of a
 * query tile. */
template <int COUNT, int COLS, int B_PLANE, int N8, class LOAD>
FA_DEVICE void add_product(float (&c)[KEYS16][N8][4], const LOAD &load, const lane_addresses<COLS> &b_at)
{
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
        blocks_of<KEYS16> a;
        load(a, q);
        multiply_step<true>(c, a, [&](unsigned(&b)[4], int n, int p) {
            load_matrix_transposed(b, b_at.at(q, n) + p * B_PLANE);
        });
    }
}

/* The same for this warp's own queries, from its registers, and for those of team member `member` and the next COUNT - 1,
 * from shared memory.
 * b: the query tile from this warp's first column on, x: this team's keys of P^T or dS^T. */
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

template <int COUNT, int COLS, int B_PLANE, int N8>
FA_DEVICE void add_shared_product(float (&c)[KEYS16][N8][4], unsigned x, unsigned b, int member)
{
    lane_addresses<COLS> b_at(b + member * QUERIES8 * 16 * COLS, rows_first_row(), rows_first_half() + team_member() * N8);
    lane_addresses<FA_TILE_Q> x_at(x, rows_first_row(), rows_first_half() + member * QUERIES8);
    add_product<COUNT * QUERIES8 / 2, COLS, B_PLANE>(
        c, [&](blocks_of<KEYS16> &a, int q) { load_rows<KEYS16, S_PLANE>(a, x_at, q); }, b_at);
}

/* Which elements of P^T dropout keeps. Transposed, a lane's elements of a block of 16 keys x 16 queries come from two
 * calls of the generator, one for each parity of the query. */
struct kept_numbers {
    fa_philox of[2];
    int       g;
    /* key half b, query half a, query parity e */
    __device__ __forceinline__ bool keeps(const fa_dropout &dropout, int b, int a, int e) const
    {
        fa_u32 odd = fa_dropout_number(of[e], a + 2 + 4 * b), even = fa_dropout_number(of[e], a + 4 * b);
        return (g & 1 ? odd : even) >= dropout.threshold;
    }
};

FA_DEVICE kept_numbers kept_numbers_of(const fa_args &args, int batch_head, int query16, int key16)
{
    int          lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    kept_numbers numbers;
    numbers.g = g;
#pragma unroll
    for (int e = 0; e < 2; e++)
        numbers.of[e] = fa_dropout_block(&args.dropout, batch_head, query16, key16, (2 * t + e) * 4 + g / 2);
    return numbers;
}

/*
 * From S^T and dP^T to P^T and dS^T, in place (lines 11 and 14). In an edge tile what is masked becomes exactly 0 in
 * both, whatever Q, dO, LSE and delta hold.
 */
template <bool MASKED>
FA_DEVICE void probabilities(float (&s)[KEYS16][QUERIES8][4], float (&dp)[KEYS16][QUERIES8][4], const fa_args &args,
                             const work &w, place at, int part, unsigned stats)
{
    int         lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int         batch_head = w.b * args.heads_q + at.head, col8 = (team_member() + part) * QUERIES8;
    int         first_query = at.tile * FA_TILE_Q + col8 * 8 + 2 * t;
    score_terms terms       = score_terms_of(args, w.b, at.head);
    seen_words  seen[KEYS16];
#if FA_MASK == FA_MASK_LISTED
#pragma unroll
    for (int m = 0; m < (MASKED ? KEYS16 : 0); m++)
        seen[m] = load_seen<FA_TILE_K>(args, at.mask, (key_warp() * KEYS16 + m) * 16 + g);
#endif
#pragma unroll
    for (int n = 0; n < QUERIES8; n++) {
        float2 lse = shared_load_float2(stats + ((col8 + n) * 8 + 2 * t) * 4);
        float2 delta = shared_load_float2(stats + (FA_TILE_Q + (col8 + n) * 8 + 2 * t) * 4);
#pragma unroll
        for (int m = 0; m < KEYS16; m++) {
            kept_numbers numbers;
            if constexpr (FA_HAS_DROPOUT)
                numbers = kept_numbers_of(args, batch_head, (at.tile * FA_TILE_Q + (col8 + n) * 8) / 16,
                                          (w.first_k + (key_warp() * KEYS16 + m) * 16) / 16);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int        j      = w.first_k + (key_warp() * KEYS16 + m) * 16 + h * 8 + g;
                row_limits limits = query_limits(args, w, j);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &p = s[m][n][2 * h + e], &ds = dp[m][n][2 * h + e];
                    int    i = first_query + n * 8 + e;
                    float  lse_log2 = (e ? lse.y : lse.x) * FA_LOG2E, row = e ? delta.y : delta.x, capped = 0.0f;
                    if constexpr (MODIFIED)
                        p = exp2_fast(modified_score(args, terms, w.seq, p, i, j, bias_of(args, terms, w.seq, i, j), capped) - lse_log2);
                    else if constexpr (FA_DTYPE == FA_F32) /* the difference first: a large LSE in log2 would be rounded */
                        p = exp2_fast((p * args.scale - (e ? lse.y : lse.x)) * FA_LOG2E);
                    else
                        p = exp2_fast(p * args.scale_log2 - lse_log2);
                    bool visible = true;
                    if constexpr (MASKED) {
                        visible = LISTED ? seen[m].of[h] >> (2 * (col8 + n) + e) & 1 : i >= limits.first && i <= limits.last;
                        if (FA_HAS_SLICES && !LISTED && visible)
                            visible = slices_see(args, w.slices, i, j);
                    }
                    if (FA_HAS_BIAS) /* a row of -inf alone has LSE -inf */
                        visible = visible && lse_log2 != -infinity();
                    if (MASKED || FA_HAS_BIAS)
                        p = visible ? p : 0.0f;
                    bool keep = true;
                    if constexpr (FA_HAS_DROPOUT) {
                        keep = numbers.keeps(args.dropout, h, n % 2, e);
                        ds   = keep ? ds * args.dropout.keep_scale : 0.0f;
                    }
                    ds = p * (ds - row);
                    if (MASKED || FA_HAS_BIAS)
                        ds = visible ? ds : 0.0f;
                    if constexpr (FA_HAS_DBIAS)
                        if (i < w.seq.seqlen_q && j < w.seq.seqlen_k && ds != 0.0f)
                            reduce_add((float *)args.dbias.data + w.b * args.dbias.stride[0] +
                                           at.head * args.dbias.stride[1] + i * args.dbias.stride[2] +
                                           j * args.dbias.stride[3], ds);
                    if constexpr (FA_HAS_SOFTCAP)
                        ds *= 1.0f - capped * capped;
                    if constexpr (FA_HAS_DROPOUT)
                        p = keep ? p : 0.0f;
                    /* Q and dO of an edge tile have lost their Inf and NaN (copies are cleared), dS gets them back by
                     * delta; dV gets them here. */
                    if (MASKED && !finite(row))
                        p += visible ? row * 0.0f : 0.0f;
                }
            }
        }
    }
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

/* Waits until as many key tiles have been added to this query tile of dQ as come before this block's. */
FA_DEVICE int *turn_of(const fa_args &args, const work &w, place at)
{
    return args.dq_turn + ((fa_i64)w.b * args.heads_q + at.head) * args.tiles_q + at.tile;
}

FA_DEVICE void wait_for_turn(const fa_args &args, const work &w, place at)
{
    if (threadIdx.x == 0) {
        int wanted = turn_number(args, w, at.tile), now;
        do
            now = load_acquire(turn_of(args, w, at));
        while (now < wanted);
    }
    __syncthreads();
}

FA_DEVICE void end_turn(const fa_args &args, const work &w, place at)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        add_release(turn_of(args, w, at), 1);
}

/* dQ += dS K (line 15) of the step before, from dS^T in shared memory. */
FA_DEVICE void add_dq(const fa_args &args, const work &w, unsigned shared, int buffer, place at)
{
    if (!args.dq.data)
        return;
    int warp = threadIdx.x / 32, row16 = warp % DQ_ROW_WARPS * DQ_ROWS16, col8 = warp / DQ_ROW_WARPS * DQ_COLS8;
    lane_addresses<FA_TILE_Q>   ds_at(shared + DS_AT + buffer * S_BYTES, halves_first_row(),
                                      halves_first_half() + 2 * row16);
    lane_addresses<FA_HEAD_DIM> k_at(shared, rows_first_row(), rows_first_half() + col8);
    float                       dq[DQ_ROWS16][DQ_COLS8][4];
    clear(dq);
    bool makes = DQ_WARPS == FA_WARPS || warp < DQ_WARPS;
#pragma unroll
    for (int k = 0; makes && k < FA_TILE_K / 16; k++) {
        blocks_of<DQ_ROWS16> a;
#pragma unroll
        for (int p = 0; p < PLANES; p++)
#pragma unroll
            for (int m = 0; m < DQ_ROWS16; m++)
                load_matrix_transposed(a[p][m], ds_at.at(k, m) + p * S_PLANE);
        multiply_step<false>(dq, a, [&](unsigned(&b)[4], int n, int p) {
            load_matrix_transposed(b, k_at.at(k, n) + p * K_PLANE);
        });
    }
    if (FA_DETERMINISTIC)
        wait_for_turn(args, w, at);
    int    first = at.tile * FA_TILE_Q + row16 * 16;
    float *to    = w.dq + (head_rows(args, at.head) + first) * FA_HEAD_DIM + col8 * 8;
    if (makes)
        accumulate<DQ_ROWS16, DQ_COLS8>(to, FA_HEAD_DIM, dq, w.seq.seqlen_q - first);
    if (FA_DETERMINISTIC)
        end_turn(args, w, at);
}

struct block_state {
    place at, before; /* this step's query tile; the one whose dS waits in shared memory */
    int   step;
    float dk[KEYS16][COLS8][4], dv[KEYS16][COLS8_V][4];
};

FA_DEVICE void team_barrier() { barrier<32 * TEAM>(1 + key_warp()); }

/* Lines 11-14 and dV, dK for a part of the query tile that lies at q and dout; dS^T goes to ds. */
template <bool MASKED>
FA_DEVICE void step_part(block_state &state, const fa_args &args, const work &w, unsigned shared, int part, unsigned q,
                         unsigned dout, unsigned ds, unsigned stats)
{
    int   key_row = key_warp() * KEYS16 * 16, query16 = (team_member() + part) * QUERIES8 / 2;
    float s[KEYS16][QUERIES8][4], dp[KEYS16][QUERIES8][4];
    multiply_rows<FA_HEAD_DIM, K_PLANE, Q_PLANE>(s, {shared + key_row * FA_HEAD_DIM * 2, rows_first_row(), rows_first_half()},
                               {q + query16 * 16 * FA_HEAD_DIM * 2, halves_first_row(), halves_first_half()});
    multiply_rows<FA_HEAD_DIM_V, V_PLANE, DO_PLANE>(dp, {shared + V_AT + key_row * FA_HEAD_DIM_V * 2, rows_first_row(), rows_first_half()},
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

template <bool MASKED> FA_DEVICE void step(block_state &state, const fa_args &args, const work &w, unsigned shared)
{
    constexpr bool CLEAR = MASKED && (FA_MASK != FA_MASK_NONE || FA_HAS_SLICES);
    int            stage = FA_STAGES > 1 ? state.step & 1 : 0, buffer = state.step & 1;
    unsigned       q = shared + Q_AT + stage * Q_BYTES, dout = shared + DO_AT + stage * DO_BYTES;
    unsigned       ds = shared + DS_AT + buffer * S_BYTES;
    place          next = settle(args, w, next_place(w, state.at));
    copy_wait<0>();
    if (CLEAR) {
        clear_nonfinite<FA_TILE_Q, FA_HEAD_DIM>(q);
        clear_nonfinite<FA_TILE_Q, FA_HEAD_DIM_V>(dout);
    }
    __syncthreads();
    if (FA_STAGES > 1) {
        if (inside(w, next))
            copy_queries(args, w, shared, stage ^ 1, next);
        copy_commit();
    }
    /* Of two warps on a scheduler one adds dQ while the other makes P and dS. Turns are taken by all at once. */
    bool late = TEAM == 4 && !FA_DETERMINISTIC && threadIdx.x / 32 >= FA_WARPS / 2;
    if (state.step > 0 && !late)
        add_dq(args, w, shared, buffer ^ 1, state.before);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        step_part<MASKED>(state, args, w, shared, part, q, dout, ds, shared + STAT_AT + stage * STAT_BYTES);
    if (state.step > 0 && late)
        add_dq(args, w, shared, buffer ^ 1, state.before);
    if (FA_STAGES == 1) {
        __syncthreads();
        if (inside(w, next))
            copy_queries(args, w, shared, 0, next);
        copy_commit();
    } /* P^T and the other buffers are overwritten after the next step's barrier */
    state.before = state.at;
    state.at     = next;
    state.step++;
}

/* Rows first_key ... of dK or dV from a warp's registers. */
template <int COLS, int N8>
FA_DEVICE void store_gradient(float (&acc)[KEYS16][N8][4], float factor, const fa_view &view, float *sum, const fa_args &args,
                              const work &w, unsigned staging, int cols)
{
    int   first = w.first_k + key_warp() * KEYS16 * 16, rows = w.seq.rows_k - first, col = team_member() * N8 * 8;
    float scale[2 * KEYS16];
    if (!view.data)
        return;
#pragma unroll
    for (int r = 0; r < 2 * KEYS16; r++)
        scale[r] = factor;
    if constexpr (FA_HAS_KV_ACCUM) {
        fa_i64 token = (fa_i64)w.seq.kv_entry * args.kv_rows + w.seq.kv_row + first;
        float *to    = sum + ((fa_i64)w.kv_head * args.kv_entries * args.kv_rows + token) * COLS + col;
        accumulate<KEYS16, N8>(to, COLS, acc, rows);
        return;
    }
    fa_i64 offset = w.seq.kv_entry * view.stride[0] + (w.seq.kv_row + first) * view.stride[1] + w.kv_head * view.stride[2] +
                    col * view.stride[3];
    if (view.dtype == FA_F32)
        store_accumulator<FA_F32, KEYS16, N8>(acc, scale, staging, (float *)view.data + offset, view.stride[1],
                                              view.stride[3], rows, cols - col);
    else
        store_accumulator<FA_DTYPE, KEYS16, N8>(acc, scale, staging, (fa_element *)view.data + offset, view.stride[1],
                                                view.stride[3], rows, cols - col);
}

/* FA_ONE_LAUNCH: calls row(head, i) for this cluster's query rows, LANES threads a row and each row in one block. */
template <int LANES, class ROW> FA_DEVICE void deal_query_rows(const fa_args &args, const work &w, const ROW &row)
{
    constexpr int AT_ONCE = THREADS / LANES;
    int           block = w.first_k / FA_TILE_K, count = args.dq.data ? w.num_heads * w.seq.rows_q : 0;
    for (int r = block * AT_ONCE + threadIdx.x / LANES; r < count; r += args.tiles_k * AT_ONCE)
        row(w.first_head + r / w.seq.rows_q, r % w.seq.rows_q);
}

constexpr int ROW_LANES = FA_HEAD_DIM > 128 ? 32 : FA_HEAD_DIM > 64 ? 16 : 8;

FA_DEVICE void clear_dq(const fa_args &args, const work &w)
{
    deal_query_rows<ROW_LANES>(args, w, [&](int head, int i) {
        for (int col = threadIdx.x % ROW_LANES * 4; col < FA_HEAD_DIM; col += ROW_LANES * 4)
            *(float4 *)(w.dq + (head_rows(args, head) + i) * FA_HEAD_DIM + col) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (FA_DETERMINISTIC && i % FA_TILE_Q == 0 && threadIdx.x % ROW_LANES == 0)
            *turn_of(args, w, {head, i / FA_TILE_Q}) = 0;
    });
}

FA_DEVICE void convert_dq(const fa_args &args, const work &w)
{
    deal_query_rows<ROW_LANES>(args, w, [&](int head, int i) {
        fa_i64 row = w.seq.q_row + i;
        convert_row<ROW_LANES>(args.dq,
                               w.seq.q_entry * args.dq.stride[0] + row * args.dq.stride[1] + head * args.dq.stride[2],
                               w.dq + (head_rows(args, head) + i) * FA_HEAD_DIM, args.scale, args.head_dim);
    });
}

/* dK and dV of the block's keys, and its part of dQ. */
FA_DEVICE void run(const fa_args &args, const work &w, unsigned shared)
{
    block_state state;
    clear(state.dk);
    clear(state.dv);
    state.step = 0;
    bool some  = w.tiles.begin < w.tiles.end;
    if (some) /* among no tiles it would look for ever */
        state.at = settle(args, w, first_place(w));
    if (some && inside(w, state.at)) {
        int     begin = w.keys.begin - w.first_k, end = w.keys.end - w.first_k;
        fa_i64  row = w.seq.kv_row + w.first_k;
        rows_of k   = {(const fa_element *)args.k.data + w.seq.kv_entry * args.k.stride[0] + row * args.k.stride[1] +
                           w.kv_head * args.k.stride[2],
                       args.k.stride[1]};
        rows_of v   = {(const fa_element *)args.v.data + w.seq.kv_entry * args.v.stride[0] + row * args.v.stride[1] +
                           w.kv_head * args.v.stride[2],
                       args.v.stride[1]};
        copy_tile<FA_TILE_K, FA_HEAD_DIM>(shared, k, begin, end, args.head_dim, args.k.stride[3]);
        copy_tile<FA_TILE_K, FA_HEAD_DIM_V>(shared + V_AT, v, begin, end, args.head_dim_v, args.v.stride[3]);
        copy_queries(args, w, shared, 0, state.at);
        copy_commit();
        if (FA_MASK != FA_MASK_NONE || FA_HAS_SLICES) {
            /* a query that does not see a key has dS = 0, and 0 * NaN of K would reach its dQ; who sees it has LSE NaN */
            copy_wait<0>();
            clear_nonfinite<FA_TILE_K, FA_HEAD_DIM>(shared);
        }
        while (inside(w, state.at)) {
            while (inside(w, state.at) && clean_place(args, w, state.at))
                step<false>(state, args, w, shared);
            if (inside(w, state.at))
                step<true>(state, args, w, shared);
        }
        copy_wait<0>();
        __syncthreads();
        add_dq(args, w, shared, (state.step & 1) ^ 1, state.before);
        __syncthreads(); /* K and V become staging */
    }
    unsigned staging = shared + threadIdx.x / 32 * KEYS16 * 16 * (COLS8 > COLS8_V ? COLS8 : COLS8_V) * 16;
    store_gradient<FA_HEAD_DIM, COLS8>(state.dk, args.scale, args.dk, args.dk_accum, args, w, staging, args.head_dim);
    float v_factor = FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f;
    store_gradient<FA_HEAD_DIM_V, COLS8_V>(state.dv, v_factor, args.dv, args.dv_accum, args, w, staging, args.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(THREADS, FA_MIN_BLOCKS) backward_sm80(const __grid_constant__ fa_args args)
{
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ work w; /* the same for all threads: in shared memory, registers are for S, dP, dK and dV */
    if (FA_DTYPE == FA_F32 && args.lost && !*args.lost) /* backward_f32_sm90 has done it */
        return;
    if (threadIdx.x == 0) {
        unsigned   tiles = FA_DTYPE == FA_F32 ? (args.max_seqlen_k + FA_TILE_K - 1) / FA_TILE_K : args.tiles_k; /* behind backward_f32_sm90 args.tiles_k counts its */
        grid_place at    = {blockIdx.x % tiles, blockIdx.x / tiles};
        if (!FA_ONE_LAUNCH) /* there the tiles of a head are a cluster, which has neighbouring numbers */
            at = grid_place_of<FA_TILE_K>(blockIdx.x, tiles);
        w = work_of(args, at);
    }
    __syncthreads();
    if (FA_ONE_LAUNCH) {
        clear_dq(args, w);
        cluster_barrier();
    }
    if (w.first_k < w.seq.rows_k)
        run(args, w, shared_address(shared_memory));
    if (FA_ONE_LAUNCH) {
        cluster_barrier();
        convert_dq(args, w);
    }
}
