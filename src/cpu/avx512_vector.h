/* Vectors of AVX-512 F, BW, DQ, VL, as kernel_base.inc asks for them. */
#ifndef FA_CPU_AVX512_VECTOR_H
#define FA_CPU_AVX512_VECTOR_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define VL 16
#define MR 6
#define NV 4

typedef __m512 vf;

#define V static inline __attribute__((always_inline))
#define V_KEEP(x) __asm__("" : "+v"(x))
/* sum += a * b in sum's own register. */
#define V_ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))

V vf    v_zero(void) { return _mm512_setzero_ps(); }
V vf    v_set1(float x) { return _mm512_set1_ps(x); }
V vf    v_load(const float *p) { return _mm512_loadu_ps(p); }
V void  v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
V vf    v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
V vf    v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
V vf    v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
V vf    v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
V vf    v_abs(vf x) { return _mm512_abs_ps(x); }
V vf    v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
V vf    v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
V vf    v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
V float v_reduce_add(vf x) { return _mm512_reduce_add_ps(x); }
V float v_reduce_max(vf x) { return _mm512_reduce_max_ps(x); }
V vf    v_less(vf a, vf b, vf x, vf y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x); }
V vf    v_where_nonzero(vf p, vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(p, v_zero(), _CMP_NEQ_UQ), x); }

V vf v_exp2_range(vf x) { return x; }
V vf v_fraction(vf x) { return _mm512_reduce_ps(x, 1); /* 0 bits after the point, towards -inf */ }
V vf v_scale2(vf p, vf x) { return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, v_set1(-126.0f), _CMP_NLT_UQ), p, x); }

V vf   v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
V void v_store_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V vf v_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* 32 columns: the even ones, the odd ones. v_apart and v_together take columns there and back. */
#define V_APART
V void v_load_bf16_apart(vf two[2], const uint16_t *p)
{
    __m512i x = _mm512_loadu_si512(p);
    two[0]    = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    two[1]    = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)));
}
V void v_apart(vf two[2])
{
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vf      a    = two[0];
    two[0]       = _mm512_permutex2var_ps(a, even, two[1]);
    two[1]       = _mm512_permutex2var_ps(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), two[1]);
}
V void v_together(vf two[2])
{
    __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    vf      a   = two[0];
    two[0]      = _mm512_permutex2var_ps(a, low, two[1]);
    two[1]      = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), two[1]);
}
#define V_SUMS4
/* out[n] = the sum of vector n: 9 shuffles, where one by one they take 16. */
V void v_store_sums4(float *out, const vf *of)
{
    vf a = of[0], b = of[1], c = of[2], d = of[3];
    vf ab  = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    vf cd  = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    vf all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    all    = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4E));
    all    = _mm512_add_ps(all, _mm512_permute_ps(all, 0xB1));
    all    = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), all);
    _mm_storeu_ps(out, _mm512_castps512_ps128(all));
}
/* Lane n: the sum of vector n, each added up as v_reduce_add does. */
V vf v_sums16(const vf of[16])
{
    vf two[8], four[4], pair[2];
    _Pragma("GCC unroll 8")
    for (int n = 0; n < 8; n++) { /* rows n % 4 + 8 (n / 4), and four rows further on: halves, ... */
        vf a = of[n % 4 + n / 4 * 8], b = of[n % 4 + n / 4 * 8 + 4];
        two[n] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    _Pragma("GCC unroll 8")
    for (int n = 0; n < 4; n++) /* ... quarters, ... */
        four[n] = _mm512_add_ps(_mm512_shuffle_f32x4(two[n], two[n + 4], 0x88),
                                _mm512_shuffle_f32x4(two[n], two[n + 4], 0xDD));
    _Pragma("GCC unroll 8")
    for (int n = 0; n < 2; n++) /* ... and what is left of each quarter */
        pair[n] = _mm512_add_ps(_mm512_shuffle_ps(four[2 * n], four[2 * n + 1], 0x44),
                                _mm512_shuffle_ps(four[2 * n], four[2 * n + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xDD));
}
#define V_SUMS16
/* few[4 n + j] = the sum of vector 4 n + j. */
V void v_store_sums16(float few[16], const vf sum[16], const int rows)
{
    if (rows == 1)
        v_store_sums4(few, sum);
    else
        v_store(few, v_sums16(sum));
}
/* s[n * lds + j * part + i] = few[i][4 n + j], of up to four i. */
V void v_store_turned(float *s, int lds, int part, float few[][16], const int rows, int count)
{
    if (rows == 1 || count < 4) {
        for (int n = 0; n < 4 * rows; n++)
            for (int i = 0; i < 4 && i < count; i++)
                s[(int64_t)(n / 4) * lds + n % 4 * part + i] = few[i][n];
        return;
    }
    vf a = v_load(few[0]), b = v_load(few[1]), c = v_load(few[2]), d = v_load(few[3]);
    vf ab[2] = {_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)};
    vf cd[2] = {_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)};
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)
    {
        vf     x  = j % 2 ? _mm512_shuffle_ps(ab[j / 2], cd[j / 2], 0xEE) : _mm512_shuffle_ps(ab[j / 2], cd[j / 2], 0x44);
        float *at = s + j * part;
        _mm_storeu_ps(at, _mm512_castps512_ps128(x));
        _mm_storeu_ps(at + lds, _mm512_extractf32x4_ps(x, 1));
        _mm_storeu_ps(at + 2 * lds, _mm512_extractf32x4_ps(x, 2));
        if (rows == 4)
            _mm_storeu_ps(at + 3 * lds, _mm512_extractf32x4_ps(x, 3));
    }
}
/* fa_bf16_of_float on 16 lanes. */
V void v_store_bf16(uint16_t *p, vf x)
{
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i even    = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, even), 16);
    __m512i quiet   = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    rounded         = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}

/* Pairs, then quads within 128 bits, then the 128-bit quarters. */
V void v_transpose(vf r[16])
{
    vf t[16];
    _Pragma("GCC unroll 8") for (int n = 0; n < 16; n += 2)
    {
        t[n]     = _mm512_unpacklo_ps(r[n], r[n + 1]);
        t[n + 1] = _mm512_unpackhi_ps(r[n], r[n + 1]);
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < 16; n += 4)
    {
        r[n]     = _mm512_shuffle_ps(t[n], t[n + 2], 0x44);
        r[n + 1] = _mm512_shuffle_ps(t[n], t[n + 2], 0xEE);
        r[n + 2] = _mm512_shuffle_ps(t[n + 1], t[n + 3], 0x44);
        r[n + 3] = _mm512_shuffle_ps(t[n + 1], t[n + 3], 0xEE);
    }
    /* r[4a + c] holds rows 4a .. 4a + 3 of columns c, c + 4, c + 8, c + 12. */
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
    {
        t[c]      = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x44);
        t[c + 4]  = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xEE);
        t[c + 8]  = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x44);
        t[c + 12] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xEE);
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
    {
        r[c]      = _mm512_shuffle_f32x4(t[c], t[c + 8], 0x88);
        r[c + 4]  = _mm512_shuffle_f32x4(t[c], t[c + 8], 0xDD);
        r[c + 8]  = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0xDD);
    }
}

#endif
