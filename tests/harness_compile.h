/* Kernels' keys, compiled by NVRTC on all cores, each with what its tune row accepts. */
#ifndef HARNESS_COMPILE_H
#define HARNESS_COMPILE_H

#include "cuda/cuda.h"
#include "harness.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct key_to_build {
    fa_key key;
    int    spills; /* bytes that its row accepts */
} key_to_build;

typedef struct key_list {
    key_to_build *one;
    int           count, room;
} key_list;

static inline void list_key(key_list *list, const fa_key *key, int spills)
{
    for (int i = 0; i < list->count; i++)
        if (memcmp(&list->one[i].key, key, sizeof *key) == 0) { /* two rows of one kernel: the same code */
            list->one[i].spills = spills > list->one[i].spills ? spills : list->one[i].spills;
            return;
        }
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->one  = realloc(list->one, (size_t)list->room * sizeof *list->one);
        assert_non_null(list->one);
    }
    list->one[list->count++] = (key_to_build){*key, spills};
}

/* The most shared memory that a block may have, from the CUDA Programming Guide's table of compute capabilities. */
static inline int max_shared_bytes(int arch)
{
    return arch == 80 ? 163 << 10 : arch == 90 || arch == 100 ? 227 << 10 : 99 << 10;
}

/* What the processes of count_failures share. */
typedef struct progress {
    atomic_int next, spilling, most_spilled; /* key to take; kernels with accepted spills, and the most bytes of one */
} progress;

/* One line if the key does not build cleanly. */
static inline bool builds_cleanly(fa_jit *jit, const key_to_build *one, const char *other_nvrtc, progress *shared)
{
    const fa_key *key = &one->key;
    char          line[FA_KEY_LINE_BYTES];
    fa_binary     binary;
    fa_key_line(key, line, sizeof line);
    if (fa_jit_build(jit, key, &binary) != FLASH_ATTN_OK) {
        if (other_nvrtc && strstr(flash_attn_last_error(), "builds nothing for compute capability"))
            return true;
        print_message("  %s: %s\n", line, flash_attn_last_error());
        return false;
    }
    free(binary.cubin);
    const fa_resources *r = &binary.resources;
    bool clean = (r->stack_bytes == 0 || one->spills > 0) && r->spill_bytes <= one->spills && !r->warning[0] && r->shared_bytes <= max_shared_bytes(key->arch);
    if (!clean)
        print_message("  %s: %d registers, %d bytes of stack, %d of spills, %d of shared memory %s\n", line, r->registers,
                      r->stack_bytes, r->spill_bytes, r->shared_bytes, r->warning);
    if (r->spill_bytes > 0) {
        int most = atomic_load(&shared->most_spilled);
        while (r->spill_bytes > most && !atomic_compare_exchange_weak(&shared->most_spilled, &most, r->spill_bytes))
            continue;
        atomic_fetch_add(&shared->spilling, 1);
    }
    return clean || other_nvrtc;
}

/* One process a core: each takes the next key that nobody has, so that all end together. other_nvrtc: NULL for the compiler that the
 * library finds; of another the spills are told and are no failure. */
static inline int count_failures(const key_list *list, const char *other_nvrtc)
{
    long      cores   = sysconf(_SC_NPROCESSORS_ONLN);
    int       workers = cores > 16 ? 16 : cores < 1 ? 1 : (int)cores, failures = 0;
    pid_t     child[16];
    progress *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    *shared = (progress){0};
    fflush(NULL);
    for (int w = 0; w < workers; w++) {
        child[w] = fork();
        assert_true(child[w] >= 0);
        if (child[w] == 0) {
            fa_jit jit;
            int    failed = fa_jit_init(&jit, &(flash_attn_options){.nvrtc_path = other_nvrtc}, 0) != FLASH_ATTN_OK, i;
            while (failed < 3 && (i = list->count - atomic_fetch_add(&shared->next, 1)) > 0) /* a few failures are enough; the last take longest */
                failed += !builds_cleanly(&jit, &list->one[i - 1], other_nvrtc, shared);
            fflush(NULL);
            _exit(failed != 0);
        }
    }
    for (int w = 0; w < workers; w++) {
        int status;
        assert_int_equal(waitpid(child[w], &status, 0), child[w]);
        failures += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    print_message("%d kernels; %d spill what their rows accept, at most %d bytes\n", list->count,
                  atomic_load(&shared->spilling), atomic_load(&shared->most_spilled));
    munmap(shared, sizeof *shared);
    return failures;
}

static inline void need_nvrtc(const char *other_nvrtc)
{
    fa_nvrtc nvrtc;
    if (fa_nvrtc_load(&nvrtc, other_nvrtc, 0) == FLASH_ATTN_OK)
        return;
    print_message("skipped: %s\n", flash_attn_last_error());
    skip();
}

#endif
