/* Block masks for Hopper's own kernels: lists of tiles, and room for the masks of those that are cut (kernels/list_tiles.cu). */
#include "cuda/plan.h"

static bool is_backward(const fa_tune_row *row) { return row->kernel == FA_KERNEL_BACKWARD_SM90; }

/* Above 128 columns both consumers have the same keys, queries down (backward_block_sm90.cuh: BY_COLUMNS); elsewhere S is transposed. */
static bool has_keys_down(const fa_tune_row *row) { return is_backward(row) && row->tile_k != 80; }

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

int64_t fa_masks_of(const fa_call *call, const fa_tune_row *row)
{
    int64_t tiles = fa_plan_tiles_of_all(call, call->cu_seqlens_q, call->q.shape[1], row->tile_q, ceil_div(call->max_seqlen_q, row->tile_q));
    int64_t most = tiles * ceil_div(call->max_seqlen_k, row->tile_k), cut = 0;
    for (int n = 0; n < call->slices.count && cut < most; n++)
        cut += cut_by_slice(&call->slices.list[n], call, row) * (call->slices.offsets ? 1 : call->batch);
    if (is_backward(row)) /* a sequence's last tile of queries is cut, if it is not whole */
        cut += call->batch * ceil_div(call->max_seqlen_k, row->tile_k);
    int64_t diagonals = (call->window.left < FA_UNLIMITED) + (call->window.right < FA_UNLIMITED), ends = 2;
    return least(most, cut + tiles * (ends + diagonals * cut_by_diagonal(row)));
}

flash_attn_status fa_plan_add_lists(const fa_call *call, fa_plan *plan, const fa_key *main, int64_t tiles)
{
    fa_key lists            = fa_plan_small_key(FA_KERNEL_LIST_TILES, main->arch);
    lists.tile_q            = main->tile_q;
    lists.tile_k            = main->tile_k;
    lists.mask              = main->mask;
    lists.has_slices        = 1;
    lists.variant           = !is_backward(plan->row) ? 0 : has_keys_down(plan->row) ? 1 : 2;
    plan->args.list_places  = (is_backward(plan->row) ? plan->args.tiles_q : plan->args.tiles_k) + 1;
    plan->args.most_masks   = (int)fa_masks_of(call, plan->row);
    return fa_plan_add(plan, &lists, tiles);
}
