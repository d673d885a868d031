/* Few queries against long keys: how the keys are split, and how the parts are put together. */
#include "cpu/split.h"

#define MAX_SPLITS 128

int fa_split_keys(int num_splits, int least_keys, int64_t rows, fa_tile_shape tile, int64_t seqlen_k)
{
    int64_t whole = fa_round_up(seqlen_k > 0 ? seqlen_k : 1, tile.k);
    if (num_splits > 0)
        return (int)fa_round_up((whole + num_splits - 1) / num_splits, tile.k);
    if (rows > tile.q) /* more than one tile of queries is work enough to hand out */
        return (int)whole;
    int64_t keys = (whole + MAX_SPLITS - 1) / MAX_SPLITS;
    return (int)fa_round_up(keys < least_keys ? least_keys : keys, tile.k);
}

int fa_max_splits(int num_splits, int least_keys, int tile_k, int64_t seqlen_k)
{
    int64_t least = num_splits > 0 ? tile_k : least_keys, most = num_splits > 0 ? num_splits : MAX_SPLITS;
    int64_t parts = (seqlen_k + least - 1) / least;
    return (int)(parts < 1 ? 1 : parts < most ? parts : most);
}

void fa_partial_clear(const fa_partial *p)
{
    memset(p->o, 0, sizeof(float) * (size_t)p->rows * (size_t)p->ldo);
    for (int r = 0; r < p->rows; r++) {
        p->m[r] = -INFINITY;
        p->l[r] = 0.0f;
    }
}

void fa_partial_copy(const fa_partial *to, const fa_partial *from)
{
    memcpy(to->o, from->o, sizeof(float) * (size_t)from->rows * (size_t)from->ldo);
    memcpy(to->m, from->m, sizeof(float) * (size_t)from->rows);
    memcpy(to->l, from->l, sizeof(float) * (size_t)from->rows);
}

void fa_partial_fold(const fa_partial *sum, const fa_partial *part)
{
    for (int r = 0; r < part->rows; r++) {
        float  m     = sum->m[r] > part->m[r] ? sum->m[r] : part->m[r];
        float  shift = m == -INFINITY ? 0.0f : m; /* both empty: exp2(-inf - 0) = 0, not exp2(-inf + inf) */
        float  a = exp2f(sum->m[r] - shift), b = exp2f(part->m[r] - shift);
        float *o = sum->o + (int64_t)r * sum->ldo, *x = part->o + (int64_t)r * part->ldo;
        sum->m[r] = m;
        sum->l[r] = sum->l[r] * a + part->l[r] * b;
        for (int c = 0; c < part->ldo; c++)
            o[c] = o[c] * a + x[c] * b;
    }
}
