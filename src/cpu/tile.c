/* Tiles: where their rows lie, which of their pairs are seen, and the options on their scores. */
#include "cpu/tile.h"

#include <stdlib.h>

/* ---- memory ---- */

/* More would be much to hold for a call that may never come. */
#define MAX_KEPT_BYTES ((size_t)256 << 20)

typedef struct kept_block {
    size_t bytes; /* with this */
} kept_block;

/* The C library gives back large blocks at once, and the system's pages have to be cleared and mapped anew in the next
 * call, which is serial work in part. So one block stays with the context. It is taken out while a call uses it: of two
 * calls at once one allocates. */
flash_attn_status fa_memory_get(fa_memory *memory, const fa_cpu *cpu, const fa_exec *exec, size_t bytes)
{
    void  *given;
    size_t all = bytes + FA_ALIGN_SLACK + sizeof(kept_block);
    *memory    = (fa_memory){0};
    FA_TRY(fa_take_workspace(exec, bytes + FA_ALIGN_SLACK, &given));
    char *base = given;
    if (!base) {
        kept_block *block = atomic_exchange(&cpu->kept->block, NULL);
        if (block && block->bytes < all) {
            free(block);
            block = NULL;
        }
        if (!block) {
            block = malloc(all);
            if (block)
                block->bytes = all;
        }
        memory->owned = block;
        base          = block ? (char *)(block + 1) : NULL;
    }
    if (!base)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for %zu bytes of scratch", all);
    memory->base = base + (64 - (uintptr_t)base % 64) % 64;
    return FLASH_ATTN_OK;
}

void fa_memory_free(fa_memory *memory, const fa_cpu *cpu)
{
    kept_block *block = memory->owned;
    if (block && block->bytes <= MAX_KEPT_BYTES)
        block = atomic_exchange(&cpu->kept->block, block);
    free(block);
}

/* ---- rows ---- */

fa_rows fa_query_rows(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row)
{
    (void)call;
    int n = 0;
    for (int h = 0; h < tile->heads; h++) {
        for (int i = tile->queries.begin; i < tile->queries.end; i++)
            row[n++] = fa_at(t, tile->seq.q_entry, tile->seq.q_row + i, tile->head + h, 0);
    }
    return (fa_rows){row, n, (int)t->shape[3], t->stride[3], t->dtype, 0};
}

fa_rows fa_key_rows(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row)
{
    int64_t step = t->stride[1] * (int64_t)fa_dtype_bytes(t->dtype);
    int     n = 0, j = tile->keys.begin;
    while (j < tile->keys.end) { /* keys of one page, or all, at equal distances */
        const char *at    = fa_kv_at(call, t, &tile->seq, tile->b, j, tile->head_k);
        int64_t     left  = call->pages.table ? call->page_size - j % call->page_size : FA_MAX_TILE;
        int         count = (int)(left < tile->keys.end - j ? left : tile->keys.end - j);
        for (int i = 0; i < count; i++)
            row[n + i] = at + i * step;
        n += count;
        j += count;
    }
    return (fa_rows){row, n, (int)t->shape[3], t->stride[3], t->dtype, 0};
}

fa_rows fa_key_rows_by_steps(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row)
{
    int     keys = fa_tile_keys(tile);
    int64_t step = t->stride[1] * (int64_t)fa_dtype_bytes(t->dtype);
    if (keys == 0 || step == 0 ||
        (call->pages.table && tile->keys.begin / call->page_size != (tile->keys.end - 1) / call->page_size))
        return fa_key_rows(call, t, tile, row);
    row[0] = fa_kv_at(call, t, &tile->seq, tile->b, tile->keys.begin, tile->head_k);
    return (fa_rows){row, keys, (int)t->shape[3], t->stride[3], t->dtype, step};
}

/* ---- what is seen ---- */

/* How one slice meets a rectangle of pairs. */
static fa_visible slice_visible(const flash_attn_slice *s, fa_range queries, fa_range keys)
{
    fa_range q = {fa_max_int(queries.begin, s->q_begin), fa_min_int(queries.end, s->q_end)};
    fa_range k = {fa_max_int(keys.begin, s->k_begin), fa_min_int(keys.end, s->k_end)};
    if (q.begin >= q.end || k.begin >= k.end)
        return FA_VISIBLE_NONE;
    /* The pair that is easiest to see is the last query with the first key for causal, the reverse for inverse. */
    if ((s->kind & 1) && k.begin - s->k_end > q.end - 1 - s->q_end)
        return FA_VISIBLE_NONE;
    if ((s->kind & 2) && k.end - 1 - s->k_begin < q.begin - s->q_begin)
        return FA_VISIBLE_NONE;
    bool inside = q.begin == queries.begin && q.end == queries.end && k.begin == keys.begin && k.end == keys.end;
    if (inside && fa_slice_sees(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, q.begin, k.end - 1) &&
        fa_slice_sees(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, q.end - 1, k.begin))
        return FA_VISIBLE_ALL;
    return FA_VISIBLE_SOME;
}

fa_visible fa_tile_visible(const fa_call *call, const fa_tile *tile)
{
    fa_range seen = fa_keys_seen(call->window, tile->seq.diagonal, tile->queries, tile->keys);
    if (seen.begin >= seen.end || tile->queries.begin >= tile->queries.end)
        return FA_VISIBLE_NONE;
    bool       covers = fa_window_covers(call->window, tile->seq.diagonal, tile->queries, tile->keys);
    fa_visible best   = call->slices.count ? FA_VISIBLE_NONE : FA_VISIBLE_ALL;
    for (int n = 0; n < tile->num_slices && best != FA_VISIBLE_ALL; n++) {
        fa_visible one = slice_visible(&call->slices.list[tile->slices[n]], tile->queries, tile->keys);
        best           = one > best ? one : best;
    }
    return covers || best == FA_VISIBLE_NONE ? best : FA_VISIBLE_SOME;
}

/* A multiple of the register block's rows and of those that `softmax` takes at once. */
enum { ROWS_OF_DIAGONAL = 48 };

int fa_rows_at_once(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                    float scale)
{
    bool plain = !call->dropout.threshold && !fa_has_options(call, scale);
    return visible == FA_VISIBLE_SOME && kernels->panel && tile->heads == 1 && plain ? ROWS_OF_DIAGONAL
                                                                                     : fa_tile_rows(tile);
}

/* The tile's keys from the first to the last that some slice shows to some of these queries. */
static fa_range keys_of_slices(const fa_call *call, const fa_tile *tile, fa_range queries)
{
    fa_range seen = {tile->keys.end, tile->keys.begin};
    for (int n = 0; n < tile->num_slices; n++) {
        const flash_attn_slice *s     = &call->slices.list[tile->slices[n]];
        int                     first = fa_max_int(queries.begin, s->q_begin), last = fa_min_int(queries.end, s->q_end) - 1;
        if (last < first)
            continue;
        fa_range of_first = fa_keys_of_slice(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, first);
        fa_range of_last  = fa_keys_of_slice(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, last);
        int      begin = fa_max_int(of_first.begin, tile->keys.begin), end = fa_min_int(of_last.end, tile->keys.end);
        if (begin < end) { /* neither ever falls from one query to the next */
            seen.begin = fa_min_int(seen.begin, begin);
            seen.end   = fa_max_int(seen.end, end);
        }
    }
    return seen;
}

fa_range fa_keys_shown(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_range queries)
{
    if (!kernels->panel)
        return (fa_range){0, fa_tile_keys(tile)};
    fa_range seen = fa_keys_seen(call->window, tile->seq.diagonal, queries, tile->keys);
    if (call->slices.count) {
        fa_range of_slices = keys_of_slices(call, tile, queries);
        seen.begin         = fa_max_int(seen.begin, of_slices.begin);
        seen.end           = fa_min_int(seen.end, of_slices.end);
    }
    if (seen.begin >= seen.end)
        return (fa_range){0, 0};
    int first = (seen.begin - tile->keys.begin) / kernels->panel * kernels->panel;
    int end   = (int)fa_round_up(seen.end - tile->keys.begin, kernels->panel);
    return (fa_range){first, fa_min_int(end, fa_tile_keys(tile))};
}

fa_visible fa_part_of_tile(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                           int row, int at_once, fa_tile *part)
{
    *part = *tile;
    if (at_once >= fa_tile_rows(tile))
        return visible;
    part->queries.begin += row;
    part->queries.end = fa_min_int(part->queries.begin + at_once, tile->queries.end);
    fa_range shown    = fa_keys_shown(kernels, call, tile, part->queries);
    if (shown.begin >= shown.end)
        return FA_VISIBLE_NONE;
    part->keys = (fa_range){tile->keys.begin + shown.begin, tile->keys.begin + shown.end};
    return fa_tile_visible(call, part);
}

int fa_slices_touching(const fa_call *call, int64_t b, fa_range queries, fa_range keys, int32_t *list)
{
    if (call->slices.count == 0)
        return 0;
    fa_range own   = fa_slices_of(&call->slices, b);
    int      count = 0;
    for (int n = own.begin; n < own.end; n++) {
        if (slice_visible(&call->slices.list[n], queries, keys) != FA_VISIBLE_NONE)
            list[count++] = n;
    }
    return count;
}

/* Keys of the tile that query i sees through one slice: an interval. */
static fa_range slice_keys(const flash_attn_slice *s, int i, fa_range keys)
{
    fa_range seen = fa_keys_of_slice(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, i);
    return (fa_range){fa_max_int(keys.begin, seen.begin), fa_min_int(keys.end, seen.end)};
}

/* ---- masks and options on scores ---- */

static void mask_range(float *row, int begin, int end)
{
    for (int n = begin; n < end; n++)
        row[n] = -INFINITY;
}

uint32_t fa_slices_seen(const fa_call *call, const fa_tile *tile, int i, int first)
{
    uint32_t bits = 0;
    for (int n = 0; n < tile->num_slices; n++) {
        fa_range part = slice_keys(&call->slices.list[tile->slices[n]], i, (fa_range){first, first + 32});
        if (part.begin < part.end)
            bits |= (uint32_t)((UINT64_C(1) << (part.end - first)) - (UINT64_C(1) << (part.begin - first)));
    }
    return bits;
}

static void mask_slices(const fa_call *call, const fa_tile *tile, int i, float *row)
{
    uint8_t seen[FA_MAX_TILE];
    int     keys = fa_tile_keys(tile);
    memset(seen, 0, (size_t)keys);
    for (int n = 0; n < tile->num_slices; n++) {
        fa_range part = slice_keys(&call->slices.list[tile->slices[n]], i, tile->keys);
        if (part.begin < part.end)
            memset(seen + part.begin - tile->keys.begin, 1, (size_t)(part.end - part.begin));
    }
    for (int n = 0; n < keys; n++)
        row[n] = seen[n] ? row[n] : -INFINITY;
}

/* -inf, a true one, where query i does not see; a select and not a sum, so that NaN there does not survive. */
static void mask_row(const fa_call *call, const fa_tile *tile, int i, float *row)
{
    fa_range keys = tile->keys, one = {i, i + 1};
    fa_range seen = fa_keys_seen(call->window, tile->seq.diagonal, one, keys);
    if (seen.begin >= seen.end) {
        mask_range(row, 0, keys.end - keys.begin);
        return;
    }
    mask_range(row, 0, seen.begin - keys.begin);
    mask_range(row, seen.end - keys.begin, keys.end - keys.begin);
    if (call->slices.count)
        mask_slices(call, tile, i, row);
}

float fa_score_scale(const fa_call *call, int64_t b, int64_t head_k)
{
    float scale = call->scale;
    if (call->descale_q.data)
        scale *= *(const float *)fa_at(&call->descale_q, b, head_k, 0, 0);
    if (call->descale_k.data)
        scale *= *(const float *)fa_at(&call->descale_k, b, head_k, 0, 0);
    return scale;
}

bool fa_has_options(const fa_call *call, float scale)
{
    return call->softcap > 0.0f || call->bias.data || call->alibi_slopes.data || !(scale > 0.0f);
}

const fa_block_options *fa_options_of(fa_block_options *options, const fa_call *call, const fa_tile *tile,
                                      fa_visible visible, float scale)
{
    bool slices = call->slices.count && visible != FA_VISIBLE_ALL;
    *options    = (fa_block_options){.call = call, .tile = tile, .scale = scale, .slices = slices};
    return slices || call->dropout.threshold || fa_has_options(call, scale) ? options : NULL;
}

/* Keys further away than floats count exactly. */
static void add_far_alibi(float *row, float slope, int64_t distance, int keys)
{
    for (int n = 0; n < keys; n++)
        row[n] -= slope * (float)llabs(distance - n);
}

static void apply_options_row(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, int64_t head, int i,
                              float scale, float *row)
{
    enum { EXACT = 1 << 23 };
    int            keys     = fa_tile_keys(tile);
    int64_t        distance = (int64_t)i + tile->seq.diagonal - tile->keys.begin;
    fa_score_terms terms    = {.scale = scale, .distance = (int)distance};
    if (call->alibi_slopes.data) {
        terms.slope     = *(const float *)fa_at(&call->alibi_slopes, tile->b, head, 0, 0);
        terms.has_alibi = llabs(distance) < EXACT && keys < EXACT;
        if (!terms.has_alibi) {
            kernels->add_terms(row, keys, &terms);
            add_far_alibi(row, terms.slope, distance, keys);
            terms.scale = 1.0f;
        }
    }
    if (call->bias.data) {
        terms.bias   = fa_at(&call->bias, tile->b, head, i, tile->keys.begin);
        terms.stride = call->bias.stride[3];
        terms.dtype  = call->bias.dtype;
    }
    kernels->add_terms(row, keys, &terms);
}

void fa_apply_options(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                      float scale, float *s, float *slope, int lds)
{
    int  rows = fa_tile_rows(tile), keys = fa_tile_keys(tile), queries = fa_tile_queries(tile);
    bool capped = call->softcap > 0.0f, by_row = capped ? call->bias.data || call->alibi_slopes.data : fa_has_options(call, scale);
    if (capped)
        kernels->softcap(s, slope, lds, rows, keys, scale, call->softcap);
    for (int r = 0; r < rows && (by_row || visible != FA_VISIBLE_ALL); r++) {
        float *row = s + (int64_t)r * lds;
        int    i   = tile->queries.begin + r % queries;
        if (by_row)
            apply_options_row(kernels, call, tile, tile->head + r / queries, i, capped ? 1.0f : scale, row);
        if (visible != FA_VISIBLE_ALL)
            mask_row(call, tile, i, row);
    }
}

void fa_apply_dropout(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, float *p, float *dp, int ld)
{
    int queries = fa_tile_queries(tile);
    for (int h = 0; h < tile->heads; h++) {
        int64_t  at         = (int64_t)h * queries * ld;
        uint32_t batch_head = (uint32_t)(tile->b * call->heads_q + tile->head + h);
        kernels->dropout(p + at, dp ? dp + at : NULL, ld, queries, fa_tile_keys(tile), &call->dropout, batch_head,
                         tile->queries.begin, tile->keys.begin);
    }
}

void fa_add_bad_rows(const fa_kernels *kernels, float *c, int ldc, int rows, const float *a, int64_t step_row,
                     int64_t step_bad, const fa_rows *source, const int *bad, int num_bad, float *temp)
{
    for (int n = 0; n < num_bad; n++) {
        kernels->load(temp, source->row[bad[n]], source->stride, source->dtype, source->cols);
        for (int r = 0; r < rows; r++) {
            float factor = a[r * step_row + bad[n] * step_bad];
            for (int col = 0; col < source->cols && factor != 0.0f; col++)
                c[(int64_t)r * ldc + col] += factor * temp[col];
        }
    }
}
