/* Block masks that show documents beside each other. Packed sequences are the same problem without slices, and their tiles begin where a document does (decision 0102). */
#include "call.h"

#include <stdlib.h>

/* Where sequences end, in rows of all entries; q NULL: they are counted only. */
typedef struct ends {
    int32_t *q, *k;
    int64_t  count, last_q, last_k, longest_q, longest_k;
} ends;

static void add(ends *e, int64_t end_q, int64_t end_k)
{
    e->longest_q = end_q - e->last_q > e->longest_q ? end_q - e->last_q : e->longest_q;
    e->longest_k = end_k - e->last_k > e->longest_k ? end_k - e->last_k : e->longest_k;
    e->count++;
    if (e->q) {
        e->q[e->count] = (int32_t)end_q;
        e->k[e->count] = (int32_t)end_k;
    }
    e->last_q = end_q;
    e->last_k = end_k;
}

/* Up to here: keys that no query sees, then queries that see no key. In this order each begins before its entry's last query, by which kernels know the entry. */
static void add_gap(ends *e, int64_t to_q, int64_t to_k)
{
    if (to_k > e->last_k)
        add(e, e->last_q, to_k);
    if (to_q > e->last_q)
        add(e, to_q, e->last_k);
}

static bool is_empty(const flash_attn_slice *slice) { return slice->q_begin == slice->q_end || slice->k_begin == slice->k_end; }

static ends ends_of(const fa_call *call, const flash_attn_slices *documents, int32_t *q, int32_t *k)
{
    int64_t rows_q = call->q.shape[1], rows_k = call->k.shape[1];
    ends    e      = {.q = q, .k = k};
    if (q)
        q[0] = k[0] = 0;
    for (int64_t b = 0; b < call->q.shape[0]; b++) {
        fa_range own = fa_slices_of(documents, b);
        for (int n = own.begin; n < own.end; n++) {
            const flash_attn_slice *slice = &documents->list[n];
            if (is_empty(slice))
                continue;
            add_gap(&e, b * rows_q + slice->q_begin, b * rows_k + slice->k_begin);
            add(&e, b * rows_q + slice->q_end, b * rows_k + slice->k_end);
        }
        add_gap(&e, (b + 1) * rows_q, (b + 1) * rows_k);
    }
    return e;
}

typedef struct documents {
    int64_t count, queries;
    int32_t kind;
    bool    ordered;
    bool    aligned;   /* the last query and the last key of each lie to one another as the tensors' do, so that distances are the same */
    bool    left_keys; /* behind an entry's last query are keys that no query sees */
} documents;

static documents find_documents(const fa_call *call)
{
    documents d     = {.kind = FLASH_ATTN_SLICE_FULL, .ordered = true, .aligned = true};
    int64_t   shift = call->k.shape[1] - call->q.shape[1];
    for (int64_t b = 0; b < call->batch && d.ordered; b++) {
        fa_range own = fa_slices_of(&call->slices, b);
        int32_t  end_q = 0, end_k = 0;
        for (int n = own.begin; n < own.end && d.ordered; n++) {
            const flash_attn_slice *slice = &call->slices.list[n];
            if (is_empty(slice))
                continue;
            d.kind    = d.count == 0 ? slice->kind : d.kind;
            d.ordered = slice->q_begin >= end_q && slice->k_begin >= end_k && slice->kind == d.kind;
            d.aligned = d.aligned && slice->k_end - slice->q_end == shift;
            d.queries += slice->q_end - slice->q_begin;
            d.count++;
            end_q = slice->q_end;
            end_k = slice->k_end;
        }
        d.left_keys = d.left_keys || (end_q == call->q.shape[1] && end_k < call->k.shape[1]);
    }
    return d;
}

/* Nothing is said of pairs by their place, and of sequences alone by their number. */
static bool may_be_packed(const fa_call *call)
{
    const flash_attn_tensor *slopes = &call->alibi_slopes;
    bool lengths = call->cu_seqlens_q || call->cu_seqlens_k || call->seqused_q || call->seqused_k || call->leftpad_k || call->cache_batch_idx || call->pages.table;
    bool rows    = call->k.shape[0] == call->batch && call->q.shape[0] * call->q.shape[1] <= INT32_MAX / 2 && call->k.shape[0] * call->k.shape[1] <= INT32_MAX / 2;
    return call->slices.count > 0 && !lengths && rows && !call->bias.data && !call->dropout.threshold && call->q.dtype != FLASH_ATTN_F8E4M3 && call->num_splits <= 1 &&
           (!slopes->data || slopes->stride[0] == 0 || call->batch == 1);
}

bool fa_documents_pack(const fa_call *call, int64_t least_mean, fa_call *packed)
{
    if (!may_be_packed(call))
        return false;
    documents d        = find_documents(call);
    bool      by_place = call->window.left < FA_UNLIMITED || call->window.right < FA_UNLIMITED || call->alibi_slopes.data;
    bool      causal   = d.kind == FLASH_ATTN_SLICE_CAUSAL;
    if (d.count == 0 || !d.ordered || d.queries < least_mean * d.count || (d.kind != FLASH_ATTN_SLICE_FULL && !causal))
        return false;
    if ((by_place && !d.aligned) || (d.left_keys && call->batch > 1))
        return false;
    ends all             = ends_of(call, &call->slices, NULL, NULL);
    *packed              = *call;
    packed->slices       = (flash_attn_slices){0};
    packed->window.right = causal ? fa_min_int(call->window.right, 0) : call->window.right;
    if (all.count == call->batch) /* each is its sequence's only one */
        return true;
    packed->documents    = call->slices;
    packed->batch        = all.count;
    packed->max_seqlen_q = all.longest_q;
    packed->max_seqlen_k = all.longest_k;
    packed->cu_seqlens_q = packed->cu_seqlens_k = (const int32_t *)call->slices.list; /* there will be some */
    flash_attn_tensor *by_head[] = {&packed->alibi_slopes, &packed->sinks, &packed->dsinks};
    for (int n = 0; n < 3; n++) {
        by_head[n]->shape[0]  = packed->batch;
        by_head[n]->stride[0] = 0;
    }
    return true;
}

size_t fa_documents_bytes(const fa_call *packed) { return packed->documents.count > 0 ? 2 * (size_t)(packed->batch + 1) * sizeof(int32_t) : 0; }

void fa_documents_fill(const fa_call *packed, int32_t *cu_seqlens) { ends_of(packed, &packed->documents, cu_seqlens, cu_seqlens + packed->batch + 1); }

flash_attn_status fa_documents_make(const fa_call *packed, int32_t **cu_seqlens)
{
    *cu_seqlens = malloc(fa_documents_bytes(packed));
    if (!*cu_seqlens)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for the ends of %lld documents", (long long)packed->batch);
    fa_documents_fill(packed, *cu_seqlens);
    return FLASH_ATTN_OK;
}
