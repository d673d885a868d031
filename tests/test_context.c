/* Contexts: first use from many threads, fork, the environment, a caller's own threads, errors of each thread. */
#include "flashattn.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { S = 70, H = 2, D = 24, COUNT = S * H * D, THREADS = 16 };

static float q[COUNT], k[COUNT], v[COUNT];

static flash_attn_status attend(flash_attn_context *context, float *o)
{
    flash_attn_problem p = {.mask = FLASH_ATTN_CAUSAL};
    p.q                  = (flash_attn_tensor){.data = q, .shape = {1, S, H, D}};
    p.k                  = (flash_attn_tensor){.data = k, .shape = {1, S, H, D}};
    p.v                  = (flash_attn_tensor){.data = v, .shape = {1, S, H, D}};
    p.o.data             = o;
    return flash_attn_forward(context, &p, NULL);
}

/* ---- many threads ---- */

typedef struct worker {
    pthread_barrier_t  *barrier;
    flash_attn_context *context;
    float               o[COUNT];
    flash_attn_status   status;
} worker;

static void *work(void *argument)
{
    worker *w = argument;
    pthread_barrier_wait(w->barrier);
    for (int n = 0; n < 4 && w->status == FLASH_ATTN_OK; n++)
        w->status = attend(w->context, w->o);
    return NULL;
}

static void run_workers(flash_attn_context *context)
{
    static worker     workers[THREADS];
    pthread_t         threads[THREADS];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int n = 0; n < THREADS; n++) {
        workers[n] = (worker){.barrier = &barrier, .context = context};
        assert_int_equal(pthread_create(&threads[n], NULL, work, &workers[n]), 0);
    }
    for (int n = 0; n < THREADS; n++) {
        pthread_join(threads[n], NULL);
        assert_int_equal(workers[n].status, FLASH_ATTN_OK);
        assert_memory_equal(workers[n].o, workers[0].o, sizeof workers[0].o);
    }
    pthread_barrier_destroy(&barrier);
}

/* First in this program, so that the shared context is not there yet. */
static void first_use_from_many_threads_at_once_works(void **state)
{
    (void)state;
    run_workers(NULL);
}

static void threads_may_share_a_context(void **state)
{
    (void)state;
    flash_attn_context *context;
    assert_int_equal(flash_attn_create(&context, NULL), FLASH_ATTN_OK);
    run_workers(context);
    flash_attn_destroy(context);
    flash_attn_destroy(NULL);
}

static void *error_of_a_thread(void *argument)
{
    char *text = argument;
    strcpy(text, flash_attn_last_error());
    flash_attn_create(NULL, NULL);
    strcpy(text + 100, flash_attn_last_error());
    return NULL;
}

static void errors_belong_to_their_thread(void **state)
{
    (void)state;
    char      other[400] = "unset", mine[400];
    pthread_t thread;
    assert_int_equal(flash_attn_forward(NULL, NULL, NULL), FLASH_ATTN_INVALID);
    strcpy(mine, flash_attn_last_error());
    assert_non_null(strstr(mine, "problem"));
    pthread_create(&thread, NULL, error_of_a_thread, other);
    pthread_join(thread, NULL);
    assert_string_equal(other, "");
    assert_non_null(strstr(other + 100, "context"));
    assert_string_equal(flash_attn_last_error(), mine);
    static float o[COUNT];
    assert_int_equal(attend(NULL, o), FLASH_ATTN_OK);
    assert_string_equal(flash_attn_last_error(), mine); /* success does not clear it */
}

/* ---- fork ---- */

#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif

static void a_forked_child_works(void **state)
{
    (void)state;
#if defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)
    skip(); /* ThreadSanitizer itself cannot start threads after a fork */
#endif
    static float        before[COUNT], after[COUNT];
    flash_attn_context *context;
    assert_int_equal(flash_attn_create(&context, &(flash_attn_options){.num_threads = 4}), FLASH_ATTN_OK);
    assert_int_equal(attend(context, before), FLASH_ATTN_OK);
    assert_int_equal(attend(NULL, before), FLASH_ATTN_OK);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a child that waits for threads it does not have dies of this */
        bool right = attend(context, after) == FLASH_ATTN_OK && memcmp(before, after, sizeof before) == 0;
        right      = right && attend(NULL, after) == FLASH_ATTN_OK && memcmp(before, after, sizeof before) == 0;
        flash_attn_destroy(context);
        _exit(right ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(attend(context, after), FLASH_ATTN_OK); /* the parent goes on */
    assert_memory_equal(before, after, sizeof before);
    flash_attn_destroy(context);
}

/* ---- options and the environment ---- */

static void assert_create_fails(const flash_attn_options *options, const char *word)
{
    flash_attn_context *context = (flash_attn_context *)&context;
    assert_int_equal(flash_attn_create(&context, options), FLASH_ATTN_INVALID);
    if (!strstr(flash_attn_last_error(), word))
        fail_msg("\"%s\" does not say \"%s\"", flash_attn_last_error(), word);
    assert_ptr_equal(context, &context); /* not touched */
}

static flash_attn_device_info info_of(const flash_attn_options *options)
{
    flash_attn_context    *context;
    flash_attn_device_info info;
    assert_int_equal(flash_attn_create(&context, options), FLASH_ATTN_OK);
    assert_int_equal(flash_attn_get_device_info(context, (flash_attn_device){0}, &info), FLASH_ATTN_OK);
    flash_attn_destroy(context);
    return info;
}

static void bad_options_are_refused(void **state)
{
    (void)state;
    int dummy;
    assert_int_equal(flash_attn_create(NULL, NULL), FLASH_ATTN_INVALID);
    assert_create_fails(&(flash_attn_options){.num_threads = -1}, "num_threads is -1");
    assert_create_fails(&(flash_attn_options){.num_threads = 4097}, "num_threads is 4097");
    assert_create_fails(&(flash_attn_options){.max_isa = (flash_attn_isa)9}, "max_isa is 9");
    assert_create_fails(&(flash_attn_options){.max_isa = (flash_attn_isa)-1}, "max_isa");
    assert_create_fails(&(flash_attn_options){.reserved = {[1] = 9}}, "options.reserved[1] is 9");
    assert_create_fails(&(flash_attn_options){.pool = &dummy}, "parallel_for");
}

static void the_environment_gives_defaults(void **state)
{
    (void)state;
    setenv("FLASH_ATTN_NUM_THREADS", "3", 1);
    setenv("FLASH_ATTN_MAX_ISA", "scalar", 1);
    flash_attn_device_info info = info_of(NULL);
    assert_string_equal(info.isa, "scalar");
    assert_int_equal(info.num_threads, 3);
    assert_int_equal(info_of(&(flash_attn_options){.num_threads = 2}).num_threads, 2); /* options come first */
    setenv("FLASH_ATTN_NUM_THREADS", "", 1);                                           /* empty is unset */
    setenv("FLASH_ATTN_MAX_ISA", "", 1);
    assert_string_equal(info_of(&(flash_attn_options){.max_isa = FLASH_ATTN_ISA_SCALAR}).isa, "scalar");
    unsetenv("FLASH_ATTN_NUM_THREADS");
    unsetenv("FLASH_ATTN_MAX_ISA");
}

static void a_bad_environment_is_said_not_ignored(void **state)
{
    (void)state;
    static const char *const threads[] = {"0", "-2", "many", "4x", "4097", "99999999999999999999", " "};
    static const char *const isas[]    = {"sse", "AVX2", "avx2 ", "auto", "5"};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        setenv("FLASH_ATTN_NUM_THREADS", threads[i], 1);
        assert_create_fails(NULL, "FLASH_ATTN_NUM_THREADS");
    }
    unsetenv("FLASH_ATTN_NUM_THREADS");
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        setenv("FLASH_ATTN_MAX_ISA", isas[i], 1);
        assert_create_fails(NULL, "FLASH_ATTN_MAX_ISA");
    }
    static const char *const good[] = {"scalar", "neon", "avx2", "avx512", "avx512-bf16", "amx", "amx-fp16", "neon-bf16"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        setenv("FLASH_ATTN_MAX_ISA", good[i], 1);
        info_of(NULL);
    }
    unsetenv("FLASH_ATTN_MAX_ISA");
}

static atomic_int children;

static void count_child(int number)
{
    (void)number;
    atomic_fetch_add(&children, 1);
}

/* Whatever the processor has: the claim is found true or false in a child that nobody else hears of. */
static void a_claimed_processor_is_tried_not_believed(void **state)
{
    (void)state;
    struct sigaction counting = {.sa_handler = count_child}, before;
    sigaction(SIGCHLD, &counting, &before);
    setenv("FLASH_ATTN_ASSUME", "amx-fp16", 1);
    flash_attn_device_info info = info_of(NULL), capped = info_of(&(flash_attn_options){.max_isa = FLASH_ATTN_ISA_AMX});
    setenv("FLASH_ATTN_ASSUME", "amx-fp32", 1);
    assert_create_fails(NULL, "FLASH_ATTN_ASSUME");
    unsetenv("FLASH_ATTN_ASSUME");
    assert_int_equal(atomic_load(&children), 0);
    assert_int_equal(waitpid(-1, NULL, 0), -1);
    sigaction(SIGCHLD, &before, NULL);
    assert_string_not_equal(capped.isa, "amx-fp16");
    if (strcmp(capped.isa, "amx") == 0) {
        assert_non_null(strstr(info.features, "amx-fp16"));
        assert_string_equal(info.isa, strstr(info.features, "amx-fp16:absent") ? "amx" : "amx-fp16");
    }
}

typedef struct own_pool {
    int64_t calls, tasks, most;
} own_pool;

/* Backwards, to show that the order does not matter. */
static void run_backwards(void *pool, int64_t count, flash_attn_task task, void *arg)
{
    own_pool *own = pool;
    own->calls++;
    own->tasks += count;
    own->most = count > own->most ? count : own->most;
    for (int64_t i = count - 1; i >= 0; i--)
        task(arg, i);
}

static void a_callers_own_threads_give_the_same_bits(void **state)
{
    (void)state;
    assert_create_fails(&(flash_attn_options){.parallel_for = run_backwards, .use_openmp = true}, "use_openmp");
    static float        with_ours[COUNT], with_theirs[COUNT];
    own_pool            pool    = {0};
    flash_attn_options  options = {.num_threads = 5, .parallel_for = run_backwards, .pool = &pool};
    flash_attn_context *context;
    assert_int_equal(attend(NULL, with_ours), FLASH_ATTN_OK);
    assert_int_equal(flash_attn_create(&context, &options), FLASH_ATTN_OK);
    assert_int_equal(attend(context, with_theirs), FLASH_ATTN_OK);
    flash_attn_destroy(context);
    assert_memory_equal(with_ours, with_theirs, sizeof with_ours);
    assert_true(pool.most <= 5);
    assert_true(pool.calls > 0);
}

int main(void)
{
    for (int i = 0; i < COUNT; i++) {
        q[i] = (float)(i * 37 % 61) / 61.0f;
        k[i] = (float)(i * 31 % 59) / 59.0f;
        v[i] = (float)(i * 29 % 53) / 53.0f;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_use_from_many_threads_at_once_works),
        cmocka_unit_test(threads_may_share_a_context),
        cmocka_unit_test(errors_belong_to_their_thread),
        cmocka_unit_test(a_forked_child_works),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(the_environment_gives_defaults),
        cmocka_unit_test(a_bad_environment_is_said_not_ignored),
        cmocka_unit_test(a_claimed_processor_is_tried_not_believed),
        cmocka_unit_test(a_callers_own_threads_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
