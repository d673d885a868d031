/* Devices, loaded kernels, launches. */
#include "cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- the context's CUDA part ---- */

static void free_cuda(fa_cuda *cuda)
{
    for (int i = 0; i < FA_KERNEL_BUCKETS; i++)
        for (fa_kernel *kernel = cuda->kernels[i], *next; kernel; kernel = next) {
            next = kernel->next;
            if (kernel->loaded)
                cuda->driver->cuLibraryUnload(kernel->library);
            free(kernel);
        }
    for (int i = 0; i < FA_MAX_DEVICES; i++) {
        if (cuda->devices[i].pool) /* what is still in use goes when it is not */
            cuda->driver->cuMemPoolDestroy(cuda->devices[i].pool);
        if (cuda->devices[i].primary)
            cuda->driver->cuDevicePrimaryCtxRelease_v2(cuda->devices[i].device);
    }
    fa_jit_free(&cuda->jit);
    pthread_mutex_destroy(&cuda->lock);
    pthread_mutex_destroy(&cuda->compile);
    pthread_cond_destroy(&cuda->built);
    free(cuda->forced_kernel);
    free(cuda);
}

void fa_cuda_destroy(fa_cuda *cuda)
{
    if (cuda)
        free_cuda(cuda);
}

static flash_attn_status make_cuda(const flash_attn_options *options, fa_cuda **made)
{
    fa_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a CUDA context");
    pthread_mutex_init(&cuda->lock, NULL);
    pthread_mutex_init(&cuda->compile, NULL);
    pthread_cond_init(&cuda->built, NULL);
    cuda->jit.cache = -1;
    cuda->no_driver = fa_driver_get(&cuda->driver);
    if (cuda->no_driver != FLASH_ATTN_OK)
        snprintf(cuda->why_not, sizeof cuda->why_not, "%s", flash_attn_last_error());
    flash_attn_status status = FLASH_ATTN_OK;
    if (options->kernel && !(cuda->forced_kernel = strdup(options->kernel)))
        status = fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a CUDA context");
    if (status == FLASH_ATTN_OK)
        status = fa_jit_init(&cuda->jit, options, cuda->driver ? cuda->driver->version : 0);
    if (status != FLASH_ATTN_OK) {
        free_cuda(cuda);
        return status;
    }
    *made = cuda;
    return FLASH_ATTN_OK;
}

flash_attn_status fa_cuda_of(flash_attn_context *context, fa_cuda **cuda)
{
    *cuda = atomic_load_explicit(&context->cuda, memory_order_acquire);
    if (*cuda)
        return FLASH_ATTN_OK;
    fa_cuda *made = NULL, *expected = NULL;
    FA_TRY(make_cuda(&context->options, &made));
    if (!atomic_compare_exchange_strong(&context->cuda, &expected, made)) { /* another thread was first */
        free_cuda(made);
        made = expected;
    }
    *cuda = made;
    return FLASH_ATTN_OK;
}

/* ---- devices ---- */

static int attribute(const fa_driver *driver, CUdevice device, int which)
{
    int value = 0;
    return driver->cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static flash_attn_status set_up_device(fa_cuda *cuda, int index)
{
    const fa_driver *driver = cuda->driver;
    fa_device       *device = &cuda->devices[index];
    FA_TRY(fa_driver_check(driver, driver->cuDeviceGet(&device->device, index), "cuDeviceGet"));
    device->arch = 10 * attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                   attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    device->built_for           = fa_tune_arch(device->arch);
    device->chip = (fa_chip){attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                             (int)(2 * (int64_t)attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) *
                                   attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8 / 1000000)};
    device->max_shared_bytes =
        attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    device->has_pools       = attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) != 0;
    device->has_tensor_maps = attribute(driver, device->device, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED) != 0;
    atomic_store_explicit(&device->ready, 1, memory_order_release);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_device_get(fa_cuda *cuda, int32_t index, fa_device **device)
{
    if (cuda->no_driver != FLASH_ATTN_OK)
        return fa_fail(cuda->no_driver, "%s", cuda->why_not);
    if (index < 0 || index >= cuda->driver->num_devices || index >= FA_MAX_DEVICES)
        return fa_fail(FLASH_ATTN_NO_DEVICE, "device.index is %d, but there are %d CUDA devices", index,
                       cuda->driver->num_devices);
    *device = &cuda->devices[index];
    if (atomic_load_explicit(&(*device)->ready, memory_order_acquire))
        return FLASH_ATTN_OK;
    pthread_mutex_lock(&cuda->lock);
    flash_attn_status status = (*device)->ready ? FLASH_ATTN_OK : set_up_device(cuda, index);
    pthread_mutex_unlock(&cuda->lock);
    return status;
}

static flash_attn_status push_primary(fa_place *place)
{
    fa_cuda  *cuda   = place->cuda;
    CUresult  result = CUDA_SUCCESS;
    CUcontext primary;
    pthread_mutex_lock(&cuda->lock);
    if (!place->device->primary)
        result = place->driver->cuDevicePrimaryCtxRetain(&place->device->primary, place->device->device);
    primary = place->device->primary;
    pthread_mutex_unlock(&cuda->lock);
    FA_TRY(fa_driver_check(place->driver, result, "cuDevicePrimaryCtxRetain"));
    FA_TRY(fa_driver_check(place->driver, place->driver->cuCtxPushCurrent_v2(primary), "cuCtxPushCurrent"));
    place->pushed = true;
    return FLASH_ATTN_OK;
}

flash_attn_status fa_place_enter(flash_attn_context *context, int32_t index, void *stream, fa_place *place)
{
    *place = (fa_place){.index = index, .stream = (CUstream)stream};
    FA_TRY(fa_cuda_of(context, &place->cuda));
    FA_TRY(fa_device_get(place->cuda, index, &place->device));
    place->driver = place->cuda->driver;
    if (place->device->built_for == 0)
        return fa_fail(FLASH_ATTN_UNSUPPORTED,
                       "CUDA device %d has compute capability %d.%d; kernels are for 8.0 to 8.9, 9.x, 10.x and 12.x", index,
                       place->device->arch / 10, place->device->arch % 10);
    CUdevice current;
    if (place->driver->cuCtxGetDevice(&current) == CUDA_SUCCESS && current == place->device->device)
        return FLASH_ATTN_OK;
    return push_primary(place);
}

void fa_place_leave(fa_place *place)
{
    CUcontext ignored;
    if (place->pushed)
        place->driver->cuCtxPopCurrent_v2(&ignored);
    place->pushed = false;
}

/* ---- kernels ---- */

static flash_attn_status load(const fa_place *place, fa_kernel *kernel)
{
    fa_cuda          *cuda   = place->cuda;
    const fa_driver  *driver = place->driver;
    fa_binary         binary = {0};
    pthread_mutex_lock(&cuda->compile);
    flash_attn_status status = fa_jit_build(&cuda->jit, &kernel->key, &binary);
    pthread_mutex_unlock(&cuda->compile);
    if (status != FLASH_ATTN_OK)
        return status;
    status = fa_driver_check(driver, driver->cuLibraryLoadData(&kernel->library, binary.cubin, NULL, NULL, 0, NULL, NULL, 0),
                             "loading a kernel (cuLibraryLoadData)");
    free(binary.cubin); /* the driver keeps its own copy */
    if (status != FLASH_ATTN_OK)
        return status;
    status = fa_driver_check(driver, driver->cuLibraryGetKernel(&kernel->kernel, kernel->library,
                                                                fa_kernels[kernel->key.kernel].name),
                             "finding a kernel (cuLibraryGetKernel)");
    if (status != FLASH_ATTN_OK) {
        driver->cuLibraryUnload(kernel->library);
        return status;
    }
    kernel->resources = binary.resources;
    kernel->threads   = fa_plan_threads(&kernel->key);
    return FLASH_ATTN_OK;
}

static fa_kernel *find(fa_kernel *kernel, const fa_key *key)
{
    while (kernel && memcmp(&kernel->key, key, sizeof *key) != 0)
        kernel = kernel->next;
    return kernel;
}

/* One thread builds a key; others that want it wait. A failure is not kept: the next caller tries again. */
static flash_attn_status build_once(const fa_place *place, const fa_key *key, _Atomic(fa_kernel *) *bucket,
                                    fa_kernel **found)
{
    fa_cuda *cuda = place->cuda;
    pthread_mutex_lock(&cuda->lock);
    fa_kernel *kernel = find(*bucket, key);
    if (!kernel) {
        kernel = calloc(1, sizeof *kernel);
        if (!kernel) {
            pthread_mutex_unlock(&cuda->lock);
            return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a kernel's record");
        }
        kernel->key  = *key;
        kernel->next = *bucket;
        atomic_store_explicit(bucket, kernel, memory_order_release);
    }
    while (kernel->building)
        pthread_cond_wait(&cuda->built, &cuda->lock);
    flash_attn_status status = FLASH_ATTN_OK;
    if (!kernel->loaded) {
        kernel->building = true;
        pthread_mutex_unlock(&cuda->lock);
        status = load(place, kernel);
        pthread_mutex_lock(&cuda->lock);
        kernel->building = false;
        if (status == FLASH_ATTN_OK)
            atomic_store_explicit(&kernel->loaded, true, memory_order_release);
        pthread_cond_broadcast(&cuda->built);
    }
    pthread_mutex_unlock(&cuda->lock);
    *found = kernel;
    return status;
}

/* Shared memory above 48 KB must be asked for, once a device; and a kernel's code is loaded now, not under a capture. */
static flash_attn_status set_up_on_device(const fa_place *place, fa_kernel *kernel)
{
    const fa_driver *driver = place->driver;
    int              shared = kernel->resources.shared_bytes;
    CUfunction       function;
    if (shared > place->device->max_shared_bytes)
        return fa_fail(FLASH_ATTN_UNSUPPORTED, "%s needs %d bytes of shared memory; CUDA device %d has %d for a block",
                       fa_kernels[kernel->key.kernel].name, shared, place->index, place->device->max_shared_bytes);
    FA_TRY(fa_driver_check(driver,
                           driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared,
                                                        kernel->kernel, place->device->device),
                           "asking for shared memory (cuKernelSetAttribute)"));
    FA_TRY(fa_driver_check(driver, driver->cuKernelGetFunction(&function, kernel->kernel),
                           "loading a kernel (cuKernelGetFunction)"));
    atomic_fetch_or_explicit(&kernel->devices, UINT64_C(1) << place->index, memory_order_release);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_kernel_get(const fa_place *place, const fa_key *key, fa_kernel **kernel)
{
    _Atomic(fa_kernel *) *bucket = &place->cuda->kernels[fa_key_hash(key) % FA_KERNEL_BUCKETS];
    *kernel = find(atomic_load_explicit(bucket, memory_order_acquire), key);
    if (!*kernel || !atomic_load_explicit(&(*kernel)->loaded, memory_order_acquire))
        FA_TRY(build_once(place, key, bucket, kernel));
    if (!(atomic_load_explicit(&(*kernel)->devices, memory_order_acquire) >> place->index & 1))
        FA_TRY(set_up_on_device(place, *kernel));
    return FLASH_ATTN_OK;
}

/* Kernels that wait by themselves for the launch in front of theirs: combine, fold, the forwards for few queries, Hopper's for float32, and its other one where that deals tiles out or keys are parted. Blocks of 64 rows would settle where a
 * combine of many blocks leaves registers, two on one multiprocessor (decision 0058). */
static bool begins_early(const fa_key *key, const void *arguments)
{
    bool few = key->kernel == FA_KERNEL_FORWARD_SM80 && key->variant > 1, own = key->kernel == FA_KERNEL_FORWARD_SM90 && (key->has_split || ((const fa_args *)arguments)->next_item);
    return key->arch >= 90 && (key->kernel == FA_KERNEL_COMBINE || key->kernel == FA_KERNEL_FOLD || key->kernel == FA_KERNEL_FORWARD_FEW_SM90 || key->kernel == FA_KERNEL_FORWARD_F32_SM90 || own || (few && (key->tile_q == 16 || ((const fa_args *)arguments)->row_warps <= 1)));
}

flash_attn_status fa_kernel_launch(const fa_place *place, const fa_kernel *kernel, int64_t blocks, int cluster,
                                   void *arguments, fa_maps *maps)
{
    if (blocks == 0)
        return FLASH_ATTN_OK;
    CUlaunchAttribute attributes[2];
    unsigned          count = 0;
    if (cluster > 1)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.cluster = {(unsigned)cluster, 1, 1}};
    if (begins_early(&kernel->key, arguments))
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.yes = 1};
    CUlaunchConfig    config   = {.grid           = {(unsigned)blocks, 1, 1},
                                  .block          = {(unsigned)kernel->threads, 1, 1},
                                  .shared_bytes   = (unsigned)kernel->resources.shared_bytes,
                                  .stream         = place->stream,
                                  .attributes     = attributes,
                                  .num_attributes = count};
    void    *parameters[] = {arguments, maps}; /* the driver takes as many as the kernel has */
    CUresult result = place->driver->cuLaunchKernelEx(&config, (CUfunction)kernel->kernel, parameters, NULL);
    if (result == CUDA_SUCCESS)
        return FLASH_ATTN_OK;
    return fa_driver_check(place->driver, result, fa_kernels[kernel->key.kernel].name);
}

/* ---- tensor maps ---- */

bool fa_map_fits(const flash_attn_tensor *t)
{
    int64_t bytes = (int64_t)fa_dtype_bytes(t->dtype);
    for (int i = 0; i < 3; i++)
        if (t->shape[i] > 1 && (t->stride[i] <= 0 || t->stride[i] * bytes % 16 != 0 || t->stride[i] >= INT64_C(1) << 39))
            return false;
    return t->stride[3] == 1 && (uintptr_t)t->data % 16 == 0;
}

/* What lies between two rows, of a tensor that has more than one of them or of entries; in elements. */
static int64_t row_stride(const flash_attn_tensor *t) { return t->shape[1] > 1 ? t->stride[1] : t->shape[0] > 1 ? t->stride[0] : 8; }

int fa_map_entry_rows(const flash_attn_tensor *t)
{
    int64_t row = row_stride(t), apart = t->shape[0] > 1 ? t->stride[0] / row : 0;
    return (t->shape[0] > 1 && t->stride[0] % row != 0) || row >= INT64_C(1) << 33 || t->shape[0] * apart + t->shape[1] > FA_RAGGED_ROWS ? -1 : (int)apart;
}

static bool ragged_fits(const flash_attn_tensor *t) { return fa_map_fits(t) && fa_map_entry_rows(t) >= 0; }

int fa_map_gradient_rows(const flash_attn_tensor *t)
{
    return t->data && t->dtype != FLASH_ATTN_F32 && fa_map_fits(t) ? fa_map_entry_rows(t) : -1;
}

bool fa_ragged_maps_fit(const fa_call *call)
{
    const flash_attn_tensor *stored[] = {&call->dq, &call->dk, &call->dv};
    for (size_t i = 0; i < sizeof stored / sizeof *stored; i++)
        if (stored[i]->data && fa_map_gradient_rows(stored[i]) < 0)
            return false;
    return ragged_fits(&call->q) && ragged_fits(&call->k) && ragged_fits(&call->v) && fa_map_gradient_rows(&call->o) >= 0;
}

bool fa_maps_fit(const fa_call *call)
{
    if (call->pass == FLASH_ATTN_BACKWARD)
        return ragged_fits(&call->q) && ragged_fits(&call->k) && ragged_fits(&call->v) && ragged_fits(&call->dout);
    return fa_map_fits(&call->q) && fa_map_fits(&call->k) && fa_map_fits(&call->v);
}

/* The bias as its map sees it: once where it broadcasts. */
static flash_attn_tensor stored_bias(const fa_call *call)
{
    flash_attn_tensor bias = call->bias;
    for (int i = 0; i < 3; i++)
        if (bias.stride[i] == 0)
            bias.shape[i] = 1;
    return bias;
}

bool fa_bias_map_fits(const fa_call *call)
{
    flash_attn_tensor bias = stored_bias(call);
    return fa_map_fits(&bias);
}

/* Of dS as it is: where dbias is a sum it has strides of 0, and TMA does not multiply by what dropout keeps. */
bool fa_dbias_map_fits(const fa_call *call)
{
    return call->dbias.data && call->dbias.dtype == call->q.dtype && !call->dropout.threshold && fa_map_fits(&call->dbias);
}

bool fa_packed_q_boxes(const fa_call *call, int tile_q)
{
    return fa_map_fits(&call->q) && (call->group % tile_q == 0 || tile_q % call->group == 0);
}

bool fa_latent_in_pairs(const fa_call *call, const fa_tune_row *row)
{
    enum { LONG = 2048 }; /* keys: fewer, and without a mask or under a window, blocks of a pair wait longer for each other than for L2 (decision 0106) */
    bool causal = call->window.left >= FA_UNLIMITED && call->window.right < FA_UNLIMITED, pays = row->only == FA_FOR_LATENT || (causal && call->max_seqlen_k >= LONG);
    return fa_is_latent(row) && pays && (call->max_seqlen_q * call->group + row->tile_q - 1) / row->tile_q % 2 == 0;
}

int fa_page_piece(const fa_call *call, int tile_k)
{
    int64_t piece = tile_k, other = call->pages.table ? call->page_size : 0;
    while (other != 0) {
        int64_t rest = piece % other;
        piece = other;
        other = rest;
    }
    return (int)piece;
}

/* Boxes of `columns`, and of `boxes` in the next two dimensions; one swizzle. What lies past the end of a dimension is read as zeros. strides: in bytes, but the first dimension's.
 * wide: L2 fetches 256 bytes at once, where rows begin at multiples of that. Elsewhere (latent attention's have 1152) half of these would be another box's, and a call that
 * waits for memory takes 5 to 8% longer for it in any case (decisions 0070, sixth round, and 0074, second). */
static flash_attn_status encode(const fa_driver *driver, const flash_attn_tensor *t, int rank, const uint64_t *dims, const uint64_t *strides,
                                const int boxes[2], int columns, bool wide, fa_map *map)
{
    enum { UINT8 = 0, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9, NOT_INTERLEAVED = 0, SWIZZLE_32B = 1, SWIZZLE_64B = 2, SWIZZLE_128B = 3, L2_AS_ASKED = 0, L2_256_BYTES = 3, FILL_ZEROS = 0 };
    static const int type_of[] = {[FLASH_ATTN_F32] = FLOAT32, [FLASH_ATTN_F16] = FLOAT16, [FLASH_ATTN_BF16] = BFLOAT16, [FLASH_ATTN_F8E4M3] = UINT8};
    const unsigned   box[] = {(unsigned)columns, (unsigned)boxes[0], (unsigned)boxes[1], 1, 1}, element[] = {1, 1, 1, 1, 1};
    size_t           bytes = (size_t)columns * fa_dtype_bytes(t->dtype); /* of a row, as is the swizzle */
    return fa_driver_check(driver,
                           driver->cuTensorMapEncodeTiled(map, type_of[t->dtype], (unsigned)rank, t->data, dims, strides, box, element,
                                                          NOT_INTERLEAVED, bytes == 32 ? SWIZZLE_32B : bytes == 64 ? SWIZZLE_64B : SWIZZLE_128B,
                                                          wide && strides[0] % 256 == 0 ? L2_256_BYTES : L2_AS_ASKED, FILL_ZEROS),
                           "describing a tensor (cuTensorMapEncodeTiled)");
}

static flash_attn_status make_map_of(const fa_driver *driver, const flash_attn_tensor *t, const int order[4], const int boxes[2], int columns, bool wide, fa_map *map)
{
    uint64_t dims[4], strides[3];
    for (int i = 0; i < 4; i++) {
        dims[i] = (uint64_t)t->shape[order[i]];
        if (dims[i] == 0)
            return FLASH_ATTN_OK; /* nothing is ever read through it */
        if (i > 0) /* of a dimension of 1 any will do */
            strides[i - 1] = dims[i] > 1 ? fa_dtype_bytes(t->dtype) * (uint64_t)t->stride[order[i]] : 16;
    }
    return encode(driver, t, 4, dims, strides, boxes, columns, wide, map);
}

/* Dimensions from the fastest: column, row, head, batch entry. */
static flash_attn_status make_map(const fa_driver *driver, const flash_attn_tensor *t, int rows, int columns, bool wide, fa_map *map)
{
    return make_map_of(driver, t, (const int[]){3, 1, 2, 0}, (const int[]){rows, 1}, columns, wide, map);
}

/*
 * A map by which sequences of any place and length have an end of their own, past which zeros are read, though lengths are known to the device alone.
 * Dimensions: column, row, head, then two that only move the start. Row n is asked for as FA_RAGGED_ROWS - left, `left` rows before the sequence's end:
 * then the end of the dimension is the sequence's. The fourth dimension is asked for at that end's row, of all entries one behind the other, and the
 * fifth at FA_RAGGED_ROWS, whose stride is 2^35 bytes less a row: 2^65 is 0 in the 64 bits of an address, and what is left is -FA_RAGGED_ROWS rows.
 */
static flash_attn_status make_ragged_map(const fa_driver *driver, const flash_attn_tensor *t, int rows, int columns, bool wide, fa_map *map)
{
    const uint64_t row = 2 * (uint64_t)row_stride(t), any = 0x7FFF0000;
    const uint64_t dims[]    = {(uint64_t)t->shape[3], FA_RAGGED_ROWS, (uint64_t)t->shape[2], any, any};
    const uint64_t strides[] = {row, t->shape[2] > 1 ? 2 * (uint64_t)t->stride[2] : 16, row, (UINT64_C(1) << 35) - row};
    if (t->shape[0] == 0 || t->shape[1] == 0 || t->shape[2] == 0)
        return FLASH_ATTN_OK;
    return encode(driver, t, 5, dims, strides, (const int[]){rows, 1}, columns, wide, map);
}

/* Panels as in bias_sm90.cuh. */
static flash_attn_status make_bias_map(const fa_driver *driver, const fa_call *call, const fa_tune_row *row, fa_map *map)
{
    flash_attn_tensor bias = stored_bias(call);
    int               bytes = (int)fa_dtype_bytes(bias.dtype), columns = (row->tile_k * bytes % 128 == 0 ? 128 : 32) / bytes;
    return make_map_of(driver, &bias, (const int[]){3, 2, 1, 0}, (const int[]){bias.shape[2] > 1 ? row->tile_q : 1, 1}, columns, true, map);
}

flash_attn_status fa_maps_make(const fa_driver *driver, const fa_call *call, const fa_tune_row *row, fa_maps *maps)
{
    enum { WARP_ROWS = 16 }; /* of O, which a warp stores */
    bool backward = call->pass == FLASH_ATTN_BACKWARD, one_tile = fa_has_one_tile(row), wide = row->only != FA_FOR_FEW_TMA;
    flash_attn_status (*make)(const fa_driver *, const flash_attn_tensor *, int, int, bool, fa_map *) = backward || one_tile ? make_ragged_map : make_map;
    int columns = call->q.dtype == FLASH_ATTN_F8E4M3 && row->head_dim > 64 ? 128 : 64; /* panels_sm90.cuh */
    int rows_k  = fa_page_piece(call, row->tile_k);
    memset(maps, 0, sizeof *maps);
    bool grouped = fa_groups_heads(call, row);
    if (!grouped && !fa_is_latent(row) && row->only != FA_FOR_FEW_TMA) {
        FA_TRY(make(driver, &call->q, row->tile_q, columns, wide, &maps->q));
    } else if (grouped || fa_packed_q_boxes(call, row->tile_q)) {
        int heads = call->group < row->tile_q ? (int)call->group : row->tile_q;
        FA_TRY(make_map_of(driver, &call->q, (const int[]){3, 2, 1, 0}, (const int[]){heads, row->tile_q / heads}, columns, wide, &maps->q));
    }
    if (row->only == FA_FOR_LATENT) /* V comes with K */
        return make(driver, &call->k, rows_k, columns, wide, &maps->k);
    FA_TRY(make(driver, &call->k, rows_k, columns, wide, &maps->k));
    bool squares = !backward && call->q.dtype == FLASH_ATTN_F8E4M3; /* values_sm90.cuh */
    FA_TRY(make(driver, &call->v, squares ? 64 : rows_k, squares ? 64 : columns, wide, &maps->v));
    if (row->only == FA_FOR_BIAS_TMA)
        FA_TRY(make_bias_map(driver, call, row, &maps->bias));
    if (one_tile)
        FA_TRY(make(driver, &call->o, backward ? row->tile_q : WARP_ROWS, columns, wide, &maps->o));
    if (!backward)
        return FLASH_ATTN_OK;
    int stored = row->tile_k % 64 == 0 ? 64 : row->tile_k; /* a consumer's keys */
    if (fa_map_gradient_rows(&call->dk) >= 0)
        FA_TRY(make(driver, &call->dk, stored, columns, wide, &maps->dk));
    if (fa_map_gradient_rows(&call->dv) >= 0)
        FA_TRY(make(driver, &call->dv, stored, columns, wide, &maps->dv));
    if (one_tile && call->dq.data)
        FA_TRY(make(driver, &call->dq, stored, columns, wide, &maps->dq));
    if (fa_dbias_map_fits(call) && row->tile_k % 64 == 0) /* a consumer's dS is a panel */
        FA_TRY(make_map_of(driver, &call->dbias, (const int[]){3, 2, 1, 0}, (const int[]){row->tile_q, 1}, columns, wide, &maps->dbias));
    return make(driver, &call->dout, row->tile_q, columns, wide, &maps->dout);
}

flash_attn_status fa_upload(const fa_place *place, const fa_kernel *upload, void *to, const void *from, size_t bytes)
{
    fa_upload_args args;
    for (size_t done = 0; done < bytes; done += sizeof args.word) {
        size_t part = bytes - done < sizeof args.word ? bytes - done : sizeof args.word;
        args.to     = (unsigned *)((char *)to + done);
        args.count  = (int)(part / sizeof args.word[0]);
        memcpy(args.word, (const char *)from + done, part);
        FA_TRY(fa_kernel_launch(place, upload, 1, 1, &args, NULL));
    }
    return FLASH_ATTN_OK;
}
