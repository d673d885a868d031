/* forward_sm90.cu, whose barriers and tiles it names: the two warps that look at V before and beside the products, and in FP8 turn it round. */
#ifndef FA_INSPECT_SM90_CUH
#define FA_INSPECT_SM90_CUH

constexpr int INSPECTED = 16 * 32 * INSPECTORS; /* bytes at once: 16 a lane */
constexpr int INSPECTED_BARRIER = 15;            /* named: both have looked at all of a tile */
FA_DEVICE int inspected_first() { return 16 * (threadIdx.x - (128 - 32 * INSPECTORS)); }

/* Rows of V that are not the sequence's become zeros. */
FA_DEVICE void clear_other_rows(unsigned tile, fa_range rows)
{
#pragma unroll 1
    for (int offset = inspected_first(); offset < V_BYTES; offset += INSPECTED) {
        int row = FP8 ? key_of_byte(offset) : offset / 128 % FA_TILE_K;
        if (row < rows.begin || row >= rows.end)
            shared_store(tile + offset, make_uint4(0, 0, 0, 0));
    }
}

/* WHOLE: a bit for each part. */
FA_DEVICE void mark_spoilt(work &w, int tile)
{
#if FA_HAS_SPLIT
    if constexpr (WHOLE) {
        atomicOr(&w.spoilt, 1 << tile / w.part_tiles);
        return;
    }
#endif
    w.spoilt = 1;
}

/* In an edge tile P is 0 for rows that do not see a key, but 0 * NaN is NaN. That is rare, so nobody waits to hear of it: the products begin, and where there was
 * something all of the item's rows are computed again (store_rare). Keys that are nobody's may be anything, and are cleared before. */
FA_DEVICE void inspect_tile(work &w, unsigned n, int first_key, bool masked)
{
    fa_range rows   = {w.seq.key_begin - first_key, w.seq.seqlen_k - first_key};
    bool     clears = masked && (!FP8 || TURNS_V) && (rows.begin > 0 || rows.end < FA_TILE_K); /* else values_sm90.cu has done it */
    auto     look   = [&] {
        if (masked && FA_MASK != FA_MASK_NONE && holds_nonfinite<V_BYTES, INSPECTED>(v_tile(n) + inspected_first()))
            mark_spoilt(w, first_key / FA_TILE_K);
    };
    if (clears)
        clear_other_rows(v_tile(n), rows);
    if constexpr (TURNS_V) {
        look();
        if (masked)
            named_sync(INSPECTED_BARRIER, 32 * INSPECTORS);
        turn_values(v_tile(n), same_for_all(threadIdx.x / 32 % 2));
    }
    if constexpr (WHOLE) /* a part does not wait until all of the item has been looked at */
        look();
    if (TURNS_V || clears || WHOLE) {
        fence_async();
        __syncwarp();
    }
    release(v_ready(n));
    if constexpr (!TURNS_V && !WHOLE)
        look();
    if constexpr (DIRECT_V) /* for consumers do not of clean tiles, and a phase for which nobody waits is an error to synccheck */
        barrier_wait(v_ready(n), filled<V_STAGES>(n));
    release(v_empty(n));
}

FA_DEVICE void inspect()
{
    unsigned tile = 0;
    for (unsigned item = 0;; item++) {
        barrier_wait(found(item), filled<WORKS>(item));
        work &w = work_at(item);
        if (w.tiles < 0)
            break;
        for (int n = 0; n < w.tiles; n++, tile++) {
            barrier_wait(v_full(tile), filled<V_STAGES>(tile));
            inspect_tile(w, tile, tile_of(w, n) * FA_TILE_K, is_masked(w, n));
        }
        release(inspected(item));
    }
}

#endif
