/*
 * Every choice of the CPU backend that is data, in one place: the tiles of each table of kernels, which table runs
 * sequences of which length, how much of a cache a block takes, how short a part of a long sequence may be. Each row
 * says why. `flashattn tune` measures on a machine what may be better there (tuning.c keeps it), and comes first.
 *
 * Tiles and tables may depend on a call's type, head dims and the sequence's own length, on nothing else, or a
 * sequence's bits would.
 */
#include "cpu/passes.h"
#include "cpu/tile.h"

#include <limits.h>

enum { FORWARD = FLASH_ATTN_FORWARD, BACKWARD = FLASH_ATTN_BACKWARD };

/* Rows are tried in turn; head_dim: the larger of head_dim and head_dim_v, up to this. */
static const struct {
    fa_table      table;
    int           pass, head_dim;
    fa_tile_shape tile;
} tiles[] = {
    /* One tile of K or V, of S, and of Q fit the second-level cache side by side; the kernels' own working set, a panel
     * of 64 keys, the first. 96 is a multiple of the register block's 6 rows. Beyond 128 columns half as many keys. 20
     * other shapes were within 3% (docs/cpu-speed.md). */
    {FA_TABLE_AVX512, FORWARD, 128, {96, 128}},
    /* Beyond 256 columns, which latent attention has, K is read by many heads at once: with one or two queries they are
     * one tile, so that it is packed, or read in place, once, and parts of the keys are tasks (0071). */
    {FA_TABLE_AVX512, FORWARD, 256, {96, 64}},
    {FA_TABLE_AVX512, FORWARD, INT_MAX, {256, 64}},
    {FA_TABLE_AVX512, BACKWARD, 128, {96, 128}},
    {FA_TABLE_AVX512, BACKWARD, INT_MAX, {96, 64}},
    /* Operands are half as large, and take half the time before O, or a tile of queries from the third level, moves again
     * (0067). */
    {FA_TABLE_AVX512_BF16, FORWARD, 128, {96, 256}},
    {FA_TABLE_AVX512_BF16, FORWARD, 256, {96, 128}},
    {FA_TABLE_AVX512_BF16, FORWARD, INT_MAX, {256, 128}},
    {FA_TABLE_AVX512_BF16, BACKWARD, 128, {96, 256}},
    {FA_TABLE_AVX512_BF16, BACKWARD, INT_MAX, {96, 128}},
    {FA_TABLE_AVX2, FORWARD, 128, {96, 128}},
    {FA_TABLE_AVX2, FORWARD, INT_MAX, {96, 64}},
    {FA_TABLE_AVX2, BACKWARD, 128, {96, 128}},
    {FA_TABLE_AVX2, BACKWARD, INT_MAX, {96, 64}},
    {FA_TABLE_NEON, FORWARD, 128, {96, 128}},
    {FA_TABLE_NEON, FORWARD, INT_MAX, {96, 64}},
    {FA_TABLE_NEON, BACKWARD, 128, {96, 128}},
    {FA_TABLE_NEON, BACKWARD, INT_MAX, {96, 64}},
    {FA_TABLE_NEON_BF16, FORWARD, 128, {96, 128}},
    {FA_TABLE_NEON_BF16, FORWARD, INT_MAX, {96, 64}},
    {FA_TABLE_NEON_BF16, BACKWARD, 128, {96, 128}},
    {FA_TABLE_NEON_BF16, BACKWARD, INT_MAX, {96, 64}},
    {FA_TABLE_SCALAR, FORWARD, INT_MAX, {48, 64}},
    {FA_TABLE_SCALAR, BACKWARD, INT_MAX, {48, 64}},
    /* Many units of 32 x 32 a call keep the fused kernel's pipeline full, and O moves once a call or two (0030). */
    {FA_TABLE_AMX_BF16, FORWARD, 128, {128, 1024}},
    {FA_TABLE_AMX_BF16, FORWARD, 256, {128, 512}},
    /* As AVX512_BF16's: one or two queries of 128 heads are a tile. */
    {FA_TABLE_AMX_BF16, FORWARD, INT_MAX, {256, 512}},
    /* More queries halve the traffic of dK and dV through the second-level cache, more keys that of Q, dO and dQ from
     * the third, where the second still holds a tile's operands (0032). */
    {FA_TABLE_AMX_BF16, BACKWARD, 64, {256, 512}},
    {FA_TABLE_AMX_BF16, BACKWARD, INT_MAX, {256, 256}},
    /* Pieces make an operand two or three times larger. */
    {FA_TABLE_AMX_F16, FORWARD, 64, {128, 1024}},
    {FA_TABLE_AMX_F16, FORWARD, 128, {128, 512}},
    {FA_TABLE_AMX_F16, FORWARD, INT_MAX, {128, 256}},
    {FA_TABLE_AMX_F16, BACKWARD, 64, {128, 512}},
    {FA_TABLE_AMX_F16, BACKWARD, INT_MAX, {128, 256}},
    {FA_TABLE_AMX_F32, FORWARD, 128, {128, 512}},
    {FA_TABLE_AMX_F32, FORWARD, INT_MAX, {128, 256}},
    /* P and dS are those of a part of 128 keys, so that 512 keys' operands still fit. */
    {FA_TABLE_AMX_F32, BACKWARD, 64, {128, 512}},
    {FA_TABLE_AMX_F32, BACKWARD, INT_MAX, {128, 256}},
    /* As large as bfloat16, and as fast. */
    {FA_TABLE_AMX_FP16, FORWARD, 64, {128, 1024}},
    {FA_TABLE_AMX_FP16, FORWARD, INT_MAX, {128, 512}},
    {FA_TABLE_AMX_FP16, BACKWARD, 64, {256, 512}},
    {FA_TABLE_AMX_FP16, BACKWARD, INT_MAX, {256, 256}},
};

/* float32 and float16 run on AMX as pieces of bfloat16, which are more work to pack: that pays where a packed row meets
 * enough others. `same`: queries, on as many keys, for which both tables take the same time, by pass (decision 0051).
 */
static const struct {
    flash_attn_dtype dtype;
    int              head_dim, same[2];
} pieces[] = {{FLASH_ATTN_F32, 32, {64, 448}},
              {FLASH_ATTN_F32, INT_MAX, {56, 288}},
              {FLASH_ATTN_F16, 32, {56, 96}},
              {FLASH_ATTN_F16, INT_MAX, {32, 96}}};

/* Head dims that share a measured tile. */
static const int class_most[FA_HEAD_CLASSES] = {64, 128, 256};

enum {
    /* Of the second-level cache, for the forward's Q and O; the rest is for packed keys and scores. */
    BLOCK_L2_PERCENT = 50,
    /* But without AMX that cache has 256 KB to 1 MB, and to read Q and O from the third level costs less than to pack keys
     * for each 200 or 700 rows (0065, 0067). */
    LEAST_BLOCK_ROWS = 1152,
    /* Where heads lie side by side a page of memory holds rows of several. A head's K touches so many pages that with Q, V
     * and O the processor has forgotten them when the next head comes (a second-level TLB has 2048), unless the keys
     * of all heads are packed tile by tile first. That pays where so many queries, in tiles, use them again. Measured
     * without AMX (0065, 0067). */
    LEAST_HEAD_PAGES = 512,
    LEAST_SHARING_TILES = 5,
    /* Where few queries meet long keys. Parts are short because tasks of the same keys follow one another: where heads
     * lie side by side, K and V of all heads over one part's keys then stay in the second-level cache, with what the
     * processor has read beside each row. Shorter ones cost more to hand out and fold than they bring. */
    LEAST_SPLIT_KEYS = 256,
    /* So many rows pay for handing a part out, and a part's result is memory for each; so more have longer parts, up to
     * four times. */
    SPLIT_ROWS = 32,
};

/* ---- looking up ---- */

static int64_t widest_head(const fa_call *call)
{
    return call->head_dim > call->head_dim_v ? call->head_dim : call->head_dim_v;
}

fa_table fa_table_of(const fa_kernels *kernels, flash_attn_dtype dtype)
{
    switch (kernels->isa) {
    case FLASH_ATTN_ISA_NEON: return FA_TABLE_NEON;
    case FLASH_ATTN_ISA_NEON_BF16: return FA_TABLE_NEON_BF16;
    case FLASH_ATTN_ISA_AVX2: return FA_TABLE_AVX2;
    case FLASH_ATTN_ISA_AVX512: return FA_TABLE_AVX512;
    case FLASH_ATTN_ISA_AVX512_BF16: return FA_TABLE_AVX512_BF16;
    case FLASH_ATTN_ISA_AMX:
        return dtype == FLASH_ATTN_F32   ? FA_TABLE_AMX_F32
               : dtype == FLASH_ATTN_F16 ? FA_TABLE_AMX_F16
                                         : FA_TABLE_AMX_BF16;
    case FLASH_ATTN_ISA_AMX_FP16: return FA_TABLE_AMX_FP16;
    default: return FA_TABLE_SCALAR;
    }
}

int fa_head_class_most(int head_class) { return class_most[head_class]; }

int fa_head_class(int64_t head_dim)
{
    int head_class = 0;
    while (head_class < FA_HEAD_CLASSES && head_dim > class_most[head_class])
        head_class++;
    return head_class;
}

fa_tile_shape fa_usual_tile(fa_table table, flash_attn_pass pass, int64_t head_dim)
{
    size_t n = 0;
    while (tiles[n].table != table || tiles[n].pass != (int)pass || head_dim > tiles[n].head_dim)
        n++; /* every table and pass ends with a row for all head dims */
    return tiles[n].tile;
}

/* {0, 0}: nothing was measured. */
static fa_tile_shape measured_tile(const fa_cpu *cpu, const fa_kernels *kernels, const fa_call *call)
{
    int head_class = fa_head_class(widest_head(call));
    return head_class < FA_HEAD_CLASSES ? cpu->tuning.tile[fa_table_of(kernels, call->q.dtype)][call->pass][head_class]
                                        : (fa_tile_shape){0, 0};
}

fa_tile_shape fa_tiles(const fa_cpu *cpu, const fa_kernels *kernels, const fa_call *call)
{
    fa_tile_shape measured = measured_tile(cpu, kernels, call);
    return measured.q ? measured : fa_usual_tile(fa_table_of(kernels, call->q.dtype), call->pass, widest_head(call));
}

const char *fa_tiles_origin(const fa_cpu *cpu, const fa_kernels *kernels, const fa_call *call)
{
    return measured_tile(cpu, kernels, call).q ? ", tiles measured on this machine" : "";
}

int fa_block_l2_percent(const fa_cpu *cpu)
{
    return cpu->tuning.block_l2_percent ? cpu->tuning.block_l2_percent : BLOCK_L2_PERCENT;
}

/* A table of vector instructions, measured on AMD's processors. */
static bool is_vectors(const fa_kernels *kernels)
{
    return kernels->isa == FLASH_ATTN_ISA_AVX2 || kernels->isa == FLASH_ATTN_ISA_AVX512 ||
           kernels->isa == FLASH_ATTN_ISA_AVX512_BF16;
}

int fa_least_block_rows(const fa_cpu *cpu, const fa_kernels *kernels)
{
    return is_vectors(kernels) && !cpu->tuning.block_l2_percent ? LEAST_BLOCK_ROWS : 0;
}

bool fa_packs_heads_together(const fa_kernels *kernels, int64_t pages, int64_t tiles)
{
    return is_vectors(kernels) && pages >= LEAST_HEAD_PAGES && tiles >= LEAST_SHARING_TILES;
}

int fa_least_split_keys(const fa_cpu *cpu, int64_t rows)
{
    int least = cpu->tuning.split_keys ? cpu->tuning.split_keys : LEAST_SPLIT_KEYS, times = (int)(rows / SPLIT_ROWS);
    return least * fa_max_int(1, fa_min_int(times, 4));
}

/* dtype: whose table `table` is. */
static const fa_kernels *kernels_by_shape(const fa_cpu *cpu, const fa_call *call, flash_attn_dtype dtype,
                                          const fa_kernels *table, flash_attn_pass pass, int64_t rows, int64_t keys)
{
    size_t n = 0, count = sizeof pieces / sizeof *pieces;
    if (!cpu->by_shape || table->isa == FLASH_ATTN_ISA_AMX_FP16) /* no pieces */
        return table;
    while (n < count && (pieces[n].dtype != dtype || widest_head(call) > pieces[n].head_dim))
        n++;
    /* Packing costs in proportion to the queries and twice the keys, products to queries times keys. */
    bool pays = n == count || 3 * rows * keys >= pieces[n].same[pass] * (rows + 2 * keys);
    return pays ? table : cpu->vector;
}

/* A float32 output of float16 would show that two pieces of P are 16 bits of it. */
static flash_attn_dtype forward_dtype(const fa_call *call)
{
    return call->q.dtype == FLASH_ATTN_F16 && call->o.dtype == FLASH_ATTN_F32 ? FLASH_ATTN_F32 : call->q.dtype;
}

/* Fewer keys do not pay for what packing must find out. */
#define LEAST_FIXED_KEYS 512

/* P in fixed point is as good as bfloat16, but its sum is no LSE, and options need S and V as they lie. */
static bool takes_fixed_p(const fa_cpu *cpu, const fa_call *call)
{
    bool options = fa_has_options(call, call->scale) || call->slices.count || call->dropout.threshold;
    return cpu->fixed && call->q.dtype == FLASH_ATTN_BF16 && !call->lse.data && !options && !call->descale_q.data &&
           !call->descale_k.data && widest_head(call) <= FA_FIXED_HEAD_DIM;
}

const fa_kernels *fa_forward_kernels(const fa_cpu *cpu, const fa_call *call, int64_t rows, int64_t keys)
{
    flash_attn_dtype  dtype = forward_dtype(call);
    const fa_kernels *found = kernels_by_shape(cpu, call, dtype, cpu->kernels[dtype], FLASH_ATTN_FORWARD, rows, keys);
    bool              fixed = found != cpu->vector && keys >= LEAST_FIXED_KEYS && takes_fixed_p(cpu, call);
    return fixed ? cpu->fixed : found;
}

const fa_kernels *fa_forward_table(const fa_cpu *cpu, const fa_call *call) { return cpu->kernels[forward_dtype(call)]; }

/* A float32 dO of float16 is more than one piece holds, and a float32 gradient would show that P and dS are float16. */
static const fa_kernels *backward_table(const fa_cpu *cpu, const fa_call *call)
{
    const flash_attn_tensor *others[] = {&call->dout, &call->dq, &call->dk, &call->dv};
    bool                     wide     = false;
    for (int n = 0; n < 4; n++)
        wide |= others[n]->data && others[n]->dtype == FLASH_ATTN_F32;
    return wide && call->q.dtype == FLASH_ATTN_F16 && cpu->wide_f16 ? cpu->wide_f16 : cpu->kernels[call->q.dtype];
}

/* dbias adds up sequences of all lengths, with one table. */
const fa_kernels *fa_backward_kernels(const fa_cpu *cpu, const fa_call *call, int64_t rows, int64_t keys)
{
    if (call->dbias.data)
        return call->q.dtype == FLASH_ATTN_F32 ? cpu->vector : backward_table(cpu, call);
    return kernels_by_shape(cpu, call, call->q.dtype, backward_table(cpu, call), FLASH_ATTN_BACKWARD, rows, keys);
}
