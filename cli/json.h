/* JSON to a file, written as it comes. Keys and their order are part of what docs/cli.md promises. */
#ifndef CLI_JSON_H
#define CLI_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct cli_json {
    FILE *file;
    int   depth;
    bool  filled[16]; /* something stands before, on this depth */
} cli_json;

/* `key` is NULL inside a list and at the top. Numbers that JSON does not know (NaN, Inf) are written as null. */
void json_open(cli_json *json, const char *key, char bracket);      /* '{' or '[' */
void json_close(cli_json *json, char bracket);                      /* '}' or ']'; a newline after the last */
void json_text(cli_json *json, const char *key, const char *value); /* NULL: null */
void json_whole(cli_json *json, const char *key, int64_t value);
void json_unsigned(cli_json *json, const char *key, uint64_t value);
void json_real(cli_json *json, const char *key, double value);
void json_bool(cli_json *json, const char *key, bool value);

#endif
