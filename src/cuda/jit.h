/*
 * From a key to machine code: kernel text + constants -> NVRTC -> cubin, kept on disk between processes. No GPU is
 * needed here; loading the cubin and launching it is launch.c's.
 */
#ifndef FA_CUDA_JIT_H
#define FA_CUDA_JIT_H

#include "cuda/driver.h"
#include "cuda/kernels/constants.h"
#include "file.h"

/* ---- the texts (generated at build from src/cuda/kernels and src/cuda/ladder) ---- */

typedef struct fa_text {
    const char          *name; /* "forward_sm80.cu", "tile.cuh", "mask.h" */
    const unsigned char *packed;
} fa_text;

extern const fa_text fa_texts[];
extern const int     fa_num_texts;

/* Packed text is ASCII and codes of words, which are packed too. Words 0 to FA_SHORT_WORDS - 1 have a code of one byte,
 * from 128 on; the others of two, the second from FA_SECOND_BYTE on (cmake/embed.cmake). */
enum {
    FA_SHORT_WORDS  = 40,
    FA_SECOND_BYTE  = 11,
    FA_SECOND_BYTES = 21,
    FA_MOST_WORDS   = FA_SHORT_WORDS + (128 - FA_SHORT_WORDS) * FA_SECOND_BYTES
};

extern const unsigned char fa_words[]; /* each with a 0 at its end */
extern const size_t        fa_words_bytes;

/* As NVRTC gets it. The caller frees it; NULL: out of memory. */
char *fa_text_unpack(const fa_text *text);

/* ---- keys ---- */

/* One variant of one kernel. Only int members, zeroed before use, so that it compares and hashes as bytes. */
typedef struct fa_key {
    int kernel; /* FA_KERNEL_* (tune.h) */
#define X(member, constant) int member;
    FA_KEY_FIELDS(X)
#undef X
} fa_key;

enum { FA_KEY_LINE_BYTES = 1024 };

/* "forward_sm80 arch=90 dtype=2 head_dim=128 ...": every field, for logs, the disk cache and explain. */
void     fa_key_line(const fa_key *key, char *line, size_t line_bytes);
uint64_t fa_key_hash(const fa_key *key);
/* "#define FA_ARCH 90\n..." ; returns the length that it needs, as snprintf does. */
int fa_key_constants(const fa_key *key, char *text, size_t text_bytes);

/* ---- building ---- */

/* What ptxas reports about a kernel, and what its text says of shared memory. */
typedef struct fa_resources {
    int  registers, stack_bytes, spill_bytes;
    int  shared_bytes; /* dynamic: the value of fa_shared_bytes in the text; 0: none */
    char warning[200]; /* first line with a (C75xx) remark: a tensor-core pipeline that the compiler broke; "" */
} fa_resources;

typedef struct fa_binary {
    unsigned char *cubin; /* malloc */
    size_t         bytes;
    fa_resources   resources;
    bool           compiled; /* by this call; false: found on disk */
} fa_binary;

typedef struct fa_jit {
    fa_nvrtc nvrtc;
    int      nvrtc_state; /* 0: not tried, 1: loaded */
    char    *nvrtc_path;  /* option; NULL: search */
    char   **edited;      /* [fa_num_texts] from FLASH_ATTN_KERNEL_DIR; NULL entry: the built-in text */
    char   **unpacked;    /* [fa_num_texts] built-in texts that a compilation needed; NULL entry: not yet */
    char    *folder;      /* of cubins built ahead; NULL: none */
    int      cache;       /* descriptor of the private folder; -1: memory only */
    int      driver_version; /* part of the cache's key; 0 without a driver */
} fa_jit;

/* options may be NULL. Fails only on memory or on a FLASH_ATTN_KERNEL_DIR that cannot be read. */
flash_attn_status fa_jit_init(fa_jit *jit, const flash_attn_options *options, int driver_version);
void              fa_jit_free(fa_jit *jit);

/* Find on disk or compile. The caller serialises calls on one fa_jit. Frees nothing; on OK the caller frees cubin. */
flash_attn_status fa_jit_build(fa_jit *jit, const fa_key *key, fa_binary *binary);

/* Compile without looking on disk: for tests, and to fill a folder. */
flash_attn_status fa_jit_compile(fa_jit *jit, const fa_key *key, fa_binary *binary);

/* True if the folder has it already. */
bool fa_jit_is_exported(const fa_jit *jit, const fa_key *key, const char *folder);

/* Write a binary into a folder for machines without NVRTC. */
flash_attn_status fa_jit_export(fa_jit *jit, const fa_key *key, const fa_binary *binary, const char *folder);

/* ---- the disk (cache.c) ---- */

/* Read the entry of `identity` (any text). False if there is none or it is not wholly right. */
bool fa_cache_read(int folder, const char *identity, fa_binary *binary);

/* Store it, atomically, with this file mode. False if that failed; then nothing is left behind. */
bool fa_cache_write(int folder, const char *identity, const fa_binary *binary, unsigned mode);

/* Hold an entry's lock, so that one process builds it while the others wait. -1: could not in 20 s, go on without. */
int  fa_cache_lock(int folder, const char *identity);
void fa_cache_unlock(int lock);

#endif
