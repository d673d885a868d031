/*
 * ptx_sm90.cuh in C++, for the emulated GPU: the same functions, as the PTX ISA manual describes the instructions. What
 * is asynchronous happens as late as it may (hopper.c, wgmma.c), and until then NaN lies where its result will be.
 */
#ifndef FA_PTX_SM90_CUH
#define FA_PTX_SM90_CUH

#include "panels_sm90.cuh"

extern "C" const int emulator_blocks_at_once = 8; /* blocks wait for each other */

/* ---- mbarriers ---- */

FA_DEVICE void barrier_init(unsigned barrier, unsigned arrivals) { emulator.hopper->barrier_init(barrier, arrivals); }
FA_DEVICE void barrier_expect(unsigned barrier, unsigned bytes) { emulator.hopper->barrier_arrive(barrier, bytes); }
FA_DEVICE void barrier_arrive(unsigned barrier) { emulator.hopper->barrier_arrive(barrier, 0); }
FA_DEVICE void barrier_arrive_at(unsigned barrier, unsigned rank) { emulator.hopper->barrier_arrive_at(barrier, rank); }
FA_DEVICE bool barrier_passed(unsigned barrier, unsigned parity) { return emulator.hopper->barrier_passed(barrier, parity); }
FA_DEVICE void barrier_wait(unsigned barrier, unsigned parity) { emulator.hopper->barrier_wait(barrier, parity); }

FA_DEVICE void named_sync(int id, int threads) { emulator.barrier(id, threads); }
FA_DEVICE void named_arrive(int id, int threads) { emulator.barrier_arrive(id, threads); }

FA_DEVICE void fence_async() { emulator.hopper->fence_async(); }
FA_DEVICE void fence_async_global() {} /* of global memory there is one order here */
FA_DEVICE void barrier_init_done() {}

/* ---- TMA ---- */

FA_DEVICE bool elected() { return threadIdx.x % 32 == 0; }

FA_DEVICE void tma_load(unsigned to, const fa_map &map, unsigned barrier, int column, int row, int head, int entry)
{
    const int at[] = {column, row, head, entry, 0};
    emulator.hopper->load_box(to, &map, barrier, at);
}

FA_DEVICE void tma_load_both(unsigned to, const fa_map &map, unsigned barrier, int column, int row, int head, int entry)
{
    const int at[] = {column, row, head, entry, 0};
    for (unsigned rank = 0; rank < 2; rank++)
        emulator.hopper->load_box_for(rank, to, &map, barrier, at);
}

FA_DEVICE void tma_load_ragged(unsigned to, const fa_map &map, unsigned barrier, int column, int left, int head,
                               int end)
{
    const int at[] = {column, FA_RAGGED_ROWS - left, head, end, FA_RAGGED_ROWS};
    emulator.hopper->load_box(to, &map, barrier, at);
}

FA_DEVICE void tma_prefetch_map(const fa_map &) {}
FA_DEVICE void tma_prefetch_ragged(const fa_map &, int, int, int, int) {}

FA_DEVICE void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier)
{
    emulator.hopper->bulk_load(to, from, bytes, barrier);
}
FA_DEVICE void bulk_add(float *to, unsigned from, unsigned bytes, bool stores)
{
    emulator.hopper->bulk_add(to, from, bytes, stores);
}

FA_DEVICE void tma_store_ragged(const fa_map &map, unsigned from, int column, int left, int head, int end)
{
    const int at[] = {column, FA_RAGGED_ROWS - left, head, end, FA_RAGGED_ROWS};
    emulator.hopper->store_box(&map, from, at);
}

FA_DEVICE void tma_store(const fa_map &map, unsigned from, int column, int row, int head, int entry)
{
    const int at[] = {column, row, head, entry, 0};
    emulator.hopper->store_box(&map, from, at);
}

template <int PENDING> FA_DEVICE void     bulk_added() { emulator.hopper->bulk_wait(PENDING, false); }
template <int PENDING = 0> FA_DEVICE void bulk_added_was_read() { emulator.hopper->bulk_wait(PENDING, true); }

/* ---- matrices of 8x8 ---- */

struct matrix_store {
    const unsigned *word;
    unsigned        to;
};

template <bool TRANSPOSED> static void store_matrices(matrix_store *lane[32])
{
    for (int l = 0; l < 32; l++)
        wrote(lane[l]->to, 16);
    for (int l = 0; l < 32; l++)
        for (int m = 0; m < 4; m++)
            for (int e = 0; e < 2; e++) {
                int    row = TRANSPOSED ? 2 * (l % 4) + e : l / 4, col = TRANSPOSED ? l / 4 : 2 * (l % 4) + e;
                fa_u16 value = (fa_u16)(lane[l]->word[m] >> 16 * e);
                memcpy(shared_at(lane[8 * m + row]->to, 16) + 2 * col, &value, 2);
            }
}

FA_DEVICE void store_matrix_transposed(unsigned to, const unsigned (&r)[4])
{
    matrix_store mine = {r, to};
    together(store_matrices<true>, &mine);
}

FA_DEVICE void store_matrix(unsigned to, const unsigned (&r)[4])
{
    matrix_store mine = {r, to};
    together(store_matrices<false>, &mine);
}

static void transpose_all(exchange *lane[32])
{
    for (int l = 0; l < 32; l++) {
        unsigned word = 0;
        for (int e = 0; e < 2; e++) /* row l / 4, column 2 (l % 4) + e of the transpose */
            word |= (unsigned)(lane[(2 * (l % 4) + e) * 4 + l / 4 / 2]->value >> l / 4 % 2 * 16 & 0xFFFF) << 16 * e;
        lane[l]->result = word;
    }
}

FA_DEVICE unsigned transpose_matrix(unsigned r)
{
    exchange mine = {r, 0, 0};
    together(transpose_all, &mine);
    return (unsigned)mine.result;
}

/* ---- numbers ---- */

FA_DEVICE unsigned e4m3_of(float x)
{
    unsigned sign = bits_as<unsigned>(x) >> 31 << 7;
    float    size = fabsf(x);
    if (x != x)
        return sign | 0x7F;
    if (size >= 448)
        return sign | 0x7E;
    int exponent = size > 0 ? ilogbf(size) : -6;
    if (exponent < -6)
        exponent = -6;
    unsigned eighths =
        (unsigned)nearbyintf(ldexpf(size, 3 - exponent)); /* 8 to 16 of a normal number: 16 is the next exponent's 8 */
    unsigned byte = eighths < 8 ? eighths : (unsigned)(exponent + 7) * 8 + eighths - 8;
    return sign | (byte > 0x7E ? 0x7E : byte);
}

FA_DEVICE unsigned pack_e4m3(float a, float b, float c, float d)
{
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
}
FA_DEVICE float at_most_30(float x) { return x > 30 ? 30 : x; }
FA_DEVICE void  keep_order(float &) {}
FA_DEVICE void  make_anew(int &) {}
FA_DEVICE void  keep_behind(bool) {}
FA_DEVICE int   shared_load_behind(const int *from) { return *from; }

FA_DEVICE float from_quad(float x, int quad) { return __shfl_sync(~0u, x, 4 * quad + (int)threadIdx.x % 4); }

FA_DEVICE void drop_two(float &of_low, float &of_high, unsigned word, unsigned threshold)
{
    if (word << 16 < threshold)
        of_low *= 0.0f;
    if (word < threshold)
        of_high *= 0.0f;
}

template <int BIT> FA_DEVICE void note_two(unsigned &bits, unsigned word, unsigned threshold)
{
    bits |= (word << 16 < threshold ? 1u << BIT : 0) | (word < threshold ? 4u << BIT : 0);
}

FA_DEVICE unsigned spread_signs(unsigned word) { return (word >> 15 & 1) * 0xFFFFu | (word >> 31) * 0xFFFF0000u; }

/* ---- WGMMA ---- */
#if FA_ARCH == 90

FA_DEVICE void                        wgmma_fence() {}
FA_DEVICE void                        wgmma_commit() { emulator.hopper->wgmma_commit(); }
template <int PENDING> FA_DEVICE void wgmma_wait() { emulator.hopper->wgmma_wait(PENDING); }

template <int COUNT> FA_DEVICE void    hold(float (&)[COUNT]) {}
template <int A, int B> FA_DEVICE void hold(unsigned (&)[A][B]) {}

constexpr int PRODUCT_TYPE = FA_DTYPE == FA_F8E4M3 ? EMULATOR_E4M3 : FA_DTYPE == FA_F16 || FA_DTYPE == FA_F32 ? EMULATOR_F16 : EMULATOR_BF16;

template <int B_DOWN = 0, int A_DOWN = 0, int COUNT>
FA_DEVICE void wgmma_shared(float (&c)[COUNT], matrix a, matrix b, int add)
{
    static_assert(COUNT == 12 || COUNT == 16 || COUNT == 24 || COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 56 || COUNT == 64 || COUNT == 96 || COUNT == 128,
                  "no such WGMMA here");
    const emulator_product product = {c, COUNT, PRODUCT_TYPE, add, nullptr, a.word(), b.word(), A_DOWN, B_DOWN};
    emulator.hopper->wgmma(&product);
}

template <int B_DOWN = 1, int COUNT>
FA_DEVICE void wgmma_registers(float (&c)[COUNT], const unsigned (&a)[4], matrix b, int add)
{
    static_assert(COUNT == 24 || COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 64 || COUNT == 96 || COUNT == 128, "no such WGMMA here");
    const emulator_product product = {
        c, COUNT, PRODUCT_TYPE, add, a, 0, b.word(), 0, FA_DTYPE == FA_F8E4M3 ? 0 : B_DOWN};
    emulator.hopper->wgmma(&product);
}

/* As ptxas gives them to a kernel with these bounds that shares them out by setmaxnreg. */
constexpr int LAUNCHED_REGISTERS = 65536 / (32 * FA_WARPS * FA_MIN_BLOCKS) / 8 * 8;

template <int COUNT> FA_DEVICE void registers_down() { emulator.hopper->registers(COUNT, LAUNCHED_REGISTERS); }
template <int COUNT> FA_DEVICE void registers_up() { emulator.hopper->registers(COUNT, LAUNCHED_REGISTERS); }

#endif
#endif
