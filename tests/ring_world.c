#include "ring_world.h"

#include "case_numbers.h"
#include "giver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RING_Q, RING_K, RING_V, RING_DOUT, RING_INPUTS };
enum { GUARD = 64, TIMEOUT_MS = 60000 };

struct ring_world {
    ring_case          shape;
    flash_attn_dtype   dtype;
    flash_attn_tensor  input[RING_INPUTS], sinks;                    /* whole */
    flash_attn_tensor  expected[RING_RESULTS], result[RING_RESULTS]; /* whole, float32 */
    flash_attn_problem whole;
    bool               backward;
    ring_rank          rank[RING_MAX_RANKS];
    ring_sockets      *sockets[RING_MAX_RANKS];
    char               why[200];
};

/* ---- tensors ---- */

static int64_t elements(const flash_attn_tensor *t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }

static void set_strides(flash_attn_tensor *t, bool heads_first)
{
    const int64_t *s = t->shape;
    t->stride[3]     = 1;
    t->stride[2]     = heads_first ? s[1] * s[3] : s[3];
    t->stride[1]     = heads_first ? s[3] : s[2] * s[3];
    t->stride[0]     = s[1] * s[2] * s[3];
}

/* Guards of NaN on both sides. */
static flash_attn_tensor make(flash_attn_dtype dtype, bool heads_first, int64_t a, int64_t b, int64_t c, int64_t d)
{
    flash_attn_tensor t = {.dtype = dtype, .shape = {a, b, c, d}};
    set_strides(&t, heads_first);
    size_t bytes  = (size_t)elements(&t) * dtype_bytes(dtype) + 2 * GUARD;
    char  *memory = malloc(bytes);
    if (!memory)
        abort();
    memset(memory, 0xFF, bytes);
    t.data = memory + GUARD;
    return t;
}

static void drop(flash_attn_tensor *t)
{
    if (t->data)
        free((char *)t->data - GUARD);
    t->data = NULL;
}

static void fill(flash_attn_tensor *t, uint64_t *random, double size)
{
    for (int64_t n = 0; n < elements(t); n++)
        set(&(flash_attn_tensor){.data = t->data, .dtype = t->dtype, .stride = {0, 0, 0, 1}}, 0, 0, 0, n,
            size * random_normal(random));
}

/* ---- the whole ---- */

static flash_attn_tensor whole_tensor(const ring_case *c, flash_attn_dtype dtype, int which)
{
    bool of_k = which == RING_K || which == RING_V;
    return make(dtype, false, c->batch, of_k ? c->seqlen_k : c->seqlen_q, of_k ? c->heads_k : c->heads_q,
                which == RING_V || which == RING_DOUT ? c->head_dim_v : c->head_dim);
}

static flash_attn_tensor result_tensor(const ring_case *c, int which)
{
    switch (which) {
    case RING_O: return whole_tensor(c, FLASH_ATTN_F32, RING_DOUT);
    case RING_LSE: return make(FLASH_ATTN_F32, false, c->batch, c->heads_q, c->seqlen_q, 1);
    case RING_DSINKS: return make(FLASH_ATTN_F32, false, 1, c->heads_q, 1, 1);
    default: return whole_tensor(c, FLASH_ATTN_F32, which - RING_DQ + RING_Q);
    }
}

static flash_attn_status run_reference(ring_world *w)
{
    flash_attn_problem p = w->whole;
    flash_attn_grads   g = {.dout = w->input[RING_DOUT],
                            .dq   = w->expected[RING_DQ],
                            .dk   = w->expected[RING_DK],
                            .dv   = w->expected[RING_DV]};
    p.device.type        = FLASH_ATTN_REFERENCE;
    p.o                  = w->expected[RING_O];
    p.lse                = w->expected[RING_LSE];
    if (w->shape.sinks)
        g.dsinks = w->expected[RING_DSINKS];
    flash_attn_status status = flash_attn_forward(NULL, &p, NULL);
    return status == FLASH_ATTN_OK ? flash_attn_backward(NULL, &p, &g, NULL) : status;
}

/* ---- a rank's rows ---- */

static int64_t position(const flash_attn_ring_share *share, int64_t row)
{
    return row < share->count[0] ? share->begin[0] + row * share->step
                                 : share->begin[1] + (row - share->count[0]) * share->step;
}

/* Rows of dimension n between the whole and a rank's part. */
static void move_rows(const flash_attn_tensor *whole, const flash_attn_tensor *part, int n,
                      const flash_attn_ring_share *share, bool out)
{
    for (int64_t a = 0; a < part->shape[0]; a++)
        for (int64_t b = 0; b < part->shape[1]; b++)
            for (int64_t c = 0; c < part->shape[2]; c++)
                for (int64_t d = 0; d < part->shape[3]; d++) {
                    int64_t x = n == 1 ? position(share, b) : b, y = n == 2 ? position(share, c) : c;
                    if (out)
                        set(whole, a, x, y, d, get(part, a, b, c, d));
                    else
                        set(part, a, b, c, d, get(whole, a, x, y, d));
                }
}

static flash_attn_ring_share share_of(const ring_world *w, int rank, int64_t seqlen)
{
    flash_attn_ring_share share = {0};
    flash_attn_ring_get_share(w->shape.layout, w->shape.ranks, rank, seqlen, &share);
    return share;
}

static void make_rank(ring_world *w, int rank)
{
    const ring_case *c      = &w->shape;
    ring_rank       *r      = &w->rank[rank];
    int64_t          rows_q = share_of(w, rank, c->seqlen_q).rows, rows_k = share_of(w, rank, c->seqlen_k).rows;
    r->ring = (flash_attn_ring){
        .rank = rank, .ranks = c->ranks, .layout = c->layout, .seqlen_q = c->seqlen_q, .seqlen_k = c->seqlen_k};
    r->p      = w->whole;
    r->p.q    = make(w->dtype, c->heads_first, c->batch, rows_q, c->heads_q, c->head_dim);
    r->p.k    = make(w->dtype, c->heads_first, c->batch, rows_k, c->heads_k, c->head_dim);
    r->p.v    = make(w->dtype, c->heads_first, c->batch, rows_k, c->heads_k, c->head_dim_v);
    r->p.o    = make(w->dtype, c->heads_first, c->batch, rows_q, c->heads_q, c->head_dim_v);
    r->p.lse  = make(FLASH_ATTN_F32, false, c->batch, c->heads_q, rows_q, 1);
    r->g.dout = make(w->dtype, c->heads_first, c->batch, rows_q, c->heads_q, c->head_dim_v);
    r->g.dq   = make(w->dtype, c->heads_first, c->batch, rows_q, c->heads_q, c->head_dim);
    r->g.dk   = make(w->dtype, c->heads_first, c->batch, rows_k, c->heads_k, c->head_dim);
    r->g.dv   = make(w->dtype, c->heads_first, c->batch, rows_k, c->heads_k, c->head_dim_v);
    if (c->sinks)
        r->g.dsinks = make(FLASH_ATTN_F32, false, 1, c->heads_q, 1, 1);
}

static void connect_ranks(ring_world *w)
{
    int to_next[RING_MAX_RANKS], from_previous[RING_MAX_RANKS];
    if (!ring_sockets_pairs(w->shape.ranks, to_next, from_previous))
        abort();
    for (int rank = 0; rank < w->shape.ranks; rank++) {
        w->sockets[rank] = ring_sockets_open(to_next[rank], from_previous[rank], TIMEOUT_MS);
        if (!w->sockets[rank])
            abort();
        w->rank[rank].ring.transport = ring_sockets_transport(w->sockets[rank]);
    }
}

ring_world *ring_world_make(const ring_case *shape, flash_attn_dtype dtype, uint64_t seed)
{
    ring_world *w = calloc(1, sizeof *w);
    if (!w)
        abort();
    w->shape = *shape;
    w->dtype = dtype;
    for (int n = 0; n < RING_INPUTS; n++) {
        w->input[n] = whole_tensor(shape, dtype, n);
        fill(&w->input[n], &seed, n <= RING_K ? 1.3 : 1.0);
    }
    for (int n = 0; n < RING_RESULTS; n++) {
        w->expected[n] = result_tensor(shape, n);
        w->result[n]   = result_tensor(shape, n);
    }
    w->whole = (flash_attn_problem){.q            = w->input[RING_Q],
                                    .k            = w->input[RING_K],
                                    .v            = w->input[RING_V],
                                    .mask         = shape->mask,
                                    .window_left  = shape->left,
                                    .window_right = shape->right,
                                    .scale        = shape->scale,
                                    .softcap      = shape->softcap};
    if (shape->sinks) {
        w->sinks = make(FLASH_ATTN_F32, false, 1, shape->heads_q, 1, 1);
        fill(&w->sinks, &seed, 1.0);
        w->whole.sinks = w->sinks;
    }
    if (run_reference(w) != FLASH_ATTN_OK) {
        ring_world_free(w);
        return NULL;
    }
    for (int rank = 0; rank < shape->ranks; rank++)
        make_rank(w, rank);
    connect_ranks(w);
    return w;
}

static flash_attn_tensor *outputs_of(ring_rank *r, int which)
{
    flash_attn_tensor *all[RING_RESULTS] = {&r->p.o, &r->p.lse, &r->g.dq, &r->g.dk, &r->g.dv, &r->g.dsinks};
    return all[which];
}

static flash_attn_tensor *inputs_of(ring_rank *r, int which)
{
    flash_attn_tensor *all[RING_INPUTS] = {&r->p.q, &r->p.k, &r->p.v, &r->g.dout};
    return all[which];
}

void ring_world_free(ring_world *w)
{
    if (!w)
        return;
    for (int n = 0; n < RING_INPUTS; n++)
        drop(&w->input[n]);
    for (int n = 0; n < RING_RESULTS; n++) {
        drop(&w->expected[n]);
        drop(&w->result[n]);
    }
    drop(&w->sinks);
    for (int rank = 0; rank < w->shape.ranks; rank++) {
        for (int n = 0; n < RING_INPUTS; n++)
            drop(inputs_of(&w->rank[rank], n));
        for (int n = 0; n < RING_RESULTS; n++)
            drop(outputs_of(&w->rank[rank], n));
        ring_sockets_close(w->sockets[rank]);
    }
    free(w);
}

ring_rank               *ring_world_rank(ring_world *w, int rank) { return &w->rank[rank]; }
ring_sockets            *ring_world_sockets(ring_world *w, int rank) { return w->sockets[rank]; }
int                      ring_world_ranks(const ring_world *w) { return w->shape.ranks; }
flash_attn_problem      *ring_world_whole(ring_world *w) { return &w->whole; }
const flash_attn_tensor *ring_world_result(const ring_world *w, int which) { return &w->result[which]; }

/* ---- a run ---- */

static size_t bytes_of(const flash_attn_tensor *t) { return (size_t)elements(t) * dtype_bytes(t->dtype) + 2 * GUARD; }

static void *upload(const ring_rank *r, const flash_attn_tensor *t)
{
    char *memory = r->memory->upload(r->memory->user, (char *)t->data - GUARD, bytes_of(t));
    if (!memory)
        abort();
    return memory + GUARD;
}

/* The problem with its tensors in device memory. */
typedef struct on_device {
    ring_rank         *rank;
    flash_attn_problem p;
    flash_attn_grads   g;
    flash_attn_tensor *host[RING_INPUTS + RING_RESULTS + 1], *device[RING_INPUTS + RING_RESULTS + 1];
    int                count;
} on_device;

static void bring(on_device *d, flash_attn_tensor *host, flash_attn_tensor *device)
{
    if (!host->data)
        return;
    d->host[d->count]     = host;
    d->device[d->count++] = device;
    if (d->rank->memory)
        device->data = upload(d->rank, host);
}

static void bring_all(on_device *d, ring_rank *r)
{
    *d                          = (on_device){.rank = r, .p = r->p, .g = r->g};
    flash_attn_tensor *device[] = {&d->p.q,   &d->p.k,  &d->p.v,  &d->g.dout, &d->p.o,
                                   &d->p.lse, &d->g.dq, &d->g.dk, &d->g.dv,   &d->g.dsinks};
    for (int n = 0; n < RING_INPUTS; n++)
        bring(d, inputs_of(r, n), device[n]);
    for (int n = 0; n < RING_RESULTS; n++)
        bring(d, outputs_of(r, n), device[RING_INPUTS + n]);
    bring(d, &r->p.sinks, &d->p.sinks);
}

static void take_home(on_device *d)
{
    const case_memory *memory = d->rank->memory;
    for (int n = 0; n < d->count && memory; n++) {
        char *device = (char *)d->device[n]->data - GUARD;
        if (d->host[n] != &d->rank->p.sinks && /* all ranks read the same */
            !memory->download(memory->user, (char *)d->host[n]->data - GUARD, device, bytes_of(d->host[n])))
            abort();
        memory->release(memory->user, device);
    }
}

static void settle(ring_rank *r)
{
    if (r->settle && !r->settle(r))
        abort();
}

static flash_attn_status run_pass(ring_rank *r, on_device *d, flash_attn_pass pass)
{
    size_t          bytes = 0;
    flash_attn_exec exec  = r->exec;
    void           *own   = NULL;
    giver           from;
    if (r->give_workspace) {
        flash_attn_status status = flash_attn_ring_workspace_size(r->context, &d->p, &r->ring, pass, &bytes);
        char             *zeros  = calloc(bytes + 1, 1);
        if (status != FLASH_ATTN_OK || !zeros) {
            free(zeros);
            return status;
        }
        own = r->memory ? r->memory->upload(r->memory->user, zeros, bytes + 1) : (void *)zeros;
        if (r->memory)
            free(zeros);
        exec.workspace       = (char *)own + 1; /* any alignment */
        exec.workspace_bytes = bytes - r->workspace_short;
        if (r->by_allocator) {
            from = (giver){.gives = exec.workspace};
            exec = (flash_attn_exec){.stream = exec.stream, .num_threads = exec.num_threads, .allocate = give, .allocator = &from};
        }
    }
    flash_attn_status status = pass == FLASH_ATTN_FORWARD
                                   ? flash_attn_ring_forward(r->context, &d->p, &r->ring, &exec)
                                   : flash_attn_ring_backward(r->context, &d->p, &d->g, &r->ring, &exec);
    char              sentence[sizeof r->error[0]];
    snprintf(sentence, sizeof sentence, "%s", status == FLASH_ATTN_OK ? "" : flash_attn_last_error());
    memcpy(r->error[pass], sentence, sizeof sentence);
    settle(r);
    if (r->memory && own)
        r->memory->release(r->memory->user, own);
    else
        free(own);
    return status;
}

typedef struct rank_job {
    ring_rank *rank;
    bool       backward;
} rank_job;

static void *run_rank(void *argument)
{
    rank_job  *job = argument;
    ring_rank *r   = job->rank;
    on_device  d;
    if (r->enter && !r->enter(r))
        abort();
    bring_all(&d, r);
    settle(r);
    r->status[0] = r->status[1] = run_pass(r, &d, FLASH_ATTN_FORWARD);
    if (r->status[0] == FLASH_ATTN_OK && job->backward)
        r->status[1] = run_pass(r, &d, FLASH_ATTN_BACKWARD);
    take_home(&d);
    return NULL;
}

static void look_for_touched(ring_rank *r)
{
    r->touched = false;
    for (int n = 0; n < RING_RESULTS; n++) {
        const flash_attn_tensor *t     = outputs_of(r, n);
        const unsigned char     *bytes = t->data;
        for (size_t at = 0; t->data && at < bytes_of(t) - 2 * GUARD; at++)
            r->touched |= bytes[at] != 0xFF;
    }
}

static void check_guards(const flash_attn_tensor *t)
{
    const unsigned char *bytes = t->data;
    for (size_t at = 0; t->data && at < GUARD; at++)
        if (*(bytes - GUARD + at) != 0xFF || bytes[bytes_of(t) - 2 * GUARD + at] != 0xFF) {
            fprintf(stderr, "a ring wrote beside an output\n");
            abort();
        }
}

void ring_world_run(ring_world *w, bool backward)
{
    pthread_t thread[RING_MAX_RANKS];
    rank_job  job[RING_MAX_RANKS];
    w->backward = backward;
    for (int rank = 0; rank < w->shape.ranks; rank++) {
        ring_rank            *r    = &w->rank[rank];
        flash_attn_ring_share of_q = share_of(w, rank, w->shape.seqlen_q), of_k = share_of(w, rank, w->shape.seqlen_k);
        for (int n = 0; n < RING_INPUTS; n++)
            move_rows(&w->input[n], inputs_of(r, n), 1, n == RING_K || n == RING_V ? &of_k : &of_q, false);
        for (int n = 0; n < RING_RESULTS; n++)
            if (outputs_of(r, n)->data)
                memset((char *)outputs_of(r, n)->data - GUARD, 0xFF, bytes_of(outputs_of(r, n)));
        job[rank] = (rank_job){r, backward};
        if (pthread_create(&thread[rank], NULL, run_rank, &job[rank]) != 0)
            abort();
    }
    for (int rank = 0; rank < w->shape.ranks; rank++) {
        pthread_join(thread[rank], NULL);
        look_for_touched(&w->rank[rank]);
        for (int n = 0; n < RING_RESULTS; n++)
            check_guards(outputs_of(&w->rank[rank], n));
    }
}

/* ---- the results ---- */

static void gather(ring_world *w)
{
    for (int n = 0; n < RING_RESULTS; n++)
        memset(w->result[n].data, n == RING_DSINKS ? 0 : 0xFF, (size_t)elements(&w->result[n]) * sizeof(float));
    for (int rank = 0; rank < w->shape.ranks; rank++)
        for (int n = 0; n < RING_RESULTS; n++) {
            flash_attn_ring_share share =
                share_of(w, rank, n == RING_DK || n == RING_DV ? w->shape.seqlen_k : w->shape.seqlen_q);
            const flash_attn_tensor *part = outputs_of(&w->rank[rank], n);
            if (n != RING_DSINKS)
                move_rows(&w->result[n], part, n == RING_LSE ? 2 : 1, &share, true);
            for (int64_t h = 0; n == RING_DSINKS && part->data && h < part->shape[1]; h++)
                set(&w->result[n], 0, h, 0, 0, get(&w->result[n], 0, h, 0, 0) + get(part, 0, h, 0, 0));
        }
}

const char *ring_world_compare(ring_world *w, bool backward, double *worst)
{
    static const char *const names[RING_RESULTS] = {"o", "lse", "dq", "dk", "dv", "dsinks"};
    double                   epsilon = dtype_epsilon(w->dtype), l2_limit = w->dtype == FLASH_ATTN_F32 ? 1e-5 : epsilon;
    *worst = 0;
    gather(w);
    for (int n = 0; n < RING_RESULTS; n++) {
        const float *got = w->result[n].data, *expected = w->expected[n].data;
        double       largest = 1, error2 = 0, size2 = 0,
               tolerance = n == RING_LSE || w->dtype == FLASH_ATTN_F32 ? 2e-5 : 3 * epsilon;
        if ((n >= RING_DQ && !backward) || (n == RING_DSINKS && !w->shape.sinks))
            continue;
        for (int64_t at = 0; at < elements(&w->result[n]); at++)
            if (isfinite(expected[at]))
                largest = fmax(largest, fabs((double)expected[at]));
        for (int64_t at = 0; at < elements(&w->result[n]); at++) {
            double error = got[at] == expected[at]
                               ? 0
                               : fabs((double)got[at] - expected[at]); /* -inf is right where it is expected */
            if (!(error <= tolerance * largest)) {
                snprintf(w->why, sizeof w->why, "%s: element %lld is %.9g, expected %.9g", names[n], (long long)at,
                         got[at], expected[at]);
                return w->why;
            }
            *worst = fmax(*worst, error / (tolerance * largest));
            if (isfinite(expected[at])) {
                error2 += error * error;
                size2 += (double)expected[at] * expected[at];
            }
        }
        double least2 =
            0.01 * (double)elements(&w->result[n]); /* with one key dQ and dK are 0 and the rounding is left */
        if (n != RING_DSINKS && !(sqrt(error2) <= l2_limit * sqrt(fmax(size2, least2)))) {
            snprintf(w->why, sizeof w->why, "%s: relative L2 error %.3g, allowed %.3g", names[n], sqrt(error2 / size2),
                     l2_limit);
            return w->why;
        }
    }
    return NULL;
}

uint64_t ring_world_digest(const ring_world *w)
{
    uint64_t sum = 0;
    for (int rank = 0; rank < w->shape.ranks; rank++)
        for (int n = 0; n < RING_RESULTS; n++) {
            const flash_attn_tensor *t     = outputs_of((ring_rank *)&w->rank[rank], n);
            const unsigned char     *bytes = t->data;
            for (size_t at = 0; t->data && (n < RING_DQ || w->backward) && at < bytes_of(t) - 2 * GUARD; at++)
                sum = (sum ^ bytes[at]) * 0x100000001B3u;
        }
    return sum;
}
