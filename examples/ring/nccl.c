#include "nccl.h"

#include <cuda_runtime_api.h>

ncclResult_t ring_nccl_open(ring_nccl *ring, ncclComm_t comm)
{
    int          rank, ranks;
    ncclResult_t result = ncclCommUserRank(comm, &rank);
    if (result == ncclSuccess)
        result = ncclCommCount(comm, &ranks);
    if (result != ncclSuccess)
        return result;
    *ring = (ring_nccl){.comm = comm, .next = (rank + 1) % ranks, .previous = (rank + ranks - 1) % ranks};
    int least, greatest; /* a transfer's few blocks go first, or attention, which fills the GPU, would hold them back */
    if (cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess ||
        cudaStreamCreateWithPriority(&ring->stream, cudaStreamNonBlocking, greatest) != cudaSuccess)
        return ncclUnhandledCudaError;
    if (cudaEventCreateWithFlags(&ring->event, cudaEventDisableTiming) == cudaSuccess)
        return ncclSuccess;
    cudaStreamDestroy(ring->stream);
    return ncclUnhandledCudaError;
}

void ring_nccl_close(ring_nccl *ring)
{
    cudaStreamSynchronize(ring->stream);
    cudaEventDestroy(ring->event);
    cudaStreamDestroy(ring->stream);
}

/* What is on `first` by now comes before what will be on `second`. */
static bool order(ring_nccl *ring, cudaStream_t first, cudaStream_t second)
{
    return cudaEventRecord(ring->event, first) == cudaSuccess &&
           cudaStreamWaitEvent(second, ring->event, 0) == cudaSuccess;
}

static int done(ring_nccl *ring, bool ok, ncclResult_t result)
{
    if (ok && result == ncclSuccess)
        return 0;
    ncclCommAbort(ring->comm);
    ring->comm = NULL;
    return result == ncclSuccess ? ncclUnhandledCudaError : result;
}

/* In a group, so that no rank waits in its send for another's receive. What comes next on `stream` waits for the other
 * stream to have come here: launched behind the same kernel, attention would be there a moment before the transfer, and
 * its blocks, which stay to the end, would leave no multiprocessor to it. Nothing else is under way by then. */
static int begin(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    ring_nccl *ring = user;
    if (!order(ring, stream, ring->stream) || !order(ring, ring->stream, stream))
        return done(ring, false, ncclSuccess);
    ncclResult_t result = ncclGroupStart(), sent = ncclSuccess, received = ncclSuccess;
    if (result == ncclSuccess && send_bytes > 0)
        sent = ncclSend(send, send_bytes, ncclUint8, ring->next, ring->comm, ring->stream);
    if (result == ncclSuccess && recv_bytes > 0)
        received = ncclRecv(recv, recv_bytes, ncclUint8, ring->previous, ring->comm, ring->stream);
    if (result == ncclSuccess)
        result = ncclGroupEnd();
    return done(ring, sent == ncclSuccess && received == ncclSuccess, result);
}

static int wait_for_all(void *user, void *stream)
{
    ring_nccl *ring = user;
    return done(ring, order(ring, ring->stream, stream), ncclSuccess);
}

flash_attn_transport ring_nccl_transport(ring_nccl *ring)
{
    return (flash_attn_transport){.begin = begin, .wait = wait_for_all, .user = ring};
}
