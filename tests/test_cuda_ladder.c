/*
 * Every rung of the ladder against the reference on a GPU; skipped, with the reason, where there is none. Rungs that
 * the GPU is too old or too new for are told as skipped.
 *
 *     test_cuda_ladder [--few] [RUNG...]     these alone, "k2" or "fd"; --few: shapes of at most 100 queries
 */
#include "case_gpu.h"
#include "cuda/ladder.h"
#include "harness.h"

#include <string.h>

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];
static char             **wanted; /* names, then NULL; none: all */
static bool               few;

static bool is_wanted(const char *rung)
{
    for (char **name = wanted; *name; name++)
        if (strcmp(*name, rung) == 0)
            return true;
    return !*wanted;
}

static flash_attn_context *context_of(const char *rung)
{
    flash_attn_context *context;
    flash_attn_options  options = {.kernel = rung};
    assert_int_equal(flash_attn_create(&context, &options), FLASH_ATTN_OK);
    return context;
}

/* Whole tiles, tails of both kinds, queries that see nothing, few keys, a key head for several query heads. */
static const test_case shapes[] = {
    {.group = "ladder", .name = "whole tiles", .seqlen_q = 384, .seqlen_k = 512, .heads_q = 2},
    {.group = "ladder", .name = "tails", .batch = 2, .seqlen_q = 333, .seqlen_k = 333, .heads_q = 4, .heads_k = 2},
    {.group = "ladder", .name = "fewer queries", .batch = 2, .seqlen_q = 77, .seqlen_k = 450, .heads_q = 2},
    {.group = "ladder", .name = "fewer keys", .batch = 2, .seqlen_q = 300, .seqlen_k = 101, .heads_q = 2},
    {.group = "ladder", .name = "one of each", .seqlen_q = 1, .seqlen_k = 1},
    {.group = "ladder", .name = "one query", .batch = 3, .seqlen_q = 1, .seqlen_k = 1001, .heads_q = 8, .heads_k = 2},
    {.group = "ladder", .name = "large logits", .seqlen_q = 200, .seqlen_k = 200, .logit_size = 30.0f},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct runner {
    const char         *name;
    flash_attn_context *context;
    tally               total;
} runner;

/* Rungs that are asked for, of those that round to FP8 or of the others. */
static int open_runners(runner *runners, bool rounds)
{
    int count = 0;
    for (int g = 0; g < fa_num_rungs; g++)
        if (fa_rungs[g].rounds == rounds && is_wanted(fa_rungs[g].name))
            runners[count++] = (runner){.name = fa_rungs[g].name, .context = context_of(fa_rungs[g].name)};
    return count;
}

static void run_shape(runner *runners, int count, const test_case *shape, flash_attn_dtype dtype)
{
    char           why[300];
    case_instance *instance = case_build(shape, dtype, 0, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape->name, why);
    for (int n = 0; n < count; n++) {
        runner     *r      = &runners[n];
        case_device device = {.context = r->context, .device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
        case_result result = case_run(instance, &device);
        r->total.passed += result.verdict == CASE_PASSED;
        r->total.failed += result.verdict == CASE_FAILED;
        r->total.skipped += result.verdict == CASE_SKIPPED;
        if (result.verdict == CASE_FAILED)
            printf("  FAILED %s, %s, head_dim %d, %s, %s: %s\n", r->name, shape->name, shape->head_dim,
                   shape->mask == FLASH_ATTN_CAUSAL ? "causal" : "full", dtype_name(dtype), result.reason);
    }
    case_free(instance);
}

/* Shape n with head_dim 64 and 128, full and causal: four ways. */
static test_case shape_of(int n, int way)
{
    test_case shape = shapes[n];
    shape.head_dim  = way % 2 ? 128 : 64;
    shape.mask      = way / 2 ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
    return shape;
}

static void every_rung_is_right(void **state)
{
    (void)state;
    enum { MOST_RUNGS = 32 };
    runner runners[MOST_RUNGS];
    int    failed = 0;
    skip_unless(memory != NULL, no_gpu);
    assert_in_range(fa_num_rungs, 1, MOST_RUNGS);
    int count = open_runners(runners, false);
    skip_unless(count > 0, "none is asked for");
    for (int n = 0; n < NUM_SHAPES; n++)
        for (int way = 0; way < 4; way++) {
            test_case shape = shape_of(n, way);
            if (few && shape.seqlen_q > 100)
                continue;
            run_shape(runners, count, &shape, FLASH_ATTN_BF16);
            if (n == 1 || few)
                run_shape(runners, count, &shape, FLASH_ATTN_F16);
        }
    for (int n = 0; n < count; n++) {
        const tally *t = &runners[n].total;
        printf("%-6s %3d passed %3d failed %3d skipped\n", runners[n].name, t->passed, t->failed, t->skipped);
        failed += t->failed;
        flash_attn_destroy(runners[n].context);
    }
    assert_int_equal(failed, 0);
}

/* ---- rungs that round their inputs to FP8: the case list's tolerances are not for them ---- */

/* Error of O, relative L2, and of LSE, root mean square over the rows that see something. */
typedef struct errors {
    double o, lse;
} errors;

static flash_attn_tensor on_gpu(const flash_attn_tensor *t)
{
    flash_attn_tensor copy = copy_of(t), device = copy;
    size_t            bytes = (size_t)count_of(t) * dtype_bytes(t->dtype);
    device.data             = gpu->alloc(bytes);
    assert_true(device.data && gpu->to_device(device.data, copy.data, bytes));
    free(copy.data);
    return device;
}

static void from_gpu(flash_attn_tensor *host, const flash_attn_tensor *device)
{
    *host      = *device;
    host->data = malloc((size_t)count_of(host) * dtype_bytes(host->dtype));
    assert_true(host->data &&
                gpu->to_host(host->data, device->data, (size_t)count_of(host) * dtype_bytes(host->dtype)));
}

static double root_mean_square(const flash_attn_tensor *x, const flash_attn_tensor *y) /* of x - y, or without y of x */
{
    double *a = values_of(x), *b = y ? values_of(y) : NULL, sum = 0;
    int64_t count = 0;
    for (int64_t n = 0; n < count_of(x); n++) {
        double off = a[n] - (b ? b[n] : 0);
        if (isinf(a[n]) && b && a[n] == b[n]) /* LSE of what sees nothing */
            continue;
        sum += off * off; /* NaN stays */
        count++;
    }
    free(a);
    free(b);
    return count > 0 ? sqrt(sum / (double)count) : 0;
}

/* The tensors of `p` hold random numbers; with outliers one in a thousand gets another one ten times as large besides.
 */
static void add_outliers(const flash_attn_problem *p, uint64_t seed)
{
    const flash_attn_tensor *tensor[3] = {&p->q, &p->k, &p->v};
    for (int n = 0; n < 3; n++)
        for (int64_t i = 0, count = count_of(tensor[n]); i < count; i++) {
            flash_attn_tensor one = {.data = (char *)tensor[n]->data + i * 2, .dtype = tensor[n]->dtype};
            if (random_int(&seed, 0, 999) == 0)
                set(&one, 0, 0, 0, 0, get(&one, 0, 0, 0, 0) + 10 * random_normal(&seed));
        }
}

/* Of one rung, on inputs that lie in `device` and, for the reference, whose answer is `expected`. */
static errors errors_of(const runner *r, flash_attn_problem device, const flash_attn_problem *expected)
{
    flash_attn_problem poisoned = *expected, host;
    poisoned.o = copy_of(&expected->o), poisoned.lse = copy_of(&expected->lse);
    memset(poisoned.o.data, 0xFF, (size_t)count_of(&poisoned.o) * dtype_bytes(poisoned.o.dtype));
    memset(poisoned.lse.data, 0xFF, (size_t)count_of(&poisoned.lse) * sizeof(float));
    device.o = on_gpu(&poisoned.o), device.lse = on_gpu(&poisoned.lse);
    free(poisoned.o.data);
    free(poisoned.lse.data);
    expect_ok(flash_attn_forward(r->context, &device, NULL));
    from_gpu(&host.o, &device.o);
    from_gpu(&host.lse, &device.lse);
    errors off = {.o   = root_mean_square(&host.o, &expected->o) / fmax(root_mean_square(&expected->o, NULL), 1e-30),
                  .lse = root_mean_square(&host.lse, &expected->lse)};
    gpu->free(device.o.data);
    gpu->free(device.lse.data);
    free(host.o.data);
    free(host.lse.data);
    return off;
}

static void find_errors(const runner *runners, int count, const test_case *shape, flash_attn_dtype dtype, bool outliers,
                        errors *off)
{
    fixture f = fixture_make(shape, dtype, 1);
    if (outliers)
        add_outliers(&f.p, 5);
    f.p.device = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    expect_ok(flash_attn_forward(NULL, &f.p, NULL));
    flash_attn_problem device = f.p;
    device.device             = (flash_attn_device){.type = FLASH_ATTN_CUDA};
    device.q = on_gpu(&f.p.q), device.k = on_gpu(&f.p.k), device.v = on_gpu(&f.p.v);
    for (int n = 0; n < count; n++)
        off[n] = errors_of(&runners[n], device, &f.p);
    gpu->free(device.q.data);
    gpu->free(device.k.data);
    gpu->free(device.v.data);
    fixture_free(&f);
}

/* k7 and k8. */
enum { FP8_RUNGS = 2 };
static void open_fp8_runners(runner *runners)
{
    flash_attn_device_info info;
    skip_unless(memory != NULL, no_gpu);
    skip_unless(is_wanted("k7") && is_wanted("k8"), "k7 and k8 are not asked for");
    expect_ok(flash_attn_get_device_info(NULL, (flash_attn_device){.type = FLASH_ATTN_CUDA}, &info));
    skip_unless(strcmp(info.isa, "sm_90") == 0 && !strstr(info.name, "emulated"),
                "k7 and k8 are for compute capability 9.0");
    assert_int_equal(open_runners(runners, true), FP8_RUNGS);
}

static void close_fp8_runners(runner *runners)
{
    for (int n = 0; n < FP8_RUNGS; n++)
        flash_attn_destroy(runners[n].context);
}

/* On normal numbers Q's and K's rounding makes 3.7% of P, V's and P's own 2.6% each: 5.2%. */
static void fp8_rungs_keep_their_bounds(void **state)
{
    (void)state;
    runner runners[FP8_RUNGS];
    errors off[FP8_RUNGS];
    int    failed = 0;
    open_fp8_runners(runners);
    for (int n = 0; n < NUM_SHAPES; n++)
        for (int way = 0; way < 4; way++) {
            test_case shape = shape_of(n, way);
            if (shape.logit_size > 1) /* its rounding is not small */
                continue;
            find_errors(runners, FP8_RUNGS, &shape, n == 1 ? FLASH_ATTN_F16 : FLASH_ATTN_BF16, false, off);
            for (int r = 0; r < FP8_RUNGS; r++)
                if (!(off[r].o <= 0.07 && off[r].lse <= 0.1) && ++failed)
                    printf("  FAILED %s, %s, head_dim %d, %s: o %.3f, lse %.3f\n", runners[r].name, shape.name,
                           shape.head_dim, way / 2 ? "causal" : "full", off[r].o, off[r].lse);
        }
    close_fp8_runners(runners);
    assert_int_equal(failed, 0);
}

static void rotation_makes_outliers_harmless(void **state)
{
    (void)state;
    runner runners[FP8_RUNGS];
    errors off[FP8_RUNGS];
    open_fp8_runners(runners);
    for (int d = 64; d <= 128; d += 64) {
        test_case shape = {
            .group = "ladder", .name = "outliers", .seqlen_q = 256, .seqlen_k = 2048, .heads_q = 2, .head_dim = d};
        find_errors(runners, FP8_RUNGS, &shape, FLASH_ATTN_BF16, true, off);
        printf("head_dim %3d with outliers: o %.3f, rotated %.3f; lse %.4f, rotated %.4f\n", d, off[0].o, off[1].o,
               off[0].lse, off[1].lse);
        assert_true(off[0].o <= 0.2 && off[1].o <= 0.1 && off[1].o <= 0.8 * off[0].o);
    }
    close_fp8_runners(runners);
}

int main(int argc, char **argv)
{
    few    = argc > 1 && strcmp(argv[1], "--few") == 0;
    wanted = argv + 1 + few;
    for (char **name = wanted; *name; name++)
        if (!fa_ladder_find(*name)) {
            fprintf(stderr, "%s is no rung\n", *name);
            return 2;
        }
    memory                          = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu                             = case_gpu_get();
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_rung_is_right),
                                       cmocka_unit_test(fp8_rungs_keep_their_bounds),
                                       cmocka_unit_test(rotation_makes_outliers_harmless)};
    return cmocka_run_group_tests_name("cuda_ladder", tests, NULL, NULL);
}
