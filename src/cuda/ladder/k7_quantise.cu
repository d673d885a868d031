/*
 * K7's and K8's way in: Q, K and V become E4M3 in two walks over them, a tile a block.
 *
 *     k7_largest     the largest |x| of each head of Q, of K and of V
 *     k7_quantise    x * 448 / largest, rounded to E4M3; each tile is written as shared memory is to hold it
 *
 *                  D columns
 *             +----+----+-- --+----+     A row is read by D / 8 neighbouring lanes, eight columns (16 bytes) each, which become
 *     a row   | 8  | 8  | ... | 8  |     eight bytes of the tile: panels and swizzle of panels_sm90.cuh. As these kernels know the
 *             +----+----+-- --+----+     layout, K7 needs no tensor map: a tile comes by one bulk copy.
 *
 * V is turned round on its way (turn_sm90.cuh), for WGMMA takes FP8's operands with the inner dimension along the rows only. Rows
 * past the end become zeros.
 *
 * K8 (FA_VARIANT 1) rotates the rows of Q and K first: k8_rotate.cuh.
 */
#include "k8_rotate.cuh"
#include "ladder_fp8.cuh"
#include "ptx_sm90.cuh"
#include "turn_sm90.cuh"

constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = THREADS / CHUNKS; /* lanes of a row; rows that a block holds at a time */
static_assert(FA_TILE_Q % ROWS_AT_ONCE == 0 && FA_TILE_K % ROWS_AT_ONCE == 0, "no lane is idle, for lanes tell each other theirs");

/* A block's tile: Q's come first, then K's, then V's. */
struct piece {
    fa_view        view;
    int            entry, head, first, rows, end; /* rows from `first` on; the tensor has `end` */
    int            number;                        /* of the head in args.largest */
    unsigned char *to;
    bool           is_v;
};

FA_DEVICE piece piece_of(const fa_args &args)
{
    piece p;
    int   n = blockIdx.x, q_tiles = args.batch * args.heads_q * args.tiles_q, k_tiles = args.batch * args.heads_k * args.tiles_k;
    bool  is_q = n < q_tiles;
    p.is_v = n >= q_tiles + k_tiles;
    n -= is_q ? 0 : p.is_v ? q_tiles + k_tiles : q_tiles;
    int tiles = is_q ? args.tiles_q : args.tiles_k, heads = is_q ? args.heads_q : args.heads_k;
    p.view   = is_q ? args.q : p.is_v ? args.v : args.k;
    p.rows   = is_q ? FA_TILE_Q : FA_TILE_K;
    p.end    = is_q ? args.max_seqlen_q : args.max_seqlen_k;
    p.first  = n % tiles * p.rows;
    p.head   = n / tiles % heads;
    p.entry  = n / tiles / heads;
    p.number = is_q ? q_head(args, p.entry, p.head) : p.is_v ? v_head(args, p.entry, p.head) : k_head(args, p.entry, p.head);
    p.to     = (is_q ? args.q_tiles : p.is_v ? args.v_turned : args.k_tiles) + (fa_i64)n * (p.rows * D);
    return p;
}

/* This lane's eight columns of row `row` of the tile. */
FA_DEVICE void load_eight(float (&x)[8], const piece &p, int row)
{
    int   chunk = threadIdx.x % CHUNKS;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (p.first + row < p.end)
        words = *(const uint4 *)(row_of(p.view, p.entry, p.first + row, p.head) + 8 * chunk);
    unpack_eight(x, words);
    if (FA_VARIANT == 1 && !p.is_v)
        rotate(x, chunk);
}

extern "C" __global__ void __launch_bounds__(THREADS) k7_largest(const __grid_constant__ fa_args args)
{
    piece p       = piece_of(args);
    float largest = 0.0f;
#pragma unroll 4
    for (int row = threadIdx.x / CHUNKS; row < p.rows; row += ROWS_AT_ONCE) {
        float x[8];
        load_eight(x, p, row);
#pragma unroll
        for (int e = 0; e < 8; e++)
            largest = fmaxf(largest, fabsf(x[e])); /* passes NaN over: rows that see nothing */
    }
    for (int step = 16; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
    if (threadIdx.x % 32 == 0)
        atomicMax((int *)args.largest + p.number, __float_as_int(largest)); /* floats from 0 on are in the order of their bits */
}

extern "C" __global__ void __launch_bounds__(THREADS) k7_quantise(const __grid_constant__ fa_args args)
{
    piece p      = piece_of(args);
    int   chunk  = threadIdx.x % CHUNKS;
    float factor = 1.0f / descale_of(args, p.number);
#pragma unroll 4
    for (int row = threadIdx.x / CHUNKS; row < p.rows; row += ROWS_AT_ONCE) {
        float x[8];
        load_eight(x, p, row);
#pragma unroll
        for (int e = 0; e < 8; e++)
            x[e] *= factor;
        uint2 eight = make_uint2(pack_e4m3(x[0], x[1], x[2], x[3]), pack_e4m3(x[4], x[5], x[6], x[7]));
        if (p.is_v)
            *(uint2 *)word_at(row, 2 * chunk) = eight;
        else /* one panel: D bytes a row */
            *(uint2 *)(p.to + row * D + (chunk / 2 ^ (D == 128 ? row % 8 : row / 2 % 4)) * 16 + chunk % 2 * 8) = eight;
    }
    if (p.is_v) {
        __syncthreads();
        turn_rows(p.to);
    }
}
