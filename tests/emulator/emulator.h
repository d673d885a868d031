/* Between the emulated driver (cuda.c) and a kernel (kernel.h). C and C++. */
#ifndef EMULATOR_H
#define EMULATOR_H

enum { EMULATOR_MAX_FIBERS = 2048 }; /* threads of a cluster */

typedef struct emulator_place {
    unsigned x, y, z;
} emulator_place;

/* Exported by a kernel as `emulator`. */
typedef struct emulator_state {
    emulator_place thread, block, grid; /* of the fiber that runs */
    unsigned       fiber;               /* its number in the cluster */
    unsigned       run;                 /* number of the cluster among all that ever ran */
    int            threads;             /* of a block */
    char          *shared;              /* of the block: shared_bytes, NaN at its start */
    int            shared_bytes;

    /* The warp's lanes meet here; the last to come does `work` on all of their records. Each must bring the same. */
    void (*meet)(void (*work)(void **), void *record);
    void (*barrier)(int id, int threads);
    int (*barrier_or)(int value); /* of the whole block: 1 if any thread's value is not 0 */
    void (*cluster_barrier)(void);
    void (*fail)(const char *what); /* says where and ends the process */
} emulator_state;

#endif
