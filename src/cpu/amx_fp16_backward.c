/* The AMX backward for float16 in one piece: the same text with TDPFP16PS, P and dS in float16. */
#define FA_AMX_FP16
#include "cpu/amx_backward.c"
