/* flashattn explain: the kernel, tiles, work and memory of a call, without running it. */
#include "cli.h"
#include "json.h"
#include "options.h"
#include "problem.h"

typedef struct explain_flags {
    int64_t   batch, seqlen, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v, page_size;
    cli_dtype dtype;
    bool      backward, json;
} explain_flags;

#define FIELD(name) offsetof(explain_flags, name)
static const cli_option shape_options[] = {
    {"batch", "N", cli_parse_count, FIELD(batch), "default 1"},
    {"seqlen", "N", cli_parse_count, FIELD(seqlen), "queries and keys; default 1024"},
    {"seqlen-q", "N", cli_parse_count, FIELD(seqlen_q), "queries; with --cu-seqlens-q: of all sequences"},
    {"seqlen-k", "N", cli_parse_count, FIELD(seqlen_k), "keys; with --cu-seqlens-k: of all sequences"},
    {"heads", "N", cli_parse_count, FIELD(heads), "query heads; default 8"},
    {"heads-k", "N", cli_parse_count, FIELD(heads_k), "key heads; default: as --heads"},
    {"head-dim", "N", cli_parse_count, FIELD(head_dim), "default 64"},
    {"head-dim-v", "N", cli_parse_count, FIELD(head_dim_v), "default: as --head-dim"},
    {"dtype", "TYPE", cli_parse_dtype, FIELD(dtype), "f32, f16, bf16 or f8e4m3; default f32"},
    {"page-size", "N", cli_parse_count, FIELD(page_size), "keys of a page; with --page-table"},
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

/* Shapes of q, k, v, o and lse without data. A length of 0 is a length, so what was not given is -1. */
static void set_shapes(const explain_flags *flags, flash_attn_problem *p)
{
    int64_t          seqlen_q = flags->seqlen_q >= 0 ? flags->seqlen_q : flags->seqlen;
    int64_t          seqlen_k = flags->seqlen_k >= 0 ? flags->seqlen_k : flags->seqlen;
    int64_t          heads_k  = flags->heads_k ? flags->heads_k : flags->heads;
    int64_t          dim_v    = flags->head_dim_v ? flags->head_dim_v : flags->head_dim;
    flash_attn_dtype dtype    = flags->dtype.dtype;
    p->q   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_q, flags->heads, flags->head_dim}};
    p->k   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_k, heads_k, flags->head_dim}};
    p->v   = (flash_attn_tensor){.dtype = dtype, .shape = {flags->batch, seqlen_k, heads_k, dim_v}};
    p->o   = (flash_attn_tensor){.dtype = dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_BF16 : dtype};
    p->lse = (flash_attn_tensor){.dtype = FLASH_ATTN_F32};
}

/* A paged cache is as large as the highest page of the table asks for. */
static int set_pages(const explain_flags *flags, int64_t batch, flash_attn_problem *p)
{
    if ((p->pages.table != NULL) != (flags->page_size > 0))
        return cli_fail_usage(&explain_help, "--page-table and --page-size go together");
    int64_t num_pages = 0;
    if (p->pages.table) {
        for (int64_t n = 0; n < batch * p->pages.pages_per_seq; n++)
            num_pages = p->pages.table[n] >= num_pages ? (int64_t)p->pages.table[n] + 1 : num_pages;
        p->k.shape[0] = p->v.shape[0] = num_pages;
        p->k.shape[1] = p->v.shape[1] = flags->page_size;
    }
    return CLI_GO_ON;
}

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
    explain_flags     shape = {.batch = 1, .seqlen = 1024, .seqlen_q = -1, .seqlen_k = -1, .heads = 8, .head_dim = 64};
    cli_problem_flags flags = {0};
    cli_where_flags   where = {0};
    const cli_group   groups[] = {{"shape", shape_options, &shape},
                                  {"problem", cli_problem_options, &flags},
                                  {"where", cli_where_options, &where}};
    int               go_on    = cli_parse(&explain_help, groups, 3, argc, argv);
    if (go_on != CLI_GO_ON)
        return go_on;

    cli_problem         owner       = {0};
    flash_attn_context *context     = NULL;
    int                 exit_status = CLI_REFUSED;
    owner.problem.device            = where.device.device;
    set_shapes(&shape, &owner.problem);
    if (cli_problem_apply(&owner, &flags, shape.dtype) == CLI_GO_ON &&
        set_pages(&shape, owner.problem.cu_seqlens_q ? owner.problem.batch : shape.batch, &owner.problem) ==
            CLI_GO_ON &&
        cli_make_context(&where, &context) == CLI_GO_ON) {
        flash_attn_explanation explanation = {0};
        flash_attn_pass        pass        = shape.backward ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD;
        flash_attn_status      status      = flash_attn_explain(context, &owner.problem, pass, &explanation);
        if (status != FLASH_ATTN_OK)
            cli_fail_library("explain", status);
        else {
            shape.json ? write_explanation(&explanation, shape.backward) : print_explanation(&explanation);
            exit_status = CLI_OK;
        }
    }
    flash_attn_destroy(context);
    cli_problem_free(&owner);
    return exit_status;
}
