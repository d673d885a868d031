/*
 * The public calls on a GPU; skipped, with the reason, where there is none.
 *
 *     test_cuda [--only PATTERN]     the tests whose names are like the pattern, "*graph*"
 *
 * What only a GPU can get wrong: streams, graphs, threads, large offsets, large grids, cold processes. The case list is
 * test_cuda_cases.c's.
 */
#include "case_numbers.h"
#include "cuda_plain.h"
#include "giver.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- streams, graphs, threads ---- */

static void calls_on_several_streams_at_once_give_the_same_bits(void **state)
{
    (void)state;
    need_gpu();
    enum { STREAMS = 4, ROUNDS = 20 };
    plain          p[STREAMS];
    unsigned char *expected[STREAMS];
    void          *stream[STREAMS];
    for (int s = 0; s < STREAMS; s++) {
        p[s]        = make_plain(2, s == 3 ? 1 : 300, 4096, 8, 2, 128, 10u * (unsigned)s);
        expected[s] = expected_of(&p[s]);
        add_workspace(&p[s]);
        poison(&p[s]);
        stream[s] = gpu->stream();
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int s = 0; s < STREAMS; s++)
            expect_ok(forward_on(&p[s], stream[s]));
    for (int s = 0; s < STREAMS; s++) {
        assert_true(gpu->wait(stream[s]));
        expect_same(&p[s], expected[s]);
        gpu->stream_free(stream[s]);
        free(expected[s]);
        free_plain(&p[s]);
    }
}

static void a_captured_graph_follows_changed_lengths(void **state)
{
    (void)state;
    need_gpu();
    enum { BATCH = 3, KEYS = 2000 };
    plain    p = make_plain(BATCH, 1, KEYS, 8, 2, 64, 7);
    int32_t *seqused = gpu->alloc(BATCH * sizeof *seqused), lengths[][BATCH] = {{2000, 1, 700}, {0, 1999, 256}, {5, 257, 2000}};
    p.problem.seqused_k = seqused;
    add_workspace(&p);
    expect_ok(flash_attn_prepare(NULL, &p.problem, FLASH_ATTN_FORWARD));
    void *stream = gpu->stream();
    assert_true(gpu->capture_begin(stream));
    expect_ok(forward_on(&p, stream));
    void *graph = gpu->capture_end(stream);
    assert_non_null(graph);
    for (int n = 0; n < 3; n++) {
        assert_true(gpu->to_device(seqused, lengths[n], sizeof lengths[n]));
        unsigned char *expected = expected_of(&p);
        poison(&p);
        assert_true(gpu->graph_launch(graph, stream));
        assert_true(gpu->wait(stream));
        expect_same(&p, expected);
        free(expected);
    }
    gpu->graph_free(graph);
    gpu->stream_free(stream);
    gpu->free(seqused);
    free_plain(&p);
}

/* The slices' host memory may be gone when the graph runs. */
static void a_captured_graph_keeps_its_own_block_mask(void **state)
{
    (void)state;
    need_gpu();
    plain             p      = make_plain(1, 1000, 1000, 4, 4, 64, 9);
    flash_attn_slice *slices = calloc(250, sizeof *slices);
    for (int n = 0; n < 250; n++)
        slices[n] = (flash_attn_slice){4 * n, 4 * n + 4, 4 * n, n % 3 ? 4 * n + 4 : 1000, n % 3};
    p.problem.mask          = FLASH_ATTN_NONE;
    p.problem.slices        = (flash_attn_slices){.list = slices, .count = 250};
    unsigned char *expected = expected_of(&p);
    add_workspace(&p);
    void *stream = gpu->stream();
    assert_true(gpu->capture_begin(stream));
    expect_ok(forward_on(&p, stream));
    void *graph = gpu->capture_end(stream);
    assert_non_null(graph);
    memset(slices, 0xFF, 250 * sizeof *slices);
    free(slices);
    poison(&p);
    assert_true(gpu->fill(p.workspace, 0xFF, p.workspace_bytes) && gpu->wait(NULL));
    assert_true(gpu->graph_launch(graph, stream));
    assert_true(gpu->wait(stream));
    expect_same(&p, expected);
    gpu->graph_free(graph);
    gpu->stream_free(stream);
    free(expected);
    free_plain(&p);
}

typedef struct thread_work {
    plain                p;
    const unsigned char *expected;
    flash_attn_context  *context;
    bool                 has_context; /* whether the thread makes a CUDA context current */
    int                  failures;
} thread_work;

static void *thread_main(void *argument)
{
    thread_work *work = argument;
    if (work->has_context)
        gpu->adopt();
    void *stream = NULL;
    gpu->adopt();
    stream = gpu->stream();
    if (!work->has_context)
        gpu->abandon();
    flash_attn_exec exec = {.stream = stream};
    for (int round = 0; round < 30; round++)
        work->failures += flash_attn_forward(work->context, &work->p.problem, &exec) != FLASH_ATTN_OK;
    gpu->adopt();
    work->failures += !gpu->wait(stream);
    gpu->stream_free(stream);
    return NULL;
}

static void threads_share_a_context_cold(void **state)
{
    (void)state;
    need_gpu();
    enum { THREADS = 4 };
    flash_attn_context *context;
    pthread_t           thread[THREADS];
    thread_work         work[THREADS];
    expect_ok(flash_attn_create(&context, NULL)); /* its kernels are not yet loaded: the threads race for them */
    for (int t = 0; t < THREADS; t++) {
        work[t]          = (thread_work){.p = make_plain(1, 500, 700, 4, 2, 64, 3), .context = context, .has_context = t % 2};
        work[t].expected = expected_of(&work[t].p);
        poison(&work[t].p);
    }
    for (int t = 0; t < THREADS; t++)
        assert_int_equal(pthread_create(&thread[t], NULL, thread_main, &work[t]), 0);
    for (int t = 0; t < THREADS; t++) {
        pthread_join(thread[t], NULL);
        assert_int_equal(work[t].failures, 0);
        expect_same(&work[t].p, work[t].expected);
        free((void *)work[t].expected);
        free_plain(&work[t].p);
    }
    flash_attn_destroy(context);
}

static void a_call_leaves_the_current_context_as_it_was(void **state)
{
    (void)state;
    need_gpu();
    plain          p        = make_plain(1, 100, 100, 2, 2, 64, 5);
    unsigned char *expected = expected_of(&p);
    poison(&p);
    assert_true(gpu->abandon());
    flash_attn_status status   = flash_attn_forward(NULL, &p.problem, NULL);
    bool              has_none = !gpu->wait(NULL); /* fails without a context */
    assert_true(gpu->adopt());
    expect_ok(status);
    assert_true(has_none);
    expect_same(&p, expected);
    free(expected);
    free_plain(&p);
}

/* ---- sizes ---- */

static void a_grid_of_more_than_65535_batch_heads_is_whole(void **state)
{
    (void)state;
    need_gpu();
    plain          big = make_plain(70000, 2, 3, 1, 1, 32, 1), one;
    unsigned char *all = expected_of(&big);
    for (int64_t b = 0; b < 70000; b += 6999) { /* as alone */
        one                = big;
        one.problem.q.shape[0] = one.problem.k.shape[0] = one.problem.v.shape[0] = 1;
        one.problem.q.data = (char *)big.problem.q.data + b * 2 * 32 * 2;
        one.problem.k.data = (char *)big.problem.k.data + b * 3 * 32 * 2;
        one.problem.v.data = (char *)big.problem.v.data + b * 3 * 32 * 2;
        one.o_bytes        = 2 * 32 * 2;
        one.lse_bytes      = 2 * 4;
        unsigned char *alone = expected_of(&one);
        assert_memory_equal(alone, all + b * 128, 128);
        assert_memory_equal(alone + 128, all + big.o_bytes + b * 8, 8);
        free(alone);
    }
    free(all);
    free_plain(&big);
}

/* The same bits where two sequences lie stride elements apart in memory_of_far as side by side. */
static void expect_far_as_near(char *memory_of_far, int64_t seqlen_q, int64_t seqlen_k, int64_t stride)
{
    enum { HEADS = 2, COLUMNS = 64, ROW_BYTES = HEADS * COLUMNS * 2, MOST_ROWS = 320, ROOM = MOST_ROWS * ROW_BYTES };
    assert_true(seqlen_q <= MOST_ROWS && seqlen_k <= MOST_ROWS);
    plain              near = make_plain(2, seqlen_q, seqlen_k, HEADS, HEADS, COLUMNS, 21), far = near;
    unsigned char     *expected  = expected_of(&near);
    flash_attn_tensor *tensors[] = {&far.problem.q, &far.problem.k, &far.problem.v, &far.problem.o};
    char               host[ROOM];
    for (int t = 0; t < 4; t++) {
        flash_attn_tensor *x     = tensors[t];
        const char        *from  = x->data;
        size_t             bytes = (size_t)(t == 1 || t == 2 ? seqlen_k : seqlen_q) * ROW_BYTES;
        x->data                  = memory_of_far + (size_t)t * ROOM;
        for (int i = 0; i < 4; i++)
            x->stride[i] = (int64_t[]){stride, HEADS * COLUMNS, COLUMNS, 1}[i];
        for (int b = 0; b < 2; b++) {
            assert_true(gpu->to_host(host, from + (size_t)b * bytes, bytes));
            assert_true(gpu->to_device((char *)x->data + b * stride * 2, host, bytes));
        }
    }
    size_t half = near.o_bytes / 2;
    assert_true(gpu->fill(far.problem.lse.data, 0xFF, far.lse_bytes));
    for (int b = 0; b < 2; b++)
        assert_true(gpu->fill((char *)far.problem.o.data + b * stride * 2, 0xFF, half));
    expect_ok(flash_attn_forward(NULL, &far.problem, NULL));
    for (size_t b = 0; b < 2; b++) {
        assert_true(gpu->to_host(host, (char *)far.problem.o.data + (int64_t)b * stride * 2, half));
        assert_memory_equal(host, expected + b * half, half);
    }
    free(expected);
    free_plain(&near);
}

/* Offsets in elements beyond 2^31 and 2^32, by the batch's stride: a whole number of rows, as the maps of short sequences have it, and not. */
static void offsets_beyond_32_bits_are_right(void **state)
{
    (void)state;
    need_gpu();
    int64_t rows = ((int64_t)1 << 32) + 128, other = rows - 64;
    char   *memory_of_far = gpu->alloc((size_t)(rows * 2 + (1 << 20)));
    if (!memory_of_far) {
        print_message("skipped: the device has no 8.6 GB free\n");
        skip();
    }
    expect_far_as_near(memory_of_far, 70, 90, rows);
    expect_far_as_near(memory_of_far, 150, 310, other);
    expect_far_as_near(memory_of_far, 1, 310, other);
    gpu->free(memory_of_far);
}

/* ---- workspace, repetition, errors ---- */

static void a_workspace_one_byte_short_is_refused_and_nothing_written(void **state)
{
    (void)state;
    need_gpu();
    plain p = make_plain(1, 1, 8192, 8, 2, 128, 4); /* split, so that it needs one */
    poison(&p);
    unsigned char *before = result_of(&p);
    add_workspace(&p);
    size_t planned = p.workspace_bytes, enough = 0; /* planned for data that may lie anywhere */
    assert_true(planned > 0);
    p.workspace_bytes = 1;
    assert_int_equal(forward_on(&p, NULL), FLASH_ATTN_NO_MEMORY);
    const char *said = strstr(flash_attn_last_error(), "expected at least ");
    assert_true(said && sscanf(said, "expected at least %zu", &enough) == 1 && enough <= planned);
    p.workspace_bytes = enough - 1;
    assert_int_equal(forward_on(&p, NULL), FLASH_ATTN_NO_MEMORY);
    expect_same(&p, before);
    p.workspace_bytes = enough;
    expect_ok(forward_on(&p, NULL));
    free(before);
    free_plain(&p);
}

static void a_misaligned_workspace_is_as_good(void **state)
{
    (void)state;
    need_gpu();
    plain          p        = make_plain(2, 1, 8192, 8, 2, 128, 4);
    unsigned char *expected = expected_of(&p);
    add_workspace(&p);
    char *own   = p.workspace;
    p.workspace = gpu->alloc(p.workspace_bytes + 1);
    gpu->free(own);
    own         = p.workspace;
    p.workspace = own + 1;
    poison(&p);
    expect_ok(forward_on(&p, NULL));
    expect_same(&p, expected);
    p.workspace = own;
    free(expected);
    free_plain(&p);
}

static void an_allocator_is_asked_where_there_is_no_workspace(void **state)
{
    (void)state;
    need_gpu();
    plain          p        = make_plain(2, 1, 8192, 8, 2, 128, 4); /* split */
    unsigned char *expected = expected_of(&p);
    add_workspace(&p);
    giver           a    = {.gives = p.workspace};
    flash_attn_exec exec = {.allocate = give, .allocator = &a};
    poison(&p);
    unsigned char *poisoned = result_of(&p);
    expect_ok(flash_attn_forward(NULL, &p.problem, &exec));
    expect_same(&p, expected);
    assert_int_equal(a.times, 1);
    assert_true(a.asked > 0 && a.asked <= p.workspace_bytes);
    poison(&p);
    a.gives = NULL;
    assert_int_equal(flash_attn_forward(NULL, &p.problem, &exec), FLASH_ATTN_NO_MEMORY);
    assert_non_null(strstr(flash_attn_last_error(), "exec.allocate gave no memory for "));
    expect_same(&p, poisoned);
    free(poisoned);
    free(expected);
    free_plain(&p);

    plain whole = make_plain(1, 300, 300, 2, 2, 64, 5); /* needs none */
    a           = (giver){0};
    expect_ok(flash_attn_forward(NULL, &whole.problem, &exec));
    assert_int_equal(a.times, 0);
    free_plain(&whole);
}

/* Planned without data, which counts as aligned; the call's is not, and takes another kernel. */
static void a_planned_workspace_suffices_wherever_data_lie(void **state)
{
    (void)state;
    need_gpu();
    plain p              = make_plain(1, 1, 255, 1, 1, 64, 4);
    p.problem.num_splits = 4;
    p.problem.lse        = (flash_attn_tensor){0};
    flash_attn_problem planned = p.problem;
    planned.q.data = planned.k.data = planned.v.data = planned.o.data = NULL;
    expect_ok(flash_attn_workspace_size(NULL, &planned, FLASH_ATTN_FORWARD, &p.workspace_bytes));
    p.workspace                  = gpu->alloc(p.workspace_bytes);
    flash_attn_tensor *tensors[] = {&p.problem.q, &p.problem.k, &p.problem.v, &p.problem.o};
    for (int n = 0; n < 4; n++)
        tensors[n]->data = (char *)tensors[n]->data + 2;
    expect_ok(forward_on(&p, NULL));
    free_plain(&p);
}

static void the_forward_repeats_bit_by_bit(void **state)
{
    (void)state;
    need_gpu();
    plain          p        = make_plain(2, 1000, 1000, 8, 2, 128, 4);
    unsigned char *expected = expected_of(&p);
    for (int round = 0; round < 200; round++) {
        poison(&p);
        expect_ok(forward_on(&p, NULL));
        expect_same(&p, expected);
    }
    free(expected);
    free_plain(&p);
}

enum { KEYS = 4100 /* from 4096 on 64 queries have the same kernel in any cache (decision 0096) */ };

/* So many sequences of so many queries, and each alone; the first in a longer cache too. */
static void expect_bits_of_each_alone(int64_t batch, int64_t queries, int32_t keys, int columns, float scale)
{
    void         *used = gpu->alloc(sizeof keys);
    assert_true(used && gpu->to_device(used, &keys, sizeof keys));
    plain p = make_plain(batch, queries, keys, 8, 2, columns, 11), one;
    p.problem.scale    = scale;
    unsigned char *all = expected_of(&p);
    for (int64_t b = 0; b < batch; b++) {
        one                    = p;
        one.problem.q.shape[0] = one.problem.k.shape[0] = one.problem.v.shape[0] = 1;
        one.problem.q.data     = (char *)p.problem.q.data + b * queries * 8 * columns * 2;
        one.problem.k.data     = (char *)p.problem.k.data + b * keys * 2 * columns * 2;
        one.problem.v.data     = (char *)p.problem.v.data + b * keys * 2 * columns * 2;
        one.o_bytes            = p.o_bytes / (size_t)batch;
        one.lse_bytes          = p.lse_bytes / (size_t)batch;
        for (int cache = 0; cache < (b == 0 && queries < 128 ? 2 : 1); cache++) {
            unsigned char *alone = expected_of(&one);
            assert_memory_equal(alone, all + (size_t)b * one.o_bytes, one.o_bytes);
            assert_memory_equal(alone + one.o_bytes, all + p.o_bytes + (size_t)b * one.lse_bytes, one.lse_bytes);
            free(alone);
            one.problem.k.shape[1] = one.problem.v.shape[1] = batch * keys; /* all that there are */
            one.problem.seqused_k  = used;
        }
    }
    free(all);
    free_plain(&p);
    gpu->free(used);
}

static void a_sequence_has_the_same_bits_alone_and_in_a_batch(void **state)
{
    (void)state;
    need_gpu();
    int64_t batch = getenv("EMULATOR_MULTIPROCESSORS") ? 2 : 5;
    expect_bits_of_each_alone(batch, 16, KEYS, 128, 0);
    expect_bits_of_each_alone(batch, 64, KEYS, 128, 0);
    expect_bits_of_each_alone(batch, 513, KEYS, 128, 0);
    expect_bits_of_each_alone(batch, 16, 900, 128, 0); /* few parts: of one sequence a block folds a row, of more a warp */
}

/* One sequence has tiles of 64 rows, nine, or 33 of 64 columns, have tiles of 128. */
static void a_sequence_of_few_queries_has_the_same_bits_in_any_batch(void **state)
{
    (void)state;
    need_gpu();
    expect_bits_of_each_alone(9, 32, KEYS, 128, 0);
    if (getenv("EMULATOR_MULTIPROCESSORS"))
        return;
    expect_bits_of_each_alone(33, 32, KEYS, 64, 0);
    expect_bits_of_each_alone(9, 32, KEYS, 256, 0);
    expect_bits_of_each_alone(9, 32, 700, 128, 1e9f); /* rows are computed again: of more keys not within a barrier's second under memcheck */
}

/* One query's keys are dealt to a cluster where it is alone, to few blocks or to one in a large batch, and in a longer cache a second launch merges the parts. */
static void a_query_has_the_same_bits_in_any_batch(void **state)
{
    (void)state;
    need_gpu();
    expect_bits_of_each_alone(5, 1, KEYS, 128, 0);
    expect_bits_of_each_alone(40, 1, KEYS, 128, 0);
    expect_bits_of_each_alone(70, 1, KEYS, 128, 0);
    expect_bits_of_each_alone(70, 1, KEYS, 128, 1e9f); /* rows are computed again */
}

/* Where V has NaN in a tile that the mask cuts, rows are computed again, of 65000 keys each here: a tile once took longer for that than a barrier waited (decision 0101). */
static void nan_behind_long_keys_stays_where_it_is_seen(void **state)
{
    (void)state;
    need_gpu();
    if (getenv("EMULATOR_MULTIPROCESSORS"))
        skip();
    enum { LENGTH = 65536, NAN_KEY = 65000, ROW = 2 * 128 };
    plain     p = make_plain(1, LENGTH, LENGTH, 2, 2, 128, 12);
    uint16_t  nan[ROW];
    uint16_t *o = malloc(p.o_bytes);
    memset(nan, 0xFF, sizeof nan);
    p.problem.mask = FLASH_ATTN_CAUSAL;
    assert_true(o && gpu->to_device((char *)p.problem.v.data + (size_t)NAN_KEY * sizeof nan, nan, sizeof nan));
    expect_ok(forward_on(&p, NULL));
    assert_true(gpu->to_host(o, p.problem.o.data, p.o_bytes));
    for (size_t n = 0; n < (size_t)LENGTH * ROW; n++)
        if (((o[n] & 0x7FFF) > 0x7F80) != (n >= (size_t)NAN_KEY * ROW))
            fail_msg("query %d, column %d: %04x", (int)(n / ROW), (int)(n % ROW), (unsigned)o[n]);
    free(o);
    free_plain(&p);
}

static void a_device_that_is_not_there_is_said(void **state)
{
    (void)state;
    need_gpu();
    plain p                  = make_plain(1, 10, 10, 1, 1, 32, 4);
    p.problem.device.index   = 63;
    assert_int_equal(flash_attn_forward(NULL, &p.problem, NULL), FLASH_ATTN_NO_DEVICE);
    assert_non_null(strstr(flash_attn_last_error(), "63"));
    free_plain(&p);
}

/* ---- several devices ---- */

static void *without_a_context(void *argument)
{
    thread_work *work = argument;
    for (int round = 0; round < 10; round++)
        work->failures += flash_attn_forward(NULL, &work->p.problem, NULL) != FLASH_ATTN_OK;
    return NULL;
}

/* Makes its context the current one. */
static bool switch_to_device(int index) { return case_gpu_memory(index, no_gpu, sizeof no_gpu) != NULL; }

static void two_devices_work_in_their_own_memory(void **state)
{
    (void)state;
    need_gpu();
    plain          first    = make_plain(1, 100, 150, 2, 1, 64, 9);
    unsigned char *expected = expected_of(&first);
    if (!switch_to_device(1)) {
        print_message("skipped: %s\n", no_gpu);
        assert_true(switch_to_device(0));
        free(expected);
        free_plain(&first);
        skip();
    }
    plain second                = make_plain(1, 100, 150, 2, 1, 64, 9);
    second.problem.device.index = 1;
    free(expected_of(&second)); /* with its context as the current one */
    expect_same(&second, expected);
    poison(&second);
    assert_true(switch_to_device(0)); /* with the other's, which stays */
    expect_ok(flash_attn_forward(NULL, &second.problem, NULL));
    free(expected_of(&first));
    expect_same(&first, expected);
    poison(&first);
    assert_true(switch_to_device(1));
    expect_same(&second, expected);
    poison(&second);

    thread_work work[2] = {{.p = first}, {.p = second}};
    pthread_t   thread[2];
    for (int t = 0; t < 2; t++)
        assert_int_equal(pthread_create(&thread[t], NULL, without_a_context, &work[t]), 0);
    for (int t = 0; t < 2; t++) {
        pthread_join(thread[t], NULL);
        assert_int_equal(work[t].failures, 0);
    }
    assert_true(gpu->wait(NULL));
    expect_same(&second, expected);
    free_plain(&second);
    assert_true(switch_to_device(0) && gpu->wait(NULL));
    expect_same(&first, expected);
    free(expected);
    free_plain(&first);
}

/* ---- processes ---- */

/* The exit status of one small call in a process that has not used CUDA before. */
static int one_call(void)
{
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    if (!memory)
        return 3;
    gpu     = case_gpu_get();
    plain p = make_plain(1, 100, 100, 2, 2, 64, 5);
    if (flash_attn_forward(NULL, &p.problem, NULL) != FLASH_ATTN_OK) {
        printf("  %s\n", flash_attn_last_error());
        return 1;
    }
    return gpu->wait(NULL) ? 0 : 2;
}

static const char *own_path;

static void eight_cold_processes_at_once(void **state)
{
    (void)state;
    need_gpu();
    pid_t child[8];
    char  cache[] = "test_cuda.XXXXXX", absolute[4200], here[4000];
    assert_non_null(mkdtemp(cache));
    assert_non_null(getcwd(here, sizeof here));
    snprintf(absolute, sizeof absolute, "%s/%s", here, cache);
    fflush(stdout);
    for (int i = 0; i < 8; i++) {
        child[i] = fork();
        if (child[i] == 0) {
            setenv("XDG_CACHE_HOME", absolute, 1);
            execl(own_path, own_path, "--one-call", (char *)NULL);
            _exit(9);
        }
    }
    for (int i = 0; i < 8; i++) {
        int status;
        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    char command[4300];
    snprintf(command, sizeof command, "rm -r '%s'", absolute);
    assert_int_equal(system(command), 0);
}

int main(int argc, char **argv)
{
    own_path = "/proc/self/exe";
    for (int n = 1; n < argc; n++) {
        const char *value = n + 1 < argc ? argv[n + 1] : "";
        if (strcmp(argv[n], "--one-call") == 0)
            return one_call();
        if (strcmp(argv[n], "--only") == 0 && ++n)
            cmocka_set_test_filter(value);
        else {
            fprintf(stderr, "usage: test_cuda [--only PATTERN]\n");
            return 2;
        }
    }
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu    = case_gpu_get();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_on_several_streams_at_once_give_the_same_bits),
        cmocka_unit_test(a_captured_graph_follows_changed_lengths),
        cmocka_unit_test(a_captured_graph_keeps_its_own_block_mask),
        cmocka_unit_test(threads_share_a_context_cold),
        cmocka_unit_test(a_call_leaves_the_current_context_as_it_was),
        cmocka_unit_test(a_grid_of_more_than_65535_batch_heads_is_whole),
        cmocka_unit_test(offsets_beyond_32_bits_are_right),
        cmocka_unit_test(a_workspace_one_byte_short_is_refused_and_nothing_written),
        cmocka_unit_test(a_misaligned_workspace_is_as_good),
        cmocka_unit_test(an_allocator_is_asked_where_there_is_no_workspace),
        cmocka_unit_test(a_planned_workspace_suffices_wherever_data_lie),
        cmocka_unit_test(the_forward_repeats_bit_by_bit),
        cmocka_unit_test(a_sequence_has_the_same_bits_alone_and_in_a_batch),
        cmocka_unit_test(a_sequence_of_few_queries_has_the_same_bits_in_any_batch),
        cmocka_unit_test(a_query_has_the_same_bits_in_any_batch),
        cmocka_unit_test(nan_behind_long_keys_stays_where_it_is_seen),
        cmocka_unit_test(a_device_that_is_not_there_is_said),
        cmocka_unit_test(two_devices_work_in_their_own_memory),
        cmocka_unit_test(eight_cold_processes_at_once),
    };
    return cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
}
