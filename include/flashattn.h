/*
 * flashattn: exact attention, fast, in C.
 *
 *     O = softmax(scale * Q K^T) V      and its gradients,
 *
 * computed tile by tile in memory linear in the sequence (FlashAttention-2: Dao, "FlashAttention-2: Faster
 * Attention with Better Parallelism and Work Partitioning", 2023, Algorithms 1 and 2).
 *
 * The shortest program:
 *
 *     flash_attn_problem p = {0};                                      // zero always means the default
 *     p.q = (flash_attn_tensor){.data = q, .shape = {batch, seqlen, heads, head_dim}};
 *     p.k = (flash_attn_tensor){.data = k, .shape = {batch, seqlen, heads, head_dim}};
 *     p.v = (flash_attn_tensor){.data = v, .shape = {batch, seqlen, heads, head_dim}};
 *     p.o = (flash_attn_tensor){.data = o};
 *     p.mask = FLASH_ATTN_CAUSAL;
 *     if (flash_attn_forward(NULL, &p, NULL) != FLASH_ATTN_OK)
 *         puts(flash_attn_last_error());
 *
 * Rules for every function
 *  - A failed call returns a status other than FLASH_ATTN_OK, leaves one sentence in flash_attn_last_error() and has
 *    written nothing to the caller's tensors. The library never prints, aborts or exits.
 *  - Calls on different contexts, or on one context from several threads, are safe.
 *  - Every struct may be zeroed and partly filled; zero means the default. `reserved` must stay zero.
 *  - Nothing is read or written outside what a tensor's shape and strides describe.
 *  - What is written shares no memory with what is read or otherwise written, nor with itself (stride 0); INVALID
 *    otherwise. Interleaved views of one packed buffer, [b, s, 3, h, d], are told apart.
 *
 * Semantics, for all devices
 *  - Scores: s = scale * (q . k); then softcap * tanh(s / softcap); then + bias, + ALiBi; then the mask.
 *  - Masks are aligned to the bottom right: query i may see key j iff
 *        j <= i + (seqlen_k - seqlen_q) + right    and    j >= i + (seqlen_k - seqlen_q) - left,
 *    where causal is (left unlimited, right = 0).
 *  - A query that sees no key has output 0, LSE -inf (with a sink: the sink), and gradient 0. Lengths may be 0.
 *  - What is masked or unused never leaks: NaN or Inf there changes nothing.
 *  - LSE is the natural logarithm of the row's sum of exp(score), with the sink and all of the above included.
 *  - float32 in is float32 accuracy; 16-bit in accumulates in float32.
 *  - The order of arithmetic depends on the shape of a sequence alone, never on batch size or number of threads.
 */
#ifndef FLASHATTN_H
#define FLASHATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FLASH_ATTN_VERSION_MAJOR 0
#define FLASH_ATTN_VERSION_MINOR 1
#define FLASH_ATTN_VERSION_PATCH 0

/* Exported symbols. Nothing else is visible in the shared library. */
#if defined(__GNUC__)
#define FLASH_ATTN_API __attribute__((visibility("default")))
#else
#define FLASH_ATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef enum flash_attn_status {
    FLASH_ATTN_OK          = 0,
    FLASH_ATTN_INVALID     = 1, /* the caller's mistake: a field has a value that means nothing */
    FLASH_ATTN_UNSUPPORTED = 2, /* a valid problem for which this device has no kernel */
    FLASH_ATTN_NO_DEVICE   = 3, /* no such device, or its driver is missing */
    FLASH_ATTN_NO_MEMORY   = 4, /* host or device memory ran out, or the given workspace is too small */
    FLASH_ATTN_COMPILE     = 5, /* a GPU kernel could not be built; the message holds the compiler's first line */
    FLASH_ATTN_LAUNCH      = 6, /* the GPU driver refused or failed a launch */
    FLASH_ATTN_TRANSPORT   = 7  /* the caller's transport between ranks failed, or another rank did */
} flash_attn_status;

/* A constant, never NULL: "ok", "invalid argument", ... for any value. */
FLASH_ATTN_API const char *flash_attn_status_string(flash_attn_status status);

/* The calling thread's last failure as one sentence that names the field, its value and what was expected.
 * "" if none. Valid until the thread's next failing call. */
FLASH_ATTN_API const char *flash_attn_last_error(void);

/* The library's own version as 10000 * major + 100 * minor + patch. */
FLASH_ATTN_API int flash_attn_version(void);

/* ---- tensors ------------------------------------------------------------------------------------------------ */

typedef enum flash_attn_dtype {
    FLASH_ATTN_F32    = 0, /* IEEE binary32 */
    FLASH_ATTN_F16    = 1, /* IEEE binary16 */
    FLASH_ATTN_BF16   = 2, /* bfloat16 */
    FLASH_ATTN_F8E4M3 = 3  /* OCP FP8 E4M3 (finite, one NaN); inputs only, with descales */
} flash_attn_dtype;

/* A borrowed view of up to four dimensions, as in DLPack. The caller owns the memory, which must stay valid for the
 * call (for CUDA: until the stream has run it). */
typedef struct flash_attn_tensor {
    void            *data;      /* first element, host or device memory as the problem's device says */
    flash_attn_dtype dtype;
    int32_t          reserved;  /* 0 */
    int64_t          shape[4];  /* an output, and o, lse, dout of a backward, may leave all four 0: as q, k, v say */
    int64_t          stride[4]; /* in elements, any sign; all four 0: contiguous, last dimension fastest */
} flash_attn_tensor;

/* ---- devices and contexts ----------------------------------------------------------------------------------- */

typedef enum flash_attn_device_type {
    FLASH_ATTN_CPU       = 0,
    FLASH_ATTN_CUDA      = 1,
    FLASH_ATTN_REFERENCE = 2 /* host memory; the formula itself, in double, one thread: slow, for checking others */
} flash_attn_device_type;

typedef struct flash_attn_device {
    flash_attn_device_type type;
    int32_t                index; /* CUDA ordinal; 0 otherwise */
} flash_attn_device;

/* The CPU's instruction-set tiers. Each architecture's rise in the order of this list. */
typedef enum flash_attn_isa {
    FLASH_ATTN_ISA_AUTO      = 0, /* the best that this machine runs */
    FLASH_ATTN_ISA_SCALAR    = 1, /* plain C */
    FLASH_ATTN_ISA_NEON      = 2, /* aarch64 */
    FLASH_ATTN_ISA_AVX2      = 3, /* x86-64: AVX2, FMA, F16C */
    FLASH_ATTN_ISA_AVX512    = 4, /* x86-64: AVX-512 F, BW, DQ, VL */
    FLASH_ATTN_ISA_AVX512_BF16 = 8, /* x86-64: AVX512_BF16 over AVX-512: bfloat16 and FP8, all else as with AVX-512 */
    FLASH_ATTN_ISA_AMX       = 5, /* x86-64: AMX-TILE, AMX-BF16 over AVX-512 */
    FLASH_ATTN_ISA_AMX_FP16  = 6, /* x86-64: AMX-FP16 over AMX: float16 as it is, all else as with AMX */
    FLASH_ATTN_ISA_NEON_BF16 = 7 /* aarch64: FEAT_BF16 over NEON: bfloat16's matrix products, all else as with NEON */
} flash_attn_isa;

/* A caller's own thread pool: run task(arg, i) once for every i in [0, count), in any order, at once or one after
 * another, and return when all are done. The library calls it with count <= the number of threads. */
typedef void (*flash_attn_task)(void *arg, int64_t index);
typedef void (*flash_attn_parallel_for)(void *pool, int64_t count, flash_attn_task task, void *arg);

typedef struct flash_attn_options {
    int32_t                 num_threads;  /* 0: FLASH_ATTN_NUM_THREADS, else the cores this process may use */
    flash_attn_isa          max_isa;      /* cap on the tier; AUTO: FLASH_ATTN_MAX_ISA, else none. AMX by name: also for
                                             short sequences, where AUTO may take AVX-512 because it is faster */
    flash_attn_parallel_for parallel_for; /* NULL: the library's own threads. Not with use_openmp */
    void                   *pool;         /* first argument of parallel_for */
    bool                    no_amx_split; /* do not run float32 and float16 as exact bfloat16 pieces on AMX */
    bool                    use_openmp;   /* run on the threads of the OpenMP runtime that the process has loaded, as many
                                             as it would use itself; the library's own if there is none. For a program
                                             whose other work is OpenMP's: two pools would wait in each other's way. */
    const char             *kernel;        /* CUDA: run this kernel, by the name that explain gives; NULL: the best. A backward's
                                             name leaves the forward as it is */
    const char             *kernel_folder; /* CUDA: look here first for kernels that flash_attn_compile built; NULL: none */
    const char             *nvrtc_path;    /* CUDA: the compiler's library, libnvrtc.so; NULL: one that the process has
                                              loaded, else the system's */
    const char             *tune_file;     /* CPU: choices that flash_attn_tune stored; NULL: FLASH_ATTN_TUNE_FILE, else
                                              the user's cache; "": none, the defaults */
    uint64_t                reserved[4];
} flash_attn_options;

/* Threads, compiled GPU kernels and tuning belong to a context. NULL for a context means one that the process shares,
 * made with default options on first use. */
typedef struct flash_attn_context flash_attn_context;

/* Make a context. options may be NULL. FLASH_ATTN_NUM_THREADS (1 to 4096) and FLASH_ATTN_MAX_ISA (scalar, neon, avx2,
 * neon-bf16, avx512, avx512-bf16, amx, amx-fp16) are read where the option is 0, FLASH_ATTN_TUNE_FILE (an absolute path, or "off": none) where
 * tune_file is NULL. FLASH_ATTN_ASSUME=amx-fp16 says that the processor, one with AMX, has AMX-FP16 though it does not report it, as
 * under a hypervisor that hides it. The instruction is tried once in a child process of which nobody is told: features
 * then holds amx-fp16:assumed, or amx-fp16:absent if it faulted. A tune file may say so too. None of them, nor the cache, is read in a process with
 * raised privileges. Errors: INVALID (context NULL, num_threads < 0 or > 4096, unknown max_isa, a value of the environment that means nothing), NO_MEMORY.
 * A cap below what the machine has is honoured; a tier that the machine lacks is never chosen. */
FLASH_ATTN_API flash_attn_status flash_attn_create(flash_attn_context **context, const flash_attn_options *options);

/* Free a context; NULL is allowed. No call on it may be running, nor what its calls have queued on a stream. */
FLASH_ATTN_API void flash_attn_destroy(flash_attn_context *context);

/* Where a context's choices of tiles for the CPU come from. */
typedef enum flash_attn_tuning {
    FLASH_ATTN_TUNING_DEFAULT  = 0, /* nothing is stored, or it is turned off */
    FLASH_ATTN_TUNING_MEASURED = 1, /* flash_attn_tune */
    FLASH_ATTN_TUNING_FOREIGN  = 2, /* the defaults: what is stored is of another processor or version */
    FLASH_ATTN_TUNING_DAMAGED  = 3  /* the defaults: what is stored is not whole */
} flash_attn_tuning;

typedef struct flash_attn_device_info {
    char     name[64];      /* the processor's own name */
    char     isa[16];       /* CPU: the tier in use, "avx512"; CUDA: "sm_90"; REFERENCE: "double" */
    char     features[256]; /* what was found, space separated */
    int32_t  num_cores;     /* CPU: cores this process may use; CUDA: multiprocessors */
    int32_t  num_threads;   /* CPU: threads that a call uses */
    int64_t  l1_bytes, l2_bytes, l3_bytes; /* data caches, one core's or the shared one; 0: not known */
    int64_t  memory_bytes;
    flash_attn_tuning tuning;    /* CPU */
    int32_t           reserved0;
    uint64_t          reserved[7];
} flash_attn_device_info;

/* Describe a device as this context would use it. Errors: INVALID, NO_DEVICE. */
FLASH_ATTN_API flash_attn_status flash_attn_get_device_info(flash_attn_context *context, flash_attn_device device,
                                                            flash_attn_device_info *info);

/* ---- the problem -------------------------------------------------------------------------------------------- */

typedef enum flash_attn_mask {
    FLASH_ATTN_NONE   = 0,
    FLASH_ATTN_CAUSAL = 1,
    FLASH_ATTN_WINDOW = 2 /* window_left and window_right count; for causal sliding windows set window_right = 0 */
} flash_attn_mask;

/* One block of a block mask: queries [q_begin, q_end) may see keys [k_begin, k_end), positions inside the sequence. */
typedef enum flash_attn_slice_kind {
    FLASH_ATTN_SLICE_FULL           = 0,
    FLASH_ATTN_SLICE_CAUSAL         = 1, /* aligned bottom right: j - k_end   <= i - q_end */
    FLASH_ATTN_SLICE_INVERSE_CAUSAL = 2, /* aligned top left:     j - k_begin >= i - q_begin */
    FLASH_ATTN_SLICE_BOTH           = 3  /* both of the above: a diagonal band */
} flash_attn_slice_kind;

typedef struct flash_attn_slice {
    int32_t q_begin, q_end, k_begin, k_end;
    int32_t kind; /* flash_attn_slice_kind */
} flash_attn_slice;

/* A block mask: a pair is visible iff some slice holds it and `mask` allows it. For packed documents, shared questions,
 * block-sparse patterns. Documents beside each other run as packed sequences do. Host memory for every device. */
typedef struct flash_attn_slices {
    const flash_attn_slice *list;
    int32_t                 count;   /* 0: no block mask */
    int32_t                 reserved;
    const int32_t          *offsets; /* [batch + 1], from 0 to count, rising: sequence b has list[offsets[b]] up to
                                        list[offsets[b + 1] - 1]. NULL: all slices hold for every sequence. */
} flash_attn_slices;

/* A paged KV cache. k and v are then [num_pages, page_size, heads_k, head_dim]; key j of sequence b is row
 * j % page_size of page table[b * row_stride + j / page_size]. */
typedef struct flash_attn_pages {
    const int32_t *table;      /* [batch, pages_per_seq]; NULL: k and v are not paged. Only entries of pages that hold keys
                                  0 .. seqused_k - 1 are read. */
    int64_t        row_stride; /* in elements; 0: pages_per_seq */
    int32_t        pages_per_seq;
    int32_t        reserved;
} flash_attn_pages;

/* Dropout on the probabilities by a counter (Philox4x32-10), so that both passes and all devices drop the same pairs.
 * p is rounded to a multiple of 2^-16; what is kept is multiplied by 1 / (1 - p). */
typedef struct flash_attn_dropout {
    float    p; /* 0 <= p < 1; 0: off */
    int32_t  reserved;
    uint64_t seed;
    uint64_t offset; /* advance by 1 from call to call for a new mask */
} flash_attn_dropout;

/* FP8 scales: a stored element times its descale is its value. float32 [batch or 1, heads_k or 1, 1, 1];
 * absent: 1. Only with F8E4M3. */
typedef struct flash_attn_descale {
    flash_attn_tensor q, k, v;
} flash_attn_descale;

/*
 * One attention problem. Letters: b = batch, sq = seqlen_q, sk = seqlen_k, hq = heads_q, hk = heads_k, d = head_dim,
 * dv = head_dim_v. hq is a multiple of hk (GQA, MQA): query head h reads key head h / (hq / hk).
 * d and dv are any numbers from 1 to 576 and may differ. A sequence has fewer than 2^29 positions; b * hq < 2^31 and
 * sq * hq / hk < 2^31. b, sq and sk may be 0.
 */
typedef struct flash_attn_problem {
    flash_attn_device device; /* default: CPU */

    flash_attn_tensor q;   /* [b, sq, hq, d]; varlen: [1, total_q, hq, d] */
    flash_attn_tensor k;   /* [b, sk, hk, d]; varlen: [1, total_k, hk, d]; paged: [pages, page_size, hk, d]; q's dtype */
    flash_attn_tensor v;   /* as k with dv in place of d; may be a view of k's first columns (multi-head latent attention) */
    flash_attn_tensor o;   /* [b, sq, hq, dv]; varlen: [1, total_q, hq, dv]; q's dtype or F32 (F8E4M3 in: F16, BF16 or
                              F32). Forward: written. Backward: read. */
    flash_attn_tensor lse; /* F32 [b, hq, sq, 1]; varlen: [1, hq, total_q, 1]. Forward: written if data is given; without
                              it o may differ in its last bits, for P may then be made in a faster way of the same
                              accuracy. Backward: read, required. */

    float           scale;   /* 0: 1 / sqrt(d). Any number up to 2e38 in size; for a true zero give -0.0f */
    float           softcap; /* 0: off; otherwise > 0, and at least scale / 2e38 */
    flash_attn_mask mask;
    int32_t         window_left, window_right; /* with WINDOW: keys to the left and right of the diagonal, -1: no limit.
                                                  Otherwise 0 or -1. */

    flash_attn_tensor bias;         /* added to the scores: [b or 1, hq or 1, sq or 1, sk], F32 or q's dtype (with
                                       F8E4M3: F32); varlen or paged: sq and sk are at least the longest sequence. May
                                       hold -inf; what is below -2.3e38 counts as that. */
    flash_attn_tensor alibi_slopes; /* F32 [b or 1, hq, 1, 1]: adds -slope * |i + seqlen_k - seqlen_q - j| */
    flash_attn_tensor sinks;        /* [1, hq, 1, 1], as bias F32 or q's dtype: one more logit for each head that takes
                                       probability and gives no value */

    /* Lengths: device memory with CUDA, else host memory. NULL: every sequence is as long as the tensor. */
    const int32_t *cu_seqlens_q; /* [batch + 1], from 0, rising, to total_q: sequence b is rows cu[b] .. cu[b + 1] - 1 */
    const int32_t *cu_seqlens_k; /* likewise in k and v; not with pages */
    const int32_t *seqused_q;    /* [batch]: only the first so many queries count; other rows get o = 0, lse = -inf */
    const int32_t *seqused_k;    /* [batch]: only the first so many keys count (cache_seqlens of a KV cache) */
    const int32_t *leftpad_k;    /* [batch]: keys before this one, at most seqused_k, are padding. Positions stay. */
    const int32_t *cache_batch_idx; /* [batch]: sequence b reads batch entry cache_batch_idx[b] of k and v; not with
                                       cu_seqlens_k or pages */
    int32_t batch;                  /* number of sequences; needed with cu_seqlens_q, else 0 or q.shape[0] */
    int32_t max_seqlen_q;           /* longest sequence; CUDA needs it with cu_seqlens_q. CPU: 0 or an upper bound */
    int32_t max_seqlen_k;           /* likewise with cu_seqlens_k; in a forward also an upper bound of seqused_k, or 0 */
    int32_t num_splits;             /* split the keys so often, for few queries on long keys; to 256; 0: by shape, so that a sequence has
                                       the same bits in any batch of the same longest lengths; -1: by the batch and the GPU too, up
                                       to 2.8 times as fast, also where packed sequences of few queries stand beside long ones */

    flash_attn_pages   pages;
    flash_attn_slices  slices;
    flash_attn_dropout dropout;
    flash_attn_descale descale;

    bool     deterministic; /* CUDA backward: the same bits every time, somewhat slower. The CPU always is. */
    uint64_t reserved[8];
} flash_attn_problem;

/* Gradients of flash_attn_backward. dq, dk, dv have the shapes of q, k, v and q's dtype or F32; for each, data NULL
 * means not wanted. */
typedef struct flash_attn_grads {
    flash_attn_tensor dout; /* read: the gradient of o, o's shape, q's dtype or F32 */
    flash_attn_tensor dq, dk, dv;
    flash_attn_tensor dbias;  /* bias's shape (summed where it broadcasts), F32 or bias's dtype */
    flash_attn_tensor dsinks; /* sinks' shape, F32 */
    uint64_t          reserved[8];
} flash_attn_grads;

/* `bytes` of memory on the call's device, any alignment, or NULL. allocator is exec.allocator. */
typedef void *(*flash_attn_allocate)(void *allocator, size_t bytes);

/* How to run a call. NULL or zero for the simple case. */
typedef struct flash_attn_exec {
    void    *stream;          /* CUDA: a CUstream of the device; NULL is the default stream. NULL on the host. */
    void    *workspace;       /* scratch memory on the device, any alignment; NULL: the library allocates, and the context
                                 keeps some for its next call: up to 256 MB on the CPU, 1/128 of a GPU's memory */
    size_t   workspace_bytes; /* at least flash_attn_workspace_size, or NO_MEMORY; 0 without workspace */
    int32_t  num_threads;     /* CPU: at most so many; 0: the context's number */
    int32_t  reserved0;
    /* Your own allocator: where a call needs scratch memory and workspace is NULL, it asks once, on its thread and before
     * anything is written. NULL from it is NO_MEMORY; else the memory is the call's until its work on the stream is done.
     * The library never frees it. */
    flash_attn_allocate allocate;
    void    *allocator;
    uint64_t reserved[6];
} flash_attn_exec;

/* ---- calls -------------------------------------------------------------------------------------------------- */

/* O and, if wanted, LSE (Algorithm 1). Errors: any status. */
FLASH_ATTN_API flash_attn_status flash_attn_forward(flash_attn_context *context, const flash_attn_problem *problem,
                                                    const flash_attn_exec *exec);

/* dQ, dK, dV and, if wanted, dbias and dsinks from dO, O and LSE (Algorithm 2). o and lse must be the forward's.
 * Not with pages or cache_batch_idx (UNSUPPORTED): a shared cache has no gradient of its own. Nor with F8E4M3. */
FLASH_ATTN_API flash_attn_status flash_attn_backward(flash_attn_context *context, const flash_attn_problem *problem,
                                                     const flash_attn_grads *grads, const flash_attn_exec *exec);

typedef enum flash_attn_pass { FLASH_ATTN_FORWARD = 0, FLASH_ATTN_BACKWARD = 1 } flash_attn_pass;

/* Bytes of workspace that a call would take. With it given, a call allocates no memory on the device. It depends on
 * shapes and options, not on data, and not on the contents of length arrays.
 *
 * Here and in the next functions data may be NULL: a tensor that the problem may do without (lse, bias, ...) then
 * counts as given if it has a shape, and v is a view of k if it has k's strides and fewer columns. Length arrays and
 * pages.table count as given if they are not NULL, and are not read. A backward is planned with all its gradients, in the dtype of what they are gradients of. */
FLASH_ATTN_API flash_attn_status flash_attn_workspace_size(flash_attn_context *context,
                                                           const flash_attn_problem *problem, flash_attn_pass pass,
                                                           size_t *bytes);

/* Do ahead all that a first call would do (choose, compile, load), so that later calls are quick and a CUDA graph can
 * capture them. Data pointers may be NULL, and count as aligned to 16 bytes then; no tensor is touched. */
FLASH_ATTN_API flash_attn_status flash_attn_prepare(flash_attn_context *context, const flash_attn_problem *problem,
                                                    flash_attn_pass pass);

/* Build ahead, without a GPU, all CUDA kernels that a call would run on a GPU of compute capability `arch` (80 for 8.0,
 * 90, ...), and put them into `folder`, which is made if missing; what it has already stays. Calls of other lengths, batch
 * or heads may run others (`flashattn compile` builds for all lengths). A context whose options name that folder as
 * kernel_folder, in the same version of the library, loads them without NVRTC. Pointers may be NULL as in
 * flash_attn_prepare. Errors: INVALID (folder, arch), UNSUPPORTED, COMPILE. */
FLASH_ATTN_API flash_attn_status flash_attn_compile(flash_attn_context *context, const flash_attn_problem *problem,
                                                    flash_attn_pass pass, int32_t arch, const char *folder);

typedef struct flash_attn_explanation {
    char     kernel[64];      /* "forward_avx512", "backward_sm80" */
    char     reason[256];     /* one line: why this kernel and these tiles */
    int32_t  tile_q, tile_k;  /* rows of Q and of K and V that a step works on */
    int32_t  num_splits;      /* parts that the keys are split into; 1: not split */
    int32_t  num_threads;     /* CPU threads, or CUDA threads of a block */
    int64_t  num_tasks;       /* independent pieces of work, or CUDA blocks */
    int64_t  scratch_bytes;   /* of one thread, or shared memory of a block */
    int64_t  workspace_bytes; /* as flash_attn_workspace_size */
    double   flops;           /* multiply-adds count two, masked-out tiles count nothing: 4 * pairs * d forward */
    double   bytes;           /* each input read once, each output written once */
    uint64_t reserved[8];
} flash_attn_explanation;

/* What a call would run, or why it would be refused; data pointers may be NULL except the length arrays, which are read if they are on
 * the host. */
FLASH_ATTN_API flash_attn_status flash_attn_explain(flash_attn_context *context, const flash_attn_problem *problem,
                                                    flash_attn_pass pass, flash_attn_explanation *explanation);

/* ---- tuning the CPU --------------------------------------------------------------------------------------------- */

/* One choice that was measured. */
typedef struct flash_attn_tune_choice {
    char     name[64];          /* "tile avx512 forward 128": what `flashattn explain` would show for head_dim up to 128 */
    char     usual[24];         /* the default: "96 128" */
    char     found[24];         /* what is used from now on; the default unless another was clearly faster */
    double   usual_ms, found_ms; /* the fastest of many runs of each; of self-attention one without a mask and a causal one together */
    int32_t  num_tried;
    int32_t  reserved0;
    uint64_t reserved[8];
} flash_attn_tune_choice;

/* Called after each choice. */
typedef void (*flash_attn_tune_report)(void *user, const flash_attn_tune_choice *choice);

/* Measure on this machine, with this context's tier and threads, which tiles are fastest, and store what is faster than
 * the default by 3% and more. Contexts made later, in any process, read it once and use it; those that exist keep what
 * they have. The paper left this to future work. Where AMX-FP16 runs in a child process though the processor does not
 * report it, it is measured too, unless the context's max_isa is below it.
 *
 * file: where to store it; what a file of this processor and version already says of other tiers is kept. NULL: where
 * such contexts look by themselves (flash_attn_options.tune_file). "": nowhere. seconds: about how long to measure, 1
 * to 3600, but every candidate is measured once. report may be NULL. Takes some hundred MB. Errors: INVALID (seconds, a place that cannot be written: said
 * before anything is measured), NO_MEMORY. */
FLASH_ATTN_API flash_attn_status flash_attn_tune(flash_attn_context *context, const char *file, double seconds,
                                                 flash_attn_tune_report report, void *user);

/* ---- the KV cache ------------------------------------------------------------------------------------------- */

/* Rotary embedding (Su et al. 2021). Position t rotates pairs of the first rotary_dim entries of a head by the angles
 * whose cosines and sines are rows t. */
typedef struct flash_attn_rotary {
    flash_attn_tensor cos, sin;    /* [positions, rotary_dim / 2, 1, 1], F32 or k's dtype; data NULL: no rotation */
    bool              interleaved; /* true: pairs (0,1), (2,3), ...; false: (0, r/2), (1, r/2 + 1), ... */
    uint64_t          reserved[2];
} flash_attn_rotary;

/* Append new keys and values to a cache; rotate the new keys, and the queries if given. New row t of sequence b goes to
 * position cache_seqlens[b] + t. */
typedef struct flash_attn_append {
    flash_attn_device device;
    flash_attn_tensor k_new, v_new;     /* [b, seqlen_new, hk, d], [b, seqlen_new, hk, dv]; data NULL: only rotate q */
    flash_attn_tensor k_cache, v_cache; /* [entries, capacity, hk, d or dv], or [pages, page_size, hk, d or dv] */
    const int32_t    *cache_seqlens;    /* [b]: keys held before the call; NULL: 0. Not changed. */
    const int32_t    *cache_batch_idx;  /* [b]: batch entry of the cache; NULL: b. No two alike. */
    const int32_t    *leftpad_k;        /* [b], at most cache_seqlens: rotary positions count from here; NULL: 0 */
    flash_attn_pages  pages;
    flash_attn_rotary rotary;
    flash_attn_tensor q, q_out;  /* [b, sq, hq, d]: rotated copy of q; q_out may be q itself; data NULL: none */
    bool              q_at_end;  /* all queries at position cache_seqlens[b], as flash_attn does without a mask; false:
                                    query i at cache_seqlens[b] + i */
    uint64_t          reserved[8];
} flash_attn_append;

/* Errors: INVALID also when a row does not fit the cache or two sequences would write the same one; then nothing is
 * written. b * hk, b * hq < 2^31. F8E4M3 is copied, not rotated (UNSUPPORTED). */
FLASH_ATTN_API flash_attn_status flash_attn_append_kv(flash_attn_context *context, const flash_attn_append *append,
                                                      const flash_attn_exec *exec);

/* ---- merging ------------------------------------------------------------------------------------------------ */

/* An attention result over some of the keys. */
typedef struct flash_attn_partial {
    flash_attn_tensor o;   /* [b, sq, hq, dv], F32, F16 or BF16 */
    flash_attn_tensor lse; /* F32 [b, hq, sq, 1] */
} flash_attn_partial;

/* Merge results over disjoint sets of keys into the result over all of them: lse = log sum exp(lse_i),
 * o = sum exp(lse_i - lse) o_i. An empty part (lse -inf) counts nothing, whatever its o holds; all empty: o = 0,
 * lse = -inf. result may be parts[0] (so a ring can accumulate); any other overlap is INVALID. Give sinks to one part
 * only. num_parts >= 1, on CUDA at most 32 (UNSUPPORTED); all of one shape, of at most 2^31 - 1 in each dimension.
 * result->lse may be absent. */
FLASH_ATTN_API flash_attn_status flash_attn_merge(flash_attn_context *context, flash_attn_device device,
                                                  const flash_attn_partial *parts, int32_t num_parts,
                                                  const flash_attn_partial *result, const flash_attn_exec *exec);

/* ---- a sequence over several ranks --------------------------------------------------------------------------- */

/* Which positions of the whole sequence a rank has. With a causal mask ZIGZAG and STRIPED give every rank the same work in
 * every step; CONTIGUOUS makes the first ranks wait for the last. */
typedef enum flash_attn_ring_layout {
    FLASH_ATTN_RING_CONTIGUOUS = 0, /* `ranks` chunks, one after the other */
    FLASH_ATTN_RING_ZIGZAG     = 1, /* 2 ranks chunks: rank r has the r-th from the front, then the r-th from the back */
    FLASH_ATTN_RING_STRIPED    = 2  /* positions rank, rank + ranks, rank + 2 ranks, ... */
} flash_attn_ring_layout;

/* Local row i < count[0] is position begin[0] + i * step, row i >= count[0] is begin[1] + (i - count[0]) * step. */
typedef struct flash_attn_ring_share {
    int64_t rows;               /* count[0] + count[1] */
    int64_t begin[2], count[2]; /* count[1] is 0 but with ZIGZAG */
    int64_t step;               /* 1; STRIPED: ranks */
} flash_attn_ring_share;

/* The rows that `rank` has of a sequence of `seqlen` positions, 0 to 2^40. It need not be divisible: chunk c of n begins
 * at floor(c * seqlen / n), and a share may be empty. Errors: INVALID. */
FLASH_ATTN_API flash_attn_status flash_attn_ring_get_share(flash_attn_ring_layout layout, int32_t ranks, int32_t rank,
                                                           int64_t seqlen, flash_attn_ring_share *share);

/*
 * The caller's engine. It moves bytes from each rank to the next, (rank + 1) % ranks: NCCL, MPI, sockets. A callback
 * returns 0, or a number of its own if it failed; then nothing that was begun may touch its memory any more, and it is
 * not called again in this call. docs/dist.md has them for NCCL and for sockets, examples/ring the source.
 */
typedef int (*flash_attn_transport_begin)(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes,
                                          void *stream);
typedef int (*flash_attn_transport_wait)(void *user, void *stream);
typedef int (*flash_attn_transport_exchange)(void *user, const void *send, void *recv, size_t bytes);

typedef struct flash_attn_transport {
    /* Begin to send to the next rank and to receive from the one before, either may be 0 bytes. Memory is the problem's
     * device's. CUDA: after all work that is on `stream` (the call's) by now. It may return before it is done, so that
     * it runs beside the compute that follows; up to two are under way. What one rank begins n-th, its neighbours begin
     * n-th. */
    flash_attn_transport_begin begin;
    /* All that was begun is done, CUDA: for what comes on `stream` after this. NULL: begin returns when it is done. */
    flash_attn_transport_wait wait;
    /* Send and receive so many bytes of host memory and return when it is done. For CUDA, may be NULL; on the host
     * begin and wait do it. With it all ranks fail together where one of them would fail alone, see below. */
    flash_attn_transport_exchange exchange_host;
    void                         *user; /* first argument of the three */
    uint64_t                      reserved[4];
} flash_attn_transport;

typedef struct flash_attn_ring {
    int32_t                rank, ranks; /* 0 <= rank < ranks */
    flash_attn_ring_layout layout;
    int32_t                reserved0;
    int64_t                seqlen_q, seqlen_k; /* of the whole; flash_attn_ring_get_share says what of it is here */
    flash_attn_transport   transport;          /* not used with one rank */
    uint64_t               reserved[8];
} flash_attn_ring;

/*
 * Ring attention: K and V travel round the ranks while each attends to what it has, and the parts are merged by their LSE
 * (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; striping: Brandon et al.,
 * "Striped Attention", 2023). Every rank calls it with its own rows: q, o [b, rows of seqlen_q, hq, ...], k, v
 * [b, rows of seqlen_k, hk, ...], lse [b, hq, rows of seqlen_q, 1]; the same ring but for `rank` and transport, the
 * same options, and the same of dk and dv wanted, in the same dtypes. The mask is that of the whole sequence, aligned
 * bottom right. Each rank's results are its rows of the results over the whole sequence. Parts are added up in float32.
 *
 * In a backward dK and dV travel in float32 with K and V and come home complete, in the dtype in which they are wanted
 * (one of them in float32: both). dsinks is the part of this rank's queries: add it up over the ranks, as the gradient
 * of any parameter.
 *
 * Supported: batch, GQA, any strides, head_dim and head_dim_v, F32, F16 and BF16, scale, softcap, all masks, sinks,
 * deterministic. UNSUPPORTED: varlen (call it for each sequence), bias, ALiBi, dropout, slices, used lengths, padding,
 * pages, cache_batch_idx, F8E4M3.
 *
 * CUDA: with more than one rank exec.workspace or exec.allocate is needed, for the transport moves what is in that
 * memory, between GPUs: take some of the kind that the engine likes best (registered, say). It must be there until the
 * stream has run the call.
 *
 * Errors: any status, and TRANSPORT. On the host, and on CUDA with exchange_host, ranks first tell each other what they
 * are about to do, and once more how it went: if one was given nonsense, something else than the others, or has no
 * memory, all fail, nothing is written, and the transport can be used again. Otherwise a rank that fails returns alone,
 * and the others wait for it in the transport until that fails (NCCL: ncclCommAbort). So do they for a rank whose ring
 * itself is INVALID or which never calls. After TRANSPORT of a callback a new transport is needed.
 */
FLASH_ATTN_API flash_attn_status flash_attn_ring_forward(flash_attn_context *context, const flash_attn_problem *problem,
                                                         const flash_attn_ring *ring, const flash_attn_exec *exec);

FLASH_ATTN_API flash_attn_status flash_attn_ring_backward(flash_attn_context *context, const flash_attn_problem *problem,
                                                          const flash_attn_grads *grads, const flash_attn_ring *ring,
                                                          const flash_attn_exec *exec);

/* As flash_attn_workspace_size; a rank's own, which need not be another's. */
FLASH_ATTN_API flash_attn_status flash_attn_ring_workspace_size(flash_attn_context *context,
                                                                const flash_attn_problem *problem,
                                                                const flash_attn_ring *ring, flash_attn_pass pass,
                                                                size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif /* FLASHATTN_H */
