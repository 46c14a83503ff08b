/* What the compiled kernels share: vectors as wide as those of the level that a file is compiled for (setup.py), loads of
 * every dtype as floats, exp.
 */
#ifndef PDKV_VECTORS_H
#define PDKV_VECTORS_H
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h> /* which compiles in a third of the time */
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16 /* floats of a vector */
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

INLINE float float_of_bfloat16(uint16_t half) {
    union { uint32_t bits; float number; } to = {(uint32_t)half << 16};
    return to.number;
}

INLINE uint16_t bfloat16_of(float number) { /* to nearest, ties to even, as torch has it */
    union { float number; uint32_t bits; } from = {number};
    const uint32_t rounded = (from.bits + 0x7fff + ((from.bits >> 16) & 1)) >> 16;
    return (uint16_t)((from.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE int64_t bytes_of(int64_t numbers, int64_t dtype) { return numbers * (dtype == FLOAT32 ? 4 : 2); }

/* The exponent's bias is 15 in a half, 127 in a float; infinity and NaN have the highest exponent in both. */
INLINE float float_of(uint16_t half) {
    const uint32_t digits = (uint32_t)(half & 0x7fff) << 13, exponent = digits & (0x1fu << 23);
    const uint32_t is_tiny = exponent == 0, is_huge = exponent == 0x1fu << 23;
    union { uint32_t bits; float number; } to = {digits + ((112 + 112 * is_huge + is_tiny) << 23)}, leading = {0};
    leading.bits = is_tiny * (113u << 23); /* a subnormal has no leading 1: the one that came goes off again */
    to.number -= leading.number;
    to.bits |= (uint32_t)(half & 0x8000) << 16;
    return to.number;
}

INLINE uint16_t half_of(float number) { /* to nearest, ties to even */
    union { float number; uint32_t bits; } from = {number}, tiny = {number};
    const uint32_t sign = from.bits >> 16 & 0x8000, digits = from.bits & 0x7fffffff;
    if (digits >= 0x477ff000) return (uint16_t)(sign | (digits > 0x7f800000 ? 0x7e00 : 0x7c00)); /* from 65520 on */
    if (digits < 113u << 23) { /* subnormal: adding 0.5 puts units of 2**-24 into the lowest bits */
        tiny.bits = digits;
        tiny.number += 0.5f;
        return (uint16_t)(sign | (tiny.bits - (126u << 23)));
    }
    return (uint16_t)(sign | ((digits - (112u << 23) + 0xfff + (digits >> 13 & 1)) >> 13));
}

INLINE vec load_float32(const float *from) {
    vec numbers;
    memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

INLINE vec load_bfloat16(const uint16_t *from) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (vec)(__builtin_convertvector(bits, words) << 16);
}

INLINE vec floats_of_halves(halves bits) {
#if WIDTH == 16
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif WIDTH == 8
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    vec numbers;
    for (int i = 0; i < WIDTH; i++) numbers[i] = float_of(bits[i]);
    return numbers;
#endif
}

INLINE vec load_float16(const uint16_t *from) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return floats_of_halves(bits);
}

INLINE vec all_of(float number) {
#if WIDTH == 16
    return (vec)_mm512_set1_ps(number);
#elif WIDTH == 8
    return (vec)_mm256_set1_ps(number);
#else
    return (vec){number, number, number, number};
#endif
}

/* a * b + c: rounded once where the level can. */
INLINE vec fused(vec a, vec b, vec c) {
#if WIDTH == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDTH == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* exp for x <= 0, relative error below 2e-7; vectorises, unlike the library's. */
INLINE float exp_of(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = x < -87.0f ? -87.0f : x;
    float n = (x * 1.44269504f + shift) - shift;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}
#endif
