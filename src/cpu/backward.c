/* The backward pass: by the formula until Algorithm 2 over tiles takes its place. */
#include "cpu/passes.h"

#include <stdio.h>

size_t fa_backward_bytes(const fa_cpu *cpu, const fa_call *call, int threads)
{
    (void)cpu, (void)call, (void)threads;
    return 0;
}

void fa_backward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *explanation)
{
    (void)cpu, (void)call, (void)threads;
    snprintf(explanation->kernel, sizeof explanation->kernel, "backward_reference");
}

flash_attn_status fa_cpu_backward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    (void)cpu, (void)exec;
    return fa_reference_backward(call);
}
