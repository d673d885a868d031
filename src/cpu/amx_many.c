/*
 * Wide heads of bfloat16, as latent attention's decode has them, 5 to 256 rows: K and V are read where they lie, as in
 * amx_few.c, but for rows enough to fill tiles.
 *
 *     S^T[2 x 16 keys][2 x 16 rows]  = K Q^T     K is a left operand as it lies; Q^T is made once a call
 *     O[2 x 16 rows][2 x 16 columns] += P V      V is interleaved once for all rows, 32 columns of all keys at a time
 *
 * Vectors work beside products: a unit of S is turned into rows beside the next unit, 32 columns of V are interleaved
 * beside the products of the 32 before. Memory works beside both: while O grows the first half of the next tile of keys
 * is asked for, the rest while S is made of the first. Decision 0073.
 */
#include "cpu/amx_many.h"
#include "cpu/amx_pack.h"

#ifndef X_RAW
#define X_RAW 32
#endif
#ifndef X_ASKS
#define X_ASKS 5
#endif
#ifndef X_PART
#define X_PART 50
#endif
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

#ifdef X_K_ONCE
#define LOAD_K TILE_LOAD_ONCE
#else
#define LOAD_K TILE_LOAD
#endif
#ifdef X_Q_ONCE
#define LOAD_Q TILE_LOAD_ONCE
#else
#define LOAD_Q TILE_LOAD
#endif
#ifdef X_P_ONCE
#define LOAD_P TILE_LOAD_ONCE
#else
#define LOAD_P TILE_LOAD
#endif
#ifdef X_V_ONCE
#define LOAD_V TILE_LOAD_ONCE
#else
#define LOAD_V TILE_LOAD
#endif
#define LOAD_KEYS(t, n)                                                                                                \
    do {                                                                                                               \
        if (k[n].step) {                                                                                               \
            LOAD_K(t, k[n].at + 64 * c, k[n].step);                                                                 \
        } else {                                                                                                       \
            copy_columns(copy, &k[n], 32 * c);                                                                         \
            TILE_LOAD(t, copy, 64);                                                                                    \
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
    float  *to   = u->s + (int64_t)(16 * (tile & second) + 4 * quarter) * u->lds + 16 * (tile >> second);
    __m512i x[4];
    fa_amx_turn_chunks(x, (const char *)(u->from + tile * FA_AMX_TILE_FLOATS), quarter);
    for (int n = 0; n < 4; n++)
        _mm512_storeu_si512(to + (int64_t)n * u->lds, x[n]);
    u->quarter++;
}

/* keys, rows: 2 and 2 tiles, or 4 and 1, or 2 and 1. q: `tiles` tiles of 16 rows, then those of the next. */
FA_AMX_INLINE void score_unit(float *out, const key_block *k, const char *q, const int tiles, const int keys,
                              const int rows, unit *before, fa_amx_asks *asks)
{
    _Alignas(64) char copy[FA_AMX_TILE];
    int               each = (15 + tiles) / tiles;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int c = 0; c < tiles; c++) {
        LOAD_Q(6, q + FA_AMX_TILE * c, 64);
        LOAD_KEYS(4, 0);
        TILE_DOT(0, 4, 6);
        fa_amx_ask(asks, 4);
        if (rows == 2) {
            LOAD_Q(7, q + FA_AMX_TILE * (tiles + c), 64);
            TILE_DOT(1, 4, 7);
            LOAD_KEYS(5, 1);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        } else {
            LOAD_KEYS(5, 1);
            TILE_DOT(1, 5, 6);
            if (keys == 4) {
                LOAD_KEYS(4, 2);
                TILE_DOT(2, 4, 6);
                LOAD_KEYS(5, 3);
                TILE_DOT(3, 5, 6);
            }
        }
        fa_amx_ask(asks, 12);
#ifndef X_NO_TURN
        for (int n = 0; n < each; n++)
            turn_quarter(before);
#endif
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
    int                tiles = k->cols / 32, half = (int)((int64_t)k->count * X_PART / 100), number = 0;
    unit               before = {.rows = 1};
    fa_amx_asks        asks   = {k->row, half, k->count, 0, 2 * k->cols};
    for (int first = 0; first < rows; first += 32) {
        int two = rows - first > 16 ? 2 : 1;
        turn_queries(turned, (const char *)q + (int64_t)first / 16 * tiles * FA_AMX_TILE, two * tiles);
        for (int key = 0, keys; key < k->count; key += 16 * keys, number++) {
            keys             = two == 1 && k->count - key > 32 ? 4 : 2;
            float    *to     = out[number % 2];
            key_block of[4]  = {key_block_of(k, key), key_block_of(k, key + 16)};
            if (keys == 4) {
                of[2] = key_block_of(k, key + 32);
                of[3] = key_block_of(k, key + 48);
                score_unit(to, of, turned, tiles, 4, 1, &before, &asks);
            } else if (two == 2) {
                score_unit(to, of, turned, tiles, 2, 2, &before, &asks);
            } else {
                score_unit(to, of, turned, tiles, 2, 1, &before, &asks);
            }
            int whole = fa_tiles_of(k->count - key, 32) * 2; /* S has room for whole steps of 32 keys */
            before    = (unit){to, s + (int64_t)first * lds + key, lds, fa_min_int(keys, whole) * two, two, 0};
        }
    }
    while (before.quarter < 4 * before.tiles)
        turn_quarter(&before);
}

/* ---- O += P V ---- */

/* 32 columns of V that are being interleaved: pairs (r, r + 16) of each 32 keys, as two right operands. */
typedef struct panel {
    char          *to;
    const fa_rows *v;
    int            col, done, pairs; /* done: of the pairs of rows */
    __m512i        largest;          /* of their magnitudes */
    bool           ask;              /* for the rest of rows further on */
} panel;

FA_AMX_INLINE __m512i row_or_zeros(const panel *p, int key)
{
    return key < p->v->count ? _mm512_loadu_si512((const uint16_t *)p->v->row[key] + p->col) : _mm512_setzero_si512();
}

FA_AMX_INLINE void interleave(panel *p, int pairs, fa_amx_asks *asks)
{
    for (int end = fa_min_int(p->done + pairs, p->pairs); p->done < end; p->done++) {
        int strip = p->done / 16, r = p->done % 16, key = 32 * strip + r;
        p->largest = fa_amx_pair_row(p->to + 2 * FA_AMX_TILE * strip, r, row_or_zeros(p, key), row_or_zeros(p, key + 16),
                                     p->largest);
        fa_amx_ask(asks, 2);
    }
}

/* 32 columns of two tiles of rows, or one; beside them `pairs` pairs of the next columns for each product of 32 keys. */
FA_AMX_INLINE void value_block(float *o, int64_t ldo, const char *left, const char *right, int steps, const bool two,
                               int pairs, panel *next, fa_amx_asks *asks)
{
    const char *second = left + (int64_t)steps * FA_AMX_TILE;
#ifdef X_NO_O
    TILE_ZERO(0);TILE_ZERO(1);TILE_ZERO(2);TILE_ZERO(3);
#else
    TILE_LOAD(0, o, 4 * ldo);
    TILE_LOAD(1, o + 16, 4 * ldo);
    if (two) {
        TILE_LOAD(2, o + 16 * ldo, 4 * ldo);
        TILE_LOAD(3, o + 16 * ldo + 16, 4 * ldo);
    }
#endif
    for (int n = 0; n < steps; n++) {
        LOAD_P(4, left + FA_AMX_TILE * n, 64);
        LOAD_V(6, right + 2 * FA_AMX_TILE * n, 64);
        TILE_DOT(0, 4, 6);
        LOAD_V(7, right + 2 * FA_AMX_TILE * n + FA_AMX_TILE, 64);
        TILE_DOT(1, 4, 7);
        if (two) {
            LOAD_P(5, second + FA_AMX_TILE * n, 64);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
#ifndef X_NO_INT
        interleave(next, pairs, asks);
#endif
    }
#ifndef X_NO_O
    TILE_STORE(0, o, 4 * ldo);
    TILE_STORE(1, o + 16, 4 * ldo);
    if (two) {
        TILE_STORE(2, o + 16 * ldo, 4 * ldo);
        TILE_STORE(3, o + 16 * ldo + 16, 4 * ldo);
    }
#endif
}

/* Columns of V with Inf or NaN, where a P of 0 must not meet them: by AVX-512. O is rescaled. */
static void add_columns(float *o, int ldo, const float *p, int ldp, const fa_rows *v, int rows, int col)
{
    static const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    static const fa_soon none  = {0};
    const void        *row[FA_MAX_TILE];
    fa_rows            part = {row, v->count, 32, 1, v->dtype};
    for (int n = 0; n < v->count; n++)
        row[n] = (const uint16_t *)v->row[n] + col;
    for (int r = 0; r < rows; r += 4)
        fa_kernels_avx512()->accumulate_few(o + (int64_t)r * ldo + col, ldo, ones, p + (int64_t)r * ldp, ldp, &part,
                                            fa_min_int(4, rows - r), &none, NULL);
}

/* Up to so many rows V is an operand as it lies: interleaving it would take longer than to multiply it by P twice. */
enum { MOST_RAW_ROWS = X_RAW };

/* P's rows as left operands of V as it lies, whose pairs are columns 2c and 2c + 1: (p, 0) of 16 keys, then (0, p). */
static void spread_p(char *out, const float *p, int ldp, int rows, int keys)
{
    for (int first = 0; first < rows; first += 16)
        for (int key = 0; key < keys; key += 16, out += 2 * FA_AMX_TILE)
            for (int r = 0; r < 16; r++) {
                __m512  x    = first + r < rows ? fa_amx_load_keys(p + (int64_t)(first + r) * ldp, key, keys) : _mm512_setzero_ps();
                __m512i high = _mm512_castps_si512(fa_amx_cut(fa_amx_half_up(x)));
                _mm512_store_si512(out + 64 * r, _mm512_srli_epi32(high, 16));
                _mm512_store_si512(out + FA_AMX_TILE + 64 * r, high);
            }
}

static bool are_finite(const float *sums, int tiles)
{
    __m512 check = _mm512_setzero_ps();
    for (int n = 0; n < 16 * tiles; n++) {
        __m512 x = _mm512_load_ps(sums + 16 * n);
        check    = _mm512_add_ps(check, _mm512_sub_ps(x, x));
    }
    return _mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q) == 0;
}

/* sums: of the even and of the odd of 32 columns. */
FA_AMX_INLINE void add_sums(float *o, int ldo, const float *rescale, const float *sums, int rows)
{
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last  = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int r = 0; r < rows; r++, o += ldo) {
        __m512 even = _mm512_load_ps(sums + 16 * r), odd = _mm512_load_ps(sums + FA_AMX_TILE_FLOATS + 16 * r);
        __m512 factor = _mm512_set1_ps(rescale[r]);
        _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), factor, _mm512_permutex2var_ps(even, first, odd)));
        _mm512_storeu_ps(o + 16, _mm512_fmadd_ps(_mm512_loadu_ps(o + 16), factor, _mm512_permutex2var_ps(even, last, odd)));
    }
}

/* Sums of 64 columns of V, or 32, of a tile of rows. */
FA_AMX_INLINE void raw_block(float *sums, const char *left, const fa_rows *v, int col, const bool two, fa_amx_asks *asks)
{
    _Alignas(64) char copy[FA_AMX_TILE];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int key = 0, c = col / 32; key < v->count; key += 16, left += 2 * FA_AMX_TILE) {
        key_block k[1] = {key_block_of(v, key)};
        LOAD_P(4, left, 64);
        fa_amx_ask(asks, X_ASKS);
        LOAD_KEYS(6, 0);
        TILE_DOT(0, 4, 6);
        fa_amx_ask(asks, X_ASKS);
        LOAD_P(5, left + FA_AMX_TILE, 64);
        TILE_DOT(1, 5, 6);
        fa_amx_ask(asks, X_ASKS);
        if (two) {
            c++;
            LOAD_KEYS(7, 0);
            c--;
            TILE_DOT(2, 4, 7);
            fa_amx_ask(asks, X_ASKS);
            TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, 64);
    TILE_STORE(1, sums + FA_AMX_TILE_FLOATS, 64);
    TILE_STORE(2, sums + 2 * FA_AMX_TILE_FLOATS, 64);
    TILE_STORE(3, sums + 3 * FA_AMX_TILE_FLOATS, 64);
}

static void accumulate_raw(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           char *left, fa_amx_asks *asks)
{
    static const fa_soon none = {0};
    _Alignas(64) float   sums[4 * FA_AMX_TILE_FLOATS];
    const void          *row[FA_MAX_TILE];
    spread_p(left, p, ldp, rows, v->count);
    for (int col = 0; col < v->cols; col += 64)
        for (int r = 0; r < rows; r += 16) {
            int         there = fa_min_int(16, rows - r), cols = fa_min_int(64, v->cols - col);
            float      *at    = o + (int64_t)r * ldo + col;
            const char *of_p  = left + (int64_t)r / 16 * fa_tiles_of(v->count, 16) * 2 * FA_AMX_TILE;
            if (cols == 64)
                raw_block(sums, of_p, v, col, true, asks);
            else
                raw_block(sums, of_p, v, col, false, asks);
            if (are_finite(sums, cols / 16)) {
                for (int c = 0; c < cols; c += 32)
                    add_sums(at + c, ldo, rescale + r, sums + c / 16 * FA_AMX_TILE_FLOATS, there);
                continue;
            }
            fa_rows part = {row, v->count, cols, 1, v->dtype};
            for (int n = 0; n < v->count; n++)
                row[n] = (const uint16_t *)v->row[n] + col;
            for (int n = 0; n < there; n += 4)
                fa_kernels_avx512()->accumulate_few(at + (int64_t)n * ldo, ldo, rescale + r + n, p + (int64_t)(r + n) * ldp, ldp,
                                                    &part, fa_min_int(4, there - n), &none, NULL);
        }
}

size_t fa_amx_many_scratch(int rows, int keys)
{
    size_t raw = (size_t)(MOST_RAW_ROWS / 16) * (size_t)fa_tiles_of(keys, 16) * 2 * FA_AMX_TILE;
    size_t all = (size_t)fa_tiles_of(keys, 32) * FA_AMX_TILE * (size_t)(fa_tiles_of(rows, 16) + 4);
    return raw > all ? raw : all;
}

/* soon: the next tile's keys where `each` says that V is in the cache, as it is where V is K's columns. */
void fa_amx_accumulate_many(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                            const fa_soon *soon, void *scratch)
{
    int         steps = fa_tiles_of(v->count, 32), blocks = fa_tiles_of(rows, 32), pairs = (15 + blocks) / blocks;
    char       *left = scratch, *to = left + (int64_t)fa_tiles_of(rows, 16) * steps * FA_AMX_TILE;
    fa_amx_asks asks = {v->row, 8, v->count, 0, 2 * v->cols};
    panel       now  = {.to = to, .v = v, .pairs = 16 * steps, .largest = _mm512_setzero_si512()};
    if (soon->each)
        asks = (fa_amx_asks){soon->rows.row, 0, (int)((int64_t)soon->rows.count * X_PART / 100), 0, 2 * soon->rows.cols};
    if (rows <= MOST_RAW_ROWS) {
        accumulate_raw(o, ldo, rescale, p, ldp, v, rows, left, &asks);
        return;
    }
    fa_amx_pack_p(left, p, ldp, rows, v->count, 1);
    fa_amx_scale_rows(o, ldo, rescale, rows, v->cols);
    interleave(&now, now.pairs, &asks);
    for (int col = 0; col < v->cols; col += 32) {
        panel next = {.to      = to + (col / 32 + 1) % 2 * 2 * (int64_t)steps * FA_AMX_TILE,
                      .v       = v,
                      .col     = col + 32,
                      .pairs   = col + 32 < v->cols ? 16 * steps : 0,
                      .largest = _mm512_setzero_si512()};
        if (_mm512_cmpge_epu16_mask(now.largest, _mm512_set1_epi16(0x7F80)) == 0) {
            for (int r = 0; r < rows; r += 32) {
                float      *at   = o + (int64_t)r * ldo + col;
                const char *of_p = left + (int64_t)r / 16 * steps * FA_AMX_TILE;
                if (rows - r > 16)
                    value_block(at, ldo, of_p, now.to, steps, true, pairs, &next, &asks);
                else
                    value_block(at, ldo, of_p, now.to, steps, false, pairs, &next, &asks);
            }
        } else {
            add_columns(o, ldo, p, ldp, v, rows, col);
        }
#ifndef X_NO_INT
        interleave(&next, next.pairs, &asks);
        now = next;
#endif
    }
}
