/* AVX2, FMA, F16C. */
#include "cpu/cpu.h"

#include <immintrin.h>

#define TIER_NAME "avx2"
#define TIER_ISA FLASH_ATTN_ISA_AVX2
#define VL 8
#define MR 6
#define NV 2

typedef __m256 vf;

#define V static inline __attribute__((always_inline))

/* In a register from here on, not loaded again where it is used. */
#define V_KEEP(x) __asm__("" : "+x"(x))
/* sum += a * b in sum's own register: the compiler takes others for it where few are free. */
#define V_ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))

V vf    v_zero(void) { return _mm256_setzero_ps(); }
V vf    v_set1(float x) { return _mm256_set1_ps(x); }
V vf    v_load(const float *p) { return _mm256_loadu_ps(p); }
V void  v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
V vf    v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
V vf    v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
V vf    v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
V vf    v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
V vf    v_abs(vf x) { return _mm256_andnot_ps(v_set1(-0.0f), x); }
V vf    v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
V vf    v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
V vf    v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
V vf    v_less(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
V vf    v_where_nonzero(vf p, vf x) { return _mm256_and_ps(_mm256_cmp_ps(p, v_zero(), _CMP_NEQ_UQ), x); }
V float v_reduce_add(vf x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half        = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
V float v_reduce_max(vf x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half        = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

V vf v_exp2_range(vf x) { return _mm256_min_ps(v_set1(128.0f), _mm256_max_ps(v_set1(-127.0f), x)); }
V vf v_fraction(vf x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
V vf v_scale2(vf p, vf x)
{
    __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(x));
    n         = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(n));
}

V vf   v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
V void v_store_f16(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V vf v_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
/* 16 columns: the even ones, the odd ones. v_apart and v_together take columns there and back. */
#define V_APART
V void v_load_bf16_apart(vf two[2], const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    V_KEEP(x);
    two[0] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    two[1] = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000)));
}
V vf   v_swap_middle(vf x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8)); }
V void v_apart(vf two[2])
{
    vf a   = two[0];
    two[0] = v_swap_middle(_mm256_shuffle_ps(a, two[1], 0x88));
    two[1] = v_swap_middle(_mm256_shuffle_ps(a, two[1], 0xDD));
}
V void v_together(vf two[2])
{
    vf low = _mm256_unpacklo_ps(two[0], two[1]), high = _mm256_unpackhi_ps(two[0], two[1]);
    two[0] = _mm256_permute2f128_ps(low, high, 0x20);
    two[1] = _mm256_permute2f128_ps(low, high, 0x31);
}
/* out = the sums of vectors 0, 2, 4, 6 and then of 1, 3, 5, 7, each in v_reduce_add's order. */
#define V_SUMS8
V vf v_sums2(vf a, vf b)
{
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
V vf v_sums4(const vf *of)
{
    vf ab = v_sums2(of[0], of[1]), cd = v_sums2(of[2], of[3]);
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
}
V void v_store_sums8(float *out, const vf *of)
{
    vf low = v_sums4(of), high = v_sums4(of + 4);
    v_store(out, _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xDD)));
}
/* fa_bf16_of_float on 8 lanes. */
V void v_store_bf16(uint16_t *p, vf x)
{
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i even    = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, even), 16);
    __m256i quiet   = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan  = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded         = _mm256_blendv_epi8(rounded, quiet, is_nan);
    __m256i packed  = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

V void v_transpose(vf r[8])
{
    vf t[8];
    for (int n = 0; n < 8; n += 2) {
        t[n]     = _mm256_unpacklo_ps(r[n], r[n + 1]);
        t[n + 1] = _mm256_unpackhi_ps(r[n], r[n + 1]);
    }
    for (int n = 0; n < 8; n += 4) {
        r[n]     = _mm256_shuffle_ps(t[n], t[n + 2], 0x44);
        r[n + 1] = _mm256_shuffle_ps(t[n], t[n + 2], 0xEE);
        r[n + 2] = _mm256_shuffle_ps(t[n + 1], t[n + 3], 0x44);
        r[n + 3] = _mm256_shuffle_ps(t[n + 1], t[n + 3], 0xEE);
    }
    for (int c = 0; c < 4; c++) {
        t[c]     = _mm256_permute2f128_ps(r[c], r[c + 4], 0x20);
        t[c + 4] = _mm256_permute2f128_ps(r[c], r[c + 4], 0x31);
    }
    memcpy(r, t, sizeof t);
}

#include "cpu/kernels.inc"

const fa_kernels *fa_kernels_avx2(void) { return &table; }
