/*
 * A small thread pool: threads start on first use, spin for some microseconds after a call and then sleep. It survives
 * fork (the child starts threads of its own) and is used by one call at a time (a second caller runs alone). Why it is
 * our own: docs/decisions/0001-own-thread-pool.md.
 */
#include "cpu/cpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

/* About 30 microseconds: longer than the gap between the calls of one model layer, shorter than a scheduler tick. */
#define SPIN_ROUNDS 1000
/* About a millisecond: who has done his part of a call waits for the others awake, for waking 15 sleepers would take the
 * next call a good part of that. */
#define SPIN_ROUNDS_IN_JOB 30000
#define STACK_BYTES (1 << 20) /* the C library takes a program's thread-local variables from it, too */

/* GNU OpenMP's entry to a parallel region, which LLVM's and Intel's runtimes have too. num_threads 0: as many as the
 * calling thread's own regions would have. */
typedef void (*openmp_parallel)(void (*member)(void *), void *arg, unsigned num_threads, unsigned flags);

typedef struct worker {
    fa_threads *threads;
    pthread_t   handle;
    int         index;    /* the index it runs bodies with, from 1 */
    uint64_t    last_job; /* when it was started */
} worker;

struct fa_threads {
    flash_attn_parallel_for parallel_for;
    void                   *pool;
    int                     num_threads;
    openmp_parallel         openmp;
    long                    openmp_process; /* a child of fork lacks OpenMP's threads, and OpenMP waits for them */

    atomic_long owner;       /* process that the workers belong to; 0: being set up */
    atomic_bool busy;        /* a call is using the workers */
    int         num_workers; /* started; changed only by the call that holds `busy` */
    worker     *workers;     /* [num_threads - 1] */

    /* The current job. Its number and the count of its participants are one word, so that a worker that does not take
     * part never reads a field that the next job may be changing. */
    _Atomic uint64_t job; /* number << 16 | participants */
    flash_attn_task  body;
    void            *arg;
    atomic_int       remaining; /* participants still running it */
    bool             roomy;     /* a processor for each thread: who spins is in nobody's way */
    atomic_bool      stop;

    pthread_mutex_t mutex;
    pthread_cond_t  job_posted, job_done;
    atomic_int      sleepers; /* workers waiting on job_posted */
    atomic_bool     waiting;  /* the caller waits on job_done */
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int fa_num_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more than 1024 processors: the mask above is too short */
    return online > 0 ? (int)online : 1;
}

/* Longer while the job that one has done one's part of still runs. */
static bool keep_spinning(fa_threads *threads, int round)
{
    return round < SPIN_ROUNDS || (threads->roomy && round < SPIN_ROUNDS_IN_JOB &&
                                   atomic_load_explicit(&threads->remaining, memory_order_relaxed) > 0);
}

static uint64_t wait_for_job(fa_threads *threads, uint64_t last)
{
    for (int round = 0; keep_spinning(threads, round); round++) {
        uint64_t job = atomic_load_explicit(&threads->job, memory_order_acquire);
        if (job != last)
            return job;
        pause_cpu();
    }
    pthread_mutex_lock(&threads->mutex);
    atomic_fetch_add(&threads->sleepers, 1);
    uint64_t job;
    while ((job = atomic_load(&threads->job)) == last)
        pthread_cond_wait(&threads->job_posted, &threads->mutex);
    atomic_fetch_sub(&threads->sleepers, 1);
    pthread_mutex_unlock(&threads->mutex);
    return job;
}

static void *worker_main(void *arg)
{
    worker     *self    = arg;
    fa_threads *threads = self->threads;
    uint64_t    last    = self->last_job;
    for (;;) {
        last = wait_for_job(threads, last);
        if (atomic_load(&threads->stop))
            return NULL;
        if (self->index >= (int)(last & 0xFFFF))
            continue;
        threads->body(threads->arg, self->index);
        if (atomic_fetch_sub(&threads->remaining, 1) == 1 && atomic_load(&threads->waiting)) {
            pthread_mutex_lock(&threads->mutex);
            pthread_cond_signal(&threads->job_done);
            pthread_mutex_unlock(&threads->mutex);
        }
    }
}

static void post_job(fa_threads *threads, int participants)
{
    uint64_t number = (atomic_load(&threads->job) >> 16) + 1;
    atomic_store(&threads->job, number << 16 | (uint64_t)participants);
    if (atomic_load(&threads->sleepers) > 0) {
        pthread_mutex_lock(&threads->mutex);
        pthread_cond_broadcast(&threads->job_posted);
        pthread_mutex_unlock(&threads->mutex);
    }
}

/* The caller's part is done. */
static void wait_until_done(fa_threads *threads)
{
    atomic_fetch_sub(&threads->remaining, 1);
    for (int round = 0; keep_spinning(threads, round); round++) {
        if (atomic_load_explicit(&threads->remaining, memory_order_acquire) == 0)
            return;
        pause_cpu();
    }
    pthread_mutex_lock(&threads->mutex);
    atomic_store(&threads->waiting, true);
    while (atomic_load(&threads->remaining) > 0)
        pthread_cond_wait(&threads->job_done, &threads->mutex);
    atomic_store(&threads->waiting, false);
    pthread_mutex_unlock(&threads->mutex);
}

/* Start workers until there are `wanted`, or as many as the system allows. */
static void start_workers(fa_threads *threads, int wanted)
{
    if (threads->num_workers >= wanted)
        return;
    sigset_t       all, before;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all); /* signals are the program's: its handlers run on its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads->num_workers < wanted) {
        worker *next = &threads->workers[threads->num_workers];
        *next        = (worker){threads, 0, threads->num_workers + 1, atomic_load(&threads->job)};
        if (pthread_create(&next->handle, &attributes, worker_main, next) != 0)
            break;
        threads->num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void init_pool(fa_threads *threads)
{
    threads->num_workers = 0;
    pthread_mutex_init(&threads->mutex, NULL);
    pthread_cond_init(&threads->job_posted, NULL);
    pthread_cond_init(&threads->job_done, NULL);
    atomic_store(&threads->sleepers, 0);
    atomic_store(&threads->waiting, false);
    atomic_store(&threads->remaining, 0);
    atomic_store(&threads->busy, false);
}

/* True if the pool belongs to this process, taking it over if it came through fork: the parent's threads are not here.
 */
static bool own_pool(fa_threads *threads)
{
    long self = (long)getpid(), owner = atomic_load(&threads->owner);
    if (owner == self)
        return true;
    if (owner == 0 || !atomic_compare_exchange_strong(&threads->owner, &owner, 0))
        return false; /* another thread is setting it up just now */
    init_pool(threads);
    atomic_store(&threads->owner, self);
    return true;
}

fa_threads *fa_threads_create(const flash_attn_options *options, int num_threads)
{
    fa_threads *threads = calloc(1, sizeof *threads);
    if (!threads)
        return NULL;
    threads->workers = calloc((size_t)num_threads, sizeof *threads->workers);
    if (!threads->workers) {
        free(threads);
        return NULL;
    }
    threads->num_threads  = num_threads;
    threads->roomy        = num_threads <= fa_num_cores();
    threads->parallel_for = options->parallel_for;
    threads->pool         = options->pool;
    if (options->use_openmp) {
        *(void **)&threads->openmp = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        threads->openmp_process    = (long)getpid();
    }
    init_pool(threads);
    atomic_store(&threads->owner, (long)getpid());
    return threads;
}

void fa_threads_destroy(fa_threads *threads)
{
    if (!threads)
        return;
    if (atomic_load(&threads->owner) == (long)getpid()) {
        atomic_store(&threads->stop, true);
        post_job(threads, 0);
        for (int n = 0; n < threads->num_workers; n++)
            pthread_join(threads->workers[n].handle, NULL);
        pthread_mutex_destroy(&threads->mutex);
        pthread_cond_destroy(&threads->job_posted);
        pthread_cond_destroy(&threads->job_done);
    }
    free(threads->workers);
    free(threads);
}

/* ---- on OpenMP's threads ---- */

typedef struct region {
    flash_attn_task body;
    void           *arg;
    int             count;
    atomic_int      next;
} region;

/* The team may have any number of members. */
static void region_member(void *arg)
{
    region *r = arg;
    int     index;
    while ((index = atomic_fetch_add(&r->next, 1)) < r->count)
        r->body(r->arg, index);
}

void fa_threads_run(fa_threads *threads, int count, flash_attn_task body, void *arg)
{
    if (count > 1 && threads->parallel_for) {
        threads->parallel_for(threads->pool, count, body, arg);
        return;
    }
    if (count > 1 && threads->openmp && threads->openmp_process == (long)getpid()) {
        region r = {.body = body, .arg = arg, .count = count};
        threads->openmp(region_member, &r, 0, 0);
        return;
    }
    int done = 0; /* indices that the workers run */
    if (count > 1 && own_pool(threads) && !atomic_exchange(&threads->busy, true)) {
        start_workers(threads, fa_min_int(count, threads->num_threads) - 1);
        int participants = fa_min_int(count, threads->num_workers + 1);
        threads->body    = body;
        threads->arg     = arg;
        if (participants > 1) {
            atomic_store(&threads->remaining, participants);
            post_job(threads, participants);
        }
        body(arg, 0);
        if (participants > 1)
            wait_until_done(threads);
        atomic_store(&threads->busy, false);
        done = participants;
    }
    for (int index = done; index < count; index++)
        body(arg, index);
}
