/*
 * The same call gives the same bits on a GPU, a thousand times, the deterministic backward too; skipped, with the reason,
 * where there is none. Outputs and workspace hold 0xFF before each call, so that nothing of the call before can help.
 */
#include "case_gpu.h"
#include "harness.h"

#include <string.h>

enum { ROUNDS = 1000, ROW_OF_BIAS = 704 };
enum { PLAIN, PACKED, WITH_BIAS, FEW_KEYS /* two tiles of keys, no mask: the second waits for the first one's dQ in each step */ };

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];

enum { IN_Q, IN_K, IN_V, IN_DOUT, OUT_O, OUT_LSE, OUT_DQ, OUT_DK, OUT_DV, OUT_DBIAS, IN_LENGTHS, IN_BIAS, NUM_ARRAYS };

typedef struct both_passes {
    flash_attn_problem problem;
    flash_attn_grads   grads;
    flash_attn_exec    exec[2]; /* of the forward and of the backward */
    void              *at[NUM_ARRAYS];
    size_t             bytes[NUM_ARRAYS];
} both_passes;

static void *room_for(size_t bytes)
{
    void *room = gpu->alloc(bytes);
    assert_non_null(room);
    return room;
}

/* bfloat16 of either sign and size 0.06 to 2. */
static void fill_random(void *device, size_t bytes, uint32_t state)
{
    uint16_t *host = malloc(bytes);
    assert_non_null(host);
    for (size_t i = 0; i < bytes / 2; i++) {
        state      = state * 1664525u + 1013904223u;
        uint32_t r = state >> 8;
        host[i]    = (uint16_t)((r & 1) << 15 | (123 + (r >> 1) % 5) << 7 | (r >> 8 & 127));
    }
    assert_true(gpu->to_device(device, host, bytes));
    free(host);
}

static both_passes make(int64_t batch, int64_t seqlen, int64_t heads, int64_t heads_k, int64_t d, int what)
{
    both_passes   x        = {0};
    const int64_t seqlen_k = what == FEW_KEYS ? 140 : seqlen;
    size_t        q_bytes = (size_t)(batch * seqlen * heads * d) * 2, k_bytes = (size_t)(batch * seqlen_k * heads_k * d) * 2;
    const size_t  bias_bytes = what == WITH_BIAS ? (size_t)(seqlen * ROW_OF_BIAS) * 2 : 2;
    const size_t  bytes[] = {q_bytes, k_bytes, k_bytes, q_bytes, q_bytes, (size_t)(batch * seqlen * heads) * 4,
                             q_bytes, k_bytes, k_bytes, bias_bytes, sizeof(int32_t[4]), bias_bytes};
    for (int n = 0; n < NUM_ARRAYS; n++) {
        x.bytes[n] = bytes[n];
        x.at[n]    = room_for(bytes[n]);
        if (n <= IN_DOUT || n == IN_BIAS)
            fill_random(x.at[n], bytes[n], (uint32_t)n + 1);
    }
    flash_attn_tensor like = {.dtype = FLASH_ATTN_BF16};
    x.problem = (flash_attn_problem){.device = {.type = FLASH_ATTN_CUDA}, .mask = what == FEW_KEYS ? FLASH_ATTN_NONE : FLASH_ATTN_CAUSAL, .deterministic = true};
    x.problem.q = (flash_attn_tensor){x.at[IN_Q], FLASH_ATTN_BF16, 0, {batch, seqlen, heads, d}, {0}};
    x.problem.k = (flash_attn_tensor){x.at[IN_K], FLASH_ATTN_BF16, 0, {batch, seqlen_k, heads_k, d}, {0}};
    x.problem.v = (flash_attn_tensor){x.at[IN_V], FLASH_ATTN_BF16, 0, {batch, seqlen_k, heads_k, d}, {0}};
    x.problem.o = x.grads.dout = x.grads.dq = x.grads.dk = x.grads.dv = like;
    x.problem.o.data   = x.at[OUT_O];
    x.problem.lse.data = x.at[OUT_LSE];
    x.grads.dout.data  = x.at[IN_DOUT];
    x.grads.dq.data    = x.at[OUT_DQ];
    x.grads.dk.data    = x.at[OUT_DK];
    x.grads.dv.data    = x.at[OUT_DV];
    if (what == WITH_BIAS) { /* one for all, so that all add to the same gradient */
        x.problem.bias     = (flash_attn_tensor){x.at[IN_BIAS], FLASH_ATTN_BF16, 0, {1, 1, seqlen, seqlen}, {0, 0, ROW_OF_BIAS, 1}};
        x.grads.dbias      = x.problem.bias;
        x.grads.dbias.data = x.at[OUT_DBIAS];
    }
    if (what == PACKED) { /* three sequences, the first short */
        const int32_t      ends[] = {0, (int32_t)seqlen / 3, (int32_t)(2 * seqlen), (int32_t)(3 * seqlen)};
        flash_attn_tensor *all[]  = {&x.problem.q, &x.problem.k, &x.problem.v};
        assert_int_equal(batch, 3);
        assert_true(gpu->to_device(x.at[IN_LENGTHS], ends, sizeof ends));
        for (int n = 0; n < 3; n++)
            all[n]->shape[0] = 1, all[n]->shape[1] = 3 * seqlen;
        x.problem.batch        = 3;
        x.problem.cu_seqlens_q = x.problem.cu_seqlens_k = x.at[IN_LENGTHS];
        x.problem.max_seqlen_q = x.problem.max_seqlen_k = (int32_t)(2 * seqlen);
    }
    for (int pass = 0; pass < 2; pass++) {
        flash_attn_exec *exec = &x.exec[pass];
        expect_ok(flash_attn_workspace_size(NULL, &x.problem, pass ? FLASH_ATTN_BACKWARD : FLASH_ATTN_FORWARD,
                                            &exec->workspace_bytes));
        exec->workspace = exec->workspace_bytes ? room_for(exec->workspace_bytes) : NULL;
    }
    return x;
}

static void release(both_passes *x)
{
    for (int n = 0; n < NUM_ARRAYS; n++)
        gpu->free(x->at[n]);
    for (int pass = 0; pass < 2; pass++)
        if (x->exec[pass].workspace)
            gpu->free(x->exec[pass].workspace);
}

static void run(both_passes *x)
{
    for (int n = OUT_O; n <= OUT_DBIAS; n++)
        assert_true(gpu->fill(x->at[n], 0xFF, x->bytes[n]));
    for (int pass = 0; pass < 2; pass++)
        assert_true(!x->exec[pass].workspace || gpu->fill(x->exec[pass].workspace, 0xFF, x->exec[pass].workspace_bytes));
    expect_ok(flash_attn_forward(NULL, &x->problem, &x->exec[0]));
    expect_ok(flash_attn_backward(NULL, &x->problem, &x->grads, &x->exec[1]));
}

static void both_passes_repeat(int64_t batch, int64_t seqlen, int64_t heads, int64_t heads_k, int64_t d, int what)
{
    both_passes    x = make(batch, seqlen, heads, heads_k, d, what);
    unsigned char *first[NUM_ARRAYS], *now = malloc(x.bytes[OUT_O]); /* the largest */
    assert_non_null(now);
    run(&x);
    for (int n = OUT_O; n <= OUT_DBIAS; n++) {
        first[n] = malloc(x.bytes[n]);
        assert_non_null(first[n]);
        assert_true(gpu->to_host(first[n], x.at[n], x.bytes[n]));
    }
    for (int round = 1; round < ROUNDS; round++) {
        run(&x);
        for (int n = OUT_O; n <= OUT_DBIAS; n++) {
            assert_true(gpu->to_host(now, x.at[n], x.bytes[n]));
            if (memcmp(now, first[n], x.bytes[n]) != 0)
                fail_msg("head_dim %d: array %d differs in round %d", (int)d, n, round);
        }
    }
    for (int n = OUT_O; n <= OUT_DBIAS; n++)
        free(first[n]);
    free(now);
    release(&x);
}

static void both_passes_repeat_bit_by_bit_a_thousand_times(void **state)
{
    (void)state;
    if (!memory) {
        print_message("skipped: %s\n", no_gpu);
        skip();
    }
    both_passes_repeat(2, 700, 8, 2, 64, PLAIN);
    both_passes_repeat(3, 500, 4, 4, 128, PACKED);
    both_passes_repeat(2, 700, 8, 8, 128, PLAIN);
    both_passes_repeat(1, 300, 4, 4, 256, PLAIN);
    both_passes_repeat(47, 530, 3, 3, 64, FEW_KEYS);
    both_passes_repeat(47, 530, 3, 3, 128, FEW_KEYS);
    both_passes_repeat(47, 530, 3, 3, 256, FEW_KEYS);
    both_passes_repeat(3, 700, 8, 2, 128, WITH_BIAS);
    both_passes_repeat(3, 300, 4, 4, 256, WITH_BIAS);
    both_passes_repeat(3, 128, 8, 2, 64, WITH_BIAS); /* the kernel for any GPU */
}

int main(void)
{
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu    = case_gpu_get();
    const struct CMUnitTest tests[] = {cmocka_unit_test(both_passes_repeat_bit_by_bit_a_thousand_times)};
    return cmocka_run_group_tests_name("cuda_repeat", tests, NULL, NULL);
}
