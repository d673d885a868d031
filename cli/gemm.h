/* C = alpha op(A) op(B) + beta C in float32, row-major, one thread: OpenBLAS if the build found it, otherwise our own
 * blocked loops. For standard attention, so that the bench's peer is not a straw man. */
#ifndef CLI_GEMM_H
#define CLI_GEMM_H

#include <stdbool.h>
#include <stdint.h>

const char *cli_gemm_name(void); /* "OpenBLAS 0.3.21" or "own blocked loops" */

/* op(A) is [m, k], op(B) is [k, n]; a transpose flag means that the memory holds the transpose. beta is 0 or 1. */
void cli_gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
              int64_t stride_a, const float *b, int64_t stride_b, float beta, float *c, int64_t stride_c);

#endif
