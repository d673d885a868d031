/*
 * K4.2: both products by WGMMA. P goes from the first to the second in registers.
 *
 *                  head_dim             Each warpgroup owns 64 queries. A step: wait for K, S = Q K^T, softmax in registers, wait
 *               +-----------+           for V, O += P V. Thread 0 asks for the tile after next when all have done with a stage.
 *  warpgroup 0  |  64 rows  |
 *  warpgroup 1  |  64 rows  |           K and V have barriers of their own: Q K^T need not wait for V.
 *               +-----------+
 *                K, V tiles in FA_STAGES stages by TMA
 *
 * What it shows: the hand-off. WGMMA takes its left operand from registers in the layout in which it leaves its result, so P
 * neither visits shared memory nor changes lanes. Within a warpgroup nothing overlaps yet: the tensor cores rest during
 * softmax unless the other warpgroup happens to use them.
 */
#include "ladder_warpgroup.cuh"

static_assert(FA_TILE_Q == 16 * FA_WARPS, "a warpgroup owns 64 rows");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;

template <bool MASKED>
FA_DEVICE void step(const fa_args &args, const fa_maps &maps, const block_work &w, float (&o)[O_COUNT], row_state &state,
                    unsigned at, int n)
{
    int      group = threadIdx.x / 128;
    float    s[S_COUNT], alpha[2];
    unsigned p[P_STEPS][4];
    wait_for_k(at, n);
    start_scores(s, at + group * (64 * 128), at, n);
    wgmma_wait<0>();
    hold(s);
    if (MASKED)
        mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1 - n) * FA_TILE_K);
    softmax_step<MASKED>(s, state, alpha, args.scale_log2);
    scale_output(o, alpha);
    pack_p(p, s);
    wait_for_v(at, n);
    start_output(o, p, at, n);
    wgmma_wait<0>();
    hold(o);
    __syncthreads(); /* all have done with this stage */
    if (threadIdx.x == 0 && n + FA_STAGES < w.tiles) {
        fetch_k(maps, w, at, n + FA_STAGES);
        fetch_v(maps, w, at, n + FA_STAGES);
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS)
    k4_2_wgmma(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    unsigned   at = shared_address(shared);
    int        group = threadIdx.x / 128;
    block_work w = block_work_of(args);
    float      o[O_COUNT];
    row_state  state;
    clear(state, o);
    if (threadIdx.x == 0) {
        start_barriers(at, 1);
        fetch_q(maps, w, at);
        for (int n = 0; n < FA_STAGES && n < w.tiles; n++) {
            fetch_k(maps, w, at, n);
            fetch_v(maps, w, at, n);
        }
    }
    __syncthreads(); /* the barriers are set up */
    barrier_wait(q_full(at), 0);
    int n = 0, masked = fa_max_int(w.tiles - w.clean, 0);
    for (; n < masked; n++)
        step<true>(args, maps, w, o, state, at, n);
    for (; n < w.tiles; n++)
        step<false>(args, maps, w, o, state, at, n);
    store_rows(args, w, o, state, shared + group * (64 * 128), w.first_q + 64 * group);
}
