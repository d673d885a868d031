#include "cpu/passes.h"
size_t fa_backward_bytes(const fa_cpu *cpu, const fa_call *call, int threads) { (void)cpu; (void)call; (void)threads; return 0; }
void fa_backward_explain(const fa_cpu *cpu, const fa_call *call, int threads, flash_attn_explanation *e) { (void)cpu; (void)call; (void)threads; (void)e; }
flash_attn_status fa_cpu_backward(fa_cpu *cpu, const fa_call *call, const fa_exec *exec) { (void)cpu; (void)call; (void)exec; return FLASH_ATTN_UNSUPPORTED; }
