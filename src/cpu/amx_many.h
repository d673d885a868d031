/*
 * What products read from the caller's rows in place: rows at equal distances, which a tile load wants; P as it meets
 * them; rows that are asked for.
 */
#ifndef FA_CPU_AMX_MANY_H
#define FA_CPU_AMX_MANY_H

#include "cpu/amx.h"

/* Bytes from one of the rows `first` to first + 15 to the next; 0: they are not all there, or not at equal distances. */
FA_AMX_INLINE int64_t fa_amx_equal_steps(const fa_rows *rows, int first)
{
    const char *const *row = (const char *const *)rows->row + first;
    if (rows->count - first < 16)
        return 0;
    int64_t step = row[1] - row[0];
    __m512i at = _mm512_set1_epi64((int64_t)(intptr_t)row[0]), steps = _mm512_set1_epi64(step);
    __m512i low  = _mm512_add_epi64(at, _mm512_mullo_epi64(steps, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)));
    __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(steps, 3));
    bool    all  = (_mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(row)) |
                _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(row + 8))) == 0;
    return all ? step : 0;
}

FA_AMX_INLINE __m512 fa_amx_load_keys(const float *p, int key, int keys)
{
    __mmask16 mask = keys - key >= 16 ? 0xFFFF : keys <= key ? 0 : (__mmask16)((1u << (keys - key)) - 1);
    return _mm512_maskz_loadu_ps(mask, p + key);
}

/* P's rows as a left operand: pairs (k, k + 16). */
FA_AMX_INLINE void fa_amx_pack_p(char *out, const float *p, int ldp, int rows, int keys, int pieces)
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

FA_AMX_INLINE void fa_amx_scale_rows(float *c, int ldc, const float *rescale, int rows, int cols)
{
    for (int r = 0; r < rows; r++) {
        if (rescale[r] == 1.0f)
            continue;
        for (int col = 0; col < cols; col += 16) {
            float *at = c + (int64_t)r * ldc + col;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(rescale[r])));
        }
    }
}

#ifndef X_HINT
#define X_HINT 2
#endif
/* The lines of rows that are asked for, in the order of their addresses, a few at a time; into the second-level cache. */
typedef struct fa_amx_asks {
    const void *const *row;
    int                next, end, byte, bytes; /* row, those there are; of the row */
} fa_amx_asks;

FA_AMX_INLINE void fa_amx_ask(fa_amx_asks *asks, int lines)
{
    for (int n = 0; n < lines && asks->next < asks->end; n++) {
        __builtin_prefetch((const char *)asks->row[asks->next] + asks->byte, 0, X_HINT);
        asks->byte += 64;
        if (asks->byte >= asks->bytes) {
            asks->byte = 0;
            asks->next++;
        }
    }
}

#endif
