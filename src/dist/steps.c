/* What both passes of a ring are made of: views, the local problem of a rectangle, sums of parts. */
#include "dist/dist.h"

static flash_attn_tensor contiguous(char *memory, flash_attn_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (flash_attn_tensor){
        .data = memory, .dtype = dtype, .shape = {a, b, c, d}, .stride = {b * c * d, c * d, d, 1}};
}

/* What lies behind others begins at 16 bytes on a GPU, whose kernels load so many at once. On the host there is no gap,
 * whose bytes nobody has set. */
static size_t aligned(const fa_ring_call *r, size_t bytes)
{
    return fa_on_host(r->problem->device) ? bytes : (bytes + 15) / 16 * 16;
}

static size_t v_at(const fa_ring_call *r, int64_t rows, flash_attn_dtype dtype)
{
    return aligned(r, (size_t)(r->call.batch * rows * r->call.heads_k * r->call.head_dim) * fa_dtype_bytes(dtype));
}

flash_attn_tensor fa_ring_k(const fa_ring_call *r, char *memory, int64_t rows, flash_attn_dtype dtype)
{
    return contiguous(memory, dtype, r->call.batch, rows, r->call.heads_k, r->call.head_dim);
}

flash_attn_tensor fa_ring_v(const fa_ring_call *r, char *memory, int64_t rows, flash_attn_dtype dtype)
{
    return contiguous(memory + v_at(r, rows, dtype), dtype, r->call.batch, rows, r->call.heads_k, r->call.head_dim_v);
}

size_t fa_ring_kv_bytes(const fa_ring_call *r, int64_t rows, flash_attn_dtype dtype)
{
    return v_at(r, rows, dtype) +
           (size_t)(r->call.batch * rows * r->call.heads_k * r->call.head_dim_v) * fa_dtype_bytes(dtype);
}

flash_attn_tensor fa_ring_results(const fa_ring_call *r, size_t at, int64_t rows, int64_t head_dim)
{
    return contiguous(r->memory.base + at, FLASH_ATTN_F32, r->call.batch, rows, r->call.heads_q, head_dim);
}

flash_attn_tensor fa_ring_lse(const fa_ring_call *r, size_t at, int64_t rows)
{
    return contiguous(r->memory.base + at, FLASH_ATTN_F32, r->call.batch, r->call.heads_q, rows, 1);
}

flash_attn_ring_share fa_ring_source(const fa_ring_call *r, int step)
{
    flash_attn_ring_share share;
    int                   ranks = r->ring.ranks, rank = (r->ring.rank - step % ranks + ranks) % ranks;
    flash_attn_ring_get_share(r->ring.layout, ranks, rank, r->ring.seqlen_k, &share); /* checked before */
    return share;
}

int fa_ring_step(const fa_ring_call *r, int step, flash_attn_ring_share *k, fa_ring_rect rects[FA_RING_MAX_RECTS])
{
    *k = fa_ring_source(r, step);
    return fa_ring_rects(&r->q, k, r->mask, step == 0 && r->ring.seqlen_q == r->ring.seqlen_k, rects);
}

bool fa_ring_is_whole(const fa_ring_call *r, const fa_ring_rect *rects, int count)
{
    return count == 1 && rects->q_begin == 0 && rects->q_end == r->q.rows;
}

flash_attn_tensor fa_ring_rows(flash_attn_tensor t, int dimension, int64_t begin, int64_t end)
{
    if (t.data)
        t.data = (char *)t.data + begin * t.stride[dimension] * (int64_t)fa_dtype_bytes(t.dtype);
    t.shape[dimension] = end - begin;
    return t;
}

flash_attn_problem fa_ring_problem(const fa_ring_call *r, const fa_ring_rect *rect, flash_attn_tensor k,
                                   flash_attn_tensor v)
{
    flash_attn_problem p = *r->problem;
    p.q                  = fa_ring_rows(r->call.q, 1, rect->q_begin, rect->q_end);
    p.k                  = fa_ring_rows(k, 1, rect->k_begin, rect->k_end);
    p.v                  = fa_ring_rows(v, 1, rect->k_begin, rect->k_end);
    p.o                  = fa_ring_rows(r->call.o, 1, rect->q_begin, rect->q_end);
    p.lse                = fa_ring_rows(r->call.lse, 2, rect->q_begin, rect->q_end);
    p.mask               = rect->mask;
    p.window_left        = rect->left;
    p.window_right       = rect->right;
    p.sinks              = (flash_attn_tensor){0};
    p.max_seqlen_q = p.max_seqlen_k = 0; /* as the tensors are */
    return p;
}

flash_attn_status fa_ring_merge(const fa_ring_call *r, const flash_attn_partial *parts, int num_parts,
                                const flash_attn_partial *result)
{
    fa_exec how = {.stream = r->exec.stream};
    if (fa_on_host(r->problem->device)) {
        fa_host_merge(parts, num_parts, result);
        return FLASH_ATTN_OK;
    }
    return fa_cuda_merge(r->context, r->problem->device.index, parts, num_parts, result, &how);
}

flash_attn_partial fa_ring_part_rows(flash_attn_partial part, int64_t begin, int64_t end)
{
    return (flash_attn_partial){.o = fa_ring_rows(part.o, 1, begin, end), .lse = fa_ring_rows(part.lse, 2, begin, end)};
}

flash_attn_status fa_ring_close(const fa_ring_call *r, const flash_attn_partial *acc, const flash_attn_partial *part,
                                int64_t begin, int64_t end, const flash_attn_partial *result)
{
    const int64_t cuts[] = {0, begin, end, acc->o.shape[1]};
    for (int n = 0; n < 3; n++) {
        flash_attn_partial parts[2] = {fa_ring_part_rows(*acc, cuts[n], cuts[n + 1]), *part};
        flash_attn_partial to       = fa_ring_part_rows(*result, cuts[n], cuts[n + 1]);
        if (cuts[n] < cuts[n + 1])
            FA_TRY(fa_ring_merge(r, parts, n == 1 ? 2 : 1, &to));
    }
    return FLASH_ATTN_OK;
}

/* A merge without LSE: every part weighs 1. */
flash_attn_status fa_ring_sum(const fa_ring_call *r, const flash_attn_tensor *parts, int num_parts,
                              flash_attn_tensor result)
{
    flash_attn_partial part[2] = {{.o = result}}, sum = {.o = result};
    for (int n = 0; n < num_parts; n++)
        part[n].o = parts[n];
    return fa_ring_merge(r, part, num_parts, &sum);
}

size_t fa_ring_dkv_room(const fa_ring_call *r, int step)
{
    size_t bytes = fa_ring_kv_bytes(r, fa_ring_source(r, step).rows, FLASH_ATTN_F32);
    return !fa_ring_wants_kv(r) ? 0 : aligned(r, bytes);
}

/* Those that were received with dK and dV of the step before lie behind them. */
size_t fa_ring_kv_at(const fa_ring_call *r, int step)
{
    if (r->call.pass == FLASH_ATTN_FORWARD)
        return r->memory.place[step % 2];
    return r->memory.place[(step + 1) % 2] + (step > 0 ? fa_ring_dkv_room(r, step - 1) : 0);
}

flash_attn_status fa_ring_pack(const fa_ring_call *r)
{
    char   *to   = r->memory.base + fa_ring_kv_at(r, 0);
    int64_t rows = r->call.k.shape[1];
    FA_TRY(fa_ring_sum(r, &r->call.k, 1, fa_ring_k(r, to, rows, r->call.k.dtype)));
    return fa_ring_sum(r, &r->call.v, 1, fa_ring_v(r, to, rows, r->call.k.dtype));
}

flash_attn_status fa_ring_begin_kv(fa_ring_call *r, int step)
{
    flash_attn_dtype dtype = r->call.k.dtype;
    if (step + 1 >= r->ring.ranks)
        return FLASH_ATTN_OK;
    return fa_ring_begin(r, fa_ring_kv_at(r, step), fa_ring_kv_bytes(r, fa_ring_source(r, step).rows, dtype),
                         fa_ring_kv_at(r, step + 1), fa_ring_kv_bytes(r, fa_ring_source(r, step + 1).rows, dtype));
}
