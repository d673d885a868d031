/*
 * Text from the model. gpt_cache_feed is how an engine decodes: the new tokens' keys and values are rotated and appended
 * to a cache (flash_attn_append_kv), and the new queries attend to the cache's used part (seqused_k); causal masks are
 * aligned bottom right, so the newest query sees everything.
 */
#include "gpt.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

uint64_t gpt_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z          = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z          = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

double gpt_uniform(uint64_t *state) { return (double)(gpt_random(state) >> 11) * 0x1p-53; }

struct gpt_cache {
    void   *k[GPT_MAX_LAYERS], *v[GPT_MAX_LAYERS]; /* [1, context, heads, head_dim], attention_dtype */
    float  *x, *normed, *qkv, *o, *up, *activated, *inverse_rms;
    void   *qkv_bf16;
    int32_t length; /* tokens held */
};

gpt_cache *gpt_cache_create(gpt_model *model)
{
    gpt_cache *cache   = gpt_allocate(model, sizeof *cache);
    size_t     numbers = (size_t)model->config.context * (size_t)model->config.width, bytes = numbers * sizeof(float);
    bool       failed  = !cache;
    for (int l = 0; l < model->config.layers && !failed; l++)
        failed = !(cache->k[l] = gpt_allocate(model, bytes)) || !(cache->v[l] = gpt_allocate(model, bytes));
    failed = failed || !(cache->x = gpt_allocate(model, bytes)) || !(cache->normed = gpt_allocate(model, bytes)) ||
             !(cache->qkv = gpt_allocate(model, 3 * bytes)) || !(cache->o = gpt_allocate(model, bytes)) ||
             !(cache->up = gpt_allocate(model, 4 * bytes)) ||
             !(cache->activated = gpt_allocate(model, 4 * bytes)) || !(cache->qkv_bf16 = gpt_allocate(model, 3 * bytes)) ||
             !(cache->inverse_rms = gpt_allocate(model, (size_t)model->config.context * sizeof(float)));
    return failed ? NULL : cache;
}

void gpt_cache_reset(gpt_cache *cache) { cache->length = 0; }

static flash_attn_tensor cache_view(const gpt_model *model, void *data)
{
    flash_attn_tensor view = {.data = data, .dtype = model->config.attention_dtype};
    view.shape[0] = 1;
    view.shape[1] = model->config.context;
    view.shape[2] = model->config.heads;
    view.shape[3] = model->head_dim;
    return view;
}

static flash_attn_tensor rotary_view(const gpt_model *model, float *table)
{
    flash_attn_tensor view = {.data = table, .dtype = FLASH_ATTN_F32};
    view.shape[0] = model->config.context;
    view.shape[1] = model->head_dim / 2;
    view.shape[2] = view.shape[3] = 1;
    return view;
}

/* cache->qkv (not rotated) of `count` new tokens to cache->o, through layer l's cache. */
static bool attend(gpt_model *model, gpt_cache *cache, int l, int count)
{
    flash_attn_device device = {.type = model->config.attention};
    flash_attn_dtype  dtype  = model->config.attention_dtype;
    void             *qkv    = dtype == FLASH_ATTN_BF16 ? cache->qkv_bf16 : cache->qkv;
    if (dtype == FLASH_ATTN_BF16)
        gpt_round_bf16(model->threads, (int64_t)count * 3 * model->config.width, cache->qkv, cache->qkv_bf16);

    flash_attn_append append = {.device = device, .cache_seqlens = &cache->length};
    append.k_new      = gpt_view(model, qkv, dtype, 1, 1, count);
    append.v_new      = gpt_view(model, qkv, dtype, 2, 1, count);
    append.k_cache    = cache_view(model, cache->k[l]);
    append.v_cache    = cache_view(model, cache->v[l]);
    append.q          = gpt_view(model, qkv, dtype, 0, 1, count);
    append.q_out      = append.q;
    append.rotary.cos = rotary_view(model, model->cosine);
    append.rotary.sin = rotary_view(model, model->sine);
    if (flash_attn_append_kv(model->context, &append, NULL) != FLASH_ATTN_OK)
        return gpt_attention_failed(model);

    int32_t            used    = cache->length + count;
    flash_attn_problem problem = {.device = device, .mask = FLASH_ATTN_CAUSAL, .seqused_k = &used};
    problem.q = append.q;
    problem.k = append.k_cache;
    problem.v = append.v_cache;
    problem.o = (flash_attn_tensor){.data = cache->o, .dtype = FLASH_ATTN_F32};
    return flash_attn_forward(model->context, &problem, NULL) == FLASH_ATTN_OK || gpt_attention_failed(model);
}

static bool product(gpt_model *model, int64_t rows, int64_t in, int64_t out, const float *x, const float *w, float *y,
                    bool accumulate)
{
    if (gpt_matmul(model->threads, rows, out, in, (gpt_matrix){x, in, 1}, (gpt_matrix){w, out, 1}, y, out, accumulate))
        return true;
    snprintf(model->error, sizeof model->error, "not enough memory for a matrix product");
    return false;
}

bool gpt_cache_feed(gpt_model *model, gpt_cache *cache, const uint8_t *tokens, int count, float *logits)
{
    int width = model->config.width;
    if (count < 1 || count > model->config.context - cache->length) {
        snprintf(model->error, sizeof model->error, "%d tokens do not fit a cache that holds %d of %d", count,
                 (int)cache->length, model->config.context);
        return false;
    }
    gpt_embed(model->threads, tokens, count, width, model->weights.embedding, cache->x);
    for (int l = 0; l < model->config.layers; l++) {
        const gpt_layer *w = &model->weights.layer[l];
        gpt_rmsnorm(model->threads, count, width, cache->x, w->norm1, cache->normed, cache->inverse_rms);
        if (!product(model, count, width, 3 * width, cache->normed, w->qkv, cache->qkv, false) ||
            !attend(model, cache, l, count) ||
            !product(model, count, width, width, cache->o, w->projection, cache->x, true))
            return false;
        gpt_rmsnorm(model->threads, count, width, cache->x, w->norm2, cache->normed, cache->inverse_rms);
        if (!product(model, count, width, 4 * width, cache->normed, w->up, cache->up, false))
            return false;
        gpt_gelu(model->threads, (int64_t)count * 4 * width, cache->up, cache->activated);
        if (!product(model, count, 4 * width, width, cache->activated, w->down, cache->x, true))
            return false;
    }
    cache->length += count;
    float *last = cache->x + (int64_t)(count - 1) * width;
    gpt_rmsnorm(model->threads, 1, width, last, model->weights.norm, cache->normed, cache->inverse_rms);
    return product(model, 1, width, GPT_VOCABULARY, cache->normed, model->weights.head, logits, false);
}

bool gpt_recompute(gpt_model *model, const uint8_t *tokens, int count, float *logits)
{
    if (!gpt_forward(model, tokens, 1, count))
        return false;
    memcpy(logits, model->logits + (int64_t)(count - 1) * GPT_VOCABULARY, GPT_VOCABULARY * sizeof(float));
    return true;
}

uint8_t gpt_draw(const float *logits, float temperature, uint64_t *random)
{
    int largest = 0;
    for (int i = 1; i < GPT_VOCABULARY; i++)
        largest = logits[i] > logits[largest] ? i : largest;
    if (temperature <= 0)
        return (uint8_t)largest;
    double weight[GPT_VOCABULARY], sum = 0;
    for (int i = 0; i < GPT_VOCABULARY; i++)
        sum += weight[i] = exp(((double)logits[i] - logits[largest]) / temperature);
    double left = gpt_uniform(random) * sum;
    for (int i = 0; i < GPT_VOCABULARY; i++)
        if ((left -= weight[i]) < 0)
            return (uint8_t)i;
    return (uint8_t)largest; /* only by rounding */
}

bool gpt_generate(gpt_model *model, gpt_cache *cache, uint8_t *text, int length, int count, float temperature,
                  uint64_t *random)
{
    int   context = model->config.context, end = length + count;
    int   window = length > context ? length - context : 0; /* the first token that the model still sees */
    float logits[GPT_VOCABULARY];
    if (cache)
        gpt_cache_reset(cache);
    for (int fed = window; length < end; length++) {
        if (length - window > context) {
            fed = window = length - (context + 1) / 2;
            if (cache)
                gpt_cache_reset(cache);
        }
        if (!(cache ? gpt_cache_feed(model, cache, text + fed, length - fed, logits)
                    : gpt_recompute(model, text + window, length - window, logits)))
            return false;
        fed          = length;
        text[length] = gpt_draw(logits, temperature, random);
    }
    return true;
}
