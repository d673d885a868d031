/*
 * Every constant that the JIT sets in front of a kernel's text. FA_KEY_FIELDS is the one list: it yields the key's
 * struct, its hash, its log line and the `#define NAME value` lines, so that no constant can miss the key.
 *
 * Only what changes the code inside a kernel's main loop is a constant: each variant costs its user a compile of a
 * second. Lengths, strides, head counts, sinks, windows' widths and the dtypes of what a thread touches once arrive in
 * fa_args and are tested at run time (a null pointer there means absent).
 *
 * Kernel text includes this file for the names below. All constants are plain integers: usable in #if, if constexpr
 * and as array sizes. To add one, add a line here and set the member in tune_rows.c.
 */
#ifndef FA_CONSTANTS_H
#define FA_CONSTANTS_H

/* X(member of fa_key, constant) */
#define FA_KEY_FIELDS(X)                                                                                     \
    X(arch, FA_ARCH)                   /* 80, 86, 89, 90, 100, 120: compute capability that it is built for */ \
    X(dtype, FA_DTYPE)                 /* of q, k, v: FA_F32 ... */                                            \
    X(dtype_o, FA_DTYPE_O)             /* of o */                                                              \
    X(dtype_dout, FA_DTYPE_DOUT)       /* of dout; forward: 0 */                                               \
    X(dtype_bias, FA_DTYPE_BIAS)       /* of bias; absent: 0 */                                                \
    X(head_dim, FA_HEAD_DIM)           /* rows of Q and K as the kernel holds them: >= args.head_dim, zeros between */ \
    X(head_dim_v, FA_HEAD_DIM_V)       /* likewise of V and O: >= args.head_dim_v */                           \
    X(even_d, FA_EVEN_D)               /* 1: both equal the true ones, no row needs a bound on its columns */  \
    X(aligned, FA_ALIGNED)             /* 1: each row of q, k, v, o (dout, dq, dk, dv) starts 16-byte aligned, has  \
                                          inner stride 1 and a whole number of 16-byte pieces */               \
    X(tile_q, FA_TILE_Q)               /* rows of Q of a tile */                                               \
    X(tile_k, FA_TILE_K)               /* rows of K and V of a tile */                                         \
    X(warps, FA_WARPS)                 /* warps of a block; threads = 32 * FA_WARPS */                         \
    X(stages, FA_STAGES)               /* tiles in flight from global to shared memory */                      \
    X(min_blocks, FA_MIN_BLOCKS)       /* for __launch_bounds__: blocks of a multiprocessor */                 \
    X(variant, FA_VARIANT)             /* kernel's own switch, a tune row's last column */                     \
    X(mask, FA_MASK)                   /* FA_MASK_NONE, _CAUSAL (left unlimited), _WINDOW, _LISTED */                   \
    X(has_slices, FA_HAS_SLICES)       /* block mask */                                                        \
    X(has_softcap, FA_HAS_SOFTCAP)                                                                             \
    X(has_bias, FA_HAS_BIAS)                                                                                   \
    X(has_alibi, FA_HAS_ALIBI)                                                                                 \
    X(has_dropout, FA_HAS_DROPOUT)                                                                             \
    X(has_paged, FA_HAS_PAGED)         /* k and v through args.pages */                                        \
    X(of_length, FA_OF_LENGTH)         /* FA_OF_ALL ... below: whose sequences of a call with cu_seqlens_q these are */ \
    X(has_groups, FA_HAS_GROUPS)       /* forward_sm90: rows of a tile are queries of all heads of a key head, else of one */ \
    X(has_split, FA_HAS_SPLIT)         /* keys split over blocks: float partial O and LSE, for combine.cu */   \
    X(has_dbias, FA_HAS_DBIAS)         /* backward: gradient of the bias wanted */                             \
    X(has_kv_accum, FA_HAS_KV_ACCUM)   /* backward: dK, dV of a group of heads added in float dk_accum, dv_accum */ \
    X(deterministic, FA_DETERMINISTIC) /* backward: dQ added in key-tile order */                              \
    X(one_launch, FA_ONE_LAUNCH)       /* backward: delta and the caller's dQ are made in the main kernel; the forwards for packed rows: a tile's blocks merge its parts, 2: it has one; forward_few_sm90, forward_sm90: 2: a block has all parts of a tile, 3: a group */

/* forward_few_sm90 (fold_parts.cuh): neighbouring parts that are folded by themselves; parts of a sequence before they become longer;
 * places in args.folded_o that a block has */
#define FA_FOLD_GROUP 4
#define FA_FOLD_PARTS 8
#define FA_FOLD_PLACES 3

/* FA_OF_LENGTH: all sequences, those of more than args.few_queries, the others */
#define FA_OF_ALL 0
#define FA_OF_MANY 1
#define FA_OF_FEW 2

/* FA_DTYPE*: flash_attn_dtype's values */
#define FA_F32 0
#define FA_F16 1
#define FA_BF16 2
#define FA_F8E4M3 3

/* What the tensor cores multiply where it is not bfloat16: FP8 becomes float16 on its way into a tile. */
#define FA_OPERANDS_F16 (FA_DTYPE == FA_F16 || FA_DTYPE == FA_F8E4M3)

/* FA_MASK */
#define FA_MASK_NONE 0
#define FA_MASK_CAUSAL 1 /* window.left unlimited; window.right any */
#define FA_MASK_WINDOW 2
#define FA_MASK_LISTED 3 /* what lists of tiles say (list_tiles.cu): slices under any window */

#endif
