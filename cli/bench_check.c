/* The bench's check: a few rows of each result against the formula in double, written apart from both contestants.
 * Rows, because a whole result in double would take longer than all measurements. */
#include "bench_shape.h"

#include "case_numbers.h"

#include <stdlib.h>

enum { LARGEST_DIM = 1024 };

/* Sums over the elements judged of one result. */
typedef struct tally {
    double error2, reference2;
    double magnitude2; /* of the terms that cancelled into the reference: bounds what float32 can keep of it */
} tally;

typedef struct checker {
    const bench_arrays *arrays;
    bool                standard;
    double              scale;
    tally               o, dq, dk, dv;
    double              lse_tolerance;
    bool                lse_right;
    double             *prob, *slope; /* one row: P before dropout; bench_score's slope */
} checker;

double bench_tolerance(flash_attn_dtype dtype, flash_attn_pass pass)
{
    double forward = dtype == FLASH_ATTN_F32 ? 5e-6 : dtype == FLASH_ATTN_F16 ? 1e-3 : 5e-3;
    return pass == FLASH_ATTN_FORWARD ? forward : 2 * forward;
}

static double dot(const float *a, const float *b, int64_t count)
{
    double sum = 0;
    for (int64_t c = 0; c < count; c++)
        sum += (double)a[c] * b[c];
    return sum;
}

/* Where row (b, s, h) of a contiguous [b, seqlen, heads, d] begins. */
static int64_t at(const checker *c, int64_t seqlen, int64_t heads, int64_t b, int64_t s, int64_t h)
{
    return ((b * seqlen + s) * heads + h) * c->arrays->shape.head_dim;
}

/* Element of a result: the library's tensor, or standard attention's floats. */
static double result(const checker *c, const flash_attn_tensor *tensor, const float *floats, int64_t index)
{
    flash_attn_tensor flat = *tensor;
    memcpy(flat.stride, (int64_t[4]){0, 0, 0, 1}, sizeof flat.stride);
    return c->standard ? (double)floats[index] : get(&flat, 0, 0, 0, index);
}

static void judge(const checker *c, tally *t, const flash_attn_tensor *tensor, const float *floats, int64_t first,
                  const double *reference, const double *magnitude)
{
    for (int64_t n = 0; n < c->arrays->shape.head_dim; n++) {
        double error = result(c, tensor, floats, first + n) - reference[n];
        t->error2 += error * error;
        t->reference2 += reference[n] * reference[n];
        t->magnitude2 += magnitude[n] * magnitude[n];
    }
}

/* P of a query, before dropout; its LSE. */
static double find_probabilities(checker *c, int64_t b, int64_t query, int64_t h, bench_keys keys)
{
    const bench_arrays *a     = c->arrays;
    const bench_shape  *shape = &a->shape;
    int64_t             hk    = h / (shape->heads / shape->heads_k);
    const float        *q     = a->q + at(c, shape->seqlen_q, shape->heads, b, query, h);
    double              sink = bench_sink_of(a, h), max = sink, sum;
    for (int64_t j = keys.begin; j < keys.end; j++) {
        const float *k = a->k + at(c, shape->seqlen_k, shape->heads_k, b, j, hk);
        bench_score  s = bench_score_of(a, c->scale * dot(q, k, shape->head_dim), h, query, j);
        c->prob[j]     = s.value;
        c->slope[j]    = s.slope;
        max            = fmax(max, s.value);
    }
    if (max == -INFINITY)
        return max;
    sum = exp(sink - max);
    for (int64_t j = keys.begin; j < keys.end; j++)
        sum += c->prob[j] = exp(c->prob[j] - max);
    for (int64_t j = keys.begin; j < keys.end; j++)
        c->prob[j] /= sum;
    return max + log(sum);
}

/* A query's output and LSE, and for the backward its dq. */
static void check_query(checker *c, flash_attn_pass pass, int64_t b, int64_t row, int64_t h)
{
    const bench_arrays *a     = c->arrays;
    const bench_shape  *shape = &a->shape;
    bench_keys          keys  = bench_keys_of(shape, row);
    int64_t             d = shape->head_dim, hk = h / (shape->heads / shape->heads_k);
    int64_t             first = at(c, shape->seqlen_q, shape->heads, b, row, h);
    double o[LARGEST_DIM] = {0}, o_size[LARGEST_DIM] = {0}, dq[LARGEST_DIM] = {0}, dq_size[LARGEST_DIM] = {0};
    double lse = find_probabilities(c, b, row, h, keys), delta = 0;
    for (int64_t j = keys.begin; j < keys.end; j++) {
        const float *v    = a->v + at(c, shape->seqlen_k, shape->heads_k, b, j, hk);
        double       prob = c->prob[j] * bench_kept(shape, b, h, row, j);
        for (int64_t n = 0; n < d; n++) {
            o[n] += prob * v[n];
            o_size[n] += prob * fabsf(v[n]);
        }
    }
    if (pass == FLASH_ATTN_FORWARD) {
        float found = ((const float *)a->problem.lse.data)[(b * shape->heads + h) * shape->seqlen_q + row];
        judge(c, &c->o, &a->problem.o, a->o, first, o, o_size);
        if (!c->standard && !((double)found == lse || fabs(found - lse) <= c->lse_tolerance * fmax(1, fabs(lse))))
            c->lse_right = false;
        return;
    }
    for (int64_t n = 0; n < d; n++)
        delta += a->dout[first + n] * o[n];
    for (int64_t j = keys.begin; j < keys.end; j++) {
        int64_t      key    = at(c, shape->seqlen_k, shape->heads_k, b, j, hk);
        double       dprob  = dot(a->dout + first, a->v + key, d) * bench_kept(shape, b, h, row, j);
        double       factor = c->scale * c->prob[j] * c->slope[j];
        const float *k      = a->k + key;
        for (int64_t n = 0; n < d; n++) {
            dq[n] += factor * (dprob - delta) * k[n];
            dq_size[n] += fabs(factor * k[n]) * (fabs(dprob) + fabs(delta));
        }
    }
    judge(c, &c->dq, &a->grads.dq, a->dq, first, dq, dq_size);
}

/* A key's dk and dv, from the library's LSE and O, which the forward's check has judged. */
static void check_key(checker *c, int64_t b, int64_t j, int64_t hk)
{
    const bench_arrays *a     = c->arrays;
    const bench_shape  *shape = &a->shape;
    int64_t             d = shape->head_dim, group = shape->heads / shape->heads_k;
    int64_t             key = at(c, shape->seqlen_k, shape->heads_k, b, j, hk);
    double  dk[LARGEST_DIM] = {0}, dk_size[LARGEST_DIM] = {0}, dv[LARGEST_DIM] = {0}, dv_size[LARGEST_DIM] = {0};
    checker library  = *c;
    library.standard = false;
    for (int64_t h = hk * group; h < (hk + 1) * group; h++)
        for (int64_t row = 0; row < shape->seqlen_q; row++) {
            bench_keys   keys  = bench_keys_of(shape, row);
            int64_t      first = at(c, shape->seqlen_q, shape->heads, b, row, h);
            const float *q = a->q + first, *dout = a->dout + first;
            if (j < keys.begin || j >= keys.end)
                continue;
            double lse  = (double)((const float *)a->problem.lse.data)[(b * shape->heads + h) * shape->seqlen_q + row];
            double kept = bench_kept(shape, b, h, row, j), delta = 0;
            bench_score s    = bench_score_of(a, c->scale * dot(q, a->k + key, d), h, row, j);
            double      prob = exp(s.value - lse), dprob = kept * dot(dout, a->v + key, d);
            double      factor = c->scale * s.slope * prob;
            for (int64_t n = 0; n < d; n++)
                delta += dout[n] * result(&library, &a->problem.o, NULL, first + n);
            for (int64_t n = 0; n < d; n++) {
                dv[n] += kept * prob * dout[n];
                dv_size[n] += kept * prob * fabsf(dout[n]);
                dk[n] += factor * (dprob - delta) * q[n];
                dk_size[n] += fabs(factor * q[n]) * (fabs(dprob) + fabs(delta));
            }
        }
    judge(c, &c->dk, &a->grads.dk, a->dk, key, dk, dk_size);
    judge(c, &c->dv, &a->grads.dv, a->dv, key, dv, dv_size);
}

/* The relative error; *right if it is within the tolerance and what float32 loses where large terms cancel (as in the
 * gradient of a query that sees one key, which is 0). */
static double settle(const tally *t, double tolerance, bool *right)
{
    double error = sqrt(t->error2), reference = sqrt(t->reference2);
    if (!(error <= tolerance * reference + 0x1p-22 * sqrt(t->magnitude2)))
        *right = false;
    return reference > 0 ? error / reference : error;
}

double bench_error(const bench_arrays *arrays, flash_attn_pass pass, bool standard, const bench_bounds *bounds,
                   bool *right)
{
    const bench_shape *shape  = &arrays->shape;
    uint64_t           random = bounds->seed ^ 0xC4EC;
    checker c = {.arrays = arrays, .standard = standard, .lse_tolerance = bounds->lse_tolerance, .lse_right = true};
    const cli_number *scale = &shape->options.scale;
    c.scale                 = scale->given ? (double)(float)scale->value : 1.0 / sqrt((double)shape->head_dim);
    c.prob                  = malloc(2 * (size_t)shape->seqlen_k * sizeof *c.prob);
    c.slope                 = c.prob + shape->seqlen_k;
    *right                  = c.prob != NULL && shape->head_dim <= LARGEST_DIM;
    if (!*right) {
        free(c.prob);
        return INFINITY;
    }
    for (int n = 0; n < bounds->rows; n++) { /* the first and the last row, then random ones */
        int64_t b = random_int(&random, 0, (int)shape->batch - 1), h = random_int(&random, 0, (int)shape->heads - 1);
        int64_t row = random_int(&random, 0, (int)shape->seqlen_q - 1),
                key = random_int(&random, 0, (int)shape->seqlen_k - 1);
        check_query(&c, pass, b, n == 0 ? 0 : n == 1 ? shape->seqlen_q - 1 : row, h);
        if (pass == FLASH_ATTN_BACKWARD)
            check_key(&c, b, n == 0 ? 0 : n == 1 ? shape->seqlen_k - 1 : key, h / (shape->heads / shape->heads_k));
    }
    free(c.prob);
    if (pass == FLASH_ATTN_FORWARD) {
        *right = c.lse_right;
        return settle(&c.o, bounds->tolerance, right);
    }
    return fmax(settle(&c.dq, bounds->tolerance, right),
                fmax(settle(&c.dk, bounds->tolerance, right), settle(&c.dv, bounds->tolerance, right)));
}
