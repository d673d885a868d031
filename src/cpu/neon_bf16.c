/*
 * bfloat16 on aarch64 with FEAT_BF16 (Armv8.6, and some before): the five matrix products by BFMMLA, which adds the
 * products of 2 x 4 and 4 x 2 bfloat16 to 2 x 2 floats, four times the multiplications of an FMA. P and dS are rounded
 * to bfloat16 for it, as on AMX. All else comes from the NEON table.
 *
 * Both operands of a product are kept alike: panels of 8 rows (queries, keys or columns), each [depth / 4][8][4], so
 * that a step of 4 in depth is 64 bytes in order. Depth is added up from 0 and then onto C, as in kernel_gemm.inc.
 */
#include "cpu/cpu.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#include <pthread.h>

enum { SIDE = 8, STEP = 4, STEP_HALVES = SIDE * STEP };

static size_t operand_bytes(int count, int depth)
{
    return (size_t)fa_tiles_of(count, SIDE) * (size_t)fa_tiles_of(depth, STEP) * STEP_HALVES * sizeof(uint16_t);
}

static size_t packed_bytes(fa_role role, int rows, int cols)
{
    return fa_is_along_rows(role) ? operand_bytes(cols, rows) : operand_bytes(rows, cols);
}

/* ---- packing ---- */

/* `count` elements of a row from `col` on, zeros beyond its end and of a NULL row. */
static void load_halves(uint16_t *out, const fa_rows *src, const void *row, int col, int count)
{
    if (row && src->stride == 1 && src->dtype == FLASH_ATTN_BF16 && col + count <= src->cols) {
        memcpy(out, (const uint16_t *)row + col, (size_t)count * sizeof *out);
        return;
    }
    for (int n = 0; n < count; n++)
        out[n] = row && col + n < src->cols ? fa_bf16_of_float(fa_load(row, (col + n) * src->stride, src->dtype)) : 0;
}

static void pack_along_columns(uint16_t *out, const fa_rows *src)
{
    for (int first = 0; first < src->count; first += SIDE)
        for (int col = 0; col < src->cols; col += STEP)
            for (int r = 0; r < SIDE; r++, out += STEP)
                load_halves(out, src, fa_row_at(src, first + r), col, STEP);
}

static bool row_is_finite(const fa_rows *src, const void *row)
{
    for (int col = 0; col < src->cols; col += SIDE) {
        uint16_t x[SIDE];
        load_halves(x, src, row, col, SIDE);
        uint16x8_t exponent = vdupq_n_u16(0x7F80);
        if (vmaxvq_u16(vceqq_u16(vandq_u16(vld1q_u16(x), exponent), exponent)))
            return false;
    }
    return true;
}

/* Four rows of 8 columns, column by column. */
static void store_turned(uint16_t *out, uint16x8_t a, uint16x8_t b, uint16x8_t c, uint16x8_t d)
{
    vst4q_u16(out, (uint16x8x4_t){{a, b, c, d}});
}

static int pack_along_rows(uint16_t *out, const fa_rows *src, int *bad)
{
    int64_t panel   = (int64_t)fa_tiles_of(src->count, STEP) * STEP_HALVES;
    int     num_bad = 0;
    for (int first = 0; first < src->count; first += STEP, out += STEP_HALVES) {
        const void *row[STEP];
        for (int r = 0; r < STEP; r++) {
            row[r] = fa_row_at(src, first + r);
            if (row[r] && bad && !row_is_finite(src, row[r])) {
                bad[num_bad++] = first + r;
                row[r]         = NULL;
            }
        }
        for (int col = 0; col < src->cols; col += SIDE) {
            uint16_t x[STEP][SIDE];
            for (int r = 0; r < STEP; r++)
                load_halves(x[r], src, row[r], col, SIDE);
            store_turned(out + col / SIDE * panel, vld1q_u16(x[0]), vld1q_u16(x[1]), vld1q_u16(x[2]), vld1q_u16(x[3]));
        }
    }
    return num_bad;
}

static int pack(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    if (fa_is_along_rows(role))
        return pack_along_rows(packed, src, bad);
    pack_along_columns(packed, src);
    return 0;
}

static uint16x8_t halves_of(const float *x)
{
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(vld1q_f32(x)), vld1q_f32(x + 4)));
}

/* P as a left operand. */
static void pack_p(uint16_t *out, const float *p, int ldp, int rows, int keys)
{
    for (int first = 0; first < rows; first += SIDE)
        for (int key = 0; key < keys; key += STEP)
            for (int r = first; r < first + SIDE; r++, out += STEP) {
                float32x4_t x = r < rows ? vld1q_f32(p + (int64_t)r * ldp + key) : vdupq_n_f32(0.0f);
                vst1_u16(out, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
            }
}

/* P^T as a left operand. */
static void pack_p_turned(uint16_t *out, const float *p, int ldp, int rows, int keys)
{
    const uint16x8_t zero = vdupq_n_u16(0);
    for (int key = 0; key < keys; key += SIDE)
        for (int first = 0; first < rows; first += STEP, out += STEP_HALVES) {
            const float *at   = p + (int64_t)first * ldp + key;
            int          left = rows - first;
            store_turned(out, halves_of(at), left > 1 ? halves_of(at + ldp) : zero,
                         left > 2 ? halves_of(at + 2 * (int64_t)ldp) : zero,
                         left > 3 ? halves_of(at + 3 * (int64_t)ldp) : zero);
        }
}

/* ---- the products ---- */

/* A step of P is often 0, beyond a diagonal or a window. */
static bool step_is_zero(const uint16_t *a)
{
    uint16x8_t low = vorrq_u16(vld1q_u16(a), vld1q_u16(a + 8)), high = vorrq_u16(vld1q_u16(a + 16), vld1q_u16(a + 24));
    return vmaxvq_u16(vorrq_u16(low, high)) == 0;
}

typedef struct product {
    float       *c;
    int          ldc, rows;
    const float *rescale; /* of C's rows; NULL: 1 */
    bool         add;     /* onto C */
} product;

/* 8 x 8 of C: sum[i][j] holds rows 2i and 2i + 1 of columns 2j and 2j + 1. */
static inline void product_block(const product *to, int col, const uint16_t *a, const uint16_t *b, int steps)
{
    float32x4_t sum[4][4];
    for (int i = 0; i < 16; i++)
        sum[i / 4][i % 4] = vdupq_n_f32(0.0f);
    for (int n = 0; n < steps; n++, a += STEP_HALVES, b += STEP_HALVES) {
        bfloat16x8_t x[4], y[4];
        for (int i = 0; i < 4; i++) {
            x[i] = vreinterpretq_bf16_u16(vld1q_u16(a + 8 * i));
            y[i] = vreinterpretq_bf16_u16(vld1q_u16(b + 8 * i));
        }
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        {
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) sum[i][j] = vbfmmlaq_f32(sum[i][j], x[i], y[j]);
        }
    }
    for (int r = 0; r < to->rows; r++) {
        float      *c      = to->c + (int64_t)r * to->ldc + col;
        float32x4_t factor = vdupq_n_f32(to->rescale ? to->rescale[r] : 1.0f);
        for (int half = 0; half < 2; half++, c += 4) {
            float32x4_t left = sum[r / 2][2 * half], right = sum[r / 2][2 * half + 1];
            float32x4_t row = r % 2 ? vcombine_f32(vget_high_f32(left), vget_high_f32(right))
                                    : vcombine_f32(vget_low_f32(left), vget_low_f32(right));
            vst1q_f32(c, to->add ? vfmaq_f32(row, vld1q_f32(c), factor) : row);
        }
    }
}

/* A panel of 8 rows against all columns of C; columns beyond `cols` to a multiple of 8 are written too. */
static void product_panel(const product *to, const uint16_t *a, const uint16_t *b, int cols, int depth,
                          bool may_be_zero)
{
    int     first = 0, steps = fa_tiles_of(depth, STEP), last = steps;
    int64_t panel = (int64_t)steps * STEP_HALVES;
    while (may_be_zero && first < last && step_is_zero(a + (int64_t)first * STEP_HALVES))
        first++;
    while (may_be_zero && first < last && step_is_zero(a + (int64_t)(last - 1) * STEP_HALVES))
        last--;
    int64_t from = (int64_t)first * STEP_HALVES;
    for (int col = 0; col < cols; col += SIDE, b += panel)
        product_block(to, col, a + from, b + from, last - first);
}

static void multiply(float *c, int ldc, const float *rescale, const uint16_t *left, const uint16_t *right, int rows,
                     int cols, int depth, bool add)
{
    int64_t panel = (int64_t)fa_tiles_of(depth, STEP) * STEP_HALVES;
    for (int r = 0; r < rows; r += SIDE, left += panel) {
        product to = {c + (int64_t)r * ldc, ldc, fa_min_int(SIDE, rows - r), rescale ? rescale + r : NULL, add};
        product_panel(&to, left, right, cols, depth, add);
    }
}

static void scores(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth)
{
    multiply(s, lds, NULL, left, right, rows, keys, depth, false);
}

static void accumulate(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right, int rows,
                       int keys, int cols, void *scratch)
{
    pack_p(scratch, p, ldp, rows, keys);
    multiply(c, ldc, rescale, scratch, right, rows, cols, keys, true);
}

static void accumulate_t(float *c, int ldc, const float *p, int ldp, const void *right, int rows, int keys, int cols,
                         void *scratch)
{
    pack_p_turned(scratch, p, ldp, rows, keys);
    multiply(c, ldc, NULL, scratch, right, keys, cols, rows, true);
}

static size_t scratch_bytes(int rows, int keys, int head_dim, int head_dim_v)
{
    size_t of_p = operand_bytes(rows, keys), of_turned = operand_bytes(keys, rows);
    (void)head_dim, (void)head_dim_v;
    return of_p > of_turned ? of_p : of_turned;
}

/* ---- Delta ---- */

enum { PIECES = 3 }; /* of bfloat16 hold a float32 exactly */

/* 4 elements of a row as so many pieces, the largest first. */
static void load_pieces(uint16_t out[][STEP], const fa_rows *src, int r, int col, int pieces)
{
    for (int n = 0; n < STEP; n++) {
        float x = col + n < src->cols ? fa_load(src->row[r], (col + n) * src->stride, src->dtype) : 0.0f;
        for (int piece = 0; piece < pieces; piece++) {
            out[piece][n] = fa_bf16_of_float(x);
            x -= fa_float_of_bf16(out[piece][n]);
        }
    }
}

/* By the products of dP, in their order: where a is V's row of a key that has all the weight, dP - Delta is 0 exactly
 * (decision 0004). dO is rounded as dP's operand is; O, which nothing rounds elsewhere, is taken whole. */
static void row_dots(float *out, const fa_rows *a, const fa_rows *b)
{
    for (int r = 0; r < a->count; r++) {
        float32x4_t sum = vdupq_n_f32(0.0f);
        for (int col = 0; col < a->cols; col += STEP) {
            uint16_t x[PIECES][STEP], y[1][STEP];
            load_pieces(x, a, r, col, PIECES);
            load_pieces(y, b, r, col, 1);
            bfloat16x8_t left = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(y[0]), vdup_n_u16(0)));
            for (int n = 0; n < (a->dtype == FLASH_ATTN_BF16 ? 1 : PIECES); n++)
                sum = vbfmmlaq_f32(sum, left, vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(x[n]), vdup_n_u16(0))));
        }
        out[r] = vgetq_lane_f32(sum, 0);
        if (!isfinite(out[r]))
            out[r] = fa_dot_of_nonzero(a, b, r);
    }
}

/* ---- the table ---- */

static fa_kernels     table;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
    table                        = *fa_kernels_neon();
    table.name                   = "neon-bf16";
    table.isa                    = FLASH_ATTN_ISA_NEON_BF16;
    table.key_step               = SIDE;
    table.panel                  = 0;
    table.packed_bytes           = packed_bytes;
    table.pack                   = pack;
    table.scores                 = scores;
    table.accumulate             = accumulate;
    table.accumulate_t           = accumulate_t;
    table.row_dots               = row_dots;
    table.forward_scratch_bytes  = scratch_bytes;
    table.backward_scratch_bytes = scratch_bytes;
    table.few_rows               = 0; /* the NEON table reads K and V where they lie */
    table.scores_few             = NULL;
    table.accumulate_few         = NULL;
}

const fa_kernels *fa_kernels_neon_bf16(void)
{
    pthread_once(&table_once, fill_table);
    return &table;
}
#else
const fa_kernels *fa_kernels_neon_bf16(void) { return NULL; } /* a compiler that does not know it */
#endif
