/* Scalar conversions between float and the storage types, round to nearest even; and element access by dtype. For code
 * that is not hot: the reference, edges, appends. Vector tiers have their own. */
#ifndef FA_NUMERIC_H
#define FA_NUMERIC_H

#include "flashattn.h"

#include <math.h>
#include <string.h>

static inline float fa_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t fa_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float fa_float_of_bf16(uint16_t half) { return fa_float_of_bits((uint32_t)half << 16); }

static inline uint16_t fa_bf16_of_float(float value)
{
    uint32_t bits = fa_bits_of_float(value);
    if (value != value)
        return (uint16_t)((bits >> 16) | 0x40); /* quiet, so that dropping the low bits cannot make it Inf */
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float fa_float_of_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) /* Inf, NaN */
        return fa_float_of_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude < 0x400) { /* zero, subnormal: a multiple of 2^-24 */
        float value = (float)magnitude * 0x1p-24f;
        return sign ? -value : value;
    }
    return fa_float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
}

static inline uint16_t fa_f16_of_float(float value)
{
    uint32_t bits = fa_bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
        return (uint16_t)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) /* rounds to 2^16 or more */
        return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x38800000) { /* subnormal result: let the adder round to a multiple of 2^-24 */
        float rounded = fabsf(value) + 0.5f;
        return (uint16_t)(sign | (fa_bits_of_float(rounded) - fa_bits_of_float(0.5f)));
    }
    return (uint16_t)(sign | ((magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13));
}

static inline float fa_float_of_f8e4m3(uint8_t byte)
{
    uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7;
    float    value;
    if (exponent == 15 && mantissa == 7)
        value = NAN;
    else if (exponent == 0)
        value = (float)mantissa * 0x1p-9f;
    else
        value = fa_float_of_bits((exponent + 120) << 23 | mantissa << 20);
    return byte & 0x80 ? -value : value;
}

static inline size_t fa_dtype_bytes(flash_attn_dtype dtype)
{
    return dtype == FLASH_ATTN_F32 ? 4 : dtype == FLASH_ATTN_F8E4M3 ? 1 : 2;
}

static inline float fa_load(const void *data, int64_t index, flash_attn_dtype dtype)
{
    switch (dtype) {
    case FLASH_ATTN_F32: return ((const float *)data)[index];
    case FLASH_ATTN_F16: return fa_float_of_f16(((const uint16_t *)data)[index]);
    case FLASH_ATTN_BF16: return fa_float_of_bf16(((const uint16_t *)data)[index]);
    case FLASH_ATTN_F8E4M3: return fa_float_of_f8e4m3(((const uint8_t *)data)[index]);
    }
    return NAN;
}

/* Not for F8E4M3, which is never written. */
static inline void fa_store(void *data, int64_t index, flash_attn_dtype dtype, float value)
{
    switch (dtype) {
    case FLASH_ATTN_F32: ((float *)data)[index] = value; break;
    case FLASH_ATTN_F16: ((uint16_t *)data)[index] = fa_f16_of_float(value); break;
    case FLASH_ATTN_BF16: ((uint16_t *)data)[index] = fa_bf16_of_float(value); break;
    case FLASH_ATTN_F8E4M3: break;
    }
}

/* Address of an element of a view. */
static inline char *fa_at(const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    int64_t index = i0 * t->stride[0] + i1 * t->stride[1] + i2 * t->stride[2] + i3 * t->stride[3];
    return (char *)t->data + index * (int64_t)fa_dtype_bytes(t->dtype);
}

/* Bytes of a tensor that is read or written whole, 0 if it is not there; a dimension that broadcasts counts once. */
static inline double fa_tensor_bytes(const flash_attn_tensor *t)
{
    if (!t->data)
        return 0.0;
    double bytes = (double)fa_dtype_bytes(t->dtype);
    for (int i = 0; i < 4; i++)
        bytes *= t->stride[i] == 0 && t->shape[i] > 1 ? 1.0 : (double)t->shape[i];
    return bytes;
}

#endif
