/* The CPU backend's context: which tier, how many threads; and what does not run attention itself. */
#include "cpu/cpu.h"
#include "cpu/passes.h"
#include "cpu/tile.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const struct {
    const char    *name;
    flash_attn_isa isa;
} isa_names[] = {
    {"scalar", FLASH_ATTN_ISA_SCALAR}, {"neon", FLASH_ATTN_ISA_NEON}, {"avx2", FLASH_ATTN_ISA_AVX2},
    {"avx512", FLASH_ATTN_ISA_AVX512}, {"amx", FLASH_ATTN_ISA_AMX},
};

/* secure_getenv: a set-user-id program takes no advice from its caller's environment. */
static flash_attn_status cap_from_environment(flash_attn_isa *cap)
{
    const char *value = secure_getenv("FLASH_ATTN_MAX_ISA");
    *cap              = FLASH_ATTN_ISA_AMX;
    if (!value || !*value)
        return FLASH_ATTN_OK;
    for (size_t n = 0; n < sizeof isa_names / sizeof isa_names[0]; n++) {
        if (strcmp(value, isa_names[n].name) == 0) {
            *cap = isa_names[n].isa;
            return FLASH_ATTN_OK;
        }
    }
    return fa_fail(FLASH_ATTN_INVALID, "FLASH_ATTN_MAX_ISA is \"%s\"; expected scalar, neon, avx2, avx512 or amx", value);
}

static flash_attn_status threads_from_environment(int *num_threads)
{
    const char *value = secure_getenv("FLASH_ATTN_NUM_THREADS");
    *num_threads      = fa_num_cores();
    if (!value || !*value)
        return FLASH_ATTN_OK;
    char *end;
    long  number = strtol(value, &end, 10);
    if (*end || number < 1 || number > 4096)
        return fa_fail(FLASH_ATTN_INVALID, "FLASH_ATTN_NUM_THREADS is \"%s\"; expected a number from 1 to 4096", value);
    *num_threads = (int)number;
    return FLASH_ATTN_OK;
}

/* The highest tier under the cap that this library has and this machine runs. */
static void choose_tables(fa_cpu *cpu, flash_attn_isa cap, bool no_amx_split)
{
    flash_attn_isa best = cpu->isa.best < cap ? cpu->isa.best : cap;
    cpu->vector         = fa_kernels_scalar();
#if defined(__x86_64__)
    if (best >= FLASH_ATTN_ISA_AVX2)
        cpu->vector = fa_kernels_avx2();
    if (best >= FLASH_ATTN_ISA_AVX512)
        cpu->vector = fa_kernels_avx512();
#elif defined(__aarch64__)
    if (best >= FLASH_ATTN_ISA_NEON)
        cpu->vector = fa_kernels_neon();
#endif
    cpu->tier = cpu->vector->isa;
    for (int dtype = 0; dtype < 4; dtype++) {
        const fa_kernels *amx = NULL;
#if defined(__x86_64__) && defined(FA_HAVE_AMX)
        if (best >= FLASH_ATTN_ISA_AMX && (dtype == FLASH_ATTN_BF16 || !no_amx_split))
            amx = fa_kernels_amx(cpu->vector, (flash_attn_dtype)dtype);
#endif
        (void)no_amx_split;
        cpu->kernels[dtype] = amx ? amx : cpu->vector;
        if (amx)
            cpu->tier = FLASH_ATTN_ISA_AMX;
    }
}

flash_attn_status fa_cpu_create(fa_cpu **cpu, const flash_attn_options *options)
{
    int            num_threads;
    flash_attn_isa cap;
    FA_TRY(threads_from_environment(&num_threads));
    FA_TRY(cap_from_environment(&cap));
    if (options->num_threads > 0)
        num_threads = options->num_threads;
    if (options->max_isa != FLASH_ATTN_ISA_AUTO)
        cap = options->max_isa;
    fa_cpu *made = calloc(1, sizeof *made);
    if (made)
        made->threads = fa_threads_create(options, num_threads);
    if (!made || !made->threads) {
        free(made);
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a context of %d threads", num_threads);
    }
    made->num_threads = num_threads;
    fa_isa_detect(&made->isa);
    choose_tables(made, cap, options->no_amx_split);
    *cpu = made;
    return FLASH_ATTN_OK;
}

void fa_cpu_destroy(fa_cpu *cpu)
{
    if (!cpu)
        return;
    fa_threads_destroy(cpu->threads);
    free(cpu);
}

int fa_cpu_num_threads(const fa_cpu *cpu) { return cpu->num_threads; }

void fa_cpu_info(const fa_cpu *cpu, flash_attn_device_info *info)
{
    const char *isa = "scalar";
    for (size_t n = 0; n < sizeof isa_names / sizeof isa_names[0]; n++) {
        if (isa_names[n].isa == cpu->tier)
            isa = isa_names[n].name;
    }
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", cpu->isa.name);
    snprintf(info->isa, sizeof info->isa, "%s", isa);
    snprintf(info->features, sizeof info->features, "%s", cpu->isa.features);
    info->num_cores    = fa_num_cores();
    info->num_threads  = cpu->num_threads;
    info->l1_bytes     = cpu->isa.l1_bytes;
    info->l2_bytes     = cpu->isa.l2_bytes;
    info->l3_bytes     = cpu->isa.l3_bytes;
    info->memory_bytes = pages > 0 && page_bytes > 0 ? (int64_t)pages * page_bytes : 0;
}

/* A call may be given fewer threads than the context has, and then cuts its work into larger pieces: the most that any
 * number of threads takes. */
size_t fa_cpu_workspace(const fa_cpu *cpu, const fa_call *call)
{
    size_t most = 0;
    for (int threads = 1; threads <= cpu->num_threads; threads++) {
        size_t bytes = call->pass == FLASH_ATTN_FORWARD ? fa_forward_bytes(cpu, call, threads)
                                                        : fa_backward_bytes(cpu, call, threads);
        most = bytes > most ? bytes : most;
    }
    return most + FA_ALIGN_SLACK;
}

/* ---- explain ---- */

/* Pairs that one head of a sequence sees. */
static double count_pairs(const fa_call *call, int64_t b, const fa_sequence *seq)
{
    double   pairs = 0;
    fa_range keys  = {seq->key_begin, seq->seqlen_k};
    for (int i = 0; i < seq->seqlen_q; i++) {
        fa_range seen = fa_keys_seen(call->window, seq->diagonal, (fa_range){i, i + 1}, keys);
        if (call->slices.count == 0) {
            pairs += seen.end > seen.begin ? seen.end - seen.begin : 0;
            continue;
        }
        for (int j = seen.begin; j < seen.end; j++)
            pairs += fa_sees(call, seq, b, i, j);
    }
    return pairs;
}

static double bytes_of(const flash_attn_tensor *t)
{
    if (!t->data && t->shape[0] == 0)
        return 0;
    return (double)t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3] * fa_dtype_bytes(t->dtype);
}

void fa_cpu_explain(const fa_cpu *cpu, const fa_call *call, const fa_exec *exec, flash_attn_explanation *explanation)
{
    double pairs = 0, d = call->head_dim, dv = call->head_dim_v;
    int    threads = fa_min_int(exec->num_threads, cpu->num_threads);
    memset(explanation, 0, sizeof *explanation);
    for (int64_t b = 0; b < call->batch; b++) {
        fa_sequence seq = fa_sequence_at(call, b);
        pairs += count_pairs(call, b, &seq) * call->heads_q;
    }
    explanation->num_splits      = 1;
    explanation->num_threads     = threads;
    explanation->workspace_bytes = (int64_t)fa_cpu_workspace(cpu, call);
    explanation->bytes           = bytes_of(&call->q) + bytes_of(&call->k) + bytes_of(&call->v) + bytes_of(&call->o);
    if (call->pass == FLASH_ATTN_FORWARD) {
        explanation->flops = pairs * (2 * d + 2 * dv); /* S, O */
        fa_forward_explain(cpu, call, threads, explanation);
    } else {
        explanation->flops = pairs * (6 * d + 4 * dv); /* S, dQ, dK; dP, dV */
        explanation->bytes += explanation->bytes;      /* dQ, dK, dV, dO */
        fa_backward_explain(cpu, call, threads, explanation);
    }
}
