/*
 * The whole case list on every instruction-set tier of this machine, at several numbers of threads, which must give the
 * same bits. One line a group:
 *
 *     test_cases [f32|f16|bf16|f8e4m3] [--all-threads | --threads N] [--group NAME] [--seed N] [--tier NAME] [--verbose]
 *                [--part N/PARTS] [--expected-to FILE | --expected-from FILE]
 *
 * --part: each PARTS-th case from the N-th (0 is the first) on. The last two keep the expected values of all these cases, or take them from such a file in place of the reference.
 */
#include "case_numbers.h"
#include "case_runner.h"
#include "harness.h"

static struct {
    flash_attn_dtype dtype;
    bool             all_threads, verbose;
    int              threads; /* this number alone; 0: several */
    int              part, parts;
    const char      *group, *tier, *expected_to, *expected_from;
    uint64_t         seed;
} options = {.seed = 1, .parts = 1};

typedef struct group_run {
    tally       tally;
    double      worst;
    char        worst_name[120];
    const char *skip_reason;
} group_run;

static group_run total;
static FILE     *expected; /* of --expected-to or --expected-from */

static void fail_line(const test_case *c, const char *tier_name, int threads, const char *reason)
{
    printf("  FAILED %s/%s, %s, %s, %d threads, seed %llu: %s\n", c->group, c->name, dtype_name(options.dtype),
           tier_name, threads, (unsigned long long)options.seed, reason);
}

static void run_one(case_instance *instance, const test_case *c, const tier *t, group_run *group)
{
    static const int all[] = {1, 2, 3, 8}, some[] = {1, 3};
    const int       *threads = options.threads ? &options.threads : options.all_threads ? all : some;
    uint64_t         hash    = 0;
    for (int n = 0; n < (options.threads ? 1 : options.all_threads ? 4 : 2); n++) {
        case_device device = {.context = t->context, .num_threads = threads[n]};
        case_result result = case_run(instance, &device);
        if (result.verdict == CASE_PASSED && n > 0 && case_output_hash(instance) != hash) {
            result.verdict = CASE_FAILED;
            snprintf(result.reason, sizeof result.reason, "other bits than with one thread");
        }
        hash = n == 0 ? case_output_hash(instance) : hash;
        group->tally.passed += result.verdict == CASE_PASSED;
        group->tally.failed += result.verdict == CASE_FAILED;
        group->tally.skipped += result.verdict == CASE_SKIPPED;
        if (result.verdict == CASE_FAILED)
            fail_line(c, t->name, threads[n], result.reason);
        if (result.verdict == CASE_SKIPPED)
            printf("  skipped %s/%s, %s: %s\n", c->group, c->name, t->name, result.reason);
        if (options.verbose)
            printf("  %s/%s %s %d: %.3f of the tolerance (%s)\n", c->group, c->name, t->name, threads[n], result.worst,
                   result.worst_of);
        if (result.verdict == CASE_PASSED && result.worst > group->worst) {
            group->worst = result.worst;
            snprintf(group->worst_name, sizeof group->worst_name, "%s: %s, %s", c->name, result.worst_of, t->name);
        }
    }
}

/* With expected values; NULL: why says why not. */
static case_instance *build(const test_case *c, char *why, size_t why_bytes)
{
    unsigned       flags = CASE_BACKWARD | (options.expected_from ? CASE_NO_EXPECT : 0);
    case_instance *x     = case_build(c, options.dtype, flags, options.seed, why, why_bytes);
    bool           ok    = x && (!options.expected_from || case_read_expected(x, expected, why, why_bytes));
    if (ok && options.expected_to && !case_write_expected(x, expected)) {
        snprintf(why, why_bytes, "%s cannot be written", options.expected_to);
        ok = false;
    }
    if (ok)
        return x;
    case_free(x);
    return NULL;
}

/* A file of expected values has all cases: those of other parts are left out. */
static void run_case(const test_case *c, group_run *group)
{
    char why[300];
    bool of_part = (c - test_cases) % options.parts == options.part;
    if (!of_part && options.expected_from && !case_skip_expected(expected)) {
        group->tally.failed++;
        fail_line(c, "reference", 1, "the file of expected values ends here or is damaged");
    }
    if (!of_part && !options.expected_to)
        return;
    case_instance *instance = build(c, why, sizeof why);
    if (!instance) {
        group->tally.failed++;
        fail_line(c, "reference", 1, why);
        return;
    }
    for (int n = 0; of_part && n < num_tiers(); n++)
        if (options.tier ? strcmp(options.tier, tier_at(n)->name) == 0 : tier_differs(tier_at(n), options.dtype))
            run_one(instance, c, tier_at(n), group);
    case_free(instance);
}

/* state: the first case of the group. */
static void run_group(void **state)
{
    const test_case *c     = *state;
    const char      *name  = c->group;
    group_run        group = {0};
    for (; c < test_cases + num_test_cases && strcmp(c->group, name) == 0; c++)
        run_case(c, &group);
    printf("%-9s %4d passed %3d failed %3d skipped   worst %.2f of the tolerance (%s)\n", name, group.tally.passed,
           group.tally.failed, group.tally.skipped, group.worst, group.worst_name);
    fflush(stdout);
    total.tally.passed += group.tally.passed;
    total.tally.failed += group.tally.failed;
    total.tally.skipped += group.tally.skipped;
    assert_int_equal(group.tally.failed, 0);
}

static bool parse(int argc, char **argv)
{
    for (int n = 1; n < argc; n++) {
        const char *value = n + 1 < argc ? argv[n + 1] : "";
        bool        found = false;
        for (int type = FLASH_ATTN_F32; type <= FLASH_ATTN_F8E4M3; type++)
            if (strcmp(argv[n], dtype_name((flash_attn_dtype)type)) == 0) {
                options.dtype = (flash_attn_dtype)type;
                found         = true;
            }
        if (found)
            continue;
        if (strcmp(argv[n], "--all-threads") == 0)
            options.all_threads = true;
        else if (strcmp(argv[n], "--verbose") == 0)
            options.verbose = true;
        else if (strcmp(argv[n], "--threads") == 0 && atoi(value) > 0 && ++n)
            options.threads = atoi(value);
        else if (strcmp(argv[n], "--part") == 0 && sscanf(value, "%d/%d", &options.part, &options.parts) == 2 && options.part >= 0 &&
                 options.part < options.parts && ++n)
            continue;
        else if (strcmp(argv[n], "--group") == 0 && ++n)
            options.group = value;
        else if (strcmp(argv[n], "--tier") == 0 && ++n)
            options.tier = value;
        else if (strcmp(argv[n], "--seed") == 0 && ++n)
            options.seed = strtoull(value, NULL, 0);
        else if (strcmp(argv[n], "--expected-to") == 0 && ++n)
            options.expected_to = value;
        else if (strcmp(argv[n], "--expected-from") == 0 && ++n)
            options.expected_from = value;
        else
            return false;
    }
    return !(options.expected_to && options.expected_from);
}

static bool open_expected(void)
{
    const char *name = options.expected_to ? options.expected_to : options.expected_from;
    expected         = name ? fopen(name, options.expected_to ? "wb" : "rb") : NULL;
    if (name && !expected)
        perror(name);
    return !name || expected;
}

/* False: what was written is not whole, or something is left of what was read. */
static bool close_expected(void)
{
    bool rest = expected && options.expected_from && fgetc(expected) != EOF;
    bool ok   = !rest && (!expected || fclose(expected) == 0);
    if (!ok)
        printf("  FAILED %s\n", rest ? "the file of expected values holds more than these cases"
                                    : "the expected values cannot be written");
    return ok;
}

int main(int argc, char **argv)
{
    struct CMUnitTest groups[64];
    size_t            count = 0;
    if (!parse(argc, argv)) {
        fprintf(stderr,
                "usage: test_cases [f32|f16|bf16|f8e4m3] [--all-threads | --threads N] [--group NAME] [--seed N] "
                "[--tier NAME] [--verbose] [--part N/PARTS] [--expected-to FILE | --expected-from FILE]\n");
        return 2;
    }
    if (!open_expected())
        return 1;
    for (int n = 0; n < num_test_cases; n++) {
        const char *name  = test_cases[n].group;
        bool        first = n == 0 || strcmp(name, test_cases[n - 1].group) != 0;
        if (first && (!options.group || strcmp(name, options.group) == 0))
            groups[count++] = (struct CMUnitTest){name, run_group, NULL, NULL, (void *)(uintptr_t)&test_cases[n]};
    }
    printf("%s on", dtype_name(options.dtype));
    for (int n = 0; n < num_tiers(); n++)
        printf(" %s", tier_at(n)->name);
    printf("\n");
    int failed = _cmocka_run_group_tests("cases", groups, count, NULL, NULL);
    print_tally(&total.tally);
    return !close_expected() || failed;
}
