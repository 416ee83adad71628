/* Reads cached blocks out of memory that the daemon changes meanwhile, and proves each.
 *
 * The directory only hints. An entry is copied before anything is concluded from it, and its check
 * says whether it was whole; then the payload is copied, and hashed on the way. Whatever becomes of
 * the slot in between: bytes that have the checksum of the block's entry are the block. */
#include "directory.h"
#include "pages.h"

#define EXPORT __attribute__((visibility("default")))
#define DIGEST_BYTES 16
#define CHECK_BYTES 8
#define LINE_BYTES 64

/* Of an entry; tierkv/tiers/entry.py describes all of it. */
#define ID_AT 0
#define PARENT_AT 8
#define HASH_AT 16
#define SUM_AT 32
#define EXTRA_AT 48
#define DIGEST_AT 64
#define TOKENS_AT 80

/* Memory of the blocks of one namespace, as tierkv/native/reading.py fills it in. */
typedef struct {
    const uint8_t *entries;
    size_t entry_bytes;
    const uint8_t *payload;
    size_t stride, block_bytes, slots;
    const uint64_t *places;
    uint64_t mask;
    const uint8_t *digest;
    size_t block_tokens;
} Pool;

/* A block, by all that its entry must say. */
typedef struct {
    uint64_t parent, hash_hi, hash_lo, extra;
    const uint8_t *tokens;
} Wanted;

/* Where a block is copied to: part ``id`` of the pages. Without pages it is not. */
typedef struct {
    const Pages *pages;
    uint32_t id;
    int much;
} Target;

static const uint8_t *entry_of(const Pool *pool, uint32_t slot) {
    return pool->entries + slot * pool->entry_bytes;
}

/* The slots that may hold a block, into ``found``; how many there are. */
static size_t candidates(const Pool *pool, uint64_t hash_lo, uint32_t *found) {
    const uint64_t *bucket = bucket_of(pool->places, pool->mask, hash_lo);
    size_t count = 0;
    for (size_t n = 0; n < PLACES; n++) {
        uint64_t place = load_place(bucket + n);
        uint32_t slot = (uint32_t)place - 1;
        if (((place ^ hash_lo) & TAG_BITS) == 0 && slot < pool->slots) found[count++] = slot;
    }
    return count;
}

static int says(const Pool *pool, const uint8_t *entry, const Wanted *wanted) {
    size_t checked = pool->entry_bytes - CHECK_BYTES;
    return read64(entry + PARENT_AT) == wanted->parent &&
           read64(entry + HASH_AT) == wanted->hash_hi &&
           read64(entry + HASH_AT + 8) == wanted->hash_lo &&
           read64(entry + EXTRA_AT) == wanted->extra &&
           !memcmp(entry + DIGEST_AT, pool->digest, DIGEST_BYTES) &&
           !memcmp(entry + TOKENS_AT, wanted->tokens, 4 * pool->block_tokens) &&
           (read64(entry + SUM_AT) | read64(entry + SUM_AT + 8)) &&
           read64(entry + checked) == xxh3_64(entry, checked);
}

static Hash128 copied_to(const Target *target, const uint8_t *block) {
    const Pages *pages = target->pages;
    if (pages->count > 1)  // which is not written to, in this direction
        return copied_pages(pages, target->id, (uint8_t *)block, 1, target->much);
    return copied(part_of(pages->arrays, target->id), block, pages->bytes, target->much);
}

/* Copy a block if the slot holds it; its id, or 0. */
static uint64_t take(
    const Pool *pool, uint32_t slot, const Wanted *wanted, const Target *target, uint8_t *entry
) {
    memcpy(entry, entry_of(pool, slot), pool->entry_bytes);
    if (!says(pool, entry, wanted)) return 0;
    if (target->pages == NULL) return read64(entry + ID_AT);
    Hash128 sum = copied_to(target, pool->payload + slot * pool->stride);
    int same = read64(entry + SUM_AT) == sum.high && read64(entry + SUM_AT + 8) == sum.low;
    return same ? read64(entry + ID_AT) : 0;
}

/* Copy a block from whichever of ``count`` slots holds it; its id, or 0.
 *
 * The youngest block comes first: of several of one name it is the one that younger children name. */
static uint64_t take_any(
    const Pool *pool, uint32_t *slots, size_t count, const Wanted *wanted, const Target *target,
    uint8_t *entry
) {
    while (count) {
        size_t best = 0;
        for (size_t n = 1; n < count; n++)
            if (read64(entry_of(pool, slots[n])) > read64(entry_of(pool, slots[best]))) best = n;
        uint64_t id = take(pool, slots[best], wanted, target, entry);
        if (id) return id;
        slots[best] = slots[--count];
    }
    return 0;
}

static uint64_t hash_lo_of(const uint8_t *hash) { return __builtin_bswap64(read64(hash + 8)); }

static void prefetch_bucket(const Pool *pool, const uint8_t *hash) {
    __builtin_prefetch(bucket_of(pool->places, pool->mask, hash_lo_of(hash)));
}

static void prefetch_entry(const Pool *pool, const uint8_t *hash) {
    uint32_t slots[PLACES];
    if (!candidates(pool, hash_lo_of(hash), slots)) return;
    const uint8_t *entry = entry_of(pool, slots[0]);
    for (size_t at = 0; at < pool->entry_bytes; at += LINE_BYTES) __builtin_prefetch(entry + at);
}

/* Copy the leading ones of ``count`` blocks of a chain into pages; how many are right.
 *
 * The ``first`` ones are not copied, only found. Block ``first + n`` goes to page ``ids[n]``; n where
 * ``ids`` is NULL. ``slots`` says where they lie; NULL: the directory does. ``hashes`` are their
 * digests, ``extras`` may be NULL. ``entry`` is room for one. */
EXPORT size_t tierkv_read(
    const Pool *pool, const uint32_t *slots, const uint8_t *hashes, const uint8_t *tokens,
    const uint64_t *extras, size_t first, size_t count, const Pages *pages, const uint32_t *ids,
    uint8_t *entry
) {
    int much = (count - first) * pool->block_bytes >= MUCH_BYTES;
    size_t token_bytes = 4 * pool->block_tokens, done = 0;
    uint64_t id = 0;
    for (; done < count; done++) {
        const uint8_t *hash = hashes + done * DIGEST_BYTES;
        if (done + 2 < count) prefetch_bucket(pool, hash + 2 * DIGEST_BYTES);
        if (done + 1 < count) prefetch_entry(pool, hash + DIGEST_BYTES);
        Wanted wanted = {id, __builtin_bswap64(read64(hash)), hash_lo_of(hash),
                         extras ? extras[done] : 0, tokens + done * token_bytes};
        Target target = {NULL, 0, much};
        if (done >= first) {
            target.pages = pages;
            target.id = ids ? ids[done - first] : (uint32_t)(done - first);
        }
        uint32_t found[PLACES];
        size_t places = 1;
        if (slots == NULL) places = candidates(pool, wanted.hash_lo, found);
        else found[0] = slots[done];
        id = take_any(pool, found, places, &wanted, &target, entry);
        if (!id) break;
    }
    STORES_DONE();
    return done;
}
