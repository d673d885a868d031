/* The options of a problem: scale, softcap, mask, dropout; and the small tensors that change the scores. */
#include "check.h"

#include <inttypes.h>

#define MAX_SPLITS 256
#define LARGEST_SCALE 2e38f /* times log2(e) it is finite, as scores for exp2 have it */

static flash_attn_status normalise_mask(const flash_attn_problem *p, fa_call *call)
{
    call->window = (fa_window){FA_UNLIMITED, FA_UNLIMITED};
    if (p->mask != FLASH_ATTN_NONE && p->mask != FLASH_ATTN_CAUSAL && p->mask != FLASH_ATTN_WINDOW)
        return fa_fail(FLASH_ATTN_INVALID, "mask is %d, expected NONE (0), CAUSAL (1) or WINDOW (2)", (int)p->mask);
    const char *names[2]  = {"window_left", "window_right"};
    int32_t     values[2] = {p->window_left, p->window_right};
    for (int i = 0; i < 2; i++) {
        if (values[i] < -1)
            return fa_fail(FLASH_ATTN_INVALID, "%s is %d, expected 0 or more, or -1 for no limit", names[i], values[i]);
        if (p->mask != FLASH_ATTN_WINDOW && values[i] > 0)
            return fa_fail(FLASH_ATTN_INVALID, "%s is %d, expected 0 or -1 unless mask is WINDOW (2), it is %d",
                           names[i], values[i], (int)p->mask);
    }
    if (p->mask == FLASH_ATTN_CAUSAL)
        call->window.right = 0;
    if (p->mask == FLASH_ATTN_WINDOW) {
        call->window.left  = p->window_left < 0 ? FA_UNLIMITED : fa_min_int(p->window_left, FA_UNLIMITED);
        call->window.right = p->window_right < 0 ? FA_UNLIMITED : fa_min_int(p->window_right, FA_UNLIMITED);
    }
    return FLASH_ATTN_OK;
}

static flash_attn_status normalise_dropout(const flash_attn_dropout *dropout, fa_dropout *out)
{
    FA_TRY(fa_check_reserved_int("dropout", dropout->reserved));
    if (!(dropout->p >= 0.0f && dropout->p < 1.0f))
        return fa_fail(FLASH_ATTN_INVALID, "dropout.p is %g, expected 0 or more and less than 1", (double)dropout->p);
    fa_u32 threshold = (fa_u32)lrintf(dropout->p * 65536.0f);
    if (threshold > 65535)
        threshold = 65535; /* nearest that still keeps something */
    *out = (fa_dropout){.threshold  = threshold,
                        .seed_low   = (fa_u32)dropout->seed,
                        .seed_high  = (fa_u32)(dropout->seed >> 32) ^ (fa_u32)(dropout->offset >> 32),
                        .offset_low = (fa_u32)dropout->offset,
                        .keep_scale = 65536.0f / (float)(65536 - threshold)};
    return FLASH_ATTN_OK;
}

flash_attn_status fa_normalise_options(const flash_attn_problem *p, fa_call *call)
{
    if (!isfinite(p->scale))
        return fa_fail(FLASH_ATTN_INVALID, "scale is %g, expected a finite number", (double)p->scale);
    if (fabsf(p->scale) > LARGEST_SCALE)
        return fa_fail(FLASH_ATTN_INVALID, "scale is %g, expected at most %g in size", (double)p->scale, (double)LARGEST_SCALE);
    call->scale = p->scale;
    if (p->scale == 0.0f)
        call->scale = signbit(p->scale) ? 0.0f : (float)(1.0 / sqrt((double)call->head_dim));
    if (!isfinite(p->softcap) || p->softcap < 0.0f)
        return fa_fail(FLASH_ATTN_INVALID, "softcap is %g, expected 0 for none or a finite number above",
                       (double)p->softcap);
    if (p->softcap > 0 && fabs((double)call->scale / p->softcap) > LARGEST_SCALE)
        return fa_fail(FLASH_ATTN_INVALID, "softcap is %g, expected 0 for none or at least scale / %g", (double)p->softcap, (double)LARGEST_SCALE);
    call->softcap = p->softcap;
    if (p->num_splits < -1 || p->num_splits > MAX_SPLITS)
        return fa_fail(FLASH_ATTN_INVALID, "num_splits is %d, expected -1 to %d", p->num_splits, MAX_SPLITS);
    call->num_splits = p->num_splits;
    FA_TRY(normalise_mask(p, call));
    return normalise_dropout(&p->dropout, &call->dropout);
}

/* An optional input: absent (out zeroed), or checked against `full` with broadcast. */
static flash_attn_status normalise_extra(const char *name, const flash_attn_tensor *given, const int64_t full[4],
                                         unsigned allowed, bool plan, flash_attn_tensor *out)
{
    memset(out, 0, sizeof *out);
    if (!fa_view_given(given, true))
        return fa_check_reserved_int(name, given->reserved);
    *out = *given;
    FA_TRY(fa_view_dtype(name, out, allowed));
    FA_TRY(fa_view_broadcasts(name, out, full));
    FA_TRY(fa_view_layout(name, out, plan));
    fa_view_expand(out, full);
    return FLASH_ATTN_OK;
}

/* Where sequences have lengths of their own, a bias covers the longest; it may have more rows and keys than needed.
 * That it has enough is known from the lengths (fa_check_lengths) or, on the device, from the bounds here. */
static void bias_extents(const flash_attn_problem *p, const fa_call *call, int64_t full[4])
{
    bool    own_q = p->cu_seqlens_q != NULL, own_k = p->cu_seqlens_k != NULL || p->pages.table != NULL;
    bool    host = fa_on_host(p->device);
    int64_t rows = p->bias.shape[2], keys = p->bias.shape[3];
    full[0] = call->batch;
    full[1] = call->heads_q;
    full[2] = own_q && rows >= (host ? 0 : call->max_seqlen_q) ? rows : call->max_seqlen_q;
    full[3] = !own_k ? call->k.shape[1] : keys >= (host ? 0 : call->max_seqlen_k) ? keys : call->max_seqlen_k;
    if (rows == 1)
        full[2] = call->max_seqlen_q;
}

flash_attn_status fa_normalise_extras(const flash_attn_problem *p, bool plan, fa_call *call)
{
    unsigned f32 = FA_BIT(FLASH_ATTN_F32), allowed = p->q.dtype == FLASH_ATTN_F8E4M3 ? f32 : f32 | FA_BIT(p->q.dtype);
    int64_t  bias[4], slopes[4] = {call->batch, call->heads_q, 1, 1}, scales[4] = {call->batch, call->heads_k, 1, 1};
    bias_extents(p, call, bias);
    FA_TRY(normalise_extra("bias", &p->bias, bias, allowed, plan, &call->bias));
    if (call->bias.data && p->bias.shape[3] != bias[3])
        return fa_fail(FLASH_ATTN_INVALID,
                       "bias.shape[3] is %" PRId64 ", expected %" PRId64 ": a bias does not broadcast "
                       "over keys",
                       p->bias.shape[3], bias[3]);
    FA_TRY(normalise_extra("alibi_slopes", &p->alibi_slopes, slopes, f32, plan, &call->alibi_slopes));
    if (call->alibi_slopes.data && p->alibi_slopes.shape[1] != call->heads_q)
        return fa_fail(FLASH_ATTN_INVALID, "alibi_slopes.shape[1] is %" PRId64 ", expected heads_q %" PRId64,
                       p->alibi_slopes.shape[1], call->heads_q);
    const int64_t *of_sinks = p->sinks.shape;
    if (fa_view_given(&p->sinks, plan) && (of_sinks[0] != 1 || of_sinks[1] != call->heads_q || of_sinks[2] != 1 || of_sinks[3] != 1))
        return fa_fail(FLASH_ATTN_INVALID, "sinks.shape is [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [1, %" PRId64 ", 1, 1]", of_sinks[0], of_sinks[1],
                       of_sinks[2], of_sinks[3], call->heads_q);
    FA_TRY(normalise_extra("sinks", &p->sinks, slopes, allowed, plan, &call->sinks));

    const char              *names[3]  = {"descale.q", "descale.k", "descale.v"};
    const flash_attn_tensor *given[3]  = {&p->descale.q, &p->descale.k, &p->descale.v};
    flash_attn_tensor       *result[3] = {&call->descale_q, &call->descale_k, &call->descale_v};
    for (int i = 0; i < 3; i++) {
        FA_TRY(normalise_extra(names[i], given[i], scales, f32, plan, result[i]));
        if (result[i]->data && p->q.dtype != FLASH_ATTN_F8E4M3)
            return fa_fail(FLASH_ATTN_INVALID, "%s is given with q.dtype %s, expected it only with F8E4M3", names[i],
                           fa_dtype_name(p->q.dtype));
    }
    return FLASH_ATTN_OK;
}
