/* aarch64 Advanced SIMD, part of the architecture. */
#include "cpu/cpu.h"

#include <arm_neon.h>

#define TIER_NAME "neon"
#define TIER_ISA FLASH_ATTN_ISA_NEON
#define VL 4
#define MR 6
#define NV 4

typedef float32x4_t vf;

#define V static inline __attribute__((always_inline))

V vf   v_zero(void) { return vdupq_n_f32(0.0f); }
V vf   v_set1(float x) { return vdupq_n_f32(x); }
V vf   v_load(const float *p) { return vld1q_f32(p); }
V void v_store(float *p, vf x) { vst1q_f32(p, x); }
V vf   v_add(vf a, vf b) { return vaddq_f32(a, b); }
V vf   v_sub(vf a, vf b) { return vsubq_f32(a, b); }
V vf   v_mul(vf a, vf b) { return vmulq_f32(a, b); }
V vf   v_div(vf a, vf b) { return vdivq_f32(a, b); }
V vf   v_abs(vf x) { return vabsq_f32(x); }
V vf   v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
V vf   v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
V vf   v_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
V vf   v_less(vf a, vf b, vf x, vf y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
V vf   v_where_nonzero(vf p, vf x) { return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vceqzq_f32(p))); }
V float v_reduce_add(vf x) { return vaddvq_f32(x); }
V float v_reduce_max(vf x) { return vmaxnmvq_f32(x); }

V vf v_exp2_range(vf x)
{
    x = v_less(x, v_set1(-127.0f), v_set1(-127.0f), x);
    return v_less(v_set1(128.0f), x, v_set1(128.0f), x);
}
V vf v_fraction(vf x) { return vsubq_f32(x, vrndmq_f32(x)); }
V vf v_scale2(vf p, vf x)
{
    int32x4_t n = vaddq_s32(vcvtmq_s32_f32(x), vdupq_n_s32(127));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(n, 23)));
}

V vf   v_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
V void v_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
V vf   v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
/* fa_bf16_of_float on 4 lanes. */
V void v_store_bf16(uint16_t *p, vf x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16);
    uint32x4_t even    = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7FFF));
    uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, even), 16);
    rounded            = vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(high, vdupq_n_u32(0x40)));
    vst1_u16(p, vmovn_u32(rounded));
}

V void v_transpose(vf r[4])
{
    float32x4x2_t low = vtrnq_f32(r[0], r[1]), high = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
    r[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
    r[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
    r[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}

#include "cpu/kernels.inc"

const fa_kernels *fa_kernels_neon(void) { return &table; }
