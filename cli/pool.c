#include "pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdatomic.h>
#include <stdlib.h>

struct cli_pool {
    int             threads, started;
    pthread_t      *handles; /* threads - 1 of them */
    pthread_mutex_t lock;
    pthread_cond_t  work, done;
    uint64_t        round; /* counts the calls of cli_pool_run */
    int             busy;  /* workers that have not finished this round */
    bool            stop;

    cli_task         task;
    void            *arg;
    int64_t          count;
    _Atomic(int64_t) next;
};

typedef struct worker {
    cli_pool *pool;
    int       thread;
} worker;

static void run_tasks(cli_pool *pool, int thread)
{
    int64_t index;
    while ((index = atomic_fetch_add(&pool->next, 1)) < pool->count)
        pool->task(pool->arg, index, thread);
}

static void *worker_main(void *arg)
{
    worker    self = *(worker *)arg;
    cli_pool *pool = self.pool;
    uint64_t  seen = 0;
    free(arg);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && pool->round == seen)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        seen = pool->round;
        pthread_mutex_unlock(&pool->lock);
        run_tasks(pool, self.thread);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

cli_pool *cli_pool_create(int threads)
{
    cli_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->threads = threads;
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (int thread = 1; pool->handles && thread < threads; thread++) {
        worker *self = malloc(sizeof *self);
        if (!self)
            break;
        *self = (worker){pool, thread};
        if (pthread_create(&pool->handles[thread - 1], NULL, worker_main, self) != 0) {
            free(self);
            break;
        }
        pool->started++;
    }
    if (!pool->handles || pool->started < threads - 1) {
        cli_pool_destroy(pool);
        return NULL;
    }
    return pool;
}

void cli_pool_destroy(cli_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool->handles);
    free(pool);
}

int cli_pool_threads(const cli_pool *pool) { return pool->threads; }

void cli_pool_run(cli_pool *pool, int64_t count, cli_task task, void *arg)
{
    pthread_mutex_lock(&pool->lock);
    pool->task  = task;
    pool->arg   = arg;
    pool->count = count;
    pool->busy  = pool->threads - 1;
    atomic_store(&pool->next, 0);
    pool->round++;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    run_tasks(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->busy > 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
