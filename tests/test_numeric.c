/* The library's number formats against those of the cases, which are written by another rule (frexp and nearbyint). */
#include "harness.h"
#include "numeric.h"

static uint16_t library_encode(flash_attn_dtype dtype, float value)
{
    uint16_t half[2] = {0}; /* room for a float, so that the compiler sees no way out of it */
    fa_store(half, 0, dtype, value);
    return half[0];
}

static void expect_same_code(flash_attn_dtype dtype, float value)
{
    uint32_t mine = small_float_encode((double)value, small_float_of(dtype)), its = library_encode(dtype, value);
    if (mine != its)
        fail_msg("%s of %a: %04x and %04x", dtype_name(dtype), (double)value, mine, its);
}

static void every_16_bit_number_is_read_and_written_alike(void **state)
{
    (void)state;
    for (int dtype = FLASH_ATTN_F16; dtype <= FLASH_ATTN_BF16; dtype++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            uint16_t half[2] = {(uint16_t)bits};
            double   mine    = small_float_decode(bits, small_float_of((flash_attn_dtype)dtype));
            float    its     = fa_load(half, 0, (flash_attn_dtype)dtype);
            if (isnan(mine)) {
                assert_true(isnan(its));
                uint16_t back[2] = {library_encode((flash_attn_dtype)dtype, its)};
                assert_true(isnan(fa_load(back, 0, (flash_attn_dtype)dtype)));
                continue;
            }
            assert_true(mine == (double)its && !signbit(mine) == !signbit(its));
            assert_int_equal(library_encode((flash_attn_dtype)dtype, its), bits);
        }
}

/* The middle between two neighbours goes to the even one, what lies a hair beside it to the nearer one. */
static void rounding_is_to_nearest_even(void **state)
{
    (void)state;
    for (int dtype = FLASH_ATTN_F16; dtype <= FLASH_ATTN_BF16; dtype++)
        for (uint32_t bits = 0; bits < 0x7FFF; bits++) {
            small_float f = small_float_of((flash_attn_dtype)dtype);
            double      a = small_float_decode(bits, f), b = small_float_decode(bits + 1, f);
            if (!isfinite(a) || !isfinite(b))
                continue;
            float middle = (float)((a + b) / 2);
            expect_same_code((flash_attn_dtype)dtype, middle);
            expect_same_code((flash_attn_dtype)dtype, -middle);
            expect_same_code((flash_attn_dtype)dtype, nextafterf(middle, 0.0f));
            expect_same_code((flash_attn_dtype)dtype, nextafterf(middle, INFINITY));
        }
}

static void numbers_too_large_become_infinite_at_the_right_place(void **state)
{
    (void)state;
    static const float edges[] = {65504, 65519.99f, 65520, 65536, 1e38f, 3.3895e38f, 3.39e38f, 3.4028235e38f, INFINITY};
    for (size_t n = 0; n < sizeof edges / sizeof edges[0]; n++)
        for (int dtype = FLASH_ATTN_F16; dtype <= FLASH_ATTN_BF16; dtype++) {
            expect_same_code((flash_attn_dtype)dtype, edges[n]);
            expect_same_code((flash_attn_dtype)dtype, -edges[n]);
        }
}

static void random_numbers_are_rounded_alike(void **state)
{
    (void)state;
    uint64_t random = 71;
    for (int n = 0; n < 2000000; n++) {
        float value = fa_float_of_bits((uint32_t)random_bits(&random));
        if (isnan(value))
            continue;
        expect_same_code(FLASH_ATTN_F16, value);
        expect_same_code(FLASH_ATTN_BF16, value);
    }
}

static void every_fp8_number_is_read_alike(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 256; bits++) {
        uint8_t byte = (uint8_t)bits;
        double  mine = small_float_decode(bits, small_float_of(FLASH_ATTN_F8E4M3));
        float   its  = fa_load(&byte, 0, FLASH_ATTN_F8E4M3);
        assert_true(isnan(mine) ? isnan(its) : mine == (double)its && !signbit(mine) == !signbit(its));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_16_bit_number_is_read_and_written_alike),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(numbers_too_large_become_infinite_at_the_right_place),
        cmocka_unit_test(random_numbers_are_rounded_alike),
        cmocka_unit_test(every_fp8_number_is_read_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
