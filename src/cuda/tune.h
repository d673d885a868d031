/* Which kernel and which tiles: data, with the reason beside each row. */
#ifndef FA_CUDA_TUNE_H
#define FA_CUDA_TUNE_H

#include "cuda/jit.h"

/* X(enumerator, entry name, file) */
#define FA_KERNELS(X)                                               \
    X(FORWARD_SM80, "forward_sm80", "forward_sm80.cu")              \
    X(FORWARD_SM90, "forward_sm90", "forward_sm90.cu")              \
    X(FORWARD_SHORT_SM90, "forward_short_sm90", "forward_short_sm90.cu") \
    X(FORWARD_F32_SM90, "forward_f32_sm90", "forward_f32_sm90.cu")  \
    X(FORWARD_FEW_SM90, "forward_few_sm90", "forward_few_sm90.cu")  \
    X(FORWARD_LATENT_SM90, "forward_latent_sm90", "forward_latent_sm90.cu") \
    X(FORWARD_WIDE_SM90, "forward_wide_sm90", "forward_wide_sm90.cu") \
    X(BACKWARD_SM80, "backward_sm80", "backward_sm80.cu")           \
    X(BACKWARD_SM90, "backward_sm90", "backward_sm90.cu")           \
    X(BACKWARD_F32_SM90, "backward_f32_sm90", "backward_f32_sm90.cu") \
    X(BACKWARD_SHORT_SM90, "backward_short_sm90", "backward_short_sm90.cu") \
    X(PLANES_SM90, "planes_sm90", "planes_sm90.cu")                 \
    X(VALUES_SM90, "values_sm90", "values_sm90.cu")                 \
    X(DEAL, "deal", "deal.cu")                                      \
    X(LIST_TILES, "list_tiles", "list_tiles.cu")                    \
    X(COMBINE, "combine", "combine.cu")                             \
    X(FOLD, "fold", "fold.cu")                                      \
    X(BACKWARD_ROWSUM, "backward_rowsum", "backward_rowsum.cu")     \
    X(BACKWARD_CONVERT, "backward_convert", "backward_convert.cu")  \
    X(BACKWARD_CONVERT_SM90, "backward_convert_sm90", "backward_convert_sm90.cu") \
    X(BACKWARD_DSINKS, "backward_dsinks", "backward_dsinks.cu")     \
    X(MERGE, "merge", "merge.cu")                                   \
    X(APPEND, "append", "append.cu")                                \
    X(UPLOAD, "upload", "upload.cu")                                \
    X(K1_SCORES, "k1_scores", "k1_standard.cu")                     \
    X(K1_SOFTMAX, "k1_softmax", "k1_standard.cu")                   \
    X(K1_VALUES, "k1_values", "k1_standard.cu")                     \
    X(FA1, "fa1_loops", "fa1_loops.cu")                             \
    X(K2, "k2_tiled", "k2_tiled.cu")                                \
    X(K3, "k3_tma", "k3_tma.cu")                                    \
    X(K4_1, "k4_1_wgmma_scores", "k4_1_wgmma_scores.cu")            \
    X(K4_2, "k4_2_wgmma", "k4_2_wgmma.cu")                          \
    X(K5, "k5_specialised", "k5_specialised.cu")                    \
    X(K6, "k6_pingpong", "k6_pingpong.cu")                          \
    X(K7_LARGEST, "k7_largest", "k7_quantise.cu")                   \
    X(K7_QUANTISE, "k7_quantise", "k7_quantise.cu")                 \
    X(K7, "k7_fp8", "k7_fp8.cu")                                    \
    X(FD, "fd_decode", "fd_decode.cu")

enum fa_kernel_id {
#define X(enumerator, name, file) FA_KERNEL_##enumerator,
    FA_KERNELS(X)
#undef X
    FA_NUM_KERNELS
};

typedef struct fa_kernel_names {
    const char *name; /* entry and name in explain */
    const char *file;
} fa_kernel_names;

extern const fa_kernel_names fa_kernels[FA_NUM_KERNELS];

/* Sets of dtypes and masks in a row: bit n for value n. */
enum {
    FA_IN_F32    = 1 << FLASH_ATTN_F32,
    FA_IN_F16    = 1 << FLASH_ATTN_F16,
    FA_IN_BF16   = 1 << FLASH_ATTN_BF16,
    FA_IN_F8     = 1 << FLASH_ATTN_F8E4M3,
    FA_IN_16_BIT = FA_IN_F16 | FA_IN_BF16,
    FA_IN_16_OR_8 = FA_IN_16_BIT | FA_IN_F8,
    FA_ON_NONE   = 1, /* FA_MASK_* (constants.h) */
    FA_ON_CAUSAL = 2,
    FA_ON_WINDOW = 4,
    FA_ON_ANY    = 7
};

/* Which calls a row is for. */
enum fa_row_for {
    FA_FOR_ANY,
    FA_FOR_ALIGNED, /* with FA_ALIGNED */
    FA_FOR_PLAIN,   /* and without softcap, bias, ALiBi, dropout, slices and pages; Hopper's own in 16 bits have some of these (has_own_options, takes_slices) */
    FA_FOR_FEW,     /* with FA_ALIGNED, without bias (but one of all heads in tiles of 16 rows), ALiBi, dropout and slices: queries of all heads of a key
                       head in tiles of tile_q rows, where these are fewer than the heads; of 16 rows only if one holds them */
    FA_FOR_FEW_TMA, /* as FA_FOR_FEW, with strides that a tensor map describes, a scale above 0, without softcap: more than eight rows in all, of up to 64 in one tile (takes_few) */
    FA_FOR_PLANES,  /* with FA_ALIGNED, more than 128 queries and a scale above 0, without softcap, slices and parts; backward more than 128 keys, no dbias and no fixed order (takes_planes) */
    FA_FOR_TMA,     /* and with what forward_sm90 asks for besides: fa_tune_takes_tma */
    FA_FOR_SHORT_TMA, /* and with no more keys than max_queries */
    FA_FOR_FITTING_TMA, /* as FA_FOR_TMA, where it is faster than the row behind: that takes 100 for a pair where this one takes max_queries, and both count the longest
                           queries and keys up to the ends of their tiles, of a window those that it shows,
                           and then 8 in a hundred more (fits_better) */
    FA_FOR_LONG_TMA,  /* as FA_FOR_TMA, with more queries than max_queries, neither packed nor with a cache index */
    FA_FOR_SOFTCAP_TMA, /* as FA_FOR_TMA, with softcap */
    FA_FOR_BIAS_TMA,    /* as FA_FOR_TMA, with a bias (takes_bias) */
    FA_FOR_NARROW_V_TMA, /* as FA_FOR_TMA, V of no more than FA_NARROW_V columns */
    FA_FOR_CUT_TMA,  /* as FA_FOR_TMA, with slices that cut many of the tiles that they show (fa_cuts_many) */
    FA_FOR_ONE_TILE, /* no more queries than tile_q, no more keys than tile_k, results in the inputs' dtype, rows that tensor maps describe, no options (takes_one_tile) */
    FA_FOR_FEW_KEYS, /* likewise, of any number of queries: a head has several tiles of them */
    FA_FOR_LATENT,   /* V is the first columns of K, of more than 256 and up to 512 (takes_latent). Rows of a tile as of FA_FOR_FEW */
    FA_FOR_WIDE      /* more than 256 columns of Q or of V (takes_wide). Rows of a tile likewise */
};

enum { FA_NARROW_V = 128, FA_LATENT_COLUMNS_V = 512 /* that forward_latent_sm90 holds */ };

typedef struct fa_tune_row {
    int            arch_min, arch_max; /* compute capability, 80 for 8.0 */
    enum fa_kernel_id kernel;
    unsigned       dtypes;
    int            head_dim; /* the largest that it holds, of Q and of V */
    unsigned       masks;
    enum fa_row_for only;
    int            max_queries; /* for so few queries at most, FA_FOR_LONG_TMA: for more; 0: any number. FA_FOR_FITTING_TMA: no number of queries */
    int            tile_q, tile_k, warps, stages, min_blocks, variant;
    int            max_spill_bytes; /* that the tests accept: 0, unless measured to be faster all the same */
    const char    *why;
} fa_tune_row;

extern const fa_tune_row fa_tune_rows[];
extern const int         fa_num_tune_rows;

/* The architecture that kernels are built for on a GPU of compute capability `device_arch`: the latest one that the
 * table knows, of the same major number and not above. 0: none. */
int fa_tune_arch(int device_arch);

/* Whose keys are one tile. */
static inline bool fa_has_one_tile(const fa_tune_row *row) { return row->kernel == FA_KERNEL_FORWARD_SHORT_SM90 || row->kernel == FA_KERNEL_BACKWARD_SHORT_SM90; }

/* Whose kernel is of latent_roles_sm90.cuh. */
static inline bool fa_is_latent(const fa_tune_row *row) { return row->only == FA_FOR_LATENT || row->only == FA_FOR_WIDE; }

/* The two that have TMA and WGMMA in 16 bits, and every backward. */
bool fa_is_hoppers_own(enum fa_kernel_id kernel);
bool fa_is_backward(enum fa_kernel_id kernel);

/* Many queries, backward more than 128 (fewer, and few that ask for parts, are for the kernels of few queries; a forward of few keys is not: is_short), a scale above 0, strides that a
 * tensor map describes. */
bool fa_tune_takes_tma(const fa_call *call);

/* Too many for the kernels of few queries, where Hopper's own take the call: more than 128, and forward on long keys fewer, if tiles of all heads of a key head suit it and are several. */
bool fa_has_many_queries(const fa_call *call);

/* Of a prompt: far more keys than queries. */
bool fa_is_piece(const fa_call *call);

/* In forward_sm90 a tile's rows are queries of all heads of a key head: where tiles of one head's queries would be empty by a tenth more, or a fifth if that is no piece of a prompt, whose
 * tiles take little time beside their begin and end. Up to 1024 queries. A power of two of heads, of which a whole number of queries fits; 16 bits, without bias, ALiBi, dropout, slices and window. */
bool fa_groups_heads(const fa_call *call, const fa_tune_row *row);

/* What forward_sm90 splits over the keys: no bias, slices and window. */
bool fa_own_splits_fit(const fa_call *call);

/* FA_MASK_LISTED: as many tiles as slices, window and ends may cut, so that they need a mask each, and the bytes of such a mask. */
int64_t fa_masks_of(const fa_call *call, const fa_tune_row *row);
int64_t fa_mask_bytes(const fa_tune_row *row);

/* More than a quarter of the tiles that slices show may be cut: smaller ones then pay. */
bool fa_cuts_many(const fa_call *call, const fa_tune_row *row);

/* Masks and lists take no more memory than a large call may. */
bool fa_lists_fit(const fa_call *call, const fa_tune_row *row);

/* Columns of Q and K and of V as the row's kernel counts them, of those that the call has. TMA bounds columns, so Hopper's kernels may have more. */
void fa_tune_columns(const fa_tune_row *row, fa_key *key);

/* The first row that fits. key holds what the call needs, not yet the tiles. name: only rows of that kernel; NULL: any.
 * UNSUPPORTED says what is lacking. */
flash_attn_status fa_tune_choose(const fa_call *call, const fa_key *key, const char *name, const fa_tune_row **row);

#endif
