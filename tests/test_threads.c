/* Promises about threads and processes: many callers at once, fork, small stacks, a caller's own pool, last_error. */
#include "harness.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static const test_case shape = {
    .batch = 2, .heads_q = 4, .heads_k = 2, .seqlen_q = 90, .seqlen_k = 100, .mask = FLASH_ATTN_CAUSAL, .sinks = true};

typedef struct caller {
    flash_attn_context *context;
    fixture             f;
    int                 runs;
    flash_attn_status   status;
    bool                errors_mixed_up;
} caller;

/* Good calls and, between them, a bad one whose sentence must be this thread's own. No cmocka here: it is not for
 * threads. */
static void *call_often(void *argument)
{
    caller *c = argument;
    for (int n = 0; n < c->runs && c->status == FLASH_ATTN_OK; n++) {
        flash_attn_exec exec = {.num_threads = 1 + n % 4};
        c->status            = flash_attn_forward(c->context, &c->f.p, &exec);
        if (c->status == FLASH_ATTN_OK)
            c->status = flash_attn_backward(c->context, &c->f.p, &c->f.g, &exec);
        flash_attn_problem bad = c->f.p;
        bad.softcap            = -(float)c->runs;
        char expected[32];
        snprintf(expected, sizeof expected, "%d", -c->runs);
        if (flash_attn_forward(c->context, &bad, NULL) != FLASH_ATTN_INVALID ||
            !strstr(flash_attn_last_error(), expected))
            c->errors_mixed_up = true;
    }
    return NULL;
}

/* num_callers threads with stacks of stack_bytes (0: the default), on one context or one each. */
static void expect_callers_agree(int num_callers, size_t stack_bytes, flash_attn_context *const *contexts,
                                 int num_contexts)
{
    caller         callers[16] = {{0}};
    pthread_t      threads[16];
    pthread_attr_t attributes;
    fixture        expected = fixture_make(&shape, FLASH_ATTN_F32, 41);
    tier           t        = {.context = contexts[0]};
    fixture_run(&expected, &t, 1);
    pthread_attr_init(&attributes);
    if (stack_bytes)
        assert_int_equal(pthread_attr_setstacksize(&attributes, stack_bytes), 0);
    for (int n = 0; n < num_callers; n++) {
        callers[n] = (caller){
            .context = contexts[n % num_contexts], .f = fixture_make(&shape, FLASH_ATTN_F32, 41), .runs = 10 + n};
        assert_int_equal(pthread_create(&threads[n], &attributes, call_often, &callers[n]), 0);
    }
    for (int n = 0; n < num_callers; n++) {
        pthread_join(threads[n], NULL);
        expect_status(callers[n].status, FLASH_ATTN_OK, "a caller");
        assert_false(callers[n].errors_mixed_up);
        expect_same_bits(&expected.p.o, &callers[n].f.p.o, "o");
        expect_same_bits(&expected.g.dk, &callers[n].f.g.dk, "dk");
        fixture_free(&callers[n].f);
    }
    pthread_attr_destroy(&attributes);
    fixture_free(&expected);
}

static flash_attn_context *context_with(int threads)
{
    flash_attn_context *context;
    flash_attn_options  options = {.num_threads = threads};
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    return context;
}

static void many_threads_may_share_a_context(void **state)
{
    (void)state;
    flash_attn_context *context = context_with(4);
    expect_callers_agree(8, 0, &context, 1);
    flash_attn_destroy(context);
}

static void many_threads_may_use_contexts_of_their_own(void **state)
{
    (void)state;
    flash_attn_context *contexts[4];
    for (int n = 0; n < 4; n++)
        contexts[n] = context_with(1 + n);
    expect_callers_agree(8, 0, contexts, 4);
    for (int n = 0; n < 4; n++)
        flash_attn_destroy(contexts[n]);
}

static void many_threads_may_use_the_shared_default_context(void **state)
{
    (void)state;
    flash_attn_context *none = NULL;
    expect_callers_agree(8, 0, &none, 1);
}

static void a_stack_of_64_kib_is_enough_for_a_caller(void **state)
{
    (void)state;
    for (int n = 0; n < num_tiers(); n++)
        expect_callers_agree(2, 64 * 1024, &tier_at(n)->context, 1);
}

/* The child uses the parent's context, whose threads fork did not copy. */
static void a_forked_child_works(void **state)
{
    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip(); /* ThreadSanitizer forbids threads in a child of a process with threads */
#endif
    flash_attn_context *contexts[2] = {context_with(4), NULL};
    fixture             f           = fixture_make(&shape, FLASH_ATTN_F32, 42);
    for (int n = 0; n < 2; n++) {
        tier t = {.context = contexts[n]};
        fixture_run(&f, &t, 4);
        flash_attn_tensor o = copy_of(&f.p.o), dk = copy_of(&f.g.dk);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            flash_attn_exec exec = {.num_threads = 4};
            bool            ok   = flash_attn_forward(contexts[n], &f.p, &exec) == FLASH_ATTN_OK &&
                      flash_attn_backward(contexts[n], &f.p, &f.g, &exec) == FLASH_ATTN_OK;
            ok = ok && memcmp(f.p.o.data, o.data, (size_t)count_of(&o) * sizeof(float)) == 0;
            ok = ok && memcmp(f.g.dk.data, dk.data, (size_t)count_of(&dk) * sizeof(float)) == 0;
            _exit(ok ? 0 : 1);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        fixture_run(&f, &t, 4); /* and the parent goes on */
        expect_same_bits(&o, &f.p.o, "o");
        free(o.data);
        free(dk.data);
    }
    fixture_free(&f);
    flash_attn_destroy(contexts[0]);
}

/* ---- a caller's own pool ---- */

typedef struct own_pool {
    int64_t calls, tasks, most;
} own_pool;

static void backwards_for(void *pool, int64_t count, flash_attn_task task, void *arg)
{
    own_pool *own = pool;
    own->calls++;
    own->tasks += count;
    own->most = count > own->most ? count : own->most;
    for (int64_t n = count - 1; n >= 0; n--)
        task(arg, n);
}

static void a_callers_own_parallel_for_gives_the_same_bits(void **state)
{
    (void)state;
    own_pool            own     = {0};
    flash_attn_options  options = {.num_threads = 3, .parallel_for = backwards_for, .pool = &own};
    flash_attn_context *context, *usual = context_with(3);
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    tier    mine = {.context = context}, theirs = {.context = usual};
    fixture f = fixture_make(&shape, FLASH_ATTN_F32, 43), g = fixture_make(&shape, FLASH_ATTN_F32, 43);
    fixture_run(&f, &mine, 3);
    fixture_run(&g, &theirs, 3);
    expect_same_bits(&f.p.o, &g.p.o, "o");
    expect_same_bits(&f.g.dq, &g.g.dq, "dq");
    expect_same_bits(&f.g.dk, &g.g.dk, "dk");
    assert_true(own.most <= 3);
    flash_attn_destroy(context);
    flash_attn_destroy(usual);
    fixture_free(&f);
    fixture_free(&g);
}

/* The backward of 16-bit types cuts long keys into more tiles where a context has several threads. */
static void a_context_of_many_threads_gives_the_bits_of_one(void **state)
{
    (void)state;
    const test_case     shapes[] = {{.seqlen_q = 300, .seqlen_k = 1100, .head_dim = 40, .mask = FLASH_ATTN_CAUSAL},
                                    {.seqlen_q = 530, .seqlen_k = 700, .head_dim = 64, .dropout = 0.2f}};
    flash_attn_dtype    dtypes[] = {FLASH_ATTN_BF16, FLASH_ATTN_F16};
    flash_attn_context *one = context_with(1), *many = context_with(5);
    tier                few_tiles = {.context = one}, more_tiles = {.context = many};
    for (int n = 0; n < 4; n++) {
        fixture f = fixture_make(&shapes[n / 2], dtypes[n % 2], 46),
                g = fixture_make(&shapes[n / 2], dtypes[n % 2], 46);
        fixture_run(&f, &few_tiles, 1);
        fixture_run(&g, &more_tiles, 5);
        expect_same_bits(&f.g.dq, &g.g.dq, "dq");
        expect_same_bits(&f.g.dk, &g.g.dk, "dk");
        expect_same_bits(&f.g.dv, &g.g.dv, "dv");
        fixture_free(&f);
        fixture_free(&g);
    }
    flash_attn_destroy(one);
    flash_attn_destroy(many);
}

/* ---- OpenMP's threads: this program stands for the runtime that a process has loaded ---- */

static atomic_int regions;
static int        extra_members; /* of a region's team beside the caller */

typedef struct member {
    void (*run)(void *);
    void *arg;
} member;

static void *run_member(void *argument)
{
    member *m = argument;
    m->run(m->arg);
    return NULL;
}

FLASH_ATTN_API void GOMP_parallel(void (*run)(void *), void *arg, unsigned num_threads, unsigned flags);
void                GOMP_parallel(void (*run)(void *), void *arg, unsigned num_threads, unsigned flags)
{
    pthread_t threads[8];
    member    m = {run, arg};
    if (num_threads != 0 || flags != 0)
        return; /* the team is the program's choice; nothing is computed and the test fails */
    atomic_fetch_add(&regions, 1);
    for (int n = 0; n < extra_members; n++)
        assert_int_equal(pthread_create(&threads[n], NULL, run_member, &m), 0);
    run(arg);
    for (int n = 0; n < extra_members; n++)
        pthread_join(threads[n], NULL);
}

/* Fewer members than threads, as many, and more. */
static void openmp_threads_give_the_same_bits(void **state)
{
    (void)state;
    flash_attn_options  options = {.num_threads = 3, .use_openmp = true};
    flash_attn_context *context, *usual = context_with(3);
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    tier    mine = {.context = context}, theirs = {.context = usual};
    fixture g = fixture_make(&shape, FLASH_ATTN_F32, 45);
    fixture_run(&g, &theirs, 3);
    assert_int_equal(atomic_load(&regions), 0);
    for (extra_members = 0; extra_members < 6; extra_members += 2) {
        fixture f      = fixture_make(&shape, FLASH_ATTN_F32, 45);
        int     before = atomic_load(&regions);
        fixture_run(&f, &mine, 3);
        assert_true(atomic_load(&regions) > before);
        expect_same_bits(&f.p.o, &g.p.o, "o");
        expect_same_bits(&f.g.dq, &g.g.dq, "dq");
        expect_same_bits(&f.g.dk, &g.g.dk, "dk");
        fixture_free(&f);
    }
    flash_attn_destroy(context);
    flash_attn_destroy(usual);
    fixture_free(&g);
}

/* OpenMP's threads are missing in a child of fork, so the library's own run there. */
static void a_forked_child_leaves_openmp_alone(void **state)
{
    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip();
#endif
    flash_attn_options  options = {.num_threads = 3, .use_openmp = true};
    flash_attn_context *context;
    expect_status(flash_attn_create(&context, &options), FLASH_ATTN_OK, "create");
    fixture f     = fixture_make(&shape, FLASH_ATTN_F32, 46);
    tier    t     = {.context = context};
    extra_members = 2;
    fixture_run(&f, &t, 3);
    flash_attn_tensor o      = copy_of(&f.p.o);
    int               before = atomic_load(&regions);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        bool ok = flash_attn_forward(context, &f.p, NULL) == FLASH_ATTN_OK;
        ok      = ok && memcmp(f.p.o.data, o.data, (size_t)count_of(&o) * sizeof(float)) == 0;
        _exit(ok && atomic_load(&regions) == before ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    free(o.data);
    fixture_free(&f);
    flash_attn_destroy(context);
}

static void contexts_come_and_go(void **state)
{
    (void)state;
    for (int n = 0; n < 50; n++) {
        flash_attn_context *context = context_with(1 + n % 6);
        tier                t       = {.context = context};
        test_case           c       = {.seqlen_q = 8, .seqlen_k = 9, .heads_q = 4};
        fixture             f       = fixture_make(&c, FLASH_ATTN_F32, 44);
        if (n % 2)
            fixture_run(&f, &t, 0);
        fixture_free(&f);
        flash_attn_destroy(context);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_forked_child_works), /* first: nothing has made the shared context yet */
        cmocka_unit_test(many_threads_may_use_the_shared_default_context),
        cmocka_unit_test(many_threads_may_share_a_context),
        cmocka_unit_test(many_threads_may_use_contexts_of_their_own),
        cmocka_unit_test(a_stack_of_64_kib_is_enough_for_a_caller),
        cmocka_unit_test(a_callers_own_parallel_for_gives_the_same_bits),
        cmocka_unit_test(a_context_of_many_threads_gives_the_bits_of_one),
        cmocka_unit_test(openmp_threads_give_the_same_bits),
        cmocka_unit_test(a_forked_child_leaves_openmp_alone),
        cmocka_unit_test(contexts_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
