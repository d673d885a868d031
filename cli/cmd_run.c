/* flashattn run: attention on .npy files, forward and, with --dout, backward. */
#include "cli.h"
#include "gpu.h"
#include "json.h"
#include "options.h"
#include "problem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct run_flags {
    const char *q, *k, *v, *o, *lse;
    const char *dout, *dq, *dk, *dv, *dbias, *dsinks;
    cli_dtype   dtype, o_dtype, grad_dtype;
    bool        json;
} run_flags;

#define FIELD(name) offsetof(run_flags, name)
static const cli_option file_options[] = {
    {"q", "FILE", cli_parse_text, FIELD(q), "queries [b, sq, hq, d]; with --cu-seqlens-q [1, total, hq, d]"},
    {"k", "FILE", cli_parse_text, FIELD(k), "keys [b, sk, hk, d]"},
    {"v", "FILE", cli_parse_text, FIELD(v), "values [b, sk, hk, dv]"},
    {"o", "FILE", cli_parse_text, FIELD(o), "write the output [b, sq, hq, dv]"},
    {"lse", "FILE", cli_parse_text, FIELD(lse), "write the logarithms of the sums, float32 [b, hq, sq]"},
    {"dout", "FILE", cli_parse_text, FIELD(dout), "the output's gradient [b, sq, hq, dv]: do the backward too"},
    {"dq", "FILE", cli_parse_text, FIELD(dq), "write the gradient of q"},
    {"dk", "FILE", cli_parse_text, FIELD(dk), "write the gradient of k"},
    {"dv", "FILE", cli_parse_text, FIELD(dv), "write the gradient of v"},
    {"dbias", "FILE", cli_parse_text, FIELD(dbias), "write the gradient of --bias"},
    {"dsinks", "FILE", cli_parse_text, FIELD(dsinks), "write the gradient of --sinks"},
    {"dtype", "TYPE", cli_parse_dtype, FIELD(dtype), "what plain 16-bit or 8-bit words are: bf16, f16, f8e4m3"},
    {"o-dtype", "TYPE", cli_parse_dtype, FIELD(o_dtype), "of --o; default q's (bf16 for f8e4m3)"},
    {"grad-dtype", "TYPE", cli_parse_dtype, FIELD(grad_dtype), "of --dq, --dk, --dv and --dbias; default the inputs'"},
    {"json", NULL, cli_parse_switch, FIELD(json), "print JSON: what was written"},
    {0},
};
#undef FIELD

static const cli_help run_help = {
    .command  = "run",
    .usage    = "--q FILE --k FILE --v FILE --o FILE [options]",
    .about    = "Attention on .npy files of float32, float16, bfloat16 or float8 (e4m3): little-endian, C or Fortran\n"
                "order. bfloat16 is stored as ml_dtypes does ('<V2'). Nothing is written unless all went well.",
    .examples = "  flashattn run --q q.npy --k k.npy --v v.npy --causal --o o.npy --lse lse.npy\n"
                "  flashattn run --q q.npy --k k.npy --v v.npy --dout do.npy --dq dq.npy --dk dk.npy --dv dv.npy\n"
                "  flashattn run --q q.npy --k k.npy --v v.npy --window 256,0 --softcap 30 --sinks s.npy --o o.npy\n"
                "  flashattn run --q q.npy --k k.npy --v v.npy --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --o o.npy",
};

/* An output: the file, the tensor, and how many dimensions the file has. */
typedef struct run_output {
    const char              *flag, *path;
    const flash_attn_tensor *tensor;
    int                      first_dim, ndim;
} run_output;

enum { MOST_OUTPUTS = 7 };

typedef struct run_state {
    cli_problem      owner;
    flash_attn_grads grads;
    run_output       outputs[MOST_OUTPUTS];
    int              num_outputs;
} run_state;

static int check_flags(const run_flags *flags, const cli_problem_flags *problem)
{
    const char *gradients[] = {flags->dq, flags->dk, flags->dv, flags->dbias, flags->dsinks};
    bool        any         = false;
    for (size_t i = 0; i < sizeof gradients / sizeof gradients[0]; i++)
        any |= gradients[i] != NULL;
    if (!flags->q || !flags->k || !flags->v)
        return cli_fail_usage(&run_help, "--q, --k and --v are needed");
    if (!flags->o && !flags->lse && !any)
        return cli_fail_usage(&run_help, "nothing to write; give --o, --lse or a gradient");
    if (any && !flags->dout)
        return cli_fail_usage(&run_help, "a gradient needs --dout");
    if (flags->dout && !any)
        return cli_fail_usage(&run_help,
                              "--dout without a gradient to write; give --dq, --dk, --dv, --dbias or --dsinks");
    if (flags->dbias && !problem->bias)
        return cli_fail_usage(&run_help, "--dbias needs --bias");
    if (flags->dsinks && !problem->sinks)
        return cli_fail_usage(&run_help, "--dsinks needs --sinks");
    if (flags->grad_dtype.given && !flags->dout)
        return cli_fail_usage(&run_help, "--grad-dtype needs --dout");
    return CLI_GO_ON;
}

/* What is written has a place, and is the file of no other option. Each option with a text names a file. */
static int check_files(const cli_group *groups, int num_groups)
{
    static const char *const written[] = {"o", "lse", "dq", "dk", "dv", "dbias", "dsinks"};
    struct {
        const char *flag, *path;
        bool        written;
    } files[64];
    int count = 0;
    for (int g = 0; g < num_groups; g++)
        for (const cli_option *option = groups[g].options; option->name; option++) {
            const char *path = NULL;
            if (option->parse == cli_parse_text)
                memcpy(&path, (const char *)groups[g].target + option->offset, sizeof path);
            if (!path || count == (int)(sizeof files / sizeof files[0]))
                continue;
            files[count].flag    = option->name;
            files[count].path    = path;
            files[count].written = false;
            for (size_t n = 0; n < sizeof written / sizeof written[0]; n++)
                files[count].written |= strcmp(written[n], option->name) == 0;
            if (files[count].written && strcmp(path, "-") == 0)
                return cli_fail_usage(&run_help, "--%s is -, expected a file: standard output has the report", option->name);
            if (files[count].written && cli_check_place(option->name, path) != CLI_GO_ON)
                return CLI_REFUSED;
            count++;
        }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++)
            if ((files[i].written || files[j].written) && cli_same_file(files[i].path, files[j].path))
                return cli_fail_usage(&run_help, "--%s and --%s are the same file", files[j].flag, files[i].flag);
    return CLI_GO_ON;
}

static int read_inputs(const run_flags *flags, run_state *run)
{
    static const char   expected[] = "four dimensions, [batch, seqlen, heads, head_dim]";
    flash_attn_problem *p          = &run->owner.problem;
    const struct {
        const char        *field, *path;
        flash_attn_tensor *tensor;
    } inputs[] = {{"q", flags->q, &p->q},
                  {"k", flags->k, &p->k},
                  {"v", flags->v, &p->v},
                  {"dout", flags->dout, &run->grads.dout}};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (inputs[i].path && cli_problem_read(&run->owner, inputs[i].field, expected, inputs[i].path, flags->dtype,
                                               CLI_PAD_NONE, inputs[i].tensor) != CLI_GO_ON)
            return CLI_REFUSED;
    return CLI_GO_ON;
}

/* Memory for an output of this shape. Filled with 0xFF, which is NaN in each dtype: what the library left out shows. */
static int make_output(run_state *run, flash_attn_tensor *tensor, flash_attn_dtype dtype, const int64_t *shape)
{
    tensor->dtype = dtype;
    memcpy(tensor->shape, shape, sizeof tensor->shape);
    int64_t bytes = cli_tensor_bytes(tensor);
    if (bytes < 0)
        return cli_fail("an output of this shape does not fit in memory");
    tensor->data = cli_problem_own(&run->owner, malloc(bytes > 0 ? (size_t)bytes : 1), (size_t)bytes);
    if (!tensor->data)
        return CLI_REFUSED;
    memset(tensor->data, 0xFF, (size_t)bytes);
    return CLI_GO_ON;
}

static void add_output(run_state *run, const char *flag, const char *path, const flash_attn_tensor *tensor,
                       int first_dim, int ndim)
{
    if (path)
        run->outputs[run->num_outputs++] = (run_output){flag, path, tensor, first_dim, ndim};
}

static int make_outputs(const run_flags *flags, run_state *run)
{
    flash_attn_problem *p          = &run->owner.problem;
    flash_attn_grads   *g          = &run->grads;
    int64_t             o_shape[4] = {p->q.shape[0], p->q.shape[1], p->q.shape[2], p->v.shape[3]};
    int64_t             l_shape[4] = {p->q.shape[0], p->q.shape[2], p->q.shape[1], 1};
    flash_attn_dtype    o_dtype    = flags->o_dtype.given              ? flags->o_dtype.dtype
                                     : p->q.dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_BF16
                                                                       : p->q.dtype;
    if (make_output(run, &p->o, o_dtype, o_shape) != CLI_GO_ON)
        return CLI_REFUSED;
    if ((flags->lse || flags->dout) && make_output(run, &p->lse, FLASH_ATTN_F32, l_shape) != CLI_GO_ON)
        return CLI_REFUSED;
    add_output(run, "o", flags->o, &p->o, 0, 4);
    add_output(run, "lse", flags->lse, &p->lse, 0, 3);
    const struct {
        const char              *flag, *path;
        const flash_attn_tensor *of;
        flash_attn_tensor       *gradient;
        int                      first_dim, ndim;
    } gradients[] = {
        {"dq", flags->dq, &p->q, &g->dq, 0, 4},
        {"dk", flags->dk, &p->k, &g->dk, 0, 4},
        {"dv", flags->dv, &p->v, &g->dv, 0, 4},
        {"dbias", flags->dbias, &p->bias, &g->dbias, 0, 4},
        {"dsinks", flags->dsinks, &p->sinks, &g->dsinks, 1, 1},
    };
    for (size_t i = 0; i < sizeof gradients / sizeof gradients[0]; i++) {
        if (!gradients[i].path)
            continue;
        flash_attn_dtype dtype = gradients[i].gradient == &g->dsinks ? FLASH_ATTN_F32
                                 : flags->grad_dtype.given           ? flags->grad_dtype.dtype
                                                                     : gradients[i].of->dtype;
        if (make_output(run, gradients[i].gradient, dtype, gradients[i].of->shape) != CLI_GO_ON)
            return CLI_REFUSED;
        add_output(run, gradients[i].flag, gradients[i].path, gradients[i].gradient, gradients[i].first_dim,
                   gradients[i].ndim);
    }
    return CLI_GO_ON;
}

static flash_attn_status call(flash_attn_context *context, const flash_attn_problem *problem,
                              const flash_attn_grads *grads, const char **what)
{
    *what                    = "forward";
    flash_attn_status status = flash_attn_forward(context, problem, NULL);
    if (status != FLASH_ATTN_OK || !grads->dout.data)
        return status;
    *what = "backward";
    return flash_attn_backward(context, problem, grads, NULL);
}

/* ---- on a GPU: everything that the problem points to goes there, the outputs come back ---- */

enum { MOST_MEMORY = sizeof((cli_problem *)NULL)->memory / sizeof((cli_problem *)NULL)->memory[0] };

/* The copy of host memory, NULL for NULL. Slices stay on the host for every device. */
static void *moved(const cli_problem *owner, void *const *copies, const void *host)
{
    for (int n = 0; n < owner->num_memory; n++)
        if (host && owner->memory[n] == host)
            return copies[n];
    return NULL;
}

static void move_pointers(const cli_problem *owner, void *const *copies, flash_attn_problem *p, flash_attn_grads *g)
{
    flash_attn_tensor *tensors[] = {
        &p->q,         &p->k,         &p->v,    &p->o,  &p->lse, &p->bias, &p->alibi_slopes, &p->sinks, &p->descale.q,
        &p->descale.k, &p->descale.v, &g->dout, &g->dq, &g->dk,  &g->dv,   &g->dbias,        &g->dsinks};
    const int32_t **lists[] = {&p->cu_seqlens_q, &p->cu_seqlens_k,    &p->seqused_q,  &p->seqused_k,
                               &p->leftpad_k,    &p->cache_batch_idx, &p->pages.table};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        tensors[i]->data = moved(owner, copies, tensors[i]->data);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        *lists[i] = moved(owner, copies, *lists[i]);
}

static int call_on_gpu(run_state *run, flash_attn_context *context, cli_gpu *gpu)
{
    const cli_problem *owner   = &run->owner;
    flash_attn_problem problem = owner->problem;
    flash_attn_grads   grads   = run->grads;
    void              *copies[MOST_MEMORY];
    int                num_copies = 0, go_on = CLI_GO_ON;
    const char        *what;
    for (; num_copies < owner->num_memory && go_on == CLI_GO_ON; num_copies += go_on == CLI_GO_ON) {
        copies[num_copies] = cli_gpu_upload(gpu, owner->memory[num_copies], owner->memory_bytes[num_copies]);
        if (!copies[num_copies])
            go_on = cli_fail("the GPU has no room for %zu more bytes", owner->memory_bytes[num_copies]);
    }
    if (go_on == CLI_GO_ON) {
        move_pointers(owner, copies, &problem, &grads);
        flash_attn_status status = call(context, &problem, &grads, &what);
        if (status != FLASH_ATTN_OK)
            go_on = cli_fail_library(what, status);
    }
    for (int i = 0; i < run->num_outputs && go_on == CLI_GO_ON; i++) {
        const flash_attn_tensor *tensor = run->outputs[i].tensor;
        if (!cli_gpu_download(gpu, tensor->data, moved(owner, copies, tensor->data), (size_t)cli_tensor_bytes(tensor)))
            go_on = CLI_REFUSED;
    }
    while (num_copies > 0)
        cli_gpu_release(gpu, copies[--num_copies]);
    return go_on;
}

static int compute(const cli_where_flags *where, run_state *run)
{
    flash_attn_context    *context = NULL;
    flash_attn_device_info info    = {0};
    cli_gpu               *gpu     = NULL;
    const char            *what    = "device";
    if (cli_make_context(where, &context) != CLI_GO_ON)
        return CLI_REFUSED;
    flash_attn_status status = flash_attn_get_device_info(context, where->device.device, &info);
    int               go_on  = CLI_GO_ON;
    if (status == FLASH_ATTN_OK && where->device.device.type == FLASH_ATTN_CUDA) {
        go_on = cli_gpu_open(where->device.device.index, &gpu);
        if (go_on == CLI_GO_ON)
            go_on = call_on_gpu(run, context, gpu);
    } else if (status == FLASH_ATTN_OK)
        status = call(context, &run->owner.problem, &run->grads, &what);
    if (status != FLASH_ATTN_OK)
        go_on = cli_fail_library(what, status);
    flash_attn_destroy(context);
    cli_gpu_close(gpu);
    return go_on;
}

/* ---- writing ---- */

static npy_type file_type(flash_attn_dtype dtype)
{
    switch (dtype) {
    case FLASH_ATTN_F32: return NPY_F32;
    case FLASH_ATTN_F16: return NPY_F16;
    case FLASH_ATTN_BF16: return NPY_RAW16;
    case FLASH_ATTN_F8E4M3: return NPY_RAW8;
    }
    return NPY_F32;
}

/* None takes its place before all are written. */
static int write_outputs(const run_state *run)
{
    static cli_staged staged[MOST_OUTPUTS];
    char              error[NPY_ERROR_BYTES];
    int               written = 0, exit_status = CLI_GO_ON;
    for (; written < run->num_outputs && exit_status == CLI_GO_ON; written++) {
        const run_output *output = &run->outputs[written];
        if (!cli_stage(output->path, &staged[written])) {
            exit_status = cli_fail("--%s: the file's name is too long", output->flag);
            break; /* those before it are taken away below */
        }
        if (!npy_write(staged[written].path, output->tensor->data, file_type(output->tensor->dtype), output->ndim,
                       output->tensor->shape + output->first_dim, error))
            exit_status = cli_fail("--%s: %s", output->flag, error);
    }
    for (int i = 0; i < written; i++) {
        if (exit_status == CLI_GO_ON && !cli_take_place(&staged[i]))
            exit_status = cli_fail("--%s %s: %s", run->outputs[i].flag, run->outputs[i].path, strerror(errno));
        if (exit_status != CLI_GO_ON)
            cli_drop(&staged[i]);
    }
    return exit_status;
}

static void report(const run_state *run, const cli_where_flags *where, bool as_json)
{
    cli_json json = {.file = stdout};
    char     shape[160];
    if (as_json) {
        json_open(&json, NULL, '{');
        json_text(&json, "schema", "flashattn.run/1");
        json_text(&json, "device", cli_device_name(where->device.device));
        json_open(&json, "outputs", '[');
    }
    for (int i = 0; i < run->num_outputs; i++) {
        const run_output *output = &run->outputs[i];
        const char       *dtype  = cli_dtype_name(output->tensor->dtype);
        if (!as_json) {
            printf("%-6s %s %s %s\n", output->flag, output->path, dtype,
                   npy_shape_text(output->ndim, output->tensor->shape + output->first_dim, shape));
            continue;
        }
        json_open(&json, NULL, '{');
        json_text(&json, "name", output->flag);
        json_text(&json, "path", output->path);
        json_text(&json, "dtype", dtype);
        json_open(&json, "shape", '[');
        for (int dim = 0; dim < output->ndim; dim++)
            json_whole(&json, NULL, output->tensor->shape[output->first_dim + dim]);
        json_close(&json, ']');
        json_close(&json, '}');
    }
    if (as_json) {
        json_close(&json, ']');
        json_close(&json, '}');
    }
}

int cli_run(int argc, char **argv)
{
    run_flags         flags    = {0};
    cli_problem_flags problem  = {0};
    cli_where_flags   where    = {0};
    const cli_group   groups[] = {{"files", file_options, &flags},
                                  {"problem", cli_problem_options, &problem},
                                  {"where", cli_where_options, &where}};
    int               go_on    = cli_parse(&run_help, groups, 3, argc, argv);
    if (go_on == CLI_GO_ON)
        go_on = check_flags(&flags, &problem);
    if (go_on == CLI_GO_ON)
        go_on = check_files(groups, 2);
    if (go_on != CLI_GO_ON)
        return go_on;

    run_state run            = {0};
    run.owner.problem.device = where.device.device;
    bool good                = read_inputs(&flags, &run) == CLI_GO_ON &&
                cli_problem_apply(&run.owner, &problem, flags.dtype) == CLI_GO_ON &&
                make_outputs(&flags, &run) == CLI_GO_ON && compute(&where, &run) == CLI_GO_ON &&
                write_outputs(&run) == CLI_GO_ON;
    if (good)
        report(&run, &where, flags.json);
    cli_problem_free(&run.owner);
    return good ? CLI_OK : CLI_REFUSED;
}
