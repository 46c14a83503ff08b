/* Causal attention of prompts over paged KV, called through ctypes (kernels/prompts.py), which releases the GIL meanwhile.
 *
 * A piece is some of a prompt's queries and the heads that share a KV head. It takes 128 keys at a time, packed as
 * linear.c's kernels read weights: those multiply queries by keys, and weights by values. A query's sums are made tile by
 * tile of keys, the first of which is key 0's, each a chain in the order of the keys: its bits depend on what it sees
 * alone, not on the queries beside it, on where a prompt is cut, or on threads.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>

#include "tiles.h"

#define KEYS 128       /* of a tile */
#define PIECE_ROWS 252 /* queries' heads of a piece: so that packing keys costs little beside their products */
#define MAX_TILES 64
#define MAX_HEAD_SIZE 256
#define SHARED_PRODUCTS (1 << 20) /* multiplications from which a second thread gains more than its waking costs */

/* One layer of a step: runs of queries at adjacent positions, in adjacent rows. Strides count elements. */
typedef struct {
    const void *keys;             /* the layer's K in block 0; (kv_heads, block_size, head_size) in each block */
    const void *values;           /* the layer's V in block 0 */
    const void *qkv;              /* (rows, row_stride): heads, kv_heads, kv_heads vectors of head_size */
    void *out;                    /* (rows, heads * head_size) */
    const int64_t *q_rows;        /* (n,) row of each run's first query in qkv */
    const int64_t *out_rows;      /* (n,) row of its result in out */
    const int64_t *positions;     /* (n,) its position: it sees the keys up to there */
    const int64_t *counts;        /* (n,) queries of each run */
    const int64_t *tables;        /* (n,) where each run's block table begins in block_tables */
    const int64_t *block_tables;
    int64_t n, heads, kv_heads, head_size, block_size, block_stride, row_stride;
    int64_t window;               /* how many keys a query sees, its own included; 0: all up to its own */
    int64_t dtype, num_threads, level;
    char *rooms;                  /* for each thread, as many bytes as pdkv_prompt_room_bytes says; aligned to 64 */
    double scale;
} prompts;

/* Queries [first, first + count) of a run, and the heads of one KV head. */
typedef struct {
    int64_t run, kv_head, first, count;
} piece;

/* A thread's memory. */
typedef struct {
    int64_t places[KEYS], next_places[KEYS]; /* of a tile's keys and values: numbers behind the first block's first */
    float totals[PIECE_ROWS * 16] __attribute__((aligned(64))), scores[14 * KEYS];
    char weights[14 * KEYS * 4] __attribute__((aligned(64))), own_weights[KEYS * 4] __attribute__((aligned(64)));
    char keys[KEYS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    char values[KEYS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    char own_values[KEYS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    char queries[PIECE_ROWS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    float sums[PIECE_ROWS * MAX_HEAD_SIZE] __attribute__((aligned(64)));
} room;

/* Keys and values that a piece's rows are multiplied by, packed; what is made of them for some rows. */
typedef struct {
    int64_t first; /* key; a multiple of KEYS */
    int is_finite; /* all values that a row of the piece sees */
    float scale;   /* to logarithms to base 2 */
    const int64_t *places;
    const char *keys, *values;
    char *own_values, *weights, *own_weights; /* own: of one row */
    float *scores;                            /* panels of 32 keys for each row */
} keys_tile;

/* Rows of a piece that a kernel takes at once, and what is kept of them from tile to tile. A row is one head's of a query:
 * heads of a query are neighbours. */
typedef struct {
    int64_t row, rows;
    char *queries;
    float *sums, *totals; /* (panels of a head's numbers, rows, 32); (rows, 16) */
    float tops[16];       /* the highest score that each has seen */
    int has_begun;        /* with sums */
} some_rows;

/* Keys [from, to) of a tile; negative and above KEYS are cut off, to <= 0 or from >= KEYS: none. */
typedef struct {
    int64_t from, to;
} keys_seen;

INLINE int64_t group_of(const prompts *a) { return a->heads / a->kv_heads; }
INLINE int64_t query_of(const prompts *a, const piece *of, const some_rows *s, int64_t r) { /* of the run */
    return of->first + (s->row + r) / group_of(a);
}
INLINE int64_t head_of(const prompts *a, const piece *of, const some_rows *s, int64_t r) {
    return of->kv_head * group_of(a) + (s->row + r) % group_of(a);
}
INLINE int64_t query_chunks(const prompts *a, int64_t per_word) { return (a->head_size / per_word + 15) / 16; }

INLINE keys_seen keys_of(const prompts *a, const piece *of, const some_rows *s, const keys_tile *t, int64_t r) {
    const int64_t stop = a->positions[of->run] + query_of(a, of, s, r) + 1 - t->first;
    const int64_t from = a->window && stop > a->window - t->first ? stop - a->window : 0;
    return (keys_seen){from > 0 ? from : 0, stop < KEYS ? stop : KEYS};
}

static void find_places(const prompts *a, const piece *of, int64_t first, int64_t from, int64_t to, int64_t *places) {
    const int64_t *const table = a->block_tables + a->tables[of->run];
    for (int64_t key = first + from; key < first + to;) {
        const int64_t block = key / a->block_size, stop = (block + 1) * a->block_size;
        int64_t at = table[block] * a->block_stride + (of->kv_head * a->block_size + key % a->block_size) * a->head_size;
        for (; key < stop && key < first + to; key++, at += a->head_size) places[key - first] = at;
    }
}

/* Keys and values [from, to) of a tile that will be packed soon: paged KV jumps about, and no hardware prefetcher follows. */
INLINE void fetch(const prompts *a, const int64_t *places, int64_t from, int64_t to, const int dtype) {
    for (int64_t key = from; key < to; key++)
        for (int64_t i = 0; i < bytes_of(a->head_size, dtype); i += 64) {
            __builtin_prefetch((const char *)a->keys + bytes_of(places[key], dtype) + i, 0, 2);
            __builtin_prefetch((const char *)a->values + bytes_of(places[key], dtype) + i, 0, 2);
        }
}

/* For each instruction set: `larger` is b where one is NaN; `fused` is a * b + c, rounded once; `power_of_two` is 2^x for x
 * near 0 or below, with a relative error below 2e-7, and 0 below -126; `get` reads WIDTH numbers, from the i-th on;
 * `lower_halves` moves what `get` read of bfloat16; `put_weights` writes weights as they are multiplied. All of them give
 * the same bits with every set. */
#define POWER_OF_TWO(n, r, fused, one)                                                                                \
    fused(fused(fused(fused(fused(one * 1.326472404e-3f, r, one * 9.671512866e-3f), r, one * 5.550733754e-2f), r,     \
                      one * 2.402224208e-1f), r, one * 6.931469776e-1f), r, one)

#define ISA V3
#define FOR_ISA(name) name##_v3
#define WIDTH 8
#define IS_PAIRED 0
#define INLINE_V3 static inline __attribute__((always_inline, target(V3)))
typedef float vector_v3 __attribute__((vector_size(32)));
typedef int32_t wholes_v3 __attribute__((vector_size(32)));

INLINE_V3 vector_v3 larger_v3(vector_v3 a, vector_v3 b) { return (vector_v3)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE_V3 vector_v3 fused_v3(vector_v3 a, vector_v3 b, vector_v3 c) {
    return (vector_v3)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE_V3 float highest_v3(vector_v3 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
INLINE_V3 vector_v3 power_of_two_v3(vector_v3 x) {
    const vector_v3 one = (vector_v3){0} + 1.0f;
    const __m256 n = _mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vector_v3 r = x - (vector_v3)n, p = POWER_OF_TWO(n, r, fused_v3, one);
    const vector_v3 power = (vector_v3)((((wholes_v3)_mm256_cvttps_epi32(n)) + 127) << 23);
    return (vector_v3)((wholes_v3)(p * power) & ~(x < -126.0f));
}
INLINE_V3 vector_v3 get_v3(const void *x, int64_t i, const int dtype) {
    if (dtype == FLOAT32) return (vector_v3)_mm256_loadu_ps((const float *)x + i);
    const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
    return (vector_v3)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
INLINE_V3 wholes_v3 lower_halves_v3(wholes_v3 words) { return words; }
INLINE_V3 void put_weights_v3(char *to, vector_v3 weights) { memcpy(to, &weights, sizeof weights); }
INLINE_V3 void write_transposed_v3(const words16 *rows, char *to) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) memcpy(to + j * 128 + i * 4, (const char *)&rows[i] + j * 4, 4);
}
#include "lanes.h"
#include "prompt_rows.h"

#undef ISA
#undef FOR_ISA
#undef WIDTH
#define ISA V4
#define FOR_ISA(name) name##_v4
#define WIDTH 16
#define INLINE_V4 static inline __attribute__((always_inline, target(V4)))
typedef vec16 vector_v4;
typedef ints16 wholes_v4;

INLINE_V4 vec16 larger_v4(vec16 a, vec16 b) { return (vec16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE_V4 vec16 fused_v4(vec16 a, vec16 b, vec16 c) {
    return (vec16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE_V4 float highest_v4(vec16 x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE_V4 vec16 power_of_two_v4(vec16 x) {
    const vec16 one = (vec16){0} + 1.0f;
    const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec16 r = x - (vec16)n, p = POWER_OF_TWO(n, r, fused_v4, one);
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vec16)_mm512_maskz_scalef_ps(counts, (__m512)p, n);
}
INLINE_V4 vec16 get_v4(const void *x, int64_t i, const int dtype) {
    if (dtype == FLOAT32) return (vec16)_mm512_loadu_ps((const float *)x + i);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + i));
    return (vec16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}
INLINE_V4 ints16 lower_halves_v4(ints16 words) { return (ints16)((words16)words >> 16); }
INLINE_V4 void put_weights_v4(char *to, vec16 weights) { memcpy(to, &weights, sizeof weights); }

#define LANES(x, y, a, b, c, d) /* four numbers of each quarter */                                                    \
    __builtin_shufflevector(x, y, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a, 12 + b, \
                            12 + c, 12 + d)
#define QUARTERS(x, y, a, b, c, d)                                                                                    \
    __builtin_shufflevector(x, y, 4 * a, 4 * a + 1, 4 * a + 2, 4 * a + 3, 4 * b, 4 * b + 1, 4 * b + 2, 4 * b + 3,     \
                            4 * c, 4 * c + 1, 4 * c + 2, 4 * c + 3, 4 * d, 4 * d + 1, 4 * d + 2, 4 * d + 3)

/* rows[i][j] goes to word i of line 2j. */
INLINE_V4 void write_transposed_v4(const words16 *rows, char *to) {
    words16 fours[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const words16 a = LANES(rows[i], rows[i + 1], 0, 16, 1, 17), b = LANES(rows[i + 2], rows[i + 3], 0, 16, 1, 17);
        const words16 c = LANES(rows[i], rows[i + 1], 2, 18, 3, 19), d = LANES(rows[i + 2], rows[i + 3], 2, 18, 3, 19);
        fours[i] = LANES(a, b, 0, 1, 16, 17), fours[i + 1] = LANES(a, b, 2, 3, 18, 19);
        fours[i + 2] = LANES(c, d, 0, 1, 16, 17), fours[i + 3] = LANES(c, d, 2, 3, 18, 19);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const words16 a = QUARTERS(fours[i], fours[i + 4], 0, 1, 4, 5), b = QUARTERS(fours[i], fours[i + 4], 2, 3, 6, 7);
        const words16 c = QUARTERS(fours[i + 8], fours[i + 12], 0, 1, 4, 5);
        const words16 d = QUARTERS(fours[i + 8], fours[i + 12], 2, 3, 6, 7);
        const words16 columns[4] = {QUARTERS(a, c, 0, 2, 4, 6), QUARTERS(a, c, 1, 3, 5, 7), QUARTERS(b, d, 0, 2, 4, 6),
                                    QUARTERS(b, d, 1, 3, 5, 7)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) memcpy(to + (j * 4 + i) * 128, &columns[j], sizeof columns[j]);
    }
}
#include "lanes.h"
#include "prompt_rows.h"

#undef ISA
#undef FOR_ISA
#undef IS_PAIRED
#define ISA V4_DOT
#define FOR_ISA(name) name##_dot
#define IS_PAIRED 1
typedef vec16 vector_dot;
typedef ints16 wholes_dot;
#define larger_dot larger_v4
#define highest_dot highest_v4
#define fused_dot fused_v4
#define power_of_two_dot power_of_two_v4
#define get_dot get_v4
#define lower_halves_dot lower_halves_v4
#define write_transposed_dot write_transposed_v4
static inline __attribute__((always_inline, target(V4_DOT))) void put_weights_dot(char *to, vec16 weights) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)weights);
    memcpy(to, &rounded, sizeof rounded);
}
#include "lanes.h"
#include "prompt_rows.h"

/* The pieces of a call. */
typedef struct {
    int64_t most, total; /* queries of a piece at most; pieces */
} pieces;

/* The i-th: those of a run's last queries first, since they see most. */
static piece piece_at(const prompts *a, pieces p, int64_t i) {
    int64_t run = 0;
    division by = divide(a->counts[0], p.most);
    while (i >= by.tiles * a->kv_heads) {
        i -= by.tiles * a->kv_heads;
        by = divide(a->counts[++run], p.most);
    }
    const int64_t own = by.tiles - 1 - i / a->kv_heads, first = first_row(by, own);
    return (piece){run, i % a->kv_heads, first, first_row(by, own + 1) - first};
}

/* Bytes of scratch for each thread. */
int64_t pdkv_prompt_room_bytes(void) { return sizeof(room); }

void pdkv_attend_prompts(const prompts *a) {
    pieces p = {PIECE_ROWS / group_of(a), 0};
    double products = 0.0;
    for (int64_t run = 0; run < a->n; run++) {
        p.total += divide(a->counts[run], p.most).tiles * a->kv_heads;
        products += (double)a->counts[run] * (double)(a->positions[run] + a->counts[run]);
    }
    const int is_small = products * (double)(a->heads * a->head_size) < SHARED_PRODUCTS;
    const int num_threads = is_small || p.total < 2 ? 1 : (int)a->num_threads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        room *const own = (room *)a->rooms + omp_get_thread_num();
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < p.total; i++) {
            const piece of = piece_at(a, p, i);
            if (a->dtype == BFLOAT16 && a->level == AVX512_BF16)
                attend_any_piece_dot(a, &of, own);
            else if (a->level >= AVX512)
                attend_any_piece_v4(a, &of, own);
            else
                attend_any_piece_v3(a, &of, own);
        }
    }
}
#endif
