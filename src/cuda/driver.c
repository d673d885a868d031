/* libcuda and NVRTC by dlopen. */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static struct {
    pthread_once_t once;
    fa_driver      driver;
    bool           found;
    char           why_not[256]; /* kept, so that every call gives the same sentence */
} process = {.once = PTHREAD_ONCE_INIT};

/* ISO C has no cast from void * to a function pointer; POSIX promises that the bits are the same. */
#define FIND(library, table, name) (*(void **)&(table)->name = dlsym(library, #name))

static void load_driver(void)
{
    fa_driver *driver  = &process.driver;
    void      *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(process.why_not, sizeof process.why_not, "no CUDA device: libcuda.so.1, the driver's library, was not "
                                                          "found");
        return;
    }
#define X(name, arguments)                                                                                      \
    if (!FIND(library, driver, name)) {                                                                             \
        snprintf(process.why_not, sizeof process.why_not,                                                           \
                 "no CUDA device: the driver lacks %s; a driver for CUDA 12.0 or later is needed", #name);            \
        return;                                                                                                     \
    }
    FA_DRIVER_FUNCTIONS(X)
#undef X
    CUresult result = driver->cuInit(0);
    if (result == CUDA_SUCCESS)
        result = driver->cuDeviceGetCount(&driver->num_devices);
    if (result != CUDA_SUCCESS || driver->num_devices == 0) {
        const char *name = "CUDA_ERROR_NO_DEVICE";
        if (result != CUDA_SUCCESS && driver->cuGetErrorName(result, &name) != CUDA_SUCCESS)
            name = "unknown error";
        snprintf(process.why_not, sizeof process.why_not, "no CUDA device: the driver reports %s%s", name,
                 result == CUDA_ERROR_NOT_INITIALIZED ? " (a process forked after CUDA was in use cannot use it)" : "");
        return;
    }
    driver->cuDriverGetVersion(&driver->version);
    process.found = true;
}

flash_attn_status fa_driver_get(const fa_driver **driver)
{
    pthread_once(&process.once, load_driver);
    if (!process.found)
        return fa_fail(FLASH_ATTN_NO_DEVICE, "%s", process.why_not);
    *driver = &process.driver;
    return FLASH_ATTN_OK;
}

flash_attn_status fa_driver_check(const fa_driver *driver, CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return FLASH_ATTN_OK;
    const char *name = "unknown error", *text = "";
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &text);
    return fa_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? FLASH_ATTN_NO_MEMORY : FLASH_ATTN_LAUNCH, "%s failed: %s (%s)%s",
                   what, name, text,
                   result == CUDA_ERROR_NOT_INITIALIZED ? "; a process forked after CUDA was in use cannot use it" : "");
}

static void *open_nvrtc(int driver_version)
{
    enum { NAMES = 2 };
    static const char *const folders[] = {"", "/usr/local/cuda/lib64/"};
    const char              *names[NAMES] = {"libnvrtc.so.13", "libnvrtc.so.12"};
    void                    *library = NULL;
    char                     file[64];
    if (driver_version > 0 && driver_version < 13000) { /* which need not load what a compiler of CUDA 13 built */
        names[0] = "libnvrtc.so.12";
        names[1] = "libnvrtc.so.13";
    }
    for (int i = 0; i < NAMES && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    for (size_t f = 0; f < sizeof folders / sizeof *folders; f++)
        for (int i = 0; i < NAMES && !library; i++) {
            snprintf(file, sizeof file, "%s%s", folders[f], names[i]);
            library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        }
    return library;
}

flash_attn_status fa_nvrtc_load(fa_nvrtc *nvrtc, const char *path, int driver_version)
{
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : open_nvrtc(driver_version);
    if (!library && path)
        return fa_fail(FLASH_ATTN_COMPILE, "nvrtc_path %s cannot be loaded: %s", path, dlerror());
    if (!library)
        return fa_fail(FLASH_ATTN_COMPILE, "NVRTC, the compiler of GPU kernels, was not found: neither libnvrtc.so.13 "
                                           "nor libnvrtc.so.12; install it, or fill a folder with `flashattn compile`");
#define X(name, arguments)          \
    if (!FIND(library, nvrtc, name)) \
        return fa_fail(FLASH_ATTN_COMPILE, "the NVRTC found lacks %s; version 12.4 or later is needed", #name);
    FA_NVRTC_FUNCTIONS(X)
#undef X
    int major = 0, minor = 0;
    nvrtc->nvrtcVersion(&major, &minor);
    nvrtc->version = major * 1000 + minor * 10;
    if (nvrtc->version < 12040)
        return fa_fail(FLASH_ATTN_COMPILE, "the NVRTC found is %d.%d; version 12.4 or later is needed", major, minor);
    return FLASH_ATTN_OK;
}
