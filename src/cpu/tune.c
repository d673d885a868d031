/*
 * Measuring the choices that tuning.c keeps. A choice is a list of candidates, the default first; each candidate is the
 * whole tuning with one thing changed. All run in turns on one random problem, so that a slow moment of the machine
 * hits all; after two rounds those that are far behind drop out; the fastest run of each counts, of self-attention the
 * fastest without a mask and the fastest causal one together, for what gains without a mask may lose with one. The default
 * stays unless another is clearly faster.
 */
#include "cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_CANDIDATES = 32, MOST_CHOICES = 64, MOST_HEADS = 8 };
#define CLEARLY 0.97 /* of the default's time: two runs of one thing differ by less */
#define BEHIND 1.15  /* of the best: not worth more rounds */

typedef struct candidate {
    fa_tuning tuning;
    char      label[24];
    double    mask_s[2], best_s; /* the fastest without a mask and causal; their sum, or the first alone */
    bool      out;
} candidate;

/* A problem to measure with, and the context that runs it. */
typedef struct bench {
    flash_attn_context context;
    fa_cpu             cpu;
    flash_attn_problem p;
    flash_attn_grads   g;
    flash_attn_pass    pass;
    int                threads;
    void              *memory[9];
    int                num_memory;
} bench;

typedef struct choice {
    char             name[64];
    flash_attn_dtype dtype;
    flash_attn_pass  pass;
    int              head_dim, heads_q, heads_k, seqlen_q, seqlen_k;
    candidate       *candidates; /* [num]; [0]: the default */
    int              num;
} choice;

typedef struct tuner {
    fa_cpu                    cpu;     /* the context's, as the choices so far make it */
    fa_tuning                 found;
    candidate                 candidates[MOST_CANDIDATES];
    double                    choice_s; /* to spend on one choice */
    flash_attn_tune_report    report;
    void                     *user;
} tuner;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- problems ---- */

/* Random numbers in [-1, 1): zeros would run faster than anybody's data. */
static bool add_tensor(bench *b, flash_attn_tensor *t, flash_attn_dtype dtype, int64_t rows, int64_t heads,
                       int64_t cols)
{
    int64_t  count = rows * heads * cols;
    uint32_t state = 12345 + (uint32_t)b->num_memory;
    *t             = (flash_attn_tensor){.dtype = dtype, .shape = {1, rows, heads, cols}};
    t->data = b->memory[b->num_memory++] = malloc((size_t)count * (size_t)fa_dtype_bytes(dtype));
    for (int64_t n = 0; t->data && n < count; n++) {
        state = state * 1664525u + 1013904223u;
        fa_store(t->data, n, dtype, (float)(int32_t)state * 0x1p-31f);
    }
    return t->data != NULL;
}

static void bench_close(bench *b)
{
    for (int n = 0; n < b->num_memory; n++)
        free(b->memory[n]);
}

static flash_attn_status bench_open(bench *b, const fa_cpu *cpu, const choice *c)
{
    int sq = c->seqlen_q, sk = c->seqlen_k, d = c->head_dim;
    memset(b, 0, sizeof *b);
    b->cpu         = *cpu;
    b->context.cpu = &b->cpu;
    b->pass        = c->pass;
    b->threads     = c->heads_q < b->cpu.num_threads ? c->heads_q : b->cpu.num_threads;
    bool made =
        add_tensor(b, &b->p.q, c->dtype, sq, c->heads_q, d) && add_tensor(b, &b->p.k, c->dtype, sk, c->heads_k, d) &&
        add_tensor(b, &b->p.v, c->dtype, sk, c->heads_k, d) && add_tensor(b, &b->p.o, c->dtype, sq, c->heads_q, d);
    if (c->pass == FLASH_ATTN_BACKWARD) {
        made = made && add_tensor(b, &b->p.lse, FLASH_ATTN_F32, c->heads_q, sq, 1) &&
               add_tensor(b, &b->g.dout, c->dtype, sq, c->heads_q, d) &&
               add_tensor(b, &b->g.dq, c->dtype, sq, c->heads_q, d) &&
               add_tensor(b, &b->g.dk, c->dtype, sk, c->heads_k, d) &&
               add_tensor(b, &b->g.dv, c->dtype, sk, c->heads_k, d);
    }
    if (!made) {
        bench_close(b);
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory to measure %s", c->name);
    }
    flash_attn_exec exec = {.num_threads = b->threads}; /* the backward needs a true o and lse */
    return flash_attn_forward(&b->context, &b->p, &exec);
}

/* ---- measuring one choice ---- */

static flash_attn_status run_once(bench *b, candidate *c)
{
    flash_attn_exec exec  = {.num_threads = b->threads};
    int             masks = b->p.q.shape[1] == b->p.k.shape[1] ? 2 : 1;
    fa_cpu_use_tuning(&b->cpu, &c->tuning);
    c->best_s = 0;
    for (int causal = 0; causal < masks; causal++) {
        b->p.mask    = causal ? FLASH_ATTN_CAUSAL : FLASH_ATTN_NONE;
        double start = now();
        FA_TRY(b->pass == FLASH_ATTN_FORWARD ? flash_attn_forward(&b->context, &b->p, &exec)
                                             : flash_attn_backward(&b->context, &b->p, &b->g, &exec));
        double s          = now() - start;
        c->mask_s[causal] = s < c->mask_s[causal] ? s : c->mask_s[causal];
        c->best_s += c->mask_s[causal];
    }
    return FLASH_ATTN_OK;
}

/* True if explain gives other tiles or splits for another candidate: else this context never asks. */
static bool matters(bench *b, const choice *c)
{
    flash_attn_explanation about[2];
    for (int n = 0; n < 2; n++) {
        fa_cpu_use_tuning(&b->cpu, &c->candidates[n == 0 ? 0 : c->num - 1].tuning);
        if (flash_attn_explain(&b->context, &b->p, b->pass, &about[n]) != FLASH_ATTN_OK)
            return false;
    }
    return about[0].tile_q != about[1].tile_q || about[0].tile_k != about[1].tile_k ||
           about[0].num_splits != about[1].num_splits || about[0].num_tasks != about[1].num_tasks ||
        strcmp(about[0].kernel, about[1].kernel) != 0;
}

static flash_attn_status take_turns(tuner *t, bench *b, const choice *c, int *winner)
{
    double begin = now();
    for (int n = 0; n < c->num; n++)
        c->candidates[n].mask_s[0] = c->candidates[n].mask_s[1] = 1e30;
    *winner = 0;
    for (int round = 0; round < 3 || (round < 100 && now() - begin < t->choice_s); round++) {
        for (int n = 0; n < c->num; n++)
            if (!c->candidates[n].out)
                FA_TRY(run_once(b, &c->candidates[n]));
        for (int n = 0; n < c->num; n++)
            *winner = c->candidates[n].best_s < c->candidates[*winner].best_s ? n : *winner;
        for (int n = 1; n < c->num && round > 0; n++)
            c->candidates[n].out = c->candidates[n].best_s > BEHIND * c->candidates[*winner].best_s;
    }
    if (!(c->candidates[*winner].best_s < CLEARLY * c->candidates[0].best_s))
        *winner = 0;
    return FLASH_ATTN_OK;
}

static flash_attn_status measure(tuner *t, const choice *c)
{
    bench             b;
    int               winner = 0;
    flash_attn_status status = bench_open(&b, &t->cpu, c);
    if (status != FLASH_ATTN_OK)
        return status;
    if (matters(&b, c)) {
        status = take_turns(t, &b, c, &winner);
        if (status == FLASH_ATTN_OK) {
            const candidate       *best = &c->candidates[winner];
            flash_attn_tune_choice said = {
                .usual_ms = 1e3 * c->candidates[0].best_s, .found_ms = 1e3 * best->best_s, .num_tried = c->num};
            snprintf(said.name, sizeof said.name, "%s", c->name);
            snprintf(said.usual, sizeof said.usual, "%s", c->candidates[0].label);
            snprintf(said.found, sizeof said.found, "%s", best->label);
            t->found = best->tuning;
            if (t->report)
                t->report(t->user, &said);
        }
    }
    bench_close(&b);
    return status;
}

/* ---- the choices ---- */

/* A new candidate: what was found so far, to be changed in one thing. */
static candidate *add_candidate(tuner *t, choice *c)
{
    candidate *added = &t->candidates[c->num++];
    *added           = (candidate){.tuning = t->found};
    return added;
}

/* The tile of one table, pass and class of head dims. `kernels` runs tensors of this dtype. */
static flash_attn_status measure_tile(tuner *t, const fa_kernels *kernels, flash_attn_dtype dtype, flash_attn_pass pass,
                                      int head_class)
{
    static const int vector_q[] = {48, 96, 144, 192, 288}, amx_q[] = {64, 128, 192, 256, 384},
                     keys[] = {64, 128, 256, 512, 1024};
    bool          amx       = kernels->isa == FLASH_ATTN_ISA_AMX || kernels->isa == FLASH_ATTN_ISA_AMX_FP16;
    fa_table      table     = fa_table_of(kernels, dtype);
    int           d = fa_head_class_most(head_class), heads = t->cpu.num_threads;
    fa_tile_shape usual = fa_usual_tile(table, pass, d);
    choice        c     = {.dtype      = dtype,
                           .pass       = pass,
                           .head_dim   = d,
                           .heads_q    = heads < MOST_HEADS ? heads : MOST_HEADS,
                           .seqlen_q   = amx ? 2048 : 1024,
                           .candidates = t->candidates};
    c.seqlen_k = c.seqlen_q, c.heads_k = c.heads_q;
    snprintf(c.name, sizeof c.name, "tile %s %s %d", fa_table_name(table),
             pass == FLASH_ATTN_FORWARD ? "forward" : "backward", d);
    candidate *one                            = add_candidate(t, &c);
    one->tuning.tile[table][pass][head_class] = (fa_tile_shape){0, 0};
    snprintf(one->label, sizeof one->label, "%d %d", usual.q, usual.k);
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++) {
            fa_tile_shape tile = {amx ? amx_q[i] : vector_q[i], keys[j]};
            if (tile.q == usual.q && tile.k == usual.k)
                continue;
            one                                       = add_candidate(t, &c);
            one->tuning.tile[table][pass][head_class] = tile;
            snprintf(one->label, sizeof one->label, "%d %d", tile.q, tile.k);
        }
    return measure(t, &c);
}

/* Long self-attention: how much of the second-level cache a block of queries takes. */
static flash_attn_status measure_block(tuner *t, flash_attn_dtype dtype)
{
    static const int percent[] = {50, 15, 25, 35, 70, 85};
    int              heads     = t->cpu.num_threads;
    choice           c         = {.name       = "block_l2_percent",
                                  .dtype      = dtype,
                                  .head_dim   = 128,
                                  .heads_q    = heads < MOST_HEADS ? heads : MOST_HEADS,
                                  .seqlen_q   = 4096,
                                  .seqlen_k   = 4096,
                                  .candidates = t->candidates};
    c.heads_k                  = c.heads_q;
    for (int n = 0; n < 6; n++) {
        candidate *one               = add_candidate(t, &c);
        one->tuning.block_l2_percent = n == 0 ? 0 : percent[n];
        snprintf(one->label, sizeof one->label, "%d", percent[n]);
    }
    return measure(t, &c);
}

/* Decoding: the least keys of a part. */
static flash_attn_status measure_split(tuner *t)
{
    static const int keys[] = {256, 512, 1024, 2048, 4096, 8192};
    choice           c      = {.name       = "split_keys",
                               .dtype      = FLASH_ATTN_BF16,
                               .head_dim   = 128,
                               .heads_q    = 32,
                               .heads_k    = 8,
                               .seqlen_q   = 1,
                               .seqlen_k   = 32768,
                               .candidates = t->candidates};
    for (int n = 0; n < 6; n++) {
        candidate *one         = add_candidate(t, &c);
        one->tuning.split_keys = n == 0 ? 0 : keys[n];
        snprintf(one->label, sizeof one->label, "%d", keys[n]);
    }
    return measure(t, &c);
}

/* float16 by pieces, or by AMX-FP16 where it runs though the processor does not report it, unless the caller's cap is
 * below it. */
static flash_attn_status measure_amx_fp16(tuner *t)
{
    fa_cpu *cpu = &t->cpu;
    if (!fa_isa_reaches(cpu->cap, FLASH_ATTN_ISA_AMX_FP16))
        return FLASH_ATTN_OK;
    fa_isa_try_amx_fp16(&cpu->isa);
    t->found.amx_fp16 = false;
    if (cpu->isa.hidden != FA_HIDDEN_RUNS)
        return FLASH_ATTN_OK;
    cpu->assume_amx_fp16 = false; /* what the environment says is not what a file says */
    choice c             = {.name       = "amx-fp16",
                            .dtype      = FLASH_ATTN_F16,
                            .pass       = FLASH_ATTN_BACKWARD,
                            .head_dim   = 128,
                            .heads_q    = cpu->num_threads < MOST_HEADS ? cpu->num_threads : MOST_HEADS,
                            .seqlen_q   = 1024,
                            .seqlen_k   = 1024,
                            .candidates = t->candidates};
    c.heads_k            = c.heads_q;
    for (int n = 0; n < 2; n++) {
        candidate *one       = add_candidate(t, &c);
        one->tuning.amx_fp16 = n == 1;
        snprintf(one->label, sizeof one->label, "%s", n == 0 ? "not used" : "used");
    }
    FA_TRY(measure(t, &c));
    fa_cpu_use_tuning(cpu, &t->found); /* the tiles that follow are of the table that is used */
    return FLASH_ATTN_OK;
}

static flash_attn_status measure_all(tuner *t)
{
    FA_TRY(measure_amx_fp16(t));
    const fa_cpu *cpu = &t->cpu;
    for (int table = 0; table < 4; table++) { /* the vector table, then AMX's where the tier has them */
        static const flash_attn_dtype dtypes[] = {FLASH_ATTN_F32, FLASH_ATTN_BF16, FLASH_ATTN_F16, FLASH_ATTN_F32};
        const fa_kernels             *kernels  = table == 0 ? cpu->vector : cpu->kernels[dtypes[table]];
        if (table > 0 && kernels == cpu->vector)
            continue;
        for (int pass = FLASH_ATTN_FORWARD; pass <= FLASH_ATTN_BACKWARD; pass++)
            for (int head_class = 0; head_class < FA_HEAD_CLASSES; head_class++)
                FA_TRY(measure_tile(t, kernels, dtypes[table], (flash_attn_pass)pass, head_class));
    }
    FA_TRY(measure_block(t, FLASH_ATTN_BF16));
    return measure_split(t);
}

flash_attn_status fa_cpu_tune(const flash_attn_context *context, const char *file, double seconds,
                              flash_attn_tune_report report, void *user)
{
    bool stores = !file || *file;
    if (stores)
        FA_TRY(fa_tuning_can_store(file)); /* not after half a minute */
    tuner *t = calloc(1, sizeof *t);
    if (!t)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for %zu bytes of candidates", sizeof *t);
    t->cpu = *context->cpu, t->report = report, t->user = user;
    t->choice_s = seconds / 20; /* 8 choices, 14 where bfloat16 has its own table, 23 with AMX, 1 more for AMX-FP16 */
    fa_tuning_load(&context->cpu->isa, file, &t->found);
    flash_attn_status status = measure_all(t);
    if (status == FLASH_ATTN_OK && stores)
        status = fa_tuning_store(&context->cpu->isa, file, &t->found);
    free(t);
    return status;
}
