/* What the plan of a backward launches, without a device: how tiles of keys are dealt, owned and shared, who stores dQ first, what is one launch. */
#include "harness_plan.h"

/* Every key head's tiles are dealt, or owned by a block, and each once. */
static void the_backward_for_hopper_deals_every_head_once(void **state)
{
    (void)state;
    static const int64_t lengths[] = {320, 640, 2048, 8192};
    static const int64_t dims[]    = {64, 128, 256};
    for (int n = 0; n < 4 * 3 * 2 * 4; n++) {
        int64_t            length = lengths[n % 4];
        int                mask = n / 12 % 2, kind = n / 24; /* plain, deterministic, varlen, used lengths */
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){5, length, length, 24, 24, dims[n / 4 % 3]}, FLASH_ATTN_F16, (flash_attn_mask)mask);
        p.deterministic      = kind == 1;
        p.seqused_k          = kind == 3 ? numbers : NULL;
        if (kind == 2)
            make_varlen(&p, (int32_t)length);
        plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
        const fa_args *args = &plan.args;
        int64_t        heads = kind == 2 ? 24 : 24 * 5, tiles_k = tiles_of(length, main_of(&plan)->key.tile_k);
        assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_BACKWARD_SM90);
        assert_int_equal(args->own_heads + args->dealt_heads, heads);
        if (mask == FLASH_ATTN_CAUSAL) /* tiles are owned in pairs, of two heads where they are odd */
            assert_int_equal(args->own_heads % 2, 0);
        assert_true(args->dealt_heads > 0);
        if (mask == FLASH_ATTN_NONE || kind == 1 || kind == 2)
            assert_int_equal(args->own_heads, 0);
        if (kind != 0)
            assert_int_equal(args->dq_order, kind == 1 ? FA_DQ_IN_ORDER : FA_DQ_FIRST_COMES);
        assert_true(args->order_heads >= (args->dealt_heads > 0) && args->order_heads <= heads);
        assert_int_equal(args->dealt_tiles, kind == 2 ? args->all_tiles_k : tiles_k);
        assert_true(args->all_tiles_k >= tiles_k * 5 && args->all_tiles_q >= tiles_of(length, main_of(&plan)->key.tile_q) * 5);
        assert_int_equal(main_of(&plan)->blocks, (int64_t)args->all_tiles_k * 24);
        assert_int_equal(plan.launch[0].key.kernel, FA_KERNEL_BACKWARD_ROWSUM);
        assert_int_equal(plan.launch[0].blocks, (int64_t)args->all_tiles_q * 24);
        assert_int_equal(plan.launch[2].blocks, (int64_t)args->all_tiles_q * 24);
    }
}

/* A ring's steps: no block owns tiles that it might come to late. */
static void the_backward_deals_tiles_where_others_have_the_gpu_too(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){1, 8192, 8192, 24, 24, 128}, FLASH_ATTN_BF16, (flash_attn_mask)m);
        plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
        assert_int_equal(plan.args.own_heads > 0, m == FLASH_ATTN_CAUSAL);
        fa_key own = main_of(&plan)->key;
        plan_shared(&p, FLASH_ATTN_BACKWARD, 90, true, &call, &plan);
        assert_int_equal(plan.args.own_heads, 0);
        assert_int_equal(plan.args.dealt_heads, 24);
        assert_memory_equal(&own, &main_of(&plan)->key, sizeof own); /* the same kernel */
    }
}

/* Without a mask Hopper's own hides keys past the last alone. */
static void a_backward_with_left_padding_is_the_portable_kernels(void **state)
{
    (void)state;
    fa_call            call;
    fa_plan            plan;
    flash_attn_problem p = problem_of((shape){5, 640, 640, 24, 24, 64}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
    p.leftpad_k          = numbers;
    plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
    assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_BACKWARD_SM80);
}

/* The first tile of keys alone stores dQ where it sees every query, for dQ is not cleared. */
static void the_first_keys_store_dq_only_if_all_queries_see_them(void **state)
{
    (void)state;
    static const struct {
        int64_t         seqlen_q, seqlen_k;
        flash_attn_mask mask;
        int             left, right, deterministic, order;
    } calls[] = {{512, 512, FLASH_ATTN_NONE, 0, 0, 0, FA_DQ_FIRST_KEYS},       {512, 512, FLASH_ATTN_CAUSAL, 0, 0, 0, FA_DQ_FIRST_COMES},
                 {512, 512, FLASH_ATTN_WINDOW, 500, 0, 0, FA_DQ_FIRST_COMES},  {520, 512, FLASH_ATTN_WINDOW, -1, 8, 0, FA_DQ_FIRST_COMES},
                 {512, 1 << 15, FLASH_ATTN_NONE, 0, 0, 0, FA_DQ_FIRST_COMES},  {512, 512, FLASH_ATTN_NONE, 0, 0, 1, FA_DQ_IN_ORDER},
                 {512, 512, FLASH_ATTN_CAUSAL, 0, 0, 1, FA_DQ_IN_ORDER}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_problem p = problem_of((shape){2, calls[n].seqlen_q, calls[n].seqlen_k, 64, 64, 128}, FLASH_ATTN_BF16, calls[n].mask);
        p.window_left        = calls[n].left;
        p.window_right       = calls[n].right;
        p.deterministic      = calls[n].deterministic;
        plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
        if (plan.args.dq_order != calls[n].order)
            fail_msg("call %zu", n);
    }
}

static void a_small_backward_is_one_cluster_a_head(void **state)
{
    (void)state;
    fa_call call;
    fa_plan plan;
    for (int n = 0; n < 4; n++)
        for (int64_t seqlen_k = 32; seqlen_k <= 160; seqlen_k += 32) {
            int                arch = n & 1 ? 90 : 80;
            flash_attn_problem p = problem_of((shape){2, 100, seqlen_k, 4, 4, n & 2 ? 256 : 64}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
            p.o.dtype = FLASH_ATTN_F32; /* else Hopper's own takes it */
            plan_it(&p, FLASH_ATTN_BACKWARD, arch, &call, &plan);
            int64_t tiles = tiles_of(seqlen_k, main_of(&plan)->key.tile_k);
            bool    one   = seqlen_k <= 128 && tiles <= (arch == 90 ? 8 : 1);
            assert_int_equal(plan.num_launches, one ? 1 : 3);
            assert_int_equal(main_of(&plan)->key.one_launch, one);
            assert_int_equal(main_of(&plan)->cluster, one ? tiles : 1);
            assert_int_equal(main_of(&plan)->blocks, tiles * 8 * plan.args.group_blocks);
        }
}

/* Blocks that share a key head have as many of its heads each. */
static void heads_of_a_group_are_dealt_evenly(void **state)
{
    (void)state;
    for (int64_t group = 1; group <= 12; group++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            fa_call            call;
            fa_plan            plan;
            flash_attn_problem p = problem_of((shape){3, 2048, 2048, 2 * group, 2, 64}, FLASH_ATTN_F16, FLASH_ATTN_NONE);
            p.deterministic      = deterministic;
            plan_it(&p, FLASH_ATTN_BACKWARD, 80, &call, &plan);
            int blocks = plan.args.group_blocks;
            assert_int_equal(group % blocks, 0);
            assert_true(!deterministic || blocks == 1);
            assert_int_equal(main_of(&plan)->key.has_kv_accum, blocks > 1);
            assert_int_equal(main_of(&plan)->blocks, tiles_of(2048, main_of(&plan)->key.tile_k) * blocks * 2 * 3);
        }
}

/* Hopper's blocks that share a tile of keys: whole heads of the group, then equal parts of their queries, each once; none where tiles are many or the order of sums is fixed. */
static void tiles_of_keys_are_shared_evenly(void **state)
{
    (void)state;
    int of_heads = 0, of_queries = 0, alone = 0;
    for (int64_t group = 1; group <= 12; group++)
        for (int n = 0; n < 4 * 3 * 2 * 2; n++) {
            static const int64_t seqlens[] = {200, 1000, 4000, 20000}, batches[] = {1, 4, 40};
            fa_call              call;
            fa_plan              plan;
            shape                s = {batches[n / 4 % 3], seqlens[n % 4], seqlens[n % 4], 2 * group, 2, 128};
            flash_attn_problem   p = problem_of(s, FLASH_ATTN_BF16, n / 12 % 2 ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE);
            p.deterministic        = n / 24;
            plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
            const fa_args *a      = &plan.args;
            int64_t        shares = a->group_blocks, parts = a->part_shares, tiles = tiles_of(s.seqlen_k, main_of(&plan)->key.tile_k) * 2 * s.batch;
            assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_BACKWARD_SM90);
            assert_true(shares >= 1 && parts >= 1 && shares % parts == 0 && group % (shares / parts) == 0);
            assert_true(parts == 1 || shares == group * parts);
            assert_true(shares == 1 || (!p.deterministic && tiles < 8 * 132));
            assert_int_equal(main_of(&plan)->blocks, tiles * shares);
            assert_int_equal(a->own_heads + a->dealt_heads, 2 * s.batch * shares);
            assert_int_equal(a->dk_stored.dtype == FA_F32, shares > 1);
            assert_true(shares == 1 || (a->apart_dk == -1 && a->apart_dv == -1 && a->dk_stored.stride[1] == 128 * 2 * shares && a->dv_stored.stride[0] == s.seqlen_k * a->dv_stored.stride[1]));
            const fa_launch *convert = &plan.launch[plan.num_launches - 1];
            assert_int_equal(convert->key.kernel, FA_KERNEL_BACKWARD_CONVERT_SM90);
            assert_int_equal(convert->blocks, (int64_t)a->all_tiles_q * s.heads_q + (shares > 1 ? tiles_of(s.batch * s.seqlen_k, FA_SHARED_ROWS) * 2 : 0));
            of_heads += shares > parts;
            of_queries += parts > 1;
            alone += shares == 1 && !p.deterministic;
        }
    assert_true(of_heads > 10 && of_queries > 0 && alone > 10);
}

/* Few keys for many queries: every step is some share's, and shares only where key heads do not keep the GPU busy. */
static void steps_of_few_keys_are_shared(void **state)
{
    (void)state;
    int shared = 0, alone = 0;
    for (int n = 0; n < 3 * 3 * 2 * 2 * 2; n++) {
        static const int64_t seqlens[] = {129, 1000, 40000}, batches[] = {1, 4, 400};
        fa_call              call;
        fa_plan              plan;
        int                  d = n / 18 % 2 ? 128 : 64;
        shape                s = {batches[n / 3 % 3], seqlens[n % 3], 77, n / 9 % 2 ? 6 : 2, 2, d};
        flash_attn_problem   p = problem_of(s, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
        p.deterministic        = n / 36;
        plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
        const fa_args *a      = &plan.args;
        int64_t        shares = a->group_blocks, heads = 2 * s.batch, steps = tiles_of(s.seqlen_q, 128) * (s.heads_q / 2);
        assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_BACKWARD_SHORT_SM90);
        assert_int_equal(main_of(&plan)->key.variant, 1);
        assert_int_equal(main_of(&plan)->blocks, heads * shares);
        assert_true(shares >= 1 && shares <= steps && (shares == 1 || !p.deterministic));
        assert_true(p.deterministic || heads * steps < 132 || heads * shares > 66); /* half of the multiprocessors at least */
        assert_int_equal(plan.num_launches, shares > 1 ? 2 : 1);
        assert_int_equal(plan.workspace_bytes, shares > 1 ? 2 * (((size_t)(s.batch * 77 * 2 * shares * d) * sizeof(float) + 255) / 256 * 256) : 0);
        assert_true(shares == 1 ? a->apart_dk >= 0 : a->apart_dk == -1 && a->apart_dv == -1 && a->dk_stored.stride[1] == d * 2 * shares);
        if (shares > 1)
            assert_int_equal(plan.launch[1].blocks, tiles_of(s.batch * 77, FA_SHARED_ROWS) * 2);
        shared += shares > 1;
        alone += shares == 1;
    }
    assert_true(shared > 10 && alone > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_backward_for_hopper_deals_every_head_once),
        cmocka_unit_test(the_backward_deals_tiles_where_others_have_the_gpu_too),
        cmocka_unit_test(a_backward_with_left_padding_is_the_portable_kernels),
        cmocka_unit_test(the_first_keys_store_dq_only_if_all_queries_see_them),
        cmocka_unit_test(a_small_backward_is_one_cluster_a_head),
        cmocka_unit_test(heads_of_a_group_are_dealt_evenly),
        cmocka_unit_test(tiles_of_keys_are_shared_evenly),
        cmocka_unit_test(steps_of_few_keys_are_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
