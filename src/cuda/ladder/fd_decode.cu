/*
 * FD: flash decoding, for one query and many keys.
 *
 *     keys     0 ......... n ......... 2 n ......... 3 n ...         K2 would walk them all in one block, and a query of 32 heads would
 *     blocks  |     0     |     1     |     2     |   ...            keep 32 multiprocessors busy. Here each block has a part of
 *              O_0, L_0    O_1, L_1    O_2, L_2                      them, and the library's `combine` merges what they leave:
 *
 *         L = log sum_p exp(L_p),   O = sum_p exp(L_p - L) O_p
 *
 *     a block:   row j of K, then of V, lies across D / 8 neighbouring lanes, eight columns (16 bytes) each: such a group of lanes takes
 *                keys g, g + GROUPS, g + 2 GROUPS, ..., AHEAD of them at a time, all asked for before one is used, and has an m, l and O of
 *                its own. At the end the groups are merged by the same formula, through shared memory.
 *
 * What it shows: with one query each number of K and V is used once, so nothing is worth a tile in shared memory, tensor cores would
 * have nothing to do, and what counts is how many bytes are under way. What it leaves on the table: heads that share a key head
 * read it once each, from L2 as a rule; the library makes a tile of them.
 *
 * Grid: query head (so that those who share K and V run together), part, query, batch.
 */
#include "ladder.cuh"

constexpr int LANES = D / 8, GROUPS = 32 * FA_WARPS / LANES, AHEAD = 4;
static_assert(D <= 32 * FA_WARPS, "a thread a column at the end");

struct group_state {
    float o[8], max, sum; /* max: of scores times log2(e) */
};

/* Key j's columns of this lane; zeros from `end` on. */
FA_DEVICE uint4 load_eight(const fa_u16 *head, fa_i64 row_stride, int j, int end)
{
    return j < end ? *(const uint4 *)(head + j * row_stride) : make_uint4(0, 0, 0, 0);
}

/* Lines 6 to 10 for keys first, first + GROUPS, ...: AHEAD of them. */
FA_DEVICE void take_keys(group_state &state, const float (&q)[8], const uint4 (&k)[AHEAD], const uint4 (&v)[AHEAD], int first, int end,
                         float scale_log2)
{
    float s[AHEAD], max = state.max;
#pragma unroll
    for (int n = 0; n < AHEAD; n++) { /* line 8 */
        float key[8];
        unpack_eight(key, k[n]);
        s[n] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++)
            s[n] += q[e] * key[e];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            s[n] += __shfl_xor_sync(0xFFFFFFFFu, s[n], step);
        s[n] = first + n * GROUPS < end ? s[n] * scale_log2 : -infinity();
        max  = fmaxf(max, s[n]);
    }
    float shift = max == -infinity() ? 0.0f : max, alpha = exp2_fast(state.max - shift); /* line 9; exp2(-inf + inf) is NaN */
    state.max = max;
    state.sum *= alpha;
#pragma unroll
    for (int e = 0; e < 8; e++)
        state.o[e] *= alpha;
#pragma unroll
    for (int n = 0; n < AHEAD; n++) { /* line 10 */
        float p = exp2_fast(s[n] - shift), value[8];
        unpack_eight(value, v[n]);
        state.sum += p;
#pragma unroll
        for (int e = 0; e < 8; e++)
            state.o[e] += p * value[e];
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) fd_decode(const __grid_constant__ fa_args args)
{
    __shared__ float o[GROUPS][D], max[GROUPS], sum[GROUPS];
    unsigned         n = blockIdx.x;
    int              lane = threadIdx.x % LANES, group = threadIdx.x / LANES, head = n % args.heads_q;
    n /= args.heads_q;
    int part = n % args.num_splits, i = n / args.num_splits % args.max_seqlen_q, entry = n / args.num_splits / args.max_seqlen_q;
    int begin = part * args.split_keys, end = fa_min_int(begin + args.split_keys, key_limit(args, i));

    const fa_u16 *k = row_of(args.k, entry, 0, head / args.group) + 8 * lane, *v = row_of(args.v, entry, 0, head / args.group) + 8 * lane;
    group_state   state = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, -infinity(), 0.0f};
    float         q[8];
    unpack_eight(q, *(const uint4 *)(row_of(args.q, entry, i, head) + 8 * lane));
    for (int tile = begin; tile < end; tile += AHEAD * GROUPS) { /* all lanes alike, for they exchange */
        uint4 keys[AHEAD], values[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            keys[n]   = load_eight(k, args.k.stride[1], tile + group + n * GROUPS, end);
            values[n] = load_eight(v, args.v.stride[1], tile + group + n * GROUPS, end);
        }
        take_keys(state, q, keys, values, tile + group, end, args.scale_log2);
    }

#pragma unroll
    for (int e = 0; e < 8; e++)
        o[group][8 * lane + e] = state.o[e];
    if (lane == 0)
        max[group] = state.max, sum[group] = state.sum;
    __syncthreads(); /* lines 12 and 13, of all groups together */
    int column = threadIdx.x;
    if (column >= D)
        return;
    float top = -infinity(), o_sum = 0.0f, l = 0.0f;
    for (int g = 0; g < GROUPS; g++)
        top = fmaxf(top, max[g]);
    for (int g = 0; g < GROUPS; g++) {
        float weight = top == -infinity() ? 0.0f : exp2_fast(max[g] - top);
        o_sum += weight * o[g][column];
        l += weight * sum[g];
    }
    fa_i64 tokens = (fa_i64)args.q_entries * args.q_rows, row = ((fa_i64)part * args.heads_q + head) * tokens + (fa_i64)entry * args.q_rows + i;
    args.o_partial[row * D + column] = l == 0.0f ? 0.0f : o_sum / l;
    if (column == 0)
        args.lse_partial[row] = l == 0.0f ? -infinity() : (top + log2_fast(l)) * FA_LN2;
}
