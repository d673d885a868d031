/* The AMX forward for float16 in one piece: the same text with TDPFP16PS and P in float16. */
#define FA_AMX_FP16
#include "cpu/amx_forward.c"
