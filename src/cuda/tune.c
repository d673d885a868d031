#include "cuda/cuda.h"

const fa_kernel_names fa_kernels[FA_NUM_KERNELS] = {
#define X(enumerator, name, file) [FA_KERNEL_##enumerator] = {name, file},
    FA_KERNELS(X)
#undef X
};

/*
 * The first row that fits is taken, so the special stand before the general. Shared memory of a block is 99 KB on 8.6,
 * 8.9 and 12.0, 163 KB on 8.0, 227 KB on 9.0 and 10.0.
 */
const fa_tune_row fa_tune_rows[] = {
    /* arch   kernel                dtypes       head  masks     only      few tile_q tile_k warps stages blocks variant
       spill why */
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 64, 64, 16, 8, 1, 0, 0,
     "a head's queries and keys are one tile each: memory is what bounds them (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 128, 128, 16, 3, 1, 0, 0,
     "likewise; a stage more asks too far ahead and is 3% slower (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 80, 20, 6, 1, 1, 0,
     "few keys, as those of a text for an image: all are one step, and four consumers hide each other's waits (decision 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 128, 20, 4, 1, 1, 8,
     "likewise; a word is spilled, and it is 8% faster than three consumers (decision 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 256, 256, 16, 2, 1, 0, 0, "likewise (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 64, 64, 16, 4, 1, 0, 0, "likewise (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 128, 128, 16, 2, 1, 0, 0,
     "likewise; of 256 there is memory for one stage, which is slower (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 80, 20, 2, 1, 1, 0, "likewise (decision 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 128, 16, 2, 1, 1, 0, "likewise, with three, for registers (decision 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 192, 128, 16, 2, 1, 0, 0,
     "bias of 16 bits without dropout: two stages of it fit beside K and V (decision 0083)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 128, 128, 12, 2, 1, 0, 0,
     "bias: two stages of it, so one of Q; of float32 one (decision 0083)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 128, 64, 12, 2, 1, 0, 0, "bias: likewise (decision 0083)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_WINDOW, FA_FOR_CUT_TMA, 0, 128, 64, 12, 4, 2, 1, 16,
     "slices that cut many tiles: smaller ones waste less, and two blocks a multiprocessor hide each other's waits (decision 0087)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_SOFTCAP_TMA, 0, 128, 64, 12, 4, 2, 1, 0,
     "softcap: exponentials bound it; 192x128 spills and is as fast but for long calls without a mask, 6% (decision 0061)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_CAUSAL, FA_FOR_SHORT_TMA, 2048, 128, 64, 12, 4, 2, 1, 16,
     "short and causal: two blocks a multiprocessor hide each other's starts and ends; 64 keys waste less of the diagonal; pages' planner spills, once an item (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_SHORT_TMA, 320, 128, 64, 12, 4, 2, 1, 16,
     "shorter: likewise; 192 rows are a tile and a third of 256 (decision 0088)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_FITTING_TMA, 109, 128, 64, 12, 4, 2, 1, 16,
     "larger tiles would be empty by a twelfth more: likewise (decision 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_TMA, 1024, 192, 128, 16, 3, 1, 1, 60,
     "short: two stages of Q, so that the walk does not stop between tiles of queries; dropout spills (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_TMA, 0, 192, 128, 16, 3, 1, 0, 0,
     "three consumers of 64 rows share each tile of K and V; a third stage helps short ones (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_WINDOW, FA_FOR_FITTING_TMA, 107, 128, 64, 12, 4, 2, 1, 16,
     "narrow: smaller tiles waste less at a window's ends (decision 0104)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 64, FA_ON_CAUSAL | FA_ON_WINDOW, FA_FOR_TMA, 0, 192, 128, 16, 2, 1, 0, 0,
     "three consumers of 64 rows share each tile of K and V (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 96, FA_ON_NONE, FA_FOR_FITTING_TMA, 87, 192, 112, 16, 2, 1, 0, 40,
     "three consumers of 64 rows, and keys for which S fits beside P, unless more is empty than that gains; dropout spills (decisions 0075 and 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 96, FA_ON_CAUSAL, FA_FOR_LONG_TMA, 4096, 192, 128, 16, 2, 1, 0, 0,
     "longer and causal: three consumers, one step after the other (decision 0075)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_SHORT_TMA, 224, 128, 64, 12, 4, 1, 1, 16,
     "short: keys past the last are masked in a tile of 64, not of 128 (decision 0089)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_FITTING_TMA, 104, 128, 64, 12, 4, 1, 1, 16,
     "half of the last 128 keys would be nobody's (decisions 0089 and 0091)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 128, FA_ON_WINDOW, FA_FOR_FITTING_TMA, 104, 128, 64, 12, 4, 1, 1, 16,
     "likewise, at both ends of a window (decision 0104)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_TMA, 0, 128, 128, 12, 2, 1, 1, 0,
     "two consumers; two stages of Q, so that the walk does not stop between tiles of queries (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 192, FA_ON_ANY, FA_FOR_NARROW_V_TMA, 0, 128, 128, 12, 2, 1, 0, 0,
     "DeepSeek's 192 and 128: registers as at 128, memory for one stage of Q (decision 0075)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 192, FA_ON_CAUSAL, FA_FOR_SHORT_TMA, 512, 128, 64, 12, 2, 1, 0, 0,
     "short and causal: 64 keys waste less of the diagonal (decision 0075)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 192, FA_ON_ANY, FA_FOR_TMA, 0, 128, 96, 12, 2, 1, 0, 0,
     "two consumers; 112 keys fit in two stages, and are 2 to 6% slower (decision 0075)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_TMA, 0, 128, 64, 12, 2, 1, 0, 0,
     "two consumers; 64 keys end with the rows of a consumer, 80 are no faster (decision 0047)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 64, FA_ON_CAUSAL, FA_FOR_SHORT_TMA, 2048, 128, 64, 12, 5, 2, 1, 0,
     "FP8, short and causal: as in 16 bits, and a stage more (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 64, FA_ON_ANY, FA_FOR_TMA, 0, 192, 128, 16, 3, 1, 0, 0,
     "FP8: exponentials bound it; three consumers of 64 rows (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 128, FA_ON_NONE, FA_FOR_SHORT_TMA, 1024, 128, 128, 12, 4, 1, 0, 0,
     "FP8, short: 128 keys waste less at the ends (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 128, FA_ON_ANY, FA_FOR_SHORT_TMA, 1024, 128, 128, 12, 3, 1, 1, 0,
     "FP8, short and masked: likewise, with two stages of Q (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 128, FA_ON_NONE, FA_FOR_LONG_TMA, 1024, 192, 128, 16, 3, 1, 0, 32,
     "FP8, long: three consumers hide each other's waits; producers spill a few bytes (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 128, FA_ON_CAUSAL, FA_FOR_LONG_TMA, 2048, 192, 128, 16, 3, 1, 0, 32,
     "FP8, longer and causal: likewise (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 128, FA_ON_ANY, FA_FOR_TMA, 0, 128, 192, 12, 2, 1, 1, 0,
     "FP8: 192 keys a step, for P takes half the registers (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 256, FA_ON_ANY, FA_FOR_LONG_TMA, 4096, 128, 64, 12, 3, 1, 2, 0,
     "FP8, long: V turned round once, ahead of it (decision 0059)"},
    {90, 90, FA_KERNEL_FORWARD_SM90, FA_IN_F8, 256, FA_ON_ANY, FA_FOR_TMA, 0, 128, 64, 12, 3, 1, 0, 0,
     "FP8: 64 keys in three stages, beside O in 24 bits (decision 0059)"},
    /* What is spilled is for the end of a part, and for far rows, which have a place on the stack; not in the loop. */
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 64, 128, 8, 3, 2, 2, 16,
     "few queries: the heads of a key head in one tile, two blocks a multiprocessor (decision 0074)"},
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 128, 128, 12, 6, 1, 2, 16,
     "few queries, more rows: two consumers share each tile of keys (decision 0074)"},
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 64, 64, 8, 3, 2, 2, 16,
     "few queries: the heads of a key head in one tile, two blocks a multiprocessor (decision 0074)"},
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 128, 64, 12, 6, 1, 2, 16,
     "few queries, more rows: two consumers share each tile of keys, in steps of the row above (decision 0100)"},
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 64, 64, 8, 3, 1, 2, 24,
     "few queries: the heads of a key head in one tile (decision 0074)"},
    {90, 90, FA_KERNEL_FORWARD_FEW_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_FEW_TMA, 0, 128, 64, 12, 2, 1, 2, 16,
     "few queries, more rows: two consumers share each tile of keys (decision 0074)"},
    {90, 90, FA_KERNEL_FORWARD_LATENT_SM90, FA_IN_16_BIT, 576, FA_ON_ANY, FA_FOR_LATENT, 0, 64, 48, 16, 3, 1, 2, 80,
     "V is K's first columns: a warpgroup makes S and P of 64 rows, two have a half of O's columns each; three slots of 48 keys (decision 0070); none of what spills is in a clean tile (0081)"},
    {90, 90, FA_KERNEL_FORWARD_WIDE_SM90, FA_IN_16_BIT, 512, FA_ON_ANY, FA_FOR_WIDE, 0, 64, 48, 16, 2, 1, 2, 128,
     "likewise with V elsewhere: two slots of K and two of V; most spills with pages, in pairs (decision 0106)"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_FEW, 16, 16, 128, 4, 3, 2, 9, 0,
     "few queries: the heads of a key head in one tile, four warps with keys of their own, two tiles on their way, two blocks a multiprocessor (decision 0058)"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_FEW, 16, 16, 128, 4, 2, 3, 9, 0,
     "few queries: as on 9.0 in less shared memory (decision 0058)"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_FEW, 16, 16, 128, 4, 2, 3, 9, 0,
     "few queries: as on 9.0 in less shared memory (decision 0058)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_FEW, 64, 64, 128, 4, 2, 2, 5, 640,
     "few queries: the heads of a key head in tiles of 64, two warps a row (decision 0058); a bias spills, and is five times as fast as with a tile a head (0083)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_PLAIN, 64, 64, 64, 4, 2, 4, 1, 16,
     "few queries: one tile of 64 with Q in registers, four blocks a multiprocessor"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_CAUSAL | FA_ON_WINDOW, FA_FOR_PLAIN, 1024, 64, 64, 4, 2, 4, 1, 16,
     "short and masked: 64 rows waste less of the diagonal than 128 (decision 0042)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_PLAIN, 0, 128, 128, 4, 1, 2, 0, 64,
     "head_dim 64: four warps of 32 rows, and 128 keys, which halve the steps (decision 0042)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_ALIGNED, 0, 128, 64, 4, 2, 1, 0, 128,
     "head_dim 64 with options: four warps of 32 rows; 128 keys would spill (decision 0041); with a bias 20 bytes are on 9.0, 118 on 12.0"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 64, FA_ON_ANY, FA_FOR_ANY, 0, 64, 64, 4, 2, 1, 0, 0,
     "head_dim 64, rows not aligned: loads by element take registers, so four warps of 16 rows"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_FEW, 16, 16, 64, 4, 3, 2, 9, 0,
     "few queries: the heads of a key head in one tile, four warps with keys of their own, two tiles on their way, two blocks a multiprocessor (decision 0058)"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_FEW, 16, 16, 64, 4, 2, 3, 9, 0,
     "few queries: as on 9.0 in less shared memory (decision 0058)"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_FEW, 16, 16, 64, 4, 2, 3, 9, 0,
     "few queries: as on 9.0 in less shared memory (decision 0058)"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_NONE | FA_ON_WINDOW, FA_FOR_FEW, 64, 64, 64, 4, 3, 2, 4, 128,
     "few queries: two warps a row, two tiles of 64 keys on their way in 112 KB of shared memory (decision 0058); a bias spills"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_CAUSAL, FA_FOR_FEW, 64, 64, 32, 4, 5, 2, 4, 0,
     "few queries, causal: 64 keys would spill (decision 0058)"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_FEW, 64, 64, 32, 4, 4, 2, 4, 0,
     "few queries: two warps a row in 80 KB of shared memory (decision 0058)"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_FEW, 64, 64, 32, 4, 4, 2, 4, 0,
     "few queries: two warps a row in 80 KB of shared memory (decision 0058)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_PLAIN, 64, 64, 64, 4, 2, 2, 1, 0,
     "few queries: one tile of 64 in 80 KB of shared memory"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_PLAIN, 0, 128, 64, 4, 1, 2, 0, 128,
     "head_dim 128: four warps of 32 rows; 1.3 times as fast as eight of 16 in spite of a few spills (decision 0042)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 128, FA_ON_ANY, FA_FOR_ANY, 0, 128, 64, 8, 2, 1, 0, 0,
     "head_dim 128 with options: eight warps of 16 rows, for all options fit their registers"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_FEW, 16, 16, 64, 4, 3, 1, 8, 0,
     "few queries: four warps with keys of their own, two tiles of 64 on their way in 217 KB of shared memory (decision 0058)"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_FEW, 16, 16, 32, 2, 2, 1, 4, 0,
     "few queries: two warps with keys of their own in 72 KB of shared memory (decision 0058)"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_FEW, 16, 16, 32, 2, 2, 1, 4, 0,
     "few queries: two warps with keys of their own in 72 KB of shared memory (decision 0058)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_FEW, 64, 64, 32, 4, 2, 1, 2, 160,
     "few queries: the heads of a key head in tiles of 64 in 96 KB of shared memory (decision 0058); on 12.0 causal 158 bytes are spilled"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_PLAIN, 0, 64, 64, 4, 1, 1, 0, 0,
     "head_dim 256: 96 KB of shared memory, so two blocks a multiprocessor where there are 227 KB (decision 0042)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 256, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 4, 2, 1, 0, 160,
     "head_dim 256 with options: 32 keys fit the registers that O leaves; only rows not aligned, slow anyway, spill"},

    /* head dims above 256, of Q, of V or of both: two warps share rows and keys, each with half of the columns of O, in float32 four (decision 0069) */
    {80, 80, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_FEW, 64, 64, 16, 8, 2, 1, 2, 0,
     "few queries: the heads of a key head in tiles of 64 in 144 KB of shared memory"},
    {86, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_FEW, 64, 48, 16, 6, 1, 1, 2, 0,
     "few queries: the heads of a key head in tiles of 48 in 90 KB of shared memory"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_FEW, 64, 64, 32, 8, 2, 1, 2, 64,
     "few queries: the heads of a key head in tiles of 64 in 216 KB of shared memory"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_FEW, 64, 48, 16, 6, 1, 1, 2, 0,
     "few queries: the heads of a key head in tiles of 48 in 90 KB of shared memory"},
    {80, 80, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 8, 1, 1, 0, 0, "144 KB of shared memory"},
    {86, 89, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_ANY, 0, 48, 16, 6, 1, 1, 0, 0, "90 KB of shared memory"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 8, 2, 1, 0, 0, "216 KB of shared memory"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_16_OR_8, 576, FA_ON_ANY, FA_FOR_ANY, 0, 48, 16, 6, 1, 1, 0, 0, "90 KB of shared memory"},

    {90, 90, FA_KERNEL_BACKWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 128, 128, 12, 2, 1, 0, 0,
     "a sequence's queries and keys are one tile each: all three gradients in one launch (decision 0088)"},
    {90, 90, FA_KERNEL_BACKWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 128, 12, 2, 1, 1, 0,
     "few keys for many queries: each of their tiles is a step; shares of the steps where key heads are few (decision 0092)"},
    {90, 90, FA_KERNEL_BACKWARD_SHORT_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 256, 256, 12, 1, 1, 0, 0,
     "likewise, in two tiles of keys; dQ stays in registers (decision 0088)"},
    {90, 90, FA_KERNEL_BACKWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_FEW_KEYS, 0, 128, 128, 12, 1, 1, 1, 0, "likewise (decision 0092)"},
    {90, 90, FA_KERNEL_BACKWARD_SHORT_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ONE_TILE, 0, 128, 128, 12, 1, 1, 0, 0,
     "a sequence's queries and keys are one tile each; memory for one stage (decision 0088)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 128, 128, 12, 2, 1, 0, 408,
     "bias: a stage of it in place of a third of Q (decision 0083)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 96, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 64, 128, 12, 2, 1, 0, 448, "bias: likewise (decision 0083)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 64, 128, 12, 2, 1, 0, 336, "bias: likewise (decision 0083)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_BIAS_TMA, 0, 64, 80, 12, 2, 1, 0, 480,
     "bias: a stage of it, so dQ leaves in smaller pieces (decision 0083)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_TMA, 0, 128, 128, 12, 2, 1, 0, 468,
     "two consumers of 64 keys; dQ by TMA; the producer spills, and under a softcap the consumers a dozen registers (decision 0055)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 96, FA_ON_NONE, FA_FOR_LONG_TMA, 512, 80, 128, 12, 2, 1, 0, 304, "as at 128"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 96, FA_ON_CAUSAL, FA_FOR_LONG_TMA, 2048, 80, 128, 12, 2, 1, 0, 304, "as at 128"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 96, FA_ON_ANY, FA_FOR_TMA, 0, 64, 128, 12, 2, 1, 0, 268, "as at 128"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 128, FA_ON_NONE, FA_FOR_LONG_TMA, 512, 80, 128, 12, 2, 1, 0, 304,
     "long: 80 queries, for which shared memory reads less than for 64 (decision 0056)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 128, FA_ON_CAUSAL, FA_FOR_LONG_TMA, 2048, 80, 128, 12, 2, 1, 0, 304,
     "causal: they waste more at the diagonal; no registers for options (decisions 0056, 0079)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_TMA, 0, 64, 128, 12, 2, 1, 0, 268,
     "two consumers of 64 keys; dQ by TMA; the producer's thread spills (decision 0055)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 192, FA_ON_ANY, FA_FOR_NARROW_V_TMA, 0, 48, 128, 12, 2, 1, 0, 336,
     "DeepSeek's: dK and dV leave registers for S and dP of 48 queries, and for no options (decision 0077)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 256, FA_ON_NONE, FA_FOR_FITTING_TMA, 112, 64, 64, 12, 2, 1, 0, 304, "as with 80 keys, of which 256 fill four tiles badly (decision 0093)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 256, FA_ON_CAUSAL | FA_ON_WINDOW, FA_FOR_FITTING_TMA, 106, 64, 64, 12, 2, 1, 0, 304, "likewise; they waste less of the diagonal, and of a narrow window (decisions 0093 and 0104)"},
    {90, 90, FA_KERNEL_BACKWARD_SM90, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_TMA, 0, 64, 80, 12, 2, 1, 0, 304,
     "two consumers of the same 80 keys, each some of the columns; one makes P, one dS (decision 0076)"},
    {80, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 64, FA_ON_ANY, FA_FOR_ANY, 0, 64, 128, 4, 2, 2, 0, 512,
     "head_dim 64: four warps of 32 keys, queries in two halves, two blocks a multiprocessor (decision 0042)"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 128, 8, 2, 1, 0, 512,
     "161 KB of shared memory, which P^T would not fit into"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 128, FA_ON_CAUSAL | FA_ON_WINDOW, FA_FOR_PLAIN, 512, 64, 64, 4, 1, 2, 1, 512,
     "89 KB of shared memory, two blocks a multiprocessor; short and masked: one's start and end hide behind the other (decision 0042)"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 128, 8, 2, 1, 1, 512,
     "177 KB of shared memory; two warps share 32 keys (decision 0042)"},
    {86, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 64, 4, 1, 1, 1, 512, "89 KB of shared memory"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 64, 4, 1, 1, 1, 512, "89 KB of shared memory"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_ANY, 0, 64, 64, 8, 1, 1, 2, 512,
     "153 KB of shared memory; warps share keys, or dK and dV of 16 would not fit into the registers"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_ANY, 0, 64, 64, 8, 2, 1, 2, 512,
     "217 KB of shared memory; four warps share 32 keys (decision 0042)"},
    {86, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 4, 1, 1, 1, 512, "70 KB of shared memory"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 4, 1, 1, 1, 512, "70 KB of shared memory"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 512, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 8, 1, 1, 3, 0,
     "158 KB of shared memory; four warps share keys and queries, each with a quarter of the columns (decision 0105)"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 576, FA_ON_ANY, FA_FOR_ANY, 0, 16, 32, 8, 2, 1, 3, 0, "160 KB of shared memory"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 512, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 8, 2, 1, 3, 160, "223 KB of shared memory"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 576, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 8, 1, 1, 3, 160, "174 KB of shared memory"},
    {86, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 384, FA_ON_ANY, FA_FOR_ANY, 0, 16, 32, 8, 1, 1, 3, 0, "87 KB of shared memory"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 384, FA_ON_ANY, FA_FOR_ANY, 0, 16, 32, 8, 1, 1, 3, 0, "87 KB of shared memory"},
    {86, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 576, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 3, 0, "80 KB of shared memory"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_16_BIT, 576, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 3, 0, "80 KB of shared memory"},

    /* float32 is two planes of float16, three products for one */
    {90, 90, FA_KERNEL_FORWARD_F32_SM90, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_PLANES, 0, 128, 128, 12, 2, 1, 0, 0, "two consumers; 161 KB of shared memory (decision 0085)"},
    {90, 90, FA_KERNEL_FORWARD_F32_SM90, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_PLANES, 0, 128, 64, 12, 2, 1, 0, 0, "two consumers; 193 KB of shared memory (decision 0085)"},
    {90, 90, FA_KERNEL_FORWARD_F32_SM90, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_PLANES, 0, 128, 32, 12, 2, 1, 0, 0, "keys for which Q leaves memory: two stages of K, at 256 one of V (decision 0085)"},

    /* float32 is three planes of bfloat16, six products for one: three times the memory of a tile */
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 256, 64, 32, 4, 1, 1, 0, 0, "48 KB of shared memory"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 128, 32, 4, 1, 1, 0, 64, "32 rows a warp, so that each read of K and V serves two blocks of 16; 72 KB of shared memory (decision 0084)"},
    {80, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 256, 64, 32, 4, 1, 1, 0, 16, "96 KB of shared memory"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 128, 32, 8, 1, 1, 0, 16, "128 rows, which share the cutting of K and V; 144 KB of shared memory (decision 0084)"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 4, 1, 1, 0, 0, "48 KB of shared memory; more rows were timed on 9.0 alone"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 4, 1, 1, 0, 0, "48 KB of shared memory; more rows were timed on 9.0 alone"},
    {80, 89, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 4, 1, 1, 0, 16, "96 KB of shared memory"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 4, 1, 1, 0, 16, "96 KB of shared memory"},
    {80, 80, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 64, 16, 4, 1, 1, 0, 256, "144 KB of shared memory"},
    {86, 89, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 2, 1, 1, 0, 256, "96 KB of shared memory"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 64, 32, 8, 1, 1, 0, 256, "two warps share rows, each with half of the columns of O; 192 KB of shared memory (decision 0084)"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 2, 1, 1, 0, 256, "96 KB of shared memory"},
    {80, 80, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 576, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 0, 0, "162 KB of shared memory"},
    {86, 89, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 320, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 0, 0, "90 KB of shared memory, which do not hold more columns"},
    {90, 119, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 576, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 8, 1, 1, 0, 0, "216 KB of shared memory"},
    {120, 129, FA_KERNEL_FORWARD_SM80, FA_IN_F32, 320, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 0, 0, "90 KB of shared memory, which do not hold more columns"},
    {90, 90, FA_KERNEL_BACKWARD_F32_SM90, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_PLANES, 0, 64, 128, 12, 2, 1, 0, 0, "two consumers of 64 keys (decision 0086)"},
    {90, 90, FA_KERNEL_BACKWARD_F32_SM90, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_PLANES, 0, 64, 128, 12, 1, 1, 0, 128, "two consumers of 64 keys; 225 KB of shared memory; dropout spills (decision 0086)"},
    {90, 90, FA_KERNEL_BACKWARD_F32_SM90, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_PLANES, 0, 32, 64, 12, 1, 1, 0, 0, "two consumers of the same keys, one dV, one dK; 217 KB of shared memory (decision 0086)"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 32, 64, 4, 1, 1, 0, 160, "four warps; 96 KB of shared memory (decision 0084)"},
    {80, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 2, 1, 1, 0, 160, "64 KB of shared memory"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 64, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 2, 1, 1, 0, 160, "64 KB of shared memory"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 4, 1, 1, 1, 384, "114 KB of shared memory; two warps share 16 keys"},
    {86, 89, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 2, 1, 1, 1, 768, "81 KB of shared memory"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 32, 64, 8, 1, 1, 1, 384, "eight warps, of which two share 16 keys; 180 KB of shared memory (decision 0084)"},
    {120, 129, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 128, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 2, 1, 1, 1, 768, "81 KB of shared memory"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 16, 2, 1, 1, 1, 5632,
     "153 KB of shared memory; spills at head_dim 256, where nothing smaller divides the work"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 256, FA_ON_ANY, FA_FOR_ANY, 0, 32, 32, 4, 1, 1, 1, 4096,
     "210 KB of shared memory; sums apart from dK and dV spill (decision 0043)"},
    {80, 80, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 384, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 3, 0, "155 KB of shared memory, which do not hold more columns (decision 0105)"},
    {90, 119, FA_KERNEL_BACKWARD_SM80, FA_IN_F32, 576, FA_ON_ANY, FA_FOR_ANY, 0, 16, 16, 4, 1, 1, 3, 2304, "227 KB of shared memory"},
};
const int fa_num_tune_rows = sizeof fa_tune_rows / sizeof *fa_tune_rows;

int fa_tune_arch(int device_arch)
{
    static const int built_for[] = {120, 100, 90, 89, 86, 80};
    for (size_t i = 0; i < sizeof built_for / sizeof *built_for; i++)
        if (built_for[i] <= device_arch && built_for[i] / 10 == device_arch / 10)
            return built_for[i];
    return 0;
}

bool fa_is_hoppers_own(enum fa_kernel_id kernel) { return kernel == FA_KERNEL_FORWARD_SM90 || kernel == FA_KERNEL_BACKWARD_SM90; }

bool fa_is_backward(enum fa_kernel_id kernel)
{
    return kernel == FA_KERNEL_BACKWARD_SM80 || kernel == FA_KERNEL_BACKWARD_SM90 || kernel == FA_KERNEL_BACKWARD_F32_SM90 || kernel == FA_KERNEL_BACKWARD_SHORT_SM90;
}

/* How far a row fits: the sentence of UNSUPPORTED comes from the row that came furthest. */
enum fit { FIT_NO_KERNEL, FIT_NO_ARCH, FIT_NO_DTYPE, FIT_NO_HEAD_DIM, FIT_NO_MASK, FIT_WHOLLY };

static bool backward_takes_tma(const fa_call *call)
{
    return !call->cache_batch_idx && !call->leftpad_k /* without a mask it hides keys past the last alone */ && call->dout.dtype == call->q.dtype;
}

static int64_t widest_columns(const fa_call *call) { return call->head_dim > call->head_dim_v ? call->head_dim : call->head_dim_v; }

/* Forward, of so few keys that they are not split: queries of more than half a tile, at 64 columns of a quarter (decision 0088), and of half a tile up to 1024 keys (0091; 256 columns were
 * not timed). Queries of several heads fill a tile better together, and FP8 is exact in the portable kernel. */
static bool is_short(const fa_call *call)
{
    enum { FEW_KEYS = 256, MORE_KEYS = 1024, NARROW = 64, WIDE = 128, HALF_TILE = 64 };
    int64_t columns = widest_columns(call);
    bool    more    = call->max_seqlen_q > HALF_TILE && columns <= WIDE;
    return call->pass == FLASH_ATTN_FORWARD && call->max_seqlen_k <= (more ? MORE_KEYS : FEW_KEYS) && call->max_seqlen_q > (columns <= NARROW ? 32 : HALF_TILE) && call->group == 1 &&
           call->q.dtype != FLASH_ATTN_F8E4M3;
}

bool fa_own_splits_fit(const fa_call *call)
{
    return call->window.left >= FA_UNLIMITED && !call->bias.data && call->slices.count == 0;
}

static bool may_group_heads(const fa_call *call, int tile_q)
{
    bool plain = !(call->alibi_slopes.data || call->dropout.threshold) && fa_own_splits_fit(call) && call->q.dtype != FLASH_ATTN_F8E4M3;
    return plain && call->group > 1 && (call->group & (call->group - 1)) == 0 && tile_q % call->group == 0 && call->q.shape[0] * call->q.shape[1] <= INT32_MAX / 2 / call->group;
}

bool fa_has_many_queries(const fa_call *call)
{
    enum { MANY = 128, MANY_ROWS = 256, MANY_ROWS_OF_FEW = 128, FEW_HEADS = 4, LONG = 4096, NARROW = 64, WIDE = 128, TILE = 128, TILE_OF_NARROW = 192 };
    int64_t columns = widest_columns(call), rows = call->max_seqlen_q * call->group;
    int64_t most    = call->heads_k <= FEW_HEADS ? MANY_ROWS_OF_FEW : MANY_ROWS;
    bool    grouped = call->pass == FLASH_ATTN_FORWARD && call->q.dtype != FLASH_ATTN_F32 && columns <= WIDE && may_group_heads(call, columns <= NARROW ? TILE_OF_NARROW : TILE);
    return call->max_seqlen_q > MANY || (grouped && rows > most && call->max_seqlen_k >= LONG);
}

bool fa_is_piece(const fa_call *call) { return call->max_seqlen_k >= 4 * call->max_seqlen_q; }

bool fa_groups_heads(const fa_call *call, const fa_tune_row *row)
{
    enum { MOST_QUERIES = 1024 }; /* of more none is empty by much */
    int64_t own = (call->max_seqlen_q + row->tile_q - 1) / row->tile_q * call->group, grouped = (call->max_seqlen_q * call->group + row->tile_q - 1) / row->tile_q;
    return row->kernel == FA_KERNEL_FORWARD_SM90 && call->max_seqlen_q <= MOST_QUERIES && may_group_heads(call, row->tile_q) && 100 * grouped <= (fa_is_piece(call) ? 90 : 80) * own;
}

bool fa_tune_takes_tma(const fa_call *call)
{
    if (call->pass == FLASH_ATTN_BACKWARD && !backward_takes_tma(call))
        return false;
    bool many = fa_has_many_queries(call), fit = call->num_splits > 1 ? many && fa_own_splits_fit(call) : many || is_short(call);
    return fit && call->scale > 0 && fa_maps_fit(call);
}

/* What Hopper's kernels for packed rows ask for: a scale above 0, strides of K that a tensor map describes, pages of a multiple of eight keys; no softcap, bias, ALiBi,
 * dropout and slices. */
static bool takes_packed(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { SWIZZLE_ROWS = 8 };
    return call->scale > 0 && key->aligned && fa_map_fits(&call->k) && !(key->has_softcap || key->has_bias || key->has_alibi || key->has_dropout || key->has_slices) &&
           (!key->has_paged || (call->k.shape[0] > 0 && fa_page_piece(call, row->tile_k) >= SWIZZLE_ROWS));
}

/* Rows of more than one tile of 64: in such tiles where they are few, else in tiles of 128, which read keys half as often. Both have the same steps, so that the batch may
 * choose. Limits as measured on an H200 (decision 0100): tiles of 128, and where they read many keys their keys too. */
static bool are_in_small_tiles(const fa_tune_row *row, const fa_call *call)
{
    enum { SMALL = 64, LARGE = 128, NARROW = 64, WIDE = 256, MOST = 64, FEW = 16, FEW_BY_BATCH = 8, KEYS = 1 << 19, KEYS_BY_BATCH = 1 << 18 };
    int64_t rows = call->max_seqlen_q * call->group, tiles = (rows + LARGE - 1) / LARGE * call->heads_k * call->batch;
    bool    by_batch = call->num_splits < 0;
    if (rows <= SMALL)
        return true;
    if (row->head_dim == NARROW || (by_batch && row->head_dim == WIDE))
        return tiles <= MOST;
    return tiles <= (by_batch ? FEW_BY_BATCH : FEW) && tiles * call->max_seqlen_k < (by_batch ? KEYS_BY_BATCH : KEYS);
}

/* What forward_few_sm90 asks for besides: queries that forward_sm90 leaves to others, more than eight rows, of which the kernel for any GPU leaves large results; up to 16
 * are faster there all the same where few blocks are busy, which only a call may count that lets the batch count (decision 0074, second round). */
static bool takes_few(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { FEW_ROWS = 8, ROWS_OF_ANY = 16, FEW_TILES = 32 };
    int64_t rows = call->max_seqlen_q * call->group, fewest = call->num_splits < 0 && call->batch * call->heads_k < FEW_TILES ? ROWS_OF_ANY : FEW_ROWS;
    return (!fa_has_many_queries(call) || call->num_splits > 1) && rows > fewest && (row->tile_q > 64 || are_in_small_tiles(row, call)) && call->head_dim > 32 && call->head_dim_v > 32 &&
           fa_map_fits(&call->v) && takes_packed(row, call, key);
}

/* What the kernels of planes ask for; pages may be of any size, for planes_sm90 reads them, and a bias any, by a scale that has a reciprocal. A softcap's way through an exponential leaves
 * too large an error for float32. The backward adds up dQ as it comes, and leaves few queries or keys to one launch. */
static bool takes_planes(const fa_call *call, const fa_key *key)
{
    enum { FEW = 128 };
    float smallest = 1e-30f;
    if (key->has_softcap || key->has_slices || !key->aligned || call->o.dtype != FLASH_ATTN_F32 || (key->has_bias && !(call->scale > smallest)))
        return false;
    if (call->pass == FLASH_ATTN_BACKWARD)
        return !key->has_dbias && !call->deterministic && call->max_seqlen_q > FEW && call->max_seqlen_k > FEW && backward_takes_tma(call) && (!call->dk.data || call->dk.dtype == FLASH_ATTN_F32) &&
               (!call->dv.data || call->dv.dtype == FLASH_ATTN_F32);
    return call->max_seqlen_q > FEW && call->num_splits <= 1 && call->scale > 0;
}

/* Queries for which forward_short_sm90 is no slower than a tile of several heads: more than 32, or at 64 columns eight of up to 128 keys (decision 0089). */
static bool are_short(const fa_call *call)
{
    enum { FEW = 32, FEWEST = 8, FEW_KEYS = 128, NARROW = 64 };
    bool narrow = call->head_dim <= NARROW && call->head_dim_v <= NARROW && call->max_seqlen_k <= FEW_KEYS && call->group == 1;
    return call->max_seqlen_q > FEW || (narrow && call->max_seqlen_q >= FEWEST);
}

/* What forward_short_sm90 and backward_short_sm90 ask for. A tensor map has no dimension of 0. */
static bool takes_one_tile(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    bool plain = !(key->has_softcap || key->has_bias || key->has_alibi || key->has_dropout || key->has_slices || key->has_paged || call->dsinks.data);
    bool fit   = (call->max_seqlen_q <= row->tile_q || row->only == FA_FOR_FEW_KEYS) && call->max_seqlen_k <= row->tile_k;
    bool some  = call->q.shape[1] > 0 && call->k.shape[1] > 0 && fit;
    if (!plain || !some || !key->aligned || !fa_ragged_maps_fit(call))
        return false;
    if (call->pass == FLASH_ATTN_FORWARD)
        return are_short(call) && !call->leftpad_k && call->num_splits <= 1 && call->scale > 0;
    bool shares = row->tile_q <= 128 || call->group == 1; /* dK and dV of two tiles of keys are not kept from head to head */
    return shares && backward_takes_tma(call) && fa_maps_fit(call);
}

/* What forward_latent_sm90 asks for besides: V is the first columns of K's rows, of which there are more than 256. */
static bool takes_latent(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { NARROW = 256 };
    return fa_values_in_keys(call) && call->head_dim > NARROW && call->head_dim_v <= FA_LATENT_COLUMNS_V && takes_packed(row, call, key);
}

/* What forward_wide_sm90 asks for besides: heads too wide for forward_sm90. */
static bool takes_wide(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { NARROW = 256 };
    return widest_columns(call) > NARROW && fa_map_fits(&call->v) && takes_packed(row, call, key);
}

/* Rows of all heads of a key head fit into one tile, or into fewer than the heads are; where there is no other row for few queries, always. */
static bool is_few(const fa_tune_row *row, const fa_call *call, bool plain)
{
    int64_t tiles = (call->max_seqlen_q * call->group + row->tile_q - 1) / row->tile_q;
    return row->tile_q == 16 ? tiles <= 1 : !plain || tiles < call->group;
}

/* The options that Hopper's own kernels have in 16 bits: softcap, ALiBi, dropout and, forward, pages. A softcap's error grows with it (decision 0061), and
 * its slope is finite; a swizzle takes eight rows. */
static bool has_own_options(const fa_tune_row *row, const fa_call *call)
{
    enum { LARGEST_SOFTCAP = 128, SWIZZLE_ROWS = 8 };
    bool own = fa_is_hoppers_own(row->kernel);
    if (row->kernel == FA_KERNEL_BACKWARD_SM90 && (row->only == FA_FOR_NARROW_V_TMA || (row->only == FA_FOR_LONG_TMA && row->masks == FA_ON_CAUSAL)))
        own = false; /* no registers are left */
    return own && row->dtypes == FA_IN_16_BIT && call->softcap <= LARGEST_SOFTCAP &&
           (call->softcap == 0 || call->scale <= 1e30f * call->softcap) && (!call->pages.table || (call->k.shape[0] > 0 && fa_page_piece(call, row->tile_k) >= SWIZZLE_ROWS));
}

/* What Hopper's own ask of a bias: no softcap, ALiBi or pages, and forward a scale that has a reciprocal. Float32 is for the forward alone; three consumers have no registers for that or
 * dropout, nor has the backward above 128 columns memory for dropout. */
static bool takes_bias(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    enum { ALL_OPTIONS = 128 };
    bool  backward = row->kernel == FA_KERNEL_BACKWARD_SM90, wide = call->bias.dtype == FLASH_ATTN_F32;
    float smallest = 1e-30f;
    if (key->has_dbias && (call->dbias.stride[2] == 0 || call->dbias.stride[3] == 0))
        return false; /* sums over queries or keys */
    return fa_bias_map_fits(call) && call->scale > smallest && !(key->has_softcap || key->has_alibi || key->has_paged) &&
           (backward ? !wide && (row->head_dim <= ALL_OPTIONS || !key->has_dropout) : row->warps == 12 || !(wide || key->has_dropout));
}

/* The row behind, which would be taken without this one. */
static const fa_tune_row *row_behind(const fa_tune_row *row)
{
    const fa_tune_row *plain = row + 1;
    while (plain->only != FA_FOR_TMA || !(plain->masks & FA_ON_WINDOW))
        plain++;
    return plain;
}

static bool is_banded(fa_window window) { return window.left < FA_UNLIMITED && window.right < FA_UNLIMITED; }

/* How many of a row's tiles of queries see keys of one of its tiles under a window, on average and in hundredths. */
static int64_t tiles_met(const fa_tune_row *row, const fa_call *call)
{
    int64_t first = row->tile_q - (call->window.right + call->max_seqlen_k - call->max_seqlen_q) % row->tile_q; /* the query that sees key 0, but for whole tiles */
    int64_t span = row->tile_k - 1 + call->window.left + call->window.right, met = 0, n = 0;
    do
        met += (first + n * row->tile_k + span) / row->tile_q - (first + n * row->tile_k) / row->tile_q + 1;
    while (++n * row->tile_k % row->tile_q); /* both kinds meet in the same way again */
    return met * 100 / n;
}

/* A sequence's queries and keys, up to the ends of the row's tiles; under a window those that it shows, were the sequence long. */
static int64_t covered_by(const fa_tune_row *row, const fa_call *call)
{
    int64_t q = (call->max_seqlen_q + row->tile_q - 1) / row->tile_q, k = (call->max_seqlen_k + row->tile_k - 1) / row->tile_k, all = q * k;
    if (is_banded(call->window)) {
        int64_t shown = k * tiles_met(row, call) / 100;
        all           = shown < all ? shown : all;
    }
    return all * row->tile_q * row->tile_k;
}

/* Of packed sequences the longest says little of the others, which larger tiles may fit worse. Under a window a tile has few steps, beside which more is done for each tile (decision 0104). */
static bool fits_better(const fa_tune_row *row, const fa_call *call)
{
    enum { FOR_FEW_STEPS = 8 };
    const fa_tune_row *behind = row_behind(row);
    int64_t            least  = row->max_queries + (is_banded(call->window) ? FOR_FEW_STEPS : 0);
    return covered_by(row, call) / 100 * least <= covered_by(behind, call) && !(call->cu_seqlens_q && row->tile_q > behind->tile_q);
}

/* What Hopper's own ask of slices: no bias and no pages, and lists of tiles. */
static bool takes_slices(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    return fa_is_hoppers_own(row->kernel) && row->dtypes == FA_IN_16_BIT && !(key->has_bias || key->has_paged) && fa_lists_fit(call, row);
}

static bool is_for(const fa_tune_row *row, const fa_call *call, const fa_key *key)
{
    bool plain = (!key->has_bias || (row->only == FA_FOR_BIAS_TMA && takes_bias(row, call, key))) && (!key->has_slices || takes_slices(row, call, key)) &&
                 (!(key->has_softcap || key->has_alibi || key->has_dropout || key->has_paged) || has_own_options(row, call));
    if (row->only == FA_FOR_LATENT)
        return takes_latent(row, call, key);
    if (row->only == FA_FOR_WIDE)
        return takes_wide(row, call, key);
    if (row->only == FA_FOR_FEW_TMA)
        return takes_few(row, call, key);
    if (row->only == FA_FOR_PLANES)
        return takes_planes(call, key);
    if (fa_has_one_tile(row))
        return takes_one_tile(row, call, key);
    if (row->only >= FA_FOR_TMA && !fa_tune_takes_tma(call))
        return false;
    if (row->only == FA_FOR_FEW) /* of a bias, one that is the same for all heads of a tile, as padding is */
        return key->aligned && (!key->has_bias || call->bias.stride[1] == 0) && !(key->has_alibi || key->has_dropout || key->has_slices) && is_few(row, call, plain);
    if ((row->only == FA_FOR_SOFTCAP_TMA && !key->has_softcap) || (row->only == FA_FOR_BIAS_TMA && !key->has_bias) || (row->only == FA_FOR_CUT_TMA && !(key->has_slices && fa_cuts_many(call, row_behind(row)))) || (row->only == FA_FOR_NARROW_V_TMA && call->head_dim_v > FA_NARROW_V))
        return false;
    if (row->only == FA_FOR_SHORT_TMA && call->max_seqlen_k > row->max_queries)
        return false;
    if (row->only == FA_FOR_FITTING_TMA && (!fits_better(row, call) || (key->has_slices && row->masks == FA_ON_WINDOW /* theirs are FA_FOR_CUT_TMA */)))
        return false;
    if (row->only == FA_FOR_LONG_TMA && (call->max_seqlen_q <= row->max_queries || call->cache_batch_idx || (call->cu_seqlens_k && !fa_is_backward(row->kernel))))
        return false; /* values_sm90 counts entries' tiles */
    return row->only == FA_FOR_ANY || (key->aligned && (plain || row->only == FA_FOR_ALIGNED));
}

static enum fit fit_of(const fa_tune_row *row, const fa_call *call, const fa_key *key, const char *name)
{
    if (fa_is_backward(row->kernel) != (call->pass == FLASH_ATTN_BACKWARD) ||
        (name && strcmp(fa_kernels[row->kernel].name, name) != 0))
        return FIT_NO_KERNEL;
    if (key->arch < row->arch_min || key->arch > row->arch_max)
        return FIT_NO_ARCH;
    if (!(row->dtypes >> call->q.dtype & 1))
        return FIT_NO_DTYPE;
    if (call->head_dim > row->head_dim || call->head_dim_v > row->head_dim)
        return FIT_NO_HEAD_DIM;
    int mask = key->has_slices && fa_is_hoppers_own(row->kernel) ? FA_MASK_WINDOW : key->mask; /* lists of tiles are most like it */
    if (!(row->masks >> mask & 1) || (row->max_queries && row->only != FA_FOR_LONG_TMA && row->only != FA_FOR_FITTING_TMA && call->max_seqlen_q > row->max_queries) ||
        !is_for(row, call, key))
        return FIT_NO_MASK;
    return FIT_WHOLLY;
}

/* The first width that holds so many. */
static int width_of(int columns, const int *widths)
{
    while (*widths < columns)
        widths++;
    return *widths;
}

void fa_tune_columns(const fa_tune_row *row, fa_key *key)
{
    static const int of_output[] = {64, 96, 128, 192, 256}; /* of O, as WGMMA is there (ptx_sm90.cuh) */
    static const int of_two_k[] = {192, 256}, of_two_v[] = {128, 192, 256}, of_panels[] = {64, 128, 192, 256}; /* backward: panels that two consumers share */
    bool forward = row->kernel == FA_KERNEL_FORWARD_SM90 || row->kernel == FA_KERNEL_FORWARD_F32_SM90, backward = row->kernel == FA_KERNEL_BACKWARD_SM90, latent = fa_is_latent(row);
    if (!forward && !backward && !latent && row->kernel != FA_KERNEL_FORWARD_FEW_SM90 && row->kernel != FA_KERNEL_BACKWARD_F32_SM90 && !fa_has_one_tile(row))
        return;
    key->even_d = 0;
    if (forward && key->dtype != FLASH_ATTN_F8E4M3) {
        key->head_dim   = key->head_dim < of_output[0] ? of_output[0] : key->head_dim;
        key->head_dim_v = width_of(key->head_dim_v, of_output);
    } else if (backward && row->head_dim > 128) {
        key->head_dim   = width_of(key->head_dim, of_two_k);
        key->head_dim_v = width_of(key->head_dim_v, of_two_v);
    } else if (row->kernel == FA_KERNEL_BACKWARD_F32_SM90 && row->head_dim > 128) {
        key->head_dim   = width_of(key->head_dim, of_panels);
        key->head_dim_v = width_of(key->head_dim_v, of_panels);
    } else {
        enum { FEWEST = 320 }; /* of panels of Q and K */
        key->head_dim   = row->only != FA_FOR_WIDE ? row->head_dim : key->head_dim < FEWEST ? FEWEST : key->head_dim;
        key->head_dim_v = latent ? FA_LATENT_COLUMNS_V : row->head_dim;
    }
}

flash_attn_status fa_tune_choose(const fa_call *call, const fa_key *key, const char *name, const fa_tune_row **row)
{
    int                      arch     = key->arch;
    static const char *const dtypes[] = {"float32", "float16", "bfloat16", "float8_e4m3"};
    enum fit                 best     = FIT_NO_KERNEL;
    int                      widest   = 0; /* head_dim of the rows that lack nothing else */
    const char              *pass     = call->pass == FLASH_ATTN_BACKWARD ? "backward" : "forward";
    for (int i = 0; i < fa_num_tune_rows; i++) {
        enum fit fit = fit_of(&fa_tune_rows[i], call, key, name);
        if (fit == FIT_WHOLLY) {
            *row = &fa_tune_rows[i];
            return FLASH_ATTN_OK;
        }
        best = fit > best ? fit : best;
        if (fit == FIT_NO_HEAD_DIM && fa_tune_rows[i].head_dim > widest)
            widest = fa_tune_rows[i].head_dim;
    }
    switch (best) {
    case FIT_NO_ARCH:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel for compute capability %d.%d", pass, arch / 10, arch % 10);
    case FIT_NO_DTYPE:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel takes q of %s on compute capability %d.%d", pass,
                       dtypes[call->q.dtype], arch / 10, arch % 10);
    case FIT_NO_HEAD_DIM:
        return fa_fail(FLASH_ATTN_UNSUPPORTED,
                       "no CUDA %s kernel for %s holds head_dim %lld with head_dim_v %lld on compute capability %d.%d: the largest is %d", pass,
                       dtypes[call->q.dtype], (long long)call->head_dim, (long long)call->head_dim_v, arch / 10, arch % 10, widest);
    case FIT_NO_MASK:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel for this mask with these options", pass);
    default:
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "no CUDA %s kernel%s%s", pass, name ? " named " : "", name ? name : "");
    }
}
