/* Promises of the public calls that hold for every device: errors, plans, empty problems, memory, what options mean. */
#include "case_numbers.h"
#include "check.h"
#include "giver.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { B = 2, SQ = 33, SK = 41, HQ = 4, HK = 2, D = 16, DV = 12 };

static const flash_attn_device hosts[] = {{FLASH_ATTN_CPU, 0}, {FLASH_ATTN_REFERENCE, 0}};

static void fill(float *out, size_t count)
{
    static uint64_t state = 7;
    for (size_t i = 0; i < count; i++)
        out[i] = (float)random_int(&state, -1000, 1000) / 1000.0f;
}

typedef struct memory {
    float q[B * SQ * HQ * D], k[B * SK * HK * D], v[B * SK * HK * DV], o[B * SQ * HQ * DV], lse[B * HQ * SQ];
    float dout[B * SQ * HQ * DV], dq[B * SQ * HQ * D], dk[B * SK * HK * D], dv[B * SK * HK * DV], sinks[HQ], dsinks[HQ];
} memory;

static flash_attn_problem make_problem(memory *m)
{
    fill((float *)m, sizeof *m / sizeof(float));
    flash_attn_problem p = {.mask = FLASH_ATTN_CAUSAL};
    p.q                  = (flash_attn_tensor){.data = m->q, .shape = {B, SQ, HQ, D}};
    p.k                  = (flash_attn_tensor){.data = m->k, .shape = {B, SK, HK, D}};
    p.v                  = (flash_attn_tensor){.data = m->v, .shape = {B, SK, HK, DV}};
    p.o.data             = m->o;
    p.lse.data           = m->lse;
    return p;
}

static flash_attn_grads make_grads(memory *m)
{
    return (flash_attn_grads){
        .dout = {.data = m->dout}, .dq = {.data = m->dq}, .dk = {.data = m->dk}, .dv = {.data = m->dv}};
}

#define ASSERT_OK(call)                                                                                                \
    do {                                                                                                               \
        if ((call) != FLASH_ATTN_OK)                                                                                   \
            fail_msg("%s: %s", #call, flash_attn_last_error());                                                        \
    } while (0)

#define ASSERT_FAILS(call, status, word)                                                                               \
    do {                                                                                                               \
        assert_int_equal(call, status);                                                                                \
        if (!strstr(flash_attn_last_error(), word))                                                                    \
            fail_msg("\"%s\" does not say \"%s\"", flash_attn_last_error(), word);                                     \
    } while (0)

static void every_status_has_a_name(void **state)
{
    (void)state;
    for (int i = -1; i <= FLASH_ATTN_TRANSPORT + 1; i++)
        for (int j = i + 1; j <= FLASH_ATTN_TRANSPORT + 1; j++) {
            const char *a = flash_attn_status_string((flash_attn_status)i);
            const char *b = flash_attn_status_string((flash_attn_status)j);
            assert_true(a && *a && b && *b);
            assert_true(strcmp(a, b) != 0 || (i == -1 && j == FLASH_ATTN_TRANSPORT + 1));
        }
    assert_string_equal(flash_attn_status_string(FLASH_ATTN_OK), "ok");
    assert_int_equal(flash_attn_version(),
                     10000 * FLASH_ATTN_VERSION_MAJOR + 100 * FLASH_ATTN_VERSION_MINOR + FLASH_ATTN_VERSION_PATCH);
}

/* A data address is enough of a plan for what is optional; no data at all is enough for what is not. */
static void plans_need_no_data(void **state)
{
    (void)state;
    static memory      m;
    flash_attn_problem p = make_problem(&m), bare = p;
    bare.q.data = bare.k.data = bare.v.data = bare.o.data = bare.lse.data = NULL;
    for (int n = 0; n < 2; n++)
        for (flash_attn_pass pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
            flash_attn_explanation with, without;
            size_t                 bytes[2];
            p.device = bare.device = hosts[n];
            ASSERT_OK(flash_attn_prepare(NULL, &bare, pass));
            ASSERT_OK(flash_attn_explain(NULL, &p, pass, &with));
            ASSERT_OK(flash_attn_explain(NULL, &bare, pass, &without));
            ASSERT_OK(flash_attn_workspace_size(NULL, &p, pass, &bytes[0]));
            ASSERT_OK(flash_attn_workspace_size(NULL, &bare, pass, &bytes[1]));
            assert_true(with.flops == without.flops && with.flops > 0);
            assert_int_equal(bytes[0], bytes[1]);
            assert_int_equal(with.workspace_bytes, bytes[0]);
            assert_non_null(strstr(with.kernel, pass == FLASH_ATTN_FORWARD ? "forward" : "backward"));
        }
}

/* What has no data lies nowhere, however large it is. */
static void a_plan_of_large_inputs_shares_no_memory_with_results(void **state)
{
    (void)state;
    flash_attn_explanation explanation;
    flash_attn_problem     p = {.q.shape = {1, 8192, 1, 1}, .k.shape = {1, 262144, 1, 1}, .v.shape = {1, 262144, 1, 1}, .bias.shape = {1, 1, 8192, 262144}};
    p.o.data = malloc(8192 * sizeof(float));
    assert_non_null(p.o.data);
    ASSERT_OK(flash_attn_explain(NULL, &p, FLASH_ATTN_FORWARD, &explanation));
    free(p.o.data);
}

static void a_plan_of_results_on_inputs_is_refused(void **state)
{
    (void)state;
    static memory          m;
    flash_attn_explanation untouched = {.num_splits = 77}, explanation = untouched;
    for (int n = 0; n < 2; n++) {
        flash_attn_problem p = make_problem(&m);
        p.device             = hosts[n];
        p.o.data             = (float *)p.k.data + 1;
        ASSERT_FAILS(flash_attn_explain(NULL, &p, FLASH_ATTN_FORWARD, &explanation), FLASH_ATTN_INVALID, "o and k share memory");
        assert_memory_equal(&explanation, &untouched, sizeof untouched);
        ASSERT_OK(flash_attn_explain(NULL, &p, FLASH_ATTN_BACKWARD, &explanation)); /* which reads both */
        explanation = untouched;
    }
}

/* A problem, what both passes give without a workspace, and scratch memory that is guarded on both sides. */
enum { GUARD_BEFORE = 17 /* any alignment */, GUARDS = 64 };

typedef struct scratch {
    memory             m, expected;
    flash_attn_problem p;
    flash_attn_grads   g;
    unsigned char     *block;
    size_t             bytes;
} scratch;

static void poison_outputs(memory *m, flash_attn_pass pass)
{
    if (pass == FLASH_ATTN_FORWARD) {
        memset(m->o, 0xFF, sizeof m->o);
        memset(m->lse, 0xFF, sizeof m->lse);
        return;
    }
    memset(m->dq, 0xFF, sizeof m->dq);
    memset(m->dk, 0xFF, sizeof m->dk);
    memset(m->dv, 0xFF, sizeof m->dv);
}

static flash_attn_status run_poisoned(scratch *s, flash_attn_pass pass, const flash_attn_exec *exec)
{
    poison_outputs(&s->m, pass);
    return pass == FLASH_ATTN_FORWARD ? flash_attn_forward(NULL, &s->p, exec) : flash_attn_backward(NULL, &s->p, &s->g, exec);
}

static void make_scratch(scratch *s, flash_attn_pass pass)
{
    s->p = make_problem(&s->m);
    s->g = make_grads(&s->m);
    ASSERT_OK(run_poisoned(s, FLASH_ATTN_FORWARD, NULL));
    ASSERT_OK(run_poisoned(s, FLASH_ATTN_BACKWARD, NULL));
    s->expected = s->m;
    ASSERT_OK(flash_attn_workspace_size(NULL, &s->p, pass, &s->bytes));
    assert_true(s->bytes > 0);
    s->block = malloc(s->bytes + GUARDS);
    assert_non_null(s->block);
    memset(s->block, 0x5A, s->bytes + GUARDS);
}

static void expect_guarded(const scratch *s)
{
    assert_memory_equal(&s->m, &s->expected, sizeof s->m);
    for (size_t i = 0; i < GUARDS; i++)
        assert_int_equal(s->block[i < GUARD_BEFORE ? i : s->bytes + i], 0x5A);
}

/* Refused for want of memory, with this in its sentence, and nothing written. */
static void expect_refused(scratch *s, flash_attn_pass pass, const flash_attn_exec *exec, const char *says)
{
    memory poisoned = s->m;
    poison_outputs(&poisoned, pass);
    ASSERT_FAILS(run_poisoned(s, pass, exec), FLASH_ATTN_NO_MEMORY, says);
    assert_memory_equal(&s->m, &poisoned, sizeof poisoned);
    s->m = s->expected;
}

static void a_workspace_must_be_large_enough_and_suffices(void **state)
{
    (void)state;
    static scratch s;
    for (flash_attn_pass pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
        make_scratch(&s, pass);
        flash_attn_exec exec = {.workspace = s.block + GUARD_BEFORE, .workspace_bytes = s.bytes};
        ASSERT_OK(run_poisoned(&s, pass, &exec));
        expect_guarded(&s);
        exec.workspace_bytes = s.bytes - 1;
        expect_refused(&s, pass, &exec, "workspace_bytes");
        free(s.block);
    }
}

static void an_allocator_is_asked_once_for_what_is_needed(void **state)
{
    (void)state;
    static scratch s;
    for (flash_attn_pass pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
        make_scratch(&s, pass);
        giver           from = {.gives = s.block + GUARD_BEFORE};
        flash_attn_exec exec = {.allocate = give, .allocator = &from};
        ASSERT_OK(run_poisoned(&s, pass, &exec));
        expect_guarded(&s);
        assert_int_equal(from.times, 1);
        assert_true(from.asked <= s.bytes);
        bool used = false;
        for (size_t i = 0; i < s.bytes; i++)
            used |= s.block[GUARD_BEFORE + i] != 0x5A;
        assert_true(used);

        from = (giver){0};
        expect_refused(&s, pass, &exec, "exec.allocate gave no memory for ");
        assert_int_equal(from.times, 1);

        exec.workspace       = s.block; /* who has one does not ask */
        exec.workspace_bytes = s.bytes;
        ASSERT_OK(run_poisoned(&s, pass, &exec));
        assert_int_equal(from.times, 1);
        free(s.block);
    }
}

static void workspace_does_not_depend_on_lengths(void **state)
{
    (void)state;
    static memory      m;
    flash_attn_problem p         = make_problem(&m);
    int32_t            used[B]   = {SK, SK};
    int32_t            broken[B] = {-5, 1 << 30}; /* not even read */
    size_t             with_full, with_broken;
    p.seqused_k = used;
    for (flash_attn_pass pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++) {
        p.seqused_k = used;
        ASSERT_OK(flash_attn_workspace_size(NULL, &p, pass, &with_full));
        p.seqused_k = broken;
        ASSERT_OK(flash_attn_workspace_size(NULL, &p, pass, &with_broken));
        ASSERT_OK(flash_attn_prepare(NULL, &p, pass));
        assert_int_equal(with_full, with_broken);
    }
}

/* ---- counting work: test_count.c has the rest ---- */

/* What broadcasts is read once. */
static void bytes_count_each_element_once(void **state)
{
    (void)state;
    static memory          m;
    static float           bias[HQ * SQ * SK];
    flash_attn_problem     p = make_problem(&m);
    flash_attn_explanation plain, with;
    ASSERT_OK(flash_attn_explain(NULL, &p, FLASH_ATTN_FORWARD, &plain));
    assert_true(plain.bytes == 4.0 * (sizeof m.q + sizeof m.k + sizeof m.v + sizeof m.o + sizeof m.lse) / sizeof(float));
    for (int rows = 1; rows <= SQ; rows += SQ - 1) {
        p.bias = (flash_attn_tensor){.data = bias, .shape = {1, HQ, rows, SK}};
        ASSERT_OK(flash_attn_explain(NULL, &p, FLASH_ATTN_FORWARD, &with));
        assert_true(with.bytes - plain.bytes == 4.0 * HQ * rows * SK);
    }
}

/* ---- empty problems ---- */

static void check_empty(flash_attn_device device, int64_t batch, int64_t sq, int64_t sk, bool sinks)
{
    static memory      m;
    flash_attn_problem p = make_problem(&m);
    flash_attn_grads   g = make_grads(&m);
    p.device             = device;
    p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = batch;
    p.q.shape[1]                               = sq;
    p.k.shape[1] = p.v.shape[1] = sk;
    if (sinks) {
        p.sinks       = (flash_attn_tensor){.data = m.sinks, .shape = {1, HQ, 1, 1}};
        g.dsinks.data = m.dsinks;
    }
    if (batch * sq == 0)
        p.q.data = p.o.data = g.dout.data = NULL;
    if (batch * sk == 0)
        p.k.data = p.v.data = NULL;
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    ASSERT_OK(flash_attn_backward(NULL, &p, &g, NULL));
    for (int64_t i = 0; i < batch * sq * HQ * DV; i++)
        assert_true(m.o[i] == 0.0f);
    for (int64_t i = 0; i < batch * HQ * sq; i++) {
        float expected = sinks ? m.sinks[i / sq % HQ] : -INFINITY;
        assert_true(m.lse[i] == expected || fabsf(m.lse[i] - expected) < 1e-6f);
    }
    for (int64_t i = 0; i < batch * sq * HQ * D; i++)
        assert_true(m.dq[i] == 0.0f);
    for (int64_t i = 0; i < batch * sk * HK * D; i++)
        assert_true(m.dk[i] == 0.0f);
    for (int64_t i = 0; i < batch * sk * HK * DV; i++)
        assert_true(m.dv[i] == 0.0f);
    for (int h = 0; h < HQ && sinks; h++)
        assert_true(m.dsinks[h] == 0.0f);
}

static void empty_problems_are_valid(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++)
        for (int sinks = 0; sinks < 2; sinks++) {
            check_empty(hosts[n], 0, SQ, SK, sinks);
            check_empty(hosts[n], B, 0, SK, sinks);
            check_empty(hosts[n], B, SQ, 0, sinks);
            check_empty(hosts[n], B, 0, 0, sinks);
            check_empty(hosts[n], 0, 0, 0, sinks);
        }
}

/* What broadcasts has an element even where the batch or the queries have none. */
static void gradients_of_what_nothing_uses_are_zero(void **state)
{
    (void)state;
    static memory m;
    static float  bias[HQ * SQ * SK], dbias[HQ * SQ * SK];
    for (int n = 0; n < 4; n++) {
        flash_attn_problem p = make_problem(&m);
        flash_attn_grads   g = make_grads(&m);
        int                rows = n < 2 ? SQ : 1;
        p.device             = hosts[n % 2];
        fill(dbias, sizeof dbias / sizeof *dbias);
        p.q.shape[n < 2 ? 0 : 1] = 0;
        if (n < 2)
            p.k.shape[0] = p.v.shape[0] = 0;
        p.bias       = (flash_attn_tensor){.data = bias, .shape = {1, HQ, rows, SK}};
        g.dbias.data = dbias;
        ASSERT_OK(flash_attn_backward(NULL, &p, &g, NULL));
        for (int i = 0; i < HQ * rows * SK; i++)
            assert_true(dbias[i] == 0.0f);
    }
}

/* exp(sink - LSE) of a row whose LSE is -inf too would be NaN. */
static void a_sink_of_minus_infinity_has_no_gradient(void **state)
{
    (void)state;
    static memory m;
    for (int n = 0; n < 2; n++) {
        flash_attn_problem p = make_problem(&m);
        flash_attn_grads   g = make_grads(&m);
        p.device             = hosts[n];
        p.k.shape[1] = p.v.shape[1] = 20; /* the first queries see no key */
        p.sinks                     = (flash_attn_tensor){.data = m.sinks, .shape = {1, HQ, 1, 1}};
        g.dsinks.data               = m.dsinks;
        for (int h = 0; h < HQ; h++)
            m.sinks[h] = -INFINITY;
        ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
        ASSERT_OK(flash_attn_backward(NULL, &p, &g, NULL));
        for (int h = 0; h < HQ; h++)
            assert_true(m.dsinks[h] == 0.0f);
    }
}

static void varlen_without_sequences_is_valid(void **state)
{
    (void)state;
    static memory      m;
    flash_attn_problem p      = make_problem(&m);
    int32_t            cu[41] = {0};
    p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = 1;
    p.q.shape[1] = p.k.shape[1] = p.v.shape[1] = 0;
    p.cu_seqlens_q = p.cu_seqlens_k = cu;
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    p.batch = 40; /* forty empty sequences */
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
}

/* ---- memory ---- */

/* q, k, v and dq, dk, dv as views of [b, s, 3, h, d] give what separate tensors give. */
static void gradients_may_share_one_packed_buffer(void **state)
{
    (void)state;
    enum { S = 20, H = 3, ROW = 3 * H * D, HALF = B * S * H * D };
    static float in[B * S * ROW], out[B * S * ROW], o[HALF], lse[B * H * S], dout[HALF], separate[3][HALF];
    fill(in, sizeof in / sizeof *in);
    fill(dout, HALF);
    flash_attn_tensor part[3], gradient[3];
    for (int n = 0; n < 3; n++) {
        part[n] = (flash_attn_tensor){.data = in + n * H * D, .shape = {B, S, H, D}, .stride = {S * ROW, ROW, D, 1}};
        gradient[n]      = part[n];
        gradient[n].data = out + n * H * D;
    }
    for (int n = 0; n < 2; n++) {
        flash_attn_problem p      = {.device = hosts[n], .q = part[0], .k = part[1], .v = part[2]};
        flash_attn_grads   packed = {.dout = {.data = dout}, .dq = gradient[0], .dk = gradient[1], .dv = gradient[2]};
        flash_attn_grads   apart  = {.dout = {.data = dout},
                                     .dq   = {.data = separate[0]},
                                     .dk   = {.data = separate[1]},
                                     .dv   = {.data = separate[2]}};
        p.o.data                  = o;
        p.lse.data                = lse;
        ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
        ASSERT_OK(flash_attn_backward(NULL, &p, &packed, NULL));
        ASSERT_OK(flash_attn_backward(NULL, &p, &apart, NULL));
        for (int i = 0; i < HALF; i++)
            for (int part_index = 0; part_index < 3; part_index++)
                assert_true(out[i / (H * D) * ROW + part_index * H * D + i % (H * D)] == separate[part_index][i]);
        packed.dk.data = (float *)packed.dk.data - 1; /* one element into dq */
        ASSERT_FAILS(flash_attn_backward(NULL, &p, &packed, NULL), FLASH_ATTN_INVALID, "share memory");
    }
}

/* Rows of a table may lie far apart; what is between them, and behind the last, is not the table's. */
static void a_page_table_ends_with_its_last_row(void **state)
{
    (void)state;
    static float q[2 * D], k[4 * 4 * D], v[4 * 4 * D], o[2 * D];
    union {
        int32_t table[12];
        float   lse[12];
    } shared = {.table = {0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1, -1}};
    fill(q, 2 * D);
    fill(k, 4 * 4 * D);
    fill(v, 4 * 4 * D);
    flash_attn_problem p = {.pages = {.table = shared.table, .row_stride = 6, .pages_per_seq = 2}};
    p.q                  = (flash_attn_tensor){.data = q, .shape = {2, 1, 1, D}};
    p.k                  = (flash_attn_tensor){.data = k, .shape = {4, 4, 1, D}};
    p.v                  = (flash_attn_tensor){.data = v, .shape = {4, 4, 1, D}};
    p.o.data             = o;
    p.lse                = (flash_attn_tensor){.data = shared.lse + 4, .stride = {5, 1, 1, 1}}; /* entries 4 and 9 */
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    assert_true(shared.table[3] == -1 && shared.lse[4] > 0 && shared.table[6] == 2 && shared.lse[9] > 0);
    p.lse.stride[0] = 2; /* entries 4 and 6 */
    ASSERT_FAILS(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_INVALID, "pages.table");
}

static void what_is_not_wanted_is_not_written(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        static memory      m, before;
        flash_attn_problem p = make_problem(&m);
        flash_attn_grads   g = {.dout = {.data = m.dout}, .dk = {.data = m.dk}};
        p.device             = hosts[n];
        ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
        before = m;
        ASSERT_OK(flash_attn_backward(NULL, &p, &g, NULL));
        assert_memory_not_equal(m.dk, before.dk, sizeof m.dk);
        memcpy(before.dk, m.dk, sizeof m.dk);
        assert_memory_equal(&m, &before, sizeof m);
        memset(m.lse, 0x77, sizeof m.lse);
        before     = m;
        p.lse.data = NULL;
        ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
        assert_memory_equal(&m, &before, sizeof m);
    }
}

/* ---- what options mean ---- */

static void zero_scale_is_the_default_and_minus_zero_is_zero(void **state)
{
    (void)state;
    static memory      m;
    static float       by_default[sizeof m.o / sizeof(float)];
    flash_attn_problem p = make_problem(&m);
    p.mask               = FLASH_ATTN_NONE;
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    memcpy(by_default, m.o, sizeof m.o);
    p.scale = 0.25f; /* 1 / sqrt(16) */
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    assert_memory_equal(by_default, m.o, sizeof m.o);
    p.scale = -0.0f; /* all keys alike */
    ASSERT_OK(flash_attn_forward(NULL, &p, NULL));
    for (int c = 0; c < DV; c++) {
        double mean = 0;
        for (int j = 0; j < SK; j++)
            mean += m.v[j * HK * DV + c] / (double)SK;
        assert_true(fabs(m.o[c] - mean) < 1e-6);
    }
    assert_true(fabs(m.lse[0] - log(SK)) < 1e-6);
}

static fa_call normalised(const flash_attn_problem *p)
{
    fa_call call;
    ASSERT_OK(fa_normalise(p, NULL, FLASH_ATTN_FORWARD, FA_RUN, &call));
    return call;
}

static void options_are_normalised(void **state)
{
    (void)state;
    static memory      m;
    flash_attn_problem p    = make_problem(&m);
    fa_call            call = normalised(&p);
    assert_true(call.window.left == FA_UNLIMITED && call.window.right == 0 && call.dropout.threshold == 0);
    assert_true(call.group == 2 && call.max_seqlen_q == SQ && call.max_seqlen_k == SK && call.batch == B);
    assert_true(call.o.shape[3] == DV && call.o.stride[3] == 1 && call.lse.shape[2] == SQ && call.lse.stride[1] == SQ);
    p.mask         = FLASH_ATTN_WINDOW;
    p.window_left  = INT32_MAX;
    p.window_right = -1;
    p.dropout      = (flash_attn_dropout){.p = 0.5f, .seed = 0x1122334455667788, .offset = 0x0000000F00000009};
    p.sinks        = (flash_attn_tensor){.data = m.sinks, .shape = {1, HQ, 1, 1}};
    call           = normalised(&p);
    assert_true(call.window.left == FA_UNLIMITED && call.window.right == FA_UNLIMITED);
    assert_true(call.dropout.threshold == 32768 && call.dropout.keep_scale == 2.0f);
    assert_true(call.dropout.seed_low == 0x55667788 && call.dropout.seed_high == (0x11223344 ^ 0xF));
    assert_true(call.dropout.offset_low == 9);
    assert_true(call.sinks.shape[0] == B && call.sinks.stride[0] == 0 && call.sinks.stride[1] == 1);
    p.dropout.p = nextafterf(1.0f, 0.0f);
    assert_int_equal(normalised(&p).dropout.threshold, 65535);
    p.dropout.p = 1e-6f; /* nearer to 0 than to 2^-16 */
    assert_int_equal(normalised(&p).dropout.threshold, 0);
}

/* ---- devices ---- */

static void devices_describe_themselves(void **state)
{
    (void)state;
    flash_attn_device_info info;
    memset(&info, 0xFF, sizeof info);
    ASSERT_OK(flash_attn_get_device_info(NULL, hosts[1], &info));
    assert_string_equal(info.isa, "double");
    assert_int_equal(info.num_threads, 1);
    for (int i = 0; i < 7; i++)
        assert_true(info.reserved[i] == 0);
    ASSERT_OK(flash_attn_get_device_info(NULL, hosts[0], &info));
    assert_true(info.num_threads >= 1 && info.num_cores >= 1 && info.isa[0] != '\0');
    ASSERT_FAILS(flash_attn_get_device_info(NULL, hosts[0], NULL), FLASH_ATTN_INVALID, "info");
    ASSERT_FAILS(flash_attn_get_device_info(NULL, (flash_attn_device){(flash_attn_device_type)3, 0}, &info),
                 FLASH_ATTN_INVALID, "device.type is 3");
}

static void an_absent_gpu_is_no_device(void **state)
{
    (void)state;
    static memory          m, before;
    flash_attn_device      absent = {FLASH_ATTN_CUDA, 1000};
    flash_attn_problem     p      = make_problem(&m);
    flash_attn_device_info info;
    p.device = absent;
    before   = m;
    assert_int_equal(flash_attn_forward(NULL, &p, NULL), FLASH_ATTN_NO_DEVICE);
    assert_true(strlen(flash_attn_last_error()) > 10);
    assert_int_equal(flash_attn_get_device_info(NULL, absent, &info), FLASH_ATTN_NO_DEVICE);
    assert_memory_equal(&m, &before, sizeof m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_a_name),
        cmocka_unit_test(plans_need_no_data),
        cmocka_unit_test(a_plan_of_large_inputs_shares_no_memory_with_results),
        cmocka_unit_test(a_plan_of_results_on_inputs_is_refused),
        cmocka_unit_test(a_workspace_must_be_large_enough_and_suffices),
        cmocka_unit_test(an_allocator_is_asked_once_for_what_is_needed),
        cmocka_unit_test(workspace_does_not_depend_on_lengths),
        cmocka_unit_test(bytes_count_each_element_once),
        cmocka_unit_test(empty_problems_are_valid),
        cmocka_unit_test(gradients_of_what_nothing_uses_are_zero),
        cmocka_unit_test(a_sink_of_minus_infinity_has_no_gradient),
        cmocka_unit_test(varlen_without_sequences_is_valid),
        cmocka_unit_test(gradients_may_share_one_packed_buffer),
        cmocka_unit_test(a_page_table_ends_with_its_last_row),
        cmocka_unit_test(what_is_not_wanted_is_not_written),
        cmocka_unit_test(zero_scale_is_the_default_and_minus_zero_is_zero),
        cmocka_unit_test(options_are_normalised),
        cmocka_unit_test(devices_describe_themselves),
        cmocka_unit_test(an_absent_gpu_is_no_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
