/* The layers that are neither attention nor a matrix product. Each op is one struct of arguments, one function over a
 * range of rows (or columns, where rows are summed), and one that hands the ranges to the threads. */
#include "gpt.h"

#include <math.h>
#include <string.h>

enum { ROW_GRAIN = 8, COLUMN_GRAIN = 16, FLAT_GRAIN = 4096 };

/* ---- embedding ---- */

typedef struct embed_job {
    const uint8_t *tokens;
    int64_t        rows;
    int            width;
    const float   *source;
    float         *target;
} embed_job;

static void embed_rows(void *arg, int64_t begin, int64_t end)
{
    const embed_job *job = arg;
    for (int64_t t = begin; t < end; t++)
        memcpy(job->target + t * job->width, job->source + job->tokens[t] * (int64_t)job->width,
               (size_t)job->width * sizeof(float));
}

/* Rows of one token meet in one row of the gradient, so the threads share out the columns. */
static void embed_backward_columns(void *arg, int64_t begin, int64_t end)
{
    const embed_job *job = arg;
    for (int64_t t = 0; t < job->rows; t++) {
        const float *dx  = job->source + t * job->width;
        float       *sum = job->target + job->tokens[t] * (int64_t)job->width;
        for (int64_t i = begin; i < end; i++)
            sum[i] += dx[i];
    }
}

void gpt_embed(gpt_threads *threads, const uint8_t *tokens, int64_t rows, int width, const float *embedding, float *x)
{
    embed_job job = {tokens, rows, width, embedding, x};
    gpt_threads_range(threads, rows, ROW_GRAIN, embed_rows, &job);
}

void gpt_embed_backward(gpt_threads *threads, const uint8_t *tokens, int64_t rows, int width, const float *dx,
                        float *dembedding)
{
    embed_job job = {tokens, rows, width, dx, dembedding};
    gpt_threads_range(threads, width, COLUMN_GRAIN, embed_backward_columns, &job);
}

/* ---- RMSNorm ---- */

typedef struct rmsnorm_job {
    int64_t      rows;
    int          width;
    const float *x, *gain, *dy;
    float       *y, *inverse_rms, *dx, *dgain;
} rmsnorm_job;

static void rmsnorm_rows(void *arg, int64_t begin, int64_t end)
{
    const rmsnorm_job *job = arg;
    for (int64_t t = begin; t < end; t++) {
        const float *x = job->x + t * job->width;
        float       *y = job->y + t * job->width, sum = 0;
        for (int i = 0; i < job->width; i++)
            sum += x[i] * x[i];
        float inverse_rms   = 1.0f / sqrtf(sum / (float)job->width + 1e-6f);
        job->inverse_rms[t] = inverse_rms;
        for (int i = 0; i < job->width; i++)
            y[i] = job->gain[i] * x[i] * inverse_rms;
    }
}

/* With r = 1 / rms: dx_i = r (g_i dy_i - x_i r^2 mean_j(g_j dy_j x_j)). */
static void rmsnorm_backward_rows(void *arg, int64_t begin, int64_t end)
{
    const rmsnorm_job *job = arg;
    for (int64_t t = begin; t < end; t++) {
        const float *x = job->x + t * job->width, *dy = job->dy + t * job->width;
        float       *dx = job->dx + t * job->width, r = job->inverse_rms[t], sum = 0;
        for (int i = 0; i < job->width; i++)
            sum += job->gain[i] * dy[i] * x[i];
        float along = r * r * sum / (float)job->width;
        for (int i = 0; i < job->width; i++)
            dx[i] += r * (job->gain[i] * dy[i] - x[i] * along);
    }
}

static void rmsnorm_backward_columns(void *arg, int64_t begin, int64_t end)
{
    const rmsnorm_job *job = arg;
    for (int64_t t = 0; t < job->rows; t++) {
        const float *x = job->x + t * job->width, *dy = job->dy + t * job->width;
        float        r = job->inverse_rms[t];
        for (int64_t i = begin; i < end; i++)
            job->dgain[i] += dy[i] * x[i] * r;
    }
}

void gpt_rmsnorm(gpt_threads *threads, int64_t rows, int width, const float *x, const float *gain, float *y,
                 float *inverse_rms)
{
    rmsnorm_job job = {.rows = rows, .width = width, .x = x, .gain = gain, .y = y, .inverse_rms = inverse_rms};
    gpt_threads_range(threads, rows, ROW_GRAIN, rmsnorm_rows, &job);
}

void gpt_rmsnorm_backward(gpt_threads *threads, int64_t rows, int width, const float *x, const float *gain,
                          const float *inverse_rms, const float *dy, float *dx, float *dgain)
{
    rmsnorm_job job = {rows, width, x, gain, dy, NULL, (float *)inverse_rms, dx, dgain};
    gpt_threads_range(threads, rows, ROW_GRAIN, rmsnorm_backward_rows, &job);
    gpt_threads_range(threads, width, COLUMN_GRAIN, rmsnorm_backward_columns, &job);
}

/* ---- rotary embedding ---- */

void gpt_rotary_tables(int positions, int head_dim, float *cosine, float *sine)
{
    int half = head_dim / 2;
    for (int t = 0; t < positions; t++)
        for (int i = 0; i < half; i++) {
            double angle         = t * pow(10000.0, -(double)i / half);
            cosine[t * half + i] = (float)cos(angle);
            sine[t * half + i]   = (float)sin(angle);
        }
}

typedef struct rotary_job {
    int          seqlen, heads, head_dim;
    const float *cosine, *sine;
    float        sign;
    float       *qkv;
} rotary_job;

static void rotary_rows(void *arg, int64_t begin, int64_t end)
{
    const rotary_job *job  = arg;
    int               half = job->head_dim / 2;
    for (int64_t t = begin; t < end; t++) {
        const float *cosine = job->cosine + t % job->seqlen * half, *sine = job->sine + t % job->seqlen * half;
        float       *row = job->qkv + t * 3 * job->heads * job->head_dim;
        for (int head = 0; head < 2 * job->heads; head++) { /* q's heads, then k's */
            float *low = row + head * job->head_dim, *high = low + half;
            for (int i = 0; i < half; i++) {
                float a = low[i], b = high[i], s = job->sign * sine[i];
                low[i]  = a * cosine[i] - b * s;
                high[i] = a * s + b * cosine[i];
            }
        }
    }
}

void gpt_rotary(gpt_threads *threads, int64_t rows, int seqlen, int heads, int head_dim, const float *cosine,
                const float *sine, bool inverse, float *qkv)
{
    rotary_job job = {seqlen, heads, head_dim, cosine, sine, inverse ? -1.0f : 1.0f, qkv};
    gpt_threads_range(threads, rows, ROW_GRAIN, rotary_rows, &job);
}

/* ---- GELU ---- */

/* exp to about 2e-7 relative, in plain arithmetic, so that the compiler can vectorise a loop over it. */
static inline __attribute__((always_inline)) float exp_fast(float x)
{
    x             = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float    n    = x * 1.44269504f + 0x1.8p23f; /* the low bits now hold round(x / ln 2) */
    uint32_t bits;
    memcpy(&bits, &n, sizeof bits);
    n -= 0x1.8p23f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* x - n ln 2, in two pieces */
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.66666667e-1f + r * (4.16666e-2f + r * (8.33394e-3f + r * 1.39e-3f)))));
    bits    = (bits << 23) + 0x3F800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* gelu(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form, as 1 + tanh(u) = 2 sigmoid(2 u). */
static inline __attribute__((always_inline)) float gelu_sigmoid(float x)
{
    return 1.0f / (1.0f + exp_fast(-1.59576912f * x * (1.0f + 0.044715f * x * x)));
}

typedef struct gelu_job {
    float *x, *y;
} gelu_job;

/* One body for each register width, as in matmul.c: this is the only other loop that weighs. */
static inline __attribute__((always_inline)) void gelu_body(const gelu_job *job, int64_t begin, int64_t end)
{
    float *restrict x = job->x, *restrict y = job->y;
    for (int64_t i = begin; i < end; i++) {
        float v = x[i], s = gelu_sigmoid(v);
        y[i]    = v * s;
        x[i]    = s + v * s * (1.0f - s) * 1.59576912f * (1.0f + 3.0f * 0.044715f * v * v);
    }
}

static void gelu_128(void *arg, int64_t begin, int64_t end) { gelu_body(arg, begin, end); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void gelu_256(void *arg, int64_t begin, int64_t end) { gelu_body(arg, begin, end); }
static gpt_range_task choose_gelu(void) { return __builtin_cpu_supports("avx2") ? gelu_256 : gelu_128; }
#else
static gpt_range_task choose_gelu(void) { return gelu_128; }
#endif

void gpt_gelu(gpt_threads *threads, int64_t count, float *x, float *y)
{
    gelu_job job = {x, y};
    gpt_threads_range(threads, count, FLAT_GRAIN, choose_gelu(), &job);
}

static void multiply_range(void *arg, int64_t begin, int64_t end)
{
    const gelu_job *job        = arg;
    const float *restrict x    = job->x;
    float *restrict y          = job->y;
    for (int64_t i = begin; i < end; i++)
        y[i] *= x[i];
}

void gpt_gelu_backward(gpt_threads *threads, int64_t count, const float *slope, float *gradient)
{
    gelu_job job = {(float *)slope, gradient};
    gpt_threads_range(threads, count, FLAT_GRAIN, multiply_range, &job);
}

/* ---- cross-entropy ---- */

typedef struct loss_job {
    int64_t        rows;
    const uint8_t *targets;
    float         *logits, *losses;
} loss_job;

static void loss_rows(void *arg, int64_t begin, int64_t end)
{
    const loss_job *job = arg;
    for (int64_t t = begin; t < end; t++) {
        float *row = job->logits + t * GPT_VOCABULARY, largest = row[0], target = row[job->targets[t]], sum = 0;
        for (int i = 1; i < GPT_VOCABULARY; i++)
            largest = row[i] > largest ? row[i] : largest;
        for (int i = 0; i < GPT_VOCABULARY; i++)
            row[i] = exp_fast(row[i] - largest);
        for (int i = 0; i < GPT_VOCABULARY; i++)
            sum += row[i];
        job->losses[t] = logf(sum) + largest - target;
        for (int i = 0; i < GPT_VOCABULARY; i++)
            row[i] *= 1.0f / (sum * (float)job->rows);
        row[job->targets[t]] -= 1.0f / (float)job->rows;
    }
}

double gpt_cross_entropy(gpt_threads *threads, int64_t rows, const uint8_t *targets, float *logits, float *losses)
{
    loss_job job = {rows, targets, logits, losses};
    gpt_threads_range(threads, rows, ROW_GRAIN, loss_rows, &job);
    double sum = 0;
    for (int64_t t = 0; t < rows; t++)
        sum += losses[t];
    return sum / (double)rows;
}

/* ---- bfloat16 ---- */

typedef struct round_job {
    const float *x;
    uint16_t    *out;
} round_job;

static void round_range(void *arg, int64_t begin, int64_t end)
{
    const round_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        uint32_t bits;
        memcpy(&bits, job->x + i, sizeof bits);
        job->out[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

void gpt_round_bf16(gpt_threads *threads, int64_t count, const float *x, uint16_t *out)
{
    round_job job = {x, out};
    gpt_threads_range(threads, count, FLAT_GRAIN, round_range, &job);
}

/* ---- AdamW ---- */

typedef struct adamw_job {
    gpt_adamw    adamw;
    float        correction1, correction2, gradient_scale;
    const float *gradient;
    float       *moment1, *moment2, *weight;
} adamw_job;

static void adamw_range(void *arg, int64_t begin, int64_t end)
{
    const adamw_job *job = arg;
    const gpt_adamw *a   = &job->adamw;
    const float *restrict gradient = job->gradient;
    float *restrict moment1 = job->moment1, *restrict moment2 = job->moment2, *restrict weight = job->weight;
    for (int64_t i = begin; i < end; i++) {
        float g    = gradient[i] * job->gradient_scale;
        moment1[i] = a->beta1 * moment1[i] + (1.0f - a->beta1) * g;
        moment2[i] = a->beta2 * moment2[i] + (1.0f - a->beta2) * g * g;
        float step = moment1[i] * job->correction1 / (sqrtf(moment2[i] * job->correction2) + a->epsilon);
        weight[i] -= a->learning_rate * (step + a->weight_decay * weight[i]);
    }
}

void gpt_adamw_step(gpt_threads *threads, const gpt_adamw *adamw, int64_t step, double gradient_scale, int64_t count,
                    const float *gradient, float *moment1, float *moment2, float *weight)
{
    adamw_job job = {.adamw = *adamw, .gradient_scale = (float)gradient_scale, .gradient = gradient};
    job.correction1 = (float)(1.0 / (1.0 - pow(adamw->beta1, (double)step)));
    job.correction2 = (float)(1.0 / (1.0 - pow(adamw->beta2, (double)step)));
    job.moment1     = moment1;
    job.moment2     = moment2;
    job.weight      = weight;
    gpt_threads_range(threads, count, FLAT_GRAIN, adamw_range, &job);
}

/* One thread: the sum's order must not depend on their number, and it is a hundredth of a step. */
double gpt_norm(const float *x, int64_t count)
{
    double sum = 0;
    for (int64_t begin = 0; begin < count; begin += FLAT_GRAIN) {
        float   partial[16] = {0};
        int64_t end         = begin + FLAT_GRAIN < count ? begin + FLAT_GRAIN : count, i = begin;
        for (; i + 16 <= end; i += 16)
            for (int lane = 0; lane < 16; lane++)
                partial[lane] += x[i + lane] * x[i + lane];
        for (; i < end; i++)
            partial[0] += x[i] * x[i];
        for (int lane = 0; lane < 16; lane++)
            sum += partial[lane];
    }
    return sqrt(sum);
}
