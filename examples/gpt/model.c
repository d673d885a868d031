#include "gpt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

void *gpt_allocate(gpt_model *model, size_t bytes)
{
    if (model->memory_count == model->memory_capacity) {
        int    capacity = model->memory_capacity ? 2 * model->memory_capacity : 64;
        void **grown    = realloc(model->memory, (size_t)capacity * sizeof *grown);
        if (!grown)
            return NULL;
        model->memory          = grown;
        model->memory_capacity = capacity;
    }
    void *data = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (data)
        model->memory[model->memory_count++] = memset(data, 0, bytes);
    return data;
}

/* Float arrays that must all be there: *failed remembers. */
static float *floats(gpt_model *model, int64_t count, bool *failed)
{
    float *data = gpt_allocate(model, (size_t)count * sizeof(float));
    *failed |= !data;
    return data;
}

/* ---- weights ---- */

/* Lay the parts out in one block: matrices first (they are weight-decayed), gains last. block may be NULL: only count. */
static void lay_out(gpt_weights *w, const gpt_config *config, float *block)
{
    int64_t width = config->width, next = 0;
#define PART(member, numbers) (w->member = block ? block + next : NULL, next += (numbers))
    PART(embedding, GPT_VOCABULARY * width);
    PART(head, width * GPT_VOCABULARY);
    for (int l = 0; l < config->layers; l++) {
        PART(layer[l].qkv, width * 3 * width);
        PART(layer[l].projection, width * width);
        PART(layer[l].up, width * 4 * width);
        PART(layer[l].down, 4 * width * width);
    }
    w->matrices = next;
    PART(norm, width);
    for (int l = 0; l < config->layers; l++) {
        PART(layer[l].norm1, width);
        PART(layer[l].norm2, width);
    }
#undef PART
    w->block = block;
    w->count = next;
}

static bool allocate_weights(gpt_model *model, gpt_weights *w)
{
    bool failed = false;
    lay_out(w, &model->config, NULL);
    float *block = floats(model, w->count, &failed);
    if (!failed)
        lay_out(w, &model->config, block);
    return !failed;
}

/* Normal numbers by Box and Muller, times `deviation`. */
static void fill_normal(float *x, int64_t count, double deviation, uint64_t *random)
{
    for (int64_t i = 0; i < count; i++) {
        double radius = sqrt(-2.0 * log(1.0 - gpt_uniform(random)));
        x[i]          = (float)(deviation * radius * cos(6.283185307179586 * gpt_uniform(random)));
    }
}

/* Each product keeps the size of its input; the two that end a residual branch are smaller the deeper the model, and
 * the head starts near 0, so that the first loss is log(vocabulary). */
static void fill_weights(gpt_model *model)
{
    gpt_weights *w      = &model->weights;
    int64_t      width  = model->config.width;
    double       keep   = 1.0 / sqrt((double)width), branch = 1.0 / sqrt(2.0 * model->config.layers);
    uint64_t     random = model->config.seed;
    fill_normal(w->embedding, GPT_VOCABULARY * width, 0.5, &random);
    fill_normal(w->head, width * GPT_VOCABULARY, 0.1 * keep, &random);
    for (int l = 0; l < model->config.layers; l++) {
        gpt_layer *layer = &w->layer[l];
        fill_normal(layer->qkv, width * 3 * width, keep, &random);
        fill_normal(layer->projection, width * width, keep * branch, &random);
        fill_normal(layer->up, width * 4 * width, keep, &random);
        fill_normal(layer->down, 4 * width * width, 0.5 * keep * branch, &random);
    }
    for (int64_t i = w->matrices; i < w->count; i++)
        w->block[i] = 1.0f;
}

/* ---- making a model ---- */

static bool allocate_states(gpt_model *model)
{
    const gpt_config *c = &model->config;
    int64_t           rows = (int64_t)c->batch * c->context, width = c->width;
    bool              failed = false;
    for (int l = 0; l < c->layers; l++) {
        gpt_layer_state *s = &model->layer[l];
        s->x               = floats(model, rows * width, &failed);
        s->normed1         = floats(model, rows * width, &failed);
        s->qkv             = floats(model, rows * 3 * width, &failed);
        s->o               = floats(model, rows * width, &failed);
        s->lse             = floats(model, rows * c->heads, &failed);
        s->x_mid           = floats(model, rows * width, &failed);
        s->normed2         = floats(model, rows * width, &failed);
        s->up              = floats(model, rows * 4 * width, &failed);
        s->activated       = floats(model, rows * 4 * width, &failed);
        s->inverse_rms1    = floats(model, rows, &failed);
        s->inverse_rms2    = floats(model, rows, &failed);
        if (c->attention_dtype == FLASH_ATTN_BF16)
            failed |= !(s->qkv_bf16 = gpt_allocate(model, (size_t)(rows * 3 * width) * sizeof(uint16_t)));
    }
    model->x           = floats(model, rows * width, &failed);
    model->normed      = floats(model, rows * width, &failed);
    model->inverse_rms = floats(model, rows, &failed);
    model->logits      = floats(model, rows * GPT_VOCABULARY, &failed);
    model->losses      = floats(model, rows, &failed);
    model->dx          = floats(model, rows * width, &failed);
    model->dnormed     = floats(model, rows * width, &failed);
    model->dqkv        = floats(model, rows * 3 * width, &failed);
    model->d_o         = floats(model, rows * width, &failed);
    model->dactivated  = floats(model, rows * 4 * width, &failed);
    model->moment1     = floats(model, model->weights.count, &failed);
    model->moment2     = floats(model, model->weights.count, &failed);
    model->cosine      = floats(model, (int64_t)c->context * model->head_dim / 2, &failed);
    model->sine        = floats(model, (int64_t)c->context * model->head_dim / 2, &failed);
    return !failed;
}

static bool build(gpt_model *model, const gpt_config *config)
{
    model->config = *config;
    if (config->layers < 1 || config->layers > GPT_MAX_LAYERS || config->width < 1 || config->heads < 1 ||
        config->context < 1 || config->batch < 1 || config->threads < 1 || config->width % (2 * config->heads) != 0) {
        snprintf(model->error, sizeof model->error,
                 "a model needs 1 to %d layers, a positive context and batch, and a width that is a multiple of 2 * "
                 "heads; got layers %d, width %d, heads %d, context %d, batch %d, threads %d",
                 GPT_MAX_LAYERS, config->layers, config->width, config->heads, config->context, config->batch,
                 config->threads);
        return false;
    }
    model->head_dim = config->width / config->heads;
    model->threads  = gpt_threads_create(config->threads);
    if (!model->threads || !allocate_weights(model, &model->weights) || !allocate_weights(model, &model->gradients) ||
        !allocate_states(model)) {
        snprintf(model->error, sizeof model->error, "not enough memory for the model, or for %d threads",
                 config->threads);
        return false;
    }
    /* The library runs on our threads, not beside them. */
    flash_attn_options options = {.num_threads = config->threads};
    options.parallel_for       = gpt_threads_run;
    options.pool               = model->threads;
    if (flash_attn_create(&model->context, &options) != FLASH_ATTN_OK)
        return gpt_attention_failed(model);
    gpt_rotary_tables(config->context, model->head_dim, model->cosine, model->sine);
    fill_weights(model);
    return true;
}

gpt_model *gpt_create(const gpt_config *config, char error[256])
{
    gpt_model *model = calloc(1, sizeof *model);
    if (!model) {
        snprintf(error, 256, "not enough memory");
        return NULL;
    }
    if (!build(model, config)) {
        memcpy(error, model->error, sizeof model->error);
        gpt_destroy(model);
        return NULL;
    }
    return model;
}

void gpt_destroy(gpt_model *model)
{
    if (!model)
        return;
    flash_attn_destroy(model->context); /* before the threads that it borrows */
    gpt_threads_destroy(model->threads);
    for (int i = 0; i < model->memory_count; i++)
        free(model->memory[i]);
    free(model->memory);
    free(model);
}

/* ---- attention ---- */

bool gpt_attention_failed(gpt_model *model)
{
    snprintf(model->error, sizeof model->error, "%s", flash_attn_last_error());
    return false;
}

flash_attn_tensor gpt_view(const gpt_model *model, void *qkv, flash_attn_dtype dtype, int part, int batch, int seqlen)
{
    int64_t           width = model->config.width, row = 3 * width;
    size_t            bytes = dtype == FLASH_ATTN_F32 ? sizeof(float) : sizeof(uint16_t);
    flash_attn_tensor view  = {.data = (char *)qkv + (size_t)(part * width) * bytes, .dtype = dtype};
    view.shape[0]  = batch;
    view.shape[1]  = seqlen;
    view.shape[2]  = model->config.heads;
    view.shape[3]  = model->head_dim;
    view.stride[0] = seqlen * row;
    view.stride[1] = row;
    view.stride[2] = model->head_dim;
    view.stride[3] = 1;
    return view;
}

/* The one problem of both passes: q, k and v are read where the product with Wqkv has left them. */
static flash_attn_problem attention_problem(const gpt_model *model, const gpt_layer_state *s, int batch, int seqlen)
{
    flash_attn_dtype   dtype   = model->config.attention_dtype;
    void              *qkv     = dtype == FLASH_ATTN_BF16 ? (void *)s->qkv_bf16 : (void *)s->qkv;
    flash_attn_problem problem = {.device = {.type = model->config.attention}, .mask = FLASH_ATTN_CAUSAL};
    problem.q   = gpt_view(model, qkv, dtype, 0, batch, seqlen);
    problem.k   = gpt_view(model, qkv, dtype, 1, batch, seqlen);
    problem.v   = gpt_view(model, qkv, dtype, 2, batch, seqlen);
    problem.o   = (flash_attn_tensor){.data = s->o, .dtype = FLASH_ATTN_F32};
    problem.lse = (flash_attn_tensor){.data = s->lse, .dtype = FLASH_ATTN_F32};
    return problem;
}

/* ---- forward ---- */

/* y[rows, out] (+)= x[rows, in] w[in, out]. */
static bool linear(gpt_model *model, int64_t rows, int64_t in, int64_t out, const float *x, const float *w, float *y,
                   bool accumulate)
{
    return gpt_matmul(model->threads, rows, out, in, (gpt_matrix){x, in, 1}, (gpt_matrix){w, out, 1}, y, out,
                      accumulate);
}

/* dx = dy w^T, dw += x^T dy. */
static bool linear_backward(gpt_model *model, int64_t rows, int64_t in, int64_t out, const float *x, const float *w,
                            const float *dy, float *dx, float *dw)
{
    return gpt_matmul(model->threads, rows, in, out, (gpt_matrix){dy, out, 1}, (gpt_matrix){w, 1, out}, dx, in,
                      false) &&
           gpt_matmul(model->threads, in, out, rows, (gpt_matrix){x, 1, in}, (gpt_matrix){dy, out, 1}, dw, out, true);
}

static bool no_memory(gpt_model *model)
{
    snprintf(model->error, sizeof model->error, "not enough memory for a matrix product");
    return false;
}

/* s->x to out, the next layer's x. */
static bool layer_forward(gpt_model *model, int l, int batch, int seqlen, float *out)
{
    const gpt_layer *w     = &model->weights.layer[l];
    gpt_layer_state *s     = &model->layer[l];
    int64_t          rows  = (int64_t)batch * seqlen;
    int              width = model->config.width;
    gpt_rmsnorm(model->threads, rows, width, s->x, w->norm1, s->normed1, s->inverse_rms1);
    if (!linear(model, rows, width, 3 * width, s->normed1, w->qkv, s->qkv, false))
        return no_memory(model);
    gpt_rotary(model->threads, rows, seqlen, model->config.heads, model->head_dim, model->cosine, model->sine, false,
               s->qkv);
    if (s->qkv_bf16)
        gpt_round_bf16(model->threads, rows * 3 * width, s->qkv, s->qkv_bf16);
    flash_attn_problem attention = attention_problem(model, s, batch, seqlen);
    if (flash_attn_forward(model->context, &attention, NULL) != FLASH_ATTN_OK)
        return gpt_attention_failed(model);
    memcpy(s->x_mid, s->x, (size_t)(rows * width) * sizeof(float));
    if (!linear(model, rows, width, width, s->o, w->projection, s->x_mid, true))
        return no_memory(model);

    gpt_rmsnorm(model->threads, rows, width, s->x_mid, w->norm2, s->normed2, s->inverse_rms2);
    if (!linear(model, rows, width, 4 * width, s->normed2, w->up, s->up, false))
        return no_memory(model);
    gpt_gelu(model->threads, rows * 4 * width, s->up, s->activated);
    memcpy(out, s->x_mid, (size_t)(rows * width) * sizeof(float));
    return linear(model, rows, 4 * width, width, s->activated, w->down, out, true) || no_memory(model);
}

bool gpt_forward(gpt_model *model, const uint8_t *tokens, int batch, int seqlen)
{
    int64_t rows  = (int64_t)batch * seqlen;
    int     width = model->config.width;
    if (batch < 1 || batch > model->config.batch || seqlen < 1 || seqlen > model->config.context) {
        snprintf(model->error, sizeof model->error, "batch %d and length %d do not fit the model's %d and %d", batch,
                 seqlen, model->config.batch, model->config.context);
        return false;
    }
    gpt_embed(model->threads, tokens, rows, width, model->weights.embedding, model->layer[0].x);
    for (int l = 0; l < model->config.layers; l++)
        if (!layer_forward(model, l, batch, seqlen, l + 1 < model->config.layers ? model->layer[l + 1].x : model->x))
            return false;
    gpt_rmsnorm(model->threads, rows, width, model->x, model->weights.norm, model->normed, model->inverse_rms);
    return linear(model, rows, width, GPT_VOCABULARY, model->normed, model->weights.head, model->logits, false) ||
           no_memory(model);
}

/* ---- backward ---- */

/* model->dx: the gradient of the layer's output on entry, of its input on return. */
static bool layer_backward(gpt_model *model, int l, int batch, int seqlen)
{
    const gpt_layer *w     = &model->weights.layer[l];
    gpt_layer       *g     = &model->gradients.layer[l];
    gpt_layer_state *s     = &model->layer[l];
    int64_t          rows  = (int64_t)batch * seqlen;
    int              width = model->config.width;
    if (!linear_backward(model, rows, 4 * width, width, s->activated, w->down, model->dx, model->dactivated, g->down))
        return no_memory(model);
    gpt_gelu_backward(model->threads, rows * 4 * width, s->up, model->dactivated);
    if (!linear_backward(model, rows, width, 4 * width, s->normed2, w->up, model->dactivated, model->dnormed, g->up))
        return no_memory(model);
    gpt_rmsnorm_backward(model->threads, rows, width, s->x_mid, w->norm2, s->inverse_rms2, model->dnormed, model->dx,
                         g->norm2);

    if (!linear_backward(model, rows, width, width, s->o, w->projection, model->dx, model->d_o, g->projection))
        return no_memory(model);
    flash_attn_problem attention = attention_problem(model, s, batch, seqlen);
    flash_attn_grads   grads     = {.dout = {.data = model->d_o, .dtype = FLASH_ATTN_F32}};
    grads.dout.shape[0] = batch;
    grads.dout.shape[1] = seqlen;
    grads.dout.shape[2] = model->config.heads;
    grads.dout.shape[3] = model->head_dim;
    grads.dq            = gpt_view(model, model->dqkv, FLASH_ATTN_F32, 0, batch, seqlen);
    grads.dk            = gpt_view(model, model->dqkv, FLASH_ATTN_F32, 1, batch, seqlen);
    grads.dv            = gpt_view(model, model->dqkv, FLASH_ATTN_F32, 2, batch, seqlen);
    if (flash_attn_backward(model->context, &attention, &grads, NULL) != FLASH_ATTN_OK)
        return gpt_attention_failed(model);
    gpt_rotary(model->threads, rows, seqlen, model->config.heads, model->head_dim, model->cosine, model->sine, true,
               model->dqkv);
    if (!linear_backward(model, rows, width, 3 * width, s->normed1, w->qkv, model->dqkv, model->dnormed, g->qkv))
        return no_memory(model);
    gpt_rmsnorm_backward(model->threads, rows, width, s->x, w->norm1, s->inverse_rms1, model->dnormed, model->dx,
                         g->norm1);
    return true;
}

bool gpt_loss(gpt_model *model, const uint8_t *tokens, const uint8_t *targets, int batch, int seqlen, bool backward,
              double *loss)
{
    int64_t rows  = (int64_t)batch * seqlen;
    int     width = model->config.width;
    *loss         = gpt_cross_entropy(model->threads, rows, targets, model->logits, model->losses);
    if (!backward)
        return true;
    gpt_weights *g = &model->gradients;
    memset(g->block, 0, (size_t)g->count * sizeof(float));
    memset(model->dx, 0, (size_t)(rows * width) * sizeof(float));
    if (!linear_backward(model, rows, width, GPT_VOCABULARY, model->normed, model->weights.head, model->logits,
                         model->dnormed, g->head))
        return no_memory(model);
    gpt_rmsnorm_backward(model->threads, rows, width, model->x, model->weights.norm, model->inverse_rms,
                         model->dnormed, model->dx, g->norm);
    for (int l = model->config.layers - 1; l >= 0; l--)
        if (!layer_backward(model, l, batch, seqlen))
            return false;
    gpt_embed_backward(model->threads, tokens, rows, width, model->dx, g->embedding);
    return true;
}

double gpt_update(gpt_model *model, const gpt_adamw *adamw, double max_norm)
{
    gpt_weights *w = &model->weights, *g = &model->gradients;
    double       norm = gpt_norm(g->block, g->count), scale = norm > max_norm ? max_norm / norm : 1.0;
    model->steps++;
    gpt_adamw plain    = *adamw; /* gains are not decayed */
    plain.weight_decay = 0;
    gpt_adamw_step(model->threads, adamw, model->steps, scale, w->matrices, g->block, model->moment1, model->moment2,
                   w->block);
    gpt_adamw_step(model->threads, &plain, model->steps, scale, w->count - w->matrices, g->block + w->matrices,
                   model->moment1 + w->matrices, model->moment2 + w->matrices, w->block + w->matrices);
    return norm;
}
