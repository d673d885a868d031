/* The backward's memory: what a call, a tile of queries and a thread hold, and where it lies. */
#include "cpu/backward.h"
#include "cpu/gradient.h"

enum { TASKS_PER_THREAD = 8, LEAST_TILE_KEYS = 256 };

/* Half the keys and so twice the tasks where threads would have few each. Only where that changes no bit: the fused
 * kernels add up cell by cell, in the order of the keys or queries, whatever the tile. By the context's threads, not
 * the call's, or a call on fewer threads could want more memory. */
static int tile_keys(const fa_cpu *cpu, const plan *p)
{
    int     keys  = p->tile.k;
    int64_t tasks = (int64_t)TASKS_PER_THREAD * cpu->num_threads;
    while (p->fused && cpu->num_threads > 1 && keys >= 2 * LEAST_TILE_KEYS && keys / 2 % p->kernels->key_step == 0 &&
           p->pairs * ((p->call->max_seqlen_k + keys - 1) / keys) < tasks)
        keys /= 2;
    return keys;
}

/* Key heads that memory is for: more than there are threads, so that one need not wait for the last tile of another's
 * head. One thread never waits, and finds its packed forms in the cache where the head before had them. */
static int64_t slots(const plan *p)
{
    int64_t most = p->threads == 1 ? 1 : p->threads + 1;
    return p->pairs < most ? p->pairs : most;
}

plan fa_backward_plan(const fa_cpu *cpu, const fa_call *call, const fa_kernels *k, int threads)
{
    int  d = (int)call->head_dim, dv = (int)call->head_dim_v;
    plan p             = {.cpu = cpu, .kernels = k, .call = call, .threads = threads, .tile = fa_tiles(cpu, k, call)};
    p.query_tiles      = (call->max_seqlen_q + p.tile.q - 1) / p.tile.q;
    p.pairs            = call->batch * call->heads_k;
    p.slots            = slots(&p);
    p.ldq              = fa_accumulator_ld(d);
    p.ldv              = fa_accumulator_ld(dv);
    p.fused            = k->backward_block != NULL;
    p.late_delta       = k->packed_row_dots && !call->dbias.data && !call->dsinks.data;
    p.tile.k           = tile_keys(cpu, &p);
    p.q_bytes          = k->packed_bytes(FA_ROLE_Q, p.tile.q, d);
    p.q_right_bytes    = k->packed_bytes(FA_ROLE_Q_RIGHT, p.tile.q, d);
    p.dout_bytes       = k->packed_bytes(FA_ROLE_DO, p.tile.q, dv);
    p.dout_right_bytes = k->packed_bytes(FA_ROLE_DO_RIGHT, p.tile.q, dv);
    return p;
}

query_tile fa_backward_query_tile(fa_arena *arena, const plan *p)
{
    query_tile t;
    t.q          = fa_carve(arena, !p->fused ? p->q_bytes : 0);
    t.q_right    = p->q_right_bytes ? fa_carve(arena, p->q_right_bytes) : t.q;
    t.dout       = fa_carve(arena, !p->fused ? p->dout_bytes : 0);
    t.dout_right = p->dout_right_bytes ? fa_carve(arena, p->dout_right_bytes) : t.dout;
    t.dq         = fa_carve_floats(arena, p->call->dq.data && !p->fused ? (int64_t)p->tile.q * p->ldq : 0);
    t.dq_tiled   = fa_carve_floats(arena, p->call->dq.data && p->fused ? fa_tiled_floats(p->tile.q, p->ldq) : 0);
    t.lse        = fa_carve_floats(arena, fa_row_array(p->tile.q));
    t.lse_log2   = fa_carve_floats(arena, fa_row_array(p->tile.q));
    t.row_delta  = fa_carve_floats(arena, fa_row_array(p->tile.q));
    t.bad_q      = fa_carve(arena, (size_t)p->tile.q * sizeof(int));
    t.bad_dout   = fa_carve(arena, (size_t)p->tile.q * sizeof(int));
    t.num_bad    = fa_carve(arena, 2 * sizeof(int));
    return t;
}

size_t fa_backward_query_tile_bytes(const plan *p)
{
    fa_arena arena = {NULL, 0};
    fa_backward_query_tile(&arena, p);
    return arena.used;
}

scratch fa_backward_scratch(fa_arena *arena, const plan *p)
{
    const fa_call    *call = p->call;
    const fa_kernels *k    = p->kernels;
    int               d = (int)call->head_dim, dv = (int)call->head_dim_v;
    int64_t           scores = (int64_t)p->tile.q * fa_score_ld(p->tile.k);
    scratch           s      = {0};
    s.k                      = fa_carve(arena, !p->fused ? k->packed_bytes(FA_ROLE_K, p->tile.k, d) : 0);
    s.k_right                = fa_carve(arena, k->packed_bytes(FA_ROLE_K_RIGHT, p->tile.k, d));
    s.v_t                    = fa_carve(arena, k->packed_bytes(fa_role_of_v(p), p->tile.k, dv));
    s.dk                     = fa_carve_floats(arena, !p->fused ? (int64_t)p->tile.k * p->ldq : 0);
    s.dv                     = fa_carve_floats(arena, !p->fused ? (int64_t)p->tile.k * p->ldv : 0);
    s.dk_tiled               = fa_carve_floats(arena, p->fused ? fa_tiled_floats(p->tile.k, d) : 0);
    s.dv_tiled               = fa_carve_floats(arena, p->fused ? fa_tiled_floats(p->tile.k, dv) : 0);
    s.p                      = fa_carve_floats(arena, !p->fused ? scores : 0);
    s.ds                     = fa_carve_floats(arena, !p->fused ? scores : 0);
    s.slope                  = fa_carve_floats(arena, call->softcap > 0.0f && !p->fused ? scores : 0);
    s.dropped                = fa_carve_floats(arena, call->dropout.threshold && !p->fused ? scores : 0);
    s.temp                   = fa_carve_floats(arena, 2 * (int64_t)fa_max_int(p->ldq, p->ldv));
    s.row                    = fa_carve(arena, (size_t)fa_max_int(p->tile.q, p->tile.k) * sizeof(void *));
    s.row_dout               = fa_carve(arena, (size_t)p->tile.q * sizeof(void *));
    s.row_k                  = fa_carve(arena, (size_t)p->tile.k * sizeof(void *));
    s.bad_k                  = fa_carve(arena, (size_t)p->tile.k * sizeof(int));
    s.slices                 = fa_carve(arena, (size_t)call->slices.count * sizeof(int32_t));
    s.fused = fa_carve(arena, k->backward_scratch_bytes ? k->backward_scratch_bytes(p->tile.q, p->tile.k, d, dv) : 0);
    return s;
}

size_t fa_backward_carve(run *r, char *base)
{
    const plan    *p     = &r->plan;
    const fa_call *call  = p->call;
    fa_arena       arena = {base, 0}, one = {NULL, 0};
    fa_backward_scratch(&one, p);
    r->scratch_bytes = one.used;
    if (call->dbias.data) {
        size_t bytes     = fa_dbias_scratch_bytes(p->kernels, p->tile, call);
        r->scratch_bytes = bytes > one.used ? bytes : one.used;
    }
    r->slot_bytes = fa_backward_query_tile_bytes(p) * (size_t)(call->group * p->query_tiles);
    r->task_begin = fa_carve(&arena, (size_t)(call->batch + 1) * sizeof(int64_t));
    r->delta      = fa_carve_floats(&arena, call->q.shape[0] * call->heads_q * call->q.shape[1]);
    r->norms      = fa_carve(&arena, p->kernels->row_norm ? (size_t)p->pairs * 2 * sizeof(atomic_int) : 0);
    r->state      = fa_carve(&arena, (size_t)(p->pairs * call->group * p->query_tiles) * sizeof(query_state));
    r->tasks_left = fa_carve(&arena, (size_t)p->pairs * sizeof(atomic_int));
    r->slots      = fa_carve(&arena, r->slot_bytes * (size_t)p->slots);
    r->scratch    = fa_carve(&arena, r->scratch_bytes * (size_t)p->threads);
    return arena.used;
}
