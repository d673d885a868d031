/*
 * What one thread of this machine reaches: forward and backward against the FMA peak, measured in the same run.
 *
 *     cpu_kernel [--tier avx512] [--dtype f32] [--seqlen 4096] [--head-dim 128] [--rounds 5] [--causal] [--decode]
 *
 * The peak is a loop of independent fused multiply-adds on registers; it and the calls take turns, and the fastest of
 * each counts, so that a busy machine hurts both alike. Inputs are random: zeros would run faster than anybody's data.
 * --decode times one query of 32 heads on 8 key heads and reports bytes of K and V a second beside a plain read's.
 */
#include "flashattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* one thread: what other programs take does not count */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the machine's limits ---- */

#define CHAINS 12 /* independent sums: more than latency (4) times ports (2) */
#define PEAK_STEPS 100000

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static float peak_avx512(void)
{
    __m512 sum[CHAINS], a = _mm512_set1_ps(0.9999f), b = _mm512_set1_ps(1e-6f);
    for (int n = 0; n < CHAINS; n++)
        sum[n] = _mm512_set1_ps((float)n);
    for (int step = 0; step < PEAK_STEPS; step++)
        for (int n = 0; n < CHAINS; n++)
            sum[n] = _mm512_fmadd_ps(sum[n], a, b);
    for (int n = 1; n < CHAINS; n++)
        sum[0] = _mm512_add_ps(sum[0], sum[n]);
    return _mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx2,fma"))) static float peak_avx2(void)
{
    __m256 sum[CHAINS], a = _mm256_set1_ps(0.9999f), b = _mm256_set1_ps(1e-6f);
    for (int n = 0; n < CHAINS; n++)
        sum[n] = _mm256_set1_ps((float)n);
    for (int step = 0; step < PEAK_STEPS; step++)
        for (int n = 0; n < CHAINS; n++)
            sum[n] = _mm256_fmadd_ps(sum[n], a, b);
    float lanes[8], total = 0;
    for (int n = 0; n < CHAINS; n++) {
        _mm256_storeu_ps(lanes, sum[n]);
        total += lanes[n % 8];
    }
    return total;
}
#endif

typedef float vector4 __attribute__((vector_size(16)));

static float peak_plain(void)
{
    vector4 sum[CHAINS], a = {0.9999f, 0.9999f, 0.9999f, 0.9999f}, b = {1e-6f, 1e-6f, 1e-6f, 1e-6f};
    for (int n = 0; n < CHAINS; n++)
        sum[n] = (vector4){(float)n, 1, 2, 3};
    for (int step = 0; step < PEAK_STEPS; step++)
        for (int n = 0; n < CHAINS; n++)
            sum[n] = sum[n] * a + b;
    float total = 0;
    for (int n = 0; n < CHAINS; n++)
        total += sum[n][n % 4];
    return total;
}

static volatile float sink; /* keeps what is timed from being thrown away */

/* Seconds and FLOP of one peak loop with the vectors that the tier has. */
static double time_peak(flash_attn_isa isa, double *flop)
{
    (void)isa; /* not every architecture has more than one */
    double start = now();
    int    lanes = 4;
#if defined(__x86_64__)
    if (isa >= FLASH_ATTN_ISA_AVX512) {
        lanes = 16;
        sink  = peak_avx512();
    } else if (isa == FLASH_ATTN_ISA_AVX2) {
        lanes = 8;
        sink  = peak_avx2();
    } else
#endif
        sink = peak_plain();
    *flop = 2.0 * lanes * CHAINS * PEAK_STEPS;
    return now() - start;
}

static double time_read(const char *data, size_t bytes)
{
    typedef long vector8 __attribute__((vector_size(64)));
    double       start  = now();
    vector8      sum[4] = {{0}};
    for (size_t at = 0; at + 256 <= bytes; at += 256)
        for (int n = 0; n < 4; n++) {
            vector8 x;
            memcpy(&x, data + at + 64 * (size_t)n, sizeof x);
            sum[n] ^= x;
        }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    sink = (float)sum[0][0];
    return now() - start;
}

/* ---- problems ---- */

typedef struct options {
    flash_attn_isa   isa;
    flash_attn_dtype dtype;
    int64_t          seqlen, head_dim;
    int              rounds;
    bool             causal, decode;
} options;

static uint64_t random_state = 88172645463325252ull;

static float random_float(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (float)((double)(random_state >> 40) / 8388608.0 - 1.0);
}

static uint16_t half_of(float x, flash_attn_dtype dtype)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == FLASH_ATTN_BF16)
        return (uint16_t)(bits >> 16);
    if ((bits & 0x7FFFFFFF) < 0x38800000) /* below float16's normal numbers */
        return (uint16_t)(bits >> 16 & 0x8000);
    return (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7FFFFFFF) - 0x38000000) >> 13);
}

static flash_attn_tensor tensor(flash_attn_dtype dtype, int64_t b, int64_t s, int64_t h, int64_t d)
{
    flash_attn_tensor t     = {.dtype = dtype, .shape = {b, s, h, d}};
    size_t            count = (size_t)(b * s * h * d);
    t.data                  = malloc(count * (dtype == FLASH_ATTN_F32 ? 4 : 2));
    if (!t.data) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    for (size_t n = 0; n < count; n++) {
        if (dtype == FLASH_ATTN_F32)
            ((float *)t.data)[n] = random_float();
        else
            ((uint16_t *)t.data)[n] = half_of(random_float(), dtype);
    }
    return t;
}

static void must(flash_attn_status status)
{
    if (status != FLASH_ATTN_OK) {
        fprintf(stderr, "%s: %s\n", flash_attn_status_string(status), flash_attn_last_error());
        exit(1);
    }
}

static void free_tensors(flash_attn_problem *p, flash_attn_grads *g)
{
    free(p->q.data), free(p->k.data), free(p->v.data), free(p->o.data), free(p->lse.data);
    if (g)
        free(g->dout.data), free(g->dq.data), free(g->dk.data), free(g->dv.data);
}

static void run_training(flash_attn_context *context, const options *opt)
{
    int64_t            s = opt->seqlen, d = opt->head_dim;
    flash_attn_problem p = {0};
    flash_attn_grads   g = {0};
    p.q = tensor(opt->dtype, 1, s, 1, d), p.k = tensor(opt->dtype, 1, s, 1, d), p.v = tensor(opt->dtype, 1, s, 1, d);
    p.o = tensor(opt->dtype, 1, s, 1, d), p.lse = tensor(FLASH_ATTN_F32, 1, 1, s, 1);
    g.dout = tensor(opt->dtype, 1, s, 1, d), g.dq = tensor(opt->dtype, 1, s, 1, d);
    g.dk = tensor(opt->dtype, 1, s, 1, d), g.dv = tensor(opt->dtype, 1, s, 1, d);
    p.mask = opt->causal ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
    flash_attn_explanation about;
    must(flash_attn_explain(context, &p, FLASH_ATTN_FORWARD, &about));
    double peak = 1e30, forward = 1e30, backward = 1e30, flop = 0;
    for (int round = 0; round < opt->rounds; round++) {
        double t0 = time_peak(opt->isa, &flop), t1 = now();
        must(flash_attn_forward(context, &p, NULL));
        double t2 = now();
        must(flash_attn_backward(context, &p, &g, NULL));
        double t3 = now();
        peak      = t0 < peak ? t0 : peak;
        forward   = t2 - t1 < forward ? t2 - t1 : forward;
        backward  = t3 - t2 < backward ? t3 - t2 : backward;
    }
    double rate = flop / peak / 1e9, f = about.flops / forward / 1e9, b = 2.5 * about.flops / backward / 1e9;
    printf("%-22s s %6lld d %3lld  peak %6.1f GFLOP/s  forward %6.1f (%4.1f%%)  backward %6.1f (%4.1f%%)\n",
           about.kernel, (long long)s, (long long)d, rate, f, 100 * f / rate, b, 100 * b / rate);
    free_tensors(&p, &g);
}

static void run_decode(flash_attn_context *context, const options *opt)
{
    int64_t            s = opt->seqlen, d = opt->head_dim;
    flash_attn_problem p = {0};
    p.q = tensor(opt->dtype, 1, 1, 32, d), p.k = tensor(opt->dtype, 1, s, 8, d), p.v = tensor(opt->dtype, 1, s, 8, d);
    p.o          = tensor(opt->dtype, 1, 1, 32, d);
    size_t bytes = (size_t)(s * 8 * d) * (opt->dtype == FLASH_ATTN_F32 ? 4 : 2);
    double read = 1e30, decode = 1e30;
    for (int round = 0; round < opt->rounds; round++) {
        double t0 = time_read(p.k.data, bytes) + time_read(p.v.data, bytes), t1 = now();
        must(flash_attn_forward(context, &p, NULL));
        double t2 = now();
        read      = t0 < read ? t0 : read;
        decode    = t2 - t1 < decode ? t2 - t1 : decode;
    }
    printf("decode 32 on 8 heads, %lld keys, d %lld: read %.1f GB/s, decode %.1f GB/s (%.0f%%), %.3f ms\n",
           (long long)s, (long long)d, 2e-9 * (double)bytes / read, 2e-9 * (double)bytes / decode, 100 * read / decode,
           1e3 * decode);
    free_tensors(&p, NULL);
}

static int choice(const char *value, const char *const *names, int count)
{
    for (int n = 0; n < count; n++)
        if (strcmp(value, names[n]) == 0)
            return n;
    fprintf(stderr, "unknown value %s\n", value);
    exit(2);
}

int main(int argc, char **argv)
{
    static const char *const tiers[]  = {"auto", "scalar", "neon", "avx2", "avx512", "amx", "amx-fp16", "neon-bf16", "avx512-bf16"},
                      *const dtypes[] = {"f32", "f16", "bf16"};
    options opt = {.seqlen = 4096, .head_dim = 128, .rounds = 5};
    for (int n = 1; n < argc; n++) {
        const char *value = n + 1 < argc ? argv[n + 1] : "";
        if (strcmp(argv[n], "--causal") == 0)
            opt.causal = true;
        else if (strcmp(argv[n], "--decode") == 0)
            opt.decode = true;
        else if (strcmp(argv[n], "--tier") == 0)
            opt.isa = (flash_attn_isa)choice(value, tiers, 9), n++;
        else if (strcmp(argv[n], "--dtype") == 0)
            opt.dtype = (flash_attn_dtype)choice(value, dtypes, 3), n++;
        else if (strcmp(argv[n], "--seqlen") == 0)
            opt.seqlen = atoll(value), n++;
        else if (strcmp(argv[n], "--head-dim") == 0)
            opt.head_dim = atoll(value), n++;
        else if (strcmp(argv[n], "--rounds") == 0)
            opt.rounds = atoi(value), n++;
        else {
            fprintf(stderr, "unknown option %s\n", argv[n]);
            return 2;
        }
    }
    flash_attn_context    *context = NULL;
    flash_attn_options     how     = {.num_threads = 1, .max_isa = opt.isa};
    flash_attn_device_info info;
    must(flash_attn_create(&context, &how));
    must(flash_attn_get_device_info(context, (flash_attn_device){FLASH_ATTN_CPU, 0}, &info));
    opt.isa = (flash_attn_isa)choice(info.isa, tiers, 7);
    if (opt.decode)
        run_decode(context, &opt);
    else
        run_training(context, &opt);
    flash_attn_destroy(context);
    return 0;
}
