/* Checks of one tensor: dtype, shape, strides, the memory it reaches. */
#include "check.h"

#include <inttypes.h>
#include <stdio.h>

/* Far beyond any address space; keeps every sum of a few reaches inside int64. */
#define MAX_REACH_BYTES ((int64_t)1 << 58)

static const char *const dtype_names[] = {"F32", "F16", "BF16", "F8E4M3"};

const char *fa_dtype_name(flash_attn_dtype dtype)
{
    return (unsigned)dtype <= FLASH_ATTN_F8E4M3 ? dtype_names[dtype] : "unknown";
}

flash_attn_status fa_check_reserved(const char *name, const uint64_t *reserved, int count)
{
    for (int i = 0; i < count; i++)
        if (reserved[i] != 0)
            return fa_fail(
                FLASH_ATTN_INVALID,
                "%s[%d] is %" PRIu64 ", expected 0: the struct was not zeroed, or it uses an option that this "
                "library, version %d.%d.%d, does not know because it is older than the caller's header",
                name, i, reserved[i], FLASH_ATTN_VERSION_MAJOR, FLASH_ATTN_VERSION_MINOR, FLASH_ATTN_VERSION_PATCH);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_check_reserved_int(const char *name, int32_t reserved)
{
    if (reserved == 0)
        return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_INVALID,
                   "%s.reserved is %d, expected 0: the struct was not zeroed, or it uses an option that this library, "
                   "version %d.%d.%d, does not know because it is older than the caller's header",
                   name, reserved, FLASH_ATTN_VERSION_MAJOR, FLASH_ATTN_VERSION_MINOR, FLASH_ATTN_VERSION_PATCH);
}

static bool all_zero(const int64_t values[4]) { return !(values[0] | values[1] | values[2] | values[3]); }

bool fa_view_given(const flash_attn_tensor *t, bool plan) { return t->data != NULL || (plan && !all_zero(t->shape)); }

bool fa_view_is_empty(const flash_attn_tensor *t)
{
    return t->shape[0] == 0 || t->shape[1] == 0 || t->shape[2] == 0 || t->shape[3] == 0;
}

flash_attn_status fa_view_dtype(const char *name, const flash_attn_tensor *t, unsigned allowed)
{
    FA_TRY(fa_check_reserved_int(name, t->reserved));
    if ((unsigned)t->dtype <= FLASH_ATTN_F8E4M3 && (allowed & FA_BIT(t->dtype)))
        return FLASH_ATTN_OK;
    char   expected[64] = "";
    size_t used         = 0;
    for (unsigned i = 0; i <= FLASH_ATTN_F8E4M3; i++)
        if (allowed & FA_BIT(i))
            used +=
                (size_t)snprintf(expected + used, sizeof expected - used, "%s%s", used ? " or " : "", dtype_names[i]);
    return fa_fail(FLASH_ATTN_INVALID, "%s.dtype is %s (%d), expected %s", name, fa_dtype_name(t->dtype), (int)t->dtype,
                   expected);
}

static void write_shape(char text[120], const int64_t shape[4])
{
    size_t used = 0;
    for (int i = 0; i < 4; i++) {
        if (shape[i] == FA_ANY)
            used += (size_t)snprintf(text + used, 120 - used, "%sany", i ? ", " : "[");
        else
            used += (size_t)snprintf(text + used, 120 - used, "%s%" PRId64, i ? ", " : "[", shape[i]);
    }
    snprintf(text + used, 120 - used, "]");
}

flash_attn_status fa_view_shape(const char *name, const flash_attn_tensor *t, const int64_t expected[4])
{
    bool fits = true;
    for (int i = 0; i < 4; i++)
        fits = fits && t->shape[i] >= 0 && (expected[i] == FA_ANY || t->shape[i] == expected[i]);
    if (fits)
        return FLASH_ATTN_OK;
    char came_text[120], expected_text[120];
    for (int i = 0; i < 4; i++)
        if (t->shape[i] < 0)
            return fa_fail(FLASH_ATTN_INVALID, "%s.shape[%d] is %" PRId64 ", expected 0 or more", name, i, t->shape[i]);
    write_shape(came_text, t->shape);
    write_shape(expected_text, expected);
    return fa_fail(FLASH_ATTN_INVALID, "%s.shape is %s, expected %s", name, came_text, expected_text);
}

flash_attn_status fa_view_implied_shape(const char *name, flash_attn_tensor *t, const int64_t expected[4])
{
    if (all_zero(t->shape))
        memcpy(t->shape, expected, sizeof t->shape);
    return fa_view_shape(name, t, expected);
}

flash_attn_status fa_view_broadcasts(const char *name, const flash_attn_tensor *t, const int64_t full[4])
{
    for (int i = 0; i < 4; i++)
        if (t->shape[i] < 0 || (t->shape[i] != 1 && t->shape[i] != full[i])) {
            char came_text[120], full_text[120];
            write_shape(came_text, t->shape);
            write_shape(full_text, full);
            return fa_fail(FLASH_ATTN_INVALID, "%s.shape is %s, expected %s with 1 where it broadcasts", name,
                           came_text, full_text);
        }
    return FLASH_ATTN_OK;
}

void fa_view_expand(flash_attn_tensor *t, const int64_t full[4])
{
    for (int i = 0; i < 4; i++) {
        bool broadcasts = t->shape[i] == 1;
        if (broadcasts)
            t->stride[i] = 0;
        /* One element stays one where nothing uses it: as a gradient it is written, with 0. */
        t->shape[i] = broadcasts && full[i] == 0 ? 1 : full[i];
    }
}

static flash_attn_status explicit_strides(const char *name, flash_attn_tensor *t)
{
    if (!all_zero(t->stride))
        return FLASH_ATTN_OK;
    int64_t step = 1;
    for (int i = 3; i >= 0; i--) {
        t->stride[i] = step;
        if (__builtin_mul_overflow(step, t->shape[i] > 0 ? t->shape[i] : 1, &step))
            return fa_fail(FLASH_ATTN_INVALID, "%s.shape has more elements than 64 bits can count", name);
    }
    return FLASH_ATTN_OK;
}

/* Bytes below and above data that the view reaches. */
static flash_attn_status check_reach(const char *name, const flash_attn_tensor *t, bool plan)
{
    int64_t element_bytes = (int64_t)fa_dtype_bytes(t->dtype), below = 0, above = 0;
    for (int i = 0; i < 4; i++) {
        int64_t reach;
        bool    over = __builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &reach);
        over         = over || __builtin_mul_overflow(reach, element_bytes, &reach);
        over         = over || (reach < 0 ? __builtin_add_overflow(below, reach, &below)
                                          : __builtin_add_overflow(above, reach, &above));
        if (over || below < -MAX_REACH_BYTES || above > MAX_REACH_BYTES)
            return fa_fail(FLASH_ATTN_INVALID,
                           "%s.stride[%d] is %" PRId64 " with shape[%d] %" PRId64 ": it reaches over 2^58 bytes", name,
                           i, t->stride[i], i, t->shape[i]);
    }
    uintptr_t base = (uintptr_t)t->data;
    if (!plan && (base < (uintptr_t)-below || base > UINTPTR_MAX - (uintptr_t)(above + element_bytes)))
        return fa_fail(FLASH_ATTN_INVALID, "%s.data %p and its strides leave the address space", name, t->data);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_view_layout(const char *name, flash_attn_tensor *t, bool plan)
{
    static _Alignas(256) char placeholder[1]; /* stands for data that a plan does not need; never read */

    FA_TRY(explicit_strides(name, t));
    for (int i = 0; i < 4; i++) /* even where the extent is 1 or 0, so that no sum with a stride overflows anywhere */
        if (t->stride[i] < -MAX_REACH_BYTES || t->stride[i] > MAX_REACH_BYTES)
            return fa_fail(FLASH_ATTN_INVALID, "%s.stride[%d] is %" PRId64 ", expected less than 2^58 either way", name,
                           i, t->stride[i]);
    if (plan && t->data == NULL)
        t->data = placeholder;
    if (fa_view_is_empty(t))
        return FLASH_ATTN_OK;
    if (t->data == NULL)
        return fa_fail(FLASH_ATTN_INVALID, "%s.data is NULL, expected memory for its elements", name);
    if ((uintptr_t)t->data % fa_dtype_bytes(t->dtype) != 0)
        return fa_fail(FLASH_ATTN_INVALID, "%s.data %p is misaligned, expected a multiple of the element size %zu",
                       name, t->data, fa_dtype_bytes(t->dtype));
    return check_reach(name, t, plan);
}

static int64_t magnitude(int64_t value) { return value < 0 ? -value : value; }

/* Nested strides: each steps over everything that the smaller ones reach. All usual layouts, permuted, padded or
 * reversed, are so; what is not cannot be told to be free of overlap and is refused. */
flash_attn_status fa_view_output_layout(const char *name, flash_attn_tensor *t, bool plan)
{
    FA_TRY(fa_view_layout(name, t, plan));
    if (fa_view_is_empty(t))
        return FLASH_ATTN_OK;
    int order[4] = {3, 2, 1, 0}; /* most tensors need no swap */
    for (int i = 1; i < 4; i++)
        for (int j = i; j > 0 && magnitude(t->stride[order[j]]) < magnitude(t->stride[order[j - 1]]); j--) {
            int swap     = order[j];
            order[j]     = order[j - 1];
            order[j - 1] = swap;
        }
    int64_t reach = 0;
    for (int n = 0; n < 4; n++) {
        int i = order[n];
        if (t->shape[i] == 1)
            continue;
        if (magnitude(t->stride[i]) <= reach)
            return fa_fail(FLASH_ATTN_INVALID,
                           "%s.stride[%d] is %" PRId64 " with shape[%d] %" PRId64
                           ": elements of this output would share "
                           "memory, expected a stride beyond %" PRId64,
                           name, i, t->stride[i], i, t->shape[i], reach);
        reach += (t->shape[i] - 1) * magnitude(t->stride[i]);
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_check_alignment(const fa_array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if ((uintptr_t)arrays[i].data % sizeof(int32_t) != 0)
            return fa_fail(FLASH_ATTN_INVALID, "%s %p is misaligned, expected a multiple of 4", arrays[i].name, arrays[i].data);
    return FLASH_ATTN_OK;
}
