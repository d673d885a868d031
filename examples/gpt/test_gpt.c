/* The example's own parts against plain sums in double, its gradients against finite differences, and the promises of
 * its pages: flash and reference attention train alike, threads change no bit, the KV cache changes no token. */
#include "gpt.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { CONTEXT = 24, BATCH = 3, ROWS = BATCH * CONTEXT };

static gpt_model *new_model(flash_attn_device_type attention, flash_attn_dtype dtype, int threads)
{
    gpt_config config = {.layers = 2, .width = 32, .heads = 2, .context = CONTEXT, .batch = BATCH, .seed = 7};
    config.threads         = threads;
    config.attention       = attention;
    config.attention_dtype = dtype;
    char       error[256]  = "";
    gpt_model *model       = gpt_create(&config, error);
    if (!model)
        fail_msg("%s", error);
    return model;
}

/* A text with something to learn: words drawn from a short list. */
static void fill_text(uint8_t *text, int count, uint64_t seed)
{
    static const char *const words[] = {"the ", "licence ", "of ", "this ", "work ", "is ", "free ", "and\n", "you "};
    for (int i = 0; i < count;) {
        const char *word = words[gpt_random(&seed) % 9];
        for (; *word && i < count; word++)
            text[i++] = (uint8_t)*word;
    }
}

static double loss_of(gpt_model *model, const uint8_t *text, bool backward)
{
    uint8_t tokens[ROWS], targets[ROWS];
    double  loss = 0;
    for (int b = 0; b < BATCH; b++) {
        memcpy(tokens + b * CONTEXT, text + b * (CONTEXT + 1), CONTEXT);
        memcpy(targets + b * CONTEXT, text + b * (CONTEXT + 1) + 1, CONTEXT);
    }
    if (!gpt_forward(model, tokens, BATCH, CONTEXT) ||
        !gpt_loss(model, tokens, targets, BATCH, CONTEXT, backward, &loss))
        fail_msg("%s", model->error);
    return loss;
}

static double train_step(gpt_model *model, int step)
{
    uint8_t   text[ROWS + BATCH];
    gpt_adamw adamw = {3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f};
    fill_text(text, sizeof text, (uint64_t)step + 1);
    double loss = loss_of(model, text, true);
    gpt_update(model, &adamw, 1.0);
    return loss;
}

/* ---- the parts ---- */

static void matmul_is_the_sum_of_products(void **state)
{
    (void)state;
    static const int sizes[][3] = {{1, 1, 1}, {1, 70, 300}, {7, 33, 5}, {97, 31, 257}, {6, 520, 64}, {200, 40, 513}};
    gpt_threads     *threads    = gpt_threads_create(3);
    uint64_t         random     = 5;
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (int turned = 0; turned < 4; turned++) {
            int    rows = sizes[n][0], cols = sizes[n][1], depth = sizes[n][2];
            float *a = malloc((size_t)(rows * depth) * sizeof *a), *b = malloc((size_t)(depth * cols) * sizeof *b);
            float *c = malloc((size_t)(rows * (cols + 3)) * sizeof *c);
            for (int i = 0; i < rows * depth; i++)
                a[i] = (float)gpt_uniform(&random) - 0.5f;
            for (int i = 0; i < depth * cols; i++)
                b[i] = (float)gpt_uniform(&random) - 0.5f;
            for (int i = 0; i < rows * (cols + 3); i++)
                c[i] = turned & 1 ? 2.0f : NAN; /* accumulate: onto 2; else what was there is not read */
            gpt_matrix left  = turned & 1 ? (gpt_matrix){a, 1, rows} : (gpt_matrix){a, depth, 1};
            gpt_matrix right = turned & 2 ? (gpt_matrix){b, 1, depth} : (gpt_matrix){b, cols, 1};
            assert_true(gpt_matmul(threads, rows, cols, depth, left, right, c, cols + 3, turned & 1));
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < cols; j++) {
                    double sum = turned & 1 ? 2.0 : 0.0;
                    for (int k = 0; k < depth; k++)
                        sum += (double)left.data[i * left.row + k * left.col] * right.data[k * right.row + j * right.col];
                    if (!(fabs(c[i * (cols + 3) + j] - sum) <= 2e-6 * sqrt(depth)))
                        fail_msg("[%d,%d] of %d x %d x %d: %g, expected %g", i, j, rows, cols, depth,
                                 c[i * (cols + 3) + j], sum);
                }
            free(a);
            free(b);
            free(c);
        }
    gpt_threads_destroy(threads);
}

#ifndef GPT_USE_BLAS /* a BLAS promises no such thing */
static void a_row_of_a_product_does_not_depend_on_the_others(void **state)
{
    (void)state;
    enum { SIDE = 200, DEPTH = 300 };
    static float a[SIDE * DEPTH], b[DEPTH * SIDE], all[SIDE * SIDE], one[SIDE];
    gpt_threads *two = gpt_threads_create(2), *single = gpt_threads_create(1);
    uint64_t     random = 6;
    for (int i = 0; i < SIDE * DEPTH; i++) {
        a[i] = (float)gpt_uniform(&random) - 0.5f;
        b[i] = (float)gpt_uniform(&random) - 0.5f;
    }
    assert_true(gpt_matmul(two, SIDE, SIDE, DEPTH, (gpt_matrix){a, DEPTH, 1}, (gpt_matrix){b, SIDE, 1}, all, SIDE, false));
    for (int row = 0; row < SIDE; row += 37) {
        gpt_matrix alone = {a + row * DEPTH, DEPTH, 1};
        assert_true(gpt_matmul(single, 1, SIDE, DEPTH, alone, (gpt_matrix){b, SIDE, 1}, one, SIDE, false));
        assert_memory_equal(one, all + row * SIDE, sizeof one);
    }
    gpt_threads_destroy(two);
    gpt_threads_destroy(single);
}
#endif

static void gelu_and_its_slope_follow_the_formula(void **state)
{
    (void)state;
    enum { COUNT = 4001 };
    static float x[COUNT], y[COUNT], slope[COUNT], gradient[COUNT];
    gpt_threads *threads = gpt_threads_create(2);
    for (int i = 0; i < COUNT; i++) {
        x[i] = slope[i] = (float)(i - COUNT / 2) * 0.005f;
        gradient[i]     = 2.0f;
    }
    gpt_gelu(threads, COUNT, slope, y);
    gpt_gelu_backward(threads, COUNT, slope, gradient);
    for (int i = 0; i < COUNT; i++) {
        double v = x[i], h = 1e-5, value[3];
        for (int n = 0; n < 3; n++) {
            double at = v + (n - 1) * h;
            value[n]  = 0.5 * at * (1.0 + tanh(sqrt(2.0 / 3.14159265358979) * (at + 0.044715 * at * at * at)));
        }
        assert_true(fabs(y[i] - value[1]) <= 1e-6 * fmax(1.0, fabs(v)));
        assert_true(fabs(slope[i] - (value[2] - value[0]) / (2 * h)) <= 2e-6);
        assert_true(gradient[i] == 2.0f * slope[i]);
    }
    gpt_threads_destroy(threads);
}

static void cross_entropy_is_minus_log_of_the_softmax(void **state)
{
    (void)state;
    static float  logits[2 * GPT_VOCABULARY], copy[2 * GPT_VOCABULARY], losses[2];
    const uint8_t targets[2] = {3, 250};
    gpt_threads  *threads    = gpt_threads_create(1);
    uint64_t      random     = 9;
    for (int i = 0; i < 2 * GPT_VOCABULARY; i++)
        copy[i] = logits[i] = (float)(20.0 * gpt_uniform(&random) - 10.0);
    double loss = gpt_cross_entropy(threads, 2, targets, logits, losses), expected = 0;
    for (int t = 0; t < 2; t++) {
        const float *row = copy + t * GPT_VOCABULARY;
        double       sum = 0;
        for (int i = 0; i < GPT_VOCABULARY; i++)
            sum += exp(row[i]);
        expected += (log(sum) - row[targets[t]]) / 2;
        for (int i = 0; i < GPT_VOCABULARY; i++)
            assert_true(fabs(logits[t * GPT_VOCABULARY + i] - (exp(row[i]) / sum - (i == targets[t])) / 2) <= 1e-6);
    }
    assert_true(fabs(loss - expected) <= 1e-5);
    gpt_threads_destroy(threads);
}

/* ---- the whole ---- */

/* The slope of the loss along `direction` over weights [begin, end), by central differences. */
static double slope_along(gpt_model *model, const uint8_t *text, const float *direction, int64_t begin, int64_t end)
{
    static float saved[1 << 17];
    const double step = 2e-2;
    double       loss[2];
    float       *weights = model->weights.block;
    assert_true(end - begin <= (int64_t)(sizeof saved / sizeof *saved));
    memcpy(saved, weights + begin, (size_t)(end - begin) * sizeof(float));
    for (int side = 0; side < 2; side++) {
        for (int64_t i = begin; i < end; i++)
            weights[i] = saved[i - begin] + (float)(side ? step : -step) * direction[i - begin];
        loss[side] = loss_of(model, text, false);
    }
    memcpy(weights + begin, saved, (size_t)(end - begin) * sizeof(float));
    return (loss[1] - loss[0]) / (2 * step);
}

/* Along its own direction a gradient's slope is its norm: but a gradient that lacks a part passes that. So also along a
 * random direction, which sees every number. */
static void check_gradient_of(gpt_model *model, const uint8_t *text, const char *name, const float *part, int64_t count)
{
    static float direction[1 << 17];
    int64_t      begin    = part - model->weights.block;
    const float *gradient = model->gradients.block + begin;
    double       norm     = gpt_norm(gradient, count);
    uint64_t     random   = 11;
    assert_true(norm > 1e-4);
    for (int kind = 0; kind < 2; kind++) {
        double expected = 0, length = 0;
        for (int64_t i = 0; i < count; i++) {
            direction[i] = kind == 0 ? gradient[i] : (float)gpt_uniform(&random) - 0.5f;
            length += (double)direction[i] * direction[i];
        }
        for (int64_t i = 0; i < count; i++) {
            direction[i] /= (float)sqrt(length);
            expected += (double)gradient[i] * direction[i];
        }
        double slope = slope_along(model, text, direction, begin, begin + count);
        if (!(fabs(slope - expected) <= 1e-2 * fabs(expected) + 1e-3 * norm))
            fail_msg("%s, direction %d: slope %g, gradient says %g (norm %g)", name, kind, slope, expected, norm);
    }
}

static void every_gradient_is_the_slope_of_the_loss(void **state)
{
    (void)state;
    gpt_model *model = new_model(FLASH_ATTN_CPU, FLASH_ATTN_F32, 2);
    int64_t    width = model->config.width;
    uint8_t    text[ROWS + BATCH];
    for (int step = 0; step < 30; step++)
        train_step(model, step);
    fill_text(text, sizeof text, 99);
    loss_of(model, text, true);
    const gpt_weights *w = &model->weights;
    check_gradient_of(model, text, "embedding", w->embedding, GPT_VOCABULARY * width);
    check_gradient_of(model, text, "head", w->head, GPT_VOCABULARY * width);
    check_gradient_of(model, text, "norm", w->norm, width);
    for (int l = 0; l < model->config.layers; l++) {
        const gpt_layer *layer = &w->layer[l];
        check_gradient_of(model, text, "norm1", layer->norm1, width);
        check_gradient_of(model, text, "qkv", layer->qkv, width * 3 * width);
        check_gradient_of(model, text, "projection", layer->projection, width * width);
        check_gradient_of(model, text, "norm2", layer->norm2, width);
        check_gradient_of(model, text, "up", layer->up, width * 4 * width);
        check_gradient_of(model, text, "down", layer->down, 4 * width * width);
    }
    gpt_destroy(model);
}

/* Two trainings that differ in attention alone, step by step. */
static void train_alike(flash_attn_dtype dtype, double tolerance)
{
    gpt_model *flash = new_model(FLASH_ATTN_CPU, dtype, 2), *reference = new_model(FLASH_ATTN_REFERENCE, dtype, 2);
    double     first = 0, last = 0, worst = 0;
    for (int step = 0; step < 60; step++) {
        double a = train_step(flash, step), b = train_step(reference, step);
        if (!(fabs(a - b) <= tolerance))
            fail_msg("step %d: flash %.9g, reference %.9g, allowed %g apart", step, a, b, tolerance);
        worst = fmax(worst, fabs(a - b));
        first = step == 0 ? a : first;
        last  = a;
    }
    print_message("largest distance in 60 steps %.2e, allowed %.0e; loss %.3f -> %.3f\n", worst, tolerance, first, last);
    assert_true(fabs(first - log(GPT_VOCABULARY)) < 0.2); /* and both have learned: */
    assert_true(last < 0.6 * first);
    gpt_destroy(flash);
    gpt_destroy(reference);
}

static void flash_and_reference_train_alike(void **state)
{
    (void)state;
    train_alike(FLASH_ATTN_F32, 1e-5);
}

static void flash_and_reference_train_alike_on_bfloat16(void **state)
{
    (void)state;
    train_alike(FLASH_ATTN_BF16, 5e-3);
}

#ifndef GPT_USE_BLAS
static void threads_do_not_change_a_bit_of_the_training(void **state)
{
    (void)state;
    gpt_model *one = new_model(FLASH_ATTN_CPU, FLASH_ATTN_F32, 1), *three = new_model(FLASH_ATTN_CPU, FLASH_ATTN_F32, 3);
    for (int step = 0; step < 10; step++)
        assert_true(train_step(one, step) == train_step(three, step));
    assert_memory_equal(one->weights.block, three->weights.block, (size_t)one->weights.count * sizeof(float));
    gpt_destroy(one);
    gpt_destroy(three);
}
#endif

/* Longer than the context, so that the cache also starts anew on the way. */
static void the_cache_writes_the_same_text_as_recomputing(void **state)
{
    (void)state;
    enum { PROMPT = 5, NEW = 3 * CONTEXT };
    gpt_model *model = new_model(FLASH_ATTN_CPU, FLASH_ATTN_F32, 2);
    gpt_cache *cache = gpt_cache_create(model);
    assert_non_null(cache);
    for (int step = 0; step < 60; step++)
        train_step(model, step);
    for (int greedy = 0; greedy < 2; greedy++) {
        uint8_t  with[PROMPT + NEW + 1] = "the l", without[PROMPT + NEW + 1] = "the l";
        uint64_t random_with = 3, random_without = 3;
        float    temperature = greedy ? 0.0f : 1.0f;
        assert_true(gpt_generate(model, cache, with, PROMPT, NEW, temperature, &random_with));
        assert_true(gpt_generate(model, NULL, without, PROMPT, NEW, temperature, &random_without));
        assert_string_equal((char *)with, (char *)without);
    }
    gpt_destroy(model);
}

/* One token at a time, in pieces, and all at once: the same logits. */
static void the_cache_gives_the_logits_of_recomputing(void **state)
{
    (void)state;
    static const int pieces[][4] = {{CONTEXT}, {1, CONTEXT - 1}, {7, 1, 9, CONTEXT - 17}};
    for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype += FLASH_ATTN_BF16) {
        gpt_model *model = new_model(FLASH_ATTN_CPU, (flash_attn_dtype)dtype, 2);
        gpt_cache *cache = gpt_cache_create(model);
        uint8_t    text[CONTEXT];
        float      expected[GPT_VOCABULARY], logits[GPT_VOCABULARY];
        for (int step = 0; step < 30; step++)
            train_step(model, step);
        fill_text(text, CONTEXT, 4);
        assert_true(gpt_recompute(model, text, CONTEXT, expected));
        for (int n = 0; n < 3; n++) {
            gpt_cache_reset(cache);
            for (int i = 0, fed = 0; i < 4 && pieces[n][i]; fed += pieces[n][i++])
                assert_true(gpt_cache_feed(model, cache, text + fed, pieces[n][i], logits));
            for (int i = 0; i < GPT_VOCABULARY; i++) /* bfloat16 rounds before and after the rotation */
                assert_true(fabsf(logits[i] - expected[i]) <= (dtype == FLASH_ATTN_F32 ? 1e-4f : 0.1f));
        }
        assert_false(gpt_cache_feed(model, cache, text, 1, logits)); /* full */
        gpt_destroy(model);
    }
}

/* test_gpt [--threads]: without what other tests here start as many threads as, and as long: for the sanitizers. */
int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--threads") == 0)
        cmocka_set_skip_filter("flash_and_reference*");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matmul_is_the_sum_of_products),
        cmocka_unit_test(gelu_and_its_slope_follow_the_formula),
        cmocka_unit_test(cross_entropy_is_minus_log_of_the_softmax),
        cmocka_unit_test(every_gradient_is_the_slope_of_the_loss),
        cmocka_unit_test(flash_and_reference_train_alike),
        cmocka_unit_test(flash_and_reference_train_alike_on_bfloat16),
        cmocka_unit_test(the_cache_writes_the_same_text_as_recomputing),
        cmocka_unit_test(the_cache_gives_the_logits_of_recomputing),
#ifndef GPT_USE_BLAS
        cmocka_unit_test(a_row_of_a_product_does_not_depend_on_the_others),
        cmocka_unit_test(threads_do_not_change_a_bit_of_the_training),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
