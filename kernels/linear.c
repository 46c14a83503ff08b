/* Linear layers over packed weights, called through ctypes (kernels/linear.py), which releases the GIL meanwhile.
 *
 * Weights lie in panels of 32 outputs, each in chunks of 2 KiB: 16 inputs of float32, 32 of bfloat16 in pairs, or 64 of 8
 * bits. A step of a tile multiplies inputs by two lines of weights. Those of 8 bits are widened in registers; their sums
 * are multiplied by a scale for each output, or by one for each output and group of inputs. Every output is one chain of additions in the order
 * of the inputs, from a single accumulator: its bits depend neither on the rows beside it nor on tiles, blocks and
 * threads, and widened bfloat16 weights give the bits that the same numbers in float32 give, at every level that can round a
 * product and a sum once.
 */
#include "passes.h"
#include "tiles.h"

#define BLOCK_CHUNKS 4   /* that several tiles read one after another: they stay in the first cache */
#define MANY_TILES 5     /* from there on twice as many: arithmetic decides, and sums are read and written less often */
#define AHEAD_CHUNKS 4   /* how far ahead of a single tile weights are fetched */
#define SHARED_AHEAD 8   /* and of several */
#define MOST_BY_TABLE 10 /* rows whose sums leave registers for a table of FP8 */
#define LINE_BYTES (CHUNK_BYTES / COLUMNS) /* of a row in a chunk */
#define PACKED_CHUNKS 16 /* laid out at once: a KiB of each row */
#define PAIRED_ROWS 6    /* of a tile of two panels */
#define BLOCK_ROWS 126   /* whose sums a thread keeps: with their inputs, they stay in the second cache */

enum { INT8 = 3, FP8 }; /* e4m3fn without NaN */

/* A layer. */
typedef struct {
    const void *weights;   /* panels, as above */
    const float *bias;     /* (outputs,) or NULL */
    int64_t inputs, outputs;
    int64_t dtype;         /* of inputs and outputs: FLOAT32 or BFLOAT16 */
    int64_t weights_dtype; /* FLOAT32, for inputs of float32, or BFLOAT16, INT8, FP8 */
    const float *scales;   /* of 8 bits: (panels, groups, 32) */
    int64_t group_chunks;  /* of 8 bits: chunks of a group of inputs; 0: all are one */
} layer;

/* A call of one. Strides count elements. */
typedef struct {
    const layer *of;
    const void *x;        /* (rows, inputs); GATED: (rows, 2 * inputs), gates and then what they gate */
    const void *residual; /* (rows, outputs) to be added, or NULL */
    void *out;            /* (rows, outputs) */
    char *scratch;        /* for each row, up to BLOCK_ROWS of them, as many bytes as pdkv_linear_row_bytes says */
    int64_t rows, x_stride, residual_stride;
    row_pass before;      /* that x goes through */
    const int64_t *x_rows; /* (rows,) of x, or NULL: as they lie */
} linear;

#define EACH_ROW UNROLL for (int r = 0; r < R; r++)
#define EACH_VECTOR UNROLL for (int c = 0; c < C; c++)

/* How many vectors of a panel go at once with so many rows: as many as sums have room for in registers. */
#define MOST_VECTORS (COLUMNS / WIDTH)
#define MOST_SUMS (2 * MOST_VECTORS) /* of a row by a pair of panels */
#define VECTORS(R) ((R) * MOST_VECTORS <= MAX_SUMS ? MOST_VECTORS : (R) * MOST_VECTORS <= 2 * MAX_SUMS ? MOST_VECTORS / 2 : MOST_VECTORS / 4)

/* Up to MAX_ROWS rows by 32 columns, or PAIRED_ROWS by those of two panels. STEP(k) multiplies step k's weights by each
 * row's inputs. TOGETHER steps are written out; they fetch without conditions, some lines beyond the share of a tile,
 * which lies together. */
#define DEFINE_TILE(NAME, X_BYTES, HAS_SCALES, HAS_PAIRS, TOGETHER, STEP)                                             \
    INLINE void NAME##_part(const tile *t, const int R, const int C, const int from, const char *fetch) {             \
        vec sums[MAX_ROWS][MOST_SUMS];                                                                                \
        const char *weights = t->weights, *x = t->x, *ahead = fetch ? fetch : weights;                                \
        const int64_t apart = fetch ? TOGETHER * 128 >> t->share : 0;                                                 \
        const int64_t next = C > MOST_VECTORS ? t->next : 0;                                                          \
        const float *const scales = HAS_SCALES ? t->scales : NULL;                                                    \
        EACH_ROW EACH_VECTOR sums[r][c] =                                                                             \
            t->is_first || scales ? (vec){0} : load_float32(SUMS_AT(t->sums));                                        \
        for (int64_t chunk = 0; chunk < t->chunks; chunk++) {                                                         \
            for (int of = 0; of < 16; of += TOGETHER, ahead += apart) {                                               \
                UNROLL for (int k = of; k < of + TOGETHER; k++) {                                                     \
                    __builtin_prefetch(ahead + (k - of) * 64, 0, 3);                                                  \
                    if (C > MOST_VECTORS) __builtin_prefetch(ahead + next + (k - of) * 64, 0, 3);                     \
                    STEP(k)                                                                                           \
                    if (TOGETHER > 1) __asm__ volatile("" ::: "memory"); /* weights loaded early take registers of sums */\
                }                                                                                                     \
                if (apart == TOGETHER * 128)                                                                          \
                    UNROLL for (int i = TOGETHER; i < 2 * TOGETHER; i++) __builtin_prefetch(ahead + i * 64, 0, 3);    \
            }                                                                                                         \
            weights += CHUNK_BYTES, x += R * X_BYTES;                                                                 \
        }                                                                                                             \
        EACH_ROW EACH_VECTOR {                                                                                        \
            float *const to = SUMS_AT(t->sums);                                                                       \
            if (scales)                                                                                               \
                sums[r][c] = fused(sums[r][c], load_float32(scales + from + c * WIDTH),                               \
                                   t->is_first ? (vec){0} : load_float32(to));                                        \
            memcpy(to, &sums[r][c], sizeof(vec));                                                                     \
        }                                                                                                             \
    }                                                                                                                 \
    INLINE void NAME##_of(const tile *t, const int R, const int C) {                                                  \
        NAME##_part(t, R, C, 0, t->fetch);                                                                            \
        if (C < MOST_VECTORS) NAME##_part(t, R, C, C * WIDTH, NULL);                                                  \
        if (C < MOST_VECTORS / 2)                                                                                     \
            NAME##_part(t, R, C, 2 * C * WIDTH, NULL), NAME##_part(t, R, C, 3 * C * WIDTH, NULL);                     \
    }                                                                                                                 \
    static void NAME(const tile *t, int rows) {                                                                       \
        if (HAS_PAIRS && t->next) {                                                                                   \
            EACH_PAIRED(NAME)                                                                                         \
        }                                                                                                             \
        switch (rows) {                                                                                               \
        case 1: NAME##_of(t, 1, VECTORS(1)); break;                                                                   \
        case 2: NAME##_of(t, 2, VECTORS(2)); break;                                                                   \
        case 3: NAME##_of(t, 3, VECTORS(3)); break;                                                                   \
        case 4: NAME##_of(t, 4, VECTORS(4)); break;                                                                   \
        case 5: NAME##_of(t, 5, VECTORS(5)); break;                                                                   \
        EACH_LARGER(NAME)                                                                                             \
        default: NAME##_of(t, MAX_ROWS, VECTORS(MAX_ROWS)); break;                                                    \
        }                                                                                                             \
    }
#define SUMS_AT(of) (of) + (c / MOST_VECTORS * BLOCK_ROWS + r) * COLUMNS + from + c % MOST_VECTORS * WIDTH
#if MAX_ROWS == 14
#define EACH_PAIRED(NAME)                                                                                             \
        switch (rows) {                                                                                               \
        case 1: NAME##_part(t, 1, MOST_SUMS, 0, t->fetch); return;                                                    \
        case 2: NAME##_part(t, 2, MOST_SUMS, 0, t->fetch); return;                                                    \
        case 3: NAME##_part(t, 3, MOST_SUMS, 0, t->fetch); return;                                                    \
        case 4: NAME##_part(t, 4, MOST_SUMS, 0, t->fetch); return;                                                    \
        case 5: NAME##_part(t, 5, MOST_SUMS, 0, t->fetch); return;                                                    \
        default: NAME##_part(t, PAIRED_ROWS, MOST_SUMS, 0, t->fetch); return;                                         \
        }
#define EACH_LARGER(NAME)                                                                                             \
        case 6: NAME##_of(t, 6, VECTORS(6)); break;                                                                   \
        case 7: NAME##_of(t, 7, VECTORS(7)); break;                                                                   \
        case 8: NAME##_of(t, 8, VECTORS(8)); break;                                                                   \
        case 9: NAME##_of(t, 9, VECTORS(9)); break;                                                                   \
        case 10: NAME##_of(t, 10, VECTORS(10)); break;                                                                \
        case 11: NAME##_of(t, 11, VECTORS(11)); break;                                                                \
        case 12: NAME##_of(t, 12, VECTORS(12)); break;                                                                \
        case 13: NAME##_of(t, 13, VECTORS(13)); break;
#else
#define EACH_PAIRED(NAME)
#define EACH_LARGER(NAME)
#endif

static const words UPPER = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
#if WIDTH > 4
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
#endif
#if WIDTH > 8
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
#endif
};

#define STEP_OF(input, WEIGHTS, bytes)                                                                                \
    {                                                                                                                 \
        vec w[MOST_SUMS];                                                                                             \
        EACH_VECTOR w[c] = WEIGHTS(own + c % MOST_VECTORS * WIDTH * (bytes) + c / MOST_VECTORS * next);               \
        EACH_ROW {                                                                                                    \
            const vec number = all_of(((const float *)x)[input]);                                                     \
            EACH_VECTOR sums[r][c] = fused(number, w[c], sums[r][c]);                                                 \
        }                                                                                                             \
    }
#define AS_FLOATS(from) load_float32((const float *)(from))
#define EVEN(from) (vec)((words)AS_FLOATS(from) << 16)
#define ODD(from) (vec)((words)AS_FLOATS(from) & *(const volatile words *)&UPPER) /* of memory: no register is left */
#define OWN(k) const char *own = weights + (k) * 128 + from * 4;
#define STEP_FLOAT32(k) OWN(k) STEP_OF(r * 16 + k, AS_FLOATS, 4)
#define STEP_WIDE(k) /* weights are loaded twice: kept, they would take registers of sums */                          \
    OWN(k) STEP_OF(r * 32 + 2 * k, EVEN, 4)                                                                           \
    __asm__("" : "+r"(own));                                                                                          \
    STEP_OF(r * 32 + 2 * k + 1, ODD, 4)

DEFINE_TILE(float32, 64, 0, 1, 4, STEP_FLOAT32)
DEFINE_TILE(wide, 128, 0, 1, 2, STEP_WIDE)

/* 8 bits of one input for WIDTH outputs, as floats. An FP8 is a half of the same digits with an exponent 8 less, which
 * the scales make up for. */
#define OF_8_BITS(k, i) weights + (k) * 128 + (i) * 32 + from
INLINE vec floats_of_int8(const char *from) {
#if WIDTH == 16 /* by hand: GCC 12 would widen number by number */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif WIDTH == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    vec numbers;
    for (int i = 0; i < WIDTH; i++) numbers[i] = ((const int8_t *)from)[i];
    return numbers;
#endif
}
INLINE vec floats_of_fp8(const char *from) {
    halves numbers;
#if WIDTH == 16
    numbers = (halves)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#elif WIDTH == 8
    numbers = (halves)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from));
#else
    for (int i = 0; i < WIDTH; i++) numbers[i] = (uint16_t)((const int8_t *)from)[i];
#endif
    return floats_of_halves((numbers << 7) & 0xbfff);
}
#define STEP_OF_8_BITS(k, FLOATS)                                                                                     \
    UNROLL for (int i = 0; i < 4; i++) {                                                                              \
        const char *const own = OF_8_BITS(k, i);                                                                      \
        STEP_OF(r * 64 + 4 * k + i, FLOATS, 1)                                                                        \
    }
#define STEP_INT8(k) STEP_OF_8_BITS(k, floats_of_int8)
#define STEP_FP8(k) STEP_OF_8_BITS(k, floats_of_fp8)
DEFINE_TILE(int8, 256, 1, 0, 1, STEP_INT8)
DEFINE_TILE(fp8, 256, 1, 0, 1, STEP_FP8)

#if HAS_DOT
#define DOT(input, weights) /* each row's pair of inputs by pairs of weights */                                       \
    EACH_ROW {                                                                                                        \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int *)x)[input]);                                   \
        EACH_VECTOR sums[r][c] = (vec)_mm512_dpbf16_ps((__m512)sums[r][c], pair, (__m512bh)(weights));                \
    }
#define STEP_DOT(k) OWN(k) DOT(r * 16 + k, AS_FLOATS(own + c * 64))
#define STEP_DOT_8_BITS(k, FLOATS) /* their floats are bfloat16s: the lower halves are 0 */                           \
    UNROLL for (int i = 0; i < 2; i++) {                                                                              \
        words w[MOST_VECTORS];                                                                                        \
        EACH_VECTOR w[c] = (words)FLOATS(OF_8_BITS(k, 2 * i) + c * 16) >> 16 | (words)FLOATS(OF_8_BITS(k, 2 * i + 1) + c * 16); \
        DOT(r * 32 + 2 * k + i, w[c])                                                                                 \
    }
#define STEP_DOT_INT8(k) STEP_DOT_8_BITS(k, floats_of_int8)

/* FP8 as bfloat16s, by its lower 7 bits: their two bytes. */
static struct {
    uint8_t low[128], high[128];
} fp8_bytes __attribute__((aligned(64)));

__attribute__((constructor)) static void fill_fp8(void) {
    for (int i = 0; i < 128; i++) {
        const uint16_t number = bfloat16_of(float_of((uint16_t)(i << 7)));
        fp8_bytes.low[i] = (uint8_t)number, fp8_bytes.high[i] = (uint8_t)(number >> 8);
    }
}

/* Two inputs' weights for 32 outputs, put in an order in which two bytes for each make pairs of inputs. */
#define OF_FOUR(o) o, 32 + o, 1 + o, 33 + o, 2 + o, 34 + o, 3 + o, 35 + o
#define OF_LANE(o) OF_FOUR(o), OF_FOUR(16 + o)
static const uint8_t PAIRS[64] __attribute__((aligned(64))) = {OF_LANE(0), OF_LANE(4), OF_LANE(8), OF_LANE(12)};
INLINE void pairs_of_fp8(const char *from, __m512i *to) {
    const __m512i *const low = (const __m512i *)fp8_bytes.low, *const high = (const __m512i *)fp8_bytes.high;
    const __m512i bytes = _mm512_permutexvar_epi8(*(const __m512i *)PAIRS, _mm512_loadu_si512(from));
    const __m512i lower = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], bytes, high[1]);
    const __m512i with_sign = _mm512_ternarylogic_epi32(upper, bytes, _mm512_set1_epi8((char)0x80), 0xf8); /* a | b & c */
    to[0] = _mm512_unpacklo_epi8(lower, with_sign), to[1] = _mm512_unpackhi_epi8(lower, with_sign);
}
#define STEP_DOT_FP8(k)                                                                                               \
    if (R > MOST_BY_TABLE) {                                                                                          \
        STEP_DOT_8_BITS(k, floats_of_fp8)                                                                             \
    } else                                                                                                            \
        UNROLL for (int i = 0; i < 2; i++) {                                                                          \
            __m512i w[MOST_VECTORS];                                                                                  \
            pairs_of_fp8(OF_8_BITS(k, 2 * i), w);                                                                     \
            DOT(r * 32 + 2 * k + i, w[c])                                                                             \
        }
DEFINE_TILE(dot, 64, 0, 0, 4, STEP_DOT)
DEFINE_TILE(dot_int8, 128, 1, 0, 2, STEP_DOT_INT8)
DEFINE_TILE(dot_fp8, 128, 1, 0, 1, STEP_DOT_FP8)
#else
#define dot NULL
#define dot_int8 NULL
#define dot_fp8 NULL
#endif

INLINE int is_dot(const layer *l) { return HAS_DOT && l->dtype == BFLOAT16; }
INLINE int64_t chunk_inputs(const layer *l) { return l->weights_dtype >= INT8 ? 64 : l->weights_dtype == BFLOAT16 ? 32 : 16; }
INLINE int64_t x_bytes(const layer *l) { return chunk_inputs(l) * (is_dot(l) ? 2 : 4); } /* of a chunk */
INLINE int64_t num_chunks(const layer *l) { return (l->inputs + chunk_inputs(l) - 1) / chunk_inputs(l); }
INLINE int64_t num_panels(const layer *l) { return (l->outputs + COLUMNS - 1) / COLUMNS; }

/* Whether the rows can be read where they lie: a tile of one row is laid out as the row itself. */
INLINE int in_place(const linear *a) {
    return a->rows == 1 && a->before.what == AS_THEY_ARE && a->of->inputs % chunk_inputs(a->of) == 0 && (a->of->dtype == FLOAT32 || is_dot(a->of));
}

/* A row's chunks, `stride` bytes apart: widened where they must be, with zeros behind the last input. */
INLINE void lay_out_chunks(const char *x, char *to, int64_t inputs, int64_t stride, const int64_t chunk, const int64_t bytes,
                           const int widens) {
    const int64_t input_bytes = widens ? 2 : bytes / chunk;
    int64_t from = 0;
    for (; from + chunk <= inputs; from += chunk, to += stride, x += chunk * input_bytes)
        if (widens)
            for (int64_t i = 0; i < chunk; i += WIDTH) {
                const vec numbers = load_bfloat16((const uint16_t *)x + i);
                memcpy(to + i * 4, &numbers, sizeof numbers);
            }
        else
            memcpy(to, x, (size_t)bytes);
    if (from == inputs) return;
    memset(to, 0, (size_t)bytes);
    if (widens)
        for (int64_t i = 0; i < inputs - from; i++) ((float *)to)[i] = float_of_bfloat16(((const uint16_t *)x)[i]);
    else
        memcpy(to, x, (size_t)((inputs - from) * input_bytes));
}

INLINE void lay_out_any(const layer *l, const char *x, char *to, int64_t stride, const int64_t chunk) {
    if (l->dtype == FLOAT32)
        lay_out_chunks(x, to, l->inputs, stride, chunk, 4 * chunk, 0);
    else if (is_dot(l))
        lay_out_chunks(x, to, l->inputs, stride, chunk, 2 * chunk, 0);
    else
        lay_out_chunks(x, to, l->inputs, stride, chunk, 4 * chunk, 1);
}

static void lay_out(const linear *a, int64_t row, char *to, int64_t stride) {
    const layer *l = a->of;
    const char *x = (const char *)a->x + (a->x_rows ? a->x_rows[row] : row) * a->x_stride * (l->dtype == FLOAT32 ? 4 : 2);
    if (a->before.what != AS_THEY_ARE)
        pass_any_row(&a->before, x, l->inputs, to, stride, chunk_inputs(l), l->dtype, is_dot(l) ? BFLOAT16 : FLOAT32);
    else if (l->weights_dtype == FLOAT32)
        lay_out_chunks(x, to, l->inputs, stride, 16, 64, 0);
    else if (l->weights_dtype == BFLOAT16)
        lay_out_any(l, x, to, stride, 32);
    else
        lay_out_any(l, x, to, stride, 64);
}

INLINE void write_columns(const linear *a, const float *sums, int64_t row, int64_t column, const int64_t count) {
    const layer *l = a->of;
    const int64_t at = row * l->outputs + column, residual_at = row * a->residual_stride + column;
    float numbers[COLUMNS];
    memcpy(numbers, sums, (size_t)count * sizeof(float));
    if (l->scales && !l->group_chunks)
        for (int64_t i = 0; i < count; i++) numbers[i] *= l->scales[column + i];
    if (l->bias)
        for (int64_t i = 0; i < count; i++) numbers[i] += l->bias[column + i];
    if (l->dtype == FLOAT32) {
        if (a->residual)
            for (int64_t i = 0; i < count; i++) numbers[i] += ((const float *)a->residual)[residual_at + i];
        memcpy((float *)a->out + at, numbers, (size_t)count * sizeof(float));
        return;
    }
    if (a->residual)
        for (int64_t i = 0; i < count; i++)
            numbers[i] += float_of_bfloat16(((const uint16_t *)a->residual)[residual_at + i]);
    for (int64_t i = 0; i < count; i++) ((uint16_t *)a->out)[at + i] = bfloat16_of(numbers[i]);
}

/* Sums of a panel's outputs, with bias and residual, rounded once. */
static void write_panel(const linear *a, const float *sums, int64_t row, int64_t rows, int64_t panel) {
    const int64_t column = panel * COLUMNS, rest = a->of->outputs - column;
    for (int64_t i = 0; i < rows; i++)
        if (rest >= COLUMNS)
            write_columns(a, sums + i * COLUMNS, row + i, column, COLUMNS);
        else
            write_columns(a, sums + i * COLUMNS, row + i, column, rest);
}

run_tile *tile_kernel(int is_bfloat16) { return is_bfloat16 ? dot : float32; }

static run_tile *kernel(const layer *l) {
    static run_tile *const kernels[][2] = {{float32, NULL}, {wide, dot}, {NULL, NULL}, {int8, dot_int8}, {fp8, dot_fp8}};
    return kernels[l->weights_dtype][is_dot(l)];
}

/* Whether tiles are of two panels. A processor with two products a cycle may load only one vector of 64 bytes a cycle, a
 * number spread over it included: 6 rows by 4 vectors take 10 loads for 24 products, 14 by 2 take 16 for 28. Weights of
 * 8 bits would be widened more often; 16 rows of float32 are bound by memory. */
INLINE int in_pairs(const layer *l, int64_t rows) {
    const int64_t single = l->weights_dtype == FLOAT32 ? 16 : MAX_ROWS;
    return WIDTH == 16 && !is_dot(l) && l->weights_dtype < INT8 && rows > single;
}

static void run_panel(const layer *l, run_tile *run, const char *x, float *sums, division by, int64_t panel,
                      int is_paired) {
    const int reads_once = by.tiles == 1 && VECTORS(by.base) == MOST_VECTORS;
    const int64_t shared = by.tiles < MANY_TILES ? BLOCK_CHUNKS : 2 * BLOCK_CHUNKS;
    const int64_t chunks = num_chunks(l), group = l->group_chunks;
    const int64_t block = group ? group : reads_once ? chunks : shared;
    const float *scales = group ? l->scales + panel * ((chunks + group - 1) / group) * COLUMNS : NULL;
    const int64_t ahead = (reads_once ? AHEAD_CHUNKS : SHARED_AHEAD) * CHUNK_BYTES;
    int64_t share = 0; /* 2^share tiles share the fetching of what comes next */
    while (2 << share <= by.tiles && share < 5) share++;
    for (int64_t chunk = 0; chunk < chunks; chunk += block)
        for (int64_t i = 0; i < by.tiles; i++) {
            const int64_t first = first_row(by, i), rows = first_row(by, i + 1) - first;
            const char *const weights = (const char *)l->weights + (panel * chunks + chunk) * CHUNK_BYTES;
            const int64_t some = chunks - chunk < block ? chunks - chunk : block;
            const int64_t is_next = is_paired && chunk + SHARED_AHEAD >= chunks; /* pair of panels */
            const int64_t far = ahead + is_next * chunks * CHUNK_BYTES;
            const tile of = {
                .weights = weights,
                .x = x + (first * chunks + rows * chunk) * x_bytes(l),
                .sums = sums + first * COLUMNS,
                .next = is_paired ? chunks * CHUNK_BYTES : 0,
                .chunks = some,
                .is_first = chunk == 0,
                .scales = scales ? scales + chunk / group * COLUMNS : NULL,
                .fetch = i >> share ? NULL : weights + far + (i * some * CHUNK_BYTES >> share),
                .share = share,
            };
            run(&of, (int)rows);
        }
}

/* The rows of a block, tile by tile, as the kernels read them; shared out among the threads of a team. */
static void lay_out_block(const linear *a, int64_t row, division by, int64_t rows) {
    const int64_t bytes = x_bytes(a->of), chunks = num_chunks(a->of);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < rows; i++) {
        const int64_t in_larger = by.extra * (by.base + 1); /* rows of the tiles that have one more */
        const int64_t j = i < in_larger ? i / (by.base + 1) : by.extra + (i - in_larger) / by.base;
        const int64_t first = first_row(by, j), size = first_row(by, j + 1) - first;
        lay_out(a, row + i, a->scratch + (first * chunks + i - first) * bytes, size * bytes);
    }
}

/* Bytes of scratch for each row. */
int64_t pdkv_linear_row_bytes(const layer *l) { return num_chunks(l) * x_bytes(l); }

void pdkv_linear(const layer *l, const void *x, int64_t x_stride, const void *residual, int64_t residual_stride,
                 void *out, int64_t rows, void *scratch, int64_t num_threads, int64_t before, const float *norm,
                 double epsilon) {
    const linear a = {l, x, residual, out, scratch, rows, x_stride, residual_stride, {before, norm, (float)epsilon}};
    const int64_t panels = num_panels(l);
    run_tile *const run = kernel(l);
    if (rows == 0) return;
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
    {
        float sums[2 * BLOCK_ROWS * COLUMNS] __attribute__((aligned(64)));
        const division blocks = divide(rows, BLOCK_ROWS); /* equal ones: a small one would read all weights for few rows */
        for (int64_t b = 0; b < blocks.tiles; b++) {
            const int64_t row = first_row(blocks, b), count = first_row(blocks, b + 1) - row;
            const int pairs = in_pairs(l, count);
            const division by = divide(count, pairs ? PAIRED_ROWS : MAX_ROWS);
            if (!in_place(&a)) {
                lay_out_block(&a, row, by, count);
#pragma omp barrier
            }
            const char *const block = in_place(&a) ? x : scratch;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; panel += 1 + pairs) {
                const int is_paired = pairs && panel + 1 < panels;
                run_panel(l, run, block, sums, by, panel, is_paired);
                write_panel(&a, sums, row, count, panel);
                if (is_paired) write_panel(&a, sums + BLOCK_ROWS * COLUMNS, row, count, panel + 1);
            }
        }
    }
}

/* Rows of one layer of a group. */
typedef struct {
    linear of;
    int64_t row, count;
    division by;
} some_rows;

/* The next rows of a group's layers, up to BLOCK_ROWS of them; `ends` (groups,) are where each layer's rows end. Rows of a
 * layer stay together where they fit: each part of them would read all of its weights. Returns how many layers' they are. */
static int64_t take_rows(const linear *all, const layer *const *layers, const int64_t *ends, int64_t groups,
                         int64_t *group, int64_t *row, some_rows *taken) {
    int64_t n = 0, rows = 0;
    for (; *group < groups && rows < BLOCK_ROWS; *group += *row == ends[*group]) {
        const int64_t rest = ends[*group] - *row, parts = (rest + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (rest == 0) continue;
        if (rest > BLOCK_ROWS - rows && rows) break;
        const int64_t count = (rest + parts - 1) / parts;
        some_rows *const own = &taken[n++];
        *own = (some_rows){*all, *row, count, divide(count, MAX_ROWS)};
        own->of.of = layers[*group];
        own->of.scratch += rows * pdkv_linear_row_bytes(layers[*group]);
        rows += count, *row += count;
    }
    return n;
}

/* Layers of equal sizes by rows of their own: those of layer i are [ends[i - 1], ends[i]) of `x_rows` and of `out`. Every
 * thread of a team calls it. */
static void multiply_group(const layer *const *layers, const int64_t *ends, int64_t groups, const void *x,
                           const int64_t *x_rows, int64_t x_stride, void *out, void *scratch, int64_t before) {
    const linear all = {layers[0], x, NULL, out, scratch, ends[groups - 1], x_stride, 0, {before, NULL, 0}, x_rows};
    const int64_t panels = num_panels(layers[0]);
    float sums[BLOCK_ROWS * COLUMNS] __attribute__((aligned(64)));
    some_rows taken[BLOCK_ROWS];
    for (int64_t group = 0, row = 0, n; (n = take_rows(&all, layers, ends, groups, &group, &row, taken)) > 0;) {
        for (int64_t i = 0; i < n; i++) lay_out_block(&taken[i].of, taken[i].row, taken[i].by, taken[i].count);
#pragma omp barrier
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < n * panels; i++) {
            const some_rows *const own = &taken[i / panels];
            run_panel(own->of.of, kernel(own->of.of), own->of.scratch, sums, own->by, i % panels, 0);
            write_panel(&own->of, sums, own->row, own->count, i % panels);
        }
    }
}

/* Rows that go through a few of the experts each. Experts are of equal sizes, and all arrays contiguous. */
typedef struct {
    const layer *const *gate_up, *const *down; /* (experts,) */
    const void *x, *residual;                  /* (rows, hidden); residual may be NULL */
    const int64_t *experts;                    /* (rows, chosen) */
    const float *weights;                      /* the same */
    void *out;                                 /* (rows, hidden) */
    void *gates, *products, *scratch;          /* (rows * chosen, 2 * neurons), (rows * chosen, hidden), and of a linear */
    int64_t *indices;                          /* (experts + 2 * rows * chosen,), overwritten */
    int64_t num, rows, chosen, num_threads;
} experts;

void pdkv_experts(const experts *a) {
    const int64_t count = a->rows * a->chosen, hidden = a->down[0]->outputs;
    int64_t *const ends = a->indices, *const rows = ends + a->num, *const places = rows + count, begin = 0;
    memset(ends, 0, (size_t)a->num * sizeof *ends);
    for (int64_t i = 0; i < count; i++) ends[a->experts[i]]++;
    for (int64_t i = 0; i < a->num; i++) begin += ends[i], ends[i] = begin - ends[i];
    for (int64_t i = 0; i < count; i++) rows[places[i] = ends[a->experts[i]]++] = i / a->chosen; /* ends are reached */
#pragma omp parallel num_threads((int)a->num_threads) if (a->num_threads > 1)
    {
        multiply_group(a->gate_up, ends, a->num, a->x, rows, a->gate_up[0]->inputs, a->gates, a->scratch, AS_THEY_ARE);
        multiply_group(a->down, ends, a->num, a->gates, NULL, a->gate_up[0]->outputs, a->products, a->scratch, GATED);
    }
    add_weighted(a->products, places, a->weights, a->residual, a->out, a->rows, a->chosen, hidden, a->down[0]->dtype,
                 a->num_threads);
}

/* Lays a line of a row's numbers into every 32nd place of a chunk: they are of 1 byte, or (pairs) of 4. */
INLINE void spread(const char *line, char *to, const int is_of_1) {
    if (is_of_1)
        UNROLL for (int i = 0; i < LINE_BYTES; i++) to[i * COLUMNS] = line[i];
    else
        UNROLL for (int i = 0; i < LINE_BYTES / 4; i++) memcpy(to + i * 4 * COLUMNS, line + i * 4, 4);
}

/* The same of four rows of pairs, or of numbers of 4 bytes: a quarter of them at a time, side by side. */
typedef int32_t four __attribute__((vector_size(16)));
INLINE void spread_four(const char *rows, int64_t stride, char *to) {
    UNROLL for (int k = 0; k < LINE_BYTES; k += 16, to += 16 * COLUMNS) {
        four row[4];
        UNROLL for (int i = 0; i < 4; i++) memcpy(&row[i], rows + i * stride + k, 16);
        const four low = __builtin_shuffle(row[0], row[1], (four){0, 4, 1, 5}), high = __builtin_shuffle(row[0], row[1], (four){2, 6, 3, 7});
        const four low_2 = __builtin_shuffle(row[2], row[3], (four){0, 4, 1, 5}), high_2 = __builtin_shuffle(row[2], row[3], (four){2, 6, 3, 7});
        const four out[4] = {
            __builtin_shuffle(low, low_2, (four){0, 1, 4, 5}), __builtin_shuffle(low, low_2, (four){2, 3, 6, 7}),
            __builtin_shuffle(high, high_2, (four){0, 1, 4, 5}), __builtin_shuffle(high, high_2, (four){2, 3, 6, 7}),
        };
        UNROLL for (int i = 0; i < 4; i++) memcpy(to + i * 4 * COLUMNS, &out[i], 16);
    }
}

INLINE void pack_row(const char *row, int64_t bytes, char *to, const int is_of_1) {
    for (; bytes >= LINE_BYTES; bytes -= LINE_BYTES, row += LINE_BYTES, to += CHUNK_BYTES) spread(row, to, is_of_1);
    if (bytes == 0) return;
    char line[LINE_BYTES] = {0};
    memcpy(line, row, (size_t)bytes);
    spread(line, to, is_of_1);
}

/* Rows of `row_bytes` bytes, `stride` bytes apart, are the outputs from `first` on of panels of zeros. */
void pdkv_linear_pack(const char *rows, int64_t count, int64_t row_bytes, int64_t stride, int64_t is_of_1, char *panels,
                      int64_t first, int64_t num_threads) {
    const int64_t chunks = (row_bytes + LINE_BYTES - 1) / LINE_BYTES, some = PACKED_CHUNKS * LINE_BYTES;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1)
    for (int64_t panel = first / COLUMNS; panel < (first + count + COLUMNS - 1) / COLUMNS; panel++) {
        const int64_t from = panel * COLUMNS < first ? first : panel * COLUMNS;
        const int64_t to = (panel + 1) * COLUMNS < first + count ? (panel + 1) * COLUMNS : first + count;
        for (int64_t at = 0; at < row_bytes; at += some) {
            char *const own = panels + (panel * chunks + at / LINE_BYTES) * CHUNK_BYTES;
            const int64_t bytes = row_bytes - at < some ? row_bytes - at : some;
            for (int64_t i = from; i < to; i++) {
                const char *const row = rows + (i - first) * stride + at;
                if (is_of_1) {
                    pack_row(row, bytes, own + i % COLUMNS, 1);
                } else if (to - i < 4 || bytes < some) {
                    pack_row(row, bytes, own + i % COLUMNS * 4, 0);
                } else {
                    for (int64_t k = 0; k < PACKED_CHUNKS; k++)
                        spread_four(row + k * LINE_BYTES, stride, own + k * CHUNK_BYTES + i % COLUMNS * 4);
                    i += 3;
                }
            }
        }
    }
}
