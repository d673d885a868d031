/*
 * Intel's AMX on a processor without it, for the tests: machine code with tile instructions runs as it is.
 *
 *     EMULATED_AMX=amx           amx-tile and amx-bf16 are found
 *     EMULATED_AMX=amx-fp16      and amx-fp16
 *     EMULATED_AMX=amx,trap      each instruction by its own trap, 8 microseconds, in place of a jump that is put there
 *
 * Without the variable nothing changes. With it, a program on a machine that cannot do this, or has AMX itself, says
 * so and ends with status 77 once it asks what the processor has. The program is linked with --wrap=fa_isa_detect.
 */
#ifndef EMULATOR_AMX_H
#define EMULATOR_AMX_H

#include <stdbool.h>
#include <stdint.h>

typedef enum amx_operation {
    AMX_NONE, /* no tile instruction */
    AMX_CONFIGURE,
    AMX_STORE_CONFIGURATION,
    AMX_RELEASE,
    AMX_ZERO,
    AMX_LOAD,
    AMX_STORE,
    AMX_DOT_BF16,
    AMX_DOT_FP16
} amx_operation;

/* Registers by their numbers in machine code: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 ... */
enum { AMX_REGISTERS = 16, AMX_NO_REGISTER = -1 };

typedef struct amx_instruction {
    amx_operation operation;
    int           tile, left, right; /* products: tile += left x right */
    int           base, index, shift;
    int64_t       displacement;
    int           bytes; /* how long the instruction is: 5 at least */
} amx_instruction;

/* ---- amx_tiles.c: what an instruction does ---- */

/* operation is AMX_NONE where there is another instruction. */
amx_instruction amx_decode(const uint8_t *code, bool has_fp16);
/* On this thread's tiles; registers are those of the code. What the processor would refuse ends the process with a
 * sentence. */
void amx_run(const amx_instruction *instruction, const uint64_t *registers);

/* ---- amx.c: how it gets there ---- */

/* NULL, or why this machine cannot emulate AMX. */
const char *amx_why_not(void);
/* From now on tile instructions are emulated. */
void amx_emulate(bool has_fp16);
/* False: instructions that are met first from now on trap each time. */
void amx_put_jumps(bool yes);

#endif
