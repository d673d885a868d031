/* Hopper's kernel for multi-head latent attention, where V is the first columns of K, and with --wide as first argument the one for other heads above 256 columns, against the reference,
 * by its name, so that nothing else can answer; skipped, with the reason, where there is no GPU of compute capability 9.0. */
#include "packed_rows.h"

#include <string.h>

#define C FLASH_ATTN_CAUSAL
#define W FLASH_ATTN_WINDOW
/* DeepSeek's head dims where a shape names none, and one key head. An even and an odd number of tiles of 64 keys, tails, one part and several, rows of several heads and
 * queries in a tile, keys that are nobody's (NaN in the case's memory). */
static const test_case shapes[] = {
    {.name = "one query", .seqlen_q = 1, .seqlen_k = 128, .heads_q = 64},
    {.name = "one query, one tile", .seqlen_q = 1, .seqlen_k = 64, .heads_q = 16},
    {.name = "one query, a tail", .batch = 2, .seqlen_q = 1, .seqlen_k = 147, .heads_q = 128, .mask = C},
    {.name = "one query, parts", .batch = 2, .seqlen_q = 1, .seqlen_k = 1000, .heads_q = 20, .mask = C},
    {.name = "one key", .seqlen_q = 2, .seqlen_k = 1, .heads_q = 8},
    {.name = "no key", .seqlen_q = 2, .seqlen_k = 0, .heads_q = 8},
    {.name = "no key, parts by the batch", .seqlen_q = 2, .seqlen_k = 0, .heads_q = 8, .num_splits = -1},
    {.name = "two queries", .batch = 2, .seqlen_q = 2, .seqlen_k = 333, .heads_q = 48, .mask = C},
    {.name = "queries and heads that divide nothing", .seqlen_q = 7, .seqlen_k = 200, .heads_q = 21, .mask = C},
    {.name = "more queries than keys", .seqlen_q = 90, .seqlen_k = 40, .heads_q = 4, .mask = C},
    {.name = "prefill", .seqlen_q = 200, .seqlen_k = 200, .heads_q = 4, .mask = C},
    {.name = "prefill, long", .seqlen_q = 180, .seqlen_k = 2050, .heads_q = 8, .heads_k = 2, .head_dim = 512, .head_dim_v = 512, .mask = C, .num_splits = 1},
    {.name = "prefill, more heads than L2 has keys of", .batch = 43, .seqlen_q = 70, .seqlen_k = 128, .heads_q = 3, .heads_k = 3, .head_dim = 512, .head_dim_v = 512, .mask = C},
    {.name = "prefill, full", .seqlen_q = 130, .seqlen_k = 257, .heads_q = 3},
    {.name = "two key heads", .batch = 2, .seqlen_q = 3, .seqlen_k = 150, .heads_q = 16, .heads_k = 2, .mask = C},
    {.name = "window", .seqlen_q = 100, .seqlen_k = 400, .heads_q = 5, .mask = W, .window_left = 130, .window_right = 20},
    {.name = "window of one", .seqlen_q = 70, .seqlen_k = 70, .heads_q = 2, .mask = W},
    {.name = "window past the keys", .seqlen_q = 200, .seqlen_k = 60, .heads_q = 2, .mask = W, .window_left = 40, .window_right = 3},
    {.name = "sinks", .batch = 2, .seqlen_q = 3, .seqlen_k = 300, .heads_q = 16, .mask = C, .sinks = true},
    {.name = "sinks, parts", .seqlen_q = 1, .seqlen_k = 700, .heads_q = 16, .sinks = true},
    {.name = "pages of 64", .batch = 3, .seqlen_q = 1, .seqlen_k = 300, .heads_q = 128, .page_size = 64, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 16, parts", .batch = 3, .seqlen_q = 2, .seqlen_k = 700, .heads_q = 64, .page_size = 16, .seqused_k = LENGTHS_HOLES, .mask = C},
    {.name = "pages of 24, heads first", .batch = 2, .seqlen_q = 2, .seqlen_k = 200, .heads_q = 8, .heads_k = 2, .page_size = 24, .layout = LAYOUT_HEADS_FIRST,
     .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 8, parts, two queries", .batch = 2, .seqlen_q = 2, .seqlen_k = 333, .heads_q = 48, .page_size = 8, .num_splits = 2, .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 40, window", .seqlen_q = 40, .seqlen_k = 400, .heads_q = 5, .page_size = 40, .mask = W, .window_left = 100, .window_right = 9},
    {.name = "pages of 64, window", .batch = 2, .seqlen_q = 30, .seqlen_k = 500, .heads_q = 16, .page_size = 64, .mask = W, .window_left = 77, .window_right = 0,
     .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 64, pairs that stay, as many tiles as slots", .batch = 20, .seqlen_q = 1, .seqlen_k = 576, .heads_q = 128, .page_size = 64, .num_splits = 4},
    {.name = "pages of 48, blocks that stay, no boxes of Q", .batch = 12, .seqlen_q = 3, .seqlen_k = 240, .heads_q = 21, .page_size = 48, .mask = C},
    {.name = "pages of 16, most queries see nothing", .batch = 2, .seqlen_q = 200, .seqlen_k = 32, .heads_q = 16, .page_size = 16, .mask = C},
    {.name = "pages of 128, no boxes of Q", .batch = 3, .seqlen_q = 3, .seqlen_k = 401, .heads_q = 21, .page_size = 128, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 256, varlen queries", .batch = 4, .seqlen_q = 6, .seqlen_k = 512, .heads_q = 16, .page_size = 256, .varlen_q = LENGTHS_MIXED,
     .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen", .batch = 5, .seqlen_q = 40, .seqlen_k = 200, .heads_q = 8, .varlen_q = LENGTHS_MIXED, .varlen_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen, holes, parts", .batch = 6, .seqlen_q = 3, .seqlen_k = 600, .heads_q = 32, .varlen_q = LENGTHS_HOLES, .varlen_k = LENGTHS_HOLES},
    {.name = "used lengths", .batch = 5, .seqlen_q = 4, .seqlen_k = 300, .heads_q = 16, .seqused_q = LENGTHS_HOLES, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "left padding", .batch = 4, .seqlen_q = 2, .seqlen_k = 300, .heads_q = 16, .leftpad = true},
    {.name = "cache", .batch = 4, .seqlen_q = 2, .seqlen_k = 300, .heads_q = 16, .mask = C, .cache_batch_idx = true, .seqused_k = LENGTHS_MIXED},
    {.name = "heads first", .batch = 2, .seqlen_q = 5, .seqlen_k = 130, .heads_q = 8, .heads_k = 2, .layout = LAYOUT_HEADS_FIRST},
    {.name = "o in float32", .batch = 2, .seqlen_q = 2, .seqlen_k = 130, .heads_q = 16, .o_f32 = true, .mask = C},
    {.name = "many tiles in one part", .batch = 6, .seqlen_q = 1, .seqlen_k = 4096, .heads_q = 16, .num_splits = 1},
    {.name = "pairs that stay, parts of as many tiles as slots", .batch = 20, .seqlen_q = 1, .seqlen_k = 576, .heads_q = 128, .num_splits = 4},
    {.name = "so many parts", .seqlen_q = 1, .seqlen_k = 500, .heads_q = 16, .num_splits = 5},
    {.name = "parts by the batch", .batch = 3, .seqlen_q = 2, .seqlen_k = 1200, .heads_q = 16, .num_splits = -1, .mask = C, .seqused_k = LENGTHS_MIXED},
    {.name = "large logits", .seqlen_q = 2, .seqlen_k = 400, .heads_q = 16, .logit_size = 30.0f},
    {.name = "maxima that jump", .batch = 2, .seqlen_q = 2, .seqlen_k = 500, .heads_q = 16, .logit_size = 200.0f, .mask = C},
    {.name = "far logits", .seqlen_q = 2, .seqlen_k = 200, .heads_q = 16, .logit_size = 3e9f, .mask = C},
    {.name = "far logits, parts", .seqlen_q = 1, .seqlen_k = 600, .heads_q = 4, .logit_size = 3e9f},
    {.name = "512 and 512 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 512, .head_dim_v = 512, .mask = C},
    {.name = "320 and 256 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 320, .head_dim_v = 256, .mask = C},
    {.name = "264 and 8 columns", .seqlen_q = 3, .seqlen_k = 200, .heads_q = 16, .head_dim = 264, .head_dim_v = 8, .mask = C},
};

int main(int argc, char **argv)
{
    const packed_rows latent = {"forward_latent_sm90", "cuda_latent", shapes, sizeof shapes / sizeof *shapes, 576, 512, true};
    const packed_rows wide   = {"forward_wide_sm90", "cuda_wide", shapes, sizeof shapes / sizeof *shapes, 512, 512, false};
    if (argc > 1 && strcmp(argv[1], "--wide") == 0) {
        argv[1] = argv[0];
        return packed_rows_test(&wide, argc - 1, argv + 1);
    }
    return packed_rows_test(&latent, argc, argv);
}
