/*
 * The AMX tier: packing, and the five matrix products as plain tile loops. All else that works on float32 tiles comes
 * from the AVX-512 table.
 */
#include "cpu/amx_in_place.h"
#include "cpu/amx_multiply.h"
#include "cpu/amx_pack.h"
#include "cpu/amx_pack_pieces.h"
#include "cpu/amx_row_dots.h"

#include <pthread.h>

/* ---- packing ---- */

FA_AMX_INLINE bool is_left(fa_role role) { return role == FA_ROLE_Q || role == FA_ROLE_DO; }
FA_AMX_INLINE bool is_keys(fa_role role) { return role == FA_ROLE_K || role == FA_ROLE_V_T; }

/* The fused backward works on S^T = K Q^T, so its operands are kept the other way round: Q and dO as keys after Q_RIGHT
 * and DO_RIGHT, which are values by columns (layout_by_columns), V as dO would be as a left operand. K_RIGHT is never a
 * right operand: K as a left one, then K^T as that of dQ^T, an even number of tiles of columns, then room for 32 rows
 * as values on their way there. */
FA_AMX_INLINE bool has_turned_form(fa_role role) { return role == FA_ROLE_Q_RIGHT || role == FA_ROLE_DO_RIGHT; }

__attribute__((noinline)) size_t fa_amx_bytes(fa_role role, int rows, int cols, int pieces)
{
    int turned = has_turned_form(role) ? fa_tiles_of(rows, 32) * 2 * fa_tiles_of(cols, 32) : 0;
    int tiles  = is_left(role) || is_keys(role) ? fa_tiles_of(rows, 16) * fa_tiles_of(cols, 32)
                                                : fa_tiles_of(rows, 32) * fa_tiles_of(cols, 16);
    if (has_turned_form(role))
        tiles = fa_tiles_of(rows, 32) * fa_tiles_of(cols, 32) * 2;
    if (role == FA_ROLE_K_RIGHT) { /* K and K^T: as many tiles */
        turned = fa_tiles_of(rows, 32) * 4 * fa_tiles_of(cols, 32);
        tiles  = fa_tiles_of(cols, 16);
    }
    int end = pieces > 1 || role == FA_ROLE_Q || role == FA_ROLE_K ? FA_AMX_END : 0;
    return (size_t)(turned + tiles) * (size_t)pieces * FA_AMX_TILE + (size_t)end;
}

/* bfloat16 as it lies: 16 rows of 32 columns. */
FA_AMX_INLINE void load_pairs_in_place(__m512i tile[16], const fa_rows *src, int first, int col)
{
    __mmask32 mask = src->cols - col >= 32 ? 0xFFFFFFFF : (1u << (src->cols - col)) - 1;
    for (int r = 0; r < 16; r++) {
        const uint16_t *row = first + r < src->count ? src->row[first + r] : NULL;
        fa_amx_prefetch_row(src, first + r, col);
        tile[r] = row ? _mm512_maskz_loadu_epi16(mask, row + col) : _mm512_setzero_si512();
    }
}

/* 16 rows of bfloat16, as many columns as fill tiles; one copy for all callers, for it is large. */
static __attribute__((noinline)) void pack_whole_rows(char *out, const fa_rows *src, int first, bool keys)
{
    const void *const *row  = src->row + first;
    bool               near = fa_amx_rows_are_near(row);
    for (int col = 0; col + 32 <= src->cols; col += 32, out += FA_AMX_TILE) {
        fa_amx_prefetch_rows(src, first, 16, col);
        if (keys && near)
            fa_amx_transpose_tile(out, row, col, true);
        else if (keys)
            fa_amx_transpose_tile(out, row, col, false);
        else
            fa_amx_copy_tile(out, row, col);
    }
}

/* end: where the operand ends. NULL: one piece, whose largest magnitude nobody wants. */
FA_AMX_COPIES void pack_along_columns(char *out, const fa_rows *src, int pieces, bool keys, char *end)
{
    __m512i     tile[MAX_PIECES][16], largest = _mm512_setzero_si512();
    __m512      rests = _mm512_setzero_ps();
    char *const packed = out;
    for (int first = 0; first < src->count; first += 16) {
        const char *begin = out;
        int         col   = 0;
        if (src->stride == 1 && src->dtype == FLASH_ATTN_BF16 && fa_amx_rows_exist(src, first, 16)) {
            col = src->cols / 32 * 32;
            pack_whole_rows(out, src, first, keys);
            out += col / 32 * FA_AMX_TILE;
        }
        for (; col < src->cols; col += 32) {
            if (src->stride == 1 && src->dtype == FLASH_ATTN_BF16)
                load_pairs_in_place(tile[0], src, first, col);
            else
                load_pairs_of(tile, src, first, col, pieces, pieces > 1 ? &rests : NULL);
            for (int n = 0; n < pieces; n++, out += FA_AMX_TILE) {
                if (keys)
                    fa_amx_transpose(tile[n]);
                for (int r = 0; r < 16; r++)
                    _mm512_store_si512(out + 64 * r, tile[n][r]);
            }
        }
        for (; pieces == 1 && end && begin < out; begin += FA_AMX_TILE)
            largest = fa_amx_largest_of_tile(begin, largest);
    }
    if (pieces > 1)
        fa_amx_end_pieces(end, _mm512_cmp_ps_mask(rests, rests, _CMP_UNORD_Q) != 0, packed, *src, keys, pieces);
    else if (end)
        fa_amx_store_largest(end, largest);
}

FA_AMX_INLINE bool row_is_finite(const fa_rows *src, int r, short infinity)
{
    if (src->stride == 1 && src->dtype == FLASH_ATTN_BF16) {
        const __m512i exponent = _mm512_set1_epi16(infinity);
        __mmask32     special  = 0;
        for (int col = 0; col < src->cols; col += 32) {
            fa_amx_prefetch_row(src, r, col);
            __mmask32 mask = src->cols - col >= 32 ? 0xFFFFFFFF : (1u << (src->cols - col)) - 1;
            __m512i   x    = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)src->row[r] + col);
            special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
        }
        return special == 0;
    }
    const __m512i exponent = _mm512_set1_epi32(infinity * 0x10000);
    __mmask16     special  = 0;
    for (int col = 0; col < src->cols; col += 16) {
        __m512i x = _mm512_castps_si512(fa_amx_load16(src->row[r], src->stride, src->dtype, col, src->cols));
        special |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(x, exponent), exponent);
    }
    return special == 0;
}

FA_AMX_INLINE void pack_values_in_place(char *out, const void *const row[32], int col, int cols)
{
    __mmask16 mask = cols - col >= 16 ? 0xFFFF : (__mmask16)((1u << (cols - col)) - 1);
    for (int r = 0; r < 16; r++) {
        const uint16_t *one = row[r], *two = row[r + 16];
        __m512i         low = _mm512_setzero_si512(), high = low;
        if (one)
            low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, one + col));
        if (two)
            high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, two + col));
        _mm512_store_si512(out + 64 * r, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

/* 32 rows of bfloat16 side by side; false: some value is not finite. */
FA_AMX_INLINE bool pair_whole_rows(char *out, const fa_rows *src, int first, layout at, short infinity)
{
    __m512i largest = _mm512_setzero_si512();
    for (int col = 0; col + 32 <= src->cols; col += 32) {
        fa_amx_prefetch_rows(src, first, 32, col);
        largest = fa_amx_pair_rows(out + col / 32 * at.columns, src->row + first, col, largest);
    }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(infinity)) == 0;
}

FA_AMX_COPIES int pack_along_rows(char *packed, const fa_rows *src, int pieces, int *bad, layout at, short infinity)
{
    int num_bad = 0;
    for (int first = 0; first < src->count; first += 32, packed += at.rows) {
        if (src->stride == 1 && src->dtype == FLASH_ATTN_BF16 && src->cols % 32 == 0 &&
            fa_amx_rows_exist(src, first, 32) && (pair_whole_rows(packed, src, first, at, infinity) || !bad))
            continue;
        const void *row[32];
        for (int r = 0; r < 32; r++) {
            row[r] = first + r < src->count ? src->row[first + r] : NULL;
            if (row[r] && bad && !row_is_finite(src, first + r, infinity)) {
                bad[num_bad++] = first + r;
                row[r]         = NULL;
            }
        }
        for (int col = 0; col < src->cols; col += 16) {
            char *out = packed + col / 32 * at.columns + (int64_t)(col % 32 / 16 * pieces) * FA_AMX_TILE;
            if (src->stride == 1 && src->dtype == FLASH_ATTN_BF16) {
                pack_values_in_place(out, row, col, src->cols);
                continue;
            }
            for (int r = 0; r < 16; r++) {
                __m512 x[2];
                for (int h = 0; h < 2; h++)
                    x[h] = row[r + 16 * h] ? fa_amx_load16(row[r + 16 * h], src->stride, src->dtype, col, src->cols)
                                           : _mm512_setzero_ps();
                __m512i split[MAX_PIECES];
                split_pairs(split, x[0], x[1], pieces, false, NULL);
                for (int n = 0; n < pieces; n++)
                    _mm512_store_si512(out + n * FA_AMX_TILE + 64 * r, split[n]);
            }
        }
    }
    return num_bad;
}

/* K^T as left operand [cols / 16][rows / 32], the tiles of one strip of 32 rows, from these as values [cols / 16]: the
 * same dwords, turned. */
static void turn_strip(char *out, const char *values, int strip, int strips, int cols, int pieces)
{
    for (int col = 0; col < fa_tiles_of(cols, 32) * 2; col++) {
        for (int n = 0; n < pieces; n++) {
            __m512i     tile[16];
            const char *from = values + ((int64_t)col * pieces + n) * FA_AMX_TILE;
            char       *to   = out + (((int64_t)col * strips + strip) * pieces + n) * FA_AMX_TILE;
            for (int r = 0; r < 16; r++)
                tile[r] = col < fa_tiles_of(cols, 16) ? _mm512_load_si512(from + 64 * r) : _mm512_setzero_si512();
            fa_amx_transpose(tile);
            for (int r = 0; r < 16; r++)
                _mm512_store_si512(to + 64 * r, tile[r]);
        }
    }
}

FA_AMX_COPIES int pack_keys_backward(char *packed, const fa_rows *src, int *bad, int pieces, short infinity, char *end)
{
    int     strips = fa_tiles_of(src->count, 32), num_bad = 0;
    int64_t form   = (int64_t)strips * 2 * fa_tiles_of(src->cols, 32) * pieces * FA_AMX_TILE;
    char   *turned = packed + form, *values = turned + form;
    pack_along_columns(packed, src, pieces, false, end);
    for (int strip = 0; strip < strips; strip++) {
        fa_rows rows  = *src;
        int    *found = bad ? bad + num_bad : NULL;
        rows.row += 32 * strip;
        rows.count = fa_min_int(src->count - 32 * strip, 32);
        int count  = pack_along_rows(values, &rows, pieces, found, layout_by_rows(src->cols, pieces), infinity);
        for (int n = 0; n < count; n++)
            found[n] += 32 * strip;
        num_bad += count;
        turn_strip(turned, values, strip, strips, src->cols, pieces);
    }
    return num_bad;
}

/* What 16 bits are and where values lie: their pairs, and which of them are not finite. */
typedef struct pack_form {
    short infinity;      /* its upper half as float32, or what else 16 bits are of (fa_amx_pack_fp16) */
    int (*order)(int r); /* row r of each 32 values is the caller's order(r); NULL: r */
    char *end;           /* as in pack_along_columns */
} pack_form;

/* Whole rows of bfloat16 in both forms. False: not such rows, or some value is not finite. */
static __attribute__((noinline)) bool pack_both_16_bit(char *keys, char *values, const fa_rows *src, layout at,
                                                       short infinity)
{
    int64_t key_row = (int64_t)fa_tiles_of(src->cols, 32) * FA_AMX_TILE;
    __m512i largest = _mm512_setzero_si512();
    if (src->stride != 1 || src->dtype != FLASH_ATTN_BF16 || src->cols % 32 || src->count % 32 ||
        !fa_amx_rows_exist(src, 0, src->count))
        return false;
    for (int first = 0; first < src->count; first += 32) {
        for (int col = 0; col < src->cols; col += 32) {
            fa_amx_prefetch_rows(src, first, 32, col);
            largest = fa_amx_pack_both(values + first / 32 * at.rows + col / 32 * at.columns,
                                       keys + first / 16 * key_row + col / 32 * FA_AMX_TILE, key_row, src->row + first,
                                       col, largest);
        }
    }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(infinity)) == 0;
}

/* The same in another order; row: FA_MAX_TILE of them. */
static fa_rows rows_in_order(const fa_rows *src, const void **row, int (*order)(int r))
{
    fa_rows ordered = *src;
    int     at[32];
    ordered.row   = row;
    ordered.count = fa_tiles_of(src->count, 32) * 32;
    for (int r = 0; r < 32; r++)
        at[r] = order(r);
    for (int r = 0; r < ordered.count; r++) {
        int from = r / 32 * 32 + at[r % 32];
        row[r]   = from < src->count ? src->row[from] : NULL;
    }
    return ordered;
}

FA_AMX_INLINE int pack_values(char *packed, const fa_rows *src, int pieces, int *bad, layout at, pack_form form)
{
    const void *row[FA_MAX_TILE];
    fa_rows     rows    = form.order ? rows_in_order(src, row, form.order) : *src;
    int         num_bad = pack_along_rows(packed, &rows, pieces, bad, at, form.infinity);
    for (int n = 0; form.order && n < num_bad; n++)
        bad[n] = bad[n] / 32 * 32 + form.order(bad[n] % 32);
    return num_bad;
}

FA_AMX_INLINE int pack_any(fa_role role, void *packed, const fa_rows *src, int *bad, int pieces, pack_form form)
{
    char *end = pieces > 1 ? form.end : NULL; /* of roles other than Q and K */
    if (role == FA_ROLE_K_RIGHT)
        return pack_keys_backward(packed, src, bad, pieces, form.infinity, end);
    if (has_turned_form(role)) {
        layout by_columns = layout_by_columns(src->count, pieces);
        char  *keys       = (char *)packed + fa_tiles_of(src->cols, 32) * by_columns.columns;
        if (pack_whole_both(keys, packed, src, by_columns, pieces, end))
            return 0;
        if (pieces == 1 && !form.order && pack_both_16_bit(keys, packed, src, by_columns, form.infinity))
            return 0;
        pack_along_columns(keys, src, pieces, true, end);
        return pack_values(packed, src, pieces, bad, by_columns, form);
    }
    if (!is_left(role) && !is_keys(role))
        return pack_values(packed, src, pieces, bad, layout_by_rows(src->cols, pieces), form);
    pack_along_columns(packed, src, pieces, is_keys(role), form.end);
    return 0;
}

/* The usual case gets its own copy of the loops, so that the checks of type and stride leave them. */
FA_AMX_INLINE int pack_operand(fa_role role, void *packed, const fa_rows *src, int *bad, int pieces, pack_form form)
{
    static const flash_attn_dtype usual[MAX_PIECES + 1] = {FLASH_ATTN_BF16, FLASH_ATTN_BF16, FLASH_ATTN_F16,
                                                           FLASH_ATTN_F32};
    fa_rows                       rows                  = *src;
    if (rows.stride == 1 && rows.dtype == usual[pieces]) {
        rows.stride = 1;
        rows.dtype  = usual[pieces];
        return pack_any(role, packed, &rows, bad, pieces, form);
    }
    return pack_any(role, packed, &rows, bad, pieces, form);
}

enum { INFINITY_BF16 = 0x7F80, INFINITY_F16 = 0x7C00 };

/* One for all orders and both types, for it is large. */
static __attribute__((noinline)) int pack_16_bit(fa_role role, void *packed, const fa_rows *src, int *bad,
                                                 pack_form form)
{
    return pack_operand(role, packed, src, bad, 1, form);
}

static char *end_of(fa_role role, void *packed, const fa_rows *src, int pieces)
{
    return (char *)packed + fa_amx_bytes(role, src->count, src->cols, pieces) - FA_AMX_END;
}

static int pack_1(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    return pack_16_bit(role, packed, src, bad, (pack_form){INFINITY_BF16, NULL, NULL});
}

static int pack_2(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    return pack_operand(role, packed, src, bad, 2, (pack_form){INFINITY_BF16, NULL, end_of(role, packed, src, 2)});
}

static int pack_3(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    return pack_operand(role, packed, src, bad, 3, (pack_form){INFINITY_BF16, NULL, end_of(role, packed, src, 3)});
}

/* For P in fixed point: Q and K with their largest magnitude, V in fa_amx_fixed_order. */
static int pack_fixed(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    char *end = role == FA_ROLE_Q || role == FA_ROLE_K ? end_of(role, packed, src, 1) : NULL;
    return pack_16_bit(role, packed, src, bad, (pack_form){INFINITY_BF16, fa_amx_fixed_order, end});
}

/* Packing moves 16 bits and asks only which of them are not finite, so it is that of bfloat16. */
int fa_amx_pack_fp16(fa_role role, void *packed, const fa_rows *src, int *bad)
{
    fa_rows halves = *src;
    halves.dtype   = FLASH_ATTN_BF16;
    return pack_16_bit(
        role, packed, &halves, bad,
        (pack_form){INFINITY_F16, role == FA_ROLE_Q_RIGHT ? fa_amx_fp16_order_of_ds : fa_amx_fp16_order, NULL});
}

/* ---- the products ---- */

FA_AMX_INLINE void scores_pieces(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth,
                                 int pieces)
{
    int64_t steps = fa_tiles_of(depth, 32), step = (int64_t)pieces * FA_AMX_TILE;
    matrix  c = {s, lds, rows, fa_tiles_of(keys, 16) * 16};
    operand a = {left, steps * step, step}, b = {right, steps * step, step};
    multiply(&c, &a, &b, (int)steps, pieces, false);
    if (pieces > 1 && fa_amx_any_infinite(FA_ROLE_Q, left, rows, FA_ROLE_K, right, keys, depth, pieces))
        fa_amx_mend_scores(s, lds, left, right, rows, keys, (int)steps, pieces);
}

/* P's rows as a left operand: pairs (k, k + 16). */
FA_AMX_INLINE void pack_p(char *out, const float *p, int ldp, int rows, int keys, int pieces)
{
    for (int first = 0; first < rows; first += 16) {
        for (int key = 0; key < keys; key += 32, out += pieces * FA_AMX_TILE) {
            for (int r = 0; r < 16; r++) {
                __m512 x = _mm512_setzero_ps(), y = x;
                if (first + r < rows) {
                    x = fa_amx_load_keys(p + (int64_t)(first + r) * ldp, key, keys);
                    y = fa_amx_load_keys(p + (int64_t)(first + r) * ldp, key + 16, keys);
                }
                if (pieces == 1) {
                    x = fa_amx_half_up(x);
                    y = fa_amx_half_up(y);
                }
                for (int n = 0; n < pieces; n++) {
                    __m512 a = fa_amx_cut(x), b = fa_amx_cut(y);
                    _mm512_store_si512(out + n * FA_AMX_TILE + 64 * r, fa_amx_pair(a, b));
                    x = _mm512_sub_ps(x, a);
                    y = _mm512_sub_ps(y, b);
                }
            }
        }
    }
}

FA_AMX_INLINE void accumulate_pieces(float *c, int ldc, const float *rescale, const float *p, int ldp,
                                     const void *right, int rows, int keys, int cols, void *scratch, int pieces)
{
    int64_t steps = fa_tiles_of(keys, 32), columns = fa_tiles_of(cols, 16), step = (int64_t)pieces * FA_AMX_TILE;
    matrix  out = {c, ldc, rows, (int)columns * 16};
    operand a = {scratch, steps * step, step}, b = {right, step, columns * step};
    if (rescale)
        fa_amx_scale_rows(c, ldc, rescale, rows, cols);
    pack_p(scratch, p, ldp, rows, keys, pieces);
    multiply(&out, &a, &b, (int)steps, pieces, true);
}

FA_AMX_INLINE size_t p_bytes(int rows, int keys, int pieces)
{
    return (size_t)fa_tiles_of(rows, 32) * 2 * (size_t)fa_tiles_of(keys, 32) * 2 * (size_t)pieces * FA_AMX_TILE;
}

/* float16: a float32 dO is rounded before it is multiplied, so Delta's has to be. */
FA_AMX_INLINE void row_dots_f16(float *out, const fa_rows *a, const fa_rows *b, int pieces)
{
    if (b->dtype == FLASH_ATTN_F32)
        row_dots_pieces(out, a, b, pieces);
    else
        fa_kernels_avx512()->row_dots(out, a, b);
}

static void row_dots_1(float *out, const fa_rows *a, const fa_rows *b)
{
    if (b->dtype == FLASH_ATTN_F16) /* of the table that takes it as one piece */
        row_dots_f16(out, a, b, 1);
    else
        row_dots_pieces(out, a, b, 1);
}

static void row_dots_2(float *out, const fa_rows *a, const fa_rows *b) { row_dots_f16(out, a, b, 2); }
static void row_dots_3(float *out, const fa_rows *a, const fa_rows *b) { row_dots_pieces(out, a, b, 3); }

static void packed_row_dots_1(float *out, const fa_rows *a, const fa_rows *b, const void *packed)
{
    if (a->dtype == FLASH_ATTN_BF16)
        packed_row_dots_of_one(out, a, b, packed);
    else
        row_dots_1(out, a, b);
}

static void packed_row_dots_3(float *out, const fa_rows *a, const fa_rows *b, const void *packed)
{
    fa_rows rows = *a;
    if (rows.stride == 1 && rows.dtype == FLASH_ATTN_F32) { /* constants in the loops */
        rows.stride = 1;
        rows.dtype  = FLASH_ATTN_F32;
        packed_row_dots(out, &rows, b, packed);
    } else {
        packed_row_dots(out, &rows, b, packed);
    }
}

/* ---- tiles are configured once a thread and region ---- */

typedef struct tile_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  rows[16];
} tile_config;

static void enter(void)
{
    _Alignas(64) tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t]      = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static void leave(void) { __asm__ volatile("tilerelease" ::); }

/* ---- the tables, one for each number of pieces ---- */

#define DEFINE_PIECES(N)                                                                                               \
    static size_t packed_bytes_##N(fa_role role, int rows, int cols) { return fa_amx_bytes(role, rows, cols, N); }         \
    static void   scores_##N(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth)    \
    {                                                                                                                  \
        scores_pieces(s, lds, left, right, rows, keys, depth, N);                                                      \
    }                                                                                                                  \
    static void accumulate_##N(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right,    \
                               int rows, int keys, int cols, void *scratch)                                            \
    {                                                                                                                  \
        accumulate_pieces(c, ldc, rescale, p, ldp, right, rows, keys, cols, scratch, N);                               \
    }                                                                                                                  \
    static bool   forward_block_##N(const fa_forward_block *block) { return fa_amx_forward_block(block, N); }          \
    static size_t forward_scratch_##N(int rows, int keys, int head_dim, int head_dim_v)                                \
    {                                                                                                                  \
        size_t composed = p_bytes(rows, keys, N), fused = fa_amx_forward_scratch(rows, keys, head_dim, head_dim_v);    \
        size_t many     = N == 1 ? fa_amx_many_scratch(rows, keys) : 0;                                                \
        composed        = composed > many ? composed : many;                                                           \
        return composed > fused ? composed : fused;                                                                    \
    }                                                                                                                  \
    static size_t backward_scratch_##N(int rows, int keys, int head_dim, int head_dim_v)                               \
    {                                                                                                                  \
        (void)head_dim, (void)head_dim_v;                                                                              \
        size_t composed = p_bytes(rows, keys, N), fused = fa_amx_backward_scratch(rows, N);                            \
        return composed > fused ? composed : fused;                                                                    \
    }

DEFINE_PIECES(1)
DEFINE_PIECES(2)
DEFINE_PIECES(3)

static fa_kernels     tables[MAX_PIECES + 1]; /* by pieces; 0: one piece, P in fixed point */
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

#define FILL_PIECES(N)                                                                                                 \
    tables[N].row_dots               = row_dots_##N;                                                                   \
    tables[N].packed_bytes           = packed_bytes_##N;                                                               \
    tables[N].pack                   = pack_##N;                                                                       \
    tables[N].scores                 = scores_##N;                                                                     \
    tables[N].accumulate             = accumulate_##N;                                                                 \
    tables[N].forward_block          = forward_block_##N;                                                              \
    tables[N].forward_scratch_bytes  = forward_scratch_##N;                                                            \
    tables[N].backward_block         = fa_amx_backward_block_##N;                                                      \
    tables[N].backward_dq            = fa_amx_backward_dq_##N;                                                         \
    tables[N].backward_scratch_bytes = backward_scratch_##N;

static void fill_tables(void)
{
    for (int n = 1; n <= MAX_PIECES; n++) {
        fa_kernels *t     = &tables[n];
        *t                = *fa_kernels_avx512();
        t->name           = "amx";
        t->isa            = FLASH_ATTN_ISA_AMX;
        t->key_step       = 32;
        t->panel          = 0;
        t->part_keys      = fa_amx_part_keys(n);
        t->accumulate_t   = NULL; /* the fused backward takes every step */
        t->few_rows       = 0;    /* one and two pieces: below */
        t->scores_few     = NULL;
        t->accumulate_few = NULL;
        t->store_tiled    = fa_amx_store_tiled;
        t->store_rows     = fa_amx_store_rows;
        t->natural_lse    = fa_amx_natural_lse;
        t->enter          = enter;
        t->leave          = leave;
    }
    FILL_PIECES(1)
    FILL_PIECES(2)
    FILL_PIECES(3)
    tables[1].few_rows       = 16;
    tables[1].few_rows_wide  = 256;
    tables[1].few_next_keys  = true;
    tables[1].few_steps      = true;
    if (fa_kernels_avx512_bf16()) { /* its P is row major bfloat16, a left operand as it lies */
        tables[1].softmax_packed        = fa_kernels_avx512_bf16()->softmax_packed;
        tables[1].accumulate_few_packed = fa_amx_accumulate_many_packed;
        tables[1].few_packed            = FA_AMX_RAW_ROWS;
    }
    tables[1].few_keys       = 64;
    tables[1].few_cols       = 32;
    tables[1].scores_few     = fa_amx_scores_few;
    tables[1].accumulate_few = fa_amx_accumulate_few;
    tables[2].few_rows       = 8;
    tables[2].few_steps      = true;
    tables[2].few_keys       = 64;
    tables[2].few_least      = 5;
    tables[2].few_cols       = 32;
    tables[2].scores_few     = fa_amx_scores_few_f16;
    tables[2].accumulate_few = fa_amx_accumulate_few;
    tables[0]                = tables[1];
    tables[0].pack           = pack_fixed;
    tables[0].forward_block  = fa_amx_forward_block_fixed;

    tables[1].packed_row_dots = packed_row_dots_1;
    tables[3].packed_row_dots = packed_row_dots_3;
}

const fa_kernels *fa_kernels_amx_fixed(void)
{
    pthread_once(&tables_once, fill_tables);
    return &tables[0];
}

const fa_kernels *fa_kernels_amx(const fa_kernels *base, flash_attn_dtype dtype)
{
    (void)base; /* the AVX-512 table */
    pthread_once(&tables_once, fill_tables);
    switch (dtype) {
    case FLASH_ATTN_F32: return &tables[3];
    case FLASH_ATTN_F16: return &tables[2];
    default: return &tables[1];
    }
}
