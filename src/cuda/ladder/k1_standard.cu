/*
 * K1: standard attention. Three kernels, S and then P in memory (float32, P in S's place):
 *
 *     k1_scores    S = scale * Q K^T      a 16 x 16 tile of S a block, one element a thread
 *     k1_softmax   P = softmax(S)         a row a warp: maximum, sum, quotient: three walks over the row
 *     k1_values    O = P V                a 16 x 16 tile of O a block
 *
 * What it shows: the arithmetic is the same as in every rung above, but S is written once and read three times, P written
 * and read once: 5 * 4 * seqlen^2 bytes a head, and the memory for it. Its products are the textbook's: each element of
 * Q and K is read from shared memory once for every multiply-add.
 */
#include "ladder.cuh"

constexpr int TILE = 16;

FA_DEVICE float element(const fa_view &view, int entry, int row, int head, int column)
{
    return unpack<FA_DTYPE>(row_of(view, entry, row, head)[column]).x;
}

/* Row i of S of a head. args.o_partial is S: [batch][heads_q][seqlen_q][seqlen_k]. */
FA_DEVICE float *scores_row(const fa_args &args, int entry, int head, int i)
{
    return args.o_partial + (((fa_i64)entry * args.heads_q + head) * args.max_seqlen_q + i) * args.max_seqlen_k;
}

extern "C" __global__ void __launch_bounds__(TILE *TILE) k1_scores(const __grid_constant__ fa_args args)
{
    __shared__ float q[TILE][TILE + 1], k[TILE][TILE + 1];
    unsigned         n = blockIdx.x, tiles_k = (args.max_seqlen_k + TILE - 1) / TILE;
    int              x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    int              first_k = n % tiles_k * TILE, first_q = n / tiles_k % args.tiles_q * TILE;
    n /= tiles_k * args.tiles_q;
    int head = n % args.heads_q, entry = n / args.heads_q;
    int i = first_q + y, j = first_k + x, i_last = fa_min_int(first_q + TILE, args.max_seqlen_q) - 1;
    if (first_k >= key_limit(args, i_last)) /* no query of this tile sees a key of it */
        return;
    float s = 0.0f;
    for (int c = 0; c < D; c += TILE) {
        int row = first_k + y;
        q[y][x] = i < args.max_seqlen_q ? element(args.q, entry, i, head, c + x) : 0.0f;
        k[y][x] = row < args.max_seqlen_k ? element(args.k, entry, row, head / args.group, c + x) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < TILE; e++)
            s += q[y][e] * k[x][e];
        __syncthreads();
    }
    if (i < args.max_seqlen_q && j < args.max_seqlen_k)
        scores_row(args, entry, head, i)[j] = args.scale * s;
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) k1_softmax(const __grid_constant__ fa_args args)
{
    int    lane = threadIdx.x % 32;
    fa_i64 row  = (fa_i64)blockIdx.x * FA_WARPS + threadIdx.x / 32, heads = (fa_i64)args.batch * args.heads_q;
    if (row >= heads * args.max_seqlen_q)
        return;
    int    i = (int)(row % args.max_seqlen_q), head = (int)(row / args.max_seqlen_q % args.heads_q);
    int    entry = (int)(row / args.max_seqlen_q / args.heads_q), limit = key_limit(args, i);
    float *s = scores_row(args, entry, head, i), max = -infinity(), sum = 0.0f;
    for (int j = lane; j < limit; j += 32)
        max = fmaxf(max, s[j]);
    for (int step = 16; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, step));
    for (int j = lane; j < limit; j += 32)
        sum += exp2_fast((s[j] - max) * FA_LOG2E);
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    for (int j = lane; j < limit; j += 32)
        s[j] = exp2_fast((s[j] - max) * FA_LOG2E) / sum;
    if (lane == 0 && args.lse.data)
        ((float *)args.lse.data)[entry * args.lse.stride[0] + head * args.lse.stride[1] + i * args.lse.stride[2]] =
            limit == 0 ? -infinity() : max + log2_fast(sum) * FA_LN2;
}

extern "C" __global__ void __launch_bounds__(TILE *TILE) k1_values(const __grid_constant__ fa_args args)
{
    __shared__ float p[TILE][TILE + 1], v[TILE][TILE + 1];
    constexpr int    TILES_D = D / TILE;
    unsigned         n = blockIdx.x;
    int              x = threadIdx.x % TILE, y = threadIdx.x / TILE, column = n % TILES_D * TILE + x;
    int              i = n / TILES_D % args.tiles_q * TILE + y;
    n /= TILES_D * args.tiles_q;
    int   head = n % args.heads_q, entry = n / args.heads_q;
    int   i_last = fa_min_int(i - y + TILE, args.max_seqlen_q) - 1, end = key_limit(args, i_last);
    int   limit = i < args.max_seqlen_q ? key_limit(args, i) : 0;
    float o = 0.0f;
    for (int j = 0; j < end; j += TILE) {
        p[y][x] = j + x < limit ? scores_row(args, entry, head, i)[j + x] : 0.0f;
        v[y][x] = j + y < end ? element(args.v, entry, j + y, head / args.group, column) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < TILE; e++)
            o += p[y][e] * v[e][x];
        __syncthreads();
    }
    if (i < args.max_seqlen_q)
        row_of(args.o, entry, i, head)[column] = (fa_u16)pack<FA_DTYPE>(o, 0.0f);
}
