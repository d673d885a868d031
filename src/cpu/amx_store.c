/* The backward's sums, kept as tiles of 16 x 16 ("tiled", cpu.h), to the caller's rows: times a factor, rounded. */
#include "cpu/amx.h"

/* fa_bf16_of_float on 16 lanes. */
FA_AMX_INLINE __m512i rounded_bf16(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i even    = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, even), 16);
    __m512i quiet   = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
}

/* Word 2n of the result: a[n]; word 2n + 1: b[n]. exact: not by VCVTNE2PS2BF16, which has the same bits but takes
 * denormals as 0. */
FA_AMX_INLINE __m512i bf16_pairs(__m512 a, __m512 b, bool exact)
{
    const __m512i turns =
        _mm512_add_epi16(_mm512_set1_epi32(16 << 16),
                         _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm512_set1_epi32(0x10001)));
    if (exact)
        return _mm512_or_si512(rounded_bf16(a), _mm512_slli_epi32(rounded_bf16(b), 16));
    return _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

/* The same one after the other: words 0 to 15 a, then b. */
FA_AMX_INLINE __m512i bf16_row(__m512 a, __m512 b, bool exact)
{
    if (exact)
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded_bf16(a))),
                                  _mm512_cvtepi32_epi16(rounded_bf16(b)), 1);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* A tile of sums times a factor. */
FA_AMX_INLINE void load_sums(__m512 x[16], const float *from, bool turned, float factor)
{
    __m512i tile[16];
    for (int r = 0; r < 16; r++)
        tile[r] = _mm512_load_si512(from + 16 * r);
    if (turned)
        fa_amx_transpose(tile);
    for (int r = 0; r < 16; r++)
        x[r] = _mm512_mul_ps(_mm512_castsi512_ps(tile[r]), _mm512_set1_ps(factor));
}

/* A whole line goes past the caches: nothing is read for it, and nothing else has to leave. */
FA_AMX_INLINE void store_line(char *at, __m512i x, int bytes)
{
    if (bytes >= 64 && (uintptr_t)at % 64 == 0)
        _mm512_stream_si512((__m512i *)at, x);
    else
        _mm512_mask_storeu_epi8(at, bytes >= 64 ? ~0ull : (1ull << bytes) - 1, x);
}

static void store_floats(const fa_stored_rows *to, const float *tiled, bool turned)
{
    for (int row = 0; row < to->rows; row += 16) {
        for (int col = 0; col < to->cols; col += 16) {
            __m512 x[16];
            load_sums(x, tiled + fa_tiled_at(to->cols, row, col), turned, to->factor);
            for (int r = 0; r < 16 && row + r < to->rows; r++)
                store_line(to->at + (row + r) * to->step + 4 * col, _mm512_castps_si512(x[r]), 4 * (to->cols - col));
        }
    }
}

/* 16 rows of 32 columns of bfloat16, times a factor. False: some are 0, which may be denormals that were not seen. */
FA_AMX_INLINE bool bf16_rows(__m512i row[16], const float *tiled, bool turned, float factor, bool exact)
{
    const __m512 times = _mm512_set1_ps(factor);
    __m512i      least = _mm512_set1_epi16(-1);
    for (int r = 0; r < 16; r++) {
        const float *from = turned ? tiled + 32 * r : tiled + 16 * r;
        __m512       a    = _mm512_mul_ps(_mm512_load_ps(from), times);
        __m512       b    = _mm512_mul_ps(_mm512_load_ps(from + (turned ? 16 : FA_AMX_TILE_FLOATS)), times);
        row[r]            = turned ? bf16_pairs(a, b, exact) : bf16_row(a, b, exact);
        least             = _mm512_min_epu16(least, _mm512_add_epi16(row[r], row[r])); /* without the sign */
    }
    if (turned) /* row r: columns 2r and 2r + 1 of 16 rows */
        fa_amx_transpose(row);
    return _mm512_testn_epi16_mask(least, least) == 0;
}

static void store_bf16(const fa_stored_rows *to, const float *tiled, bool turned)
{
    for (int row = 0; row < to->rows; row += 16) {
        for (int col = 0; col < to->cols; col += 32) {
            const float *from = tiled + fa_tiled_at(to->cols, row, col);
            __m512i      out[16];
            if (!bf16_rows(out, from, turned, to->factor, false))
                bf16_rows(out, from, turned, to->factor, true);
            for (int r = 0; r < 16 && row + r < to->rows; r++)
                store_line(to->at + (row + r) * to->step + 2 * col, out[r], 2 * (to->cols - col));
        }
    }
}

enum { COPY_COLUMNS = 256 };

/* Rows are put together first, for the processor asks for the lines of a row ahead. */
static void store_f16(const fa_stored_rows *to, const float *tiled, bool turned)
{
    _Alignas(64) uint16_t copy[16][COPY_COLUMNS];
    for (int row = 0; row < to->rows; row += 16) {
        for (int first = 0; first < to->cols; first += COPY_COLUMNS) {
            int count = fa_min_int(to->cols - first, COPY_COLUMNS);
            for (int col = 0; col < count; col += 16) {
                __m512 x[16];
                load_sums(x, tiled + fa_tiled_at(to->cols, row, first + col), turned, to->factor);
                for (int r = 0; r < 16; r++)
                    _mm256_store_si256((__m256i *)&copy[r][col], fa_amx_half(x[r]));
            }
            for (int r = 0; r < 16 && row + r < to->rows; r++) {
                for (int col = 0; col < count; col += 32)
                    store_line(to->at + (row + r) * to->step + 2 * (first + col), _mm512_load_si512(&copy[r][col]),
                               2 * (count - col));
            }
        }
    }
}

static void store_apart(const fa_stored_rows *to, const float *tiled, bool turned)
{
    for (int row = 0; row < to->rows; row++) {
        for (int col = 0; col < to->cols; col++) {
            int at = turned ? col % 16 * 16 + row % 16 : row % 16 * 16 + col % 16;
            fa_store(to->at + row * to->step, col * to->stride, to->dtype,
                     tiled[fa_tiled_at(to->cols, row, col) + at] * to->factor);
        }
    }
}

void fa_amx_store_tiled(const fa_stored_rows *to, const float *tiled, bool turned)
{
    if (to->stride != 1)
        store_apart(to, tiled, turned);
    else if (to->dtype == FLASH_ATTN_F32)
        store_floats(to, tiled, turned);
    else if (to->dtype == FLASH_ATTN_BF16)
        store_bf16(to, tiled, turned);
    else
        store_f16(to, tiled, turned);
    _mm_sfence(); /* before another thread is told */
}
