/* flashattn check: the case list of the tests against the reference, on this machine. */
#include "case_runner.h"
#include "cli.h"
#include "gpu.h"
#include "json.h"
#include "options.h"
#include "problem.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

typedef struct check_flags {
    const char     *group, *name;
    cli_list        dtype;
    uint64_t        seed;
    cli_where_flags where;
    bool            quick, json;
} check_flags;

#define FIELD(name) offsetof(check_flags, name)
static const cli_option check_options[] = {
    {"group", "NAME", cli_parse_text, FIELD(group), "only this group of cases"},
    {"case", "NAME", cli_parse_text, FIELD(name), "only the cases of this name"},
    {"dtype", "LIST", cli_parse_dtypes, FIELD(dtype), "some of f32,f16,bf16; default all three"},
    {"seed", "N", cli_parse_seed, FIELD(seed), "of the random numbers; default 1"},
    {"quick", NULL, cli_parse_switch, FIELD(quick), "each case in one dtype, in turn"},
    {"json", NULL, cli_parse_switch, FIELD(json), "print JSON"},
    {0},
};
#undef FIELD

static const cli_help check_help = {
    .command  = "check",
    .usage    = "[--group NAME] [--dtype LIST] [options]",
    .about    = "Run the list of cases, forward and backward, and compare each result with the reference (double\n"
                "precision) within the tolerances of docs/cli.md. A line a group, then passed, failed, skipped.",
    .examples = "  flashattn check\n"
                "  flashattn check --quick\n"
                "  flashattn check --group window --dtype bf16 --isa avx2\n"
                "  flashattn check --seed 7 --threads 3 --json",
};

typedef struct check_count {
    int    passed, failed, skipped;
    double worst; /* largest error as a part of its tolerance */
    char   worst_of[160];
    char   skip_reason[400]; /* the first */
} check_count;

typedef struct check_failure {
    const test_case *of;
    flash_attn_dtype dtype;
    char             reason[400];
} check_failure;

typedef struct check_run {
    const check_flags *flags;
    case_device        device;
    cli_progress       progress;
    cli_json           json;
    check_count        total;
    int                num_done;
    check_failure     *failures; /* total.failed of them */
} check_run;

static bool is_wanted(const check_flags *flags, const test_case *c)
{
    return (!flags->group || strcmp(flags->group, c->group) == 0) &&
           (!flags->name || strcmp(flags->name, c->name) == 0);
}

/* A word that names nothing gets the nearest that does. */
static int check_names(const check_flags *flags)
{
    const char **words = calloc((size_t)num_test_cases, sizeof *words);
    int          found = 0, go_on = CLI_GO_ON;
    if (!words)
        return cli_fail("no memory left");
    for (int n = 0; n < num_test_cases; n++)
        found += is_wanted(flags, &test_cases[n]);
    bool group_known = !flags->group;
    for (int n = 0; n < num_test_cases && !group_known; n++)
        group_known = strcmp(flags->group, test_cases[n].group) == 0;
    if (found == 0) {
        const char *what = group_known ? flags->name : flags->group;
        for (int n = 0; n < num_test_cases; n++)
            words[n] = group_known ? test_cases[n].name : test_cases[n].group;
        const char *nearest = cli_nearest(what, words, num_test_cases);
        go_on = cli_fail_usage(&check_help, "no %s is called '%s'%s%s%s", group_known ? "case here" : "group", what,
                               nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
    }
    free(words);
    return go_on;
}

/* ---- running ---- */

static int keep_failure(check_run *run, const test_case *c, flash_attn_dtype dtype, const char *reason)
{
    check_failure *more = realloc(run->failures, (size_t)(run->total.failed + 1) * sizeof *more);
    if (!more)
        return cli_fail("no memory left");
    run->failures           = more;
    more[run->total.failed] = (check_failure){.of = c, .dtype = dtype};
    snprintf(more[run->total.failed].reason, sizeof more->reason, "%s", reason);
    if (!run->flags->json) {
        cli_progress_clear(&run->progress);
        printf("FAILED %s/%s %s: %s\n       again: flashattn check --group %s --case '%s' --dtype %s --seed %llu\n",
               c->group, c->name, cli_dtype_name(dtype), reason, c->group, c->name, cli_dtype_name(dtype),
               (unsigned long long)run->flags->seed);
    }
    return CLI_GO_ON;
}

static int run_case(check_run *run, const test_case *c, flash_attn_dtype dtype, check_count *group)
{
    case_result    result = {.verdict = CASE_FAILED};
    case_instance *instance =
        case_build(c, dtype, CASE_BACKWARD, run->flags->seed, result.reason, sizeof result.reason);
    int go_on = CLI_GO_ON;
    if (instance)
        result = case_run(instance, &run->device);
    if (result.verdict == CASE_FAILED) {
        go_on = keep_failure(run, c, dtype, result.reason);
        group->failed++;
        run->total.failed++;
    } else if (result.verdict == CASE_SKIPPED) {
        if (group->skipped++ == 0)
            snprintf(group->skip_reason, sizeof group->skip_reason, "%s", result.reason);
        run->total.skipped++;
    } else {
        group->passed++;
        run->total.passed++;
        if (result.worst > group->worst) {
            group->worst = result.worst;
            snprintf(group->worst_of, sizeof group->worst_of, "%s, %s, %s", c->name, cli_dtype_name(dtype),
                     result.worst_of);
        }
    }
    case_free(instance);
    return go_on;
}

static void report_group(check_run *run, const char *name, const check_count *group)
{
    if (!run->flags->json) {
        cli_progress_clear(&run->progress);
        printf("%-10s %4d passed %4d failed %4d skipped", name, group->passed, group->failed, group->skipped);
        if (group->worst > 0)
            printf("   worst error %.2f of its tolerance (%s)", group->worst, group->worst_of);
        putchar('\n');
        if (group->skipped)
            printf("           skipped: %s\n", group->skip_reason);
        fflush(stdout);
        return;
    }
    cli_json *json = &run->json;
    json_open(json, NULL, '{');
    json_text(json, "group", name);
    json_whole(json, "passed", group->passed);
    json_whole(json, "failed", group->failed);
    json_whole(json, "skipped", group->skipped);
    json_real(json, "worst", group->worst);
    json_text(json, "worst_of", group->worst > 0 ? group->worst_of : NULL);
    json_text(json, "skip_reason", group->skipped ? group->skip_reason : NULL);
    json_close(json, '}');
}

/* Cases of a group stand together in the list. */
static int run_groups(check_run *run)
{
    const check_flags *flags = run->flags;
    int                go_on = CLI_GO_ON;
    for (int first = 0, next; first < num_test_cases && go_on == CLI_GO_ON; first = next) {
        const char *name  = test_cases[first].group;
        check_count group = {0};
        bool        any   = false;
        char        what[80];
        for (next = first; next < num_test_cases && strcmp(test_cases[next].group, name) == 0; next++) {
            const test_case *c = &test_cases[next];
            if (!is_wanted(flags, c))
                continue;
            any = true;
            for (int t = 0; t < flags->dtype.count && go_on == CLI_GO_ON; t++) {
                if (flags->quick && t != next % flags->dtype.count)
                    continue;
                snprintf(what, sizeof what, "%s: %s", name, c->name);
                cli_progress_show(&run->progress, run->num_done++, what);
                go_on = run_case(run, c, (flash_attn_dtype)flags->dtype.value[t], &group);
            }
        }
        if (any && go_on == CLI_GO_ON)
            report_group(run, name, &group);
    }
    return go_on;
}

static void begin(check_run *run, const flash_attn_device_info *info)
{
    const check_flags *flags  = run->flags;
    const char        *device = cli_device_name(run->device.device);
    if (!flags->json) {
        printf("%s (%s), tier %s, %d thread%s, seed %llu, against the reference in double\n", device, info->name,
               info->isa, info->num_threads, info->num_threads == 1 ? "" : "s", (unsigned long long)flags->seed);
        return;
    }
    cli_json *json = &run->json;
    json_open(json, NULL, '{');
    json_text(json, "schema", "flashattn.check/1");
    json_text(json, "device", device);
    json_text(json, "device_name", info->name);
    json_text(json, "isa", info->isa);
    json_whole(json, "threads", info->num_threads);
    json_bool(json, "quick", flags->quick);
    json_unsigned(json, "seed", flags->seed);
    json_open(json, "dtypes", '[');
    for (int t = 0; t < flags->dtype.count; t++)
        json_text(json, NULL, cli_dtype_name((flash_attn_dtype)flags->dtype.value[t]));
    json_close(json, ']');
    json_open(json, "groups", '[');
}

static void end(check_run *run)
{
    const check_count *total = &run->total;
    if (!run->flags->json) {
        printf("%d passed, %d failed, %d skipped\n", total->passed, total->failed, total->skipped);
        return;
    }
    cli_json *json = &run->json;
    json_close(json, ']');
    json_open(json, "failures", '[');
    for (int n = 0; n < total->failed; n++) {
        json_open(json, NULL, '{');
        json_text(json, "group", run->failures[n].of->group);
        json_text(json, "case", run->failures[n].of->name);
        json_text(json, "dtype", cli_dtype_name(run->failures[n].dtype));
        json_text(json, "reason", run->failures[n].reason);
        json_close(json, '}');
    }
    json_close(json, ']');
    json_whole(json, "passed", total->passed);
    json_whole(json, "failed", total->failed);
    json_whole(json, "skipped", total->skipped);
    json_close(json, '}');
}

static int run_check(const check_flags *flags, flash_attn_context *context)
{
    check_run run = {
        .flags = flags, .device = {.context = context, .device = flags->where.device.device}, .json = {.file = stdout}};
    int                    num_cases = 0;
    flash_attn_device_info info      = {0};
    flash_attn_status      status    = flash_attn_get_device_info(context, run.device.device, &info);
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("check", status);
    cli_gpu    *gpu    = NULL;
    case_memory memory = {.upload = cli_gpu_upload, .download = cli_gpu_download, .release = cli_gpu_release};
    if (run.device.device.type == FLASH_ATTN_CUDA) {
        if (cli_gpu_open(run.device.device.index, &gpu) != CLI_GO_ON)
            return CLI_REFUSED;
        memory.user       = gpu;
        run.device.memory = &memory;
    }
    for (int n = 0; n < num_test_cases; n++)
        num_cases += is_wanted(flags, &test_cases[n]);
    run.progress = cli_progress_start((int64_t)num_cases * (flags->quick ? 1 : flags->dtype.count));
    begin(&run, &info);
    int go_on = run_groups(&run);
    cli_progress_clear(&run.progress);
    if (go_on == CLI_GO_ON)
        end(&run);
    free(run.failures);
    cli_gpu_close(gpu);
    return go_on != CLI_GO_ON ? go_on : run.total.failed ? CLI_CHECK_FAILED : CLI_OK;
}

int cli_check(int argc, char **argv)
{
    check_flags         flags    = {.seed = 1, .dtype = {3, {FLASH_ATTN_F32, FLASH_ATTN_F16, FLASH_ATTN_BF16}}};
    const cli_group     groups[] = {{"options", check_options, &flags}, {"where", cli_where_options, &flags.where}};
    flash_attn_context *context  = NULL;
    int                 go_on    = cli_parse(&check_help, groups, 2, argc, argv);
    if (go_on == CLI_GO_ON)
        go_on = check_names(&flags);
    if (go_on == CLI_GO_ON)
        go_on = cli_make_context(&flags.where, &context);
    if (go_on != CLI_GO_ON)
        return go_on;
    int exit_status = run_check(&flags, context);
    flash_attn_destroy(context);
    return exit_status;
}
