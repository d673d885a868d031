/* How a call finds its row of tune_rows.c. */
#include "cuda/cuda.h"

int fa_tune_arch(int device_arch)
{
    static const int built_for[] = {120, 100, 90, 89, 86, 80};
    for (size_t i = 0; i < sizeof built_for / sizeof *built_for; i++)
        if (built_for[i] <= device_arch && built_for[i] / 10 == device_arch / 10)
            return built_for[i];
    return 0;
}

bool fa_is_hoppers_own(enum fa_kernel_id kernel) { return kernel == FA_KERNEL_FORWARD_SM90 || kernel == FA_KERNEL_BACKWARD_SM90; }

bool fa_is_backward(enum fa_kernel_id kernel)
{
    return kernel == FA_KERNEL_BACKWARD_SM80 || kernel == FA_KERNEL_BACKWARD_SM90 || kernel == FA_KERNEL_BACKWARD_F32_SM90 || kernel == FA_KERNEL_BACKWARD_SHORT_SM90;
}

/* How far a row fits: the sentence of UNSUPPORTED comes from the row that came furthest. */
enum fit { FIT_NO_KERNEL, FIT_NO_ARCH, FIT_NO_DTYPE, FIT_NO_HEAD_DIM, FIT_NO_MASK, FIT_WHOLLY };

static bool backward_takes_tma(const fa_call *call)
{
    return !call->cache_batch_idx && !call->leftpad_k /* without a mask it hides keys past the last alone */ && call->dout.dtype == call->q.dtype;
}

static int64_t widest_columns(const fa_call *call) { return call->head_dim > call->head_dim_v ? call->head_dim : call->head_dim_v; }

/* Forward, of so few keys that they are not split: queries of more than half a tile, at 64 columns of a quarter (decision 0088), and of half a tile up to 1024 keys (0091; 256 columns were
 * not timed). Queries of several heads fill a tile better together, and FP8 is exact in the portable kernel. */
static bool is_short(const fa_call *call)
{
    enum { FEW_KEYS = 256, MORE_KEYS = 1024, NARROW = 64, WIDE = 128, HALF_TILE = 64 };
    int64_t columns = widest_columns(call);
    bool    more    = call->max_seqlen_q > HALF_TILE && columns <= WIDE;
    return call->pass == FLASH_ATTN_FORWARD && call->max_seqlen_k <= (more ? MORE_KEYS : FEW_KEYS) && call->max_seqlen_q > (columns <= NARROW ? 32 : HALF_TILE) && call->group == 1 &&
           call->q.dtype != FLASH_ATTN_F8E4M3;
}

bool fa_own_splits_fit(const fa_call *call)
{
    return call->window.left >= FA_UNLIMITED && !call->bias.data && call->slices.count == 0;
}

static bool may_group_heads(const fa_call *call, int tile_q)
{
    bool plain = !(call->alibi_slopes.data || call->dropout.threshold) && fa_own_splits_fit(call) && call->q.dtype != FLASH_ATTN_F8E4M3;
    return plain && call->group > 1 && (call->group & (call->group - 1)) == 0 && tile_q % call->group == 0 && call->q.shape[0] * call->q.shape[1] <= INT32_MAX / 2 / call->group;
}

bool fa_has_many_queries(const fa_call *call)
{
    enum { MANY = 128, MANY_ROWS = 256, MANY_ROWS_OF_FEW = 128, FEW_HEADS = 4, LONG = 4096, NARROW = 64, WIDE = 128, TILE = 128, TILE_OF_NARROW = 192 };
    int64_t columns = widest_columns(call), rows = call->max_seqlen_q * call->group;
    int64_t most    = call->heads_k <= FEW_HEADS ? MANY_ROWS_OF_FEW : MANY_ROWS;
    bool    grouped = call->pass == FLASH_ATTN_FORWARD && call->q.dtype != FLASH_ATTN_F32 && columns <= WIDE && may_group_heads(call, columns <= NARROW ? TILE_OF_NARROW : TILE);
    return call->max_seqlen_q > MANY || (grouped && rows > most && call->max_seqlen_k >= LONG);
}

bool fa_is_piece(const fa_call *call) { return call->max_seqlen_k >= 4 * call->max_seqlen_q; }

bool fa_groups_heads(const fa_call *call, const fa_tune_row *row)
{
    enum { MOST_QUERIES = 1024 }; /* of more none is empty by much */
    int64_t own = (call->max_seqlen_q + row->tile_q - 1) / row->tile_q * call->group, grouped = (call->max_seqlen_q * call->group + row->tile_q - 1) / row->tile_q;
    return row->kernel == FA_KERNEL_FORWARD_SM90 && call->max_seqlen_q <= MOST_QUERIES && may_group_heads(call, row->tile_q) && 100 * grouped <= (fa_is_piece(call) ? 90 : 80) * own;
}

bool fa_tune_takes_tma(const fa_call *call)
{
    if (call->pass == FLASH_ATTN_BACKWARD && !backward_takes_tma(call))
        return false;
    bool many = fa_has_many_queries(call), fit = call->num_splits > 1 ? many && fa_own_splits_fit(call) : many || is_short(call);
    return fit && call->scale > 0 && fa_maps_fit(call);
}

/* What Hopper's kernels for packed rows ask for: a scale above 0, strides of K that a tensor map describes, pages of a multiple of eight keys; no softcap, bias, ALiBi,
 * dropout and slices. */
static bool takes_packed(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { SWIZZLE_ROWS = 8 };
    return call->scale > 0 && key->aligned && fa_map_fits(&call->k) && !(key->has_softcap || key->has_bias || key->has_alibi || key->has_dropout || key->has_slices) &&
           (!key->has_paged || (call->k.shape[0] > 0 && fa_page_piece(call, row->tile_k) >= SWIZZLE_ROWS));
}

/* Rows of more than one tile of 64: in such tiles where they are few, else in tiles of 128, which read keys half as often. Both have the same steps, so that the batch may
 * choose. Limits as measured on an H200 (decision 0100): tiles of 128, and where they read many keys their keys too. */
static bool are_in_small_tiles(const fa_tune_row *row, const fa_call *call)
{
    enum { SMALL = 64, LARGE = 128, NARROW = 64, WIDE = 256, MOST = 64, FEW = 16, FEW_BY_BATCH = 8, KEYS = 1 << 19, KEYS_BY_BATCH = 1 << 18 };
    int64_t rows = call->max_seqlen_q * call->group, tiles = (rows + LARGE - 1) / LARGE * call->heads_k * call->batch;
    bool    by_batch = call->num_splits < 0;
    if (rows <= SMALL)
        return true;
    if (row->head_dim == NARROW || (by_batch && row->head_dim == WIDE))
        return tiles <= MOST;
    return tiles <= (by_batch ? FEW_BY_BATCH : FEW) && tiles * call->max_seqlen_k < (by_batch ? KEYS_BY_BATCH : KEYS);
}

/* What forward_few_sm90 asks for besides: queries that forward_sm90 leaves to others, more than eight rows, of which the kernel for any GPU leaves large results; up to 16
 * are faster there all the same where few blocks are busy, which only a call may count that lets the batch count (decision 0074, second round). */
static bool takes_few(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { FEW_ROWS = 8, ROWS_OF_ANY = 16, FEW_TILES = 32 };
    int64_t rows = call->max_seqlen_q * call->group, fewest = call->num_splits < 0 && call->batch * call->heads_k < FEW_TILES ? ROWS_OF_ANY : FEW_ROWS;
    return (!fa_has_many_queries(call) || call->num_splits > 1) && rows > fewest && (row->tile_q > 64 || are_in_small_tiles(row, call)) && call->head_dim > 32 && call->head_dim_v > 32 &&
           fa_map_fits(&call->v) && takes_packed(row, call, key);
}

/* What the kernels of planes ask for; pages may be of any size, for planes_sm90 reads them, and a bias any, by a scale that has a reciprocal. A softcap's way through an exponential leaves
 * too large an error for float32. The backward adds up dQ as it comes, and leaves few queries or keys to one launch. */
static bool takes_planes(const fa_call *call, const fa_key *key)
{
    enum { FEW = 128 };
    float smallest = 1e-30f;
    if (key->has_softcap || key->has_slices || !key->aligned || call->o.dtype != FLASH_ATTN_F32 || (key->has_bias && !(call->scale > smallest)))
        return false;
    if (call->pass == FLASH_ATTN_BACKWARD)
        return !key->has_dbias && !call->deterministic && call->max_seqlen_q > FEW && call->max_seqlen_k > FEW && backward_takes_tma(call) && (!call->dk.data || call->dk.dtype == FLASH_ATTN_F32) &&
               (!call->dv.data || call->dv.dtype == FLASH_ATTN_F32);
    return call->max_seqlen_q > FEW && call->num_splits <= 1 && call->scale > 0;
}

/* Queries for which forward_short_sm90 is no slower than a tile of several heads: more than 32, or at 64 columns eight of up to 128 keys (decision 0089). */
static bool are_short(const fa_call *call)
{
    enum { FEW = 32, FEWEST = 8, FEW_KEYS = 128, NARROW = 64 };
    bool narrow = call->head_dim <= NARROW && call->head_dim_v <= NARROW && call->max_seqlen_k <= FEW_KEYS && call->group == 1;
    return call->max_seqlen_q > FEW || (narrow && call->max_seqlen_q >= FEWEST);
}

/* What forward_short_sm90 and backward_short_sm90 ask for. A tensor map has no dimension of 0. */
static bool takes_one_tile(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    bool plain = !(key->has_softcap || key->has_bias || key->has_alibi || key->has_dropout || key->has_slices || key->has_paged || call->dsinks.data);
    bool fit   = (call->max_seqlen_q <= row->tile_q || row->only == FA_FOR_FEW_KEYS) && call->max_seqlen_k <= row->tile_k;
    bool some  = call->q.shape[1] > 0 && call->k.shape[1] > 0 && fit;
    if (!plain || !some || !key->aligned || !fa_ragged_maps_fit(call))
        return false;
    if (call->pass == FLASH_ATTN_FORWARD)
        return are_short(call) && !call->leftpad_k && call->num_splits <= 1 && call->scale > 0;
    bool shares = row->tile_q <= 128 || call->group == 1; /* dK and dV of two tiles of keys are not kept from head to head */
    return shares && backward_takes_tma(call) && fa_maps_fit(call);
}

/* What forward_latent_sm90 asks for besides: V is the first columns of K's rows, of which there are more than 256. */
static bool takes_latent(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { NARROW = 256 };
    return fa_values_in_keys(call) && call->head_dim > NARROW && call->head_dim_v <= FA_LATENT_COLUMNS_V && takes_packed(row, call, key);
}

/* What forward_wide_sm90 asks for besides: heads too wide for forward_sm90. */
static bool takes_wide(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { NARROW = 256 };
    return widest_columns(call) > NARROW && fa_map_fits(&call->v) && takes_packed(row, call, key);
}

/* Rows of all heads of a key head fit into one tile, or into fewer than the heads are; where there is no other row for few queries, always. */
static bool is_few(const fa_tune_row *row, const fa_call *call, bool plain)
{
    int64_t tiles = (call->max_seqlen_q * call->group + row->tile_q - 1) / row->tile_q;
    return row->tile_q == 16 ? tiles <= 1 : !plain || tiles < call->group;
}

/* The options that Hopper's own kernels have in 16 bits: softcap, ALiBi, dropout and, forward, pages. A softcap's error grows with it (decision 0061), and
 * its slope is finite; a swizzle takes eight rows. */
static bool has_own_options(const fa_tune_row *row, const fa_call *call)
{
    enum { LARGEST_SOFTCAP = 128, SWIZZLE_ROWS = 8 };
    bool own = fa_is_hoppers_own(row->kernel);
    if (row->kernel == FA_KERNEL_BACKWARD_SM90 && (row->only == FA_FOR_NARROW_V_TMA || (row->only == FA_FOR_LONG_TMA && row->masks == FA_ON_CAUSAL)))
        own = false; /* no registers are left */
    return own && row->dtypes == FA_IN_16_BIT && call->softcap <= LARGEST_SOFTCAP &&
           (call->softcap == 0 || call->scale <= 1e30f * call->softcap) && (!call->pages.table || (call->k.shape[0] > 0 && fa_page_piece(call, row->tile_k) >= SWIZZLE_ROWS));
}

/* What Hopper's own ask of a bias: no softcap, ALiBi or pages, and forward a scale that has a reciprocal. Float32 is for the forward alone; three consumers have no registers for that or
 * dropout, nor has the backward above 128 columns memory for dropout. */
static bool takes_bias(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { ALL_OPTIONS = 128 };
    bool  backward = row->kernel == FA_KERNEL_BACKWARD_SM90, wide = call->bias.dtype == FLASH_ATTN_F32;
    float smallest = 1e-30f;
    if (key->has_dbias && (call->dbias.stride[2] == 0 || call->dbias.stride[3] == 0))
        return false; /* sums over queries or keys */
    return fa_bias_map_fits(call) && call->scale > smallest && !(key->has_softcap || key->has_alibi || key->has_paged) &&
           (backward ? !wide && (row->head_dim <= ALL_OPTIONS || !key->has_dropout) : row->warps == 12 || !(wide || key->has_dropout));
}

/* The row behind, which would be taken without this one. */
static const fa_tune_row *row_behind(const fa_tune_row *row)
{
    const fa_tune_row *plain = row + 1;
    while (plain->only != FA_FOR_TMA || !(plain->masks & FA_ON_WINDOW))
        plain++;
    return plain;
}

static bool is_banded(fa_window window) { return window.left < FA_UNLIMITED && window.right < FA_UNLIMITED; }

/* How many of a row's tiles of queries see keys of one of its tiles under a window, on average and in hundredths. */
static int64_t tiles_met(const fa_tune_row *row, const fa_call *call)
{
    int64_t first = row->tile_q - (call->window.right + call->max_seqlen_k - call->max_seqlen_q) % row->tile_q; /* the query that sees key 0, but for whole tiles */
    int64_t span = row->tile_k - 1 + call->window.left + call->window.right, met = 0, n = 0;
    do
        met += (first + n * row->tile_k + span) / row->tile_q - (first + n * row->tile_k) / row->tile_q + 1;
    while (++n * row->tile_k % row->tile_q); /* both kinds meet in the same way again */
    return met * 100 / n;
}

/* A sequence's queries and keys, up to the ends of the row's tiles; under a window those that it shows, were the sequence long. */
static int64_t covered_by(const fa_tune_row *row, const fa_call *call)
{
    int64_t q = (call->max_seqlen_q + row->tile_q - 1) / row->tile_q, k = (call->max_seqlen_k + row->tile_k - 1) / row->tile_k, all = q * k;
    if (is_banded(call->window)) {
        int64_t shown = k * tiles_met(row, call) / 100;
        all           = shown < all ? shown : all;
    }
    return all * row->tile_q * row->tile_k;
}

/* Of packed sequences the longest says little of the others, which larger tiles may fit worse. Under a window a tile has few steps, beside which more is done for each tile (decision 0104). */
static bool fits_better(const fa_tune_row *row, const fa_call *call)
{
    enum { FOR_FEW_STEPS = 8 };
    const fa_tune_row *behind = row_behind(row);
    int64_t            least  = row->max_queries + (is_banded(call->window) ? FOR_FEW_STEPS : 0);
    return covered_by(row, call) / 100 * least <= covered_by(behind, call) && !(call->cu_seqlens_q && row->tile_q > behind->tile_q);
}

/* What Hopper's own ask of slices: no bias and no pages, and lists of tiles. */
static bool takes_slices(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    return fa_is_hoppers_own(row->kernel) && row->dtypes == FA_IN_16_BIT && !(key->has_bias || key->has_paged) && fa_lists_fit(call, row);
}

static bool is_for(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    bool plain = (!key->has_bias || (row->only == FA_FOR_BIAS_TMA && takes_bias(row, call, key))) && (!key->has_slices || takes_slices(row, call, key)) &&
                 (!(key->has_softcap || key->has_alibi || key->has_dropout || key->has_paged) || has_own_options(row, call));
    if (row->only == FA_FOR_LATENT)
        return takes_latent(row, call, key);
    if (row->only == FA_FOR_WIDE)
        return takes_wide(row, call, key);
    if (row->only == FA_FOR_FEW_TMA)
        return takes_few(row, call, key);
    if (row->only == FA_FOR_PLANES)
        return takes_planes(call, key);
    if (fa_has_one_tile(row))
        return takes_one_tile(row, call, key);
    if (row->only >= FA_FOR_TMA && !fa_tune_takes_tma(call))
        return false;
    if (row->only == FA_FOR_FEW) /* of a bias, one that is the same for all heads of a tile, as padding is */
        return key->aligned && (!key->has_bias || call->bias.stride[1] == 0) && !(key->has_alibi || key->has_dropout || key->has_slices) && is_few(row, call, plain);
    if ((row->only == FA_FOR_SOFTCAP_TMA && !key->has_softcap) || (row->only == FA_FOR_BIAS_TMA && !key->has_bias) || (row->only == FA_FOR_CUT_TMA && !(key->has_slices && fa_cuts_many(call, row_behind(row)))) || (row->only == FA_FOR_NARROW_V_TMA && call->head_dim_v > FA_NARROW_V))
        return false;
    if (row->only == FA_FOR_SHORT_TMA && call->max_seqlen_k > row->max_queries)
        return false;
    if (row->only == FA_FOR_FITTING_TMA && (!fits_better(row, call) || (key->has_slices && row->masks == FA_ON_WINDOW /* theirs are FA_FOR_CUT_TMA */)))
        return false;
    if (row->only == FA_FOR_LONG_TMA && (call->max_seqlen_q <= row->max_queries || call->cache_batch_idx || (call->cu_seqlens_k && !fa_is_backward(row->kernel))))
        return false; /* values_sm90 counts entries' tiles */
    return row->only == FA_FOR_ANY || (key->aligned && (plain || row->only == FA_FOR_ALIGNED));
}

static enum fit fit_of(const fa_tune_row *row, const fa_call *call, const fa_key *key, const char *name)
{
    if (fa_is_backward(row->kernel) != (call->pass == FLASH_ATTN_BACKWARD) ||
        (name && strcmp(fa_kernels[row->kernel].name, name) != 0))
        return FIT_NO_KERNEL;
    if (key->arch < row->arch_min || key->arch > row->arch_max)
        return FIT_NO_ARCH;
    if (!(row->dtypes >> call->q.dtype & 1))
        return FIT_NO_DTYPE;
    if (call->head_dim > row->head_dim || call->head_dim_v > row->head_dim)
        return FIT_NO_HEAD_DIM;
    int mask = key->has_slices && fa_is_hoppers_own(row->kernel) ? FA_MASK_WINDOW : key->mask; /* lists of tiles are most like it */
    if (!(row->masks >> mask & 1) || (row->max_queries && row->only != FA_FOR_LONG_TMA && row->only != FA_FOR_FITTING_TMA && call->max_seqlen_q > row->max_queries) ||
        !is_for(row, call, key))
        return FIT_NO_MASK;
    return FIT_WHOLLY;
}

/* The first width that holds so many. */
static int width_of(int columns, const int *widths)
{
    while (*widths < columns)
        widths++;
    return *widths;
}

void fa_tune_columns(const fa_tune_row *row, fa_key *key)
{
    static const int of_output[] = {64, 96, 128, 192, 256}; /* of O, as WGMMA is there (ptx_sm90.cuh) */
    static const int of_two_k[] = {192, 256}, of_two_v[] = {128, 192, 256}, of_panels[] = {64, 128, 192, 256}; /* backward: panels that two consumers share */
    bool forward = row->kernel == FA_KERNEL_FORWARD_SM90 || row->kernel == FA_KERNEL_FORWARD_F32_SM90, backward = row->kernel == FA_KERNEL_BACKWARD_SM90, latent = fa_is_latent(row);
    if (!forward && !backward && !latent && row->kernel != FA_KERNEL_FORWARD_FEW_SM90 && row->kernel != FA_KERNEL_BACKWARD_F32_SM90 && !fa_has_one_tile(row))
        return;
    key->even_d = 0;
    if (forward && key->dtype != FLASH_ATTN_F8E4M3) {
        key->head_dim   = key->head_dim < of_output[0] ? of_output[0] : key->head_dim;
        key->head_dim_v = width_of(key->head_dim_v, of_output);
    } else if (backward && row->head_dim > 128) {
        key->head_dim   = width_of(key->head_dim, of_two_k);
        key->head_dim_v = width_of(key->head_dim_v, of_two_v);
    } else if (row->kernel == FA_KERNEL_BACKWARD_F32_SM90 && row->head_dim > 128) {
        key->head_dim   = width_of(key->head_dim, of_panels);
        key->head_dim_v = width_of(key->head_dim_v, of_panels);
    } else {
        enum { FEWEST_OF_WIDE = 320 }; /* a panel of Q and K in the second half */
        if (row->only != FA_FOR_WIDE)
            key->head_dim = row->head_dim;
        else if (key->head_dim < FEWEST_OF_WIDE)
            key->head_dim = FEWEST_OF_WIDE;
        key->head_dim_v = latent ? FA_LATENT_COLUMNS_V : row->head_dim;
    }
}

flash_attn_status fa_tune_choose(const fa_call *call, const fa_key *key, const char *name, const fa_tune_row **row)
{
    int                      arch     = key->arch;
    static const char *const dtypes[] = {"float32", "float16", "bfloat16", "float8_e4m3"};
    enum fit                 best     = FIT_NO_KERNEL;
    int                      widest   = 0; /* head_dim of the rows that lack nothing else */
    const char              *pass     = call->pass == FLASH_ATTN_BACKWARD ? "backward" : "forward";
    for (int i = 0; i < fa_num_tune_rows; i++) {
        enum fit fit = fit_of(&fa_tune_rows[i], call, key, name);
        if (fit == FIT_WHOLLY) {
            *row = &fa_tune_rows[i];
            return FLASH_ATTN_OK;
        }
        best = fit > best ? fit : best;
        if (fit == FIT_NO_HEAD_DIM && fa_tune_rows[i].head_dim > widest)
            widest = fa_tune_rows[i].head_dim;
    }
    switch (best) {
    case FIT_NO_ARCH:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel for compute capability %d.%d", pass, arch / 10, arch % 10);
    case FIT_NO_DTYPE:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel takes q of %s on compute capability %d.%d", pass,
                       dtypes[call->q.dtype], arch / 10, arch % 10);
    case FIT_NO_HEAD_DIM:
        return fa_fail(FLASH_ATTN_UNSUPPORTED,
                       "no CUDA %s kernel for %s holds head_dim %lld with head_dim_v %lld on compute capability %d.%d: the largest is %d", pass,
                       dtypes[call->q.dtype], (long long)call->head_dim, (long long)call->head_dim_v, arch / 10, arch % 10, widest);
    case FIT_NO_MASK:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel for this mask with these options", pass);
    default:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel%s%s", pass, name ? " named " : "", name ? name : "");
    }
}
