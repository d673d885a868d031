/* Numbers for the cases: storage formats (written apart from the library's, so that each checks the other), random
 * values, element access. Uses the public header alone. */
#ifndef CASE_NUMBERS_H
#define CASE_NUMBERS_H

#include "flashattn.h"

#include <math.h>
#include <string.h>

/* ---- formats ---- */

/* An IEEE-like format with no more than 16 bits. E4M3 has no infinity: it saturates. */
typedef struct small_float {
    int exponent_bits, mantissa_bits;
} small_float;

static inline small_float small_float_of(flash_attn_dtype dtype)
{
    switch (dtype) {
    case FLASH_ATTN_F16: return (small_float){5, 10};
    case FLASH_ATTN_BF16: return (small_float){8, 7};
    default: return (small_float){4, 3};
    }
}

/* ldexp(1, exponent) where that is a normal number, as all here are; the library's call takes ten times as long. */
static inline double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double   value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The distance from 1 to the next number. */
static inline double dtype_epsilon(flash_attn_dtype dtype)
{
    return power_of_two(dtype == FLASH_ATTN_F32 ? -23 : -small_float_of(dtype).mantissa_bits);
}

static inline size_t dtype_bytes(flash_attn_dtype dtype)
{
    return dtype == FLASH_ATTN_F32 ? 4 : dtype == FLASH_ATTN_F8E4M3 ? 1 : 2;
}

static inline const char *dtype_name(flash_attn_dtype dtype)
{
    static const char *const names[] = {"f32", "f16", "bf16", "f8e4m3"};
    return names[dtype];
}

static inline uint32_t small_float_encode(double value, small_float format)
{
    int      width = format.exponent_bits + format.mantissa_bits;
    uint32_t sign = signbit(value) ? 1u << width : 0, infinity = ((1u << format.exponent_bits) - 1)
                                                                 << format.mantissa_bits;
    bool finite   = width == 7; /* E4M3: the top exponent holds numbers too */
    int  exponent = 0, lowest = 2 - (1 << (format.exponent_bits - 1));
    if (value != value)
        return finite ? 0x7F : infinity | 1u << (format.mantissa_bits - 1);
    if (value == 0)
        return sign;
    if (isinf(value))
        return sign | (finite ? 0x7E : infinity);
    uint64_t bits_of_value;
    memcpy(&bits_of_value, &value, sizeof value);
    exponent = (int)(bits_of_value >> 52 & 0x7FF) - 1023;
    exponent = exponent < lowest ? lowest : exponent;
    /* The significand as an integer; one that rounds up to the next power of two carries into the exponent by itself.
     */
    double significand = nearbyint(fabs(value) * power_of_two(format.mantissa_bits - exponent));
    double bits        = (exponent - lowest) * power_of_two(format.mantissa_bits) + significand;
    double largest     = finite ? 0x7E : infinity;
    return sign | (uint32_t)(bits > largest ? largest : bits);
}

static inline double small_float_decode(uint32_t bits, small_float format)
{
    int      width    = format.exponent_bits + format.mantissa_bits;
    int      exponent = (int)(bits >> format.mantissa_bits & ((1u << format.exponent_bits) - 1));
    uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
    int      lowest   = 2 - (1 << (format.exponent_bits - 1));
    double   value;
    if (width == 7 ? (bits & 0x7F) == 0x7F : exponent == (1 << format.exponent_bits) - 1)
        value = mantissa ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = mantissa * power_of_two(lowest - format.mantissa_bits);
    else
        value = (mantissa + power_of_two(format.mantissa_bits)) * power_of_two(lowest + exponent - 1 - format.mantissa_bits);
    return bits >> width & 1 ? -value : value;
}

/* value as dtype holds it */
static inline double round_to(double value, flash_attn_dtype dtype)
{
    if (dtype == FLASH_ATTN_F32)
        return (double)(float)value;
    return small_float_decode(small_float_encode(value, small_float_of(dtype)), small_float_of(dtype));
}

/* ---- element access ---- */

static inline char *element(const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    int64_t index = i0 * t->stride[0] + i1 * t->stride[1] + i2 * t->stride[2] + i3 * t->stride[3];
    return (char *)t->data + index * (int64_t)dtype_bytes(t->dtype);
}

static inline double get(const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    const char *at = element(t, i0, i1, i2, i3);
    uint16_t    half;
    float       single;
    switch (t->dtype) {
    case FLASH_ATTN_F32: memcpy(&single, at, 4); return (double)single;
    case FLASH_ATTN_F8E4M3: return small_float_decode((uint8_t)*at, small_float_of(t->dtype));
    default: memcpy(&half, at, 2); return small_float_decode(half, small_float_of(t->dtype));
    }
}

static inline void set(const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double value)
{
    char    *at = element(t, i0, i1, i2, i3);
    float    single;
    uint16_t half;
    switch (t->dtype) {
    case FLASH_ATTN_F32:
        single = (float)value;
        memcpy(at, &single, 4);
        break;
    case FLASH_ATTN_F8E4M3: *at = (char)small_float_encode(value, small_float_of(t->dtype)); break;
    default: half = (uint16_t)small_float_encode(value, small_float_of(t->dtype)); memcpy(at, &half, 2);
    }
}

/* ---- random numbers: SplitMix64 (Steele, Lea, Flood 2014) ---- */

static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z          = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z          = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* In [0, 1). */
static inline double random_unit(uint64_t *state) { return (double)(random_bits(state) >> 11) * 0x1p-53; }

/* From first to last, both included. */
static inline int random_int(uint64_t *state, int first, int last)
{
    return first + (int)(random_bits(state) % (uint64_t)((int64_t)last - first + 1));
}

/* Mean 0, variance 1: a sum of four uniform numbers. */
static inline double random_normal(uint64_t *state)
{
    double sum = 0;
    for (int n = 0; n < 4; n++)
        sum += random_unit(state);
    return (sum - 2) * 1.7320508075688772;
}

#endif
