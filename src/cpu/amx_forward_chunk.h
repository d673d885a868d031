/*
 * A chunk of the AMX forward in assembly (amx_forward_chunk.S): what C and assembly agree on.
 */
#ifndef FA_CPU_AMX_FORWARD_CHUNK_H
#define FA_CPU_AMX_FORWARD_CHUNK_H

#define CHUNK_COUNT 0
#define CHUNK_ODD 8
#define CHUNK_AGAIN 16
#define CHUNK_FOLLOW 24
#define CHUNK_P 32
#define CHUNK_S 40
#define CHUNK_SHIFT 48
#define CHUNK_CONSTANTS 56
#define CHUNK_AHEAD 64

#ifndef __ASSEMBLER__

#include <stddef.h>
#include <stdint.h>

typedef struct fa_amx_chunk {
    int64_t     count;     /* of units, 1 to 16 */
    int64_t     odd;       /* the first unit's number is odd */
    int64_t     again;     /* out: in the last one that was done a row outgrew its shift */
    int64_t     follow;    /* so many units follow ahead[0] among the keys of its group */
    char       *p;         /* of the first unit; a chunk has 32 tiles */
    float      *s;         /* scores of even units, 4 KiB, then of odd ones */
    float      *shift;     /* behind the sums before even units, 2 KiB, and before odd ones */
    const void *constants; /* of the softmax */
    struct {
        const char *q, *k;
    } ahead[4]; /* of the unit whose scores the first unit has beside it; then of each one that does not follow, up to
                 * the one after the last unit's */
} fa_amx_chunk;

#define CHUNK_HAS(member, at) _Static_assert(offsetof(fa_amx_chunk, member) == (at), "as amx_forward_chunk.S has it")
CHUNK_HAS(count, CHUNK_COUNT);
CHUNK_HAS(odd, CHUNK_ODD);
CHUNK_HAS(again, CHUNK_AGAIN);
CHUNK_HAS(follow, CHUNK_FOLLOW);
CHUNK_HAS(p, CHUNK_P);
CHUNK_HAS(s, CHUNK_S);
CHUNK_HAS(shift, CHUNK_SHIFT);
CHUNK_HAS(constants, CHUNK_CONSTANTS);
CHUNK_HAS(ahead, CHUNK_AHEAD);

/* Scores and softmax of units of a chunk; head_dim is 128, P cut to bfloat16, or in fixed point. Returns how many are
 * left: 0, or more if `again` is set. Then all tiles are in memory, the scores of the unit after the next, if there is
 * one, where those of the last one done lay. */
int64_t fa_amx_chunk_units(fa_amx_chunk *chunk);
int64_t fa_amx_chunk_units_fixed(fa_amx_chunk *chunk);

/* O += P V of a chunk of 16 units, or, first, O = P V. o: 32 rows of 128 columns; v: 8 tiles a unit. */
void fa_amx_chunk_values(const char *p, const char *v, float *o);
void fa_amx_chunk_first_values(const char *p, const char *v, float *o);

#endif
#endif
