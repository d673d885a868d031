/* Hopper's own forward and backward against the reference, by their names, so that nothing else can answer; skipped, with the reason, where there is
 * no GPU of compute capability 9.0. */
#include "case_gpu.h"
#include "harness.h"
#include "sm90_shapes.h"

#include <math.h>
#include <string.h>

static const case_memory   *memory;
static const case_gpu      *gpu;
static flash_attn_context  *context, *backward_context, *portable_context /* for who has 32 columns */, *short_context, *short_forward_context;
static char                 why_not[300];

enum { NUM_SHAPES = sizeof shapes / sizeof *shapes, NUM_SHORT_SHAPES = sizeof short_shapes / sizeof *short_shapes };

static void need_hopper(void) { skip_unless(context != NULL, why_not); }

static int run_case(case_instance *instance, const test_case *shape, flash_attn_dtype dtype, const case_device *device)
{
    case_result result = case_run(instance, device);
    if (result.verdict == CASE_PASSED)
        return 0;
    printf("  FAILED %s, head_dim %d, %s%s: %s\n", shape->name, shape->head_dim, dtype_name(dtype),
           device->deterministic ? ", deterministic" : "", result.reason);
    fflush(stdout);
    return 1;
}

/* Skipped counts as failed: the kernel is for all of these. A backward runs in the deterministic mode too, twice, with the same bits. */
static int run_shape(test_case shape, flash_attn_dtype dtype, flash_attn_context *with)
{
    char why[300];
    shape.group             = "sm90";
    bool           backward = with != context && with != short_forward_context;
    unsigned       flags    = backward ? CASE_BACKWARD : 0;
    case_instance *instance = case_build(&shape, dtype, flags, 1, why, sizeof why);
    if (!instance)
        fail_msg("%s: %s", shape.name, why);
    case_device device = {.context = with, .device = {.type = FLASH_ATTN_CUDA}, .memory = memory};
    int         failed = run_case(instance, &shape, dtype, &device);
    if (backward) {
        device.deterministic = true;
        failed += run_case(instance, &shape, dtype, &device);
        uint64_t bits = case_output_hash(instance);
        failed += run_case(instance, &shape, dtype, &device);
        if (case_output_hash(instance) != bits) {
            printf("  FAILED %s, head_dim %d: other bits the second time\n", shape.name, shape.head_dim);
            failed++;
        }
    }
    case_free(instance);
    return failed;
}

/* FP8 leaves options (but sinks), packed sequences, caches, pages and rows of no whole 16 bytes to the portable kernel. */
static bool is_for_fp8(const test_case *shape)
{
    return !shape->slices && !shape->softcap && !shape->bias && !shape->alibi && !shape->dropout && !shape->page_size && !shape->varlen_q && !shape->varlen_k && !shape->cache_batch_idx && shape->head_dim % 16 == 0 && shape->head_dim_v % 16 == 0;
}

/* Each shape in three head dims, where it names none, in bfloat16, the forward in one of them in FP8 too, by turns, and some in float16. The reference
 * is what takes long: of backwards every second at 256, and parts can run side by side. */
static void run_shapes(const test_case *all, int count, flash_attn_context *with)
{
    int failed = 0, turn = 0;
    for (int n = 0; n < count; n++)
        for (int d = 64; d <= 256; d *= 2) {
            test_case shape = all[n];
            if (!strstr(shape.name, only_shapes))
                continue;
            if ((shape.head_dim && d > 64) || (d == 256 && (all == short_shapes || (with == backward_context && n % 2 == 0))))
                continue;
            if (!shape.head_dim)
                shape.head_dim = d;
            if (with == short_forward_context && shape.seqlen_q < 8) /* for others */
                continue;
            if (turn++ % parts != part)
                continue;
            failed += run_shape(shape, FLASH_ATTN_BF16, with);
            if (with == context && is_for_fp8(&shape) && (all[n].head_dim || d == 64 << (n + 2) % 3))
                failed += run_shape(shape, FLASH_ATTN_F8E4M3, with);
            if (n % 4 == 1 && shape.head_dim == 128 && shape.logit_size < 1000) /* float16 holds no more */
                failed += run_shape(shape, FLASH_ATTN_F16, with);
        }
    assert_int_equal(failed, 0);
}

static void every_shape_is_right(void **state)
{
    (void)state;
    need_hopper();
    run_shapes(shapes, NUM_SHAPES, context);
}

static void every_backward_shape_is_right(void **state)
{
    (void)state;
    need_hopper();
    run_shapes(backward_shapes, sizeof backward_shapes / sizeof *backward_shapes, backward_context);
}

/* Up to 128 queries and keys, at head_dim 64 256. */
static void every_short_backward_is_right(void **state)
{
    (void)state;
    need_hopper();
    run_shapes(short_shapes, NUM_SHORT_SHAPES - FORWARD_SHORT_SHAPES, short_context);
}

/* Likewise. */
static void every_short_forward_is_right(void **state)
{
    (void)state;
    need_hopper();
    run_shapes(short_shapes, NUM_SHORT_SHAPES, short_forward_context);
}

/* ---- Inf and NaN in V reach the rows that see them and no other ---- */

enum { LENGTH = 300, HEAD_DIM = 256 /* from row to row */, COUNT = LENGTH * HEAD_DIM,
       BIAS_ROW = 304, BIAS_AT = 4 * COUNT + 8, STATS_AT = BIAS_AT + LENGTH * BIAS_ROW, HOST_COUNT = STATS_AT + 2 * LENGTH /* Q, K, V, O, a sink, a bias, LSE */ };

static int columns_k = 64, columns_v = 64, length = LENGTH; /* that the tests below use */

static float value_of(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float    value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* bfloat16 between 1/8 and 2, of both signs. */
static void fill(uint16_t *host, int count, uint32_t random)
{
    for (int i = 0; i < count; i++) {
        random  = random * 1664525u + 1013904223u;
        host[i] = (uint16_t)((random >> 9 & 1) << 15 | (124 + (random >> 10) % 4) << 7 | (random >> 16 & 127));
    }
}

static flash_attn_problem problem_at(char *at, flash_attn_mask mask)
{
    flash_attn_problem p = {.mask = mask};
    if (mask == FLASH_ATTN_WINDOW)
        p.window_left = 70, p.window_right = 20;
    flash_attn_tensor *all[] = {&p.q, &p.k, &p.v, &p.o};
    for (int n = 0; n < 4; n++)
        *all[n] = (flash_attn_tensor){at + n * COUNT * 2, FLASH_ATTN_BF16, 0, {1, length, 1, n < 2 ? columns_k : columns_v}, {COUNT, HEAD_DIM, HEAD_DIM, 1}};
    return p;
}

static void expect_output(flash_attn_problem want, flash_attn_problem p, uint16_t *host, char *device)
{
    static uint16_t got[COUNT];
    static float    lse[LENGTH];
    const float    *expected_lse = (float *)(host + STATS_AT);
    want.lse.data = host + STATS_AT;
    p.lse.data    = device + STATS_AT * 2;
    memset(host + 3 * COUNT, 0x55, COUNT * 2);
    memset(host + STATS_AT, 0x55, sizeof lse);
    assert_true(gpu->to_device(device, host, HOST_COUNT * 2));
    expect_ok(flash_attn_forward(NULL, &want, NULL));
    expect_ok(flash_attn_forward(length < LENGTH ? short_forward_context : context, &p, NULL));
    assert_true(gpu->to_host(got, device + 3 * COUNT * 2, sizeof got) && gpu->to_host(lse, device + STATS_AT * 2, sizeof lse));
    for (int i = 0; i < length; i++)
        if (lse[i] != expected_lse[i] && !(fabsf(lse[i] - expected_lse[i]) <= 1e-4f * (1 + fabsf(expected_lse[i]))))
            fail_msg("%d rows, mask %d, %d parts, LSE of row %d: %g, expected %g", length, (int)p.mask, p.num_splits, i, (double)lse[i], (double)expected_lse[i]);
    for (int i = 0; i < COUNT; i++) {
        if (i % HEAD_DIM >= columns_v)
            continue;
        float expected = value_of(host[3 * COUNT + i]), x = value_of(got[i]);
        bool  same = isnan(expected) ? isnan(x) : isinf(expected) ? x == expected : fabsf(x - expected) <= 0.02f;
        if (!same)
            fail_msg("%d rows, mask %d, %d parts, row %d, column %d: %g, expected %g", length, (int)p.mask, p.num_splits, i / HEAD_DIM, i % HEAD_DIM, (double)x, (double)expected);
    }
}

/* O of p, whose tensors are a copy of want's on the device, is the reference's, also where the keys are split. */
static void expect_forward(const flash_attn_problem *want, const flash_attn_problem *p, uint16_t *host, char *device)
{
    flash_attn_problem split = *p;
    split.num_splits = 2;
    expect_output(*want, *p, host, device);
    if (length == LENGTH && p->mask != FLASH_ATTN_WINDOW && !p->bias.data && p->slices.count == 0)
        expect_output(*want, split, host, device);
}

/* nan_key: a row of V of which nothing else is there, for then a row that sees it need not be computed again. */
static void expect_nonfinite_values_where_they_are_seen(int nan_key)
{
    static uint16_t host[HOST_COUNT];
    fill(host, 3 * COUNT, 5);
    uint16_t *v = host + 2 * COUNT;
    host[4 * COUNT] = 0x3F80; /* a sink of 1 */
    v[10 * HEAD_DIM + 3] = 0x7FC0, v[130 * HEAD_DIM + 5] = 0x7F80, v[131 * HEAD_DIM + 5] = 0xFF80; /* NaN, Inf, -Inf */
    v[200 * HEAD_DIM + 60] = 0x7F80, v[299 * HEAD_DIM] = 0x7FC0;
    for (int c = 0; nan_key >= 0 && c < HEAD_DIM; c++)
        v[nan_key * HEAD_DIM + c] = 0x7FC0;
    char *device = gpu->alloc(sizeof host);
    assert_non_null(device);
    fill(host + BIAS_AT, LENGTH * BIAS_ROW, 9);
    static const flash_attn_slice slices[] = {{0, 100, 0, 100, FLASH_ATTN_SLICE_CAUSAL}, {100, LENGTH, 90, LENGTH, FLASH_ATTN_SLICE_CAUSAL}, {128, 256, 0, 128, FLASH_ATTN_SLICE_FULL}};
    for (int n = 0; n < (length < LENGTH ? 5 : 7); n++) {
        flash_attn_mask    mask = n == 6 ? FLASH_ATTN_NONE : n < 3 ? (flash_attn_mask)n : FLASH_ATTN_CAUSAL;
        flash_attn_problem want = problem_at((char *)host, mask), p = problem_at(device, mask);
        want.device.type        = FLASH_ATTN_REFERENCE;
        p.device.type           = FLASH_ATTN_CUDA;
        if (n == 5) { /* rows that are computed again have their bias */
            want.bias = p.bias = (flash_attn_tensor){host + BIAS_AT, FLASH_ATTN_BF16, 0, {1, 1, LENGTH, LENGTH}, {0, 0, BIAS_ROW, 1}};
            p.bias.data        = device + BIAS_AT * 2;
        } else if (n == 6)
            want.slices = p.slices = (flash_attn_slices){.list = slices, .count = 3};
        else if (n > 2) /* the first queries see no key, but perhaps a sink */
            want.k.shape[1] = want.v.shape[1] = p.k.shape[1] = p.v.shape[1] = length - 90;
        if (n == 4) {
            want.sinks = (flash_attn_tensor){host + 4 * COUNT, FLASH_ATTN_BF16, 0, {1, 1, 1, 1}, {1, 1, 1, 1}};
            p.sinks    = (flash_attn_tensor){device + 4 * COUNT * 2, FLASH_ATTN_BF16, 0, {1, 1, 1, 1}, {1, 1, 1, 1}};
        }
        expect_forward(&want, &p, host, device);
    }
    gpu->free(device);
}

static void expect_some_nonfinite_values(void)
{
    expect_nonfinite_values_where_they_are_seen(-1);
    expect_nonfinite_values_where_they_are_seen(length / 2 + 7);
}

static void with_lengths(void (*expect)(void))
{
    need_hopper();
    static const struct { int length, columns; } all[] = {{LENGTH, 64}, {128, 64}, {256, 64}, {128, 128}};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
        length    = all[n].length;
        columns_k = columns_v = all[n].columns;
        expect();
    }
    length    = LENGTH;
    columns_k = columns_v = 64;
}

static void nonfinite_values_reach_only_who_sees_them(void **state)
{
    (void)state;
    with_lengths(expect_some_nonfinite_values);
}

/* Keys of which every query's score is -inf have no weight, also where a query meets none but such at first, and then some among others, or no other at all. */
static void expect_no_weight_of_nonfinite_keys(void)
{
    static uint16_t host[HOST_COUNT];
    char *device = gpu->alloc(sizeof host);
    assert_non_null(device);
    for (int n = 0; n < 6; n++) {
        fill(host, 3 * COUNT, 6);
        for (int i = 0; i < LENGTH; i++) {
            host[i * HEAD_DIM] = 0x3F80; /* 1 */
            if (n >= 3 || i >= 150 || i % 16 < 8) /* some for each lane of a tile */
                host[COUNT + i * HEAD_DIM] = 0xFF80; /* -Inf */
        }
        flash_attn_mask    mask = (flash_attn_mask)(n % 3);
        flash_attn_problem want = problem_at((char *)host, mask), p = problem_at(device, mask);
        want.device.type        = FLASH_ATTN_REFERENCE;
        p.device.type           = FLASH_ATTN_CUDA;
        expect_forward(&want, &p, host, device);
    }
    gpu->free(device);
}

static void nonfinite_keys_have_no_weight(void **state)
{
    (void)state;
    with_lengths(expect_no_weight_of_nonfinite_keys);
}

/* ---- a page id that is out of range ---- */

/* Past the keys that are used any id may stand; among them it spoils its own sequence, reads nothing outside and leaves the other as it is. */
static void page_ids_out_of_range_are_bounded(void **state)
{
    (void)state;
    need_hopper();
    enum { PAGE = 16, PAGES = LENGTH / PAGE + 1, USED = 150 };
    static const int32_t        bad[] = {-1, INT32_MAX, INT32_MIN, PAGES, 1 << 20};
    static _Alignas(16) uint16_t host[5 * COUNT + 2 * PAGES * 2 + 16], first[COUNT], got[COUNT];
    fill(host, 3 * COUNT, 3);
    char    *device = gpu->alloc(sizeof host);
    int32_t *table  = (int32_t *)(host + 4 * COUNT), *used = table + 2 * PAGES;
    assert_non_null(device);
    flash_attn_problem p = problem_at(device, FLASH_ATTN_CAUSAL);
    p.device.type        = FLASH_ATTN_CUDA;
    p.q.shape[0] = p.o.shape[0] = 2; /* half as long */
    p.q.shape[1] = p.o.shape[1] = LENGTH / 2;
    p.k.shape[0] = p.v.shape[0] = PAGES - 1;
    p.k.shape[1] = p.v.shape[1] = PAGE;
    p.q.stride[0] = p.o.stride[0] = COUNT / 2;
    p.k.stride[0] = p.v.stride[0] = PAGE * HEAD_DIM;
    p.pages                     = (flash_attn_pages){.table = (const int32_t *)(device + 8 * COUNT), .pages_per_seq = PAGES};
    p.seqused_k                 = p.pages.table + 2 * PAGES;
    for (size_t n = 0; n <= 2 * sizeof bad / sizeof *bad; n++) { /* 0: right ones; then behind the used keys, then among the second one's */
        for (int i = 0; i < 2 * PAGES; i++)
            table[i] = i % PAGES < PAGES - 1 ? (i * 5 + i / PAGES) % (PAGES - 1) : 0;
        used[0] = used[1] = USED;
        for (int i = 0; n > 0 && i < 2; i++)
            table[(n % 2 ? i : 1) * PAGES + (n % 2 ? USED / PAGE + 1 : 3) + i] = bad[(n - 1) / 2];
        assert_true(gpu->to_device(device, host, sizeof host));
        expect_ok(flash_attn_forward(context, &p, NULL));
        assert_true(gpu->to_host(got, device + 3 * COUNT * 2, sizeof got));
        if (n == 0)
            memcpy(first, got, sizeof got);
        assert_memory_equal(got, first, sizeof got / (n == 0 || n % 2 ? 1 : 2));
    }
    gpu->free(device);
}

/* ---- dropout: pair by pair those that the reference drops ---- */

static void set_to(uint16_t *matrix, uint16_t value)
{
    for (int i = 0; i < COUNT; i++)
        matrix[i] = value;
}

/* Row first + c of zeros gets a 1 in column c. */
static void set_identity(uint16_t *matrix, int first)
{
    for (int c = 0; c < columns_k && first + c < LENGTH; c++)
        matrix[(first + c) * HEAD_DIM + c] = 0x3F80;
}

/* All scores are 0, and V hands out one key a column. */
static void the_forward_drops_the_pairs_that_the_reference_drops(void **state)
{
    (void)state;
    need_hopper();
    static uint16_t host[4 * COUNT], got[COUNT];
    char           *device = gpu->alloc(sizeof host);
    assert_non_null(device);
    for (int n = 0; n < 3 * ((LENGTH + columns_k - 1) / columns_k); n++) {
        flash_attn_problem want = problem_at((char *)host, (flash_attn_mask)(n % 3)), p = problem_at(device, (flash_attn_mask)(n % 3));
        want.device.type        = FLASH_ATTN_REFERENCE;
        p.device.type           = FLASH_ATTN_CUDA;
        want.dropout = p.dropout = (flash_attn_dropout){.p = 0.4f, .seed = 12345678912345u, .offset = 1ull << 40 | 17};
        memset(host, 0, sizeof host);
        set_identity(host + 2 * COUNT, n / 3 * columns_k);
        assert_true(gpu->to_device(device, host, sizeof host));
        expect_ok(flash_attn_forward(NULL, &want, NULL));
        expect_ok(flash_attn_forward(context, &p, NULL));
        assert_true(gpu->to_host(got, device + 3 * COUNT * 2, sizeof got));
        for (int i = 0; i < COUNT; i++)
            if ((got[i] == 0) != (host[3 * COUNT + i] == 0))
                fail_msg("mask %d, query %d, key %d + %d: %#x, expected %#x", n % 3, i / HEAD_DIM, n / 3 * columns_k, i % HEAD_DIM, got[i], host[3 * COUNT + i]);
    }
    gpu->free(device);
}

/* ---- NaN in one row of Q, K, V or dO reaches the gradients that depend on it and no other ---- */

enum { GRADS = 3 * COUNT, LSE_AT = 8 * COUNT, LENGTHS_AT = 2 * LSE_AT + LENGTH * 4, BACKWARD_BYTES = LENGTHS_AT + 16 };

static flash_attn_problem backward_at(char *at, flash_attn_mask mask, bool packed, flash_attn_grads *g)
{
    flash_attn_problem p      = problem_at(at, mask);
    flash_attn_tensor *all[4] = {&g->dout, &g->dq, &g->dk, &g->dv};
    p.lse.data = at + LSE_AT * 2;
    if (packed) {
        p.batch        = 2;
        p.cu_seqlens_q = p.cu_seqlens_k = (const int32_t *)(at + LENGTHS_AT);
        p.max_seqlen_q = p.max_seqlen_k = length;
    }
    *g         = (flash_attn_grads){0};
    for (int n = 0; n < 4; n++) {
        *all[n]      = n == 0 || n == 3 ? p.v : p.q;
        all[n]->data = at + (4 + n) * COUNT * 2;
    }
    return p;
}

/* A query whose delta is NaN may make all of dV NaN that it makes of dK, as the portable kernel's edge tiles do: of dO's columns they know
 * nothing. */
static bool may_be_nan(const uint16_t *want, int i)
{
    return i >= 2 * COUNT && !isfinite(value_of(want[i - COUNT - i % HEAD_DIM]));
}

static void expect_gradients(const uint16_t *got, const uint16_t *want, const char *what, flash_attn_mask mask)
{
    for (int i = 0; i < GRADS; i++) {
        if (i % HEAD_DIM >= (i < 2 * COUNT ? columns_k : columns_v))
            continue;
        float expected = value_of(want[i]), x = value_of(got[i]);
        bool  same     = isfinite(expected) ? fabsf(x - expected) <= 0.05f + 0.02f * fabsf(expected) : !isfinite(x);
        same           = same || (isfinite(expected) && !isfinite(x) && may_be_nan(want, i));
        if (!same)
            fail_msg("%d columns, %s, mask %d, gradient %d, row %d, column %d: %g, expected %g", columns_k, what, (int)mask, i / COUNT, i % COUNT / HEAD_DIM,
                     i % HEAD_DIM, (double)x, (double)expected);
    }
}

/* In `rounds` rounds. */
static void expect_nan_where_it_belongs(int rounds)
{
    static const struct {
        const char *what;
        int         tensor, row;
        int         zeros[2]; /* columns of V, from and to */
    } poisoned[] = {{"nothing", 0, -1, {0, 0}}, {"q", 0, 130, {0, 0}}, {"k", 1, 130, {0, 0}}, {"v", 2, 200, {0, 0}}, {"dout", 4, 70, {0, 0}}, {"dout where v is 0", 4, 70, {17, 18}},
                    {"dout where all of v is 0", 4, 70, {0, HEAD_DIM}}, {"k's first", 1, 0, {0, 0}}, {"q's last", 0, 299, {0, 0}}};
    static _Alignas(16) uint16_t host[BACKWARD_BYTES / 2];
    static uint16_t              got[GRADS];
    char                        *device = gpu->alloc(sizeof host);
    flash_attn_context          *taken  = length < LENGTH ? short_context : columns_k != 32 ? backward_context : portable_context;
    assert_non_null(device);
    for (size_t n = 0; n < sizeof poisoned / sizeof *poisoned; n++)
        for (int round = 1; round <= rounds; round++) {
            /* all masks of two packed sequences, or one that makes a difference of one: without a mask everything is NaN; from 7 on with softcap */
            flash_attn_mask    mask   = (flash_attn_mask)(round % 3);
            bool               packed = round % 6 >= 3;
            if (round == 6 || (taken == portable_context && poisoned[n].zeros[1] == HEAD_DIM)) /* of which the portable kernel knows nothing (decision 0077) */
                continue;
            flash_attn_grads   want_grads, grads;
            flash_attn_problem want = backward_at((char *)host, mask, packed, &want_grads), p = backward_at(device, mask, packed, &grads);
            memcpy((char *)host + LENGTHS_AT, (const int32_t[]){0, 133 * length / LENGTH, length}, 12);
            want.device.type          = FLASH_ATTN_REFERENCE;
            p.device.type             = FLASH_ATTN_CUDA;
            want.softcap = p.softcap  = round > 6 ? 3.0f : 0.0f;
            fill(host, 5 * COUNT, 7);
            for (int row = 0; row < LENGTH; row++)
                for (int col = poisoned[n].zeros[0]; col < poisoned[n].zeros[1]; col++)
                    host[2 * COUNT + row * HEAD_DIM + col] = 0;
            if (poisoned[n].row >= 0)
                host[poisoned[n].tensor * COUNT + poisoned[n].row * length / LENGTH * HEAD_DIM + 17] = 0x7FC0;
            assert_true(gpu->to_device(device, host, sizeof host));
            expect_ok(flash_attn_forward(NULL, &want, NULL));
            expect_ok(flash_attn_backward(NULL, &want, &want_grads, NULL));
            expect_ok(flash_attn_forward(taken, &p, NULL));
            expect_ok(flash_attn_backward(taken, &p, &grads, NULL));
            assert_true(gpu->to_host(got, device + 5 * COUNT * 2, sizeof got));
            expect_gradients(got, host + 5 * COUNT, poisoned[n].what, mask);
        }
    gpu->free(device);
}

typedef struct widths {
    int k, v, rounds;
} widths;

/* So many parts as there are widths have one each: the emulated GPU builds a kernel for each. */
static void with_widths(const widths *all, int count, void (*test)(int))
{
    int turns = parts < count ? parts : count;
    for (int n = part % turns; n < count; n += turns) {
        columns_k = all[n].k, columns_v = all[n].v;
        test(all[n].rounds);
    }
    columns_k = columns_v = 64;
}

static void nan_reaches_only_gradients_that_depend_on_it(void **state)
{
    static const widths all[] = {{32, 32, 5}, {24, 40, 5}, {64, 64, 11}, {96, 96, 5}, {192, 128, 5}, {256, 256, 5}};
    (void)state;
    need_hopper();
    with_widths(all, sizeof all / sizeof *all, expect_nan_where_it_belongs);
}

static void nan_reaches_only_short_gradients_that_depend_on_it(void **state)
{
    static const widths all[] = {{64, 64, 5}, {128, 128, 5}, {40, 24, 5}};
    (void)state;
    need_hopper();
    length = 120;
    with_widths(all, sizeof all / sizeof *all, expect_nan_where_it_belongs);
    length = 240;
    with_widths(all, 1, expect_nan_where_it_belongs);
    length = LENGTH;
}

/* What is planned knows nothing of the gradients, of which another kernel may be needed. */
static void a_planned_workspace_serves_gradients_of_any_dtype(void **state)
{
    (void)state;
    need_hopper();
    char *device = gpu->alloc(BACKWARD_BYTES), *floats = gpu->alloc(4 * COUNT * sizeof(float));
    assert_true(device && floats && gpu->fill(device, 0, BACKWARD_BYTES) && gpu->fill(floats, 0, 4 * COUNT * sizeof(float)));
    for (int n = 0; n < 9; n++) {
        flash_attn_grads   grads;
        flash_attn_exec    exec = {0};
        length = n / 3 == 0 ? 100 : n / 3 == 1 ? 240 : LENGTH;
        flash_attn_problem p = backward_at(device, FLASH_ATTN_NONE, false, &grads);
        flash_attn_tensor *all[4] = {&grads.dq, &grads.dk, &grads.dv, &grads.dout};
        p.device.type        = FLASH_ATTN_CUDA;
        for (int i = 0; i < (n % 3 == 0 ? 0 : n % 3 == 1 ? 3 : 4); i++) {
            all[i]->dtype = FLASH_ATTN_F32;
            all[i]->data  = floats + i * COUNT * sizeof(float);
        }
        expect_ok(flash_attn_workspace_size(NULL, &p, FLASH_ATTN_BACKWARD, &exec.workspace_bytes));
        exec.workspace = gpu->alloc(exec.workspace_bytes + 1);
        expect_ok(flash_attn_forward(NULL, &p, NULL));
        expect_ok(flash_attn_backward(NULL, &p, &grads, &exec));
        gpu->free(exec.workspace);
    }
    length = LENGTH;
    gpu->free(device);
    gpu->free(floats);
}

/* All scores are 0. dO hands out one query a column of dV; and as all of dP is 1 and K hands out one key a column of dQ, that is below 0 where it is dropped,
 * by more than rounding where eight keys are seen. */
static void expect_dropped_pairs(int masks)
{
    static _Alignas(16) uint16_t host[BACKWARD_BYTES / 2];
    static uint16_t              got[GRADS];
    char                        *device = gpu->alloc(sizeof host);
    assert_non_null(device);
    for (int n = 0; n < 2 * masks * ((LENGTH + columns_k - 1) / columns_k); n++) {
        flash_attn_mask    mask = (flash_attn_mask)(n % masks);
        int                first = n / masks / 2 * columns_k, of_dv = n / masks % 2;
        flash_attn_grads   want_grads, grads;
        flash_attn_problem want = backward_at((char *)host, mask, false, &want_grads), p = backward_at(device, mask, false, &grads);
        want.device.type        = FLASH_ATTN_REFERENCE;
        p.device.type           = FLASH_ATTN_CUDA;
        want.dropout = p.dropout = (flash_attn_dropout){.p = 0.4f, .seed = 12345678912345u, .offset = 1ull << 40 | 17};
        memset(host, 0, sizeof host);
        set_to(host + 2 * COUNT, 0x3C80); /* V: 1 / 64 */
        if (of_dv)
            set_identity(host + 4 * COUNT, first);
        else {
            set_identity(host + COUNT, first);
            set_to(host + 4 * COUNT, 0x3F80);
        }
        expect_ok(flash_attn_forward(NULL, &want, NULL));
        assert_true(gpu->to_device(device, host, sizeof host));
        expect_ok(flash_attn_backward(NULL, &want, &want_grads, NULL));
        expect_ok(flash_attn_backward(backward_context, &p, &grads, NULL));
        assert_true(gpu->to_host(got, device + 5 * COUNT * 2, sizeof got));
        for (int i = of_dv ? 0 : 8 * HEAD_DIM, at = of_dv ? 2 * COUNT : 0; i < COUNT; i++) {
            if (i % HEAD_DIM >= columns_k)
                continue;
            float x = value_of(got[at + i]), expected = value_of(host[5 * COUNT + at + i]);
            if (of_dv ? (x == 0) != (expected == 0) : (x < -1e-4f) != (expected < -1e-4f))
                fail_msg("%d columns, mask %d, %s, row %d, column %d + %d: %g, expected %g", columns_k, (int)mask, of_dv ? "dV" : "dQ", i / HEAD_DIM, first, i % HEAD_DIM, (double)x, (double)expected);
        }
    }
    gpu->free(device);
}

static void the_backward_drops_the_pairs_that_the_reference_drops(void **state)
{
    static const widths all[] = {{64, 64, 3}, {256, 256, 3}};
    (void)state;
    need_hopper();
    with_widths(all, sizeof all / sizeof *all, expect_dropped_pairs);
}

static void find_hopper(void)
{
    memory = case_gpu_memory(0, why_not, sizeof why_not);
    if (!memory)
        return;
    gpu              = case_gpu_get();
    context          = case_gpu_hopper("forward_sm90", why_not, sizeof why_not);
    backward_context = context ? case_gpu_hopper("backward_sm90", why_not, sizeof why_not) : NULL;
    portable_context = context ? case_gpu_hopper("backward_sm80", why_not, sizeof why_not) : NULL;
    short_forward_context = context ? case_gpu_hopper("forward_short_sm90", why_not, sizeof why_not) : NULL;
    short_context    = context ? case_gpu_hopper("backward_short_sm90", why_not, sizeof why_not) : NULL;
}

/* Options: sm90_shapes.h; a part has some widths of the other tests too. */
int main(int argc, char **argv)
{
    if (!choose_shapes(argc, argv))
        return 2;
    find_hopper();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_is_right),
        cmocka_unit_test(nonfinite_values_reach_only_who_sees_them),
        cmocka_unit_test(nonfinite_keys_have_no_weight),
        cmocka_unit_test(page_ids_out_of_range_are_bounded),
        cmocka_unit_test(the_forward_drops_the_pairs_that_the_reference_drops),
        cmocka_unit_test(every_backward_shape_is_right),
        cmocka_unit_test(nan_reaches_only_gradients_that_depend_on_it),
        cmocka_unit_test(the_backward_drops_the_pairs_that_the_reference_drops),
        cmocka_unit_test(every_short_backward_is_right),
        cmocka_unit_test(every_short_forward_is_right),
        cmocka_unit_test(nan_reaches_only_short_gradients_that_depend_on_it),
        cmocka_unit_test(a_planned_workspace_serves_gradients_of_any_dtype),
    };
    int failed = cmocka_run_group_tests_name("cuda_sm90", tests, NULL, NULL);
    flash_attn_destroy(context);
    flash_attn_destroy(backward_context);
    flash_attn_destroy(portable_context);
    flash_attn_destroy(short_context);
    flash_attn_destroy(short_forward_context);
    return failed;
}
