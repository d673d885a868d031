/* Ring attention over NCCL, two ranks on two GPUs, by the transport of examples/ring. */
#include "case_gpu.h"
#include "harness_ring.h"

#ifdef HAVE_NCCL

#include "../examples/ring/nccl.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

enum { RANKS = 2 };

static const struct {
    ring_case        shape;
    flash_attn_dtype dtype;
} cases[] = {
    {{1, 128, 128, 2, 2, 64, 64, .mask = FLASH_ATTN_CAUSAL, .layout = FLASH_ATTN_RING_ZIGZAG, .ranks = RANKS},
     FLASH_ATTN_BF16},
    {{2, 1037, 1037, 4, 2, 128, 128, .mask = FLASH_ATTN_CAUSAL, .layout = FLASH_ATTN_RING_ZIGZAG, .ranks = RANKS},
     FLASH_ATTN_BF16},
    {{1, 1200, 1200, 4, 1, 64, 64, .mask = FLASH_ATTN_CAUSAL, .layout = FLASH_ATTN_RING_STRIPED, .ranks = RANKS},
     FLASH_ATTN_F16},
    {{1, 900, 900, 2, 2, 128, 128, .layout = FLASH_ATTN_RING_CONTIGUOUS, .ranks = RANKS}, FLASH_ATTN_BF16},
    {{1, 700, 700, 2, 2, 64, 64, .mask = FLASH_ATTN_WINDOW, .left = 200, .layout = FLASH_ATTN_RING_ZIGZAG,
      .ranks = RANKS, .sinks = true},
     FLASH_ATTN_BF16},
    {{1, 300, 300, 2, 2, 64, 64, .mask = FLASH_ATTN_CAUSAL, .layout = FLASH_ATTN_RING_ZIGZAG, .ranks = RANKS},
     FLASH_ATTN_F32},
};
enum { NUM_CASES = sizeof cases / sizeof *cases };

static ncclComm_t   comms[RANKS];
static ring_nccl    transports[RANKS];
static cudaStream_t streams[RANKS];
static bool         there;

/* In the rank's thread. What belongs to the device is made once. */
static bool enter(ring_rank *r)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char                   why[200];
    int                    rank = r->ring.rank;
    pthread_mutex_lock(&lock);
    r->memory = case_gpu_memory(rank, why, sizeof why);
    bool made = r->memory && cudaSetDevice(rank) == cudaSuccess;
    if (made && !streams[rank])
        made = cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking) == cudaSuccess &&
               ring_nccl_open(&transports[rank], comms[rank]) == ncclSuccess;
    pthread_mutex_unlock(&lock);
    r->exec.stream    = streams[rank];
    r->ring.transport = ring_nccl_transport(&transports[rank]);
    return made;
}

static bool settle(ring_rank *r)
{
    return cudaStreamSynchronize(NULL) == cudaSuccess && cudaStreamSynchronize(streams[r->ring.rank]) == cudaSuccess;
}

static void two_gpus_give_what_one_rank_gives(void **state)
{
    (void)state;
    skip_unless(there, "it takes two GPUs");
    for (int n = 0; n < NUM_CASES; n++) {
        char        what[40];
        ring_world *world = ring_start(cases[n].shape, cases[n].dtype, 11);
        for (int rank = 0; rank < RANKS; rank++) {
            ring_rank *r       = ring_world_rank(world, rank);
            r->enter           = enter;
            r->settle          = settle;
            r->p.device        = (flash_attn_device){FLASH_ATTN_CUDA, rank};
            r->p.deterministic = true;
            r->give_workspace  = true;
        }
        snprintf(what, sizeof what, "case %d", n);
        expect_ring_right_twice(world, what);
        ring_world_free(world);
    }
}

int main(void)
{
    int count = 0;
    there     = cudaGetDeviceCount(&count) == cudaSuccess && count >= RANKS &&
            ncclCommInitAll(comms, RANKS, NULL) == ncclSuccess;
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_gpus_give_what_one_rank_gives)};
    int                     failed  = cmocka_run_group_tests(tests, NULL, NULL);
    for (int rank = 0; rank < RANKS && there; rank++) {
        cudaSetDevice(rank);
        ring_nccl_close(&transports[rank]);
        cudaStreamDestroy(streams[rank]);
        ncclCommDestroy(comms[rank]);
    }
    return failed;
}

#else

static void two_gpus_give_what_one_rank_gives(void **state)
{
    (void)state;
    skip_unless(false, "this build found no NCCL (-DNCCL_ROOT=...)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_gpus_give_what_one_rank_gives)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
