/*
 * Ring attention as tests run it: a problem over a whole sequence, dealt to ranks that are threads of this process,
 * each with its own transport and, on a GPU, its own device; the results put together again and compared with the
 * REFERENCE device's over the whole. Uses the public header alone.
 */
#ifndef RING_WORLD_H
#define RING_WORLD_H

#include "case_runner.h"
#include "../examples/ring/sockets.h"

enum { RING_MAX_RANKS = 8 };

typedef struct ring_case {
    int                    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;
    flash_attn_mask        mask;
    int                    left, right;
    float                  scale, softcap;
    bool                   sinks, heads_first; /* heads_first: q, k, v, dout and the outputs lie as [b, h, s, d] */
    flash_attn_ring_layout layout;
    int                    ranks;
} ring_case;

/* A rank: its own rows, copied from the whole. Tests may change it before it runs. */
typedef struct ring_rank {
    flash_attn_context *context;
    const case_memory  *memory;             /* NULL: host */
    bool (*enter)(struct ring_rank *rank);  /* in the rank's own thread, before anything else; NULL: nothing to do */
    bool (*settle)(struct ring_rank *rank); /* wait for the device, after copies and calls; NULL: nothing to do */
    flash_attn_ring    ring;
    flash_attn_problem p;
    flash_attn_grads   g;
    flash_attn_exec    exec;
    bool               give_workspace; /* of the size that the library says, less workspace_short bytes */
    size_t             workspace_short;
    bool               by_allocator; /* it comes from exec.allocate */
    flash_attn_status  status[2]; /* of the passes; the second is not run after a failure of the first */
    char               error[2][512];
    bool               touched; /* some byte of an output is not what it was before */
} ring_rank;

typedef struct ring_world ring_world;

/* The same seed makes the same numbers. Ranks are connected by the sockets of examples/ring. NULL: the reference
 * failed, see flash_attn_last_error. */
ring_world   *ring_world_make(const ring_case *shape, flash_attn_dtype dtype, uint64_t seed);
void          ring_world_free(ring_world *world);
ring_rank    *ring_world_rank(ring_world *world, int rank);
ring_sockets *ring_world_sockets(ring_world *world, int rank);
int           ring_world_ranks(const ring_world *world);

/* The whole tensors, contiguous and in host memory, for a test that wants to change an element before it runs. */
flash_attn_problem *ring_world_whole(ring_world *world);

/* Poison the outputs, run both passes on all ranks (backward: the second), wait for all. */
void ring_world_run(ring_world *world, bool backward);

/* After a run that all ranks say was OK: NULL, or what differs from the reference by more than is allowed. `worst`: the
 * largest error as a part of that. */
const char *ring_world_compare(ring_world *world, bool backward, double *worst);

/* A sum over all bits of all results. */
uint64_t ring_world_digest(const ring_world *world);

/* Of all ranks, results as they are put together: o, lse, dq, dk, dv, dsinks (summed). float32. */
const flash_attn_tensor *ring_world_result(const ring_world *world, int which);
enum { RING_O, RING_LSE, RING_DQ, RING_DK, RING_DV, RING_DSINKS, RING_RESULTS };

#endif
