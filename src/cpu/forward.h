/* What a call of the forward holds: forward_plan.c cuts the work and lays out the memory, forward.c runs it. */
#ifndef FA_CPU_FORWARD_H
#define FA_CPU_FORWARD_H

#include "cpu/split.h"
#include "cpu/tile.h"

/* Where key heads lie side by side: most heads of a task, most rows of each. */
enum { FA_TASK_HEADS = 8, FA_TURN_ROWS = 16 };

/* How one sequence is cut. */
typedef struct shape {
    const fa_kernels *kernels;
    bool              few; /* rows are so few that K and V are read in place */
    fa_tile_shape     tile;
    int               heads_per_tile, head_tiles, tiles;
    int               small, small_tiles; /* the first so many tiles are cut into blocks of `small` */
    int64_t           blocks;
    int               splits, split_keys;
    bool              parts_are_tasks; /* else a task does all parts of its block */
    int               task_parts;      /* parts of a task */
    bool              turns;           /* key heads lie side by side and take turns at few keys */
    int               task_heads;      /* so many key heads do */
    bool              shared;          /* its packed keys are made once for all blocks */
} shape;

/* Sizes that hold for every sequence of the call. */
typedef struct plan {
    const fa_cpu  *cpu;
    const fa_call *call;
    int            threads;
    int            tiles_per_block;
    bool           parallel_splits;
    int            max_splits;
    size_t         q_bytes, k_bytes, v_bytes, fused_bytes;
    int            tile_q, tile_k, ldo;
    bool           past_caches; /* Q, K, V and O of a thread are more than its second-level cache holds */
    int64_t shared_tiles; /* of keys of one head, at most, that are packed once for all blocks; 0: each block packs */
    size_t  shared_bytes;   /* of one head */
    bool    heads_together; /* not for the threads' sake but that of heads that lie side by side */
} plan;

/* A tile of keys and values, packed. */
typedef struct packed_keys {
    void *k, *v;
    int  *bad;     /* rows that are left out of v */
    int  *num_bad; /* [1] */
} packed_keys;

typedef struct scratch {
    fa_tile     *tiles; /* [tiles_per_block] */
    char        *q;     /* packed, [tiles_per_block] */
    float       *o, *m, *l;
    packed_keys  own;  /* for blocks that pack for themselves */
    packed_keys  keys; /* the key tile at hand: own, or one that all share */
    float       *s, *rescale, *temp;
    const void **row_q, **row_k, **row_v, **row_next, **row_turn[2];
    fa_rows      k_rows, v_rows; /* of the key tile at hand, where they are needed */
    fa_soon      k_soon, v_soon; /* what is read after K and V of the tile at hand, where they are read in place */
    int32_t     *slices;
    void        *fused;
    float       *sum_o, *sum_m, *sum_l; /* as o, m, l: over the parts of a split sequence */
} scratch;

typedef struct run {
    plan         plan;
    int64_t     *task_begin; /* [batch + 1] */
    int64_t      pack_tasks; /* come before the others */
    atomic_llong next;
    char        *scratch; /* of all threads */
    size_t       scratch_bytes;
    float       *parts; /* [batch, heads_k, max_splits + 1] of part_floats; the last: parts_sum */
    int64_t      part_floats;
    int          part_rows;
    atomic_int  *parts_done, *parts_folded; /* [batch, heads_k] */
    char        *shared;                    /* [batch, heads_k] of shared_bytes */
    atomic_int  *shared_done;               /* [batch, heads_k, shared_tiles]: how many of K and V are packed */
} run;

typedef struct block {
    const run   *run;
    scratch     *s;
    const shape *shape;
    fa_tile      at; /* whose block: b, head_k, seq */
    int          tiles;
    int          keys_end; /* of the task */
    bool         whole;    /* walks over all keys at once: tiles begin with their first keys, end with their last */
    bool         lone;     /* and sees one tile of keys, so all its tiles take the place of the first */
    float        scale;
    double       to_natural; /* what takes m from base 2 */
} block;

plan    fa_forward_plan(const fa_cpu *cpu, const fa_call *call, int threads);
shape   fa_forward_shape(const plan *p, int seqlen_q, int seqlen_k);
int64_t fa_forward_tasks_per_head(const shape *s); /* or per group of task_heads */
int64_t fa_forward_head_groups(const fa_call *call, const shape *s);
/* The tiles of a block. */
fa_range fa_forward_block_tiles(const plan *p, const shape *s, int64_t block);
/* Fills task_begin and pack_tasks; returns how many tasks there are beside those that pack. */
int64_t fa_forward_count_tasks(run *r);

/* Lay out memory from `base`, NULL: only measure. */
size_t  fa_forward_carve_run(run *r, char *base);
scratch fa_forward_carve_scratch(fa_arena *arena, const plan *p);
/* Tile `number` of a pair, one key head of one sequence, whose shape is s. */
packed_keys fa_forward_shared_keys(const run *r, const shape *s, int64_t pair, int64_t number);

/* Divides tile t of the block by its sums and stores it. */
void fa_forward_store_tile(const block *b, int t, const fa_partial *result);
/* Rows that belong to the sequence but do not count: output 0, LSE -inf. */
void fa_forward_store_unused_rows(const block *b);

/* Rows of keys for kernels that read them in place, not listed where they take them by steps. */
bool    fa_rows_by_steps(const block *b);
fa_rows fa_rows_in_place(const block *b, const flash_attn_tensor *t, const fa_tile *tile, const void **row);
/* One tile of keys for `heads` key heads that lie side by side (decode.c); each block is one tile of queries. They take
 * turns at few keys. False: not every row sees every key, and nothing was done. */
bool fa_walk_turns(const block *b, int heads, fa_range keys);

#endif
