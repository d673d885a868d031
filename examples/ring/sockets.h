/*
 * A transport for flash_attn_ring between processes or threads of one machine (or of several, over TCP): a pair of
 * connected stream sockets. Transfers run on a thread of their own, beside the compute. Copy it, or take it as a model.
 */
#ifndef RING_SOCKETS_H
#define RING_SOCKETS_H

#include "flashattn.h"

typedef struct ring_sockets ring_sockets;

/* Two connected descriptors, which belong to it from now on: to_next is written, from_previous is read. A transfer in
 * which nothing moves for timeout_ms fails (-1: never). NULL: no memory, no thread. */
ring_sockets *ring_sockets_open(int to_next, int from_previous, int timeout_ms);

/* End what is under way and refuse what comes: this rank's transfers and its neighbours' fail. What was begun here may
 * touch its memory until the transport's wait has returned. */
void ring_sockets_hang_up(ring_sockets *sockets);

void ring_sockets_close(ring_sockets *sockets);

/* For flash_attn_ring.transport; host memory. */
flash_attn_transport ring_sockets_transport(ring_sockets *sockets);

/* The ends of a ring of `ranks` local processes or threads, made before they start: rank r has to_next[r] and
 * from_previous[r]. After a fork close the others'. False: errno says why. */
bool ring_sockets_pairs(int ranks, int *to_next, int *from_previous);

#endif
