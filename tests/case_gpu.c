#include "case_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Of the CUDA Driver API. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuInit, (unsigned flags))                                                                                        \
    X(cuDeviceGet, (int *device, int ordinal))                                                                         \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                                          \
    X(cuCtxSetCurrent, (void *context))                                                                                \
    X(cuMemAlloc_v2, (uint64_t * memory, size_t bytes))                                                                \
    X(cuMemFree_v2, (uint64_t memory))                                                                                 \
    X(cuMemcpyHtoD_v2, (uint64_t to, const void *from, size_t bytes))                                                  \
    X(cuMemcpyDtoH_v2, (void *to, uint64_t from, size_t bytes))                                                        \
    X(cuMemsetD8_v2, (uint64_t to, unsigned char byte, size_t bytes))                                                  \
    X(cuStreamCreate, (void **stream, unsigned flags))                                                                 \
    X(cuStreamDestroy_v2, (void *stream))                                                                              \
    X(cuStreamSynchronize, (void *stream))                                                                             \
    X(cuStreamBeginCapture_v2, (void *stream, int mode))                                                               \
    X(cuStreamEndCapture, (void *stream, void **graph))                                                                \
    X(cuGraphInstantiateWithFlags, (void **executable, void *graph, unsigned long long flags))                         \
    X(cuGraphDestroy, (void *graph))                                                                                   \
    X(cuGraphLaunch, (void *executable, void *stream))                                                                 \
    X(cuGraphExecDestroy, (void *executable))                                                                          \
    X(cuEventCreate, (void **event, unsigned flags))                                                                   \
    X(cuEventDestroy_v2, (void *event))                                                                                \
    X(cuEventRecord, (void *event, void *stream))                                                                      \
    X(cuEventSynchronize, (void *event))                                                                               \
    X(cuEventElapsedTime, (float *milliseconds, void *begin, void *end))                                               \
    X(cuDevicePrimaryCtxRelease_v2, (int device))                                                                      \
    X(cuGetErrorName, (int result, const char **name))

static struct {
#define X(name, arguments) int(*name) arguments;
    FUNCTIONS(X)
#undef X
    void *context;
    int   device;
} cuda;

static _Thread_local int last_result; /* of the driver: 0 is success */

static bool ok(int result)
{
    last_result = result;
    return result == 0;
}

/* The library works on the default stream and is asynchronous; copies to and from pageable memory wait for it. */
static void *gpu_alloc(size_t bytes)
{
    uint64_t memory = 0;
    return ok(cuda.cuMemAlloc_v2(&memory, bytes ? bytes : 1)) ? (void *)(uintptr_t)memory : NULL;
}
static void gpu_free(void *memory) { cuda.cuMemFree_v2((uint64_t)(uintptr_t)memory); }
static bool gpu_to_device(void *to, const void *from, size_t bytes)
{
    return ok(cuda.cuMemcpyHtoD_v2((uint64_t)(uintptr_t)to, from, bytes));
}
static bool gpu_to_host(void *to, const void *from, size_t bytes)
{
    return ok(cuda.cuMemcpyDtoH_v2(to, (uint64_t)(uintptr_t)from, bytes));
}
static bool gpu_fill(void *to, unsigned char byte, size_t bytes)
{
    return ok(cuda.cuMemsetD8_v2((uint64_t)(uintptr_t)to, byte, bytes));
}
static void *gpu_stream(void)
{
    void *stream = NULL;
    return ok(cuda.cuStreamCreate(&stream, 1)) ? stream : NULL; /* 1: non-blocking */
}
static void  gpu_stream_free(void *stream) { cuda.cuStreamDestroy_v2(stream); }
static bool  gpu_wait(void *stream) { return ok(cuda.cuStreamSynchronize(stream)); }
static bool  gpu_capture_begin(void *stream) { return ok(cuda.cuStreamBeginCapture_v2(stream, 0)); } /* 0: global */
static void *gpu_capture_end(void *stream)
{
    void *graph = NULL, *executable = NULL;
    if (!ok(cuda.cuStreamEndCapture(stream, &graph)) || !graph)
        return NULL;
    bool made = ok(cuda.cuGraphInstantiateWithFlags(&executable, graph, 0));
    cuda.cuGraphDestroy(graph);
    return made ? executable : NULL;
}
static bool gpu_graph_launch(void *graph, void *stream) { return ok(cuda.cuGraphLaunch(graph, stream)); }
static void gpu_graph_free(void *graph) { cuda.cuGraphExecDestroy(graph); }
static bool gpu_adopt(void) { return ok(cuda.cuCtxSetCurrent(cuda.context)); }
static bool gpu_abandon(void) { return ok(cuda.cuCtxSetCurrent(NULL)); }


static bool gpu_time(bool (*run)(void *arg), void *arg, int launches, double *milliseconds)
{
    void *begin = NULL, *end = NULL;
    float elapsed = 0;
    bool  done    = ok(cuda.cuEventCreate(&begin, 0)) && ok(cuda.cuEventCreate(&end, 0)) && ok(cuda.cuEventRecord(begin, NULL));
    for (int i = 0; i < launches && done; i++)
        done = run(arg);
    done = done && ok(cuda.cuEventRecord(end, NULL)) && ok(cuda.cuEventSynchronize(end)) &&
           ok(cuda.cuEventElapsedTime(&elapsed, begin, end));
    if (begin)
        cuda.cuEventDestroy_v2(begin);
    if (end)
        cuda.cuEventDestroy_v2(end);
    *milliseconds = (double)elapsed / launches;
    return done;
}

static const char *gpu_error(void)
{
    const char *name = NULL;
    cuda.cuGetErrorName(last_result, &name);
    return name ? name : "unknown error";
}

static void gpu_close(void)
{
    cuda.cuCtxSetCurrent(NULL);
    cuda.cuDevicePrimaryCtxRelease_v2(cuda.device);
}

const case_gpu *case_gpu_get(void)
{
    static const case_gpu gpu = {gpu_alloc,       gpu_free,        gpu_to_device,    gpu_to_host,    gpu_fill,  gpu_stream,
                                 gpu_stream_free, gpu_wait,        gpu_capture_begin, gpu_capture_end, gpu_graph_launch,
                                 gpu_graph_free,  gpu_adopt,       gpu_abandon,      gpu_time,       gpu_error, gpu_close};
    return &gpu;
}

static void *memory_upload(void *user, const void *host, size_t bytes)
{
    (void)user;
    void *memory = gpu_alloc(bytes);
    if (memory && bytes > 0 && !gpu_to_device(memory, host, bytes)) {
        gpu_free(memory);
        memory = NULL;
    }
    return memory;
}
static bool memory_download(void *user, void *host, const void *device, size_t bytes)
{
    (void)user;
    return gpu_to_host(host, device, bytes);
}
static void memory_release(void *user, void *device)
{
    (void)user;
    gpu_free(device);
}

const case_memory *case_gpu_memory(int index, char *why, size_t why_bytes)
{
    static const case_memory memory  = {memory_upload, memory_download, memory_release, NULL};
    void                    *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, why_bytes, "libcuda.so.1, the driver's library, was not found");
        return NULL;
    }
#define X(name, arguments)                                                                                             \
    if (!(*(void **)&cuda.name = dlsym(library, #name))) {                                                             \
        snprintf(why, why_bytes, "the CUDA driver lacks %s", #name);                                                   \
        return NULL;                                                                                                   \
    }
    FUNCTIONS(X)
#undef X
    if (!ok(cuda.cuInit(0)) || !ok(cuda.cuDeviceGet(&cuda.device, index)) ||
        !ok(cuda.cuDevicePrimaryCtxRetain(&cuda.context, cuda.device)) || !gpu_adopt()) {
        snprintf(why, why_bytes, "there is no usable CUDA device %d: %s", index, gpu_error());
        return NULL;
    }
    return &memory;
}

flash_attn_context *case_gpu_hopper(const char *kernel, char *why, size_t why_bytes)
{
    flash_attn_options     options = {.kernel = kernel};
    flash_attn_context    *context = NULL;
    flash_attn_device_info info;
    if (flash_attn_create(&context, &options) != FLASH_ATTN_OK ||
        flash_attn_get_device_info(context, (flash_attn_device){.type = FLASH_ATTN_CUDA}, &info) != FLASH_ATTN_OK)
        snprintf(why, why_bytes, "%s", flash_attn_last_error());
    else if (strcmp(info.isa, "sm_90") == 0)
        return context;
    else
        snprintf(why, why_bytes, "this GPU is %s", info.isa);
    flash_attn_destroy(context);
    return NULL;
}
