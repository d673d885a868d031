/* flashattn info: the devices of this machine, and the CPU's tier in use. */
#include "cli.h"
#include "json.h"
#include "options.h"
#include "problem.h"

typedef struct info_flags {
    flash_attn_isa isa;
    int64_t        threads;
    bool           json;
} info_flags;

static const cli_option info_options[] = {
    {"isa", "TIER", cli_parse_isa, offsetof(info_flags, isa), "as if the highest tier were this one"},
    {"threads", "N", cli_parse_count, offsetof(info_flags, threads), "as if a context asked for N threads"},
    {"json", NULL, cli_parse_switch, offsetof(info_flags, json), "print JSON"},
    {0},
};

static const cli_help info_help = {
    .command  = "info",
    .usage    = "[--json]",
    .about    = "Print what this machine offers: processor, features, caches, the instruction-set tier\n"
                "and threads that a call uses, and the GPUs.",
    .examples = "  flashattn info\n"
                "  flashattn info --isa avx2 --json",
};

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

static void print_device(const char *label, const flash_attn_device_info *info)
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
    json_close(json, '}');
}

/* The CPU, then every GPU up to the first that is not there; that one's message says why there are none. */
static int show(flash_attn_context *context, bool as_json)
{
    cli_json               json    = {.file = stdout};
    flash_attn_device      device  = {.type = FLASH_ATTN_CPU};
    flash_attn_device_info info    = {0};
    int                    version = flash_attn_version();
    char                   text[32], label[32];
    flash_attn_status      status = flash_attn_get_device_info(context, device, &info);
    if (status != FLASH_ATTN_OK)
        return cli_fail_library("info", status);
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    if (as_json) {
        json_open(&json, NULL, '{');
        json_text(&json, "schema", "flashattn.info/1");
        json_text(&json, "version", text);
        json_open(&json, "devices", '[');
        write_device(&json, "cpu", 0, &info);
    } else {
        printf("flashattn %s\n", text);
        print_device("cpu", &info);
    }
    device.type = FLASH_ATTN_CUDA;
    for (device.index = 0;; device.index++) {
        info = (flash_attn_device_info){0};
        if (flash_attn_get_device_info(context, device, &info) != FLASH_ATTN_OK)
            break;
        snprintf(label, sizeof label, "cuda:%d", device.index);
        as_json ? write_device(&json, "cuda", device.index, &info) : print_device(label, &info);
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
    info_flags          flags   = {0};
    const cli_group     group   = {"options", info_options, &flags};
    int                 go_on   = cli_parse(&info_help, &group, 1, argc, argv);
    cli_where_flags     where   = {.isa = flags.isa, .threads = flags.threads};
    flash_attn_context *context = NULL;
    if (go_on != CLI_GO_ON)
        return go_on;
    if (cli_make_context(&where, &context) != CLI_GO_ON)
        return CLI_REFUSED;
    int exit_status = show(context, flags.json);
    flash_attn_destroy(context);
    return exit_status;
}
