/*
 * Which keys a query may see: the one definition for every backend. Compiled as C and, inside the GPU kernels, by
 * NVRTC, so it includes nothing and uses plain int: positions are below 2^29 and windows at most FA_UNLIMITED, so no
 * sum here overflows.
 *
 * i is a query's position in its sequence, j a key's. diagonal = seqlen_k - seqlen_q aligns both ends bottom right.
 */
#ifndef FA_MASK_H
#define FA_MASK_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FA_INLINE static __device__ __forceinline__
#else
#include <stdbool.h>
#define FA_INLINE static inline
#endif

#define FA_UNLIMITED (1 << 30)
#define FA_MAX_SEQLEN ((1 << 29) - 1)

typedef struct fa_window {
    int left, right; /* keys visible on each side of the diagonal; 0 .. FA_UNLIMITED */
} fa_window;

/* Half-open. Empty when begin >= end. */
typedef struct fa_range {
    int begin, end;
} fa_range;

FA_INLINE int fa_min_int(int a, int b) { return a < b ? a : b; }
FA_INLINE int fa_max_int(int a, int b) { return a > b ? a : b; }

FA_INLINE bool fa_window_sees(fa_window window, int diagonal, int i, int j)
{
    return j <= i + diagonal + window.right && j >= i + diagonal - window.left;
}

/* All keys of `keys` that some query of `queries` may see. */
FA_INLINE fa_range fa_keys_seen(fa_window window, int diagonal, fa_range queries, fa_range keys)
{
    fa_range seen;
    seen.begin = fa_max_int(keys.begin, queries.begin + diagonal - window.left);
    seen.end   = fa_min_int(keys.end, queries.end + diagonal + window.right);
    return seen;
}

/* All queries of `queries` that may see some key of `keys`: the same question from the other side, for the backward. */
FA_INLINE fa_range fa_queries_seeing(fa_window window, int diagonal, fa_range queries, fa_range keys)
{
    fa_range seeing;
    seeing.begin = fa_max_int(queries.begin, keys.begin - diagonal - window.right);
    seeing.end   = fa_min_int(queries.end, keys.end - diagonal + window.left);
    return seeing;
}

/* True if every query of `queries` sees every key of `keys`: such a tile needs no masking. */
FA_INLINE bool fa_window_covers(fa_window window, int diagonal, fa_range queries, fa_range keys)
{
    return keys.end - 1 <= queries.begin + diagonal + window.right &&
           keys.begin >= queries.end - 1 + diagonal - window.left;
}

/* Slice kinds are two bits: 1 causal (aligned bottom right), 2 inverse causal (aligned top left). */
FA_INLINE bool fa_slice_sees(int q_begin, int q_end, int k_begin, int k_end, int kind, int i, int j)
{
    return i >= q_begin && i < q_end && j >= k_begin && j < k_end &&
           (!(kind & 1) || j - k_end <= i - q_end) && (!(kind & 2) || j - k_begin >= i - q_begin);
}

/* The keys that query i sees through a slice, and the queries that see key j: intervals. */
FA_INLINE fa_range fa_keys_of_slice(int q_begin, int q_end, int k_begin, int k_end, int kind, int i)
{
    fa_range none = {0, 0}, keys = {kind & 2 ? fa_max_int(k_begin, i - q_begin + k_begin) : k_begin, kind & 1 ? fa_min_int(k_end, i - q_end + k_end + 1) : k_end};
    return i < q_begin || i >= q_end ? none : keys;
}

FA_INLINE fa_range fa_queries_of_slice(int q_begin, int q_end, int k_begin, int k_end, int kind, int j)
{
    fa_range none = {0, 0}, queries = {kind & 1 ? fa_max_int(q_begin, j - k_end + q_end) : q_begin, kind & 2 ? fa_min_int(q_end, j - k_begin + q_begin + 1) : q_end};
    return j < k_begin || j >= k_end ? none : queries;
}

#endif
