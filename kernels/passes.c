/* Passes over a step's rows in host memory, called through ctypes (kernels/passes.py), which releases the GIL meanwhile,
 * and by linear layers, which take some of them along.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <math.h>

#include "passes.h"

#define SHARED_NUMBERS 65536 /* numbers from which a second thread gains more than its waking costs */

#define ISA V3
#define FOR_ISA(name) name##_v3
#include "rows.h"
#undef ISA
#undef FOR_ISA
#define ISA V4
#define FOR_ISA(name) name##_v4
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
#endif
