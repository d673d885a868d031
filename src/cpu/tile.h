/* What forward.c, decode.c and backward.c share: memory of a call, tiles, and the options and masks on a tile. */
#ifndef FA_CPU_TILE_H
#define FA_CPU_TILE_H

#include "cpu/cpu.h"

#include <sched.h>

/* ---- memory: sizes are found by carving from NULL ---- */

typedef struct fa_arena {
    char  *base; /* 64-byte aligned, or NULL to measure */
    size_t used;
} fa_arena;

static inline void *fa_carve(fa_arena *arena, size_t bytes)
{
    void *at = arena->base ? arena->base + arena->used : NULL;
    arena->used += (bytes + 63) / 64 * 64;
    return at;
}

static inline float *fa_carve_floats(fa_arena *arena, int64_t count)
{
    return fa_carve(arena, (size_t)count * sizeof(float));
}

/* A call's memory: the caller's workspace, or our own, which the context keeps for its next call. */
typedef struct fa_memory {
    char *base; /* aligned */
    void *owned;
} fa_memory;

#define FA_ALIGN_SLACK 63
flash_attn_status fa_memory_get(fa_memory *memory, const fa_cpu *cpu, const fa_exec *exec, size_t bytes);
void              fa_memory_free(fa_memory *memory, const fa_cpu *cpu);

/* ---- waiting for another thread, which is running ---- */

static inline void fa_wait_for(atomic_int *value, int wanted)
{
    for (int round = 0; atomic_load_explicit(value, memory_order_acquire) != wanted; round++) {
        if (round > 256)
            sched_yield(); /* more threads than processors, perhaps */
    }
}

/* ---- a tile ---- */

typedef struct fa_tile {
    int64_t     b, head_k;
    fa_sequence seq;
    int64_t     head; /* first query head */
    int      heads;   /* rows are the same queries of so many heads: row r is head r / n, query queries.begin + r % n */
    fa_range queries, keys;

    const int32_t *slices; /* numbers of those that may touch these queries */
    int            num_slices;
    bool           fresh; /* of the forward: its O holds nothing yet, not even zeros */
} fa_tile;

static inline int fa_tile_queries(const fa_tile *t) { return t->queries.end - t->queries.begin; }
static inline int fa_tile_rows(const fa_tile *t) { return t->heads * fa_tile_queries(t); }
static inline int fa_tile_keys(const fa_tile *t) { return t->keys.end - t->keys.begin; }

/* Bytes of a row of scores, wide enough for padding, and not a power of two of bytes. */
static inline int fa_score_ld(int tile_k) { return (int)fa_round_up(tile_k, 64) + 16; }
static inline int fa_accumulator_ld(int64_t cols) { return (int)fa_round_up(cols, 16); }
/* Arrays of one number a row. */
static inline int64_t fa_row_array(int rows) { return fa_round_up(rows, 16); }

/* Pointers to the rows of a query-like tensor (q, o, dout, dq) and of keys or values. */
fa_rows fa_query_rows(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row);
fa_rows fa_key_rows(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row);
/* For kernels that take rows by steps (fa_kernels.few_steps): to write a list of them takes as long as to read some. */
fa_rows fa_key_rows_by_steps(const fa_call *call, const flash_attn_tensor *t, const fa_tile *tile, const void **row);

/* ---- masks and options ---- */

typedef enum fa_visible { FA_VISIBLE_NONE, FA_VISIBLE_SOME, FA_VISIBLE_ALL } fa_visible;

/* Which pairs of a tile are seen: none: skip it; all: no mask. */
fa_visible fa_tile_visible(const fa_call *call, const fa_tile *tile);

/* Which of the tile's keys, from its first on, some of these queries see, out to the ends of panels that a kernel can
 * leave out; none: {0, 0}. */
fa_range fa_keys_shown(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_range queries);

/* A tile of which a diagonal shows a part is worked on by so many rows at once, each with the keys that they see; others
 * as a whole. Bits are the same. */
int fa_rows_at_once(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                    float scale);
/* Rows [row, row + at_once) of `tile`, and what they see of its keys where the tile sees `visible`. */
fa_visible fa_part_of_tile(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                           int row, int at_once, fa_tile *part);
/* Its rows, or keys, of an operand packed by `tile`. A packed operand of no rows may still have bytes. */
static inline const void *fa_packed_part(const fa_kernels *kernels, fa_role role, const void *packed, int row,
                                         int64_t cols)
{
    return row > 0 ? (const char *)packed + kernels->packed_bytes(role, row, (int)cols) : packed;
}

/* Write to list the slices of sequence b that touch `queries` (and, if not empty, `keys`); returns how many. */
int fa_slices_touching(const fa_call *call, int64_t b, fa_range queries, fa_range keys, int32_t *list);

/* Bit n: query i sees key `first` + n through one of the tile's slices. */
uint32_t fa_slices_seen(const fa_call *call, const fa_tile *tile, int i, int first);

/* The score's factor for one key head: scale and the FP8 descales of q and k. */
float fa_score_scale(const fa_call *call, int64_t b, int64_t head_k);

/* Queries of `queries` that see key j through one slice: the same question from the other side. */
static inline fa_range fa_slice_queries(const flash_attn_slice *s, fa_range queries, int j)
{
    fa_range see = fa_queries_of_slice(s->q_begin, s->q_end, s->k_begin, s->k_end, s->kind, j);
    return (fa_range){fa_max_int(queries.begin, see.begin), fa_min_int(queries.end, see.end)};
}

/* True if scores need more than a positive factor: softcap, bias, ALiBi, or a scale that is not positive. They are
 * then in natural units after fa_apply_options, else still without the scale. */
bool fa_has_options(const fa_call *call, float scale);

/* What a fused entry must do for a tile beyond the window: `options`, filled, or NULL. */
const fa_block_options *fa_options_of(fa_block_options *options, const fa_call *call, const fa_tile *tile,
                                      fa_visible visible, float scale);

/* What takes a tile's scores to base 2 after fa_apply_options. */
static inline float fa_multiplier(const fa_call *call, float scale)
{
    return fa_has_options(call, scale) ? FA_LOG2_E : scale * FA_LOG2_E;
}

/* Options, then -inf where not seen. slope: as of fa_kernels.softcap, may be NULL. */
void fa_apply_options(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, fa_visible visible,
                      float scale, float *s, float *slope, int lds);

/* Dropout on p, and on dp if not NULL. */
void fa_apply_dropout(const fa_kernels *kernels, const fa_call *call, const fa_tile *tile, float *p, float *dp, int ld);

/* C[r][:] += coefficient(r, n) * (row n of source), for the rows bad[] that pack left out, where the coefficient is not
 * 0. Coefficient (r, n) is a[r * step_row + n * step_bad]. */
void fa_add_bad_rows(const fa_kernels *kernels, float *c, int ldc, int rows, const float *a, int64_t step_row,
                     int64_t step_bad, const fa_rows *source, const int *bad, int num_bad, float *temp);

#endif
