/* 16 numbers at once: reading, rounding and writing them, in float32, rounded where torch rounds.
 *
 * Included once for each instruction set: ISA is its target, FOR_ISA(name) names its copy. (The compiler splits vectors
 * that a function's own target does not have, even where it is inlined into one that has them.)
 */
#define ROW_INLINE static inline __attribute__((always_inline, target(ISA)))

/* x[i ...], FLOAT32 or BFLOAT16: `count` numbers, at most 16, and zeros. */
ROW_INLINE vec16 FOR_ISA(load)(const void *x, int64_t i, int64_t count, const int dtype) {
    const char *from = (const char *)x + bytes_of(i, dtype);
    char some[64] = {0};
    if (count < 16) from = memcpy(some, from, (size_t)bytes_of(count < 0 ? 0 : count, dtype));
    vec16 numbers;
    if (dtype == FLOAT32) {
        memcpy(&numbers, from, sizeof numbers);
    } else {
        halves16 halves;
        memcpy(&halves, from, sizeof halves);
        const words16 words = __builtin_convertvector(halves, words16) << 16;
        memcpy(&numbers, &words, sizeof numbers);
    }
    return numbers;
}

/* The bits of the nearest bfloat16s, ties to even, as floats. NaN stays NaN: what comes of bfloat16s has no digits of it in
 * the lower half, which is rounded away. */
ROW_INLINE words16 FOR_ISA(nearest)(vec16 numbers) {
    words16 bits;
    memcpy(&bits, &numbers, sizeof bits);
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* To what `dtype` holds, and back. */
ROW_INLINE vec16 FOR_ISA(rounded)(vec16 numbers, const int dtype) {
    if (dtype == FLOAT32) return numbers;
    const words16 bits = FOR_ISA(nearest)(numbers) & 0xffff0000;
    memcpy(&numbers, &bits, sizeof numbers);
    return numbers;
}

/* x[i ...] = numbers, `count` of them, at most 16. */
ROW_INLINE void FOR_ISA(store)(void *x, int64_t i, int64_t count, vec16 numbers, const int dtype) {
    char *to = (char *)x + bytes_of(i, dtype);
    const halves16 halves = __builtin_convertvector(FOR_ISA(nearest)(numbers) >> 16, halves16);
    const void *from = dtype == FLOAT32 ? (const void *)&numbers : (const void *)&halves;
    if (count >= 16)
        memcpy(to, from, (size_t)bytes_of(16, dtype));
    else if (count > 0)
        memcpy(to, from, (size_t)bytes_of(count, dtype));
}

ROW_INLINE vec16 FOR_ISA(where)(ints16 mask, vec16 yes, vec16 no) {
    ints16 a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & mask) | (b & ~mask);
    memcpy(&yes, &a, sizeof a);
    return yes;
}

/* exp for x <= 0, as exp_of, but 0 below what that clamps. */
ROW_INLINE vec16 FOR_ISA(exp_of)(vec16 x) {
    const vec16 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec16 p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ints16 bits = (__builtin_convertvector(n, ints16) + 127) << 23;
    vec16 power;
    memcpy(&power, &bits, sizeof power);
    return FOR_ISA(where)(x < -87.0f, (vec16){0}, p * power);
}

#undef ROW_INLINE
