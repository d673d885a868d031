/*
 * Hopper's products of a warpgroup (PTX ISA, "wgmma.mma_async"): each warp has 16 of the 64 rows. They are made when
 * they are waited for and no thread can go on, of what shared memory holds then; until then the accumulators are NaN,
 * and nobody may write them, or the registers of a left operand.
 */
#include "hopper_parts.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { MAX_PRODUCTS = 96, MAX_ACCUMULATORS = 6, MAX_COUNT = 128, MAX_N = 2 * MAX_COUNT, MAX_K = 32,
       PITCH = MAX_N + 16 /* of a row of B and of sums: whole KiB apart, columns would share four sets of the cache */ };

typedef struct accumulators {
    float *c;
    int    count, products; /* under way; 0: free */
    float  value[MAX_COUNT];
} accumulators;

typedef struct queued {
    emulator_product product;
    unsigned         a[4];
    int              group, target; /* its accumulators */
} queued;

typedef struct queue {
    queued       product[MAX_PRODUCTS];
    accumulators target[MAX_ACCUMULATORS];
    int          count, group; /* group: the one that is open */
    int          until;        /* wait: groups before this one */
} queue;

static queue queues[EMULATOR_MAX_FIBERS];

static void fail(const char *what) { emulator_now()->fail(what); }

static int target_of(queue *q, const emulator_product *p)
{
    int found = -1;
    for (int n = 0; n < MAX_ACCUMULATORS; n++)
        if (q->target[n].products > 0 && q->target[n].c == p->c)
            return n;
        else if (q->target[n].products == 0)
            found = n;
    if (found < 0)
        fail("more products in flight than the emulator keeps");
    accumulators *t = &q->target[found];
    t->c            = p->c;
    t->count        = p->count;
    memcpy(t->value, p->c, sizeof *p->c * (size_t)p->count);
    memset(p->c, 0xFF, sizeof *p->c * (size_t)p->count);
    return found;
}

void emulator_wgmma(const emulator_product *p)
{
    queue *q = &queues[emulator_now()->fiber];
    if (q->count == MAX_PRODUCTS || p->count > MAX_COUNT)
        fail("more products in flight than the emulator keeps");
    queued *mine = &q->product[q->count++];
    *mine        = (queued){.product = *p, .group = q->group, .target = target_of(q, p)};
    if (q->target[mine->target].count != p->count)
        fail("accumulators of one size are used as another before their product is done");
    if (p->a)
        memcpy(mine->a, p->a, sizeof mine->a);
    q->target[mine->target].products++;
}

void emulator_wgmma_commit(void) { queues[emulator_now()->fiber].group++; }

/* ---- operands ---- */

static float f16[1 << 16], e4m3[256];

static float make_number(unsigned bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1, exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1),
        mantissa = (int)bits & ((1 << mantissa_bits) - 1);
    float size   = ldexpf((float)(exponent ? (1 << mantissa_bits) + mantissa : mantissa),
                          (exponent ? exponent : 1) - bias - mantissa_bits);
    return bits >> (exponent_bits + mantissa_bits) ? -size : size;
}

static void make_numbers(void)
{
    for (unsigned n = 0; n < 1 << 16; n++)
        f16[n] = (n >> 10 & 31) < 31 ? make_number(n, 5, 10) : n & 1023 ? NAN : n >> 15 ? -INFINITY : INFINITY;
    for (unsigned n = 0; n < 256; n++)
        e4m3[n] = (n & 127) == 127 ? NAN : make_number(n, 4, 3);
}

static inline float number_of(unsigned bits, int type)
{
    if (type == EMULATOR_F16)
        return f16[bits];
    if (type == EMULATOR_E4M3)
        return e4m3[bits];
    uint32_t word = bits << 16;
    float    value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* 16 bytes. A loop for each type: this is where much of the time goes. */
static inline void numbers_of(float *to, int step, const char *from, int type)
{
    unsigned char  byte[16];
    unsigned short half[8];
    memcpy(byte, from, sizeof byte);
    memcpy(half, from, sizeof half);
    if (type == EMULATOR_BF16)
        for (int e = 0; e < 8; e++)
            to[e * step] = number_of(half[e], EMULATOR_BF16);
    else if (type == EMULATOR_F16)
        for (int e = 0; e < 8; e++)
            to[e * step] = number_of(half[e], EMULATOR_F16);
    else
        for (int e = 0; e < 16; e++)
            to[e * step] = number_of(byte[e], EMULATOR_E4M3);
}

/* Rows first_row ... + rows of the operand of a descriptor, element (row, k) to to[row * row_step + k * k_step]: the
 * operand's rows along memory's, or, if `down`, k down them. 16 bytes at once. */
static void load_operand(float *to, int row_step, int k_step, uint64_t matrix, int type, int down, int first_row,
                         int rows, int depth)
{
    const emulator_state *now   = emulator_now();
    unsigned              start = (unsigned)(matrix & 0x3FFF) << 4, leading = (unsigned)(matrix >> 16 & 0x3FFF) << 4,
             stride  = (unsigned)(matrix >> 32 & 0x3FFF) << 4;
    unsigned swizzle = (unsigned)(matrix >> 62), bytes = type == EMULATOR_E4M3 ? 1 : 2, pitch = swizzle == 1 ? 128 : 64,
             each  = 16 / bytes;
    unsigned lines = (unsigned)(down ? depth : rows), across = (unsigned)(down ? rows : depth),
             first = (unsigned)first_row;
    int line_step = down ? k_step : row_step, across_step = down ? row_step : k_step;
    if (swizzle != 1 && swizzle != 2)
        fail("a matrix with a swizzle that the emulator does not know");
    if (!down && across * bytes + (start & (pitch - 1)) > pitch)
        fail("a matrix whose columns pass the end of their panel");
    for (unsigned n = 0; n < lines; n++)
        for (unsigned x = 0; x < across; x += each) {
            unsigned line = n + (down ? 0 : first), byte = (x + (down ? first : 0)) * bytes;
            unsigned at =
                start + (down ? byte / pitch * leading : 0) + line / 8 * stride + line % 8 * pitch + byte % pitch;
            at ^= (at >> 7 & (swizzle == 1 ? 7 : 3)) << 4;
            if (at + 16 > (unsigned)now->shared_bytes)
                fail("a product reads past the end of shared memory");
            emulator_read_by_tma(at, 0);
            numbers_of(to + (int)n * line_step + (int)x * across_step, across_step, now->shared + at, type);
        }
}

/* A warp's 16 rows of the left operand: 16-bit elements two, 8-bit ones four a register. */
static void left_from_registers(float (*a)[MAX_K], queue *lane[32], int index, int type)
{
    int each = type == EMULATOR_E4M3 ? 4 : 2, bits = 32 / each;
    for (int l = 0; l < 32; l++)
        for (int r = 0; r < 4; r++)
            for (int e = 0; e < each; e++)
                a[l / 4 + r % 2 * 8][r / 2 * 4 * each + l % 4 * each + e] =
                    number_of(lane[l]->product[index].a[r] >> e * bits & (bits == 8 ? 0xFFu : 0xFFFFu), type);
}

__attribute__((target_clones("avx2", "default"))) /* where the time goes */
static void
multiply(float (*restrict sum)[PITCH], float (*restrict a)[MAX_K], float (*restrict b)[PITCH], int n, int depth)
{
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < depth; k++)
            for (int col = 0; col < n; col++)
                sum[row][col] += a[row][k] * b[k][col];
}

static void check_same(queue *lane[32], int index)
{
    const emulator_product *first = &lane[0]->product[index].product;
    for (int l = 0; l < 32; l++) {
        const queued *mine = &lane[l]->product[index];
        if (index >= lane[l]->count || mine->product.a_matrix != first->a_matrix ||
            mine->product.b_matrix != first->b_matrix || mine->product.count != first->count ||
            !mine->product.a != !first->a || mine->product.add != first->add)
            fail("the lanes of a warp ask for different products");
        if (mine->product.a && memcmp(mine->product.a, mine->a, sizeof mine->a) != 0)
            fail("registers of a left operand have changed before the product was done");
    }
}

/* A lane's accumulators: of each eight columns two, in two rows. */
typedef enum move { INTO_SUMS, ZERO_SUMS, OUT_OF_SUMS } move;
static inline void move_sums(float (*sum)[PITCH], queue *of, int index, int lane, move move)
{
    float *value = of->target[of->product[index].target].value, *row[2] = {&sum[lane / 4][lane % 4 * 2], &sum[lane / 4 + 8][lane % 4 * 2]};
    for (int i = 0; i < of->product[index].product.count; i += 4, row[0] += 8, row[1] += 8)
        for (int half = 0; half < 2; half++)
            if (move == INTO_SUMS)
                memcpy(row[half], value + i + 2 * half, 2 * sizeof *value);
            else if (move == ZERO_SUMS)
                memset(row[half], 0, 2 * sizeof *value);
            else
                memcpy(value + i + 2 * half, row[half], 2 * sizeof *value);
}

static void make_product(queue *lane[32], int index)
{
    static float            a[16][MAX_K], b[MAX_K][PITCH], sum[16][PITCH];
    const emulator_product *p = &lane[0]->product[index].product;
    int n = 2 * p->count, depth = p->type == EMULATOR_E4M3 ? 32 : 16, warp = (int)emulator_now()->thread.x / 32 % 4;
    check_same(lane, index);
    if (e4m3[0x38] == 0)
        make_numbers();
    if (p->a)
        left_from_registers(a, lane, index, p->type);
    else
        load_operand(a[0], MAX_K, 1, p->a_matrix, p->type, p->a_down, 16 * warp, 16, depth);
    load_operand(b[0], 1, PITCH, p->b_matrix, p->type, p->b_down, 0, n, depth);
    for (int l = 0; l < 32; l++)
        move_sums(sum, lane[l], index, l, p->add ? INTO_SUMS : ZERO_SUMS);
    multiply(sum, a, b, n, depth);
    for (int l = 0; l < 32; l++)
        move_sums(sum, lane[l], index, l, OUT_OF_SUMS);
}

static void give_back(accumulators *t)
{
    static const unsigned char untouched[sizeof t->value] = {0};
    unsigned char              bits[sizeof t->value];
    size_t                     bytes = sizeof *t->c * (size_t)t->count;
    memcpy(bits, t->c, bytes);
    for (size_t n = 0; n < bytes; n++)
        bits[n] ^= 0xFF;
    if (memcmp(bits, untouched, bytes) != 0)
        fail("accumulators have been written before their product was done");
    memcpy(t->c, t->value, bytes);
}

static void make_all(void **records)
{
    queue **lane = (queue **)records, *first = lane[0];
    int     done = 0;
    for (; done < first->count && first->product[done].group < first->until; done++)
        make_product(lane, done);
    for (int l = 0; l < 32; l++) {
        queue *q = lane[l];
        for (int n = 0; n < done; n++) {
            accumulators *t = &q->target[q->product[n].target];
            if (--t->products == 0)
                give_back(t);
        }
        q->count -= done;
        memmove(q->product, q->product + done, sizeof *q->product * (size_t)q->count);
    }
}

void emulator_wgmma_wait(int pending)
{
    queue *q = &queues[emulator_now()->fiber];
    q->until = q->group - pending;
    emulator_be_late();
    emulator_now()->meet(make_all, q);
}

void emulator_end_products(int fibers)
{
    for (int f = 0; f < fibers; f++)
        if (queues[f].count > 0)
            fail("a thread has ended before a product of its own");
}
