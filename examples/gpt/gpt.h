/*
 * A small GPT, forward and backward, in plain C: what train_gpt.c trains. Attention is the library's, through its
 * public header; everything else is here, in five short files:
 *
 *     threads.c   a thread pool, lent to the library too (flash_attn_options.parallel_for)
 *     matmul.c    float32 matrix product
 *     ops.c       embedding, RMSNorm, rotary embedding, GELU, cross-entropy, AdamW
 *     model.c     the model: forward, backward, one optimiser step
 *     sample.c    text from the model, with a KV cache
 *
 * The model: x = embedding[token]; for each layer
 *     x += attention(rotary(RMSNorm(x) Wqkv)) Wproj;  x += GELU(RMSNorm(x) Wup) Wdown
 * logits = RMSNorm(x) Whead. Matrices are [in, out], row-major, without bias. T = batch * seqlen rows.
 *
 * No sum is ever split by thread, so every number is the same, to the bit, at any thread count.
 */
#ifndef GPT_H
#define GPT_H

#include <flashattn.h>

enum { GPT_MAX_LAYERS = 48, GPT_VOCABULARY = 256 }; /* tokens are bytes */

/* ---- threads.c ---------------------------------------------------------------------------------------------- */

typedef struct gpt_threads gpt_threads;

/* count threads, the caller being one of them. NULL: no memory, or the system refused a thread. */
gpt_threads *gpt_threads_create(int count);
void         gpt_threads_destroy(gpt_threads *threads);
int          gpt_threads_count(const gpt_threads *threads);

/* Run task(arg, i) for every i in [0, count); return when all are done. A flash_attn_parallel_for: `threads` is a
 * gpt_threads. Not to be called from inside a task. */
void gpt_threads_run(void *threads, int64_t count, flash_attn_task task, void *arg);

/* Cut [0, count) into one range a thread, each but the last a multiple of `grain`, and run task on all. */
typedef void (*gpt_range_task)(void *arg, int64_t begin, int64_t end);
void gpt_threads_range(gpt_threads *threads, int64_t count, int64_t grain, gpt_range_task task, void *arg);

/* ---- matmul.c ----------------------------------------------------------------------------------------------- */

/* Element (i, j) is data[i * row + j * col]; a transpose swaps the strides. */
typedef struct gpt_matrix {
    const float *data;
    int64_t      row, col;
} gpt_matrix;

/* c[rows, cols] = a[rows, depth] b[depth, cols], or += with accumulate; row i of c starts at c + i * c_row.
 * A row of the result does not depend on the other rows, nor on the threads. False: no memory. */
bool gpt_matmul(gpt_threads *threads, int64_t rows, int64_t cols, int64_t depth, gpt_matrix a, gpt_matrix b, float *c,
                int64_t c_row, bool accumulate);

/* ---- ops.c -------------------------------------------------------------------------------------------------- */

/* x[t] = embedding[tokens[t]]; and dembedding[tokens[t]] += dx[t]. */
void gpt_embed(gpt_threads *threads, const uint8_t *tokens, int64_t rows, int width, const float *embedding, float *x);
void gpt_embed_backward(gpt_threads *threads, const uint8_t *tokens, int64_t rows, int width, const float *dx,
                        float *dembedding);

/* y = gain * x / rms(x), a row at a time (Zhang & Sennrich 2019). inverse_rms: [rows], kept for the backward, which adds
 * to dx (the residual path has put its share there) and to dgain. */
void gpt_rmsnorm(gpt_threads *threads, int64_t rows, int width, const float *x, const float *gain, float *y,
                 float *inverse_rms);
void gpt_rmsnorm_backward(gpt_threads *threads, int64_t rows, int width, const float *x, const float *gain,
                          const float *inverse_rms, const float *dy, float *dx, float *dgain);

/* Rotary embedding tables, row t for position t: [positions, head_dim / 2] each. */
void gpt_rotary_tables(int positions, int head_dim, float *cosine, float *sine);

/* Rotate the q and k parts of qkv [rows, 3, heads, head_dim] in place; row t has position t % seqlen. Pairs are
 * (i, i + head_dim / 2), as flash_attn_append_kv does when not interleaved. inverse: the other way, which is the
 * gradient. */
void gpt_rotary(gpt_threads *threads, int64_t rows, int seqlen, int heads, int head_dim, const float *cosine,
                const float *sine, bool inverse, float *qkv);

/* GELU, the tanh form: y = gelu(x), and x becomes gelu'(x), which is all that the backward needs: gradient *= slope. */
void gpt_gelu(gpt_threads *threads, int64_t count, float *x, float *y);
void gpt_gelu_backward(gpt_threads *threads, int64_t count, const float *slope, float *gradient);

/* Mean of -log softmax(logits[t])[targets[t]], in nats; logits become their own gradient. losses: [rows] scratch. */
double gpt_cross_entropy(gpt_threads *threads, int64_t rows, const uint8_t *targets, float *logits, float *losses);

/* out[i] = bfloat16(x[i]), to nearest even. x is finite. */
void gpt_round_bf16(gpt_threads *threads, int64_t count, const float *x, uint16_t *out);

/* One AdamW step (Loshchilov & Hutter 2019) on count weights; step counts from 1. gradient_scale is the clipping. */
typedef struct gpt_adamw {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
} gpt_adamw;
void   gpt_adamw_step(gpt_threads *threads, const gpt_adamw *adamw, int64_t step, double gradient_scale, int64_t count,
                      const float *gradient, float *moment1, float *moment2, float *weight);
double gpt_norm(const float *x, int64_t count); /* Euclidean */

/* ---- model.c ------------------------------------------------------------------------------------------------ */

typedef struct gpt_config {
    int                    layers, width, heads, context, batch; /* width a multiple of 2 heads */
    int                    threads;
    uint64_t               seed;
    flash_attn_device_type attention;       /* CPU or REFERENCE */
    flash_attn_dtype       attention_dtype; /* of q, k and v: F32 or BF16. Their gradients are F32. */
} gpt_config;

typedef struct gpt_layer {
    float *norm1;        /* [width] */
    float *qkv;          /* [width, 3 width] */
    float *projection;   /* [width, width] */
    float *norm2;        /* [width] */
    float *up;           /* [width, 4 width] */
    float *down;         /* [4 width, width] */
} gpt_layer;

typedef struct gpt_weights { /* weights, or their gradients: one block of memory */
    float    *block;
    int64_t   count, matrices; /* the first `matrices` numbers are weight-decayed, gains come after */
    float    *embedding;       /* [vocabulary, width] */
    float    *head;            /* [width, vocabulary] */
    float    *norm;            /* [width] */
    gpt_layer layer[GPT_MAX_LAYERS];
} gpt_weights;

typedef struct gpt_model gpt_model;

/* What a layer keeps for its backward; rows are T. */
typedef struct gpt_layer_state {
    float    *x, *normed1, *qkv, *o, *lse; /* qkv after rotary; lse [batch, heads, seqlen] */
    float    *x_mid, *normed2, *up, *activated; /* up: after GELU its slope */
    float    *inverse_rms1, *inverse_rms2;
    uint16_t *qkv_bf16; /* with attention_dtype BF16: what attention reads */
} gpt_layer_state;

struct gpt_model {
    gpt_config          config;
    int                 head_dim;
    gpt_threads        *threads;
    flash_attn_context *context;
    gpt_weights         weights, gradients;
    float              *moment1, *moment2;
    int64_t             steps; /* optimiser steps taken */
    float              *cosine, *sine;

    gpt_layer_state layer[GPT_MAX_LAYERS];
    float          *x, *normed, *inverse_rms, *logits, *losses;        /* after the last layer */
    float          *dx, *dnormed, *dqkv, *d_o, *dactivated;            /* gradients on their way down */
    void          **memory; /* every allocation, for gpt_destroy */
    int             memory_count, memory_capacity;
    char            error[256]; /* why the last call failed */
};

/* Make a model with random weights. On failure NULL, and `error` holds a sentence. */
gpt_model *gpt_create(const gpt_config *config, char error[256]);
void       gpt_destroy(gpt_model *model);

/* Logits of tokens [batch, seqlen] into model->logits [batch * seqlen, vocabulary]. batch and seqlen at most the
 * config's. False: model->error says why. */
bool gpt_forward(gpt_model *model, const uint8_t *tokens, int batch, int seqlen);

/* After gpt_forward on the same tokens: the mean loss against targets [batch, seqlen]; with `backward` also
 * model->gradients (overwritten). Uses up model->logits. */
bool gpt_loss(gpt_model *model, const uint8_t *tokens, const uint8_t *targets, int batch, int seqlen, bool backward,
              double *loss);

/* Clip the gradients to norm max_norm and take one AdamW step. Returns the norm before. */
double gpt_update(gpt_model *model, const gpt_adamw *adamw, double max_norm);

/* Shared with sample.c. A float view [batch, seqlen, heads, head_dim] of part 0 (q), 1 (k) or 2 (v) of packed qkv. */
flash_attn_tensor gpt_view(const gpt_model *model, void *qkv, flash_attn_dtype dtype, int part, int batch, int seqlen);
bool              gpt_attention_failed(gpt_model *model); /* copies the library's sentence; always false */
void             *gpt_allocate(gpt_model *model, size_t bytes); /* zeroed, freed by gpt_destroy; NULL: no memory */

/* ---- sample.c ----------------------------------------------------------------------------------------------- */

typedef struct gpt_cache gpt_cache;

gpt_cache *gpt_cache_create(gpt_model *model); /* NULL: no memory; freed with the model */

/* Feed `count` more tokens of one sequence; logits [vocabulary] of the last. What does not fit into the context is an
 * error. gpt_cache_reset empties the cache. */
bool gpt_cache_feed(gpt_model *model, gpt_cache *cache, const uint8_t *tokens, int count, float *logits);
void gpt_cache_reset(gpt_cache *cache);

/* The same by computing the whole sequence again. */
bool gpt_recompute(gpt_model *model, const uint8_t *tokens, int count, float *logits);

/* Draw a token from softmax(logits / temperature); temperature 0: the largest. */
uint8_t gpt_draw(const float *logits, float temperature, uint64_t *random);

/* Continue text[0 .. length) to text[0 .. length + count). With `cache` one token a step, and when the context is
 * full its later half starts a new cache; without, everything is computed again for every token. */
bool gpt_generate(gpt_model *model, gpt_cache *cache, uint8_t *text, int length, int count, float temperature,
                  uint64_t *random);

/* splitmix64 (Steele et al. 2014): the next number, and one in [0, 1). */
uint64_t gpt_random(uint64_t *state);
double   gpt_uniform(uint64_t *state);

#endif
