/*
 * The emulated AMX (emulator/amx.h) against a model in plain C, by traps and by jumps; on a processor that has AMX the
 * same tests compare the processor with the model. `--time` prints what an instruction takes.
 */
#include "harness.h"

#include "cpu/cpu.h"
#include "emulator/amx.h"
#include "numeric.h"

#include <float.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- machine code ---- */

typedef struct tile {
    _Alignas(64) uint8_t byte[16][64];
} tile;

typedef struct tile_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  rows[16];
} tile_config;

/* Registers, flags and the red zone before and after an instruction. */
typedef struct machine {
    _Alignas(64) uint64_t zmm[32][8];
    uint64_t k[8], red_zone[16], flags, general[15]; /* rax, rbx, rcx, rdx, rsi, rdi, rbp, r8 ... r15 */
} machine;
_Static_assert(offsetof(machine, k) == 2048 && offsetof(machine, red_zone) == 2112, "as in the assembly");
_Static_assert(offsetof(machine, flags) == 2240 && offsetof(machine, general) == 2248, "as in the assembly");

void           amx_code_product(const tile *a, const tile *b, tile *c, int64_t stride);
void           amx_code_product_fp16(const tile *a, const tile *b, tile *c, int64_t stride);
void           amx_code_products(const tile *a, const tile *b, tile *c, int64_t stride); /* REPEATS times */
void           amx_code_loads(const tile *a, const tile *b, tile *c, int64_t stride);
void           amx_code_stores(const tile *a, const tile *b, tile *c, int64_t stride);
void           amx_code_zeros(const tile *a, const tile *b, tile *c, int64_t stride);
void           amx_code_machine(const machine *before, machine *after);
extern uint8_t amx_code_forms[];
enum { REPEATS = 100 };

/* clang-format off */
#define FUNCTION(name) ".globl " name "\n.hidden " name "\n.type " name ", @function\n" name ":\n"
#define RETURN "    ret\n"
#define THREE_LOADS                                                                                                    \
    "    tileloadd (%rdi,%rcx,1), %tmm1\n    tileloaddt1 (%rsi,%rcx,1), %tmm2\n    tileloadd (%rdx,%rcx,1), %tmm0\n"
#define STORE "    tilestored %tmm0, (%rdx,%rcx,1)\n"
#define REPEATED(what) ".rept 100\n" what "\n.endr\n"
#define EACH(numbers, what) ".irp n," numbers "\n" what "\n.endr\n"
#define TO_7 "0,1,2,3,4,5,6,7"
#define TO_15 TO_7 ",8,9,10,11,12,13,14,15"
#define TO_31 TO_15 ",16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"

__asm__(".text\n"
        FUNCTION("amx_code_product") THREE_LOADS "    tdpbf16ps %tmm2, %tmm1, %tmm0\n" STORE RETURN
        FUNCTION("amx_code_product_fp16") THREE_LOADS "    .byte 0xc4, 0xe2, 0x6b, 0x5c, 0xc1\n" STORE RETURN
        FUNCTION("amx_code_products") THREE_LOADS REPEATED("    tdpbf16ps %tmm2, %tmm1, %tmm0") STORE RETURN
        FUNCTION("amx_code_loads") REPEATED("    tileloadd (%rdi,%rcx,1), %tmm0") RETURN
        FUNCTION("amx_code_stores") REPEATED("    tilestored %tmm0, (%rdx,%rcx,1)") RETURN
        FUNCTION("amx_code_zeros") REPEATED("    tilezero %tmm0") RETURN
        FUNCTION("amx_code_machine")
        "    push %rbx\n    push %rbp\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n    push %rsi\n"
        EACH(TO_31, "    vmovaps 64 * \\n(%rdi), %zmm\\n")
        EACH(TO_7, "    kmovq 2048 + 8 * \\n(%rdi), %k\\n")
        "    pushq 2240(%rdi)\n    popfq\n"
        EACH(TO_15, "    mov 2112 + 8 * \\n(%rdi), %rax\n    mov %rax, -8 * \\n - 8(%rsp)")
        "    mov 2248(%rdi), %rax\n    mov 2256(%rdi), %rbx\n    mov 2264(%rdi), %rcx\n    mov 2272(%rdi), %rdx\n"
        "    mov 2280(%rdi), %rsi\n    mov 2296(%rdi), %rbp\n    mov 2304(%rdi), %r8\n    mov 2312(%rdi), %r9\n"
        "    mov 2320(%rdi), %r10\n    mov 2328(%rdi), %r11\n    mov 2336(%rdi), %r12\n    mov 2344(%rdi), %r13\n"
        "    mov 2352(%rdi), %r14\n    mov 2360(%rdi), %r15\n    mov 2288(%rdi), %rdi\n"
        "    tdpbf16ps %tmm2, %tmm1, %tmm0\n"
        "    xchg %rax, (%rsp)\n" /* where to write */
        "    mov %rbx, 2256(%rax)\n    mov (%rsp), %rbx\n    mov %rbx, 2248(%rax)\n    mov %rcx, 2264(%rax)\n"
        "    mov %rdx, 2272(%rax)\n    mov %rsi, 2280(%rax)\n    mov %rdi, 2288(%rax)\n    mov %rbp, 2296(%rax)\n"
        "    mov %r8, 2304(%rax)\n    mov %r9, 2312(%rax)\n    mov %r10, 2320(%rax)\n    mov %r11, 2328(%rax)\n"
        "    mov %r12, 2336(%rax)\n    mov %r13, 2344(%rax)\n    mov %r14, 2352(%rax)\n    mov %r15, 2360(%rax)\n"
        EACH(TO_15, "    mov -8 * \\n - 8(%rsp), %rbx\n    mov %rbx, 2112 + 8 * \\n(%rax)")
        "    pushfq\n    popq 2240(%rax)\n    cld\n"
        EACH(TO_31, "    vmovaps %zmm\\n, 64 * \\n(%rax)")
        EACH(TO_7, "    kmovq %k\\n, 2048 + 8 * \\n(%rax)")
        "    pop %rsi\n    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbp\n    pop %rbx\n"
        RETURN
        ".globl amx_code_forms\n.hidden amx_code_forms\namx_code_forms:\n" /* decoded, never run */
        "    ldtilecfg 0x12345678(%rip)\n    ldtilecfg -5(%r13)\n    sttilecfg (%r12,%r15,4)\n    tilerelease\n"
        "    tilezero %tmm7\n    tileloadd (%rax), %tmm3\n    tileloadd 0x100(%r12,%r13,8), %tmm6\n"
        "    tileloaddt1 0x7f(%r13,%rbp,2), %tmm1\n    tileloadd 0x40(,%rcx,1), %tmm0\n"
        "    tileloadd -0x1000(%rbp,%r12,1), %tmm5\n    tilestored %tmm4, (%r8,%r9,1)\n"
        "    tilestored %tmm2, 8(%rsp)\n    tdpbf16ps %tmm5, %tmm4, %tmm3\n    tdpbf16ps %tmm0, %tmm7, %tmm6\n"
        "    .byte 0xc4, 0xe2, 0x6b, 0x5c, 0xc1\n    nop\n");
/* clang-format on */

/* ---- how they are run ---- */

typedef enum way { TRAPS, JUMPS, PROCESSOR } way;
static const char *const way_names[] = {"by traps", "by jumps", "by the processor"};

static bool native, has_fp16;

/* Each instruction is met first where it traps each time, so that it is there for jumps. */
static void for_each_way(void (*body)(way))
{
    if (native) {
        body(PROCESSOR);
        return;
    }
    amx_put_jumps(false);
    body(TRAPS);
    amx_put_jumps(true);
    body(JUMPS);
}

static void configure(int rows, int depth, int cols)
{
    _Alignas(64) tile_config c = {.palette = 1, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    for (int t = 0; t < 8; t++)
        c.row_bytes[t] = 64;
    c.rows[0] = c.rows[1] = (uint8_t)rows;
    c.rows[2]             = (uint8_t)depth;
    c.row_bytes[1]        = (uint16_t)(4 * depth);
    c.row_bytes[0] = c.row_bytes[2] = (uint16_t)(4 * cols);
    __asm__ volatile("ldtilecfg %0" ::"m"(c) : "memory");
}

static void release(void) { __asm__ volatile("tilerelease" ::: "memory"); }

/* ---- numbers ---- */

typedef enum content { NEAR_ONE, TINY, SPECIAL, ANY, WHOLE, CONTENTS } content;

static uint64_t seed = 1;

static uint32_t next_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* Bits of a bfloat16, or of a float16 with fewer exponents. TINY: products begin where float32 ends. */
static uint16_t next_half(content what, bool fp16)
{
    static const uint16_t special[2][8] = {{0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x807F, 0x8000, 0x7F7F, 0x0080},
                                           {0x7C00, 0xFC00, 0x7E00, 0x0001, 0x83FF, 0x8000, 0x7BFF, 0x0400}};
    uint32_t              bits = next_bits(), exponent = next_bits();
    int                   mantissa = fp16 ? 10 : 7, one = fp16 ? 15 : 127;
    if (what == ANY || (what == SPECIAL && exponent % 256 == 0))
        return what == ANY ? (uint16_t)bits : special[fp16][bits % 8];
    if (what == WHOLE) /* 0 or 1 */
        return bits & 1 ? (uint16_t)(one << mantissa) : 0;
    exponent = what == TINY ? (fp16 ? exponent % 3 : 60 + exponent % 8) : (uint32_t)one - exponent % 6;
    return (uint16_t)((bits & 0x8000) | exponent << mantissa | (bits & ((1u << mantissa) - 1)));
}

static uint32_t next_sum(content what)
{
    static const float tiny[] = {0.0f, -0.0f, FLT_MIN, -1.5f * FLT_MIN, 0.5f * FLT_MIN, FLT_MIN * 0.75f, 4 * FLT_MIN};
    uint32_t           bits   = next_bits();
    float              x = what == TINY ? tiny[bits % 7] : what == WHOLE ? 1.0f : (float)(int32_t)bits / 4294967296.0f;
    return what == ANY ? bits : fa_bits_of_float(x);
}

/* ---- the model ---- */

static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

/* A result counts as tiny by what it would round to if exponents went on below. */
static float fused(float a, float b, float sum)
{
    a = flushed(a), b = flushed(b);
    float r = fmaf(a, b, sum);
    if (r == 0.0f || !(fabsf(r) <= FLT_MIN))
        return r;
    return fabsf(fmaf(a * 0x1p96f, b, sum * 0x1p96f)) < FLT_MIN * 0x1p96f ? copysignf(0.0f, r) : r;
}

static float number_at(const tile *t, int row, int n, bool fp16)
{
    uint16_t half;
    memcpy(&half, &t->byte[row][2 * n], sizeof half);
    return fp16 ? fa_float_of_f16(half) : fa_float_of_bits((uint32_t)half << 16);
}

static void model_product(tile *c, const tile *a, const tile *b, int rows, int depth, int cols, bool fp16)
{
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < cols; n++) {
            float sums[2] = {0, 0}, old, new;
            for (int k = 0; k < depth; k++)
                for (int j = 0; j < 2; j++)
                    sums[j] = fused(number_at(a, m, 2 * k + j, fp16), number_at(b, k, 2 * n + j, fp16), sums[j]);
            memcpy(&old, &c->byte[m][4 * n], sizeof old);
            new = flushed(flushed(old) + flushed(sums[0] + sums[1]));
            memcpy(&c->byte[m][4 * n], &new, sizeof new);
        }
}

static void expect_sums(const tile *got, const tile *wanted, const char *what)
{
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float x, y;
            memcpy(&x, &got->byte[m][4 * n], sizeof x);
            memcpy(&y, &wanted->byte[m][4 * n], sizeof y);
            if (memcmp(&x, &y, sizeof x) != 0 && !(isnan(x) && isnan(y)))
                fail_msg("%s, row %d, column %d: %a, wanted %a", what, m, n, (double)x, (double)y);
        }
}

/* ---- tests ---- */

static void fill(tile *a, tile *b, tile *c, content what, bool fp16)
{
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 32; n++) {
            uint16_t left = next_half(what, fp16), right = next_half(what, fp16);
            uint32_t sum = next_sum(what);
            memcpy(&a->byte[r][2 * n], &left, sizeof left);
            memcpy(&b->byte[r][2 * n], &right, sizeof right);
            memcpy(&c->byte[r][2 * n & ~3], &sum, sizeof sum);
        }
}

static void compare_products(way w, bool fp16)
{
    for (int n = 0; n < (w == TRAPS ? 300 : 3000); n++) {
        int  rows = 16, depth = 16, cols = 16;
        tile a, b, c, wanted;
        fill(&a, &b, &c, (content)(n % CONTENTS), fp16);
        if (n % 2)
            rows = 1 + (int)(next_bits() % 16), depth = 1 + (int)(next_bits() % 16), cols = 1 + (int)(next_bits() % 16);
        wanted = c;
        model_product(&wanted, &a, &b, rows, depth, cols, fp16);
        configure(rows, depth, cols);
        (fp16 ? amx_code_product_fp16 : amx_code_product)(&a, &b, &c, 64);
        release();
        expect_sums(&c, &wanted, way_names[w]);
    }
}

static void products_of_bfloat16(way w) { compare_products(w, false); }
static void products_of_float16(way w) { compare_products(w, true); }

static void products_are_the_models(void **state)
{
    (void)state;
    for_each_way(products_of_bfloat16);
    if (has_fp16)
        for_each_way(products_of_float16);
}

/* What is beyond a tile's rows and columns is not read, is 0 in the tile, and is not written. */
static void load_and_store(way w)
{
    enum { STRIDE = 80 };
    uint8_t from[16 * STRIDE], to[16 * STRIDE];
    (void)w;
    for (int n = 0; n < 40; n++) {
        int rows = 1 + n % 16, cols = 1 + n * 7 % 16;
        for (size_t i = 0; i < sizeof from; i++)
            from[i] = (uint8_t)next_bits();
        memset(to, 0x5A, sizeof to);
        configure(rows, 16, cols);
        __asm__ volatile("tilezero %%tmm0\n\ttileloadd (%0,%1,8), %%tmm0" ::"r"(from), "r"((int64_t)STRIDE / 8)
                         : "memory");
        __asm__ volatile("tilestored %%tmm0, -256(%0,%1,2)" ::"r"(to + 256), "r"((int64_t)STRIDE / 2) : "memory");
        release();
        for (int i = 0; i < 16 * STRIDE; i++)
            assert_int_equal(to[i], i / STRIDE < rows && i % STRIDE < 4 * cols ? from[i] : 0x5A);
    }
}

static void loads_and_stores_keep_to_the_configuration(void **state)
{
    (void)state;
    for_each_way(load_and_store);
}

static void configuration(way w)
{
    _Alignas(64) uint8_t c[64], none[64] = {0};
    (void)w;
    configure(3, 5, 7);
    __asm__ volatile("sttilecfg %0" : "=m"(c));
    assert_int_equal(c[0], 1);
    assert_int_equal(c[16], 28);
    assert_int_equal(c[18], 20);
    assert_int_equal(c[48], 3);
    assert_int_equal(c[50], 5);
    release();
    __asm__ volatile("sttilecfg %0" : "=m"(c));
    assert_memory_equal(c, none, sizeof c);
}

static void a_configuration_is_given_back(void **state)
{
    (void)state;
    for_each_way(configuration);
}

static void keeps_machine(way w)
{
    enum { ALL_FLAGS = 0xED7 }; /* direction too */
    static machine before, after;
    uint64_t      *words = (uint64_t *)(void *)&before;
    (void)w;
    for (size_t n = 0; n < sizeof before / sizeof *words; n++)
        words[n] = (uint64_t)next_bits() << 32 | next_bits();
    for (int round = 0; round < 3; round++) {
        memset(&after, 0, sizeof after);
        before.flags = round == 2 ? 0x202 : ALL_FLAGS;
        configure(16, 16, 16);
        amx_code_machine(&before, &after);
        release();
        assert_memory_equal(after.zmm, before.zmm, sizeof before.zmm);
        assert_memory_equal(after.k, before.k, sizeof before.k);
        assert_memory_equal(after.red_zone, before.red_zone, sizeof before.red_zone);
        assert_memory_equal(after.general, before.general, sizeof before.general);
        assert_int_equal(after.flags, before.flags);
    }
}

static void registers_flags_and_red_zone_are_kept(void **state)
{
    (void)state;
    for_each_way(keeps_machine);
}

/* Four threads meet the same hundred instructions for the first time together, and their tiles are their own. */
static pthread_barrier_t together;

static void *run_thread(void *at)
{
    tile a, b, *c = at;
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 32; n++) {
            uint16_t one = 0x3F80, two = 0x4000; /* bfloat16 */
            memcpy(&a.byte[r][2 * n], (r + n) % 3 ? &one : &two, 2);
            memcpy(&b.byte[r][2 * n], (r * n) % 5 ? &one : &two, 2);
        }
    pthread_barrier_wait(&together);
    configure(16, 16, 16);
    amx_code_products(&a, &b, c, 64);
    release();
    tile wanted;
    memset(&wanted, 0, sizeof wanted);
    for (int n = 0; n < REPEATS; n++)
        model_product(&wanted, &a, &b, 16, 16, 16, false);
    return memcmp(&wanted, c, sizeof wanted) == 0 ? c : NULL;
}

static void threads_may_meet_an_instruction_at_once(void **state)
{
    enum { THREADS = 4 };
    static tile sums[THREADS];
    pthread_t   threads[THREADS];
    (void)state;
    pthread_barrier_init(&together, NULL, THREADS);
    for (int n = 0; n < THREADS; n++)
        assert_int_equal(pthread_create(&threads[n], NULL, run_thread, &sums[n]), 0);
    for (int n = 0; n < THREADS; n++) {
        void *right;
        pthread_join(threads[n], &right);
        assert_non_null(right);
    }
    pthread_barrier_destroy(&together);
}

static void operands_are_decoded(void **state)
{
    enum { RAX, RCX, RDX, RBX, RSP, RBP, R8 = 8, R9, R12 = 12, R13, R15 = 15, NO = AMX_NO_REGISTER };
    static const amx_instruction wanted[] = {
        {AMX_CONFIGURE, 0, 0, 0, NO, NO, 0, 0x12345678, 9}, /* and the address of the next */
        {AMX_CONFIGURE, 0, 0, 0, R13, NO, 0, -5, 6},
        {AMX_STORE_CONFIGURATION, 0, 0, 0, R12, R15, 2, 0, 6},
        {AMX_RELEASE, 0, 0, 0, NO, NO, 0, 0, 5},
        {AMX_ZERO, 7, 0, 0, NO, NO, 0, 0, 5},
        {AMX_LOAD, 3, 0, 0, RAX, NO, 0, 0, 6},
        {AMX_LOAD, 6, 0, 0, R12, R13, 3, 0x100, 10},
        {AMX_LOAD, 1, 0, 0, R13, RBP, 1, 0x7F, 7},
        {AMX_LOAD, 0, 0, 0, NO, RCX, 0, 0x40, 10},
        {AMX_LOAD, 5, 0, 0, RBP, R12, 0, -0x1000, 10},
        {AMX_STORE, 4, 0, 0, R8, R9, 0, 0, 6},
        {AMX_STORE, 2, 0, 0, RSP, NO, 0, 8, 7},
        {AMX_DOT_BF16, 3, 4, 5, NO, NO, 0, 0, 5},
        {AMX_DOT_BF16, 6, 7, 0, NO, NO, 0, 0, 5},
        {AMX_DOT_FP16, 0, 1, 2, NO, NO, 0, 0, 5},
        {AMX_NONE, 0, 0, 0, NO, NO, 0, 0, 0},
    };
    const uint8_t *code = amx_code_forms;
    (void)state;
    for (size_t n = 0; n < sizeof wanted / sizeof wanted[0]; n++) {
        amx_instruction got = amx_decode(code, true);
        bool            dot = got.operation == AMX_DOT_BF16 || got.operation == AMX_DOT_FP16;
        code += got.bytes;
        assert_int_equal(got.operation, wanted[n].operation);
        assert_int_equal(got.bytes, wanted[n].bytes);
        if (got.operation == AMX_NONE)
            break;
        assert_int_equal(got.tile, wanted[n].tile);
        assert_int_equal(dot ? got.left : 0, wanted[n].left);
        assert_int_equal(dot ? got.right : 0, wanted[n].right);
        assert_int_equal(got.base, wanted[n].base);
        assert_int_equal(got.index, wanted[n].index);
        assert_int_equal(got.shift, wanted[n].shift);
        assert_int_equal(got.displacement, wanted[n].displacement + (n == 0 ? (int64_t)(intptr_t)code : 0));
    }
    assert_int_equal(amx_decode((const uint8_t[]){0xC4, 0xE2, 0x6B, 0x5C, 0xC1}, false).operation, AMX_NONE);
}

static int signal_of_child(void (*body)(void))
{
    int   status;
    pid_t child;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        body();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void run_illegal(void) { __asm__ volatile("ud2"); }
static void run_unconfigured(void) { __asm__ volatile("tilezero %tmm0"); }
static void run_misfit(void)
{
    tile a, b, c;
    fill(&a, &b, &c, WHOLE, false);
    configure(16, 16, 16);
    _Alignas(64) tile_config config;
    __asm__ volatile("sttilecfg %0" : "=m"(config));
    config.rows[2] = 3;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    amx_code_product(&a, &b, &c, 64);
}

#if defined(__SANITIZE_ADDRESS__)
static void run_outside(void)
{
    uint8_t *memory = malloc(1023);
    configure(16, 16, 16);
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm0" ::"r"(memory), "r"((int64_t)64) : "memory");
}

static void memory_that_is_not_there_is_not_loaded(void **state)
{
    (void)state;
    assert_int_equal(signal_of_child(run_outside), native ? 0 : SIGABRT);
}
#endif

static void what_a_processor_refuses_ends_the_program(void **state)
{
    (void)state;
    assert_int_equal(signal_of_child(run_illegal), SIGILL);
    assert_int_equal(signal_of_child(run_unconfigured), native ? SIGILL : SIGABRT);
    assert_int_equal(signal_of_child(run_misfit), native ? SIGILL : SIGABRT);
}

/* ---- time ---- */

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_times(way w)
{
    static const struct {
        const char *name;
        void (*code)(const tile *, const tile *, tile *, int64_t);
    } codes[] = {{"products", amx_code_products},
                 {"loads", amx_code_loads},
                 {"stores", amx_code_stores},
                 {"zeros", amx_code_zeros}};
    static tile a, b, c;
    fill(&a, &b, &c, NEAR_ONE, false);
    configure(16, 16, 16);
    for (size_t n = 0; n < sizeof codes / sizeof codes[0]; n++) {
        double least = 1;
        for (int round = 0; round < 200; round++) {
            double begin = seconds_now();
            codes[n].code(&a, &b, &c, 64);
            least = fmin(least, seconds_now() - begin);
        }
        printf("%s %s: %.0f ns each\n", codes[n].name, way_names[w], 1e9 * least / REPEATS);
    }
    release();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operands_are_decoded),
        cmocka_unit_test(threads_may_meet_an_instruction_at_once),
        cmocka_unit_test(products_are_the_models),
        cmocka_unit_test(loads_and_stores_keep_to_the_configuration),
        cmocka_unit_test(a_configuration_is_given_back),
        cmocka_unit_test(registers_flags_and_red_zone_are_kept),
        cmocka_unit_test(what_a_processor_refuses_ends_the_program),
#if defined(__SANITIZE_ADDRESS__)
        cmocka_unit_test(memory_that_is_not_there_is_not_loaded),
#endif
    };
    fa_isa      isa;
    const char *why = amx_why_not();
    unsetenv("EMULATED_AMX");
    fa_isa_detect(&isa); /* it asks for the tiles, too */
    fa_isa_try_amx_fp16(&isa);
    native   = isa.best == FLASH_ATTN_ISA_AMX || isa.best == FLASH_ATTN_ISA_AMX_FP16;
    has_fp16 = !native || isa.best == FLASH_ATTN_ISA_AMX_FP16 || isa.hidden == FA_HIDDEN_RUNS;
    if (why && !native) {
        printf("skipped: no emulated AMX: %s\n", why);
        return 0;
    }
    if (!native)
        amx_emulate(true);
    printf("%s\n", native ? "this processor's own AMX" : "emulated AMX");
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        for_each_way(print_times);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
