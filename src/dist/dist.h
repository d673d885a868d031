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
    size_t kv_bytes;         /* of a place for K and V of any rank */
    size_t kv[2], acc, part; /* acc: the result so far; part: what one call adds */
    size_t dkv[2];           /* backward: dK and dV, float32, on their way */
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

/* result = the sum of the parts, which have its shape; it may be part 0; none: zeros. */
flash_attn_status fa_ring_sum(const fa_ring_call *r, const flash_attn_tensor *parts, int num_parts,
                              flash_attn_tensor result);

/* K and V of this rank, contiguous, into the first place of the two. */
flash_attn_status fa_ring_pack(const fa_ring_call *r);

/* Begin to send to the next rank and to receive from the one before, between places of the call's memory; wait for all
 * that was begun. */
flash_attn_status fa_ring_begin(fa_ring_call *r, size_t send, size_t send_bytes, size_t recv, size_t recv_bytes);
flash_attn_status fa_ring_wait(fa_ring_call *r);

/* Begin to send on the K and V of this step and to receive those of the next, if there is one. */
flash_attn_status fa_ring_begin_kv(fa_ring_call *r, int step);

/* ---- the two passes: nothing of the caller's is written before fa_ring_*_finish ---- */

flash_attn_status fa_ring_forward(fa_ring_call *r);
flash_attn_status fa_ring_forward_finish(const fa_ring_call *r);
flash_attn_status fa_ring_backward(fa_ring_call *r);
flash_attn_status fa_ring_backward_finish(const fa_ring_call *r);

#endif
