/* Promises about numbers: huge and odd logits, LSE, merging, dropout. On every tier and dtype. */
#include "harness.h"

/* Build again with expected values, so that the whole judgement of case_runner.h applies to tensors changed by
 * `change`. */
static flash_attn_tensor reference_o(const fixture *f)
{
    fixture r           = *f;
    r.p.device          = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    flash_attn_tensor o = copy_of(&f->p.o), wide = o;
    wide.dtype = FLASH_ATTN_F32;
    wide.data  = malloc((size_t)count_of(&o) * sizeof(float) + 1);
    assert_non_null(wide.data);
    free(o.data);
    r.p.o        = wide;
    r.p.lse.data = NULL;
    expect_status(flash_attn_forward(NULL, &r.p, NULL), FLASH_ATTN_OK, "reference");
    return wide;
}

/* ---- logits ---- */

/* Key j's logit is about height[j / 16]: every way for the running maximum to move. */
static void hills(const tier *t, flash_attn_dtype dtype)
{
    enum { NK = 400 };
    for (int shape = 0; shape < 4; shape++) {
        test_case c = {.seqlen_q = 33, .seqlen_k = NK, .head_dim = 16, .scale = 1, .forward_only = true};
        fixture   f = fixture_make(&c, dtype, 11);
        for (int i = 0; i < 33; i++)
            for (int d = 0; d < 16; d++)
                set(&f.p.q, 0, i, 0, d, d == 0 ? 1 : 0.01 * d);
        for (int j = 0; j < NK; j++) {
            double part   = (double)(j / 16) / (NK / 16);
            double height = shape == 0   ? 200 * part                   /* rising */
                            : shape == 1 ? -200 * part                  /* falling */
                            : shape == 2 ? 200 - 800 * fabs(part - 0.5) /* rising, then falling */
                                         : (j / 16 % 2 ? 150 : -150);   /* up and down */
            set(&f.p.k, 0, j, 0, 0, height);
        }
        fixture_run(&f, t, 1);
        flash_attn_tensor expected = reference_o(&f);
        expect_close(&f.p.o, &expected, dtype == FLASH_ATTN_F32 ? 2e-4 : 8 * dtype_epsilon(dtype), "o");
        free(expected.data);
        fixture_free(&f);
    }
}

static void logits_that_rise_and_fall_by_block_are_right(void **state)
{
    (void)state;
    for_each_tier_and_dtype(hills);
}

/* Logits of 1e10 to 1e30, where half of the last place is more octaves than a float has. Key 560 + i wins row i. */
static void far_logits(const tier *t, flash_attn_dtype dtype)
{
    enum { NK = 600 };
    for (int n = 0; n < 6; n++) {
        double    size = n % 3 == 0 ? 6e4 : n % 3 == 1 ? 1e9 : 1e15;
        test_case c    = {.seqlen_q = 40, .seqlen_k = NK, .head_dim = 64, .forward_only = true};
        c.scale        = n % 3 ? 1 : 100;
        if (dtype == FLASH_ATTN_F16 && n % 3)
            continue;
        fixture f = fixture_make(&c, dtype, 13);
        for (int d = 0; d < 64; d++) {
            for (int i = 0; i < 40; i++)
                set(&f.p.q, 0, i, 0, d, d == i ? size : 0);
            for (int j = 0; j < NK; j++)
                set(&f.p.k, 0, j, 0, d, j == 560 + d ? size : size / (2 + j % 7));
        }
        if (n >= 3)
            f.p.lse.data = NULL;
        fixture_run(&f, t, 1);
        for (int i = 0; i < 40; i++) {
            double lse = round_to(size, dtype) * round_to(size, dtype) * c.scale;
            if (n < 3 && !(fabs(get(&f.p.lse, 0, 0, i, 0) - lse) <= 1e-6 * lse))
                fail_msg("%s, %s, logit %g: LSE is %g", t->name, dtype_name(dtype), lse, get(&f.p.lse, 0, 0, i, 0));
            for (int d = 0; d < 64; d++)
                assert_true(fabs(get(&f.p.o, 0, i, 0, d) - get(&f.p.v, 0, 560 + i, 0, d)) <= 1e-6);
        }
        fixture_free(&f);
    }
}

/* The same with dropout: key 560 + i's value over 1 - p, or nothing. */
static void far_logits_dropped(const tier *t, flash_attn_dtype dtype)
{
    enum { NK = 600 };
    test_case c = {.seqlen_q = 40, .seqlen_k = NK, .head_dim = 64, .scale = 100, .dropout = 0.5f};
    c.forward_only = true;
    fixture f      = fixture_make(&c, dtype, 14);
    int     kept   = 0;
    for (int d = 0; d < 64; d++) {
        for (int i = 0; i < 40; i++)
            set(&f.p.q, 0, i, 0, d, d == i ? 6e4 : 0);
        for (int j = 0; j < NK; j++)
            set(&f.p.k, 0, j, 0, d, j == 560 + d ? 6e4 : 1e4);
    }
    fixture_run(&f, t, 1);
    for (int i = 0; i < 40; i++) {
        bool some = get(&f.p.o, 0, i, 0, 0) != 0;
        kept += some;
        for (int d = 0; d < 64; d++) {
            double o = get(&f.p.o, 0, i, 0, d), expected = some ? 2 * get(&f.p.v, 0, 560 + i, 0, d) : 0;
            if (!(fabs(o - expected) <= 2 * loose_tolerance(dtype)))
                fail_msg("%s, %s, query %d: %g, expected %g", t->name, dtype_name(dtype), i, o, expected);
        }
    }
    assert_in_range(kept, 1, 39);
    fixture_free(&f);
}

static void logits_far_from_zero_are_right(void **state)
{
    (void)state;
    for_each_tier_and_dtype(far_logits);
    for_each_tier_and_dtype(far_logits_dropped);
}

/* q = 6e4 or so: near the end of float16, where an unscaled score would not fit. One key wins each row by far. */
static void huge_queries(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.seqlen_q = 20, .seqlen_k = 70, .head_dim = 64};
    fixture   f = fixture_make(&c, dtype, 12);
    for (int i = 0; i < 20; i++)
        for (int d = 0; d < 64; d++)
            set(&f.p.q, 0, i, 0, d, d == i ? 60000 : 0);
    for (int j = 0; j < 70; j++)
        for (int d = 0; d < 64; d++)
            set(&f.p.k, 0, j, 0, d, j == d ? 60000 : 1);
    fixture_run(&f, t, 1);
    for (int i = 0; i < 20; i++)
        for (int d = 0; d < 64; d++) {
            assert_true(fabs(get(&f.p.o, 0, i, 0, d) - get(&f.p.v, 0, i, 0, d)) <= 1e-6); /* key i alone */
            assert_true(isfinite(get(&f.g.dq, 0, i, 0, d)));
        }
    double lse = 60000.0 * 60000.0 / 8, rounded = round_to(60000, dtype);
    lse *= rounded * rounded / (60000.0 * 60000.0);
    assert_true(fabs(get(&f.p.lse, 0, 0, 0, 0) - lse) <= 1e-6 * lse);
    fixture_free(&f);
}

static void scores_far_beyond_float16_are_right(void **state)
{
    (void)state;
    for_each_tier_and_dtype(huge_queries);
}

static void equal_scores(const tier *t, flash_attn_dtype dtype)
{
    enum { NK = 300 };
    test_case c       = {.seqlen_q = 10, .seqlen_k = NK, .head_dim = 8, .forward_only = true};
    fixture   f       = fixture_make(&c, dtype, 13);
    double    mean[8] = {0};
    for (int i = 0; i < 10; i++)
        for (int d = 0; d < 8; d++)
            set(&f.p.q, 0, i, 0, d, 0);
    for (int j = 0; j < NK; j++)
        for (int d = 0; d < 8; d++)
            mean[d] += get(&f.p.v, 0, j, 0, d) / NK;
    fixture_run(&f, t, 1);
    for (int i = 0; i < 10; i++) {
        assert_true(fabs(get(&f.p.lse, 0, 0, i, 0) - log(NK)) < 5e-6);
        for (int d = 0; d < 8; d++)
            assert_true(fabs(get(&f.p.o, 0, i, 0, d) - mean[d]) <= loose_tolerance(dtype) / 4);
    }
    fixture_free(&f);
}

static void equal_scores_give_the_mean(void **state)
{
    (void)state;
    for_each_tier_and_dtype(equal_scores);
}

/* One query of so many heads, so that V is read in place: what is not finite in one column of V shows there and nowhere
 * else. */
static void value_not_finite(const tier *t, flash_attn_dtype dtype, int heads, int head_dim)
{
    enum { NAN_COL = 5, INF_COL = 40 };
    test_case c = {.seqlen_q     = 1,
                   .seqlen_k     = 300,
                   .heads_q      = heads,
                   .heads_k      = 1,
                   .head_dim     = head_dim,
                   .forward_only = true};
    fixture   f = fixture_make(&c, dtype, 14);
    fixture_run(&f, t, 1);
    flash_attn_tensor before = copy_of(&f.p.o);
    set(&f.p.v, 0, 37, 0, NAN_COL, (double)NAN);
    set(&f.p.v, 0, 299, 0, INF_COL, (double)INFINITY);
    fixture_run(&f, t, 1);
    for (int h = 0; h < heads; h++)
        for (int d = 0; d < head_dim; d++) {
            double x = get(&f.p.o, 0, 0, h, d);
            if (d == NAN_COL || d == INF_COL)
                assert_true(d == NAN_COL ? isnan(x) : isinf(x));
            else
                assert_true(fabs(x - get(&before, 0, 0, h, d)) <= loose_tolerance(dtype));
        }
    free(before.data);
    fixture_free(&f);
}

/* The heads of a tile and the columns decide how AMX reads V in place. */
static void values_not_finite(const tier *t, flash_attn_dtype dtype)
{
    static const int shapes[][2] = {{4, 64}, {8, 64}, {14, 96}, {20, 320}, {40, 320}};
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++)
        value_not_finite(t, dtype, shapes[n][0], shapes[n][1]);
}

static void a_value_that_is_not_finite_stays_in_its_column(void **state)
{
    (void)state;
    for_each_tier_and_dtype(values_not_finite);
}

/* What is not finite in V reaches the queries that keep the pair, and no other: as in the reference. */
static void dropped_value_not_finite(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.seqlen_q = 150, .seqlen_k = 300, .heads_q = 2, .head_dim = 64, .dropout = 0.5f, .forward_only = true};
    fixture   f = fixture_make(&c, dtype, 18);
    set(&f.p.v, 0, 37, 0, 5, (double)NAN);
    set(&f.p.v, 0, 299, 1, 40, (double)INFINITY);
    fixture_run(&f, t, 1);
    flash_attn_tensor  found  = copy_of(&f.p.o);
    flash_attn_problem p      = f.p;
    int                finite = 0;
    p.device.type             = FLASH_ATTN_REFERENCE;
    expect_ok(flash_attn_forward(NULL, &p, NULL));
    for (int i = 0; i < 150; i++)
        for (int h = 0; h < 2; h++)
            for (int d = 0; d < 64; d++) {
                double x = get(&found, 0, i, h, d), right = get(&p.o, 0, i, h, d);
                assert_true(isnan(x) == isnan(right) && isinf(x) == isinf(right));
                assert_true(!isfinite(right) || fabs(x - right) <= loose_tolerance(dtype));
                finite += isfinite(right);
            }
    assert_in_range(finite, 150 * 2 * 64 - 200, 150 * 2 * 64 - 100); /* half of the 300 that see one of the two */
    free(found.data);
    fixture_free(&f);
}

static void a_value_that_is_not_finite_is_dropped_with_its_pair(void **state)
{
    (void)state;
    for_each_tier_and_dtype(dropped_value_not_finite);
}

/* A key that is minus infinity where every query is 1 has no weight, like one that is far below the others. */
static void infinite_key(const tier *t, flash_attn_dtype dtype)
{
    enum { D = 64, HEADS = 4, KEY = 50 };
    test_case c = {.seqlen_q = 1, .seqlen_k = 300, .heads_q = HEADS, .heads_k = 1, .head_dim = D, .forward_only = true};
    fixture   f = fixture_make(&c, dtype, 15);
    for (int h = 0; h < HEADS; h++)
        set(&f.p.q, 0, 0, h, 3, 1);
    set(&f.p.k, 0, KEY, 0, 3, -6e4);
    fixture_run(&f, t, 1);
    flash_attn_tensor before = copy_of(&f.p.o);
    set(&f.p.k, 0, KEY, 0, 3, (double)-INFINITY);
    fixture_run(&f, t, 1);
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < D; d++)
            assert_true(fabs(get(&f.p.o, 0, 0, h, d) - get(&before, 0, 0, h, d)) <= loose_tolerance(dtype));
    free(before.data);
    fixture_free(&f);
}

static void a_key_of_minus_infinity_has_no_weight(void **state)
{
    (void)state;
    for_each_tier_and_dtype(infinite_key);
}

/* ---- LSE and merging ---- */

/* dV of a key with all the weight is the sum of dO. Where that is wider than the products' operands it is rounded, not cut:
 * what is lost is as often more as less, while cutting to bfloat16 loses 0.28% of everything. */
static void expect_sum_of_dout(const fixture *f, const char *name)
{
    const flash_attn_tensor *dout = &f->g.dout, *dv = &f->g.dv;
    double                   along = 0, size = 0;
    for (int64_t n = 0; n < dv->shape[2] * dv->shape[3]; n++) {
        int64_t h = n / dv->shape[3], c = n % dv->shape[3], group = dout->shape[2] / dv->shape[2];
        double  sum = 0;
        for (int64_t i = 0; i < dout->shape[1] * group; i++)
            sum += get(dout, 0, i / group, h * group + i % group, c);
        along += (get(dv, 0, 0, h, c) - sum) * sum;
        size += sum * sum;
    }
    if (!(fabs(along) <= 7e-4 * size))
        fail_msg("%s: dV is off by %.2g of itself, on the whole", name, along / size);
}

/* One key has all the weight: dS = P (dP - Delta) is 0, and what is left of it only the rounding of two sums, also
 * where dO is wider than the products' operands. */
static void one_key(const tier *t, flash_attn_dtype dtype)
{
    static const bool wide[] = {false, true};
    for (int n = 0; n < 2; n++) {
        test_case shape = {.seqlen_q = 70, .seqlen_k = 1, .heads_q = 3, .head_dim = 64, .bias = BIAS, .o_f32 = wide[n]};
        fixture   f     = fixture_make(&shape, dtype, 5);
        fixture_run(&f, t, 2);
        /* dP is a sum of 64 products, about 8 at most 30 in size */
        const flash_attn_tensor *zeros[] = {&f.g.dq, &f.g.dk, &f.g.dbias};
        for (int m = 0; m < 3; m++) {
            double *value = values_of(zeros[m]), limit = m == 1 ? 70 * 3e-5 : 3e-5; /* dK adds up all queries */
            for (int64_t i = 0; i < count_of(zeros[m]); i++)
                if (!(fabs(value[i]) <= limit))
                    fail_msg("%s, %s, %s: gradient %d is %g with one key in sight", t->name, dtype_name(dtype),
                             wide[n] ? "float32 results" : "results like inputs", m, value[i]);
            free(value);
        }
        if (wide[n])
            expect_sum_of_dout(&f, t->name);
        fixture_free(&f);
    }
}

static void gradients_of_a_single_key_vanish(void **state)
{
    (void)state;
    for_each_tier_and_dtype(one_key);
}

static void lse_by_hand(const tier *t, flash_attn_dtype dtype)
{
    enum { NQ = 12, NK = 75 };
    test_case c = {.seqlen_q     = NQ,
                   .seqlen_k     = NK,
                   .heads_q      = 2,
                   .head_dim     = 16,
                   .softcap      = 3,
                   .sinks        = true,
                   .logit_size   = 4,
                   .forward_only = true};
    fixture   f = fixture_make(&c, dtype, 14);
    fixture_run(&f, t, 1);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < NQ; i++) {
            double sum = exp(get(&f.p.sinks, 0, h, 0, 0));
            for (int j = 0; j < NK; j++) {
                double s = 0;
                for (int d = 0; d < 16; d++)
                    s += get(&f.p.q, 0, i, h, d) * get(&f.p.k, 0, j, h, d);
                sum += exp(3 * tanh(s / 4 / 3));
            }
            assert_true(fabs(get(&f.p.lse, 0, h, i, 0) - log(sum)) < 5e-6 * fmax(1, log(sum)));
        }
    fixture_free(&f);
}

static void lse_holds_the_sink_and_the_softcap_in_natural_logarithm(void **state)
{
    (void)state;
    for_each_tier_and_dtype(lse_by_hand);
}

/* Attention over two parts of the keys, merged, is attention over all of them. */
static void merge_parts(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.batch = 2, .seqlen_q = 30, .seqlen_k = 100, .heads_q = 2, .forward_only = true};
    fixture   f = fixture_make(&c, dtype, 15);
    fixture_run(&f, t, 1);
    flash_attn_partial parts[3], result = {copy_of(&f.p.o), copy_of(&f.p.lse)};
    static const int   cut[4] = {0, 0, 37, 100}; /* the first part is empty */
    for (int n = 0; n < 3; n++) {
        fixture part = f;
        part.p.k     = slice_of(f.p.k, 1, cut[n], cut[n + 1]);
        part.p.v     = slice_of(f.p.v, 1, cut[n], cut[n + 1]);
        part.p.o     = copy_of(&f.p.o);
        part.p.lse   = copy_of(&f.p.lse);
        fixture_run(&part, t, 1);
        parts[n] = (flash_attn_partial){part.p.o, part.p.lse};
    }
    for (int64_t d = 0; d < 32; d++) /* an empty part counts nothing, whatever its o holds */
        set(&parts[0].o, 0, 3, 0, d, (double)NAN);
    expect_status(flash_attn_merge(t->context, (flash_attn_device){0}, parts, 3, &result, NULL), FLASH_ATTN_OK,
                  "merge");
    expect_close(&result.o, &f.p.o, loose_tolerance(dtype) / 2, "o");
    expect_close(&result.lse, &f.p.lse, 5e-6, "lse");
    for (int n = 0; n < 3; n++) {
        free(parts[n].o.data);
        free(parts[n].lse.data);
    }
    free(result.o.data);
    free(result.lse.data);
    fixture_free(&f);
}

static void merging_parts_gives_the_whole(void **state)
{
    (void)state;
    for_each_tier_and_dtype(merge_parts);
}

static void merging_empty_halves_is_empty_not_nan(void **state)
{
    (void)state;
    float              o[2][2] = {{NAN, 3}, {4, INFINITY}}, lse[2] = {-INFINITY, -INFINITY}, ro[2] = {7, 7}, rl = 7;
    flash_attn_tensor  shape_o = {.shape = {1, 1, 1, 2}}, shape_l = {.shape = {1, 1, 1, 1}};
    flash_attn_partial parts[2], result                           = {shape_o, shape_l};
    for (int n = 0; n < 2; n++) {
        parts[n]          = (flash_attn_partial){shape_o, shape_l};
        parts[n].o.data   = o[n];
        parts[n].lse.data = &lse[n];
    }
    result.o.data   = ro;
    result.lse.data = &rl;
    expect_status(flash_attn_merge(NULL, (flash_attn_device){0}, parts, 2, &result, NULL), FLASH_ATTN_OK, "merge");
    assert_true(ro[0] == 0 && ro[1] == 0 && rl == -INFINITY);
}

/* ---- dropout ---- */

enum { DROP_Q = 96, DROP_K = 80 };

/* v = unit matrix and dO = unit matrix: o is P Z, dv its transpose. */
static fixture dropout_fixture(flash_attn_dtype dtype, float p, uint64_t offset)
{
    test_case c = {.batch      = 2,
                   .heads_q    = 2,
                   .seqlen_q   = DROP_Q,
                   .seqlen_k   = DROP_K,
                   .head_dim   = 8,
                   .head_dim_v = DROP_Q,
                   .dropout    = p};
    fixture   f = fixture_make(&c, dtype, 16);
    f.p.dropout = (flash_attn_dropout){.p = p, .seed = 99, .offset = offset};
    for (int64_t b = 0; b < 2; b++)
        for (int64_t h = 0; h < 2; h++)
            for (int64_t d = 0; d < DROP_Q; d++) {
                for (int64_t j = 0; j < DROP_K; j++)
                    set(&f.p.v, b, j, h, d, j == d);
                for (int64_t i = 0; i < DROP_Q; i++)
                    set(&f.g.dout, b, i, h, d, i == d);
            }
    return f;
}

static bool kept(const fixture *f, int64_t b, int64_t h, int64_t i, int64_t j) { return get(&f->p.o, b, i, h, j) != 0; }

static void dropout_masks(const tier *t, flash_attn_dtype dtype)
{
    fixture f = dropout_fixture(dtype, 0.25f, 5), next = dropout_fixture(dtype, 0.25f, 6),
            r  = dropout_fixture(dtype, 0.25f, 5);
    r.p.device = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    fixture_run(&f, t, 2);
    fixture_run(&next, t, 2);
    fixture_run(&r, t, 1);
    int count = 0, same_next = 0, same_head = 0, same_batch = 0, total = 0;
    for (int64_t b = 0; b < 2; b++)
        for (int64_t h = 0; h < 2; h++)
            for (int64_t i = 0; i < DROP_Q; i++)
                for (int64_t j = 0; j < DROP_K; j++, total++) {
                    bool keeps = kept(&f, b, h, i, j);
                    if (keeps != (get(&f.g.dv, b, j, h, i) != 0))
                        fail_msg("the passes differ at [%d, %d, %d, %d]", (int)b, (int)h, (int)i, (int)j);
                    if (keeps != kept(&r, b, h, i, j))
                        fail_msg("not the reference's mask at [%d, %d, %d, %d]", (int)b, (int)h, (int)i, (int)j);
                    count += keeps;
                    same_next += keeps == kept(&next, b, h, i, j);
                    same_head += keeps == kept(&f, b, 1 - h, i, j);
                    same_batch += keeps == kept(&f, 1 - b, h, i, j);
                }
    /* 30720 coins: a spread of 0.0025. Two unrelated masks agree where both keep or both drop: 0.625. */
    assert_true(fabs((double)count / total - 0.75) < 0.0125);
    assert_true(fabs((double)same_next / total - 0.625) < 0.02);
    assert_true(fabs((double)same_head / total - 0.625) < 0.03);
    assert_true(fabs((double)same_batch / total - 0.625) < 0.03);
    fixture_free(&f);
    fixture_free(&next);
    fixture_free(&r);
}

static void both_passes_and_all_tiers_drop_the_same_pairs(void **state)
{
    (void)state;
    for_each_tier_and_dtype(dropout_masks);
}

/* What is kept is scaled, so the mean of P Z over many offsets is P; LSE does not know of dropout. */
static void dropout_mean(const tier *t, flash_attn_dtype dtype)
{
    fixture f = dropout_fixture(dtype, 0, 0), g = dropout_fixture(dtype, 0.5f, 0);
    fixture_run(&f, t, 2);
    fixture_run(&g, t, 2);
    expect_close(&f.p.lse, &g.p.lse, 5e-6, "lse");
    double sum = 0;
    for (int64_t i = 0; i < DROP_Q; i++)
        for (int64_t j = 0; j < DROP_K; j++) {
            double p = get(&f.p.o, 0, i, 0, j), pz = get(&g.p.o, 0, i, 0, j);
            sum += pz;
            if (pz != 0)
                assert_true(fabs(pz - 2 * p) <= 4 * dtype_epsilon(dtype) * p + 1e-6);
        }
    assert_true(fabs(sum / DROP_Q - 1) < 0.1);
    fixture_free(&f);
    fixture_free(&g);
}

static void what_dropout_keeps_is_scaled(void **state)
{
    (void)state;
    for_each_tier_and_dtype(dropout_mean);
}

static void a_dropout_of_one_or_more_is_refused(void **state)
{
    (void)state;
    static const float bad[] = {1.0f, 1.5f, -0.1f, NAN, INFINITY};
    for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) {
        fixture f     = dropout_fixture(FLASH_ATTN_F32, 0.25f, 5);
        f.p.dropout.p = bad[n];
        expect_status(flash_attn_forward(NULL, &f.p, NULL), FLASH_ATTN_INVALID, "forward");
        assert_non_null(strstr(flash_attn_last_error(), "dropout"));
        fixture_free(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_that_rise_and_fall_by_block_are_right),
        cmocka_unit_test(logits_far_from_zero_are_right),
        cmocka_unit_test(scores_far_beyond_float16_are_right),
        cmocka_unit_test(equal_scores_give_the_mean),
        cmocka_unit_test(a_value_that_is_not_finite_stays_in_its_column),
        cmocka_unit_test(a_value_that_is_not_finite_is_dropped_with_its_pair),
        cmocka_unit_test(a_key_of_minus_infinity_has_no_weight),
        cmocka_unit_test(gradients_of_a_single_key_vanish),
        cmocka_unit_test(lse_holds_the_sink_and_the_softcap_in_natural_logarithm),
        cmocka_unit_test(merging_parts_gives_the_whole),
        cmocka_unit_test(merging_empty_halves_is_empty_not_nan),
        cmocka_unit_test(both_passes_and_all_tiers_drop_the_same_pairs),
        cmocka_unit_test(what_dropout_keeps_is_scaled),
        cmocka_unit_test(a_dropout_of_one_or_more_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
