/* Lengths, pages and block masks: host memory whose contents say what may be read. */
#include "check.h"

#include <inttypes.h>

flash_attn_status fa_normalise_pages(const flash_attn_pages *pages, int64_t batch, int64_t page_size,
                                     flash_attn_pages *out)
{
    FA_TRY(fa_check_reserved_int("pages", pages->reserved));
    if (!pages->table)
        return fa_fail(FLASH_ATTN_INVALID,
                       "pages.table is NULL with pages_per_seq %d and row_stride %" PRId64
                       ", expected a table, or 0 for both",
                       pages->pages_per_seq, pages->row_stride);
    if (pages->pages_per_seq < 0 || pages->pages_per_seq * page_size > FA_MAX_SEQLEN)
        return fa_fail(FLASH_ATTN_INVALID,
                       "pages.pages_per_seq is %d, expected 0 or more and, times page_size %" PRId64
                       ", at most %d keys",
                       pages->pages_per_seq, page_size, FA_MAX_SEQLEN);
    if (pages->row_stride != 0 && pages->row_stride < pages->pages_per_seq)
        return fa_fail(FLASH_ATTN_INVALID, "pages.row_stride is %" PRId64 ", expected 0 or at least pages_per_seq %d",
                       pages->row_stride, pages->pages_per_seq);
    *out            = *pages;
    out->row_stride = pages->row_stride ? pages->row_stride : pages->pages_per_seq;
    if (batch > 0 && out->row_stride > ((int64_t)1 << 56) / batch)
        return fa_fail(FLASH_ATTN_INVALID,
                       "pages.row_stride is %" PRId64 ", expected a table of less than 2^56 elements",
                       pages->row_stride);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_check_page_ids(const flash_attn_pages *pages, int64_t num_pages, int64_t page_size, int64_t b,
                                    int64_t begin, int64_t end)
{
    const int32_t *row = pages->table + b * pages->row_stride;
    for (int64_t n = begin / page_size; n * page_size < end; n++)
        if (row[n] < 0 || row[n] >= num_pages)
            return fa_fail(FLASH_ATTN_INVALID,
                           "pages.table[%" PRId64 "][%" PRId64 "] is %d, expected a page from 0 to %" PRId64, b, n,
                           row[n], num_pages - 1);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_cu(const char *name, const char *max_name, const int32_t *cu, int64_t batch,
                                  int64_t total, int32_t max_seqlen)
{
    if (cu[0] != 0)
        return fa_fail(FLASH_ATTN_INVALID, "%s[0] is %d, expected 0", name, cu[0]);
    for (int64_t b = 0; b < batch; b++) {
        if (cu[b + 1] < cu[b])
            return fa_fail(FLASH_ATTN_INVALID, "%s[%" PRId64 "] is %d, expected at least %d, the one before", name,
                           b + 1, cu[b + 1], cu[b]);
        int32_t length = cu[b + 1] - cu[b];
        if (length > FA_MAX_SEQLEN)
            return fa_fail(FLASH_ATTN_INVALID, "%s gives sequence %" PRId64 " length %d, expected at most %d", name, b,
                           length, FA_MAX_SEQLEN);
        if (max_seqlen != 0 && length > max_seqlen)
            return fa_fail(FLASH_ATTN_INVALID, "%s gives sequence %" PRId64 " length %d, expected at most %s %d", name,
                           b, length, max_name, max_seqlen);
    }
    if (cu[batch] != total)
        return fa_fail(FLASH_ATTN_INVALID, "%s[%" PRId64 "] is %d, expected the total, %" PRId64, name, batch,
                       cu[batch], total);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_between(const char *name, int64_t b, int32_t value, int32_t high, const char *what)
{
    if (value >= 0 && value <= high)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_INVALID, "%s[%" PRId64 "] is %d, expected 0 to %d, %s", name, b, value, high, what);
}

flash_attn_status fa_check_lengths(const flash_attn_problem *p, const fa_call *call)
{
    if (p->cu_seqlens_q)
        FA_TRY(
            check_cu("cu_seqlens_q", "max_seqlen_q", p->cu_seqlens_q, call->batch, call->q.shape[1], p->max_seqlen_q));
    if (p->cu_seqlens_k)
        FA_TRY(
            check_cu("cu_seqlens_k", "max_seqlen_k", p->cu_seqlens_k, call->batch, call->k.shape[1], p->max_seqlen_k));
    int64_t count = p->cache_batch_idx || call->pages.table ? call->batch : fa_num_lengths(call);
    for (int64_t b = 0; b < count; b++) {
        fa_sequence s = fa_sequence_at(call, b);
        if (p->cache_batch_idx && (s.kv_entry < 0 || s.kv_entry >= call->k.shape[0]))
            return fa_fail(FLASH_ATTN_INVALID,
                           "cache_batch_idx[%" PRId64 "] is %" PRId64 ", expected an entry of k from 0 to %" PRId64, b,
                           s.kv_entry, call->k.shape[0] - 1);
        FA_TRY(check_between("seqused_q", b, s.seqlen_q, s.rows_q, "the rows of its sequence"));
        FA_TRY(check_between("seqused_k", b, s.seqlen_k, s.rows_k, "the rows of its sequence"));
        FA_TRY(check_between("leftpad_k", b, s.key_begin, s.seqlen_k, "the keys of its sequence"));
        if (p->seqused_k && p->max_seqlen_k != 0 && s.seqlen_k > p->max_seqlen_k)
            return fa_fail(FLASH_ATTN_INVALID, "seqused_k[%" PRId64 "] is %d, expected at most max_seqlen_k %d", b,
                           s.seqlen_k, p->max_seqlen_k);
        if (call->pages.table)
            FA_TRY(fa_check_page_ids(&call->pages, call->k.shape[0], call->page_size, b, 0, s.seqlen_k));
        if (call->bias.data && (s.seqlen_q > call->bias.shape[2] || s.seqlen_k > call->bias.shape[3]))
            return fa_fail(FLASH_ATTN_INVALID,
                           "bias.shape[%d] is %" PRId64 ", expected at least %d, the length of sequence "
                           "%" PRId64,
                           s.seqlen_q > call->bias.shape[2] ? 2 : 3,
                           call->bias.shape[s.seqlen_q > call->bias.shape[2] ? 2 : 3],
                           s.seqlen_q > call->bias.shape[2] ? s.seqlen_q : s.seqlen_k, b);
    }
    return FLASH_ATTN_OK;
}

static flash_attn_status check_slice_range(int32_t n, const char *side, int32_t begin, int32_t end, int64_t rows)
{
    if (begin >= 0 && begin <= end && end <= rows)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_INVALID,
                   "slices.list[%d] has %s_begin %d and %s_end %d, expected 0 <= begin <= end <= %" PRId64, n, side,
                   begin, side, end, rows);
}

flash_attn_status fa_check_slices(const flash_attn_slices *slices, int64_t batch, int64_t rows_q, int64_t rows_k)
{
    FA_TRY(fa_check_reserved_int("slices", slices->reserved));
    if (slices->count < 0)
        return fa_fail(FLASH_ATTN_INVALID, "slices.count is %d, expected 0 or more", slices->count);
    if (slices->count == 0) {
        if (slices->offsets)
            return fa_fail(FLASH_ATTN_INVALID, "slices.offsets is given with slices.count 0, expected NULL: without "
                                               "slices there is no block mask");
        return FLASH_ATTN_OK;
    }
    if (!slices->list)
        return fa_fail(FLASH_ATTN_INVALID, "slices.list is NULL with slices.count %d", slices->count);
    rows_q = rows_q < FA_MAX_SEQLEN ? rows_q : FA_MAX_SEQLEN;
    rows_k = rows_k < FA_MAX_SEQLEN ? rows_k : FA_MAX_SEQLEN;
    for (int32_t n = 0; n < slices->count; n++) {
        const flash_attn_slice *slice = &slices->list[n];
        FA_TRY(check_slice_range(n, "q", slice->q_begin, slice->q_end, rows_q));
        FA_TRY(check_slice_range(n, "k", slice->k_begin, slice->k_end, rows_k));
        if (slice->kind < FLASH_ATTN_SLICE_FULL || slice->kind > FLASH_ATTN_SLICE_BOTH)
            return fa_fail(FLASH_ATTN_INVALID, "slices.list[%d].kind is %d, expected 0 to 3", n, slice->kind);
    }
    if (!slices->offsets)
        return FLASH_ATTN_OK;
    if (slices->offsets[0] != 0 || slices->offsets[batch] != slices->count)
        return fa_fail(FLASH_ATTN_INVALID, "slices.offsets goes from %d to %d, expected from 0 to slices.count %d",
                       slices->offsets[0], slices->offsets[batch], slices->count);
    for (int64_t b = 0; b < batch; b++)
        if (slices->offsets[b + 1] < slices->offsets[b])
            return fa_fail(FLASH_ATTN_INVALID,
                           "slices.offsets[%" PRId64 "] is %d, expected at least %d, the one before", b + 1,
                           slices->offsets[b + 1], slices->offsets[b]);
    return FLASH_ATTN_OK;
}
