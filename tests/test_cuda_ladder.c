/* Every rung of the ladder against the reference on a GPU; skipped, with the reason, where there is none. Rungs that the GPU is
 * too old or too new for are told as skipped. */
#include "case_gpu.h"
#include "cuda/ladder.h"
#include "harness.h"

static const case_memory *memory;
static char               no_gpu[200];

/* Whole tiles, tails of both kinds, queries that see nothing, few keys, a key head for several query heads. */
static const test_case shapes[] = {
    {.group = "ladder", .name = "whole tiles", .seqlen_q = 384, .seqlen_k = 512, .heads_q = 2},
    {.group = "ladder", .name = "tails", .batch = 2, .seqlen_q = 333, .seqlen_k = 333, .heads_q = 4, .heads_k = 2},
    {.group = "ladder", .name = "fewer queries", .batch = 2, .seqlen_q = 77, .seqlen_k = 450, .heads_q = 2},
    {.group = "ladder", .name = "fewer keys", .batch = 2, .seqlen_q = 300, .seqlen_k = 101, .heads_q = 2},
    {.group = "ladder", .name = "one of each", .seqlen_q = 1, .seqlen_k = 1},
    {.group = "ladder", .name = "large logits", .seqlen_q = 200, .seqlen_k = 200, .logit_size = 30.0f},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void run_shape(flash_attn_context *context, const char *rung, test_case shape, flash_attn_dtype dtype, tally *total)
{
    char           why[300];
    case_instance *instance = case_build(&shape, dtype, 0, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape.name, why);
    case_device device = {.context = context, .device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
    case_result result = case_run(instance, &device);
    case_free(instance);
    total->passed += result.verdict == CASE_PASSED;
    total->failed += result.verdict == CASE_FAILED;
    total->skipped += result.verdict == CASE_SKIPPED;
    if (result.verdict == CASE_FAILED)
        printf("  FAILED %s, %s, head_dim %d, %s, %s: %s\n", rung, shape.name, shape.head_dim,
               shape.mask == FLASH_ATTN_CAUSAL ? "causal" : "full", dtype_name(dtype), result.reason);
}

static void every_rung_is_right(void **state)
{
    (void)state;
    int failed = 0;
    if (!memory) {
        print_message("skipped: %s\n", no_gpu);
        skip();
    }
    for (int g = 0; g < fa_num_rungs; g++) {
        flash_attn_context *context;
        tally               total   = {0};
        flash_attn_options  options = {.kernel = fa_rungs[g].name};
        assert_int_equal(flash_attn_create(&context, &options), FLASH_ATTN_OK);
        for (int n = 0; n < NUM_SHAPES; n++)
            for (int way = 0; way < 4; way++) {
                test_case shape = shapes[n];
                shape.head_dim  = way % 2 ? 128 : 64;
                shape.mask      = way / 2 ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
                run_shape(context, fa_rungs[g].name, shape, FLASH_ATTN_BF16, &total);
                if (n == 1)
                    run_shape(context, fa_rungs[g].name, shape, FLASH_ATTN_F16, &total);
            }
        flash_attn_destroy(context);
        printf("%-6s %3d passed %3d failed %3d skipped\n", fa_rungs[g].name, total.passed, total.failed, total.skipped);
        fflush(stdout);
        failed += total.failed;
    }
    assert_int_equal(failed, 0);
}

int main(void)
{
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_rung_is_right)};
    return cmocka_run_group_tests_name("cuda_ladder", tests, NULL, NULL);
}
