/* Reads blocks and does next to nothing with them: how fast memory can be read at all. */
#include <stdatomic.h>

#include "level.h"
#include "pool.h"
#include "vectors.h"

typedef uint64_t Longs __attribute__((vector_size(4 * W)));
typedef Longs LongsAnywhere __attribute__((aligned(8), may_alias));

struct reading {
    const char *data;
    const int64_t *offsets;
    int64_t count, bytes;
    int shares; /* as many as there should be threads */
    atomic_int next_share;
    atomic_ullong sum;
};

static uint64_t sum_of(const char *from, int64_t bytes) {
    enum { AT_ONCE = 8, STEP = AT_ONCE * sizeof(Longs) };
    Longs sums[AT_ONCE] = {{0}};
    int64_t n = 0;
    for (; n + STEP <= bytes; n += STEP)
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            sums[i] += *(const LongsAnywhere *)(from + n + i * (int64_t)sizeof(Longs));
    uint64_t sum = 0;
    for (int i = 0; i < AT_ONCE; i++)
        for (int lane = 0; lane < W / 2; lane++) sum += sums[i][lane];
    for (; n < bytes; n += 8) sum += *(const uint64_t *)(from + n);
    return sum;
}

static void read_share(void *argument, int thread) {
    struct reading *reading = argument;
    (void)thread;
    for (int64_t n; (n = atomic_fetch_add(&reading->next_share, 1)) < reading->shares;) {
        int64_t begin = reading->count * n / reading->shares;
        int64_t end = reading->count * (n + 1) / reading->shares;
        uint64_t sum = 0;
        for (int64_t i = begin; i < end; i++)
            sum += sum_of(reading->data + reading->offsets[i], reading->bytes);
        atomic_fetch_add(&reading->sum, sum);
    }
}

/* The sum of all 8-byte words, modulo 2^64, of ``count`` pieces of ``bytes``, a multiple of 8, at
 * ``offsets`` from ``data``; each of the pool's threads reads as many, one after another. */
EXPORT uint64_t OF_LEVEL(tierkv_read)(
    struct pool *pool, const char *data, const int64_t *offsets, int64_t count, int64_t bytes
) {
    struct reading reading = {data, offsets, count, bytes, pool_threads(pool), 0, 0};
    pool_lock(pool);
    pool_run(pool, reading.shares, read_share, &reading);
    pool_unlock(pool);
    return reading.sum;
}
