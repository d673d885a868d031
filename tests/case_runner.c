#include "case_internal.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const output_names[NUM_OUTPUTS] = {"o", "lse", "dq", "dk", "dv", "dbias", "dsinks"};

static flash_attn_tensor *output_of(case_instance *x, int n)
{
    flash_attn_tensor *const all[NUM_OUTPUTS] = {&x->problem.o, &x->problem.lse, &x->grads.dq,    &x->grads.dk,
                                                 &x->grads.dv,  &x->grads.dbias, &x->grads.dsinks};
    return all[n];
}

#define FOR_EACH_ELEMENT(t, i0, i1, i2, i3)                                                                            \
    for (int64_t i0 = 0; i0 < (t)->shape[0]; i0++)                                                                     \
        for (int64_t i1 = 0; i1 < (t)->shape[1]; i1++)                                                                 \
            for (int64_t i2 = 0; i2 < (t)->shape[2]; i2++)                                                             \
                for (int64_t i3 = 0; i3 < (t)->shape[3]; i3++)

/* ---- building ---- */

static void fill_defaults(test_case *c)
{
    c->batch      = c->batch ? c->batch : 1;
    c->heads_q    = c->heads_q ? c->heads_q : 1;
    c->heads_k    = c->heads_k ? c->heads_k : c->heads_q;
    c->head_dim   = c->head_dim ? c->head_dim : 32;
    c->head_dim_v = c->head_dim_v ? c->head_dim_v : c->head_dim;
    c->name       = c->name ? c->name : "";
    c->group      = c->group ? c->group : "";
}

bool case_make_results(case_instance *x, flash_attn_tensor results[NUM_OUTPUTS], int byte)
{
    memset(results, 0, NUM_OUTPUTS * sizeof results[0]);
    for (int n = 0; n < NUM_OUTPUTS; n++) {
        const flash_attn_tensor *t = output_of(x, n);
        flash_attn_tensor       *r = &results[n];
        if (!t->data)
            continue;
        memcpy(r->shape, t->shape, sizeof r->shape);
        r->stride[3] = 1;
        for (int m = 2; m >= 0; m--)
            r->stride[m] = r->stride[m + 1] * r->shape[m + 1];
        size_t bytes = (size_t)(r->stride[0] * r->shape[0] + 1) * sizeof(float);
        r->data      = malloc(bytes);
        if (!r->data)
            return false;
        memset(r->data, byte, bytes);
    }
    return true;
}

static void free_results(flash_attn_tensor results[NUM_OUTPUTS])
{
    for (int n = 0; n < NUM_OUTPUTS; n++)
        free(results[n].data);
}

/* The REFERENCE device, writing to `results`. */
static flash_attn_status run_reference(const case_instance *x, const flash_attn_tensor results[NUM_OUTPUTS])
{
    flash_attn_problem p     = x->problem;
    flash_attn_grads   g     = x->grads;
    p.device                 = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    p.o                      = results[OUT_O];
    p.lse                    = results[OUT_LSE];
    g.dq                     = results[OUT_DQ];
    g.dk                     = results[OUT_DK];
    g.dv                     = results[OUT_DV];
    g.dbias                  = results[OUT_DBIAS];
    g.dsinks                 = results[OUT_DSINKS];
    flash_attn_status status = flash_attn_forward(NULL, &p, NULL);
    return status == FLASH_ATTN_OK && x->backward ? flash_attn_backward(NULL, &p, &g, NULL) : status;
}

typedef struct difference {
    double  largest, mean_outwards, l2, reference_l2, reference_largest;
    int64_t count;
    bool    finite;
} difference;

static difference compare(const flash_attn_tensor *result, const flash_attn_tensor *reference)
{
    difference d = {.finite = true};
    FOR_EACH_ELEMENT(reference, i0, i1, i2, i3)
    {
        double r = get(reference, i0, i1, i2, i3), e = get(result, i0, i1, i2, i3) - r;
        d.finite = d.finite && isfinite(e);
        if (!isfinite(e))
            continue;
        d.largest = fmax(d.largest, fabs(e));
        d.mean_outwards += r < 0 ? -e : e;
        d.l2 += e * e;
        d.reference_l2 += r * r;
        d.reference_largest = fmax(d.reference_largest, fabs(r));
        d.count++;
    }
    d.mean_outwards /= d.count ? (double)d.count : 1;
    d.l2           = sqrt(d.l2);
    d.reference_l2 = sqrt(d.reference_l2);
    return d;
}

static double largest_lse(const flash_attn_tensor *lse)
{
    double largest = 0;
    FOR_EACH_ELEMENT(lse, b, h, i, z)
    {
        double value = fabs(get(lse, b, h, i, z));
        if (isfinite(value))
            largest = fmax(largest, value);
    }
    return largest;
}

/* A gradient that cancels to nothing has no relative error; a tenth of its terms stands for it then. */
static double l2_scale(const difference *d, const case_terms *terms, int n)
{
    return fmax(fmax(d->reference_l2, n >= OUT_DQ ? 0.1 * terms->l2[n] : 0), 0.01 * sqrt((double)d->count));
}

/* What float32 scores of the size of the largest LSE lose: a sum of head_dim products errs by about the root of their
 * number. In random shapes one of so many scores is that far off now and then: twice as much. A softcap, a sink or a bias
 * may hide from LSE how large the products were; of these the root mean square is known, and the largest is more. */
static double score_rounding(const case_instance *x)
{
    double root = sqrt(x->shape.head_dim), size = x->largest_lse;
    double logit = x->shape.logit_size == 0 ? 1 : (double)x->shape.logit_size;
    double scale = x->shape.scale == 0 ? 1 / root : fabs((double)x->shape.scale);
    if (x->any_shape)
        size = fmax(2 * size, 3 * scale * logit * root);
    return size * 0x1p-24 * fmax(1, root / 4);
}

/* What the table at the top of case_runner.h allows. plain: the error of plain attention, for 16 bits. */
static void set_allowances(case_instance *x, int n, const difference *reference, const difference *plain,
                           const case_terms *terms)
{
    bool   gradient = n >= OUT_DQ;
    /* The backward's P = exp(S - LSE) has what two scores lose: its own and the forward's. */
    double M = fmax(1, reference->reference_largest), lost = score_rounding(x) * (gradient ? 2 : 1);
    double scale = x->l2_scale[n] = l2_scale(reference, terms, n);
    double cancelled = gradient ? lost + (x->any_shape ? 16 * 0x1p-24 : 0) : 0; /* of the terms, whatever is left of them */
    x->allowed[n]    = ((gradient ? 1e-5 : 5e-6) + lost) * M + cancelled * terms->largest[n];
    x->allowed_l2[n] = (gradient && x->any_shape ? 1e-5 : 5e-6) + lost + cancelled * terms->l2[n] / scale;
    if (x->dtype == FLASH_ATTN_F32 || n == OUT_LSE)
        return;
    double rounding = dtype_epsilon(output_of(x, n)->dtype) / 2 * reference->reference_largest;
    double table    = x->dtype == FLASH_ATTN_F16 ? 1e-3 : x->dtype == FLASH_ATTN_BF16 ? 5e-3 : 5e-2;
    /* Plain attention in float16 overflows where ours must not; then only the relative bound is left. */
    double error = plain->finite ? plain->largest : 16 * dtype_epsilon(x->dtype) * M;
    x->allowed[n] += (gradient ? 3 : 2) * error + rounding;
    x->allowed_l2[n] = fmax(table, plain->finite ? 2 * plain->l2 / scale : 0) + lost;
    /* One number a head is too few to measure plain attention's error by, and dropout drops other pairs there: of a P that is
     * rounded half an epsilon is lost, and a number may be four times the root mean square that its size is taken from. */
    double share = n == OUT_DSINKS ? 1 : !x->any_shape ? 0 : x->shape.dropout > 0 ? 2 : gradient ? 0.5 : 0;
    /* O of random shapes may be few numbers, whose P plain attention happens to round to nothing, or that happen to cancel. */
    bool few = reference->reference_l2 < 4 * reference->reference_largest, cancels = terms->l2[n] > 2 * scale;
    if (x->any_shape && n == OUT_O)
        share = fmax(share, few ? 0.5 : cancels ? 0.25 : 0);
    x->allowed[n] += share * dtype_epsilon(x->dtype) * terms->largest[n];
    x->allowed_l2[n] += share * dtype_epsilon(x->dtype) * terms->l2[n] / scale;
}

/* Expected values, and the two runs of plain attention: exact, which must agree with the reference, and rounded. */
static bool make_expectations(case_instance *x, char *why, size_t why_bytes)
{
    flash_attn_tensor exact[NUM_OUTPUTS] = {0}, rounded[NUM_OUTPUTS] = {0};
    case_terms        terms = {{0}, {0}};
    bool ok = case_make_results(x, x->expected, 0xFF) && case_make_results(x, exact, 0) && case_make_results(x, rounded, 0);
    flash_attn_status status = ok ? run_reference(x, x->expected) : FLASH_ATTN_NO_MEMORY;
    bool              small  = x->dtype != FLASH_ATTN_F32;
    ok                       = status == FLASH_ATTN_OK && case_plain(x, NULL, exact, &terms) &&
         (!small || case_plain(x, &x->dtype, rounded, NULL));
    if (!ok)
        snprintf(why, why_bytes, "the reference says %s: %s", flash_attn_status_string(status),
                 flash_attn_last_error());
    x->largest_lse = ok ? largest_lse(&x->expected[OUT_LSE]) : 0;
    for (int n = 0; ok && n < NUM_OUTPUTS; n++) {
        if (!x->expected[n].data)
            continue;
        difference same = compare(&exact[n], &x->expected[n]), plain = compare(&rounded[n], &exact[n]);
        set_allowances(x, n, &same, &plain, &terms);
        double limit = 1e-5 * fmax(1, same.reference_largest);
        if (n != OUT_LSE && !same.finite) {
            snprintf(why, why_bytes, "the reference's %s is not finite", output_names[n]);
            ok = false;
        }
        if (x->shape.dropout == 0 && !(same.largest <= limit)) {
            snprintf(why, why_bytes, "the reference and plain attention differ in %s by %g", output_names[n],
                     same.largest);
            ok = false;
        }
    }
    free_results(exact);
    free_results(rounded);
    return ok;
}

static uint64_t hash_word(uint64_t hash, const void *bytes, size_t count)
{
    uint64_t word = 0;
    memcpy(&word, bytes, count);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

uint64_t case_hash(uint64_t hash, const void *bytes, size_t count)
{
    size_t n = 0;
    for (; n + 8 <= count; n += 8)
        hash = hash_word(hash, (const char *)bytes + n, 8);
    return n < count ? hash_word(hash, (const char *)bytes + n, count - n) : hash;
}

static uint64_t hash_buffer(const case_buffer *buffer) { return case_hash(CASE_HASH_START, buffer->base, buffer->bytes); }

case_instance *case_build(const test_case *shape, flash_attn_dtype dtype, unsigned flags, uint64_t seed, char *why,
                          size_t why_bytes)
{
    char           unused[8];
    case_instance *x = calloc(1, sizeof *x);
    why              = why ? why : unused;
    why_bytes        = why == unused ? sizeof unused : why_bytes;
    why[0]           = 0;
    if (!x)
        return NULL;
    x->shape  = *shape;
    x->dtype  = dtype;
    x->random = seed * 0x9E3779B97F4A7C15u + 1;
    fill_defaults(&x->shape);
    x->any_shape = flags & CASE_RANDOM;
    x->backward = (flags & CASE_BACKWARD) && !shape->forward_only && !shape->page_size && !shape->cache_batch_idx &&
                  dtype != FLASH_ATTN_F8E4M3;
    x->sequences = calloc((size_t)x->shape.batch, sizeof *x->sequences);
    x->failed    = !x->sequences;
    if (!x->failed)
        case_make_inputs(x);
    if (x->failed)
        snprintf(why, why_bytes, "no memory for the inputs");
    for (int n = 0; n < x->num_buffers; n++)
        x->buffers[n].hash = hash_buffer(&x->buffers[n]);
    if (x->failed || (!(flags & CASE_NO_EXPECT) && !make_expectations(x, why, why_bytes))) {
        case_free(x);
        return NULL;
    }
    return x;
}

void case_free(case_instance *x)
{
    if (!x)
        return;
    for (int n = 0; n < x->num_buffers; n++)
        free(x->buffers[n].base);
    free_results(x->expected);
    free(x->sequences);
    free(x->row_sees);
    free(x->key_seen);
    free(x);
}

const flash_attn_problem *case_problem(const case_instance *x) { return &x->problem; }
const flash_attn_grads   *case_grads(const case_instance *x) { return x->backward ? &x->grads : NULL; }
bool                      case_has_backward(const case_instance *x) { return x->backward; }

/* ---- running ---- */

typedef struct device_copy {
    void *at[MAX_BUFFERS];
} device_copy;

/* The device's address of something in a buffer. */
static void *relocated(const case_instance *x, const device_copy *copy, const void *host)
{
    const unsigned char *p = host;
    for (int n = 0; p && n < x->num_buffers; n++)
        if (p >= x->buffers[n].base && p < x->buffers[n].base + x->buffers[n].bytes)
            return (char *)copy->at[n] + (p - x->buffers[n].base);
    return NULL;
}

static void relocate(const case_instance *x, const device_copy *copy, flash_attn_problem *p, flash_attn_grads *g)
{
    flash_attn_tensor *const tensors[] = {
        &p->q,         &p->k,         &p->v,    &p->o,  &p->lse, &p->bias, &p->alibi_slopes, &p->sinks, &p->descale.q,
        &p->descale.k, &p->descale.v, &g->dout, &g->dq, &g->dk,  &g->dv,   &g->dbias,        &g->dsinks};
    const int32_t **const arrays[] = {&p->cu_seqlens_q, &p->cu_seqlens_k,    &p->seqused_q,  &p->seqused_k,
                                      &p->leftpad_k,    &p->cache_batch_idx, &p->pages.table};
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++)
        tensors[n]->data = relocated(x, copy, tensors[n]->data);
    for (size_t n = 0; n < sizeof arrays / sizeof arrays[0]; n++)
        *arrays[n] = relocated(x, copy, *arrays[n]);
}

static bool upload(case_instance *x, const case_memory *memory, device_copy *copy)
{
    for (int n = 0; n < x->num_buffers; n++) {
        if (x->buffers[n].is_host_list)
            continue;
        copy->at[n] = memory->upload(memory->user, x->buffers[n].base, x->buffers[n].bytes);
        if (!copy->at[n])
            return false;
    }
    return true;
}

static bool download(case_instance *x, const case_memory *memory, const device_copy *copy)
{
    for (int n = 0; n < x->num_buffers; n++) /* inputs too: a device may not write to them */
        if (copy->at[n] && !memory->download(memory->user, x->buffers[n].base, copy->at[n], x->buffers[n].bytes))
            return false;
    return true;
}

void case_poison_outputs(case_instance *x)
{
    for (int n = 0; n < x->num_buffers; n++)
        if (x->buffers[n].output)
            memset(x->buffers[n].base, 0xFF, x->buffers[n].bytes);
}

/* Both passes; `where` names the one that failed. */
static flash_attn_status run_passes(case_instance *x, const case_device *device, const char **where)
{
    flash_attn_problem p      = x->problem;
    flash_attn_grads   g      = x->grads;
    flash_attn_exec    exec   = {.num_threads = device->num_threads};
    device_copy        copy   = {{0}};
    flash_attn_status  status = FLASH_ATTN_OK;
    p.device                  = device->device;
    p.deterministic           = device->deterministic;
    case_poison_outputs(x);
    if (device->memory) {
        if (!upload(x, device->memory, &copy))
            status = FLASH_ATTN_NO_MEMORY;
        relocate(x, &copy, &p, &g);
    }
    *where = "forward";
    if (status == FLASH_ATTN_OK)
        status = flash_attn_forward(device->context, &p, &exec);
    if (status == FLASH_ATTN_OK && x->backward) {
        *where = "backward";
        status = flash_attn_backward(device->context, &p, &g, &exec);
    }
    if (device->memory) {
        if (!download(x, device->memory, &copy) && status == FLASH_ATTN_OK)
            status = FLASH_ATTN_LAUNCH;
        for (int n = 0; n < x->num_buffers; n++)
            if (copy.at[n])
                device->memory->release(device->memory->user, copy.at[n]);
    }
    return status;
}

/* ---- judging ---- */

/* Every byte that is not an element of an output must be as it was: 0xFF in output buffers, the same hash in inputs. */
bool case_only_outputs_changed(case_instance *x, case_result *result)
{
    for (int n = 0; n < x->num_buffers; n++) {
        const case_buffer *buffer = &x->buffers[n];
        if (!buffer->output) {
            if (hash_buffer(buffer) == buffer->hash)
                continue;
            snprintf(result->reason, sizeof result->reason, "input memory %d was written to", n);
            return false;
        }
        unsigned char *copy = malloc(buffer->bytes);
        if (!copy)
            return true;
        memcpy(copy, buffer->base, buffer->bytes);
        for (int m = 0; m < NUM_OUTPUTS; m++) {
            flash_attn_tensor t  = *output_of(x, m);
            unsigned char    *at = t.data;
            if (!at || at < buffer->base || at >= buffer->base + buffer->bytes)
                continue;
            t.data = copy + (at - buffer->base);
            FOR_EACH_ELEMENT(&t, i0, i1, i2, i3) memset(element(&t, i0, i1, i2, i3), 0xFF, dtype_bytes(t.dtype));
        }
        size_t byte = 0;
        while (byte < buffer->bytes && copy[byte] == 0xFF)
            byte++;
        free(copy);
        if (byte < buffer->bytes) {
            snprintf(result->reason, sizeof result->reason,
                     "byte %zu of output memory %d, outside the tensor, was written to", byte, n);
            return false;
        }
    }
    return true;
}

/* Keeps the worst, and the first failure's reason. */
static void note(case_result *result, int output, double part_of_allowed, const char *what, double value, double limit)
{
    bool bad = !(part_of_allowed <= 1);
    if (bad && result->verdict != CASE_FAILED)
        snprintf(result->reason, sizeof result->reason, "%s: %s %.3g, allowed %.3g", output_names[output], what, value,
                 limit);
    if (bad)
        result->verdict = CASE_FAILED;
    if (!(part_of_allowed <= result->worst)) {
        result->worst    = part_of_allowed;
        result->worst_of = output_names[output];
    }
}

static void judge_zero(case_result *result, int output, const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2)
{
    for (int64_t i3 = 0; i3 < t->shape[3]; i3++)
        if (!(get(t, i0, i1, i2, i3) == 0))
            note(result, output, (double)INFINITY, "must be exactly 0 where nothing is seen, is",
                 get(t, i0, i1, i2, i3), 0);
}

/* Outputs of queries that see nothing, gradients of keys that nobody sees. */
static void judge_zeros(case_instance *x, case_result *result)
{
    for (int64_t b = 0; b < x->shape.batch; b++) {
        const case_sequence *s = &x->sequences[b];
        for (int64_t h = 0; h < x->shape.heads_q; h++)
            for (int i = 0; i < s->rows_q; i++) {
                int64_t row   = s->q_row + i;
                bool    empty = get(&x->expected[OUT_LSE], s->q_entry, h, row, 0) == (double)-INFINITY;
                if (!empty && x->row_sees[s->first_row + i])
                    continue;
                judge_zero(result, OUT_O, &x->problem.o, s->q_entry, row, h);
                if (x->backward)
                    judge_zero(result, OUT_DQ, &x->grads.dq, s->q_entry, row, h);
            }
        for (int64_t h = 0; x->backward && h < x->shape.heads_k; h++)
            for (int j = 0; j < s->rows_k; j++) {
                if (x->key_seen[s->first_key + j])
                    continue;
                judge_zero(result, OUT_DK, &x->grads.dk, s->kv_entry, s->kv_row + j, h);
                judge_zero(result, OUT_DV, &x->grads.dv, s->kv_entry, s->kv_row + j, h);
            }
    }
}

static void judge_lse(case_instance *x, const case_device *device, case_result *result)
{
    bool few_bits = x->dtype == FLASH_ATTN_F8E4M3 && device->device.type == FLASH_ATTN_CUDA;
    FOR_EACH_ELEMENT(&x->problem.lse, b, h, i, z)
    {
        double r = get(&x->expected[OUT_LSE], b, h, i, z), got = get(&x->problem.lse, b, h, i, z);
        double limit = 5e-6 * fmax(1, fabs(r)) + score_rounding(x) + (few_bits ? 2e-3 * fmax(1, x->largest_lse) : 0);
        if (isinf(r))
            note(result, OUT_LSE, got == r ? 0 : (double)INFINITY, "must be -inf, is", got, r);
        else
            note(result, OUT_LSE, fabs(got - r) / limit, "error", fabs(got - r), limit);
    }
}

static void judge_output(case_instance *x, int n, case_result *result)
{
    const flash_attn_tensor *got = output_of(x, n);
    difference               d   = compare(got, &x->expected[n]);
    if (!d.finite) {
        note(result, n, (double)NAN, "not finite:", (double)NAN, 0);
        return;
    }
    note(result, n, d.largest / x->allowed[n], "error", d.largest, x->allowed[n]);
    if (d.count == 0)
        return;
    double l2 = d.l2 / x->l2_scale[n];
    note(result, n, l2 / x->allowed_l2[n], "relative L2 error", l2, x->allowed_l2[n]);
    /* Errors of one row hang together, so rows count, not elements: the mean of n errors has a spread of 1 / sqrt(n).
     * Below a part of a rounding there is nothing to find, nor where all scores are equal and so all rows alike. */
    double scale = (double)x->problem.scale;
    if (fabs(scale) < 2e-3 && (scale != 0 || signbit(scale)))
        return;
    double rows = (double)d.count / (double)got->shape[3], share = 0.1 + 5 / sqrt(rows);
    /* One key and dropout: every P is the same number, and so is its rounding. */
    double part = x->any_shape && x->shape.dropout > 0 ? 0.75 : 0.02;
    double bias = fabs(d.mean_outwards), least = part * dtype_epsilon(x->dtype) * fmax(1, d.reference_largest);
    note(result, n, bias / fmax(share * d.largest, least), "mean error away from zero", d.mean_outwards,
         fmax(share * d.largest, least));
}

case_result case_run(case_instance *x, const case_device *device)
{
    case_result       result = {.worst_of = ""};
    const char       *where;
    flash_attn_status status = run_passes(x, device, &where);
    if (status != FLASH_ATTN_OK) {
        result.verdict = status == FLASH_ATTN_UNSUPPORTED ? CASE_SKIPPED : CASE_FAILED;
        snprintf(result.reason, sizeof result.reason, "%s: %s: %s", where, flash_attn_status_string(status),
                 flash_attn_last_error());
        return result;
    }
    if (!case_only_outputs_changed(x, &result)) {
        result.verdict = CASE_FAILED;
        result.worst   = (double)INFINITY;
        return result;
    }
    judge_lse(x, device, &result);
    for (int n = 0; n < NUM_OUTPUTS; n++)
        if (n != OUT_LSE && x->expected[n].data)
            judge_output(x, n, &result);
    judge_zeros(x, &result);
    return result;
}

uint64_t case_output_hash(const case_instance *x)
{
    uint64_t hash = 0;
    for (int n = 0; n < x->num_buffers; n++)
        if (x->buffers[n].output)
            hash = hash * 31 + hash_buffer(&x->buffers[n]);
    return hash;
}
