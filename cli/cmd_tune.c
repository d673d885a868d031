/* flashattn tune: measure which tiles are fastest on this machine, and keep them for later runs. */
#include "cli.h"
#include "json.h"
#include "options.h"
#include "problem.h"

#include <string.h>

typedef struct tune_flags {
    const char    *file;
    cli_number     seconds;
    flash_attn_isa isa;
    int64_t        threads;
    bool           dry_run, no_amx_split, json;
} tune_flags;

#define FIELD(name) offsetof(tune_flags, name)
static const cli_option tune_options[] = {
    {"file", "FILE", cli_parse_text, FIELD(file),
     "where to keep them; default: FLASH_ATTN_TUNE_FILE, else\nflashattn/cpu-tune.txt in the user's cache folder"},
    {"dry-run", NULL, cli_parse_switch, FIELD(dry_run), "measure and print, keep nothing"},
    {"seconds", "X", cli_parse_number, FIELD(seconds), "about how long to measure, from 1 (every candidate once at least); default 30"},
    {"isa", "TIER", cli_parse_isa, FIELD(isa), "the tier to measure; default: the best of this machine"},
    {"threads", "N", cli_parse_count, FIELD(threads), "default: all cores that this process may use"},
    {"no-amx-split", NULL, cli_parse_switch, FIELD(no_amx_split), "never run f32 and f16 as bfloat16 pieces on AMX"},
    {"json", NULL, cli_parse_switch, FIELD(json), "print JSON"},
    {0},
};
#undef FIELD

static const cli_help tune_help = {
    .command  = "tune",
    .usage    = "[--dry-run] [--file FILE]",
    .about    = "Measure which tiles of queries and keys are fastest on this machine, for each tier, pass and head\n"
                "dim, and the splits of long keys; print what was found beside the default; keep what is faster by 3%\n"
                "and more. Later runs read the file once. FLASH_ATTN_TUNE_FILE=off or the option tune_file turns that\n"
                "off; a file that is damaged, or of another processor or version, is not used.",
    .examples = "  flashattn tune\n"
                "  flashattn tune --isa avx512 --seconds 60\n"
                "  flashattn tune --dry-run --threads 1 --json",
};

typedef struct tune_output {
    flash_attn_device_info info;
    cli_json               json;
    bool                   as_json, begun;
    int                    num_changed;
} tune_output;

/* What stands before the choices: once the first is there, so that a call that is refused prints its sentence alone. */
static void begin(tune_output *out)
{
    const flash_attn_device_info *info = &out->info;
    if (out->begun)
        return;
    out->begun = true;
    if (!out->as_json) {
        printf("%s, tier %s, %d thread%s\n", info->name, info->isa, info->num_threads, info->num_threads == 1 ? "" : "s");
        printf("%-28s %10s %13s   %10s %13s   %s\n", "choice", "default", "", "found", "", "times as fast");
        return;
    }
    json_open(&out->json, NULL, '{');
    json_text(&out->json, "schema", "flashattn.tune/1");
    json_text(&out->json, "device_name", info->name);
    json_text(&out->json, "isa", info->isa);
    json_whole(&out->json, "threads", info->num_threads);
    json_open(&out->json, "choices", '[');
}

static void report(void *user, const flash_attn_tune_choice *choice)
{
    tune_output *out     = user;
    cli_json    *json    = &out->json;
    bool         changed = strcmp(choice->usual, choice->found) != 0;
    out->num_changed += changed;
    begin(out);
    if (!out->as_json) {
        printf("%-28s %10s %10.3f ms   %10s %10.3f ms   %5.2f\n", choice->name, choice->usual, choice->usual_ms,
               changed ? choice->found : "=", choice->found_ms, choice->usual_ms / choice->found_ms);
        fflush(stdout);
        return;
    }
    json_open(json, NULL, '{');
    json_text(json, "name", choice->name);
    json_text(json, "default", choice->usual);
    json_real(json, "default_ms", choice->usual_ms);
    json_text(json, "found", choice->found);
    json_real(json, "found_ms", choice->found_ms);
    json_whole(json, "num_tried", choice->num_tried);
    json_close(json, '}');
}

static int tune(flash_attn_context *context, const tune_flags *flags)
{
    tune_output       out    = {.json = {.file = stdout}, .as_json = flags->json};
    const char       *file   = flags->dry_run ? "" : flags->file;
    flash_attn_status status = flash_attn_get_device_info(context, (flash_attn_device){FLASH_ATTN_CPU, 0}, &out.info);
    if (status == FLASH_ATTN_OK)
        status = flash_attn_tune(context, file, flags->seconds.given ? flags->seconds.value : 30, report, &out);
    if (status == FLASH_ATTN_OK)
        begin(&out);
    if (out.begun && flags->json) {
        json_close(&out.json, ']');
        json_bool(&out.json, "stored", status == FLASH_ATTN_OK && !flags->dry_run);
        json_close(&out.json, '}');
    } else if (status == FLASH_ATTN_OK) {
        printf("%d choice%s faster than the default; %s\n", out.num_changed, out.num_changed == 1 ? "" : "s",
               flags->dry_run ? "nothing was kept" : "later runs use them");
    }
    return status == FLASH_ATTN_OK ? CLI_OK : cli_fail_library("tune", status);
}

int cli_tune(int argc, char **argv)
{
    tune_flags          flags   = {0};
    const cli_group     group   = {"options", tune_options, &flags};
    int                 go_on   = cli_parse(&tune_help, &group, 1, argc, argv);
    flash_attn_context *context = NULL;
    if (go_on != CLI_GO_ON)
        return go_on;
    cli_where_flags where = {.isa = flags.isa, .threads = flags.threads, .no_amx_split = flags.no_amx_split};
    if (flags.dry_run && flags.file)
        return cli_fail_usage(&tune_help, "--dry-run keeps nothing, and --file says where to keep it");
    if (cli_make_context(&where, &context) != CLI_GO_ON)
        return CLI_REFUSED;
    int exit_status = tune(context, &flags);
    flash_attn_destroy(context);
    return exit_status;
}
