/*
 * FlashAttention-2 forward (Algorithm 1) by mma.sync, for every GPU from Ampere on; float16, bfloat16, and float32 in three
 * pieces of bfloat16 (numbers.cuh), FP8 as float16: its bytes are copied like other rows, and each thread widens its own.
 *
 *              head_dim                 A block owns FA_TILE_Q rows of Q of one head and walks its key tiles from right to
 *           +-----------+               left: first the tiles on the mask's edge, then the clean ones in a loop without any
 *    warp 0 |  Q tile   |  registers:   mask code, last the window's left edge.
 *    warp 1 | (shared)  |  S, P, O
 *     ...   +-----------+  m, l         Warps split the rows of Q (split-Q): each needs all of K and V, and no warp waits
 *              K, V tiles               for another's S or O. S becomes P in registers and is at once the A operand of P V.
 *      (shared, FA_STAGES deep)
 *
 * Head dims above 256: two warps (float32: four) share rows and keys, and each has every second (fourth) block of 16 columns of V and O (decision 0069).
 *
 * FA_STAGES 1: one K and one V tile; V arrives during Q K^T, the next K during softmax and P V (two barriers a step).
 * FA_STAGES 2: two of each; the next K and V arrive during the whole step (one barrier a step).
 * FA_VARIANT bit 0: Q's fragments stay in registers. The number above it, if not 0: few queries. Then a tile's rows are queries of
 * all heads that share a key head, so that K and V are read once, and so many warps share a row, each with its own keys of a tile
 * (decision 0058); with more than one stage FA_STAGES - 1 tiles are on their way while one is worked on.
 */
#include "forward_few.cuh"

extern "C" __constant__ int fa_shared_bytes = TILES_BYTES > SHARE_AT + SHARE_BYTES ? TILES_BYTES : SHARE_AT + SHARE_BYTES;

FA_DEVICE fa_range keys_of_tile(int n) { return {n * FA_TILE_K, (n + 1) * FA_TILE_K}; }

/* The next key tile from `n` on towards 0 where something is visible; below `first` if there is none. LISTED: see begin_walk. */
FA_DEVICE int next_tile(const fa_args &args, const work &w, int n, int first)
{
    if (FA_HAS_SLICES)
        while (n >= first && slices_tile(args, w.slices, w.queries, keys_of_tile(n)) == 0)
            n--;
    return n;
}

/* The first tile; below w.first_tile: none. */
FA_DEVICE int begin_walk(block_state &state, const fa_args &args, const work &w)
{
#if FA_MASK == FA_MASK_LISTED
    state.number = 0;
    state.mask   = w.list->mask;
    return w.list->tile;
#else
    return w.keys.begin < w.keys.end ? next_tile(args, w, (w.keys.end - 1) / FA_TILE_K, w.first_tile) : -1;
#endif
}

/* The one behind the tile at hand. */
FA_DEVICE int tile_behind(const block_state &state, const fa_args &args, const work &w)
{
#if FA_MASK == FA_MASK_LISTED
    return w.list[state.number + 1].tile;
#else
    return next_tile(args, w, state.tile - 1, w.first_tile);
#endif
}

FA_DEVICE void go_to(block_state &state, const work &w, int tile)
{
    state.tile = tile;
#if FA_MASK == FA_MASK_LISTED
    state.mask = w.list[++state.number].mask;
#endif
}

/* What this thread sees of its rows of a tile that is cut: asked for early, for it takes long, but where registers are short. */
constexpr bool SEEN_EARLY = LISTED && FA_DTYPE != FA_F32 && !FA_HAS_BIAS;

FA_DEVICE seen_words seen_of_rows(const block_state &state, const fa_args &args, int m)
{
#if FA_MASK == FA_MASK_LISTED
    return load_seen<FA_TILE_Q>(args, state.mask, row_of(m, 0));
#else
    return {};
#endif
}

/* Rows of tile n of K or V; place: LOOKED_UP. */
FA_DEVICE auto rows_of_tile(const fa_args &args, const work &w, const kv_source &source, const fa_view &view, fa_i64 place, int n)
{
    if constexpr (LOOKED_UP)
        return rows_of_places{source.data, place};
    else
        return rows_from(args, w, source, view, n * FA_TILE_K);
}

/* Tile n of K or V to shared memory, if wanted. */
FA_DEVICE void copy_k(const fa_args &args, unsigned to, const work &w, const key_place &place, int n, bool wanted)
{
    int first = n * FA_TILE_K;
    if (!wanted)
        return;
    copy_tile<FA_TILE_K, FA_HEAD_DIM, ONCE>(to, rows_of_tile(args, w, w.k, args.k, place.k, n), w.run.begin - first, w.run.end - first,
                                            args.head_dim, args.k.stride[3]);
}

FA_DEVICE void copy_v(const fa_args &args, unsigned to, const work &w, const key_place &place, int n, bool wanted)
{
    int first = n * FA_TILE_K;
    if (!wanted)
        return;
    copy_tile<FA_TILE_K, FA_HEAD_DIM_V, ONCE>(to, rows_of_tile(args, w, w.v, args.v, place.v, n), w.run.begin - first, w.run.end - first,
                                              args.head_dim_v, args.v.stride[3]);
}

FA_DEVICE key_place place_in_tile(const fa_args &args, const work &w, int n)
{
    return LOOKED_UP && n >= w.first_tile ? place_of_lane(args, w, n * FA_TILE_K) : key_place{0, 0};
}

/* S = Q K^T (line 8). */
FA_DEVICE void scores_of_tile(float (&s)[ROWS16][KEYS8][4], const lane_addresses<FA_HEAD_DIM, true> &q_at, q_fragments &q_kept,
                              const lane_addresses<FA_HEAD_DIM, true> &k_at)
{
    constexpr int UNROLLED = WIDE && PLANES > 1 ? 4 : DIM16; /* of all 36 the compiler loads too many ahead, and spills */
    clear(s);
#pragma unroll(UNROLLED)
    for (int d = 0; d < DIM16; d++) {
        blocks_of<ROWS16> q;
        if constexpr (Q_STAYS) {
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    q[0][m][e] = q_kept[m][d][e];
        } else
            load_rows<ROWS16, Q_PLANE>(q, q_at, d);
        multiply_step<WIDE>(s, q, [&](unsigned(&k)[4], int n, int p) { load_matrix(k, k_at.at(n, d) + p * K_PLANE); });
    }
}

/* O += P V (line 10). */
FA_DEVICE void add_values(float (&o)[ROWS16][COLS8][4], const float (&p)[ROWS16][KEYS8][4],
                          const lane_addresses<FA_HEAD_DIM_V, true> &v_at)
{
#pragma unroll
    for (int j = 0; j < KEYS8 / 2; j++) {
        blocks_of<ROWS16> a;
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                unsigned plane[PLANES];
                pack_planes(plane, p[m][2 * j + e / 2][e % 2 * 2], p[m][2 * j + e / 2][e % 2 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < PLANES; i++)
                    a[i][m][e] = plane[i];
            }
        multiply_step<true>(o, a, [&](unsigned(&v)[4], int n, int i) {
            load_matrix_transposed(v, v_at.at(j, n * COL_WARPS) + i * V_PLANE);
        });
    }
}

/* Few rows wait for keys, and not for their bias too. */
constexpr bool BIAS_AHEAD = FA_HAS_BIAS && PACKED && ROWS16 == 1 && KEYS8 <= 4;

/* The first of this thread's columns of a tile of keys. */
FA_DEVICE int first_column(int tile) { return tile * FA_TILE_K + key_warp() * WARP_KEYS + 2 * (threadIdx.x % 4); }

FA_DEVICE void load_bias(float (&bias)[KEYS8][4], const fa_args &args, const work &w, const score_terms &terms, int tile)
{
#pragma unroll
    for (int n = 0; n < KEYS8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            bias[n][e] = bias_of(args, terms, w.seq, query_of(args, w, row_of(0, e / 2)), first_column(tile) + n * 8 + e % 2);
}

/* Scores in units of log2 (softcap, bias, ALiBi), and -inf where the mask hides. */
template <bool MASKED>
FA_DEVICE void finish_scores(float (&s)[ROWS16][KEYS8][4], const fa_args &args, const work &w, const block_state &state, const float (&bias)[KEYS8][4],
                             const seen_words (&early)[ROWS16])
{
    const score_terms &terms = state.terms;
    int                col = first_column(state.tile);
#pragma unroll
    for (int m = 0; m < (MODIFIED || MASKED ? ROWS16 : 0); m++) {
        seen_words seen;
        if constexpr (MASKED)
            seen = SEEN_EARLY ? early[m] : seen_of_rows(state, args, m);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int        i      = query_of(args, w, row_of(m, h));
            row_limits limits = row_limits_of(window_of(args), w.seq, w.run, i);
            int        first = limits.first - col, last = limits.last - col;
#pragma unroll
            for (int n = 0; n < KEYS8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = s[m][n][2 * h + e];
                    int    j     = n * 8 + e; /* from col on */
                    float  capped;
                    if constexpr (MODIFIED)
                        score = modified_score(args, terms, w.seq, score, i, col + j, BIAS_AHEAD ? bias[n][2 * h + e] : bias_of(args, terms, w.seq, i, col + j), capped);
                    if constexpr (MASKED) {
                        bool visible = LISTED ? sees(seen, 4 * n + 2 * h + e) : j <= last && j >= first;
                        /* A row past seqused_q would see keys that no query sees, which may hold NaN. */
                        if (FA_HAS_SLICES && !LISTED && visible)
                            visible = i < w.seq.seqlen_q && slices_see(args, w.slices, i, col + j);
                        score = visible ? score : -infinity();
                    }
                }
        }
    }
}

/* P with the dropped elements 0; the kept ones' factor is applied to O at the end. */
FA_DEVICE void drop(float (&p)[ROWS16][KEYS8][4], const fa_args &args, const work &w, int tile)
{
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < KEYS8; n += 2) {
            int       row_block = (w.first_q + row_of(m, 0)) / 16, col_block = tile * (FA_TILE_K / 16) + n / 2;
            fa_philox numbers   = fa_dropout_block(&args.dropout, w.b * args.heads_q + w.head, row_block, col_block,
                                                   threadIdx.x % 32);
#pragma unroll
            for (int e = 0; e < 8; e++) /* number: (lower half) + 2 (odd column) + 4 (second eight columns) */
                if (fa_dropout_number(numbers, e) < args.dropout.threshold)
                    p[m][n + (e >> 2)][2 * (e & 1) + ((e >> 1) & 1)] = 0.0f;
        }
}

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. True if a row is far. */
FA_DEVICE bool store_result(float (&o)[ROWS16][COLS8][4], float (&maximum)[2 * ROWS16], float (&sum)[2 * ROWS16], float unit,
                            const fa_args &args, work &w, unsigned shared)
{
    int    warp = threadIdx.x / 32, warp_row = w.first_q + row_warp() * 16 * ROWS16;
    float  sink_log2 = sink_log2_of(args, w.head), descale = descale_of(args.descale_v, w.b, w.kv_head), scale[2 * ROWS16];
    bool   far = false;
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        int     i   = w.first_q + row_of(r / 2, r % 2);
        float   top = maximum[r] * unit;
        row_end end = end_of_row(top, quad_sum(sum[r]), sink_log2, i >= w.seq.seqlen_q);
        scale[r]    = end.scale * descale;
        if (FA_HAS_DROPOUT)
            scale[r] *= args.dropout.keep_scale;
        if (threadIdx.x % 4 == 0 && col_warp() == 0 && i < w.seq.rows_q)
            store_lse(args, w, w.head, i, end.lse);
        if (!MODIFIED) {
            w.far[i - w.first_q] = is_far(top);
            far |= is_far(top);
        }
    }
    if constexpr (FA_HAS_SPLIT) {
        float *to = args.o_partial + partial_row(args, w, w.head, warp_row) * FA_HEAD_DIM_V;
        store_accumulator<FA_F32, ROWS16, COLS8, COL_WARPS>(o, scale, 0, to, FA_HEAD_DIM_V, 1, w.seq.rows_q - warp_row, FA_HEAD_DIM_V,
                                                            col_warp());
    } else {
        unsigned staging = shared + warp * 16 * ROWS16 * COLS8 * 8 * 2;
        fa_i64   offset  = w.seq.q_entry * args.o.stride[0] + (w.seq.q_row + warp_row) * args.o.stride[1] +
                        w.head * args.o.stride[2];
        store_accumulator<FA_DTYPE_O, ROWS16, COLS8, COL_WARPS>(o, scale, staging,
                                                                (char *)args.o.data + offset * (FA_DTYPE_O == FA_F32 ? 4 : 2),
                                                                args.o.stride[1], args.o.stride[3], w.seq.rows_q - warp_row,
                                                                args.head_dim_v, col_warp());
    }
    return far;
}

FA_DEVICE void wait_for_k(unsigned k_tile)
{
    copy_wait<0>();
    expand_tile<FA_TILE_K, FA_HEAD_DIM>(k_tile);
    __syncthreads();
}

/* Waits for a tile's copies, but not for those of LATER more. In an edge tile also clears Inf and NaN from V; true if there were any. */
template <bool CLEAR, int LATER = 0> FA_DEVICE bool wait_for_v(unsigned v_tile)
{
    copy_wait<LATER>();
    expand_tile<FA_TILE_K, FA_HEAD_DIM_V>(v_tile);
    if constexpr (CLEAR)
        return __syncthreads_or(clear_nonfinite<FA_TILE_K, FA_HEAD_DIM_V>(v_tile));
    __syncthreads();
    return false;
}

template <bool MASKED>
FA_DEVICE void step(block_state &state, const fa_args &args, const work &w, const lane_addresses<FA_HEAD_DIM, true> &q_at,
                    q_fragments &q_kept, lane_addresses<FA_HEAD_DIM, true> k_at, lane_addresses<FA_HEAD_DIM_V, true> v_at)
{
    constexpr bool CLEAR = MASKED && (FA_MASK != FA_MASK_NONE || FA_HAS_SLICES);
    int            next  = tile_behind(state, args, w);
    float          s[ROWS16][KEYS8][4], bias[KEYS8][4];
    seen_words     seen[ROWS16];
    int            stage = state.stage;
    if constexpr (MASKED && SEEN_EARLY)
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
            seen[m] = seen_of_rows(state, args, m);
    if constexpr (BIAS_AHEAD)
        load_bias(bias, args, w, state.terms, state.tile);
    if constexpr (FA_STAGES == 1) {
        wait_for_k(state.k_shared);
        copy_v(args, state.v_shared, w, {}, state.tile, true);
        copy_commit();
        v_at = v_at.from(0);
        scores_of_tile(s, q_at.from(0), q_kept, k_at.from(0));
        state.cleared |= wait_for_v<CLEAR>(state.v_shared);
        copy_k(args, state.k_shared, w, {}, next, next >= w.first_tile);
        copy_commit();
    } else if constexpr (PACKED) {
        if constexpr (AS_BYTES) {
            copy_wait<FA_STAGES - 2>();
            expand_tile<FA_TILE_K, FA_HEAD_DIM>(state.k_shared + stage * K_BYTES);
        }
        state.cleared |= wait_for_v<CLEAR, FA_STAGES - 2>(state.v_shared + stage * V_BYTES);
        int ahead = state.tile - (FA_STAGES - 1), free = stage == 0 ? FA_STAGES - 1 : stage - 1; /* the last step's */
        copy_k(args, state.k_shared + free * K_BYTES, w, state.place, ahead, ahead >= w.first_tile);
        copy_v(args, state.v_shared + free * V_BYTES, w, state.place, ahead, ahead >= w.first_tile);
        copy_commit();
        state.place = place_in_tile(args, w, ahead - 1); /* comes while this tile is worked on */
        k_at        = k_at.from(stage * K_BYTES);
        v_at        = v_at.from(stage * V_BYTES);
        state.stage = stage == FA_STAGES - 1 ? 0 : stage + 1;
        scores_of_tile(s, q_at.from(0), q_kept, k_at);
    } else {
        if constexpr (AS_BYTES) {
            copy_wait<0>();
            expand_tile<FA_TILE_K, FA_HEAD_DIM>(state.k_shared + stage * K_BYTES);
        }
        state.cleared |= wait_for_v<CLEAR>(state.v_shared + stage * V_BYTES);
        int other = stage ^ 1;
        k_at        = k_at.from(stage * K_BYTES);
        v_at        = v_at.from(stage * V_BYTES);
        state.stage = other;
        scores_of_tile(s, q_at.from(0), q_kept, k_at);
        copy_k(args, state.k_shared + other * K_BYTES, w, {}, next, next >= w.first_tile);
        copy_v(args, state.v_shared + other * V_BYTES, w, {}, next, next >= w.first_tile);
        copy_commit();
    }
    finish_scores<MASKED>(s, args, w, state, bias, seen);
    softmax_step<MASKED || FA_HAS_BIAS>(s, state.maximum, state.sum, state.o, w.unit);
    if constexpr (FA_HAS_DROPOUT)
        drop(s, args, w, state.tile);
    add_values(state.o, s, v_at);
    go_to(state, w, next);
}

/* All key tiles, right to left (lines 6-11). */
FA_DEVICE void walk_tiles(block_state &state, const fa_args &args, work &w, unsigned shared)
{
    key_place place[TILES_AHEAD];
#pragma unroll
    for (int n = 0; n < TILES_AHEAD; n++)
        place[n] = place_in_tile(args, w, state.tile - n);
    state.place = place_in_tile(args, w, state.tile - TILES_AHEAD);
    copy_tile<FA_TILE_Q, FA_HEAD_DIM>(shared, queries_from(args, w), 0, rows_used(args, w), args.head_dim, args.q.stride[3]);
    copy_commit();
#pragma unroll
    for (int n = 0; n < TILES_AHEAD; n++) {
        copy_k(args, state.k_shared + n * K_BYTES, w, place[n], state.tile - n, n == 0 || state.tile - n >= w.first_tile);
        if (FA_STAGES > 1)
            copy_v(args, state.v_shared + n * V_BYTES, w, place[n], state.tile - n, n == 0 || state.tile - n >= w.first_tile);
        copy_commit();
    }

    lane_addresses<FA_HEAD_DIM, true>   q_at(shared + row_warp() * ROWS16 * 16 * FA_HEAD_DIM * 2, rows_first_row(), rows_first_half());
    lane_addresses<FA_HEAD_DIM, true>   k_at(state.k_shared + key_warp() * WARP_KEYS * FA_HEAD_DIM * 2, halves_first_row(),
                                       halves_first_half());
    lane_addresses<FA_HEAD_DIM_V, true> v_at(state.v_shared + key_warp() * WARP_KEYS * FA_HEAD_DIM_V * 2, rows_first_row(),
                                       2 * col_warp() + rows_first_half());
    q_fragments                   q_kept;
    float scale_log2 = scale_log2_of(args, w);
    if constexpr (AS_BYTES) {
        copy_wait<TILES_AHEAD>();
        expand_tile<FA_TILE_Q, FA_HEAD_DIM>(shared);
    }
    if (!MODIFIED && scale_log2 <= 0) { /* below 0 turns the order of scores round, 0 makes all equal */
        copy_wait<TILES_AHEAD>();
        multiply_tile<FA_TILE_Q, FA_HEAD_DIM>(shared, scale_log2 < 0 ? -1.0f : 0.0f);
    }
    if constexpr (Q_STAYS) {
        copy_wait<TILES_AHEAD>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int d = 0; d < DIM16; d++)
                load_matrix(q_kept[m][d], q_at.at(m, d));
    }
    do {
        int  part = RUNS && FA_HAS_SPLIT ? state.tile * FA_TILE_K / w.part_keys : 0, end = RUNS && FA_HAS_SPLIT ? part * (w.part_keys / FA_TILE_K) : 0;
        auto last = [&] { return RUNS && FA_HAS_SPLIT ? fa_max_int(w.first_tile, end) : w.first_tile; }; /* of the part's tiles */
        while (state.tile >= last()) {
            if constexpr (LISTED) {
#if FA_MASK == FA_MASK_LISTED
                while (state.tile >= 0 && state.mask < 0)
                    step<false>(state, args, w, q_at, q_kept, k_at, v_at);
#endif
            } else if constexpr (FA_HAS_SLICES) {
                while (state.tile >= w.clean.begin && state.tile < w.clean.end &&
                       slices_tile(args, w.slices, w.queries, keys_of_tile(state.tile)) == 2)
                    step<false>(state, args, w, q_at, q_kept, k_at, v_at);
            } else {
                while (state.tile >= (RUNS ? fa_max_int(w.clean.begin, last()) : w.clean.begin) && state.tile < w.clean.end)
                    step<false>(state, args, w, q_at, q_kept, k_at, v_at);
            }
            if (state.tile >= last())
                step<true>(state, args, w, q_at, q_kept, k_at, v_at);
        }
        if constexpr (RUNS) {
            finish_part(state, args, w, shared, part);
            begin_rows(state);
        }
    } while (RUNS && state.tile >= w.first_tile);
    copy_wait<0>();
    if (FA_HEAD_DIM != FA_HEAD_DIM_V || COL_WARPS > 1)
        __syncthreads(); /* a warp's staging must not cover rows of Q that another still reads */
}

extern "C" __global__ void __launch_bounds__(THREADS, FA_MIN_BLOCKS) forward_sm80(const __grid_constant__ fa_args args)
{
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ work w; /* the same for all threads: in shared memory, registers are for S and O */
    if (threadIdx.x == 0) {
        if (PACKED && reads_lengths(args))
            wait_for_launch_before();
        w = work_of(args);
    }
    /* While the launch before ends. Not where a grid is so small that the one before still reads its own keys. */
    unsigned wave = multiprocessors() * FA_MIN_BLOCKS;
    if (ASKS_AHEAD && blockIdx.x < wave && !(FA_ONE_LAUNCH && gridDim.x <= wave) && !reads_lengths(args)) {
        __syncthreads();
        prefetch_tiles(args, w);
    }
    if (PACKED)
        wait_for_launch_before();
    if (PACKED || FA_HAS_SPLIT)
        let_next_launch_begin();
    __syncthreads();
    if (w.first_q >= w.seq.rows_q)
        return;
    unsigned    shared = shared_address(shared_memory);
    block_state state;
    state.terms    = score_terms_of(args, w.b, w.head);
    state.k_shared = shared + Q_BYTES;
    state.v_shared = state.k_shared + FA_STAGES * K_BYTES;
    state.stage    = 0;
    begin_rows(state);
    state.kept = {true, -infinity()};
    state.tile = begin_walk(state, args, w);
    bool walks = state.tile >= w.first_tile;
    if constexpr (PACKED) {
        int block = FA_HAS_SPLIT ? w.split / args.run_parts : 0;
        if (FA_HAS_SPLIT)
            empty_parts(args, w);
        if (walks)
            walk_tiles(state, args, w, shared);
        if (RUNS ? !walks && !FA_HAS_SPLIT : walks || !FA_HAS_SPLIT)
            finish_part(state, args, w, shared, 0);
        if constexpr (FA_HAS_SPLIT && FA_ONE_LAUNCH)
            merge_parts(state, args, w, block, (args.num_splits + args.run_parts - 1) / args.run_parts);
        return;
    }
    if (walks)
        walk_tiles(state, args, w, shared);
    bool far = store_result(state.o, state.maximum, state.sum, w.unit, args, w, shared);
    if (!MODIFIED && __syncthreads_or(far))
        redo_far_rows(args, w);
    if (state.cleared)
        add_nonfinite(args, w);
}
