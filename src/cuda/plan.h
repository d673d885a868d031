/* What the parts of planning share. */
#ifndef FA_CUDA_PLAN_H
#define FA_CUDA_PLAN_H

#include "cuda/cuda.h"

#define LOG2_E 1.4426950408889634f

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* Of all entries. */
static inline int64_t fa_plan_rows(const flash_attn_tensor *t) { return t->shape[0] * t->shape[1]; }
static inline int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Tiles whose rows are queries of all heads that share a key head. */
static inline bool is_packed(const fa_tune_row *row) { return row->only == FA_FOR_FEW || row->only == FA_FOR_FEW_TMA || fa_is_latent(row); }

/* Parts of the keys in forward_sm90: args.num_splits, and in split_keys the fewest keys of one. */
void fa_plan_choose_own_splits(const fa_call *call, const fa_key *key, fa_plan *plan);

/* Whether a block has all parts of a tile there, which it walks and folds itself: by what is in the batch, for the bits are the same. */
bool fa_plan_walks_parts(const fa_call *call, const fa_key *key, const fa_plan *plan);

/* Parts of the keys elsewhere: args.split_keys, num_splits and how they grow. */
void fa_plan_choose_splits(const fa_call *call, fa_plan *plan);

/* Parts of so many tiles of packed rows can be clusters of Hopper's that merge them: few parts, and all run at once. */
bool fa_packed_merges(int64_t tiles, int64_t parts, const fa_chip *chip);

/* Few queries on Hopper: FA_ONE_LAUNCH of the main kernel, by the number of tiles of rows. A block has all parts of one (2), a group of them (3), or a part (0); the bits are
 * the same. */
int fa_plan_fold(const fa_call *call, const fa_plan *plan, int64_t tiles);

/* Hopper's own for packed rows, `tiles` of them in all. Few parts of few tiles of latent attention: the parts are clusters, which merge them. Else blocks stay where all
 * sequences are alike; where they are not, the hardware deals them out better. */
flash_attn_status fa_plan_packed(const fa_call *call, fa_plan *plan, fa_key *key, int64_t tiles);

/* Key heads that L2 holds K and V of beside each other; of no keys all. */
int64_t fa_plan_heads_in_l2(const fa_call *call, const fa_key *key);

/* One launch more; of clusters. An error: more blocks than CUDA allows. */
flash_attn_status fa_plan_add(fa_plan *plan, const fa_key *key, int64_t blocks);
flash_attn_status fa_plan_add_clusters(fa_plan *plan, const fa_key *key, int64_t blocks, int cluster);

/* A helper of a pass: it shares with the main kernel only what it names here, so that few variants are built. */
fa_key fa_plan_helper_key(enum fa_kernel_id kernel, const fa_key *main);

/* A key's tiles and columns from a row of the table. */
void fa_plan_use_row(fa_key *key, const fa_tune_row *row);

/* All sequences have as many queries and as many keys. */
bool fa_plan_is_alike(const fa_call *call);

/* All sequences' tiles of one head, as packed_sm90.cuh numbers them. */
int64_t fa_plan_tiles_of_all(const fa_call *call, const int32_t *cu_seqlens, int64_t rows, int tile, int64_t tiles);

/* The launch that cuts Q, K, V and in a backward dO for the kernels of planes; sets args.all_tiles_q and all_tiles_k. */
flash_attn_status fa_plan_add_planes(const fa_call *call, fa_plan *plan, const fa_key *main);

/* Whether a portable kernel, or one that was asked for by its name, walks lists of tiles (FA_MASK_LISTED): slices, keys that are not split, and more than few queries, for which a launch more takes
 * longer than looking at slices does. */
bool fa_plan_takes_lists(const fa_call *call, const fa_plan *plan, const fa_key *key);

/* Pairs that it shows. */
double fa_pairs_of_slice(const flash_attn_slice *slice);

/* FA_MASK_LISTED: the launch that lists the tiles that each tile of queries, or in a backward of keys, meets. Sets args.all_tiles_q and all_tiles_k. */
flash_attn_status fa_plan_add_lists(const fa_call *call, fa_plan *plan, const fa_key *main);

/* What ragged maps need: both of Hopper's backwards in 16 bits, and where a sequence is one tile. */
void fa_plan_set_apart(const fa_call *call, fa_args *args);

/*
 * A call, or the two calls that do it: packed queries on a cache of keys (pages, used lengths), as a server's batch of decoded tokens with pieces of prompts has, unless none of the sequences
 * can have one query alone; with num_splits -1 packed sequences of any kind of which one is long and the others have up to 16 queries on average. Those of few queries are then
 * attended to as if they were alone, heads that share a key head in one tile, and have the same bits (decision 0095). Returns how many; of one nothing is written.
 */
int fa_plan_calls_of(const fa_call *call, fa_call calls[2]);

/* One launch, whose items are so many heads of each sequence, and in which nobody adds to what another has made. */
flash_attn_status fa_plan_one_tile(const fa_call *call, fa_plan *plan, const fa_key *key, int64_t heads);

flash_attn_status fa_plan_backward(const fa_call *call, fa_plan *plan, fa_key *key);

/* Rows of a part of a head: tokens_of_parts of part_rows.cuh. */
int64_t fa_plan_tokens_of_parts(const fa_call *call);

/* The launch that makes one result of the parts of `main`: of their sums, or of forward_few_sm90's folded. */
flash_attn_status fa_plan_add_combine(const fa_call *call, fa_plan *plan, const fa_key *main);
flash_attn_status fa_plan_add_fold(const fa_call *call, fa_plan *plan, const fa_key *main);

/* The rungs of the ladder: one launch for each tile of queries, but for those that keep something in memory. */
flash_attn_status fa_plan_ladder(const fa_call *call, fa_plan *plan, fa_key *key);

#endif
