/* A program that loads the library, uses its threads, closes it and goes on. argv[1]: the shared library. */
#include "flashattn.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    for (int round = 0; round < 2; round++) {
        void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
        if (!library) {
            printf("%s\n", dlerror());
            return 1;
        }
        flash_attn_status (*forward)(flash_attn_context *, const flash_attn_problem *, const flash_attn_exec *);
        *(void **)&forward = dlsym(library, "flash_attn_forward");
        static float       q[4 * 512 * 16], o[4 * 512 * 16];
        flash_attn_problem p = {0};
        p.q = p.k = p.v = (flash_attn_tensor){.data = q, .shape = {1, 512, 4, 16}};
        p.o.data        = o;
        if (!forward || forward(NULL, &p, NULL) != FLASH_ATTN_OK)
            return 1;
        dlclose(library);
        usleep(200000); /* a pool thread that spun or slept in unmapped code would crash here */
    }
    return 0;
}
