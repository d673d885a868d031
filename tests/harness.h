/* What the tests share beyond cmocka: contexts of each instruction-set tier, numbers on the command line. */
#ifndef HARNESS_H
#define HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "flashattn.h"

#define HARNESS_THREADS 8 /* contexts have so many; a call may use fewer */

/* One context for each tier that this machine really has, made on first use and kept until the end. */
typedef struct tier {
    char                name[16]; /* "scalar", "avx2", ... as flash_attn_device_info says */
    flash_attn_isa      isa;
    flash_attn_context *context;
} tier;

int         num_tiers(void);
const tier *tier_at(int n);

/* Run `body` with `user` for every tier. */
void for_each_tier(void (*body)(const tier *t, void *user), void *user);

/* Counting for the closing line "N passed, N failed, N skipped". */
typedef struct tally {
    int passed, failed, skipped;
} tally;

void print_tally(const tally *t);

#endif
