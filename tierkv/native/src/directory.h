/* The directory of a pool: which slot may hold which block. tierkv/native/directory.py describes it. */
#ifndef TIERKV_DIRECTORY_H
#define TIERKV_DIRECTORY_H

#include <stddef.h>
#include <stdint.h>

#define PLACES 8
#define SLOT_BITS 0xFFFFFFFFull
#define TAG_BITS (~SLOT_BITS)

static inline uint64_t *bucket_of(const uint64_t *places, uint64_t mask, uint64_t hash_lo) {
    return (uint64_t *)places + (hash_lo & mask) * PLACES;
}

/* The daemon stores while others load: each place is whole, at least. */
static inline uint64_t load_place(const uint64_t *place) {
    return __atomic_load_n(place, __ATOMIC_RELAXED);
}

static inline void store_place(uint64_t *place, uint64_t value) {
    __atomic_store_n(place, value, __ATOMIC_RELAXED);
}

#endif
