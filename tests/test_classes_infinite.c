/* Promises about infinite numbers in Q and K of many queries, forward and backward: each row is what the reference
 * says, also where tiers multiply numbers in pieces. On every tier and dtype. */
#include "harness.h"

static bool one_dtype; /* of a shape, by turns, with --one-dtype: references take long with sanitizers */

enum { NQ = 70, NK = 300, COLUMN = 3, FIRST_KEY = 50, SECOND_KEY = 299, OTHER_COLUMN = 4, OTHER_KEY = 41 };

/* Outputs that the reference fills, in float32, and what the tier made of the same problem. */
typedef struct outputs {
    flash_attn_tensor *found[6], right[6];
    int                count;
} outputs;

static outputs reference_of(fixture *f)
{
    flash_attn_tensor *all[] = {&f->p.o, &f->p.lse, &f->g.dq, &f->g.dk, &f->g.dv, &f->g.dbias};
    fixture            r     = *f;
    flash_attn_tensor *own[] = {&r.p.o, &r.p.lse, &r.g.dq, &r.g.dk, &r.g.dv, &r.g.dbias};
    outputs            x     = {.count = f->backward ? 6 : 2};
    r.p.device               = (flash_attn_device){.type = FLASH_ATTN_REFERENCE};
    for (int n = 0; n < x.count; n++) {
        x.found[n] = all[n];
        if (!all[n]->data)
            continue;
        x.right[n]       = copy_of(all[n]);
        x.right[n].dtype = n == 5 ? all[n]->dtype : FLASH_ATTN_F32; /* dbias is of the bias's dtype */
        free(x.right[n].data);
        x.right[n].data = malloc((size_t)count_of(all[n]) * sizeof(float) + 1);
        assert_non_null(x.right[n].data);
        *own[n] = x.right[n];
    }
    expect_ok(flash_attn_forward(NULL, &r.p, NULL));
    if (f->backward)
        expect_ok(flash_attn_backward(NULL, &r.p, &r.g, NULL));
    return x;
}

/* Every number as the reference's: finite and near, or NaN, or the same infinity. Of a gradient that is not finite no
 * more is asked than that: Inf - Inf is a matter of the order of sums. */
static void expect_reference(const outputs *x, const tier *t, flash_attn_dtype dtype, const char *what)
{
    static const char *names[] = {"o", "lse", "dq", "dk", "dv", "dbias"};
    for (int n = 0; n < x->count; n++) {
        if (!x->found[n]->data)
            continue;
        double *found = values_of(x->found[n]), *right = values_of(&x->right[n]), size = 1;
        for (int64_t i = 0; i < count_of(x->found[n]); i++)
            size = isfinite(right[i]) ? fmax(size, fabs(right[i])) : size;
        for (int64_t i = 0; i < count_of(x->found[n]); i++) {
            bool same;
            if (isfinite(right[i]))
                same = fabs(found[i] - right[i]) <= (n < 2 ? 2 : 4) * loose_tolerance(dtype) * size;
            else if (n < 2)
                same = isnan(right[i]) ? isnan(found[i]) : found[i] == right[i];
            else
                same = !isfinite(found[i]);
            if (!same)
                fail_msg("%s, %s, %s: number %lld of %s is %g, expected %g", t->name, dtype_name(dtype), what,
                         (long long)i, names[n], found[i], right[i]);
        }
        free(found);
        free(right);
    }
}

/* The first are for all that is tried, the others for keys alone: references take long. */
enum { MOST_TRIED = 4 };

static const test_case shapes[] = {
    {.name = "head_dim 64", .seqlen_q = 200, .head_dim = 64},
    {.name = "head_dim 128, causal, two heads a key", .head_dim = 128, .heads_k = 1, .mask = FLASH_ATTN_CAUSAL},
    {.name = "few queries", .head_dim = 64, .seqlen_q = 6},
    {.name = "softcap", .head_dim = 64, .softcap = 5, .forward_only = true},
    {.name = "head_dim 64, causal", .seqlen_q = 200, .head_dim = 64, .mask = FLASH_ATTN_CAUSAL},
    {.name = "head_dim 128", .head_dim = 128},
    {.name = "head_dim 40 and 24", .head_dim = 40, .head_dim_v = 24},
    {.name = "bias, ALiBi", .head_dim = 64, .bias = BIAS, .alibi = true},
    {.name = "dropout", .head_dim = 64, .dropout = 0.25f},
    {.name = "head_dim 320", .head_dim = 320},
};

/* Keys of no weight: minus infinity where every query is positive, some 1 and others anything, and infinity where each
 * is negative. */
static fixture make(int shape, flash_attn_dtype dtype)
{
    test_case c = shapes[shape];
    c.seqlen_q  = c.seqlen_q ? c.seqlen_q : NQ;
    c.seqlen_k  = NK;
    c.heads_q   = 2;
    fixture f   = fixture_make(&c, dtype, 31);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < c.seqlen_q; i++) {
            set(&f.p.q, 0, i, h, COLUMN, i % 4 == 0 ? 1 : fabs(get(&f.p.q, 0, i, h, COLUMN)) + 1e-3);
            set(&f.p.q, 0, i, h, OTHER_COLUMN, i % 4 == 1 ? -1 : -fabs(get(&f.p.q, 0, i, h, OTHER_COLUMN)) - 1e-3);
        }
    for (int h = 0; h < f.p.k.shape[2]; h++) {
        set(&f.p.k, 0, FIRST_KEY, h, COLUMN, (double)-INFINITY);
        set(&f.p.k, 0, SECOND_KEY, h, COLUMN, (double)-INFINITY);
        set(&f.p.k, 0, OTHER_KEY, h, OTHER_COLUMN, (double)INFINITY);
    }
    return f;
}

/* change NULL: nothing but keys. */
static void expect_right(void (*change)(fixture *f))
{
    static int turn;
    turn++;
    for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++) {
        for (int n = 0; n < (change ? MOST_TRIED : (int)(sizeof shapes / sizeof shapes[0])); n++) {
            if (one_dtype && (n + turn) % 3 != dtype)
                continue;
            fixture f = make(n, (flash_attn_dtype)dtype);
            if (change)
                change(&f);
            outputs right = reference_of(&f);
            for (int m = 0; m < num_tiers(); m++) {
                if (!tier_differs(tier_at(m), (flash_attn_dtype)dtype))
                    continue;
                fixture_run(&f, tier_at(m), 2);
                expect_reference(&right, tier_at(m), (flash_attn_dtype)dtype, shapes[n].name);
            }
            for (int m = 0; m < right.count; m++)
                free(right.right[m].data);
            fixture_free(&f);
        }
    }
}

/* ---- keys ---- */

static void keys_of_minus_infinity_have_no_weight(void **state)
{
    (void)state;
    expect_right(NULL);
}

/* Some queries see a key at plus infinity, some make Inf * 0: NaN for all keys that they see but those at minus
 * infinity. */
static void change_queries(fixture *f)
{
    int last = (int)f->p.q.shape[1] - 1;
    set(&f->p.q, 0, last / 2, 0, COLUMN, -1);
    set(&f->p.q, 0, last, 0, COLUMN, 0);
}

static void scores_that_are_not_finite_reach_their_rows_alone(void **state)
{
    (void)state;
    expect_right(change_queries);
}

/* ---- queries ---- */

/* One of infinity meets numbers of both signs, and one infinite keys. dK and dV of what they see are not asked for: NaN
 * of these rows may hide whom they see at minus infinity. */
static void set_infinite_queries(fixture *f)
{
    int last = (int)f->p.q.shape[1] - 1;
    set(&f->p.q, 0, last / 3, 0, 5, (double)INFINITY);
    set(&f->p.q, 0, last / 2, 0, COLUMN, (double)INFINITY);
    f->g.dk.data = f->g.dv.data = f->g.dbias.data = NULL;
}

/* One of infinity meets numbers of one sign, minus infinity with every key: it sees none. */
static void set_query_that_sees_none(fixture *f)
{
    set(&f->p.q, 0, 1, 0, 6, (double)-INFINITY);
    for (int h = 0; h < f->p.k.shape[2]; h++)
        for (int j = 0; j < NK; j++)
            set(&f->p.k, 0, j, h, 6, j % 3 ? fabs(get(&f->p.k, 0, j, h, 6)) + 1e-3 : 1);
    f->backward = false;
}

static void infinite_queries_are_right(void **state)
{
    (void)state;
    expect_right(set_infinite_queries);
    expect_right(set_query_that_sees_none);
}

/* ---- values and dO ---- */

/* Beside infinite keys, in another one's value and in the gradient of one query. */
static void set_infinite_values(fixture *f)
{
    set(&f->p.v, 0, 60, 0, 7, (double)INFINITY);
    if (f->backward)
        set(&f->g.dout, 0, (int)f->p.q.shape[1] / 2, 0, 9, (double)-INFINITY);
}

static void infinite_values_are_right(void **state)
{
    (void)state;
    expect_right(set_infinite_values);
}

int main(int argc, char **argv)
{
    one_dtype = argc > 1 && strcmp(argv[1], "--one-dtype") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_of_minus_infinity_have_no_weight),
        cmocka_unit_test(scores_that_are_not_finite_reach_their_rows_alone),
        cmocka_unit_test(infinite_queries_are_right),
        cmocka_unit_test(infinite_values_are_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
