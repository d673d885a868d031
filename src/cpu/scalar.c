/* Plain C for any processor. The vector is the compiler's: four floats, which it maps to what the base instruction set
 * has (SSE2 on x86-64) or takes apart. */
#include "cpu/cpu.h"

#define TIER_NAME "scalar"
#define TIER_ISA FLASH_ATTN_ISA_SCALAR
#define VL 4
#define MR 6
#define NV 2

typedef float   vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

#define V static inline __attribute__((always_inline))

V vf v_zero(void) { return (vf){0}; }
V vf v_set1(float x) { return (vf){x, x, x, x}; }
V vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
V void  v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
V vf    v_add(vf a, vf b) { return a + b; }
V vf    v_sub(vf a, vf b) { return a - b; }
V vf    v_mul(vf a, vf b) { return a * b; }
V vf    v_div(vf a, vf b) { return a / b; }
V vf    v_fma(vf a, vf b, vf c) { return a * b + c; }
V vf    v_pick(vi mask, vf x, vf y) { return (vf)((mask & (vi)x) | (~mask & (vi)y)); }
V vf    v_abs(vf x) { return (vf)((vi)x & 0x7FFFFFFF); }
V vf    v_max(vf a, vf b) { return v_pick(a > b, a, b); }
V vf    v_min(vf a, vf b) { return v_pick(a < b, a, b); }
V vf    v_less(vf a, vf b, vf x, vf y) { return v_pick(a < b, x, y); }
V vf    v_where_nonzero(vf p, vf x) { return (vf)((p != v_zero()) & (vi)x); }
V float v_reduce_add(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
V float v_reduce_max(vf x)
{
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

/* Whole part by the adder: 1.5 * 2^23 leaves no bits after the point. It rounds to nearest; one step down makes it
 * floor. A conversion to int would be undefined for NaN. */
V vf v_floor(vf x)
{
    const vf magic   = v_set1(12582912.0f);
    vf       rounded = (x + magic) - magic;
    return rounded - (vf)((rounded > x) & (vi)v_set1(1.0f));
}
V vf v_exp2_range(vf x)
{
    x = v_pick(x < v_set1(-127.0f), v_set1(-127.0f), x);
    return v_pick(x > v_set1(128.0f), v_set1(128.0f), x);
}
V vf v_fraction(vf x) { return x - v_floor(x); }
V vf v_scale2(vf p, vf x)
{
    /* The low bits of n + 127 + 2^23 are the exponent's; NaN in x is NaN in p, and stays whatever it is multiplied by.
     */
    vi exponent = (vi)(v_floor(x) + v_set1(8388608.0f + 127.0f));
    return p * (vf)((exponent & 0xFF) << 23);
}

V vf v_load_bf16(const uint16_t *p)
{
    return (vf){fa_float_of_bf16(p[0]), fa_float_of_bf16(p[1]), fa_float_of_bf16(p[2]), fa_float_of_bf16(p[3])};
}
V vf v_load_f16(const uint16_t *p)
{
    return (vf){fa_float_of_f16(p[0]), fa_float_of_f16(p[1]), fa_float_of_f16(p[2]), fa_float_of_f16(p[3])};
}
V void v_store_bf16(uint16_t *p, vf x)
{
    for (int n = 0; n < VL; n++)
        p[n] = fa_bf16_of_float(x[n]);
}
V void v_store_f16(uint16_t *p, vf x)
{
    for (int n = 0; n < VL; n++)
        p[n] = fa_f16_of_float(x[n]);
}
V void v_transpose(vf r[4])
{
    vf t[4];
    for (int n = 0; n < 4; n++)
        t[n] = (vf){r[0][n], r[1][n], r[2][n], r[3][n]};
    memcpy(r, t, sizeof t);
}

#include "cpu/kernels.inc"

const fa_kernels *fa_kernels_scalar(void) { return &table; }
