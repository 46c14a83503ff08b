/* What passes.c does to rows on their way into a linear layer (linear.c). */
#ifndef PDKV_PASSES_H
#define PDKV_PASSES_H
#include "vectors.h"

enum { AS_THEY_ARE, NORMED, GATED, GATED_GELU };      /* what becomes of rows before they are multiplied */

typedef struct {
    int64_t what;
    const float *norm; /* NORMED: (inputs,) */
    float epsilon;     /* NORMED: added to the mean of squares */
} row_pass;

/* A row of `inputs` numbers, GATED and GATED_GELU: gates and then as many that they gate, in chunks that begin `stride` bytes apart.
 * Behind the last number a chunk has zeros. `to_dtype` holds what is rounded to `dtype`. */
__attribute__((visibility("hidden"))) void pass_any_row(
    const row_pass *, const void *x, int64_t inputs, char *to, int64_t stride, int64_t chunk, int64_t dtype, int64_t to_dtype);

/* to[i] = residual[i] + the sum over j of weights[i][j] * x[places[i][j]], in float32 and rounded once; `places` and `weights`
 * are (rows, chosen), `residual` may be NULL. */
__attribute__((visibility("hidden"))) void add_weighted(
    const void *x, const int64_t *places, const float *weights, const void *residual, void *to, int64_t rows, int64_t chosen,
    int64_t size, int64_t dtype, int64_t threads);
#endif
