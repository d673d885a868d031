/*
 * c = a b in float32, after Goto & van de Geijn 2008: cut depth into blocks of DEPTH_BLOCK, pack a slice of b into panels
 * of 32 columns (one panel stays in L1) and a slice of a into panels of 6 rows (the slice stays in L2), and multiply
 * panel by panel with 6 x 32 sums in registers. Ragged edges are packed with zeros and go through the same kernel, so
 * an element's order of summation depends on depth alone.
 *
 * Built with GPT_USE_BLAS (cmake -DFLASH_ATTN_EXAMPLES_BLAS=ON) it is cblas_sgemm instead.
 */
#include "gpt.h"

#ifdef GPT_USE_BLAS

#include <cblas.h>

bool gpt_matmul(gpt_threads *threads, int64_t rows, int64_t cols, int64_t depth, gpt_matrix a, gpt_matrix b, float *c,
                int64_t c_row, bool accumulate)
{
    openblas_set_num_threads(gpt_threads_count(threads));
    bool a_turned = a.col != 1, b_turned = b.col != 1;
    cblas_sgemm(CblasRowMajor, a_turned ? CblasTrans : CblasNoTrans, b_turned ? CblasTrans : CblasNoTrans, (int)rows,
                (int)cols, (int)depth, 1.0f, a.data, (int)(a_turned ? a.col : a.row), b.data,
                (int)(b_turned ? b.col : b.row), accumulate ? 1.0f : 0.0f, c, (int)c_row);
    return true;
}

#else

#include <stdlib.h>
#include <string.h>

enum { PANEL_ROWS = 6, PANEL_COLS = 32, ROW_BLOCK = 96, DEPTH_BLOCK = 256, COL_BLOCK = 512 };

typedef float vector __attribute__((vector_size(64), aligned(4), may_alias)); /* the compiler splits it where it must */
typedef float half_vector __attribute__((vector_size(32), aligned(4), may_alias));
typedef float quarter_vector __attribute__((vector_size(16), aligned(4), may_alias));

/* sums[6][32] = a panel [depth][6] times a panel [depth][32]. One body for each register width: as many columns at a
 * time as leave the 6 x 2 sums in registers. */
#define DEFINE_KERNEL(name, type, attributes)                                                                \
    attributes static void name(int64_t depth, const float *restrict a, const float *restrict b, float *sums) \
    {                                                                                                        \
        enum { LANES = sizeof(type) / sizeof(float) };                                                       \
        for (int col = 0; col < PANEL_COLS; col += 2 * LANES) {                                              \
            type left[PANEL_ROWS] = {{0}}, right[PANEL_ROWS] = {{0}};                                        \
            for (int64_t k = 0; k < depth; k++) {                                                            \
                type b0 = *(const type *)(b + k * PANEL_COLS + col);                                         \
                type b1 = *(const type *)(b + k * PANEL_COLS + col + LANES);                                 \
                for (int row = 0; row < PANEL_ROWS; row++) {                                                 \
                    left[row] += a[k * PANEL_ROWS + row] * b0;                                               \
                    right[row] += a[k * PANEL_ROWS + row] * b1;                                              \
                }                                                                                            \
            }                                                                                                \
            for (int row = 0; row < PANEL_ROWS; row++) {                                                     \
                *(type *)(sums + row * PANEL_COLS + col)         = left[row];                                \
                *(type *)(sums + row * PANEL_COLS + col + LANES) = right[row];                               \
            }                                                                                                \
        }                                                                                                    \
    }

typedef void (*kernel)(int64_t depth, const float *restrict a, const float *restrict b, float *sums);

DEFINE_KERNEL(multiply_128, quarter_vector, )

#if defined(__x86_64__)
DEFINE_KERNEL(multiply_256, half_vector, __attribute__((target("avx2,fma"))))
DEFINE_KERNEL(multiply_512, vector, __attribute__((target("avx512f"))))

static kernel choose_kernel(void)
{
    return __builtin_cpu_supports("avx512f")                                 ? multiply_512
           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? multiply_256
                                                                             : multiply_128;
}
#else
static kernel choose_kernel(void) { return multiply_128; }
#endif

/* Pack m[0 .. count)[0 .. depth) into panels [count / panel][depth][panel], zero-padded; `across` is the stride along
 * the panel, `along` the stride along the depth. Inlined, so that `panel` is a constant. */
static inline __attribute__((always_inline)) void pack(const float *m, int64_t across, int64_t along, int64_t count,
                                                       int64_t depth, int64_t panel, float *packed)
{
    for (int64_t first = 0; first < count; first += panel, packed += panel * depth) {
        int64_t      width  = count - first;
        const float *source = m + first * across;
        if (width < panel) {
            for (int64_t k = 0; k < depth; k++)
                for (int64_t i = 0; i < panel; i++)
                    packed[k * panel + i] = i < width ? source[i * across + k * along] : 0.0f;
        } else if (across == 1) {
            for (int64_t k = 0; k < depth; k++)
                memcpy(packed + k * panel, source + k * along, (size_t)panel * sizeof(float));
        } else {
            for (int64_t k = 0; k < depth; k++)
                for (int64_t i = 0; i < panel; i++)
                    packed[k * panel + i] = source[i * across + k * along];
        }
    }
}

static void pack_a(const float *m, int64_t across, int64_t along, int64_t count, int64_t depth, float *packed)
{
    pack(m, across, along, count, depth, PANEL_ROWS, packed);
}

static void pack_b(const float *m, int64_t across, int64_t along, int64_t count, int64_t depth, float *packed)
{
    pack(m, across, along, count, depth, PANEL_COLS, packed);
}

typedef struct product {
    int64_t    rows, cols, depth, c_row;
    gpt_matrix a, b;
    float     *c;
    bool       accumulate, by_rows;
    kernel     multiply;
    float     *scratch; /* a packed a and a packed b for each thread */
    int64_t    each;    /* rows or columns of a task */
} product;

enum { PACKED_A = ROW_BLOCK * DEPTH_BLOCK, PACKED_B = COL_BLOCK * DEPTH_BLOCK };

static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

static inline __attribute__((always_inline)) void store_sums(float *restrict out, const float *restrict sum, int64_t count,
                                                             bool add)
{
    if (add)
        for (int64_t n = 0; n < count; n++)
            out[n] += sum[n];
    else
        for (int64_t n = 0; n < count; n++)
            out[n] = sum[n];
}

/* c[row .. row + rows)[col .. col + cols) from a packed slice of a and of b. */
static void multiply_packed(const product *p, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t depth,
                            const float *a, const float *b, bool add)
{
    float sums[PANEL_ROWS * PANEL_COLS] __attribute__((aligned(64)));
    for (int64_t j = 0; j < cols; j += PANEL_COLS)
        for (int64_t i = 0; i < rows; i += PANEL_ROWS) {
            p->multiply(depth, a + i * depth, b + j * depth, sums);
            int64_t height = smaller(PANEL_ROWS, rows - i), width = smaller(PANEL_COLS, cols - j);
            for (int64_t r = 0; r < height; r++) {
                float *restrict       out = p->c + (row + i + r) * p->c_row + col + j;
                const float *restrict sum = sums + r * PANEL_COLS;
                if (width == PANEL_COLS) /* a constant: no loop's overhead */
                    store_sums(out, sum, PANEL_COLS, add);
                else
                    store_sums(out, sum, width, add);
            }
        }
}

/* Task i: its share of the rows, or of the columns when there are more of them. */
static void multiply_share(void *arg, int64_t index)
{
    const product *p         = arg;
    float         *packed_a  = p->scratch + index * (PACKED_A + PACKED_B), *packed_b = packed_a + PACKED_A;
    int64_t        begin     = index * p->each;
    int64_t        row_begin = p->by_rows ? begin : 0, row_end = p->by_rows ? smaller(begin + p->each, p->rows) : p->rows;
    int64_t        col_begin = p->by_rows ? 0 : begin, col_end = p->by_rows ? p->cols : smaller(begin + p->each, p->cols);
    for (int64_t col = col_begin; col < col_end; col += COL_BLOCK)
        for (int64_t k = 0; k < p->depth; k += DEPTH_BLOCK) {
            int64_t cols = smaller(COL_BLOCK, col_end - col), depth = smaller(DEPTH_BLOCK, p->depth - k);
            pack_b(p->b.data + k * p->b.row + col * p->b.col, p->b.col, p->b.row, cols, depth, packed_b);
            for (int64_t row = row_begin; row < row_end; row += ROW_BLOCK) {
                int64_t rows = smaller(ROW_BLOCK, row_end - row);
                pack_a(p->a.data + row * p->a.row + k * p->a.col, p->a.row, p->a.col, rows, depth, packed_a);
                multiply_packed(p, row, rows, col, cols, depth, packed_a, packed_b, p->accumulate || k > 0);
            }
        }
}

bool gpt_matmul(gpt_threads *threads, int64_t rows, int64_t cols, int64_t depth, gpt_matrix a, gpt_matrix b, float *c,
                int64_t c_row, bool accumulate)
{
    product p = {.rows = rows, .cols = cols, .depth = depth, .c_row = c_row, .a = a, .b = b, .c = c};
    p.accumulate = accumulate;
    p.by_rows    = rows >= cols;
    p.multiply   = choose_kernel();
    int64_t panel  = p.by_rows ? PANEL_ROWS : PANEL_COLS;
    int64_t panels = ((p.by_rows ? rows : cols) + panel - 1) / panel;
    p.each         = (panels + gpt_threads_count(threads) - 1) / gpt_threads_count(threads) * panel;
    int64_t tasks  = (panels * panel + p.each - 1) / p.each;
    p.scratch      = aligned_alloc(64, (size_t)tasks * (PACKED_A + PACKED_B) * sizeof(float));
    if (!p.scratch)
        return false;
    gpt_threads_run(threads, tasks, multiply_share, &p);
    free(p.scratch);
    return true;
}

#endif
