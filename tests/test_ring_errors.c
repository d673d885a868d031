/* Ring attention when something is wrong: at one rank, between two, in the transport. */
#include "harness_ring.h"

static void expect_untouched(ring_world *world)
{
    for (int rank = 0; rank < ring_world_ranks(world); rank++)
        if (ring_world_rank(world, rank)->touched)
            fail_msg("rank %d wrote to an output of a call that failed", rank);
}

/* One rank's trouble is everybody's status, nothing is written, and the same sockets carry the next call. */
static void expect_together(ring_world *t, int rank, flash_attn_status expected, const char *sentence)
{
    ring_world_run(t, true);
    for (int n = 0; n < ring_world_ranks(t); n++) {
        const ring_rank  *r         = ring_world_rank(t, n);
        flash_attn_status of_others = rank < 0 ? expected : FLASH_ATTN_TRANSPORT;
        assert_int_equal(r->status[0], n == rank ? expected : of_others);
        if ((n == rank || rank < 0) && !strstr(r->error[0], sentence))
            fail_msg("rank %d says \"%s\", expected %s", n, r->error[0], sentence);
    }
    expect_untouched(t);
}

static void nonsense_at_one_rank_fails_on_all_and_writes_nothing(void **state)
{
    (void)state;
    for (int kind = 0; kind < 8; kind++) {
        ring_world        *test = ring_start(usual_ring(4), FLASH_ATTN_F32, 3);
        ring_rank         *r = ring_world_rank(test, 2), kept = *r;
        static const float bias[1];
        switch (kind) {
        case 0:
            r->p.q.dtype = (flash_attn_dtype)9;
            expect_together(test, 2, FLASH_ATTN_INVALID, "q.dtype");
            break;
        case 1:
            r->ring.seqlen_k += 8;
            expect_together(test, 2, FLASH_ATTN_INVALID, "k.shape[1]");
            break;
        case 2:
            r->p.reserved[3] = 1;
            expect_together(test, 2, FLASH_ATTN_INVALID, "reserved");
            break;
        case 3:
            r->p.bias = (flash_attn_tensor){.data = (void *)bias, .shape = {1, 1, 1, 1}};
            expect_together(test, 2, FLASH_ATTN_UNSUPPORTED, "bias");
            break;
        case 4:
            r->exec.num_threads = -1;
            expect_together(test, 2, FLASH_ATTN_INVALID, "num_threads");
            break;
        case 5:
            r->give_workspace = true, r->workspace_short = 1;
            expect_together(test, 2, FLASH_ATTN_NO_MEMORY, "workspace_bytes");
            break;
        case 6:
            r->p.softcap = 2.0f;
            expect_together(test, -1, FLASH_ATTN_INVALID, "softcap");
            break;
        case 7:
            r->p.lse.data = r->p.o.data;
            expect_together(test, 2, FLASH_ATTN_INVALID, "share memory");
            break;
        }
        *r = kept;
        ring_world_run(test, true);
        expect_ring_right(test, "after the nonsense");
        ring_world_free(test);
    }
}

static void nonsense_in_a_backward_fails_on_all_too(void **state)
{
    (void)state;
    ring_world *test = ring_start(usual_ring(3), FLASH_ATTN_F32, 3);
    ring_rank  *r    = ring_world_rank(test, 1);
    r->g.dk.reserved = 1;
    ring_world_run(test, true);
    for (int rank = 0; rank < 3; rank++) {
        const ring_rank *other = ring_world_rank(test, rank);
        assert_int_equal(other->status[0], FLASH_ATTN_OK);
        assert_int_equal(other->status[1], rank == 1 ? FLASH_ATTN_INVALID : FLASH_ATTN_TRANSPORT);
        assert_non_null(strstr(other->error[1], rank == 1 ? "grads.dk" : "rank 1 failed"));
        assert_int_equal(*(uint32_t *)other->g.dq.data, 0xFFFFFFFF);
    }
    r->g.dk.reserved = 0;
    ring_world_run(test, true);
    expect_ring_right(test, "after the nonsense");
    ring_world_free(test);
}

/* Rank 0's dV is added up on rank 1 too. */
static void ranks_that_want_other_gradients_are_found_out(void **state)
{
    (void)state;
    ring_world *test = ring_start(usual_ring(2), FLASH_ATTN_F32, 3);
    ring_rank  *r    = ring_world_rank(test, 1);
    void       *dv   = r->g.dv.data;
    r->g.dv.data     = NULL;
    ring_world_run(test, true);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(ring_world_rank(test, rank)->status[1], FLASH_ATTN_INVALID);
        assert_non_null(strstr(ring_world_rank(test, rank)->error[1], "another dv"));
    }
    r->g.dv.data = dv;
    ring_world_free(test);
    enum { GUARD = 64 }; /* in another dtype they would come home in fewer bytes */
    test          = ring_start(usual_ring(2), FLASH_ATTN_F16, 3);
    r             = ring_world_rank(test, 1);
    void *dk      = r->g.dk.data;
    r->g.dk.dtype = FLASH_ATTN_F32;
    r->g.dk.data  = (char *)malloc((size_t)count_of(&r->g.dk) * sizeof(float) + 2 * GUARD) + GUARD;
    ring_world_run(test, true);
    for (int rank = 0; rank < 2; rank++)
        assert_non_null(strstr(ring_world_rank(test, rank)->error[1], "another dk"));
    free((char *)r->g.dk.data - GUARD);
    r->g.dk.data = dk;
    ring_world_free(test);
}

/* ---- a transport that fails at its n-th call ---- */

typedef struct failing {
    flash_attn_transport real;
    ring_sockets        *sockets;
    int                  calls_left;
    bool                 failed;
} failing;

static int fails(failing *f)
{
    if (f->failed)
        fail_msg("called after it had failed");
    if (f->calls_left-- > 0)
        return 0;
    f->failed = true;
    ring_sockets_hang_up(f->sockets); /* as an engine that gives up does: first nothing more comes or goes, */
    f->real.wait(f->real.user, NULL); /* then nothing that was begun touches its memory */
    return 77;
}

static int failing_begin(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    failing *f      = user;
    int      failed = fails(f);
    return failed ? failed : f->real.begin(f->real.user, send, send_bytes, recv, recv_bytes, stream);
}

static int failing_wait(void *user, void *stream)
{
    failing *f      = user;
    int      failed = fails(f);
    return failed ? failed : f->real.wait(f->real.user, stream);
}

static void a_transport_that_fails_is_a_status_on_all_ranks(void **state)
{
    (void)state;
    int ok = 0;
    for (int calls = 0; !ok; calls++) {
        assert_true(calls < 200);
        ring_world *test = ring_start(usual_ring(3), FLASH_ATTN_F32, 3);
        ring_rank  *r    = ring_world_rank(test, 1);
        failing     f    = {.real = r->ring.transport, .sockets = ring_world_sockets(test, 1), .calls_left = calls};
        for (int rank = 0; rank < 3; rank++)
            ring_world_rank(test, rank)->ring.transport.exchange_host = NULL; /* on the host begin and wait do it */
        r->ring.transport.begin = failing_begin;
        r->ring.transport.wait  = failing_wait;
        r->ring.transport.user  = &f;
        ring_world_run(test, false);
        ok = r->status[0] == FLASH_ATTN_OK;
        if (!ok) {
            assert_int_equal(r->status[0], FLASH_ATTN_TRANSPORT);
            assert_non_null(strstr(r->error[0], "returned 77 on rank 1 of 3"));
            assert_false(r->touched);
        }
        for (int rank = 0; rank < 3 && !ok; rank++) { /* the last exchange may have been over for another rank */
            const ring_rank *other = ring_world_rank(test, rank);
            assert_true(other->status[0] == FLASH_ATTN_TRANSPORT || other->status[0] == FLASH_ATTN_OK);
            assert_true(other->status[0] == FLASH_ATTN_OK || !other->touched);
        }
        ring_world_free(test);
    }
}

static void ranks_in_the_wrong_order_are_found_out(void **state)
{
    (void)state;
    ring_world          *test                = ring_start(usual_ring(3), FLASH_ATTN_F32, 3);
    flash_attn_transport of_0                = ring_world_rank(test, 0)->ring.transport;
    ring_world_rank(test, 0)->ring.transport = ring_world_rank(test, 1)->ring.transport;
    ring_world_rank(test, 1)->ring.transport = of_0;
    expect_together(test, -1, FLASH_ATTN_INVALID, "the transport brought the note of rank");
    ring_world_free(test);
}

static void a_rank_that_never_calls_runs_into_the_time_limit(void **state)
{
    (void)state;
    int           to_next[2], from_previous[2];
    float         numbers[4 * 8] = {0}, o[4 * 8];
    ring_sockets *sockets[2];
    memset(o, 0xFF, sizeof o);
    assert_true(ring_sockets_pairs(2, to_next, from_previous));
    for (int rank = 0; rank < 2; rank++)
        sockets[rank] = ring_sockets_open(to_next[rank], from_previous[rank], 50);
    flash_attn_tensor  t = {.data = numbers, .shape = {1, 4, 1, 8}};
    flash_attn_problem p = {.q = t, .k = t, .v = t, .o = {.data = o}};
    flash_attn_ring ring = {.ranks = 2, .seqlen_q = 8, .seqlen_k = 8, .transport = ring_sockets_transport(sockets[0])};
    expect_status(flash_attn_ring_forward(NULL, &p, &ring, NULL), FLASH_ATTN_TRANSPORT, "alone");
    for (size_t n = 0; n < sizeof o; n++)
        assert_int_equal(((unsigned char *)o)[n], 0xFF);
    for (int rank = 0; rank < 2; rank++)
        ring_sockets_close(sockets[rank]);
}

static int never_called(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    (void)user, (void)send, (void)send_bytes, (void)recv, (void)recv_bytes, (void)stream;
    fail_msg("the transport was called for a ring that is INVALID");
    return 1;
}

static void a_ring_that_means_nothing_is_invalid(void **state)
{
    (void)state;
    float              numbers[4 * 8] = {0}, o[4 * 8];
    size_t             bytes          = 1;
    flash_attn_tensor  t              = {.data = numbers, .shape = {1, 4, 1, 8}};
    flash_attn_problem p              = {.q = t, .k = t, .v = t, .o = {.data = o}};
    flash_attn_ring    good = {.ranks = 2, .seqlen_q = 8, .seqlen_k = 8, .transport = {.begin = never_called}};
    memset(o, 0xFF, sizeof o);
    expect_ok(flash_attn_ring_workspace_size(NULL, &p, &good, FLASH_ATTN_FORWARD, &bytes));
    assert_true(bytes > 0);
    for (int n = 0; n < 8; n++) {
        flash_attn_ring bad     = good;
        const char     *names[] = {"ring.ranks", "ring.ranks",  "ring.rank ", "ring.rank ",
                                   "layout",     "reserved[2]", "begin",      "ring.reserved"};
        if (n == 0)
            bad.ranks = 0;
        if (n == 1)
            bad.ranks = 1 << 30;
        if (n == 2)
            bad.rank = 2;
        if (n == 3)
            bad.rank = -1;
        if (n == 4)
            bad.layout = (flash_attn_ring_layout)3;
        if (n == 5)
            bad.reserved[2] = 1;
        if (n == 6)
            bad.transport.begin = NULL;
        if (n == 7)
            bad.reserved0 = 1;
        expect_status(flash_attn_ring_forward(NULL, &p, &bad, NULL), FLASH_ATTN_INVALID, names[n]);
        assert_non_null(strstr(flash_attn_last_error(), names[n]));
        expect_status(flash_attn_ring_backward(NULL, &p, NULL, &bad, NULL), FLASH_ATTN_INVALID, names[n]);
        expect_status(flash_attn_ring_workspace_size(NULL, &p, &bad, FLASH_ATTN_FORWARD, &bytes), FLASH_ATTN_INVALID,
                      names[n]);
    }
    expect_status(flash_attn_ring_forward(NULL, &p, NULL, NULL), FLASH_ATTN_INVALID, "no ring");
    expect_status(flash_attn_ring_workspace_size(NULL, &p, &good, FLASH_ATTN_FORWARD, NULL), FLASH_ATTN_INVALID,
                  "no bytes");
    expect_status(flash_attn_ring_workspace_size(NULL, NULL, &good, FLASH_ATTN_FORWARD, &bytes), FLASH_ATTN_INVALID,
                  "no problem");
    good.seqlen_k = 9; /* this rank has 4 of them, but there are 8 or 10 for two such */
    expect_ok(flash_attn_ring_workspace_size(NULL, &p, &good, FLASH_ATTN_FORWARD, &bytes));
    good.seqlen_k = 10;
    expect_status(flash_attn_ring_workspace_size(NULL, &p, &good, FLASH_ATTN_FORWARD, &bytes), FLASH_ATTN_INVALID,
                  "rows");
    good.seqlen_k = -1;
    expect_status(flash_attn_ring_workspace_size(NULL, &p, &good, FLASH_ATTN_FORWARD, &bytes), FLASH_ATTN_INVALID,
                  "negative");
    for (size_t n = 0; n < sizeof o; n++)
        assert_int_equal(((unsigned char *)o)[n], 0xFF);
}

static void what_a_ring_does_not_take_is_unsupported(void **state)
{
    (void)state;
    float            numbers[4 * 8] = {0}, o[4 * 8];
    int32_t          lengths[2]     = {0, 4};
    flash_attn_slice slice          = {0, 4, 0, 4, 0};
    size_t           bytes;
    flash_attn_ring  ring = {.ranks = 1, .seqlen_q = 4, .seqlen_k = 4};
    for (int n = 0; n < 9; n++) {
        flash_attn_tensor t     = {.data = numbers, .shape = {1, 4, 1, 8}},
                          small = {.data = numbers, .shape = {1, 1, 1, 1}};
        flash_attn_problem p    = {.q = t, .k = t, .v = t, .o = {.data = o}};
        if (n == 0)
            p.bias = small;
        if (n == 1)
            p.alibi_slopes = small;
        if (n == 2)
            p.cu_seqlens_q = lengths, p.batch = 1;
        if (n == 3)
            p.seqused_k = lengths + 1;
        if (n == 4)
            p.leftpad_k = lengths;
        if (n == 5)
            p.slices = (flash_attn_slices){.list = &slice, .count = 1};
        if (n == 6)
            p.dropout.p = 0.1f;
        if (n == 7)
            p.q.dtype = p.k.dtype = p.v.dtype = FLASH_ATTN_F8E4M3;
        if (n == 8)
            p.cache_batch_idx = lengths;
        for (ring.ranks = 1; ring.ranks <= 2; ring.ranks++) {
            ring.transport.begin = never_called;
            expect_status(flash_attn_ring_workspace_size(NULL, &p, &ring, FLASH_ATTN_FORWARD, &bytes),
                          FLASH_ATTN_UNSUPPORTED, "option");
        }
        ring.ranks = 1;
        expect_status(flash_attn_ring_forward(NULL, &p, &ring, NULL), FLASH_ATTN_UNSUPPORTED, "option");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nonsense_at_one_rank_fails_on_all_and_writes_nothing),
        cmocka_unit_test(nonsense_in_a_backward_fails_on_all_too),
        cmocka_unit_test(ranks_that_want_other_gradients_are_found_out),
        cmocka_unit_test(a_transport_that_fails_is_a_status_on_all_ranks),
        cmocka_unit_test(ranks_in_the_wrong_order_are_found_out),
        cmocka_unit_test(a_rank_that_never_calls_runs_into_the_time_limit),
        cmocka_unit_test(a_ring_that_means_nothing_is_invalid),
        cmocka_unit_test(what_a_ring_does_not_take_is_unsupported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
