/* A block of backward_sm80.cu: how its warps share keys, queries and columns, what lies where in shared memory, products and probabilities. */
#ifndef FA_BACKWARD_BLOCK_SM80_CUH
#define FA_BACKWARD_BLOCK_SM80_CUH

#include "backward_work.cuh"
#include "softmax.cuh"
#include "tile.cuh"

constexpr bool BY_COLUMNS = FA_VARIANT == 3;
/* Warps that share their keys; four only where each gets a whole number of 16 columns. */
constexpr int  TEAM       = BY_COLUMNS ? 4 : FA_VARIANT == 2 && (FA_HEAD_DIM | FA_HEAD_DIM_V) % 64 != 0 ? 2 : 1 << FA_VARIANT;
constexpr int  KEY_WARPS  = FA_WARPS / TEAM;
constexpr int  KEYS16     = FA_TILE_K / (16 * KEY_WARPS); /* blocks of 16 keys of a warp */
constexpr int  COLS8      = FA_HEAD_DIM / 8 / TEAM;       /* of dK */
constexpr int  COLS8_V    = FA_HEAD_DIM_V / 8 / TEAM;     /* of dV */
/* A warp does its queries in two halves where S, dP, dK and dV together would not fit into the registers. */
constexpr int  PARTS      = TEAM == 1 && KEYS16 * (FA_TILE_Q + 4 * (COLS8 + COLS8_V)) > 192 ? 2 : 1;
/* Blocks of 8 queries of which a warp makes P^T and dS^T; of a tile of 16 queries two warps of four that share columns do. */
constexpr int  QUERIES8   = BY_COLUMNS && FA_TILE_Q < 8 * TEAM ? 1 : FA_TILE_Q / 8 / TEAM / PARTS;
constexpr int  QUERIES16  = FA_TILE_Q / 16;

/* dQ is cut into blocks of 16 DQ_ROWS16 rows by 8 DQ_COLS8 columns, one a warp; half of the warps have none where its blocks of 16 by 16 are too few for all. */
constexpr int DQ_WARPS      = FA_HEAD_DIM * FA_TILE_Q % (256 * FA_WARPS) == 0 ? FA_WARPS : FA_WARPS / 2;
constexpr int DQ_ROWS16     = FA_TILE_Q >= 32 && FA_HEAD_DIM % (16 * DQ_WARPS * 32 / FA_TILE_Q) == 0 ? 2 : 1;
constexpr int DQ_ROW_WARPS  = QUERIES16 / DQ_ROWS16;
constexpr int DQ_COLS8      = FA_HEAD_DIM / 8 / (DQ_WARPS / DQ_ROW_WARPS);
/* BY_COLUMNS: so many columns at once that their sums fit beside dK and dV. */
constexpr int DQ_PIECE8     = !BY_COLUMNS || DQ_COLS8 <= 8 ? DQ_COLS8 : DQ_COLS8 % 6 == 0 ? 6 : DQ_COLS8 % 4 == 0 ? 4 : 2;
constexpr int DQ_PIECES     = DQ_COLS8 / DQ_PIECE8;
static_assert(DQ_WARPS % DQ_ROW_WARPS == 0 && DQ_COLS8 % 2 == 0 && (BY_COLUMNS || QUERIES8 % 2 == 0) && COLS8 % 2 == 0 && COLS8_V % 2 == 0,
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
constexpr int SUMS_AT = STAT_AT + FA_STAGES * STAT_BYTES;
/* BY_COLUMNS: sums over a warp's own columns, which it leaves to who makes P^T and dS^T of them: of S^T, then of dP^T, of each team. */
constexpr int SUMS_BYTES = BY_COLUMNS ? (TEAM - 1) * FA_TILE_K * FA_TILE_Q * 4 : 0;

extern "C" __constant__ int fa_shared_bytes = SUMS_AT + 2 * SUMS_BYTES;

/* c = A B^T over 16 BLOCKS columns for A: KEYS16 blocks of rows of one tile, B: N8 blocks of rows of another. */
template <int BLOCKS, int A_PLANE, int B_PLANE, int COLS, int N8>
FA_DEVICE void multiply_rows(float (&c)[KEYS16][N8][4], const lane_addresses<COLS> &a_at, const lane_addresses<COLS> &b_at)
{
    clear(c);
#pragma unroll
    for (int d = 0; d < BLOCKS; d++) {
        blocks_of<KEYS16> a;
        load_rows<KEYS16, A_PLANE>(a, a_at, d);
        multiply_step<false>(c, a, [&](unsigned(&b)[4], int n, int p) { load_matrix(b, b_at.at(n, d) + p * B_PLANE); });
    }
}

/* Four that share keys are on four schedulers; two are on one (decision 0042). */
FA_DEVICE int key_warp() { return TEAM == 4 ? threadIdx.x / 32 / TEAM : threadIdx.x / 32 % KEY_WARPS; }
FA_DEVICE int team_member() { return TEAM == 4 ? threadIdx.x / 32 % TEAM : threadIdx.x / 32 / KEY_WARPS; }

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

/* The same for queries of team member `member` and the next COUNT - 1, from shared memory. b: the query tile from this warp's first column on, x: this team's keys of P^T or
 * dS^T. */
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
                        keep = numbers.keeps(args.dropout, h, (BY_COLUMNS ? col8 + n : n) % 2, e);
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

struct block_state {
    place at, before; /* this step's query tile; the one whose dS waits in shared memory */
    int   step;
    float dk[KEYS16][COLS8][4], dv[KEYS16][COLS8_V][4];
};

FA_DEVICE void team_barrier() { barrier<32 * TEAM>(1 + key_warp()); }

#endif
