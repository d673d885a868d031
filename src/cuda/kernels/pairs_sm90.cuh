/* Causal tiles in pairs that are all alike, so that blocks which take every gridDim.x-th end together. Of two heads' tiles in the order of
 * length, a pair has the n-th longest and the n-th shortest; the last head of an odd number is paired with itself. Tile `tiles - 1` is the
 * longest. */
#ifndef FA_PAIRS_SM90_CUH
#define FA_PAIRS_SM90_CUH

#include "mask.cuh"

FA_DEVICE unsigned pairs_of(unsigned tiles, unsigned heads) { return heads / 2 * tiles + heads % 2 * ((tiles + 1) / 2); }

FA_DEVICE grid_place place_of_pair(unsigned tiles, unsigned heads, unsigned pair, unsigned second)
{
    unsigned two = pair / tiles, n = pair % tiles;
    if (two == heads / 2) /* no second head */
        return {second ? n : tiles - 1 - n, heads - 1};
    return {second ? n / 2 : tiles - 1 - n / 2, 2 * two + (n + second) % 2};
}

/* True if it is the tile in the middle of the last head, its own pair: then the first of the two has done it. */
FA_DEVICE bool is_own_pair(unsigned tiles, unsigned heads, grid_place at, unsigned second)
{
    return second == 1 && 2 * at.tile + 1 == tiles && at.other == heads - 1 && heads % 2 == 1;
}

#endif
