/*
 * The case list on a GPU, every dtype and both passes, against the reference; skipped, with the reason, where there is none.
 *
 *     test_cuda_cases [f32|f16|bf16|f8e4m3] [--group NAME] [--part N/PARTS] [--seed N] [--quick]
 *         --part: each PARTS-th case from the N-th (0 is the first) on, for runs beside each other: most of the time is the
 *         kernels' compilation
 *         --quick: each case in one dtype, some in FP8 too
 */
#include "case_gpu.h"
#include "case_numbers.h"
#include "harness.h"

static const case_memory *memory;
static char               no_gpu[200];

static struct {
    const char *dtype, *group;
    uint64_t    seed;
    bool        quick;
    int         part, parts;
} options = {.seed = 1, .parts = 1};

typedef struct group_tally {
    tally  tally;
    double worst;
    char   worst_of[160];
    char   skip_reason[400];
    int    forward_only; /* of those, for want of a backward kernel */
} group_tally;

/* Slices in the deterministic mode too: blocks take turns of which they know only from lists (list_tiles.cu). */
static case_result run_passes(const test_case *c, flash_attn_dtype dtype, unsigned passes)
{
    char           why[300];
    case_instance *instance = case_build(c, dtype, passes, options.seed, why, sizeof why);
    if (!instance)
        fail_msg("%s/%s: %s", c->group, c->name, why);
    case_device device = {.device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
    case_result result = case_run(instance, &device);
    if (c->slices && passes == CASE_BACKWARD && result.verdict == CASE_PASSED) {
        device.deterministic = true;
        result               = case_run(instance, &device);
    }
    case_free(instance);
    return result;
}

static void run_case(const test_case *c, flash_attn_dtype dtype, group_tally *group)
{
    case_result result = run_passes(c, dtype, CASE_BACKWARD);
    if (result.verdict == CASE_SKIPPED && strncmp(result.reason, "backward", 8) == 0) { /* the forward counts alone */
        snprintf(group->skip_reason, sizeof group->skip_reason, "%s", result.reason);
        group->forward_only++;
        result = run_passes(c, dtype, 0);
    }
    group->tally.passed += result.verdict == CASE_PASSED;
    group->tally.failed += result.verdict == CASE_FAILED;
    group->tally.skipped += result.verdict == CASE_SKIPPED;
    if (result.verdict == CASE_FAILED)
        printf("  FAILED %s/%s, %s, seed %llu: %s\n", c->group, c->name, dtype_name(dtype),
               (unsigned long long)options.seed, result.reason);
    if (result.verdict == CASE_SKIPPED)
        snprintf(group->skip_reason, sizeof group->skip_reason, "%s", result.reason);
    if (result.verdict == CASE_PASSED && result.worst > group->worst) {
        group->worst = result.worst;
        snprintf(group->worst_of, sizeof group->worst_of, "%s: %s", c->name, result.worst_of);
    }
}

static bool chosen(int number, flash_attn_dtype dtype)
{
    return (!options.dtype || strcmp(options.dtype, dtype_name(dtype)) == 0) && (!options.group || strcmp(options.group, test_cases[number].group) == 0) &&
           (!options.quick || (dtype == FLASH_ATTN_F8E4M3 ? number % 5 == 0 : number % 3 == (int)dtype)) && number % options.parts == options.part;
}

static void run_all_cases(flash_attn_dtype dtype)
{
    int failed = 0;
    if (!memory) {
        print_message("skipped: %s\n", no_gpu);
        skip();
    }
    for (int first = 0, next; first < num_test_cases; first = next) {
        group_tally group = {0};
        const char *name  = test_cases[first].group;
        for (next = first; next < num_test_cases && strcmp(test_cases[next].group, name) == 0; next++)
            if (chosen(next, dtype))
                run_case(&test_cases[next], dtype, &group);
        if (group.tally.passed + group.tally.failed + group.tally.skipped == 0)
            continue;
        printf("%-4s %-10s %4d passed %3d failed %3d skipped %3d forward only   worst %.2f of the tolerance (%s)%s%s\n",
               dtype_name(dtype), name, group.tally.passed, group.tally.failed, group.tally.skipped, group.forward_only,
               group.worst, group.worst_of,
               group.skip_reason[0] ? "\n       last skip: " : "", group.skip_reason);
        fflush(stdout);
        failed += group.tally.failed;
    }
    assert_int_equal(failed, 0);
}

static void the_case_list_in_float16(void **state)
{
    (void)state;
    run_all_cases(FLASH_ATTN_F16);
}

static void the_case_list_in_bfloat16(void **state)
{
    (void)state;
    run_all_cases(FLASH_ATTN_BF16);
}

static void the_case_list_in_float32(void **state)
{
    (void)state;
    run_all_cases(FLASH_ATTN_F32);
}

static void the_case_list_in_float8(void **state)
{
    (void)state;
    run_all_cases(FLASH_ATTN_F8E4M3);
}

int main(int argc, char **argv)
{
    for (int n = 1; n < argc; n++) {
        const char *value = n + 1 < argc ? argv[n + 1] : "";
        if (strchr("fb", argv[n][0]))
            options.dtype = argv[n];
        else if (strcmp(argv[n], "--quick") == 0)
            options.quick = true;
        else if (strcmp(argv[n], "--group") == 0 && ++n)
            options.group = value;
        else if (strcmp(argv[n], "--seed") == 0 && ++n)
            options.seed = strtoull(value, NULL, 0);
        else if (strcmp(argv[n], "--part") == 0 && sscanf(value, "%d/%d", &options.part, &options.parts) == 2 &&
                 options.part >= 0 && options.part < options.parts && ++n)
            continue;
        else {
            fprintf(stderr, "usage: test_cuda_cases [f32|f16|bf16|f8e4m3] [--group NAME] [--part N/PARTS] [--seed N] [--quick]\n");
            return 2;
        }
    }
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_case_list_in_bfloat16),
        cmocka_unit_test(the_case_list_in_float16),
        cmocka_unit_test(the_case_list_in_float32),
        cmocka_unit_test(the_case_list_in_float8),
    };
    return cmocka_run_group_tests_name("cuda_cases", tests, NULL, NULL);
}
