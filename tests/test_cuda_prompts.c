/* Pieces of prompts on Hopper, whose keys forward_sm90 splits: a sequence has the same bits alone and beside longer ones, and what it has without parts but for rounding. */
#include "case_gpu.h"
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 3, QUERIES = 140, HEADS = 2, LONGEST = 4300, MOST_COLUMNS = 128 };
static const int32_t keys_of[SEQUENCES] = {2300, LONGEST, 1100}; /* two parts, four, one */

enum { O_COUNT = QUERIES * HEADS * MOST_COLUMNS, LSE_COUNT = QUERIES * HEADS };

typedef struct tensors {
    uint16_t q[SEQUENCES * O_COUNT], k[SEQUENCES * LONGEST * MOST_COLUMNS], v[SEQUENCES * LONGEST * MOST_COLUMNS];
    float    o[SEQUENCES * O_COUNT], lse[SEQUENCES * LSE_COUNT];
    int32_t  used[4];
} tensors;

static const case_memory  *memory;
static const case_gpu     *gpu;
static flash_attn_context *context;
static char                why_not[300];

/* bfloat16 of either sign and size 1/16 to 2. */
static void fill(uint16_t *to, size_t count, uint32_t random)
{
    for (size_t i = 0; i < count; i++) {
        random = random * 1664525u + 1013904223u;
        to[i]  = (uint16_t)((random >> 9 & 1) << 15 | (123 + (random >> 10) % 5) << 7 | (random >> 16 & 127));
    }
}

/* Of `count` sequences from the `first` on, in a cache that has room for the longest. */
static void attend(tensors *device, tensors *host, int first, int count, int64_t d, flash_attn_mask mask, int num_splits)
{
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = mask, .num_splits = num_splits};
    p.q = (flash_attn_tensor){device->q + first * QUERIES * HEADS * d, FLASH_ATTN_BF16, 0, {count, QUERIES, HEADS, d}, {0}};
    p.k = (flash_attn_tensor){device->k + first * LONGEST * d, FLASH_ATTN_BF16, 0, {count, LONGEST, 1, d}, {LONGEST * d, d, d, 1}};
    p.v = p.k;
    p.v.data = device->v + first * LONGEST * d;
    p.o      = (flash_attn_tensor){device->o + first * QUERIES * HEADS * d, FLASH_ATTN_F32, 0, {count, QUERIES, HEADS, d}, {0}};
    p.lse.data  = device->lse + first * LSE_COUNT;
    p.seqused_k = device->used + first;
    expect_ok(flash_attn_forward(context, &p, NULL));
    assert_true(gpu->to_host(host, device, sizeof *host));
}

static void *there(void *memory_or_null)
{
    assert_non_null(memory_or_null);
    return memory_or_null;
}

static void expect_bits(int64_t d, flash_attn_mask mask)
{
    tensors *host = there(calloc(1, sizeof *host)), *got = there(calloc(1, sizeof *got)), *device = there(gpu->alloc(sizeof *device));
    size_t   o = sizeof(float) * (size_t)(QUERIES * HEADS * d);
    fill(host->q, sizeof host->q / 2, 1);
    fill(host->k, sizeof host->k / 2, 2);
    fill(host->v, sizeof host->v / 2, 3);
    memcpy(host->used, keys_of, sizeof keys_of);
    assert_true(gpu->to_device(device, host, sizeof *host));
    attend(device, host, 0, SEQUENCES, d, mask, 0);
    for (int b = 0; b < SEQUENCES; b++) {
        const float *own_o = got->o + b * QUERIES * HEADS * d, *parted_o = host->o + b * QUERIES * HEADS * d;
        attend(device, got, b, 1, d, mask, 0);
        assert_memory_equal(own_o, parted_o, o);
        assert_memory_equal(got->lse + b * LSE_COUNT, host->lse + b * LSE_COUNT, sizeof(float) * LSE_COUNT);
        attend(device, got, b, 1, d, mask, 1);
        for (size_t i = 0; i < o / sizeof(float); i++)
            if (!(fabsf(own_o[i] - parted_o[i]) <= 4e-3f)) /* P is rounded to bfloat16 at another size */
                fail_msg("head_dim %d, sequence %d, element %zu: %g in parts, %g whole", (int)d, b, i, (double)parted_o[i], (double)own_o[i]);
        bool same = memcmp(own_o, parted_o, o) == 0;
        assert_int_equal(same, keys_of[b] < 2048); /* of one part the same, of several it would be a wonder */
    }
    gpu->free(device);
    free(got);
    free(host);
}

static void a_piece_of_a_prompt_has_the_bits_that_it_has_in_a_batch(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    expect_bits(64, FLASH_ATTN_CAUSAL);
    expect_bits(128, FLASH_ATTN_NONE);
}

/* So many sequences that a block walks all parts of a tile (parts_sm90.cuh), where parts of one are blocks' own: each has the same bits. All have the same keys. ALL_PARTS: so many sequences in parts. */
enum { FAR = 1, SPOILT = 2, NAN_QUERY = 4, PADDED = 8, FEWER_HEADS = 16, ALL_PARTS = 32 };

static bool are_same(const float *a, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i])))
            return false;
    return true;
}

static void expect_bits_of_walks(int64_t d, flash_attn_mask mask, int has)
{
    enum { SOME = 4, MORE = 8 /* so many rows that a warp of fold.cu has several */, MANY = 200, PARTS = 4, MORE_PARTS = 33 };
    typedef struct pieces {
        uint16_t q[MANY * O_COUNT], k[LONGEST * HEADS * MOST_COLUMNS], v[LONGEST * HEADS * MOST_COLUMNS];
        float    o[MANY * O_COUNT], lse[MANY * LSE_COUNT];
        int32_t  cache[MANY], used[MANY], pad[MANY];
    } pieces;
    int      batch = !getenv("EMULATOR_MULTIPROCESSORS") ? MANY : has & ALL_PARTS ? MORE : SOME; /* more tiles than multiprocessors */
    int64_t  heads_k = has & FEWER_HEADS ? 1 : HEADS, of_q = QUERIES * HEADS * d;
    pieces  *host = there(calloc(1, sizeof *host)), *got = there(calloc(1, sizeof *got)), *device = there(gpu->alloc(sizeof *device));
    fill(host->q, (size_t)of_q, 7);
    fill(host->k, sizeof host->k / 2, 8);
    fill(host->v, sizeof host->v / 2, 9);
    uint16_t nan = 0x7FC0, *row = host->q + 77 * HEADS * d;
    for (int64_t i = 0; i < d * HEADS; i++)
        row[i] = has & FAR ? (uint16_t)(row[i] + (33 << 7)) : has & NAN_QUERY ? nan : row[i]; /* 2^33 times as large */
    if (has & SPOILT) {
        host->v[(LONGEST - 30) * heads_k * d + 5] = nan; /* the last queries see it */
        host->v[1 * heads_k * d + 3] = nan;              /* all see it, or with padding nobody */
    }
    for (int b = 0; b < batch; b++) {
        memcpy(host->q + b * of_q, host->q, sizeof *host->q * (size_t)of_q);
        host->used[b] = LONGEST;
        host->pad[b]  = 70;
    }
    assert_true(gpu->to_device(device, host, sizeof *host));
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = mask, .cache_batch_idx = device->cache, .seqused_k = device->used, .leftpad_k = has & PADDED ? device->pad : NULL};
    p.q = (flash_attn_tensor){device->q, FLASH_ATTN_BF16, 0, {batch, QUERIES, HEADS, d}, {0}};
    p.k = (flash_attn_tensor){device->k, FLASH_ATTN_BF16, 0, {1, LONGEST, heads_k, d}, {0}};
    p.v = p.k;
    p.v.data = device->v;
    p.o      = (flash_attn_tensor){device->o, FLASH_ATTN_F32, 0, {batch, QUERIES, HEADS, d}, {0}};
    p.lse.data = device->lse;
    for (int parts = has & ALL_PARTS ? PARTS : 0; parts <= (has & ALL_PARTS ? 2 * PARTS : 0); parts += PARTS) { /* four rows a warp, then two */
        p.q.shape[0] = p.o.shape[0] = batch;
        p.num_splits = parts;
        expect_ok(flash_attn_forward(context, &p, NULL));
        assert_true(gpu->to_host(host, device, sizeof *host));
        p.q.shape[0] = p.o.shape[0] = 1;
        p.num_splits = parts > 0 ? parts : PARTS; /* as many as it has by default */
        expect_ok(flash_attn_forward(context, &p, NULL));
        assert_true(gpu->to_host(got, device, sizeof *got));
        for (int b = 0; b < batch; b++)
            if (!are_same(host->o + b * of_q, got->o, (size_t)of_q) || !are_same(host->lse + b * LSE_COUNT, got->lse, LSE_COUNT))
                fail_msg("head_dim %d, mask %d, %d, %d parts: sequence %d has other bits", (int)d, (int)mask, has, parts, b);
    }
    if (has & ALL_PARTS) { /* more than a warp has places for: not the same bits, but near */
        p.num_splits = MORE_PARTS;
        expect_ok(flash_attn_forward(context, &p, NULL));
        assert_true(gpu->to_host(got, device, sizeof *got));
        for (int64_t i = 0; i < of_q; i++)
            if (isnan(got->o[i]) != isnan(host->o[i]) || fabsf(got->o[i] - host->o[i]) > 4e-3f)
                fail_msg("head_dim %d, element %d: %g in %d parts, %g in fewer", (int)d, (int)i, (double)got->o[i], MORE_PARTS, (double)host->o[i]);
    }
    for (int64_t i = 77 * HEADS * d; i < 78 * HEADS * d && has & NAN_QUERY; i++)
        assert_true(isnan(got->o[i]) && isnan(got->lse[77 + i / d % HEADS * QUERIES]));
    gpu->free(device);
    free(got);
    free(host);
}

static void parts_that_a_block_walks_have_the_bits_of_parts_of_several(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    expect_bits_of_walks(128, FLASH_ATTN_CAUSAL, FEWER_HEADS | FAR);
    expect_bits_of_walks(128, FLASH_ATTN_CAUSAL, SPOILT | PADDED);
    expect_bits_of_walks(64, FLASH_ATTN_CAUSAL, FEWER_HEADS | NAN_QUERY | SPOILT);
    expect_bits_of_walks(128, FLASH_ATTN_CAUSAL, FEWER_HEADS | ALL_PARTS);
    if (getenv("EMULATOR_MULTIPROCESSORS")) /* where a kernel takes seconds to build: the test above has a call without a mask that is walked */
        return;
    expect_bits_of_walks(64, FLASH_ATTN_NONE, FAR | PADDED);
    expect_bits_of_walks(128, FLASH_ATTN_NONE, FEWER_HEADS | NAN_QUERY);
}

/* A query of NaN has results of NaN, and no other has: in parts that forward_few_sm90 leaves in memory, folds itself, or does not make. */
static void a_query_of_nan_stays_nan_in_parts(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    enum { FEW = 20, NAN_ROW = 7, D = 128, ROW = HEADS * D };
    static const int splits[] = {1, 3, 0, -1};
    tensors *host = there(calloc(1, sizeof *host)), *device = there(gpu->alloc(sizeof *device));
    fill(host->q, sizeof host->q / 2, 10);
    fill(host->k, sizeof host->k / 2, 11);
    fill(host->v, sizeof host->v / 2, 12);
    for (int i = NAN_ROW * ROW; i < (NAN_ROW + 1) * ROW; i++)
        host->q[i] = 0x7FC0;
    assert_true(gpu->to_device(device, host, sizeof *host));
    for (size_t n = 0; n < sizeof splits / sizeof *splits; n++) {
        flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL, .num_splits = splits[n]};
        p.q = (flash_attn_tensor){device->q, FLASH_ATTN_BF16, 0, {1, FEW, HEADS, D}, {0}};
        p.k = (flash_attn_tensor){device->k, FLASH_ATTN_BF16, 0, {1, LONGEST, 1, D}, {0}};
        p.v = p.k;
        p.v.data = device->v;
        p.o      = (flash_attn_tensor){device->o, FLASH_ATTN_F32, 0, {1, FEW, HEADS, D}, {0}};
        p.lse.data = device->lse;
        expect_ok(flash_attn_forward(NULL, &p, NULL));
        assert_true(gpu->to_host(host, device, sizeof *host));
        for (int i = 0; i < FEW * ROW; i++)
            if (isnan(host->o[i]) != (i / ROW == NAN_ROW) || isnan(host->lse[i / ROW + i / D % HEADS * FEW]) != (i / ROW == NAN_ROW))
                fail_msg("num_splits %d, query %d: O %g, LSE %g", splits[n], i / ROW, (double)host->o[i], (double)host->lse[i / ROW + i / D % HEADS * FEW]);
    }
    gpu->free(device);
    free(host);
}

/* One sequence's piece in the middle of others with a query each: two calls' work in one, of which each has the bits of its own call. Keys: as many of each, packed. */
static void expect_bits_of_own_calls(int keys)
{
    enum { OTHERS = 6, BEFORE = 4, ALL = OTHERS + 1, KEYS = LONGEST, D = 128, HEADS_OF_BATCH = 8 /* more rows than a combine has warps at once */, PIECE = 2 * QUERIES, TOKENS = PIECE + OTHERS, ROW = HEADS_OF_BATCH * D };
    typedef struct batch {
        uint16_t q[TOKENS * ROW], k[ALL * KEYS * D], v[ALL * KEYS * D];
        float    o[TOKENS * ROW], lse[TOKENS * HEADS_OF_BATCH];
        int32_t  ends_q[ALL + 1], ends_k[ALL + 1], used[ALL], ends_of_piece[4], ends_of_ones[2 * (OTHERS + 2)];
    } batch;
    batch *host = there(calloc(1, sizeof *host)), *got = there(calloc(1, sizeof *got)), *device = there(gpu->alloc(sizeof *device));
    fill(host->q, sizeof host->q / 2, 4);
    fill(host->k, sizeof host->k / 2, 5);
    fill(host->v, sizeof host->v / 2, 6);
    for (int b = 0; b <= ALL; b++) {
        host->ends_q[b] = b <= BEFORE ? b : b - 1 + PIECE;
        host->ends_k[b] = b * keys;
    }
    for (int b = 0; b < ALL; b++)
        host->used[b] = keys;
    host->ends_of_piece[1] = PIECE, host->ends_of_piece[3] = keys;
    for (int b = 0; b <= OTHERS; b++)
        host->ends_of_ones[b] = b;
    assert_true(gpu->to_device(device, host, sizeof *host));
    assert_true(gpu->fill(device->o, 0xFF, sizeof host->o));
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL, .batch = ALL, .max_seqlen_q = PIECE, .max_seqlen_k = keys};
    p.q   = (flash_attn_tensor){device->q, FLASH_ATTN_BF16, 0, {1, TOKENS, HEADS_OF_BATCH, D}, {0}};
    p.k   = (flash_attn_tensor){device->k, FLASH_ATTN_BF16, 0, {1, ALL * keys, 1, D}, {0}};
    p.v   = p.k;
    p.v.data = device->v;
    p.o   = (flash_attn_tensor){device->o, FLASH_ATTN_F32, 0, {1, TOKENS, HEADS_OF_BATCH, D}, {0}};
    p.lse = (flash_attn_tensor){.data = device->lse};
    p.cu_seqlens_q = device->ends_q;
    p.cu_seqlens_k = device->ends_k;
    p.seqused_k    = device->used;
    expect_ok(flash_attn_forward(NULL, &p, NULL));
    assert_true(gpu->to_host(host, device, sizeof *host));
    assert_true(gpu->fill(device->o, 0xFF, sizeof host->o));

    flash_attn_problem piece = p; /* by itself */
    piece.batch      = 1;
    piece.q.shape[1] = piece.o.shape[1] = PIECE;
    piece.k.shape[1] = piece.v.shape[1] = keys;
    piece.q.data     = device->q + BEFORE * ROW;
    piece.k.data     = device->k + BEFORE * keys * D;
    piece.v.data     = device->v + BEFORE * keys * D;
    piece.o.data     = device->o + BEFORE * ROW;
    piece.lse.data   = NULL;
    piece.cu_seqlens_q = device->ends_of_piece;
    piece.cu_seqlens_k = device->ends_of_piece + 2;
    expect_ok(flash_attn_forward(NULL, &piece, NULL));
    flash_attn_problem ones = p; /* those before it */
    ones.batch        = BEFORE;
    ones.q.shape[1]   = ones.o.shape[1] = BEFORE;
    ones.k.shape[1]   = ones.v.shape[1] = BEFORE * keys;
    ones.lse.data     = NULL;
    ones.max_seqlen_q = 1;
    ones.cu_seqlens_q = device->ends_of_ones;
    expect_ok(flash_attn_forward(NULL, &ones, NULL));
    assert_true(gpu->to_host(got, device, sizeof *got));
    assert_memory_equal(got->o, host->o, sizeof(float) * (BEFORE + PIECE) * ROW);

    flash_attn_problem whole = p; /* no token is forgotten, nor anything else than O written */
    whole.num_splits = 2;
    expect_ok(flash_attn_forward(NULL, &whole, NULL));
    assert_true(gpu->to_host(got, device, sizeof *got));
    for (int i = 0; i < TOKENS * ROW; i++)
        if (!(fabsf(got->o[i] - host->o[i]) <= 4e-3f))
            fail_msg("element %d: %g by one call, %g by two", i, (double)got->o[i], (double)host->o[i]);
    for (int i = 0; i < TOKENS * HEADS_OF_BATCH; i++)
        if (!(fabsf(got->lse[i] - host->lse[i]) <= 1e-4f))
            fail_msg("LSE %d: %g by one call, %g by two", i, (double)got->lse[i], (double)host->lse[i]);
    gpu->free(device);
    free(got);
    free(host);
}

static void a_piece_among_decoded_tokens_has_the_bits_of_its_own_call(void **state)
{
    (void)state;
    skip_unless(context != NULL, why_not);
    expect_bits_of_own_calls(LONGEST); /* in parts */
    expect_bits_of_own_calls(300);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[argc - 1]);
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    if (memory) {
        gpu     = case_gpu_get();
        context = case_gpu_hopper("forward_sm90", why_not, sizeof why_not);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_piece_of_a_prompt_has_the_bits_that_it_has_in_a_batch),
        cmocka_unit_test(parts_that_a_block_walks_have_the_bits_of_parts_of_several),
        cmocka_unit_test(a_query_of_nan_stays_nan_in_parts),
        cmocka_unit_test(a_piece_among_decoded_tokens_has_the_bits_of_its_own_call),
    };
    int failed = cmocka_run_group_tests_name("cuda_prompts", tests, NULL, NULL);
    flash_attn_destroy(context);
    return failed;
}
