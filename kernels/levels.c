/* How many of the levels that setup.py compiles for this processor has, the lowest first: by CPUID alone. */
#include <stdint.h>

int64_t pdkv_num_levels(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("x86-64-v2")) return 0;
    if (!__builtin_cpu_supports("x86-64-v3")) return 1;
    if (!__builtin_cpu_supports("x86-64-v4")) return 2;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") ? 4 : 3;
#else
    return 1;
#endif
}
