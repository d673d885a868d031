/* For test_cuda.c: the GPU, and plain problems in its memory. */
#ifndef CUDA_PLAIN_H
#define CUDA_PLAIN_H

#include "case_gpu.h"
#include "harness.h"

#include <string.h>

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];

static void need_gpu(void) { skip_unless(memory != NULL, no_gpu); }

static flash_attn_device on_gpu(void) { return (flash_attn_device){.type = FLASH_ATTN_CUDA}; }

typedef struct plain {
    flash_attn_problem problem;
    void              *memory; /* q, k, v, o, lse one after another */
    size_t             o_bytes, lse_bytes;
    void              *workspace;
    size_t             workspace_bytes;
} plain;

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* bfloat16 numbers of either sign and size 0.06 to 2. */
static void fill_random(void *device, size_t count, uint32_t seed)
{
    uint16_t *host = malloc(count * sizeof *host + 1);
    assert_non_null(host);
    for (size_t i = 0; i < count; i++) {
        uint32_t r = next_random(&seed) >> 8;
        host[i]    = (uint16_t)((r & 1) << 15 | (123 + (r >> 1) % 5) << 7 | (r >> 8 & 127));
    }
    assert_true(gpu->to_device(device, host, count * sizeof *host));
    free(host);
}

static plain make_plain(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t heads_k, int64_t d,
                        uint32_t seed)
{
    plain   p       = {.problem = {.device = on_gpu(), .mask = FLASH_ATTN_CAUSAL}};
    size_t  q_count = (size_t)(batch * seqlen_q * heads * d), k_count = (size_t)(batch * seqlen_k * heads_k * d);
    p.o_bytes       = q_count * 2;
    p.lse_bytes     = (size_t)(batch * seqlen_q * heads) * 4;
    size_t q_room   = (q_count * 2 + 255) / 256 * 256, k_room = (k_count * 2 + 255) / 256 * 256;
    char  *at       = gpu->alloc(2 * q_room + 2 * k_room + p.lse_bytes);
    assert_non_null(at);
    p.memory      = at;
    p.problem.q   = (flash_attn_tensor){at, FLASH_ATTN_BF16, 0, {batch, seqlen_q, heads, d}, {0}};
    p.problem.k   = (flash_attn_tensor){at + q_room, FLASH_ATTN_BF16, 0, {batch, seqlen_k, heads_k, d}, {0}};
    p.problem.v   = (flash_attn_tensor){at + q_room + k_room, FLASH_ATTN_BF16, 0, {batch, seqlen_k, heads_k, d}, {0}};
    p.problem.o   = (flash_attn_tensor){.data = at + q_room + 2 * k_room, .dtype = FLASH_ATTN_BF16};
    p.problem.lse = (flash_attn_tensor){.data = at + 2 * q_room + 2 * k_room};
    fill_random(p.problem.q.data, q_count, seed);
    fill_random(p.problem.k.data, k_count, seed + 1);
    fill_random(p.problem.v.data, k_count, seed + 2);
    return p;
}

static void add_workspace(plain *p)
{
    assert_int_equal(flash_attn_workspace_size(NULL, &p->problem, FLASH_ATTN_FORWARD, &p->workspace_bytes), FLASH_ATTN_OK);
    p->workspace = p->workspace_bytes ? gpu->alloc(p->workspace_bytes) : NULL;
}

static void free_plain(plain *p)
{
    gpu->free(p->memory);
    if (p->workspace)
        gpu->free(p->workspace);
}

static flash_attn_status forward_on(plain *p, void *stream)
{
    flash_attn_exec exec = {.stream = stream, .workspace = p->workspace, .workspace_bytes = p->workspace_bytes};
    return flash_attn_forward(NULL, &p->problem, &exec);
}

/* o's and lse's bytes. */
static unsigned char *result_of(const plain *p)
{
    unsigned char *bytes = malloc(p->o_bytes + p->lse_bytes);
    assert_non_null(bytes);
    assert_true(gpu->to_host(bytes, p->problem.o.data, p->o_bytes));
    assert_true(gpu->to_host(bytes + p->o_bytes, p->problem.lse.data, p->lse_bytes));
    return bytes;
}

static void poison(plain *p)
{
    assert_true(gpu->fill(p->problem.o.data, 0xFF, p->o_bytes));
    assert_true(gpu->fill(p->problem.lse.data, 0xFF, p->lse_bytes));
    assert_true(gpu->wait(NULL));
}

/* What the problem gives on the default stream with the library's own workspace. */
static unsigned char *expected_of(plain *p)
{
    poison(p);
    expect_ok(flash_attn_forward(NULL, &p->problem, NULL));
    return result_of(p);
}

static void expect_same(const plain *p, const unsigned char *expected)
{
    unsigned char *got = result_of(p);
    assert_memory_equal(got, expected, p->o_bytes + p->lse_bytes);
    free(got);
}

#endif
