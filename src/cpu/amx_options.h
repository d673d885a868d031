/*
 * What the options of both fused AMX kernels share. Each applies them in the layout that its scores have
 * (amx_forward_options.h, amx_backward_options.h).
 */
#ifndef FA_CPU_AMX_OPTIONS_H
#define FA_CPU_AMX_OPTIONS_H

#include "cpu/amx.h"
#include "cpu/tile.h"

/* `count` scores, a multiple of 16: softcap, with its slope if not NULL, or the scale where options need natural
 * units. */
FA_AMX_INLINE void fa_amx_scale_scores(const fa_block_options *options, float *s, float *slope, int count)
{
    const fa_call *call = options->call;
    if (call->softcap > 0.0f) { /* rows make no difference */
        fa_kernels_avx512()->softcap(s, slope, count, 1, count, options->scale, call->softcap);
    } else if (fa_has_options(call, options->scale)) {
        for (int n = 0; n < count; n += 16)
            _mm512_store_ps(s + n, _mm512_mul_ps(_mm512_load_ps(s + n), _mm512_set1_ps(options->scale)));
    }
}

/* s - slope |distance|, rounded as fa_apply_options does. */
FA_AMX_INLINE __m512 fa_amx_with_alibi(__m512 s, float slope, __m512i distance)
{
    __m512 away = _mm512_cvtepi32_ps(_mm512_abs_epi32(distance));
    return _mm512_sub_ps(s, _mm512_mul_ps(_mm512_set1_ps(slope), away));
}

/* slope |distance + 31 - n| for n = 0 .. 63: all that a unit or cell of 32 by 32 with neighbouring queries takes, whose
 * scores' own 16 begin at 31 - r + 16 t, in the same roundings. */
FA_AMX_INLINE void fa_amx_alibi_of_unit(float away[64], float slope, int distance)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int n = 0; n < 64; n += 16) {
        __m512i from = _mm512_sub_epi32(_mm512_set1_epi32(distance + 31 - n), lanes);
        _mm512_store_ps(away + n, _mm512_mul_ps(_mm512_set1_ps(slope), _mm512_cvtepi32_ps(_mm512_abs_epi32(from))));
    }
}

/* s scale - away */
FA_AMX_INLINE void fa_amx_take_away(float *s, __m512 scale, const float *away)
{
    _mm512_store_ps(s, _mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(s), scale), _mm512_loadu_ps(away)));
}

#endif
