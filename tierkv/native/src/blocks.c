/* Loops over blocks of tokens and of bytes, for tierkv.native.loops.
 *
 * Matrices come as their address, the bytes from one row to the next, and how many rows there are. */
#include "copy.h"

#define EXPORT __attribute__((visibility("default")))
#define DIGEST_BYTES 16

/* Chain hashes of ``blocks`` blocks of ``block_bytes`` bytes of tokens, into ``out``. ``extras`` may
 * be NULL. ``scratch`` has room for a digest, a block's tokens and 8 bytes. */
EXPORT void tierkv_chain_hashes(
    const uint8_t *seed, const uint8_t *tokens, size_t blocks, size_t block_bytes,
    const uint64_t *extras, uint8_t *scratch, uint8_t *out
) {
    size_t length = DIGEST_BYTES + block_bytes;
    memcpy(scratch, seed, DIGEST_BYTES);
    for (size_t n = 0; n < blocks; n++) {
        memcpy(scratch + DIGEST_BYTES, tokens + n * block_bytes, block_bytes);
        int extra = extras != NULL && extras[n] != 0;
        if (extra) memcpy(scratch + length, extras + n, sizeof *extras);
        Hash128 hash = xxh3_128(scratch, length + (extra ? sizeof *extras : 0));
        put_digest(scratch, hash);
        put_digest(out + n * DIGEST_BYTES, hash);
    }
}

/* xxh3_128 of the first ``length`` bytes of each slot, as 16-byte digests. -1: a slot is no row of
 * the pool. */
EXPORT int tierkv_checksums(
    const uint8_t *pool, size_t stride, size_t rows, const uint32_t *slots, size_t count,
    size_t length, uint8_t *out
) {
    if (!all_below(slots, count, rows)) return -1;
    for (size_t n = 0; n < count; n++)
        put_digest(out + n * DIGEST_BYTES, xxh3_128(pool + slots[n] * stride, length));
    return 0;
}

/* xxh3_64 of the first ``length`` (> 16) bytes of each row. */
EXPORT void tierkv_checks(
    const uint8_t *data, size_t stride, size_t rows, size_t length, uint64_t *out
) {
    for (size_t n = 0; n < rows; n++) out[n] = xxh3_64(data + n * stride, length);
}

/* Copy the first ``length`` bytes of ``count`` rows, and put their digests into ``sums`` unless it is
 * NULL. -1, before anything is copied: a slot is no row.
 *
 * Row n is copied from number ``from_slots[n]`` to number ``to_slots[n]``; n itself where the slots
 * are NULL. */
EXPORT int tierkv_copy(
    uint8_t *to, size_t to_stride, size_t to_rows, const uint32_t *to_slots,
    const uint8_t *from, size_t from_stride, size_t from_rows, const uint32_t *from_slots,
    size_t count, size_t length, uint8_t *sums
) {
    if (to_slots ? !all_below(to_slots, count, to_rows) : count > to_rows) return -1;
    if (from_slots ? !all_below(from_slots, count, from_rows) : count > from_rows) return -1;
    int much = count * length >= MUCH_BYTES;
    for (size_t n = 0; n < count; n++) {
        uint8_t *target = to + (to_slots ? to_slots[n] : n) * to_stride;
        const uint8_t *source = from + (from_slots ? from_slots[n] : n) * from_stride;
        if (sums == NULL) memcpy(target, source, length);
        else put_digest(sums + n * DIGEST_BYTES, copied(target, source, length, much));
    }
    STORES_DONE();
    return 0;
}
