/* Few queries against long keys: the keys are split, and the parts' results folded in order (decode.c). */
#ifndef FA_CPU_SPLIT_H
#define FA_CPU_SPLIT_H

#include "cpu/cpu.h"

/* An unfinished result of some rows: o [rows][ldo] not divided by l; m, l as in the online softmax. */
typedef struct fa_partial {
    float *o, *m, *l;
    int    rows, ldo;
} fa_partial;

/* Keys of one part, a multiple of tile.k; seqlen_k or more: not split. By the sequence's own shape alone. least_keys: of
 * a part where the caller has not said how many. */
int fa_split_keys(int num_splits, int least_keys, int64_t rows, fa_tile_shape tile, int64_t seqlen_k);
/* No sequence of at most seqlen_k keys has more parts. */
int fa_max_splits(int num_splits, int least_keys, int tile_k, int64_t seqlen_k);

void fa_partial_clear(const fa_partial *p);
void fa_partial_copy(const fa_partial *to, const fa_partial *from);
/* sum = sum and part together. Folding from a cleared sum, parts in order, is the only way that parts meet, so that one
 * thread doing all parts and many doing one each give the same bits. */
void fa_partial_fold(const fa_partial *sum, const fa_partial *part);

#endif
