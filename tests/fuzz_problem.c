/*
 * Problem descriptions from bytes, valid and not. A valid one runs on some tier and some number of threads and is
 * judged as a case; a spoilt one must be refused with everything untouched, or be harmless. After each, a known good
 * call must work.
 *
 *     fuzz_problem [--seconds N] [--seed N] [--tier NAME] [--dtype NAME] [--gpu] [--hopper] [--latent] [--few] [--wide]
 *
 * runs seeds 1, 2, 3, ... (from --seed on) for so many seconds, 0 meaning for ever; without --seconds, the one seed.
 * --tier, --dtype: every problem on this tier and of this type, f8e4m3 too, in place of those that were drawn.
 * --gpu: valid ones alone, on CUDA device 0, real or emulated; each new combination of options compiles a kernel.
 * --hopper: the same of such as Hopper's own kernels take, which are longer, some in the deterministic mode.
 * --latent: V is K's first columns, as in multi-head latent attention; forward, on the CPU or with --gpu.
 * --few: up to 128 queries on long keys, heads in groups, as when a sequence is decoded; likewise.
 * --wide: more than 256 columns of Q or of V; both passes, some in the deterministic mode.
 * Built with clang -fsanitize=fuzzer -DFLASH_ATTN_FUZZ it is a libFuzzer target instead.
 */
#include "case_gpu.h"
#include "case_internal.h"
#include "harness.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

/* ---- bytes ---- */

typedef struct bytes {
    const uint8_t *at, *end;
} bytes;

static int  take(bytes *b) { return b->at < b->end ? *b->at++ : 0; }
static int  below(bytes *b, int n) { return (take(b) * 256 + take(b)) % n; }
static bool one_in(bytes *b, int n) { return below(b, n) == n - 1; } /* no bytes left: false */

static int length(bytes *b, int largest)
{
    static const int edges[] = {0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    int              n       = one_in(b, 2) ? edges[below(b, 16)] : 1 + below(b, largest);
    return n < largest ? n : largest;
}

/* ---- valid problems ---- */

static test_case take_shape(bytes *b)
{
    test_case c  = {.group = "fuzz", .name = ""};
    c.batch      = 1 + below(b, 4);
    c.heads_k    = 1 + below(b, 3);
    c.heads_q    = c.heads_k * (1 + below(b, 4));
    c.seqlen_q   = length(b, 200);
    c.seqlen_k   = length(b, 300);
    c.head_dim   = one_in(b, 8) ? 1 + below(b, 300) : 1 + length(b, 130);
    c.head_dim_v = one_in(b, 3) ? 1 + length(b, 130) : c.head_dim;
    while ((int64_t)c.batch * c.heads_q * c.seqlen_q * c.seqlen_k > 60000) { /* the reference is slow */
        c.batch    = (c.batch + 1) / 2;
        c.seqlen_q = c.seqlen_q * 3 / 4;
        c.seqlen_k = c.seqlen_k * 7 / 8;
    }
    return c;
}

static void take_scores(bytes *b, test_case *c)
{
    static const float scales[] = {1.0f, 0.3f, -0.2f, -0.0f, 1e-3f, 2.0f};
    c->mask                     = (flash_attn_mask)below(b, 3);
    if (c->mask == FLASH_ATTN_WINDOW) {
        c->window_left  = one_in(b, 4) ? -1 : one_in(b, 8) ? INT32_MAX : below(b, 80);
        c->window_right = one_in(b, 4) ? -1 : one_in(b, 2) ? 0 : below(b, 80);
    }
    if (one_in(b, 3))
        c->scale = scales[below(b, 6)];
    if (one_in(b, 4))
        c->softcap = 0.5f + (float)below(b, 40);
    if (one_in(b, 6))
        c->logit_size = (float)(1 + below(b, 20));
    if (one_in(b, 3))
        c->bias = BIAS | (unsigned)below(b, 128);
    c->alibi = one_in(b, 4);
    c->sinks = one_in(b, 4);
    if (one_in(b, 4))
        c->dropout = (float)(1 + below(b, 95)) / 100;
    if (one_in(b, 4))
        c->slices = (slice_pattern)below(b, 6);
    if (c->slices == SLICES_DOCUMENTS && c->seqlen_q % 3 > 0) /* more of these, for they may be packed */
        c->slices = c->seqlen_q % 3 == 1 ? SLICES_LONG : SLICES_BLOCKS;
}

static void take_lengths(bytes *b, test_case *c)
{
    c->varlen_q  = one_in(b, 3) ? (lengths)below(b, 6) : LENGTHS_NONE;
    c->varlen_k  = one_in(b, 3) ? (lengths)below(b, 6) : LENGTHS_NONE;
    c->seqused_q = one_in(b, 4) ? (lengths)below(b, 6) : LENGTHS_NONE;
    c->seqused_k = one_in(b, 3) ? (lengths)below(b, 6) : LENGTHS_NONE;
    c->leftpad   = one_in(b, 6);
    if (one_in(b, 6) && !c->varlen_k) {
        c->page_size = 1 + below(b, 70);
        c->seqused_k = c->seqused_k ? c->seqused_k : LENGTHS_MIXED;
    } else if (one_in(b, 8) && !c->varlen_k) {
        c->cache_batch_idx = true;
    }
    c->num_splits = one_in(b, 5) ? below(b, 10) - 1 : 0;
    c->layout     = (layout)below(b, 7);
    if (c->layout == LAYOUT_PACKED || c->layout == LAYOUT_BROADCAST) { /* these need equal, full lengths */
        bool unequal = c->varlen_q != c->varlen_k || c->page_size || c->cache_batch_idx;
        if (unequal || (c->layout == LAYOUT_BROADCAST && (c->varlen_k || c->seqused_k || c->leftpad || c->slices)))
            c->layout = LAYOUT_CONTIGUOUS;
        else
            c->seqlen_k = c->seqlen_q = c->seqlen_q < c->seqlen_k ? c->seqlen_q : c->seqlen_k;
    }
    c->o_f32        = one_in(b, 6);
    c->forward_only = one_in(b, 4);
}

/* What Hopper's own kernels have no options for goes, and rows and pages are whole 16 bytes and eight keys. */
static void leave_own_kernels_options(bytes *b, test_case *c)
{
    c->bias      = 0;
    c->page_size = c->page_size ? 8 * (1 + below(b, 16)) : 0;
    c->slices    = c->page_size ? SLICES_NONE : c->slices;
    c->scale     = c->scale > 0 ? c->scale : 0;
    if (c->layout != LAYOUT_HEADS_FIRST)
        c->layout = LAYOUT_CONTIGUOUS;
}

/* Nor have those for packed rows, which are forwards, softcap, ALiBi and dropout. */
static void leave_packed_rows_options(bytes *b, test_case *c)
{
    leave_own_kernels_options(b, c);
    c->alibi   = false;
    c->slices  = SLICES_NONE;
    c->softcap = c->dropout = 0;
    c->forward_only = true;
}

/* A bias that these take: mostly without other options, its rows whole 16 bytes. */
static void take_hoppers_bias(bytes *b, test_case *c, unsigned bias)
{
    bool alone = !one_in(b, 4);
    c->bias     = one_in(b, 2) ? bias | BIAS_CONSTANT : bias;
    c->seqlen_k = (c->seqlen_k + 7) / 8 * 8;
    if (alone) {
        c->alibi   = false;
        c->softcap = 0, c->page_size = 0;
    }
}

/* Heads of a key head that share tiles in the forward. */
static void take_groups(bytes *b, test_case *c)
{
    c->heads_k  = 1 + below(b, 2);
    c->heads_q  = c->heads_k << (1 + below(b, 4));
    c->seqlen_q = 129 + below(b, 110);
    if (c->mask == FLASH_ATTN_WINDOW) {
        c->mask        = FLASH_ATTN_CAUSAL;
        c->window_left = c->window_right = 0;
    }
    c->alibi    = false;
    c->dropout  = 0;
    c->slices   = SLICES_NONE;
    c->forward_only = true;
}

/* What has more than 128 queries, whole 16 bytes a row, 16 bits or FP8, and no block mask; many sequences in one of four. */
static void take_hoppers_shape(bytes *b, test_case *c)
{
    bool     many = one_in(b, 4);
    unsigned bias = c->bias;
    c->batch      = many ? 1 + below(b, 40) : c->batch;
    c->seqlen_q   = 129 + below(b, many ? 100 : 600);
    c->seqlen_k   = one_in(b, 4) ? length(b, 200) : 1 + below(b, many ? 150 : 700);
    c->head_dim   = 8 * (1 + below(b, 32));
    c->head_dim_v = one_in(b, 4) ? 8 * (1 + below(b, 32)) : c->head_dim;
    leave_own_kernels_options(b, c);
    c->o_f32 = c->o_f32 && one_in(b, 2);
    if (!one_in(b, 3)) { /* else most backwards would be the portable kernel's */
        c->heads_k         = c->heads_q;
        c->leftpad         = false;
        c->cache_batch_idx = false;
        c->num_splits      = one_in(b, 4) ? c->num_splits : 0;
    }
    if (one_in(b, 5) && !bias)
        take_groups(b, c);
    if (c->varlen_q && one_in(b, 3))
        c->varlen_q = one_in(b, 2) ? LENGTHS_FEW : LENGTHS_DECODED;
    if (c->seqused_q && one_in(b, 2))
        c->seqused_q = LENGTHS_FEW;
    while ((int64_t)c->batch * c->heads_q * c->seqlen_q * c->seqlen_k > 600000 && c->seqlen_k > 1) {
        c->heads_q = c->heads_q > c->heads_k ? c->heads_q - c->heads_k : c->heads_q;
        c->batch   = (7 * c->batch + 7) / 8;
        c->seqlen_k = c->seqlen_k * 7 / 8;
    }
    if (bias)
        take_hoppers_bias(b, c, bias);
}

/* What latent attention's kernel takes: up to 576 columns, many heads on one key head or two, mostly few queries. */
static void take_latent_shape(bytes *b, test_case *c)
{
    static const int heads[] = {1, 3, 8, 16, 21, 32, 64, 128};
    c->latent     = true;
    c->head_dim   = one_in(b, 2) ? 576 : 8 * (33 + below(b, 40));
    c->head_dim_v = c->head_dim == 576 && one_in(b, 2) ? 512 : 8 * (1 + below(b, c->head_dim < 512 ? c->head_dim / 8 : 64));
    c->heads_k    = one_in(b, 6) ? 2 : 1;
    c->heads_q    = c->heads_k * heads[below(b, 8)];
    c->seqlen_q   = one_in(b, 4) ? 1 + below(b, 150) : 1 + below(b, 5);
    c->seqlen_k   = one_in(b, 4) ? length(b, 200) : 1 + below(b, 900);
    leave_packed_rows_options(b, c);
    while ((int64_t)c->batch * c->heads_q * c->seqlen_q * c->seqlen_k > 100000 && c->seqlen_k > 1) {
        c->batch    = (c->batch + 1) / 2;
        c->seqlen_q = (3 * c->seqlen_q + 3) / 4;
        c->seqlen_k = c->seqlen_k * 7 / 8;
    }
}

/* Decoding, drafted tokens, pieces of a prompt: what forward_few_sm90 takes, and whose keys are parted. */
static void take_few_shape(bytes *b, test_case *c)
{
    static const int groups[] = {1, 2, 3, 4, 5, 8, 16, 28};
    c->batch      = 1 + below(b, one_in(b, 3) ? 14 : 4);
    c->heads_q    = c->heads_k * groups[below(b, 8)];
    c->seqlen_q   = one_in(b, 4) ? 1 + below(b, 128) : 1 + below(b, 20);
    c->seqlen_k   = one_in(b, 4) ? length(b, 200) : 1 + below(b, 2500);
    c->head_dim   = one_in(b, 2) ? 64 << below(b, 3) : 8 * (5 + below(b, 28));
    c->head_dim_v = one_in(b, 4) ? 8 * (5 + below(b, 28)) : c->head_dim;
    c->num_splits = one_in(b, 3) ? below(b, 10) - 1 : 0;
    leave_packed_rows_options(b, c);
    while ((int64_t)c->batch * c->heads_q * c->seqlen_q * c->seqlen_k > 300000 && c->seqlen_q > 1) {
        c->batch    = (c->batch + 1) / 2;
        c->seqlen_q = c->seqlen_q * 3 / 4;
    }
}

/* More than 256 columns, half of them with the options of forward_wide_sm90 alone. */
static void take_wide_shape(bytes *b, test_case *c)
{
    enum { NARROW = 256, MOST = 576, OWN = 512 };
    bool own      = one_in(b, 2);
    int  most     = own ? OWN : MOST;
    c->head_dim   = one_in(b, 3) ? OWN : 8 * (1 + below(b, most / 8));
    c->head_dim_v = one_in(b, 2) ? c->head_dim : 8 * (1 + below(b, most / 8));
    if (c->head_dim <= NARROW && c->head_dim_v <= NARROW)
        c->head_dim += NARROW;
    if (own) {
        c->heads_q  = c->heads_k * (1 + below(b, 20));
        c->seqlen_q = one_in(b, 2) ? 1 + below(b, 6) : 1 + below(b, 300);
        c->seqlen_k = one_in(b, 3) ? length(b, 200) : 1 + below(b, 700);
        leave_packed_rows_options(b, c);
    } else if (one_in(b, 4))
        c->head_dim -= 1 + below(b, 7);
    while ((int64_t)c->batch * c->heads_q * c->seqlen_q * c->seqlen_k > 50000 && c->seqlen_k > 1) {
        c->batch    = (c->batch + 1) / 2;
        c->seqlen_q = (3 * c->seqlen_q + 3) / 4;
        c->seqlen_k = c->seqlen_k * 7 / 8;
    }
}

static void describe(const test_case *c, flash_attn_dtype dtype, const tier *t, int threads)
{
    printf("  %s on %s, %d threads: b %d, sq %d, sk %d, hq %d, hk %d, d %d, dv %d, mask %d (%d, %d), scale %g, softcap "
           "%g, "
           "logits %g, bias %u, alibi %d, sinks %d, dropout %g, slices %d, varlen %d %d, used %d %d, leftpad %d, index "
           "%d, "
           "page %d, splits %d, layout %d, o_f32 %d\n",
           dtype_name(dtype), t->name, threads, c->batch, c->seqlen_q, c->seqlen_k, c->heads_q, c->heads_k, c->head_dim,
           c->head_dim_v, (int)c->mask, c->window_left, c->window_right, (double)c->scale, (double)c->softcap,
           (double)c->logit_size, c->bias, c->alibi, c->sinks, (double)c->dropout, (int)c->slices, (int)c->varlen_q,
           (int)c->varlen_k, (int)c->seqused_q, (int)c->seqused_k, c->leftpad, c->cache_batch_idx, c->page_size,
           c->num_splits, (int)c->layout, c->o_f32);
}

/* ---- spoiling ---- */

static flash_attn_tensor *some_tensor(bytes *b, flash_attn_problem *p, flash_attn_grads *g)
{
    flash_attn_tensor *const all[] = {&p->q,     &p->k,    &p->v,  &p->o,  &p->lse, &p->bias,  &p->alibi_slopes,
                                      &p->sinks, &g->dout, &g->dq, &g->dk, &g->dv,  &g->dbias, &g->dsinks};
    return all[below(b, 14)];
}

static const int32_t *spoilt_ints(bytes *b, const int32_t *from, int count, int32_t *copy)
{
    static const int32_t values[] = {-1, INT32_MAX, INT32_MIN, 1 << 29, 100000, -100};
    if (!from)
        return NULL;
    count = count > 64 ? 64 : count;
    memcpy(copy, from, (size_t)count * sizeof *copy);
    copy[below(b, count)] = values[below(b, 6)];
    return copy;
}

/* Nothing here makes a tensor claim memory that it does not have, save by numbers so large that they must be refused.
 */
static void spoil(bytes *b, flash_attn_problem *p, flash_attn_grads *g, int batch, int32_t *ints,
                  flash_attn_slice *slice)
{
    static const float numbers[] = {NAN, INFINITY, -INFINITY, -1.0f, 2.0f};
    flash_attn_tensor *t         = some_tensor(b, p, g);
    int                n         = below(b, 4);
    switch (below(b, 22)) {
    case 0: t->shape[n] -= 1 + below(b, 3); break;
    case 1: t->shape[n] = INT64_MAX - below(b, 3); break;
    case 2: t->shape[n] = -((int64_t)1 << below(b, 63)); break;
    case 3: t->stride[n] = INT64_MAX - below(b, 3); break;
    case 4: t->stride[n] = 0; break;
    case 5: t->dtype = (flash_attn_dtype)(int)(4 + below(b, 9)); break;
    case 6: t->data = NULL; break;
    case 7: t->reserved = 1 + below(b, 9); break;
    case 8: p->scale = numbers[below(b, 3)]; break;
    case 9: p->softcap = numbers[below(b, 4)]; break;
    case 10: p->mask = (flash_attn_mask)(int)(3 + below(b, 1000)); break;
    case 11: p->window_left = -2 - below(b, 1000); break;
    case 12: p->reserved[below(b, 8)] = 1; break;
    case 13: p->dropout.p = numbers[below(b, 5)]; break;
    case 14: p->batch = below(b, 2) ? -1 : p->batch + 1 + below(b, 3); break;
    case 15: p->num_splits = -2 - below(b, 100); break;
    case 16: p->cu_seqlens_q = spoilt_ints(b, p->cu_seqlens_q, batch + 1, ints); break;
    case 17: p->seqused_k = spoilt_ints(b, p->seqused_k, batch, ints); break;
    case 18: p->leftpad_k = spoilt_ints(b, p->leftpad_k, batch, ints); break;
    case 19: p->device.type = (flash_attn_device_type)(int)(3 + below(b, 9)); break;
    case 20: t->dtype = FLASH_ATTN_F8E4M3; break;
    default:
        *slice =
            (flash_attn_slice){below(b, 9) - 4, below(b, 9) - 4, below(b, 9) - 4, below(b, 9) - 4, below(b, 9) - 2};
        p->slices.list    = slice;
        p->slices.count   = 1;
        p->slices.offsets = NULL;
    }
}

/* ---- one run ---- */

static const case_memory *gpu_memory;     /* NULL: the CPU */
static const tier        *one_tier;       /* NULL: any */
static int                one_dtype = -1; /* likewise */
static bool               hopper, latent, few, wide;

typedef enum outcome { RIGHT, REFUSED, UNSUPPORTED, WRONG, NUM_OUTCOMES } outcome;

static outcome failure(const char *what, const char *reason)
{
    printf("FAILED: %s: %s\n", what, reason);
    return WRONG;
}

static outcome run_spoilt(case_instance *x, const tier *t, bytes *b)
{
    flash_attn_problem p = x->problem;
    flash_attn_grads   g = x->grads;
    int32_t            ints[64];
    flash_attn_slice   slice;
    case_result        result = {.worst_of = ""};
    for (int n = 1 + below(b, 3); n > 0; n--)
        spoil(b, &p, &g, x->shape.batch, ints, &slice);
    case_poison_outputs(x);
    bool              backward = x->backward && one_in(b, 2);
    flash_attn_status status =
        backward ? flash_attn_backward(t->context, &p, &g, NULL) : flash_attn_forward(t->context, &p, NULL);
    if (status == FLASH_ATTN_OK) /* what was spoilt did not matter, or made another valid problem */
        return case_only_outputs_changed(x, &result) ? RIGHT : failure("a harmless change", result.reason);
    if (status != FLASH_ATTN_INVALID && status != FLASH_ATTN_UNSUPPORTED && status != FLASH_ATTN_NO_DEVICE &&
        status != FLASH_ATTN_NO_MEMORY)
        return failure("a spoilt problem", flash_attn_status_string(status));
    if (flash_attn_last_error()[0] == 0)
        return failure("a spoilt problem", "no sentence in last_error");
    for (int n = 0; n < x->num_buffers; n++)
        for (size_t m = 0; x->buffers[n].output && m < x->buffers[n].bytes; m++)
            if (x->buffers[n].base[m] != 0xFF)
                return failure("a refused problem", "an output was written to");
    if (!case_only_outputs_changed(x, &result))
        return failure("a refused problem", result.reason);
    return REFUSED;
}

static bool good_call_works(const tier *t)
{
    float              one = 1, o = 0;
    flash_attn_problem p = {.q = {.data = &one, .shape = {1, 1, 1, 1}},
                            .k = {.data = &one, .shape = {1, 1, 1, 1}},
                            .v = {.data = &one, .shape = {1, 1, 1, 1}},
                            .o = {.data = &o}};
    return flash_attn_forward(t->context, &p, NULL) == FLASH_ATTN_OK && o == 1;
}

static outcome run_bytes(bytes b)
{
    char             why[300];
    bool             spoilt  = one_in(&b, 3);
    flash_attn_dtype dtype   = (flash_attn_dtype)below(&b, 3);
    const tier      *t       = tier_at(below(&b, num_tiers()));
    dtype                    = one_dtype >= 0 ? (flash_attn_dtype)one_dtype : dtype;
    t                        = one_tier ? one_tier : t;
    int              threads = 1 + below(&b, HARNESS_THREADS);
    uint64_t         seed    = (uint64_t)below(&b, 65536);
    test_case        c       = take_shape(&b);
    take_scores(&b, &c);
    take_lengths(&b, &c);
    spoilt             = spoilt && !gpu_memory;
    bool deterministic = (hopper || wide) && one_in(&b, 3);
    if (hopper)
        take_hoppers_shape(&b, &c);
    if (hopper && dtype == FLASH_ATTN_F32)
        dtype = one_in(&b, 4) ? FLASH_ATTN_F8E4M3 : FLASH_ATTN_BF16;
    if (latent)
        take_latent_shape(&b, &c);
    if (few)
        take_few_shape(&b, &c);
    if (wide)
        take_wide_shape(&b, &c);
    if ((latent || few) && gpu_memory && dtype == FLASH_ATTN_F32)
        dtype = FLASH_ATTN_BF16;
    case_instance *x = case_build(&c, dtype, CASE_RANDOM | CASE_BACKWARD | (spoilt ? CASE_NO_EXPECT : 0), seed, why, sizeof why);
    outcome        result;
    if (!x) {
        result = failure("building", why);
    } else if (spoilt) {
        result = run_spoilt(x, t, &b);
    } else {
        case_device device = {.context = t->context, .num_threads = threads};
        if (gpu_memory)
            device = (case_device){.device = {.type = FLASH_ATTN_CUDA}, .memory = gpu_memory, .deterministic = deterministic};
        case_result judged = case_run(x, &device);
        result = judged.verdict == CASE_PASSED ? RIGHT : judged.verdict == CASE_SKIPPED ? UNSUPPORTED : WRONG;
        if (result == WRONG)
            failure("a valid problem", judged.reason);
    }
    if (result != WRONG && !good_call_works(t))
        result = failure("the next call", flash_attn_last_error());
    if (result == WRONG)
        describe(&c, dtype, t, threads);
    case_free(x);
    return result;
}

#ifdef FLASH_ATTN_FUZZ

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (run_bytes((bytes){data, data + size}) == WRONG)
        abort();
    return 0;
}

#else

static volatile uint64_t current_seed;

/* A crash or a hang must name its seed. */
static void last_words(int signal_number)
{
    char     text[] = "\nseed 00000000000000000000 crashed, or took more than 60 s\n";
    uint64_t seed   = current_seed;
    for (int n = 25; n > 5; n--, seed /= 10)
        text[n] = (char)('0' + seed % 10);
    if (write(2, text, sizeof text - 1) < 0)
        _exit(3);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static outcome run_seed(uint64_t seed)
{
    uint8_t  data[400];
    uint64_t state = seed;
    for (size_t n = 0; n < sizeof data; n++)
        data[n] = (uint8_t)random_bits(&state);
    current_seed = seed;
    alarm(gpu_memory ? 300 : 60);
    outcome result = run_bytes((bytes){data, data + sizeof data});
    alarm(0);
    if (result == WRONG)
        printf("  again with: fuzz_problem --seed %llu, and --tier and --dtype as now\n", (unsigned long long)seed);
    return result;
}

static bool take_tier(const char *name)
{
    for (int n = 0; n < num_tiers(); n++)
        one_tier = strcmp(tier_at(n)->name, name) == 0 ? tier_at(n) : one_tier;
    return one_tier != NULL;
}

static bool take_dtype(const char *name)
{
    for (int type = FLASH_ATTN_F32; type <= FLASH_ATTN_F8E4M3; type++)
        one_dtype = strcmp(dtype_name((flash_attn_dtype)type), name) == 0 ? type : one_dtype;
    return one_dtype >= 0;
}

int main(int argc, char **argv)
{
    uint64_t seed = 1, count[NUM_OUTCOMES] = {0};
    double   seconds = -1;
    for (int n = 1; n < argc; n++) {
        if (strcmp(argv[n], "--seconds") == 0 && n + 1 < argc) {
            seconds = strtod(argv[++n], NULL);
        } else if (strcmp(argv[n], "--seed") == 0 && n + 1 < argc) {
            seed = strtoull(argv[++n], NULL, 0);
        } else if (strcmp(argv[n], "--tier") == 0 && n + 1 < argc) {
            if (!take_tier(argv[++n])) {
                printf("skipped: this machine has no tier %s\n", argv[n]);
                return 0;
            }
        } else if (strcmp(argv[n], "--dtype") == 0 && n + 1 < argc && take_dtype(argv[n + 1])) {
            n++;
        } else if (strcmp(argv[n], "--latent") == 0) {
            latent = true;
        } else if (strcmp(argv[n], "--few") == 0) {
            few = true;
        } else if (strcmp(argv[n], "--wide") == 0) {
            wide = true;
        } else if (strcmp(argv[n], "--gpu") == 0 || strcmp(argv[n], "--hopper") == 0) {
            char why[200];
            hopper     = hopper || strcmp(argv[n], "--hopper") == 0;
            gpu_memory = case_gpu_memory(0, why, sizeof why);
            if (!gpu_memory) {
                printf("skipped: %s\n", why);
                return 0;
            }
        } else {
            fprintf(stderr, "usage: fuzz_problem [--seconds N] [--seed N] [--tier NAME] [--dtype NAME] [--gpu] [--hopper] [--latent] [--few] [--wide]\n");
            return 2;
        }
    }
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
    for (size_t n = 0; n < sizeof fatal / sizeof fatal[0]; n++)
        signal(fatal[n], last_words);
    setvbuf(stdout, NULL, _IOLBF, 0);
    time_t end = time(NULL) + (time_t)seconds;
    do {
        count[run_seed(seed++)]++;
    } while (seconds >= 0 && count[WRONG] < 10 && (seconds == 0 || time(NULL) < end));
    printf("fuzz: %llu right, %llu refused, %llu unsupported, %llu failed\n", (unsigned long long)count[RIGHT],
           (unsigned long long)count[REFUSED], (unsigned long long)count[UNSUPPORTED],
           (unsigned long long)count[WRONG]);
    return count[WRONG] > 0;
}

#endif
