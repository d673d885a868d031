/* The PTX that the portable kernels use, one function an instruction, and nothing else: tests/emulator has the same in C++.
 * NVRTC gives no header, so everything is declared here. */
#ifndef FA_PTX_SM80_CUH
#define FA_PTX_SM80_CUH

#include "constants.h"

#include "args.h"

#define FA_DEVICE static __device__ __forceinline__

typedef unsigned short fa_u16;

/* ---- memory ---- */

FA_DEVICE unsigned shared_address(const void *pointer)
{
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
    return address;
}

/* Sixteen bytes, global to shared, past L1; zeros unless `valid`, and then `from` is not read. */
FA_DEVICE void copy_async(unsigned to, const void *from, bool valid)
{
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* As copy_async, of what is read once: it leaves L2 first. `to` must not be a sum with a number that all threads share: ptxas 13.0 makes an illegal
 * instruction of that (decision 0058). */
FA_DEVICE void copy_async_once(unsigned to, const void *from, bool valid)
{
    int                bytes = valid ? 16 : 0;
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}

/* The line that holds `from`, into L2. */
FA_DEVICE void prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/* At least as many as there are. */
FA_DEVICE unsigned multiprocessors()
{
    unsigned count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}

FA_DEVICE void copy_async_8(unsigned to, const void *from, bool valid)
{
    int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

FA_DEVICE void copy_async_4(unsigned to, const void *from, bool valid)
{
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Of all threads of the cluster: what they wrote before is seen behind it. Before Hopper a cluster is one block. */
FA_DEVICE void cluster_barrier()
{
#if FA_ARCH >= 90
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

FA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Wait until at most PENDING of the newest groups are in flight. */
template <int PENDING> FA_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

FA_DEVICE void shared_store(unsigned to, unsigned value)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

FA_DEVICE void shared_store(unsigned to, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

FA_DEVICE void shared_store(unsigned to, float value)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

FA_DEVICE uint4 shared_load_16(unsigned from)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

FA_DEVICE uint2 shared_load_8(unsigned from)
{
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

FA_DEVICE float2 shared_load_float2(unsigned from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

FA_DEVICE void shared_store(unsigned to, float2 v)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}

FA_DEVICE float shared_load_float(unsigned from)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}

FA_DEVICE float4 shared_load_float4(unsigned from)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
}

/* Add without a result. */
FA_DEVICE void reduce_add(float *to, float value)
{
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

/* Two neighbours; `to` is 8-byte aligned. For 9.0. */
FA_DEVICE void reduce_add_2(float *to, float a, float b)
{
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}

/* Four neighbours, at once where the chip can; `to` is 16-byte aligned. */
FA_DEVICE void reduce_add_4(float *to, float a, float b, float c, float d)
{
#if FA_ARCH >= 90
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
    reduce_add(to, a);
    reduce_add(to + 1, b);
    reduce_add(to + 2, c);
    reduce_add(to + 3, d);
#endif
}

/* ---- tensor cores ---- */

/* Four 8x8 blocks of 16-bit elements; lane l gives the address of row l % 8 of block l / 8. */
FA_DEVICE void load_matrix(unsigned (&r)[4], unsigned from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

FA_DEVICE void load_matrix_transposed(unsigned (&r)[4], unsigned from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

/* c += a b: a is 16x16 by rows, b 16x8 by columns. Lane 4 g + t holds of c: (g, 2t), (g, 2t + 1), (g + 8, 2t),
 * (g + 8, 2t + 1). */
FA_DEVICE void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
#if !FA_OPERANDS_F16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* ---- between warps and blocks ---- */

/* Barrier `id` (0 is that of __syncthreads) of so many threads. */
template <int THREADS> FA_DEVICE void barrier(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

FA_DEVICE int load_acquire(const int *from)
{
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

FA_DEVICE int or_acquire(int *to, int bits)
{
    int before;
    asm volatile("atom.acquire.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(bits) : "memory");
    return before;
}

FA_DEVICE void add_release(int *to, int x) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }

/* A launch that may begin before the one in front of it has ended (launch.c): that one lets it, and it waits until all is written. Before Hopper
 * launches follow each other. */
FA_DEVICE void let_next_launch_begin()
{
#if FA_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

FA_DEVICE void wait_for_launch_before()
{
#if FA_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- numbers ---- */

FA_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FA_DEVICE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FA_DEVICE float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats, rounded to nearest even, in one register; `low` has the lower address. */
FA_DEVICE unsigned pack_bf16(float low, float high)
{
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

FA_DEVICE unsigned pack_f16(float low, float high)
{
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

FA_DEVICE float float_of_f16(fa_u16 half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

/* Two float16 times two. */
FA_DEVICE unsigned multiply_f16(unsigned a, unsigned b)
{
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

#if FA_ARCH >= 89
/* Four E4M3 in one register as float16, the two of the lower addresses first. */
FA_DEVICE void f16_of_e4m3(unsigned (&pair)[2], unsigned four)
{
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(pair[0]), "=r"(pair[1])
        : "r"(four));
}
#endif

/* A 16-bit pair is Inf or NaN somewhere: acc turns NaN in that half and stays so. Start with 0. */
FA_DEVICE void note_nonfinite(unsigned &acc, unsigned pair)
{
#if !FA_OPERANDS_F16
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(pair), "r"(0u));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(pair), "r"(0u));
#endif
}

#endif
