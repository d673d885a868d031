/*
 * K2: FlashAttention-2's loops on the plain CUDA cores.
 *
 *               head_dim            A block owns FA_TILE_Q queries and walks their keys once; O, m and l stay in registers
 *            +-----------+          and are divided by l at the end only. Blocks over tiles of queries, heads and batch:
 *     warp 0 |  Q tile   |          even one head fills a GPU. Warps split the queries: P passes through shared memory
 *      ...   | (shared)  |          (16 lanes need each other's), but only inside a warp, without a barrier.
 *            +-----------+
 *             K, V tiles            One tile of K and of V at a time, by plain loads: while they are under way the
 *              (shared)             multiply-adders wait.
 *
 * What it shows: against FA1, what the order of the loops and the split of the warps are worth, on the same arithmetic.
 */
#include "ladder_fma.cuh"

extern "C" __constant__ int fa_shared_bytes = Q_BYTES + 2 * KV_BYTES + P_BYTES;

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS) k2_tiled(const __grid_constant__ fa_args args)
{
    char      *q = shared, *k = q + Q_BYTES, *v = k + KV_BYTES;
    float     *p = (float *)(v + KV_BYTES);
    block_work w = block_work_of(args);
    fma_state  state;
    clear(state);
    copy_tile<FA_TILE_Q>(q, args.q, w.entry, w.head, w.first_q, args.max_seqlen_q);
    for (int tile = w.tiles - 1; tile >= 0; tile--) {
        float s[ROWS][KEYS];
        copy_tile<FA_TILE_K>(k, args.k, w.entry, w.kv_head, tile * FA_TILE_K, args.max_seqlen_k);
        copy_tile<FA_TILE_K>(v, args.v, w.entry, w.kv_head, tile * FA_TILE_K, args.max_seqlen_k);
        __syncthreads();
        scores_by_fma(s, q, k);
        softmax_step(args, state, s, p, w.first_q, tile * FA_TILE_K, tile >= w.clean);
        accumulate_by_fma(state.o, p, v);
        __syncthreads(); /* all have done with K and V, and with P */
    }
    store_rows(args, w, state);
}
