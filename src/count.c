/* The work of a call: pairs that the mask shows, and bytes. */
#include "check.h"

#include <stdlib.h>

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Sum of i + shift for i in [begin, end). */
static int64_t sum_of(int64_t begin, int64_t end, int64_t shift)
{
    return begin < end ? (end - begin) * (begin + end - 1 + 2 * shift) / 2 : 0;
}

/* Pairs that the window alone shows. Query i sees keys [max(key_begin, i + diagonal - left), min(seqlen_k, i + diagonal
 * + right + 1)); sum both ends over the queries that see any, each end in its sloping and its flat part. */
static int64_t window_pairs(const fa_call *call, const fa_sequence *s)
{
    int64_t left = call->window.left, right = call->window.right, diagonal = s->diagonal;
    int64_t begin = max64(0, s->key_begin - diagonal - right), end = min64(s->seqlen_q, s->seqlen_k - diagonal + left);
    if (s->key_begin >= s->seqlen_k || begin >= end)
        return 0;
    int64_t top_flat  = min64(end, max64(begin, s->seqlen_k - diagonal - right - 1)); /* from here seqlen_k cuts */
    int64_t low_slope = min64(end, max64(begin, s->key_begin - diagonal + left));     /* from here the window cuts */
    int64_t tops      = sum_of(begin, top_flat, diagonal + right + 1) + (end - top_flat) * s->seqlen_k;
    int64_t lows      = (low_slope - begin) * s->key_begin + sum_of(low_slope, end, diagonal - left);
    return tops - lows;
}

static int by_first_query(const void *x, const void *y)
{
    const flash_attn_slice *a = x, *b = y;
    return (a->q_begin > b->q_begin) - (a->q_begin < b->q_begin);
}

/* How many keys of `within` the slices show to query i: the size of a union, found by sorting the pieces by begin. */
static int64_t union_size(const flash_attn_slice *const *active, int count, int i, fa_range within, fa_range *pieces)
{
    int num_pieces = 0;
    for (int n = 0; n < count; n++) {
        const flash_attn_slice *s = active[n];
        fa_range keys  = fa_keys_of_slice(s->q_begin, s->q_end, s->k_begin, s->k_end, (int)s->kind, i);
        fa_range piece = {fa_max_int(keys.begin, within.begin), fa_min_int(keys.end, within.end)};
        if (piece.begin >= piece.end)
            continue;
        int at = num_pieces++;
        for (; at > 0 && pieces[at - 1].begin > piece.begin; at--)
            pieces[at] = pieces[at - 1];
        pieces[at] = piece;
    }
    int64_t size = 0;
    int     seen = within.begin;
    for (int n = 0; n < num_pieces; n++) {
        int begin = fa_max_int(pieces[n].begin, seen);
        size += fa_max_int(pieces[n].end - begin, 0);
        seen = fa_max_int(pieces[n].end, seen);
    }
    return size;
}

/* Queries from first to last, with the slices that hold each. */
static flash_attn_status slice_pairs(const fa_call *call, const fa_sequence *s, int64_t b, int64_t *pairs)
{
    fa_range                 own    = fa_slices_of(&call->slices, b);
    size_t                   count  = (size_t)(own.end - own.begin);
    flash_attn_slice        *sorted = calloc(count + 1, sizeof *sorted);
    const flash_attn_slice **active = calloc(count + 1, sizeof *active);
    fa_range                *pieces = calloc(count + 1, sizeof *pieces);
    flash_attn_status        status = FLASH_ATTN_OK;
    *pairs                          = 0;
    if (sorted && active && pieces) {
        memcpy(sorted, call->slices.list + own.begin, count * sizeof *sorted);
        qsort(sorted, count, sizeof *sorted, by_first_query);
        size_t next       = 0;
        int    num_active = 0;
        for (int i = 0; i < s->seqlen_q; i++) {
            int kept = 0;
            for (int n = 0; n < num_active; n++)
                if (active[n]->q_end > i)
                    active[kept++] = active[n];
            for (num_active = kept; next < count && sorted[next].q_begin <= i; next++)
                if (sorted[next].q_end > i)
                    active[num_active++] = &sorted[next];
            fa_range within =
                fa_keys_seen(call->window, s->diagonal, (fa_range){i, i + 1}, (fa_range){s->key_begin, s->seqlen_k});
            *pairs += union_size(active, num_active, i, within, pieces);
        }
    } else {
        status = fa_fail(FLASH_ATTN_NO_MEMORY, "no memory to sort %zu slices", count);
    }
    free(sorted);
    free(active);
    free(pieces);
    return status;
}

flash_attn_status fa_count_work(const fa_call *call, double *flops, double *bytes)
{
    double  pairs = 0.0, rows_k = 0.0;
    int64_t count = call->slices.offsets ? call->batch : fa_num_lengths(call);
    for (int64_t b = 0; b < count; b++) {
        fa_sequence s   = fa_sequence_at(call, b);
        int64_t     own = 0;
        if (call->slices.count > 0)
            FA_TRY(slice_pairs(call, &s, b, &own));
        else
            own = window_pairs(call, &s);
        pairs += (double)own * (double)call->heads_q;
        rows_k += (double)(s.seqlen_k - s.key_begin) * (double)call->heads_k;
    }
    double alike = count > 0 ? (double)call->batch / (double)count : 0.0; /* sequences for each that was looked at */
    pairs *= alike;
    rows_k *= alike;
    double d = (double)call->head_dim, dv = (double)call->head_dim_v;
    bool   forward = call->pass == FLASH_ATTN_FORWARD;
    /* Forward: Q K^T over d, P V over dv. Backward: S, dQ, dK over d, dP, dV over dv. */
    *flops = 2.0 * pairs * (forward ? d + dv : 3.0 * d + 2.0 * dv);
    *bytes = rows_k * (d + (fa_values_in_keys(call) ? 0.0 : dv)) * (double)fa_dtype_bytes(call->k.dtype);
    const flash_attn_tensor *whole[] = {
        &call->q,     &call->o,         &call->lse,       &call->bias,      &call->alibi_slopes,
        &call->sinks, &call->descale_q, &call->descale_k, &call->descale_v, &call->dout,
        &call->dq,    &call->dk,        &call->dv,        &call->dbias,     &call->dsinks};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        *bytes += fa_tensor_bytes(whole[i]);
    return FLASH_ATTN_OK;
}
