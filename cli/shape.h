/* The shape of a problem by numbers alone, as `explain` and `compile` share it. */
#ifndef CLI_SHAPE_H
#define CLI_SHAPE_H

#include "options.h"

typedef struct cli_shape_flags {
    int64_t   batch, seqlen, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v, page_size;
    cli_dtype dtype;
    bool      latent;
} cli_shape_flags;

/* -1: not given. 0 is a length, and for the library to refuse where it is none. */
#define CLI_SHAPE_DEFAULTS \
    {.batch = 1, .seqlen = 1024, .seqlen_q = -1, .seqlen_k = -1, .heads = 8, .heads_k = -1, .head_dim = 64, .head_dim_v = -1}

extern const cli_option cli_shape_options[]; /* a table for cli_shape_flags */

/* A contiguous tensor with its strides written out. */
flash_attn_tensor cli_with_strides(flash_attn_tensor t);

/* Shapes of q, k, v, o and lse without data. */
void cli_shape_apply(const cli_shape_flags *flags, flash_attn_problem *problem);

/* After cli_problem_apply: a paged cache is as large as the highest page of the table asks for, and V fits into K if it is to be a part of it. Returns
 * CLI_GO_ON or CLI_REFUSED. */
int cli_shape_pages(const cli_help *help, const cli_shape_flags *flags, flash_attn_problem *problem);

#endif
