#include "bench_options.h"

#include "bench_shape.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(name) offsetof(bench_options, name)
const cli_option bench_option_table[] = {
    {"window", "L,R", cli_parse_window, FIELD(window),
     "in place of --mask: L keys left and R keys right of the\ndiagonal; -1: no limit"},
    {"blocks", "N", cli_parse_count, FIELD(blocks),
     "a block mask: N parts of equal length that do not see each\nother, each full, causal or with the window"},
    {"scale", "X", cli_parse_number, FIELD(scale), "factor of q.k; default 1 / sqrt(head_dim)"},
    {"softcap", "X", cli_parse_number, FIELD(softcap), "scores become X tanh(score / X)"},
    {"bias", NULL, cli_parse_switch, FIELD(bias), "a random one is added, float32 [1, 1, seqlen_q, seqlen_k]"},
    {"alibi", NULL, cli_parse_switch, FIELD(alibi), "ALiBi with the slopes 2^(-8 (h + 1) / heads)"},
    {"sinks", NULL, cli_parse_switch, FIELD(sinks), "one more random logit for each head"},
    {"dropout", "P,SEED,OFFSET", cli_parse_dropout, FIELD(dropout), "drop probabilities; SEED and OFFSET default to 0"},
    {"num-splits", "N", cli_parse_parts, FIELD(num_splits), "split the keys into N parts; 0: by shape; -1: by the batch and the GPU too"},
    {0},
};
#undef FIELD

bool bench_has_options(const bench_options *o)
{
    return o->window.given || o->scale.given || o->softcap.given || o->bias || o->alibi || o->sinks ||
           o->dropout.p != 0 || o->blocks > 0 || o->num_splits > 0;
}

/* One more part of the text. */
static void say(char *text, const char *format, ...)
{
    size_t  at = strlen(text);
    va_list arguments;
    if (at > 0)
        at += (size_t)snprintf(text + at, BENCH_OPTIONS_TEXT - at, "; ");
    va_start(arguments, format);
    vsnprintf(text + at, BENCH_OPTIONS_TEXT - at, format, arguments);
    va_end(arguments);
}

const char *bench_options_text(const bench_options *o, char text[BENCH_OPTIONS_TEXT])
{
    text[0] = '\0';
    if (o->window.given)
        say(text, "window %d %d", o->window.left, o->window.right);
    if (o->blocks > 0)
        say(text, "blocks %lld", (long long)o->blocks);
    if (o->scale.given)
        say(text, "scale %g", o->scale.value);
    if (o->softcap.given)
        say(text, "softcap %g", o->softcap.value);
    if (o->bias)
        say(text, "bias");
    if (o->alibi)
        say(text, "alibi");
    if (o->sinks)
        say(text, "sinks");
    if (o->dropout.p != 0)
        say(text, "dropout %g seed %llu offset %llu", (double)o->dropout.p, (unsigned long long)o->dropout.seed,
            (unsigned long long)o->dropout.offset);
    if (o->num_splits != 0)
        say(text, "num-splits %lld", (long long)o->num_splits);
    return text;
}

/* ---- into the problem ---- */

static double slope_of(const bench_shape *shape, int64_t h)
{
    return (double)(float)exp2(-8.0 * (double)(h + 1) / (double)shape->heads);
}

/* Where block n begins, of a sequence of so many rows. */
static int64_t block_begin(const bench_shape *shape, int64_t seqlen, int64_t n)
{
    return seqlen * n / shape->options.blocks;
}

static bool make_slices(bench_arrays *arrays)
{
    const bench_shape *shape = &arrays->shape;
    flash_attn_slice  *list  = bench_allocate(arrays, shape->options.blocks, sizeof *list);
    if (!list)
        return false;
    for (int64_t n = 0; n < shape->options.blocks; n++)
        list[n] = (flash_attn_slice){.q_begin = (int32_t)block_begin(shape, shape->seqlen_q, n),
                                     .q_end   = (int32_t)block_begin(shape, shape->seqlen_q, n + 1),
                                     .k_begin = (int32_t)block_begin(shape, shape->seqlen_k, n),
                                     .k_end   = (int32_t)block_begin(shape, shape->seqlen_k, n + 1),
                                     .kind    = shape->causal ? FLASH_ATTN_SLICE_CAUSAL : FLASH_ATTN_SLICE_FULL};
    arrays->problem.slices.list  = list;
    arrays->problem.slices.count = (int32_t)shape->options.blocks;
    return true;
}

void bench_apply_numbers(const bench_shape *shape, flash_attn_problem *p)
{
    const bench_options *o = &shape->options;
    p->mask                = o->window.given                   ? FLASH_ATTN_WINDOW
                             : shape->causal && o->blocks == 0 ? FLASH_ATTN_CAUSAL
                                                               : FLASH_ATTN_NONE;
    p->window_left         = o->window.left;
    p->window_right        = o->window.right;
    p->scale      = o->scale.given && o->scale.value == 0 ? -0.0f /* 0 is the default */ : (float)o->scale.value;
    p->softcap    = (float)o->softcap.value;
    p->dropout    = o->dropout;
    p->num_splits = (int32_t)o->num_splits;
}

bool bench_apply_options(bench_arrays *arrays, uint64_t *random)
{
    const bench_shape   *shape = &arrays->shape;
    const bench_options *o     = &shape->options;
    flash_attn_problem  *p     = &arrays->problem;
    bench_apply_numbers(shape, p);
    if (o->blocks > 0 && !make_slices(arrays))
        return false;
    if (o->bias) {
        p->bias.shape[0] = p->bias.shape[1] = 1;
        p->bias.shape[2]                    = shape->seqlen_q;
        p->bias.shape[3]                    = shape->seqlen_k;
        if (!bench_make_random(arrays, &p->bias, NULL, random))
            return false;
    }
    if (o->sinks) {
        p->sinks.shape[0] = p->sinks.shape[2] = p->sinks.shape[3] = 1;
        p->sinks.shape[1]                                         = shape->heads;
        if (!bench_make_random(arrays, &p->sinks, NULL, random))
            return false;
    }
    if (o->alibi) {
        float *slopes = bench_allocate(arrays, shape->heads, sizeof *slopes);
        if (!slopes)
            return false;
        for (int64_t h = 0; h < shape->heads; h++)
            slopes[h] = (float)slope_of(shape, h);
        p->alibi_slopes = (flash_attn_tensor){.data = slopes, .shape = {1, shape->heads, 1, 1}};
    }
    return true;
}

/* ---- what they mean ---- */

/* Bottom right: query i of nq stands at i - nq, key j of nk at j - nk. */
static void cut(bench_keys *keys, int64_t query_from_end, int64_t k_end, int64_t left, int64_t right)
{
    int64_t diagonal = k_end + query_from_end;
    if (left >= 0 && keys->begin < diagonal - left)
        keys->begin = diagonal - left;
    if (right >= 0 && keys->end > diagonal + right + 1)
        keys->end = diagonal + right + 1;
}

bench_keys bench_keys_of(const bench_shape *shape, int64_t query)
{
    const bench_options *o     = &shape->options;
    bench_keys           keys  = {0, shape->seqlen_k};
    int64_t              q_end = shape->seqlen_q;
    if (o->blocks > 0) {
        int64_t n = query * o->blocks / shape->seqlen_q;
        while (query >= block_begin(shape, shape->seqlen_q, n + 1))
            n++;
        q_end = block_begin(shape, shape->seqlen_q, n + 1);
        keys  = (bench_keys){block_begin(shape, shape->seqlen_k, n), block_begin(shape, shape->seqlen_k, n + 1)};
    }
    if (o->window.given)
        cut(&keys, query - shape->seqlen_q, shape->seqlen_k, o->window.left, o->window.right);
    else if (shape->causal)
        cut(&keys, query - q_end, keys.end, -1, 0);
    return keys;
}

bench_score bench_score_of(const bench_arrays *arrays, double product, int64_t h, int64_t query, int64_t key)
{
    const bench_shape        *shape = &arrays->shape;
    const flash_attn_problem *p     = &arrays->problem;
    bench_score               s     = {product, 1};
    if (shape->options.softcap.value != 0) {
        double t = tanh(product / (float)shape->options.softcap.value);
        s        = (bench_score){(float)shape->options.softcap.value * t, 1 - t * t};
    }
    if (shape->options.bias)
        s.value += (double)((const float *)p->bias.data)[query * shape->seqlen_k + key];
    if (shape->options.alibi)
        s.value -= slope_of(shape, h) * (double)llabs(query + shape->seqlen_k - shape->seqlen_q - key);
    return s;
}

double bench_sink_of(const bench_arrays *arrays, int64_t h)
{
    return arrays->shape.options.sinks ? (double)((const float *)arrays->problem.sinks.data)[h] : -INFINITY;
}

/* Philox4x32-10, one of the eight 16-bit numbers of a call. */
static uint32_t philox16(const uint32_t counter[4], uint64_t key, int number)
{
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)c[0] * 0xD2511F53u, q = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t next[4] = {(uint32_t)(q >> 32) ^ c[1] ^ k[0], (uint32_t)q, (uint32_t)(p >> 32) ^ c[3] ^ k[1],
                            (uint32_t)p};
        for (int i = 0; i < 4; i++)
            c[i] = next[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[number / 2] >> (number % 2 * 16) & 0xFFFF;
}

double bench_kept(const bench_shape *shape, int64_t b, int64_t h, int64_t query, int64_t key)
{
    const flash_attn_dropout *d         = &shape->options.dropout;
    uint32_t                  threshold = (uint32_t)fmin(65535, nearbyint((double)d->p * 65536));
    uint32_t                  i = (uint32_t)query, j = (uint32_t)key;
    uint32_t counter[4] = {j / 16, i / 16 * 32 + i % 8 * 4 + j % 8 / 2, (uint32_t)(b * shape->heads + h),
                           (uint32_t)d->offset};
    uint64_t philox_key = d->seed ^ (d->offset >> 32 << 32);
    if (threshold == 0)
        return 1;
    bool kept = philox16(counter, philox_key, (int)(i / 8 % 2 + 2 * (j % 2) + 4 * (j / 8 % 2))) >= threshold;
    return kept ? 65536.0 / (65536.0 - threshold) : 0;
}
