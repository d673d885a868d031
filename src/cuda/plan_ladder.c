/* The launches of the ladder's rungs. */
#include "cuda/ladder.h"
#include "cuda/plan.h"

/* K7 and K8: all tiles of Q, K and V are made E4M3 first; K8's rows rotated (FA_VARIANT), of which the main kernel knows nothing. */
static flash_attn_status plan_k7(const fa_call *call, fa_plan *plan, const fa_key *key)
{
    enum { QUANTISE_WARPS = 8 };
    int64_t tiles = plan->args.tiles_q * call->heads_q * call->batch, pieces = tiles + 2 * plan->args.tiles_k * call->heads_k * call->batch;
    fa_key  first = *key, quantise, main = *key;
    first.kernel    = FA_KERNEL_K7_LARGEST;
    first.warps     = QUANTISE_WARPS;
    quantise        = first;
    quantise.kernel = FA_KERNEL_K7_QUANTISE;
    main.dtype      = FA_F8E4M3;
    main.variant    = 0;
    FA_TRY(fa_plan_add(plan, &first, pieces));
    FA_TRY(fa_plan_add(plan, &quantise, pieces));
    plan->main = plan->num_launches;
    return fa_plan_add(plan, &main, tiles);
}

/* Flash decoding: parts of the keys, as many as fill a large GPU. */
static flash_attn_status plan_fd(const fa_call *call, fa_plan *plan, fa_key *key)
{
    enum { FD_BLOCKS = 1024 };
    fa_args *args = &plan->args;
    int64_t  rows = call->max_seqlen_q * call->heads_q * call->batch, tiles = 1; /* of keys, of a part */
    while (tiles < args->tiles_k && ceil_div(args->tiles_k, tiles) * rows > FD_BLOCKS)
        tiles++;
    args->split_keys = (int)(tiles * key->tile_k);
    args->num_splits = (int)largest(ceil_div(args->tiles_k, tiles), 1);
    key->has_split   = 1;
    FA_TRY(fa_plan_add(plan, key, args->num_splits * rows));
    return fa_plan_add_combine(call, plan, key);
}

flash_attn_status fa_plan_ladder(const fa_call *call, fa_plan *plan, fa_key *key)
{
    enum { FA1_BLOCKS = 512 }; /* enough for a large GPU: a head's queries are dealt to several */
    fa_args *args     = &plan->args;
    int64_t  sequences = call->heads_q * call->batch, tiles = args->tiles_q * sequences;
    fa_key   softmax = *key, values = *key;
    switch (key->kernel) {
    case FA_KERNEL_K1_SCORES:
        softmax.kernel = FA_KERNEL_K1_SOFTMAX;
        values.kernel  = FA_KERNEL_K1_VALUES;
        FA_TRY(fa_plan_add(plan, key, args->tiles_k * tiles));
        FA_TRY(fa_plan_add(plan, &softmax, ceil_div(call->max_seqlen_q * sequences, key->warps)));
        return fa_plan_add(plan, &values, call->head_dim / key->tile_k * tiles);
    case FA_KERNEL_FA1:
        while (args->num_splits < args->tiles_q && args->num_splits * sequences < FA1_BLOCKS)
            args->num_splits++;
        return fa_plan_add(plan, key, tiles > 0 ? args->num_splits * sequences : 0);
    case FA_KERNEL_K7:
        return plan_k7(call, plan, key);
    case FA_KERNEL_FD:
        return plan_fd(call, plan, key);
    default:
        return fa_plan_add(plan, key, tiles);
    }
}
