/* The CUDA backend's own parts: what a call will launch (plan.c), on which device and how (launch.c). */
#ifndef FA_CUDA_H
#define FA_CUDA_H

#include "cuda/jit.h"
#include "cuda/kernels/args.h"
#include "cuda/tune.h"

#include <pthread.h>
#include <stdatomic.h>

/* ---- a plan: all launches of one call, with their arguments ---- */

enum { FA_MAX_LAUNCHES = 6 };

typedef struct fa_launch {
    fa_key  key;
    int64_t blocks;  /* 0: nothing to do. For upload: 1 */
    int     cluster; /* so many neighbouring blocks run at the same time; divides blocks */
    bool    stays;   /* a block takes one piece of work after the other: as many as run at once are enough */
} fa_launch;

struct fa_rung; /* ladder.h */

/* What plans want to know of a GPU beside its compute capability. */
typedef struct fa_chip {
    int multiprocessors;
    int gigabytes; /* that its memory reads a second, at most */
} fa_chip;

typedef struct fa_plan {
    const fa_tune_row    *row;
    const struct fa_rung *rung; /* NULL: not of the ladder */
    fa_launch          launch[FA_MAX_LAUNCHES]; /* in order */
    int                num_launches, main; /* main: the one that explain names */
    fa_chip            chip;
    bool               has_maps;           /* kernels load by the tensor memory accelerator */
    fa_args            args;
    void              *zero; /* part of the workspace to be zeroed before the first launch */
    size_t             zero_bytes;
    size_t             slices_bytes, offsets_bytes; /* host lists to be uploaded to args.slices, args.slice_offsets */
    size_t             documents_bytes;             /* likewise to args.cu_seqlens_q, and cu_seqlens_k behind */
    size_t             workspace_bytes;
} fa_plan;

/* Choose kernels and tiles for a GPU of this compute capability (as fa_tune_arch gives it; chip NULL: a large one) and fill in all but the workspace's
 * addresses. name: that kernel only; NULL: the best. */
flash_attn_status fa_plan_make(const fa_call *call, int arch, const fa_chip *chip, const char *name, fa_plan *plan);

/* Give the workspace its place: plan->workspace_bytes from `base`, which is 256-byte aligned. */
void fa_plan_place(const fa_call *call, fa_plan *plan, char *base);

/* A launch of a kernel that has one row for all: upload, merge, append, combine, ... */
fa_key fa_plan_small_key(enum fa_kernel_id kernel, int arch);
int    fa_plan_threads(const fa_key *key);

fa_view fa_plan_view(const flash_attn_tensor *t);

/* ---- devices and loaded kernels ---- */

enum { FA_MAX_DEVICES = 64, FA_KERNEL_BUCKETS = 512 };

typedef struct fa_device {
    atomic_int ready; /* 1: the fields below are set */
    CUdevice   device;
    CUcontext  primary;  /* retained when first needed */
    CUmemoryPool pool;   /* of workspaces of our own; made when first needed, under fa_cuda.lock */
    int        arch, built_for; /* compute capability; what kernels are built for, 0: none */
    fa_chip    chip;
    int        max_shared_bytes;
    bool       has_pools, has_tensor_maps;
} fa_device;

typedef struct fa_kernel {
    fa_key            key;
    CUlibrary         library;
    CUkernel          kernel;
    fa_resources      resources;
    int               threads;
    atomic_bool       loaded;
    bool              building; /* under fa_cuda.lock */
    _Atomic uint64_t  devices;  /* bit i: set up on device i */
    struct fa_kernel *next;
} fa_kernel;

struct fa_cuda {
    const fa_driver     *driver; /* NULL: none; then kernels can only be compiled */
    flash_attn_status    no_driver;
    char                 why_not[256];
    char                *forced_kernel; /* option; NULL: the best */
    pthread_mutex_t      lock;    /* of devices' set-up and of who builds what */
    pthread_mutex_t      compile; /* of jit */
    pthread_cond_t       built;
    fa_jit               jit;
    fa_device            devices[FA_MAX_DEVICES];
    _Atomic(fa_kernel *) kernels[FA_KERNEL_BUCKETS];
};

/* The context's CUDA part, made if this is the first CUDA call. Works without a driver. */
flash_attn_status fa_cuda_of(flash_attn_context *context, fa_cuda **cuda);

/* NO_DEVICE if there is no such device. */
flash_attn_status fa_device_get(fa_cuda *cuda, int32_t index, fa_device **device);

/* A place to run: a device whose context is current between enter and leave. */
typedef struct fa_place {
    fa_cuda         *cuda;
    const fa_driver *driver;
    fa_device       *device;
    int              index;
    bool             pushed;
    CUstream         stream;
} fa_place;

/* NO_DEVICE if there is none. The current context stays if it is of that device; else the primary one is pushed. */
flash_attn_status fa_place_enter(flash_attn_context *context, int32_t index, void *stream, fa_place *place);
void              fa_place_leave(fa_place *place);

/* A kernel ready to launch at a place: found, or built and loaded. */
flash_attn_status fa_kernel_get(const fa_place *place, const fa_key *key, fa_kernel **kernel);

/* Launch blocks of a kernel in clusters of `cluster`; arguments is the address of the struct that it takes; maps: of the second one, for kernels that use
 * the tensor memory accelerator, else NULL. blocks 0: nothing. */
flash_attn_status fa_kernel_launch(const fa_place *place, const fa_kernel *kernel, int64_t blocks, int cluster,
                                   void *arguments, fa_maps *maps);

/* Descriptions of Q, K and V for the tensor memory accelerator: boxes of 64 columns and of tile_q or tile_k rows, 128-byte
 * swizzle, or of FP8's panels. 16-bit elements and FP8; fa_maps_fit says whether the strides can be described. */
bool              fa_maps_fit(const fa_call *call);
bool              fa_ragged_maps_fit(const fa_call *call); /* of Q, K, V, O, and of the gradients that are asked for */
bool              fa_map_fits(const flash_attn_tensor *t);
bool              fa_bias_map_fits(const fa_call *call); /* of its bias, F32 too */
bool              fa_dbias_map_fits(const fa_call *call); /* of its bias's gradient, of Q's dtype; without dropout */
/* forward_latent_sm90, forward_few_sm90: a tile of Q's rows, queries of all heads of a key head, is one box for each 64 columns. */
bool              fa_packed_q_boxes(const fa_call *call, int tile_q);
/* Blocks of forward_latent_sm90 or forward_wide_sm90 are in pairs, each of which asks for a half of a tile of keys. */
bool              fa_latent_in_pairs(const fa_call *call, const fa_tune_row *row);
/* Rows of K and V that one box has: a tile's, or what divides a tile and a page. */
int               fa_page_piece(const fa_call *call, int tile_k);
int               fa_map_entry_rows(const flash_attn_tensor *t); /* rows from one entry to the next, as a ragged map counts them; -1: it cannot */
int               fa_map_gradient_rows(const flash_attn_tensor *t); /* the same of dK or dV; -1 too where it is float32 or not asked for */
flash_attn_status fa_maps_make(const fa_driver *driver, const fa_call *call, const fa_tune_row *row, fa_maps *maps);

/* Copy host words to the device through launches of the kernel `upload`, so that a captured graph keeps its own copy. */
flash_attn_status fa_upload(const fa_place *place, const fa_kernel *upload, void *to, const void *from, size_t bytes);

#endif
