/*
 * The CPU backend's micro-kernel table and its contract.
 *
 * forward.c, backward.c and decode.c walk over tiles, know the masks and options, and call one table for all arithmetic
 * that is hot. A table is one instruction-set tier for one input type. All its entries work on one tile:
 *
 * - rows: queries of a tile, up to its q. A tile may hold the same queries of several heads of a group.
 * - keys: keys of a tile, up to its k. Tiles start at multiples of that k of the sequence.
 * - S, P: float32 [rows][ld], row major. Columns keys .. fa_round_up(keys, key_step) - 1 exist: they are scratch for
 *   `scores`, and hold 0 in P.
 * - O, dQ: float32 accumulators [rows][ld], and dK, dV [keys][ld], row major. Columns up to a multiple of 16 exist.
 * - packed: an operand in the layout that the tier likes, made by `pack` from rows of the caller's tensor.
 *
 * Every row's result depends on that row and the keys alone, never on which rows share its tile: tiles are grouped by
 * what is good for the load. All pointers to tiles are 64-byte aligned and so are their rows.
 *
 * `scores`, `accumulate` and `accumulate_t` are all that a tier needs for the two matrix products of the forward and
 * the five of the backward; options and masks are applied to the float32 tiles between them. A tier that wants to
 * overlap the products with the softmax fills `forward_block` and `backward_block`, which apply the window and options
 * themselves.
 */
#ifndef FA_CPU_H
#define FA_CPU_H

#include "call.h"

#include <stdatomic.h>

#define FA_LOG2_E 1.44269504088896340736f
#define FA_LN_2 0.69314718055994530942f

/* Most rows or keys that a tile may have, for arrays of row pointers. */
#define FA_MAX_TILE 1024

static inline int64_t fa_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* ---- operands ---- */

/* Rows of one head of a tensor, wherever they lie. */
typedef struct fa_rows {
    const void *const *row; /* [count] first element of each */
    int                count, cols;
    int64_t            stride; /* elements from one column to the next */
    flash_attn_dtype   dtype;
    int64_t            step; /* bytes from each row to the next, and row[0] alone is set; 0: they are all listed */
} fa_rows;

/* NULL behind the last. */
static inline const void *fa_row_at(const fa_rows *rows, int r) { return r < rows->count ? rows->row[r] : NULL; }

/* Listed or not. */
static inline const char *fa_row_of(const fa_rows *rows, int r)
{
    return rows->step ? (const char *)rows->row[0] + r * rows->step : rows->row[r];
}

/* Rows that later calls will read, for prefetch; perhaps none. */
typedef struct fa_soon {
    fa_rows rows;
    bool    each; /* row n of them is asked for with row n of this call's own; else the first ones follow where own rows
                     end */
    bool    far;  /* further ahead, and into the second-level cache: fa_isa.asks_far */
} fa_soon;

/* Ask for a line, far as above or near. Which is hidden from the compiler, which would make two copies of the loop around
 * it. */
#define FA_ASK_FOR(address, far)                                                                                       \
    do {                                                                                                               \
        int is_far = (far);                                                                                            \
        __asm__("" : "+r"(is_far));                                                                                    \
        if (is_far)                                                                                                    \
            __builtin_prefetch(address, 0, 2);                                                                         \
        else                                                                                                           \
            __builtin_prefetch(address);                                                                               \
    } while (0)

/* A row that does not begin with a line ends in one more than it has. Where heads lie side by side and nobody asked for
 * that one, calls took two to four times as long (0103); malloc's and NumPy's memory begins 16 bytes behind a line. */
static inline __attribute__((always_inline)) void fa_ask_for_end(const char *row, int bytes, bool far)
{
    if ((uintptr_t)row % 64)
        FA_ASK_FOR(row + bytes - 1, far);
}

/* What a packed operand is for. Left operands are read along their columns; so are K and V_T, the right operands of
 * S = Q K^T and dP = dO V^T. The other right operands are contracted along their rows. */
typedef enum fa_role {
    FA_ROLE_Q,        /* left  of S  = Q K^T     rows = queries, cols = head_dim */
    FA_ROLE_K,        /* right of S              rows = keys */
    FA_ROLE_V,        /* right of O += P V       rows = keys, cols = head_dim_v */
    FA_ROLE_DO,       /* left  of dP = dO V^T    rows = queries, cols = head_dim_v */
    FA_ROLE_V_T,      /* right of dP             rows = keys */
    FA_ROLE_DO_RIGHT, /* right of dV += P^T dO   rows = queries, cols = head_dim_v */
    FA_ROLE_Q_RIGHT,  /* right of dK += dS^T Q   rows = queries, cols = head_dim */
    FA_ROLE_K_RIGHT,  /* right of dQ += dS K     rows = keys, cols = head_dim */
    FA_ROLES
} fa_role;

static inline bool fa_is_along_rows(fa_role role)
{
    return role == FA_ROLE_V || role == FA_ROLE_DO_RIGHT || role == FA_ROLE_Q_RIGHT || role == FA_ROLE_K_RIGHT;
}

/* ---- fused entries ---- */

struct fa_tile;

/* What a tile needs beyond the window and a factor above 0: fa_options_of. */
typedef struct fa_block_options {
    const fa_call        *call;
    const struct fa_tile *tile;   /* tile.h */
    float                 scale;  /* scores become natural units where fa_has_options says so */
    bool                  slices; /* a block mask hides some pairs */
} fa_block_options;

typedef struct fa_forward_block {
    const void *q, *k, *v; /* packed: roles Q, K, V. Rows that pack left out of V are the caller's to add */
    float      *o;         /* [rows][ldo], not yet divided by l */
    int         ldo;
    float      *m, *l; /* [rows] running maximum (of score * multiplier, so base 2) and sum. m may be any finite
                          shift as long as o and l agree with it; -inf: nothing seen yet, o and l are 0 */
    bool        fresh; /* o, m and l hold nothing yet: as if o and l were 0 and m -inf */
    int       rows, keys, head_dim, head_dim_v;
    fa_window window; /* row r sees key j as fa_window_sees(window, diagonal, r % queries, j) */
    int       diagonal, queries;
    float     multiplier; /* what takes scores, after the options, to base 2; > 0 */
    void     *scratch;    /* forward_scratch_bytes, this thread's */

    const fa_block_options *options; /* NULL: none */
} fa_forward_block;

/* Sums of the fused backward lie in tiles of 16 x 16 floats, [rows / 16][cols / 16], the columns of tiles an even
 * number: where the tile of row and col, multiples of 16, begins. */
static inline int64_t fa_tiled_at(int cols, int row, int col)
{
    return (row / 16 * (fa_round_up(cols, 32) / 16) + col / 16) * 256;
}
static inline int64_t fa_tiled_floats(int rows, int cols) { return fa_round_up(rows, 32) * fa_round_up(cols, 32); }

typedef struct fa_backward_block {
    const void    *q_right, *dout_right, *k, *v; /* packed: roles Q_RIGHT, DO_RIGHT, K_RIGHT, and DO for V */
    const float   *lse_log2, *delta;             /* [rows]: P = exp2(S * multiplier - lse_log2); dS = P (dP - delta) */
    const fa_rows *dout_rows; /* dO, of which bad_dout are the rows that pack left out of dout_right */
    const int     *bad_dout;
    int            num_bad_dout;
    float         *dk, *dv; /* added to: tiled [keys][head_dim], [keys][head_dim_v]. dk without the factor `scale` */
    float         *dq;      /* backward_dq adds to it: tiled [rows][head_dim], each tile transposed; likewise */
    bool           fresh_keys, fresh_dq; /* dk and dv of the part, or dq, hold nothing yet: as if they were 0 */
    int            rows, keys, head_dim, head_dim_v;
    fa_range       part; /* of the keys: what one call works on. Begins at a multiple of part_keys, is as long or
                            the last */
    fa_window               window; /* row r sees key j as fa_window_sees(window, diagonal, r, j) */
    int                     diagonal;
    float                   multiplier;
    int                     p_log2, ds_log2; /* P and dS are taken times 2 to these; so are dv, and dk and dq (row_norm) */
    void                   *scratch; /* backward_scratch_bytes, this thread's: keeps the part's dS for backward_dq */
    const fa_block_options *options; /* NULL: none */
} fa_backward_block;

/* Rows of a result, `step` bytes apart, their columns `stride` elements. */
typedef struct fa_stored_rows {
    char            *at;
    int64_t          step, stride;
    int              rows, cols;
    flash_attn_dtype dtype;
    float            factor;
    bool             past_caches; /* whole lines are written past them, for who reads them would not find them there */
} fa_stored_rows;

/* What is done to a row of scores, in this order, each step rounded: times scale; less slope |distance - key|, where
 * has_alibi; plus a bias, where there is one, which masks with -inf whatever the score is. */
typedef struct fa_score_terms {
    float            scale, slope;
    bool             has_alibi;
    int              distance; /* of the query from the row's first key; less than 2^23 in size, as floats count exactly */
    const void      *bias;
    int64_t          stride;
    flash_attn_dtype dtype;
} fa_score_terms;

/* ---- the table ---- */

typedef struct fa_tile_shape {
    int q, k;
} fa_tile_shape;

typedef struct fa_kernels {
    const char    *name; /* "avx512" */
    flash_attn_isa isa;
    int            key_step; /* see S above: 1 .. 64 */
    int            panel;    /* `scores` and `accumulate` may be called for some keys of a packed tile alone, from a
                                multiple of this to one. 0: they may not */

    /* Bytes of a packed operand of up to `rows` rows and exactly `cols` columns; a multiple of 64. 0: this role needs
     * no copy of its own, Q's (or DO's) packed form serves (only for Q_RIGHT, DO_RIGHT). */
    size_t (*packed_bytes)(fa_role role, int rows, int cols);
    /* Convert and lay out src; columns and rows beyond it that the tier's step adds are zeros. For roles V, DO_RIGHT,
     * Q_RIGHT, K_RIGHT (also where Q and DO serve for them) a row that holds NaN or Inf is packed as zeros and its
     * number written to bad[]; returns how many. The caller adds such rows where they are seen, so that 0 * NaN never
     * happens. bad NULL: keep rows as they are, return 0. */
    int (*pack)(fa_role role, void *packed, const fa_rows *src, int *bad);

    /* S = left right^T, no scale: roles (Q, K), or (DO, V_T). */
    void (*scores)(float *s, int lds, const void *left, const void *right, int rows, int keys, int depth);
    /* C[r][:] = C[r][:] * rescale[r] + sum_k P[r][k] right[k][:]: roles V, K_RIGHT. rescale NULL: 1. */
    void (*accumulate)(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right, int rows,
                       int keys, int cols, void *scratch);
    /* C[k][:] += sum_r P[r][k] right[r][:]: roles DO_RIGHT, Q_RIGHT. NULL where backward_block is there. */
    void (*accumulate_t)(float *c, int ldc, const float *p, int ldp, const void *right, int rows, int keys, int cols,
                         void *scratch);

    /* `multiplier` is always > 0 and takes scores to base 2: a scale that is not positive is applied to S beforehand,
     * for -inf * -1 would unmask. Entries on whole rows make columns keys .. up to key_step the 0 that P promises.
     * Arrays of one number a row exist up to a multiple of 16. */
    /* One step of the online softmax on each row: m_new = max(m, max_k S * multiplier), P = exp2(S * multiplier -
     * m_new) in place of S, rescale = exp2(m - m_new), l = l * rescale + sum P. S may hold -inf; m_new = -inf gives P =
     * 0. */
    void (*softmax)(float *s, int lds, int rows, int keys, float multiplier, float *m, float *l, float *rescale);
    /* softmax and accumulate, with P between them as the products take it, in the place of S's rows. NULL: not there. */
    void (*softmax_packed)(float *s, int lds, int rows, int keys, float multiplier, float *m, float *l, float *rescale);
    void (*accumulate_packed)(float *c, int ldc, const float *rescale, const float *p, int ldp, const void *right,
                              int rows, int keys, int cols);
    /* P = exp(S * scale - lse[r]) in place, at most 1; scale > 0. S = -inf gives 0 even where lse is NaN. */
    void (*probabilities)(float *s, int lds, int rows, int keys, float scale, const float *lse);
    /* dS = P (dP - delta[r]) in place of dP; exactly 0 where P is 0, whatever dP and delta hold. */
    void (*gradient)(const float *p, float *dp, int ld, int rows, int keys, const float *delta);
    /* probabilities and gradient, with P and dS as the products take them: P^T and dS^T in the place of S, the second
     * beginning a row behind the first, and dS in that of dP, as softmax_packed leaves P. Of all_keys those outside `keys`
     * become 0. accumulate_t_packed is accumulate_t of the first or second. NULL: not there. */
    void (*gradient_packed)(float *s, float *dp, int ld, int rows, fa_range keys, int all_keys, float scale,
                            const float *lse, const float *delta);
    void (*accumulate_t_packed)(float *c, int ldc, const float *p, int ldp, const void *right, int rows, int keys,
                                int cols);
    /* out[r] = row r of a times row r of b, added up in the order of `scores`; where a is 0, 0, whatever b holds. */
    void (*row_dots)(float *out, const fa_rows *a, const fa_rows *b);
    /* The same, bit for bit; packed: b in role DO_RIGHT, all its rows. NULL: not there. */
    void (*packed_row_dots)(float *out, const fa_rows *a, const fa_rows *b, const void *packed);
    /* A row of scores with what the options add to them. */
    void (*add_terms)(float *row, int keys, const fa_score_terms *terms);
    /* s = cap * tanh(s * scale / cap); slope = d s_new / d(s * scale) if not NULL. */
    void (*softcap)(float *s, float *slope, int ld, int rows, int keys, float scale, float cap);
    /* x (and y if not NULL) = kept ? x * keep_scale : 0, for queries i0 .. and keys j0 .. of one head. */
    void (*dropout)(float *x, float *y, int ld, int rows, int keys, const fa_dropout *dropout, uint32_t batch_head,
                    int i0, int j0);

    /* n elements from or to the caller's memory, `stride` elements apart. */
    void (*load)(float *out, const void *src, int64_t stride, flash_attn_dtype dtype, int n);
    void (*store)(void *dst, int64_t stride, flash_attn_dtype dtype, const float *src, int n, float factor);
    /* The same for all rows, ld floats apart, each times its own factor (not to->factor). NULL: by `store`. */
    void (*store_rows)(const fa_stored_rows *to, const float *from, int ld, const float *factor);
    /* lse[r] = m[r] * to_natural + ln l[r], at most 16 rows; -inf where l is 0. NULL: by the C library's logf. */
    void (*natural_lse)(float *lse, const float *m, const float *l, int rows, double to_natural);

    /* Few rows against long keys: read K and V where they lie, once, without packing. rows at most few_rows; role Q's
     * packed form; same meaning as scores and accumulate. Only where every row sees every key, stride is 1, cols is a
     * multiple of few_cols and the type is not F8E4M3. Below few_least another table is faster. 0 and NULL: not there.
     * scratch: forward_scratch_bytes, this thread's. */
    int few_rows, few_cols, few_least;
    int few_rows_wide; /* few_rows of head_dim above FA_WIDE_HEAD; 0: the same. At most a tile's */
    int few_keys, few_keys_f32; /* keys of a call where heads that lie side by side take turns; float32's, 0: the same */
    int few_keys_far;           /* not float32's, where fa_isa.asks_far; 0: the table never asks far */
    bool few_steps;             /* rows at equal distances need not be listed, but for head_dim above FA_WIDE_HEAD */
    bool few_next_keys;         /* where V is K's columns, the first half of the next tile of K is asked for during V, the second
                                   during K, on every processor (amx_many.c: the second of this tile) */
    void (*scores_few)(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon);
    void (*accumulate_few)(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           const fa_soon *soon, void *scratch);
    /* The same of P as softmax_packed leaves it, for more rows than few_packed and head_dim_v above FA_WIDE_HEAD. NULL: not
     * there. */
    int few_packed;
    void (*accumulate_few_packed)(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                                  int rows, const fa_soon *soon, void *scratch);

    /* Fused; NULL: composed from the entries above. The forward may return false: not for this shape or these options,
     * and nothing was done. */
    bool (*forward_block)(const fa_forward_block *block);
    int part_keys;                                          /* of the two below */
    void (*backward_block)(const fa_backward_block *block); /* dV and dK; applies the window and options */
    void (*backward_dq)(const fa_backward_block *block);    /* dQ, of the dS that backward_block left */
    /* Sums times a factor to the caller's memory. turned: each tile is transposed. */
    void (*store_tiled)(const fa_stored_rows *to, const float *tiled, bool turned);
    /* The largest Euclidean norm of the rows that are finite. Not NULL: the fused backward keeps P and dS as float16,
     * and from these norms of dO and V its caller finds powers of two that keep both in range. */
    float (*row_norm)(const fa_rows *rows);
    size_t (*forward_scratch_bytes)(int rows, int keys, int head_dim, int head_dim_v); /* NULL: 0 */
    size_t (*backward_scratch_bytes)(int rows, int keys, int head_dim, int head_dim_v);

    /* Called by each thread before its first and after its last tile: state such as AMX's tile configuration. NULL:
     * none. */
    void (*enter)(void);
    void (*leave)(void);
} fa_kernels;

/* How many tiles of `step` hold n. */
static inline int fa_tiles_of(int n, int step) { return (n + step - 1) / step; }

/* Row `row` of a times that of b; where a is 0, b counts as 0 whatever it holds. For row_dots whose products cannot. */
float fa_dot_of_nonzero(const fa_rows *a, const fa_rows *b, int row);

/* One table a tier; NULL if the library was built without it. AMX: `base` is the AVX-512 table, from which it takes
 * what it does not have; dtype F32 and F16 by exact bfloat16 pieces. NULL: no table for this dtype, use base. */
const fa_kernels *fa_kernels_scalar(void);
const fa_kernels *fa_kernels_avx2(void);
const fa_kernels *fa_kernels_avx512(void);
const fa_kernels *fa_kernels_neon(void);
/* For bfloat16, and what it holds, alone. */
const fa_kernels *fa_kernels_avx512_bf16(void);
const fa_kernels *fa_kernels_neon_bf16(void);
const fa_kernels *fa_kernels_amx(const fa_kernels *base, flash_attn_dtype dtype);
/* As that of bfloat16, for a forward without LSE and options and with head dims up to FA_FIXED_HEAD_DIM alone: P in
 * 16-bit fixed point. Packed V serves forward_block only. */
const fa_kernels *fa_kernels_amx_fixed(void);
/* float16 as it is: AMX-FP16. For tensors of float16 alone. */
const fa_kernels *fa_kernels_amx_fp16(void);
#define FA_FIXED_HEAD_DIM 128

#define FA_WIDE_HEAD 256

/* ---- isa.c ---- */

/* AMX-FP16 where the processor does not report it. */
typedef enum fa_hidden { FA_HIDDEN_NOT_TRIED, FA_HIDDEN_ABSENT, FA_HIDDEN_RUNS } fa_hidden;

typedef struct fa_isa {
    flash_attn_isa best; /* the highest tier that this machine and operating system report */
    fa_hidden      hidden;
    char           name[64], features[224];
    int64_t        l1_bytes, l2_bytes, l3_bytes;
    bool           asks_far; /* AMD's: what AVX-512 kernels ask for goes to the second-level cache, or it takes the places of
                                the few misses that the first level may have under way (decision 0067) */
} fa_isa;

void fa_isa_detect(fa_isa *isa);
/* Whether a processor of tier `best`, or a cap there, has `tier`. Tiers that came later have larger numbers. */
bool fa_isa_reaches(flash_attn_isa best, flash_attn_isa tier);
/* Whether AMX-FP16 runs though the processor does not report it: `hidden`. Tried once. */
void fa_isa_try_amx_fp16(fa_isa *isa);

/* ---- threads.c ---- */

typedef struct fa_threads fa_threads;

/* Cores this process may use. */
int fa_num_cores(void);
/* Threads start on first use. Returns NULL without memory. */
fa_threads *fa_threads_create(const flash_attn_options *options, int num_threads);
void        fa_threads_destroy(fa_threads *threads);
/* Run body(arg, index) for every index in [0, count), count at most the pool's number of threads; index 0 on the
 * calling thread. If the pool is busy with another thread's call the caller runs all of them itself, one after another:
 * so a body must take its work from a shared counter, not from its index. */
void fa_threads_run(fa_threads *threads, int count, flash_attn_task body, void *arg);

/* ---- choices that are data (choices.c), and what `flashattn tune` has measured of them (tuning.c) ---- */

/* A table of kernels, as tile choices see it: the AMX tier has one for each number of bfloat16 pieces,
 * and that of AMX-FP16 one more. */
typedef enum fa_table {
    FA_TABLE_SCALAR,
    FA_TABLE_NEON,
    FA_TABLE_AVX2,
    FA_TABLE_AVX512,
    FA_TABLE_AMX_BF16,
    FA_TABLE_AMX_F16,
    FA_TABLE_AMX_F32,
    FA_TABLE_AMX_FP16,
    FA_TABLE_NEON_BF16,
    FA_TABLE_AVX512_BF16,
    FA_TABLES
} fa_table;

enum { FA_TUNE_MOST_TILE = 1024, FA_HEAD_CLASSES = 3 }; /* classes: head_dim up to 64, 128, 256; beyond: never tuned */

/* All zero: the defaults. The same in every call of a context, so that bits depend on a sequence's shape alone. */
typedef struct fa_tuning {
    fa_tile_shape tile[FA_TABLES][2][FA_HEAD_CLASSES]; /* by table, pass, class; {0, 0}: fa_usual_tile */
    int           block_l2_percent, split_keys;        /* 0: as choices.c says */
    bool          amx_fp16;                            /* float16 by AMX-FP16 though the processor does not report it */
} fa_tuning;

fa_table    fa_table_of(const fa_kernels *kernels, flash_attn_dtype dtype);
int         fa_head_class(int64_t head_dim);    /* FA_HEAD_CLASSES: none */
int         fa_head_class_most(int head_class); /* the largest head_dim of a class */
const char *fa_table_name(fa_table table);      /* "amx_bf16" */
/* The tile where nothing better has been measured. Multiples of 16, at most FA_MAX_TILE; k a multiple of key_step.
 * Every other such shape up to FA_TUNE_MOST_TILE must be right too. */
fa_tile_shape fa_usual_tile(fa_table table, flash_attn_pass pass, int64_t head_dim);
fa_tile_shape fa_tiles(const fa_cpu *cpu, const fa_kernels *kernels, const fa_call *call);
int           fa_block_l2_percent(const fa_cpu *cpu); /* of the second-level cache, for the forward's Q and O */
int           fa_least_block_rows(const fa_cpu *cpu, const fa_kernels *kernels); /* of one packed tile of keys */
/* Whether the forward packs all heads' keys first: heads lie side by side, one's K touches `pages` pages of memory, and
 * `tiles` tiles of queries use it. */
bool fa_packs_heads_together(const fa_kernels *kernels, int64_t pages, int64_t tiles);
int  fa_least_split_keys(const fa_cpu *cpu, int64_t rows); /* the least keys of a part where so few meet long keys */
/* ", tiles measured on this machine", or "": for explain. */
const char *fa_tiles_origin(const fa_cpu *cpu, const fa_kernels *kernels, const fa_call *call);

/* True if every number is one that a stored file may hold. */
bool fa_tuning_is_sound(const fa_tuning *tuning);

/* What `file` holds: a path; NULL: cpu-tune.txt in the private cache folder; "": nothing. What is not wholly right, or
 * of another processor or version, leaves zeros. */
flash_attn_tuning fa_tuning_load(const fa_isa *isa, const char *file, fa_tuning *tuning);
flash_attn_status fa_tuning_store(const fa_isa *isa, const char *file, const fa_tuning *tuning);
/* What fa_tuning_store would say of the place, before there is anything to store. */
flash_attn_status fa_tuning_can_store(const char *file);

/* ---- the backend ---- */

/* Take what was measured, and the tables that it and the cap allow. */
void fa_cpu_use_tuning(fa_cpu *cpu, const fa_tuning *tuning);

/* Memory that a call has left for the next one (fa_memory_get in tile.h); NULL: none, or in use. */
typedef struct fa_kept {
    _Atomic(void *) block;
} fa_kept;

struct fa_cpu {
    fa_isa            isa;
    flash_attn_isa    tier, cap;  /* after the caller's cap; the cap */
    bool              no_amx_split, assume_amx_fp16;
    const fa_kernels *vector;     /* the tier's float32 table, which takes every input type */
    const fa_kernels *kernels[4]; /* by flash_attn_dtype: AMX where there, else `vector` */
    const fa_kernels *fixed;      /* fa_kernels_amx_fixed; NULL: not there */
    const fa_kernels
               *wide_f16; /* for float16 with float32 outputs, where kernels[] is fa_kernels_amx_fp16; else NULL */
    bool        by_shape; /* `vector` also where AMX is there but slower */
    fa_threads *threads;
    int         num_threads;
    fa_kept    *kept;
    fa_tuning   tuning;
    flash_attn_tuning tuned; /* where `tuning` comes from */
};

#endif
