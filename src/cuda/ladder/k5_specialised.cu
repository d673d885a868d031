/*
 * K5: K4.2 with warps of two kinds.
 *
 *     warpgroup 0    producer: one thread fetches Q and keeps the ring of K and V tiles full. Gives its registers back.
 *     warpgroup 1..  consumers: 64 queries each; as K4.2's step, with more registers and without a barrier over the block
 *
 * Each stage has two barriers for K and two for V: "full" counts TMA's bytes, "empty" the arrivals of the consumers' warps.
 * Phases of both alternate, so nothing is ever reset: the producer waits for the opposite parity, which a fresh barrier passes.
 *
 * What it shows: the consumers drift apart by themselves, one in softmax while the other multiplies, as nothing makes them
 * meet any more.
 */
#include "ladder_warpgroup.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1; /* warpgroups */
static_assert(FA_TILE_Q == 64 * CONSUMERS, "a consumer owns 64 rows");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;

template <bool MASKED>
FA_DEVICE void step(const fa_args &args, const block_work &w, float (&o)[O_COUNT], row_state &state, unsigned at, int group,
                    int n)
{
    float    s[S_COUNT], alpha[2];
    unsigned p[P_STEPS][4];
    wait_for_k(at, n);
    start_scores(s, at + group * (64 * 128), at, n);
    wgmma_wait<0>();
    hold(s);
    release(k_empty(at, n % FA_STAGES));
    if (MASKED)
        mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1 - n) * FA_TILE_K);
    softmax_step<MASKED>(s, state, alpha, args.scale_log2);
    scale_output(o, alpha);
    pack_p(p, s);
    wait_for_v(at, n);
    start_output(o, p, at, n);
    wgmma_wait<0>();
    hold(o);
    release(v_empty(at, n % FA_STAGES));
}

FA_DEVICE void consume(const fa_args &args, const block_work &w, unsigned at, int group)
{
    float     o[O_COUNT];
    row_state state;
    clear(state, o);
    barrier_wait(q_full(at), 0);
    int n = 0, masked = fa_max_int(w.tiles - w.clean, 0);
    for (; n < masked; n++)
        step<true>(args, w, o, state, at, group, n);
    for (; n < w.tiles; n++)
        step<false>(args, w, o, state, at, group, n);
    store_rows(args, w, o, state, shared + group * (64 * 128), w.first_q + 64 * group);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    k5_specialised(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    unsigned   at = shared_address(shared);
    block_work w  = block_work_of(args);
    if (threadIdx.x == 0)
        start_barriers(at, 4 * CONSUMERS);
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 3 ? 32 : 24>();
        if (threadIdx.x == 0)
            produce(maps, w, at);
    } else {
        registers_up<CONSUMERS == 3 ? 160 : 240>();
        consume(args, w, at, threadIdx.x / 128 - 1);
    }
}
