/*
 * The table for float16 where AMX has it (TDPFP16PS): one product where bfloat16 pieces take three or four. Packing is
 * that of bfloat16, the fused kernels their text compiled again (amx_fp16_forward.c, amx_fp16_backward.c); here are
 * the plain products, for the few tiles that the fused forward leaves (docs/cpu-amx.md).
 */
#define FA_AMX_FP16
#include "cpu/amx_multiply.h"

#include <float.h>
#include <pthread.h>

static void scores(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth)
{
    int64_t steps = fa_tiles_of(depth, 32);
    matrix  c     = {s, lds, rows, fa_tiles_of(keys, 16) * 16};
    operand a = {left, steps * FA_AMX_TILE, FA_AMX_TILE}, b = {right, steps * FA_AMX_TILE, FA_AMX_TILE};
    multiply(&c, &a, &b, (int)steps, 1, false);
}

/* ---- O += P V ---- */

static __m512 load_keys(const float *p, int key, int keys)
{
    __mmask16 mask = keys - key >= 16 ? 0xFFFF : keys <= key ? 0 : (__mmask16)((1u << (keys - key)) - 1);
    return _mm512_maskz_loadu_ps(mask, p + key);
}

/* A power of two that takes the row's largest to the upper end of float16's range, where it leaves most below it. */
static float factor_of_row(const float *p, int keys)
{
    __m512 largest = _mm512_setzero_ps();
    for (int key = 0; key < keys; key += 16)
        largest = _mm512_max_ps(largest, load_keys(p, key, keys));
    float most = _mm512_reduce_max_ps(largest);
    return most > 0.0f && most <= FLT_MAX ? ldexpf(1.0f, fa_min_int(14 - ilogbf(most), 60)) : 1.0f;
}

/* As a left operand, in the order that values have (fa_amx_fp16_order). */
static void pack_p(char *out, const float *p, int ldp, const float *factor, int rows, int keys)
{
    for (int first = 0; first < rows; first += 16) {
        for (int key = 0; key < keys; key += 32, out += FA_AMX_TILE) {
            for (int r = 0; r < 16; r++) {
                __m512 x = _mm512_setzero_ps(), y = x;
                if (first + r < rows) {
                    const float *row = p + (int64_t)(first + r) * ldp;
                    x                = _mm512_mul_ps(load_keys(row, key, keys), _mm512_set1_ps(factor[first + r]));
                    y                = _mm512_mul_ps(load_keys(row, key + 16, keys), _mm512_set1_ps(factor[first + r]));
                }
                fa_amx_store_halves(out + 64 * r, x, y);
            }
        }
    }
}

static void scale_row(float *c, int cols, float factor)
{
    for (int col = 0; col < cols && factor != 1.0f; col += 16)
        _mm512_storeu_ps(c + col, _mm512_mul_ps(_mm512_loadu_ps(c + col), _mm512_set1_ps(factor)));
}

static void accumulate(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right, int rows,
                       int keys, int cols, void *scratch)
{
    float   factor[FA_MAX_TILE];
    int64_t steps = fa_tiles_of(keys, 32), columns = fa_tiles_of(cols, 16);
    matrix  out = {c, ldc, rows, (int)columns * 16};
    operand a = {scratch, steps * FA_AMX_TILE, FA_AMX_TILE}, b = {right, FA_AMX_TILE, columns * FA_AMX_TILE};
    for (int r = 0; r < rows; r++) {
        factor[r] = factor_of_row(p + (int64_t)r * ldp, keys);
        scale_row(c + (int64_t)r * ldc, cols, (rescale ? rescale[r] : 1.0f) * factor[r]);
    }
    pack_p(scratch, p, ldp, factor, rows, keys);
    multiply(&out, &a, &b, (int)steps, 1, true);
    for (int r = 0; r < rows; r++)
        scale_row(c + (int64_t)r * ldc, cols, 1.0f / factor[r]);
}

/* ---- how large dS can be ---- */

static float row_norm(const fa_rows *rows)
{
    float largest = 0.0f;
    for (int r = 0; r < rows->count; r++) {
        __m512 sum = _mm512_setzero_ps();
        for (int col = 0; rows->row[r] && col < rows->cols; col += 16) {
            __m512 x = fa_amx_load16(rows->row[r], rows->stride, rows->dtype, col, rows->cols);
            sum      = _mm512_fmadd_ps(x, x, sum);
        }
        float square = _mm512_reduce_add_ps(sum);
        if (square <= FLT_MAX && square > largest)
            largest = square;
    }
    return sqrtf(largest);
}

/* ---- the table ---- */

static fa_kernels     table;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
    table                 = *fa_kernels_amx(fa_kernels_avx512(), FLASH_ATTN_BF16);
    table.name            = "amx-fp16";
    table.isa             = FLASH_ATTN_ISA_AMX_FP16;
    table.pack            = fa_amx_pack_fp16;
    table.scores          = scores;
    table.accumulate      = accumulate;
    table.forward_block   = fa_amx_fp16_forward_block;
    table.scores_few      = fa_amx_fp16_scores_few; /* rows and columns as bfloat16 */
    table.accumulate_few  = fa_amx_fp16_accumulate_few;
    table.few_rows_wide   = 0;

    table.softmax_packed        = NULL;
    table.accumulate_few_packed = NULL;
    table.row_norm        = row_norm;
    table.packed_row_dots = NULL; /* adds up bfloat16 */
    table.backward_block  = fa_amx_fp16_backward_block;
    table.backward_dq     = fa_amx_fp16_backward_dq;
}

const fa_kernels *fa_kernels_amx_fp16(void)
{
    pthread_once(&table_once, fill_table);
    return &table;
}
