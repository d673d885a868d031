/*
 * K7: K6 in FP8 (E4M3), whose products run twice as fast.
 *
 *     k7_largest, k7_quantise   Q, K, V of 16 bits become E4M3, with one scale a head (k7_quantise.cu)
 *     k7_fp8                    K6's block; what its consumers do is the same text (ladder_pingpong.cuh). What is new:
 *
 *         S = Q K^T   sums products of rounded numbers: times both descales, by way of the softmax's scale
 *         P           is rounded to E4M3 2^8 times as large, so that it is a normal number down to 2^-14
 *         P V         from registers as ever, but FP8's left operand wants four neighbouring columns a lane where an accumulator has
 *                     two and two eight further on: V^T's keys stand in that order (turn_sm90.cuh), and nothing is exchanged
 *         O           times V's descale, with the division by l
 *
 * Tiles come as they are to lie in shared memory, by bulk copies without a tensor map.
 *
 * What it costs: four bits a number: a relative error of 5%. Hopper sums FP8 products in 14 bits or so, which adds up where V's mean
 * is not 0: the library's own kernel takes O out every 512 keys, this one does not.
 */
#include "ladder_fp8.cuh"
#include "ladder_pingpong.cuh"

static_assert(FP8, "the quantised Q, K and V");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;

/* A tile by its number, counted over all heads; one thread asks for it. */
FA_DEVICE void fetch(unsigned to, const unsigned char *tiles, fa_i64 number, int bytes, unsigned full)
{
    barrier_expect(full, bytes);
    bulk_load(to, tiles + number * bytes, bytes, full);
}

/* All of a producer's work, as K5's. */
FA_DEVICE void produce(const fa_args &args, const block_work &w, unsigned at)
{
    fa_i64 q_tile = ((fa_i64)w.entry * args.heads_q + w.head) * args.tiles_q + w.first_q / FA_TILE_Q;
    fa_i64 first  = ((fa_i64)w.entry * args.heads_k + w.kv_head) * args.tiles_k;
    fetch(at, args.q_tiles, q_tile, Q_BYTES, q_full(at));
    for (int n = 0; n < w.tiles; n++) {
        int    stage = n % FA_STAGES, parity = (n / FA_STAGES & 1) ^ 1;
        fa_i64 tile = first + w.tiles - 1 - n;
        barrier_wait(k_empty(at, stage), parity);
        fetch(at + K_AT + stage * KV_BYTES, args.k_tiles, tile, KV_BYTES, k_full(at, stage));
        barrier_wait(v_empty(at, stage), parity);
        fetch(at + V_AT + stage * KV_BYTES, args.v_turned, tile, KV_BYTES, v_full(at, stage));
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1) k7_fp8(const __grid_constant__ fa_args args)
{
    unsigned   at = shared_address(shared);
    block_work w  = block_work_of(args);
    if (threadIdx.x == 0)
        start_barriers(at, 4 * CONSUMERS);
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 3 ? 32 : 24>();
        if (threadIdx.x == 0)
            produce(args, w, at);
    } else {
        registers_up<CONSUMERS == 3 ? 160 : 240>();
        w.scale_log2 *= descale_of(args, q_head(args, w.entry, w.head)) * descale_of(args, k_head(args, w.entry, w.kv_head));
        w.descale_v = descale_of(args, v_head(args, w.entry, w.kv_head));
        consume(args, w, at, threadIdx.x / 128 - 1);
    }
}
