/*
 * V in FP8 turned round for forward_sm90, whose products take both operands with the inner dimension, here keys, along the rows: a block writes one tile's
 * V^T as shared memory is to hold it (panels and swizzle of ptx_sm90.cuh), so that one bulk copy brings it. Every 16 keys stand in the order of P's registers
 * (warpgroup.cuh). Keys that are nobody's become zeros: P is 0 there, and 0 * NaN is NaN.
 */
#include "mask.cuh"

constexpr int ROW_CHUNKS = FA_HEAD_DIM_V / 16, THREADS = 32 * FA_WARPS, PANEL = FA_TILE_K % 128 == 0 ? 128 : 64; /* chunks of 16 bytes */
constexpr int KEYS16 = FA_TILE_K / 16, PANEL_CHUNKS = PANEL / 16;

extern "C" __constant__ int fa_shared_bytes = FA_TILE_K * FA_HEAD_DIM_V;
extern __shared__ __align__(16) unsigned char rows[];

/* Chunks of a row are turned by its group of 16 keys, so that neighbouring groups are read from different banks. */
FA_DEVICE unsigned *word_at(int key, int word)
{
    return (unsigned *)rows + (key * ROW_CHUNKS + (word / 4 + key / 16) % ROW_CHUNKS) * 4 + word % 4;
}

/* Byte n of each of four words: a column of four keys. */
FA_DEVICE unsigned column(const unsigned (&key)[4], int n)
{
    unsigned low = __byte_perm(key[0], key[1], n | (4 + n) << 4), high = __byte_perm(key[2], key[3], n | (4 + n) << 4);
    return __byte_perm(low, high, 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS) values_sm90(const __grid_constant__ fa_args args)
{
    int      tile = blockIdx.x % args.tiles_k, head = blockIdx.x / args.tiles_k % args.heads_k, b = blockIdx.x / args.tiles_k / args.heads_k;
    sequence s    = sequence_at(args, b);
    int      first = tile * FA_TILE_K;
    const fa_element *v = (const fa_element *)args.v.data + s.kv_entry * args.v.stride[0] + s.kv_row * args.v.stride[1] + head * args.v.stride[2];
#pragma unroll 8
    for (int n = threadIdx.x; n < FA_TILE_K * ROW_CHUNKS; n += THREADS) {
        int  key = n / ROW_CHUNKS, chunk = n % ROW_CHUNKS, j = first + key;
        bool valid = j >= s.key_begin && j < s.seqlen_k && 16 * chunk < args.head_dim_v;
        *(uint4 *)word_at(key, 4 * chunk) = valid ? *(const uint4 *)(v + j * args.v.stride[1] + 16 * chunk) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    unsigned char *to = args.v_turned + (fa_i64)blockIdx.x * (FA_TILE_K * FA_HEAD_DIM_V);
    for (int n = threadIdx.x; n < KEYS16 * FA_HEAD_DIM_V / 4; n += THREADS) { /* 16 keys of four columns; neighbours have neighbouring keys */
        int      group = n % KEYS16, word = n / KEYS16, panel = group / PANEL_CHUNKS, chunk = group % PANEL_CHUNKS;
        unsigned turned[4][4]; /* column, four keys */
#pragma unroll
        for (int t = 0; t < 4; t++) {
            unsigned key[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                key[e] = *word_at(16 * group + 8 * (e / 2) + 2 * t + e % 2, word);
#pragma unroll
            for (int c = 0; c < 4; c++)
                turned[c][t] = column(key, c);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int row = 4 * word + c, swizzle = PANEL == 128 ? row % 8 : row / 2 % 4;
            *(uint4 *)(to + panel * (FA_HEAD_DIM_V * PANEL) + row * PANEL + ((chunk ^ swizzle) << 4)) =
                make_uint4(turned[c][0], turned[c][1], turned[c][2], turned[c][3]);
        }
    }
}
