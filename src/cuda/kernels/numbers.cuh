/* Numbers as the kernels hold them: the operands of the tensor cores, elements of any dtype, sums over a row's lanes. */
#ifndef FA_NUMBERS_CUH
#define FA_NUMBERS_CUH

#include "ptx_sm80.cuh"

/*
 * What the tensor cores multiply. float32 is cut into three bfloat16, 8 bits of it each: a product is then the sum of the
 * six products of pieces that matter, exact but for 2^-24 or so, in the accumulators' float32. A tile of float32 is three
 * tiles of bfloat16, the planes, one behind the other. FP8 is multiplied as float16, which holds every E4M3 exactly.
 */
#if FA_DTYPE == FA_F32
typedef float fa_element;
#elif FA_DTYPE == FA_F8E4M3
typedef unsigned char fa_element;
#else
typedef fa_u16 fa_element;
#endif
constexpr int OPERAND = FA_OPERANDS_F16 ? FA_F16 : FA_BF16;
constexpr int PLANES  = FA_DTYPE == FA_F32 ? 3 : 1;

#define FA_LOG2E 1.4426950408889634f
#define FA_LN2 0.6931471805599453f

FA_DEVICE float float_of_bits(unsigned bits) { return __int_as_float((int)bits); }
FA_DEVICE float infinity() { return float_of_bits(0x7F800000u); }

template <int DTYPE> FA_DEVICE unsigned pack(float low, float high)
{
    if constexpr (DTYPE == FA_BF16)
        return pack_bf16(low, high);
    else
        return pack_f16(low, high);
}

FA_DEVICE float float_of_bf16(fa_u16 half) { return float_of_bits((unsigned)half << 16); }

template <int DTYPE> FA_DEVICE float2 unpack(unsigned packed)
{
    if constexpr (DTYPE == FA_BF16)
        return make_float2(float_of_bits(packed << 16), float_of_bits(packed & 0xFFFF0000u));
    else
        return make_float2(float_of_f16((fa_u16)packed), float_of_f16((fa_u16)(packed >> 16)));
}

/* Two neighbours as operands, a register a plane. */
FA_DEVICE void pack_planes(unsigned (&plane)[PLANES], float low, float high)
{
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        plane[p] = pack<OPERAND>(low, high);
        if (p + 1 < PLANES) {
            float2 kept = unpack<OPERAND>(plane[p]);
            low -= kept.x;
            high -= kept.y;
        }
    }
}

#if FA_ARCH < 89
/* As 8.9's instruction does it. With its bits in place an E4M3 is a float16 2^8 times too small, and its NaN is 480, which no
 * number is: one bit more makes that NaN again. */
FA_DEVICE void f16_of_e4m3(unsigned (&pair)[2], unsigned four)
{
#pragma unroll
    for (int n = 0; n < 2; n++) {
        unsigned x = (four >> 16 * n & 0xFFu) << 8 | (four >> 16 * n & 0xFF00u) << 16, size = x & 0x7F007F00u;
        pair[n]    = multiply_f16((x & 0x80008000u) | size >> 1, 0x5C005C00u) | (size + 0x01000100u & 0x80008000u) >> 2;
    }
}
#endif

FA_DEVICE float float_of_e4m3(unsigned char byte)
{
    unsigned pair[2];
    f16_of_e4m3(pair, byte);
    return float_of_f16((fa_u16)pair[0]);
}

/* An element of any dtype, FP8 where that is FA_DTYPE; index in elements. */
FA_DEVICE float load_element(const void *data, fa_i64 index, int dtype)
{
    if (FA_DTYPE == FA_F8E4M3 && dtype == FA_F8E4M3)
        return float_of_e4m3(((const unsigned char *)data)[index]);
    if (dtype == FA_F32)
        return ((const float *)data)[index];
    fa_u16 half = ((const fa_u16 *)data)[index];
    return dtype == FA_BF16 ? float_of_bf16(half) : float_of_f16(half);
}

FA_DEVICE void store_element(void *data, fa_i64 index, int dtype, float value)
{
    if (dtype == FA_F32)
        ((float *)data)[index] = value;
    else
        ((fa_u16 *)data)[index] = (fa_u16)(dtype == FA_BF16 ? pack_bf16(value, 0.0f) : pack_f16(value, 0.0f));
}

/* Four neighbours of a row that lies in one piece, times `scale`; the first is a multiple of four. */
FA_DEVICE void store_four(void *data, fa_i64 index, int dtype, float4 v, float scale)
{
    float a = v.x * scale, b = v.y * scale, c = v.z * scale, d = v.w * scale;
    if (dtype == FA_F32)
        *(float4 *)((float *)data + index) = make_float4(a, b, c, d);
    else
        *(uint2 *)((fa_u16 *)data + index) = dtype == FA_BF16 ? make_uint2(pack_bf16(a, b), pack_bf16(c, d)) : make_uint2(pack_f16(a, b), pack_f16(c, d));
}

/* a / b of numbers that are not negative; a division is a hundred cycles. */
FA_DEVICE int quotient(int a, int b)
{
    if (a < b)
        return 0;
    return a / b;
}

FA_DEVICE bool finite(float x) { return (__float_as_int(x) & 0x7F800000) != 0x7F800000; }
FA_DEVICE bool is_minus_0(float x) { return __float_as_int(x) == (int)0x80000000; }

/* Of a query that sees nothing, or for which a bias is -inf everywhere, P is 0: its LSE of -inf becomes inf. */
FA_DEVICE float lse_log2(float lse) { return lse == -infinity() ? infinity() : lse * FA_LOG2E; }

/* Inf and NaN among two neighbours become zeros. */
FA_DEVICE unsigned without_nonfinite(unsigned pair)
{
    float2 e = unpack<OPERAND>(pair);
    return pair & ((finite(e.x) ? 0xFFFFu : 0u) | (finite(e.y) ? 0xFFFF0000u : 0u));
}

/* Over the four lanes that share a row of an accumulator. */
FA_DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

/* Over LANES neighbours, a power of two; each gets it. */
template <int LANES> FA_DEVICE float sum_of_lanes(float x)
{
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

FA_DEVICE float quad_sum(float x) { return sum_of_lanes<4>(x); }

#endif
