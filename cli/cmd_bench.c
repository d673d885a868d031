/* flashattn bench: standard attention against the library, checked, then timed in turns. */
#include "bench_ladder.h"
#include "bench_report.h"
#include "bench_shape.h"
#include "cli.h"
#include "options.h"
#include "problem.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

typedef struct bench_flags {
    cli_list       seqlen, head_dim, dtype, threads;
    int64_t        seqlen_q, batch, heads, heads_k;
    int            masks, passes; /* bits: 1 the first, 2 the second */
    cli_device     device;
    flash_attn_isa isa;
    bool           no_amx_split, no_standard, quick;
    int64_t        memory_limit_bytes;
    cli_number     seconds;
    uint64_t       seed;
    const char    *json, *csv, *kernel;
    bench_options  options;
} bench_flags;

/* One or both of two words, as bits. */
static const char *parse_two(const char *text, void *field, const char *first, const char *second)
{
    *(int *)field = strcmp(text, first) == 0 ? 1 : strcmp(text, second) == 0 ? 2 : strcmp(text, "both") == 0 ? 3 : 0;
    return NULL;
}

static const char *parse_masks(const char *text, void *field)
{
    parse_two(text, field, "full", "causal");
    return *(int *)field ? NULL : "full, causal or both";
}

static const char *parse_passes(const char *text, void *field)
{
    parse_two(text, field, "forward", "backward");
    return *(int *)field ? NULL : "forward, backward or both";
}

#define FIELD(name) offsetof(bench_flags, name)
static const cli_option bench_flag_table[] = {
    {"seqlen", "LIST", cli_parse_counts, FIELD(seqlen), "lengths; default 512,1024,2048,4096"},
    {"seqlen-q", "N", cli_parse_count, FIELD(seqlen_q), "queries, if not as many as keys: 1 is decoding"},
    {"head-dim", "LIST", cli_parse_counts, FIELD(head_dim), "default 64,128"},
    {"heads", "N", cli_parse_count, FIELD(heads), "query heads; default 4, with --kernel 2048 / head_dim"},
    {"heads-k", "N", cli_parse_count, FIELD(heads_k), "key heads; default: as --heads"},
    {"batch", "N", cli_parse_count, FIELD(batch), "default 1, with --kernel 16384 / seqlen"},
    {"dtype", "LIST", cli_parse_dtypes, FIELD(dtype), "some of f32,f16,bf16; default f32,bf16"},
    {"mask", "WHICH", parse_masks, FIELD(masks), "full, causal or both; default both"},
    {"pass", "WHICH", parse_passes, FIELD(passes), "forward, backward or both; default both"},
    {"threads", "LIST", cli_parse_counts, FIELD(threads), "default: all cores that this process may use"},
    {"device", "NAME", cli_parse_device, FIELD(device), "cpu or reference; with --kernel cuda or cuda:N"},
    {"kernel", "LIST", cli_parse_text, FIELD(kernel),
     "GPU kernels by name instead: the ladder's rungs k1,fa1,k2,k3.1,\nk3.2,k3.3,k4.1,k4.2,k5,k6,k7,k8,fd, or all of them, or "
     "forward_sm80,\nforward_sm90"},
    {"isa", "TIER", cli_parse_isa, FIELD(isa), "highest tier: auto, scalar, neon, neon-bf16, avx2, avx512, avx512-bf16, amx, amx-fp16"},
    {"no-amx-split", NULL, cli_parse_switch, FIELD(no_amx_split), "never run f32 and f16 as bfloat16 pieces on AMX"},
    {"no-standard", NULL, cli_parse_switch, FIELD(no_standard), "leave out standard attention"},
    {"memory-limit", "BYTES", cli_parse_bytes, FIELD(memory_limit_bytes),
     "skip standard attention where its matrices take more;\ndefault: a quarter of the machine's memory, 1G if "
     "unknown"},
    {"seconds", "X", cli_parse_number, FIELD(seconds), "time each row for this long; default 1"},
    {"seed", "N", cli_parse_seed, FIELD(seed), "of the random inputs"},
    {"quick", NULL, cli_parse_switch, FIELD(quick), "a small table in under 20 s on two cores"},
    {"json", "FILE", cli_parse_text, FIELD(json), "write JSON; '-': to stdout, with the table on stderr"},
    {"csv", "FILE", cli_parse_text, FIELD(csv), "write CSV; '-' likewise"},
    {0},
};
#undef FIELD

static const cli_help bench_help = {
    .command  = "bench",
    .usage    = "[--quick] [options]",
    .about    = "Time standard attention (three passes, S and P in memory) against flashattn in turns, after\n"
                "checking both against the formula in double. GFLOP/s count 4 s^2 d heads batch, half of it when\n"
                "causal, 2.5 times for the backward; %FMA and %AMX (%BF16 with AVX512_BF16) are of the peaks measured\n"
                "in the same run. With several numbers of threads eff.% is parallel efficiency against the first of\n"
                "them; of peak: the same, corrected by how much the peaks have grown. With options of the problem\n"
                "flashattn alone is checked and timed.",
    .examples = "  flashattn bench --quick\n"
                "  flashattn bench --seqlen 1024,4096,16384 --head-dim 128 --dtype bf16 --json bench.json\n"
                "  flashattn bench --seqlen-q 1 --seqlen 32768 --heads 32 --heads-k 8 --pass forward\n"
                "  flashattn bench --threads 1,2,4 --isa avx2 --mask causal --csv bench.csv\n"
                "  flashattn bench --threads 1,2,4,8,16 --seqlen 8192 --no-standard\n"
                "  flashattn bench --softcap 30 --window 1024,0 --seqlen 4096 --dtype bf16\n"
                "  flashattn bench --kernel all\n"
                "  flashattn bench --kernel k2,fd,forward_sm80 --seqlen-q 1 --seqlen 8192,65536\n"
                "  flashattn bench --kernel k4.2,k6,forward_sm80 --head-dim 128 --seqlen 1024,8192 --json ladder.json",
};

static void set_default(cli_list *list, int count, const int64_t *values)
{
    if (list->count == 0) {
        list->count = count;
        memcpy(list->value, values, (size_t)count * sizeof *values);
    }
}

/* Numbers from 1; from here on 0 is what was not given. */
static int check_numbers(bench_flags *flags)
{
    const struct {
        const char *name;
        int64_t    *number;
    } numbers[] = {{"batch", &flags->batch},
                   {"heads", &flags->heads},
                   {"heads-k", &flags->heads_k},
                   {"seqlen-q", &flags->seqlen_q}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (*numbers[i].number == 0)
            return cli_fail_usage(&bench_help, "--%s 0: expected a number from 1", numbers[i].name);
        if (*numbers[i].number < 0)
            *numbers[i].number = 0;
    }
    if (flags->seconds.given && flags->seconds.value < 0)
        return cli_fail_usage(&bench_help, "--seconds %g: expected a time from 0", flags->seconds.value);
    return CLI_GO_ON;
}

/* --kernel: the GPU's kernels, with defaults of their own; the options that mean nothing there are refused. */
static int run_kernels(bench_flags *flags)
{
    static const int64_t lengths[] = {8192}, dims[] = {64, 128}, dtypes[] = {FLASH_ATTN_BF16};
    const char          *foreign = flags->threads.count                 ? "--threads"
                                   : flags->isa != 0                    ? "--isa"
                                   : flags->no_amx_split                ? "--no-amx-split"
                                   : flags->no_standard                 ? "--no-standard"
                                   : flags->memory_limit_bytes >= 0     ? "--memory-limit"
                                   : flags->quick                       ? "--quick"
                                   : flags->csv                         ? "--csv"
                                   : flags->passes & 2                  ? "--pass backward"
                                   : bench_has_options(&flags->options) ? "an option of the problem"
                                                                        : NULL;
    if (foreign)
        return cli_fail_usage(&bench_help, "%s does not go with --kernel", foreign);
    if (flags->device.given && flags->device.device.type != FLASH_ATTN_CUDA)
        return cli_fail_usage(&bench_help, "--kernel runs on the GPU; expected --device cuda or cuda:N");
    set_default(&flags->seqlen, 1, lengths);
    set_default(&flags->head_dim, 2, dims);
    set_default(&flags->dtype, 1, dtypes);
    const ladder_request request = {.kernels  = flags->kernel,
                                    .seqlen   = flags->seqlen,
                                    .head_dim = flags->head_dim,
                                    .dtype    = flags->dtype,
                                    .seqlen_q = flags->seqlen_q,
                                    .batch    = flags->batch,
                                    .heads    = flags->heads,
                                    .heads_k  = flags->heads_k,
                                    .masks    = flags->masks ? flags->masks : 3,
                                    .device   = flags->device.device.index,
                                    .seconds  = flags->seconds.given ? flags->seconds.value : 0.5,
                                    .seed     = flags->seed,
                                    .json     = flags->json};
    return bench_ladder(&request);
}

static int complete(bench_flags *flags)
{
    static const int64_t lengths[] = {512, 1024, 2048, 4096}, quick_lengths[] = {1024, 2048}, dims[] = {64, 128},
                         dtypes[] = {FLASH_ATTN_F32, FLASH_ATTN_BF16}, all_threads[] = {0};
    set_default(&flags->seqlen, flags->quick ? 2 : 4, flags->quick ? quick_lengths : lengths);
    set_default(&flags->head_dim, 2, dims);
    set_default(&flags->dtype, 2, dtypes);
    set_default(&flags->threads, 1, all_threads);
    flags->batch     = flags->batch ? flags->batch : 1;
    flags->heads     = flags->heads ? flags->heads : 4;
    bool masks_given = flags->masks != 0;
    flags->masks     = flags->options.window.given ? 1 : masks_given ? flags->masks : flags->quick ? 2 : 3;
    flags->passes    = flags->passes ? flags->passes : 3;
    flags->heads_k   = flags->heads_k ? flags->heads_k : flags->heads;
    if (!flags->seconds.given)
        flags->seconds.value = flags->quick ? 0.2 : 1;
    if (flags->heads % flags->heads_k != 0)
        return cli_fail_usage(&bench_help, "--heads %lld is not a multiple of --heads-k %lld", (long long)flags->heads,
                              (long long)flags->heads_k);
    for (int i = 0; i < flags->head_dim.count; i++)
        if (flags->head_dim.value[i] > 576)
            return cli_fail_usage(&bench_help, "--head-dim %lld: expected 1 to 576",
                                  (long long)flags->head_dim.value[i]);
    if (flags->options.window.given && masks_given)
        return cli_fail_usage(&bench_help, "--mask and --window exclude each other; a causal window is --window L,0");
    for (int i = 0; i < flags->seqlen.count; i++) {
        int64_t seqlen = flags->seqlen.value[i];
        if (flags->options.blocks > (flags->seqlen_q && flags->seqlen_q < seqlen ? flags->seqlen_q : seqlen))
            return cli_fail_usage(&bench_help, "--blocks %lld: more than there are queries or keys at --seqlen %lld",
                                  (long long)flags->options.blocks, (long long)seqlen);
    }
    if (flags->device.device.type == FLASH_ATTN_CUDA)
        return cli_fail_usage(&bench_help, "--device cuda: standard attention here is the CPU's; expected cpu or "
                                           "reference, or --kernel for the GPU's kernels");
    if (flags->json && flags->csv && strcmp(flags->json, "-") == 0 && strcmp(flags->csv, "-") == 0)
        return cli_fail_usage(&bench_help, "--json - and --csv - would mix on stdout");
    if (flags->json && flags->csv && cli_same_file(flags->json, flags->csv))
        return cli_fail_usage(&bench_help, "--json and --csv are the same file");
    return CLI_GO_ON;
}

/* ---- all shapes at one number of threads ---- */

typedef struct bench_run {
    const bench_flags *flags;
    bench_report       report;
    bench_settings     settings;
    cli_progress       progress;
    int                num_rows, num_wrong, num_done;
    const char        *tier; /* of the context */
} bench_run;

enum { QUICK_S = 8 }; /* of the 20 s that --quick may take */

static int run_shape(bench_run *run, const bench_shape *shape)
{
    static const char *const names[2] = {"forward", "backward"};
    bool                     backward = run->flags->passes & 2;
    bench_arrays             arrays;
    char                     what[96];
    int                      go_on = bench_open(&arrays, shape, &run->settings, backward);
    for (int pass = 0; pass < 2 && go_on == CLI_GO_ON; pass++) {
        bench_row row;
        bool      wanted = run->flags->passes & (1 << pass);
        snprintf(what, sizeof what, "%s %s d=%lld %s s=%lld", names[pass], cli_dtype_name(shape->dtype),
                 (long long)shape->head_dim, bench_mask_name(shape), (long long)shape->seqlen_k);
        cli_progress_show(&run->progress, run->num_done, what);
        if (pass == 0 && !wanted) { /* the backward reads the forward's results, on both sides */
            bench_settings untimed = run->settings;
            untimed.least_repeats  = 1;
            untimed.seconds        = 0;
            go_on                  = bench_measure(&arrays, &untimed, FLASH_ATTN_FORWARD, &row);
            continue;
        }
        if (!wanted)
            break;
        /* A slow machine gets fewer repeats rather than a long wait. */
        if (run->flags->quick && cli_seconds() - run->progress.start_s > QUICK_S)
            run->settings.least_repeats = 1;
        cli_measure_peaks(&run->report.peaks, run->settings.pool, run->settings.seconds > 0 ? 12 : 1, run->tier);
        go_on = bench_measure(&arrays, &run->settings, (flash_attn_pass)pass, &row);
        cli_progress_clear(&run->progress);
        run->num_done++;
        if (go_on == CLI_GO_ON) {
            bench_report_row(&run->report, &row);
            run->num_rows++;
            run->num_wrong += !row.right;
        }
    }
    if (arrays.memory[0])
        bench_close(&arrays);
    return go_on;
}

static int check_shape(bench_run *run, const bench_shape *shape)
{
    return bench_check_shape(shape, run->settings.device, run->flags->passes);
}

static int each_shape(bench_run *run, int (*visit)(bench_run *, const bench_shape *))
{
    const bench_flags *flags = run->flags;
    for (int t = 0; t < flags->dtype.count; t++)
        for (int d = 0; d < flags->head_dim.count; d++)
            for (int mask = 0; mask < 2; mask++)
                for (int s = 0; s < flags->seqlen.count; s++) {
                    int64_t     seqlen = flags->seqlen.value[s];
                    bench_shape shape  = {.dtype    = (flash_attn_dtype)flags->dtype.value[t],
                                          .batch    = flags->batch,
                                          .heads    = flags->heads,
                                          .heads_k  = flags->heads_k,
                                          .seqlen_q = flags->seqlen_q ? flags->seqlen_q : seqlen,
                                          .seqlen_k = seqlen,
                                          .head_dim = flags->head_dim.value[d],
                                          .causal   = mask == 1,
                                          .options  = flags->options};
                    if (!(flags->masks & (1 << mask)))
                        continue;
                    int go_on = visit(run, &shape);
                    if (go_on != CLI_GO_ON)
                        return go_on;
                }
    return CLI_GO_ON;
}

/* threads 0: as many as the context takes. The table's head is printed once, by the first. */
static int run_at_threads(bench_run *run, int64_t threads, bool first)
{
    const bench_flags     *flags   = run->flags;
    cli_where_flags        where   = {.isa = flags->isa, .threads = threads, .no_amx_split = flags->no_amx_split};
    flash_attn_device      cpu     = {.type = FLASH_ATTN_CPU};
    flash_attn_device_info info    = {0};
    flash_attn_context    *context = NULL;
    int                    go_on   = cli_make_context(&where, &context);
    if (go_on != CLI_GO_ON)
        return go_on;
    flash_attn_status status = flash_attn_get_device_info(context, cpu, &info);
    if (status != FLASH_ATTN_OK) {
        flash_attn_destroy(context);
        return cli_fail_library("bench", status);
    }
    run->settings.context            = context;
    run->settings.memory_limit_bytes = flags->memory_limit_bytes >= 0 ? flags->memory_limit_bytes
                                       : info.memory_bytes > 0        ? info.memory_bytes / 4
                                                                      : (int64_t)1 << 30;
    run->settings.pool               = cli_pool_create(info.num_threads);
    if (!run->settings.pool)
        go_on = cli_fail("bench: %d threads are not to be had", info.num_threads);
    else {
        cli_progress_show(&run->progress, run->num_done, "the machine's peaks");
        cli_peaks peaks = {0};
        run->tier       = info.isa;
        cli_measure_peaks(&peaks, run->settings.pool, run->settings.seconds > 0 ? 40 : 2, run->tier); /* 0: whoever asks for no time wants no figures */
        cli_progress_clear(&run->progress);
        if (first)
            bench_report_begin(&run->report, &info, cli_device_name(flags->device.device), &flags->options);
        bench_report_threads(&run->report, info.num_threads, peaks);
        go_on = each_shape(run, run_shape);
    }
    cli_pool_destroy(run->settings.pool);
    flash_attn_destroy(context);
    return go_on;
}

/* What the library would refuse, before a file is opened or a line printed. */
static int check_all(bench_run *run)
{
    int go_on = each_shape(run, check_shape);
    for (int i = 0; i < run->flags->threads.count && go_on == CLI_GO_ON; i++) {
        flash_attn_context *context = NULL;
        cli_where_flags     where   = {.isa = run->flags->isa, .threads = run->flags->threads.value[i]};
        go_on                       = cli_make_context(&where, &context);
        flash_attn_destroy(context);
    }
    return go_on;
}

static int check_file(const char *option, const char *path)
{
    return path && strcmp(path, "-") != 0 ? cli_check_place(option, path) : CLI_GO_ON;
}

static int open_file(const char *path, cli_staged *staged, FILE **file)
{
    if (path)
        *file = strcmp(path, "-") == 0 ? stdout : cli_stage(path, staged) ? fopen(staged->path, "w") : NULL;
    if (path && !*file)
        return cli_fail("bench: %s cannot be written", path);
    return CLI_GO_ON;
}

int cli_bench(int argc, char **argv)
{
    bench_flags     flags    = {.seqlen_q = -1, .batch = -1, .heads = -1, .heads_k = -1, .memory_limit_bytes = -1, .seed = 1};
    const cli_group groups[] = {{"options", bench_flag_table, &flags},
                                {"options of the problem", bench_option_table, &flags.options}};
    bench_run       run      = {.flags = &flags};
    static cli_staged staged[2]; /* json, csv */
    int             go_on    = cli_parse(&bench_help, groups, 2, argc, argv);
    if (go_on == CLI_GO_ON)
        go_on = check_numbers(&flags);
    if (go_on == CLI_GO_ON && flags.kernel)
        return run_kernels(&flags);
    if (go_on == CLI_GO_ON)
        go_on = complete(&flags);
    if (go_on != CLI_GO_ON)
        return go_on;
    run.settings = (bench_settings){.device        = flags.device.device,
                                    .with_standard = !flags.no_standard && !bench_has_options(&flags.options),
                                    .seconds       = flags.seconds.value,
                                    .least_repeats = 3,
                                    .seed          = flags.seed};
    go_on        = check_all(&run);
    if (go_on == CLI_GO_ON)
        go_on = check_file("json", flags.json);
    if (go_on == CLI_GO_ON)
        go_on = check_file("csv", flags.csv);
    if (go_on == CLI_GO_ON)
        go_on = open_file(flags.json, &staged[0], &run.report.json_file);
    if (go_on == CLI_GO_ON)
        go_on = open_file(flags.csv, &staged[1], &run.report.csv);
    if (go_on != CLI_GO_ON) {
        if (run.report.json_file && run.report.json_file != stdout)
            cli_finish(run.report.json_file, &staged[0], false);
        return go_on;
    }

    bool to_stdout     = run.report.json_file == stdout || run.report.csv == stdout;
    run.report.table   = to_stdout ? stderr : stdout;
    run.report.quick   = flags.quick;
    run.report.scaling = flags.threads.count > 1;
    int passes = (flags.passes & 1) + (flags.passes >> 1), masks = (flags.masks & 1) + (flags.masks >> 1);
    run.progress = cli_progress_start((int64_t)flags.threads.count * flags.dtype.count * flags.head_dim.count *
                                      flags.seqlen.count * passes * masks);
    for (int i = 0; i < flags.threads.count && go_on == CLI_GO_ON; i++)
        go_on = run_at_threads(&run, flags.threads.value[i], i == 0);
    cli_progress_clear(&run.progress);
    if (go_on == CLI_GO_ON)
        bench_report_end(&run.report, run.num_rows, run.num_wrong);
    FILE *files[] = {run.report.json_file, run.report.csv};
    for (int i = 0; i < 2; i++)
        if (files[i] && files[i] != stdout && !cli_finish(files[i], &staged[i], go_on == CLI_GO_ON) && go_on == CLI_GO_ON)
            go_on = cli_fail("bench: %s could not be written", i == 0 ? flags.json : flags.csv);
    return go_on != CLI_GO_ON ? go_on : run.num_wrong ? CLI_CHECK_FAILED : CLI_OK;
}
