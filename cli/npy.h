/*
 * NumPy's .npy files: a magic, a version, a header that is a Python dictionary, and the elements.
 * https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
 * Versions 1 to 3, C and Fortran order, little-endian.
 */
#ifndef CLI_NPY_H
#define CLI_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum npy_type {
    NPY_F32,   /* <f4 */
    NPY_F16,   /* <f2 */
    NPY_RAW16, /* <V2, bfloat16: how ml_dtypes' bfloat16 is stored */
    NPY_RAW8,  /* |V1, float8_e4m3fn */
    NPY_U16,   /* <u2 */
    NPY_U8,    /* |u1 */
    NPY_I32,   /* <i4 */
    NPY_I64    /* <i8 */
} npy_type;

enum { NPY_MOST_DIMS = 8, NPY_ERROR_BYTES = 512 };

typedef struct npy_array {
    void    *data; /* malloc'ed; one byte at least, so never NULL after a good read */
    npy_type type;
    int      ndim;
    int64_t  shape[NPY_MOST_DIMS];
    int64_t  stride[NPY_MOST_DIMS]; /* in elements, from C or Fortran order */
    int64_t  count;                 /* elements */
} npy_array;

size_t      npy_type_bytes(npy_type type);
size_t      npy_bytes(const npy_array *array); /* of all elements */
const char *npy_type_name(npy_type type);

/* Read a file. On failure returns false with a sentence in error, and the array holds no memory. */
bool npy_read(const char *path, npy_array *array, char error[NPY_ERROR_BYTES]);
void npy_free(npy_array *array);

/* Write C-ordered elements to path. On failure returns false with a sentence in error. */
bool npy_write(const char *path, const void *data, npy_type type, int ndim, const int64_t *shape,
               char error[NPY_ERROR_BYTES]);

/* "[2, 128, 4, 64]" */
const char *npy_shape_text(int ndim, const int64_t *shape, char text[160]);

#endif
