/*
 * The PTX of Hopper, one function an instruction: barriers in shared memory that count bytes (mbarrier), the tensor memory
 * accelerator (TMA), products of a whole warpgroup (WGMMA), registers that move between warpgroups.
 * https://docs.nvidia.com/cuda/parallel-thread-execution/
 */
#ifndef FA_PTX_SM90_CUH
#define FA_PTX_SM90_CUH

#include "panels_sm90.cuh"

/* ---- mbarriers: `barrier` is the shared address of eight bytes ---- */

FA_DEVICE void barrier_init(unsigned barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* What this thread wrote to shared memory is seen by TMA and WGMMA once a barrier has told of it. */
FA_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* What TMA did to global memory comes before what this thread tells of it, and what it has been told of before what it asks of TMA. */
FA_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Barriers set up by this thread are seen by TMA and, after a __syncthreads, by all. */
FA_DEVICE void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
}

/* One arrival that also announces so many bytes of TMA. */
FA_DEVICE void barrier_expect(unsigned barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

FA_DEVICE void barrier_arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* At the same barrier of another block of the cluster, of what products or TMA have read: release.cluster would order all memory first, for hundreds of cycles. */
FA_DEVICE void barrier_arrive_at(unsigned barrier, unsigned rank)
{
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(rank)
                 : "memory");
}

FA_DEVICE bool barrier_passed(unsigned barrier, unsigned parity)
{
    unsigned passed;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed != 0;
}

/* In 2^32 cycles, some two seconds. */
FA_DEVICE unsigned long_clock()
{
    unsigned now;
    asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(now)::"memory");
    return now;
}

/* Wait until the barrier's phase of this parity is over: phases alternate 0, 1, 0, ... A wait of more than 2^40 cycles, nine minutes, is a mistake in
 * a kernel; a store to address 0 then ends it with an error instead of holding the GPU. (`trap` would do, but costs registers: ptxas 13.0 spills beside
 * it.) A tile whose rows are far, or see Inf or NaN in V, takes seconds of many keys, and who waits for its block's next item waits as long (decision 0101). */
FA_DEVICE void barrier_wait(unsigned barrier, unsigned parity)
{
    enum { TOO_LONG = 256 };
    if (barrier_passed(barrier, parity))
        return;
    unsigned begin = long_clock();
    while (!barrier_passed(barrier, parity))
        if (long_clock() - begin > TOO_LONG)
            asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
}

/* Named barriers, 1 to 15, of `threads` threads: wait for all, or only be counted. */
FA_DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FA_DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/* ---- TMA ---- */

/* True for one lane of a whole warp. The compiler knows that of this instruction alone: else it puts a loop over the lanes around whatever asks TMA. */
FA_DEVICE bool elected()
{
    unsigned is;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(is));
    return is != 0;
}

/* One panel: columns from `column`, rows from `row`, of one head of one batch entry. Rows past the end arrive as zeros, and
 * all bytes of the box are counted. */
FA_DEVICE void tma_load(unsigned to, const fa_map &map, unsigned barrier, int column, int row, int head, int entry)
{
#ifdef FA_STREAMS /* what is loaded is not wanted again: L2 lets it go before other lines */
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(entry), "l"(policy)
                 : "memory");
#else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
                 "[%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(entry)
                 : "memory");
#endif
}

/* As tma_load, for both blocks of a cluster of two: the same box to the same address of each one's shared memory, counted at each one's barrier. */
FA_DEVICE void tma_load_both(unsigned to, const fa_map &map, unsigned barrier, int column, int row, int head, int entry)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(entry), "h"((unsigned short)3)
                 : "memory");
}

/* Of a ragged map (launch.c): rows of one sequence, which ends before row `end` of the tensor (entries one behind the other), from the one on that has
 * `left` rows before that. What is not the sequence's arrives as zeros. The map's last two dimensions cancel what its row counts too much. */
FA_DEVICE void tma_load_ragged(unsigned to, const fa_map &map, unsigned barrier, int column, int left, int head, int end)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
                 "[%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(column), "r"(FA_RAGGED_ROWS - left), "r"(head), "r"(end), "r"(FA_RAGGED_ROWS)
                 : "memory");
}

/* The map itself, which TMA would have to wait for. */
FA_DEVICE void tma_prefetch_map(const fa_map &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

/* The same box into L2 alone. */
FA_DEVICE void tma_prefetch_ragged(const fa_map &map, int column, int left, int head, int end)
{
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map), "r"(column), "r"(FA_RAGGED_ROWS - left),
                 "r"(head), "r"(end), "r"(FA_RAGGED_ROWS)
                 : "memory");
}

/* Neighbours without a tensor map, both ends and `bytes` multiples of 16: from global memory, counted at a barrier ... */
FA_DEVICE void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/* ... and floats added to global memory, or stored there. The thread that asks must wait before the floats are overwritten, and longer until they are there. */
FA_DEVICE void bulk_add(float *to, unsigned from, unsigned bytes, bool stores)
{
    if (stores) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
        return;
    }
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

/* One panel of a tile to a ragged map's rows; those past the sequence's end stay as they are. Waited for as bulk_add is. */
FA_DEVICE void tma_store_ragged(const fa_map &map, unsigned from, int column, int left, int head, int end)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n\tcp.async.bulk.commit_group;" ::"l"(&map),
                 "r"(from), "r"(column), "r"(FA_RAGGED_ROWS - left), "r"(head), "r"(end), "r"(FA_RAGGED_ROWS)
                 : "memory");
}

/* The same of a map of four dimensions; what lies past the end of one stays as it is. */
FA_DEVICE void tma_store(const fa_map &map, unsigned from, int column, int row, int head, int entry)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n\tcp.async.bulk.commit_group;" ::"l"(&map), "r"(from), "r"(column),
                 "r"(row), "r"(head), "r"(entry)
                 : "memory");
}

/* Other blocks see what the copies wrote only behind a release: in machine code both are the same instruction, and a line may still be on its way to L2 (decision 0079). */
template <int PENDING> FA_DEVICE void bulk_added() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }
template <int PENDING = 0> FA_DEVICE void bulk_added_was_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

/* ---- matrices of 8x8 from registers to shared memory, each turned round: what lane 4 g + t holds as row g, columns 2 t and
 * 2 t + 1 of matrix m is stored as rows 2 t and 2 t + 1. Lane l gives the address of row l % 8 of matrix l / 8. ---- */
FA_DEVICE void store_matrix_transposed(unsigned to, const unsigned (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

/* ... and as they are: lane 4 g + t's word is row g's t-th. */
FA_DEVICE void store_matrix(unsigned to, const unsigned (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* A matrix as store_matrix has it, in registers: its transpose. */
FA_DEVICE unsigned transpose_matrix(unsigned r)
{
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(r));
    return r;
}

/* Four floats as E4M3, rounded to nearest even, no larger than 448; `a` has the lowest address. */
FA_DEVICE unsigned pack_e4m3(float a, float b, float c, float d)
{
    unsigned packed;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

/* ---- numbers ---- */

/* x, no larger than 30; NaN stays. */
FA_DEVICE float at_most_30(float x)
{
    float y;
    asm("min.NaN.f32 %0, %1, 0f41F00000;" : "=f"(y) : "f"(x));
    return y;
}

/* x of the lane in quad `quad` that has this lane's place there. */
FA_DEVICE float from_quad(float x, int quad)
{
    asm("shfl.sync.idx.b32 %0, %0, %1, 0x31f, 0xffffffff;" : "+f"(x) : "r"(4 * quad)); /* 0x31f: segments of every fourth lane */
    return x;
}

/* Nothing, but the compiler leaves what makes x before it and what x makes behind. */
FA_DEVICE void keep_order(float &x) { asm volatile("" : "+f"(x)); }

/* Nothing, but the compiler makes what it makes of x here and anew each time, in place of holding it in registers since before a loop. */
FA_DEVICE void make_anew(int &x) { asm volatile("" : "+r"(x)); }

/* Nothing, but ptxas, which moves arithmetic over barriers, leaves what comes behind this there. `never` is not true, which it must not know. */
FA_DEVICE void keep_behind(bool never)
{
    if (never)
        asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
}

/* A load from shared memory that stays behind what stands before it, barriers too, as all do. */
FA_DEVICE int shared_load_behind(const int *from)
{
    int x;
    asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(x) : "r"(shared_address(from)) : "memory");
    return x;
}

/* Two elements become 0 where their number, the low or the high half of a word, is below the threshold, given in the high half. A product with 0 is not
 * the unit's that compares. */
FA_DEVICE void drop_two(float &of_low, float &of_high, unsigned word, unsigned threshold)
{
    asm("{ .reg .pred low, high; setp.lo.u32 low, %3, %4; setp.lo.u32 high, %2, %4; @low mul.f32 %0, %0, 0f00000000; @high mul.f32 %1, %1, 0f00000000; }"
        : "+f"(of_low), "+f"(of_high)
        : "r"(word), "r"(word << 16), "r"(threshold));
}

/* Of `bits` BIT where the low number is below the threshold, and BIT + 2 where the high one is. */
template <int BIT> FA_DEVICE void note_two(unsigned &bits, unsigned word, unsigned threshold)
{
    asm("{ .reg .pred low, high; setp.lo.u32 low, %2, %3; setp.lo.u32 high, %1, %3; @low or.b32 %0, %0, %4; @high or.b32 %0, %0, %5; }"
        : "+r"(bits)
        : "r"(word), "r"(word << 16), "r"(threshold), "n"(1u << BIT), "n"(4u << BIT));
}

/* The sign of each half of a word, in all bits of the half. */
FA_DEVICE unsigned spread_signs(unsigned word)
{
    unsigned halves;
    asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(halves) : "r"(word));
    return halves;
}

/* ---- WGMMA (sm_90a) ---- */
#if FA_ARCH == 90

FA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Wait until at most PENDING of the newest groups are in flight. */
template <int PENDING> FA_DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* The compiler does not know that a product in flight writes these: no use of them may move over this line. */
template <int COUNT> FA_DEVICE void hold(float (&r)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(r[i])::"memory");
}

template <int A, int B> FA_DEVICE void hold(unsigned (&r)[A][B])
{
#pragma unroll
    for (int a = 0; a < A; a++)
#pragma unroll
        for (int b = 0; b < B; b++)
            asm volatile("" : "+r"(r[a][b])::"memory");
}

/* FP8 always has K along the columns of b: there is nothing to be said of it. */
#if FA_DTYPE == FA_F8E4M3
#define FA_TURNED(b_down)
#define FA_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 "
#else
#define FA_TURNED(b_down) ", " b_down
#endif
#if FA_DTYPE == FA_F16 || FA_DTYPE == FA_F32 /* of planes */
#define FA_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 "
#elif FA_DTYPE != FA_F8E4M3
#define FA_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "
#endif

/* Operand lists: 12, 16, 24, 32, 40, 48, 56, 64, 96, 128 accumulators. */
#define FA_O8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define FA_O32(c, i) FA_O8(c, i), FA_O8(c, i + 8), FA_O8(c, i + 16), FA_O8(c, i + 24)
#define FA_O24(c, i) FA_O8(c, i), FA_O8(c, i + 8), FA_O8(c, i + 16)
#define FA_N12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define FA_N16 FA_N12 ", %12, %13, %14, %15"
#define FA_N24 FA_N12 ", %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define FA_N32 FA_N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_N40 FA_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FA_N48 FA_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_N56 FA_N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FA_N64 FA_N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_N96                                                                                                      \
    FA_N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "  \
           "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FA_N128                                                                                                      \
    FA_N96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "      \
           "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* c (64 x 2 COUNT) = or += a b^T; a and b by rows in shared memory, K along the columns; with B_DOWN a b, K along the rows of b. Thread 32 w + 4 g + t of the
 * warpgroup holds rows 16 w + g (c[4 j], c[4 j + 1]) and 16 w + g + 8 (c[4 j + 2], c[4 j + 3]), columns 8 j + 2 t, + 1. */
template <int B_DOWN = 0, int A_DOWN = 0, int COUNT> FA_DEVICE void wgmma_shared(float (&c)[COUNT], matrix a, matrix b, int add)
{
    static_assert(COUNT == 12 || COUNT == 16 || COUNT == 24 || COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 56 || COUNT == 64 || COUNT == 96 || COUNT == 128, "no such WGMMA here");
    if constexpr (COUNT == 12)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %14, 0; " FA_WGMMA(24) "{" FA_N12 "}, %12, %13, p, 1, 1" FA_TURNED("%16, %15") "; }"
                     : FA_O8(c, 0), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11])
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 16)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; " FA_WGMMA(32) "{" FA_N16 "}, %16, %17, p, 1, 1" FA_TURNED("%20, %19") "; }"
                     : FA_O8(c, 0), FA_O8(c, 8)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 24)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %26, 0; " FA_WGMMA(48) "{" FA_N24 "}, %24, %25, p, 1, 1" FA_TURNED("%28, %27") "; }"
                     : FA_O24(c, 0)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " FA_WGMMA(64) "{" FA_N32 "}, %32, %33, p, 1, 1" FA_TURNED("%36, %35") "; }"
                     : FA_O32(c, 0)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 40)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %42, 0; " FA_WGMMA(80) "{" FA_N40 "}, %40, %41, p, 1, 1" FA_TURNED("%44, %43") "; }"
                     : FA_O32(c, 0), FA_O8(c, 32)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 48)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %50, 0; " FA_WGMMA(96) "{" FA_N48 "}, %48, %49, p, 1, 1" FA_TURNED("%52, %51") "; }"
                     : FA_O24(c, 0), FA_O24(c, 24)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 56)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %58, 0; " FA_WGMMA(112) "{" FA_N56 "}, %56, %57, p, 1, 1" FA_TURNED("%60, %59") "; }"
                     : FA_O32(c, 0), FA_O24(c, 32)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; " FA_WGMMA(128) "{" FA_N64 "}, %64, %65, p, 1, 1" FA_TURNED("%68, %67") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else if constexpr (COUNT == 96)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0; " FA_WGMMA(192) "{" FA_N96 "}, %96, %97, p, 1, 1" FA_TURNED("%100, %99") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32), FA_O32(c, 64)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; " FA_WGMMA(256) "{" FA_N128 "}, %128, %129, p, 1, 1" FA_TURNED("%132, %131") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32), FA_O32(c, 64), FA_O32(c, 96)
                     : "l"(a.word()), "l"(b.word()), "r"(add), "n"(B_DOWN), "n"(A_DOWN));
}

/* c (64 x 2 COUNT) = or += a b; a 64 x 16 in registers: rows and columns as those of an accumulator, two neighbours a
 * register; b by rows in shared memory, K along the rows, or with B_DOWN 0 a b^T. FP8: a b^T, a 64 x 32, lane t's columns 4 t ... 4 t + 3 and those 16 on. */
template <int B_DOWN = 1, int COUNT> FA_DEVICE void wgmma_registers(float (&c)[COUNT], const unsigned (&a)[4], matrix b, int add)
{
    static_assert(COUNT == 24 || COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 64 || COUNT == 96 || COUNT == 128, "no such WGMMA here");
    if constexpr (COUNT == 24)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %29, 0; " FA_WGMMA(48) "{" FA_N24
                     "}, {%24, %25, %26, %27}, %28, p, 1, 1" FA_TURNED("%30") "; }"
                     : FA_O24(c, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else if constexpr (COUNT == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; " FA_WGMMA(64) "{" FA_N32
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1" FA_TURNED("%38") "; }"
                     : FA_O32(c, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else if constexpr (COUNT == 40)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %45, 0; " FA_WGMMA(80) "{" FA_N40
                     "}, {%40, %41, %42, %43}, %44, p, 1, 1" FA_TURNED("%46") "; }"
                     : FA_O32(c, 0), FA_O8(c, 32)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else if constexpr (COUNT == 48)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0; " FA_WGMMA(96) "{" FA_N48
                     "}, {%48, %49, %50, %51}, %52, p, 1, 1" FA_TURNED("%54") "; }"
                     : FA_O24(c, 0), FA_O24(c, 24)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else if constexpr (COUNT == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; " FA_WGMMA(128) "{" FA_N64
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1" FA_TURNED("%70") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else if constexpr (COUNT == 96)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %101, 0; " FA_WGMMA(192) "{" FA_N96
                     "}, {%96, %97, %98, %99}, %100, p, 1, 1" FA_TURNED("%102") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32), FA_O32(c, 64)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0; " FA_WGMMA(256) "{" FA_N128
                     "}, {%128, %129, %130, %131}, %132, p, 1, 1" FA_TURNED("%134") "; }"
                     : FA_O32(c, 0), FA_O32(c, 32), FA_O32(c, 64), FA_O32(c, 96)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word()), "r"(add), "n"(B_DOWN));
}

/* Give registers back, or take them: a whole warpgroup, COUNT a thread from now on. */
template <int COUNT> FA_DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> FA_DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

#endif
#endif
