/*
 * The CUDA driver and NVRTC as this library uses them: own declarations of the few functions, found by dlopen, so that
 * building needs no CUDA and running needs none until a CUDA problem comes. Names, values and layouts are those of the
 * CUDA Driver API and NVRTC manuals, which keep them stable from CUDA 12 on.
 */
#ifndef FA_CUDA_DRIVER_H
#define FA_CUDA_DRIVER_H

#include "call.h"

typedef int                    CUresult;
typedef int                    CUdevice;
typedef struct CUctx_st       *CUcontext;
typedef struct CUstream_st    *CUstream;
typedef struct CUlib_st       *CUlibrary;
typedef struct CUkern_st      *CUkernel; /* valid in every context: a library is loaded once for all devices */
typedef struct CUfunc_st      *CUfunction;
typedef struct CUpool_st      *CUmemoryPool;
typedef unsigned long long     CUdeviceptr;
typedef struct CUmemPoolProps {
    int alloc_type, handle_types;
    struct {
        int type, id;
    } location;
    void          *windows;
    size_t         max_bytes; /* 0: as many as the system has */
    unsigned short usage;
    unsigned char  reserved[54];
} CUmemPoolProps;
typedef struct CUlaunchAttribute {
    int id, padding;
    union {
        unsigned int cluster[3]; /* blocks in x, y, z */
        int          yes;
        uint64_t     all[8];
    } value;
} CUlaunchAttribute;
typedef struct CUlaunchConfig {
    unsigned int       grid[3], block[3];
    unsigned int       shared_bytes;
    CUstream           stream;
    CUlaunchAttribute *attributes;
    unsigned int       num_attributes;
} CUlaunchConfig;

enum {
    CUDA_SUCCESS               = 0,
    CUDA_ERROR_OUT_OF_MEMORY   = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE       = 100,

    CU_MEM_ALLOCATION_TYPE_PINNED     = 1,
    CU_MEM_LOCATION_TYPE_DEVICE       = 1,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4, /* bytes that a synchronisation leaves in the pool, uint64_t */

    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION                 = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT               = 16,
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE                  = 36,
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH            = 37,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE                      = 38,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR           = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR           = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN  = 97,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED             = 115,
    CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED        = 127,

    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES             = 1,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
};

/* X(name, arguments) */
#define FA_DRIVER_FUNCTIONS(X)                                                                                      \
    X(cuInit, (unsigned int flags))                                                                                 \
    X(cuDriverGetVersion, (int *version))                                                                           \
    X(cuGetErrorName, (CUresult error, const char **name))                                                          \
    X(cuGetErrorString, (CUresult error, const char **text))                                                        \
    X(cuDeviceGetCount, (int *count))                                                                               \
    X(cuDeviceGet, (CUdevice *device, int ordinal))                                                                 \
    X(cuDeviceGetName, (char *name, int length, CUdevice device))                                                   \
    X(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                           \
    X(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device))                                                        \
    X(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device))                                              \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                              \
    X(cuCtxGetDevice, (CUdevice *device))                                                                           \
    X(cuCtxPushCurrent_v2, (CUcontext context))                                                                     \
    X(cuCtxPopCurrent_v2, (CUcontext *context))                                                                     \
    X(cuLibraryLoadData, (CUlibrary *library, const void *code, int *jit_options, void **jit_values,                \
                          unsigned int num_jit, int *options, void **values, unsigned int num_options))             \
    X(cuLibraryUnload, (CUlibrary library))                                                                         \
    X(cuLibraryGetKernel, (CUkernel *kernel, CUlibrary library, const char *name))                                  \
    X(cuKernelGetFunction, (CUfunction *function, CUkernel kernel))                                                 \
    X(cuKernelGetAttribute, (int *value, int attribute, CUkernel kernel, CUdevice device))                          \
    X(cuKernelSetAttribute, (int attribute, int value, CUkernel kernel, CUdevice device))                           \
    X(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))       \
    X(cuMemAlloc_v2, (CUdeviceptr *memory, size_t bytes))                                                           \
    X(cuMemFree_v2, (CUdeviceptr memory))                                                                           \
    X(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *props))                                           \
    X(cuMemPoolDestroy, (CUmemoryPool pool))                                                                        \
    X(cuMemPoolSetAttribute, (CUmemoryPool pool, int attribute, void *value))                                       \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr *memory, size_t bytes, CUmemoryPool pool, CUstream stream))             \
    X(cuMemFreeAsync, (CUdeviceptr memory, CUstream stream))                                                        \
    X(cuMemsetD8Async, (CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream))                    \
    X(cuTensorMapEncodeTiled,                                                                                       \
      (void *map, int type, unsigned int rank, void *address, const uint64_t *dims, const uint64_t *strides,        \
       const unsigned int *box, const unsigned int *element_strides, int interleave, int swizzle, int l2, int fill))

typedef struct fa_driver {
#define X(name, arguments) CUresult(*name) arguments;
    FA_DRIVER_FUNCTIONS(X)
#undef X
    int version; /* 12040 for 12.4 */
    int num_devices;
} fa_driver;

/* The driver, loaded and initialised once for the process. NO_DEVICE with a sentence if there is none. */
flash_attn_status fa_driver_get(const fa_driver **driver);

/* OK for CUDA_SUCCESS; else NO_MEMORY or LAUNCH with "WHAT failed: NAME (text)". */
flash_attn_status fa_driver_check(const fa_driver *driver, CUresult result, const char *what);

/* ---- NVRTC ---- */

typedef struct fa_nvrtc_program fa_nvrtc_program;

#define FA_NVRTC_FUNCTIONS(X)                                                                                      \
    X(nvrtcVersion, (int *major, int *minor))                                                                       \
    X(nvrtcCreateProgram, (fa_nvrtc_program * *program, const char *text, const char *name, int num_headers,        \
                           const char *const *headers, const char *const *names))                                   \
    X(nvrtcDestroyProgram, (fa_nvrtc_program * *program))                                                           \
    X(nvrtcCompileProgram, (fa_nvrtc_program * program, int num_options, const char *const *options))               \
    X(nvrtcGetProgramLogSize, (fa_nvrtc_program * program, size_t *bytes))                                          \
    X(nvrtcGetProgramLog, (fa_nvrtc_program * program, char *log))                                                  \
    X(nvrtcGetCUBINSize, (fa_nvrtc_program * program, size_t *bytes))                                               \
    X(nvrtcGetCUBIN, (fa_nvrtc_program * program, char *cubin))                                                     \
    X(nvrtcGetNumSupportedArchs, (int *count))                                                                      \
    X(nvrtcGetSupportedArchs, (int *archs))

enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_INVALID_OPTION = 5 };

typedef struct fa_nvrtc {
#define X(name, arguments) int(*name) arguments;
    FA_NVRTC_FUNCTIONS(X)
#undef X
    int version; /* 13000 for 13.0 */
} fa_nvrtc;

/*
 * Load NVRTC. path: a file to open, or NULL: one that the process has already loaded (a Python wheel's, say), else the
 * system's libnvrtc.so.13 or .12, else CUDA's usual folder; with a driver before CUDA 13 (driver_version; 0: none) the .12
 * before the .13. COMPILE with a sentence if there is none or it is older than 12.4. The library stays loaded: unloading
 * a compiler that other code may share gains nothing.
 */
flash_attn_status fa_nvrtc_load(fa_nvrtc *nvrtc, const char *path, int driver_version);

#endif
