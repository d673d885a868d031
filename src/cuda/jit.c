/* Keys, the kernels' texts, and building one variant with NVRTC. */
#include "cuda/jit.h"
#include "cuda/tune.h"

#include <elf.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- keys ---- */

/* On every call's path, and each multiply waits for the one before it: one for two ints. */
uint64_t fa_key_hash(const fa_key *key)
{
    enum { INTS = sizeof *key / sizeof(int) };
    const unsigned *word = (const unsigned *)key;
    uint64_t        hash = FA_HASH_START;
    for (int i = 0; i + 1 < INTS; i += 2)
        hash = (hash ^ word[i] ^ (uint64_t)word[i + 1] << 32) * 0x9E3779B97F4A7C15u; /* 2^64 over the golden ratio */
    if (INTS % 2 == 1)
        hash = (hash ^ word[INTS - 1]) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

void fa_key_line(const fa_key *key, char *line, size_t line_bytes)
{
    int used = snprintf(line, line_bytes, "%s", fa_kernels[key->kernel].name);
#define X(member, constant)                                                                        \
    if (used >= 0 && (size_t)used < line_bytes)                                                    \
        used += snprintf(line + used, line_bytes - (size_t)used, " " #member "=%d", key->member);
    FA_KEY_FIELDS(X)
#undef X
}

int fa_key_constants(const fa_key *key, char *text, size_t text_bytes)
{
#define FORMAT(member, constant) "#define " #constant " %d\n"
#define VALUE(member, constant) , key->member
    return snprintf(text, text_bytes, FA_KEY_FIELDS(FORMAT) "%s" FA_KEY_FIELDS(VALUE), "");
#undef FORMAT
#undef VALUE
}

/* ---- texts ---- */

static int find_text(const char *name)
{
    for (int i = 0; i < fa_num_texts; i++)
        if (strcmp(fa_texts[i].name, name) == 0)
            return i;
    return -1;
}

/* Write what packed bytes stand for, or with NULL only count it. Words use only shorter ones, so this ends. */
static size_t unpack(const unsigned char *const *words, const unsigned char *from, char *to)
{
    size_t used = 0;
    for (unsigned byte; (byte = *from++) != 0;) {
        if (byte < 128) {
            if (to)
                to[used] = (char)byte;
            used++;
            continue;
        }
        unsigned word = byte - 128;
        if (word >= FA_SHORT_WORDS)
            word = FA_SHORT_WORDS + (word - FA_SHORT_WORDS) * FA_SECOND_BYTES + (*from++ - FA_SECOND_BYTE);
        used += unpack(words, words[word], to ? to + used : NULL);
    }
    return used;
}

char *fa_text_unpack(const fa_text *text)
{
    const unsigned char *words[FA_MOST_WORDS], *end = fa_words + fa_words_bytes;
    int                  count = 0;
    for (const unsigned char *word = fa_words; word < end; word += strlen((const char *)word) + 1)
        words[count++] = word;
    char *plain = malloc(unpack(words, text->packed, NULL) + 1);
    if (plain)
        plain[unpack(words, text->packed, plain)] = '\0';
    return plain;
}

/* Of texts that need_texts has seen. */
static const char *text_at(const fa_jit *jit, int i) { return jit->edited[i] ? jit->edited[i] : jit->unpacked[i]; }

static bool is_header(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && (strcmp(dot, ".h") == 0 || strcmp(dot, ".cuh") == 0);
}

static char *read_file(const char *folder, const char *name)
{
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return NULL;
    FILE *file = fopen(path, "rbe");
    if (!file)
        return NULL;
    char  *text = NULL;
    long   size = -1;
    if (fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) >= 0 && size < (16 << 20) && fseek(file, 0, SEEK_SET) == 0)
        text = malloc((size_t)size + 1);
    if (text) {
        size_t got = fread(text, 1, (size_t)size, file);
        text[got]  = '\0';
    }
    fclose(file);
    return text;
}

/* A kernel can be edited and run again without a build: texts in this folder replace those of the same name. */
static flash_attn_status read_edited(fa_jit *jit)
{
    const char *folder = fa_secure_mode() ? NULL : secure_getenv("FLASH_ATTN_KERNEL_DIR");
    if (!folder || folder[0] == '\0')
        return FLASH_ATTN_OK;
    if (access(folder, R_OK | X_OK) != 0)
        return fa_fail(FLASH_ATTN_COMPILE, "FLASH_ATTN_KERNEL_DIR %s cannot be read", folder);
    for (int i = 0; i < fa_num_texts; i++)
        jit->edited[i] = read_file(folder, fa_texts[i].name);
    return FLASH_ATTN_OK;
}

/* The text of one kernel and all headers, plain. */
static flash_attn_status need_texts(fa_jit *jit, int main)
{
    for (int i = 0; i < fa_num_texts; i++) {
        if ((i != main && !is_header(fa_texts[i].name)) || text_at(jit, i))
            continue;
        jit->unpacked[i] = fa_text_unpack(&fa_texts[i]);
        if (!jit->unpacked[i])
            return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a kernel's text");
    }
    return FLASH_ATTN_OK;
}

flash_attn_status fa_jit_init(fa_jit *jit, const flash_attn_options *options, int driver_version)
{
    *jit          = (fa_jit){.cache = -1, .driver_version = driver_version};
    jit->edited   = calloc((size_t)fa_num_texts, sizeof *jit->edited);
    jit->unpacked = calloc((size_t)fa_num_texts, sizeof *jit->unpacked);
    if (options && options->nvrtc_path)
        jit->nvrtc_path = strdup(options->nvrtc_path);
    if (options && options->kernel_folder)
        jit->folder = strdup(options->kernel_folder);
    if (!jit->edited || !jit->unpacked || (options && ((options->nvrtc_path && !jit->nvrtc_path) ||
                                                       (options->kernel_folder && !jit->folder)))) {
        fa_jit_free(jit);
        return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a CUDA context");
    }
    flash_attn_status status = read_edited(jit);
    if (status != FLASH_ATTN_OK) {
        fa_jit_free(jit);
        return status;
    }
    jit->cache = fa_cache_open(true);
    return FLASH_ATTN_OK;
}

static void free_texts(char **texts)
{
    for (int i = 0; texts && i < fa_num_texts; i++)
        free(texts[i]);
    free(texts);
}

void fa_jit_free(fa_jit *jit)
{
    free_texts(jit->edited);
    free_texts(jit->unpacked);
    free(jit->nvrtc_path);
    free(jit->folder);
    if (jit->cache >= 0)
        close(jit->cache);
    *jit = (fa_jit){.cache = -1};
}

/* ---- identity: all that the machine code depends on ---- */

enum { IDENTITY_BYTES = FA_KEY_LINE_BYTES + 256 };

/* Built-in texts count as they are packed, which with the words says all: who finds the binary on disk unpacks nothing.
 * built_by: also the compiler and driver. A folder filled ahead leaves them out: its reader may have no compiler. */
static void identify(const fa_jit *jit, const fa_key *key, bool built_by, char identity[IDENTITY_BYTES])
{
    uint64_t hash[2] = {fa_hash_bytes(FA_HASH_START, fa_words, fa_words_bytes),
                        fa_hash_bytes(~FA_HASH_START, fa_words, fa_words_bytes)};
    for (int i = 0; i < fa_num_texts; i++) {
        if (!is_header(fa_texts[i].name) && strcmp(fa_texts[i].name, fa_kernels[key->kernel].file) != 0)
            continue;
        const char *text = jit->edited[i] ? jit->edited[i] : (const char *)fa_texts[i].packed;
        for (int h = 0; h < 2; h++) {
            hash[h] = fa_hash_bytes(hash[h], fa_texts[i].name, strlen(fa_texts[i].name) + 1);
            hash[h] = fa_hash_bytes(hash[h], text, strlen(text) + 1);
        }
    }
    fa_key_line(key, identity, FA_KEY_LINE_BYTES);
    size_t used = strlen(identity);
    used += (size_t)snprintf(identity + used, IDENTITY_BYTES - used, " text=%016llx%016llx flags=1",
                             (unsigned long long)hash[0], (unsigned long long)hash[1]);
    if (built_by)
        snprintf(identity + used, IDENTITY_BYTES - used, " nvrtc=%d driver=%d", jit->nvrtc.version,
                 jit->driver_version);
}

/* ---- compiling ---- */

/* The number in front of `words` in one line of ptxas's report, or 0. */
static int number_before(const char *line, const char *end, const char *words)
{
    const char *at = strstr(line, words);
    if (!at || at >= end)
        return 0;
    while (at > line && at[-1] == ' ')
        at--;
    while (at > line && at[-1] >= '0' && at[-1] <= '9')
        at--;
    return atoi(at);
}

/* ptxas -v: "Used 96 registers, ...", "8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads", "(C7510) ..." */
static void read_report(const char *log, fa_resources *resources)
{
    for (const char *line = log; *line;) {
        const char *newline = strchr(line, '\n'), *end = newline ? newline : line + strlen(line);
        int         registers = number_before(line, end, "registers"), stack = number_before(line, end, "bytes stack frame");
        resources->registers   = registers > resources->registers ? registers : resources->registers;
        resources->stack_bytes = stack > resources->stack_bytes ? stack : resources->stack_bytes;
        resources->spill_bytes += number_before(line, end, "bytes spill stores");
        resources->spill_bytes += number_before(line, end, "bytes spill loads");
        const char *remark = strstr(line, "(C75");
        if (remark && remark < end && !resources->warning[0])
            snprintf(resources->warning, sizeof resources->warning, "%.*s", (int)(end - line), line);
        line = newline ? newline + 1 : end;
    }
}

/* The value of `int fa_shared_bytes` in a cubin, which is an ELF file: symbol -> section -> bytes. */
static int shared_bytes_of(const unsigned char *cubin, size_t bytes)
{
    static const char wanted[] = "fa_shared_bytes";
    Elf64_Ehdr        head;
    if (bytes < sizeof head)
        return 0;
    memcpy(&head, cubin, sizeof head);
    if (memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_shentsize != sizeof(Elf64_Shdr) || head.e_shoff > bytes ||
        (size_t)head.e_shnum * sizeof(Elf64_Shdr) > bytes - head.e_shoff)
        return 0;
    const unsigned char *sections = cubin + head.e_shoff;
    for (int i = 0; i < head.e_shnum; i++) {
        Elf64_Shdr symbols, strings, data;
        memcpy(&symbols, sections + (size_t)i * sizeof symbols, sizeof symbols);
        if (symbols.sh_type != SHT_SYMTAB || symbols.sh_link >= head.e_shnum)
            continue;
        memcpy(&strings, sections + symbols.sh_link * sizeof strings, sizeof strings);
        if (symbols.sh_offset > bytes || symbols.sh_size > bytes - symbols.sh_offset || strings.sh_offset > bytes ||
            strings.sh_size > bytes - strings.sh_offset)
            return 0;
        for (size_t n = 0; n < symbols.sh_size / sizeof(Elf64_Sym); n++) {
            Elf64_Sym symbol;
            memcpy(&symbol, cubin + symbols.sh_offset + n * sizeof symbol, sizeof symbol);
            const char *label = (const char *)cubin + strings.sh_offset + symbol.st_name;
            if (symbol.st_name >= strings.sh_size || strings.sh_size - symbol.st_name < sizeof wanted ||
                strcmp(label, wanted) != 0 || symbol.st_shndx >= head.e_shnum)
                continue;
            memcpy(&data, sections + symbol.st_shndx * sizeof data, sizeof data);
            uint32_t value = 0;
            if (data.sh_type == SHT_NOBITS || data.sh_offset > bytes - 4 ||
                symbol.st_value > bytes - 4 - data.sh_offset)
                return 0;
            memcpy(&value, cubin + data.sh_offset + symbol.st_value, sizeof value);
            return (int)value;
        }
    }
    return 0;
}

/* sm_90a: the Hopper instructions that sm_90 alone does not promise. Cubins run on their own architecture and on later
 * ones of the same major number, so FA_ARCH is already the best that the table has. */
static void target_option(int arch, char option[40])
{
    snprintf(option, 40, "--gpu-architecture=sm_%d%s", arch, arch == 90 ? "a" : "");
}

/* The first line that says error, for the caller's one sentence. */
static flash_attn_status compile_error(const char *line, const char *log)
{
    const char *at = log ? strstr(log, "error") : NULL;
    while (at && at > log && at[-1] != '\n')
        at--;
    if (!at)
        at = log ? log : "no log";
    return fa_fail(FLASH_ATTN_COMPILE, "NVRTC could not build %.120s: %.*s", line, (int)strcspn(at, "\n"), at);
}

typedef struct compile_job {
    fa_jit           *jit;
    const fa_key     *key;
    fa_binary        *binary;
    flash_attn_status status;
    char              error[512];
} compile_job;

static flash_attn_status take_cubin(const fa_nvrtc *nvrtc, fa_nvrtc_program *program, const fa_key *key, fa_binary *binary)
{
    if (nvrtc->nvrtcGetCUBINSize(program, &binary->bytes) != NVRTC_SUCCESS || binary->bytes == 0)
        return fa_fail(FLASH_ATTN_COMPILE, "NVRTC gave no cubin for %s", fa_kernels[key->kernel].name);
    binary->cubin = malloc(binary->bytes);
    if (!binary->cubin)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a kernel of %zu bytes", binary->bytes);
    nvrtc->nvrtcGetCUBIN(program, (char *)binary->cubin);
    binary->resources.shared_bytes = shared_bytes_of(binary->cubin, binary->bytes);
    binary->compiled               = true;
    return FLASH_ATTN_OK;
}

static flash_attn_status compile_program(const fa_nvrtc *nvrtc, fa_nvrtc_program *program, const fa_key *key,
                                         fa_binary *binary)
{
    char target[40], line[FA_KEY_LINE_BYTES];
    target_option(key->arch, target);
    fa_key_line(key, line, sizeof line);
    /* NVRTC's own cache is off where it has one (12.9): ours has the checks. The last option is the newest. */
    const char *options[] = {target, "--std=c++17", "--ptxas-options=-v", "--no-cache"};
    int         result    = nvrtc->nvrtcCompileProgram(program, 4, options);
    if (result == NVRTC_ERROR_INVALID_OPTION)
        result = nvrtc->nvrtcCompileProgram(program, 3, options);

    size_t log_bytes = 0;
    char  *log       = NULL;
    if (nvrtc->nvrtcGetProgramLogSize(program, &log_bytes) == NVRTC_SUCCESS && log_bytes > 0)
        log = calloc(1, log_bytes + 1);
    if (log)
        nvrtc->nvrtcGetProgramLog(program, log);
    flash_attn_status status =
        result == NVRTC_SUCCESS ? take_cubin(nvrtc, program, key, binary) : compile_error(line, log);
    if (log && status == FLASH_ATTN_OK)
        read_report(log, &binary->resources);
    free(log);
    return status;
}

static flash_attn_status compile(fa_jit *jit, const fa_key *key, fa_binary *binary)
{
    const char *file = fa_kernels[key->kernel].file;
    int         main = find_text(file);
    if (main < 0)
        return fa_fail(FLASH_ATTN_COMPILE, "kernel text %s is not in this library", file);
    FA_TRY(need_texts(jit, main));
    size_t constants_bytes = (size_t)fa_key_constants(key, NULL, 0), text_bytes = strlen(text_at(jit, main));
    char  *source  = malloc(constants_bytes + text_bytes + 64);
    const char **headers = calloc(2 * (size_t)fa_num_texts, sizeof *headers), **names = headers + fa_num_texts;
    if (!source || !headers) {
        free(source);
        free(headers);
        return fa_fail(FLASH_ATTN_NO_MEMORY, "out of host memory for a kernel's text");
    }
    fa_key_constants(key, source, constants_bytes + 1);
    sprintf(source + constants_bytes, "#line 1 \"%s\"\n%s", file, text_at(jit, main));
    int num_headers = 0;
    for (int i = 0; i < fa_num_texts; i++)
        if (is_header(fa_texts[i].name)) {
            headers[num_headers] = text_at(jit, i);
            names[num_headers++] = fa_texts[i].name;
        }
    *binary                  = (fa_binary){0};
    fa_nvrtc_program *program = NULL;
    flash_attn_status status;
    if (jit->nvrtc.nvrtcCreateProgram(&program, source, file, num_headers, headers, names) != NVRTC_SUCCESS)
        status = fa_fail(FLASH_ATTN_COMPILE, "NVRTC could not start on %s", file);
    else {
        status = compile_program(&jit->nvrtc, program, key, binary);
        jit->nvrtc.nvrtcDestroyProgram(&program);
    }
    free(source);
    free(headers);
    return status;
}

static void *compile_thread(void *argument)
{
    compile_job *job = argument;
    job->status      = compile(job->jit, job->key, job->binary);
    if (job->status != FLASH_ATTN_OK)
        snprintf(job->error, sizeof job->error, "%s", flash_attn_last_error());
    return NULL;
}

static flash_attn_status need_nvrtc(fa_jit *jit)
{
    if (jit->nvrtc_state == 0)
        FA_TRY(fa_nvrtc_load(&jit->nvrtc, jit->nvrtc_path, jit->driver_version));
    jit->nvrtc_state = 1;
    return FLASH_ATTN_OK;
}

/* NVRTC's own error names its option, not what would help. */
static flash_attn_status check_arch(const fa_nvrtc *nvrtc, int arch)
{
    int known[64], count = 0;
    if (nvrtc->nvrtcGetNumSupportedArchs(&count) != NVRTC_SUCCESS || count < 1 || count > 64 ||
        nvrtc->nvrtcGetSupportedArchs(known) != NVRTC_SUCCESS)
        return FLASH_ATTN_OK;
    for (int i = 0; i < count; i++)
        if (known[i] == arch)
            return FLASH_ATTN_OK;
    return fa_fail(FLASH_ATTN_COMPILE, "NVRTC %d.%d builds nothing for compute capability %d.%d; its latest is %d.%d. 10.0 and 12.0 "
                   "need version 12.8 or later", nvrtc->version / 1000, nvrtc->version % 1000 / 10, arch / 10, arch % 10,
                   known[count - 1] / 10, known[count - 1] % 10);
}

/* On a thread of our own: a compiler needs megabytes of stack, which the caller's thread may not have. */
flash_attn_status fa_jit_compile(fa_jit *jit, const fa_key *key, fa_binary *binary)
{
    FA_TRY(need_nvrtc(jit));
    FA_TRY(check_arch(&jit->nvrtc, key->arch));
    compile_job    job = {.jit = jit, .key = key, .binary = binary};
    pthread_attr_t attributes;
    pthread_t      thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)64 << 20); /* address space; only what is touched is memory */
    int failed = pthread_create(&thread, &attributes, compile_thread, &job);
    pthread_attr_destroy(&attributes);
    if (failed)
        return fa_fail(FLASH_ATTN_NO_MEMORY, "no thread could be started to compile a kernel");
    pthread_join(thread, NULL);
    return job.status == FLASH_ATTN_OK ? FLASH_ATTN_OK : fa_fail(job.status, "%s", job.error);
}

static bool find_in_folder(const fa_jit *jit, const char *name, const fa_key *key, fa_binary *binary)
{
    char identity[IDENTITY_BYTES];
    int  folder = name ? fa_open_folder(name, false) : -1;
    if (folder < 0)
        return false;
    identify(jit, key, false, identity);
    bool found = fa_cache_read(folder, identity, binary);
    close(folder);
    return found;
}

flash_attn_status fa_jit_build(fa_jit *jit, const fa_key *key, fa_binary *binary)
{
    if (find_in_folder(jit, jit->folder, key, binary))
        return FLASH_ATTN_OK;
    FA_TRY(need_nvrtc(jit));
    if (jit->cache < 0)
        return fa_jit_compile(jit, key, binary);
    char identity[IDENTITY_BYTES];
    identify(jit, key, true, identity);
    if (fa_cache_read(jit->cache, identity, binary))
        return FLASH_ATTN_OK;
    int               lock   = fa_cache_lock(jit->cache, identity);
    flash_attn_status status = FLASH_ATTN_OK;
    if (lock < 0 || !fa_cache_read(jit->cache, identity, binary)) { /* not built while we waited */
        status = fa_jit_compile(jit, key, binary);
        if (status == FLASH_ATTN_OK)
            fa_cache_write(jit->cache, identity, binary, 0600); /* if it fails, the next process compiles again */
    }
    fa_cache_unlock(lock);
    return status;
}

bool fa_jit_is_exported(const fa_jit *jit, const fa_key *key, const char *folder)
{
    fa_binary binary;
    bool      found = find_in_folder(jit, folder, key, &binary);
    if (found)
        free(binary.cubin);
    return found;
}

flash_attn_status fa_jit_export(fa_jit *jit, const fa_key *key, const fa_binary *binary, const char *folder)
{
    char identity[IDENTITY_BYTES];
    int  to = fa_open_folder(folder, true);
    if (to < 0)
        return fa_fail(FLASH_ATTN_INVALID, "folder %s cannot be made or used: it must be a folder that only its owner "
                                           "can write", folder);
    identify(jit, key, false, identity);
    bool done = fa_cache_write(to, identity, binary, 0644);
    close(to);
    return done ? FLASH_ATTN_OK : fa_fail(FLASH_ATTN_INVALID, "folder %s: a kernel could not be written there", folder);
}
