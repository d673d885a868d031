#include "case_internal.h"

#include <stdlib.h>

/* One head of one sequence, all of it in doubles. Matrices are [seqlen_q, seqlen_k]. */
typedef struct plain_head {
    const case_instance    *x;
    const flash_attn_dtype *rounding;
    const case_sequence    *s;
    int64_t                 b, h, kv_head;
    double                 *q, *k, *v, *o, *dout, *dq, *dk, *dv;
    double                 *S, *P, *cap_slope, *keep, *pair_terms;
    double                 *lse, *sink_prob;
    double                 *key_terms, *value_terms, *sink_terms; /* squares, [seqlen_k] twice and [heads_q] */
    double                 *k_square, *v_square;                  /* mean squares of keys and values */
    case_terms             *terms;                                /* l2 holds squares until the end */
} plain_head;

static double stored(const plain_head *t, double value) { return t->rounding ? round_to(value, *t->rounding) : value; }

static double or_default(const flash_attn_tensor *t, int64_t b, int64_t h, double if_absent)
{
    return t->data ? get(t, t->shape[0] == 1 ? 0 : b, t->shape[1] == 1 ? 0 : h, 0, 0) : if_absent;
}

static double bias_at(const plain_head *t, int i, int j)
{
    const flash_attn_tensor *bias = &t->x->problem.bias;
    return bias->data ? get(bias, t->b % bias->shape[0], t->h % bias->shape[1], i % bias->shape[2], j) : 0.0;
}

/* Any fair coin does here, since both runs toss the same. */
static double keep_factor(const plain_head *t, int i, int j)
{
    float p = t->x->shape.dropout;
    if (p == 0)
        return 1;
    uint64_t coin = ((uint64_t)(t->b * 97 + t->h) << 40) + ((uint64_t)i << 20) + (uint64_t)j;
    return random_unit(&coin) < (double)p ? 0 : 1 / (1 - (double)p);
}

/* Four partial sums: as exact as one, and several times quicker. */
static double dot(const double *a, const double *b, int n)
{
    double part[4] = {0};
    int    c       = 0;
    for (; c + 4 <= n; c += 4)
        for (int lane = 0; lane < 4; lane++)
            part[lane] += a[c + lane] * b[c + lane];
    for (; c < n; c++)
        part[0] += a[c] * b[c];
    return (part[0] + part[1]) + (part[2] + part[3]);
}

static double mean_square(const double *a, int n) { return dot(a, a, n) / n; }

static void load_head(plain_head *t)
{
    const case_instance      *x = t->x;
    const flash_attn_problem *p = &x->problem;
    const int                 d = x->shape.head_dim, dv = x->shape.head_dim_v;
    double                    dq = or_default(&p->descale.q, t->b, t->kv_head, 1);
    double dk = or_default(&p->descale.k, t->b, t->kv_head, 1), dvs = or_default(&p->descale.v, t->b, t->kv_head, 1);
    for (int i = 0; i < t->s->seqlen_q; i++) {
        for (int c = 0; c < d; c++)
            t->q[(int64_t)i * d + c] = dq * get(&p->q, t->s->q_entry, t->s->q_row + i, t->h, c);
        for (int c = 0; c < dv && x->backward; c++)
            t->dout[(int64_t)i * dv + c] = get(&x->grads.dout, t->s->q_entry, t->s->q_row + i, t->h, c);
    }
    if (t->h > t->kv_head * (x->shape.heads_q / x->shape.heads_k))
        return; /* the keys of the group are there */
    for (int j = t->s->key_begin; j < t->s->seqlen_k; j++) {
        int64_t at[2];
        case_key_place(x, t->b, j, at);
        for (int c = 0; c < d; c++)
            t->k[(int64_t)j * d + c] = dk * get(&p->k, at[0], at[1], t->kv_head, c);
        for (int c = 0; c < dv; c++)
            t->v[(int64_t)j * dv + c] = dvs * get(&p->v, at[0], at[1], t->kv_head, c);
        t->k_square[j] = mean_square(t->k + (int64_t)j * d, d);
        t->v_square[j] = mean_square(t->v + (int64_t)j * dv, dv);
    }
}

/* S = scores, -inf where masked */
static void scores(plain_head *t)
{
    const flash_attn_problem *p = &t->x->problem;
    const int                 d = t->x->shape.head_dim, nk = t->s->seqlen_k;
    double                    scale = p->scale == 0 && !signbit(p->scale) ? 1 / sqrt(d) : (double)p->scale;
    double                    slope = or_default(&p->alibi_slopes, t->b, t->h, 0), cap = (double)p->softcap;
    for (int i = 0; i < t->s->seqlen_q; i++)
        for (int j = 0; j < nk; j++) {
            int64_t at       = (int64_t)i * nk + j;
            t->cap_slope[at] = 1;
            t->keep[at]      = keep_factor(t, i, j);
            t->S[at]         = (double)-INFINITY;
            if (!case_sees(t->x, t->b, i, j) || bias_at(t, i, j) == (double)-INFINITY)
                continue;
            double s = stored(t, scale * dot(t->q + (int64_t)i * d, t->k + (int64_t)j * d, d));
            if (cap > 0) {
                double tangent   = tanh(s / cap);
                t->cap_slope[at] = 1 - tangent * tangent;
                s                = stored(t, cap * tangent);
            }
            s += bias_at(t, i, j) - slope * fabs((double)i + nk - t->s->seqlen_q - j);
            t->S[at] = stored(t, s);
        }
}

static void take_terms(case_terms *terms, int output, double square, double elements)
{
    terms->largest[output] = fmax(terms->largest[output], sqrt(square));
    terms->l2[output] += square * elements;
}

static void forward(plain_head *t)
{
    const int dv = t->x->shape.head_dim_v, nk = t->s->seqlen_k;
    double    sink = or_default(&t->x->problem.sinks, t->b, t->h, (double)-INFINITY);
    scores(t);
    for (int i = 0; i < t->s->seqlen_q; i++) {
        double *S = t->S + (int64_t)i * nk, *P = t->P + (int64_t)i * nk, *o = t->o + (int64_t)i * dv;
        double  max = sink, sum = 0;
        for (int j = 0; j < nk; j++)
            max = S[j] > max ? S[j] : max;
        for (int j = 0; j < nk; j++)
            sum += S[j] == (double)-INFINITY ? 0 : exp(S[j] - max);
        sum += sink == (double)-INFINITY ? 0 : exp(sink - max);
        t->lse[i]       = sum > 0 ? max + log(sum) : (double)-INFINITY;
        t->sink_prob[i] = sink == (double)-INFINITY ? 0 : exp(sink - t->lse[i]);
        memset(o, 0, sizeof *o * (size_t)dv);
        double o_terms = 0;
        for (int j = 0; j < nk; j++) {
            P[j]      = S[j] == (double)-INFINITY ? 0 : stored(t, exp(S[j] - t->lse[i]));
            double PZ = stored(t, P[j] * t->keep[(int64_t)i * nk + j]); /* after dropout it is stored again */
            if (t->terms && P[j] != 0)
                o_terms += P[j] * P[j] * t->v_square[j];
            for (int c = 0; PZ != 0 && c < dv; c++)
                o[c] += PZ * t->v[(int64_t)j * dv + c];
        }
        for (int c = 0; c < dv; c++)
            o[c] = stored(t, o[c]);
        if (t->terms)
            take_terms(t->terms, OUT_O, o_terms / pow(1 - (double)t->x->shape.dropout, 2), dv);
    }
}

/* The root of the sum of squares of what a dot product adds up. */
static double dot_terms(const double *a, const double *b, int n)
{
    double part[4] = {0};
    int    c       = 0;
    for (; c + 4 <= n; c += 4)
        for (int lane = 0; lane < 4; lane++)
            part[lane] += a[c + lane] * b[c + lane] * a[c + lane] * b[c + lane];
    for (; c < n; c++)
        part[0] += a[c] * b[c] * a[c] * b[c];
    return sqrt(part[0] + part[1] + part[2] + part[3]);
}

/* dP's terms of row i, kept pair or not, since the real dropout keeps others; returns Delta's, P dP over the row. */
static double row_terms(plain_head *t, int i)
{
    const int     dv = t->x->shape.head_dim_v, nk = t->s->seqlen_k;
    const int64_t first = (int64_t)i * nk;
    const double  keep  = 1 / (1 - (double)t->x->shape.dropout);
    const double  dout_square = mean_square(t->dout + (int64_t)i * dv, dv);
    double        delta = 0;
    for (int j = 0; j < nk; j++) {
        double       dP = keep * dot_terms(t->dout + (int64_t)i * dv, t->v + (int64_t)j * dv, dv);
        const double P  = t->P[first + j] * keep;
        t->value_terms[j] += P * P * dout_square;
        t->pair_terms[first + j] = t->P[first + j] == 0 ? 0 : dP;
        delta += t->P[first + j] == 0 ? 0 : t->P[first + j] * dP * t->P[first + j] * dP;
    }
    return sqrt(delta);
}

/* One pair's share in dq, dk and dbias: dS as large as dP and Delta make it before they cancel. */
static void add_terms(plain_head *t, int i, int j, double scale, double delta, double q_square, double *query_terms)
{
    const int64_t    at = (int64_t)i * t->s->seqlen_k + j;
    const test_case *c  = &t->x->shape;
    double           dS = t->P[at] * (t->pair_terms[at] + delta);
    double summed       = sqrt((c->bias & BIAS_ONE_BATCH ? c->batch : 1) * (c->bias & BIAS_ONE_HEAD ? c->heads_q : 1) *
                               (double)(c->bias & BIAS_ONE_QUERY ? c->seqlen_q : 1));
    t->terms->largest[OUT_DBIAS] = fmax(t->terms->largest[OUT_DBIAS], dS * summed);
    t->terms->l2[OUT_DBIAS] += dS * dS;
    dS *= scale * t->cap_slope[at];
    *query_terms += dS * dS * t->k_square[j];
    t->key_terms[j] += dS * dS * q_square;
}

static void finish_query_terms(plain_head *t, int i, double delta, double query_terms)
{
    double sink = t->sink_prob[i] * delta;
    take_terms(t->terms, OUT_DQ, query_terms, t->x->shape.head_dim);
    t->sink_terms[t->h] += sink * sink;
}

/* Delta is the row sum of dO times the stored O, which is what any backward that recomputes P is given. */
static void backward(plain_head *t, flash_attn_tensor results[NUM_OUTPUTS])
{
    const int                 d = t->x->shape.head_dim, dv = t->x->shape.head_dim_v, nk = t->s->seqlen_k;
    const flash_attn_problem *p     = &t->x->problem;
    double                    scale = p->scale == 0 && !signbit(p->scale) ? 1 / sqrt(d) : (double)p->scale;
    const flash_attn_tensor  *dbias = &results[OUT_DBIAS], *dsinks = &results[OUT_DSINKS];
    for (int i = 0; i < t->s->seqlen_q; i++) {
        const double *P = t->P + (int64_t)i * nk, *dout = t->dout + (int64_t)i * dv;
        double       *dq = t->dq + (int64_t)i * d, delta = dot(dout, t->o + (int64_t)i * dv, dv);
        double        query_terms = 0, q_square = mean_square(t->q + (int64_t)i * d, d);
        memset(dq, 0, sizeof *dq * (size_t)d);
        if (t->lse[i] == (double)-INFINITY || !t->x->row_sees[t->s->first_row + i])
            continue;
        double terms_of_delta = t->terms ? row_terms(t, i) : 0;
        for (int j = 0; j < nk; j++) {
            int64_t at = (int64_t)i * nk + j;
            if (t->S[at] == (double)-INFINITY)
                continue;
            double dP = stored(t, t->keep[at] * dot(dout, t->v + (int64_t)j * dv, dv));
            double dS = stored(t, P[j] * (dP - delta));
            double PZ = stored(t, P[j] * t->keep[at]);
            for (int c = 0; c < dv; c++)
                t->dv[(int64_t)j * dv + c] += PZ * dout[c];
            if (dbias->data) {
                int64_t n[3] = {t->b % dbias->shape[0], t->h % dbias->shape[1], i % dbias->shape[2]};
                set(dbias, n[0], n[1], n[2], j, get(dbias, n[0], n[1], n[2], j) + dS);
            }
            dS *= scale * t->cap_slope[at];
            if (t->terms)
                add_terms(t, i, j, scale, terms_of_delta, q_square, &query_terms);
            for (int c = 0; c < d; c++) {
                dq[c] += dS * t->k[(int64_t)j * d + c];
                t->dk[(int64_t)j * d + c] += dS * t->q[(int64_t)i * d + c];
            }
        }
        if (t->terms)
            finish_query_terms(t, i, terms_of_delta, query_terms);
        if (dsinks->data)
            set(dsinks, 0, t->h, 0, 0, get(dsinks, 0, t->h, 0, 0) - t->sink_prob[i] * delta);
    }
}

static void store_queries(const plain_head *t, flash_attn_tensor results[NUM_OUTPUTS])
{
    const int d = t->x->shape.head_dim, dv = t->x->shape.head_dim_v;
    for (int i = 0; i < t->s->rows_q; i++) {
        bool    used = i < t->s->seqlen_q;
        int64_t row  = t->s->q_row + i;
        for (int c = 0; c < dv; c++)
            set(&results[OUT_O], t->s->q_entry, row, t->h, c, used ? t->o[(int64_t)i * dv + c] : 0);
        set(&results[OUT_LSE], t->s->q_entry, t->h, row, 0, used ? t->lse[i] : (double)-INFINITY);
        for (int c = 0; c < d && t->x->backward; c++)
            set(&results[OUT_DQ], t->s->q_entry, row, t->h, c, used ? stored(t, t->dq[(int64_t)i * d + c]) : 0);
    }
}

static void store_keys(const plain_head *t, flash_attn_tensor results[NUM_OUTPUTS])
{
    const int d = t->x->shape.head_dim, dv = t->x->shape.head_dim_v;
    for (int j = 0; j < t->s->rows_k; j++) {
        int64_t entry = t->s->kv_entry, row = t->s->kv_row + j;
        bool    used = j < t->s->seqlen_k;
        for (int c = 0; c < d; c++)
            set(&results[OUT_DK], entry, row, t->kv_head, c, used ? stored(t, t->dk[(int64_t)j * d + c]) : 0);
        for (int c = 0; c < dv; c++)
            set(&results[OUT_DV], entry, row, t->kv_head, c, used ? stored(t, t->dv[(int64_t)j * dv + c]) : 0);
    }
}

bool case_plain(const case_instance *x, const flash_attn_dtype *rounding, flash_attn_tensor results[NUM_OUTPUTS],
                case_terms *terms)
{
    const test_case *c  = &x->shape;
    const size_t     nq = (size_t)c->seqlen_q, nk = (size_t)c->seqlen_k, d = (size_t)c->head_dim,
                 dv    = (size_t)c->head_dim_v;
    const size_t pairs = nq * nk, q_part = nq * (2 * d + 2 * dv + 2), k_part = nk * (2 * d + 2 * dv);
    double      *all = calloc(5 * pairs + q_part + k_part + 4 * nk + (size_t)c->heads_q + 1, sizeof *all), *next = all;
    plain_head   t = {.x = x, .rounding = rounding, .terms = terms};
    struct {
        double **array;
        size_t   count;
    } const parts[] = {
        {&t.q, nq * d},         {&t.dq, nq * d},    {&t.o, nq * dv},      {&t.dout, nq * dv},
        {&t.lse, nq},           {&t.sink_prob, nq}, {&t.k, nk * d},       {&t.dk, nk * d},
        {&t.v, nk * dv},        {&t.dv, nk * dv},   {&t.S, pairs},        {&t.P, pairs},
        {&t.pair_terms, pairs}, {&t.key_terms, nk}, {&t.value_terms, nk}, {&t.sink_terms, (size_t)c->heads_q},
        {&t.cap_slope, pairs},  {&t.keep, pairs},   {&t.k_square, nk},    {&t.v_square, nk}};
    if (!all)
        return false;
    for (size_t n = 0; n < sizeof parts / sizeof parts[0]; n++) {
        *parts[n].array = next;
        next += parts[n].count;
    }
    int group = c->heads_q / c->heads_k;
    for (t.b = 0; t.b < c->batch; t.b++)
        for (t.kv_head = 0; t.kv_head < c->heads_k; t.kv_head++) {
            t.s = &x->sequences[t.b];
            memset(t.key_terms, 0, sizeof *t.key_terms * nk);
            memset(t.value_terms, 0, sizeof *t.value_terms * nk);
            memset(t.dk, 0, sizeof *t.dk * nk * d);
            memset(t.dv, 0, sizeof *t.dv * nk * dv);
            for (t.h = t.kv_head * group; t.h < (t.kv_head + 1) * group; t.h++) {
                load_head(&t);
                forward(&t);
                if (x->backward)
                    backward(&t, results);
                store_queries(&t, results);
            }
            if (x->backward)
                store_keys(&t, results);
            for (int j = 0; terms && j < t.s->seqlen_k; j++) {
                take_terms(terms, OUT_DK, t.key_terms[j], c->head_dim);
                take_terms(terms, OUT_DV, t.value_terms[j], c->head_dim_v);
            }
        }
    for (int h = 0; terms && h < c->heads_q; h++)
        take_terms(terms, OUT_DSINKS, t.sink_terms[h], 1);
    for (int n = 0; terms && n < NUM_OUTPUTS; n++)
        terms->l2[n] = sqrt(terms->l2[n]);
    free(all);
    return true;
}
