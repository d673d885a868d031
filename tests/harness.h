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

#include "case_numbers.h"
#include "case_runner.h"

#define HARNESS_THREADS 8 /* contexts have so many; a call may use fewer */

/* One context for each tier that this machine really has, made on first use and kept until the end. */
typedef struct tier {
    char                name[16]; /* "scalar", "avx2", ... as flash_attn_device_info says */
    flash_attn_isa      isa;
    flash_attn_context *context;
} tier;

int         num_tiers(void);
const tier *tier_at(int n);
/* False: the tier runs this type with the code of the tier below. */
bool tier_differs(const tier *t, flash_attn_dtype dtype);

/* Run `body` with `user` for every tier. */
void for_each_tier(void (*body)(const tier *t, void *user), void *user);

/* ---- a problem to play with ---- */

/* A case's tensors, which a test may change before it runs them. */
typedef struct fixture {
    case_instance     *instance;
    flash_attn_problem p;
    flash_attn_grads   g;
    bool               backward;
} fixture;

fixture fixture_make(const test_case *shape, flash_attn_dtype dtype, uint64_t seed);
void    fixture_free(fixture *f);

/* Forward, and backward if the case has one; fails the test unless both say OK. Outputs hold 0xFF before. */
void fixture_run(fixture *f, const tier *t, int num_threads);

/* Fails the test with the library's sentence unless status is as expected. */
void expect_status(flash_attn_status status, flash_attn_status expected, const char *what);

/* Fails the test with the library's sentence. */
void expect_ok(flash_attn_status status);

/* Skips the test, with the reason, where what it needs is not there. */
void skip_unless(bool there, const char *why);

/* A tensor's elements in row-major order; free them. */
double *values_of(const flash_attn_tensor *t);
int64_t count_of(const flash_attn_tensor *t);

/* Fails unless two tensors of one shape hold the same bits, NaN included, or are within `tolerance`. */
void expect_same_bits(const flash_attn_tensor *a, const flash_attn_tensor *b, const char *what);
void expect_close(const flash_attn_tensor *a, const flash_attn_tensor *b, double tolerance, const char *what);

/* A contiguous copy in memory of its own; free its data. */
flash_attn_tensor copy_of(const flash_attn_tensor *t);

/* A view of rows [begin, end) of dimension n. */
flash_attn_tensor slice_of(flash_attn_tensor t, int n, int64_t begin, int64_t end);

/* Run body for each tier and each of float32, float16, bfloat16. */
typedef void (*promise)(const tier *t, flash_attn_dtype dtype);
void for_each_tier_and_dtype(promise body);

/* What a comparison of two right answers in this precision may differ by, for numbers about 1. */
double loose_tolerance(flash_attn_dtype dtype);

/* Counting for the closing line "N passed, N failed, N skipped". */
typedef struct tally {
    int passed, failed, skipped;
} tally;

void print_tally(const tally *t);

#endif
