/* What this processor can do at most: read memory, and multiply and add in registers. benchmarks/linears.py calls it. */
#include <immintrin.h>
#include <stdint.h>

/* Read `count` floats, a multiple of 64 per thread, with each thread's own part in one stream. */
__attribute__((target("avx2"))) float limit_read(const float *from, int64_t count, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t begin = count / 64 * part / threads * 64, end = count / 64 * (part + 1) / threads * 64;
        __m256 sums[8] = {0};
        for (int64_t i = begin; i < end; i += 64) {
            for (int line = 0; line < 4; line++) _mm_prefetch((const char *)(from + i) + 4096 + line * 64, _MM_HINT_T0);
            for (int k = 0; k < 8; k++) sums[k] += _mm256_loadu_ps(from + i + k * 8);
        }
        for (int k = 0; k < 8; k++) total += sums[k][0];
    }
    return total;
}

/* The empty statements make numbers unknown: nothing is computed ahead, and no two sums are one. */
#define DEFINE_LIMIT(NAME, ISA, VECTOR, SUMS, CONSTRAINT, ADD)                                                        \
    __attribute__((target(ISA))) float NAME(int64_t rounds, int threads) {                                            \
        float total = 0;                                                                                              \
        _Pragma("omp parallel for num_threads(threads) schedule(static) reduction(+ : total)")                        \
        for (int part = 0; part < threads; part++) {                                                                  \
            VECTOR sums[SUMS] = {0}, x = {0};                                                                         \
            _Pragma("GCC unroll 24") for (int k = 0; k < SUMS; k++) __asm__ volatile("" : CONSTRAINT(sums[k]));       \
            for (int64_t i = 0; i < rounds; i++) {                                                                    \
                __asm__ volatile("" : CONSTRAINT(x));                                                                 \
                _Pragma("GCC unroll 24") for (int k = 0; k < SUMS; k++) sums[k] = ADD;                                \
            }                                                                                                         \
            for (int k = 0; k < SUMS; k++) total += sums[k][0];                                                       \
        }                                                                                                             \
        return total;                                                                                                 \
    }

DEFINE_LIMIT(limit_avx2, "avx2,fma", __m256, 12, "+x", _mm256_fmadd_ps(x, x, sums[k]))
DEFINE_LIMIT(limit_avx512, "avx512f", __m512, 24, "+v", _mm512_fmadd_ps(x, x, sums[k]))
DEFINE_LIMIT(limit_avx512_bf16, "avx512f,avx512bf16", __m512, 24, "+v",
             _mm512_dpbf16_ps(sums[k], (__m512bh)x, (__m512bh)x))
