/* forward_latent_sm90.cu's first warpgroup: who finds a block's work, and who fetches Q and K for it by TMA. */
#ifndef FA_LATENT_PRODUCER_SM90_CUH
#define FA_LATENT_PRODUCER_SM90_CUH

#include "latent_block_sm90.cuh"

/* ---- producers: one thread; of keys in pages three, of warps 0, 2 and 3, each of which has other pieces of a tile ---- */

FA_DEVICE int producer() { return FA_HAS_PAGED && threadIdx.x >= 64 ? (int)threadIdx.x / 32 - 1 : 0; }

/* Rows of K that lie side by side. Page -1, as any that is out of range: TMA brings zeros. */
struct key_piece {
    int entry, row;
};

/* This producer's first piece of a tile begins at this row; there is none behind the tile. A second one, PRODUCERS pieces on, there is where pieces have eight
 * rows, the fewest, for a swizzle takes eight. */
FA_DEVICE int piece_row(const fa_args &args) { return FA_HAS_PAGED ? producer() * args.page_piece : 0; }

/* Where a key lies: its page, counted from the sequence's first, and its row there. */
struct page_place {
    int page, row;
};

FA_DEVICE page_place page_place_of(const fa_args &args, int key)
{
    int page = quotient(key, args.kv_rows);
    return {page, key - page * args.kv_rows};
}

/* A piece of the tile to the left, without a division. */
FA_DEVICE void go_left(const fa_args &args, page_place &p)
{
    for (p.row -= FA_TILE_K; p.row < 0; p.row += args.kv_rows)
        p.page--;
}

/* The piece that begins there. Only pages that hold keys of the work are looked up: entries of others may be anything. */
FA_DEVICE key_piece look_up(const fa_args &args, const work &w, page_place p)
{
    int key = p.page * args.kv_rows + p.row;
    if (key >= w.keys.end || key + args.page_piece <= w.keys.begin)
        return {-1, 0};
    return {args.page_table[w.b * args.page_row_stride + p.page], p.row};
}

/* The slot's panels of a part may come, as soon as those before have been read. Every producer waits and arrives, also where it fetches nothing (Q without
 * boxes, a tile of fewer pieces): `full` is not over before it has arrived, nor `empty`, which follows, so neither can pass a producer by and come round to the
 * parity that it waits for. Nor can q_empty, which follows too, and found, before which the planner waits for done. A producer announces a share of the bytes,
 * whichever it fetches: what comes before it is announced counts below 0, and a phase lasts until all have arrived. */
FA_DEVICE void expect(place at, int part, int bytes)
{
    if (part < 2)
        barrier_wait(empty(at.slot, part), at.phase ^ 1);
    if (APART) /* parts of Q are no multiple of three */
        barrier_expect(full(at.slot, part), producer() == 0 ? bytes : 0);
    else
        barrier_expect(full(at.slot, part), bytes / PRODUCERS);
}

/* The item's Q, `items` having been before it: of each part three panels, of the last what is left. */
FA_DEVICE void fetch_queries(const fa_args &args, const fa_map &map, const work &w, place at, int items)
{
    int query = w.seq.q_row + w.first_q, head = first_head(args, w);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        constexpr int OF_PART = KEPT / 2;
        int           first = part * OF_PART, end = part == PARTS - 1 ? PANELS : first + OF_PART;
        if (part == PARTS - 1)
            barrier_wait(q_empty(), items & 1 ^ 1);
        expect(at, part, has_boxes(args) ? (end - first) * ROWS_BYTES : 0);
        if (has_boxes(args))
#pragma unroll
            for (int n = first; n < end; n += PRODUCERS)
                if (PRODUCERS == 1 || n + PRODUCERS <= end || n + producer() < end)
                    tma_load(q_at(at.slot, n) + producer() * ROWS_BYTES, map, full(at.slot, part), 64 * (n + producer()), head, query, w.seq.q_entry);
    }
}

/* Panels of a part of a tile that are fetched: APART those of `columns` columns. */
FA_DEVICE int panels_of_part(int columns, int part) { return APART ? max(0, min(HALF, (columns + 63) / 64 - HALF * part)) : part == 2 ? PANELS - 2 * HALF : HALF; }

/* A part of a tile's panels, from row `row` on what is in one place; of a pair's blocks one asks for those with even numbers, the other for the odd ones. Written
 * out: a loop's addresses took longer than the products. */
FA_DEVICE void fetch_panels(const fa_map &map, int kv_head, place at, key_piece piece, int part, int row, int columns)
{
    constexpr int EACH = PAIRS ? 2 : 1;
    int           rank = PAIRS ? (int)(blockIdx.x % 2) : 0;
    if (FA_HAS_PAGED && PAIRS)
        make_anew(rank);
    if (PAIRS && part == 2 && rank == 1)
        return;
#pragma unroll
    for (int n = HALF * part; n < (part == 2 ? PANELS : HALF * (part + 1)); n += EACH) {
        int      panel = n + rank;
        if (APART && panel * 64 >= columns)
            break;
        unsigned to    = panel_at(at.slot, panel) + row * 128;
        if constexpr (PAIRS)
            tma_load_both(to, map, full(at.slot, part), 64 * panel, piece.row, kv_head, piece.entry);
        else
            tma_load(to, map, full(at.slot, part), 64 * panel, piece.row, kv_head, piece.entry);
    }
}

/* This producer's pieces of the tile's keys, or values, of which `piece` is the first. */
FA_DEVICE void fetch_tile(const fa_args &args, const fa_map &map, const work &w, int kv_head, place at, key_piece piece, int tile, int columns = FA_HEAD_DIM)
{
    if constexpr (!FA_HAS_PAGED) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            expect(at, part, panels_of_part(columns, part) * PANEL_BYTES);
            fetch_panels(map, kv_head, at, piece, part, 0, columns);
        }
        return;
    }
    bool first = true;
    int  row   = piece_row(args);
#pragma unroll 1
    do {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (first)
                expect(at, part, panels_of_part(columns, part) * PANEL_BYTES);
            if (row < FA_TILE_K)
                fetch_panels(map, kv_head, at, piece, part, row, columns);
        }
        row += PRODUCERS * args.page_piece;
        first = false;
        if (row < FA_TILE_K)
            piece = look_up(args, w, page_place_of(args, tile * FA_TILE_K + row));
    } while (row < FA_TILE_K);
}

/* Where this producer's first piece of a tile of keys lies. */
struct piece_finder {
    page_place from;
    key_piece  next;
    __device__ __forceinline__ piece_finder(const fa_args &args, const work &w, int tile)
    {
        from = {0, 0};
        next = {w.seq.kv_entry, w.seq.kv_row + tile * FA_TILE_K};
        if (FA_HAS_PAGED) {
            from = page_place_of(args, tile * FA_TILE_K + piece_row(args));
            next = look_up(args, w, from);
        }
    }
    /* That of the tile, and the tile to the left is next, if there is one: looked up a tile ahead, so that nobody waits for the table. */
    __device__ __forceinline__ key_piece take(const fa_args &args, const work &w, bool more)
    {
        key_piece piece = next;
        if (!FA_HAS_PAGED)
            next.row -= FA_TILE_K;
        else if (more) {
            go_left(args, from);
            next = look_up(args, w, from);
        }
        return piece;
    }
};

FA_DEVICE void produce(const fa_args &args, const fa_maps &maps)
{
    place at = {0, 0}, values = {VALUES_FROM, 0};
    int   items = 0; /* that have keys */
    for (int k = 0;; k++) {
        barrier_wait(found(k), filled(k));
        const work &w = item_at(k).w;
        if (item_at(k).none)
            return;
        int tiles = tiles_of(w);
        if (tiles > 0) {
            int          tile = right_tile(w), kv_head = w.kv_head;
            piece_finder finder(args, w, tile);
            key_piece    before = finder.next; /* APART: of the tile whose V is next, for K of the tile behind it is wanted first */
            fetch_queries(args, maps.q, w, at, items);
            items++;
            go_on(at);
            bool first = true;
            for (; tiles > 0; tiles--, tile--) {
                key_piece piece = finder.take(args, w, tiles > 1);
                fetch_tile(args, maps.k, w, kv_head, at, piece, tile);
                go_on(at);
                if (APART && !first) {
                    fetch_tile(args, maps.v, w, kv_head, values, before, tile + 1, args.head_dim_v);
                    go_on<VALUES_FROM>(values);
                }
                first  = false;
                before = piece;
            }
            if (APART) {
                fetch_tile(args, maps.v, w, kv_head, values, before, tile + 1, args.head_dim_v);
                go_on<VALUES_FROM>(values);
            }
        }
        barrier_arrive(done(k));
    }
}

#endif
