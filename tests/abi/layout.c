/* A program built against version 0.1 keeps working only if no struct, field or constant has moved since. */
#include "flashattn.h"

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " has another size than in 0.1");
#define FIELD(type, field, offset, bytes)                                                                              \
    _Static_assert(offsetof(type, field) == (offset) && sizeof(((type *)0)->field) == (bytes),                         \
                   #type "." #field " is not where it was in 0.1");
#define VALUE(constant, number) _Static_assert((constant) == (number), #constant " has another value than in 0.1");

#if UINTPTR_MAX == UINT64_MAX
#include "layout_0_1.h"
#endif

/* A translation unit needs a declaration. */
int flash_attn_layout_is_checked(void);
int flash_attn_layout_is_checked(void) { return 1; }
