/* flashattn info: the devices of this machine, and the CPU's tier in use. */
#include "cli.h"
#include "json.h"
#include "options.h"
#include "peak.h"
#include "problem.h"

#include <string.h>

typedef struct info_flags {
    flash_attn_isa isa;
    int64_t        threads, read_bytes;
    bool           measure, json;
} info_flags;

static const cli_option info_options[] = {
    {"isa", "TIER", cli_parse_isa, offsetof(info_flags, isa), "as if the highest tier were this one"},
    {"threads", "N", cli_parse_count, offsetof(info_flags, threads), "as if a context asked for N threads"},
    {"measure", NULL, cli_parse_switch, offsetof(info_flags, measure),
     "also the peaks that these threads reach: multiply-adds, products of\nbfloat16, reading memory; half a second"},
    {"read-bytes", "BYTES", cli_parse_bytes, offsetof(info_flags, read_bytes),
     "with --measure: how much memory to read; default 256M"},
    {"json", NULL, cli_parse_switch, offsetof(info_flags, json), "print JSON"},
    {0},
};

static const cli_help info_help = {
    .command  = "info",
    .usage    = "[--measure] [--json]",
    .about    = "Print what this machine offers: processor, features, caches, the instruction-set tier\n"
                "and threads that a call uses, and the GPUs.",
    .examples = "  flashattn info\n"
                "  flashattn info --measure --threads 1\n"
                "  flashattn info --isa avx2 --json",
};

static const char *const tuning_names[]   = {"default", "measured", "foreign", "damaged"};
static const char *const tuning_meaning[] = {"the defaults ('flashattn tune' measures)", "measured on this machine",
                                             "the defaults: those stored are of another processor or version",
                                             "the defaults: the stored file is damaged"};

static void print_bytes(const char *what, int64_t bytes)
{
    if (bytes <= 0)
        printf("  %-10s not known\n", what);
    else if (bytes < 1 << 20)
        printf("  %-10s %.0f KiB\n", what, (double)bytes / (1 << 10));
    else if (bytes < 1 << 30)
        printf("  %-10s %.4g MiB\n", what, (double)bytes / (1 << 20));
    else
        printf("  %-10s %.1f GiB\n", what, (double)bytes / (1 << 30));
}

/* tiles: NULL: not said. */
static void print_device(const char *label, const flash_attn_device_info *info, const char *tiles)
{
    printf("%s: %s\n", label, info->name);
    printf("  %-10s %s\n", "tier", info->isa);
    printf("  %-10s %s\n", "features", info->features[0] ? info->features : "none");
    printf("  %-10s %d\n", "cores", info->num_cores);
    printf("  %-10s %d\n", "threads", info->num_threads);
    print_bytes("L1 data", info->l1_bytes);
    print_bytes("L2", info->l2_bytes);
    print_bytes("L3", info->l3_bytes);
    print_bytes("memory", info->memory_bytes);
    if (tiles)
        printf("  %-10s %s\n", "tiles", tiles);
}

static void write_device(cli_json *json, const char *type, int index, const flash_attn_device_info *info)
{
    json_open(json, NULL, '{');
    json_text(json, "type", type);
    json_whole(json, "index", index);
    json_text(json, "name", info->name);
    json_text(json, "isa", info->isa);
    json_text(json, "features", info->features);
    json_whole(json, "num_cores", info->num_cores);
    json_whole(json, "num_threads", info->num_threads);
    json_whole(json, "l1_bytes", info->l1_bytes);
    json_whole(json, "l2_bytes", info->l2_bytes);
    json_whole(json, "l3_bytes", info->l3_bytes);
    json_whole(json, "memory_bytes", info->memory_bytes);
    json_text(json, "tuning", tuning_names[info->tuning]);
    json_close(json, '}');
}

static int measure(const info_flags *flags, const flash_attn_device_info *info, cli_peaks *peaks)
{
    cli_pool *pool = cli_pool_create(info->num_threads);
    if (!pool)
        return cli_fail("info: %d threads are not to be had", info->num_threads);
    cli_measure_peaks(peaks, pool, 20, info->isa);
    bool read = cli_measure_read(peaks, pool, flags->read_bytes, 8);
    cli_pool_destroy(pool);
    return read ? CLI_GO_ON : cli_fail("info: no memory to read %lld bytes", (long long)flags->read_bytes);
}

static void print_peaks(const info_flags *flags, const flash_attn_device_info *info, const cli_peaks *peaks)
{
    printf("  measured at %d thread%s\n", info->num_threads, info->num_threads == 1 ? "" : "s");
    printf("  %-10s %.0f GFLOP/s (%s)\n", "float32", peaks->fma_gflops, peaks->fma_name);
    cli_bf16_peak bf16 = cli_bf16_peak_of(peaks);
    if (bf16.name)
        printf("  %-10s %.0f GFLOP/s (%s)\n", "bfloat16", bf16.gflops, bf16.name);
    printf("  %-10s %.1f GB/s (of %.0f MiB)\n", "read", peaks->read_gbps, (double)flags->read_bytes / (1 << 20));
}

static void write_peaks(cli_json *json, const info_flags *flags, const flash_attn_device_info *info,
                        const cli_peaks *peaks)
{
    json_open(json, "peaks", '{');
    json_whole(json, "threads", info->num_threads);
    json_text(json, "fma_name", peaks->fma_name);
    json_real(json, "fma_gflops", peaks->fma_gflops);
    json_real(json, "amx_gflops", peaks->amx_gflops);
    json_real(json, "bf16_gflops", peaks->bf16_gflops);
    json_whole(json, "read_bytes", flags->read_bytes);
    json_real(json, "read_gbps", peaks->read_gbps);
    json_close(json, '}');
}

/* The CPU, then every GPU up to the first that is not there; that one's message says why there are none. */
static int show(flash_attn_context *context, const info_flags *flags)
{
    bool                   as_json = flags->json;
    cli_peaks              peaks   = {0};
    cli_json               json    = {.file = stdout};
    flash_attn_device      device  = {.type = FLASH_ATTN_CPU};
    flash_attn_device_info info    = {0};
    int                    version = flash_attn_version();
    char                   text[32], label[32];
    flash_attn_status      status = flash_attn_get_device_info(context, device, &info);
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("info", status);
    if (flags->measure && measure(flags, &info, &peaks) != CLI_GO_ON)
        return CLI_REFUSED;
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    if (as_json) {
        json_open(&json, NULL, '{');
        json_text(&json, "schema", "flashattn.info/1");
        json_text(&json, "version", text);
        if (flags->measure)
            write_peaks(&json, flags, &info, &peaks);
        json_open(&json, "devices", '[');
        write_device(&json, "cpu", 0, &info);
    } else {
        printf("flashattn %s\n", text);
        print_device("cpu", &info, tuning_meaning[info.tuning]);
        if (flags->measure)
            print_peaks(flags, &info, &peaks);
    }
    device.type = FLASH_ATTN_CUDA;
    for (device.index = 0;; device.index++) {
        info = (flash_attn_device_info){0};
        if (flash_attn_get_device_info(context, device, &info) != FLASH_ATTN_OK)
            break;
        snprintf(label, sizeof label, "cuda:%d", device.index);
        as_json ? write_device(&json, "cuda", device.index, &info) : print_device(label, &info, NULL);
    }
    const char *why_none = device.index == 0 ? flash_attn_last_error() : NULL;
    if (as_json) {
        json_close(&json, ']');
        json_text(&json, "cuda_error", why_none);
        json_close(&json, '}');
    } else if (why_none)
        printf("cuda: none (%s)\n", why_none);
    return CLI_OK;
}

int cli_info(int argc, char **argv)
{
    info_flags          flags   = {.read_bytes = -1};
    const cli_group     group   = {"options", info_options, &flags};
    int                 go_on   = cli_parse(&info_help, &group, 1, argc, argv);
    cli_where_flags     where   = {.isa = flags.isa, .threads = flags.threads};
    flash_attn_context *context = NULL;
    if (go_on != CLI_GO_ON)
        return go_on;
    if (flags.read_bytes >= 0 && !flags.measure)
        return cli_fail_usage(&info_help, "--read-bytes needs --measure");
    if (flags.read_bytes < 0)
        flags.read_bytes = 256 << 20;
    if (flags.read_bytes < 1 << 20)
        return cli_fail_usage(&info_help, "--read-bytes %lld: expected 1M or more", (long long)flags.read_bytes);
    if (cli_make_context(&where, &context) != CLI_GO_ON)
        return CLI_REFUSED;
    int exit_status = show(context, &flags);
    flash_attn_destroy(context);
    return exit_status;
}
