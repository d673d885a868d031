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
 *     for each cell of a strip of keys   S^T, dP^T of the next cell (tiles); P and dS of this one (vectors)
 *     dV += P^T dO, dK += dS^T Q         over all queries of the tile, accumulators in registers
 *     dQ^T += K^T dS                     over all keys of the strip; so dS needs no transpose
 *
 * A strip is what one call works on, so that P and dS of the next one lie where the caches have those of this one.
 * Blocks of products are in amx_backward_blocks.h, vectors in amx_gradient.h. Sums are kept in tiles of 16 x 16
 * ("tiled", cpu.h): rows of 64 bytes next to each other. docs/cpu-amx.md has the measurements.
 */
#include "cpu/amx_backward_blocks.h"
#include "cpu/amx_backward_options.h"

enum { CELL = 32, MOST_STRIP_CELLS = 8, MAX_CELLS = MOST_STRIP_CELLS * FA_MAX_TILE / CELL };

/* ---- memory ---- */

typedef struct scratch {
    _Alignas(64) float s[2][4 * FA_AMX_TILE_FLOATS]; /* S^T of a cell: tile (key half) * 2 + query half; two cells */
    _Alignas(64) float dp[2][4 * FA_AMX_TILE_FLOATS];
    _Alignas(64) float slope[4 * FA_AMX_TILE_FLOATS];     /* as s, of one cell */
    _Alignas(64) uint16_t operands[][FA_AMX_TILE_HALVES]; /* P^T, dS^T and dS of a strip: walk_make */
} scratch;

_Static_assert(offsetof(scratch, dp) - offsetof(scratch, s) == DP_BEHIND_S * sizeof(float), "what a gradient expects");

#ifndef FA_AMX_FP16
static int cells(int n) { return (n + CELL - 1) / CELL; }

size_t fa_amx_backward_scratch(int rows, int pieces)
{
    int p_t = strip_cells(pieces) * pitch(2 * cells(rows), pieces),
        ds  = 2 * cells(rows) * pitch(strip_cells(pieces), pieces);
    return sizeof(scratch) + (size_t)((2 * p_t + skew(pieces) + ds) * pieces) * FA_AMX_TILE;
}
#endif

/* ---- a tile: what the parts share ---- */

typedef struct walk {
    const fa_backward_block *in;
    scratch                 *own;
    int                      strips, groups;                                  /* of 32 keys, of 32 queries */
    int                      first;                                           /* strip of the part */
    int                      depth, depth_v;                                  /* steps of 32 columns */
    int                      columns, columns_v;                              /* tiles of 16 */
    const char              *k_left, *k_t_left, *v_left, *q_keys, *dout_keys; /* turned forms */
    bool                     unusual_lse, nan_lse;
    bool                     infinite; /* some number of Q or K is, several pieces: amx_infinite.c */
    uint16_t (*p_t)[FA_AMX_TILE_HALVES], (*ds_t)[FA_AMX_TILE_HALVES]; /* [cell of the strip][group][2 x 16 keys] */
    uint16_t (*ds)[FA_AMX_TILE_HALVES];                               /* [16 queries][cell of the strip] */
} walk;

FA_AMX_INLINE walk walk_make(const fa_backward_block *b, int pieces)
{
    walk    w      = {.in        = b,
                      .own       = b->scratch,
                      .strips    = (b->keys + CELL - 1) / CELL,
                      .groups    = (b->rows + CELL - 1) / CELL,
                      .first     = b->part.begin / CELL,
                      .depth     = (b->head_dim + 31) / 32,
                      .depth_v   = (b->head_dim_v + 31) / 32,
                      .columns   = (b->head_dim + 15) / 16,
                      .columns_v = (b->head_dim_v + 15) / 16};
    int64_t number = pieces * FA_AMX_TILE;
    w.p_t          = w.own->operands;
    w.ds_t         = w.p_t + (strip_cells(pieces) * pitch(2 * w.groups, pieces) + skew(pieces)) * pieces;
    w.ds           = w.ds_t + strip_cells(pieces) * pitch(2 * w.groups, pieces) * pieces;
    w.k_left       = b->k;
    w.k_t_left     = w.k_left + w.strips * 2 * w.depth * number;
    w.v_left       = b->v;
    w.q_keys       = (const char *)b->q_right + w.groups * 2 * w.depth * number;
    w.dout_keys    = (const char *)b->dout_right + w.groups * 2 * w.depth_v * number;
    return w;
}

/* Whether what comes from the third-level cache is asked for ahead. Up to 64 columns it costs more than it saves. */
FA_AMX_INLINE bool asks_ahead(const walk *w) { return w->columns > 4; }

/* Tiles in scratch, each of so many pieces. n: cell of the strip. */
FA_AMX_INLINE int left_tile(const walk *w, int n, int group, int pieces)
{
    return (n * pitch(2 * w->groups, pieces) + 2 * group) * pieces;
}
FA_AMX_INLINE uint16_t *p_t_at(const walk *w, int n, int group, int pieces)
{
    return w->p_t[left_tile(w, n, group, pieces)];
}
FA_AMX_INLINE uint16_t *ds_t_at(const walk *w, int n, int group, int pieces)
{
    return w->ds_t[left_tile(w, n, group, pieces)];
}
FA_AMX_INLINE uint16_t *ds_at(const walk *w, int query_half, int strip, int pieces)
{
    return w->ds[(query_half * pitch(strip_cells(pieces), pieces) + strip - w->first) * pieces];
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
FA_AMX_INLINE block cell_block(const char *keys, const char *queries, int depth, cell at, float *to, int pieces)
{
    int64_t step = pieces * FA_AMX_TILE, row = depth * step;
    return (block){keys + at.strip * 2 * row,
                   queries + at.group * 2 * row,
                   row,
                   step,
                   row,
                   step,
                   {to, 2 * FA_AMX_TILE_FLOATS, FA_AMX_TILE_FLOATS},
                   false,
                   NULL,
                   NULL};
}

FA_AMX_INLINE piece_sum sum_of_s(int pieces) { return (piece_sum){pieces, true, true, false}; }
FA_AMX_INLINE piece_sum sum_of_dp(int pieces) { return (piece_sum){pieces, true, false, false}; }

FA_AMX_INLINE block cell_s(const walk *w, cell at, int parity, int pieces)
{
    return cell_block(w->k_left, w->q_keys, w->depth, at, w->own->s[parity], pieces);
}

FA_AMX_INLINE block cell_dp(const walk *w, cell at, int parity, int pieces)
{
    return cell_block(w->v_left, w->dout_keys, w->depth_v, at, w->own->dp[parity], pieces);
}

enum { SOON_STEPS = 2 }; /* the first of S^T, done among the rows of the cell before the one before: two pieces */

FA_AMX_INLINE int steps_begun(const walk *w, int pieces) { return pieces == 2 ? fa_min_int(SOON_STEPS, w->depth) : 0; }

/* v NULL: nothing beside. begun: the first steps of S^T, so many. */
FA_AMX_INLINE void cell_products(const walk *w, cell at, int parity, pending *last, int pieces, beside *v, int begun)
{
    block s  = cell_s(w, at, parity, pieces);
    block dp = cell_dp(w, at, parity, pieces);
    if (pieces == 1) {
        run_block_of_one(&s, w->depth, last, sum_of_s(1), NULL, false);
        run_block_of_one(&dp, w->depth_v, last, sum_of_dp(1), NULL, false);
        return;
    }
    run_block_from(&s, begun, w->depth, last, sum_of_s(pieces), v);
    run_block_from(&dp, 0, w->depth_v, last, sum_of_dp(pieces), v);
}

/* What is asked for beside a cell's rows, four tiles of columns deep: its share of the next group's operands of S^T and
 * dP^T, or behind the last group of dV's first ones. */
FA_AMX_INLINE void ask_beside_rows(const walk *w, cell at, const char *later[2])
{
    const int64_t group = 8 * FA_AMX_TILE, share = group / MOST_STRIP_CELLS, n = at.strip - w->first;
    const char   *values = (const char *)w->in->dout_right + 2 * n * share;
    bool          last   = at.group + 1 == w->groups;
    later[0]             = last ? values : w->q_keys + (at.group + 1) * group + n * share;
    later[1]             = last ? values + share : w->dout_keys + (at.group + 1) * group + n * share;
}

/* The products of list[1] of one piece, both of a depth that is known when this is compiled, with rows of list[0] among
 * them: not beside the first products of S^T, which store what rows read, nor, where there are enough others, beside
 * those of dP^T. Of two steps each rows stand in the two in the middle, and the last products have none (decision
 * 0032).
 */
FA_AMX_INLINE void products_among(const walk *w, const cell *list, int parity, int depth, const gradient *g,
                                  pending *last)
{
    const bool  deep   = depth > 2;
    const int   places = 4 * (depth - 1), all = 2 * places;
    const char *later[2] = {NULL, NULL};
    if (deep)
        ask_beside_rows(w, list[0], later);
    among rows_of_s  = {g, 1, 0, all, deep, {later[0], later[1]}}; /* each made whole: constants are to stay so */
    among rows_of_dp = {g, deep, places, all, deep, {later[0], later[1]}};
    block s = cell_s(w, list[1], parity, 1), dp = cell_dp(w, list[1], parity, 1);
    run_block_of_one(&s, depth, last, sum_of_s(1), &rows_of_s, false);
    run_block_of_one(&dp, depth, last, sum_of_dp(1), &rows_of_dp, false);
}

/* True if the cell is special: some pair is not seen, or an LSE is unusual. seen[] then holds what is. */
static bool cell_mask(const walk *w, cell at, uint32_t seen[CELL])
{
    const fa_backward_block *b       = w->in;
    fa_range                 queries = {at.group * CELL, fa_min_int(at.group * CELL + CELL, b->rows)};
    fa_range                 keys    = {at.strip * CELL, at.strip * CELL + CELL};
    if (!w->unusual_lse && !b->options && queries.end - queries.begin == CELL && keys.end <= b->keys &&
        fa_window_covers(b->window, b->diagonal, queries, keys))
        return false;
    const __m512i number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int n = 0; n < CELL; n += 16) { /* fa_queries_seeing of 16 keys, from the cell's first query */
        __m512i   key   = _mm512_add_epi32(number, _mm512_set1_epi32(keys.begin + n));
        __m512i   own   = _mm512_sub_epi32(key, _mm512_set1_epi32(b->diagonal + queries.begin));
        __m512i   begin = _mm512_sub_epi32(own, _mm512_set1_epi32(b->window.right));
        __m512i   end   = _mm512_add_epi32(own, _mm512_set1_epi32(b->window.left + 1));
        __m512i   bits  = fa_amx_bits(begin, _mm512_min_epi32(end, _mm512_set1_epi32(queries.end - queries.begin)));
        __mmask16 there = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(b->keys));
        _mm512_storeu_si512(seen + n, _mm512_maskz_mov_epi32(there, bits));
    }
    return true;
}

/* Step n of S^T of a cell that comes soon; s NULL: none. */
FA_AMX_INLINE void soon_step(const walk *w, const block *s, int n, pending *last, int pieces)
{
    if (s && n < w->depth)
        block_step(s, n, n == 0 ? last : NULL, sum_of_s(pieces), NULL);
}

/* Between the rows lie the stores of dP^T of the next cell and then the first steps of S^T of the one after it (soon),
 * so that its operands come from the second-level cache while the last rows are computed. */
FA_AMX_INLINE void gradient_rows(const walk *w, const gradient *g, bool special, const block *soon, pending *last,
                                 int pieces)
{
    for (int row = 0; row < 3; row++)
        gradient_row(g, row, special, pieces);
    KEEP_AWAKE();
    STORE_PENDING(0, 0);
    for (int row = 3; row < 6; row++)
        gradient_row(g, row, special, pieces);
    KEEP_AWAKE();
    STORE_PENDING(1, last->col);
    for (int row = 6; row < 9; row++)
        gradient_row(g, row, special, pieces);
    KEEP_AWAKE();
    STORE_PENDING(2, last->row);
    for (int row = 9; row < 13; row++)
        gradient_row(g, row, special, pieces);
    STORE_PENDING(3, last->row + last->col);
    last->c = NULL;
    soon_step(w, soon, 0, last, pieces);
    gradient_row(g, 13, special, pieces);
    soon_step(w, soon, 1, last, pieces);
    gradient_row(g, 14, special, pieces);
    gradient_row(g, 15, special, pieces);
}

/* Not given the cell's gradient: in registers it is a fifth faster. */
static __attribute__((noinline)) void cell_options(const walk *w, cell at, int parity, uint32_t seen[CELL],
                                                   uint32_t kept[CELL])
{
    const fa_backward_block *b = w->in;
    option_cell              c = {.options = b->options,
                                  .i       = b->options->tile->queries.begin + at.group * CELL,
                                  .j       = b->options->tile->keys.begin + at.strip * CELL,
                                  .queries = fa_min_int(CELL, b->rows - at.group * CELL),
                                  .keys    = fa_min_int(CELL, b->keys - at.strip * CELL),
                                  .s       = w->own->s[parity],
                                  .slope   = w->own->slope,
                                  .seen    = seen,
                                  .kept    = kept};
    apply_cell_options(&c);
}

/* Scores of infinite numbers. */
static __attribute__((noinline)) void mend_cell(const walk *w, cell at, int parity, int pieces)
{
    block s = cell_s(w, at, parity, pieces);
    fa_amx_mend_unit(s.c.c, s.a, s.a_row, s.b, w->depth, pieces);
}

/* seen: filled where the cell is special, *special. */
FA_AMX_INLINE gradient cell_gradient(const walk *w, const exponential *e, cell at, int parity, uint32_t seen[2][CELL],
                                     bool *special, int pieces)
{
    scratch *own      = w->own;
    int      in_strip = at.strip - w->first;
    gradient g        = {.e    = *e,
                         .s    = own->s[parity],
                         .p_t  = p_t_at(w, in_strip, at.group, pieces),
                         .ds_t = ds_t_at(w, in_strip, at.group, pieces),
                         .ds   = ds_at(w, 2 * at.group, at.strip, pieces),
                         .seen = seen[0]};
    for (int half = 0; half < 2; half++) {
        __m512 lse    = _mm512_loadu_ps(w->in->lse_log2 + at.group * CELL + 16 * half);
        __m512 least  = _mm512_set1_ps((float)(w->in->p_log2 - 1));
        g.shift[half] = _mm512_mul_ps(_mm512_sub_ps(least, lse), _mm512_set1_ps(EXPONENT_UNIT));
        g.limit[half] = largest_exponent(lse, pieces);
        g.delta[half] = _mm512_loadu_ps(w->in->delta + at.group * CELL + 16 * half);
#ifdef FA_AMX_FP16
        g.limit[half] = _mm512_add_epi32(g.limit[half], _mm512_set1_epi32(w->in->p_log2 * (int)EXPONENT_UNIT));
        g.dp_scale    = _mm512_set1_ps(ldexpf(1.0f, w->in->ds_log2 - w->in->p_log2));
        g.delta[half] = _mm512_mul_ps(g.delta[half], g.dp_scale);
#endif
    }
    if (pieces > 1 && w->infinite)
        mend_cell(w, at, parity, pieces);
    *special = cell_mask(w, at, seen[0]);
    if (w->in->options) {
        const fa_call *call = w->in->options->call;
        cell_options(w, at, parity, seen[0], seen[1]);
        g.slope      = call->softcap > 0.0f ? own->slope : NULL;
        g.kept       = call->dropout.threshold ? seen[1] : NULL;
        g.keep_scale = _mm512_set1_ps(call->dropout.keep_scale);
    }
    if (w->nan_lse)
        hide_minus_infinity(own->s[parity], seen[0]);
    return g;
}

/* Rows and products one after the other; with two pieces also the first steps of S^T of list[2]. */
FA_AMX_INLINE void step_apart(const walk *w, const gradient *g, bool special, const cell *list, int count, int parity,
                              pending *last, int pieces)
{
    int   begun = steps_begun(w, pieces);
    bool  ahead = begun > 0 && count > 2;
    block soon;
    if (count > 1)
        cell_products(w, list[1], !parity, last, pieces, NULL, begun);
    else
        store_pending(last);
    if (ahead)
        soon = cell_s(w, list[2], parity, pieces);
    if (special)
        gradient_rows(w, g, true, ahead ? &soon : NULL, last, pieces);
    else
        gradient_rows(w, g, false, ahead ? &soon : NULL, last, pieces);
}

/* Three pieces: rows among products. */
FA_AMX_INLINE void step_beside(const walk *w, const gradient *g, bool special, const cell *list, int count, int parity,
                               pending *last, int pieces)
{
    beside v = beside_make(g, special,
                           num_products(sum_of_s(pieces)) * w->depth + num_products(sum_of_dp(pieces)) * w->depth_v);
    if (count > 1)
        cell_products(w, list[1], !parity, last, pieces, &v, 0);
    else
        store_pending(last);
    while (v.row < 16) {
        next_row(&v);
        if (v.row % 4 == 0)
            KEEP_AWAKE();
    }
}

/* P and dS of list[0], of `count` cells, and the products of the next one. */
FA_AMX_INLINE void cell_step(const walk *w, const exponential *e, const cell *list, int count, int parity,
                             pending *last, int pieces)
{
    cell     at = list[0];
    uint32_t seen[2][CELL]; /* and kept */
    bool     special;
    gradient g     = cell_gradient(w, e, at, parity, seen, &special, pieces);
    int      depth = w->depth == w->depth_v && count > 1 && !special ? w->depth : 0;
    if (pieces == BESIDE_PIECES)
        step_beside(w, &g, special, list, count, parity, last, pieces);
    else if (pieces == 1 && depth == 2)
        products_among(w, list, !parity, 2, &g, last);
    else if (pieces == 1 && depth == 4)
        products_among(w, list, !parity, 4, &g, last);
    else
        step_apart(w, &g, special, list, count, parity, last, pieces);
}

/* Two tiles side by side, and the two `next` floats on: sums to which nothing is added. */
static void clear_tiles(float *c, int64_t next)
{
    memset(c, 0, 2 * FA_AMX_TILE_FLOATS * sizeof *c);
    memset(c + next, 0, 2 * FA_AMX_TILE_FLOATS * sizeof *c);
}

/* dV and dK of a strip; B: the column block's tiles of dO or Q, used by all cells before the next. */
FA_AMX_INLINE void strip_sums(const walk *w, int first, const fa_range groups[MOST_STRIP_CELLS], bool keys,
                              pending *last, int pieces)
{
    int         columns = keys ? w->columns : w->columns_v;
    float      *sums    = keys ? w->in->dk : w->in->dv;
    const char *right   = keys ? w->in->q_right : w->in->dout_right;
    int64_t     step    = pieces * FA_AMX_TILE;
    for (int col = 0; col < columns; col += 2) {
        /* what comes next: the same operand's next columns, or dK's first ones */
        const char *next = col + 2 < columns ? right + (int64_t)(col + 2) * w->groups * step : w->in->q_right;
        for (int n = 0; n < strip_cells(pieces); n++) {
            fa_range    range = groups[n];
            const void *left  = keys ? ds_t_at(w, n, range.begin, pieces) : p_t_at(w, n, range.begin, pieces);
            float      *c     = sums + fa_tiled_at(columns * 16, (first + n) * CELL, col * 16);
            block       x     = {left,
                                 right + ((int64_t)col * w->groups + 2 * range.begin) * step,
                                 step,
                                 2 * step,
                                 step,
                                 2 * step,
                                 {c, fa_tiled_at(columns * 16, 16, 0), FA_AMX_TILE_FLOATS},
                                 !w->in->fresh_keys,
                                 c + fa_tiled_at(columns * 16, CELL, 0),
                                 next + 2 * n * step};
            piece_sum   sum   = {pieces, false, false, false};
            int         steps = range.end - range.begin;
            if (steps > 0 && pieces == 1 && asks_ahead(w))
                run_block_of_one(&x, steps, last, sum, NULL, true);
            else if (steps > 0)
                run_block(&x, steps, last, sum);
            else if (w->in->fresh_keys && first + n < w->strips)
                clear_tiles(c, x.c.row);
        }
    }
}

static int list_cells(const walk *w, int first, fa_range groups[MOST_STRIP_CELLS], cell list[MAX_CELLS], int pieces)
{
    int count = 0;
    for (int n = 0; n < strip_cells(pieces); n++)
        groups[n] = first + n < w->strips ? groups_seeing(w, first + n) : (fa_range){0, 0};
    for (int group = 0; group < w->groups; group++) {
        for (int n = 0; n < strip_cells(pieces); n++) {
            if (group >= groups[n].begin && group < groups[n].end)
                list[count++] = (cell){first + n, group};
        }
    }
    return count;
}

/* Rows of dO that packing left out for NaN or Inf: dV of the keys that they see, from the strip's P. */
static void add_bad_dout(const walk *w, int first, const fa_range groups[MOST_STRIP_CELLS], int pieces)
{
    const fa_backward_block *b    = w->in;
    int                      keys = fa_min_int(strip_cells(pieces) * CELL, b->keys - first * CELL);
    for (int n = 0; n < b->num_bad_dout; n++) {
        int         row = b->bad_dout[n], group = row / CELL;
        const void *dout = b->dout_rows->row[row];
        for (int j = 0; j < keys; j++) {
            const uint16_t *p_t = p_t_at(w, j / CELL, group, pieces) + j % CELL / 16 * second_half(pieces);
            float           p   = p_of(p_t, j % 16, row % CELL, pieces);
            if (group < groups[j / CELL].begin || group >= groups[j / CELL].end || p == 0.0f)
                continue;
            for (int col = 0; col < b->head_dim_v; col++)
                b->dv[fa_tiled_at(b->head_dim_v, first * CELL + j, col) + j % 16 * 16 + col % 16] +=
                    p * fa_load(dout, col * b->dout_rows->stride, b->dout_rows->dtype);
        }
    }
}

/* P and dS of the strip's cells. */
FA_AMX_INLINE void run_cells(const walk *w, const exponential *e, const cell *list, int count, pending *last,
                             int pieces)
{
    cell_products(w, list[0], 0, last, pieces, NULL, 0);
    store_pending(last);
    if (count > 1) {
        block s = cell_s(w, list[1], 1, pieces);
        for (int n = 0; n < steps_begun(w, pieces); n++)
            soon_step(w, &s, n, last, pieces);
    }
    for (int n = 0; n < count; n++)
        cell_step(w, e, list + n, count - n, n & 1, last, pieces);
}

FA_AMX_INLINE void run_strip(const walk *w, const exponential *e, int first, pending *last, int pieces)
{
    fa_range groups[MOST_STRIP_CELLS];
    cell     list[MAX_CELLS];
    int      count = list_cells(w, first, groups, list, pieces);
    if (count > 0)
        run_cells(w, e, list, count, last, pieces);
    if (count == 0 && !w->in->fresh_keys)
        return;
    strip_sums(w, first, groups, false, last, pieces);
    strip_sums(w, first, groups, true, last, pieces);
    if (w->in->num_bad_dout > 0) {
        store_pending(last);
        add_bad_dout(w, first, groups, pieces);
    }
}

static __attribute__((noinline)) void look_at_lse(walk *w)
{
    bool usual = true, number = true;
    for (int n = 0; n < w->in->rows; n++) {
        usual &= fabsf(w->in->lse_log2[n]) <= LSE_LARGE;
        number &= !isnan(w->in->lse_log2[n]);
    }
    w->unusual_lse = !usual;
    w->nan_lse     = !number;
}

FA_AMX_INLINE void run_tile(const fa_backward_block *b, int pieces)
{
    walk        w    = walk_make(b, pieces);
    exponential e    = exponential_make(b->multiplier, pieces);
    pending     last = {0};
    w.infinite = pieces > 1 && fa_amx_any_infinite(FA_ROLE_Q_RIGHT, b->q_right, b->rows, FA_ROLE_K_RIGHT, b->k, b->keys,
                                                   b->head_dim, pieces);
    look_at_lse(&w);
    run_strip(&w, &e, w.first, &last, pieces);
    store_pending(&last);
}

/* ---- dQ^T += K^T dS ---- */

/* The part's strips that a group sees. */
static fa_range strips_of(const walk *w, int group, int pieces)
{
    fa_range seen = strips_seen(w, group);
    return (fa_range){fa_max_int(seen.begin, w->first), fa_min_int(seen.end, w->first + strip_cells(pieces))};
}

FA_AMX_INLINE void dq_of_part(const walk *w, pending *last, int pieces)
{
    const fa_backward_block *b    = w->in;
    int64_t                  step = pieces * FA_AMX_TILE, row = w->strips * step;
    int64_t                  next_queries = fa_tiled_at(b->head_dim, 16, 0);
    int                      col          = 0;
    for (; pieces == 1 && col + 3 < w->columns; col += 4) {
        for (int n = 0; n < 2 * w->groups; n++) {
            fa_range strips = strips_of(w, n / 2, pieces);
            float   *c      = b->dq + fa_tiled_at(b->head_dim, n * 16, col * 16);
            block    x      = {w->k_t_left + col * row + strips.begin * step,
                               (const char *)ds_at(w, n, strips.begin, pieces),
                               row,
                               step,
                               0,
                               step,
                               {c, 2 * FA_AMX_TILE_FLOATS, FA_AMX_TILE_FLOATS},
                               !b->fresh_dq,
                               c + next_queries,
                               NULL};
            if (strips.begin < strips.end)
                run_tall_block(&x, strips.end - strips.begin, last);
            else if (b->fresh_dq)
                clear_tiles(c, x.c.row);
        }
    }
    for (; col < w->columns; col += 2) {
        for (int group = 0; group < w->groups; group++) {
            fa_range strips = strips_of(w, group, pieces);
            block    x      = {w->k_t_left + col * row + strips.begin * step,
                               (const char *)ds_at(w, 2 * group, strips.begin, pieces),
                               row,
                               step,
                               pitch(strip_cells(pieces), pieces) * step,
                               step,
                               {b->dq + fa_tiled_at(b->head_dim, group * CELL, col * 16), FA_AMX_TILE_FLOATS, next_queries},
                               !b->fresh_dq,
                               NULL,
                               NULL};
            if (strips.begin < strips.end)
                run_block(&x, strips.end - strips.begin, last, (piece_sum){pieces, false, false, true});
            else if (b->fresh_dq)
                clear_tiles(x.c.c, next_queries);
        }
    }
}

FA_AMX_INLINE void run_dq(const fa_backward_block *b, int pieces)
{
    walk    w    = walk_make(b, pieces);
    pending last = {0};
    dq_of_part(&w, &last, pieces);
    store_pending(&last);
}

/* ---- the entries, one pair for each number of pieces ---- */

#ifdef FA_AMX_FP16
void fa_amx_fp16_backward_block(const fa_backward_block *b) { run_tile(b, 1); }
void fa_amx_fp16_backward_dq(const fa_backward_block *b) { run_dq(b, 1); }
#else
void fa_amx_backward_block_1(const fa_backward_block *b) { run_tile(b, 1); }
void fa_amx_backward_block_2(const fa_backward_block *b) { run_tile(b, 2); }
void fa_amx_backward_block_3(const fa_backward_block *b) { run_tile(b, 3); }
void fa_amx_backward_dq_1(const fa_backward_block *b) { run_dq(b, 1); }
void fa_amx_backward_dq_2(const fa_backward_block *b) { run_dq(b, 2); }
void fa_amx_backward_dq_3(const fa_backward_block *b) { run_dq(b, 3); }
#endif
