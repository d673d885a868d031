/* What K6 and K7 share: consumers that take turns, each with the softmax of a tile under P V of the tile before (k6_pingpong.cu has the
 * picture). */
#ifndef FA_LADDER_PINGPONG_CUH
#define FA_LADDER_PINGPONG_CUH

#include "ladder_warpgroup.cuh"

constexpr int CONSUMERS = FA_WARPS / 4 - 1; /* warpgroups */
static_assert(FA_TILE_Q == 64 * CONSUMERS && CONSUMERS > 1, "a consumer owns 64 rows, and takes turns with another");

/* Named barrier 1 + c: consumer c waits there, and the one before it arrives. The last one's first arrival starts the round. */
FA_DEVICE void await_turn(int group) { named_sync(1 + group, 256); }
FA_DEVICE void pass_turn(int group) { named_arrive(1 + (group + 1) % CONSUMERS, 256); }

/* Of 16 bits the launch's own, which is a constant and costs no register. */
FA_DEVICE float scale_of(const fa_args &args, const block_work &w) { return FP8 ? w.scale_log2 : args.scale_log2; }

/* Scores of step n while P V of the step before is under way. */
template <bool MASKED>
FA_DEVICE void step(const fa_args &args, const block_work &w, float (&o)[O_COUNT], unsigned (&p)[P_STEPS][4],
                    row_state &state, unsigned at, int group, int n)
{
    float s[S_COUNT], alpha[2];
    await_turn(group);
    start_scores(s, at + group * Q_GROUP, at, n); /* line 8 */
    wait_for_v(at, n - 1);
    start_output(o, p, at, n - 1); /* line 10, of the tile before */
    pass_turn(group);
    wgmma_wait<1>();
    hold(s);
    release(k_empty(at, n % FA_STAGES));
    if (MASKED)
        mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1 - n) * FA_TILE_K);
    softmax_step<MASKED>(s, state, alpha, scale_of(args, w)); /* line 9 */
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
            start_scores(s, at + group * Q_GROUP, at, 0);
            wgmma_wait<0>();
            hold(s);
            release(k_empty(at, 0));
            mask_scores(args, s, w.first_q + 64 * group, (w.tiles - 1) * FA_TILE_K);
            softmax_step<true>(s, state, alpha, scale_of(args, w));
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
    store_rows(args, w, o, state, shared + O_AT + group * (64 * 128), w.first_q + 64 * group); /* lines 12 to 15 */
}

#endif
