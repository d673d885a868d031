/* Tiles of sequences that have lengths of their own, numbered over all sequences of a head. Packed ones (cu_seqlens) have tile cu_seqlens[b] / TILE + b
 * and as many of those that follow as their rows need, which no other sequence has; a tile may be nobody's. Others have equally many. */
#ifndef FA_PACKED_SM90_CUH
#define FA_PACKED_SM90_CUH

#include "mask.cuh"

struct tile_place {
    int b, tile; /* the sequence's tile; below 0 or past its rows: none */
};

/* tiles: of a sequence that is not packed; rows: of all entries, each of which is `each` rows of a tile. */
template <int TILE> FA_DEVICE int first_tile(const int *cu_seqlens, int rows, int tiles, int b, int each = 1)
{
    return cu_seqlens ? clamp_int(cu_seqlens[b], 0, rows) * each / TILE + b : b * tiles;
}

template <int TILE> FA_DEVICE tile_place place_of_tile(const int *cu_seqlens, int rows, int tiles, int batch, int n, int each = 1)
{
    int b = 0;
    if (!cu_seqlens)
        b = n / tiles;
    else
        for (int end = batch; end - b > 1;) {
            int middle = (b + end) / 2;
            if (first_tile<TILE>(cu_seqlens, rows, tiles, middle, each) <= n)
                b = middle;
            else
                end = middle;
        }
    return {b, n - first_tile<TILE>(cu_seqlens, rows, tiles, b, each)};
}

FA_DEVICE tile_place place_of_queries(const fa_args &args, int n, int each = 1)
{
    return place_of_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, args.batch, n, each);
}

/* By the window and, where there are slices, by one of them. */
FA_DEVICE bool sees_a_key(const fa_args &args, int b, const sequence &s, int i)
{
    fa_range seen = fa_keys_seen(args.window, s.diagonal, {i, i + 1}, {s.key_begin, s.seqlen_k});
    if (args.num_slices == 0)
        return seen.begin < seen.end;
    fa_range own = slices_of(args, b);
    for (int n = own.begin; n < own.end; n++) {
        fa_slice of   = args.slices[n];
        fa_range keys = fa_keys_of_slice(of.q_begin, of.q_end, of.k_begin, of.k_end, of.kind, i);
        if (fa_max_int(seen.begin, keys.begin) < fa_min_int(seen.end, keys.end))
            return true;
    }
    return false;
}

#endif
