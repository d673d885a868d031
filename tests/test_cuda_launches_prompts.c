/* What the plan of a forward launches for pieces of prompts, without a device: parts of the keys, and two calls for a batch of two kinds. */
#include "harness_plan.h"

#include "cuda/plan.h"

/* Pieces of a prompt: parts by heads, queries and keys alone, whatever else is in the batch, which says only whether a block has all parts of a tile; -1 counts it for the parts too, and the GPU's
 * multiprocessors. */
static void pieces_of_a_prompt_are_split(void **state)
{
    (void)state;
    static const struct {
        int64_t           queries, keys, heads_q, heads_k, d;
        flash_attn_mask   mask;
        int               num_splits, parts, of_eight; /* parts that one sequence and eight have */
        bool              walked;                      /* of eight: by a block each tile's */
    } calls[] = {
        {512, 32768, 8, 1, 128, FLASH_ATTN_CAUSAL, 0, 4, 4, true},   {512, 32768, 8, 1, 128, FLASH_ATTN_CAUSAL, -1, 4, 1, false}, {256, 32768, 8, 8, 128, FLASH_ATTN_NONE, 0, 8, 8, true},
        {1024, 32768, 8, 1, 128, FLASH_ATTN_CAUSAL, 0, 2, 2, true},  {2048, 32768, 8, 1, 128, FLASH_ATTN_CAUSAL, 0, 1, 1, false}, {256, 32768, 32, 8, 128, FLASH_ATTN_CAUSAL, 0, 2, 2, true},
        {256, 32768, 4, 1, 128, FLASH_ATTN_CAUSAL, 0, 16, 16, false}, {512, 4095, 8, 1, 128, FLASH_ATTN_CAUSAL, 0, 1, 1, false},   {512, 4096, 8, 1, 128, FLASH_ATTN_CAUSAL, 0, 4, 4, true},
        {256, 4096, 8, 1, 128, FLASH_ATTN_CAUSAL, -1, 8, 1, false},   {2048, 8191, 2, 2, 128, FLASH_ATTN_NONE, 0, 1, 1, false},    {2048, 8192, 2, 2, 128, FLASH_ATTN_NONE, 0, 4, 4, true},
        {512, 32768, 8, 1, 128, FLASH_ATTN_WINDOW, 0, 1, 1, false},   {512, 1000, 32, 8, 128, FLASH_ATTN_CAUSAL, 3, 3, 3, false},  {512, 32768, 8, 1, 128, FLASH_ATTN_CAUSAL, 1, 1, 1, false},
        {512, 32768, 8, 1, 64, FLASH_ATTN_CAUSAL, 0, 5, 5, false},    {512, 32768, 8, 1, 256, FLASH_ATTN_CAUSAL, 0, 4, 4, false},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++)
        for (int64_t batch = 1; batch <= 8; batch += 7) {
            fa_call            call;
            fa_plan            plan;
            flash_attn_problem p = problem_of((shape){batch, calls[n].queries, calls[n].keys, calls[n].heads_q, calls[n].heads_k, (int)calls[n].d}, FLASH_ATTN_BF16, calls[n].mask);
            p.num_splits  = calls[n].num_splits;
            p.window_left = calls[n].mask == FLASH_ATTN_WINDOW ? 1000 : 0;
            plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
            int parts = batch == 1 ? calls[n].parts : calls[n].of_eight;
            if (plan.args.num_splits != parts || main_of(&plan)->key.has_split != (parts > 1))
                fail_msg("call %zu, %d sequences: %d parts", n, (int)batch, plan.args.num_splits);
            assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_FORWARD_SM90);
            bool walks = main_of(&plan)->key.one_launch == 2;
            assert_int_equal(walks, batch > 1 && calls[n].walked);
            assert_int_equal(plan.launch[plan.num_launches - 1].key.kernel == FA_KERNEL_FOLD, parts > 1 && !walks);
            assert_int_equal(main_of(&plan)->blocks, plan.args.tiles_q * calls[n].heads_q * batch * (walks ? 1 : parts));
            assert_true(parts == 1 || walks || plan.workspace_bytes >= (size_t)(parts * batch * calls[n].queries * calls[n].heads_q) * (calls[n].d + 2) * sizeof(float));
            assert_true(!walks || plan.workspace_bytes <= (size_t)(132 * main_of(&plan)->key.tile_q) * (calls[n].d + 2) * sizeof(float) + 1024); /* a block's place for rows that are computed again */
        }
}

/* A piece of a prompt among decoded tokens: two calls, on a cache whatever else is in the batch, unless no sequence can have one query; where the batch counts, the second has as many
 * queries as the others have on average, up to a power of two. */
static void a_batch_of_two_kinds_is_two_calls(void **state)
{
    (void)state;
    static const struct {
        int64_t batch, tokens, longest, few, few_by_batch; /* 0: one call */
    } calls[] = {
        {64, 512 + 63, 512, 1, 1}, {64, 512 + 64, 512, 1, 2}, {10, 300 + 9 * 5, 300, 1, 8}, {10, 300 + 9 * 16, 300, 1, 16}, {10, 300 + 9 * 16 + 1, 300, 1, 0}, {64, 128 + 63, 128, 1, 1}, {20, 16 + 19, 16, 0, 0},
        {1, 512, 512, 0, 0},       {2, 513, 512, 1, 1},       {4, 512, 512, 1, 0},          {40, 400, 512, 1, 0},         {3, 2 * 512 + 1, 512, 1, 0},      {3, 2 * 512 + 2, 512, 0, 0},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++)
        for (int option = 0; option < 9; option++) {
            fa_call            call, parts[2];
            fa_plan            plan;
            flash_attn_problem p = problem_of((shape){1, calls[n].tokens, 20000, 8, 1, 128}, option == 4 ? FLASH_ATTN_F32 : FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
            p.cu_seqlens_q = p.cu_seqlens_k = numbers;
            p.batch        = (int32_t)calls[n].batch;
            p.max_seqlen_q = (int32_t)calls[n].longest;
            p.max_seqlen_k = 9000;
            if (option < 7)
                p.seqused_k = numbers;
            if (option == 8) {
                p.pages        = (flash_attn_pages){.table = numbers, .pages_per_seq = 500};
                p.cu_seqlens_k = NULL;
                p.seqused_k    = numbers;
                p.k.shape[0] = p.v.shape[0] = 9000;
                p.k.shape[1] = p.v.shape[1] = 16;
                p.max_seqlen_k = 0;
            }
            if (option == 1)
                p.num_splits = 2;
            if (option == 2)
                p.dropout.p = 0.5f;
            if (option == 3)
                p.alibi_slopes = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, 8, 1, 1}};
            if (option == 5)
                p.num_splits = -1;
            plan_it(&p, option == 6 ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD, 90, &call, &plan);
            int64_t few = option == 0 || option == 8 ? calls[n].few : option == 5 ? calls[n].few_by_batch : 0;
            if (fa_plan_calls_of(&call, parts) != (few ? 2 : 1))
                fail_msg("call %zu, option %d", n, option);
            if (few == 0)
                continue;
            assert_int_equal(parts[0].few_queries, few);
            assert_int_equal(parts[1].few_queries, few);
            assert_int_equal(parts[0].max_seqlen_q, calls[n].longest < calls[n].tokens ? calls[n].longest : calls[n].tokens);
            assert_int_equal(parts[1].max_seqlen_q, few);
            for (int i = 0; i < 2; i++) {
                assert_int_equal(fa_plan_make(&parts[i], 90, NULL, NULL, &plan), FLASH_ATTN_OK);
                assert_int_equal(main_of(&plan)->key.of_length, i == 0 ? FA_OF_MANY : FA_OF_FEW);
                if (i == 0 && n == 0) /* what is long is as many tiles as its rows fill, whatever the others are */
                    assert_int_equal(plan.args.num_splits, option == 5 ? 3 : 4);
                assert_int_equal(plan.args.few_queries, few);
                assert_int_equal(main_of(&plan)->key.kernel == FA_KERNEL_FORWARD_SM90, i == 0);
                const fa_key *last = &plan.launch[plan.num_launches - 1].key;
                assert_true((last->kernel != FA_KERNEL_COMBINE && last->kernel != FA_KERNEL_FOLD) || last->of_length == (i == 0 ? FA_OF_MANY : FA_OF_FEW));
                int64_t rows = i == 0 ? calls[n].tokens : calls[n].batch * few;
                if (main_of(&plan)->key.has_split && main_of(&plan)->key.one_launch == 0)
                    assert_true(plan.workspace_bytes < (size_t)(plan.args.num_splits * rows * 8 * 130) * sizeof(float) + 1024);
            }
        }
}

/* Few tiles of few queries have 64 rows, more have 128; the parts of a sequence's keys are the same, and so is a step's number of keys. */
static void few_tiles_are_small_and_have_the_parts_of_large_ones(void **state)
{
    (void)state;
    static const struct {
        int     d, num_splits;
        int64_t tiles, keys; /* the most of small tiles, by 128 rows, and fewer keys of all than these; 0: any */
    } limits[] = {{64, 0, 64, 0}, {64, -1, 64, 0}, {128, 0, 16, 1 << 19}, {128, -1, 8, 1 << 18}, {128, 3, 16, 1 << 19}, {256, 0, 16, 1 << 19}, {256, -1, 64, 0}};
    for (size_t n = 0; n < sizeof limits / sizeof *limits; n++)
        for (int64_t keys = 300; keys < 300000; keys = 3 * keys + 1) {
            int64_t most = limits[n].tiles, by_keys = limits[n].keys ? (limits[n].keys - 1) / keys : most, sequences = (by_keys < most ? by_keys : most) / 2; /* each with a tile for each of two key heads */
            fa_plan plan[2];
            for (int large = sequences == 0; large < 2; large++) {
                fa_call            call;
                flash_attn_problem p = problem_of((shape){sequences + large, 32, keys, 8, 2, limits[n].d}, FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
                p.num_splits         = limits[n].num_splits;
                plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan[large]);
                if (main_of(&plan[large])->key.kernel != FA_KERNEL_FORWARD_FEW_SM90 || plan[large].row->tile_q != (large ? 128 : 64) || plan[large].args.tiles_q != (large ? 1 : 2))
                    fail_msg("%zu, %d keys, %d sequences: %s, tiles of %d", n, (int)keys, (int)sequences + large, fa_kernels[main_of(&plan[large])->key.kernel].name, plan[large].row->tile_q);
            }
            if (sequences == 0 || limits[n].num_splits < 0)
                continue;
            const fa_args *small = &plan[0].args, *large = &plan[1].args;
            assert_int_equal(plan[0].row->tile_k, plan[1].row->tile_k);
            assert_true(small->split_keys == large->split_keys && small->num_splits == large->num_splits && small->part_growth == large->part_growth && small->part_doublings == large->part_doublings);
        }
}

/* Tiles of all heads of a key head, where tiles of one's queries would be empty by more; and from how many rows on they are forward_sm90's. */
static void heads_of_a_key_head_share_tiles(void **state)
{
    (void)state;
    enum { PLAIN, SLOPES, DROPOUT, BIAS, WINDOW, FP8 };
    static const struct {
        int64_t queries, keys, heads_q, heads_k, d;
        int     option, kernel, tiles; /* of a key head; 0: of one head */
    } calls[] = {
        {140, 500, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 5},    {256, 500, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 0},     {140, 500, 6, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 0},
        {140, 500, 8, 8, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 0},    {140, 500, 8, 2, 256, PLAIN, FA_KERNEL_FORWARD_SM90, 5},     {240, 500, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 0},
        {210, 5000, 6, 2, 64, PLAIN, FA_KERNEL_FORWARD_SM90, 0}, {300, 1199, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 0}, {300, 1200, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 10}, {210, 5000, 8, 2, 64, PLAIN, FA_KERNEL_FORWARD_SM90, 5},
        {140, 500, 8, 2, 128, SLOPES, FA_KERNEL_FORWARD_SM90, 0},    {140, 500, 8, 2, 128, DROPOUT, FA_KERNEL_FORWARD_SM90, 0},
        {140, 500, 8, 2, 128, BIAS, FA_KERNEL_FORWARD_SM90, 0},     {140, 500, 8, 2, 128, WINDOW, FA_KERNEL_FORWARD_SM90, 0},    {140, 500, 8, 2, 128, FP8, FA_KERNEL_FORWARD_SM90, 0},
        {72, 4096, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 3},    {72, 4095, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_FEW_SM90, 3}, {32, 4096, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_FEW_SM90, 2},
        {33, 4096, 8, 2, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 2},    {64, 4096, 32, 8, 128, PLAIN, FA_KERNEL_FORWARD_FEW_SM90, 2}, {65, 4096, 32, 8, 128, PLAIN, FA_KERNEL_FORWARD_SM90, 3},
        {72, 4096, 8, 2, 256, PLAIN, FA_KERNEL_FORWARD_FEW_SM90, 3}, {72, 4096, 8, 8, 128, PLAIN, FA_KERNEL_FORWARD_FEW_SM90, 1}, {65, 4096, 8, 2, 64, PLAIN, FA_KERNEL_FORWARD_SM90, 2},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        int64_t            queries = calls[n].queries, batch = 3;
        flash_attn_problem p = problem_of((shape){batch, queries, calls[n].keys, calls[n].heads_q, calls[n].heads_k, (int)calls[n].d}, calls[n].option == FP8 ? FLASH_ATTN_F8E4M3 : FLASH_ATTN_BF16,
                                          calls[n].option == WINDOW ? FLASH_ATTN_WINDOW : FLASH_ATTN_CAUSAL);
        p.window_left = calls[n].option == WINDOW ? 100 : 0;
        p.num_splits  = 1;
        if (calls[n].option == FP8)
            p.o.dtype = FLASH_ATTN_BF16;
        if (calls[n].option == SLOPES)
            p.alibi_slopes = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, calls[n].heads_q, 1, 1}};
        if (calls[n].option == DROPOUT)
            p.dropout.p = 0.5f;
        if (calls[n].option == BIAS)
            p.bias = (flash_attn_tensor){.dtype = FLASH_ATTN_BF16, .shape = {1, 1, queries, calls[n].keys}, .stride = {0, 0, 512, 1}};
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        const fa_launch *main    = main_of(&plan);
        bool             own     = calls[n].kernel == FA_KERNEL_FORWARD_SM90, grouped = own && calls[n].tiles > 0;
        int64_t          tiles   = calls[n].tiles > 0 ? calls[n].tiles : (queries + main->key.tile_q - 1) / main->key.tile_q, heads = own && !grouped ? calls[n].heads_q : calls[n].heads_k;
        if (main->key.kernel != calls[n].kernel || main->key.has_groups != grouped || plan.args.tiles_q != tiles || main->blocks != tiles * heads * batch)
            fail_msg("call %zu: %s, groups %d, %d tiles, %d blocks", n, fa_kernels[main->key.kernel].name, main->key.has_groups, plan.args.tiles_q, (int)main->blocks);
        assert_true(!own || (plan.args.order_heads == 0) == (grouped && calls[n].keys >= 4 * queries));
    }
}

/* Of few rows a block of fold.cu has one, of many with few results each of its warps has several. */
static void rows_are_folded_by_as_many_blocks_as_they_fill(void **state)
{
    (void)state;
    static const struct {
        int64_t batch, queries, keys;
        int     num_splits, blocks, rows_of_warp;
    } calls[] = {{1, 4, 32768, 64, 32, 0}, {1, 4, 32768, 8, 32, 0}, {4, 4, 32768, 8, 128, 0}, {5, 4, 32768, 8, 20, 0}, {8, 4, 32768, 64, 256, 0}, {9, 4, 32768, 64, 36, 0}, {1, 16, 32768, 0, 128, 0}, {16, 16, 8192, 0, 256, 0},
                 {1, 256, 8192, 8, 256, 1}, {4, 256, 8192, 8, 512, 2}, {8, 256, 8192, 4, 512, 4}, {8, 256, 8192, 8, 1024, 2}, {8, 256, 8192, 9, 2048, 1}, {16, 256, 8192, 4, 1024, 4}, {16, 256, 8192, 5, 2048, 2}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){calls[n].batch, calls[n].queries, calls[n].keys, 8, 1, 128}, FLASH_ATTN_BF16, FLASH_ATTN_CAUSAL);
        p.num_splits = calls[n].num_splits;
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        const fa_launch *last = &plan.launch[plan.num_launches - 1];
        assert_int_equal(last->key.kernel, FA_KERNEL_FOLD);
        if (last->blocks != calls[n].blocks || plan.args.fold_rows != calls[n].rows_of_warp || (plan.args.row_warps > 1) != (last->blocks == calls[n].batch * calls[n].queries * 8))
            fail_msg("call %zu: %d rows a warp, %d blocks, %d parts", n, plan.args.fold_rows, (int)last->blocks, plan.args.num_splits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_of_a_prompt_are_split),
        cmocka_unit_test(a_batch_of_two_kinds_is_two_calls),
        cmocka_unit_test(heads_of_a_key_head_share_tiles),
        cmocka_unit_test(few_tiles_are_small_and_have_the_parts_of_large_ones),
        cmocka_unit_test(rows_are_folded_by_as_many_blocks_as_they_fill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
