/* Hopper's kernel for few queries against the reference, by its name, so that nothing else can answer; skipped, with the reason, where there is no GPU of compute
 * capability 9.0. */
#include "packed_rows.h"

#define C FLASH_ATTN_CAUSAL
#define W FLASH_ATTN_WINDOW
#define GROUP(q, k) .heads_q = (q), .heads_k = (k)
#define D(d) .head_dim = (d), .head_dim_v = (d)
/* More than eight rows of a key head, tiles of 64 and, where there are more (at 64 columns more than 64 of 128, else 16), of 128; an even and an odd number of tiles of keys, tails, one part and several, rows of several heads and
 * queries in a tile, keys that are nobody's (NaN in the case's memory). head_dim 128 where a shape names none. */
static const test_case shapes[] = {
    {.name = "16 queries", .batch = 2, .seqlen_q = 16, .seqlen_k = 256, GROUP(8, 2), .num_splits = 1},
    {.name = "16 queries, parts", .batch = 2, .seqlen_q = 16, .seqlen_k = 1100, GROUP(8, 2), .mask = C},
    {.name = "16 queries, 64 columns", .batch = 2, .seqlen_q = 16, .seqlen_k = 300, GROUP(8, 2), D(64), .mask = C},
    {.name = "16 queries, 256 columns", .batch = 2, .seqlen_q = 16, .seqlen_k = 300, GROUP(8, 2), D(256), .mask = C},
    {.name = "nine rows", .batch = 3, .seqlen_q = 3, .seqlen_k = 330, GROUP(6, 2), .mask = C},
    {.name = "four queries, a tail", .batch = 2, .seqlen_q = 4, .seqlen_k = 147, GROUP(16, 2), .mask = C},
    {.name = "one query of 64 heads", .batch = 3, .seqlen_q = 1, .seqlen_k = 500, .heads_q = 64},
    {.name = "one query of 256 heads", .seqlen_q = 1, .seqlen_k = 200, .heads_q = 256},
    {.name = "a group that divides nothing", .batch = 2, .seqlen_q = 7, .seqlen_k = 200, GROUP(14, 2), .mask = C},
    {.name = "a group that divides nothing, many rows, parts", .batch = 5, .seqlen_q = 50, .seqlen_k = 700, GROUP(6, 2), .mask = C, .num_splits = 2},
    {.name = "one head", .batch = 17, .seqlen_q = 100, .seqlen_k = 333, .heads_q = 1, .mask = C},
    {.name = "one head, 17 queries", .batch = 3, .seqlen_q = 17, .seqlen_k = 65, .heads_q = 1},
    {.name = "128 queries", .seqlen_q = 128, .seqlen_k = 400, GROUP(4, 2), .mask = C},
    {.name = "128 queries, 64 columns, parts", .batch = 17, .seqlen_q = 128, .seqlen_k = 900, GROUP(4, 2), D(64), .mask = C},
    {.name = "128 queries, 256 columns", .batch = 5, .seqlen_q = 128, .seqlen_k = 200, GROUP(4, 2), D(256)},
    {.name = "300 queries in parts", .batch = 4, .seqlen_q = 300, .seqlen_k = 500, GROUP(2, 1), .mask = C, .num_splits = 3},
    {.name = "as many tiles as there are stages", .batch = 5, .seqlen_q = 20, .seqlen_k = 192, GROUP(2, 1), .num_splits = 1},
    {.name = "more parts than fold.cu has places", .batch = 5, .seqlen_q = 16, .seqlen_k = 2560, GROUP(4, 1), .mask = W, .window_left = 1200, .window_right = -1, .num_splits = 40},
    {.name = "three groups of parts", .batch = 4, .seqlen_q = 5, .seqlen_k = 8300, GROUP(4, 1), D(64), .mask = C},
    {.name = "groups of parts, window", .batch = 4, .seqlen_q = 30, .seqlen_k = 8300, GROUP(4, 1), D(64), .mask = W, .window_left = 7000, .window_right = -1},
    {.name = "many tiles in one part", .batch = 5, .seqlen_q = 20, .seqlen_k = 1500, GROUP(4, 2), .num_splits = 1},
    {.name = "blocks that stay, no boxes of Q", .batch = 9, .seqlen_q = 20, .seqlen_k = 200, GROUP(6, 2), .mask = C},
    {.name = "one key", .seqlen_q = 20, .seqlen_k = 1, GROUP(8, 2)},
    {.name = "no key", .seqlen_q = 20, .seqlen_k = 0, GROUP(8, 2)},
    {.name = "no key, parts by the batch", .seqlen_q = 20, .seqlen_k = 0, GROUP(8, 2), .num_splits = -1},
    {.name = "more queries than keys", .seqlen_q = 90, .seqlen_k = 40, GROUP(4, 2), .mask = C},
    {.name = "window", .batch = 5, .seqlen_q = 100, .seqlen_k = 400, GROUP(4, 2), .mask = W, .window_left = 130, .window_right = 20},
    {.name = "window of one", .seqlen_q = 70, .seqlen_k = 70, GROUP(2, 1), .mask = W},
    {.name = "window past the keys", .seqlen_q = 120, .seqlen_k = 60, GROUP(2, 1), .mask = W, .window_left = 40, .window_right = 3},
    {.name = "window, parts", .batch = 2, .seqlen_q = 8, .seqlen_k = 900, GROUP(8, 2), .mask = W, .window_left = 300, .num_splits = 4},
    {.name = "sinks", .batch = 2, .seqlen_q = 9, .seqlen_k = 300, GROUP(8, 2), .mask = C, .sinks = true, .num_splits = 1},
    {.name = "sinks, parts", .seqlen_q = 9, .seqlen_k = 700, GROUP(8, 2), .sinks = true},
    {.name = "pages of 64", .batch = 3, .seqlen_q = 16, .seqlen_k = 300, GROUP(8, 2), .page_size = 64, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 16, parts", .batch = 3, .seqlen_q = 5, .seqlen_k = 700, GROUP(8, 2), .page_size = 16, .seqused_k = LENGTHS_HOLES, .mask = C},
    {.name = "pages of 8, heads first", .batch = 2, .seqlen_q = 9, .seqlen_k = 200, GROUP(8, 2), .page_size = 8, .layout = LAYOUT_HEADS_FIRST, .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 24, 64 columns", .batch = 2, .seqlen_q = 9, .seqlen_k = 333, GROUP(8, 2), D(64), .page_size = 24, .num_splits = 2, .seqused_k = LENGTHS_MIXED},
    {.name = "pages of 40, window, 256 columns", .batch = 9, .seqlen_q = 40, .seqlen_k = 400, GROUP(4, 2), D(256), .page_size = 40, .mask = W, .window_left = 100, .window_right = 9},
    {.name = "pages of 256, many rows, varlen queries", .batch = 5, .seqlen_q = 60, .seqlen_k = 512, GROUP(8, 2), .page_size = 256, .varlen_q = LENGTHS_MIXED,
     .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "pages of 128, blocks that stay", .batch = 9, .seqlen_q = 40, .seqlen_k = 384, GROUP(4, 2), .page_size = 128, .num_splits = 2, .mask = C},
    {.name = "pages of 32, a group that divides nothing", .batch = 3, .seqlen_q = 7, .seqlen_k = 300, GROUP(10, 2), .page_size = 32, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen", .batch = 5, .seqlen_q = 40, .seqlen_k = 200, GROUP(4, 2), .varlen_q = LENGTHS_MIXED, .varlen_k = LENGTHS_MIXED, .mask = C},
    {.name = "varlen, holes, parts", .batch = 6, .seqlen_q = 13, .seqlen_k = 600, GROUP(8, 2), .varlen_q = LENGTHS_HOLES, .varlen_k = LENGTHS_HOLES},
    {.name = "used lengths", .batch = 5, .seqlen_q = 14, .seqlen_k = 300, GROUP(4, 2), .seqused_q = LENGTHS_HOLES, .seqused_k = LENGTHS_MIXED, .mask = C},
    {.name = "left padding", .batch = 4, .seqlen_q = 12, .seqlen_k = 300, GROUP(8, 2), .leftpad = true},
    {.name = "cache", .batch = 4, .seqlen_q = 12, .seqlen_k = 300, GROUP(8, 2), .mask = C, .cache_batch_idx = true, .seqused_k = LENGTHS_MIXED},
    {.name = "heads first", .batch = 2, .seqlen_q = 15, .seqlen_k = 130, GROUP(8, 2), .layout = LAYOUT_HEADS_FIRST},
    {.name = "o in float32", .batch = 2, .seqlen_q = 12, .seqlen_k = 130, GROUP(8, 2), .o_f32 = true, .mask = C},
    {.name = "o in float32, parts", .batch = 2, .seqlen_q = 12, .seqlen_k = 900, GROUP(8, 2), .o_f32 = true, .mask = C},
    {.name = "so many parts", .seqlen_q = 20, .seqlen_k = 500, GROUP(4, 2), .num_splits = 5},
    {.name = "parts by the batch", .batch = 3, .seqlen_q = 12, .seqlen_k = 1200, GROUP(8, 2), .num_splits = -1, .mask = C, .seqused_k = LENGTHS_MIXED},
    {.name = "large logits", .seqlen_q = 20, .seqlen_k = 400, GROUP(4, 2), .logit_size = 30.0f},
    {.name = "maxima that jump", .batch = 2, .seqlen_q = 20, .seqlen_k = 500, GROUP(4, 2), .logit_size = 200.0f, .mask = C},
    {.name = "far logits", .seqlen_q = 20, .seqlen_k = 200, GROUP(4, 2), .logit_size = 3e9f, .mask = C},
    {.name = "far logits, parts", .seqlen_q = 10, .seqlen_k = 600, GROUP(4, 2), .logit_size = 3e9f, .num_splits = 2},
    {.name = "96 and 64 columns", .seqlen_q = 30, .seqlen_k = 200, GROUP(4, 2), .head_dim = 96, .head_dim_v = 64, .mask = C},
    {.name = "192 and 128 columns", .seqlen_q = 30, .seqlen_k = 200, GROUP(4, 2), .head_dim = 192, .head_dim_v = 128, .mask = C},
    {.name = "40 and 200 columns", .seqlen_q = 30, .seqlen_k = 200, GROUP(4, 2), .head_dim = 40, .head_dim_v = 200, .mask = C},
};

int main(int argc, char **argv)
{
    const packed_rows few = {"forward_few_sm90", "cuda_few", shapes, sizeof shapes / sizeof *shapes, 128, 128, false};
    return packed_rows_test(&few, argc, argv);
}
