/*
 * Whole units of the AMX forward's tile in assembly: from where to where it goes.
 */
#ifndef FA_CPU_AMX_FORWARD_WHOLE_H
#define FA_CPU_AMX_FORWARD_WHOLE_H

#include "cpu/amx_forward_walk.h"

/* ---- beside each other ---- */

_Static_assert(offsetof(scratch, shift) == offsetof(scratch, sum) + 2 * sizeof(float[UNIT * 16]),
               "amx_forward_units.S and amx_forward_chunk.S find sums before shifts");

/* The place `count` units later of the same group. */
static place place_later(const walk *w, place at, int count)
{
    int chunks = (at.unit + count) / w->chunk - at.unit / w->chunk;
    at.unit += count;
    at.chunk_number += chunks;
    if (chunks > 0)
        at.first = at.unit / w->chunk * w->chunk;
    return at;
}

static place place_after(const walk *w, place at, int count)
{
    int within = at.group < w->groups ? fa_min_int(count, at.end - 1 - at.unit) : 0;
    at         = place_later(w, at, within);
    for (int n = within; n < count && at.group < w->groups; n++)
        at = place_next(w, at);
    return at;
}

/* How many units from `at` on the assembly can take: those that all rows see. It reads 32 rows of Q, also of a group
 * whose scores it computes ahead. */
static int whole_units(const walk *w, place at)
{
    const fa_forward_block *b = w->block;
    if (w->unset || w->risky || rows_of_group(w, at.group) < UNIT || !all_seen(w, at))
        return 0;
    int end = fa_min_int(at.end, b->keys / UNIT);
    while (!fa_window_covers(b->window, b->diagonal, queries_of_group(w, at.group),
                             (fa_range){at.unit * UNIT, end * UNIT}))
        end--;
    bool short_last = b->rows % UNIT > 0 && b->rows % UNIT <= 16;
    if (short_last)
        end = fa_min_int(end, at.end - 2);
    if (at.first % w->chunk) /* values of a chunk are of all its units */
        end = fa_min_int(end, (at.unit / w->chunk + 1) * w->chunk);
    return fa_max_int(end - at.unit, 0);
}

/* The scores of unit number n at `at` are computed again, and those that lie in their place are taken into tiles, on
 * their way there: as run_unit leaves both. */
static void restore_scores(const walk *w, place at, int n, target *held)
{
    scores x;
    set_scores(&x, w, at, n);
    char *slot = (char *)x.s;
    x.s        = w->own->later_s;
    scores_alone(&x, held, w->depth_steps, 1);
    store_held(held);
    x.s    = (float *)slot;
    x.unit = n + 2;
    *held  = scores_target(&x);
    LOAD_FROM(held, 0);
    LOAD_FROM(held, 1);
    LOAD_FROM(held, 2);
    LOAD_FROM(held, 3);
    memcpy(slot, w->own->later_s, sizeof w->own->later_s);
}

typedef struct progress {
    place at, ahead;
    int   n;
    bool  again;
} progress;

/* Of `units` units from the first of x.at's chunk on, or from where it would be, how many have an odd number. */
static int odd_units(const walk *w, progress x, int units) { return (units + (x.n + x.at.unit % w->chunk) % 2) / 2; }

/* Where the assembly begins with values. Returns whether there are any; those that it cannot take up are done here. */
static bool set_values(fa_amx_units *f, const walk *w, progress x, values *v, target *held)
{
    values  mine = values_of(w, x.at, true);
    int64_t step = mine.v_step * w->chunk;
    int     odds = odd_units(w, x, x.at.unit % w->chunk), col = odds * w->columns / 2;
    bool    beside = v->units == w->chunk && v->col == col && col < w->columns;
    char   *p = (char *)p_of_unit(w, x.at, true), *chunk = p - x.at.unit % w->chunk * FA_AMX_TILE;
    f->p_both = (int64_t)((uintptr_t)w->own->p[0] + (uintptr_t)w->own->p[2 * w->chunk]);
    f->p      = p;
    f->p_read = col < w->columns ? (const char *)(uintptr_t)((uintptr_t)f->p_both - (uintptr_t)chunk) : chunk;
    f->v      = beside ? v->v + col * FA_AMX_TILE : mine.v;
    f->o      = (const char *)(beside ? v->o + 16 * col : mine.o);
    f->next_v = mine.v + (col < w->columns ? 0 : step);
    f->next_o = (const char *)mine.o;
    f->fresh  = beside ? v->fresh : mine.fresh;
    f->next_fresh = mine.fresh && col < w->columns;
    if (!beside)
        finish_values(v, held, 1);
    store_held(held);
    return beside;
}

/* Of both units whose scores an even unit has beside it. */
static void set_queries_and_keys(const char *q[2], const char *k[2], const walk *w, progress x, int after)
{
    for (int n = 0; n < 2; n++) {
        scores later;
        place  at = place_after(w, x.ahead, after + n);
        set_scores(&later, w, at.group < w->groups ? at : x.at, 0);
        q[n] = later.q;
        k[n] = later.k;
    }
}

/* `count` units from x.at on, or up to one in which a row outgrew its shift. Returns with the last one that was done
 * in x.at, and v the values that it could have beside it. */
static __attribute__((noinline)) progress run_whole(const walk *w, progress x, int count, values *v, target *held)
{
    const int    odd = x.n % 2, place_in_chunk = x.at.unit % w->chunk, evens = (count + 1 - odd) / 2;
    const int    first_count = (place_in_chunk + count + w->chunk - 1) / w->chunk * w->chunk - place_in_chunk;
    fa_amx_units f           = {.count     = first_count,
                                .odd       = odd,
                                .stop      = first_count - count,
                                .last      = first_count - count + 3,
                                .s         = w->own->s[0],
                                .shift     = w->own->shift,
                                .constants = &w->k};
    bool         beside      = set_values(&f, w, x, v, held);
    f.alone                  = beside ? INT32_MAX : first_count - (w->chunk - place_in_chunk);
    set_queries_and_keys(f.last_q, f.last_k, w, x, fa_max_int(2 * (evens - 1), 0));
    set_queries_and_keys(f.q, f.k, w, x, 0);
    int done   = first_count - (int)w->whole(&f),
        end    = place_in_chunk + done; /* of the units done, from the chunk's first */
    int chunks = (end - 1) / w->chunk;
    if (chunks > 0)
        *v = values_of(w, place_later(w, x.at, chunks * w->chunk - 1 - place_in_chunk), true);
    if (chunks > 0 || beside)
        v->col = odd_units(w, x, end - chunks * w->chunk) * w->columns / 2;
    x.ahead = place_after(w, x.ahead, (done + 1 - odd) / 2 * 2);
    x.at    = place_later(w, x.at, done - 1);
    x.n += done - 1;
    x.again = f.again;
    if (x.again && x.n % 2 == 0)
        restore_scores(w, x.at, x.n, held);
    return x;
}

/* ---- the same, chunk by chunk ---- */

/* `count` units from x.at on, as far as their chunk goes, or up to one in which a row outgrew its shift. Returns with the
 * last one that was done in x.at. */
static __attribute__((noinline)) progress run_chunk(const walk *w, progress x, int count, target *held)
{
    count          = fa_min_int(count, w->chunk - x.at.unit % w->chunk);
    fa_amx_chunk f = {.count     = count,
                      .odd       = x.n % 2,
                      .p         = (char *)p_of_unit(w, x.at, false),
                      .s         = w->own->s[0],
                      .shift     = w->own->shift,
                      .constants = &w->k};
    place        at = x.ahead;
    f.follow        = at.group == x.at.group ? fa_min_int(count, at.end - at.unit - 1) : 0;
    for (int n = 0; n <= count - (int)f.follow; n++) {
        scores later;
        set_scores(&later, w, at.group < w->groups ? at : x.at, 0);
        f.ahead[n].q = later.q;
        f.ahead[n].k = later.k;
        at           = place_after(w, at, n == 0 ? (int)f.follow + 1 : 1);
    }
    store_held(held);
    int done = count - (int)w->chunks->units(&f);
    x.ahead  = place_after(w, x.ahead, done);
    x.at     = place_later(w, x.at, done - 1);
    x.n += done - 1;
    x.again = f.again;
    if (x.again)
        restore_scores(w, x.at, x.n, held);
    return x;
}

/* finish_values of a whole chunk. */
static void chunk_values(const walk *w, values *v, target *held)
{
    store_held(held);
    (v->fresh ? w->chunks->first_values : w->chunks->values)(v->p, v->v, v->o);
    v->col = v->columns;
}

#endif
