/*
 * The oracle itself: closed forms, single rounding, and its gradients against finite differences of its own forward.
 *
 * Differences have five points and fourth order: f' = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h. Outputs come back
 * in float32, so f has an error of about 6e-8 for each output; with h = 2^-5 that makes 3e-6, and h^4 / 30 times the
 * fifth derivative adds about as much. Inputs are multiples of 2^-10, so that steps of h are exact. The tolerance is
 * 3e-5 of max(1, |gradient|).
 */
#include "harness.h"

static const flash_attn_device reference = {.type = FLASH_ATTN_REFERENCE};

/* ---- closed forms ---- */

static flash_attn_tensor tensor(void *data, flash_attn_dtype dtype, int64_t b, int64_t s, int64_t h, int64_t d)
{
    return (flash_attn_tensor){.data = data, .dtype = dtype, .shape = {b, s, h, d}, .stride = {s * h * d, h * d, d, 1}};
}

static void two_keys_give_the_logistic_function(void **state)
{
    (void)state;
    float              q = 2.0f, k[2] = {1.0f, -0.5f}, v[2] = {10.0f, 20.0f}, o, lse;
    flash_attn_problem p = {.device = reference,
                            .q      = tensor(&q, FLASH_ATTN_F32, 1, 1, 1, 1),
                            .k      = tensor(k, FLASH_ATTN_F32, 1, 2, 1, 1),
                            .v      = tensor(v, FLASH_ATTN_F32, 1, 2, 1, 1),
                            .o      = tensor(&o, FLASH_ATTN_F32, 1, 1, 1, 1),
                            .lse    = tensor(&lse, FLASH_ATTN_F32, 1, 1, 1, 1)};
    expect_status(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_OK, "forward");
    double second = 1 / (1 + exp(3));
    assert_true(fabs((double)o - (10 + 10 * second)) < 2e-6);
    assert_true(fabs((double)lse - (2 + log1p(exp(-3)))) < 3e-7);
}

/* 1/4 (4 + 2^-6 + 2^-28) lies just above the middle of two neighbours in bfloat16; rounded to float32 first, it would
 * lie on the middle and go down to the even one. */
static void results_are_rounded_once(void **state)
{
    (void)state;
    uint16_t           zero[4] = {0}, o = 0, v[4];
    double             values[4] = {4, 0x1p-6, 0x1p-28, 0};
    flash_attn_problem p         = {.device = reference,
                                    .q      = tensor(zero, FLASH_ATTN_BF16, 1, 1, 1, 1),
                                    .k      = tensor(zero, FLASH_ATTN_BF16, 1, 4, 1, 1),
                                    .v      = tensor(v, FLASH_ATTN_BF16, 1, 4, 1, 1),
                                    .o      = tensor(&o, FLASH_ATTN_BF16, 1, 1, 1, 1)};
    for (int j = 0; j < 4; j++)
        set(&p.v, 0, j, 0, 0, values[j]);
    expect_status(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_OK, "forward");
    assert_true(get(&p.o, 0, 0, 0, 0) == 1 + 0x1p-7);
}

/* With dO the all-ones matrix and one value column of ones, o is 1 whatever q and k are: their gradients vanish. */
static void a_constant_value_has_no_gradient_in_q_and_k(void **state)
{
    (void)state;
    test_case c = {.seqlen_q = 9, .seqlen_k = 11, .head_dim = 5, .mask = FLASH_ATTN_CAUSAL};
    fixture   f = fixture_make(&c, FLASH_ATTN_F32, 1);
    f.p.device  = reference;
    for (int64_t j = 0; j < 11; j++)
        for (int64_t d = 0; d < 5; d++)
            set(&f.p.v, 0, j, 0, d, 1);
    fixture_run(&f, tier_at(0), 0);
    for (int64_t d = 0; d < 5; d++) {
        for (int64_t i = 0; i < 9; i++)
            assert_true(fabs(get(&f.g.dq, 0, i, 0, d)) < 1e-12);
        for (int64_t j = 0; j < 11; j++)
            assert_true(fabs(get(&f.g.dk, 0, j, 0, d)) < 1e-12);
    }
    fixture_free(&f);
}

/* ---- gradients ---- */

#define H 0x1p-5

static const test_case gradient_cases[] = {
    {.name = "plain", .seqlen_q = 5, .seqlen_k = 7, .head_dim = 4},
    {.name = "head_dim_v", .seqlen_q = 5, .seqlen_k = 7, .head_dim = 3, .head_dim_v = 6},
    {.name = "scale", .seqlen_q = 5, .seqlen_k = 7, .head_dim = 4, .scale = -0.75f},
    {.name = "causal", .seqlen_q = 7, .seqlen_k = 5, .head_dim = 4, .mask = FLASH_ATTN_CAUSAL},
    {.name         = "window",
     .seqlen_q     = 6,
     .seqlen_k     = 9,
     .head_dim     = 4,
     .mask         = FLASH_ATTN_WINDOW,
     .window_left  = 2,
     .window_right = 1},
    {.name = "gqa", .batch = 2, .seqlen_q = 4, .seqlen_k = 5, .head_dim = 3, .heads_q = 6, .heads_k = 2},
    {.name = "softcap", .seqlen_q = 5, .seqlen_k = 7, .head_dim = 4, .softcap = 1.5f, .logit_size = 2},
    {.name = "bias", .batch = 2, .heads_q = 2, .seqlen_q = 4, .seqlen_k = 5, .head_dim = 3, .bias = BIAS},
    {.name     = "bias, one batch",
     .batch    = 2,
     .heads_q  = 2,
     .seqlen_q = 4,
     .seqlen_k = 5,
     .head_dim = 3,
     .bias     = BIAS | BIAS_ONE_BATCH},
    {.name     = "bias, one row for all",
     .batch    = 2,
     .heads_q  = 2,
     .seqlen_q = 4,
     .seqlen_k = 5,
     .head_dim = 3,
     .bias     = BIAS_ONE_FOR_ALL | BIAS_ONE_QUERY},
    {.name     = "bias, -inf",
     .batch    = 2,
     .heads_q  = 2,
     .seqlen_q = 6,
     .seqlen_k = 5,
     .head_dim = 3,
     .bias     = BIAS | BIAS_MINUS_INF,
     .mask     = FLASH_ATTN_CAUSAL},
    {.name = "alibi", .batch = 2, .heads_q = 2, .seqlen_q = 5, .seqlen_k = 7, .head_dim = 4, .alibi = true},
    {.name     = "sinks",
     .batch    = 2,
     .heads_q  = 2,
     .seqlen_q = 6,
     .seqlen_k = 4,
     .head_dim = 4,
     .sinks    = true,
     .mask     = FLASH_ATTN_CAUSAL},
    {.name = "dropout", .batch = 2, .heads_q = 2, .seqlen_q = 6, .seqlen_k = 7, .head_dim = 4, .dropout = 0.3f},
    {.name = "slices", .batch = 2, .seqlen_q = 9, .seqlen_k = 9, .head_dim = 4, .slices = SLICES_KINDS},
    {.name = "own slices", .batch = 3, .seqlen_q = 9, .seqlen_k = 8, .head_dim = 4, .slices = SLICES_OWN},
    {.name     = "varlen",
     .batch    = 3,
     .heads_q  = 2,
     .seqlen_q = 6,
     .seqlen_k = 7,
     .head_dim = 3,
     .varlen_q = LENGTHS_MIXED,
     .varlen_k = LENGTHS_MIXED,
     .mask     = FLASH_ATTN_CAUSAL},
    {.name      = "used",
     .batch     = 3,
     .heads_q   = 2,
     .seqlen_q  = 6,
     .seqlen_k  = 7,
     .head_dim  = 3,
     .seqused_q = LENGTHS_MIXED,
     .seqused_k = LENGTHS_MIXED,
     .leftpad   = true},
    {.name     = "packed",
     .batch    = 2,
     .heads_q  = 4,
     .heads_k  = 2,
     .seqlen_q = 5,
     .seqlen_k = 5,
     .head_dim = 3,
     .layout   = LAYOUT_PACKED},
    {.name         = "all",
     .batch        = 3,
     .heads_q      = 4,
     .heads_k      = 2,
     .seqlen_q     = 6,
     .seqlen_k     = 6,
     .head_dim     = 3,
     .head_dim_v   = 4,
     .varlen_q     = LENGTHS_MIXED,
     .varlen_k     = LENGTHS_MIXED,
     .seqused_k    = LENGTHS_MIXED,
     .slices       = SLICES_KINDS,
     .mask         = FLASH_ATTN_WINDOW,
     .window_left  = 4,
     .window_right = 2,
     .softcap      = 2,
     .bias         = BIAS,
     .alibi        = true,
     .sinks        = true,
     .dropout      = 0.2f},
};

/* Sum of o * dout where dout counts. */
static double loss(fixture *f)
{
    double sum = 0;
    expect_status(flash_attn_forward(NULL, &f->p, NULL), FLASH_ATTN_OK, "forward");
    double *o = values_of(&f->p.o), *dout = values_of(&f->g.dout);
    for (int64_t n = 0; n < count_of(&f->p.o); n++)
        sum += isnan(dout[n]) ? 0 : o[n] * dout[n];
    free(o);
    free(dout);
    return sum;
}

static void to_grid(const flash_attn_tensor *t)
{
    for (int64_t a = 0; t->data && a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t c = 0; c < t->shape[2]; c++)
                for (int64_t d = 0; d < t->shape[3]; d++) {
                    double x = get(t, a, b, c, d);
                    if (isfinite(x))
                        set(t, a, b, c, d, nearbyint(x * 1024) / 1024);
                }
}

static double difference_quotient(fixture *f, const flash_attn_tensor *t, const int64_t at[4])
{
    static const int    steps[4]   = {1, -1, 2, -2};
    static const double weights[4] = {8, -8, -1, 1};
    double              x = get(t, at[0], at[1], at[2], at[3]), sum = 0;
    for (int n = 0; n < 4; n++) {
        set(t, at[0], at[1], at[2], at[3], x + steps[n] * H);
        sum += weights[n] * loss(f);
    }
    set(t, at[0], at[1], at[2], at[3], x);
    return sum / (12 * H);
}

/* Every element of `input`; returns how many were compared. */
static int check_gradient(fixture *f, const flash_attn_tensor *input, const flash_attn_tensor *gradient,
                          const char *what)
{
    int compared = 0;
    for (int64_t n = 0; n < (input->data ? count_of(input) : 0); n++) {
        int64_t at[4], rest = n;
        for (int m = 3; m >= 0; m--) {
            at[m] = rest % input->shape[m];
            rest /= input->shape[m];
        }
        double x = get(input, at[0], at[1], at[2], at[3]), g = get(gradient, at[0], at[1], at[2], at[3]);
        if (!isfinite(x)) { /* poison, or -inf in a bias: nothing depends on it */
            assert_true(g == 0);
            continue;
        }
        double quotient = difference_quotient(f, input, at);
        if (!(fabs(g - quotient) <= 3e-5 * fmax(1, fabs(quotient))))
            fail_msg("%s [%lld, %lld, %lld, %lld]: gradient %.8g, difference quotient %.8g", what, (long long)at[0],
                     (long long)at[1], (long long)at[2], (long long)at[3], g, quotient);
        compared++;
    }
    return compared;
}

static void gradients_are_the_derivatives(void **state)
{
    const test_case *c = *state;
    fixture          f = fixture_make(c, FLASH_ATTN_F32, 7);
    f.p.device         = reference;
    to_grid(&f.p.q);
    to_grid(&f.p.k);
    to_grid(&f.p.v);
    to_grid(&f.p.bias);
    to_grid(&f.p.sinks);
    fixture_run(&f, tier_at(0), 0);
    int compared = check_gradient(&f, &f.p.q, &f.g.dq, "dq") + check_gradient(&f, &f.p.k, &f.g.dk, "dk") +
                   check_gradient(&f, &f.p.v, &f.g.dv, "dv") + check_gradient(&f, &f.p.bias, &f.g.dbias, "dbias") +
                   check_gradient(&f, &f.p.sinks, &f.g.dsinks, "dsinks");
    assert_true(compared > 20);
    fixture_free(&f);
}

int main(void)
{
    struct CMUnitTest tests[64] = {
        cmocka_unit_test(two_keys_give_the_logistic_function),
        cmocka_unit_test(results_are_rounded_once),
        cmocka_unit_test(a_constant_value_has_no_gradient_in_q_and_k),
    };
    static char names[64][80];
    size_t      count = 3;
    for (size_t n = 0; n < sizeof gradient_cases / sizeof gradient_cases[0]; n++, count++) {
        snprintf(names[n], sizeof names[n], "gradients_are_the_derivatives: %s", gradient_cases[n].name);
        tests[count] = (struct CMUnitTest){names[n], gradients_are_the_derivatives, NULL, NULL,
                                           (void *)(uintptr_t)&gradient_cases[n]};
    }
    return _cmocka_run_group_tests("reference", tests, count, NULL, NULL);
}
