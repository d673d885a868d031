/*
 * Standard attention, the peer that FlashAttention is measured against: S = Q K^T, P = softmax(S), O = P V as three
 * passes over matrices that lie in memory, in float32. The forward keeps P for the backward, as a training framework
 * would.
 */
#ifndef CLI_STANDARD_H
#define CLI_STANDARD_H

#include "pool.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct standard_shape {
    int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim; /* tensors are contiguous [b, s, h, d] */
    bool    causal;
    float   scale;
} standard_shape;

/* Bytes of the matrices: P, and for the backward dP and D too. -1: more than fit in 63 bits. */
int64_t standard_bytes(const standard_shape *shape, bool backward);

typedef struct standard {
    standard_shape shape;
    cli_pool      *pool;
    float         *prob;  /* S, then P: [b, h, sq, sk] */
    float         *dprob; /* dP, then dS; NULL without a backward */
    float         *delta; /* D = rowsum(dO * O): [b, h, sq] */
} standard;

/* false: no memory. */
bool standard_create(standard *s, const standard_shape *shape, bool backward, cli_pool *pool);
void standard_destroy(standard *s);

void standard_forward(standard *s, const float *q, const float *k, const float *v, float *o);

/* After standard_forward with the same q, k, v. */
void standard_backward(standard *s, const float *q, const float *k, const float *v, const float *o, const float *dout,
                       float *dq, float *dk, float *dv);

#endif
