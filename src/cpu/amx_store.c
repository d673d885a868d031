/* Results to the caller's rows, times a factor, rounded: the backward's sums, kept as tiles of 16 x 16 ("tiled",
 * cpu.h), and the forward's O and LSE. */
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

/* ---- the forward's rows ---- */

/* A row of bfloat16 or float16. False: not exact, and some are 0, which may be denormals that were not seen. */
FA_AMX_INLINE bool store_row_of(const fa_stored_rows *rows, int row, const float *from, __m512 factor,
                                flash_attn_dtype dtype, bool exact)
{
    __m512i least = _mm512_set1_epi16(-1);
    char   *to    = rows->at + row * rows->step;
    for (int col = 0; col < rows->cols; col += 32) {
        int       left  = rows->cols - col;
        __mmask32 there = left >= 32 ? ~0u : (1u << left) - 1;
        __m512    a     = _mm512_mul_ps(_mm512_load_ps(from + col), factor);
        __m512    b     = left > 16 ? _mm512_mul_ps(_mm512_load_ps(from + col + 16), factor) : a;
        __m512i   x     = dtype == FLASH_ATTN_BF16
                              ? bf16_row(a, b, exact)
                              : _mm512_inserti64x4(_mm512_castsi256_si512(fa_amx_half(a)), fa_amx_half(b), 1);
        least           = _mm512_mask_min_epu16(least, there, least, _mm512_add_epi16(x, x));
        if (rows->past_caches)
            store_line(to + 2 * col, x, 2 * left);
        else
            _mm512_mask_storeu_epi16(to + 2 * col, there, x);
    }
    return exact || dtype != FLASH_ATTN_BF16 || _mm512_testn_epi16_mask(least, least) == 0;
}

FA_AMX_INLINE void store_halves(const fa_stored_rows *to, const float *from, int ld, const float *factor,
                                flash_attn_dtype dtype)
{
    for (int r = 0; r < to->rows; r++) {
        __m512 times = _mm512_set1_ps(factor[r]);
        if (!store_row_of(to, r, from + (int64_t)r * ld, times, dtype, false))
            store_row_of(to, r, from + (int64_t)r * ld, times, dtype, true);
    }
    if (to->past_caches)
        _mm_sfence(); /* before another thread is told */
}

void fa_amx_store_rows(const fa_stored_rows *to, const float *from, int ld, const float *factor)
{
    if (to->stride == 1 && to->dtype == FLASH_ATTN_BF16) {
        store_halves(to, from, ld, factor, FLASH_ATTN_BF16);
        return;
    }
    if (to->stride == 1 && to->dtype == FLASH_ATTN_F16) {
        store_halves(to, from, ld, factor, FLASH_ATTN_F16);
        return;
    }
    for (int r = 0; r < to->rows; r++)
        fa_kernels_avx512()->store(to->at + r * to->step, to->stride, to->dtype, from + (int64_t)r * ld, to->cols,
                                   factor[r]);
}

/* ln x = e ln 2 + ln f, f from 3/4 to 3/2; ln f = 2 atanh((f - 1) / (f + 1)) by its series, to 1e-8. */
FA_AMX_INLINE void logarithm(__m512 x, __m512 *e, __m512 *ln_f)
{
    const __m512 one    = _mm512_set1_ps(1.0f);
    __m512       f      = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero);
    __m512       s      = _mm512_div_ps(_mm512_sub_ps(f, one), _mm512_add_ps(f, one));
    __m512       square = _mm512_mul_ps(s, s), series = _mm512_set1_ps(2.0f / 9.0f);
    series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(2.0f / 7.0f));
    series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(2.0f / 5.0f));
    series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(2.0f / 3.0f));
    *ln_f  = _mm512_fmadd_ps(_mm512_mul_ps(series, square), s, _mm512_add_ps(s, s));
    *e     = _mm512_getexp_ps(_mm512_mul_ps(x, _mm512_set1_ps(4.0f / 3.0f)));
}

/* Lanes 8 half to 8 half + 7. */
FA_AMX_INLINE __m512d doubles_of(__m512 x, int half)
{
    return _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
}

void fa_amx_natural_lse(float *lse, const float *m, const float *l, int rows, double to_natural)
{
    __mmask16 there = rows >= 16 ? 0xFFFF : (__mmask16)((1u << rows) - 1);
    __m512    sum = _mm512_maskz_loadu_ps(there, l), shift = _mm512_maskz_loadu_ps(there, m), e, ln_f;
    __m256    both[2];
    logarithm(sum, &e, &ln_f);
    for (int half = 0; half < 2; half++) {
        __m512d ln = _mm512_fmadd_pd(doubles_of(e, half), _mm512_set1_pd(0.693147180559945309), doubles_of(ln_f, half));
        both[half] = _mm512_cvtpd_ps(_mm512_fmadd_pd(doubles_of(shift, half), _mm512_set1_pd(to_natural), ln));
    }
    __m512    out   = _mm512_insertf32x8(_mm512_castps256_ps512(both[0]), both[1], 1);
    __mmask16 empty = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_EQ_OQ);
    _mm512_mask_storeu_ps(lse, there, _mm512_mask_mov_ps(out, empty, _mm512_set1_ps(-INFINITY)));
}
