/* Tiles of K and V in a ring of FA_STAGES stages that TMA fills, for kernels whose threads all work in step. Shared memory: Q,
 * the stages (K, V), P, one barrier for Q and one for each stage. */
#ifndef FA_LADDER_RING_CUH
#define FA_LADDER_RING_CUH

#include "ladder_fma.cuh"
#include "tma_sm90.cuh"

constexpr int P_AT = Q_BYTES + FA_STAGES * 2 * KV_BYTES, BARRIERS_AT = P_AT + P_BYTES;

extern "C" __constant__ int fa_shared_bytes = BARRIERS_AT + 8 * (1 + FA_STAGES);

/* Tile number n of the walk (the n-th from the right) into its stage. One thread. */
FA_DEVICE void fetch_step(const fa_maps &maps, const block_work &w, unsigned at, int n)
{
    int      stage = n % FA_STAGES, first_key = (w.tiles - 1 - n) * FA_TILE_K;
    unsigned k = at + Q_BYTES + stage * 2 * KV_BYTES, full = at + BARRIERS_AT + 8 * (1 + stage);
    barrier_expect(full, 2 * KV_BYTES);
    fetch_tile<FA_TILE_K, D>(k, maps.k, full, w.entry, w.kv_head, first_key);
    fetch_tile<FA_TILE_K, D>(k + KV_BYTES, maps.v, full, w.entry, w.kv_head, first_key);
}

/* Barriers, Q and the first tiles. Returns when Q is there. */
FA_DEVICE void start_ring(const fa_maps &maps, const block_work &w, unsigned at)
{
    unsigned q_full = at + BARRIERS_AT;
    if (threadIdx.x == 0) {
        for (int n = 0; n < 1 + FA_STAGES; n++)
            barrier_init(q_full + 8 * n, 1);
        barrier_init_done();
        barrier_expect(q_full, Q_BYTES);
        fetch_tile<FA_TILE_Q, D>(at, maps.q, q_full, w.entry, w.head, w.first_q);
        for (int n = 0; n < FA_STAGES && n < w.tiles; n++)
            fetch_step(maps, w, at, n);
    }
    __syncthreads(); /* the barriers are set up */
    barrier_wait(q_full, 0);
}

FA_DEVICE void wait_for_step(unsigned at, int n)
{
    barrier_wait(at + BARRIERS_AT + 8 * (1 + n % FA_STAGES), n / FA_STAGES & 1);
}

#endif
