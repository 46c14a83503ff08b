/* The digest of KV in host memory, alone or while it is copied. kernels/digest.py has the same bits in numpy.
 *
 * A row is what one KV head of one layer has of K, or of V, for the tokens of a hash block: contiguous. Its hash is a
 * sum over stripes of eight words, each multiplied, 32 by 32 bits, with a key of its place: the inner loop of xxh3. The
 * word itself is added to its neighbour's lane, so that a flipped bit changes a sum whatever it is multiplied with.
 * Rows are told apart by a seed each, and added up: in any order, in any number of calls.
 */
#include "vectors.h"

#define STRIPE 64
#define DELTA 0x9e3779b97f4a7c15u  /* from a stripe's keys to the next one's */
#define LENGTH 0xd6e8feb86659fd93u /* of each byte of a row's length */
#define MIX_1 0xff51afd7ed558ccdu
#define MIX_2 0xc4ceb9fe1a85ec53u

#define SMALL_UNIT 65536 /* no hardware prefetcher follows from one such to the next */
#define AHEAD 2048       /* bytes, in larger ones: it stops at each page's end */

#define PARTS (STRIPE / (4 * WIDTH)) /* of a stripe: vectors */

typedef uint64_t longs __attribute__((vector_size(4 * WIDTH)));

static const uint64_t KEYS[8] = {0xb8fe6c3923a44bbeu, 0x7c01812cf721ad1cu, 0xded46de9839097dbu, 0x7240a4a4b7b3671fu,
                                 0xcb79e64eccc0e578u, 0x825ad07dccff7221u, 0xb8084674f743248eu, 0xe03590e6813a264cu};
static const uint64_t LANES[8] = {0x9e3779b185ebca87u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u, 0x85ebca77c2b2ae63u,
                                  0x27d4eb2f165667c5u, 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u};

/* How far on the bytes lie that will be wanted soon. */
typedef struct {
    int64_t source, target;
} ahead;

/* The lower half of each word by its upper half, and the words with neighbours exchanged. */
#if WIDTH == 16
INLINE longs product(longs x) { return (longs)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32)); }
INLINE longs exchanged(longs x) { return (longs)_mm512_shuffle_epi32((__m512i)x, 0x4e); }
#elif WIDTH == 8
INLINE longs product(longs x) { return (longs)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32)); }
INLINE longs exchanged(longs x) { return (longs)_mm256_shuffle_epi32((__m256i)x, 0x4e); }
#else
#ifdef __SSE2__
INLINE longs product(longs x) { return (longs)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32)); }
#elif defined(__aarch64__)
INLINE longs product(longs x) { return (longs)vmull_u32(vmovn_u64((uint64x2_t)x), vshrn_n_u64((uint64x2_t)x, 32)); }
#else
INLINE longs product(longs x) { return (x & 0xffffffffu) * (x >> 32); }
#endif
INLINE longs exchanged(longs x) { return __builtin_shufflevector(x, x, 1, 0); }
#endif

/* Past the caches where the CPU can: a copy of KV does not fit into them, and its lines need not be read first. */
INLINE void put(char *to, longs x, const int past_caches) {
#if WIDTH == 16
    if (past_caches) _mm512_stream_si512((void *)to, (__m512i)x);
#elif WIDTH == 8
    if (past_caches) _mm256_stream_si256((__m256i *)to, (__m256i)x);
#elif defined(__SSE2__)
    if (past_caches) _mm_stream_si128((__m128i *)to, (__m128i)x);
#endif
    if (!past_caches) memcpy(to, &x, sizeof x);
}

/* Whole stripes, from which `sums` and `keys` go on; where `to` is given they are copied, too. */
INLINE void add_stripes(longs *sums, longs *keys, char *to, const char *from, int64_t size, ahead next,
                        const int past_caches) {
    for (int64_t at = 0; at < size; at += STRIPE) {
        __builtin_prefetch(from + at + next.source, 0, 2);
        if (to != NULL && !past_caches) __builtin_prefetch(to + at + next.target, 1, 2);
        UNROLL for (int p = 0; p < PARTS; p++) {
            longs x;
            memcpy(&x, from + at + p * sizeof x, sizeof x);
            if (to != NULL) put(to + at + p * sizeof x, x, past_caches);
            sums[p] += product(x ^ keys[p]) + exchanged(x);
            keys[p] += DELTA;
        }
    }
}

/* A row's first `size` bytes; where `to` is given the row is copied, too: all `row_bytes` of it. */
INLINE uint64_t hash_row(char *to, const char *from, int64_t size, int64_t row_bytes, uint64_t seed, ahead next) {
    longs sums[PARTS] = {{0}}, keys[PARTS];
    const int64_t whole = size / STRIPE * STRIPE;
    memcpy(keys, KEYS, sizeof keys);
    if (to == NULL)
        add_stripes(sums, keys, NULL, from, whole, next, 0);
#if defined(__SSE2__)
    else if (((uintptr_t)to & (sizeof(longs) - 1)) == 0)
        add_stripes(sums, keys, to, from, whole, next, 1);
#endif
    else
        add_stripes(sums, keys, to, from, whole, next, 0);
    if (whole < size) {
        char last[STRIPE] = {0};
        memcpy(last, from + whole, (size_t)(size - whole));
        add_stripes(sums, keys, NULL, last, STRIPE, (ahead){0, 0}, 0);
    }
    if (to != NULL && whole < row_bytes) memcpy(to + whole, from + whole, (size_t)(row_bytes - whole));
    uint64_t hash = (uint64_t)size * LENGTH, lanes[8];
    memcpy(lanes, sums, sizeof lanes);
    for (int i = 0; i < 8; i++) hash += (lanes[i] ^ (lanes[i] >> 29)) * LANES[i];
    hash ^= seed;
    hash = (hash ^ (hash >> 33)) * MIX_1;
    hash = (hash ^ (hash >> 29)) * MIX_2;
    return hash ^ (hash >> 32);
}

/* Add to digests[i * inner + r] the hashes of n units of outer x inner rows. Offsets and strides are bytes.
 *
 * sizes: (n,) how many bytes of each of a unit's rows are digested; NULL: all.
 * seeds: (outer, inner).
 * target: where the rows are copied to, which is nothing that is read; NULL: nowhere. */
void pdkv_digest(
    uint64_t *digests, const uint64_t *seeds, const int64_t *sizes, char *target, const char *source,
    const int64_t *target_offsets, const int64_t *source_offsets, int64_t n,
    int64_t outer, int64_t target_outer_stride, int64_t source_outer_stride,
    int64_t inner, int64_t target_inner_stride, int64_t source_inner_stride, int64_t row_bytes) {
    const int is_small = outer * inner * row_bytes <= SMALL_UNIT;
    for (int64_t i = 0; i < n; i++) {
        const int64_t size = sizes == NULL ? row_bytes : sizes[i], other = i + 1 < n ? i + 1 : i;
        ahead next = {AHEAD, AHEAD};
        if (is_small) {
            next.source = source_offsets[other] - source_offsets[i];
            if (target != NULL) next.target = target_offsets[other] - target_offsets[i];
        }
        for (int64_t o = 0; o < outer; o++)
            for (int64_t r = 0; r < inner; r++) {
                const char *from = source + source_offsets[i] + o * source_outer_stride + r * source_inner_stride;
                const uint64_t seed = seeds[o * inner + r];
                uint64_t *sum = digests + i * inner + r;
                if (target == NULL)
                    *sum += hash_row(NULL, from, size, row_bytes, seed, next);
                else {
                    char *to = target + target_offsets[i] + o * target_outer_stride + r * target_inner_stride;
                    *sum += hash_row(to, from, size, row_bytes, seed, next);
                }
            }
    }
#ifdef __SSE2__
    if (target != NULL) _mm_sfence(); /* who hears that it is here finds it */
#endif
}
