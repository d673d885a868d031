/* What backward.c and dbias.c share: Delta, and P and dS of one tile. */
#ifndef FA_CPU_GRADIENT_H
#define FA_CPU_GRADIENT_H

#include "cpu/tile.h"

/* Delta = rowsum(dO * O), float32 [q entries, heads_q, q rows]. */
static inline float *fa_delta_at(const fa_call *call, float *delta, const fa_sequence *seq, int64_t head, int i)
{
    return delta + (seq->q_entry * call->heads_q + head) * call->q.shape[1] + seq->q_row + i;
}

/* Delta of some queries of one head; 0 for those that see nothing, whatever dO holds, for their o is exactly 0.
 * Pointers: one for each query. */
void fa_fill_delta(const fa_kernels *kernels, const fa_call *call, float *delta, const fa_sequence *seq, int64_t head,
                   fa_range queries, const void **row_o, const void **row_dout);

/* lse (natural, and to base 2 as fa_multiplier takes scores there) and delta of a tile's rows, as the kernels want
 * them. A query that saw nothing gets lse = inf: P = 0. */
void fa_gather_rows(const fa_call *call, float *delta, const fa_tile *tile, float scale, float *row_lse,
                    float *row_lse_log2, float *row_delta);

/* One tile of queries of one head against one of keys. */
typedef struct fa_tile_gradient {
    const fa_kernels *kernels;
    const fa_call    *call;
    const fa_tile    *tile;
    fa_visible        visible;
    float             scale;
    const void       *q, *dout, *k, *v_t; /* packed: roles Q, DO, K, V_T */
    const float      *lse, *delta;
    float            *p, *ds;  /* [rows][ld] */
    float            *slope;   /* likewise, with softcap */
    float            *dropped; /* likewise, with dropout: P that dV takes */
    int               ld;
    bool              packed; /* by gradient_packed: nobody looks at P and dS but the products */
} fa_tile_gradient;

/* Algorithm 2, lines 11 to 15: p = P and ds = the gradient of the scores as the bias is added to them. Returns the P
 * that dV takes: p, or dropped. */
const float *fa_score_gradient(const fa_tile_gradient *t);

/* From there through the softcap to scale * q.k: ds *= slope. */
void fa_softcap_gradient(const fa_tile_gradient *t);

/* Gradients of what is added to the scores (dbias.c). tile: the backward's. */
size_t  fa_dbias_scratch_bytes(const fa_kernels *kernels, fa_tile_shape tile, const fa_call *call);
int64_t fa_dbias_tasks(fa_tile_shape tile, const fa_call *call);
void    fa_dbias_task(const fa_kernels *kernels, fa_tile_shape tile, const fa_call *call, float *delta, int64_t task,
                      char *scratch);
void    fa_dsinks_task(const fa_call *call, float *delta, int64_t head);

#endif
