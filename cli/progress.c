#include "progress.h"

#include "peak.h"

#include <stdio.h>
#include <unistd.h>

cli_progress cli_progress_start(int64_t total)
{
    return (cli_progress){.shown = isatty(STDERR_FILENO), .total = total > 0 ? total : 1, .start_s = cli_seconds()};
}

void cli_progress_show(const cli_progress *progress, int64_t done, const char *what)
{
    enum { WIDTH = 30 };
    static const char full[] = "##############################", empty[] = "..............................";
    if (!progress->shown)
        return;
    int filled = (int)(WIDTH * done / progress->total);
    fprintf(stderr, "\r\033[K[%.*s%.*s] %lld/%lld %.0f s  %.70s", filled, full, WIDTH - filled, empty, (long long)done,
            (long long)progress->total, cli_seconds() - progress->start_s, what);
    fflush(stderr);
}

void cli_progress_clear(const cli_progress *progress)
{
    if (progress->shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}
