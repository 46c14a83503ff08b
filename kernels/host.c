/* Kernels for KV in host memory, called through ctypes (kernels/host.py), which releases the GIL meanwhile.
 *
 * Attention of single queries reads paged KV where it lies; copies move many pieces in one call. Everything has a torch
 * or numpy form elsewhere: where no compiler was at hand when the package was built, those serve.
 */
#include <math.h>
#include <stdlib.h>

#include "vectors.h"

/* One layer of a step. Strides count elements, of the pool's dtype. */
typedef struct {
    const void *keys;             /* the layer's K in block 0; (kv_heads, block_size, head_size) in each block */
    const void *values;           /* the layer's V in block 0 */
    const void *qkv;              /* (rows, row_stride): heads, kv_heads, kv_heads vectors of head_size */
    void *out;                    /* (rows, heads * head_size) */
    const int64_t *q_rows;        /* (n,) row of each query in qkv */
    const int64_t *out_rows;      /* (n,) row of each query's result in out */
    const int64_t *seq_lens;      /* (n,) keys from each query's first block on, up to the last one that it sees */
    const int64_t *hidden;        /* (n,) the first so many of them it does not see: less than a block, not all */
    const int64_t *first_blocks;  /* (n,) where each query's block table begins in block_tables */
    const int64_t *block_tables;
    int64_t n, heads, kv_heads, head_size, block_size, block_stride, row_stride;
    int64_t dtype, num_threads;
    double scale;
} attention;

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

INLINE void store_float32(float *to, float number) { *to = number; }

INLINE void store_bfloat16(uint16_t *to, float number) { /* to nearest, ties to even; results are never NaN */
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    *to = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_float16(uint16_t *to, float number) { *to = half_of(number); }

/* to[i] = sum of rows[i]'s lanes, i < 4 */
INLINE void add_lanes(float *to, const vec16 *rows) {
    vec4 parts[4];
    for (int i = 0; i < 4; i++) {
        vec8 half = __builtin_shufflevector(rows[i], rows[i], 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(rows[i], rows[i], 8, 9, 10, 11, 12, 13, 14, 15);
        parts[i] = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
    }
    vec4 a = __builtin_shufflevector(parts[0], parts[1], 0, 4, 1, 5) +
             __builtin_shufflevector(parts[0], parts[1], 2, 6, 3, 7);
    vec4 b = __builtin_shufflevector(parts[2], parts[3], 0, 4, 1, 5) +
             __builtin_shufflevector(parts[2], parts[3], 2, 6, 3, 7);
    a = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    memcpy(to, &a, sizeof a);
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

INLINE void softmax(float *scores, int64_t count) { /* not divided by the sum, which is returned in scores[count] */
    float top = scores[0], sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < count; t++) top = scores[t] > top ? scores[t] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exp_of(scores[t] - top);
        sum += scores[t];
    }
    scores[count] = sum;
}

#define MAX_HEAD_SIZE 256
#define UNROLL _Pragma("GCC unroll 16")

INLINE void prefetch(const char *from, int64_t bytes) { /* paged KV jumps about: no hardware prefetcher follows */
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Scratch of one query: SIZE * heads floats of sums, then scores, `columns` per head: seq_len rounded up to 4, and the
 * weights' sum. Heads [first, last) are KV heads. SIZE and Q are constants, so that what is in flight stays in registers;
 * Q queries that share a KV head go at once. */
#define DEFINE_ATTEND(NAME, T)                                                                                        \
    INLINE void scores_##NAME(const vec16 *query, const T *keys, int64_t tokens, float *scores, int64_t columns,      \
                              const int SIZE, const int Q) {                                                          \
        for (int64_t t = 0; t < tokens; t += 4) { /* a block has a multiple of 4 tokens, used or not */               \
            vec16 dots[2][4] = {{{0}}}, row;                                                                          \
            UNROLL for (int c = 0; c < SIZE / 16; c++)                                                                \
                UNROLL for (int u = 0; u < 4; u++) {                                                                  \
                    load_##NAME(&row, keys + (t + u) * SIZE + c * 16);                                                \
                    UNROLL for (int g = 0; g < Q; g++) dots[g][u] += query[g * SIZE / 16 + c] * row;                  \
                }                                                                                                     \
            UNROLL for (int g = 0; g < Q; g++) add_lanes(scores + g * columns + t, dots[g]);                          \
        }                                                                                                             \
    }                                                                                                                 \
    INLINE void sums_##NAME(vec16 *sums, const T *values, int64_t tokens, const float *weights, int64_t columns,      \
                            const int SIZE, const int Q) {                                                            \
        vec16 sum[2][MAX_HEAD_SIZE / 16], row;                                                                        \
        UNROLL for (int i = 0; i < Q * SIZE / 16; i++) sum[i / (SIZE / 16)][i % (SIZE / 16)] = sums[i];               \
        for (int64_t t = 0; t < tokens; t++)                                                                          \
            UNROLL for (int c = 0; c < SIZE / 16; c++) {                                                              \
                load_##NAME(&row, values + t * SIZE + c * 16);                                                        \
                UNROLL for (int g = 0; g < Q; g++) sum[g][c] += weights[g * columns + t] * row;                       \
            }                                                                                                         \
        UNROLL for (int i = 0; i < Q * SIZE / 16; i++) sums[i] = sum[i / (SIZE / 16)][i % (SIZE / 16)];               \
    }                                                                                                                 \
    INLINE void attend_##NAME##_sized(const attention *a, int64_t i, int64_t first, int64_t last, float *scratch,     \
                                      const int SIZE) {                                                               \
        const int64_t count = a->seq_lens[i], columns = ((count + 3) & ~3) + 1, group = a->heads / a->kv_heads;       \
        const int64_t *table = a->block_tables + a->first_blocks[i], head_stride = a->block_size * SIZE;              \
        const int64_t hidden = a->hidden[i];                                                                          \
        const int64_t part = first * head_stride, head_bytes = head_stride * (int64_t)sizeof(T);                          \
        const int64_t heads = (last - first) * group, blocks = (count + a->block_size - 1) / a->block_size;           \
        const T *q = (const T *)a->qkv + a->q_rows[i] * a->row_stride + first * group * SIZE;                         \
        vec16 *const sums = (vec16 *)scratch, *const query = sums + heads * SIZE / 16;                                \
        float *const scores = (float *)(query + heads * SIZE / 16);                                                   \
        for (int64_t c = 0; c < heads * SIZE / 16; c++) {                                                             \
            load_##NAME(&query[c], q + c * 16);                                                                       \
            query[c] *= (float)a->scale;                                                                              \
            sums[c] = (vec16){0};                                                                                     \
        }                                                                                                             \
        for (int64_t b = 0; b < blocks; b++) {                                                                        \
            const T *keys = (const T *)a->keys + table[b] * a->block_stride + part;                                   \
            const int64_t start = b * a->block_size, rest = count - start;                                            \
            const int64_t tokens = rest < a->block_size ? rest : a->block_size;                                       \
            const T *next = b + 1 < blocks ? (const T *)a->keys + table[b + 1] * a->block_stride + part               \
                                           : (const T *)a->values + table[0] * a->block_stride + part;                \
            for (int64_t h = 0; h < heads; h++) {                                                                     \
                prefetch((const char *)(next + h / group * head_stride), head_bytes);                                 \
                float *to = scores + h * columns + start;                                                             \
                const T *own = keys + h / group * head_stride;                                                        \
                if (h % group + 1 < group)                                                                            \
                    scores_##NAME(query + h * SIZE / 16, own, tokens, to, columns, SIZE, 2), h++;                     \
                else                                                                                                  \
                    scores_##NAME(query + h * SIZE / 16, own, tokens, to, columns, SIZE, 1);                          \
            }                                                                                                         \
        }                                                                                                             \
        for (int64_t h = 0; h < heads; h++) softmax(scores + h * columns + hidden, count - hidden);                   \
        for (int64_t b = 0; b < blocks; b++) {                                                                        \
            const int64_t skip = b ? 0 : hidden, start = b * a->block_size + skip, rest = count - start;              \
            const T *values = (const T *)a->values + table[b] * a->block_stride + part + skip * SIZE;                 \
            const int64_t tokens = rest < a->block_size - skip ? rest : a->block_size - skip;                         \
            const T *next = (const T *)a->values + table[b + 1 < blocks ? b + 1 : b] * a->block_stride + part;        \
            for (int64_t h = 0; h < heads; h++) {                                                                     \
                prefetch((const char *)(next + h / group * head_stride), head_bytes);                                 \
                const float *weights = scores + h * columns + start;                                                  \
                const T *own = values + h / group * head_stride;                                                      \
                if (h % group + 1 < group)                                                                            \
                    sums_##NAME(sums + h * SIZE / 16, own, tokens, weights, columns, SIZE, 2), h++;                   \
                else                                                                                                  \
                    sums_##NAME(sums + h * SIZE / 16, own, tokens, weights, columns, SIZE, 1);                        \
            }                                                                                                         \
        }                                                                                                             \
        T *out = (T *)a->out + (a->out_rows[i] * a->heads + first * group) * SIZE;                                    \
        for (int64_t d = 0; d < heads * SIZE; d++)                                                                    \
            store_##NAME(out + d, ((float *)sums)[d] / scores[d / SIZE * columns + count]);                           \
    }                                                                                                                 \
    FOR_EACH_CPU static void attend_##NAME(const attention *a, int64_t i, int64_t first, int64_t last, float *to) {   \
        switch (a->head_size) {                                                                                       \
        case 32: attend_##NAME##_sized(a, i, first, last, to, 32); break;                                             \
        case 64: attend_##NAME##_sized(a, i, first, last, to, 64); break;                                             \
        case 128: attend_##NAME##_sized(a, i, first, last, to, 128); break;                                           \
        default: attend_##NAME##_sized(a, i, first, last, to, (int)a->head_size);                                     \
        }                                                                                                             \
    }

DEFINE_ATTEND(float32, float)
DEFINE_ATTEND(bfloat16, uint16_t)
DEFINE_ATTEND(float16, uint16_t)

/* Returns 0; 1: no memory for scores, out is undefined; 2: a head size that is no multiple of 16 or above 256. */
int pdkv_attend(const attention *a) {
    if (a->head_size % 16 || a->head_size > MAX_HEAD_SIZE) return 2;
    int64_t longest = 0, failed = 0;
    for (int64_t i = 0; i < a->n; i++) longest = a->seq_lens[i] > longest ? a->seq_lens[i] : longest;
    /* A query's KV heads lie side by side and go together, unless there are fewer queries than threads. */
    const int64_t parts = a->n < 2 * a->num_threads && a->kv_heads % a->num_threads == 0 ? a->num_threads : 1;
    const int64_t each = a->kv_heads / parts, heads = a->heads / parts;
    const size_t numbers = (size_t)(heads * (2 * a->head_size + longest + 5));
#pragma omp parallel num_threads((int)a->num_threads) if (a->num_threads > 1)
    {
        float *scratch = aligned_alloc(64, (numbers * sizeof(float) + 63) & ~(size_t)63);
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < a->n * parts; item++) {
            const int64_t first = item % parts * each;
            if (scratch == NULL) continue;
            if (a->dtype == BFLOAT16)
                attend_bfloat16(a, item / parts, first, first + each, scratch);
            else if (a->dtype == FLOAT16)
                attend_float16(a, item / parts, first, first + each, scratch);
            else
                attend_float32(a, item / parts, first, first + each, scratch);
        }
        free(scratch);
    }
    return (int)failed;
}

/* n pieces of outer x inner rows of row_bytes each. Offsets and strides are bytes; nothing overlaps. */
void pdkv_copy(
    char *target, const char *source, const int64_t *target_offsets, const int64_t *source_offsets, int64_t n,
    int64_t outer, int64_t target_outer_stride, int64_t source_outer_stride,
    int64_t inner, int64_t target_inner_stride, int64_t source_inner_stride, int64_t row_bytes) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t o = 0; o < outer; o++) {
            char *to = target + target_offsets[i] + o * target_outer_stride;
            const char *from = source + source_offsets[i] + o * source_outer_stride;
            for (int64_t r = 0; r < inner; r++)
                memcpy(to + r * target_inner_stride, from + r * source_inner_stride, (size_t)row_bytes);
        }
}
