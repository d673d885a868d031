#include "bench_ladder.h"

#include "case_numbers.h"
#include "cli.h"
#include "gpu.h"
#include "json.h"
#include "peak.h"
#include "shape.h"

#include <stdlib.h>

enum { TOKENS = 16384, HIDDEN = 2048, MOST_NAMES = 32, NAME_BYTES = 32 };

/* The rungs in order (docs/ladder.md), then the library's own kernels. */
static const char *const kernels[] = {"k1", "fa1", "k2", "k3.1", "k3.2", "k3.3", "k4.1", "k4.2", "k5", "k6", "k7", "k8", "fd",
                                      "forward_sm80", "forward_sm90"};
enum { NUM_KERNELS = sizeof kernels / sizeof *kernels, NUM_RUNGS = NUM_KERNELS - 2 };

/* Rounds Q, K and V to FP8. */
static bool rounds(const char *name) { return strcmp(name, "k7") == 0 || strcmp(name, "k8") == 0; }

/* Is for one query. */
static bool decodes(const char *name) { return strcmp(name, "fd") == 0; }

typedef struct ladder_run {
    const ladder_request *request;
    cli_gpu              *gpu;
    flash_attn_context   *context; /* that runs the kernel of the row */
    FILE                 *table;
    cli_json              json; /* file NULL: not wanted */
    char                  name[MOST_NAMES][NAME_BYTES];
    int                   num_names, num_wrong, num_rows;
} ladder_run;

/* One row: a kernel on a shape. */
typedef struct ladder_row {
    const char *name;
    bench_shape shape;
    bool        runs, right; /* runs: the library has this kernel for this shape and GPU */
    double      error, tolerance, median_ms, min_ms;
    double      outlier_error; /* with outliers among the inputs */
    char        reason[256]; /* if it does not run */
} ladder_row;

/* ---- names ---- */

static int unknown_name(const char *name)
{
    const char *known[NUM_KERNELS + 1] = {"all"};
    char        list[256]              = "";
    memcpy(known + 1, kernels, sizeof kernels);
    const char *nearest = cli_nearest(name, known, NUM_KERNELS + 1);
    if (nearest)
        return cli_fail("bench: --kernel %s: there is no such kernel; did you mean %s?", name, nearest);
    for (int i = 0; i < NUM_KERNELS; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i > 0 ? "," : "", kernels[i]);
    return cli_fail("bench: --kernel %s: expected all, or some of %s", name, list);
}

static bool is_known(const char *name)
{
    for (int i = 0; i < NUM_KERNELS; i++)
        if (strcmp(kernels[i], name) == 0)
            return true;
    return false;
}

static int read_names(ladder_run *run)
{
    if (strcmp(run->request->kernels, "all") == 0) {
        for (int i = 0; i < NUM_RUNGS; i++)
            snprintf(run->name[run->num_names++], NAME_BYTES, "%s", kernels[i]);
        return CLI_GO_ON;
    }
    for (const char *word = run->request->kernels; *word;) {
        size_t length = strcspn(word, ",");
        if (run->num_names == MOST_NAMES)
            return cli_fail("bench: --kernel takes at most %d names", MOST_NAMES);
        char *name = run->name[run->num_names++];
        snprintf(name, NAME_BYTES, "%.*s", (int)(length < NAME_BYTES ? length : NAME_BYTES - 1), word);
        if (!is_known(name))
            return unknown_name(name);
        word += length + (word[length] == ',');
    }
    return CLI_GO_ON;
}

/* ---- a call on the GPU ---- */

/* The arrays' problem with its data on the GPU. */
typedef struct gpu_call {
    ladder_run        *run;
    flash_attn_problem problem;
    flash_attn_exec    exec;
    void              *memory[8];
    int                num_memory;
} gpu_call;

static size_t bytes_of(const flash_attn_tensor *t)
{
    return (size_t)(t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]) * dtype_bytes(t->dtype);
}

static void close_call(gpu_call *call)
{
    for (int i = 0; i < call->num_memory; i++)
        cli_gpu_release(call->run->gpu, call->memory[i]);
    call->num_memory = 0;
}

static void *keep(gpu_call *call, void *memory)
{
    if (memory)
        call->memory[call->num_memory++] = memory;
    return memory;
}

/* CLI_GO_ON or an exit status. Where the library has no such kernel the row says so: it does not run, and why. */
static int open_call(gpu_call *call, ladder_run *run, const bench_arrays *arrays, ladder_row *row)
{
    const flash_attn_tensor *in[3] = {&arrays->problem.q, &arrays->problem.k, &arrays->problem.v};
    *call                      = (gpu_call){.run = run, .problem = arrays->problem};
    flash_attn_tensor *to[3]   = {&call->problem.q, &call->problem.k, &call->problem.v};
    call->problem.device       = (flash_attn_device){FLASH_ATTN_CUDA, run->request->device};
    flash_attn_status status =
        flash_attn_workspace_size(run->context, &call->problem, FLASH_ATTN_FORWARD, &call->exec.workspace_bytes);
    if (status == FLASH_ATTN_UNSUPPORTED) {
        row->runs = false;
        snprintf(row->reason, sizeof row->reason, "%s", flash_attn_last_error());
        return CLI_GO_ON;
    }
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("bench", status);
    for (int i = 0; i < 3; i++)
        if (!(to[i]->data = keep(call, cli_gpu_upload(run->gpu, in[i]->data, bytes_of(in[i])))))
            return cli_fail("bench: the GPU has no memory left for the inputs");
    if (!(call->problem.o.data = keep(call, cli_gpu_allocate(run->gpu, bytes_of(&call->problem.o)))) ||
        !(call->problem.lse.data = keep(call, cli_gpu_allocate(run->gpu, bytes_of(&call->problem.lse)))))
        return CLI_REFUSED;
    if (call->exec.workspace_bytes > 0 &&
        !(call->exec.workspace = keep(call, cli_gpu_allocate(run->gpu, call->exec.workspace_bytes))))
        return CLI_REFUSED;
    return CLI_GO_ON;
}

static bool launch(void *arg)
{
    gpu_call *call = arg;
    return flash_attn_forward(call->run->context, &call->problem, &call->exec) == FLASH_ATTN_OK;
}

/* Results into the arrays' own O and LSE; they were all NaN before, so that what is not written shows. */
static int run_once(gpu_call *call, bench_arrays *arrays)
{
    cli_gpu *gpu   = call->run->gpu;
    size_t   bytes = bytes_of(&call->problem.o), lse_bytes = bytes_of(&call->problem.lse);
    if (!cli_gpu_fill(gpu, call->problem.o.data, 0xFF, bytes) || !cli_gpu_fill(gpu, call->problem.lse.data, 0xFF, lse_bytes) ||
        (call->exec.workspace && !cli_gpu_fill(gpu, call->exec.workspace, 0xFF, call->exec.workspace_bytes)))
        return CLI_REFUSED;
    if (!launch(call))
        return cli_fail_library("bench", FLASH_ATTN_LAUNCH);
    if (!cli_gpu_download(gpu, arrays->problem.o.data, call->problem.o.data, bytes) ||
        !cli_gpu_download(gpu, arrays->problem.lse.data, call->problem.lse.data, lse_bytes))
        return CLI_REFUSED;
    return CLI_GO_ON;
}

/* ---- the check: every element of small shapes ---- */

/* Lengths on both sides of every rung's tiles and ring, rows that see nothing, no keys at all, few key heads. */
static const struct {
    int64_t batch, heads, heads_k, seqlen_q, seqlen_k;
} small[] = {{1, 1, 1, 1, 1},    {1, 1, 1, 64, 64},   {1, 1, 1, 128, 128}, {2, 2, 1, 65, 63},
             {1, 4, 2, 130, 257}, {1, 2, 2, 200, 120}, {1, 1, 1, 30, 0},    {1, 1, 1, 77, 1100}};
enum { NUM_SMALL = sizeof small / sizeof *small, MOST_SHOWN = 4 };

#define FP8_TOLERANCE 0.08 /* relative L2: Q's and K's rounding makes 3.7% of P, V's and P's own 2.6% each */
#define FP8_LSE_TOLERANCE 0.25

/* Elements of `got` that are off, the first few printed. NaN is off. */
static int64_t compare(ladder_run *run, const char *what, const flash_attn_tensor *got, const flash_attn_tensor *expected,
                       double tolerance, double *error2, double *norm2)
{
    int64_t wrong = 0;
    for (int64_t b = 0; b < got->shape[0]; b++)
        for (int64_t s = 0; s < got->shape[1]; s++)
            for (int64_t h = 0; h < got->shape[2]; h++)
                for (int64_t c = 0; c < got->shape[3]; c++) {
                    double x = get(got, b, s, h, c), y = get(expected, b, s, h, c), off = fabs(x - y);
                    if (x == y) /* both -inf too */
                        off = 0;
                    *error2 += isfinite(off) ? off * off : 0;
                    *norm2 += isfinite(y) ? y * y : 0;
                    if (!(off <= tolerance * fmax(1, fabs(y))) && wrong++ < MOST_SHOWN)
                        fprintf(run->table, "  %s[%lld][%lld][%lld][%lld]: %g, expected %g\n", what, (long long)b, (long long)s,
                                (long long)h, (long long)c, x, y);
                }
    return wrong;
}

/* The arrays' O and LSE, which the GPU made, against the reference's, in double on the CPU. */
static int judge_small(ladder_run *run, const ladder_row *row, bench_arrays *arrays, bool *right)
{
    flash_attn_problem reference = arrays->problem;
    int64_t            count     = (int64_t)(bytes_of(&arrays->problem.o) / dtype_bytes(arrays->problem.o.dtype));
    float             *o = malloc((size_t)(count > 0 ? count : 1) * sizeof *o), *lse = malloc(bytes_of(&arrays->problem.lse) + 1);
    reference.device = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    reference.o      = (flash_attn_tensor){.data = o, .shape = {row->shape.batch, row->shape.seqlen_q, row->shape.heads,
                                                                row->shape.head_dim}};
    reference.lse.data = lse;
    int status         = CLI_GO_ON;
    if (!o || !lse)
        status = cli_fail("no memory left");
    else if (flash_attn_forward(NULL, &reference, NULL) != FLASH_ATTN_OK)
        status = cli_fail_library("bench: the reference", FLASH_ATTN_INVALID);
    else {
        flash_attn_tensor got = cli_with_strides(arrays->problem.o), got_lse = cli_with_strides(arrays->problem.lse);
        flash_attn_tensor expected = cli_with_strides(reference.o), expected_lse = cli_with_strides(reference.lse);
        double            error2 = 0, norm2 = 0, ignored = 0, epsilon = dtype_epsilon(row->shape.dtype);
        /* Four roundings of the largest value near: P's, O's, and the sums between; the norm is the sharper test. With FP8 a score is
         * off by 4% of what one varies by, and with few keys so are LSE and P. */
        bool    fp8   = rounds(row->name);
        int64_t wrong = compare(run, "o", &got, &expected, fp8 ? 0.3 : 4 * epsilon, &error2, &norm2) +
                        compare(run, "lse", &got_lse, &expected_lse, fp8 ? FP8_LSE_TOLERANCE : BENCH_LSE_TOLERANCE, &ignored, &ignored);
        *right        = wrong == 0 && sqrt(error2) <= row->tolerance * sqrt(norm2);
        if (!*right)
            fprintf(run->table,
                    "  %s %s d=%lld %s batch %lld heads %lld/%lld seqlen_q %lld seqlen_k %lld: %lld elements wrong, relative "
                    "error %.2g\n",
                    row->name, cli_dtype_name(row->shape.dtype), (long long)row->shape.head_dim,
                    row->shape.causal ? "causal" : "full", (long long)row->shape.batch, (long long)row->shape.heads,
                    (long long)row->shape.heads_k, (long long)row->shape.seqlen_q, (long long)row->shape.seqlen_k,
                    (long long)wrong, sqrt(error2 / (norm2 > 0 ? norm2 : 1)));
    }
    free(o);
    free(lse);
    return status;
}

static int check_small(ladder_run *run, ladder_row *row)
{
    bench_settings settings = {.device = {.type = FLASH_ATTN_CPU}, .seed = run->request->seed};
    int            status   = CLI_GO_ON;
    row->right              = true;
    for (int i = 0; i < NUM_SMALL && status == CLI_GO_ON && row->runs; i++) {
        ladder_row   one = *row;
        bench_arrays arrays;
        gpu_call     call;
        bool         right = true;
        one.shape.batch = small[i].batch, one.shape.heads = small[i].heads, one.shape.heads_k = small[i].heads_k;
        one.shape.seqlen_q = small[i].seqlen_q, one.shape.seqlen_k = small[i].seqlen_k;
        if ((status = bench_open(&arrays, &one.shape, &settings, false)) != CLI_GO_ON)
            return status;
        status = open_call(&call, run, &arrays, row);
        if (status == CLI_GO_ON && row->runs) {
            status = run_once(&call, &arrays);
            if (status == CLI_GO_ON)
                status = judge_small(run, &one, &arrays, &right);
        }
        row->right = row->right && right;
        close_call(&call);
        bench_close(&arrays);
    }
    return status;
}

/* ---- times ---- */

enum { MOST_GROUPS = 50, LEAST_GROUPS = 3, GROUP_MS = 20 };

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Groups of launches between two events, about GROUP_MS each. */
static int time_call(gpu_call *call, ladder_row *row)
{
    double times[MOST_GROUPS], one = 0, begin = cli_seconds();
    int    groups = 0;
    if (!cli_gpu_time(call->run->gpu, launch, call, 1, &one))
        return cli_fail_library("bench", FLASH_ATTN_LAUNCH);
    int launches = one > 0 && GROUP_MS / one < 50 ? (int)(GROUP_MS / one) : 50;
    for (; groups < MOST_GROUPS && (groups < LEAST_GROUPS || cli_seconds() - begin < call->run->request->seconds); groups++)
        if (!cli_gpu_time(call->run->gpu, launch, call, launches > 0 ? launches : 1, &times[groups]))
            return cli_fail_library("bench", FLASH_ATTN_LAUNCH);
    qsort(times, (size_t)groups, sizeof *times, compare_doubles);
    row->min_ms    = times[0];
    row->median_ms = times[groups / 2];
    return CLI_GO_ON;
}

/* One number in a thousand of `tensor`, and of the same in float32, gets another one besides that is ten times as large. */
static void add_outliers(flash_attn_tensor *tensor, float *floats, uint64_t *random)
{
    flash_attn_tensor flat  = *tensor;
    int64_t           count = (int64_t)(bytes_of(tensor) / dtype_bytes(tensor->dtype));
    memcpy(flat.stride, (int64_t[4]){0, 0, 0, 1}, sizeof flat.stride);
    for (int64_t n = random_int(random, 0, 1999); n < count; n += random_int(random, 1, 1999)) {
        set(&flat, 0, 0, 0, n, (double)floats[n] + 10 * random_normal(random));
        floats[n] = (float)get(&flat, 0, 0, 0, n);
    }
}

/* The same call with outliers among Q, K and V, as trained models have them. Many rows: few of them are more than their largest. */
enum { OUTLIER_ROWS = 100 };
static int check_outliers(ladder_run *run, gpu_call *call, bench_arrays *arrays, ladder_row *row)
{
    uint64_t     random = run->request->seed ^ 0x0071;
    bench_bounds bounds = {.rows = OUTLIER_ROWS, .seed = run->request->seed};
    bool         ignored;
    close_call(call);
    add_outliers(&arrays->problem.q, arrays->q, &random);
    add_outliers(&arrays->problem.k, arrays->k, &random);
    add_outliers(&arrays->problem.v, arrays->v, &random);
    int status = open_call(call, run, arrays, row);
    if (status == CLI_GO_ON)
        status = run_once(call, arrays);
    if (status == CLI_GO_ON)
        row->outlier_error = bench_error(arrays, FLASH_ATTN_FORWARD, false, &bounds, &ignored);
    return status;
}

/* Some rows of the large shape against the formula, then its time. */
static int check_and_time(ladder_run *run, ladder_row *row)
{
    bench_settings settings = {.device = {.type = FLASH_ATTN_CPU}, .seed = run->request->seed};
    bench_arrays   arrays;
    gpu_call       call;
    int            status = bench_open(&arrays, &row->shape, &settings, false);
    if (status != CLI_GO_ON)
        return status;
    status = open_call(&call, run, &arrays, row);
    if (status == CLI_GO_ON && row->runs) {
        status = run_once(&call, &arrays);
        if (status == CLI_GO_ON) {
            bench_bounds bounds = {BENCH_ROWS, settings.seed, row->tolerance, rounds(row->name) ? FP8_LSE_TOLERANCE : BENCH_LSE_TOLERANCE};
            row->error          = bench_error(&arrays, FLASH_ATTN_FORWARD, false, &bounds, &row->right);
            if (row->right)
                status = time_call(&call, row);
            if (row->right && status == CLI_GO_ON)
                status = check_outliers(run, &call, &arrays, row);
        }
    }
    close_call(&call);
    bench_close(&arrays);
    return status;
}

/* ---- rows ---- */

static double tflops(const ladder_row *row)
{
    return row->median_ms > 0 ? bench_flops(&row->shape, FLASH_ATTN_FORWARD) / row->median_ms * 1e-9 : 0;
}

static void report(ladder_run *run, const ladder_row *row)
{
    const bench_shape *shape = &row->shape;
    fprintf(run->table, "%-12s %-4s %4lld %-6s %7lld %7lld |", row->name, cli_dtype_name(shape->dtype), (long long)shape->head_dim,
            shape->causal ? "causal" : "full", (long long)shape->seqlen_q, (long long)shape->seqlen_k);
    if (!row->runs)
        fprintf(run->table, " not run: %s\n", row->reason);
    else if (!row->right)
        fprintf(run->table, " WRONG: relative error %.2g, tolerance %.2g\n", row->error, row->tolerance);
    else
        fprintf(run->table, " %9.4f %9.4f %8.1f | %.1e %12.1e\n", row->min_ms, row->median_ms, tflops(row), row->error, row->outlier_error);
    fflush(run->table);
    if (!run->json.file)
        return;
    json_open(&run->json, NULL, '{');
    json_text(&run->json, "kernel", row->name);
    json_text(&run->json, "dtype", cli_dtype_name(shape->dtype));
    json_whole(&run->json, "batch", shape->batch);
    json_whole(&run->json, "heads", shape->heads);
    json_whole(&run->json, "heads_k", shape->heads_k);
    json_whole(&run->json, "seqlen_q", shape->seqlen_q);
    json_whole(&run->json, "seqlen_k", shape->seqlen_k);
    json_whole(&run->json, "head_dim", shape->head_dim);
    json_bool(&run->json, "causal", shape->causal);
    json_bool(&run->json, "runs", row->runs);
    json_text(&run->json, "reason", row->runs ? NULL : row->reason);
    json_bool(&run->json, "right", row->runs && row->right);
    json_real(&run->json, "error", row->error);
    json_real(&run->json, "outlier_error", row->outlier_error);
    json_real(&run->json, "tolerance", row->tolerance);
    json_real(&run->json, "min_ms", row->min_ms);
    json_real(&run->json, "median_ms", row->median_ms);
    json_real(&run->json, "tflops", tflops(row));
    json_close(&run->json, '}');
}

/* All lengths of one kernel, dtype, head_dim and mask: the small shapes once, then each. */
static int run_lengths(ladder_run *run, const char *name, flash_attn_dtype dtype, int64_t d, bool causal)
{
    const ladder_request *r   = run->request;
    ladder_row            row = {.name = name, .runs = true, .tolerance = bench_tolerance(dtype, FLASH_ATTN_FORWARD)};
    if (rounds(name))
        row.tolerance = FP8_TOLERANCE;
    row.shape                 = (bench_shape){.dtype = dtype, .head_dim = d, .causal = causal};
    int status                = check_small(run, &row);
    for (int s = 0; s < r->seqlen.count && status == CLI_GO_ON; s++) {
        int64_t    seqlen = r->seqlen.value[s];
        ladder_row one    = row;
        one.shape.seqlen_k = seqlen;
        one.shape.seqlen_q = r->seqlen_q ? r->seqlen_q : decodes(name) ? 1 : seqlen;
        one.shape.batch    = r->batch ? r->batch : seqlen < TOKENS ? TOKENS / seqlen : 1;
        one.shape.heads    = r->heads ? r->heads : d < HIDDEN ? HIDDEN / d : 1;
        one.shape.heads_k  = r->heads_k ? r->heads_k : one.shape.heads;
        if (one.shape.heads % one.shape.heads_k != 0)
            return cli_fail("bench: --heads %lld is not a multiple of --heads-k %lld", (long long)one.shape.heads,
                            (long long)one.shape.heads_k);
        if (one.runs && one.right)
            status = check_and_time(run, &one);
        if (status != CLI_GO_ON)
            break;
        run->num_rows++;
        run->num_wrong += one.runs && !one.right;
        report(run, &one);
    }
    return status;
}

static int run_kernel(ladder_run *run, const char *name)
{
    const ladder_request    *r       = run->request;
    const flash_attn_options options = {.kernel = name};
    flash_attn_status        made    = flash_attn_create(&run->context, &options);
    int                      status  = CLI_GO_ON;
    if (made != FLASH_ATTN_OK)
        return cli_fail_library("bench", made);
    for (int t = 0; t < r->dtype.count; t++)
        for (int d = 0; d < r->head_dim.count; d++)
            for (int mask = 0; mask < 2 && status == CLI_GO_ON; mask++)
                if (r->masks >> mask & 1)
                    status = run_lengths(run, name, (flash_attn_dtype)r->dtype.value[t], r->head_dim.value[d], mask == 1);
    flash_attn_destroy(run->context);
    return status;
}

static int run_all(ladder_run *run)
{
    flash_attn_device      device = {FLASH_ATTN_CUDA, run->request->device};
    flash_attn_device_info info   = {0};
    flash_attn_status      status = flash_attn_get_device_info(NULL, device, &info);
    int                    go_on  = CLI_GO_ON;
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("bench", status);
    if (run->json.file) {
        json_open(&run->json, NULL, '{');
        json_text(&run->json, "schema", "flashattn.ladder/1");
        json_text(&run->json, "device_name", info.name);
        json_text(&run->json, "features", info.features);
        json_open(&run->json, "rows", '[');
    }
    fprintf(run->table, "%s, %s; forward, checked against the formula in double\n", info.name, info.isa);
    fprintf(run->table, "%-12s %-4s %4s %-6s %7s %7s | %9s %9s %8s | %-7s %s\n", "kernel", "", "d", "mask", "queries", "keys", "min ms",
            "median ms", "TFLOP/s", "error", "with outliers");
    for (int i = 0; i < run->num_names && go_on == CLI_GO_ON; i++)
        go_on = run_kernel(run, run->name[i]);
    if (run->json.file && go_on == CLI_GO_ON) {
        json_close(&run->json, ']');
        json_whole(&run->json, "num_rows", run->num_rows);
        json_whole(&run->json, "num_wrong", run->num_wrong);
        json_close(&run->json, '}');
    }
    return go_on;
}

int bench_ladder(const ladder_request *request)
{
    static cli_staged staged;
    ladder_run        run    = {.request = request, .table = stdout};
    int               status = read_names(&run);
    if (status == CLI_GO_ON)
        status = cli_gpu_open(request->device, &run.gpu);
    if (status != CLI_GO_ON)
        return status;
    if (request->json && strcmp(request->json, "-") == 0) {
        run.json.file = stdout;
        run.table     = stderr;
    } else if (request->json && !(cli_stage(request->json, &staged) && (run.json.file = fopen(staged.path, "w")))) {
        cli_gpu_close(run.gpu);
        return cli_fail("bench: %s cannot be written", request->json);
    }
    status = run_all(&run);
    if (run.json.file && run.json.file != stdout && !cli_finish(run.json.file, &staged, status == CLI_GO_ON) && status == CLI_GO_ON)
        status = cli_fail("bench: %s could not be written", request->json);
    cli_gpu_close(run.gpu);
    return status != CLI_GO_ON ? status : run.num_wrong ? CLI_CHECK_FAILED : CLI_OK;
}
