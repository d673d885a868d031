/* Ring worlds in cmocka tests. */
#ifndef HARNESS_RING_H
#define HARNESS_RING_H

#include "ring_world.h"
#include "harness.h"

static inline ring_world *ring_start(ring_case shape, flash_attn_dtype dtype, uint64_t seed)
{
    ring_world *world = ring_world_make(&shape, dtype, seed);
    if (!world)
        fail_msg("%s", flash_attn_last_error());
    return world;
}

static inline void expect_ring_ok(ring_world *world)
{
    for (int rank = 0; rank < ring_world_ranks(world); rank++)
        for (int pass = 0; pass < 2; pass++)
            if (ring_world_rank(world, rank)->status[pass] != FLASH_ATTN_OK)
                fail_msg("rank %d, pass %d: %s", rank, pass, ring_world_rank(world, rank)->error[pass]);
}

static inline void expect_ring_right(ring_world *world, const char *what)
{
    double worst;
    expect_ring_ok(world);
    const char *why = ring_world_compare(world, true, &worst);
    if (why)
        fail_msg("%s: %s", what, why);
}

/* Both passes, compared with the reference; and once more, with the same bits. */
static inline void expect_ring_right_twice(ring_world *world, const char *what)
{
    ring_world_run(world, true);
    expect_ring_right(world, what);
    uint64_t digest = ring_world_digest(world);
    ring_world_run(world, true);
    expect_ring_ok(world);
    if (ring_world_digest(world) != digest)
        fail_msg("%s: the second run gave other bits", what);
}

static inline ring_case usual_ring(int ranks)
{
    return (ring_case){
        1, 70, 70, 4, 2, 32, 32, .mask = FLASH_ATTN_CAUSAL, .layout = FLASH_ATTN_RING_ZIGZAG, .ranks = ranks};
}

#endif
