/* A block of threads on one thread of the host. */
#ifndef EMULATOR_FIBERS_H
#define EMULATOR_FIBERS_H

#include "emulator.h"

#include <stddef.h>

enum { EMULATOR_MAX_THREADS = 1024, EMULATOR_MAX_SHARED = 227 << 10 };

/* Runs `kernel` once for every thread of block `block` of `grid`. Blocks must be run in order. */
void emulator_run_block(emulator_state *state, void (*kernel)(const void *parameter), const void *parameter,
                        unsigned block, unsigned grid, int threads, int shared_bytes);

#endif
