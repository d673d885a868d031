/* What the machine can do at most, measured: the yardstick of the bench. */
#ifndef CLI_PEAK_H
#define CLI_PEAK_H

#include "pool.h"

#include <stdbool.h>

/* The best seen so far, all threads together, a multiply-add counting two. Start with zeros. */
typedef struct cli_peaks {
    double      fma_gflops;              /* float32 fused multiply-adds from registers */
    const char *fma_name;                /* "AVX-512 FMA" */
    double      amx_gflops;              /* bfloat16 tile products from registers; 0: the tier has no AMX */
    double      bf16_gflops;             /* bfloat16 pairs by VDPBF16PS likewise; 0: the tier is not avx512-bf16 */
    int64_t     fma_rounds, bf16_rounds; /* of a burst that takes a few milliseconds; bf16: of whichever is there */
    double      read_gbps;               /* 1e9 bytes a second, read from memory and used for nothing; 0: not measured */
} cli_peaks;

/* Some bursts more; each takes about 3 ms. Neighbours on the same chip slow a burst down by half and more, so a run
 * that takes minutes measures now and then and keeps the best. tier: the library's name of it. */
void cli_measure_peaks(cli_peaks *peaks, cli_pool *pool, int bursts, const char *tier);

/* What multiplies bfloat16 faster than FMA does, and its peak. */
typedef struct cli_bf16_peak {
    const char *name; /* "AMX", "AVX512_BF16"; NULL: nothing */
    double      gflops;
} cli_bf16_peak;

cli_bf16_peak cli_bf16_peak_of(const cli_peaks *peaks);

/* The best of `passes` reads of `bytes` of memory, each thread its own part: what a decoding step that reads so much can
 * reach. Returns false without memory. */
bool cli_measure_read(cli_peaks *peaks, cli_pool *pool, int64_t bytes, int passes);

/* Seconds of a clock that only rises. */
double cli_seconds(void);

#endif
