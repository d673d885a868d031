/*
 * Every tune row is compiled by NVRTC for every architecture that it serves, and no kernel may spill, keep a stack frame
 * or draw a remark that the compiler has broken up its tensor-core pipeline. No GPU is needed. Without NVRTC the tests
 * are skipped, with the reason.
 *
 *     test_cuda_compile [--all] [--kernel NAME] [--option NAME] [--dtype N] [--nvrtc FILE]
 *         --all: every architecture (but where another stands for it, the ladder on 8.0, 9.0 and 12.0), and each option of a problem
 *                on the rows that is_built_with names; otherwise sm_80 and sm_90, and the options of head_dim 128 on one
 *         --kernel: this kernel alone, for who works on it
 *         --option: this option alone ("small", say), on every architecture
 *         --dtype: this flash_attn_dtype alone, as a number
 *         --nvrtc: another libnvrtc.so than the one that the library finds. Architectures that it does not know are left
 *                  out, and what it spills is told but no failure: that is held for one version only
 *
 * Kernels that have not changed since the last run come from a cache in the folder that it is run in.
 */
#include "compile_options.h"
#include "harness_compile.h"

#include "check.h"
#include "cuda/ladder.h"

#include <limits.h>
#include <sys/stat.h>

static const int archs[] = {80, 86, 89, 90, 100, 120};
enum { NUM_ARCHS = sizeof archs / sizeof *archs };

static bool        all;
static const char *only_kernel; /* or NULL: every kernel */
static const char *only_option; /* or NULL: every option */
static int         only_dtype = -1; /* or -1: every dtype */
static const char *other_nvrtc; /* or NULL: the one that the library finds */

/* ---- problems ---- */

static bool is_backward(const fa_tune_row *row) { return strncmp(fa_kernels[row->kernel].name, "backward", 8) == 0; }

/* V is K's first columns. */
static void set_latent(flash_attn_problem *p)
{
    int64_t d = p->k.shape[3], heads = p->k.shape[2], strides[] = {p->k.shape[1] * heads * d, heads * d, d, 1};
    memcpy(p->k.stride, strides, sizeof strides);
    p->v          = p->k;
    p->v.shape[3] = d - 64;
}

/* So many queries that none of the rows before this one, for long calls alone, takes them. */
static int64_t many_queries(const fa_tune_row *row, flash_attn_dtype dtype)
{
    int64_t many = 4096;
    for (const fa_tune_row *before = fa_tune_rows; before < row && before < fa_tune_rows + fa_num_tune_rows; before++) /* a rung's row is elsewhere */
        if (before->only == FA_FOR_LONG_TMA && before->kernel == row->kernel && before->head_dim == row->head_dim && before->masks & row->masks & FA_ON_CAUSAL &&
            before->dtypes >> dtype & 1 && before->max_queries < many)
            many = before->max_queries;
    return many;
}

/* A call that takes this row, causal unless the row or the option says otherwise. */
static flash_attn_status call_for(const fa_tune_row *row, flash_attn_dtype dtype, const option *with, fa_call *call)
{
    flash_attn_dtype   wide   = dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_BF16 : dtype;
    bool               few = row->only == FA_FOR_FEW || row->only == FA_FOR_FEW_TMA || fa_is_latent(row) /* then a tile has the queries of four heads */, short_keys = fa_has_one_tile(row);
    bool               fitting = row->only == FA_FOR_FITTING_TMA;
    int64_t            most   = fitting ? (is_backward(row) && row->masks != FA_ON_WINDOW ? 256 : 832) : row->only == FA_FOR_TMA ? row->max_queries / row->tile_q * row->tile_q : row->max_queries + (row->only == FA_FOR_LONG_TMA); /* of FA_FOR_LONG_TMA the fewest;
                                 whole tiles, or those of a fitting row cover less */
    int64_t            seqlen = few ? row->tile_q / 4 : row->only == FA_FOR_FEW_KEYS ? 3 * row->tile_q : short_keys ? row->tile_q : row->max_queries ? most : many_queries(row, dtype), keys = short_keys ? row->tile_k : is_backward(row) ? 320 /* of tiles of 64 and of 80 */ : 256, d = row->head_dim, heads_q = few ? 16 : 4, batch = row->only == FA_FOR_FEW_TMA && row->tile_q > 64 ? 17 /* of fewer the tiles would be small */ : 2;
    if (row->only == FA_FOR_SHORT_TMA || fitting)
        keys = most;
    if (row->only == FA_FOR_WIDE) /* of two tiles of rows on so many keys causal blocks are in pairs */
        seqlen *= 2, keys = 2048;
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA},
                            .q      = {.dtype = dtype, .shape = {batch, seqlen, heads_q, d}},
                            .k      = {.dtype = dtype, .shape = {batch, keys, 4, d}},
                            .v      = {.dtype = dtype, .shape = {batch, keys, 4, row->only == FA_FOR_NARROW_V_TMA ? FA_NARROW_V : d}},
                            .o      = {.dtype = wide},
                            .mask   = FLASH_ATTN_CAUSAL};
    flash_attn_tensor  like = {.dtype = wide};
    flash_attn_grads   grads = {.dout = like, .dq = like, .dk = like, .dv = like};
    if (!(row->masks & FA_ON_CAUSAL))
        p.mask = row->masks & FA_ON_NONE ? FLASH_ATTN_NONE : FLASH_ATTN_WINDOW;
    if (p.mask == FLASH_ATTN_WINDOW)
        p.window_left = p.window_right = 64; /* which fitting rows fit */
    if (row->only == FA_FOR_BIAS_TMA)
        set_bias(&p, &grads);
    if (row->only == FA_FOR_CUT_TMA)
        set_slices(&p, &grads);
    with->set(&p, &grads);
    if (row->only == FA_FOR_LATENT)
        set_latent(&p);
    if (row->only == FA_FOR_WIDE && with->set == set_uneven) /* with the fewest panels of K */
        p.q.shape[3] = p.k.shape[3] = 320;
    if (is_backward(row)) {
        flash_attn_status status = fa_normalise(&p, &grads, FLASH_ATTN_BACKWARD, FA_PLAN, call);
        if (row->only == FA_FOR_BIAS_TMA) /* a plan has all gradients */
            call->dbias.data = NULL;
        return status;
    }
    return fa_normalise(&p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, call);
}

/* ---- the keys of a plan ---- */

static void add_key(key_list *list, const fa_key *key, int spills)
{
    if ((!only_kernel || strcmp(fa_kernels[key->kernel].name, only_kernel) == 0) && (only_dtype < 0 || key->dtype == only_dtype))
        list_key(list, key, spills);
}

/* The portable kernel behind a backward of planes, of which nothing is even: a row of its own accepts what it spills. At 256 it takes half a minute, and differs from that row's own in bounds
 * of its loads alone. */
static bool stands_behind(const fa_plan *plan, int i) { return i > plan->main && plan->launch[i].key.kernel == FA_KERNEL_BACKWARD_SM80; }

/* What a row accepts of its own kernel. Who walks lists has more to remember, in Hopper's backward in warps that have 24 registers; who finds a part of the keys too, once an item, and who folds parts where each ends: no loop of steps
 * spills anything. */
static int spills_of_row(const fa_tune_row *row, const fa_key *key)
{
    enum { SPILLS_OF_LISTS = 120, SPILLS_OF_PARTS = 24, SPILLS_OF_GROUPS = 16, SPILLS_OF_FOLDING = 320 };
    if (key->kernel == FA_KERNEL_FORWARD_SM90 && key->one_launch)
        return row->max_spill_bytes + SPILLS_OF_FOLDING;
    return row->max_spill_bytes + (key->mask == FA_MASK_LISTED ? SPILLS_OF_LISTS : 0) + (key->kernel == FA_KERNEL_FORWARD_SM90 ? SPILLS_OF_PARTS * key->has_split + SPILLS_OF_GROUPS * key->has_groups : 0);
}

/* Those beside it may not spill. */
static void add_plan(key_list *list, const fa_plan *plan)
{
    for (int i = 0; i < plan->num_launches; i++)
        if (!stands_behind(plan, i))
            add_key(list, &plan->launch[i].key, i == plan->main ? spills_of_row(plan->row, &plan->launch[i].key) : 0);
}

static void add_who_stands_behind(key_list *list, const fa_call *call, const fa_plan *plan)
{
    const fa_tune_row *row;
    for (int i = 0; i < plan->num_launches; i++)
        if (stands_behind(plan, i) && plan->row->head_dim < 256) {
            assert_int_equal(fa_tune_choose(call, &plan->launch[plan->main].key, fa_kernels[FA_KERNEL_BACKWARD_SM80].name, &row), FLASH_ATTN_OK);
            add_key(list, &plan->launch[i].key, row->max_spill_bytes);
        }
}

/* Portable rows stand behind Hopper's own on 9.0, which calls with other strides pass by; asked for by name they are found. Rows
 * of one kernel must not hide each other. */
static const char *kernel_of(const fa_tune_row *row)
{
    return row->kernel == FA_KERNEL_FORWARD_SM80 || row->kernel == FA_KERNEL_BACKWARD_SM80 ? fa_kernels[row->kernel].name : NULL;
}

/* The kernels beside the row's own that split keys need. */
static void add_combine(key_list *list, const fa_tune_row *row, flash_attn_dtype dtype, int arch)
{
    static const option split = {"split", true, false, set_split, EVERY_ROW};
    fa_call             call;
    fa_plan             plan;
    if (is_backward(row) || call_for(row, dtype, &split, &call) != FLASH_ATTN_OK ||
        fa_plan_make(&call, arch, NULL, kernel_of(row), &plan) != FLASH_ATTN_OK)
        return;
    for (int i = 0; i < plan.num_launches; i++)
        if (plan.launch[i].key.kernel == FA_KERNEL_COMBINE || plan.launch[i].key.kernel == FA_KERNEL_FOLD)
            add_key(list, &plan.launch[i].key, 0);
}

/* ---- tests ---- */

static bool skips(int arch) { return !all && arch != 80 && arch != 90; }

/* A row that no problem takes, because one before it takes them all, is a mistake. */
static void every_row_is_taken_on_every_architecture_that_it_names(void **state)
{
    (void)state;
    for (int r = 0; r < fa_num_tune_rows; r++)
        for (int a = 0; a < NUM_ARCHS; a++)
            for (int dtype = 0; dtype <= FLASH_ATTN_F8E4M3; dtype++) {
                const fa_tune_row *row = &fa_tune_rows[r];
                fa_call            call;
                fa_plan            plan;
                if (archs[a] < row->arch_min || archs[a] > row->arch_max || !(row->dtypes >> dtype & 1))
                    continue;
                bool   softcap = row->only == FA_FOR_ALIGNED || row->only == FA_FOR_SOFTCAP_TMA;
                option only    = {"", true, true, row->only == FA_FOR_ANY ? set_odd : softcap ? set_softcap : set_nothing, EVERY_ROW};
                if (call_for(row, (flash_attn_dtype)dtype, &only, &call) != FLASH_ATTN_OK ||
                    fa_plan_make(&call, archs[a], NULL, kernel_of(row), &plan) != FLASH_ATTN_OK)
                    fail_msg("row %d, sm_%d: %s", r, archs[a], flash_attn_last_error());
                if (plan.row != row)
                    fail_msg("row %d (%s) is hidden on sm_%d by row %d", r, row->why, archs[a],
                             (int)(plan.row - fa_tune_rows));
                key_list list = {0}; /* what spills is measured against this row, not one for other architectures */
                add_plan(&list, &plan);
                for (int i = 0; i < list.count; i++)
                    assert_int_equal(list.one[i].spills, list.one[i].key.kernel == (int)row->kernel ? spills_of_row(row, &list.one[i].key) : 0);
                free(list.one);
            }
}

/* What a lower architecture of the row stands for: 8.6 spills no more than 8.0, 8.9 has the instructions and registers of 8.6, and float32
 * uses no more of 10.0 than of 9.0. */
static bool stands_with_a_lower(int arch, const fa_tune_row *row, int dtype)
{
    bool f32 = row->dtypes == FA_IN_F32, f8 = dtype == FLASH_ATTN_F8E4M3;
    return (arch == 86 && row->arch_min <= 80) || (arch == 89 && row->arch_min <= 86 && (!f8 || row->head_dim != 128)) ||
           (arch == 100 && row->arch_min <= 90 && (f32 || f8));
}

static bool is_portable(const fa_tune_row *row) { return row->kernel == FA_KERNEL_FORWARD_SM80 || row->kernel == FA_KERNEL_BACKWARD_SM80; }

static bool is_first_of_its_kernel(const fa_tune_row *row)
{
    for (const fa_tune_row *before = fa_tune_rows; before < row; before++)
        if (before->kernel == row->kernel && before->head_dim == row->head_dim && before->arch_min == row->arch_min && before->dtypes & row->dtypes)
            return false;
    return true;
}

/* What bfloat16 of the row stands for. float16 makes the same code but for the instruction's name: one row of each kernel has it. FP8 is float16's code but for the copies, which widen
 * it by other instructions from 8.9 on: on 9.0 all of Hopper's own rows have it, others those of head_dim 128. */
static bool stands_with_bf16(int arch, const fa_tune_row *row, int dtype)
{
    if (!(row->dtypes & FA_IN_BF16))
        return false;
    if (dtype == FLASH_ATTN_F16)
        return row->head_dim != 128 || arch != (is_portable(row) ? 80 : 90) || !is_first_of_its_kernel(row);
    return dtype == FLASH_ATTN_F8E4M3 && (arch != 90 || is_portable(row)) && row->head_dim != 128;
}

static void every_row_builds_cleanly_for_every_architecture(void **state)
{
    (void)state;
    need_nvrtc(other_nvrtc);
    if (only_option)
        skip();
    key_list list = {0};
    for (int r = 0; r < fa_num_tune_rows; r++)
        for (int a = 0; a < NUM_ARCHS; a++)
            for (int dtype = 0; dtype <= FLASH_ATTN_F8E4M3; dtype++) {
                const fa_tune_row *row = &fa_tune_rows[r];
                fa_call            call;
                fa_plan            plan;
                if (archs[a] < row->arch_min || archs[a] > row->arch_max || !(row->dtypes >> dtype & 1) || skips(archs[a]))
                    continue;
                if (stands_with_a_lower(archs[a], row, dtype) || stands_with_bf16(archs[a], row, dtype))
                    continue;
                assert_int_equal(call_for(row, (flash_attn_dtype)dtype, &options[0], &call), FLASH_ATTN_OK);
                assert_int_equal(fa_plan_make(&call, archs[a], NULL, kernel_of(row), &plan), FLASH_ATTN_OK);
                add_plan(&list, &plan);
                add_who_stands_behind(&list, &call, &plan);
                add_combine(&list, row, (flash_attn_dtype)dtype, archs[a]);
            }
    for (int a = 0; a < NUM_ARCHS && !skips(archs[a]); a++) {
        static const enum fa_kernel_id alone[] = {FA_KERNEL_UPLOAD, FA_KERNEL_MERGE, FA_KERNEL_APPEND};
        for (size_t i = 0; i < sizeof alone / sizeof *alone; i++) {
            fa_key key = fa_plan_small_key(alone[i], archs[a]);
            add_key(&list, &key, 0);
        }
    }
    assert_int_equal(count_failures(&list, other_nvrtc), 0);
    free(list.one);
}

/* An option costs registers alike on all architectures: of rows that differ in them alone the last stands for all; but for a row with an option that its twin has not. */
static bool has_twin_below(int r)
{
    const fa_tune_row *row = &fa_tune_rows[r];
    if (row->only == FA_FOR_SOFTCAP_TMA || row->only == FA_FOR_CUT_TMA)
        return false;
    for (int n = r + 1; n < fa_num_tune_rows; n++) {
        const fa_tune_row *other = &fa_tune_rows[n];
        if (other->kernel == row->kernel && other->dtypes == row->dtypes && other->head_dim == row->head_dim &&
            other->tile_q == row->tile_q && other->tile_k == row->tile_k && other->warps == row->warps &&
            other->stages == row->stages && other->min_blocks == row->min_blocks && other->variant == row->variant)
            return true;
    }
    return false;
}

/* Slices beside what needs most registers, of Hopper's own at head_dim 64; slices one by one, of the portable kernel's row for any rows. Lists themselves are built wherever "slices" is. */
static bool has_more_slices(const fa_tune_row *row, const option *with)
{
    if (with->set == set_slices_few)
        return row->head_dim == 64 && row->only == FA_FOR_ANY;
    return row->head_dim == 64 && (row->kernel == FA_KERNEL_BACKWARD_SM90 || (row->kernel == FA_KERNEL_FORWARD_SM90 && row->only == FA_FOR_TMA && row->masks & FA_ON_WINDOW));
}

static bool is_mask(const option *with) { return with->set == set_full || with->set == set_window; }

/* Above head_dim 64 another mask takes no more than the row's own; a window is built where queries have tiles of their own. Of Hopper's backward dropout
 * spills more. */
static bool has_masks(const fa_tune_row *row, const option *with)
{
    if (row->head_dim == 64 || fa_is_latent(row) || ((row->kernel == FA_KERNEL_FORWARD_SM90 || row->only == FA_FOR_PLANES) && row->head_dim == 128))
        return true;
    return !is_backward(row) && row->only != FA_FOR_FEW && with->set == set_window;
}

/* float32: dropout spills most, of the backward at 256 one launch; forward bias, and pages in parts, too. On other architectures dropout leaves 190 bytes of
 * what the rows accept, or 25 registers. */
static bool is_built_in_f32(const fa_tune_row *row, int arch, const option *with)
{
    if (arch != 90)
        return false;
    if (is_backward(row) && row->head_dim == 256)
        return with->set == set_small || with->set == set_many;
    return with->set == set_nothing || (with->set == set_dropout && row->head_dim != 256) ||
           (row->head_dim == 64 && (with->set == set_odd || (!is_backward(row) && (with->set == set_bias || with->set == set_split_pages))));
}

/* Hopper's forward in 16 bits stores O in float32 with as many registers and no spill more than in 16 bits; FP8's alone spills. */
static bool stores_as_in_16_bits(const fa_tune_row *row, int dtype, const option *with)
{
    return with->set == set_o_f32 && row->kernel == FA_KERNEL_FORWARD_SM90 && row->head_dim != 64 && dtype != FLASH_ATTN_F8E4M3;
}

/* Options of 9.0's rows in 16 bits that spill nothing more, and where registers are known take no more, than one of the row that stays (dropout, mostly); another
 * row has each. */
static bool has_it_elsewhere(const fa_tune_row *row, const option *with)
{
    switch (row->kernel) {
    case FA_KERNEL_FORWARD_SM90:
        if (with->set == set_split_pages) /* pages of parts: with groups, and walked */
            return true;
        if (row->head_dim == 64 && !(row->masks & FA_ON_CAUSAL)) /* of two rows without a causal mask one accepts spills */
            return with->set == set_walked_pages || with->set == set_grouped_split || with->set == set_grouped_split_pages || with->set == set_alibi || with->set == set_paged || (row->max_spill_bytes == 0 && with->set == set_o_f32);
        if (with->set == set_alibi || with->set == set_grouped_split_pages) /* dropout; walked */
            return true;
        if (row->head_dim == 64)
            return with->set == set_paged;
        if (row->head_dim == 128) /* dropout; pages with groups; 64 columns have windows */
            return with->set == set_softcap || with->set == set_grouped || (row->tile_k != 64 && (with->set == set_paged || with->set == set_window));
        return with->set != set_nothing && with->set != set_dropout && !(row->head_dim == 256 && is_mask(with));
    case FA_KERNEL_BACKWARD_SM90:
        return with->set == set_alibi || (row->head_dim == 64 ? is_mask(with) : with->set == set_softcap) || (row->head_dim == 256 && with->set == set_dropout && row->tile_k == 64);
    case FA_KERNEL_BACKWARD_SM80:
        if (row->head_dim == 64)
            return with->set == set_uneven || with->set == set_alibi || with->set == set_dropout || is_mask(with); /* softcap spills more than dropout */
        return with->set == set_odd || with->set == set_softcap || (row->head_dim > 128 && (with->set == set_bias || with->set == set_dbias));
    case FA_KERNEL_FORWARD_FEW_SM90: /* whole tiles with pages need most */
        return with->set == set_groups ? row->head_dim != 64 || row->tile_q == 64 : with->set == set_whole ? row->head_dim < 256 : row->head_dim != 64 && (with->set == set_split || with->set == set_paged);
    case FA_KERNEL_FORWARD_SM80:
        if (row->tile_q == 16) /* parts in pages need most, at 256 bias as much; that is far from what there is */
            return with->set != set_nothing && with->set != set_split_pages && with->set != set_split && !(row->head_dim == 256 && with->set == set_bias_of_all_heads);
        if (with->set == set_split || with->set == set_split_many || with->set == set_paged) /* a bias needs more; head_dim 64 has parts in pages */
            return true;
        if (row->head_dim == 64)
            return with->set == set_uneven || with->set == set_alibi || (row->tile_q == 64 && with->set == set_o_f32) || (with->set == set_split_pages && row->tile_q != 64);
        if (with->set == set_softcap || with->set == set_uneven)
            return row->head_dim > 128;
        return row->head_dim > 256 && (with->set == set_odd || with->set == set_bias);
    default:
        return false;
    }
}

/* 9.0's rows have the options that the table says, and of others those that differ from them the ones that need most registers. */
static bool is_built_with(const fa_tune_row *row, int arch, const option *with)
{
    bool slow = row->dtypes == FA_IN_F32 || is_backward(row), of_90 = row->arch_max >= 90 && row->arch_min <= 90;
    if (is_mask(with) && !has_masks(row, with))
        return false;
    if (with->set == set_slices_few || with->set == set_slices_dropout || with->set == set_slices_softcap)
        return arch == 90 && row->dtypes != FA_IN_F32 && has_more_slices(row, with);
    if (fa_has_one_tile(row) && with->set == set_slices) /* which are of longer calls */
        return false;
    if (row->only == FA_FOR_PLANES && row->head_dim == 128) /* which is short of registers */
        return with->set == set_nothing || is_mask(with) || with->set == set_bias || with->set == set_dropout;
    if (row->only == FA_FOR_PLANES)
        return with->set == set_nothing || (row->head_dim == 64 ? with->set == set_paged && !is_backward(row) : with->set == set_uneven || (with->set == set_few_heads_k && is_backward(row)));
    if (row->dtypes == FA_IN_F32)
        return arch == (of_90 ? 90 : row->arch_min) && is_built_in_f32(row, arch, with);
    if (arch != (of_90 ? 90 : row->arch_min)) /* 12.0 gives a thread more registers: 254 of 255 with dropout */
        return arch == 120 && with->set == set_dropout && !slow;
    if (row->only == FA_FOR_CUT_TMA)
        return with->set == set_nothing || with->set == set_softcap || with->set == set_dropout;
    if (row->only == FA_FOR_BIAS_TMA)
        return with->set == set_nothing || with->set == set_dropout || with->set == set_dbias || (is_mask(with) && row->head_dim == 64);
    if (fa_is_latent(row))
        return with->rows != FEW_ROWS && (with->rows != HEAD_DIM_64 || with->set == set_few_heads_k);
    if (row->kernel == FA_KERNEL_FORWARD_FEW_SM90)
        return !has_it_elsewhere(row, with) && ((with->rows == FEW_ROWS && with->set != set_bias_of_all_heads) || with->set == set_nothing || with->set == set_split || with->set == set_paged || (is_mask(with) && row->head_dim == 64));
    if (with->set == set_bias_of_all_heads)
        return row->only == FA_FOR_FEW && !has_it_elsewhere(row, with);
    if (with->rows == FEW_ROWS || ((arch == 90 || row->tile_q == 16) && has_it_elsewhere(row, with)))
        return false;
    if (arch == 90)
        return with->rows == EVERY_ROW || row->head_dim == 64 || with->rows == ROWS_OF_16_BIT || row->kernel == FA_KERNEL_FORWARD_SM90 ||
               (with->rows == TIGHT_ROWS && !is_backward(row) && row->max_spill_bytes > 0);
    return with->set == set_dropout ||
           (!is_backward(row) && (with->set == set_nothing || (with->set == set_paged && row->head_dim <= 256) || (is_mask(with) && row->head_dim == 64)));
}

/* FP8 is float16's code but for the copies, and a kernel of its own on Hopper, which has masks and, on rows that accept spills, outputs of float32. */
static bool is_of_fp8(const fa_tune_row *row, int arch, const option *with)
{
    bool own = row->kernel == FA_KERNEL_FORWARD_SM90 && ((with->rows == EVERY_ROW && with->set != set_window) || (with->set == set_o_f32 && row->max_spill_bytes > 0));
    return arch == 90 && row->head_dim == 128 && (own || (with->set == set_paged && row->variant != 4 /* whose text the others have */) || with->set == set_uneven || with->set == set_odd);
}

static void every_option_builds_cleanly(void **state)
{
    (void)state;
    need_nvrtc(other_nvrtc);
    key_list list = {0};
    for (int r = 0; r < fa_num_tune_rows; r++)
        for (int o = 0; o < NUM_OPTIONS * NUM_ARCHS; o++) {
            const fa_tune_row *row  = &fa_tune_rows[r];
            const option      *with = &options[o / NUM_ARCHS];
            fa_call            call;
            fa_plan            plan;
            int                arch = archs[o % NUM_ARCHS];
            if (!(is_backward(row) ? with->backward : with->forward) || arch < row->arch_min || arch > row->arch_max)
                continue;
            if (only_option ? strcmp(with->name, only_option) != 0
                            : has_twin_below(r) || !is_built_with(row, arch, with) || (!all && (row->head_dim != 128 || arch != 90)))
                continue;
            for (int dtype = 0; dtype <= FLASH_ATTN_F8E4M3; dtype++) {
                if (!(row->dtypes >> dtype & 1) || (dtype == FLASH_ATTN_F16 && (row->dtypes & FA_IN_BF16)))
                    continue;
                if (!only_option && (dtype == FLASH_ATTN_F8E4M3 ? !is_of_fp8(row, arch, with) : stores_as_in_16_bits(row, dtype, with)))
                    continue;
                if (call_for(row, (flash_attn_dtype)dtype, with, &call) != FLASH_ATTN_OK)
                    fail_msg("%s: %s", with->name, flash_attn_last_error());
                if (fa_plan_make(&call, arch, NULL, kernel_of(row), &plan) != FLASH_ATTN_OK)
                    print_message("  %s %s: %s\n", fa_kernels[row->kernel].name, with->name, flash_attn_last_error());
                else if (plan.row == row || only_option) /* another row that takes the option has a turn of its own */
                    add_plan(&list, &plan);
            }
        }
    assert_int_equal(count_failures(&list, other_nvrtc), 0);
    free(list.one);
}

/* What `flashattn compile` builds for its test (test_cli_compile.py), which has it from the emulated NVRTC: few queries take parts there as no row above has them. */
static void plain_calls_of_all_lengths_build_cleanly(void **state)
{
    (void)state;
    static const flash_attn_dtype dtypes[] = {FLASH_ATTN_BF16, FLASH_ATTN_F8E4M3};
    static const int64_t          keys[] = {0 /* as queries */, 128, 1024, 8192, 131072}, batches[] = {1, 16, 512};
    need_nvrtc(other_nvrtc);
    if (only_option || !all)
        skip();
    key_list list = {0};
    for (int n = 0; n < 2 * 2 * 3 * 5; n++)
        for (int64_t power = 1; power <= 8192; power *= 2) {
            flash_attn_dtype   dtype = dtypes[n % 2];
            int64_t            batch = batches[n / 4 % 3], queries = power + n / 2 % 2, seqlen_k = keys[n / 12] ? keys[n / 12] : queries;
            flash_attn_problem p     = {.device = {.type = FLASH_ATTN_CUDA},
                                        .q      = {.dtype = dtype, .shape = {batch, queries, 4, 64}},
                                        .k      = {.dtype = dtype, .shape = {batch, seqlen_k, 4, 64}},
                                        .o      = {.dtype = FLASH_ATTN_BF16},
                                        .mask   = FLASH_ATTN_CAUSAL};
            fa_call            call;
            fa_plan            plan;
            p.v = p.k;
            assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
            assert_int_equal(fa_plan_make(&call, 90, NULL, NULL, &plan), FLASH_ATTN_OK);
            add_plan(&list, &plan);
        }
    assert_int_equal(count_failures(&list, other_nvrtc), 0);
    free(list.one);
}

/* The forced kernel by its name, as flash_attn_options.kernel does it. */
static void every_rung_of_the_ladder_builds_cleanly(void **state)
{
    (void)state;
    need_nvrtc(other_nvrtc);
    if (only_option)
        skip();
    key_list list = {0};
    for (int g = 0; g < fa_num_rungs; g++)
        for (int r = 0; r < fa_rungs[g].num_rows; r++)
            for (int a = 0; a < NUM_ARCHS; a++)
                for (int f16 = 0; f16 < 2; f16++)
                    for (int causal = 0; causal < 2; causal++) {
                        const fa_tune_row *row = &fa_rungs[g].row[r];
                        const option mask = {"", true, false, causal ? set_nothing : set_full, EVERY_ROW};
                        fa_tune_row  like = *row; /* call_for's default is causal */
                        fa_call      call;
                        fa_plan      plan;
                        if (archs[a] < row->arch_min || archs[a] > row->arch_max || !(row->masks >> causal & 1) ||
                            (!all && archs[a] != 90) || (r > 0 && (archs[a] != 90 || f16)) || (f16 && (archs[a] != 90 || !all || (!causal && row->masks & FA_ON_CAUSAL))) ||
                            (archs[a] != 80 && archs[a] != 90 && archs[a] != 120)) /* one of each kind */
                            continue;
                        like.kernel = FA_KERNEL_FORWARD_SM80;
                        assert_int_equal(call_for(&like, f16 ? FLASH_ATTN_F16 : FLASH_ATTN_BF16, &mask, &call), FLASH_ATTN_OK);
                        if (fa_plan_make(&call, archs[a], NULL, fa_rungs[g].name, &plan) != FLASH_ATTN_OK)
                            fail_msg("%s on sm_%d: %s", fa_rungs[g].name, archs[a], flash_attn_last_error());
                        assert_ptr_equal(plan.row, row);
                        add_plan(&list, &plan);
                    }
    assert_int_equal(count_failures(&list, other_nvrtc), 0);
    free(list.one);
}

/* What a rung does not do is refused, never run as something else. */
static void a_rung_says_what_it_lacks(void **state)
{
    (void)state;
    static const struct {
        const option with;
        const char  *name, *says;
        int          arch;
    } refused[] = {
        {{"", true, false, set_window, EVERY_ROW}, "k2", "windows", 90},   {{"", true, false, set_softcap, EVERY_ROW}, "k4.2", "softcap", 90},
        {{"", true, false, set_varlen, EVERY_ROW}, "k1", "lengths", 90},   {{"", true, false, set_uneven, EVERY_ROW}, "k2", "head dims", 90},
        {{"", true, false, set_o_f32, EVERY_ROW}, "k6", "dtype", 90},      {{"", true, false, set_sinks, EVERY_ROW}, "fa1", "sinks", 90},
        {{"", true, false, set_o_f32, EVERY_ROW}, "k8", "dtype", 90},      {{"", true, false, set_softcap, EVERY_ROW}, "fd", "softcap", 90},
        {{"", true, false, set_nothing, EVERY_ROW}, "k4.2", "compute capability 8.0", 80},
        {{"", true, false, set_nothing, EVERY_ROW}, "k7", "compute capability 12.0", 120},
        {{"", true, false, set_nothing, EVERY_ROW}, "k3.1", "compute capability 12.0", 120},
        {{"", true, false, set_nothing, EVERY_ROW}, "k9", "no CUDA forward kernel named k9", 90}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        fa_tune_row like = fa_rungs[0].row[1];
        fa_call     call;
        fa_plan     plan;
        like.kernel = FA_KERNEL_FORWARD_SM80;
        assert_int_equal(call_for(&like, FLASH_ATTN_BF16, &refused[i].with, &call), FLASH_ATTN_OK);
        assert_int_equal(fa_plan_make(&call, refused[i].arch, NULL, refused[i].name, &plan), FLASH_ATTN_UNSUPPORTED);
        if (!strstr(flash_attn_last_error(), refused[i].says))
            fail_msg("%s: %s", refused[i].name, flash_attn_last_error());
    }
}

int main(int argc, char **argv)
{
    char here[PATH_MAX - 64], cache[PATH_MAX];
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--all") == 0)
            all = true;
        else if (strcmp(argv[i], "--kernel") == 0 && i + 1 < argc)
            only_kernel = argv[++i];
        else if (strcmp(argv[i], "--option") == 0 && i + 1 < argc)
            only_option = argv[++i];
        else if (strcmp(argv[i], "--dtype") == 0 && i + 1 < argc)
            only_dtype = atoi(argv[++i]);
        else if (strcmp(argv[i], "--nvrtc") == 0 && i + 1 < argc)
            other_nvrtc = argv[++i];
        else
            return 2;
    }
    if (!getcwd(here, sizeof here))
        return 1;
    snprintf(cache, sizeof cache, "%s/kernel_cache", here);
    mkdir(cache, 0700);
    setenv("XDG_CACHE_HOME", cache, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_is_taken_on_every_architecture_that_it_names),
        cmocka_unit_test(every_row_builds_cleanly_for_every_architecture),
        cmocka_unit_test(every_option_builds_cleanly),
        cmocka_unit_test(plain_calls_of_all_lengths_build_cleanly),
        cmocka_unit_test(every_rung_of_the_ladder_builds_cleanly),
        cmocka_unit_test(a_rung_says_what_it_lacks),
    };
    return cmocka_run_group_tests_name("cuda_compile", tests, NULL, NULL);
}
