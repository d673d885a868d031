/* flashattn: the command line of the library. Finds the command and hands it the rest. */
#include "cli.h"
#include "options.h"

#include <signal.h>
#include <string.h>

static const cli_command commands[] = {
    {"info", "what this machine offers and what a call would use", cli_info},
    {"run", "attention, and its gradients, on .npy files", cli_run},
    {"check", "compare every kind of call with the reference, on this machine", cli_check},
    {"bench", "time standard attention against the library", cli_bench},
    {"explain", "what a call would run, without running it", cli_explain},
    {"tune", "measure which tiles are fastest on this machine, and keep them", cli_tune},
    {"compile", "build GPU kernels ahead, into a folder", cli_compile},
};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *to)
{
    fputs("flashattn: exact attention, fast, in C\n"
          "\n"
          "usage: flashattn COMMAND [options]\n"
          "\n"
          "commands:\n",
          to);
    for (int i = 0; i < NUM_COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs("\n"
          "  flashattn COMMAND --help    a command's options, with examples\n"
          "  flashattn --version         the version\n"
          "\n"
          "examples:\n"
          "  flashattn info\n"
          "  flashattn run --q q.npy --k k.npy --v v.npy --causal --o o.npy\n"
          "  flashattn bench --quick\n"
          "\n"
          "exit status: 0 all is well; 1 a check failed; 2 wrong usage, bad input or a refused call\n",
          to);
}

static int print_version(void)
{
    int version = flash_attn_version();
    printf("flashattn %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    return CLI_OK;
}

static int unknown(const char *word)
{
    const char *words[NUM_COMMANDS + 2] = {"--help", "--version"};
    for (int i = 0; i < NUM_COMMANDS; i++)
        words[i + 2] = commands[i].name;
    const char *nearest = cli_nearest(word, words, NUM_COMMANDS + 2);
    if (nearest)
        return cli_fail("unknown command '%s'; did you mean '%s'?", word, nearest);
    return cli_fail("unknown command '%s'; 'flashattn --help' lists them", word);
}

static int run_command(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return CLI_REFUSED;
    }
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0)
        return print_version();
    int         help = strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0;
    const char *name = help && argc > 2 ? argv[2] : word;
    if (help && argc == 2) {
        print_help(stdout);
        return CLI_OK;
    }
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (strcmp(name, commands[i].name) == 0) {
            static char help_word[] = "--help";
            char       *only_help[] = {help_word, NULL};
            return help ? commands[i].run(1, only_help) : commands[i].run(argc - 2, argv + 2);
        }
    return unknown(name);
}

int main(int argc, char **argv)
{
    signal(SIGXFSZ, SIG_IGN); /* a file over the limit is an error of a write, which says so */
    int status = run_command(argc, argv);
    return fflush(stdout) != 0 && status == CLI_OK ? cli_fail("standard output could not be written") : status;
}
