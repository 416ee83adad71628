/* XXH3 with seed 0 and the default secret, written from the published description of the algorithm.
 *
 * Short inputs are inlined; long ones (xxh3.c) use the widest vectors of the processor they run on.
 */
#ifndef TIERKV_XXH3_H
#define TIERKV_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines"
#endif

#define SECRET_BYTES 192
#define STRIPE_BYTES 64
#define STORE_BYTES 16
#define SHORT_MAX 240

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MIX_1 0x165667919E3779F9ull
#define PRIME_MIX_2 0x9FB21C651E98DF25ull

typedef struct {
    uint64_t low, high;
} Hash128;

/* How inputs are copied to ``to`` while they are hashed. Then the hash is that of the bytes that came
 * to lie there, also if somebody writes into the input meanwhile. */
typedef enum { NO_COPY, COPY, COPY_PAST_CACHES } Copying;

extern const uint8_t xxh3_secret[SECRET_BYTES];

#define LANES 8

typedef struct {
    uint64_t lane[LANES];
} __attribute__((aligned(64))) Lanes;

/* XXH3 of an input of more than SHORT_MAX bytes that comes in parts: all whole stripes of all but the
 * input's last byte are eaten, in order; then the last 64 bytes give the hash. */
typedef struct {
    Lanes lanes;
    size_t stripes;
} Hashing;

Hashing xxh3_begun(void);
void xxh3_eat(Hashing *hashing, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying);
Hash128 xxh3_128_ended(Hashing *hashing, const uint8_t *last, size_t length);

/* More than SHORT_MAX bytes. COPY_PAST_CACHES wants ``to`` aligned to STORE_BYTES: what numpy
 * allocates is aligned to no more, and wider stores are hardly faster. */
Hash128 xxh3_128_long(const uint8_t *data, size_t length, uint8_t *to, Copying copying);
uint64_t xxh3_64_long(const uint8_t *data, size_t length);

static inline uint32_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t secret64(size_t at) { return read64(xxh3_secret + at); }

static inline Hash128 product(uint64_t a, uint64_t b) {
    unsigned __int128 whole = (unsigned __int128)a * b;
    return (Hash128){(uint64_t)whole, (uint64_t)(whole >> 64)};
}

static inline uint64_t folded_product(uint64_t a, uint64_t b) {
    Hash128 whole = product(a, b);
    return whole.low ^ whole.high;
}

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MIX_1;
    return hash ^ (hash >> 32);
}

static inline uint64_t avalanche_of_xxh64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ (hash >> 32);
}

static inline uint64_t mix16(const uint8_t *data, size_t secret) {
    return folded_product(read64(data) ^ secret64(secret), read64(data + 8) ^ secret64(secret + 8));
}

static inline void mix32(Hash128 *sum, const uint8_t *one, const uint8_t *two, size_t secret) {
    sum->low += mix16(one, secret);
    sum->low ^= read64(two) + read64(two + 8);
    sum->high += mix16(two, secret + 16);
    sum->high ^= read64(one) + read64(one + 8);
}

static inline Hash128 finish_mixed(Hash128 sum, size_t length) {
    uint64_t high = sum.low * PRIME64_1 + sum.high * PRIME64_4 + length * PRIME64_2;
    return (Hash128){avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

static inline Hash128 xxh3_128_up_to_16(const uint8_t *data, size_t length) {
    if (length > 8) {
        uint64_t first = read64(data), last = read64(data + length - 8);
        Hash128 m = product(first ^ last ^ secret64(32) ^ secret64(40), PRIME64_1);
        m.low += (uint64_t)(length - 1) << 54;
        last ^= secret64(48) ^ secret64(56);
        m.high += last + (uint64_t)(uint32_t)last * (PRIME32_2 - 1);
        m.low ^= __builtin_bswap64(m.high);
        Hash128 hash = product(m.low, PRIME64_2);
        hash.high += m.high * PRIME64_2;
        return (Hash128){avalanche(hash.low), avalanche(hash.high)};
    }
    if (length > 3) {
        uint64_t both = read32(data) + ((uint64_t)read32(data + length - 4) << 32);
        Hash128 m = product(both ^ secret64(16) ^ secret64(24), PRIME64_1 + (length << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low ^= m.low >> 35;
        m.low *= PRIME_MIX_2;
        m.low ^= m.low >> 28;
        return (Hash128){m.low, avalanche(m.high)};
    }
    if (length > 0) {
        uint32_t low = (uint32_t)data[0] << 16 | (uint32_t)data[length >> 1] << 24 |
                       data[length - 1] | (uint32_t)length << 8;
        uint32_t swapped = __builtin_bswap32(low), high = swapped << 13 | swapped >> 19;
        uint64_t flip_low = read32(xxh3_secret) ^ read32(xxh3_secret + 4);
        uint64_t flip_high = read32(xxh3_secret + 8) ^ read32(xxh3_secret + 12);
        return (Hash128){avalanche_of_xxh64(low ^ flip_low), avalanche_of_xxh64(high ^ flip_high)};
    }
    return (Hash128){avalanche_of_xxh64(secret64(64) ^ secret64(72)),
                     avalanche_of_xxh64(secret64(80) ^ secret64(88))};
}

static inline Hash128 xxh3_128_up_to_240(const uint8_t *data, size_t length) {
    const uint8_t *end = data + length;
    Hash128 sum = {length * PRIME64_1, 0};
    if (length <= 128) {
        if (length > 96) mix32(&sum, data + 48, end - 64, 96);
        if (length > 64) mix32(&sum, data + 32, end - 48, 64);
        if (length > 32) mix32(&sum, data + 16, end - 32, 32);
        mix32(&sum, data, end - 16, 0);
        return finish_mixed(sum, length);
    }
    for (size_t at = 0; at < 128; at += 32) mix32(&sum, data + at, data + at + 16, at);
    sum = (Hash128){avalanche(sum.low), avalanche(sum.high)};
    for (size_t at = 128; at + 32 <= length; at += 32)
        mix32(&sum, data + at, data + at + 16, at - 128 + 3);
    mix32(&sum, end - 16, end - 32, 103);
    return finish_mixed(sum, length);
}

static inline Hash128 xxh3_128(const uint8_t *data, size_t length) {
    if (length > SHORT_MAX) return xxh3_128_long(data, length, NULL, NO_COPY);
    return length > 16 ? xxh3_128_up_to_240(data, length) : xxh3_128_up_to_16(data, length);
}

/* More than 16 bytes. */
static inline uint64_t xxh3_64(const uint8_t *data, size_t length) {
    if (length > SHORT_MAX) return xxh3_64_long(data, length);
    const uint8_t *end = data + length;
    uint64_t sum = length * PRIME64_1;
    if (length <= 128) {
        if (length > 96) sum += mix16(data + 48, 96) + mix16(end - 64, 112);
        if (length > 64) sum += mix16(data + 32, 64) + mix16(end - 48, 80);
        if (length > 32) sum += mix16(data + 16, 32) + mix16(end - 32, 48);
        return avalanche(sum + mix16(data, 0) + mix16(end - 16, 16));
    }
    for (size_t at = 0; at < 128; at += 16) sum += mix16(data + at, at);
    sum = avalanche(sum);
    for (size_t at = 128; at + 16 <= length; at += 16) sum += mix16(data + at, at - 128 + 3);
    return avalanche(sum + mix16(end - 16, 119));
}

/* The digest as it travels: 16 big-endian bytes. */
static inline void put_digest(uint8_t *at, Hash128 hash) {
    uint64_t high = __builtin_bswap64(hash.high), low = __builtin_bswap64(hash.low);
    memcpy(at, &high, 8);
    memcpy(at + 8, &low, 8);
}

#endif
