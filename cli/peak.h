/* What the machine can do at most, measured: the yardstick of the bench. */
#ifndef CLI_PEAK_H
#define CLI_PEAK_H

#include "pool.h"

typedef struct cli_peaks {
    double      fma_gflops; /* float32 fused multiply-adds from registers, a multiply-add counting two, all threads */
    const char *fma_name;   /* "AVX-512 FMA" */
    double      amx_gflops; /* bfloat16 tile products from registers; 0: no AMX */
} cli_peaks;

/* Takes about 0.2 s. with_amx: the library says that the tier is amx. */
cli_peaks cli_measure_peaks(cli_pool *pool, int with_amx);

/* Seconds of a clock that only rises. */
double cli_seconds(void);

#endif
