/* Nothing has been dealt yet (args.next_item). The launch behind begins beside this one, and so waits less than for a memset (decision 0080). One block. */
#include "args.h"
#include "constants.h"
#include "ptx_sm80.cuh"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) deal(const __grid_constant__ fa_args args)
{
    let_next_launch_begin();
    if (threadIdx.x == 0)
        *args.next_item = 0;
}
