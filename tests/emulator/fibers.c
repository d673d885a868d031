/*
 * Threads of a cluster's blocks as fibers. A fiber runs until its warp has to meet, until a barrier, or to its end; then the
 * next one of its warp has its turn, when none of the warp can go on the next warp, and when none of the block can the next
 * block. Warps and blocks so drift apart as far as their barriers let them, which is what shows a missing one. When no thread can go on
 * a load of TMA lands, or a warp's product is done.
 */
#include "fibers.h"
#include "hopper_parts.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK_BYTES = 256 << 10, NUM_BARRIERS = 16 };

typedef enum fiber_state { READY, AT_MEETING, AT_BARRIER, AT_CLUSTER_BARRIER, AT_PHASE, POLLING, LATE, DONE } fiber_state;

typedef struct fiber {
    void       *sp; /* while it does not run */
    char       *stack;
    fiber_state state;
    int         barrier;
    const void *phase_of; /* AT_PHASE: an mbarrier, and the phase's parity */
    unsigned    parity;
    const void *polled;   /* where it looked last for what another block is to write */
} fiber;

typedef struct warp {
    void *record[32];
    void (*work)(void **);
    int arrived;
} warp;

typedef struct block {
    int   at_barrier[NUM_BARRIERS], at_cluster_barrier; /* that of a cluster's first block counts */
    int   or_of_all, or_result;
    char *shared;
    char *statics; /* the block's own, while another block of the cluster runs */
    size_t statics_bytes;
} block;

static struct {
    fiber                  fiber[EMULATOR_MAX_FIBERS];
    warp                   warp[EMULATOR_MAX_FIBERS / 32];
    block                  block[EMULATOR_MAX_BLOCKS];
    int                    current, running; /* fiber; block */
    unsigned               first_block, blocks, slow, held; /* slow: a warp's number, modulo how many there are; held: so many late things happen before it goes on */
    void                  *scheduler;        /* its stack pointer, while a fiber runs */
    emulator_state        *state;
    const emulator_kernel *kernel;
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
    now.kernel->run(now.kernel->parameter);
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

/* True for the last to come, who lets the others go on. */
static bool arrive(int id, int threads)
{
    if (id < 0 || id >= NUM_BARRIERS || threads % 32 != 0)
        fail("a barrier that does not exist, or of a part of a warp");
    int *waiting = &now.block[now.running].at_barrier[id], first = now.running * now.kernel->threads;
    if (++*waiting < threads)
        return false;
    *waiting = 0;
    for (int t = first; t < first + now.kernel->threads; t++)
        if (now.fiber[t].state == AT_BARRIER && now.fiber[t].barrier == id)
            now.fiber[t].state = READY;
    return true;
}

static void barrier(int id, int threads)
{
    if (arrive(id, threads))
        return;
    now.fiber[now.current].barrier = id;
    back_to_scheduler(AT_BARRIER);
}

static void barrier_arrive(int id, int threads) { arrive(id, threads); }

static void cluster_barrier(void)
{
    int  threads = (int)now.kernel->cluster * now.kernel->threads, first = now.current / threads * threads;
    int *waiting = &now.block[first / now.kernel->threads].at_cluster_barrier;
    if (++*waiting < threads) {
        back_to_scheduler(AT_CLUSTER_BARRIER);
        return;
    }
    *waiting = 0;
    for (int t = first; t < first + threads; t++)
        if (now.fiber[t].state == AT_CLUSTER_BARRIER)
            now.fiber[t].state = READY;
}

/* Who looks at the same place once more lets the others run first. */
static void poll(const void *address)
{
    fiber *f = &now.fiber[now.current];
    if (f->polled == address)
        back_to_scheduler(POLLING);
    f->polled = address;
}

emulator_state *emulator_now(void) { return now.state; }

static bool has_ended(unsigned index)
{
    int fiber = (int)index * now.kernel->threads, end = fiber + now.kernel->threads;
    while (fiber < end && now.fiber[fiber].state == DONE)
        fiber++;
    return fiber == end;
}

emulator_state emulator_of_rank(unsigned rank)
{
    unsigned       cluster = now.kernel->cluster, index = (unsigned)now.running / cluster * cluster + rank;
    emulator_state other   = *now.state;
    if (rank >= cluster || has_ended(index))
        fail("shared memory of a block that its cluster does not have, or that has ended");
    other.fiber   = index * (unsigned)now.kernel->threads;
    other.block.x = now.first_block + index;
    other.shared  = now.block[index].shared;
    return other;
}

void emulator_be_late(void) { back_to_scheduler(LATE); }

void emulator_wait_for_phase(const void *of, unsigned parity)
{
    fiber *f    = &now.fiber[now.current];
    f->phase_of = of;
    f->parity   = parity;
    back_to_scheduler(AT_PHASE);
}

/* The next round's values come after everybody has been at this round's barrier, so one result is enough. */
static int barrier_or(int value)
{
    block *own = &now.block[now.running];
    own->or_of_all |= value != 0;
    if (own->at_barrier[0] + 1 == now.kernel->threads) {
        own->or_result = own->or_of_all;
        own->or_of_all = 0;
    }
    barrier(0, now.kernel->threads);
    return own->or_result;
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
    f->sp     = top;
    f->state  = READY;
    f->polled = NULL;
}

static void go_to(int fiber)
{
    now.current         = fiber;
    now.state->fiber    = (unsigned)fiber;
    now.state->thread.x = (unsigned)(fiber % now.kernel->threads);
    now.state->block.x  = now.first_block + (unsigned)(fiber / now.kernel->threads);
}

/* Runs every fiber of a warp that can go on until none can; who polls gets one look. True if one ran, and not only to look. */
static bool run_warp(int first)
{
    bool ran = false, looks = true;
    for (bool again = true; again; looks = false) {
        again = false;
        for (int t = first; t < first + 32; t++) {
            fiber *f = &now.fiber[t];
            bool   polled = f->state == POLLING;
            if (f->state != READY && !(polled && looks) && !(f->state == AT_PHASE && emulator_phase_is_over(f->phase_of, f->parity)))
                continue;
            go_to(t);
            emulator_switch(&now.scheduler, f->sp);
            if (!polled || f->state != POLLING)
                again = ran = true;
        }
    }
    return ran;
}

/* Each warp of a block in turn, but one, which lot makes slow for a time: it goes on where the others cannot, or, while it is held, not even there. True if one ran. */
static bool run_block(int index)
{
    int  first = index * now.kernel->threads, slow = (int)now.slow % (now.kernel->threads / 32) * 32;
    bool ran = false;
    for (int w = 0; w < now.kernel->threads; w += 32)
        if (w != slow)
            ran |= run_warp(first + w);
    return ran || (now.held == 0 && run_warp(first + slow));
}

static unsigned drawn(unsigned below)
{
    static unsigned random;
    if (random == 0) {
        const char *seed = getenv("EMULATOR_SEED");
        random           = seed ? (unsigned)atoi(seed) : 1;
    }
    random = random * 1664525u + 1013904223u;
    return (random >> 8) % below;
}

/* A warp of the block that waits for a product. False if none does. */
static bool wake_warp(unsigned index)
{
    unsigned threads = (unsigned)now.kernel->threads, begin = drawn(threads / 32) * 32, woken = 0;
    for (unsigned w = 0; w < threads && woken == 0; w += 32)
        for (unsigned l = 0; l < 32; l++) {
            fiber *f = &now.fiber[index * threads + (begin + w) % threads + l];
            woken += f->state == LATE;
            if (f->state == LATE)
                f->state = READY;
        }
    return woken > 0;
}

/* What is late happens in a block that lot favours for a time, so that blocks drift apart; else in another. */
static bool let_one_happen(void)
{
    static unsigned favoured, left;
    if (left-- == 0) {
        favoured = drawn(EMULATOR_MAX_BLOCKS);
        left     = drawn(256);
        now.slow = drawn(EMULATOR_MAX_THREADS / 32);
        now.held = drawn(2) * drawn(64);
    }
    for (unsigned b = 0; b < now.blocks; b++) {
        unsigned index = (favoured + b) % now.blocks, block = now.first_block + index;
        if (drawn(2) ? emulator_land_one_load(block) || wake_warp(index) : wake_warp(index) || emulator_land_one_load(block))
            return true;
    }
    return false;
}

/* Blocks that run at once take turns with the kernel's __shared__ variables. */
static void go_to_block(int index)
{
    const emulator_kernel *kernel = now.kernel;
    block                 *next   = &now.block[index];
    if (now.blocks > 1 && kernel->statics_bytes > 0) {
        memcpy(now.block[now.running].statics, kernel->statics, kernel->statics_bytes);
        memcpy(kernel->statics, next->statics, kernel->statics_bytes);
    }
    now.running       = index;
    now.state->shared = next->shared;
}

static void start_block(block *b, unsigned index)
{
    const emulator_kernel *kernel = now.kernel;
    if (!b->shared)
        b->shared = aligned_alloc(1024, EMULATOR_MAX_SHARED + 1024);
    if (b->statics_bytes < kernel->statics_bytes) {
        free(b->statics);
        b->statics       = calloc(1, kernel->statics_bytes);
        b->statics_bytes = kernel->statics_bytes;
    }
    if (!b->shared || (kernel->statics_bytes > 0 && !b->statics))
        fail("no memory for a block");
    for (int n = 0; n < kernel->shared_bytes / 2; n++) /* NaN in every type, and large as a number of steps */
        ((uint16_t *)(void *)b->shared)[n] = 0x7FFF;
    if (kernel->has_async)
        emulator_start_writes(index);
    memset(b->at_barrier, 0, sizeof b->at_barrier);
    b->at_cluster_barrier = b->or_of_all = 0;
}

/* Where those of a warp's lanes are that have not ended. */
static void tell_warp(int first)
{
    static const char *const names[] = {[READY] = "ready", [AT_MEETING] = "meeting", [AT_BARRIER] = "barrier", [AT_CLUSTER_BARRIER] = "cluster barrier",
                                        [AT_PHASE] = "mbarrier", [POLLING] = "polling", [LATE] = "product", [DONE] = "ended"};
    for (int t = first; t < first + 32; t++) {
        const fiber *f = &now.fiber[t], *before = t > first ? f - 1 : NULL;
        if (f->state == DONE || (before && before->state == f->state && before->barrier == f->barrier && before->phase_of == f->phase_of))
            continue;
        fprintf(stderr, "  block %d, thread %d on: %s", t / now.kernel->threads, t % now.kernel->threads, names[f->state]);
        if (f->state == AT_BARRIER)
            fprintf(stderr, " %d, %d are there", f->barrier, now.block[t / now.kernel->threads].at_barrier[f->barrier]);
        if (f->state == AT_PHASE)
            fprintf(stderr, " at %d, parity %u", (int)((const char *)f->phase_of - now.block[t / now.kernel->threads].shared), f->parity);
        fputc('\n', stderr);
    }
}

static void check_done(int fiber)
{
    go_to(fiber);
    switch (now.fiber[fiber].state) {
    case DONE: return;
    case AT_BARRIER: fail("waits at a barrier that others do not come to");
    case AT_CLUSTER_BARRIER: fail("waits at a cluster's barrier that others do not come to");
    case AT_PHASE: fail("waits for a phase of an mbarrier that does not end");
    case POLLING: fail("a block waits for one that comes after it");
    default: fail("waits for lanes of its warp that do not come");
    }
}

void emulator_run_blocks(const emulator_kernel *kernel, unsigned first_block, unsigned blocks)
{
    static unsigned run;
    int             fibers = (int)blocks * kernel->threads;
    now.state              = kernel->state;
    now.kernel             = kernel;
    now.running            = 0;
    now.first_block        = first_block;
    now.blocks             = blocks;
    *now.state = (emulator_state){.block = {first_block, 0, 0}, .grid = {kernel->grid, 1, 1}, .run = ++run,
                                  .threads = kernel->threads, .shared_bytes = kernel->shared_bytes, .meet = meet,
                                  .barrier = barrier, .barrier_arrive = barrier_arrive, .barrier_or = barrier_or,
                                  .cluster_barrier = cluster_barrier, .poll = poll, .fail = fail, .wrote = kernel->has_async ? emulator_wrote : NULL,
                                  .hopper = &emulator_hopper_functions};
    if (kernel->threads > EMULATOR_MAX_THREADS || kernel->threads % 32 != 0 || kernel->shared_bytes > EMULATOR_MAX_SHARED ||
        fibers > EMULATOR_MAX_FIBERS || blocks > EMULATOR_MAX_BLOCKS)
        fail("more threads or shared memory than a block has");
    memset(now.warp, 0, sizeof now.warp);
    for (unsigned b = 0; b < blocks; b++)
        start_block(&now.block[b], b);
    for (int t = 0; t < fibers; t++)
        start_fiber(&now.fiber[t]);
    for (bool ran = true; ran;) {
        ran = false;
        for (int b = 0; b < (int)blocks; b++) {
            go_to_block(b);
            while (run_block(b))
                ran = true;
        }
        bool held = !ran && now.held > 0;
        ran       = ran || let_one_happen();
        if (held) { /* what is late goes on meanwhile; without it the slow one has to */
            now.held = ran ? now.held - 1 : 0;
            ran      = true;
        }
    }
    bool all = true;
    for (int t = 0; t < fibers; t++)
        all = all && now.fiber[t].state == DONE;
    for (int t = 0; t < fibers && !all; t += 32)
        tell_warp(t);
    for (int t = 0; t < fibers; t++)
        check_done(t);
    emulator_end_products(fibers);
    emulator_end_transfers(fibers);
}
