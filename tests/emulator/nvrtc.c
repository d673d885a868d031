/*
 * libnvrtc.so.13 for a machine without a GPU: builds a kernel's text with the host's C++ compiler, for the emulated driver
 * (cuda.c). kernel.h stands in front of the text, ptx.h and hopper.h in the places of ptx_sm80.cuh and ptx_sm90.cuh; all else is the text as it is.
 * For tests alone: it is found by LD_LIBRARY_PATH.
 */
#include "object.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OK = 0, OUT_OF_MEMORY = 1, COMPILATION = 6 };

extern char **environ;

typedef struct program {
    char  folder[64]; /* of the text, its headers and what is built */
    char *log, *object;
    size_t object_bytes;
} program;

int nvrtcVersion(int *major, int *minor)
{
    *major = 12;
    *minor = 8;
    return OK;
}

static const int archs[] = {80, 86, 89, 90, 100, 120};

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = sizeof archs / sizeof archs[0];
    return OK;
}

int nvrtcGetSupportedArchs(int *known)
{
    memcpy(known, archs, sizeof archs);
    return OK;
}

/* ---- files ---- */

static FILE *open_in(const program *p, const char *name, const char *mode)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    return fopen(path, mode);
}

/* NULL if there is none or no memory for it. A zero follows. */
static char *read_whole(const program *p, const char *name, size_t *bytes)
{
    FILE       *file = open_in(p, name, "r");
    struct stat info;
    char       *text = NULL;
    if (file && fstat(fileno(file), &info) == 0 && (text = calloc(1, (size_t)info.st_size + 1)) != NULL)
        *bytes = fread(text, 1, (size_t)info.st_size, file);
    if (file)
        fclose(file);
    return text;
}

/* `extern __shared__ ... char NAME[];` becomes a name for the block's pointer: C++ has no array whose size the caller gives. */
static void name_shared_memory(FILE *to, const char *text)
{
    const char *at, *open, *end;
    while ((at = strstr(text, "extern __shared__")) && (open = strchr(at, '[')) && (end = strchr(open, ';'))) {
        const char *name = open;
        while (name[-1] != ' ')
            name--;
        fprintf(to, "%.*sstatic char *&%.*s = emulator.shared;", (int)(at - text), text, (int)(open - name), name);
        text = end + 1;
    }
    fputs(text, to);
}

static bool write_text(const program *p, const char *name, const char *text)
{
    FILE *file = open_in(p, name, "w");
    if (file)
        name_shared_memory(file, text);
    return file && !ferror(file) && fclose(file) == 0;
}

static const char *text_of(const char *name, const char *text)
{
    if (strcmp(name, "ptx_sm80.cuh") == 0)
        return "#include \"ptx.h\"\n";
    return strcmp(name, "ptx_sm90.cuh") == 0 ? "#include \"hopper.h\"\n" : text;
}

int nvrtcCreateProgram(program **made, const char *text, const char *name, int num_headers, const char *const *headers,
                       const char *const *names)
{
    program *p = calloc(1, sizeof *p);
    if (!p)
        return OUT_OF_MEMORY;
    *made = p;
    strcpy(p->folder, "/tmp/emulated-nvrtc-XXXXXX");
    bool written = mkdtemp(p->folder) != NULL;
    for (int n = 0; n < num_headers; n++)
        written = write_text(p, names[n], text_of(names[n], headers[n])) && written;
    FILE *file = open_in(p, "kernel.cpp", "w");
    if (!written || !file)
        return OUT_OF_MEMORY;
    fputs("#include \"kernel.h\"\n", file);
    name_shared_memory(file, text);
    fprintf(file, "\nEMULATOR_ENTRY(%.*s)\n", (int)strcspn(name, "."), name); /* a file's entry has its name */
    return fclose(file) == 0 ? OK : OUT_OF_MEMORY;
}

int nvrtcDestroyProgram(program **made)
{
    program *p = *made;
    char     command[128];
    snprintf(command, sizeof command, "rm -r %s", p->folder);
    int ignored = system(command);
    (void)ignored;
    free(p->log);
    free(p->object);
    free(p);
    *made = NULL;
    return OK;
}

/* ---- compiling ---- */

static bool run_compiler(const program *p)
{
    char        log[128], input[128], output[128], include[128];
    snprintf(log, sizeof log, "%s/log", p->folder);
    snprintf(input, sizeof input, "%s/kernel.cpp", p->folder);
    snprintf(output, sizeof output, "%s/kernel.so", p->folder);
    snprintf(include, sizeof include, "-I%s", p->folder);
    /* As on a GPU, a * b + c is rounded once (which GCC does among its expensive optimizations). */
    const char *fma         = __builtin_cpu_supports("fma") ? "-mfma" : "-mno-fma";
    char *const arguments[] = {(char *)EMULATOR_CXX, (char *)"-std=c++17", (char *)"-O1", (char *)"-w", (char *)fma,
                               (char *)"-ffp-contract=fast", (char *)"-fexpensive-optimizations", (char *)"-fPIC",
                               (char *)"-shared", (char *)"-fno-gnu-unique", (char *)"-Wl,-Bsymbolic", (char *)"-nostdinc++", (char *)"-nostdlib",
                               include, (char *)"-I" EMULATOR_FOLDER, (char *)"-o", output, input, (char *)"-lm", (char *)"-lgcc", NULL};
    posix_spawn_file_actions_t files;
    pid_t                      child;
    int                        status = -1;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    if (posix_spawnp(&child, arguments[0], &files, NULL, arguments, environ) == 0)
        waitpid(child, &status, 0);
    posix_spawn_file_actions_destroy(&files);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int nvrtcCompileProgram(program *p, int num_options, const char *const *options)
{
    size_t ignored;
    (void)num_options, (void)options; /* the architecture is in the text too, as FA_ARCH */
    bool text  = getenv("EMULATOR_TEXT") != NULL; /* which stands for the code, for who asks only which kernels there are */
    bool built = text || run_compiler(p);
    p->log     = read_whole(p, "log", &ignored);
    if (built)
        p->object = read_whole(p, text ? "kernel.cpp" : "kernel.so", &p->object_bytes);
    return p->object ? OK : COMPILATION;
}

int nvrtcGetProgramLogSize(program *p, size_t *bytes)
{
    *bytes = p->log ? strlen(p->log) + 1 : 1;
    return OK;
}

int nvrtcGetProgramLog(program *p, char *log)
{
    strcpy(log, p->log ? p->log : "");
    return OK;
}

int nvrtcGetCUBINSize(program *p, size_t *bytes)
{
    *bytes = sizeof(emulated_object) + p->object_bytes;
    return OK;
}

static int32_t shared_bytes_of(const program *p)
{
    char path[128];
    snprintf(path, sizeof path, "%s/kernel.so", p->folder);
    void          *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const int32_t *value  = object ? dlsym(object, "fa_shared_bytes") : NULL;
    int32_t        bytes  = value ? *value : 0;
    if (object)
        dlclose(object);
    return bytes;
}

int nvrtcGetCUBIN(program *p, char *cubin)
{
    emulated_object o = {.strings = "\0fa_shared_bytes", .magic = "", .object_at = sizeof o, .object_bytes = p->object_bytes};
    memcpy(o.head.e_ident, ELFMAG, SELFMAG);
    memcpy(o.magic, EMULATED_MAGIC, sizeof o.magic);
    o.head.e_shoff     = offsetof(emulated_object, section);
    o.head.e_shentsize = sizeof o.section[0];
    o.head.e_shnum     = 4;
    o.section[1] = (Elf64_Shdr){.sh_type = SHT_PROGBITS, .sh_offset = offsetof(emulated_object, shared_bytes), .sh_size = 4};
    o.section[2] = (Elf64_Shdr){.sh_type = SHT_SYMTAB, .sh_offset = offsetof(emulated_object, symbol), .sh_size = sizeof o.symbol,
                                .sh_link = 3};
    o.section[3] = (Elf64_Shdr){.sh_type = SHT_STRTAB, .sh_offset = offsetof(emulated_object, strings), .sh_size = sizeof o.strings};
    o.symbol[1]  = (Elf64_Sym){.st_name = 1, .st_shndx = 1};
    o.shared_bytes = shared_bytes_of(p);
    memcpy(cubin, &o, sizeof o);
    memcpy(cubin + sizeof o, p->object, p->object_bytes);
    return OK;
}
