/* Interleaved rANS: entropy coding of bytes with static tables. kernels/rans.py has the same bytes in numpy.
 *
 * Sixteen 32-bit states in [2^16, 2^32) take turns, one a column; each gives or takes 16-bit words, at most one a symbol
 * (Duda 2013; Giesen, "Interleaved entropy coders", 2014). All of them share one sequence of words. A context, one byte
 * a column, chooses the table of a symbol.
 */
#include "rans.h"

#define LOW (1u << 16)
#define SLOTS (1 << RANS_BITS)
#define SHIFT 44 /* of reciprocals: exact for states below frequency * 2^20, and frequencies below 2^12 */

/* Contexts have 4 bits; what else a byte has is the caller's. */
INLINE int64_t table_of(const uint8_t *contexts, int64_t column) { return contexts[column] & (RANS_TABLES - 1); }

INLINE const uint8_t *contexts_of(const rans_rows *rows, int64_t row) {
    return rows->contexts + row / rows->rows_per_context * rows->columns;
}

/* Returns the number of words, which end at words + max_words; -1: there is no room for them, -2: a symbol that its
 * table does not have. */
int64_t pdkv_rans_encode(
    uint16_t *words, int64_t max_words, uint32_t *states, const uint8_t *symbols, const rans_rows *rows,
    const rans_symbol *table) {
    uint16_t *to = words + max_words;
    uint32_t is_missing = 0;
    for (int i = 0; i < RANS_LANES; i++) states[i] = LOW;
    for (int64_t row = rows->rows - 1; row >= 0; row--) {
        const uint8_t *contexts = contexts_of(rows, row), *from = symbols + row * rows->columns;
        if (to - words < rows->columns) return -1;
        for (int64_t column = rows->columns - 1; column >= 0; column--) {
            const rans_symbol symbol = table[table_of(contexts, column) * 256 + from[column]];
            uint32_t x = states[column % RANS_LANES];
            const int is_full = (x >> 20) >= symbol.frequency;
            to[-1] = (uint16_t)x;
            to -= is_full;
            x = is_full ? x >> 16 : x;
            const uint32_t quotient = (uint32_t)(x * symbol.reciprocal >> SHIFT);
            states[column % RANS_LANES] = x + symbol.start + quotient * (SLOTS - symbol.frequency);
            is_missing |= symbol.frequency == 0;
        }
    }
    return is_missing ? -2 : words + max_words - to;
}

/* Rows [first, rows), one symbol at a time; returns the word behind the last one, NULL: the words end too early. */
INLINE const char *decode_rows(
    uint8_t *symbols, uint32_t *states, const char *word, const char *end, const rans_rows *rows, int64_t first,
    const uint32_t *table) {
    for (int64_t row = first; row < rows->rows; row++) {
        const uint8_t *contexts = contexts_of(rows, row);
        uint8_t *to = symbols + row * rows->columns;
        for (int64_t column = 0; column < rows->columns; column++) {
            uint32_t x = states[column % RANS_LANES];
            const uint32_t slot = table[table_of(contexts, column) * SLOTS + (x & (SLOTS - 1))];
            to[column] = (uint8_t)(slot >> 24);
            x = (slot >> 12 & (SLOTS - 1)) * (x >> RANS_BITS) + (slot & (SLOTS - 1));
            if (x < LOW) {
                uint16_t next;
                if (word == end) return NULL;
                memcpy(&next, word, sizeof next);
                word += sizeof next;
                x = x << 16 | next;
            }
            states[column % RANS_LANES] = x;
        }
    }
    return word;
}

#ifdef __AVX2__
static uint64_t expansions[256]; /* byte i of [mask]: how many of the mask's bits below i are set */

__attribute__((constructor)) static void fill_expansions(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int i = 0, count = 0; i < 8; i++) {
            expansions[mask] |= (uint64_t)count << 8 * i;
            count += mask >> i & 1;
        }
}

/* Eight symbols of a column's lanes; the words that they may take, 16 bytes, are there. */
INLINE const char *decode_eight(
    uint8_t *to, __m256i *states, const uint8_t *contexts, const char *word, const uint32_t *table) {
    const __m256i slots = _mm256_set1_epi32(SLOTS - 1);
    __m256i tables = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)contexts));
    tables = _mm256_slli_epi32(_mm256_and_si256(tables, _mm256_set1_epi32(RANS_TABLES - 1)), RANS_BITS);
    const __m256i index = _mm256_or_si256(tables, _mm256_and_si256(*states, slots));
    const __m256i slot = _mm256_i32gather_epi32((const int *)table, index, 4);
    const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slot, 12), slots);
    __m256i x = _mm256_mullo_epi32(frequency, _mm256_srli_epi32(*states, RANS_BITS));
    x = _mm256_add_epi32(x, _mm256_and_si256(slot, slots));
    const __m256i is_low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
    const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(is_low));
    const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&expansions[mask]));
    __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)word));
    next = _mm256_or_si256(_mm256_permutevar8x32_epi32(next, order), _mm256_slli_epi32(x, 16));
    *states = _mm256_blendv_epi8(x, next, is_low);
    const __m256i bytes = _mm256_srli_epi32(slot, 24);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(halves, halves));
    return word + 2 * __builtin_popcount((unsigned)mask);
}

/* Whole rows, whose columns are a multiple of the lanes, while all the words that a row may take are there. Returns how
 * many rows. */
static int64_t decode_rows_avx2(
    uint8_t *symbols, uint32_t *states, const char **word, const char *end, const rans_rows *rows,
    const uint32_t *table) {
    __m256i low = _mm256_loadu_si256((const __m256i *)states), high = _mm256_loadu_si256((const __m256i *)states + 1);
    const char *next = *word;
    int64_t row = 0;
    for (; row < rows->rows && end - next >= 2 * rows->columns; row++) {
        const uint8_t *contexts = contexts_of(rows, row);
        uint8_t *to = symbols + row * rows->columns;
        for (int64_t column = 0; column < rows->columns; column += RANS_LANES) {
            next = decode_eight(to + column, &low, contexts + column, next, table);
            next = decode_eight(to + column + 8, &high, contexts + column + 8, next, table);
        }
    }
    _mm256_storeu_si256((__m256i *)states, low);
    _mm256_storeu_si256((__m256i *)states + 1, high);
    *word = next;
    return row;
}
#endif

/* Fill symbols, (rows, columns), whatever the words are; 0: all of them were taken, and the states are back where the
 * encoder's began. `states` are overwritten. */
int64_t pdkv_rans_decode(
    uint8_t *symbols, uint32_t *states, const char *words, int64_t num_words, const rans_rows *rows,
    const uint32_t *table) {
    const char *word = words, *end = words + 2 * num_words;
    int64_t first = 0;
#ifdef __AVX2__
    if (rows->columns % RANS_LANES == 0) first = decode_rows_avx2(symbols, states, &word, end, rows, table);
#endif
    word = decode_rows(symbols, states, word, end, rows, first, table);
    int64_t is_damaged = word != end;
    for (int i = 0; i < RANS_LANES; i++) is_damaged |= states[i] != LOW;
    return is_damaged;
}
