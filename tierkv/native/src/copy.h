/* Copies of blocks that are hashed on their way. */
#ifndef TIERKV_COPY_H
#define TIERKV_COPY_H

#include "xxh3.h"

#ifdef __x86_64__
#include <immintrin.h>
#define STORES_DONE() _mm_sfence()
#define PAST_CACHES COPY_PAST_CACHES
#else
#define STORES_DONE() ((void)0)
#define PAST_CACHES COPY
#endif

/* A call that copies much in blocks this long stores them past the caches: nobody reads all of it
 * soon, and a processor that stores whole lines so does not fetch them first. What is little stays in
 * the caches, for whoever asked for it. */
#define PAST_CACHES_MIN 4096
#define MUCH_BYTES (1 << 20)

static inline int all_below(const uint32_t *numbers, size_t count, size_t limit) {
    size_t outside = 0;
    for (size_t n = 0; n < count; n++) outside += numbers[n] >= limit;
    return outside == 0;
}

/* STORES_DONE() comes after the last copy of a call. */
static inline Hash128 copied(uint8_t *target, const uint8_t *source, size_t length, int much) {
    if (length <= SHORT_MAX) return xxh3_128(memcpy(target, source, length), length);
    int past = much && length >= PAST_CACHES_MIN && (uintptr_t)target % STORE_BYTES == 0;
    return xxh3_128_long(source, length, target, past ? PAST_CACHES : COPY);
}

#endif
