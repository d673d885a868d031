/* Which kernel a call gets: on Hopper its own where these have the options of the call, else the portable one; above 256 columns. No GPU is needed. */
#include "harness.h"

#include "check.h"
#include "cuda/cuda.h"

#include <string.h>

typedef struct asked {
    const char       *name;
    flash_attn_pass   pass;
    enum fa_kernel_id kernel; /* that answers */
    flash_attn_mask   mask;
    int               heads_k; /* of 8; 0: 8 */
    float             softcap;
    bool              alibi, bias, dbias, sinks, dropout, slices, varlen, used, deterministic, pages, f32_dout, f32;
    int               queries; /* 0: 512 */
    int               splits;
    bool              f32_bias, odd_bias; /* whose rows do not begin at multiples of 16 bytes */
    int               own_to; /* head dims: above, the portable kernel answers; 0: all */
} asked;

#define FORWARD FLASH_ATTN_FORWARD
#define BACKWARD FLASH_ATTN_BACKWARD
#define OWN_F FA_KERNEL_FORWARD_SM90
#define FEW_F FA_KERNEL_FORWARD_FEW_SM90
#define OWN_B FA_KERNEL_BACKWARD_SM90
#define ANY_F FA_KERNEL_FORWARD_SM80
#define ANY_B FA_KERNEL_BACKWARD_SM80
#define SHORT_F FA_KERNEL_FORWARD_SHORT_SM90
#define SHORT_B FA_KERNEL_BACKWARD_SHORT_SM90

static const asked calls[] = {
    {"plain", FORWARD, OWN_F, .mask = FLASH_ATTN_NONE},
    {"plain", BACKWARD, OWN_B, .mask = FLASH_ATTN_CAUSAL},
    {"few queries", FORWARD, FEW_F, .queries = 64},
    {"few queries, groups", FORWARD, FEW_F, .queries = 128, .heads_k = 2},
    {"few queries, causal, groups, varlen", FORWARD, FEW_F, .mask = FLASH_ATTN_CAUSAL, .queries = 17, .heads_k = 2, .varlen = true},
    {"few queries, window, pages, sinks", FORWARD, FEW_F, .mask = FLASH_ATTN_WINDOW, .queries = 5, .heads_k = 2, .pages = true, .sinks = true},
    {"sixteen rows", FORWARD, FEW_F, .queries = 4, .heads_k = 2},
    {"sixteen rows of few tiles", FORWARD, FEW_F, .queries = 2, .heads_k = 1},
    {"sixteen rows of few tiles, by the batch", FORWARD, ANY_F, .queries = 2, .heads_k = 1, .splits = -1},
    {"sixteen rows, by the batch", FORWARD, FEW_F, .queries = 4, .heads_k = 2, .splits = -1},
    {"eight rows", FORWARD, ANY_F, .queries = 2, .heads_k = 2},
    {"few queries, softcap", FORWARD, ANY_F, .queries = 64, .softcap = 30},
    {"few queries, bias", FORWARD, ANY_F, .queries = 64, .bias = true},
    {"few queries, ALiBi", FORWARD, ANY_F, .queries = 64, .alibi = true},
    {"few queries, block mask", FORWARD, ANY_F, .queries = 64, .slices = true},
    {"few queries, float32", FORWARD, ANY_F, .queries = 64, .f32 = true},
    {"few queries", BACKWARD, ANY_B, .queries = 128},
    {"softcap", FORWARD, OWN_F, .softcap = 50},
    {"softcap", BACKWARD, OWN_B, .softcap = 50},
    {"softcap, window, groups", BACKWARD, OWN_B, .mask = FLASH_ATTN_WINDOW, .heads_k = 4, .softcap = 50},
    {"softcap, causal, varlen", BACKWARD, OWN_B, .mask = FLASH_ATTN_CAUSAL, .softcap = 30, .varlen = true},
    {"softcap, used lengths, deterministic", BACKWARD, OWN_B, .softcap = 30, .used = true, .deterministic = true},
    {"the largest softcap", FORWARD, OWN_F, .softcap = 128},
    {"the largest softcap", BACKWARD, OWN_B, .softcap = 128},
    {"a larger softcap", FORWARD, ANY_F, .softcap = 129},
    {"a larger softcap", BACKWARD, ANY_B, .softcap = 129},
    {"a softcap whose slope overflows", BACKWARD, ANY_B, .softcap = 1e-35f},
    {"ALiBi", FORWARD, OWN_F, .alibi = true},
    {"ALiBi", BACKWARD, OWN_B, .alibi = true},
    {"ALiBi, softcap, causal", BACKWARD, OWN_B, .mask = FLASH_ATTN_CAUSAL, .alibi = true, .softcap = 20},
    {"sinks", FORWARD, OWN_F, .sinks = true},
    {"sinks", BACKWARD, OWN_B, .mask = FLASH_ATTN_WINDOW, .heads_k = 2, .sinks = true},
    {"groups with few key heads", BACKWARD, OWN_B, .heads_k = 1},
    {"pages", FORWARD, OWN_F, .pages = true},
    {"bias", FORWARD, OWN_F, .bias = true},
    {"bias", BACKWARD, OWN_B, .bias = true},
    {"bias, window, groups, varlen", FORWARD, OWN_F, .mask = FLASH_ATTN_WINDOW, .heads_k = 2, .varlen = true, .bias = true},
    {"bias, causal, groups, varlen, sinks", BACKWARD, OWN_B, .mask = FLASH_ATTN_CAUSAL, .heads_k = 2, .varlen = true, .bias = true, .sinks = true},
    {"bias in float32", FORWARD, OWN_F, .bias = true, .f32_bias = true},
    {"bias in float32", BACKWARD, ANY_B, .bias = true, .f32_bias = true},
    {"bias of odd rows", FORWARD, ANY_F, .bias = true, .odd_bias = true},
    {"bias of odd rows", BACKWARD, ANY_B, .bias = true, .odd_bias = true},
    {"bias, softcap", FORWARD, ANY_F, .bias = true, .softcap = 30},
    {"bias, ALiBi", BACKWARD, ANY_B, .bias = true, .alibi = true},
    {"bias, pages", FORWARD, ANY_F, .bias = true, .pages = true},
    {"bias's gradient", BACKWARD, OWN_B, .bias = true, .dbias = true},
    {"dropout", FORWARD, OWN_F, .dropout = true},
    {"dropout, causal, groups, varlen", FORWARD, OWN_F, .mask = FLASH_ATTN_CAUSAL, .heads_k = 2, .dropout = true, .varlen = true},
    {"dropout, softcap, ALiBi, sinks, window", FORWARD, OWN_F, .mask = FLASH_ATTN_WINDOW, .softcap = 30, .alibi = true, .sinks = true, .dropout = true},
    {"dropout, bias", FORWARD, OWN_F, .bias = true, .dropout = true},
    {"dropout, few queries", FORWARD, ANY_F, .dropout = true, .queries = 64},
    {"dropout", BACKWARD, OWN_B, .dropout = true},
    {"dropout, causal, groups, varlen", BACKWARD, OWN_B, .mask = FLASH_ATTN_CAUSAL, .heads_k = 4, .dropout = true, .varlen = true},
    {"dropout, softcap, ALiBi, sinks, deterministic", BACKWARD, OWN_B, .softcap = 30, .alibi = true, .sinks = true, .dropout = true, .deterministic = true},
    {"dropout, bias", BACKWARD, OWN_B, .bias = true, .dropout = true, .own_to = 128},
    {"block mask", FORWARD, OWN_F, .slices = true},
    {"block mask, causal, softcap, ALiBi, dropout", FORWARD, OWN_F, .mask = FLASH_ATTN_CAUSAL, .slices = true, .softcap = 30, .alibi = true, .dropout = true},
    {"block mask, pages", FORWARD, ANY_F, .slices = true, .pages = true},
    {"block mask, bias", FORWARD, ANY_F, .slices = true, .bias = true},
    {"block mask, groups", BACKWARD, OWN_B, .slices = true, .heads_k = 2},
    {"block mask, window, varlen, deterministic", BACKWARD, OWN_B, .mask = FLASH_ATTN_WINDOW, .slices = true, .varlen = true, .deterministic = true},
    {"block mask, bias", BACKWARD, ANY_B, .slices = true, .bias = true},
    {"dO in float32", BACKWARD, ANY_B, .f32_dout = true},
    {"float32", FORWARD, FA_KERNEL_FORWARD_F32_SM90, .f32 = true},
    {"float32, window, varlen, ALiBi, sinks", FORWARD, FA_KERNEL_FORWARD_F32_SM90, .mask = FLASH_ATTN_WINDOW, .varlen = true, .alibi = true, .sinks = true, .f32 = true},
    {"float32, pages", FORWARD, FA_KERNEL_FORWARD_F32_SM90, .pages = true, .f32 = true},
    {"float32, parts", FORWARD, ANY_F, .splits = 2, .f32 = true},
    {"float32, softcap", FORWARD, ANY_F, .softcap = 30, .f32 = true},
    {"float32, bias, dropout", FORWARD, FA_KERNEL_FORWARD_F32_SM90, .bias = true, .dropout = true, .f32 = true},
    {"float32, block mask", FORWARD, ANY_F, .slices = true, .f32 = true},
    {"float32", BACKWARD, FA_KERNEL_BACKWARD_F32_SM90, .f32 = true},
    {"float32, causal, groups, varlen, sinks", BACKWARD, FA_KERNEL_BACKWARD_F32_SM90, .mask = FLASH_ATTN_CAUSAL, .heads_k = 2, .varlen = true, .sinks = true, .f32 = true},
    {"float32, few queries", BACKWARD, ANY_B, .queries = 128, .f32 = true},
    {"float32, deterministic", BACKWARD, ANY_B, .deterministic = true, .f32 = true},
    {"float32, bias, ALiBi, dropout", BACKWARD, FA_KERNEL_BACKWARD_F32_SM90, .bias = true, .alibi = true, .dropout = true, .f32 = true},
    {"float32, bias's gradient", BACKWARD, ANY_B, .bias = true, .dbias = true, .f32 = true},
    {"float32, softcap", BACKWARD, ANY_B, .softcap = 30, .f32 = true},
};

static int32_t                numbers[64]; /* an address; never read */
static const flash_attn_slice slices[2] = {{0, 2, 0, 64, FLASH_ATTN_SLICE_FULL}, {2, 4, 64, 128, FLASH_ATTN_SLICE_CAUSAL}};
enum { BATCH = 16, HEADS = 8, KEYS = 512 };

static flash_attn_tensor of(flash_attn_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (flash_attn_tensor){.dtype = dtype, .shape = {a, b, c, d}};
}

static flash_attn_status normalise(const asked *x, int head_dim, fa_call *call)
{
    flash_attn_dtype   dtype   = x->f32 ? FLASH_ATTN_F32 : FLASH_ATTN_BF16;
    int64_t            heads_k = x->heads_k ? x->heads_k : HEADS, queries = x->queries ? x->queries : KEYS, batch = BATCH, rows = KEYS;
    flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .mask = x->mask, .softcap = x->softcap, .deterministic = x->deterministic, .o = {.dtype = dtype}};
    p.num_splits = x->splits;
    if (x->varlen) {
        p.batch        = BATCH;
        p.cu_seqlens_q = p.cu_seqlens_k = numbers;
        p.max_seqlen_q = (int32_t)queries;
        p.max_seqlen_k = KEYS;
        batch = 1, queries *= BATCH, rows *= BATCH;
    }
    if (x->used)
        p.seqused_q = p.seqused_k = numbers;
    if (x->pages) {
        p.pages     = (flash_attn_pages){.table = numbers, .pages_per_seq = 8};
        p.seqused_k = numbers;
        rows        = 64;
    }
    p.q = of(dtype, batch, queries, HEADS, head_dim);
    p.k = p.v = of(dtype, batch, rows, heads_k, head_dim);
    if (x->mask == FLASH_ATTN_WINDOW)
        p.window_left = 100;
    if (x->alibi)
        p.alibi_slopes = of(FLASH_ATTN_F32, 1, HEADS, 1, 1);
    if (x->bias)
        p.bias = of(x->f32_bias ? FLASH_ATTN_F32 : dtype, 1, HEADS, x->varlen ? p.max_seqlen_q : queries, KEYS);
    for (int i = 3, stride = 1; x->odd_bias && i >= 0; stride *= i == 3 ? KEYS + 1 : (int)p.bias.shape[i], i--)
        p.bias.stride[i] = stride;
    if (x->sinks)
        p.sinks = of(FLASH_ATTN_F32, 1, HEADS, 1, 1);
    if (x->dropout)
        p.dropout = (flash_attn_dropout){.p = 0.1f, .seed = 1};
    if (x->slices)
        p.slices = (flash_attn_slices){.list = slices, .count = 2};
    flash_attn_tensor like  = {.dtype = dtype};
    flash_attn_grads  grads = {.dout = like, .dq = like, .dk = like, .dv = like, .dsinks = p.sinks};
    if (x->dbias)
        grads.dbias = p.bias;
    if (x->f32_dout)
        grads.dout.dtype = p.o.dtype = FLASH_ATTN_F32;
    flash_attn_status status = fa_normalise(&p, x->pass == BACKWARD ? &grads : NULL, x->pass, FA_PLAN, call);
    if (!x->dbias) /* a plan has all gradients */
        call->dbias.data = NULL;
    return status;
}

static void hoppers_own_kernels_take_the_calls_that_they_have_options_for(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++)
        for (int head_dim = 64; head_dim <= 256; head_dim *= 2) {
            const asked *x    = &calls[n];
            const char  *pass = x->pass == BACKWARD ? "backward" : "forward";
            fa_call      call;
            fa_plan      plan;
            if (normalise(x, head_dim, &call) != FLASH_ATTN_OK || fa_plan_make(&call, 90, NULL, NULL, &plan) != FLASH_ATTN_OK)
                fail_msg("%s, %s, head_dim %d: %s", x->name, pass, head_dim, flash_attn_last_error());
            const fa_key *key = &plan.launch[plan.main].key;
            enum fa_kernel_id answers = x->own_to && head_dim > x->own_to ? (x->pass == BACKWARD ? ANY_B : ANY_F) : x->kernel;
            if ((enum fa_kernel_id)key->kernel != answers)
                fail_msg("%s, %s, head_dim %d runs %s, not %s", x->name, pass, head_dim, fa_kernels[key->kernel].name, fa_kernels[answers].name);
            if (key->has_bias != x->bias || key->has_softcap != (x->softcap > 0) || key->has_alibi != x->alibi || key->has_dropout != x->dropout)
                fail_msg("%s, %s, head_dim %d: the kernel is built without the option", x->name, pass, head_dim);
            assert_int_equal(fa_plan_make(&call, 80, NULL, NULL, &plan), FLASH_ATTN_OK); /* nobody else has these kernels */
            assert_true(plan.launch[plan.main].key.kernel == ANY_F || plan.launch[plan.main].key.kernel == ANY_B);
        }
}

/* As padding is: all heads of a key head read it, and their keys, once. */
static void a_bias_of_all_heads_leaves_few_queries_in_one_tile(void **state)
{
    (void)state;
    for (int heads = 1; heads <= HEADS; heads += HEADS - 1) {
        flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = FLASH_ATTN_BF16}};
        fa_call            call;
        fa_plan            plan;
        p.q    = of(FLASH_ATTN_BF16, BATCH, 1, HEADS, 128);
        p.k    = p.v = of(FLASH_ATTN_BF16, BATCH, KEYS, 1, 128);
        p.bias = of(FLASH_ATTN_BF16, BATCH, heads, 1, KEYS);
        assert_int_equal(fa_normalise(&p, NULL, FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
        assert_int_equal(fa_plan_make(&call, 90, NULL, NULL, &plan), FLASH_ATTN_OK);
        assert_int_equal(plan.launch[plan.main].key.tile_q == 16, heads == 1);
    }
}

/* Causal, `heads` heads on one key head, more than 256 columns (decision 0069). */
static flash_attn_status normalise_wide(flash_attn_dtype dtype, flash_attn_pass pass, int queries, int heads, int head_dim, int head_dim_v, fa_call *call)
{
    flash_attn_problem p     = {.device = {.type = FLASH_ATTN_CUDA}, .mask = FLASH_ATTN_CAUSAL, .o = {.dtype = dtype}};
    flash_attn_tensor  like  = {.dtype = dtype};
    flash_attn_grads   grads = {.dout = like, .dq = like, .dk = like, .dv = like};
    p.q = of(dtype, 1, queries, heads, head_dim);
    p.k = of(dtype, 1, KEYS, 1, head_dim);
    p.v = of(dtype, 1, KEYS, 1, head_dim_v);
    return fa_normalise(&p, pass == BACKWARD ? &grads : NULL, pass, FA_PLAN, call);
}

/* Their queries' heads share tiles, so that keys are read once for each tile and not for each head. */
static void few_queries_of_many_wide_heads_take_few_blocks(void **state)
{
    (void)state;
    static const int archs[] = {80, 86, 89, 90, 100, 120};
    for (size_t a = 0; a < sizeof archs / sizeof *archs; a++) {
        fa_call call;
        fa_plan plan;
        assert_int_equal(normalise_wide(FLASH_ATTN_BF16, FORWARD, 1, 128, 576, 512, &call), FLASH_ATTN_OK);
        if (fa_plan_make(&call, archs[a], NULL, "forward_sm80", &plan) != FLASH_ATTN_OK)
            fail_msg("sm_%d: %s", archs[a], flash_attn_last_error());
        int tile = plan.launch[plan.main].key.tile_q, tiles = (128 + tile - 1) / tile;
        assert_true(tile >= 48);
        assert_int_equal(plan.args.num_splits, 2);
        assert_int_equal(plan.launch[plan.main].blocks, tiles * 2);
    }
}

static void heads_too_wide_are_refused_with_the_width_that_is_not(void **state)
{
    (void)state;
    static const struct {
        flash_attn_dtype dtype;
        flash_attn_pass  pass;
        int              head_dim, head_dim_v, arch;
        const char      *says; /* NULL: it is taken */
    } wide[] = {
        {FLASH_ATTN_F32, FORWARD, 576, 512, 80, NULL},
        {FLASH_ATTN_F32, FORWARD, 257, 320, 86, NULL},
        {FLASH_ATTN_F32, FORWARD, 64, 321, 86, "float32 holds head_dim 64 with head_dim_v 321 on compute capability 8.6: the largest is 320"},
        {FLASH_ATTN_BF16, BACKWARD, 576, 512, 90, NULL},
        {FLASH_ATTN_F16, BACKWARD, 257, 576, 120, NULL},
        {FLASH_ATTN_F32, BACKWARD, 64, 576, 90, NULL},
        {FLASH_ATTN_F32, BACKWARD, 576, 512, 80, "backward kernel for float32 holds head_dim 576 with head_dim_v 512 on compute capability 8.0: the largest is 384"},
        {FLASH_ATTN_F32, BACKWARD, 257, 64, 120, "the largest is 128"},
    };
    for (size_t n = 0; n < sizeof wide / sizeof *wide; n++) {
        fa_call call;
        fa_plan plan;
        assert_int_equal(normalise_wide(wide[n].dtype, wide[n].pass, 100, 2, wide[n].head_dim, wide[n].head_dim_v, &call), FLASH_ATTN_OK);
        flash_attn_status status = fa_plan_make(&call, wide[n].arch, NULL, NULL, &plan);
        assert_int_equal(status, wide[n].says ? FLASH_ATTN_UNSUPPORTED : FLASH_ATTN_OK);
        if (wide[n].says && !strstr(flash_attn_last_error(), wide[n].says))
            fail_msg("%s", flash_attn_last_error());
    }
}

/* V as the first columns of K, which has `stride` elements a row, is kept by the call: without data it shows in the strides alone. */
static void latent_calls_take_their_own_kernel_on_hopper(void **state)
{
    (void)state;
    static const struct {
        const char      *what;
        int              arch, queries, heads, head_dim_v, stride_of_v;
        flash_attn_dtype dtype;
        float            softcap, scale;
        int              kernel, cluster; /* of a tile's parts, or of two tiles */
    } calls[] = {
        {"16 heads", 90, 1, 16, 512, 576, FLASH_ATTN_BF16, 0, 0, FA_KERNEL_FORWARD_LATENT_SM90, 2},
        {"128 heads, all queries", 90, 300, 128, 512, 576, FLASH_ATTN_F16, 0, 0, FA_KERNEL_FORWARD_LATENT_SM90, 2},
        {"prefill", 90, 300, 4, 512, 576, FLASH_ATTN_BF16, 0, 0, FA_KERNEL_FORWARD_LATENT_SM90, 1},
        {"V elsewhere", 90, 1, 16, 512, 512, FLASH_ATTN_BF16, 0, 0, FA_KERNEL_FORWARD_SM80, 1},
        {"V too wide", 90, 1, 16, 520, 576, FLASH_ATTN_BF16, 0, 0, FA_KERNEL_FORWARD_SM80, 1},
        {"a softcap", 90, 1, 16, 512, 576, FLASH_ATTN_BF16, 20, 0, FA_KERNEL_FORWARD_SM80, 1},
        {"a scale below 0", 90, 1, 16, 512, 576, FLASH_ATTN_BF16, 0, -1, FA_KERNEL_FORWARD_SM80, 1},
        {"float32", 90, 1, 16, 512, 576, FLASH_ATTN_F32, 0, 0, FA_KERNEL_FORWARD_SM80, 1},
        {"before Hopper", 80, 1, 16, 512, 576, FLASH_ATTN_BF16, 0, 0, FA_KERNEL_FORWARD_SM80, 1},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = calls[n].dtype}, .softcap = calls[n].softcap, .scale = calls[n].scale};
        fa_call            call;
        fa_plan            plan;
        int64_t            strides[] = {KEYS * calls[n].stride_of_v, calls[n].stride_of_v, calls[n].stride_of_v, 1};
        p.q = of(calls[n].dtype, 1, calls[n].queries, calls[n].heads, 576);
        p.k = of(calls[n].dtype, 1, KEYS, 1, 576);
        p.v = of(calls[n].dtype, 1, KEYS, 1, calls[n].head_dim_v);
        memcpy(p.v.stride, strides, sizeof strides);
        assert_int_equal(fa_normalise(&p, NULL, FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
        assert_int_equal(fa_plan_make(&call, calls[n].arch, NULL, NULL, &plan), FLASH_ATTN_OK);
        if ((int)plan.launch[plan.main].key.kernel != calls[n].kernel || plan.launch[plan.main].cluster != calls[n].cluster)
            fail_msg("%s: %s in clusters of %d", calls[n].what, fa_kernels[plan.launch[plan.main].key.kernel].name, plan.launch[plan.main].cluster);
    }
}

/* Without data, V is K's first columns if its strides say so; of as many columns as K's only the same data do. */
static void a_plan_without_data_knows_a_latent_cache(void **state)
{
    (void)state;
    static _Alignas(256) char one[1], other[1];
    static const struct {
        int64_t dim_v, stride; /* of a key; 0: contiguous */
        void   *k, *v;
        bool    latent;
    } calls[] = {
        {512, 576, NULL, NULL, true}, {512, 0, NULL, NULL, false}, {512, 576, one, other, false}, {512, 576, one, one, true}, {512, 0, one, one, false},
        {512, 576, one, NULL, false},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++)
        for (int equal = 0; equal < 2; equal++) { /* head_dim as head_dim_v */
            flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = FLASH_ATTN_BF16}};
            int64_t            d = equal ? 512 : 576, stride = calls[n].stride ? d : 0;
            fa_call            call;
            fa_plan            plan;
            p.q = of(FLASH_ATTN_BF16, 2, 1, 64, d);
            p.k = of(FLASH_ATTN_BF16, 2, 100, 1, d);
            p.v = of(FLASH_ATTN_BF16, 2, 100, 1, calls[n].dim_v);
            memcpy(p.v.stride, (int64_t[]){stride * 100, stride, stride, stride > 0}, sizeof p.v.stride);
            p.k.data = calls[n].k;
            p.v.data = calls[n].v;
            assert_int_equal(fa_normalise(&p, NULL, FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
            assert_int_equal(fa_plan_make(&call, 90, NULL, NULL, &plan), FLASH_ATTN_OK);
            bool latent = plan.launch[plan.main].key.kernel == FA_KERNEL_FORWARD_LATENT_SM90;
            bool expected = equal ? calls[n].k && calls[n].k == calls[n].v : calls[n].latent;
            if (latent != expected)
                fail_msg("call %zu, head_dim %d: %s", n, (int)d, fa_kernels[plan.launch[plan.main].key.kernel].name);
        }
}

/* num_splits 0 knows nothing of the batch, -1 does, and of how many blocks run at once. */
static void latent_parts_follow_the_batch_if_asked(void **state)
{
    (void)state;
    static const struct {
        int     batch, heads, keys;
        fa_chip chip;
        int     least, most; /* parts expected of -1: those that took least time on a card, or near it */
    } calls[] = {
        {1, 128, 4096, {132, 4917}, 24, 32},  {8, 128, 4096, {132, 4917}, 6, 6},   {32, 128, 4096, {132, 4917}, 2, 2}, {128, 128, 4096, {132, 4917}, 1, 1},
        {8, 64, 4096, {132, 4917}, 8, 8},     {1, 16, 16384, {132, 4917}, 32, 114}, {32, 16, 16384, {132, 4917}, 3, 4}, {32, 64, 4096, {132, 4917}, 3, 4},
        {32, 16, 16384, {132, 3352}, 3, 4},   {32, 128, 4096, {132, 3352}, 2, 2},  {1, 16, 64, {132, 3352}, 1, 2},     {1, 16, 1, {132, 3352}, 1, 1},
        {32, 128, 4096, {64, 3352}, 1, 1},    {32, 128, 4096, {256, 3352}, 2, 3},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        int by_shape = 0;
        for (int splits = -1; splits <= 0; splits++)
            for (int batch = calls[n].batch; batch <= calls[n].batch + 1; batch++) {
                flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = FLASH_ATTN_BF16}, .num_splits = splits};
                fa_call            call;
                fa_plan            plan;
                p.q = of(FLASH_ATTN_BF16, batch, 1, calls[n].heads, 576);
                p.k = of(FLASH_ATTN_BF16, batch, calls[n].keys, 1, 576);
                p.v = of(FLASH_ATTN_BF16, batch, calls[n].keys, 1, 512);
                memcpy(p.v.stride, (int64_t[]){calls[n].keys * 576, 576, 576, 1}, sizeof p.v.stride);
                assert_int_equal(fa_normalise(&p, NULL, FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
                assert_int_equal(fa_plan_make(&call, 90, &calls[n].chip, NULL, &plan), FLASH_ATTN_OK);
                assert_int_equal(plan.launch[plan.main].key.kernel, FA_KERNEL_FORWARD_LATENT_SM90);
                int parts = plan.args.num_splits, tiles = (calls[n].heads + 63) / 64 * batch;
                bool merges = parts > 1 && parts <= 8 && tiles * parts <= calls[n].chip.multiprocessors * 3 / 4; /* by clusters, else by a second launch */
                assert_int_equal(plan.num_launches, merges || parts == 1 ? 1 : 2);
                assert_int_equal(plan.launch[plan.main].cluster, merges ? parts : calls[n].heads == 128 ? 2 : 1);
                if (splits < 0 && batch == calls[n].batch && !(parts >= calls[n].least && parts <= calls[n].most))
                    fail_msg("%d sequences of %d keys, %d heads: %d parts", batch, calls[n].keys, calls[n].heads, parts);
                assert_int_equal(plan.args.split_keys % plan.row->tile_k, 0);
                assert_true(splits == 0 || (int64_t)parts * plan.args.split_keys >= calls[n].keys);
                if (splits == 0 && batch > calls[n].batch)
                    assert_int_equal(parts, by_shape);
                by_shape = parts;
            }
    }
}

/* 32 heads on 8 on an H200, no mask: which blocks were fastest, or within 5% of it, for few queries by default (decision 0074, second round). */
static void parts_of_few_queries_are_folded_where_it_was_measured_fastest(void **state)
{
    (void)state;
    enum { PARTS = 0, WHOLE = 2, GROUPS = 3 };
    static const fa_chip h200 = {132, 4917};
    static const struct {
        int head_dim, queries, batch, keys, blocks_have;
    } calls[] = {
        {128, 16, 1, 1024, PARTS},  {128, 16, 1, 16384, PARTS}, {128, 16, 8, 1024, PARTS},   {128, 16, 8, 4096, PARTS}, {128, 16, 8, 16384, GROUPS}, {128, 16, 64, 1024, WHOLE}, {128, 16, 64, 16384, WHOLE},
        {128, 64, 1, 16384, PARTS}, {128, 64, 8, 1024, WHOLE},  {128, 64, 64, 4096, WHOLE},  {64, 16, 8, 1024, PARTS},  {64, 16, 8, 4096, PARTS},    {64, 16, 8, 16384, GROUPS}, {64, 16, 64, 4096, WHOLE},
        {64, 64, 1, 4096, PARTS},   {64, 64, 8, 4096, WHOLE},   {256, 16, 1, 4096, PARTS},   {256, 16, 8, 4096, GROUPS}, {256, 16, 64, 1024, WHOLE}, {256, 64, 64, 1024, WHOLE},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        flash_attn_problem p = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = FLASH_ATTN_BF16}};
        fa_call            call;
        fa_plan            plan;
        p.q = of(FLASH_ATTN_BF16, calls[n].batch, calls[n].queries, 32, calls[n].head_dim);
        p.k = p.v = of(FLASH_ATTN_BF16, calls[n].batch, calls[n].keys, 8, calls[n].head_dim);
        assert_int_equal(fa_normalise(&p, NULL, FORWARD, FA_PLAN, &call), FLASH_ATTN_OK);
        assert_int_equal(fa_plan_make(&call, 90, &h200, NULL, &plan), FLASH_ATTN_OK);
        const fa_key *key = &plan.launch[plan.main].key;
        assert_int_equal(key->kernel, FEW_F);
        if (!key->has_split || key->one_launch != calls[n].blocks_have)
            fail_msg("head_dim %d, %d queries, %d x %d: %d, not %d", calls[n].head_dim, calls[n].queries, calls[n].batch, calls[n].keys, key->one_launch, calls[n].blocks_have);
    }
}

/* By their lengths alone: a sequence keeps its kernel, and so its bits, in any batch. */

static void short_calls_take_the_kernel_of_their_lengths(void **state)
{
    (void)state;
    static const struct {
        flash_attn_pass   pass;
        int64_t           queries, keys, heads_k, columns;
        flash_attn_mask   mask;
        bool              f32_o, softcap, sinks;
        enum fa_kernel_id kernel;
        int               tile_q, tile_k; /* 0: any */
    } calls[] = {
        {FORWARD, 33, 256, 4, 64, .kernel = SHORT_F, .tile_q = 256},  {FORWARD, 32, 256, 4, 64, .kernel = FEW_F, .tile_q = 64},     {FORWARD, 65, 256, 4, 128, .kernel = OWN_F, .tile_q = 128},
        {FORWARD, 64, 256, 4, 128, .kernel = FEW_F, .tile_q = 64},    {FORWARD, 128, 257, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64},   {FORWARD, 300, 320, 4, 64, .kernel = OWN_F, .tile_q = 128},
        {FORWARD, 100, 256, 2, 64, .kernel = SHORT_F, .tile_q = 256}, {FORWARD, 257, 256, 2, 64, .kernel = OWN_F, .tile_q = 128},   {FORWARD, 128, 128, 1, 72, FLASH_ATTN_WINDOW, .kernel = SHORT_F, .tile_q = 128},
        {FORWARD, 33, 100, 4, 128, FLASH_ATTN_CAUSAL, .kernel = SHORT_F, .tile_q = 128}, {FORWARD, 100, 100, 4, 64, .f32_o = true, .kernel = OWN_F, .tile_q = 128}, {FORWARD, 100, 100, 4, 64, .softcap = true, .kernel = OWN_F, .tile_q = 128},
        {FORWARD, 8, 128, 4, 64, .kernel = SHORT_F, .tile_q = 128},   {FORWARD, 7, 128, 4, 64, .kernel = ANY_F, .tile_q = 16},      {FORWARD, 32, 129, 4, 64, .kernel = FEW_F, .tile_q = 64},
        {FORWARD, 32, 128, 2, 64, .kernel = FEW_F, .tile_q = 64},     {FORWARD, 32, 128, 4, 72, .kernel = FEW_F, .tile_q = 64},     {FORWARD, 100, 100, 4, 136, .kernel = OWN_F, .tile_q = 128},
        {FORWARD, 321, 321, 4, 64, .kernel = OWN_F, .tile_q = 192}, {FORWARD, 321, 320, 4, 64, .kernel = OWN_F, .tile_q = 128},   {BACKWARD, 128, 128, 4, 64, .kernel = SHORT_B, .tile_q = 128}, {BACKWARD, 128, 128, 1, 128, .kernel = SHORT_B, .tile_q = 128},
        {FORWARD, 224, 224, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 225, 224, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 128}, {FORWARD, 225, 225, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 128},
        {FORWARD, 257, 257, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 320, 320, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 321, 321, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 128},
        {FORWARD, 832, 832, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 832, 833, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 128}, {FORWARD, 900, 900, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 1664, 1664, 4, 128, .kernel = OWN_F, .tile_q = 128, .tile_k = 128},
        {FORWARD, 384, 384, 4, 64, .kernel = OWN_F, .tile_q = 192}, {FORWARD, 385, 385, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 448, 448, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64},
        {FORWARD, 577, 577, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 729, 729, 4, 64, .kernel = OWN_F, .tile_q = 192}, {FORWARD, 1025, 1025, 4, 64, .kernel = OWN_F, .tile_q = 192},
        {FORWARD, 1370, 1370, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 4096, 300, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 4096, 4096, 4, 64, .kernel = OWN_F, .tile_q = 192},
        {FORWARD, 577, 577, 4, 72, .kernel = OWN_F, .tile_q = 128, .tile_k = 128}, {FORWARD, 729, 729, 4, 72, .kernel = OWN_F, .tile_q = 192, .tile_k = 112}, {FORWARD, 1024, 1024, 4, 80, .kernel = OWN_F, .tile_q = 128, .tile_k = 128},
        {FORWARD, 2048, 2048, 4, 96, .kernel = OWN_F, .tile_q = 192, .tile_k = 112}, {FORWARD, 129, 128, 4, 64, .kernel = SHORT_F, .tile_q = 128, .tile_k = 128}, {FORWARD, 4096, 77, 1, 40, .kernel = SHORT_F, .tile_q = 128, .tile_k = 80},
        {FORWARD, 65, 1024, 4, 128, .kernel = OWN_F, .tile_q = 128}, {FORWARD, 64, 1024, 4, 128, .kernel = FEW_F, .tile_q = 64}, {FORWARD, 65, 1025, 4, 32, .kernel = ANY_F, .tile_q = 128},
        {FORWARD, 65, 1025, 4, 64, .kernel = FEW_F, .tile_q = 128}, {FORWARD, 65, 1024, 2, 64, .kernel = FEW_F, .tile_q = 128}, {FORWARD, 65, 1024, 4, 160, .kernel = FEW_F, .tile_q = 128},
        {FORWARD, 300, 81, 4, 96, .kernel = SHORT_F, .tile_q = 128, .tile_k = 128}, {FORWARD, 4096, 129, 4, 64, .kernel = OWN_F, .tile_q = 128, .tile_k = 64}, {FORWARD, 4096, 77, 4, 64, FLASH_ATTN_CAUSAL, .kernel = OWN_F, .tile_q = 192},
        {FORWARD, 200, 200, 4, 128, FLASH_ATTN_CAUSAL, .kernel = OWN_F, .tile_q = 128, .tile_k = 128},
        {BACKWARD, 129, 129, 4, 64, .kernel = SHORT_B, .tile_q = 256}, {BACKWARD, 1, 256, 4, 40, .kernel = SHORT_B, .tile_q = 256},  {BACKWARD, 256, 256, 2, 64, .kernel = OWN_B, .tile_q = 128},
        {BACKWARD, 257, 256, 4, 64, .kernel = OWN_B, .tile_q = 128},  {BACKWARD, 129, 129, 4, 128, .kernel = OWN_B, .tile_q = 64},  {BACKWARD, 100, 128, 4, 130, .kernel = ANY_B, .tile_q = 64},
        {BACKWARD, 129, 128, 4, 64, .kernel = SHORT_B, .tile_q = 128}, {BACKWARD, 4096, 77, 1, 40, .kernel = SHORT_B, .tile_q = 128}, {BACKWARD, 129, 128, 2, 128, .kernel = SHORT_B, .tile_q = 128},
        {BACKWARD, 4096, 128, 4, 80, .kernel = SHORT_B, .tile_q = 128}, {BACKWARD, 4096, 77, 4, 64, FLASH_ATTN_CAUSAL, .kernel = OWN_B, .tile_q = 128}, {BACKWARD, 4096, 129, 4, 64, .kernel = OWN_B, .tile_q = 128},
        {BACKWARD, 128, 100, 4, 64, FLASH_ATTN_WINDOW, .kernel = SHORT_B, .tile_q = 128}, {BACKWARD, 100, 100, 4, 64, .f32_o = true, .kernel = ANY_B, .tile_q = 64},
        {BACKWARD, 100, 100, 4, 64, .softcap = true, .kernel = ANY_B, .tile_q = 64}, {BACKWARD, 100, 100, 4, 64, .sinks = true, .kernel = ANY_B, .tile_q = 64},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++)
        for (int64_t batch = 1; batch <= 1000; batch *= 10) {
            fa_call            call;
            fa_plan            plan;
            flash_attn_tensor  like = {.dtype = FLASH_ATTN_BF16};
            flash_attn_problem p    = {.device = {.type = FLASH_ATTN_CUDA}, .o = {.dtype = calls[n].f32_o ? FLASH_ATTN_F32 : FLASH_ATTN_BF16}, .mask = calls[n].mask, .window_left = calls[n].mask == FLASH_ATTN_WINDOW ? 20 : 0};
            flash_attn_grads   g    = {.dout = like, .dq = like, .dk = like, .dv = like};
            p.q       = of(FLASH_ATTN_BF16, batch, calls[n].queries, 4, calls[n].columns);
            p.k = p.v = of(FLASH_ATTN_BF16, batch, calls[n].keys, calls[n].heads_k, calls[n].columns);
            p.softcap = calls[n].softcap ? 30.0f : 0.0f;
            if (calls[n].sinks) {
                p.sinks  = of(FLASH_ATTN_F32, 1, 4, 1, 1);
                g.dsinks = (flash_attn_tensor){.dtype = FLASH_ATTN_F32};
            }
            if (fa_normalise(&p, calls[n].pass == BACKWARD ? &g : NULL, calls[n].pass, FA_PLAN, &call) != FLASH_ATTN_OK || fa_plan_make(&call, 90, NULL, NULL, &plan) != FLASH_ATTN_OK)
                fail_msg("call %zu: %s", n, flash_attn_last_error());
            int tile_q = calls[n].kernel == FEW_F && (batch == 1 || (batch == 10 && calls[n].columns <= 64)) ? 64 : calls[n].tile_q; /* few tiles are small */
            if (plan.launch[plan.main].key.kernel != (int)calls[n].kernel || plan.row->tile_q != tile_q || (calls[n].tile_k && plan.row->tile_k != calls[n].tile_k))
                fail_msg("call %zu, batch %d: %s, tiles of %d x %d", n, (int)batch, fa_kernels[plan.launch[plan.main].key.kernel].name, plan.row->tile_q, plan.row->tile_k);
            if ((calls[n].kernel == SHORT_F || calls[n].kernel == SHORT_B) && plan.args.group_blocks == 1 && (plan.num_launches != 1 || plan.workspace_bytes != 0))
                fail_msg("call %zu: %d launches, %zu bytes", n, plan.num_launches, plan.workspace_bytes);
        }
}

/* A window that shows few of a larger tile's pairs; of lists of tiles, and where the sequence is no longer than the window, lengths alone say it (decision 0104). */
static void narrow_windows_take_smaller_tiles(void **state)
{
    (void)state;
    static const struct {
        flash_attn_pass pass;
        int64_t         queries, keys, columns;
        int             left, right, tile_q, tile_k;
        bool            slices;
    } calls[] = {
        {FORWARD, 4096, 4096, 64, 127, 0, 128, 64, false},    {FORWARD, 4096, 4096, 64, 64, 64, 128, 64, false},     {FORWARD, 4096, 4096, 64, 511, 0, 128, 64, false},
        {FORWARD, 4096, 4096, 64, 1023, 0, 192, 128, false},  {FORWARD, 4096, 4096, 64, 4095, 0, 192, 128, false},   {FORWARD, 4096, 4096, 64, 127, -1, 192, 128, false},
        {FORWARD, 4096, 4096, 64, -1, -1, 192, 128, true},    {FORWARD, 1000, 4000, 64, 200, 10, 128, 64, false},    {FORWARD, 4000, 1000, 64, 200, 10, 128, 64, false},
        {FORWARD, 4096, 4096, 128, 64, 64, 128, 64, false},   {FORWARD, 4096, 4096, 128, 127, 0, 128, 128, false},   {FORWARD, 4096, 4096, 128, 256, 256, 128, 128, false},
        {BACKWARD, 4096, 4096, 256, 255, 0, 64, 64, false},   {BACKWARD, 4096, 4096, 256, 128, 128, 64, 64, false},  {BACKWARD, 4096, 4096, 256, 127, 0, 64, 64, false},
        {BACKWARD, 4096, 4096, 256, 511, 0, 64, 80, false},   {BACKWARD, 4096, 4096, 256, 1023, 0, 64, 80, false},   {BACKWARD, 4096, 4096, 128, 127, 0, 64, 128, false},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        fa_call            call;
        fa_plan            plan;
        flash_attn_tensor  like = {.dtype = FLASH_ATTN_BF16};
        flash_attn_grads   g    = {.dout = like, .dq = like, .dk = like, .dv = like};
        flash_attn_problem p    = {.device = {.type = FLASH_ATTN_CUDA}, .o = like, .mask = calls[n].slices ? FLASH_ATTN_NONE : FLASH_ATTN_WINDOW, .window_left = calls[n].left, .window_right = calls[n].right};
        flash_attn_slice   all  = {0, (int32_t)calls[n].queries, 0, (int32_t)calls[n].keys, FLASH_ATTN_SLICE_FULL};
        p.q       = of(FLASH_ATTN_BF16, 2, calls[n].queries, 4, calls[n].columns);
        p.k = p.v = of(FLASH_ATTN_BF16, 2, calls[n].keys, 4, calls[n].columns);
        if (calls[n].slices)
            p.slices = (flash_attn_slices){.list = &all, .count = 1};
        if (fa_normalise(&p, calls[n].pass == BACKWARD ? &g : NULL, calls[n].pass, FA_PLAN, &call) != FLASH_ATTN_OK || fa_plan_make(&call, 90, NULL, NULL, &plan) != FLASH_ATTN_OK)
            fail_msg("call %zu: %s", n, flash_attn_last_error());
        if (plan.row->tile_q != calls[n].tile_q || plan.row->tile_k != calls[n].tile_k)
            fail_msg("call %zu: tiles of %d x %d", n, plan.row->tile_q, plan.row->tile_k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(narrow_windows_take_smaller_tiles),
        cmocka_unit_test(short_calls_take_the_kernel_of_their_lengths),
        cmocka_unit_test(hoppers_own_kernels_take_the_calls_that_they_have_options_for),
        cmocka_unit_test(a_bias_of_all_heads_leaves_few_queries_in_one_tile),
        cmocka_unit_test(few_queries_of_many_wide_heads_take_few_blocks),
        cmocka_unit_test(latent_calls_take_their_own_kernel_on_hopper),
        cmocka_unit_test(a_plan_without_data_knows_a_latent_cache),
        cmocka_unit_test(latent_parts_follow_the_batch_if_asked),
        cmocka_unit_test(parts_of_few_queries_are_folded_where_it_was_measured_fastest),
        cmocka_unit_test(heads_too_wide_are_refused_with_the_width_that_is_not),
    };
    return cmocka_run_group_tests_name("cuda_plan", tests, NULL, NULL);
}
