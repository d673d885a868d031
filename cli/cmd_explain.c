/* flashattn explain: the kernel, tiles, work and memory of a call, without running it. */
#include "cli.h"
#include "json.h"
#include "options.h"
#include "problem.h"
#include "shape.h"

typedef struct explain_flags {
    bool backward, json;
} explain_flags;

#define FIELD(name) offsetof(explain_flags, name)
static const cli_option explain_options[] = {
    {"backward", NULL, cli_parse_switch, FIELD(backward), "the backward pass; default: the forward"},
    {"json", NULL, cli_parse_switch, FIELD(json), "print JSON"},
    {0},
};
#undef FIELD

static const cli_help explain_help = {
    .command  = "explain",
    .usage    = "[shape] [problem] [where] [--backward] [--json]",
    .about    = "Print what a call would run: the kernel and why, its tiles, tasks, memory, operations and\n"
                "bytes. Nothing is computed.",
    .examples = "  flashattn explain --seqlen 8192 --heads 16 --head-dim 128 --dtype bf16 --causal\n"
                "  flashattn explain --seqlen-q 1 --seqlen-k 32768 --heads 32 --heads-k 8 --json",
};

static void print_explanation(const flash_attn_explanation *e)
{
    printf("kernel      %s\n", e->kernel);
    printf("reason      %s\n", e->reason);
    printf("tiles       %d queries x %d keys\n", e->tile_q, e->tile_k);
    printf("splits      %d\n", e->num_splits);
    printf("threads     %d\n", e->num_threads);
    printf("tasks       %lld\n", (long long)e->num_tasks);
    printf("scratch     %lld bytes each\n", (long long)e->scratch_bytes);
    printf("workspace   %lld bytes\n", (long long)e->workspace_bytes);
    printf("operations  %.6g GFLOP\n", e->flops * 1e-9);
    printf("traffic     %.6g MB, %.4g FLOP a byte\n", e->bytes * 1e-6, e->bytes > 0 ? e->flops / e->bytes : 0);
}

static void write_explanation(const flash_attn_explanation *e, bool backward)
{
    cli_json json = {.file = stdout};
    json_open(&json, NULL, '{');
    json_text(&json, "schema", "flashattn.explain/1");
    json_text(&json, "pass", backward ? "backward" : "forward");
    json_text(&json, "kernel", e->kernel);
    json_text(&json, "reason", e->reason);
    json_whole(&json, "tile_q", e->tile_q);
    json_whole(&json, "tile_k", e->tile_k);
    json_whole(&json, "num_splits", e->num_splits);
    json_whole(&json, "num_threads", e->num_threads);
    json_whole(&json, "num_tasks", e->num_tasks);
    json_whole(&json, "scratch_bytes", e->scratch_bytes);
    json_whole(&json, "workspace_bytes", e->workspace_bytes);
    json_real(&json, "flops", e->flops);
    json_real(&json, "bytes", e->bytes);
    json_close(&json, '}');
}

int cli_explain(int argc, char **argv)
{
    explain_flags     own      = {0};
    cli_shape_flags   shape    = CLI_SHAPE_DEFAULTS;
    cli_problem_flags flags    = {0};
    cli_where_flags   where    = {0};
    const cli_group   groups[] = {{"options", explain_options, &own},
                                  {"shape", cli_shape_options, &shape},
                                  {"problem", cli_problem_options, &flags},
                                  {"where", cli_where_options, &where}};
    int               go_on    = cli_parse(&explain_help, groups, 4, argc, argv);
    if (go_on != CLI_GO_ON)
        return go_on;

    cli_problem         owner       = {0};
    flash_attn_context *context     = NULL;
    int                 exit_status = CLI_REFUSED;
    owner.problem.device            = where.device.device;
    cli_shape_apply(&shape, &owner.problem);
    if (cli_problem_apply(&owner, &flags, shape.dtype) == CLI_GO_ON &&
        cli_shape_pages(&explain_help, &shape, &owner.problem) == CLI_GO_ON &&
        cli_make_context(&where, &context) == CLI_GO_ON) {
        flash_attn_explanation explanation = {0};
        flash_attn_pass        pass        = own.backward ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD;
        flash_attn_status      status      = flash_attn_explain(context, &owner.problem, pass, &explanation);
        if (status != FLASH_ATTN_OK)
            cli_fail_library("explain", status);
        else {
            own.json ? write_explanation(&explanation, own.backward) : print_explanation(&explanation);
            exit_status = CLI_OK;
        }
    }
    flash_attn_destroy(context);
    cli_problem_free(&owner);
    return exit_status;
}
