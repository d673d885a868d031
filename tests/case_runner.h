/*
 * Runs cases on a device and judges the answers. Uses the public header alone: expected values come from the REFERENCE
 * device.
 *
 * Building a case makes its tensors: random values where something is used, and NaN in every other byte: guards before
 * and after, gaps between strided elements, rows past a used length, left padding, pages that no sequence owns, queries
 * that see nothing, keys that nobody sees. A run poisons the outputs, calls the device, and then checks that no byte
 * outside the outputs has changed and that every number is within its tolerance.
 *
 * Tolerances, with M = max(1, max|expected|):
 * - float32: o 5e-6 M, lse 5e-6 max(1, |lse|), gradients 1e-5 M; relative L2 5e-6.
 * - 16 bit: twice (gradients: three times) the error of plain attention in the same precision, plus one rounding;
 *   relative L2 1e-3 (float16), 5e-3 (bfloat16) or twice plain attention's where that is larger; lse as float32.
 * - FP8: as 16 bit, P rounded to FP8 too. On CUDA lse within 2e-3 of the largest, for Hopper's tensor cores sum FP8's products in 14 bits or so.
 * - All: plus |lse| 2^-24 max(1, sqrt(head_dim) / 4), which float32 scores of that size lose; gradients twice that,
 *   of M and of the size that their terms have before they cancel (a tenth of which is the least that L2 is relative to).
 *   A mean error towards or away from zero of at most a tenth of the largest error, where there are enough numbers to tell.
 * - dsinks in 16 bit: plus one rounding of the size that its terms have before they cancel, since one number a head is
 *   too few to measure plain attention by.
 * - Random shapes (CASE_RANDOM), which may be as small and as odd as they like: |s|, twice the larger of |lse| and the
 *   size of scale * q.k, in place of |lse|. Gradients: L2 1e-5, plus 16 x 2^-24 of the size of their terms (with one key,
 *   dS = P (dP - Delta) is 0 and all of its rounding is left). In 16 bit: plus
 *   half a rounding of that size; all with dropout, two, and a mean error of three quarters of one.
 * - Exactly 0: what a query that sees nothing gives, and the gradients of keys and pairs that nobody sees.
 *
 * Plain attention multiplies exactly and rounds each matrix that it stores (S, P, P after dropout, dP, dS and the
 * results) to 16 bits, as the unfused operations of a framework do.
 */
#ifndef CASE_RUNNER_H
#define CASE_RUNNER_H

#include "cases.h"

#include <stdio.h>

typedef struct case_instance case_instance;

typedef enum case_verdict { CASE_PASSED, CASE_FAILED, CASE_SKIPPED } case_verdict;

typedef struct case_result {
    case_verdict verdict;
    double       worst;       /* largest error as a part of what is allowed: 1 is the limit */
    const char  *worst_of;    /* "o", "lse", "dq", ... */
    char         reason[400]; /* why it failed or was skipped; else "" */
} case_result;

/* What case_build makes besides the inputs. */
enum {
    CASE_BACKWARD  = 1, /* gradients too, unless the case is forward_only or has a cache */
    CASE_NO_EXPECT = 2, /* inputs only, for timing: case_run must not be called before case_read_expected */
    CASE_RANDOM    = 4  /* the shape was drawn at random: allow what the top of this file says */
};

/* Tensors and expected values for a case; NULL if memory ran out or the reference failed (why then says so, if given).
 * The same seed makes the same numbers. */
case_instance *case_build(const test_case *shape, flash_attn_dtype dtype, unsigned flags, uint64_t seed, char *why,
                          size_t why_bytes);
void           case_free(case_instance *instance);

/* case_expected.c. One run keeps its expected values, and what they allow, in a file, and a slow one (an emulated
 * processor, sanitizers) reads them: the same cases in the same order. Each has a key, of the case and every byte of its
 * inputs, and a hash of its values. False: the file cannot be written; it ends, is damaged, or goes on with another case
 * or other inputs. Skip: past one case's values, whichever's they are, without its inputs. */
bool case_write_expected(case_instance *instance, FILE *file);
bool case_read_expected(case_instance *instance, FILE *file, char *why, size_t why_bytes);
bool case_skip_expected(FILE *file);

/* The host memory problem: device CPU. Gradients are NULL if the case has none. Valid until case_free. */
const flash_attn_problem *case_problem(const case_instance *instance);
const flash_attn_grads   *case_grads(const case_instance *instance);
bool                      case_has_backward(const case_instance *instance);

/* Copies for a device with its own memory. */
typedef struct case_memory {
    void *(*upload)(void *user, const void *host, size_t bytes); /* NULL: no memory */
    bool (*download)(void *user, void *host, const void *device, size_t bytes);
    void (*release)(void *user, void *device);
    void *user;
} case_memory;

typedef struct case_device {
    flash_attn_context *context;
    flash_attn_device   device;
    int                 num_threads; /* 0: the context's */
    bool                deterministic;
    const case_memory  *memory;      /* NULL: host memory */
} case_device;

/* Forward, and backward if built, on a device. A case that the device does not support is skipped. */
case_result case_run(case_instance *instance, const case_device *device);

/* The bytes of the outputs of the last case_run, hashed: equal runs give equal numbers. */
uint64_t case_output_hash(const case_instance *instance);

#endif
