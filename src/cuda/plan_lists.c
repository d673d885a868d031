/* Block masks by lists of tiles, and room for the masks of those that are cut (kernels/list_tiles.cu). */
#include "cuda/plan.h"

enum { ENDS = 2 }; /* places of a list beside those of its tiles */

/* Of Hopper's above 128 columns both consumers have the same keys, queries down (backward_block_sm90.cuh: BY_COLUMNS); elsewhere S is transposed. */
static bool has_keys_down(const fa_tune_row *row) { return fa_is_backward(row->kernel) && !(row->kernel == FA_KERNEL_BACKWARD_SM90 && row->tile_k < 128); }

int64_t fa_mask_bytes(const fa_tune_row *row)
{
    enum { WORDS_OF_ROW = 4 };
    return (int64_t)(has_keys_down(row) ? row->tile_k : row->tile_q) * WORDS_OF_ROW * (int64_t)sizeof(unsigned);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Tiles of keys that a diagonal passes through, of a tile of queries. */
static int64_t cut_by_diagonal(const fa_tune_row *row) { return ceil_div(row->tile_q, row->tile_k) + 1; }

/*
 * The most that a slice cuts, in a sequence that is as long as any may be. A tile that nothing cuts is one that a slice holds wholly; so each that is cut has a side of a slice that it meets, one of its
 * diagonals, or queries of which the slice has some.
 */
static int64_t cut_by_slice(const flash_attn_slice *slice, const fa_call *call, const fa_tune_row *row)
{
    int64_t q_begin = slice->q_begin, q_end = least(slice->q_end, call->max_seqlen_q), k_begin = slice->k_begin, k_end = least(slice->k_end, call->max_seqlen_k);
    if (q_begin >= q_end || k_begin >= k_end)
        return 0;
    int64_t met = (k_end - 1) / row->tile_k - k_begin / row->tile_k + 1; /* of a tile of queries */
    int64_t all = (q_end - 1) / row->tile_q - q_begin / row->tile_q + 1, ends = (q_begin % row->tile_q != 0) + (q_end % row->tile_q != 0);
    int64_t diagonals = (slice->kind & 1) + (slice->kind >> 1 & 1), sides = (k_begin % row->tile_k != 0) + (k_end % row->tile_k != 0);
    return least(ends, all) * met + largest(all - ends, 0) * least(met, sides + diagonals * cut_by_diagonal(row));
}

static int64_t tiles_of_queries(const fa_call *call, const fa_tune_row *row)
{
    return fa_plan_tiles_of_all(call, call->cu_seqlens_q, fa_plan_rows(&call->q), row->tile_q, ceil_div(call->max_seqlen_q, row->tile_q));
}

static int64_t tiles_of_keys(const fa_call *call, const fa_tune_row *row)
{
    return fa_plan_tiles_of_all(call, call->cu_seqlens_k, fa_plan_rows(&call->k), row->tile_k, ceil_div(call->max_seqlen_k, row->tile_k));
}

int64_t fa_masks_of(const fa_call *call, const fa_tune_row *row)
{
    int64_t tiles = tiles_of_queries(call, row);
    int64_t most = tiles * ceil_div(call->max_seqlen_k, row->tile_k), cut = 0;
    for (int n = 0; n < call->slices.count && cut < most; n++)
        cut += cut_by_slice(&call->slices.list[n], call, row) * (call->slices.offsets ? 1 : call->batch);
    if (fa_is_backward(row->kernel)) /* a sequence's last tile of queries is cut, if it is not whole */
        cut += call->batch * ceil_div(call->max_seqlen_k, row->tile_k);
    int64_t diagonals = (call->window.left < FA_UNLIMITED) + (call->window.right < FA_UNLIMITED), ends = 2;
    return least(most, cut + tiles * (ends + diagonals * cut_by_diagonal(row)));
}

/* Places of all lists; of a backward in a fixed order as many turns are about as much. */
static int64_t places_of_lists(const fa_call *call, const fa_tune_row *row)
{
    if (fa_is_backward(row->kernel))
        return tiles_of_keys(call, row) * (ceil_div(call->max_seqlen_q, row->tile_q) + ENDS);
    return tiles_of_queries(call, row) * (ceil_div(call->max_seqlen_k, row->tile_k) + ENDS);
}

double fa_pairs_of_slice(const flash_attn_slice *slice)
{
    double q = slice->q_end - slice->q_begin, k = slice->k_end - slice->k_begin;
    if (slice->kind == FLASH_ATTN_SLICE_FULL)
        return q * k;
    if (slice->kind == FLASH_ATTN_SLICE_BOTH)
        return k >= q ? q * (k - q + 1) : 0;
    return q <= k ? q * (k - (q - 1) / 2) : k * (k + 1) / 2;
}

bool fa_cuts_many(const fa_call *call, const fa_tune_row *row)
{
    enum { OF = 4 };
    double seen = 0; /* pairs */
    for (int n = 0; n < call->slices.count; n++)
        seen += fa_pairs_of_slice(&call->slices.list[n]) * (call->slices.offsets ? 1.0 : (double)call->batch);
    return OF * (double)fa_masks_of(call, row) * row->tile_q * row->tile_k > seen;
}

bool fa_lists_fit(const fa_call *call, const fa_tune_row *row)
{
    enum { MOST_BYTES = 512 << 20 };
    return fa_masks_of(call, row) <= MOST_BYTES / fa_mask_bytes(row) && places_of_lists(call, row) <= MOST_BYTES / (int64_t)sizeof(fa_listed);
}

bool fa_plan_takes_lists(const fa_call *call, const fa_plan *plan, const fa_key *key)
{
    enum { FEW_QUERIES = 64 };
    return key->has_slices && !key->has_split && (fa_is_backward(plan->row->kernel) || call->max_seqlen_q > FEW_QUERIES) && fa_lists_fit(call, plan->row);
}

flash_attn_status fa_plan_add_lists(const fa_call *call, fa_plan *plan, const fa_key *main)
{
    const fa_tune_row *row      = plan->row;
    fa_args           *args     = &plan->args;
    bool               backward = fa_is_backward(row->kernel);
    fa_key             lists    = fa_plan_small_key(FA_KERNEL_LIST_TILES, main->arch);
    int64_t            queries = tiles_of_queries(call, row), keys = tiles_of_keys(call, row);
    lists.tile_q        = row->tile_q;
    lists.tile_k        = row->tile_k;
    lists.mask          = FA_MASK_LISTED;
    lists.has_slices    = 1;
    lists.has_paged     = main->has_paged; /* or a page's rows would be all keys */
    lists.variant       = !backward ? 0 : has_keys_down(row) ? 1 : 2;
    lists.deterministic = backward && call->deterministic;
    args->all_tiles_q   = (int)queries;
    args->all_tiles_k   = (int)keys;
    args->list_places   = (backward ? args->tiles_q : args->tiles_k) + ENDS;
    args->most_masks    = (int)fa_masks_of(call, row);
    return fa_plan_add(plan, &lists, backward ? keys + lists.deterministic * queries : queries);
}
