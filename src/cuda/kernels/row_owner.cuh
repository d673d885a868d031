/* combine.cu, fold.cu: whose a row of Q is. */
#ifndef FA_ROW_OWNER_CUH
#define FA_ROW_OWNER_CUH

#include "numbers.cuh"

/* The sequence that owns row `row` of entry `entry`: the last one that starts at or before it. */
FA_DEVICE int sequence_of(const fa_args &args, int entry, int row)
{
    if (!args.cu_seqlens_q)
        return entry;
    int low = 0, high = args.batch; /* cu_seqlens_q[low] <= row < cu_seqlens_q[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (args.cu_seqlens_q[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* True if the row belongs to a sequence; counts: it is also one of the queries that count. */
FA_DEVICE bool find_row(const fa_args &args, int entry, int row, bool &counts)
{
    counts = true;
    if (args.cu_seqlens_q && row >= args.cu_seqlens_q[args.batch])
        return false;
    if (args.seqused_q) {
        int b = sequence_of(args, entry, row);
        counts = row - (args.cu_seqlens_q ? args.cu_seqlens_q[b] : 0) < args.seqused_q[b];
    }
    return true;
}

#endif
