/*
 * K8's idea, incoherent processing: Q and K are multiplied with one random orthogonal matrix R before they are rounded.
 *
 *     (Q R) (K R)^T = Q R R^T K^T = Q K^T          the scores stay as they are, but
 *     a row (0 0 90 0 ... 0) R = (8 -8 8 8 ... -8)  an outlier is dealt out over the whole row
 *
 * E4M3 keeps four bits of each number, so a number's error grows with the number. Where an outlier of a query meets one of a key, their
 * product is most of the score and its error most of the score's: P = exp(S) is wrong by that much. Dealt out, the errors of D
 * products of middling size cancel for the most part.
 *
 *     R = diag(+-1 ...) H / sqrt(D),   H of 1: (1),   H of 2 n: (H  H)     log2(D) steps of sums and differences in place of
 *                                                               (H -H)     a product: columns c and c + 1, then c + 2, c + 4, ...
 */
#ifndef FA_K8_ROTATE_CUH
#define FA_K8_ROTATE_CUH

#include "ladder.cuh"

/* Eight columns from 8 * chunk of a row whose D / 8 chunks D / 8 neighbouring lanes hold. The signs are the same for all rows and heads. */
FA_DEVICE void rotate(float (&x)[8], int chunk)
{
    constexpr float SIZE = D == 64 ? 0.125f : 0.08838834764831845f; /* 1 / sqrt(D) */
    unsigned        signs = (chunk + 1) * 0x9E3779B9u;
    signs = (signs ^ signs >> 15) * 0x85EBCA6Bu >> 24; /* a bit a column */
#pragma unroll
    for (int e = 0; e < 8; e++)
        x[e] *= signs >> e & 1 ? -SIZE : SIZE;
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) /* columns of this lane */
#pragma unroll
        for (int e = 0; e < 8; e++)
            if ((e & apart) == 0) {
                float a = x[e], b = x[e + apart];
                x[e]         = a + b;
                x[e + apart] = a - b;
            }
#pragma unroll
    for (int apart = 1; apart < D / 8; apart *= 2) /* lanes */
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, x[e], apart);
            x[e]        = chunk & apart ? other - x[e] : x[e] + other;
        }
}

#endif
