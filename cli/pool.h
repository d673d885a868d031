/* A few threads that run the tasks of one call at a time: for the bench's own work (standard attention, peaks). */
#ifndef CLI_POOL_H
#define CLI_POOL_H

#include <stdint.h>

typedef struct cli_pool cli_pool;

typedef void (*cli_task)(void *arg, int64_t index, int thread); /* thread: 0 .. threads - 1 */

/* The caller is one of the threads. NULL: no memory, or no threads to be had. */
cli_pool *cli_pool_create(int threads);
void      cli_pool_destroy(cli_pool *pool);
int       cli_pool_threads(const cli_pool *pool);

/* Run task for every index in [0, count) and return when all are done. */
void cli_pool_run(cli_pool *pool, int64_t count, cli_task task, void *arg);

#endif
