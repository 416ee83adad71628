/* Keeps the directory of a pool. ``where`` has, for each slot, the number of its place plus 1; 0: none.
 *
 * Both return -1, before anything is changed, if a slot is none of the pool's. */
#include "directory.h"

#define EXPORT __attribute__((visibility("default")))
/* Slots whose cache misses overlap. */
#define AHEAD 8

static int all_below(const uint32_t *slots, size_t count, size_t rows) {
    size_t outside = 0;
    for (size_t n = 0; n < count; n++) outside += slots[n] >= rows;
    return outside == 0;
}

static void leave(uint64_t *places, uint32_t *where, uint32_t slot) {
    if (where[slot]) store_place(places + (where[slot] - 1), 0);
    where[slot] = 0;
}

/* Slots hold blocks of these names now, and nothing else. */
EXPORT int tierkv_directory_enter(
    uint64_t *places, uint64_t mask, uint32_t *where, size_t rows, const uint32_t *slots,
    const uint64_t *hash_lo, size_t count
) {
    if (!all_below(slots, count, rows)) return -1;
    for (size_t n = 0; n < count; n++) {
        if (n + AHEAD < count) {
            __builtin_prefetch(bucket_of(places, mask, hash_lo[n + AHEAD]), 1);
            __builtin_prefetch(where + slots[n + AHEAD], 1);
        }
        leave(places, where, slots[n]);
        uint64_t *bucket = bucket_of(places, mask, hash_lo[n]);
        size_t at = 0;
        while (at < PLACES && bucket[at]) at++;
        if (at == PLACES) {
            at = slots[n] % PLACES;
            where[(bucket[at] & SLOT_BITS) - 1] = 0;
        }
        store_place(bucket + at, (hash_lo[n] & TAG_BITS) | (slots[n] + 1));
        where[slots[n]] = (uint32_t)(bucket + at - places) + 1;
    }
    return 0;
}

/* Slots hold nothing that anybody should find. */
EXPORT int tierkv_directory_leave(
    uint64_t *places, uint32_t *where, size_t rows, const uint32_t *slots, size_t count
) {
    if (!all_below(slots, count, rows)) return -1;
    for (size_t n = 0; n < count; n++) leave(places, where, slots[n]);
    return 0;
}
