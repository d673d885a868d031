/*
 * The bias's gradient in backward_sm90.cu, dS. Up to 128 columns a warp of its own takes it from shared memory, where it lies for dQ; BY_COLUMNS, where it lies turned round, who makes
 * it from registers. Either stores it (dbias_direct: each element has one term), TMA for the warp, or adds it to floats, from which backward_convert_sm90.cu has it.
 */
#ifndef FA_BACKWARD_DBIAS_SM90_CUH
#define FA_BACKWARD_DBIAS_SM90_CUH

#include "backward_walk_sm90.cuh"

/* Where dbias's row of a query begins, as an offset from its data. */
FA_DEVICE fa_i64 dbias_row(const fa_view &view, int b, int head, int query) { return b * view.stride[0] + head * view.stride[1] + query * view.stride[2]; }

/* A step's dS to the floats, by one warp, which has few registers and is to keep up with the consumers: two rows at once, four keys a lane, of a consumer's 64; four times these, so
 * that loads overlap. A row of the floats is a whole number of four, and a hidden key's dS is 0. `end`: of all lanes' rows, of which this one has `rows`. WHOLE: all rows and keys are there,
 * and no branch stands between the loads. */
template <bool WHOLE> FA_DEVICE void add_rows_of_dbias(const fa_args &args, float *to, fa_i64 apart, unsigned ds, int end, int rows)
{
    constexpr int AT_ONCE = 4;
    float         factor  = FA_HAS_DROPOUT ? args.dropout.keep_scale : 1.0f;
#pragma unroll 1
    for (int row = 0; row < (WHOLE ? FA_TILE_Q : end); row += 2 * AT_ONCE, ds += 2 * AT_ONCE * 128) {
        float2 x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            x[n] = shared_load_float2((ds ^ n << 5) + n * 256);
        __syncwarp(); /* ptxas moves no load behind it */
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++, to += apart)
            if (WHOLE || row + 2 * n < rows) {
                float2 a = unpack<FA_DTYPE>(__float_as_uint(x[n].x)), b = unpack<FA_DTYPE>(__float_as_uint(x[n].y));
                reduce_add_4(to, a.x * factor, a.y * factor, b.x * factor, b.y * factor);
            }
    }
}

FA_DEVICE void add_tile_of_dbias(const fa_args &args, const work &w, const walk &at, unsigned ds)
{
    int    lane  = threadIdx.x % 32, first = at.tile * FA_TILE_Q, end = fa_min_int(FA_TILE_Q, w.seq.seqlen_q - first), key = w.first_k + lane % 16 * 4;
    float *to    = (float *)args.dbias.data + dbias_row(args.dbias, w.b, at.head, first + lane / 16) + key;
    fa_i64 apart = 2 * args.dbias.stride[2];
    bool   whole = end == FA_TILE_Q && w.first_k + FA_TILE_K <= w.seq.seqlen_k;
    ds += lane / 16 * 128 + ((lane % 16 / 2 ^ lane / 16) << 4) + lane % 2 * 8;
#pragma unroll 1
    for (int group = 0; group < CONSUMERS; group++, key += 64, to += 64, ds += FA_TILE_Q * 128)
        if (whole)
            add_rows_of_dbias<true>(args, to, apart, ds, end, end);
        else
            add_rows_of_dbias<false>(args, to, apart, ds, end, key < w.seq.seqlen_k ? end - lane / 16 : 0);
}

/* A step's dS to where the caller wants it, by the thread that asks TMA: queries past the last have a dS of 0, and so does dbias there. */
FA_DEVICE void store_tile_of_dbias(const fa_maps &maps, const work &w, const walk &at, unsigned ds)
{
#pragma unroll
    for (int group = 0; group < CONSUMERS; group++)
        tma_store(maps.dbias, ds + group * (FA_TILE_Q * 128), w.first_k + first_key_of(group), at.tile * FA_TILE_Q, at.head, w.b);
    bulk_added_was_read();
}

/* By that warp. */
FA_DEVICE void pass_dbias(const fa_args &args, const fa_maps &maps)
{
    unsigned n = 0;
    for (unsigned item = 0; has_item(item); item++) {
        const work &w  = work_at(item);
        walk        at = start_walk(args, w);
        for (int left = steps_of(w); left > 0; left--, n++, advance(args, at)) {
            barrier_wait(ds_there(n), filled<DS_STAGES>(n));
            if (!args.dbias_direct)
                add_tile_of_dbias(args, w, at, ds_tile(n));
            else if (threadIdx.x % 32 == 0)
                store_tile_of_dbias(maps, w, at, ds_tile(n));
            __syncwarp();
            release(ds_passed(n));
        }
        __syncwarp();
        release(added(item));
    }
}

/* By a consumer: the memory of dS that it is about to write has been passed; and what it has written is there. */
FA_DEVICE void wait_for_passed_ds(unsigned n)
{
    if constexpr (PASSES_DBIAS)
        barrier_wait(ds_passed(n), freed<DS_STAGES>(n));
}

FA_DEVICE void give_ds(unsigned n)
{
    if constexpr (PASSES_DBIAS) {
        fence_async();
        __syncwarp();
        release(ds_there(n));
    }
}

/* BY_COLUMNS, queries down: a thread's pairs of neighbouring keys, of rows `query` and the eighth behind it. */
template <int COUNT> FA_DEVICE void add_dbias(const fa_args &args, const work &w, const float (&ds)[COUNT], int head, int query, int key)
{
    int            queries = w.seq.seqlen_q - query, keys = w.seq.seqlen_k - key;
    const fa_view &view = args.dbias_direct ? args.dbias_out : args.dbias;
    fa_i64         to   = dbias_row(view, w.b, head, query) + key;
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
        int    h = n / 2 % 2, at = n / 4 * 8;
        fa_i64 element = to + h * 8 * view.stride[2] + at;
        if (8 * h >= queries || at >= keys)
            continue;
        if (!args.dbias_direct)
            reduce_add_2((float *)args.dbias.data + element, ds[n], ds[n + 1]);
        else if (at + 1 < args.dbias_extent[3] - key)
            *(unsigned *)((fa_u16 *)args.dbias_out.data + element) = pack<FA_DTYPE>(ds[n], ds[n + 1]);
        else
            ((fa_u16 *)args.dbias_out.data)[element] = (fa_u16)pack<FA_DTYPE>(ds[n], 0.0f);
    }
}

#endif
