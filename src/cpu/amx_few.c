/*
 * Few queries against long keys of bfloat16, on tile registers: K and V are read where they lie and nothing is packed,
 * so that the loop has little to do but wait for memory.
 *
 *     S^T[16 keys][16 rows] = K[16 keys][32 columns] Q^T        K is a left operand as it lies; Q^T is made once a tile
 *     O[4 rows x 4][16]    += P[4 rows x 4][16 keys x 2] V      V as it lies is a right operand of pairs of columns
 *
 * A right operand holds pairs that are contracted together, and those of V as it lies are columns 2c and 2c + 1 of one
 * key. So each row of P comes as two: (p, 0) for each key gives the even columns, (0, p) the odd ones. P is cut into
 * two bfloat16 pieces besides; four rows then fill a tile. What a 0 of P meets must be finite: where it was not, the
 * sums are not either, and the AVX-512 kernel does the tile again.
 *
 * float16 is cut into its two bfloat16 pieces, a block of keys at a time: both of K meet both of Q, side by side in one
 * right operand, and both of V meet P. There columns c and c + 16 of 32 make a pair. Where AMX has float16
 * (amx_fp16_few.c) it is as bfloat16.
 */
#include "cpu/amx_in_place.h"

enum { FEW_GROUP = 4, FEW_ONE_PIECE = 8, FEW_MOST_DEPTH_TILES = 18 }; /* 18: head_dim 576 */

/* The same rows, listed in `row`, of FA_MAX_TILE. */
static fa_rows listed(const fa_rows *rows, const void **row)
{
    fa_rows all = *rows;
    for (int n = 0; n < rows->count; n++)
        row[n] = fa_row_of(rows, n);
    all.row  = row;
    all.step = 0;
    return all;
}

#ifdef FA_AMX_FP16
#define SCORES_FEW fa_amx_fp16_scores_few
#define CUTS_V(v) false
#define ACCUMULATE_FEW fa_amx_fp16_accumulate_few
#else
#define SCORES_FEW fa_amx_scores_few
#define CUTS_V(v) ((v)->dtype == FLASH_ATTN_F16) /* into two pieces */
#define ACCUMULATE_FEW fa_amx_accumulate_few

/* ---- float16: blocks of two pieces ---- */

/* Wide heads of more rows than a tile of P in two pieces has: amx_many.c. */
FA_AMX_INLINE bool takes_many(const fa_rows *of, int rows)
{
    return rows > FEW_GROUP && of->cols > FA_WIDE_HEAD && of->dtype == FLASH_ATTN_BF16;
}

enum { TWO_ROWS = 8 }; /* of Q: their pieces fill a tile */

/* 32 columns of a row, by pairs (c, c + 16). What is not finite leaves NaN in the second piece. */
FA_AMX_INLINE void cut_columns(char *high, char *low, const uint16_t *row)
{
    __m512 a  = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)row));
    __m512 b  = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 16)));
    __m512 la = _mm512_sub_ps(a, fa_amx_cut(a)), lb = _mm512_sub_ps(b, fa_amx_cut(b));
    _mm512_store_si512(high, fa_amx_pair(a, b));
    _mm512_store_si512(low, fa_amx_pair(la, lb));
}

/* A block that is being cut. */
typedef struct few_cut {
    char          *out; /* [column / 32][piece] tiles of 16 rows */
    const fa_rows *rows;
    int            first, col;
    few_ahead      ahead;
} few_cut;

/* Four of its rows, zeros beyond the end. Done between the products of the block before, which take as long. */
FA_AMX_INLINE void cut_quarter(const few_cut *cut, int quarter, const int tiles)
{
    ask_for(&cut->ahead, quarter, tiles);
    for (int n = 4 * quarter; n < 4 * quarter + 4; n++) {
        bool            there = cut->first + n < cut->rows->count;
        const uint16_t *row   = there ? (const uint16_t *)fa_row_of(cut->rows, cut->first + n) + cut->col : NULL;
        for (int c = 0; c < tiles; c++) {
            char *at = cut->out + 2 * FA_AMX_TILE * c + 64 * n;
            if (there) {
                cut_columns(at, at + FA_AMX_TILE, row + 32 * c);
            } else {
                _mm512_store_si512(at, _mm512_setzero_si512());
                _mm512_store_si512(at + FA_AMX_TILE, _mm512_setzero_si512());
            }
        }
    }
}

/* Block n of `blocks`; beyond them nothing is cut. */
FA_AMX_INLINE few_cut cut_of(char *out, const fa_rows *rows, const fa_soon *soon, int n, int blocks, int col)
{
    if (n >= blocks)
        return (few_cut){out, &no_rows, 0, col, none_ahead};
    return (few_cut){out, rows, block_key(n, stream_keys(rows)), col, col == 0 ? ahead_of(rows, soon, n) : none_ahead};
}

#endif

/* ---- S = Q K^T ---- */

/* out[row][key] of in[key][row], 16 keys. */
FA_AMX_INLINE void store_turned(float *s, int lds, const float *in, int rows)
{
    if (rows <= 4) {
        __m512 part[4], low[2], high[2];
        for (int n = 0; n < 4; n++) { /* keys n, 4 + n, 8 + n, 12 + n */
            part[n] = _mm512_castps128_ps512(_mm_load_ps(in + 16 * n));
            part[n] = _mm512_mask_broadcast_f32x4(part[n], 0x00F0, _mm_load_ps(in + 16 * (4 + n)));
            part[n] = _mm512_mask_broadcast_f32x4(part[n], 0x0F00, _mm_load_ps(in + 16 * (8 + n)));
            part[n] = _mm512_mask_broadcast_f32x4(part[n], 0xF000, _mm_load_ps(in + 16 * (12 + n)));
        }
        for (int n = 0; n < 2; n++) {
            low[n]  = _mm512_unpacklo_ps(part[2 * n], part[2 * n + 1]);
            high[n] = _mm512_unpackhi_ps(part[2 * n], part[2 * n + 1]);
        }
        _mm512_storeu_ps(s, _mm512_shuffle_ps(low[0], low[1], 0x44));
        if (rows > 1)
            _mm512_storeu_ps(s + lds, _mm512_shuffle_ps(low[0], low[1], 0xEE));
        if (rows > 2)
            _mm512_storeu_ps(s + 2 * (int64_t)lds, _mm512_shuffle_ps(high[0], high[1], 0x44));
        if (rows > 3)
            _mm512_storeu_ps(s + 3 * (int64_t)lds, _mm512_shuffle_ps(high[0], high[1], 0xEE));
        return;
    }
    __m512i r[16];
    for (int n = 0; n < 16; n++)
        r[n] = _mm512_load_si512(in + 16 * n);
    fa_amx_transpose(r);
    for (int n = 0; n < rows; n++)
        _mm512_storeu_si512(s + (int64_t)n * lds, r[n]);
}

/* Two blocks of keys at once, whose sums do not wait for each other. */
FA_AMX_INLINE void score_blocks(float out[2][FA_AMX_TILE_FLOATS], const few_block k[2], const few_ahead ahead[2],
                                const char *q, const int tiles)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int c = 0; c < tiles; c++) {
        TILE_LOAD(4, q + FA_AMX_TILE * c, 64);
        TILE_LOAD(2, k[0].at + 64 * c, k[0].stride);
        TILE_DOT(0, 2, 4);
        if (c < 4)
            ask_for(&ahead[0], c, 0);
        TILE_LOAD(3, k[1].at + 64 * c, k[1].stride);
        TILE_DOT(1, 3, 4);
        if (c < 4)
            ask_for(&ahead[1], c, 0);
    }
    for (int c = tiles; c < 4; c++) {
        ask_for(&ahead[0], c, 0);
        ask_for(&ahead[1], c, 0);
    }
    TILE_STORE(0, out[0], 64);
    TILE_STORE(1, out[1], 64);
}

/* The same for head_dim 64 and 128, `tiles` 2 and 4; Q^T in registers from 4 on. */
FA_AMX_INLINE void score_blocks_usual(float out[2][FA_AMX_TILE_FLOATS], const few_block k[2], const few_ahead ahead[2],
                                      const int tiles)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
#define STEP(c, t)                                                                                                     \
    if (tiles > c) {                                                                                                   \
        ask_for(&ahead[0], 4 / tiles * c, tiles);                                                                      \
        if (tiles == 2)                                                                                                \
            ask_for(&ahead[0], 2 * c + 1, tiles);                                                                      \
        TILE_LOAD(2, k[0].at + 64 * c, k[0].stride);                                                                   \
        TILE_DOT(0, 2, t);                                                                                             \
        ask_for(&ahead[1], 4 / tiles * c, tiles);                                                                      \
        if (tiles == 2)                                                                                                \
            ask_for(&ahead[1], 2 * c + 1, tiles);                                                                      \
        TILE_LOAD(3, k[1].at + 64 * c, k[1].stride);                                                                   \
        TILE_DOT(1, 3, t);                                                                                             \
    }
    STEP(0, 4)
    STEP(1, 5)
    STEP(2, 6)
    STEP(3, 7)
#undef STEP
    TILE_STORE(0, out[0], 64);
    TILE_STORE(1, out[1], 64);
}

/* q: role Q's packed form, tiles of 16 rows by 32 columns; as a right operand each is turned by pairs. */
static void turn_q(char *out, const char *q, int tiles)
{
    for (int c = 0; c < tiles; c++) {
        __m512i r[16];
        for (int n = 0; n < 16; n++)
            r[n] = _mm512_load_si512(q + FA_AMX_TILE * c + 64 * n);
        fa_amx_transpose(r);
        for (int n = 0; n < 16; n++)
            _mm512_store_si512(out + FA_AMX_TILE * c + 64 * n, r[n]);
    }
}

void SCORES_FEW(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon)
{
    _Alignas(64) char  turned[FEW_MOST_DEPTH_TILES * FA_AMX_TILE], copy[2][BLOCK * FEW_MOST_DEPTH_TILES * 64];
    _Alignas(64) float out[2][FA_AMX_TILE_FLOATS];
    int                tiles = k->cols / 32;
#ifndef FA_AMX_FP16
    if (takes_many(k, rows)) {
        fa_amx_scores_many(s, lds, q, k, rows);
        return;
    }
#endif
    turn_q(turned, q, tiles);
    if (tiles == 2 || tiles == 4) {
        TILE_LOAD(4, turned, 64);
        TILE_LOAD(5, turned + FA_AMX_TILE, 64);
    }
    if (tiles == 4) {
        TILE_LOAD(6, turned + 2 * FA_AMX_TILE, 64);
        TILE_LOAD(7, turned + 3 * FA_AMX_TILE, 64);
    }
    int blocks = (k->count + BLOCK - 1) / BLOCK, part = stream_keys(k);
    for (int n = 0; n < blocks; n += 2) {
        bool      two = n + 1 < blocks;
        int       at = block_key(n, part), other = two ? block_key(n + 1, part) : at;
        few_block b[2]     = {block_of(k, at, copy[0], 64 * tiles), block_of(k, other, copy[1], 64 * tiles)};
        few_ahead ahead[2] = {ahead_of(k, soon, n), ahead_of(k, soon, n + 1)};
        if (tiles == 4)
            score_blocks_usual(out, b, ahead, 4);
        else if (tiles == 2)
            score_blocks_usual(out, b, ahead, 2);
        else
            score_blocks(out, b, ahead, turned, tiles);
        store_turned(s + at, lds, out[0], rows);
        store_turned(s + other, lds, out[1], rows);
    }
}

#ifndef FA_AMX_FP16
/* q: role Q's packed form of two pieces. Columns 0 to 7 of the right operand are the first pieces of its rows, 8 to 15
 * the second ones. */
static void turn_two(char *out, const char *q, int tiles)
{
    __m512i pairs = _mm512_or_si512(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_slli_epi32(_mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31), 16));
    for (int c = 0; c < tiles; c++) {
        __m512i r[16];
        for (int n = 0; n < 16; n++) {
            const char *piece = q + FA_AMX_TILE * (2 * c + n / TWO_ROWS);
            r[n]              = _mm512_permutexvar_epi16(pairs, _mm512_load_si512(piece + 64 * (n % TWO_ROWS)));
        }
        fa_amx_transpose(r);
        for (int n = 0; n < 16; n++)
            _mm512_store_si512(out + FA_AMX_TILE * c + 64 * n, r[n]);
    }
}

/* The four products of pieces, added up; [key][row], rows up to eight. Returns NaN where a sum is not finite. */
FA_AMX_INLINE __m512 score_two(float out[FA_AMX_TILE_FLOATS], const char *k, const char *q, const int tiles,
                               const few_cut *next)
{
    _Alignas(64) float part[2][FA_AMX_TILE_FLOATS];
    __m512             check = _mm512_setzero_ps();
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int quarter = 0; quarter < 4; quarter++) {
        for (int c = quarter * tiles / 4; c < (quarter + 1) * tiles / 4; c++) {
            TILE_LOAD(4, q + FA_AMX_TILE * c, 64);
            TILE_LOAD(2, k + 2 * FA_AMX_TILE * c, 64);
            TILE_LOAD(3, k + 2 * FA_AMX_TILE * c + FA_AMX_TILE, 64);
            TILE_DOT(0, 2, 4);
            TILE_DOT(1, 3, 4);
        }
        if (next->rows->count)
            cut_quarter(next, quarter, tiles);
    }
    TILE_STORE(0, part[0], 64);
    TILE_STORE(1, part[1], 64);
    for (int n = 0; n < BLOCK; n++) {
        __m512 x = _mm512_add_ps(_mm512_load_ps(part[0] + 16 * n), _mm512_load_ps(part[1] + 16 * n));
        x        = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4E));
        check    = _mm512_add_ps(check, _mm512_sub_ps(x, x));
        _mm512_store_ps(out + 16 * n, x);
    }
    return check;
}

FA_AMX_INLINE __m512 score_all_two(float *s, int lds, const char *q, const fa_rows *k, int rows, const int tiles,
                                   const fa_soon *soon)
{
    _Alignas(64) char  values[2][2 * FEW_MOST_DEPTH_TILES * FA_AMX_TILE];
    _Alignas(64) float out[FA_AMX_TILE_FLOATS];
    int                blocks = (k->count + BLOCK - 1) / BLOCK, part = stream_keys(k);
    __m512             check = _mm512_setzero_ps();
    few_cut            first = cut_of(values[0], k, soon, 0, blocks, 0);
    for (int quarter = 0; quarter < 4; quarter++)
        cut_quarter(&first, quarter, tiles);
    for (int n = 0; n < blocks; n++) {
        few_cut next = cut_of(values[(n + 1) % 2], k, soon, n + 1, blocks, 0);
        check        = _mm512_add_ps(check, score_two(out, values[n % 2], q, tiles, &next));
        store_turned(s + block_key(n, part), lds, out, rows);
    }
    return check;
}

/* What has been cut, put together again for the AVX-512 kernel. */
static void scores_two_again(float *s, int lds, const char *q, const fa_rows *k, int rows)
{
    _Alignas(64) float value[TWO_ROWS][FEW_MOST_DEPTH_TILES * 32], packed[TWO_ROWS][FEW_MOST_DEPTH_TILES * 32 + 16];
    const void        *row[TWO_ROWS], *key[FA_MAX_TILE];
    fa_rows            keys = listed(k, key);
    for (int n = 0; n < rows; n++) {
        row[n] = value[n];
        for (int col = 0; col < k->cols; col++) {
            const uint16_t *at = (const uint16_t *)(q + FA_AMX_TILE * (col / 32 * 2)) + 32 * n + col % 32;
            value[n][col]      = fa_float_of_bf16(at[0]) + fa_float_of_bf16(at[FA_AMX_TILE_HALVES]);
        }
    }
    fa_rows all = {row, rows, k->cols, 1, FLASH_ATTN_F32, 0};
    fa_kernels_avx512()->pack(FA_ROLE_Q, packed, &all, NULL);
    fa_kernels_avx512()->scores_few(s, lds, packed, &keys, rows, &nothing_soon);
}

void fa_amx_scores_few_f16(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon)
{
    _Alignas(64) char turned[FEW_MOST_DEPTH_TILES * FA_AMX_TILE];
    int               tiles = k->cols / 32;
    turn_two(turned, q, tiles);
    __m512 check = tiles == 4 ? score_all_two(s, lds, turned, k, rows, 4, soon)
                              : score_all_two(s, lds, turned, k, rows, tiles, soon);
    if (_mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q))
        scores_two_again(s, lds, q, k, rows);
}
#endif

/* ---- O += P V ---- */

/* P is at most 1, but for dropout's factor: as float16 it is taken times this, so that small ones keep their bits. What
 * dropout's factor makes too large leaves sums that are not finite, and they are done again. */
#ifdef FA_AMX_FP16
#define P_FACTOR 0x1p14f
#else
#define P_FACTOR 1.0f
#endif

/* The left operand for 16 keys. Of two pieces of up to four rows of P: rows (hi, even), (hi, odd), (lo, even), (lo,
 * odd); of one piece of up to eight: (even), (odd). */
FA_AMX_INLINE void cut_p(char *out, const float *p, int ldp, int rows, int keys, const int pieces)
{
    for (int r = 0; r < (pieces == 1 ? FEW_ONE_PIECE : FEW_GROUP); r++, out += 128 * pieces) {
        __m512 x = r < rows ? fa_amx_load_keys(p + (int64_t)r * ldp, 0, keys) : _mm512_setzero_ps();
#ifdef FA_AMX_FP16
        x            = _mm512_mul_ps(x, _mm512_set1_ps(P_FACTOR));
        __m256i most = fa_amx_half(x);
        __m512i h = _mm512_cvtepu16_epi32(most), high = _mm512_slli_epi32(h, 16);
        __m512i l   = _mm512_cvtepu16_epi32(fa_amx_half(_mm512_sub_ps(x, _mm512_cvtph_ps(most)))),
                low = _mm512_slli_epi32(l, 16);
#else
        __m512  first = fa_amx_cut(pieces == 1 ? fa_amx_half_up(x) : x);
        __m512i high = _mm512_castps_si512(first), h = _mm512_srli_epi32(high, 16);
        __m512i low = _mm512_castps_si512(fa_amx_cut(_mm512_sub_ps(x, first))), l = _mm512_srli_epi32(low, 16);
#endif
        _mm512_store_si512(out, h);
        _mm512_store_si512(out + 64, high);
        if (pieces == 2) {
            _mm512_store_si512(out + 128, l);
            _mm512_store_si512(out + 192, low);
        }
    }
}

/* Block n of V from column `col` on. */
typedef struct value_rows {
    int         key; /* its first */
    const char *at;
    int64_t     stride;
    few_ahead   ahead;
} value_rows;

FA_AMX_INLINE value_rows value_rows_of(const fa_rows *v, int n, int col, char *copy, const fa_soon *soon)
{
    int       key = block_key(n, stream_keys(v));
    few_block b   = block_of(v, key, copy, 2 * v->cols);
    return (value_rows){key, b.at + 2 * col, b.stride, col == 0 ? ahead_of(v, soon, n) : none_ahead};
}

/* out[c]: sums of columns [col + 32 c, + 32), up to four of them, over all keys. */
FA_AMX_INLINE void value_tiles(float out[4][FA_AMX_TILE_FLOATS], const float *p, int ldp, int rows, const fa_rows *v,
                               int col, const int tiles, char *copy, const fa_soon *soon, const int pieces)
{
    _Alignas(64) char cut[2][FA_AMX_TILE];
    fa_amx_zero_sums();
    for (int n = 0; n < fa_tiles_of(v->count, BLOCK); n++) {
        value_rows b = value_rows_of(v, n, col, copy, soon);
        cut_p(cut[n % 2], p + b.key, ldp, rows, v->count - b.key, pieces);
        TILE_LOAD(4, cut[n % 2], 64);
        ask_for(&b.ahead, 0, tiles);
        TILE_LOAD(5, b.at, b.stride);
        TILE_DOT(0, 4, 5);
        ask_for(&b.ahead, 1, tiles);
        if (tiles > 1) {
            TILE_LOAD(6, b.at + 64, b.stride);
            TILE_DOT(1, 4, 6);
        }
        ask_for(&b.ahead, 2, tiles);
        if (tiles > 2) {
            TILE_LOAD(7, b.at + 128, b.stride);
            TILE_DOT(2, 4, 7);
        }
        ask_for(&b.ahead, 3, tiles);
        if (tiles > 3) {
            TILE_LOAD(5, b.at + 192, b.stride);
            TILE_DOT(3, 4, 5);
        }
    }
    fa_amx_store_sums(out[0]);
}

/* The same for 9 to 16 rows, up to two columns of tiles: out[2 c] of the first eight rows, out[2 c + 1] of the others.
 */
FA_AMX_INLINE void value_tiles_16(float out[4][FA_AMX_TILE_FLOATS], const float *p, int ldp, int rows, const fa_rows *v,
                                  int col, const int tiles, char *copy, const fa_soon *soon)
{
    _Alignas(64) char cut[2][2][FA_AMX_TILE];
    const float      *other = p + (int64_t)FEW_ONE_PIECE * ldp;
    fa_amx_zero_sums();
    for (int n = 0; n < fa_tiles_of(v->count, BLOCK); n++) {
        value_rows b = value_rows_of(v, n, col, copy, soon);
        cut_p(cut[n % 2][0], p + b.key, ldp, FEW_ONE_PIECE, v->count - b.key, 1);
        cut_p(cut[n % 2][1], other + b.key, ldp, rows - FEW_ONE_PIECE, v->count - b.key, 1);
        TILE_LOAD(4, cut[n % 2][0], 64);
        ask_for(&b.ahead, 0, tiles);
        TILE_LOAD(6, b.at, b.stride);
        TILE_DOT(0, 4, 6);
        ask_for(&b.ahead, 1, tiles);
        TILE_LOAD(5, cut[n % 2][1], 64);
        TILE_DOT(1, 5, 6);
        ask_for(&b.ahead, 2, tiles);
        if (tiles > 1) {
            TILE_LOAD(7, b.at + 64, b.stride);
            TILE_DOT(2, 4, 7);
            TILE_DOT(3, 5, 7);
        }
        ask_for(&b.ahead, 3, tiles);
    }
    fa_amx_store_sums(out[0]);
}

#ifndef FA_AMX_FP16
/* The same of float16; the first 16 columns of 32 take the place of the even ones. */
FA_AMX_INLINE void value_tiles_two(float out[4][FA_AMX_TILE_FLOATS], const float *p, int ldp, int rows,
                                   const fa_rows *v, int col, const int tiles, const fa_soon *soon)
{
    _Alignas(64) char cut[2][FA_AMX_TILE], values[2][8 * FA_AMX_TILE];
    int               blocks = (v->count + BLOCK - 1) / BLOCK, part = stream_keys(v);
    few_cut           first = cut_of(values[0], v, soon, 0, blocks, col);
    for (int quarter = 0; quarter < 4; quarter++)
        cut_quarter(&first, quarter, tiles);
    fa_amx_zero_sums();
    for (int n = 0; n < blocks; n++) {
        int         key  = block_key(n, part);
        const char *at   = values[n % 2];
        few_cut     next = cut_of(values[(n + 1) % 2], v, soon, n + 1, blocks, col);
        cut_p(cut[n % 2], p + key, ldp, rows, v->count - key, 2);
        TILE_LOAD(4, cut[n % 2], 64);
#define STEP(c)                                                                                                        \
    if (tiles > c) {                                                                                                   \
        TILE_LOAD(5, at + 2 * FA_AMX_TILE * c, 64);                                                                    \
        TILE_LOAD(6, at + 2 * FA_AMX_TILE * c + FA_AMX_TILE, 64);                                                      \
        TILE_DOT(c, 4, 5);                                                                                             \
        TILE_DOT(c, 4, 6);                                                                                             \
    }                                                                                                                  \
    if (n + 1 < blocks)                                                                                                \
        cut_quarter(&next, c, tiles);
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
#undef STEP
    }
    fa_amx_store_sums(out[0]);
}

#endif

/* The sums of so many rows, in tiles `step` apart, are added to O, which is rescaled. in_order: a row's first 16 of 32
 * columns and its last, else the even and the odd ones. */
FA_AMX_INLINE void add_sums(float *o, int ldo, const float *rescale, float (*sum)[FA_AMX_TILE_FLOATS], int step,
                            int tiles, int rows, bool in_order, int pieces)
{
    const __m512 unit = _mm512_set1_ps(1.0f / P_FACTOR);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < tiles; c++) {
            const float *row = sum[c * step] + 32 * pieces * r;
            float       *at  = o + (int64_t)r * ldo + 32 * c;
            __m512       a = _mm512_load_ps(row), b = _mm512_load_ps(row + 16), factor = _mm512_set1_ps(rescale[r]);
            if (pieces == 2) {
                a = _mm512_add_ps(a, _mm512_load_ps(row + 32));
                b = _mm512_add_ps(b, _mm512_load_ps(row + 48));
            }
            a = _mm512_mul_ps(a, unit);
            b = _mm512_mul_ps(b, unit);
            if (!in_order) {
                fa_amx_add_pairs(at, rescale[r], a, b);
                continue;
            }
            _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), factor, a));
            _mm512_storeu_ps(at + 16, _mm512_fmadd_ps(_mm512_loadu_ps(at + 16), factor, b));
        }
    }
}

/* Up to four rows by two pieces of P, eight by one, 16 where two operands of P share what is read of up to 256 columns
 * of V; false: a sum is not finite, and o is as it was. */
static bool accumulate_group(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                             int rows, const fa_soon *soon, const int pieces)
{
    _Alignas(64) char  copy[BLOCK * FEW_MOST_DEPTH_TILES * 64];
    _Alignas(64) float sum[FEW_MOST_DEPTH_TILES + 3][FA_AMX_TILE_FLOATS];
    int                tiles = v->cols / 32, step = rows > FEW_ONE_PIECE ? 2 : 1;
    bool               two = CUTS_V(v);
#ifndef FA_AMX_FP16
#define TILES(n)                                                                                                       \
    if (two)                                                                                                           \
        value_tiles_two(sum + c, p, ldp, rows, v, 32 * c, n, soon);                                                    \
    else                                                                                                               \
        value_tiles(sum + c, p, ldp, rows, v, 32 * c, n, copy, soon, pieces);                                          \
    break
#else
#define TILES(n)                                                                                                       \
    value_tiles(sum + c, p, ldp, rows, v, 32 * c, n, copy, soon, pieces);                                              \
    break
#endif
    for (int c = 0; c < tiles && step == 1; c += 4) {
        switch (fa_min_int(4, tiles - c)) {
        case 1: TILES(1);
        case 2: TILES(2);
        case 3: TILES(3);
        default: TILES(4);
        }
    }
#undef TILES
    for (int c = 0; c < tiles && step == 2; c += 2) {
        if (tiles - c > 1)
            value_tiles_16(sum + 2 * c, p, ldp, rows, v, 32 * c, 2, copy, soon);
        else
            value_tiles_16(sum + 2 * c, p, ldp, rows, v, 32 * c, 1, copy, soon);
    }
    if (!fa_amx_are_finite(sum[0], step * tiles))
        return false;
    add_sums(o, ldo, rescale, sum, step, tiles, fa_min_int(rows, FEW_ONE_PIECE), two, pieces);
    if (step == 2)
        add_sums(o + (int64_t)FEW_ONE_PIECE * ldo, ldo, rescale + FEW_ONE_PIECE, sum + 1, step, tiles,
                 rows - FEW_ONE_PIECE, two, pieces);
    return true;
}

/* By the AVX-512 kernel, which wants a list. */
static void accumulate_again(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                             int rows)
{
    const void *row[FA_MAX_TILE];
    fa_rows     all = listed(v, row);
    for (int n = 0; n < rows; n += FEW_GROUP)
        fa_kernels_avx512()->accumulate_few(o + (int64_t)n * ldo, ldo, rescale + n, p + (int64_t)n * ldp, ldp, &all,
                                            fa_min_int(FEW_GROUP, rows - n), &nothing_soon, NULL);
}

void ACCUMULATE_FEW(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                    const fa_soon *soon, void *scratch)
{
#ifndef FA_AMX_FP16
    if (takes_many(v, rows)) {
        fa_amx_accumulate_many(o, ldo, rescale, p, ldp, v, rows, soon, scratch);
        return;
    }
#endif
    (void)scratch;
    bool one  = rows > FEW_GROUP && !CUTS_V(v);
    int  most = !one ? FEW_GROUP : v->cols > FA_WIDE_HEAD ? FEW_ONE_PIECE : 2 * FEW_ONE_PIECE;
    for (int r = 0; r < rows; r += most) {
        int            count = fa_min_int(most, rows - r);
        float         *o_at  = o + (int64_t)r * ldo;
        const float   *p_at  = p + (int64_t)r * ldp;
        const fa_soon *next  = r == 0 ? soon : &nothing_soon;
        if (one ? accumulate_group(o_at, ldo, rescale + r, p_at, ldp, v, count, next, 1)
                : accumulate_group(o_at, ldo, rescale + r, p_at, ldp, v, count, next, 2))
            continue;
        accumulate_again(o_at, ldo, rescale + r, p_at, ldp, v, count);
    }
}
