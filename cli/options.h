/*
 * Command-line options as tables. An option is a row: its name, how its value is read, where it goes, its help. A table
 * belongs to a struct; several commands may use one table with their own copy of the struct.
 */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "cli.h"

#include <stddef.h>

/* Read `text` into `field`; returns NULL, or what was expected ("a whole number from 0"). A switch has text NULL. */
typedef const char *(*cli_parser)(const char *text, void *field);

typedef struct cli_option {
    const char *name;  /* without dashes */
    const char *value; /* what the help calls the value: "L,R"; NULL: a switch */
    cli_parser  parse;
    size_t      offset; /* of the field in the table's struct */
    const char *help;
} cli_option;

/* Rows of a table, ended by a row with name NULL, and the struct they fill. */
typedef struct cli_group {
    const char       *title; /* of its part of the help: "options" */
    const cli_option *options;
    void             *target;
} cli_group;

typedef struct cli_help {
    const char *command;
    const char *usage;    /* what follows "flashattn <command>" */
    const char *about;    /* a paragraph */
    const char *examples; /* lines */
} cli_help;

/* Read the words into the groups' structs. Returns CLI_GO_ON, CLI_OK after --help, or CLI_REFUSED after a message. */
int cli_parse(const cli_help *help, const cli_group *groups, int num_groups, int argc, char **argv);

/* A mistake in how the options go together: the sentence, and where the help is. Returns CLI_REFUSED. */
int cli_fail_usage(const cli_help *help, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* ---- kinds of value ---- */

enum { CLI_LIST_LONGEST = 16 };

typedef struct cli_list {
    int     count; /* 0: not given */
    int64_t value[CLI_LIST_LONGEST];
} cli_list;

typedef struct cli_number {
    bool   given;
    double value;
} cli_number;

typedef struct cli_window {
    bool    given;
    int32_t left, right;
} cli_window;

typedef struct cli_device {
    bool              given;
    flash_attn_device device;
} cli_device;

typedef struct cli_dtype {
    bool             given;
    flash_attn_dtype dtype;
} cli_dtype;

const char *cli_parse_switch(const char *text, void *field);  /* bool */
const char *cli_parse_text(const char *text, void *field);    /* const char *, not empty */
const char *cli_parse_count(const char *text, void *field);   /* int64_t from 0 to 2^31 - 1 */
const char *cli_parse_parts(const char *text, void *field);   /* likewise from -1 */
const char *cli_parse_seed(const char *text, void *field);    /* uint64_t */
const char *cli_parse_number(const char *text, void *field);  /* cli_number, finite */
const char *cli_parse_bytes(const char *text, void *field);   /* int64_t: 512M, 2G */
const char *cli_parse_counts(const char *text, void *field);  /* cli_list of numbers from 1: 512,1024 */
const char *cli_parse_dtype(const char *text, void *field);   /* cli_dtype */
const char *cli_parse_dtypes(const char *text, void *field);  /* cli_list of flash_attn_dtype: f32,bf16 */
const char *cli_parse_isa(const char *text, void *field);     /* flash_attn_isa */
const char *cli_parse_device(const char *text, void *field);  /* cli_device: cpu, reference, cuda, cuda:1 */
const char *cli_parse_window(const char *text, void *field);  /* cli_window: L,R */
const char *cli_parse_dropout(const char *text, void *field); /* flash_attn_dropout: p,seed,offset */

#endif
