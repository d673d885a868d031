#include "gpu.h"

#include "case_gpu.h"
#include "cli.h"

#include <string.h>

/* All GPU memory of the command goes through the tests' own loader of the driver; here are its messages. */
struct cli_gpu {
    const case_gpu    *device;
    const case_memory *memory;
};

static void fail(const cli_gpu *gpu, const char *what) { cli_fail("the GPU: %s: %s", what, gpu->device->error()); }

int cli_gpu_open(int index, cli_gpu **gpu)
{
    static cli_gpu opened; /* one device at a time */
    char           why[200];
    *gpu          = NULL;
    opened.memory = case_gpu_memory(index, why, sizeof why);
    if (!opened.memory)
        return cli_fail("the GPU: %s", why);
    opened.device = case_gpu_get();
    *gpu          = &opened;
    return CLI_GO_ON;
}

void cli_gpu_close(cli_gpu *gpu)
{
    if (gpu)
        gpu->device->close();
}

void *cli_gpu_allocate(cli_gpu *gpu, size_t bytes)
{
    void *memory = gpu->device->alloc(bytes);
    if (!memory)
        fail(gpu, "allocating memory");
    return memory;
}

bool cli_gpu_fill(cli_gpu *gpu, void *device, unsigned char byte, size_t bytes)
{
    bool done = bytes == 0 || gpu->device->fill(device, byte, bytes);
    if (!done)
        fail(gpu, "filling memory");
    return done;
}

typedef struct timed {
    bool (*run)(void *arg);
    void *arg;
    bool  refused; /* and has said so itself */
} timed;

static bool run_timed(void *argument)
{
    timed *call   = argument;
    call->refused = !call->run(call->arg);
    return !call->refused;
}

bool cli_gpu_time(cli_gpu *gpu, bool (*run)(void *arg), void *arg, int launches, double *milliseconds)
{
    timed call = {run, arg, false};
    bool  done = gpu->device->time(run_timed, &call, launches, milliseconds);
    if (!done && !call.refused)
        fail(gpu, "timing");
    return done;
}

void *cli_gpu_upload(void *user, const void *host, size_t bytes)
{
    cli_gpu *gpu = user;
    return gpu->memory->upload(gpu->memory->user, host, bytes);
}

bool cli_gpu_download(void *user, void *host, const void *device, size_t bytes)
{
    cli_gpu *gpu  = user;
    bool     done = bytes == 0 || gpu->memory->download(gpu->memory->user, host, device, bytes);
    if (!done)
        fail(gpu, "reading the results");
    return done;
}

void cli_gpu_release(void *user, void *device)
{
    cli_gpu *gpu = user;
    gpu->memory->release(gpu->memory->user, device);
}
