/*
 * Ring attention between processes: the sequence is dealt to RANKS processes (2 unless the command says otherwise),
 * each attends to its own rows, forward and backward, and compares them with attention over the whole.
 *
 *     ring_attention [ranks [seqlen]]
 */
#include "ring/sockets.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 4, HEAD_DIM = 64, ROW = HEADS * HEAD_DIM };

/* The same numbers in every process. */
static float *numbers(int64_t rows, unsigned seed)
{
    float *all = malloc((size_t)rows * ROW * sizeof *all);
    if (!all)
        exit(1);
    for (int64_t n = 0; n < rows * ROW; n++) {
        seed   = seed * 1664525u + 1013904223u;
        all[n] = (float)(int32_t)seed / 1.3e9f;
    }
    return all;
}

static float *own_rows(const float *whole, const flash_attn_ring_share *share)
{
    float *own = numbers(share->rows, 0);
    for (int64_t row = 0; row < share->rows; row++) {
        int64_t at = row < share->count[0] ? share->begin[0] + row : share->begin[1] + row - share->count[0];
        for (int n = 0; n < ROW; n++)
            own[row * ROW + n] = whole[at * ROW + n];
    }
    return own;
}

static flash_attn_tensor tensor(float *data, int64_t rows)
{
    return (flash_attn_tensor){.data = data, .shape = {1, rows, HEADS, HEAD_DIM}};
}

static double largest_difference(const float *a, const float *b, int64_t rows)
{
    double largest = 0;
    for (int64_t n = 0; n < rows * ROW; n++)
        largest = fmax(largest, fabs((double)a[n] - b[n]));
    return largest;
}

/* Q, K, V, dO in; O, dQ, dK, dV out. */
typedef struct pass {
    float *in[4], *out[4], *lse;
} pass;

static pass make_pass(int64_t rows)
{
    pass p = {.lse = malloc((size_t)rows * HEADS * sizeof(float))};
    for (int n = 0; n < 4; n++)
        p.out[n] = numbers(rows, 0);
    return p;
}

/* Both passes; ring NULL: without one. */
static bool attend(const pass *own, int64_t rows, const flash_attn_ring *ring)
{
    flash_attn_problem p = {.q    = tensor(own->in[0], rows),
                            .k    = tensor(own->in[1], rows),
                            .v    = tensor(own->in[2], rows),
                            .o    = tensor(own->out[0], rows),
                            .lse  = {.data = own->lse},
                            .mask = FLASH_ATTN_CAUSAL};
    flash_attn_grads   g = {.dout = tensor(own->in[3], rows),
                            .dq   = tensor(own->out[1], rows),
                            .dk   = tensor(own->out[2], rows),
                            .dv   = tensor(own->out[3], rows)};
    flash_attn_status  status =
        ring ? flash_attn_ring_forward(NULL, &p, ring, NULL) : flash_attn_forward(NULL, &p, NULL);
    if (status == FLASH_ATTN_OK)
        status = ring ? flash_attn_ring_backward(NULL, &p, &g, ring, NULL) : flash_attn_backward(NULL, &p, &g, NULL);
    if (status != FLASH_ATTN_OK)
        fprintf(stderr, "%s\n", flash_attn_last_error());
    return status == FLASH_ATTN_OK;
}

static int run_rank(int rank, int ranks, int64_t seqlen, ring_sockets *sockets)
{
    static const char *const names[4] = {"o", "dq", "dk", "dv"};
    flash_attn_ring          ring     = {.rank      = rank,
                                         .ranks     = ranks,
                                         .layout    = FLASH_ATTN_RING_ZIGZAG,
                                         .seqlen_q  = seqlen,
                                         .seqlen_k  = seqlen,
                                         .transport = ring_sockets_transport(sockets)};
    flash_attn_ring_share    share;
    if (flash_attn_ring_get_share(ring.layout, ranks, rank, seqlen, &share) != FLASH_ATTN_OK)
        return 1;
    pass own = make_pass(share.rows), whole = make_pass(seqlen);
    for (int n = 0; n < 4; n++) {
        whole.in[n] = numbers(seqlen, (unsigned)n + 1);
        own.in[n]   = own_rows(whole.in[n], &share);
    }
    if (!attend(&own, share.rows, &ring) || !attend(&whole, seqlen, NULL))
        return 1;
    double worst = 0;
    for (int n = 0; n < 4; n++) {
        double difference = largest_difference(own.out[n], own_rows(whole.out[n], &share), share.rows);
        printf("rank %d of %d, %lld rows: %s differs by %.1e\n", rank, ranks, (long long)share.rows, names[n],
               difference);
        worst = difference <= worst ? worst : difference;
    }
    return worst < 1e-4 ? 0 : 1;
}

int main(int argc, char **argv)
{
    int  ranks = argc > 1 ? atoi(argv[1]) : 2, failed = 0, to_next[16], from_previous[16];
    long seqlen = argc > 2 ? atol(argv[2]) : 1000;
    if (ranks < 1 || ranks > 16 || seqlen < 1 || seqlen > 100000 ||
        !ring_sockets_pairs(ranks, to_next, from_previous)) {
        fprintf(stderr, "usage: ring_attention [ranks, 1 to 16 [seqlen, 1 to 100000]]\n");
        return 2;
    }
    for (int rank = 0; rank < ranks; rank++)
        if (fork() == 0) {
            for (int other = 0; other < ranks; other++)
                if (other != rank) {
                    close(to_next[other]);
                    close(from_previous[other]);
                }
            ring_sockets *sockets = ring_sockets_open(to_next[rank], from_previous[rank], 60000);
            int           status  = sockets ? run_rank(rank, ranks, seqlen, sockets) : 1;
            ring_sockets_close(sockets);
            fflush(stdout);
            _exit(status);
        }
    for (int rank = 0; rank < ranks; rank++) {
        close(to_next[rank]);
        close(from_previous[rank]);
    }
    for (int rank = 0, status; rank < ranks; rank++)
        if (wait(&status) < 0 || status != 0)
            failed = 1;
    puts(failed ? "failed" : "all ranks agree with attention over the whole sequence");
    return failed;
}
