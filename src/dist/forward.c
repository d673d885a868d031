/*
 * Ring attention's forward on rank r of R:
 *
 *     begin to send the own K, V on, and to receive those of rank r - 1
 *     for t = 0 .. R - 1:
 *         O_t, LSE_t = attention of the own Q over K, V of rank r - t        (a call for each rectangle)
 *         wait
 *         begin to send K, V of rank r - t - 1 on, and to receive those of rank r - t - 2
 *         O, LSE = merge(O, LSE, O_t, LSE_t)                                 (in float32; the last into the caller's)
 *
 * The merge comes last so that a GPU's transfer has begun before the next attention takes all multiprocessors.
 */
#include "dist/dist.h"

/* One call of the public forward into float32 at o and lse. */
static flash_attn_status attend(const fa_ring_call *r, const fa_ring_rect *rect, flash_attn_tensor k,
                                flash_attn_tensor v, bool sinks, const flash_attn_partial *result)
{
    flash_attn_problem p = fa_ring_problem(r, rect, k, v);
    if (sinks)
        p.sinks = r->problem->sinks;
    p.o   = result->o;
    p.lse = result->lse;
    return fa_run(r->context, &p, NULL, FLASH_ATTN_FORWARD, &r->exec, true);
}

static flash_attn_partial partial_at(const fa_ring_call *r, size_t o, size_t lse, int64_t rows)
{
    return (flash_attn_partial){.o = fa_ring_results(r, o, rows, r->call.head_dim_v), .lse = fa_ring_lse(r, lse, rows)};
}

static flash_attn_partial part_of(const fa_ring_call *r, const fa_ring_rect *rect)
{
    return partial_at(r, r->memory.part, r->memory.part_lse, rect->q_end - rect->q_begin);
}

/* What waits to be merged, into the result so far. */
static flash_attn_status merge(fa_ring_call *r)
{
    fa_ring_rect       rows = r->pending;
    flash_attn_partial acc  = partial_at(r, r->memory.acc, r->memory.lse, r->q.rows), parts[2];
    parts[0]                = fa_ring_part_rows(acc, rows.q_begin, rows.q_end);
    parts[1]                = part_of(r, &rows);
    r->pending              = (fa_ring_rect){0};
    return rows.q_begin == rows.q_end ? FLASH_ATTN_OK : fa_ring_merge(r, parts, 2, &parts[0]);
}

/* Leaves the last rectangle's part to be merged. */
static flash_attn_status run_step(fa_ring_call *r, int step)
{
    flash_attn_ring_share share;
    fa_ring_rect          rects[FA_RING_MAX_RECTS], none = fa_ring_no_keys(r);
    int                   count = fa_ring_step(r, step, &share, rects), first = 0;
    char                 *kv = r->memory.base + fa_ring_kv_at(r, step);
    flash_attn_tensor     k  = fa_ring_k(r, kv, share.rows, r->call.k.dtype),
                      v      = fa_ring_v(r, kv, share.rows, r->call.k.dtype);
    if (step == 0) { /* sinks count once, for every query */
        flash_attn_partial acc   = partial_at(r, r->memory.acc, r->memory.lse, r->q.rows);
        bool               whole = fa_ring_is_whole(r, rects, count);
        FA_TRY(attend(r, whole ? rects : &none, k, v, true, &acc));
        first = whole;
    }
    for (int n = first; n < count; n++) {
        flash_attn_partial part = part_of(r, &rects[n]);
        FA_TRY(merge(r));
        FA_TRY(attend(r, &rects[n], k, v, false, &part));
        r->pending = rects[n];
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_ring_forward(fa_ring_call *r)
{
    flash_attn_status status = fa_ring_pack(r); /* whatever fails here, the ring goes on, for the others' sake */
    FA_TRY(fa_ring_begin_kv(r, 0));
    for (int step = 0; step < r->ring.ranks; step++) {
        if (status == FLASH_ATTN_OK)
            status = run_step(r, step);
        FA_TRY(fa_ring_wait(r));
        FA_TRY(fa_ring_begin_kv(r, step + 1));
        if (status == FLASH_ATTN_OK && step + 1 < r->ring.ranks)
            status = merge(r);
    }
    return status;
}

flash_attn_status fa_ring_forward_finish(const fa_ring_call *r)
{
    flash_attn_partial acc = partial_at(r, r->memory.acc, r->memory.lse, r->q.rows), part = part_of(r, &r->pending),
                       result = {.o = r->call.o, .lse = r->call.lse};
    return fa_ring_close(r, &acc, &part, r->pending.q_begin, r->pending.q_end, &result);
}
