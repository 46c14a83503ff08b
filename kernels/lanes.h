/* WIDTH numbers at once: reading, rounding and writing them, in float32, rounded where torch rounds. */
#ifndef PDKV_LANES_H
#define PDKV_LANES_H
#include "vectors.h"

/* x[i ...], FLOAT32 or BFLOAT16: `count` numbers, at most WIDTH, and zeros. */
INLINE vec load(const void *x, int64_t i, int64_t count, const int dtype) {
    const char *from = (const char *)x + bytes_of(i, dtype);
    char some[4 * WIDTH] = {0};
    if (count < WIDTH) from = memcpy(some, from, (size_t)bytes_of(count < 0 ? 0 : count, dtype));
    return dtype == FLOAT32 ? load_float32((const float *)from) : load_bfloat16((const uint16_t *)from);
}

/* The bits of the nearest bfloat16s, ties to even, as floats. NaN stays NaN: what comes of bfloat16s has no digits of it in
 * the lower half, which is rounded away. */
INLINE words nearest(vec numbers) { return (words)numbers + 0x7fff + (((words)numbers >> 16) & 1); }

/* To what `dtype` holds, and back. */
INLINE vec rounded(vec numbers, const int dtype) {
    return dtype == FLOAT32 ? numbers : (vec)(nearest(numbers) & 0xffff0000);
}

/* x[i ...] = numbers, `count` of them, at most WIDTH. */
INLINE void store(void *x, int64_t i, int64_t count, vec numbers, const int dtype) {
    char *to = (char *)x + bytes_of(i, dtype);
    const halves narrow = __builtin_convertvector(nearest(numbers) >> 16, halves);
    const void *from = dtype == FLOAT32 ? (const void *)&numbers : (const void *)&narrow;
    if (count >= WIDTH)
        memcpy(to, from, (size_t)bytes_of(WIDTH, dtype));
    else if (count > 0)
        memcpy(to, from, (size_t)bytes_of(count, dtype));
}

INLINE vec where(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

/* 16 lanes, halves added to halves. */
INLINE float sum_of(float *lanes) {
    for (int width = 8; width; width /= 2)
        for (int u = 0; u < width; u++) lanes[u] += lanes[u + width];
    return lanes[0];
}
#endif
