/*
 * Packing of bfloat16 whose rows lie side by side, whole tiles at a time: the usual case, without masks or spills.
 * amx.c does the rest; both give the same bytes.
 */
#ifndef FA_CPU_AMX_PACK_H
#define FA_CPU_AMX_PACK_H

#include "cpu/amx.h"

/* The caller's rows are seldom in a cache and too far apart for the processor to guess: ask for one some rows ahead. */
enum { FA_AMX_ROWS_AHEAD = 32 };

FA_AMX_INLINE void fa_amx_prefetch_row(const fa_rows *src, int row, int col)
{
    if (row + FA_AMX_ROWS_AHEAD < src->count && src->row[row + FA_AMX_ROWS_AHEAD])
        _mm_prefetch((const char *)((const uint16_t *)src->row[row + FA_AMX_ROWS_AHEAD] + col), _MM_HINT_T0);
}

/* Of `count` rows from `first` on those so many rows ahead, in the order of their addresses: as many in each step of 32
 * columns. */
FA_AMX_INLINE void fa_amx_prefetch_rows(const fa_rows *src, int first, int count, int col)
{
    int steps = src->cols / 32, begin = count * (col / 32) / steps, end = count * (col / 32 + 1) / steps;
    if (first + count + FA_AMX_ROWS_AHEAD > src->count)
        return;
    for (int r = begin; r < end; r++) {
        uintptr_t row = (uintptr_t)src->row[first + FA_AMX_ROWS_AHEAD + r]; /* 0: asks for what is not there */
        for (int line = 0; line < steps; line++)
            _mm_prefetch((const char *)(row + 64 * (uintptr_t)line), _MM_HINT_T0);
    }
}

FA_AMX_INLINE bool fa_amx_rows_exist(const fa_rows *src, int first, int count)
{
    bool all = first + count <= src->count;
    for (int r = 0; r < count && all; r++)
        all = src->row[first + r] != NULL;
    return all;
}

/* 16 rows of 32 columns as a left operand. */
FA_AMX_INLINE void fa_amx_copy_tile(char *out, const void *const *row, int col)
{
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
        _mm512_store_si512(out + 64 * r, _mm512_loadu_si512((const uint16_t *)row[r] + col));
}

/* Columns 8 c to 8 c + 7 of four rows. */
FA_AMX_INLINE __m512i fa_amx_load_chunks(const char *a, const char *b, const char *d, const char *e, int c)
{
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)a + c));
    x         = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)b + c), 1);
    x         = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)d + c), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)e + c), 3);
}

/* x: of rows 0, 4, 8, 12, then 1, 5, ...; four columns of dwords as rows. */
FA_AMX_INLINE void fa_amx_turn_loaded(__m512i out[4], const __m512i x[4])
{
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i d = _mm512_unpacklo_epi32(x[2], x[3]), e = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, d);
    out[1] = _mm512_unpackhi_epi64(a, d);
    out[2] = _mm512_unpacklo_epi64(b, e);
    out[3] = _mm512_unpackhi_epi64(b, e);
}

/* Columns 4 c to 4 c + 3 of a tile of dwords, as four rows. */
FA_AMX_INLINE void fa_amx_turn_chunks(__m512i out[4], const char *tile, int c)
{
    __m512i x[4];
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
        x[n] = fa_amx_load_chunks(tile + 64 * n, tile + 64 * (n + 4), tile + 64 * (n + 8), tile + 64 * (n + 12), c);
    fa_amx_turn_loaded(out, x);
}

/* Rows that lie a page or more apart share a set of the first-level cache, which does not hold 16 lines. */
FA_AMX_INLINE bool fa_amx_rows_are_near(const void *const *row)
{
    uintptr_t first = (uintptr_t)row[0], second = (uintptr_t)row[1];
    return (second > first ? second - first : first - second) < 4096;
}

/* 16 rows of 32 columns as keys, dwords transposed: loads put rows into place, half of the shuffles do. From where they are
 * if they are near, else of a copy. */
FA_AMX_INLINE void fa_amx_transpose_tile(char *out, const void *const *row, int col, bool near)
{
    _Alignas(64) char copy[FA_AMX_TILE];
    const char       *from[16];
    if (!near)
        fa_amx_copy_tile(copy, row, col);
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
        from[r] = near ? (const char *)((const uint16_t *)row[r] + col) : copy + 64 * r;
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
    {
        __m512i x[4], rows[4];
        _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
            rows[n] = fa_amx_load_chunks(from[n], from[n + 4], from[n + 8], from[n + 12], c);
        fa_amx_turn_loaded(x, rows);
        _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) _mm512_store_si512(out + 256 * c + 64 * n, x[n]);
    }
}

/* The largest magnitudes with those of a packed tile. */
FA_AMX_INLINE __m512i fa_amx_largest_of_tile(const char *tile, __m512i largest)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
        largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_load_si512(tile + 64 * r), magnitude));
    return largest;
}

/* Where tiles of values lie: bytes from 32 rows to the next, and from two tiles of columns to the next two. */
typedef struct layout {
    int64_t rows, columns;
} layout;

FA_AMX_INLINE layout layout_by_rows(int cols, int pieces)
{
    int64_t tile = (int64_t)pieces * FA_AMX_TILE;
    return (layout){fa_tiles_of(cols, 16) * tile, 2 * tile};
}

/* Two tiles of columns of all rows side by side, for whoever reads just these, again and again: they then spread over
 * all sets of the first-level cache, where tiles 4 KB apart share half or a quarter of them. */
FA_AMX_INLINE layout layout_by_columns(int rows, int pieces)
{
    int64_t tile = (int64_t)pieces * FA_AMX_TILE;
    return (layout){2 * tile, fa_tiles_of(rows, 32) * 2 * tile};
}

/* Rows r (x) and r + 16 (y) of 32 columns as values, a row of two tiles. Returns the largest magnitude's bits with
 * `largest`. */
FA_AMX_INLINE __m512i fa_amx_pair_row(char *out, int r, __m512i x, __m512i y, __m512i largest)
{
    const __m512i spread    = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    largest                 = _mm512_max_epu16(largest, _mm512_and_si512(x, magnitude));
    largest                 = _mm512_max_epu16(largest, _mm512_and_si512(y, magnitude));
    x                       = _mm512_permutexvar_epi64(spread, x);
    y                       = _mm512_permutexvar_epi64(spread, y);
    _mm512_store_si512(out + 64 * r, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(out + FA_AMX_TILE + 64 * r, _mm512_unpackhi_epi16(x, y));
    return largest;
}

/* 32 rows of 32 columns as values, two tiles: pairs (r, r + 16). */
FA_AMX_INLINE __m512i fa_amx_pair_rows(char *out, const void *const *row, int col, __m512i largest)
{
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
    {
        __m512i x = _mm512_loadu_si512((const uint16_t *)row[r] + col);
        __m512i y = _mm512_loadu_si512((const uint16_t *)row[r + 16] + col);
        largest   = fa_amx_pair_row(out, r, x, y, largest);
    }
    return largest;
}

/* 32 rows of 32 columns as values, by fa_amx_pair_rows, and as keys, tiles key_row bytes apart: one reading for both.
 */
FA_AMX_INLINE __m512i fa_amx_pack_both(char *values, char *keys, int64_t key_row, const void *const *row, int col,
                                       __m512i largest)
{
    _Alignas(64) char copy[2][FA_AMX_TILE];
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
    {
        __m512i x = _mm512_loadu_si512((const uint16_t *)row[r] + col);
        __m512i y = _mm512_loadu_si512((const uint16_t *)row[r + 16] + col);
        _mm512_store_si512(copy[0] + 64 * r, x);
        _mm512_store_si512(copy[1] + 64 * r, y);
        largest = fa_amx_pair_row(values, r, x, y, largest);
    }
    for (int half = 0; half < 2; half++) {
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
        {
            __m512i x[4];
            fa_amx_turn_chunks(x, copy[half], c);
            _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
                _mm512_store_si512(keys + half * key_row + 256 * c + 64 * n, x[n]);
        }
    }
    return largest;
}

/* The largest of all, as float32, behind packed Q or K, for fa_amx_largest. */
static inline void fa_amx_store_largest(char *behind, __m512i largest)
{
    __m512i  in_32 = _mm512_max_epu32(_mm512_srli_epi32(largest, 16), _mm512_and_si512(largest, _mm512_set1_epi32(0xFFFF)));
    uint32_t bits  = _mm512_reduce_max_epu32(in_32) << 16;
    memcpy(behind, &bits, sizeof bits);
}

#endif
