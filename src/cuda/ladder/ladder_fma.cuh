/*
 * Tile products on the plain CUDA cores (float32 multiply-adds), for K2, K3 and in part K4.1: FlashAttention-2's division of
 * work. A warp owns 16 rows of the tile (split-Q) and needs no other warp's S or O. Thread `lane` of it holds of S the rows
 * lane / 16 + 2 r and the keys lane % 16 + 16 n, and of O the same rows and COLS neighbouring columns from COLS * (lane % 16).
 */
#ifndef FA_LADDER_FMA_CUH
#define FA_LADDER_FMA_CUH

#include "ladder.cuh"

constexpr int ROWS = 8, KEYS = FA_TILE_K / 16, COLS = D / 16;
constexpr int P_STRIDE = FA_TILE_K + 4; /* floats of a row of P in shared memory; + 4 against bank conflicts */
constexpr int Q_BYTES = FA_TILE_Q * D * 2, KV_BYTES = FA_TILE_K * D * 2, P_BYTES = FA_TILE_Q * P_STRIDE * 4;
static_assert(FA_TILE_Q == 16 * FA_WARPS && FA_TILE_K % 16 == 0, "a warp owns 16 rows");

struct fma_state {
    float o[ROWS][COLS];
    float max[ROWS], sum[ROWS]; /* maximum of the dot products; this thread's part of the sum of exponentials */
};

FA_DEVICE int own_row(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 16 + 2 * r; }

FA_DEVICE void clear(fma_state &state)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        state.max[r] = -infinity(), state.sum[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLS; c++)
            state.o[r][c] = 0.0f;
    }
}

/* s = Q K^T. Eight columns a step: a word read from shared memory serves ROWS or KEYS multiply-adds for each element. */
FA_DEVICE void scores_by_fma(float (&s)[ROWS][KEYS], const char *q, const char *k)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int n = 0; n < KEYS; n++)
            s[r][n] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < D / 8; chunk++) {
        uint4 key[KEYS];
#pragma unroll
        for (int n = 0; n < KEYS; n++)
            key[n] = *(const uint4 *)(k + chunk_at<FA_TILE_K>(threadIdx.x % 16 + 16 * n, chunk));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint4          row = *(const uint4 *)(q + chunk_at<FA_TILE_Q>(own_row(r), chunk));
            const unsigned a[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int n = 0; n < KEYS; n++) {
                const unsigned b[4] = {key[n].x, key[n].y, key[n].z, key[n].w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 x = unpack<FA_DTYPE>(a[e]), y = unpack<FA_DTYPE>(b[e]);
                    s[r][n] += x.x * y.x;
                    s[r][n] += x.y * y.y;
                }
            }
        }
    }
}

/* o += P V. P by rows of P_STRIDE floats; four keys a step. */
FA_DEVICE void accumulate_by_fma(float (&o)[ROWS][COLS], const float *p, const char *v)
{
    int column = COLS * (threadIdx.x % 16);
#pragma unroll 1
    for (int key = 0; key < FA_TILE_K; key += 4) {
        float weight[ROWS][4];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 four = *(const float4 *)(p + own_row(r) * P_STRIDE + key);
            weight[r][0] = four.x, weight[r][1] = four.y, weight[r][2] = four.z, weight[r][3] = four.w;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const unsigned *word = (const unsigned *)(v + chunk_at<FA_TILE_K>(key + n, column / 8) + column % 8 * 2);
#pragma unroll
            for (int c = 0; c < COLS; c += 2) {
                float2 pair = unpack<FA_DTYPE>(word[c / 2]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    o[r][c] += weight[r][n] * pair.x;
                    o[r][c + 1] += weight[r][n] * pair.y;
                }
            }
        }
    }
}

/* Over the 16 lanes of a row. */
FA_DEVICE float row_max(float x)
{
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

FA_DEVICE float row_sum(float x)
{
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

/* S becomes P, in shared memory; O and the sums are scaled to the new maximum. masked: not every row sees every key. */
FA_DEVICE void softmax_step(const fa_args &args, fma_state &state, float (&s)[ROWS][KEYS], float *p, int first_q,
                            int first_key, bool masked)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (masked) {
            int limit = key_limit(args, first_q + own_row(r)) - first_key;
#pragma unroll
            for (int n = 0; n < KEYS; n++)
                if ((int)threadIdx.x % 16 + 16 * n >= limit)
                    s[r][n] = -infinity();
        }
        float max = s[r][0];
#pragma unroll
        for (int n = 1; n < KEYS; n++)
            max = fmaxf(max, s[r][n]);
        max         = fmaxf(row_max(max), state.max[r]);
        float shift = max == -infinity() ? 0.0f : max * args.scale_log2; /* exp2(-inf + inf) is NaN */
        float alpha = exp2_fast(state.max[r] * args.scale_log2 - shift);
        state.max[r] = max;
        state.sum[r] *= alpha;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float weight = exp2_fast(s[r][n] * args.scale_log2 - shift);
            state.sum[r] += weight;
            p[own_row(r) * P_STRIDE + threadIdx.x % 16 + 16 * n] = weight;
        }
#pragma unroll
        for (int c = 0; c < COLS; c++)
            state.o[r][c] *= alpha;
    }
    __syncwarp(); /* a row's P comes from the 16 lanes that read it */
}

/* O / l and LSE to memory. */
FA_DEVICE void store_rows(const fa_args &args, const block_work &w, const fma_state &state)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int   i = w.first_q + own_row(r);
        float sum = row_sum(state.sum[r]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (i >= args.max_seqlen_q)
            continue;
        unsigned *out = (unsigned *)(row_of(args.o, w.entry, i, w.head) + COLS * (threadIdx.x % 16));
#pragma unroll
        for (int c = 0; c < COLS; c += 2)
            out[c / 2] = pack<FA_DTYPE>(state.o[r][c] * inverse, state.o[r][c + 1] * inverse);
        if (threadIdx.x % 16 == 0)
            store_lse(args, w, i, state.max[r], sum);
    }
}

#endif
