/* The parts into which a forward's keys are split. */
#include "cuda/plan.h"
#include "cuda/tune.h"

#include <math.h>

/* The most parts that a sequence of at most `keys` keys has, where parts grow with its own length (forward_work.cuh). */
static int64_t most_parts(const fa_args *args, int64_t part, int64_t keys)
{
    int64_t most = 0;
    for (int n = 0; n <= args->part_doublings; n++, part *= 2) {
        int64_t longest = n == args->part_doublings || part * part / args->part_growth > keys ? keys : part * part / args->part_growth;
        most            = largest(most, ceil_div(longest, part));
    }
    return most;
}

/* As measured: of clusters as large as a tile has parts some multiprocessors are not part, and who asks for more than fit waits for a second round. */
bool fa_latent_merges(int64_t tiles, int64_t parts, const fa_chip *chip)
{
    enum { MOST_PARTS = 8 };
    return parts > 1 && parts <= MOST_PARTS && tiles * parts <= chip->multiprocessors * 3 / 4;
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
    double  read = 2e-3 * (double)(call->batch * args->max_seqlen_k * call->heads_k) * (double)call->head_dim / (OF_MEMORY * chip->gigabytes);
    int64_t rows = call->max_seqlen_q * call->heads_q * call->batch, best = 1;
    int64_t tiles = ceil_div(call->max_seqlen_q * call->group, row->tile_q) * call->heads_k * call->batch;
    double  least = INFINITY;
    for (int64_t wanted = 1; wanted <= MOST; wanted += 1 + wanted / 16) {
        int64_t each = ceil_div(args->tiles_k, wanted), parts = ceil_div(args->tiles_k, largest(each, 1));
        double  work = ceil_div(tiles * parts, chip->multiprocessors) * (TILE * each + ITEM), time = fmax(work, read) + NOT_HIDDEN * fmin(work, read);
        if (fa_latent_merges(tiles, parts, chip))
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

/*
 * Parts of the keys, by absolute position. A caller's number is taken as it is. Otherwise only calls with few queries
 * are split, into parts of a length that depends on the number of heads and on the sequence's own length alone, never on the batch or on how
 * many multiprocessors there are, for the order of sums must not: with 32 keys for each head, a context of 4096 keys gives
 * 128 blocks at batch 1, about one for each multiprocessor of a large GPU. Where rows are packed, parts grow with the root of
 * the length, for each has a begin and an end, and leaves a result that grows with its rows (decision 0058). A caller who asks for -1 lets
 * the batch count too, where that is worth something: latent attention has the most rows and the largest results.
 */
void fa_plan_choose_splits(const fa_call *call, fa_plan *plan)
{
    enum { GROWTH = 32, GROWTH_OF_MANY_ROWS = 64, GROWTH_OF_LATENT = 256, DOUBLINGS = 3 };
    const fa_tune_row *row  = plan->row;
    fa_args           *args = &plan->args;
    int64_t keys = args->max_seqlen_k, part = keys, heads = is_packed(row) ? call->heads_k : call->heads_q;
    bool    fastest = call->num_splits < 0 && row->only == FA_FOR_LATENT, by_shape = call->num_splits <= 0 && !fastest;
    if (fastest)
        part = fastest_part(call, row, &plan->chip, args);
    else if (call->num_splits > 1)
        part = ceil_div(keys, call->num_splits);
    else if (by_shape && call->max_seqlen_q <= row->tile_q)
        part = heads <= 8 ? 256 : heads >= 64 ? 2048 : 32 * heads;
    if (by_shape && is_packed(row)) {
        args->part_growth    = row->only == FA_FOR_LATENT ? GROWTH_OF_LATENT : row->tile_q > 16 ? GROWTH_OF_MANY_ROWS : GROWTH;
        args->part_doublings = DOUBLINGS;
    }
    part = ceil_div(part, row->tile_k) * row->tile_k;
    if (keys == 0 || part >= keys)
        return;
    args->split_keys = (int)part;
    args->num_splits = (int)most_parts(args, part, keys);
}
