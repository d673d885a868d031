/* One shape of the bench: its arrays, the check of its results, and the times of standard attention and ours. */
#ifndef CLI_BENCH_SHAPE_H
#define CLI_BENCH_SHAPE_H

#include "bench_options.h"
#include "flashattn.h"
#include "pool.h"
#include "standard.h"

typedef struct bench_shape {
    flash_attn_dtype dtype;
    int64_t          batch, heads, heads_k, seqlen_q, seqlen_k, head_dim;
    bool             causal;
    bench_options    options;
} bench_shape;

typedef struct bench_settings {
    flash_attn_context *context;
    flash_attn_device   device;
    cli_pool           *pool; /* standard attention's threads */
    bool                with_standard;
    int64_t             memory_limit_bytes; /* standard attention's matrices may not take more */
    double              seconds;            /* to time one pass for, ours and standard's together */
    int                 least_repeats;
    uint64_t            seed;
} bench_settings;

typedef struct bench_times {
    int    repeats; /* 0: not timed */
    double min_ms, median_ms;
} bench_times;

typedef struct bench_row {
    bench_shape     shape;
    flash_attn_pass pass;
    char            kernel[64];
    bench_times     ours, standard;
    int64_t         ours_bytes, standard_bytes; /* of memory beyond q, k, v, o and their gradients */
    bool            over_limit;                 /* standard attention was skipped for its memory */
    double          flops;                      /* bench_flops */
    double          error, standard_error;      /* worst relative L2 error of the results; standard's: -1 if skipped */
    double          tolerance;
    bool            right; /* both are within the tolerance */
} bench_row;

/* What a shape lives in while its passes are measured. */
typedef struct bench_arrays {
    bench_shape        shape;
    flash_attn_problem problem;
    flash_attn_grads   grads;
    float             *q, *k, *v, *dout; /* what the library's tensors hold, in float32 */
    float             *o, *dq, *dk, *dv; /* standard attention's */
    standard           standard;         /* prob NULL: skipped */
    void              *memory[24];
    int                num_memory;
} bench_arrays;

/* Whether the library takes the shape and its options in these passes (bits). Returns an exit status or CLI_GO_ON. */
int bench_check_shape(const bench_shape *shape, flash_attn_device device, int passes);

/* Make arrays with random numbers. Returns an exit status or CLI_GO_ON. */
int  bench_open(bench_arrays *arrays, const bench_shape *shape, const bench_settings *settings, bool backward);
void bench_close(bench_arrays *arrays);

/* Check, then time, one pass. The backward needs the forward's results: measure that first. */
int bench_measure(bench_arrays *arrays, const bench_settings *settings, flash_attn_pass pass, bench_row *row);

/* For what the arrays own; zeros. NULL: no memory. */
void *bench_allocate(bench_arrays *arrays, int64_t count, size_t element_bytes);

/* Give a contiguous tensor that has its dtype and shape data: normal numbers; floats, if not NULL: the same in float32,
 * in *floats. false: no memory. */
bool bench_make_random(bench_arrays *arrays, flash_attn_tensor *tensor, float **floats, uint64_t *random);

/* "full", "causal" or "window". */
const char *bench_mask_name(const bench_shape *shape);

/* The papers' count: 4 s^2 d h b, half of it when causal; with a window or blocks 4 d h b for each pair that is seen.
 * The backward's five products count against two. */
double bench_flops(const bench_shape *shape, flash_attn_pass pass);

/* What a result is judged by: so many rows of it, the first, the last and random ones; relative L2; LSE's, of max(1,
 * |lse|). */
typedef struct bench_bounds {
    int      rows;
    uint64_t seed;
    double   tolerance, lse_tolerance;
} bench_bounds;
#define BENCH_ROWS 6
#define BENCH_LSE_TOLERANCE 5e-6

/* bench_check.c: the worst relative L2 error of some rows of the results against the formula in double. `standard`:
 * judge standard attention's results instead of the library's. *right: within the bounds. */
double bench_error(const bench_arrays *arrays, flash_attn_pass pass, bool standard, const bench_bounds *bounds,
                   bool *right);
double bench_tolerance(flash_attn_dtype dtype, flash_attn_pass pass);

#endif
