/* What K7's kernels share: one scale for each head of Q, of K and of V. */
#ifndef FA_LADDER_FP8_CUH
#define FA_LADDER_FP8_CUH

#include "ladder.cuh"

constexpr float LARGEST_E4M3 = 448.0f;

/* Heads in args.largest: all of Q, then of K, then of V. */
FA_DEVICE int q_head(const fa_args &args, int entry, int head) { return entry * args.heads_q + head; }
FA_DEVICE int k_head(const fa_args &args, int entry, int head) { return args.batch * args.heads_q + entry * args.heads_k + head; }
FA_DEVICE int v_head(const fa_args &args, int entry, int head) { return k_head(args, entry, head) + args.batch * args.heads_k; }

/* What a head's E4M3 are to be multiplied with: its largest number is 448. */
FA_DEVICE float descale_of(const fa_args &args, int head)
{
    float largest = args.largest[head];
    return largest < 1e-30f ? 1.0f : largest / LARGEST_E4M3; /* 0, or as good as that */
}

#endif
