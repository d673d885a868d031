/* A flash_attn_allocate that gives one block and counts. */
#ifndef GIVER_H
#define GIVER_H

#include <stddef.h>

typedef struct giver {
    void  *gives; /* NULL: nothing */
    size_t asked; /* bytes, the last time */
    int    times;
} giver;

static inline void *give(void *of, size_t bytes)
{
    giver *from = of;
    from->asked = bytes;
    from->times++;
    return from->gives;
}

#endif
