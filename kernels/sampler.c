/* The draw of a token from each row of logits, called through ctypes (kernels/host.py).
 *
 * It gives the tokens of engine/sampling/draw.py to the bit: every number is made by the same float64 operations, and
 * every sum is exact, so that no order of adding can be seen. Compiled with -ffp-contract=off: a fused multiply-add
 * would round once where torch rounds twice.
 */
#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define NUM_BINS 1024
#define BLOCK 64 /* tokens looked at together */
#define LOWEST -64.0 /* scaled logits below have weight 0 */

/* Rows of logits, and their parameters. */
typedef struct {
    const void *logits;                                 /* (n, row_stride), of which vocab_size are a row's */
    const double *temperature, *top_k, *top_p, *floor; /* (n,) each; 0, 1, -inf: off. floor: log(min_p) */
    const uint64_t *seeds, *choices, *positions;        /* the latter two below 2**32 */
    int64_t vocab_size, row_stride;
} draws;

/* What a row is worked on in. All have room for whole blocks. */
typedef struct {
    double *scaled, *weights, *some_scaled, *some_weights;
} scratch;

/* Weights are split into a multiple of 2**(bits - 53) and one of 2**(2 * bits - 106): both add up exactly. */
typedef struct {
    double high, low;
} mass;

typedef struct {
    double high_magic, low_magic;
} splitter;

INLINE splitter splitter_of(int64_t vocab_size) {
    int bits = 0;
    while (vocab_size >> bits) bits++;
    return (splitter){1.5 * ldexp(1.0, bits - 1), 1.5 * ldexp(1.0, 2 * bits - 54)};
}

INLINE mass split(double weight, splitter by) {
    const double high = (weight + by.high_magic) - by.high_magic;
    return (mass){high, ((weight - high) + by.low_magic) - by.low_magic};
}

/* exp of what is <= 0; 0 below LOWEST. Cephes' rational function; draw.py has the same operations. */
INLINE double exp_of_double(double number) {
    const double round = 6755399441055744.0; /* 1.5 * 2**52: adding it rounds to an integer */
    const double x = number >= LOWEST ? number : LOWEST;
    const double shifted = x * 1.4426950408889634074 + round, n = shifted - round;
    const double r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    const double rr = r * r;
    const double p =
        ((1.26177193074810590878e-4 * rr + 3.02994407707441961300e-2) * rr + 9.99999999999999999910e-1) * r;
    const double q =
        ((3.00198505138664455042e-6 * rr + 2.52448340349684104192e-3) * rr + 2.27265548208155028766e-1) * rr + 2.0;
    union { double number; uint64_t bits; } power = {shifted};
    power.bits = (power.bits << 52) + ((uint64_t)1023 << 52); /* 2**n: the lowest bits of the rounded sum are n's */
    return number >= LOWEST ? (p / (q - p) * 2.0 + 1.0) * power.number : 0.0;
}

INLINE double logit_float32(float from) { return from; }

INLINE double logit_bfloat16(uint16_t from) {
    union { uint32_t bits; float number; } to = {(uint32_t)from << 16};
    return to.number;
}

INLINE double logit_float16(uint16_t from) { return float_of(from); }

INLINE double highest_of(const double *block) {
    double top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < BLOCK; t++) top = block[t] > top ? block[t] : top;
    return top;
}

/* Bins of equal width: falling values, rising bins. What is beyond the last one is in it, too. */
typedef struct {
    double top, lift, scale;
} bins_of;

INLINE bins_of bins_between(double top, double bottom) {
    const double lift = top - bottom < 0x1p-700 ? 0x1p700 : 1.0; /* at a temperature of 1e300 all is subnormal */
    return (bins_of){top, lift, (NUM_BINS - 1) / ((top - bottom) * lift)};
}

INLINE int64_t bin_of(double value, bins_of bins) {
    const double place = (bins.top - value) * bins.lift * bins.scale;
    return (int64_t)(place < NUM_BINS - 1 ? place : NUM_BINS - 1);
}

/* The smallest of `values` such that what is strictly above it weighs less than `wanted`, where each value v >= floor
 * weighs weights[i], or 1 if weights is NULL. `share`: wanted is that part of all the weight.
 *
 * Bins find the neighbourhood, which becomes the whole of the next round, until one value is left. */
INLINE double select_floor(const double *values, const double *weights, int64_t count, double floor, double span,
                           double wanted, int is_share, splitter by, scratch to) {
    mass above = {0, 0};
    bins_of places = bins_between(0.0, -span);
    for (;;) {
        mass bins[NUM_BINS] = {{0, 0}};
        unsigned char is_used[NUM_BINS] = {0};
        for (int64_t i = 0; i < count; i++) {
            if (!(values[i] >= floor)) continue;
            const int64_t b = bin_of(values[i], places);
            const mass own = weights == NULL ? (mass){1.0, 0.0} : split(weights[i], by);
            bins[b].high += own.high;
            bins[b].low += own.low;
            is_used[b] = 1;
        }
        if (is_share) {
            mass all = {0, 0};
            for (int b = 0; b < NUM_BINS; b++) all.high += bins[b].high, all.low += bins[b].low;
            wanted *= all.high + all.low;
            is_share = 0;
        }
        mass before = above, sum = above;
        int64_t chosen = -1, kept = 0;
        for (int64_t b = 0; b < NUM_BINS; b++) {
            if (!is_used[b]) continue;
            if (chosen >= 0 && !(sum.high + sum.low < wanted)) break;
            chosen = b, before = sum;
            sum.high += bins[b].high, sum.low += bins[b].low;
        }
        if (chosen < 0) return floor;
        double low = INFINITY, high = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            const double value = values[i];
            if (!(value >= floor) || bin_of(value, places) != chosen) continue;
            to.some_scaled[kept] = value;
            if (weights != NULL) to.some_weights[kept] = weights[i];
            kept++;
            low = value < low ? value : low;
            high = value > high ? value : high;
        }
        if (low == high) return low;
        values = to.some_scaled, weights = weights == NULL ? NULL : to.some_weights;
        count = kept, above = before, places = bins_between(high, low);
    }
}

/* -ln of a positive, normal number. Cephes' rational function; draw.py has the same operations. */
INLINE double minus_ln(double number) {
    union { double number; uint64_t bits; } x = {number};
    const int64_t exponent = (int64_t)(x.bits - 0x3FE6A09E667F3BCD) >> 52; /* the rest is in [sqrt(1/2), sqrt(2)) */
    x.bits -= (uint64_t)exponent << 52;
    const double r = x.number - 1.0, rr = r * r, e = (double)exponent;
    const double p = ((((1.01875663804580931796e-4 * r + 4.97494994976747001425e-1) * r + 4.70579119878881725854e0) * r +
                       1.44989225341610930846e1) * r + 1.79368678507819816313e1) * r + 7.70838733755885391666e0;
    const double q = ((((r + 1.12873587189167450590e1) * r + 4.52279145837532221105e1) * r +
                       8.29875266912776603211e1) * r + 7.11544750618563894466e1) * r + 2.31251620126765340583e1;
    const double rest = (r * (rr * p / q) - e * 2.121944400546905827679e-4) - 0.5 * rr;
    return -((r + rest) + e * 0.693359375);
}

#define ROTATE(x, by) ((x) << (by) | (x) >> (32 - (by)))
#define ROUND(a, b, c, d, by, and_by) a += b, b = ROTATE(b, by) ^ a, c += d, d = ROTATE(d, and_by) ^ c
#define ROUNDS(p, q, r, s, t, u, v, w)                                                                                \
    ROUND(x0, x1, x2, x3, p, q), ROUND(x0, x3, x2, x1, r, s), ROUND(x0, x1, x2, x3, t, u), ROUND(x0, x3, x2, x1, v, w)
#define ADD_KEY(a, b, c, d, number) x0 += a, x1 += b, x2 += c, x3 += d + number

/* The 32-bit words of BLOCK tokens from `first` on: Threefry4x32 of 13 rounds (randomness.py). */
INLINE void draw_words(uint32_t *words, int64_t first, uint32_t level, const uint32_t *k) {
    const uint32_t k0 = k[0], k1 = k[1], k2 = k[2], k3 = k[3], k4 = 0x1BD11BDA ^ k0 ^ k1 ^ k2 ^ k3;
    for (uint32_t lane = 0; lane < BLOCK / 4; lane++) {
        uint32_t x0 = (uint32_t)(first / 4) + lane + k0, x1 = level + k1, x2 = k2, x3 = k3;
        ROUNDS(10, 26, 11, 21, 13, 27, 23, 5), ADD_KEY(k1, k2, k3, k4, 1);
        ROUNDS(6, 20, 17, 11, 25, 10, 18, 20), ADD_KEY(k2, k3, k4, k0, 2);
        ROUNDS(10, 26, 11, 21, 13, 27, 23, 5), ADD_KEY(k3, k4, k0, k1, 3);
        ROUND(x0, x1, x2, x3, 6, 20);
        words[lane] = x0, words[lane + 16] = x1, words[lane + 32] = x2, words[lane + 48] = x3;
    }
}

/* The token of the scaled logits from `floor` on whose -ln u / weight is least, of equals the lowest.
 *
 * Few need the logarithm: -ln u >= 1 - u, so one wins only where 1 - u <= least * weight. Of both sides the bits of
 * floats are compared, which order as the numbers do: the left one's is rounded down, of 24 bits of u, the right one's
 * up: 2**(n + f) <= 2**n * (1 + f), whose bits are linear in n + f. */
INLINE int64_t race(const draws *a, int64_t i, double floor, const double *scaled) {
    const double unit = 1.4426950408889634074 * (1 << 23), bias = 127.0 * (1 << 23) + 64.0; /* some more: to be sure */
    const uint32_t key[4] = {(uint32_t)a->seeds[i], (uint32_t)(a->seeds[i] >> 32), (uint32_t)a->choices[i],
                             (uint32_t)a->positions[i]};
    double least = 37.0; /* more than -ln of the lowest u, which the likeliest token has at most */
    int64_t winner = -1;
    for (int64_t first = 0; first < a->vocab_size; first += BLOCK, scaled += BLOCK) {
        if (!(highest_of(scaled) >= floor)) continue;
        const double lift = bias - minus_ln(least) * unit;
        uint32_t words[BLOCK], low_words[BLOCK];
        int32_t may_win[BLOCK], any = 0;
        draw_words(words, first, 0, key);
        for (int64_t t = 0; t < BLOCK; t++) {
            const double most = scaled[t] * unit + lift;
            union { float number; int32_t bits; } rest = {(float)(int32_t)(~words[t] >> 8)};
            may_win[t] = rest.bits - (24 << 23) <= (int32_t)(most > 0.0 ? most : 0.0);
            any |= may_win[t];
        }
        if (!any) continue;
        draw_words(low_words, first, 1, key);
        for (int64_t t = 0; t < BLOCK; t++) {
            if (!may_win[t] || !(scaled[t] >= floor)) continue;
            const uint64_t bits = (uint64_t)words[t] << 20 | low_words[t] >> 12;
            const double time = minus_ln(((double)(int64_t)bits + 0.5) * 0x1p-52) / exp_of_double(scaled[t]);
            if (time < least) least = time, winner = first + t;
        }
    }
    return winner;
}

/* One token from `to.scaled`, which holds the logits less their maximum, by the temperature. */
static int64_t draw_scaled(const draws *a, int64_t i, scratch to) {
    const int64_t vocab_size = a->vocab_size, top_k = (int64_t)a->top_k[i];
    const splitter by = splitter_of(vocab_size);
    const double span = a->temperature[i] > 1.0 ? 32.0 / a->temperature[i] : 32.0;
    double floor = a->floor[i] > LOWEST ? a->floor[i] : LOWEST;
    if (top_k > 0 && top_k < vocab_size)
        floor = select_floor(to.scaled, NULL, vocab_size, floor, span, (double)top_k, 0, by, to);
    for (int64_t t = vocab_size; t % BLOCK; t++) to.scaled[t] = -INFINITY;
    if (a->top_p[i] < 1.0) {
        for (int64_t first = 0; first < vocab_size; first += BLOCK) {
            double *const weights = to.weights + first, *const scaled = to.scaled + first;
            if (highest_of(scaled) >= floor)
                for (int64_t t = 0; t < BLOCK; t++) weights[t] = scaled[t] >= floor ? exp_of_double(scaled[t]) : 0.0;
            else
                memset(weights, 0, BLOCK * sizeof *weights);
        }
        floor = select_floor(to.scaled, to.weights, vocab_size, floor, span, a->top_p[i], 1, by, to);
    }
    return race(a, i, floor, to.scaled);
}

/* Fill `to.scaled`, and return -1; or the row's token where its largest logit is not finite: the first that is NaN,
 * else the first that is infinite, else all are masked. */
#define DEFINE_SCALE(NAME, T)                                                                                         \
    static int64_t scale_##NAME(const draws *a, int64_t i, scratch to) {                                              \
        const T *row = (const T *)a->logits + i * a->row_stride;                                                      \
        const double temperature = a->temperature[i];                                                                 \
        double best = -INFINITY;                                                                                      \
        int is_nan = 0;                                                                                               \
        _Pragma("omp simd reduction(max : best) reduction(| : is_nan)")                                               \
        for (int64_t t = 0; t < a->vocab_size; t++) {                                                                 \
            const double x = logit_##NAME(row[t]);                                                                    \
            to.scaled[t] = x;                                                                                         \
            best = x > best ? x : best;                                                                               \
            is_nan |= x != x;                                                                                         \
        }                                                                                                             \
        if (is_nan || !isfinite(best))                                                                                \
            for (int64_t t = 0;; t++)                                                                                 \
                if (is_nan ? isnan(to.scaled[t]) : to.scaled[t] == best) return t;                                    \
        for (int64_t t = 0; t < a->vocab_size; t++) to.scaled[t] = (to.scaled[t] - best) / temperature;               \
        return -1;                                                                                                    \
    }

DEFINE_SCALE(float32, float)
DEFINE_SCALE(bfloat16, uint16_t)
DEFINE_SCALE(float16, uint16_t)

/* A token of each of n rows of logits. Returns 0; 1: no memory, tokens are undefined.
 *
 * `table`: draw.py's. */
int pdkv_race(const void *logits, const double *table, int64_t *tokens, int64_t n, int64_t vocab_size,
              int64_t row_stride, int64_t dtype, int64_t most_threads) {
    const uint64_t *const keys = (const uint64_t *)(table + 4 * n);
    const draws own = {logits,   table,    table + n,    table + 2 * n, table + 3 * n,
                       keys,     keys + n, keys + 2 * n, vocab_size,    row_stride};
    const draws *const a = &own;
    const int64_t room = (vocab_size + BLOCK - 1) / BLOCK * BLOCK;
    const int num_threads = (int)(most_threads < n ? most_threads : n);
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        double *memory = aligned_alloc(64, (size_t)(4 * room) * sizeof *memory);
        const scratch to = {memory, memory + room, memory + 2 * room, memory + 3 * room};
        if (memory == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n; i++) {
            if (memory == NULL) continue;
            const int64_t token = dtype == FLOAT32    ? scale_float32(a, i, to)
                                  : dtype == BFLOAT16 ? scale_bfloat16(a, i, to)
                                                         : scale_float16(a, i, to);
            tokens[i] = token >= 0 ? token : draw_scaled(a, i, to);
        }
        free(memory);
    }
    return failed;
}

static void mask_row(float *logits, const uint32_t *words, int64_t num_words) {
    for (int64_t w = 0; w < num_words; w++, logits += 32) {
        if (words[w] == UINT32_MAX) continue;
        for (uint32_t i = 0; i < 32; i++) logits[i] = words[w] >> i & 1 ? logits[i] : -INFINITY;
    }
}

/* Forbids the tokens whose bits are 0 in n rows of float32 logits, which are row_stride apart: bit i % 32 of word i / 32
 * stands for token i. */
void pdkv_mask(float *all, const int64_t *rows, const uint32_t *all_words, int64_t n, int64_t vocab_size,
               int64_t row_stride, int64_t most_threads) {
    const int64_t num_full = vocab_size / 32, num_words = (vocab_size + 31) / 32;
    const int num_threads = (int)(most_threads < n ? most_threads : n);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < n; i++) {
        float *logits = all + rows[i] * row_stride;
        const uint32_t *words = all_words + i * num_words;
        mask_row(logits, words, num_full);
        for (int64_t t = 32 * num_full; t < vocab_size; t++)
            if (!(words[num_full] >> t % 32 & 1)) logits[t] = -INFINITY;
    }
}

static void penalize_row(float *logits, const int32_t *counts, int64_t vocab_size, float repetition,
                                      float presence, float frequency) {
    for (int64_t first = 0; first < vocab_size; first += BLOCK, logits += BLOCK, counts += BLOCK) {
        const int64_t size = vocab_size - first < BLOCK ? vocab_size - first : BLOCK;
        int32_t any = 0;
        for (int64_t t = 0; t < size; t++) any |= counts[t];
        if (!any) continue;
        for (int64_t t = 0; t < size; t++) {
            const float x = logits[t], repeated = x > 0.0f ? x / repetition : x * repetition;
            const int32_t count = counts[t] >> 1;
            logits[t] = ((counts[t] ? repeated : x) - frequency * (float)count) - (count ? presence : 0.0f);
        }
    }
}

/* Lowers what was seen in n rows of float32 logits, which are row_stride apart; rows[i] has the counts places[i]: of each
 * token twice how often the output has it, and 1 more where the prompt has it. `p`: (3, n) repetition, presence,
 * frequency. */
void pdkv_penalize(float *logits, const int32_t *counts, const int64_t *rows, const int64_t *places, const float *p,
                   int64_t n, int64_t vocab_size, int64_t row_stride, int64_t most_threads) {
    const int num_threads = (int)(most_threads < n ? most_threads : n);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < n; i++)
        penalize_row(logits + rows[i] * row_stride, counts + places[i] * vocab_size, vocab_size, p[i], p[n + i],
                     p[2 * n + i]);
}
