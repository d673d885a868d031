/* What the rungs of the ladder share: which queries and keys a block has, tiles in shared memory, the way out. */
#ifndef FA_LADDER_CUH
#define FA_LADDER_CUH

#include "numbers.cuh"

constexpr int D = FA_HEAD_DIM; /* 64 or 128, of V too */
static_assert(D == FA_HEAD_DIM_V && D % 64 == 0, "the ladder's head dims");

extern __shared__ __align__(1024) char shared[];

/* Tile FA_TILE_Q x FA_TILE_K of keys; one block, one tile of queries. */
struct block_work {
    int entry, head, kv_head;
    int first_q;       /* row of Q */
    int tiles, clean;  /* key tiles that some query sees: [0, tiles); that every query sees wholly: [0, clean) */
    float scale_log2, descale_v; /* scale * log2(e), K7's with the descales of Q and K; what O is multiplied with: 1, or V's descale */
};

/* Query i sees keys [0, key_limit). */
FA_DEVICE int key_limit(const fa_args &args, int i)
{
    int limit = args.max_seqlen_k;
    if (FA_MASK == FA_MASK_CAUSAL)
        limit = fa_min_int(limit, i + args.max_seqlen_k - args.max_seqlen_q + args.window.right + 1);
    return fa_max_int(limit, 0);
}

/* blockIdx.x counts tiles of queries, the longest first when causal; then heads, then batch entries. */
FA_DEVICE block_work block_work_of(const fa_args &args)
{
    block_work w;
    unsigned   n = blockIdx.x, tile = n % args.tiles_q;
    n /= args.tiles_q;
    if (FA_MASK == FA_MASK_CAUSAL)
        tile = args.tiles_q - 1 - tile;
    w.head    = n % args.heads_q;
    w.entry   = n / args.heads_q;
    w.kv_head = w.head / args.group;
    w.first_q = tile * FA_TILE_Q;
    int last  = fa_min_int(w.first_q + FA_TILE_Q, args.max_seqlen_q) - 1;
    w.tiles   = (key_limit(args, last) + FA_TILE_K - 1) / FA_TILE_K;
    w.clean   = key_limit(args, w.first_q) / FA_TILE_K;
    w.scale_log2 = args.scale_log2;
    w.descale_v  = 1.0f;
    return w;
}

FA_DEVICE fa_u16 *row_of(const fa_view &view, int entry, int row, int head)
{
    return (fa_u16 *)view.data + entry * view.stride[0] + row * view.stride[1] + head * view.stride[2];
}

/* Where the 16-byte chunk (8 columns) of a row lies in a tile of ROWS rows: panels as in panels_sm90.cuh. */
template <int ROWS> FA_DEVICE int chunk_at(int row, int chunk)
{
    return chunk / 8 * (ROWS * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

/* A chunk: eight columns. */
FA_DEVICE void unpack_eight(float (&x)[8], uint4 words)
{
    const unsigned pair[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float2 two = unpack<FA_DTYPE>(pair[n]);
        x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
}

/* Rows [first, first + ROWS) of a head into a tile, by plain loads of all threads; rows from `end` on become zeros. */
template <int ROWS> FA_DEVICE void copy_tile(char *tile, const fa_view &view, int entry, int head, int first, int end)
{
    constexpr int CHUNKS = D / 8;
#pragma unroll 4
    for (int n = threadIdx.x; n < ROWS * CHUNKS; n += 32 * FA_WARPS) {
        int   row = n / CHUNKS, chunk = n % CHUNKS;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (first + row < end)
            value = *(const uint4 *)(row_of(view, entry, first + row, head) + 8 * chunk);
        *(uint4 *)(tile + chunk_at<ROWS>(row, chunk)) = value;
    }
}

/* LSE of query i from the maximum of its dot products and the sum of their exponentials; -inf if it saw nothing. */
FA_DEVICE void store_lse(const fa_args &args, const block_work &w, int i, float max, float sum)
{
    if (args.lse.data)
        ((float *)args.lse.data)[w.entry * args.lse.stride[0] + w.head * args.lse.stride[1] + i * args.lse.stride[2]] =
            sum == 0.0f ? -infinity() : (max * w.scale_log2 + log2_fast(sum)) * FA_LN2;
}

#endif
