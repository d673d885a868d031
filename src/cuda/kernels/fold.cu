/* Split keys of forward_few_sm90, where blocks have a part each: their rows into one (fold_parts.cuh), FOLD_ROWS a warp. */
#include "fold_parts.cuh"
#include "merge_parts.cuh"
#include "row_owner.cuh"

template <int COUNT> FA_DEVICE void fold_into(row_fold &all, float4 (&o)[COUNT], float max, float sum, const float4 (&part)[COUNT])
{
    float of_all, of_part;
    fold_row(all, max, sum, of_all, of_part);
#pragma unroll
    for (int c = 0; c < COUNT; c++)
        o[c] = make_float4(folded(o[c].x, part[c].x, of_all, of_part), folded(o[c].y, part[c].y, of_all, of_part),
                           folded(o[c].z, part[c].z, of_all, of_part), folded(o[c].w, part[c].w, of_all, of_part));
}

constexpr int FOLD_LANES = FA_HEAD_DIM_V <= 64 ? 16 : 32, FOLD_ROWS = 32 / FOLD_LANES; /* a warp folds so many rows at once, so many lanes each */

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) fold(const __grid_constant__ fa_args args)
{
    constexpr int AT_ONCE = 8, CHUNKS = (FA_HEAD_DIM_V + 127) / 128; /* of 128 columns */
    wait_for_launch_before();
    let_next_launch_begin();
    unsigned n = (blockIdx.x * FA_WARPS + threadIdx.x / 32) * FOLD_ROWS + threadIdx.x % 32 / FOLD_LANES; /* row of a part */
    int      tokens = tokens_of_parts(args), head = (int)(n / (unsigned)tokens), token = (int)(n % (unsigned)tokens), entry, row;
    bool     counts = false; /* a query that counts: others have no sink */
    if (head >= args.heads_q || !find_row(args, token, entry, row, counts))
        return;
    fa_i64        part_rows = (fa_i64)tokens * args.heads_q;
    int           lane = threadIdx.x % FOLD_LANES, col = lane * 4;
    int           group = args.run_parts > 1 ? 1 : FA_FOLD_GROUP, results = (args.num_splits + args.run_parts - 1) / args.run_parts; /* a result may be a group's */
    row_fold      all, of_group;
    float4        o[CHUNKS] = {}, group_o[CHUNKS] = {};
    for (int last = results - 1; last >= 0; last -= AT_ONCE) {
        float2 stats[AT_ONCE];
        float4 part[AT_ONCE][CHUNKS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            stats[i] = i <= last ? ((const float2 *)args.lse_partial)[(last - i) * part_rows + n] : make_float2(-infinity(), 0.0f);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                part[i][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (stats[i].x != -infinity() && col + 128 * c < args.head_dim_v)
                    part[i][c] = *(const float4 *)&args.o_partial[((last - i) * part_rows + n) * FA_HEAD_DIM_V + col + 128 * c];
            }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) { /* past the first result: nothing, and a group of it is folded with nothing */
            fold_into(of_group, group_o, stats[i].x, stats[i].x == -infinity() ? 0.0f : stats[i].y, part[i]);
            if (((last - i) & (group - 1)) == 0) {
                fold_into(all, o, of_group.max, of_group.sum, group_o);
                of_group = row_fold();
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    group_o[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
    }
    row_end end = end_of_row(all.max, all.sum, counts ? sink_of(args, head) * FA_LOG2E : -infinity(), !counts);
    if (lane == 0)
        store_merged_lse(args, entry, row, head, end.lse);
    fa_i64 at = row_of_o(args, entry, row, head);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        if (col + 128 * c < args.head_dim_v) {
            float4 v = o[c];
            v = end.scale == 0.0f ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                  : make_float4(without_sign_of_0(v.x) * end.scale, without_sign_of_0(v.y) * end.scale, without_sign_of_0(v.z) * end.scale, without_sign_of_0(v.w) * end.scale);
            store_columns(args, at, col + 128 * c, v);
        }
}
