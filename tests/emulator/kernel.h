/*
 * CUDA C++ for the host's compiler: what the kernels' text uses of the language, included in front of it by the emulated
 * NVRTC (nvrtc.c). Threads are fibers of one thread of the host (cuda.c); what a warp does together happens when its last
 * lane has come.
 */
#ifndef EMULATOR_KERNEL_H
#define EMULATOR_KERNEL_H

#include <math.h> /* C's own: C++'s take the compiler as long as the rest of a kernel */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define __CUDACC_RTC__ 1
#define __noinline__ __attribute__((noinline))
#define __device__
#define __global__
#define __constant__ const __attribute__((used))
#define __shared__ static __attribute__((section("emulated_shared"))) /* the driver exchanges it where blocks take turns */
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2  make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4  make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

/* Set by the driver before each fiber runs. */
extern "C" emulator_state emulator;
emulator_state            emulator;

#define threadIdx emulator.thread
#define blockIdx emulator.block
#define gridDim emulator.grid

template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }

template <class TO, class FROM> static inline TO bits_as(FROM from)
{
    static_assert(sizeof(TO) == sizeof from, "the same bits");
    TO to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float    __int_as_float(int x) { return bits_as<float>(x); }
static inline int      __float_as_int(float x) { return bits_as<int>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline int      __popc(unsigned x) { return __builtin_popcount(x); }
static inline int      __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
static inline float    __fdividef(float a, float b) { return a / b; }
template <class T> static inline T __ldcg(const T *from) { return *from; }
template <class T> static inline T __ldcs(const T *from) { return *from; }

/* Bytes of b and a, numbered 0 to 7 from a's lowest. */
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which)
{
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned           result = 0;
    for (int n = 0; n < 4; n++)
        result |= (unsigned)(both >> 8 * (which >> 4 * n & 7) & 255) << 8 * n;
    return result;
}

static inline void __threadfence() {}
static inline void __syncthreads() { emulator.barrier(0, emulator.threads); }
static inline int  __syncthreads_or(int x) { return emulator.barrier_or(x); }
static inline int  atomicOr(int *to, int value) { return __atomic_fetch_or(to, value, __ATOMIC_RELAXED); }
static inline int  atomicAdd(int *to, int value)
{
    int before = *to;
    *to += value;
    return before;
}

/* ---- what a warp does together: each lane brings a record, the last one has the work done for all ---- */

template <class RECORD> static inline void together(void (*work)(RECORD *lane[32]), RECORD *mine)
{
    emulator.meet((void (*)(void **))work, mine);
}

struct exchange {
    unsigned long long value;
    unsigned           from;
    unsigned long long result;
};

static void exchange_all(exchange *lane[32])
{
    for (int l = 0; l < 32; l++)
        lane[l]->result = lane[lane[l]->from % 32]->value;
}

template <class T> static inline T __shfl_sync(unsigned, T value, int from)
{
    exchange mine = {0, (unsigned)from, 0};
    memcpy(&mine.value, &value, sizeof value);
    together(exchange_all, &mine);
    memcpy(&value, &mine.result, sizeof value);
    return value;
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits)
{
    return __shfl_sync(mask, value, (int)(emulator.thread.x % 32) ^ bits);
}

static void ballot_of_all(exchange *lane[32])
{
    unsigned ballot = 0;
    for (int l = 0; l < 32; l++)
        ballot |= (unsigned)(lane[l]->value != 0) << l;
    for (int l = 0; l < 32; l++)
        lane[l]->result = ballot;
}

static inline unsigned __ballot_sync(unsigned, int value)
{
    exchange mine = {value != 0, 0, 0};
    together(ballot_of_all, &mine);
    return (unsigned)mine.result;
}

static inline int __any_sync(unsigned, int value) { return __ballot_sync(~0u, value) != 0; }

static inline void __syncwarp() { __any_sync(~0u, 0); }

/* ---- the driver's way in: the entry, with its parameters by value ---- */

template <size_t... N> struct numbers {};
template <size_t COUNT, size_t... N> struct numbers_below : numbers_below<COUNT - 1, COUNT - 1, N...> {};
template <size_t... N> struct numbers_below<0, N...> {
    using type = numbers<N...>;
};

template <class... PARAMETER, size_t... N> static void call_with(void (*kernel)(PARAMETER...), const void *const *parameter, numbers<N...>)
{
    kernel(*(const PARAMETER *)parameter[N]...);
}

template <class... PARAMETER> static void call(void (*kernel)(PARAMETER...), const void *const *parameter)
{
    call_with(kernel, parameter, typename numbers_below<sizeof...(PARAMETER)>::type());
}

/* Of parameter n; 0: there is none. */
template <class... PARAMETER> static size_t parameter_bytes(void (*)(PARAMETER...), unsigned n)
{
    const size_t bytes[] = {sizeof(PARAMETER)..., 0};
    return n < sizeof...(PARAMETER) ? bytes[n] : 0;
}

/* At the end of the text. */
#define EMULATOR_ENTRY(name)                                                                                           \
    extern "C" void   emulator_run(const void *const *parameter) { call(name, parameter); }                           \
    extern "C" size_t emulator_parameter_bytes(unsigned n) { return parameter_bytes(name, n); }                       \
    extern "C" char  *emulator_statics(size_t *bytes)                                                                  \
    {                                                                                                                  \
        *bytes = (size_t)(__stop_emulated_shared - __start_emulated_shared);                                           \
        return __start_emulated_shared;                                                                                \
    }

/* Where what is __shared__ lies; a kernel may have none. */
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[], __stop_emulated_shared[];

#endif
