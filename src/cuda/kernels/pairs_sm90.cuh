/* In which order blocks take tiles of queries.
 * Causal tiles in pairs that are all alike, so that blocks which take every gridDim.x-th end together. Of two heads' tiles in the order of
 * length, a pair has the n-th longest and the n-th shortest. Tile `tiles - 1` is the longest. */
#ifndef FA_PAIRS_SM90_CUH
#define FA_PAIRS_SM90_CUH

#include "mask.cuh"

FA_DEVICE grid_place place_of_pair(unsigned tiles, unsigned pair, unsigned second)
{
    unsigned two = pair / tiles, n = pair % tiles;
    return {second ? n / 2 : tiles - 1 - n / 2, 2 * two + (n + second) % 2};
}

/* Rounds of whole pairs alone would leave some blocks without one in the last. So the last pairs, `first` and those after it, and a head that has no second are taken
 * apart: their n-th longest tile. That is, of two heads what is left of them, and all of the others. */
FA_DEVICE grid_place place_of_rest(unsigned tiles, unsigned heads, unsigned first, unsigned n)
{
    unsigned two = first / tiles, gone = first % tiles, half = gone / 2, others = heads - 2 * two - 2; /* of the first head [half, tiles - 1 - half - odd] is left */
    unsigned odd = gone % 2, longer = half * others;                                                  /* of the second [half + odd, tiles - 1 - half] */
    if (n < longer)
        return {tiles - 1 - n / others, 2 * two + 2 + n % others};
    n -= longer;
    if (odd) { /* the longest that is left is the second head's, the shortest the first's */
        if (n <= others)
            return {tiles - 1 - half, n == 0 ? 2 * two + 1 : 2 * two + 1 + n};
        n -= others + 1;
    }
    unsigned both = tiles - 2 * half - 2 * odd, all = others + 2; /* tiles of which all heads have one */
    if (n < both * all)
        return {tiles - 1 - half - odd - n / all, 2 * two + n % all};
    n -= both * all;
    if (odd) {
        if (n <= others)
            return {half, n == 0 ? 2 * two : 2 * two + 1 + n};
        n -= others + 1;
    }
    return {half - 1 - n / others, 2 * two + 2 + n % others};
}

/* Rounds of pairs before that; the more lengths there are, the more must be left to come out even. Of short heads no whole round is: their tiles side by side would
 * read the keys of many heads at once (decision 0047, third and sixth round), so where one or two rounds of pairs are nearly full, there is nothing else. */
FA_DEVICE unsigned rounds_of_pairs(unsigned tiles, unsigned heads)
{
    unsigned pairs = heads / 2 * tiles, rounds = pairs / gridDim.x, back = tiles < 12 ? 0 : tiles < 48 ? 1 : 2;
    if (tiles < 12 && rounds < 2)
        return heads % 2 == 0 && 16 * pairs >= 15 * (rounds + 1) * gridDim.x ? 1u << 30 : 0;
    return rounds > back ? rounds - back : 0;
}

/* Which of the rest is a block's n-th tile: one a round, in every second round from the last block to the first. */
FA_DEVICE unsigned rest_of_block(unsigned rounds_of_pairs, unsigned n)
{
    unsigned round = n - 2 * rounds_of_pairs;
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* The block's n-th tile: two are a pair, then come those of the rest. */
FA_DEVICE bool has_causal_item(unsigned tiles, unsigned heads, unsigned n)
{
    unsigned rounds = rounds_of_pairs(tiles, heads);
    return n < 2 * rounds ? n / 2 * gridDim.x + blockIdx.x < heads / 2 * tiles : rest_of_block(rounds, n) < tiles * heads - 2 * rounds * gridDim.x;
}

FA_DEVICE grid_place place_of_causal_item(unsigned tiles, unsigned heads, unsigned n)
{
    unsigned rounds = rounds_of_pairs(tiles, heads);
    if (n >= 2 * rounds)
        return place_of_rest(tiles, heads, rounds * gridDim.x, rest_of_block(rounds, n));
    return place_of_pair(tiles, n / 2 * gridDim.x + blockIdx.x, n % 2);
}

/* The n-th of all tiles where they are dealt one by one: the first of each of `beside` heads, then their next; behind their last the first of as many more heads. The last heads
 * are up to twice as many. */
FA_DEVICE grid_place place_of_dealt(unsigned tiles, unsigned heads, unsigned beside, unsigned n)
{
    unsigned first = min(n / (tiles * beside), heads / beside - 1) * beside;
    n -= first * tiles;
    if (heads - first < 2 * beside)
        beside = heads - first;
    unsigned tile = n / beside;
    return {tile, first + n - tile * beside};
}

#endif
