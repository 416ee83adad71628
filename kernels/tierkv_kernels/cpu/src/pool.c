#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define CACHE_LINE 64
#define HUGE_PAGE (2 << 20)

/* How often a waiting thread looks before it sleeps: a few tens of microseconds, as long as the
 * pause from one layer's attention to the next. */
#define SPINS 2000

struct pool {
    pthread_mutex_t lock; /* one job at a time */
    int threads;          /* wanted, the caller included */
    int started;          /* threads of our own */
    pthread_t *ids;
    void *memory;
    size_t memory_bytes;

    pthread_mutex_t sleep_lock; /* for the conditions, and whatever says that they hold */
    pthread_cond_t has_job, is_done;

    job job;
    void *argument;
    int job_threads;
    int closing;
    _Alignas(CACHE_LINE) atomic_uint jobs; /* counts up; the fields above are written before */
    _Alignas(CACHE_LINE) atomic_int running; /* threads of our own that are not done with it */
};

struct worker {
    struct pool *pool;
    int thread;
    unsigned seen;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static unsigned wait_for_job(struct pool *pool, unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        unsigned jobs = atomic_load_explicit(&pool->jobs, memory_order_acquire);
        if (jobs != seen) return jobs;
        relax();
    }
    pthread_mutex_lock(&pool->sleep_lock);
    while (atomic_load(&pool->jobs) == seen) pthread_cond_wait(&pool->has_job, &pool->sleep_lock);
    pthread_mutex_unlock(&pool->sleep_lock);
    return atomic_load(&pool->jobs);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    struct pool *pool = worker->pool;
    int thread = worker->thread;
    unsigned seen = worker->seen;
    free(worker);
    for (;;) {
        seen = wait_for_job(pool, seen);
        if (pool->closing) return NULL;
        if (thread < pool->job_threads) pool->job(pool->argument, thread);
        if (atomic_fetch_sub(&pool->running, 1) == 1) {
            pthread_mutex_lock(&pool->sleep_lock);
            pthread_cond_signal(&pool->is_done);
            pthread_mutex_unlock(&pool->sleep_lock);
        }
    }
}

static void announce(struct pool *pool) {
    atomic_store(&pool->running, pool->started);
    pthread_mutex_lock(&pool->sleep_lock);
    atomic_fetch_add_explicit(&pool->jobs, 1, memory_order_release);
    pthread_cond_broadcast(&pool->has_job);
    pthread_mutex_unlock(&pool->sleep_lock);
}

static void wait_until_done(struct pool *pool) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->running, memory_order_acquire) == 0) return;
        relax();
    }
    pthread_mutex_lock(&pool->sleep_lock);
    while (atomic_load(&pool->running) != 0) pthread_cond_wait(&pool->is_done, &pool->sleep_lock);
    pthread_mutex_unlock(&pool->sleep_lock);
}

/* Ours take no signals: those are for the program's own threads. */
static int start_one(struct pool *pool) {
    struct worker *worker = malloc(sizeof *worker);
    if (worker == NULL) return ENOMEM;
    *worker = (struct worker){pool, pool->started + 1, atomic_load(&pool->jobs)};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&pool->ids[pool->started], NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) free(worker);
    else pool->started++;
    return error;
}

void pool_run(struct pool *pool, int threads, job job, void *argument) {
    while (threads > 1 && pool->started < pool->threads - 1 && start_one(pool) == 0);
    if (threads <= 1 || pool->started == 0) {
        job(argument, 0);
        return;
    }
    pool->job = job;
    pool->argument = argument;
    pool->job_threads = threads;
    announce(pool);
    job(argument, 0);
    wait_until_done(pool);
}

int pool_threads(const struct pool *pool) { return pool->threads; }
void pool_lock(struct pool *pool) { pthread_mutex_lock(&pool->lock); }
void pool_unlock(struct pool *pool) { pthread_mutex_unlock(&pool->lock); }

void *pool_memory(struct pool *pool, size_t bytes) {
    if (bytes > pool->memory_bytes) {
        free(pool->memory);
        size_t unit = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE;
        size_t room = (bytes + unit - 1) / unit * unit;
        pool->memory = aligned_alloc(unit, room);
        pool->memory_bytes = pool->memory ? room : 0;
    }
    return pool->memory;
}

static void begin(struct pool *pool) {
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->has_job, NULL);
    pthread_cond_init(&pool->is_done, NULL);
    pool->started = 0;
    pool->closing = 0;
}

/* A pool of ``threads`` threads, which start with the first job for more than one. NULL: no memory. */
EXPORT struct pool *tierkv_pool_new(int threads) {
    struct pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    if (pool == NULL) return NULL;
    *pool = (struct pool){.threads = threads};
    pool->ids = calloc((size_t)threads, sizeof *pool->ids);
    if (pool->ids == NULL) {
        free(pool);
        return NULL;
    }
    begin(pool);
    return pool;
}

/* Only for the child of a fork, before its first job: it has none of the threads, and whoever held
 * a lock is not there to let it go. */
EXPORT void tierkv_pool_forked(struct pool *pool) {
    pool->memory = NULL; /* another thread may have been at it */
    pool->memory_bytes = 0;
    begin(pool);
}

/* Joins the threads. Nobody may be in a job. */
EXPORT void tierkv_pool_free(struct pool *pool) {
    pool->closing = 1;
    announce(pool);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->ids[i], NULL);
    free(pool->memory);
    free(pool->ids);
    free(pool);
}
