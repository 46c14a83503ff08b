/* Kernels for KV in host memory, called through ctypes (kernels/host.py), which releases the GIL meanwhile.
 *
 * Attention of single queries reads paged KV where it lies; copies move many pieces in one call. Everything has a torch
 * or numpy form elsewhere: where no compiler was at hand when the package was built, those serve.
 */
#include <float.h>
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
    double softcap;               /* c: scores x become c * tanh(x / c); 0: they stay */
} attention;

/* What is attended to at once: KV heads [first, last) of a query, over its blocks [from, to). */
typedef struct {
    int64_t query, first, last, from, to;
} part;

INLINE void store_float32(float *to, float number) { *to = number; }

INLINE void store_bfloat16(uint16_t *to, float number) { /* to nearest, ties to even; results are never NaN */
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    *to = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_float16(uint16_t *to, float number) { *to = half_of(number); }

typedef float vec4 __attribute__((vector_size(16)));

/* A vector's lanes, added up to four. */
INLINE vec4 folded(vec x) {
#if WIDTH == 4
    return x;
#else
    vec4 parts[WIDTH / 4];
    memcpy(parts, &x, sizeof parts);
#if WIDTH == 16
    parts[0] += parts[2], parts[1] += parts[3];
#endif
    return parts[0] + parts[1];
#endif
}

/* to[i] = sum of rows[i]'s lanes, i < 4 */
INLINE void add_lanes(float *to, const vec *rows) {
    const vec4 parts[4] = {folded(rows[0]), folded(rows[1]), folded(rows[2]), folded(rows[3])};
    vec4 a = __builtin_shufflevector(parts[0], parts[1], 0, 4, 1, 5) +
             __builtin_shufflevector(parts[0], parts[1], 2, 6, 3, 7);
    vec4 b = __builtin_shufflevector(parts[2], parts[3], 0, 4, 1, 5) +
             __builtin_shufflevector(parts[2], parts[3], 2, 6, 3, 7);
    a = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    memcpy(to, &a, sizeof a);
}

/* exp(scores - top) in place, where top is the highest; their sum goes to *total. */
INLINE void softmax(float *scores, int64_t count, float *top_score, float *total) {
    float top = -FLT_MAX, sum = 0.0f; /* finite, so that a part of nothing but -inf weighs nothing */
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < count; t++) top = scores[t] > top ? scores[t] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exp_of(scores[t] - top);
        sum += scores[t];
    }
    *top_score = top;
    *total = sum;
}

/* cap * tanh(scores / cap) in place, where tanh(x) = (1 - exp(-2x)) / (1 + exp(-2x)) for x >= 0. */
INLINE void cap_scores(float *scores, int64_t count, float cap) {
#pragma omp simd
    for (int64_t t = 0; t < count; t++) {
        const float x = scores[t], e = exp_of((x < 0.0f ? x : -x) * (2.0f / cap)), y = cap * ((1.0f - e) / (1.0f + e));
        scores[t] = x < 0.0f ? -y : y;
    }
}

#define MAX_HEAD_SIZE 576 /* latent rows */

/* Paged KV jumps about: no hardware prefetcher follows. Into the first cache, which took a seventh less than the second. */
INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

/* What one query's heads give over one part of its keys, in floats: sum(exp(score - top) * value), head_size per head;
 * then each head's top; then each head's sum(exp(score - top)). Padded to whole vectors. */
INLINE int64_t result_size(const attention *a, int64_t heads) { return (heads * (a->head_size + 2) + 15) & ~15; }

/* Attention of one query over its blocks [from, to), with KV heads [first, last). Scratch: the queries, then scores,
 * `columns` per head: the keys, rounded up to 4. Q queries that share a KV head go at once, a strip of V vectors of its
 * values after the other: Q and V are constants, so that what is in flight stays in registers. */
#define DEFINE_ATTEND(NAME, T)                                                                                        \
    INLINE void scores_##NAME(const vec *query, const T *keys, int64_t tokens, float *scores, int64_t columns,        \
                              int64_t size, const int Q) {                                                            \
        for (int64_t t = 0; t < tokens; t += 4) { /* a block has a multiple of 4 tokens, used or not */               \
            vec dots[2][4] = {{{0}}};                                                                                 \
            for (int64_t d = 0; d < size; d += WIDTH)                                                                 \
                UNROLL for (int u = 0; u < 4; u++) {                                                                  \
                    const vec row = load_##NAME(keys + (t + u) * size + d);                                           \
                    UNROLL for (int g = 0; g < Q; g++) dots[g][u] += query[(g * size + d) / WIDTH] * row;             \
                }                                                                                                     \
            UNROLL for (int g = 0; g < Q; g++) add_lanes(scores + g * columns + t, dots[g]);                          \
        }                                                                                                             \
    }                                                                                                                 \
    INLINE void strip_##NAME(float *sums, const T *values, int64_t tokens, const float *weights, int64_t columns,     \
                             int64_t size, const int Q, const int V) {                                                \
        vec sum[2][8];                                                                                                \
        UNROLL for (int i = 0; i < Q * V; i++) sum[i / V][i % V] = load_float32(sums + i / V * size + i % V * WIDTH); \
        for (int64_t t = 0; t < tokens; t++)                                                                          \
            UNROLL for (int c = 0; c < V; c++) {                                                                      \
                const vec row = load_##NAME(values + t * size + c * WIDTH);                                           \
                UNROLL for (int g = 0; g < Q; g++) sum[g][c] += weights[g * columns + t] * row;                       \
            }                                                                                                         \
        UNROLL for (int i = 0; i < Q * V; i++) memcpy(sums + i / V * size + i % V * WIDTH, &sum[i / V][i % V], sizeof(vec));\
    }                                                                                                                 \
    INLINE void sums_##NAME(float *sums, const T *values, int64_t tokens, const float *weights, int64_t columns,      \
                            int64_t size, const int Q) {                                                              \
        int64_t d = 0;                                                                                                \
        for (; d + 8 / Q * WIDTH <= size; d += 8 / Q * WIDTH)                                                         \
            strip_##NAME(sums + d, values + d, tokens, weights, columns, size, Q, 8 / Q);                             \
        for (; d + 4 / Q * WIDTH <= size; d += 4 / Q * WIDTH)                                                         \
            strip_##NAME(sums + d, values + d, tokens, weights, columns, size, Q, 4 / Q);                             \
        for (; d < size; d += WIDTH) strip_##NAME(sums + d, values + d, tokens, weights, columns, size, Q, 1);        \
    }                                                                                                                 \
    static void attend_##NAME(const attention *a, part of, float *result, float *scratch) {                           \
        const int64_t size = a->head_size;                                                                            \
        const int64_t first = of.first, heads = (of.last - first) * (a->heads / a->kv_heads);                         \
        const int64_t group = a->heads / a->kv_heads, head_stride = a->block_size * size;                             \
        const int64_t rest_of_keys = a->seq_lens[of.query] - of.from * a->block_size;                                 \
        const int64_t most = (of.to - of.from) * a->block_size, count = rest_of_keys < most ? rest_of_keys : most;    \
        const int64_t columns = (count + 3) & ~3, blocks = (count + a->block_size - 1) / a->block_size;               \
        const int64_t *table = a->block_tables + a->first_blocks[of.query] + of.from;                                 \
        const int64_t side = first * head_stride, head_bytes = head_stride * (int64_t)sizeof(T);                      \
        const T *q = (const T *)a->qkv + a->q_rows[of.query] * a->row_stride + first * group * size;                  \
        vec *const query = (vec *)scratch;                                                                            \
        float *const tops = result + heads * size, *const totals = tops + heads;                                      \
        const int64_t hidden = of.from ? 0 : a->hidden[of.query]; /* the first chunk's alone */                       \
        float *const scores = (float *)(query + heads * size / WIDTH);                                                \
        memset(result, 0, (size_t)(heads * size) * sizeof *result);                                                   \
        for (int64_t c = 0; c < heads * size / WIDTH; c++) query[c] = load_##NAME(q + c * WIDTH) * (float)a->scale;   \
        for (int64_t b = 0; b < blocks; b++) {                                                                        \
            const T *keys = (const T *)a->keys + table[b] * a->block_stride + side;                                   \
            const int64_t start = b * a->block_size, rest = count - start;                                            \
            const int64_t tokens = rest < a->block_size ? rest : a->block_size;                                       \
            const T *next = b + 1 < blocks ? (const T *)a->keys + table[b + 1] * a->block_stride + side               \
                                           : (const T *)a->values + table[0] * a->block_stride + side;                \
            for (int64_t h = 0; h < heads; h++) {                                                                     \
                prefetch((const char *)(next + h / group * head_stride), head_bytes);                                 \
                float *to = scores + h * columns + start;                                                             \
                const T *own = keys + h / group * head_stride;                                                        \
                if (h % group + 1 < group)                                                                            \
                    scores_##NAME(query + h * size / WIDTH, own, tokens, to, columns, size, 2), h++;                  \
                else                                                                                                  \
                    scores_##NAME(query + h * size / WIDTH, own, tokens, to, columns, size, 1);                       \
            }                                                                                                         \
        }                                                                                                             \
        for (int64_t h = 0; a->softcap > 0.0 && h < heads; h++)                                                       \
            cap_scores(scores + h * columns + hidden, count - hidden, (float)a->softcap);                             \
        for (int64_t h = 0; h < heads; h++)                                                                           \
            softmax(scores + h * columns + hidden, count - hidden, &tops[h], &totals[h]);                             \
        for (int64_t b = 0; b < blocks; b++) {                                                                        \
            const int64_t skip = b ? 0 : hidden, start = b * a->block_size + skip, rest = count - start;              \
            const T *values = (const T *)a->values + table[b] * a->block_stride + side + skip * size;                 \
            const int64_t tokens = rest < a->block_size - skip ? rest : a->block_size - skip;                         \
            const T *next = (const T *)a->values + table[b + 1 < blocks ? b + 1 : b] * a->block_stride + side;        \
            for (int64_t h = 0; h < heads; h++) {                                                                     \
                prefetch((const char *)(next + h / group * head_stride), head_bytes);                                 \
                const float *weights = scores + h * columns + start;                                                  \
                const T *own = values + h / group * head_stride;                                                      \
                if (h % group + 1 < group)                                                                            \
                    sums_##NAME(result + h * size, own, tokens, weights, columns, size, 2), h++;                      \
                else                                                                                                  \
                    sums_##NAME(result + h * size, own, tokens, weights, columns, size, 1);                           \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void write_##NAME(const attention *a, part of, const float *result) {                                      \
        const int64_t group = a->heads / a->kv_heads, heads = (of.last - of.first) * group;                           \
        const float *totals = result + heads * (a->head_size + 1);                                                    \
        T *out = (T *)a->out + (a->out_rows[of.query] * a->heads + of.first * group) * a->head_size;                  \
        for (int64_t h = 0; h < heads; h++)                                                                           \
            for (int64_t d = h * a->head_size; d < (h + 1) * a->head_size; d++)                                       \
                store_##NAME(out + d, result[d] / totals[h]);                                                         \
    }

DEFINE_ATTEND(float32, float)
DEFINE_ATTEND(bfloat16, uint16_t)
DEFINE_ATTEND(float16, uint16_t)

static void attend_part(const attention *a, part of, float *result, float *scratch) {
    if (a->dtype == BFLOAT16)
        attend_bfloat16(a, of, result, scratch);
    else if (a->dtype == FLOAT16)
        attend_float16(a, of, result, scratch);
    else
        attend_float32(a, of, result, scratch);
}

static void write_part(const attention *a, part of, const float *result) {
    if (a->dtype == BFLOAT16)
        write_bfloat16(a, of, result);
    else if (a->dtype == FLOAT16)
        write_float16(a, of, result);
    else
        write_float32(a, of, result);
}

/* Add the result over later keys to that over earlier ones. One function, always called in the order of the keys: the
 * sums' digits do not depend on who computed what. */
static void merge(float *to, const float *from, int64_t heads, int64_t head_size) {
    float *tops = to + heads * head_size, *totals = tops + heads;
    const float *other_tops = from + heads * head_size, *other_totals = other_tops + heads;
    for (int64_t h = 0; h < heads; h++) {
        const float top = tops[h] > other_tops[h] ? tops[h] : other_tops[h];
        const float own = exp_of(tops[h] - top), other = exp_of(other_tops[h] - top);
        for (int64_t d = h * head_size; d < (h + 1) * head_size; d++) to[d] = to[d] * own + from[d] * other;
        totals[h] = totals[h] * own + other_totals[h] * other;
        tops[h] = top;
    }
}

/* Keys are attended to CHUNK at a time whoever does it, and so equally on any number of threads. */
#define CHUNK 512
#define SHARED_NUMBERS 65536 /* keys' numbers from which a second thread gains more than its waking costs */

INLINE int64_t chunk_blocks(const attention *a) { return a->block_size < CHUNK ? CHUNK / a->block_size : 1; }

INLINE int64_t num_chunks(const attention *a, int64_t query) {
    const int64_t keys = chunk_blocks(a) * a->block_size;
    return (a->seq_lens[query] + keys - 1) / keys;
}

INLINE part chunk_of(const attention *a, int64_t query, int64_t first, int64_t last, int64_t chunk) {
    return (part){query, first, last, chunk * chunk_blocks(a), (chunk + 1) * chunk_blocks(a)};
}

INLINE float *take(int64_t floats) { return aligned_alloc(64, ((size_t)floats * sizeof(float) + 63) & ~(size_t)63); }

INLINE int64_t scratch_size(const attention *a, int64_t kv_heads) {
    const int64_t keys = chunk_blocks(a) * a->block_size;
    return (kv_heads * (a->heads / a->kv_heads) * (a->head_size + keys + 4) + 15) & ~15;
}

/* How a call is shared out: `chunks` of all queries, `each` KV heads of one at a time; each is 0: whole queries. */
typedef struct {
    int64_t chunks, each, num_threads;
} sharing;

static sharing share(const attention *a) {
    int64_t chunks = 0, most_chunks = 0, keys = 0, longest = 0;
    for (int64_t i = 0; i < a->n; i++) {
        const int64_t own = num_chunks(a, i);
        chunks += own;
        most_chunks = own > most_chunks ? own : most_chunks;
        keys += a->seq_lens[i];
        longest = a->seq_lens[i] > longest ? a->seq_lens[i] : longest;
    }
    const int64_t num_threads = keys * a->kv_heads * a->head_size < SHARED_NUMBERS ? 1 : a->num_threads;
    /* Whole queries, unless one of them would keep its thread busy while the others have nothing to do. */
    if (num_threads == 1 || (a->n >= 2 * num_threads && longest * num_threads <= keys))
        return (sharing){chunks, 0, num_threads};
    int64_t each = a->kv_heads; /* as many as leave two pieces of the longest query to each thread */
    while (each > 1 && (a->kv_heads % each || most_chunks * (a->kv_heads / each) < 2 * num_threads)) each--;
    return (sharing){chunks, each, num_threads};
}

/* Each thread takes whole queries: their KV heads lie side by side and go together. */
static int attend_whole(const attention *a, int num_threads) {
    const int64_t size = result_size(a, a->heads);
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        float *result = take(2 * size + scratch_size(a, a->kv_heads)), *other = result + size, *scratch = other + size;
        if (result == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < a->n; i++) {
            if (result == NULL) continue;
            for (int64_t c = 0; c < num_chunks(a, i); c++) {
                attend_part(a, chunk_of(a, i, 0, a->kv_heads, c), c == 0 ? result : other, scratch);
                if (c > 0) merge(result, other, a->heads, a->head_size);
            }
            write_part(a, chunk_of(a, i, 0, a->kv_heads, 0), result);
        }
        free(result);
    }
    return failed;
}

/* Each thread takes some KV heads of one chunk of a query; who is the last of a query's merges what they give. */
static int attend_apart(const attention *a, sharing by) {
    const int64_t parts = a->kv_heads / by.each, heads = by.each * (a->heads / a->kv_heads);
    const int64_t size = result_size(a, heads);
    int failed = 0;
    int64_t *firsts = malloc((size_t)(a->n + 1 + by.chunks + a->n * parts) * sizeof *firsts); /* of each query */
    float *results = take(by.chunks * parts * size);
    if (firsts == NULL || results == NULL) {
        free(firsts), free(results);
        return 1;
    }
    int64_t *queries = firsts + a->n + 1, *missing = queries + by.chunks; /* of each chunk; of each query's part */
    for (int64_t i = 0, at = 0; i < a->n; i++) {
        firsts[i] = at;
        for (int64_t c = 0; c < num_chunks(a, i); c++) queries[at++] = i;
        firsts[i + 1] = at;
        for (int64_t p = 0; p < parts; p++) missing[i * parts + p] = at - firsts[i];
    }
#pragma omp parallel num_threads((int)by.num_threads)
    {
        float *scratch = take(scratch_size(a, by.each)); /* a thread's own memory: shared lines would cost a fifth */
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < by.chunks * parts; item++) {
            if (scratch == NULL) continue;
            const int64_t i = queries[item / parts], p = item % parts, first = p * by.each;
            const part of = chunk_of(a, i, first, first + by.each, item / parts - firsts[i]);
            attend_part(a, of, results + item * size, scratch);
            if (__atomic_sub_fetch(&missing[i * parts + p], 1, __ATOMIC_ACQ_REL)) continue;
            float *result = results + (firsts[i] * parts + p) * size;
            for (int64_t c = 1; c < firsts[i + 1] - firsts[i]; c++)
                merge(result, result + c * parts * size, heads, a->head_size);
            write_part(a, of, result);
        }
        free(scratch);
    }
    free(results);
    free(firsts);
    return failed;
}

/* Returns 0; 1: no memory for scores, out is undefined; 2: a head size that is no multiple of 16 or above 576. */
int pdkv_attend(const attention *a) {
    if (a->head_size % 16 || a->head_size > MAX_HEAD_SIZE) return 2;
    const sharing by = share(a);
    return by.each ? attend_apart(a, by) : attend_whole(a, (int)by.num_threads);
}

/* How many pieces the threads of such a call share. */
int64_t pdkv_attend_pieces(const attention *a) {
    const sharing by = share(a);
    return by.each ? by.chunks * (a->kv_heads / by.each) : a->n;
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
