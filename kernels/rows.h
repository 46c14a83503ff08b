/* What happens to a row between linear layers: RMSNorm, silu(gate) * up, rotation and KV write. In float32, rounded where torch rounds.
 *
 * passes.c includes it once for each instruction set, behind lanes.h.
 * Compiled with -ffp-contract=off: each operation is rounded by itself and sums have a fixed order, so that a row's bits
 * are the same with every instruction set, whoever computes it and beside whatever rows.
 */
#define ROW_INLINE static inline __attribute__((always_inline, target(ISA)))

/* 1 / sqrt(mean(x * x) + epsilon) */
ROW_INLINE float FOR_ISA(norm_scale)(const void *x, int64_t size, float epsilon, const int dtype) {
    vec16 sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 64 <= size; i += 64)
        for (int u = 0; u < 4; u++) {
            const vec16 numbers = FOR_ISA(load)(x, i + u * 16, 16, dtype);
            sums[u] += numbers * numbers;
        }
    for (int u = 0; u < 4; u++) {
        const vec16 numbers = FOR_ISA(load)(x, i + u * 16, size - i - u * 16, dtype);
        sums[u] += numbers * numbers;
    }
    const vec16 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float lanes[16];
    memcpy(lanes, &all, sizeof lanes);
    for (int width = 8; width; width /= 2)
        for (int u = 0; u < width; u++) lanes[u] += lanes[u + width];
    return 1.0f / sqrtf(lanes[0] / (float)size + epsilon);
}

/* silu(gate) * up, where silu(x) = x / (1 + exp(-x)); of exp(-|x|), which cannot overflow. */
ROW_INLINE vec16 FOR_ISA(gated)(vec16 gate, vec16 up, const int dtype) {
    const vec16 zero = {0};
    const ints16 is_negative = gate < zero;
    const vec16 power = FOR_ISA(exp_of)(FOR_ISA(where)(is_negative, gate, -gate));
    const vec16 silu = gate * (FOR_ISA(where)(is_negative, power, zero + 1.0f) / (power + 1.0f));
    return FOR_ISA(rounded)(silu, dtype) * up;
}

/* Numbers [i, i + 16) of what becomes of a row, `count` of them and zeros, not yet rounded. */
ROW_INLINE vec16 FOR_ISA(passed)(const row_pass *pass, const void *x, int64_t inputs, float scale, int64_t i, int64_t count,
                             const int dtype, const int what) {
    const vec16 numbers = FOR_ISA(load)(x, i, count, dtype);
    if (what == NORMED) return numbers * scale * FOR_ISA(load)(pass->norm, i, count, FLOAT32);
    return FOR_ISA(gated)(numbers, FOR_ISA(load)(x, inputs + i, count, dtype), dtype);
}

/* A row in chunks that begin `stride` bytes apart, with zeros behind its last number; `to_dtype` holds what it is rounded
 * to. One chunk that is not a multiple of 16 ends with its last number. */
ROW_INLINE void FOR_ISA(pass_row)(const row_pass *pass, const void *x, int64_t inputs, char *to, int64_t stride, int64_t chunk,
                              const int dtype, const int to_dtype, const int what) {
    const float scale = what == NORMED ? FOR_ISA(norm_scale)(x, inputs, pass->epsilon, dtype) : 0.0f;
    for (int64_t from = 0; from < inputs; from += chunk, to += stride)
        for (int64_t i = 0; i < chunk; i += 16) {
            const int64_t at = from + i, count = inputs - at;
            const vec16 numbers = count >= 16 ? FOR_ISA(passed)(pass, x, inputs, scale, at, 16, dtype, what)
                                              : FOR_ISA(passed)(pass, x, inputs, scale, at, count, dtype, what);
            if (chunk - i >= 16)
                FOR_ISA(store)(to, i, 16, to_dtype == dtype ? numbers : FOR_ISA(rounded)(numbers, dtype), to_dtype);
            else
                FOR_ISA(store)(to, i, chunk - i, to_dtype == dtype ? numbers : FOR_ISA(rounded)(numbers, dtype), to_dtype);
        }
}

/* pass_row for what is known when it is called. */
static __attribute__((target(ISA))) void FOR_ISA(pass_any_row)(const row_pass *pass, const void *x, int64_t inputs, char *to, int64_t stride,
                                  int64_t chunk, int64_t dtype, int64_t to_dtype) {
    if (pass->what == NORMED && dtype == FLOAT32)
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, FLOAT32, FLOAT32, NORMED);
    else if (pass->what == NORMED && to_dtype == FLOAT32)
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, BFLOAT16, FLOAT32, NORMED);
    else if (pass->what == NORMED)
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, BFLOAT16, BFLOAT16, NORMED);
    else if (dtype == FLOAT32)
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, FLOAT32, FLOAT32, GATED);
    else if (to_dtype == FLOAT32)
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, BFLOAT16, FLOAT32, GATED);
    else
        FOR_ISA(pass_row)(pass, x, inputs, to, stride, chunk, BFLOAT16, BFLOAT16, GATED);
}

/* One head's vector, in place: normed where `norm` is, then rotated by half of its first `rotary` numbers. torch's roll,
 * product and addcmul round the product with the sine, then the sum. */
ROW_INLINE void FOR_ISA(rotate_head)(void *x, int64_t size, const float *norm, float epsilon, const void *cosines,
                                     const void *sines, int64_t rotary, const int dtype) {
    if (norm) {
        const row_pass pass = {NORMED, norm, epsilon};
        FOR_ISA(pass_row)(&pass, x, size, x, 0, size, dtype, dtype, NORMED);
    }
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t count = half - i, j = half + i;
        const vec16 a = FOR_ISA(load)(x, i, count, dtype), b = FOR_ISA(load)(x, j, count, dtype);
        const vec16 of_b = FOR_ISA(rounded)(b * FOR_ISA(load)(sines, i, count, dtype), dtype);
        const vec16 of_a = FOR_ISA(rounded)(a * FOR_ISA(load)(sines, j, count, dtype), dtype);
        FOR_ISA(store)(x, i, count, of_b + a * FOR_ISA(load)(cosines, i, count, dtype), dtype);
        FOR_ISA(store)(x, j, count, of_a + b * FOR_ISA(load)(cosines, j, count, dtype), dtype);
    }
}

ROW_INLINE void FOR_ISA(pass_heads)(const head_pass *a, int64_t row, const int dtype) {
    const int64_t size = a->head_size, rotated = a->heads + a->kv_heads, all = rotated + a->kv_heads;
    const int64_t angles = a->positions[row] * a->rotary_size, bytes = bytes_of(size, dtype);
    const char *const cosines = (const char *)a->cosines + bytes_of(angles, dtype);
    const char *const sines = (const char *)a->sines + bytes_of(angles, dtype);
    char *const x = (char *)a->qkv + row * all * bytes;
    for (int64_t h = 0; h < rotated; h++)
        FOR_ISA(rotate_head)(x + h * bytes, size, h < a->heads ? a->q_norm : a->k_norm,
                             h < a->heads ? a->q_epsilon : a->k_epsilon, cosines, sines, a->rotary_size, dtype);
    if (row >= a->written) return;
    const int64_t slot = a->block_ids[row] * a->block_stride + a->offsets[row] * size;
    char *const kv = (char *)a->kv + bytes_of(slot, dtype);
    for (int64_t h = 0; h < 2 * a->kv_heads; h++)
        memcpy(kv + h * a->block_size * bytes, x + (a->heads + h) * bytes, (size_t)bytes);
}

static __attribute__((target(ISA))) void FOR_ISA(pass_any_heads)(const head_pass *a, int64_t row) {
    if (a->dtype == FLOAT32)
        FOR_ISA(pass_heads)(a, row, FLOAT32);
    else
        FOR_ISA(pass_heads)(a, row, BFLOAT16);
}

#undef ROW_INLINE
