/* The CPU backend's context: which tier, how many threads; and what does not run attention itself. */
#include "cpu/cpu.h"
#include "cpu/passes.h"
#include "cpu/tile.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* The highest tier under the cap that this library has and this machine runs. */
static void choose_tables(fa_cpu *cpu)
{
    bool           hidden = cpu->isa.hidden == FA_HIDDEN_RUNS && (cpu->assume_amx_fp16 || cpu->tuning.amx_fp16);
    flash_attn_isa most   = hidden ? FLASH_ATTN_ISA_AMX_FP16 : cpu->isa.best;
    flash_attn_isa best   = fa_isa_reaches(cpu->cap, most) ? most : cpu->cap;
    cpu->wide_f16         = NULL;
    cpu->vector           = fa_kernels_scalar();
#if defined(__x86_64__)
    if (fa_isa_reaches(best, FLASH_ATTN_ISA_AVX2))
        cpu->vector = fa_kernels_avx2();
    if (fa_isa_reaches(best, FLASH_ATTN_ISA_AVX512))
        cpu->vector = fa_kernels_avx512();
#elif defined(__aarch64__)
    if (fa_isa_reaches(best, FLASH_ATTN_ISA_NEON))
        cpu->vector = fa_kernels_neon();
#endif
    cpu->tier = cpu->vector->isa;
    for (int dtype = 0; dtype < 4; dtype++) {
        const fa_kernels *products = NULL; /* whose matrix products are of this type */
#if defined(__x86_64__)
        if (fa_isa_reaches(best, FLASH_ATTN_ISA_AVX512_BF16) &&
            (dtype == FLASH_ATTN_BF16 || dtype == FLASH_ATTN_F8E4M3))
            products = fa_kernels_avx512_bf16();
#if defined(FA_HAVE_AMX)
        const fa_kernels *amx = NULL;
        if (fa_isa_reaches(best, FLASH_ATTN_ISA_AMX) && (dtype == FLASH_ATTN_BF16 || !cpu->no_amx_split))
            amx = fa_kernels_amx(cpu->vector, (flash_attn_dtype)dtype);
        if (amx && dtype == FLASH_ATTN_BF16)
            cpu->fixed = fa_kernels_amx_fixed();
        if (fa_isa_reaches(best, FLASH_ATTN_ISA_AMX_FP16) && dtype == FLASH_ATTN_F16) {
            cpu->wide_f16 = amx ? amx : cpu->vector;
            amx           = fa_kernels_amx_fp16();
        }
        products = amx ? amx : products;
#endif
#endif
#if defined(__aarch64__)
        if (fa_isa_reaches(best, FLASH_ATTN_ISA_NEON_BF16) && dtype == FLASH_ATTN_BF16)
            products = fa_kernels_neon_bf16();
#endif
        cpu->kernels[dtype] = products ? products : cpu->vector;
        if (products && fa_isa_reaches(products->isa, cpu->tier))
            cpu->tier = products->isa;
    }
}

void fa_cpu_use_tuning(fa_cpu *cpu, const fa_tuning *tuning)
{
    cpu->tuning = *tuning;
    choose_tables(cpu);
}

flash_attn_status fa_cpu_create(fa_cpu **cpu, const flash_attn_options *options, bool assume_amx_fp16)
{
    int     num_threads = options->num_threads > 0 ? options->num_threads : fa_num_cores();
    fa_cpu *made        = calloc(1, sizeof *made);
    if (made) {
        made->kept    = calloc(1, sizeof *made->kept);
        made->threads = fa_threads_create(options, num_threads);
    }
    if (!made || !made->threads || !made->kept) {
        fa_cpu_destroy(made);
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a context of %d threads", num_threads);
    }
    made->num_threads     = num_threads;
    made->by_shape        = options->max_isa == FLASH_ATTN_ISA_AUTO;
    made->cap             = made->by_shape ? FLASH_ATTN_ISA_NEON_BF16 : options->max_isa;
    made->no_amx_split    = options->no_amx_split;
    made->assume_amx_fp16 = assume_amx_fp16;
    fa_isa_detect(&made->isa);
    fa_tuning tuning;
    made->tuned = fa_tuning_load(&made->isa, options->tune_file, &tuning);
    /* Tuned or not: the processor may be another one of that name. */
    if (assume_amx_fp16 || (tuning.amx_fp16 && fa_isa_reaches(made->cap, FLASH_ATTN_ISA_AMX_FP16)))
        fa_isa_try_amx_fp16(&made->isa);
    fa_cpu_use_tuning(made, &tuning);
    *cpu = made;
    return FLASH_ATTN_OK;
}

void fa_cpu_destroy(fa_cpu *cpu)
{
    if (!cpu)
        return;
    fa_threads_destroy(cpu->threads);
    if (cpu->kept)
        free(atomic_load(&cpu->kept->block));
    free(cpu->kept);
    free(cpu);
}

int fa_cpu_num_threads(const fa_cpu *cpu) { return cpu->num_threads; }

void fa_cpu_info(const fa_cpu *cpu, flash_attn_device_info *info)
{
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", cpu->isa.name);
    snprintf(info->isa, sizeof info->isa, "%s", fa_isa_name(cpu->tier));
    snprintf(info->features, sizeof info->features, "%s%s", cpu->isa.features,
             cpu->isa.hidden == FA_HIDDEN_RUNS     ? " amx-fp16:assumed"
             : cpu->isa.hidden == FA_HIDDEN_ABSENT ? " amx-fp16:absent"
                                                   : "");
    info->num_cores    = fa_num_cores();
    info->num_threads  = cpu->num_threads;
    info->l1_bytes     = cpu->isa.l1_bytes;
    info->l2_bytes     = cpu->isa.l2_bytes;
    info->l3_bytes     = cpu->isa.l3_bytes;
    info->tuning       = cpu->tuned;
    info->memory_bytes = pages > 0 && page_bytes > 0 ? (int64_t)pages * page_bytes : 0;
}

/* ---- calls ---- */

enum { LEAST_MEAN = 1 }; /* queries of a document: packed sequences are faster at any (decision 0102) */

/* The call that is to run: *call, or where that shows documents *packed, whose lengths are to be freed. */
static flash_attn_status begin_call(const fa_call **call, fa_call *packed, int32_t **cu_seqlens)
{
    *cu_seqlens = NULL;
    if (!fa_documents_pack(*call, LEAST_MEAN, packed))
        return FLASH_ATTN_OK;
    *call = packed;
    if (fa_documents_bytes(packed) == 0)
        return FLASH_ATTN_OK;
    FA_TRY(fa_documents_make(packed, cu_seqlens));
    packed->cu_seqlens_q = *cu_seqlens;
    packed->cu_seqlens_k = *cu_seqlens + packed->batch + 1;
    return FLASH_ATTN_OK;
}

flash_attn_status fa_cpu_run(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    fa_call  packed;
    int32_t *cu_seqlens;
    FA_TRY(begin_call(&call, &packed, &cu_seqlens));
    flash_attn_status status = call->pass == FLASH_ATTN_FORWARD ? fa_cpu_forward(cpu, call, exec) : fa_cpu_backward(cpu, call, exec);
    free(cu_seqlens);
    return status;
}

static size_t workspace_of(const fa_cpu *cpu, const fa_call *call)
{
    size_t bytes = call->pass == FLASH_ATTN_FORWARD ? fa_forward_bytes(cpu, call, cpu->num_threads)
                                                    : fa_backward_bytes(cpu, call, cpu->num_threads);
    if (call->dbias.data) { /* a call that leaves it out may take kernels that need more */
        fa_call without    = *call;
        without.dbias.data = NULL;
        size_t other       = fa_backward_bytes(cpu, &without, cpu->num_threads);
        bytes              = other > bytes ? other : bytes;
    }
    if (call->pass == FLASH_ATTN_BACKWARD && call->q.dtype == FLASH_ATTN_F16 && cpu->wide_f16) {
        fa_call wide  = *call; /* whose gradients may be float32 */
        wide.dq.dtype = FLASH_ATTN_F32;
        wide.dq.data  = &wide;
        size_t other  = fa_backward_bytes(cpu, &wide, cpu->num_threads);
        bytes         = other > bytes ? other : bytes;
    }
    return bytes + FA_ALIGN_SLACK;
}

size_t fa_cpu_workspace(const fa_cpu *cpu, const fa_call *call)
{
    fa_call packed;
    return workspace_of(cpu, fa_documents_pack(call, LEAST_MEAN, &packed) ? &packed : call);
}

static void explain_of(const fa_cpu *cpu, const fa_call *call, const fa_exec *exec, flash_attn_explanation *explanation)
{
    int threads                  = fa_min_int(exec->num_threads, cpu->num_threads);
    explanation->num_splits      = 1;
    explanation->num_tasks       = 0;
    explanation->num_threads     = threads;
    explanation->workspace_bytes = (int64_t)workspace_of(cpu, call);
    if (call->pass == FLASH_ATTN_FORWARD)
        fa_forward_explain(cpu, call, threads, explanation);
    else
        fa_backward_explain(cpu, call, threads, explanation);
}

flash_attn_status fa_cpu_explain(const fa_cpu *cpu, const fa_call *call, const fa_exec *exec, flash_attn_explanation *explanation)
{
    fa_call  packed;
    int32_t *cu_seqlens;
    FA_TRY(begin_call(&call, &packed, &cu_seqlens));
    explain_of(cpu, call, exec, explanation);
    free(cu_seqlens);
    return FLASH_ATTN_OK;
}
