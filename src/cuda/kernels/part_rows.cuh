/* Rows of partial results: a row of q each, or, where a call has sequences of few queries alone (FA_OF_FEW), args.few_queries of each sequence. */
#ifndef FA_PART_ROWS_CUH
#define FA_PART_ROWS_CUH

#include "numbers.cuh"

constexpr bool OF_FEW = FA_OF_LENGTH == FA_OF_FEW;

/* Whether a sequence of so many rows of q is this call's (FA_OF_MANY: one of more than args.few_queries). */
FA_DEVICE bool has_length(const fa_args &args, int rows) { return FA_OF_LENGTH == FA_OF_ALL || OF_FEW == (rows <= args.few_queries); }

FA_DEVICE int tokens_of_parts(const fa_args &args) { return OF_FEW ? args.batch * args.few_queries : args.q_entries * args.q_rows; }

/* Of sequence b, which begins at [q_entry, q_row], row i. */
FA_DEVICE fa_i64 token_of_part(const fa_args &args, int b, int q_entry, int q_row, int i)
{
    return OF_FEW ? (fa_i64)b * args.few_queries + i : (fa_i64)q_entry * args.q_rows + q_row + i;
}

/* Row of o_partial and lse_partial, of part p. */
FA_DEVICE fa_i64 row_of_part(const fa_args &args, int p, int head, int b, int q_entry, int q_row, int i)
{
    return ((fa_i64)p * args.heads_q + head) * tokens_of_parts(args) + token_of_part(args, b, q_entry, q_row, i);
}

#endif
