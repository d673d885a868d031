/*
 * flash_attn_append_kv: new keys and values into a cache, keys and queries rotated on the way (rotary embedding). One
 * warp a row. What cache_seqlens, cache_batch_idx and the page table say is bounded: a row that does not fit the cache,
 * or whose page or entry does not exist, is not written.
 */
#include "numbers.cuh"

/* Elements of 1, 2 or 4 bytes, bit by bit. */
FA_DEVICE void copy_element(void *to, fa_i64 to_at, const void *from, fa_i64 from_at, int dtype)
{
    if (dtype == FA_F32)
        ((float *)to)[to_at] = ((const float *)from)[from_at];
    else if (dtype == FA_F8E4M3)
        ((unsigned char *)to)[to_at] = ((const unsigned char *)from)[from_at];
    else
        ((fa_u16 *)to)[to_at] = ((const fa_u16 *)from)[from_at];
}

/* One head's row of `count` elements; the first `turned` of them rotated by the angles of `position`. A pair is read by
 * the lane that writes it, so `to` may be `from`. */
FA_DEVICE void append_row(const fa_append_args &args, const fa_view &to, fa_i64 to_at, const fa_view &from, fa_i64 from_at,
                          int count, int turned, int position)
{
    int lane = threadIdx.x % 32, half = turned / 2;
    for (int c = lane; c < half; c += 32) {
        int   first = args.interleaved ? 2 * c : c, second = args.interleaved ? 2 * c + 1 : c + half;
        float cosine = load_element(args.cos.data, position * args.cos.stride[0] + c * args.cos.stride[1], args.cos.dtype);
        float sine   = load_element(args.sin.data, position * args.sin.stride[0] + c * args.sin.stride[1], args.sin.dtype);
        float x      = load_element(from.data, from_at + first * from.stride[3], from.dtype);
        float y      = load_element(from.data, from_at + second * from.stride[3], from.dtype);
        store_element(to.data, to_at + first * to.stride[3], to.dtype, x * cosine - y * sine);
        store_element(to.data, to_at + second * to.stride[3], to.dtype, x * sine + y * cosine);
    }
    for (int c = turned + lane; c < count; c += 32)
        copy_element(to.data, to_at + c * to.stride[3], from.data, from_at + c * from.stride[3], to.dtype);
}

/* Entry (or page) and row in it where key `position` of sequence b lies; false: nowhere. */
FA_DEVICE bool find_slot(const fa_append_args &args, int b, int position, fa_i64 &entry, fa_i64 &row)
{
    if (position < 0)
        return false;
    if (args.page_table) {
        int page = position / args.cache_rows;
        if (page >= args.pages_per_seq)
            return false;
        entry = args.page_table[b * args.page_row_stride + page];
        row   = position % args.cache_rows;
    } else {
        entry = args.cache_batch_idx ? args.cache_batch_idx[b] : b;
        row   = position;
        if (position >= args.cache_rows)
            return false;
    }
    return entry >= 0 && entry < args.cache_entries;
}

extern "C" __global__ void __launch_bounds__(32 * FA_WARPS) append(const __grid_constant__ fa_append_args args)
{
    fa_i64 n        = (fa_i64)blockIdx.x * FA_WARPS + threadIdx.x / 32;
    fa_i64 new_rows = (fa_i64)args.batch * args.seqlen_new * args.heads_k;
    bool   is_new   = n < new_rows;
    int    rows = is_new ? args.seqlen_new : args.seqlen_q, heads = is_new ? args.heads_k : args.heads_q;
    n -= is_new ? 0 : new_rows;
    if (n >= (fa_i64)args.batch * rows * heads)
        return;
    int head = (int)(n % heads), t = (int)(n / heads % rows), b = (int)(n / heads / rows);
    int held = args.cache_seqlens ? args.cache_seqlens[b] : 0;
    int turn = held - (args.leftpad_k ? args.leftpad_k[b] : 0); /* rotary position of the first new row */
    int position = turn + (is_new || !args.q_at_end ? t : 0);
    if (args.rotary_dim > 0 && (unsigned)position >= (unsigned)args.rotary_rows)
        return;

    if (is_new) {
        fa_i64 entry, row;
        if (held < 0 || !find_slot(args, b, held + t, entry, row))
            return;
        fa_i64 k_from = b * args.k_new.stride[0] + t * args.k_new.stride[1] + head * args.k_new.stride[2];
        fa_i64 v_from = b * args.v_new.stride[0] + t * args.v_new.stride[1] + head * args.v_new.stride[2];
        fa_i64 k_to = entry * args.k_cache.stride[0] + row * args.k_cache.stride[1] + head * args.k_cache.stride[2];
        fa_i64 v_to = entry * args.v_cache.stride[0] + row * args.v_cache.stride[1] + head * args.v_cache.stride[2];
        append_row(args, args.k_cache, k_to, args.k_new, k_from, args.head_dim, args.rotary_dim, position);
        append_row(args, args.v_cache, v_to, args.v_new, v_from, args.head_dim_v, 0, 0);
    } else {
        fa_i64 from = b * args.q.stride[0] + t * args.q.stride[1] + head * args.q.stride[2];
        fa_i64 to   = b * args.q_out.stride[0] + t * args.q_out.stride[1] + head * args.q_out.stride[2];
        append_row(args, args.q_out, to, args.q, from, args.head_dim, args.rotary_dim, position);
    }
}
