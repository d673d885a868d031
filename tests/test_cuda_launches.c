/* What a CUDA plan launches, without a device: that blocks and parts cover the work, that the workspace's pieces lie apart and are
 * large enough, and what tensor maps can describe. No emulated GPU runs the host's side of Hopper's kernels. */
#include "harness_plan.h"

/* ---- blocks ---- */

static void the_forward_for_hopper_has_blocks_for_all_tiles(void **state)
{
    (void)state;
    static const int64_t lengths[] = {129, 384, 385, 1100, 4096, 5000};
    static const flash_attn_mask masks[] = {FLASH_ATTN_NONE, FLASH_ATTN_CAUSAL, FLASH_ATTN_WINDOW};
    for (int n = 0; n < 6; n++)
        for (int m = 0; m < 3; m++)
            for (int varlen = 0; varlen < 2; varlen++) {
                fa_call            call;
                fa_plan            plan;
                int64_t            batch = varlen ? 61 : 8;
                flash_attn_problem p = problem_of((shape){batch, lengths[n], lengths[n], 5, 5, 128}, FLASH_ATTN_BF16, masks[m]);
                p.window_left        = masks[m] == FLASH_ATTN_WINDOW ? 100 : 0;
                if (varlen)
                    make_varlen(&p, (int32_t)lengths[n]);
                plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
                const fa_launch *main  = main_of(&plan);
                int64_t          tiles = tiles_of(call.max_seqlen_q, main->key.tile_q);
                bool             many  = masks[m] == FLASH_ATTN_CAUSAL && tiles >= 16 && tiles * batch * 5 >= 7 * plan.chip.multiprocessors;
                bool             dealt = varlen || many || masks[m] == FLASH_ATTN_WINDOW;
                assert_true(!many || lengths[n] >= 4096);
                assert_int_equal(main->key.kernel, FA_KERNEL_FORWARD_SM90);
                assert_true(main->stays);
                assert_int_equal(plan.args.all_items, dealt ? plan.args.all_tiles_q * 5 : 0);
                assert_int_equal(main->blocks, dealt ? plan.args.all_items : tiles * batch * 5);
                if (dealt) { /* as packed_sm90.cuh numbers tiles: each packed sequence may end inside one */
                    assert_true(plan.args.all_tiles_q >= batch * tiles_of(lengths[n], main->key.tile_q));
                    assert_true(plan.args.all_tiles_q <= batch * (tiles_of(lengths[n], main->key.tile_q) + 1));
                    bool more = plan.args.all_items > plan.chip.multiprocessors * main->key.min_blocks;
                    assert_int_equal(plan.num_launches, 1 + more);
                    assert_true(!more || (plan.launch[0].key.kernel == FA_KERNEL_DEAL && plan.launch[0].blocks == 1));
                    assert_true(more ? plan.workspace_bytes >= sizeof(int) : plan.workspace_bytes == 0);
                } else
                    assert_int_equal(plan.workspace_bytes, 0);
            }
}

/* A ring's steps: all tiles are dealt, if there are more of them than blocks. */
static void the_forward_deals_tiles_where_others_have_the_gpu_too(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++)
        for (int length = 256; length <= 8192; length *= 2) {
            fa_call            call;
            fa_plan            plan;
            flash_attn_problem p = problem_of((shape){1, length, length, 16, 4, 128}, FLASH_ATTN_BF16, (flash_attn_mask)m);
            p.o.dtype            = FLASH_ATTN_F32;
            plan_shared(&p, FLASH_ATTN_FORWARD, 90, true, &call, &plan);
            const fa_launch *main  = main_of(&plan);
            int64_t          items = 16 * tiles_of(length, main->key.tile_q);
            bool             more  = items > plan.chip.multiprocessors * main->key.min_blocks;
            assert_int_equal(main->key.kernel, FA_KERNEL_FORWARD_SM90);
            assert_int_equal(more, length >= 2048); /* both are seen */
            assert_true(main->stays && main->blocks == items);
            assert_int_equal(plan.args.all_items, more ? items : 0);
            assert_int_equal(plan.num_launches, 1 + more);
            assert_int_equal(plan.workspace_bytes > 0, more);
            assert_true(!more || plan.launch[0].key.kernel == FA_KERNEL_DEAL);
            fa_key own = main->key;
            plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
            assert_memory_equal(&own, &main_of(&plan)->key, sizeof own); /* the same kernel */
        }
}

/* As many as have K and V in 32 MB, equally many each time; where a head's tiles are alike one (decision 0082). */
static void heads_that_are_dealt_together_have_their_keys_in_l2(void **state)
{
    (void)state;
    static const struct {
        shape           s;
        flash_attn_mask mask;
        bool            varlen;
        int             together;
    } calls[] = {{{1, 8192, 8192, 40, 40, 128}, FLASH_ATTN_CAUSAL, false, 8},    {{1, 8192, 8192, 33, 33, 128}, FLASH_ATTN_CAUSAL, false, 6},
                 {{1, 8192, 8192, 6, 6, 256}, FLASH_ATTN_CAUSAL, true, 3},       {{1, 16384, 16384, 32, 4, 256}, FLASH_ATTN_CAUSAL, false, 16},
                 {{1, 131072, 131072, 4, 4, 256}, FLASH_ATTN_CAUSAL, false, 1}, {{9, 300, 300, 5, 5, 64}, FLASH_ATTN_CAUSAL, true, 5},
                 {{2, 8192, 8192, 16, 16, 128}, FLASH_ATTN_WINDOW, false, 1},    {{2, 8192, 8192, 16, 16, 128}, FLASH_ATTN_NONE, true, 1}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of(calls[n].s, FLASH_ATTN_BF16, calls[n].mask);
        p.window_left        = calls[n].mask == FLASH_ATTN_WINDOW ? 100 : 0;
        if (calls[n].varlen)
            make_varlen(&p, (int32_t)calls[n].s.seqlen_k);
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        assert_true(plan.args.all_items > 0);
        assert_int_equal(plan.args.order_heads, calls[n].together);
    }
}

/* Where that is done ahead of the kernel: long calls at head_dim 256 (decision 0059). */
static void a_value_of_fp8_is_turned_for_every_tile_of_keys(void **state)
{
    (void)state;
    fa_call            call;
    fa_plan            plan;
    flash_attn_problem p = problem_of((shape){2, 4097, 1000, 4, 2, 256}, FLASH_ATTN_F8E4M3, FLASH_ATTN_NONE);
    flash_attn_problem shorter = problem_of((shape){2, 4096, 1000, 4, 2, 256}, FLASH_ATTN_F8E4M3, FLASH_ATTN_NONE);
    p.o.dtype = shorter.o.dtype = FLASH_ATTN_BF16;
    plan_it(&shorter, FLASH_ATTN_FORWARD, 90, &call, &plan);
    assert_int_equal(plan.launch[0].key.kernel, FA_KERNEL_FORWARD_SM90);
    plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
    assert_int_equal(plan.launch[0].key.kernel, FA_KERNEL_VALUES_SM90);
    assert_int_equal(plan.launch[0].blocks, tiles_of(1000, main_of(&plan)->key.tile_k) * 2 * 2);
    assert_int_equal(plan.launch[0].key.tile_k, main_of(&plan)->key.tile_k);
}

/* ---- parts of the keys ---- */

static void parts_cover_all_keys(void **state)
{
    (void)state;
    for (int n = 0; n < 3 * 5 * 3 * 5; n++) {
        static const int64_t keys[] = {1, 4095, 4097, 33333, 100000}, groups[] = {1, 4, 16};
        static const int     given[] = {0, 1, 7, 256, -1}, archs[] = {80, 90, 120};
        fa_call              call;
        fa_plan              plan;
        flash_attn_problem   p = problem_of((shape){2, 1, keys[n % 5], 16, 16 / groups[n / 5 % 3], 128}, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
        p.num_splits           = given[n / 15 % 5];
        plan_it(&p, FLASH_ATTN_FORWARD, archs[n / 75], &call, &plan);
        const fa_args *args = &plan.args;
        int64_t        most = 0;
        bool           folds = main_of(&plan)->key.kernel == FA_KERNEL_FORWARD_FEW_SM90;
        for (int64_t length = 1; length <= keys[n % 5]; length++) {
            int64_t part = args->split_keys; /* as forward_work.cuh */
            for (int d = 0; d < args->part_doublings && part * part < (int64_t)args->part_growth * length && (!folds || FA_FOLD_PARTS * part < length); d++)
                part *= 2;
            most = tiles_of(length, part) > most ? tiles_of(length, part) : most;
        }
        assert_int_equal(args->num_splits, most);
        assert_int_equal(args->split_keys % main_of(&plan)->key.tile_k, 0);
        assert_int_equal(main_of(&plan)->key.has_split, args->num_splits > 1);
        if (p.num_splits > 0)
            assert_true(args->num_splits <= p.num_splits && args->num_splits == tiles_of(keys[n % 5], args->split_keys));
        assert_int_equal(main_of(&plan)->blocks % main_of(&plan)->cluster, 0);
        assert_true(main_of(&plan)->cluster <= 8);
        if (main_of(&plan)->key.one_launch && !folds)
            assert_true(main_of(&plan)->cluster * args->run_parts >= args->num_splits);
        assert_int_equal(main_of(&plan)->key.one_launch == 2, args->num_splits > 1 && args->run_parts >= args->num_splits);
        if (plan.num_launches > 1) /* combine: every row has a warp */
            assert_true(plan.launch[1].blocks * (args->row_warps > 1 ? 1 : 4 * FA_COMBINE_WARPS) >= 2 * 16);
        if (folds)
            assert_int_equal(main_of(&plan)->key.one_launch == 3, args->num_splits > args->run_parts && args->run_parts > 1);
        if (p.num_splits < 0)
            continue; /* the batch counts */
        fa_call twice;
        fa_plan other;
        p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = 40; /* the order of sums is a sequence's own */
        plan_it(&p, FLASH_ATTN_FORWARD, archs[n / 75], &twice, &other);
        assert_int_equal(other.args.split_keys, args->split_keys);
        assert_int_equal(other.args.num_splits, args->num_splits);
    }
}

/* ---- the workspace ---- */

typedef struct piece {
    const void *at;
    int64_t     bytes;
} piece;

static void expect_apart(const piece *pieces, int count, const char *base, size_t total)
{
    for (int i = 0; i < count; i++) {
        const char *begin = pieces[i].at, *end = begin + pieces[i].bytes;
        if (!begin)
            continue;
        assert_true(begin >= base && end <= base + total);
        assert_int_equal((begin - base) % 256, 0);
        for (int j = 0; j < i; j++)
            assert_true(!pieces[j].at || end <= (const char *)pieces[j].at || (const char *)pieces[j].at + pieces[j].bytes <= begin);
    }
}

static void the_workspace_has_room_for_every_piece(void **state)
{
    (void)state;
    static const int archs[] = {80, 90};
    bool             some_shared = false;
    for (int n = 0; n < 2 * 2 * 2 * 2 * 2; n++) {
        shape              s = {3, n & 4 ? 1 : 300, 700, 8, n & 16 ? 8 : 2, 64};
        fa_call            call;
        fa_plan            plan;
        flash_attn_pass    pass = n & 1 ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD;
        flash_attn_problem p    = problem_of(s, FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
        flash_attn_slice   list[2] = {{0, 1, 0, 700, 0}, {0, (int32_t)s.seqlen_q, 0, 10, 0}};
        const int32_t      offsets[] = {0, 1, 2, 2};
        p.num_splits    = n & 4 ? 5 : 0;
        p.deterministic = (n & 8) != 0;
        if (n & 8)
            p.bias = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, 8, s.seqlen_q, 700}};
        if (n & 8)
            p.slices = (flash_attn_slices){.list = list, .count = 2, .offsets = offsets};
        plan_it(&p, pass, archs[n / 2 % 2], &call, &plan);
        char *base = (char *)(uintptr_t)4096;
        fa_plan_place(&call, &plan, base);
        const fa_args *a   = &plan.args;
        const fa_key  *key = &main_of(&plan)->key;
        int64_t        tokens = s.batch * s.seqlen_q, rows = tokens * s.heads_q, tiles = s.heads_q * a->all_tiles_q, float_bytes = sizeof(float);
        bool           tma    = key->kernel == FA_KERNEL_BACKWARD_SM90, shared = tma && a->group_blocks > 1;
        int64_t        turns  = tma ? tiles : s.batch * s.heads_q * a->tiles_q;
        if (!tma)
            tiles = 0;
        const piece pieces[] = {{a->slices, 2 * (int64_t)sizeof(fa_slice)},
                                {a->slice_offsets, (s.batch + 1) * float_bytes},
                                {a->o_partial, a->num_splits * rows * key->head_dim_v * float_bytes},
                                {a->lse_partial, a->num_splits * rows * float_bytes},
                                {a->delta, rows * float_bytes},
                                {a->row_stats, 2 * tiles * key->tile_q * float_bytes},
                                {a->dq_accum, (tma ? tiles * key->tile_q : rows) * key->head_dim * float_bytes},
                                {a->dk_accum, s.batch * s.seqlen_k * s.heads_k * key->head_dim * float_bytes},
                                {a->dv_accum, s.batch * s.seqlen_k * s.heads_k * key->head_dim_v * float_bytes},
                                {a->dbias.data, s.batch * s.heads_q * s.seqlen_q * s.seqlen_k * float_bytes} /* deterministic: each sequence has its own */,
                                {a->dq_turn, turns * float_bytes},
                                {a->next_item, float_bytes},
                                {a->tile_lists, (pass == FLASH_ATTN_BACKWARD ? a->all_tiles_k : a->all_tiles_q) * (int64_t)a->list_places * (int64_t)sizeof(fa_listed)},
                                {a->tile_masks, a->most_masks * fa_mask_bytes(plan.row)},
                                {a->masks_taken, (int64_t)sizeof(int)},
                                {a->tile_turns, a->all_tiles_q * (int64_t)a->tiles_k * float_bytes},
                                {shared ? a->dk_stored.data : NULL, s.batch * s.seqlen_k * s.heads_k * a->group_blocks * key->head_dim * float_bytes},
                                {shared ? a->dv_stored.data : NULL, s.batch * s.seqlen_k * s.heads_k * a->group_blocks * key->head_dim_v * float_bytes}};
        expect_apart(pieces, sizeof pieces / sizeof *pieces, base, plan.workspace_bytes);
        assert_int_equal(a->o_partial != NULL, key->has_split);
        some_shared |= shared && a->dk_stored.data && a->dv_stored.data;
        if (pass == FLASH_ATTN_BACKWARD) {
            assert_non_null(a->dq_accum);
            assert_int_equal(a->dk_accum != NULL, key->has_kv_accum);
            assert_int_equal(a->dbias.data != NULL, (n & 8) != 0);
            assert_int_equal(a->dq_turn != NULL, p.deterministic || tma);
        }
        if (a->dk_accum) /* what is added to is cleared */
            assert_true(plan.zero == (void *)a->dk_accum && (char *)plan.zero + plan.zero_bytes == base + plan.workspace_bytes);
    }
    assert_true(some_shared);
}

/* Tiles of two float16 for each number, of whole panels of 64 columns, and their notes. */
static void planes_have_room_for_every_tile(void **state)
{
    (void)state;
    for (int n = 0; n < 8; n++) {
        fa_call            call;
        fa_plan            plan;
        bool               backward = n & 1, varlen = n & 2;
        shape              s        = {3, 300, 700, 8, 2, n & 4 ? 200 : 72};
        flash_attn_problem p        = problem_of(s, FLASH_ATTN_F32, FLASH_ATTN_CAUSAL);
        if (varlen)
            make_varlen(&p, 700);
        plan_it(&p, backward ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD, 90, &call, &plan);
        char *base = (char *)(uintptr_t)4096;
        fa_plan_place(&call, &plan, base);
        const fa_args *a       = &plan.args;
        const fa_key  *key     = &main_of(&plan)->key;
        int64_t        columns = s.head_dim == 200 ? 256 : 128, tiles_q = varlen ? 900 / key->tile_q + 3 : 3 * tiles_of(300, key->tile_q), tiles_k = varlen ? 2100 / key->tile_k + 3 : 3 * tiles_of(700, key->tile_k);
        int64_t        of_q = s.heads_q * tiles_q * (key->tile_q * (columns + 1) * 4 + 128), of_k = s.heads_k * tiles_k * (key->tile_k * columns * 4 + 128), rows = 3 * s.seqlen_q * s.heads_q;
        const piece    pieces[] = {{a->q_tiles, of_q}, {a->k_tiles, of_k}, {a->v_turned, of_k}, {a->dout_tiles, of_q}, {a->lost, sizeof *a->lost},
                                   {a->delta, rows * 4}, {a->dq_accum, rows * key->head_dim * 4}, {a->next_item, sizeof *a->next_item}};
        expect_apart(pieces, sizeof pieces / sizeof *pieces, base, plan.workspace_bytes);
        assert_int_equal(key->kernel, backward ? FA_KERNEL_BACKWARD_F32_SM90 : FA_KERNEL_FORWARD_F32_SM90);
        assert_true(a->q_tiles && a->k_tiles && a->v_turned && (a->dout_tiles != NULL) == backward && (a->lost != NULL) == backward);
        int planes = plan.main - 1; /* before the kernel that reads them */
        assert_int_equal(plan.launch[planes].key.kernel, FA_KERNEL_PLANES_SM90);
        assert_int_equal(plan.launch[planes].blocks, (1 + backward) * tiles_q * s.heads_q + 2 * tiles_k * s.heads_k);
        if (backward) { /* it is cleared, and who does what planes cannot hold stands behind */
            assert_true((char *)a->lost >= (char *)plan.zero && (char *)a->lost < (char *)plan.zero + plan.zero_bytes);
            assert_int_equal(plan.launch[plan.main + 1].key.kernel, FA_KERNEL_BACKWARD_SM80);
            assert_int_equal(plan.launch[plan.main + 1].key.has_kv_accum, key->has_kv_accum);
        }
    }
}

/* ---- what is refused and what goes to Hopper's kernels ---- */

static void more_blocks_than_cuda_has_are_refused(void **state)
{
    (void)state;
    fa_call            call;
    fa_plan            plan;
    flash_attn_problem p = problem_of((shape){1 << 20, 1 << 20, 64, 64, 64, 64}, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
    assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
    assert_int_equal(fa_plan_make(&call, 80, NULL, NULL, &plan), FLASH_ATTN_UNSUPPORTED);
    assert_non_null(strstr(flash_attn_last_error(), "blocks; CUDA allows 2147483647"));
}

static void what_a_tensor_map_cannot_describe_is_not_for_it(void **state)
{
    (void)state;
    static const struct {
        int64_t stride[4];
        bool    forward, backward;
    } cases[] = {{{0, 0, 0, 0}, true, true},
                 {{512 * 256, 256, 64, 1}, true, true},
                 {{512 * 256, 256, 68, 1}, false, false},  /* no multiple of 16 bytes */
                 {{512 * 256, 256, -64, 1}, false, false}, /* not rising */
                 {{0, 256, 64, 1}, false, false},
                 {{512 * 512, 512, 128, 2}, false, false},
                 {{512 * 256 + 8, 256, 64, 1}, true, false}, /* entries not whole rows apart */
                 {{INT64_C(1) << 39, 256, 64, 1}, false, false},
                 {{INT64_C(1) << 38, 256, 64, 1}, true, false}}; /* more rows than a backward's map counts */
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        for (int which = 0; which < 3; which++) {
            fa_call            call;
            flash_attn_problem p = problem_of((shape){2, 512, 512, 4, 4, 64}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
            flash_attn_tensor *t = which == 0 ? &p.q : which == 1 ? &p.k : &p.v;
            memcpy(t->stride, cases[n].stride, sizeof t->stride);
            assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
            assert_int_equal(fa_maps_fit(&call), cases[n].forward);
            assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_BACKWARD, FA_PLAN, &call), FLASH_ATTN_OK);
            assert_int_equal(fa_maps_fit(&call), cases[n].backward);
        }
}

static void a_gradient_that_no_map_can_describe_is_stored_without(void **state)
{
    (void)state;
    static const struct {
        flash_attn_dtype dtype;
        int64_t          stride[4];
        int              rows;
    } cases[] = {{FLASH_ATTN_BF16, {512 * 256, 256, 64, 1}, 512},
                 {FLASH_ATTN_F16, {600 * 256, 256, 64, 1}, 600},
                 {FLASH_ATTN_F32, {512 * 256, 256, 64, 1}, -1},
                 {FLASH_ATTN_BF16, {512 * 256, 256, 68, 1}, -1},
                 {FLASH_ATTN_BF16, {512 * 256 + 8, 256, 64, 1}, -1}};
    static char memory[16] __attribute__((aligned(16)));
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        flash_attn_tensor t = {.data = memory, .dtype = cases[n].dtype, .shape = {2, 512, 4, 64}};
        memcpy(t.stride, cases[n].stride, sizeof t.stride);
        assert_int_equal(fa_map_gradient_rows(&t), cases[n].rows);
        t.data = NULL;
        assert_int_equal(fa_map_gradient_rows(&t), -1);
    }
}

/* Copies of 16 bytes need every row to begin at a multiple of them and to be whole. */
static void what_is_not_aligned_is_copied_by_elements(void **state)
{
    (void)state;
    static const struct {
        int64_t head_dim, stride[4];
        bool    aligned;
    } cases[] = {{64, {0}, true},          {60, {0}, false},         {8, {0}, true},           {64, {4 * 64 * 300, 4 * 64 + 4, 64, 1}, false},
                 {64, {4 * 64 * 300 + 8, 4 * 64, 64, 1}, true}, {64, {4 * 64 * 300 + 4, 4 * 64, 64, 1}, false},
                 {64, {4 * 128 * 300, 4 * 128, 128, 2}, false}, {64, {-4 * 64 * 300, -4 * 64, -64, 1}, true}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        for (int which = 0; which < 3; which++) {
            fa_call            call;
            fa_plan            plan;
            flash_attn_problem p = problem_of((shape){2, 300, 300, 4, 4, cases[n].head_dim}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
            flash_attn_tensor *t = which == 0 ? &p.q : which == 1 ? &p.k : &p.v;
            memcpy(t->stride, cases[n].stride, sizeof t->stride);
            plan_it(&p, FLASH_ATTN_FORWARD, 80, &call, &plan);
            assert_int_equal(main_of(&plan)->key.aligned, cases[n].aligned);
            t->data = (void *)(uintptr_t)(1 << 20 | 8);
            plan_it(&p, FLASH_ATTN_FORWARD, 80, &call, &plan);
            assert_false(main_of(&plan)->key.aligned);
        }
}

/* A kernel without an option knows nothing of it: one that is not in the key would be left out silently. */
static void every_option_is_in_the_key(void **state)
{
    (void)state;
    fa_key seen[16];
    for (int n = 0; n < 12; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_pass    pass = n < 10 ? FLASH_ATTN_FORWARD : FLASH_ATTN_BACKWARD;
        flash_attn_slice   list = {0, 1, 0, 1, 0};
        flash_attn_problem p    = problem_of((shape){2, 300, 320, 4, 4, 64}, FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
        switch (n) {
        case 1: p.mask = FLASH_ATTN_NONE; break;
        case 2: p.mask = FLASH_ATTN_WINDOW, p.window_left = 3; break;
        case 3: p.softcap = 2.0f; break;
        case 4: p.bias = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, 1, 1, 320}}; break;
        case 5: p.alibi_slopes = (flash_attn_tensor){.shape = {1, 4, 1, 1}}; break;
        case 6: p.dropout.p = 0.5f; break;
        case 7: p.slices = (flash_attn_slices){.list = &list, .count = 1}; break;
        case 8: p.pages = (flash_attn_pages){.table = numbers, .pages_per_seq = 2}; break;
        case 9: p.o.dtype = FLASH_ATTN_F32; break;
        case 11: p.deterministic = true; break;
        default: break;
        }
        plan_it(&p, pass, 80, &call, &plan);
        seen[n] = main_of(&plan)->key;
        for (int i = 0; i < n; i++)
            if (memcmp(&seen[i], &seen[n], sizeof *seen) == 0)
                fail_msg("calls %d and %d have one key", i, n);
    }
}

/* What else than options (test_cuda_plan) keeps a call from Hopper's forward. */
static void calls_go_to_the_forward_that_can_do_them(void **state)
{
    (void)state;
    for (int n = 0; n <= 14; n++) {
        fa_call            call;
        fa_plan            plan;
        bool               hopper = false, few = false;
        flash_attn_problem p = problem_of((shape){2, 512, 512, 64, 64, 128}, FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
        switch (n) {
        case 0: p.num_splits = 1, hopper = true; break;
        case 1: p.num_splits = 2, hopper = true; break;
        case 2: p.cache_batch_idx = numbers, hopper = true; break;
        case 3: p.q.shape[3] = p.k.shape[3] = 32, p.v.shape[3] = 8, hopper = true; break;
        case 4: p.v.shape[3] = 28; break; /* rows of no whole 16 bytes */
        case 5: p.q.shape[3] = p.k.shape[3] = p.v.shape[3] = 33 + 7, hopper = true; break;
        case 6: p.scale = -0.5f; break;
        case 7: p.scale = -0.0f; break;
        case 8: p.softcap = 1e-35f; break; /* its slope is not finite */
        case 9: case 10:
            p.pages      = (flash_attn_pages){.table = numbers, .pages_per_seq = 32};
            p.k.shape[1] = p.v.shape[1] = n == 9 ? 8 : 4;
            hopper       = n == 9;
            break;
        case 14: p.num_splits = 2, p.mask = FLASH_ATTN_WINDOW, p.window_left = 100, few = true; break;
        case 11: case 12: case 13:
            p.q.dtype = p.k.dtype = p.v.dtype = FLASH_ATTN_F8E4M3;
            p.cache_batch_idx = n == 12 ? numbers : NULL;
            hopper            = true;
            if (n == 13)
                make_varlen(&p, 512);
            break;
        }
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        if (main_of(&plan)->key.kernel != (hopper ? FA_KERNEL_FORWARD_SM90 : few ? FA_KERNEL_FORWARD_FEW_SM90 : FA_KERNEL_FORWARD_SM80))
            fail_msg("call %d goes to %s", n, fa_kernels[main_of(&plan)->key.kernel].name);
    }
}

/* 16 rows hold the queries of all heads of a key head, or another tile does. */
static void few_queries_fit_their_tile(void **state)
{
    (void)state;
    for (int64_t group = 1; group <= 20; group++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){2, 2, 4096, 2 * group, 2, 128}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        assert_int_equal(main_of(&plan)->key.tile_q == 16, 2 * group <= 8);
        assert_int_equal(plan.args.tiles_q, tiles_of(2 * group, main_of(&plan)->key.tile_q));
    }
}

/* What the kernels of 9.0 are told of the scores, which no emulated GPU reads: exp2(x log2(e)) is exp(x), and tanh(x) = 1 - 2 / (1 + exp(2 x)). */
static void scores_are_scaled_as_the_formula_says(void **state)
{
    (void)state;
    const double       log2_e = 1.4426950408889634;
    fa_call            call;
    fa_plan            plan;
    flash_attn_problem p = problem_of((shape){2, 512, 512, 4, 4, 128}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
    p.scale              = 0.3f;
    plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
    assert_true(fabs(plan.args.scale_log2 - 0.3 * log2_e) < 1e-6);
    assert_true(plan.args.cap_slope == 0);
    p.softcap = 5.0f;
    plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
    assert_true(fabs(plan.args.cap_slope + 2 * 0.3 * log2_e / 5) < 1e-6);
    assert_true(fabs(plan.args.cap_unit - 2 * 5 * log2_e) < 1e-5);
    p.softcap = 0;
    p.bias    = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, 4, 1, 512}};
    plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
    assert_memory_equal(plan.args.dbias_extent, ((int[]){1, 4, 1, 512}), sizeof plan.args.dbias_extent);
}

/* On Hopper a dbias of 16 bits whose elements have one term is stored at once; else it has floats in the workspace, one for each term in the deterministic mode. */
static void dbias_has_floats_where_it_is_a_sum(void **state)
{
    (void)state;
    enum { BATCH = 2, HEADS = 4, LENGTH = 301, ROW = 304 };
    static const struct {
        int  arch, batch, heads, f32, deterministic;
        long floats;
    } calls[] = {{90, BATCH, HEADS, 0, 0, 0},
                 {90, 1, HEADS, 0, 0, HEADS},
                 {90, 1, 1, 0, 0, 1},
                 {90, BATCH, HEADS, 1, 0, BATCH * HEADS},
                 {90, BATCH, HEADS, 0, 1, 0},
                 {90, 1, HEADS, 0, 1, BATCH * HEADS},
                 {80, BATCH, HEADS, 0, 0, BATCH * HEADS},
                 {80, 1, HEADS, 0, 0, HEADS},
                 {80, 1, 1, 0, 1, BATCH * HEADS}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){BATCH, LENGTH, LENGTH, HEADS, HEADS, 64}, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
        p.bias = (flash_attn_tensor){.dtype = FLASH_ATTN_BF16, .shape = {calls[n].batch, calls[n].heads, LENGTH, LENGTH},
                                     .stride = {calls[n].batch > 1 ? (int64_t)HEADS * LENGTH * ROW : 0, calls[n].heads > 1 ? (int64_t)LENGTH * ROW : 0, ROW, 1}};
        p.deterministic = calls[n].deterministic;
        plan_it(&p, FLASH_ATTN_BACKWARD, calls[n].arch, &call, &plan);
        for (int i = 0; i < 3; i++) /* as the caller's gradient may lie */
            call.dbias.stride[i] = call.dbias.stride[i] == 0 ? 0 : p.bias.stride[i];
        call.dbias.dtype = calls[n].f32 ? FLASH_ATTN_F32 : FLASH_ATTN_BF16;
        assert_int_equal(fa_plan_make(&call, calls[n].arch, NULL, NULL, &plan), FLASH_ATTN_OK);
        assert_int_equal(main_of(&plan)->key.kernel, calls[n].arch == 90 ? FA_KERNEL_BACKWARD_SM90 : FA_KERNEL_BACKWARD_SM80);
        char *base = (char *)(uintptr_t)4096;
        fa_plan_place(&call, &plan, base);
        assert_int_equal(plan.args.dbias_direct, calls[n].floats == 0);
        assert_int_equal(plan.args.dbias.data != NULL, calls[n].floats > 0);
        if (calls[n].floats > 0) {
            size_t bytes = (size_t)calls[n].floats * LENGTH * ROW * sizeof(float);
            assert_true((char *)plan.zero <= (char *)plan.args.dbias.data);
            assert_true((char *)plan.args.dbias.data + bytes <= (char *)plan.zero + plan.zero_bytes && (char *)plan.zero + plan.zero_bytes <= base + plan.workspace_bytes);
        }
    }
}

static void a_piece_of_a_page_divides_page_and_tile(void **state)
{
    (void)state;
    static const int sizes[][3] = {{128, 16, 16}, {128, 256, 128}, {192, 128, 64}, {128, 7, 1}, {64, 48, 16}};
    fa_call          call       = {.pages = {.table = numbers}};
    for (int n = 0; n < 5; n++) {
        call.page_size = sizes[n][1];
        assert_int_equal(fa_page_piece(&call, sizes[n][0]), sizes[n][2]);
    }
    call.pages.table = NULL;
    assert_int_equal(fa_page_piece(&call, 128), 128);
}

static void devices_get_the_latest_kernels_of_their_own_kind(void **state)
{
    (void)state;
    static const int archs[][2] = {{75, 0},  {80, 80},   {86, 86},   {87, 86},   {89, 89},   {90, 90},
                                   {99, 90}, {100, 100}, {103, 100}, {110, 0}, {120, 120}, {121, 120}, {130, 0}};
    for (size_t n = 0; n < sizeof archs / sizeof *archs; n++)
        assert_int_equal(fa_tune_arch(archs[n][0]), archs[n][1]);
}

/* A backward writes zeros to the gradients of keys that are not used, so it must know of all of them. */
static void used_lengths_bound_the_forward_alone(void **state)
{
    (void)state;
    fa_call            call;
    flash_attn_problem p = problem_of((shape){2, 256, 1024, 4, 4, 64}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
    p.seqused_k          = numbers;
    p.max_seqlen_k       = 300;
    assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
    assert_int_equal(call.max_seqlen_k, 300);
    assert_int_equal(fa_normalise(&p, NULL, FLASH_ATTN_BACKWARD, FA_PLAN, &call), FLASH_ATTN_OK);
    assert_int_equal(call.max_seqlen_k, 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_forward_for_hopper_has_blocks_for_all_tiles),
        cmocka_unit_test(the_forward_deals_tiles_where_others_have_the_gpu_too),
        cmocka_unit_test(heads_that_are_dealt_together_have_their_keys_in_l2),
        cmocka_unit_test(a_value_of_fp8_is_turned_for_every_tile_of_keys),
        cmocka_unit_test(parts_cover_all_keys),
        cmocka_unit_test(the_workspace_has_room_for_every_piece),
        cmocka_unit_test(planes_have_room_for_every_tile),
        cmocka_unit_test(more_blocks_than_cuda_has_are_refused),
        cmocka_unit_test(what_a_tensor_map_cannot_describe_is_not_for_it),
        cmocka_unit_test(a_gradient_that_no_map_can_describe_is_stored_without),
        cmocka_unit_test(what_is_not_aligned_is_copied_by_elements),
        cmocka_unit_test(every_option_is_in_the_key),
        cmocka_unit_test(calls_go_to_the_forward_that_can_do_them),
        cmocka_unit_test(few_queries_fit_their_tile),
        cmocka_unit_test(scores_are_scaled_as_the_formula_says),
        cmocka_unit_test(dbias_has_floats_where_it_is_a_sum),
        cmocka_unit_test(a_piece_of_a_page_divides_page_and_tile),
        cmocka_unit_test(devices_get_the_latest_kernels_of_their_own_kind),
        cmocka_unit_test(used_lengths_bound_the_forward_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
