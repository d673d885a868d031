/* The ladder: kernels that teach, one idea a rung (docs/ladder.md). They run when asked for by a rung's name
 * (flash_attn_options.kernel), never by themselves. */
#ifndef FA_CUDA_LADDER_H
#define FA_CUDA_LADDER_H

#include "cuda/tune.h"

typedef struct fa_rung {
    const char *name;     /* "k3.2" */
    bool        has_maps; /* it loads through tensor maps */
    bool        rounds;   /* Q, K and V to FP8: exact to some percent only */
    int         num_rows;
    fa_tune_row row[2]; /* head_dim is the one that it is for */
} fa_rung;

extern const fa_rung fa_rungs[];
extern const int     fa_num_rungs;

/* NULL: no rung has this name. */
const fa_rung *fa_ladder_find(const char *name);

/* The rung's row for a call. UNSUPPORTED says what the rung lacks. */
flash_attn_status fa_ladder_choose(const fa_call *call, const fa_key *key, const fa_rung *rung, const fa_tune_row **row);

#endif
