/* Between the emulated driver (cuda.c) and a kernel (kernel.h). C and C++. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>

enum { EMULATOR_MAX_FIBERS = 4096 }; /* threads of the blocks that run at once */

typedef struct emulator_place {
    unsigned x, y, z;
} emulator_place;

/* A thread's part of one WGMMA: c (64 x 2 count of the warpgroup) = or += a b. */
enum { EMULATOR_BF16, EMULATOR_F16, EMULATOR_E4M3 };
typedef struct emulator_product {
    float             *c;
    int                count, type, add;
    const unsigned    *a;                  /* four registers, or NULL: in shared memory */
    unsigned long long a_matrix, b_matrix; /* the instruction's descriptors */
    int                a_down, b_down;     /* the inner dimension runs down the rows of memory, not along them */
} emulator_product;

/* What Hopper has besides (hopper.c, wgmma.c). Addresses of shared memory are the block's; a map is the driver's 128
 * bytes. */
typedef struct emulator_hopper {
    void (*barrier_init)(unsigned barrier, unsigned arrivals);
    void (*barrier_arrive)(unsigned barrier, unsigned expected_bytes);
    void (*barrier_arrive_at)(unsigned barrier, unsigned rank); /* of another block of the cluster */
    void (*barrier_wait)(unsigned barrier, unsigned parity);
    bool (*barrier_passed)(unsigned barrier, unsigned parity);
    void (*load_box)(unsigned to, const void *map, unsigned barrier, const int *at);
    void (*load_box_for)(unsigned rank, unsigned to, const void *map, unsigned barrier, const int *at);
    void (*bulk_load)(unsigned to, const void *from, unsigned bytes, unsigned barrier);
    void (*store_box)(const void *map, unsigned from,
                      const int *at); /* this and bulk_add commit a group of their own */
    void (*bulk_add)(float *to, unsigned from, unsigned bytes, bool stores);
    void (*bulk_wait)(int pending, bool only_read);
    void (*release)(void); /* other blocks see what this thread has waited for */
    void (*wgmma)(const emulator_product *product);
    void (*wgmma_commit)(void);
    void (*wgmma_wait)(int pending);
    void (*fence_async)(void);
    void (*registers)(int count, int launched); /* a thread's from now on, and what each is launched with */
} emulator_hopper;

/* Exported by a kernel as `emulator`. */
typedef struct emulator_state {
    emulator_place thread, block, grid; /* of the fiber that runs */
    unsigned       fiber;               /* its number among those that run at once */
    unsigned       run;                 /* number of the cluster among all that ever ran */
    int            threads;             /* of a block */
    char          *shared;              /* of the block: shared_bytes, NaN at its start */
    int            shared_bytes;

    /* The warp's lanes meet here; the last to come does `work` on all of their records. Each must bring the same. */
    void (*meet)(void (*work)(void **), void *record);
    void (*barrier)(int id, int threads);
    void (*barrier_arrive)(int id, int threads); /* counted, without waiting */
    int (*barrier_or)(int value);                /* of the whole block: 1 if any thread's value is not 0 */
    void (*cluster_barrier)(void);
    void (*poll)(const void *address); /* looks there, perhaps again, for what another block is to write */
    void (*fail)(const char *what);    /* says where and ends the process */
    void (*wrote)(unsigned address, unsigned bytes); /* to shared memory; NULL where TMA and WGMMA do not read it */
    const emulator_hopper *hopper;
} emulator_state;

#endif
