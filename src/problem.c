/* From the caller's problem to fa_call: sizes, tensors, what may not share memory. */
#include "check.h"

#include <inttypes.h>

#define MAX_HEAD_DIM 576

flash_attn_status fa_check_device(flash_attn_device device)
{
    switch (device.type) {
    case FLASH_ATTN_CPU:
    case FLASH_ATTN_REFERENCE:
        if (device.index != 0)
            return fa_fail(FLASH_ATTN_INVALID, "device.index is %d, expected 0: only CUDA devices are counted",
                           device.index);
        return FLASH_ATTN_OK;
    case FLASH_ATTN_CUDA:
        if (device.index < 0)
            return fa_fail(FLASH_ATTN_INVALID, "device.index is %d, expected 0 or more", device.index);
        return FLASH_ATTN_OK;
    }
    return fa_fail(FLASH_ATTN_INVALID, "device.type is %d, expected CPU (0), CUDA (1) or REFERENCE (2)",
                   (int)device.type);
}

flash_attn_status fa_check_extent(const char *field, int64_t value, int64_t low, int64_t high)
{
    if (value >= low && value <= high)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_INVALID, "%s is %" PRId64 ", expected %" PRId64 " to %" PRId64, field, value, low, high);
}

/* q's own shape, the number of sequences, the longest of them. */
static flash_attn_status normalise_queries(const flash_attn_problem *p, fa_call *call)
{
    const int64_t *shape = p->q.shape;
    bool           cu    = p->cu_seqlens_q != NULL;
    FA_TRY(fa_check_extent("q.shape[0] (batch)", shape[0], cu ? 1 : 0, cu ? 1 : INT32_MAX));
    FA_TRY(fa_check_extent(cu ? "q.shape[1] (total_q)" : "q.shape[1] (seqlen_q)", shape[1], 0,
                           cu ? INT32_MAX : FA_MAX_SEQLEN));
    FA_TRY(fa_check_extent("q.shape[2] (heads_q)", shape[2], 1, INT32_MAX));
    FA_TRY(fa_check_extent("q.shape[3] (head_dim)", shape[3], 1, MAX_HEAD_DIM));
    if (p->batch < 0)
        return fa_fail(FLASH_ATTN_INVALID, "batch is %d, expected 0 or more", p->batch);
    if (cu && p->batch == 0 && shape[1] > 0)
        return fa_fail(FLASH_ATTN_INVALID, "batch is 0 with cu_seqlens_q, expected the number of sequences");
    if (!cu && p->batch != 0 && p->batch != shape[0])
        return fa_fail(FLASH_ATTN_INVALID, "batch is %d, expected 0 or q.shape[0], %" PRId64, p->batch, shape[0]);
    call->batch    = cu ? p->batch : shape[0];
    call->heads_q  = shape[2];
    call->head_dim = shape[3];
    if (call->batch * call->heads_q > INT32_MAX)
        return fa_fail(FLASH_ATTN_INVALID, "batch %" PRId64 " times heads_q %" PRId64 " is over 2^31 - 1", call->batch,
                       call->heads_q);

    if (p->max_seqlen_q < 0 || p->max_seqlen_q > FA_MAX_SEQLEN)
        return fa_fail(FLASH_ATTN_INVALID, "max_seqlen_q is %d, expected 0 to %d", p->max_seqlen_q, FA_MAX_SEQLEN);
    call->max_seqlen_q = shape[1];
    if (!cu && p->max_seqlen_q != 0 && p->max_seqlen_q < shape[1])
        return fa_fail(FLASH_ATTN_INVALID, "max_seqlen_q is %d, expected 0 or at least q.shape[1], %" PRId64,
                       p->max_seqlen_q, shape[1]);
    if (cu && p->max_seqlen_q == 0 && shape[1] > 0 && p->device.type == FLASH_ATTN_CUDA)
        return fa_fail(FLASH_ATTN_INVALID, "max_seqlen_q is 0, expected the longest sequence: CUDA needs it with "
                                           "cu_seqlens_q");
    if (cu && p->max_seqlen_q != 0 && p->max_seqlen_q < shape[1])
        call->max_seqlen_q = p->max_seqlen_q;
    if (call->max_seqlen_q > FA_MAX_SEQLEN)
        call->max_seqlen_q = FA_MAX_SEQLEN;
    return FLASH_ATTN_OK;
}

/* Which of the ways to say where keys lie go together. */
static flash_attn_status check_key_layout(const flash_attn_problem *p, flash_attn_pass pass)
{
    bool paged = p->pages.table != NULL;
    if (paged && p->cu_seqlens_k)
        return fa_fail(FLASH_ATTN_INVALID, "cu_seqlens_k is given with pages.table, expected one of them");
    if (p->cache_batch_idx && (paged || p->cu_seqlens_k))
        return fa_fail(FLASH_ATTN_INVALID, "cache_batch_idx is given with %s, expected one of them",
                       paged ? "pages.table" : "cu_seqlens_k");
    if (pass == FLASH_ATTN_BACKWARD && (paged || p->cache_batch_idx))
        return fa_fail(FLASH_ATTN_UNSUPPORTED,
                       "%s is given, expected none in a backward: a shared cache has no "
                       "gradient of its own",
                       paged ? "pages.table" : "cache_batch_idx");
    return FLASH_ATTN_OK;
}

/* k's and v's shapes, pages, the longest sequence of keys. After normalise_queries. */
static flash_attn_status normalise_keys(const flash_attn_problem *p, fa_call *call)
{
    FA_TRY(check_key_layout(p, call->pass));
    bool           cu = p->cu_seqlens_k != NULL, paged = p->pages.table != NULL;
    const int64_t *shape = p->k.shape;
    FA_TRY(fa_check_extent("k.shape[2] (heads_k)", shape[2], 1, INT32_MAX));
    if (paged) {
        FA_TRY(fa_check_extent("k.shape[0] (num_pages)", shape[0], 0, INT32_MAX));
        FA_TRY(fa_check_extent("k.shape[1] (page_size)", shape[1], 1, FA_MAX_SEQLEN));
    } else {
        if (p->cache_batch_idx)
            FA_TRY(fa_check_extent("k.shape[0] (entries of the cache)", shape[0], 0, INT32_MAX));
        FA_TRY(fa_check_extent(cu ? "k.shape[1] (total_k)" : "k.shape[1] (seqlen_k)", shape[1], 0,
                               cu ? INT32_MAX : FA_MAX_SEQLEN));
    }
    int64_t entries = paged || p->cache_batch_idx ? FA_ANY : cu ? 1 : call->batch;
    int64_t of_k[4] = {entries, FA_ANY, FA_ANY, call->head_dim};
    int64_t of_v[4] = {shape[0], shape[1], shape[2], FA_ANY};
    FA_TRY(fa_view_shape("k", &p->k, of_k));
    FA_TRY(fa_view_shape("v", &p->v, of_v));
    FA_TRY(fa_check_extent("v.shape[3] (head_dim_v)", p->v.shape[3], 1, MAX_HEAD_DIM));
    if (call->heads_q % shape[2] != 0)
        return fa_fail(FLASH_ATTN_INVALID,
                       "q.shape[2] (heads_q) is %" PRId64 ", expected a multiple of heads_k %" PRId64, call->heads_q,
                       shape[2]);
    call->heads_k    = shape[2];
    call->group      = call->heads_q / call->heads_k;
    if (call->group * call->max_seqlen_q > INT32_MAX)
        return fa_fail(FLASH_ATTN_INVALID,
                       "heads_q / heads_k, %" PRId64 ", times the queries of a sequence, %" PRId64 ", is over 2^31 - 1",
                       call->group, call->max_seqlen_q);
    call->head_dim_v = p->v.shape[3];

    call->max_seqlen_k = shape[1];
    if (paged || p->pages.pages_per_seq != 0 || p->pages.row_stride != 0 || p->pages.reserved != 0) {
        FA_TRY(fa_normalise_pages(&p->pages, call->batch, shape[1], &call->pages));
        call->page_size    = shape[1];
        call->max_seqlen_k = call->pages.pages_per_seq * shape[1];
    }
    if (p->max_seqlen_k < 0 || p->max_seqlen_k > FA_MAX_SEQLEN)
        return fa_fail(FLASH_ATTN_INVALID, "max_seqlen_k is %d, expected 0 to %d", p->max_seqlen_k, FA_MAX_SEQLEN);
    if (cu && p->max_seqlen_k == 0 && shape[1] > 0 && p->device.type == FLASH_ATTN_CUDA)
        return fa_fail(FLASH_ATTN_INVALID, "max_seqlen_k is 0, expected the longest sequence: CUDA needs it with "
                                           "cu_seqlens_k");
    bool bounded = cu || (p->seqused_k && call->pass == FLASH_ATTN_FORWARD);
    if (!cu && !p->seqused_k && p->max_seqlen_k != 0 && p->max_seqlen_k < call->max_seqlen_k)
        return fa_fail(FLASH_ATTN_INVALID,
                       "max_seqlen_k is %d, expected 0 or at least %" PRId64 ", the rows that a "
                       "sequence has",
                       p->max_seqlen_k, call->max_seqlen_k);
    if (bounded && p->max_seqlen_k != 0 && p->max_seqlen_k < call->max_seqlen_k)
        call->max_seqlen_k = p->max_seqlen_k;
    if (call->max_seqlen_k > FA_MAX_SEQLEN)
        call->max_seqlen_k = FA_MAX_SEQLEN;
    return FLASH_ATTN_OK;
}

/* Without data V is a part of K if it has K's strides and fewer columns, else it has a place of its own. */
static flash_attn_status normalise_inputs(const flash_attn_problem *p, bool plan, fa_call *call)
{
    static _Alignas(256) char elsewhere[1];
    FA_TRY(fa_view_dtype("q", &p->q, FA_BITS_ALL));
    FA_TRY(fa_view_dtype("k", &p->k, FA_BIT(p->q.dtype)));
    FA_TRY(fa_view_dtype("v", &p->v, FA_BIT(p->q.dtype)));
    if (p->q.dtype == FLASH_ATTN_F8E4M3 && call->pass == FLASH_ATTN_BACKWARD)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "q.dtype is F8E4M3 in a backward, expected F32, F16 or BF16");
    call->q = p->q;
    call->k = p->k;
    call->v = p->v;
    FA_TRY(fa_view_layout("q", &call->q, plan));
    FA_TRY(fa_view_layout("k", &call->k, plan));
    FA_TRY(fa_view_layout("v", &call->v, plan));
    if (plan && !p->k.data && !p->v.data && (call->k.shape[3] == call->v.shape[3] || !fa_values_in_keys(call)))
        call->v.data = elsewhere;
    return FLASH_ATTN_OK;
}

/* o and lse: written by the forward, read by the backward. */
static flash_attn_status normalise_results(const flash_attn_problem *p, bool plan, fa_call *call)
{
    bool           backward = call->pass == FLASH_ATTN_BACKWARD;
    const int64_t *q        = call->q.shape;
    int64_t        of_o[4] = {q[0], q[1], q[2], call->head_dim_v}, of_lse[4] = {q[0], q[2], q[1], 1};
    call->o   = p->o;
    call->lse = p->lse;
    FA_TRY(fa_view_dtype(
        "o", &p->o, p->q.dtype == FLASH_ATTN_F8E4M3 ? FA_BITS_16_32 : FA_BIT(FLASH_ATTN_F32) | FA_BIT(p->q.dtype)));
    FA_TRY(fa_view_implied_shape("o", &call->o, of_o));
    FA_TRY(backward ? fa_view_layout("o", &call->o, plan) : fa_view_output_layout("o", &call->o, plan));
    if (backward || fa_view_given(&p->lse, plan)) {
        FA_TRY(fa_view_dtype("lse", &p->lse, FA_BIT(FLASH_ATTN_F32)));
        FA_TRY(fa_view_implied_shape("lse", &call->lse, of_lse));
        return backward ? fa_view_layout("lse", &call->lse, plan) : fa_view_output_layout("lse", &call->lse, plan);
    }
    memset(&call->lse, 0, sizeof call->lse);
    return fa_check_reserved_int("lse", p->lse.reserved);
}

/* One gradient with the shape of `of`. Data NULL: not wanted, unless only planning, when all are. */
static flash_attn_status normalise_gradient(const char *name, const flash_attn_tensor *given, const int64_t of[4],
                                            unsigned allowed, bool plan, flash_attn_tensor *out)
{
    memset(out, 0, sizeof *out);
    if (!given->data && !plan)
        return fa_check_reserved_int(name, given->reserved);
    *out = *given;
    FA_TRY(fa_view_dtype(name, out, allowed));
    FA_TRY(fa_view_implied_shape(name, out, of));
    return fa_view_output_layout(name, out, plan);
}

static flash_attn_status normalise_gradients(const flash_attn_problem *p, const flash_attn_grads *grads, bool plan,
                                             fa_call *call)
{
    flash_attn_tensor planned = {.dtype = p->q.dtype};
    flash_attn_grads  all     = {planned, planned, planned, planned, {.dtype = p->bias.dtype}, {0}, {0}};
    if (!grads)
        grads = &all;
    FA_TRY(FA_CHECK_RESERVED("grads.reserved", grads->reserved));
    unsigned f32 = FA_BIT(FLASH_ATTN_F32), allowed = f32 | FA_BIT(p->q.dtype);
    call->dout = grads->dout;
    FA_TRY(fa_view_dtype("grads.dout", &grads->dout, allowed));
    FA_TRY(fa_view_implied_shape("grads.dout", &call->dout, call->o.shape));
    FA_TRY(fa_view_layout("grads.dout", &call->dout, plan));
    FA_TRY(normalise_gradient("grads.dq", &grads->dq, call->q.shape, allowed, plan, &call->dq));
    FA_TRY(normalise_gradient("grads.dk", &grads->dk, call->k.shape, allowed, plan, &call->dk));
    FA_TRY(normalise_gradient("grads.dv", &grads->dv, call->v.shape, allowed, plan, &call->dv));

    if (!fa_view_given(&p->bias, true) && grads->dbias.data)
        return fa_fail(FLASH_ATTN_INVALID, "grads.dbias is given, expected none without bias");
    if (!call->sinks.data && grads->dsinks.data)
        return fa_fail(FLASH_ATTN_INVALID, "grads.dsinks is given, expected none without sinks");
    if (call->bias.data) {
        FA_TRY(normalise_gradient("grads.dbias", &grads->dbias, p->bias.shape, f32 | FA_BIT(p->bias.dtype), plan,
                                  &call->dbias));
        if (call->dbias.data)
            fa_view_expand(&call->dbias, call->bias.shape);
    }
    if (call->sinks.data) {
        FA_TRY(normalise_gradient("grads.dsinks", &grads->dsinks, p->sinks.shape, f32, plan, &call->dsinks));
        if (call->dsinks.data)
            fa_view_expand(&call->dsinks, call->sinks.shape);
    }
    return FLASH_ATTN_OK;
}

static flash_attn_status check_array_alignment(const flash_attn_problem *p)
{
    const fa_array arrays[] = {{"cu_seqlens_q", p->cu_seqlens_q},
                               {"cu_seqlens_k", p->cu_seqlens_k},
                               {"seqused_q", p->seqused_q},
                               {"seqused_k", p->seqused_k},
                               {"leftpad_k", p->leftpad_k},
                               {"cache_batch_idx", p->cache_batch_idx},
                               {"pages.table", p->pages.table},
                               {"slices.offsets", p->slices.offsets},
                               {"slices.list", p->slices.list}};
    return fa_check_alignment(arrays, sizeof arrays / sizeof *arrays);
}

flash_attn_status fa_check_memory(const fa_call *call, const void *workspace, size_t workspace_bytes)
{
    enum { SLICE_INTS = sizeof(flash_attn_slice) / sizeof(int32_t) };
    bool      forward   = call->pass == FLASH_ATTN_FORWARD;
    int64_t   batch     = call->batch;
    fa_region regions[] = {
        {"q", call->q, false},
        {"k", call->k, false},
        {"v", call->v, false},
        {"o", call->o, forward},
        {"lse", call->lse, forward},
        {"bias", call->bias, false},
        {"alibi_slopes", call->alibi_slopes, false},
        {"sinks", call->sinks, false},
        {"descale.q", call->descale_q, false},
        {"descale.k", call->descale_k, false},
        {"descale.v", call->descale_v, false},
        {"grads.dout", call->dout, false},
        {"grads.dq", call->dq, true},
        {"grads.dk", call->dk, true},
        {"grads.dv", call->dv, true},
        {"grads.dbias", call->dbias, true},
        {"grads.dsinks", call->dsinks, true},
        {"cu_seqlens_q", fa_array_view(call->cu_seqlens_q, batch + 1, FLASH_ATTN_F32), false},
        {"cu_seqlens_k", fa_array_view(call->cu_seqlens_k, batch + 1, FLASH_ATTN_F32), false},
        {"seqused_q", fa_array_view(call->seqused_q, batch, FLASH_ATTN_F32), false},
        {"seqused_k", fa_array_view(call->seqused_k, batch, FLASH_ATTN_F32), false},
        {"leftpad_k", fa_array_view(call->leftpad_k, batch, FLASH_ATTN_F32), false},
        {"cache_batch_idx", fa_array_view(call->cache_batch_idx, batch, FLASH_ATTN_F32), false},
        {"pages.table", fa_table_view(&call->pages, batch), false},
        {"slices.list", fa_array_view(call->slices.list, (int64_t)call->slices.count * SLICE_INTS, FLASH_ATTN_F32), false},
        {"slices.offsets", fa_array_view(call->slices.offsets, batch + 1, FLASH_ATTN_F32), false},
        {"exec.workspace", fa_array_view(workspace, (int64_t)workspace_bytes, FLASH_ATTN_F8E4M3), true},
    };
    _Static_assert(sizeof regions / sizeof *regions <= FA_MAX_REGIONS, "fa_check_overlap takes no more");
    return fa_check_overlap(regions, (int)(sizeof regions / sizeof *regions));
}

flash_attn_status fa_normalise(const flash_attn_problem *problem, const flash_attn_grads *grads, flash_attn_pass pass,
                               fa_depth depth, fa_call *call)
{
    bool plan = depth != FA_RUN;
    if (!problem)
        return fa_fail(FLASH_ATTN_INVALID, "problem is NULL, expected a problem");
    if (pass != FLASH_ATTN_FORWARD && pass != FLASH_ATTN_BACKWARD)
        return fa_fail(FLASH_ATTN_INVALID, "pass is %d, expected FORWARD (0) or BACKWARD (1)", (int)pass);
    if (pass == FLASH_ATTN_BACKWARD && !plan && !grads)
        return fa_fail(FLASH_ATTN_INVALID, "grads is NULL, expected gradients");
    FA_TRY(FA_CHECK_RESERVED("problem.reserved", problem->reserved));
    FA_TRY(fa_check_device(problem->device));
    *call = (fa_call){.pass            = pass,
                      .slices          = problem->slices,
                      .cu_seqlens_q    = problem->cu_seqlens_q,
                      .cu_seqlens_k    = problem->cu_seqlens_k,
                      .seqused_q       = problem->seqused_q,
                      .seqused_k       = problem->seqused_k,
                      .leftpad_k       = problem->leftpad_k,
                      .cache_batch_idx = problem->cache_batch_idx,
                      .deterministic   = problem->deterministic};
    FA_TRY(check_array_alignment(problem));
    FA_TRY(normalise_queries(problem, call));
    FA_TRY(normalise_keys(problem, call));
    FA_TRY(normalise_inputs(problem, plan, call));
    FA_TRY(fa_normalise_options(problem, call));
    FA_TRY(normalise_results(problem, plan, call));
    FA_TRY(fa_normalise_extras(problem, plan, call));
    if (pass == FLASH_ATTN_BACKWARD)
        FA_TRY(normalise_gradients(problem, grads, plan, call));
    int64_t rows_k = call->pages.table ? call->pages.pages_per_seq * call->page_size : call->k.shape[1];
    FA_TRY(fa_check_slices(&problem->slices, call->batch, call->q.shape[1], rows_k));
    return depth != FA_PLAN && fa_on_host(problem->device) ? fa_check_lengths(problem, call) : FLASH_ATTN_OK;
}
