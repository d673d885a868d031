/* The backward's sums, kept as tiles of 16 x 16 ("tiled", cpu.h), to the caller's rows: times a factor, rounded. */
#include "cpu/amx.h"

/* fa_bf16_of_float on 16 lanes. */
FA_AMX_INLINE __m256i rounded_bf16(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i even    = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, even), 16);
    __m512i quiet   = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
}

/* VCVTNEPS2BF16 has the same bits but takes denormals as 0. */
FA_AMX_INLINE bool any_denormal(const __m512 x[16])
{
    const __m512i exponent = _mm512_set1_epi32(0x7F800000), rest = _mm512_set1_epi32(0x7FFFFF);
    __mmask16     any = 0;
    for (int r = 0; r < 16; r++) {
        __m512i bits = _mm512_castps_si512(x[r]);
        any |= _mm512_mask_test_epi32_mask(_mm512_testn_epi32_mask(bits, exponent), bits, rest);
    }
    return any != 0;
}

FA_AMX_INLINE __m256i half_of(__m512 x, flash_attn_dtype dtype, bool denormals)
{
    if (dtype != FLASH_ATTN_BF16)
        return fa_amx_half(x);
    return denormals ? rounded_bf16(x) : (__m256i)_mm512_cvtneps_pbh(x);
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

enum { COPY_COLUMNS = 256 };

/* bfloat16 or float16. Rows are put together first, for the processor asks for the lines of a row ahead. */
FA_AMX_INLINE void store_halves(const fa_stored_rows *to, const float *tiled, bool turned, flash_attn_dtype dtype)
{
    _Alignas(64) uint16_t copy[16][COPY_COLUMNS];
    for (int row = 0; row < to->rows; row += 16) {
        for (int first = 0; first < to->cols; first += COPY_COLUMNS) {
            int count = fa_min_int(to->cols - first, COPY_COLUMNS);
            for (int col = 0; col < count; col += 16) {
                __m512 x[16];
                load_sums(x, tiled + fa_tiled_at(to->cols, row, first + col), turned, to->factor);
                bool denormals = dtype == FLASH_ATTN_BF16 && any_denormal(x);
                for (int r = 0; r < 16; r++)
                    _mm256_store_si256((__m256i *)&copy[r][col], half_of(x[r], dtype, denormals));
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
        store_halves(to, tiled, turned, FLASH_ATTN_BF16);
    else
        store_halves(to, tiled, turned, FLASH_ATTN_F16);
    _mm_sfence(); /* before another thread is told */
}
