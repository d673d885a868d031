/* Files that the library reads and writes by itself. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

uint64_t fa_hash_bytes(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *byte = bytes;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ byte[i]) * 0x100000001B3u;
    return hash;
}

bool fa_secure_mode(void) { return getauxval(AT_SECURE) != 0; }

/* ---- folders ---- */

static bool ours(const struct stat *status)
{
    return (status->st_uid == geteuid() || status->st_uid == 0) && (status->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

int fa_open_folder(const char *path, bool create)
{
    if (create && mkdir(path, 0755) != 0 && errno != EEXIST)
        return -1;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return -1;
    struct stat status;
    if (fstat(folder, &status) != 0 || !ours(&status)) {
        close(folder);
        errno = EPERM;
        return -1;
    }
    return folder;
}

/* Open folder `name` under `parent`. private: nobody else may write, no links. */
static int open_private(int parent, const char *name, bool create)
{
    if (create && mkdirat(parent, name, 0700) != 0 && errno != EEXIST)
        return -1;
    int folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0)
        return -1;
    struct stat status;
    if (fstat(folder, &status) != 0 || status.st_uid != geteuid() || !ours(&status)) {
        close(folder);
        return -1;
    }
    return folder;
}

int fa_cache_open(bool create)
{
    if (fa_secure_mode())
        return -1;
    const char *base = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    char        path[4096];
    if (base && base[0] == '/')
        snprintf(path, sizeof path, "%s", base);
    else if (home && home[0] == '/')
        snprintf(path, sizeof path, "%s/.cache", home);
    else
        return -1;
    if (strlen(path) + 1 >= sizeof path)
        return -1;
    if (create)
        mkdir(path, 0700); /* if it fails, open says so */
    int parent = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0)
        return -1;
    /* In a folder that anyone can write to, as /tmp, others could put their own in our folder's place. */
    struct stat status;
    int         folder = -1;
    if (fstat(parent, &status) == 0 && (status.st_uid == geteuid() || status.st_uid == 0) &&
        (status.st_mode & S_IWOTH) == 0)
        folder = open_private(parent, "flashattn", create);
    close(parent);
    return folder;
}

/* ---- files ---- */

static bool read_all(int file, void *to, size_t bytes)
{
    char *at = to;
    while (bytes > 0) {
        ssize_t got = read(file, at, bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

static bool write_all(int file, const void *from, size_t bytes)
{
    const char *at = from;
    while (bytes > 0) {
        ssize_t put = write(file, at, bytes);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return false;
        at += put;
        bytes -= (size_t)put;
    }
    return true;
}

void *fa_file_read(int folder, const char *name, size_t most_bytes, size_t *bytes)
{
    /* O_NONBLOCK: a pipe put there must not make us wait. */
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return NULL;
    struct stat status;
    void       *all = NULL;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && ours(&status) && status.st_size > 0 &&
        (uint64_t)status.st_size <= most_bytes)
        all = malloc((size_t)status.st_size);
    if (all && !read_all(file, all, (size_t)status.st_size)) {
        free(all);
        all = NULL;
    }
    *bytes = all ? (size_t)status.st_size : 0;
    close(file);
    return all;
}

bool fa_file_write(int folder, const char *name, const void *head, size_t head_bytes, const void *body,
                   size_t body_bytes, unsigned mode)
{
    static atomic_uint writes; /* two threads must not share a temporary file */
    char               temporary[288];
    int length = snprintf(temporary, sizeof temporary, "%s.%07x%06x", name, (unsigned)getpid() & 0xFFFFFFFu,
                          atomic_fetch_add(&writes, 1) & 0xFFFFFFu);
    if (length >= (int)sizeof temporary)
        return false;
    unlinkat(folder, temporary, 0); /* of a killed writer that had our process number */
    int  file = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool done =
        file >= 0 && fchmod(file, mode) == 0 && write_all(file, head, head_bytes) && write_all(file, body, body_bytes);
    if (file >= 0 && close(file) != 0)
        done = false;
    done = done && renameat(folder, temporary, folder, name) == 0;
    if (!done && file >= 0)
        unlinkat(folder, temporary, 0);
    return done;
}
