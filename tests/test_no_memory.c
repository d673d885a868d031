/* Every allocation of every call fails in turn: the call says NO_MEMORY, has written nothing, leaks nothing, and the
 * next call works. Linked with --wrap for the functions below, so that only the library's own calls are counted. */
#include "harness.h"

#include <stdatomic.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
int   __real_posix_memalign(void **p, size_t alignment, size_t bytes);
void  __real_free(void *p);

static atomic_int  countdown; /* the allocation that fails: 1 is the next one; 0: none */
static atomic_bool failed;
static atomic_long live; /* blocks that were allocated and not freed */

static bool must_fail(void)
{
    if (atomic_load(&countdown) > 0 && atomic_fetch_sub(&countdown, 1) == 1) {
        atomic_store(&failed, true);
        return true;
    }
    return false;
}

static void *counted(void *p)
{
    if (p)
        atomic_fetch_add(&live, 1);
    return p;
}

void *__wrap_malloc(size_t bytes) { return must_fail() ? NULL : counted(__real_malloc(bytes)); }
void *__wrap_calloc(size_t count, size_t bytes) { return must_fail() ? NULL : counted(__real_calloc(count, bytes)); }

void *__wrap_realloc(void *p, size_t bytes)
{
    if (must_fail())
        return NULL;
    void *moved = __real_realloc(p, bytes);
    return p ? moved : counted(moved);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return must_fail() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

int __wrap_posix_memalign(void **p, size_t alignment, size_t bytes)
{
    if (must_fail())
        return 12; /* ENOMEM */
    int error = __real_posix_memalign(p, alignment, bytes);
    if (error == 0)
        counted(*p);
    return error;
}

void __wrap_free(void *p)
{
    if (p)
        atomic_fetch_sub(&live, 1);
    __real_free(p);
}

/* ---- calls ---- */

typedef struct call {
    flash_attn_context *context;
    fixture             f;
    flash_attn_partial  parts[2], merged;
} call;

typedef flash_attn_status (*call_function)(call *c);

static flash_attn_status forward(call *c) { return flash_attn_forward(c->context, &c->f.p, NULL); }
static flash_attn_status backward(call *c) { return flash_attn_backward(c->context, &c->f.p, &c->f.g, NULL); }

static flash_attn_status merge(call *c)
{
    return flash_attn_merge(c->context, (flash_attn_device){0}, c->parts, 2, &c->merged, NULL);
}

static void fill(const flash_attn_tensor *t, double value)
{
    for (int64_t a = 0; t->data && a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t c = 0; c < t->shape[2]; c++)
                for (int64_t d = 0; d < t->shape[3]; d++)
                    set(t, a, b, c, d, value);
}

static void expect_filled(const flash_attn_tensor *t, double value, const char *what)
{
    flash_attn_tensor expected = *t;
    if (!t->data)
        return;
    expected = copy_of(t);
    fill(&expected, value);
    expect_same_bits(&expected, t, what);
    free(expected.data);
}

static void fill_outputs(call *c, call_function function, double value)
{
    if (function == forward) {
        fill(&c->f.p.o, value);
        fill(&c->f.p.lse, value);
    } else if (function == backward) {
        fill(&c->f.g.dq, value);
        fill(&c->f.g.dk, value);
        fill(&c->f.g.dv, value);
        fill(&c->f.g.dbias, value);
        fill(&c->f.g.dsinks, value);
    } else {
        fill(&c->merged.o, value);
        fill(&c->merged.lse, value);
    }
}

static void expect_outputs_untouched(call *c, call_function function, double value)
{
    if (function == forward) {
        expect_filled(&c->f.p.o, value, "o");
        expect_filled(&c->f.p.lse, value, "lse");
    } else if (function == backward) {
        expect_filled(&c->f.g.dq, value, "dq");
        expect_filled(&c->f.g.dk, value, "dk");
        expect_filled(&c->f.g.dv, value, "dv");
        expect_filled(&c->f.g.dbias, value, "dbias");
        expect_filled(&c->f.g.dsinks, value, "dsinks");
    } else {
        expect_filled(&c->merged.o, value, "merged o");
        expect_filled(&c->merged.lse, value, "merged lse");
    }
}

/* Fail allocation 1, 2, 3, ... of one call on a fresh context, until the call makes fewer. */
static void expect_every_failure_is_clean(call_function function, const test_case *shape, flash_attn_dtype dtype,
                                          const tier *t, flash_attn_device device)
{
    call c       = {.f = fixture_make(shape, dtype, 51)};
    c.f.p.device = device;
    fixture_run(&c.f, t, 1); /* o and lse for the backward */
    for (int n = 0; n < 2; n++)
        c.parts[n] = (flash_attn_partial){copy_of(&c.f.p.o), copy_of(&c.f.p.lse)};
    c.merged = (flash_attn_partial){copy_of(&c.f.p.o), copy_of(&c.f.p.lse)};
    for (int nth = 1;; nth++) {
        flash_attn_options options = {.num_threads = 3, .max_isa = t->isa};
        long               before  = atomic_load(&live);
        assert_true(nth < 1000);
        expect_status(flash_attn_create(&c.context, &options), FLASH_ATTN_OK, "create");
        fill_outputs(&c, function, 7);
        atomic_store(&failed, false);
        atomic_store(&countdown, nth);
        flash_attn_status status = function(&c);
        atomic_store(&countdown, 0);
        if (atomic_load(&failed)) {
            expect_status(status, FLASH_ATTN_NO_MEMORY, t->name);
            assert_true(flash_attn_last_error()[0] != 0);
            expect_outputs_untouched(&c, function, 7);
        }
        expect_status(function(&c), FLASH_ATTN_OK, "the next call");
        flash_attn_destroy(c.context);
        if (atomic_load(&live) != before)
            fail_msg("%s: allocation %d failed: %ld blocks leaked", t->name, nth, atomic_load(&live) - before);
        if (!atomic_load(&failed)) {
            expect_status(status, FLASH_ATTN_OK, t->name);
            break;
        }
    }
    for (int n = 0; n < 2; n++) {
        free(c.parts[n].o.data);
        free(c.parts[n].lse.data);
    }
    free(c.merged.o.data);
    free(c.merged.lse.data);
    fixture_free(&c.f);
}

static const test_case shapes[] = {
    {.batch = 2, .heads_q = 4, .heads_k = 2, .seqlen_q = 70, .seqlen_k = 150, .mask = FLASH_ATTN_CAUSAL},
    {.heads_q = 4, .heads_k = 1, .seqlen_q = 1, .seqlen_k = 600, .num_splits = 3},
    {.batch    = 3,
     .heads_q  = 2,
     .seqlen_q = 50,
     .seqlen_k = 60,
     .varlen_q = LENGTHS_MIXED,
     .varlen_k = LENGTHS_MIXED,
     .bias     = BIAS_ONE_FOR_ALL,
     .sinks    = true,
     .softcap  = 4,
     .dropout  = 0.2f,
     .alibi    = true,
     .layout   = LAYOUT_INNER_STRIDE},
};

static void calls_that_run_out_of_memory_say_so_and_do_nothing(void **state)
{
    (void)state;
    static const call_function functions[] = {forward, backward, merge};
    for (int t = 0; t < num_tiers(); t++)
        for (int f = 0; f < 3; f++)
            for (int s = 0; s < 3; s++)
                for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype += 2)
                    expect_every_failure_is_clean(functions[f], &shapes[s], (flash_attn_dtype)dtype, tier_at(t),
                                                  (flash_attn_device){0});
}

static void the_reference_that_runs_out_of_memory_says_so_and_does_nothing(void **state)
{
    (void)state;
    flash_attn_device device = {.type = FLASH_ATTN_REFERENCE};
    for (int s = 0; s < 3; s++) {
        expect_every_failure_is_clean(forward, &shapes[s], FLASH_ATTN_BF16, tier_at(0), device);
        expect_every_failure_is_clean(backward, &shapes[s], FLASH_ATTN_BF16, tier_at(0), device);
    }
}

static void a_context_that_runs_out_of_memory_is_not_made(void **state)
{
    (void)state;
    for (int nth = 1;; nth++) {
        flash_attn_options  options = {.num_threads = 4};
        flash_attn_context *context = NULL;
        long                before  = atomic_load(&live);
        atomic_store(&failed, false);
        atomic_store(&countdown, nth);
        flash_attn_status status = flash_attn_create(&context, &options);
        atomic_store(&countdown, 0);
        bool last = !atomic_load(&failed);
        expect_status(status, last ? FLASH_ATTN_OK : FLASH_ATTN_NO_MEMORY, "create");
        if (last)
            flash_attn_destroy(context);
        else
            assert_null(context);
        assert_true(atomic_load(&live) == before);
        if (last)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_context_that_runs_out_of_memory_is_not_made),
        cmocka_unit_test(calls_that_run_out_of_memory_say_so_and_do_nothing),
        cmocka_unit_test(the_reference_that_runs_out_of_memory_says_so_and_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
