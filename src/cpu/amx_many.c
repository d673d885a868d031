/*
 * Wide heads of bfloat16, as latent attention's decode has them, 5 to 256 rows: K and V are read where they lie, as in
 * amx_few.c, but for rows enough to fill tiles.
 *
 *     S^T[2 x 16 keys][2 x 16 rows]  = K Q^T     K is a left operand as it lies; Q^T is made once a call
 *     O[2 x 16 rows][2 x 16 columns] += P V      V is interleaved once for all rows, 32 columns of all keys at a time;
 *                                                for up to 32 rows it is an operand as it lies, and P comes twice
 *
 * P of more than 32 rows is row major bfloat16, as AVX512_BF16's softmax leaves it in the place of the scores: a left
 * operand as it lies, where V's pairs are keys 2r and 2r + 1.
 *
 * Vectors work beside products: a unit of S is turned into rows beside the next unit, 32 columns of V are interleaved
 * beside the products of the 32 before. Memory works beside both: while O grows the first half of the next tile of keys
 * is asked for, the rest while S is made of the first. Decision 0073 has what was tried.
 */
#include "cpu/amx_in_place.h"
#include "cpu/amx_pack.h"

enum { MOST_DEPTH_TILES = 18 }; /* head_dim 576 */

/* ---- S = Q K^T ---- */

/* 16 rows of K as left operands, the first at `at` and `step` bytes apart; 0: one by one, `count` of them. */
typedef struct key_block {
    const char        *at;
    int64_t            step;
    const void *const *row;
    int                count;
} key_block;

FA_AMX_INLINE key_block key_block_of(const fa_rows *k, int first)
{
    int64_t step = fa_amx_equal_steps(k, first);
    int     left = fa_max_int(0, fa_min_int(k->count - first, 16));
    return (key_block){step ? k->row[first] : NULL, step, k->row + (left ? first : 0), left};
}

/* Columns `col` to col + 31 of rows that are not at equal distances; zeros beyond the last. */
static __attribute__((noinline)) void copy_columns(char *out, const key_block *k, int col)
{
    for (int r = 0; r < 16; r++)
        _mm512_store_si512(out + 64 * r, r < k->count ? _mm512_loadu_si512((const uint16_t *)k->row[r] + col)
                                                      : _mm512_setzero_si512());
}

/* Block n's columns 32 c to 32 c + 31; once: not read again soon. */
#define LOAD_KEYS(t, n, c, once)                                                                                       \
    do {                                                                                                               \
        if (!k[n].step) {                                                                                              \
            copy_columns(copy, &k[n], 32 * (c));                                                                       \
            TILE_LOAD(t, copy, 64);                                                                                    \
        } else if (once) {                                                                                             \
            TILE_LOAD_ONCE(t, k[n].at + 64 * (c), k[n].step);                                                          \
        } else {                                                                                                       \
            TILE_LOAD(t, k[n].at + 64 * (c), k[n].step);                                                               \
        }                                                                                                              \
    } while (0)

/* What a unit leaves: tiles of S^T, [keys / 16][rows / 16], whose place is s. */
typedef struct unit {
    const float *from;
    float       *s;
    int          lds, tiles, rows, quarter; /* tiles in all and side by side; quarters of them that are done */
} unit;

/* The next quarter of a tile: four rows of S. */
FA_AMX_INLINE void turn_quarter(unit *u)
{
    if (u->quarter == 4 * u->tiles)
        return;
    int     tile = u->quarter / 4, quarter = u->quarter % 4, second = u->rows - 1; /* 1: two tiles of rows by turns */
    float  *to = u->s + (int64_t)(16 * (tile & second) + 4 * quarter) * u->lds + 16 * (tile >> second);
    __m512i x[4];
    fa_amx_turn_chunks(x, (const char *)(u->from + tile * FA_AMX_TILE_FLOATS), quarter);
    for (int n = 0; n < 4; n++)
        _mm512_storeu_si512(to + (int64_t)n * u->lds, x[n]);
    u->quarter++;
}

/* keys, rows: 2 and 2 tiles, or 4 and 1, or 2 and 1. q: `tiles` tiles of 16 rows, then those of the next. once: for K,
 * which then leaves the first-level cache to Q. */
FA_AMX_INLINE void score_unit(float *out, const key_block *k, const char *q, const int tiles, const int keys,
                              const int rows, const bool once, unit *before, fa_amx_asks *asks)
{
    _Alignas(64) char copy[FA_AMX_TILE];
    int               each = (15 + tiles) / tiles;
    fa_amx_zero_sums();
    for (int c = 0; c < tiles; c++) {
        TILE_LOAD(6, q + FA_AMX_TILE * c, 64);
        LOAD_KEYS(4, 0, c, once);
        TILE_DOT(0, 4, 6);
        fa_amx_ask(asks, 4);
        if (rows == 2) {
            TILE_LOAD(7, q + FA_AMX_TILE * (tiles + c), 64);
            TILE_DOT(1, 4, 7);
            LOAD_KEYS(5, 1, c, once);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        } else {
            LOAD_KEYS(5, 1, c, once);
            TILE_DOT(1, 5, 6);
            if (keys == 4) {
                LOAD_KEYS(4, 2, c, once);
                TILE_DOT(2, 4, 6);
                LOAD_KEYS(5, 3, c, once);
                TILE_DOT(3, 5, 6);
            }
        }
        fa_amx_ask(asks, 12);
        for (int n = 0; n < each; n++)
            turn_quarter(before);
    }
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + FA_AMX_TILE_FLOATS, 64);
    if (keys * rows == 4) {
        TILE_STORE(2, out + 2 * FA_AMX_TILE_FLOATS, 64);
        TILE_STORE(3, out + 3 * FA_AMX_TILE_FLOATS, 64);
    }
}

/* Role Q's packed form as right operands. */
static void turn_queries(char *out, const char *q, int tiles)
{
    for (int tile = 0; tile < tiles; tile++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            __m512i x[4];
            fa_amx_turn_chunks(x, q + FA_AMX_TILE * tile, quarter);
            for (int n = 0; n < 4; n++)
                _mm512_store_si512(out + FA_AMX_TILE * tile + 256 * quarter + 64 * n, x[n]);
        }
    }
}

void fa_amx_scores_many(float *s, int lds, const void *q, const fa_rows *k, int rows)
{
    _Alignas(64) char  turned[2 * MOST_DEPTH_TILES * FA_AMX_TILE];
    _Alignas(64) float out[2][4 * FA_AMX_TILE_FLOATS];
    int                tiles = k->cols / 32, number = 0;
    unit               before = {.rows = 1};
    fa_amx_asks        asks   = {k->row, k->count / 2, k->count, 0, 2 * k->cols};
    for (int first = 0; first < rows; first += 32) {
        int two = rows - first > 16 ? 2 : 1;
        turn_queries(turned, (const char *)q + (int64_t)first / 16 * tiles * FA_AMX_TILE, two * tiles);
        for (int key = 0, keys; key < k->count; key += 16 * keys, number++) {
            keys            = two == 1 && k->count - key > 32 ? 4 : 2;
            float    *to    = out[number % 2];
            key_block of[4] = {key_block_of(k, key), key_block_of(k, key + 16)};
            if (keys == 4) {
                of[2] = key_block_of(k, key + 32);
                of[3] = key_block_of(k, key + 48);
                score_unit(to, of, turned, tiles, 4, 1, false, &before, &asks);
            } else if (two == 1) {
                score_unit(to, of, turned, tiles, 2, 1, false, &before, &asks);
            } else if (rows > 32) {
                score_unit(to, of, turned, tiles, 2, 2, true, &before, &asks);
            } else {
                score_unit(to, of, turned, tiles, 2, 2, false, &before, &asks);
            }
            int whole = fa_tiles_of(k->count - key, 32) * 2; /* S has room for whole steps of 32 keys */
            before    = (unit){to, s + (int64_t)first * lds + key, lds, fa_min_int(keys, whole) * two, two, 0};
        }
    }
    while (before.quarter < 4 * before.tiles)
        turn_quarter(&before);
}

/* ---- O += P V ---- */

/* Columns of V with Inf or NaN, which a P that AMX takes for 0 must not meet: by AVX-512. */
static void add_columns(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                        int col, int cols)
{
    static const fa_soon none = {0};
    const void          *row[FA_MAX_TILE];
    fa_rows              part = {row, v->count, cols, 1, v->dtype, 0};
    for (int n = 0; n < v->count; n++)
        row[n] = (const uint16_t *)v->row[n] + col;
    for (int r = 0; r < rows; r += 4)
        fa_kernels_avx512()->accumulate_few(o + (int64_t)r * ldo + col, ldo, rescale + r, p + (int64_t)r * ldp, ldp,
                                            &part, fa_min_int(4, rows - r), &none, NULL);
}

/* ---- up to 32 rows: V as it lies ---- */

/* P's rows as left operands of V as it lies, whose pairs are columns 2c and 2c + 1: (p, 0) of 16 keys, then (0, p). */
static void spread_p(char *out, const float *p, int ldp, int rows, int keys)
{
    for (int first = 0; first < rows; first += 16) {
        for (int key = 0; key < keys; key += 16, out += 2 * FA_AMX_TILE) {
            for (int r = 0; r < 16; r++) {
                __m512 x = _mm512_setzero_ps();
                if (first + r < rows)
                    x = fa_amx_load_keys(p + (int64_t)(first + r) * ldp, key, keys);
                __m512i high = _mm512_castps_si512(fa_amx_cut(fa_amx_half_up(x)));
                _mm512_store_si512(out + 64 * r, _mm512_srli_epi32(high, 16));
                _mm512_store_si512(out + FA_AMX_TILE + 64 * r, high);
            }
        }
    }
}

/* Sums of a tile of rows: of the even and the odd ones of 32 columns, then, if `two`, of the next 32. */
FA_AMX_INLINE void raw_block(float *sums, const char *left, const fa_rows *v, int col, const bool two,
                             fa_amx_asks *asks)
{
    _Alignas(64) char copy[FA_AMX_TILE];
    fa_amx_zero_sums();
    for (int key = 0; key < v->count; key += 16, left += 2 * FA_AMX_TILE) {
        key_block k[1] = {key_block_of(v, key)};
        TILE_LOAD_ONCE(4, left, 64);
        fa_amx_ask(asks, 3);
        LOAD_KEYS(6, 0, col / 32, false);
        TILE_DOT(0, 4, 6);
        fa_amx_ask(asks, 3);
        TILE_LOAD_ONCE(5, left + FA_AMX_TILE, 64);
        TILE_DOT(1, 5, 6);
        fa_amx_ask(asks, 3);
        if (two) {
            LOAD_KEYS(7, 0, col / 32 + 1, false);
            TILE_DOT(2, 4, 7);
            fa_amx_ask(asks, 3);
            TILE_DOT(3, 5, 7);
        }
    }
    fa_amx_store_sums(sums);
}

static void accumulate_raw(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           fa_amx_asks *asks, char *left)
{
    _Alignas(64) float sums[4 * FA_AMX_TILE_FLOATS];
    spread_p(left, p, ldp, rows, v->count);
    for (int col = 0; col < v->cols; col += 64) {
        int cols = fa_min_int(64, v->cols - col);
        for (int first = 0; first < rows; first += 16) {
            int         count = fa_min_int(16, rows - first);
            float      *at    = o + (int64_t)first * ldo;
            const char *of_p  = left + (int64_t)first / 16 * fa_tiles_of(v->count, 16) * 2 * FA_AMX_TILE;
            if (cols == 64)
                raw_block(sums, of_p, v, col, true, asks);
            else
                raw_block(sums, of_p, v, col, false, asks);
            if (!fa_amx_are_finite(sums, cols / 16)) {
                add_columns(at, ldo, rescale + first, p + (int64_t)first * ldp, ldp, v, count, col, cols);
                continue;
            }
            for (int r = 0; r < count; r++) {
                for (int c = 0; c < cols; c += 32) {
                    const float *even = sums + c / 16 * FA_AMX_TILE_FLOATS + 16 * r;
                    fa_amx_add_pairs(at + (int64_t)r * ldo + col + c, rescale[first + r], _mm512_load_ps(even),
                                     _mm512_load_ps(even + FA_AMX_TILE_FLOATS));
                }
            }
        }
    }
}

/* ---- more rows: V is interleaved ---- */

/* 32 columns of V that are being interleaved: pairs (2r, 2r + 1) of each 32 keys, as two right operands. */
typedef struct panel {
    char          *to;
    const fa_rows *v;
    int            col, done, pairs; /* done: of the pairs of rows */
    __m512i        largest;          /* of their magnitudes */
} panel;

FA_AMX_INLINE __m512i row_or_zeros(const panel *p, int key)
{
    return key < p->v->count ? _mm512_loadu_si512((const uint16_t *)p->v->row[key] + p->col) : _mm512_setzero_si512();
}

FA_AMX_INLINE void interleave(panel *p, int pairs, fa_amx_asks *asks)
{
    for (int end = fa_min_int(p->done + pairs, p->pairs); p->done < end; p->done++) {
        int key    = 2 * p->done;
        p->largest = fa_amx_pair_row(p->to + 2 * FA_AMX_TILE * (key / 32), key % 32 / 2, row_or_zeros(p, key),
                                     row_or_zeros(p, key + 1), p->largest);
        fa_amx_ask(asks, 2);
    }
}

/* Rows of P, bfloat16, that lie `step` bytes apart. */
typedef struct left_rows {
    const char *at;
    int64_t     step;
} left_rows;

/* 32 columns of two tiles of rows, or one; beside them `pairs` pairs of the next columns for each product of 32 keys.
 */
FA_AMX_INLINE void value_block(float *o, int64_t ldo, left_rows p, const char *right, int steps, const bool two,
                               int pairs, panel *next, fa_amx_asks *asks)
{
    const char *second = p.at + 16 * p.step;
    TILE_LOAD(0, o, 4 * ldo);
    TILE_LOAD(1, o + 16, 4 * ldo);
    if (two) {
        TILE_LOAD(2, o + 16 * ldo, 4 * ldo);
        TILE_LOAD(3, o + 16 * ldo + 16, 4 * ldo);
    }
    for (int n = 0; n < steps; n++) {
        TILE_LOAD_ONCE(4, p.at + 64 * n, p.step);
        TILE_LOAD(6, right + 2 * FA_AMX_TILE * n, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, right + 2 * FA_AMX_TILE * n + FA_AMX_TILE, 64);
        TILE_DOT(1, 4, 7);
        if (two) {
            TILE_LOAD_ONCE(5, second + 64 * n, p.step);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        interleave(next, pairs, asks);
    }
    TILE_STORE(0, o, 4 * ldo);
    TILE_STORE(1, o + 16, 4 * ldo);
    if (two) {
        TILE_STORE(2, o + 16 * ldo, 4 * ldo);
        TILE_STORE(3, o + 16 * ldo + 16, 4 * ldo);
    }
}

/* Floats of P again, for add_columns, four rows at a time. */
static void add_packed_columns(float *o, int ldo, left_rows p, const fa_rows *v, int rows, int col)
{
    static const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    _Alignas(64) float some[4][FA_MAX_TILE];
    for (int first = 0; first < rows; first += 4) {
        int count = fa_min_int(4, rows - first);
        for (int r = 0; r < count; r++) {
            const uint16_t *row = (const uint16_t *)(p.at + (first + r) * p.step);
            for (int key = 0; key < fa_tiles_of(v->count, 16) * 16; key++)
                some[r][key] = key < v->count ? fa_float_of_bf16(row[key]) : 0.0f;
        }
        add_columns(o + (int64_t)first * ldo, ldo, ones, some[0], FA_MAX_TILE, v, count, col, 32);
    }
}

/* to: room for two panels. */
static void accumulate_interleaved(float *o, int ldo, const float *rescale, left_rows p, const fa_rows *v, int rows,
                                   fa_amx_asks *asks, char *to)
{
    int   steps = fa_tiles_of(v->count, 32), blocks = fa_tiles_of(rows, 32), pairs = (15 + blocks) / blocks;
    panel now = {.to = to, .v = v, .pairs = 16 * steps, .largest = _mm512_setzero_si512()};
    fa_amx_scale_rows(o, ldo, rescale, rows, v->cols);
    interleave(&now, now.pairs, asks);
    for (int col = 0; col < v->cols; col += 32) {
        panel next = {.to      = to + (col / 32 + 1) % 2 * 2 * (int64_t)steps * FA_AMX_TILE,
                      .v       = v,
                      .col     = col + 32,
                      .pairs   = col + 32 < v->cols ? 16 * steps : 0,
                      .largest = _mm512_setzero_si512()};
        if (_mm512_cmpge_epu16_mask(now.largest, _mm512_set1_epi16(0x7F80))) {
            add_packed_columns(o, ldo, p, v, rows, col);
        } else {
            for (int r = 0; r < rows; r += 32) {
                float    *at = o + (int64_t)r * ldo + col;
                left_rows of = {p.at + r * p.step, p.step};
                if (rows - r > 16)
                    value_block(at, ldo, of, now.to, steps, true, pairs, &next, asks);
                else
                    value_block(at, ldo, of, now.to, steps, false, pairs, &next, asks);
            }
        }
        interleave(&next, next.pairs, asks);
        now = next;
    }
}

/* ---- both ---- */

/* Bytes from row to row of P in scratch, an odd number of lines, which spread over all sets of the first-level cache.
 */
static int64_t row_bytes(int keys) { return 2 * fa_round_up(keys, 64) + 64; }

size_t fa_amx_many_scratch(int rows, int keys)
{
    size_t raw = (size_t)(FA_AMX_RAW_ROWS / 16) * (size_t)fa_tiles_of(keys, 16) * 2 * FA_AMX_TILE;
    size_t interleaved =
        (size_t)fa_round_up(rows, 32) * (size_t)row_bytes(keys) + 4 * (size_t)fa_tiles_of(keys, 32) * FA_AMX_TILE;
    return raw > interleaved ? raw : interleaved;
}

/* soon: the first half of the next tile's keys, where `each` says that V is in the cache. */
static fa_amx_asks asks_of(const fa_rows *v, const fa_soon *soon)
{
    if (soon->each)
        return (fa_amx_asks){soon->rows.row, 0, soon->rows.count, 0, 2 * soon->rows.cols};
    return (fa_amx_asks){v->row, fa_min_int(16, v->count), v->count, 0, 2 * v->cols};
}

void fa_amx_accumulate_many_packed(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                                   int rows, const fa_soon *soon, void *scratch)
{
    fa_amx_asks asks = asks_of(v, soon);
    if (v->count % 32 > 0 && v->count % 32 <= 16) /* P is 0 up to a multiple of 16 keys, but tiles have 32 */
        for (int r = 0; r < rows; r++)
            memset((uint16_t *)(uintptr_t)(p + (int64_t)r * ldp) + fa_tiles_of(v->count, 16) * 16, 0, 32);
    accumulate_interleaved(o, ldo, rescale, (left_rows){(const char *)p, 4 * (int64_t)ldp}, v, rows, &asks, scratch);
}

void fa_amx_accumulate_many(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                            int rows, const fa_soon *soon, void *scratch)
{
    fa_amx_asks asks = asks_of(v, soon);
    left_rows   left = {scratch, row_bytes(v->count)};
    if (rows <= FA_AMX_RAW_ROWS) {
        accumulate_raw(o, ldo, rescale, p, ldp, v, rows, &asks, scratch);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int key = 0; key < v->count; key += 32)
            _mm512_storeu_si512((char *)scratch + r * left.step + 2 * key,
                                (__m512i)_mm512_cvtne2ps_pbh(fa_amx_load_keys(p + (int64_t)r * ldp, key + 16, v->count),
                                                             fa_amx_load_keys(p + (int64_t)r * ldp, key, v->count)));
    accumulate_interleaved(o, ldo, rescale, left, v, rows, &asks, (char *)scratch + fa_round_up(rows, 32) * left.step);
}
