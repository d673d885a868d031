/*
 * What the emulated NVRTC gives for a cubin: an ELF file with nothing but the symbol fa_shared_bytes, which the library reads
 * as it does a cubin's, and behind it the shared object that the emulated driver loads.
 */
#ifndef EMULATOR_OBJECT_H
#define EMULATOR_OBJECT_H

#include <elf.h>
#include <stdint.h>

#define EMULATED_MAGIC "emulated"

typedef struct emulated_object {
    Elf64_Ehdr head;
    Elf64_Shdr section[4]; /* none, data, symbols, strings */
    Elf64_Sym  symbol[2];
    char       strings[24];
    int32_t    shared_bytes;
    char       magic[8];
    uint64_t   object_at, object_bytes;
} emulated_object;

#endif
