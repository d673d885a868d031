/* Dropout in Hopper's own kernels: src/dropout.h's numbers for the elements that a thread has of an accumulator. */
#ifndef FA_DROPOUT_SM90_CUH
#define FA_DROPOUT_SM90_CUH

#include "fragment_sm90.cuh"

/* P of 16 keys a round, queries down: a thread's eight elements have their numbers of one call. row_block, col_block: of 16, the second the first element's. */
template <int COUNT> FA_DEVICE void drop_elements(const fa_args &args, float (&p)[COUNT], int batch_head, int row_block, int col_block)
{
    unsigned threshold = args.dropout.threshold << 16;
#pragma unroll
    for (int n = 0; n < COUNT; n += 8) {
        fa_philox numbers = fa_dropout_block(&args.dropout, batch_head, row_block, col_block + n / 8, threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < 4; i++) /* rows g and g + 8 */
            drop_two(p[n + i / 2 * 4 + i % 2], p[n + i / 2 * 4 + i % 2 + 2], numbers.word[i], threshold);
    }
}

/* ---- transposed: keys down, queries across ---- */

/* Bits of which pairs are dropped: of pair n of 16-bit operands bit n % 16 of word n / 16, and the bit 16 further for its second element. */
template <int COUNT> struct dropped_bits {
    unsigned word[(COUNT + 31) / 32];
};

/* Numbers are dealt to rows of queries, so here a thread's eight elements of 16 keys and 16 queries lie in two calls, half of each being its neighbour's,
 * whose key is one further or one back. Each makes one call, for the first or the second query of pairs, and they swap halves for all of a tile at once. */
template <int COUNT, int N = 0>
FA_DEVICE void find_dropped(const fa_args &args, dropped_bits<COUNT> &bits, int batch_head, int query_block, int key_block)
{
    if constexpr (N < COUNT) {
        constexpr int BIT = N % 32 / 2;
        unsigned      lane = threadIdx.x % 32, odd = lane / 4 % 2, threshold = args.dropout.threshold << 16, &word = bits.word[N / 32];
        fa_philox     numbers = fa_dropout_block(&args.dropout, batch_head, query_block + N / 8, key_block, (lane % 4 * 2 + odd) * 4 + lane / 8);
        if constexpr (BIT == 0)
            word = 0;
        note_two<BIT>(word, numbers.word[0], threshold); /* even keys in the lower half, odd ones in the upper */
        note_two<BIT + 16>(word, numbers.word[1], threshold);
        note_two<BIT + 1>(word, numbers.word[2], threshold); /* eight keys on */
        note_two<BIT + 17>(word, numbers.word[3], threshold);
        if constexpr (N % 32 == 24 || N + 8 == COUNT) {
            unsigned other = __shfl_xor_sync(0xFFFFFFFFu, word, 4);
            word           = __byte_perm(word, other, odd ? 0x3276 : 0x5410);
        }
        find_dropped<COUNT, N + 8>(args, bits, batch_head, query_block, key_block);
    }
}

/* P's pairs: in `p` what is dropped becomes 0, and in `noted`, which has P or P times something, it is marked by its sign. */
template <int STEPS, int COUNT> FA_DEVICE void drop_pairs(unsigned (&p)[STEPS][4], unsigned (&noted)[STEPS][4], const dropped_bits<COUNT> &bits)
{
#pragma unroll
    for (int n = 0; n < COUNT / 2; n++) {
        unsigned signs = bits.word[n / 16] << (15 - n % 16), halves = spread_signs(signs);
        noted[n / 4][n % 4] |= signs & 0x80008000u;
        p[n / 4][n % 4] &= ~halves;
    }
}

#endif
