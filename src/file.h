/*
 * Files that the library reads and writes by itself: the cache of GPU kernels, the choices of `flashattn tune`. What is
 * read is trusted, so folders and files must be the user's or root's and writable by nobody else, every name is opened
 * relative to its folder's descriptor without following links, and a file is written beside its place and renamed.
 */
#ifndef FA_FILE_H
#define FA_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True in a program that runs with more rights than its caller: no variable is read, no cache is used. */
bool fa_secure_mode(void);

/* The descriptor of flashattn's private folder under XDG_CACHE_HOME or ~/.cache; made if missing if `create`. -1:
 * refused, impossible, or off under AT_SECURE. */
int fa_cache_open(bool create);

/* A folder that the caller names (created 0755 if `create`). -1 with errno. */
int fa_open_folder(const char *path, bool create);

/* The whole file, malloc'ed; NULL if it is not there, is not trusted, holds nothing or more than most_bytes. */
void *fa_file_read(int folder, const char *name, size_t most_bytes, size_t *bytes);

/* Write `head` and then `body` to `name`, atomically, with this mode. False if that failed: nothing is left behind. */
bool fa_file_write(int folder, const char *name, const void *head, size_t head_bytes, const void *body,
                   size_t body_bytes, unsigned mode);

/* FNV-1a, 64 bits (Fowler, Noll, Vo), going on from `hash`; begin with FA_HASH_START. Against damage, not against
 * people. */
#define FA_HASH_START 0xCBF29CE484222325u
uint64_t fa_hash_bytes(uint64_t hash, const void *bytes, size_t count);

#endif
