/*
 * libcuda.so.1 for a machine without a GPU: the functions of the driver that the library and its tests call. Memory is the host's, a
 * kernel is a shared object that the emulated NVRTC (nvrtc.c) has built, and a launch runs its blocks one after the other
 * before it returns. For tests alone: it is found by LD_LIBRARY_PATH.
 *
 * EMULATOR_ARCH: compute capability (90); EMULATOR_DEVICES: how many devices (2); EMULATOR_MULTIPROCESSORS: of each (132);
 * EMULATOR_TMA: 1 if they have Hopper's tensor maps, so that its own kernels are taken (0); EMULATOR_SEED: of the lots that are drawn (1).
 */
#include "fibers.h"
#include "object.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_IMAGE = 200, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
    INVALID_CLUSTER_SIZE = 912
};
enum { CLUSTER_DIMENSION = 4 }; /* a launch's attribute */
enum { MAX_DEVICES = 8, MAX_DEPTH = 8, MAX_PARAMETERS = 2 };

static int number(const char *name, int if_absent)
{
    const char *text = getenv(name);
    return text ? atoi(text) : if_absent;
}

/* ---- devices and contexts ---- */

typedef struct context {
    int device;
} context;

static context primary[MAX_DEVICES];
static _Thread_local context *stack[MAX_DEPTH];
static _Thread_local int      depth;

static context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

int cuInit(unsigned flags)
{
    for (int n = 0; n < MAX_DEVICES; n++)
        primary[n].device = n;
    return flags == 0 ? OK : INVALID_VALUE;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return OK;
}

int cuDeviceGetCount(int *count)
{
    *count = number("EMULATOR_DEVICES", 2);
    return OK;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < number("EMULATOR_DEVICES", 2) ? OK : INVALID_VALUE;
}

int cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, (size_t)length, "emulated %s %d", number("EMULATOR_TMA", 0) ? "Hopper" : "GPU", device);
    return OK;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = (size_t)1 << 34;
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    enum { MULTIPROCESSORS = 16, MEMORY_KHZ = 36, MEMORY_BITS = 37, L2_BYTES = 38, MAJOR = 75, MINOR = 76, MAX_SHARED = 97, TENSOR_MAPS = 127 };
    int arch = number("EMULATOR_ARCH", 90);
    (void)device;
    switch (attribute) {
    case MULTIPROCESSORS: *value = number("EMULATOR_MULTIPROCESSORS", 132); break;
    case MEMORY_KHZ: *value = 1000000; break;
    case MEMORY_BITS: *value = 100 * number("EMULATOR_MULTIPROCESSORS", 132); break; /* 25 GB/s a multiprocessor */
    case L2_BYTES: *value = 50 << 20; break;
    case MAJOR: *value = arch / 10; break;
    case MINOR: *value = arch % 10; break;
    case MAX_SHARED: *value = arch == 80 ? 163 << 10 : arch == 90 || arch == 100 ? 227 << 10 : 99 << 10; break;
    case TENSOR_MAPS: *value = number("EMULATOR_TMA", 0); break;
    default: *value = 1;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(context **made, int device)
{
    *made = &primary[device];
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return OK;
}

int cuCtxGetDevice(int *device)
{
    if (!current())
        return INVALID_CONTEXT;
    *device = current()->device;
    return OK;
}

int cuCtxPushCurrent_v2(context *made)
{
    if (depth == MAX_DEPTH)
        return INVALID_CONTEXT;
    stack[depth++] = made;
    return OK;
}

int cuCtxPopCurrent_v2(context **was)
{
    if (depth == 0)
        return INVALID_CONTEXT;
    *was = stack[--depth];
    return OK;
}

int cuCtxSetCurrent(context *made)
{
    if (depth > 0)
        depth--;
    return made ? cuCtxPushCurrent_v2(made) : OK;
}

int cuGetErrorName(int error, const char **name)
{
    *name = error == OK ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return OK;
}

int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* ---- memory: new memory is NaN, so that what nobody has written shows ---- */

enum { MAX_ALLOCATIONS = 4096 };

static struct {
    uint64_t begin, end; /* begin 0: free */
    int      device;
} allocations[MAX_ALLOCATIONS];
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

int cuMemAlloc_v2(uint64_t *memory, size_t bytes)
{
    if (!current())
        return INVALID_CONTEXT;
    void *at = bytes < (size_t)1 << 34 ? aligned_alloc(512, (bytes + 511) / 512 * 512) : NULL;
    if (!at)
        return OUT_OF_MEMORY;
    memset(at, 0xFF, bytes);
    *memory = (uintptr_t)at;
    pthread_mutex_lock(&allocations_lock);
    int n = 0;
    while (n < MAX_ALLOCATIONS - 1 && allocations[n].begin)
        n++;
    allocations[n].begin  = *memory;
    allocations[n].end    = *memory + bytes;
    allocations[n].device = current()->device;
    pthread_mutex_unlock(&allocations_lock);
    return OK;
}

int cuMemFree_v2(uint64_t memory)
{
    pthread_mutex_lock(&allocations_lock);
    for (int n = 0; n < MAX_ALLOCATIONS; n++)
        if (allocations[n].begin == memory)
            allocations[n].begin = 0;
    pthread_mutex_unlock(&allocations_lock);
    free((void *)(uintptr_t)memory);
    return OK;
}

/* A kernel that is given another device's memory would fail on a real one. */
static bool points_to_other_device(const void *parameter, size_t bytes)
{
    bool other = false;
    pthread_mutex_lock(&allocations_lock);
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, (const char *)parameter + at, sizeof word);
        for (int n = 0; n < MAX_ALLOCATIONS && word; n++)
            other |= allocations[n].begin && word >= allocations[n].begin && word < allocations[n].end &&
                     allocations[n].device != current()->device;
    }
    pthread_mutex_unlock(&allocations_lock);
    return other;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    memcpy((void *)(uintptr_t)to, from, bytes);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return OK;
}

int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t bytes)
{
    memset((void *)(uintptr_t)to, byte, bytes);
    return OK;
}

/* ---- kernels ---- */

typedef struct library {
    void *object;
} library;


int cuLibraryLoadData(library **made, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f)
{
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    emulated_object image_copy, *image = &image_copy;
    char                   path[] = "/tmp/emulated-kernel-XXXXXX";
    int                    file;
    memcpy(&image_copy, code, sizeof image_copy);
    *made = NULL;
    if (memcmp(image->magic, EMULATED_MAGIC, sizeof image->magic) != 0 || (file = mkstemp(path)) < 0)
        return INVALID_IMAGE;
    bool     written = write(file, (const char *)code + image->object_at, image->object_bytes) == (ssize_t)image->object_bytes;
    library *loaded  = calloc(1, sizeof *loaded);
    close(file);
    if (written && loaded)
        loaded->object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    if (!loaded || !loaded->object) {
        fprintf(stderr, "emulated GPU: %s\n", dlerror());
        free(loaded);
        return INVALID_IMAGE;
    }
    *made = loaded;
    return OK;
}

int cuLibraryUnload(library *loaded)
{
    dlclose(loaded->object);
    free(loaded);
    return OK;
}

int cuLibraryGetKernel(library **kernel, library *loaded, const char *name)
{
    *kernel = loaded;
    return dlsym(loaded->object, name) ? OK : NOT_FOUND;
}

int cuKernelGetFunction(library **function, library *kernel)
{
    *function = kernel;
    return current() ? OK : INVALID_CONTEXT;
}

int cuKernelGetAttribute(int *value, int attribute, library *kernel, int device)
{
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return OK;
}

int cuKernelSetAttribute(int attribute, int value, library *kernel, int device)
{
    (void)attribute, (void)value, (void)kernel, (void)device;
    return OK;
}

/* ---- streams: everything is done at once, or kept for a graph ---- */

typedef struct operation {
    struct operation *next;
    library          *kernel; /* NULL: a memset */
    unsigned          grid, cluster, threads, shared_bytes;
    void             *parameter[MAX_PARAMETERS];
    uint64_t          to;
    unsigned char     byte;
    size_t            bytes;
} operation;

typedef struct stream {
    operation *first, **last;
    bool       capturing;
} stream;

typedef struct launch_attribute {
    int      id, padding;
    unsigned value[16];
} launch_attribute;

typedef struct launch_config {
    unsigned                grid[3], block[3], shared_bytes;
    stream                 *stream;
    const launch_attribute *attributes;
    unsigned                num_attributes;
} launch_config;

static bool keep(stream *s, operation o)
{
    if (!s || !s->capturing)
        return false;
    operation *kept = malloc(sizeof *kept);
    if (!kept)
        abort();
    *kept    = o;
    *s->last = kept;
    s->last  = &kept->next;
    return true;
}

static void free_parameters(const operation *o)
{
    for (int n = 0; n < MAX_PARAMETERS; n++)
        free(o->parameter[n]);
}

static void run_kernel(const operation *o)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    emulator_kernel        kernel = {.state = dlsym(o->kernel->object, "emulator"), .parameter = (const void *const *)o->parameter, .grid = o->grid,
                                     .cluster = o->cluster, .threads = (int)o->threads, .shared_bytes = (int)o->shared_bytes};
    const unsigned        *at_once = dlsym(o->kernel->object, "emulator_blocks_at_once"); /* else a cluster */
    unsigned               fits    = EMULATOR_MAX_FIBERS / o->threads, most = at_once ? (*at_once < fits ? *at_once : fits) : 1;
    unsigned               count   = most < o->cluster ? o->cluster : most / o->cluster * o->cluster;
    char *(*statics)(size_t *bytes);
    *(void **)&kernel.run = dlsym(o->kernel->object, "emulator_run");
    *(void **)&statics    = dlsym(o->kernel->object, "emulator_statics");
    kernel.statics        = statics(&kernel.statics_bytes);
    kernel.has_async      = at_once != NULL;
    pthread_mutex_lock(&lock);
    for (unsigned block = 0; block < o->grid; block += count)
        emulator_run_blocks(&kernel, block, count < o->grid - block ? count : o->grid - block);
    pthread_mutex_unlock(&lock);
}

int cuLaunchKernelEx(const launch_config *config, library *kernel, void **parameters, void **extra)
{
    (void)extra;
    size_t (*bytes)(unsigned n);
    if (!current())
        return INVALID_CONTEXT;
    *(void **)&bytes = dlsym(kernel->object, "emulator_parameter_bytes");
    for (unsigned n = 0; n < MAX_PARAMETERS; n++)
        if (points_to_other_device(parameters[n], bytes(n)))
            return ILLEGAL_ADDRESS;
    unsigned cluster = 1;
    for (unsigned n = 0; n < config->num_attributes; n++)
        if (config->attributes[n].id == CLUSTER_DIMENSION)
            cluster = config->attributes[n].value[0];
    if (cluster == 0 || config->grid[0] % cluster != 0)
        return INVALID_VALUE;
    if (cluster > EMULATOR_MAX_BLOCKS || (cluster > 1 && number("EMULATOR_ARCH", 90) < 90))
        return INVALID_CLUSTER_SIZE;
    operation o      = {.kernel = kernel, .grid = config->grid[0], .cluster = cluster, .threads = config->block[0],
                        .shared_bytes = config->shared_bytes};
    for (unsigned n = 0; n < MAX_PARAMETERS && bytes(n) > 0; n++) {
        o.parameter[n] = aligned_alloc(64, (bytes(n) + 63) / 64 * 64);
        if (!o.parameter[n])
            return OUT_OF_MEMORY;
        memcpy(o.parameter[n], parameters[n], bytes(n));
    }
    if (keep(config->stream, o))
        return OK;
    run_kernel(&o);
    free_parameters(&o);
    return OK;
}

int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, stream *s)
{
    return keep(s, (operation){.to = to, .byte = byte, .bytes = bytes}) ? OK : cuMemsetD8_v2(to, byte, bytes);
}

int cuMemPoolCreate(void **pool, const void *props)
{
    (void)props;
    *pool = malloc(1);
    return *pool ? OK : OUT_OF_MEMORY;
}

int cuMemPoolDestroy(void *pool)
{
    free(pool);
    return OK;
}

int cuMemPoolSetAttribute(void *pool, int attribute, void *value) { return pool && attribute == 4 && value ? OK : INVALID_VALUE; }

int cuMemAllocFromPoolAsync(uint64_t *memory, size_t bytes, void *pool, stream *s)
{
    (void)s;
    return pool ? cuMemAlloc_v2(memory, bytes) : INVALID_VALUE;
}

/* A graph keeps the memory that was allocated while it was made. */
int cuMemFreeAsync(uint64_t memory, stream *s) { return s && s->capturing ? OK : cuMemFree_v2(memory); }

int cuStreamCreate(stream **made, unsigned flags)
{
    (void)flags;
    *made = calloc(1, sizeof **made);
    return *made ? OK : OUT_OF_MEMORY;
}

int cuStreamDestroy_v2(stream *s)
{
    free(s);
    return OK;
}

int cuStreamSynchronize(stream *s)
{
    (void)s;
    return current() ? OK : INVALID_CONTEXT;
}

int cuStreamBeginCapture_v2(stream *s, int mode)
{
    (void)mode;
    *s = (stream){.capturing = true, .last = &s->first};
    return OK;
}

int cuStreamEndCapture(stream *s, operation **graph)
{
    *graph = s->first;
    *s     = (stream){0};
    return OK;
}

int cuGraphInstantiateWithFlags(operation **executable, operation *graph, unsigned long long flags)
{
    (void)flags;
    *executable = graph;
    return OK;
}

int cuGraphDestroy(operation *graph)
{
    (void)graph; /* the executable is the graph */
    return OK;
}

int cuGraphLaunch(const operation *executable, stream *s)
{
    (void)s;
    for (const operation *o = executable; o; o = o->next)
        if (o->kernel)
            run_kernel(o);
        else
            cuMemsetD8_v2(o->to, o->byte, o->bytes);
    return OK;
}

int cuGraphExecDestroy(operation *executable)
{
    while (executable) {
        operation *next = executable->next;
        free_parameters(executable);
        free(executable);
        executable = next;
    }
    return OK;
}

/* ---- events ---- */

int cuEventCreate(struct timespec **event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? OK : OUT_OF_MEMORY;
}

int cuEventDestroy_v2(struct timespec *event)
{
    free(event);
    return OK;
}

int cuEventRecord(struct timespec *event, stream *s)
{
    (void)s;
    return clock_gettime(CLOCK_MONOTONIC, event) == 0 ? OK : INVALID_VALUE;
}

int cuEventSynchronize(struct timespec *event)
{
    (void)event;
    return OK;
}

int cuEventElapsedTime(float *milliseconds, const struct timespec *begin, const struct timespec *end)
{
    *milliseconds = (float)((double)(end->tv_sec - begin->tv_sec) * 1e3 + (double)(end->tv_nsec - begin->tv_nsec) * 1e-6);
    return OK;
}
