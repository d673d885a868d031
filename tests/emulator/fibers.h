/* Blocks of threads on one thread of the host. */
#ifndef EMULATOR_FIBERS_H
#define EMULATOR_FIBERS_H

#include "emulator.h"

#include <stdbool.h>
#include <stddef.h>

enum { EMULATOR_MAX_THREADS = 1024, EMULATOR_MAX_SHARED = 227 << 10, EMULATOR_MAX_BLOCKS = 8 };

/* What is launched. statics: where the kernel's __shared__ variables lie. */
typedef struct emulator_kernel {
    emulator_state *state;
    void (*run)(const void *const *parameter);
    const void *const *parameter;
    char              *statics;
    size_t             statics_bytes;
    unsigned           grid, cluster;
    int                threads, shared_bytes;
    bool               has_async; /* TMA and WGMMA */
} emulator_kernel;

/* Runs a kernel once for every thread of blocks first_block ... first_block + blocks - 1, whole clusters, at once. */
void emulator_run_blocks(const emulator_kernel *kernel, unsigned first_block, unsigned blocks);

#endif
