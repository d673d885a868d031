/* The judge itself: it must pass a right answer and notice each way of being wrong. The copies that a device with its
 * own memory would make are the place where answers are spoilt. */
#include "harness.h"

#include <unistd.h>

typedef enum sabotage {
    NOTHING,
    O_OFF,          /* one element of o off by a little more than allowed */
    O_NAN,          /* one NaN */
    O_UNWRITTEN,    /* one row left as it was */
    O_SHRUNK,       /* all of o too small by less than the tolerance of one element: an error with a direction */
    LSE_OFF,        /* one LSE off by 1e-4 */
    LSE_NOT_INF,    /* a row that sees nothing has a finite LSE */
    O_NOT_ZERO,     /* a row that sees nothing has 1e-30 in it */
    DQ_NOT_ZERO,    /* its gradient too */
    DK_OFF,         /* one element */
    DV_NAN,         /* one NaN */
    BEFORE_O,       /* the byte before o */
    BETWEEN_O,      /* a byte between two elements of o */
    INPUT_CHANGED,  /* the last bit of an element of v */
    UPLOAD_FAILS,   /* the device has no memory */
    DOWNLOAD_FAILS, /* the device is lost */
    NUM_SABOTAGES
} sabotage;

static const char *const names[NUM_SABOTAGES] = {
    "nothing",  "o off",  "o nan",  "o unwritten", "o shrunk",  "lse off",       "lse not inf",  "o not zero",
    "dq not 0", "dk off", "dv nan", "before o",    "between o", "input changed", "upload fails", "download fails"};

typedef struct saboteur {
    sabotage                  what;
    const flash_attn_problem *p;
    const flash_attn_grads   *g;
    int                       released, uploaded;
} saboteur;

/* 60 queries on 40 keys, causal: the first 20 see nothing. */
static const test_case shape = {.heads_q  = 2,
                                .seqlen_q = 60,
                                .seqlen_k = 40,
                                .head_dim = 16,
                                .mask     = FLASH_ATTN_CAUSAL,
                                .layout   = LAYOUT_INNER_STRIDE};

static void *upload(void *user, const void *host, size_t bytes)
{
    saboteur *s    = user;
    void     *copy = s->what == UPLOAD_FAILS && s->uploaded == 2 ? NULL : malloc(bytes);
    if (copy)
        memcpy(copy, host, bytes);
    s->uploaded += copy != NULL;
    return copy;
}

static void release(void *user, void *device)
{
    ((saboteur *)user)->released++;
    free(device);
}

static bool within(const void *p, const void *host, size_t bytes)
{
    return (const char *)p >= (const char *)host && (const char *)p < (const char *)host + bytes;
}

static void add(const flash_attn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d, double value)
{
    set(t, b, i, h, d, get(t, b, i, h, d) + value);
}

static void spoil_o(const saboteur *s)
{
    const flash_attn_tensor *o = &s->p->o;
    switch (s->what) {
    case O_OFF: add(o, 0, 50, 1, 3, 4e-5); break;
    case O_NAN: set(o, 0, 50, 1, 3, (double)NAN); break;
    case O_UNWRITTEN:
        for (int d = 0; d < 16; d++)
            memset(element(o, 0, 59, 1, d), 0xFF, 4);
        break;
    case O_SHRUNK:
        for (int i = 20; i < 60; i++)
            for (int h = 0; h < 2; h++)
                for (int d = 0; d < 16; d++)
                    set(o, 0, i, h, d, get(o, 0, i, h, d) - copysign(4e-6, get(o, 0, i, h, d)));
        break;
    case O_NOT_ZERO: set(o, 0, 5, 0, 2, 1e-30); break;
    case BEFORE_O: ((unsigned char *)o->data)[-1] = 0; break;
    case BETWEEN_O: ((unsigned char *)element(o, 0, 30, 0, 4))[4] = 0; break;
    default: break;
    }
}

static bool download(void *user, void *host, const void *device, size_t bytes)
{
    const saboteur *s = user;
    memcpy(host, device, bytes);
    if (within(s->p->o.data, host, bytes))
        spoil_o(s);
    if (within(s->p->lse.data, host, bytes) && s->what == LSE_OFF)
        add(&s->p->lse, 0, 1, 50, 0, 1e-4);
    if (within(s->p->lse.data, host, bytes) && s->what == LSE_NOT_INF)
        set(&s->p->lse, 0, 1, 5, 0, -1e30);
    if (within(s->g->dq.data, host, bytes) && s->what == DQ_NOT_ZERO)
        set(&s->g->dq, 0, 5, 0, 2, 1e-30);
    if (within(s->g->dk.data, host, bytes) && s->what == DK_OFF)
        add(&s->g->dk, 0, 39, 0, 2, 1e-4);
    if (within(s->g->dv.data, host, bytes) && s->what == DV_NAN)
        set(&s->g->dv, 0, 0, 0, 0, (double)NAN);
    if (within(s->p->v.data, host, bytes) && s->what == INPUT_CHANGED)
        *(unsigned char *)element(&s->p->v, 0, 7, 0, 0) ^= 1;
    return s->what != DOWNLOAD_FAILS;
}

static void the_judge_notices_every_kind_of_wrong_answer(void **state)
{
    (void)state;
    for (int what = NOTHING; what < NUM_SABOTAGES; what++) {
        char           why[200];
        case_instance *x = case_build(&shape, FLASH_ATTN_F32, CASE_BACKWARD, 61, why, sizeof why);
        assert_non_null(x);
        saboteur    s      = {.what = (sabotage)what, .p = case_problem(x), .g = case_grads(x)};
        case_memory memory = {upload, download, release, &s};
        case_device device = {.device = {.type = FLASH_ATTN_REFERENCE}, .memory = &memory};
        case_result result = case_run(x, &device);
        if ((result.verdict == CASE_PASSED) != (what == NOTHING))
            fail_msg("%s: verdict %d, %s", names[what], result.verdict, result.reason);
        assert_true((result.reason[0] == 0) == (what == NOTHING));
        assert_int_equal(s.uploaded, s.released);
        case_free(x);
    }
}

static void the_same_seed_makes_the_same_case(void **state)
{
    (void)state;
    uint64_t hash[3];
    for (int n = 0; n < 3; n++) {
        case_instance *x      = case_build(&shape, FLASH_ATTN_BF16, CASE_BACKWARD, n < 2 ? 5 : 6, NULL, 0);
        case_device    device = {.num_threads = 1};
        assert_non_null(x);
        assert_int_equal(case_run(x, &device).verdict, CASE_PASSED);
        hash[n] = case_output_hash(x);
        case_free(x);
    }
    assert_true(hash[0] == hash[1]);
    assert_true(hash[0] != hash[2]);
}

/* How near the reference's own answer in the case's dtype comes to what is allowed. */
static double judged(case_instance *x)
{
    case_result result = case_run(x, &(case_device){.device = {.type = FLASH_ATTN_REFERENCE}});
    assert_int_equal(result.verdict, CASE_PASSED);
    return result.worst;
}

static double kept_worst; /* of the case whose values were written */

static bool recalled(FILE *file, const test_case *c, flash_attn_dtype dtype, uint64_t seed)
{
    char           why[200] = "";
    case_instance *x        = case_build(c, dtype, CASE_BACKWARD | CASE_NO_EXPECT, seed, why, sizeof why);
    assert_non_null(x);
    rewind(file);
    bool ok = case_read_expected(x, file, why, sizeof why);
    assert_true(ok == (why[0] == 0));
    if (ok)
        assert_true(judged(x) == kept_worst);
    case_free(x);
    return ok;
}

static void expected_values_from_a_file_are_of_this_case_and_whole_or_refused(void **state)
{
    (void)state;
    FILE          *file   = tmpfile();
    case_instance *x      = case_build(&shape, FLASH_ATTN_BF16, CASE_BACKWARD, 5, NULL, 0);
    test_case      capped = shape, renamed = shape;
    capped.softcap = 20; /* the same inputs */
    renamed.name   = "another";
    assert_true(file && x && case_write_expected(x, file));
    kept_worst = judged(x);
    assert_true(kept_worst > 0);
    case_free(x);
    long bytes = ftell(file);
    rewind(file);
    assert_true(case_skip_expected(file));
    assert_int_equal(ftell(file), bytes);
    assert_false(case_skip_expected(file));
    assert_true(recalled(file, &shape, FLASH_ATTN_BF16, 5));
    assert_int_equal(ftell(file), bytes);
    assert_false(recalled(file, &shape, FLASH_ATTN_BF16, 6));
    assert_false(recalled(file, &shape, FLASH_ATTN_F16, 5));
    assert_false(recalled(file, &capped, FLASH_ATTN_BF16, 5));
    assert_false(recalled(file, &renamed, FLASH_ATTN_BF16, 5));
    for (long at = 0; at < bytes; at += bytes / 50) {
        for (int twice = 0; twice < 2; twice++) { /* damaged, and as it was */
            fseek(file, at, SEEK_SET);
            int byte = fgetc(file);
            fseek(file, at, SEEK_SET);
            fputc(byte ^ 1, file);
            assert_true(recalled(file, &shape, FLASH_ATTN_BF16, 5) == (twice == 1));
        }
    }
    assert_int_equal(ftruncate(fileno(file), bytes - 1), 0);
    assert_false(recalled(file, &shape, FLASH_ATTN_BF16, 5));
    assert_int_equal(ftruncate(fileno(file), 0), 0);
    assert_false(recalled(file, &shape, FLASH_ATTN_BF16, 5));
    fclose(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_judge_notices_every_kind_of_wrong_answer),
        cmocka_unit_test(the_same_seed_makes_the_same_case),
        cmocka_unit_test(expected_values_from_a_file_are_of_this_case_and_whole_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
