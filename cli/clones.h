/* Plain C loops compiled for several instruction sets, chosen when the program loads: as fast as the compiler can make
 * them without a file for each. Not under sanitizers, whose start-up does not bear it. */
#ifndef CLI_CLONES_H
#define CLI_CLONES_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&               \
    !defined(__SANITIZE_THREAD__)
#define CLI_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLI_CLONES
#endif

#endif
