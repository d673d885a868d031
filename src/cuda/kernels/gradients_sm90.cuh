/* Hopper's backwards: 16-bit operands made of accumulators, dS turned round for dQ, gradients, and forward_short_sm90.cu's O, on their way out by TMA. */
#ifndef FA_GRADIENTS_SM90_CUH
#define FA_GRADIENTS_SM90_CUH

#include "fragment_sm90.cuh"

/* P^T or dS^T as left operands, 16 queries a step. */
template <int STEPS, int COUNT> FA_DEVICE void pack_operand(unsigned (&a)[STEPS][4], const float (&s)[COUNT])
{
    static_assert(COUNT == 8 * STEPS, "eight elements a step");
#pragma unroll
    for (int n = 0; n < COUNT / 2; n++)
        a[n / 4][n % 4] = pack<FA_DTYPE>(s[2 * n], s[2 * n + 1]);
}

/* Where this lane's row of the 8x8 matrices of dS is, 16 queries by this warp's 16 keys, turned round; 16 queries on: + 2048. BY_COLUMNS of P and dS with keys and
 * queries changed over, and of a panel of dK or dV with columns for queries. */
FA_DEVICE unsigned turned_at(unsigned tile)
{
    int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    return tile + row * 128 + ((chunk ^ row % 8) << 4);
}

/* A panel of dQ, dK, dV or O on its way out: a warp's 16 rows, of which `counting` count and the rest is 0. */
template <int COUNT> FA_DEVICE void stage_panel(const float (&x)[COUNT], int panel, float factor, int lane, int counting, unsigned stage)
{
#pragma unroll
    for (int n = 0; n < 32 && 32 * panel + n < COUNT; n += 8) { /* of 96 columns half of the second, and TMA stores no more */
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = pack<FA_DTYPE>(x[32 * panel + n + 2 * i] * factor, x[32 * panel + n + 2 * i + 1] * factor);
        store_matrix(stage + lane % 16 * 128 + ((n / 4 + lane / 16 ^ lane % 8) << 4), a);
    }
    if (counting < 16) {
        __syncwarp();
#pragma unroll 1
        for (int hidden = fa_max_int(counting, 0) * 128 + lane * 16; hidden < 16 * 128; hidden += 512)
            shared_store(stage + hidden, make_uint4(0, 0, 0, 0));
    }
    fence_async();
}

#endif
