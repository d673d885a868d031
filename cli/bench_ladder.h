/* flashattn bench --kernel: GPU kernels by name, the rungs of the ladder above all, checked and then timed. */
#ifndef CLI_BENCH_LADDER_H
#define CLI_BENCH_LADDER_H

#include "bench_shape.h"
#include "options.h"

typedef struct ladder_request {
    const char *kernels; /* names with commas between, or "all": every rung of the ladder */
    cli_list    seqlen, head_dim, dtype;
    int64_t     seqlen_q, batch, heads, heads_k; /* 0: seqlen_q as seqlen, 16384 tokens, hidden size 2048, as heads */
    int         masks;                           /* bit 0 full, bit 1 causal */
    int32_t     device;
    double      seconds; /* to time one row for */
    uint64_t    seed;
    const char *json; /* file, "-" or NULL */
} ladder_request;

/* Returns an exit status. */
int bench_ladder(const ladder_request *request);

#endif
