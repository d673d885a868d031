/* Plans of CUDA calls, made without a device. */
#ifndef HARNESS_PLAN_H
#define HARNESS_PLAN_H

#include "harness.h"

#include "check.h"
#include "cuda/cuda.h"

static int32_t numbers[65]; /* an address; never read */

typedef struct shape {
    int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim;
} shape;

static inline flash_attn_problem problem_of(shape s, flash_attn_dtype dtype, flash_attn_mask mask)
{
    return (flash_attn_problem){.device = {.type = FLASH_ATTN_CUDA},
                                .q      = {.dtype = dtype, .shape = {s.batch, s.seqlen_q, s.heads_q, s.head_dim}},
                                .k      = {.dtype = dtype, .shape = {s.batch, s.seqlen_k, s.heads_k, s.head_dim}},
                                .v      = {.dtype = dtype, .shape = {s.batch, s.seqlen_k, s.heads_k, s.head_dim}},
                                .o      = {.dtype = dtype},
                                .mask   = mask};
}

static inline void make_varlen(flash_attn_problem *p, int32_t longest)
{
    p->batch      = (int32_t)p->q.shape[0];
    p->q.shape[1] = p->q.shape[0] * p->q.shape[1];
    p->k.shape[1] = p->v.shape[1] = p->k.shape[0] * p->k.shape[1];
    p->q.shape[0] = p->k.shape[0] = p->v.shape[0] = 1;
    p->cu_seqlens_q = p->cu_seqlens_k = numbers;
    p->max_seqlen_q = p->max_seqlen_k = longest;
}

/* shares_gpu: as a ring's steps are planned. */
static inline void plan_shared(const flash_attn_problem *p, flash_attn_pass pass, int arch, bool shares_gpu, fa_call *call, fa_plan *plan)
{
    flash_attn_dtype dtype = p->q.dtype;
    flash_attn_grads g     = {
            {.dtype = dtype}, {.dtype = dtype}, {.dtype = dtype}, {.dtype = dtype}, {.dtype = p->bias.dtype}, {0}, {0}};
    if (fa_normalise(p, pass == FLASH_ATTN_BACKWARD ? &g : NULL, pass, FA_PLAN, call) != FLASH_ATTN_OK)
        fail_msg("sm_%d: %s", arch, flash_attn_last_error());
    call->shares_gpu = shares_gpu;
    if (fa_plan_make(call, arch, NULL, NULL, plan) != FLASH_ATTN_OK)
        fail_msg("sm_%d: %s", arch, flash_attn_last_error());
}

static inline void plan_it(const flash_attn_problem *p, flash_attn_pass pass, int arch, fa_call *call, fa_plan *plan)
{
    plan_shared(p, pass, arch, false, call, plan);
}

static inline int64_t tiles_of(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }

static inline const fa_launch *main_of(const fa_plan *plan) { return &plan->launch[plan->main]; }

#endif
