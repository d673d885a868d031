/* The launches of a backward. */
#include "cuda/plan.h"
#include "cuda/tune.h"

#include <limits.h>
#include <math.h>

/* Blocks of the backward that share a key head: enough to fill a large GPU twice when keys and heads alone do not. */
static void choose_group_blocks(const fa_call *call, fa_args *args)
{
    enum { ENOUGH_BLOCKS = 256 };
    int64_t blocks = (int64_t)args->tiles_k * call->heads_k * call->batch;
    if (call->deterministic || blocks == 0)
        return;
    for (int n = 1; n <= call->group; n++)
        if (call->group % n == 0) {
            args->group_blocks = n;
            if (blocks * n >= ENOUGH_BLOCKS)
                break;
        }
}

/* A launch takes the host two microseconds and the GPU about as long to begin: with few blocks, that is what counts. A key
 * head's blocks must fit into a cluster: before Hopper that is one block, then eight. The limits were measured (decision 0046). */
static bool is_small(const fa_call *call, const fa_key *key, const fa_args *args)
{
    enum { SMALL_BLOCKS = 256, SMALL_LENGTH = 128 };
    int64_t blocks = (int64_t)args->tiles_k * call->heads_k * call->batch;
    return blocks > 0 && blocks <= SMALL_BLOCKS && args->tiles_k <= (key->arch >= 90 ? 8 : 1) &&
           call->max_seqlen_q <= SMALL_LENGTH && call->max_seqlen_k <= SMALL_LENGTH && !key->has_kv_accum &&
           !key->has_dbias && !call->dsinks.data;
}

/* Backward for Hopper: without a mask and with few tiles of keys a head's first one stores dQ, else who comes first does. Keys and widths as measured (decision 0078). */
static int dq_order_of(const fa_call *call, const fa_plan *plan, const fa_key *key)
{
    enum { FEW_KEYS = 1024, FEW_ROUNDS = 4 };
    const fa_args *args = &plan->args;
    int64_t        most = key->head_dim > 128 && key->head_dim_v <= 128 ? FEW_KEYS / 2 : FEW_KEYS;
    if (key->head_dim == 64)
        most = 2 * FEW_KEYS;
    else if (key->head_dim == 96 && (int64_t)args->all_tiles_k * call->heads_k >= FEW_ROUNDS * plan->chip.multiprocessors)
        most = 4 * FEW_KEYS;
    bool first_keys = key->mask == FA_MASK_NONE && fa_plan_is_alike(call) && !call->leftpad_k && args->tiles_k > 0 && call->max_seqlen_k <= most;
    return call->deterministic ? FA_DQ_IN_ORDER : first_keys ? FA_DQ_FIRST_KEYS : FA_DQ_FIRST_COMES;
}

/* Key heads, of all sequences if they are not packed, whose queries' Q, dO and float dQ stay in L2 beside each other. */
static int64_t key_heads_in_l2(const fa_call *call, const fa_key *key, const fa_args *args)
{
    enum { BYTES_OF_ELEMENT = 2 + 2 + 4, MOST_COLUMNS = 4096 };
    int64_t l2_bytes = key->mask == FA_MASK_NONE ? 16 << 20 : 32 << 20; /* measured, as MOST_COLUMNS is: decision 0056 */
    int64_t bytes = call->max_seqlen_q * call->group * key->head_dim * BYTES_OF_ELEMENT / args->group_blocks, heads = bytes > 0 ? l2_bytes / bytes : 1;
    int64_t most = args->dq_order == FA_DQ_FIRST_KEYS ? MOST_COLUMNS / key->head_dim : heads, all = args->dealt_heads;
    heads = heads < most ? heads : most;
    return heads < 1 ? 1 : heads < all ? heads : all;
}

/* All tiles of keys go to who is free: where lengths differ, where blocks wait for those of earlier keys, where tiles are all alike, and where others' blocks may hold ours back. */
static bool is_dealt(const fa_call *call, const fa_key *key, const fa_args *args)
{
    return args->dq_order != FA_DQ_FIRST_COMES || key->mask != FA_MASK_CAUSAL || !fa_plan_is_alike(call) || call->shares_gpu;
}

/* Query tiles of a head that see a tile of keys. */
static int64_t steps_of_tile(const fa_call *call, const fa_key *key, int64_t tile)
{
    fa_window w      = call->window;
    int64_t   queries = call->max_seqlen_q, diagonal = call->max_seqlen_k - queries, first = tile * key->tile_k, last = first + key->tile_k - 1, begin = 0, end = queries;
    if (w.right < FA_UNLIMITED && first - diagonal - w.right > 0)
        begin = first - diagonal - w.right;
    if (w.left < FA_UNLIMITED && last - diagonal + w.left + 1 < queries)
        end = last - diagonal + w.left + 1;
    return begin < end ? ceil_div(end, key->tile_q) - begin / key->tile_q : 0;
}

/* What is to be shared out: tiles of keys of all heads, and a head's steps at most and on average. */
typedef struct load {
    double tiles, longest, mean;
} load;

static load load_of(const fa_call *call, const fa_key *key, const fa_args *args)
{
    int64_t tiles = args->tiles_k < args->all_tiles_k ? args->tiles_k : args->all_tiles_k, all = 0, longest = 0;
    double  part  = call->cu_seqlens_q ? (double)fa_plan_rows(&call->q) / ((double)call->batch * (double)call->max_seqlen_q) : 1; /* an average sequence's, of the longest */
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t steps = steps_of_tile(call, key, tile);
        all += steps;
        longest = largest(longest, steps);
    }
    return (load){(double)args->all_tiles_k * (double)call->heads_k, (double)longest, fmin(part, 1) * (double)all / (double)largest(tiles, 1)};
}

/* Microseconds of the main kernel and of adding up, as measured on an H200 (decision 0078); where another GPU is slower in all of these alike, what is chosen by them is the
 * same. Under a mask tiles are dealt the longest first, and blocks end a quarter of a mean one apart. */
static double time_of_shares(const fa_call *call, const fa_plan *plan, const fa_key *key, const load *l, int shares)
{
    static const double FLOPS = 4.5e6, ITEM = 3, ITEM_OF_COLUMN = 0.024, SHARED = 1.5, APART = 0.25, DRIFT = 2.4e-4, BYTES = 2.5e6; /* of a multiprocessor; a tile beside its steps; of memory */
    double products = (double)(3 * key->head_dim + 2 * key->head_dim_v), step = 2.0 * key->tile_q * key->tile_k * products / FLOPS * (double)call->group / shares;
    double item = (ITEM + ITEM_OF_COLUMN * key->head_dim) * (shares > 1 ? SHARED : 1), longest = l->longest * step + item;
    double items = l->tiles * shares, rounds = items / plan->chip.multiprocessors;
    double heads = (double)call->group / shares, drift = 1 + DRIFT * key->head_dim * fmax(heads, 1);
    double time  = l->longest > l->mean ? fmax(longest, (l->mean * step + item) * (rounds + APART) * drift) : ceil(rounds) * longest;
    double stored = shares > 1 ? items * key->tile_k * (key->head_dim + key->head_dim_v) * 4 : 0;
    return time + stored / BYTES;
}

/* Keys that many more queries see than others, as of the first few that all do: a tile of theirs has more than so much of what a multiprocessor has to do (decision 0087). */
static bool has_long_tiles(const fa_call *call, const fa_plan *plan)
{
    enum { BINS = 256 };
    static const double SHARE = 0.42;
    double              seen[BINS] = {0}, all = 0, longest = 0, heads = (double)call->heads_k * (call->slices.offsets ? 1 : (double)call->batch);
    int64_t             bin = largest(ceil_div(call->max_seqlen_k, BINS), plan->row->tile_k);
    for (int n = 0; n < call->slices.count; n++) {
        const flash_attn_slice *slice = &call->slices.list[n];
        int64_t                 first = slice->k_begin / bin, last = ceil_div(slice->k_end, bin); /* tiles are worked on whole */
        double area = slice->kind ? fa_pairs_of_slice(slice) / (double)largest(last - first, 1) : (double)(slice->q_end - slice->q_begin) * (double)bin;
        for (int64_t b = first; b < last && b < BINS; b++) {
            seen[b] += area;
            all += area;
        }
    }
    for (int b = 0; b < BINS; b++)
        longest = fmax(longest, seen[b]);
    return longest * (double)plan->row->tile_k / (double)bin * plan->chip.multiprocessors > SHARE * all * heads;
}

/* Where a group's key heads have too few tiles for all multiprocessors, or too few for their lengths to come out even, its heads are shared out, and then parts of their queries. Sums
 * would have another order: so not in the deterministic mode. */
static void choose_shares(const fa_call *call, const fa_plan *plan, const fa_key *key, fa_args *args)
{
    enum { MANY_ROUNDS = 8, FEWEST_STEPS = 4, MOST_PARTS = 8 };
    static const double WORTH = 0.98; /* of the time */
    args->part_shares = 1;
    if (call->deterministic || (int64_t)args->all_tiles_k * call->heads_k >= MANY_ROUNDS * plan->chip.multiprocessors)
        return;
    load   l    = load_of(call, key, args);
    double best = time_of_shares(call, plan, key, &l, 1);
    for (int heads = 1; heads <= call->group; heads++) {
        int most = call->group % heads != 0 ? 0 : heads < call->group ? 1 : MOST_PARTS;
        for (int parts = 1; parts <= most && (parts == 1 || l.longest >= FEWEST_STEPS * parts); parts *= 2) {
            double time = time_of_shares(call, plan, key, &l, heads * parts);
            if (time >= WORTH * best)
                continue;
            best               = time;
            args->group_blocks = heads * parts;
            args->part_shares  = parts;
        }
    }
}

/* Where the main kernel stores dK or dV: the caller's, or floats of which fa_plan_place says where they are. */
static fa_view stored_view(const flash_attn_tensor *t, const fa_args *args, int heads, int columns)
{
    fa_view view = fa_plan_view(t);
    if (args->group_blocks > 1) {
        view.dtype     = FA_F32;
        view.stride[2] = columns;
        view.stride[1] = (int64_t)columns * heads * args->group_blocks;
        view.stride[0] = view.stride[1] * t->shape[1];
        view.data      = NULL;
    }
    return view;
}

/* Shares store floats, which blocks of backward_convert_sm90 add up: how many blocks. */
static int64_t share_keys(const fa_call *call, const fa_key *key, fa_args *args)
{
    args->dk_stored = stored_view(&call->dk, args, (int)call->heads_k, key->head_dim);
    args->dv_stored = stored_view(&call->dv, args, (int)call->heads_k, key->head_dim_v);
    if (args->group_blocks <= 1)
        return 0;
    args->apart_dk = args->apart_dv = -1;
    return ceil_div(fa_plan_rows(&call->k), FA_SHARED_ROWS) * call->heads_k;
}

/* Causal tiles in pairs alone would end with a round that some blocks have no pair for: the last heads' tiles, one and a half for each of 132
 * multiprocessors, are dealt one by one, the longest first. */
static int64_t heads_of_pairs(const fa_args *args, int64_t heads)
{
    enum { DEALT_TILES = 200 };
    int64_t last = args->tiles_k > 0 ? ceil_div(DEALT_TILES, args->tiles_k) : heads;
    return last < heads ? (heads - last) / 2 * 2 : 0;
}

static flash_attn_status add_dsinks(const fa_call *call, fa_plan *plan, const fa_key *main)
{
    fa_key dsinks = fa_plan_small_key(FA_KERNEL_BACKWARD_DSINKS, main->arch);
    if (main->kernel == FA_KERNEL_BACKWARD_SM90) {
        dsinks.tile_q  = main->tile_q;
        dsinks.variant = 1;
    }
    return call->dsinks.data ? fa_plan_add(plan, &dsinks, call->heads_q) : FLASH_ATTN_OK;
}

static int64_t rows_of_dbias(const fa_key *key, const fa_args *args)
{
    return key->has_dbias ? (int64_t)args->dbias_extent[0] * args->dbias_extent[1] * args->dbias_extent[2] : 0;
}

static void use_tiles_of(fa_key *convert, const fa_key *main)
{
    convert->tile_q  = main->tile_q;
    convert->dtype_o = convert->dtype_dout = 0;
}

static flash_attn_status plan_backward_sm90(const fa_call *call, fa_plan *plan, const fa_key *key)
{
    fa_key   rowsum = fa_plan_helper_key(FA_KERNEL_BACKWARD_ROWSUM, key), convert = fa_plan_helper_key(FA_KERNEL_BACKWARD_CONVERT_SM90, key);
    fa_args *args = &plan->args;
    int64_t  all_q = fa_plan_tiles_of_all(call, call->cu_seqlens_q, fa_plan_rows(&call->q), key->tile_q, args->tiles_q);
    int64_t  all_k = fa_plan_tiles_of_all(call, call->cu_seqlens_k, fa_plan_rows(&call->k), key->tile_k, args->tiles_k);
    int64_t  tiles_q = all_q * call->heads_q;
    if (all_q > INT32_MAX || all_k > INT32_MAX)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "the sequences have over 2^31 - 1 tiles, expected fewer of them in a backward");
    args->all_tiles_q = (int)all_q;
    args->all_tiles_k = (int)all_k;
    args->cap_unit    = call->softcap * LOG2_E;
    fa_plan_set_apart(call, args);
    args->dq_order    = dq_order_of(call, plan, key); /* is_dealt asks for it */
    choose_shares(call, plan, key, args);
    int     shares = args->group_blocks;
    int64_t heads = call->heads_k * shares * (call->cu_seqlens_k ? 1 : call->batch), own = heads, added = share_keys(call, key, args);
    args->share_blocks = (int)added;
    if (is_dealt(call, key, args))
        own = 0;
    else if (key->mask == FA_MASK_CAUSAL)
        own = heads_of_pairs(args, heads);
    args->own_heads   = (int)own;
    args->dealt_tiles = call->cu_seqlens_k ? (int)all_k : args->tiles_k;
    args->dealt_heads = (int)(heads - own);
    bool in_l2        = is_dealt(call, key, args) && !(key->mask == FA_MASK_LISTED && has_long_tiles(call, plan)); /* the long ones of all heads come first */
    args->order_heads = in_l2 ? (int)key_heads_in_l2(call, key, args) : args->dealt_heads;
    if (args->tiles_k == 0)
        args->tiles_k = 1; /* own_place divides by it, also where all sequences are empty */
    rowsum.tile_q  = key->tile_q;
    rowsum.variant = 1;
    rowsum.warps   = key->head_dim_v > 128 ? 16 : 8; /* few blocks of a small call would wait for each row of a warp */
    plan->has_maps = true;
    if (key->mask == FA_MASK_LISTED)
        FA_TRY(fa_plan_add_lists(call, plan, key));
    FA_TRY(fa_plan_add(plan, &rowsum, tiles_q));
    plan->main = plan->num_launches;
    FA_TRY(fa_plan_add(plan, key, all_k * call->heads_k * shares));
    plan->launch[plan->main].stays = true;
    use_tiles_of(&convert, key);
    if (call->dq.data || shares > 1 || key->has_dbias || !call->dout.data)
        FA_TRY(fa_plan_add(plan, &convert, tiles_q + added + ceil_div(rows_of_dbias(key, args), FA_DBIAS_ROWS)));
    return add_dsinks(call, plan, key);
}

/* Shares of a key head's steps, so that a call of few keys takes the least time: rounds of the multiprocessors, and what shares' sums cost. Microseconds, as measured on an H200
 * (decision 0092). The deterministic mode has sums in one order whatever else is in the batch. */
static void choose_shares_of_few_keys(const fa_call *call, const fa_plan *plan, fa_args *args)
{
    enum { MOST_SHARES = 256 };
    static const double STEP_OF_PANEL[] = {3.3, 7.9}, ITEM = 3, SHARED = 4, ADD = 6, BYTES = 2.5e6; /* of memory in a microsecond */
    int64_t steps = call->group * args->tiles_q, heads = call->heads_k * call->batch, most = call->deterministic ? 1 : steps < MOST_SHARES ? steps : MOST_SHARES;
    double  step = STEP_OF_PANEL[plan->row->head_dim > 64], sums = 2.0 * sizeof(float) * 2.0 * (double)(heads * call->max_seqlen_k * plan->row->head_dim) / BYTES, least = INFINITY;
    for (int64_t shares = 1; shares <= most; shares++) {
        double rounds = (double)ceil_div(heads * shares, plan->chip.multiprocessors), longest = (double)ceil_div(steps, shares) * step;
        double time   = shares == 1 ? rounds * (longest + ITEM) : rounds * (longest + SHARED) + ADD + (double)shares * sums;
        if (time < least) {
            least              = time;
            args->group_blocks = (int)shares;
        }
    }
}

/* Few keys for many queries: nobody adds to dQ, and of dK and dV only what shares have is added up. */
static flash_attn_status plan_few_keys(const fa_call *call, fa_plan *plan, const fa_key *key)
{
    fa_args *args    = &plan->args;
    fa_key   convert = fa_plan_helper_key(FA_KERNEL_BACKWARD_CONVERT_SM90, key);
    choose_shares_of_few_keys(call, plan, args);
    FA_TRY(fa_plan_one_tile(call, plan, key, call->heads_k * args->group_blocks));
    args->share_blocks = (int)share_keys(call, key, args);
    use_tiles_of(&convert, key);
    return args->share_blocks > 0 ? fa_plan_add(plan, &convert, args->share_blocks) : FLASH_ATTN_OK;
}

/* Rows of float sums that become the caller's gradients. */
static int64_t rows_to_convert(const fa_call *call, const fa_key *key, const fa_args *args)
{
    int64_t rows = fa_plan_rows(&call->q) * call->heads_q;
    if (key->has_kv_accum)
        rows += fa_plan_rows(&call->k) * call->heads_k;
    return rows + rows_of_dbias(key, args);
}

/* By planes of float16, and behind it the portable kernel, which does it where these do not hold the numbers. */
static flash_attn_status add_f32(const fa_call *call, fa_plan *plan, const fa_key *key)
{
    const fa_tune_row *row;
    fa_key             any = *key;
    int64_t            heads = plan->args.group_blocks * call->heads_k * call->batch;
    FA_TRY(fa_tune_choose(call, key, fa_kernels[FA_KERNEL_BACKWARD_SM80].name, &row));
    fa_plan_use_row(&any, row);
    FA_TRY(fa_plan_add_planes(call, plan, key));
    plan->main = plan->num_launches;
    FA_TRY(fa_plan_add(plan, key, plan->args.tiles_k * heads));
    return fa_plan_add(plan, &any, ceil_div(call->max_seqlen_k, any.tile_k) * heads);
}

flash_attn_status fa_plan_backward(const fa_call *call, fa_plan *plan, fa_key *key)
{
    fa_args *args = &plan->args;
    if (key->kernel == FA_KERNEL_BACKWARD_SM90)
        return plan_backward_sm90(call, plan, key);
    if (key->kernel == FA_KERNEL_BACKWARD_SHORT_SM90)
        return plan->row->only == FA_FOR_FEW_KEYS ? plan_few_keys(call, plan, key) : fa_plan_one_tile(call, plan, key, call->heads_k);
    choose_group_blocks(call, args);
    key->has_kv_accum = args->group_blocks > 1;
    bool planes = key->kernel == FA_KERNEL_BACKWARD_F32_SM90, small = !planes && is_small(call, key, args), lists = fa_plan_takes_lists(call, plan, key) && (!small || key->deterministic);
    if (key->has_slices && key->deterministic && !lists)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "slices cut so many tiles that the deterministic backward would need over 512 MB to remember what is seen of them; expected fewer or larger slices");
    key->one_launch = small && !lists;
    if (lists) {
        key->mask = FA_MASK_LISTED;
        FA_TRY(fa_plan_add_lists(call, plan, key));
    }
    plan->main        = plan->num_launches;
    if (key->one_launch)
        return fa_plan_add_clusters(plan, key, (int64_t)args->tiles_k * call->heads_k * call->batch, args->tiles_k);
    fa_key  rowsum = fa_plan_helper_key(FA_KERNEL_BACKWARD_ROWSUM, key), convert = fa_plan_helper_key(FA_KERNEL_BACKWARD_CONVERT, key);
    int64_t row_tiles = ceil_div(call->max_seqlen_q, rowsum.tile_q);
    FA_TRY(fa_plan_add(plan, &rowsum, row_tiles * call->heads_q * call->batch));
    if (planes)
        FA_TRY(add_f32(call, plan, key));
    else {
        plan->main = plan->num_launches;
        FA_TRY(fa_plan_add(plan, key, (int64_t)args->tiles_k * args->group_blocks * call->heads_k * call->batch));
    }
    FA_TRY(fa_plan_add(plan, &convert, ceil_div(rows_to_convert(call, key, args), convert.tile_q)));
    return add_dsinks(call, plan, key);
}
