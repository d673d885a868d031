/* Promises about bits: the same again and again, at any number of threads, alone or in a batch. On every tier and
 * dtype. */
#include "harness.h"

#include <malloc.h>

static uint64_t hash_of(const flash_attn_tensor *t, uint64_t hash)
{
    flash_attn_tensor copy = copy_of(t);
    const uint8_t    *p    = copy.data;
    for (size_t n = 0; n < (size_t)count_of(t) * dtype_bytes(t->dtype); n++)
        hash = (hash ^ p[n]) * 0x100000001B3u;
    free(copy.data);
    return hash;
}

static uint64_t hash_of_outputs(const fixture *f)
{
    const flash_attn_tensor *const all[] = {&f->p.o,  &f->p.lse,   &f->g.dq,    &f->g.dk,
                                            &f->g.dv, &f->g.dbias, &f->g.dsinks};
    uint64_t                       hash  = 0xCBF29CE484222325u;
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        hash = all[n]->data ? hash_of(all[n], hash) : hash;
    return hash;
}

/* What a new context of so many threads computes. Its memory is fresh, and filled with another byte each time. */
static uint64_t hash_with_new_context(fixture *f, const tier *t, int num_threads, int fill)
{
    flash_attn_options options = {.num_threads = num_threads, .max_isa = t->isa};
    tier               own     = *t;
    mallopt(M_PERTURB, fill);
    expect_status(flash_attn_create(&own.context, &options), FLASH_ATTN_OK, "create");
    fixture_run(f, &own, num_threads);
    flash_attn_destroy(own.context);
    mallopt(M_PERTURB, 0);
    return hash_of_outputs(f);
}

/* GQA with everything that accumulates. */
static void repeat(const tier *t, flash_attn_dtype dtype)
{
    test_case c     = {.batch    = 2,
                       .heads_q  = 4,
                       .heads_k  = 2,
                       .seqlen_q = 70,
                       .seqlen_k = 90,
                       .head_dim = 16,
                       .mask     = FLASH_ATTN_CAUSAL,
                       .bias     = BIAS_ONE_FOR_ALL,
                       .sinks    = true};
    fixture   f     = fixture_make(&c, dtype, 21);
    uint64_t  first = 0;
    for (int n = 0; n < 60; n++) {
        void    *pressure = malloc((size_t)(1 + n % 7) * 10000);
        uint64_t hash     = hash_with_new_context(&f, t, 1 + n % HARNESS_THREADS, 1 + n);
        free(pressure);
        first = n == 0 ? hash : first;
        if (hash != first)
            fail_msg("%s: run %d, %d threads: other bits", t->name, n, 1 + n % HARNESS_THREADS);
    }
    fixture_free(&f);
}

static void gradients_have_the_same_bits_every_time_at_any_thread_count(void **state)
{
    (void)state;
    for_each_tier_and_dtype(repeat);
}

/* The smallest problem that shares work between threads, a thousand times. */
static void a_thousand_small_backwards_have_the_same_bits(void **state)
{
    (void)state;
    test_case c = {.heads_q = 4, .heads_k = 1, .seqlen_q = 33, .seqlen_k = 40, .head_dim = 8};
    for (int m = 0; m < num_tiers(); m++) {
        fixture  f     = fixture_make(&c, FLASH_ATTN_F32, 22);
        uint64_t first = 0;
        for (int n = 0; n < 1000; n++) {
            fixture_run(&f, tier_at(m), HARNESS_THREADS);
            uint64_t hash = hash_of_outputs(&f);
            first         = n == 0 ? hash : first;
            assert_true(hash == first);
        }
        fixture_free(&f);
    }
}

/* Sequence b of a batch is run alone, on views of the same tensors. */
static void batch(const tier *t, flash_attn_dtype dtype)
{
    static const test_case shapes[] = {
        {.batch = 3, .heads_q = 4, .heads_k = 2, .seqlen_q = 60, .seqlen_k = 130, .mask = FLASH_ATTN_CAUSAL},
        {.batch = 5, .heads_q = 2, .seqlen_q = 1, .seqlen_k = 700},
        {.batch = 2, .heads_q = 1, .seqlen_q = 200, .seqlen_k = 33, .head_dim = 40},
        {.batch = 9, .heads_q = 8, .heads_k = 1, .seqlen_q = 3, .seqlen_k = 300, .sinks = true},
    };
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        fixture f = fixture_make(&shapes[n], dtype, 23), alone = fixture_make(&shapes[n], dtype, 23);
        fixture_run(&f, t, 3);
        flash_attn_problem p = alone.p;
        flash_attn_grads   g = alone.g;
        for (int64_t b = 0; b < shapes[n].batch; b++) {
            alone.p.q    = slice_of(p.q, 0, b, b + 1);
            alone.p.k    = slice_of(p.k, 0, b, b + 1);
            alone.p.v    = slice_of(p.v, 0, b, b + 1);
            alone.p.o    = slice_of(p.o, 0, b, b + 1);
            alone.p.lse  = slice_of(p.lse, 0, b, b + 1);
            alone.g.dout = slice_of(g.dout, 0, b, b + 1);
            alone.g.dq   = slice_of(g.dq, 0, b, b + 1);
            alone.g.dk   = slice_of(g.dk, 0, b, b + 1);
            alone.g.dv   = slice_of(g.dv, 0, b, b + 1);
            fixture_run(&alone, t, 2);
        }
        expect_same_bits(&f.p.o, &p.o, "o");
        expect_same_bits(&f.p.lse, &p.lse, "lse");
        expect_same_bits(&f.g.dq, &g.dq, "dq");
        expect_same_bits(&f.g.dk, &g.dk, "dk");
        expect_same_bits(&f.g.dv, &g.dv, "dv");
        fixture_free(&f);
        fixture_free(&alone);
    }
}

static void a_sequence_has_the_same_bits_alone_and_in_a_batch(void **state)
{
    (void)state;
    for_each_tier_and_dtype(batch);
}

/* Sequence b of a varlen problem against the same rows as a batch of one. */
static void varlen(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.batch    = 5,
                   .heads_q  = 4,
                   .heads_k  = 2,
                   .seqlen_q = 90,
                   .seqlen_k = 140,
                   .varlen_q = LENGTHS_MIXED,
                   .varlen_k = LENGTHS_MIXED,
                   .mask     = FLASH_ATTN_CAUSAL};
    fixture   f = fixture_make(&c, dtype, 24), alone = fixture_make(&c, dtype, 24);
    fixture_run(&f, t, 3);
    flash_attn_problem p = alone.p;
    flash_attn_grads   g = alone.g;
    alone.p.cu_seqlens_q = alone.p.cu_seqlens_k = NULL;
    alone.p.batch = alone.p.max_seqlen_q = alone.p.max_seqlen_k = 0;
    for (int b = 0; b < c.batch; b++) {
        int64_t q0 = p.cu_seqlens_q[b], q1 = p.cu_seqlens_q[b + 1], k0 = p.cu_seqlens_k[b], k1 = p.cu_seqlens_k[b + 1];
        alone.p.q    = slice_of(p.q, 1, q0, q1);
        alone.p.k    = slice_of(p.k, 1, k0, k1);
        alone.p.v    = slice_of(p.v, 1, k0, k1);
        alone.p.o    = slice_of(p.o, 1, q0, q1);
        alone.p.lse  = slice_of(p.lse, 2, q0, q1);
        alone.g.dout = slice_of(g.dout, 1, q0, q1);
        alone.g.dq   = slice_of(g.dq, 1, q0, q1);
        alone.g.dk   = slice_of(g.dk, 1, k0, k1);
        alone.g.dv   = slice_of(g.dv, 1, k0, k1);
        fixture_run(&alone, t, 2);
    }
    expect_same_bits(&f.p.o, &p.o, "o");
    expect_same_bits(&f.p.lse, &p.lse, "lse");
    expect_same_bits(&f.g.dq, &g.dq, "dq");
    expect_same_bits(&f.g.dk, &g.dk, "dk");
    expect_same_bits(&f.g.dv, &g.dv, "dv");
    fixture_free(&f);
    fixture_free(&alone);
}

static void a_sequence_has_the_same_bits_alone_and_in_varlen(void **state)
{
    (void)state;
    for_each_tier_and_dtype(varlen);
}

/* How the work is cut depends on the context's threads: long enough for several blocks of queries and tiles of keys.
 * NaN in a value and in a query: what is left out of packed memory must not depend on who packs. */
static void cut(const tier *t, flash_attn_dtype dtype)
{
    static const test_case shapes[] = {
        {.heads_q = 2, .seqlen_q = 700, .seqlen_k = 1100, .head_dim = 16, .mask = FLASH_ATTN_CAUSAL},
        {.batch    = 4,
         .heads_q  = 4,
         .heads_k  = 2,
         .seqlen_q = 400,
         .seqlen_k = 600,
         .head_dim = 16,
         .varlen_q = LENGTHS_MIXED,
         .varlen_k = LENGTHS_MIXED},
        {.heads_q  = 22,
         .heads_k  = 11,
         .seqlen_q = 1,
         .seqlen_k = 900,
         .head_dim = 64}, /* heads take turns, 8 at most */
    };
    static const int threads[] = {1, 2, 5, 16};
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        fixture  f     = fixture_make(&shapes[n], dtype, 25);
        uint64_t first = 0;
        set(&f.p.v, 0, f.p.v.shape[1] / 2, 0, 3, NAN);
        set(&f.p.q, 0, f.p.q.shape[1] / 3, 0, 5, NAN);
        for (size_t m = 0; m < sizeof threads / sizeof threads[0]; m++) {
            uint64_t hash = hash_with_new_context(&f, t, threads[m], 1 + (int)m);
            first         = m == 0 ? hash : first;
            if (hash != first)
                fail_msg("%s: shape %zu, a context of %d threads: other bits", t->name, n, threads[m]);
        }
        fixture_free(&f);
    }
}

static void contexts_of_any_size_give_the_same_bits(void **state)
{
    (void)state;
    for_each_tier_and_dtype(cut);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_have_the_same_bits_every_time_at_any_thread_count),
        cmocka_unit_test(a_thousand_small_backwards_have_the_same_bits),
        cmocka_unit_test(a_sequence_has_the_same_bits_alone_and_in_a_batch),
        cmocka_unit_test(a_sequence_has_the_same_bits_alone_and_in_varlen),
        cmocka_unit_test(contexts_of_any_size_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
