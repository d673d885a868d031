/* Memory grows with the length of a sequence, not with its square: at 8192 x 8192, head_dim 64, one head, both passes
 * peak under 64 MB above their tensors. Measured in a process of its own, which this program starts as `test_memory
 * --measure DTYPE`. */
#include "harness.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LENGTH = 8192, HEAD_DIM = 64, LIMIT_KIB = 64 * 1024 };

static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

/* Prints the KiB by which the peak rises above the tensors and a context with its threads. */
static int measure(flash_attn_dtype dtype)
{
    test_case           c    = {.seqlen_q = LENGTH, .seqlen_k = LENGTH, .head_dim = HEAD_DIM, .mask = FLASH_ATTN_NONE};
    case_instance      *x    = case_build(&c, dtype, CASE_BACKWARD | CASE_NO_EXPECT, 1, NULL, 0);
    long                base = peak_kib();
    flash_attn_context *context;
    if (!x || flash_attn_create(&context, NULL) != FLASH_ATTN_OK ||
        flash_attn_forward(context, case_problem(x), NULL) != FLASH_ATTN_OK ||
        flash_attn_backward(context, case_problem(x), case_grads(x), NULL) != FLASH_ATTN_OK)
        return 1;
    printf("%ld\n", peak_kib() - base);
    flash_attn_destroy(context);
    case_free(x);
    return 0;
}

static void measure_in_a_process(const char *dtype)
{
    char    command[4200], path[4000];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    assert_true(length > 0);
    path[length] = 0;
    snprintf(command, sizeof command, "'%s' --measure %s", path, dtype);
    FILE *out = popen(command, "r");
    assert_non_null(out);
    long kib = -1;
    assert_int_equal(fscanf(out, "%ld", &kib), 1);
    assert_int_equal(pclose(out), 0);
    print_message("  %s: %.1f MB above the tensors\n", dtype, (double)kib / 1024);
    assert_true(kib < LIMIT_KIB);
}

/* The reference in place of a CPU backend would take minutes, and AddressSanitizer's shadow is not ours to count. */
static void skip_if_not_measurable(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
    flash_attn_problem     p = {.q.shape = {1, 64, 1, 64}, .k.shape = {1, 64, 1, 64}, .v.shape = {1, 64, 1, 64}};
    flash_attn_explanation e;
    expect_status(flash_attn_explain(NULL, &p, FLASH_ATTN_BACKWARD, &e), FLASH_ATTN_OK, "explain");
    if (strstr(e.kernel, "reference"))
        skip();
}

static void both_passes_at_8192_stay_under_64_mb(void **state)
{
    (void)state;
    skip_if_not_measurable();
    measure_in_a_process("f32");
    measure_in_a_process("bf16");
}

static void workspaces_grow_at_most_with_the_length(void **state)
{
    (void)state;
    for (int n = 0; n < num_tiers(); n++)
        for (int pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
            size_t bytes[2];
            for (int m = 0; m < 2; m++) {
                int64_t            length = (int64_t)LENGTH << m;
                flash_attn_problem p      = {
                         .q.shape = {1, length, 1, 64}, .k.shape = {1, length, 1, 64}, .v.shape = {1, length, 1, 64}};
                expect_status(flash_attn_workspace_size(tier_at(n)->context, &p, (flash_attn_pass)pass, &bytes[m]),
                              FLASH_ATTN_OK, "size");
            }
            assert_true((double)bytes[1] <= 2.05 * (double)bytes[0] + 65536);
        }
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--measure") == 0)
        return measure(strcmp(argv[2], "f32") == 0 ? FLASH_ATTN_F32 : FLASH_ATTN_BF16);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_passes_at_8192_stay_under_64_mb),
        cmocka_unit_test(workspaces_grow_at_most_with_the_length),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
