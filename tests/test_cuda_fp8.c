/*
 * FP8 on a GPU, real or emulated, where the case list's tolerance of FP8, which is that of rounding P to it, would not see a
 * mistake; skipped, with the reason, where there is none.
 */
#include "case_gpu.h"
#include "case_numbers.h"
#include "harness.h"

#include <string.h>

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];

static void need_gpu(void) { skip_unless(memory != NULL, no_gpu); }

/* One problem in host memory, for the reference, and in device memory. */
typedef struct fp8_problem {
    flash_attn_problem host, device;
} fp8_problem;

static size_t bytes_of(const flash_attn_tensor *t)
{
    return (size_t)count_of(t) * dtype_bytes(t->dtype);
}

/* Contiguous, without contents. apart: bytes between 16-byte boundaries and the device's copy. */
static void make_tensor(flash_attn_tensor *host, flash_attn_tensor *device, flash_attn_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                        int64_t n3, size_t apart)
{
    *host      = (flash_attn_tensor){.dtype = dtype, .shape = {n0, n1, n2, n3}, .stride = {n1 * n2 * n3, n2 * n3, n3, 1}};
    *device    = *host;
    host->data = calloc(1, bytes_of(host) + 1);
    char *at   = gpu->alloc(bytes_of(host) + apart);
    assert_true(host->data && at);
    device->data = at + apart;
}

/* Heads of queries are twice those of keys. apart: see make_tensor. */
static fp8_problem make_problem(int64_t batch, int64_t queries, int64_t keys, int64_t heads_k, int64_t d, size_t apart)
{
    fp8_problem         p = {.host = {.device = {.type = FLASH_ATTN_REFERENCE}}, .device = {.device = {.type = FLASH_ATTN_CUDA}}};
    flash_attn_problem *h = &p.host, *g = &p.device;
    make_tensor(&h->q, &g->q, FLASH_ATTN_F8E4M3, batch, queries, 2 * heads_k, d, apart);
    make_tensor(&h->k, &g->k, FLASH_ATTN_F8E4M3, batch, keys, heads_k, d, apart);
    make_tensor(&h->v, &g->v, FLASH_ATTN_F8E4M3, batch, keys, heads_k, d, apart);
    make_tensor(&h->o, &g->o, FLASH_ATTN_F32, batch, queries, 2 * heads_k, d, 0);
    make_tensor(&h->lse, &g->lse, FLASH_ATTN_F32, batch, 2 * heads_k, queries, 1, 0);
    make_tensor(&h->descale.q, &g->descale.q, FLASH_ATTN_F32, batch, heads_k, 1, 1, 0);
    make_tensor(&h->descale.k, &g->descale.k, FLASH_ATTN_F32, batch, heads_k, 1, 1, 0);
    make_tensor(&h->descale.v, &g->descale.v, FLASH_ATTN_F32, batch, heads_k, 1, 1, 0);
    return p;
}

enum { TENSORS = 8 };
static void tensors_of(flash_attn_problem *p, flash_attn_tensor *tensor[TENSORS])
{
    flash_attn_tensor *all[TENSORS] = {&p->q, &p->k, &p->v, &p->descale.q, &p->descale.k, &p->descale.v, &p->o, &p->lse};
    memcpy(tensor, all, sizeof all);
}

static void free_problem(fp8_problem *p, size_t apart)
{
    flash_attn_tensor *host[TENSORS], *device[TENSORS];
    tensors_of(&p->host, host);
    tensors_of(&p->device, device);
    for (int n = 0; n < TENSORS; n++) {
        free(host[n]->data);
        gpu->free((char *)device[n]->data - (n < 3 ? apart : 0));
    }
}

/* Random numbers of mean 0, each so often (of a thousand) times 10, and descales of 0.25 to 1.25. */
static void fill_problem(fp8_problem *p, int outliers, uint64_t seed)
{
    flash_attn_tensor *tensor[TENSORS];
    tensors_of(&p->host, tensor);
    for (int n = 0; n < 6; n++)
        for (int64_t i = 0, count = count_of(tensor[n]); i < count; i++) {
            double x = n < 3 ? random_normal(&seed) * (random_int(&seed, 0, 999) < outliers ? 10 : 1) : 0.25 + random_unit(&seed);
            char  *at = (char *)tensor[n]->data + i * (int64_t)dtype_bytes(tensor[n]->dtype);
            set(&(flash_attn_tensor){.data = at, .dtype = tensor[n]->dtype}, 0, 0, 0, 0, x);
        }
}

/* On the device by this context, and what came out beside the reference's answer. */
typedef struct answer {
    float *o, *lse;
} answer;

static answer run_on_gpu(fp8_problem *p, flash_attn_context *context)
{
    flash_attn_tensor *host[TENSORS], *device[TENSORS];
    answer             got;
    tensors_of(&p->host, host);
    tensors_of(&p->device, device);
    for (int n = 0; n < 6; n++)
        assert_true(gpu->to_device(device[n]->data, host[n]->data, bytes_of(host[n])));
    assert_true(gpu->fill(p->device.o.data, 0xFF, bytes_of(&p->host.o)) && gpu->fill(p->device.lse.data, 0xFF, bytes_of(&p->host.lse)));
    expect_ok(flash_attn_forward(context, &p->device, NULL));
    got.o   = malloc(bytes_of(&p->host.o));
    got.lse = malloc(bytes_of(&p->host.lse));
    assert_true(got.o && got.lse);
    assert_true(gpu->to_host(got.o, p->device.o.data, bytes_of(&p->host.o)));
    assert_true(gpu->to_host(got.lse, p->device.lse.data, bytes_of(&p->host.lse)));
    return got;
}

static void free_answer(answer *a)
{
    free(a->o);
    free(a->lse);
}

/* Fails unless |x - expected| is at most `relative` times |expected| in the mean (L2). */
static void expect_l2(const float *x, const flash_attn_tensor *expected, double relative, const char *what)
{
    double error = 0, size = 0;
    for (int64_t i = 0, count = count_of(expected); i < count; i++) {
        double e = (double)((const float *)expected->data)[i];
        if (isinf(e) && (double)x[i] == e) /* lse of what sees nothing */
            continue;
        error += ((double)x[i] - e) * ((double)x[i] - e);
        size += e * e;
    }
    if (!(sqrt(error) <= relative * sqrt(size)))
        fail_msg("%s: relative L2 %.2e, expected at most %.1e", what, sqrt(error / size), relative);
}

static flash_attn_context *portable(void)
{
    flash_attn_context *context;
    expect_ok(flash_attn_create(&context, &(flash_attn_options){.kernel = "forward_sm80"}));
    return context;
}

/* One key: O is V, whatever the scores are. */
static void every_number_comes_out_as_it_is(void **state)
{
    (void)state;
    need_gpu();
    flash_attn_context *context = portable();
    for (size_t apart = 0; apart < 2; apart++) { /* aligned, and element by element */
        fp8_problem p = make_problem(1, 3, 1, 1, 256, apart);
        for (int n = 0; n < 256; n++)
            ((unsigned char *)p.host.v.data)[n] = (unsigned char)n;
        *(float *)p.host.descale.q.data = *(float *)p.host.descale.k.data = 1;
        *(float *)p.host.descale.v.data = 0.5f;
        answer got = run_on_gpu(&p, context);
        for (int i = 0; i < 6 * 256; i++) {
            double expected = 0.5 * small_float_decode((uint32_t)i % 256, small_float_of(FLASH_ATTN_F8E4M3));
            if (expected != expected ? got.o[i] == got.o[i] : (double)got.o[i] != expected)
                fail_msg("byte %d became %g, expected %g", i % 256, (double)got.o[i], expected);
        }
        free_answer(&got);
        free_problem(&p, apart);
    }
    flash_attn_destroy(context);
}

/* FP8 is exact in float16, so that only P is rounded, to float16. */
static void the_portable_kernel_is_as_exact_as_in_float16(void **state)
{
    (void)state;
    need_gpu();
    flash_attn_context *context = portable();
    static const int    shapes[][5] = { /* queries, keys, head_dim, causal, softcap */
        {130, 130, 64, 0, 0}, {130, 257, 128, 1, 0}, {1, 300, 128, 0, 0}, {65, 127, 256, 1, 0}, {40, 129, 80, 0, 0}, {70, 90, 64, 1, 2}};
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        fp8_problem p = make_problem(2, shapes[n][0], shapes[n][1], 2, shapes[n][2], 0);
        p.host.mask = p.device.mask = shapes[n][3] ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
        p.host.softcap = p.device.softcap = (float)shapes[n][4];
        fill_problem(&p, n == 1 ? 10 : 0, n + 1);
        expect_ok(flash_attn_forward(NULL, &p.host, NULL));
        answer got = run_on_gpu(&p, context);
        expect_l2(got.o, &p.host.o, 1e-3, "o");
        expect_l2(got.lse, &p.host.lse, 5e-6, "lse");
        free_answer(&got);
        free_problem(&p, 0);
    }
    flash_attn_destroy(context);
}

/* ---- Hopper's own kernel, which rounds P to FP8 ---- */

static void need_hopper(const fp8_problem *p)
{
    flash_attn_explanation explanation;
    flash_attn_device_info info;
    need_gpu();
    expect_ok(flash_attn_get_device_info(NULL, p->device.device, &info));
    if (strcmp(info.isa, "sm_90") != 0 || strstr(info.name, "emulated GPU")) {
        print_message("skipped: device 0 is %s, of %s\n", info.name, info.isa);
        skip();
    }
    expect_ok(flash_attn_explain(NULL, &p->device, FLASH_ATTN_FORWARD, &explanation));
    assert_string_equal(explanation.kernel, "forward_sm90");
}

/* Where V's mean is 0, P's rounding alone gives 0.027. Tiles' tails, descales below 0 and of 0, and the longest sums: with a mean of 1 what is lost of one adds up. */
static void hoppers_kernel_keeps_its_bounds(void **state)
{
    (void)state;
    need_gpu();
    static const struct {
        int             queries, keys, d;
        flash_attn_mask mask;
        float           descale_q, mean, relative;
        int             outliers;
    } shapes[] = {{130, 127, 128, FLASH_ATTN_NONE, 1, 0, 0.035f, 0},     {129, 128, 64, FLASH_ATTN_CAUSAL, 1, 0, 0.035f, 0},
                  {300, 129, 256, FLASH_ATTN_NONE, 1, 0, 0.035f, 0},     {131, 130, 128, FLASH_ATTN_CAUSAL, 1, 0, 0.035f, 1},
                  {200, 300, 64, FLASH_ATTN_CAUSAL, -1, 0, 0.035f, 0},   {200, 300, 128, FLASH_ATTN_NONE, 0, 0, 0.035f, 0},
                  {200, 2000, 128, FLASH_ATTN_WINDOW, 1, 0, 0.035f, 10}, {150, 9000, 64, FLASH_ATTN_NONE, 1, 1, 0.006f, 0},
                  {150, 9000, 128, FLASH_ATTN_NONE, 1, 1, 0.006f, 0},    {150, 9000, 256, FLASH_ATTN_CAUSAL, 1, 1, 0.006f, 0},
                  {300, 900, 128, FLASH_ATTN_NONE, 300, 0, 0.035f, 10},  {700, 900, 64, FLASH_ATTN_CAUSAL, 20, 0, 0.035f, 10},
                  {4100, 100, 256, FLASH_ATTN_CAUSAL, 1, 0, 0.035f, 0},  {4097, 70, 256, FLASH_ATTN_NONE, 1, 0, 0.035f, 0},
                  {1030, 1300, 128, FLASH_ATTN_NONE, 1, 1, 0.006f, 0},   {1025, 127, 128, FLASH_ATTN_NONE, 20, 0, 0.035f, 10},
                  {2060, 2100, 128, FLASH_ATTN_CAUSAL, 1, 1, 0.006f, 0}, {2300, 200, 128, FLASH_ATTN_CAUSAL, 20, 0, 0.035f, 10}};
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        fp8_problem p = make_problem(1, shapes[n].queries, shapes[n].keys, 1, shapes[n].d, 0);
        p.host.mask = p.device.mask = shapes[n].mask;
        p.host.window_left = p.device.window_left = shapes[n].mask == FLASH_ATTN_WINDOW ? 700 : 0;
        need_hopper(&p);
        fill_problem(&p, shapes[n].outliers, n + 7);
        for (int64_t i = 0; i < count_of(&p.host.v) && shapes[n].mean > 0; i++) {
            uint8_t *at = (uint8_t *)p.host.v.data + i;
            *at         = (uint8_t)small_float_encode(small_float_decode(*at, small_float_of(FLASH_ATTN_F8E4M3)) + (double)shapes[n].mean,
                                                      small_float_of(FLASH_ATTN_F8E4M3));
        }
        *(float *)p.host.descale.q.data *= shapes[n].descale_q;
        expect_ok(flash_attn_forward(NULL, &p.host, NULL));
        answer got = run_on_gpu(&p, NULL);
        char   what[60];
        snprintf(what, sizeof what, "o of shape %d", (int)n);
        expect_l2(got.o, &p.host.o, (double)shapes[n].relative, what);
        expect_l2(got.lse, &p.host.lse, 1e-3, "lse");
        free_answer(&got);
        free_problem(&p, 0);
    }
}

static void nan_of_v_reaches_only_who_sees_it(void **state)
{
    (void)state;
    need_gpu();
    for (int n = 0; n < 4; n++) { /* V turned round in the kernel, and ahead of it */
        const flash_attn_mask mask = n < 3 ? (flash_attn_mask)n : FLASH_ATTN_CAUSAL;
        const int             d    = n < 3 ? 64 : 256;
        fp8_problem           p    = make_problem(1, n < 3 ? 300 : 4100, 300, 1, d, 0);
        p.host.mask = p.device.mask = mask;
        p.host.window_left = p.device.window_left = mask == FLASH_ATTN_WINDOW ? 70 : 0;
        need_hopper(&p);
        fill_problem(&p, 0, 3);
        uint8_t *v = p.host.v.data;
        v[10 * d + 3] = v[131 * d + 5] = 0x7F, v[200 * d + 60] = v[299 * d] = 0xFF;
        expect_ok(flash_attn_forward(NULL, &p.host, NULL));
        answer got = run_on_gpu(&p, NULL);
        for (int64_t i = 0; i < count_of(&p.host.o); i++) {
            float expected = ((const float *)p.host.o.data)[i];
            if (isnan(expected) ? !isnan(got.o[i]) : !(fabsf(got.o[i] - expected) <= 0.1f))
                fail_msg("mask %d, row %d, column %d: %g, expected %g", (int)mask, (int)(i / (2 * d)), (int)(i % d), (double)got.o[i],
                         (double)expected);
        }
        free_answer(&got);
        free_problem(&p, 0);
    }
}

/* Packed, so that a tile's last rows are the next sequence's: NaN there must not come in. */
static void packed_sequences_stay_apart(void **state)
{
    (void)state;
    need_gpu();
    enum { SEQUENCES = 4, D = 128 };
    const int32_t begins[2][SEQUENCES + 1] = {{0, 200, 203, 333, 633}, {0, 200, 500, 629, 1014}};
    for (flash_attn_mask mask = FLASH_ATTN_NONE; mask <= FLASH_ATTN_WINDOW; mask++) {
        fp8_problem        p            = make_problem(1, begins[0][SEQUENCES], begins[1][SEQUENCES], 1, D, 0);
        flash_attn_tensor *descale[][2] = {{&p.host.descale.q, &p.device.descale.q}, {&p.host.descale.k, &p.device.descale.k}, {&p.host.descale.v, &p.device.descale.v}};
        int32_t           *on_gpu       = gpu->alloc(sizeof begins);
        assert_true(on_gpu && gpu->to_device(on_gpu, begins, sizeof begins));
        for (int n = 0; n < 3; n++) {
            free(descale[n][0]->data);
            gpu->free(descale[n][1]->data);
            make_tensor(descale[n][0], descale[n][1], FLASH_ATTN_F32, SEQUENCES, 1, 1, 1, 0);
        }
        p.host.batch = p.device.batch = SEQUENCES;
        p.host.max_seqlen_q = p.device.max_seqlen_q = 300;
        p.host.max_seqlen_k = p.device.max_seqlen_k = 385;
        p.host.mask = p.device.mask = mask;
        p.host.window_left = p.device.window_left = mask == FLASH_ATTN_WINDOW ? 70 : 0;
        p.host.cu_seqlens_q = begins[0], p.host.cu_seqlens_k = begins[1];
        p.device.cu_seqlens_q = on_gpu, p.device.cu_seqlens_k = on_gpu + SEQUENCES + 1;
        need_hopper(&p);
        fill_problem(&p, 0, 11);
        ((uint8_t *)p.host.v.data)[200 * D + 3] = ((uint8_t *)p.host.v.data)[629 * D + 70] = 0x7F;
        expect_ok(flash_attn_forward(NULL, &p.host, NULL));
        answer got = run_on_gpu(&p, NULL);
        for (int64_t i = 0; i < count_of(&p.host.o); i++) {
            float expected = ((const float *)p.host.o.data)[i];
            if (isnan(expected) ? !isnan(got.o[i]) : !(fabsf(got.o[i] - expected) <= 0.1f))
                fail_msg("mask %d, row %d, column %d: %g, expected %g", (int)mask, (int)(i / (2 * D)), (int)(i % D), (double)got.o[i], (double)expected);
        }
        expect_l2(got.lse, &p.host.lse, 1e-3, "lse");
        free_answer(&got);
        gpu->free(on_gpu);
        free_problem(&p, 0);
    }
}

int main(void)
{
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu    = case_gpu_get();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_comes_out_as_it_is),
        cmocka_unit_test(the_portable_kernel_is_as_exact_as_in_float16),
        cmocka_unit_test(hoppers_kernel_keeps_its_bounds),
        cmocka_unit_test(nan_of_v_reaches_only_who_sees_it),
        cmocka_unit_test(packed_sequences_stay_apart),
    };
    return cmocka_run_group_tests_name("cuda_fp8", tests, NULL, NULL);
}
