/*
 * Ring attention's backward on rank r of R. dK and dV, float32, follow K and V one step behind and go one hop further,
 * home:
 *
 *     begin to send the own K, V on, and to receive those of rank r - 1
 *     for t = 0 .. R - 1:
 *         dQ_t, dK_t, dV_t from the own Q, dO, O, LSE and K, V of rank r - t
 *         wait: dK, dV of rank r - t are here, and K, V of rank r - t - 1
 *         begin to send K, V of rank r - t - 1 on, and to receive those of rank r - t - 2
 *         dQ += dQ_t, dK += dK_t, dV += dV_t
 *         begin to send dK, dV of rank r - t on, and to receive those of rank r - t - 1
 *     wait
 *
 * O and LSE are those over all keys, so each part's P = exp(S - LSE) and Delta are the whole's.
 */
#include "dist/dist.h"

static bool wants_kv(const fa_ring_call *r) { return r->call.dk.data || r->call.dv.data; }

static char *dkv_at(const fa_ring_call *r, int step) { return r->memory.base + r->memory.dkv[step % 2]; }

static size_t dkv_bytes(const fa_ring_call *r, int step)
{
    return fa_ring_kv_bytes(r, fa_ring_source(r, step).rows, FLASH_ATTN_F32);
}

/* The gradients that one call makes: in `dq` and, for `rows` rows of keys, at `dkv`. */
static flash_attn_status differentiate(const fa_ring_call *r, const fa_ring_rect *rect, flash_attn_tensor k,
                                       flash_attn_tensor v, flash_attn_tensor dq, char *dkv)
{
    int64_t            rows = rect->k_end - rect->k_begin;
    flash_attn_problem p    = fa_ring_problem(r, rect, k, v);
    flash_attn_grads   g    = {.dout = fa_ring_rows(r->call.dout, 1, rect->q_begin, rect->q_end)};
    if (r->call.dq.data)
        g.dq = dq;
    if (r->call.dk.data)
        g.dk = fa_ring_k(r, dkv, rows, FLASH_ATTN_F32);
    if (r->call.dv.data)
        g.dv = fa_ring_v(r, dkv, rows, FLASH_ATTN_F32);
    return fa_run(r->context, &p, &g, FLASH_ATTN_BACKWARD, &r->exec, true);
}

static flash_attn_status add(const fa_ring_call *r, flash_attn_tensor sum, flash_attn_tensor part)
{
    return fa_ring_sum(r, (flash_attn_tensor[2]){sum, part}, 2, sum);
}

static flash_attn_status add_kv(const fa_ring_call *r, const fa_ring_rect *rect, int step, int64_t rows)
{
    char   *part = r->memory.base + r->memory.dkv_part, *acc = dkv_at(r, step);
    int64_t own = rect->k_end - rect->k_begin;
    if (r->call.dk.data)
        FA_TRY(add(r, fa_ring_rows(fa_ring_k(r, acc, rows, FLASH_ATTN_F32), 1, rect->k_begin, rect->k_end),
                   fa_ring_k(r, part, own, FLASH_ATTN_F32)));
    if (r->call.dv.data)
        FA_TRY(add(r, fa_ring_rows(fa_ring_v(r, acc, rows, FLASH_ATTN_F32), 1, rect->k_begin, rect->k_end),
                   fa_ring_v(r, part, own, FLASH_ATTN_F32)));
    return FLASH_ATTN_OK;
}

/* Gradients of nothing: zeros, and dsinks, which needs no key. */
static flash_attn_status begin_sums(const fa_ring_call *r, flash_attn_tensor dq, int64_t rows)
{
    if (r->call.dq.data)
        FA_TRY(fa_ring_sum(r, NULL, 0, dq));
    if (r->call.dk.data)
        FA_TRY(fa_ring_sum(r, NULL, 0, fa_ring_k(r, dkv_at(r, 0), rows, FLASH_ATTN_F32)));
    if (r->call.dv.data)
        FA_TRY(fa_ring_sum(r, NULL, 0, fa_ring_v(r, dkv_at(r, 0), rows, FLASH_ATTN_F32)));
    return FLASH_ATTN_OK;
}

static flash_attn_status make_dsinks(const fa_ring_call *r, flash_attn_tensor k, flash_attn_tensor v)
{
    fa_ring_rect       none = fa_ring_no_keys(r);
    flash_attn_problem p    = fa_ring_problem(r, &none, k, v);
    flash_attn_grads   g    = {.dout = r->call.dout, .dsinks = {.data = r->memory.base + r->memory.dsinks}};
    p.sinks                 = r->problem->sinks;
    return r->call.dsinks.data ? fa_run(r->context, &p, &g, FLASH_ATTN_BACKWARD, &r->exec, true) : FLASH_ATTN_OK;
}

/* A step's own share of K and V, and where its gradients are added up. */
typedef struct at_step {
    flash_attn_tensor k, v, dq;
    fa_ring_rect      rects[FA_RING_MAX_RECTS];
    int64_t           rows;
    int               number, count;
} at_step;

static at_step enter_step(const fa_ring_call *r, int number)
{
    flash_attn_ring_share share;
    at_step               s  = {.number = number};
    char                 *kv = r->memory.base + r->memory.kv[number % 2];
    s.count                  = fa_ring_step(r, number, &share, s.rects);
    s.rows                   = share.rows;
    s.k                      = fa_ring_k(r, kv, share.rows, r->call.k.dtype);
    s.v                      = fa_ring_v(r, kv, share.rows, r->call.k.dtype);
    s.dq                     = fa_ring_results(r, r->memory.acc, r->q.rows, r->call.head_dim);
    return s;
}

static flash_attn_status run_rect(const fa_ring_call *r, const at_step *s, int n)
{
    const fa_ring_rect *rect = &s->rects[n];
    flash_attn_tensor   part = fa_ring_results(r, r->memory.part, rect->q_end - rect->q_begin, r->call.head_dim);
    FA_TRY(differentiate(r, rect, s->k, s->v, part, r->memory.base + r->memory.dkv_part));
    return r->call.dq.data ? add(r, fa_ring_rows(s->dq, 1, rect->q_begin, rect->q_end), part) : FLASH_ATTN_OK;
}

static bool is_all(const fa_ring_call *r, const at_step *s)
{
    return fa_ring_is_whole(r, s->rects, s->count) && s->rects->k_begin == 0 && s->rects->k_end == s->rows;
}

/* Sums begin: with the own rectangle's gradients if it is all, else with zeros, to which run_step adds. */
static flash_attn_status begin_step(const fa_ring_call *r, at_step *s)
{
    FA_TRY(make_dsinks(r, s->k, s->v));
    if (!is_all(r, s))
        return begin_sums(r, s->dq, s->rows);
    s->count = 0;
    return differentiate(r, s->rects, s->k, s->v, s->dq, dkv_at(r, 0));
}

/* The first rectangle's work runs while dK and dV are still on their way here; the last one's sums, while K and V
 * already leave. *status: of the work; what is returned: of the transport. */
static flash_attn_status run_step(fa_ring_call *r, int number, flash_attn_status *status)
{
    at_step s = enter_step(r, number);
    if (number == 0 && *status == FLASH_ATTN_OK)
        *status = begin_step(r, &s);
    for (int n = 0; n == 0 || n < s.count; n++) {
        bool work = n < s.count;
        if (work && *status == FLASH_ATTN_OK)
            *status = run_rect(r, &s, n);
        if (n == 0)
            FA_TRY(fa_ring_wait(r));
        if (n + 1 >= s.count)
            FA_TRY(fa_ring_begin_kv(r, number + 1));
        if (work && *status == FLASH_ATTN_OK)
            *status = add_kv(r, &s.rects[n], number, s.rows);
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_ring_backward(fa_ring_call *r)
{
    flash_attn_status status = fa_ring_pack(r); /* whatever fails here, the ring goes on, for the others' sake */
    FA_TRY(fa_ring_begin_kv(r, 0));
    for (int step = 0; step < r->ring.ranks; step++) {
        FA_TRY(run_step(r, step, &status));
        if (wants_kv(r))
            FA_TRY(fa_ring_begin(r, r->memory.dkv[step % 2], dkv_bytes(r, step), r->memory.dkv[(step + 1) % 2],
                                 dkv_bytes(r, step + 1)));
    }
    FA_TRY(fa_ring_wait(r));
    return status;
}

flash_attn_status fa_ring_backward_finish(const fa_ring_call *r)
{
    const fa_call    *c    = &r->call;
    char             *home = dkv_at(r, r->ring.ranks);
    int64_t           rows = c->k.shape[1];
    flash_attn_tensor dq   = fa_ring_results(r, r->memory.acc, r->q.rows, c->head_dim);
    flash_attn_tensor dk = fa_ring_k(r, home, rows, FLASH_ATTN_F32), dv = fa_ring_v(r, home, rows, FLASH_ATTN_F32);
    if (c->dq.data)
        FA_TRY(fa_ring_sum(r, &dq, 1, c->dq));
    if (c->dk.data)
        FA_TRY(fa_ring_sum(r, &dk, 1, c->dk));
    if (c->dv.data)
        FA_TRY(fa_ring_sum(r, &dv, 1, c->dv));
    if (c->dsinks.data) {
        flash_attn_tensor from = {
            .data = r->memory.base + r->memory.dsinks, .shape = {1, 1, 1, c->heads_q}, .stride = {0, 0, 0, 1}};
        flash_attn_tensor to = {
            .data = c->dsinks.data, .shape = {1, 1, 1, c->heads_q}, .stride = {0, 0, 0, c->dsinks.stride[1]}};
        FA_TRY(fa_ring_sum(r, &from, 1, to));
    }
    return FLASH_ATTN_OK;
}
