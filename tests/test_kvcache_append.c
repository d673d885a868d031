/* flash_attn_append_kv against a plain formula in double. */
#include "call.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum {
    B         = 3,
    NEW       = 5,
    SQ        = 5,
    HQ        = 4,
    HK        = 2,
    D         = 22,
    DV        = 6,
    ROTARY    = 12,
    CAPACITY  = 24,
    ENTRIES   = 5,
    POSITIONS = 40
};
enum { PAGE = 4, PAGES = 20, PER_SEQ = CAPACITY / PAGE };

static float number_at(int i) { return (float)((uint32_t)i * 2654435761u >> 16) / 32768.0f - 1.0f; }

typedef struct cache {
    flash_attn_dtype dtype;
    uint32_t         k_new[B * NEW * HK * D], v_new[B * NEW * HK * DV], q[B * SQ * HQ * D]; /* room for any dtype */
    uint32_t         k[PAGES * PAGE * HK * D * 2], v[PAGES * PAGE * HK * DV * 2];
    uint32_t         k_before[PAGES * PAGE * HK * D * 2], v_before[PAGES * PAGE * HK * DV * 2], q_out[B * SQ * HQ * D];
    float            cosines[POSITIONS * ROTARY / 2], sines[POSITIONS * ROTARY / 2];
    int32_t          held[B], index[B], pad[B], table[B * PER_SEQ];
} cache;

static cache *make_cache(flash_attn_dtype dtype)
{
    static cache c;
    memset(&c, 0xA5, sizeof c);
    c.dtype = dtype;
    for (int i = 0; i < B * NEW * HK * D; i++)
        fa_store(c.k_new, i, dtype, number_at(i));
    for (int i = 0; i < B * NEW * HK * DV; i++)
        fa_store(c.v_new, i, dtype, number_at(1000 + i));
    for (int i = 0; i < B * SQ * HQ * D; i++)
        fa_store(c.q, i, dtype, number_at(2000 + i));
    for (int t = 0; t < POSITIONS; t++)
        for (int n = 0; n < ROTARY / 2; n++) {
            double angle                  = t * pow(10000.0, -2.0 * n / ROTARY);
            c.cosines[t * ROTARY / 2 + n] = (float)cos(angle);
            c.sines[t * ROTARY / 2 + n]   = (float)sin(angle);
        }
    memcpy(c.held, (int32_t[]){0, 7, CAPACITY - NEW}, sizeof c.held);
    memcpy(c.index, (int32_t[]){4, 0, 2}, sizeof c.index);
    memcpy(c.pad, (int32_t[]){0, 3, 1}, sizeof c.pad);
    for (int i = 0; i < B * PER_SEQ; i++)
        c.table[i] = (i * 7 + 3) % PAGES;
    memcpy(c.k_before, c.k, sizeof c.k);
    memcpy(c.v_before, c.v, sizeof c.v);
    return &c;
}

static flash_attn_append plain_append(cache *c)
{
    flash_attn_dtype t = c->dtype;
    return (flash_attn_append){.k_new         = {.data = c->k_new, .dtype = t, .shape = {B, NEW, HK, D}},
                               .v_new         = {.data = c->v_new, .dtype = t, .shape = {B, NEW, HK, DV}},
                               .k_cache       = {.data = c->k, .dtype = t, .shape = {B, CAPACITY, HK, D}},
                               .v_cache       = {.data = c->v, .dtype = t, .shape = {B, CAPACITY, HK, DV}},
                               .cache_seqlens = c->held};
}

static void add_rotary(flash_attn_append *a, cache *c, bool interleaved)
{
    a->rotary.cos         = (flash_attn_tensor){.data = c->cosines, .shape = {POSITIONS, ROTARY / 2, 1, 1}};
    a->rotary.sin         = (flash_attn_tensor){.data = c->sines, .shape = {POSITIONS, ROTARY / 2, 1, 1}};
    a->rotary.interleaved = interleaved;
}

/* Element c of a row at `position`, from the angles themselves. */
static double rotated(const void *row, flash_attn_dtype dtype, int c, int position, bool interleaved)
{
    if (c >= ROTARY)
        return fa_load(row, c, dtype);
    int    pair   = interleaved ? c / 2 : c % (ROTARY / 2);
    bool   second = interleaved ? c % 2 : c >= ROTARY / 2;
    double x      = fa_load(row, interleaved ? 2 * pair : pair, dtype);
    double y      = fa_load(row, interleaved ? 2 * pair + 1 : pair + ROTARY / 2, dtype);
    double angle  = position * pow(10000.0, -2.0 * pair / ROTARY);
    return second ? x * sin(angle) + y * cos(angle) : x * cos(angle) - y * sin(angle);
}

static double tolerance_of(flash_attn_dtype dtype)
{
    return dtype == FLASH_ATTN_F32 ? 1e-6 : dtype == FLASH_ATTN_F16 ? 1.1e-3 : 8e-3;
}

/* Everything in the cache: new rows as the formula says, all else as before. */
static void check_cache(const cache *c, const flash_attn_append *a, bool rotary)
{
    static bool written[PAGES * PAGE * HK * D * 2];
    size_t      bytes = fa_dtype_bytes(c->dtype);
    for (int part = 0; part < 2; part++) {
        const flash_attn_tensor *view = part ? &a->v_cache : &a->k_cache, *from = part ? &a->v_new : &a->k_new;
        int64_t                  width = view->shape[3], rows = view->shape[1];
        memset(written, 0, sizeof written);
        for (int n = 0; n < B * NEW * HK; n++) {
            int     b = n / HK / NEW, t = n / HK % NEW, h = n % HK;
            int     held = a->cache_seqlens ? a->cache_seqlens[b] : 0, at = held + t;
            int64_t entry = a->cache_batch_idx ? a->cache_batch_idx[b] : b, row = at;
            if (a->pages.table) {
                entry = a->pages.table[b * PER_SEQ + at / PAGE];
                row   = at % PAGE;
            }
            const char *source = (const char *)from->data + (size_t)n * (size_t)width * bytes;
            for (int i = 0; i < width; i++) {
                int64_t where  = ((entry * rows + row) * HK + h) * width + i;
                double  expect = part || !rotary
                                     ? fa_load(source, i, c->dtype)
                                     : rotated(source, c->dtype, i, at - (a->leftpad_k ? a->leftpad_k[b] : 0),
                                               a->rotary.interleaved);
                double  got    = fa_load(view->data, where, c->dtype);
                if (!(fabs(got - expect) <= (part || !rotary ? 0.0 : tolerance_of(c->dtype))))
                    fail_msg("%s of sequence %d, row %d, head %d, element %d is %g, expected %g", part ? "v" : "k", b,
                             t, h, i, got, expect);
                written[where] = true;
            }
        }
        const char *now = view->data, *before = part ? (const char *)c->v_before : (const char *)c->k_before;
        for (size_t i = 0; i < (part ? sizeof c->v : sizeof c->k) / bytes; i++)
            if (!(i < sizeof written && written[i]))
                assert_memory_equal(now + i * bytes, before + i * bytes, bytes);
    }
}

static const flash_attn_dtype dtypes[] = {FLASH_ATTN_F32, FLASH_ATTN_F16, FLASH_ATTN_BF16};

static void new_rows_go_behind_those_held(void **state)
{
    (void)state;
    for (int n = 0; n < 3; n++)
        for (int device = 0; device < 2; device++) {
            cache            *c = make_cache(dtypes[n]);
            flash_attn_append a = plain_append(c);
            a.device.type       = device ? FLASH_ATTN_REFERENCE : FLASH_ATTN_CPU;
            assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
            check_cache(c, &a, false);
        }
}

static void both_rotary_layouts_follow_the_formula(void **state)
{
    (void)state;
    for (int n = 0; n < 6; n++) {
        cache            *c = make_cache(dtypes[n / 2]);
        flash_attn_append a = plain_append(c);
        add_rotary(&a, c, n % 2);
        assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
        check_cache(c, &a, true);
    }
}

static void left_padding_moves_rotary_positions_not_rows(void **state)
{
    (void)state;
    cache            *c = make_cache(FLASH_ATTN_F32);
    flash_attn_append a = plain_append(c);
    add_rotary(&a, c, true);
    a.leftpad_k = c->pad;
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    check_cache(c, &a, true);
}

static void cache_entries_follow_the_index(void **state)
{
    (void)state;
    cache            *c = make_cache(FLASH_ATTN_BF16);
    flash_attn_append a = plain_append(c);
    a.cache_batch_idx   = c->index;
    a.k_cache.shape[0] = a.v_cache.shape[0] = ENTRIES;
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    check_cache(c, &a, false);
}

static void pages_hold_what_a_contiguous_cache_holds(void **state)
{
    (void)state;
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        cache            *c = make_cache(FLASH_ATTN_F32);
        flash_attn_append a = plain_append(c);
        add_rotary(&a, c, interleaved);
        a.pages            = (flash_attn_pages){.table = c->table, .pages_per_seq = PER_SEQ};
        a.k_cache.shape[0] = a.v_cache.shape[0] = PAGES;
        a.k_cache.shape[1] = a.v_cache.shape[1] = PAGE;
        assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
        check_cache(c, &a, true);
    }
}

static void no_lengths_means_an_empty_cache(void **state)
{
    (void)state;
    cache            *c = make_cache(FLASH_ATTN_F16);
    flash_attn_append a = plain_append(c);
    a.cache_seqlens     = NULL;
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    check_cache(c, &a, false);
}

static void queries_are_rotated_copied_or_both_in_place(void **state)
{
    (void)state;
    for (int n = 0; n < 16; n++) {
        bool              interleaved = n & 1, at_end = n & 2, in_place = n & 4, rotary = n & 8;
        cache            *c = make_cache(FLASH_ATTN_F32);
        static uint32_t   q_before[B * SQ * HQ * D];
        flash_attn_append a = {.cache_seqlens = c->held, .leftpad_k = c->pad, .q_at_end = at_end};
        a.q                 = (flash_attn_tensor){.data = c->q, .shape = {B, SQ, HQ, D}};
        a.q_out             = (flash_attn_tensor){.data = in_place ? c->q : c->q_out};
        /* What is about new keys is not looked at without them. */
        a.pages           = (flash_attn_pages){.table = c->held, .row_stride = INT64_MAX, .pages_per_seq = -5};
        a.cache_batch_idx = (const int32_t *)a.q_out.data;
        if (rotary)
            add_rotary(&a, c, interleaved);
        if (rotary && at_end) /* as far as the longest sequence goes, and no further */
            a.rotary.cos.shape[0] = a.rotary.sin.shape[0] = CAPACITY - NEW - 1 + 1;
        memcpy(q_before, c->q, sizeof q_before);
        assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
        for (int i = 0; i < B * SQ * HQ * D; i++) {
            int    row = i / D, b = row / HQ / SQ, t = row / HQ % SQ;
            int    position = c->held[b] - c->pad[b] + (at_end ? 0 : t);
            double expect   = rotary ? rotated(q_before + row * D, FLASH_ATTN_F32, i % D, position, interleaved)
                                     : fa_load(q_before, i, FLASH_ATTN_F32);
            assert_true(fabs(fa_load(a.q_out.data, i, FLASH_ATTN_F32) - expect) <= (rotary ? 1e-6 : 0.0));
        }
        assert_memory_equal(c->k, c->k_before, sizeof c->k);
    }
}

/* k and v in one buffer [entries, capacity, 2, heads, d]; heads before rows; every second element. */
static void strided_caches_are_written_in_place(void **state)
{
    (void)state;
    cache            *c = make_cache(FLASH_ATTN_F32);
    flash_attn_append a = plain_append(c);
    a.v_new             = (flash_attn_tensor){.data = c->k_new, .shape = {B, NEW, HK, D}};
    int64_t row         = 2 * HK * D;
    memcpy(a.k_cache.stride, (int64_t[4]){CAPACITY * row, row, D, 1}, sizeof a.k_cache.stride);
    static float one_buffer[B * CAPACITY * 2 * HK * D];
    a.v_cache      = a.k_cache;
    a.k_cache.data = one_buffer;
    a.v_cache.data = one_buffer + HK * D;
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    for (int n = 0; n < B * NEW * HK * D; n++) {
        int    b = n / D / HK / NEW, t = n / D / HK % NEW, h = n / D % HK, i = n % D;
        float *at = one_buffer + (b * CAPACITY + c->held[b] + t) * row + h * D + i;
        assert_true(at[0] == fa_load(c->k_new, n, FLASH_ATTN_F32) && at[HK * D] == at[0]);
    }

    static float spaced[B * HK * CAPACITY * D * 2];
    a              = plain_append(c);
    a.k_cache.data = spaced;
    memcpy(a.k_cache.stride, (int64_t[4]){HK * CAPACITY * D * 2, D * 2, CAPACITY * D * 2, 2}, sizeof a.k_cache.stride);
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    for (int n = 0; n < B * NEW * HK * D; n++) {
        int b = n / D / HK / NEW, t = n / D / HK % NEW, h = n / D % HK, i = n % D;
        assert_true(spaced[((b * HK + h) * CAPACITY + c->held[b] + t) * D * 2 + 2 * i] ==
                    fa_load(c->k_new, n, FLASH_ATTN_F32));
    }
}

static void fp8_rows_are_copied_and_not_rotated(void **state)
{
    (void)state;
    cache            *c = make_cache(FLASH_ATTN_F8E4M3);
    flash_attn_append a = plain_append(c);
    for (size_t i = 0; i < sizeof c->k_new; i++)
        ((uint8_t *)c->k_new)[i] = (uint8_t)i; /* every bit pattern, NaN too */
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
    for (int b = 0; b < B; b++)
        assert_memory_equal((uint8_t *)c->k + (b * CAPACITY + c->held[b]) * HK * D,
                            (uint8_t *)c->k_new + b * NEW * HK * D, NEW * HK * D);
    add_rotary(&a, c, false);
    assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_UNSUPPORTED);
}

/* What a decoder does: append one row at a time, attend to what is there. */
static void appended_keys_are_those_that_attention_sees(void **state)
{
    (void)state;
    cache       *c = make_cache(FLASH_ATTN_F32);
    static float whole[B * NEW * HQ * DV], step[B * HQ * DV];
    memset(c->held, 0, sizeof c->held);
    flash_attn_problem p = {.mask = FLASH_ATTN_CAUSAL};
    p.q                  = (flash_attn_tensor){.data = c->q, .shape = {B, SQ, HQ, D}};
    p.k                  = (flash_attn_tensor){.data = c->k_new, .shape = {B, NEW, HK, D}};
    p.v                  = (flash_attn_tensor){.data = c->v_new, .shape = {B, NEW, HK, DV}};
    p.o                  = (flash_attn_tensor){.data = whole};
    assert_int_equal(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_OK);
    for (int t = 0; t < NEW; t++) {
        flash_attn_append a = plain_append(c);
        a.pages             = (flash_attn_pages){.table = c->table, .pages_per_seq = PER_SEQ};
        a.k_cache.shape[0] = a.v_cache.shape[0] = PAGES;
        a.k_cache.shape[1] = a.v_cache.shape[1] = PAGE;
        a.k_new                                 = (flash_attn_tensor){
                                            .data = c->k_new + t * HK * D, .shape = {B, 1, HK, D}, .stride = {NEW * HK * D, HK * D, D, 1}};
        a.v_new = (flash_attn_tensor){
            .data = c->v_new + t * HK * DV, .shape = {B, 1, HK, DV}, .stride = {NEW * HK * DV, HK * DV, DV, 1}};
        assert_int_equal(flash_attn_append_kv(NULL, &a, NULL), FLASH_ATTN_OK);
        for (int b = 0; b < B; b++)
            c->held[b]++;
        flash_attn_problem one = {.seqused_k = c->held, .pages = a.pages};
        one.q =
            (flash_attn_tensor){.data = c->q + t * HQ * D, .shape = {B, 1, HQ, D}, .stride = {SQ * HQ * D, 0, D, 1}};
        one.k = a.k_cache;
        one.v = a.v_cache;
        one.o = (flash_attn_tensor){.data = step};
        assert_int_equal(flash_attn_forward(NULL, &one, NULL), FLASH_ATTN_OK);
        for (int i = 0; i < B * HQ * DV; i++) {
            int b = i / (HQ * DV);
            assert_true(fabsf(step[i] - whole[(b * NEW + t) * HQ * DV + i % (HQ * DV)]) <= 2e-6f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(new_rows_go_behind_those_held),
        cmocka_unit_test(both_rotary_layouts_follow_the_formula),
        cmocka_unit_test(left_padding_moves_rotary_positions_not_rows),
        cmocka_unit_test(cache_entries_follow_the_index),
        cmocka_unit_test(pages_hold_what_a_contiguous_cache_holds),
        cmocka_unit_test(no_lengths_means_an_empty_cache),
        cmocka_unit_test(queries_are_rotated_copied_or_both_in_place),
        cmocka_unit_test(strided_caches_are_written_in_place),
        cmocka_unit_test(fp8_rows_are_copied_and_not_rotated),
        cmocka_unit_test(appended_keys_are_those_that_attention_sees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
