/*
 * What products read from the caller's rows in place: rows at equal distances, which a tile load wants; P as it meets
 * them; rows that are asked for.
 */
#ifndef FA_CPU_AMX_IN_PLACE_H
#define FA_CPU_AMX_IN_PLACE_H

#include "cpu/amx.h"

/* Bytes from one of the rows `first` to first + 15 to the next; 0: they are not all there, or not at equal distances.
 */
FA_AMX_INLINE int64_t fa_amx_equal_steps(const fa_rows *rows, int first)
{
    const char *const *row = (const char *const *)rows->row + first;
    if (rows->count - first < 16)
        return 0;
    int64_t step = row[1] - row[0];
    __m512i at = _mm512_set1_epi64((int64_t)(intptr_t)row[0]), steps = _mm512_set1_epi64(step);
    __m512i low  = _mm512_add_epi64(at, _mm512_mullo_epi64(steps, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)));
    __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(steps, 3));
    bool    all  = (_mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(row)) |
                _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(row + 8))) == 0;
    return all ? step : 0;
}

/* Four tiles of sums, 0 to 3. */
FA_AMX_INLINE void fa_amx_zero_sums(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

FA_AMX_INLINE void fa_amx_store_sums(float *to)
{
    TILE_STORE(0, to, 64);
    TILE_STORE(1, to + FA_AMX_TILE_FLOATS, 64);
    TILE_STORE(2, to + 2 * FA_AMX_TILE_FLOATS, 64);
    TILE_STORE(3, to + 3 * FA_AMX_TILE_FLOATS, 64);
}

FA_AMX_INLINE __m512 fa_amx_load_keys(const float *p, int key, int keys)
{
    __mmask16 mask = keys - key >= 16 ? 0xFFFF : keys <= key ? 0 : (__mmask16)((1u << (keys - key)) - 1);
    return _mm512_maskz_loadu_ps(mask, p + key);
}

FA_AMX_INLINE void fa_amx_scale_rows(float *c, int ldc, const float *rescale, int rows, int cols)
{
    for (int r = 0; r < rows; r++) {
        if (rescale[r] == 1.0f)
            continue;
        for (int col = 0; col < cols; col += 16) {
            float *at = c + (int64_t)r * ldc + col;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(rescale[r])));
        }
    }
}

/* Whether all sums in so many tiles are. */
FA_AMX_INLINE bool fa_amx_are_finite(const float *sums, int tiles)
{
    __m512 check = _mm512_setzero_ps();
    for (int n = 0; n < 16 * tiles; n++) {
        __m512 x = _mm512_load_ps(sums + 16 * n);
        check    = _mm512_add_ps(check, _mm512_sub_ps(x, x));
    }
    return _mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q) == 0;
}

/* 32 columns of a row of O, rescaled, and those sums of even and of odd columns. */
FA_AMX_INLINE void fa_amx_add_pairs(float *o, float rescale, __m512 even, __m512 odd)
{
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last  = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    __m512        times = _mm512_set1_ps(rescale);
    _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), times, _mm512_permutex2var_ps(even, first, odd)));
    _mm512_storeu_ps(o + 16, _mm512_fmadd_ps(_mm512_loadu_ps(o + 16), times, _mm512_permutex2var_ps(even, last, odd)));
}

/* The lines of rows that are asked for, in the order of their addresses, a few at a time; into the second-level cache.
 */
typedef struct fa_amx_asks {
    const void *const *row;
    int                next, end, byte, bytes; /* row, those there are; of the row */
} fa_amx_asks;

FA_AMX_INLINE void fa_amx_ask(fa_amx_asks *asks, int lines)
{
    for (int n = 0; n < lines && asks->next < asks->end; n++) {
        __builtin_prefetch((const char *)asks->row[asks->next] + asks->byte, 0, 2);
        asks->byte += 64;
        if (asks->byte >= asks->bytes) {
            asks->byte = 0;
            asks->next++;
        }
    }
}

/* ---- few rows: blocks of keys in the order of several streams ---- */

enum { BLOCK = 16, STREAMS = 4 };

/* 16 rows as a tile load wants them: equal distances. */
typedef struct few_block {
    const char *at;
    int64_t     stride; /* bytes */
} few_block;

/* Rows `first` to first + 15, where they lie or in `copy`; zeros beyond the end. */
FA_AMX_INLINE few_block block_of(const fa_rows *rows, int first, char *copy, int64_t copy_stride)
{
    int     count = rows->count - first;
    int64_t step  = !rows->step ? fa_amx_equal_steps(rows, first) : count < BLOCK ? 0 : rows->step;
    if (step)
        return (few_block){fa_row_of(rows, first), step};
    for (int n = 0; n < BLOCK; n++) {
        if (n < count)
            memcpy(copy + n * copy_stride, fa_row_of(rows, first + n), (size_t)rows->cols * 2);
        else
            memset(copy + n * copy_stride, 0, (size_t)rows->cols * 2);
    }
    return (few_block){copy, copy_stride};
}

static int stream_keys(const fa_rows *rows) { return rows->count / (STREAMS * BLOCK) * BLOCK; }

/* A tile's keys are read as STREAMS parts side by side, a block of each in turn: the first key of block n. */
FA_AMX_INLINE int block_key(int n, int part)
{
    int whole = part / BLOCK * STREAMS;
    return n < whole ? n % STREAMS * part + n / STREAMS * BLOCK : n * BLOCK;
}

/* What is asked for while block n is at work: four rows of each part, of the blocks that come when each part has had
 * its turn. Each part is LAG rows behind the one before it, or at head_dim 128 the rows of all four, which are then a
 * multiple of 64 KB apart, take 3 to 5% longer (0052); the last rows of a part are not asked for. */
enum { LAG = 2 };

typedef struct few_ahead {
    const fa_rows *rows;       /* NULL: nothing is asked for */
    int            first;      /* row of the first part */
    int            apart;      /* rows from there to the next part's */
    int            lines;      /* of a row; -1: nothing is asked for */
    const char    *at;         /* row `first`; NULL: rows are listed */
    int64_t        step, jump; /* bytes to the row after it, to the next part's */
} few_ahead;

static const few_ahead none_ahead = {NULL, 0, 0, -1, NULL, 0, 0};

FA_AMX_INLINE few_ahead ahead_from(const fa_rows *rows, int first, int lag)
{
    int part = stream_keys(rows), apart = part - lag, lines = rows->cols / 32;
    if (!part)
        return none_ahead;
    if (!rows->step)
        return (few_ahead){rows, first, apart, lines, NULL, 0, 0};
    return (few_ahead){rows, first, apart, lines, fa_row_of(rows, first), rows->step, apart * rows->step};
}

FA_AMX_INLINE few_ahead ahead_of(const fa_rows *rows, const fa_soon *soon, int n)
{
    int part = stream_keys(rows), first = (n / STREAMS + 1) * BLOCK, row = n % STREAMS * (BLOCK / STREAMS);
    if (soon->each)
        return first <= stream_keys(&soon->rows) ? ahead_from(&soon->rows, first - BLOCK + row, 0) : none_ahead;
    if (first < part)
        return ahead_from(rows, first + row, LAG);
    return first == part ? ahead_from(&soon->rows, row, 0) : none_ahead;
}

/* A row of a width that is not usual. */
static __attribute__((noinline)) void ask_for_any(const few_ahead *ahead, int row)
{
    for (int j = 0; j < STREAMS; j++) {
        const char *at = fa_row_of(ahead->rows, j * ahead->apart + ahead->first + row);
        for (int line = 0; line < ahead->lines; line++)
            __builtin_prefetch(at + 64 * line);
    }
}

/* Row `row` of the four. lines: those of a row as it usually is. */
FA_AMX_INLINE void ask_for(const few_ahead *ahead, int row, const int lines)
{
    if (ahead->lines != lines) {
        if (ahead->rows)
            ask_for_any(ahead, row);
        return;
    }
    const char        *at   = ahead->at + row * ahead->step;
    const void *const *list = ahead->rows->row + ahead->first + row;
    if (ahead->at) {
#pragma GCC unroll 4
        for (int j = 0; j < STREAMS; j++, at += ahead->jump) {
#pragma GCC unroll 4
            for (int n = 0; n < lines; n++)
                __builtin_prefetch(at + 64 * n);
        }
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < STREAMS; j++, list += ahead->apart) {
#pragma GCC unroll 4
            for (int n = 0; n < lines; n++)
                __builtin_prefetch((const char *)*list + 64 * n);
        }
    }
}

static const fa_rows no_rows      = {0};
static const fa_soon nothing_soon = {0};

#endif
