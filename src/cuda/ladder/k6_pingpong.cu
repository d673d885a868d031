/*
 * K6: K5 with the overlap arranged, between consumers and inside each.
 *
 *     warpgroup 0    producer, as in K5
 *     warpgroup 1..  consumers, 64 queries each, that take turns:
 *
 *         step n:   on this consumer's turn start S' = Q K_n^T, then O += P V_(n-1), and pass the turn on
 *                   when S' is there: softmax of S', while O += P V_(n-1) runs
 *                   when O is there:  scale O, P = S'
 *
 * The turn goes round by named barriers, so that one consumer's softmax falls into the products of another (ping-pong), and
 * inside a consumer the exponentials of one tile fall into the second product of the tile before. The price is a second
 * tile of S in registers.
 */
#include "ladder_warpgroup.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1; /* warpgroups */
static_assert(FA_TILE_Q == 64 * CONSUMERS && CONSUMERS > 1, "a consumer owns 64 rows, and takes turns with another");

extern "C" __constant__ int fa_shared_bytes = SHARED_BYTES;

/* Named barrier 1 + c: consumer c waits there, and the one before it arrives. The last one's first arrival starts the round. */
FA_DEVICE void await_turn(int group) { named_sync(1 + group, 256); }
FA_DEVICE void pass_turn(int group) { named_arrive(1 + (group + 1) % CONSUMERS, 256); }

/* Scores of step n while P V of the step before is under way. */
template <bool MASKED>
FA_DEVICE void step(const fa_args &args, const block_work &w, float (&o)[O_COUNT], unsigned (&p)[P_STEPS][4],
                    row_state &state, unsigned at, int group, int n)
{
    float s[S_COUNT], alpha[2];
    await_turn(group);
    start_scores(s, at + group * (64 * 128), at, n);
    wait_for_v(at, n - 1);
    start_output(o, p, at, n - 1);
    pass_turn(group);
    wgmma_wait<1>();
    hold(s);
    release(k_empty(at, n % FA_STAGES));
    if (MASKED)
        mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1 - n) * FA_TILE_K);
    softmax_step<MASKED>(s, state, alpha, args.scale_log2);
    if (n + 1 < w.tiles) /* here, for a branch keeps the compiler from moving exponentials behind the wait that follows */
        wait_for_k(at, n + 1);
    wgmma_wait<0>();
    hold(o);
    hold(p);
    release(v_empty(at, (n - 1) % FA_STAGES));
    scale_output(o, alpha);
    pack_p(p, s);
}

FA_DEVICE void consume(const fa_args &args, const block_work &w, unsigned at, int group)
{
    float     o[O_COUNT];
    row_state state;
    clear(state, o);
    if (group == CONSUMERS - 1)
        pass_turn(group);
    barrier_wait(q_full(at), 0);
    if (w.tiles > 0) {
        unsigned p[P_STEPS][4];
        int      n = 1, masked = fa_max_int(w.tiles - w.clean, 0);
        {
            float s[S_COUNT], alpha[2];
            wait_for_k(at, 0);
            start_scores(s, at + group * (64 * 128), at, 0);
            wgmma_wait<0>();
            hold(s);
            release(k_empty(at, 0));
            mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1) * FA_TILE_K);
            softmax_step<true>(s, state, alpha, args.scale_log2);
            pack_p(p, s);
            if (w.tiles > 1)
                wait_for_k(at, 1);
        }
        for (; n < masked; n++)
            step<true>(args, w, o, p, state, at, group, n);
        for (; n < w.tiles; n++)
            step<false>(args, w, o, p, state, at, group, n);
        wait_for_v(at, w.tiles - 1);
        start_output(o, p, at, w.tiles - 1);
        wgmma_wait<0>();
        hold(o);
    }
    store_rows(args, w, o, state, shared + group * (64 * 128), w.first_q + 64 * group);
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    k6_pingpong(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
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
