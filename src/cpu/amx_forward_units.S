/*
 * Units of the AMX forward, whole and unmasked ones, at head_dim 64: what run_unit of amx_forward_unit.h does, bit for
 * bit, without the scalar instructions of a compiler and without a border between units. Order of the instructions and
 * reasons for it: amx_forward_unit.h, "steps", and docs/decisions/0030-amx-forward.md.
 *
 * Units take turns. An even one has beside its softmax the scores of the next unit, S', and of the one after, S'': two
 * steps of four tile products each. An odd one has values of the four units of the chunk before, a step each, for half
 * of O's columns, 32 rows by 32, if there are any. So a unit has STEPS steps, numbered from 0 in the even one on, and
 * after each of its 16 products stand two rows of its softmax.
 *
 * What it shares with amx_forward_chunk.S, and the symbols: amx_forward_steps.inc.
 */
#define FRAME %rdi
#define STRIDE %rax      /* of packed tiles and of S: 64 */
#define O_STRIDE %rbx    /* 256 */
#define COUNT %ecx       /* units left */
#define Q0 %r10          /* S' */
#define K0 %r8
#define Q1 %rsi          /* S'' */
#define K1 %rdx
#define S %r12           /* of even units, of odd ones S_SLOT behind */
#define P %r13
#define P_READ %rbp      /* of the chunk before, its V and its blocks of O */
#define V %r9
#define O %r11
#define O_STORE %r15     /* the blocks of O that the last odd unit had */
#define SHIFTS %r14      /* behind the sums */

#define CHUNK 4
#define KS 2    /* steps of S' */
#define STEPS 4
#include "cpu/amx_forward_steps.inc"

/* ---- tiles ---- */

/* Tile 4 or 5, the left operand's first or second 16 rows at step s. */
.macro LEFT t, s
    .set now, (\s) & (2 * STEPS - 1)
    .if now < KS
    tileloadd   0 + ((\t - 4) * KS + now) * TILE(Q0, STRIDE), %tmm\t
    .elseif now < STEPS
    tileloadd   0 + ((\t - 4) * KS + now - KS) * TILE(Q1, STRIDE), %tmm\t
    .else
    tileloadd   0 + ((\t - 4) * CHUNK + now - STEPS) * TILE(P_READ, STRIDE), %tmm\t
    .endif
    GAP
.endm

/* Tile 6 or 7, the right operand's. K and V come from the second-level cache and are not to stay in the first. */
.macro RIGHT t, s
    .set now, (\s) & (2 * STEPS - 1)
    .if now < KS
    tileloaddt1 0 + ((\t - 6) * KS + now) * TILE(K0, STRIDE), %tmm\t
    .elseif now < STEPS
    tileloaddt1 0 + ((\t - 6) * KS + now - KS) * TILE(K1, STRIDE), %tmm\t
    .else
    tileloaddt1 0 + ((now - STEPS) * 4 + \t - 6) * TILE(V, STRIDE), %tmm\t
    .endif
    GAP
.endm

#define TILE_OF_O(t) (t >> 1) * 16 * 256 + (t & 1) * 64

/* If step s is the first of its accumulators: tile t of the ones before goes home, and becomes one of theirs. */
.macro SWITCH t, s
    .set now, (\s) & (2 * STEPS - 1)
    .if now == 0
    tilestored  %tmm\t, 0 + TILE_OF_O(\t)(O_STORE, O_STRIDE)
    tilezero    %tmm\t
    .elseif now == KS
    tilestored  %tmm\t, S_SLOT + \t * TILE(S, STRIDE)
    tilezero    %tmm\t
    .elseif now == STEPS
    tilestored  %tmm\t, \t * TILE(S, STRIDE)
    BEGIN_VALUES \t
    .endif
.endm

/* What is in O, or zeros where that is nothing. */
.macro BEGIN_VALUES t
    cmpb        $0, UNITS_FRESH(FRAME)
    jne         .Lfresh\@
    tileloadd   0 + TILE_OF_O(\t)(O, O_STRIDE), %tmm\t
.Lbegun\@:
    .subsection 1
.Lfresh\@:
    tilezero    %tmm\t
    jmp         .Lbegun\@
    .previous
.endm

.macro BESIDE
    ROWS
.endm

/* ---- units ---- */

.macro UNIT is_odd
    .set odd, \is_odd
    .set row, 0
    STEPS_FROM  odd*STEPS, STEPS
.endm

/* P's place for the next one, and out if a row outgrew its shift. */
.macro END_OF_UNIT outgrown
    add         $TILE, P
    dec         COUNT
    test        $CHUNK - 1, %cl
    jnz         1f
    sub         $CHUNK * TILE, P
    neg         P
    add         UNITS_P_BOTH(FRAME), P
1:  vptestmd    CHECK, OUTGROWN, FOUND
    kortestw    FOUND, FOUND
    jnz         \outgrown
.endm

/* The keys of the next even unit. */
.macro NEXT_KEYS
    cmp         UNITS_LAST(FRAME), COUNT
    jbe         1f
    add         $4 * KS * TILE, K0
    add         $4 * KS * TILE, K1
    jmp         2f
1:  mov         UNITS_LAST_Q(FRAME), Q0
    mov         UNITS_LAST_Q + 8(FRAME), Q1
    mov         UNITS_LAST_K(FRAME), K0
    mov         UNITS_LAST_K + 8(FRAME), K1
2:
.endm

/* The other half of O's columns, or after that the next chunk. */
.macro NEXT_VALUES
    test        $2, %cl
    jz          1f
    add         $2 * TILE, V
    add         $128, O
    jmp         2f
1:  mov         UNITS_NEXT_FRESH(FRAME), V
    mov         V, UNITS_FRESH(FRAME)
    movq        $0, UNITS_NEXT_FRESH(FRAME)
    mov         UNITS_NEXT_V(FRAME), V
    mov         UNITS_NEXT_O(FRAME), O
    addq        $CHUNK * 4 * TILE, UNITS_NEXT_V(FRAME)
    neg         P_READ
    add         UNITS_P_BOTH(FRAME), P_READ
2:
.endm

.macro FUNCTION name, fixed
    .set FIXED, \fixed
    BEGIN       \name
    SAVE        %rbx
    SAVE        %rbp
    SAVE        %r12
    SAVE        %r13
    SAVE        %r14
    SAVE        %r15
    LOAD_CONSTANTS UNITS_CONSTANTS
    mov         UNITS_COUNT(FRAME), COUNT
    mov         UNITS_Q(FRAME), Q0
    mov         UNITS_Q + 8(FRAME), Q1
    mov         UNITS_K(FRAME), K0
    mov         UNITS_K + 8(FRAME), K1
    mov         UNITS_V(FRAME), V
    mov         UNITS_O(FRAME), O
    mov         $256, %ebx
    mov         UNITS_P(FRAME), P
    mov         UNITS_P_READ(FRAME), P_READ
    mov         UNITS_S(FRAME), S
    mov         UNITS_SHIFT(FRAME), SHIFTS
    mov         $64, %eax
    cmpq        $0, UNITS_ODD(FRAME)
    jne         .Lbegin_odd\@

    /* What a unit finds in its tiles: three that are to go home, one that is its own, and operands. */
.Lbegin_even\@:
    mov         O, O_STORE
    tilezero    %tmm0
    .irp t, 1, 2, 3
    tileloadd   0 + TILE_OF_O(\t)(O_STORE, O_STRIDE), %tmm\t
    .endr
    LEFT        4, 0
    RIGHT       6, 0
    jmp         .Leven\@
.Lbegin_odd\@:
    cmp         UNITS_ALONE(FRAME), COUNT
    ja          .Lalone_stored\@
    .irp t, 1, 2, 3
    tileloadd   \t * TILE(S, STRIDE), %tmm\t
    .endr
    BEGIN_VALUES 0
    LEFT        4, STEPS
    RIGHT       6, STEPS
    jmp         .Lodd\@

    .p2align    6
.Leven\@:
    UNIT        0
    END_OF_UNIT .Loutgrown_even\@
    NEXT_KEYS
    cmp         UNITS_STOP(FRAME), COUNT
    je          .Lend_even\@
    cmp         UNITS_ALONE(FRAME), COUNT
    ja          .Lalone\@
.Lodd\@:
    mov         O, O_STORE
    UNIT        1
    END_OF_UNIT .Loutgrown_odd\@
    NEXT_VALUES
    cmp         UNITS_STOP(FRAME), COUNT
    jne         .Leven\@
    jmp         .Lend_odd\@

    /* An odd unit without values. */
.Lalone\@:
    .irp t, 1, 2, 3
    tilestored  %tmm\t, \t * TILE(S, STRIDE)
    .endr
.Lalone_stored\@:
    .if FIXED
    call        .Lfixed_rows
    .else
    call        .Lexp_rows
    .endif
    END_OF_UNIT .Loutgrown_alone\@
    NEXT_VALUES
    cmp         UNITS_STOP(FRAME), COUNT
    jne         .Lbegin_even\@
    jmp         .Lend\@

.Lend_odd\@:
    .irp t, 1, 2, 3
    tilestored  %tmm\t, 0 + TILE_OF_O(\t)(O_STORE, O_STRIDE)
    .endr
    jmp         .Lend\@
.Loutgrown_odd\@:
    movq        $1, UNITS_AGAIN(FRAME)
    jmp         .Lend_odd\@
.Loutgrown_alone\@:
    movq        $1, UNITS_AGAIN(FRAME)
    jmp         .Lend\@
.Loutgrown_even\@:
    movq        $1, UNITS_AGAIN(FRAME)
.Lend_even\@:
    .irp t, 1, 2, 3
    tilestored  %tmm\t, \t * TILE(S, STRIDE)
    .endr
.Lend\@:
    vzeroupper
    mov         %rcx, %rax
    RESTORE     %r15
    RESTORE     %r14
    RESTORE     %r13
    RESTORE     %r12
    RESTORE     %rbp
    RESTORE     %rbx
    END         \name
.endm

/* The rows of an odd unit. */
.macro ROWS_ALONE name, fixed
    .set FIXED, \fixed
    .set odd, 1
    .set row, 0
    .p2align    6
\name:
    .cfi_startproc
    .rept 32
    ROW
    .endr
    ret
    .cfi_endproc
.endm

    .text
    ROWS_ALONE  .Lexp_rows, 0
    ROWS_ALONE  .Lfixed_rows, 1
    FUNCTION    fa_amx_whole_units, 0
    FUNCTION    fa_amx_whole_units_fixed, 1

    .section    .note.GNU-stack, "", @progbits
