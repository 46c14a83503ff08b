/* KV as quantised deltas from anchors, entropy coded: what kv_store/codecs/cachegen.py lays out. kernels/cachegen.py has
 * the same bytes in numpy, and says what is computed.
 */
#include "rans.h"

#define LARGEST 127      /* a delta, in steps */
#define ZERO 128         /* the symbol of no delta */
#define MAX_SHIFT 15     /* of a channel's step: 4 bits of its context */
#define SMALLEST 1e-30f  /* a smaller step is none */
#define HIGHEST 1e30f    /* a larger one cannot be coded */
#define FLOAT16_MAX 65504.0f
#define BFLOAT16_MAX 3.3895314e38f

typedef struct {
    char *images;          /* (units, layers, planes, tokens, head_size) of dtype; planes: K of all heads, then V */
    float *anchor_steps;   /* (layers, planes) */
    float *steps;          /* (layers, planes) */
    int8_t *anchors;       /* (layers, planes, head_size) */
    uint8_t *contexts;     /* (layers, planes, head_size): shift of the step << 4 | table */
    uint32_t *states;      /* (layers, RANS_LANES) */
    char *words;           /* of all layers, one behind the other */
    int64_t *num_words;    /* (layers,) */
    float *factors;        /* (layers, 2): steps of K and of V, in mean absolute deltas */
    const void *tables;    /* rans.c's: symbols to encode, slots to decode */
    const int32_t *means;  /* (RANS_TABLES,) the largest mean |delta| of a table's channels, in steps / 256 */
    const int32_t *limits; /* (RANS_TABLES,) the largest |delta| that a table has, in steps */
    float *row_scratch;    /* encode: (units * tokens, head_size) of a plane */
    float *channel_scratch; /* (3, head_size) */
    int32_t *count_scratch; /* encode: (2, head_size) */
    uint8_t *symbols;      /* (planes, units * tokens, head_size) of a layer */
    uint16_t *word_scratch; /* encode: of a layer, one for each symbol */
    int64_t max_words;     /* of all layers */
    int64_t units, layers, planes, tokens, head_size, dtype;
} cachegen;

enum { DONE, NOT_FINITE, NO_ROOM, DAMAGED };

INLINE float absolute(float x) { return x < 0 ? -x : x; }
INLINE float larger(float a, float b) { return a > b ? a : b; }

/* To the nearest integer, ties to even, and at most LARGEST either way; so is what is no number. */
INLINE float rounded(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    x = x < LARGEST ? x : LARGEST;
    x = x > -LARGEST ? x : -LARGEST;
    return (x + shift) - shift;
}

INLINE float inverse(float step) { return step > SMALLEST ? 1.0f / step : 0.0f; }

INLINE char *row_of(const cachegen *kv, int64_t layer, int64_t plane, int64_t token) {
    const int64_t unit = token / kv->tokens;
    const int64_t row = ((unit * kv->layers + layer) * kv->planes + plane) * kv->tokens + token % kv->tokens;
    return kv->images + bytes_of(row * kv->head_size, kv->dtype);
}

INLINE void read_row(float *restrict to, const char *restrict from, int64_t size, int64_t dtype) {
    const uint16_t *halves = (const uint16_t *)from;
    if (dtype == FLOAT32) memcpy(to, from, (size_t)size * 4);
    else if (dtype == BFLOAT16)
        for (int64_t c = 0; c < size; c++) to[c] = float_of_bfloat16(halves[c]);
    else
        for (int64_t c = 0; c < size; c++) to[c] = float_of(halves[c]);
}

/* The row's `head_size` numbers, anchors + (symbols - ZERO) * steps. */
INLINE void write_row(
    char *to, const uint8_t *restrict symbols, const float *restrict anchors, const float *restrict steps, int64_t size,
    int64_t dtype) {
    uint16_t *restrict halves = (uint16_t *)to;
    float *restrict floats = (float *)to;
#define NUMBER(c) (anchors[c] + (float)((int)symbols[c] - ZERO) * steps[c])
#define WITHIN(x, most) ((x) > (most) ? (most) : (x) < -(most) ? -(most) : (x))
    if (dtype == FLOAT32)
        for (int64_t c = 0; c < size; c++) floats[c] = NUMBER(c);
    else if (dtype == BFLOAT16)
        for (int64_t c = 0; c < size; c++) halves[c] = bfloat16_of(WITHIN(NUMBER(c), BFLOAT16_MAX));
    else
        for (int64_t c = 0; c < size; c++) halves[c] = half_of(WITHIN(NUMBER(c), FLOAT16_MAX));
#undef NUMBER
#undef WITHIN
}

/* Anchors of a plane whose rows are in the scratch, from the mean of each channel; the rows become deltas. */
INLINE float subtract_anchors(
    float *restrict rows, int8_t *restrict anchors, float *restrict means, int64_t num_rows, int64_t size) {
    float most = 0.0f;
    memset(means, 0, (size_t)size * sizeof *means);
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t c = 0; c < size; c++) means[c] += rows[t * size + c];
    for (int64_t c = 0; c < size; c++) means[c] /= (float)num_rows;
    for (int64_t c = 0; c < size; c++) most = larger(most, absolute(means[c]));
    const float step = most / LARGEST, inv = inverse(step);
    for (int64_t c = 0; c < size; c++) {
        const float anchor = rounded(means[c] * inv);
        anchors[c] = (int8_t)anchor;
        means[c] = anchor * step;
    }
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t c = 0; c < size; c++) rows[t * size + c] -= means[c];
    return step;
}

/* The mean of a plane's absolute deltas; sums and tops, (head_size,): those of each channel. */
INLINE float measure_deltas(
    const float *restrict rows, float *restrict sums, float *restrict tops, int64_t num_rows, int64_t size) {
    float total = 0.0f;
    memset(sums, 0, (size_t)size * sizeof *sums);
    memset(tops, 0, (size_t)size * sizeof *tops);
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t c = 0; c < size; c++) {
            const float delta = absolute(rows[t * size + c]);
            sums[c] += delta;
            tops[c] = larger(tops[c], delta);
        }
    for (int64_t c = 0; c < size; c++) total += sums[c];
    return total / (float)(num_rows * size);
}

/* How often a channel's step is doubled so that the largest of its deltas fits. */
INLINE int shift_of(float top, float step) {
    int shift = 0;
    for (float most = step * (LARGEST + 0.5f); top > most && shift < MAX_SHIFT; most += most) shift++;
    return shift;
}

/* The first table for a channel whose absolute deltas have this sum and this maximum. */
INLINE uint8_t table_for(const cachegen *kv, int32_t sum, int32_t top, int64_t num_rows) {
    int table = 0;
    while (table < RANS_TABLES - 1 &&
           ((int64_t)sum * 256 > kv->means[table] * num_rows || top > kv->limits[table]))
        table++;
    return (uint8_t)table;
}

/* Symbols of a plane's deltas; sums and tops, (head_size,): of their absolutes, in steps. */
INLINE void quantise(
    const float *restrict rows, uint8_t *restrict symbols, const float *restrict inverses, int32_t *restrict sums,
    int32_t *restrict tops, int64_t num_rows, int64_t size) {
    memset(sums, 0, (size_t)size * sizeof *sums);
    memset(tops, 0, (size_t)size * sizeof *tops);
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t c = 0; c < size; c++) {
            const int32_t delta = (int32_t)rounded(rows[t * size + c] * inverses[c]);
            const int32_t most = delta < 0 ? -delta : delta;
            sums[c] += most;
            tops[c] = tops[c] > most ? tops[c] : most;
            symbols[t * size + c] = (uint8_t)(delta + ZERO);
        }
}

static int64_t quantise_plane(const cachegen *kv, int64_t layer, int64_t plane, float factor) {
    const int64_t num_rows = kv->units * kv->tokens, size = kv->head_size, index = layer * kv->planes + plane;
    float *rows = kv->row_scratch, *sums = kv->channel_scratch, *tops = sums + size, *inverses = tops + size;
    int32_t *counts = kv->count_scratch;
    uint8_t *contexts = kv->contexts + index * size;
    for (int64_t t = 0; t < num_rows; t++) read_row(rows + t * size, row_of(kv, layer, plane, t), size, kv->dtype);
    const float anchor_step = subtract_anchors(rows, kv->anchors + index * size, sums, num_rows, size);
    const float step = factor * measure_deltas(rows, sums, tops, num_rows, size);
    kv->anchor_steps[index] = anchor_step;
    kv->steps[index] = step;
    if (!(step <= HIGHEST && anchor_step <= HIGHEST)) return NOT_FINITE;
    for (int64_t c = 0; c < size; c++) {
        const int shift = shift_of(tops[c], step);
        contexts[c] = (uint8_t)(shift << 4);
        inverses[c] = inverse(step * (float)(1 << shift));
    }
    quantise(rows, kv->symbols + plane * num_rows * size, inverses, counts, counts + size, num_rows, size);
    for (int64_t c = 0; c < size; c++) contexts[c] |= table_for(kv, counts[c], counts[size + c], num_rows);
    return DONE;
}

static void restore_plane(const cachegen *kv, int64_t layer, int64_t plane) {
    const int64_t num_rows = kv->units * kv->tokens, size = kv->head_size, index = layer * kv->planes + plane;
    float *anchors = kv->channel_scratch, *steps = anchors + size;
    for (int64_t c = 0; c < size; c++) {
        anchors[c] = (float)kv->anchors[index * size + c] * kv->anchor_steps[index];
        steps[c] = kv->steps[index] * (float)(1 << (kv->contexts[index * size + c] >> 4));
    }
    for (int64_t t = 0; t < num_rows; t++) {
        const uint8_t *symbols = kv->symbols + (plane * num_rows + t) * size;
        write_row(row_of(kv, layer, plane, t), symbols, anchors, steps, size, kv->dtype);
    }
}

INLINE rans_rows rows_of(const cachegen *kv, int64_t layer) {
    const int64_t num_rows = kv->units * kv->tokens;
    const uint8_t *contexts = kv->contexts + layer * kv->planes * kv->head_size;
    return (rans_rows){contexts, kv->planes * num_rows, kv->head_size, num_rows};
}

int64_t pdkv_cachegen_encode(const cachegen *kv) {
    const int64_t num_symbols = kv->planes * kv->units * kv->tokens * kv->head_size;
    int64_t total = 0;
    for (int64_t layer = 0; layer < kv->layers; layer++) {
        for (int64_t plane = 0; plane < kv->planes; plane++)
            if (quantise_plane(kv, layer, plane, kv->factors[2 * layer + (plane >= kv->planes / 2)])) return NOT_FINITE;
        const rans_rows rows = rows_of(kv, layer);
        const int64_t num_words = pdkv_rans_encode(
            kv->word_scratch, num_symbols, kv->states + layer * RANS_LANES, kv->symbols, &rows, kv->tables);
        if (num_words < 0 || num_words > kv->max_words - total) return NO_ROOM;
        memcpy(kv->words + 2 * total, kv->word_scratch + num_symbols - num_words, (size_t)num_words * 2);
        kv->num_words[layer] = num_words;
        total += num_words;
    }
    return DONE;
}

/* The caller has checked that the words of all layers are there, and that the steps are finite. */
int64_t pdkv_cachegen_decode(const cachegen *kv) {
    const char *words = kv->words;
    for (int64_t layer = 0; layer < kv->layers; layer++) {
        const rans_rows rows = rows_of(kv, layer);
        uint32_t *states = kv->states + layer * RANS_LANES;
        if (pdkv_rans_decode(kv->symbols, states, words, kv->num_words[layer], &rows, kv->tables))
            return DAMAGED;
        words += 2 * kv->num_words[layer];
        for (int64_t plane = 0; plane < kv->planes; plane++) restore_plane(kv, layer, plane);
    }
    return DONE;
}
