/* forward_sm90.cu, whose barriers and tiles it names: planner and producer where keys are in pages. K and V have a warp each. */
#ifndef FA_PAGES_SM90_CUH
#define FA_PAGES_SM90_CUH

#include "page_pieces_sm90.cuh"

/* Items are found two ahead, when values of this one fill all stages; Q of the next one comes as soon as it has a stage. */
FA_DEVICE void plan(const fa_args &args, const fa_maps &maps)
{
    unsigned tile  = 0;
    int      known = 0; /* of thread 0: items that it has found, and, being the last of them, that there is none */
    bool     more  = true;
    for (int item = -2;; item++) {
        if (threadIdx.x == 0 && (Q_STAGES > 1 ? item >= -1 : item == -1) && item + 1 < known)
            fetch_queries(args, maps, item + 1);
        __syncwarp();
        if (item >= 0) {
            const work &w = work_at(item);
            if (w.tiles < 0)
                break;
            for (int n = 0; n < w.tiles; n++, tile++)
                fetch_paged_tile<true>(args, maps.v, w, w.right - n, tile);
        }
        if (threadIdx.x == 0 && more) {
            more = find_item(args, item + 2);
            known++;
        }
        if (threadIdx.x == 0 && Q_STAGES == 1 && item >= 0 && item + 1 < known)
            fetch_queries(args, maps, item + 1);
        __syncwarp();
    }
}

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    unsigned tile = 0;
    for (unsigned item = 0;; item++) {
        barrier_wait(found(item), filled<WORKS>(item));
        const work &w = work_at(item);
        if (w.tiles < 0)
            break;
        for (int n = 0, tiles = w.tiles; n < tiles; n++, tile++)
            fetch_paged_tile<false>(args, maps.k, w, w.right - n, tile);
        release(asked(item));
    }
}

#endif
