/* The overlap check against a plain listing of bytes, on random small views. It may call apart views overlapping only
 * for strides that no layout of a tensor has; for views cut from one buffer it must be exact. */
#include "case_numbers.h"
#include "check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { ARENA = 1 << 14 };

static uint64_t random_state = 1;

/* Set a byte of `map` for every byte of the view; true if one was set. */
static bool mark(const flash_attn_tensor *t, const char *arena, unsigned char *map)
{
    bool hit   = false;
    int  bytes = (int)fa_dtype_bytes(t->dtype);
    for (int64_t n = 0; n < t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; n++) {
        int64_t i3 = n % t->shape[3], i2 = n / t->shape[3] % t->shape[2];
        int64_t i1 = n / t->shape[3] / t->shape[2] % t->shape[1], i0 = n / t->shape[3] / t->shape[2] / t->shape[1];
        for (int i = 0; i < bytes; i++) {
            int64_t at = fa_at(t, i0, i1, i2, i3) - arena + i;
            assert_in_range(at, 0, ARENA - 1);
            hit     = hit || map[at];
            map[at] = 1;
        }
    }
    return hit;
}

static bool really_overlap(const flash_attn_tensor *a, const flash_attn_tensor *b, const char *arena)
{
    static unsigned char map[ARENA];
    memset(map, 0, sizeof map);
    mark(a, arena, map);
    unsigned char map_a[ARENA];
    memcpy(map_a, map, sizeof map);
    memset(map, 0, sizeof map);
    mark(b, arena, map);
    for (int i = 0; i < ARENA; i++)
        if (map_a[i] && map[i])
            return true;
    return false;
}

static flash_attn_tensor random_view(char *arena, int longest, int stride)
{
    static const flash_attn_dtype dtypes[] = {FLASH_ATTN_F32, FLASH_ATTN_F16, FLASH_ATTN_F8E4M3};
    flash_attn_tensor             t        = {.dtype = dtypes[random_int(&random_state, 0, 2)]};
    for (int i = 0; i < 4; i++) {
        t.shape[i]  = random_int(&random_state, 1, longest);
        t.stride[i] = random_int(&random_state, -stride, stride);
    }
    t.data = arena + ARENA / 2 + 4 * random_int(&random_state, -40, 40);
    return t;
}

static void overlap_is_never_missed(void **state)
{
    (void)state;
    static char arena[ARENA];
    int         missed = 0, apart = 0, wrongly = 0;
    for (int n = 0; n < 20000; n++) {
        flash_attn_tensor a = random_view(arena, 4, 60), b = random_view(arena, 4, 60);
        bool              really = really_overlap(&a, &b, arena), said = fa_views_overlap(&a, &b);
        missed += really && !said;
        apart += !really;
        wrongly += !really && said;
    }
    assert_int_equal(missed, 0);
    assert_true(apart > 1000); /* so that the test says something */
    assert_int_equal(wrongly, 0);
}

/* Cut [b, s, parts, h, d] into views of some parts each, then permute, reverse or shorten them. */
static void views_of_one_buffer_are_told_apart(void **state)
{
    (void)state;
    static char arena[ARENA];
    int         disjoint = 0;
    for (int n = 0; n < 5000; n++) {
        int64_t           b = random_int(&random_state, 1, 3), s = random_int(&random_state, 1, 4), parts = random_int(&random_state, 2, 6), d = random_int(&random_state, 1, 5);
        int64_t           row = parts * d;
        flash_attn_tensor view[2];
        for (int i = 0; i < 2; i++) {
            int64_t first = random_int(&random_state, 0, (int)parts - 1), heads = random_int(&random_state, 1, (int)(parts - first));
            view[i] = (flash_attn_tensor){.data   = arena + ARENA / 2 + 4 * first * d,
                                          .shape  = {random_int(&random_state, 1, (int)b), random_int(&random_state, 1, (int)s), heads, d},
                                          .stride = {s * row, row, d, 1}};
            if (random_int(&random_state, 0, 1)) { /* the sequence runs backwards */
                view[i].data      = (char *)view[i].data + 4 * (view[i].shape[1] - 1) * row;
                view[i].stride[1] = -row;
            }
        }
        bool really = really_overlap(&view[0], &view[1], arena);
        disjoint += !really;
        assert_int_equal(fa_views_overlap(&view[0], &view[1]), really);
    }
    assert_true(disjoint > 500);
}

static void empty_views_overlap_nothing(void **state)
{
    (void)state;
    static char       arena[ARENA];
    flash_attn_tensor a = {.data = arena, .shape = {2, 0, 3, 4}, .stride = {1, 1, 1, 1}}, b = a;
    b.shape[1] = 2;
    assert_false(fa_views_overlap(&a, &b));
    assert_true(fa_views_overlap(&b, &b));
}

/* What is accepted as an output has no element twice. */
static void accepted_outputs_do_not_overlap_themselves(void **state)
{
    (void)state;
    static char          arena[ARENA];
    static unsigned char map[ARENA];
    int                  accepted = 0;
    for (int n = 0; n < 20000; n++) {
        flash_attn_tensor t = random_view(arena, 3, 40);
        t.data              = arena + ARENA / 2;
        memset(map, 0, sizeof map);
        bool overlaps = mark(&t, arena, map);
        bool accepts  = fa_view_output_layout("t", &t, false) == FLASH_ATTN_OK;
        accepted += accepts;
        assert_false(overlaps && accepts);
    }
    assert_true(accepted > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overlap_is_never_missed),
        cmocka_unit_test(views_of_one_buffer_are_told_apart),
        cmocka_unit_test(empty_views_overlap_nothing),
        cmocka_unit_test(accepted_outputs_do_not_overlap_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
