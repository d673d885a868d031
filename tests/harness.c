#include "harness.h"

#include <string.h>

static tier tiers[8];
static int  tier_count;

static void destroy_tiers(void)
{
    for (int n = 0; n < tier_count; n++)
        flash_attn_destroy(tiers[n].context);
    tier_count = 0;
}

/* A cap that names a tier which the machine lacks gives a lower one again; each name is kept once. */
static void find_tiers(void)
{
    if (tier_count > 0)
        return;
    for (int isa = FLASH_ATTN_ISA_SCALAR; isa <= FLASH_ATTN_ISA_AMX; isa++) {
        flash_attn_options     options = {.num_threads = HARNESS_THREADS, .max_isa = (flash_attn_isa)isa};
        flash_attn_device_info info;
        tier                  *next = &tiers[tier_count];
        memset(next, 0, sizeof *next);
        assert_int_equal(flash_attn_create(&next->context, &options), FLASH_ATTN_OK);
        assert_int_equal(flash_attn_get_device_info(next->context, (flash_attn_device){0}, &info), FLASH_ATTN_OK);
        snprintf(next->name, sizeof next->name, "%s", info.isa);
        next->isa = (flash_attn_isa)isa;
        if (tier_count > 0 && strcmp(tiers[tier_count - 1].name, next->name) == 0)
            flash_attn_destroy(next->context);
        else
            tier_count++;
    }
    atexit(destroy_tiers);
}

int num_tiers(void)
{
    find_tiers();
    return tier_count;
}

const tier *tier_at(int n)
{
    find_tiers();
    return &tiers[n];
}

void for_each_tier(void (*body)(const tier *t, void *user), void *user)
{
    for (int n = 0; n < num_tiers(); n++)
        body(tier_at(n), user);
}

void print_tally(const tally *t) { printf("%d passed, %d failed, %d skipped\n", t->passed, t->failed, t->skipped); }
