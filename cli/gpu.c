#include "gpu.h"

#include "cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* The few functions of the driver that are used, with its types spelt as what they are. A result of 0 is success.
 * https://docs.nvidia.com/cuda/cuda-driver-api/ */
struct cli_gpu {
    void *library;
    int   device;
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    int (*allocate)(unsigned long long *at, size_t bytes);
    int (*release)(unsigned long long at);
    int (*to_device)(unsigned long long at, const void *host, size_t bytes);
    int (*to_host)(void *host, unsigned long long at, size_t bytes);
    int (*fill)(unsigned long long at, unsigned char byte, size_t bytes);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_wait)(void *event);
    int (*event_elapsed)(float *milliseconds, void *begin, void *end);
    int (*error_name)(int result, const char **name);
};

static bool load(cli_gpu *gpu)
{
    const struct {
        const char *name;
        void       *function;
    } symbols[] = {
        {"cuInit", &gpu->init},
        {"cuDeviceGet", &gpu->device_get},
        {"cuDevicePrimaryCtxRetain", &gpu->primary_retain},
        {"cuDevicePrimaryCtxRelease_v2", &gpu->primary_release},
        {"cuCtxSetCurrent", &gpu->set_current},
        {"cuMemAlloc_v2", &gpu->allocate},
        {"cuMemFree_v2", &gpu->release},
        {"cuMemcpyHtoD_v2", &gpu->to_device},
        {"cuMemcpyDtoH_v2", &gpu->to_host},
        {"cuMemsetD8_v2", &gpu->fill},
        {"cuEventCreate", &gpu->event_create},
        {"cuEventDestroy_v2", &gpu->event_destroy},
        {"cuEventRecord", &gpu->event_record},
        {"cuEventSynchronize", &gpu->event_wait},
        {"cuEventElapsedTime", &gpu->event_elapsed},
        {"cuGetErrorName", &gpu->error_name},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(gpu->library, symbols[i].name);
        if (!found)
            return false;
        memcpy(symbols[i].function, &found, sizeof found); /* ISO C has no cast from an object to a function */
    }
    return true;
}

static int fail(cli_gpu *gpu, const char *what, int result)
{
    const char *name = NULL;
    gpu->error_name(result, &name);
    return cli_fail("the GPU: %s: %s", what, name ? name : "unknown error");
}

int cli_gpu_open(int index, cli_gpu **gpu)
{
    cli_gpu *made    = calloc(1, sizeof *made);
    void    *context = NULL;
    *gpu             = NULL;
    if (!made)
        return cli_fail("no memory left");
    made->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!made->library || !load(made)) {
        cli_gpu_close(made);
        return cli_fail("the GPU: libcuda.so.1, the driver's library, was not found");
    }
    int result = made->init(0);
    if (result == 0)
        result = made->device_get(&made->device, index);
    if (result == 0)
        result = made->primary_retain(&context, made->device);
    if (result == 0)
        result = made->set_current(context);
    if (result != 0) {
        fail(made, "opening the device", result);
        cli_gpu_close(made);
        return CLI_REFUSED;
    }
    *gpu = made;
    return CLI_GO_ON;
}

void cli_gpu_close(cli_gpu *gpu)
{
    if (!gpu)
        return;
    if (gpu->set_current && gpu->primary_release) {
        gpu->set_current(NULL);
        gpu->primary_release(gpu->device);
    }
    if (gpu->library)
        dlclose(gpu->library);
    free(gpu);
}

void *cli_gpu_allocate(cli_gpu *gpu, size_t bytes)
{
    unsigned long long at     = 0;
    int                result = gpu->allocate(&at, bytes ? bytes : 1);
    if (result != 0)
        fail(gpu, "allocating memory", result);
    return (void *)(size_t)at;
}

bool cli_gpu_fill(cli_gpu *gpu, void *device, unsigned char byte, size_t bytes)
{
    int result = bytes ? gpu->fill((size_t)device, byte, bytes) : 0;
    if (result != 0)
        fail(gpu, "filling memory", result);
    return result == 0;
}

bool cli_gpu_time(cli_gpu *gpu, bool (*run)(void *arg), void *arg, int launches, double *milliseconds)
{
    void *begin = NULL, *end = NULL;
    float elapsed  = 0;
    bool  launched = true;
    int   result   = gpu->event_create(&begin, 0);
    if (result == 0)
        result = gpu->event_create(&end, 0);
    if (result == 0)
        result = gpu->event_record(begin, NULL);
    for (int i = 0; i < launches && result == 0 && launched; i++)
        launched = run(arg);
    if (result == 0)
        result = gpu->event_record(end, NULL);
    if (result == 0)
        result = gpu->event_wait(end);
    if (result == 0)
        result = gpu->event_elapsed(&elapsed, begin, end);
    if (begin)
        gpu->event_destroy(begin);
    if (end)
        gpu->event_destroy(end);
    if (result != 0)
        fail(gpu, "timing", result);
    *milliseconds = (double)elapsed / launches;
    return launched && result == 0;
}

void *cli_gpu_upload(void *user, const void *host, size_t bytes)
{
    cli_gpu           *gpu = user;
    unsigned long long at  = 0;
    /* An empty tensor has an address too. */
    if (gpu->allocate(&at, bytes ? bytes : 1) != 0)
        return NULL;
    if (bytes && gpu->to_device(at, host, bytes) != 0) {
        gpu->release(at);
        return NULL;
    }
    return (void *)(size_t)at;
}

bool cli_gpu_download(void *user, void *host, const void *device, size_t bytes)
{
    cli_gpu *gpu    = user;
    int      result = bytes ? gpu->to_host(host, (size_t)device, bytes) : 0;
    if (result != 0)
        fail(gpu, "reading the results", result);
    return result == 0;
}

void cli_gpu_release(void *user, void *device)
{
    cli_gpu *gpu = user;
    gpu->release((size_t)device);
}
