/* XXH3 of long inputs: eight 64-bit lanes eat stripes of 64 bytes.
 *
 * A block that is hashed for a copy is stored from the registers it was loaded into.
 */
#include "xxh3.h"

#define STRIPES_PER_ROUND 16
#define SCRAMBLE_SECRET (SECRET_BYTES - STRIPE_BYTES)
#define LAST_SECRET (SCRAMBLE_SECRET - 7)
/* Hardware prefetchers stop at the ends of 4 KiB pages. */
#define PREFETCH_BYTES 1024

#define INLINE static inline __attribute__((always_inline))

const uint8_t xxh3_secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* Each eats whole stripes, with a scramble after every round, of which ``at`` have been eaten. */
typedef void Eat(
    Lanes *, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
);

static void eat_stripe(Lanes *lanes, const uint8_t *data, size_t secret) {
    for (int i = 0; i < LANES; i++) {
        uint64_t value = read64(data + 8 * i), key = value ^ secret64(secret + 8 * i);
        lanes->lane[i ^ 1] += value;
        lanes->lane[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static void eat_portable(
    Lanes *lanes, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
) {
    if (copying != NO_COPY) data = memcpy(to, data, stripes * STRIPE_BYTES);
    for (size_t n = at; n < at + stripes; n++) {
        eat_stripe(lanes, data + (n - at) * STRIPE_BYTES, n % STRIPES_PER_ROUND * 8);
        if ((n + 1) % STRIPES_PER_ROUND) continue;
        for (int i = 0; i < LANES; i++) {
            uint64_t lane = lanes->lane[i];
            lanes->lane[i] = (lane ^ lane >> 47 ^ secret64(SCRAMBLE_SECRET + 8 * i)) * PRIME32_1;
        }
    }
}

#ifdef __x86_64__
#include <immintrin.h>

#define FOR_AVX512 __attribute__((target("avx512f")))
#define FOR_AVX2 __attribute__((target("avx2")))

/* What was loaded is not loaded again: both hash and copy see the same bytes. */
#define LOADED_ONCE(value) __asm__("" : "+v"(value))

FOR_AVX512 INLINE void eat_avx512_as(
    Lanes *lanes, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
) {
    __m512i sum = _mm512_load_si512(lanes);
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    const __m512i scramble = _mm512_loadu_si512(xxh3_secret + SCRAMBLE_SECRET);
    while (stripes) {
        size_t left = STRIPES_PER_ROUND - at, now = stripes < left ? stripes : left;
        for (size_t n = at; n < at + now; n++) {
            _mm_prefetch((const char *)data + PREFETCH_BYTES, _MM_HINT_T0);
            __m512i value = _mm512_loadu_si512(data);
            LOADED_ONCE(value);
            __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(xxh3_secret + 8 * n));
            __m512i swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E);
            __m512i times = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(swapped, times));
            if (copying == COPY) _mm512_storeu_si512(to, value);
            if (copying == COPY_PAST_CACHES) {
                _mm_stream_si128((__m128i *)to, _mm512_castsi512_si128(value));
                _mm_stream_si128((__m128i *)to + 1, _mm512_extracti32x4_epi32(value, 1));
                _mm_stream_si128((__m128i *)to + 2, _mm512_extracti32x4_epi32(value, 2));
                _mm_stream_si128((__m128i *)to + 3, _mm512_extracti32x4_epi32(value, 3));
            }
            data += STRIPE_BYTES;
            if (copying != NO_COPY) to += STRIPE_BYTES;
        }
        stripes -= now;
        if (now < left) break;
        at = 0;
        sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), scramble);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_store_si512(lanes, sum);
}

FOR_AVX512 static void eat_avx512(
    Lanes *lanes, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
) {
    if (copying == NO_COPY) eat_avx512_as(lanes, at, data, stripes, to, NO_COPY);
    else if (copying == COPY) eat_avx512_as(lanes, at, data, stripes, to, COPY);
    else eat_avx512_as(lanes, at, data, stripes, to, COPY_PAST_CACHES);
}

FOR_AVX2 INLINE void eat_avx2_as(
    Lanes *lanes, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
) {
    __m256i sums[2] = {_mm256_load_si256((__m256i *)lanes), _mm256_load_si256((__m256i *)lanes + 1)};
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    while (stripes) {
        size_t left = STRIPES_PER_ROUND - at, now = stripes < left ? stripes : left;
        for (size_t n = at; n < at + now; n++) {
            _mm_prefetch((const char *)data + PREFETCH_BYTES, _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                const uint8_t *secret = xxh3_secret + 8 * n + 32 * half;
                __m256i value = _mm256_loadu_si256((const __m256i *)data + half);
                LOADED_ONCE(value);
                __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
                __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
                __m256i times = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(swapped, times));
                if (copying == COPY) _mm256_storeu_si256((__m256i *)to + half, value);
                if (copying == COPY_PAST_CACHES) {
                    __m128i *part = (__m128i *)to + 2 * half;
                    _mm_stream_si128(part, _mm256_castsi256_si128(value));
                    _mm_stream_si128(part + 1, _mm256_extracti128_si256(value, 1));
                }
            }
            data += STRIPE_BYTES;
            if (copying != NO_COPY) to += STRIPE_BYTES;
        }
        stripes -= now;
        if (now < left) break;
        at = 0;
        for (int half = 0; half < 2; half++) {
            const uint8_t *secret = xxh3_secret + SCRAMBLE_SECRET + 32 * half;
            __m256i sum = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
            sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)secret));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_store_si256((__m256i *)lanes, sums[0]);
    _mm256_store_si256((__m256i *)lanes + 1, sums[1]);
}

FOR_AVX2 static void eat_avx2(
    Lanes *lanes, size_t at, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying
) {
    if (copying == NO_COPY) eat_avx2_as(lanes, at, data, stripes, to, NO_COPY);
    else if (copying == COPY) eat_avx2_as(lanes, at, data, stripes, to, COPY);
    else eat_avx2_as(lanes, at, data, stripes, to, COPY_PAST_CACHES);
}

/* Tests lower it, to try what other processors run. */
#ifndef VECTOR_BITS_MAX
#define VECTOR_BITS_MAX 512
#endif

static Eat *eat_here(void) {
    if (VECTOR_BITS_MAX >= 512 && __builtin_cpu_supports("avx512f")) return eat_avx512;
    if (VECTOR_BITS_MAX >= 256 && __builtin_cpu_supports("avx2")) return eat_avx2;
    return eat_portable;
}
#else
static Eat *eat_here(void) { return eat_portable; }
#endif

Hashing xxh3_begun(void) {
    return (Hashing){{{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5,
                       PRIME32_1}}, 0};
}

void xxh3_eat(Hashing *hashing, const uint8_t *data, size_t stripes, uint8_t *to, Copying copying) {
    eat_here()(&hashing->lanes, hashing->stripes % STRIPES_PER_ROUND, data, stripes, to, copying);
    hashing->stripes += stripes;
}

static Lanes eat(const uint8_t *data, size_t length, uint8_t *to, Copying copying) {
    Hashing hashing = xxh3_begun();
    size_t stripes = (length - 1) / STRIPE_BYTES, eaten = stripes * STRIPE_BYTES;
    xxh3_eat(&hashing, data, stripes, to, copying);
    if (copying != NO_COPY) {
        memcpy(to + eaten, data + eaten, length - eaten);
        data = to;
    }
    eat_stripe(&hashing.lanes, data + length - STRIPE_BYTES, LAST_SECRET);
    return hashing.lanes;
}

static uint64_t merged(const Lanes *lanes, size_t secret, uint64_t hash) {
    for (int i = 0; i < LANES; i += 2)
        hash += folded_product(lanes->lane[i] ^ secret64(secret + 8 * i),
                               lanes->lane[i + 1] ^ secret64(secret + 8 * i + 8));
    return avalanche(hash);
}

static Hash128 both_merged(const Lanes *lanes, size_t length) {
    return (Hash128){merged(lanes, 11, length * PRIME64_1),
                     merged(lanes, SCRAMBLE_SECRET - 11, ~(length * PRIME64_2))};
}

Hash128 xxh3_128_ended(Hashing *hashing, const uint8_t *last, size_t length) {
    eat_stripe(&hashing->lanes, last, LAST_SECRET);
    return both_merged(&hashing->lanes, length);
}

Hash128 xxh3_128_long(const uint8_t *data, size_t length, uint8_t *to, Copying copying) {
    Lanes lanes = eat(data, length, to, copying);
    return both_merged(&lanes, length);
}

uint64_t xxh3_64_long(const uint8_t *data, size_t length) {
    Lanes lanes = eat(data, length, NULL, NO_COPY);
    return merged(&lanes, 11, length * PRIME64_1);
}
