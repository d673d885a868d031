/* The options of a problem in a bench: what every row has besides its shape. Values are made up where an option of
 * `flashattn run` reads a file. */
#ifndef CLI_BENCH_OPTIONS_H
#define CLI_BENCH_OPTIONS_H

#include "options.h"

/* All zero: none. */
typedef struct bench_options {
    cli_window         window;
    cli_number         scale, softcap;
    bool               bias;  /* float32 [1, 1, seqlen_q, seqlen_k], normal numbers */
    bool               alibi; /* slopes of the ALiBi paper: 2^(-8 (h + 1) / heads) */
    bool               sinks; /* normal numbers */
    flash_attn_dropout dropout;
    int64_t            blocks;     /* of equal length that do not see each other; 0: no block mask */
    int64_t            num_splits; /* 0: by shape */
} bench_options;

extern const cli_option bench_option_table[]; /* a table for bench_options */

bool bench_has_options(const bench_options *options);

enum { BENCH_OPTIONS_TEXT = 256 };
/* "softcap 30; dropout 0.1 seed 0 offset 0"; "" if none. Returns text. */
const char *bench_options_text(const bench_options *options, char text[BENCH_OPTIONS_TEXT]);

struct bench_shape;
struct bench_arrays;

/* Put into a problem what needs no memory: mask, scale, softcap, dropout, splits. */
void bench_apply_numbers(const struct bench_shape *shape, flash_attn_problem *problem);

/* Put all options into the problem, whose q, k and v are set. false: no memory. */
bool bench_apply_options(struct bench_arrays *arrays, uint64_t *random);

/* ---- what they mean, written apart from the library: for the check ---- */

typedef struct bench_keys {
    int64_t begin, end; /* end <= begin: none */
} bench_keys;

/* The keys that a query sees. */
bench_keys bench_keys_of(const struct bench_shape *shape, int64_t query);

typedef struct bench_score {
    double value;
    double slope; /* d value / d (scale * q.k) */
} bench_score;

/* The score of a pair, of its scale * q.k. */
bench_score bench_score_of(const struct bench_arrays *arrays, double product, int64_t h, int64_t query, int64_t key);

/* -inf without sinks. */
double bench_sink_of(const struct bench_arrays *arrays, int64_t h);

/* What dropout multiplies a pair's probability by. */
double bench_kept(const struct bench_shape *shape, int64_t b, int64_t h, int64_t query, int64_t key);

#endif
