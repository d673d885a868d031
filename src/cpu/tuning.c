/*
 * The file that keeps what `flashattn tune` has measured (choices.c looks it up). It is text:
 *
 *     flashattn-tune 1                          version of this form
 *     library 0.1.0                             where it was measured: what differs here makes it foreign
 *     processor ...
 *     features ...
 *     caches 49152 2097152 503316480
 *     tile avx512 forward 64 96 256             table, pass, head_dim up to, queries, keys
 *     block_l2_percent 50
 *     split_keys 1024
 *     assume amx-fp16                          float16 by an instruction that runs here and is not among the features
 *     hash 0123456789abcdef                     of everything above
 *
 * What is read is written out again and compared byte by byte, so there is one way to say a thing, and a number out of
 * bounds, a word too many or a line twice makes the file damaged. A damaged or foreign file changes nothing.
 */
#include "cpu/cpu.h"
#include "file.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORM = 1, FILE_BYTES = 8192, HASH_LINE_BYTES = 5 + 16 + 1 };

static const char *const table_names[FA_TABLES] = {"scalar",   "neon",    "avx2",   "avx512",
                                                   "amx_bf16", "amx_f16", "amx_f32", "amx_fp16", "neon_bf16", "avx512_bf16"};
static const char *const pass_names[2]          = {"forward", "backward"};

const char *fa_table_name(fa_table table) { return table_names[table]; }

/* ---- what may be stored ---- */

static bool sound(int value, int least, int most, int step)
{
    return value == 0 || (value >= least && value <= most && value % step == 0);
}

bool fa_tuning_is_sound(const fa_tuning *tuning)
{
    const fa_tile_shape *tile = &tuning->tile[0][0][0];
    for (int n = 0; n < FA_TABLES * 2 * FA_HEAD_CLASSES; n++) {
        /* 32: AMX's key_step, the largest. */
        if (!sound(tile[n].q, 16, FA_TUNE_MOST_TILE, 16) || !sound(tile[n].k, 32, FA_TUNE_MOST_TILE, 32) ||
            (tile[n].q == 0) != (tile[n].k == 0))
            return false;
    }
    return sound(tuning->block_l2_percent, 10, 90, 1) && sound(tuning->split_keys, 256, 16384, 64);
}

/* ---- the form ---- */

typedef struct text {
    char   at[FILE_BYTES];
    size_t used;
} text;

static void put(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(t->at + t->used, sizeof t->at - t->used, format, arguments);
    va_end(arguments);
    if (length > 0 && (size_t)length < sizeof t->at - t->used)
        t->used += (size_t)length;
}

static void put_machine(text *t, const fa_isa *isa)
{
    int version = flash_attn_version();
    put(t, "flashattn-tune %d\nlibrary %d.%d.%d\n", FORM, version / 10000, version / 100 % 100, version % 100);
    put(t, "processor %s\nfeatures %s\n", isa->name, isa->features);
    put(t, "caches %lld %lld %lld\n", (long long)isa->l1_bytes, (long long)isa->l2_bytes, (long long)isa->l3_bytes);
}

static void put_hash(text *t)
{
    put(t, "hash %016llx\n", (unsigned long long)fa_hash_bytes(FA_HASH_START, t->at, t->used));
}

static void put_tuning(text *t, const fa_isa *isa, const fa_tuning *tuning)
{
    put_machine(t, isa);
    for (int table = 0; table < FA_TABLES; table++)
        for (int pass = 0; pass < 2; pass++)
            for (int head_class = 0; head_class < FA_HEAD_CLASSES; head_class++) {
                fa_tile_shape tile = tuning->tile[table][pass][head_class];
                if (tile.q)
                    put(t, "tile %s %s %d %d %d\n", table_names[table], pass_names[pass],
                        fa_head_class_most(head_class), tile.q, tile.k);
            }
    if (tuning->block_l2_percent)
        put(t, "block_l2_percent %d\n", tuning->block_l2_percent);
    if (tuning->split_keys)
        put(t, "split_keys %d\n", tuning->split_keys);
    if (tuning->amx_fp16)
        put(t, "assume amx-fp16\n");
    put_hash(t);
}

/* ---- reading ---- */

/* The number of the word at *at among `names`; -1: none. Moves on behind it and the space or newline after it. */
static int read_name(const char **at, const char *const *names, int count)
{
    size_t length = strcspn(*at, " \n");
    for (int n = 0; n < count; n++) {
        if (strlen(names[n]) == length && strncmp(*at, names[n], length) == 0) {
            *at += length + ((*at)[length] != '\0');
            return n;
        }
    }
    return -1;
}

/* 1 to 6 digits; -1: something else. */
static int read_number(const char **at)
{
    int value = 0, digits = 0;
    for (; **at >= '0' && **at <= '9' && digits < 6; ++*at, digits++)
        value = value * 10 + (**at - '0');
    if (digits == 0 || (**at != ' ' && **at != '\n'))
        return -1;
    ++*at;
    return value;
}

/* One line of a choice; false: it is none. */
static bool read_line(const char *at, fa_tuning *tuning)
{
    static const char *const words[] = {"tile", "block_l2_percent", "split_keys", "assume"}, *const assumed[] = {"amx-fp16"};
    int                      word    = read_name(&at, words, 4);
    if (word == 1)
        return (tuning->block_l2_percent = read_number(&at)) > 0;
    if (word == 2)
        return (tuning->split_keys = read_number(&at)) > 0;
    if (word == 3)
        return (tuning->amx_fp16 = read_name(&at, assumed, 1) == 0);
    int table = word == 0 ? read_name(&at, table_names, FA_TABLES) : -1;
    int pass  = table >= 0 ? read_name(&at, pass_names, 2) : -1;
    int most = pass >= 0 ? read_number(&at) : -1, head_class = most > 0 ? fa_head_class(most) : FA_HEAD_CLASSES;
    if (head_class == FA_HEAD_CLASSES)
        return false;
    fa_tile_shape *tile = &tuning->tile[table][pass][head_class];
    tile->q             = read_number(&at);
    tile->k             = tile->q > 0 ? read_number(&at) : -1;
    return tile->k > 0;
}

static flash_attn_tuning read_tuning(const fa_isa *isa, const char *file, size_t bytes, fa_tuning *tuning)
{
    text whole = {.used = 0}, machine = {.used = 0};
    if (bytes <= HASH_LINE_BYTES || bytes >= sizeof whole.at)
        return FLASH_ATTN_TUNING_DAMAGED;
    whole.used = bytes - HASH_LINE_BYTES;
    memcpy(whole.at, file, whole.used);
    put_hash(&whole);
    if (whole.used != bytes || memcmp(whole.at, file, bytes) != 0 || memchr(file, '\0', bytes))
        return FLASH_ATTN_TUNING_DAMAGED;
    put_machine(&machine, isa);
    if (bytes < machine.used || memcmp(file, machine.at, machine.used) != 0)
        return FLASH_ATTN_TUNING_FOREIGN;
    /* From here on `whole` is what was read, and ends with a 0. */
    const char *end = whole.at + bytes - HASH_LINE_BYTES;
    for (const char *line = whole.at + machine.used; line < end; line = strchr(line, '\n') + 1)
        if (!read_line(line, tuning))
            return FLASH_ATTN_TUNING_DAMAGED;
    text again = {.used = 0};
    put_tuning(&again, isa, tuning);
    bool same = fa_tuning_is_sound(tuning) && again.used == bytes && memcmp(again.at, file, bytes) == 0;
    return same ? FLASH_ATTN_TUNING_MEASURED : FLASH_ATTN_TUNING_DAMAGED;
}

/* ---- where it lies ---- */

/* The folder's descriptor, and in *name what the file is called there. -1: no such folder, or not to be trusted. */
static int open_place(const char *file, bool create, const char **name)
{
    if (!file) {
        *name = "cpu-tune.txt";
        return fa_cache_open(create);
    }
    const char *slash = strrchr(file, '/');
    char        folder[4096];
    *name = slash ? slash + 1 : file;
    if (**name == '\0' || strlen(file) >= sizeof folder)
        return -1;
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - file + 1) : 1, slash ? file : ".");
    return fa_open_folder(folder, false);
}

flash_attn_tuning fa_tuning_load(const fa_isa *isa, const char *file, fa_tuning *tuning)
{
    const char *name;
    int         folder = file && !*file ? -1 : open_place(file, false, &name);
    memset(tuning, 0, sizeof *tuning);
    if (folder < 0)
        return FLASH_ATTN_TUNING_DEFAULT;
    size_t            bytes;
    flash_attn_tuning found = FLASH_ATTN_TUNING_DEFAULT;
    char             *held  = fa_file_read(folder, name, FILE_BYTES, &bytes);
    if (held) {
        fa_tuning stored = {.split_keys = 0};
        found            = read_tuning(isa, held, bytes, &stored);
        if (found == FLASH_ATTN_TUNING_MEASURED)
            *tuning = stored;
    }
    free(held);
    close(folder);
    return found;
}

static const char *shown(const char *file) { return file ? file : "flashattn/cpu-tune.txt in the user's cache folder"; }

static flash_attn_status open_to_store(const char *file, const char **name, int *folder)
{
    struct stat there;
    *folder = open_place(file, true, name);
    if (*folder < 0)
        return fa_fail(FLASH_ATTN_INVALID, "%.200s: its folder must be there, and nobody but its user may write to it",
                       shown(file));
    if (fstatat(*folder, *name, &there, AT_SYMLINK_NOFOLLOW) != 0 || S_ISREG(there.st_mode))
        return FLASH_ATTN_OK;
    close(*folder);
    return fa_fail(FLASH_ATTN_INVALID, "%.200s is no plain file, expected one, or none yet", shown(file));
}

flash_attn_status fa_tuning_can_store(const char *file)
{
    const char *name;
    int         folder;
    FA_TRY(open_to_store(file, &name, &folder));
    close(folder);
    return FLASH_ATTN_OK;
}

flash_attn_status fa_tuning_store(const fa_isa *isa, const char *file, const fa_tuning *tuning)
{
    const char *name;
    int         folder;
    text        whole = {.used = 0};
    FA_TRY(open_to_store(file, &name, &folder));
    put_tuning(&whole, isa, tuning);
    bool done = fa_file_write(folder, name, NULL, 0, whole.at, whole.used, 0600);
    close(folder);
    return done ? FLASH_ATTN_OK : fa_fail(FLASH_ATTN_INVALID, "%.200s could not be written", shown(file));
}
