/* Promises about a forward that is asked for no LSE, on the tier that computes P in another way then, AMX, and every
 * dtype. At least 512 keys, so that it does. Elsewhere LSE changes nothing, and the tests are skipped. */
#include "harness.h"

#include <string.h>

enum { NQ = 70, NK = 550 };

static void for_amx_and_each_dtype(promise body)
{
    const tier *best = NULL;
    for (int n = 0; n < num_tiers(); n++) {
        if (strcmp(tier_at(n)->name, "amx") == 0)
            best = tier_at(n);
    }
    if (!best) {
        print_message("skipped: this machine has no AMX\n");
        skip();
    }
    for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++)
        body(best, (flash_attn_dtype)dtype);
}

static fixture make(const test_case *shape, flash_attn_dtype dtype, uint64_t seed)
{
    test_case c    = *shape;
    c.forward_only = true;
    fixture f      = fixture_make(&c, dtype, seed);
    f.p.lse.data   = NULL;
    return f;
}

/* Of o against the reference in double: root mean square. */
static double error_of(const fixture *f)
{
    fixture r           = *f;
    r.p.device          = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    flash_attn_tensor o = copy_of(&f->p.o), wide = o;
    wide.dtype = FLASH_ATTN_F32;
    wide.data  = malloc((size_t)count_of(&o) * sizeof(float) + 1);
    assert_non_null(wide.data);
    r.p.o        = wide;
    r.p.lse.data = NULL;
    expect_status(flash_attn_forward(NULL, &r.p, NULL), FLASH_ATTN_OK, "reference");
    double *x = values_of(&o), *y = values_of(&wide), sum = 0;
    for (int64_t n = 0; n < count_of(&o); n++)
        sum += (x[n] - y[n]) * (x[n] - y[n]);
    free(x);
    free(y);
    free(o.data);
    free(wide.data);
    return sqrt(sum / (double)count_of(&f->p.o));
}

/* ---- as right as with LSE ---- */

static void accuracy(const tier *t, flash_attn_dtype dtype)
{
    static const test_case shapes[] = {
        {.seqlen_q = 130, .seqlen_k = 600, .heads_q = 2, .head_dim = 64},
        {.seqlen_q = 520, .seqlen_k = 520, .head_dim = 128, .mask = FLASH_ATTN_CAUSAL},
        {.seqlen_q = 45, .seqlen_k = 1100, .heads_q = 4, .heads_k = 2, .head_dim = 96},
        {.seqlen_q = 533, .seqlen_k = 533, .head_dim = 32, .head_dim_v = 80, .mask = FLASH_ATTN_CAUSAL},
        {.seqlen_q = 50, .seqlen_k = 690, .head_dim = 20, .head_dim_v = 8},
        {.seqlen_q = 64, .seqlen_k = 1300, .head_dim = 64, .scale = 2},
        {.batch = 3, .seqlen_q = 90, .seqlen_k = 1500, .head_dim = 40, .varlen_k = LENGTHS_MIXED},
    };
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        test_case with    = shapes[n];
        with.forward_only = true;
        fixture f = make(&shapes[n], dtype, 51), g = fixture_make(&with, dtype, 51);
        fixture_run(&f, t, 2);
        fixture_run(&g, t, 2);
        double without = error_of(&f), error = error_of(&g);
        if (!(without <= 1.15 * error + 1e-7))
            fail_msg("%s, shape %zu: %g without LSE, %g with", t->name, n, without, error);
        fixture_free(&f);
        fixture_free(&g);
    }
}

static void o_is_as_right_as_with_lse(void **state)
{
    (void)state;
    for_amx_and_each_dtype(accuracy);
}

/* Key j's logit by blocks of 16: the shift is outgrown again and again, and at last by far. */
static void hills(const tier *t, flash_attn_dtype dtype)
{
    static const double heights[] = {30, 200, 20000, 2e6};
    test_case           c         = {.seqlen_q = 33, .seqlen_k = NK, .head_dim = 16, .scale = 1};
    for (int n = 0; n < 8; n++) {
        fixture f = make(&c, dtype, 52);
        for (int i = 0; i < 33; i++)
            for (int d = 0; d < 16; d++)
                set(&f.p.q, 0, i, 0, d, d == 0 ? (i % 3 == 2 ? 0.25 : 1) : 0.01 * d);
        for (int j = 0; j < NK; j++) {
            double part = (double)(j / 16) / (NK / 16);
            set(&f.p.k, 0, j, 0, 0,
                fmin(heights[n / 2], dtype == FLASH_ATTN_F16 ? 6e4 : 1e30) * (n % 2 ? 0.5 - part : part));
        }
        fixture_run(&f, t, 1);
        double error = error_of(&f);
        if (!(error <= fmax(dtype == FLASH_ATTN_F32 ? 2e-4 : 2 * dtype_epsilon(dtype), 1e-6 * heights[n / 2])))
            fail_msg("%s %d, heights %d: %g", t->name, (int)dtype, n, error);
        fixture_free(&f);
    }
}

static void logits_that_rise_and_fall_by_block_are_right(void **state)
{
    (void)state;
    for_amx_and_each_dtype(hills);
}

/* ---- what is not a number ---- */

static void expect_other_rows_same(const flash_attn_tensor *before, const flash_attn_tensor *after, int begin, int end)
{
    for (int i = 0; i < NQ; i++) {
        if (i >= begin && i < end)
            continue;
        flash_attn_tensor a = slice_of(*before, 1, i, i + 1), b = slice_of(*after, 1, i, i + 1);
        expect_same_bits(&a, &b, "o");
    }
}

/* A query of NaN, Inf or huge numbers: its own row shows it, and no other. */
static void odd_query(const tier *t, flash_attn_dtype dtype)
{
    enum { BAD = 37 };
    const double fillings[] = {(double)NAN, -(double)NAN, (double)INFINITY, dtype == FLASH_ATTN_F16 ? 6e4 : 1e6};
    test_case    c          = {.seqlen_q = NQ, .seqlen_k = NK, .heads_q = 2, .heads_k = 1, .head_dim = 64};
    for (int n = 0; n < 4; n++) {
        fixture f = make(&c, dtype, 53);
        fixture_run(&f, t, 2);
        flash_attn_tensor before = copy_of(&f.p.o);
        set(&f.p.q, 0, BAD, 1, 3, fillings[n]);
        fixture_run(&f, t, 2);
        expect_other_rows_same(&before, &f.p.o, BAD, BAD + 1);
        for (int d = 0; d < 64; d++)
            if (isnan(get(&f.p.o, 0, BAD, 1, d)) != (n < 3))
                fail_msg("%s %d, filling %d: %g", t->name, (int)dtype, n, get(&f.p.o, 0, BAD, 1, d));
        free(before.data);
        fixture_free(&f);
    }
}

static void an_odd_query_stays_in_its_row(void **state)
{
    (void)state;
    for_amx_and_each_dtype(odd_query);
}

/* A key of NaN, Inf or huge numbers, causal: rows before it keep their bits, rows from it on show NaN. */
static void odd_key(const tier *t, flash_attn_dtype dtype)
{
    enum { BAD = 41, SHIFT = NK - NQ };
    const double fillings[] = {(double)NAN, -(double)NAN, (double)INFINITY, dtype == FLASH_ATTN_F16 ? 6e4 : 1e6};
    test_case    c          = {.seqlen_q = NQ, .seqlen_k = NK, .head_dim = 64, .mask = FLASH_ATTN_CAUSAL};
    for (int n = 0; n < 4; n++) {
        fixture f = make(&c, dtype, 54);
        fixture_run(&f, t, 2);
        flash_attn_tensor before = copy_of(&f.p.o);
        set(&f.p.k, 0, SHIFT + BAD, 0, 3, fillings[n]);
        fixture_run(&f, t, 2);
        expect_other_rows_same(&before, &f.p.o, BAD, NQ);
        for (int i = BAD; i < NQ && n < 2; i++)
            assert_true(isnan(get(&f.p.o, 0, i, 0, 5)));
        for (int i = BAD; i < NQ && n == 3; i++)
            if (!isfinite(get(&f.p.o, 0, i, 0, 5)))
                fail_msg("%s %d, row %d: %g", t->name, (int)dtype, i, get(&f.p.o, 0, i, 0, 5));
        free(before.data);
        fixture_free(&f);
    }
}

static void an_odd_key_is_felt_by_rows_that_see_it(void **state)
{
    (void)state;
    for_amx_and_each_dtype(odd_key);
}

/* A row of v with NaN and Inf, of which the rows that see it show that column alone. */
static void odd_value(const tier *t, flash_attn_dtype dtype)
{
    enum { BAD = 22, SHIFT = NK - NQ };
    test_case c = {.seqlen_q = NQ, .seqlen_k = NK, .head_dim = 64, .mask = FLASH_ATTN_CAUSAL};
    fixture   f = make(&c, dtype, 55);
    fixture_run(&f, t, 2);
    flash_attn_tensor before = copy_of(&f.p.o);
    set(&f.p.v, 0, SHIFT + BAD, 0, 3, (double)NAN);
    set(&f.p.v, 0, SHIFT + BAD, 0, 4, (double)INFINITY);
    fixture_run(&f, t, 2);
    expect_other_rows_same(&before, &f.p.o, BAD, NQ);
    for (int i = BAD; i < NQ; i++)
        for (int d = 0; d < 64; d++) {
            double o = get(&f.p.o, 0, i, 0, d), was = get(&before, 0, i, 0, d);
            assert_true(d == 3 ? isnan(o) : d == 4 ? o == (double)INFINITY : fabs(o - was) <= loose_tolerance(dtype));
        }
    free(before.data);
    fixture_free(&f);
}

static void an_odd_value_stays_in_its_column(void **state)
{
    (void)state;
    for_amx_and_each_dtype(odd_value);
}

/* ---- the same bits ---- */

static void threads_and_batch(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {
        .batch = 2, .heads_q = 2, .heads_k = 1, .seqlen_q = 600, .seqlen_k = 1100, .mask = FLASH_ATTN_CAUSAL};
    fixture f = make(&c, dtype, 56);
    fixture_run(&f, t, 1);
    flash_attn_tensor one = copy_of(&f.p.o), q = f.p.q, k = f.p.k, v = f.p.v, o = f.p.o;
    fixture_run(&f, t, 7);
    expect_same_bits(&one, &o, "o");
    for (int64_t b = 0; b < 2; b++) {
        f.p.q = slice_of(q, 0, b, b + 1);
        f.p.k = slice_of(k, 0, b, b + 1);
        f.p.v = slice_of(v, 0, b, b + 1);
        f.p.o = slice_of(o, 0, b, b + 1);
        fixture_run(&f, t, 2);
    }
    expect_same_bits(&one, &o, "o");
    free(one.data);
    fixture_free(&f);
}

static void bits_do_not_depend_on_threads_or_batch(void **state)
{
    (void)state;
    for_amx_and_each_dtype(threads_and_batch);
}

/* One key that a row sees is its output, exactly. */
static void first_row(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.seqlen_q = NK, .seqlen_k = NK, .head_dim = 64, .mask = FLASH_ATTN_CAUSAL};
    fixture   f = make(&c, dtype, 57);
    fixture_run(&f, t, 2);
    for (int d = 0; d < 64; d++)
        assert_true(fabs(get(&f.p.o, 0, 0, 0, d) - get(&f.p.v, 0, 0, 0, d)) <= (dtype == FLASH_ATTN_F32 ? 1e-6 : 0));
    fixture_free(&f);
}

static void a_row_that_sees_one_key_is_its_value(void **state)
{
    (void)state;
    for_amx_and_each_dtype(first_row);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o_is_as_right_as_with_lse),
        cmocka_unit_test(logits_that_rise_and_fall_by_block_are_right),
        cmocka_unit_test(an_odd_query_stays_in_its_row),
        cmocka_unit_test(an_odd_key_is_felt_by_rows_that_see_it),
        cmocka_unit_test(an_odd_value_stays_in_its_column),
        cmocka_unit_test(bits_do_not_depend_on_threads_or_batch),
        cmocka_unit_test(a_row_that_sees_one_key_is_its_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
