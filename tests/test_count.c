/* The work that explain counts: exactly the pairs that the mask shows, without walking where it can be known. */
#include "check.h"
#include "harness.h"

static uint64_t random_state = 7;

typedef struct random_problem {
    flash_attn_problem p;
    int32_t            cu_q[4], cu_k[4], used_q[3], used_k[3], pad[3], offsets[4];
    flash_attn_slice   slices[9];
} random_problem;

static void randomise(random_problem *r)
{
    *r                         = (random_problem){0};
    flash_attn_problem *p      = &r->p;
    int                 varlen = random_int(&random_state, 0, 1), sq = random_int(&random_state, 0, 30), sk = random_int(&random_state, 0, 30);
    int                 rows_q[3], rows_k[3];
    for (int b = 0; b < 3; b++) {
        rows_q[b]      = varlen ? random_int(&random_state, 0, 20) : sq;
        rows_k[b]      = varlen ? random_int(&random_state, 0, 20) : sk;
        r->cu_q[b + 1] = r->cu_q[b] + rows_q[b];
        r->cu_k[b + 1] = r->cu_k[b] + rows_k[b];
        r->used_q[b]   = random_int(&random_state, 0, rows_q[b]);
        r->used_k[b]   = random_int(&random_state, 0, rows_k[b]);
        r->pad[b]      = random_int(&random_state, 0, random_int(&random_state, 0, r->used_k[b]));
    }
    p->q = (flash_attn_tensor){.shape = {varlen ? 1 : 3, varlen ? r->cu_q[3] : sq, 4, 8}};
    p->k = (flash_attn_tensor){.shape = {varlen ? 1 : 3, varlen ? r->cu_k[3] : sk, 2, 8}};
    p->v = (flash_attn_tensor){.shape = {varlen ? 1 : 3, varlen ? r->cu_k[3] : sk, 2, 5}};
    if (varlen) {
        p->cu_seqlens_q = r->cu_q;
        p->cu_seqlens_k = r->cu_k;
        p->batch        = 3;
    }
    p->seqused_q = random_int(&random_state, 0, 1) ? r->used_q : NULL;
    p->seqused_k = random_int(&random_state, 0, 1) ? r->used_k : NULL;
    p->leftpad_k = p->seqused_k && random_int(&random_state, 0, 1) ? r->pad : NULL;
    p->mask      = (flash_attn_mask)random_int(&random_state, 0, 2);
    if (p->mask == FLASH_ATTN_WINDOW) {
        p->window_left  = random_int(&random_state, -1, 12);
        p->window_right = random_int(&random_state, -1, 12);
    }
    p->slices.count = random_int(&random_state, 0, 2) ? 0 : 9;
    for (int n = 0; n < 9; n++) {
        int end_q = (int)p->q.shape[1], end_k = (int)p->k.shape[1];
        r->slices[n].q_begin = random_int(&random_state, 0, end_q);
        r->slices[n].q_end   = random_int(&random_state, r->slices[n].q_begin, end_q);
        r->slices[n].k_begin = random_int(&random_state, 0, end_k);
        r->slices[n].k_end   = random_int(&random_state, r->slices[n].k_begin, end_k);
        r->slices[n].kind    = random_int(&random_state, 0, 3);
    }
    memcpy(r->offsets, (int32_t[]){0, 3, 5, 9}, sizeof r->offsets);
    if (p->slices.count) {
        p->slices.list    = r->slices;
        p->slices.offsets = random_int(&random_state, 0, 1) ? r->offsets : NULL;
    }
}

static void flops_count_exactly_the_visible_pairs(void **state)
{
    (void)state;
    int with_pairs = 0;
    for (int n = 0; n < 3000; n++) {
        random_problem         r;
        fa_call                call;
        flash_attn_explanation forward, backward;
        double                 pairs = 0;
        randomise(&r);
        expect_ok(fa_normalise(&r.p, NULL, FLASH_ATTN_FORWARD, FA_PLAN_LENGTHS, &call));
        for (int64_t b = 0; b < call.batch; b++) {
            fa_sequence s = fa_sequence_at(&call, b);
            for (int i = 0; i < s.rows_q; i++)
                for (int j = 0; j < s.rows_k; j++)
                    pairs += 4 * fa_sees(&call, &s, b, i, j);
        }
        expect_ok(flash_attn_explain(NULL, &r.p, FLASH_ATTN_FORWARD, &forward));
        expect_ok(flash_attn_explain(NULL, &r.p, FLASH_ATTN_BACKWARD, &backward));
        assert_true(forward.flops == 2 * pairs * (8 + 5));
        assert_true(backward.flops == 2 * pairs * (3 * 8 + 2 * 5));
        with_pairs += pairs > 0;
    }
    assert_true(with_pairs > 1000);
}

static void long_sequences_are_counted_without_walking(void **state)
{
    (void)state;
    double                 n = 1 << 28;
    flash_attn_problem     p = {.mask = FLASH_ATTN_CAUSAL};
    flash_attn_explanation e;
    p.q = p.k = p.v = (flash_attn_tensor){.shape = {1, 1 << 28, 1, 64}};
    expect_ok(flash_attn_explain(NULL, &p, FLASH_ATTN_FORWARD, &e));
    assert_true(fabs(e.flops / (4 * 64 * (n * (n + 1) / 2)) - 1) < 1e-12);
    assert_true(e.bytes == 4 * 64 * n * 4);
}

/* More sequences than could be looked at one by one in the time of a test. */
static void sequences_that_are_alike_are_counted_once(void **state)
{
    (void)state;
    for (int pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
        flash_attn_slice slice = {.q_end = 3, .k_end = 2};
        for (int slices = 0; slices <= 1; slices++) {
            flash_attn_explanation one, all;
            flash_attn_problem     p = {.mask = FLASH_ATTN_CAUSAL, .slices = {.list = &slice, .count = slices}};
            p.q = p.k = p.v = (flash_attn_tensor){.shape = {1, 5, 1, 4}};
            expect_ok(flash_attn_explain(NULL, &p, (flash_attn_pass)pass, &one));
            p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = INT32_MAX;
            expect_ok(flash_attn_explain(NULL, &p, (flash_attn_pass)pass, &all));
            assert_true(one.flops > 0 && all.flops == one.flops * INT32_MAX);
            assert_true(all.bytes == one.bytes * INT32_MAX);
            assert_true(one.num_tasks > 0 && all.num_tasks == one.num_tasks * INT32_MAX);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flops_count_exactly_the_visible_pairs),
        cmocka_unit_test(long_sequences_are_counted_without_walking),
        cmocka_unit_test(sequences_that_are_alike_are_counted_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
