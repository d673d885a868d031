/*
 * Options in the AMX forward, unit by unit: on S between the product and the softmax (softcap, ALiBi, bias, block
 * masks), and dropout on P after it. The window is the kernel's own.
 */
#ifndef FA_CPU_AMX_FORWARD_OPTIONS_H
#define FA_CPU_AMX_FORWARD_OPTIONS_H

#include "cpu/amx_options.h"
#include "cpu/avx512_dropout.h"
#include "cpu/amx_softmax.h"

/* More would eat up the shift's margin, for P is computed with this factor. */
#define MOST_KEEP_SCALE 64.0f

/* ALiBi's scores rise from unit to unit, and each time that they outgrow the shift rows are redone: steeper ones, with
 * their maximum taken for each tile, are faster composed. */
#define MOST_ALIBI_SLOPE 0.125f
#ifdef FA_AMX_FP16
#define ALIBI_MARGIN 12 /* what float16's range can give */
#else
#define ALIBI_MARGIN 32
#endif

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
    int             count;
    int             query[UNIT];
    float           slope[UNIT];
    const void     *bias[UNIT]; /* for the tile's first key */
    bool            one_bias;   /* they are all the same */
    bool            in_a_row;   /* the queries are neighbours, of one head */
    fa_dropout_rows dropout[2]; /* of each 16 */
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
    rows->one_bias = call->bias.data && call->bias.stride[2] == 0 && (call->bias.stride[1] == 0 || tile->heads == 1);
    rows->in_a_row = first % b->queries + count <= b->queries;
    for (int down = 0; down < 2 && call->dropout.threshold; down++)
        fa_dropout_begin_rows(&rows->dropout[down], &call->dropout, (uint32_t)(tile->b * call->heads_q + tile->head),
                              (uint32_t)(tile->queries.begin + first) / 16 + (uint32_t)down,
                              _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), 8);
}

/* A bias of -inf masks: whatever the score holds there, it is not seen. */
FA_AMX_INLINE __m512 with_bias(__m512 s, __m512 bias)
{
    return _mm512_mask_add_ps(bias, _mm512_cmp_ps_mask(bias, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), s, bias);
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
    const __m512i  lanes    = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
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
            x = fa_amx_with_alibi(x, rows->slope[r], _mm512_sub_epi32(_mm512_set1_epi32(distance - 16 * t), lanes));
        if (call->bias.data)
            x = with_bias(x,
                          fa_amx_load16(rows->bias[r], call->bias.stride[3], call->bias.dtype, key + 16 * t, b->keys));
        _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(seen >> (16 * t)), x));
    }
}

/* A bias alone, to a whole unit: what fa_amx_scale_scores and apply_options_to_row make of it, to the bit, in a tenth
 * of their instructions, and without asking ahead, for rows' lines would meet in few sets of the first-level cache. */
static bool takes_bias_alone(const fa_forward_block *b, int key)
{
    const fa_call *call = b->options->call;
    return call->bias.data && call->bias.stride[3] == 1 && key + UNIT <= b->keys && !(call->softcap > 0.0f) &&
           !call->alibi_slopes.data && !b->options->slices;
}

FA_AMX_INLINE void add_bias_to_unit(const fa_forward_block *b, const option_rows *rows, int key, float *s,
                                    flash_attn_dtype dtype)
{
    const __m512 scale = _mm512_set1_ps(b->options->scale);
    __m512       bias[2];
    for (int r = 0; r < rows->count; r++) {
        const char *row = (const char *)rows->bias[r] + (size_t)key * fa_dtype_bytes(dtype);
        for (int t = 0; t < 2 && (r == 0 || !rows->one_bias); t++)
            bias[t] = fa_amx_load16(row, 1, dtype, 16 * t, 32);
        for (int t = 0; t < 2; t++) {
            float *at = scores_row(s, r) + t * FA_AMX_TILE_FLOATS;
            _mm512_store_ps(at, with_bias(_mm512_mul_ps(_mm512_load_ps(at), scale), bias[t]));
        }
    }
}

/* ALiBi alone, or after softcap, to a whole unit; to the bit too. Rows read what they take away from one table. */
static bool takes_alibi_alone(const fa_forward_block *b, const option_rows *rows)
{
    const fa_call *call = b->options->call;
    return call->alibi_slopes.data && rows->in_a_row && !call->bias.data && !b->options->slices;
}

static void add_alibi_to_unit(const fa_forward_block *b, const option_rows *rows, int key, float *s)
{
    const fa_tile     *tile   = b->options->tile;
    const bool         capped = b->options->call->softcap > 0.0f; /* then it is scaled */
    const __m512       scale  = _mm512_set1_ps(capped ? 1.0f : b->options->scale);
    _Alignas(64) float away[64];
    fa_amx_alibi_of_unit(away, rows->slope[0], rows->query[0] + tile->seq.diagonal - tile->keys.begin - key);
    if (capped)
        fa_amx_scale_scores(b->options, s, NULL, UNIT * UNIT);
    for (int r = 0; r < rows->count; r++) {
        fa_amx_take_away(scores_row(s, r), scale, away + 31 - r);
        fa_amx_take_away(scores_row(s, r) + FA_AMX_TILE_FLOATS, scale, away + 47 - r);
    }
}

/* S of the unit whose first key is number `key` of the tile's; see fa_apply_options. */
static void apply_options_to_unit(const fa_forward_block *b, const option_rows *rows, int key, float *s)
{
    const fa_call *call = b->options->call;
    if (takes_bias_alone(b, key)) {
        if (call->bias.dtype == FLASH_ATTN_F32)
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_F32);
        else if (call->bias.dtype == FLASH_ATTN_BF16)
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_BF16);
        else
            add_bias_to_unit(b, rows, key, s, FLASH_ATTN_F16);
        return;
    }
    if (takes_alibi_alone(b, rows)) {
        add_alibi_to_unit(b, rows, key, s);
        return;
    }
    fa_amx_scale_scores(b->options, s, NULL, UNIT * UNIT);
    bool by_row = call->alibi_slopes.data || call->bias.data || b->options->slices;
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

/* Eight numbers of 16 rows' lanes for each of two key blocks, words 0 and 1 of a lane, then 2 and 3, as the rows of P
 * that they are for: pairs (n, n + 16). Rows g and g + 8, then g + 1 and g + 9, the first lane's row being g. */
FA_AMX_INLINE void numbers_of_rows(__m512i out[4], __m512i left[2], __m512i right[2])
{
    const __m512i turn = _mm512_set4_epi32(0x0D0C0F0E, 0x09080B0A, 0x05040706, 0x01000302); /* the halves of 32 bits */
    const __mmask64 lower = 0x3333333333333333;
    const __m512i   a[2] = {_mm512_shuffle_i64x2(left[0], left[1], 0x44), _mm512_shuffle_i64x2(left[0], left[1], 0xEE)};
    const __m512i   b[2] = {_mm512_shuffle_i64x2(right[0], right[1], 0x44),
                            _mm512_shuffle_i64x2(right[0], right[1], 0xEE)};
    for (int n = 0; n < 2; n++) {
        out[2 * n]     = _mm512_mask_shuffle_epi8(a[n], ~lower, b[n], turn);
        out[2 * n + 1] = _mm512_mask_shuffle_epi8(b[n], lower, a[n], turn);
    }
}

/* Which of them are kept. float16 has keys as they lie. */
FA_AMX_INLINE __mmask32 kept_of_row(__m512i numbers, __m512i threshold)
{
#ifdef FA_AMX_FP16
    const __m512i even = _mm512_setr_epi32(0x00020000, 0x00060004, 0x000A0008, 0x000E000C, 0x00120010, 0x00160014,
                                           0x001A0018, 0x001E001C, 0x00030001, 0x00070005, 0x000B0009, 0x000F000D,
                                           0x00130011, 0x00170015, 0x001B0019, 0x001F001D);
    numbers            = _mm512_permutexvar_epi16(even, numbers);
#endif
    return _mm512_cmpge_epu16_mask(numbers, threshold);
}

/* P of a unit, [row tile][piece]: what is dropped becomes 0. Its rows are one head's. */
static __attribute__((noinline)) void drop_from_unit(const fa_forward_block *b, const option_rows *rows, int first_key,
                                                     uint16_t *p, int p_down, int pieces)
{
    const uint32_t               col_block = (uint32_t)(b->options->tile->keys.begin + first_key) / 16;
    const __m512i                threshold = _mm512_set1_epi16((short)b->options->call->dropout.threshold);
    const fa_dropout_block_words left      = fa_dropout_begin_block(&rows->dropout[0], col_block),
                                 right     = fa_dropout_begin_block(&rows->dropout[0], col_block + 1);
    for (int part = 0; part < 4; part++) { /* 16 rows, of which 0 to 3 and 8 to 11, or the others */
        const fa_dropout_rows              *own     = &rows->dropout[part / 2];
        const fa_dropout_rows *const        from[4] = {own, own, own, own};
        const fa_dropout_block_words *const at[4]   = {&left, &right, &left, &right};
        const int                           v = part % 2 * 2, vectors[4] = {v, v, v + 1, v + 1};
        __m512i                             words[4][2], numbers[8];
        fa_dropout_numbers(words, from, at, vectors);
        numbers_of_rows(numbers, words[0], words[1]);
        numbers_of_rows(numbers + 4, words[2], words[3]);
        _Pragma("GCC unroll 8") for (int n = 0; n < 8; n++)
        {
            const __mmask32 kept   = kept_of_row(numbers[n], threshold);
            uint16_t       *at_row = p + part / 2 * p_down + 32 * (2 * v + n / 2 + n % 2 * 8);
            for (int piece = 0; piece < pieces; piece++) {
                uint16_t *to = at_row + piece * FA_AMX_TILE_HALVES;
                _mm512_store_si512(to, _mm512_maskz_mov_epi16(kept, _mm512_load_si512(to)));
            }
        }
    }
}

#endif
