/* combine.cu, fold.cu: whose a row of Q is. */
#ifndef FA_ROW_OWNER_CUH
#define FA_ROW_OWNER_CUH

#include "mask.cuh"

/* The sequence that owns row `row` of entry `entry`: the last one that starts at or before it. */
FA_DEVICE int sequence_of(const fa_args &args, int entry, int row)
{
    if (!args.cu_seqlens_q)
        return entry;
    int low = 0, high = args.batch; /* cu_seqlens_q[low] <= row < cu_seqlens_q[high] */
    row += entry * args.q_rows;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (args.cu_seqlens_q[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Of a token of partial results the row of q. True if it belongs to a sequence of the call; counts: it is also one of the queries that count. */
FA_DEVICE bool find_row(const fa_args &args, int token, int &entry, int &row, bool &counts)
{
    entry  = OF_FEW ? 0 : token / args.q_rows;
    row    = OF_FEW ? 0 : token % args.q_rows;
    counts = true;
    if (FA_OF_LENGTH != FA_OF_ALL) {
        sequence s = sequence_at(args, OF_FEW ? token / args.few_queries : sequence_of(args, entry, row));
        if (OF_FEW)
            row = s.q_row + token % args.few_queries;
        if (row >= s.q_row + s.rows_q)
            return false;
    }
    if (args.cu_seqlens_q && entry * args.q_rows + row >= args.cu_seqlens_q[args.batch])
        return false;
    if (args.seqused_q) {
        int b = sequence_of(args, entry, row);
        counts = row - (args.cu_seqlens_q ? args.cu_seqlens_q[b] : 0) < args.seqused_q[b]; /* documents have none */
    }
    return true;
}

#endif
