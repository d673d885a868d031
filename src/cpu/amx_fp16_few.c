/* Few queries against long keys of float16 in one piece: as those of bfloat16, with TDPFP16PS. */
#define FA_AMX_FP16
#include "cpu/amx_few.c"
