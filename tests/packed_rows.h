/* Tests that Hopper's kernels share whose tiles have the queries of all heads of a key head for rows. */
#ifndef PACKED_ROWS_H
#define PACKED_ROWS_H

#include "cases.h"

typedef struct packed_rows {
    const char      *name, *group; /* the kernel's, which nothing else stands in for, and the tests' */
    const test_case *shapes;       /* one key head and these head dims where a shape names none */
    int              num_shapes, head_dim, head_dim_v;
    bool             latent; /* V is K's first columns */
} packed_rows;

/* A test program's main. --shapes TEXT: shapes whose names hold it. Another argument: only tests of such a name. */
int packed_rows_test(const packed_rows *kernel, int argc, char **argv);

#endif
