#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int cli_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("flashattn: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return CLI_REFUSED;
}

int cli_fail_library(const char *what, flash_attn_status status)
{
    return cli_fail("%s: %s: %s", what, flash_attn_status_string(status), flash_attn_last_error());
}

bool cli_close(FILE *file)
{
    bool written = !ferror(file);
    return fclose(file) == 0 && written;
}

/* Edit distance with exchanges of neighbours (optimal string alignment); words longer than LONGEST are never near. */
enum { LONGEST = 63 };

static int edit_distance(const char *a, const char *b)
{
    int length_a = (int)strlen(a), length_b = (int)strlen(b);
    if (length_a > LONGEST || length_b > LONGEST)
        return LONGEST;
    int distance[LONGEST + 1][LONGEST + 1];
    for (int i = 0; i <= length_a; i++)
        for (int j = 0; j <= length_b; j++) {
            if (i == 0 || j == 0) {
                distance[i][j] = i + j;
                continue;
            }
            int best = distance[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (distance[i - 1][j] + 1 < best)
                best = distance[i - 1][j] + 1;
            if (distance[i][j - 1] + 1 < best)
                best = distance[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && distance[i - 2][j - 2] + 1 < best)
                best = distance[i - 2][j - 2] + 1;
            distance[i][j] = best;
        }
    return distance[length_a][length_b];
}

const char *cli_nearest(const char *word, const char *const *words, int count)
{
    const char *nearest = NULL;
    int         best    = (int)strlen(word) / 3 + 1; /* one slip in three letters, and one more */
    for (int i = 0; i < count; i++) {
        int distance = edit_distance(word, words[i]);
        if (distance <= best && distance < (int)strlen(words[i])) {
            nearest = words[i];
            best    = distance - 1;
        }
    }
    return nearest;
}

const char *cli_dtype_name(flash_attn_dtype dtype)
{
    switch (dtype) {
    case FLASH_ATTN_F32: return "f32";
    case FLASH_ATTN_F16: return "f16";
    case FLASH_ATTN_BF16: return "bf16";
    case FLASH_ATTN_F8E4M3: return "f8e4m3";
    }
    return "?";
}

const char *cli_device_name(flash_attn_device device)
{
    switch (device.type) {
    case FLASH_ATTN_CPU: return "cpu";
    case FLASH_ATTN_CUDA: return "cuda";
    case FLASH_ATTN_REFERENCE: return "reference";
    }
    return "?";
}

const char *cli_isa_name(flash_attn_isa isa)
{
    switch (isa) {
    case FLASH_ATTN_ISA_AUTO: return "auto";
    case FLASH_ATTN_ISA_SCALAR: return "scalar";
    case FLASH_ATTN_ISA_NEON: return "neon";
    case FLASH_ATTN_ISA_AVX2: return "avx2";
    case FLASH_ATTN_ISA_AVX512: return "avx512";
    case FLASH_ATTN_ISA_AVX512_BF16: return "avx512-bf16";
    case FLASH_ATTN_ISA_AMX: return "amx";
    case FLASH_ATTN_ISA_AMX_FP16: return "amx-fp16";
    case FLASH_ATTN_ISA_NEON_BF16: return "neon-bf16";
    }
    return "?";
}

/* ---- files ---- */

/* The folder that a file is in, malloc'ed; its name in that folder is *name. NULL: no memory. */
static char *folder_of(const char *path, const char **name)
{
    const char *slash = strrchr(path, '/');
    *name             = slash ? slash + 1 : path;
    return slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
}

static bool same_inode(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

bool cli_same_file(const char *x, const char *y)
{
    struct stat a, b;
    const char *x_name, *y_name;
    if (strcmp(x, y) == 0)
        return true;
    int found = (stat(x, &a) == 0) + (stat(y, &b) == 0);
    if (found > 0)
        return found == 2 && S_ISREG(a.st_mode) && same_inode(&a, &b);
    char *x_folder = folder_of(x, &x_name), *y_folder = folder_of(y, &y_name);
    bool  same = x_folder && y_folder && strcmp(x_name, y_name) == 0 && stat(x_folder, &a) == 0 && stat(y_folder, &b) == 0 &&
                same_inode(&a, &b);
    free(x_folder);
    free(y_folder);
    return same;
}

/* What is no plain file (a device, a pipe) is written where it is. */
int cli_check_place(const char *flag, const char *path)
{
    struct stat status;
    const char *name;
    bool        there = stat(path, &status) == 0;
    if (there && S_ISDIR(status.st_mode))
        return cli_fail("--%s %s: %s", flag, path, strerror(EISDIR));
    char *folder = folder_of(path, &name);
    if (!folder)
        return cli_fail("no memory left");
    bool good = (there && !S_ISREG(status.st_mode)) || access(folder, W_OK | X_OK) == 0;
    free(folder);
    return good ? CLI_GO_ON : cli_fail("--%s %s: %s", flag, path, strerror(errno));
}

bool cli_stage(const char *path, cli_staged *staged)
{
    struct stat status, itself;
    bool        there = stat(path, &status) == 0, link = !there && lstat(path, &itself) == 0;
    char       *place = there ? realpath(path, NULL) : NULL; /* of a link that leads nowhere yet writing makes the file */
    bool        direct = link || (there && (!S_ISREG(status.st_mode) || !place));
    int         length = snprintf(staged->place, sizeof staged->place, "%s", place && !direct ? place : path);
    free(place);
    if (length < 0 || (size_t)length >= sizeof staged->place)
        return false;
    if (direct)
        snprintf(staged->path, sizeof staged->path, "%s", staged->place);
    else
        snprintf(staged->path, sizeof staged->path, "%s.part%ld", staged->place, (long)getpid());
    return true;
}

static bool is_direct(const cli_staged *staged) { return strcmp(staged->path, staged->place) == 0; }

bool cli_take_place(const cli_staged *staged) { return is_direct(staged) || rename(staged->path, staged->place) == 0; }

void cli_drop(const cli_staged *staged)
{
    if (!is_direct(staged))
        unlink(staged->path);
}

bool cli_finish(FILE *file, const cli_staged *staged, bool wanted)
{
    bool arrived = cli_close(file) && (!wanted || cli_take_place(staged));
    if (!arrived || !wanted)
        cli_drop(staged);
    return arrived;
}
