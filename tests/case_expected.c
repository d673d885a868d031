#include "case_internal.h"

/* One case's values on their way to or from a file, with the hash of all bytes so far; file NULL: they are counted only. */
typedef struct record {
    FILE    *file;
    bool     write;
    uint64_t hash, bytes;
} record;

static bool transfer(record *r, void *data, size_t bytes)
{
    r->bytes += bytes;
    if (!r->file)
        return true;
    size_t done = r->write ? fwrite(data, 1, bytes, r->file) : fread(data, 1, bytes, r->file);
    r->hash     = case_hash(r->hash, data, done);
    return done == bytes;
}

/* Of all that the values follow from: the case, its dtype, whether it has gradients, and every byte of its inputs. */
static uint64_t key_of(const case_instance *x)
{
    test_case shape;
    uint64_t  hash = CASE_HASH_START, more[] = {x->dtype, x->backward, x->any_shape, x->problem.dropout.seed};
    memcpy(&shape, &x->shape, sizeof shape); /* padding too, which static tables have zero */
    shape.group = shape.name = NULL;
    hash                     = case_hash(hash, x->shape.group, strlen(x->shape.group));
    hash                     = case_hash(hash, x->shape.name, strlen(x->shape.name));
    hash                     = case_hash(hash, &shape, sizeof shape);
    hash                     = case_hash(hash, more, sizeof more);
    for (int n = 0; n < x->num_buffers; n++) {
        uint64_t buffer[] = {x->buffers[n].bytes, x->buffers[n].output ? 0 : x->buffers[n].hash};
        hash              = case_hash(hash, buffer, sizeof buffer);
    }
    return hash;
}

/* Both directions, so that they agree. */
static bool transfer_values(record *r, case_instance *x)
{
    bool ok = transfer(r, x->allowed, sizeof x->allowed) && transfer(r, x->allowed_l2, sizeof x->allowed_l2) &&
              transfer(r, x->l2_scale, sizeof x->l2_scale) && transfer(r, &x->largest_lse, sizeof x->largest_lse);
    for (int n = 0; ok && n < NUM_OUTPUTS; n++) {
        flash_attn_tensor *t = &x->expected[n];
        ok                   = !t->data || transfer(r, t->data, (size_t)(t->stride[0] * t->shape[0]) * sizeof(float));
    }
    return ok;
}

/* A record: how long what follows it is, key, values, hash. */
static uint64_t length_of(case_instance *x)
{
    record r = {.bytes = 2 * sizeof(uint64_t)};
    transfer_values(&r, x);
    return r.bytes;
}

bool case_write_expected(case_instance *x, FILE *file)
{
    record   r   = {file, true, CASE_HASH_START, 0};
    uint64_t key = key_of(x), length = length_of(x);
    if (!transfer(&r, &length, sizeof length) || !transfer(&r, &key, sizeof key) || !transfer_values(&r, x))
        return false;
    uint64_t hash = r.hash;
    return transfer(&r, &hash, sizeof hash);
}

bool case_read_expected(case_instance *x, FILE *file, char *why, size_t why_bytes)
{
    record   r   = {file, false, CASE_HASH_START, 0};
    uint64_t key = 0, length = 0, hash = 0;
    bool     whole = transfer(&r, &length, sizeof length) && transfer(&r, &key, sizeof key);
    if (whole && key != key_of(x)) {
        snprintf(why, why_bytes, "the file's next expected values are those of another case or of other inputs");
        return false;
    }
    if (!case_make_results(x, x->expected, 0xFF)) {
        snprintf(why, why_bytes, "no memory for expected values");
        return false;
    }
    whole         = whole && length == length_of(x) && transfer_values(&r, x);
    uint64_t read = r.hash;
    if (!whole || !transfer(&r, &hash, sizeof hash) || hash != read) {
        snprintf(why, why_bytes, "the file of expected values ends here or is damaged");
        return false;
    }
    return true;
}

bool case_skip_expected(FILE *file)
{
    uint64_t length = 0;
    return fread(&length, 1, sizeof length, file) == sizeof length && length <= INT32_MAX && fseek(file, (long)length, SEEK_CUR) == 0;
}
