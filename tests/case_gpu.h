/*
 * A CUDA device as tests, benches and `flashattn check` use it: memory for cases, streams, graphs. Loads the driver's
 * library itself and uses the public header alone.
 */
#ifndef CASE_GPU_H
#define CASE_GPU_H

#include "case_runner.h"

/* Memory of CUDA device `index`, whose primary context becomes the thread's current one. NULL, and why, without one. */
const case_memory *case_gpu_memory(int index, char *why, size_t why_bytes);

/* After case_gpu_memory: a context that has no other kernel than this one of compute capability 9.0, by its name. NULL, and why, if device 0 is another. */
flash_attn_context *case_gpu_hopper(const char *kernel, char *why, size_t why_bytes);

/* After case_gpu_memory. All but copies are asynchronous on their stream (NULL: the default one); false: it failed. */
typedef struct case_gpu {
    void *(*alloc)(size_t bytes); /* NULL: no memory */
    void (*free)(void *memory);
    bool (*to_device)(void *to, const void *from, size_t bytes);
    bool (*to_host)(void *to, const void *from, size_t bytes);
    bool (*fill)(void *to, unsigned char byte, size_t bytes);
    void *(*stream)(void); /* a new one that does not wait for the default one */
    void (*stream_free)(void *stream);
    bool (*wait)(void *stream);
    bool (*capture_begin)(void *stream);
    void *(*capture_end)(void *stream); /* a graph ready to launch */
    bool (*graph_launch)(void *graph, void *stream);
    void (*graph_free)(void *graph);
    bool (*adopt)(void);   /* make the device's context the calling thread's current one */
    bool (*abandon)(void); /* no current context */
    /* Call `run` so often and measure the GPU's time for one call, by events on the default stream. False also if `run`
     * says that it could not be launched. */
    bool (*time)(bool (*run)(void *arg), void *arg, int launches, double *milliseconds);
    const char *(*error)(void); /* the driver's name for what failed last in this thread */
    void (*close)(void);        /* give the device back; case_gpu_memory opens it again */
} case_gpu;

const case_gpu *case_gpu_get(void);

#endif
