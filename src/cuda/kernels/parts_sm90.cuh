/*
 * forward_sm90.cu where a block has all parts of a tile of queries (WHOLE). Parts are walked from the last to the first, without a stop: the first scores of one go with P V of the last tile
 * of the one before. Where a part ends its O is folded into that of the parts before (fold_parts.cuh), which shared memory keeps, by the arithmetic of fold.cu: so a row has the bits that it has where
 * each part has a block of its own.
 */
#ifndef FA_PARTS_SM90_CUH
#define FA_PARTS_SM90_CUH

#include "fold_block_sm90.cuh"

FA_DEVICE int part_tiles_of(const work &w)
{
#if FA_HAS_SPLIT
    return same_for_all(w.part_tiles);
#else
    return 1;
#endif
}

/* The step behind the last of the part that step n is in. */
FA_DEVICE int end_of_part(const work &w, int n) { return n + same_for_all(tile_of(w, n)) % part_tiles_of(w) + 1; }

FA_DEVICE float4 *kept_place() { return (float4 *)(shared + KEPT_AT) + (threadIdx.x - 128); }

/* Rows of a part that are computed again come from this block's place for them. */
FA_DEVICE void take_far_rows(const fa_args &args, const work &w, consumer &c, float (&max)[2], float (&sum)[2], far_rows far, int part)
{
    int own = 64 * c.group + fragment_row(), keys = part_tiles_of(w) * FA_TILE_K;
    redo_far_rows(args, w, {fa_max_int(w.keys.begin, part * keys), fa_min_int(w.keys.end, (part + 1) * keys)}, w.first_row + own - fragment_row() % 16, far);
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = w.first_row + own + 8 * h;
        if (!((h ? far.lower : far.upper) >> threadIdx.x % 32 / 4 * 4 & 1) || owner_of(args, w, row).i >= w.seq.seqlen_q)
            continue;
        fa_i64       at    = own_partial_row(w, row);
        float2       stats = ((const float2 *)args.lse_partial)[at];
        const float *o     = args.o_partial + at * FA_HEAD_DIM_V + threadIdx.x % 4 * 2;
        max[h] = stats.x;
        sum[h] = stats.y;
#pragma unroll
        for (int j = 0; j < O_COUNT / 4; j++) {
            float2 two             = *(const float2 *)(o + 8 * j);
            c.o[4 * j + 2 * h]     = two.x;
            c.o[4 * j + 2 * h + 1] = two.y;
        }
    }
    __syncwarp();
}

/* The part whose last step is `step` has been walked, and O of it is there. Then O and c.folded are of all parts so far. */
FA_DEVICE void end_part(const fa_args &args, const work &w, consumer &c, const row_state &rows, int step)
{
    float    max[2], sum[2], of_all[2], of_part[2];
    unsigned far[2];
    int      part = same_for_all(tile_of(w, step)) / part_tiles_of(w);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_fold sums = sums_of_row(args, w, rows, h, far[h]);
        max[h]        = kept_maximum(sums.max, sums.sum);
        sum[h]        = sums.sum;
    }
    far_rows its = {far[0], far[1]};
    if (FA_MASK != FA_MASK_NONE && (w.spoilt >> part & 1))
        its = {its.upper >> 1, its.lower >> 1};
    if (__builtin_expect((its.upper | its.lower) & 0x11111111u, 0))
        take_far_rows(args, w, c, max, sum, its, part);
    if (__any_sync(~0u, max[0] == -infinity() || max[1] == -infinity())) /* of nothing O may be NaN */
#pragma unroll
        for (int n = 0; n < O_COUNT; n++)
            c.o[n] = max[n / 2 % 2] == -infinity() ? 0.0f : c.o[n];
    fold_sums(c.folded, max, sum, of_all, of_part);
    if (c.has_kept)
        fold_kept(kept_place(), c.o, of_all, of_part);
}

/* O is for the next part. */
FA_DEVICE void keep_part(consumer &c)
{
    keep(kept_place(), c.o);
    c.fresh = c.has_kept = true;
}

/* All parts have been folded. */
FA_DEVICE void store_folded(const fa_args &args, const work &w, consumer &c)
{
#pragma unroll
    for (int n = 0; n < O_COUNT; n++)
        c.o[n] = without_sign_of_0(c.o[n]);
    store_rows(args, w, c.o, c.folded, c.group, 1.0f);
}

#endif
