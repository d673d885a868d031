/* flash_attn_merge: results over parts of the keys become the result over all. */
#include "call.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { B = 2, SQ = 9, SK = 50, HQ = 4, HK = 2, D = 12, DV = 70, O = B * SQ * HQ * DV, LSE = B * HQ * SQ };

static const flash_attn_device devices[] = {{FLASH_ATTN_CPU, 0}, {FLASH_ATTN_REFERENCE, 0}};

static float number_at(int i) { return (float)((uint32_t)i * 2654435761u >> 16) / 32768.0f - 1.0f; }

static void fill(float *out, int count, int from)
{
    for (int i = 0; i < count; i++)
        out[i] = number_at(from + i);
}

typedef struct inputs {
    float q[B * SQ * HQ * D], k[B * SK * HK * D], v[B * SK * HK * DV], sinks[HQ];
} inputs;

/* Attention over keys [begin, end). */
static void attend(const inputs *in, int begin, int end, bool sinks, float *o, float *lse)
{
    flash_attn_problem p = {.device = {FLASH_ATTN_REFERENCE, 0}};
    p.q                  = (flash_attn_tensor){.data = (float *)in->q, .shape = {B, SQ, HQ, D}};
    p.k                  = (flash_attn_tensor){.data   = (float *)in->k + begin * HK * D,
                                               .shape  = {B, end - begin, HK, D},
                                               .stride = {SK * HK * D, HK * D, D, 1}};
    p.v                  = (flash_attn_tensor){.data   = (float *)in->v + begin * HK * DV,
                                               .shape  = {B, end - begin, HK, DV},
                                               .stride = {SK * HK * DV, HK * DV, DV, 1}};
    p.o                  = (flash_attn_tensor){.data = o};
    p.lse.data           = lse;
    if (sinks)
        p.sinks = (flash_attn_tensor){.data = (float *)in->sinks, .shape = {1, HQ, 1, 1}};
    assert_int_equal(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_OK);
}

static flash_attn_partial partial(void *o, float *lse, flash_attn_dtype dtype)
{
    return (flash_attn_partial){.o   = {.data = o, .dtype = dtype, .shape = {B, SQ, HQ, DV}},
                                .lse = {.data = lse, .shape = {B, HQ, SQ, 1}}};
}

static void assert_near(const float *got, const float *expected, int count, double tolerance)
{
    for (int i = 0; i < count; i++)
        if (!(fabs((double)got[i] - expected[i]) <= tolerance * fmax(1.0, fabs(expected[i]))))
            fail_msg("element %d is %.9g, expected %.9g", i, got[i], expected[i]);
}

static inputs *make_inputs(void)
{
    static inputs in;
    fill((float *)&in, (int)(sizeof in / sizeof(float)), 1);
    for (int i = 0; i < B * SQ * HQ * D; i++)
        in.q[i] *= 6.0f; /* parts differ much in weight */
    return &in;
}

static void parts_merge_into_the_whole(void **state)
{
    (void)state;
    const inputs *in = make_inputs();
    static float  o[4][O], lse[4][LSE], whole_o[O], whole_lse[LSE], merged_o[O], merged_lse[LSE];
    for (int sinks = 0; sinks < 2; sinks++) {
        const int cuts[] = {0, 7, 7, 30, SK}; /* one part is empty */
        attend(in, 0, SK, sinks, whole_o, whole_lse);
        flash_attn_partial parts[4], result = partial(merged_o, merged_lse, FLASH_ATTN_F32);
        for (int n = 0; n < 4; n++) {
            attend(in, cuts[n], cuts[n + 1], sinks && n == 2, o[n], lse[n]);
            parts[n] = partial(o[n], lse[n], FLASH_ATTN_F32);
        }
        for (int n = 0; n < 2; n++) {
            memset(merged_o, 0xFF, sizeof merged_o);
            memset(merged_lse, 0xFF, sizeof merged_lse);
            assert_int_equal(flash_attn_merge(NULL, devices[n], parts, 4, &result, NULL), FLASH_ATTN_OK);
            assert_near(merged_o, whole_o, O, 2e-6);
            assert_near(merged_lse, whole_lse, LSE, 1e-6);
        }
    }
}

static void a_ring_accumulates_in_place(void **state)
{
    (void)state;
    const inputs *in = make_inputs();
    static float  o[2][O], lse[2][LSE], whole_o[O], whole_lse[LSE];
    attend(in, 0, SK, false, whole_o, whole_lse);
    attend(in, 0, 10, false, o[0], lse[0]);
    flash_attn_partial parts[2] = {partial(o[0], lse[0], FLASH_ATTN_F32), partial(o[1], lse[1], FLASH_ATTN_F32)};
    for (int begin = 10; begin < SK; begin += 20) {
        attend(in, begin, begin + 20, false, o[1], lse[1]);
        assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &parts[0], NULL), FLASH_ATTN_OK);
    }
    assert_near(o[0], whole_o, O, 2e-6);
    assert_near(lse[0], whole_lse, LSE, 1e-6);
}

static void empty_parts_count_nothing_whatever_they_hold(void **state)
{
    (void)state;
    static float o[2][O], lse[2][LSE], merged_o[O], merged_lse[LSE];
    fill(o[0], O, 5);
    fill(lse[0], LSE, 6);
    for (int i = 0; i < O; i++)
        o[1][i] = i % 2 ? NAN : INFINITY;
    for (int i = 0; i < LSE; i++)
        lse[1][i] = -INFINITY;
    flash_attn_partial parts[2] = {partial(o[1], lse[1], FLASH_ATTN_F32), partial(o[0], lse[0], FLASH_ATTN_F32)};
    flash_attn_partial result   = partial(merged_o, merged_lse, FLASH_ATTN_F32);
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    assert_memory_equal(merged_o, o[0], sizeof merged_o); /* weight exactly 1 */
    assert_memory_equal(merged_lse, lse[0], sizeof merged_lse);

    parts[1] = parts[0]; /* all empty: 0 and -inf, not NaN */
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    for (int i = 0; i < O; i++)
        assert_true(merged_o[i] == 0.0f);
    for (int i = 0; i < LSE; i++)
        assert_true(merged_lse[i] == -INFINITY);
}

static void nan_stays_in_its_row(void **state)
{
    (void)state;
    static float o[2][O], lse[2][LSE], merged_o[O], merged_lse[LSE], clean_o[O];
    for (int n = 0; n < 2; n++) {
        fill(o[n], O, 5 + n);
        fill(lse[n], LSE, 8 + n);
    }
    flash_attn_partial parts[2] = {partial(o[0], lse[0], FLASH_ATTN_F32), partial(o[1], lse[1], FLASH_ATTN_F32)};
    flash_attn_partial result   = partial(clean_o, NULL, FLASH_ATTN_F32); /* lse is not wanted */
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    lse[1][3] = NAN; /* batch 0, head 0, query 3 */
    result    = partial(merged_o, merged_lse, FLASH_ATTN_F32);
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    for (int i = 0; i < O; i++) {
        bool same_row = i / DV == 3 * HQ;
        assert_true(same_row ? isnan(merged_o[i]) : merged_o[i] == clean_o[i]);
    }
    for (int i = 0; i < LSE; i++)
        assert_true(isnan(merged_lse[i]) == (i == 3));
    lse[0][3] = -INFINITY; /* beside an empty part too */
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    assert_true(isnan(merged_lse[3]) && isnan(merged_o[3 * HQ * DV]));
    lse[0][3] = NAN; /* in either order */
    lse[1][3] = -INFINITY;
    assert_int_equal(flash_attn_merge(NULL, devices[0], parts, 2, &result, NULL), FLASH_ATTN_OK);
    assert_true(isnan(merged_lse[3]) && isnan(merged_o[3 * HQ * DV]));
}

/* Parts of any dtype and stride: 16-bit inputs, result [b, h, s, d] in bfloat16. */
static void dtypes_and_strides_mix(void **state)
{
    (void)state;
    static float    o[O], lse[2][LSE], expected[O];
    static uint16_t half_o[O], merged[O];
    fill(o, O, 3);
    fill(lse[0], LSE, 4);
    fill(lse[1], LSE, 9);
    for (int i = 0; i < O; i++)
        half_o[i] = fa_f16_of_float(number_at(77 + i));
    flash_attn_partial parts[2] = {partial(o, lse[0], FLASH_ATTN_F32), partial(half_o, lse[1], FLASH_ATTN_F16)};
    flash_attn_partial result   = partial(merged, NULL, FLASH_ATTN_BF16);
    memcpy(result.o.stride, (int64_t[4]){HQ * SQ * DV, DV, SQ * DV, 1}, sizeof result.o.stride);
    assert_int_equal(flash_attn_merge(NULL, devices[1], parts, 2, &result, NULL), FLASH_ATTN_OK);
    for (int row = 0; row < B * SQ * HQ; row++) {
        int    b = row / HQ / SQ, i = row / HQ % SQ, h = row % HQ;
        double x = exp(lse[0][(b * HQ + h) * SQ + i]), y = exp(lse[1][(b * HQ + h) * SQ + i]);
        for (int c = 0; c < DV; c++) {
            int at       = row * DV + c;
            expected[at] = (float)((x * o[at] + y * fa_float_of_f16(half_o[at])) / (x + y));
            float got    = fa_float_of_bf16(merged[((b * HQ + h) * SQ + i) * DV + c]);
            assert_true(fabsf(got - expected[at]) <= fabsf(expected[at]) / 256 + 1e-6f);
        }
    }
}

static void one_part_is_copied_and_nothing_may_be_empty(void **state)
{
    (void)state;
    static float o[O], lse[LSE], merged_o[O], merged_lse[LSE];
    fill(o, O, 3);
    fill(lse, LSE, 4);
    flash_attn_partial part = partial(o, lse, FLASH_ATTN_F32), result = partial(merged_o, merged_lse, FLASH_ATTN_F32);
    assert_int_equal(flash_attn_merge(NULL, devices[0], &part, 1, &result, NULL), FLASH_ATTN_OK);
    assert_memory_equal(merged_o, o, sizeof o);
    assert_memory_equal(merged_lse, lse, sizeof lse);
    flash_attn_partial none = {.o = {.shape = {0, 5, 2, 4}}, .lse = {.shape = {0, 2, 5, 1}}}, nothing = none;
    assert_int_equal(flash_attn_merge(NULL, devices[0], &none, 1, &nothing, NULL), FLASH_ATTN_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_merge_into_the_whole),
        cmocka_unit_test(a_ring_accumulates_in_place),
        cmocka_unit_test(empty_parts_count_nothing_whatever_they_hold),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(dtypes_and_strides_mix),
        cmocka_unit_test(one_part_is_copied_and_nothing_may_be_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
