/*
 * Whole units of the AMX forward in assembly (amx_forward_units.S): what C and assembly agree on.
 */
#ifndef FA_CPU_AMX_FORWARD_UNITS_H
#define FA_CPU_AMX_FORWARD_UNITS_H

/* Offsets in fa_amx_units, and of vectors in the constants of the softmax. */
#define UNITS_COUNT 0
#define UNITS_ODD 8
#define UNITS_AGAIN 16
#define UNITS_STOP 24
#define UNITS_LAST 32
#define UNITS_ALONE 40
#define UNITS_Q 48
#define UNITS_K 64
#define UNITS_LAST_Q 80
#define UNITS_LAST_K 96
#define UNITS_V 112
#define UNITS_O 120
#define UNITS_NEXT_V 128
#define UNITS_NEXT_O 136
#define UNITS_P 144
#define UNITS_P_READ 152
#define UNITS_P_BOTH 160
#define UNITS_S 168
#define UNITS_SHIFT 176
#define UNITS_CONSTANTS 184
#define UNITS_FRESH 192
#define UNITS_NEXT_FRESH 200

#define CONSTANT_MULTIPLIER 0
#define CONSTANT_MAGIC 64
#define CONSTANT_TABLE 128
#define CONSTANT_C0 192
#define CONSTANT_C1 256
#define CONSTANT_UNITS 384
#define CONSTANT_BENDS 448

#ifndef __ASSEMBLER__

#include <stddef.h>
#include <stdint.h>

/* Units of a group of 32 queries. Those with an even number have scores of two later units beside their softmax, those
 * with an odd one a share of the values of the chunk before. They are counted down so that a chunk of 4 ends at a
 * multiple of 4. */
typedef struct fa_amx_units {
    int64_t     count;                 /* before the first unit */
    int64_t     odd;                   /* the first unit's number is odd */
    int64_t     again;                 /* out: in the last one that was done a row outgrew its shift */
    int64_t     stop;                  /* the count after the last */
    int64_t     last;                  /* the last that can follow an even unit when the next even one is the last */
    int64_t     alone;                 /* odd units have no values beside them while more are left than this */
    const char *q[2], *k[2];           /* of the two units whose scores the first even unit has beside it, */
    const char *last_q[2], *last_k[2]; /* and the last one; those between follow each other */
    const char *v, *o;                 /* what the next odd unit takes, of the chunk before */
    const char *next_v, *next_o;       /* of the chunk after that */
    char       *p;                     /* of the first unit; a chunk has 8 tiles */
    const char *p_read;                /* of the chunk before */
    int64_t     p_both;                /* the sum of the places of P of two chunks: they take turns */
    float      *s;                     /* scores of even units, 4 KiB, then of odd ones */
    float      *shift;                 /* behind the sums before even units, 2 KiB, and before odd ones */
    const void *constants;             /* of the softmax */
    int64_t     fresh, next_fresh;     /* o and next_o hold nothing yet */
} fa_amx_units;

#define UNITS_AT(member, at) _Static_assert(offsetof(fa_amx_units, member) == (at), "as amx_forward_units.S has it")
UNITS_AT(count, UNITS_COUNT);
UNITS_AT(odd, UNITS_ODD);
UNITS_AT(again, UNITS_AGAIN);
UNITS_AT(stop, UNITS_STOP);
UNITS_AT(last, UNITS_LAST);
UNITS_AT(alone, UNITS_ALONE);
UNITS_AT(q, UNITS_Q);
UNITS_AT(k, UNITS_K);
UNITS_AT(last_q, UNITS_LAST_Q);
UNITS_AT(last_k, UNITS_LAST_K);
UNITS_AT(v, UNITS_V);
UNITS_AT(o, UNITS_O);
UNITS_AT(next_v, UNITS_NEXT_V);
UNITS_AT(next_o, UNITS_NEXT_O);
UNITS_AT(p, UNITS_P);
UNITS_AT(p_read, UNITS_P_READ);
UNITS_AT(p_both, UNITS_P_BOTH);
UNITS_AT(s, UNITS_S);
UNITS_AT(shift, UNITS_SHIFT);
UNITS_AT(constants, UNITS_CONSTANTS);
UNITS_AT(fresh, UNITS_FRESH);
UNITS_AT(next_fresh, UNITS_NEXT_FRESH);

/* head_dim and head_dim_v are 64; P cut to bfloat16, or in fixed point. Returns the count that is left: `stop`, or
 * more if `again` is set. Then all tiles are in memory; if the last unit's number is even, the scores of the unit after
 * the next lie where its own did. */
int64_t fa_amx_whole_units(fa_amx_units *units);
int64_t fa_amx_whole_units_fixed(fa_amx_units *units);

#endif
#endif
