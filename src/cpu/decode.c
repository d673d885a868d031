/* Few queries against long keys: how the keys are split, how the parts are put together, and how heads that lie side by
 * side take turns. */
#include "cpu/forward.h"
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

/* ---- heads side by side ----
 * A key's heads follow one another in memory. Head by head, a row of each key would be asked for at a time, and the
 * processor reads ahead where addresses rise; so all heads take turns at a few keys: first at K, then at V.
 */
typedef struct turns {
    const fa_call *call;
    int            heads, keys; /* of a turn */
    int            count;       /* turns at K or V of the tile */
    int            begin;       /* its first key */
    bool           steps;       /* kernels take rows by steps */
    fa_rows        k, v, next;  /* of the first head; next: K of the tile after this one */
} turns;

/* The rows of turn `number`: those at K, at V, and then at the next tile's K. Not listed if they are at equal
 * distances: as all of a tile's may be, or, turns being short, those of a page. */
static fa_rows rows_of_turn(const turns *t, int number, const void **row)
{
    int                      phase = number / t->count, turn = number % t->count;
    const fa_call           *call  = t->call;
    const fa_rows           *all   = phase == 0 ? &t->k : phase == 1 ? &t->v : &t->next;
    const flash_attn_tensor *of    = phase == 1 ? &call->v : &call->k;
    int64_t                  bytes = (int64_t)fa_dtype_bytes(of->dtype), step = turn % t->heads * of->stride[2] * bytes;
    fa_rows                  one   = *all;
    int                      first = turn / t->heads * t->keys, count = fa_min_int(t->keys, all->count - first);
    one.row   = row;
    one.count = fa_max_int(0, count);
    if (one.count == 0)
        return one;
    int key = t->begin + first + (phase == 2 ? t->k.count : 0);
    if (t->steps && call->pages.table && key / call->page_size == (key + count - 1) / call->page_size)
        one.step = of->stride[1] * bytes;
    if (one.step) {
        row[0] = (all->step ? (const char *)all->row[0] + first * all->step : (const char *)all->row[first]) + step;
        return one;
    }
    for (int n = 0; n < count; n++)
        row[n] = (const char *)all->row[first + n] + step;
    return one;
}

/* P of all keys, in place of the scores. */
static void softmax_of_turns(const block *b, int rows, int keys, int lds)
{
    const fa_call    *call    = b->run->plan.call;
    const fa_kernels *kernels = b->shape->kernels;
    const scratch    *s       = b->s;
    fa_apply_options(kernels, call, s->tiles, FA_VISIBLE_ALL, b->scale, s->s, NULL, lds);
    kernels->softmax(s->s, lds, rows, keys, fa_multiplier(call, b->scale), s->m, s->l, s->rescale);
    if (call->dropout.threshold)
        fa_apply_dropout(kernels, call, s->tiles, s->s, NULL, lds);
}

bool fa_walk_turns(const block *b, int heads, fa_range keys)
{
    const plan       *p       = &b->run->plan;
    const fa_call    *call    = p->call;
    const fa_kernels *kernels = b->shape->kernels;
    scratch          *s       = b->s;
    fa_tile           next    = s->tiles[0];
    int               rows = fa_tile_rows(s->tiles), lds = fa_score_ld(p->tile_k);
    bool far = p->cpu->isa.asks_far, is_f32 = call->k.dtype == FLASH_ATTN_F32;
    int  step = is_f32 && kernels->few_keys_f32           ? kernels->few_keys_f32
                : !is_f32 && far && kernels->few_keys_far ? kernels->few_keys_far
                                                          : kernels->few_keys;
    int ahead = far && kernels->few_keys_far ? 2 : 1; /* turns: by far asks the next one comes too late (0103) */
    for (int h = 0; h < heads; h++)
        b[h].s->tiles[0].keys = keys;
    if (fa_tile_visible(call, s->tiles) != FA_VISIBLE_ALL)
        return false;
    next.keys = (fa_range){keys.end, fa_min_int(keys.end + b->shape->tile.k, b->keys_end)};
    turns t = {.call = call, .heads = heads, .keys = step, .count = (keys.end - keys.begin + step - 1) / step * heads};
    t.begin = keys.begin;
    t.steps = fa_rows_by_steps(b);
    t.k     = fa_rows_in_place(b, &call->k, s->tiles, s->row_k);
    t.v     = fa_rows_in_place(b, &call->v, s->tiles, s->row_v);
    t.next  = fa_rows_in_place(b, &call->k, &next, s->row_next);
    for (int n = 0; n < t.count; n++) {
        const scratch *one  = b[n % heads].s;
        fa_rows        k    = rows_of_turn(&t, n, s->row_turn[0]);
        fa_soon        soon = {rows_of_turn(&t, n + ahead, s->row_turn[1]), true, far};
        kernels->scores_few(one->s + n / heads * step, lds, one->q, &k, rows, &soon);
    }
    for (int h = 0; h < heads; h++)
        softmax_of_turns(&b[h], rows, keys.end - keys.begin, lds);
    for (int n = 0; n < t.count; n++) {
        const scratch *one  = b[n % heads].s;
        fa_rows        v    = rows_of_turn(&t, t.count + n, s->row_turn[0]);
        fa_soon        soon = {rows_of_turn(&t, t.count + n + ahead, s->row_turn[1]), true, far};
        if (n == heads) /* O has been rescaled */
            for (int h = 0; h < heads; h++)
                for (int r = 0; r < rows; r++)
                    b[h].s->rescale[r] = 1.0f;
        kernels->accumulate_few(one->o, p->ldo, one->rescale, one->s + n / heads * step, lds, &v, rows, &soon,
                                one->fused);
    }
    return true;
}
