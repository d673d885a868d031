/*
 * Do two views share memory? Ranges apart is the quick no. Interleaved views of one packed buffer (dq, dk, dv in
 * [b, s, 3, h, d]) have overlapping ranges and yet share nothing; for them we look for indices that meet:
 *
 *     sum_i a_i * stride_a_i  -  sum_j b_j * stride_b_j  =  base_b - base_a.
 *
 * Axes with equal strides are joined into one (a_i - b_j), bytes of an element are an axis of stride 1, and the search
 * goes from the largest stride down. With nested strides at most two values of each axis leave a target that the rest
 * can reach, so the search is short; if it is not, the answer is "overlap".
 */
#include "check.h"

#define MAX_AXES 9
#define MAX_STEPS 4096

typedef struct span {
    uintptr_t begin, end; /* bytes */
} span;

typedef struct axis {
    int64_t stride, low, high; /* contributes c * stride bytes for any low <= c <= high; stride > 0 */
} axis;

flash_attn_tensor fa_array_view(const void *data, int64_t count, flash_attn_dtype same_size_dtype)
{
    return (flash_attn_tensor){
        .data = (void *)data, .dtype = same_size_dtype, .shape = {1, 1, 1, count}, .stride = {count, count, count, 1}};
}

flash_attn_tensor fa_table_view(const flash_attn_pages *pages, int64_t batch)
{
    return (flash_attn_tensor){.data   = (void *)pages->table,
                               .dtype  = FLASH_ATTN_F32, /* four bytes */
                               .shape  = {1, 1, batch, pages->pages_per_seq},
                               .stride = {0, 0, pages->row_stride, 1}};
}

bool fa_same_view(const flash_attn_tensor *a, const flash_attn_tensor *b)
{
    if (a->data != b->data || a->dtype != b->dtype)
        return false;
    for (int i = 0; i < 4; i++)
        if (a->shape[i] != b->shape[i] || (a->shape[i] > 1 && a->stride[i] != b->stride[i]))
            return false;
    return true;
}

static span span_of(const flash_attn_tensor *t)
{
    int64_t below = 0, above = 0, element_bytes = (int64_t)fa_dtype_bytes(t->dtype);
    for (int i = 0; i < 4; i++) {
        int64_t reach = (t->shape[i] - 1) * t->stride[i] * element_bytes;
        below += reach < 0 ? reach : 0;
        above += reach > 0 ? reach : 0;
    }
    uintptr_t base = (uintptr_t)t->data;
    return (span){base + (uintptr_t)below, base + (uintptr_t)(above + element_bytes)};
}

/* Let c * stride run over low .. high more; keep axes sorted by falling stride. */
static int add_axis(axis axes[MAX_AXES], int count, int64_t stride, int64_t low, int64_t high)
{
    if (low == 0 && high == 0)
        return count;
    int at = 0;
    while (at < count && axes[at].stride > stride)
        at++;
    if (at < count && axes[at].stride == stride) {
        axes[at].low += low;
        axes[at].high += high;
        return count;
    }
    for (int i = count; i > at; i--)
        axes[i] = axes[i - 1];
    axes[at] = (axis){stride, low, high};
    return count + 1;
}

/* Indices count from the lowest address, so a negative stride becomes a positive one. sign: 1 for a, -1 for b. */
static int add_view(axis axes[MAX_AXES], int count, const flash_attn_tensor *t, int sign)
{
    int64_t element_bytes = (int64_t)fa_dtype_bytes(t->dtype);
    for (int i = 0; i < 4; i++) {
        int64_t stride = (t->stride[i] < 0 ? -t->stride[i] : t->stride[i]) * element_bytes, last = t->shape[i] - 1;
        if (stride != 0)
            count = add_axis(axes, count, stride, sign < 0 ? -last : 0, sign < 0 ? 0 : last);
    }
    return add_axis(axes, count, 1, sign < 0 ? -(element_bytes - 1) : 0, sign < 0 ? 0 : element_bytes - 1);
}

static int64_t divide_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static bool reaches(const axis *axes, int count, int64_t target, int *steps)
{
    if (count == 0)
        return target == 0;
    int64_t rest_low = 0, rest_high = 0;
    for (int i = 1; i < count; i++) {
        rest_low += axes[i].low * axes[i].stride;
        rest_high += axes[i].high * axes[i].stride;
    }
    int64_t first = -divide_down(rest_high - target, axes->stride), last = divide_down(target - rest_low, axes->stride);
    first = first > axes->low ? first : axes->low;
    last  = last < axes->high ? last : axes->high;
    for (int64_t c = first; c <= last; c++)
        if (--*steps < 0 || reaches(axes + 1, count - 1, target - c * axes->stride, steps))
            return true;
    return false;
}

static bool apart(span a, span b) { return a.end <= b.begin || b.end <= a.begin; }

/* Of views whose spans, a's and b's, are not apart. */
static bool elements_meet(const flash_attn_tensor *a, span span_a, const flash_attn_tensor *b, span span_b)
{
    axis axes[MAX_AXES];
    int  count = add_view(axes, add_view(axes, 0, a, 1), b, -1), steps = MAX_STEPS;
    return reaches(axes, count, (int64_t)(span_b.begin - span_a.begin), &steps);
}

bool fa_views_overlap(const flash_attn_tensor *a, const flash_attn_tensor *b)
{
    if (fa_view_is_empty(a) || fa_view_is_empty(b))
        return false;
    span span_a = span_of(a), span_b = span_of(b);
    return !apart(span_a, span_b) && elements_meet(a, span_a, b, span_b);
}

/* On every call's path: most regions are absent, and of the rest each span is made once for all its pairs. */
flash_attn_status fa_check_overlap(const fa_region *regions, int count)
{
    const fa_region *region[FA_MAX_REGIONS];
    span             spans[FA_MAX_REGIONS];
    int              present = 0;
    for (int i = 0; i < count; i++)
        if (regions[i].view.data && !fa_view_is_empty(&regions[i].view)) {
            region[present]  = &regions[i];
            spans[present++] = span_of(&regions[i].view);
        }
    for (int i = 0; i < present; i++)
        for (int j = 0; region[i]->written && j < present; j++) {
            if (j == i || (j < i && region[j]->written) || apart(spans[i], spans[j]))
                continue;
            if (elements_meet(&region[i]->view, spans[i], &region[j]->view, spans[j]))
                return fa_fail(FLASH_ATTN_INVALID, "%s and %s share memory, expected %s, which is written, to be apart",
                               region[i]->name, region[j]->name, region[i]->name);
        }
    return FLASH_ATTN_OK;
}
