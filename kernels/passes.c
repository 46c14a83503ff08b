/* Passes over a step's rows in host memory, called through ctypes (kernels/passes.py), which releases the GIL meanwhile,
 * and by linear layers, which take some of them along.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <math.h>

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
    int64_t dtype, num_threads, level;
    float q_epsilon, k_epsilon;
} head_pass;

#define ISA V3
#define FOR_ISA(name) name##_v3
#include "lanes.h"
#include "rows.h"
#undef ISA
#undef FOR_ISA
#define ISA V4
#define FOR_ISA(name) name##_v4
#include "lanes.h"
#include "rows.h"

pass_row *pass_row_at(int64_t level) { return level >= AVX512 ? pass_any_row_v4 : pass_any_row_v3; }

/* Rows that go through a pass by themselves. Strides count elements. */
typedef struct {
    const void *x;       /* (rows, size), GATED: (rows, 2 * size) */
    void *out;           /* (rows, size), contiguous */
    const float *weight; /* NORMED: (size,) */
    int64_t what, rows, size, stride, dtype, num_threads, level;
    double epsilon;
} passes;

void pdkv_pass(const passes *a) {
    const row_pass pass = {a->what, a->weight, (float)a->epsilon};
    pass_row *const run = pass_row_at(a->level);
    const int num_threads = a->rows * a->size < SHARED_NUMBERS ? 1 : (int)a->num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < a->rows; row++)
        run(&pass, (const char *)a->x + bytes_of(row * a->stride, a->dtype), a->size,
            (char *)a->out + bytes_of(row * a->size, a->dtype), 0, a->size, a->dtype, a->dtype);
}

void pdkv_pass_heads(const head_pass *a) {
    const int64_t size = a->rows * (a->heads + 2 * a->kv_heads) * a->head_size;
    const int num_threads = size < SHARED_NUMBERS ? 1 : (int)a->num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < a->rows; row++)
        if (a->level >= AVX512)
            pass_any_heads_v4(a, row);
        else
            pass_any_heads_v3(a, row);
}
#endif
