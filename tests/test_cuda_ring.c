/*
 * Ring attention on CUDA tensors: ranks are threads, on two devices where there are two, else on one. The transport
 * takes what it moves through host memory and the sockets of examples/ring, so it needs no NCCL; test_cuda_ring_nccl
 * has that.
 */
#include "case_gpu.h"
#include "harness_ring.h"

#include <pthread.h>

#define CAUSAL .mask = FLASH_ATTN_CAUSAL
#define WINDOW(l, r) .mask = FLASH_ATTN_WINDOW, .left = l, .right = r
#define SHAPE(b, sq, sk, hq, hk, d, dv) b, sq, sk, hq, hk, d, dv
#define RING(l, r) .layout = FLASH_ATTN_RING_##l, .ranks = r

static const struct {
    ring_case        shape;
    flash_attn_dtype dtype;
} cases[] = {
    {{SHAPE(1, 96, 96, 2, 2, 64, 64), CAUSAL, RING(ZIGZAG, 2)}, FLASH_ATTN_BF16},
    {{SHAPE(2, 97, 97, 4, 2, 40, 24), CAUSAL, RING(STRIPED, 3)}, FLASH_ATTN_F16},
    {{SHAPE(1, 61, 61, 2, 1, 64, 64), RING(CONTIGUOUS, 2), .softcap = 3.0f, .heads_first = true}, FLASH_ATTN_BF16},
    {{SHAPE(1, 90, 90, 2, 2, 32, 32), WINDOW(20, 0), RING(ZIGZAG, 3), .sinks = true}, FLASH_ATTN_F32},
    {{SHAPE(1, 90, 90, 2, 2, 32, 32), WINDOW(9, 17), RING(STRIPED, 2)}, FLASH_ATTN_BF16},
    {{SHAPE(1, 101, 40, 2, 1, 32, 32), CAUSAL, RING(ZIGZAG, 2), .sinks = true}, FLASH_ATTN_F16},
    {{SHAPE(1, 3, 1, 2, 2, 32, 32), RING(CONTIGUOUS, 4)}, FLASH_ATTN_F32}, /* ranks without rows */
    {{SHAPE(1, 700, 700, 1, 1, 64, 64), CAUSAL, RING(ZIGZAG, 2)},
     FLASH_ATTN_BF16}, /* enough queries for Hopper's own kernels */
    {{SHAPE(1, 600, 600, 2, 1, 128, 128), CAUSAL, RING(STRIPED, 2)}, FLASH_ATTN_BF16},
    {{SHAPE(1, 560, 560, 4, 2, 64, 64), RING(CONTIGUOUS, 2)}, FLASH_ATTN_F16}, /* more tiles than the emulated GPU's blocks */
};
enum { NUM_CASES = sizeof cases / sizeof *cases, NUM_LONG = 3 };

static bool without_long_cases; /* --short: for the emulated GPU, which runs none of Hopper's own kernels */

/* NULL: there is no device */
static const case_memory *memory;
static char               why_not[200];
static int                num_devices;

/* ---- a transport through host memory ---- */

typedef struct staged {
    flash_attn_transport sockets;
    bool                 fails;
} staged;

static int staged_begin(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    staged         *s   = user;
    const case_gpu *gpu = case_gpu_get();
    char           *out = malloc(send_bytes + 1), *in = malloc(recv_bytes + 1);
    int failed = s->fails || !out || !in || !gpu->wait(stream) || (send_bytes && !gpu->to_host(out, send, send_bytes));
    if (!failed)
        failed = s->sockets.begin(s->sockets.user, out, send_bytes, in, recv_bytes, NULL) ||
                 s->sockets.wait(s->sockets.user, NULL);
    if (!failed && recv_bytes)
        failed = !gpu->to_device(recv, in, recv_bytes) || !gpu->wait(NULL);
    free(out);
    free(in);
    return failed;
}

/* Each rank's thread has its device and a stream of its own. */
static bool enter(ring_rank *r)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char                   why[200];
    pthread_mutex_lock(&lock);
    r->memory = case_gpu_memory(r->p.device.index, why, sizeof why);
    pthread_mutex_unlock(&lock);
    r->exec.stream = case_gpu_get()->stream();
    return r->memory && r->exec.stream;
}

/* The default stream has the copies. */
static bool settle(ring_rank *r) { return case_gpu_get()->wait(NULL) && case_gpu_get()->wait(r->exec.stream); }

static ring_world *start_on_gpus(const ring_case *shape, flash_attn_dtype dtype, staged *transports)
{
    ring_world *world = ring_start(*shape, dtype, 11);
    for (int rank = 0; rank < shape->ranks; rank++) {
        ring_rank *r       = ring_world_rank(world, rank);
        transports[rank]   = (staged){.sockets = r->ring.transport};
        r->enter           = enter;
        r->settle          = settle;
        r->give_workspace  = true;
        r->memory          = memory;
        r->p.device        = (flash_attn_device){FLASH_ATTN_CUDA, rank % num_devices};
        r->p.deterministic = true;
        r->ring.transport  = (flash_attn_transport){.begin = staged_begin, .user = &transports[rank]};
    }
    return world;
}

static int exchange_host(void *user, const void *send, void *recv, size_t bytes)
{
    staged *s = user;
    return s->sockets.exchange_host(s->sockets.user, send, recv, bytes);
}

static void use_exchange_host(ring_world *world)
{
    for (int rank = 0; rank < ring_world_ranks(world); rank++)
        ring_world_rank(world, rank)->ring.transport.exchange_host = exchange_host;
}

/* ---- tests ---- */

static void a_ring_gives_what_one_rank_gives(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    for (int n = 0; n < NUM_CASES - without_long_cases * NUM_LONG; n++) {
        staged      transports[RING_MAX_RANKS];
        char        what[100];
        ring_world *world = start_on_gpus(&cases[n].shape, cases[n].dtype, transports);
        if (n % 2)
            use_exchange_host(world);
        snprintf(what, sizeof what, "case %d", n);
        expect_ring_right_twice(world, what);
        ring_world_free(world);
    }
}

static void nonsense_at_one_rank_fails_on_all_if_hosts_can_speak(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    staged      transports[RING_MAX_RANKS];
    ring_world *world = start_on_gpus(&cases[1].shape, cases[1].dtype, transports);
    use_exchange_host(world);
    ring_world_rank(world, 2)->exec.num_threads = -1; /* what its workspace does not depend on */
    ring_world_run(world, true);
    for (int rank = 0; rank < 3; rank++) {
        const ring_rank *r = ring_world_rank(world, rank);
        assert_int_equal(r->status[0], rank == 2 ? FLASH_ATTN_INVALID : FLASH_ATTN_TRANSPORT);
        assert_false(r->touched);
    }
    ring_world_rank(world, 2)->exec.num_threads = 0;
    ring_world_run(world, true);
    expect_ring_right(world, "after the nonsense");
    ring_world_free(world);
}

static void the_workspace_is_the_callers(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    staged      transports[RING_MAX_RANKS];
    ring_world *world = start_on_gpus(&cases[0].shape, cases[0].dtype, transports);
    use_exchange_host(world);
    ring_world_rank(world, 1)->give_workspace = false;
    ring_world_run(world, true);
    assert_int_equal(ring_world_rank(world, 0)->status[0], FLASH_ATTN_TRANSPORT);
    assert_int_equal(ring_world_rank(world, 1)->status[0], FLASH_ATTN_INVALID);
    assert_non_null(strstr(ring_world_rank(world, 1)->error[0], "exec.workspace is NULL"));
    assert_false(ring_world_rank(world, 0)->touched || ring_world_rank(world, 1)->touched);
    ring_world_free(world);
}

static void a_transport_that_fails_is_a_status(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    staged      transports[RING_MAX_RANKS];
    ring_world *world   = start_on_gpus(&cases[0].shape, cases[0].dtype, transports);
    transports[0].fails = transports[1].fails = true;
    ring_world_run(world, true);
    for (int rank = 0; rank < 2; rank++) {
        const ring_rank *r = ring_world_rank(world, rank);
        assert_int_equal(r->status[0], FLASH_ATTN_TRANSPORT);
        assert_non_null(strstr(r->error[0], "ring.transport.begin returned 1"));
        assert_false(r->touched);
    }
    ring_world_free(world);
}

int main(int argc, char **argv)
{
    char why[200];
    without_long_cases              = argc > 1 && strcmp(argv[1], "--short") == 0;
    memory                          = case_gpu_memory(0, why_not, sizeof why_not);
    num_devices                     = memory && case_gpu_memory(1, why, sizeof why) ? 2 : 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ring_gives_what_one_rank_gives),
        cmocka_unit_test(nonsense_at_one_rank_fails_on_all_if_hosts_can_speak),
        cmocka_unit_test(the_workspace_is_the_callers),
        cmocka_unit_test(a_transport_that_fails_is_a_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
