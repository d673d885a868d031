#include "harness.h"

#include <string.h>

static tier tiers[8];
static int  tier_count;

static void destroy_tiers(void)
{
    for (int n = 0; n < tier_count; n++)
        flash_attn_destroy(tiers[n].context);
    tier_count = 0;
}

/* A cap that names a tier which the machine lacks gives a lower one again; each name is kept once. */
static void find_tiers(void)
{
    if (tier_count > 0)
        return;
    setenv("FLASH_ATTN_ASSUME", "amx-fp16", 1); /* it is tried, so where it is not it is not used */
    static const flash_attn_isa rising[] = {FLASH_ATTN_ISA_SCALAR,      FLASH_ATTN_ISA_NEON, FLASH_ATTN_ISA_AVX2,
                                            FLASH_ATTN_ISA_AVX512,      FLASH_ATTN_ISA_AVX512_BF16,
                                            FLASH_ATTN_ISA_AMX,         FLASH_ATTN_ISA_AMX_FP16,
                                            FLASH_ATTN_ISA_NEON_BF16};
    for (size_t n = 0; n < sizeof rising / sizeof *rising; n++) {
        flash_attn_options     options = {.num_threads = HARNESS_THREADS, .max_isa = rising[n]};
        flash_attn_device_info info;
        tier                  *next = &tiers[tier_count];
        memset(next, 0, sizeof *next);
        assert_int_equal(flash_attn_create(&next->context, &options), FLASH_ATTN_OK);
        assert_int_equal(flash_attn_get_device_info(next->context, (flash_attn_device){0}, &info), FLASH_ATTN_OK);
        snprintf(next->name, sizeof next->name, "%s", info.isa);
        next->isa = rising[n];
        if (tier_count > 0 && strcmp(tiers[tier_count - 1].name, next->name) == 0)
            flash_attn_destroy(next->context);
        else
            tier_count++;
    }
    atexit(destroy_tiers);
}

int num_tiers(void)
{
    find_tiers();
    return tier_count;
}

const tier *tier_at(int n)
{
    find_tiers();
    return &tiers[n];
}

bool tier_differs(const tier *t, flash_attn_dtype dtype)
{
    if (t->isa == FLASH_ATTN_ISA_NEON_BF16)
        return dtype == FLASH_ATTN_BF16;
    if (t->isa == FLASH_ATTN_ISA_AVX512_BF16)
        return dtype == FLASH_ATTN_BF16 || dtype == FLASH_ATTN_F8E4M3;
    return t->isa != FLASH_ATTN_ISA_AMX_FP16 || dtype == FLASH_ATTN_F16;
}

void for_each_tier(void (*body)(const tier *t, void *user), void *user)
{
    for (int n = 0; n < num_tiers(); n++)
        body(tier_at(n), user);
}

/* ---- a problem to play with ---- */

fixture fixture_make(const test_case *shape, flash_attn_dtype dtype, uint64_t seed)
{
    fixture f = {.instance = case_build(shape, dtype, CASE_BACKWARD | CASE_NO_EXPECT, seed, NULL, 0)};
    if (!f.instance)
        fail_msg("no memory for a fixture");
    f.p        = *case_problem(f.instance);
    f.backward = case_has_backward(f.instance);
    if (f.backward)
        f.g = *case_grads(f.instance);
    return f;
}

void fixture_free(fixture *f) { case_free(f->instance); }

void expect_status(flash_attn_status status, flash_attn_status expected, const char *what)
{
    if (status != expected)
        fail_msg("%s: %s, expected %s; last error: %s", what, flash_attn_status_string(status),
                 flash_attn_status_string(expected), flash_attn_last_error());
}

static void poison(const flash_attn_tensor *t)
{
    for (int64_t a = 0; t->data && a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t c = 0; c < t->shape[2]; c++)
                for (int64_t d = 0; d < t->shape[3]; d++)
                    memset(element(t, a, b, c, d), 0xFF, dtype_bytes(t->dtype));
}

void fixture_run(fixture *f, const tier *t, int num_threads)
{
    flash_attn_exec exec = {.num_threads = num_threads};
    poison(&f->p.o);
    poison(&f->p.lse);
    expect_status(flash_attn_forward(t->context, &f->p, &exec), FLASH_ATTN_OK, "forward");
    if (!f->backward)
        return;
    poison(&f->g.dq);
    poison(&f->g.dk);
    poison(&f->g.dv);
    poison(&f->g.dbias);
    poison(&f->g.dsinks);
    expect_status(flash_attn_backward(t->context, &f->p, &f->g, &exec), FLASH_ATTN_OK, "backward");
}

void expect_ok(flash_attn_status status)
{
    if (status != FLASH_ATTN_OK)
        fail_msg("%s", flash_attn_last_error());
}

void skip_unless(bool there, const char *why)
{
    if (there)
        return;
    print_message("skipped: %s\n", why);
    skip();
}

int64_t count_of(const flash_attn_tensor *t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }

static void index_of(const flash_attn_tensor *t, int64_t n, int64_t at[4])
{
    for (int m = 3; m >= 0; m--) {
        at[m] = n % t->shape[m];
        n /= t->shape[m];
    }
}

double *values_of(const flash_attn_tensor *t)
{
    double *values = malloc((size_t)count_of(t) * sizeof *values + 1);
    assert_non_null(values);
    for (int64_t n = 0, at[4]; n < count_of(t); n++) {
        index_of(t, n, at);
        values[n] = get(t, at[0], at[1], at[2], at[3]);
    }
    return values;
}

static void expect_alike(const flash_attn_tensor *a, const flash_attn_tensor *b, double tolerance, const char *what)
{
    assert_memory_equal(a->shape, b->shape, sizeof a->shape);
    for (int64_t n = 0, at[4]; n < count_of(a); n++) {
        index_of(a, n, at);
        const char *x = element(a, at[0], at[1], at[2], at[3]), *y = element(b, at[0], at[1], at[2], at[3]);
        if (a->dtype == b->dtype && memcmp(x, y, dtype_bytes(a->dtype)) == 0)
            continue;
        double p = get(a, at[0], at[1], at[2], at[3]), q = get(b, at[0], at[1], at[2], at[3]);
        if (!(fabs(p - q) <= tolerance) || tolerance == 0)
            fail_msg("%s: element [%lld, %lld, %lld, %lld] is %.9g and %.9g", what, (long long)at[0], (long long)at[1],
                     (long long)at[2], (long long)at[3], p, q);
    }
}

void expect_same_bits(const flash_attn_tensor *a, const flash_attn_tensor *b, const char *what)
{
    expect_alike(a, b, 0, what);
}

void expect_close(const flash_attn_tensor *a, const flash_attn_tensor *b, double tolerance, const char *what)
{
    expect_alike(a, b, tolerance, what);
}

flash_attn_tensor copy_of(const flash_attn_tensor *t)
{
    flash_attn_tensor copy = *t;
    copy.stride[3]         = 1;
    for (int m = 2; m >= 0; m--)
        copy.stride[m] = copy.stride[m + 1] * copy.shape[m + 1];
    copy.data = malloc((size_t)count_of(t) * dtype_bytes(t->dtype) + 1);
    assert_non_null(copy.data);
    for (int64_t n = 0, at[4]; n < count_of(t); n++) {
        index_of(t, n, at);
        memcpy(element(&copy, at[0], at[1], at[2], at[3]), element(t, at[0], at[1], at[2], at[3]),
               dtype_bytes(t->dtype));
    }
    return copy;
}

flash_attn_tensor slice_of(flash_attn_tensor t, int n, int64_t begin, int64_t end)
{
    t.data     = (char *)t.data + begin * t.stride[n] * (int64_t)dtype_bytes(t.dtype);
    t.shape[n] = end - begin;
    return t;
}

void for_each_tier_and_dtype(promise body)
{
    for (int n = 0; n < num_tiers(); n++)
        for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++)
            if (tier_differs(tier_at(n), (flash_attn_dtype)dtype))
                body(tier_at(n), (flash_attn_dtype)dtype);
}

double loose_tolerance(flash_attn_dtype dtype) { return dtype == FLASH_ATTN_F32 ? 1e-5 : 2 * dtype_epsilon(dtype); }

void print_tally(const tally *t) { printf("%d passed, %d failed, %d skipped\n", t->passed, t->failed, t->skipped); }
