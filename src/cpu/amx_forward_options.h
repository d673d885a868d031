/*
 * Options in the AMX forward, unit by unit: on S between the product and the softmax (softcap, ALiBi, bias, block
 * masks), and dropout on P after it. The window is the kernel's own.
 */
#ifndef FA_CPU_AMX_FORWARD_OPTIONS_H
#define FA_CPU_AMX_FORWARD_OPTIONS_H

#include "cpu/amx_softmax.h"
#include "cpu/tile.h"

/* More would eat up the shift's margin, for P is computed with this factor. */
#define MOST_KEEP_SCALE 64.0f

/* ALiBi's scores rise from unit to unit, and each time that they outgrow the shift rows are redone: steeper ones, with
 * their maximum taken for each tile, are faster composed. */
#define MOST_ALIBI_SLOPE 0.125f
#define ALIBI_MARGIN 32

static bool alibi_is_flat(const fa_forward_block *b)
{
    const fa_call *call = b->options->call;
    const fa_tile *tile = b->options->tile;
    for (int h = 0; call->alibi_slopes.data && h < tile->heads; h++) {
        float slope = *(const float *)fa_at(&call->alibi_slopes, tile->b, tile->head + h, 0, 0);
        if (!(fabsf(slope) <= MOST_ALIBI_SLOPE))
            return false;
    }
    return true;
}

/* The 32 queries at hand. */
typedef struct option_rows {
    int         count;
    int         query[UNIT];
    float       slope[UNIT];
    const void *bias[UNIT]; /* for the tile's first key */
} option_rows;

static void set_option_rows(option_rows *rows, const fa_forward_block *b, int first, int count)
{
    const fa_call *call = b->options->call;
    const fa_tile *tile = b->options->tile;
    rows->count         = count;
    for (int r = 0; r < count; r++) {
        int64_t head = tile->head + (first + r) / b->queries;
        int     i = rows->query[r] = tile->queries.begin + (first + r) % b->queries;
        if (call->alibi_slopes.data)
            rows->slope[r] = *(const float *)fa_at(&call->alibi_slopes, tile->b, head, 0, 0);
        if (call->bias.data)
            rows->bias[r] = fa_at(&call->bias, tile->b, head, i, tile->keys.begin);
    }
}

/* A bias of -inf masks: whatever the score holds there, it is not seen. */
FA_AMX_INLINE __m512 with_bias(__m512 s, __m512 bias)
{
    const __m512 masked = _mm512_set1_ps(-INFINITY);
    return _mm512_mask_mov_ps(_mm512_add_ps(s, bias), _mm512_cmp_ps_mask(bias, masked, _CMP_EQ_OQ), masked);
}

/* distance: of the row's diagonal from the first of these 16 keys. */
FA_AMX_INLINE __m512 with_alibi(__m512 s, float slope, int distance)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i       away  = _mm512_abs_epi32(_mm512_sub_epi32(_mm512_set1_epi32(distance), lanes));
    return _mm512_sub_ps(s, _mm512_mul_ps(_mm512_set1_ps(slope), _mm512_cvtepi32_ps(away)));
}

/* The bias of a row two units ahead: rows are too far apart for the processor to guess. */
FA_AMX_INLINE void prefetch_bias(const fa_forward_block *b, const void *row, int key)
{
    const flash_attn_tensor *bias  = &b->options->call->bias;
    int64_t                  bytes = (int64_t)fa_dtype_bytes(bias->dtype);
    if (bias->stride[3] == 1 && key + 2 * UNIT < b->keys) {
        const char *at = (const char *)row + (key + 2 * UNIT) * bytes;
        _mm_prefetch(at, _MM_HINT_T0);
        if (bytes == 4)
            _mm_prefetch(at + 64, _MM_HINT_T0);
    }
}

/* A row of a unit, `key` its first key's number in the tile. */
FA_AMX_INLINE void apply_options_to_row(const fa_forward_block *b, const option_rows *rows, int r, int key, float *s)
{
    const fa_call *call     = b->options->call;
    const fa_tile *tile     = b->options->tile;
    int            first    = tile->keys.begin + key;
    int            distance = rows->query[r] + tile->seq.diagonal - first;
    uint32_t       seen     = UINT32_MAX;
    if (b->options->slices)
        seen = fa_slices_seen(call, tile, rows->query[r], first);
    if (call->bias.data)
        prefetch_bias(b, rows->bias[r], key);
    for (int t = 0; t < 2 && key + 16 * t < b->keys; t++) {
        float *at = scores_row(s, r) + t * FA_AMX_TILE_FLOATS;
        __m512 x  = _mm512_load_ps(at);
        if (call->alibi_slopes.data)
            x = with_alibi(x, rows->slope[r], distance - 16 * t);
        if (call->bias.data)
            x = with_bias(x,
                          fa_amx_load16(rows->bias[r], call->bias.stride[3], call->bias.dtype, key + 16 * t, b->keys));
        _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(seen >> (16 * t)), x));
    }
}

/* S of the unit whose first key is number `key` of the tile's; see fa_apply_options. */
static __attribute__((noinline)) void apply_options_to_unit(const fa_forward_block *b, const option_rows *rows, int key,
                                                            float *s)
{
    const fa_forward_options *o    = b->options;
    const fa_call            *call = o->call;
    if (call->softcap > 0.0f) {
        o->kernels->softcap(s, NULL, UNIT * UNIT, 1, UNIT * UNIT, o->scale,
                            call->softcap); /* rows make no difference */
    } else if (o->on_scores) {
        for (int n = 0; n < 2 * UNIT; n++)
            _mm512_store_ps(s + 16 * n, _mm512_mul_ps(_mm512_load_ps(s + 16 * n), _mm512_set1_ps(o->scale)));
    }
    bool by_row = call->alibi_slopes.data || call->bias.data || o->slices;
    for (int r = 0; r < rows->count && by_row; r++)
        apply_options_to_row(b, rows, r, key, s);
}

/* ---- dropout ---- */

/* Units begin at blocks of 16 x 16 of one head, and the factor is not too large. */
static bool can_drop(const fa_forward_block *b)
{
    const fa_tile *tile = b->options->tile;
    return tile->heads == 1 && tile->queries.begin % 16 == 0 && tile->keys.begin % 16 == 0 &&
           b->options->call->dropout.keep_scale <= MOST_KEEP_SCALE;
}

/* What is kept of a block of 16 x 16, as dropout.h deals the numbers: keep[word][upper half], a bit a lane. */
static void kept_lanes(uint32_t keep[4][2], const fa_dropout *dropout, uint32_t batch_head, uint32_t row_block,
                       uint32_t col_block)
{
    _Alignas(64) uint32_t word[4][32];
    for (uint32_t lane = 0; lane < 32; lane++) {
        fa_philox out = fa_dropout_block(dropout, batch_head, row_block, col_block, lane);
        word[0][lane] = out.word[0];
        word[1][lane] = out.word[1];
        word[2][lane] = out.word[2];
        word[3][lane] = out.word[3];
    }
    const __m512i least = _mm512_set1_epi32((int)dropout->threshold), low = _mm512_set1_epi32(0xFFFF);
    for (int n = 0; n < 4; n++) {
        uint32_t mask[2] = {0, 0};
        for (int half = 0; half < 2; half++) {
            __m512i x = _mm512_load_si512(word[n] + 16 * half);
            mask[0] |= (uint32_t)_mm512_cmpge_epu32_mask(_mm512_and_si512(x, low), least) << (16 * half);
            mask[1] |= (uint32_t)_mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 16), least) << (16 * half);
        }
        keep[n][0] = mask[0];
        keep[n][1] = mask[1];
    }
}

/* Pairs (n, n + 16) of row r of a row block that are kept: bit 2 n + t for key n of key block t. Word w of lane l deals
 * columns 2 (l % 4) + w % 2 + 8 (w / 2). */
FA_AMX_INLINE uint32_t kept_pairs(uint32_t keep[2][4][2], int r)
{
    static const uint32_t spread[16] = {0x0000, 0x0001, 0x0010, 0x0011, 0x0100, 0x0101, 0x0110, 0x0111,
                                        0x1000, 0x1001, 0x1010, 0x1011, 0x1100, 0x1101, 0x1110, 0x1111};
    uint32_t              bits       = 0;
    for (int t = 0; t < 2; t++) {
        for (int w = 0; w < 4; w++)
            bits |= spread[keep[t][w][r / 8] >> (r % 8 * 4) & 15] << (2 * (w % 2) + 16 * (w / 2) + t);
    }
    return bits;
}

/* P of a unit, [row tile][piece]: what is dropped becomes 0. first_row: of the tile's rows, which are one head's. */
static __attribute__((noinline)) void drop_from_unit(const fa_forward_block *b, int first_row, int first_key,
                                                     uint16_t *p, int p_down, int pieces)
{
    const fa_call *call       = b->options->call;
    const fa_tile *tile       = b->options->tile;
    uint32_t       batch_head = (uint32_t)(tile->b * call->heads_q + tile->head);
    uint32_t       row_block  = (uint32_t)(tile->queries.begin + first_row) / 16,
             col_block        = (uint32_t)(tile->keys.begin + first_key) / 16;
    for (int down = 0; down < 2; down++) {
        uint32_t keep[2][4][2];
        kept_lanes(keep[0], &call->dropout, batch_head, row_block + (uint32_t)down, col_block);
        kept_lanes(keep[1], &call->dropout, batch_head, row_block + (uint32_t)down, col_block + 1);
        for (int r = 0; r < 16; r++) {
            __mmask32 kept = kept_pairs(keep, r);
            for (int n = 0; n < pieces; n++) {
                uint16_t *at = p + down * p_down + n * FA_AMX_TILE_HALVES + 32 * r;
                _mm512_store_si512(at, _mm512_maskz_mov_epi16(kept, _mm512_load_si512(at)));
            }
        }
    }
}

#endif
