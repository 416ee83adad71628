/* Vectors of as many floats as the level has, what K and V are stored as, and exp2.
 *
 * GNU C vector extensions throughout; intrinsics stand only where the extensions cannot say it:
 * half floats, and the dot product of bfloat16. */
#ifndef TIERKV_VECTORS_H
#define TIERKV_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif
/* Floats of a vector. */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef Floats FloatsAnywhere __attribute__((aligned(4), may_alias));
typedef Words WordsAnywhere __attribute__((aligned(1), may_alias));

/* What a number is stored as. */
enum type { F32, F16, BF16, FP8, TYPES };

INLINE int64_t bytes_of(enum type type) { return type == F32 ? 4 : type == FP8 ? 1 : 2; }

INLINE Floats load(const float *from) { return *(const FloatsAnywhere *)from; }
INLINE void store(float *to, Floats value) { *(FloatsAnywhere *)to = value; }
INLINE Floats broadcast(float value) { return value - (Floats){0}; }
INLINE Ints broadcast_int(int32_t value) { return value - (Ints){0}; }
INLINE Floats select_floats(Ints mask, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}
/* ``a`` where both are equal or one is no number. */
INLINE Floats larger(Floats a, Floats b) { return select_floats(b > a, b, a); }

/* ---- Lanes ---- */

#if W == 16
#define LANES(f, s) \
    f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), \
        f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)
#elif W == 8
#define LANES(f, s) f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)
#else
#define LANES(f, s) f(0, s), f(1, s), f(2, s), f(3, s)
#endif
#define SAME_LANE(i, s) (((i) & (s)) ? (i) + W : (i))
#define OTHER_LANE(i, s) (((i) & (s)) ? ((i) ^ (s)) + W : ((i) ^ (s)))
#define LANE_DIVIDED(i, s) ((i) / (s))

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

/* Lane i: a[i] + a[i ^ s] if i & s is 0, else b[i] + b[i ^ s]. */
#define ADD_LANES(s) \
    (SHUFFLE(a, b, LANES(SAME_LANE, s)) + SHUFFLE(a, b, LANES(OTHER_LANE, s)))

INLINE Floats add_lanes(Floats a, Floats b, int s) {
    if (s == 1) return ADD_LANES(1);
    if (s == 2) return ADD_LANES(2);
#if W > 4
    if (s == 4) return ADD_LANES(4);
#endif
#if W > 8
    if (s == 8) return ADD_LANES(8);
#endif
    __builtin_unreachable();
}

INLINE void add_pairs(Floats *vectors, int s) {
    UNROLL for (int i = 0; i < W / (2 * s); i++)
        vectors[i] = add_lanes(vectors[2 * i], vectors[2 * i + 1], s);
}

/* Lane i of the result is the sum of the lanes of vectors[i], of which there are W. Each step stands
 * for itself, as compilers do not unroll a loop over powers of two. */
INLINE Floats sums(Floats *vectors) {
    add_pairs(vectors, 1);
    add_pairs(vectors, 2);
#if W > 4
    add_pairs(vectors, 4);
#endif
#if W > 8
    add_pairs(vectors, 8);
#endif
    return vectors[0];
}

/* Lane i: the largest of all lanes j with j % rows == i % rows. */
INLINE Floats largest_of_rows(Floats a, int rows) {
#if W > 8
    if (rows <= 8) a = larger(a, SHUFFLE(a, a, LANES(OTHER_LANE, 8)));
#endif
#if W > 4
    if (rows <= 4) a = larger(a, SHUFFLE(a, a, LANES(OTHER_LANE, 4)));
#endif
    if (rows <= 2) a = larger(a, SHUFFLE(a, a, LANES(OTHER_LANE, 2)));
    if (rows <= 1) a = larger(a, SHUFFLE(a, a, LANES(OTHER_LANE, 1)));
    return a;
}

/* Lane i: i / rows. */
INLINE Ints lane_over(int rows) {
    if (rows == 1) return (Ints){LANES(LANE_DIVIDED, 1)};
    if (rows == 2) return (Ints){LANES(LANE_DIVIDED, 2)};
    return (Ints){LANES(LANE_DIVIDED, 4)};
}

/* ---- exp2, and what is made of it ---- */

#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

/* 2^x for x <= 100, to 1e-7 of it; 0 from -126 down, so 2^-inf too. */
INLINE Floats exp2_floats(Floats x) {
    Floats magic = broadcast(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
    Floats shifted = x + magic;
    Floats f = x - (shifted - magic);
    /* Minimax on [-1/2, 1/2], the constant term held at 1. */
    Floats p = broadcast(1.5403530e-4f);
    p = p * f + 1.3398874e-3f;
    p = p * f + 9.6181217e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    /* Multiplied, not added as bits: what is no number stays none, whatever its bits. */
    Floats power = (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
    return (Floats)((Ints)(p * power) & ~(x <= -126.0f));
}

/* cap * tanh(x / cap): by way of exp, tanh y = 1 - 2 / (exp(2 y) + 1), and where little would be left
 * of that difference by the first terms of its series. */
INLINE Floats soft_capped(Floats x, float cap) {
    Floats y = x * (1.0f / cap), square = y * y;
    Floats series = square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
    Floats power = larger(broadcast(-60.0f), y * (2.0f * LOG2_E));
    power = select_floats(power > 60.0f, broadcast(60.0f), power);
    Floats by_exp = cap - (2.0f * cap) / (exp2_floats(power) + 1.0f);
    return select_floats(square < 0.02f, x + x * series, by_exp);
}

/* ---- Stored numbers as floats ----
 *
 * A pair is 2 * W stored numbers as two vectors. Where a number is narrower than 4 bytes and no
 * single instruction spreads it, the first vector has the even ones and the second the odd ones:
 * one shift or mask each. Dot products do not mind so long as q is in the same order, and outputs are
 * put in order at the very end. A lone vector, at the end of a row, is always in order. */

INLINE int even_then_odd(enum type type) { return type == BF16 || type == FP8; }

/* Floats made of e4m3 are too small by this factor, which goes into the scales: its bits, moved, are
 * those of a half float of 2^-8 the size. */
#define FP8_UNIT 256.0f

INLINE Shorts load_shorts(const void *from) {
    Shorts packed;
    memcpy(&packed, from, sizeof packed);
    return packed;
}

#if W == 16
INLINE Floats floats_of_halves(Shorts halves) {
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
}
#elif W == 8
INLINE Floats floats_of_halves(Shorts halves) {
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
}
#else
INLINE Floats floats_of_halves(Shorts halves) {
    Words half = __builtin_convertvector(halves, Words);
    Words magnitude = (half & 0x7fff) << 13;
    Words special = (Words)(magnitude >= 0x0f800000) & 0x7f800000;
    Floats value = (Floats)magnitude * 0x1p112f;
    return (Floats)((Words)value | special | (half & 0x8000) << 16);
}
#endif

/* High bytes of the lanes, as e4m3, in units of 1 / FP8_UNIT. */
INLINE Floats floats_of_fp8(Shorts bytes) {
    Shorts magnitude = (bytes >> 1) & 0x3f80;
    magnitude |= (Shorts)(magnitude == 0x3f80) & 0x7e00; /* no number */
    return floats_of_halves(magnitude | (bytes & 0x8000));
}

/* Numbers 0 .. 2 * W from ``from``. */
INLINE void load_pair(enum type type, const void *from, Floats *first, Floats *second) {
    if (type == F32) {
        *first = load(from);
        *second = load((const float *)from + W);
    } else if (type == BF16) {
        Words both = *(const WordsAnywhere *)from;
        *first = (Floats)(both << 16);
        *second = (Floats)(both & 0xffff0000);
    } else if (type == F16) {
        *first = floats_of_halves(load_shorts(from));
        *second = floats_of_halves(load_shorts((const uint16_t *)from + W));
    } else {
        Shorts both = load_shorts(from);
        *first = floats_of_fp8(both << 8);
        *second = floats_of_fp8(both);
    }
}

/* Numbers 0 .. W from ``from``, in order. */
INLINE Floats load_lone(enum type type, const void *from) {
    if (type == F32) return load(from);
    if (type == FP8) {
        Bytes packed;
        memcpy(&packed, from, sizeof packed);
        return floats_of_fp8(__builtin_convertvector(packed, Shorts) << 8);
    }
    Shorts packed = load_shorts(from);
    if (type == F16) return floats_of_halves(packed);
    return (Floats)(__builtin_convertvector(packed, Words) << 16);
}

/* Where number ``d`` of a row of ``dim`` lies among the floats made of it. */
INLINE int place(enum type type, int d, int dim) {
    int in_pairs = dim / (2 * W) * (2 * W);
    if (!even_then_odd(type) || d >= in_pairs) return d;
    return d / (2 * W) * (2 * W) + d % (2 * W) / 2 + (d % 2 ? W : 0);
}

/* ---- Single numbers ---- */

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float half_float(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0;
    float value = float_of_bits(magnitude) * 0x1p112f;
    return float_of_bits(bits_of_float(value) | special | (uint32_t)(half & 0x8000) << 16);
}

INLINE float get_number(enum type type, const void *from, int64_t n) {
    if (type == F32) return ((const float *)from)[n];
    if (type == BF16) return float_of_bits((uint32_t)((const uint16_t *)from)[n] << 16);
    return half_float(((const uint16_t *)from)[n]);
}

INLINE uint16_t bf16_of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(value == value ? rounded : 0x7fc0);
}

/* To the nearest half float, ties to even. */
INLINE uint16_t half_of(float value) {
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* Adding 1/2 leaves the multiple of 2^-24 in the lowest bits, rounded by the adder. */
    uint32_t tiny = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = magnitude < 0x38800000 ? tiny : normal;
    if (magnitude >= 0x477ff000) half = 0x7c00;
    if (magnitude > 0x7f800000) half = 0x7e00;
    return (uint16_t)(half | sign);
}

INLINE void put_number(enum type type, void *to, int64_t n, float value) {
    if (type == F32) ((float *)to)[n] = value;
    else if (type == BF16) ((uint16_t *)to)[n] = bf16_of(value);
    else ((uint16_t *)to)[n] = half_of(value);
}

#endif
