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

/* As case_memory of tests/case_runner.h wants them; `gpu` is a cli_gpu. */
void *cli_gpu_upload(void *gpu, const void *host, size_t bytes); /* NULL: no memory */
bool  cli_gpu_download(void *gpu, void *host, const void *device, size_t bytes);
void  cli_gpu_release(void *gpu, void *device);

#endif
