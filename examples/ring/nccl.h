/* A transport for flash_attn_ring over NCCL: copy it, or take it as a model. Needs nccl.h and the CUDA runtime. */
#ifndef RING_NCCL_H
#define RING_NCCL_H

#include "flashattn.h"

#include <nccl.h>

typedef struct ring_nccl {
    ncclComm_t   comm;
    int          next, previous;
    cudaStream_t stream; /* transfers run here, beside the compute */
    cudaEvent_t  event;
} ring_nccl;

/* On the communicator's device, which must be the current one, now and in each call of flash_attn_ring_*. The
 * communicator stays the caller's; a transfer that fails aborts it (ncclCommAbort), so that nothing touches memory any
 * more. */
ncclResult_t ring_nccl_open(ring_nccl *ring, ncclComm_t comm);
void         ring_nccl_close(ring_nccl *ring);

/* For flash_attn_ring.transport. exchange_host is left NULL: a program that has MPI or sockets may set it. */
flash_attn_transport ring_nccl_transport(ring_nccl *ring);

#endif
