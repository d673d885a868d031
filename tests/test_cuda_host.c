/*
 * What a call on a GPU costs the host, in microseconds, and a context's first call, in milliseconds; skipped, with the
 * reason, where there is no GPU. The numbers are printed; the test fails where they are many times what they should be.
 */
#include "case_gpu.h"
#include "harness.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { SHORT = 64, LONG = 512, HEADS = 2, HEAD_DIM = 64 }; /* short: a backward takes one launch */
enum { CALLS = 100, ROUNDS = 21 }; /* fewer calls at once than the driver queues */

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];

typedef struct tiny {
    flash_attn_problem problem;
    flash_attn_grads   grads;
    flash_attn_exec    exec[2]; /* forward, backward: workspaces of their own */
    void              *memory;
} tiny;

static tiny make_tiny(flash_attn_context *context, int length)
{
    size_t count = (size_t)length * HEADS * HEAD_DIM;
    tiny  t  = {.problem = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL}};
    char *at = gpu->alloc(8 * count * 2 + (size_t)length * HEADS * 4);
    t.memory = at;
    assert_non_null(at);
    assert_true(gpu->fill(at, 0, 8 * count * 2));
    flash_attn_tensor  x          = {.dtype = FLASH_ATTN_BF16, .shape = {1, length, HEADS, HEAD_DIM}};
    flash_attn_tensor *tensors[8] = {&t.problem.q,  &t.problem.k, &t.problem.v, &t.problem.o,
                                     &t.grads.dout, &t.grads.dq,  &t.grads.dk,  &t.grads.dv};
    for (size_t n = 0; n < 8; n++) {
        x.data      = at + n * count * 2;
        *tensors[n] = x;
    }
    t.problem.lse.data = at + 8 * count * 2;
    for (int pass = 0; pass < 2; pass++) {
        flash_attn_pass which = pass ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD;
        expect_ok(flash_attn_workspace_size(context, &t.problem, which, &t.exec[pass].workspace_bytes));
        if (t.exec[pass].workspace_bytes)
            assert_non_null(t.exec[pass].workspace = gpu->alloc(t.exec[pass].workspace_bytes));
    }
    return t;
}

static void free_tiny(tiny *t)
{
    gpu->free(t->memory);
    for (int pass = 0; pass < 2; pass++)
        if (t->exec[pass].workspace)
            gpu->free(t->exec[pass].workspace);
}

static void call(flash_attn_context *context, tiny *t, int pass)
{
    expect_ok(pass ? flash_attn_backward(context, &t->problem, &t->grads, &t->exec[1])
                   : flash_attn_forward(context, &t->problem, &t->exec[0]));
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void need_gpu(void) { skip_unless(memory != NULL, no_gpu); }

static void measure(int pass, int length)
{
    double seconds[ROUNDS];
    tiny   t = make_tiny(NULL, length);
    for (int round = 0; round < ROUNDS; round++) {
        call(NULL, &t, pass);
        assert_true(gpu->wait(NULL));
        double begin = now();
        for (int n = 0; n < CALLS; n++)
            call(NULL, &t, pass);
        seconds[round] = (now() - begin) / CALLS;
    }
    assert_true(gpu->wait(NULL));
    qsort(seconds, ROUNDS, sizeof *seconds, ascending);
    print_message("a warm %s of %d queries takes the host %.2f microseconds (median; least %.2f)\n",
                  pass ? "backward" : "forward", length, seconds[ROUNDS / 2] * 1e6, seconds[0] * 1e6);
    assert_true(seconds[ROUNDS / 2] < 100e-6);
    free_tiny(&t);
}

static void a_warm_call_takes_microseconds_of_the_host(void **state)
{
    (void)state;
    need_gpu();
    measure(0, SHORT);
    measure(1, SHORT);
    measure(1, LONG);
}

/* Seconds until a new context has done its first call. */
static double first_call(int pass)
{
    flash_attn_context *context;
    expect_ok(flash_attn_create(&context, NULL));
    tiny   t     = make_tiny(context, SHORT);
    double begin = now();
    call(context, &t, pass);
    assert_true(gpu->wait(NULL));
    double seconds = now() - begin;
    free_tiny(&t);
    flash_attn_destroy(context);
    return seconds;
}

static void a_first_call_takes_seconds_once_and_then_milliseconds(void **state)
{
    (void)state;
    need_gpu();
    char cache[] = "test_cuda_host.XXXXXX", absolute[4200], here[4000], command[4300];
    assert_non_null(mkdtemp(cache));
    assert_non_null(getcwd(here, sizeof here));
    snprintf(absolute, sizeof absolute, "%s/%s", here, cache);
    setenv("XDG_CACHE_HOME", absolute, 1);
    for (int pass = 0; pass < 2; pass++) {
        double cold = first_call(pass), cached = first_call(pass);
        print_message("a first %s takes %.0f ms with nothing in the cache folder, %.1f ms with its kernels there\n",
                      pass ? "backward" : "forward", cold * 1e3, cached * 1e3);
        assert_true(cached < cold / 3);
    }
    snprintf(command, sizeof command, "rm -r '%s'", absolute);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    memory                          = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu                             = case_gpu_get();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_warm_call_takes_microseconds_of_the_host),
        cmocka_unit_test(a_first_call_takes_seconds_once_and_then_milliseconds),
    };
    return cmocka_run_group_tests_name("cuda_host", tests, NULL, NULL);
}
