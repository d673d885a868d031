#include "standard.h"

#include "clones.h"
#include "gemm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t standard_bytes(const standard_shape *shape, bool backward)
{
    int64_t rows = 0, bytes = 0;
    if (__builtin_mul_overflow(shape->batch * shape->heads, shape->seqlen_q, &rows) ||
        __builtin_mul_overflow(rows, shape->seqlen_k * (backward ? 2 : 1) + (backward ? 1 : 0), &bytes) ||
        __builtin_mul_overflow(bytes, (int64_t)sizeof(float), &bytes))
        return -1;
    return bytes;
}

bool standard_create(standard *s, const standard_shape *shape, bool backward, cli_pool *pool)
{
    size_t rows   = (size_t)(shape->batch * shape->heads * shape->seqlen_q);
    size_t matrix = rows * (size_t)shape->seqlen_k * sizeof(float);
    *s            = (standard){.shape = *shape, .pool = pool, .prob = malloc(matrix)};
    if (backward) {
        s->dprob = malloc(matrix);
        s->delta = malloc(rows * sizeof(float));
    }
    if (s->prob && (!backward || (s->dprob && s->delta)))
        return true;
    standard_destroy(s);
    return false;
}

void standard_destroy(standard *s)
{
    free(s->prob);
    free(s->dprob);
    free(s->delta);
    *s = (standard){0};
}

/* ---- how a pass is cut: (batch, head) times blocks of rows ---- */

typedef struct job {
    standard    *s;
    const float *q, *k, *v, *dout, *o_read;
    float       *o, *dq, *dk, *dv;
    int64_t      rows_a_block;
} job;

typedef struct block {
    int64_t b, h, row, rows;
} block;

static block block_at(const job *j, int64_t heads, int64_t seqlen, int64_t index)
{
    int64_t blocks = (seqlen + j->rows_a_block - 1) / j->rows_a_block;
    block   at = {.b = index / blocks / heads, .h = index / blocks % heads, .row = index % blocks * j->rows_a_block};
    at.rows    = at.row + j->rows_a_block < seqlen ? j->rows_a_block : seqlen - at.row;
    return at;
}

/* A product of one head is one call at one thread; more threads get about four blocks each. */
static void run_pass(job *j, int64_t heads, int64_t seqlen, cli_task task)
{
    int     threads = cli_pool_threads(j->s->pool);
    int64_t units   = j->s->shape.batch * heads;
    int64_t wanted  = threads == 1 ? 1 : (4 * threads + units - 1) / units; /* blocks of a head */
    int64_t rows    = (seqlen + wanted - 1) / wanted;
    j->rows_a_block = rows < 32 ? 32 : rows;
    cli_pool_run(j->s->pool, units * ((seqlen + j->rows_a_block - 1) / j->rows_a_block), task, j);
}

/* First element of head h of row `row`; rows of one head are heads * head_dim apart. */
static int64_t at_row(const standard_shape *shape, int64_t heads, int64_t seqlen, int64_t b, int64_t row, int64_t h)
{
    return ((b * seqlen + row) * heads + h) * shape->head_dim;
}

static int64_t at_q(const standard_shape *shape, int64_t b, int64_t row, int64_t h)
{
    return at_row(shape, shape->heads, shape->seqlen_q, b, row, h);
}

/* The keys that query head h reads. */
static int64_t at_k(const standard_shape *shape, int64_t b, int64_t row, int64_t h)
{
    return at_row(shape, shape->heads_k, shape->seqlen_k, b, row, h / (shape->heads / shape->heads_k));
}

static int64_t at_score(const standard_shape *shape, int64_t b, int64_t h, int64_t row)
{
    return ((b * shape->heads + h) * shape->seqlen_q + row) * shape->seqlen_k;
}

/* Keys that query `row` sees: a prefix. */
static int64_t num_seen(const standard_shape *shape, int64_t row)
{
    int64_t seen = shape->causal ? row + 1 + shape->seqlen_k - shape->seqlen_q : shape->seqlen_k;
    return seen < 0 ? 0 : seen;
}

/* ---- forward ---- */

static void scores_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    cli_gemm(false, true, at.rows, shape->seqlen_k, shape->head_dim, shape->scale,
             j->q + at_q(shape, at.b, at.row, at.h), shape->heads * shape->head_dim, j->k + at_k(shape, at.b, 0, at.h),
             shape->heads_k * shape->head_dim, 0.0f, j->s->prob + at_score(shape, at.b, at.h, at.row), shape->seqlen_k);
}

/* e^x for x <= 0 as 2^n times a polynomial, to about one unit in the last place, in operations that vectorise; below
 * -87, where float32 runs out of normal numbers, 0. */
static inline float exp_of_negative(float x)
{
    const float shift = 0x1.8p23f; /* adding it rounds to a whole number, which then stands in the low bits */
    float       t = x * 1.44269504f + shift, n = t - shift;
    float       r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float       p = 1.9875691500e-4f;
    p             = p * r + 1.3981999507e-3f;
    p             = p * r + 8.3334519073e-3f;
    p             = p * r + 4.1665795894e-2f;
    p             = p * r + 1.6666665459e-1f;
    p             = p * r + 5.0000001201e-1f;
    p             = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &t, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* The longest loops carry sixteen partial results, which a compiler may keep in vectors without changing the meaning.
 */
enum { LANES = 16 };

CLI_CLONES static void softmax_row(float *row, int64_t seen, int64_t seqlen_k)
{
    float   max_lane[LANES], sum_lane[LANES] = {0}, max = -INFINITY, sum = 0;
    int64_t whole = seen / LANES * LANES;
    for (int l = 0; l < LANES; l++)
        max_lane[l] = -INFINITY;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++)
            max_lane[l] = row[j + l] > max_lane[l] ? row[j + l] : max_lane[l];
    for (int l = 0; l < LANES; l++)
        max = max_lane[l] > max ? max_lane[l] : max;
    for (int64_t j = whole; j < seen; j++)
        max = row[j] > max ? row[j] : max;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) {
            row[j + l] = exp_of_negative(row[j + l] - max);
            sum_lane[l] += row[j + l];
        }
    for (int64_t j = whole; j < seen; j++)
        sum += row[j] = exp_of_negative(row[j] - max);
    for (int l = 0; l < LANES; l++)
        sum += sum_lane[l];
    float inverse = seen > 0 ? 1.0f / sum : 0.0f;
    for (int64_t j = 0; j < seen; j++)
        row[j] *= inverse;
    for (int64_t j = seen; j < seqlen_k; j++)
        row[j] = 0.0f;
}

static void softmax_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    for (int64_t row = at.row; row < at.row + at.rows; row++)
        softmax_row(j->s->prob + at_score(shape, at.b, at.h, row), num_seen(shape, row), shape->seqlen_k);
}

static void output_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    cli_gemm(false, false, at.rows, shape->head_dim, shape->seqlen_k, 1.0f,
             j->s->prob + at_score(shape, at.b, at.h, at.row), shape->seqlen_k, j->v + at_k(shape, at.b, 0, at.h),
             shape->heads_k * shape->head_dim, 0.0f, j->o + at_q(shape, at.b, at.row, at.h),
             shape->heads * shape->head_dim);
}

void standard_forward(standard *s, const float *q, const float *k, const float *v, float *o)
{
    job j = {.s = s, .q = q, .k = k, .v = v, .o = o};
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, scores_task);
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, softmax_task);
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, output_task);
}

/* ---- backward: dP = dO V^T; dS = P * (dP - D); dQ = dS K; dK = dS^T Q; dV = P^T dO ---- */

static void dprob_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    cli_gemm(false, true, at.rows, shape->seqlen_k, shape->head_dim, 1.0f, j->dout + at_q(shape, at.b, at.row, at.h),
             shape->heads * shape->head_dim, j->v + at_k(shape, at.b, 0, at.h), shape->heads_k * shape->head_dim, 0.0f,
             j->s->dprob + at_score(shape, at.b, at.h, at.row), shape->seqlen_k);
    for (int64_t row = at.row; row < at.row + at.rows; row++) {
        const float *dout = j->dout + at_q(shape, at.b, row, at.h), *o = j->o_read + at_q(shape, at.b, row, at.h);
        float        delta = 0.0f;
        for (int64_t c = 0; c < shape->head_dim; c++)
            delta += dout[c] * o[c];
        j->s->delta[at_score(shape, at.b, at.h, row) / shape->seqlen_k] = delta;
    }
}

CLI_CLONES static void dscores_row(float *dprob, const float *prob, float delta, int64_t seqlen_k)
{
    for (int64_t j = 0; j < seqlen_k; j++)
        dprob[j] = prob[j] * (dprob[j] - delta);
}

static void dscores_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    for (int64_t row = at.row; row < at.row + at.rows; row++) {
        int64_t first = at_score(shape, at.b, at.h, row);
        dscores_row(j->s->dprob + first, j->s->prob + first, j->s->delta[first / shape->seqlen_k], shape->seqlen_k);
    }
}

static void dq_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads, shape->seqlen_q, index);
    (void)thread;
    cli_gemm(false, false, at.rows, shape->head_dim, shape->seqlen_k, shape->scale,
             j->s->dprob + at_score(shape, at.b, at.h, at.row), shape->seqlen_k, j->k + at_k(shape, at.b, 0, at.h),
             shape->heads_k * shape->head_dim, 0.0f, j->dq + at_q(shape, at.b, at.row, at.h),
             shape->heads * shape->head_dim);
}

/* Key head h gets the sum over the query heads that read it. */
static void dkv_task(void *arg, int64_t index, int thread)
{
    job                  *j     = arg;
    const standard_shape *shape = &j->s->shape;
    block                 at    = block_at(j, shape->heads_k, shape->seqlen_k, index);
    int64_t               group = shape->heads / shape->heads_k;
    (void)thread;
    for (int64_t g = 0; g < group; g++) {
        int64_t h = at.h * group + g, score = at_score(shape, at.b, h, 0) + at.row;
        int64_t to = at_k(shape, at.b, at.row, h), from = at_q(shape, at.b, 0, h);
        cli_gemm(true, false, at.rows, shape->head_dim, shape->seqlen_q, 1.0f, j->s->prob + score, shape->seqlen_k,
                 j->dout + from, shape->heads * shape->head_dim, g > 0, j->dv + to, shape->heads_k * shape->head_dim);
        cli_gemm(true, false, at.rows, shape->head_dim, shape->seqlen_q, shape->scale, j->s->dprob + score,
                 shape->seqlen_k, j->q + from, shape->heads * shape->head_dim, g > 0, j->dk + to,
                 shape->heads_k * shape->head_dim);
    }
}

void standard_backward(standard *s, const float *q, const float *k, const float *v, const float *o, const float *dout,
                       float *dq, float *dk, float *dv)
{
    job j = {.s = s, .q = q, .k = k, .v = v, .o_read = o, .dout = dout, .dq = dq, .dk = dk, .dv = dv};
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, dprob_task);
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, dscores_task);
    run_pass(&j, s->shape.heads, s->shape.seqlen_q, dq_task);
    run_pass(&j, s->shape.heads_k, s->shape.seqlen_k, dkv_task);
}
