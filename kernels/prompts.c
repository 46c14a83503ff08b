/* Causal attention of prompts over paged KV, called through ctypes (kernels/prompts.py), which releases the GIL meanwhile.
 *
 * A piece is some of a prompt's queries and the heads that share a KV head. It takes 128 keys at a time, packed as
 * linear.c's kernels read weights: those multiply queries by keys, and weights by values. A query's sums are made tile by
 * tile of keys, the first of which is key 0's, each a chain in the order of the keys: its bits depend on what it sees
 * alone, not on the queries beside it, on where a prompt is cut, or on threads.
 */
#include <float.h>
#include <math.h>
#include <omp.h>

#include "lanes.h"
#include "tiles.h"

#define KEYS 128       /* of a tile */
#define PIECE_ROWS 252 /* queries' heads of a piece: so that packing keys costs little beside their products */
#define MAX_TILES 64
#define MAX_HEAD_SIZE 576 /* latent rows */
#define SHARED_PRODUCTS (1 << 20) /* multiplications from which a second thread gains more than its waking costs */

/* One layer of a step: runs of queries at adjacent positions, in adjacent rows. Strides count elements. */
typedef struct {
    const void *keys;             /* the layer's K in block 0; (kv_heads, block_size, head_size) in each block */
    const void *values;           /* the layer's V in block 0 */
    const void *qkv;              /* (rows, row_stride): heads, kv_heads, kv_heads vecs of head_size */
    void *out;                    /* (rows, heads * head_size) */
    const int64_t *q_rows;        /* (n,) row of each run's first query in qkv */
    const int64_t *out_rows;      /* (n,) row of its result in out */
    const int64_t *positions;     /* (n,) its position: it sees the keys up to there */
    const int64_t *counts;        /* (n,) queries of each run */
    const int64_t *tables;        /* (n,) where each run's block table begins in block_tables */
    const int64_t *block_tables;
    int64_t n, heads, kv_heads, head_size, block_size, block_stride, row_stride;
    int64_t window;               /* how many keys a query sees, its own included; 0: all up to its own */
    int64_t dtype, num_threads;
    char *rooms;                  /* for each thread, as many bytes as pdkv_prompt_room_bytes says; aligned to 64 */
    double scale;
    double softcap;               /* c: scores x become c * tanh(x / c); 0: they stay */
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

/* What each width does in its own way, with the same bits: `larger` is b where one is NaN; `power_of_two` is 2^x for x near
 * 0 or below, with a relative error below 2e-7 (`part_of_power` that of what is left of a whole number), and 0 below -126. */
INLINE vec part_of_power(vec r) {
    const vec one = all_of(1.0f);
    return fused(fused(fused(fused(fused(one * 1.326472404e-3f, r, one * 9.671512866e-3f), r, one * 5.550733754e-2f), r,
                             one * 2.402224208e-1f), r, one * 6.931469776e-1f), r, one);
}

#if WIDTH == 16
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float highest(vec x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE vec power_of_two(vec x) {
    const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(counts, (__m512)part_of_power(x - (vec)n), n);
}
#else
INLINE vec larger(vec a, vec b) {
#if WIDTH == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return where(a > b, a, b);
#endif
}
INLINE float highest(vec x) {
    float most = x[0];
    for (int i = 1; i < WIDTH; i++) most = x[i] > most ? x[i] : most;
    return most;
}
INLINE vec power_of_two(vec x) {
#if WIDTH == 8
    const vec n = (vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vec most = where(x > -1e6f, x, all_of(-1e6f)), n = (most + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23 */
#endif
    const vec power = (vec)((__builtin_convertvector(n, ints) + 127) << 23);
    return where(x < -126.0f, (vec){0}, part_of_power(x - n) * power);
}
#endif

#if HAS_DOT
INLINE void put_pairs(char *to, vec weights) {
    const __m256bh pairs = _mm512_cvtneps_pbh((__m512)weights);
    memcpy(to, &pairs, sizeof pairs);
}
#else
INLINE void put_pairs(char *to, vec weights) { (void)to, (void)weights; }
#endif

/* rows[i][j] goes to word i of line 2j. */
#if WIDTH == 16
#define LANES(x, y, a, b, c, d) /* four numbers of each quarter */                                                    \
    __builtin_shufflevector(x, y, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a, 12 + b, \
                            12 + c, 12 + d)
#define QUARTERS(x, y, a, b, c, d)                                                                                    \
    __builtin_shufflevector(x, y, 4 * a, 4 * a + 1, 4 * a + 2, 4 * a + 3, 4 * b, 4 * b + 1, 4 * b + 2, 4 * b + 3,     \
                            4 * c, 4 * c + 1, 4 * c + 2, 4 * c + 3, 4 * d, 4 * d + 1, 4 * d + 2, 4 * d + 3)

INLINE void write_transposed(const words *rows, char *to) {
    words fours[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const words a = LANES(rows[i], rows[i + 1], 0, 16, 1, 17), b = LANES(rows[i + 2], rows[i + 3], 0, 16, 1, 17);
        const words c = LANES(rows[i], rows[i + 1], 2, 18, 3, 19), d = LANES(rows[i + 2], rows[i + 3], 2, 18, 3, 19);
        fours[i] = LANES(a, b, 0, 1, 16, 17), fours[i + 1] = LANES(a, b, 2, 3, 18, 19);
        fours[i + 2] = LANES(c, d, 0, 1, 16, 17), fours[i + 3] = LANES(c, d, 2, 3, 18, 19);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const words a = QUARTERS(fours[i], fours[i + 4], 0, 1, 4, 5), b = QUARTERS(fours[i], fours[i + 4], 2, 3, 6, 7);
        const words c = QUARTERS(fours[i + 8], fours[i + 12], 0, 1, 4, 5);
        const words d = QUARTERS(fours[i + 8], fours[i + 12], 2, 3, 6, 7);
        const words columns[4] = {QUARTERS(a, c, 0, 2, 4, 6), QUARTERS(a, c, 1, 3, 5, 7), QUARTERS(b, d, 0, 2, 4, 6),
                                    QUARTERS(b, d, 1, 3, 5, 7)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) memcpy(to + (j * 4 + i) * 128, &columns[j], sizeof columns[j]);
    }
}
#else
INLINE void write_transposed(const words *rows, char *to) { /* a row is 16 words all the same */
    const char *const from = (const char *)rows;
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) memcpy(to + j * 128 + i * 4, from + i * 64 + j * 4, 4);
}
#endif

/* Where bfloat16 is multiplied in pairs it stays what it is; else it is widened. */
#define PER_WORD (HAS_DOT && dtype == BFLOAT16 ? 2 : 1) /* numbers in 4 bytes */
#define CHUNK_KEYS (16 * PER_WORD)                      /* of values */
#define VALUE_CHUNKS (KEYS / CHUNK_KEYS)                /* of a tile */

/* 16 words from the i-th of a head's on: floats, or pairs of bfloat16 as they are; zeros behind its end. */
INLINE void read_words(const prompts *a, char *to, const char *from, int64_t i, const int dtype) {
    const int64_t count = a->head_size / PER_WORD - i;
    const int as = PER_WORD == 2 ? FLOAT32 : dtype; /* a pair is as long as a float */
    UNROLL for (int u = 0; u < 16; u += WIDTH)
        store(to, u, WIDTH, count >= 16 ? load(from, i + u, WIDTH, as) : load(from, i + u, count - u, as), FLOAT32);
}

/* Keys [from, to) of the tile, with zeros for those beside them up to multiples of 16: panels of 32 keys, of chunks of 16
 * words. */
INLINE void pack_keys(const prompts *a, const int64_t *places, int64_t from, int64_t to, char *packed,
                                   const int dtype) {
    const int64_t chunks = query_chunks(a, PER_WORD);
    for (int64_t key = from / 16 * 16; key < to; key += 16) {
        char *const panel = packed + key / COLUMNS * chunks * CHUNK_BYTES + key % COLUMNS * 4;
        for (int64_t c = 0; c < chunks; c++) {
            char rows[16 * 64] __attribute__((aligned(64)));
            for (int64_t i = 0; i < 16; i++) {
                if (key + i < from || key + i >= to) {
                    memset(rows + i * 64, 0, 64);
                    continue;
                }
                const char *const own = (const char *)a->keys + bytes_of(places[key + i], dtype);
                read_words(a, rows + i * 64, own, c * 16, dtype);
            }
            write_transposed((const words *)rows, panel + c * CHUNK_BYTES);
        }
    }
}

/* Values [from, to) of the tile, with zeros for the others up to `stop`, a multiple of 32: panels of 32 of a head's
 * numbers, of chunks of 16 keys, or of 16 pairs. Whether all of them are finite. */
INLINE int pack_values(const prompts *a, const int64_t *places, int64_t from, int64_t to, int64_t stop,
                                    char *packed, const int dtype) {
    vec bad = {0};
    for (int64_t step = 0; step < stop / PER_WORD; step++)
        for (int64_t d = 0; d < a->head_size; d += WIDTH) {
            words packed_words = {0};
            for (int64_t i = 0; i < PER_WORD; i++) {
                const int64_t key = step * PER_WORD + i;
                if (key < from || key >= to) continue;
                const vec numbers = load(a->values, places[key] + d, WIDTH, dtype);
                bad += numbers - numbers; /* 0, or NaN */
                packed_words |= i + 1 < PER_WORD ? (words)numbers >> 16 : (words)numbers;
            }
            char *const panel = packed + d / COLUMNS * VALUE_CHUNKS * CHUNK_BYTES + d % COLUMNS * 4;
            memcpy(panel + step * 128, &packed_words, sizeof packed_words);
        }
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) sum += bad[i];
    return sum == 0.0f;
}

/* Some rows' queries, chunk by chunk. */
INLINE void lay_out_queries(const prompts *a, const piece *of, const some_rows *s, const int dtype) {
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t at = (a->q_rows[of->run] + query_of(a, of, s, r)) * a->row_stride + head_of(a, of, s, r) * a->head_size;
        for (int64_t c = 0; c < query_chunks(a, PER_WORD); c++) {
            char *const to = s->queries + (c * s->rows + r) * 64;
            read_words(a, to, (const char *)a->qkv + bytes_of(at, dtype), c * 16, dtype);
        }
    }
}

/* The highest of one row's scores [from, to), not below `top`; the others become -inf. NaN is none. */
INLINE float top_of(float *scores, int64_t rows, int64_t panels, int64_t from, int64_t to, float top) {
    vec most = all_of(top);
    for (int64_t i = 0; i < panels * COLUMNS; i += WIDTH) {
        vec numbers;
        float *const own = scores + i / COLUMNS * rows * COLUMNS + i % COLUMNS;
        memcpy(&numbers, own, sizeof numbers);
        if (i < from || i + WIDTH > to) {
            ints key;
            for (int l = 0; l < WIDTH; l++) key[l] = (int)i + l;
            const ints seen = (key >= (int)from) & (key < (int)to);
            numbers = (vec)(((ints)numbers & seen) | ((ints)all_of(-INFINITY) & ~seen));
            memcpy(own, &numbers, sizeof numbers);
        }
        most = larger(numbers, most);
    }
    return highest(most);
}

/* One row's weights, 2^(score * scale - top), in chunks of 64 bytes for each row. They are added to its 16 totals, lane by
 * lane, which are multiplied by `earlier` first. */
INLINE void weigh(const float *scores, int64_t rows, int64_t panels, float scale, float top, float earlier,
                               float *totals, char *weights, const int dtype) {
    vec sums[16 / WIDTH] = {{0}};
    for (int64_t p = 0; p < panels; p++)
        for (int i = 0; i < COLUMNS; i += WIDTH) {
            vec numbers;
            memcpy(&numbers, scores + p * rows * COLUMNS + i, sizeof numbers);
            const vec weight = power_of_two(fused(numbers, all_of(scale), all_of(-top)));
            sums[i % 16 / WIDTH] += weight;
            const int64_t key = p * COLUMNS + i;
            char *const to = weights + key / CHUNK_KEYS * rows * 64 + key % CHUNK_KEYS * (4 / PER_WORD);
            if (PER_WORD == 2)
                put_pairs(to, weight);
            else
                memcpy(to, &weight, sizeof weight);
        }
    for (int l = 0; l < 16; l += WIDTH) {
        vec total;
        memcpy(&total, totals + l, sizeof total);
        total = total * earlier + sums[l / WIDTH];
        memcpy(totals + l, &total, sizeof total);
    }
}

/* Weights of some rows' scores; what was summed up before is multiplied by what it weighs now. Whether all rows see all
 * keys of these panels. */
INLINE int weigh_rows(const prompts *a, const piece *of, some_rows *s, const keys_tile *t,
                                   const int64_t panels, const int dtype) {
    float before[16], earlier[16] = {0};
    int see_all = 1;
    memcpy(before, s->tops, sizeof before);
    for (int64_t r = 0; r < s->rows; r++) {
        const keys_seen seen = keys_of(a, of, s, t, r);
        see_all &= seen.from == 0 && seen.to == panels * COLUMNS;
        s->tops[r] = top_of(t->scores + r * COLUMNS, s->rows, panels, seen.from, seen.to, before[r]);
    }
    for (int l = 0; l < 16; l += WIDTH) {
        vec then, now;
        memcpy(&then, before + l, sizeof then), memcpy(&now, s->tops + l, sizeof now);
        now = power_of_two((then - now) * t->scale);
        memcpy(earlier + l, &now, sizeof now);
    }
    for (int64_t r = 0; r < s->rows; r++) {
        const float top = s->tops[r] * t->scale;
        weigh(t->scores + r * COLUMNS, s->rows, panels, t->scale, top < -FLT_MAX ? -FLT_MAX : top, earlier[r],
                       s->totals + r * 16, t->weights + r * 64, dtype);
        if (!s->has_begun || earlier[r] == 1.0f) continue;
        for (int64_t d = 0; d < a->head_size; d += WIDTH) {
            float *const own = s->sums + (d / COLUMNS * s->rows + r) * COLUMNS + d % COLUMNS;
            vec sums;
            memcpy(&sums, own, sizeof sums);
            sums *= earlier[r];
            memcpy(own, &sums, sizeof sums);
        }
    }
    return see_all;
}

/* Add weighed values, of panels of 32 keys, to sums of `rows` rows, which are among `stride`. */
INLINE void add_values(const prompts *a, const some_rows *s, const char *values, const char *weights,
                                    float *sums, int64_t rows, int64_t panels, run_tile *run, const int dtype) {
    for (int64_t p = 0; p * COLUMNS < a->head_size; p++) {
        const tile product = {.weights = values + p * VALUE_CHUNKS * CHUNK_BYTES, .x = weights,
                              .sums = sums + p * s->rows * COLUMNS, .chunks = panels * COLUMNS / CHUNK_KEYS,
                              .is_first = !s->has_begun};
        run(&product, (int)rows);
    }
}

/* softcap * tanh(scores * scale / softcap) in place, where tanh(x) = (1 - e^-2x) / (1 + e^-2x) for x >= 0. */
INLINE void cap_scores(const prompts *a, float *scores, int64_t count) {
    const float cap = (float)a->softcap, factor = (float)(2.0 * a->scale / a->softcap * 1.4426950408889634);
    const vec one = all_of(1.0f);
    for (int64_t i = 0; i < count; i += WIDTH) {
        const vec x = load_float32(scores + i);
        const ints is_negative = x < (vec){0};
        const vec e = power_of_two(where(is_negative, x, -x) * factor), y = cap * ((one - e) / (one + e));
        const vec capped = where(is_negative, -y, y);
        memcpy(scores + i, &capped, sizeof capped);
    }
}

/* Some rows by one tile of keys. */
INLINE void attend_rows(const prompts *a, const piece *of, some_rows *s, const keys_tile *t, run_tile *run,
                                     const int dtype) {
    const int64_t chunks = query_chunks(a, PER_WORD), rows = s->rows, stop = keys_of(a, of, s, t, rows - 1).to;
    const int64_t panels = (stop + COLUMNS - 1) / COLUMNS;
    if (stop <= 0 || keys_of(a, of, s, t, 0).from >= KEYS) return;
    for (int64_t p = 0; p < panels; p++) {
        const tile product = {.weights = t->keys + p * chunks * CHUNK_BYTES, .x = s->queries,
                              .sums = t->scores + p * rows * COLUMNS, .chunks = chunks, .is_first = 1};
        run(&product, (int)rows);
    }
    if (a->softcap > 0.0) cap_scores(a, t->scores, panels * rows * COLUMNS);
    const int see_all = panels == KEYS / COLUMNS ? weigh_rows(a, of, s, t, KEYS / COLUMNS, dtype)
                                                 : weigh_rows(a, of, s, t, panels, dtype);
    if (see_all || t->is_finite)
        add_values(a, s, t->values, t->weights, s->sums, rows, panels, run, dtype);
    else /* a weight of 0 does not keep out what is not finite: every row gets the values that it sees */
        for (int64_t r = 0; r < rows; r++) {
            const keys_seen seen = keys_of(a, of, s, t, r);
            pack_values(a, t->places, seen.from, seen.to, panels * COLUMNS, t->own_values, dtype);
            for (int64_t c = 0; c < VALUE_CHUNKS; c++)
                memcpy(t->own_weights + c * 64, t->weights + (c * rows + r) * 64, 64);
            add_values(a, s, t->own_values, t->own_weights, s->sums + r * COLUMNS, 1, panels, run, dtype);
        }
    s->has_begun = 1;
}

INLINE void write_rows(const prompts *a, const piece *of, const some_rows *s, const int dtype) {
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t query = a->out_rows[of->run] + query_of(a, of, s, r);
        const int64_t at = (query * a->heads + head_of(a, of, s, r)) * a->head_size;
        float lanes[16];
        memcpy(lanes, s->totals + r * 16, sizeof lanes);
        const float total = sum_of(lanes);
        for (int64_t d = 0; d < a->head_size; d += WIDTH) {
            const vec sums = load(s->sums, (d / COLUMNS * s->rows + r) * COLUMNS + d % COLUMNS, WIDTH, FLOAT32);
            store(a->out, at + d, WIDTH, sums / total, dtype);
        }
    }
}

/* A piece's queries by all keys that they see. */
INLINE void attend_piece(const prompts *a, const piece *of, room *room, const int dtype) {
    run_tile *const run = tile_kernel(HAS_DOT && dtype == BFLOAT16);
    const division by = divide(of->count * group_of(a), MAX_ROWS);
    const int64_t chunks = query_chunks(a, PER_WORD), width = (a->head_size + COLUMNS - 1) / COLUMNS * COLUMNS;
    some_rows all[MAX_TILES];
    for (int64_t i = 0; i < by.tiles; i++) {
        const int64_t row = first_row(by, i), rows = first_row(by, i + 1) - row;
        all[i] = (some_rows){.row = row, .rows = rows, .queries = room->queries + row * chunks * 64,
                             .sums = room->sums + row * width, .totals = room->totals + row * 16};
        lay_out_queries(a, of, &all[i], dtype);
        for (int r = 0; r < 16; r++) all[i].tops[r] = -FLT_MAX;
        memset(all[i].totals, 0, (size_t)rows * 16 * sizeof(float));
    }
    const int64_t earliest = a->positions[of->run] + of->first, stop = earliest + of->count;
    const int64_t begin = a->window && earliest + 1 > a->window ? earliest + 1 - a->window : 0;
    for (int64_t first = begin / KEYS * KEYS; first < stop; first += KEYS) {
        const int64_t from = begin > first ? begin - first : 0, to = stop - first < KEYS ? stop - first : KEYS;
        if (first <= begin) find_places(a, of, first, from, to, room->places);
        pack_keys(a, room->places, from, to, room->keys, dtype);
        const int64_t padded = (to + COLUMNS - 1) / COLUMNS * COLUMNS;
        const int is_finite = pack_values(a, room->places, from, to, padded, room->values, dtype);
        const double scale = a->softcap > 0.0 ? 1.0 : a->scale; /* capped scores are scaled already */
        const keys_tile t = {first, is_finite, (float)(scale * 1.4426950408889634), room->places, room->keys,
                             room->values, room->own_values, room->weights, room->own_weights, room->scores};
        const int64_t rest = stop - first - KEYS, count = rest < 0 ? 0 : rest < KEYS ? rest : KEYS;
        find_places(a, of, first + KEYS, 0, count, room->next_places);
        for (int64_t i = 0; i < by.tiles; i++) {
            fetch(a, room->next_places, i * count / by.tiles, (i + 1) * count / by.tiles, dtype);
            attend_rows(a, of, &all[i], &t, run, dtype);
        }
        memcpy(room->places, room->next_places, sizeof room->places);
    }
    for (int64_t i = 0; i < by.tiles; i++) write_rows(a, of, &all[i], dtype);
}

static void attend_any_piece(const prompts *a, const piece *of, room *room) {
    if (a->dtype == BFLOAT16)
        attend_piece(a, of, room, BFLOAT16);
    else
        attend_piece(a, of, room, FLOAT32);
}

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
            attend_any_piece(a, &of, own);
        }
    }
}
