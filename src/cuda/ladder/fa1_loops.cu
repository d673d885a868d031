/*
 * FlashAttention-1: tiles and the online softmax, with that paper's order of loops and of warps.
 *
 *     for each tile j of keys:                         K_j, V_j to shared memory
 *         for each tile i of queries of this block:    Q_i, O_i, m_i, l_i from memory
 *             S = scale * Q_i K_j^T, and its row maxima and sums
 *             O_i = (l_i e^(m_i - m) O_i + e^(m_S - m) P V_j) / l      back to memory, with the new m_i, l_i
 *
 * What it shows: no S in memory, so the memory is linear in seqlen. But O, m, l travel to memory and back for every pair of
 * tiles, and are divided by l each time. The warps share a tile of queries and split the keys (split-K): each holds a
 * part of every row, so maxima, sums and all of O go through shared memory, with four barriers a step.
 *
 * Rows of queries are 16 to a tile; a head's tiles are dealt to args.num_splits blocks, as later versions of the original
 * did, or a few heads would leave most multiprocessors idle.
 */
#include "ladder.cuh"

constexpr int ROWS = 4, KEYS = FA_TILE_K / FA_WARPS / 8; /* of S a thread holds: rows 4 (lane / 8) + r, keys lane % 8 + 8 n */
constexpr int PANELS = D / 64;                           /* of O: rows likewise, chunks lane % 8 of each panel */
constexpr int TILE_BYTES = FA_TILE_K * D * 2, Q_BYTES = FA_TILE_Q * D * 2, PART_FLOATS = FA_TILE_Q * D;
static_assert(FA_TILE_Q == 16 && KEYS * 8 * FA_WARPS == FA_TILE_K && 32 * FA_WARPS == 8 * FA_TILE_Q, "one thread's share");

struct statistics {
    float max[FA_WARPS][FA_TILE_Q], sum[FA_WARPS][FA_TILE_Q]; /* of each warp's keys */
};

extern "C" __constant__ int fa_shared_bytes = 2 * TILE_BYTES + Q_BYTES + 4 * FA_WARPS * PART_FLOATS + sizeof(statistics);

/* Dot products of ROWS queries and KEYS keys. */
FA_DEVICE void dot_products(float (&s)[ROWS][KEYS], const char *q, const char *k, int first_row, int first_key)
{
    for (int chunk = 0; chunk < D / 8; chunk++) {
        uint4 rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            rows[r] = *(const uint4 *)(q + chunk_at<FA_TILE_Q>(first_row + r, chunk));
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            uint4          key = *(const uint4 *)(k + chunk_at<FA_TILE_K>(first_key + 8 * n, chunk));
            const unsigned b[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const unsigned a[4] = {rows[r].x, rows[r].y, rows[r].z, rows[r].w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 x = unpack<FA_DTYPE>(a[e]), y = unpack<FA_DTYPE>(b[e]);
                    s[r][n] += x.x * y.x + x.y * y.y;
                }
            }
        }
    }
}

/* This warp's part of P V. p: [FA_TILE_Q][8 KEYS], this warp's keys; v: from its first key. */
FA_DEVICE void part_of_output(float (&o)[ROWS][PANELS][8], const float *p, const char *v, int first_row, int first_key)
{
    int chunk = threadIdx.x % 8;
    for (int key = 0; key < 8 * KEYS; key++) {
        float value[PANELS][8];
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            uint4          packed = *(const uint4 *)(v + chunk_at<FA_TILE_K>(first_key + key, 8 * panel + chunk));
            const unsigned word[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float2 pair = unpack<FA_DTYPE>(word[e]);
                value[panel][2 * e] = pair.x, value[panel][2 * e + 1] = pair.y;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float weight = p[(first_row + r) * (8 * KEYS) + key];
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    o[r][panel][e] += weight * value[panel][e];
        }
    }
}

/* Over the eight lanes of a row. */
FA_DEVICE float row_max(float x)
{
    for (int step = 4; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

FA_DEVICE float row_sum(float x)
{
    for (int step = 4; step > 0; step /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

/* P of this warp's keys relative to the maximum of its own keys, which with their sum goes to `stat`. */
FA_DEVICE void softmax_part(const fa_args &args, float (&s)[ROWS][KEYS], float *p, statistics &stat, int first_q,
                            int first_key)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int   row = 4 * (lane / 8) + r, limit = key_limit(args, first_q + row);
        float max = -infinity(), sum = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            s[r][n] = first_key + 8 * n < limit ? s[r][n] * args.scale_log2 : -infinity();
            max     = fmaxf(max, s[r][n]);
        }
        max         = row_max(max);
        float shift = max == -infinity() ? 0.0f : max; /* exp2(-inf + inf) is NaN */
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float weight = exp2_fast(s[r][n] - shift);
            sum += weight;
            p[row * (8 * KEYS) + lane % 8 + 8 * n] = weight;
        }
        sum = row_sum(sum);
        if (lane % 8 == 0)
            stat.max[warp][row] = max, stat.sum[warp][row] = sum;
    }
}

/* O_i, m_i, l_i in memory meet the warps' parts. A thread has D / 8 columns of row threadIdx.x / 8. */
FA_DEVICE void merge_parts(const fa_args &args, const statistics &stat, const float *parts, fa_i64 row_index, bool in_bounds)
{
    int    row = threadIdx.x / 8, first_column = threadIdx.x % 8 * (D / 8);
    fa_i64 rows = (fa_i64)args.batch * args.heads_q * args.max_seqlen_q;
    float *m_at = args.lse_partial + row_index, *l_at = m_at + rows, *o_at = args.o_partial + row_index * D + first_column;
    float  m = in_bounds ? *m_at : -infinity(), l = in_bounds ? *l_at : 0.0f, max = m, weight[FA_WARPS], sum;
#pragma unroll
    for (int w = 0; w < FA_WARPS; w++)
        max = fmaxf(max, stat.max[w][row]);
    __syncwarp(); /* all eight threads of a row have read its m and l */
    if (!in_bounds || max == -infinity()) /* past the end, or nothing seen so far */
        return;
    float kept = l * exp2_fast(m - max);
    sum        = kept;
#pragma unroll
    for (int w = 0; w < FA_WARPS; w++) {
        weight[w] = exp2_fast(stat.max[w][row] - max);
        sum += weight[w] * stat.sum[w][row];
    }
    float inverse = 1.0f / sum;
#pragma unroll
    for (int c = 0; c < D / 8; c += 4) {
        float4 o = *(const float4 *)(o_at + c);
        o.x *= kept, o.y *= kept, o.z *= kept, o.w *= kept;
#pragma unroll
        for (int w = 0; w < FA_WARPS; w++) {
            float4 part = *(const float4 *)(parts + w * PART_FLOATS + row * D + first_column + c);
            o.x += weight[w] * part.x, o.y += weight[w] * part.y, o.z += weight[w] * part.z, o.w += weight[w] * part.w;
        }
        *(float4 *)(o_at + c) = make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse);
    }
    if (first_column == 0)
        *m_at = max, *l_at = sum;
}

/* One inner step: queries [first_q, first_q + 16) against the keys of the tile that is in shared memory. */
FA_DEVICE void step(const fa_args &args, int entry, int head, int first_q, int first_key, fa_i64 head_row)
{
    char       *k = shared, *v = k + TILE_BYTES, *q = v + TILE_BYTES;
    float      *parts = (float *)(q + Q_BYTES);
    statistics &stat  = *(statistics *)(parts + FA_WARPS * PART_FLOATS);
    int         warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_key = warp * 8 * KEYS;
    float      *own = parts + warp * PART_FLOATS; /* P of this warp's keys, then its part of O */
    float       s[ROWS][KEYS] = {}, o[ROWS][PANELS][8] = {};
    copy_tile<FA_TILE_Q>(q, args.q, entry, head, first_q, args.max_seqlen_q);
    __syncthreads();
    dot_products(s, q, k, 4 * (lane / 8), warp_key + lane % 8);
    softmax_part(args, s, own, stat, first_q, first_key + warp_key + lane % 8);
    __syncwarp();
    part_of_output(o, own, v, 4 * (lane / 8), warp_key);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
            for (int e = 0; e < 8; e += 4)
                *(float4 *)(own + (4 * (lane / 8) + r) * D + 64 * panel + 8 * (lane % 8) + e) =
                    make_float4(o[r][panel][e], o[r][panel][e + 1], o[r][panel][e + 2], o[r][panel][e + 3]);
    __syncthreads();
    int i = first_q + threadIdx.x / 8;
    merge_parts(args, stat, parts, head_row + i, i < args.max_seqlen_q);
    __syncthreads();
}

/* Before the first tile: O = 0, m = -inf, l = 0. After the last: O in its dtype, and LSE. */
FA_DEVICE void begin_rows(const fa_args &args, int first_q, fa_i64 head_row)
{
    fa_i64 rows = (fa_i64)args.batch * args.heads_q * args.max_seqlen_q;
    int    i = first_q + threadIdx.x / 8;
    if (i >= args.max_seqlen_q)
        return;
    for (int c = threadIdx.x % 8; c < D; c += 8)
        args.o_partial[(head_row + i) * D + c] = 0.0f;
    if (threadIdx.x % 8 == 0)
        args.lse_partial[head_row + i] = -infinity(), args.lse_partial[rows + head_row + i] = 0.0f;
}

FA_DEVICE void end_rows(const fa_args &args, int entry, int head, int first_q, fa_i64 head_row)
{
    fa_i64 rows = (fa_i64)args.batch * args.heads_q * args.max_seqlen_q;
    int    i = first_q + threadIdx.x / 8;
    if (i >= args.max_seqlen_q)
        return;
    for (int c = threadIdx.x % 8 * 2; c < D; c += 16)
        *(unsigned *)(row_of(args.o, entry, i, head) + c) =
            pack<FA_DTYPE>(args.o_partial[(head_row + i) * D + c], args.o_partial[(head_row + i) * D + c + 1]);
    if (threadIdx.x % 8 == 0 && args.lse.data) {
        float m = args.lse_partial[head_row + i], l = args.lse_partial[rows + head_row + i];
        ((float *)args.lse.data)[entry * args.lse.stride[0] + head * args.lse.stride[1] + i * args.lse.stride[2]] =
            l == 0.0f ? -infinity() : (m + log2_fast(l)) * FA_LN2;
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS) fa1_loops(const __grid_constant__ fa_args args)
{
    unsigned n = blockIdx.x;
    int      part = n % args.num_splits;
    n /= args.num_splits;
    int    head = n % args.heads_q, entry = n / args.heads_q, stride_q = args.num_splits * FA_TILE_Q;
    fa_i64 head_row = ((fa_i64)entry * args.heads_q + head) * args.max_seqlen_q;
    for (int i = part * FA_TILE_Q; i < args.max_seqlen_q; i += stride_q)
        begin_rows(args, i, head_row);
    int seen = key_limit(args, args.max_seqlen_q - 1);
    for (int j = 0; j < seen; j += FA_TILE_K) {
        __syncthreads();
        copy_tile<FA_TILE_K>(shared, args.k, entry, head / args.group, j, args.max_seqlen_k);
        copy_tile<FA_TILE_K>(shared + TILE_BYTES, args.v, entry, head / args.group, j, args.max_seqlen_k);
        for (int i = part * FA_TILE_Q; i < args.max_seqlen_q; i += stride_q)
            if (j < key_limit(args, fa_min_int(i + FA_TILE_Q, args.max_seqlen_q) - 1)) /* else all is masked */
                step(args, entry, head, i, j, head_row);
    }
    __syncthreads();
    for (int i = part * FA_TILE_Q; i < args.max_seqlen_q; i += stride_q)
        end_rows(args, entry, head, i, head_row);
}
