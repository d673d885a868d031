/*
 * Cubins on disk. An entry is trusted as code is, so the folder must be ours alone, every name is opened relative to its
 * descriptor without following links, and what is read is checked whole: magic, identity, lengths and hash. The hash is
 * against damage (a killed writer, a full disk); against people there are the folder's owner and mode.
 */
#include "cuda/jit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ENTRY_BYTES = 64 << 20 };

typedef struct entry_header {
    char     magic[8];
    uint64_t hash; /* of all that follows this field */
    uint32_t identity_bytes, resources_bytes;
    uint64_t cubin_bytes;
} entry_header;

static const char MAGIC[8] = {'f', 'a', 'c', 'u', 'b', 'i', 'n', '1'};

bool fa_secure_mode(void) { return getauxval(AT_SECURE) != 0; }

static bool ours(const struct stat *status)
{
    return (status->st_uid == geteuid() || status->st_uid == 0) && (status->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

int fa_cache_open_folder(const char *path, bool create)
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

/* Open folder `name` under `parent`, made 0700 if missing. private: nobody else may write, no links. */
static int open_private(int parent, const char *name)
{
    if (mkdirat(parent, name, 0700) != 0 && errno != EEXIST)
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

int fa_cache_open(void)
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
    mkdir(path, 0700); /* if it fails, open says so */
    int parent = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0)
        return -1;
    /* In a folder that anyone can write to, as /tmp, others could put their own in our folder's place. */
    struct stat status;
    int         folder = -1;
    if (fstat(parent, &status) == 0 && (status.st_uid == geteuid() || status.st_uid == 0) &&
        (status.st_mode & S_IWOTH) == 0)
        folder = open_private(parent, "flashattn");
    close(parent);
    return folder;
}

/* 32 hex digits. Two runs of a 64-bit hash from different starts; the identity itself is compared on reading. */
static void entry_name(const char *identity, const char *suffix, char name[48])
{
    uint64_t a = fa_hash_bytes(FA_HASH_START, identity, strlen(identity));
    uint64_t b = fa_hash_bytes(~FA_HASH_START, identity, strlen(identity));
    snprintf(name, 48, "%016llx%016llx%s", (unsigned long long)a, (unsigned long long)b, suffix);
}

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

static uint64_t entry_hash(const entry_header *header, const char *body, size_t body_bytes)
{
    size_t   skip = offsetof(entry_header, identity_bytes);
    uint64_t hash = fa_hash_bytes(FA_HASH_START, (const char *)header + skip, sizeof *header - skip);
    return fa_hash_bytes(hash, body, body_bytes);
}

/* body is identity, resources, cubin, one after another. */
static bool parse_entry(const entry_header *header, const char *body, size_t body_bytes, const char *identity,
                        fa_binary *binary)
{
    size_t identity_bytes = strlen(identity);
    if (memcmp(header->magic, MAGIC, sizeof MAGIC) != 0 || header->identity_bytes != identity_bytes ||
        header->resources_bytes != sizeof binary->resources || header->cubin_bytes == 0 ||
        header->cubin_bytes > MAX_ENTRY_BYTES ||
        body_bytes != identity_bytes + sizeof binary->resources + header->cubin_bytes ||
        header->hash != entry_hash(header, body, body_bytes) || memcmp(body, identity, identity_bytes) != 0)
        return false;
    unsigned char *cubin = malloc(header->cubin_bytes);
    if (!cubin)
        return false;
    memcpy(&binary->resources, body + identity_bytes, sizeof binary->resources);
    memcpy(cubin, body + identity_bytes + sizeof binary->resources, header->cubin_bytes);
    binary->resources.warning[sizeof binary->resources.warning - 1] = '\0';
    binary->cubin    = cubin;
    binary->bytes    = header->cubin_bytes;
    binary->compiled = false;
    return true;
}

bool fa_cache_read(int folder, const char *identity, fa_binary *binary)
{
    char name[48];
    entry_name(identity, ".cubin", name);
    /* O_NONBLOCK: a pipe put there must not make us wait. */
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return false;
    struct stat  status;
    entry_header header;
    bool         found = false;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && ours(&status) &&
        status.st_size > (off_t)sizeof header && status.st_size <= MAX_ENTRY_BYTES &&
        read_all(file, &header, sizeof header)) {
        size_t body_bytes = (size_t)status.st_size - sizeof header;
        char  *body       = malloc(body_bytes);
        found = body && read_all(file, body, body_bytes) && parse_entry(&header, body, body_bytes, identity, binary);
        free(body);
    }
    close(file);
    return found;
}

bool fa_cache_write(int folder, const char *identity, const fa_binary *binary, unsigned mode)
{
    static atomic_uint writes; /* two threads must not share a temporary file */
    char               name[48], temporary[48], suffix[16];
    entry_name(identity, ".cubin", name);
    snprintf(suffix, sizeof suffix, ".%07x%06x", (unsigned)getpid() & 0xFFFFFFFu,
             atomic_fetch_add(&writes, 1) & 0xFFFFFFu);
    entry_name(identity, suffix, temporary);

    size_t identity_bytes = strlen(identity);
    size_t body_bytes     = identity_bytes + sizeof binary->resources + binary->bytes;
    char  *body           = malloc(body_bytes);
    if (!body)
        return false;
    memcpy(body, identity, identity_bytes);
    memcpy(body + identity_bytes, &binary->resources, sizeof binary->resources);
    memcpy(body + identity_bytes + sizeof binary->resources, binary->cubin, binary->bytes);
    entry_header header = {.identity_bytes  = (uint32_t)identity_bytes,
                           .resources_bytes = sizeof binary->resources,
                           .cubin_bytes     = binary->bytes};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    header.hash = entry_hash(&header, body, body_bytes);

    unlinkat(folder, temporary, 0); /* of a killed writer that had our process number */
    int  file = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool done = file >= 0 && fchmod(file, mode) == 0 && write_all(file, &header, sizeof header) && write_all(file, body, body_bytes);
    if (file >= 0 && close(file) != 0)
        done = false;
    done = done && renameat(folder, temporary, folder, name) == 0;
    if (!done && file >= 0)
        unlinkat(folder, temporary, 0);
    free(body);
    return done;
}

int fa_cache_lock(int folder, const char *identity)
{
    char name[48];
    entry_name(identity, "", name);
    memcpy(name + 2, ".lock", 6); /* 256 lock files in all: a collision only makes two builds take turns */
    int lock = openat(folder, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
    if (lock < 0)
        return -1;
    for (int tries = 0; flock(lock, LOCK_EX | LOCK_NB) != 0; tries++) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || tries == 2000) {
            close(lock);
            return -1;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return lock;
}

void fa_cache_unlock(int lock)
{
    if (lock >= 0)
        close(lock); /* which drops the flock */
}
