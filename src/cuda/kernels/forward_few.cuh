/* What the forward does for few queries alone: before its keys come and when a part of them ends (decision 0058). */
#ifndef FA_FORWARD_FEW_CUH
#define FA_FORWARD_FEW_CUH

#include "forward_block.cuh"
#include "merge_parts.cuh"

/* PACKED: the warps' parts of each row into one, in their order, and out of the block, a warp a row. True if a row is far. */
FA_DEVICE bool store_shared_rows(block_state &state, const fa_args &args, work &w, unsigned shared)
{
    unsigned tops = shared + SHARE_AT, sums = tops + SHARE_ROWS * 4, parts = sums + SHARE_ROWS * 4;
    int      lane = threadIdx.x % 32;
    bool     far  = false;
    if (!RUNS)
        copy_wait<0>();
    for (int first = 0; first < w.rows; first += ROUND) {
        __syncthreads(); /* nobody reads the rows before, or tiles, any more */
#pragma unroll
        for (int r = 0; r < 2 * ROWS16; r++) {
            int   row = row_of(r / 2, r % 2), at = key_warp() * FA_TILE_Q + row;
            float sum = quad_sum(state.sum[r]);
            if (ROUND < FA_TILE_Q && row / ROUND != first / ROUND)
                continue;
            if (lane % 4 == 0 && col_warp() == 0) {
                shared_store(tops + at * 4, state.maximum[r] * w.unit);
                shared_store(sums + at * 4, sum);
            }
#pragma unroll
            for (int n = 0; n < COLS8; n++)
                shared_store(parts + ((key_warp() * ROUND + row % ROUND) * SHARE_PITCH + col_of(n) + lane % 4 * 2) * 4,
                             make_float2(state.o[r / 2][n][r % 2 * 2], state.o[r / 2][n][r % 2 * 2 + 1]));
        }
        __syncthreads();
        for (int row = first + threadIdx.x / 32; row < fa_min_int(first + ROUND, w.rows); row += FA_WARPS) {
            int   i = query_of(args, w, row), head = head_of(args, w, row);
            float top = -infinity(), total = 0.0f, factor[KEY_WARPS];
#pragma unroll
            for (int n = 0; n < KEY_WARPS; n++) {
                factor[n] = shared_load_float(tops + (n * FA_TILE_Q + row) * 4);
                top       = fmaxf(top, factor[n]);
            }
#pragma unroll
            for (int n = 0; n < KEY_WARPS; n++) { /* a warp that saw nothing has -inf and 0 */
                factor[n] = factor[n] == -infinity() ? 0.0f : exp2_fast(factor[n] - top);
                total += factor[n] * shared_load_float(sums + (n * FA_TILE_Q + row) * 4);
            }
            row_end end = end_of_row(top, total, sink_log2_of(args, head), i >= w.seq.seqlen_q);
            if (lane == 0) {
                store_lse(args, w, head, i, end.lse);
                w.far[row] = is_far(top);
            }
            far |= is_far(top);
            if (KEEPS && lane % 8 == w.split)
                state.kept.lse = end.lse;
            bool empty = end.lse == -infinity(); /* then O is 0, whatever V holds; an empty part's is not read */
            if (FA_HAS_SPLIT && empty)
                continue;
            for (int col = lane * 4; col < args.head_dim_v; col += 128) {
                float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int n = 0; n < (empty ? 0 : KEY_WARPS); n++) {
                    float4 part = shared_load_float4(parts + ((n * ROUND + row % ROUND) * SHARE_PITCH + col) * 4);
                    o = make_float4(o.x + factor[n] * part.x, o.y + factor[n] * part.y, o.z + factor[n] * part.z, o.w + factor[n] * part.w);
                }
                float scale = end.scale * descale_of(args.descale_v, w.b, w.kv_head);
                store_four(FA_HAS_SPLIT ? args.o_partial : args.o.data, o_place(args, w, head, i, col), FA_HAS_SPLIT ? FA_F32 : FA_DTYPE_O, o, scale);
                if constexpr (KEEPS) {
                    int part = w.split;
                    o        = make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
#pragma unroll
                    for (int p = 0; p < 8; p++)
                        state.kept.o[p] = p == part ? o : state.kept.o[p];
                }
            }
        }
    }
    return !MODIFIED && far;
}

/* PACKED, 64 rows: the result of two warps that share rows. Each leaves the other its sums and a half of the columns of O, and finishes the other half. */
FA_DEVICE bool store_halves(block_state &state, const fa_args &args, work &w, unsigned shared)
{
    constexpr int HALF8 = COLS8 / 2, PITCH = FA_HEAD_DIM_V / 2 + 8;
    unsigned      tops = shared, sums = tops + 2 * FA_TILE_Q * 4, halves = sums + 2 * FA_TILE_Q * 4;
    int           lane = threadIdx.x % 32, own = key_warp(), other = own ^ 1;
    float         scale[2 * ROWS16], total[2 * ROWS16];
    bool          far = false;
    auto          half_of = [&](int r, int n, bool upper) {
        const float(&low)[4] = state.o[r / 2][n], (&high)[4] = state.o[r / 2][n + HALF8];
        float a = upper ? high[r % 2 * 2] : low[r % 2 * 2], b = upper ? high[r % 2 * 2 + 1] : low[r % 2 * 2 + 1];
        return scale[r] == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(a * scale[r], b * scale[r]);
    };
    copy_wait<0>();
    __syncthreads(); /* nobody reads tiles any more */
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        int row  = row_of(r / 2, r % 2);
        total[r] = quad_sum(state.sum[r]);
        if (lane % 4 == 0) {
            shared_store(tops + (own * FA_TILE_Q + row) * 4, state.maximum[r] * w.unit);
            shared_store(sums + (own * FA_TILE_Q + row) * 4, total[r]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        int     row = row_of(r / 2, r % 2), i = query_of(args, w, row), head = head_of(args, w, row);
        float   mine = state.maximum[r] * w.unit, others = shared_load_float(tops + (other * FA_TILE_Q + row) * 4), top = fmaxf(mine, others);
        float   factor = mine == -infinity() ? 0.0f : exp2_fast(mine - top), its = others == -infinity() ? 0.0f : exp2_fast(others - top);
        row_end end    = end_of_row(top, factor * total[r] + its * shared_load_float(sums + (other * FA_TILE_Q + row) * 4), sink_log2_of(args, head), i >= w.seq.seqlen_q);
        scale[r]       = factor * end.scale * descale_of(args.descale_v, w.b, w.kv_head);
        if (own == 0 && lane % 4 == 0 && row < w.rows) {
            store_lse(args, w, head, i, end.lse);
            w.far[row] = is_far(top);
        }
        far |= row < w.rows && is_far(top);
        /* 0: a row that saw nothing, whatever V holds. A weight too small for float lets Inf and NaN through. */
        scale[r] = end.lse == -infinity() ? 0.0f : scale[r] == 0.0f ? 1.2e-38f : scale[r];
#pragma unroll
        for (int n = 0; n < HALF8; n++) {
            float2 o = half_of(r, n, own == 0);
            shared_store(halves + ((own * FA_TILE_Q + row) * PITCH + n * 8 + lane % 4 * 2) * 4, o);
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        int row = row_of(r / 2, r % 2), i = query_of(args, w, row), head = head_of(args, w, row);
        if (row >= w.rows)
            continue;
        fa_i64 at = o_place(args, w, head, i, 0);
#pragma unroll
        for (int n = 0; n < HALF8; n++) {
            float2 o    = half_of(r, n, own == 1);
            float2 more = shared_load_float2(halves + ((other * FA_TILE_Q + row) * PITCH + n * 8 + lane % 4 * 2) * 4);
            float  a = o.x + more.x, b = o.y + more.y;
            int    col  = (own * HALF8 + n) * 8 + lane % 4 * 2;
            if (FA_HAS_SPLIT || (FA_DTYPE_O == FA_F32 && col < args.head_dim_v))
                *(float2 *)((float *)(FA_HAS_SPLIT ? args.o_partial : args.o.data) + at + col) = make_float2(a, b);
            else if (FA_DTYPE_O != FA_F32 && col < args.head_dim_v)
                *(unsigned *)((fa_u16 *)args.o.data + at + col) = pack<FA_DTYPE_O>(a, b);
        }
    }
    return !MODIFIED && far;
}

/* PACKED: a part's result. */
FA_DEVICE void finish_part(block_state &state, const fa_args &args, work &w, unsigned shared, int part)
{
    if (RUNS && FA_HAS_SPLIT && threadIdx.x == 0) { /* nobody reads these between here and the next barrier */
        w.split = part;
        w.keys  = {fa_max_int(w.run.begin, part * w.part_keys), fa_min_int(w.run.end, (part + 1) * w.part_keys)};
    }
    bool far = !RUNS && KEY_WARPS == 2 ? store_halves(state, args, w, shared) : store_shared_rows(state, args, w, shared);
    bool again = !MODIFIED && __syncthreads_or(far);
    if (again)
        redo_far_rows(args, w);
    if (state.cleared)
        add_nonfinite(args, w);
    if (KEEPS)
        state.kept.good &= !again && !state.cleared;
}

/* PACKED: parts in which the block's rows see nothing. */
FA_DEVICE void empty_parts(const fa_args &args, const work &w)
{
    bool all = w.run.begin >= w.run.end;
    for (int n = threadIdx.x; n < w.rows * w.parts; n += THREADS) {
        int row = n % w.rows, part = n / w.rows;
        if (all || w.split + part < w.run.begin / w.part_keys || w.split + part > (w.run.end - 1) / w.part_keys)
            args.lse_partial[partial_row(args, w, head_of(args, w, row), query_of(args, w, row)) +
                             part * ((fa_i64)args.heads_q * tokens_of_parts(args))] = -infinity();
    }
}

/* FA_ONE_LAUNCH: the parts of this tile's rows into one, four rows by a warp of one of the cluster's `blocks`. */
FA_DEVICE void merge_parts(const block_state &state, const fa_args &args, const work &w, int block, int blocks)
{
    int row = threadIdx.x / 32;
    if (KEEPS && w.rows <= FA_WARPS && state.kept.good) {
        if (row < w.rows)
            merge_kept(args, state.kept.lse, state.kept.o, head_of(args, w, row), w.seq.q_entry, w.seq.q_row + query_of(args, w, row), query_of(args, w, row) < w.seq.seqlen_q);
        return;
    }
    cluster_barrier();
    merge_tile(args, w, block * FA_WARPS + row, blocks * FA_WARPS);
}

/* The first tiles of a block into L2. */
FA_DEVICE void prefetch_tiles(const fa_args &args, const work &w)
{
    constexpr int LINE = 128 / sizeof(fa_element), K_LINES = (FA_HEAD_DIM + LINE - 1) / LINE, LINES = K_LINES + (FA_HEAD_DIM_V + LINE - 1) / LINE;
    int           rows = fa_min_int(TILES_AHEAD * FA_TILE_K, w.run.end - w.run.begin);
    for (int n = threadIdx.x; n < rows * LINES; n += THREADS) {
        int line = n % LINES, row = w.run.end - 1 - n / LINES;
        prefetch(line < K_LINES ? w.k.data + row * args.k.stride[1] + line * LINE : w.v.data + row * args.v.stride[1] + (line - K_LINES) * LINE);
    }
}

#endif
