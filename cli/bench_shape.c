#include "bench_shape.h"

#include "case_numbers.h"
#include "cli.h"
#include "peak.h"

#include <stdlib.h>

/* ---- arrays ---- */

void *bench_allocate(bench_arrays *arrays, int64_t count, size_t element_bytes)
{
    int64_t bytes = 0;
    void   *memory =
        __builtin_mul_overflow(count, (int64_t)element_bytes, &bytes) ? NULL : calloc(1, bytes > 0 ? (size_t)bytes : 1);
    if (memory)
        arrays->memory[arrays->num_memory++] = memory;
    return memory;
}

/* Data of a tensor that has its shape; false: no memory. */
static bool give_data(bench_arrays *arrays, flash_attn_tensor *tensor)
{
    int64_t count = 0;
    if (__builtin_mul_overflow(tensor->shape[0] * tensor->shape[1], tensor->shape[2] * tensor->shape[3], &count))
        return false;
    tensor->data = bench_allocate(arrays, count, dtype_bytes(tensor->dtype));
    return tensor->data != NULL;
}

/* [b, s, h, d] */
static flash_attn_tensor tensor_of(const bench_shape *shape, int64_t seqlen, int64_t heads)
{
    return (flash_attn_tensor){.dtype = shape->dtype, .shape = {shape->batch, seqlen, heads, shape->head_dim}};
}

/* A few thousand numbers over and over, in a period that no row length divides: making each anew would take longer than
 * the measurements. */
bool bench_make_random(bench_arrays *arrays, flash_attn_tensor *tensor, float **floats, uint64_t *random)
{
    enum { PERIOD = 8191 };
    int64_t count         = tensor->shape[0] * tensor->shape[1] * tensor->shape[2] * tensor->shape[3];
    int64_t made          = count < PERIOD ? count : PERIOD;
    size_t  element_bytes = dtype_bytes(tensor->dtype);
    if (!give_data(arrays, tensor) || (floats && !(*floats = bench_allocate(arrays, count, sizeof(float)))))
        return false;
    flash_attn_tensor flat = *tensor;
    memcpy(flat.stride, (int64_t[4]){0, 0, 0, 1}, sizeof flat.stride);
    for (int64_t n = 0; n < made; n++) {
        set(&flat, 0, 0, 0, n, random_normal(random));
        if (floats)
            (*floats)[n] = (float)get(&flat, 0, 0, 0, n);
    }
    for (int64_t n = made; n < count; n += made) {
        int64_t piece = count - n < made ? count - n : made;
        if (floats)
            memcpy(*floats + n, *floats, (size_t)piece * sizeof(float));
        memcpy((char *)tensor->data + (size_t)n * element_bytes, tensor->data, (size_t)piece * element_bytes);
    }
    return true;
}

static standard_shape standard_shape_of(const bench_shape *shape)
{
    return (standard_shape){.batch    = shape->batch,
                            .seqlen_q = shape->seqlen_q,
                            .seqlen_k = shape->seqlen_k,
                            .heads    = shape->heads,
                            .heads_k  = shape->heads_k,
                            .head_dim = shape->head_dim,
                            .causal   = shape->causal,
                            .scale    = 1.0f / sqrtf((float)shape->head_dim)};
}

static bool make_standard(bench_arrays *arrays, const bench_settings *settings, bool backward)
{
    const bench_shape *shape   = &arrays->shape;
    standard_shape     peer    = standard_shape_of(shape);
    int64_t            bytes   = standard_bytes(&peer, backward);
    int64_t            q_count = shape->batch * shape->seqlen_q * shape->heads * shape->head_dim;
    int64_t            k_count = shape->batch * shape->seqlen_k * shape->heads_k * shape->head_dim;
    if (!settings->with_standard || bytes < 0 || bytes > settings->memory_limit_bytes)
        return true;
    arrays->o = bench_allocate(arrays, q_count, sizeof(float));
    if (backward) {
        arrays->dq = bench_allocate(arrays, q_count, sizeof(float));
        arrays->dk = bench_allocate(arrays, k_count, sizeof(float));
        arrays->dv = bench_allocate(arrays, k_count, sizeof(float));
    }
    return arrays->o && (!backward || (arrays->dq && arrays->dk && arrays->dv)) &&
           standard_create(&arrays->standard, &peer, backward, settings->pool);
}

static flash_attn_problem without_data(const bench_shape *shape, flash_attn_device device)
{
    flash_attn_problem p = {.device = device};
    p.lse                = (flash_attn_tensor){.shape = {shape->batch, shape->heads, shape->seqlen_q, 1}};
    p.q = p.o = tensor_of(shape, shape->seqlen_q, shape->heads);
    p.k = p.v = tensor_of(shape, shape->seqlen_k, shape->heads_k);
    return p;
}

int bench_check_shape(const bench_shape *shape, flash_attn_device device, int passes)
{
    flash_attn_problem p = without_data(shape, device);
    size_t             bytes;
    bench_apply_numbers(shape, &p);
    for (int pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
        if (!(passes & (1 << pass)))
            continue;
        flash_attn_status status = flash_attn_workspace_size(NULL, &p, (flash_attn_pass)pass, &bytes);
        if (status != FLASH_ATTN_OK)
            return cli_fail_library("bench", status);
    }
    return CLI_GO_ON;
}

static bool make_all(bench_arrays *arrays, const bench_settings *settings, bool backward)
{
    const bench_shape  *shape  = &arrays->shape;
    flash_attn_problem *p      = &arrays->problem;
    flash_attn_grads   *g      = &arrays->grads;
    uint64_t            random = settings->seed;
    *p                         = without_data(shape, settings->device);
    g->dout = g->dq = p->q;
    g->dk = g->dv = p->k;
    if (!give_data(arrays, &p->lse) || !give_data(arrays, &p->o) ||
        !bench_make_random(arrays, &p->q, &arrays->q, &random) ||
        !bench_make_random(arrays, &p->k, &arrays->k, &random) ||
        !bench_make_random(arrays, &p->v, &arrays->v, &random))
        return false;
    if (backward && (!give_data(arrays, &g->dq) || !give_data(arrays, &g->dk) || !give_data(arrays, &g->dv) ||
                     !bench_make_random(arrays, &g->dout, &arrays->dout, &random)))
        return false;
    if (!bench_apply_options(arrays, &random))
        return false;
    return make_standard(arrays, settings, backward);
}

int bench_open(bench_arrays *arrays, const bench_shape *shape, const bench_settings *settings, bool backward)
{
    *arrays = (bench_arrays){.shape = *shape};
    if (make_all(arrays, settings, backward))
        return CLI_GO_ON;
    bench_close(arrays);
    return cli_fail("bench: no memory for the arrays of seqlen %lld; give a smaller shape or --memory-limit",
                    (long long)shape->seqlen_k);
}

void bench_close(bench_arrays *arrays)
{
    standard_destroy(&arrays->standard);
    for (int i = 0; i < arrays->num_memory; i++)
        free(arrays->memory[i]);
    *arrays = (bench_arrays){0};
}

/* ---- the two contestants ---- */

static flash_attn_status run_ours(bench_arrays *arrays, flash_attn_context *context, flash_attn_pass pass,
                                  const flash_attn_exec *exec)
{
    return pass == FLASH_ATTN_FORWARD ? flash_attn_forward(context, &arrays->problem, exec)
                                      : flash_attn_backward(context, &arrays->problem, &arrays->grads, exec);
}

static void run_standard(bench_arrays *a, flash_attn_pass pass)
{
    if (pass == FLASH_ATTN_FORWARD)
        standard_forward(&a->standard, a->q, a->k, a->v, a->o);
    else
        standard_backward(&a->standard, a->q, a->k, a->v, a->o, a->dout, a->dq, a->dk, a->dv);
}

/* ---- times ---- */

enum { MOST_REPEATS = 200 };

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bench_times times_of(double *seconds, int repeats)
{
    qsort(seconds, (size_t)repeats, sizeof *seconds, compare_doubles);
    double median = repeats % 2 ? seconds[repeats / 2] : 0.5 * (seconds[repeats / 2 - 1] + seconds[repeats / 2]);
    return (bench_times){.repeats = repeats, .min_ms = seconds[0] * 1e3, .median_ms = median * 1e3};
}

/* Ours and standard's take turns, so that a slow moment of the machine hits both. */
static flash_attn_status time_both(bench_arrays *arrays, const bench_settings *settings, const flash_attn_exec *exec,
                                   bench_row *row)
{
    double ours[MOST_REPEATS], standard[MOST_REPEATS];
    double begin   = cli_seconds();
    int    repeats = 0;
    while (repeats < MOST_REPEATS && (repeats < settings->least_repeats || cli_seconds() - begin < settings->seconds)) {
        double            start  = cli_seconds();
        flash_attn_status status = run_ours(arrays, settings->context, row->pass, exec);
        ours[repeats]            = cli_seconds() - start;
        if (status != FLASH_ATTN_OK)
            return status;
        if (arrays->standard.prob) {
            start = cli_seconds();
            run_standard(arrays, row->pass);
            standard[repeats] = cli_seconds() - start;
        }
        repeats++;
    }
    row->ours = times_of(ours, repeats);
    if (arrays->standard.prob)
        row->standard = times_of(standard, repeats);
    return FLASH_ATTN_OK;
}

/* ---- one pass ---- */

const char *bench_mask_name(const bench_shape *shape)
{
    return shape->options.window.given ? "window" : shape->causal ? "causal" : "full";
}

double bench_flops(const bench_shape *shape, flash_attn_pass pass)
{
    double sq = (double)shape->seqlen_q, sk = (double)shape->seqlen_k, pairs = sq * sk;
    if (shape->options.window.given || shape->options.blocks > 0) {
        pairs = 0;
        for (int64_t query = 0; query < shape->seqlen_q; query++) {
            bench_keys keys = bench_keys_of(shape, query);
            pairs += keys.end > keys.begin ? (double)(keys.end - keys.begin) : 0;
        }
    } else if (shape->causal)
        pairs = sq <= sk ? sq * sk - 0.5 * sq * sq : 0.5 * sk * sk;
    double forward = 4 * pairs * (double)(shape->head_dim * shape->heads * shape->batch);
    return pass == FLASH_ATTN_FORWARD ? forward : 2.5 * forward;
}

static flash_attn_status check(bench_arrays *arrays, const bench_settings *settings, const flash_attn_exec *exec,
                               bench_row *row)
{
    bool              right, standard_right = true;
    flash_attn_status status = run_ours(arrays, settings->context, row->pass, exec);
    if (status != FLASH_ATTN_OK)
        return status;
    row->tolerance      = bench_tolerance(row->shape.dtype, row->pass);
    bench_bounds bounds = {BENCH_ROWS, settings->seed, row->tolerance, BENCH_LSE_TOLERANCE};
    row->error          = bench_error(arrays, row->pass, false, &bounds, &right);
    row->standard_error = -1;
    if (arrays->standard.prob) {
        run_standard(arrays, row->pass);
        row->standard_error = bench_error(arrays, row->pass, true, &bounds, &standard_right);
    }
    row->right = right && standard_right;
    return FLASH_ATTN_OK;
}

int bench_measure(bench_arrays *arrays, const bench_settings *settings, flash_attn_pass pass, bench_row *row)
{
    standard_shape         peer        = standard_shape_of(&arrays->shape);
    flash_attn_explanation explanation = {0};
    flash_attn_exec        exec        = {0};
    *row                = (bench_row){.shape = arrays->shape, .pass = pass, .flops = bench_flops(&arrays->shape, pass)};
    row->standard_bytes = standard_bytes(&peer, pass == FLASH_ATTN_BACKWARD);
    row->over_limit     = settings->with_standard && !arrays->standard.prob;

    flash_attn_problem planned = arrays->problem;
    if (pass == FLASH_ATTN_BACKWARD) /* it would be explained with dbias, which is not asked for here */
        planned.bias = (flash_attn_tensor){0};
    flash_attn_status status = flash_attn_explain(settings->context, &planned, pass, &explanation);
    if (status == FLASH_ATTN_OK)
        status = flash_attn_workspace_size(settings->context, &arrays->problem, pass, &exec.workspace_bytes);
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("bench", status);
    memcpy(row->kernel, explanation.kernel, sizeof row->kernel);
    row->ours_bytes =
        (int64_t)exec.workspace_bytes + arrays->shape.batch * arrays->shape.heads * arrays->shape.seqlen_q * 4;
    if (exec.workspace_bytes > 0) {
        exec.workspace = malloc(exec.workspace_bytes);
        if (!exec.workspace)
            return cli_fail("bench: no memory for a workspace of %zu bytes", exec.workspace_bytes);
    }
    status = check(arrays, settings, &exec, row);
    if (status == FLASH_ATTN_OK && row->right)
        status = time_both(arrays, settings, &exec, row);
    free(exec.workspace);
    return status == FLASH_ATTN_OK ? CLI_GO_ON : cli_fail_library("bench", status);
}
