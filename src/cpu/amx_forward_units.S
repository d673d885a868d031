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
 * Symbols hold what is known when this is assembled: FIXED, the kind of P; odd, the unit; row, the next row of its
 * softmax; step.
 */
#include "cpu/amx_forward_units.h"
#ifdef __CET__ /* says that this file is made for it */
#include <cet.h>
#endif

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

#define MULTIPLIER %zmm16
#define MAGIC %zmm17
#define TABLE %zmm18
#define C0 %zmm19
#define C1 %zmm20
#define UPPER %zmm21     /* halves of 32 bits */
#define OUTGROWN %zmm22  /* bits of a row that outgrew its shift */
#define CHECK %zmm23     /* such bits of the rows so far */
#define ZERO %zmm24      /* fixed point: 0 as 2^23 has it */
#define ONES %zmm25
#define EVEN_BYTES %k1
#define FOUND %k2

#define TILE 1024
#define CHUNK 4
#define S_SLOT 4096
#define SUMS 2048
#define KS 2    /* steps of S' */
#define STEPS 4

/* ---- softmax ---- */

#define ROW_S (odd * S_SLOT + (row >> 4) * 2 * TILE + (row & 15) * 64)
#define ROW_P ((row >> 4) * CHUNK * TILE + (row & 15) * 64)
#define ROW_SUM_FROM (odd * SUMS - 2 * SUMS + row * 64)
#define ROW_SUM_TO (-odd * SUMS - SUMS + row * 64)

/* As softmax_row. a, b: 16 scores each, then P; ta, tb, ra, rb: its own. Sums are left in ta. */
.macro EXP_ROW a, b, ta, tb, ra, rb
    vbroadcastss 4 * row(SHIFTS), %zmm\tb
    vmovaps     MULTIPLIER, %zmm\a
    vfmadd132ps 0 + ROW_S(S), %zmm\tb, %zmm\a
    vmovaps     MULTIPLIER, %zmm\b
    vfmadd132ps TILE + ROW_S(S), %zmm\tb, %zmm\b
    vaddps      {rd-sae}, MAGIC, %zmm\a, %zmm\ta
    vreduceps   $0x41, %zmm\a, %zmm\ra
    vaddps      {rd-sae}, MAGIC, %zmm\b, %zmm\tb
    vreduceps   $0x41, %zmm\b, %zmm\rb
    vpermps     TABLE, %zmm\ta, %zmm\ta
    vaddps      C1, %zmm\ra, %zmm\ra
    vpermps     TABLE, %zmm\tb, %zmm\tb
    vaddps      C1, %zmm\rb, %zmm\rb
    vfmadd213ps C0, %zmm\ra, %zmm\ra
    vfmadd213ps C0, %zmm\rb, %zmm\rb
    vmulps      %zmm\ra, %zmm\ta, %zmm\ta
    vmulps      %zmm\rb, %zmm\tb, %zmm\tb
    vscalefps   %zmm\a, %zmm\ta, %zmm\a
    vscalefps   %zmm\b, %zmm\tb, %zmm\b
    vaddps      %zmm\b, %zmm\a, %zmm\ta
    vpsrld      $16, %zmm\a, %zmm\a
    vpternlogd  $0xF8, UPPER, %zmm\b, %zmm\a
    vmovdqa64   %zmm\a, 0 + ROW_P(P)
    vaddps      0 + ROW_SUM_FROM(SHIFTS), %zmm\ta, %zmm\tb
    vmovaps     %zmm\tb, 0 + ROW_SUM_TO(SHIFTS)
.endm

/* As fixed_row. P is left in ta. */
.macro FIXED_ROW a, b, ta, tb, ra, rb
    vbroadcastss 4 * row(SHIFTS), %zmm\tb
    vmovaps     MULTIPLIER, %zmm\a
    vfmadd132ps 0 + ROW_S(S), %zmm\tb, %zmm\a
    vmovaps     MULTIPLIER, %zmm\b
    vfmadd132ps TILE + ROW_S(S), %zmm\tb, %zmm\b
    vpsubd      ZERO, %zmm\a, %zmm\a
    vpsubd      ZERO, %zmm\b, %zmm\b
    vpackusdw   %zmm\b, %zmm\a, %zmm\a
    vpsrlw      $2, %zmm\a, %zmm\b
    vpermb      TABLE, %zmm\b, %zmm\b{EVEN_BYTES}{z}
    vpavgw      %zmm\b, %zmm\a, %zmm\ta
    vmovdqa64   %zmm\ta, 0 + ROW_P(P)
    vmovaps     0 + ROW_SUM_FROM(SHIFTS), %zmm\ra
    vdpbf16ps   ONES, %zmm\ta, %zmm\ra
    vmovaps     %zmm\ra, 0 + ROW_SUM_TO(SHIFTS)
.endm

/* Two rows in registers of their own, so that the second's check covers both. */
.macro ROW
    .if FIXED && (row & 1) == 0
    FIXED_ROW 0, 1, 2, 3, 4, 5
    .elseif FIXED
    FIXED_ROW 6, 7, 8, 9, 10, 11
    .elseif (row & 1) == 0
    EXP_ROW 0, 1, 2, 3, 4, 5
    .else
    EXP_ROW 6, 7, 8, 9, 10, 11
    .endif
    .if row & 1
    vpternlogd  $0xFE, %zmm2, %zmm8, CHECK
    .endif
    .set row, row + 1
.endm

.macro ROWS
    ROW
    ROW
.endm

/* ---- tiles ---- */

/* As in amx.h. */
.macro GAP
    .fill       4, 1, 0x90
.endm

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
    tileloadd   0 + TILE_OF_O(\t)(O, O_STRIDE), %tmm\t
    .endif
.endm

/* Rows of tiles take turns at being first: `here` holds that one, `there` the other; c0 to c3 are the accumulators in
 * the order of their products. c0 of the step after is c1 of this. */
.macro STEP s, here, there, c0, c1, c2, c3
    LEFT        \there, \s
    RIGHT       7, \s
    SWITCH      \c1, \s
    tdpbf16ps   %tmm6, %tmm\here, %tmm\c0
    ROWS
    SWITCH      \c2, \s
    tdpbf16ps   %tmm6, %tmm\there, %tmm\c1
    ROWS
    RIGHT       6, \s+1
    SWITCH      \c3, \s
    tdpbf16ps   %tmm7, %tmm\there, %tmm\c2
    ROWS
    LEFT        \there, \s+1
    SWITCH      \c1, \s+1
    tdpbf16ps   %tmm7, %tmm\here, %tmm\c3
    ROWS
.endm

/* ---- units ---- */

.macro UNIT is_odd
    .set odd, \is_odd
    .set row, 0
    .set step, odd * STEPS
    .rept STEPS / 2
    STEP        step, 4, 5, 0, 2, 3, 1
    STEP        step+1, 5, 4, 2, 0, 1, 3
    .set step, step + 2
    .endr
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
1:  mov         UNITS_NEXT_V(FRAME), V
    mov         UNITS_NEXT_O(FRAME), O
    addq        $CHUNK * 4 * TILE, UNITS_NEXT_V(FRAME)
    neg         P_READ
    add         UNITS_P_BOTH(FRAME), P_READ
2:
.endm

.macro SAVE register
    push        \register
    .cfi_adjust_cfa_offset 8
    .cfi_rel_offset \register, 0
.endm

.macro RESTORE register
    pop         \register
    .cfi_adjust_cfa_offset -8
    .cfi_restore \register
.endm

.macro SET_ALL bits, to
    mov         $\bits, %eax
    vpbroadcastd %eax, \to
.endm

.macro LOAD_CONSTANTS
    mov         UNITS_CONSTANTS(FRAME), %rax
    .if FIXED
    vmovaps     CONSTANT_UNITS(%rax), MULTIPLIER
    vmovaps     CONSTANT_BENDS(%rax), TABLE
    SET_ALL     0x4B000000, ZERO
    SET_ALL     0x3F803F80, ONES
    SET_ALL     0xC000C000, OUTGROWN
    mov         $0x5555555555555555, %rax
    kmovq       %rax, EVEN_BYTES
    .else
    vmovaps     CONSTANT_MULTIPLIER(%rax), MULTIPLIER
    vmovaps     CONSTANT_MAGIC(%rax), MAGIC
    vmovaps     CONSTANT_TABLE(%rax), TABLE
    vmovaps     CONSTANT_C0(%rax), C0
    vmovaps     CONSTANT_C1(%rax), C1
    SET_ALL     0xFFFF0000, UPPER
    SET_ALL     0x40000000, OUTGROWN
    .endif
    vpxord      CHECK, CHECK, CHECK
.endm

.macro FUNCTION name, fixed
    .set FIXED, \fixed
    .globl      \name
    .hidden     \name
    .type       \name, @function
    .p2align    6
\name:
    .cfi_startproc
    endbr64
    SAVE        %rbx
    SAVE        %rbp
    SAVE        %r12
    SAVE        %r13
    SAVE        %r14
    SAVE        %r15
    LOAD_CONSTANTS
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
    tileloadd   (O, O_STRIDE), %tmm0
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
    ret
    .cfi_endproc
    .size       \name, . - \name
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
