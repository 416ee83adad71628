/* Threads that work off one job at a time, with the caller as one of them. */
#ifndef TIERKV_POOL_H
#define TIERKV_POOL_H

#include <stddef.h>

struct pool;

/* One thread's share of a job: ``thread`` counts from 0, the caller's. */
typedef void (*job)(void *argument, int thread);

int pool_threads(const struct pool *pool);

/* Run ``job`` on ``threads`` threads, the caller's included, or on fewer where the system starts no
 * more; a job must not rely on their number. The lock is the caller's. */
void pool_run(struct pool *pool, int threads, job job, void *argument);

void pool_lock(struct pool *pool);
void pool_unlock(struct pool *pool);

/* Memory of at least ``bytes`` that lasts until the next call; NULL: there is none. Needs the lock. */
void *pool_memory(struct pool *pool, size_t bytes);

#endif
