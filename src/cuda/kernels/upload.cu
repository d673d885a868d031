/* Host words into device memory: they travel as the launch's own parameters. One block. */
#include "args.h"
#include "constants.h"

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) upload(const __grid_constant__ fa_upload_args args)
{
    for (int i = threadIdx.x; i < args.count; i += 32 * FA_WARPS)
        args.to[i] = args.word[i];
}
