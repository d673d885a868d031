/*
 * AMX's tile instructions in C, as Intel's manual (volume 2) has them: decoding, and what they do to this thread's
 * tiles. Nothing here may itself need AMX, and only what is marked so AVX-512.
 */
#include "amx.h"

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

typedef struct configuration {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  rows[16];
} configuration;

static _Thread_local struct {
    _Alignas(64) uint8_t tile[TILES][ROWS][ROW_BYTES]; /* 0 beyond what is configured */
    configuration has;                                 /* palette 0: nothing is configured */
} unit;

static _Noreturn void refuse(const char *what)
{
    fprintf(stderr, "emulated AMX: %s\n", what);
    abort();
}

/* ---- decoding ---- */

/* The three bytes C4 RXB.map W.vvvv.L.pp, the opcode and ModRM follow each other. */
enum { MAP_0F38 = 2, PREFIX_NONE = 0, PREFIX_66 = 1, PREFIX_F3 = 2, PREFIX_F2 = 3 };

/* The memory operand behind the opcode: its parts, and how many bytes ModRM and it take. In 64-bit mode the form
 * without base and SIB is relative to the next instruction. */
static int decode_address(const uint8_t *modrm, int inverted, amx_instruction *i)
{
    int     mod = modrm[0] >> 6, low = modrm[0] & 7, bytes = 1;
    int     x = inverted >> 6 & 1 ? 0 : 8, b = inverted >> 5 & 1 ? 0 : 8;
    int32_t wide;
    i->index = AMX_NO_REGISTER;
    i->base  = low + b;
    if (low == 4) {
        uint8_t sib = modrm[bytes++];
        low         = sib & 7;
        i->base     = low + b;
        i->index    = (sib >> 3 & 7) + x == 4 ? AMX_NO_REGISTER : (sib >> 3 & 7) + x;
        i->shift    = sib >> 6;
    }
    bool no_base = mod == 0 && low == 5, relative = no_base && bytes == 1;
    if (no_base)
        i->base = AMX_NO_REGISTER;
    if (mod == 2 || no_base) {
        memcpy(&wide, modrm + bytes, sizeof wide);
        bytes += 4;
        i->displacement = wide + (relative ? (int64_t)(intptr_t)(modrm + bytes) : 0);
    } else if (mod == 1) {
        i->displacement = (int8_t)modrm[bytes++];
    }
    return bytes;
}

static amx_operation operation_of(int opcode, int prefix, int modrm, bool has_fp16)
{
    bool memory = modrm < 0xC0;
    int  reg = modrm >> 3 & 7, low = modrm & 7;
    switch (opcode) {
    case 0x49:
        if (memory && reg == 0 && (prefix == PREFIX_NONE || prefix == PREFIX_66))
            return prefix == PREFIX_NONE ? AMX_CONFIGURE : AMX_STORE_CONFIGURATION;
        if (prefix == PREFIX_NONE && modrm == 0xC0)
            return AMX_RELEASE;
        return prefix == PREFIX_F2 && !memory && low == 0 ? AMX_ZERO : AMX_NONE;
    case 0x4B:
        if (!memory || low != 4 || prefix == PREFIX_NONE)
            return AMX_NONE;
        return prefix == PREFIX_F3 ? AMX_STORE : AMX_LOAD; /* F2: TILELOADD, 66: TILELOADDT1 */
    case 0x5C:
        if (memory || (prefix != PREFIX_F3 && !(prefix == PREFIX_F2 && has_fp16)))
            return AMX_NONE;
        return prefix == PREFIX_F3 ? AMX_DOT_BF16 : AMX_DOT_FP16;
    }
    return AMX_NONE;
}

amx_instruction amx_decode(const uint8_t *code, bool has_fp16)
{
    amx_instruction i = {.operation = AMX_NONE, .base = AMX_NO_REGISTER, .index = AMX_NO_REGISTER};
    if (code[0] != 0xC4 || (code[1] & 0x1F) != MAP_0F38 || (code[2] & 0x84) != 0) /* W and L are 0 */
        return i;
    int modrm   = code[4];
    i.operation = operation_of(code[3], code[2] & 3, modrm, has_fp16);
    i.tile      = modrm >> 3 & 7;
    i.left      = modrm & 7;
    i.right     = ~(code[2] >> 3) & 7;
    i.bytes     = 5;
    if (modrm < 0xC0 && i.operation != AMX_NONE)
        i.bytes = 4 + decode_address(code + 4, code[1], &i);
    return i;
}

/* ---- configuration ---- */

static void check_configuration(const configuration *c)
{
    if (c->palette > 1)
        refuse("LDTILECFG: no such palette");
    for (size_t n = 0; n < sizeof c->reserved; n++)
        if (c->reserved[n])
            refuse("LDTILECFG: reserved bytes are not 0");
    for (int t = 0; t < 16; t++) {
        if (t >= TILES && (c->row_bytes[t] || c->rows[t]))
            refuse("LDTILECFG: there are eight tiles");
        if (c->row_bytes[t] > ROW_BYTES || c->rows[t] > ROWS)
            refuse("LDTILECFG: a tile is too large");
        if (!c->row_bytes[t] != !c->rows[t])
            refuse("LDTILECFG: a tile has rows without columns or columns without rows");
    }
}

static void configure(const void *from)
{
    configuration c;
    memcpy(&c, from, sizeof c);
    if (c.palette == 0)
        memset(&c, 0, sizeof c);
    check_configuration(&c);
    memset(unit.tile, 0, sizeof unit.tile);
    unit.has = c;
}

static void need_tile(int t)
{
    if (unit.has.palette == 0)
        refuse("no tiles are configured on this thread");
    if (unit.has.rows[t] == 0)
        refuse("a tile is used that is not configured");
}

/* ---- loads and stores ---- */

/* AddressSanitizer's, where the program is built with it: it does not see what assembly reads and writes. */
extern void *__asan_region_is_poisoned(void *begin, size_t bytes) __attribute__((weak));

static void check_memory(int t, uint64_t start, int64_t stride)
{
    for (int r = unit.has.start_row; r < unit.has.rows[t] && __asan_region_is_poisoned; r++) {
        void *row = (void *)(uintptr_t)(start + (uint64_t)(r * stride));
        if (__asan_region_is_poisoned(row, unit.has.row_bytes[t]))
            refuse("a tile is loaded or stored where AddressSanitizer has no memory");
    }
}

static AVX512 void load_tile(int t, const char *from, int64_t stride)
{
    __mmask64 columns = ~0ull >> (ROW_BYTES - unit.has.row_bytes[t]);
    int       r       = unit.has.start_row;
    for (; r < unit.has.rows[t]; r++)
        _mm512_store_si512(unit.tile[t][r], _mm512_maskz_loadu_epi8(columns, from + r * stride));
    for (; r < ROWS; r++)
        _mm512_store_si512(unit.tile[t][r], _mm512_setzero_si512());
    unit.has.start_row = 0;
}

static AVX512 void store_tile(int t, char *to, int64_t stride)
{
    __mmask64 columns = ~0ull >> (ROW_BYTES - unit.has.row_bytes[t]);
    for (int r = unit.has.start_row; r < unit.has.rows[t]; r++)
        _mm512_mask_storeu_epi8(to + r * stride, columns, _mm512_load_si512(unit.tile[t][r]));
    unit.has.start_row = 0;
}

/* ---- products ---- */

/* A tile of pairs of 16-bit numbers as float32, the pairs' firsts and seconds apart. */
typedef struct pairs {
    _Alignas(64) float first[ROWS][16], second[ROWS][16];
} pairs;

static AVX512 void widen(pairs *to, uint8_t (*from)[ROW_BYTES], amx_operation kind)
{
    for (int r = 0; r < ROWS; r++) {
        __m512i row = _mm512_load_si512(from[r]);
        if (kind == AMX_DOT_BF16) {
            _mm512_store_si512(to->first[r], _mm512_slli_epi32(row, 16));
            _mm512_store_si512(to->second[r], _mm512_and_si512(row, _mm512_set1_epi32((int)0xFFFF0000)));
        } else { /* denormals too: the conversion does not look at MXCSR */
            _mm512_store_ps(to->first[r], _mm512_cvtph_ps(_mm512_cvtepi32_epi16(row)));
            _mm512_store_ps(to->second[r], _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(row, 16))));
        }
    }
}

/* Sums of firsts and of seconds begin at 0 and go over the pairs in order; then they are added, and that to the tile.
 * A function of its own, lest arithmetic moves beyond where MXCSR is set. */
static AVX512 __attribute__((noinline)) void add_products(uint8_t (*tile)[ROW_BYTES], const pairs *left,
                                                          const pairs *right, int rows, int depth, __mmask16 columns)
{
    enum { TOGETHER = 8 };
    for (int begin = 0; begin < rows; begin += TOGETHER) {
        __m512 first[TOGETHER], second[TOGETHER];
        for (int r = 0; r < TOGETHER; r++)
            first[r] = second[r] = _mm512_setzero_ps();
        for (int k = 0; k < depth; k++) {
            __m512 right_first = _mm512_load_ps(right->first[k]), right_second = _mm512_load_ps(right->second[k]);
#pragma GCC unroll 8
            for (int r = 0; r < TOGETHER; r++) {
                first[r]  = _mm512_fmadd_ps(_mm512_set1_ps(left->first[begin + r][k]), right_first, first[r]);
                second[r] = _mm512_fmadd_ps(_mm512_set1_ps(left->second[begin + r][k]), right_second, second[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < TOGETHER; r++) {
            float *row = (float *)(void *)tile[begin + r];
            __m512 sum = _mm512_add_ps(_mm512_load_ps(row), _mm512_add_ps(first[r], second[r]));
            if (begin + r < rows)
                _mm512_store_ps(row, _mm512_maskz_mov_ps(columns, sum));
        }
    }
}

static void dot(const amx_instruction *i)
{
    enum { NEAREST_FLUSHED = 0x1F80 | 0x8040 }; /* all exceptions masked, denormals are zero, in and out */
    const configuration *has = &unit.has;
    if (i->tile == i->left || i->tile == i->right || i->left == i->right)
        refuse("a product has a tile twice");
    need_tile(i->tile), need_tile(i->left), need_tile(i->right);
    if (has->rows[i->tile] != has->rows[i->left] || has->row_bytes[i->tile] != has->row_bytes[i->right] ||
        has->row_bytes[i->left] != 4 * has->rows[i->right] || has->row_bytes[i->tile] % 4 != 0)
        refuse("the shapes of a product's tiles do not fit");
    pairs    left, right;
    unsigned before = _mm_getcsr();
    widen(&left, unit.tile[i->left], i->operation);
    widen(&right, unit.tile[i->right], i->operation);
    _mm_setcsr(NEAREST_FLUSHED);
    add_products(unit.tile[i->tile], &left, &right, has->rows[i->tile], has->rows[i->right],
                 (__mmask16)(0xFFFFu >> (16 - has->row_bytes[i->tile] / 4)));
    _mm_setcsr(before);
    unit.has.start_row = 0;
}

/* ---- an instruction ---- */

void amx_run(const amx_instruction *i, const uint64_t *registers)
{
    uint64_t start  = (i->base == AMX_NO_REGISTER ? 0 : registers[i->base]) + (uint64_t)i->displacement;
    uint64_t offset = i->index == AMX_NO_REGISTER ? 0 : registers[i->index] << i->shift;
    switch (i->operation) {
    case AMX_NONE: break;
    case AMX_CONFIGURE: configure((const void *)(uintptr_t)(start + offset)); break;
    case AMX_STORE_CONFIGURATION: memcpy((void *)(uintptr_t)(start + offset), &unit.has, sizeof unit.has); break;
    case AMX_RELEASE: configure(&(configuration){.palette = 0}); break;
    case AMX_ZERO:
        need_tile(i->tile);
        memset(unit.tile[i->tile], 0, sizeof unit.tile[0]);
        unit.has.start_row = 0;
        break;
    case AMX_LOAD: /* the index counts rows: a stride */
        need_tile(i->tile);
        check_memory(i->tile, start, (int64_t)offset);
        load_tile(i->tile, (const char *)(uintptr_t)start, (int64_t)offset);
        break;
    case AMX_STORE:
        need_tile(i->tile);
        check_memory(i->tile, start, (int64_t)offset);
        store_tile(i->tile, (char *)(uintptr_t)start, (int64_t)offset);
        break;
    case AMX_DOT_BF16:
    case AMX_DOT_FP16: dot(i); break;
    }
}
