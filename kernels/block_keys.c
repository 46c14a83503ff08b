/* The chain of block keys of a prompt, called through ctypes (kernels/block_keys.py) without the GIL.
 *
 * Key i = BLAKE2b-128(key i-1, tokens of block i as little-endian int32), as src/pdkv/block_keys.py says, which has the
 * same with hashlib. BLAKE2b: RFC 7693.
 */
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define CHUNK 128 /* bytes that one compression takes */

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static inline uint64_t rotate(uint64_t x, int n) { return x >> n | x << (64 - n); }

#define MIX(a, b, c, d, x, y)                                                             \
    do {                                                                                  \
        v[a] += v[b] + (x); v[d] = rotate(v[d] ^ v[a], 32);                               \
        v[c] += v[d]; v[b] = rotate(v[b] ^ v[c], 24);                                     \
        v[a] += v[b] + (y); v[d] = rotate(v[d] ^ v[a], 16);                               \
        v[c] += v[d]; v[b] = rotate(v[b] ^ v[c], 63);                                     \
    } while (0)

/* h = compression of h and one chunk, which ends the message after `total` bytes where `last`. */
static void compress(uint64_t *h, const uint8_t *chunk, uint64_t total, int last) {
    uint64_t v[16], m[16];
    memcpy(m, chunk, CHUNK);
    memcpy(v, h, 8 * sizeof *v);
    memcpy(v + 8, IV, sizeof IV);
    v[12] ^= total;
    if (last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
        const uint8_t *s = SIGMA[i];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[8 + i];
}

/* keys: (n, 16) out; parent: the key before the first; tokens: (n, tokens_per_key). */
void pdkv_block_keys(uint8_t *keys, const uint8_t *parent, const int32_t *tokens, int64_t n, int64_t tokens_per_key) {
    int64_t token_bytes = tokens_per_key * (int64_t)sizeof *tokens;
    const uint8_t *next = (const uint8_t *)tokens;
    for (int64_t i = 0; i < n; i++) {
        uint64_t h[8];
        memcpy(h, IV, sizeof h);
        h[0] ^= 0x01010000 ^ KEY_BYTES;
        uint8_t chunk[CHUNK] = {0};
        memcpy(chunk, parent, KEY_BYTES);
        int64_t filled = KEY_BYTES, total = 0, left = token_bytes;
        for (;;) {
            int64_t taken = left < CHUNK - filled ? left : CHUNK - filled;
            memcpy(chunk + filled, next, taken);
            memset(chunk + filled + taken, 0, CHUNK - filled - taken);
            total += filled + taken;
            next += taken;
            left -= taken;
            compress(h, chunk, total, left == 0);
            if (left == 0) break;
            filled = 0;
        }
        memcpy(keys + i * KEY_BYTES, h, KEY_BYTES);
        parent = keys + i * KEY_BYTES;
    }
}
