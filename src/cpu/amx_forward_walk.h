/*
 * The AMX forward's tile: what it works on, in which order, and which keys its rows see.
 */
#ifndef FA_CPU_AMX_FORWARD_WALK_H
#define FA_CPU_AMX_FORWARD_WALK_H

#include "cpu/amx_forward_chunk.h"
#include "cpu/amx_forward_options.h"
#include "cpu/amx_forward_unit.h"
#include "cpu/amx_forward_units.h"

/* P: two row tiles by units of a chunk by pieces, all twice if values run beside. */
enum { SLOTS = 2, P_TILES = 32 };

/* ---- a tile ---- */

typedef struct scratch {
    _Alignas(64) float s[SLOTS][4 * FA_AMX_TILE_FLOATS];
    _Alignas(64) uint16_t p[P_TILES][FA_AMX_TILE_HALVES];
    _Alignas(64) float sum[2][UNIT * 16];
    _Alignas(64) float shift[UNIT], m[UNIT];            /* of the 32 queries at hand */
    option_rows options;                                /* likewise */
    _Alignas(64) float later_s[4 * FA_AMX_TILE_FLOATS]; /* redo_unit */
    _Alignas(64) float last_o[];                        /* [32][columns]: the last rows, if they are fewer */
} scratch;

/* amx_forward_units.S */
typedef int64_t whole_fn(fa_amx_units *units);

/* amx_forward_chunk.S */
typedef struct chunk_functions {
    int64_t (*units)(fa_amx_chunk *chunk);
    void (*values)(const char *p, const char *v, float *o);
    void (*first_values)(const char *p, const char *v, float *o);
} chunk_functions;

typedef struct walk {
    const fa_forward_block *block;
    scratch                *own;
    constants               k;
    int                     pieces, groups, depth_steps, columns, chunk;
    bool                    unset; /* some of the rows at hand have no shift yet */
    bool                    fixed; /* P in fixed point */
    bool                    risky; /* some rows may be odd: amx_fixed.h */
    bool                    infinite; /* some number of Q or K is, several pieces: amx_infinite.c */
    bool                    changed;  /* scores are, before they are masked: for that or for options */
    int                     first_unit; /* of the group at hand */
    float                   bonus; /* P is computed with this factor, as a logarithm, and its sums are not: */
    float                   inverse, margin;
    whole_fn               *whole; /* NULL: none for this shape */
    const chunk_functions  *chunks; /* likewise */
} walk;

/* A unit: queries 32 * group .., keys 32 * unit ... Chunks begin at multiples of their size, so that what a row
 * computes does not depend on what its neighbours see. */
typedef struct place {
    int group, unit, end;    /* end: of the group's units */
    int first, chunk_number; /* the chunk's first unit */
} place;

static int rows_of_group(const walk *w, int group) { return fa_min_int(UNIT, w->block->rows - group * UNIT); }

static fa_range queries_of_group(const walk *w, int group)
{
    const fa_forward_block *b     = w->block;
    int                     begin = group * UNIT % b->queries, end = begin + rows_of_group(w, group);
    return end <= b->queries ? (fa_range){begin, end} : (fa_range){0, b->queries};
}

/* The first unit of the first group from `group` on that sees any. */
static place group_begin(const walk *w, int group, int chunk_number)
{
    const fa_forward_block *b = w->block;
    for (; group < w->groups; group++) {
        fa_range seen = fa_keys_seen(b->window, b->diagonal, queries_of_group(w, group), (fa_range){0, b->keys});
        if (seen.begin < seen.end) {
            int begin = seen.begin / UNIT, end = (seen.end + UNIT - 1) / UNIT;
            return (place){group, begin, end, begin, chunk_number};
        }
    }
    return (place){.group = group, .chunk_number = chunk_number};
}

FA_AMX_INLINE place place_next(const walk *w, place at)
{
    if (++at.unit == at.end)
        return group_begin(w, at.group + 1, at.chunk_number + 1);
    if (at.unit % w->chunk == 0) {
        at.first = at.unit;
        at.chunk_number++;
    }
    return at;
}

static uint16_t *p_of_unit(const walk *w, place at, bool alternate)
{
    int buffer = alternate ? at.chunk_number % 2 * 2 * w->chunk : 0;
    return w->own->p[buffer * w->pieces + at.unit % w->chunk * w->pieces];
}

static float *rows_of_o(const walk *w, int group, int *ld)
{
    const fa_forward_block *b    = w->block;
    bool                    last = rows_of_group(w, group) < UNIT;
    *ld                          = last ? w->columns * 16 : b->ldo;
    return last ? w->own->last_o : b->o + (int64_t)group * UNIT * b->ldo;
}

static void copy_last_rows(const walk *w, bool back)
{
    const fa_forward_block *b = w->block;
    for (int r = b->rows / UNIT * UNIT; r < b->rows; r++) {
        float *theirs = b->o + (int64_t)r * b->ldo, *ours = w->own->last_o + r % UNIT * w->columns * 16;
        memcpy(back ? theirs : ours, back ? ours : theirs, (size_t)w->columns * 64);
    }
}

/* m: of 16 rows from `first` on, of which `rows` exist. Returns whether some have no shift yet. */
FA_AMX_INLINE bool set_shifts(const walk *w, int first, int rows, __m512 m)
{
    const __m512 empty = _mm512_set1_ps(-INFINITY), begin = _mm512_set1_ps(FIXED_BEGIN);
    if (w->fixed)
        m = fixed_rounded(m);
    __mmask16 unset = _mm512_cmp_ps_mask(m, empty, _CMP_EQ_OQ);
    __mmask16 there = rows - first >= 16 ? 0xFFFF : rows <= first ? 0 : (__mmask16)((1u << (rows - first)) - 1);
    __m512    shift = _mm512_maskz_sub_ps((__mmask16)~unset, _mm512_set1_ps(w->bonus), m);
    if (w->fixed)
        shift = _mm512_fmadd_ps(shift, _mm512_set1_ps(FIXED_UNITS), begin);
    else
        shift = _mm512_mask_mov_ps(shift, _mm512_cmp_ps_mask(_mm512_abs_ps(shift), _mm512_set1_ps(FAR), _CMP_NLT_UQ),
                                   _mm512_set1_ps(NAN));
    _mm512_store_ps(w->own->m + first, m);
    _mm512_store_ps(w->own->shift + first, _mm512_mask_mov_ps(empty, there, shift)); /* no row, no P */
    return (unset & there) != 0;
}

/* ---- what a unit works on ---- */

/* alternate: values run beside, so P of two chunks takes turns at two places. */
static values values_of(const walk *w, place at, bool alternate)
{
    int     ld;
    float  *o     = rows_of_o(w, at.group, &ld);
    int64_t step  = (int64_t)w->columns * w->pieces * FA_AMX_TILE;
    place   first = at;
    first.unit    = at.first;
    return (values){.p       = (const char *)p_of_unit(w, first, alternate),
                    .p_down  = (int64_t)w->chunk * w->pieces * FA_AMX_TILE,
                    .v       = (const char *)w->block->v + at.first * step,
                    .v_step  = step,
                    .o       = o,
                    .ldo     = ld,
                    .columns = w->columns,
                    .units   = at.unit - at.first + 1,
                    .fresh   = w->block->fresh && at.first == w->first_unit};
}

/* Scores of unit number n, at `at`. */
FA_AMX_INLINE void set_scores(scores *x, const walk *w, place at, int n)
{
    const fa_forward_block *b    = w->block;
    int64_t                 step = (int64_t)w->depth_steps * w->pieces * FA_AMX_TILE;
    x->q                         = (const char *)b->q + at.group * 2 * step;
    x->q_down                    = rows_of_group(w, at.group) > 16 ? step : 0; /* 16 rows or fewer: the same twice */
    x->k                         = (const char *)b->k + at.unit * 2 * step;
    x->s                         = w->own->s[n % SLOTS];
    x->unit                      = n;
}

/* Scores of infinite numbers, and options. */
static __attribute__((noinline)) void change_scores(const walk *w, int group, int unit, float *s)
{
    scores x = {0};
    set_scores(&x, w, (place){.group = group, .unit = unit}, 0);
    if (w->infinite)
        fa_amx_mend_unit(s, x.q, x.q_down, x.k, w->depth_steps, w->pieces);
    if (w->block->options)
        apply_options_to_unit(w->block, &w->own->options, unit * UNIT, s);
}

/* ---- masks ---- */

static bool all_seen(const walk *w, place at)
{
    const fa_forward_block *b    = w->block;
    fa_range                keys = {at.unit * UNIT, at.unit * UNIT + UNIT};
    return keys.end <= b->keys && fa_window_covers(b->window, b->diagonal, queries_of_group(w, at.group), keys);
}

/* Bits of the unit's keys that 16 queries see, from query `i` of the sequence on; beyond the last comes the first. */
FA_AMX_INLINE __m512i keys_seen_by(const fa_forward_block *b, int i, int first)
{
    _Alignas(64) int number[16];
    for (int r = 0; r < 16; r++)
        number[r] = i + r;
    for (int r = b->queries - i; r < 16; r++)
        number[r] %= b->queries;
    __m512i own   = _mm512_add_epi32(_mm512_load_si512(number), _mm512_set1_epi32(b->diagonal - first));
    __m512i begin = _mm512_sub_epi32(own, _mm512_set1_epi32(b->window.left));
    __m512i end   = _mm512_add_epi32(own, _mm512_set1_epi32(b->window.right + 1));
    return fa_amx_bits(begin, _mm512_min_epi32(end, _mm512_set1_epi32(b->keys - first)));
}

/* -inf where a row does not see, whatever the product was, and in rows that do not exist. */
static void mask_unit(const walk *w, float *s, place at)
{
    const fa_forward_block *b     = w->block;
    const __m512            none  = _mm512_set1_ps(-INFINITY);
    int                     first = at.unit * UNIT, rows = rows_of_group(w, at.group), i = at.group * UNIT % b->queries;
    _Alignas(64) uint32_t   bits[UNIT];
    for (int r = 0; r < UNIT; r += 16)
        _mm512_store_si512(bits + r, keys_seen_by(b, (i + r) % b->queries, first));
    for (int r = rows; r < UNIT; r++)
        bits[r] = 0;
    for (int r = 0; r < UNIT; r++) { /* whole rows: what part of one was stored last, a load would have to wait for */
        float *row = scores_row(s, r), *right = row + FA_AMX_TILE_FLOATS;
        _mm512_store_ps(row, _mm512_mask_mov_ps(none, (__mmask16)bits[r], _mm512_load_ps(row)));
        _mm512_store_ps(right, _mm512_mask_mov_ps(none, (__mmask16)(bits[r] >> 16), _mm512_load_ps(right)));
    }
}

#endif
