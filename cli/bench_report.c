#include "bench_report.h"

#include "cli.h"
#include "gemm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char *pass_name(flash_attn_pass pass) { return pass == FLASH_ATTN_FORWARD ? "forward" : "backward"; }

static double gflops(const bench_row *row, const bench_times *times)
{
    return times->repeats ? row->flops / times->min_ms * 1e-6 : 0;
}

static double ratio(const bench_row *row)
{
    return row->standard.repeats && row->ours.repeats ? row->standard.min_ms / row->ours.min_ms : 0;
}

/* ---- how well a row scales ---- */

/* Of the first number of threads' speed, times how many times as many threads there are: 1 is perfect. */
typedef struct scaling {
    double efficiency; /* 0: not known */
    double of_peak;    /* of what the peak of that many threads leaves: a clock that falls does not count */
} scaling;

static bool uses_vdpbf16ps(const bench_row *row) { return strstr(row->kernel, "avx512-bf16") != NULL; }

static double peak_of(const bench_report *report, const bench_row *row)
{
    bool amx = strstr(row->kernel, "amx") != NULL;
    return amx ? report->peaks.amx_gflops : uses_vdpbf16ps(row) ? report->peaks.bf16_gflops : report->peaks.fma_gflops;
}

static scaling scaling_of(const bench_report *report, const bench_row *row)
{
    scaling            s     = {0};
    const bench_first *first = report->row < report->num_first ? &report->first[report->row] : NULL;
    double             speed = gflops(row, &row->ours), peak = peak_of(report, row);
    if (!first || !(first->gflops > 0) || !(first->peak > 0) || !(peak > 0))
        return s;
    s.efficiency = speed / first->gflops * report->first_threads / report->threads;
    s.of_peak    = speed / first->gflops * first->peak / peak;
    return s;
}

/* Keeps the rows at the first number of threads. Without memory the later ones say nothing. */
static void keep_first(bench_report *report, const bench_row *row)
{
    if (!report->scaling || report->threads != report->first_threads || report->row != report->num_first)
        return;
    bench_first *more = realloc(report->first, (size_t)(report->num_first + 1) * sizeof *more);
    if (!more)
        return;
    report->first                      = more;
    report->first[report->num_first++] = (bench_first){.gflops = gflops(row, &row->ours), .peak = peak_of(report, row)};
}

static int64_t peak_rss_bytes(void)
{
    struct rusage usage = {0};
    getrusage(RUSAGE_SELF, &usage);
    return (int64_t)usage.ru_maxrss * 1024;
}

static const char memory_meaning[] = "memory beyond q, k, v, o and gradients: workspace and LSE; "
                                     "standard: P (backward: P, dP, D)";

void bench_report_begin(bench_report *report, const flash_attn_device_info *device, const char *device_name,
                        const bench_options *options)
{
    int  version = flash_attn_version();
    char text[32], given[BENCH_OPTIONS_TEXT];
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    fprintf(report->table, "flashattn %s on %s (%s), tier %s\n", text, device_name, device->name, device->isa);
    fprintf(report->table,
            "standard attention: S = QK^T, P = softmax(S), O = PV, three passes in float32; products by %s\n",
            cli_gemm_name());
    if (bench_has_options(options))
        fprintf(report->table, "options, which standard attention is left out for: %s\n",
                bench_options_text(options, given));
    fprintf(report->table, "each result is checked before it is timed\nMB: %s\n", memory_meaning);
    if (report->json_file) {
        report->json   = (cli_json){.file = report->json_file};
        cli_json *json = &report->json;
        json_open(json, NULL, '{');
        json_text(json, "schema", "flashattn.bench/1");
        json_text(json, "version", text);
        json_text(json, "device", device_name);
        json_text(json, "device_name", device->name);
        json_text(json, "isa", device->isa);
        json_text(json, "features", device->features);
        json_bool(json, "quick", report->quick);
        json_text(json, "standard_products", cli_gemm_name());
        json_text(json, "standard_dtype", "f32");
        json_text(json, "memory_meaning", memory_meaning);
        json_open(json, "rows", '[');
    }
    if (report->csv)
        fputs("pass,dtype,batch,heads,heads_k,seqlen_q,seqlen_k,head_dim,causal,options,threads,kernel,right,error,"
              "tolerance,"
              "repeats,min_ms,median_ms,gflops,fma_peak_gflops,amx_peak_gflops,bf16_peak_gflops,standard_min_ms,"
              "standard_median_ms,standard_gflops,ratio_to_standard,memory_bytes,standard_memory_bytes,efficiency,"
              "efficiency_of_peak\n",
              report->csv);
}

/* What was best at the last number of threads. */
static void keep_peaks(bench_report *report)
{
    if (report->threads == 0)
        return;
    report->earlier[report->num_peaks].threads = report->threads;
    report->earlier[report->num_peaks++].peaks = report->peaks;
}

void bench_report_threads(bench_report *report, int threads, cli_peaks peaks)
{
    keep_peaks(report);
    report->threads       = threads;
    report->row           = 0;
    report->first_threads = report->first_threads ? report->first_threads : threads;
    report->peaks         = peaks;
    fprintf(report->table, "\nat %d thread%s: float32 peak %.0f GFLOP/s (%s)", threads, threads == 1 ? "" : "s",
            peaks.fma_gflops, peaks.fma_name);
    cli_bf16_peak bf16 = cli_bf16_peak_of(&peaks);
    if (bf16.name)
        fprintf(report->table, ", bfloat16 %s peak %.0f GFLOP/s", bf16.name, bf16.gflops);
    fprintf(report->table, "\n%-8s %-5s %4s %-6s %6s |%9s %9s %8s %5s %5s |%9s %8s |%7s |%8s %9s%s\n", "pass", "dtype",
            "d", "mask", "s", "min ms", "median", "GFLOP/s", "%FMA", peaks.bf16_gflops > 0 ? "%BF16" : "%AMX",
            "standard", "GFLOP/s", "speedup", "MB", "std MB", report->scaling ? " | eff.%  of peak" : "");
}

/* peak 0: it says nothing of this row. */
static void print_percent(FILE *table, double speed, double peak)
{
    if (peak > 0)
        fprintf(table, " %5.1f", 100 * speed / peak);
    else
        fprintf(table, " %5s", "-");
}

static void print_row(const bench_report *report, const bench_row *row)
{
    const bench_shape *shape = &row->shape;
    FILE              *table = report->table;
    char               length[24];
    snprintf(length, sizeof length, shape->seqlen_q == shape->seqlen_k ? "%lld" : "%lldx%lld",
             shape->seqlen_q == shape->seqlen_k ? (long long)shape->seqlen_k : (long long)shape->seqlen_q,
             (long long)shape->seqlen_k);
    fprintf(table, "%-8s %-5s %4lld %-6s %6s |", pass_name(row->pass), cli_dtype_name(shape->dtype),
            (long long)shape->head_dim, bench_mask_name(shape), length);
    if (!row->right) {
        fprintf(table, " WRONG: relative error %.2g (standard's %.2g), tolerance %.2g\n", row->error,
                row->standard_error, row->tolerance);
        return;
    }
    double speed = gflops(row, &row->ours);
    fprintf(table, "%9.3f %9.3f %8.1f", row->ours.min_ms, row->ours.median_ms, speed);
    print_percent(table, speed, uses_vdpbf16ps(row) ? 0 : report->peaks.fma_gflops);
    print_percent(table, speed, uses_vdpbf16ps(row) ? report->peaks.bf16_gflops : report->peaks.amx_gflops);
    fputs(" |", table);
    if (row->standard.repeats)
        fprintf(table, "%9.3f %8.1f |%6.2fx |%8.2f %9.1f", row->standard.min_ms, gflops(row, &row->standard),
                ratio(row), (double)row->ours_bytes * 1e-6, (double)row->standard_bytes * 1e-6);
    else
        fprintf(table, "%18s |%7s |%8.2f %9s", row->over_limit ? "over the limit" : "not asked for", "-",
                (double)row->ours_bytes * 1e-6, "-");
    scaling s = scaling_of(report, row);
    if (report->scaling && s.efficiency > 0)
        fprintf(table, " |%6.1f %8.1f", 100 * s.efficiency, 100 * s.of_peak);
    fputc('\n', table);
}

static void write_json_row(bench_report *report, const bench_row *row)
{
    const bench_shape *shape = &row->shape;
    cli_json          *json  = &report->json;
    char               options[BENCH_OPTIONS_TEXT];
    json_open(json, NULL, '{');
    json_text(json, "pass", pass_name(row->pass));
    json_text(json, "dtype", cli_dtype_name(shape->dtype));
    json_whole(json, "batch", shape->batch);
    json_whole(json, "heads", shape->heads);
    json_whole(json, "heads_k", shape->heads_k);
    json_whole(json, "seqlen_q", shape->seqlen_q);
    json_whole(json, "seqlen_k", shape->seqlen_k);
    json_whole(json, "head_dim", shape->head_dim);
    json_bool(json, "causal", shape->causal);
    json_text(json, "options", bench_options_text(&shape->options, options));
    json_whole(json, "threads", report->threads);
    json_text(json, "kernel", row->kernel);
    json_bool(json, "right", row->right);
    json_real(json, "error", row->error);
    json_real(json, "tolerance", row->tolerance);
    json_real(json, "flops", row->flops);
    json_whole(json, "repeats", row->ours.repeats);
    json_real(json, "min_ms", row->ours.min_ms);
    json_real(json, "median_ms", row->ours.median_ms);
    json_real(json, "gflops", gflops(row, &row->ours));
    json_real(json, "fma_peak_gflops", report->peaks.fma_gflops);
    json_text(json, "fma_peak_name", report->peaks.fma_name);
    json_real(json, "amx_peak_gflops", report->peaks.amx_gflops);
    json_real(json, "bf16_peak_gflops", report->peaks.bf16_gflops);
    json_whole(json, "memory_bytes", row->ours_bytes);
    if (row->standard.repeats) {
        json_open(json, "standard", '{');
        json_real(json, "min_ms", row->standard.min_ms);
        json_real(json, "median_ms", row->standard.median_ms);
        json_real(json, "gflops", gflops(row, &row->standard));
        json_real(json, "error", row->standard_error);
        json_close(json, '}');
    } else
        json_text(json, "standard", NULL);
    json_bool(json, "standard_over_memory_limit", row->over_limit);
    json_whole(json, "standard_memory_bytes", row->standard_bytes);
    json_real(json, "ratio_to_standard", ratio(row));
    json_real(json, "efficiency", scaling_of(report, row).efficiency);
    json_real(json, "efficiency_of_peak", scaling_of(report, row).of_peak);
    json_close(json, '}');
}

static void write_csv_row(bench_report *report, const bench_row *row)
{
    const bench_shape *shape = &row->shape;
    char               options[BENCH_OPTIONS_TEXT];
    fprintf(report->csv, "%s,%s,%lld,%lld,%lld,%lld,%lld,%lld,%d,%s,%d,%s,%d,%.4g,%.4g,", pass_name(row->pass),
            cli_dtype_name(shape->dtype), (long long)shape->batch, (long long)shape->heads, (long long)shape->heads_k,
            (long long)shape->seqlen_q, (long long)shape->seqlen_k, (long long)shape->head_dim, shape->causal,
            bench_options_text(&shape->options, options), report->threads, row->kernel, row->right, row->error,
            row->tolerance);
    fprintf(report->csv, "%d,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,", row->ours.repeats, row->ours.min_ms, row->ours.median_ms,
            gflops(row, &row->ours), report->peaks.fma_gflops, report->peaks.amx_gflops, report->peaks.bf16_gflops);
    if (row->standard.repeats)
        fprintf(report->csv, "%.6g,%.6g,%.6g,%.6g,", row->standard.min_ms, row->standard.median_ms,
                gflops(row, &row->standard), ratio(row));
    else
        fputs(",,,,", report->csv);
    scaling s = scaling_of(report, row);
    fprintf(report->csv, "%lld,%lld,%.4g,%.4g\n", (long long)row->ours_bytes, (long long)row->standard_bytes,
            s.efficiency, s.of_peak);
}

void bench_report_row(bench_report *report, const bench_row *row)
{
    keep_first(report, row);
    print_row(report, row);
    fflush(report->table);
    if (report->json_file)
        write_json_row(report, row);
    if (report->csv)
        write_csv_row(report, row);
    report->row++;
}

void bench_report_end(bench_report *report, int num_rows, int num_wrong)
{
    cli_json *json = &report->json;
    keep_peaks(report);
    free(report->first);
    report->first = NULL;
    fprintf(report->table, "\n%d rows, %d wrong; peak resident memory %.0f MB", num_rows, num_wrong,
            (double)peak_rss_bytes() * 1e-6);
    for (int i = 0; i < report->num_peaks; i++) {
        fprintf(report->table, "\npeaks seen at %d thread%s: float32 %.0f GFLOP/s", report->earlier[i].threads,
                report->earlier[i].threads == 1 ? "" : "s", report->earlier[i].peaks.fma_gflops);
        cli_bf16_peak bf16 = cli_bf16_peak_of(&report->earlier[i].peaks);
        if (bf16.name)
            fprintf(report->table, ", bfloat16 %s %.0f GFLOP/s", bf16.name, bf16.gflops);
    }
    fputc('\n', report->table);
    if (!report->json_file)
        return;
    json_close(json, ']');
    json_open(json, "peaks", '[');
    for (int i = 0; i < report->num_peaks; i++) {
        json_open(json, NULL, '{');
        json_whole(json, "threads", report->earlier[i].threads);
        json_real(json, "fma_gflops", report->earlier[i].peaks.fma_gflops);
        json_real(json, "amx_gflops", report->earlier[i].peaks.amx_gflops);
        json_real(json, "bf16_gflops", report->earlier[i].peaks.bf16_gflops);
        json_close(json, '}');
    }
    json_close(json, ']');
    json_whole(json, "num_rows", num_rows);
    json_whole(json, "num_wrong", num_wrong);
    json_whole(json, "peak_rss_bytes", peak_rss_bytes());
    json_close(json, '}');
}
