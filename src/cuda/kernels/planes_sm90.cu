/* Q, K and V of float32 cut into planes of float16 for forward_f32_sm90.cu (planes_sm90.cuh), with FA_VARIANT 1 dO too, for backward_f32_sm90.cu: a block a tile, first Q's, then K's,
 * then V's, then dO's. Bound by memory. Rows are aligned; those that are nobody's become zeros. */
#include "planes_sm90.cuh"
#include "rows.cuh"

constexpr int THREADS = 32 * FA_WARPS;

/* Of a row's or tile's numbers: the largest's exponent is at most LARGEST then; the smallest exponent that is told from 0; how far rows of a tile may lie apart. */
constexpr int LARGEST = 14, SMALLEST = -100, APART = 20;

struct piece {
    fa_view        view;
    int            b, head, first;
    int            begin, end; /* rows that count */
    int            cols, note; /* where the tile's exponent is */
    unsigned char *to;
    const unsigned *seeing;    /* not null: 0 for rows that do not count either */
};

/* |x| as an integer is in the order of the numbers, Inf and NaN at its end. */
FA_DEVICE unsigned size_of(float x) { return __float_as_int(x) & 0x7FFFFFFF; }
FA_DEVICE bool     is_finite_size(unsigned size) { return size < 0x7F800000u; }
FA_DEVICE int      exponent_of(unsigned size) { return fa_max_int((int)(size >> 23) - 127, SMALLEST); }
FA_DEVICE float    power_of_two(int e) { return float_of_bits((unsigned)(e + 127) << 23); }

/* Eight columns of the tile's row `row` from `col` on; zeros where there are none. */
template <class SOURCE> FA_DEVICE void load_eight(float (&x)[8], const piece &p, const SOURCE &rows, int row, int col)
{
    bool counts = p.first + row >= p.begin && p.first + row < p.end && (!p.seeing || p.seeing[row]);
#pragma unroll
    for (int e = 0; e < 8; e += 4)
        *(float4 *)(x + e) = counts && col + e < p.cols ? *(const float4 *)(rows.row(row) + col + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* Of the largest of each row: the tile's, and the smallest that is not 0. */
struct extremes {
    unsigned most, least;
};

template <int ROWS> FA_DEVICE extremes extremes_of(const unsigned *largest)
{
    extremes all = {0, ~0u};
    for (int row = threadIdx.x % 32; row < ROWS; row += 32) {
        all.most  = max(all.most, largest[row]);
        all.least = min(all.least, largest[row] - 1u); /* 0 becomes the largest */
    }
    for (int step = 16; step > 0; step /= 2) {
        all.most  = max(all.most, __shfl_xor_sync(0xFFFFFFFFu, all.most, step));
        all.least = min(all.least, __shfl_xor_sync(0xFFFFFFFFu, all.least, step));
    }
    return {all.most, all.least + 1};
}

/* A tile has an Inf or NaN, or rows too far apart. */
FA_DEVICE bool is_lost(extremes all) { return all.most > 0 && (!is_finite_size(all.most) || exponent_of(all.most) - exponent_of(all.least) > APART); }

constexpr bool FOR_BACKWARD = FA_VARIANT == 1;

/* A tile; true: it is lost. BY_ROWS: each row has an exponent of its own. largest: shared memory, a word a row. */
template <class TILE, int ROWS, int COLS, bool BY_ROWS, class SOURCE> FA_DEVICE bool cut(const piece &p, const SOURCE &source, unsigned *largest)
{
    constexpr int CHUNKS = held_columns(COLS) / 8, LANES = CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32, AT_ONCE = THREADS / LANES; /* rows */
    constexpr int HELD = BY_ROWS ? 4 : ROWS / AT_ONCE; /* of a thread's rows in registers, in which the others' maxima are waited for */
    static_assert(ROWS % (HELD * AT_ONCE) == 0, "no lane leaves the others");
    int    lane = threadIdx.x % LANES;
    float *note = (float *)(p.to + TILE::BYTES);
    bool   lost = false;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < ROWS; first += HELD * AT_ONCE) {
        float    x[HELD][8];
        unsigned most[HELD];
#pragma unroll
        for (int n = 0; n < HELD; n++)
            load_eight(x[n], p, source, first + n * AT_ONCE, 8 * lane);
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            most[n] = 0;
#pragma unroll
            for (int e = 0; e < 8; e++)
                most[n] = max(most[n], size_of(x[n][e]));
            for (int step = LANES / 2; step > 0; step /= 2)
                most[n] = max(most[n], __shfl_xor_sync(0xFFFFFFFFu, most[n], step));
            if (!BY_ROWS && lane == 0)
                largest[first + n * AT_ONCE] = most[n];
        }
        if constexpr (!BY_ROWS) {
            __syncthreads();
            extremes all = extremes_of<ROWS>(largest);
            lost         = is_lost(all);
#pragma unroll
            for (int n = 0; n < HELD; n++)
                most[n] = all.most;
        }
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int      row    = first + n * AT_ONCE;
            bool     counts = is_finite_size(most[n]) && !lost;
            int      e      = counts ? exponent_of(most[n]) - LARGEST : 0;
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 8; i += 2)
                cut_two(high[i / 2], low[i / 2], counts ? x[n][i] * power_of_two(-e) : 0.0f, counts ? x[n][i + 1] * power_of_two(-e) : 0.0f);
            unsigned char *to = p.to + lane / 8 * (ROWS * 128) + row * 128 + ((lane % 8 ^ row % 8) << 4);
            if (lane < CHUNKS) {
                *(uint4 *)to                 = make_uint4(high[0], high[1], high[2], high[3]);
                *(uint4 *)(to + TILE::PLANE) = make_uint4(low[0], low[1], low[2], low[3]);
            }
            if (BY_ROWS && lane == 0)
                note[row] = counts ? power_of_two(e) : float_of_bits(0x7FC00000u);
            if (!BY_ROWS && threadIdx.x == 0 && n == 0) {
                note[p.note]     = power_of_two(e);
                note[p.note + 1] = lost ? 1.0f : 0.0f;
            }
        }
    }
    return lost;
}

/* Rows of the tile's keys. */
FA_DEVICE auto rows_of_keys(const fa_args &args, const piece &p, const sequence &s)
{
    const float *data = (const float *)p.view.data + p.head * p.view.stride[2];
    if constexpr (FA_HAS_PAGED)
        return rows_of_pages{data, args.page_table + p.b * args.page_row_stride, p.view.stride[0], p.view.stride[1], p.first, args.kv_rows, args.kv_entries, s.rows_k};
    else
        return rows_of{data + s.kv_entry * p.view.stride[0] + (fa_i64)(s.kv_row + p.first) * p.view.stride[1], p.view.stride[1]};
}

/* A tile of Q or of dO; for the backward with each row's LSE or delta. */
template <class TILE, int COLS> FA_DEVICE bool cut_queries_of(const fa_args &args, const fa_view &view, int cols, unsigned char *to, unsigned n, unsigned *largest)
{
    piece      p    = {view};
    tile_place at   = place_of_queries(args, n % args.all_tiles_q);
    sequence   s    = sequence_at(args, at.b);
    int        head = n / args.all_tiles_q;
    p.first         = at.tile * FA_TILE_Q;
    p.end           = s.seqlen_q;
    p.cols          = cols;
    p.note          = FA_TILE_Q;
    p.to            = to + (fa_i64)n * TILE::APART;
    if (p.first < 0 || p.first >= p.end)
        return false;
    if constexpr (FOR_BACKWARD) { /* a query that sees no key, perhaps a sink, or whose scores are all -inf has no P, whatever its dO holds */
        int          i     = p.first + threadIdx.x;
        const float *lse   = (const float *)args.lse.data + s.q_entry * args.lse.stride[0] + head * args.lse.stride[1] + s.q_row * args.lse.stride[2];
        fa_i64       token = ((fa_i64)head * args.q_entries + s.q_entry) * args.q_rows + s.q_row;
        if (threadIdx.x < FA_TILE_Q) {
            float x    = i < p.end ? lse[i * args.lse.stride[2]] : -infinity();
            bool  sees = x != -infinity() && sees_a_key(args, at.b, s, i);
            ((float *)(p.to + TILE::BYTES))[threadIdx.x] = to == args.q_tiles ? (sees ? x : infinity()) : sees ? args.delta[token + i] : 0.0f;
            largest[threadIdx.x]                         = sees;
        }
        p.seeing = largest;
        __syncthreads();
    }
    const float *data = (const float *)p.view.data + head * p.view.stride[2] + s.q_entry * p.view.stride[0];
    return cut<TILE, FA_TILE_Q, COLS, !FOR_BACKWARD>(p, rows_of{data + (fa_i64)(s.q_row + p.first) * p.view.stride[1], p.view.stride[1]}, largest);
}

/* A tile of K or of V. */
template <class TILE, int COLS> FA_DEVICE bool cut_keys_of(const fa_args &args, const fa_view &view, int cols, unsigned char *to, unsigned n, unsigned *largest)
{
    piece      p  = {view};
    tile_place at = place_of_tile<FA_TILE_K>(args.cu_seqlens_k, args.all_rows_k, args.tiles_k, args.batch, n % args.all_tiles_k);
    sequence   s  = sequence_at(args, at.b);
    p.b           = at.b;
    p.head        = n / args.all_tiles_k;
    p.first       = at.tile * FA_TILE_K;
    fa_range seen = fa_keys_seen(args.window, s.diagonal, {0, s.seqlen_q}, {s.key_begin, s.seqlen_k}); /* no query sees the others, whatever they hold */
    p.begin       = seen.begin;
    p.end         = s.seqlen_q > 0 ? seen.end : 0;
    p.cols        = cols;
    p.to          = to + (fa_i64)n * TILE::APART;
    return p.first >= 0 && p.first < p.end && cut<TILE, FA_TILE_K, COLS, false>(p, rows_of_keys(args, p, s), largest);
}

extern "C" __global__ void __launch_bounds__(THREADS) planes_sm90(const __grid_constant__ fa_args args)
{
    __shared__ unsigned largest[FA_TILE_Q > FA_TILE_K ? FA_TILE_Q : FA_TILE_K]; /* of each row */
    let_next_launch_begin();
    unsigned n = blockIdx.x, of_q = args.all_tiles_q * args.heads_q, of_k = args.all_tiles_k * args.heads_k;
    if (n == 0 && threadIdx.x == 0 && args.next_item)
        *args.next_item = 0;
    bool lost = false;
    if (n < of_q)
        lost = cut_queries_of<cut_queries, FA_HEAD_DIM>(args, args.q, args.head_dim, args.q_tiles, n, largest);
    else if (n < of_q + of_k)
        lost = cut_keys_of<cut_keys, FA_HEAD_DIM>(args, args.k, args.head_dim, args.k_tiles, n - of_q, largest);
    else if (!FOR_BACKWARD || n < of_q + 2 * of_k)
        lost = cut_keys_of<cut_values, FA_HEAD_DIM_V>(args, args.v, args.head_dim_v, args.v_turned, n - of_q - of_k, largest);
    else
        lost = cut_queries_of<cut_dout, FA_HEAD_DIM_V>(args, args.dout, args.head_dim_v, args.dout_tiles, n - of_q - 2 * of_k, largest);
    if (FOR_BACKWARD && lost && threadIdx.x == 0)
        *args.lost = 1;
}
