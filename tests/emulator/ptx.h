/*
 * ptx_sm80.cuh in C++, for the emulated GPU: the same functions, as the PTX ISA manual describes the instructions. Reads and
 * writes of shared memory are checked; an asynchronous copy lands only where it is waited for, and until then the NaN lies
 * there that a block begins with, so that a missing wait shows.
 */
#ifndef FA_PTX_SM80_CUH
#define FA_PTX_SM80_CUH

#include "constants.h"

#include "args.h"

#define FA_DEVICE static inline

typedef unsigned short fa_u16;

/* ---- memory ---- */

FA_DEVICE unsigned shared_address(const void *pointer) { return (unsigned)((const char *)pointer - emulator.shared); }

FA_DEVICE char *shared_at(unsigned address, unsigned bytes)
{
    if (address % bytes != 0 || address > (unsigned)emulator.shared_bytes || bytes > (unsigned)emulator.shared_bytes - address)
        emulator.fail("shared memory is used past its end, or not aligned");
    return emulator.shared + address;
}

/* A thread's copies that it has not waited for, the oldest first, and of which group each is. */
struct pending_copies {
    struct {
        unsigned    to, bytes;
        const void *from; /* NULL: zeros */
        int         group;
    } copy[512];
    int      count, group; /* group: the one that is open */
    unsigned run;          /* of the cluster that they are of */
};
static pending_copies copies[EMULATOR_MAX_FIBERS];

FA_DEVICE void later(unsigned to, const void *from, unsigned bytes, bool valid)
{
    pending_copies &mine = copies[emulator.fiber];
    if (mine.run != emulator.run) { /* a block need not wait for its last ones */
        mine.run   = emulator.run;
        mine.count = 0;
    }
    if (valid && (size_t)from % bytes != 0)
        emulator.fail("an asynchronous copy from an address that is not aligned");
    if (mine.count == 512)
        emulator.fail("more asynchronous copies than the emulator keeps");
    mine.copy[mine.count++] = {to, bytes, valid ? from : NULL, mine.group};
}

FA_DEVICE void copy_async(unsigned to, const void *from, bool valid) { later(to, from, 16, valid); }
FA_DEVICE void copy_async_once(unsigned to, const void *from, bool valid) { copy_async(to, from, valid); }
FA_DEVICE void prefetch(const void *from) { *(const volatile char *)from; }
FA_DEVICE unsigned multiprocessors() { return 1; }
FA_DEVICE void copy_async_8(unsigned to, const void *from, bool valid) { later(to, from, 8, valid); }
FA_DEVICE void copy_async_4(unsigned to, const void *from, bool valid) { later(to, from, 4, valid); }
FA_DEVICE void cluster_barrier() { emulator.cluster_barrier(); }
FA_DEVICE void copy_commit() { copies[emulator.fiber].group++; }

template <int PENDING> FA_DEVICE void copy_wait()
{
    pending_copies &mine = copies[emulator.fiber];
    int             done = 0;
    for (; mine.run == emulator.run && done < mine.count && mine.copy[done].group < mine.group - PENDING; done++) {
        char *to = shared_at(mine.copy[done].to, mine.copy[done].bytes);
        if (mine.copy[done].from)
            memcpy(to, mine.copy[done].from, mine.copy[done].bytes);
        else
            memset(to, 0, mine.copy[done].bytes);
    }
    mine.count -= done;
    memmove(mine.copy, mine.copy + done, sizeof mine.copy[0] * (size_t)mine.count);
}

FA_DEVICE void wrote(unsigned to, unsigned bytes)
{
    if (emulator.wrote)
        emulator.wrote(to, bytes);
}

template <class T> FA_DEVICE void store_shared(unsigned to, T value)
{
    memcpy(shared_at(to, sizeof value), &value, sizeof value);
    wrote(to, sizeof value);
}
FA_DEVICE void shared_store(unsigned to, unsigned value) { store_shared(to, value); }
FA_DEVICE void shared_store(unsigned to, uint4 value) { store_shared(to, value); }
FA_DEVICE void shared_store(unsigned to, float value) { store_shared(to, value); }
FA_DEVICE void shared_store(unsigned to, float2 value) { store_shared(to, value); }

template <class T> FA_DEVICE T load_shared(unsigned from)
{
    T value;
    memcpy(&value, shared_at(from, sizeof value), sizeof value);
    return value;
}
FA_DEVICE uint4  shared_load_16(unsigned from) { return load_shared<uint4>(from); }
FA_DEVICE uint2  shared_load_8(unsigned from) { return load_shared<uint2>(from); }
FA_DEVICE float  shared_load_float(unsigned from) { return load_shared<float>(from); }
FA_DEVICE float4 shared_load_float4(unsigned from) { return load_shared<float4>(from); }
FA_DEVICE float2 shared_load_float2(unsigned from) { return load_shared<float2>(from); }

FA_DEVICE void let_next_launch_begin() {} /* launches follow each other */
FA_DEVICE void wait_for_launch_before() {}

FA_DEVICE void reduce_add(float *to, float value) { *to += value; }

FA_DEVICE void reduce_add_2(float *to, float a, float b)
{
    if ((size_t)to % 8 != 0)
        emulator.fail("two floats are added at an address that is not aligned");
    to[0] += a;
    to[1] += b;
}

FA_DEVICE void reduce_add_4(float *to, float a, float b, float c, float d)
{
    if ((size_t)to % 16 != 0)
        emulator.fail("four floats are added at an address that is not aligned");
    to[0] += a;
    to[1] += b;
    to[2] += c;
    to[3] += d;
}

/* ---- tensor cores ---- */

struct matrix_load {
    unsigned *result, from;
};

FA_DEVICE fa_u16 matrix_element(matrix_load *lane[32], int matrix, int row, int col)
{
    fa_u16 value;
    memcpy(&value, shared_at(lane[8 * matrix + row]->from, 16) + 2 * col, 2);
    return value;
}

template <bool TRANSPOSED> static void load_matrices(matrix_load *lane[32])
{
    for (int l = 0; l < 32; l++)
        for (int m = 0; m < 4; m++) {
            int      g = l / 4, t = l % 4;
            unsigned low  = TRANSPOSED ? matrix_element(lane, m, 2 * t, g) : matrix_element(lane, m, g, 2 * t);
            unsigned high = TRANSPOSED ? matrix_element(lane, m, 2 * t + 1, g) : matrix_element(lane, m, g, 2 * t + 1);
            lane[l]->result[m] = low | high << 16;
        }
}

FA_DEVICE void load_matrix(unsigned (&r)[4], unsigned from)
{
    matrix_load mine = {r, from};
    together(load_matrices<false>, &mine);
}

FA_DEVICE void load_matrix_transposed(unsigned (&r)[4], unsigned from)
{
    matrix_load mine = {r, from};
    together(load_matrices<true>, &mine);
}

FA_DEVICE float float_of_f16(fa_u16 half) { return (float)bits_as<_Float16>(half); }

FA_DEVICE float operand_value(fa_u16 half)
{
    return FA_OPERANDS_F16 ? float_of_f16(half) : bits_as<float>((unsigned)half << 16);
}

struct product {
    float          *c;
    const unsigned *a;
    unsigned        b[2];
};

static void multiply_all(product *lane[32])
{
    float a[16][16], b[8][16];
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        for (int e = 0; e < 2; e++) {
            for (int n = 0; n < 4; n++)
                a[g + n % 2 * 8][2 * t + n / 2 * 8 + e] = operand_value((fa_u16)(lane[l]->a[n] >> 16 * e));
            for (int n = 0; n < 2; n++)
                b[g][2 * t + n * 8 + e] = operand_value((fa_u16)(lane[l]->b[n] >> 16 * e));
        }
    }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < 4; n++) {
            const float *row = a[l / 4 + n / 2 * 8], *col = b[2 * (l % 4) + n % 2];
            float        sum = 0;
            for (int k = 0; k < 16; k++)
                sum += row[k] * col[k];
            lane[l]->c[n] += sum;
        }
}

FA_DEVICE void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    product mine = {c, a, {b0, b1}};
    together(multiply_all, &mine);
}

/* ---- between warps and blocks ---- */

template <int THREADS_> FA_DEVICE void barrier(int id) { emulator.barrier(id, THREADS_); }

FA_DEVICE int load_acquire(const int *from)
{
    emulator.poll(from);
    return *from;
}

FA_DEVICE int or_acquire(int *to, int bits)
{
    int before = *to;
    *to |= bits;
    return before;
}

FA_DEVICE void add_release(int *to, int x)
{
    emulator.hopper->release();
    *to += x;
}

/* ---- numbers ---- */

FA_DEVICE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
FA_DEVICE float exp2_fast(float x) { return flushed(exp2f(flushed(x))); }
FA_DEVICE float log2_fast(float x) { return log2f(flushed(x)); }
FA_DEVICE float reciprocal(float x) { return flushed(1.0f / flushed(x)); }

FA_DEVICE unsigned bf16_of(float x)
{
    unsigned bits = bits_as<unsigned>(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

FA_DEVICE unsigned f16_of(float x) { return bits_as<fa_u16>((_Float16)x); }
FA_DEVICE unsigned pack_bf16(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }
FA_DEVICE unsigned pack_f16(float low, float high) { return f16_of(low) | f16_of(high) << 16; }

FA_DEVICE unsigned multiply_f16(unsigned a, unsigned b)
{
    return pack_f16(float_of_f16((fa_u16)a) * float_of_f16((fa_u16)b), float_of_f16((fa_u16)(a >> 16)) * float_of_f16((fa_u16)(b >> 16)));
}

#if FA_ARCH >= 89
FA_DEVICE float e4m3_value(unsigned char byte)
{
    int   exponent = byte >> 3 & 15, mantissa = byte & 7;
    float size = (byte & 127) == 127 ? __builtin_nanf("") : exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return byte & 128 ? -size : size;
}

FA_DEVICE void f16_of_e4m3(unsigned (&pair)[2], unsigned four)
{
    for (int n = 0; n < 2; n++)
        pair[n] = pack_f16(e4m3_value((unsigned char)(four >> 16 * n)), e4m3_value((unsigned char)(four >> (16 * n + 8))));
}
#endif

FA_DEVICE void note_nonfinite(unsigned &acc, unsigned pair)
{
    const unsigned exponent = FA_OPERANDS_F16 ? 0x7C00 : 0x7F80;
    for (int half = 0; half < 32; half += 16)
        if ((pair >> half & exponent) == exponent)
            acc |= 0x7FFFu << half;
}

#endif
