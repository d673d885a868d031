#include "problem.h"

#include <stdlib.h>
#include <string.h>

#define FIELD(name) offsetof(cli_problem_flags, name)
const cli_option cli_problem_options[] = {
    {"causal", NULL, cli_parse_switch, FIELD(causal), "query i sees key j iff j <= i + seqlen_k - seqlen_q"},
    {"window", "L,R", cli_parse_window, FIELD(window),
     "see L keys left and R keys right of the diagonal; -1: no limit"},
    {"scale", "X", cli_parse_number, FIELD(scale), "factor of q.k; default 1 / sqrt(head_dim)"},
    {"softcap", "X", cli_parse_number, FIELD(softcap), "scores become X tanh(score / X)"},
    {"bias", "FILE", cli_parse_text, FIELD(bias), "added to the scores: [b or 1, hq or 1, sq or 1, sk]"},
    {"alibi", "FILE", cli_parse_text, FIELD(alibi), "ALiBi slopes, float32 [hq] or [b, hq]"},
    {"sinks", "FILE", cli_parse_text, FIELD(sinks), "one more logit for each head: [hq]"},
    {"dropout", "P,SEED,OFFSET", cli_parse_dropout, FIELD(dropout), "drop probabilities; SEED and OFFSET default to 0"},
    {"cu-seqlens-q", "FILE", cli_parse_text, FIELD(cu_seqlens_q), "sequence b is rows cu[b] .. cu[b + 1] - 1: [b + 1]"},
    {"cu-seqlens-k", "FILE", cli_parse_text, FIELD(cu_seqlens_k), "likewise in k and v"},
    {"seqused-q", "FILE", cli_parse_text, FIELD(seqused_q), "only the first so many queries count: [b]"},
    {"seqused-k", "FILE", cli_parse_text, FIELD(seqused_k), "only the first so many keys count: [b]"},
    {"leftpad-k", "FILE", cli_parse_text, FIELD(leftpad_k), "keys before this one are padding: [b]"},
    {"cache-batch-idx", "FILE", cli_parse_text, FIELD(cache_batch_idx), "entry of k and v that a sequence reads: [b]"},
    {"page-table", "FILE", cli_parse_text, FIELD(page_table),
     "pages of each sequence: [b, pages]; k and v are then\n[num_pages, page_size, hk, d]"},
    {"slices", "FILE", cli_parse_text, FIELD(slices),
     "block mask: int32 [n, 5] rows q_begin q_end k_begin k_end\nkind (0 full, 1 causal, 2 inverse causal, 3 both)"},
    {"slice-offsets", "FILE", cli_parse_text, FIELD(slice_offsets),
     "slices of sequence b: [b + 1]; default: all slices"},
    {"descale-q", "FILE", cli_parse_text, FIELD(descale_q), "f8e4m3: float32 [b or 1, hk or 1]"},
    {"descale-k", "FILE", cli_parse_text, FIELD(descale_k), "likewise for k"},
    {"descale-v", "FILE", cli_parse_text, FIELD(descale_v), "likewise for v"},
    {"max-seqlen-q", "N", cli_parse_count, FIELD(max_seqlen_q), "longest sequence; default: from --cu-seqlens-q"},
    {"max-seqlen-k", "N", cli_parse_count, FIELD(max_seqlen_k), "longest sequence; default: from --cu-seqlens-k"},
    {"num-splits", "N", cli_parse_parts, FIELD(num_splits), "split the keys into N parts; 0: by shape; -1: by the batch and the GPU too"},
    {"deterministic", NULL, cli_parse_switch, FIELD(deterministic), "CUDA backward: the same bits every time"},
    {0},
};
#undef FIELD

#define FIELD(name) offsetof(cli_where_flags, name)
const cli_option cli_where_options[] = {
    {"device", "NAME", cli_parse_device, FIELD(device), "cpu, reference (double, slow), cuda or cuda:N"},
    {"isa", "TIER", cli_parse_isa, FIELD(isa), "highest tier: auto, scalar, neon, neon-bf16, avx2, avx512, avx512-bf16, amx, amx-fp16"},
    {"threads", "N", cli_parse_count, FIELD(threads), "threads; 0: all cores that this process may use"},
    {"no-amx-split", NULL, cli_parse_switch, FIELD(no_amx_split), "never run f32 and f16 as bfloat16 pieces on AMX"},
    {0},
};
#undef FIELD

size_t cli_dtype_bytes(flash_attn_dtype dtype)
{
    return dtype == FLASH_ATTN_F32 ? 4 : dtype == FLASH_ATTN_F8E4M3 ? 1 : 2;
}

int64_t cli_tensor_bytes(const flash_attn_tensor *tensor)
{
    int64_t bytes = (int64_t)cli_dtype_bytes(tensor->dtype);
    for (int dim = 0; dim < 4; dim++)
        if (tensor->shape[dim] < 0 || __builtin_mul_overflow(bytes, tensor->shape[dim], &bytes))
            return -1;
    return bytes;
}

void *cli_problem_own(cli_problem *owner, void *memory, size_t bytes)
{
    if (!memory || owner->num_memory == (int)(sizeof owner->memory / sizeof owner->memory[0])) {
        cli_fail("no memory left");
        free(memory);
        return NULL;
    }
    owner->memory_bytes[owner->num_memory] = bytes;
    owner->memory[owner->num_memory++]     = memory;
    return memory;
}

void cli_problem_free(cli_problem *owner)
{
    for (int i = 0; i < owner->num_memory; i++)
        free(owner->memory[i]);
    *owner = (cli_problem){0};
}

int cli_make_context(const cli_where_flags *flags, flash_attn_context **context)
{
    flash_attn_options options = {
        .num_threads = (int32_t)flags->threads, .max_isa = flags->isa, .no_amx_split = flags->no_amx_split};
    flash_attn_status status = flash_attn_create(context, &options);
    return status == FLASH_ATTN_OK ? CLI_GO_ON : cli_fail_library("context", status);
}

/* ---- tensors ---- */

static int dtype_of(const npy_array *array, cli_dtype raw, const char *path, flash_attn_dtype *dtype)
{
    bool untyped16 = array->type == NPY_RAW16 || array->type == NPY_U16;
    bool untyped8  = array->type == NPY_RAW8 || array->type == NPY_U8;
    if (array->type == NPY_F32)
        *dtype = FLASH_ATTN_F32;
    else if (array->type == NPY_F16)
        *dtype = FLASH_ATTN_F16;
    else if (untyped16 && raw.given && cli_dtype_bytes(raw.dtype) == 2)
        *dtype = raw.dtype;
    else if (untyped8 && raw.given && cli_dtype_bytes(raw.dtype) == 1)
        *dtype = raw.dtype;
    else if (array->type == NPY_RAW16)
        *dtype = FLASH_ATTN_BF16;
    else if (array->type == NPY_RAW8)
        *dtype = FLASH_ATTN_F8E4M3;
    else if (untyped16 || untyped8)
        return cli_fail("%s: plain words of type '%s'; --dtype %s says that they are %s", path,
                        npy_type_name(array->type), untyped16 ? "bf16" : "f8e4m3", untyped16 ? "bfloat16" : "float8");
    else
        return cli_fail("%s: elements are '%s'; expected float32, float16, bfloat16 or float8 (e4m3)", path,
                        npy_type_name(array->type));
    return CLI_GO_ON;
}

int cli_problem_read(cli_problem *owner, const char *field, const char *dims, const char *path, cli_dtype raw,
                     cli_pad pad, flash_attn_tensor *tensor)
{
    npy_array array;
    char      error[NPY_ERROR_BYTES], shape[160];
    if (!npy_read(path, &array, error))
        return cli_fail("--%s: %s", field, error);
    if (!cli_problem_own(owner, array.data, npy_bytes(&array)))
        return CLI_REFUSED;
    if (dtype_of(&array, raw, path, &tensor->dtype) != CLI_GO_ON)
        return CLI_REFUSED;
    int first = pad == CLI_PAD_HEADS && array.ndim == 1 ? 1 : 0; /* [h] is [1, h, 1, 1] */
    if (array.ndim != 4 && (pad == CLI_PAD_NONE || array.ndim < 1 || array.ndim > 4))
        return cli_fail("--%s %s: shape %s; expected %s", field, path, npy_shape_text(array.ndim, array.shape, shape),
                        dims);
    tensor->data = array.data;
    for (int dim = 0; dim < 4; dim++) {
        bool there          = dim >= first && dim - first < array.ndim;
        tensor->shape[dim]  = there ? array.shape[dim - first] : 1;
        tensor->stride[dim] = there ? array.stride[dim - first] : 1;
    }
    return CLI_GO_ON;
}

/* ---- whole numbers ---- */

/* Read int32 or int64 numbers into C-ordered int32. A dimension of `shape` that is -1 takes the file's. */
static int read_ints(cli_problem *owner, const char *field, const char *path, int ndim, int64_t *shape, int32_t **ints)
{
    npy_array array;
    char      error[NPY_ERROR_BYTES], found[160];
    if (!npy_read(path, &array, error))
        return cli_fail("--%s: %s", field, error);
    void *source = cli_problem_own(owner, array.data, npy_bytes(&array));
    if (!source)
        return CLI_REFUSED;
    if (array.type != NPY_I32 && array.type != NPY_I64)
        return cli_fail("--%s %s: elements are '%s'; expected whole numbers, '<i4' or '<i8'", field, path,
                        npy_type_name(array.type));
    bool fits = array.ndim == ndim;
    for (int dim = 0; dim < ndim && fits; dim++)
        fits = shape[dim] == -1 || shape[dim] == array.shape[dim];
    if (!fits) {
        char expected[160] = "";
        for (int dim = 0, at = 0; dim < ndim; dim++) {
            const char *comma = dim ? ", " : "";
            at += shape[dim] == -1
                      ? snprintf(expected + at, sizeof expected - (size_t)at, "%sn", comma)
                      : snprintf(expected + at, sizeof expected - (size_t)at, "%s%lld", comma, (long long)shape[dim]);
        }
        return cli_fail("--%s %s: shape %s; expected [%s]", field, path, npy_shape_text(array.ndim, array.shape, found),
                        expected);
    }
    for (int dim = 0; dim < ndim; dim++)
        shape[dim] = array.shape[dim];
    /* One element more than there are, so that an empty list is not NULL, which would mean that there is none. */
    size_t bytes = ((size_t)array.count + 1) * sizeof **ints;
    *ints        = cli_problem_own(owner, calloc(1, bytes), bytes);
    if (!*ints)
        return CLI_REFUSED;
    int64_t columns = ndim == 2 ? array.shape[1] : 1;
    for (int64_t n = 0; n < array.count; n++) {
        int64_t at    = n / columns * array.stride[0] + (ndim == 2 ? n % columns * array.stride[1] : 0);
        int64_t value = array.type == NPY_I32 ? ((int32_t *)source)[at] : ((int64_t *)source)[at];
        if (value < INT32_MIN || value > INT32_MAX)
            return cli_fail("--%s %s: element %lld is %lld, which does not fit 32 bits", field, path, (long long)n,
                            (long long)value);
        (*ints)[n] = (int32_t)value;
    }
    return CLI_GO_ON;
}

static int32_t longest_step(const int32_t *cu_seqlens, int64_t batch)
{
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++)
        if ((int64_t)cu_seqlens[b + 1] - cu_seqlens[b] > longest)
            longest = (int64_t)cu_seqlens[b + 1] - cu_seqlens[b];
    return longest > INT32_MAX ? INT32_MAX : (int32_t)longest;
}

static int read_lengths(cli_problem *owner, const cli_problem_flags *flags)
{
    flash_attn_problem *p        = &owner->problem;
    int64_t             batch    = p->q.shape[0];
    int64_t             steps[1] = {-1};
    int32_t            *ints     = NULL;
    if (flags->cu_seqlens_q) {
        if (read_ints(owner, "cu-seqlens-q", flags->cu_seqlens_q, 1, steps, &ints) != CLI_GO_ON)
            return CLI_REFUSED;
        if (steps[0] < 1)
            return cli_fail("--cu-seqlens-q %s: empty; expected [batch + 1]", flags->cu_seqlens_q);
        batch           = steps[0] - 1;
        p->batch        = (int32_t)batch;
        p->cu_seqlens_q = ints;
        p->max_seqlen_q = longest_step(ints, batch);
    }
    const struct {
        const char     *field, *path;
        const int32_t **target;
        int64_t         count;
    } lists[] = {
        {"cu-seqlens-k", flags->cu_seqlens_k, &p->cu_seqlens_k, batch + 1},
        {"seqused-q", flags->seqused_q, &p->seqused_q, batch},
        {"seqused-k", flags->seqused_k, &p->seqused_k, batch},
        {"leftpad-k", flags->leftpad_k, &p->leftpad_k, batch},
        {"cache-batch-idx", flags->cache_batch_idx, &p->cache_batch_idx, batch},
        {"slice-offsets", flags->slice_offsets, &p->slices.offsets, batch + 1},
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        int64_t shape[1] = {lists[i].count};
        if (!lists[i].path)
            continue;
        if (read_ints(owner, lists[i].field, lists[i].path, 1, shape, &ints) != CLI_GO_ON)
            return CLI_REFUSED;
        *lists[i].target = ints;
    }
    if (p->cu_seqlens_k)
        p->max_seqlen_k = longest_step(p->cu_seqlens_k, batch);
    if (flags->page_table) {
        int64_t shape[2] = {batch, -1};
        if (read_ints(owner, "page-table", flags->page_table, 2, shape, &ints) != CLI_GO_ON)
            return CLI_REFUSED;
        if (shape[1] > INT32_MAX)
            return cli_fail("--page-table %s: more than 2^31 - 1 pages in a row", flags->page_table);
        p->pages.table         = ints;
        p->pages.pages_per_seq = (int32_t)shape[1];
    }
    return CLI_GO_ON;
}

static int read_slices(cli_problem *owner, const cli_problem_flags *flags)
{
    _Static_assert(sizeof(flash_attn_slice) == 5 * sizeof(int32_t), "a row of five numbers is a slice");
    if (flags->slice_offsets && !flags->slices)
        return cli_fail("--slice-offsets needs --slices");
    if (!flags->slices)
        return CLI_GO_ON;
    int64_t  shape[2] = {-1, 5};
    int32_t *ints;
    if (read_ints(owner, "slices", flags->slices, 2, shape, &ints) != CLI_GO_ON)
        return CLI_REFUSED;
    if (shape[0] == 0 || shape[0] > INT32_MAX)
        return cli_fail("--slices %s: %lld slices; expected 1 to 2^31 - 1", flags->slices, (long long)shape[0]);
    owner->problem.slices.list  = (const flash_attn_slice *)ints;
    owner->problem.slices.count = (int32_t)shape[0];
    return CLI_GO_ON;
}

int cli_problem_apply(cli_problem *owner, const cli_problem_flags *flags, cli_dtype raw)
{
    flash_attn_problem *p = &owner->problem;
    if (flags->causal && flags->window.given)
        return cli_fail("--causal and --window exclude each other; a causal window is --window L,0");
    p->mask         = flags->window.given ? FLASH_ATTN_WINDOW : flags->causal ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
    p->window_left  = flags->window.left;
    p->window_right = flags->window.right;
    p->softcap      = (float)flags->softcap.value;
    p->scale =
        flags->scale.given && flags->scale.value == 0 ? -0.0f /* 0 would be the default */ : (float)flags->scale.value;
    p->dropout       = flags->dropout;
    p->num_splits    = (int32_t)flags->num_splits;
    p->deterministic = flags->deterministic;
    if (read_lengths(owner, flags) != CLI_GO_ON || read_slices(owner, flags) != CLI_GO_ON)
        return CLI_REFUSED;
    if (flags->max_seqlen_q)
        p->max_seqlen_q = (int32_t)flags->max_seqlen_q;
    if (flags->max_seqlen_k)
        p->max_seqlen_k = (int32_t)flags->max_seqlen_k;
    const struct {
        const char        *field, *dims, *path;
        cli_pad            pad;
        flash_attn_tensor *tensor;
    } tensors[] = {
        {"bias", "[b or 1, hq or 1, sq or 1, sk]", flags->bias, CLI_PAD_NONE, &p->bias},
        {"alibi", "[hq] or [b, hq]", flags->alibi, CLI_PAD_HEADS, &p->alibi_slopes},
        {"sinks", "[hq]", flags->sinks, CLI_PAD_HEADS, &p->sinks},
        {"descale-q", "[b or 1, hk or 1]", flags->descale_q, CLI_PAD_HEADS, &p->descale.q},
        {"descale-k", "[b or 1, hk or 1]", flags->descale_k, CLI_PAD_HEADS, &p->descale.k},
        {"descale-v", "[b or 1, hk or 1]", flags->descale_v, CLI_PAD_HEADS, &p->descale.v},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (tensors[i].path && cli_problem_read(owner, tensors[i].field, tensors[i].dims, tensors[i].path, raw,
                                                tensors[i].pad, tensors[i].tensor) != CLI_GO_ON)
            return CLI_REFUSED;
    return CLI_GO_ON;
}
