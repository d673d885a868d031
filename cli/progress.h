/* A progress bar on stderr; nothing at all where stderr is no terminal. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_progress {
    bool    shown; /* stderr is a terminal */
    int64_t total;
    double  start_s;
} cli_progress;

cli_progress cli_progress_start(int64_t total);
void         cli_progress_show(const cli_progress *progress, int64_t done, const char *what);
void         cli_progress_clear(const cli_progress *progress); /* before other output, and at the end */

#endif
