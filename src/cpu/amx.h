/*
 * What the AMX tier's files share: tile instructions, packed layouts, bfloat16 pieces.
 *
 * A tile register holds 16 rows of 64 bytes. TDPBF16PS: C[16][16] += A[16][32] B[32][16], where A's rows are 32
 * bfloat16 and B holds pairs of its rows side by side: row p of the register is (B[2p][0], B[2p+1][0], B[2p][1], ...).
 * Which two rows make a pair is ours to choose as long as A's columns follow: along keys we pair j with j + 16, so that
 * two vectors of P become a row of A by a shift and a blend.
 *
 * Packed operands are arrays of 1 KB tiles; a value may be the sum of several bfloat16 pieces, whose tiles follow each
 * other:
 *     left      [rows / 16][cols / 32][piece]    16 rows of 32 columns
 *     keys      [rows / 16][cols / 32][piece]    right operand contracted along its columns, pairs (2c, 2c + 1)
 *     values    [rows / 32][cols / 16][piece]    right operand contracted along its rows, pairs (r, r + 16)
 * Q and K of one piece end with the largest of their magnitudes, operands of several with whether a number is infinite.
 * The table for P in fixed point (amx_fixed.h) has values in another order of their rows, fa_amx_fixed_order.
 */
#ifndef FA_CPU_AMX_H
#define FA_CPU_AMX_H

#include "cpu/cpu.h"

#include <immintrin.h>

#define FA_AMX_INLINE static inline __attribute__((always_inline))

/* Unrolled whole, a unit of the forward is some 2000 instructions; sanitizers make that many times more, and minutes of
 * compiling; they also hide that bounds are known. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#endif

/* Inlined for each kind of operand. AddressSanitizer gives each copy's arrays stack of their own, together more than
 * the 64 KiB that a caller may have, so there it is one function. */
#if defined(__SANITIZE_ADDRESS__)
#define FA_AMX_COPIES static __attribute__((noinline))
#else
#define FA_AMX_COPIES FA_AMX_INLINE
#endif

/* Four instructions that do nothing: where another thread keeps the same core busy, what loads or multiplies tiles and
 * is followed by more of its kind at once takes a tenth longer, up to a third (docs/cpu-amx.md); elsewhere they are free. */
#define GAP "\n\t.fill 4, 1, 0x90"

/* Statements of our own, not the compiler's intrinsics: those do not say that they read memory. */
#define TILE_LOAD(t, p, stride)                                                                                        \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t GAP ::"r"(p), "r"((int64_t)(stride)) : "memory")
/* For what is not read again soon: it leaves the first-level cache to the rest. */
#define TILE_LOAD_ONCE(t, p, stride)                                                                                   \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t GAP ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride)                                                                                       \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
/* Kernels of one piece are compiled twice, for bfloat16 and with FA_AMX_FP16 for float16: TDPFP16PS, in bytes, for not
 * every assembler knows its name. It takes denormals as they are. */
#ifdef FA_AMX_FP16
#define TILE_DOT(c, a, b)                                                                                              \
    __asm__ volatile(".byte 0xc4, 0xe2, 0x03 | (~" #b " & 15) << 3, 0x5c, 0xc0 | " #c " << 3 | " #a GAP)
FA_AMX_INLINE int fa_amx_pieces(int pieces) { return (void)pieces, 1; }
#else
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c GAP ::)
FA_AMX_INLINE int fa_amx_pieces(int pieces) { return pieces; }
#endif

#define FA_AMX_TILE 1024 /* bytes */
#define FA_AMX_TILE_FLOATS 256
#define FA_AMX_TILE_HALVES 512

/* 16 floats from column `col` of a row of the caller's; beyond `cols` zeros. */
FA_AMX_INLINE __m512 fa_amx_load16(const void *row, int64_t stride, flash_attn_dtype dtype, int col, int cols)
{
    __mmask16 mask = cols - col >= 16 ? 0xFFFF : cols <= col ? 0 : (__mmask16)((1u << (cols - col)) - 1);
    if (stride == 1 && dtype == FLASH_ATTN_F32)
        return _mm512_maskz_loadu_ps(mask, (const float *)row + col);
    if (stride == 1 && dtype == FLASH_ATTN_BF16) {
        __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + col);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    if (stride == 1 && dtype == FLASH_ATTN_F16)
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + col));
    float lanes[16];
    for (int n = 0; n < 16; n++)
        lanes[n] = col + n < cols ? fa_load(row, (col + n) * stride, dtype) : 0.0f;
    return _mm512_loadu_ps(lanes);
}

/* Bits begin to end - 1 of each word; what is below 0 or above 32 counts as that. */
FA_AMX_INLINE __m512i fa_amx_bits(__m512i begin, __m512i end)
{
    const __m512i none = _mm512_setzero_si512(), one = _mm512_set1_epi32(1), all = _mm512_set1_epi32(32);
    __m512i       lower = _mm512_sllv_epi32(one, _mm512_min_epi32(_mm512_max_epi32(begin, none), all)); /* by 32: 0 */
    __m512i       upper = _mm512_sllv_epi32(one, _mm512_min_epi32(_mm512_max_epi32(end, none), all));
    return _mm512_andnot_si512(_mm512_sub_epi32(lower, one), _mm512_sub_epi32(upper, one));
}

/* ---- pieces ----
 *
 * bfloat16 (and FP8, whose values are bfloat16's) is one piece; float16 is two bfloat16 pieces exactly and float32
 * three, and their products are sums of products of pieces:
 *     float16   (h + l)(h' + l')          = hh' + hl' + lh' + ll'             exactly
 *     float32   (h + m + l)(h' + m' + l') = hh' + hm' + mh' + hl' + mm' + lh'  + 2^-24
 */

enum { MAX_PIECES = 3 };

typedef struct fa_amx_product {
    int left, right;
} fa_amx_product;

/* The largest last; each shares an operand with the one before, which is then still in its tiles. */
static const fa_amx_product fa_amx_products[MAX_PIECES + 1][6] = {
    {{0, 0}},
    {{0, 0}},
    {{0, 1}, {1, 1}, {1, 0}, {0, 0}},
    {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}},
};
static const int fa_amx_num_products[MAX_PIECES + 1] = {0, 1, 4, 6};

/* A piece: the upper half, 8 bits of significand, so that three hold a float32 exactly. */
FA_AMX_INLINE __m512 fa_amx_cut(__m512 x)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xFFFF0000)));
}

/* x so that cutting it rounds to nearest. */
FA_AMX_INLINE __m512 fa_amx_half_up(__m512 x)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)));
}

/* Lane n of the result: the upper halves of a[n] (first of the pair) and b[n]. Exact for bfloat16 values. */
FA_AMX_INLINE __m512i fa_amx_pair(__m512 a, __m512 b)
{
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(b), _mm512_set1_epi32((int)0xFFFF0000), 0xF8);
}

/* 16 floats as float16, rounded to nearest; its denormals are made whatever MXCSR says. */
FA_AMX_INLINE __m256i fa_amx_half(__m512 x)
{
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 32 values as they follow each other, so pairs (2n, 2n + 1): what float16's left operands of P hold. */
FA_AMX_INLINE void fa_amx_store_halves(void *out, __m512 a, __m512 b)
{
    _mm256_store_si256(out, fa_amx_half(a));
    _mm256_store_si256((__m256i *)out + 1, fa_amx_half(b));
}

/* Which of 32 rows is row r of packed values that such an operand meets. */
FA_AMX_INLINE int fa_amx_fp16_order(int r) { return r % 16 * 2 + r / 16; }

/* The same of dS^T: groups of four from its first 16 queries and its last 16 take turns, so that words of two such
 * rows, side by side, are dS of 16 queries each. */
FA_AMX_INLINE int fa_amx_fp16_order_of_ds(int r)
{
    int x = fa_amx_fp16_order(r);
    return x / 4 % 2 * 16 + x / 8 * 4 + x % 4;
}

/* r[i][j] <-> r[j][i]. */
FA_AMX_INLINE void fa_amx_transpose(__m512i r[16])
{
    __m512i t[16];
    _Pragma("GCC unroll 8") for (int n = 0; n < 16; n += 2)
    {
        t[n]     = _mm512_unpacklo_epi32(r[n], r[n + 1]);
        t[n + 1] = _mm512_unpackhi_epi32(r[n], r[n + 1]);
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < 16; n += 4)
    {
        r[n]     = _mm512_unpacklo_epi64(t[n], t[n + 2]);
        r[n + 1] = _mm512_unpackhi_epi64(t[n], t[n + 2]);
        r[n + 2] = _mm512_unpacklo_epi64(t[n + 1], t[n + 3]);
        r[n + 3] = _mm512_unpackhi_epi64(t[n + 1], t[n + 3]);
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
    {
        t[c]      = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
        t[c + 4]  = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xDD);
        t[c + 8]  = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
        t[c + 12] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xDD);
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
    {
        r[c]      = _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88);
        r[c + 8]  = _mm512_shuffle_i32x4(t[c], t[c + 8], 0xDD);
        r[c + 4]  = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0xDD);
    }
}

/* ---- what stands behind an operand ---- */

enum { FA_AMX_END = 64 }; /* bytes, if anything does */

size_t fa_amx_bytes(fa_role role, int rows, int cols, int pieces); /* of an operand with its end: amx.c */

/* amx_infinite.c: the end of a left operand, or keys, of several pieces. not_finite: some numbers are NaN, or Inf, whose
 * other pieces become 0. src by value: a compiler that knows its stride and type forgets them where its address leaves. */
void fa_amx_end_pieces(char *end, bool not_finite, char *packed, fa_rows src, bool keys, int pieces);
/* Whether some number of Q or K in these roles is infinite; and scores again that came out as NaN for it: of a unit or
 * cell, four tiles, whose left operand has its second 16 rows `left_down` bytes on, or of s as fa_kernels.scores has it. */
bool fa_amx_any_infinite(fa_role q_role, const void *q, int rows, fa_role k_role, const void *k, int keys, int depth,
                         int pieces);
void fa_amx_mend_unit(float *s, const char *left, int64_t left_down, const char *right, int steps, int pieces);
void fa_amx_mend_scores(float *s, int lds, const char *left, const char *right, int rows, int keys, int steps,
                        int pieces);

/* ---- P in fixed point ---- */

/* Which of 32 keys is row r of packed values, so that pairs (r, r + 16) are what VPACKUSDW puts side by side. */
FA_AMX_INLINE int fa_amx_fixed_order(int r)
{
    int pair = r % 16;
    return pair / 4 * 4 + pair % 2 * 2 + pair % 4 / 2 * 16 + r / 16;
}

/* The largest magnitude of packed Q or K, one piece; NaN if it holds any. */
FA_AMX_INLINE float fa_amx_largest(const void *packed, int rows, int cols)
{
    float largest;
    memcpy(&largest, (const char *)packed + (size_t)((rows + 15) / 16) * (size_t)((cols + 31) / 32) * FA_AMX_TILE,
           sizeof largest);
    return largest;
}

/* ---- fused entries ---- */

/* amx_few.c: bfloat16, and float16 of up to eight rows; head dims that are multiples of 32. */
void fa_amx_scores_few(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon);
void fa_amx_scores_few_f16(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon);
void fa_amx_accumulate_few(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           const fa_soon *soon, void *scratch);

/* amx_many.c: the same for bfloat16 of 5 to 256 rows, head dims that are multiples of 32 up to 576. */
void   fa_amx_scores_many(float *s, int lds, const void *q, const fa_rows *k, int rows);
void   fa_amx_accumulate_many(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                              const fa_soon *soon, void *scratch);
void   fa_amx_accumulate_many_packed(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                                     int rows, const fa_soon *soon, void *scratch); /* more than 32 rows */
size_t fa_amx_many_scratch(int rows, int keys);
enum { FA_AMX_RAW_ROWS = 32 }; /* the most for which V is an operand as it lies: interleaving it takes longer than to
                                  multiply it by P twice */

/* amx_forward.c: operands of so many pieces. */
bool   fa_amx_forward_block(const fa_forward_block *block, int pieces);
bool   fa_amx_forward_block_fixed(const fa_forward_block *block); /* P in fixed point: no options, head dims to 128 */
size_t fa_amx_forward_scratch(int rows, int keys, int head_dim, int head_dim_v);

/* amx_fp16_forward.c, amx_fp16_few.c, amx_fp16_backward.c: of float16 in one piece */
bool fa_amx_fp16_forward_block(const fa_forward_block *block);
void fa_amx_fp16_scores_few(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon);
void fa_amx_fp16_accumulate_few(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                                int rows, const fa_soon *soon, void *scratch);
void fa_amx_fp16_backward_block(const fa_backward_block *block);
void fa_amx_fp16_backward_dq(const fa_backward_block *block);

/* amx.c: float16 as it lies, for amx_fp16.c. Values in fa_amx_fp16_order where P is made as such an operand. */
int fa_amx_pack_fp16(fa_role role, void *packed, const fa_rows *src, int *bad);

/* amx_backward.c: operands of 1, 2 or 3 pieces, with their turned forms. */
static inline int fa_amx_part_keys(int pieces) { return pieces == 3 ? 128 : 256; } /* one call's */
void              fa_amx_backward_block_1(const fa_backward_block *block);
void              fa_amx_backward_block_2(const fa_backward_block *block);
void              fa_amx_backward_block_3(const fa_backward_block *block);
void              fa_amx_backward_dq_1(const fa_backward_block *block);
void              fa_amx_backward_dq_2(const fa_backward_block *block);
void              fa_amx_backward_dq_3(const fa_backward_block *block);
void              fa_amx_store_tiled(const fa_stored_rows *to, const float *tiled, bool turned);
void              fa_amx_store_rows(const fa_stored_rows *to, const float *from, int ld, const float *factor);
void              fa_amx_natural_lse(float *lse, const float *m, const float *l, int rows, double to_natural);
size_t            fa_amx_backward_scratch(int rows, int pieces);

#endif
