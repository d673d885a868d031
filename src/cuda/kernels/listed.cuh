/* FA_MASK_LISTED: the tiles that a tile meets, and what it sees of those that are cut, as list_tiles.cu has written them down. */
#ifndef FA_LISTED_CUH
#define FA_LISTED_CUH

#include "packed_sm90.cuh"

constexpr bool LISTED = FA_MASK == FA_MASK_LISTED;

/* Of a thread's columns 8 j + e of a row of so many, bit 2 j + e, those below x. */
template <int COLUMNS> FA_DEVICE unsigned columns_below(int x)
{
    x = clamp_int(x, 0, COLUMNS);
    return (unsigned)((1ull << (x / 8 * 2 + min(x % 8, 2))) - 1);
}

/* The list of the n-th of all tiles (packed_sm90.cuh). */
FA_DEVICE fa_listed *list_of_tile(const fa_args &args, int n) { return args.tile_lists + (fa_i64)n * args.list_places; }

FA_DEVICE int number_of_queries(const fa_args &args, int b, int tile)
{
    return first_tile<FA_TILE_Q>(args.cu_seqlens_q, args.all_rows_q, args.tiles_q, b) + tile;
}

FA_DEVICE int number_of_keys(const fa_args &args, int b, int tile) { return first_tile<FA_TILE_K>(args.cu_seqlens_k, args.all_rows_k, args.tiles_k, b) + tile; }

/* Of a tile of queries, so many tiles of keys meet it before this one (a backward in a fixed order). */
FA_DEVICE int &turn_of_keys(const fa_args &args, int queries, int tile_k) { return args.tile_turns[(fa_i64)queries * args.tiles_k + tile_k]; }

/* The words of a mask's row: lane t of the four that share the row in an accumulator has the t-th, its columns 8 j + 2 t + e. ROWS: of a tile. */
template <int ROWS> FA_DEVICE unsigned *words_of_row(const fa_args &args, int mask, int row)
{
    return args.tile_masks + ((fa_i64)mask * ROWS + row) * 4;
}

/* What this thread sees of its rows h = 0, 1 of a tile, the first of which is `row`. */
struct seen_words {
    unsigned of[2];
};

/* `n`-th of this thread's elements: 4 j + 2 h + e. */
FA_DEVICE bool sees(const seen_words &seen, int n) { return seen.of[n / 2 % 2] >> (n / 4 * 2 + n % 2) & 1; }

template <int ROWS> FA_DEVICE seen_words load_seen(const fa_args &args, int mask, int row)
{
    if (mask < 0) /* all of it */
        return {{~0u, ~0u}};
    const unsigned *words = words_of_row<ROWS>(args, mask, row) + threadIdx.x % 4;
    return {{words[0], words[8 * 4]}};
}

#endif
