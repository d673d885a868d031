/*
 * Cubins on disk. An entry is trusted as code is, so the folder must be ours alone (file.h), and what is read is checked
 * whole: magic, identity, lengths and hash. The hash is against damage (a killed writer, a full disk); against people
 * there are the folder's owner and mode.
 */
#include "cuda/jit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
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

/* 32 hex digits. Two runs of a 64-bit hash from different starts; the identity itself is compared on reading. */
static void entry_name(const char *identity, const char *suffix, char name[48])
{
    uint64_t a = fa_hash_bytes(FA_HASH_START, identity, strlen(identity));
    uint64_t b = fa_hash_bytes(~FA_HASH_START, identity, strlen(identity));
    snprintf(name, 48, "%016llx%016llx%s", (unsigned long long)a, (unsigned long long)b, suffix);
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
    char         name[48];
    size_t       bytes;
    entry_header header;
    entry_name(identity, ".cubin", name);
    char *entry = fa_file_read(folder, name, MAX_ENTRY_BYTES, &bytes);
    bool  found = false;
    if (entry && bytes > sizeof header) {
        memcpy(&header, entry, sizeof header);
        found = parse_entry(&header, entry + sizeof header, bytes - sizeof header, identity, binary);
    }
    free(entry);
    return found;
}

bool fa_cache_write(int folder, const char *identity, const fa_binary *binary, unsigned mode)
{
    char name[48];
    entry_name(identity, ".cubin", name);
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
    bool done   = fa_file_write(folder, name, &header, sizeof header, body, body_bytes, mode);
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
