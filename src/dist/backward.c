/*
 * Ring attention's backward on rank r of R. dK and dV, float32, follow K and V one step behind and go one hop further,
 * home:
 *
 *     begin to send the own K, V on, and to receive those of rank r - 1
 *     for t = 0 .. R - 1:
 *         dQ_t, dK_t, dV_t from the own Q, dO, O, LSE and K, V of rank r - t;    dQ += dQ_t
 *         wait: dK, dV of rank r - t are here, and K, V of rank r - t - 1
 *         dK += dK_t, dV += dV_t
 *         begin to send these dK, dV on with K, V of rank r - t - 1, and to receive those of the ranks before
 *     wait
 *
 * Both are one transfer: on a GPU a second one would begin when the first one's blocks have gone, and by then the next
 * step's have taken their places. The last sums are rounded as they are made: dQ's in the finish, those of dK and dV
 * before they go home.
 *
 * O and LSE are those over all keys, so each part's P = exp(S - LSE) and Delta are the whole's.
 */
#include "dist/dist.h"

static char *dkv_at(const fa_ring_call *r, int step) { return r->memory.base + fa_ring_dkv_at(r, step); }

/* What dK and dV come home in: what the caller wants, but for both float32 if one of them is. */
static flash_attn_dtype home_dtype(const fa_ring_call *r)
{
    const fa_call *c = &r->call;
    bool whole       = (c->dk.data && c->dk.dtype == FLASH_ATTN_F32) || (c->dv.data && c->dv.dtype == FLASH_ATTN_F32);
    return whole ? FLASH_ATTN_F32 : c->q.dtype;
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
    char                 *kv = r->memory.base + fa_ring_kv_at(r, number);
    s.count                  = fa_ring_step(r, number, &share, s.rects);
    s.rows                   = share.rows;
    s.k                      = fa_ring_k(r, kv, share.rows, r->call.k.dtype);
    s.v                      = fa_ring_v(r, kv, share.rows, r->call.k.dtype);
    s.dq                     = fa_ring_results(r, r->memory.acc, r->q.rows, r->call.head_dim);
    return s;
}

static bool is_last(const fa_ring_call *r, int step) { return step + 1 == r->ring.ranks; }

/* Of the last rectangle of all the sums are made in the end. */
static flash_attn_status run_rect(const fa_ring_call *r, const at_step *s, int n)
{
    const fa_ring_rect *rect = &s->rects[n];
    flash_attn_tensor   part = fa_ring_results(r, r->memory.part, rect->q_end - rect->q_begin, r->call.head_dim);
    FA_TRY(differentiate(r, rect, s->k, s->v, part, r->memory.base + r->memory.dkv_part));
    if (!r->call.dq.data || (is_last(r, s->number) && n + 1 == s->count))
        return FLASH_ATTN_OK;
    return add(r, fa_ring_rows(s->dq, 1, rect->q_begin, rect->q_end), part);
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

/* dK and dV of the last step, complete, where K and V were that nobody needs any more. */
static flash_attn_status complete_kv(const fa_ring_call *r, const at_step *s)
{
    const fa_ring_rect *last = &r->pending;
    char   *part = r->memory.base + r->memory.dkv_part, *acc = dkv_at(r, s->number), *home = dkv_at(r, s->number + 1);
    int64_t own             = last->k_end - last->k_begin;
    flash_attn_partial k[3] = {{.o = fa_ring_k(r, acc, s->rows, FLASH_ATTN_F32)},
                               {.o = fa_ring_k(r, part, own, FLASH_ATTN_F32)},
                               {.o = fa_ring_k(r, home, s->rows, home_dtype(r))}};
    flash_attn_partial v[3] = {{.o = fa_ring_v(r, acc, s->rows, FLASH_ATTN_F32)},
                               {.o = fa_ring_v(r, part, own, FLASH_ATTN_F32)},
                               {.o = fa_ring_v(r, home, s->rows, home_dtype(r))}};
    if (r->call.dk.data)
        FA_TRY(fa_ring_close(r, &k[0], &k[1], last->k_begin, last->k_end, &k[2]));
    if (r->call.dv.data)
        FA_TRY(fa_ring_close(r, &v[0], &v[1], last->k_begin, last->k_end, &v[2]));
    return FLASH_ATTN_OK;
}

/* Behind step `step`, dK and dV of which are made: they leave, with the next step's K and V if these have still to go
 * on. */
static flash_attn_status begin_next(fa_ring_call *r, int step)
{
    size_t bytes[2]; /* of what leaves, of what comes */
    bool   last = is_last(r, step), kv = !last && !is_last(r, step + 1);
    for (int n = 0; n < 2; n++) {
        int64_t rows = fa_ring_source(r, step + n).rows;
        bytes[n]     = last ? fa_ring_kv_bytes(r, rows, home_dtype(r)) : fa_ring_dkv_room(r, step + n);
        if (kv)
            bytes[n] += fa_ring_kv_bytes(r, fa_ring_source(r, step + 1 + n).rows, r->call.k.dtype);
    }
    if (!kv && !fa_ring_wants_kv(r))
        return FLASH_ATTN_OK;
    return fa_ring_begin(r, fa_ring_dkv_at(r, step + last), bytes[0], fa_ring_dkv_at(r, step + !last), bytes[1]);
}

/* The first rectangle's work runs while dK and dV are still on their way here. *status: of the work; what is returned:
 * of the transport. */
static flash_attn_status run_step(fa_ring_call *r, int number, flash_attn_status *status)
{
    at_step s = enter_step(r, number);
    if (number == 0 && *status == FLASH_ATTN_OK)
        *status = begin_step(r, &s);
    for (int n = 0; n == 0 || n < s.count; n++) {
        bool left = is_last(r, number) && n + 1 == s.count;
        if (n < s.count && *status == FLASH_ATTN_OK)
            *status = run_rect(r, &s, n);
        if (n == 0)
            FA_TRY(fa_ring_wait(r));
        if (left)
            r->pending = s.rects[n];
        else if (n < s.count && *status == FLASH_ATTN_OK)
            *status = add_kv(r, &s.rects[n], number, s.rows);
    }
    if (is_last(r, number) && *status == FLASH_ATTN_OK)
        *status = complete_kv(r, &s);
    return begin_next(r, number);
}

flash_attn_status fa_ring_backward(fa_ring_call *r)
{
    flash_attn_status status = fa_ring_pack(r); /* whatever fails here, the ring goes on, for the others' sake */
    FA_TRY(fa_ring_begin_kv(r, 0));
    for (int step = 0; step < r->ring.ranks; step++)
        FA_TRY(run_step(r, step, &status));
    return status;
}

/* dQ while dK and dV are on their way home, if they still are. */
flash_attn_status fa_ring_backward_finish(fa_ring_call *r)
{
    const fa_call      *c    = &r->call;
    const fa_ring_rect *last = &r->pending;
    char               *home = dkv_at(r, r->ring.ranks - 1);
    int64_t             rows = c->k.shape[1];
    flash_attn_tensor   dk = fa_ring_k(r, home, rows, home_dtype(r)), dv = fa_ring_v(r, home, rows, home_dtype(r));
    flash_attn_partial  acc = {.o = fa_ring_results(r, r->memory.acc, r->q.rows, c->head_dim)},
                       part = {.o = fa_ring_results(r, r->memory.part, last->q_end - last->q_begin, c->head_dim)},
                       dq   = {.o = c->dq};
    if (c->dq.data)
        FA_TRY(fa_ring_close(r, &acc, &part, last->q_begin, last->q_end, &dq));
    if (c->dsinks.data) {
        flash_attn_tensor from = {
            .data = r->memory.base + r->memory.dsinks, .shape = {1, 1, 1, c->heads_q}, .stride = {0, 0, 0, 1}};
        flash_attn_tensor to = {
            .data = c->dsinks.data, .shape = {1, 1, 1, c->heads_q}, .stride = {0, 0, 0, c->dsinks.stride[1]}};
        FA_TRY(fa_ring_sum(r, &from, 1, to));
    }
    FA_TRY(fa_ring_wait(r));
    if (c->dk.data)
        FA_TRY(fa_ring_sum(r, &dk, 1, c->dk));
    if (c->dv.data)
        FA_TRY(fa_ring_sum(r, &dv, 1, c->dv));
    return FLASH_ATTN_OK;
}
