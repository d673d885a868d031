/*
 * tanh for the softcap on AVX-512, by tables that VPERMT2PS looks up: in 32 equal steps of |x| a polynomial of degree 5
 * in what is left after rounding to a step's middle. It takes 17 instructions and no division, which alone takes 16
 * cycles.
 *
 * Coefficients are minimax for the relative error, 2e-9 in the first step, which begins at 0 exactly, 0.55 and 0.23
 * units of the last place in the next two, and far less beyond. With all roundings, that of the scaled argument too, it
 * is at most 8.0e-8 off, and 2.9 units of the last place. The steps' size is such that the first values are float32 all
 * but exactly, and the last step ends at 1.
 */
#ifndef FA_CPU_AVX512_TANH_H
#define FA_CPU_AVX512_TANH_H

#include <immintrin.h>
#include <stdint.h>

/* Steps in a unit of x. */
#define FA_TANH_STEPS 0x1.d06ba8p+1f

static const float fa_tanh_table[6][32] = {
    {0,
     0x1.134a9cp-2f,
     0x1.00bc68p-1f,
     0x1.5b884p-1f,
     0x1.9a4e16p-1f,
     0x1.c2d30cp-1f,
     0x1.dbd514p-1f,
     0x1.ead788p-1f,
     0x1.f3b33ap-1f,
     0x1.f8e042p-1f,
     0x1.fbe1f8p-1f,
     0x1.fd9f96p-1f,
     0x1.fea11p-1f,
     0x1.ff35a8p-1f,
     0x1.ff8b5ep-1f,
     0x1.ffbcc6p-1f,
     0x1.ffd942p-1f,
     0x1.ffe9acp-1f,
     0x1.fff322p-1f,
     0x1.fff896p-1f,
     0x1.fffbbap-1f,
     0x1.fffd8ap-1f,
     0x1.fffe94p-1f,
     0x1.ffff2ep-1f,
     0x1.ffff88p-1f,
     0x1.ffffbap-1f,
     0x1.ffffd8p-1f,
     0x1.ffffe8p-1f,
     0x1.fffff2p-1f,
     0x1.fffff8p-1f,
     0x1.fffffcp-1f,
     0x1.fffffep-1f},
    {0x1.1a3a1ap-2f,  0x1.05d448p-2f,        0x1.a6872ap-3f,  0x1.30640ep-3f,  0x1.93eadep-4f,  0x1.fb4f7cp-5f,
     0x1.33b7b6p-5f,  0x1.6d7ffp-6f,         0x1.acb554p-7f,  0x1.f3263ep-8f,  0x1.2155ccp-8f,  0x1.4e9828p-9f,
     0x1.82601cp-10f, 0x1.bdcc6cp-11f,       0x1.010e86p-11f, 0x1.285dccp-12f, 0x1.55a2p-13f,   0x1.89c6ep-14f,
     0x1.c5db0cp-15f, 0x1.058ad8p-15f,       0x1.2d6e78p-16f, 0x1.5b669ep-17f, 0x1.9060dap-18f, 0x1.cd6eep-19f,
     0x1.09e60ep-19f, 0x1.3272p-20f,         0x1.612cbap-21f, 0x1.970796p-22f, 0x1.d518cp-23f,  0x1.0e5068p-23f,
     0x1.37889ap-24f, 0x1.00068db8bac71p-23f},
    {0x1.d5aac8p-25f,  -0x1.366354p-6f,  -0x1.d3251p-6f,   -0x1.c78fd2p-6f,
     -0x1.64db5p-6f,   -0x1.ec76d8p-7f,  -0x1.3b47dcp-7f,  -0x1.824b2ep-8f,
     -0x1.cd460cp-9f,  -0x1.0f5046p-9f,  -0x1.3c68f6p-10f, -0x1.6f287cp-11f,
     -0x1.a8d0b4p-12f, -0x1.eab50ep-13f, -0x1.1b2326p-13f, -0x1.468ef4p-14f,
     -0x1.7884a2p-15f, -0x1.b20a86p-16f, -0x1.f44c94p-17f, -0x1.205178p-17f,
     -0x1.4c4c9p-18f,  -0x1.7efb2ap-19f, -0x1.b9635p-20f,  -0x1.fcb2e2p-21f,
     -0x1.2522d2p-21f, -0x1.51d62cp-22f, -0x1.855a68p-23f, -0x1.c0b9ap-24f,
     -0x1.02933ep-24f, -0x1.2a0136p-25f, -0x1.57726p-26f,  0},
    {-0x1.c968ap-8f,  -0x1.4c60a8p-8f, -0x1.509754p-10f, 0x1.79086cp-10f,
     0x1.2f44fap-9f,  0x1.10859p-9f,   0x1.8cb90ap-10f,  0x1.04321cp-10f,
     0x1.42a2p-11f,   0x1.83ad4cp-12f, 0x1.c99ba4p-13f,  0x1.0b578ep-13f,
     0x1.368da4p-14f, 0x1.678a82p-15f, 0x1.9f743p-16f,   0x1.df875ap-17f,
     0x1.1490dcp-17f, 0x1.3ee6p-18f,   0x1.6fa1f2p-19f,  0x1.a7c332p-20f,
     0x1.e86d82p-21f, 0x1.19781p-21f,  0x1.44665ap-22f,  0x1.75dfa4p-23f,
     0x1.aee3a2p-24f, 0x1.f098eep-25f, 0x1.1e2982p-25f,  0x1.49cc88p-26f,
     0x1.7c16fp-27f,  0x1.b60c84p-28f, 0x1.f8d886p-29f,  0},
    {0x1.09875ap-18f,  0x1.ba6faep-11f,  0x1.d41b4ep-11f,  0x1.c9934cp-12f,
     0x1.6d808ep-15f,  -0x1.005bb8p-13f, -0x1.2ccbbp-13f,  -0x1.d9d32ep-14f,
     -0x1.410198p-14f, -0x1.943a4p-15f,  -0x1.e99ab2p-16f, -0x1.2234d6p-16f,
     -0x1.53e5acp-17f, -0x1.8b5e2p-18f,  -0x1.ca15cep-19f, -0x1.08c704p-19f,
     -0x1.31b0c4p-20f, -0x1.60a97ap-21f, -0x1.96ad16p-22f, -0x1.d4d8dp-23f,
     -0x1.0e38f6p-23f, -0x1.37768p-24f,  -0x1.66faeep-25f, -0x1.9dbc48p-26f,
     -0x1.dcd5dp-27f,  -0x1.12c6d6p-27f, -0x1.3cadb6p-28f, -0x1.6cf84p-29f,
     -0x1.a49fd6p-30f, -0x1.e4c4p-31f,   -0x1.175856p-31f, 0},
    {0x1.ae9446p-13f,  0x1.a86c0ep-14f,  -0x1.0681bcp-14f, -0x1.9abc24p-14f,
     -0x1.ce64aap-15f, -0x1.f51952p-17f, 0x1.b61daep-19f,  0x1.fa5a94p-18f,
     0x1.bded9cp-18f,  0x1.3a36b4p-18f,  0x1.92a53cp-19f,  0x1.ebf30ap-20f,
     0x1.24f1c4p-20f,  0x1.57f968p-21f,  0x1.90adbcp-22f,  0x1.d09cd8p-23f,
     0x1.0cac8p-23f,   0x1.364552p-24f,  0x1.660014p-25f,  0x1.9cde38p-26f,
     0x1.dc0268p-27f,  0x1.125be4p-27f,  0x1.3c3c24p-28f,  0x1.6c7bdcp-29f,
     0x1.a414b2p-30f,  0x1.e427eep-31f,  0x1.16fefcp-31f,  0x1.418b72p-32f,
     0x1.72933cp-33f,  0x1.ab102p-34f,   0x1.ec3e1cp-35f,  0},
};

/* tanh of steps / FA_TANH_STEPS; NaN of NaN. */
static inline __attribute__((always_inline)) __m512 fa_tanh_of_steps(__m512 steps)
{
    const __m512 most  = _mm512_set1_ps(0x1.f7fffep4f),
                 magic = _mm512_set1_ps(0x1.8p23f); /* 31.5, but for its last bit */
    __m512  u = _mm512_min_ps(most, _mm512_abs_ps(steps)), rounded = _mm512_add_ps(u, magic);
    __m512  r = _mm512_sub_ps(u, _mm512_sub_ps(rounded, magic)), p = _mm512_setzero_ps();
    __m512i n = _mm512_castps_si512(rounded); /* its lowest five bits */
    _Pragma("GCC unroll 6") for (int power = 5; power >= 0; power--)
    {
        const float *row = fa_tanh_table[power];
        __m512       c   = _mm512_permutex2var_ps(_mm512_loadu_ps(row), n, _mm512_loadu_ps(row + 16));
        p                = power == 5 ? c : _mm512_fmadd_ps(p, r, c);
    }
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(sign, _mm512_castps_si512(steps), _mm512_castps_si512(p), 0xCA));
}

#endif
