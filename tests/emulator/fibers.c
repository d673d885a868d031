/*
 * Threads of a block as fibers. A fiber runs until its warp has to meet, until a barrier, or to its end; then the next one of
 * its warp has its turn, and when none of the warp can go on the next warp. Warps so drift apart as far as their barriers
 * let them, which is what shows a missing one.
 */
#include "fibers.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK_BYTES = 256 << 10, NUM_BARRIERS = 16 };

typedef enum fiber_state { READY, AT_MEETING, AT_BARRIER, DONE } fiber_state;

typedef struct fiber {
    void       *sp; /* while it does not run */
    char       *stack;
    fiber_state state;
    int         barrier;
} fiber;

typedef struct warp {
    void *record[32];
    void (*work)(void **);
    int arrived;
} warp;

static struct {
    fiber           fiber[EMULATOR_MAX_THREADS];
    warp            warp[EMULATOR_MAX_THREADS / 32];
    int             at_barrier[NUM_BARRIERS];
    int             or_of_all, or_result;
    int             threads, current;
    void           *scheduler; /* its stack pointer, while a fiber runs */
    emulator_state *state;
    void (*kernel)(const void *parameter);
    const void *parameter;
} now;

/* Saves the callee's registers and the stack pointer, and goes on where `to` was saved (System V ABI, x86-64). */
void emulator_switch(void **from, void *to);
__asm__(".text\n"
        ".globl emulator_switch\n"
        ".type emulator_switch, @function\n"
        "emulator_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
        "    ret\n");

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "emulated GPU: block %u of %u, thread %u: %s\n", now.state->block.x, now.state->grid.x,
            now.state->thread.x, what);
    abort();
}

static void back_to_scheduler(fiber_state state)
{
    fiber *f = &now.fiber[now.current];
    f->state = state;
    emulator_switch(&f->sp, now.scheduler);
}

static void fiber_main(void)
{
    now.kernel(now.parameter);
    back_to_scheduler(DONE);
}

/* The last lane does the work and goes on; the others are ready again. */
static void meet(void (*work)(void **), void *record)
{
    int   lane = now.current % 32, first = now.current - lane;
    warp *w = &now.warp[now.current / 32];
    if (w->arrived > 0 && w->work != work)
        fail("the lanes of a warp are at different instructions that they should do together");
    w->work         = work;
    w->record[lane] = record;
    if (++w->arrived < 32) {
        back_to_scheduler(AT_MEETING);
        return;
    }
    work(w->record);
    w->arrived = 0;
    for (int l = 0; l < 32; l++)
        now.fiber[first + l].state = READY;
}

static void barrier(int id, int threads)
{
    if (id < 0 || id >= NUM_BARRIERS || threads % 32 != 0)
        fail("a barrier that does not exist, or of a part of a warp");
    if (++now.at_barrier[id] < threads) {
        now.fiber[now.current].barrier = id;
        back_to_scheduler(AT_BARRIER);
        return;
    }
    now.at_barrier[id] = 0;
    for (int t = 0; t < now.threads; t++)
        if (now.fiber[t].state == AT_BARRIER && now.fiber[t].barrier == id)
            now.fiber[t].state = READY;
}

/* The next round's values come after everybody has been at this round's barrier, so one result is enough. */
static int barrier_or(int value)
{
    now.or_of_all |= value != 0;
    if (now.at_barrier[0] + 1 == now.threads) {
        now.or_result = now.or_of_all;
        now.or_of_all = 0;
    }
    barrier(0, now.threads);
    return now.or_result;
}

static void start_fiber(fiber *f)
{
    if (!f->stack) {
        f->stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (f->stack == MAP_FAILED)
            fail("no memory for a fiber's stack");
    }
    void **top = (void **)(f->stack + STACK_BYTES) - 1; /* at a function's first instruction 8 bytes off 16 */
    *top       = NULL;
    *--top = (void *)(size_t)fiber_main; /* where ret goes */
    for (int registers = 0; registers < 6; registers++)
        *--top = NULL;
    f->sp    = top;
    f->state = READY;
}

/* Runs every fiber of a warp that can go on until none can. True if one ran. */
static bool run_warp(int first)
{
    bool ran = false, again = true;
    while (again) {
        again = false;
        for (int t = first; t < first + 32; t++) {
            if (now.fiber[t].state != READY)
                continue;
            again = ran = true;
            now.current         = t;
            now.state->thread.x = (unsigned)t;
            emulator_switch(&now.scheduler, now.fiber[t].sp);
        }
    }
    return ran;
}

void emulator_run_block(emulator_state *state, void (*kernel)(const void *parameter), const void *parameter,
                        unsigned block, unsigned grid, int threads, int shared_bytes)
{
    static char    *shared;
    static unsigned run;
    if (!shared)
        shared = aligned_alloc(1024, EMULATOR_MAX_SHARED + 1024);
    now.state      = state;
    now.kernel     = kernel;
    now.parameter  = parameter;
    now.threads    = threads;
    *state = (emulator_state){.block = {block, 0, 0}, .grid = {grid, 1, 1}, .run = ++run, .threads = threads,
                              .shared = shared, .shared_bytes = shared_bytes, .meet = meet, .barrier = barrier, .barrier_or = barrier_or,
                              .fail = fail};
    if (!shared || threads > EMULATOR_MAX_THREADS || threads % 32 != 0 || shared_bytes > EMULATOR_MAX_SHARED)
        fail("more threads or shared memory than a block has");
    memset(shared, 0xFF, (size_t)shared_bytes);
    memset(now.at_barrier, 0, sizeof now.at_barrier);
    memset(now.warp, 0, sizeof now.warp);
    now.or_of_all = 0;
    for (int t = 0; t < threads; t++)
        start_fiber(&now.fiber[t]);
    for (bool ran = true; ran;) {
        ran = false;
        for (int first = 0; first < threads; first += 32)
            ran |= run_warp(first);
    }
    for (int t = 0; t < threads; t++) {
        now.current     = t;
        state->thread.x = (unsigned)t;
        if (now.fiber[t].state != DONE)
            fail(now.fiber[t].state == AT_BARRIER ? "waits at a barrier that others do not come to"
                                                  : "waits for lanes of its warp that do not come");
    }
}
