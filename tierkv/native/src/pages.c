#include "pages.h"

#define EXPORT __attribute__((visibility("default")))
#define DIGEST_BYTES 16

/* Bytes on their way that are hashed stripe by stripe. ``left``: whole stripes to come. Where parts end
 * within a stripe, it is put together in ``stripe``, which holds ``held`` bytes of it. */
typedef struct {
    Hashing hashing;
    size_t left, held;
    uint8_t stripe[STRIPE_BYTES];
} Passing;

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* Copy less than a stripe, by way of the stripe: what is hashed is what was copied. */
static size_t pass_few(Passing *passing, uint8_t *to, const uint8_t *from, size_t length) {
    size_t count = least(STRIPE_BYTES - passing->held, length);
    uint8_t *through = passing->stripe + passing->held;
    memcpy(through, from, count);
    __asm__("" ::: "memory");
    memcpy(to, through, count);
    passing->held += count;
    if (passing->held == STRIPE_BYTES && passing->left) {
        xxh3_eat(&passing->hashing, passing->stripe, 1, NULL, NO_COPY);
        passing->left--;
        passing->held = 0;
    }
    return count;
}

static void pass(Passing *passing, uint8_t *to, const uint8_t *from, size_t length, int much) {
    while (length) {
        size_t stripes = least(length / STRIPE_BYTES, passing->left), count;
        if (passing->held || !stripes) {
            count = pass_few(passing, to, from, length);
        } else {
            count = stripes * STRIPE_BYTES;
            int past = much && count >= PAST_CACHES_MIN && (uintptr_t)to % STORE_BYTES == 0;
            xxh3_eat(&passing->hashing, from, stripes, to, past ? PAST_CACHES : COPY);
            passing->left -= stripes;
        }
        to += count;
        from += count;
        length -= count;
    }
}

/* Put the last 64 bytes of a block together. */
static void last_of(const Pages *pages, uint32_t id, uint8_t *last) {
    size_t missing = STRIPE_BYTES;
    for (size_t n = pages->count; missing; n--) {
        const Array *array = pages->arrays + n - 1;
        size_t count = least(array->bytes, missing);
        missing -= count;
        memcpy(last + missing, part_of(array, id) + array->bytes - count, count);
    }
}

static void gather(const Pages *pages, uint32_t id, uint8_t *block) {
    for (const Array *array = pages->arrays; array < pages->arrays + pages->count; array++) {
        memcpy(block, part_of(array, id), array->bytes);
        block += array->bytes;
    }
}

static void scatter(const Pages *pages, uint32_t id, const uint8_t *block) {
    for (const Array *array = pages->arrays; array < pages->arrays + pages->count; array++) {
        memcpy(part_of(array, id), block, array->bytes);
        block += array->bytes;
    }
}

static Hash128 copied_short(const Pages *pages, uint32_t id, uint8_t *block, int into_pages) {
    uint8_t copy[SHORT_MAX];
    if (into_pages) {
        memcpy(copy, block, pages->bytes);
        __asm__("" ::: "memory");
        scatter(pages, id, copy);
        return xxh3_128(copy, pages->bytes);
    }
    gather(pages, id, block);
    return xxh3_128(block, pages->bytes);
}

Hash128 copied_pages(const Pages *pages, uint32_t id, uint8_t *block, int into_pages, int much) {
    size_t length = pages->bytes;
    if (length <= SHORT_MAX) return copied_short(pages, id, block, into_pages);
    Passing passing = {xxh3_begun(), (length - 1) / STRIPE_BYTES, 0, {0}};
    uint8_t *at = block, last[STRIPE_BYTES];
    for (size_t n = 0; n < pages->count; n++) {
        const Array *array = pages->arrays + n;
        uint8_t *part = part_of(array, id);
        pass(&passing, into_pages ? part : at, into_pages ? at : part, array->bytes, much);
        at += array->bytes;
    }
    if (into_pages) last_of(pages, id, last);
    else memcpy(last, at - STRIPE_BYTES, STRIPE_BYTES);
    return xxh3_128_ended(&passing.hashing, last, length);
}

/* Copy blocks out of the pages ``ids`` [count], of ``pages_rows`` that there are, into slots of the
 * pool, and put their digests into ``sums``. -1, before anything is copied: a slot or an id is none. */
EXPORT int tierkv_pages_in(
    uint8_t *pool, size_t stride, size_t rows, const uint32_t *slots,
    const Pages *pages, size_t pages_rows, const uint32_t *ids, size_t count, uint8_t *sums
) {
    if (!all_below(slots, count, rows) || !all_below(ids, count, pages_rows)) return -1;
    int much = count * pages->bytes >= MUCH_BYTES;
    for (size_t n = 0; n < count; n++)
        put_digest(sums + n * DIGEST_BYTES,
                   copied_pages(pages, ids[n], pool + slots[n] * stride, 0, much));
    STORES_DONE();
    return 0;
}

/* The other way, without digests. */
EXPORT int tierkv_pages_out(
    const uint8_t *pool, size_t stride, size_t rows, const uint32_t *slots,
    const Pages *pages, size_t pages_rows, const uint32_t *ids, size_t count
) {
    if (!all_below(slots, count, rows) || !all_below(ids, count, pages_rows)) return -1;
    for (size_t n = 0; n < count; n++) scatter(pages, ids[n], pool + slots[n] * stride);
    return 0;
}
