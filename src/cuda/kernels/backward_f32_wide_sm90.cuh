/*
 * backward_f32_sm90.cu above 128 columns, where a thread's registers hold dK or dV of 64 keys: both consumers have the same keys.
 *
 *     consumer 0    S^T, P^T, which it gives to the other one in float;  dV;  dQ of every second panel of columns
 *     consumer 1    dP^T, dS^T, which it gives back in planes;           dK;  dQ of the others
 *
 * dQ has fewer rows, 32 queries, than a product: its transpose is made, K^T dS^T.
 */
#ifndef FA_BACKWARD_F32_WIDE_SM90_CUH
#define FA_BACKWARD_F32_WIDE_SM90_CUH

static_assert(S_COUNT == 16, "32 queries");
constexpr int P_IS_THERE = 3, DS_IS_THERE = 4; /* named barriers */

/* P^T as it lies in registers: thread n of both consumers has the same elements. */
FA_DEVICE float *own_p() { return (float *)(shared + P_AT) + threadIdx.x % 128; }
FA_DEVICE float *ds_unit() { return (float *)(shared + LARGEST_AT); } /* consumer 0 has no largest */

/* dQ^T = K^T dS^T, 64 columns of K by all queries, to rows of dq_accum: a lane and the next row's have four neighbours of its order (accumulate.cuh) of two queries. */
FA_DEVICE void add_panel_of_dq(const work &w, int panel, float unit, float *to, int rows)
{
    float part[S_COUNT];
    int   lane = threadIdx.x % 32, odd = lane / 4 % 2, col = 64 * panel + threadIdx.x % 128 / 32 * 16 + lane / 8 * 4;
    start_cut_down<1, cut_keys::PLANE, DS_PLANE, FA_TILE_K / 16>(part, matrix_of(k_tile() + panel * (FA_TILE_K * 128), 0), matrix_of(ds_tile(0), 0));
    wgmma_wait<0>();
    hold(part);
#pragma unroll
    for (int j = 0; j < S_COUNT / 4; j++) {
        float *four = part + 4 * j, own[2], other[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            own[h]   = (odd ? four[2 * h + 1] : four[2 * h]) * unit;
            other[h] = __shfl_xor_sync(0xFFFFFFFFu, (odd ? four[2 * h] : four[2 * h + 1]) * unit, 4);
        }
        int query = 8 * j + threadIdx.x % 4 * 2 + odd;
        if (query < rows)
            reduce_add_4(to + (fa_i64)query * FA_HEAD_DIM + col, odd ? other[0] : own[0], odd ? own[0] : other[0], odd ? other[1] : own[1], odd ? own[1] : other[1]);
    }
}

FA_DEVICE void add_dq(const fa_args &args, const work &w, place at, int group, float unit)
{
    if (!args.dq.data)
        return;
    int    first = at.tile * FA_TILE_Q;
    float *to    = w.dq + (head_rows(args, at.head) + first) * FA_HEAD_DIM;
#pragma unroll 1
    for (int panel = group; panel < FA_HEAD_DIM / 64; panel += 2)
        add_panel_of_dq(w, panel, unit * k_note()[0], to, w.seq.seqlen_q - first);
}

FA_DEVICE void step_of_values(const fa_args &args, const work &w, float (&dv)[FA_HEAD_DIM_V / 2], unsigned n, place at)
{
    float    s[S_COUNT];
    unsigned p[2][STEPS][4];
    barrier_wait(q_full(n), filled<FA_STAGES>(n));
    start_cut_rows_by_rows<FA_TILE_K, cut_keys::PLANE, FA_TILE_Q, cut_queries::PLANE, FA_HEAD_DIM>(s, matrix_of(k_tile(), 0), matrix_of(q_tile(n), 0));
    wgmma_wait<0>();
    hold(s);
    exponentials(args, w, s, n, at, 0);
    release(q_empty(n));
    if (!clean_tile(args, w, at.tile))
        mask_elements(args, w, s, at, 0);
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        own_p()[128 * i] = s[i];
    named_arrive(P_IS_THERE, 256);
    drop(s, dropped_of(args, w, at, 0));
    cut_operand(p, s, P_FACTOR);
    barrier_wait(dout_full(n), filled<FA_STAGES>(n));
    add_product<cut_dout>(dv, p, dout_tile(n), dout_note(n)[FA_TILE_Q] / P_FACTOR);
    release(dout_empty(n));
    named_sync(DS_IS_THERE, 256);
    add_dq(args, w, at, 0, *ds_unit());
}

FA_DEVICE void step_of_keys(const fa_args &args, const work &w, float (&dk)[FA_HEAD_DIM / 2], unsigned n, place at)
{
    float    s[S_COUNT], dp[S_COUNT];
    unsigned ds[2][STEPS][4];
    barrier_wait(dout_full(n), filled<FA_STAGES>(n));
    start_cut_rows_by_rows<FA_TILE_K, cut_values::PLANE, FA_TILE_Q, cut_dout::PLANE, FA_HEAD_DIM_V>(dp, matrix_of(v_tile(), 0), matrix_of(dout_tile(n), 0));
    wgmma_wait<0>();
    hold(dp);
    named_sync(P_IS_THERE, 256); /* and the other's dQ of the step before is over */
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = own_p()[128 * i];
    gradients_of_scores(args, s, dp, n, dropped_of(args, w, at, 0));
    release(dout_empty(n));
    if (!clean_tile(args, w, at.tile))
        mask_elements(args, w, dp, at, 0);
    float unit = unit_of_largest(dp, 1);
    cut_operand(ds, dp, 1.0f / unit);
    store_ds(ds_tile(0), ds);
    if (threadIdx.x % 128 == 0)
        *ds_unit() = unit;
    named_arrive(DS_IS_THERE, 256);
    barrier_wait(q_full(n), filled<FA_STAGES>(n));
    add_product<cut_queries>(dk, ds, q_tile(n), q_note(n)[FA_TILE_Q] * unit);
    release(q_empty(n));
    consumer_barrier(1); /* all of dS is there */
    add_dq(args, w, at, 1, unit);
}

/* A consumer's way through its tiles of queries; `step` adds to a sum, which `store` stores. */
template <int COLS, class STEP, class STORE> FA_DEVICE void walk(const work &w, const STEP &step, const STORE &store)
{
    float    sum[COLS / 2];
    unsigned n = 0;
#pragma unroll
    for (int i = 0; i < COLS / 2; i++)
        sum[i] = 0.0f;
    if (same_for_all(w.tiles.begin >= w.tiles.end)) {
        store(sum, false);
        return;
    }
    barrier_wait(keys_full(), 0);
    place at = {w.first_head, w.start};
    do {
        step(sum, n++, at);
        at = next_place(w, at);
    } while (inside(w, at));
    store(sum, true);
}

FA_DEVICE void consume(const fa_args &args, const work &w, int group)
{
    using dv_sum = float[FA_HEAD_DIM_V / 2];
    using dk_sum = float[FA_HEAD_DIM / 2];
    if (group == 0)
        walk<FA_HEAD_DIM_V>(w, [&](dv_sum &dv, unsigned n, place at) { step_of_values(args, w, dv, n, at); }, [&](dv_sum &dv, bool some) { store_dv(args, w, dv, 0, some); });
    else
        walk<FA_HEAD_DIM>(w, [&](dk_sum &dk, unsigned n, place at) { step_of_keys(args, w, dk, n, at); }, [&](dk_sum &dk, bool some) { store_dk(args, w, dk, 0, some); });
}

#endif
