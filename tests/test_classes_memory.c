/* Promises about memory: offsets beyond 2^31 elements, many heads, workspaces, overlaps, views. */
#include "harness.h"

#include <sys/mman.h>

static bool one_dtype; /* with --one-dtype, for sanitizers: less of what takes most of their time, each place says of what */

/* ---- far apart ---- */

/* Zeroed memory of which only touched pages exist. */
static char *sparse(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

typedef struct spread {
    char  *base;
    size_t bytes;
} spread;

/* A copy of t with the given strides; false if the machine does not give so much address space. */
static bool spread_out(flash_attn_tensor *t, const int64_t stride[4], spread *memory)
{
    flash_attn_tensor far  = *t;
    int64_t           last = 0;
    memcpy(far.stride, stride, sizeof far.stride);
    for (int n = 0; n < 4; n++)
        last += (t->shape[n] - 1) * stride[n];
    memory->bytes = (size_t)(last + 1) * dtype_bytes(t->dtype);
    memory->base  = sparse(memory->bytes);
    if (!memory->base)
        return false;
    far.data = memory->base;
    for (int64_t a = 0; a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t c = 0; c < t->shape[2]; c++)
                for (int64_t d = 0; d < t->shape[3]; d++)
                    memcpy(element(&far, a, b, c, d), element(t, a, b, c, d), dtype_bytes(t->dtype));
    *t = far;
    return true;
}

/* Every tensor spread so that its last element lies beyond 2^31 elements along dimension `wide`. */
static bool expect_far_is_right(const tier *t, flash_attn_dtype dtype, int wide)
{
    test_case c = {.batch = 3, .heads_q = 3, .seqlen_q = 20, .seqlen_k = 24, .head_dim = 16, .mask = FLASH_ATTN_CAUSAL};
    fixture   near = fixture_make(&c, dtype, 31), far = fixture_make(&c, dtype, 31);
    flash_attn_tensor *const all[]     = {&far.p.q,    &far.p.k,  &far.p.v,  &far.p.o, &far.p.lse,
                                          &far.g.dout, &far.g.dq, &far.g.dk, &far.g.dv};
    spread                   memory[9] = {{0}};
    bool                     ok        = true;
    for (int n = 0; ok && n < 9; n++) {
        int64_t stride[4];
        memcpy(stride, all[n]->stride, sizeof stride);
        if (all[n]->shape[wide] < 2)
            continue;
        stride[wide] = ((int64_t)1 << 31) / (all[n]->shape[wide] - 1) + 4099;
        ok           = spread_out(all[n], stride, &memory[n]);
    }
    if (ok) {
        fixture_run(&near, t, 2);
        fixture_run(&far, t, 2);
        expect_same_bits(&near.p.o, &far.p.o, "o");
        expect_same_bits(&near.p.lse, &far.p.lse, "lse");
        expect_same_bits(&near.g.dq, &far.g.dq, "dq");
        expect_same_bits(&near.g.dk, &far.g.dk, "dk");
        expect_same_bits(&near.g.dv, &far.g.dv, "dv");
    }
    for (int n = 0; n < 9; n++)
        if (memory[n].base)
            munmap(memory[n].base, memory[n].bytes);
    fixture_free(&near);
    fixture_free(&far);
    return ok;
}

static void offsets_beyond_2_31_elements_are_right(void **state)
{
    (void)state;
    for (int n = 0; n < num_tiers(); n++)
        for (int wide = 0; wide < 3; wide++)
            for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++)
                if (!expect_far_is_right(tier_at(n), (flash_attn_dtype)dtype, wide))
                    skip();
}

/* Page number times page stride beyond 2^31. */
static void pages_beyond_2_31_elements_are_right(void **state)
{
    (void)state;
    test_case c = {.batch     = 2,
                   .heads_q   = 4,
                   .heads_k   = 2,
                   .seqlen_q  = 3,
                   .seqlen_k  = 90,
                   .page_size = 16,
                   .seqused_k = LENGTHS_MIXED};
    for (int n = 0; n < num_tiers(); n++) {
        fixture near = fixture_make(&c, FLASH_ATTN_BF16, 32), far = fixture_make(&c, FLASH_ATTN_BF16, 32);
        spread  k = {0}, v = {0};
        int64_t stride[4];
        memcpy(stride, far.p.k.stride, sizeof stride);
        stride[0] = ((int64_t)1 << 31) / (far.p.k.shape[0] - 1) + 4099;
        if (!spread_out(&far.p.k, stride, &k) || !spread_out(&far.p.v, stride, &v))
            skip();
        fixture_run(&near, tier_at(n), 2);
        fixture_run(&far, tier_at(n), 2);
        expect_same_bits(&near.p.o, &far.p.o, "o");
        munmap(k.base, k.bytes);
        munmap(v.base, v.bytes);
        fixture_free(&near);
        fixture_free(&far);
    }
}

/* One key each: o is v, dv is dO, whatever the grid. */
static void more_than_65535_heads_of_batch_are_right(void **state)
{
    (void)state;
    test_case c = {.batch = 35000, .heads_q = 2, .heads_k = 2, .seqlen_q = 1, .seqlen_k = 1, .head_dim = 4};
    for (int n = 0; n < num_tiers(); n += one_dtype && num_tiers() > 1 ? num_tiers() - 1 : 1) { /* the first and the last: how heads are dealt out is no matter of tiers */
        fixture f = fixture_make(&c, FLASH_ATTN_F32, 33);
        fixture_run(&f, tier_at(n), 2);
        expect_close(&f.p.o, &f.p.v, 1e-6, "o");
        expect_close(&f.g.dv, &f.g.dout, 5e-6, "dv"); /* P = exp(s - LSE) has the rounding of LSE */
        fixture_free(&f);
    }
}

/* ---- workspaces ---- */

enum { GUARD = 512 };

/* A workspace of `bytes` at an address that is off by `shift`, guarded on both sides. */
static bool run_in_workspace(const tier *t, fixture *f, flash_attn_pass pass, size_t bytes, int shift, bool too_small)
{
    unsigned char *memory = malloc(bytes + 2 * GUARD + 64);
    assert_non_null(memory);
    memset(memory, 0xA5, bytes + 2 * GUARD + 64);
    flash_attn_exec   exec   = {.workspace = memory + GUARD + shift, .workspace_bytes = bytes, .num_threads = 2};
    flash_attn_status status = pass == FLASH_ATTN_FORWARD ? flash_attn_forward(t->context, &f->p, &exec)
                                                          : flash_attn_backward(t->context, &f->p, &f->g, &exec);
    expect_status(status, too_small ? FLASH_ATTN_NO_MEMORY : FLASH_ATTN_OK, "with a workspace");
    bool clean = true;
    for (size_t n = 0; n < bytes + 2 * GUARD + 64; n++)
        if (memory[n] != 0xA5 && (too_small || n < (size_t)(GUARD + shift) || n >= GUARD + (size_t)shift + bytes))
            clean = false;
    free(memory);
    return clean;
}

static void workspaces(const tier *t, flash_attn_dtype dtype)
{
    static const test_case shapes[] = {
        {.batch = 2, .heads_q = 4, .heads_k = 2, .seqlen_q = 70, .seqlen_k = 150, .mask = FLASH_ATTN_CAUSAL},
        {.heads_q = 4, .heads_k = 1, .seqlen_q = 1, .seqlen_k = 900, .num_splits = 5},
    };
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        fixture f = fixture_make(&shapes[n], dtype, 34), g = fixture_make(&shapes[n], dtype, 34);
        fixture_run(&f, t, 2);
        for (int pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
            size_t bytes = 0;
            expect_status(flash_attn_workspace_size(t->context, &f.p, (flash_attn_pass)pass, &bytes), FLASH_ATTN_OK,
                          "size");
            for (int shift = 0; shift < 4; shift++)
                assert_true(run_in_workspace(t, &g, (flash_attn_pass)pass, bytes, shift * 13, false));
            if (bytes > 0) {
                flash_attn_tensor o = copy_of(&g.p.o), dq = copy_of(&g.g.dq);
                assert_true(run_in_workspace(t, &g, (flash_attn_pass)pass, bytes - 1, 0, true));
                expect_same_bits(&o, &g.p.o, "o of a refused call");
                expect_same_bits(&dq, &g.g.dq, "dq of a refused call");
                free(o.data);
                free(dq.data);
            }
        }
        expect_same_bits(&f.p.o, &g.p.o, "o");
        expect_same_bits(&f.g.dq, &g.g.dq, "dq");
        expect_same_bits(&f.g.dk, &g.g.dk, "dk");
        expect_same_bits(&f.g.dv, &g.g.dv, "dv");
        fixture_free(&f);
        fixture_free(&g);
    }
}

static void a_workspace_of_the_size_asked_for_suffices_and_one_byte_less_is_refused(void **state)
{
    (void)state;
    for_each_tier_and_dtype(workspaces);
}

/* dbias may ask for other kernels, and the size was asked for with it. */
static void workspaces_without_dbias(const tier *t, flash_attn_dtype dtype)
{
    if (one_dtype && (int)t->isa % 3 != (int)dtype)
        return;
    static const test_case biased = {.heads_q = 2, .heads_k = 2, .seqlen_q = 400, .seqlen_k = 500, .bias = BIAS_F32};
    fixture                f      = fixture_make(&biased, dtype, 35);
    size_t                 bytes  = 0;
    expect_status(flash_attn_workspace_size(t->context, &f.p, FLASH_ATTN_BACKWARD, &bytes), FLASH_ATTN_OK, "size");
    fixture_run(&f, t, 2);
    f.g.dbias = (flash_attn_tensor){0};
    assert_true(run_in_workspace(t, &f, FLASH_ATTN_BACKWARD, bytes, 0, false));
    fixture_free(&f);
}

static void a_workspace_suffices_for_a_backward_that_leaves_dbias_out(void **state)
{
    (void)state;
    for_each_tier_and_dtype(workspaces_without_dbias);
}

/* ---- overlaps ---- */

/* An output over an input is right, or INVALID with both untouched. */
static void overlaps(const tier *t, flash_attn_dtype dtype)
{
    test_case c = {.seqlen_q = 50, .seqlen_k = 50, .heads_q = 2};
    for (int n = 0; n < 3; n++) {
        fixture f = fixture_make(&c, dtype, 35), g = fixture_make(&c, dtype, 35);
        fixture_run(&f, t, 2);
        void *inputs[3]           = {g.p.q.data, g.p.k.data, g.p.v.data};
        g.p.o.data                = inputs[n];
        flash_attn_tensor *over   = n == 0 ? &g.p.q : n == 1 ? &g.p.k : &g.p.v;
        flash_attn_tensor  before = copy_of(over);
        flash_attn_status  status = flash_attn_forward(t->context, &g.p, NULL);
        if (status == FLASH_ATTN_OK) {
            expect_same_bits(&f.p.o, &g.p.o, "o over an input");
        } else {
            expect_status(status, FLASH_ATTN_INVALID, "o over an input");
            expect_same_bits(&before, over, "an input of a refused call");
        }
        free(before.data);
        fixture_free(&f);
        fixture_free(&g);
    }
}

static void an_output_over_an_input_is_right_or_refused(void **state)
{
    (void)state;
    for_each_tier_and_dtype(overlaps);
}

static void outputs_that_overlap_one_another_are_refused(void **state)
{
    (void)state;
    test_case c = {.seqlen_q = 50, .seqlen_k = 50, .heads_q = 2};
    fixture   f = fixture_make(&c, FLASH_ATTN_F32, 36);
    fixture_run(&f, tier_at(0), 1);
    f.g.dk.data = f.g.dv.data;
    expect_status(flash_attn_backward(NULL, &f.p, &f.g, NULL), FLASH_ATTN_INVALID, "dk over dv");
    f.p.o.stride[1] = 0; /* rows of o over one another */
    expect_status(flash_attn_forward(NULL, &f.p, NULL), FLASH_ATTN_INVALID, "o with stride 0");
    fixture_free(&f);
}

/* ---- views ---- */

/* The answer does not depend on how the tensors lie. */
static void layouts(const tier *t, flash_attn_dtype dtype)
{
    for (int how = LAYOUT_CONTIGUOUS; how <= LAYOUT_REVERSED; how++) {
        if (how == LAYOUT_BROADCAST)
            continue;
        test_case c = {.batch = 2, .heads_q = 2, .seqlen_q = 66, .seqlen_k = 66, .head_dim = 24, .bias = BIAS};
        fixture   f = fixture_make(&c, dtype, 37);
        c.layout    = (layout)how;
        fixture g   = fixture_make(&c, dtype, 37); /* the same random numbers in the same order */
        fixture_run(&f, t, 2);
        fixture_run(&g, t, 2);
        expect_same_bits(&f.p.q, &g.p.q, "q");
        expect_close(&f.p.o, &g.p.o, loose_tolerance(dtype) / 4, "o");
        expect_close(&f.g.dq, &g.g.dq, loose_tolerance(dtype), "dq");
        expect_close(&f.g.dk, &g.g.dk, loose_tolerance(dtype), "dk");
        expect_close(&f.g.dbias, &g.g.dbias, loose_tolerance(dtype), "dbias");
        fixture_free(&f);
        fixture_free(&g);
    }
}

static void views_of_any_layout_give_the_same_answer(void **state)
{
    (void)state;
    for_each_tier_and_dtype(layouts);
}

/* So many pages hold a head's keys that x86's tables of vector instructions pack those of all heads first where they
 * lie side by side. Where nothing is packed there is little to see. */
static void heads_side_by_side(const tier *t, flash_attn_dtype dtype)
{
    if (one_dtype && t->isa != FLASH_ATTN_ISA_AMX_FP16 && (int)t->isa % 3 != (int)dtype) /* the numbers spread them; AVX512_BF16 has BF16 */
        return;
    static const char *packed_first = "all heads, side by side, are packed first";
    bool packs = t->isa == FLASH_ATTN_ISA_AVX2 || t->isa == FLASH_ATTN_ISA_AVX512 || t->isa == FLASH_ATTN_ISA_AVX512_BF16;
    test_case c = {.seqlen_q = packs ? 500 : 100, .seqlen_k = 530, .head_dim = 64, .mask = FLASH_ATTN_CAUSAL};
    c.heads_q   = dtype == FLASH_ATTN_F32 ? 16 : 32; /* a page a key */
    fixture f   = fixture_make(&c, dtype, 38);
    c.layout    = LAYOUT_HEADS_FIRST;
    fixture g   = fixture_make(&c, dtype, 38);
    for (int threads = one_dtype && packs ? 3 : 1; threads <= (packs ? 3 : 1); threads += 2) {
        flash_attn_options     options = {.num_threads = threads, .max_isa = t->isa};
        flash_attn_context    *context;
        flash_attn_explanation side_by_side, apart;
        expect_ok(flash_attn_create(&context, &options));
        expect_ok(flash_attn_explain(context, &f.p, FLASH_ATTN_FORWARD, &side_by_side));
        expect_ok(flash_attn_explain(context, &g.p, FLASH_ATTN_FORWARD, &apart));
        assert_null(strstr(apart.reason, packed_first));
        assert_int_equal(strstr(side_by_side.reason, packed_first) != NULL, packs);
        expect_ok(flash_attn_forward(context, &f.p, NULL));
        expect_ok(flash_attn_forward(context, &g.p, NULL));
        expect_same_bits(&f.p.o, &g.p.o, "o");
        expect_same_bits(&f.p.lse, &g.p.lse, "lse");
        flash_attn_destroy(context);
    }
    fixture_free(&f);
    fixture_free(&g);
}

static void heads_side_by_side_have_the_bits_of_heads_apart(void **state)
{
    (void)state;
    for_each_tier_and_dtype(heads_side_by_side);
}

int main(int argc, char **argv)
{
    one_dtype = argc > 1 && strcmp(argv[1], "--one-dtype") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offsets_beyond_2_31_elements_are_right),
        cmocka_unit_test(pages_beyond_2_31_elements_are_right),
        cmocka_unit_test(more_than_65535_heads_of_batch_are_right),
        cmocka_unit_test(a_workspace_of_the_size_asked_for_suffices_and_one_byte_less_is_refused),
        cmocka_unit_test(a_workspace_suffices_for_a_backward_that_leaves_dbias_out),
        cmocka_unit_test(an_output_over_an_input_is_right_or_refused),
        cmocka_unit_test(outputs_that_overlap_one_another_are_refused),
        cmocka_unit_test(views_of_any_layout_give_the_same_answer),
        cmocka_unit_test(heads_side_by_side_have_the_bits_of_heads_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
