/* Ring attention's public calls: check, agree with the other ranks, take memory, run, write. */
#include "dist/dist.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- checks ---- */

/* Without a sound ring the other ranks cannot be told. */
static flash_attn_status check_ring(const flash_attn_ring *ring)
{
    flash_attn_ring_share share;
    if (!ring)
        return fa_fail(FLASH_ATTN_INVALID, "ring is NULL, expected a ring");
    FA_TRY(FA_CHECK_RESERVED("ring.reserved", ring->reserved));
    FA_TRY(FA_CHECK_RESERVED("ring.transport.reserved", ring->transport.reserved));
    FA_TRY(fa_check_reserved_int("ring", ring->reserved0));
    FA_TRY(flash_attn_ring_get_share(ring->layout, ring->ranks, ring->rank, 0, &share));
    if (ring->ranks > 1 && !ring->transport.begin)
        return fa_fail(FLASH_ATTN_INVALID, "ring.transport.begin is NULL, expected a function: there are %d ranks",
                       ring->ranks);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_supported(const flash_attn_problem *p)
{
    const struct {
        const char *name;
        bool        given;
    } options[] = {{"q.dtype F8E4M3", p->q.dtype == FLASH_ATTN_F8E4M3},
                   {"bias", p->bias.data || p->bias.shape[0]},
                   {"alibi_slopes", p->alibi_slopes.data || p->alibi_slopes.shape[0]},
                   {"cu_seqlens_q or cu_seqlens_k", p->cu_seqlens_q || p->cu_seqlens_k},
                   {"seqused_q or seqused_k", p->seqused_q || p->seqused_k},
                   {"leftpad_k", p->leftpad_k},
                   {"cache_batch_idx", p->cache_batch_idx},
                   {"pages", p->pages.table},
                   {"slices", p->slices.count != 0},
                   {"dropout", p->dropout.p != 0}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (options[i].given)
            return fa_fail(FLASH_ATTN_UNSUPPORTED,
                           "%s is given in a ring, expected none: a ring takes a batch of sequences of "
                           "one length with scale, softcap, mask and sinks",
                           options[i].name);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_rows(const char *name, const flash_attn_tensor *t, const flash_attn_ring *ring,
                                    int64_t seqlen, flash_attn_ring_share *share)
{
    FA_TRY(flash_attn_ring_get_share(ring->layout, ring->ranks, ring->rank, seqlen, share));
    if (t->shape[1] == share->rows)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_INVALID,
                   "%s.shape[1] is %" PRId64 ", expected %" PRId64 ", what rank %d of %d has of %" PRId64 " positions",
                   name, t->shape[1], share->rows, ring->rank, ring->ranks, seqlen);
}

static int64_t limit_of(int side) { return side >= FA_UNLIMITED ? -1 : side; }

static flash_attn_status check_problem(fa_ring_call *r, flash_attn_pass pass, bool plan)
{
    const flash_attn_problem *p = r->problem;
    flash_attn_ring_share     k;
    if (!p)
        return fa_fail(FLASH_ATTN_INVALID, "problem is NULL, expected a problem");
    FA_TRY(check_supported(p));
    FA_TRY(fa_normalise(p, r->grads, pass, plan ? FA_PLAN : FA_RUN, &r->call));
    FA_TRY(check_rows("q", &p->q, &r->ring, r->ring.seqlen_q, &r->q));
    FA_TRY(check_rows("k", &p->k, &r->ring, r->ring.seqlen_k, &k));
    r->mask = (fa_ring_mask){.diagonal = r->ring.seqlen_k - r->ring.seqlen_q,
                             .left     = limit_of(r->call.window.left),
                             .right    = limit_of(r->call.window.right)};
    return FLASH_ATTN_OK;
}

/* ---- memory ---- */

static size_t take(fa_ring_memory *m, size_t bytes)
{
    size_t at = m->total;
    m->total += (bytes + 255) / 256 * 256;
    return at;
}

static flash_attn_status inner_workspace(const fa_ring_call *r, const fa_ring_rect *rect,
                                         const flash_attn_ring_share *k, bool sinks, size_t *most)
{
    flash_attn_dtype   dtype = r->call.k.dtype;
    char              *kv    = r->memory.base;
    flash_attn_problem sub =
        fa_ring_problem(r, rect, fa_ring_k(r, kv, k->rows, dtype), fa_ring_v(r, kv, k->rows, dtype));
    size_t bytes;
    if (sinks)
        sub.sinks = r->problem->sinks;
    if (r->call.pass == FLASH_ATTN_FORWARD) {
        sub.o   = fa_ring_results(r, 0, sub.q.shape[1], r->call.head_dim_v);
        sub.lse = fa_ring_lse(r, 0, sub.q.shape[1]);
    }
    FA_TRY(fa_workspace_size(r->context, &sub, r->call.pass, true, &bytes));
    *most = bytes > *most ? bytes : *most;
    return FLASH_ATTN_OK;
}

/* What the calls inside need at most. */
static flash_attn_status inner_workspaces(const fa_ring_call *r, size_t *most)
{
    flash_attn_ring_share k;
    fa_ring_rect          rects[FA_RING_MAX_RECTS], none = fa_ring_no_keys(r);
    for (int step = 0; step < r->ring.ranks; step++) {
        int count = fa_ring_step(r, step, &k, rects);
        for (int n = 0; n < count; n++)
            FA_TRY(inner_workspace(r, &rects[n], &k, step == 0, most));
    }
    return inner_workspace(r, &none, &k, true, most);
}

static flash_attn_status plan_memory(fa_ring_call *r, bool inner)
{
    enum { LARGEST_ROW = 576 * sizeof(float) }; /* of O or dQ */
    const fa_call  *c       = &r->call;
    fa_ring_memory *m       = &r->memory;
    bool            forward = c->pass == FLASH_ATTN_FORWARD;
    int64_t         chunks  = r->ring.layout == FLASH_ATTN_RING_ZIGZAG ? 2 * (int64_t)r->ring.ranks : r->ring.ranks;
    int64_t         rows_k  = (r->ring.seqlen_k + chunks - 1) / chunks * (chunks / r->ring.ranks);
    int64_t         head_rows = c->batch * c->heads_q * r->q.rows, most_bytes;
    if (__builtin_mul_overflow(head_rows, (int64_t)LARGEST_ROW, &most_bytes)) /* no such tensor exists */
        return fa_fail(FLASH_ATTN_NO_MEMORY, "the ring's memory has more bytes than 64 bits can count");
    size_t dkv_bytes   = forward ? 0 : fa_ring_kv_bytes(r, rows_k, FLASH_ATTN_F32) + 16;
    size_t place_bytes = dkv_bytes + fa_ring_kv_bytes(r, rows_k, c->k.dtype);
    size_t acc_bytes   = (size_t)(head_rows * (forward ? c->head_dim_v : c->head_dim)) * sizeof(float);
    m->base            = (char *)(uintptr_t)4096; /* nobody reads it while planning */
    m->place[0]        = take(m, place_bytes);
    m->place[1]        = take(m, place_bytes);
    m->acc             = take(m, acc_bytes);
    m->part            = take(m, acc_bytes);
    if (forward) {
        m->lse      = take(m, (size_t)head_rows * sizeof(float));
        m->part_lse = take(m, (size_t)head_rows * sizeof(float));
    } else {
        m->dkv_part = take(m, dkv_bytes);
        m->dsinks   = take(m, (size_t)c->heads_q * sizeof(float));
    }
    if (inner)
        FA_TRY(inner_workspaces(r, &m->inner_bytes));
    m->inner = take(m, m->inner_bytes);
    m->total += 255; /* the caller's may begin anywhere */
    return FLASH_ATTN_OK;
}

/* The caller's workspace, or host memory of our own, which is then *owned. */
static flash_attn_status take_memory(fa_ring_call *r, const fa_exec *how, void **owned)
{
    bool  host = fa_on_host(r->problem->device);
    void *block;
    FA_TRY(plan_memory(r, !host || how->workspace || how->allocate));
    FA_TRY(fa_check_memory(&r->call, how->workspace, how->workspace_bytes));
    FA_TRY(fa_take_workspace(how, r->memory.total, &block));
    if (!block && !host)
        return fa_fail(FLASH_ATTN_INVALID,
                       "exec.workspace is NULL, expected %zu bytes on the device: the transport moves what is in it, "
                       "so it must be memory of the kind that the transport can",
                       r->memory.total);
    if (!block && !(*owned = malloc(r->memory.total)))
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a ring's %zu bytes", r->memory.total);
    block          = block ? block : *owned;
    r->memory.base = (char *)(((uintptr_t)block + 255) / 256 * 256);
    if (r->memory.inner_bytes > 0) {
        r->exec.workspace       = r->memory.base + r->memory.inner;
        r->exec.workspace_bytes = r->memory.inner_bytes;
    }
    return FLASH_ATTN_OK;
}

static flash_attn_status check_all(fa_ring_call *r, flash_attn_pass pass, const flash_attn_exec *exec, void **owned)
{
    fa_exec how;
    FA_TRY(fa_context_of(&r->context));
    FA_TRY(check_problem(r, pass, false));
    FA_TRY(fa_check_exec(r->context, r->problem->device, exec, &how));
    r->exec = (flash_attn_exec){.stream = how.stream, .num_threads = exec ? exec->num_threads : 0};
    return take_memory(r, &how, owned);
}

/* ---- the transport ---- */

static flash_attn_status transport_failed(fa_ring_call *r, const char *name, int result)
{
    r->broken = true;
    return fa_fail(FLASH_ATTN_TRANSPORT, "ring.transport.%s returned %d on rank %d of %d, expected 0", name, result,
                   r->ring.rank, r->ring.ranks);
}

static flash_attn_status begin_at(fa_ring_call *r, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    const flash_attn_transport *t      = &r->ring.transport;
    int                         result = t->begin(t->user, send, send_bytes, recv, recv_bytes, r->exec.stream);
    r->begun++;
    return result == 0 ? FLASH_ATTN_OK : transport_failed(r, "begin", result);
}

flash_attn_status fa_ring_begin(fa_ring_call *r, size_t send, size_t send_bytes, size_t recv, size_t recv_bytes)
{
    return begin_at(r, r->memory.base + send, send_bytes, r->memory.base + recv, recv_bytes);
}

flash_attn_status fa_ring_wait(fa_ring_call *r)
{
    const flash_attn_transport *t = &r->ring.transport;
    if (r->begun == 0)
        return FLASH_ATTN_OK;
    r->begun   = 0;
    int result = t->wait ? t->wait(t->user, r->exec.stream) : 0;
    return result == 0 ? FLASH_ATTN_OK : transport_failed(r, "wait", result);
}

/* ---- agreement: every rank's note goes round ---- */

#define AGREED_FIELDS(X)                                    \
    X(pass, c->pass)                                        \
    X(dtype, c->q.dtype)                                    \
    X(layout, r->ring.layout)                               \
    X(ranks, r->ring.ranks)                                 \
    X(seqlen_q, r->ring.seqlen_q)                           \
    X(seqlen_k, r->ring.seqlen_k)                           \
    X(batch, c->batch)                                      \
    X(heads_q, c->heads_q)                                  \
    X(heads_k, c->heads_k)                                  \
    X(head_dim, c->head_dim)                                \
    X(head_dim_v, c->head_dim_v)                            \
    X(window_left, r->mask.left)                            \
    X(window_right, r->mask.right)                          \
    X(scale, fa_bits_of_float(c->scale))                    \
    X(softcap, fa_bits_of_float(c->softcap))                \
    X(sinks, c->sinks.data != NULL)                         \
    X(dk, c->dk.data ? 1 + (int)c->dk.dtype : 0)            \
    X(dv, c->dv.data ? 1 + (int)c->dv.dtype : 0)

static const char *const agreed_names[] = {
#define X(name, value) #name,
    AGREED_FIELDS(X)
#undef X
};
enum { NUM_AGREED = sizeof agreed_names / sizeof *agreed_names, NOTE_MARK = 0x464C52 /* "FLR" */ };

typedef struct note {
    int64_t mark, rank, status, agreed[NUM_AGREED];
} note;

static flash_attn_status exchange_notes(fa_ring_call *r, const note *send, note *recv)
{
    const flash_attn_transport *t = &r->ring.transport;
    if (!t->exchange_host) {
        FA_TRY(begin_at(r, send, sizeof *send, recv, sizeof *recv));
        return fa_ring_wait(r);
    }
    int result = t->exchange_host(t->user, send, recv, sizeof *send);
    return result == 0 ? FLASH_ATTN_OK : transport_failed(r, "exchange_host", result);
}

/* Rank `rank`'s note against ours. */
static flash_attn_status check_note(const note *own, const note *other, int rank)
{
    if (other->mark != NOTE_MARK || other->rank != rank)
        return fa_fail(FLASH_ATTN_INVALID,
                       "the transport brought the note of rank %" PRId64 ", expected rank %d's: does every rank "
                       "receive from the one before it, in the order in which that one sends?",
                       other->rank, rank);
    if (other->status != FLASH_ATTN_OK)
        return fa_fail(FLASH_ATTN_TRANSPORT, "rank %d failed: %s; its own flash_attn_last_error says why", rank,
                       flash_attn_status_string((flash_attn_status)other->status));
    for (int n = 0; n < NUM_AGREED; n++)
        if (own->agreed[n] != other->agreed[n])
            return fa_fail(FLASH_ATTN_INVALID,
                           "rank %d was called with another %s than rank %" PRId64 ", expected the same on all "
                           "ranks: %" PRId64 " and %" PRId64,
                           rank, agreed_names[n], own->rank, other->agreed[n], own->agreed[n]);
    return FLASH_ATTN_OK;
}

/* begin takes the problem's memory, so it brings notes where that is certain to be the host's. */
static bool can_speak(const fa_ring_call *r)
{
    const flash_attn_problem *p = r->problem;
    return r->ring.transport.exchange_host ||
           (p && (p->device.type == FLASH_ATTN_CPU || p->device.type == FLASH_ATTN_REFERENCE));
}

/* `status` is this rank's; OK if it is everybody's. Goes all the way round, whatever comes, for the others wait. */
static flash_attn_status agree(fa_ring_call *r, flash_attn_status status)
{
    const fa_call *c   = &r->call;
    note           own = {.mark = NOTE_MARK, .rank = r->ring.rank, .status = status}, notes[2];
    char           why[512]; /* of this rank's own failure, should the transport fail too */
    snprintf(why, sizeof why, "%s", flash_attn_last_error());
    if (r->broken || !can_speak(r))
        return status;
    if (status == FLASH_ATTN_OK) {
        const int64_t values[] = {
#define X(name, value) (int64_t)(value),
            AGREED_FIELDS(X)
#undef X
        };
        memcpy(own.agreed, values, sizeof own.agreed);
    }
    notes[0] = own;
    for (int hop = 1; hop < r->ring.ranks; hop++) {
        flash_attn_status exchanged = exchange_notes(r, &notes[(hop - 1) % 2], &notes[hop % 2]);
        if (exchanged != FLASH_ATTN_OK)
            return status != FLASH_ATTN_OK ? fa_fail(status, "%s", why) : exchanged;
        if (status == FLASH_ATTN_OK)
            status = check_note(&own, &notes[hop % 2], (r->ring.rank - hop + r->ring.ranks) % r->ring.ranks);
    }
    return status;
}

/* ---- the calls ---- */

/* Nothing is under way any more, whatever comes: the memory is about to go. */
static flash_attn_status settle(fa_ring_call *r, flash_attn_status status)
{
    return !r->broken && fa_ring_wait(r) != FLASH_ATTN_OK ? FLASH_ATTN_TRANSPORT : status;
}

static flash_attn_status run_ring(fa_ring_call *r, flash_attn_pass pass, const flash_attn_exec *exec, void **owned)
{
    bool forward = pass == FLASH_ATTN_FORWARD;
    FA_TRY(agree(r, check_all(r, pass, exec, owned)));
    flash_attn_status status = forward ? fa_ring_forward(r) : fa_ring_backward(r);
    if (can_speak(r)) /* notes may go the same way as what is still under way */
        status = settle(r, status);
    status = agree(r, status);
    if (status == FLASH_ATTN_OK)
        status = forward ? fa_ring_forward_finish(r) : fa_ring_backward_finish(r);
    return settle(r, status);
}

static flash_attn_status run(flash_attn_context *context, const flash_attn_problem *problem,
                             const flash_attn_grads *grads, flash_attn_pass pass, const flash_attn_ring *ring,
                             const flash_attn_exec *exec)
{
    FA_TRY(check_ring(ring));
    fa_ring_call r     = {.context = context, .problem = problem, .grads = grads, .ring = *ring};
    void        *owned = NULL;
    if (ring->ranks == 1) {
        FA_TRY(check_problem(&r, pass, false));
        return pass == FLASH_ATTN_FORWARD ? flash_attn_forward(context, problem, exec)
                                          : flash_attn_backward(context, problem, grads, exec);
    }
    flash_attn_status status = run_ring(&r, pass, exec, &owned);
    free(owned);
    return status;
}

flash_attn_status flash_attn_ring_forward(flash_attn_context *context, const flash_attn_problem *problem,
                                          const flash_attn_ring *ring, const flash_attn_exec *exec)
{
    return run(context, problem, NULL, FLASH_ATTN_FORWARD, ring, exec);
}

flash_attn_status flash_attn_ring_backward(flash_attn_context *context, const flash_attn_problem *problem,
                                           const flash_attn_grads *grads, const flash_attn_ring *ring,
                                           const flash_attn_exec *exec)
{
    return run(context, problem, grads, FLASH_ATTN_BACKWARD, ring, exec);
}

flash_attn_status flash_attn_ring_workspace_size(flash_attn_context *context, const flash_attn_problem *problem,
                                                 const flash_attn_ring *ring, flash_attn_pass pass, size_t *bytes)
{
    if (!bytes)
        return fa_fail(FLASH_ATTN_INVALID, "bytes is NULL, expected a place for the size");
    FA_TRY(check_ring(ring));
    fa_ring_call r = {.context = context, .problem = problem, .ring = *ring};
    FA_TRY(fa_context_of(&r.context));
    FA_TRY(check_problem(&r, pass, true));
    if (ring->ranks == 1)
        return flash_attn_workspace_size(r.context, problem, pass, bytes);
    FA_TRY(plan_memory(&r, true));
    *bytes = r.memory.total;
    return FLASH_ATTN_OK;
}
