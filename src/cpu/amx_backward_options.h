/*
 * Options of the AMX backward: what softcap, ALiBi, bias, a scale that is not positive, block masks and dropout make of
 * a cell of 32 keys by 32 queries, between its products and the vector stage (amx_gradient.h). Scores lie transposed,
 * as tile stores leave them: [key half][query half] of 16 x 16, a vector is one key with 16 queries.
 */
#ifndef FA_CPU_AMX_BACKWARD_OPTIONS_H
#define FA_CPU_AMX_BACKWARD_OPTIONS_H

#include "cpu/amx_options.h"
#include "cpu/avx512_dropout.h"

enum { OPTION_CELL = 32, OPTION_SCORES = OPTION_CELL * OPTION_CELL };

/* One cell. seen, kept: [32 keys] a bit for each query. */
typedef struct option_cell {
    const fa_block_options *options;
    int                     i, j;          /* first query and key, as the call counts them */
    int                     queries, keys; /* that there are */
    float                  *s, *slope;
    uint32_t               *seen, *kept;
} option_cell;

FA_AMX_INLINE float *option_scores(const option_cell *c, int key, int half)
{
    return c->s + (key / 16 * 2 + half) * FA_AMX_TILE_FLOATS + key % 16 * 16;
}

/* Scores, times `scale`, less slope |i + diagonal - j|. */
static void option_alibi(const option_cell *c, float scale)
{
    const fa_tile     *tile  = c->options->tile;
    float              slope = *(const float *)fa_at(&c->options->call->alibi_slopes, tile->b, tile->head, 0, 0);
    _Alignas(64) float away[64];
    fa_amx_alibi_of_unit(away, slope, c->j - c->i - tile->seq.diagonal);
    for (int key = 0; key < OPTION_CELL; key++) {
        for (int half = 0; half < 2; half++)
            fa_amx_take_away(option_scores(c, key, half), _mm512_set1_ps(scale), away + 31 - key + 16 * half);
    }
}

/* Scores, times `scale`, and the bias of 16 queries and a key; -inf masks. */
FA_AMX_INLINE void add_option_bias(const option_cell *c, int key, int half, float scale, __m512 bias)
{
    float    *at     = option_scores(c, key, half);
    __mmask16 masked = _mm512_cmp_ps_mask(bias, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    c->seen[key] &= ~((uint32_t)masked << (16 * half));
    _mm512_store_ps(at, _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(scale)), bias));
}

/* A bias that is the same for all queries: one number a key. */
static void option_bias_of_keys(const option_cell *c, float scale)
{
    const flash_attn_tensor *bias = &c->options->call->bias;
    const char              *row  = fa_at(bias, c->options->tile->b, c->options->tile->head, 0, c->j);
    for (int key = 0; key < OPTION_CELL; key++) {
        __m512 x = _mm512_set1_ps(key < c->keys ? fa_load(row, key * bias->stride[3], bias->dtype) : 0.0f);
        for (int half = 0; half < 2; half++)
            add_option_bias(c, key, half, scale, x);
    }
}

/* Blocks of 16 x 16 of the caller's rows, turned. */
static void option_bias(const option_cell *c, float scale)
{
    const fa_tile           *tile = c->options->tile;
    const flash_attn_tensor *bias = &c->options->call->bias;
    const int64_t            next = bias->stride[2] * (int64_t)fa_dtype_bytes(bias->dtype);
    if (bias->stride[2] == 0) {
        option_bias_of_keys(c, scale);
        return;
    }
    for (int n = 0; n < 4; n++) {
        int         first_key = n / 2 * 16, half = n % 2, keys = c->keys - first_key, first = c->i + 16 * half;
        int         rows = keys <= 0 ? 0 : fa_min_int(16, tile->queries.end - first);
        __m512i     block[16];
        const char *row = fa_at(bias, tile->b, tile->head, first, c->j + first_key);
        for (int r = 0; r < 16; r++)
            block[r] = r >= rows ? _mm512_setzero_si512()
                                 : _mm512_castps_si512(fa_amx_load16(row + r * next, bias->stride[3], bias->dtype, 0,
                                                                     fa_min_int(keys, 16)));
        fa_amx_transpose(block);
        for (int r = 0; r < 16; r++)
            add_option_bias(c, first_key + r, half, scale, _mm512_castsi512_ps(block[r]));
    }
}

static void option_slices(const option_cell *c)
{
    const fa_tile *tile             = c->options->tile;
    uint32_t       any[OPTION_CELL] = {0};
    for (int n = 0; n < tile->num_slices; n++) {
        const flash_attn_slice *slice = &c->options->call->slices.list[tile->slices[n]];
        for (int key = 0; key < c->keys; key++) {
            fa_range see = fa_slice_queries(slice, (fa_range){c->i, c->i + c->queries}, c->j + key);
            if (see.begin < see.end)
                any[key] |= (uint32_t)((1ull << (see.end - c->i)) - (1ull << (see.begin - c->i)));
        }
    }
    for (int key = 0; key < OPTION_CELL; key++)
        c->seen[key] &= any[key];
}

/* Which pairs of 32 queries and the keys of one block of 16 are kept, for those of the keys that are in the cell.
 * Vector v of numbers has keys 2 v, 2 v + 1, and + 8, rows g and g + 8 for each of its lanes g: turned to one key's 16
 * rows and then the other's. */
static void option_dropout_block(const option_cell *c, const fa_dropout_rows rows[2], int key_block)
{
    const __m512i turn      = _mm512_setr_epi32(0x00040000, 0x000C0008, 0x00140010, 0x001C0018, 0x00050001, 0x000D0009,
                                                0x00150011, 0x001D0019, 0x00060002, 0x000E000A, 0x00160012, 0x001E001A,
                                                0x00070003, 0x000F000B, 0x00170013, 0x001F001B);
    const __m512i threshold = _mm512_set1_epi16((short)c->options->call->dropout.threshold);
    const fa_dropout_block_words words = fa_dropout_begin_block(rows, (uint32_t)key_block);
    for (int v = 0; v < 4; v += 2) {
        const fa_dropout_rows *const        from[4]    = {rows, rows + 1, rows, rows + 1};
        const fa_dropout_block_words *const at[4]      = {&words, &words, &words, &words};
        const int                           vectors[4] = {v, v, v + 1, v + 1};
        __m512i                             numbers[4][2];
        fa_dropout_numbers(numbers, from, at, vectors);
        for (int n = 0; n < 4; n++) {
            const __m512i *low = numbers[n / 2 * 2], *high = numbers[n / 2 * 2 + 1]; /* queries */
            uint32_t       a   = _mm512_cmpge_epu16_mask(_mm512_permutexvar_epi16(turn, low[n % 2]), threshold);
            uint32_t       b   = _mm512_cmpge_epu16_mask(_mm512_permutexvar_epi16(turn, high[n % 2]), threshold);
            int            key = key_block * 16 + 2 * (v + n / 2) + 8 * (n % 2) - c->j;
            if (key >= 0 && key < OPTION_CELL)
                c->kept[key] = (a & 0xFFFF) | b << 16;
            if (key + 1 >= 0 && key + 1 < OPTION_CELL)
                c->kept[key + 1] = a >> 16 | (b & 0xFFFF0000);
        }
    }
}

static void option_dropout(const option_cell *c)
{
    const fa_call  *call = c->options->call;
    const fa_tile  *tile = c->options->tile;
    fa_dropout_rows rows[2];
    for (int half = 0; half < 2; half++)
        fa_dropout_begin_rows(&rows[half], &call->dropout, (uint32_t)(tile->b * call->heads_q + tile->head),
                              (uint32_t)c->i / 16 + (uint32_t)half, _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28), 1);
    for (int block = c->j / 16; block * 16 < c->j + OPTION_CELL; block++)
        option_dropout_block(c, rows, block);
}

/* Scores become natural units where there are options for them; seen loses what a bias or a block mask hides. */
static void apply_cell_options(const option_cell *c)
{
    const fa_call *call   = c->options->call;
    bool           capped = call->softcap > 0.0f; /* else the first of these scales on its way */
    float          scale  = capped ? 1.0f : c->options->scale;
    if (capped || !(call->alibi_slopes.data || call->bias.data))
        fa_amx_scale_scores(c->options, c->s, c->slope, OPTION_SCORES);
    if (call->alibi_slopes.data)
        option_alibi(c, scale);
    if (call->bias.data)
        option_bias(c, call->alibi_slopes.data ? 1.0f : scale);
    if (c->options->slices)
        option_slices(c);
    if (call->dropout.threshold)
        option_dropout(c);
}

#endif
