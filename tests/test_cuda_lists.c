/* Block masks by lists of tiles, without a device: how much memory is taken for masks, which tiles and which order are chosen. What list_tiles.cu writes, the emulated GPU
 * and a card are asked (test_cuda_cases.c, test_cuda_sm90.c). */
#include "harness_plan.h"

#include "mask.h"

static uint64_t random_state = 1;

static int below(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static bool sees(const fa_call *call, int seqlen_q, int seqlen_k, int i, int j)
{
    if (i >= seqlen_q || j >= seqlen_k || !fa_window_sees(call->window, seqlen_k - seqlen_q, i, j))
        return false;
    for (int n = 0; n < call->slices.count; n++) {
        const flash_attn_slice *s = &call->slices.list[n];
        if (fa_slice_sees(s->q_begin, s->q_end, s->k_begin, s->k_end, (int)s->kind, i, j))
            return true;
    }
    return false;
}

/* A tile of which some pairs are seen and some are not. In a backward those past the last query or key count, in a forward no query does. */
static bool is_cut(const fa_call *call, const fa_tune_row *row, int seqlen_q, int seqlen_k, int tile_q, int tile_k)
{
    int seen = 0, all = 0, rows = call->pass == FLASH_ATTN_FORWARD ? fa_min_int(row->tile_q, seqlen_q - tile_q * row->tile_q) : row->tile_q;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < row->tile_k; c++, all++)
            seen += sees(call, seqlen_q, seqlen_k, tile_q * row->tile_q + r, tile_k * row->tile_k + c);
    return seen > 0 && seen < all;
}

/* Two slices may share a tile that neither holds alone, so there may be more masks than cut tiles: each of these has room. */
static void there_is_a_mask_for_every_tile_that_is_cut(void **state)
{
    (void)state;
    static flash_attn_slice list[6];
    int                     most_used = 0;
    for (int n = 0; n < 300; n++) {
        int                seqlen_q = 130 + below(500), seqlen_k = 1 + below(600), arch = n & 1 ? 90 : 80, cut = 0;
        flash_attn_problem p = problem_of((shape){1, seqlen_q, seqlen_k, 2, 2, 64 << below(3)}, FLASH_ATTN_BF16, (flash_attn_mask)below(3));
        fa_call            call;
        fa_plan            plan;
        if (p.mask == FLASH_ATTN_WINDOW) {
            p.window_left  = below(200);
            p.window_right = below(50);
        }
        p.slices = (flash_attn_slices){.list = list, .count = 1 + below(6)};
        for (int s = 0; s < p.slices.count; s++) {
            int unit = below(2) ? 64 : 1, q = below(seqlen_q) / unit * unit, k = below(seqlen_k) / unit * unit;
            list[s] = (flash_attn_slice){q, fa_min_int(seqlen_q, q + unit * (1 + below(400))), k, fa_min_int(seqlen_k, k + unit * (1 + below(400))), below(4)};
        }
        plan_it(&p, n & 2 ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD, arch, &call, &plan);
        assert_int_equal(main_of(&plan)->key.mask, FA_MASK_LISTED);
        for (int q = 0; q * plan.row->tile_q < seqlen_q; q++)
            for (int k = 0; k * plan.row->tile_k < seqlen_k; k++)
                cut += is_cut(&call, plan.row, seqlen_q, seqlen_k, q, k);
        if (cut > plan.args.most_masks)
            fail_msg("call %d: %d tiles are cut, %d masks have room", n, cut, plan.args.most_masks);
        most_used = plan.args.most_masks > 0 && 100 * cut / plan.args.most_masks > most_used ? 100 * cut / plan.args.most_masks : most_used;
    }
    assert_true(most_used > 80); /* percent: or the room is far too large, and this test is none */
}

/* Masks that would take too much memory leave the call to what looks at slices one by one; turns cannot be had without lists. */
static void too_many_masks_are_left_out(void **state)
{
    (void)state;
    enum { SIDE = 400, SEQLEN = SIDE * 200 };
    static flash_attn_slice list[SIDE * 2];
    flash_attn_problem      p = problem_of((shape){16, SEQLEN, SEQLEN, 1, 1, 64}, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
    fa_call                 call;
    fa_plan                 plan;
    for (int n = 0; n < SIDE; n++) { /* stripes of odd widths, over each other */
        list[2 * n]     = (flash_attn_slice){200 * n, 200 * n + 101, 0, SEQLEN, FLASH_ATTN_SLICE_FULL};
        list[2 * n + 1] = (flash_attn_slice){0, SEQLEN, 200 * n, 200 * n + 101, FLASH_ATTN_SLICE_FULL};
    }
    p.slices = (flash_attn_slices){.list = list, .count = 2 * SIDE};
    plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
    assert_int_equal(main_of(&plan)->key.kernel, FA_KERNEL_FORWARD_SM80);
    assert_int_equal(main_of(&plan)->key.mask, FA_MASK_NONE);
    assert_true(plan.workspace_bytes < 1 << 20);
    p.deterministic = true;
    flash_attn_tensor like = {.dtype = FLASH_ATTN_BF16};
    flash_attn_grads  g    = {.dout = like, .dq = like, .dk = like, .dv = like};
    assert_int_equal(fa_normalise(&p, &g, FLASH_ATTN_BACKWARD, FA_PLAN, &call), FLASH_ATTN_OK);
    assert_int_equal(fa_plan_make(&call, 90, NULL, NULL, &plan), FLASH_ATTN_UNSUPPORTED);
    assert_non_null(strstr(flash_attn_last_error(), "slices"));
}

static const flash_attn_slice documents[] = {{0, 1000, 0, 1000, FLASH_ATTN_SLICE_CAUSAL}, {1000, 4096, 1000, 4096, FLASH_ATTN_SLICE_CAUSAL}},
                              prefix[]    = {{0, 8192, 0, 2048, FLASH_ATTN_SLICE_FULL}, {2048, 8192, 2048, 8192, FLASH_ATTN_SLICE_CAUSAL}},
                              sinks[]     = {{0, 1024, 0, 1024, FLASH_ATTN_SLICE_CAUSAL}, {1024, 8192, 1, 8192, FLASH_ATTN_SLICE_BOTH}, {1024, 8192, 0, 64, FLASH_ATTN_SLICE_FULL}};

static void tiles_and_order_follow_the_slices(void **state)
{
    (void)state;
    static const struct {
        const flash_attn_slice *list;
        int                     count, seqlen, head_dim, tile_q;
        bool                    long_first;
    } calls[] = {{documents, 2, 4096, 64, 128, false}, {prefix, 2, 8192, 64, 192, false}, {sinks, 3, 8192, 64, 128, false}, {sinks, 3, 8192, 128, 128, true}, {prefix, 2, 8192, 128, 128, false}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        int64_t            heads = 2048 / calls[n].head_dim, batch = 16384 / calls[n].seqlen;
        flash_attn_problem p     = problem_of((shape){batch, calls[n].seqlen, calls[n].seqlen, heads, heads, calls[n].head_dim}, FLASH_ATTN_BF16, FLASH_ATTN_NONE);
        fa_call            call;
        fa_plan            plan;
        p.slices = (flash_attn_slices){.list = calls[n].list, .count = calls[n].count};
        plan_it(&p, FLASH_ATTN_FORWARD, 90, &call, &plan);
        assert_int_equal(plan.row->tile_q, calls[n].tile_q);
        assert_int_equal(plan.args.all_items, plan.args.all_tiles_q * heads); /* who is free takes the next tile */
        plan_it(&p, FLASH_ATTN_BACKWARD, 90, &call, &plan);
        assert_int_equal(plan.args.order_heads == plan.args.dealt_heads, calls[n].long_first);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_is_a_mask_for_every_tile_that_is_cut),
        cmocka_unit_test(too_many_masks_are_left_out),
        cmocka_unit_test(tiles_and_order_follow_the_slices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
