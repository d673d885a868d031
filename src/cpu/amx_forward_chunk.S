/*
 * A chunk of the AMX forward, whole and unmasked units, at head_dim 128: what run_unit and finish_values of
 * amx_forward_unit.h do, bit for bit, as amx_forward_units.S does it for head_dim 64. O and all that its values need
 * beside them do not fit the first-level cache here, so values follow a chunk of 16 units.
 *
 * A unit has beside its softmax the scores of the unit after the next, KS steps; after each of its 16 products stand two
 * rows.
 */
#define FRAME %rdi
#define STRIDE %rax      /* of packed tiles and of S: 64 */
#define COUNT %ecx       /* units left */
#define Q0 %r10          /* of the scores beside the unit at hand */
#define K0 %r8
#define Q1 %rsi          /* and of those after them */
#define K1 %rdx
#define S %r12           /* of even units, of odd ones S_SLOT behind */
#define P %r13
#define SHIFTS %r14      /* behind the sums */
#define FOLLOW %r9d      /* so many scores yet are of the keys after those before */
#define AHEAD %rbx       /* then: where Q and K of each stand */

#include "cpu/amx_forward_chunk.h"
#define CHUNK 16
#define KS 4
#include "cpu/amx_forward_steps.inc"

/* ---- scores and softmax ---- */

/* Tile 4 or 5, the left operand's first or second 16 rows at step s; KS: of the scores after these. */
.macro LEFT t, s
    .if (\s) < KS
    tileloadd   0 + ((\t - 4) * KS + (\s)) * TILE(Q0, STRIDE), %tmm\t
    .else
    tileloadd   0 + ((\t - 4) * KS + (\s) - KS) * TILE(Q1, STRIDE), %tmm\t
    .endif
    GAP
.endm

/* Tile 6 or 7, the right operand's. */
.macro RIGHT t, s
    .if (\s) < KS
    tileloaddt1 0 + ((\t - 6) * KS + (\s)) * TILE(K0, STRIDE), %tmm\t
    .else
    tileloaddt1 0 + ((\t - 6) * KS + (\s) - KS) * TILE(K1, STRIDE), %tmm\t
    .endif
    GAP
.endm

/* The scores made beside the unit before go home to the other slot, those made here to this one's. */
.macro SWITCH t, s
    .if (\s) == 0
    tilestored  %tmm\t, (1 - odd) * S_SLOT + \t * TILE(S, STRIDE)
    tilezero    %tmm\t
    .elseif (\s) == KS
    tilestored  %tmm\t, odd * S_SLOT + \t * TILE(S, STRIDE)
    tilezero    %tmm\t
    .endif
.endm

.macro BESIDE
    ROWS
.endm

.macro UNIT is_odd
    .set odd, \is_odd
    .set row, 0
    STEPS_FROM  0, KS
.endm

.macro NEXT_AHEAD
    mov         (AHEAD), Q1
    mov         8(AHEAD), K1
    add         $16, AHEAD
.endm

/* On to the next unit, or to `end`: this was the last, or a row outgrew its shift (FOUND). */
.macro END_OF_UNIT end
    add         $TILE, P
    mov         Q1, Q0
    mov         K1, K0
    sub         $1, FOLLOW
    jle         1f
    add         $2 * KS * TILE, K1
    jmp         2f
1:  NEXT_AHEAD
2:  vptestmd    CHECK, OUTGROWN, FOUND
    dec         COUNT
    jz          \end
    kortestw    FOUND, FOUND
    jnz         \end
.endm

.macro FUNCTION name, fixed
    .set FIXED, \fixed
    BEGIN       \name
    SAVE        %rbx
    SAVE        %r12
    SAVE        %r13
    SAVE        %r14
    LOAD_CONSTANTS CHUNK_CONSTANTS
    mov         CHUNK_COUNT(FRAME), COUNT
    mov         CHUNK_FOLLOW(FRAME), FOLLOW
    lea         CHUNK_AHEAD(FRAME), AHEAD
    NEXT_AHEAD
    mov         Q1, Q0
    mov         K1, K0
    add         $2 * KS * TILE, K1
    test        FOLLOW, FOLLOW
    jg          3f
    NEXT_AHEAD
3:  mov         CHUNK_P(FRAME), P
    mov         CHUNK_S(FRAME), S
    mov         CHUNK_SHIFT(FRAME), SHIFTS
    mov         $64, %eax

    /* What a unit finds in its tiles: three that are to go home, one that is its own, and operands. */
    tilezero    %tmm0
    LEFT        4, 0
    RIGHT       6, 0
    cmpq        $0, CHUNK_ODD(FRAME)
    jne         .Lbegin_odd\@
    .irp t, 1, 2, 3
    tileloadd   S_SLOT + \t * TILE(S, STRIDE), %tmm\t
    .endr
    jmp         .Leven\@
.Lbegin_odd\@:
    .irp t, 1, 2, 3
    tileloadd   \t * TILE(S, STRIDE), %tmm\t
    .endr
    jmp         .Lodd\@

    .p2align    6
.Leven\@:
    UNIT        0
    END_OF_UNIT .Lend_even\@
.Lodd\@:
    UNIT        1
    END_OF_UNIT .Lend_odd\@
    jmp         .Leven\@
.Lend_odd\@:
    .irp t, 1, 2, 3
    tilestored  %tmm\t, S_SLOT + \t * TILE(S, STRIDE)
    .endr
    jmp         .Lend\@
.Lend_even\@:
    .irp t, 1, 2, 3
    tilestored  %tmm\t, \t * TILE(S, STRIDE)
    .endr
.Lend\@:
    xor         %eax, %eax
    kortestw    FOUND, FOUND
    setnz       %al
    mov         %rax, CHUNK_AGAIN(FRAME)
    mov         %ecx, %eax
    vzeroupper
    RESTORE     %r14
    RESTORE     %r13
    RESTORE     %r12
    RESTORE     %rbx
    END         \name
.endm

    .text
    FUNCTION    fa_amx_chunk_units, 0
    FUNCTION    fa_amx_chunk_units_fixed, 1

/* ---- values ---- */

#undef P
#define P %rdi
#define V %rsi
#define O %rdx
#define O_STORE %rcx     /* the block before */
#define O_STRIDE %r8     /* 512 */
#define BLOCKS %r9d      /* of 32 columns, left */
#define V_UNIT (8 * TILE)
#define BLOCK_BYTES 128
#define TILE_OF_O(t) (t >> 1) * 16 * 512 + (t & 1) * 64
    .purgem     LEFT
    .purgem     RIGHT
    .purgem     SWITCH
    .purgem     BESIDE

/* A step a unit; CHUNK: the first of the next block. */
.macro LEFT t, s
    tileloaddt1 0 + ((\t - 4) * CHUNK + (\s) % CHUNK) * TILE(P, STRIDE), %tmm\t
    GAP
.endm

.macro RIGHT t, s
    .if (\s) < CHUNK
    tileloaddt1 0 + (\s) * V_UNIT + (\t - 6) * TILE(V, STRIDE), %tmm\t
    .else
    tileloaddt1 2 * TILE + (\t - 6) * TILE(V, STRIDE), %tmm\t
    .endif
    GAP
.endm

.macro SWITCH t, s
    .if (\s) == 0
    tilestored  %tmm\t, 0 + TILE_OF_O(\t)(O_STORE, O_STRIDE)
    BEGIN_TILE  \t, 0
    .elseif (\s) == CHUNK
    tilestored  %tmm\t, 0 + TILE_OF_O(\t)(O, O_STRIDE)
    BEGIN_TILE  \t, BLOCK_BYTES
    .endif
.endm

.macro BEGIN_TILE t, at
    .if FIRST
    tilezero    %tmm\t
    .else
    tileloadd   \at + TILE_OF_O(\t)(O, O_STRIDE), %tmm\t
    .endif
.endm

/* A line of the next block. Nothing else stands between products here, so the gap is larger than GAP: 16 instructions make
 * a call 3 to 6% faster where another thread keeps the core busy, and cost nothing else. */
.macro BESIDE
    .fill       16, 1, 0x90
    prefetcht0  BLOCK_BYTES + (line & 31) * 512 + (line >> 5) * 64(O)
    .set line, line + 1
.endm

/* FIRST: O begins as zeros, whatever is there. */
.macro VALUES name, first
    .set FIRST, \first
    BEGIN       \name
    mov         $64, %eax
    mov         $512, %r8d
    mov         $4, BLOCKS
    mov         O, O_STORE
    .irp t, 0, 1, 2, 3
    BEGIN_TILE  \t, 0
    .endr
    LEFT        4, 0
    RIGHT       6, 0
    .p2align    6
1:
    .set line, 0
    STEPS_FROM  0, CHUNK
    mov         O, O_STORE
    add         $BLOCK_BYTES, O
    add         $2 * TILE, V
    dec         BLOCKS
    jnz         1b
    .irp t, 1, 2, 3
    tilestored  %tmm\t, 0 + TILE_OF_O(\t)(O_STORE, O_STRIDE)
    .endr
    END         \name
.endm

    VALUES      fa_amx_chunk_values, 0
    VALUES      fa_amx_chunk_first_values, 1

    .section    .note.GNU-stack, "", @progbits
