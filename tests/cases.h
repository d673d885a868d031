/*
 * The case list: attention problems as data. It drives the tests, the fuzzer and the command line's `check`; a bench
 * fills the same struct by hand. Uses the public header alone.
 */
#ifndef CASES_H
#define CASES_H

#include "flashattn.h"

/* How long the sequences of a batch are, out of at most n. */
typedef enum lengths {
    LENGTHS_NONE  = 0, /* no array is given: all n */
    LENGTHS_FULL  = 1, /* an array that says n each time */
    LENGTHS_MIXED = 2, /* one of n, others between 1 and n */
    LENGTHS_HOLES = 3, /* as MIXED, every second one empty, the first and last too */
    LENGTHS_EMPTY = 4, /* all 0 */
    LENGTHS_ONES  = 5, /* all 1 */
    LENGTHS_FEW   = 6, /* n of each twelfth, the first too, all others empty */
    LENGTHS_DECODED = 7 /* one of n, others 1, but each third 3 and each fifth empty */
} lengths;

/* Bits of test_case.bias. */
enum {
    BIAS             = 1, /* [b, hq, sq, sk], q's dtype, less what follows */
    BIAS_ONE_BATCH   = 2, /* 1 in place of b: broadcasts */
    BIAS_ONE_HEAD    = 4,
    BIAS_ONE_QUERY   = 8,
    BIAS_F32         = 16, /* F32 whatever q's dtype is */
    BIAS_MINUS_INF   = 32, /* holds -inf, in whole rows too */
    BIAS_CONSTANT    = 64, /* its gradient is not wanted */
    BIAS_ONE_FOR_ALL = BIAS | BIAS_ONE_BATCH | BIAS_ONE_HEAD
};

typedef enum slice_pattern {
    SLICES_NONE      = 0,
    SLICES_DOCUMENTS = 1, /* causal blocks along the diagonal: packed documents */
    SLICES_SHARED    = 2, /* a question that all answers see, answers that do not see one another */
    SLICES_SPARSE    = 3, /* a checkerboard of full blocks; some queries see nothing */
    SLICES_KINDS     = 4, /* one slice of each kind, overlapping, cut at odd places */
    SLICES_OWN       = 5, /* by offsets: each sequence its own list, the first one's empty */
    SLICES_LONG      = 6, /* by offsets: each sequence its own two causal documents or one, between which rows may be nobody's */
    SLICES_BLOCKS    = 7  /* two full blocks along the diagonal */
} slice_pattern;

/* How tensors lie in memory. */
typedef enum layout {
    LAYOUT_CONTIGUOUS   = 0,
    LAYOUT_HEADS_FIRST  = 1, /* [b, h, s, d] */
    LAYOUT_PACKED       = 2, /* q, k, v views of one [b, s, heads, d] array: equal lengths of q and k needed */
    LAYOUT_BROADCAST    = 3, /* k has stride 0 over the batch, v over the heads */
    LAYOUT_INNER_STRIDE = 4, /* head_dim has stride 3 */
    LAYOUT_OFF_BY_ONE   = 5, /* base pointers one element past an aligned address, odd row strides */
    LAYOUT_REVERSED     = 6  /* the sequence runs backwards: negative stride */
} layout;

/* Zero means the default everywhere but in seqlen_q and seqlen_k, where it means 0. */
typedef struct test_case {
    const char *group, *name;
    int         batch;              /* 0: 1 */
    int         seqlen_q, seqlen_k; /* the longest */
    int         heads_q, heads_k;   /* 0: 1, heads_q */
    int         head_dim;           /* 0: 32 */
    int         head_dim_v;         /* 0: head_dim */

    flash_attn_mask mask;
    int             window_left, window_right;
    float           scale, softcap;
    float           logit_size; /* q is multiplied by this; 0: 1 */
    unsigned        bias;
    bool            alibi;
    bool            sinks;
    float           dropout;
    slice_pattern   slices;

    lengths varlen_q, varlen_k;   /* cu_seqlens */
    lengths seqused_q, seqused_k; /* seqused */
    bool    leftpad;
    bool    cache_batch_idx;
    int     page_size; /* 0: not paged */
    int     num_splits;
    layout  layout;
    bool    latent;       /* v is a view of k's first columns, as in multi-head latent attention */
    bool    o_f32;        /* o, dq, dk, dv in F32 whatever q's dtype is */
    bool    forward_only; /* pages and cache_batch_idx have no backward, whatever this says */
} test_case;

extern const test_case test_cases[];
extern const int       num_test_cases;

#endif
