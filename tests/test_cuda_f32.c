/* Hopper's own forward in float32 (planes of float16) against the reference, by its name, so that nothing else can answer; skipped, with the reason, where there is no GPU of
 * compute capability 9.0. */
#include "case_gpu.h"
#include "harness.h"
#include "sm90_shapes.h"

#include <math.h>
#include <string.h>

static const case_memory  *memory;
static const case_gpu     *gpu;
static flash_attn_context *context, *backward_context;
static char                why_not[300];

/* Softcap is left to the portable kernel, and so are rows that are not aligned. */
static bool is_taken(const test_case *shape)
{
    return !shape->softcap && !shape->slices && shape->head_dim % 4 == 0 && shape->head_dim_v % 4 == 0;
}

/* Few queries or keys are one launch of the portable kernel; the bias's gradient and what a forward alone has are left to it too. */
static bool is_taken_backward(const test_case *shape)
{
    return is_taken(shape) && (!shape->bias || shape->bias & BIAS_CONSTANT) && !shape->forward_only && !shape->cache_batch_idx && !shape->leftpad &&
           shape->seqlen_q > 128 && shape->seqlen_k > 128 && shape->varlen_q != LENGTHS_ONES && shape->varlen_k != LENGTHS_ONES;
}

/* Columns of a row whose number is no multiple of eight, pages that are no multiple of anything, and all that forward_sm90 is held to. */
static const test_case own[] = {
    {.name = "36 and 44 columns", .batch = 2, .seqlen_q = 300, .seqlen_k = 333, .heads_q = 2, .head_dim = 36, .head_dim_v = 44, .mask = C},
    {.name = "132 and 4 columns", .seqlen_q = 200, .seqlen_k = 300, .head_dim = 132, .head_dim_v = 4},
    {.name = "pages of 7", .batch = 3, .seqlen_q = 200, .seqlen_k = 343, .heads_q = 4, .heads_k = 2, .page_size = 7, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 300, ALiBi", .batch = 2, .seqlen_q = 200, .seqlen_k = 600, .page_size = 300, .alibi = true, .seqused_k = LENGTHS_MIXED, .head_dim = 64},
    {.name = "cache, left padding, window", .batch = 4, .seqlen_q = 200, .seqlen_k = 400, .leftpad = true, .mask = W, .window_left = 150, .window_right = 3, .head_dim = 128},
};

/* Skipped counts as failed: the kernel is for all of these. */
static int run_shape(test_case shape, bool backward)
{
    char why[300];
    shape.group             = "f32";
    case_instance *instance = case_build(&shape, FLASH_ATTN_F32, backward ? CASE_BACKWARD : 0, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape.name, why);
    case_device device = {.context = backward ? backward_context : context, .device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
    case_result result = case_run(instance, &device);
    if (result.verdict != CASE_PASSED) {
        printf("  FAILED %s, %s, head_dim %d: %s\n", shape.name, backward ? "backward" : "forward", shape.head_dim, result.reason);
        fflush(stdout);
    }
    case_free(instance);
    return result.verdict != CASE_PASSED;
}

static int run_shapes(const test_case *all, int count, int *turn, bool backward)
{
    int failed = 0;
    for (int n = 0; n < count; n++)
        for (int d = 64; d <= 256; d *= 2) {
            test_case shape = all[n];
            bool      named = shape.head_dim != 0;
            if (!named)
                shape.head_dim = d;
            if (!strstr(shape.name, only_shapes) || !(backward ? is_taken_backward : is_taken)(&shape) || (named && d > 64) || (*turn)++ % parts != part)
                continue;
            failed += run_shape(shape, backward);
        }
    return failed;
}

static void every_shape_is_right(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    int turn = 0, failed = run_shapes(own, sizeof own / sizeof *own, &turn, false);
    assert_int_equal(failed + run_shapes(shapes, sizeof shapes / sizeof *shapes, &turn, false), 0);
}

static void every_backward_shape_is_right(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    int turn = 0, failed = run_shapes(own, sizeof own / sizeof *own, &turn, true);
    assert_int_equal(failed + run_shapes(backward_shapes, sizeof backward_shapes / sizeof *backward_shapes, &turn, true), 0);
}

/* ---- numbers of all sizes: each row of a result as exact as if it were alone ---- */

enum { LENGTH = 300, COLUMNS = 64, COUNT = LENGTH * COLUMNS, Q = 0, K, V, DOUT, O, DQ, DK, DV, TENSORS };

typedef struct numbers {
    float of[TENSORS][COUNT], lse[LENGTH];
} numbers;

static numbers host, got;

static void fill(uint32_t random)
{
    for (int tensor = 0; tensor < O; tensor++)
        for (int i = 0; i < COUNT; i++) {
            random             = random * 1664525u + 1013904223u;
            host.of[tensor][i] = (float)(int32_t)random * 0x1p-31f;
        }
}

static void scale_row(int tensor, int row, float by)
{
    for (int c = 0; c < COLUMNS; c++)
        host.of[tensor][row * COLUMNS + c] *= by;
}

static void scale_all(int tensor, float by)
{
    for (int row = 0; row < LENGTH; row++)
        scale_row(tensor, row, by);
}

static flash_attn_problem problem_at(numbers *at, flash_attn_mask mask, flash_attn_device_type type, flash_attn_grads *grads)
{
    flash_attn_problem p = {.mask = mask, .device.type = type, .lse = {at->lse, FLASH_ATTN_F32, 0, {1, 1, LENGTH, 1}, {LENGTH, LENGTH, 1, 1}}};
    flash_attn_tensor *all[TENSORS] = {&p.q, &p.k, &p.v, &grads->dout, &p.o, &grads->dq, &grads->dk, &grads->dv};
    *grads = (flash_attn_grads){0};
    for (int n = 0; n < TENSORS; n++)
        *all[n] = (flash_attn_tensor){at->of[n], FLASH_ATTN_F32, 0, {1, LENGTH, 1, COLUMNS}, {COUNT, COLUMNS, COLUMNS, 1}};
    return p;
}

/* The largest of some rows' finite numbers. */
static float largest(int tensor, int row, int rows)
{
    float most = 0;
    for (int i = row * COLUMNS; i < (row + rows) * COLUMNS; i++)
        most = fmaxf(most, isfinite(host.of[tensor][i]) ? fabsf(host.of[tensor][i]) : 0);
    return most;
}

/* A row within a share of its own largest number, and dQ and dK where their terms cancel of these; NaN and Inf where the reference has them. */
static void expect_row(const char *what, flash_attn_mask mask, int tensor, int row, float share)
{
    static const char *const names[] = {"Q", "K", "V", "dO", "O", "dQ", "dK", "dV"};
    const float *wanted = host.of[tensor] + row * COLUMNS, *found = got.of[tensor] + row * COLUMNS;
    float        most = largest(tensor, row, 1);
    if (tensor == DQ)
        most += largest(DOUT, row, 1) * largest(V, 0, LENGTH) * largest(K, 0, LENGTH) / 8;
    if (tensor == DK)
        most += largest(DOUT, 0, LENGTH) * largest(V, 0, LENGTH) * largest(Q, 0, LENGTH) / 8;
    for (int c = 0; c < COLUMNS; c++) {
        bool same = isnan(wanted[c]) ? isnan(found[c]) : isinf(wanted[c]) ? found[c] == wanted[c] : fabsf(found[c] - wanted[c]) <= share * most;
        if (!same)
            fail_msg("%s, mask %d, %s, row %d, column %d: %g, expected %g", what, (int)mask, names[tensor], row, c, (double)found[c], (double)wanted[c]);
    }
}

/* The forward's result, or with `backward` the gradients by the reference's O and LSE. */
static void expect_rows(const char *what, flash_attn_mask mask, bool backward)
{
    numbers *device = gpu->alloc(sizeof host);
    assert_non_null(device);
    flash_attn_grads   want_grads, grads;
    flash_attn_problem want = problem_at(&host, mask, FLASH_ATTN_REFERENCE, &want_grads), p = problem_at(device, mask, FLASH_ATTN_CUDA, &grads);
    memset(host.of[O], 0x55, (TENSORS - O) * sizeof host.of[O]);
    if (!backward)
        assert_true(gpu->to_device(device, &host, sizeof host));
    expect_ok(flash_attn_forward(NULL, &want, NULL));
    if (backward) {
        assert_true(gpu->to_device(device, &host, sizeof host));
        expect_ok(flash_attn_backward(NULL, &want, &want_grads, NULL));
        expect_ok(flash_attn_backward(backward_context, &p, &grads, NULL));
    } else
        expect_ok(flash_attn_forward(context, &p, NULL));
    assert_true(gpu->to_host(&got, device, sizeof got));
    gpu->free(device);
    for (int row = 0; row < LENGTH; row++) {
        for (int tensor = backward ? DQ : O; tensor <= (backward ? DV : O); tensor++)
            expect_row(what, mask, tensor, row, backward ? 3e-5f : 1e-5f);
        float wanted = host.lse[row], found = got.lse[row];
        bool  same = isnan(wanted) ? isnan(found) : found == wanted || fabsf(found - wanted) <= 1e-5f * fmaxf(1, fabsf(wanted));
        if (!same)
            fail_msg("%s, mask %d, LSE of row %d: %g, expected %g", what, (int)mask, row, (double)found, (double)wanted);
    }
}

static void rows_of_all_sizes_are_exact(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    fill(3);
    for (int i = 0; i < LENGTH; i++) {
        scale_row(Q, i, ldexpf(1, 3 - i % 40)); /* each has an exponent of its own */
        scale_row(V, i, ldexpf(1, -(i % 18)));  /* as far apart as a tile may have them */
    }
    for (int n = 0; n < 2; n++)
        expect_rows("small apart", n ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE, false);
    for (int backward = 0; backward < 2; backward++) {
        fill(4);
        scale_all(K, 0x1p-60f);
        scale_all(V, 0x1p-30f);
        scale_all(Q, 0x1p62f);
        expect_rows("small K and V", FLASH_ATTN_NONE, backward);
        fill(5);
        scale_all(V, 0x1p100f);
        expect_rows("large V", FLASH_ATTN_CAUSAL, backward);
    }
}

/* 18: planes hold them; 40: they do not. */
static void gradients_of_all_sizes_are_exact(void **state)
{
    static const int apart[] = {18, 40};
    (void)state;
    skip_unless(context != NULL, why_not);
    for (int n = 0; n < 8; n++) {
        fill(8);
        for (int i = 0; i < LENGTH; i++)
            scale_row(n / 2 % 2 ? DOUT : V, i, ldexpf(1, -(i % apart[n / 4])));
        expect_rows(n / 2 % 2 ? "rows of dO apart" : "rows of V apart", n % 2 ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE, true);
    }
}

/* What a query does not see may be as large as it likes, or not be a number. */
static void hidden_keys_spoil_nothing(void **state)
{
    static const float sizes[] = {1e30f, NAN, INFINITY};
    (void)state;
    skip_unless(context != NULL, why_not);
    for (int n = 0; n < 6; n++) {
        fill(6);
        for (int row = 40; row < LENGTH; row += 100)
            scale_row(n % 2 ? K : V, row, sizes[n / 2]);
        expect_rows(n % 2 ? "hidden keys" : "hidden values", FLASH_ATTN_CAUSAL, false);
    }
    for (int n = 0; n < 2; n++) {
        fill(9);
        scale_row(n ? DOUT : K, n ? 20 : 280, NAN);
        expect_rows(n ? "a NaN of dO" : "a hidden NaN of K", FLASH_ATTN_CAUSAL, true);
    }
}

static void nonfinite_queries_stay_in_their_rows(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    fill(7);
    host.of[Q][10 * COLUMNS + 3] = NAN;
    host.of[Q][77 * COLUMNS]     = INFINITY;
    host.of[Q][299 * COLUMNS]    = -INFINITY;
    for (int i = 0; i < LENGTH; i++)
        host.of[K][i * COLUMNS] = 1; /* scores of row 77 are Inf, of row 299 -Inf */
    expect_rows("queries", FLASH_ATTN_NONE, false);
    expect_rows("queries", FLASH_ATTN_CAUSAL, false);
}

/* Options: sm90_shapes.h. */
int main(int argc, char **argv)
{
    if (!choose_shapes(argc, argv))
        return 2;
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    if (memory) {
        gpu     = case_gpu_get();
        context = case_gpu_hopper("forward_f32_sm90", why_not, sizeof why_not);
        backward_context = context ? case_gpu_hopper("backward_f32_sm90", why_not, sizeof why_not) : NULL;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_is_right),
        cmocka_unit_test(every_backward_shape_is_right),
        cmocka_unit_test(rows_of_all_sizes_are_exact),
        cmocka_unit_test(gradients_of_all_sizes_are_exact),
        cmocka_unit_test(hidden_keys_spoil_nothing),
        cmocka_unit_test(nonfinite_queries_stay_in_their_rows),
    };
    int failed = cmocka_run_group_tests_name("cuda_f32", tests, NULL, NULL);
    flash_attn_destroy(context);
    flash_attn_destroy(backward_context);
    return failed;
}
