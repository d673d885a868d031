/* The bench's results as a table, JSON and CSV. */
#ifndef CLI_BENCH_REPORT_H
#define CLI_BENCH_REPORT_H

#include "bench_shape.h"
#include "json.h"
#include "options.h"
#include "peak.h"

#include <stdio.h>

/* A row at the first number of threads, to which the later ones' are compared. */
typedef struct bench_first {
    double gflops; /* 0: not timed */
    double peak;   /* of what the kernel multiplies with, GFLOP/s */
} bench_first;

typedef struct bench_report {
    FILE        *table, *json_file, *csv; /* json_file, csv: NULL if not wanted */
    cli_json     json;
    bool         quick;
    cli_peaks    peaks; /* at the threads of the rows that follow; the caller may improve them */
    int          threads;
    bool         scaling; /* rows come at several numbers of threads: say how well they scale */
    int          row;     /* of the rows at these threads */
    int          first_threads, num_first;
    bench_first *first;     /* [num_first], by row */
    int          num_peaks; /* those of earlier numbers of threads */
    struct {
        int       threads;
        cli_peaks peaks;
    } earlier[CLI_LIST_LONGEST];
} bench_report;

/* options: of all rows. */
void bench_report_begin(bench_report *report, const flash_attn_device_info *device, const char *device_name,
                        const bench_options *options);

/* The rows that follow are at so many threads, with these peaks so far. At most CLI_LIST_LONGEST calls. */
void bench_report_threads(bench_report *report, int threads, cli_peaks peaks);

void bench_report_row(bench_report *report, const bench_row *row);

/* num_wrong: rows whose results were wrong. */
void bench_report_end(bench_report *report, int num_rows, int num_wrong);

#endif
