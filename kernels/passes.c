/* Passes over a step's rows in host memory, called through ctypes (kernels/passes.py), which releases the GIL meanwhile,
 * and by linear layers, which take some of them along.
 */
#include <math.h>

#include "lanes.h"
#include "passes.h"

#define SHARED_NUMBERS 65536 /* numbers from which a second thread gains more than its waking costs */

/* A step's queries and keys before attention: normed, rotated, and written to the cache with the values. */
typedef struct {
    void *qkv;                             /* (rows, heads + 2 * kv_heads, head_size), contiguous */
    const float *q_norm, *k_norm;          /* (head_size,) or NULL */
    const void *cosines, *sines;           /* (positions, rotary_size); the first half of a row of sines is negated */
    const int64_t *positions;              /* (rows,) */
    void *kv;                              /* the layer's K in block 0; (2, kv_heads, block_size, head_size) in each */
    const int64_t *block_ids, *offsets;    /* (written,) where the first rows' KV goes */
    int64_t rows, written, heads, kv_heads, head_size, rotary_size, block_size, block_stride; /* numbers */
    int64_t dtype, num_threads;
    float q_epsilon, k_epsilon;
} head_pass;

/* In float32, rounded where torch rounds. Compiled with -ffp-contract=off: each operation is rounded by itself and sums have
 * a fixed order, so that a row's bits are the same at every level, whoever computes it and beside whatever rows. */

/* exp for x <= 0, as exp_of, but 0 below what that clamps. */
INLINE vec exp_of_lanes(vec x) {
    const vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return where(x < -87.0f, (vec){0}, p * (vec)((__builtin_convertvector(n, ints) + 127) << 23));
}

/* 1 / sqrt(mean(x * x) + epsilon) */
INLINE float norm_scale(const void *x, int64_t size, float epsilon, const int dtype) {
    vec sums[64 / WIDTH] = {{0}};
    int64_t i = 0;
    for (; i + 64 <= size; i += 64)
        UNROLL for (int u = 0; u < 64 / WIDTH; u++) {
            const vec numbers = load(x, i + u * WIDTH, WIDTH, dtype);
            sums[u] += numbers * numbers;
        }
    float lanes[64];
    UNROLL for (int u = 0; u < 64 / WIDTH; u++) {
        const vec numbers = load(x, i + u * WIDTH, size - i - u * WIDTH, dtype);
        sums[u] += numbers * numbers;
        memcpy(lanes + u * WIDTH, &sums[u], sizeof sums[u]);
    }
    for (int u = 0; u < 16; u++) lanes[u] = (lanes[u] + lanes[16 + u]) + (lanes[32 + u] + lanes[48 + u]);
    return 1.0f / sqrtf(sum_of(lanes) / (float)size + epsilon);
}

/* silu(gate) * up, where silu(x) = x / (1 + exp(-x)); of exp(-|x|), which cannot overflow. GATED_GELU: gelu by tanh, which
 * is x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x^3))). */
INLINE vec gated(vec gate, vec up, const int dtype, const int what) {
    const vec zero = {0};
    const vec x = what == GATED ? gate : 1.59576912f * (gate + 0.044715f * (gate * gate * gate));
    const ints is_negative = x < zero;
    const vec power = exp_of_lanes(where(is_negative, x, -x));
    const vec silu = gate * (where(is_negative, power, zero + 1.0f) / (power + 1.0f));
    return rounded(silu, dtype) * up;
}

/* Numbers [i, i + WIDTH) of what becomes of a row, `count` of them and zeros, not yet rounded. */
INLINE vec passed(const row_pass *pass, const void *x, int64_t inputs, float scale, int64_t i, int64_t count,
                             const int dtype, const int what) {
    const vec numbers = load(x, i, count, dtype);
    if (what == NORMED) return numbers * scale * load(pass->norm, i, count, FLOAT32);
    return gated(numbers, load(x, inputs + i, count, dtype), dtype, what);
}

/* A row in chunks that begin `stride` bytes apart, with zeros behind its last number; `to_dtype` holds what it is rounded
 * to. One chunk that is not a multiple of WIDTH ends with its last number. */
INLINE void pass_row(const row_pass *pass, const void *x, int64_t inputs, char *to, int64_t stride, int64_t chunk,
                              const int dtype, const int to_dtype, const int what) {
    const float scale = what == NORMED ? norm_scale(x, inputs, pass->epsilon, dtype) : 0.0f;
    for (int64_t from = 0; from < inputs; from += chunk, to += stride)
        for (int64_t i = 0; i < chunk; i += WIDTH) {
            const int64_t at = from + i, count = inputs - at;
            const vec numbers = count >= WIDTH ? passed(pass, x, inputs, scale, at, WIDTH, dtype, what)
                                              : passed(pass, x, inputs, scale, at, count, dtype, what);
            if (chunk - i >= WIDTH)
                store(to, i, WIDTH, to_dtype == dtype ? numbers : rounded(numbers, dtype), to_dtype);
            else
                store(to, i, chunk - i, to_dtype == dtype ? numbers : rounded(numbers, dtype), to_dtype);
        }
}

INLINE void pass_gated(const row_pass *pass, const void *x, int64_t inputs, char *to, int64_t stride, int64_t chunk,
                       int64_t dtype, int64_t to_dtype, const int what) {
    if (dtype == FLOAT32)
        pass_row(pass, x, inputs, to, stride, chunk, FLOAT32, FLOAT32, what);
    else if (to_dtype == FLOAT32)
        pass_row(pass, x, inputs, to, stride, chunk, BFLOAT16, FLOAT32, what);
    else
        pass_row(pass, x, inputs, to, stride, chunk, BFLOAT16, BFLOAT16, what);
}

/* pass_row for what is known when it is called. */
void pass_any_row(const row_pass *pass, const void *x, int64_t inputs, char *to, int64_t stride,
                                  int64_t chunk, int64_t dtype, int64_t to_dtype) {
    if (pass->what == NORMED && dtype == FLOAT32)
        pass_row(pass, x, inputs, to, stride, chunk, FLOAT32, FLOAT32, NORMED);
    else if (pass->what == NORMED && to_dtype == FLOAT32)
        pass_row(pass, x, inputs, to, stride, chunk, BFLOAT16, FLOAT32, NORMED);
    else if (pass->what == NORMED)
        pass_row(pass, x, inputs, to, stride, chunk, BFLOAT16, BFLOAT16, NORMED);
    else if (pass->what == GATED)
        pass_gated(pass, x, inputs, to, stride, chunk, dtype, to_dtype, GATED);
    else
        pass_gated(pass, x, inputs, to, stride, chunk, dtype, to_dtype, GATED_GELU);
}

/* One head's vector, in place: normed where `norm` is, then rotated by half of its first `rotary` numbers. torch's roll,
 * product and addcmul round the product with the sine, then the sum. */
INLINE void rotate_head(void *x, int64_t size, const float *norm, float epsilon, const void *cosines,
                                     const void *sines, int64_t rotary, const int dtype) {
    if (norm) {
        const row_pass pass = {NORMED, norm, epsilon};
        pass_row(&pass, x, size, x, 0, size, dtype, dtype, NORMED);
    }
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t count = half - i, j = half + i;
        const vec a = load(x, i, count, dtype), b = load(x, j, count, dtype);
        const vec of_b = rounded(b * load(sines, i, count, dtype), dtype);
        const vec of_a = rounded(a * load(sines, j, count, dtype), dtype);
        store(x, i, count, of_b + a * load(cosines, i, count, dtype), dtype);
        store(x, j, count, of_a + b * load(cosines, j, count, dtype), dtype);
    }
}

INLINE void pass_heads(const head_pass *a, int64_t row, const int dtype) {
    const int64_t size = a->head_size, rotated = a->heads + a->kv_heads, all = rotated + a->kv_heads;
    const int64_t angles = a->positions[row] * a->rotary_size, bytes = bytes_of(size, dtype);
    const char *const cosines = (const char *)a->cosines + bytes_of(angles, dtype);
    const char *const sines = (const char *)a->sines + bytes_of(angles, dtype);
    char *const x = (char *)a->qkv + row * all * bytes;
    for (int64_t h = 0; h < rotated; h++)
        rotate_head(x + h * bytes, size, h < a->heads ? a->q_norm : a->k_norm,
                             h < a->heads ? a->q_epsilon : a->k_epsilon, cosines, sines, a->rotary_size, dtype);
    if (row >= a->written) return;
    const int64_t slot = a->block_ids[row] * a->block_stride + a->offsets[row] * size;
    char *const kv = (char *)a->kv + bytes_of(slot, dtype);
    for (int64_t h = 0; h < 2 * a->kv_heads; h++)
        memcpy(kv + h * a->block_size * bytes, x + (a->heads + h) * bytes, (size_t)bytes);
}

static void pass_any_heads(const head_pass *a, int64_t row) {
    if (a->dtype == FLOAT32)
        pass_heads(a, row, FLOAT32);
    else
        pass_heads(a, row, BFLOAT16);
}

/* Rows that go through a pass by themselves. Strides count elements. */
typedef struct {
    const void *x;       /* (rows, size), GATED: (rows, 2 * size) */
    void *out;           /* (rows, size), contiguous */
    const float *weight; /* NORMED: (size,) */
    int64_t what, rows, size, stride, dtype, num_threads;
    double epsilon;
} passes;

void pdkv_pass(const passes *a) {
    const row_pass pass = {a->what, a->weight, (float)a->epsilon};
    const int num_threads = a->rows * a->size < SHARED_NUMBERS ? 1 : (int)a->num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < a->rows; row++)
        pass_any_row(&pass, (const char *)a->x + bytes_of(row * a->stride, a->dtype), a->size,
            (char *)a->out + bytes_of(row * a->size, a->dtype), 0, a->size, a->dtype, a->dtype);
}

void pdkv_pass_heads(const head_pass *a) {
    const int64_t size = a->rows * (a->heads + 2 * a->kv_heads) * a->head_size;
    const int num_threads = size < SHARED_NUMBERS ? 1 : (int)a->num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < a->rows; row++)
        pass_any_heads(a, row);
}

/* Row `row`, of `size` numbers. */
INLINE void add_row(const void *x, const int64_t *places, const float *weights, const void *residual, void *to,
                    int64_t row, int64_t chosen, int64_t size, const int dtype) {
    for (int64_t i = 0; i < size; i += WIDTH) {
        const int64_t count = size - i, at = row * size + i;
        vec sum = {0};
        for (int64_t j = 0; j < chosen; j++) sum += weights[j] * load(x, places[j] * size + i, count, dtype);
        if (residual) sum += load(residual, at, count, dtype);
        store(to, at, count, sum, dtype);
    }
}

void add_weighted(const void *x, const int64_t *places, const float *weights, const void *residual, void *to,
                  int64_t rows, int64_t chosen, int64_t size, int64_t dtype, int64_t threads) {
    const int num_threads = rows * chosen * size < SHARED_NUMBERS ? 1 : (int)threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < rows; row++)
        if (dtype == FLOAT32)
            add_row(x, places + row * chosen, weights + row * chosen, residual, to, row, chosen, size, FLOAT32);
        else
            add_row(x, places + row * chosen, weights + row * chosen, residual, to, row, chosen, size, BFLOAT16);
}
