/* What cpu.c asks of the two passes beside running them. */
#ifndef FA_CPU_PASSES_H
#define FA_CPU_PASSES_H

#include "cpu/cpu.h"

/* Bytes of memory that a call on so many threads takes, before alignment. They rise with the number of threads. */
size_t fa_forward_bytes(const fa_cpu *cpu, const fa_call *call, int threads);
size_t fa_backward_bytes(const fa_cpu *cpu, const fa_call *call, int threads);

/* Run it. */
flash_attn_status fa_cpu_forward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec);
flash_attn_status fa_cpu_backward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec);

/* Fill kernel, reason, tiles, splits, tasks and scratch. */
void fa_forward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation);
void fa_backward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation);

/* The table for `rows` queries of a group on `keys` keys, choices.c. */
const fa_kernels *fa_forward_kernels(const fa_cpu *cpu, const fa_call *call, int64_t rows, int64_t keys);
const fa_kernels *fa_backward_kernels(const fa_cpu *cpu, const fa_call *call, int64_t rows, int64_t keys);

/* The forward's table for long sequences; short ones may take cpu->vector. */
const fa_kernels *fa_forward_table(const fa_cpu *cpu, const fa_call *call);

#endif
