/*
 * flash_attn_merge and a ring's sums on CUDA: rows that merge.cu moves in pieces against the same rows one element
 * further, which it moves one by one, bit by bit, and against the host's.
 *
 *     test_cuda_merge [--shapes WORDS] [TESTS]     only such shapes; only such tests
 */
#include "check.h"
#include "case_gpu.h"
#include "harness.h"

enum { GUARD = 16, MOST_PARTS = 5, NAN_ROW = 3 };

typedef enum order { ROWS, HEADS_FIRST, PADDED } order;

#define F32 FLASH_ATTN_F32
#define F16 FLASH_ATTN_F16
#define BF16 FLASH_ATTN_BF16

static const struct shape {
    const char      *name;
    int64_t          b, s, h, d;
    int              num_parts;
    flash_attn_dtype part[MOST_PARTS], result;
    bool             lse, in_place; /* in_place: the result is part 0 */
    order            as;
} shapes[] = {
    {"a ring's merge", 2, 37, 3, 128, 2, {F32, F32}, F32, true, true, ROWS},
    {"a ring's last merge", 1, 40, 3, 128, 2, {F32, F32}, BF16, true, false, HEADS_FIRST},
    {"a conversion", 1, 33, 2, 64, 1, {F32}, F16, true, false, PADDED},
    {"four parts, 80 columns", 1, 21, 3, 80, 4, {F32, BF16, F16, F32}, F32, true, false, ROWS},
    {"three halves, 96 columns", 2, 19, 2, 96, 3, {F16, F16, BF16}, F16, true, true, PADDED},
    {"five parts", 1, 19, 2, 64, 5, {F32, F32, F32, F32, F32}, F32, true, false, ROWS},
    {"12 columns", 1, 9, 3, 12, 2, {F32, F32}, F32, true, true, ROWS},
    {"12 halves", 1, 9, 3, 12, 2, {BF16, F16}, BF16, true, false, HEADS_FIRST},
    {"4 columns", 3, 9, 5, 4, 2, {F32, F32}, BF16, true, false, ROWS},
    {"70 columns", 1, 9, 3, 70, 2, {F32, F32}, F32, true, true, ROWS},
    {"72 columns", 1, 40, 2, 72, 2, {F32, F32}, F32, true, true, HEADS_FIRST},
    {"576 columns", 1, 5, 2, 576, 2, {F32, F32}, BF16, true, false, ROWS},
    {"a copy", 2, 37, 3, 128, 1, {BF16}, BF16, false, false, ROWS},
    {"a copy of heads that lie apart", 2, 21, 3, 64, 1, {F16}, F16, false, false, HEADS_FIRST},
    {"a copy of 520 columns", 1, 9, 2, 520, 1, {BF16}, BF16, false, false, PADDED},
    {"a sum", 1, 37, 2, 128, 2, {F32, F32}, F32, false, true, ROWS},
    {"a sum that is rounded", 1, 37, 2, 192, 2, {F32, F32}, BF16, false, false, PADDED},
    {"zeros", 1, 37, 2, 128, 0, {F32}, F32, false, false, ROWS},
    {"few of one", 1, 1, 1, 8, 2, {F32, F32}, F16, true, false, ROWS},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static const case_memory *memory; /* NULL: there is no device */
static char               why_not[200];
static const char        *words = "";

/* What one merge reads and writes, on the host; device memory is made by each run. */
typedef struct buffer {
    flash_attn_tensor t; /* in host memory */
    char             *host;
    size_t            bytes;
} buffer;

static buffer buffer_of(const struct shape *c, flash_attn_dtype dtype, int shift, bool lse)
{
    int64_t d = c->d + (c->as == PADDED ? 8 : 0);
    buffer  m = {.t = {.dtype = dtype, .shape = {c->b, c->s, c->h, c->d}}};
    memcpy(m.t.stride,
           c->as == HEADS_FIRST ? (int64_t[4]){c->h * c->s * d, d, c->s * d, 1}
                                : (int64_t[4]){c->s * c->h * d, c->h * d, d, 1},
           sizeof m.t.stride);
    if (lse)
        m.t = (flash_attn_tensor){.shape = {c->b, c->h, c->s, 1}, .stride = {c->h * c->s, c->s, 1, 1}};
    m.bytes = (size_t)(c->b * c->s * c->h * d + 2 * GUARD) * dtype_bytes(dtype);
    m.host  = malloc(m.bytes);
    assert_non_null(m.host);
    memset(m.host, 0xFF, m.bytes);
    m.t.data = m.host + (size_t)(GUARD + shift) * dtype_bytes(dtype);
    return m;
}

/* Rows that a part has nothing for, whose O is anything; one whose LSE is NaN. */
static bool is_empty(int part, int64_t row) { return row % (part == 0 ? 5 : 7) == 0 || row == 2; }

static void fill_part(const struct shape *c, int n, buffer *o, buffer *lse)
{
    uint64_t random = 77 + (uint64_t)n;
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t i = 0; i < c->s; i++)
            for (int64_t h = 0; h < c->h; h++) {
                int64_t row   = (b * c->s + i) * c->h + h;
                bool    empty = c->lse && is_empty(n, row);
                for (int64_t d = 0; d < c->d; d++)
                    set(&o->t, b, i, h, d,
                        empty         ? (d % 2 ? (double)NAN : (double)INFINITY)
                        : d % 11 == 3 ? -0.0
                                      : random_normal(&random));
                if (c->lse)
                    set(&lse->t, b, h, i, 0,
                        row == NAN_ROW && n == 0 ? (double)NAN
                        : empty                  ? -(double)INFINITY
                                                 : 3 * random_normal(&random));
            }
}

/* The same memory on the device; its view there. */
static flash_attn_tensor uploaded(const buffer *m, char **device)
{
    flash_attn_tensor t = m->t;
    *device             = case_gpu_get()->alloc(m->bytes);
    assert_non_null(*device);
    assert_true(case_gpu_get()->to_device(*device, m->host, m->bytes));
    t.data = *device + ((char *)m->t.data - m->host);
    return t;
}

static flash_attn_status merge_on(bool on_device, const struct shape *c, const flash_attn_partial *parts,
                                  const flash_attn_partial *result)
{
    flash_attn_context *context = NULL;
    fa_exec             exec    = {0};
    if (!on_device) {
        fa_host_merge(parts, c->num_parts, result);
        return FLASH_ATTN_OK;
    }
    if (c->lse)
        return flash_attn_merge(NULL, (flash_attn_device){FLASH_ATTN_CUDA, 0}, parts, c->num_parts, result, NULL);
    expect_ok(fa_context_of(&context));
    return fa_cuda_merge(context, 0, parts, c->num_parts, result, &exec);
}

/* O and LSE of one merge; free their hosts. Fails if a byte beside them has changed. */
static void merged(const struct shape *c, int shift, bool on_device, buffer out[2])
{
    buffer             part[MOST_PARTS][2];
    char              *device[2 * MOST_PARTS + 2] = {0};
    flash_attn_partial parts[MOST_PARTS], result;
    int                used = 0;
    for (int n = 0; n < c->num_parts; n++) {
        part[n][0] = buffer_of(c, c->part[n], shift, false);
        part[n][1] = buffer_of(c, F32, 0, true);
        fill_part(c, n, &part[n][0], &part[n][1]);
        parts[n].o   = on_device ? uploaded(&part[n][0], &device[used++]) : part[n][0].t;
        parts[n].lse = on_device && c->lse ? uploaded(&part[n][1], &device[used++]) : part[n][1].t;
        if (!c->lse)
            parts[n].lse.data = NULL;
    }
    int first = used;
    for (int n = 0; n < 2; n++)
        out[n] = c->in_place ? part[0][n] : buffer_of(c, n ? F32 : c->result, n ? 0 : shift, n);
    result = (flash_attn_partial){out[0].t, out[1].t};
    if (on_device) {
        result = parts[0];
        if (!c->in_place) {
            result.o   = uploaded(&out[0], &device[used++]);
            result.lse = uploaded(&out[1], &device[used++]);
        }
        first = c->in_place ? 0 : first;
    }
    if (!c->lse)
        result.lse.data = NULL;
    expect_ok(merge_on(on_device, c, parts, &result));
    for (int n = 0; n < 1 + c->lse && on_device; n++)
        assert_true(case_gpu_get()->wait(NULL) &&
                    case_gpu_get()->to_host(out[n].host, device[first + n], out[n].bytes));
    for (int n = 0; n < used; n++)
        case_gpu_get()->free(device[n]);
    for (int n = 0; n < 2 * c->num_parts; n++)
        if (!c->in_place || n >= 2)
            free(part[n / 2][n % 2].host);
}

static void check_beside(const buffer *m)
{
    const flash_attn_tensor *t    = &m->t;
    char                    *seen = calloc(m->bytes, 1);
    size_t                   size = dtype_bytes(t->dtype);
    assert_non_null(seen);
    for (int64_t n = 0; n < count_of(t); n++) {
        int64_t at = n % t->shape[3] * t->stride[3] + n / t->shape[3] % t->shape[2] * t->stride[2] +
                     n / t->shape[3] / t->shape[2] % t->shape[1] * t->stride[1] +
                     n / t->shape[3] / t->shape[2] / t->shape[1] * t->stride[0];
        memset(seen + ((char *)t->data - m->host) + (size_t)at * size, 1, size);
    }
    for (size_t n = 0; n < m->bytes; n++)
        if (!seen[n] && (unsigned char)m->host[n] != 0xFF)
            fail_msg("byte %zu beside the result was written", n);
    free(seen);
}

/* As expect_close, but a NaN is as good as another. */
static void expect_near(const flash_attn_tensor *a, const flash_attn_tensor *b, double tolerance)
{
    double *x = values_of(a), *y = values_of(b);
    for (int64_t n = 0; n < count_of(a); n++)
        if (!(x[n] == y[n] || fabs(x[n] - y[n]) <= tolerance || (isnan(x[n]) && isnan(y[n]))))
            fail_msg("element %lld is %.9g, the host's %.9g", (long long)n, x[n], y[n]);
    free(x);
    free(y);
}

static void pieces_give_the_bits_of_elements(void **state)
{
    (void)state;
    skip_unless(memory != NULL, why_not);
    for (int n = 0; n < NUM_SHAPES; n++) {
        const struct shape *c = &shapes[n];
        buffer              pieces[2], elements[2], host[2];
        if (!strstr(c->name, words))
            continue;
        printf("%s\n", c->name);
        merged(c, 0, true, pieces);
        merged(c, 1, true, elements);
        merged(c, 0, false, host);
        for (int i = 0; i < 1 + c->lse; i++) {
            check_beside(&pieces[i]);
            check_beside(&elements[i]);
            expect_same_bits(&pieces[i].t, &elements[i].t, i ? "lse" : "o");
            expect_near(&pieces[i].t, &host[i].t, i || c->result == F32 ? 5e-6 : c->result == F16 ? 4e-3 : 3e-2);
        }
        for (int i = 0; i < 2; i++) {
            free(pieces[i].host);
            free(elements[i].host);
            free(host[i].host);
        }
    }
}

int main(int argc, char **argv)
{
    for (int n = 1; n < argc; n++)
        if (strcmp(argv[n], "--shapes") == 0 && n + 1 < argc)
            words = argv[++n];
        else
            cmocka_set_test_filter(argv[n]);
    memory                          = case_gpu_memory(0, why_not, sizeof why_not);
    const struct CMUnitTest tests[] = {cmocka_unit_test(pieces_give_the_bits_of_elements)};
    return cmocka_run_group_tests_name("cuda_merge", tests, NULL, NULL);
}
