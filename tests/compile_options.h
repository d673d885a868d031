/* test_cuda_compile.c: the options of a problem, each with what sets it and where it is built. */
#ifndef COMPILE_OPTIONS_H
#define COMPILE_OPTIONS_H

#include "harness.h"

/* The rows of 9.0 on which an option is built. That its text builds shows on the quickest ones; that nothing spills, on those whose
 * registers it may exhaust (decision 0063). */
enum rows { EVERY_ROW, ROWS_OF_16_BIT, TIGHT_ROWS /* of the forward in 16 bits, which accept spills */, HEAD_DIM_64 /* as all have */, FEW_ROWS /* of forward_few_sm90 */ };

typedef struct option {
    const char *name;
    bool        forward, backward; /* passes that have it */
    void (*set)(flash_attn_problem *p, flash_attn_grads *g);
    enum rows   rows;
} option;

static int32_t          some_int32[64]; /* an address; never read */
static flash_attn_slice some_slices[2] = {{0, 2, 0, 64, FLASH_ATTN_SLICE_FULL}, {2, 4, 64, 128, FLASH_ATTN_SLICE_CAUSAL}};

static void set_nothing(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)p;
    (void)g;
}
static void set_full(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->mask        = FLASH_ATTN_NONE;
    p->window_left = p->window_right = 0; /* rows of windows alone begin with one */
}
static void set_window(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->mask         = FLASH_ATTN_WINDOW;
    p->window_left  = 100;
    p->window_right = 0;
}
static void set_softcap(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->softcap = 30.0f;
}
static void set_bias(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->bias = (flash_attn_tensor){.dtype = p->q.dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_F32 : p->q.dtype, .shape = {1, p->q.shape[2], p->q.shape[1], p->k.shape[1]}};
}
static void set_bias_f32(flash_attn_problem *p, flash_attn_grads *g)
{
    set_bias(p, g);
    p->bias.dtype = FLASH_ATTN_F32;
}
static void set_dbias(flash_attn_problem *p, flash_attn_grads *g)
{
    set_bias(p, g);
    g->dbias = p->bias;
}
static void set_bias_of_all_heads(flash_attn_problem *p, flash_attn_grads *g)
{
    set_bias(p, g);
    p->bias.shape[1] = 1;
}
static void set_alibi(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->alibi_slopes = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, p->q.shape[2], 1, 1}};
}
static void set_sinks(flash_attn_problem *p, flash_attn_grads *g)
{
    p->sinks  = (flash_attn_tensor){.dtype = FLASH_ATTN_F32, .shape = {1, p->q.shape[2], 1, 1}};
    g->dsinks = p->sinks;
}
static void set_dropout(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->dropout = (flash_attn_dropout){.p = 0.1f, .seed = 1};
}
static void set_slices(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->slices = (flash_attn_slices){.list = some_slices, .count = 2};
}
static void set_slices_dropout(flash_attn_problem *p, flash_attn_grads *g)
{
    set_slices(p, g);
    set_dropout(p, g);
}
static void set_slices_softcap(flash_attn_problem *p, flash_attn_grads *g)
{
    set_slices(p, g);
    set_softcap(p, g);
}
/* So few queries that slices are looked at one by one. */
static void set_slices_few(flash_attn_problem *p, flash_attn_grads *g)
{
    set_slices(p, g);
    p->q.shape[1] = 64;
    p->k.shape[1] = p->v.shape[1] = 128;
    if (p->bias.shape[3] > 0)
        set_bias(p, g);
}
static void set_varlen(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->q.shape[1] *= p->q.shape[0];
    p->k.shape[1] *= p->k.shape[0];
    p->batch      = (int32_t)p->q.shape[0];
    p->q.shape[0] = p->k.shape[0] = 1;
    p->v.shape[0] = 1;
    p->v.shape[1] = p->k.shape[1];
    p->max_seqlen_q = p->max_seqlen_k = 128;
    p->cu_seqlens_q = p->cu_seqlens_k = some_int32;
}
static void set_paged(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->pages      = (flash_attn_pages){.table = some_int32, .pages_per_seq = 8};
    p->k.shape[1] = p->v.shape[1] = 16;
}
static void set_many_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_paged(p, g);
    p->pages.pages_per_seq = 512;
}
static void set_split(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->num_splits = 4;
    p->k.shape[1] = p->v.shape[1] = 8192;
}
static void set_few_heads_k(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->k.shape[2] = p->v.shape[2] = 1;
}
static void set_uneven(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->q.shape[3] -= 8;
    p->k.shape[3] -= 8;
    p->v.shape[3] -= 16;
}
static void set_odd(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->q.shape[3] -= 1;
    p->k.shape[3] -= 1;
    p->v.shape[3] -= 1;
}
static void set_o_f32(flash_attn_problem *p, flash_attn_grads *g)
{
    p->o.dtype = FLASH_ATTN_F32;
    g->dout.dtype = g->dq.dtype = g->dk.dtype = g->dv.dtype = FLASH_ATTN_F32;
}
static void set_deterministic(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->deterministic = true;
}

/* So many sequences that a block has all parts of its rows. */
static void set_split_many(flash_attn_problem *p, flash_attn_grads *g)
{
    set_split(p, g);
    p->q.shape[0] = p->k.shape[0] = p->v.shape[0] = 64;
}
static void set_split_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_split_many(p, g);
    set_many_pages(p, g);
}
/* Few queries on Hopper: a block folds all parts, or a group of them. */
static void set_whole(flash_attn_problem *p, flash_attn_grads *g)
{
    set_split_many(p, g);
    p->num_splits = 0;
}
static void set_groups(flash_attn_problem *p, flash_attn_grads *g)
{
    set_whole(p, g);
    p->q.shape[0] = p->k.shape[0] = p->v.shape[0] = 16;
}
static void set_whole_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_split_pages(p, g);
    p->num_splits = 0;
}
/* So many queries that tiles of all heads of a key head are fewer than tiles of one. */
static void set_grouped(flash_attn_problem *p, flash_attn_grads *g)
{
    p->k.shape[2] = p->v.shape[2] = 1;
    p->q.shape[1] = 140;
    if (p->bias.shape[3] > 0)
        set_bias(p, g);
}
static void set_grouped_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_grouped(p, g);
    set_paged(p, g);
}
static void set_grouped_split(flash_attn_problem *p, flash_attn_grads *g)
{
    set_split(p, g);
    set_grouped(p, g);
}
static void set_grouped_split_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_grouped_split(p, g);
    set_many_pages(p, g);
}
/* So many of these sequences that a block walks all parts of its tile. */
static void set_walked(flash_attn_problem *p, flash_attn_grads *g)
{
    set_grouped_split(p, g);
    p->num_splits = 0;
    p->q.shape[0] = p->k.shape[0] = p->v.shape[0] = 64;
}
static void set_walked_pages(flash_attn_problem *p, flash_attn_grads *g)
{
    set_walked(p, g);
    set_many_pages(p, g);
}
/* The backward in one launch, and in three where a row for few queries would take one. */
static void set_small(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->q.shape[1] = 128;
    p->k.shape[1] = p->v.shape[1] = 64; /* one block a key head, before Hopper */
}
static void set_many(flash_attn_problem *p, flash_attn_grads *g)
{
    (void)g;
    p->q.shape[0] = p->k.shape[0] = p->v.shape[0] = 1024;
}

/* clang-format off */
static const option options[] = {
    {"causal", true, true, set_nothing, EVERY_ROW}, {"full", true, true, set_full, EVERY_ROW},
    {"window", true, true, set_window, EVERY_ROW}, {"softcap", true, true, set_softcap, ROWS_OF_16_BIT},
    {"bias", true, true, set_bias, ROWS_OF_16_BIT}, {"bias_f32", true, true, set_bias_f32, HEAD_DIM_64}, {"bias_heads", true, false, set_bias_of_all_heads, FEW_ROWS},
    {"dbias", false, true, set_dbias, ROWS_OF_16_BIT}, {"alibi", true, true, set_alibi, HEAD_DIM_64},
    {"sinks", true, true, set_sinks, HEAD_DIM_64}, {"dropout", true, true, set_dropout, EVERY_ROW},
    {"slices", true, true, set_slices, HEAD_DIM_64}, {"slices_dropout", true, true, set_slices_dropout, HEAD_DIM_64}, {"slices_softcap", true, true, set_slices_softcap, HEAD_DIM_64},
    {"slices_few", true, true, set_slices_few, HEAD_DIM_64}, {"varlen", true, true, set_varlen, HEAD_DIM_64},
    {"paged", true, false, set_paged, ROWS_OF_16_BIT}, {"split", true, false, set_split, TIGHT_ROWS},
    {"split_many", true, false, set_split_many, ROWS_OF_16_BIT}, {"split_pages", true, false, set_split_pages, HEAD_DIM_64},
    {"whole", true, false, set_whole, FEW_ROWS}, {"groups", true, false, set_groups, FEW_ROWS}, {"whole_pages", true, false, set_whole_pages, FEW_ROWS},
    {"grouped", true, false, set_grouped, ROWS_OF_16_BIT}, {"grouped_pages", true, false, set_grouped_pages, HEAD_DIM_64},
    {"grouped_split", true, false, set_grouped_split, ROWS_OF_16_BIT}, {"grouped_split_pages", true, false, set_grouped_split_pages, HEAD_DIM_64},
    {"walked", true, false, set_walked, ROWS_OF_16_BIT}, {"walked_pages", true, false, set_walked_pages, HEAD_DIM_64},
    {"few_heads_k", true, true, set_few_heads_k, HEAD_DIM_64}, {"uneven_d", true, true, set_uneven, TIGHT_ROWS},
    {"odd_d", true, true, set_odd, ROWS_OF_16_BIT}, {"o_f32", true, true, set_o_f32, HEAD_DIM_64},
    {"deterministic", false, true, set_deterministic, HEAD_DIM_64}, {"small", false, true, set_small, EVERY_ROW},
    {"many", false, true, set_many, EVERY_ROW},
};
/* clang-format on */
enum { NUM_OPTIONS = sizeof options / sizeof *options };

#endif
