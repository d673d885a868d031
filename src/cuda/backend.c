/* What api.c calls for a CUDA problem. */
#include "cuda/cuda.h"
#include "cuda/ladder.h"
#include "cuda/plan.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- the two passes ---- */

static flash_attn_status upload_documents(const fa_place *place, const fa_call *call, const fa_plan *plan, const fa_kernel *upload)
{
    int32_t *cu_seqlens;
    FA_TRY(fa_documents_make(call, &cu_seqlens));
    flash_attn_status status = fa_upload(place, upload, (void *)plan->args.cu_seqlens_q, cu_seqlens, plan->documents_bytes);
    free(cu_seqlens);
    return status;
}

static flash_attn_status upload_lists(const fa_place *place, const fa_call *call, const fa_plan *plan,
                                      const fa_kernel *upload)
{
    if (plan->documents_bytes > 0)
        return upload_documents(place, call, plan, upload);
    FA_TRY(fa_upload(place, upload, (void *)plan->args.slices, call->slices.list, plan->slices_bytes));
    return fa_upload(place, upload, (void *)plan->args.slice_offsets, call->slices.offsets, plan->offsets_bytes);
}

static int64_t blocks_of(const fa_place *place, const fa_launch *launch)
{
    int64_t at_once = (int64_t)place->device->chip.multiprocessors * launch->key.min_blocks / launch->cluster * launch->cluster;
    return at_once > 0 && launch->stays && launch->blocks > at_once ? at_once : launch->blocks;
}

static flash_attn_status launch_all(const fa_place *place, const fa_call *call, fa_plan *plan)
{
    /* All kernels first: if one cannot be built, nothing has been written. */
    fa_kernel *kernels[FA_MAX_LAUNCHES];
    fa_maps    maps;
    if (plan->has_maps)
        FA_TRY(fa_maps_make(place->driver, call, plan->row, &maps));
    for (int i = 0; i < plan->num_launches; i++)
        FA_TRY(fa_kernel_get(place, &plan->launch[i].key, &kernels[i]));
    if (plan->zero_bytes > 0)
        FA_TRY(fa_driver_check(place->driver,
                               place->driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)plan->zero, 0, plan->zero_bytes,
                                                              place->stream),
                               "clearing the workspace (cuMemsetD8Async)"));
    for (int i = 0; i < plan->num_launches; i++)
        if (plan->launch[i].key.kernel == FA_KERNEL_UPLOAD)
            FA_TRY(upload_lists(place, call, plan, kernels[i]));
        else
            FA_TRY(fa_kernel_launch(place, kernels[i], blocks_of(place, &plan->launch[i]), plan->launch[i].cluster, &plan->args,
                                    &maps));
    return FLASH_ATTN_OK;
}

/* The context's pool on a device, made when first needed. Of the device's own one all memory goes back at each synchronisation, and the next call waits for it
 * to be mapped anew: half a millisecond for 132 MB (decision 0090). NULL: there are no pools. */
static CUmemoryPool pool_of(const fa_place *place)
{
    fa_device *device = place->device;
    CUmemoryPool pool = NULL;
    if (!device->has_pools)
        return NULL;
    pthread_mutex_lock(&place->cuda->lock);
    if (!device->pool) {
        const fa_driver *driver = place->driver;
        CUmemPoolProps   props  = {.alloc_type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->device}};
        size_t           bytes;
        uint64_t         kept;
        if (driver->cuMemPoolCreate(&pool, &props) == CUDA_SUCCESS)
            device->pool = pool;
        if (device->pool && driver->cuDeviceTotalMem_v2(&bytes, device->device) == CUDA_SUCCESS) {
            kept = bytes / 128;
            driver->cuMemPoolSetAttribute(device->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &kept);
        }
    }
    pool = device->pool;
    pthread_mutex_unlock(&place->cuda->lock);
    return pool;
}

/* What does a call: mostly one plan (fa_plan_calls_of). */
typedef struct work {
    const fa_call *call[2];
    fa_call        packed, parts[2];
    fa_plan        plan[2];
    int            count;
    size_t         workspace_bytes; /* of all, from an address on that 256 divides */
} work;

static flash_attn_status build_all(const fa_place *place, const fa_plan *plan)
{
    fa_kernel *kernel;
    for (int i = 0; i < plan->num_launches; i++)
        FA_TRY(fa_kernel_get(place, &plan->launch[i].key, &kernel));
    return FLASH_ATTN_OK;
}

static flash_attn_status launch_in(const fa_place *place, work *w, char *base)
{
    for (int n = 1; n < w->count; n++) /* if one cannot be built, nothing has been written */
        FA_TRY(build_all(place, &w->plan[n]));
    for (int n = 0; n < w->count; n++) {
        if (base) {
            fa_plan_place(w->call[n], &w->plan[n], base);
            base += w->plan[n].workspace_bytes;
        }
        FA_TRY(launch_all(place, w->call[n], &w->plan[n]));
    }
    return FLASH_ATTN_OK;
}

/* Stream-ordered where the device can; else cuMemAlloc, whose free waits for the work. */
static flash_attn_status run_in_own_memory(const fa_place *place, work *w)
{
    const fa_driver *driver = place->driver;
    CUmemoryPool     pool   = pool_of(place);
    CUdeviceptr      memory;
    CUresult result = pool ? driver->cuMemAllocFromPoolAsync(&memory, w->workspace_bytes, pool, place->stream)
                           : driver->cuMemAlloc_v2(&memory, w->workspace_bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "the device has no room for a workspace of %zu bytes", w->workspace_bytes);
    FA_TRY(fa_driver_check(driver, result, "allocating the workspace"));
    flash_attn_status status = launch_in(place, w, (char *)(uintptr_t)memory);
    if (pool)
        driver->cuMemFreeAsync(memory, place->stream);
    else
        driver->cuMemFree_v2(memory);
    return status;
}

/* The kernel that the options ask for by its name. A backward's leaves the forward as it is. */
static const char *forced_kernel(const fa_cuda *cuda, const fa_call *call)
{
    const char *name = cuda->forced_kernel;
    return name && call->pass == FLASH_ATTN_FORWARD && strncmp(name, "backward_", 9) == 0 ? NULL : name;
}

/* A GPU that takes no tensor maps (the emulated one of the tests) runs the portable kernels. */
static flash_attn_status make_plan(const fa_cuda *cuda, const fa_device *device, const fa_call *call, fa_plan *plan)
{
    const char *name = forced_kernel(cuda, call);
    if (!name && !device->has_tensor_maps)
        name = fa_kernels[call->pass == FLASH_ATTN_FORWARD ? FA_KERNEL_FORWARD_SM80 : FA_KERNEL_BACKWARD_SM80].name;
    return fa_plan_make(call, device->built_for, &device->chip, name, plan);
}

/* Documents as packed sequences, unless a kernel is asked for by its name. Of shorter ones several share a tile, which lists of tiles do faster (decision 0102). */
static const fa_call *as_packed(const fa_cuda *cuda, const fa_call *call, fa_call *packed)
{
    enum { LEAST_MEAN = 256 };
    return !forced_kernel(cuda, call) && fa_documents_pack(call, LEAST_MEAN, packed) ? packed : call;
}

static flash_attn_status make_work(const fa_cuda *cuda, const fa_device *device, const fa_call *call, work *w)
{
    call               = as_packed(cuda, call, &w->packed);
    w->count           = forced_kernel(cuda, call) ? 1 : fa_plan_calls_of(call, w->parts);
    w->workspace_bytes = 0;
    for (int n = 0; n < w->count; n++) {
        w->call[n] = w->count == 1 ? call : &w->parts[n];
        FA_TRY(make_plan(cuda, device, w->call[n], &w->plan[n]));
        w->workspace_bytes += w->plan[n].workspace_bytes;
    }
    return FLASH_ATTN_OK;
}

static size_t workspace_for(const work *w)
{
    return w->workspace_bytes > 0 ? w->workspace_bytes + 255 : 0; /* the caller's may start anywhere */
}

static flash_attn_status run_at(const fa_place *place, const fa_call *call, const fa_exec *exec)
{
    work w;
    FA_TRY(make_work(place->cuda, place->device, call, &w));
    if (w.workspace_bytes == 0)
        return launch_in(place, &w, NULL);
    void *memory;
    FA_TRY(fa_take_workspace(exec, workspace_for(&w), &memory));
    if (!memory)
        return run_in_own_memory(place, &w);
    uintptr_t base = ((uintptr_t)memory + 255) / 256 * 256;
    return launch_in(place, &w, (char *)base);
}

flash_attn_status fa_cuda_run(flash_attn_context *context, int32_t device, const fa_call *call, const fa_exec *exec)
{
    fa_place place;
    FA_TRY(fa_place_enter(context, device, exec->stream, &place));
    flash_attn_status status = run_at(&place, call, exec);
    fa_place_leave(&place);
    return status;
}

/* ---- before a call ---- */

static void keep_larger(const fa_cuda *cuda, const fa_device *at, const fa_call *other, size_t *bytes)
{
    work w;
    if (make_work(cuda, at, other, &w) == FLASH_ATTN_OK && *bytes < workspace_for(&w))
        *bytes = workspace_for(&w);
}

/* Of a call whose gradients, and whether its rows are aligned, are not known yet: these may be other kernels. */
flash_attn_status fa_cuda_workspace(flash_attn_context *context, int32_t device, const fa_call *call, size_t *bytes)
{
    fa_cuda   *cuda;
    fa_device *at;
    work       w;
    FA_TRY(fa_cuda_of(context, &cuda));
    FA_TRY(fa_device_get(cuda, device, &at));
    FA_TRY(make_work(cuda, at, call, &w));
    *bytes = workspace_for(&w);
    fa_call other     = *call;
    other.dbias.dtype = FLASH_ATTN_F32; /* of another dtype, or where no row is aligned, it needs floats */
    if (call->dbias.data)
        keep_larger(cuda, at, &other, bytes);
    if (call->pass == FLASH_ATTN_BACKWARD) {
        other          = *call;
        other.dk.dtype = other.dv.dtype = FLASH_ATTN_F32;
        keep_larger(cuda, at, &other, bytes);
        other.dout.dtype = FLASH_ATTN_F32;
        keep_larger(cuda, at, &other, bytes);
    }
    if (forced_kernel(cuda, call))
        return FLASH_ATTN_OK;
    other        = *call;
    other.q.data = (char *)other.q.data + fa_dtype_bytes(call->q.dtype); /* where no row is aligned */
    keep_larger(cuda, at, &other, bytes);
    return FLASH_ATTN_OK;
}

/* A plan without gradients stands for all of them, but a backward may not want the bias's or the sinks': these are other kernels. */
enum { MOST_VARIANTS = 4 };

static int variants_of(const fa_call *call, fa_call variants[MOST_VARIANTS])
{
    int count = 0;
    for (int without_sinks = 0; without_sinks <= (call->dsinks.data != NULL); without_sinks++)
        for (int without_bias = 0; without_bias <= (call->dbias.data != NULL); without_bias++) {
            fa_call *variant = &variants[count++];
            *variant         = *call;
            if (without_sinks)
                variant->dsinks.data = NULL;
            if (without_bias)
                variant->dbias.data = NULL;
        }
    return count;
}

static flash_attn_status prepare_at(const fa_place *place, const fa_call *call)
{
    work    w;
    fa_call variants[MOST_VARIANTS];
    int     count = variants_of(call, variants);
    for (int v = 0; v < count; v++) {
        FA_TRY(make_work(place->cuda, place->device, &variants[v], &w));
        for (int n = 0; n < w.count; n++)
            FA_TRY(build_all(place, &w.plan[n]));
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_cuda_prepare(flash_attn_context *context, int32_t device, const fa_call *call)
{
    fa_place place;
    FA_TRY(fa_place_enter(context, device, NULL, &place));
    flash_attn_status status = prepare_at(&place, call);
    fa_place_leave(&place);
    return status;
}

static flash_attn_status explain_at(const fa_place *place, const fa_call *call, flash_attn_explanation *explanation)
{
    work       w;
    fa_kernel *kernel;
    FA_TRY(make_work(place->cuda, place->device, call, &w));
    const fa_plan   *plan = &w.plan[0]; /* of two the one that takes longer */
    const fa_launch *main = &plan->launch[plan->main];
    FA_TRY(fa_kernel_get(place, &main->key, &kernel));
    snprintf(explanation->kernel, sizeof explanation->kernel, "%s",
             plan->rung ? plan->rung->name : fa_kernels[main->key.kernel].name);
    snprintf(explanation->reason, sizeof explanation->reason, "%s; %d registers a thread, built for sm_%d",
             plan->row->why, kernel->resources.registers, main->key.arch);
    explanation->tile_q        = plan->row->tile_q;
    explanation->tile_k        = plan->row->tile_k;
    explanation->num_splits    = plan->args.num_splits;
    explanation->num_threads   = kernel->threads;
    explanation->num_tasks     = main->blocks;
    explanation->scratch_bytes = kernel->resources.shared_bytes;
    return FLASH_ATTN_OK;
}

flash_attn_status fa_cuda_explain(flash_attn_context *context, int32_t device, const fa_call *call,
                                  flash_attn_explanation *explanation)
{
    fa_place place;
    FA_TRY(fa_place_enter(context, device, NULL, &place));
    flash_attn_status status = explain_at(&place, call, explanation);
    fa_place_leave(&place);
    return status;
}

flash_attn_status fa_cuda_info(flash_attn_context *context, int32_t index, flash_attn_device_info *info)
{
    fa_cuda   *cuda;
    fa_device *device;
    size_t     bytes = 0;
    int        l2    = 0;
    FA_TRY(fa_cuda_of(context, &cuda));
    FA_TRY(fa_device_get(cuda, index, &device));
    FA_TRY(fa_driver_check(cuda->driver, cuda->driver->cuDeviceGetName(info->name, sizeof info->name, device->device),
                           "cuDeviceGetName"));
    cuda->driver->cuDeviceTotalMem_v2(&bytes, device->device);
    cuda->driver->cuDeviceGetAttribute(&l2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device->device);
    snprintf(info->isa, sizeof info->isa, "sm_%d", device->arch);
    snprintf(info->features, sizeof info->features, "driver=%d.%d kernels=sm_%d shared_bytes=%d disk_cache=%s",
             cuda->driver->version / 1000, cuda->driver->version % 1000 / 10, device->built_for, device->max_shared_bytes,
             cuda->jit.cache >= 0 ? "on" : "off");
    info->num_cores    = device->chip.multiprocessors;
    info->l2_bytes     = l2;
    info->memory_bytes = (int64_t)bytes;
    return FLASH_ATTN_OK;
}

/* ---- ahead of time ---- */

static flash_attn_status export_kernel(fa_cuda *cuda, const fa_key *key, const char *folder)
{
    fa_binary binary;
    if (fa_jit_is_exported(&cuda->jit, key, folder)) /* calls of many lengths share most of their kernels */
        return FLASH_ATTN_OK;
    FA_TRY(fa_jit_compile(&cuda->jit, key, &binary));
    flash_attn_status status = fa_jit_export(&cuda->jit, key, &binary, folder);
    free(binary.cubin);
    return status;
}

static flash_attn_status compile_plans(fa_cuda *cuda, const fa_call *call, int arch, const char *folder)
{
    fa_plan plan;
    fa_call packed, variants[MOST_VARIANTS];
    int     count = variants_of(call, variants);
    for (int v = 0; v < count; v++) {
        FA_TRY(fa_plan_make(as_packed(cuda, &variants[v], &packed), arch, NULL, forced_kernel(cuda, call), &plan));
        for (int i = 0; i < plan.num_launches; i++)
            FA_TRY(export_kernel(cuda, &plan.launch[i].key, folder));
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_cuda_compile(flash_attn_context *context, const fa_call *call, int32_t arch, const char *folder)
{
    fa_cuda *cuda;
    int      built_for = arch > 0 && arch < 1000 ? fa_tune_arch(arch) : 0;
    if (built_for == 0)
        return fa_fail(FLASH_ATTN_INVALID, "arch is %d, expected a compute capability such as 80, 86, 89, 90, 100 or 120",
                       arch);
    FA_TRY(fa_cuda_of(context, &cuda));
    pthread_mutex_lock(&cuda->compile);
    flash_attn_status status = compile_plans(cuda, call, built_for, folder);
    pthread_mutex_unlock(&cuda->compile);
    return status;
}

/* ---- merge and append ---- */

static fa_merge_part merge_part(const flash_attn_partial *part)
{
    fa_merge_part out = {.o = fa_plan_view(&part->o), .lse = part->lse.data};
    for (int i = 0; i < 3; i++)
        out.lse_stride[i] = part->lse.stride[i];
    return out;
}

static flash_attn_status launch_warps_at(const fa_place *place, enum fa_kernel_id id, int64_t warps, void *args)
{
    fa_kernel *kernel;
    fa_key     key    = fa_plan_small_key(id, place->device->built_for);
    int64_t    blocks = (warps + key.warps - 1) / key.warps;
    if (blocks > INT32_MAX)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "%s would need %lld blocks; CUDA allows %d in a launch", fa_kernels[id].name,
                       (long long)blocks, INT32_MAX);
    FA_TRY(fa_kernel_get(place, &key, &kernel));
    return fa_kernel_launch(place, kernel, blocks, 1, args, NULL);
}

/* A kernel of so many warps that needs nothing but its arguments. */
static flash_attn_status launch_warps(flash_attn_context *context, int32_t index, const fa_exec *exec,
                                      enum fa_kernel_id id, int64_t warps, void *args)
{
    fa_place place;
    FA_TRY(fa_place_enter(context, index, exec->stream, &place));
    flash_attn_status status = launch_warps_at(&place, id, warps, args);
    fa_place_leave(&place);
    return status;
}

/* Rows are whole pieces of so many neighbours, each aligned. */
static bool lies_in_pieces(const flash_attn_tensor *t, const int64_t shape[4], int columns)
{
    if ((uintptr_t)t->data % (columns * fa_dtype_bytes(t->dtype)) != 0 || t->stride[3] != 1)
        return false;
    for (int i = 0; i < 3; i++)
        if (shape[i] > 1 && t->stride[i] % columns != 0)
            return false;
    return true;
}

/* fa_merge_args.columns. merge.cu counts rows in 32 bits there. */
static int columns_at_once(const flash_attn_partial *parts, int num_parts, const flash_attn_tensor *result, int64_t rows)
{
    const int64_t *shape = result->shape;
    for (int columns = 8; columns >= 4; columns /= 2) {
        bool fits = num_parts <= FA_MERGE_FEW_PARTS && rows <= INT32_MAX - 32 && shape[3] > 0 && shape[3] % columns == 0 &&
                    lies_in_pieces(result, shape, columns) && (columns == 4 || result->dtype != FLASH_ATTN_F32);
        for (int n = 0; n < num_parts && fits; n++)
            fits = lies_in_pieces(&parts[n].o, shape, columns) && (columns == 4 || parts[n].o.dtype != FLASH_ATTN_F32);
        if (fits)
            return columns;
    }
    return 0;
}

flash_attn_status fa_cuda_merge(flash_attn_context *context, int32_t device, const flash_attn_partial *parts,
                                int32_t num_parts, const flash_attn_partial *result, const fa_exec *exec)
{
    enum { WARP = 32 };
    const int64_t *shape = result->o.shape;
    int64_t        rows = shape[0] * shape[1] * shape[2], warps = rows;
    if (num_parts > FA_MERGE_MAX_PARTS)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "num_parts is %d; on CUDA at most %d parts are merged at once", num_parts,
                       FA_MERGE_MAX_PARTS);
    fa_merge_args args = {.num_parts  = num_parts,
                          .batch      = (int)shape[0],
                          .seqlen_q   = (int)shape[1],
                          .heads      = (int)shape[2],
                          .head_dim_v = (int)shape[3],
                          .result     = merge_part(result)};
    for (int i = 0; i < num_parts; i++)
        args.part[i] = merge_part(&parts[i]);
    args.columns = columns_at_once(parts, num_parts, &result->o, rows);
    if (args.columns > 0) {
        int64_t lanes  = ceil_div(shape[3], (int64_t)FA_MERGE_PIECES * args.columns);
        args.row_lanes = (int)(lanes < WARP ? lanes : WARP);
        warps          = ceil_div(rows, WARP / args.row_lanes);
    }
    return launch_warps(context, device, exec, FA_KERNEL_MERGE, warps, &args);
}

flash_attn_status fa_cuda_append(flash_attn_context *context, const flash_attn_append *a, const fa_exec *exec)
{
    bool           has_new = a->k_new.data != NULL, has_q = a->q.data != NULL;
    const int64_t *first   = has_new ? a->k_new.shape : a->q.shape;
    fa_append_args args    = {.k_new           = fa_plan_view(&a->k_new),
                              .v_new           = fa_plan_view(&a->v_new),
                              .k_cache         = fa_plan_view(&a->k_cache),
                              .v_cache         = fa_plan_view(&a->v_cache),
                              .cos             = fa_plan_view(&a->rotary.cos),
                              .sin             = fa_plan_view(&a->rotary.sin),
                              .q               = fa_plan_view(&a->q),
                              .q_out           = fa_plan_view(&a->q_out),
                              .cache_seqlens   = a->cache_seqlens,
                              .cache_batch_idx = a->cache_batch_idx,
                              .leftpad_k       = a->leftpad_k,
                              .page_table      = a->pages.table,
                              .page_row_stride = a->pages.row_stride,
                              .batch           = (int)first[0],
                              .seqlen_new      = has_new ? (int)a->k_new.shape[1] : 0,
                              .heads_k         = has_new ? (int)a->k_new.shape[2] : 0,
                              .head_dim        = (int)first[3],
                              .head_dim_v      = has_new ? (int)a->v_new.shape[3] : 0,
                              .cache_entries   = (int)a->k_cache.shape[0],
                              .cache_rows      = (int)a->k_cache.shape[1],
                              .pages_per_seq   = a->pages.pages_per_seq,
                              .seqlen_q        = has_q ? (int)a->q.shape[1] : 0,
                              .heads_q         = has_q ? (int)a->q.shape[2] : 0,
                              .rotary_dim      = a->rotary.cos.data ? 2 * (int)a->rotary.cos.shape[1] : 0,
                              .rotary_rows     = (int)a->rotary.cos.shape[0],
                              .interleaved     = a->rotary.interleaved,
                              .q_at_end        = a->q_at_end};
    int64_t rows = (int64_t)args.batch * ((int64_t)args.seqlen_new * args.heads_k + (int64_t)args.seqlen_q * args.heads_q);
    return launch_warps(context, a->device.index, exec, FA_KERNEL_APPEND, rows, &args);
}
