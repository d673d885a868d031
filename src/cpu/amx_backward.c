/*
 * Backward on AMX: one tile of queries against one tile of keys, all five products and the mask.
 *
 * A cell is 32 keys by 32 queries. Scores and their gradients are computed transposed, S^T = K Q^T and dP^T = V dO^T,
 * so that LSE and Delta are vectors, and so that every left or right operand that follows is two vectors put together
 * by a shift and a blend:
 *
 *     P^T, dS^T    left, rows = keys, 32 queries as pairs (i, i + 16)
 *     dS           right, contracted along 32 keys as pairs (j, j + 16), 16 queries wide
 *
 *     for each strip of keys
 *         for each cell             S^T, dP^T of the next cell (tiles); P and dS of this one (vectors)
 *         dV += P^T dO, dK += dS^T Q     over all queries of the tile, accumulators in registers
 *     dQ^T += K^T dS                     over all keys of the tile; so dS needs no transpose
 *
 * A tile store right behind its product stalls all that follows, a product later it is nearly free: so the accumulators
 * of a block are stored among the first products of the next one (struct pending). Sums are kept in tiles of 16 x 16
 * ("tiled", cpu.h): rows of 64 bytes next to each other. docs/cpu-amx.md has the measurements.
 */
#include "cpu/amx_multiply.h"

enum { CELL = 32, STRIP_CELLS = 4, MAX_CELLS = STRIP_CELLS * FA_MAX_TILE / CELL };

/* ---- memory ---- */

typedef struct scratch {
    _Alignas(64) float s[2][4 * FA_AMX_TILE_FLOATS]; /* S^T of a cell: tile (key half) * 2 + query half; two cells */
    _Alignas(64) float dp[2][4 * FA_AMX_TILE_FLOATS];
    _Alignas(64) uint16_t operands[][FA_AMX_TILE_HALVES]; /* P^T and dS^T of a strip, dS of the tile: walk_make */
} scratch;

static int cells(int n) { return (n + CELL - 1) / CELL; }

size_t fa_amx_backward_scratch(int rows, int keys)
{
    int tiles = 2 * STRIP_CELLS * 2 * cells(rows) + 2 * cells(rows) * cells(keys);
    return sizeof(scratch) + (size_t)tiles * FA_AMX_TILE;
}

/* ---- the vector stage ---- */

/* P = 2^y is made in the integer domain: i = (y - 1) 2^23 rounded, f = its fraction, and the bits of P are i plus those
 * of h(1 + f) = 2 + (2^f - 1 - f) + 2^-8, a cubic (1.1e-4). The 2^-8 is half a unit of bfloat16, so cutting rounds. */
typedef struct exponential {
    __m512  multiplier; /* 2^23 times that of the scores */
    __m512i fraction, one, lowest;
    __m512  c0, c1, c2, c3;
} exponential;

#define EXPONENT_UNIT 8388608.0f /* 2^23 */
#define LSE_LARGE 65536.0f       /* here y still is right to 2^-7 */

FA_AMX_INLINE exponential exponential_make(float multiplier)
{
    return (exponential){_mm512_set1_ps(multiplier * EXPONENT_UNIT),
                         _mm512_set1_epi32(0x7FFFFF),
                         _mm512_set1_epi32(0x3F800000),
                         _mm512_set1_epi32(-127 * (1 << 23)), /* y = -126; below it P is 0 */
                         _mm512_set1_ps(2.45284304f),
                         _mm512_set1_ps(-0.51538504f),
                         _mm512_set1_ps(-0.01274076f),
                         _mm512_set1_ps(0.0790857f)};
}

typedef struct gradient {
    exponential     e;
    __m512          shift[2], delta[2]; /* of the cell's 2 x 16 queries */
    const float    *s, *dp;
    uint16_t       *p_t[2], *ds_t[2], *ds[2];
    const uint32_t *seen;     /* [32] a bit for each query of a key */
    __m512i         limit[2]; /* largest i of each query */
} gradient;

/* 16 queries of one key. special: pairs are masked, or LSE is NaN or so large that its rounding counts. Where nothing
 * is special both give the same bits. */
FA_AMX_INLINE void gradient_vector(const gradient *g, int tile, int row, bool special, __m512 *p, __m512 *ds)
{
    const exponential *e    = &g->e;
    const int          at   = tile * FA_AMX_TILE_FLOATS + 16 * row;
    __m512             y    = _mm512_fmadd_ps(_mm512_load_ps(g->s + at), e->multiplier, g->shift[tile % 2]);
    __m512i            i    = _mm512_cvtps_epi32(y);
    __mmask16          seen = 0, nan = 0;
    if (special) {
        seen = (__mmask16)(g->seen[row + tile / 2 * 16] >> (tile % 2 * 16));
        nan  = _mm512_mask_cmp_ps_mask(seen, y, y, _CMP_UNORD_Q);
        i    = _mm512_min_epi32(i, g->limit[tile % 2]);
    }
    __m512    m    = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(i, e->fraction, e->one, 0xEA)); /* (i & f) | 1.0 */
    __m512    h    = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(e->c3, m, e->c2), m, e->c1), m, e->c0);
    __mmask16 some = _mm512_cmpgt_epi32_mask(i, e->lowest);
    if (special)
        some = (some & seen) | nan;
    *p = _mm512_castsi512_ps(_mm512_maskz_add_epi32(some, i, _mm512_castps_si512(h)));
    if (special)
        *p = _mm512_mask_mov_ps(*p, nan, y);
    *ds = _mm512_maskz_mul_ps(some, *p, _mm512_sub_ps(_mm512_load_ps(g->dp + at), g->delta[tile % 2]));
}

/* Keys `row` and `row` + 16 of a cell. */
FA_AMX_INLINE void gradient_row(const gradient *g, int row, bool special)
{
    __m512 p[4], ds[4];
    _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) gradient_vector(g, t, row, special, &p[t], &ds[t]);
    _mm512_store_si512(g->p_t[0] + 32 * row, fa_amx_pair(p[0], p[1]));
    _mm512_store_si512(g->p_t[1] + 32 * row, fa_amx_pair(p[2], p[3]));
    _mm512_store_si512(g->ds_t[0] + 32 * row, fa_amx_pair(ds[0], ds[1]));
    _mm512_store_si512(g->ds_t[1] + 32 * row, fa_amx_pair(ds[2], ds[3]));
    _mm512_store_si512(g->ds[0] + 32 * row, fa_amx_pair(ds[0], ds[2]));
    _mm512_store_si512(g->ds[1] + 32 * row, fa_amx_pair(ds[1], ds[3]));
}

/* ---- the tile stage: blocks of 2 x 2 tiles of C ---- */

/* Four tiles of C that still are in registers 0 to 3. c NULL: none. */
typedef struct pending {
    float  *c;
    int64_t row, col; /* floats from one tile to the next */
} pending;

typedef struct block {
    const char *a, *b;
    int64_t     a_row, a_step, b_col, b_step; /* bytes from one tile to the next, across C and along the contraction */
    pending     c;
    bool        add; /* else C starts at 0 */
} block;

#define STORE_PENDING(t, offset)                                                                                       \
    if (last->c)                                                                                                       \
    TILE_STORE(t, last->c + (offset), 64)
#define BEGIN_C(t, offset)                                                                                             \
    if (x->add)                                                                                                        \
        TILE_LOAD(t, x->c.c + (offset), 64);                                                                           \
    else                                                                                                               \
        TILE_ZERO(t)

FA_AMX_INLINE void run_block(const block *x, int steps, pending *last)
{
    const char *a = x->a, *b = x->b;
    TILE_LOAD(4, a, 64);
    TILE_LOAD(6, b, 64);
    STORE_PENDING(0, 0);
    BEGIN_C(0, 0);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, b + x->b_col, 64);
    STORE_PENDING(1, last->col);
    BEGIN_C(1, x->c.col);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(5, a + x->a_row, 64);
    STORE_PENDING(2, last->row);
    BEGIN_C(2, x->c.row);
    TILE_DOT(2, 5, 6);
    STORE_PENDING(3, last->row + last->col);
    BEGIN_C(3, x->c.row + x->c.col);
    TILE_DOT(3, 5, 7);
    for (int n = 1; n < steps; n++) {
        a += x->a_step;
        b += x->b_step;
        TILE_LOAD(4, a, 64);
        TILE_LOAD(6, b, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + x->b_col, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, a + x->a_row, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    *last = x->c;
}

FA_AMX_INLINE void store_pending(pending *last)
{
    STORE_PENDING(0, 0);
    STORE_PENDING(1, last->col);
    STORE_PENDING(2, last->row);
    STORE_PENDING(3, last->row + last->col);
    last->c = NULL;
}

/* ---- a tile: what the parts share ---- */

typedef struct walk {
    const fa_backward_block *in;
    scratch                 *own;
    int                      strips, groups;                                  /* of 32 keys, of 32 queries */
    int                      depth, depth_v;                                  /* steps of 32 columns */
    int                      columns, columns_v;                              /* tiles of 16 */
    const char              *k_left, *k_t_left, *v_left, *q_keys, *dout_keys; /* turned forms */
    bool                     unusual_lse;
    uint16_t (*p_t)[FA_AMX_TILE_HALVES], (*ds_t)[FA_AMX_TILE_HALVES]; /* [cell of the strip][2 x 16 keys][group] */
    uint16_t (*ds)[FA_AMX_TILE_HALVES];                               /* [16 queries][strip] */
} walk;

static walk walk_make(const fa_backward_block *b)
{
    walk w      = {.in        = b,
                   .own       = b->scratch,
                   .strips    = (b->keys + CELL - 1) / CELL,
                   .groups    = (b->rows + CELL - 1) / CELL,
                   .depth     = (b->head_dim + 31) / 32,
                   .depth_v   = (b->head_dim_v + 31) / 32,
                   .columns   = (b->head_dim + 15) / 16,
                   .columns_v = (b->head_dim_v + 15) / 16};
    w.p_t       = w.own->operands;
    w.ds_t      = w.p_t + 2 * STRIP_CELLS * w.groups;
    w.ds        = w.ds_t + 2 * STRIP_CELLS * w.groups;
    w.k_left    = (const char *)b->k_right + (int64_t)w.strips * w.columns * FA_AMX_TILE;
    w.k_t_left  = w.k_left + (int64_t)w.strips * 2 * w.depth * FA_AMX_TILE;
    w.v_left    = (const char *)b->v_t + (int64_t)((b->keys + 15) / 16) * w.depth_v * FA_AMX_TILE;
    w.q_keys    = (const char *)b->q_right + (int64_t)w.groups * w.columns * FA_AMX_TILE;
    w.dout_keys = (const char *)b->dout_right + (int64_t)w.groups * w.columns_v * FA_AMX_TILE;
    return w;
}

/* Cells of 32 in the range, of `limit` in all; what is left out sees nothing. */
static fa_range cells_of(fa_range range, int limit)
{
    int begin = fa_max_int(range.begin, 0), end = fa_min_int(range.end, limit);
    return begin < end ? (fa_range){begin / CELL, (end - 1) / CELL + 1} : (fa_range){0, 0};
}

/* Groups of queries that see keys of a strip, and strips that queries of a group see. The same cells, either way. */
static fa_range groups_seeing(const walk *w, int strip)
{
    const fa_backward_block *b    = w->in;
    fa_range                 keys = {strip * CELL, fa_min_int((strip + 1) * CELL, b->keys)}, all = {0, b->rows};
    return cells_of(fa_queries_seeing(b->window, b->diagonal, all, keys), b->rows);
}

static fa_range strips_seen(const walk *w, int group)
{
    const fa_backward_block *b       = w->in;
    fa_range                 queries = {group * CELL, fa_min_int((group + 1) * CELL, b->rows)}, all = {0, b->keys};
    return cells_of(fa_keys_seen(b->window, b->diagonal, queries, all), b->keys);
}

/* ---- a strip: P and dS of its cells ---- */

typedef struct cell {
    int strip, group;
} cell;

/* keys x queries^T of a cell, over `depth` tiles of columns, to `to`. */
FA_AMX_INLINE block cell_block(const char *keys, const char *queries, int depth, cell at, float *to)
{
    int64_t row = (int64_t)depth * FA_AMX_TILE;
    return (block){keys + at.strip * 2 * row, queries + at.group * 2 * row, row, FA_AMX_TILE, row, FA_AMX_TILE,
                   {to, 2 * FA_AMX_TILE_FLOATS, FA_AMX_TILE_FLOATS}, false};
}

FA_AMX_INLINE void cell_products(const walk *w, cell at, int parity, pending *last)
{
    block s  = cell_block(w->k_left, w->q_keys, w->depth, at, w->own->s[parity]);
    block dp = cell_block(w->v_left, w->dout_keys, w->depth_v, at, w->own->dp[parity]);
    run_block(&s, w->depth, last);
    run_block(&dp, w->depth_v, last);
}

/* True if the cell is special: some pair is not seen, or an LSE is unusual. seen[] then holds what is. */
static bool cell_mask(const walk *w, cell at, uint32_t seen[CELL])
{
    const fa_backward_block *b       = w->in;
    fa_range                 queries = {at.group * CELL, fa_min_int(at.group * CELL + CELL, b->rows)};
    fa_range                 keys    = {at.strip * CELL, at.strip * CELL + CELL};
    if (!w->unusual_lse && queries.end - queries.begin == CELL && keys.end <= b->keys &&
        fa_window_covers(b->window, b->diagonal, queries, keys))
        return false;
    for (int n = 0; n < CELL; n++) {
        fa_range one = {keys.begin + n, keys.begin + n + 1};
        fa_range see = fa_queries_seeing(b->window, b->diagonal, queries, one);
        bool     any = one.begin < b->keys && see.begin < see.end;
        seen[n] = any ? (uint32_t)((1ull << (see.end - queries.begin)) - (1ull << (see.begin - queries.begin))) : 0;
    }
    return true;
}

/* The largest i of a query: P is at most 1, but for a rounding, where LSE is so large that y is not to be trusted. */
FA_AMX_INLINE __m512i largest_exponent(__m512 lse)
{
    __mmask16 large = _mm512_cmp_ps_mask(_mm512_abs_ps(lse), _mm512_set1_ps(LSE_LARGE), _CMP_GT_OQ);
    return _mm512_mask_mov_epi32(_mm512_set1_epi32((int)(-0.9375f * EXPONENT_UNIT)), large,
                                 _mm512_set1_epi32(-(int)EXPONENT_UNIT));
}

/* The stores of dP^T of the next cell lie between the rows. */
FA_AMX_INLINE void gradient_rows(const gradient *g, bool special, pending *last)
{
    for (int row = 0; row < 4; row++)
        gradient_row(g, row, special);
    STORE_PENDING(0, 0);
    for (int row = 4; row < 8; row++)
        gradient_row(g, row, special);
    STORE_PENDING(1, last->col);
    for (int row = 8; row < 12; row++)
        gradient_row(g, row, special);
    STORE_PENDING(2, last->row);
    for (int row = 12; row < 16; row++)
        gradient_row(g, row, special);
    STORE_PENDING(3, last->row + last->col);
    last->c = NULL;
}

FA_AMX_INLINE void cell_gradient(const walk *w, const exponential *e, cell at, int parity, pending *last)
{
    scratch *own      = w->own;
    int      in_strip = at.strip % STRIP_CELLS;
    uint32_t seen[CELL];
    gradient g = {.e = *e, .s = own->s[parity], .dp = own->dp[parity], .seen = seen};
    for (int half = 0; half < 2; half++) {
        __m512 lse    = _mm512_loadu_ps(w->in->lse_log2 + at.group * CELL + 16 * half);
        g.shift[half] = _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(-1.0f), lse), _mm512_set1_ps(EXPONENT_UNIT));
        g.limit[half] = largest_exponent(lse);
        g.delta[half] = _mm512_loadu_ps(w->in->delta + at.group * CELL + 16 * half);
        g.p_t[half]   = w->p_t[(2 * in_strip + half) * w->groups + at.group];
        g.ds_t[half]  = w->ds_t[(2 * in_strip + half) * w->groups + at.group];
        g.ds[half]    = w->ds[(2 * at.group + half) * w->strips + at.strip];
    }
    if (cell_mask(w, at, seen))
        gradient_rows(&g, true, last);
    else
        gradient_rows(&g, false, last);
}

/* dV and dK of a strip; B: the column block's tiles of dO or Q, used by all cells before the next. */
FA_AMX_INLINE void strip_sums(const walk *w, int first, const fa_range groups[STRIP_CELLS], bool keys, pending *last)
{
    int         columns = keys ? w->columns : w->columns_v;
    float      *sums    = keys ? w->in->dk : w->in->dv;
    const char *right   = keys ? w->in->q_right : w->in->dout_right;
    for (int col = 0; col < columns; col += 2) {
        for (int n = 0; n < STRIP_CELLS; n++) {
            fa_range    range = groups[n];
            const void *left  = (keys ? w->ds_t : w->p_t)[2 * n * w->groups + range.begin];
            block       x     = {left,
                                 right + ((int64_t)range.begin * columns + col) * FA_AMX_TILE,
                                 (int64_t)w->groups * FA_AMX_TILE,
                                 FA_AMX_TILE,
                                 FA_AMX_TILE,
                                 (int64_t)columns * FA_AMX_TILE,
                                 {sums + fa_tiled_at(columns * 16, (first + n) * CELL, col * 16),
                                  fa_tiled_at(columns * 16, 16, 0), FA_AMX_TILE_FLOATS},
                                 true};
            if (range.begin < range.end)
                run_block(&x, range.end - range.begin, last);
        }
    }
}

static int list_cells(const walk *w, int first, fa_range groups[STRIP_CELLS], cell list[MAX_CELLS])
{
    int count = 0;
    for (int n = 0; n < STRIP_CELLS; n++)
        groups[n] = first + n < w->strips ? groups_seeing(w, first + n) : (fa_range){0, 0};
    for (int group = 0; group < w->groups; group++) {
        for (int n = 0; n < STRIP_CELLS; n++) {
            if (group >= groups[n].begin && group < groups[n].end)
                list[count++] = (cell){first + n, group};
        }
    }
    return count;
}

/* Rows of dO that packing left out for NaN or Inf: dV of the keys that they see, from the strip's P. */
static void add_bad_dout(const walk *w, int first, const fa_range groups[STRIP_CELLS])
{
    const fa_backward_block *b    = w->in;
    int                      keys = fa_min_int(STRIP_CELLS * CELL, b->keys - first * CELL);
    for (int n = 0; n < b->num_bad_dout; n++) {
        int         row = b->bad_dout[n], group = row / CELL;
        const void *dout = b->dout_rows->row[row];
        for (int j = 0; j < keys; j++) {
            const uint16_t *p_t  = w->p_t[j / 16 * w->groups + group] + j % 16 * 32;
            uint32_t        bits = (uint32_t)p_t[row % 16 * 2 + row / 16 % 2] << 16;
            float           p;
            memcpy(&p, &bits, sizeof p);
            if (group < groups[j / CELL].begin || group >= groups[j / CELL].end || p == 0.0f)
                continue;
            for (int col = 0; col < b->head_dim_v; col++)
                b->dv[fa_tiled_at(b->head_dim_v, first * CELL + j, col) + j % 16 * 16 + col % 16] +=
                    p * fa_load(dout, col * b->dout_rows->stride, b->dout_rows->dtype);
        }
    }
}

FA_AMX_INLINE void run_strip(const walk *w, const exponential *e, int first, pending *last)
{
    fa_range groups[STRIP_CELLS];
    cell     list[MAX_CELLS];
    int      count = list_cells(w, first, groups, list);
    if (count == 0)
        return;
    cell_products(w, list[0], 0, last);
    store_pending(last);
    for (int n = 0; n < count; n++) {
        if (n + 1 < count)
            cell_products(w, list[n + 1], (n + 1) & 1, last);
        cell_gradient(w, e, list[n], n & 1, last);
    }
    if (w->in->num_bad_dout > 0)
        add_bad_dout(w, first, groups);
    strip_sums(w, first, groups, false, last);
    strip_sums(w, first, groups, true, last);
}

static bool has_unusual_lse(const fa_backward_block *b)
{
    bool usual = true;
    for (int n = 0; n < b->rows; n++)
        usual &= fabsf(b->lse_log2[n]) <= LSE_LARGE;
    return !usual;
}

void fa_amx_backward_block(const fa_backward_block *b)
{
    walk        w    = walk_make(b);
    exponential e    = exponential_make(b->multiplier);
    pending     last = {0};
    w.unusual_lse    = has_unusual_lse(b);
    for (int first = 0; first < w.strips; first += STRIP_CELLS)
        run_strip(&w, &e, first, &last);
    store_pending(&last);
}

/* ---- dQ^T += K^T dS ---- */

/* 4 tiles of columns by 16 queries: K^T stays in the first-level cache and dS is read once. */
FA_AMX_INLINE void dq_block(const char *a, int64_t a_row, const char *b, float *c, int steps, pending *last)
{
    block column = {.c = {c, 2 * FA_AMX_TILE_FLOATS, FA_AMX_TILE_FLOATS}, .add = true}, *x = &column;
    TILE_LOAD(4, b, 64);
    TILE_LOAD(5, a, 64);
    STORE_PENDING(0, 0);
    BEGIN_C(0, 0);
    TILE_DOT(0, 5, 4);
    TILE_LOAD(6, a + a_row, 64);
    STORE_PENDING(1, last->col);
    BEGIN_C(1, x->c.col);
    TILE_DOT(1, 6, 4);
    TILE_LOAD(7, a + 2 * a_row, 64);
    STORE_PENDING(2, last->row);
    BEGIN_C(2, x->c.row);
    TILE_DOT(2, 7, 4);
    TILE_LOAD(5, a + 3 * a_row, 64);
    STORE_PENDING(3, last->row + last->col);
    BEGIN_C(3, x->c.row + x->c.col);
    TILE_DOT(3, 5, 4);
    for (int n = 1; n < steps; n++) {
        a += FA_AMX_TILE;
        b += FA_AMX_TILE;
        TILE_LOAD(4, b, 64);
        TILE_LOAD(5, a, 64);
        TILE_DOT(0, 5, 4);
        TILE_LOAD(6, a + a_row, 64);
        TILE_DOT(1, 6, 4);
        TILE_LOAD(7, a + 2 * a_row, 64);
        TILE_DOT(2, 7, 4);
        TILE_LOAD(5, a + 3 * a_row, 64);
        TILE_DOT(3, 5, 4);
    }
    *last = x->c;
}

void fa_amx_backward_dq(const fa_backward_block *b)
{
    walk    w     = walk_make(b);
    pending last  = {0};
    int64_t a_row = (int64_t)w.strips * FA_AMX_TILE, next_queries = fa_tiled_at(b->head_dim, 16, 0);
    int     col = 0;
    for (; col + 3 < w.columns; col += 4) {
        for (int n = 0; n < 2 * w.groups; n++) {
            fa_range strips = strips_seen(&w, n / 2);
            if (strips.begin < strips.end)
                dq_block(w.k_t_left + col * a_row + (int64_t)strips.begin * FA_AMX_TILE, a_row,
                         (const char *)w.ds[n * w.strips + strips.begin],
                         b->dq + fa_tiled_at(b->head_dim, n * 16, col * 16), strips.end - strips.begin, &last);
        }
    }
    for (; col < w.columns; col += 2) {
        for (int group = 0; group < w.groups; group++) {
            fa_range strips = strips_seen(&w, group);
            block    x      = {w.k_t_left + col * a_row + (int64_t)strips.begin * FA_AMX_TILE,
                               (const char *)w.ds[2 * group * w.strips + strips.begin],
                               a_row,
                               FA_AMX_TILE,
                               a_row,
                               FA_AMX_TILE,
                               {b->dq + fa_tiled_at(b->head_dim, group * CELL, col * 16), FA_AMX_TILE_FLOATS, next_queries},
                               true};
            if (strips.begin < strips.end)
                run_block(&x, strips.end - strips.begin, &last);
        }
    }
    store_pending(&last);
}

/* ---- the sums, row major ---- */

void fa_amx_untile(float *out, int ld, const float *tiled, int rows, int cols, bool turned)
{
    for (int row = 0; row < rows; row += 16) {
        for (int col = 0; col < cols; col += 16) {
            const float *from = tiled + fa_tiled_at(cols, row, col);
            __m512i      tile[16];
            for (int r = 0; r < 16; r++)
                tile[r] = _mm512_load_si512(from + 16 * r);
            if (turned)
                fa_amx_transpose(tile);
            for (int r = 0; r < 16 && row + r < rows; r++)
                _mm512_store_si512(out + (int64_t)(row + r) * ld + col, tile[r]);
        }
    }
}
