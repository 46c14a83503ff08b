/* What rans.c codes, for those who call it: see there. */
#ifndef PDKV_RANS_H
#define PDKV_RANS_H
#include "vectors.h"

#define RANS_LANES 16
#define RANS_BITS 12   /* frequencies of a table add up to 2^12 */
#define RANS_TABLES 16 /* at most so many: a context has 4 bits */

typedef struct {
    uint64_t reciprocal; /* floor(2^44 / frequency) + 1 */
    uint32_t frequency;  /* below 2^12; 0: no such symbol */
    uint32_t start;      /* sum of the frequencies of the symbols before it */
} rans_symbol;

/* Symbols, (rows, columns) bytes, with a table for each column of so many rows. */
typedef struct {
    const uint8_t *contexts; /* (rows / rows_per_context, columns) */
    int64_t rows, columns, rows_per_context;
} rans_rows;

int64_t pdkv_rans_encode(
    uint16_t *words, int64_t max_words, uint32_t *states, const uint8_t *symbols, const rans_rows *rows,
    const rans_symbol *table);

/* table: (RANS_TABLES, 2^12) of symbol << 24 | frequency << 12 | slot - start. */
int64_t pdkv_rans_decode(
    uint8_t *symbols, uint32_t *states, const char *words, int64_t num_words, const rans_rows *rows,
    const uint32_t *table);
#endif
