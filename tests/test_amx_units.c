/* The AMX forward with its innermost loop in assembly against the same forward in C alone: O, the shifts and the sums
 * must have the same bits. The linker passes the assembly's functions through those here, which count. */
#include "harness.h"

#ifdef FA_AMX_FORWARD_IN_C

#define fa_amx_forward_block in_c_forward_block
#define fa_amx_forward_block_fixed in_c_forward_block_fixed
#define fa_amx_forward_scratch in_c_forward_scratch
#define values_of in_c_values_of /* harness.h has another */
#include FA_AMX_FORWARD_IN_C
#undef values_of
#undef fa_amx_forward_block
#undef fa_amx_forward_block_fixed

bool fa_amx_forward_block(const fa_forward_block *block, int pieces);
bool fa_amx_forward_block_fixed(const fa_forward_block *block);

/* ---- what the assembly was asked for ---- */

enum { UNITS, CHUNKS, KINDS };

/* By whether the first unit is odd, and whether the last one that was done is. */
static int calls[KINDS][2], outgrown[KINDS][2], chunk_values_calls[2];

#define COUNTED(kind, type, name)                                                                                      \
    int64_t __real_##name(type *units);                                                                                \
    int64_t __wrap_##name(type *units);                                                                                \
    int64_t __wrap_##name(type *units)                                                                                 \
    {                                                                                                                  \
        int64_t left = __real_##name(units);                                                                           \
        calls[kind][units->odd]++;                                                                                     \
        outgrown[kind][(units->odd + units->count - left - 1) % 2] += units->again != 0;                               \
        return left;                                                                                                   \
    }
COUNTED(UNITS, fa_amx_units, fa_amx_whole_units)
COUNTED(UNITS, fa_amx_units, fa_amx_whole_units_fixed)
COUNTED(CHUNKS, fa_amx_chunk, fa_amx_chunk_units)
COUNTED(CHUNKS, fa_amx_chunk, fa_amx_chunk_units_fixed)

#define COUNTED_VALUES(which, name)                                                                                    \
    void __real_##name(const char *p, const char *v, float *o);                                                        \
    void __wrap_##name(const char *p, const char *v, float *o);                                                        \
    void __wrap_##name(const char *p, const char *v, float *o)                                                         \
    {                                                                                                                  \
        chunk_values_calls[which]++;                                                                                   \
        __real_##name(p, v, o);                                                                                        \
    }
COUNTED_VALUES(0, fa_amx_chunk_values)
COUNTED_VALUES(1, fa_amx_chunk_first_values)

/* ---- a tile ---- */

enum { MOST_ROWS = 128, MOST_KEYS = 1024, TILES = 2 };

typedef enum content {
    PLAIN,
    RISING,  /* later keys are larger: rows outgrow their shift again and again */
    SPIKES,  /* some queries are large */
    NOT_ALL, /* some queries and keys hold NaN and Inf */
    CONTENTS
} content;

typedef struct input {
    int       rows, keys, queries, head_dim, diagonal;
    fa_window window;
    content   content;
} input;

typedef struct output {
    _Alignas(64) float o[MOST_ROWS * 128];
    _Alignas(64) float m[MOST_ROWS], l[MOST_ROWS];
} output;

static uint64_t seed;

static float next_number(void)
{
    float sum = 0;
    for (int n = 0; n < 4; n++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(int)(seed >> 40 & 0xFFFF) / 65536.0f - 0.5f;
    }
    return 1.7320508f * sum;
}

static float number_of(const input *in, fa_role role, int row, int col)
{
    float x = next_number();
    if (in->content == RISING && role == FA_ROLE_K)
        return x * (1.0f + 0.05f * (float)row);
    if (in->content == SPIKES && role == FA_ROLE_Q && row % 64 == 5)
        return 20.0f * x;
    if (in->content == NOT_ALL && role == FA_ROLE_K && row == 401)
        return col % 2 ? INFINITY : NAN;
    return in->content == NOT_ALL && role == FA_ROLE_Q && row == 33 ? NAN : x;
}

static void *packed(const fa_kernels *kernels, const input *in, fa_role role, int count)
{
    uint16_t   *at = malloc((size_t)count * (size_t)in->head_dim * 2);
    const void *row[MOST_KEYS];
    void *out = aligned_alloc(64, kernels->packed_bytes(role, role == FA_ROLE_Q ? MOST_ROWS : MOST_KEYS, in->head_dim));
    int   bad[MOST_KEYS];
    assert_true(at && out);
    for (int r = 0; r < count; r++) {
        row[r] = at + (size_t)r * (size_t)in->head_dim;
        for (int col = 0; col < in->head_dim; col++)
            fa_store(at, (int64_t)r * in->head_dim + col, FLASH_ATTN_BF16, number_of(in, role, r, col));
    }
    fa_rows rows = {row, count, in->head_dim, 1, FLASH_ATTN_BF16, 0};
    kernels->pack(role, out, &rows, role == FA_ROLE_V ? bad : NULL);
    free(at);
    return out;
}

/* fresh: a tile makes its own beginning, whatever is there. */
static void begin(output *out, bool fresh)
{
    memset(out, fresh ? 0xFF : 0, sizeof *out);
    for (int r = 0; r < MOST_ROWS && !fresh; r++)
        out->m[r] = -INFINITY;
}

static void expect_same(const float *a, const float *b, int count, const char *what, const input *in, bool fixed)
{
    for (int n = 0; n < count; n++) {
        if (memcmp(&a[n], &b[n], sizeof *a) != 0 && !(isnan(a[n]) && isnan(b[n])))
            fail_msg("%s[%d]: %a in assembly, %a in C (head_dim %d, %d rows, %d keys, content %d, %s)", what, n,
                     (double)a[n], (double)b[n], in->head_dim, in->rows, in->keys, in->content,
                     fixed ? "fixed point" : "exact");
    }
}

enum { ASSEMBLY, IN_C, IN_C_FROM_ZEROS, WAYS };

static void run_way(int way, const fa_forward_block *block, bool fixed)
{
    if (fixed)
        assert_true(way == ASSEMBLY ? fa_amx_forward_block_fixed(block) : in_c_forward_block_fixed(block));
    else
        assert_true(way == ASSEMBLY ? fa_amx_forward_block(block, 1) : in_c_forward_block(block, 1));
}

/* Two tiles of keys one after the other, so that the second finds shifts, sums and O. */
static void compare(const input *in, bool fixed)
{
    const fa_kernels *kernels = fixed ? fa_kernels_amx_fixed() : fa_kernels_amx(NULL, FLASH_ATTN_BF16);
    static output     out[WAYS];
    size_t            bytes = kernels->forward_scratch_bytes(MOST_ROWS, MOST_KEYS, in->head_dim, in->head_dim);
    void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64), *q = packed(kernels, in, FA_ROLE_Q, in->rows);
    assert_non_null(scratch);
    memset(scratch, 0, bytes);
    for (int way = 0; way < WAYS; way++)
        begin(&out[way], way != IN_C_FROM_ZEROS);
    kernels->enter();
    for (int tile = 0; tile < TILES; tile++) {
        void *k = packed(kernels, in, FA_ROLE_K, in->keys), *v = packed(kernels, in, FA_ROLE_V, in->keys);
        for (int c = 0; c < WAYS; c++) {
            fa_forward_block block = {.q          = q,
                                      .k          = k,
                                      .v          = v,
                                      .o          = out[c].o,
                                      .ldo        = in->head_dim,
                                      .m          = out[c].m,
                                      .l          = out[c].l,
                                      .fresh      = tile == 0 && c != IN_C_FROM_ZEROS,
                                      .rows       = in->rows,
                                      .keys       = in->keys,
                                      .head_dim   = in->head_dim,
                                      .head_dim_v = in->head_dim,
                                      .window     = in->window,
                                      .diagonal   = in->diagonal,
                                      .queries    = in->queries,
                                      .multiplier = 1.4426950f / sqrtf((float)in->head_dim),
                                      .scratch    = scratch};
            run_way(c, &block, fixed);
        }
        for (int c = 0; c < WAYS - 1; c++) {
            expect_same(out[c].o, out[c + 1].o, in->rows * in->head_dim, "O", in, fixed);
            expect_same(out[c].m, out[c + 1].m, in->rows, "m", in, fixed);
            expect_same(out[c].l, out[c + 1].l, in->rows, "l", in, fixed);
        }
        free(k);
        free(v);
    }
    kernels->leave();
    free(q);
    free(scratch);
}

static bool has_amx(void)
{
    for (int n = 0; n < num_tiers(); n++) {
        if (strncmp(tier_at(n)->name, "amx", 3) == 0)
            return true;
    }
    return false;
}

static void assembly_and_c_give_the_same_bits(void **state)
{
    (void)state;
    static const struct shape {
        int rows, keys, queries, diagonal, left, right;
    } shapes[] = {
        {128, 1024, 128, 0, FA_UNLIMITED, FA_UNLIMITED}, /* full */
        {128, 544, 128, 0, FA_UNLIMITED, FA_UNLIMITED},
        {128, 1000, 128, 0, FA_UNLIMITED, FA_UNLIMITED},
        {100, 992, 100, 0, FA_UNLIMITED, FA_UNLIMITED}, /* a short last group, which reads 32 rows, */
        {72, 992, 72, 0, FA_UNLIMITED, FA_UNLIMITED},   /* and one that reads 16 */
        {128, 1024, 32, 0, FA_UNLIMITED, FA_UNLIMITED}, /* four heads */
        {128, 1024, 128, 800, FA_UNLIMITED, 0},         /* causal: groups of 26 to 29 units */
        {128, 1024, 128, 500, 600, 0},
        {120, 1024, 60, 700, 555, 222},
        {128, 1024, 128, -64, FA_UNLIMITED, 0}, /* two groups see nothing */
    };
    if (!has_amx()) {
        print_message("skipped: this machine has no AMX\n");
        skip();
    }
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        for (int c = 0; c < CONTENTS; c++) {
            const struct shape *s = &shapes[n];
            for (int head_dim = 64; head_dim <= 128; head_dim *= 2) {
                input in = {s->rows, s->keys, s->queries, head_dim, s->diagonal, {s->left, s->right}, (content)c};
                seed     = 7 * n + 1;
                compare(&in, false);
                compare(&in, true);
            }
        }
    }
    for (int n = 0; n < 2 * KINDS; n++) {
        assert_true(calls[n / 2][n % 2] > 0);
        assert_true(outgrown[n / 2][n % 2] > 0);
    }
    assert_true(chunk_values_calls[0] > 0 && chunk_values_calls[1] > 0);
}

#else

static void assembly_and_c_give_the_same_bits(void **state)
{
    (void)state;
    print_message("skipped: no assembly on this machine\n");
    skip();
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(assembly_and_c_give_the_same_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
