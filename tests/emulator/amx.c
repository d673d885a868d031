/*
 * How tile instructions get to amx_tiles.c. The processor refuses one the first time, and the handler of that signal
 * puts a jump in its place, to a stub of its own near the program's text:
 *
 *     stub:   step over the red zone; push the instruction's number; call emulated_amx_enter; step back; jump behind
 *
 * so that the second time costs tens of nanoseconds before the work begins, where a trap costs 8 microseconds. A jump
 * of five bytes fits: no tile instruction is shorter. Where stubs cannot be placed, each time is a trap.
 */
#include "amx.h"

#include "cpu/cpu.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

/* ---- from a stub to C ---- */

enum { RED_ZONE_BYTES = 128 };

/* What lies on the stack when emulated_amx_enter has pushed, from its lowest address. */
typedef struct saved {
    uint64_t registers[AMX_REGISTERS]; /* that of rsp is not the stack pointer */
    uint64_t flags, back, number;      /* back: into the stub */
} saved;

void emulated_amx_enter(void);
void emulated_amx_step(saved *s);

/* C may change all of these, and flags; MXCSR it restores itself. */
__asm__(".text\n"
        ".globl emulated_amx_enter\n"
        ".hidden emulated_amx_enter\n"
        ".type emulated_amx_enter, @function\n"
        "emulated_amx_enter:\n"
        "    pushfq\n    cld\n"
        "    push %r15\n    push %r14\n    push %r13\n    push %r12\n    push %r11\n    push %r10\n    push %r9\n"
        "    push %r8\n    push %rdi\n    push %rsi\n    push %rbp\n    push %rsp\n    push %rbx\n    push %rdx\n"
        "    push %rcx\n    push %rax\n"
        "    mov %rsp, %rdi\n    mov %rsp, %rbp\n"
        "    sub $(33 * 64), %rsp\n    and $-64, %rsp\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
        "    vmovaps %zmm\\n, 64 * \\n(%rsp)\n"
        ".endr\n"
        ".irp n, 0,1,2,3,4,5,6,7\n"
        "    kmovq %k\\n, 32 * 64 + 8 * \\n(%rsp)\n"
        ".endr\n"
        "    call emulated_amx_step\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
        "    vmovaps 64 * \\n(%rsp), %zmm\\n\n"
        ".endr\n"
        ".irp n, 0,1,2,3,4,5,6,7\n"
        "    kmovq 32 * 64 + 8 * \\n(%rsp), %k\\n\n"
        ".endr\n"
        "    mov %rbp, %rsp\n"
        "    pop %rax\n    pop %rcx\n    pop %rdx\n    pop %rbx\n    lea 8(%rsp), %rsp\n    pop %rbp\n    pop %rsi\n"
        "    pop %rdi\n    pop %r8\n    pop %r9\n    pop %r10\n    pop %r11\n    pop %r12\n    pop %r13\n    pop %r14\n"
        "    pop %r15\n    popfq\n    ret\n"
        ".size emulated_amx_enter, . - emulated_amx_enter\n");

enum { MOST_JUMPS = 1 << 15, STUB_BYTES = 32, STUBS_BYTES = MOST_JUMPS * STUB_BYTES };

static struct {
    bool             on, has_fp16, jumps;
    atomic_flag      lock;
    struct sigaction otherwise; /* for instructions that are not ours */
    uint8_t         *stubs;     /* [MOST_JUMPS]; NULL: not yet, or no place */
    int              used;
    amx_instruction  met[MOST_JUMPS];
} emulator = {.lock = ATOMIC_FLAG_INIT, .jumps = true};

void emulated_amx_step(saved *s)
{
    s->registers[4] = (uint64_t)(uintptr_t)&s->number + sizeof s->number + RED_ZONE_BYTES;
    amx_run(&emulator.met[s->number], s->registers);
}

/* ---- jumps ---- */

/* Below the text or, where nothing is free there, above it: a jump reaches 2 GB. */
static void place_stubs(void)
{
    enum { STEP = 64 << 20, TRIES = 24 };
    intptr_t text = (intptr_t)emulated_amx_enter & -(intptr_t)STEP;
    for (int n = 2; n < 2 * TRIES && !emulator.stubs; n++) {
        intptr_t at = text + (intptr_t)(n / 2) * (n % 2 ? STEP : -STEP);
        void    *got;
        if (at <= 0)
            continue;
        got = mmap((void *)at, STUBS_BYTES, PROT_READ | PROT_WRITE | PROT_EXEC,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == (void *)at)
            emulator.stubs = got;
        else if (got != MAP_FAILED) /* an old kernel takes the address as a wish */
            munmap(got, STUBS_BYTES);
    }
}

/* Five bytes: a jump or call. False: too far. */
static bool put_branch(uint8_t *at, uint8_t opcode, const uint8_t *to)
{
    int64_t distance = to - (at + 5);
    int32_t near     = (int32_t)distance;
    at[0]            = opcode;
    memcpy(at + 1, &near, sizeof near);
    return near == distance;
}

/* Every core has seen what was written so far before it goes on. */
static void all_cores_see(void) { syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0); }

/* Put a jump in the instruction's place, whoever runs it meanwhile: where its first byte is INVALID a thread traps and
 * waits for us. False: it stays as it is. */
static bool put_jump(uint8_t *code, const amx_instruction *i)
{
    static const uint8_t over_red_zone[] = {0x48, 0x8D, 0x64, 0x24, 0x80};                   /* lea -128(%rsp), %rsp */
    static const uint8_t back[]          = {0x48, 0x8D, 0xA4, 0x24, 0x88, 0x00, 0x00, 0x00}; /* lea 128 + 8(%rsp) */
    enum { JUMP = 0xE9, CALL = 0xE8, PUSH = 0x68, INVALID = 0x06 };
    uint8_t  jump[5], *stub = emulator.stubs + (intptr_t)STUB_BYTES * emulator.used, *end = stub;
    intptr_t page = sysconf(_SC_PAGESIZE), first = (intptr_t)code & -page, last = (intptr_t)(code + 4) & -page;
    if (!emulator.jumps || !emulator.stubs || emulator.used == MOST_JUMPS)
        return false;
    emulator.met[emulator.used] = *i;
    memcpy(end, over_red_zone, sizeof over_red_zone), end += sizeof over_red_zone;
    *end++ = PUSH;
    memcpy(end, &(int32_t){emulator.used}, 4), end += 4;
    bool near = put_branch(end, CALL, (const uint8_t *)(intptr_t)emulated_amx_enter);
    end += 5;
    memcpy(end, back, sizeof back), end += sizeof back;
    near = put_branch(end, JUMP, code + i->bytes) && near;

    int64_t distance = stub - (code + 5);
    int32_t offset   = (int32_t)distance;
    jump[0]          = JUMP;
    memcpy(jump + 1, &offset, sizeof offset);
    if (!near || offset != distance ||
        mprotect((void *)first, (size_t)(last + page - first), PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
        return false;
    emulator.used++;
    __atomic_store_n(code, INVALID, __ATOMIC_SEQ_CST);
    all_cores_see();
    memcpy(code + 1, jump + 1, 4);
    all_cores_see();
    __atomic_store_n(code, jump[0], __ATOMIC_SEQ_CST);
    all_cores_see();
    return true;
}

/* ---- traps ---- */

static void run_trapped(const amx_instruction *i, greg_t *saved_registers)
{
    static const int order[AMX_REGISTERS] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    uint64_t         registers[AMX_REGISTERS];
    for (int n = 0; n < AMX_REGISTERS; n++)
        registers[n] = (uint64_t)saved_registers[order[n]];
    amx_run(i, registers);
    saved_registers[REG_RIP] += i->bytes;
}

/* What is no tile instruction goes the way it would have gone: to the handler that the program asked for, or it is run
 * again without one. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    const struct sigaction *to = &emulator.otherwise;
    if (to->sa_flags & SA_SIGINFO)
        to->sa_sigaction(number, info, context);
    else if (to->sa_handler != SIG_DFL && to->sa_handler != SIG_IGN)
        to->sa_handler(number);
    else
        sigaction(SIGILL, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
}

static void on_illegal(int number, siginfo_t *info, void *context)
{
    greg_t  *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    uint8_t *code      = (uint8_t *)registers[REG_RIP];
    int      kept      = errno;
    while (atomic_flag_test_and_set(&emulator.lock))
        syscall(SYS_sched_yield);
    amx_instruction i    = amx_decode(code, emulator.has_fp16);
    bool            mine = i.operation != AMX_NONE, again = code[0] == 0xE9; /* another thread has put a jump here */
    if (mine)
        again = put_jump(code, &i);
    atomic_flag_clear(&emulator.lock);
    errno = kept;
    if (mine && !again)
        run_trapped(&i, registers);
    else if (!again)
        pass_on(number, info, context);
}

/* The C library's, but that cmocka's and the fuzzer's handlers come after ours: cmocka sets one for each test. */
__attribute__((visibility("default"))) void (*signal(int number, void (*handler)(int)))(int)
{
    struct sigaction before, now = {.sa_handler = handler, .sa_flags = SA_RESTART};
    if (number == SIGILL && emulator.on) {
        before             = emulator.otherwise;
        emulator.otherwise = now;
        return before.sa_handler;
    }
    return sigaction(number, &now, &before) == 0 ? before.sa_handler : SIG_ERR;
}

/* The library's threads block all signals; a trap that is blocked ends the process. */
int __real_pthread_sigmask(int how, const sigset_t *set, sigset_t *before);
int __wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *before);
int __wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *before)
{
    sigset_t without;
    if (!set || how == SIG_UNBLOCK || !emulator.on)
        return __real_pthread_sigmask(how, set, before);
    without = *set;
    sigdelset(&without, SIGILL);
    return __real_pthread_sigmask(how, &without, before);
}

/* ---- switching it on ---- */

void __real_fa_isa_detect(fa_isa *isa);

const char *amx_why_not(void)
{
    static const char *const  needs[] = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vbmi"};
    static _Thread_local char why[80];
    fa_isa                    isa;
    __real_fa_isa_detect(&isa);
    for (size_t n = 0; n < sizeof needs / sizeof needs[0]; n++) {
        snprintf(why, sizeof why, "this processor has no %s", needs[n]);
        if (!strstr(isa.features, needs[n]))
            return why;
    }
    return strstr(isa.features, "amx-tile") ? "this processor has AMX itself" : NULL;
}

void amx_emulate(bool has_fp16)
{
    while (atomic_flag_test_and_set(&emulator.lock))
        syscall(SYS_sched_yield);
    if (!emulator.on) {
        struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
        /* Without it stubs would be seen late; it is in Linux since 4.16. */
        if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0) == 0)
            place_stubs();
        emulator.has_fp16 = has_fp16;
        sigaction(SIGILL, &action, &emulator.otherwise);
        emulator.on = true;
    }
    atomic_flag_clear(&emulator.lock);
}

void amx_put_jumps(bool yes) { emulator.jumps = yes; }

/* ---- what the library sees ---- */

static _Noreturn void end(int status, const char *what, const char *why)
{
    printf("%s%s\n", what, why);
    fflush(stdout);
    _exit(status);
}

void __wrap_fa_isa_detect(fa_isa *isa);
void __wrap_fa_isa_detect(fa_isa *isa)
{
    const char *asked = getenv("EMULATED_AMX"), *options = asked ? strchr(asked, ',') : NULL, *why;
    __real_fa_isa_detect(isa);
    if (!asked || !*asked)
        return;
    size_t length   = options ? (size_t)(options - asked) : strlen(asked);
    bool   has_fp16 = length == 8 && strncmp(asked, "amx-fp16", 8) == 0;
    if (!has_fp16 && !(length == 3 && strncmp(asked, "amx", 3) == 0))
        end(2, "EMULATED_AMX is amx or amx-fp16, not ", asked);
    if (options && strcmp(options, ",trap") != 0)
        end(2, "EMULATED_AMX has the option trap only: ", asked);
    if ((why = amx_why_not()))
        end(77, "skipped: no emulated AMX: ", why);
    amx_put_jumps(!options);
    amx_emulate(has_fp16);
    size_t used = strlen(isa->features);
    snprintf(isa->features + used, sizeof isa->features - used, " amx-tile amx-bf16%s", has_fp16 ? " amx-fp16" : "");
    isa->best     = has_fp16 ? FLASH_ATTN_ISA_AMX_FP16 : FLASH_ATTN_ISA_AMX;
    isa->asks_far = false; /* Intel's do not */
}
