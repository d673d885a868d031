/* The parts into which a forward's keys are split, the launches that make one result of them, and the two kinds of sequences that a batch may have. */
#include "cuda/plan.h"
#include "cuda/tune.h"

#include <math.h>

int fa_plan_calls_of(const fa_call *call, fa_call calls[2])
{
    enum { MOST = 16, WIDE = 256 };
    int64_t few = 1, rest = call->batch - 1, others = fa_plan_rows(&call->q) - call->max_seqlen_q;
    bool    by_batch = call->num_splits < 0, cache = call->pages.table || call->seqused_k;
    bool    some     = by_batch ? others > 0 && others <= MOST * rest : cache && others <= rest * call->max_seqlen_q - (call->max_seqlen_q - few); /* else none is so short */
    bool    plain = !(call->bias.data || call->alibi_slopes.data || call->dropout.threshold || call->slices.count > 0) && call->q.dtype != FLASH_ATTN_F32 && call->head_dim <= WIDE && call->head_dim_v <= WIDE;
    if (call->pass != FLASH_ATTN_FORWARD || !call->cu_seqlens_q || !some || !fa_has_many_queries(call) || call->num_splits > 1 || !plain)
        return 1;
    while (by_batch && few * rest < others)
        few *= 2;
    calls[0] = calls[1] = *call;
    calls[0].of_length = FA_OF_MANY;
    calls[1].of_length = FA_OF_FEW;
    calls[0].few_queries = calls[1].few_queries = calls[1].max_seqlen_q = few;
    return 2;
}

/* Of rows that heads of a key head share. */
static int64_t packed_tiles_of_one(const fa_call *call, int64_t tile_q) { return ceil_div(call->max_seqlen_q * call->group, tile_q) * call->heads_k; }
static int64_t packed_tiles(const fa_call *call, const fa_tune_row *row) { return packed_tiles_of_one(call, row->tile_q) * call->batch; }

/* Rows of the tiles by which parts are planned. On Hopper a batch may have tiles of 64 rows where a larger one has 128 (tune.c), and the order of sums is the same in both. */
static int64_t planned_rows(const fa_call *call, const fa_tune_row *row)
{
    enum { LARGE = 128 };
    return row->only == FA_FOR_FEW_TMA && call->max_seqlen_q * call->group > row->tile_q ? LARGE : row->tile_q;
}

/* The most parts that a sequence of at most `keys` keys has, where parts grow with its own length (forward_work.cuh) beyond `before` of them. */
static int64_t most_parts(const fa_args *args, int64_t part, int64_t keys, int64_t before)
{
    int64_t most = 0;
    for (int n = 0; n <= args->part_doublings; n++, part *= 2) {
        int64_t longest = largest(args->part_growth > 0 ? part * part / args->part_growth : 0, before * part);
        most            = largest(most, ceil_div(n == args->part_doublings || longest > keys ? keys : longest, part));
    }
    return most;
}

/* A part's keys in a sequence of so many, likewise. */
static int64_t part_of(const fa_args *args, int64_t keys, int64_t before)
{
    int64_t part = args->split_keys;
    for (int n = 0; n < args->part_doublings && part * part < args->part_growth * keys && before * part < keys; n++)
        part *= 2;
    return part;
}

/* As measured: of clusters as large as a tile has parts some multiprocessors are not part, and who asks for more than fit waits for a second round. */
bool fa_packed_merges(int64_t tiles, int64_t parts, const fa_chip *chip)
{
    enum { MOST_PARTS = 8 };
    return parts > 1 && parts <= MOST_PARTS && tiles * parts <= chip->multiprocessors * 3 / 4;
}

/* Microseconds of a call of few queries on Hopper whose blocks have `keys` keys each and fold at so many ends of parts, as measured on an H200 (decision 0074); where another
 * GPU is slower in all of these alike, what is chosen by them is the same. Memory's time for the keys or a block's for its own, whichever is more, and results that are
 * folded from memory. */
static double time_of_few(const fa_call *call, const fa_plan *plan, int64_t tiles, int64_t keys, int64_t ends)
{
    static const double KEY = 3.8e-3, KEY_OF_COLUMN = 5e-5, OF_MEMORY = 0.96, NOT_HIDDEN = 0.1, FOLD = 2.5, ROUND_OF_FOLD = 0.8, COLUMN_OF_RESULT = 1.7e-6, FLOAT_OF_END = 8e-5, ALONE = 3.0;
    enum { RESULTS_OF_ROUND = 8 }; /* fold.cu's AT_ONCE */
    const fa_tune_row *row = plan->row;
    int64_t most = plan->args.max_seqlen_k, results = ceil_div(most, keys), blocks = tiles * results, slots = (int64_t)plan->chip.multiprocessors * row->min_blocks;
    double  read = 2e-3 * (double)(call->batch * most * call->heads_k * (call->head_dim + call->head_dim_v)) / (OF_MEMORY * plan->chip.gigabytes);
    double  key  = KEY * row->tile_q / 64 + KEY_OF_COLUMN * row->head_dim, end = FLOAT_OF_END * (double)ends * row->tile_q * row->head_dim;
    bool    alone = row->min_blocks > 1 && blocks <= plan->chip.multiprocessors; /* no other block's work lies beside its ends */
    double  walk = (double)ceil_div(blocks, slots) * ((double)(keys < most ? keys : most) * key + (alone ? 0 : end)), time = fmax(read, walk) + NOT_HIDDEN * fmin(read, walk);
    double  columns = (double)(call->batch * call->max_seqlen_q * call->heads_q * call->head_dim_v);
    double  fold = FOLD + ROUND_OF_FOLD * (double)(ceil_div(results, RESULTS_OF_ROUND) - 1) + columns * (double)results * COLUMN_OF_RESULT;
    return time + (alone ? ALONE * end : 0) + (results > 1 ? fold : 0);
}

/* Keys of a part, so that a call of few queries takes the least time whatever else is in the batch. */
static int64_t fastest_part_of_few(const fa_call *call, const fa_plan *plan)
{
    enum { MOST = 256 };
    int64_t tile_k = plan->row->tile_k, tiles = packed_tiles(call, plan->row), best = plan->args.max_seqlen_k;
    double  least = time_of_few(call, plan, tiles, best, 0);
    for (int64_t wanted = 2; wanted <= MOST; wanted += 1 + wanted / 16) {
        int64_t part = largest(ceil_div(plan->args.tiles_k, wanted), 1) * tile_k;
        double  time = time_of_few(call, plan, tiles, part, 0);
        if (time < least) {
            least = time;
            best  = part;
        }
    }
    return best;
}

int fa_plan_fold(const fa_call *call, const fa_plan *plan, int64_t tiles)
{
    enum { PARTS = 0, WHOLE = 2, GROUPS = 3 };
    int64_t keys = plan->args.max_seqlen_k, part = part_of(&plan->args, keys, FA_FOLD_PARTS), group = FA_FOLD_GROUP * part;
    if (call->num_splits != 0)
        return PARTS;
    double parts  = time_of_few(call, plan, tiles, part, 0), whole = time_of_few(call, plan, tiles, keys, ceil_div(keys, part));
    double groups = keys > group ? time_of_few(call, plan, tiles, group, FA_FOLD_GROUP) : INFINITY;
    if (whole < fmin(parts, groups))
        return WHOLE;
    return groups < parts ? GROUPS : PARTS;
}

/*
 * Keys of a part, so that a call of latent attention takes the least time whatever else is in the batch: rounds of the multiprocessors, each of
 * which has a tile of rows and a part of their keys, or as long as memory takes for the keys, and what the parts' results cost. Microseconds, as measured on
 * two H200 (decision 0070, fourth round); where another GPU is slower in all of them alike, the choice is the same.
 */
static int64_t fastest_part(const fa_call *call, const fa_tune_row *row, const fa_chip *chip, const fa_args *args)
{
    enum { MOST = 256 };
    static const double TILE = 1.12, ITEM = 0.76, OF_MEMORY = 0.9, NOT_HIDDEN = 0.05, COMBINE = 1.43, ROW = 1.14e-3, ROW_OF_PART = 1.2e-3, MERGE = 1.0, MERGED_ROW_OF_PART = 1e-3;
    double  read = 2e-3 * (double)(call->batch * args->max_seqlen_k * call->heads_k) * (double)(call->head_dim + (row->only == FA_FOR_WIDE ? call->head_dim_v : 0)) / (OF_MEMORY * chip->gigabytes);
    int64_t rows = call->max_seqlen_q * call->heads_q * call->batch, best = 1;
    int64_t tiles = packed_tiles(call, row);
    double  least = INFINITY;
    for (int64_t wanted = 1; wanted <= MOST; wanted += 1 + wanted / 16) {
        int64_t each = ceil_div(args->tiles_k, wanted), parts = ceil_div(args->tiles_k, largest(each, 1));
        double  work = ceil_div(tiles * parts, chip->multiprocessors) * (TILE * each + ITEM), time = fmax(work, read) + NOT_HIDDEN * fmin(work, read);
        if (fa_packed_merges(tiles, parts, chip))
            time += MERGE + rows * MERGED_ROW_OF_PART * parts;
        else if (parts > 1)
            time += COMBINE + rows * (ROW + ROW_OF_PART * parts);
        if (time < least) {
            least = time;
            best  = each;
        }
    }
    return best * row->tile_k;
}

/* Few queries in the portable kernel: so many that its blocks keep memory busy without parts, as measured on an H200 (decision 0074). */
static bool has_enough_tiles(const fa_call *call, const fa_plan *plan)
{
    return plan->row->only == FA_FOR_FEW && packed_tiles(call, plan->row) >= 3 * (int64_t)plan->chip.multiprocessors;
}

/* Microseconds of forward_sm90, as measured on an H200: a tile's begin and end, a step's products as fast as its clock under load allows, the launch that merges parts, and a part that is folded where
 * it ends. */
static const double BEGIN_AND_END = 2.5, FLOPS = 5.7e6 /* of a multiprocessor */, MERGE = 3.0, BYTES = 3.3e6, FLOAT_FOLDED = 3e-5;

static double time_of_steps(const fa_call *call, const fa_tune_row *row, int64_t steps)
{
    return (double)steps * (2.0 * row->tile_q * row->tile_k * (double)(call->head_dim + call->head_dim_v) / FLOPS * row->min_blocks);
}

/* Of so many tiles of queries, whose keys are parted, on so many blocks. */
static double time_of_parts(const fa_call *call, const fa_plan *plan, int64_t tiles, int64_t slots, int64_t parts)
{
    const fa_tune_row *row = plan->row;
    double walk = (double)ceil_div(tiles * parts, slots) * (time_of_steps(call, row, ceil_div(plan->args.tiles_k, parts)) + BEGIN_AND_END);
    return walk + (parts > 1 ? MERGE + (double)(tiles * parts * row->tile_q * call->head_dim_v) * sizeof(float) / BYTES : 0);
}

/* The same, where a block walks all parts of its tile. */
static double time_of_walk(const fa_call *call, const fa_plan *plan, int64_t tiles, int64_t slots, int64_t parts)
{
    const fa_tune_row *row = plan->row;
    double folds = (double)parts * (double)(row->tile_q * call->head_dim_v) * FLOAT_FOLDED;
    return (double)ceil_div(tiles, slots) * (time_of_steps(call, row, plan->args.tiles_k) + folds + BEGIN_AND_END);
}

/* Parts with which so many tiles take least, of `least` keys or more. */
static int64_t fastest_parts(const fa_call *call, const fa_plan *plan, int64_t tiles, int64_t slots, int64_t least)
{
    enum { MOST_PARTS = 32 };
    int64_t best = 1;
    double  time = time_of_parts(call, plan, tiles, slots, best);
    for (int64_t n = 2; n <= MOST_PARTS && n * least <= plan->args.max_seqlen_k; n++) {
        double its = time_of_parts(call, plan, tiles, slots, n);
        if (its < time) {
            time = its;
            best = n;
        }
    }
    return best;
}

/* Tiles of all sequences, of which one has so many at most. */
static int64_t tiles_of_batch(const fa_call *call, const fa_tune_row *row, int64_t tiles, int64_t heads)
{
    return call->cu_seqlens_q ? ceil_div(fa_plan_rows(&call->q) * (call->heads_q / heads), row->tile_q) * heads : tiles * call->batch;
}

static int64_t heads_of_tiles(const fa_call *call, const fa_key *key) { return key->has_groups ? call->heads_k : call->heads_q; }

bool fa_plan_walks_parts(const fa_call *call, const fa_key *key, const fa_plan *plan)
{
    enum { MOST_PARTS = 32 /* bits of work.spoilt */, THREE_CONSUMERS = 16, NARROW = 64, WIDE = 128 };
    const fa_tune_row *row   = plan->row;
    bool               fits  = row->dtypes == FA_IN_16_BIT && row->min_blocks == 1 && row->head_dim <= (row->warps == THREE_CONSUMERS ? NARROW : WIDE) && !key->has_alibi && !key->has_dropout;
    int64_t            heads = heads_of_tiles(call, key), tiles = plan->args.tiles_q * heads, slots = plan->chip.multiprocessors, parts = plan->args.num_splits;
    if (call->num_splits != 0 || !fits || parts > MOST_PARTS)
        return false;
    tiles = tiles_of_batch(call, row, tiles, heads);
    return time_of_walk(call, plan, tiles, slots, parts) < time_of_parts(call, plan, tiles, slots, parts);
}

/*
 * Parts in forward_sm90: pieces of a prompt, few heads and long keys, whose tiles of queries are fewer than blocks. By heads and the longest sequence's queries, for a GPU of 132
 * multiprocessors and one sequence: then a sequence's own length says how many it has (work_sm90.cuh), and its bits are the same in any batch. There a part costs as much as it is
 * short, so these are longer than those of who lets the batch count (decision 0094).
 */
void fa_plan_choose_own_splits(const fa_call *call, const fa_key *key, fa_plan *plan)
{
    enum { LARGE_GPU = 132, LEAST_PART = 1024, LEAST_BY_BATCH = 256, FEWEST_PARTS = 4 };
    const fa_tune_row *row   = plan->row;
    fa_args           *args  = &plan->args;
    int64_t            heads = heads_of_tiles(call, key), tiles = args->tiles_q * heads, parts = call->num_splits, least = row->tile_k;
    if (row->kernel != FA_KERNEL_FORWARD_SM90 || !fa_own_splits_fit(call))
        return;
    if (parts <= 0) {
        bool    by_batch = parts < 0;
        int64_t all      = tiles_of_batch(call, row, tiles, heads);
        least = by_batch ? LEAST_BY_BATCH : LEAST_PART;
        parts = by_batch ? fastest_parts(call, plan, all, (int64_t)plan->chip.multiprocessors * row->min_blocks, least) : fastest_parts(call, plan, tiles, LARGE_GPU * row->min_blocks, least);
        if (!fa_is_piece(call) || args->max_seqlen_k < FEWEST_PARTS * least)
            parts = 1;
    }
    if (parts > args->max_seqlen_k / least)
        parts = args->max_seqlen_k / least;
    if (parts <= 1)
        return;
    args->split_keys = (int)least;
    args->num_splits = (int)parts;
}

/* How fast parts grow with a sequence, by the rows of a tile; of wide heads, whose tiles are of one size, by those that are used (decision 0106). */
static int growth_of_parts(const fa_call *call, const fa_tune_row *row, int64_t rows)
{
    enum { GROWTH = 32, GROWTH_OF_MANY_ROWS = 64, GROWTH_OF_MOST_ROWS = 256, GROWTH_OF_LATENT = 256 };
    if (row->only == FA_FOR_LATENT)
        return GROWTH_OF_LATENT;
    if (row->only == FA_FOR_WIDE)
        return call->max_seqlen_q * call->group > row->tile_q ? GROWTH_OF_MOST_ROWS : GROWTH;
    return rows == 128 ? GROWTH_OF_MOST_ROWS : rows > 16 ? GROWTH_OF_MANY_ROWS : GROWTH;
}

/*
 * Parts of the keys, by absolute position. A caller's number is taken as it is. Otherwise only calls with few queries
 * are split, into parts of a length that depends on the number of heads and on the sequence's own length alone, never on the batch or on how
 * many multiprocessors there are, for the order of sums must not: with 32 keys for each head, a context of 4096 keys gives
 * 128 blocks at batch 1, about one for each multiprocessor of a large GPU. Where rows are packed, parts grow with the root of
 * the length, for each has a begin and an end, and leaves a result that grows with its rows (decision 0058), on Hopper less where a sequence has few tiles (decision 0096). A caller who asks for -1 lets
 * the batch count too.
 */
void fa_plan_choose_splits(const fa_call *call, fa_plan *plan)
{
    enum { DOUBLINGS = 3, MANY_TILES = 8, ENOUGH_TILES = 66, KEYS_OF_TILE = 64 };
    const fa_tune_row *row  = plan->row;
    fa_args           *args = &plan->args;
    int64_t keys = args->max_seqlen_k, part = keys, heads = is_packed(row) ? call->heads_k : call->heads_q, rows = planned_rows(call, row), tiles = packed_tiles_of_one(call, rows);
    bool    folds = row->only == FA_FOR_FEW_TMA, fastest = call->num_splits < 0 && (folds || fa_is_latent(row)), by_shape = call->num_splits <= 0 && !fastest;
    if (keys == 0)
        return;
    if (fastest)
        part = folds ? fastest_part_of_few(call, plan) : fastest_part(call, row, &plan->chip, args);
    else if (call->num_splits > 1)
        part = ceil_div(keys, call->num_splits);
    else if (call->num_splits < 0 && has_enough_tiles(call, plan))
        return;
    else if (by_shape && call->max_seqlen_q <= rows)
        part = heads <= 8 ? 256 : heads >= 64 ? 2048 : 32 * heads;
    else if (by_shape && row->only == FA_FOR_WIDE && fa_is_piece(call) && tiles < ENOUGH_TILES)
        part = KEYS_OF_TILE * tiles;
    if (by_shape && is_packed(row)) {
        args->part_growth    = growth_of_parts(call, row, rows);
        args->part_doublings = folds ? DOUBLINGS + 1 : DOUBLINGS;
        if (folds && tiles < MANY_TILES)
            args->part_growth = args->part_growth * (int)tiles / MANY_TILES;
    }
    part = ceil_div(part, row->tile_k) * row->tile_k;
    if (part >= keys)
        return;
    args->split_keys = (int)part;
    args->num_splits = (int)most_parts(args, part, keys, folds ? FA_FOLD_PARTS : 0);
}

int64_t fa_plan_tokens_of_parts(const fa_call *call) { return call->of_length == FA_OF_FEW ? call->batch * call->few_queries : fa_plan_rows(&call->q); }

/* The launch that merges the parts of `main`; its bits are the same by one warp a row or by eight. A warp has one row where that makes one wave of
 * blocks, two on each of 132 multiprocessors, else up to four. */
flash_attn_status fa_plan_add_combine(const fa_call *call, fa_plan *plan, const fa_key *main)
{
    enum { FEW_PARTS = 4, SOME_PARTS = 64, MANY_ROWS = 256, WAVE = 264, WARP_ROWS = 4 };
    fa_args *args    = &plan->args;
    fa_key   combine = fa_plan_helper_key(FA_KERNEL_COMBINE, main);
    int64_t  rows    = fa_plan_tokens_of_parts(call) * call->heads_q;
    combine.dtype    = 0; /* it sees only partial results and o */
    combine.warps    = FA_COMBINE_WARPS;
    bool alone       = args->num_splits <= FEW_PARTS || (args->num_splits <= SOME_PARTS && rows > MANY_ROWS);
    args->row_warps  = alone ? 1 : FA_COMBINE_WARPS;
    int64_t blocks = ceil_div(rows, FA_COMBINE_WARPS);
    if (blocks > WAVE)
        blocks = largest(WAVE, ceil_div(rows, FA_COMBINE_WARPS * WARP_ROWS));
    return fa_plan_add(plan, &combine, alone ? blocks : rows);
}

flash_attn_status fa_plan_add_fold(const fa_call *call, fa_plan *plan, const fa_key *main)
{
    enum { WIDE = 128, FEW_ROWS = 264 /* two blocks on each of 132 multiprocessors, all at once */, FEWEST_ROWS = 132 /* one */, WARPS = 2112 /* 16 on each */, FEW_RESULTS = 8 };
    fa_args *args = &plan->args;
    fa_key   fold = fa_plan_helper_key(FA_KERNEL_FOLD, main);
    int64_t  rows = fa_plan_tokens_of_parts(call) * call->heads_q, results = ceil_div(args->num_splits, args->run_parts);
    bool     parts = main->kernel == FA_KERNEL_FORWARD_FEW_SM90 && args->run_parts == 1, by_block = parts && rows <= (results > FEW_RESULTS ? FEW_ROWS : FEWEST_ROWS);
    fold.dtype      = 0; /* it sees only partial results and o */
    fold.warps      = FA_COMBINE_WARPS;
    args->row_warps = by_block ? FA_COMBINE_WARPS : 1;
    args->fold_rows = parts ? 0 : 1;
    if (!parts && rows > WARPS && results <= FEW_RESULTS && main->head_dim_v <= WIDE)
        args->fold_rows = results > FEW_RESULTS / 2 ? 2 : 4;
    return fa_plan_add(plan, &fold, by_block ? rows : ceil_div(rows, FA_COMBINE_WARPS * largest(args->fold_rows, 1)));
}

/* Key heads of all sequences whose tiles are taken together, about equally many each time: those that have K and V in L2. */
static int64_t key_heads_together(const fa_call *call, const fa_key *key)
{
    int64_t heads = call->heads_k * call->batch, times = ceil_div(heads, largest(fa_plan_heads_in_l2(call, key), 1));
    return largest(ceil_div(heads, largest(times, 1)), 1);
}

flash_attn_status fa_plan_packed(const fa_call *call, fa_plan *plan, fa_key *key, int64_t tiles)
{
    fa_args *args   = &plan->args;
    bool     latent = fa_is_latent(plan->row);
    key->one_launch = !key->has_split ? 0 : latent ? fa_packed_merges(tiles, args->num_splits, &plan->chip) : fa_plan_fold(call, plan, tiles);
    args->run_parts = key->one_launch == 2 ? args->num_splits : key->one_launch == 3 ? FA_FOLD_GROUP : 1;
    bool    merges = latent && key->one_launch, pairs = !merges && fa_latent_in_pairs(call, plan->row);
    int64_t blocks = tiles * ceil_div(args->num_splits, args->run_parts);
    key->variant    |= pairs;
    plan->has_maps   = true;
    args->page_piece = fa_page_piece(call, key->tile_k);
    args->q_boxes    = fa_packed_q_boxes(call, key->tile_q);
    FA_TRY(fa_plan_add_clusters(plan, key, blocks, merges ? args->num_splits : pairs ? 2 : 1));
    plan->launch[plan->main].stays = !merges && fa_plan_is_alike(call);
    if (plan->row->only == FA_FOR_WIDE && plan->launch[plan->main].stays)
        args->order_heads = (int)key_heads_together(call, key);
    if (!key->has_split || merges || key->one_launch == 2)
        return FLASH_ATTN_OK;
    return latent ? fa_plan_add_combine(call, plan, key) : fa_plan_add_fold(call, plan, key);
}
