/* What a call of the backward holds: for backward.c and backward_plan.c. */
#ifndef FA_CPU_BACKWARD_H
#define FA_CPU_BACKWARD_H

#include "cpu/tile.h"

typedef struct plan {
    const fa_cpu     *cpu;
    const fa_kernels *kernels;
    const fa_call    *call;
    int               threads;
    fa_tile_shape     tile;
    int64_t           query_tiles;  /* of one head, at most */
    int64_t           pairs, slots; /* a pair: one key head of one sequence */
    int               ldq, ldv;     /* of accumulators with head_dim and head_dim_v columns */
    bool              fused;        /* the kernels have a fused backward, which takes every step */
    bool              late_delta;   /* Delta is computed of packed dO; else before, of the rows */
    size_t            q_bytes, q_right_bytes, dout_bytes, dout_right_bytes;
} plan;

/* A tile of queries in a slot. */
typedef struct query_tile {
    void  *q, *q_right, *dout, *dout_right;
    float *dq, *dq_tiled; /* sums of composed steps, or of fused ones (fa_backward_block) */
    float *lse, *lse_log2, *row_delta;
    int   *bad_q, *bad_dout; /* rows that pack left out of q_right and dout_right */
    int   *num_bad;          /* [2] */
} query_tile;

/* What threads tell each other about it; not in the slot, so that it is ready before the slot is. */
typedef struct query_state {
    atomic_int packed; /* 0: no, 1: somebody is at it, 2: yes */
    atomic_int turn;   /* tile of keys that may add to dQ */
} query_state;

typedef struct scratch {
    void        *k, *k_right, *v_t;
    float       *dk, *dv, *dk_tiled, *dv_tiled; /* as dq and dq_tiled */
    uint32_t     fresh_parts; /* a bit for each part of dk_tiled and dv_tiled that holds nothing yet */
    float       *p, *ds, *slope, *dropped;
    float       *temp; /* 2 rows */
    const void **row, **row_dout, **row_k;
    fa_rows      k_rows;
    int         *bad_k, num_bad_k;
    int32_t     *slices;
    void        *fused;
} scratch;

typedef struct run {
    plan         plan;
    int64_t     *task_begin; /* [batch + 1] */
    float       *delta;
    atomic_int  *norms; /* [pairs][2] bits of the largest norm of a row of dO, and of V, where kernels ask (row_norm) */
    query_state *state; /* [pairs, group, query_tiles] */
    atomic_int  *tasks_left; /* [pairs] */
    char        *slots, *scratch;
    size_t       slot_bytes, scratch_bytes;
    bool         last; /* the call's last run: what is of all its sequences */
    atomic_llong next, next_delta, next_bias, next_sink;
} run;

/* dP^T = V dO^T where the kernels are fused: V on the left. */
static inline fa_role fa_role_of_v(const plan *p) { return p->fused ? FA_ROLE_DO : FA_ROLE_V_T; }

plan fa_backward_plan(const fa_cpu *cpu, const fa_call *call, const fa_kernels *kernels, int threads);

/* backward_scale.c: powers of two for kernels that keep P and dS as float16. Norms of a tile of queries, and, with a
 * pair's first one, of V; then, once all are known, the pair's scales. */
typedef struct fa_scales {
    int p_log2, ds_log2;
} fa_scales;
void      fa_backward_find_norms(const run *r, scratch *s, const fa_tile *tile, int64_t pair);
fa_scales fa_backward_scales(const run *r, int64_t pair);

/* backward_store.c: dQ = scale * the sum, once the last tile of keys has added to it; dK and dV of a tile of keys, once
 * all queries have; and zeros for keys that do not count. */
void fa_backward_store_dq(const plan *p, const fa_tile *tile, const query_tile *t, float scale);
void fa_backward_store_keys(const plan *p, const fa_tile *tile, scratch *s, float scale, fa_scales times);
void fa_backward_store_unused_keys(const plan *p, const fa_tile *tile, float *zeros);

/* Lay out the run's memory and return its size; base NULL: only measure. Where task_begin and delta lie depends on the
 * call alone, not on the plan's kernels. */
size_t     fa_backward_carve(run *r, char *base);
scratch    fa_backward_scratch(fa_arena *arena, const plan *p);
query_tile fa_backward_query_tile(fa_arena *arena, const plan *p);
size_t     fa_backward_query_tile_bytes(const plan *p);

#endif
