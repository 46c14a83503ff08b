/* The digest of KV in host memory, alone or while it is copied. kernels/digest.py has the same bits in numpy.
 *
 * A row is what one KV head of one layer has of K, or of V, for the tokens of a hash block: contiguous. Its hash is a
 * sum over stripes of eight words, each multiplied, 32 by 32 bits, with a key of its place: the inner loop of xxh3. The
 * word itself is added to its neighbour's lane, so that a flipped bit changes a sum whatever it is multiplied with.
 * Rows are told apart by a seed each, and added up: in any order, in any number of calls.
 */
#include "vectors.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define STRIPE 64
#define DELTA 0x9e3779b97f4a7c15u  /* from a stripe's keys to the next one's */
#define LENGTH 0xd6e8feb86659fd93u /* of each byte of a row's length */
#define MIX_1 0xff51afd7ed558ccdu
#define MIX_2 0xc4ceb9fe1a85ec53u

#define SMALL_UNIT 65536 /* no hardware prefetcher follows from one such to the next */
#define AHEAD 2048       /* bytes, in larger ones: it stops at each page's end */

typedef uint64_t words8 __attribute__((vector_size(STRIPE)));

static const words8 KEYS = {0xb8fe6c3923a44bbeu, 0x7c01812cf721ad1cu, 0xded46de9839097dbu, 0x7240a4a4b7b3671fu,
                            0xcb79e64eccc0e578u, 0x825ad07dccff7221u, 0xb8084674f743248eu, 0xe03590e6813a264cu};
static const words8 LANES = {0x9e3779b185ebca87u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u, 0x85ebca77c2b2ae63u,
                             0x27d4eb2f165667c5u, 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u};

/* How far on the bytes lie that will be wanted soon. */
typedef struct {
    int64_t source, target;
} ahead;

INLINE void add_stripe(words8 *sums, const words8 *words, const words8 *keys) {
    const words8 x = *words ^ *keys;
    *sums += (x & 0xffffffffu) * (x >> 32) + __builtin_shufflevector(*words, *words, 1, 0, 3, 2, 5, 4, 7, 6);
}

/* Past the caches where the CPU can: a copy of KV does not fit into them, and its lines need not be read first. */
INLINE void put_stripe(char *to, const words8 *words, int64_t next) {
#ifdef __SSE2__
    if (((uintptr_t)to & 15) == 0) {
        for (int i = 0; i < STRIPE / 16; i++)
            _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)words + i));
        return;
    }
#endif
    memcpy(to, words, STRIPE);
    __builtin_prefetch(to + next, 1, 2);
}

/* A row's first `size` bytes; where `to` is given the row is copied, too: all `row_bytes` of it. */
INLINE uint64_t hash_row(char *to, const char *from, int64_t size, int64_t row_bytes, uint64_t seed, ahead next) {
    words8 sums = {0}, keys = KEYS, words;
    int64_t at = 0;
    for (; at + STRIPE <= size; at += STRIPE) {
        memcpy(&words, from + at, STRIPE);
        __builtin_prefetch(from + at + next.source, 0, 2);
        if (to != NULL) put_stripe(to + at, &words, next.target);
        add_stripe(&sums, &words, &keys);
        keys += DELTA;
    }
    if (at < size) {
        words = (words8){0};
        memcpy(&words, from + at, (size_t)(size - at));
        add_stripe(&sums, &words, &keys);
    }
    if (to != NULL && at < row_bytes) memcpy(to + at, from + at, (size_t)(row_bytes - at));
    sums = (sums ^ (sums >> 29)) * LANES;
    uint64_t hash = (uint64_t)size * LENGTH;
    for (int i = 0; i < 8; i++) hash += sums[i];
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
FOR_EACH_CPU void pdkv_digest(
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
