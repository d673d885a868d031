#include "gemm.h"

#include "clones.h"

#ifdef CLI_OPENBLAS

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static char           name[64];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* "OpenBLAS 0.3.21 NO_LAPACKE ..." -> its first two words. Threads are the caller's, so OpenBLAS gets one. */
static void start(void)
{
    openblas_set_num_threads(1);
    const char *config  = openblas_get_config();
    size_t      product = strcspn(config, " ");
    size_t      version = config[product] ? strcspn(config + product + 1, " ") + 1 : 0;
    snprintf(name, sizeof name, "%.*s", (int)(product + version), config);
}

const char *cli_gemm_name(void)
{
    pthread_once(&once, start);
    return name;
}

void cli_gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
              int64_t stride_a, const float *b, int64_t stride_b, float beta, float *c, int64_t stride_c)
{
    pthread_once(&once, start);
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
                (blasint)m, (blasint)n, (blasint)k, alpha, a, (blasint)stride_a, b, (blasint)stride_b, beta, c,
                (blasint)stride_c);
}

#else

/* Blocks of A [ROWS, DEPTH] and B [DEPTH, COLS] are copied into contiguous panels; the innermost loop holds STRIP x
 * LANES of C in registers: 6 of AVX-512's, 12 of AVX2's. A panel of B lies as COLS / LANES slabs [DEPTH, LANES]. */
enum { ROWS = 96, COLS = 256, DEPTH = 256, STRIP = 6, LANES = 16 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

const char *cli_gemm_name(void) { return "own blocked loops"; }

/* op(source), rows x cols, into slabs of `width` columns; what is beyond cols is 0. */
static void pack(const float *source, int64_t stride, bool transposed, int64_t rows, int64_t cols, int64_t padded_cols,
                 int64_t width, int64_t slab_rows, float *panel)
{
    for (int64_t slab = 0; slab < padded_cols; slab += width)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t x = 0; x < width; x++) {
                int64_t j    = slab + x;
                float   from = j >= cols ? 0.0f : transposed ? source[j * stride + i] : source[i * stride + j];
                panel[slab * slab_rows + i * width + x] = from;
            }
}

CLI_CLONES static void multiply_panels(const float *restrict a, const float *restrict b, int64_t depth, int64_t rows,
                                       int64_t cols, float *restrict c)
{
    for (int64_t i = 0; i < rows; i += STRIP)
        for (int64_t slab = 0; slab < cols; slab += LANES) {
            lanes        sum[STRIP] = {{0}};
            const float *row_a = a + i * depth, *row_b = b + slab * DEPTH;
            for (int64_t p = 0; p < depth; p++) {
                lanes row = *(const lanes *)(row_b + p * LANES);
                for (int r = 0; r < STRIP; r++)
                    sum[r] += row_a[r * depth + p] * row;
            }
            for (int r = 0; r < STRIP; r++)
                *(lanes *)(c + (i + r) * COLS + slab) = sum[r];
        }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void cli_gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
              int64_t stride_a, const float *b, int64_t stride_b, float beta, float *c, int64_t stride_c)
{
    static _Thread_local float panel_a[ROWS * DEPTH], panel_b[DEPTH * COLS], panel_c[ROWS * COLS];
    for (int64_t j = 0; j < n; j += COLS)
        for (int64_t p = 0; p == 0 || p < k; p += DEPTH) {
            int64_t cols = least(COLS, n - j), depth = least(DEPTH, k - p);
            pack(b + (transpose_b ? j * stride_b + p : p * stride_b + j), stride_b, transpose_b, depth, cols,
                 (cols + LANES - 1) / LANES * LANES, LANES, DEPTH, panel_b);
            for (int64_t i = 0; i < m; i += ROWS) {
                int64_t rows = least(ROWS, m - i);
                pack(a + (transpose_a ? p * stride_a + i : i * stride_a + p), stride_a, transpose_a, rows, depth, depth,
                     depth, ROWS, panel_a);
                multiply_panels(panel_a, panel_b, depth, rows, cols, panel_c);
                for (int64_t x = 0; x < rows; x++)
                    for (int64_t y = 0; y < cols; y++) {
                        float *to = &c[(i + x) * stride_c + j + y];
                        *to       = alpha * panel_c[x * COLS + y] + (p > 0 || beta != 0.0f ? *to : 0.0f);
                    }
            }
        }
}

#endif
