/*
 * Checking what the caller gave, before any data is touched. Every function here returns OK or fails with a sentence
 * that names the field, its value and what was expected. Used by the public functions only; backends see fa_call.
 */
#ifndef FA_CHECK_H
#define FA_CHECK_H

#include "call.h"

/* ---- one tensor (view.c) ---- */

#define FA_BIT(dtype) (1u << (dtype))
#define FA_BITS_16_32 (FA_BIT(FLASH_ATTN_F32) | FA_BIT(FLASH_ATTN_F16) | FA_BIT(FLASH_ATTN_BF16))
#define FA_BITS_ALL (FA_BITS_16_32 | FA_BIT(FLASH_ATTN_F8E4M3))
#define FA_ANY (-1) /* an extent that may be any */

const char *fa_dtype_name(flash_attn_dtype dtype);

/* True if the caller wants this tensor: it has data or, when only planning, a shape. */
bool fa_view_given(const flash_attn_tensor *t, bool plan);

/* reserved is 0 and dtype is in the set of bits `allowed`. */
flash_attn_status fa_view_dtype(const char *name, const flash_attn_tensor *t, unsigned allowed);

/* shape equals `expected` (FA_ANY: any extent from 0). */
flash_attn_status fa_view_shape(const char *name, const flash_attn_tensor *t, const int64_t expected[4]);

/* As above, but a shape of four zeros becomes `expected`. */
flash_attn_status fa_view_implied_shape(const char *name, flash_attn_tensor *t, const int64_t expected[4]);

/* Every extent is 1 or that of `full`. fa_view_expand then gives the full extents, with stride 0 where it was 1. */
flash_attn_status fa_view_broadcasts(const char *name, const flash_attn_tensor *t, const int64_t full[4]);
void              fa_view_expand(flash_attn_tensor *t, const int64_t full[4]);

/* Make strides explicit; the bytes that the view reaches can be counted and lie in the address space; data is given
 * (or, when only planning, becomes an address that nobody reads) and aligned to the element. */
flash_attn_status fa_view_layout(const char *name, flash_attn_tensor *t, bool plan);

/* As fa_view_layout; and no two elements share memory. */
flash_attn_status fa_view_output_layout(const char *name, flash_attn_tensor *t, bool plan);

bool fa_view_is_empty(const flash_attn_tensor *t);

/* Arrays of int32, or of structs of them, start at multiples of 4. NULL: not given. */
typedef struct fa_array {
    const char *name;
    const void *data;
} fa_array;
flash_attn_status fa_check_alignment(const fa_array *arrays, size_t count);

/* Reserved words that a newer header may use. */
#define FA_CHECK_RESERVED(name, words) fa_check_reserved(name, words, (int)(sizeof(words) / sizeof *(words)))
flash_attn_status fa_check_reserved(const char *name, const uint64_t *reserved, int count);
flash_attn_status fa_check_reserved_int(const char *name, int32_t reserved);

/* ---- memory shared between tensors (overlap.c) ---- */

typedef struct fa_region {
    const char       *name;
    flash_attn_tensor view; /* strides explicit; data NULL: ignored */
    bool              written;
} fa_region;

/* A plain array as a view. */
flash_attn_tensor fa_array_view(const void *data, int64_t count, flash_attn_dtype same_size_dtype);

/* The entries of a page table that belong to a call; what lies between its rows does not. */
flash_attn_tensor fa_table_view(const flash_attn_pages *pages, int64_t batch);

/* The same elements at the same addresses. */
bool fa_same_view(const flash_attn_tensor *a, const flash_attn_tensor *b);

/* False only if it is certain that no byte belongs to both. Views of one packed buffer are told apart. */
bool fa_views_overlap(const flash_attn_tensor *a, const flash_attn_tensor *b);

/* No written region shares memory with another region. At most FA_MAX_REGIONS. */
enum { FA_MAX_REGIONS = 32 };
flash_attn_status fa_check_overlap(const fa_region *regions, int count);

/* ---- a problem (problem.c, options.c, lengths.c) ---- */

typedef enum fa_depth {
    FA_PLAN,         /* shapes and options only */
    FA_PLAN_LENGTHS, /* and the length arrays, where they are host memory */
    FA_RUN           /* and data pointers */
} fa_depth;

flash_attn_status fa_check_device(flash_attn_device device);

/* low <= value <= high. */
flash_attn_status fa_check_extent(const char *field, int64_t value, int64_t low, int64_t high);

static inline bool fa_on_host(flash_attn_device device) { return device.type != FLASH_ATTN_CUDA; }

/* grads: NULL for the forward; for a backward that is only planned, NULL stands for all gradients in q's dtype. */
flash_attn_status fa_normalise(const flash_attn_problem *problem, const flash_attn_grads *grads, flash_attn_pass pass,
                               fa_depth depth, fa_call *call);

/* No output, and no byte of the workspace, shares memory with another tensor of the call. */
flash_attn_status fa_check_memory(const fa_call *call, const void *workspace, size_t workspace_bytes);

/* scale, softcap, mask, dropout, num_splits (options.c). */
flash_attn_status fa_normalise_options(const flash_attn_problem *problem, fa_call *call);

/* bias, ALiBi, sinks, descales (options.c). */
flash_attn_status fa_normalise_extras(const flash_attn_problem *problem, bool plan, fa_call *call);

/* The block mask (lengths.c). */
flash_attn_status fa_check_slices(const flash_attn_slices *slices, int64_t batch, int64_t rows_q, int64_t rows_k);

/* pages against the shape of k, for `batch` sequences (lengths.c). */
flash_attn_status fa_normalise_pages(const flash_attn_pages *pages, int64_t batch, int64_t page_size,
                                     flash_attn_pages *out);

/* The contents of cu_seqlens, seqused, leftpad_k, cache_batch_idx and the page table in host memory (lengths.c). */
flash_attn_status fa_check_lengths(const flash_attn_problem *problem, const fa_call *call);

/* Page ids of sequence b for keys [begin, end) (lengths.c). */
flash_attn_status fa_check_page_ids(const flash_attn_pages *pages, int64_t num_pages, int64_t page_size, int64_t b,
                                    int64_t begin, int64_t end);

/* How to run: threads resolved (api.c). */
flash_attn_status fa_check_exec(const flash_attn_context *context, flash_attn_device device, const flash_attn_exec *given,
                                fa_exec *out);

/* flash_attn_forward and flash_attn_backward (grads), and what they need, of a call that has not the whole GPU (api.c). */
flash_attn_status fa_run(flash_attn_context *context, const flash_attn_problem *problem, const flash_attn_grads *grads,
                         flash_attn_pass pass, const flash_attn_exec *exec, bool shares_gpu);
flash_attn_status fa_workspace_size(flash_attn_context *context, const flash_attn_problem *problem,
                                    flash_attn_pass pass, bool shares_gpu, size_t *bytes);

/* ---- the other calls ---- */

/* Check an append and make it explicit: strides, implied shapes, row_stride, head counts (append.c). */
flash_attn_status fa_normalise_append(const flash_attn_append *append, flash_attn_append *out);

/* Check a merge. On success *checked is a malloc'ed copy of the parts, then the result, all made explicit; the caller
 * frees it (merge.c). */
flash_attn_status fa_normalise_merge(const flash_attn_partial *parts, int32_t num_parts,
                                     const flash_attn_partial *result, flash_attn_partial **checked);

/* Multiply-adds (two each) over the pairs that the mask shows, and bytes of inputs and outputs once (count.c). Host
 * length arrays are read. NO_MEMORY only with slices. */
flash_attn_status fa_count_work(const fa_call *call, double *flops, double *bytes);

/* ---- contexts (context.c) ---- */

/* NULL becomes the process's own context, made on first use. */
flash_attn_status fa_context_of(flash_attn_context **context);

#endif
