/* backward_f32_sm90.cu up to 128 columns: a consumer has 64 keys of its own, with dK and dV. */
#ifndef FA_BACKWARD_F32_NARROW_SM90_CUH
#define FA_BACKWARD_F32_NARROW_SM90_CUH

struct consumer {
    float    dk[FA_HEAD_DIM / 2], dv[FA_HEAD_DIM_V / 2];
    unsigned p[2][STEPS][4]; /* P^T, high and low */
    float    ds_unit;        /* 2^e that dS was cut by */
    int      group;
    unsigned n; /* query tiles since the kernel began */
};

/* dS^T to where dK and dQ take it from: registers would not hold it beside P. */
FA_DEVICE void share_ds(const consumer &c, const float (&x)[S_COUNT])
{
    unsigned ds[2][STEPS][4];
    cut_operand(ds, x, 1.0f / c.ds_unit);
    store_ds(ds_tile(c.group), ds);
    consumer_barrier(c.group);
}

/* part = of dS^T Q or, DOWN, of dS K, 64 columns of Q or K: their rows from `y` on are a plane's, the other plane's Y_PLANE behind. */
template <int DOWN, int Y_PLANE> FA_DEVICE void multiply_ds(float (&part)[32], const consumer &c, unsigned y)
{
    start_cut_down<DOWN, DS_PLANE, Y_PLANE, STEPS>(part, matrix_of(ds_tile(c.group), 0), matrix_of(y, 0)); /* as many steps of keys as of queries */
    wgmma_wait<0>();
    hold(part);
}

FA_DEVICE void add_dk(consumer &c, float unit)
{
    float part[32];
#pragma unroll
    for (int panel = 0; panel < FA_HEAD_DIM / 64; panel++) {
        multiply_ds<0, cut_queries::PLANE>(part, c, q_tile(c.n) + panel * (FA_TILE_Q * 128));
        add_part(c.dk, part, panel, unit);
    }
}

FA_DEVICE void add_dq(const fa_args &args, const work &w, const consumer &c, place at)
{
    float  dq[1][8][4], (&part)[32] = reinterpret_cast<float(&)[32]>(dq), unit = c.ds_unit * k_note()[0];
    int    first = at.tile * FA_TILE_Q + threadIdx.x % 128 / 32 * 16;
    float *to    = w.dq + (head_rows(args, at.head) + first) * FA_HEAD_DIM;
#pragma unroll
    for (int panel = 0; panel < FA_HEAD_DIM / 64; panel++) {
        multiply_ds<1, cut_keys::PLANE>(part, c, k_tile() + panel * (FA_TILE_K * 128) + c.group * (64 * 128));
#pragma unroll
        for (int i = 0; i < 32; i++)
            part[i] *= unit;
        accumulate<1, 8>(to + panel * 64, FA_HEAD_DIM, dq, w.seq.seqlen_q - first);
    }
}

FA_DEVICE void step(const fa_args &args, const work &w, consumer &c, place at)
{
    float   s[S_COUNT], dp[S_COUNT];
    dropped dropped = dropped_of(args, w, at, c.group);
    barrier_wait(q_full(c.n), filled<FA_STAGES>(c.n));
    start_cut_rows_by_rows<FA_TILE_K, cut_keys::PLANE, FA_TILE_Q, cut_queries::PLANE, FA_HEAD_DIM>(s, matrix_of(k_tile() + c.group * (64 * 128), 0), matrix_of(q_tile(c.n), 0));
    barrier_wait(dout_full(c.n), filled<FA_STAGES>(c.n));
    start_cut_rows_by_rows<FA_TILE_K, cut_values::PLANE, FA_TILE_Q, cut_dout::PLANE, FA_HEAD_DIM_V>(dp, matrix_of(v_tile() + c.group * (64 * 128), 0), matrix_of(dout_tile(c.n), 0));
    wgmma_wait<1>();
    hold(s);
    exponentials(args, w, s, c.n, at, c.group);
    wgmma_wait<0>();
    hold(dp);
    gradients_of_scores(args, s, dp, c.n, dropped);
    drop(s, dropped);
    if (!clean_tile(args, w, at.tile)) {
        mask_elements(args, w, s, at, c.group);
        mask_elements(args, w, dp, at, c.group);
    }
    c.ds_unit = unit_of_largest(dp, c.group);
    cut_operand(c.p, s, P_FACTOR);
    share_ds(c, dp);
    float dv_unit = dout_note(c.n)[FA_TILE_Q] / P_FACTOR, dk_unit = q_note(c.n)[FA_TILE_Q] * c.ds_unit;
    add_product<cut_dout>(c.dv, c.p, dout_tile(c.n), dv_unit);
    release(dout_empty(c.n));
    add_dk(c, dk_unit);
    release(q_empty(c.n));
    if (args.dq.data)
        add_dq(args, w, c, at);
    c.n++;
}

FA_DEVICE void store_gradients(const fa_args &args, const work &w, consumer &c, bool some)
{
    store_dk(args, w, c.dk, c.group, some);
    store_dv(args, w, c.dv, c.group, some);
}

FA_DEVICE void consume(const fa_args &args, const work &w, int group)
{
    consumer c;
    c.group = group;
    c.n     = 0;
#pragma unroll
    for (int i = 0; i < FA_HEAD_DIM / 2; i++)
        c.dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < FA_HEAD_DIM_V / 2; i++)
        c.dv[i] = 0.0f;
    if (same_for_all(w.tiles.begin >= w.tiles.end)) { /* apart, or ptxas spills where it meets the other way */
        store_gradients(args, w, c, false);
        return;
    }
    barrier_wait(keys_full(), 0);
    place at = {w.first_head, w.start};
    do {
        step(args, w, c, at);
        at = next_place(w, at);
    } while (inside(w, at));
    store_gradients(args, w, c, true);
}

#endif
