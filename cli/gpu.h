/* Memory of an NVIDIA GPU through the driver's library, opened at run time: for `run` and `check` with --device cuda.
 */
#ifndef CLI_GPU_H
#define CLI_GPU_H

#include <stdbool.h>
#include <stddef.h>

typedef struct cli_gpu cli_gpu;

/* The GPU's primary context becomes the calling thread's. Returns CLI_GO_ON or, after a message, CLI_REFUSED. */
int  cli_gpu_open(int index, cli_gpu **gpu);
void cli_gpu_close(cli_gpu *gpu); /* NULL is allowed */

/* Uninitialised memory; NULL after a message. */
void *cli_gpu_allocate(cli_gpu *gpu, size_t bytes);

/* Set all bytes. After a message false. */
bool cli_gpu_fill(cli_gpu *gpu, void *device, unsigned char byte, size_t bytes);

/* Call `run` so often and measure the GPU's time for one call, by events on the default stream. `run` says whether it could
 * be launched. After a message (but for run's own) false. */
bool cli_gpu_time(cli_gpu *gpu, bool (*run)(void *arg), void *arg, int launches, double *milliseconds);

/* As case_memory of tests/case_runner.h wants them; `gpu` is a cli_gpu. */
void *cli_gpu_upload(void *gpu, const void *host, size_t bytes); /* NULL: no memory */
bool  cli_gpu_download(void *gpu, void *host, const void *device, size_t bytes);
void  cli_gpu_release(void *gpu, void *device);

#endif
