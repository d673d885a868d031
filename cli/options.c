#include "options.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_OPTIONS = 96 };

static void print_options(const cli_group *group)
{
    printf("\n%s:\n", group->title);
    for (const cli_option *option = group->options; option->name; option++) {
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", option->name, option->value ? " " : "",
                 option->value ? option->value : "");
        /* A newline in a help text goes on under its own column. */
        const char *line = option->help;
        printf("  %-24s ", left);
        for (const char *end; (end = strchr(line, '\n')) != NULL; line = end + 1)
            printf("%.*s\n%27s", (int)(end - line), line, "");
        puts(line);
    }
}

static int print_help(const cli_help *help, const cli_group *groups, int num_groups)
{
    printf("usage: flashattn %s %s\n\n%s\n", help->command, help->usage, help->about);
    for (int g = 0; g < num_groups; g++)
        print_options(&groups[g]);
    printf("\nexamples:\n%s\n", help->examples);
    return CLI_OK;
}

int cli_fail_usage(const cli_help *help, const char *format, ...)
{
    char    sentence[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return cli_fail("%s: %s ('flashattn %s --help' says more)", help->command, sentence, help->command);
}

static int unknown_option(const cli_help *help, const cli_group *groups, int num_groups, const char *name)
{
    const char *names[MOST_OPTIONS] = {"help"};
    int         count               = 1;
    for (int g = 0; g < num_groups; g++)
        for (const cli_option *option = groups[g].options; option->name && count < MOST_OPTIONS; option++)
            names[count++] = option->name;
    const char *nearest = cli_nearest(name, names, count);
    if (nearest)
        return cli_fail_usage(help, "unknown option '--%s'; did you mean '--%s'?", name, nearest);
    return cli_fail_usage(help, "unknown option '--%s'", name);
}

/* Find an option by name; *position counts over all groups. NULL: unknown. */
static const cli_option *find_option(const cli_group *groups, int num_groups, const char *name, int *group,
                                     int *position)
{
    *position = 0;
    for (*group = 0; *group < num_groups; ++*group)
        for (const cli_option *option = groups[*group].options; option->name; option++, ++*position)
            if (strcmp(name, option->name) == 0)
                return option;
    return NULL;
}

int cli_parse(const cli_help *help, const cli_group *groups, int num_groups, int argc, char **argv)
{
    bool given[MOST_OPTIONS] = {false};
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return print_help(help, groups, num_groups);
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0)
            return cli_fail_usage(help, "'%s' is not an option; options begin with '--'", argv[i]);
        char        name[64];
        const char *equals = strchr(argv[i], '=');
        size_t      length = equals ? (size_t)(equals - argv[i] - 2) : strlen(argv[i] + 2);
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1), argv[i] + 2);

        int               group, position;
        const cli_option *option = find_option(groups, num_groups, name, &group, &position);
        if (!option)
            return unknown_option(help, groups, num_groups, name);
        if (given[position])
            return cli_fail_usage(help, "--%s is given twice", name);
        given[position] = true;

        const char *value = equals ? equals + 1 : NULL;
        if (!option->value && value)
            return cli_fail_usage(help, "--%s takes no value, and '%s' was given", name, value);
        if (option->value && !value) {
            if (i + 1 == argc)
                return cli_fail_usage(help, "--%s needs a value: %s", name, option->value);
            value = argv[++i];
        }
        const char *expected = option->parse(value, (char *)groups[group].target + option->offset);
        if (expected)
            return cli_fail_usage(help, "--%s %s: expected %s", name, value, expected);
    }
    return CLI_GO_ON;
}
