// pairs_sm90.cuh on the host: of a call's tiles, each is some block's and no other's, whatever there are of tiles, heads and blocks.
#include <cstdio>

#define FA_DEVICE static inline
#define FA_MASK_CUH // of it only this is used:
struct grid_place {
    unsigned tile, other;
};
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
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

// Those that are dealt: each once, a head's in their order, and none of another head's before those of the heads beside each other are gone.
static bool deals_in_order(unsigned tiles, unsigned heads, unsigned beside)
{
    static unsigned next[34]; // of a head: tiles that have been taken
    for (unsigned head = 0; head < heads; head++)
        next[head] = 0;
    for (unsigned n = 0; n < tiles * heads; n++) {
        grid_place at = place_of_dealt(tiles, heads, beside, n);
        if (at.other >= heads || at.tile >= tiles || at.tile != next[at.other])
            return false;
        next[at.other]++;
        unsigned others = at.other / beside < heads / beside ? at.other / beside : heads / beside - 1;
        for (unsigned head = 0; head < others * beside; head++)
            if (next[head] < tiles)
                return false;
    }
    return true;
}

int main()
{
    static const unsigned some_blocks[] = {1, 2, 3, 7, 20, 78, 132, 264};
    unsigned              failed = 0, passed = 0;
    for (unsigned tiles = 1; tiles <= 70; tiles += tiles < 20 ? 1 : 7)
        for (unsigned heads = 1; heads <= 34; heads += heads < 6 ? 1 : 4) {
            for (unsigned beside = 1; beside <= heads; beside++) {
                bool in_order = deals_in_order(tiles, heads, beside);
                if (!in_order)
                    std::printf("FAILED %u tiles of %u heads, dealt %u heads at once\n", tiles, heads, beside);
                (in_order ? passed : failed)++;
            }
            for (unsigned blocks : some_blocks) {
                static int taken[70 * 34];
                bool       all_once = deal(tiles, heads, blocks, taken);
                for (unsigned n = 0; n < tiles * heads; n++)
                    all_once = all_once && taken[n] == 1;
                if (!all_once)
                    std::printf("FAILED %u tiles of %u heads, %u blocks\n", tiles, heads, blocks);
                (all_once ? passed : failed)++;
            }
        }
    std::printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
