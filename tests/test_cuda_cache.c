/* flash_attn_merge and flash_attn_append_kv on a GPU against REFERENCE; skipped, with the reason, where there is none. */
#include "case_gpu.h"
#include "case_numbers.h"
#include "harness.h"

#include <math.h>
#include <string.h>

static const case_memory *memory;
static const case_gpu    *gpu;
static char               no_gpu[200];

static void need_gpu(void) { skip_unless(memory != NULL, no_gpu); }

static const flash_attn_device on_gpu = {.type = FLASH_ATTN_CUDA}, on_host = {.type = FLASH_ATTN_REFERENCE};

/* One array in host and device memory. */
typedef struct twin {
    float *host, *device;
    size_t count;
} twin;

static twin make_twin(size_t count, float (*value)(size_t, void *), void *user)
{
    twin t = {malloc(count * sizeof(float)), gpu->alloc(count * sizeof(float)), count};
    assert_true(t.host && t.device);
    for (size_t i = 0; i < count; i++)
        t.host[i] = value(i, user);
    assert_true(gpu->to_device(t.device, t.host, count * sizeof(float)));
    return t;
}

/* The device's copy is within `tolerance` of the host's, where infinities and NaN are alike. */
static void expect_near(const twin *t, double tolerance)
{
    float *got = malloc(t->count * sizeof(float));
    assert_non_null(got);
    assert_true(gpu->to_host(got, t->device, t->count * sizeof(float)));
    for (size_t i = 0; i < t->count; i++) {
        float a = got[i], b = t->host[i];
        bool  same = memcmp(&a, &b, sizeof a) == 0 || fabs((double)a - (double)b) <= tolerance * fmax(1.0, fabs((double)b));
        if (!same)
            fail_msg("element %zu is %g on the GPU, %g expected", i, (double)a, (double)b);
    }
    free(got);
}

static void free_twin(twin *t)
{
    free(t->host);
    gpu->free(t->device);
}

static float random_value(size_t i, void *user)
{
    uint32_t x = (uint32_t)i * 2654435761u + *(uint32_t *)user * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(int32_t)x * 0x1p-31f * 3.0f;
}

/* An LSE that is -inf for a third of the rows, and a large one now and then. */
static float lse_value(size_t i, void *user)
{
    float x = random_value(i, user);
    return x < -1.0f ? -INFINITY : i % 97 == 0 ? 3000.0f * x : 10.0f * x;
}

/* ---- merge ---- */

static void merging_is_as_on_the_host(void **state)
{
    (void)state;
    need_gpu();
    enum { B = 3, S = 37, H = 5, D = 50, MOST = 32 };
    static const int counts[] = {1, 2, 7, 32};
    for (int n = 0; n < 4; n++) {
        flash_attn_partial host[MOST + 1] = {{{0}, {0}}}, device[MOST + 1] = {{{0}, {0}}};
        twin               o[MOST + 1], lse[MOST + 1];
        for (int p = 0; p <= counts[n]; p++) {
            uint32_t seed = (uint32_t)(100 * n + p);
            o[p]          = make_twin(B * S * H * D, random_value, &seed);
            lse[p]        = make_twin(B * H * S, lse_value, &seed);
            for (size_t i = 0; i < lse[p].count; i++) /* what an empty part holds must not matter */
                if (lse[p].host[i] == -INFINITY)
                    for (size_t d = 0; d < D; d++) {
                        size_t b = i / (H * S), h = i / S % H, s = i % S;
                        o[p].host[((b * S + s) * H + h) * D + d] = NAN;
                    }
            assert_true(gpu->to_device(o[p].device, o[p].host, o[p].count * sizeof(float)));
            host[p]   = (flash_attn_partial){{.data = o[p].host, .shape = {B, S, H, D}}, {.data = lse[p].host, .shape = {B, H, S, 1}}};
            device[p] = (flash_attn_partial){{.data = o[p].device, .shape = {B, S, H, D}}, {.data = lse[p].device, .shape = {B, H, S, 1}}};
        }
        int last = counts[n];
        expect_ok(flash_attn_merge(NULL, on_host, host, last, &host[last], NULL));
        expect_ok(flash_attn_merge(NULL, on_gpu, device, last, &device[last], NULL));
        expect_near(&o[last], 5e-6);
        expect_near(&lse[last], 5e-6);
        expect_ok(flash_attn_merge(NULL, on_gpu, device, last, &device[0], NULL)); /* in place of part 0 */
        memcpy(o[0].host, o[last].host, o[0].count * sizeof(float));
        memcpy(lse[0].host, lse[last].host, lse[0].count * sizeof(float));
        expect_near(&o[0], 5e-6);
        expect_near(&lse[0], 5e-6);
        for (int p = 0; p <= last; p++) {
            free_twin(&o[p]);
            free_twin(&lse[p]);
        }
    }
}

static void more_parts_than_a_launch_takes_are_refused(void **state)
{
    (void)state;
    need_gpu();
    uint32_t           seed     = 1;
    twin               o        = make_twin(40 * 8, random_value, &seed), lse = make_twin(40, random_value, &seed);
    flash_attn_partial part[34] = {{{0}, {0}}};
    for (int p = 0; p < 34; p++)
        part[p] = (flash_attn_partial){{.data = o.device + 8 * p, .shape = {1, 1, 1, 8}}, {.data = lse.device + p, .shape = {1, 1, 1, 1}}};
    assert_int_equal(flash_attn_merge(NULL, on_gpu, part, 33, &part[33], NULL), FLASH_ATTN_UNSUPPORTED);
    assert_non_null(strstr(flash_attn_last_error(), "33"));
    free_twin(&o);
    free_twin(&lse);
}

/* ---- append ---- */

enum { BATCH = 3, NEW = 5, HEADS_K = 2, HEADS_Q = 6, DIM = 32, DIM_V = 20, ROOM = 64, ENTRIES = 4, PAGE = 16, POSITIONS = 128 };

typedef struct append_twins {
    twin    k_new, v_new, k_cache, v_cache, cos, sin, q, q_out;
    int32_t arrays[4][16]; /* cache_seqlens, cache_batch_idx, leftpad, page table */
    int32_t *on_device[4];
} append_twins;

static append_twins make_append(void)
{
    uint32_t     seed = 5;
    append_twins t    = {.k_new   = make_twin(BATCH * NEW * HEADS_K * DIM, random_value, &seed),
                         .v_new   = make_twin(BATCH * NEW * HEADS_K * DIM_V, random_value, &seed),
                         .k_cache = make_twin(ENTRIES * ROOM * HEADS_K * DIM, random_value, &seed),
                         .v_cache = make_twin(ENTRIES * ROOM * HEADS_K * DIM_V, random_value, &seed),
                         .cos     = make_twin(POSITIONS * 8, random_value, &seed),
                         .sin     = make_twin(POSITIONS * 8, random_value, &(uint32_t){6}),
                         .q       = make_twin(BATCH * 4 * HEADS_Q * DIM, random_value, &seed),
                         .q_out   = make_twin(BATCH * 4 * HEADS_Q * DIM, random_value, &(uint32_t){7}),
                         .arrays  = {{7, 0, 50}, {2, 0, 3}, {3, 0, 20}, {9, 4, 11, 2, 0, 15, 3, 8, 14, 6, 1, 5}}};
    for (int n = 0; n < 4; n++) {
        t.on_device[n] = gpu->alloc(sizeof t.arrays[n]);
        assert_true(t.on_device[n] && gpu->to_device(t.on_device[n], t.arrays[n], sizeof t.arrays[n]));
    }
    return t;
}

static flash_attn_append append_of(const append_twins *t, bool device, int way)
{
    bool              paged = way & 1, rotated = way & 2, interleaved = way & 4;
#define DATA(name) (device ? (void *)t->name.device : (void *)t->name.host)
#define ARRAY(n) (device ? t->on_device[n] : t->arrays[n])
    flash_attn_append a = {
        .device        = device ? on_gpu : on_host,
        .k_new         = {.data = DATA(k_new), .shape = {BATCH, NEW, HEADS_K, DIM}},
        .v_new         = {.data = DATA(v_new), .shape = {BATCH, NEW, HEADS_K, DIM_V}},
        .k_cache       = {.data = DATA(k_cache), .shape = {ENTRIES, ROOM, HEADS_K, DIM}},
        .v_cache       = {.data = DATA(v_cache), .shape = {ENTRIES, ROOM, HEADS_K, DIM_V}},
        .cache_seqlens = ARRAY(0),
    };
    if (paged) {
        a.k_cache.shape[0] = a.v_cache.shape[0] = ENTRIES * ROOM / PAGE;
        a.k_cache.shape[1] = a.v_cache.shape[1] = PAGE;
        a.pages = (flash_attn_pages){.table = ARRAY(3), .pages_per_seq = 4};
    } else {
        a.cache_batch_idx = ARRAY(1);
    }
    if (rotated) {
        a.leftpad_k = ARRAY(2);
        a.rotary    = (flash_attn_rotary){.cos         = {.data = DATA(cos), .shape = {POSITIONS, 8, 1, 1}},
                                          .sin         = {.data = DATA(sin), .shape = {POSITIONS, 8, 1, 1}},
                                          .interleaved = interleaved};
        a.q         = (flash_attn_tensor){.data = DATA(q), .shape = {BATCH, 4, HEADS_Q, DIM}};
        a.q_out     = (flash_attn_tensor){.data = DATA(q_out), .shape = {BATCH, 4, HEADS_Q, DIM}};
        a.q_at_end  = interleaved;
    }
    return a;
}

static void appending_is_as_on_the_host(void **state)
{
    (void)state;
    need_gpu();
    for (int way = 0; way < 8; way++) {
        append_twins      t = make_append();
        flash_attn_append a = append_of(&t, false, way), b = append_of(&t, true, way);
        expect_ok(flash_attn_append_kv(NULL, &a, NULL));
        expect_ok(flash_attn_append_kv(NULL, &b, NULL));
        twin *all[] = {&t.k_new, &t.v_new, &t.k_cache, &t.v_cache, &t.cos, &t.sin, &t.q, &t.q_out};
        for (int n = 0; n < 8; n++) {
            expect_near(all[n], 1e-6); /* also: nothing else was written */
            free_twin(all[n]);
        }
        for (int n = 0; n < 4; n++)
            gpu->free(t.on_device[n]);
    }
}

/* Lengths and page ids in device memory that no host can check. */
static void rows_that_do_not_fit_are_not_written(void **state)
{
    (void)state;
    need_gpu();
    static const int32_t bad[][4] = {{61, -3, 1 << 30}, {99, -1, 1 << 30}, {0, 0, 0}, {1 << 30, -1, 16, 99}};
    for (int way = 0; way < 2; way++) {
        append_twins t = make_append();
        t.arrays[0][0] = bad[0][0];
        t.arrays[0][1] = bad[0][1];
        t.arrays[0][2] = bad[0][2];
        for (int n = 0; n < 4; n++) {
            t.arrays[1][n < 3 ? n : 0] = bad[1][n < 3 ? n : 0];
            for (int m = 0; m < 3; m++)
                t.arrays[3][4 * m + n] = bad[3][n];
        }
        for (int n = 0; n < 4; n++)
            assert_true(gpu->to_device(t.on_device[n], t.arrays[n], sizeof t.arrays[n]));
        flash_attn_append b = append_of(&t, true, way);
        expect_ok(flash_attn_append_kv(NULL, &b, NULL));
        expect_near(&t.k_cache, 0);
        expect_near(&t.v_cache, 0);
        assert_true(gpu->wait(NULL));
        twin *all[] = {&t.k_new, &t.v_new, &t.k_cache, &t.v_cache, &t.cos, &t.sin, &t.q, &t.q_out};
        for (int n = 0; n < 8; n++)
            free_twin(all[n]);
        for (int n = 0; n < 4; n++)
            gpu->free(t.on_device[n]);
    }
}

int main(void)
{
    memory = case_gpu_memory(0, no_gpu, sizeof no_gpu);
    gpu    = case_gpu_get();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merging_is_as_on_the_host),
        cmocka_unit_test(more_parts_than_a_launch_takes_are_refused),
        cmocka_unit_test(appending_is_as_on_the_host),
        cmocka_unit_test(rows_that_do_not_fit_are_not_written),
    };
    return cmocka_run_group_tests_name("cuda_cache", tests, NULL, NULL);
}
