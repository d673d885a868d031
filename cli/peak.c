#include "peak.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double cli_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A kernel does `rounds` rounds of ACCUMULATORS independent operations, enough to hide the latency of each, and returns
 * something that depends on all of them, so that no compiler can leave them out. */
enum { ACCUMULATORS = 12 };
typedef float (*peak_kernel)(int64_t rounds);

/* acc = acc * FACTOR + ADDEND tends to a number near 1: neither overflow nor denormals, whose cost is another. */
#define FACTOR 0.875f
#define ADDEND 0.125f

#define DEFINE_FMA_KERNEL(name, attributes, vector, set, fma, first)                                                   \
    attributes static float name(int64_t rounds)                                                                       \
    {                                                                                                                  \
        vector acc[ACCUMULATORS], factor = set(FACTOR), addend = set(ADDEND);                                          \
        for (int i = 0; i < ACCUMULATORS; i++)                                                                         \
            acc[i] = set(1.0f + 0.01f * (float)i);                                                                     \
        for (int64_t n = 0; n < rounds; n++)                                                                           \
            for (int i = 0; i < ACCUMULATORS; i++)                                                                     \
                acc[i] = fma(acc[i], factor, addend);                                                                  \
        float sum = 0;                                                                                                 \
        for (int i = 0; i < ACCUMULATORS; i++)                                                                         \
            sum += first(acc[i]);                                                                                      \
        return sum;                                                                                                    \
    }

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FMA512(a, b, c) _mm512_fmadd_ps(a, b, c)
DEFINE_FMA_KERNEL(fma_avx512, __attribute__((target("avx512f"))), __m512, _mm512_set1_ps, FMA512, _mm512_cvtss_f32)
#define FMA256(a, b, c) _mm256_fmadd_ps(a, b, c)
DEFINE_FMA_KERNEL(fma_avx2, __attribute__((target("avx2,fma"))), __m256, _mm256_set1_ps, FMA256, _mm256_cvtss_f32)
#define MUL_ADD128(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
DEFINE_FMA_KERNEL(fma_sse, , __m128, _mm_set1_ps, MUL_ADD128, _mm_cvtss_f32)

static const struct fma_choice {
    const char *name;
    peak_kernel kernel;
    int         lanes;
} * choose_fma(void)
{
    static const struct fma_choice choices[] = {
        {"AVX-512 FMA", fma_avx512, 16}, {"AVX2 FMA", fma_avx2, 8}, {"SSE multiply and add", fma_sse, 4}};
    return __builtin_cpu_supports("avx512f")                                 ? &choices[0]
           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &choices[1]
                                                                             : &choices[2];
}

/* Zeros would multiply faster than numbers. */
static void fill_bf16(uint16_t *out, int n)
{
    uint32_t random = 12345;
    for (int i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        out[i] = (uint16_t)(0x3F00 | random >> 25 | (random >> 9 & 0x8000)); /* +-[0.5, 1) */
    }
}

/* Four accumulator tiles, 16 x 16 each, from two and two operand tiles: as a matrix product would, without its loads.
 */
__attribute__((target("amx-tile,amx-bf16,avx512f"))) static float amx_products(int64_t rounds)
{
    struct {
        uint8_t  palette, start_row, reserved[14];
        uint16_t columns_bytes[16];
        uint8_t  rows[16];
    } config = {.palette = 1};
    uint16_t operand[16][32];
    float    result[16][16];
    fill_bf16(operand[0], 16 * 32);
    for (int tile = 0; tile < 8; tile++) {
        config.columns_bytes[tile] = 64;
        config.rows[tile]          = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, operand, 64);
    _tile_loadd(5, operand, 64);
    _tile_loadd(6, operand, 64);
    _tile_loadd(7, operand, 64);
    for (int64_t n = 0; n < rounds; n++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, 64);
    _tile_release();
    return result[3][5];
}

/* A sum that grows ends where adding no longer changes it, far from infinity. */
__attribute__((target("avx512f,avx512bf16"))) static float bf16_products(int64_t rounds)
{
    uint16_t operand[2][32];
    __m512i  of[2];
    __m512   acc[ACCUMULATORS];
    fill_bf16(operand[0], 2 * 32);
    memcpy(of, operand, sizeof of);
    for (int i = 0; i < ACCUMULATORS; i++)
        acc[i] = _mm512_set1_ps((float)i);
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < ACCUMULATORS; i++)
            acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)of[0], (__m512bh)of[1]);
    float sum = 0;
    for (int i = 0; i < ACCUMULATORS; i++)
        sum += _mm512_cvtss_f32(acc[i]);
    return sum;
}

static bool may_use_amx(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA_NEON(a, b, c) vfmaq_f32(c, a, b)
#define FIRST_NEON(a) vgetq_lane_f32(a, 0)
DEFINE_FMA_KERNEL(fma_plain, , float32x4_t, vdupq_n_f32, FMA_NEON, FIRST_NEON)
enum { PLAIN_LANES = 4 };
#define PLAIN_NAME "NEON FMA"
#else
#define SET_PLAIN(x) (x)
#define MUL_ADD_PLAIN(a, b, c) ((a) * (b) + (c))
DEFINE_FMA_KERNEL(fma_plain, , float, SET_PLAIN, MUL_ADD_PLAIN, SET_PLAIN)
enum { PLAIN_LANES = 1 };
#define PLAIN_NAME "scalar multiply and add"
#endif

static const struct fma_choice {
    const char *name;
    peak_kernel kernel;
    int         lanes;
} * choose_fma(void)
{
    static const struct fma_choice only = {PLAIN_NAME, fma_plain, PLAIN_LANES};
    return &only;
}

static float amx_products(int64_t rounds) { return (float)rounds; }
static float bf16_products(int64_t rounds) { return (float)rounds; }
static bool  may_use_amx(void) { return false; }

#endif

typedef struct peak_job {
    peak_kernel    kernel;
    int64_t        rounds;
    volatile float sink;
} peak_job;

static void peak_task(void *arg, int64_t index, int thread)
{
    peak_job *job = arg;
    (void)index, (void)thread;
    job->sink = job->kernel(job->rounds);
}

/* All threads at once; a burst is long enough that waking the threads hardly counts, and short enough
 * to fit between two turns that the system gives to other programs. */
static void measure(cli_pool *pool, peak_kernel kernel, double flops_a_round, int bursts, int64_t *rounds, double *best)
{
    const double burst_s = 0.004;
    int          count   = cli_pool_threads(pool);
    peak_job     job     = {.kernel = kernel, .rounds = *rounds ? *rounds : 1000};
    for (int burst = 0; burst < bursts;) {
        double start = cli_seconds();
        cli_pool_run(pool, count, peak_task, &job);
        double seconds = cli_seconds() - start;
        if (seconds < burst_s / 2 && job.rounds < (int64_t)1 << 40) {
            job.rounds *= 2;
            continue;
        }
        double gflops = flops_a_round * (double)job.rounds * count / seconds * 1e-9;
        *best         = gflops > *best ? gflops : *best;
        burst++;
    }
    *rounds = job.rounds;
}

void cli_measure_peaks(cli_peaks *peaks, cli_pool *pool, int bursts, const char *tier)
{
    const struct fma_choice *fma = choose_fma();
    peaks->fma_name              = fma->name;
    measure(pool, fma->kernel, 2.0 * fma->lanes * ACCUMULATORS, bursts, &peaks->fma_rounds, &peaks->fma_gflops);
    if (strncmp(tier, "amx", 3) == 0 && may_use_amx())
        measure(pool, amx_products, 4 * 2.0 * 16 * 16 * 32, bursts, &peaks->bf16_rounds, &peaks->amx_gflops);
    if (strcmp(tier, "avx512-bf16") == 0)
        measure(pool, bf16_products, 2.0 * 32 * ACCUMULATORS, bursts, &peaks->bf16_rounds, &peaks->bf16_gflops);
}

cli_bf16_peak cli_bf16_peak_of(const cli_peaks *peaks)
{
    return peaks->amx_gflops > 0    ? (cli_bf16_peak){"AMX", peaks->amx_gflops}
           : peaks->bf16_gflops > 0 ? (cli_bf16_peak){"AVX512_BF16", peaks->bf16_gflops}
                                    : (cli_bf16_peak){NULL, 0};
}

/* ---- memory ---- */

typedef struct read_job {
    char         *data;
    int64_t       part_bytes; /* of each thread, a multiple of READ_STREAMS * READ_STEP */
    bool          fill;
    int           streams; /* that a part is read as, a step of each in turn: 1 or READ_STREAMS */
    volatile long sink;
} read_job;

enum { READ_STEP = 256, READ_STREAMS = 8, READ_AHEAD = 1024 };

/* While one stream waits for memory, or for the address of its next page, the others go on. Streams ask ahead by
 * themselves, which the processor does for a single one. The thread that reads a part has written it, so that it lies
 * in the memory nearest to it. */
static void read_task(void *arg, int64_t index, int thread)
{
    typedef long vector8 __attribute__((vector_size(64)));
    read_job    *job          = arg;
    char        *part         = job->data + index * job->part_bytes;
    int64_t      stream_bytes = job->part_bytes / job->streams;
    vector8      sum[4]       = {{0}};
    (void)thread;
    if (job->fill) {
        memset(part, (int)index + 1, (size_t)job->part_bytes);
        return;
    }
    for (int64_t at = 0; at < stream_bytes; at += READ_STEP)
        for (const char *from = part + at; from < part + job->part_bytes; from += stream_bytes)
            for (int n = 0; n < 4; n++) {
                vector8 x;
                if (job->streams > 1)
                    __builtin_prefetch(from + READ_AHEAD + 64 * n);
                memcpy(&x, from + 64 * n, sizeof x);
                sum[n] ^= x;
            }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    job->sink = sum[0][0];
}

bool cli_measure_read(cli_peaks *peaks, cli_pool *pool, int64_t bytes, int passes)
{
    int64_t  step = READ_STREAMS * READ_STEP, count = cli_pool_threads(pool), part = bytes / count / step * step;
    read_job job = {.part_bytes = part > step ? part : step, .fill = true, .streams = 1};
    job.data     = malloc((size_t)(job.part_bytes * count));
    if (!job.data)
        return false;
    cli_pool_run(pool, count, read_task, &job);
    job.fill = false;
    for (int pass = 0; pass < passes; pass++) {
        double start = cli_seconds();
        job.streams  = pass % 2 ? READ_STREAMS : 1; /* which is faster depends on the machine */
        cli_pool_run(pool, count, read_task, &job);
        double gbps      = 1e-9 * (double)(job.part_bytes * count) / (cli_seconds() - start);
        peaks->read_gbps = gbps > peaks->read_gbps ? gbps : peaks->read_gbps;
    }
    free(job.data);
    return true;
}
