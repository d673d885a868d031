#include "gpt.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct gpt_threads {
    int             count;
    pthread_t      *workers; /* count - 1 */
    int             started;
    pthread_mutex_t lock;
    pthread_cond_t  work, done;
    uint64_t        round;    /* under lock; a new value is a new job */
    int             running;  /* under lock; workers that have not finished this round */
    bool            stopping; /* under lock */
    flash_attn_task task;
    void           *arg;
    int64_t         tasks;
    atomic_llong    next;
};

static void take_tasks(gpt_threads *threads)
{
    int64_t i;
    while ((i = atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed)) < threads->tasks)
        threads->task(threads->arg, i);
}

static void *worker(void *arg)
{
    gpt_threads *threads = arg;
    uint64_t     seen    = 0;
    pthread_mutex_lock(&threads->lock);
    for (;;) {
        while (threads->round == seen && !threads->stopping)
            pthread_cond_wait(&threads->work, &threads->lock);
        if (threads->stopping)
            break;
        seen = threads->round;
        pthread_mutex_unlock(&threads->lock);
        take_tasks(threads);
        pthread_mutex_lock(&threads->lock);
        if (--threads->running == 0)
            pthread_cond_signal(&threads->done);
    }
    pthread_mutex_unlock(&threads->lock);
    return NULL;
}

gpt_threads *gpt_threads_create(int count)
{
    gpt_threads *threads = calloc(1, sizeof *threads);
    if (!threads)
        return NULL;
    threads->count   = count;
    threads->workers = calloc((size_t)count, sizeof *threads->workers);
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->work, NULL);
    pthread_cond_init(&threads->done, NULL);
    while (threads->workers && threads->started < count - 1 &&
           pthread_create(&threads->workers[threads->started], NULL, worker, threads) == 0)
        threads->started++;
    if (threads->started != count - 1) {
        gpt_threads_destroy(threads);
        return NULL;
    }
    return threads;
}

void gpt_threads_destroy(gpt_threads *threads)
{
    if (!threads)
        return;
    pthread_mutex_lock(&threads->lock);
    threads->stopping = true;
    pthread_cond_broadcast(&threads->work);
    pthread_mutex_unlock(&threads->lock);
    for (int i = 0; i < threads->started; i++)
        pthread_join(threads->workers[i], NULL);
    pthread_cond_destroy(&threads->done);
    pthread_cond_destroy(&threads->work);
    pthread_mutex_destroy(&threads->lock);
    free(threads->workers);
    free(threads);
}

int gpt_threads_count(const gpt_threads *threads) { return threads->count; }

void gpt_threads_run(void *pool, int64_t count, flash_attn_task task, void *arg)
{
    gpt_threads *threads = pool;
    if (count <= 1 || threads->count == 1) {
        for (int64_t i = 0; i < count; i++)
            task(arg, i);
        return;
    }
    pthread_mutex_lock(&threads->lock);
    threads->task    = task;
    threads->arg     = arg;
    threads->tasks   = count;
    threads->running = threads->count - 1;
    atomic_store_explicit(&threads->next, 0, memory_order_relaxed);
    threads->round++;
    pthread_cond_broadcast(&threads->work);
    pthread_mutex_unlock(&threads->lock);
    take_tasks(threads);
    pthread_mutex_lock(&threads->lock);
    while (threads->running > 0)
        pthread_cond_wait(&threads->done, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
}

typedef struct range_job {
    gpt_range_task task;
    void          *arg;
    int64_t        count, each;
} range_job;

static void run_range(void *arg, int64_t i)
{
    const range_job *job   = arg;
    int64_t          begin = i * job->each, end = begin + job->each;
    job->task(job->arg, begin, end < job->count ? end : job->count);
}

void gpt_threads_range(gpt_threads *threads, int64_t count, int64_t grain, gpt_range_task task, void *arg)
{
    int64_t   grains = (count + grain - 1) / grain;
    int64_t   each   = (grains + threads->count - 1) / threads->count * grain;
    range_job job    = {task, arg, count, each};
    if (count > 0)
        gpt_threads_run(threads, (count + each - 1) / each, run_range, &job);
}
