/* From a call to launches: kernels, constants, arguments, workspace. Touches no device. */
#include "cuda/ladder.h"
#include "cuda/plan.h"

#include <limits.h>

/* What the partial results' kernel etc. run with: enough warps to hide memory's latency, one row of work a warp. */
enum { SMALL_WARPS = 4, ROWSUM_TILE_Q = 64, CONVERT_TILE_Q = 32, DSINKS_WARPS = 32, UPLOAD_WARPS = 8 };

fa_view fa_plan_view(const flash_attn_tensor *t)
{
    fa_view view = {.data = t->data, .dtype = (int)t->dtype};
    for (int i = 0; i < 4; i++)
        view.stride[i] = t->stride[i];
    return view;
}

/* Every row starts 16-byte aligned, lies in one piece and is a whole number of 16-byte pieces. Absent: true. */
static bool is_aligned(const flash_attn_tensor *t)
{
    if (!t->data)
        return true;
    int64_t bytes = (int64_t)fa_dtype_bytes(t->dtype);
    if ((uintptr_t)t->data % 16 != 0 || t->shape[3] * bytes % 16 != 0 || (t->stride[3] != 1 && t->shape[3] != 1))
        return false;
    for (int i = 0; i < 3; i++)
        if (t->shape[i] > 1 && t->stride[i] * bytes % 16 != 0)
            return false;
    return true;
}

static int mask_kind(fa_window window)
{
    if (window.left < FA_UNLIMITED)
        return FA_MASK_WINDOW;
    return window.right < FA_UNLIMITED ? FA_MASK_CAUSAL : FA_MASK_NONE;
}

/* What the call asks for; the tiles come from a tune row. */
static fa_key wanted_key(const fa_call *call, int arch)
{
    bool   backward = call->pass == FLASH_ATTN_BACKWARD;
    int    unit     = call->head_dim > 256 || call->head_dim_v > 256 ? 64 : 32; /* there up to four warps share blocks of 16 columns (forward_block.cuh) */
    fa_key key;
    memset(&key, 0, sizeof key);
    key.arch        = arch;
    key.dtype       = (int)call->q.dtype;
    key.dtype_o     = (int)call->o.dtype;
    key.dtype_dout  = backward ? (int)call->dout.dtype : 0;
    key.dtype_bias  = call->bias.data ? (int)call->bias.dtype : 0;
    key.head_dim    = (int)ceil_div(call->head_dim, unit) * unit;
    key.head_dim_v  = (int)ceil_div(call->head_dim_v, unit) * unit;
    key.even_d      = key.head_dim == call->head_dim && key.head_dim_v == call->head_dim_v;
    key.aligned     = is_aligned(&call->q) && is_aligned(&call->k) && is_aligned(&call->v) && is_aligned(&call->o) &&
                  (!backward || (is_aligned(&call->dout) && is_aligned(&call->dq) && is_aligned(&call->dk) &&
                                 is_aligned(&call->dv)));
    key.mask        = mask_kind(call->window);
    key.has_slices  = call->slices.count > 0;
    key.has_softcap = call->softcap > 0;
    key.has_bias    = call->bias.data != NULL;
    key.has_alibi   = call->alibi_slopes.data != NULL;
    key.has_dropout = call->dropout.threshold != 0;
    key.has_paged   = call->pages.table != NULL;
    key.of_length   = call->of_length;
    key.has_dbias   = backward && call->dbias.data != NULL;
    key.deterministic = backward && call->deterministic;
    return key;
}

void fa_plan_use_row(fa_key *key, const fa_tune_row *row)
{
    key->kernel     = (int)row->kernel;
    key->tile_q     = row->tile_q;
    key->tile_k     = row->tile_k;
    key->warps      = row->warps;
    key->stages     = row->stages;
    key->min_blocks = row->min_blocks;
    key->variant    = row->variant;
    fa_tune_columns(row, key);
    if (key->has_slices && fa_is_hoppers_own(row->kernel))
        key->mask = FA_MASK_LISTED;
    if (row->kernel == FA_KERNEL_BACKWARD_SM90 || row->kernel == FA_KERNEL_BACKWARD_SHORT_SM90)
        key->deterministic = 0; /* a branch outside its main loop; always so */
}

fa_key fa_plan_small_key(enum fa_kernel_id kernel, int arch)
{
    fa_key key;
    memset(&key, 0, sizeof key);
    key.kernel     = (int)kernel;
    key.arch       = arch;
    key.warps      = kernel == FA_KERNEL_UPLOAD ? UPLOAD_WARPS : kernel == FA_KERNEL_BACKWARD_DSINKS ? DSINKS_WARPS : SMALL_WARPS;
    key.min_blocks = 1;
    return key;
}

int fa_plan_threads(const fa_key *key) { return 32 * key->warps; }

fa_key fa_plan_helper_key(enum fa_kernel_id kernel, const fa_key *main)
{
    fa_key key     = fa_plan_small_key(kernel, main->arch);
    key.dtype      = main->dtype;
    key.dtype_o    = main->dtype_o;
    key.dtype_dout = main->dtype_dout;
    key.head_dim   = main->head_dim;
    key.head_dim_v = main->head_dim_v;
    key.even_d     = main->even_d;
    key.aligned    = main->aligned;
    if (kernel == FA_KERNEL_COMBINE || kernel == FA_KERNEL_FOLD)
        key.of_length = main->of_length;
    if (kernel == FA_KERNEL_BACKWARD_ROWSUM)
        key.tile_q = ROWSUM_TILE_Q;
    if (kernel == FA_KERNEL_BACKWARD_CONVERT) {
        key.tile_q       = CONVERT_TILE_Q;
        key.has_kv_accum = main->has_kv_accum;
    }
    if (kernel == FA_KERNEL_BACKWARD_CONVERT || kernel == FA_KERNEL_BACKWARD_CONVERT_SM90)
        key.has_dbias = main->has_dbias;
    if (kernel == FA_KERNEL_BACKWARD_CONVERT_SM90 && key.has_dbias)
        key.mask = main->mask; /* what it hides has no dbias */
    return key;
}

/* ---- arguments ---- */

static void fill_tensors(const fa_call *call, fa_args *args)
{
    args->q            = fa_plan_view(&call->q);
    args->k            = fa_plan_view(&call->k);
    args->v            = fa_plan_view(&call->v);
    args->o            = fa_plan_view(&call->o);
    args->lse          = fa_plan_view(&call->lse);
    args->bias         = fa_plan_view(&call->bias);
    args->alibi_slopes = fa_plan_view(&call->alibi_slopes);
    args->sinks        = fa_plan_view(&call->sinks);
    args->descale_q    = fa_plan_view(&call->descale_q);
    args->descale_k    = fa_plan_view(&call->descale_k);
    args->descale_v    = fa_plan_view(&call->descale_v);
    args->cu_seqlens_q    = call->cu_seqlens_q;
    args->cu_seqlens_k    = call->cu_seqlens_k;
    args->seqused_q       = call->seqused_q;
    args->seqused_k       = call->seqused_k;
    args->leftpad_k       = call->leftpad_k;
    args->cache_batch_idx = call->cache_batch_idx;
    args->page_table      = call->pages.table;
    args->page_row_stride = call->pages.row_stride;
    if (call->pass == FLASH_ATTN_BACKWARD) {
        args->dout      = fa_plan_view(&call->dout);
        args->dq        = fa_plan_view(&call->dq);
        args->dk        = fa_plan_view(&call->dk);
        args->dv        = fa_plan_view(&call->dv);
        args->dbias_out = fa_plan_view(&call->dbias);
        args->dsinks    = fa_plan_view(&call->dsinks);
    }
}

static void fill_sizes(const fa_call *call, const fa_tune_row *row, fa_args *args)
{
    args->batch         = (int)call->batch;
    args->heads_q       = (int)call->heads_q;
    args->heads_k       = (int)call->heads_k;
    args->group         = (int)call->group;
    args->head_dim      = (int)call->head_dim;
    args->head_dim_v    = (int)call->head_dim_v;
    args->q_entries     = (int)call->q.shape[0];
    args->q_rows        = (int)call->q.shape[1];
    args->kv_entries    = (int)call->k.shape[0];
    args->kv_rows       = (int)call->k.shape[1];
    args->all_rows_q    = (int)fa_plan_rows(&call->q);
    args->all_rows_k    = (int)fa_plan_rows(&call->k);
    args->pages_per_seq = call->pages.pages_per_seq;
    args->num_slices    = call->slices.count;
    args->max_seqlen_q  = (int)call->max_seqlen_q;
    args->max_seqlen_k  = (int)call->max_seqlen_k;
    args->tiles_q       = (int)ceil_div(call->max_seqlen_q, row->tile_q);
    args->tiles_k       = (int)ceil_div(call->max_seqlen_k, row->tile_k);
    args->num_splits    = 1;
    args->run_parts     = 1;
    args->split_keys    = args->tiles_k * row->tile_k;
    args->group_blocks  = 1;
    args->scale         = call->scale;
    args->scale_log2    = call->scale * LOG2_E;
    args->softcap       = call->softcap;
    args->cap_slope     = call->softcap > 0 ? -2 * args->scale_log2 / call->softcap : 0;
    args->window        = call->window;
    args->dropout       = call->dropout;
    args->few_queries   = (int)call->few_queries;
    for (int i = 0; i < 4; i++) /* what broadcasts is summed, hence stored once */
        args->dbias_extent[i] = call->dbias.data && call->dbias.stride[i] != 0 ? (int)call->dbias.shape[i] : 1;
}

/* ---- launches ---- */

flash_attn_status fa_plan_add_clusters(fa_plan *plan, const fa_key *key, int64_t blocks, int cluster)
{
    if (blocks > INT_MAX)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "%s would need %lld blocks; CUDA allows %d in a launch",
                       fa_kernels[key->kernel].name, (long long)blocks, INT_MAX);
    plan->launch[plan->num_launches++] = (fa_launch){.key = *key, .blocks = blocks, .cluster = cluster};
    return FLASH_ATTN_OK;
}

flash_attn_status fa_plan_add(fa_plan *plan, const fa_key *key, int64_t blocks)
{
    return fa_plan_add_clusters(plan, key, blocks, 1);
}

bool fa_plan_is_alike(const fa_call *call) { return !call->cu_seqlens_q && !call->cu_seqlens_k && !call->seqused_q && !call->seqused_k; }

int64_t fa_plan_tiles_of_all(const fa_call *call, const int32_t *cu_seqlens, int64_t rows, int tile, int64_t tiles)
{
    return cu_seqlens ? rows / tile + call->batch : tiles * call->batch;
}

static bool turns_v_ahead(const fa_key *key) { return key->kernel == FA_KERNEL_FORWARD_SM90 && key->dtype == FA_F8E4M3 && key->variant & 2; }

/* Where there are no more tiles than blocks, each has its own. */
static bool has_next_item(const fa_plan *plan, const fa_key *key) { return plan->args.all_items > plan->chip.multiprocessors * key->min_blocks; }

int64_t fa_plan_heads_in_l2(const fa_call *call, const fa_key *key)
{
    enum { L2_BYTES = 32 << 20 };
    int64_t bytes = call->max_seqlen_k * (key->head_dim + key->head_dim_v) * (int64_t)fa_dtype_bytes((flash_attn_dtype)key->dtype);
    return bytes > 0 ? L2_BYTES / bytes : call->heads_k * largest(call->batch, 1);
}

/*
 * Heads whose tiles are dealt together. Under a causal mask as many as have K and V in L2, about equally many each time: a sequence's longest tiles come first, so the more
 * heads there are the less is left to wait for at the end. Elsewhere tiles are about as long as each other (decision 0082).
 */
static int64_t heads_dealt_together(const fa_call *call, const fa_key *key)
{
    int64_t most  = key->mask != FA_MASK_CAUSAL ? 1 : fa_plan_heads_in_l2(call, key) * call->group;
    int64_t heads = call->heads_q, times = most <= 1 ? heads : (heads + most - 1) / most;
    return times > 1 ? heads / times : heads;
}

/* Tiles are dealt to who is free where sequences, or what a window shows of one, are not all alike, where there are many of many lengths, and where blocks of others may let some
 * of ours begin late: else blocks know theirs, and nothing has to be cleared before (decision 0082). */
static bool deals_tiles(const fa_call *call, const fa_plan *plan, const fa_key *key, int64_t items)
{
    enum { MANY_LENGTHS = 16, MANY_TILES = 7 /* of a block */ };
    int64_t blocks = (int64_t)plan->chip.multiprocessors * key->min_blocks;
    if (items > INT32_MAX)
        return false;
    if (!fa_plan_is_alike(call) || key->mask == FA_MASK_WINDOW || key->mask == FA_MASK_LISTED)
        return true;
    return !key->has_bias /* which own_place keeps in L2 */ &&
           (call->shares_gpu ? items > blocks : key->mask == FA_MASK_CAUSAL && plan->args.tiles_q >= MANY_LENGTHS && items >= MANY_TILES * blocks);
}

flash_attn_status fa_plan_add_planes(const fa_call *call, fa_plan *plan, const fa_key *main)
{
    bool    backward = call->pass == FLASH_ATTN_BACKWARD;
    fa_key  planes   = fa_plan_helper_key(FA_KERNEL_PLANES_SM90, main);
    int64_t tiles_q  = fa_plan_tiles_of_all(call, call->cu_seqlens_q, fa_plan_rows(&call->q), main->tile_q, plan->args.tiles_q);
    int64_t tiles_k  = fa_plan_tiles_of_all(call, call->cu_seqlens_k, fa_plan_rows(&call->k), main->tile_k, plan->args.tiles_k);
    planes.dtype_o   = 0;
    planes.even_d    = 0;
    planes.tile_q    = main->tile_q;
    planes.tile_k    = main->tile_k;
    planes.has_paged = main->has_paged;
    planes.variant   = backward;
    plan->args.all_tiles_q = (int)tiles_q;
    plan->args.all_tiles_k = (int)tiles_k;
    return fa_plan_add(plan, &planes, (1 + backward) * tiles_q * call->heads_q + 2 * tiles_k * call->heads_k);
}

static flash_attn_status plan_forward_sm90(const fa_call *call, fa_plan *plan, fa_key *key)
{
    fa_args *args  = &plan->args;
    fa_key   whole = *key; /* fold has its results */
    bool     grouped = fa_groups_heads(call, plan->row);
    int64_t  each = grouped ? call->group : 1; /* rows of a query */
    key->has_groups = grouped;
    args->tiles_q   = (int)ceil_div(call->max_seqlen_q * each, key->tile_q);
    fa_plan_choose_own_splits(call, key, plan);
    if (args->num_splits > 1) {
        key->has_split  = 1;
        key->variant   &= ~1; /* one stage of Q: a part is long enough, and registers hold Q (decision 0094) */
        key->one_launch = fa_plan_walks_parts(call, key, plan) ? 2 : 0;
        if (!key->one_launch)
            key->dtype_o = FA_F32;
    }
    bool     parted = key->has_split && !key->one_launch; /* over blocks */
    int64_t  tiles  = args->tiles_q, heads = call->heads_q / each * (parted ? args->num_splits : 1), all = fa_plan_tiles_of_all(call, call->cu_seqlens_q, fa_plan_rows(&call->q) * each, key->tile_q, tiles);
    int64_t  blocks = tiles * heads * call->batch, items = all * heads;
    bool     planes = key->kernel == FA_KERNEL_FORWARD_F32_SM90;
    plan->has_maps   = !planes;
    args->page_piece = planes ? 0 : fa_page_piece(call, key->tile_k);
    args->cap_unit   = 2 * call->softcap * LOG2_E;
    args->bias_factor = 1 / call->scale;
    args->order_heads = fa_is_piece(call) && (grouped || key->has_split) ? 0 : (int)largest(heads_dealt_together(call, key) / each, 1);
    if (deals_tiles(call, plan, key, items)) {
        args->all_tiles_q = (int)all;
        args->all_items   = (int)items;
        blocks            = items;
    }
    if (key->mask == FA_MASK_LISTED)
        FA_TRY(fa_plan_add_lists(call, plan, key));
    if (turns_v_ahead(key)) {
        fa_key values     = fa_plan_small_key(FA_KERNEL_VALUES_SM90, key->arch);
        values.dtype      = key->dtype;
        values.head_dim_v = key->head_dim_v;
        values.tile_k     = key->tile_k;
        FA_TRY(fa_plan_add(plan, &values, args->tiles_k * call->heads_k * call->batch));
    }
    if (planes)
        FA_TRY(fa_plan_add_planes(call, plan, key));
    else if (has_next_item(plan, key) && key->mask != FA_MASK_LISTED /* list_tiles does it */) {
        fa_key deal = fa_plan_small_key(FA_KERNEL_DEAL, key->arch);
        FA_TRY(fa_plan_add(plan, &deal, 1));
    }
    plan->main = plan->num_launches;
    FA_TRY(fa_plan_add(plan, key, blocks));
    plan->launch[plan->main].stays = true;
    return parted ? fa_plan_add_fold(call, plan, &whole) : FLASH_ATTN_OK;
}

void fa_plan_set_apart(const fa_call *call, fa_args *args)
{
    args->apart_q    = fa_map_entry_rows(&call->q);
    args->apart_k    = fa_map_entry_rows(&call->k);
    args->apart_v    = fa_map_entry_rows(&call->v);
    args->apart_o    = fa_map_entry_rows(&call->o);
    args->apart_dout = fa_map_entry_rows(&call->dout);
    args->apart_dq   = fa_map_gradient_rows(&call->dq);
    args->apart_dk   = fa_map_gradient_rows(&call->dk);
    args->apart_dv   = fa_map_gradient_rows(&call->dv);
}

flash_attn_status fa_plan_one_tile(const fa_call *call, fa_plan *plan, const fa_key *key, int64_t heads)
{
    plan->has_maps = true;
    fa_plan_set_apart(call, &plan->args);
    plan->main = plan->num_launches;
    FA_TRY(fa_plan_add(plan, key, heads * call->batch));
    plan->launch[plan->main].stays = true;
    return FLASH_ATTN_OK;
}

/*
 * Few queries, 16 rows, few parts: the blocks of a cluster merge their parts themselves, for a second launch costs two microseconds. A block takes
 * as many neighbouring parts as leave enough blocks; bits do not depend on that. Before 9.0 a cluster is one block.
 */
static bool merges_itself(const fa_key *key, fa_args *args, int64_t tiles)
{
    enum { MOST_PARTS = 8, ENOUGH_BLOCKS = 128 };
    if (!key->has_split || key->variant <= 1 || key->tile_q > 16 || args->num_splits > MOST_PARTS)
        return false;
    int run = 1;
    while (run < args->num_splits && tiles * ceil_div(args->num_splits, 2 * run) >= ENOUGH_BLOCKS)
        run *= 2;
    if (run < args->num_splits && key->arch < 90)
        return false;
    args->run_parts = run;
    return true;
}

static flash_attn_status plan_forward(const fa_call *call, fa_plan *plan, fa_key *key)
{
    fa_args *args = &plan->args;
    if (key->kernel == FA_KERNEL_FORWARD_SM90 || key->kernel == FA_KERNEL_FORWARD_F32_SM90)
        return plan_forward_sm90(call, plan, key);
    if (key->kernel == FA_KERNEL_FORWARD_SHORT_SM90)
        return fa_plan_one_tile(call, plan, key, call->heads_q * args->tiles_q);
    fa_plan_choose_splits(call, plan);
    key->has_split = args->num_splits > 1;
    if (fa_plan_takes_lists(call, plan, key)) {
        key->mask = FA_MASK_LISTED;
        FA_TRY(fa_plan_add_lists(call, plan, key));
    }
    plan->main     = plan->num_launches;
    int64_t heads  = call->heads_q;
    if (is_packed(plan->row)) {
        heads         = call->heads_k;
        args->tiles_q = (int)ceil_div(call->max_seqlen_q * call->group, key->tile_q);
    }
    int64_t tiles = args->tiles_q * heads * call->batch;
    if (merges_itself(key, args, tiles)) {
        int64_t runs    = ceil_div(args->num_splits, args->run_parts);
        key->one_launch = runs > 1 ? 1 : 2;
        return fa_plan_add_clusters(plan, key, tiles * runs, (int)runs);
    }
    if (fa_is_latent(plan->row) || key->kernel == FA_KERNEL_FORWARD_FEW_SM90)
        return fa_plan_packed(call, plan, key, tiles);
    FA_TRY(fa_plan_add(plan, key, tiles * args->num_splits));
    return key->has_split ? fa_plan_add_combine(call, plan, key) : FLASH_ATTN_OK;
}

/* ---- workspace ---- */

typedef struct arena {
    char  *base; /* NULL: only counting */
    size_t used;
} arena;

static void *take(arena *a, int64_t count, size_t element_bytes)
{
    if (count == 0)
        return NULL;
    void *place = a->base ? a->base + a->used : NULL;
    a->used += ((size_t)count * element_bytes + 255) / 256 * 256;
    return place;
}

/* Places of dbias's floats along a dimension: of the last a whole number of what is added to at once. */
static int64_t places_of_dbias(const fa_args *args, int dimension)
{
    enum { FLOATS_AT_ONCE = 4 };
    int64_t count = (int64_t)args->dbias_extent[dimension] * args->dbias_terms[dimension];
    return dimension == 3 ? ceil_div(count, FLOATS_AT_ONCE) * FLOATS_AT_ONCE : count;
}

static int64_t floats_of_dbias(const fa_key *key, const fa_args *args)
{
    int64_t floats = key->has_dbias && !args->dbias_direct;
    for (int i = 0; i < 4; i++)
        floats *= places_of_dbias(args, i);
    return floats;
}

/* Of a row of so many columns: whole panels. */
static int64_t bytes_of_planes(int columns)
{
    enum { PLANES = 2, PANEL_COLUMNS = 64, PANEL_BYTES = 128 };
    return PLANES * PANEL_BYTES * ceil_div(columns, PANEL_COLUMNS);
}

/* planes_sm90.cuh: tiles and their notes. */
static void take_planes(const fa_call *call, const fa_key *key, fa_args *args, arena *a)
{
    enum { NOTE = 128 };
    int64_t tiles_q = call->heads_q * args->all_tiles_q, tiles_k = call->heads_k * args->all_tiles_k, floats = key->tile_q * (int64_t)sizeof(float) + NOTE;
    args->q_tiles  = take(a, tiles_q * (key->tile_q * bytes_of_planes(key->head_dim) + floats), 1);
    args->k_tiles  = take(a, tiles_k * (key->tile_k * bytes_of_planes(key->head_dim) + NOTE), 1);
    args->v_turned = take(a, tiles_k * (key->tile_k * bytes_of_planes(key->head_dim_v) + NOTE), 1);
    if (call->pass == FLASH_ATTN_BACKWARD)
        args->dout_tiles = take(a, tiles_q * (key->tile_q * bytes_of_planes(key->head_dim_v) + floats), 1);
}

static void take_lists(const fa_call *call, fa_plan *plan, arena *a)
{
    fa_args *args     = &plan->args;
    bool     backward = call->pass == FLASH_ATTN_BACKWARD;
    args->tile_lists = take(a, (backward ? args->all_tiles_k : args->all_tiles_q) * (int64_t)args->list_places, sizeof(fa_listed));
    args->tile_masks = take(a, args->most_masks, (size_t)fa_mask_bytes(plan->row));
    args->tile_turns = take(a, backward && call->deterministic ? args->all_tiles_q * (int64_t)args->tiles_k : 0, sizeof(int));
}

/* Sums of dK and dV that backward_convert_sm90 adds up. */
static void take_shares(const fa_call *call, const fa_key *key, fa_args *args, arena *a)
{
    int64_t kv_rows = fa_plan_rows(&call->k) * call->heads_k * args->group_blocks;
    if (args->group_blocks <= 1)
        return;
    args->dk_stored.data = take(a, call->dk.data ? kv_rows * key->head_dim : 0, sizeof(float));
    args->dv_stored.data = take(a, call->dv.data ? kv_rows * key->head_dim_v : 0, sizeof(float));
}

void fa_plan_place(const fa_call *call, fa_plan *plan, char *base)
{
    const fa_key *key    = &plan->launch[plan->main].key;
    fa_args      *args   = &plan->args;
    arena         a      = {base, 0};
    int64_t       tokens = fa_plan_rows(&call->q);
    plan->zero_bytes    = 0; /* of the time before */
    args->slices        = take(&a, plan->slices_bytes > 0 ? call->slices.count : 0, sizeof(fa_slice));
    args->slice_offsets = take(&a, plan->offsets_bytes > 0 ? call->batch + 1 : 0, sizeof(int));
    if (plan->documents_bytes > 0) {
        const int *ends    = take(&a, 2 * (call->batch + 1), sizeof(int));
        args->cu_seqlens_q = ends;
        args->cu_seqlens_k = ends ? ends + call->batch + 1 : NULL;
    }
    if (key->has_split) {
        bool             few = key->kernel == FA_KERNEL_FORWARD_FEW_SM90, folds = few || key->kernel == FA_KERNEL_FORWARD_SM90; /* these have a maximum and a sum */
        const fa_launch *main = &plan->launch[plan->main];
        int64_t          most = (int64_t)plan->chip.multiprocessors * key->min_blocks, blocks = main->stays && main->blocks > most ? most : main->blocks;
        int64_t parts = few && key->one_launch == 2 ? 1 : few ? ceil_div(args->num_splits, args->run_parts) : args->num_splits, rows = parts * call->heads_q * fa_plan_tokens_of_parts(call);
        if (folds && !few && key->one_launch)
            rows = blocks * key->tile_q; /* a block's place for far rows */
        args->o_partial   = take(&a, rows * key->head_dim_v, sizeof(float));
        args->lse_partial = take(&a, folds ? 2 * rows : rows, sizeof(float));
        if (few && key->one_launch > 1)
            args->folded_o = take(&a, FA_FOLD_PLACES * blocks * key->tile_q * key->head_dim_v, sizeof(float));
    }
    if (turns_v_ahead(key))
        args->v_turned = take(&a, call->batch * call->heads_k * args->tiles_k * key->tile_k, (size_t)key->head_dim_v);
    if (key->kernel == FA_KERNEL_K7) {
        int64_t kv_bytes = call->batch * call->heads_k * args->tiles_k * key->tile_k * key->head_dim;
        args->q_tiles    = take(&a, call->batch * call->heads_q * args->tiles_q * key->tile_q, (size_t)key->head_dim);
        args->k_tiles    = take(&a, kv_bytes, 1);
        args->v_turned   = take(&a, kv_bytes, 1);
        size_t begin     = a.used;
        args->largest    = take(&a, call->batch * (call->heads_q + 2 * call->heads_k), sizeof(float));
        plan->zero       = base ? base + begin : NULL;
        plan->zero_bytes = a.used - begin;
    }
    if (key->kernel == FA_KERNEL_FORWARD_F32_SM90 || key->kernel == FA_KERNEL_BACKWARD_F32_SM90)
        take_planes(call, key, args, &a);
    if (key->kernel == FA_KERNEL_FORWARD_SM90 || key->kernel == FA_KERNEL_FORWARD_F32_SM90)
        args->next_item = take(&a, has_next_item(plan, key), sizeof(int));
    if (key->kernel == FA_KERNEL_K1_SCORES)
        args->o_partial = take(&a, call->heads_q * tokens * call->max_seqlen_k, sizeof(float));
    if (key->kernel == FA_KERNEL_FA1) {
        args->o_partial   = take(&a, call->heads_q * tokens * key->head_dim_v, sizeof(float));
        args->lse_partial = take(&a, 2 * call->heads_q * tokens, sizeof(float));
    }
    if (key->kernel == FA_KERNEL_BACKWARD_SM90) {
        int64_t tiles   = call->heads_q * args->all_tiles_q, rows = tiles * key->tile_q; /* cleared by backward_rowsum */
        args->row_stats = take(&a, 2 * rows, sizeof(float));
        args->dq_accum  = take(&a, rows * key->head_dim, sizeof(float));
        args->dq_turn   = take(&a, tiles, sizeof(int));
        args->next_item = take(&a, args->dealt_heads > 0, sizeof(int));
        take_shares(call, key, args, &a);
        size_t begin     = a.used;
        args->dbias.data = take(&a, floats_of_dbias(key, args), sizeof(float));
        plan->zero       = base ? base + begin : NULL;
        plan->zero_bytes = a.used - begin;
    } else if (key->kernel == FA_KERNEL_BACKWARD_SHORT_SM90)
        take_shares(call, key, args, &a);
    else if (call->pass == FLASH_ATTN_BACKWARD) {
        args->delta  = take(&a, key->one_launch ? 0 : call->heads_q * tokens, sizeof(float));
        args->dq_accum = take(&a, call->heads_q * tokens * key->head_dim, sizeof(float));
        size_t begin   = a.used; /* kernels clear what lies before */
        int64_t kv_rows   = key->has_kv_accum ? call->heads_k * fa_plan_rows(&call->k) : 0;
        args->dk_accum   = take(&a, kv_rows * key->head_dim, sizeof(float));
        args->dv_accum   = take(&a, kv_rows * key->head_dim_v, sizeof(float));
        args->dbias.data = take(&a, floats_of_dbias(key, args), sizeof(float));
        args->lost       = take(&a, key->kernel == FA_KERNEL_BACKWARD_F32_SM90, sizeof(int));
        args->dq_turn    = take(&a, key->deterministic ? call->batch * call->heads_q * args->tiles_q : 0, sizeof(int));
        plan->zero       = base ? base + begin : NULL;
        plan->zero_bytes = key->one_launch ? 0 : a.used - begin;
    }
    if (key->mask == FA_MASK_LISTED) { /* what is zeroed grows by one number */
        size_t begin      = a.used - plan->zero_bytes;
        args->masks_taken = take(&a, 1, sizeof(int));
        plan->zero        = base ? base + begin : NULL;
        plan->zero_bytes  = a.used - begin;
        take_lists(call, plan, &a);
    }
    plan->workspace_bytes = a.used;
}

/* dbias is summed in an array of floats; in the deterministic mode each of its terms has a place there. Hopper's own store it at once where an element has one term and dbias is as
 * dS is there, in 16 bits and rows of whole words. */
static void fill_dbias(const fa_call *call, const fa_key *key, fa_args *args)
{
    const flash_attn_tensor *dbias  = &call->dbias;
    fa_i64                   stride = 1;
    for (int i = 3; i >= 0; i--) {
        bool broadcasts       = dbias->data && dbias->stride[i] == 0;
        args->dbias_terms[i]  = call->deterministic && broadcasts ? (int)dbias->shape[i] : 1;
        args->dbias.stride[i] = args->dbias_extent[i] * args->dbias_terms[i] == 1 ? 0 : stride;
        stride *= places_of_dbias(args, i);
    }
    args->dbias.dtype  = FA_F32;
    args->dbias_direct = key->has_dbias && key->kernel == FA_KERNEL_BACKWARD_SM90 && fa_dbias_map_fits(call);
}

flash_attn_status fa_plan_make(const fa_call *call, int arch, const fa_chip *chip, const char *name, fa_plan *plan)
{
    static const fa_chip large = {132, 3300};
    memset(plan, 0, sizeof *plan);
    plan->chip = chip ? *chip : large;
    if (plan->chip.gigabytes <= 0) /* the driver does not tell */
        plan->chip.gigabytes = large.gigabytes;
    fa_key key = wanted_key(call, arch);
    plan->rung = name ? fa_ladder_find(name) : NULL;
    plan->has_maps = plan->rung && plan->rung->has_maps;
    FA_TRY(plan->rung ? fa_ladder_choose(call, &key, plan->rung, &plan->row) : fa_tune_choose(call, &key, name, &plan->row));
    fa_plan_use_row(&key, plan->row);
    fill_tensors(call, &plan->args);
    fill_sizes(call, plan->row, &plan->args);
    fill_dbias(call, &key, &plan->args);
    plan->slices_bytes  = (size_t)call->slices.count * sizeof(fa_slice);
    plan->offsets_bytes = call->slices.count > 0 && call->slices.offsets ? (size_t)(call->batch + 1) * sizeof(int) : 0;
    plan->documents_bytes = fa_documents_bytes(call);
    if (plan->slices_bytes + plan->documents_bytes > 0) {
        fa_key upload = fa_plan_small_key(FA_KERNEL_UPLOAD, arch);
        FA_TRY(fa_plan_add(plan, &upload, 1));
    }
    if (call->pass == FLASH_ATTN_BACKWARD)
        FA_TRY(fa_plan_backward(call, plan, &key));
    else if (plan->rung)
        FA_TRY(fa_plan_ladder(call, plan, &key));
    else
        FA_TRY(plan_forward(call, plan, &key));
    fa_plan_place(call, plan, NULL);
    return FLASH_ATTN_OK;
}
