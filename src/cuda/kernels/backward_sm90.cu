/*
 * FlashAttention's backward for Hopper: TMA brings tiles, WGMMA multiplies them, warps have roles. float16 and bfloat16.
 *
 *     warpgroup 0, warp 0    producer: one thread finds this block's tiles of keys (struct work), fetches K and V of each and keeps
 *                            the rings of Q and dO full
 *                  warp 1    has TMA add dQ of each step to the float one in memory (above head_dim 128 warps 1 and 2, a consumer's each)
 *                  warp 2    has the bias's gradient, where it is wanted
 *                  warp 3    one thread waits for the turn at the float dQ of the next step: adding alone takes a warp all of its time
 *     warpgroups 1, 2        consumers: 64 keys each, whose dK and dV stay in their registers while they walk the query tiles
 *
 * A step, transposed as in backward_sm80.cu, so that P^T and dS^T are left operands where they lie. The tensor cores have the products
 * of a line while the right column is done:
 *
 *     S^T = K Q^T, dP^T = V dO^T      P^T = exp(S^T - LSE), as soon as S is there; dS^T = P^T (dP^T - delta), to shared memory for dQ
 *     dV += P^T dO, dQ = dS K         the other consumer's dS is waited for
 *     dK += dS^T Q                    dQ to shared memory, for the warp that adds it
 *
 * With 128 or 80 queries (DQ_LATE) dQ is that of the step before, for which nobody waits: see backward_block_sm90.cuh.
 *
 * dQ needs dS of both consumers: each makes 64 queries of 128 x 64, or 64 columns of 64 x 128, or of the 80 x 128 that head_dim 128 has in long calls, or of 48 x 192
 * and half of the queries of the third 64 (DQ_TURNED). Its order in memory is that of the registers, [64 queries or columns][8 columns, DQ_TURNED queries][thread][4], undone by backward_convert_sm90.cu;
 * of 96 columns the second 64 have half of that, the first columns or (DQ_TURNED) threads.
 *
 * Above head_dim 128 (BY_COLUMNS) both consumers have the same 80 keys: backward_wide_sm90.cuh.
 *
 * The compiler serialises all products where it runs out of registers: so nothing is in flight from one round of the loop to the next, and
 * loops are as plain as they can be (decision 0055).
 *
 * Shared memory: K, V, three stages of Q (BY_COLUMNS and with 80 queries two) and two of dO (one beside 256 columns), two of dS (with 48 queries one; BY_COLUMNS P's too; panels as in
 * panels_sm90.cuh), dQ, LSE and delta of the stages, barriers, works, at head_dim 128 with 64 queries a quarter of dK and dV on their way out, and one
 * stage of a bias, with which Q has two.
 */
#include "backward_wide_sm90.cuh"

/* ---- producer: one thread ---- */

FA_DEVICE void fetch_q(const fa_args &args, const fa_maps &maps, const work &w, const walk &at, unsigned n)
{
    barrier_wait(q_empty(n), freed<Q_STAGES>(n));
    barrier_expect(q_full(n), Q_BYTES + STAT_BYTES);
    fetch_ragged<FA_TILE_Q, FA_HEAD_DIM>(q_tile(n), maps.q, q_full(n), at.head, w.seq.q_entry * args.apart_q + w.seq.q_row + w.seq.seqlen_q,
                                         w.seq.seqlen_q - at.tile * FA_TILE_Q);
    bulk_load(lse_at(n), args.row_stats + (fa_i64)at.number * (2 * FA_TILE_Q), STAT_BYTES, q_full(n));
}

FA_DEVICE void fetch_dout(const fa_args &args, const fa_maps &maps, const work &w, const walk &at, unsigned n)
{
    barrier_wait(dout_empty(n), freed<STAGES>(n));
    barrier_expect(dout_full(n), DO_BYTES + STAT_BYTES);
    fetch_ragged<FA_TILE_Q, FA_HEAD_DIM_V>(dout_tile(n), maps.dout, dout_full(n), at.head,
                                         w.seq.q_entry * args.apart_dout + w.seq.q_row + w.seq.seqlen_q, w.seq.seqlen_q - at.tile * FA_TILE_Q);
    bulk_load(delta_at(n), args.row_stats + (fa_i64)at.number * (2 * FA_TILE_Q) + FA_TILE_Q, STAT_BYTES, dout_full(n));
}

/* Behind Q and dO: its stage is free last. */
FA_DEVICE void fetch_bias(const fa_args &args, const fa_maps &maps, const work &w, const walk &at, unsigned n)
{
    if constexpr (FA_HAS_BIAS) {
        barrier_wait(bias_empty(), freed<1>(n));
        fetch_bias_tile(args, maps, bias_tile(), bias_full(), w.b, at.head, at.tile * FA_TILE_Q, w.first_k);
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned n = 0;
    for (unsigned item = 0;; item++) {
        share_work &w = work_at(item);
        barrier_wait(added(item), freed<WORKS>(item)); /* consumers are not as many items behind, but who waits for other blocks' dQ may be, if items have no steps */
        if (!find_item(args, item, w))
            break;
        int  steps = steps_of(w), end = w.seq.kv_row + w.seq.seqlen_k, left = w.seq.seqlen_k - w.first_k;
        walk at    = start_walk(args, w);
        if (steps > 0) {
            if (item > 0) { /* two steps before K is free */
                prefetch_ragged<FA_TILE_K, FA_HEAD_DIM>(maps.k, w.kv_head, w.seq.kv_entry * args.apart_k + end, left);
                prefetch_ragged<FA_TILE_K, FA_HEAD_DIM_V>(maps.v, w.kv_head, w.seq.kv_entry * args.apart_v + end, left);
            }
            fetch_q(args, maps, w, at, n);
            if (!BY_COLUMNS)
                fetch_dout(args, maps, w, at, n);
            fetch_bias(args, maps, w, at, n);
            barrier_wait(k_empty(), freed<1>(item));
            barrier_expect(k_full(), K_BYTES);
            fetch_ragged<FA_TILE_K, FA_HEAD_DIM>(k_tile(), maps.k, k_full(), w.kv_head, w.seq.kv_entry * args.apart_k + end, left);
            barrier_wait(v_empty(), freed<1>(item));
            barrier_expect(v_full(), V_BYTES);
            fetch_ragged<FA_TILE_K, FA_HEAD_DIM_V>(v_tile(), maps.v, v_full(), w.kv_head, w.seq.kv_entry * args.apart_v + end, left);
            if (BY_COLUMNS) /* perhaps one stage, which the step before has until its end */
                fetch_dout(args, maps, w, at, n);
            n++;
        } else {
            barrier_wait(k_empty(), freed<1>(item));
            barrier_arrive(k_full());
            barrier_wait(v_empty(), freed<1>(item));
            barrier_arrive(v_full());
        }
        if (item == 0) /* all blocks begin now: what the first step needs comes first */
            barrier_wait(k_full(), filled<1>(item));
        for (int step = 1; step < steps; step++, n++) {
            advance(args, at);
            fetch_q(args, maps, w, at, n);
            fetch_dout(args, maps, w, at, n);
            fetch_bias(args, maps, w, at, n);
        }
    }
}

/* ---- who adds dQ: a thread that takes turns, one warp (BY_COLUMNS one for each consumer) that adds once a step, from shared memory by TMA ---- */

/* Nobody clears the float dQ: one stores it, the others wait until it is there and add. FA_DQ_FIRST_COMES: a query tile's dq_turn has a bit by which who comes first
 * says that a block will store, and one of each adder by which it says that it has; blocks begin at different tiles (start_walk), so few ever wait. Else dq_turn counts
 * turns that are over: one for each tile of keys that it sees, in order, or with FA_DQ_FIRST_KEYS that of the head's first tile of keys alone. */
constexpr int WILL = 1, HAS = 2 /* the first adder's */, ALL_HAVE = (HAS << ADDERS) - HAS;

/* Wait for this block's turn; true: it stores. */
FA_DEVICE bool begin_turn(const fa_args &args, const work &w, const walk &at)
{
    int *turn = args.dq_turn + at.number, turns = 1;
    if (args.dq_order == FA_DQ_FIRST_COMES) {
        int now = or_acquire(turn, WILL);
        if (!(now & WILL))
            return true;
        while ((now & ALL_HAVE) != ALL_HAVE)
            now = load_acquire(turn);
        return false;
    }
    if (args.dq_order == FA_DQ_IN_ORDER)
        turns = turn_number(args, w, at.tile);
    else if (w.first_k == 0)
        turns = 0;
    while (load_acquire(turn) < ADDERS * turns)
        continue;
    return turns == 0;
}

/* One thread: a turn for each step, one step ahead of the warps that add. It waits for other blocks, which wait for nothing but the consumers of theirs: what they
 * have begun to store they will, whatever this one does. */
FA_DEVICE void take_turns(const fa_args &args)
{
    unsigned n = 0;
    for (unsigned item = 0; has_item(item); item++) {
        const work &w  = work_at(item);
        walk        at = start_walk(args, w);
        int         left = steps_of(w);
        for (bool first = true; first || left > 0; first = false, left--, n++, advance(args, at)) {
            barrier_wait(turn_empty(), freed<1>(n));
            next_turn() = {left > 0 ? at.number : NOTHING, item, left > 0 && begin_turn(args, w, at), left == 1};
            fence_async_global(); /* what others have stored, for TMA */
            barrier_arrive(turn_full());
        }
    }
    barrier_wait(turn_empty(), freed<1>(n));
    next_turn().number = NO_MORE;
    barrier_arrive(turn_full());
}

/* By the thread that asks: all that was asked for is there, but PENDING copies. `open`: the query tile of which others are still to be told, or -1. */
template <int PENDING> FA_DEVICE void tell(const fa_args &args, int &open, int adder)
{
    if (open < 0)
        return;
    bulk_added<PENDING>();
    fence_async_global();
    add_release(args.dq_turn + open, args.dq_order == FA_DQ_FIRST_COMES ? HAS << adder : 1);
    open = -1;
}

/* A slot of dQ's memory to its consumer, as soon as TMA has read all but the PENDING newest copies. */
template <int PENDING> FA_DEVICE void give_slot(int slot, bool asks)
{
    if (asks)
        bulk_added_was_read<PENDING>();
    __syncwarp();
    named_arrive(DQ_IS_FREE + slot, 128 + 32);
}

/* What consumers put into this warp's slots, COPIES in turn: ask(n, slot) has TMA take the n-th, the last by LAST_COPIES copies at least. Before and after, slots
 * are with their consumers; where both are one's, so is the first, and the second as soon as TMA has read what came before. */
template <int COPIES, int LAST_COPIES, typename ASK> FA_DEVICE void pass_slots(int adder, bool asks, ASK ask)
{
#pragma unroll 1
    for (int n = 0; n < COPIES; n++) {
        int slot = adder * SLOTS + n % SLOTS;
        if (PIECES == SLOTS)
            give_slot<0>(slot ^ 1, asks);
        named_sync(DQ_IS_THERE + slot, 128 + 32);
        if (asks) {
            if (ADDER_FENCES)
                fence_async();
            ask(n, slot);
        }
    }
    if (PIECES < SLOTS) {
        give_slot<LAST_COPIES>(0, asks);
        give_slot<0>(1, asks);
    }
}

/* Behind an item's last step dK takes dQ's way (DK_BY_DQ). */
FA_DEVICE void pass_gradient(const work &w, const fa_map &map, int apart, int adder, bool asks)
{
#pragma unroll
    for (int round = 0; round < GRADIENT_ROUNDS; round++)
        pass_slots<SLOTS, 0>(adder, asks, [&](int, int group) {
            int first = w.first_k + first_key_of(group);
            if (first < w.seq.rows_k)
#pragma unroll
                for (int panel = round * SLOT_PANELS; panel < fa_min_int(K_PANELS, (round + 1) * SLOT_PANELS); panel++)
                    store_panel(w, map, apart, dq_at(group) + panel % SLOT_PANELS * PANEL_BYTES, 64 * panel, first);
        });
}

template <int ADDER> FA_DEVICE void add_dq(const fa_args &args, const fa_maps &maps)
{
    constexpr int PIECE = piece_of(ADDER), PER_ROUND = pieces_of(ADDER), COPIES = BY_COLUMNS ? panels_of(ADDER, false) * PER_ROUND : SLOTS;
    static_assert(COPIES % SLOTS == 0, "the first slot comes first in each step");
    bool asks = threadIdx.x % 32 == 0;
    int  open = -1;
#pragma unroll
    for (int n = 0; n < SLOTS / PIECES; n++)
        named_arrive(DQ_IS_FREE + ADDER * SLOTS + n, 128 + 32);
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        barrier_wait(turn_full(), filled<1>(n));
        turn now = next_turn();
        if (now.number == NO_MORE)
            break;
        if (now.number == NOTHING) {
            __syncwarp(); /* all have read the turn */
            if (asks) {
                barrier_arrive(turn_empty());
                barrier_arrive(added(now.item));
            }
            continue;
        }
        float *to = args.dq_accum + (fa_i64)now.number * (FA_TILE_Q * FA_HEAD_DIM) + ADDER * (FIRST_OF_K * FA_TILE_Q * 64);
        auto add = [&](int n, int slot) {
            constexpr int BYTES = 128 * 16 * PIECE, LAST = 128 * ROUND_COUNT * 4 - (PER_ROUND - 1) * BYTES;
            int           bytes = HALF_PANEL && n == 1 ? BYTES / 2 : LAST < BYTES && n % PER_ROUND == PER_ROUND - 1 ? LAST : BYTES;
            bulk_add(to, dq_at(slot), bytes, now.stores);
            to += bytes / 4;
            if (n == 0) /* not before: else this block would come first where another begins now */
                barrier_arrive(turn_empty());
        };
        pass_slots<COPIES, 1>(ADDER, asks, add);
        if (asks) {
            tell<COPIES>(args, open, ADDER); /* a step later there is nothing to wait for */
            open = now.stores || args.dq_order == FA_DQ_IN_ORDER ? now.number : -1;
            if (args.dq_order != FA_DQ_FIRST_KEYS || now.last) /* who waits for others, or has some close behind */
                tell<0>(args, open, ADDER);
        }
        if (DK_BY_DQ && now.last && args.apart_dk >= 0)
            pass_gradient(work_at(now.item), maps.dk, args.apart_dk, ADDER, asks);
        if (asks && now.last)
            barrier_arrive(added(now.item));
    }
    if (asks)
        bulk_added_was_read();
}

/* A step's dS is in registers: dV, dQ and dK of it. */
FA_DEVICE void finish_step(consumer &c, bool last)
{
    float dq[DQ_COUNT], third[THIRD_COUNT];
    wait_for_passed_ds(c.n);
    share_ds(ds_tile(c.n), c.ds, c.group);
    give_ds(c.n);
    start_gradient(c.dv, c.p, dout_tile(c.n));
    wait_for_own_ds(c.group);
    if constexpr (THIRD_SHARED) /* beside dV, for dQ's own panel will be where P is, and beside dK even this would be too much */
        start_third_of_dq(third, ds_tile(c.n), c.group);
    else
        start_dq(dq, ds_tile(c.n), c.group);
    wgmma_wait<1>();
    hold(c.dv);
    hold(c.p);
    release(dout_empty(c.n));
    if constexpr (THIRD_SHARED) {
        start_dq(dq, ds_tile(c.n), c.group);
        wgmma_wait<1>();
        hold(third);
    }
    start_gradient(c.dk, c.ds, q_tile(c.n));
    wgmma_wait<1>();
    hold(dq);
    free_ds(c.group);
    if (last) { /* the next K takes longer than what is left */
        release(k_empty());
        if (V_IS_EARLY)
            release(v_empty());
    }
    share_dq(dq, 0, c.group);
    if constexpr (THIRD_SHARED)
        share_dq(third, 0, c.group, DQ_COUNT);
    wgmma_wait<0>();
    hold(c.dk);
    hold(c.ds);
    release(q_empty(c.n));
}

/* DQ_LATE: dV and dK of it, and dQ of the step before. */
template <bool FIRST> FA_DEVICE void finish_step_late(consumer &c)
{
    float dq[DQ_COUNT];
    if constexpr (!FIRST)
        named_sync(step_is_over(1 - c.group, c.n - 1), 128 * CONSUMERS);
    wait_for_passed_ds(c.n);
    share_ds(ds_tile(c.n), c.ds, c.group);
    give_ds(c.n);
    start_gradient(c.dv, c.p, dout_tile(c.n));
    if constexpr (!FIRST)
        start_dq(dq, ds_tile(c.n - 1), c.group);
    fence_async();
    wgmma_wait<FIRST ? 0 : 1>();
    hold(c.dv);
    hold(c.p);
    release(dout_empty(c.n));
    start_gradient(c.dk, c.ds, q_tile(c.n));
    if constexpr (!FIRST) {
        wgmma_wait<1>();
        hold(dq);
    }
    named_arrive(step_is_over(c.group, c.n), 128 * CONSUMERS);
    if constexpr (!FIRST)
        share_dq(dq, 0, c.group);
    wgmma_wait<0>();
    hold(c.dk);
    hold(c.ds);
    release(q_empty(c.n));
}

/* DQ_LATE: dQ of an item's last step. */
FA_DEVICE void finish_item_late(consumer &c)
{
    float dq[DQ_COUNT];
    if (V_IS_EARLY)
        release(v_empty());
    named_sync(step_is_over(1 - c.group, c.n - 1), 128 * CONSUMERS);
    start_dq(dq, ds_tile(c.n - 1), c.group);
    wgmma_wait<0>();
    hold(dq);
    release(k_empty());
    share_dq(dq, 0, c.group);
}

/* Step `tile`. Begins and ends with nothing in flight: else the compiler serialises all products. */
template <bool FIRST> FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, unsigned item, int tile, bool masked, bool last)
{
    float     s[S_COUNT], dp[S_COUNT];
    row_stats lse, delta;
    columns   seen;
    bool      edge = INSPECTED && masked;
    dropped_bits<S_COUNT> bits;
    wait_for_q(c.n);
    start_rows_by_rows<FA_TILE_K, FA_TILE_Q>(s, c.k, k_tile() + first_key_of(c.group) * 128, q_tile(c.n));
    load_stats(lse, lse_at(c.n));
    if constexpr (FIRST || (V_HELD == 0 && !FIRST_APART))
        barrier_wait(v_full(), filled<1>(item)); /* later than K: dV was there */
    if constexpr (FIRST)
        load_held<FA_TILE_K>(c.v, v_tile(), first_key_of(c.group));
    wait_for_dout(c.n);
    bool nonfinite = THIRD_SHARED && edge && some_marked_row(delta_at(c.n));
    if (nonfinite)
        clear_by_warp<DO_BYTES>(dout_tile(c.n));
    start_rows_by_rows<FA_TILE_K, FA_TILE_Q, FA_HEAD_DIM_V>(dp, c.v, v_tile() + first_key_of(c.group) * 128, dout_tile(c.n));
    load_stats(delta, delta_at(c.n));
    if (edge)
        seen = columns_of(args, w, c, tile);
    find_dropped(args, w, c, bits, tile);
    wgmma_wait<1>();
    hold(s);
    hold_held(c.k);
    if (edge && some_nonfinite(s)) {
        clear_own_keys(c.group);
        clear_by_warp(q_tile(c.n));
    }
    exponentials(args, w, c, s, lse, tile);
    if (edge)
        mask_elements(s, seen);
    if (nonfinite)
        give_back_nonfinite(s, seen, delta);
    if constexpr (HAS_NOTED)
        pack_probabilities(c, s, bits);
    if (PINNED > 0 && !edge)
        pin_exponentials(s);
    wgmma_wait<0>();
    hold(dp);
    hold_held(c.v);
    wait_for_free_ds(c.group);
    if constexpr (HAS_NOTED) {
#pragma unroll
        for (int n = 0; n < P_STEPS; n++)
            score_gradients(args, c.noted[n], dp, delta, n);
        hold(dp); /* at once: registers are short */
    } else {
        score_gradients(s, dp, delta);
        pack_probabilities(c, s, bits);
    }
    if (THIRD_SHARED && edge)
        mask_elements(dp, seen);
    if (!THIRD_SHARED && edge) {
        bool some = some_nonfinite(dp);
        if (some) {
            clear_by_warp(dout_tile(c.n));
            give_back_nonfinite(c.p, seen, delta);
        }
        if (some || FA_HAS_SOFTCAP) /* else it is 0 where P is */
            mask_elements(dp, seen);
    }
    pack_operand(c.ds, dp);
    if (!INSPECTED && masked)
        clear_hidden_keys(w, c.ds, c.group);
    if constexpr (DQ_LATE)
        finish_step_late<FIRST>(c);
    else
        finish_step(c, last);
    c.n++;
}

/* This consumer's keys of dK or dV straight from the registers; 0 past the sequence's last that counts. What is asked for in float32 or has no map. */
template <int COUNT> FA_DEVICE void store_gradient(const share_work &w, const fa_view &view, const float (&x)[COUNT], float factor, int cols, int group)
{
    int    lane = threadIdx.x % 32, first = first_key_of(group) + threadIdx.x % 128 / 32 * 16;
    fa_i64 from = w.seq.kv_entry * view.stride[0] + (w.seq.kv_row + w.first_k + first) * view.stride[1] + w.stored_head * view.stride[2];
    int    rows = w.seq.rows_k - w.first_k - first, counting = w.keys.end - w.first_k - first; /* of this warp's 16 */
    if (!view.data)
        return;
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
        int    row = n / 2 % 2 * 8 + lane / 4, at = n / 4 * 8 + lane % 4 * 2;
        float2 pair = row < counting ? make_float2(x[n] * factor, x[n + 1] * factor) : make_float2(0.0f, 0.0f);
        if (row >= rows || at >= cols)
            continue;
        if (view.dtype == FA_F32)
            *(float2 *)((float *)view.data + from + row * view.stride[1] + at) = pair;
        else
            *(unsigned *)((fa_u16 *)view.data + from + row * view.stride[1] + at) = pack<FA_DTYPE>(pair.x, pair.y);
    }
}

/* A consumer's panel of dK or dV on its way out (backward_block_sm90.cuh). */
FA_DEVICE unsigned staged_at(const consumer &c, bool is_dv, int panel)
{
    unsigned ds = ds_tile(c.n) + c.group * (FA_TILE_Q * 128);
    if (STAGED_IN_DS)
        return ds + is_dv * PANEL_BYTES;
    if (is_dv)
        return v_tile() + panel * (FA_TILE_K * 128) + first_key_of(c.group) * 128;
    return panel == 0 ? ds : shared_address(shared) + STAGED_AT + c.group * PANEL_BYTES;
}

/* TMA takes them from there while the block goes on; one thread asks. */
template <int COUNT> FA_DEVICE void stage_gradient(const work &w, const fa_map &map, int apart, const float (&x)[COUNT], float factor, bool is_dv, const consumer &c)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, first = w.first_k + first_key_of(c.group), counting = w.keys.end - first - 16 * warp;
#pragma unroll
    for (int panel = 0; panel < (COUNT + 31) / 32; panel++)
        stage_panel(x, panel, factor, lane, counting, staged_at(c, is_dv, panel) + warp * 2048);
    named_sync(OWN + c.group, 128);
    if (threadIdx.x % 128 == 0 && first < w.seq.rows_k)
#pragma unroll
        for (int panel = 0; panel < (COUNT + 31) / 32; panel++)
            store_panel(w, map, apart, staged_at(c, is_dv, panel), 64 * panel, first);
}

/* V's memory is free when dV has been read from there: where dK takes dQ's way, and waits for its memory, before that. */
FA_DEVICE void store_gradients(const fa_args &args, const fa_maps &maps, const share_work &w, const consumer &c, float factor, bool some)
{
    constexpr int MAY_LAST = STAGED_IN_DS ? 2 : K_PANELS; /* copies that V has no need to wait for */
    bool          asks = threadIdx.x % 128 == 0;
    wait_for_passed_ds(c.n);
    if (args.apart_dv >= 0)
        stage_gradient(w, maps.dv, args.apart_dv, c.dv, factor, true, c);
    else
        store_gradient(w, args.dv_stored, c.dv, factor, args.head_dim_v, c.group);
    if (DK_BY_DQ && asks) {
        bulk_added_was_read();
        barrier_arrive(v_empty());
    }
    if (args.apart_dk < 0 || (DK_BY_DQ && !some))
        store_gradient(w, args.dk_stored, c.dk, args.scale * factor, args.head_dim, c.group);
    else if (DK_BY_DQ)
        share_gradient(w, c.dk, args.scale * factor, c.group);
    else
        stage_gradient(w, maps.dk, args.apart_dk, c.dk, args.scale * factor, false, c);
    if (!DK_BY_DQ && asks) {
        if (args.apart_dk >= 0)
            bulk_added_was_read<MAY_LAST>();
        else
            bulk_added_was_read();
        if (!V_IS_EARLY)
            barrier_arrive(v_empty());
    }
}

/* One step of an item, and what the last one leaves. */
template <int GROUP, bool FIRST> /* FIRST of an item, FIRST_APART */
FA_DEVICE void any_step(const fa_args &args, const work &w, consumer &c, unsigned item, const walk &at, bool masked, bool last)
{
    int tile = at.tile;
    if constexpr (FA_HAS_ALIBI && GROUP <= 0)
        c.alibi_log2 = score_terms_of(args, w.b, at.head).slope_log2;
#if FA_HAS_DROPOUT
    c.batch_head = w.b * args.heads_q + at.head;
#endif
#if FA_HAS_DBIAS
    c.head = at.head;
#endif
#if FA_MASK == FA_MASK_LISTED
    c.mask = at.mask;
#endif
    if constexpr (!BY_COLUMNS)
        step<FIRST>(args, w, c, item, tile, masked, last);
    else if constexpr (GROUP == 0)
        step_of_p<FIRST>(args, w, c, tile, masked);
    else
        step_of_ds<FIRST>(args, w, c, item, tile, masked);
}

template <int GROUP> FA_DEVICE void consume(const fa_args &args, const fa_maps &maps, int group)
{
    consumer c;
    c.group = group;
    c.n     = 0;
    free_ds(group);
    float factor = FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f;
    for (unsigned item = 0; same_for_all(has_item(item)); item++) {
        const share_work &w     = work_at(item);
        int               steps = same_for_all(steps_of(w));
#pragma unroll
        for (int i = 0; i < DK_COUNT; i++)
            c.dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < DV_COUNT; i++)
            c.dv[i] = 0.0f;
        walk at = start_walk(args, w);
        settle(at);
        int clean_begin = same_for_all(w.clean.begin), clean_end = same_for_all(w.clean.end);
        barrier_wait(k_full(), filled<1>(item));
        load_held<FA_TILE_K>(c.k, k_tile(), first_key_of(group));
        if constexpr (V_HELD > 0 && !FIRST_APART) {
            barrier_wait(v_full(), filled<1>(item));
            load_held<FA_TILE_K>(c.v, v_tile(), first_key_of(group));
        }
        if (!DK_BY_DQ && !BY_COLUMNS) { /* dS will be where dK of the item before may still lie */
            if (threadIdx.x % 128 == 0)
                bulk_added_was_read();
            named_sync(OWN + group, 128);
        }
        if (steps > 0) {
            auto masked = [&] { return is_masked(at, clean_begin, clean_end); };
            if constexpr (FIRST_APART) { /* DQ_LATE under a mask as an edge, which it mostly is: a branch needs registers */
                any_step<GROUP, true>(args, w, c, item, at, (DQ_LATE && INSPECTED) || masked(), false);
                advance(args, at);
            }
            for (int left = steps - FIRST_APART; left > 0;) { /* two loops, each as if the other were not: branches would part what the compiler overlaps */
#pragma unroll 1
                for (; left > 0 && masked(); left--, advance(args, at))
                    any_step<GROUP, false>(args, w, c, item, at, true, left == 1);
#pragma unroll 1
                for (; left > 0 && !masked(); left--, advance(args, at))
                    any_step<GROUP, false>(args, w, c, item, at, false, left == 1);
            }
            if constexpr (BY_COLUMNS)
                last_by_columns<GROUP>(args, maps, w, c, factor);
            if constexpr (DQ_LATE)
                finish_item_late(c);
        } else {
            barrier_wait(v_full(), filled<1>(item));
            release(k_empty());
            if (V_IS_EARLY)
                release(v_empty());
        }
        if constexpr (BY_COLUMNS)
            end_by_columns<GROUP>(args, maps, w, c, factor);
        else
            store_gradients(args, maps, w, c, factor, steps > 0);
    }
    wait_for_free_ds(group);
    named_sync(DQ_IS_FREE + group * PIECES, 128 + 32);
    if (!BY_COLUMNS && threadIdx.x % 128 == 0)
        bulk_added_was_read();
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, 1)
    backward_sm90(const __grid_constant__ fa_args args, const __grid_constant__ fa_maps maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    __syncthreads(); /* the barriers are set up */
    if (threadIdx.x < 128) {
        registers_down<PASSES_DBIAS ? 40 : 24>(); /* of the 504 that three threads have */
        if (threadIdx.x == 0)
            produce(args, maps);
        else if (threadIdx.x / 32 == 1)
            add_dq<0>(args, maps);
        else if (ADDERS > 1 && threadIdx.x / 32 == 2)
            add_dq<ADDERS - 1>(args, maps);
        else if (PASSES_DBIAS && threadIdx.x / 32 == 2)
            pass_dbias(args, maps);
        else if (threadIdx.x == 96)
            take_turns(args);
    } else {
        registers_up<PASSES_DBIAS ? 232 : 240>();
        int group = same_for_all(threadIdx.x / 128 - 1);
        if (!BY_COLUMNS)
            consume<-1>(args, maps, group);
        else if (group == 0)
            consume<0>(args, maps, 0);
        else
            consume<1>(args, maps, 1);
    }
}
