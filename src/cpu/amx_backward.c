/*
 * Backward on AMX: one tile of queries against one tile of keys, all five products.
 *
 * Scores and their gradients are computed transposed, S^T = K Q^T and dP^T = V dO^T, 32 keys by 32 queries a step. Two
 * vectors of one key and 2 x 16 queries then make a row of the left operands P^T and dS^T by a shift and a blend, and
 * LSE and Delta are vectors. dS, the left operand of dQ, is dS^T turned by one 16 x 16 transpose of pairs.
 *
 *     for each strip of 32 keys
 *         for each 32 queries      the next step's S^T and dP^T (tiles), between them this step's P and dS (vectors)
 *         dV += P^T dO, dK += dS^T Q     over all queries of the tile, accumulators in tiles
 *     dQ += dS K                         over all keys of the tile
 *
 * P is cut to bfloat16 as in amx_forward.c; dS, made from the same P, is right on average too.
 */
#include "cpu/amx_multiply.h"

enum { STEP = 32, MAX_ROWS = 256, MAX_KEYS = 256 };

/* ---- memory ---- */

typedef struct scratch {
    _Alignas(64) float s[2][4 * FA_AMX_TILE_FLOATS]; /* S^T of a step: tile (key half) * 2 + query half; two steps */
    _Alignas(64) float dp[2][4 * FA_AMX_TILE_FLOATS];
    _Alignas(64) uint16_t p_t[2 * MAX_ROWS / STEP][FA_AMX_TILE_HALVES]; /* left operands of 2 x 16 keys */
    _Alignas(64) uint16_t ds_t[2 * MAX_ROWS / STEP][FA_AMX_TILE_HALVES];
    _Alignas(64) uint16_t ds[]; /* left operand [rows / 16][keys / 32] */
} scratch;

size_t fa_amx_backward_scratch(int rows, int keys, int head_dim, int head_dim_v)
{
    (void)head_dim, (void)head_dim_v;
    return sizeof(scratch) + (size_t)((rows + 15) / 16) * (size_t)((keys + 31) / 32) * FA_AMX_TILE;
}

/* ---- the vector stage ---- */

typedef struct gradient {
    constants    k;
    const float *lse_log2, *delta; /* of the step's 32 queries */
    const float *s, *dp;
    uint16_t    *p_t[2], *ds_t[2]; /* where the rows of keys 0 .. 15 and 16 .. 31 go */
    __m512i      turn[2][16];      /* pairs of dS^T, keys j and j + 16, of each half of the queries */
} gradient;

/* One vector: 16 queries of one key. */
FA_AMX_INLINE void gradient_vector(const gradient *g, int tile, int row, __m512 *p, __m512 *ds)
{
    __m512 s     = _mm512_load_ps(g->s + tile * FA_AMX_TILE_FLOATS + 16 * row);
    __m512 dp    = _mm512_load_ps(g->dp + tile * FA_AMX_TILE_FLOATS + 16 * row);
    __m512 shift = _mm512_sub_ps(_mm512_set1_ps(CUT_LOG2), _mm512_loadu_ps(g->lse_log2 + tile % 2 * 16));
    __m512 delta = _mm512_loadu_ps(g->delta + tile % 2 * 16);
    *p           = exp2_of(s, shift, &g->k);
    *ds = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(*p, _mm512_setzero_ps(), _CMP_NEQ_UQ), *p, _mm512_sub_ps(dp, delta));
}

/* Keys `row` and `row` + 16 of a step. */
FA_AMX_INLINE void gradient_row(gradient *g, int row)
{
    __m512 p[4], ds[4];
    _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) gradient_vector(g, t, row, &p[t], &ds[t]);
    _mm512_store_si512(g->p_t[0] + 32 * row, fa_amx_pair(p[0], p[1]));
    _mm512_store_si512(g->p_t[1] + 32 * row, fa_amx_pair(p[2], p[3]));
    _mm512_store_si512(g->ds_t[0] + 32 * row, fa_amx_pair(ds[0], ds[1]));
    _mm512_store_si512(g->ds_t[1] + 32 * row, fa_amx_pair(ds[2], ds[3]));
    g->turn[0][row] = fa_amx_pair(ds[0], ds[2]);
    g->turn[1][row] = fa_amx_pair(ds[1], ds[3]);
}

/* ---- the tile stage of a step ---- */

/* C[2][2] tiles = A[2][KS] B[2][KS]: dot number n of 4 KS, and after the last the stores. */
FA_AMX_INLINE void product_part(int n, float *c, const char *a, const char *b, int KS)
{
    int k = n / 4, corner = n % 4;
    if (corner == 0) {
        if (k == 0) {
            TILE_ZERO(0);
            TILE_ZERO(1);
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
        TILE_LOAD(4, a + k * FA_AMX_TILE, 64);
        TILE_LOAD(6, b + k * FA_AMX_TILE, 64);
        TILE_DOT(0, 4, 6);
    } else if (corner == 1) {
        TILE_LOAD(7, b + (KS + k) * FA_AMX_TILE, 64);
        TILE_DOT(1, 4, 7);
    } else if (corner == 2) {
        TILE_LOAD(5, a + (KS + k) * FA_AMX_TILE, 64);
        TILE_DOT(2, 5, 6);
    } else {
        TILE_DOT(3, 5, 7);
    }
    if (n == 4 * KS - 1) {
        TILE_STORE(0, c, 64);
        TILE_STORE(1, c + FA_AMX_TILE_FLOATS, 64);
        TILE_STORE(2, c + 2 * FA_AMX_TILE_FLOATS, 64);
        TILE_STORE(3, c + 3 * FA_AMX_TILE_FLOATS, 64);
    }
}

/* The operands of a step's S^T and dP^T; k NULL: there is no next step. */
typedef struct next_step {
    const char *k, *q, *v, *dout;
    float      *s, *dp;
} next_step;

FA_AMX_INLINE void run_step(gradient *g, const next_step *next, int KS, int VS)
{
    const int dots = 4 * KS + 4 * VS;
    int       done = 0;
    _Pragma("GCC unroll 16") for (int row = 0; row < 16; row++)
    {
        if (g)
            gradient_row(g, row);
        _Pragma("GCC unroll 8") for (; done < (row + 1) * dots / 16; done++)
        {
            if (!next->k)
                continue;
            if (done < 4 * KS)
                product_part(done, next->s, next->k, next->q, KS);
            else
                product_part(done - 4 * KS, next->dp, next->v, next->dout, VS);
        }
    }
}

/* ---- a tile ---- */

typedef struct walk {
    const fa_backward_block *block;
    scratch                 *own;
    constants                k;
    int                      depth, depth_v;                       /* steps of 32 columns */
    int                      columns, columns_v;                   /* tiles of 16 */
    const char              *k_left, *v_left, *q_keys, *dout_keys; /* turned forms */
} walk;

FA_AMX_INLINE next_step step_at(const walk *w, int strip, int group, int parity)
{
    scratch *own = w->own;
    if (group * STEP >= w->block->rows)
        return (next_step){0};
    return (next_step){w->k_left + (int64_t)strip * 2 * w->depth * FA_AMX_TILE,
                       w->q_keys + (int64_t)group * 2 * w->depth * FA_AMX_TILE,
                       w->v_left + (int64_t)strip * 2 * w->depth_v * FA_AMX_TILE,
                       w->dout_keys + (int64_t)group * 2 * w->depth_v * FA_AMX_TILE,
                       own->s[parity],
                       own->dp[parity]};
}

/* dS of a step, turned, as left operand of dQ. */
FA_AMX_INLINE void store_turned(const walk *w, gradient *g, int strip, int group)
{
    int strips = w->block->keys / STEP;
    for (int half = 0; half < 2; half++) {
        uint16_t *out = w->own->ds + ((int64_t)(group * 2 + half) * strips + strip) * FA_AMX_TILE_HALVES;
        fa_amx_transpose(g->turn[half]);
        _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++) _mm512_store_si512(out + 32 * r, g->turn[half][r]);
    }
}

FA_AMX_INLINE void run_strip(const walk *w, int strip, int KS, int VS)
{
    const fa_backward_block *b      = w->block;
    scratch                 *own    = w->own;
    int                      groups = b->rows / STEP;
    next_step                next   = step_at(w, strip, 0, 0);
    run_step(NULL, &next, KS, VS);
    for (int group = 0; group < groups; group++) {
        gradient g = {.k        = w->k,
                      .lse_log2 = b->lse_log2 + group * STEP,
                      .delta    = b->delta + group * STEP,
                      .s        = own->s[group & 1],
                      .dp       = own->dp[group & 1],
                      .p_t      = {own->p_t[group], own->p_t[groups + group]},
                      .ds_t     = {own->ds_t[group], own->ds_t[groups + group]}};
        next       = step_at(w, strip, group + 1, (group + 1) & 1);
        run_step(&g, &next, KS, VS);
        store_turned(w, &g, strip, group);
    }
    int64_t groups_bytes = (int64_t)groups * FA_AMX_TILE;
    matrix  dv           = {b->dv + (int64_t)strip * STEP * b->ldv, b->ldv, STEP, w->columns_v * 16};
    matrix  dk           = {b->dk + (int64_t)strip * STEP * b->ldk, b->ldk, STEP, w->columns * 16};
    operand p_t          = {(const char *)own->p_t, groups_bytes, FA_AMX_TILE};
    operand ds_t         = {(const char *)own->ds_t, groups_bytes, FA_AMX_TILE};
    operand dout         = {b->dout_right, FA_AMX_TILE, (int64_t)w->columns_v * FA_AMX_TILE};
    operand q            = {b->q_right, FA_AMX_TILE, (int64_t)w->columns * FA_AMX_TILE};
    multiply(&dv, &p_t, &dout, groups, 1, true);
    multiply(&dk, &ds_t, &q, groups, 1, true);
}

FA_AMX_INLINE void run_tile(const walk *w, int KS, int VS)
{
    const fa_backward_block *b      = w->block;
    int64_t                  strips = b->keys / STEP;
    for (int strip = 0; strip < strips; strip++)
        run_strip(w, strip, KS, VS);
    matrix  dq = {b->dq, b->ldq, b->rows, w->columns * 16};
    operand ds = {(const char *)w->own->ds, strips * FA_AMX_TILE, FA_AMX_TILE};
    operand k  = {b->k_right, FA_AMX_TILE, (int64_t)w->columns * FA_AMX_TILE};
    multiply(&dq, &ds, &k, (int)strips, 1, true);
}

/* ---- one kernel a shape ---- */

#define DEFINE_RUN(KS, VS)                                                                                             \
    static void run_##KS##_##VS(const walk *w) { run_tile(w, KS, VS); }
DEFINE_RUN(1, 1)
DEFINE_RUN(2, 2)
DEFINE_RUN(3, 3)
DEFINE_RUN(4, 4)
DEFINE_RUN(6, 4)
DEFINE_RUN(8, 8)

static const struct shape {
    int depth, depth_v;
    void (*run)(const walk *w);
} shapes[] = {{1, 1, run_1_1}, {2, 2, run_2_2}, {3, 3, run_3_3}, {4, 4, run_4_4}, {6, 4, run_6_4}, {8, 8, run_8_8}};

bool fa_amx_backward_block(const fa_backward_block *b)
{
    walk w = {.block     = b,
              .own       = b->scratch,
              .k         = constants_make(b->multiplier),
              .depth     = (b->head_dim + 31) / 32,
              .depth_v   = (b->head_dim_v + 31) / 32,
              .columns   = (b->head_dim + 15) / 16,
              .columns_v = (b->head_dim_v + 15) / 16};
    if (b->rows % STEP != 0 || b->keys % STEP != 0 || b->rows > MAX_ROWS || b->keys > MAX_KEYS)
        return false;
    int64_t key_tiles = b->keys / STEP, query_tiles = b->rows / STEP;
    w.k_left    = (const char *)b->k_right + key_tiles * w.columns * FA_AMX_TILE;
    w.v_left    = (const char *)b->v_t + key_tiles * 2 * w.depth_v * FA_AMX_TILE;
    w.q_keys    = (const char *)b->q_right + query_tiles * w.columns * FA_AMX_TILE;
    w.dout_keys = (const char *)b->dout_right + query_tiles * w.columns_v * FA_AMX_TILE;
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        if (shapes[n].depth == w.depth && shapes[n].depth_v == w.depth_v) {
            shapes[n].run(&w);
            return true;
        }
    }
    return false;
}
