/* What the warpgroups of forward_latent_sm90.cu and forward_wide_sm90.cu do, but for producers and planner. */
#ifndef FA_LATENT_ROLES_SM90_CUH
#define FA_LATENT_ROLES_SM90_CUH

#include "latent_producer_sm90.cuh"
#include "merge_parts.cuh"
#include "store_sm90.cuh"

/* ---- scores: one warpgroup ---- */

/* Of rows h = 0, 1 of a thread: the maximum of dot products that is followed; the sum of its exponentials. */
struct row_sums {
    float max[2], sum[2];
};

/* This warp has read a part of a slot, which both blocks of a pair fill. */
FA_DEVICE void give_back(unsigned empty)
{
    release(empty);
    if (PAIRS && threadIdx.x % 32 == 1)
        barrier_arrive_at(empty, blockIdx.x % 2 ^ 1);
}

/* The tile's rows of Q, by this warpgroup's threads. */
FA_DEVICE void copy_queries(const fa_args &args, const work &w, int slot)
{
    copy_rows_of_q<64 * PANELS, 128>(args, w, threadIdx.x - 128, [=](int panel) { return q_at(slot, panel); });
    named_sync(SCORES, 128);
}

/* What is kept of Q, out of its slot. */
FA_DEVICE void take_queries(unsigned (&q)[4 * TAKEN][4], int slot)
{
    int      lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4 * TAKEN; step++)
        load_matrix(q[step], q_at(slot, step / 4) + row * 128 + (((step % 4 * 2 + lane / 16) ^ (row % 8)) << 4));
}

/* S = Q K^T of the tile in a slot: some of its steps are started. */
template <int FROM, int TO> FA_DEVICE void start_scores(float (&s)[S_COUNT], unsigned (&q)[4 * TAKEN][4], place at)
{
    matrix q_rest = matrix_of(q_at(0, KEPT), 0), k = matrix_of(slot_at(at.slot), 0);
    if (FROM == 0)
        hold(s);
#pragma unroll
    for (int step = FROM; step < TO; step++) {
        int panel = step / 4;
        if (step % (4 * HALF) == 0)
            barrier_wait(full(at.slot, panel / HALF), at.phase);
        if (step == FROM || step % (4 * HALF) == 0)
            wgmma_fence();
        matrix k_step = k.from(panel * PANEL_BYTES + step % 4 * 32);
        if (panel < TAKEN)
            wgmma_registers<0>(s, q[step], k_step, step > 0);
        else
            wgmma_shared(s, q_rest.from((panel - KEPT) * ROWS_BYTES + step % 4 * 32), k_step, 1);
    }
    if (TO == STEPS)
        wgmma_commit();
}

/* The thread's number, and nothing made of it kept: registers are short. */
FA_DEVICE unsigned thread_anew()
{
    int own = threadIdx.x;
    make_anew(own);
    return own;
}

/* Where what O and the sum of the thread's row 0 grow by is told; of row 1 32 bytes on. */
FA_DEVICE unsigned row_factors(int slot, unsigned thread) { return factors_at(slot) + 4 * (thread % 128 / 32 * 16 + thread % 32 / 4); }

FA_DEVICE float highest_of(const float (&s)[S_COUNT], int h)
{
    float highest = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j < FA_TILE_K / 8; j++)
        highest = fmaxf(highest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    return quad_max(highest);
}

/* Line 9 begins: the maxima that the rows have now; what O and the sums grow by is for the values to know. */
FA_DEVICE void follow_maxima(float (&s)[S_COUNT], row_sums &r, float unit, int slot)
{
    unsigned thread = thread_anew(), factors = row_factors(slot, thread);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float highest = highest_of(s, h), factor = 1.0f;
        if ((highest - r.max[h]) * unit > MAX_LAG) { /* -inf - -inf is NaN: not far */
            factor   = exp2_fast((r.max[h] - highest) * unit);
            r.max[h] = highest;
        }
        if (thread % 4 == 0)
            shared_store(factors + 32 * h, factor);
        r.sum[h] *= factor;
    }
}

/* Row h of S becomes exponentials. */
FA_DEVICE void exponentials(float (&s)[S_COUNT], row_sums &r, float unit, int h)
{
    /* A row that has seen nothing has maximum -inf; subtract 0 instead, or exp2(-inf + inf) is NaN. */
    float shift = r.max[h] == -infinity() ? 0.0f : r.max[h] * unit, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
            s[4 * j + e] = exp2_fast(s[4 * j + e] * unit - shift);
            sum += s[4 * j + e];
        }
    r.sum[h] += sum;
}

/* 16 columns of P. */
FA_DEVICE void store_p_step(const float (&s)[S_COUNT], int slot, int step, unsigned thread)
{
    int      lane = thread % 32, row = thread % 128 / 32 * 16 + lane % 16;
    unsigned p[4];
#pragma unroll
    for (int n = 0; n < 4; n++)
        p[n] = pack<FA_DTYPE>(s[8 * step + 2 * n], s[8 * step + 2 * n + 1]);
    store_matrix(p_at(slot) + row * 128 + (((2 * step + lane / 16) ^ (row % 8)) << 4), p);
}

FA_DEVICE void store_p(const float (&s)[S_COUNT], int slot)
{
    unsigned thread = thread_anew();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        store_p_step(s, slot, step, thread);
}

FA_DEVICE void add_step(const float (&s)[S_COUNT], int step, float (&sum)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += (s[8 * step + 2 * h] + s[8 * step + 2 * h + 1]) + (s[8 * step + 4 + 2 * h] + s[8 * step + 5 + 2 * h]);
        keep_order(sum[h]);
    }
}

/* Line 9 where the rows have seen keys before: by the maximum as it was then, so that no exponential waits for this tile's. Whether a row has moved too far is said by a lane's
 * sum of this tile, in which no P is larger than it; comparisons are needed only then, and P goes over anew. A row whose P no float holds becomes a far one (far_rows.cuh), to be computed again. */
FA_DEVICE void softmax_ahead(float (&s)[S_COUNT], row_sums &r, float unit, int slot)
{
    constexpr float MOST_LAG = 100.0f, MOST_SUM = 256.0f; /* 2^MAX_LAG */
    float           shift[2], sum[2] = {0.0f, 0.0f};
    unsigned        thread = thread_anew(), factors = row_factors(slot, thread);
#pragma unroll
    for (int h = 0; h < 2; h++)
        shift[h] = r.max[h] * unit;
#pragma unroll
    for (int step = 0; step < P_STEPS; step++) { /* with the sums of the step before, or all of them would come behind the last exponential */
#pragma unroll
        for (int n = 8 * step; n < 8 * step + 8; n++)
            s[n] = exp2_fast(s[n] * unit - shift[n / 2 % 2]);
        if (step > 0)
            add_step(s, step - 1, sum);
        store_p_step(s, slot, step, thread);
    }
    add_step(s, P_STEPS - 1, sum);
    if (thread % 4 == 0)
#pragma unroll
        for (int h = 0; h < 2; h++)
            shared_store(factors + 32 * h, 1.0f);
    bool far = !(sum[0] <= MOST_SUM) || !(sum[1] <= MOST_SUM); /* NaN, too: it may be of a row whose maximum was -inf */
#pragma unroll
    for (int h = 0; h < 2; h++)
        r.sum[h] += sum[h];
    if (__builtin_expect(__any_sync(~0u, far), false)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float highest = highest_of(s, h), most = quad_max(sum[h] <= MOST_SUM ? 0.0f : infinity()), factor = 1.0f;
            bool  none    = r.max[h] == -infinity(); /* of all its scores so far: it has no maximum to take this tile's by */
            if (none || (most > 0.0f && highest > 1.0f)) { /* else only NaN is too large */
                float lag = none ? infinity() : log2_fast(highest), old = r.max[h];
                r.max[h] = lag > MOST_LAG ? fminf(0x1p29f * reciprocal(unit), 0x1p127f) : old + lag * reciprocal(unit);
                factor   = exp2_fast((old - r.max[h]) * unit);
            }
            if (thread % 4 == 0)
                shared_store(factors + 32 * h, factor);
            r.sum[h] *= factor;
#pragma unroll
            for (int j = 0; j < FA_TILE_K / 8; j++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    s[4 * j + e] *= factor;
        }
        store_p(s, slot);
    }
}

/* APART: S has been made of the slot, and P and factors of two tiles before have been read, whose place is for this tile's: the slot of its V. */
FA_DEVICE int leave_keys(int slot, place &values)
{
    int to = values.slot;
    give_back(empty(slot, 0));
    give_back(empty(slot, 1));
    for (int part = 0; part < 2; part++)
        barrier_wait(empty(to, part), values.phase ^ 1);
    go_on<VALUES_FROM>(values);
    return to;
}

/* All tiles of an item; `at`: Q's slot, and then the one behind the last tile's. The tensor cores have a queue of some seven products a warp: while these are made,
 * nobody waits for the fence (200 cycles), and the values' first products are in time behind S if their turn is told of as many ahead. */
FA_DEVICE void walk(const fa_args &args, const work &w, row_sums &r, place &at, place &values, int tiles)
{
    constexpr int FENCE = 12, TURN = STEPS - 4;
    unsigned      q[4 * TAKEN][4];
    float         s[S_COUNT];
    for (int part = 0; part < PARTS; part++)
        barrier_wait(full(at.slot, part), at.phase);
    if (!has_boxes(args))
        copy_queries(args, w, at.slot);
    take_queries(q, at.slot);
    give_back(empty(at.slot, 0));
    give_back(empty(at.slot, 1));
    int      before = -1; /* the slot of the tile before */
    fa_range clean  = {same_for_all(w.clean.begin), same_for_all(w.clean.end)}; /* of which no mask hides a key */
    go_on(at);
#pragma unroll 1
    for (int tile = right_tile(w); tiles > 0; tiles--, tile--) {
        start_scores<0, FENCE>(s, q, at);
        fence_async(); /* of P of the tile before */
        tell(told(before), before >= 0);
        start_scores<FENCE, TURN>(s, q, at);
        tell(turn(before), before >= 0);
        start_scores<TURN, STEPS>(s, q, at);
        before = at.slot;
        go_on(at);
        wgmma_wait<0>();
        hold(s);
        if (APART)
            before = leave_keys(before, values);
        if (!is_masked(clean, tile) && !is_masked(clean, tile + 1)) { /* each row has seen a key */
            softmax_ahead(s, r, args.scale_log2, before);
            continue;
        }
        if (is_masked(clean, tile))
            mask_scores(args, w, s, 0, tile);
        follow_maxima(s, r, args.scale_log2, before);
        exponentials(s, r, args.scale_log2, 0);
        exponentials(s, r, args.scale_log2, 1);
        store_p(s, before);
    }
    release(q_empty());
    fence_async();
    tell(told(before));
    tell(turn(before));
}

/* l and m of the rows to LSE = m + log l, and to what O is multiplied by (lines 12-13); rows that saw nothing: -inf and 0. */
FA_DEVICE void end_rows(const fa_args &args, item &own, const row_sums &r)
{
    work &w   = own.w;
    bool  far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int     row = fragment_row() + 8 * h, i = query_of(args, w, row), head = head_of(args, w, row);
        bool    used = row < w.rows;
        float   top = r.max[h] * args.scale_log2;
        row_end end = end_of_row(top, quad_sum(r.sum[h]), used ? sink_log2_of(args, head) : -infinity(), i >= w.seq.seqlen_q);
        far |= used && is_far(top);
        if (threadIdx.x % 4 == 0) {
            if (used) {
                store_lse(args, w, head, i, end.lse);
                w.far[row] = is_far(top);
            }
            own.scale[row] = !used || (FA_HAS_SPLIT && end.lse == -infinity()) ? -1.0f : end.scale; /* an empty part's O is not read */
        }
    }
    if (far)
        own.far = 1;
}

FA_DEVICE void score_all(const fa_args &args)
{
    place at = {0, 0}, values = {VALUES_FROM, 0};
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        item &own = item_at(k);
        if (same_for_all(own.none))
            return;
        row_sums r     = {{-infinity(), -infinity()}, {0.0f, 0.0f}};
        int      tiles = same_for_all(tiles_of(own.w));
        if (tiles > 0)
            walk(args, own.w, r, at, values, tiles);
        end_rows(args, own, r);
        tell(summed(k));
        tell(done(k));
    }
}

/* ---- values: two warpgroups ---- */

/* This warpgroup's columns of V in a slot. */
FA_DEVICE unsigned values_at(int group, int slot) { return slot_at(slot) + group * HALF_BYTES; }

/* O += P V of a tile. */
FA_DEVICE void multiply_values(float (&o)[2][O_COUNT], int group, int slot)
{
    matrix p = matrix_of(p_at(slot), 0), v = matrix_of(values_at(group, slot), PANEL_BYTES);
    hold(o[0]);
    hold(o[1]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            wgmma_shared<1>(o[half], p.from(step * 32), v.from(step * 2048 + half * 2 * PANEL_BYTES), 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold(o[0]);
    hold(o[1]);
}

/* O was summed by maxima that have grown. */
FA_DEVICE void follow(float (&o)[2][O_COUNT], int slot)
{
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        factor[h] = shared_load_float(factors_at(slot) + 4 * (fragment_row() + 8 * h));
    if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f))
        return;
#pragma unroll
    for (int n = 0; n < 2 * O_COUNT; n++)
        o[n / O_COUNT][n % O_COUNT] *= factor[n / 2 % 2];
}

/* The two warpgroups as redo_far_rows and add_nonfinite want them. */
struct both_values {
    static constexpr int WARPS = 8;
    static __device__ __forceinline__ int  thread() { return threadIdx.x - 256; }
    static __device__ __forceinline__ void sync() { named_sync(VALUES, 32 * WARPS); }
};

/* O = O / l (line 12); rows that saw nothing: 0. */
FA_DEVICE void store_result(const fa_args &args, item &own, const float (&o)[2][O_COUNT], int group)
{
    const work &w = own.w;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int    row   = fragment_row() + 8 * h;
        float  scale = own.scale[row];
        fa_i64 at    = o_place(args, w, head_of(args, w, row), query_of(args, w, row), group * (FA_HEAD_DIM_V / 2));
#pragma unroll
        for (int half = 0; half < 2; half++)
            if constexpr (FA_HAS_SPLIT)
                store_part(args.o_partial + at + half * 128, o[half], h, scale);
            else
                store_row<FA_DTYPE_O, 128>(scale < 0.0f ? nullptr : (char *)args.o.data + (at + half * 128) * (FA_DTYPE_O == FA_F32 ? 4 : 2), o[half], h, scale,
                                           args.head_dim_v - group * 256 - half * 128);
    }
    both_values::sync();
    if (own.far)
        redo_far_rows<both_values>(args, w);
    if (own.cleared)
        add_nonfinite<both_values>(args, w);
}

/* Panels that nobody fetches, for V has not so many columns: what lay there before might be NaN, for which rows would be looked through. */
FA_DEVICE void clear_unused(const fa_args &args, int group)
{
    for (int slot = VALUES_FROM; slot < ALL_SLOTS; slot++)
        for (int at = panels_of_part(args.head_dim_v, group) * PANEL_BYTES + threadIdx.x % 128 * 16; at < HALF_BYTES; at += 128 * 16)
            shared_store(values_at(group, slot) + at, make_uint4(0, 0, 0, 0));
    fence_async();
    named_sync(ALONE + group, 128);
}

FA_DEVICE void value_all(const fa_args &args, int group)
{
    if (APART)
        clear_unused(args, group);
    float    o[2][O_COUNT];
    place    at = {VALUES_FROM, 0};
    unsigned tellings = 0; /* bit n: the parity of those of slot n. They are of tiles alone: of Q in a slot nobody waits to hear */
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        item &own = item_at(k);
        if (same_for_all(own.none))
            return;
#pragma unroll
        for (int n = 0; n < 2 * O_COUNT; n++) /* not by the first product: then O would live on beside its way out */
            o[n / O_COUNT][n % O_COUNT] = 0.0f;
        int tiles = same_for_all(tiles_of(own.w));
        if (!APART && tiles > 0) /* Q's slot */
            go_on(at);
#pragma unroll 1
        for (int n = 0; n < tiles; n++) {
            unsigned parity = tellings >> at.slot & 1;
            barrier_wait(told(at.slot), parity);
            if (n > 0)
                follow(o, at.slot);
            int tile = right_tile(own.w) - n;
            if (APART)
                barrier_wait(full(at.slot, group), at.phase);
            if (is_masked(own.w.clean, tile))
                clear_values<HALF_BYTES, 128>(own, values_at(group, at.slot), threadIdx.x % 128, tile, ALONE + group);
            barrier_wait(turn(at.slot), parity);
            multiply_values(o, group, at.slot);
            give_back(empty(at.slot, group));
            tellings ^= 1u << at.slot;
            go_on<VALUES_FROM>(at);
        }
        barrier_wait(summed(k), filled(k));
        store_result(args, own, o, group);
        tell(done(k));
    }
}

/* The kernel, by all threads of a block. */
FA_DEVICE void run(const fa_args &args, const fa_maps &maps)
{
    if (threadIdx.x == 0)
        start_barriers();
    else if (threadIdx.x == 32)
        find_item(args, 0, blockIdx.x);
    else if (threadIdx.x == 64) {
        if (has_boxes(args))
            tma_prefetch_map(maps.q);
        tma_prefetch_map(maps.k);
        if (APART)
            tma_prefetch_map(maps.v);
    }
    if constexpr (PAIRS)
        cluster_barrier(); /* the barriers are set up, the other block's too */
    else
        __syncthreads();
    int warpgroup = same_for_all(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_down<PRODUCER_REGISTERS>();
        if (FA_HAS_PAGED ? threadIdx.x / 32 != 1 : threadIdx.x < 32) {
            if (elected())
                produce(args, maps);
        } else if (threadIdx.x == 32)
            plan(args);
    } else if (warpgroup == 1) {
        registers_up<SCORES_REGISTERS>();
        score_all(args);
    } else {
        registers_up<VALUES_REGISTERS>();
        value_all(args, warpgroup - 2);
        if constexpr (MERGES) {
            cluster_barrier();
            const work &w = item_at(0).w;
            merge_tile<2>(args, w, w.split * both_values::WARPS + both_values::thread() / 32, args.num_splits * both_values::WARPS);
            return;
        }
    }
    if constexpr (PAIRS || MERGES)
        cluster_barrier(); /* the other block arrives at barriers of this one; all parts are there */
}

#endif
