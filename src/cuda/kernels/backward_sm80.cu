/*
 * FlashAttention-2 backward (Algorithm 2) by mma.sync, for every GPU from Ampere on; float16, bfloat16,
 * and float32 in three pieces of bfloat16 (numbers.cuh).
 *
 * A block owns FA_TILE_K keys of one key head, with K and V in shared memory and dK, dV in registers, and walks the
 * query tiles that see them, for each query head of its share of the group. Everything is computed transposed, keys down
 * and queries across, so that P^T and dS^T leave the tensor cores as the A operands of dV and dK:
 *
 *     S^T  = K Q^T              dV += P^T  dO        A step waits once: for Q and dO of this tile, which were copied
 *     P^T  = exp(S^T - LSE)     dK += dS^T Q         during the step before, and for dS of the step before, which all
 *     dP^T = V dO^T             dQ += dS   K         warps wrote to shared memory. dQ of the step before is then summed
 *     dS^T = P^T (dP^T - delta)                      over keys and added to float dQ in global memory.
 *
 * delta = rowsum(dO * O) comes from backward_rowsum.cu; backward_convert.cu makes the caller's dQ of the float one. A small
 * problem (FA_ONE_LAUNCH) would wait for their launches longer than for their work: there a step makes delta itself, and
 * the blocks of a key head are a cluster, which clears dQ before the first block adds to it and converts it after the last.
 *
 * FA_VARIANT 1 and 2: two or four warps share their keys: each computes P^T and dS^T for a part of the queries, and dK and
 * dV for a part of the columns; they meet in shared memory. A warp then has more keys and reads less of Q and dO, and dK
 * and dV of 16 rows fit into a thread's registers for head_dim above 128.
 * FA_VARIANT 3: four warps share their keys and all queries of a tile, each some of the columns of every product: above 256 a tile of as many queries as
 * warps would need does not fit (backward_columns_sm80.cuh).
 * FA_STAGES: buffers of Q and dO.
 */
#include "backward_rows.cuh"
#if FA_VARIANT == 3
#include "backward_columns_sm80.cuh"
#else
#include "backward_queries_sm80.cuh"
#endif

/* Q, dO, LSE and delta of a query tile to buffer `stage`. */
FA_DEVICE void copy_queries(const fa_args &args, const work &w, unsigned shared, int stage, place at)
{
    int      first = at.tile * FA_TILE_Q, count = w.seq.seqlen_q - first;
    rows_of  q     = {w.q + at.head * args.q.stride[2] + first * args.q.stride[1], args.q.stride[1]};
    fa_i64   dout_offset = at.head * args.dout.stride[2] + first * args.dout.stride[1];
    unsigned q_to = shared + Q_AT + stage * Q_BYTES, dout_to = shared + DO_AT + stage * DO_BYTES;
    copy_tile<FA_TILE_Q, FA_HEAD_DIM>(q_to, q, 0, count, args.head_dim, args.q.stride[3]);
    if constexpr (FA_DTYPE_DOUT == FA_DTYPE) {
        rows_of dout = {(const fa_element *)w.dout + dout_offset, args.dout.stride[1]};
        copy_tile<FA_TILE_Q, FA_HEAD_DIM_V>(dout_to, dout, 0, count, args.head_dim_v, args.dout.stride[3]);
    } else
        convert_tile<FA_TILE_Q, FA_HEAD_DIM_V>(dout_to, (const float *)w.dout + dout_offset, args.dout.stride[1],
                                               args.dout.stride[3], count, args.head_dim_v);
    static_assert(THREADS >= FA_TILE_Q, "a thread for each query");
    if (threadIdx.x < FA_TILE_Q) {
        int      i     = threadIdx.x;
        unsigned to    = shared + STAT_AT + stage * STAT_BYTES + i * 4;
        bool     valid = i < count;
        copy_async_4(to, w.lse + at.head * args.lse.stride[1] + (first + i) * args.lse.stride[2], valid);
        if (!FA_ONE_LAUNCH)
            copy_async_4(to + 4 * FA_TILE_Q, w.delta + head_rows(args, at.head) + first + i, valid);
    }
    if constexpr (FA_ONE_LAUNCH) {
        constexpr int LANES = THREADS / FA_TILE_Q;
        int           i     = threadIdx.x / LANES;
        float         delta = row_delta<LANES>(args, w.seq, at.head, first + i);
        if (threadIdx.x % LANES == 0)
            shared_store(shared + STAT_AT + stage * STAT_BYTES + (FA_TILE_Q + i) * 4, delta);
    }
}

/* Waits until as many key tiles have been added to this query tile of dQ as come before this block's. */
FA_DEVICE int *turn_of(const fa_args &args, const work &w, place at)
{
    return args.dq_turn + ((fa_i64)w.b * args.heads_q + at.head) * args.tiles_q + at.tile;
}

FA_DEVICE void wait_for_turn(const fa_args &args, const work &w, place at)
{
    if (threadIdx.x == 0) {
        int wanted = turn_number(args, w, at.tile), now;
        do
            now = load_acquire(turn_of(args, w, at));
        while (now < wanted);
    }
    __syncthreads();
}

FA_DEVICE void end_turn(const fa_args &args, const work &w, place at)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        add_release(turn_of(args, w, at), 1);
}

/* dQ += dS K (line 15) of the step before, from dS^T in shared memory. */
FA_DEVICE void add_dq(const fa_args &args, const work &w, unsigned shared, int buffer, place at)
{
    if (!args.dq.data)
        return;
    int warp = threadIdx.x / 32, row16 = warp % DQ_ROW_WARPS * DQ_ROWS16, col8 = warp / DQ_ROW_WARPS * DQ_COLS8;
    lane_addresses<FA_TILE_Q>   ds_at(shared + DS_AT + buffer * S_BYTES, halves_first_row(),
                                      halves_first_half() + 2 * row16);
    lane_addresses<FA_HEAD_DIM> k_at(shared, rows_first_row(), rows_first_half() + col8);
    bool makes = DQ_WARPS == FA_WARPS || warp < DQ_WARPS;
#pragma unroll
    for (int piece = 0; piece < DQ_PIECES; piece++) {
        float dq[DQ_ROWS16][DQ_PIECE8][4];
        clear(dq);
#pragma unroll
        for (int k = 0; makes && k < FA_TILE_K / 16; k++) {
            blocks_of<DQ_ROWS16> a;
#pragma unroll
            for (int p = 0; p < PLANES; p++)
#pragma unroll
                for (int m = 0; m < DQ_ROWS16; m++)
                    load_matrix_transposed(a[p][m], ds_at.at(k, m) + p * S_PLANE);
            multiply_step<false>(dq, a, [&](unsigned(&b)[4], int n, int p) {
                load_matrix_transposed(b, k_at.at(k, piece * (DQ_PIECE8 / 2) + n) + p * K_PLANE);
            });
        }
        if (FA_DETERMINISTIC && piece == 0)
            wait_for_turn(args, w, at);
        int    first = at.tile * FA_TILE_Q + row16 * 16;
        float *to    = w.dq + (head_rows(args, at.head) + first) * FA_HEAD_DIM + col8 * 8;
        if (makes)
            accumulate<DQ_ROWS16, DQ_PIECE8>(to + piece * DQ_PIECE8 * 8, FA_HEAD_DIM, dq, w.seq.seqlen_q - first);
    }
    if (FA_DETERMINISTIC)
        end_turn(args, w, at);
}

template <bool MASKED> FA_DEVICE void step(block_state &state, const fa_args &args, const work &w, unsigned shared)
{
    constexpr bool CLEAR = MASKED && (FA_MASK != FA_MASK_NONE || FA_HAS_SLICES);
    int            stage = FA_STAGES > 1 ? state.step & 1 : 0, buffer = state.step & 1;
    unsigned       q = shared + Q_AT + stage * Q_BYTES, dout = shared + DO_AT + stage * DO_BYTES;
    unsigned       ds = shared + DS_AT + buffer * S_BYTES;
    place          next = settle(args, w, next_place(w, state.at));
    copy_wait<0>();
    if (CLEAR) {
        clear_nonfinite<FA_TILE_Q, FA_HEAD_DIM>(q);
        clear_nonfinite<FA_TILE_Q, FA_HEAD_DIM_V>(dout);
    }
    __syncthreads();
    if (FA_STAGES > 1) {
        if (inside(w, next))
            copy_queries(args, w, shared, stage ^ 1, next);
        copy_commit();
    }
    /* Of two warps on a scheduler one adds dQ while the other makes P and dS. Turns are taken by all at once. */
    bool late = TEAM == 4 && KEY_WARPS > 1 && !FA_DETERMINISTIC && threadIdx.x / 32 >= FA_WARPS / 2;
    if (state.step > 0 && !late)
        add_dq(args, w, shared, buffer ^ 1, state.before);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        step_part<MASKED>(state, args, w, shared, part, q, dout, ds, shared + STAT_AT + stage * STAT_BYTES);
    if (state.step > 0 && late)
        add_dq(args, w, shared, buffer ^ 1, state.before);
    if (FA_STAGES == 1) {
        __syncthreads();
        if (inside(w, next))
            copy_queries(args, w, shared, 0, next);
        copy_commit();
    } /* P^T and the other buffers are overwritten after the next step's barrier */
    state.before = state.at;
    state.at     = next;
    state.step++;
}

/* Rows first_key ... of dK or dV from a warp's registers. */
template <int COLS, int N8>
FA_DEVICE void store_gradient(float (&acc)[KEYS16][N8][4], float factor, const fa_view &view, float *sum, const fa_args &args,
                              const work &w, unsigned staging, int cols)
{
    int   first = w.first_k + key_warp() * KEYS16 * 16, rows = w.seq.rows_k - first, col = team_member() * N8 * 8;
    float scale[2 * KEYS16];
    if (!view.data)
        return;
#pragma unroll
    for (int r = 0; r < 2 * KEYS16; r++)
        scale[r] = factor;
    if constexpr (FA_HAS_KV_ACCUM) {
        fa_i64 token = (fa_i64)w.seq.kv_entry * args.kv_rows + w.seq.kv_row + first;
        float *to    = sum + ((fa_i64)w.kv_head * args.kv_entries * args.kv_rows + token) * COLS + col;
        accumulate<KEYS16, N8>(to, COLS, acc, rows);
        return;
    }
    fa_i64 offset = w.seq.kv_entry * view.stride[0] + (w.seq.kv_row + first) * view.stride[1] + w.kv_head * view.stride[2] +
                    col * view.stride[3];
    if (view.dtype == FA_F32)
        store_accumulator<FA_F32, KEYS16, N8>(acc, scale, staging, (float *)view.data + offset, view.stride[1],
                                              view.stride[3], rows, cols - col);
    else
        store_accumulator<FA_DTYPE, KEYS16, N8>(acc, scale, staging, (fa_element *)view.data + offset, view.stride[1],
                                                view.stride[3], rows, cols - col);
}

/* FA_ONE_LAUNCH: calls row(head, i) for this cluster's query rows, LANES threads a row and each row in one block. */
template <int LANES, class ROW> FA_DEVICE void deal_query_rows(const fa_args &args, const work &w, const ROW &row)
{
    constexpr int AT_ONCE = THREADS / LANES;
    int           block = w.first_k / FA_TILE_K, count = args.dq.data ? w.num_heads * w.seq.rows_q : 0;
    for (int r = block * AT_ONCE + threadIdx.x / LANES; r < count; r += args.tiles_k * AT_ONCE)
        row(w.first_head + r / w.seq.rows_q, r % w.seq.rows_q);
}

constexpr int ROW_LANES = FA_HEAD_DIM > 128 ? 32 : FA_HEAD_DIM > 64 ? 16 : 8;

FA_DEVICE void clear_dq(const fa_args &args, const work &w)
{
    deal_query_rows<ROW_LANES>(args, w, [&](int head, int i) {
        for (int col = threadIdx.x % ROW_LANES * 4; col < FA_HEAD_DIM; col += ROW_LANES * 4)
            *(float4 *)(w.dq + (head_rows(args, head) + i) * FA_HEAD_DIM + col) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (FA_DETERMINISTIC && i % FA_TILE_Q == 0 && threadIdx.x % ROW_LANES == 0)
            *turn_of(args, w, {head, i / FA_TILE_Q}) = 0;
    });
}

FA_DEVICE void convert_dq(const fa_args &args, const work &w)
{
    deal_query_rows<ROW_LANES>(args, w, [&](int head, int i) {
        fa_i64 row = w.seq.q_row + i;
        convert_row<ROW_LANES>(args.dq,
                               w.seq.q_entry * args.dq.stride[0] + row * args.dq.stride[1] + head * args.dq.stride[2],
                               w.dq + (head_rows(args, head) + i) * FA_HEAD_DIM, args.scale, args.head_dim);
    });
}

/* dK and dV of the block's keys, and its part of dQ. */
FA_DEVICE void run(const fa_args &args, const work &w, unsigned shared)
{
    block_state state;
    clear(state.dk);
    clear(state.dv);
    state.step = 0;
    bool some  = w.tiles.begin < w.tiles.end;
    if (some) /* among no tiles it would look for ever */
        state.at = settle(args, w, first_place(w));
    if (some && inside(w, state.at)) {
        int     begin = w.keys.begin - w.first_k, end = w.keys.end - w.first_k;
        fa_i64  row = w.seq.kv_row + w.first_k;
        rows_of k   = {(const fa_element *)args.k.data + w.seq.kv_entry * args.k.stride[0] + row * args.k.stride[1] +
                           w.kv_head * args.k.stride[2],
                       args.k.stride[1]};
        rows_of v   = {(const fa_element *)args.v.data + w.seq.kv_entry * args.v.stride[0] + row * args.v.stride[1] +
                           w.kv_head * args.v.stride[2],
                       args.v.stride[1]};
        copy_tile<FA_TILE_K, FA_HEAD_DIM>(shared, k, begin, end, args.head_dim, args.k.stride[3]);
        copy_tile<FA_TILE_K, FA_HEAD_DIM_V>(shared + V_AT, v, begin, end, args.head_dim_v, args.v.stride[3]);
        copy_queries(args, w, shared, 0, state.at);
        copy_commit();
        if (FA_MASK != FA_MASK_NONE || FA_HAS_SLICES) {
            /* a query that does not see a key has dS = 0, and 0 * NaN of K would reach its dQ; who sees it has LSE NaN */
            copy_wait<0>();
            clear_nonfinite<FA_TILE_K, FA_HEAD_DIM>(shared);
        }
        while (inside(w, state.at)) {
            while (inside(w, state.at) && clean_place(args, w, state.at))
                step<false>(state, args, w, shared);
            if (inside(w, state.at))
                step<true>(state, args, w, shared);
        }
        copy_wait<0>();
        __syncthreads();
        add_dq(args, w, shared, (state.step & 1) ^ 1, state.before);
        __syncthreads(); /* K and V become staging */
    }
    unsigned staging = shared + threadIdx.x / 32 * KEYS16 * 16 * (COLS8 > COLS8_V ? COLS8 : COLS8_V) * 16;
    store_gradient<FA_HEAD_DIM, COLS8>(state.dk, args.scale, args.dk, args.dk_accum, args, w, staging, args.head_dim);
    float v_factor = FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f;
    store_gradient<FA_HEAD_DIM_V, COLS8_V>(state.dv, v_factor, args.dv, args.dv_accum, args, w, staging, args.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(THREADS, FA_MIN_BLOCKS) backward_sm80(const __grid_constant__ fa_args args)
{
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ work w; /* the same for all threads: in shared memory, registers are for S, dP, dK and dV */
    if (FA_DTYPE == FA_F32 && args.lost && !*args.lost) /* backward_f32_sm90 has done it */
        return;
    if (threadIdx.x == 0) {
        unsigned   tiles = FA_DTYPE == FA_F32 ? (args.max_seqlen_k + FA_TILE_K - 1) / FA_TILE_K : args.tiles_k; /* behind backward_f32_sm90 args.tiles_k counts its */
        grid_place at    = {blockIdx.x % tiles, blockIdx.x / tiles};
        if (!FA_ONE_LAUNCH) /* there the tiles of a head are a cluster, which has neighbouring numbers */
            at = grid_place_of<FA_TILE_K>(blockIdx.x, tiles);
        w = work_of(args, at);
    }
    __syncthreads();
    if (FA_ONE_LAUNCH) {
        clear_dq(args, w);
        cluster_barrier();
    }
    if (w.first_k < w.seq.rows_k)
        run(args, w, shared_address(shared_memory));
    if (FA_ONE_LAUNCH) {
        cluster_barrier();
        convert_dq(args, w);
    }
}
