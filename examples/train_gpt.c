/*
 * Train a small GPT on a text, in plain C, with flashattn's attention: progress, validation loss, a sample at the end.
 *
 *     train_gpt                                   a minute on the licence texts of a Debian machine
 *     train_gpt --text book.txt --seconds 600 --layers 6 --width 256
 *     train_gpt --steps 50 --loss-csv a.csv; train_gpt --steps 50 --attention reference --loss-csv b.csv
 *
 * The model and its options are in gpt/gpt.h.
 */
#include "gpt/gpt.h"

#include <dirent.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define DEFAULT_TEXT "/usr/share/common-licenses"

enum { VALIDATION_BATCHES = 4, PROGRESS_EVERY = 20, VALIDATE_EVERY = 100 };

typedef struct options {
    gpt_config  model;
    const char *text, *loss_csv, *prompt;
    long        steps, sample;
    double      seconds, learning_rate, temperature;
} options;

static const char help[] =
    "usage: train_gpt [options]\n"
    "\n"
    "  --text PATH         a file, or a folder whose files are read one after another (" DEFAULT_TEXT ")\n"
    "  --steps N           stop after N steps; then a run repeats to the bit, at any number of threads\n"
    "  --seconds S         stop after S seconds (60 if --steps is not given); the learning rate follows the clock\n"
    "  --attention NAME    flash, or reference: the formula in double on one thread, to compare with (flash)\n"
    "  --dtype NAME        f32 or bf16: what attention reads q, k and v in (f32)\n"
    "  --layers N          (4)      --width N     (128)     --heads N   (width / 32)\n"
    "  --context N         (256)    --batch N     (4)       --threads N (all cores)\n"
    "  --learning-rate X   (0.003)  --seed N      (1)\n"
    "  --sample N          bytes to write at the end (600)\n"
    "  --temperature X     of the sample; 0: always the likeliest byte (0.7)\n"
    "  --prompt TEXT       what the sample continues (\"The \")\n"
    "  --loss-csv FILE     write step,loss for every step\n";

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- options ---- */

typedef enum option_kind { INT, LONG, SEED, REAL, STRING, ATTENTION, DTYPE } option_kind;

typedef struct option_row {
    const char *name;
    option_kind kind;
    void       *value;
    double      least, most;
} option_row;

static bool choose(const char *text, const char *zero, int if_zero, const char *one, int if_one, int *value)
{
    *value = strcmp(text, one) == 0 ? if_one : if_zero;
    return strcmp(text, zero) == 0 || strcmp(text, one) == 0;
}

static bool set_option(const option_row *row, const char *text)
{
    char  *end    = NULL;
    double number = strtod(text, &end);
    bool   valid  = *text && !*end && number >= row->least && number <= row->most;
    int    choice = 0;
    switch (row->kind) {
    case INT: *(int *)row->value = valid ? (int)number : 0; break;
    case LONG: *(long *)row->value = valid ? (long)number : 0; break;
    case REAL: *(double *)row->value = number; break;
    case SEED: *(uint64_t *)row->value = strtoull(text, &end, 0); return *text && !*end;
    case STRING: *(const char **)row->value = text; return true;
    case ATTENTION:
        valid = choose(text, "flash", FLASH_ATTN_CPU, "reference", FLASH_ATTN_REFERENCE, &choice);
        *(flash_attn_device_type *)row->value = (flash_attn_device_type)choice;
        break;
    case DTYPE:
        valid = choose(text, "f32", FLASH_ATTN_F32, "bf16", FLASH_ATTN_BF16, &choice);
        *(flash_attn_dtype *)row->value = (flash_attn_dtype)choice;
        break;
    }
    return valid && (row->kind == REAL || row->kind == ATTENTION || row->kind == DTYPE || number == floor(number));
}

/* 0: go on; 1: help was asked for; 2: a mistake, said on stderr. */
static int parse(int argc, char **argv, options *o)
{
    const option_row rows[] = {
        {"--text", STRING, &o->text, 0, 0},
        {"--steps", LONG, &o->steps, 1, 1e9},
        {"--seconds", REAL, &o->seconds, 0.001, 1e7},
        {"--attention", ATTENTION, &o->model.attention, 0, 0},
        {"--dtype", DTYPE, &o->model.attention_dtype, 0, 0},
        {"--layers", INT, &o->model.layers, 1, GPT_MAX_LAYERS},
        {"--width", INT, &o->model.width, 2, 16384},
        {"--heads", INT, &o->model.heads, 1, 1024},
        {"--context", INT, &o->model.context, 2, 1 << 20},
        {"--batch", INT, &o->model.batch, 1, 65536},
        {"--threads", INT, &o->model.threads, 1, 1024},
        {"--learning-rate", REAL, &o->learning_rate, 0, 10},
        {"--seed", SEED, &o->model.seed, 0, 0},
        {"--sample", LONG, &o->sample, 0, 1e8},
        {"--temperature", REAL, &o->temperature, 0, 100},
        {"--prompt", STRING, &o->prompt, 0, 0},
        {"--loss-csv", STRING, &o->loss_csv, 0, 0},
    };
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return 1;
        const option_row *row = NULL;
        for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
            if (strcmp(argv[i], rows[n].name) == 0)
                row = &rows[n];
        if (!row || i + 1 == argc) {
            fprintf(stderr, "train_gpt: %s %s; see --help\n", argv[i], row ? "needs a value" : "is not an option");
            return 2;
        }
        if (!set_option(row, argv[++i])) {
            fprintf(stderr, "train_gpt: %s does not take '%s'; see --help\n", row->name, argv[i]);
            return 2;
        }
    }
    return 0;
}

static int cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* ---- the text ---- */

typedef struct text {
    uint8_t *bytes;
    int64_t  count;
} text;

static bool append_file(text *t, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return false;
    uint8_t piece[65536];
    size_t  got;
    bool    good = true;
    while (good && (got = fread(piece, 1, sizeof piece, file)) > 0) {
        uint8_t *grown = realloc(t->bytes, (size_t)t->count + got);
        good           = grown != NULL;
        if (good) {
            memcpy(grown + t->count, piece, got);
            t->bytes = grown;
            t->count += (int64_t)got;
        }
    }
    good = good && !ferror(file);
    fclose(file);
    return good;
}

static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

/* Every regular file of a folder, by name. Links are left out: Debian's point at texts that are there already. */
static bool append_folder(text *t, const char *path)
{
    struct dirent **entries = NULL;
    int             count   = scandir(path, &entries, visible, alphasort);
    bool            good    = count >= 0;
    for (int i = 0; i < count; i++) {
        char        name[4096];
        struct stat status;
        snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
        if (good && lstat(name, &status) == 0 && S_ISREG(status.st_mode))
            good = append_file(t, name);
        free(entries[i]);
    }
    free(entries);
    return good;
}

static bool read_text(text *t, const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && (S_ISDIR(status.st_mode) ? append_folder(t, path) : append_file(t, path));
}

/* ---- training ---- */

typedef struct run {
    options    o;
    gpt_model *model;
    text       text;
    int64_t    train_count; /* bytes before this one are for training, the rest for validation */
    uint8_t   *tokens, *targets;
    uint64_t   random;
    FILE      *csv;
} run;

/* Sequence n of a batch starts at text byte `start`; its targets one later. */
static void take(run *r, int n, int64_t start)
{
    size_t context = (size_t)r->o.model.context;
    memcpy(r->tokens + (size_t)n * context, r->text.bytes + start, context);
    memcpy(r->targets + (size_t)n * context, r->text.bytes + start + 1, context);
}

static bool step_loss(run *r, bool backward, double *loss)
{
    int batch = r->o.model.batch, context = r->o.model.context;
    return gpt_forward(r->model, r->tokens, batch, context) &&
           gpt_loss(r->model, r->tokens, r->targets, batch, context, backward, loss);
}

/* The mean loss over the same places of the held-out text every time, spread evenly over it. */
static bool validate(run *r, double *mean)
{
    int64_t batch = r->o.model.batch, sequences = VALIDATION_BATCHES * batch;
    int64_t room  = r->text.count - r->train_count - r->o.model.context - 1;
    *mean         = 0;
    for (int64_t n = 0; n < sequences; n++) {
        take(r, (int)(n % batch), r->train_count + room * n / sequences);
        double loss;
        if (n % batch == batch - 1) {
            if (!step_loss(r, false, &loss))
                return false;
            *mean += loss / VALIDATION_BATCHES;
        }
    }
    return true;
}

static double progress_of(const run *r, long step, double elapsed)
{
    double by_steps = r->o.steps ? (double)step / (double)r->o.steps : 0;
    double by_clock = r->o.seconds > 0 ? elapsed / r->o.seconds : 0;
    return fmin(1.0, fmax(by_steps, by_clock));
}

/* Up over the first 20 steps, level, then down to a twentieth over the last two fifths. */
static float learning_rate(const run *r, long step, double progress)
{
    double warm = fmin(1.0, (double)(step + 1) / 20.0), cool = fmin(1.0, 0.05 + 0.95 * (1.0 - progress) / 0.4);
    return (float)(r->o.learning_rate * warm * cool);
}

static bool train(run *r)
{
    double begin = now(), loss = 0, sum = 0;
    long   tokens_per_step = (long)r->o.model.batch * r->o.model.context, since = 0;
    for (long step = 0;; step++) {
        double elapsed = now() - begin, progress = progress_of(r, step, elapsed);
        bool   last = progress >= 1.0;
        if (step > 0 && (step % PROGRESS_EVERY == 0 || last)) {
            printf("step %5ld   loss %.4f   %6.0f tokens/s   %5.1f s", step, since ? sum / (double)since : loss,
                   (double)(step * tokens_per_step) / elapsed, elapsed);
            sum   = 0;
            since = 0;
            double validation;
            if (step % VALIDATE_EVERY == 0 || last) {
                if (!validate(r, &validation))
                    return false;
                printf("   validation %.4f", validation);
            }
            putchar('\n');
            fflush(stdout);
        }
        if (last)
            return true;
        for (int n = 0; n < r->o.model.batch; n++)
            take(r, n, (int64_t)(gpt_uniform(&r->random) * (double)(r->train_count - r->o.model.context)));
        if (!step_loss(r, true, &loss))
            return false;
        gpt_adamw adamw = {learning_rate(r, step, progress), 0.9f, 0.95f, 1e-8f, 0.1f};
        gpt_update(r->model, &adamw, 1.0);
        if (r->csv)
            fprintf(r->csv, "%ld,%.9g\n", step, loss);
        sum += loss;
        since++;
    }
}

/* A model of bytes may write what no terminal should see: controls and broken UTF-8 become '?'. */
static void print_text(const uint8_t *bytes, int count)
{
    for (int i = 0; i < count;) {
        uint8_t first = bytes[i];
        int     more  = first >= 0xF0 && first <= 0xF4 ? 3 : first >= 0xE0 ? 2 : first >= 0xC2 ? 1 : 0;
        bool    valid = first == '\n' || (first >= 32 && first < 127) || (first >= 0xC2 && first <= 0xF4);
        for (int n = 1; n <= more; n++)
            valid = valid && i + n < count && bytes[i + n] >= 0x80 && bytes[i + n] <= 0xBF;
        if (valid)
            fwrite(bytes + i, 1, (size_t)more + 1, stdout);
        else
            putchar('?');
        i += valid ? more + 1 : 1;
    }
}

static bool write_sample(run *r)
{
    int        length = (int)strlen(r->o.prompt), count = (int)r->o.sample;
    uint8_t   *bytes = malloc((size_t)length + (size_t)count + 1);
    gpt_cache *cache = gpt_cache_create(r->model);
    if (!bytes || !cache) {
        free(bytes);
        snprintf(r->model->error, sizeof r->model->error, "not enough memory for a sample");
        return false;
    }
    memcpy(bytes, r->o.prompt, (size_t)length);
    double begin = now();
    bool   good  = gpt_generate(r->model, cache, bytes, length, count, (float)r->o.temperature, &r->random);
    if (good) {
        printf("\nsample, %d bytes at %.0f bytes/s:\n\n", count, count / (now() - begin));
        print_text(bytes, length + count);
        putchar('\n');
    }
    free(bytes);
    return good;
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "train_gpt: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    return 1;
}

static int run_all(run *r)
{
    const options *o = &r->o;
    if (!read_text(&r->text, o->text))
        return fail(o->text, "cannot be read; give another text with --text FILE");
    r->train_count = r->text.count / 10 * 9;
    if (r->text.count - r->train_count < o->model.context + 2)
        return fail(o->text, "is too short: a tenth of it, held out, must be longer than the context");
    if (o->loss_csv && !(r->csv = fopen(o->loss_csv, "w")))
        return fail(o->loss_csv, "cannot be written");
    if (r->csv)
        fputs("step,loss\n", r->csv);
    size_t tokens = (size_t)o->model.batch * (size_t)o->model.context;
    r->tokens     = malloc(tokens);
    r->targets    = malloc(tokens);
    char error[256];
    r->model = gpt_create(&o->model, error);
    if (!r->tokens || !r->targets || !r->model)
        return fail("no model", r->model ? "not enough memory" : error);
    printf("%lld bytes of text; %d layers, width %d, %d heads, context %d: %lld weights; batch %d, %d threads, %s attention\n",
           (long long)r->text.count, o->model.layers, o->model.width, o->model.heads, o->model.context,
           (long long)r->model->weights.count, o->model.batch, o->model.threads,
           o->model.attention == FLASH_ATTN_CPU ? "flash" : "reference");
    r->random = o->model.seed ^ 0x5DEECE66Du;
    if (!train(r) || (o->sample > 0 && !write_sample(r)))
        return fail("stopped", r->model->error);
    if (r->csv && (fflush(r->csv) != 0 || ferror(r->csv)))
        return fail(o->loss_csv, "could not be written");
    return 0;
}

int main(int argc, char **argv)
{
    run      r = {0};
    options *o = &r.o;
    *o = (options){.text = DEFAULT_TEXT, .prompt = "The ", .sample = 600, .learning_rate = 0.003, .temperature = 0.7};
    o->model = (gpt_config){.layers = 4, .width = 128, .context = 256, .batch = 4, .threads = cores(), .seed = 1};
    int asked = parse(argc, argv, o);
    if (asked) {
        fputs(asked == 1 ? help : "", stdout);
        return asked == 1 ? 0 : 2;
    }
    if (o->steps == 0 && o->seconds == 0)
        o->seconds = 60;
    if (o->model.heads == 0)
        o->model.heads = o->model.width / 32 > 0 ? o->model.width / 32 : 1;
    if (!*o->prompt)
        o->prompt = "\n";
    int status = run_all(&r);
    if (r.csv)
        fclose(r.csv);
    gpt_destroy(r.model);
    free(r.tokens);
    free(r.targets);
    free(r.text.bytes);
    return status;
}
