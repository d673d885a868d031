// pairs_sm90.cuh on the host: of a causal call's tiles, each is some block's and no other's, whatever there are of tiles, heads and blocks.
#include <cstdio>

#define FA_DEVICE static inline
#define FA_MASK_CUH // of it only this is used:
struct grid_place {
    unsigned tile, other;
};
static struct {
    unsigned x;
} gridDim, blockIdx;
#include "cuda/kernels/pairs_sm90.cuh"

// How often each tile is taken. False: a place that is none, or a walk that does not end.
static bool deal(unsigned tiles, unsigned heads, unsigned blocks, int *taken)
{
    gridDim.x = blocks;
    for (unsigned n = 0; n < tiles * heads; n++)
        taken[n] = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (unsigned n = 0; has_causal_item(tiles, heads, n); n++) {
            grid_place at = place_of_causal_item(tiles, heads, n);
            if (at.tile >= tiles || at.other >= heads || n > tiles * heads)
                return false;
            taken[at.other * tiles + at.tile]++;
        }
    return true;
}

int main()
{
    static const unsigned some_blocks[] = {1, 2, 3, 7, 20, 78, 132, 264};
    unsigned              failed = 0, passed = 0;
    for (unsigned tiles = 1; tiles <= 70; tiles += tiles < 20 ? 1 : 7)
        for (unsigned heads = 1; heads <= 34; heads += heads < 6 ? 1 : 4)
            for (unsigned blocks : some_blocks) {
                static int taken[70 * 34];
                bool       all_once = deal(tiles, heads, blocks, taken);
                for (unsigned n = 0; n < tiles * heads; n++)
                    all_once = all_once && taken[n] == 1;
                if (!all_once)
                    std::printf("FAILED %u tiles of %u heads, %u blocks\n", tiles, heads, blocks);
                (all_once ? passed : failed)++;
            }
    std::printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
