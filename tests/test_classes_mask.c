/* Promises about what a query may see, on every tier and dtype: rows that see nothing, alignment, windows, and what
 * must not leak through a mask. */
#include "harness.h"

/* Row i of head h sees something else than before only if the keys from `first` on matter to it. */
static void expect_rows_unchanged(const flash_attn_tensor *before, const flash_attn_tensor *after, int rows,
                                  const char *what)
{
    flash_attn_tensor a = slice_of(*before, 1, 0, rows), b = slice_of(*after, 1, 0, rows);
    expect_same_bits(&a, &b, what);
}

/* Rows but [first, end) have the bits that they had; frees those. */
static void expect_others_unchanged(flash_attn_tensor *before, const flash_attn_tensor *after, int row_dim, int first, int end, const char *what)
{
    for (int i = 0; i < before->shape[row_dim]; i++) {
        flash_attn_tensor a = slice_of(*before, row_dim, i, i + 1), b = slice_of(*after, row_dim, i, i + 1);
        if (i < first || i >= end)
            expect_same_bits(&a, &b, what);
    }
    free(before->data);
}

static void set_keys(fixture *f, int first, int end, double value)
{
    const flash_attn_tensor *const kv[2] = {&f->p.k, &f->p.v};
    for (int n = 0; n < 2; n++)
        for (int64_t j = first; j < end; j++)
            for (int64_t h = 0; h < kv[n]->shape[2]; h++)
                for (int64_t d = 0; d < kv[n]->shape[3]; d++)
                    set(kv[n], 0, j, h, d, value);
}

static void change_future(const tier *t, flash_attn_dtype dtype)
{
    /* Key 100 and later are the future of queries 0 .. 89 (diagonal 10), in the middle of any tile. */
    static const double values[] = {3.5, (double)NAN, (double)INFINITY};
    test_case           c        = {
                             .seqlen_q = 150, .seqlen_k = 160, .heads_q = 4, .heads_k = 2, .head_dim = 48, .mask = FLASH_ATTN_CAUSAL};
    fixture f = fixture_make(&c, dtype, 3);
    fixture_run(&f, t, 2);
    flash_attn_tensor o = copy_of(&f.p.o), dq = copy_of(&f.g.dq);
    for (int n = 0; n < 3; n++) {
        set_keys(&f, 100, 160, values[n]);
        fixture_run(&f, t, 2);
        expect_rows_unchanged(&o, &f.p.o, 90, "o");
        expect_rows_unchanged(&dq, &f.g.dq, 90, "dq");
    }
    free(o.data);
    free(dq.data);
    fixture_free(&f);
}

static void numbers_nan_and_inf_in_future_keys_do_not_change_causal_output(void **state)
{
    (void)state;
    for_each_tier_and_dtype(change_future);
}

static void change_past(const tier *t, flash_attn_dtype dtype)
{
    /* A window of 20 to the left: queries from 60 on do not see keys below 40. */
    test_case c = {
        .seqlen_q = 150, .seqlen_k = 150, .heads_q = 2, .head_dim = 40, .mask = FLASH_ATTN_WINDOW, .window_left = 20};
    fixture f = fixture_make(&c, dtype, 4);
    fixture_run(&f, t, 2);
    flash_attn_tensor o = copy_of(&f.p.o), dq = copy_of(&f.g.dq);
    set_keys(&f, 0, 40, (double)NAN);
    fixture_run(&f, t, 2);
    flash_attn_tensor late[4] = {slice_of(o, 1, 60, 150), slice_of(f.p.o, 1, 60, 150), slice_of(dq, 1, 60, 150),
                                 slice_of(f.g.dq, 1, 60, 150)};
    expect_same_bits(&late[0], &late[1], "o");
    expect_same_bits(&late[2], &late[3], "dq");
    free(o.data);
    free(dq.data);
    fixture_free(&f);
}

static void nan_in_keys_before_the_window_does_not_change_output(void **state)
{
    (void)state;
    for_each_tier_and_dtype(change_past);
}

/* A NaN in a query stays in its row of o, lse and dq, and reaches dk and dv of the keys that it sees alone. */
static void nan_query(const tier *t, flash_attn_dtype dtype)
{
    enum { BAD = 37 };
    test_case c = {
        .seqlen_q = 100, .seqlen_k = 100, .heads_q = 2, .heads_k = 1, .head_dim = 24, .mask = FLASH_ATTN_CAUSAL};
    fixture f = fixture_make(&c, dtype, 5);
    fixture_run(&f, t, 2);
    flash_attn_tensor before[5] = {copy_of(&f.p.o), copy_of(&f.p.lse), copy_of(&f.g.dq), copy_of(&f.g.dk),
                                   copy_of(&f.g.dv)};
    set(&f.p.q, 0, BAD, 1, 3, (double)NAN);
    fixture_run(&f, t, 2);
    flash_attn_tensor        after[5] = {f.p.o, f.p.lse, f.g.dq, f.g.dk, f.g.dv};
    static const char *const names[5] = {"o", "lse", "dq", "dk", "dv"};
    assert_true(isnan(get(&f.p.o, 0, BAD, 1, 0)) && isnan(get(&f.p.lse, 0, 1, BAD, 0)) &&
                isnan(get(&f.g.dq, 0, BAD, 1, 0)) && isnan(get(&f.g.dk, 0, BAD, 0, 0)));
    for (int n = 0; n < 5; n++) /* keys up to BAD are seen by the bad query */
        expect_others_unchanged(&before[n], &after[n], n == 1 ? 2 : 1, n < 3 ? BAD : 0, BAD + 1, names[n]);
    fixture_free(&f);
}

static void nan_in_one_query_stays_in_its_row(void **state)
{
    (void)state;
    for_each_tier_and_dtype(nan_query);
}

/* A NaN in dO where O is 0, because V is: it reaches dq of its row and dk and dv of the keys that its query sees; of a query that sees nothing, nothing. */
static void nan_dout(const tier *t, flash_attn_dtype dtype)
{
    enum { KEYS = 100, BLIND = 30, BAD = 67, COL = 3 };
    test_case c = {.seqlen_q = KEYS + BLIND, .seqlen_k = KEYS, .heads_q = 2, .heads_k = 1, .head_dim = 24, .mask = FLASH_ATTN_CAUSAL};
    fixture   f = fixture_make(&c, dtype, 6);
    for (int j = 0; j < KEYS; j++)
        set(&f.p.v, 0, j, 0, COL, 0.0);
    fixture_run(&f, t, 2);
    const flash_attn_tensor *const after[3] = {&f.g.dq, &f.g.dk, &f.g.dv};
    static const char *const       names[3] = {"dq", "dk", "dv"};
    flash_attn_tensor              before[3];
    for (int n = 0; n < 3; n++)
        before[n] = copy_of(after[n]);
    set(&f.g.dout, 0, BLIND - 1, 1, COL + 1, (double)NAN);
    fixture_run(&f, t, 2);
    for (int n = 0; n < 3; n++)
        expect_same_bits(&before[n], after[n], names[n]);
    set(&f.g.dout, 0, BAD, 1, COL, (double)NAN);
    fixture_run(&f, t, 2);
    for (int d = 0; d < 24; d++)
        assert_true(isnan(get(&f.g.dq, 0, BAD, 1, d)) && isnan(get(&f.g.dk, 0, BAD - BLIND, 0, d)) && isnan(get(&f.g.dk, 0, 0, 0, d)));
    assert_true(isnan(get(&f.g.dv, 0, BAD - BLIND, 0, COL)) && isnan(get(&f.g.dv, 0, 0, 0, COL)));
    for (int n = 0; n < 3; n++)
        expect_others_unchanged(&before[n], after[n], 1, n == 0 ? BAD : 0, n == 0 ? BAD + 1 : BAD - BLIND + 1, names[n]);
    fixture_free(&f);
}

static void nan_in_dout_reaches_who_sees_it_where_o_is_0(void **state)
{
    (void)state;
    for_each_tier_and_dtype(nan_dout);
}

/* 90 queries on 30 keys, causal: the first 60 see nothing, whatever their q and dO hold. */
static void empty_rows(const tier *t, flash_attn_dtype dtype)
{
    static const double fillings[] = {1, (double)NAN, (double)INFINITY, 6e4};
    test_case           c  = {.seqlen_q = 90, .seqlen_k = 30, .heads_q = 2, .head_dim = 33, .mask = FLASH_ATTN_CAUSAL};
    flash_attn_tensor   dk = {0}, dv = {0};
    for (int n = 0; n < 4; n++) {
        fixture f = fixture_make(&c, dtype, 6);
        for (int i = 0; i < 60; i++)
            for (int h = 0; h < 2; h++)
                for (int d = 0; d < 33; d++) {
                    set(&f.p.q, 0, i, h, d, fillings[n]);
                    set(&f.g.dout, 0, i, h, d, fillings[n]);
                }
        fixture_run(&f, t, 2);
        for (int i = 0; i < 60; i++)
            for (int h = 0; h < 2; h++) {
                assert_true(get(&f.p.lse, 0, h, i, 0) == (double)-INFINITY);
                for (int d = 0; d < 33; d++)
                    assert_true(get(&f.p.o, 0, i, h, d) == 0 && get(&f.g.dq, 0, i, h, d) == 0);
            }
        if (n == 0) {
            dk = copy_of(&f.g.dk);
            dv = copy_of(&f.g.dv);
        }
        expect_same_bits(&dk, &f.g.dk, "dk");
        expect_same_bits(&dv, &f.g.dv, "dv");
        fixture_free(&f);
    }
    free(dk.data);
    free(dv.data);
}

static void rows_that_see_nothing_are_zero_whatever_they_hold(void **state)
{
    (void)state;
    for_each_tier_and_dtype(empty_rows);
}

static void sink_alone(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.seqlen_q = 20, .seqlen_k = 5, .heads_q = 3, .sinks = true, .mask = FLASH_ATTN_CAUSAL};
    fixture   f = fixture_make(&c, dtype, 7);
    fixture_run(&f, t, 1);
    for (int h = 0; h < 3; h++)
        for (int i = 0; i < 15; i++) {
            assert_true(fabs(get(&f.p.lse, 0, h, i, 0) - get(&f.p.sinks, 0, h, 0, 0)) <= 1e-6);
            for (int d = 0; d < 32; d++)
                assert_true(get(&f.p.o, 0, i, h, d) == 0 && get(&f.g.dq, 0, i, h, d) == 0);
        }
    fixture_free(&f);
}

static void a_row_with_only_a_sink_gives_zero_and_the_sinks_lse(void **state)
{
    (void)state;
    for_each_tier_and_dtype(sink_alone);
}

/* The same numbers whether a mask is said one way or another. */
static void same_mask(const tier *t, flash_attn_dtype dtype)
{
    static const struct {
        flash_attn_mask a;
        int             a_left, a_right;
        flash_attn_mask b;
        int             b_left, b_right;
    } pairs[] = {
        {FLASH_ATTN_CAUSAL, 0, 0, FLASH_ATTN_WINDOW, -1, 0},
        {FLASH_ATTN_NONE, 0, 0, FLASH_ATTN_WINDOW, -1, -1},
        {FLASH_ATTN_NONE, 0, 0, FLASH_ATTN_WINDOW, 5000, 2147483647},
        {FLASH_ATTN_CAUSAL, 0, 0, FLASH_ATTN_WINDOW, 2147483647, 0},
        {FLASH_ATTN_WINDOW, 30, 70, FLASH_ATTN_WINDOW, 30, 1000}, /* 70 to the right is all that there is */
    };
    for (size_t n = 0; n < sizeof pairs / sizeof pairs[0]; n++) {
        test_case c = {.seqlen_q     = 70,
                       .seqlen_k     = 90,
                       .heads_q      = 2,
                       .mask         = pairs[n].a,
                       .window_left  = pairs[n].a_left,
                       .window_right = pairs[n].a_right};
        fixture   f = fixture_make(&c, dtype, 8), g = fixture_make(&c, dtype, 8);
        g.p.mask         = pairs[n].b;
        g.p.window_left  = pairs[n].b_left;
        g.p.window_right = pairs[n].b_right;
        fixture_run(&f, t, 2);
        fixture_run(&g, t, 2);
        double tolerance = loose_tolerance(dtype);
        expect_close(&f.p.o, &g.p.o, tolerance, "o");
        expect_close(&f.p.lse, &g.p.lse, 1e-5, "lse");
        expect_close(&f.g.dq, &g.g.dq, tolerance, "dq");
        expect_close(&f.g.dk, &g.g.dk, 8 * tolerance, "dk");
        fixture_free(&f);
        fixture_free(&g);
    }
}

static void clamping_a_window_changes_nothing(void **state)
{
    (void)state;
    for_each_tier_and_dtype(same_mask);
}

/* With v the unit matrix row i of o is row i of P: its non-zeros are what the query sees. */
static void visible_pairs(const tier *t, flash_attn_dtype dtype)
{
    enum { NQ = 40, NK = 64 };
    static const int lefts[] = {-1, 0, 3, 30}, rights[] = {-1, 0, 2, 25};
    for (int n = 0; n < 16; n++) {
        int       left = lefts[n / 4], right = rights[n % 4];
        test_case c = {.seqlen_q     = NQ,
                       .seqlen_k     = NK,
                       .head_dim     = 8,
                       .head_dim_v   = NK,
                       .mask         = FLASH_ATTN_WINDOW,
                       .window_left  = left,
                       .window_right = right,
                       .forward_only = true};
        fixture   f = fixture_make(&c, dtype, 9);
        for (int j = 0; j < NK; j++) {
            for (int d = 0; d < NK; d++)
                set(&f.p.v, 0, j, 0, d, d == j);
            for (int d = 0; d < 8; d++)
                set(&f.p.k, 0, j, 0, d, 0.01 * (j % 7));
        }
        for (int i = 0; i < NQ; i++)
            for (int d = 0; d < 8; d++)
                set(&f.p.q, 0, i, 0, d, 0.02 * (i % 5));
        fixture_run(&f, t, 1);
        for (int i = 0; i < NQ; i++)
            for (int j = 0; j < NK; j++) {
                int  centre = i + NK - NQ;
                bool sees   = (left < 0 || j >= centre - left) && (right < 0 || j <= centre + right);
                if ((get(&f.p.o, 0, i, 0, j) > 0) != sees)
                    fail_msg("window %d, %d: query %d and key %d", left, right, i, j);
            }
        fixture_free(&f);
    }
}

static void windows_are_aligned_to_the_bottom_right(void **state)
{
    (void)state;
    for_each_tier_and_dtype(visible_pairs);
}

/* So long that some tiles lie within what the slice shows and need no mask, on every tier. */
static void one_causal_slice(const tier *t, flash_attn_dtype dtype)
{
    enum { NQ = 300, NK = 1400 };
    test_case        c     = {.seqlen_q = NQ, .seqlen_k = NK, .heads_q = 1, .head_dim = 16, .mask = FLASH_ATTN_CAUSAL};
    flash_attn_slice whole = {.q_end = NQ, .k_end = NK, .kind = FLASH_ATTN_SLICE_CAUSAL};
    fixture          f     = fixture_make(&c, dtype, 10);
    fixture_run(&f, t, 1);
    const flash_attn_tensor *results[] = {&f.p.o, &f.p.lse, &f.g.dq, &f.g.dk, &f.g.dv};
    static const char *const names[]   = {"o", "lse", "dq", "dk", "dv"};
    flash_attn_tensor        before[5];
    for (int n = 0; n < 5; n++)
        before[n] = copy_of(results[n]);
    f.p.mask   = FLASH_ATTN_NONE;
    f.p.slices = (flash_attn_slices){.list = &whole, .count = 1};
    fixture_run(&f, t, 1);
    for (int n = 0; n < 5; n++) {
        expect_close(&before[n], results[n], loose_tolerance(dtype), names[n]);
        free(before[n].data);
    }
    fixture_free(&f);
}

static void a_block_mask_of_one_causal_slice_is_the_causal_mask(void **state)
{
    (void)state;
    for_each_tier_and_dtype(one_causal_slice);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_nan_and_inf_in_future_keys_do_not_change_causal_output),
        cmocka_unit_test(nan_in_keys_before_the_window_does_not_change_output),
        cmocka_unit_test(nan_in_one_query_stays_in_its_row),
        cmocka_unit_test(nan_in_dout_reaches_who_sees_it_where_o_is_0),
        cmocka_unit_test(rows_that_see_nothing_are_zero_whatever_they_hold),
        cmocka_unit_test(a_row_with_only_a_sink_gives_zero_and_the_sinks_lse),
        cmocka_unit_test(clamping_a_window_changes_nothing),
        cmocka_unit_test(windows_are_aligned_to_the_bottom_right),
        cmocka_unit_test(a_block_mask_of_one_causal_slice_is_the_causal_mask),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
