/*
 * Attention over a sequence that several ranks share: which rows a rank has (shares.c), which of its queries see which
 * keys of another rank (shares.c), the ring (ring.c forward.c backward.c). It stands on the public calls: every step
 * is a flash_attn_forward, a flash_attn_backward (by fa_run, for transfers have part of a GPU meanwhile) or a merge of
 * parts.
 */
#ifndef FA_DIST_H
#define FA_DIST_H

#include "check.h"

/* ---- who has what, who sees what (shares.c) ---- */

/* The mask of the whole sequence: key j is seen by query i iff i + diagonal - left <= j <= i + diagonal + right. */
typedef struct fa_ring_mask {
    int64_t diagonal, left, right; /* left, right: -1 is no limit */
} fa_ring_mask;

/* Local rows of queries against local rows of keys, with a mask of their own that is aligned bottom right. */
typedef struct fa_ring_rect {
    int64_t         q_begin, q_end, k_begin, k_end;
    flash_attn_mask mask;
    int32_t         left, right; /* of WINDOW */
} fa_ring_rect;

enum { FA_RING_MAX_RECTS = 4 };

/* What the queries of share q see of the keys of share k; no pair is in two rectangles. Returns their number. itself:
 * both shares are the same positions. */
int fa_ring_rects(const flash_attn_ring_share *q, const flash_attn_ring_share *k, fa_ring_mask mask, bool itself,
                  fa_ring_rect rects[FA_RING_MAX_RECTS]);

/* ---- a call that is checked (ring.c) ---- */

/* Places in the one block of memory of a call. */
typedef struct fa_ring_memory {
    char  *base;
    size_t place[2];         /* what travels: K and V; in a backward dK and dV of a step, float32, and behind them K and V
                                of the next, so that both are one transfer */
    size_t acc, part;        /* acc: the result so far; part: what one call adds */
    size_t lse, part_lse;    /* forward */
    size_t dkv_part, dsinks; /* backward */
    size_t inner, inner_bytes, total;
} fa_ring_memory;

typedef struct fa_ring_call {
    flash_attn_context       *context;
    const flash_attn_problem *problem;
    const flash_attn_grads   *grads; /* backward */
    flash_attn_ring           ring;
    flash_attn_exec           exec; /* of the calls inside */
    fa_call                   call; /* the local problem, checked */
    fa_ring_mask              mask;
    flash_attn_ring_share     q;
    fa_ring_memory            memory;
    fa_ring_rect              pending; /* whose part in memory waits to be merged; none: no rows */
    int                       begun;  /* transfers that nobody has waited for */
    bool                      broken; /* the transport has failed: nothing is sent any more */
} fa_ring_call;

/* What is at this rank in step `step`: K and V of the rank so many before it, whose share is *k. Returns the number of
 * rectangles in which this rank's queries see them. */
int fa_ring_step(const fa_ring_call *r, int step, flash_attn_ring_share *k, fa_ring_rect rects[FA_RING_MAX_RECTS]);

/* The share of K and V that is at this rank in step `step`. */
flash_attn_ring_share fa_ring_source(const fa_ring_call *r, int step);

/* True if a step's only rectangle has all queries: its result needs no adding up. */
bool fa_ring_is_whole(const fa_ring_call *r, const fa_ring_rect *rects, int count);

/* All queries and no key: what a pass begins with. */
static inline fa_ring_rect fa_ring_no_keys(const fa_ring_call *r) { return (fa_ring_rect){.q_end = r->q.rows}; }

/* Contiguous K or V of `rows` rows, in the memory of both; the bytes of both. */
flash_attn_tensor fa_ring_k(const fa_ring_call *r, char *memory, int64_t rows, flash_attn_dtype dtype);
flash_attn_tensor fa_ring_v(const fa_ring_call *r, char *memory, int64_t rows, flash_attn_dtype dtype);
size_t            fa_ring_kv_bytes(const fa_ring_call *r, int64_t rows, flash_attn_dtype dtype);

/* Contiguous float32 [batch, rows, heads_q, head_dim] and [batch, heads_q, rows, 1] at a place of the call's memory. */
flash_attn_tensor fa_ring_results(const fa_ring_call *r, size_t at, int64_t rows, int64_t head_dim);
flash_attn_tensor fa_ring_lse(const fa_ring_call *r, size_t at, int64_t rows);

/* Rows [begin, end) of dimension `dimension`. */
flash_attn_tensor fa_ring_rows(flash_attn_tensor t, int dimension, int64_t begin, int64_t end);

/* The local problem of one rectangle, without sinks; k and v: of the whole share. o and lse are the caller's. */
flash_attn_problem fa_ring_problem(const fa_ring_call *r, const fa_ring_rect *rect, flash_attn_tensor k,
                                   flash_attn_tensor v);

/* flash_attn_merge of what needs no check; a sum where the parts have no LSE. */
flash_attn_status fa_ring_merge(const fa_ring_call *r, const flash_attn_partial *parts, int num_parts,
                                const flash_attn_partial *result);

/* result = acc, but of rows [begin, end) of O's dimension 1 acc merged with part, which has these alone: what is added
 * last is rounded at once, so that acc is not written and read again. */
flash_attn_status fa_ring_close(const fa_ring_call *r, const flash_attn_partial *acc, const flash_attn_partial *part,
                                int64_t begin, int64_t end, const flash_attn_partial *result);

/* A part's rows [begin, end). */
flash_attn_partial fa_ring_part_rows(flash_attn_partial part, int64_t begin, int64_t end);

/* result = the sum of the parts, which have its shape; it may be part 0; none: zeros. */
flash_attn_status fa_ring_sum(const fa_ring_call *r, const flash_attn_tensor *parts, int num_parts,
                              flash_attn_tensor result);

/* Where K and V of a step lie. */
size_t fa_ring_kv_at(const fa_ring_call *r, int step);

/* Backward: dK and dV of a step, which its place begins with; the bytes up to the next step's K and V. */
static inline bool   fa_ring_wants_kv(const fa_ring_call *r) { return r->call.dk.data || r->call.dv.data; }
static inline size_t fa_ring_dkv_at(const fa_ring_call *r, int step) { return r->memory.place[step % 2]; }
size_t               fa_ring_dkv_room(const fa_ring_call *r, int step);

/* K and V of this rank, contiguous, into the place of the first step. */
flash_attn_status fa_ring_pack(const fa_ring_call *r);

/* Begin to send to the next rank and to receive from the one before, between places of the call's memory; wait for all
 * that was begun. */
flash_attn_status fa_ring_begin(fa_ring_call *r, size_t send, size_t send_bytes, size_t recv, size_t recv_bytes);
flash_attn_status fa_ring_wait(fa_ring_call *r);

/* Begin to send on the K and V of this step and to receive those of the next, if there is one. */
flash_attn_status fa_ring_begin_kv(fa_ring_call *r, int step);

/* ---- the two passes: nothing of the caller's is written before fa_ring_*_finish. Where ranks cannot agree, the
 * backward's last transfer may be under way then ---- */

flash_attn_status fa_ring_forward(fa_ring_call *r);
flash_attn_status fa_ring_forward_finish(const fa_ring_call *r);
flash_attn_status fa_ring_backward(fa_ring_call *r);
flash_attn_status fa_ring_backward_finish(fa_ring_call *r);

#endif
