/* Between the fibers (fibers.c) and what Hopper has besides (hopper.c, wgmma.c). */
#ifndef EMULATOR_HOPPER_PARTS_H
#define EMULATOR_HOPPER_PARTS_H

#include "emulator.h"

#include <stdint.h>

extern const emulator_hopper emulator_hopper_functions;

/* fibers.c */
emulator_state *emulator_now(void);
void            emulator_wait_for_phase(const void *barrier, unsigned parity); /* others run until it is over */
emulator_state  emulator_of_rank(unsigned rank); /* as a thread of another block of this cluster has it; of the fiber, the block alone */
void            emulator_be_late(void);                                        /* others run until none can */

/* hopper.c */
bool emulator_phase_is_over(const void *barrier, unsigned parity);
bool emulator_land_one_load(unsigned block); /* false if the block has none under way */
void emulator_end_transfers(int fibers);     /* blocks have ended: nothing may be under way but stores that were read */

/* TMA or WGMMA reads there: who wrote it must have said so by a fence, or who asks for it behind that: by the fence of this number, 0: by none. */
void emulator_read_by_tma(unsigned address, uint64_t fenced);
void emulator_start_writes(unsigned block);
void emulator_wrote(unsigned address, unsigned bytes);

/* wgmma.c */
void emulator_wgmma(const emulator_product *product);
void emulator_wgmma_commit(void);
void emulator_wgmma_wait(int pending);
void emulator_end_products(int fibers);

#endif
