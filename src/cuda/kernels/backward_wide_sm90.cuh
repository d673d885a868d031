/*
 * A step of backward_sm90.cu at head dims above 128 (BY_COLUMNS). Consumer 0 makes S^T and P^T and passes P^T on, consumer 1 makes dP^T and dS^T; of dV, dK
 * and dQ each has its part of the columns, of 256 a half, of 192 the first has two panels and the other one. Consumer 0 is ahead of the other, so that the tensor
 * cores have the products of one while the other is at its elements:
 *
 *     consumer 0                                                  consumer 1
 *     S = K Q^T; of the step before dK, half of dQ                dK and half of dQ of the step before; dP = V dO^T
 *     P = exp(S - LSE), to consumer 1                             the other half of dQ; P from consumer 0; dV
 *     the other half of dQ, dV                                    dS = P (dP - delta), to shared memory
 *
 * dQ leaves in rounds of 64 columns, each in two pieces, each consumer's by a warp of its own. For that it may wait, so Q and dO, which have few stages, are given
 * back before it, as soon as the last product of them is there. P lies in shared memory until dS of its step is there, dS for two steps.
 */
#ifndef FA_BACKWARD_WIDE_SM90_CUH
#define FA_BACKWARD_WIDE_SM90_CUH

#include "backward_products_sm90.cuh"

/* The first COUNT of an accumulator's elements. */
template <int COUNT, int ALL> FA_DEVICE float (&first_of(float (&x)[ALL]))[COUNT] { return reinterpret_cast<float(&)[COUNT]>(x); }

/* The panels of dK and dV that a consumer has: its places are for the first's. */
template <int GROUP> FA_DEVICE auto &own_dk(consumer &c) { return first_of<32 * panels_of(GROUP, false)>(c.dk); }
template <int GROUP> FA_DEVICE auto &own_dv(consumer &c) { return first_of<32 * panels_of(GROUP, true)>(c.dv); }

template <int GROUP> FA_DEVICE void start_dv(consumer &c) { start_gradient(own_dv<GROUP>(c), c.p, dout_tile(c.n), first_panel_of(GROUP, true)); }

/* dK += dS^T Q, both from shared memory: only consumer 1 has had dS^T in registers. */
template <int COUNT> FA_DEVICE void start_dk(float (&c)[COUNT], unsigned ds, unsigned q, int panel)
{
    matrix a = matrix_of(ds, 0), b = matrix_of(q + panel * (FA_TILE_Q * 128), FA_TILE_Q * 128);
    hold(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        wgmma_shared<1, 1>(c, a.from(step * 2048), b.from(step * 2048), 1);
    wgmma_commit();
}

/* Of the step before: dK, and the first round of this consumer's dQ. */
template <int GROUP> FA_DEVICE void start_dk_and_dq(consumer &c, float (&dq)[DQ_COUNT])
{
    start_dk(own_dk<GROUP>(c), ds_tile(c.n - 1), q_tile(c.n - 1), first_panel_of(GROUP, false));
    start_dq(dq, ds_tile(c.n - 1), GROUP, 0);
}

/* dK is there: Q is done with. */
FA_DEVICE void end_dk(consumer &c)
{
    hold(c.dk);
    release(q_empty(c.n - 1));
}

template <int GROUP> constexpr bool TWO_ROUNDS = panels_of(GROUP, false) > 1;

/* The first round of dQ is there: it leaves, the other begins. */
template <int GROUP> FA_DEVICE void go_on_with_dq(consumer &c, float (&dq)[DQ_COUNT])
{
    hold(dq);
    share_dq(dq, GROUP);
    if constexpr (TWO_ROUNDS<GROUP>)
        start_dq(dq, ds_tile(c.n - 1), GROUP, 1);
}

/* And the other, when it is there. */
template <int GROUP> FA_DEVICE void end_dq(float (&dq)[DQ_COUNT])
{
    if constexpr (TWO_ROUNDS<GROUP>) {
        hold(dq);
        share_dq(dq, GROUP);
    }
}

/* Thread to thread: both have the same elements. */
FA_DEVICE unsigned passed_at() { return shared_address(shared) + PASSED_AT + threadIdx.x % 128 * 16; }

FA_DEVICE void pass(const unsigned (&p)[P_STEPS][4], int number)
{
#pragma unroll
    for (int n = 0; n < P_STEPS; n++)
        shared_store(passed_at() + (number * P_STEPS + n) * 2048, make_uint4(p[n][0], p[n][1], p[n][2], p[n][3]));
}

FA_DEVICE void take(unsigned (&p)[4], int n)
{
    uint4 four = shared_load_16(passed_at() + n * 2048);
    p[0] = four.x, p[1] = four.y, p[2] = four.z, p[3] = four.w;
}

template <bool FIRST>
FA_DEVICE void step_of_p(const fa_args &args, const work &w, consumer &c, int tile, bool masked)
{
    constexpr int GROUP = 0;
    float         s[S_COUNT], dq[DQ_COUNT];
    row_stats     rows;
    dropped_bits<S_COUNT> bits;
    wait_for_q(c.n);
    start_scores(s, k_tile(), q_tile(c.n));
    if constexpr (!FIRST) {
        named_sync(DS_IS_THERE, 128 * CONSUMERS);
        start_dk_and_dq<GROUP>(c, dq);
    }
    find_dropped(args, w, c, bits, tile);
    wgmma_wait<FIRST ? 0 : 2>();
    hold(s);
    if (INSPECTED && masked && some_nonfinite(s)) { /* before the other has P, and so before dQ and dK are begun */
        clear_own_keys(GROUP);
        clear_by_warp(q_tile(c.n));
    }
    load_stats(rows, lse_at(c.n));
    exponentials(args, w, c, s, rows, tile);
    if constexpr (!FIRST) {
        wgmma_wait<1>();
        end_dk(c);
    }
    if constexpr (FA_HAS_SOFTCAP && !FA_HAS_DROPOUT)
        pass(c.noted, 1);
    if (INSPECTED && masked)
        mask_elements(s, columns_of(args, w, tile, GROUP));
    pack_probabilities(c, s, bits);
    if constexpr (FA_HAS_DROPOUT)
        pass(c.noted, 1);
    pass(c.p, 0);
    named_arrive(P_IS_THERE, 128 * CONSUMERS);
    if constexpr (!FIRST) {
        wgmma_wait<0>();
        go_on_with_dq<GROUP>(c, dq);
    }
    wait_for_dout(c.n);
    if (INSPECTED && masked) {
        named_sync(DOUT_IS_CLEAN + c.n % STAGES, 128 * CONSUMERS);
        give_back_nonfinite(c.p, columns_of(args, w, tile, GROUP), {delta_at(c.n)});
    }
    start_dv<GROUP>(c);
    wgmma_wait<0>();
    hold(c.dv);
    hold(c.p);
    release(dout_empty(c.n));
    if constexpr (!FIRST)
        end_dq<GROUP>(dq);
    c.n++;
}

template <bool FIRST>
FA_DEVICE void step_of_ds(const fa_args &args, const work &w, consumer &c, unsigned item, int tile, bool masked)
{
    constexpr int GROUP = 1;
    float         dp[S_COUNT], dq[DQ_COUNT];
    unsigned      ds[P_STEPS][4];
    row_stats     rows;
    if constexpr (FIRST)
        barrier_wait(v_full(), filled<1>(item));
    else {
        start_dk_and_dq<GROUP>(c, dq);
        wgmma_wait<1>();
        end_dk(c);
    }
    wait_for_dout(c.n);
    start_scores<FA_HEAD_DIM_V>(dp, v_tile(), dout_tile(c.n));
    if constexpr (!FIRST) {
        wgmma_wait<1>();
        go_on_with_dq<GROUP>(c, dq);
    }
    wgmma_wait<!FIRST && TWO_ROUNDS<GROUP> ? 1 : 0>();
    hold(dp);
    if (INSPECTED && masked) {
        if (some_nonfinite(dp))
            clear_by_warp<DO_BYTES>(dout_tile(c.n));
        named_arrive(DOUT_IS_CLEAN + c.n % STAGES, 128 * CONSUMERS);
    }
    load_stats(rows, delta_at(c.n));
    named_sync(P_IS_THERE, 128 * CONSUMERS);
#pragma unroll
    for (int n = 0; n < P_STEPS; n++)
        take(c.p[n], n);
    wait_for_q(c.n); /* for dK; consumer 0 has */
    if (INSPECTED && masked)
        give_back_nonfinite(c.p, columns_of(args, w, tile, GROUP), rows);
    start_dv<GROUP>(c);
#pragma unroll
    for (int n = 0; n < P_STEPS; n++) {
        if constexpr (HAS_NOTED)
            take(c.noted[n], P_STEPS + n);
        score_gradients(args, HAS_NOTED ? c.noted[n] : c.p[n], dp, rows, n);
        if constexpr (HAS_NOTED) /* at once: registers are short */
            hold(dp);
    }
    wgmma_wait<0>();
    hold(c.dv);
    hold(c.p);
    release(dout_empty(c.n));
    if (INSPECTED && masked)
        mask_elements(dp, columns_of(args, w, tile, GROUP));
    pack_operand(ds, dp);
    if (!INSPECTED && masked)
        clear_hidden_keys(w, ds, GROUP);
    share_ds(ds_tile(c.n), ds, GROUP);
    fence_async();
    named_arrive(DS_IS_THERE, 128 * CONSUMERS);
    if constexpr (!FIRST)
        end_dq<GROUP>(dq);
    named_sync(DS_IS_WHOLE, 128); /* for this consumer's own products */
    c.n++;
}

/* What the last step of an item has left; dV leaves while its products are made. */
template <int GROUP> FA_DEVICE void last_by_columns(const fa_args &args, const work &w, consumer &c, float factor)
{
    float dq[DQ_COUNT];
    release(v_empty());
    if (GROUP == 0)
        named_sync(DS_IS_THERE, 128 * CONSUMERS);
    start_dk_and_dq<GROUP>(c, dq);
    if (args.apart_dv >= 0)
        share_gradient(w, own_dv<GROUP>(c), factor, GROUP);
    wgmma_wait<0>();
    end_dk(c);
    go_on_with_dq<GROUP>(c, dq);
    wgmma_wait<0>();
    release(k_empty());
    end_dq<GROUP>(dq);
    if (args.apart_dk >= 0)
        share_gradient(w, own_dk<GROUP>(c), args.scale * factor, GROUP);
}

#endif
