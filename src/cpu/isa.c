/* What this processor and its operating system can run. */
#include "cpu/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* The order in which tiers rise; the same as that of the header's list. */
static int rank_of(flash_attn_isa isa)
{
    return isa == FLASH_ATTN_ISA_AVX512_BF16 ? 2 * FLASH_ATTN_ISA_AVX512 + 1 : 2 * (int)isa;
}

bool fa_isa_reaches(flash_attn_isa best, flash_attn_isa tier) { return rank_of(best) >= rank_of(tier); }

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>

enum { EAX, EBX, ECX, EDX };

typedef struct leaf {
    unsigned reg[4];
} leaf;

static leaf cpuid_leaf(unsigned number, unsigned sub)
{
    leaf l = {{0}};
    __get_cpuid_count(number, sub, &l.reg[EAX], &l.reg[EBX], &l.reg[ECX], &l.reg[EDX]);
    return l;
}

static uint64_t enabled_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux gives a process the tile registers only when asked (arch_prctl, ARCH_REQ_XCOMP_PERM, state 18). */
static bool may_use_tiles(void)
{
#if defined(SYS_arch_prctl)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

typedef struct feature {
    const char *name;
    int         leaf; /* 0: leaf 1; 1: leaf 7.0; 2: leaf 7.1 */
    int         reg, bit;
    uint64_t    state; /* register state that the operating system must save, of XCR0 */
} feature;

#define STATE_AVX 0x6
#define STATE_AVX512 0xE6
#define STATE_AMX 0x600E6

static const feature features[] = {
    {"avx", 0, ECX, 28, STATE_AVX},          {"fma", 0, ECX, 12, STATE_AVX},
    {"f16c", 0, ECX, 29, STATE_AVX},         {"avx2", 1, EBX, 5, STATE_AVX},
    {"avx512f", 1, EBX, 16, STATE_AVX512},   {"avx512dq", 1, EBX, 17, STATE_AVX512},
    {"avx512bw", 1, EBX, 30, STATE_AVX512},  {"avx512vl", 1, EBX, 31, STATE_AVX512},
    {"avx512bf16", 2, EAX, 5, STATE_AVX512}, {"avx512fp16", 1, EDX, 23, STATE_AVX512},
    {"avx512vbmi", 1, ECX, 1, STATE_AVX512}, {"amx-tile", 1, EDX, 24, STATE_AMX},
    {"amx-bf16", 1, EDX, 22, STATE_AMX},     {"amx-int8", 1, EDX, 25, STATE_AMX},
    {"amx-fp16", 2, EAX, 21, STATE_AMX},
};
enum { NUM_FEATURES = sizeof features / sizeof features[0] };

/* What each tier needs, rising. */
static const struct {
    flash_attn_isa isa;
    const char    *needs;
} tiers[] = {
    {FLASH_ATTN_ISA_AVX2, " avx fma f16c avx2 "},
    {FLASH_ATTN_ISA_AVX512, " avx512f avx512dq avx512bw avx512vl "},
    {FLASH_ATTN_ISA_AVX512_BF16, " avx512bf16 "},
    {FLASH_ATTN_ISA_AMX, " avx512vbmi amx-tile amx-bf16 "},
    {FLASH_ATTN_ISA_AMX_FP16, " amx-fp16 "},
};

static bool needs_feature(const char *needs, const char *name)
{
    char word[24];
    snprintf(word, sizeof word, " %s ", name);
    return strstr(needs, word) != NULL;
}

static void detect_features(fa_isa *isa)
{
    leaf     leaves[3] = {cpuid_leaf(1, 0), cpuid_leaf(7, 0), cpuid_leaf(7, 1)};
    uint64_t state     = leaves[0].reg[ECX] >> 27 & 1 ? enabled_state() : 0; /* bit 27, OSXSAVE: xgetbv is there */
    bool     found[NUM_FEATURES];
    size_t   used        = 0;
    bool     tiles_asked = false, tiles_granted = false;
    for (int n = 0; n < NUM_FEATURES; n++) {
        const feature *f = &features[n];
        found[n]         = (leaves[f->leaf].reg[f->reg] >> f->bit & 1) && (state & f->state) == f->state;
        if (found[n] && f->state == STATE_AMX) {
            if (!tiles_asked)
                tiles_granted = may_use_tiles();
            tiles_asked = true;
            found[n]    = tiles_granted;
        }
        if (found[n])
            used +=
                (size_t)snprintf(isa->features + used, sizeof isa->features - used, "%s%s", used ? " " : "", f->name);
    }
    for (size_t t = 0; t < sizeof tiers / sizeof tiers[0]; t++) {
        for (int n = 0; n < NUM_FEATURES; n++) {
            if (needs_feature(tiers[t].needs, features[n].name) && !found[n])
                return;
        }
        isa->best = tiers[t].isa;
    }
}

/* The third-level cache that this core reaches, which glibc before 2.37 gave for all of an AMD processor's complexes
 * together; 0: another maker's, or not told. Leaf 0x8000001D: line, partitions, ways and sets, each less one. */
static int64_t third_level_bytes(void)
{
    enum { TOPOLOGY_EXTENSIONS = 22 };
    if (cpuid_leaf(0x80000000, 0).reg[EAX] < 0x8000001D ||
        !(cpuid_leaf(0x80000001, 0).reg[ECX] >> TOPOLOGY_EXTENSIONS & 1))
        return 0;
    leaf    l    = cpuid_leaf(0x8000001D, 3);
    int64_t line = (l.reg[EBX] & 0xFFF) + 1, partitions = (l.reg[EBX] >> 12 & 0x3FF) + 1, ways = (l.reg[EBX] >> 22) + 1;
    return (l.reg[EAX] >> 5 & 7) == 3 ? line * partitions * ways * ((int64_t)l.reg[ECX] + 1) : 0;
}

static bool is_amd(void)
{
    leaf l = cpuid_leaf(0, 0);
    char maker[12]; /* in this order */
    memcpy(maker, &l.reg[EBX], 4);
    memcpy(maker + 4, &l.reg[EDX], 4);
    memcpy(maker + 8, &l.reg[ECX], 4);
    return memcmp(maker, "AuthenticAMD", 12) == 0;
}

/* One product of float16 tiles, in a child of its own. Its marks of AddressSanitizer would stay where it dies. */
static __attribute__((target("amx-tile"), no_sanitize("address"))) int try_amx_fp16(void *unused)
{
    _Alignas(64) static const uint8_t config[64] = {
        [0] = 1, [16] = 64, [18] = 64, [20] = 64, [48] = 16, [49] = 16, [50] = 16}; /* three whole tiles */
    const struct rlimit no_core   = {0, 0};
    struct sigaction    as_always = {.sa_handler = SIG_DFL};
    (void)unused;
    setrlimit(RLIMIT_CORE, &no_core);
    sigaction(SIGILL, &as_always, NULL);
    __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2" ::"m"(config));
    __asm__ volatile(".byte 0xc4, 0xe2, 0x6b, 0x5c, 0xc1"); /* tdpfp16ps tmm2, tmm1, tmm0 */
    _exit(0);
}

/* The child shares this process's memory, so it costs nothing to start, and this thread waits until it is gone; its
 * signal handlers and limits are its own, and no SIGCHLD tells of its end, nor does a wait for any child see it. A
 * fault there is the answer "no" and nothing else. */
static bool amx_fp16_runs(void)
{
#if defined(__SANITIZE_THREAD__)
    return false; /* it takes the child, whose memory is ours, for a copy of the process, and sees races ever after */
#endif
    _Alignas(64) char stack[16384];
    int               status = -1;
    pid_t             child  = clone(try_amx_fp16, stack + sizeof stack, CLONE_VM | CLONE_VFORK, NULL);
    return child > 0 && waitpid(child, &status, __WCLONE) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void fa_isa_try_amx_fp16(fa_isa *isa)
{
    if (isa->best == FLASH_ATTN_ISA_AMX && isa->hidden == FA_HIDDEN_NOT_TRIED) /* else it was found, or what it needs was not */
        isa->hidden = amx_fp16_runs() ? FA_HIDDEN_RUNS : FA_HIDDEN_ABSENT;
}

static void detect_name(fa_isa *isa)
{
    char brand[49] = "x86-64";
    if (cpuid_leaf(0x80000000, 0).reg[EAX] >= 0x80000004) {
        for (unsigned n = 0; n < 3; n++) {
            leaf l = cpuid_leaf(0x80000002 + n, 0);
            memcpy(brand + 16 * n, l.reg, 16);
        }
    }
    brand[48]         = '\0';
    const char *start = brand;
    while (*start == ' ')
        start++;
    snprintf(isa->name, sizeof isa->name, "%s", start);
}

#elif defined(__aarch64__)

static bool reports_bf16(void)
{
#if defined(__linux__)
    enum { BF16 = 1 << 14 }; /* HWCAP2_BF16 of the kernel's asm/hwcap.h */
    return getauxval(AT_HWCAP2) & BF16;
#else
    return false;
#endif
}

static void detect_features(fa_isa *isa)
{
    /* NEON is part of the architecture. */
    bool bf16 = fa_kernels_neon_bf16() && reports_bf16();
    isa->best = bf16 ? FLASH_ATTN_ISA_NEON_BF16 : FLASH_ATTN_ISA_NEON;
    snprintf(isa->features, sizeof isa->features, "neon%s", bf16 ? " bf16" : "");
}

static void detect_name(fa_isa *isa) { snprintf(isa->name, sizeof isa->name, "aarch64"); }

#else

static void detect_features(fa_isa *isa) { (void)isa; }

static void detect_name(fa_isa *isa) { snprintf(isa->name, sizeof isa->name, "unknown processor"); }

#endif

#if !defined(__x86_64__)
void           fa_isa_try_amx_fp16(fa_isa *isa) { (void)isa; }
static int64_t third_level_bytes(void) { return 0; }
static bool    is_amd(void) { return false; }
#endif

static int64_t cache_bytes(int name)
{
    long bytes = sysconf(name);
    return bytes > 0 ? bytes : 0;
}

void fa_isa_detect(fa_isa *isa)
{
    memset(isa, 0, sizeof *isa);
    isa->best = FLASH_ATTN_ISA_SCALAR;
    detect_features(isa);
    detect_name(isa);
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    isa->l1_bytes = cache_bytes(_SC_LEVEL1_DCACHE_SIZE);
    isa->l2_bytes = cache_bytes(_SC_LEVEL2_CACHE_SIZE);
    isa->l3_bytes = cache_bytes(_SC_LEVEL3_CACHE_SIZE);
#else
    (void)cache_bytes;
#endif
    isa->asks_far = is_amd();
    int64_t third = third_level_bytes();
    isa->l3_bytes = third ? third : isa->l3_bytes;
}
