/* Contexts: options, the environment, the context that a process shares. */
#include "check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_THREADS 4096

enum { FA_ISAS = FLASH_ATTN_ISA_AVX512_BF16 + 1 };

static const char *const isa_names[FA_ISAS] = {
    [FLASH_ATTN_ISA_AUTO] = "auto",     [FLASH_ATTN_ISA_SCALAR] = "scalar",
    [FLASH_ATTN_ISA_NEON] = "neon",     [FLASH_ATTN_ISA_NEON_BF16] = "neon-bf16",
    [FLASH_ATTN_ISA_AVX2] = "avx2",     [FLASH_ATTN_ISA_AVX512] = "avx512",
    [FLASH_ATTN_ISA_AMX] = "amx",       [FLASH_ATTN_ISA_AVX512_BF16] = "avx512-bf16",
    [FLASH_ATTN_ISA_AMX_FP16] = "amx-fp16",
};

const char *fa_isa_name(flash_attn_isa isa) { return isa_names[isa]; }

/* NULL when unset, empty, or when the process runs with raised privileges. */
static const char *environment(const char *name)
{
    const char *value = secure_getenv(name);
    return value && *value ? value : NULL;
}

static flash_attn_status threads_from_environment(int32_t *num_threads)
{
    const char *text = environment("FLASH_ATTN_NUM_THREADS");
    if (!text)
        return FLASH_ATTN_OK;
    char *end;
    errno      = 0;
    long value = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < 1 || value > MAX_THREADS)
        return fa_fail(FLASH_ATTN_INVALID, "the environment's FLASH_ATTN_NUM_THREADS is \"%.40s\", expected 1 to %d",
                       text, MAX_THREADS);
    *num_threads = (int32_t)value;
    return FLASH_ATTN_OK;
}

static flash_attn_status isa_from_environment(flash_attn_isa *max_isa)
{
    const char *text = environment("FLASH_ATTN_MAX_ISA");
    if (!text)
        return FLASH_ATTN_OK;
    for (int isa = FLASH_ATTN_ISA_SCALAR; isa < FA_ISAS; isa++)
        if (strcmp(text, isa_names[isa]) == 0) {
            *max_isa = (flash_attn_isa)isa;
            return FLASH_ATTN_OK;
        }
    return fa_fail(FLASH_ATTN_INVALID,
                   "the environment's FLASH_ATTN_MAX_ISA is \"%.40s\", expected scalar, neon, neon-bf16, avx2, avx512, "
                   "avx512-bf16, amx or amx-fp16",
                   text);
}

/* What the user says that the processor has. */
static flash_attn_status assumed_by_environment(bool *amx_fp16)
{
    const char *text = environment("FLASH_ATTN_ASSUME");
    *amx_fp16        = text && strcmp(text, "amx-fp16") == 0;
    if (text && !*amx_fp16)
        return fa_fail(FLASH_ATTN_INVALID, "the environment's FLASH_ATTN_ASSUME is \"%.40s\", expected amx-fp16", text);
    return FLASH_ATTN_OK;
}

static flash_attn_status tune_file_from_environment(const char **tune_file)
{
    const char *text = environment("FLASH_ATTN_TUNE_FILE");
    if (text && text[0] != '/' && strcmp(text, "off") != 0)
        return fa_fail(FLASH_ATTN_INVALID,
                       "the environment's FLASH_ATTN_TUNE_FILE is \"%.40s\", expected an absolute path or off", text);
    *tune_file = text && text[0] != '/' ? "" : text;
    return FLASH_ATTN_OK;
}

static flash_attn_status resolve_options(const flash_attn_options *given, flash_attn_options *out)
{
    *out = given ? *given : (flash_attn_options){0};
    FA_TRY(FA_CHECK_RESERVED("options.reserved", out->reserved));
    if (out->num_threads < 0 || out->num_threads > MAX_THREADS)
        return fa_fail(FLASH_ATTN_INVALID, "options.num_threads is %d, expected 0 to %d", out->num_threads,
                       MAX_THREADS);
    if ((unsigned)out->max_isa >= FA_ISAS)
        return fa_fail(FLASH_ATTN_INVALID, "options.max_isa is %d, expected 0 to %d", (int)out->max_isa,
                       FA_ISAS - 1);
    if (out->pool && !out->parallel_for)
        return fa_fail(FLASH_ATTN_INVALID,
                       "options.pool is given without options.parallel_for, expected both or neither");
    if (out->use_openmp && out->parallel_for)
        return fa_fail(FLASH_ATTN_INVALID, "options.use_openmp is given with options.parallel_for, expected one of them");
    if (out->num_threads == 0)
        FA_TRY(threads_from_environment(&out->num_threads));
    if (out->max_isa == FLASH_ATTN_ISA_AUTO)
        FA_TRY(isa_from_environment(&out->max_isa));
    if (!out->tune_file)
        FA_TRY(tune_file_from_environment(&out->tune_file));
    return FLASH_ATTN_OK;
}

/* The caller's strings may be gone when the first CUDA call comes. */
static bool copy_strings(flash_attn_options *options)
{
    const char **strings[] = {&options->kernel, &options->kernel_folder, &options->nvrtc_path, &options->tune_file};
    bool         copied    = true;
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++)
        if (*strings[i]) {
            *strings[i] = strdup(*strings[i]);
            copied      = copied && *strings[i];
        }
    return copied;
}

static void free_context(flash_attn_context *context)
{
    free((void *)context->options.kernel);
    free((void *)context->options.kernel_folder);
    free((void *)context->options.nvrtc_path);
    free((void *)context->options.tune_file);
    free(context);
}

flash_attn_status flash_attn_create(flash_attn_context **context, const flash_attn_options *options)
{
    if (!context)
        return fa_fail(FLASH_ATTN_INVALID, "context is NULL, expected a place for the new context");
    flash_attn_options resolved;
    bool               amx_fp16;
    FA_TRY(resolve_options(options, &resolved));
    FA_TRY(assumed_by_environment(&amx_fp16));
    flash_attn_context *made = calloc(1, sizeof *made);
    if (!made)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a context of %zu bytes", sizeof *made);
    made->options = resolved;
    flash_attn_status status;
    if (copy_strings(&made->options))
        status = fa_cpu_create(&made->cpu, &made->options, amx_fp16);
    else
        status = fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a context's options");
    if (status != FLASH_ATTN_OK) {
        free_context(made);
        return status;
    }
    *context = made;
    return FLASH_ATTN_OK;
}

void flash_attn_destroy(flash_attn_context *context)
{
    if (!context)
        return;
    fa_cuda_destroy(context->cuda);
    fa_cpu_destroy(context->cpu);
    free_context(context);
}

/* No lock, so that a fork at any moment leaves the child nothing to wait for: threads that come first together each
 * make a context, and all but one give theirs up. */
flash_attn_status fa_context_of(flash_attn_context **context)
{
    static _Atomic(flash_attn_context *) shared;

    if (*context)
        return FLASH_ATTN_OK;
    flash_attn_context *current = atomic_load_explicit(&shared, memory_order_acquire);
    if (!current) {
        flash_attn_context *made;
        FA_TRY(flash_attn_create(&made, NULL));
        if (atomic_compare_exchange_strong(&shared, &current, made))
            current = made;
        else
            flash_attn_destroy(made);
    }
    *context = current;
    return FLASH_ATTN_OK;
}
