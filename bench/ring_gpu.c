/*
 * Ring attention over NCCL against the same problem on one GPU: checks that both agree, then times them by events. One
 * process, a thread for each GPU; bfloat16, causal, both passes.
 *
 *     ring_gpu [GPUs [heads [head_dim [seqlen ...]]]]
 *     ring_gpu --alone RANKS [heads [head_dim [seqlen ...]]]
 *
 * --alone: on one GPU, what a rank of so many has to do where nothing is sent and nothing arrives, zigzag: the longer
 * of the first rank's and the last one's time. Nothing is checked.
 */
#include "../examples/ring/nccl.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GPUS = 8, REPEATS = 5, Q = 0, K, V, DOUT, O, DQ, DK, DV, TENSORS };

static void stop_if(bool failed, const char *what)
{
    if (!failed)
        return;
    fprintf(stderr, "%s failed; %s\n", what, flash_attn_last_error());
    exit(1);
}

typedef struct problem {
    int64_t                seqlen;
    int                    heads, head_dim, gpus;
    flash_attn_ring_layout layout;
    bool                   dry; /* nothing is sent, by ranks that know nothing of NCCL: what the compute alone takes */
    uint16_t              *whole[TENSORS]; /* on the host */
} problem;

static size_t row_bytes(const problem *p) { return (size_t)p->heads * (size_t)p->head_dim * sizeof(uint16_t); }

/* One rank, or the only one. */
typedef struct rank {
    const problem        *problem;
    ncclComm_t            comm;
    int                   number, ranks, device;
    flash_attn_ring_share share;
    pthread_barrier_t    *barrier;
    double                milliseconds[2];
    double                largest[TENSORS]; /* difference from one GPU */
} rank;

static int64_t position(const flash_attn_ring_share *s, int64_t row)
{
    return row < s->count[0] ? s->begin[0] + row * s->step : s->begin[1] + (row - s->count[0]) * s->step;
}

static float number(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float    value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void *bring(const rank *r, int which)
{
    size_t row = row_bytes(r->problem), bytes = row * (size_t)r->share.rows;
    char  *host = malloc(bytes), *device;
    stop_if(!host || cudaMalloc((void **)&device, bytes) != cudaSuccess, "memory");
    for (int64_t i = 0; i < r->share.rows && which <= DOUT; i++)
        memcpy(host + (size_t)i * row, (char *)r->problem->whole[which] + (size_t)position(&r->share, i) * row, row);
    if (which <= DOUT)
        stop_if(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice) != cudaSuccess, "a copy");
    free(host);
    return device;
}

/* One GPU's results become the whole's; a rank's are compared with them. */
static void take_home(rank *r, int which, const void *device)
{
    size_t    row = row_bytes(r->problem), bytes = row * (size_t)r->share.rows, count = row / sizeof(uint16_t);
    uint16_t *host = malloc(bytes);
    stop_if(!host || cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost) != cudaSuccess, "a copy");
    for (int64_t i = 0; i < r->share.rows; i++) {
        uint16_t *of_whole = r->problem->whole[which] + (size_t)position(&r->share, i) * count,
                 *own      = host + (size_t)i * count;
        for (size_t n = 0; n < count && r->ranks > 1; n++) {
            double difference = fabs((double)number(own[n]) - number(of_whole[n]));
            r->largest[which] = difference <= r->largest[which] ? r->largest[which] : difference;
        }
        if (r->ranks == 1)
            memcpy(of_whole, own, row);
    }
    free(host);
}

static void meet(const rank *r)
{
    if (r->ranks > 1)
        pthread_barrier_wait(r->barrier);
}

static int send_nothing(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    (void)user, (void)send, (void)send_bytes, (void)recv, (void)recv_bytes, (void)stream;
    return 0;
}

/* What arrives where nothing is sent: numbers as good as others. Zeros would take less power, and with NaN rows are
 * computed once more. */
static void fill(void *workspace, size_t bytes, const void *numbers, size_t numbers_bytes)
{
    for (size_t at = 0; at < bytes; at += numbers_bytes)
        stop_if(cudaMemcpy((char *)workspace + at, numbers, bytes - at < numbers_bytes ? bytes - at : numbers_bytes,
                           cudaMemcpyDeviceToDevice) != cudaSuccess,
                "a copy");
    stop_if(cudaDeviceSynchronize() != cudaSuccess, "copies");
}

static void *run_rank(void *argument)
{
    rank          *r = argument;
    const problem *p = r->problem;
    cudaStream_t   stream;
    cudaEvent_t    event[REPEATS + 1];
    ring_nccl      nccl;
    void          *tensor[TENSORS], *lse, *workspace;
    bool           sends = r->ranks > 1 && !p->dry;
    stop_if(cudaSetDevice(r->device) != cudaSuccess ||
                cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess,
            "a stream");
    flash_attn_ring ring = {
        .rank = r->number, .ranks = r->ranks, .layout = p->layout, .seqlen_q = p->seqlen, .seqlen_k = p->seqlen};
    ring.transport.begin = send_nothing;
    if (sends) {
        stop_if(ring_nccl_open(&nccl, r->comm) != ncclSuccess, "NCCL");
        ring.transport = ring_nccl_transport(&nccl);
    }
    flash_attn_ring_get_share(p->layout, r->ranks, r->number, p->seqlen, &r->share);
    flash_attn_tensor t[TENSORS];
    for (int n = 0; n < TENSORS; n++) {
        tensor[n] = bring(r, n);
        t[n]      = (flash_attn_tensor){
                 .data = tensor[n], .dtype = FLASH_ATTN_BF16, .shape = {1, r->share.rows, p->heads, p->head_dim}};
    }
    stop_if(cudaMalloc(&lse, (size_t)r->share.rows * (size_t)p->heads * sizeof(float)) != cudaSuccess, "memory");
    flash_attn_problem call  = {.device = {FLASH_ATTN_CUDA, r->device},
                                .q      = t[Q],
                                .k      = t[K],
                                .v      = t[V],
                                .o      = t[O],
                                .lse    = {.data = lse},
                                .mask   = FLASH_ATTN_CAUSAL};
    flash_attn_grads   grads = {.dout = t[DOUT], .dq = t[DQ], .dk = t[DK], .dv = t[DV]};
    stop_if(cudaDeviceSynchronize() != cudaSuccess, "copies");
    for (int pass = 0; pass < 2; pass++) {
        flash_attn_exec exec = {.stream = stream};
        stop_if(flash_attn_ring_workspace_size(NULL, &call, &ring, (flash_attn_pass)pass, &exec.workspace_bytes) !=
                    FLASH_ATTN_OK,
                "the size");
        stop_if(cudaMalloc(&workspace, exec.workspace_bytes + 1) != cudaSuccess, "memory");
        exec.workspace = workspace;
        if (p->dry && r->ranks > 1)
            fill(workspace, exec.workspace_bytes, tensor[K], row_bytes(p) * (size_t)r->share.rows);
        for (int n = 0; n < REPEATS + 1; n++) { /* the first is not counted */
            meet(r);
            stop_if(cudaEventCreate(&event[n]) != cudaSuccess || cudaEventRecord(event[n], stream) != cudaSuccess,
                    "an event");
            flash_attn_status status = pass ? flash_attn_ring_backward(NULL, &call, &grads, &ring, &exec)
                                            : flash_attn_ring_forward(NULL, &call, &ring, &exec);
            stop_if(status != FLASH_ATTN_OK, "the call");
            cudaEvent_t end;
            float       ms = 0;
            stop_if(cudaEventCreate(&end) != cudaSuccess || cudaEventRecord(end, stream) != cudaSuccess ||
                        cudaEventSynchronize(end) != cudaSuccess ||
                        cudaEventElapsedTime(&ms, event[n], end) != cudaSuccess,
                    "timing");
            if (n == 1 || (n > 1 && ms < r->milliseconds[pass]))
                r->milliseconds[pass] = ms;
        }
        meet(r);
        cudaFree(workspace);
    }
    for (int n = O; n < TENSORS; n++)
        take_home(r, n, tensor[n]);
    for (int n = 0; n < TENSORS; n++)
        cudaFree(tensor[n]);
    cudaFree(lse);
    if (sends)
        ring_nccl_close(&nccl);
    cudaStreamDestroy(stream);
    return NULL;
}

static void run_all(const problem *p, ncclComm_t *comms, int ranks, double milliseconds[2])
{
    static const char *const names[] = {"q", "k", "v", "do", "o", "dq", "dk", "dv"};
    pthread_barrier_t        barrier;
    pthread_t                thread[MAX_GPUS];
    rank                     all[MAX_GPUS];
    memset(all, 0, sizeof all);
    pthread_barrier_init(&barrier, NULL, (unsigned)ranks);
    for (int n = 0; n < ranks; n++) {
        all[n] = (rank){.problem = p,
                        .comm    = comms ? comms[n] : NULL,
                        .number  = n,
                        .ranks   = ranks,
                        .device  = n,
                        .barrier = &barrier};
        stop_if(pthread_create(&thread[n], NULL, run_rank, &all[n]) != 0, "a thread");
    }
    for (int n = 0; n < ranks; n++) {
        pthread_join(thread[n], NULL);
        for (int pass = 0; pass < 2; pass++)
            milliseconds[pass] =
                all[n].milliseconds[pass] > milliseconds[pass] ? all[n].milliseconds[pass] : milliseconds[pass];
        for (int which = O; which < TENSORS && ranks > 1 && !p->dry; which++)
            if (!(all[n].largest[which] < 0.1)) {
                fprintf(stderr, "rank %d: %s differs by %g from one GPU's\n", n, names[which], all[n].largest[which]);
                exit(1);
            }
    }
    pthread_barrier_destroy(&barrier);
}

/* One rank of so many after the other, on one GPU. */
static void run_alone(const problem *p, int ranks, double milliseconds[2])
{
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, 1);
    for (int number = 0; number < ranks; number += ranks - 1) {
        rank one = {.problem = p, .number = number, .ranks = ranks, .barrier = &barrier};
        run_rank(&one);
        for (int pass = 0; pass < 2; pass++)
            milliseconds[pass] = fmax(milliseconds[pass], one.milliseconds[pass]);
    }
    pthread_barrier_destroy(&barrier);
}

static void print_times(const problem *p, const char *what, const double ms[2], const double one_gpu[2])
{
    double flops = 2.0 * (double)p->seqlen * (double)p->seqlen * p->heads * p->head_dim;
    printf("%lld tokens, %s: forward %.2f ms, %.0f TFLOP/s, %.2f times; backward %.2f ms, %.0f TFLOP/s, %.2f times\n",
           (long long)p->seqlen, what, ms[0], flops / ms[0] / 1e9, one_gpu[0] / ms[0], ms[1], 2.5 * flops / ms[1] / 1e9,
           one_gpu[1] / ms[1]);
    fflush(stdout);
}

/* comms: NULL for a rank alone. */
static void run_length(problem p, ncclComm_t *comms)
{
    static const char *const layouts[]  = {"contiguous", "zigzag", "striped", "zigzag without transfers"};
    uint32_t                 random     = 1;
    double                   one_gpu[2] = {0, 0};
    char                     what[64];
    for (int n = 0; n < TENSORS; n++) {
        p.whole[n] = malloc(row_bytes(&p) * (size_t)p.seqlen);
        stop_if(!p.whole[n], "memory");
        for (size_t i = 0; i < row_bytes(&p) / 2 * (size_t)p.seqlen && n <= DOUT; i++) {
            random ^= random << 13, random ^= random >> 17, random ^= random << 5;
            float    value = (float)(int32_t)random / 1.3e9f;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            p.whole[n][i] = (uint16_t)(bits >> 16);
        }
    }
    run_all(&p, comms, 1, one_gpu);
    print_times(&p, "1 GPU", one_gpu, one_gpu);
    for (int layout = comms ? 0 : 3; layout < 4; layout++) {
        double ms[2] = {0, 0};
        p.dry        = layout == 3;
        p.layout     = p.dry ? FLASH_ATTN_RING_ZIGZAG : (flash_attn_ring_layout)layout;
        if (comms)
            run_all(&p, comms, p.gpus, ms);
        else
            run_alone(&p, p.gpus, ms);
        snprintf(what, sizeof what, comms ? "%d GPUs, %s" : "one rank of %d alone, %s", p.gpus, layouts[layout]);
        print_times(&p, what, ms, one_gpu);
    }
    for (int n = 0; n < TENSORS; n++)
        free(p.whole[n]);
}

int main(int argc, char **argv)
{
    bool alone = argc > 1 && strcmp(argv[1], "--alone") == 0;
    if (alone)
        argc--, argv++;
    int        count = 0, wanted = argc > 1 ? atoi(argv[1]) : 2, gpus = alone ? 1 : wanted;
    problem    p = {.gpus = wanted, .heads = argc > 2 ? atoi(argv[2]) : 16, .head_dim = argc > 3 ? atoi(argv[3]) : 128};
    ncclComm_t comms[MAX_GPUS] = {0};
    if (wanted < 2 || gpus > MAX_GPUS || cudaGetDeviceCount(&count) != cudaSuccess || count < gpus) {
        printf("skipped: it takes %d GPUs, here are %d\n", gpus, count);
        return 0;
    }
    if (!alone)
        stop_if(ncclCommInitAll(comms, wanted, NULL) != ncclSuccess, "ncclCommInitAll");
    printf("bfloat16, causal, %d heads of %d, fastest of %d\n", p.heads, p.head_dim, REPEATS);
    for (int n = 4; n < argc || n == 4; n++) {
        p.seqlen = argc > n ? atoll(argv[n]) : 32768;
        run_length(p, alone ? NULL : comms);
    }
    for (int n = 0; n < wanted && !alone; n++)
        ncclCommDestroy(comms[n]);
    return 0;
}
