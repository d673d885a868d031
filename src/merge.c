/* Checks of flash_attn_merge. */
#include "check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static flash_attn_status normalise_part(const char *name, flash_attn_partial *part, const int64_t of_o[4])
{
    int64_t of_lse[4] = {of_o[0], of_o[2], of_o[1], 1};
    char    o[48], lse[48];
    snprintf(o, sizeof o, "%s.o", name);
    snprintf(lse, sizeof lse, "%s.lse", name);
    FA_TRY(fa_view_dtype(o, &part->o, FA_BITS_16_32));
    FA_TRY(fa_view_shape(o, &part->o, of_o));
    FA_TRY(fa_view_layout(o, &part->o, false));
    FA_TRY(fa_view_dtype(lse, &part->lse, FA_BIT(FLASH_ATTN_F32)));
    FA_TRY(fa_view_implied_shape(lse, &part->lse, of_lse));
    return fa_view_layout(lse, &part->lse, false);
}

static flash_attn_status normalise_result(flash_attn_partial *result, const int64_t of_o[4])
{
    int64_t of_lse[4] = {of_o[0], of_o[2], of_o[1], 1};
    FA_TRY(fa_view_dtype("result.o", &result->o, FA_BITS_16_32));
    FA_TRY(fa_view_implied_shape("result.o", &result->o, of_o));
    FA_TRY(fa_view_output_layout("result.o", &result->o, false));
    FA_TRY(fa_view_dtype("result.lse", &result->lse, FA_BIT(FLASH_ATTN_F32)));
    if (!result->lse.data)
        return FLASH_ATTN_OK;
    FA_TRY(fa_view_implied_shape("result.lse", &result->lse, of_lse));
    return fa_view_output_layout("result.lse", &result->lse, false);
}

/* The result may be the first part itself: every row is read before it is written. */
static flash_attn_status check_apart(const flash_attn_partial *part, int32_t n, const flash_attn_partial *result)
{
    const flash_attn_tensor *written[2] = {&result->o, &result->lse}, *read[2] = {&part->o, &part->lse};
    const char              *names[2] = {"o", "lse"};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            bool itself = n == 0 && i == j && fa_same_view(written[i], read[j]);
            if (written[i]->data && !itself && fa_views_overlap(written[i], read[j]))
                return fa_fail(FLASH_ATTN_INVALID,
                               "result.%s and parts[%d].%s share memory, expected them apart, or the "
                               "result to be parts[0] itself",
                               names[i], n, names[j]);
        }
    return FLASH_ATTN_OK;
}

static flash_attn_status normalise_all(flash_attn_partial *all, int32_t num_parts)
{
    flash_attn_partial *result = &all[num_parts];
    const int64_t      *shape  = all[0].o.shape;
    for (int i = 0; i < 4; i++) { /* backends count in 32 bits */
        char field[24];
        snprintf(field, sizeof field, "parts[0].o.shape[%d]", i);
        FA_TRY(fa_check_extent(field, shape[i], 0, INT32_MAX));
    }
    FA_TRY(normalise_result(result, shape));
    if (result->lse.data && fa_views_overlap(&result->o, &result->lse))
        return fa_fail(FLASH_ATTN_INVALID, "result.o and result.lse share memory, expected them apart");
    for (int32_t n = 0; n < num_parts; n++) {
        char name[24];
        snprintf(name, sizeof name, "parts[%d]", n);
        FA_TRY(normalise_part(name, &all[n], shape));
        FA_TRY(check_apart(&all[n], n, result));
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_normalise_merge(const flash_attn_partial *parts, int32_t num_parts,
                                     const flash_attn_partial *result, flash_attn_partial **checked)
{
    if (!parts)
        return fa_fail(FLASH_ATTN_INVALID, "parts is NULL, expected num_parts results");
    if (!result)
        return fa_fail(FLASH_ATTN_INVALID, "result is NULL, expected a place for the result");
    if (num_parts < 1)
        return fa_fail(FLASH_ATTN_INVALID, "num_parts is %d, expected 1 or more", num_parts);
    flash_attn_partial *all = malloc(((size_t)num_parts + 1) * sizeof *all);
    if (!all)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no memory to list %d parts", num_parts);
    memcpy(all, parts, (size_t)num_parts * sizeof *all);
    all[num_parts]           = *result;
    flash_attn_status status = normalise_all(all, num_parts);
    if (status != FLASH_ATTN_OK) {
        free(all);
        return status;
    }
    *checked = all;
    return FLASH_ATTN_OK;
}
