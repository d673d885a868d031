/* What the files of the case runner share. */
#ifndef CASE_INTERNAL_H
#define CASE_INTERNAL_H

#include "case_numbers.h"
#include "case_runner.h"

enum { OUT_O, OUT_LSE, OUT_DQ, OUT_DK, OUT_DV, OUT_DBIAS, OUT_DSINKS, NUM_OUTPUTS };

#define MAX_BUFFERS 40
#define GUARD_BYTES 256

/* Memory with guards: data lies GUARD_BYTES inside. Filled with 0xFF, which is NaN in every format. */
typedef struct case_buffer {
    unsigned char *base;
    size_t         bytes; /* all of it, with both guards */
    bool           output;
    bool           is_host_list; /* slices: host memory for every device */
    uint64_t       hash;
} case_buffer;

/* Where sequence b lies and how long it is, worked out from the arrays apart from the library's own code. */
typedef struct case_sequence {
    int64_t q_entry, q_row, kv_entry, kv_row;
    int     rows_q, rows_k, seqlen_q, key_begin, seqlen_k;
    int64_t first_row, first_key; /* its place in row_sees and key_seen */
} case_sequence;

struct case_instance {
    test_case          shape; /* defaults filled in */
    flash_attn_dtype   dtype;
    bool               backward;
    bool               any_shape; /* CASE_RANDOM */
    uint64_t           random;
    flash_attn_problem problem;
    flash_attn_grads   grads;
    case_sequence     *sequences;
    unsigned char     *row_sees, *key_seen;
    int64_t            num_rows, num_keys;
    case_buffer        buffers[MAX_BUFFERS];
    int                num_buffers;
    bool               failed; /* memory ran out */

    flash_attn_tensor expected[NUM_OUTPUTS]; /* F32, contiguous; data NULL: not an output */
    double            allowed[NUM_OUTPUTS], allowed_l2[NUM_OUTPUTS], l2_scale[NUM_OUTPUTS]; /* relative L2: of this size */
    double            largest_lse;
};

/* case_build.c */
flash_attn_tensor case_tensor(case_instance *x, flash_attn_dtype dtype, const int64_t shape[4], layout how,
                              bool output);
bool              case_sees(const case_instance *x, int64_t b, int i, int j);
void              case_key_place(const case_instance *x, int64_t b, int j, int64_t place[2]);
void              case_make_inputs(case_instance *x);

/* case_runner.c. F32, contiguous tensors of the outputs' shapes: NaN for the reference to write over, zeros for plain
 * attention to add to. False if memory ran out. */
bool case_make_results(case_instance *x, flash_attn_tensor results[NUM_OUTPUTS], int byte);

/* The hash of what gave `hash` and these bytes behind it, in words of 8, the last filled with zeros. */
#define CASE_HASH_START 0xCBF29CE484222325u
uint64_t case_hash(uint64_t hash, const void *bytes, size_t count);

/* Outputs become 0xFF; nothing but them has changed since (else false, and the result's reason). */
void case_poison_outputs(case_instance *x);
bool case_only_outputs_changed(case_instance *x, case_result *result);

/* How large the terms are that add up to a gradient, as if their signs were random: what is left after they cancel has
 * the rounding of this. */
typedef struct case_terms {
    double largest[NUM_OUTPUTS]; /* of one element */
    double l2[NUM_OUTPUTS];      /* of all */
} case_terms;

/* case_plain.c: attention by whole matrices, as a framework does it unfused. Every stored matrix is rounded to
 * `rounding`, or not at all if it is NULL. results: F32, contiguous, of the outputs' shapes, zero. terms may be NULL.
 * Dropout drops pairs by a rule of its own. False if memory ran out. */
bool case_plain(const case_instance *x, const flash_attn_dtype *rounding, flash_attn_tensor results[NUM_OUTPUTS],
                case_terms *terms);

#endif
