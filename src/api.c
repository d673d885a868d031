/* The public calls: check, normalise, choose the device. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- which backend: the one place that knows them ---- */

/* A value of device.type that fa_check_device has refused already; the compiler wants an answer all the same. */
static flash_attn_status unknown_device(flash_attn_device device)
{
    return fa_fail(FLASH_ATTN_INVALID, "device.type is %d, expected CPU (0), CUDA (1) or REFERENCE (2)", (int)device.type);
}

static flash_attn_status run_on(flash_attn_context *context, flash_attn_device device, const fa_call *call,
                                const fa_exec *exec)
{
    bool forward = call->pass == FLASH_ATTN_FORWARD;
    switch (device.type) {
    case FLASH_ATTN_CPU: return fa_cpu_run(context->cpu, call, exec);
    case FLASH_ATTN_REFERENCE: return forward ? fa_reference_forward(call) : fa_reference_backward(call);
    case FLASH_ATTN_CUDA: return fa_cuda_run(context, device.index, call, exec);
    }
    return unknown_device(device);
}

static flash_attn_status workspace_on(flash_attn_context *context, flash_attn_device device, const fa_call *call,
                                      size_t *bytes)
{
    switch (device.type) {
    case FLASH_ATTN_CPU: *bytes = fa_cpu_workspace(context->cpu, call); return FLASH_ATTN_OK;
    case FLASH_ATTN_REFERENCE: *bytes = 0; return FLASH_ATTN_OK;
    case FLASH_ATTN_CUDA: return fa_cuda_workspace(context, device.index, call, bytes);
    }
    return unknown_device(device);
}

/* ---- how to run ---- */

flash_attn_status fa_check_exec(const flash_attn_context *context, flash_attn_device device, const flash_attn_exec *given,
                                fa_exec *out)
{
    flash_attn_exec exec = given ? *given : (flash_attn_exec){0};
    FA_TRY(FA_CHECK_RESERVED("exec.reserved", exec.reserved));
    FA_TRY(fa_check_reserved_int("exec", exec.reserved0));
    if (exec.num_threads < 0)
        return fa_fail(FLASH_ATTN_INVALID, "exec.num_threads is %d, expected 0 or more", exec.num_threads);
    if (exec.stream && device.type != FLASH_ATTN_CUDA)
        return fa_fail(FLASH_ATTN_INVALID,
                       "exec.stream is given with device.type %d, expected NULL: only CUDA has streams",
                       (int)device.type);
    if (exec.allocator && !exec.allocate)
        return fa_fail(FLASH_ATTN_INVALID, "exec.allocator is given with exec.allocate NULL, expected a function, or no allocator");
    if (!exec.workspace && exec.workspace_bytes != 0)
        return fa_fail(FLASH_ATTN_INVALID,
                       "exec.workspace is NULL with workspace_bytes %zu, expected memory, or 0 bytes",
                       exec.workspace_bytes);
    if (exec.workspace_bytes > (size_t)INT64_MAX / 4 || (uintptr_t)exec.workspace > UINTPTR_MAX - exec.workspace_bytes)
        return fa_fail(FLASH_ATTN_INVALID, "exec.workspace_bytes is %zu: from %p it leaves the address space",
                       exec.workspace_bytes, exec.workspace);
    int threads = fa_cpu_num_threads(context->cpu);
    *out        = (fa_exec){.stream          = exec.stream,
                            .workspace       = exec.workspace,
                            .workspace_bytes = exec.workspace_bytes,
                            .allocate        = exec.allocate,
                            .allocator       = exec.allocator,
                            .num_threads     = exec.num_threads && exec.num_threads < threads ? exec.num_threads : threads};
    return FLASH_ATTN_OK;
}

flash_attn_status fa_check_workspace(const fa_exec *exec, size_t needed_bytes)
{
    if (!exec->workspace || exec->workspace_bytes >= needed_bytes)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_NO_MEMORY, "exec.workspace_bytes is %zu, expected at least %zu", exec->workspace_bytes,
                   needed_bytes);
}

flash_attn_status fa_take_workspace(const fa_exec *exec, size_t needed_bytes, void **memory)
{
    *memory = exec->workspace;
    if (exec->workspace)
        return fa_check_workspace(exec, needed_bytes);
    if (!exec->allocate || needed_bytes == 0)
        return FLASH_ATTN_OK;
    *memory = exec->allocate(exec->allocator, needed_bytes);
    return *memory ? FLASH_ATTN_OK : fa_fail(FLASH_ATTN_NO_MEMORY, "exec.allocate gave no memory for %zu bytes", needed_bytes);
}

flash_attn_status fa_run(flash_attn_context *context, const flash_attn_problem *problem, const flash_attn_grads *grads,
                         flash_attn_pass pass, const flash_attn_exec *exec, bool shares_gpu)
{
    fa_call call;
    fa_exec how;
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_normalise(problem, grads, pass, FA_RUN, &call));
    call.shares_gpu = shares_gpu;
    FA_TRY(fa_check_exec(context, problem->device, exec, &how));
    if (problem->device.type == FLASH_ATTN_CPU)
        FA_TRY(fa_check_workspace(&how, fa_cpu_workspace(context->cpu, &call)));
    FA_TRY(fa_check_memory(&call, how.workspace, how.workspace_bytes));
    return run_on(context, problem->device, &call, &how);
}

flash_attn_status flash_attn_forward(flash_attn_context *context, const flash_attn_problem *problem,
                                     const flash_attn_exec *exec)
{
    return fa_run(context, problem, NULL, FLASH_ATTN_FORWARD, exec, false);
}

flash_attn_status flash_attn_backward(flash_attn_context *context, const flash_attn_problem *problem,
                                      const flash_attn_grads *grads, const flash_attn_exec *exec)
{
    return fa_run(context, problem, grads, FLASH_ATTN_BACKWARD, exec, false);
}

/* ---- what a call would do ---- */

flash_attn_status fa_workspace_size(flash_attn_context *context, const flash_attn_problem *problem,
                                    flash_attn_pass pass, bool shares_gpu, size_t *bytes)
{
    fa_call call;
    if (!bytes)
        return fa_fail(FLASH_ATTN_INVALID, "bytes is NULL, expected a place for the size");
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_normalise(problem, NULL, pass, FA_PLAN, &call));
    call.shares_gpu = shares_gpu;
    return workspace_on(context, problem->device, &call, bytes);
}

flash_attn_status flash_attn_workspace_size(flash_attn_context *context, const flash_attn_problem *problem,
                                            flash_attn_pass pass, size_t *bytes)
{
    return fa_workspace_size(context, problem, pass, false, bytes);
}

flash_attn_status flash_attn_prepare(flash_attn_context *context, const flash_attn_problem *problem,
                                     flash_attn_pass pass)
{
    fa_call call;
    FA_TRY(fa_context_of(&context)); /* threads and tables of the CPU are made with the context */
    FA_TRY(fa_normalise(problem, NULL, pass, FA_PLAN, &call));
    return problem->device.type == FLASH_ATTN_CUDA ? fa_cuda_prepare(context, problem->device.index, &call)
                                                   : FLASH_ATTN_OK;
}

flash_attn_status flash_attn_compile(flash_attn_context *context, const flash_attn_problem *problem,
                                     flash_attn_pass pass, int32_t arch, const char *folder)
{
    fa_call call;
    if (!problem)
        return fa_fail(FLASH_ATTN_INVALID, "problem is NULL, expected a problem");
    if (!folder || !*folder)
        return fa_fail(FLASH_ATTN_INVALID, "folder is %s, expected a path", folder ? "empty" : "NULL");
    flash_attn_problem on_gpu = *problem;
    on_gpu.device             = (flash_attn_device){.type = FLASH_ATTN_CUDA};
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_normalise(&on_gpu, NULL, pass, FA_PLAN, &call));
    return fa_cuda_compile(context, &call, arch, folder);
}

/* Lengths in device memory are not read: every sequence counts as the longest. */
static void assume_longest(fa_call *call)
{
    flash_attn_tensor *of_q[] = {&call->q, &call->o, &call->dout, &call->dq}, *of_k[] = {&call->k, &call->v, &call->dk, &call->dv};
    for (int i = 0; i < 4; i++) {
        of_q[i]->shape[0] = of_k[i]->shape[0] = call->batch;
        of_q[i]->shape[1] = call->max_seqlen_q;
        of_k[i]->shape[1] = call->max_seqlen_k;
    }
    call->cu_seqlens_q = call->cu_seqlens_k = call->seqused_q = call->seqused_k = NULL;
    call->leftpad_k = call->cache_batch_idx = call->pages.table = NULL;
}

/* A plan has addresses of its own where the caller gave none. A backward's gradients it never has. */
static flash_attn_status check_given_memory(const flash_attn_problem *problem, fa_call call)
{
    const void        *given[] = {problem->q.data, problem->k.data, problem->v.data, problem->o.data, problem->lse.data, problem->bias.data, problem->alibi_slopes.data,
                                  problem->sinks.data, problem->descale.q.data, problem->descale.k.data, problem->descale.v.data};
    flash_attn_tensor *views[] = {&call.q, &call.k, &call.v, &call.o, &call.lse, &call.bias, &call.alibi_slopes, &call.sinks, &call.descale_q, &call.descale_k, &call.descale_v};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        if (!given[i])
            views[i]->data = NULL;
    return call.pass == FLASH_ATTN_FORWARD ? fa_check_memory(&call, NULL, 0) : FLASH_ATTN_OK;
}

flash_attn_status flash_attn_explain(flash_attn_context *context, const flash_attn_problem *problem,
                                     flash_attn_pass pass, flash_attn_explanation *explanation)
{
    fa_call call;
    size_t  workspace_bytes = 0;
    if (!explanation)
        return fa_fail(FLASH_ATTN_INVALID, "explanation is NULL, expected a place for it");
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_normalise(problem, NULL, pass, FA_PLAN_LENGTHS, &call));
    FA_TRY(check_given_memory(problem, call));
    FA_TRY(workspace_on(context, problem->device, &call, &workspace_bytes));
    flash_attn_explanation result = {.num_splits = 1, .num_threads = 1, .num_tasks = 1, .tile_q = 1, .tile_k = 1};
    if (problem->device.type == FLASH_ATTN_CUDA) {
        FA_TRY(fa_cuda_explain(context, problem->device.index, &call, &result));
        assume_longest(&call);
    }
    FA_TRY(fa_count_work(&call, &result.flops, &result.bytes));
    if (problem->device.type == FLASH_ATTN_CPU) {
        fa_exec how = {.num_threads = fa_cpu_num_threads(context->cpu)};
        FA_TRY(fa_cpu_explain(context->cpu, &call, &how, &result));
    } else if (problem->device.type == FLASH_ATTN_REFERENCE) {
        snprintf(result.kernel, sizeof result.kernel, "%s_reference",
                 pass == FLASH_ATTN_FORWARD ? "forward" : "backward");
        snprintf(result.reason, sizeof result.reason, "the formula in double precision, one row of scores at a time");
    }
    result.workspace_bytes = (int64_t)workspace_bytes;
    *explanation           = result;
    return FLASH_ATTN_OK;
}

flash_attn_status flash_attn_get_device_info(flash_attn_context *context, flash_attn_device device,
                                             flash_attn_device_info *info)
{
    if (!info)
        return fa_fail(FLASH_ATTN_INVALID, "info is NULL, expected a place for it");
    FA_TRY(fa_check_device(device));
    FA_TRY(fa_context_of(&context));
    flash_attn_device_info result = {0};
    if (device.type == FLASH_ATTN_CUDA)
        FA_TRY(fa_cuda_info(context, device.index, &result));
    else
        fa_cpu_info(context->cpu, &result);
    if (device.type == FLASH_ATTN_REFERENCE) {
        snprintf(result.isa, sizeof result.isa, "double");
        result.num_threads = 1;
    }
    *info = result;
    return FLASH_ATTN_OK;
}

flash_attn_status flash_attn_tune(flash_attn_context *context, const char *file, double seconds,
                                  flash_attn_tune_report report, void *user)
{
    if (!(seconds >= 1 && seconds <= 3600))
        return fa_fail(FLASH_ATTN_INVALID, "seconds is %g, expected 1 to 3600", seconds);
    FA_TRY(fa_context_of(&context));
    return fa_cpu_tune(context, file ? file : context->options.tune_file, seconds, report, user);
}

/* ---- the KV cache and merging ---- */

flash_attn_status flash_attn_append_kv(flash_attn_context *context, const flash_attn_append *append,
                                       const flash_attn_exec *exec)
{
    flash_attn_append checked;
    fa_exec           how;
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_normalise_append(append, &checked));
    FA_TRY(fa_check_exec(context, checked.device, exec, &how));
    if (checked.device.type == FLASH_ATTN_CUDA)
        return fa_cuda_append(context, &checked, &how);
    fa_host_append(&checked);
    return FLASH_ATTN_OK;
}

flash_attn_status flash_attn_merge(flash_attn_context *context, flash_attn_device device,
                                   const flash_attn_partial *parts, int32_t num_parts, const flash_attn_partial *result,
                                   const flash_attn_exec *exec)
{
    fa_exec how;
    FA_TRY(fa_context_of(&context));
    FA_TRY(fa_check_device(device));
    FA_TRY(fa_check_exec(context, device, exec, &how));
    flash_attn_partial *checked;
    FA_TRY(fa_normalise_merge(parts, num_parts, result, &checked));
    flash_attn_status status = FLASH_ATTN_OK;
    if (device.type == FLASH_ATTN_CUDA)
        status = fa_cuda_merge(context, device.index, checked, num_parts, &checked[num_parts], &how);
    else
        fa_host_merge(checked, num_parts, &checked[num_parts]);
    free(checked);
    return status;
}
