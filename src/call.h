/*
 * fa_call: a problem after problem.c has checked and normalised it. Backends read only this; they check nothing again.
 * Also the errors that every file passes up.
 */
#ifndef FA_CALL_H
#define FA_CALL_H

#include "dropout.h"
#include "flashattn.h"
#include "mask.h"
#include "numeric.h"

/* ---- errors (error.c) ---- */

#if defined(__GNUC__)
#define FA_PRINTF(format_argument, first) __attribute__((format(printf, format_argument, first)))
#else
#define FA_PRINTF(format_argument, first)
#endif

/* Keep one sentence for flash_attn_last_error and return `status`. */
flash_attn_status fa_fail(flash_attn_status status, const char *format, ...) FA_PRINTF(2, 3);

#define FA_TRY(expression)                         \
    do {                                           \
        flash_attn_status fa_status = (expression); \
        if (fa_status != FLASH_ATTN_OK)            \
            return fa_status;                      \
    } while (0)

/* ---- the normalised problem ---- */

/*
 * Tensors: strides explicit (never "all zero: contiguous"); a dimension that broadcasts has stride 0 and the full
 * extent [batch, heads_q, ...] of what it is added to; shape of outputs filled in; absent: data NULL.
 * k, v keep the caller's shape: [kv entries, rows, heads_k, d] or [pages, page_size, heads_k, d]. alibi_slopes, sinks,
 * dsinks are [batch, heads_q, 1, 1], descales [batch, heads_k, 1, 1]; dbias has stride 0 where bias broadcasts: add
 * there.
 * When a call is only planned (workspace, prepare, explain), data that the caller did not give is an aligned address
 * that is not NULL and not to be read, and all gradients of a backward are wanted.
 */
typedef struct fa_call {
    flash_attn_pass   pass;
    flash_attn_tensor q, k, v, o, lse;
    flash_attn_tensor bias, alibi_slopes, sinks;
    flash_attn_tensor descale_q, descale_k, descale_v;
    flash_attn_tensor dout, dq, dk, dv, dbias, dsinks; /* backward */

    int64_t batch, heads_q, heads_k, group; /* group = heads_q / heads_k */
    int64_t head_dim, head_dim_v;
    int64_t max_seqlen_q, max_seqlen_k; /* no sequence is longer */

    float      scale, softcap; /* scale resolved; softcap 0: off */
    fa_window  window;         /* every mask is a window; none: both FA_UNLIMITED */
    fa_dropout dropout;        /* threshold 0: off */

    flash_attn_slices slices; /* count 0: none */
    flash_attn_pages  pages;  /* table NULL: none; row_stride resolved */
    int64_t           page_size;

    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k, *leftpad_k, *cache_batch_idx;
    int32_t        num_splits; /* 0: by shape */
    bool           deterministic;
    int            of_length;  /* CUDA: FA_OF_ALL, or FA_OF_MANY or FA_OF_FEW, the sequences of more or no more than few_queries alone (fa_plan_calls_of) */
    int64_t        few_queries;
    flash_attn_slices documents; /* count above 0: cu_seqlens are these documents' (fa_documents_pack), count rows of all entries, and are made when the call runs */
    bool           shares_gpu; /* CUDA: others, such as a ring's transfers, have some of its multiprocessors meanwhile (fa_run) */
} fa_call;

/* Where sequence b lies. For host memory. */
typedef struct fa_sequence {
    int64_t q_entry, q_row;   /* its first query is element [q_entry, q_row] of q, o, lse's rows */
    int64_t kv_entry, kv_row; /* its first key is element [kv_entry, kv_row] of k and v (not paged) */
    int     rows_q, rows_k;   /* rows that belong to it */
    int     seqlen_q;         /* queries that count; rows seqlen_q .. rows_q - 1 get output 0, LSE -inf, gradient 0 */
    int     key_begin, seqlen_k; /* keys [key_begin, seqlen_k) count: left padding, used length */
    int     diagonal;            /* seqlen_k - seqlen_q, for mask.h */
} fa_sequence;

/* Of `count` rows that begin at `row`, counted through all entries (documents.c). */
static inline int64_t fa_entry_of(const flash_attn_tensor *t, int64_t row, int64_t count) { return t->shape[0] > 1 && count > 0 ? row / t->shape[1] : 0; }

static inline fa_sequence fa_sequence_at(const fa_call *call, int64_t b)
{
    fa_sequence s = {.q_entry = b, .kv_entry = b, .rows_q = (int)call->q.shape[1], .rows_k = (int)call->k.shape[1]};
    if (call->cu_seqlens_q) {
        s.rows_q  = call->cu_seqlens_q[b + 1] - call->cu_seqlens_q[b];
        s.q_entry = fa_entry_of(&call->q, call->cu_seqlens_q[b], s.rows_q);
        s.q_row   = call->cu_seqlens_q[b] - s.q_entry * call->q.shape[1];
    }
    if (call->cu_seqlens_k) {
        s.rows_k   = call->cu_seqlens_k[b + 1] - call->cu_seqlens_k[b];
        s.kv_entry = fa_entry_of(&call->k, call->cu_seqlens_k[b], s.rows_k);
        s.kv_row   = call->cu_seqlens_k[b] - s.kv_entry * call->k.shape[1];
    }
    if (call->cache_batch_idx)
        s.kv_entry = call->cache_batch_idx[b];
    if (call->pages.table)
        s.rows_k = (int)(call->pages.pages_per_seq * call->page_size); /* lengths.c: at most FA_MAX_SEQLEN */
    s.seqlen_q  = call->seqused_q ? call->seqused_q[b] : s.rows_q;
    s.seqlen_k  = call->seqused_k ? call->seqused_k[b] : s.rows_k;
    s.key_begin = call->leftpad_k ? call->leftpad_k[b] : 0;
    s.diagonal  = s.seqlen_k - s.seqlen_q;
    return s;
}

/* How many sequences, from the first on, say how long all are: where none has a length of its own, one does. */
static inline int64_t fa_num_lengths(const fa_call *call)
{
    bool own = call->cu_seqlens_q || call->cu_seqlens_k || call->seqused_q || call->seqused_k || call->leftpad_k;
    return own || call->batch == 0 ? call->batch : 1;
}

/* Row j of sequence s's keys (or values) for key head h: its first element; step by stride[3]. */
static inline char *fa_kv_at(const fa_call *call, const flash_attn_tensor *kv, const fa_sequence *s, int64_t b, int j,
                             int64_t h)
{
    if (call->pages.table) {
        int64_t page = call->pages.table[b * call->pages.row_stride + j / call->page_size];
        return fa_at(kv, page, j % call->page_size, h, 0);
    }
    return fa_at(kv, s->kv_entry, s->kv_row + j, h, 0);
}

/* The block-mask slices of sequence b. */
static inline fa_range fa_slices_of(const flash_attn_slices *slices, int64_t b)
{
    fa_range all = {0, slices->count};
    if (slices->offsets) {
        all.begin = slices->offsets[b];
        all.end   = slices->offsets[b + 1];
    }
    return all;
}

/* True if query i of sequence (b, s) may see key j: window, slices, padding. */
static inline bool fa_sees(const fa_call *call, const fa_sequence *s, int64_t b, int i, int j)
{
    if (i >= s->seqlen_q || j < s->key_begin || j >= s->seqlen_k || !fa_window_sees(call->window, s->diagonal, i, j))
        return false;
    if (call->slices.count == 0)
        return true;
    fa_range own = fa_slices_of(&call->slices, b);
    for (int n = own.begin; n < own.end; n++) {
        const flash_attn_slice *slice = &call->slices.list[n];
        if (fa_slice_sees(slice->q_begin, slice->q_end, slice->k_begin, slice->k_end, slice->kind, i, j))
            return true;
    }
    return false;
}

/* V is the first columns of K's rows, in the same memory, as in multi-head latent attention. */
static inline bool fa_values_in_keys(const fa_call *call)
{
    const flash_attn_tensor *k = &call->k, *v = &call->v;
    bool same = k->data == v->data && k->dtype == v->dtype && v->shape[3] <= k->shape[3] && (v->stride[3] == k->stride[3] || v->shape[3] == 1);
    for (int i = 0; i < 3; i++)
        same = same && (k->stride[i] == v->stride[i] || k->shape[i] <= 1);
    return same;
}

/* ---- documents (documents.c) ---- */

/* Whether the slices are documents, or chunks, beside each other, of so many queries on average: then `packed` is the same call with packed sequences in their place, of rows that are counted
 * through all entries of the tensors. */
bool fa_documents_pack(const fa_call *call, int64_t least_mean, fa_call *packed);

/* Its cu_seqlens: batch + 1 of q, then as many of k; 0 bytes if it has none. Make: in memory that is to be freed. */
size_t            fa_documents_bytes(const fa_call *packed);
void              fa_documents_fill(const fa_call *packed, int32_t *cu_seqlens);
flash_attn_status fa_documents_make(const fa_call *packed, int32_t **cu_seqlens);

/* ---- how to run ---- */

typedef struct fa_cpu  fa_cpu;  /* cpu/: threads and the chosen micro-kernels */
typedef struct fa_cuda fa_cuda; /* cuda/: driver, modules, tuning */

struct flash_attn_context {
    flash_attn_options options;
    fa_cpu            *cpu;
    _Atomic(fa_cuda *) cuda; /* made on the first CUDA call */
};

/* "avx512": the tier's name, as FLASH_ATTN_MAX_ISA has it (context.c). */
const char *fa_isa_name(flash_attn_isa isa);

typedef struct fa_exec {
    void  *stream;
    void  *workspace; /* NULL: the backend allocates */
    size_t workspace_bytes;
    flash_attn_allocate allocate;
    void  *allocator;
    int    num_threads; /* resolved, >= 1 */
} fa_exec;

/* Memory of the caller's for a call that needs so many bytes: the workspace, or what `allocate` gives; NULL: there is neither. */
flash_attn_status fa_take_workspace(const fa_exec *exec, size_t needed_bytes, void **memory);

/* NO_MEMORY if there is a workspace and it is smaller. On CUDA the backend asks, for only its plan knows. */
flash_attn_status fa_check_workspace(const fa_exec *exec, size_t needed_bytes);

/* ---- the reference (reference.c): one thread, double, allocates one row of scores ---- */

flash_attn_status fa_reference_forward(const fa_call *call);
flash_attn_status fa_reference_backward(const fa_call *call);

/* ---- the CPU backend (cpu/) ---- */

flash_attn_status fa_cpu_create(fa_cpu **cpu, const flash_attn_options *options, bool assume_amx_fp16);
void              fa_cpu_destroy(fa_cpu *cpu);
void              fa_cpu_info(const fa_cpu *cpu, flash_attn_device_info *info);
int               fa_cpu_num_threads(const fa_cpu *cpu);
size_t            fa_cpu_workspace(const fa_cpu *cpu, const fa_call *call);
flash_attn_status fa_cpu_explain(const fa_cpu *cpu, const fa_call *call, const fa_exec *exec,
                                 flash_attn_explanation *explanation);
flash_attn_status fa_cpu_run(fa_cpu *cpu, const fa_call *call, const fa_exec *exec);
/* flash_attn_tune with its arguments checked. */
flash_attn_status fa_cpu_tune(const flash_attn_context *context, const char *file, double seconds,
                              flash_attn_tune_report report, void *user);

/* ---- the CUDA backend (cuda/): every function fails with NO_DEVICE where there is no such device ---- */

void              fa_cuda_destroy(fa_cuda *cuda);
flash_attn_status fa_cuda_info(flash_attn_context *context, int32_t device, flash_attn_device_info *info);
flash_attn_status fa_cuda_workspace(flash_attn_context *context, int32_t device, const fa_call *call, size_t *bytes);
/* Fills all but flops, bytes and workspace_bytes. Compiles the kernel if need be. */
flash_attn_status fa_cuda_explain(flash_attn_context *context, int32_t device, const fa_call *call,
                                  flash_attn_explanation *explanation);
flash_attn_status fa_cuda_prepare(flash_attn_context *context, int32_t device, const fa_call *call);
flash_attn_status fa_cuda_run(flash_attn_context *context, int32_t device, const fa_call *call, const fa_exec *exec);
flash_attn_status fa_cuda_merge(flash_attn_context *context, int32_t device, const flash_attn_partial *parts,
                                int32_t num_parts, const flash_attn_partial *result, const fa_exec *exec);
flash_attn_status fa_cuda_append(flash_attn_context *context, const flash_attn_append *append, const fa_exec *exec);
/* Needs no device: build the call's kernels for this compute capability into a folder. */
flash_attn_status fa_cuda_compile(flash_attn_context *context, const fa_call *call, int32_t arch, const char *folder);

/* Merge and append are one thread's plain loops over memory, shared by CPU and REFERENCE (host.c). Arguments are
 * checked and normalised (append.c, merge.c). A ring's sums (src/dist) are merges, here and on CUDA, of parts whose lse.data is NULL:
 * each weighs 1; no part: zeros. */
void fa_host_merge(const flash_attn_partial *parts, int32_t num_parts, const flash_attn_partial *result);
void fa_host_append(const flash_attn_append *append);

#endif
