/*
 * Hopper's barriers that count bytes and its tensor memory accelerator, for fibers (PTX ISA, "mbarrier", "Tensors",
 * "Asynchronous copy"). TMA is as slow as it may be: what it loads lands when no thread can go on otherwise, and until
 * then NaN lies there; what it stores is read when somebody waits for it, and written when he releases it, for a wait is
 * the same instruction with .read and without.
 */
#include "fibers.h"
#include "hopper_parts.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what) { emulator_now()->fail(what); }

static char *shared_of(const emulator_state *now, unsigned address, unsigned bytes, unsigned alignment)
{
    if (address % alignment != 0 || address > (unsigned)now->shared_bytes ||
        bytes > (unsigned)now->shared_bytes - address)
        fail("shared memory is used past its end, or not aligned");
    return now->shared + address;
}

static char *shared_at(unsigned address, unsigned bytes, unsigned alignment)
{
    return shared_of(emulator_now(), address, bytes, alignment);
}

/* ---- what threads wrote to shared memory, 16 bytes by 16, and have not told TMA and WGMMA of by a fence ---- */

typedef struct written {
    uint64_t fiber : 12, before : 52; /* who, and the number of the next fence among those of all; 0: nobody */
} written;
_Static_assert(EMULATOR_MAX_FIBERS <= 1 << 12, "a fiber's number");

static struct {
    written  last[EMULATOR_MAX_BLOCKS][EMULATOR_MAX_SHARED / 16];
    uint64_t last_fence[EMULATOR_MAX_FIBERS], all_fences; /* by its number among those of all, from 1 */
} writes;

static written *last_write_of(const emulator_state *now, unsigned address)
{
    return &writes.last[now->fiber / (unsigned)now->threads][address / 16];
}

static written *last_write(unsigned address) { return last_write_of(emulator_now(), address); }

void emulator_start_writes(unsigned block) { memset(writes.last[block], 0, sizeof writes.last[block]); }

/* A warp's records are stored by its last lane, which meets the others at their fence. */
void emulator_wrote(unsigned address, unsigned bytes)
{
    unsigned fiber = emulator_now()->fiber;
    for (unsigned at = address / 16 * 16; at < address + bytes; at += 16)
        *last_write(at) = (written){fiber & 0xFFF, (writes.all_fences + 1) & ((UINT64_C(1) << 52) - 1)};
}

static void fence_async(void) { writes.last_fence[emulator_now()->fiber] = ++writes.all_fences; }

void emulator_read_by_tma(unsigned address, uint64_t fenced)
{
    const written *w = last_write(address);
    if (writes.last_fence[w->fiber] < w->before && fenced < w->before)
        fail("TMA or WGMMA reads what a thread has written without a fence since");
}

/* ---- mbarriers ---- */

typedef struct mbarrier {
    uint16_t count : 15, phase : 1;
    uint16_t pending; /* arrivals */
    int32_t  bytes;   /* announced and not there; -1: memory as a block finds it */
} mbarrier;
_Static_assert(sizeof(mbarrier) == 8, "as in the PTX ISA");

static mbarrier *barrier_of(const emulator_state *now, unsigned address)
{
    mbarrier *b = (mbarrier *)shared_of(now, address, sizeof *b, sizeof *b);
    if (b->bytes == -1)
        fail("an mbarrier that nobody has set up");
    return b;
}

static mbarrier *barrier_at(unsigned address) { return barrier_of(emulator_now(), address); }

static void end_phase_if_complete(mbarrier *b)
{
    if (b->pending > 0 || b->bytes != 0)
        return;
    b->phase ^= 1;
    b->pending = b->count;
}

static void barrier_init(unsigned address, unsigned arrivals)
{
    if (arrivals == 0 || arrivals > 4096)
        fail("an mbarrier for no arrivals, or too many");
    *(mbarrier *)shared_at(address, sizeof(mbarrier), sizeof(mbarrier)) =
        (mbarrier){.count = (uint16_t)arrivals & 0x7FFF, .pending = (uint16_t)arrivals};
}

static void arrive(mbarrier *b, unsigned expected_bytes)
{
    if (b->pending == 0)
        fail("more arrivals at an mbarrier than it was set up for");
    b->bytes += (int32_t)expected_bytes;
    b->pending--;
    end_phase_if_complete(b);
}

static void barrier_arrive(unsigned address, unsigned expected_bytes) { arrive(barrier_at(address), expected_bytes); }

static void barrier_arrive_at(unsigned address, unsigned rank)
{
    emulator_state other = emulator_of_rank(rank);
    arrive(barrier_of(&other, address), 0);
}

bool emulator_phase_is_over(const void *barrier, unsigned parity)
{
    return ((const mbarrier *)barrier)->phase != (parity & 1);
}

static bool barrier_passed(unsigned address, unsigned parity) { return emulator_phase_is_over(barrier_at(address), parity); }

static void barrier_wait(unsigned address, unsigned parity)
{
    const mbarrier *b = barrier_at(address);
    if (!emulator_phase_is_over(b, parity))
        emulator_wait_for_phase(b, parity);
}

/* ---- tensor maps ---- */

enum { MAX_RANK = 5 };

typedef struct tensor_map {
    uint64_t address, dim[MAX_RANK], stride[MAX_RANK]; /* strides in bytes */
    uint16_t box[MAX_RANK];
    uint8_t  rank, element_bytes, swizzle; /* 32, 64 or 128 bytes */
} tensor_map;
_Static_assert(sizeof(tensor_map) <= 128, "a CUtensorMap");

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                           int interleave, int swizzle, int l2_promotion, int fill)
{
    enum { UINT8 = 0, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9, SWIZZLE_32B = 1, SWIZZLE_64B = 2, SWIZZLE_128B = 3 };
    tensor_map made = {
        .address = (uintptr_t)address, .rank = (uint8_t)rank, .swizzle = swizzle == SWIZZLE_32B ? 32 : swizzle == SWIZZLE_64B ? 64 : 128};
    bool fits = (type == UINT8 || type == FLOAT16 || type == FLOAT32 || type == BFLOAT16) && rank >= 2 && rank <= MAX_RANK &&
                made.address % 16 == 0 && swizzle >= SWIZZLE_32B && swizzle <= SWIZZLE_128B && interleave == 0 &&
                fill == 0;
    (void)l2_promotion;
    made.element_bytes = type == UINT8 ? 1 : type == FLOAT32 ? 4 : 2;
    for (unsigned i = 0; fits && i < rank; i++) {
        made.dim[i]    = dims[i];
        made.box[i]    = (uint16_t)box[i];
        made.stride[i] = i > 0 ? strides[i - 1] : made.element_bytes;
        fits = dims[i] > 0 && dims[i] <= UINT64_C(1) << 32 && box[i] > 0 && box[i] <= 256 && element_strides[i] == 1 &&
               (i == 0 || (made.stride[i] % 16 == 0 && made.stride[i] < UINT64_C(1) << 40));
    }
    if (!fits || box[0] * made.element_bytes != made.swizzle)
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    memset(map, 0, 128);
    memcpy(map, &made, sizeof made);
    return 0;
}

static tensor_map map_at(const void *map)
{
    tensor_map m;
    memcpy(&m, map, sizeof m);
    if (m.rank == 0)
        fail("a tensor map that was never made");
    return m;
}

static unsigned box_bytes(const tensor_map *m)
{
    unsigned bytes = m->element_bytes;
    for (int i = 0; i < m->rank; i++)
        bytes *= m->box[i];
    return bytes;
}

/* Where byte `offset` of a box lies whose first lies at shared address `at`. */
static unsigned swizzled(const tensor_map *m, unsigned at, unsigned offset)
{
    unsigned address = at + offset;
    return (address ^ (address >> 7 & (m->swizzle / 16u - 1)) << 4) - at;
}

/* Each row of a box in turn: from memory to it, or from it to memory. Outside of the tensor zeros are read and nothing
 * is written. */
static void move_box(const tensor_map *m, const int *at, unsigned address, char *box, bool loads)
{
    unsigned rows = box_bytes(m) / m->swizzle;
    for (unsigned row = 0; row < rows; row++) {
        uint64_t from   = m->address;
        bool     inside = true;
        unsigned left   = row;
        for (int i = 1; i < m->rank; i++) {
            int64_t place = (int64_t)at[i] + left % m->box[i];
            left /= m->box[i];
            inside = inside && place >= 0 && (uint64_t)place < m->dim[i];
            from += (uint64_t)place * m->stride[i];
        }
        for (unsigned byte = 0, bytes; byte < m->swizzle; byte += bytes) {
            int64_t column = (int64_t)at[0] + byte / m->element_bytes;
            bool    whole  = inside && byte % 16 == 0 && column >= 0 && (uint64_t)column + 16 / m->element_bytes <= m->dim[0],
                    exists = inside && column >= 0 && (uint64_t)column < m->dim[0];
            char   *place  = box + swizzled(m, address, row * m->swizzle + byte),
                 *memory   = (char *)(uintptr_t)(from + (uint64_t)column * m->element_bytes);
            bytes = whole ? 16 : m->element_bytes; /* 16 lie together */
            if (loads && exists)
                memcpy(place, memory, bytes);
            else if (loads)
                memset(place, 0, bytes);
            else if (exists)
                memcpy(memory, place, bytes);
        }
    }
}

/* ---- loads ---- */

typedef struct load {
    tensor_map  map; /* rank 0: neighbours, from `from` */
    int         at[MAX_RANK];
    const char *from;
    unsigned    address, bytes, block;
    char       *to;
    mbarrier   *barrier;
} load;

static struct {
    load *all;
    int   count, room;
} loads;

static void later(load l, const emulator_state *of, unsigned barrier)
{
    if (loads.count == loads.room) {
        loads.room = 2 * loads.room + 64;
        loads.all  = realloc(loads.all, sizeof *loads.all * (size_t)loads.room);
        if (!loads.all)
            fail("no memory for TMA's loads");
    }
    l.block   = of->block.x;
    l.barrier = barrier_of(of, barrier);
    l.to      = shared_of(of, l.address, l.bytes, l.map.rank ? 128 : 16);
    memset(l.to, 0xFF, l.bytes);
    for (unsigned at = 0; at < l.bytes; at += 16)
        *last_write_of(of, l.address + at) = (written){0};
    loads.all[loads.count++] = l;
}

static void load_box_of(const emulator_state *of, unsigned to, const void *map, unsigned barrier, const int *at)
{
    load l = {.map = map_at(map), .address = to};
    memcpy(l.at, at, sizeof l.at);
    l.bytes = box_bytes(&l.map);
    later(l, of, barrier);
}

static void load_box(unsigned to, const void *map, unsigned barrier, const int *at) { load_box_of(emulator_now(), to, map, barrier, at); }

static void load_box_for(unsigned rank, unsigned to, const void *map, unsigned barrier, const int *at)
{
    emulator_state other = emulator_of_rank(rank);
    load_box_of(&other, to, map, barrier, at);
}

static void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier)
{
    if ((uintptr_t)from % 16 != 0 || bytes % 16 != 0)
        fail("a bulk copy that is not of whole 16 bytes");
    later((load){.from = from, .address = to, .bytes = bytes}, emulator_now(), barrier);
}

bool emulator_land_one_load(unsigned block)
{
    int n = 0;
    while (n < loads.count && loads.all[n].block != block)
        n++;
    if (n == loads.count)
        return false;
    load l = loads.all[n];
    memmove(loads.all + n, loads.all + n + 1, sizeof l * (size_t)(loads.count - n - 1));
    loads.count--;
    if (l.map.rank)
        move_box(&l.map, l.at, l.address, l.to, true);
    else
        memcpy(l.to, l.from, l.bytes);
    l.barrier->bytes -= (int32_t)l.bytes;
    end_phase_if_complete(l.barrier);
    return true;
}

/* ---- stores: a thread's groups, the oldest first ---- */

enum { MAX_STORES = 32 };

typedef struct store {
    tensor_map  map; /* rank 0: floats, to `to` */
    int         at[MAX_RANK];
    float      *to;
    unsigned    address, bytes;
    const char *from;
    bool        stores; /* or adds */
    uint64_t    fenced; /* by who asked, who may have done so for others, once they met */
    bool        waited_for;
    char       *read; /* what TMA has read; NULL: not yet */
} store;

static struct {
    store store[MAX_STORES];
    int   count;
} stores[EMULATOR_MAX_FIBERS];

static void read_store(store *s)
{
    if (s->read)
        return;
    s->read = malloc(s->bytes);
    if (!s->read)
        fail("no memory for TMA's stores");
    for (unsigned at = 0; at < s->bytes; at += 16)
        emulator_read_by_tma(s->address + at, s->fenced);
    memcpy(s->read, s->from, s->bytes);
}

static void write_store(store *s)
{
    read_store(s);
    if (s->map.rank)
        move_box(&s->map, s->at, s->address, s->read, false);
    else if (s->stores)
        memcpy(s->to, s->read, s->bytes);
    else
        for (unsigned n = 0; n < s->bytes / sizeof(float); n++)
            s->to[n] += ((float *)s->read)[n];
    free(s->read);
}

static void write_oldest(unsigned fiber, int count)
{
    store *all = stores[fiber].store;
    for (int n = 0; n < count; n++)
        write_store(&all[n]);
    stores[fiber].count -= count;
    memmove(all, all + count, sizeof *all * (size_t)stores[fiber].count);
}

/* The oldest that TMA has read may have been written at any time: at the latest where there is no room for more. */
static void queue_store(store s)
{
    unsigned fiber = emulator_now()->fiber;
    store   *all   = stores[fiber].store;
    s.from         = shared_at(s.address, s.bytes, s.map.rank ? 128 : 16);
    s.fenced       = writes.last_fence[fiber];
    if (stores[fiber].count == MAX_STORES) {
        if (!all[0].read)
            fail("more bulk stores in flight than the emulator keeps");
        write_oldest(fiber, 1);
    }
    all[stores[fiber].count++] = s;
}

static void store_box(const void *map, unsigned from, const int *at)
{
    store s = {.map = map_at(map), .address = from};
    memcpy(s.at, at, sizeof s.at);
    s.bytes = box_bytes(&s.map);
    queue_store(s);
}

static void bulk_add(float *to, unsigned from, unsigned bytes, bool overwrites)
{
    if ((uintptr_t)to % 16 != 0 || bytes % 16 != 0)
        fail("a bulk copy that is not of whole 16 bytes");
    queue_store((store){.to = to, .address = from, .bytes = bytes, .stores = overwrites});
}

static void bulk_wait(int pending, bool only_read)
{
    unsigned fiber = emulator_now()->fiber;
    int      done  = stores[fiber].count - pending;
    for (int n = 0; n < done; n++) {
        read_store(&stores[fiber].store[n]);
        stores[fiber].store[n].waited_for |= !only_read;
    }
}

static void release(void)
{
    unsigned fiber = emulator_now()->fiber;
    int      done  = 0;
    while (done < stores[fiber].count && stores[fiber].store[done].waited_for)
        done++;
    write_oldest(fiber, done);
}

/* ---- registers ---- */

static struct {
    int count[EMULATOR_MAX_FIBERS]; /* 0: as launched */
    int launched;                   /* 0: nobody has asked */
} registers;

static void set_registers(int count, int launched)
{
    registers.count[emulator_now()->fiber] = count;
    registers.launched                     = launched;
}

/* Who asks for more than a block was launched with, less what others have given back, waits for ever. */
static void end_registers(int fibers)
{
    int threads = emulator_now()->threads;
    for (int first = 0; registers.launched > 0 && first < fibers; first += threads) {
        int sum = 0;
        for (int f = first; f < first + threads; f++)
            sum += registers.count[f] > 0 ? registers.count[f] : registers.launched;
        if (sum > registers.launched * threads)
            fail("its threads ask for more registers than it was launched with");
    }
    memset(&registers, 0, sizeof registers);
}

void emulator_end_transfers(int fibers)
{
    end_registers(fibers);
    if (loads.count > 0)
        fail("a block has ended before a load of its own");
    for (int f = 0; f < fibers; f++) {
        for (int n = 0; n < stores[f].count; n++)
            if (!stores[f].store[n].read)
                fail("a thread has ended before what it has TMA store was read");
        write_oldest((unsigned)f, stores[f].count);
    }
}

const emulator_hopper emulator_hopper_functions = {.barrier_init   = barrier_init,
                                                   .barrier_arrive = barrier_arrive,
                                                   .barrier_arrive_at = barrier_arrive_at,
                                                   .barrier_wait   = barrier_wait,
                                                   .barrier_passed = barrier_passed,
                                                   .load_box       = load_box,
                                                   .load_box_for   = load_box_for,
                                                   .bulk_load      = bulk_load,
                                                   .store_box      = store_box,
                                                   .bulk_add       = bulk_add,
                                                   .bulk_wait      = bulk_wait,
                                                   .release        = release,
                                                   .fence_async    = fence_async,
                                                   .registers      = set_registers,
                                                   .wgmma          = emulator_wgmma,
                                                   .wgmma_commit   = emulator_wgmma_commit,
                                                   .wgmma_wait     = emulator_wgmma_wait};
