/* What the compiled kernels share: a function for each CPU, loads of every dtype as 16 floats, exp. */
#ifndef PDKV_VECTORS_H
#define PDKV_VECTORS_H
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef float vec16 __attribute__((vector_size(64)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef int32_t ints16 __attribute__((vector_size(64)));

INLINE void load_float32(vec16 *to, const float *from) { memcpy(to, from, sizeof *to); }

INLINE void load_bfloat16(vec16 *to, const uint16_t *from) {
    halves16 bits;
    memcpy(&bits, from, sizeof bits);
    words16 words = __builtin_convertvector(bits, words16) << 16;
    memcpy(to, &words, sizeof *to);
}

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

INLINE void load_float16(vec16 *to, const uint16_t *from) {
    float numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = float_of(from[i]);
    memcpy(to, numbers, sizeof *to);
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
