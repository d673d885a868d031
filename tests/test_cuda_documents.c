/* Slices that show documents beside each other become packed sequences, whose rows are counted across the entries of the tensors (decision 0102). */
#include "call.h"
#include "case_gpu.h"
#include "check.h"
#include "harness.h"

#include <stdio.h>
#include <string.h>

static const case_memory *memory;
static char               why_not[300];
static int                part, parts = 1; /* of the shapes */

/* ---- what becomes what ---- */

#define CAUSAL FLASH_ATTN_SLICE_CAUSAL
#define FULL FLASH_ATTN_SLICE_FULL

typedef struct documents {
    int              count;
    flash_attn_slice list[4];
} documents;

/* Two entries of 1000 queries on 1100 keys. */
static flash_attn_problem problem_of(const documents *d)
{
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .slices = {.list = d->list, .count = d->count}};
    p.q = (flash_attn_tensor){.dtype = FLASH_ATTN_BF16, .shape = {2, 1000, 4, 64}};
    p.k = p.v = (flash_attn_tensor){.dtype = FLASH_ATTN_BF16, .shape = {2, 1100, 2, 64}};
    return p;
}

/* From call_of on the list is the call's. */
static fa_call call_of(const flash_attn_problem *p)
{
    fa_call call;
    expect_ok(fa_normalise(p, NULL, FLASH_ATTN_FORWARD, FA_PLAN, &call));
    return call;
}

static void documents_become_packed_sequences(void **state)
{
    (void)state;
    static const struct {
        documents of;
        int       count;
        int32_t   ends[2][16]; /* of q, of k, without the 0 */
        int64_t   longest_q, longest_k;
    } all[] = {
        {{2, {{0, 400, 0, 500, CAUSAL}, {400, 1000, 500, 1100, CAUSAL}}}, 4, {{400, 1000, 1400, 2000}, {500, 1100, 1600, 2200}}, 600, 600},
        {{2, {{0, 300, 0, 300, FULL}, {700, 1000, 300, 1100, FULL}}}, 6, {{300, 700, 1000, 1300, 1700, 2000}, {300, 300, 1100, 1400, 1400, 2200}}, 400, 800},
        {{1, {{10, 990, 20, 1000, CAUSAL}}}, 10, {{0, 10, 990, 990, 1000, 1000, 1010, 1990, 1990, 2000}, {20, 20, 1000, 1100, 1100, 1120, 1120, 2100, 2200, 2200}}, 980, 980},
        {{3, {{0, 500, 0, 500, CAUSAL}, {500, 500, 600, 700, CAUSAL}, {500, 1000, 700, 1100, CAUSAL}}}, 6, {{500, 500, 1000, 1500, 1500, 2000}, {500, 700, 1100, 1600, 1800, 2200}}, 500, 500}};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
        flash_attn_problem p    = problem_of(&all[n].of);
        fa_call            call = call_of(&p), packed;
        int32_t            got[2 * 17];
        assert_true(fa_documents_pack(&call, 256, &packed));
        assert_int_equal(packed.batch, all[n].count);
        assert_int_equal(packed.slices.count, 0);
        assert_int_equal(packed.max_seqlen_q, all[n].longest_q);
        assert_int_equal(packed.max_seqlen_k, all[n].longest_k);
        assert_int_equal(packed.window.right, all[n].of.list[0].kind == CAUSAL ? 0 : FA_UNLIMITED);
        assert_true(packed.cu_seqlens_q && packed.cu_seqlens_k);
        assert_int_equal(fa_documents_bytes(&packed), 2 * (all[n].count + 1) * (int)sizeof(int32_t));
        fa_documents_fill(&packed, got);
        for (int side = 0; side < 2; side++) {
            const int32_t *of = got + side * (all[n].count + 1);
            assert_int_equal(of[0], 0);
            assert_memory_equal(of + 1, all[n].ends[side], (size_t)all[n].count * sizeof *of);
        }
    }
}

static void a_document_that_is_all_needs_no_lengths(void **state)
{
    (void)state;
    static const documents all = {1, {{0, 1000, 0, 1100, CAUSAL}}};
    flash_attn_problem p    = problem_of(&all);
    fa_call            call = call_of(&p), packed;
    assert_true(fa_documents_pack(&call, 256, &packed));
    assert_int_equal(packed.batch, 2);
    assert_int_equal(packed.slices.count, 0);
    assert_null(packed.cu_seqlens_q);
    assert_int_equal(packed.window.right, 0);
    assert_int_equal(fa_documents_bytes(&packed), 0);
}

/* FlashAttention-3's attention_chunk of 512, causal: full slices and a mask, whose diagonal stays. */
static void chunks_become_packed_sequences(void **state)
{
    (void)state;
    static const documents chunks = {3, {{0, 412, 0, 512, FULL}, {412, 924, 512, 1024, FULL}, {924, 1000, 1024, 1100, FULL}}};
    flash_attn_problem     p      = problem_of(&chunks);
    int32_t                got[14];
    p.mask       = FLASH_ATTN_CAUSAL;
    fa_call call = call_of(&p), packed;
    assert_true(fa_documents_pack(&call, 256, &packed));
    assert_int_equal(packed.batch, 6);
    assert_int_equal(packed.window.right, 0);
    fa_documents_fill(&packed, got);
    assert_memory_equal(got, ((int32_t[]){0, 412, 924, 1000, 1412, 1924, 2000, 0, 512, 1024, 1100, 1612, 2124, 2200}), sizeof got);
}

/* Each sequence's own; a window and ALiBi, where distances stay. */
static void what_is_said_of_pairs_stays(void **state)
{
    (void)state;
    static const documents   even = {2, {{0, 400, 0, 500, CAUSAL}, {400, 1000, 500, 1100, CAUSAL}}}, own = {3, {{0, 1000, 0, 1100, FULL}, {0, 400, 0, 300, FULL}, {400, 1000, 300, 1100, FULL}}};
    static const int32_t     offsets[] = {0, 1, 3};
    static float             slopes[4];
    flash_attn_problem       p = problem_of(&even);
    p.mask = FLASH_ATTN_WINDOW;
    p.window_left = 300, p.window_right = 20;
    p.alibi_slopes = (flash_attn_tensor){slopes, FLASH_ATTN_F32, 0, {1, 4, 1, 1}, {0}};
    fa_call call = call_of(&p), packed;
    assert_true(fa_documents_pack(&call, 256, &packed));
    assert_int_equal(packed.window.left, 300);
    assert_int_equal(packed.window.right, 0);
    p                = problem_of(&own);
    p.slices.offsets = offsets;
    call             = call_of(&p);
    int32_t got[8];
    assert_true(fa_documents_pack(&call, 256, &packed));
    fa_documents_fill(&packed, got);
    assert_memory_equal(got, ((int32_t[]){0, 1000, 1400, 2000, 0, 1100, 1400, 2200}), sizeof got);
}

static void other_masks_keep_their_slices(void **state)
{
    (void)state;
    static const documents   others[] = {
        {2, {{400, 1000, 500, 1100, CAUSAL}, {0, 400, 0, 500, CAUSAL}}},                                /* not in order */
        {2, {{0, 400, 0, 500, CAUSAL}, {400, 1000, 400, 1100, CAUSAL}}},                                /* some keys twice */
        {2, {{0, 400, 0, 500, CAUSAL}, {300, 1000, 500, 1100, CAUSAL}}},                                /* some queries twice */
        {2, {{0, 400, 0, 500, CAUSAL}, {400, 1000, 500, 1100, FULL}}}, {1, {{0, 1000, 0, 1100, FLASH_ATTN_SLICE_INVERSE_CAUSAL}}}, {1, {{0, 1000, 0, 1100, FLASH_ATTN_SLICE_BOTH}}},
        {4, {{0, 250, 0, 250, CAUSAL}, {250, 500, 250, 500, CAUSAL}, {500, 750, 500, 750, CAUSAL}, {750, 1000, 750, 1000, CAUSAL}}}, /* short */
        {1, {{0, 0, 0, 1100, FULL}}},
        {1, {{0, 1000, 0, 1000, FULL}}}}; /* keys behind the last query */
    static const documents   even = {2, {{0, 400, 0, 500, CAUSAL}, {400, 1000, 500, 1100, CAUSAL}}}, odd = {2, {{0, 400, 0, 400, CAUSAL}, {400, 1000, 400, 1100, CAUSAL}}};
    static uint16_t          bias[1];
    static float             slopes[8];
    static const int32_t     used[2];
    fa_call packed;
    for (size_t n = 0; n < sizeof others / sizeof *others; n++) {
        flash_attn_problem p    = problem_of(&others[n]);
        fa_call            call = call_of(&p);
        assert_false(fa_documents_pack(&call, 256, &packed));
    }
    for (int n = 0; n < 7; n++) {
        flash_attn_problem p = problem_of(n < 2 ? &odd : &even);
        if (n == 0) /* the first document's diagonal is another */
            p.mask = FLASH_ATTN_CAUSAL;
        if (n == 1)
            p.alibi_slopes = (flash_attn_tensor){slopes, FLASH_ATTN_F32, 0, {1, 4, 1, 1}, {0}};
        if (n == 2)
            p.alibi_slopes = (flash_attn_tensor){slopes, FLASH_ATTN_F32, 0, {2, 4, 1, 1}, {0}};
        if (n == 3)
            p.bias = (flash_attn_tensor){bias, FLASH_ATTN_BF16, 0, {1, 1, 1000, 1100}, {0}};
        if (n == 4)
            p.dropout.p = 0.1f;
        if (n == 5)
            p.seqused_k = used;
        if (n == 6)
            p.num_splits = 3;
        fa_call call = call_of(&p);
        assert_false(fa_documents_pack(&call, 256, &packed));
    }
}

/* ---- against the reference ---- */

#define W FLASH_ATTN_WINDOW

static const test_case shapes[] = {
    {.name = "documents", .batch = 3, .seqlen_q = 700, .seqlen_k = 700, .heads_q = 2, .slices = SLICES_LONG},
    {.name = "heads first, groups, sinks", .batch = 2, .seqlen_q = 620, .seqlen_k = 620, .heads_q = 4, .heads_k = 2, .head_dim = 128, .layout = LAYOUT_HEADS_FIRST, .sinks = true, .slices = SLICES_LONG},
    {.name = "more keys, softcap", .batch = 3, .seqlen_q = 600, .seqlen_k = 801, .heads_q = 2, .softcap = 8, .slices = SLICES_LONG},
    {.name = "more queries", .batch = 2, .seqlen_q = 700, .seqlen_k = 333, .heads_q = 1, .head_dim = 256, .slices = SLICES_LONG},
    {.name = "window", .batch = 1, .seqlen_q = 640, .seqlen_k = 640, .heads_q = 2, .mask = W, .window_left = 200, .window_right = 20, .slices = SLICES_LONG},
    {.name = "ALiBi", .batch = 1, .seqlen_q = 640, .seqlen_k = 640, .heads_q = 2, .alibi = true, .slices = SLICES_LONG},
    {.name = "blocks, one array", .batch = 2, .seqlen_q = 520, .seqlen_k = 520, .heads_q = 2, .layout = LAYOUT_PACKED, .slices = SLICES_BLOCKS},
    {.name = "blocks, more keys", .batch = 2, .seqlen_q = 530, .seqlen_k = 700, .heads_q = 2, .heads_k = 1, .slices = SLICES_BLOCKS},
    {.name = "96 and 64 columns", .batch = 2, .seqlen_q = 600, .seqlen_k = 600, .heads_q = 2, .head_dim = 96, .head_dim_v = 64, .slices = SLICES_LONG}};

static int failures_of(test_case shape, flash_attn_dtype dtype, bool deterministic)
{
    char why[300];
    shape.group    = "documents";
    shape.head_dim = shape.head_dim ? shape.head_dim : 64;
    case_instance *instance = case_build(&shape, dtype, CASE_BACKWARD, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape.name, why);
    case_device device = {.device = {.type = FLASH_ATTN_CUDA}, .memory = memory, .deterministic = deterministic};
    case_result result = case_run(instance, &device);
    if (result.verdict != CASE_PASSED)
        printf("  FAILED %s, %s: %s\n", shape.name, dtype_name(dtype), result.reason);
    case_free(instance);
    return result.verdict != CASE_PASSED;
}

static void documents_are_right(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    int failed = 0;
    for (int n = part; n < (int)(sizeof shapes / sizeof *shapes); n += parts) {
        failed += failures_of(shapes[n], n % 4 == 2 ? FLASH_ATTN_F16 : FLASH_ATTN_BF16, n % 3 == 0);
        if (n == 0 || n == 6)
            failed += failures_of(shapes[n], FLASH_ATTN_F32, false);
    }
    assert_int_equal(failed, 0);
}

/* --part N/PARTS: each PARTS-th shape from the N-th on (0 is the first). */
int main(int argc, char **argv)
{
    if (argc != 1 && (argc != 3 || strcmp(argv[1], "--part") != 0 || sscanf(argv[2], "%d/%d", &part, &parts) != 2 || part < 0 || part >= parts)) {
        fprintf(stderr, "usage: test_cuda_documents [--part N/PARTS]\n");
        return 2;
    }
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(documents_become_packed_sequences), cmocka_unit_test(a_document_that_is_all_needs_no_lengths), cmocka_unit_test(chunks_become_packed_sequences), cmocka_unit_test(what_is_said_of_pairs_stays),
        cmocka_unit_test(other_masks_keep_their_slices),     cmocka_unit_test(documents_are_right),
    };
    return cmocka_run_group_tests_name("cuda_documents", tests, NULL, NULL);
}
