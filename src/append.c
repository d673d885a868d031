/* Checks of flash_attn_append_kv. */
#include "check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* What a checked append is about. */
typedef struct sizes {
    int64_t batch, rows_new, capacity; /* rows_new 0: no new keys */
    int64_t rows_q, positions;         /* positions: of the rotary tables, if there are any */
} sizes;

/* What backends count in 32 bits: rows of [batch, rows, heads, head_dim]. */
static flash_attn_status check_rows(const char *name, const int64_t shape[4])
{
    static const char *const words[] = {"batch", "rows", "heads", "head_dim"};
    const int64_t            most[]  = {INT32_MAX, FA_MAX_SEQLEN, INT32_MAX, INT32_MAX};
    for (int i = 0; i < 4; i++) {
        char field[48];
        snprintf(field, sizeof field, "%s.shape[%d] (%s)", name, i, words[i]);
        FA_TRY(fa_check_extent(field, shape[i], 0, most[i]));
    }
    if (shape[0] * shape[2] > INT32_MAX)
        return fa_fail(FLASH_ATTN_INVALID, "%s has batch %" PRId64 " times heads %" PRId64 ", over 2^31 - 1", name, shape[0],
                       shape[2]);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_new_rows(flash_attn_append *a, sizes *size)
{
    if (!a->v_new.data && !fa_view_is_empty(&a->v_new))
        return fa_fail(FLASH_ATTN_INVALID, "v_new.data is NULL, expected new values with k_new");
    FA_TRY(fa_view_dtype("k_new", &a->k_new, FA_BITS_ALL));
    FA_TRY(fa_view_dtype("v_new", &a->v_new, FA_BIT(a->k_new.dtype)));
    FA_TRY(fa_view_dtype("k_cache", &a->k_cache, FA_BIT(a->k_new.dtype)));
    FA_TRY(fa_view_dtype("v_cache", &a->v_cache, FA_BIT(a->k_new.dtype)));
    const int64_t *k = a->k_new.shape, any[4] = {FA_ANY, FA_ANY, FA_ANY, FA_ANY};
    FA_TRY(fa_view_shape("k_new", &a->k_new, any));
    int64_t of_v[4] = {k[0], k[1], k[2], FA_ANY};
    FA_TRY(fa_view_shape("v_new", &a->v_new, of_v));
    bool    own_entries   = !a->pages.table && !a->cache_batch_idx;
    int64_t of_k_cache[4] = {own_entries ? k[0] : FA_ANY, FA_ANY, k[2], k[3]};
    FA_TRY(fa_view_shape("k_cache", &a->k_cache, of_k_cache));
    int64_t of_v_cache[4] = {a->k_cache.shape[0], a->k_cache.shape[1], k[2], a->v_new.shape[3]};
    FA_TRY(fa_view_shape("v_cache", &a->v_cache, of_v_cache));
    FA_TRY(check_rows("k_new", k));
    FA_TRY(fa_check_extent("v_new.shape[3] (head_dim_v)", a->v_new.shape[3], 0, INT32_MAX));
    FA_TRY(fa_check_extent("k_cache.shape[0] (entries)", a->k_cache.shape[0], 0, INT32_MAX));
    size->batch    = k[0];
    size->rows_new = k[1];
    FA_TRY(fa_view_layout("k_new", &a->k_new, false));
    FA_TRY(fa_view_layout("v_new", &a->v_new, false));
    FA_TRY(fa_view_output_layout("k_cache", &a->k_cache, false));
    return fa_view_output_layout("v_cache", &a->v_cache, false);
}

static flash_attn_status check_room(flash_attn_append *a, sizes *size)
{
    size->capacity = a->k_cache.shape[1];
    if (a->pages.table || a->pages.pages_per_seq != 0 || a->pages.row_stride != 0 || a->pages.reserved != 0) {
        if (a->cache_batch_idx)
            return fa_fail(FLASH_ATTN_INVALID, "cache_batch_idx is given with pages, expected one of them");
        int64_t page_size = a->k_cache.shape[1];
        FA_TRY(fa_check_extent("k_cache.shape[1] (page_size)", page_size, 1, FA_MAX_SEQLEN));
        FA_TRY(fa_normalise_pages(&a->pages, size->batch, page_size, &a->pages));
        size->capacity = a->pages.pages_per_seq * page_size;
    }
    if (size->capacity > FA_MAX_SEQLEN)
        return fa_fail(FLASH_ATTN_INVALID, "k_cache.shape[1] (capacity) is %" PRId64 ", expected at most %d",
                       size->capacity, FA_MAX_SEQLEN);
    return FLASH_ATTN_OK;
}

static flash_attn_status check_queries(flash_attn_append *a, bool with_keys, sizes *size)
{
    const int64_t *q = a->q.shape;
    FA_TRY(fa_view_dtype("q", &a->q, with_keys ? FA_BIT(a->k_new.dtype) : FA_BITS_ALL));
    FA_TRY(fa_view_dtype("q_out", &a->q_out, FA_BIT(a->q.dtype)));
    int64_t of_q[4] = {with_keys ? size->batch : FA_ANY, FA_ANY, FA_ANY, with_keys ? a->k_new.shape[3] : FA_ANY};
    FA_TRY(fa_view_shape("q", &a->q, of_q));
    FA_TRY(fa_view_implied_shape("q_out", &a->q_out, q));
    FA_TRY(check_rows("q", q));
    size->batch  = q[0];
    size->rows_q = q[1];
    FA_TRY(fa_view_layout("q", &a->q, false));
    return fa_view_output_layout("q_out", &a->q_out, false);
}

static flash_attn_status check_rotary(flash_attn_append *a, bool with_keys, sizes *size)
{
    FA_TRY(FA_CHECK_RESERVED("rotary.reserved", a->rotary.reserved));
    flash_attn_tensor *cosines = &a->rotary.cos, *sines = &a->rotary.sin;
    if (!cosines->data && !sines->data)
        return FLASH_ATTN_OK;
    if (!cosines->data || !sines->data)
        return fa_fail(FLASH_ATTN_INVALID, "rotary.%s.data is NULL, expected both cos and sin or neither",
                       cosines->data ? "sin" : "cos");
    const flash_attn_tensor *rotated = with_keys ? &a->k_new : &a->q;
    if (rotated->dtype == FLASH_ATTN_F8E4M3)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "%s.dtype is F8E4M3 with rotary, expected F32, F16 or BF16",
                       with_keys ? "k_new" : "q");
    unsigned allowed  = FA_BIT(FLASH_ATTN_F32) | FA_BIT(rotated->dtype);
    int64_t  table[4] = {FA_ANY, FA_ANY, 1, 1};
    FA_TRY(fa_view_dtype("rotary.cos", cosines, allowed));
    FA_TRY(fa_view_dtype("rotary.sin", sines, allowed));
    FA_TRY(fa_view_shape("rotary.cos", cosines, table));
    FA_TRY(fa_view_shape("rotary.sin", sines, cosines->shape));
    FA_TRY(fa_check_extent("rotary.cos.shape[0] (positions)", cosines->shape[0], 0, INT32_MAX));
    if (cosines->shape[1] < 1 || cosines->shape[1] > rotated->shape[3] / 2)
        return fa_fail(FLASH_ATTN_INVALID,
                       "rotary.cos.shape[1] is %" PRId64 ", expected 1 to %" PRId64 ", half of head_dim",
                       cosines->shape[1], rotated->shape[3] / 2);
    FA_TRY(fa_view_layout("rotary.cos", cosines, false));
    FA_TRY(fa_view_layout("rotary.sin", sines, false));
    size->positions = cosines->shape[0];
    return FLASH_ATTN_OK;
}

/* ---- host lengths ---- */

static flash_attn_status check_sequence(const flash_attn_append *a, const sizes *size, int64_t b)
{
    int64_t held = a->cache_seqlens ? a->cache_seqlens[b] : 0, leftpad = a->leftpad_k ? a->leftpad_k[b] : 0;
    if (held < 0 || held > FA_MAX_SEQLEN)
        return fa_fail(FLASH_ATTN_INVALID, "cache_seqlens[%" PRId64 "] is %" PRId64 ", expected 0 to %d", b, held,
                       FA_MAX_SEQLEN);
    if (leftpad < 0 || leftpad > held)
        return fa_fail(FLASH_ATTN_INVALID,
                       "leftpad_k[%" PRId64 "] is %" PRId64 ", expected 0 to cache_seqlens, %" PRId64, b, leftpad,
                       held);
    if (a->k_new.data && held + size->rows_new > size->capacity)
        return fa_fail(FLASH_ATTN_INVALID,
                       "cache_seqlens[%" PRId64 "] is %" PRId64 ", expected at most %" PRId64 ": %" PRId64
                       " new rows do not fit the capacity %" PRId64,
                       b, held, size->capacity - size->rows_new, size->rows_new, size->capacity);
    int64_t rows_q = a->q_at_end && size->rows_q > 0 ? 1 : size->rows_q;
    int64_t steps  = rows_q > size->rows_new ? rows_q : size->rows_new;
    if (a->rotary.cos.data && steps > 0 && held - leftpad + steps > size->positions)
        return fa_fail(FLASH_ATTN_INVALID,
                       "rotary.cos.shape[0] is %" PRId64 ", expected at least %" PRId64
                       ", the positions that sequence %" PRId64 " reaches",
                       size->positions, held - leftpad + steps, b);
    if (!a->k_new.data)
        return FLASH_ATTN_OK;
    if (a->cache_batch_idx && (a->cache_batch_idx[b] < 0 || a->cache_batch_idx[b] >= a->k_cache.shape[0]))
        return fa_fail(FLASH_ATTN_INVALID,
                       "cache_batch_idx[%" PRId64 "] is %d, expected an entry of k_cache from 0 to %" PRId64, b,
                       a->cache_batch_idx[b], a->k_cache.shape[0] - 1);
    if (a->pages.table && size->rows_new > 0)
        return fa_check_page_ids(&a->pages, a->k_cache.shape[0], a->k_cache.shape[1], b, held, held + size->rows_new);
    return FLASH_ATTN_OK;
}

/* Rows [begin, end) of a page or batch entry, which sequence b writes. */
typedef struct target {
    int64_t entry, begin, end, b;
} target;

static int by_entry_and_row(const void *x, const void *y)
{
    const target *a = x, *b = y;
    if (a->entry != b->entry)
        return a->entry < b->entry ? -1 : 1;
    return (a->begin > b->begin) - (a->begin < b->begin);
}

static int64_t list_targets(const flash_attn_append *a, const sizes *size, target *targets)
{
    int64_t count = 0, page_size = a->k_cache.shape[1];
    for (int64_t b = 0; b < size->batch; b++) {
        if (!a->pages.table) {
            targets[count++] = (target){a->cache_batch_idx[b], 0, page_size, b};
            continue;
        }
        int64_t begin = a->cache_seqlens ? a->cache_seqlens[b] : 0, end = begin + size->rows_new;
        for (int64_t n = begin / page_size; n * page_size < end; n++) {
            int64_t first    = n * page_size > begin ? 0 : begin - n * page_size;
            int64_t last     = (n + 1) * page_size < end ? page_size : end - n * page_size;
            targets[count++] = (target){a->pages.table[b * a->pages.row_stride + n], first, last, b};
        }
    }
    return count;
}

/* No two sequences, and no two pages of one, write the same row. */
static flash_attn_status check_targets(const flash_attn_append *a, const sizes *size)
{
    if (size->batch == 0 || (!a->pages.table && !a->cache_batch_idx) || (a->pages.table && size->rows_new == 0))
        return FLASH_ATTN_OK;
    int64_t per_sequence = a->pages.table ? (size->rows_new - 1) / a->k_cache.shape[1] + 2 : 1;
    target *targets      = calloc((size_t)size->batch, (size_t)per_sequence * sizeof *targets);
    if (!targets)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory to list what %" PRId64 " sequences append", size->batch);
    flash_attn_status status = FLASH_ATTN_OK;
    int64_t           count  = list_targets(a, size, targets);
    qsort(targets, (size_t)count, sizeof *targets, by_entry_and_row);
    for (int64_t n = 1; n < count && status == FLASH_ATTN_OK; n++)
        if (targets[n].entry == targets[n - 1].entry && targets[n].begin < targets[n - 1].end)
            status = fa_fail(
                FLASH_ATTN_INVALID,
                "%s gives %" PRId64 " to sequences %" PRId64 " and %" PRId64 ", which would write the same rows",
                a->pages.table ? "pages.table" : "cache_batch_idx", targets[n].entry, targets[n - 1].b, targets[n].b);
    free(targets);
    return status;
}

static flash_attn_status check_memory(const flash_attn_append *a, const sizes *size, bool with_keys, bool with_queries)
{
    flash_attn_tensor none      = {0};
    bool              itself    = with_queries && fa_same_view(&a->q, &a->q_out);
    fa_region         regions[] = {
                {"k_cache", with_keys ? a->k_cache : none, true},
                {"v_cache", with_keys ? a->v_cache : none, true},
                {"q_out", with_queries ? a->q_out : none, true},
                {"k_new", with_keys ? a->k_new : none, false},
                {"v_new", with_keys ? a->v_new : none, false},
                {"q", with_queries && !itself ? a->q : none, false},
                {"rotary.cos", a->rotary.cos.data ? a->rotary.cos : none, false},
                {"rotary.sin", a->rotary.cos.data ? a->rotary.sin : none, false},
                {"cache_seqlens", fa_array_view(a->cache_seqlens, size->batch, FLASH_ATTN_F32), false},
                {"cache_batch_idx", fa_array_view(with_keys ? a->cache_batch_idx : NULL, size->batch, FLASH_ATTN_F32), false},
                {"leftpad_k", fa_array_view(a->leftpad_k, size->batch, FLASH_ATTN_F32), false},
                {"pages.table", with_keys ? fa_table_view(&a->pages, size->batch) : none, false}, /* else not looked at */
    };
    _Static_assert(sizeof regions / sizeof *regions <= FA_MAX_REGIONS, "fa_check_overlap takes no more");
    return fa_check_overlap(regions, (int)(sizeof regions / sizeof *regions));
}

/* Arrays of int32. */
static flash_attn_status check_array_alignment(const flash_attn_append *a)
{
    const fa_array arrays[] = {{"cache_seqlens", a->cache_seqlens}, {"cache_batch_idx", a->cache_batch_idx}, {"leftpad_k", a->leftpad_k}, {"pages.table", a->pages.table}};
    return fa_check_alignment(arrays, sizeof arrays / sizeof *arrays);
}

flash_attn_status fa_normalise_append(const flash_attn_append *append, flash_attn_append *out)
{
    if (!append)
        return fa_fail(FLASH_ATTN_INVALID, "append is NULL, expected what to append");
    FA_TRY(FA_CHECK_RESERVED("append.reserved", append->reserved));
    FA_TRY(fa_check_device(append->device));
    FA_TRY(check_array_alignment(append));
    *out           = *append;
    bool with_keys = append->k_new.data != NULL, with_queries = append->q.data != NULL;
    if (!with_keys && append->v_new.data)
        return fa_fail(FLASH_ATTN_INVALID, "k_new.data is NULL, expected new keys with v_new");
    if (!with_queries && append->q_out.data)
        return fa_fail(FLASH_ATTN_INVALID, "q.data is NULL, expected queries with q_out");
    if (!with_keys && !with_queries)
        return fa_fail(FLASH_ATTN_INVALID,
                       "k_new.data and q.data are NULL, expected one of them: there is nothing to do");
    sizes size = {0};
    if (with_keys) {
        FA_TRY(check_new_rows(out, &size));
        FA_TRY(check_room(out, &size));
    }
    if (with_queries)
        FA_TRY(check_queries(out, with_keys, &size));
    FA_TRY(check_rotary(out, with_keys, &size));
    FA_TRY(check_memory(out, &size, with_keys, with_queries));
    if (!fa_on_host(append->device))
        return FLASH_ATTN_OK;
    for (int64_t b = 0; b < size.batch; b++)
        FA_TRY(check_sequence(out, &size, b));
    return with_keys ? check_targets(out, &size) : FLASH_ATTN_OK;
}
