/* forward_sm90.cu: what is rare and slow, by a warp for its 16 rows, in what it has just stored. */
#ifndef FA_RARE_SM90_CUH
#define FA_RARE_SM90_CUH

#include "far_rows.cuh"
#include "fold_parts.cuh"
#include "rows.cuh"
#include "work_sm90.cuh"

/* A part's results are float32, in the workspace. */
constexpr int DTYPE_OUT = SPLIT ? FA_F32 : FA_DTYPE_O;

FA_DEVICE char *base_of_o(const fa_args &args) { return (char *)(SPLIT ? (void *)args.o_partial : args.o.data); }

#if FA_HAS_SPLIT
/* Row of o_partial and lse_partial. */
FA_DEVICE fa_i64 partial_row(const fa_args &args, const work &w, row_owner of)
{
    return row_of_part(args, w.part, of.head, w.b, w.seq.q_entry, w.seq.q_row, of.i);
}
#endif

/* WHOLE: of a row of the tile, in this block's place. */
FA_DEVICE fa_i64 own_partial_row(const work &w, int row) { return (fa_i64)blockIdx.x * FA_TILE_Q + row - w.first_row; }

FA_DEVICE fa_i64 offset_of_o(const fa_args &args, const work &w, row_owner of)
{
#if FA_HAS_SPLIT
    if (SPLIT)
        return partial_row(args, w, of) * FA_HEAD_DIM_V;
#endif
    return w.seq.q_entry * args.o.stride[0] + (fa_i64)(w.seq.q_row + of.i) * args.o.stride[1] + of.head * args.o.stride[2];
}

FA_DEVICE void store_lse(const fa_args &args, const work &w, row_owner of, float lse)
{
    if (args.lse.data)
        ((float *)args.lse.data)[w.seq.q_entry * args.lse.stride[0] + of.head * args.lse.stride[1] +
                                 (w.seq.q_row + of.i) * args.lse.stride[2]] = lse;
}

FA_DEVICE float sink_log2_of(const fa_args &args, int head)
{
    if (SPLIT || !args.sinks.data) /* fold.cu has it */
        return -infinity();
    return load_element(args.sinks.data, head * args.sinks.stride[1], args.sinks.dtype) * FA_LOG2E;
}

/* The work as far_rows.cuh wants to see it. */
struct plain_work {
    int      b, head, kv_head;
    sequence seq;
    fa_range keys, slices;
    int      k, v; /* not used: a row is found from the view */
};

FA_DEVICE plain_work plain_work_of(const fa_args &args, const work &w)
{
    return {w.b, w.head, w.kv_head, w.seq, w.keys, FA_HAS_SLICES ? slices_of(args, w.b) : fa_range{0, 0}, 0, 0};
}

/* Row j of the sequence and those after it. */
FA_DEVICE auto rows_from(const fa_args &args, const plain_work &w, int, const fa_view &view, int j)
{
    const fa_element *data = (const fa_element *)view.data;
    if constexpr (FA_HAS_PAGED)
        return rows_of_pages{data + w.kv_head * view.stride[2], args.page_table + w.b * args.page_row_stride, view.stride[0], view.stride[1], j, args.kv_rows,
                             args.kv_entries, w.seq.rows_k};
    else
        return rows_of{data + w.seq.kv_entry * view.stride[0] + (fa_i64)(w.seq.kv_row + j) * view.stride[1] + w.kv_head * view.stride[2], view.stride[1]};
}

/* Of a warp's rows n and 8 + n, bit 4 n; bit 4 n + 1: it sees something. */
struct far_rows {
    unsigned upper, lower;
};

/* Where such a row goes: O, or a part's place, which is (WHOLE) the block's own for a row of its tile. */
struct far_place {
    char  *base;
    fa_i64 offset;
};

FA_DEVICE far_place place_of_far(const fa_args &args, const work &w, int row, row_owner of)
{
    if constexpr (WHOLE)
        return {(char *)args.o_partial, own_partial_row(w, row) * FA_HEAD_DIM_V};
    return {base_of_o(args), offset_of_o(args, w, of)};
}

FA_DEVICE void store_far_lse(const fa_args &args, const work &w, int row, row_owner of, float lse)
{
#if FA_HAS_SPLIT
    ((float2 *)args.lse_partial)[WHOLE ? own_partial_row(w, row) : partial_row(args, w, of)] = sums_of_lse(lse);
    return;
#endif
    store_lse(args, w, of, lse);
}

/* Far rows once more, with these of the item's keys; where V spoilt O, also O of those that see something. */
static __device__ __noinline__ void redo_far_rows(const fa_args &args, const work &shared_work, fa_range keys, int first, far_rows far, bool spoilt = false)
{
    __syncwarp();
    plain_work w = plain_work_of(args, shared_work);
    w.seq.seqlen_q = same_for_all(w.seq.seqlen_q); /* or the compiler sees shuffles in loops of which it knows nothing, and the */
    w.keys         = {same_for_all(keys.begin), same_for_all(keys.end)}; /* main loop takes 48 instructions more */
    first          = same_for_all(first);
    far            = {(unsigned)same_for_all(far.upper), (unsigned)same_for_all(far.lower)};
    for (int row = 0; row < 16; row++) {
        constexpr int COLS = FA_HEAD_DIM_V / 32;
        row_owner     of   = owner_of(args, shared_work, first + row);
        unsigned      bits = (row < 8 ? far.upper : far.lower) >> row % 8 * 4;
        bool          only_o = !FA_HAS_SPLIT && !(bits & 1); /* a part's is stored by another scale, which LSE goes with */
        if (!(bits & (spoilt ? 3 : 1)) || of.i >= w.seq.seqlen_q)
            continue;
        double o[COLS], peak, total;
        float  lse;
        if (!far_row<COLS>(args, w, of.head, of.i, o, peak, total, only_o))
            continue;
        float scale = end_far_row(peak, total, WHOLE ? -infinity() : sink_log2_of(args, of.head), lse) * descale_of(args.descale_v, w.b, w.kv_head);
        if constexpr (FA_HAS_DROPOUT)
            scale *= args.dropout.keep_scale;
        if (threadIdx.x % 32 == 0 && !only_o)
            store_far_lse(args, shared_work, first + row, of, lse);
        far_place to = place_of_far(args, shared_work, first + row, of);
        for (int c = 0, col = threadIdx.x % 32; c < COLS; c++, col += 32)
            if (col < args.head_dim_v)
                store_element(to.base, to.offset + col, FA_HAS_SPLIT ? FA_F32 : FA_DTYPE_O, (float)o[c] * scale);
    }
}

#endif
