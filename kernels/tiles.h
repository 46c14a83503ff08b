/* The kernels of linear.c that multiply some rows by a panel, for others than linear layers (prompts.c). */
#ifndef PDKV_TILES_H
#define PDKV_TILES_H
#include "vectors.h"

#define COLUMNS 32       /* outputs of a panel */
#define CHUNK_BYTES 2048 /* a panel's inputs that lie together, in 16 steps of two lines */

/* Some rows by one panel's chunks. */
typedef struct {
    const char *weights, *x; /* x: for each chunk, each row's 16 floats, 16 pairs of bfloat16, or 32 floats; of 8 bits twice as many */
    float *sums;             /* (rows, 32) */
    int64_t chunks;
    int is_first;      /* sums begin at 0 */
    const float *scales; /* of 8 bits: (32,), by which what these chunks add is multiplied; NULL: 1 */
    const char *fetch; /* weights that will be needed soon, as many bytes as these chunks have >> share; NULL: none */
    int64_t share;
    int64_t next;      /* how far behind these weights those of a second panel lie; 0: none */
} tile;

typedef void run_tile(const tile *, int rows);

#if WIDTH == 16
#define MAX_ROWS 14 /* of a tile */
#define MAX_SUMS 28 /* vectors: what registers have room for beside weights and inputs */
#else
#define MAX_ROWS 6
#ifdef __aarch64__
#define MAX_SUMS 24
#else
#define MAX_SUMS 12
#endif
#endif
#ifdef __AVX512BF16__
#define HAS_DOT 1 /* products of pairs of bfloat16 */
#else
#define HAS_DOT 0
#endif

/* Rows by weights, both of float32 or, with HAS_DOT, both of bfloat16 in pairs. */
__attribute__((visibility("hidden"))) run_tile *tile_kernel(int is_bfloat16);

/* How rows are divided into tiles: as evenly as can be. */
typedef struct {
    int64_t tiles, base, extra;
} division;

INLINE division divide(int64_t rows, int64_t most) {
    const int64_t tiles = (rows + most - 1) / most;
    return (division){tiles, rows / tiles, rows % tiles};
}

INLINE int64_t first_row(division by, int64_t i) { return i * by.base + (i < by.extra ? i : by.extra); }
#endif
