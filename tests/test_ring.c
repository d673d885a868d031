/* Ring attention on the host: ranks are threads, the transport is the sockets of examples/ring. With --short each case
 * has one layout, number of ranks and dtype, in turn, for where they take minutes. */
#include "dist/dist.h"
#include "harness_ring.h"

#define NONE .mask = FLASH_ATTN_NONE
#define CAUSAL .mask = FLASH_ATTN_CAUSAL
#define WINDOW(l, r) .mask = FLASH_ATTN_WINDOW, .left = l, .right = r
#define SHAPE(b, sq, sk, hq, hk, d, dv) b, sq, sk, hq, hk, d, dv

/* Each with all layouts and 1 to 4 ranks. */
static const ring_case cases[] = {
    {SHAPE(1, 64, 64, 2, 2, 32, 32), NONE},
    {SHAPE(1, 64, 64, 2, 2, 32, 32), CAUSAL},
    {SHAPE(2, 97, 97, 4, 2, 40, 24), CAUSAL}, /* odd lengths, GQA, head_dim_v */
    {SHAPE(2, 61, 61, 4, 1, 64, 64), NONE, .softcap = 3.0f, .heads_first = true},
    {SHAPE(1, 83, 83, 3, 3, 16, 16), CAUSAL, .sinks = true, .scale = 0.4f},
    {SHAPE(1, 90, 90, 4, 2, 32, 32), WINDOW(20, 0), .sinks = true},
    {SHAPE(1, 75, 75, 2, 2, 32, 32), WINDOW(9, 17), .heads_first = true},
    {SHAPE(1, 75, 75, 2, 2, 32, 32), WINDOW(-1, 5)},
    {SHAPE(1, 75, 75, 2, 1, 32, 32), WINDOW(30, -1)},
    {SHAPE(1, 40, 101, 2, 2, 32, 32), CAUSAL},                /* fewer queries than keys */
    {SHAPE(1, 101, 40, 2, 2, 32, 32), CAUSAL, .sinks = true}, /* the first queries see nothing */
    {SHAPE(1, 57, 80, 2, 1, 32, 48), WINDOW(7, 3), .sinks = true},
    {SHAPE(1, 5, 5, 2, 2, 32, 32), CAUSAL}, /* shorter than 8 chunks */
    {SHAPE(1, 3, 1, 2, 2, 8, 8), NONE},     /* ranks without keys */
    {SHAPE(1, 300, 300, 2, 2, 64, 64), CAUSAL},
};
enum { NUM_CASES = sizeof cases / sizeof *cases };

static bool is_short, one_dtype; /* of a ring, by turns */

/* ---- positions ---- */

static void shares_hold_every_position_once(void **state)
{
    (void)state;
    for (int layout = 0; layout <= FLASH_ATTN_RING_STRIPED; layout++)
        for (int ranks = 1; ranks <= 7; ranks++)
            for (int seqlen = 0; seqlen <= 40; seqlen++) {
                int seen[40] = {0};
                for (int rank = 0; rank < ranks; rank++) {
                    flash_attn_ring_share s;
                    expect_ok(flash_attn_ring_get_share((flash_attn_ring_layout)layout, ranks, rank, seqlen, &s));
                    assert_int_equal(s.rows, s.count[0] + s.count[1]);
                    int64_t before = -1;
                    for (int64_t row = 0; row < s.rows; row++) {
                        int64_t at =
                            row < s.count[0] ? s.begin[0] + row * s.step : s.begin[1] + (row - s.count[0]) * s.step;
                        assert_true(at > before &&
                                    at < seqlen); /* a rank's rows rise, so its own causal mask is a causal mask */
                        seen[before = at]++;
                    }
                }
                for (int n = 0; n < seqlen; n++)
                    assert_int_equal(seen[n], 1);
            }
}

static int64_t position(const flash_attn_ring_share *s, int64_t row)
{
    return row < s->count[0] ? s->begin[0] + row * s->step : s->begin[1] + (row - s->count[0]) * s->step;
}

/* How often the rectangles show a pair of local rows, by the public masks' rule. */
static int times_shown(const fa_ring_rect *rects, int count, int64_t i, int64_t j)
{
    int times = 0;
    for (int n = 0; n < count; n++) {
        const fa_ring_rect *r          = &rects[n];
        bool                free_left  = r->mask != FLASH_ATTN_WINDOW || r->left < 0;
        bool                free_right = r->mask == FLASH_ATTN_NONE || (r->mask == FLASH_ATTN_WINDOW && r->right < 0);
        fa_window           window     = {free_left ? FA_UNLIMITED : r->left, free_right ? FA_UNLIMITED : r->right};
        int                 diagonal   = (int)((r->k_end - r->k_begin) - (r->q_end - r->q_begin));
        times += i >= r->q_begin && i < r->q_end && j >= r->k_begin && j < r->k_end &&
                 fa_window_sees(window, diagonal, (int)(i - r->q_begin), (int)(j - r->k_begin));
    }
    return times;
}

static void rectangles_show_each_visible_pair_once(void **state)
{
    (void)state;
    uint64_t random = 7;
    for (int trial = 0; trial < 20000; trial++) {
        int ranks = random_int(&random, 1, 5), layout = random_int(&random, 0, 2), sq = random_int(&random, 0, 45);
        int sk = random_int(&random, 0, 3) ? sq : random_int(&random, 0, 45), kind = random_int(&random, 0, 3);
        int own = random_int(&random, 0, ranks - 1), other = random_int(&random, 0, ranks - 1), count;
        fa_ring_mask mask = {sk - sq, -1, -1};
        if (kind == 1)
            mask.right = 0;
        if (kind >= 2) {
            mask.left  = random_int(&random, -1, 20);
            mask.right = random_int(&random, -1, 20);
        }
        flash_attn_ring_share q, k;
        fa_ring_rect          rects[FA_RING_MAX_RECTS];
        flash_attn_ring_get_share((flash_attn_ring_layout)layout, ranks, own, sq, &q);
        flash_attn_ring_get_share((flash_attn_ring_layout)layout, ranks, other, sk, &k);
        count = fa_ring_rects(&q, &k, mask, own == other && sq == sk, rects);
        assert_in_range(count, 0, FA_RING_MAX_RECTS);
        for (int n = 0; n < count; n++) {
            assert_true(rects[n].q_begin < rects[n].q_end && rects[n].q_end <= q.rows && rects[n].k_end <= k.rows);
            assert_true(rects[n].left >= -1 && rects[n].right >= -1 && rects[n].k_begin < rects[n].k_end);
        }
        for (int64_t i = 0; i < q.rows; i++)
            for (int64_t j = 0; j < k.rows; j++) {
                int64_t apart = position(&k, j) - position(&q, i) - mask.diagonal;
                bool    sees  = (mask.right < 0 || apart <= mask.right) && (mask.left < 0 || -apart <= mask.left);
                if (times_shown(rects, count, i, j) != sees)
                    fail_msg("ranks %d, layout %d, %d x %d, window %d %d, rank %d sees %d: pair %d %d", ranks, layout,
                             sq, sk, (int)mask.left, (int)mask.right, own, other, (int)i, (int)j);
            }
    }
}

/* A causal step of a zigzag or a striped ring is one call, and as much work on every rank. */
static void causal_work_is_balanced(void **state)
{
    (void)state;
    for (int layout = FLASH_ATTN_RING_ZIGZAG; layout <= FLASH_ATTN_RING_STRIPED; layout++)
        for (int rank = 0; rank < 4; rank++)
            for (int other = 0; other < 4; other++) {
                flash_attn_ring_share q, k;
                fa_ring_rect          rects[FA_RING_MAX_RECTS];
                int64_t               pairs = 0;
                flash_attn_ring_get_share((flash_attn_ring_layout)layout, 4, rank, 512, &q);
                flash_attn_ring_get_share((flash_attn_ring_layout)layout, 4, other, 512, &k);
                assert_int_equal(fa_ring_rects(&q, &k, (fa_ring_mask){0, -1, 0}, rank == other, rects), 1);
                for (int64_t i = 0; i < q.rows; i++)
                    for (int64_t j = 0; j < k.rows; j++)
                        pairs += times_shown(rects, 1, i, j);
                assert_in_range(pairs, 128 * 127 / 2, 128 * 129 / 2);
            }
}

/* ---- results ---- */

static void run_case(ring_case shape, flash_attn_dtype dtype, const tier *t)
{
    ring_world *test = ring_start(shape, dtype, 1 + (uint64_t)shape.ranks);
    for (int rank = 0; rank < shape.ranks; rank++) {
        ring_world_rank(test, rank)->context          = t->context;
        ring_world_rank(test, rank)->exec.num_threads = 1 + rank % 2;
        ring_world_rank(test, rank)->give_workspace   = shape.ranks == 3;
        ring_world_rank(test, rank)->by_allocator     = rank == 1;
    }
    char what[200];
    snprintf(what, sizeof what, "%s %s, %d ranks, layout %d, %d x %d, mask %d", t->name, dtype_name(dtype), shape.ranks,
             (int)shape.layout, shape.seqlen_q, shape.seqlen_k, (int)shape.mask);
    expect_ring_right_twice(test, what);
    ring_world_free(test);
}

static void a_ring_gives_what_one_rank_gives(void **state)
{
    (void)state;
    for (int n = 0; n < NUM_CASES; n++)
        for (int layout = 0; layout <= FLASH_ATTN_RING_STRIPED; layout++)
            for (int ranks = layout == 0 ? 1 : 2; ranks <= 4; ranks++) {
                ring_case shape = cases[n];
                shape.layout    = (flash_attn_ring_layout)layout;
                shape.ranks     = ranks;
                for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++)
                    if (is_short    ? layout == n % 3 && ranks == 2 + n / 3 % 3 && dtype == (n + n / 3) % 3
                        : one_dtype ? dtype == (n + layout + ranks) % 3
                                    : true)
                        run_case(shape, (flash_attn_dtype)dtype, tier_at(num_tiers() - 1));
            }
}

static void every_tier_runs_a_ring(void **state)
{
    (void)state;
    for (int n = 0; n < num_tiers(); n++)
        for (int dtype = FLASH_ATTN_F32; dtype <= FLASH_ATTN_BF16; dtype++) {
            ring_case shape = cases[2];
            shape.layout    = FLASH_ATTN_RING_ZIGZAG;
            shape.ranks     = 3;
            run_case(shape, (flash_attn_dtype)dtype, tier_at(n));
        }
}

static void one_rank_gives_the_bits_of_the_plain_call(void **state)
{
    (void)state;
    ring_world *test = ring_start(usual_ring(1), FLASH_ATTN_BF16, 5);
    ring_rank  *r    = ring_world_rank(test, 0);
    memset(&r->ring.transport, 0, sizeof r->ring.transport); /* not needed */
    ring_world_run(test, true);
    expect_ring_right(test, "one rank");
    flash_attn_problem p = r->p;
    flash_attn_grads   g = r->g;
    flash_attn_tensor  o = copy_of(&p.o), dq = copy_of(&g.dq), dk = copy_of(&g.dk);
    expect_ok(flash_attn_forward(NULL, &p, NULL));
    expect_ok(flash_attn_backward(NULL, &p, &g, NULL));
    expect_same_bits(&p.o, &o, "o");
    expect_same_bits(&g.dq, &dq, "dq");
    expect_same_bits(&g.dk, &dk, "dk");
    free(o.data);
    free(dq.data);
    free(dk.data);
    ring_world_free(test);
}

/* What is not wanted is not made, and what is gets the same bits. */
static void gradients_that_are_not_wanted_may_be_absent(void **state)
{
    (void)state;
    for (int wanted = 0; wanted < 8; wanted++) {
        ring_case shape        = usual_ring(3);
        shape.sinks            = wanted == 5;
        ring_world       *test = ring_start(shape, FLASH_ATTN_F32, 5);
        flash_attn_tensor all[3][3];
        void             *memory[3][3];
        ring_world_run(test, true);
        expect_ring_right(test, "all wanted");
        for (int rank = 0; rank < 3; rank++) {
            ring_rank         *r    = ring_world_rank(test, rank);
            flash_attn_tensor *g[3] = {&r->g.dq, &r->g.dk, &r->g.dv};
            for (int n = 0; n < 3; n++) {
                all[rank][n]    = copy_of(g[n]);
                memory[rank][n] = g[n]->data;
                if (!(wanted >> n & 1))
                    g[n]->data = NULL;
            }
        }
        ring_world_run(test, true);
        expect_ring_ok(test);
        for (int rank = 0; rank < 3; rank++) {
            ring_rank         *r    = ring_world_rank(test, rank);
            flash_attn_tensor *g[3] = {&r->g.dq, &r->g.dk, &r->g.dv};
            for (int n = 0; n < 3; n++) {
                if (wanted >> n & 1)
                    expect_same_bits(g[n], &all[rank][n], "a gradient");
                g[n]->data = memory[rank][n];
                free(all[rank][n].data);
            }
        }
        ring_world_free(test);
    }
}

/* NaN at the last position: only the last query sees it. */
static void future_keys_do_not_change_causal_output(void **state)
{
    (void)state;
    for (int layout = 0; layout <= FLASH_ATTN_RING_STRIPED; layout++) {
        ring_case shape        = usual_ring(3);
        shape.layout           = (flash_attn_ring_layout)layout;
        ring_world       *test = ring_start(shape, FLASH_ATTN_BF16, 9);
        flash_attn_tensor clean[2];
        double            worst;
        ring_world_run(test, false);
        expect_ring_ok(test);
        assert_null(ring_world_compare(test, false, &worst));
        for (int n = 0; n < 2; n++)
            clean[n] = copy_of(ring_world_result(test, n ? RING_LSE : RING_O));
        flash_attn_problem *whole = ring_world_whole(test);
        for (int h = 0; h < shape.heads_k; h++)
            for (int d = 0; d < shape.head_dim; d++) {
                set(&whole->k, 0, shape.seqlen_k - 1, h, d, NAN);
                set(&whole->v, 0, shape.seqlen_k - 1, h, d, NAN);
            }
        ring_world_run(test, false);
        expect_ring_ok(test);
        assert_non_null(ring_world_compare(test, false, &worst)); /* the last query has it */
        for (int n = 0; n < 2; n++) {
            flash_attn_tensor now = *ring_world_result(test, n ? RING_LSE : RING_O);
            expect_same_bits(&(flash_attn_tensor[1]){slice_of(now, 1 + n, 0, shape.seqlen_q - 1)}[0],
                             &(flash_attn_tensor[1]){slice_of(clean[n], 1 + n, 0, shape.seqlen_q - 1)}[0],
                             n ? "lse" : "o");
            free(clean[n].data);
        }
        ring_world_free(test);
    }
}

static bool has_more_than_16_bits(const flash_attn_tensor *t)
{
    double *values = values_of(t);
    int64_t more   = 0;
    for (int64_t n = 0; n < count_of(t); n++)
        more += fa_float_of_f16(fa_f16_of_float((float)values[n])) != (float)values[n];
    free(values);
    return more > count_of(t) / 2;
}

/* dK and dV come home as they are wanted, or both in float32. */
static void gradients_may_have_dtypes_of_their_own(void **state)
{
    (void)state;
    for (int kind = 1; kind < 8; kind++) {
        ring_case   shape        = usual_ring(3);
        ring_world *test         = ring_start(shape, FLASH_ATTN_F16, 5);
        void       *memory[3][3] = {0};
        enum { GUARD = 64 };
        for (int rank = 0; rank < 3; rank++) {
            ring_rank         *r    = ring_world_rank(test, rank);
            flash_attn_tensor *g[3] = {&r->g.dq, &r->g.dk, &r->g.dv};
            for (int n = 0; n < 3; n++)
                if (kind >> n & 1) {
                    memory[rank][n] = g[n]->data;
                    g[n]->dtype     = FLASH_ATTN_F32;
                    g[n]->data      = (char *)malloc((size_t)count_of(g[n]) * sizeof(float) + 2 * GUARD) + GUARD;
                }
        }
        ring_world_run(test, true);
        expect_ring_right(test, "with gradients in float32");
        for (int rank = 0; rank < 3; rank++) {
            ring_rank         *r    = ring_world_rank(test, rank);
            flash_attn_tensor *g[3] = {&r->g.dq, &r->g.dk, &r->g.dv};
            for (int n = 0; n < 3; n++)
                if (kind >> n & 1) {
                    assert_true(has_more_than_16_bits(g[n]));
                    free((char *)g[n]->data - GUARD);
                    g[n]->data = memory[rank][n];
                }
        }
        ring_world_free(test);
    }
}

/* A second one would come to a GPU when the first one's place is taken (src/dist/backward.c). */
typedef struct counted {
    flash_attn_transport real;
    int                  under_way, most;
} counted;

static int counted_begin(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    counted *c = user;
    c->under_way++;
    c->most = c->under_way > c->most ? c->under_way : c->most;
    return c->real.begin(c->real.user, send, send_bytes, recv, recv_bytes, stream);
}

static int counted_wait(void *user, void *stream)
{
    counted *c   = user;
    c->under_way = 0;
    return c->real.wait(c->real.user, stream);
}

static void one_transfer_is_under_way_at_a_time(void **state)
{
    (void)state;
    ring_world *test = ring_start(usual_ring(4), FLASH_ATTN_BF16, 5);
    counted     c[4];
    for (int rank = 0; rank < 4; rank++) {
        flash_attn_transport *t = &ring_world_rank(test, rank)->ring.transport;
        c[rank]                 = (counted){.real = *t};
        *t = (flash_attn_transport){.begin = counted_begin, .wait = counted_wait, .user = &c[rank]};
    }
    ring_world_run(test, true);
    expect_ring_right(test, "counted");
    for (int rank = 0; rank < 4; rank++)
        assert_true(c[rank].most == 1 && c[rank].under_way == 0);
    ring_world_free(test);
}

int main(int argc, char **argv)
{
    is_short                        = argc > 1 && strcmp(argv[1], "--short") == 0;
    one_dtype                       = argc > 1 && strcmp(argv[1], "--one-dtype") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_hold_every_position_once),
        cmocka_unit_test(rectangles_show_each_visible_pair_once),
        cmocka_unit_test(causal_work_is_balanced),
        cmocka_unit_test(a_ring_gives_what_one_rank_gives),
        cmocka_unit_test(every_tier_runs_a_ring),
        cmocka_unit_test(one_rank_gives_the_bits_of_the_plain_call),
        cmocka_unit_test(gradients_that_are_not_wanted_may_be_absent),
        cmocka_unit_test(gradients_may_have_dtypes_of_their_own),
        cmocka_unit_test(one_transfer_is_under_way_at_a_time),
        cmocka_unit_test(future_keys_do_not_change_causal_output),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
