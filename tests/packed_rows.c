#include "packed_rows.h"

#include "case_gpu.h"
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const packed_rows  *kernel;
static const case_memory  *memory;
static const case_gpu     *gpu;
static flash_attn_context *context;
static char                why_not[300];
static const char         *only_shapes = ""; /* whose names hold this */

static void need_hopper(void) { skip_unless(context != NULL, why_not); }

static int run_shape(test_case shape, flash_attn_dtype dtype)
{
    char why[300];
    shape.group  = "packed rows";
    shape.latent = kernel->latent;
    if (!shape.heads_k)
        shape.heads_k = 1;
    if (!shape.head_dim)
        shape.head_dim = kernel->head_dim, shape.head_dim_v = kernel->head_dim_v;
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
    for (int n = 0; n < kernel->num_shapes; n++) {
        const test_case *shape = &kernel->shapes[n];
        if (!strstr(shape->name, only_shapes))
            continue;
        failed += run_shape(*shape, FLASH_ATTN_BF16);
        if (n % 4 == 3 && shape->logit_size < 100) /* float16 holds no more */
            failed += run_shape(*shape, FLASH_ATTN_F16);
    }
    assert_int_equal(failed, 0);
}

/* ---- one problem of its own: two sequences of a paged cache, or many ---- */

enum { QUERIES = 3, HEADS = 24, MOST = 576, PAGE = 32, PAGES = 145, PER_SEQ = 72, USED = 2200, MANY = 128,
       Q_COUNT = MANY * QUERIES * HEADS * MOST, K_COUNT = PAGES * PAGE * MOST, O_COUNT = 2 * Q_COUNT /* for float32 too */ };

typedef struct on_device {
    uint16_t q[Q_COUNT], k[K_COUNT], v[K_COUNT], o[O_COUNT]; /* v: where it is not k's first columns */
    int32_t  table[MANY * PER_SEQ], used[MANY];
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
    fill(host.v, K_COUNT, 5);
    memset(host.o, 0x55, sizeof host.o);
    for (int i = 0; i < MANY * PER_SEQ; i++)
        host.table[i] = (i * 7 + 1) % (PAGES - 1);
    for (int i = 0; i < MANY; i++)
        host.used[i] = USED;
    return &host;
}

static bool o_is_f32;
static int  columns, columns_v, queries = QUERIES, splits; /* of the problem */

static flash_attn_problem problem_at(on_device *at, int batch)
{
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL, .num_splits = splits};
    int64_t            d = columns, dv = columns_v;
    p.q = (flash_attn_tensor){at->q, FLASH_ATTN_BF16, 0, {batch, queries, HEADS, d}, {0}};
    p.k = (flash_attn_tensor){at->k, FLASH_ATTN_BF16, 0, {PAGES, PAGE, 1, d}, {0}};
    p.v = (flash_attn_tensor){kernel->latent ? at->k : at->v, FLASH_ATTN_BF16, 0, {PAGES, PAGE, 1, dv}, {PAGE * d, d, d, 1}};
    p.o = (flash_attn_tensor){at->o, o_is_f32 ? FLASH_ATTN_F32 : FLASH_ATTN_BF16, 0, {batch, queries, HEADS, dv}, {0}};
    p.pages     = (flash_attn_pages){.table = at->table, .pages_per_seq = PER_SEQ};
    p.seqused_k = at->used;
    return p;
}

/* Bytes of a sequence's O. */
static size_t of_one(void) { return (o_is_f32 ? sizeof(float) : sizeof(uint16_t)) * (size_t)(queries * HEADS * columns_v); }

static void run_with(on_device *device, const on_device *host, int batch, uint16_t *got)
{
    flash_attn_problem p = problem_at(device, batch);
    assert_true(gpu->to_device(device, host, sizeof *host));
    expect_ok(flash_attn_forward(context, &p, NULL));
    assert_true(gpu->to_host(got, device->o, sizeof host->o));
    for (size_t n = 0; batch < MANY && n < of_one(); n++) /* the next one is nobody's */
        assert_int_equal(((unsigned char *)got)[(size_t)batch * of_one() + n], 0x55);
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
        assert_memory_equal(got, first, 2 * of_one());
        host->table[PER_SEQ + 1] = bad[n];
        run_with(device, host, 2, got);
        assert_memory_equal(got, first, of_one());
    }
    gpu->free(device);
}

/* Kernels of one width, whose parts are merged in one way. */
static bool is_wide(void) { return kernel->head_dim > 256; }

/* Few sequences may be parted among blocks where of many each block has a whole one. far: one row's logits are beyond what float holds apart. */
static void compare_batches(bool far)
{
    on_device *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    o_is_f32 = true; /* bfloat16 would hide the order of sums */
    int many = is_wide() ? 2 : getenv("EMULATOR_MULTIPROCESSORS") ? 24 : MANY; /* an emulated GPU is busy with fewer */
    int row  = (queries - 2) * HEADS + 2;
    for (int i = 0; far && i < columns; i++)
        host->q[row * columns + i] += 100 << 7; /* 2^100 times as large */
    run_with(device, host, many, first);
    const int fewer[] = {1, 2, many / 2};
    for (int n = 0; n < (is_wide() ? 2 : 3); n++) {
        run_with(device, host, fewer[n], got);
        assert_memory_equal(got, first, (size_t)fewer[n] * of_one());
    }
    o_is_f32 = false;
    gpu->free(device);
}

static void a_sequence_alone_has_the_bits_that_it_has_in_a_batch(void **state)
{
    (void)state;
    need_hopper();
    compare_batches(false);
    compare_batches(true);
    static const struct {
        int columns, queries;
    } others[] = {{256, 2}, {256, 3}, {64, 2}, {64, 3}, {128, 2}}; /* 48 rows of a key head, or 72, of which tiles have 128 */
    int count = is_wide() ? 0 : getenv("EMULATOR_MULTIPROCESSORS") ? 1 : sizeof others / sizeof *others;
    for (int n = 0; n < count; n++) {
        columns = columns_v = others[n].columns;
        queries = others[n].queries;
        compare_batches(true);
    }
    if (!is_wide()) { /* so many parts that nine groups of them are folded by a block's warps of a sequence alone, by one warp in a batch */
        columns = columns_v = 128;
        queries             = 2;
        splits              = 36;
        compare_batches(true);
        splits = 0;
    }
    columns   = kernel->head_dim;
    columns_v = kernel->head_dim_v;
    queries   = QUERIES;
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
        host->k[(host->table[key / PAGE] * PAGE + key % PAGE) * columns + columns / 2] = 0x7FC0;
        run_with(device, host, 2, got);
        int all = QUERIES * HEADS * columns_v, seen = n == 0 ? all / QUERIES * (QUERIES - 1) : all; /* of the first sequence, as before */
        assert_memory_equal(got, first, sizeof *got * (size_t)seen);
        assert_memory_equal(got + all, first + all, of_one());
        for (int i = seen; i < all; i++)
            if (!is_nan(got[i]))
                fail_msg("element %d of who sees NaN is %#x", i, got[i]);
    }
    gpu->free(device);
}

/* The same of a value, of which who sees it has NaN in one column. */
static void nan_in_a_value_reaches_only_who_sees_it(void **state)
{
    (void)state;
    need_hopper();
    skip_unless(!kernel->latent, "V is K's first columns, of which the test before has one");
    on_device *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    run_with(device, host, 2, first);
    for (int n = 0; n < 3; n++) { /* seen by the last query, by nobody, by all */
        make_host();
        int key = n == 2 ? 70 : USED - 1 + n, column = columns_v - 1, sees = n == 0 ? QUERIES - 1 : n == 1 ? QUERIES : 0;
        host->v[(host->table[key / PAGE] * PAGE + key % PAGE) * columns + column] = 0x7FC0;
        run_with(device, host, 2, got);
        for (int i = 0; i < 2 * QUERIES * HEADS * columns_v; i++) {
            bool reached = i < QUERIES * HEADS * columns_v && i / (HEADS * columns_v) >= sees && i % columns_v == column;
            if (reached ? !is_nan(got[i]) : got[i] != first[i])
                fail_msg("NaN in key %d: element %d is %#x, was %#x", key, i, got[i], first[i]);
        }
    }
    gpu->free(device);
}

static float value_of(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float    value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Keys at -Inf, all that a query meets at first and then some for each lane of a tile, count as those that are merely far below the others; where there is
 * nothing else O is 0. */
static void keys_of_minus_infinity_have_no_weight(void **state)
{
    (void)state;
    need_hopper();
    on_device *host = make_host(), *device = gpu->alloc(sizeof *device);
    assert_non_null(device);
    for (int n = 0; n < 3; n++) {
        make_host();
        for (int row = 0; row < QUERIES * HEADS; row++)
            host->q[row * columns + columns - 1] = 0x3F80;
        for (int key = 0; key < USED; key++)
            if (n == 2 || key >= USED - 700 || key % 16 < 8)
                host->k[(host->table[key / PAGE] * PAGE + key % PAGE) * columns + columns - 1] = n == 0 ? 0xF149 : 0xFF80; /* -1e30, -Inf */
        run_with(device, host, 1, n == 0 ? first : got);
        for (int i = 0; i < QUERIES * HEADS * columns_v && n > 0; i++) {
            float x = value_of(got[i]), right = n == 1 ? value_of(first[i]) : 0.0f;
            if (!(fabsf(x - right) <= 0.01f * fabsf(right) + 0.001f))
                fail_msg("element %d is %g, not %g", i, (double)x, (double)right);
        }
    }
    gpu->free(device);
}

static void find_hopper(void)
{
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    if (!memory)
        return;
    gpu     = case_gpu_get();
    context = case_gpu_hopper(kernel->name, why_not, sizeof why_not);
}

int packed_rows_test(const packed_rows *which, int argc, char **argv)
{
    kernel    = which;
    columns   = which->head_dim;
    columns_v = which->head_dim_v;
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
        cmocka_unit_test(nan_in_a_value_reaches_only_who_sees_it),
        cmocka_unit_test(keys_of_minus_infinity_have_no_weight),
    };
    int failed = cmocka_run_group_tests_name(kernel->group, tests, NULL, NULL);
    flash_attn_destroy(context);
    return failed;
}
