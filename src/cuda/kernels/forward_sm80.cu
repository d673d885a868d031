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
 * FA_STAGES 1: one K and one V tile; V arrives during Q K^T, the next K during softmax and P V (two barriers a step).
 * FA_STAGES 2: two of each; the next K and V arrive during the whole step (one barrier a step).
 * FA_VARIANT bit 0: Q's fragments stay in registers.
 */
#include "far_rows.cuh"
#include "tile.cuh"

constexpr int  ROWS16 = FA_TILE_Q / (16 * FA_WARPS); /* blocks of 16 rows of a warp */
constexpr int  KEYS8  = FA_TILE_K / 8;
constexpr int  DIM16  = FA_HEAD_DIM / 16;
constexpr int  COLS8  = FA_HEAD_DIM_V / 8;
constexpr bool Q_STAYS = FA_VARIANT & 1;

constexpr int Q_BYTES = PLANES * FA_TILE_Q * 2 * (FA_HEAD_DIM > FA_HEAD_DIM_V ? FA_HEAD_DIM : FA_HEAD_DIM_V); /* O leaves through it */
constexpr int Q_PLANE = FA_TILE_Q * 2 * FA_HEAD_DIM;
constexpr int K_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM, K_BYTES = PLANES * K_PLANE;
constexpr int V_PLANE = FA_TILE_K * 2 * FA_HEAD_DIM_V, V_BYTES = PLANES * V_PLANE;
static_assert(PLANES == 1 || !Q_STAYS, "three planes of Q do not fit into registers");

extern "C" __constant__ int fa_shared_bytes = Q_BYTES + FA_STAGES * (K_BYTES + V_BYTES);

using q_fragments = unsigned[ROWS16][DIM16][4];

/* K or V as a block sees it. */
struct kv_source {
    const fa_element *data; /* the head's row 0 of this sequence; paged: of page 0 */
    const int        *pages; /* this sequence's */
};

/* What a block works on. */
struct work {
    int        b, head, kv_head, split;
    int        first_q;            /* first row of the tile */
    fa_range   queries, keys;      /* rows that count, keys that some of them may see */
    fa_range   clean;              /* tiles of which every query sees every key (slices apart): they need no mask */
    int        first_tile;         /* the last to visit; the walk goes from right to left */
    float      unit;               /* log2 units of one score, > 0 always: a scale of 0 or below goes into Q */
    sequence   seq;
    fa_range   slices;
    kv_source  k, v;
    bool       far[FA_TILE_Q];     /* rows to be computed again (far_rows.cuh) */
};

FA_DEVICE kv_source kv_source_of(const fa_args &args, const fa_view &view, const work &w)
{
    const fa_element *data = (const fa_element *)view.data + w.kv_head * view.stride[2];
    if (FA_HAS_PAGED)
        return {data, args.page_table + w.b * args.page_row_stride};
    return {data + w.seq.kv_entry * view.stride[0] + w.seq.kv_row * view.stride[1], nullptr};
}

FA_DEVICE float scale_log2_of(const fa_args &args, const work &w)
{
    return args.scale_log2 * descale_of_scores(args, w.b, w.kv_head);
}

FA_DEVICE work work_of(const fa_args &args)
{
    work       w;
    grid_place at   = grid_place_of<FA_TILE_Q>(blockIdx.x, args.tiles_q);
    unsigned   n    = at.other;
    int        tile = at.tile;
    w.split = FA_HAS_SPLIT ? n % args.num_splits : 0;
    n       = FA_HAS_SPLIT ? n / args.num_splits : n;
    w.head  = n % args.heads_q;
    w.b     = n / args.heads_q;
    w.kv_head = args.group == 1 ? w.head : w.head / args.group;
    if (FA_MASK != FA_MASK_NONE)
        tile = args.tiles_q - 1 - tile;
    w.seq     = sequence_at(args, w.b);
    w.slices  = FA_HAS_SLICES ? slices_of(args, w.b) : fa_range{0, 0};
    w.first_q = tile * FA_TILE_Q;
    w.queries = {w.first_q, fa_min_int(w.first_q + FA_TILE_Q, w.seq.seqlen_q)};
    fa_range all = {w.seq.key_begin, w.seq.seqlen_k};
    if (FA_HAS_SPLIT) {
        all.begin = fa_max_int(all.begin, w.split * args.split_keys);
        all.end   = fa_min_int(all.end, (w.split + 1) * args.split_keys);
    }
    w.keys = fa_keys_seen(window_of(args), w.seq.diagonal, w.queries, all);
    if (w.queries.begin >= w.queries.end)
        w.keys.end = w.keys.begin;
    w.clean      = clean_tiles<FA_TILE_K>(args, w.seq, w.queries, w.keys);
    w.first_tile = w.keys.begin / FA_TILE_K;
    w.unit       = MODIFIED || scale_log2_of(args, w) == 0 ? 1.0f : fabsf(scale_log2_of(args, w));
    w.k          = kv_source_of(args, args.k, w);
    w.v          = kv_source_of(args, args.v, w);
    return w;
}

FA_DEVICE fa_range keys_of_tile(int n) { return {n * FA_TILE_K, (n + 1) * FA_TILE_K}; }

/* The next key tile from `n` on towards 0 where something is visible; below `first` if there is none. */
FA_DEVICE int next_tile(const fa_args &args, const work &w, int n, int first)
{
    if (FA_HAS_SLICES)
        while (n >= first && slices_tile(args, w.slices, w.queries, keys_of_tile(n)) == 0)
            n--;
    return n;
}

/* Row j of the sequence and those after it. */
FA_DEVICE auto rows_from(const fa_args &args, const work &w, const kv_source &source, const fa_view &view, int j)
{
    if constexpr (FA_HAS_PAGED)
        return rows_of_pages{source.data, source.pages, view.stride[0], view.stride[1], j, args.kv_rows, args.kv_entries,
                             w.seq.rows_k};
    else
        return rows_of{source.data + j * view.stride[1], view.stride[1]};
}

/* Tile n of K or V to shared memory, if wanted. */
FA_DEVICE void copy_k(const fa_args &args, unsigned to, const work &w, int n, bool wanted)
{
    int first = n * FA_TILE_K;
    if (!wanted)
        return;
    copy_tile<FA_TILE_K, FA_HEAD_DIM>(to, rows_from(args, w, w.k, args.k, first), w.keys.begin - first,
                                      w.keys.end - first, args.head_dim, args.k.stride[3]);
}

FA_DEVICE void copy_v(const fa_args &args, unsigned to, const work &w, int n, bool wanted)
{
    int first = n * FA_TILE_K;
    if (!wanted)
        return;
    copy_tile<FA_TILE_K, FA_HEAD_DIM_V>(to, rows_from(args, w, w.v, args.v, first), w.keys.begin - first,
                                        w.keys.end - first, args.head_dim_v, args.v.stride[3]);
}

/* S = Q K^T (line 8). */
FA_DEVICE void scores_of_tile(float (&s)[ROWS16][KEYS8][4], const lane_addresses<FA_HEAD_DIM, true> &q_at, q_fragments &q_kept,
                              const lane_addresses<FA_HEAD_DIM, true> &k_at)
{
    clear(s);
#pragma unroll
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
        multiply_step<false>(s, q, [&](unsigned(&k)[4], int n, int p) { load_matrix(k, k_at.at(n, d) + p * K_PLANE); });
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
            load_matrix_transposed(v, v_at.at(j, n) + i * V_PLANE);
        });
    }
}

/* Row of the tile that this lane's element (m, upper or lower half h) lies in. */
FA_DEVICE int row_of(int m, int h) { return (threadIdx.x / 32) * 16 * ROWS16 + m * 16 + h * 8 + threadIdx.x % 32 / 4; }

/* Scores in units of log2 (softcap, bias, ALiBi), and -inf where the mask hides. */
template <bool MASKED>
FA_DEVICE void finish_scores(float (&s)[ROWS16][KEYS8][4], const fa_args &args, const work &w, const score_terms &terms,
                             int tile)
{
    int col = tile * FA_TILE_K + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int m = 0; m < (MODIFIED || MASKED ? ROWS16 : 0); m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int        i      = w.first_q + row_of(m, h);
            row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, i);
            int        first = limits.first - col, last = limits.last - col;
#pragma unroll
            for (int n = 0; n < KEYS8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = s[m][n][2 * h + e];
                    int    j     = n * 8 + e; /* from col on */
                    float  capped;
                    if constexpr (MODIFIED)
                        score = modified_score(args, terms, w.seq, score, i, col + j, capped);
                    if constexpr (MASKED) {
                        bool visible = j <= last && j >= first;
                        /* A row past seqused_q would see keys that no query sees, which may hold NaN. */
                        if (FA_HAS_SLICES && visible)
                            visible = i < w.seq.seqlen_q && slices_see(args, w.slices, i, col + j);
                        score = visible ? score : -infinity();
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

/* Row of o_partial and lse_partial for query i. */
FA_DEVICE fa_i64 partial_row(const fa_args &args, const work &w, int i)
{
    return ((fa_i64)w.split * args.heads_q + w.head) * args.q_entries * args.q_rows +
           (fa_i64)w.seq.q_entry * args.q_rows + w.seq.q_row + i;
}

FA_DEVICE void store_lse(const fa_args &args, const work &w, int i, float lse)
{
    if (FA_HAS_SPLIT)
        args.lse_partial[partial_row(args, w, i)] = lse;
    else if (args.lse.data)
        ((float *)args.lse.data)[w.seq.q_entry * args.lse.stride[0] + w.head * args.lse.stride[1] +
                                 (w.seq.q_row + i) * args.lse.stride[2]] = lse;
}

FA_DEVICE float sink_log2_of(const fa_args &args, const work &w)
{
    if (FA_HAS_SPLIT || !args.sinks.data)
        return -infinity();
    return load_element(args.sinks.data, w.head * args.sinks.stride[1], args.sinks.dtype) * FA_LOG2E;
}

/* O = O / l, LSE = m + log l (lines 12-13); rows that saw nothing: 0 and -inf. True if a row is far. */
FA_DEVICE bool store_result(float (&o)[ROWS16][COLS8][4], float (&maximum)[2 * ROWS16], float (&sum)[2 * ROWS16], float unit,
                            const fa_args &args, work &w, unsigned shared)
{
    int    warp = threadIdx.x / 32, warp_row = w.first_q + warp * 16 * ROWS16;
    float  sink_log2 = sink_log2_of(args, w), descale = descale_of(args.descale_v, w.b, w.kv_head), scale[2 * ROWS16];
    bool   far = false;
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        int     i   = w.first_q + row_of(r / 2, r % 2);
        float   top = maximum[r] * unit;
        row_end end = end_of_row(top, quad_sum(sum[r]), sink_log2, i >= w.seq.seqlen_q);
        scale[r]    = end.scale * descale;
        if (FA_HAS_DROPOUT)
            scale[r] *= args.dropout.keep_scale;
        if (threadIdx.x % 4 == 0 && i < w.seq.rows_q)
            store_lse(args, w, i, end.lse);
        if (!MODIFIED) {
            w.far[i - w.first_q] = is_far(top);
            far |= is_far(top);
        }
    }
    if constexpr (FA_HAS_SPLIT) {
        float *to = args.o_partial + partial_row(args, w, warp_row) * FA_HEAD_DIM_V;
        store_accumulator<FA_F32, ROWS16, COLS8>(o, scale, 0, to, FA_HEAD_DIM_V, 1, w.seq.rows_q - warp_row, FA_HEAD_DIM_V);
    } else {
        unsigned staging = shared + warp * 16 * ROWS16 * FA_HEAD_DIM_V * 2;
        fa_i64   offset  = w.seq.q_entry * args.o.stride[0] + (w.seq.q_row + warp_row) * args.o.stride[1] +
                        w.head * args.o.stride[2];
        store_accumulator<FA_DTYPE_O, ROWS16, COLS8>(o, scale, staging,
                                                     (char *)args.o.data + offset * (FA_DTYPE_O == FA_F32 ? 4 : 2),
                                                     args.o.stride[1], args.o.stride[3], w.seq.rows_q - warp_row,
                                                     args.head_dim_v);
    }
    return far;
}

/* Index of O's element (i, col), or of o_partial's. */
FA_DEVICE fa_i64 o_place(const fa_args &args, const work &w, int i, int col)
{
    return FA_HAS_SPLIT ? partial_row(args, w, i) * FA_HEAD_DIM_V + col
                        : w.seq.q_entry * args.o.stride[0] + (w.seq.q_row + i) * args.o.stride[1] +
                              w.head * args.o.stride[2] + col * args.o.stride[3];
}

/* Far rows once more, a warp a row. */
static __device__ __noinline__ void redo_far_rows(const fa_args &args, const work &w)
{
    __syncthreads();
    for (int row = threadIdx.x / 32; row < w.queries.end - w.first_q; row += FA_WARPS) {
        if (!w.far[row])
            continue;
        constexpr int COLS = FA_HEAD_DIM_V / 32;
        int           i    = w.first_q + row;
        double        o[COLS], peak, total;
        float         lse;
        far_row<COLS>(args, w, i, o, peak, total);
        float scale = end_far_row(peak, total, sink_log2_of(args, w), lse) * (FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f) *
                      descale_of(args.descale_v, w.b, w.kv_head);
        if (threadIdx.x % 32 == 0)
            store_lse(args, w, i, lse);
        for (int c = 0, col = threadIdx.x % 32; c < COLS; c++, col += 32)
            if (col < args.head_dim_v)
                store_element(FA_HAS_SPLIT ? args.o_partial : args.o.data, o_place(args, w, i, col),
                              FA_HAS_SPLIT ? FA_F32 : FA_DTYPE_O, (float)o[c] * scale);
    }
}

/*
 * Inf and NaN of V were cleared from edge tiles, for 0 * NaN would reach rows that do not see the key. Here the rows that
 * do see it get it, in what was just stored. Rare, slow, and kept out of the registers of the rest.
 */
static __device__ __noinline__ void add_nonfinite(const fa_args &args, const work &w)
{
    __syncthreads();
    for (int n = threadIdx.x; n < (w.queries.end - w.first_q) * args.head_dim_v; n += THREADS) {
        int    i = w.first_q + n / args.head_dim_v, col = n % args.head_dim_v;
        float  total = 0.0f;
        fa_i64 at    = o_place(args, w, i, col);
        for (int j = w.keys.begin; j < w.keys.end; j++) {
            float value = load_element(rows_from(args, w, w.v, args.v, j).row(0), col * args.v.stride[3], FA_DTYPE);
            if (!finite(value) && sees(args, w.seq, w.slices, i, j) &&
                (!FA_HAS_DROPOUT || fa_dropout_keeps(&args.dropout, w.b * args.heads_q + w.head, i, j)))
                total += value;
        }
        void *o     = FA_HAS_SPLIT ? args.o_partial : args.o.data;
        int   dtype = FA_HAS_SPLIT ? FA_F32 : FA_DTYPE_O;
        if (!finite(total))
            store_element(o, at, dtype, load_element(o, at, dtype) + total);
    }
}

/* A block's operands in shared memory and its running state. */
struct block_state {
    score_terms terms;
    bool        cleared;    /* V had Inf or NaN in an edge tile */
    unsigned    k_shared, v_shared;
    int         tile, stage; /* the present key tile and its buffer */
    float       maximum[2 * ROWS16], sum[2 * ROWS16];
    float       o[ROWS16][COLS8][4];
};

FA_DEVICE void wait_for_k(unsigned k_tile)
{
    copy_wait<0>();
    expand_tile<FA_TILE_K, FA_HEAD_DIM>(k_tile);
    __syncthreads();
}

/* In an edge tile also clears Inf and NaN from V; true if there were any. */
template <bool CLEAR> FA_DEVICE bool wait_for_v(unsigned v_tile)
{
    copy_wait<0>();
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
    int            next  = next_tile(args, w, state.tile - 1, w.first_tile);
    float          s[ROWS16][KEYS8][4];
    if constexpr (FA_STAGES == 1) {
        wait_for_k(state.k_shared);
        copy_v(args, state.v_shared, w, state.tile, true);
        copy_commit();
        v_at = v_at.from(0);
        scores_of_tile(s, q_at.from(0), q_kept, k_at.from(0));
        state.cleared |= wait_for_v<CLEAR>(state.v_shared);
        copy_k(args, state.k_shared, w, next, next >= w.first_tile);
        copy_commit();
    } else {
        if constexpr (AS_BYTES) {
            copy_wait<0>();
            expand_tile<FA_TILE_K, FA_HEAD_DIM>(state.k_shared + state.stage * K_BYTES);
        }
        state.cleared |= wait_for_v<CLEAR>(state.v_shared + state.stage * V_BYTES);
        int other = state.stage ^ 1;
        k_at        = k_at.from(state.stage * K_BYTES);
        v_at        = v_at.from(state.stage * V_BYTES);
        state.stage = other;
        scores_of_tile(s, q_at.from(0), q_kept, k_at);
        copy_k(args, state.k_shared + other * K_BYTES, w, next, next >= w.first_tile);
        copy_v(args, state.v_shared + other * V_BYTES, w, next, next >= w.first_tile);
        copy_commit();
    }
    finish_scores<MASKED>(s, args, w, state.terms, state.tile);
    softmax_step<MASKED || FA_HAS_BIAS>(s, state.maximum, state.sum, state.o, w.unit);
    if constexpr (FA_HAS_DROPOUT)
        drop(s, args, w, state.tile);
    add_values(state.o, s, v_at);
    state.tile = next;
}

/* All key tiles, right to left (lines 6-11). */
FA_DEVICE void walk_tiles(block_state &state, const fa_args &args, const work &w, unsigned shared)
{
    rows_of q = {(const fa_element *)args.q.data + w.seq.q_entry * args.q.stride[0] +
                     (fa_i64)(w.seq.q_row + w.first_q) * args.q.stride[1] + w.head * args.q.stride[2],
                 args.q.stride[1]};
    copy_tile<FA_TILE_Q, FA_HEAD_DIM>(shared, q, 0, w.queries.end - w.queries.begin, args.head_dim, args.q.stride[3]);
    copy_commit();
    copy_k(args, state.k_shared, w, state.tile, true);
    if (FA_STAGES > 1)
        copy_v(args, state.v_shared, w, state.tile, true);
    copy_commit();

    lane_addresses<FA_HEAD_DIM, true>   q_at(shared + (threadIdx.x / 32) * ROWS16 * 16 * FA_HEAD_DIM * 2, rows_first_row(),
                                       rows_first_half());
    lane_addresses<FA_HEAD_DIM, true>   k_at(state.k_shared, halves_first_row(), halves_first_half());
    lane_addresses<FA_HEAD_DIM_V, true> v_at(state.v_shared, rows_first_row(), rows_first_half());
    q_fragments                   q_kept;
    float scale_log2 = scale_log2_of(args, w);
    if constexpr (AS_BYTES) {
        copy_wait<1>();
        expand_tile<FA_TILE_Q, FA_HEAD_DIM>(shared);
    }
    if (!MODIFIED && scale_log2 <= 0) { /* below 0 turns the order of scores round, 0 makes all equal */
        copy_wait<1>();
        multiply_tile<FA_TILE_Q, FA_HEAD_DIM>(shared, scale_log2 < 0 ? -1.0f : 0.0f);
    }
    if constexpr (Q_STAYS) {
        copy_wait<1>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int d = 0; d < DIM16; d++)
                load_matrix(q_kept[m][d], q_at.at(m, d));
    }
    while (state.tile >= w.first_tile) {
        if constexpr (FA_HAS_SLICES) {
            while (state.tile >= w.clean.begin && state.tile < w.clean.end &&
                   slices_tile(args, w.slices, w.queries, keys_of_tile(state.tile)) == 2)
                step<false>(state, args, w, q_at, q_kept, k_at, v_at);
        } else {
            while (state.tile >= w.clean.begin && state.tile < w.clean.end)
                step<false>(state, args, w, q_at, q_kept, k_at, v_at);
        }
        if (state.tile >= w.first_tile)
            step<true>(state, args, w, q_at, q_kept, k_at, v_at);
    }
    copy_wait<0>();
    if (FA_HEAD_DIM != FA_HEAD_DIM_V)
        __syncthreads(); /* a warp's staging must not cover rows of Q that another still reads */
}

extern "C" __global__ void __launch_bounds__(THREADS, FA_MIN_BLOCKS) forward_sm80(const __grid_constant__ fa_args args)
{
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ work w; /* the same for all threads: in shared memory, registers are for S and O */
    if (threadIdx.x == 0)
        w = work_of(args);
    __syncthreads();
    if (w.first_q >= w.seq.rows_q)
        return;
    unsigned    shared = shared_address(shared_memory);
    block_state state;
    state.terms    = score_terms_of(args, w.b, w.head);
    state.cleared  = false;
    state.k_shared = shared + Q_BYTES;
    state.v_shared = state.k_shared + FA_STAGES * K_BYTES;
    state.stage    = 0;
    clear(state.o);
#pragma unroll
    for (int r = 0; r < 2 * ROWS16; r++) {
        state.maximum[r] = -infinity();
        state.sum[r]     = 0.0f;
    }
    state.tile  = w.keys.begin < w.keys.end ? next_tile(args, w, (w.keys.end - 1) / FA_TILE_K, w.first_tile) : -1;
    if (state.tile >= w.first_tile)
        walk_tiles(state, args, w, shared);
    bool far = store_result(state.o, state.maximum, state.sum, w.unit, args, w, shared);
    if (!MODIFIED && __syncthreads_or(far))
        redo_far_rows(args, w);
    if (state.cleared)
        add_nonfinite(args, w);
}
