/*
 * What a launch passes to a kernel, shared by launch.c and the kernel text: one struct by value, as
 *     extern "C" __global__ void NAME(const __grid_constant__ fa_args args).
 * Pointers are device memory; null means absent. Strides are in elements and 64 bits wide; offsets must be computed in
 * 64 bits. Sizes are those of fa_call (src/call.h), from which launch.c fills this.
 *
 * What every kernel owes: a length, page id or cache entry read from device memory is bounded by the sizes here before
 * it is used, so that a bad one reads or writes nothing outside the tensors.
 */
#ifndef FA_ARGS_H
#define FA_ARGS_H

#include "dropout.h"
#include "mask.h"

typedef long long fa_i64;

typedef struct fa_view {
    void  *data;
    fa_i64 stride[4];
    int    dtype; /* FA_F32 ... */
    int    reserved;
} fa_view;

/* A block mask's slice as flash_attn_slice has it. */
typedef struct fa_slice {
    int q_begin, q_end, k_begin, k_end, kind;
} fa_slice;

/* A tile that another one meets, and, where it does not see all of it, which of fa_args.tile_masks says what; else -1. */
typedef struct fa_listed {
    int tile, mask;
} fa_listed;

typedef struct fa_args {
    fa_view q, k, v, o;      /* [entries, rows, heads, d]; paged: k, v are [num_pages, page_size, heads_k, d] */
    fa_view lse;             /* [entries, heads_q, rows, 1] float, natural log */
    fa_view bias;            /* [batch, heads_q, rows, keys]; stride 0 where it broadcasts */
    fa_view alibi_slopes;    /* [batch, heads_q, 1, 1] float */
    fa_view sinks;           /* [1, heads_q, 1, 1], any dtype; backward needs it only for dsinks */
    fa_view descale_q, descale_k, descale_v; /* [batch, heads_k, 1, 1] float; F8E4M3 alone */

    fa_view dout;            /* backward, read: as o */
    fa_view dq, dk, dv;      /* backward, written: as q, k, v; each may be absent */
    fa_view dbias;           /* backward, FA_HAS_DBIAS: indexed as bias; float workspace zeroed by launch.c, added to
                                atomically */
    fa_view dbias_out;       /* the caller's, of dbias_extent, for backward_convert.cu */
    fa_view dsinks;          /* backward, written by backward_dsinks.cu: [1, heads_q, 1, 1] float */

    const int *cu_seqlens_q, *cu_seqlens_k; /* [batch + 1] */
    const int *seqused_q, *seqused_k, *leftpad_k, *cache_batch_idx; /* [batch] */
    const int *page_table;   /* [batch, page_row_stride] */
    const fa_slice *slices;  /* device copy of the whole list */
    const int *slice_offsets; /* [batch + 1]; null: all slices hold for every sequence */

    /* Workspace. "token" is a row of q counted over all entries: entry * q_rows + row. tokens = q_entries * q_rows. */
    float *o_partial;   /* [num_splits][heads_q][tokens][FA_HEAD_DIM_V]; an empty part's rows need not be written. tokens are here those of part_rows.cuh */
    float *lse_partial; /* [num_splits][heads_q][tokens], natural log, -inf where the part saw nothing: always written. forward_few_sm90 and forward_sm90:
                           float2, maximum in log2 and sum, of O unscaled; with FA_ONE_LAUNCH 2 one part's, of far rows alone (of forward_sm90, as O then:
                           [blocks][FA_TILE_Q]), with 3 a group's */
    float *delta;       /* [heads_q][tokens]: rowsum(dO * O), by backward_rowsum.cu */
    float *dq_accum;    /* [heads_q][tokens][FA_HEAD_DIM] sum of dS K without the scale; zeroed by backward_rowsum.cu,
                           FA_ONE_LAUNCH: by the cluster that adds to it; backward_sm90: by nobody */
    float *dk_accum, *dv_accum; /* FA_HAS_KV_ACCUM: [heads_k][kv tokens][FA_HEAD_DIM], [...][FA_HEAD_DIM_V]; zeroed by
                                   launch.c; kv tokens = kv_entries * kv_rows */
    int   *dq_turn;     /* FA_DETERMINISTIC: [batch * heads_q][tiles of q], zeroed as dq_accum or by launch.c: key tiles added
                           so far. backward_sm90: [heads_q][all_tiles_q], 0 where dq_accum was not written */

    fa_i64 page_row_stride;

    int dbias_extent[4];                   /* as stored: 1 where it broadcasts */
    int batch, heads_q, heads_k, group;    /* group = heads_q / heads_k */
    int head_dim, head_dim_v;              /* the true ones */
    int q_entries, q_rows;                 /* q.shape[0], q.shape[1] */
    int kv_entries, kv_rows;               /* k.shape[0], k.shape[1]; paged: num_pages, page_size */
    int pages_per_seq, num_slices;
    int max_seqlen_q, max_seqlen_k;        /* no sequence is longer */
    int tiles_q, tiles_k;                  /* ceil(max_seqlen_q / FA_TILE_Q), ceil(max_seqlen_k / FA_TILE_K) */
    int num_splits, split_keys;            /* part p works on keys [p * split_keys, (p + 1) * split_keys) */
    int part_growth, part_doublings;       /* forward_sm80: split_keys is doubled, so many times at most, while its square is less than
                                              part_growth times the sequence's keys */
    int group_blocks;                      /* backward: blocks that share a tile of keys of a key head, each with group / group_blocks query
                                              heads; backward_sm90 with part_shares of these; backward_short_sm90 of few keys: shares of a key head's tiles of queries. 1 without FA_HAS_KV_ACCUM, but there */
    float scale, scale_log2, softcap;      /* scale_log2 = scale * log2(e) */

    fa_window  window;
    fa_dropout dropout;                    /* of element (i, j): batch_head = batch index * heads_q + head */

    int order_heads;                       /* backward_sm90: key heads whose tiles are dealt together, of all sequences if they are not packed;
                                              causal forward_sm90: heads, likewise, with all_items; forward_wide_sm90 under a mask: key heads; 0: tiles are not taken by length (work_sm90.cuh) */
    unsigned char *v_turned;               /* forward_sm90 in FP8 of variant 2, by values_sm90.cu: [kv_entries][heads_k][tiles_k][FA_TILE_K * FA_HEAD_DIM_V],
                                              each tile's V^T as shared memory will hold it; the ladder's K7 likewise, by k7_quantise.cu;
                                              forward_f32_sm90: V's tiles, as q_tiles */
    float *row_stats;                      /* backward_sm90, by backward_rowsum.cu: [heads_q][all_tiles_q][2][FA_TILE_Q], for the
                                              queries of a tile LSE * log2(e), then delta; past the last inf and 0. dq_accum is
                                              there [heads_q][all_tiles_q][FA_TILE_Q * FA_HEAD_DIM], in backward_sm90.cu's order */
    int   *next_item;                      /* backward_sm90 and forward_sm90: where tiles are dealt one by one, how many have been; zeroed by
                                              backward_rowsum.cu, deal.cu and list_tiles.cu. Null: each block knows its own, or has one */
    int own_heads;                         /* backward_sm90: key heads of all sequences, the first, whose tiles blocks have without being dealt them */
    int dealt_tiles, dealt_heads;          /* backward_sm90 with next_item: tiles and heads that order_heads is a part of, behind own_heads */
    int dq_order;                          /* backward_sm90: FA_DQ_FIRST_COMES ... below */
    int all_tiles_q, all_tiles_k;          /* of a head, over all sequences (packed_sm90.cuh): backward_sm90, forward_f32_sm90, and forward_sm90 with all_items */
    int row_warps;                         /* combine: warps of a row, 1 or FA_COMBINE_WARPS; fold: above 1 a block has one row, a group of its parts each */
    int all_items;                         /* forward_sm90: all_tiles_q of all heads, which are dealt; 0: each block knows its own */
    int apart_q, apart_k, apart_v, apart_dout; /* ragged maps: rows from a batch entry to the next */
    unsigned char *q_tiles, *k_tiles;      /* K7, by k7_quantise.cu: [batch][heads][tiles][tile's rows * FA_HEAD_DIM], as v_turned; forward_f32_sm90, by planes_sm90.cu:
                                              [heads][all tiles][planes and note (planes_sm90.cuh)]; backward_f32_sm90 too */
    float *largest;                        /* K7, by k7_largest: |x| of each head, batch * (heads_q + 2 heads_k); zeroed by launch.c */
    int run_parts;                         /* forward_sm80, few queries, forward_few_sm90: neighbouring parts that a block takes, one after the other; else 1 */
    float cap_slope, cap_unit;             /* Hopper's own with softcap: -2 scale_log2 / softcap; forward 2 softcap in log2 units (scores_sm90.cuh),
                                              backward softcap in log2 units (backward_products_sm90.cuh) */
    int page_piece;                        /* forward_sm90: rows of K and V that are fetched at once; divides page and tile */
    int apart_dk, apart_dv;                /* backward_sm90: as apart_q; -1: no map */
    int q_boxes;                           /* forward_latent_sm90, forward_few_sm90: a tile's rows of Q are one box of a map: heads, then queries */
    float *folded_o;                       /* forward_few_sm90, FA_ONE_LAUNCH 2 and 3: [blocks][FA_FOLD_PLACES][FA_TILE_Q][FA_HEAD_DIM_V], O that a block has folded */
    fa_view dk_stored, dv_stored;          /* backward_sm90, backward_short_sm90 of few keys: where blocks store dK and dV: dk and dv, or if group_blocks > 1 float32 workspace, [kv_entries, kv_rows,
                                              heads_k * group_blocks, FA_HEAD_DIM or _V], which backward_convert_sm90.cu adds up */
    int part_shares;                       /* backward_sm90: a head's queries are in so many parts, each another block's; divides group_blocks, which divides group * part_shares */
    float bias_factor;                     /* forward_sm90: of a bias, in units of what its softmax takes */
    int dbias_direct;                      /* backward_sm90: dbias's elements have one term each, and are stored where the caller wants them */
    int share_blocks;                      /* backward_convert_sm90: blocks that add up dK and dV */
    unsigned char *dout_tiles;             /* backward_f32_sm90: dO's tiles, as q_tiles */
    int *lost;                             /* planes_sm90 of a backward: 1 where float16 does not hold a tile's numbers: then backward_f32_sm90 does nothing, else backward_sm80 behind
                                              it; null: backward_sm80 is alone. Zeroed by launch.c */
    int dbias_terms[4];                    /* deterministic: dbias is stored for each (b, h, i, j), and backward_convert adds up so many along a dimension; else 1 */
    fa_listed *tile_lists;                 /* FA_MASK_LISTED, by list_tiles.cu: [all tiles of queries, in a backward of keys][list_places], for each the tiles that it meets; the first place has
                                              how many these are, and of a forward how many come before those that need no mask; behind the last one's tile is -1 */
    unsigned *tile_masks;                  /* likewise: [most_masks][rows of S or S^T in a tile][4], for each the columns that it sees, as its lanes hold them (columns_below) */
    int *masks_taken;                      /* likewise: how many are in use; zeroed by launch.c */
    int list_places, most_masks;
    int *tile_turns;                       /* likewise, of a backward in a fixed order: [all tiles of queries][tiles_k], how many tiles of keys meet it before this one */
    int apart_o, apart_dq;                 /* forward_short_sm90, backward_short_sm90: as apart_q; apart_dq -1: it is not wanted, as apart_dk and apart_dv are there */
    int few_queries;                       /* FA_OF_LENGTH: of how many queries at most the sequences are that have a call of their own */
    int fold_rows;                         /* fold: a warp's rows, 4 of up to 4 results, 2 of up to 8, else 1; 0: one, groups of whose results, neighbours, are folded first */
    int all_rows_q, all_rows_k; /* q_entries * q_rows, kv_entries * kv_rows: sequences of cu_seqlens are counted through them. A call's own have one entry; documents of several (documents.c) do not go from one to the next */
} fa_args;

/*
 * Grids are one-dimensional, for batch * heads may pass 65,535. blockIdx.x counts, fastest first:
 *   forward_*           tile of q (turned round when masked: the longest first), split, head, batch
 *                       = tiles_q * num_splits * heads_q * batch; forward_sm90 with FA_HAS_GROUPS: of key heads
 *   forward_sm80, few queries   tile of q, key head, run of parts, batch; FA_ONE_LAUNCH: run of parts, tile of q, key head, batch, a cluster's
 *                       blocks being the runs of one tile. = tiles_q * heads_k * ceil(num_splits / run_parts) * batch
 *   forward_latent_sm90, forward_few_sm90   items, as the blocks of forward_sm80 for few queries; or as many blocks as run at once, each with several
 *   backward_rowsum     tile of q, head, batch
 *   backward_*          tile of k, block of the group, key head, batch = tiles_k * group_blocks * heads_k * batch
 *   backward_sm90 and its backward_rowsum and backward_convert_sm90: tile of all_tiles_k or all_tiles_q, head
 *                       backward_convert_sm90 with group_blocks > 1: then FA_SHARED_ROWS kv tokens, key head;
 *                       with FA_HAS_DBIAS then FA_DBIAS_ROWS rows of dbias -> dbias_out
 *   forward_short_sm90, backward_short_sm90   tile of q (of 1 but for few keys), head or key head, sequence: as many blocks as run at once, each with several
 *   backward_convert    FA_TILE_Q rows a block: first heads_q * tokens rows of dq_accum -> dq (also when dq is absent: then
 *                       they do nothing), then with FA_HAS_KV_ACCUM heads_k * kv tokens rows of dk_accum, dv_accum -> dk, dv,
 *                       then with FA_HAS_DBIAS dbias_extent[0] * [1] * [2] rows of dbias -> dbias_out
 *   backward_dsinks     head: one block sums over all rows, in a fixed order
 *   list_tiles          tile of all_tiles_q; of a backward of all_tiles_k, and behind them, in a fixed order, of all_tiles_q
 *   planes_sm90         of Q, then of K, then of V, then with FA_VARIANT 1 of dO: tile of all_tiles_q or all_tiles_k, head
 *   values_sm90         tile of k, key head, entry = tiles_k * heads_k * batch
 *   fold                fold_rows rows a warp, or one a block: tokens * heads_q rows
 *   combine             row_warps warps a row, or one for up to four rows, a grid's warps apart: tokens * heads_q rows
 */
#define FA_COMBINE_WARPS 8
#define FA_SHARED_ROWS 16
#define FA_DBIAS_ROWS 32

/* Merge (flash_attn_merge): rows of [batch, seqlen_q, heads], one a warp or 32 / row_lanes. dtypes are in the views. */
#define FA_MERGE_MAX_PARTS 32
#define FA_MERGE_FEW_PARTS 4
#define FA_MERGE_PIECES 4 /* of a lane, on their way at once */
typedef struct fa_merge_part {
    fa_view o;              /* [b, sq, hq, dv] */
    float  *lse;            /* [b, hq, sq] */
    fa_i64  lse_stride[3];
} fa_merge_part;

typedef struct fa_merge_args {
    fa_merge_part part[FA_MERGE_MAX_PARTS];
    fa_merge_part result;
    int num_parts, batch, seqlen_q, heads, head_dim_v;
    int columns, row_lanes; /* at most FA_MERGE_FEW_PARTS parts, all rows aligned: a lane has so many columns at once, 8 where all have 16 bits, else 4, and a row
                               so many lanes; columns 0: a lane an element */
} fa_merge_args;

/* Append (flash_attn_append_kv): one warp a row: first batch * seqlen_new * heads_k rows (k_new with v_new), then batch *
 * seqlen_q * heads_q rows of q. A row that does not fit is not written. dtypes are in the views. */
typedef struct fa_append_args {
    fa_view k_new, v_new, k_cache, v_cache, cos, sin, q, q_out;
    const int *cache_seqlens, *cache_batch_idx, *leftpad_k, *page_table;
    fa_i64 page_row_stride;
    int batch, seqlen_new, heads_k, head_dim, head_dim_v;
    int cache_entries, cache_rows; /* k_cache.shape[0], [1]; paged: num_pages, page_size */
    int pages_per_seq;
    int seqlen_q, heads_q;         /* of q; 0: no q */
    int rotary_dim, rotary_rows, interleaved, q_at_end; /* rotary_dim 0: no rotation; rotary_rows = cos.shape[0] */
} fa_append_args;

/* Host data into device memory through a launch's parameters, so that a captured graph keeps its own copy. */
#define FA_UPLOAD_WORDS 960
typedef struct fa_upload_args {
    unsigned int *to;
    int           count; /* words used, at most FA_UPLOAD_WORDS */
    unsigned int  word[FA_UPLOAD_WORDS];
} fa_upload_args;

/* Who stores the dQ of a query tile, and who adds when: */
#define FA_DQ_FIRST_COMES 0 /* the first tile of keys that comes to it; then all */
#define FA_DQ_FIRST_KEYS 1  /* the head's first tile of keys, which must see all queries; then all */
#define FA_DQ_IN_ORDER 2    /* the first that it sees; then the others, in order (deterministic) */

/* For kernels that use the tensor memory accelerator: a second parameter, const __grid_constant__ fa_maps maps. */
typedef struct fa_map {
#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
    alignas(64)
#else
    _Alignas(64)
#endif
    unsigned long long word[16]; /* a CUtensorMap */
} fa_map;

typedef struct fa_maps {
    fa_map q, k, v, dout; /* dout: backward, whose maps are ragged, as forward_short_sm90's */
    fa_map dk, dv;        /* backward: boxes of 64 rows, if apart_dk and apart_dv say so */
    fa_map bias;          /* forward_sm90, backward_sm90: [batch, heads_q, rows, keys], 1 where it broadcasts */
    fa_map dbias;         /* backward_sm90 with dbias_direct: likewise */
    fa_map o, dq;         /* backward_short_sm90: as q, and as dk; forward_short_sm90: boxes of 16 rows */
} fa_maps;

/* Rows of a ragged map, which a sequence's end lies behind: launch.c and ptx_sm90.cuh. */
#define FA_RAGGED_ROWS (1 << 30)

#endif
