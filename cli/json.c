#include "json.h"

#include <inttypes.h>
#include <math.h>

/* Comma, line, indent and key before a value. */
static void lead(cli_json *json, const char *key)
{
    if (json->filled[json->depth])
        fputc(',', json->file);
    if (json->depth > 0)
        fprintf(json->file, "\n%*s", 2 * json->depth, "");
    json->filled[json->depth] = true;
    if (key)
        fprintf(json->file, "\"%s\": ", key);
}

void json_open(cli_json *json, const char *key, char bracket)
{
    lead(json, key);
    fputc(bracket, json->file);
    json->filled[++json->depth] = false;
}

void json_close(cli_json *json, char bracket)
{
    bool filled = json->filled[json->depth--];
    if (filled)
        fprintf(json->file, "\n%*s", 2 * json->depth, "");
    fputc(bracket, json->file);
    if (json->depth == 0)
        fputc('\n', json->file);
}

void json_text(cli_json *json, const char *key, const char *value)
{
    lead(json, key);
    if (!value) {
        fputs("null", json->file);
        return;
    }
    fputc('"', json->file);
    for (const unsigned char *c = (const unsigned char *)value; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(json->file, "\\%c", *c);
        else if (*c < 0x20)
            fprintf(json->file, "\\u%04x", *c);
        else
            fputc(*c, json->file);
    }
    fputc('"', json->file);
}

void json_whole(cli_json *json, const char *key, int64_t value)
{
    lead(json, key);
    fprintf(json->file, "%" PRId64, value);
}

void json_unsigned(cli_json *json, const char *key, uint64_t value)
{
    lead(json, key);
    fprintf(json->file, "%" PRIu64, value);
}

void json_real(cli_json *json, const char *key, double value)
{
    lead(json, key);
    if (isfinite(value))
        fprintf(json->file, "%.9g", value);
    else
        fputs("null", json->file);
}

void json_bool(cli_json *json, const char *key, bool value)
{
    lead(json, key);
    fputs(value ? "true" : "false", json->file);
}
