/* What the commands of `flashattn` share: exit statuses, messages, the list of commands. */
#ifndef CLI_H
#define CLI_H

#include "flashattn.h"

#include <stdio.h>

/* Exit statuses. A command's own parser may also answer CLI_GO_ON. */
enum {
    CLI_GO_ON        = -1,
    CLI_OK           = 0,
    CLI_CHECK_FAILED = 1,
    CLI_REFUSED      = 2 /* wrong usage, bad input, or a call that the library refused */
};

typedef struct cli_command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the first word after the command; returns an exit status */
} cli_command;

int cli_info(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_check(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_explain(int argc, char **argv);
int cli_compile(int argc, char **argv);
int cli_tune(int argc, char **argv);

/* Print "flashattn: <sentence>" to stderr; returns CLI_REFUSED. */
int cli_fail(const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;

/* Print the library's last error to stderr; returns CLI_REFUSED. `what` says what was tried: "forward". */
int cli_fail_library(const char *what, flash_attn_status status);

/* The word of `words` nearest to `word`, if it is near enough to be a typing slip; otherwise NULL. */
const char *cli_nearest(const char *word, const char *const *words, int count);

/* Names of the library's enums as the command line spells them; "?" for what is unknown. */
const char *cli_dtype_name(flash_attn_dtype dtype);
const char *cli_device_name(flash_attn_device device); /* without its index */
const char *cli_isa_name(flash_attn_isa isa);

/* Whether two names, of files that are there or not yet, are one file. */
bool cli_same_file(const char *x, const char *y);

/* Whether an option's file can be put there, to know it before anything is computed. CLI_GO_ON or CLI_REFUSED. */
int cli_check_place(const char *option, const char *path);

/* A file that is written beside its place, and takes it when all is known to be good. A link's place is where it leads; what is no plain file (a device, a pipe) has no
 * beside and is written directly. */
typedef struct cli_staged {
    char place[4096], path[4096 + 32];
} cli_staged;
bool cli_stage(const char *path, cli_staged *staged); /* false: the name is too long */
bool cli_take_place(const cli_staged *staged);        /* errno says why not */
void cli_drop(const cli_staged *staged);

/* Close `file` and say whether all that was written arrived. */
bool cli_close(FILE *file);

/* The same of a staged file, which then takes its place if that is wanted and all arrived, and else is taken away. */
bool cli_finish(FILE *file, const cli_staged *staged, bool wanted);

#endif
