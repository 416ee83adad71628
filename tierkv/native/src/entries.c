/* Entries of slot tables; tierkv/tiers/entry.py describes them. */
#include "xxh3.h"

#define EXPORT __attribute__((visibility("default")))
#define WORDS 7
#define DIGEST_BYTES 16
#define CHECK_BYTES 8
#define EXTRA_AT 48
#define TOKENS_AT 80
/* Entries whose cache misses overlap. */
#define AHEAD 8

/* Write ``count`` entries of ``entry_bytes`` into slots of a table, whole with their checks.
 *
 * ``words`` are seven columns of 64 bits, ``tokens`` ``block_tokens`` numbers of 32 bits per entry;
 * one that is NULL is all zeroes. -1, before anything is written: a slot is no row of the table. */
EXPORT int tierkv_entries(
    uint8_t *table, size_t entry_bytes, size_t rows, const uint32_t *slots, size_t count,
    const uint64_t *const *words, uint32_t length, uint32_t block_tokens, const uint8_t *digest,
    const uint32_t *tokens
) {
    for (size_t n = 0; n < count; n++)
        if (slots[n] >= rows) return -1;
    for (size_t n = 0; n < count; n++) {
        uint8_t *entry = table + slots[n] * entry_bytes, *at = entry;
        for (size_t word = 0; word < WORDS; word++, at += 8) {
            uint64_t value = words[word] == NULL ? 0 : words[word][n];
            memcpy(at, &value, 8);
        }
        memcpy(at, &length, 4);
        memcpy(at + 4, &block_tokens, 4);
        memcpy(at + 8, digest, DIGEST_BYTES);
        at += 8 + DIGEST_BYTES;
        size_t token_bytes = 4 * (size_t)block_tokens;
        if (tokens == NULL) memset(at, 0, token_bytes);
        else memcpy(at, tokens + n * block_tokens, token_bytes);
        at += token_bytes;
        uint8_t *end = entry + entry_bytes - CHECK_BYTES;
        memset(at, 0, end - at);
        uint64_t check = xxh3_64(entry, end - entry);
        memcpy(end, &check, CHECK_BYTES);
    }
    return 0;
}

/* For each of ``count`` slots of a table, whether its entry has these tokens and this extra digest.
 * -1: a slot is no row of the table. */
EXPORT int tierkv_entries_same(
    const uint8_t *table, size_t entry_bytes, size_t rows, const uint32_t *slots, size_t count,
    uint32_t block_tokens, const uint32_t *tokens, const uint64_t *extras, uint8_t *same
) {
    for (size_t n = 0; n < count; n++)
        if (slots[n] >= rows) return -1;
    size_t token_bytes = 4 * (size_t)block_tokens;
    for (size_t n = 0; n < count; n++) {
        if (n + AHEAD < count) {
            const uint8_t *next = table + slots[n + AHEAD] * entry_bytes + EXTRA_AT;
            __builtin_prefetch(next);
            __builtin_prefetch(next + 64);
        }
        const uint8_t *entry = table + slots[n] * entry_bytes;
        same[n] = read64(entry + EXTRA_AT) == extras[n] &&
                  !memcmp(entry + TOKENS_AT, tokens + n * block_tokens, token_bytes);
    }
    return 0;
}
