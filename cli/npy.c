#include "npy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAGIC_BYTES = 6, LONGEST_HEADER = 1 << 16, LONGEST_DESCR = 32 };
static const unsigned char magic[MAGIC_BYTES] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

/* The first name of each type is the one that is written. */
static const struct {
    const char *descr;
    npy_type    type;
} descrs[] = {
    {"<f4", NPY_F32},        {"<f2", NPY_F16},  {"<V2", NPY_RAW16}, {"|V2", NPY_RAW16},
    {"bfloat16", NPY_RAW16}, {"|V1", NPY_RAW8}, {"<V1", NPY_RAW8},  {"float8_e4m3fn", NPY_RAW8},
    {"<u2", NPY_U16},        {"|u1", NPY_U8},   {"<i4", NPY_I32},   {"<i8", NPY_I64},
};
enum { NUM_DESCRS = sizeof descrs / sizeof descrs[0] };

size_t npy_type_bytes(npy_type type)
{
    switch (type) {
    case NPY_RAW8:
    case NPY_U8: return 1;
    case NPY_F16:
    case NPY_RAW16:
    case NPY_U16: return 2;
    case NPY_F32:
    case NPY_I32: return 4;
    case NPY_I64: return 8;
    }
    return 0;
}

size_t npy_bytes(const npy_array *array) { return (size_t)array->count * npy_type_bytes(array->type); }

const char *npy_type_name(npy_type type)
{
    for (int i = 0; i < NUM_DESCRS; i++)
        if (descrs[i].type == type)
            return descrs[i].descr;
    return "?";
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static bool
fail(char error[NPY_ERROR_BYTES], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, NPY_ERROR_BYTES, format, arguments);
    va_end(arguments);
    return false;
}

/* ---- the header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } ---- */

typedef struct header {
    char    descr[LONGEST_DESCR];
    bool    fortran_order;
    int     ndim;
    int64_t shape[NPY_MOST_DIMS];
} header;

static void skip_space(const char **at)
{
    while (**at == ' ' || **at == '\t' || **at == '\n' || **at == '\r')
        ++*at;
}

/* The character c, after space. */
static bool take(const char **at, char c)
{
    skip_space(at);
    if (**at != c)
        return false;
    ++*at;
    return true;
}

static bool take_string(const char **at, char *text, size_t text_bytes)
{
    skip_space(at);
    char quote = **at;
    if (quote != '\'' && quote != '"')
        return false;
    const char *end = strchr(++*at, quote);
    if (!end || (size_t)(end - *at) >= text_bytes)
        return false;
    memcpy(text, *at, (size_t)(end - *at));
    text[end - *at] = '\0';
    *at             = end + 1;
    return true;
}

static bool take_bool(const char **at, bool *value)
{
    skip_space(at);
    *value            = strncmp(*at, "True", 4) == 0;
    const char *word  = *value ? "True" : "False";
    bool        there = strncmp(*at, word, strlen(word)) == 0;
    if (there)
        *at += strlen(word);
    return there;
}

/* (), (3,), (3, 4) or (3, 4, ); Python 2 wrote 3L. */
static bool take_shape(const char **at, header *h)
{
    if (!take(at, '('))
        return false;
    for (h->ndim = 0; !take(at, ')');) {
        if (h->ndim == NPY_MOST_DIMS || **at < '0' || **at > '9')
            return false;
        char *end;
        errno         = 0;
        long long dim = strtoll(*at, &end, 10);
        if (errno)
            return false;
        h->shape[h->ndim++] = dim;
        *at                 = end + (*end == 'L');
        if (!take(at, ',')) {
            skip_space(at);
            if (**at != ')')
                return false;
        }
    }
    return true;
}

static bool parse_header(const char *text, header *h, const char *path, char error[NPY_ERROR_BYTES])
{
    static const char *const keys[3] = {"descr", "fortran_order", "shape"};
    bool                     seen[3] = {false};
    if (!take(&text, '{'))
        return fail(error, "%s: the header is not a dictionary", path);
    while (!take(&text, '}')) {
        char key[LONGEST_DESCR];
        int  k = 0;
        if (!take_string(&text, key, sizeof key) || !take(&text, ':'))
            return fail(error, "%s: the header is not a dictionary of descr, fortran_order and shape", path);
        while (k < 3 && strcmp(key, keys[k]) != 0)
            k++;
        if (k == 3 || seen[k])
            return fail(error, "%s: the header's key '%s' is %s", path, key, k == 3 ? "not known" : "there twice");
        seen[k] = true;
        if (k == 0 && !take_string(&text, h->descr, sizeof h->descr))
            return fail(error, "%s: the header's descr is not a plain type; a structured array holds no tensor", path);
        if (k == 1 && !take_bool(&text, &h->fortran_order))
            return fail(error, "%s: the header's fortran_order is neither True nor False", path);
        if (k == 2 && !take_shape(&text, h))
            return fail(error, "%s: the header's shape is not a tuple of at most %d whole numbers", path,
                        NPY_MOST_DIMS);
        if (!take(&text, ',')) {
            skip_space(&text);
            if (*text != '}')
                return fail(error, "%s: the header's dictionary does not end", path);
        }
    }
    skip_space(&text);
    if (*text)
        return fail(error, "%s: the header goes on behind its dictionary", path);
    for (int k = 0; k < 3; k++)
        if (!seen[k])
            return fail(error, "%s: the header has no '%s'", path, keys[k]);
    return true;
}

static bool find_type(char *descr, npy_type *type, const char *path, char error[NPY_ERROR_BYTES])
{
    for (int i = 0; i < NUM_DESCRS; i++)
        if (strcmp(descr, descrs[i].descr) == 0) {
            *type = descrs[i].type;
            return true;
        }
    for (char *c = descr; *c; c++) /* it is shown on a terminal */
        if (*c < 0x20 || *c > 0x7e)
            *c = '?';
    if (descr[0] == '>')
        return fail(error, "%s: big-endian '%s'; expected little-endian (in NumPy: a.astype('<%s'))", path, descr,
                    descr + 1);
    if (strcmp(descr, "<f8") == 0)
        return fail(error,
                    "%s: '<f8' (float64) has more digits than attention uses; expected '<f4', '<f2' or bfloat16 "
                    "(in NumPy: a.astype('<f4'))",
                    path);
    return fail(error,
                "%s: elements are '%s'; expected '<f4', '<f2', '<V2' (bfloat16), '|V1' (float8), '<u2' or '|u1' in a tensor, "
                "'<i4' or '<i8' in a list of lengths, pages or slices",
                path, descr);
}

/* ---- the file ---- */

/* Magic, version and the header's text, which is malloc'ed and ends with a zero. NULL on failure. */
static char *read_header(FILE *file, const char *path, char error[NPY_ERROR_BYTES])
{
    unsigned char start[MAGIC_BYTES + 2], size[4] = {0};
    if (fread(start, 1, sizeof start, file) != sizeof start || memcmp(start, magic, MAGIC_BYTES) != 0) {
        fail(error, "%s: not a .npy file", path);
        return NULL;
    }
    int major = start[MAGIC_BYTES], minor = start[MAGIC_BYTES + 1];
    if (major < 1 || major > 3 || minor != 0) {
        fail(error, "%s: .npy version %d.%d; expected 1.0, 2.0 or 3.0", path, major, minor);
        return NULL;
    }
    size_t size_bytes = major == 1 ? 2 : 4;
    bool   whole      = fread(size, 1, size_bytes, file) == size_bytes;
    size_t length     = size[0] | (size_t)size[1] << 8 | (size_t)size[2] << 16 | (size_t)size[3] << 24;
    if (length > LONGEST_HEADER) {
        fail(error, "%s: a header of %zu bytes; expected at most %d", path, length, LONGEST_HEADER);
        return NULL;
    }
    char *text = whole ? malloc(length + 1) : NULL;
    if (!text || fread(text, 1, length, file) != length) {
        fail(error, "%s: the file ends inside its header", path);
        free(text);
        return NULL;
    }
    text[length] = '\0';
    if (strlen(text) != length) {
        fail(error, "%s: the header holds a zero byte", path);
        free(text);
        return NULL;
    }
    return text;
}

/* Strides and the number of elements; false if their bytes do not fit in 63 bits. */
static bool lay_out(npy_array *array, bool fortran_order)
{
    int64_t count = 1, bytes = 0;
    bool    empty = false;
    for (int n = 0; n < array->ndim; n++) {
        int dim            = fortran_order ? n : array->ndim - 1 - n;
        array->stride[dim] = count;
        empty |= array->shape[dim] == 0;
        if (array->shape[dim] > 0 && __builtin_mul_overflow(count, array->shape[dim], &count))
            return false;
    }
    array->count = empty ? 0 : count;
    return !__builtin_mul_overflow(count, (int64_t)npy_type_bytes(array->type), &bytes);
}

static bool read_elements(FILE *file, const char *path, npy_array *array, char error[NPY_ERROR_BYTES])
{
    struct stat status;
    long        start = ftell(file);
    if (start < 0 || fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode))
        return fail(error, "%s: not a regular file", path);
    int64_t bytes = array->count * (int64_t)npy_type_bytes(array->type), there = (int64_t)status.st_size - start;
    if (there != bytes)
        return fail(error, "%s: the header promises %" PRId64 " bytes of elements; the file holds %" PRId64, path,
                    bytes, there);
    array->data = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!array->data)
        return fail(error, "%s: no memory for %" PRId64 " bytes", path, bytes);
    if (fread(array->data, 1, (size_t)bytes, file) != (size_t)bytes) {
        npy_free(array);
        return fail(error, "%s: could not be read: %s", path, strerror(errno));
    }
    return true;
}

bool npy_read(const char *path, npy_array *array, char error[NPY_ERROR_BYTES])
{
    *array     = (npy_array){0};
    FILE *file = fopen(path, "rb");
    if (!file)
        return fail(error, "%s: %s", path, strerror(errno));
    header h    = {0};
    char  *text = read_header(file, path, error);
    bool   good = text && parse_header(text, &h, path, error) && find_type(h.descr, &array->type, path, error);
    free(text);
    if (good) {
        array->ndim = h.ndim;
        memcpy(array->shape, h.shape, sizeof h.shape);
        good = lay_out(array, h.fortran_order) ? read_elements(file, path, array, error)
                                               : fail(error, "%s: the header's shape overflows", path);
    }
    fclose(file);
    return good;
}

void npy_free(npy_array *array)
{
    free(array->data);
    *array = (npy_array){0};
}

bool npy_write(const char *path, const void *data, npy_type type, int ndim, const int64_t *shape,
               char error[NPY_ERROR_BYTES])
{
    char text[256];
    int length = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (", npy_type_name(type));
    size_t count = 1;
    for (int dim = 0; dim < ndim; dim++) {
        length += snprintf(text + length, sizeof text - (size_t)length, "%" PRId64 ", ", shape[dim]);
        count *= (size_t)shape[dim];
    }
    length += snprintf(text + length, sizeof text - (size_t)length, "), }");
    /* Elements begin at a multiple of 64 bytes, as the format asks; the header ends with a newline. */
    int total  = (MAGIC_BYTES + 4 + length + 1 + 63) / 64 * 64;
    int padded = total - MAGIC_BYTES - 4;

    FILE *file = fopen(path, "wb");
    if (!file)
        return fail(error, "%s: %s", path, strerror(errno));
    unsigned char version[4] = {1, 0, (unsigned char)(padded & 255), (unsigned char)(padded >> 8)};
    fwrite(magic, 1, MAGIC_BYTES, file);
    fwrite(version, 1, sizeof version, file);
    fprintf(file, "%-*s\n", padded - 1, text);
    fwrite(data, npy_type_bytes(type), count, file);
    bool written = !ferror(file);
    if (fclose(file) != 0 || !written)
        return fail(error, "%s: could not be written: %s", path, strerror(errno));
    return true;
}

const char *npy_shape_text(int ndim, const int64_t *shape, char text[160])
{
    int length = snprintf(text, 160, "[");
    for (int dim = 0; dim < ndim && length < 150; dim++)
        length += snprintf(text + length, (size_t)(160 - length), "%s%" PRId64, dim ? ", " : "", shape[dim]);
    if (length < 159)
        snprintf(text + length, (size_t)(160 - length), "]");
    return text;
}
