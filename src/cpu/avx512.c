/* AVX-512 F, BW, DQ, VL. 16-bit inputs are widened to float32 as they are packed. */
#include "cpu/avx512_dropout.h"
#include "cpu/avx512_tanh.h"
#include "cpu/avx512_vector.h"
#include "cpu/cpu.h"

#define TIER_NAME "avx512"
#define TIER_ISA FLASH_ATTN_ISA_AVX512

#define V_DROPOUT_FACTORS fa_avx512_dropout_factors
#define V_TANH_STEPS FA_TANH_STEPS
#define tanh_vector fa_tanh_of_steps

#include "cpu/kernels.inc"

const fa_kernels *fa_kernels_avx512(void) { return &table; }
