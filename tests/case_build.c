#include "case_internal.h"

#include <stdlib.h>

/* ---- memory ---- */

/* `bytes` of 0xFF between guards, aligned to 64. */
static void *case_memory_of(case_instance *x, size_t bytes, bool output)
{
    size_t         all  = (bytes + 2 * GUARD_BYTES + 63) / 64 * 64;
    unsigned char *base = x->num_buffers < MAX_BUFFERS ? aligned_alloc(64, all) : NULL;
    if (!base) {
        x->failed = true;
        return NULL;
    }
    memset(base, 0xFF, all);
    x->buffers[x->num_buffers++] = (case_buffer){.base = base, .bytes = all, .output = output};
    return base + GUARD_BYTES;
}

/* A tensor of t's shape and strides over new memory; t.data is the offset of its first element from the lowest one. */
static flash_attn_tensor allocate(case_instance *x, flash_attn_tensor t, int64_t elements_before, bool output)
{
    int64_t lowest = 0, highest = 0;
    bool    empty = false;
    for (int n = 0; n < 4; n++) {
        int64_t span = (t.shape[n] - 1) * t.stride[n];
        empty        = empty || t.shape[n] == 0;
        *(span < 0 ? &lowest : &highest) += span;
    }
    size_t  elem  = dtype_bytes(t.dtype);
    int64_t count = empty ? 0 : highest - lowest + 1;
    char   *data  = case_memory_of(x, (size_t)(count + elements_before) * elem, output);
    if (data)
        t.data = data + (empty ? 0 : elements_before - lowest) * (int64_t)elem;
    return t;
}

flash_attn_tensor case_tensor(case_instance *x, flash_attn_dtype dtype, const int64_t shape[4], layout how, bool output)
{
    flash_attn_tensor t = {.dtype = dtype};
    int64_t          *s = t.stride;
    memcpy(t.shape, shape, sizeof t.shape);
    int64_t inner = how == LAYOUT_INNER_STRIDE ? 3 : 1, gap = how == LAYOUT_OFF_BY_ONE || how == LAYOUT_INNER_STRIDE;
    s[3] = inner;
    if (how == LAYOUT_HEADS_FIRST) {
        s[1] = shape[3];
        s[2] = s[1] * shape[1];
        s[0] = s[2] * shape[2];
    } else {
        s[2] = shape[3] * inner + gap;
        s[1] = s[2] * shape[2] + gap;
        s[0] = s[1] * shape[1] + gap;
    }
    if (how == LAYOUT_REVERSED)
        s[1] = -s[1];
    return allocate(x, t, how == LAYOUT_OFF_BY_ONE, output);
}

/* q, k and v as views of one array [n0, n1, heads * head_dim of each, side by side]. */
static void packed_tensors(case_instance *x, flash_attn_dtype dtype, flash_attn_tensor *const parts[3], bool output)
{
    int64_t           row = 0, offset = 0;
    flash_attn_tensor all = {.dtype = dtype};
    for (int n = 0; n < 3; n++)
        row += parts[n]->shape[2] * parts[n]->shape[3];
    memcpy(all.shape, (int64_t[4]){parts[0]->shape[0], parts[0]->shape[1], 1, row}, sizeof all.shape);
    memcpy(all.stride, (int64_t[4]){row * all.shape[1], row, row, 1}, sizeof all.stride);
    all = allocate(x, all, 0, output);
    for (int n = 0; n < 3; n++) {
        parts[n]->dtype = dtype;
        parts[n]->data  = all.data ? (char *)all.data + offset * (int64_t)dtype_bytes(dtype) : NULL;
        memcpy(parts[n]->stride, (int64_t[4]){all.stride[0], row, parts[n]->shape[3], 1}, sizeof all.stride);
        offset += parts[n]->shape[2] * parts[n]->shape[3];
    }
}

static int32_t *int_array(case_instance *x, int64_t count)
{
    return case_memory_of(x, (size_t)count * sizeof(int32_t), false);
}

/* ---- lengths ---- */

static int length_of(case_instance *x, lengths pattern, int64_t b, int64_t batch, int n)
{
    switch (pattern) {
    case LENGTHS_NONE:
    case LENGTHS_FULL: return n;
    case LENGTHS_EMPTY: return 0;
    case LENGTHS_ONES: return n < 1 ? n : 1;
    case LENGTHS_FEW: return b % 12 == 0 ? n : 0;
    case LENGTHS_DECODED: return b == batch / 2 ? n : b % 5 == 4 ? 0 : b % 3 == 2 ? 3 : 1;
    case LENGTHS_MIXED: return b == batch / 2 ? n : random_int(&x->random, n < 1 ? n : 1, n);
    case LENGTHS_HOLES: return b % 2 == 0 ? 0 : b == 1 ? n : random_int(&x->random, n < 1 ? n : 1, n);
    }
    return n;
}

static const int32_t *cumulative(case_instance *x, lengths pattern, int n)
{
    int64_t  batch = x->shape.batch;
    int32_t *cu    = pattern == LENGTHS_NONE ? NULL : int_array(x, batch + 1);
    if (cu) {
        cu[0] = 0;
        for (int64_t b = 0; b < batch; b++)
            cu[b + 1] = cu[b] + length_of(x, pattern, b, batch, n);
    }
    return cu;
}

static void make_lengths(case_instance *x)
{
    const test_case    *c = &x->shape;
    flash_attn_problem *p = &x->problem;
    p->cu_seqlens_q       = cumulative(x, c->varlen_q, c->seqlen_q);
    /* One packed array holds both, so their lengths agree. */
    p->cu_seqlens_k = c->layout == LAYOUT_PACKED ? p->cu_seqlens_q : cumulative(x, c->varlen_k, c->seqlen_k);
    p->batch        = p->cu_seqlens_q ? c->batch : 0;
    p->max_seqlen_q = p->cu_seqlens_q ? c->seqlen_q : 0; /* upper bounds */
    p->max_seqlen_k = p->cu_seqlens_k || (c->page_size && c->seqused_k) ? c->seqlen_k : 0; /* bounds a bias too */
    int32_t *used_q = c->seqused_q ? int_array(x, c->batch) : NULL,
            *used_k = c->seqused_k ? int_array(x, c->batch) : NULL;
    int32_t *pad    = c->leftpad ? int_array(x, c->batch) : NULL,
            *index  = c->cache_batch_idx ? int_array(x, c->batch) : NULL;
    if (x->failed)
        return;
    for (int b = 0; b < c->batch; b++) {
        case_sequence *s = &x->sequences[b];
        *s               = (case_sequence){.q_entry = b, .kv_entry = b, .rows_q = c->seqlen_q, .rows_k = c->seqlen_k};
        if (p->cu_seqlens_q) {
            s->q_entry = 0;
            s->q_row   = p->cu_seqlens_q[b];
            s->rows_q  = p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b];
        }
        if (p->cu_seqlens_k) {
            s->kv_entry = 0;
            s->kv_row   = p->cu_seqlens_k[b];
            s->rows_k   = p->cu_seqlens_k[b + 1] - p->cu_seqlens_k[b];
        }
        s->seqlen_q = s->rows_q;
        s->seqlen_k = s->rows_k;
        if (used_q) {
            int used  = length_of(x, c->seqused_q, b, c->batch, c->seqlen_q);
            used_q[b] = s->seqlen_q = used < s->rows_q ? used : s->rows_q;
        }
        if (used_k) {
            int used  = length_of(x, c->seqused_k, b, c->batch, c->seqlen_k);
            used_k[b] = s->seqlen_k = used < s->rows_k ? used : s->rows_k;
        }
        if (pad)
            pad[b] = s->key_begin = b == 0 ? 0 : random_int(&x->random, 0, s->seqlen_k);
        if (index)
            index[b] = (int32_t)(s->kv_entry = (b * 2 + 1) % (c->batch + 2)); /* some entry is no one's */
        s->first_row = x->num_rows;
        s->first_key = x->num_keys;
        x->num_rows += s->rows_q;
        x->num_keys += s->rows_k;
    }
    p->seqused_q       = used_q;
    p->seqused_k       = used_k;
    p->leftpad_k       = pad;
    p->cache_batch_idx = index;
}

/* ---- block masks ---- */

/* Over nq queries and nk keys. */
static int make_slice_list(slice_pattern pattern, int nq, int nk, flash_attn_slice *list, int capacity)
{
    int count = 0;
    switch (pattern) {
    case SLICES_NONE: return 0;
    case SLICES_DOCUMENTS:
        for (int n = 0; n < 4; n++) {
            static const int percent[5] = {0, 23, 50, 81, 100};
            list[count++] = (flash_attn_slice){nq * percent[n] / 100, nq * percent[n + 1] / 100, nk * percent[n] / 100,
                                               nk * percent[n + 1] / 100, FLASH_ATTN_SLICE_CAUSAL};
        }
        return count;
    case SLICES_SHARED:
        list[count++] = (flash_attn_slice){0, nq / 4, 0, nk / 4, FLASH_ATTN_SLICE_CAUSAL};
        list[count++] = (flash_attn_slice){nq / 4, nq, 0, nk / 4, FLASH_ATTN_SLICE_FULL};
        for (int n = 1; n < 4; n++)
            list[count++] =
                (flash_attn_slice){nq * n / 4, nq * (n + 1) / 4, nk * n / 4, nk * (n + 1) / 4, FLASH_ATTN_SLICE_CAUSAL};
        return count;
    case SLICES_SPARSE:
        for (int i = 0; i * 32 < nq; i++)
            for (int j = 0; j * 32 < nk && count < capacity; j++)
                if ((i + j) % 3 == 0 && i % 4 != 1)
                    list[count++] = (flash_attn_slice){i * 32, i * 32 + 32 < nq ? i * 32 + 32 : nq, j * 32,
                                                       j * 32 + 32 < nk ? j * 32 + 32 : nk, FLASH_ATTN_SLICE_FULL};
        return count;
    case SLICES_LONG: return 0; /* make_long_documents */
    case SLICES_BLOCKS:
        list[count++] = (flash_attn_slice){0, nq * 2 / 5, 0, nk * 2 / 5, FLASH_ATTN_SLICE_FULL};
        list[count++] = (flash_attn_slice){nq * 2 / 5, nq, nk * 2 / 5, nk, FLASH_ATTN_SLICE_FULL};
        return count;
    case SLICES_KINDS:
    case SLICES_OWN:
        list[count++] = (flash_attn_slice){nq / 7, nq / 2, 0, nk / 3, FLASH_ATTN_SLICE_CAUSAL};
        list[count++] = (flash_attn_slice){nq / 3, nq * 4 / 5, nk / 5, nk * 2 / 3, FLASH_ATTN_SLICE_INVERSE_CAUSAL};
        list[count++] = (flash_attn_slice){nq / 2, nq, nk / 2, nk, FLASH_ATTN_SLICE_BOTH};
        list[count++] = (flash_attn_slice){0, nq / 4, nk * 2 / 3, nk, FLASH_ATTN_SLICE_FULL};
        return count;
    }
    return 0;
}

/* Two that fill the sequence; two with some queries before and behind and keys between; one. By turns. */
static int make_long_documents(case_instance *x, int32_t *offsets, flash_attn_slice *list)
{
    int count = 0;
    for (int b = 0; b < x->shape.batch; b++) {
        int nq = x->sequences[b].rows_q, nk = x->sequences[b].rows_k, quarter = (nq < nk ? nq : nk) / 4, gap = b % 3 != 1 ? 0 : quarter < 7 ? quarter : 7;
        int middle_q = b % 3 == 2 ? nq : nq * 9 / 20, middle_k = b % 3 == 2 ? nk : nk * 9 / 20;
        offsets[b] = count;
        list[count++] = (flash_attn_slice){gap, middle_q, 0, middle_k, FLASH_ATTN_SLICE_CAUSAL};
        list[count++] = (flash_attn_slice){middle_q, nq - gap, b % 3 == 2 ? nk : middle_k + gap, nk, FLASH_ATTN_SLICE_CAUSAL};
    }
    offsets[x->shape.batch] = count;
    return count;
}

static void make_slices(case_instance *x)
{
    enum { CAPACITY = 256 };
    const test_case *c = &x->shape;
    if (c->slices == SLICES_NONE)
        return;
    flash_attn_slice *list = case_memory_of(x, CAPACITY * sizeof *list, false);
    if (x->failed)
        return;
    x->buffers[x->num_buffers - 1].is_host_list = true;
    int longest_q = 0, longest_k = 0; /* slices lie inside the longest sequence */
    for (int b = 0; b < c->batch; b++) {
        const case_sequence *s = &x->sequences[b];
        longest_q              = s->rows_q > longest_q ? s->rows_q : longest_q;
        longest_k              = s->rows_k > longest_k ? s->rows_k : longest_k;
    }
    int count = make_slice_list(c->slices, longest_q, longest_k, list, CAPACITY);
    if (c->slices == SLICES_LONG) {
        int32_t *offsets = int_array(x, c->batch + 1);
        if (x->failed)
            return;
        x->buffers[x->num_buffers - 1].is_host_list = true;
        x->problem.slices.offsets = offsets;
        count                     = make_long_documents(x, offsets, list);
    }
    if (c->slices == SLICES_OWN) { /* sequence 0 has none, the others share out the list, the last one the rest */
        int32_t *offsets = int_array(x, c->batch + 1);
        if (x->failed)
            return;
        x->buffers[x->num_buffers - 1].is_host_list = true;
        for (int b = 0; b <= c->batch; b++)
            offsets[b] = b <= 1 ? 0 : b == c->batch ? count : (b - 1 < count ? b - 1 : count);
        x->problem.slices.offsets = offsets;
        if (c->batch == 1)
            offsets[1] = count;
    }
    x->problem.slices.list  = list;
    x->problem.slices.count = count;
}

/* ---- what sees what ---- */

static bool slice_holds(const flash_attn_slice *s, int i, int j)
{
    if (i < s->q_begin || i >= s->q_end || j < s->k_begin || j >= s->k_end)
        return false;
    bool causal = s->k_end - j >= s->q_end - i, inverse = j - s->k_begin >= i - s->q_begin;
    switch (s->kind) {
    case FLASH_ATTN_SLICE_FULL: return true;
    case FLASH_ATTN_SLICE_CAUSAL: return causal;
    case FLASH_ATTN_SLICE_INVERSE_CAUSAL: return inverse;
    default: return causal && inverse;
    }
}

bool case_sees(const case_instance *x, int64_t b, int i, int j)
{
    const flash_attn_problem *p = &x->problem;
    const case_sequence      *s = &x->sequences[b];
    if (i >= s->seqlen_q || j < s->key_begin || j >= s->seqlen_k)
        return false;
    int64_t ahead = (int64_t)j - i - s->seqlen_k + s->seqlen_q; /* how far the key lies right of the diagonal */
    if (p->mask == FLASH_ATTN_CAUSAL && ahead > 0)
        return false;
    if (p->mask == FLASH_ATTN_WINDOW &&
        ((p->window_right >= 0 && ahead > p->window_right) || (p->window_left >= 0 && -ahead > p->window_left)))
        return false;
    if (p->slices.count == 0)
        return true;
    int first = p->slices.offsets ? p->slices.offsets[b] : 0;
    int end   = p->slices.offsets ? p->slices.offsets[b + 1] : p->slices.count;
    for (int n = first; n < end; n++)
        if (slice_holds(&p->slices.list[n], i, j))
            return true;
    return false;
}

static void find_what_is_seen(case_instance *x)
{
    x->row_sees = calloc((size_t)x->num_rows + 1, 1);
    x->key_seen = calloc((size_t)x->num_keys + 1, 1);
    if (!x->row_sees || !x->key_seen) {
        x->failed = true;
        return;
    }
    for (int b = 0; b < x->shape.batch; b++)
        for (int i = 0; i < x->sequences[b].seqlen_q; i++)
            for (int j = x->sequences[b].key_begin; j < x->sequences[b].seqlen_k; j++)
                if (case_sees(x, b, i, j))
                    x->row_sees[x->sequences[b].first_row + i] = x->key_seen[x->sequences[b].first_key + j] = 1;
}

/* ---- tensors ---- */

/* The entry and row of k and v that hold key j. */
void case_key_place(const case_instance *x, int64_t b, int j, int64_t place[2])
{
    const flash_attn_pages *pages = &x->problem.pages;
    if (pages->table) {
        place[0] = pages->table[b * pages->row_stride + j / x->shape.page_size];
        place[1] = j % x->shape.page_size;
    } else {
        place[0] = x->sequences[b].kv_entry;
        place[1] = x->sequences[b].kv_row + j;
    }
}

/* Pages in shuffled order; three belong to no one. Entries past a sequence's keys are valid pages too. */
static void make_pages(case_instance *x, int64_t kv_shape[4])
{
    const test_case  *c     = &x->shape;
    flash_attn_pages *pages = &x->problem.pages;
    int               own = (c->seqlen_k + c->page_size - 1) / c->page_size, total = c->batch * own + 3;
    int64_t           row_stride = own + 2;
    int32_t          *table = int_array(x, c->batch * row_stride), *order = malloc((size_t)total * sizeof *order);
    if (!order)
        x->failed = true;
    for (int n = 0; !x->failed && n < total; n++) {
        int other    = random_int(&x->random, 0, n);
        order[n]     = order[other];
        order[other] = n;
    }
    for (int n = 0; !x->failed && n < c->batch * own; n++)
        table[n / own * row_stride + n % own] = order[n];
    free(order);
    *pages      = (flash_attn_pages){.table = table, .row_stride = row_stride, .pages_per_seq = own};
    kv_shape[0] = total;
    kv_shape[1] = c->page_size;
}

static void fill_inputs(case_instance *x)
{
    const test_case    *c      = &x->shape;
    flash_attn_problem *p      = &x->problem;
    double              q_size = c->logit_size == 0 ? 1.0 : (double)c->logit_size;
    for (int b = 0; b < c->batch; b++) {
        const case_sequence *s = &x->sequences[b];
        for (int i = 0; i < s->rows_q; i++)
            for (int64_t h = 0; x->row_sees[s->first_row + i] && h < c->heads_q; h++)
                for (int64_t d = 0; d < c->head_dim; d++)
                    set(&p->q, s->q_entry, s->q_row + i, h, d, q_size * random_normal(&x->random));
        for (int j = 0; j < s->rows_k; j++) {
            int64_t at[2];
            if (!x->key_seen[s->first_key + j])
                continue;
            case_key_place(x, b, j, at);
            for (int64_t h = 0; h < c->heads_k; h++) {
                for (int64_t d = 0; d < c->head_dim; d++)
                    set(&p->k, at[0], at[1], h, d, random_normal(&x->random));
                for (int64_t d = 0; d < c->head_dim_v; d++)
                    set(&p->v, at[0], at[1], h, d, random_normal(&x->random));
            }
        }
    }
}

static void fill_dout(case_instance *x)
{
    for (int b = 0; b < x->shape.batch; b++) {
        const case_sequence *s = &x->sequences[b];
        for (int i = 0; i < s->rows_q; i++)
            for (int64_t h = 0; x->row_sees[s->first_row + i] && h < x->shape.heads_q; h++)
                for (int64_t d = 0; d < x->shape.head_dim_v; d++)
                    set(&x->grads.dout, s->q_entry, s->q_row + i, h, d, random_normal(&x->random));
    }
}

static void make_bias(case_instance *x, layout how)
{
    const test_case *c    = &x->shape;
    flash_attn_dtype type = c->bias & BIAS_F32 || x->dtype == FLASH_ATTN_F8E4M3 ? FLASH_ATTN_F32 : x->dtype;
    int64_t          n[4] = {c->bias & BIAS_ONE_BATCH ? 1 : c->batch, c->bias & BIAS_ONE_HEAD ? 1 : c->heads_q,
                    c->bias & BIAS_ONE_QUERY ? 1 : c->seqlen_q, c->seqlen_k};
    flash_attn_tensor bias = case_tensor(x, type, n, how, false);
    for (int b = 0; !x->failed && b < c->batch; b++)
        for (int64_t h = 0; h < c->heads_q; h++)
            for (int i = 0; i < x->sequences[b].seqlen_q; i++)
                for (int j = 0; j < x->sequences[b].seqlen_k; j++) {
                    double value = random_normal(&x->random);
                    bool   row   = n[2] > 1 && i % 7 == 3;
                    if (!case_sees(x, b, i, j))
                        continue;
                    if (c->bias & BIAS_MINUS_INF && (row || random_unit(&x->random) < 0.1))
                        value = (double)-INFINITY;
                    set(&bias, b % n[0], h % n[1], i % n[2], j, value);
                }
    x->problem.bias = bias;
}

static void make_per_head(case_instance *x)
{
    const test_case *c = &x->shape;
    if (c->alibi) {
        int64_t n[4]            = {c->batch > 1 && c->varlen_q == LENGTHS_NONE ? c->batch : 1, c->heads_q, 1, 1};
        x->problem.alibi_slopes = case_tensor(x, FLASH_ATTN_F32, n, LAYOUT_CONTIGUOUS, false);
        for (int64_t t = 0; !x->failed && t < n[0] * n[1]; t++)
            set(&x->problem.alibi_slopes, t / n[1], t % n[1], 0, 0,
                ldexp(1, -(int)(t % n[1]) - 1) / (double)(t / n[1] + 1));
    }
    if (c->sinks) {
        bool wide        = x->dtype == FLASH_ATTN_F8E4M3 || c->batch % 2 == 0; /* either dtype must do */
        x->problem.sinks = case_tensor(x, wide ? FLASH_ATTN_F32 : x->dtype, (int64_t[4]){1, c->heads_q, 1, 1},
                                       LAYOUT_CONTIGUOUS, false);
        for (int64_t h = 0; !x->failed && h < c->heads_q; h++)
            set(&x->problem.sinks, 0, h, 0, 0, 1 + random_normal(&x->random));
    }
    flash_attn_tensor *const descales[3] = {&x->problem.descale.q, &x->problem.descale.k, &x->problem.descale.v};
    for (int n = 0; x->dtype == FLASH_ATTN_F8E4M3 && n < 3; n++) {
        int64_t shape[4] = {n == 1 ? 1 : c->batch, n == 2 ? 1 : c->heads_k, 1, 1};
        *descales[n]     = case_tensor(x, FLASH_ATTN_F32, shape, LAYOUT_CONTIGUOUS, false);
        for (int64_t t = 0; !x->failed && t < shape[0] * shape[1]; t++)
            set(descales[n], t / shape[1], t % shape[1], 0, 0, 0.5 + random_unit(&x->random));
    }
}

static void make_outputs(case_instance *x, layout how)
{
    const test_case    *c      = &x->shape;
    flash_attn_problem *p      = &x->problem;
    flash_attn_grads   *g      = &x->grads;
    bool                wide   = c->o_f32 || x->dtype == FLASH_ATTN_F8E4M3;
    flash_attn_dtype    type   = wide ? FLASH_ATTN_F32 : x->dtype;
    int64_t             o[4]   = {p->q.shape[0], p->q.shape[1], c->heads_q, c->head_dim_v};
    int64_t             lse[4] = {o[0], o[2], o[1], 1};
    p->o                       = case_tensor(x, type, o, how, true);
    p->lse                     = case_tensor(x, FLASH_ATTN_F32, lse, how, true);
    if (!x->backward)
        return;
    g->dout = case_tensor(x, type, o, how, false);
    g->dq   = p->q;
    g->dk   = p->k;
    g->dv   = p->v;
    if (c->layout == LAYOUT_PACKED) {
        packed_tensors(x, type, (flash_attn_tensor *[3]){&g->dq, &g->dk, &g->dv}, true);
    } else {
        g->dq = case_tensor(x, type, p->q.shape, how, true);
        g->dk = case_tensor(x, type, p->k.shape, how, true);
        g->dv = case_tensor(x, type, p->v.shape, how, true);
    }
    if (p->bias.data && !(c->bias & BIAS_CONSTANT))
        g->dbias = case_tensor(x, c->o_f32 ? FLASH_ATTN_F32 : p->bias.dtype, p->bias.shape, how, true);
    if (p->sinks.data)
        g->dsinks = case_tensor(x, FLASH_ATTN_F32, p->sinks.shape, LAYOUT_CONTIGUOUS, true);
}

void case_make_inputs(case_instance *x)
{
    const test_case    *c = &x->shape;
    flash_attn_problem *p = &x->problem;
    p->scale              = c->scale;
    p->softcap            = c->softcap;
    p->mask               = c->mask;
    p->window_left        = c->window_left;
    p->window_right       = c->window_right;
    p->num_splits         = c->num_splits;
    p->dropout            = (flash_attn_dropout){.p = c->dropout, .seed = x->random, .offset = c->dropout > 0 ? 3 : 0};
    make_lengths(x);
    if (!x->failed)
        make_slices(x);
    if (!x->failed)
        find_what_is_seen(x);
    if (x->failed)
        return;
    bool    packed = c->layout == LAYOUT_PACKED, broadcast = c->layout == LAYOUT_BROADCAST;
    layout  how  = packed || broadcast ? LAYOUT_CONTIGUOUS : c->layout;
    int64_t q[4] = {c->batch, c->seqlen_q, c->heads_q, c->head_dim};
    int64_t k[4] = {c->batch + (c->cache_batch_idx ? 2 : 0), c->seqlen_k, c->heads_k, c->head_dim};
    if (p->cu_seqlens_q) {
        q[0] = 1;
        q[1] = p->cu_seqlens_q[c->batch];
    }
    if (p->cu_seqlens_k) {
        k[0] = 1;
        k[1] = p->cu_seqlens_k[c->batch];
    }
    if (c->page_size)
        make_pages(x, k);
    int64_t v[4] = {k[0], k[1], k[2], c->head_dim_v};
    if (packed) {
        memcpy(p->q.shape, q, sizeof q);
        memcpy(p->k.shape, k, sizeof k);
        memcpy(p->v.shape, v, sizeof v);
        packed_tensors(x, x->dtype, (flash_attn_tensor *[3]){&p->q, &p->k, &p->v}, false);
    } else {
        p->q = case_tensor(x, x->dtype, q, how, false);
        p->k = case_tensor(x, x->dtype, k, how, false);
        if (c->latent) {
            p->v          = p->k;
            p->v.shape[3] = c->head_dim_v;
        } else
            p->v = case_tensor(x, x->dtype, v, how, false);
        if (broadcast)
            p->k.stride[0] = p->v.stride[2] = 0;
    }
    if (c->bias)
        make_bias(x, how);
    make_per_head(x);
    make_outputs(x, how);
    if (x->failed)
        return;
    fill_inputs(x);
    if (x->backward)
        fill_dout(x);
}
