/*
 * bfloat16 on x86-64 with AVX512_BF16 (Zen 4 and later; Intel's processors with AMX have it too): the five matrix
 * products by VDPBF16PS, which adds the products of two pairs of bfloat16 to each of 16 floats, twice the
 * multiplications of an FMA. P and dS are rounded to bfloat16 for it, as on AMX. All else comes from the AVX-512 table.
 *
 * An element of a product's operands is a pair of neighbours in depth, 32 bits. Left operands are row major, or
 * interleaved by two rows where their columns are multiplied (P^T, dS^T); right ones are
 *     K, V (of dP)                    panels of 64 keys, each [depth / 2][keys of the panel][2]
 *     V, dO, Q, K (down their rows)   [rows / 2][columns][2]
 */
#include "cpu/avx512_vector.h"
#include "cpu/cpu.h"

#include <pthread.h>

#define INLINE V
#define V_PRODUCT(x, row, sum) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(row))

#include "cpu/kernel_product.inc"

/* exp2_vector to 2.9e-6, with two products less: P is rounded to bfloat16, and its sum is as good as this. */
V vf exp2_short(vf x)
{
    vf f = v_fraction(x), p = v_set1(0.013426687f);
    p    = v_fma(p, f, v_set1(0.05224247f));
    p    = v_fma(p, f, v_set1(0.24128021f));
    p    = v_fma(p, f, v_set1(0.69304484f));
    p    = v_fma(p, f, v_set1(1.0f));
    return v_scale2(p, x);
}
#define V_EXP2_P exp2_short
/* Row major bfloat16, where the row's floats begin. */
#define V_STORE_P(row, col, p) _mm256_storeu_si256((__m256i *)((uint16_t *)(row) + (col)), (__m256i)_mm512_cvtneps_pbh(p))

#include "cpu/kernel_online.inc"

enum { WIDTH = NV * VL, FEW_PANEL = 128 };

typedef __m512i vh; /* 32 bfloat16 */

static int pairs_of(int depth) { return fa_tiles_of(depth, 2); }

/* Halves from row to row of a left operand: a multiple of 64 bytes. */
static int left_ld(int depth) { return (int)fa_round_up(depth, 32); }

/* Pairs from row to row of a right operand along rows, and of P^T. A panel's rows of 256 bytes in steps of 512 would
 * fall into half of the cache's sets. */
static int pair_ld(int cols)
{
    int ld = (int)fa_round_up(cols, VL);
    return ld > WIDTH ? ld + VL : ld;
}

static size_t packed_bytes(fa_role role, int rows, int cols)
{
    if (fa_is_along_rows(role))
        return (size_t)pairs_of(rows) * (size_t)pair_ld(cols) * sizeof(float);
    if (role == FA_ROLE_K || role == FA_ROLE_V_T)
        return (size_t)fa_round_up(rows, VL) * (size_t)pairs_of(cols) * sizeof(float);
    return (size_t)rows * (size_t)left_ld(cols) * sizeof(uint16_t);
}

/* ---- packing ---- */

V vh halves_of(vf low, vf high) { return (vh)_mm512_cvtne2ps_pbh(high, low); }

static vh load_rare(const fa_rows *src, const void *row, int col)
{
    uint16_t x[32];
    for (int n = 0; n < 32; n++)
        x[n] = col + n < src->cols ? fa_bf16_of_float(fa_load(row, (col + n) * src->stride, src->dtype)) : 0;
    return _mm512_loadu_si512(x);
}

/* Columns col .. col + 31; zeros beyond the row's end and of row NULL. */
V vh load_halves(const fa_rows *src, const void *row, int col)
{
    if (!row)
        return _mm512_setzero_si512();
    if (src->stride != 1 || src->dtype != FLASH_ATTN_BF16)
        return load_rare(src, row, col);
    int left = src->cols - col;
    return left >= 32  ? _mm512_loadu_si512((const uint16_t *)row + col)
           : left <= 0 ? _mm512_setzero_si512()
                       : _mm512_maskz_loadu_epi16(((__mmask32)1 << left) - 1, (const uint16_t *)row + col);
}

static void pack_left(uint16_t *out, const fa_rows *src)
{
    for (int r = 0; r < src->count; r++)
        for (int col = 0; col < left_ld(src->cols); col += 32, out += 32)
            _mm512_storeu_si512(out, load_halves(src, src->row[r], col));
}

static void pack_panels(float *out, const fa_rows *src)
{
    int depth = pairs_of(src->cols), padded = (int)fa_round_up(src->count, VL);
    for (int first = 0; first < padded; first += WIDTH) {
        int    width = fa_min_int(WIDTH, padded - first);
        float *panel = out + (int64_t)first * depth;
        for (int key = 0; key < width; key += VL)
            for (int pair = 0; pair < depth; pair += VL) {
                vf r[VL];
                for (int n = 0; n < VL; n++)
                    r[n] = _mm512_castsi512_ps(load_halves(src, fa_row_at(src, first + key + n), 2 * pair));
                v_transpose(r);
                for (int n = 0; n < VL && pair + n < depth; n++)
                    v_store(panel + (int64_t)(pair + n) * width + key, r[n]);
            }
    }
}

V __mmask32 not_finite(vh x)
{
    const vh exponent = _mm512_set1_epi16(0x7F80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
}

/* 16 pairs of a's and b's halves `first` .. `first` + 15. */
V vf interleaved(vh a, vh b, int first)
{
    vh lanes = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                _mm512_set1_epi32(first));
    vh index = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, index, b));
}

/* Two rows; the result's bits: the first, the second, is not finite. */
V int pack_two(float *out, const fa_rows *src, const void *first, const void *second, int ld)
{
    __mmask32 of_a = 0, of_b = 0;
    for (int col = 0; col < ld; col += 32) {
        vh a = load_halves(src, first, col), b = load_halves(src, second, col);
        of_a |= not_finite(a);
        of_b |= not_finite(b);
        v_store(out + col, interleaved(a, b, 0));
        if (col + VL < ld)
            v_store(out + col + VL, interleaved(a, b, VL));
    }
    return (of_a != 0) + 2 * (of_b != 0);
}

static int pack_along_rows(float *out, const fa_rows *src, int *bad)
{
    int ld = pair_ld(src->cols), num_bad = 0;
    for (int r = 0; r < src->count; r += 2, out += ld) {
        const void *first = src->row[r], *second = fa_row_at(src, r + 1);
        int         not = pack_two(out, src, first, second, ld);
        if (!bad || !not)
            continue;
        pack_two(out, src, not & 1 ? NULL : first, not & 2 ? NULL : second, ld);
        for (int n = 0; n < 2; n++)
            if (not >> n & 1)
                bad[num_bad++] = r + n;
    }
    return num_bad;
}

static int pack(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    if (fa_is_along_rows(role))
        return pack_along_rows(packed, src, bad);
    if (role == FA_ROLE_K || role == FA_ROLE_V_T)
        pack_panels(packed, src);
    else
        pack_left(packed, src);
    return 0;
}

/* P as a left operand. */
static void pack_p(uint16_t *out, const float *p, int ldp, int rows, int keys)
{
    int ld = left_ld(keys);
    for (int r = 0; r < rows; r++, p += ldp, out += ld)
        for (int key = 0; key < keys; key += 32)
            _mm512_storeu_si512(out + key, halves_of(v_load(p + key), v_load(p + key + VL)));
}

/* 16 keys of two rows, as P^T has them. */
V vf turned(vf a, vf b)
{
    vh two = halves_of(a, b);
    return interleaved(two, _mm512_castsi256_si512(_mm512_extracti64x4_epi64(two, 1)), 0);
}

/* P^T as a left operand. */
static void pack_p_turned(float *out, const float *p, int ldp, int rows, int keys)
{
    int ld = pair_ld(keys);
    for (int r = 0; r < rows; r += 2, p += 2 * (int64_t)ldp, out += ld)
        for (int key = 0; key < keys; key += VL)
            v_store(out + key, turned(v_load(p + key), r + 1 < rows ? v_load(p + ldp + key) : v_zero()));
}

/* ---- the products ---- */

static void scores(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth)
{
    int     padded = (int)fa_round_up(keys, VL), pairs = pairs_of(depth);
    product p = {.ldc = lds, .a = left, .lda = left_ld(depth) / 2, .depth = pairs};
    for (int first = 0; first < padded; first += WIDTH) {
        int width = fa_min_int(WIDTH, padded - first);
        p.b       = (const float *)right + (int64_t)first * pairs;
        p.ldb     = width;
        p.c       = s + first;
        product_panel(p, by_rows[width / VL - 1], rows, false, false);
    }
}

/* Onto C, whose rows are `rows` of A. */
V void add_products(product p, float *c, const void *right, int rows, int cols, bool by_column)
{
    int padded = (int)fa_round_up(cols, VL);
    p.ldb      = pair_ld(cols);
    p.add      = true;
    for (int first = 0; first < padded; first += WIDTH) {
        int vectors = fa_min_int(WIDTH, padded - first) / VL;
        p.b         = (const float *)right + first;
        p.c         = c + first;
        product_panel(p, by_column ? by_columns[vectors - 1] : by_rows[vectors - 1], rows, by_column, true);
    }
}

static void accumulate(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right, int rows,
                       int keys, int cols, void *scratch)
{
    pack_p(scratch, p, ldp, rows, keys);
    product to = {.ldc = ldc, .a = scratch, .lda = left_ld(keys) / 2, .depth = pairs_of(keys), .rescale = rescale};
    add_products(to, c, right, rows, cols, false);
}

static void softmax_packed(float *s, int lds, int rows, int keys, float multiplier, float *m, float *l, float *rescale)
{
    softmax_step(s, lds, rows, keys, multiplier, m, l, rescale, true);
}

static void accumulate_packed(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right,
                              int rows, int keys, int cols)
{
    product to = {.ldc = ldc, .a = p, .lda = ldp, .depth = pairs_of(keys), .rescale = rescale};
    add_products(to, c, right, rows, cols, false);
}

/* A row of S whose LSE is NaN, as probabilities has it: P is NaN where it is seen. */
static void prepare_row(float *s, int keys, float *lse)
{
    int padded = (int)fa_round_up(keys, VL);
    fill(s, keys, padded, -INFINITY);
    for (int col = 0; col < padded && *lse != *lse; col++)
        s[col] = s[col] == -INFINITY ? -INFINITY : NAN;
    *lse = *lse == *lse ? *lse : 0.0f;
}

/* P^T in the place of the first of two rows of S, dS^T in that of the second, dS in that of dP. */
static void gradient_packed(float *s, float *dp, int ld, int rows, fa_range keys, int all_keys, float scale,
                            const float *lse, const float *delta)
{
    int      padded = (int)fa_round_up(keys.end, VL), all = (int)fa_round_up(all_keys, VL);
    const vf factor = v_set1(scale), to_log2 = v_set1(FA_LOG2_E);
    for (int r = 0; r < rows; r += 2, s += 2 * (int64_t)ld, dp += 2 * (int64_t)ld) {
        int   count    = fa_min_int(2, rows - r);
        float of[2]    = {lse[r], count == 2 ? lse[r + 1] : INFINITY};
        vf    minus[2] = {v_set1(delta[r]), v_set1(count == 2 ? delta[r + 1] : 0.0f)};
        for (int n = 0; n < count; n++)
            prepare_row(s + (int64_t)n * ld + keys.begin, keys.end - keys.begin, &of[n]);
        for (int col = keys.begin; col < padded; col += VL) {
            vf p[2] = {v_zero(), v_zero()}, ds[2] = {v_zero(), v_zero()};
            for (int n = 0; n < count; n++) {
                int64_t at = (int64_t)n * ld + col;
                vf      x  = v_min(v_zero(), v_fma(v_load(s + at), factor, v_set1(-of[n])));
                p[n]       = exp2_short(v_mul(x, to_log2));
                ds[n]      = v_where_nonzero(p[n], v_mul(p[n], v_sub(v_load(dp + at), minus[n])));
                V_STORE_P(dp + (int64_t)n * ld, col, ds[n]);
            }
            v_store(s + col, turned(p[0], p[1]));
            v_store(s + ld + col, turned(ds[0], ds[1]));
        }
        for (int n = 0; n < 2; n++) {
            memset(s + (int64_t)n * ld, 0, sizeof(float) * (size_t)keys.begin);
            memset(dp + (int64_t)n * ld, 0, sizeof(uint16_t) * (size_t)keys.begin);
            memset(s + (int64_t)n * ld + padded, 0, sizeof(float) * (size_t)(all - padded));
            memset((uint16_t *)(dp + (int64_t)n * ld) + padded, 0, sizeof(uint16_t) * (size_t)(all - padded));
        }
    }
}

static void accumulate_t_packed(float *c, int ldc, const float *p, int ldp, const void *right, int rows, int keys, int cols)
{
    product to = {.ldc = ldc, .a = p, .lda = 2 * (int64_t)ldp, .depth = pairs_of(rows)};
    add_products(to, c, right, keys, cols, true);
}

static void accumulate_t(float *c, int ldc, const float *p, int ldp, const void *right, int rows, int keys, int cols,
                         void *scratch)
{
    pack_p_turned(scratch, p, ldp, rows, keys);
    product to = {.ldc = ldc, .a = scratch, .lda = pair_ld(keys), .depth = pairs_of(rows)};
    add_products(to, c, right, keys, cols, true);
}

static size_t scratch_bytes(int rows, int keys, int head_dim, int head_dim_v)
{
    size_t of_p      = (size_t)rows * (size_t)left_ld(keys) * sizeof(uint16_t);
    size_t of_turned = (size_t)pairs_of(rows) * (size_t)pair_ld(keys) * sizeof(float);
    (void)head_dim, (void)head_dim_v;
    size_t of_panel = sizeof(float) * FEW_PANEL / 2 * WIDTH; /* accumulate_many */
    return (of_p > of_turned ? of_p : of_turned) + of_panel;
}

/* ---- Delta ---- */

enum { PIECES = 3 }; /* of bfloat16 hold a float32 exactly */

/* Columns col .. col + 31 of a row as so many pieces, the largest first. */
static void load_pieces(vh out[PIECES], const fa_rows *src, const void *row, int col)
{
    uint16_t x[PIECES][32];
    for (int n = 0; n < 32; n++) {
        float left = row && col + n < src->cols ? fa_load(row, (col + n) * src->stride, src->dtype) : 0.0f;
        for (int piece = 0; piece < PIECES; piece++) {
            x[piece][n] = fa_bf16_of_float(left);
            left -= fa_float_of_bf16(x[piece][n]);
        }
    }
    for (int piece = 0; piece < PIECES; piece++)
        out[piece] = _mm512_loadu_si512(x[piece]);
}

/* By the products of dP, in their order: where a is V's row of a key that has all the weight, dP - Delta is 0 exactly
 * (decision 0004). Lanes are rows. dO is rounded as dP's operand is; O, which nothing rounds elsewhere, is taken whole. */
static void row_dots(float *out, const fa_rows *a, const fa_rows *b)
{
    int pieces = a->dtype == FLASH_ATTN_BF16 ? 1 : PIECES, depth = pairs_of(a->cols);
    for (int first = 0; first < a->count; first += VL) {
        int count = fa_min_int(VL, a->count - first);
        vf  sum   = v_zero();
        for (int pair = 0; pair < depth; pair += VL) {
            vf y[VL], x[PIECES][VL];
            for (int n = 0; n < VL; n++) {
                vh of[PIECES];
                if (pieces == 1)
                    of[0] = load_halves(a, fa_row_at(a, first + n), 2 * pair);
                else
                    load_pieces(of, a, fa_row_at(a, first + n), 2 * pair);
                for (int piece = 0; piece < pieces; piece++)
                    x[piece][n] = _mm512_castsi512_ps(of[piece]);
                y[n] = _mm512_castsi512_ps(load_halves(b, fa_row_at(b, first + n), 2 * pair));
            }
            v_transpose(y);
            for (int piece = 0; piece < pieces; piece++)
                v_transpose(x[piece]);
            for (int n = 0; n < VL && pair + n < depth; n++)
                for (int piece = 0; piece < pieces; piece++)
                    sum = V_PRODUCT(y[n], x[piece][n], sum);
        }
        float lanes[VL];
        v_store(lanes, sum);
        for (int n = 0; n < count; n++)
            out[first + n] = isfinite(lanes[n]) ? lanes[n] : fa_dot_of_nonzero(a, b, first + n);
    }
}

#include "cpu/avx512_bf16_few.h"

/* ---- the table ---- */

static fa_kernels     table;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
    table                        = *fa_kernels_avx512();
    table.name                   = "avx512-bf16";
    table.isa                    = FLASH_ATTN_ISA_AVX512_BF16;
    table.panel                  = WIDTH;
    table.packed_bytes           = packed_bytes;
    table.pack                   = pack;
    table.scores                 = scores;
    table.accumulate             = accumulate;
    table.softmax                = softmax;
    table.softmax_packed         = softmax_packed;
    table.accumulate_packed      = accumulate_packed;
    table.accumulate_t           = accumulate_t;
    table.probabilities          = probabilities;
    table.gradient_packed        = gradient_packed;
    table.accumulate_t_packed    = accumulate_t_packed;
    table.row_dots               = row_dots;
    table.forward_scratch_bytes  = scratch_bytes;
    table.backward_scratch_bytes = scratch_bytes;
    table.few_rows               = FEW_ROWS;
    table.few_rows_wide          = FEW_ROWS_WIDE;
    table.few_cols               = 32;
    table.few_keys               = FEW_CHUNK;
    table.few_keys_far           = FEW_CHUNK;
    table.scores_few             = scores_few;
    table.accumulate_few         = accumulate_few;
}

const fa_kernels *fa_kernels_avx512_bf16(void)
{
    pthread_once(&table_once, fill_table);
    return &table;
}
