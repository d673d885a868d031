/* Hopper's kernel for multi-head latent attention, where V is the first columns of K, against the reference, by its name, so that nothing else can answer;
 * skipped, with the reason, where there is no GPU of compute capability 9.0. */
#include "case_gpu.h"
#include "harness.h"

#include <math.h>
#include <string.h>

static const case_memory  *memory;
static const case_gpu     *gpu;
static flash_attn_context *context;
static char                why_not[300];
static const char         *only_shapes = ""; /* whose names hold this */

#define C FLASH_ATTN_CAUSAL
#define W FLASH_ATTN_WINDOW
/* DeepSeek's head dims where a shape names none, and one key head. An even and an odd number of tiles of 64 keys, tails, one part and several, rows of several heads and
 * queries in a tile, keys that are nobody's (NaN in the case's memory). */
static const test_case shapes[] = {
    {.name = "one query", .seqlen_q = 1, .seqlen_k = 128, .heads_q = 64},
    {.name = "one query, one tile", .seqlen_q = 1, .seqlen_k = 64, .heads_q = 16},
    {.name = "one query, a tail", .batch = 2, .seqlen_q = 1, .seqlen_k = 147, .heads_q = 128, .mask = C},
    {.name = "one query, parts", .batch = 2, .seqlen_q = 1, .seqlen_k = 1000, .heads_q = 20, .mask = C},
    {.name = "one key", .seqlen_q = 2, .seqlen_k = 1, .heads_q = 8},
    {.name = "no key", .seqlen_q = 2, .seqlen_k = 0, .heads_q = 8},
    {.name = "two queries", .batch = 2, .seqlen_q = 2, .seqlen_k = 333, .heads_q = 48, .mask = C},
    {.name = "queries and heads that divide nothing", .seqlen_q = 7, .seqlen_k = 200, .heads_q = 21, .mask = C},
    {.name = "more queries than keys", .seqlen_q = 90, .seqlen_k = 40, .heads_q = 4, .mask = C},
    {.name = "prefill", .seqlen_q = 200, .seqlen_k = 200, .heads_q = 4, .mask = C},
    {.name = "prefill, full", .seqlen_q = 130, .seqlen_k = 257, .heads_q = 3},
    {.name = "two key heads", .batch = 2, .seqlen_q = 3, .seqlen_k = 150, .heads_q = 16, .heads_k = 2, .mask = C},
    {.name = "window", .seqlen_q = 100, .seqlen_k = 400, .heads_q = 5, .mask = W, .window_left = 130, .window_right = 20},
    {.name = "window of one", .seqlen_q = 70, .seqlen_k = 70, .heads_q = 2, .mask = W},
    {.name = "window past the keys", .seqlen_q = 200, .seqlen_k = 60, .heads_q = 2, .mask = W, .window_left = 40, .window_right = 3},
    {.name = "sinks", .batch = 2, .seqlen_q = 3, .seqlen_k = 300, .heads_q = 16, .mask = C, .sinks = true},
    {.name = "sinks, parts", .seqlen_q = 1, .seqlen_k = 700, .heads_q = 16, .sinks = true},
    {.name = "pages of 64", .batch = 3, .seqlen_q = 1, .seqlen_k = 300, .heads_q = 128, .page_size = 64, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 16, parts", .batch = 3, .seqlen_q = 2, .seqlen_k = 700, .heads_q = 64, .page_size = 16, .seqused_k = LENGTHS_HOLES, .mask = C},
    {.name = "pages of 24, heads first", .batch = 2, .seqlen_q = 2, .seqlen_k = 200, .heads_q = 8, .heads_k = 2, .page_size = 24, .layout = LAYOUT_HEADS_FIRST,
     .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 8, parts, two queries", .batch = 2, .seqlen_q = 2, .seqlen_k = 333, .heads_q = 48, .page_size = 8, .num_splits = 2, .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 40, window", .seqlen_q = 40, .seqlen_k = 400, .heads_q = 5, .page_size = 40, .mask = W, .window_left = 100, .window_right = 9},
    {.name = "pages of 64, window", .batch = 2, .seqlen_q = 30, .seqlen_k = 500, .heads_q = 16, .page_size = 64, .mask = W, .window_left = 77, .window_right = 0,
     .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 64, pairs that stay, as many tiles as slots", .batch = 20, .seqlen_q = 1, .seqlen_k = 576, .heads_q = 128, .page_size = 64, .num_splits = 4},
    {.name = "pages of 48, blocks that stay, no boxes of Q", .batch = 12, .seqlen_q = 3, .seqlen_k = 240, .heads_q = 21, .page_size = 48, .mask = C},
    {.name = "pages of 16, most queries see nothing", .batch = 2, .seqlen_q = 200, .seqlen_k = 32, .heads_q = 16, .page_size = 16, .mask = C},
    {.name = "pages of 128, no boxes of Q", .batch = 3, .seqlen_q = 3, .seqlen_k = 401, .heads_q = 21, .page_size = 128, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 256, varlen queries", .batch = 4, .seqlen_q = 6, .seqlen_k = 512, .heads_q = 16, .page_size = 256, .varlen_q = LENGTHS_MIXED,
     .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen", .batch = 5, .seqlen_q = 40, .seqlen_k = 200, .heads_q = 8, .varlen_q = LENGTHS_MIXED, .varlen_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen, holes, parts", .batch = 6, .seqlen_q = 3, .seqlen_k = 600, .heads_q = 32, .varlen_q = LENGTHS_HOLES, .varlen_k = LENGTHS_HOLES},
    {.name = "used lengths", .batch = 5, .seqlen_q = 4, .seqlen_k = 300, .heads_q = 16, .seqused_q = LENGTHS_HOLES, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "left padding", .batch = 4, .seqlen_q = 2, .seqlen_k = 300, .heads_q = 16, .leftpad = true},
    {.name = "cache", .batch = 4, .seqlen_q = 2, .seqlen_k = 300, .heads_q = 16, .mask = C, .cache_batch_idx = true, .seqused_k = LENGTHS_MIXED},
    {.name = "heads first", .batch = 2, .seqlen_q = 5, .seqlen_k = 130, .heads_q = 8, .heads_k = 2, .layout = LAYOUT_HEADS_FIRST},
    {.name = "o in float32", .batch = 2, .seqlen_q = 2, .seqlen_k = 130, .heads_q = 16, .o_f32 = true, .mask = C},
    {.name = "many tiles in one part", .batch = 6, .seqlen_q = 1, .seqlen_k = 4096, .heads_q = 16, .num_splits = 1},
    {.name = "pairs that stay, parts of as many tiles as slots", .batch = 20, .seqlen_q = 1, .seqlen_k = 576, .heads_q = 128, .num_splits = 4},
    {.name = "so many parts", .seqlen_q = 1, .seqlen_k = 500, .heads_q = 16, .num_splits = 5},
    {.name = "parts by the batch", .batch = 3, .seqlen_q = 2, .seqlen_k = 1200, .heads_q = 16, .num_splits = -1, .mask = C, .seqused_k = LENGTHS_MIXED},
    {.name = "large logits", .seqlen_q = 2, .seqlen_k = 400, .heads_q = 16, .logit_size = 30.0f},
    {.name = "maxima that jump", .batch = 2, .seqlen_q = 2, .seqlen_k = 500, .heads_q = 16, .logit_size = 200.0f, .mask = C},
    {.name = "far logits", .seqlen_q = 2, .seqlen_k = 200, .heads_q = 16, .logit_size = 3e9f, .mask = C},
    {.name = "far logits, parts", .seqlen_q = 1, .seqlen_k = 600, .heads_q = 4, .logit_size = 3e9f},
    {.name = "512 and 512 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 512, .head_dim_v = 512, .mask = C},
    {.name = "320 and 256 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 320, .head_dim_v = 256, .mask = C},
    {.name = "264 and 8 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 264, .head_dim_v = 8, .mask = C},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void need_hopper(void) { skip_unless(context != NULL, why_not); }

static int run_shape(test_case shape, flash_attn_dtype dtype)
{
    char why[300];
    shape.group  = "latent";
    shape.latent = true;
    if (!shape.heads_k)
        shape.heads_k = 1;
    if (!shape.head_dim)
        shape.head_dim = 576, shape.head_dim_v = 512;
    case_instance *instance = case_build(&shape, dtype, 0, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape.name, why);
    case_device device = {.context = context, .device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
    case_result result = case_run(instance, &device);
    uint64_t    bits   = case_output_hash(instance);
    if (result.verdict == CASE_PASSED)
        result = case_run(instance, &device);
    bool failed = result.verdict != CASE_PASSED; /* skipped counts as failed: the kernel is for all of these */
    if (failed)
        printf("  FAILED %s, %s: %s\n", shape.name, dtype_name(dtype), result.reason);
    else if (case_output_hash(instance) != bits) {
        printf("  FAILED %s, %s: other bits the second time\n", shape.name, dtype_name(dtype));
        failed = true;
    }
    fflush(stdout);
    case_free(instance);
    return failed;
}

static void every_shape_is_right(void **state)
{
    (void)state;
    need_hopper();
    int failed = 0;
    for (int n = 0; n < NUM_SHAPES; n++) {
        if (!strstr(shapes[n].name, only_shapes))
            continue;
        failed += run_shape(shapes[n], FLASH_ATTN_BF16);
        if (n % 4 == 3 && shapes[n].logit_size < 100) /* float16 holds no more */
            failed += run_shape(shapes[n], FLASH_ATTN_F16);
    }
    assert_int_equal(failed, 0);
}

/* ---- one problem of its own: two sequences of a paged cache ---- */

enum { QUERIES = 3, HEADS = 24, D = 576, DV = 512, PAGE = 32, PAGES = 13, PER_SEQ = 6, USED = 150, Q_COUNT = 2 * QUERIES * HEADS * D,
       K_COUNT = PAGES * PAGE * D, O_COUNT = 2 * QUERIES * HEADS * DV };

typedef struct on_device {
    uint16_t q[Q_COUNT], k[K_COUNT], o[O_COUNT];
    int32_t  table[2 * PER_SEQ], used[2];
} on_device;

static void fill(uint16_t *host, int count, uint32_t random)
{
    for (int i = 0; i < count; i++) { /* bfloat16 between 1/8 and 2, of both signs */
        random  = random * 1664525u + 1013904223u;
        host[i] = (uint16_t)((random >> 9 & 1) << 15 | (124 + (random >> 10) % 4) << 7 | (random >> 16 & 127));
    }
}

static on_device *make_host(void)
{
    static on_device host;
    fill(host.q, Q_COUNT, 3);
    fill(host.k, K_COUNT, 4);
    memset(host.o, 0x55, sizeof host.o);
    for (int i = 0; i < 2 * PER_SEQ; i++)
        host.table[i] = (i * 5 + 1) % (PAGES - 1);
    host.used[0] = host.used[1] = USED;
    return &host;
}

static flash_attn_problem problem_at(on_device *at, int batch)
{
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL};
    p.q = (flash_attn_tensor){at->q, FLASH_ATTN_BF16, 0, {batch, QUERIES, HEADS, D}, {0}};
    p.k = (flash_attn_tensor){at->k, FLASH_ATTN_BF16, 0, {PAGES, PAGE, 1, D}, {0}};
    p.v = (flash_attn_tensor){at->k, FLASH_ATTN_BF16, 0, {PAGES, PAGE, 1, DV}, {PAGE * D, D, D, 1}};
    p.o = (flash_attn_tensor){at->o, FLASH_ATTN_BF16, 0, {batch, QUERIES, HEADS, DV}, {0}};
    p.pages     = (flash_attn_pages){.table = at->table, .pages_per_seq = PER_SEQ};
    p.seqused_k = at->used;
    return p;
}

static void run_with(on_device *device, const on_device *host, int batch, uint16_t *got)
{
    flash_attn_problem p = problem_at(device, batch);
    assert_true(gpu->to_device(device, host, sizeof *host));
    expect_ok(flash_attn_forward(context, &p, NULL));
    assert_true(gpu->to_host(got, device->o, sizeof host->o));
}

static uint16_t first[O_COUNT], got[O_COUNT];

/* Past the keys that are used any id may stand; among them it spoils its own sequence, reads nothing outside and leaves the other as it is. */
static void page_ids_out_of_range_are_bounded(void **state)
{
    (void)state;
    need_hopper();
    static const int32_t bad[] = {-1, INT32_MAX, INT32_MIN, PAGES, 1 << 20};
    on_device           *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    run_with(device, host, 2, first);
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        make_host();
        host->table[USED / PAGE + 1] = host->table[PER_SEQ + USED / PAGE + 1] = bad[n]; /* behind the last that is used */
        run_with(device, host, 2, got);
        assert_memory_equal(got, first, sizeof got);
        host->table[PER_SEQ + 1] = bad[n];
        run_with(device, host, 2, got);
        assert_memory_equal(got, first, sizeof got / 2);
    }
    gpu->free(device);
}

static void a_sequence_alone_has_the_bits_that_it_has_in_a_batch(void **state)
{
    (void)state;
    need_hopper();
    on_device *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    run_with(device, host, 2, first);
    run_with(device, host, 1, got);
    assert_memory_equal(got, first, sizeof got / 2);
    gpu->free(device);
}

static bool is_nan(uint16_t bf16) { return (bf16 & 0x7FFF) > 0x7F80; }

/* The first two of three queries do not see the last key, nobody those behind it. */
static void nan_in_a_key_reaches_only_who_sees_it(void **state)
{
    (void)state;
    need_hopper();
    on_device *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    run_with(device, host, 2, first);
    for (int n = 0; n < 2; n++) {
        make_host();
        int key = USED - 1 + n;
        host->k[(host->table[key / PAGE] * PAGE + key % PAGE) * D + 300] = 0x7FC0;
        run_with(device, host, 2, got);
        int seen = (n == 0 ? QUERIES - 1 : QUERIES) * HEADS * DV; /* of the first sequence, as before */
        assert_memory_equal(got, first, sizeof *got * (size_t)seen);
        assert_memory_equal(got + O_COUNT / 2, first + O_COUNT / 2, sizeof got / 2);
        for (int i = seen; i < O_COUNT / 2; i++)
            if (!is_nan(got[i]))
                fail_msg("element %d of who sees NaN is %#x", i, got[i]);
    }
    gpu->free(device);
}

static void find_hopper(void)
{
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    if (!memory)
        return;
    gpu     = case_gpu_get();
    context = case_gpu_hopper("forward_latent_sm90", why_not, sizeof why_not);
}

/* --shapes TEXT: those whose names hold it. Another argument: only tests of such a name. */
int main(int argc, char **argv)
{
    for (int n = 1; n < argc; n++)
        if (strcmp(argv[n], "--shapes") == 0 && n + 1 < argc)
            only_shapes = argv[++n];
        else
            cmocka_set_test_filter(argv[n]);
    find_hopper();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_is_right),
        cmocka_unit_test(page_ids_out_of_range_are_bounded),
        cmocka_unit_test(a_sequence_alone_has_the_bits_that_it_has_in_a_batch),
        cmocka_unit_test(nan_in_a_key_reaches_only_who_sees_it),
    };
    int failed = cmocka_run_group_tests_name("cuda_latent", tests, NULL, NULL);
    flash_attn_destroy(context);
    return failed;
}
