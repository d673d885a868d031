/* How the AMX tier reads the caller's rows, and how it ends the forward: rows of O divided and rounded, and LSE. */
#include "harness.h"

#include "cpu/cpu.h"
#include "numeric.h"

enum { ROWS = 37, MOST_COLS = 130, STEP = 400, GUARD = 0x5A };

static uint64_t seed = 1;

static uint32_t next_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* Of every kind: NaN, infinite, numbers that a factor makes denormal or too large, zeros. */
static float next_sum(void)
{
    uint32_t bits = next_bits(), kind = next_bits() % 64;
    if (kind == 0)
        return bits % 2 ? NAN : INFINITY;
    if (kind == 1)
        return fa_float_of_bits(bits & 0x807FFFFF);
    if (kind == 2)
        return bits % 2 ? 0.0f : -0.0f;
    return ((float)bits / 4294967296.0f - 0.5f) * 4.0f;
}

static const fa_kernels *amx_kernels(flash_attn_dtype dtype)
{
#ifdef FA_HAVE_AMX
    for (int n = 0; n < num_tiers(); n++) {
        if (strncmp(tier_at(n)->name, "amx", 3) == 0)
            return fa_kernels_amx(fa_kernels_avx512(), dtype);
    }
#endif
    (void)dtype;
    print_message("skipped: this machine has no AMX\n");
    skip();
    return NULL;
}

static void compare_rows(const fa_kernels *k, flash_attn_dtype dtype, int cols, int shift, bool past_caches)
{
    _Alignas(64) static float   from[ROWS * 144];
    _Alignas(64) static uint8_t at[2][ROWS * STEP + 128];
    static const float          factors[] = {1.0f, 0.37f, 0.0f, 1e-38f, 3e38f, -2.5f};
    float                       factor[ROWS];
    int                         ld = (cols + 15) / 16 * 16;
    memset(at, GUARD, sizeof at);
    for (int n = 0; n < ROWS * 144; n++)
        from[n] = next_sum();
    for (int r = 0; r < ROWS; r++)
        factor[r] = factors[next_bits() % 6];
    fa_stored_rows to = {(char *)at[0] + shift, STEP, 1, ROWS, cols, dtype, 1.0f, past_caches};
    k->store_rows(&to, from, ld, factor);
    for (int r = 0; r < ROWS; r++)
        k->store(at[1] + shift + r * STEP, 1, dtype, from + r * ld, cols, factor[r]);
    for (size_t n = 0; n < sizeof at[0]; n++) {
        if (at[0][n] != at[1][n])
            fail_msg("byte %zu is %02x, wanted %02x: rows of %d columns, %d bytes off a line, %s", n, at[0][n],
                     at[1][n], cols, shift, dtype_name(dtype));
    }
}

static void rows_have_the_bits_of_rows_alone(void **state)
{
    (void)state;
    static const flash_attn_dtype dtypes[] = {FLASH_ATTN_BF16, FLASH_ATTN_F16, FLASH_ATTN_F32};
    static const int              cols[]   = {1, 15, 16, 17, 31, 32, 33, 40, 64, 96};
    const fa_kernels             *k        = amx_kernels(FLASH_ATTN_BF16);
    for (size_t d = 0; d < 3; d++)
        for (size_t c = 0; c < sizeof cols / sizeof cols[0]; c++)
            for (int n = 0; n < 8; n++)
                compare_rows(k, dtypes[d], cols[c], n / 2 * 16, n % 2);
}

/* Sums from the smallest to the largest, and all that lies beside 3/4, 1 and 3/2 times a power of two. */
static void lse_is_right(void **state)
{
    (void)state;
    const fa_kernels  *k          = amx_kernels(FLASH_ATTN_BF16);
    const double       to_natural = 0.6931471805599453;
    static const float shifts[]   = {0.0f, 1.0f, -3.25f, 1e4f, -1e9f};
    for (uint32_t bits = 0x00800010; bits < 0x7E800000; bits += bits < 0x3F000000 || bits > 0x40800000 ? 99991 : 113) {
        float l[16], m[16], lse[16];
        for (uint32_t n = 0; n < 16; n++) {
            l[n] = fa_float_of_bits(n < 8 ? bits + n : (bits & 0xFF800000) + 0x400000 * (n / 2 % 2) + n - 11);
            m[n] = shifts[(bits + n) % 5];
        }
        int rows = 1 + (int)(bits % 16);
        k->natural_lse(lse, m, l, rows, to_natural);
        for (int n = 0; n < rows; n++) {
            double wanted = (double)m[n] * to_natural + log((double)l[n]);
            if (!(fabs((double)lse[n] - wanted) <= 1.2e-7 * fmax(1.0, fabs(wanted))))
                fail_msg("m %a, l %a: %.9g, wanted %.9g", (double)m[n], (double)l[n], (double)lse[n], wanted);
        }
    }
    float l[3] = {0.0f, NAN, INFINITY}, m[3] = {-INFINITY, -INFINITY, 1.0f}, lse[3];
    k->natural_lse(lse, m, l, 3, to_natural);
    assert_true(lse[0] == -INFINITY && isnan(lse[1]) && lse[2] == INFINITY);
}

/* ---- packing ---- */

enum { MOST_PACKED = 70, FAR_APART = 4096 + 64 }; /* elements */

/* Rows side by side, a page and more apart, from the last to the first, and at addresses that are no multiple of a line. */
static void point_at_rows(const void **row, uint16_t *at, const uint16_t *from, int count, int cols, int way)
{
    int step = way == 0 ? cols : way == 3 ? cols + 1 : FAR_APART;
    for (int r = 0; r < count; r++) {
        uint16_t *to = at + (way == 2 ? count - 1 - r : r) * step + way / 3;
        memcpy(to, from + r * cols, (size_t)cols * sizeof *to);
        row[r] = to;
    }
}

static void compare_packed(const fa_kernels *k, fa_role role, int count, int cols, bool hole)
{
    enum { WAYS = 4 };

    uint16_t *from = malloc((size_t)(count * cols) * sizeof *from), *at = calloc((size_t)count, FAR_APART * sizeof *at);
    size_t    bytes = k->packed_bytes(role, count, cols);
    char     *packed[WAYS];
    int       bad[WAYS][MOST_PACKED], num_bad[WAYS];
    assert_true(from && at);
    for (int n = 0; n < count * cols; n++) /* some not finite */
        from[n] = next_bits() % 2000 == 0 ? 0x7F80 : (uint16_t)(next_bits() >> 16 & 0xBFFF);
    for (int way = 0; way < WAYS; way++) {
        const void *row[MOST_PACKED];
        point_at_rows(row, at, from, count, cols, way);
        if (hole)
            row[count / 2] = NULL;
        fa_rows src = {row, count, cols, 1, FLASH_ATTN_BF16, 0};
        packed[way] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        assert_non_null(packed[way]);
        memset(packed[way], GUARD, bytes);
        num_bad[way] = k->pack(role, packed[way], &src, bad[way]);
    }
    for (int way = 1; way < WAYS; way++) {
        assert_int_equal(num_bad[way], num_bad[0]);
        assert_memory_equal(bad[way], bad[0], (size_t)num_bad[0] * sizeof(int));
        if (memcmp(packed[way], packed[0], bytes) != 0)
            fail_msg("role %d of %d rows of %d columns is packed otherwise where rows lie in way %d", role, count, cols, way);
    }
    for (int way = 0; way < WAYS; way++)
        free(packed[way]);
    free(from);
    free(at);
}

static const fa_kernels *fixed_kernels(void)
{
#ifdef FA_HAVE_AMX
    return fa_kernels_amx_fixed();
#else
    return NULL;
#endif
}

static void rows_are_packed_alike_wherever_they_lie(void **state)
{
    (void)state;
    static const int counts[] = {1, 16, 31, 32, 48, MOST_PACKED}, cols[] = {8, 32, 40, 64, 128};
    const fa_kernels *tables[] = {amx_kernels(FLASH_ATTN_BF16), fixed_kernels()};
    for (int t = 0; t < 2 && tables[t]; t++)
        for (int role = 0; role < (t == 0 ? (int)FA_ROLES : FA_ROLE_V + 1); role++)
            for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++)
                for (size_t c = 0; c < sizeof cols / sizeof cols[0]; c++) {
                    compare_packed(tables[t], (fa_role)role, counts[n], cols[c], false);
                    compare_packed(tables[t], (fa_role)role, counts[n], cols[c], true);
                }
}

/* ---- scores of float16 ---- */

enum { PART = 128, COLS = 64, SIGNIFICANDS = 1024 };

/* Of 1024 one has each significand, of many signs and exponents; after them what is rare. */
static uint16_t half_number(int n)
{
    static const uint16_t rare[] = {0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7FFF, 0x03FF};
    if (n >= SIGNIFICANDS)
        return rare[n % (int)(sizeof rare / sizeof rare[0])];
    return (uint16_t)(n | (8 + n * 7 % 13) << 10 | n % 3 << 15);
}

typedef struct half_rows {
    uint16_t    number[PART][COLS];
    const void *row[PART];
    fa_rows     rows;
} half_rows;

/* Numbers from `first` on, each alone in its row. */
static void set_half_rows(half_rows *x, int first, int count, int col)
{
    memset(x->number, 0, sizeof x->number);
    for (int r = 0; r < count; r++) {
        x->number[r][col] = half_number(first + r);
        x->row[r]         = x->number[r];
    }
    x->rows = (fa_rows){x->row, count, COLS, 1, FLASH_ATTN_F16, 0};
}

static void expect_products(const float *s, int lds, int q, int k, int rows, const char *what)
{
    for (int r = 0; r < rows; r++) {
        for (int n = 0; n < PART; n++) {
            float a = fa_float_of_f16(half_number(q + r)), b = fa_float_of_f16(half_number(k + n)), got = s[r * lds + n];
            if (!(got == a * b || (isnan(got) && isnan(a * b))))
                fail_msg("%a times %a is %a by %s", (double)a, (double)b, (double)got, what);
        }
    }
}

/* Every significand times every other, in pieces, as a tile of rows and as a few. */
static void products_of_float16_are_exact(void **state)
{
    (void)state;
    const fa_kernels               *kernels = amx_kernels(FLASH_ATTN_F16);
    static half_rows                q, k;
    _Alignas(64) static float       s[PART * PART];
    static const fa_soon            soon;
    char *left = aligned_alloc(64, kernels->packed_bytes(FA_ROLE_Q, PART, COLS)), *few = aligned_alloc(64, kernels->packed_bytes(FA_ROLE_Q, 8, COLS)),
         *right = aligned_alloc(64, kernels->packed_bytes(FA_ROLE_K, PART, COLS));
    assert_true(left && right && few);
    kernels->enter();
    for (int i = 0; i <= SIGNIFICANDS; i += PART) {
        set_half_rows(&q, i, PART, i / PART * 5);
        kernels->pack(FA_ROLE_Q, left, &q.rows, NULL);
        q.rows.count = 8;
        kernels->pack(FA_ROLE_Q, few, &q.rows, NULL);
        for (int j = 0; j <= SIGNIFICANDS; j += PART) {
            set_half_rows(&k, j, PART, i / PART * 5);
            kernels->pack(FA_ROLE_K, right, &k.rows, NULL);
            kernels->scores(s, PART, left, right, PART, PART, COLS);
            expect_products(s, PART, i, j, PART, "a tile of rows");
            kernels->scores_few(s, PART, few, &k.rows, 8, &soon);
            expect_products(s, PART, i, j, 8, "a few rows");
        }
    }
    kernels->leave();
    free(left), free(right), free(few);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_are_packed_alike_wherever_they_lie),
                                       cmocka_unit_test(products_of_float16_are_exact),
                                       cmocka_unit_test(rows_have_the_bits_of_rows_alone),
                                       cmocka_unit_test(lse_is_right)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
