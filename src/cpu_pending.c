/* The CPU device until its backend is in src/cpu: the reference answers. Remove this file with the first source there
 * that defines fa_cpu_create. */
#include "call.h"

#include <stdio.h>

flash_attn_status fa_cpu_create(fa_cpu **cpu, const flash_attn_options *options)
{
    (void)options;
    *cpu = NULL;
    return FLASH_ATTN_OK;
}

void fa_cpu_destroy(fa_cpu *cpu) { (void)cpu; }

void fa_cpu_info(const fa_cpu *cpu, flash_attn_device_info *info)
{
    (void)cpu;
    snprintf(info->isa, sizeof info->isa, "double");
    info->num_cores = info->num_threads = 1;
}

int fa_cpu_num_threads(const fa_cpu *cpu)
{
    (void)cpu;
    return 1;
}

size_t fa_cpu_workspace(const fa_cpu *cpu, const fa_call *call)
{
    (void)cpu;
    (void)call;
    return 0;
}

void fa_cpu_explain(const fa_cpu *cpu, const fa_call *call, const fa_exec *exec, flash_attn_explanation *explanation)
{
    (void)cpu;
    (void)exec;
    snprintf(explanation->kernel, sizeof explanation->kernel, "%s_reference",
             call->pass == FLASH_ATTN_FORWARD ? "forward" : "backward");
}

flash_attn_status fa_cpu_forward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    (void)cpu;
    (void)exec;
    return fa_reference_forward(call);
}

flash_attn_status fa_cpu_backward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec)
{
    (void)cpu;
    (void)exec;
    return fa_reference_backward(call);
}
