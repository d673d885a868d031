/*
 * The reference: attention as the formula says, one query at a time, in double. It is the library's definition: every
 * other backend is tested against it.
 *
 *     s_j = scale (q . k_j);   s_j = softcap tanh(s_j / softcap);   s_j += bias_ij - slope |i + diagonal - j|
 *     L   = log(sum_j exp s_j + exp sink),   P_j = exp(s_j - L),   o = sum_j P_j Z_j v_j
 *
 * over the keys that the query sees, with Z_j the dropout factor (0 or 1 / (1 - p)). With Delta = dO . o the gradients
 * are
 *
 *     dv_j = P_j Z_j dO,   ds_j = P_j (Z_j dO . v_j - Delta),   dbias_ij = ds_j,   dsink = -exp(sink - L) Delta,
 *     dq = sum_j ds_j c_j scale k_j,   dk_j = ds_j c_j scale q,   c_j = 1 - tanh^2 (the softcap's slope).
 *
 * A pair that is masked, or whose score is -inf through the bias, takes part in nothing, so no 0 * NaN and no inf - inf
 * can leak from it. The backward recomputes L, P and Delta in double from q, k and v and reads neither o nor lse: an
 * oracle must not inherit the rounding or the mistakes of the forward that it checks. Results are rounded once, when
 * stored.
 */
#include "call.h"

#include <stdlib.h>

/* What one query computes. Arrays are indexed by key, or by position in a head. */
typedef struct fa_row {
    double *score;     /* [max_seqlen_k] -inf: not seen */
    double *cap_slope; /* [max_seqlen_k] c_j */
    double *prob;      /* [max_seqlen_k] P_j */
    double *dprob;     /* [max_seqlen_k] Z_j dO . v_j */
    double *q, *dq;    /* [head_dim] */
    double *o, *dout;  /* [head_dim_v] */
    double *kv;        /* [max(head_dim, head_dim_v)] a key or a value */
    double  lse;       /* -inf: the query sees nothing */
    double  sink_prob; /* exp(sink - L) */
} fa_row;

/* Which row, for loops over batch, heads and queries. */
typedef struct fa_where {
    int64_t     b, head, kv_head;
    fa_sequence seq;
    int         i;
} fa_where;

/* ---- numbers ---- */

/* Eight partial sums: as exact as one and several times quicker. */
static double dot(const double *x, const double *y, int64_t n)
{
    double  part[8] = {0}, sum = 0;
    int64_t t = 0;
    for (; t + 8 <= n; t += 8)
        for (int lane = 0; lane < 8; lane++)
            part[lane] += x[t + lane] * y[t + lane];
    for (; t < n; t++)
        sum += x[t] * y[t];
    for (int lane = 0; lane < 8; lane++)
        sum += part[lane];
    return sum;
}

static void add_scaled(double *sum, double factor, const double *x, int64_t n)
{
    for (int64_t t = 0; t < n; t++)
        sum[t] += factor * x[t];
}

/* Round to odd on the way to float: the second rounding, to 16 bits, then gives what one rounding would have given. */
static void store_once(void *data, int64_t index, flash_attn_dtype dtype, double value)
{
    float rounded = (float)value;
    if (dtype != FLASH_ATTN_F32 && isfinite(rounded) && (double)rounded != value) {
        if (fabs((double)rounded) > fabs(value))
            rounded = nextafterf(rounded, 0.0f);
        rounded = fa_float_of_bits(fa_bits_of_float(rounded) | 1);
    }
    fa_store(data, index, dtype, rounded);
}

static void read_head(double *out, const flash_attn_tensor *t, const void *at, int64_t n, double descale)
{
    for (int64_t c = 0; c < n; c++)
        out[c] = descale * (double)fa_load(at, c * t->stride[3], t->dtype);
}

/* values NULL: zeros. */
static void write_head(const flash_attn_tensor *t, void *at, int64_t n, const double *values)
{
    for (int64_t c = 0; c < n; c++)
        store_once(at, c * t->stride[3], t->dtype, values ? values[c] : 0.0);
}

static double scalar_at(const flash_attn_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double if_absent)
{
    return t->data ? (double)fa_load(fa_at(t, i0, i1, i2, i3), 0, t->dtype) : if_absent;
}

/* ---- one query ---- */

/* The query's head in q, dout, o or dq. */
static char *query_at(const flash_attn_tensor *t, const fa_where *w)
{
    return fa_at(t, w->seq.q_entry, w->seq.q_row + w->i, w->head, 0);
}

static void read_key(const fa_call *call, const fa_where *w, int j, double *out)
{
    read_head(out, &call->k, fa_kv_at(call, &call->k, &w->seq, w->b, j, w->kv_head), call->head_dim,
              scalar_at(&call->descale_k, w->b, w->kv_head, 0, 0, 1.0));
}

static void read_value(const fa_call *call, const fa_where *w, int j, double *out)
{
    read_head(out, &call->v, fa_kv_at(call, &call->v, &w->seq, w->b, j, w->kv_head), call->head_dim_v,
              scalar_at(&call->descale_v, w->b, w->kv_head, 0, 0, 1.0));
}

/* Z_j */
static double dropout_factor(const fa_call *call, const fa_where *w, int j)
{
    if (call->dropout.threshold == 0)
        return 1.0;
    fa_u32 batch_head = (fa_u32)(w->b * call->heads_q + w->head);
    return fa_dropout_keeps(&call->dropout, batch_head, w->i, j) ? 65536.0 / (65536.0 - call->dropout.threshold) : 0.0;
}

/* score, cap_slope, prob, lse, sink_prob */
static void row_probabilities(const fa_call *call, const fa_where *w, fa_row *row)
{
    double sink  = scalar_at(&call->sinks, 0, w->head, 0, 0, -INFINITY);
    double slope = scalar_at(&call->alibi_slopes, w->b, w->head, 0, 0, 0.0);
    double max   = sink;
    bool   sees  = sink != -INFINITY;

    read_head(row->q, &call->q, query_at(&call->q, w), call->head_dim,
              scalar_at(&call->descale_q, w->b, w->kv_head, 0, 0, 1.0));
    for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++) {
        double bias = -INFINITY, s;
        if (fa_sees(call, &w->seq, w->b, w->i, j))
            bias = scalar_at(&call->bias, w->b, w->head, w->i, j, 0.0);
        row->score[j] = -INFINITY;
        if (bias == -INFINITY)
            continue;
        read_key(call, w, j, row->kv);
        s                 = (double)call->scale * dot(row->q, row->kv, call->head_dim);
        row->cap_slope[j] = 1.0;
        if (call->softcap > 0) {
            double t          = tanh(s / (double)call->softcap);
            s                 = (double)call->softcap * t;
            row->cap_slope[j] = 1.0 - t * t;
        }
        s += bias - slope * abs(w->i + w->seq.diagonal - j);
        row->score[j] = s;
        sees          = sees || s != -INFINITY; /* true for NaN, which must come out */
        if (s > max)
            max = s;
    }

    row->lse       = -INFINITY;
    row->sink_prob = 0.0;
    if (!sees)
        return;
    double sum = sink == -INFINITY ? 0.0 : exp(sink - max);
    for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++)
        if (row->score[j] != -INFINITY)
            sum += exp(row->score[j] - max);
    row->lse       = max + log(sum);
    row->sink_prob = sink == -INFINITY ? 0.0 : exp(sink - row->lse);
    for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++)
        row->prob[j] = row->score[j] == -INFINITY ? 0.0 : exp(row->score[j] - row->lse);
}

static void row_forward(const fa_call *call, const fa_where *w, fa_row *row)
{
    row->lse = -INFINITY;
    memset(row->o, 0, sizeof(double) * (size_t)call->head_dim_v);
    if (w->i < w->seq.seqlen_q)
        row_probabilities(call, w, row);
    if (row->lse != -INFINITY) {
        for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++) {
            double factor = dropout_factor(call, w, j);
            if (row->score[j] == -INFINITY || factor == 0.0)
                continue;
            read_value(call, w, j, row->kv);
            add_scaled(row->o, factor * row->prob[j], row->kv, call->head_dim_v);
        }
    }
    write_head(&call->o, query_at(&call->o, w), call->head_dim_v, row->o);
    if (call->lse.data)
        store_once(fa_at(&call->lse, w->seq.q_entry, w->head, w->seq.q_row + w->i, 0), 0, FLASH_ATTN_F32, row->lse);
}

/* ---- backward ---- */

/* Gradients that many queries add to. */
typedef struct fa_sums {
    double *dk, *dv;         /* [max_seqlen_k, head_dim], [max_seqlen_k, head_dim_v] of one key head of one sequence */
    double *dsinks;          /* [heads_q] */
    double *dbias;           /* dense [dbias_extent] */
    int64_t dbias_extent[4]; /* 1 where dbias has stride 0: all of that dimension adds to one element */
} fa_sums;

static double *dbias_at(const fa_sums *sums, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t *n = sums->dbias_extent;
    return &sums->dbias[((b % n[0] * n[1] + h % n[1]) * n[2] + i % n[2]) * n[3] + j % n[3]];
}

static void row_backward(const fa_call *call, const fa_where *w, fa_row *row, const fa_sums *sums)
{
    double delta = 0.0;
    row->lse     = -INFINITY;
    memset(row->dq, 0, sizeof(double) * (size_t)call->head_dim);
    if (w->i < w->seq.seqlen_q)
        row_probabilities(call, w, row);
    if (row->lse != -INFINITY) {
        read_head(row->dout, &call->dout, query_at(&call->dout, w), call->head_dim_v, 1.0);
        for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++) {
            double factor = dropout_factor(call, w, j);
            row->dprob[j] = 0.0;
            if (row->score[j] == -INFINITY || factor == 0.0)
                continue;
            read_value(call, w, j, row->kv);
            row->dprob[j] = factor * dot(row->dout, row->kv, call->head_dim_v);
            delta += row->prob[j] * row->dprob[j];
            add_scaled(sums->dv + j * call->head_dim_v, factor * row->prob[j], row->dout, call->head_dim_v);
        }
        for (int j = w->seq.key_begin; j < w->seq.seqlen_k; j++) {
            if (row->score[j] == -INFINITY)
                continue;
            double ds = row->prob[j] * (row->dprob[j] - delta);
            if (sums->dbias)
                *dbias_at(sums, w->b, w->head, w->i, j) += ds;
            ds *= row->cap_slope[j] * (double)call->scale;
            read_key(call, w, j, row->kv);
            add_scaled(row->dq, ds, row->kv, call->head_dim);
            add_scaled(sums->dk + j * call->head_dim, ds, row->q, call->head_dim);
        }
        sums->dsinks[w->head] -= row->sink_prob * delta;
    }
    if (call->dq.data)
        write_head(&call->dq, query_at(&call->dq, w), call->head_dim, row->dq);
}

/* All queries of a group add to their key head's dk and dv; then these are stored. */
static void key_head_backward(const fa_call *call, fa_where *w, fa_row *row, const fa_sums *sums)
{
    const fa_sequence *seq = &w->seq;
    memset(sums->dk, 0, sizeof(double) * (size_t)(seq->seqlen_k * call->head_dim));
    memset(sums->dv, 0, sizeof(double) * (size_t)(seq->seqlen_k * call->head_dim_v));
    for (w->head = w->kv_head * call->group; w->head < (w->kv_head + 1) * call->group; w->head++)
        for (w->i = 0; w->i < seq->rows_q; w->i++)
            row_backward(call, w, row, sums);
    for (int j = 0; j < seq->rows_k; j++) {
        bool used = j < seq->seqlen_k;
        if (call->dk.data)
            write_head(&call->dk, fa_kv_at(call, &call->dk, seq, w->b, j, w->kv_head), call->head_dim,
                       used ? sums->dk + j * call->head_dim : NULL);
        if (call->dv.data)
            write_head(&call->dv, fa_kv_at(call, &call->dv, seq, w->b, j, w->kv_head), call->head_dim_v,
                       used ? sums->dv + j * call->head_dim_v : NULL);
    }
}

static void store_dbias(const fa_call *call, const fa_sums *sums)
{
    const int64_t *n = sums->dbias_extent;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t i = 0; i < n[2]; i++)
                for (int64_t j = 0; j < n[3]; j++)
                    store_once(fa_at(&call->dbias, b, h, i, j), 0, call->dbias.dtype, *dbias_at(sums, b, h, i, j));
}

/* ---- memory: everything before the first store, so that a failure has written nothing ---- */

/* `count` doubles, zero; at least one, so that NULL is always a failure. */
static double *doubles(int64_t count) { return calloc((size_t)(count > 0 ? count : 1), sizeof(double)); }

static bool row_create(fa_row *row, const fa_call *call)
{
    int64_t widest = call->head_dim > call->head_dim_v ? call->head_dim : call->head_dim_v;
    *row           = (fa_row){
                  .score     = doubles(call->max_seqlen_k),
                  .cap_slope = doubles(call->max_seqlen_k),
                  .prob      = doubles(call->max_seqlen_k),
                  .dprob     = doubles(call->max_seqlen_k),
                  .q         = doubles(call->head_dim),
                  .dq        = doubles(call->head_dim),
                  .o         = doubles(call->head_dim_v),
                  .dout      = doubles(call->head_dim_v),
                  .kv        = doubles(widest),
    };
    return row->score && row->cap_slope && row->prob && row->dprob && row->q && row->dq && row->o && row->dout &&
           row->kv;
}

static void row_destroy(fa_row *row)
{
    free(row->score);
    free(row->cap_slope);
    free(row->prob);
    free(row->dprob);
    free(row->q);
    free(row->dq);
    free(row->o);
    free(row->dout);
    free(row->kv);
}

static bool sums_create(fa_sums *sums, const fa_call *call)
{
    *sums = (fa_sums){
        .dk     = doubles(call->max_seqlen_k * call->head_dim),
        .dv     = doubles(call->max_seqlen_k * call->head_dim_v),
        .dsinks = doubles(call->heads_q),
    };
    if (call->dbias.data) {
        int64_t count = 1;
        for (int n = 0; n < 4; n++) {
            sums->dbias_extent[n] = call->dbias.stride[n] == 0 && call->dbias.shape[n] > 0 ? 1 : call->dbias.shape[n];
            count *= sums->dbias_extent[n];
        }
        sums->dbias = doubles(count);
    }
    return sums->dk && sums->dv && sums->dsinks && (sums->dbias || !call->dbias.data);
}

static void sums_destroy(fa_sums *sums)
{
    free(sums->dk);
    free(sums->dv);
    free(sums->dsinks);
    free(sums->dbias);
}

/* ---- the two passes ---- */

flash_attn_status fa_reference_forward(const fa_call *call)
{
    fa_row            row;
    flash_attn_status status = FLASH_ATTN_OK;
    if (row_create(&row, call)) {
        fa_where w;
        for (w.b = 0; w.b < call->batch; w.b++) {
            w.seq = fa_sequence_at(call, w.b);
            for (w.head = 0; w.head < call->heads_q; w.head++) {
                w.kv_head = w.head / call->group;
                for (w.i = 0; w.i < w.seq.rows_q; w.i++)
                    row_forward(call, &w, &row);
            }
        }
    } else {
        status = fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for a row of %lld scores", (long long)call->max_seqlen_k);
    }
    row_destroy(&row);
    return status;
}

flash_attn_status fa_reference_backward(const fa_call *call)
{
    fa_row            row;
    fa_sums           sums;
    flash_attn_status status   = FLASH_ATTN_OK;
    bool              have_row = row_create(&row, call), have_sums = sums_create(&sums, call);
    if (have_row && have_sums) {
        fa_where w;
        for (w.b = 0; w.b < call->batch; w.b++) {
            w.seq = fa_sequence_at(call, w.b);
            for (w.kv_head = 0; w.kv_head < call->heads_k; w.kv_head++)
                key_head_backward(call, &w, &row, &sums);
        }
        if (call->dbias.data)
            store_dbias(call, &sums);
        for (int64_t h = 0; call->dsinks.data && h < call->heads_q; h++)
            store_once(fa_at(&call->dsinks, 0, h, 0, 0), 0, call->dsinks.dtype, sums.dsinks[h]);
    } else {
        status =
            fa_fail(FLASH_ATTN_NO_MEMORY, "no memory for the gradients of %lld keys", (long long)call->max_seqlen_k);
    }
    row_destroy(&row);
    sums_destroy(&sums);
    return status;
}
