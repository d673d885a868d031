/* How the values of options are read. */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A whole number at *text within bounds; moves *text behind it. */
static bool read_whole(const char **text, int64_t least, int64_t most, int64_t *value)
{
    char *end;
    if (!isdigit((unsigned char)**text) && **text != '-')
        return false;
    errno       = 0;
    long long v = strtoll(*text, &end, 10);
    if (errno || end == *text || v < least || v > most)
        return false;
    *text  = end;
    *value = v;
    return true;
}

static bool read_real(const char **text, double *value)
{
    char *end;
    if (isspace((unsigned char)**text))
        return false;
    *value = strtod(*text, &end);
    if (end == *text || !isfinite(*value))
        return false;
    *text = end;
    return true;
}

const char *cli_parse_switch(const char *text, void *field)
{
    (void)text;
    *(bool *)field = true;
    return NULL;
}

const char *cli_parse_text(const char *text, void *field)
{
    *(const char **)field = text;
    return *text ? NULL : "a word that is not empty";
}

const char *cli_parse_count(const char *text, void *field)
{
    return read_whole(&text, 0, INT32_MAX, field) && !*text ? NULL : "a whole number from 0 to 2147483647";
}

const char *cli_parse_parts(const char *text, void *field)
{
    return read_whole(&text, -1, INT32_MAX, field) && !*text ? NULL : "a whole number from -1 to 2147483647";
}

const char *cli_parse_seed(const char *text, void *field)
{
    char *end;
    errno                   = 0;
    unsigned long long seed = strtoull(text, &end, 0);
    *(uint64_t *)field      = seed;
    bool is_whole           = isdigit((unsigned char)*text) && !*end && !errno;
    return is_whole ? NULL : "a whole number from 0 to 2^64 - 1";
}

const char *cli_parse_number(const char *text, void *field)
{
    cli_number *number = field;
    number->given      = true;
    if (!read_real(&text, &number->value) || *text)
        return "a finite number";
    /* The library takes floats: 1e-99 must not turn into 0, which means something else. */
    float single = (float)number->value;
    return isfinite(single) && (single != 0) == (number->value != 0) ? NULL : "a number within float32's range";
}

const char *cli_parse_bytes(const char *text, void *field)
{
    static const char *expected = "a number of bytes such as 512M or 2G";
    int64_t            value;
    if (!read_whole(&text, 0, INT64_MAX, &value))
        return expected;
    int shift = *text == 'K' ? 10 : *text == 'M' ? 20 : *text == 'G' ? 30 : *text == 'T' ? 40 : 0;
    if (text[shift > 0] != '\0' || value > INT64_MAX >> shift)
        return expected;
    *(int64_t *)field = value << shift;
    return NULL;
}

const char *cli_parse_counts(const char *text, void *field)
{
    cli_list *list = field;
    for (list->count = 0; list->count < CLI_LIST_LONGEST; text++) {
        if (!read_whole(&text, 1, INT32_MAX, &list->value[list->count++]))
            break;
        if (!*text)
            return NULL;
        if (*text != ',')
            break;
    }
    return "at most 16 whole numbers from 1, separated by commas";
}

/* The dtype named by the first `length` characters of text; false: none. */
static bool read_dtype(const char *text, size_t length, flash_attn_dtype *dtype)
{
    static const flash_attn_dtype all[] = {FLASH_ATTN_F32, FLASH_ATTN_F16, FLASH_ATTN_BF16, FLASH_ATTN_F8E4M3};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const char *name = cli_dtype_name(all[i]);
        if (strlen(name) == length && strncmp(text, name, length) == 0) {
            *dtype = all[i];
            return true;
        }
    }
    return false;
}

const char *cli_parse_dtype(const char *text, void *field)
{
    cli_dtype *choice = field;
    choice->given     = true;
    return read_dtype(text, strlen(text), &choice->dtype) ? NULL : "f32, f16, bf16 or f8e4m3";
}

const char *cli_parse_dtypes(const char *text, void *field)
{
    cli_list *list = field;
    for (list->count = 0; list->count < CLI_LIST_LONGEST; text++) {
        size_t           length = strcspn(text, ",");
        flash_attn_dtype dtype;
        if (!read_dtype(text, length, &dtype) || dtype == FLASH_ATTN_F8E4M3)
            break;
        list->value[list->count++] = dtype;
        text += length;
        if (!*text)
            return NULL;
    }
    return "some of f32, f16 and bf16, separated by commas";
}

const char *cli_parse_isa(const char *text, void *field)
{
    for (int isa = FLASH_ATTN_ISA_AUTO; isa <= FLASH_ATTN_ISA_AVX512_BF16; isa++)
        if (strcmp(text, cli_isa_name((flash_attn_isa)isa)) == 0) {
            *(flash_attn_isa *)field = (flash_attn_isa)isa;
            return NULL;
        }
    return "auto, scalar, neon, neon-bf16, avx2, avx512, avx512-bf16, amx or amx-fp16";
}

const char *cli_parse_device(const char *text, void *field)
{
    cli_device *choice = field;
    int64_t     index  = 0;
    choice->given      = true;
    if (strcmp(text, "cpu") == 0)
        choice->device.type = FLASH_ATTN_CPU;
    else if (strcmp(text, "reference") == 0)
        choice->device.type = FLASH_ATTN_REFERENCE;
    else if (strncmp(text, "cuda", 4) == 0 && (text[4] == '\0' || text[4] == ':')) {
        const char *number = text + 5;
        if (text[4] == ':' && (!read_whole(&number, 0, INT32_MAX, &index) || *number))
            return "cuda:N with N from 0";
        choice->device.type = FLASH_ATTN_CUDA;
    } else
        return "cpu, reference, cuda or cuda:N";
    choice->device.index = (int32_t)index;
    return NULL;
}

const char *cli_parse_window(const char *text, void *field)
{
    cli_window *window = field;
    int64_t     left, right;
    window->given = true;
    if (!read_whole(&text, -1, INT32_MAX, &left) || *text++ != ',' || !read_whole(&text, -1, INT32_MAX, &right) ||
        *text)
        return "L,R: keys to the left and to the right, -1 for no limit";
    window->left  = (int32_t)left;
    window->right = (int32_t)right;
    return NULL;
}

const char *cli_parse_dropout(const char *text, void *field)
{
    flash_attn_dropout *dropout = field;
    double              p;
    char                part[64];
    const char         *expected = "p[,seed[,offset]]: a probability and two whole numbers from 0";
    if (!read_real(&text, &p) || (*text && *text != ',') || (p != 0 && (float)p == 0))
        return expected;
    dropout->p           = (float)p;
    uint64_t *numbers[2] = {&dropout->seed, &dropout->offset};
    for (int i = 0; i < 2 && *text; i++) {
        size_t length = strcspn(++text, ",");
        if (length >= sizeof part)
            return expected;
        memcpy(part, text, length);
        part[length] = '\0';
        if (cli_parse_seed(part, numbers[i]))
            return expected;
        text += length;
    }
    return *text ? expected : NULL;
}
