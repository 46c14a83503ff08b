/* Calls the kernels of one file with numbers that are the same on every machine, and prints what they give, a line for
 * each call: "bits" and a hash, which must be equal wherever it runs, or "near" and numbers that may differ by rounding.
 * KERNEL is that file, and one of LINEAR, PASSES, PROMPTS, HOST, SAMPLER and RANS is defined.
 */
#define _GNU_SOURCE
#include KERNEL
#include <stdio.h>
#include <stdlib.h>

static uint64_t state;

static uint32_t draw_word(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)(state * 0x2545f4914f6cdd1d >> 32);
}

static void *room_of(size_t bytes) {
    char *memory = aligned_alloc(64, (bytes + 4095) / 64 * 64);
    memset(memory, 0, bytes);
    return memory;
}

/* Numbers in [-1, 1), each a whole number of 2^-20, which bfloat16 rounds. */
static float *floats(int64_t count) {
    float *to = room_of((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) to[i] = ((float)(draw_word() >> 11) - 1048576.0f) / 1048576.0f;
    return to;
}

static uint16_t *narrow(int64_t count) {
    float *from = floats(count);
    uint16_t *to = room_of((size_t)count * 2);
    for (int64_t i = 0; i < count; i++) to[i] = bfloat16_of(from[i]);
    return to;
}

static void *numbers(int64_t count, int64_t dtype) { return dtype == FLOAT32 ? (void *)floats(count) : narrow(count); }

static uint8_t *bytes(int64_t count) {
    uint8_t *to = room_of((size_t)count);
    for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)(draw_word() >> 7);
    return to;
}

static void print_bits(const char *name, const void *from, size_t count) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const uint8_t *)from)[i]) * 0x100000001b3;
    printf("bits %s %016llx\n", name, (unsigned long long)hash);
}

#ifndef LINEAR
static void print_near(const char *name, const void *from, int64_t count, int64_t dtype) {
    printf("near %s", name);
    for (int64_t i = 0; i < count; i++)
        printf(" %.9g", dtype == FLOAT32 ? ((const float *)from)[i] : float_of_bfloat16(((const uint16_t *)from)[i]));
    printf("\n");
}
#endif

#ifdef LINEAR
static layer make_layer(int64_t inputs, int64_t outputs, int64_t dtype, int64_t kind, int64_t group) {
    const int64_t size = kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1, per_chunk = 64 / size;
    const int64_t chunks = (inputs + per_chunk - 1) / per_chunk, panels = (outputs + 31) / 32;
    const int64_t groups = group ? (chunks + group - 1) / group : 1;
    char *rows = size == 1 ? (char *)bytes(inputs * outputs) : numbers(inputs * outputs, kind);
    for (int64_t i = 0; kind == FP8 && i < inputs * outputs; i++) rows[i] &= (char)0xbf; /* no NaN */
    char *packed = room_of((size_t)(panels * chunks) * 2048);
    pdkv_linear_pack(rows, outputs, inputs * size, inputs * size, size == 1, packed, 0, 1);
    return (layer){packed, floats(outputs), inputs, outputs, dtype, kind, size == 1 ? floats(panels * groups * 32) : NULL, group};
}

static void call_linear(int64_t rows, int64_t dtype, int64_t kind, int64_t group, int64_t before) {
    const int64_t inputs = 300, outputs = 70, columns = before >= GATED ? 2 * inputs : inputs;
    const layer l = make_layer(inputs, outputs, dtype, kind, group);
    void *x = numbers(rows * columns, dtype), *residual = numbers(rows * outputs, dtype), *out = room_of((size_t)(rows * outputs) * 4);
    char *scratch = room_of((size_t)(rows * pdkv_linear_row_bytes(&l)));
    pdkv_linear(&l, x, columns, residual, outputs, out, rows, scratch, 1, before, floats(inputs), 1e-5);
    char name[80];
    sprintf(name, "linear-%d-rows-of-%d-by-%d-%d-%d", (int)rows, (int)dtype, (int)kind, (int)group, (int)before);
    print_bits(name, out, (size_t)bytes_of(rows * outputs, dtype));
}

static void call_experts(int64_t dtype) {
    enum { HIDDEN = 72, NEURONS = 40, NUM = 5, ROWS = 33, CHOSEN = 2 };
    layer gates[NUM], downs[NUM];
    const layer *gate_up[NUM], *down[NUM];
    int64_t chosen[ROWS * CHOSEN];
    for (int i = 0; i < NUM; i++) {
        gates[i] = make_layer(HIDDEN, 2 * NEURONS, dtype, dtype, 0), downs[i] = make_layer(NEURONS, HIDDEN, dtype, dtype, 0);
        gates[i].bias = downs[i].bias = NULL, gate_up[i] = &gates[i], down[i] = &downs[i];
    }
    for (int i = 0; i < ROWS * CHOSEN; i++) chosen[i] = (i * 3) % NUM;
    void *out = room_of(ROWS * HIDDEN * 4);
    const experts a = {
        gate_up, down, numbers(ROWS * HIDDEN, dtype), numbers(ROWS * HIDDEN, dtype), chosen, floats(ROWS * CHOSEN), out,
        room_of(ROWS * CHOSEN * 2 * NEURONS * 4), room_of(ROWS * CHOSEN * HIDDEN * 4), room_of(126 * 4096),
        room_of((NUM + 2 * ROWS * CHOSEN) * 8), NUM, ROWS, CHOSEN, 1,
    };
    pdkv_experts(&a);
    print_bits(dtype == FLOAT32 ? "experts" : "experts-bfloat16", out, (size_t)bytes_of(ROWS * HIDDEN, dtype));
}

static void call_all(void) {
    const int64_t rows[] = {1, 3, 7, 29, 130};
    for (int i = 0; i < 5; i++)
        for (int64_t before = AS_THEY_ARE; before <= GATED_GELU; before++) {
            call_linear(rows[i], FLOAT32, FLOAT32, 0, before);
            call_linear(rows[i], FLOAT32, BFLOAT16, 0, before);
            call_linear(rows[i], BFLOAT16, BFLOAT16, 0, before);
            for (int64_t kind = INT8; kind <= FP8; kind++)
                for (int64_t group = 0; group < 2; group++) {
                    call_linear(rows[i], FLOAT32, kind, group, before);
                    call_linear(rows[i], BFLOAT16, kind, group, before);
                }
        }
    call_experts(FLOAT32);
    call_experts(BFLOAT16);
}
#endif

#ifdef PASSES
static void call_all(void) {
    for (int64_t dtype = FLOAT32; dtype <= BFLOAT16; dtype++) {
        for (int64_t what = NORMED; what <= GATED_GELU; what++) {
            const int64_t rows = 9, size = 77, stride = what == NORMED ? size : 2 * size;
            void *out = room_of((size_t)(rows * size) * 4);
            const passes a = {numbers(rows * stride, dtype), out, floats(size), what, rows, size, stride, dtype, 1, 1e-5};
            pdkv_pass(&a);
            print_bits(what == NORMED ? "norm" : what == GATED ? "silu" : "gelu", out, (size_t)bytes_of(rows * size, dtype));
        }
        const int64_t rows = 5, heads = 4, kv_heads = 2, size = 40, positions = 9, rotary = 24, block = 4;
        int64_t at[] = {8, 0, 3, 7, 1}, blocks[] = {2, 0, 1}, offsets[] = {0, 3, 1};
        void *qkv = numbers(rows * (heads + 2 * kv_heads) * size, dtype), *kv = room_of(3 * 2 * 2 * 4 * 40 * 4);
        const head_pass a = {
            qkv, floats(size), NULL, numbers(positions * rotary, dtype), numbers(positions * rotary, dtype), at, kv, blocks,
            offsets, rows, 3, heads, kv_heads, size, rotary, block, 2 * kv_heads * block * size, dtype, 1, 1e-6f, 1e-6f,
        };
        pdkv_pass_heads(&a);
        print_bits("heads", qkv, (size_t)bytes_of(rows * (heads + 2 * kv_heads) * size, dtype));
        print_bits("written", kv, (size_t)bytes_of(3 * 2 * kv_heads * block * size, dtype));
    }
}
#endif

#if defined(PROMPTS) || defined(HOST)
enum { HEADS = 6, KV_HEADS = 2, SIZE = 48, PAGE = 16, PAGES = 40, ROW = (HEADS + 2 * KV_HEADS) * SIZE };

static int64_t *shuffled(void) {
    int64_t *table = room_of(PAGES * 8);
    for (int64_t i = 0; i < PAGES; i++) {
        const int64_t j = draw_word() % (i + 1);
        table[i] = table[j], table[j] = i;
    }
    return table;
}
#endif

#ifdef PROMPTS
static void call_all(void) {
    for (int64_t dtype = FLOAT32; dtype <= BFLOAT16; dtype++)
        for (int64_t window = 0; window < 100; window += 70) {
            int64_t rows[] = {0, 30}, positions[] = {200, 7}, counts[] = {30, 3}, tables[] = {0, 20};
            char *kv = numbers(PAGES * 2 * KV_HEADS * PAGE * SIZE, dtype), *out = room_of(33 * HEADS * SIZE * 4);
            const prompts a = {
                kv, kv + bytes_of(KV_HEADS * PAGE * SIZE, dtype), numbers(33 * ROW, dtype), out, rows, rows, positions, counts,
                tables, shuffled(), 2, HEADS, KV_HEADS, SIZE, PAGE, 2 * KV_HEADS * PAGE * SIZE, ROW, window, dtype, 1,
                room_of((size_t)pdkv_prompt_room_bytes()), 0.15, window ? 2.0 : 0.0,
            };
            pdkv_attend_prompts(&a);
            if (dtype == FLOAT32) print_bits("prompts", out, 33 * HEADS * SIZE * 4);
            else print_near("prompts-bfloat16", out, 33 * HEADS * SIZE, dtype);
        }
}
#endif

#ifdef HOST
void pdkv_digest(uint64_t *, const uint64_t *, const int64_t *, char *, const char *, const int64_t *, const int64_t *, int64_t,
                 int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

static void call_all(void) {
    for (int64_t dtype = FLOAT32; dtype <= FLOAT16; dtype++) {
        int64_t rows[] = {0, 1, 2}, lens[] = {201, 5, 64}, hidden[] = {3, 0, 0}, tables[] = {0, 15, 30};
        char *kv = numbers(PAGES * 2 * KV_HEADS * PAGE * SIZE, dtype), *out = room_of(3 * HEADS * SIZE * 4);
        uint16_t *qkv = numbers(3 * ROW, dtype);
        if (dtype == FLOAT16) /* their bits are those of small numbers */
            for (int64_t i = 0; i < PAGES * 2 * KV_HEADS * PAGE * SIZE; i++) ((uint16_t *)kv)[i] &= 0xbbff;
        if (dtype == FLOAT16)
            for (int64_t i = 0; i < 3 * ROW; i++) qkv[i] &= 0xbbff;
        const attention a = {
            kv, kv + bytes_of(KV_HEADS * PAGE * SIZE, dtype), qkv, out, rows, rows, lens, hidden, tables, shuffled(), 3, HEADS,
            KV_HEADS, SIZE, PAGE, 2 * KV_HEADS * PAGE * SIZE, ROW, dtype, 1, 0.15, dtype == BFLOAT16 ? 2.0 : 0.0,
        };
        if (pdkv_attend(&a)) printf("bits failed\n");
        if (dtype == FLOAT16)
            for (int64_t i = 0; i < 3 * HEADS * SIZE; i++) ((uint16_t *)out)[i] = bfloat16_of(float_of(((uint16_t *)out)[i]));
        print_near(dtype == FLOAT32 ? "attention" : "attention-of-halves", out, 3 * HEADS * SIZE, dtype == FLOAT32 ? FLOAT32 : BFLOAT16);
    }
    const int64_t sizes[] = {1, 64, 100, 4096, 5000};
    for (int i = 0; i < 5; i++) {
        int64_t offsets[] = {0, 30000, 15000}, places[] = {15000, 0, 30001};
        uint64_t digests[6] = {0}, seeds[] = {11, 12, 13, 14};
        char *from = (char *)bytes(60000), *to = room_of(60000);
        pdkv_digest(digests, seeds, NULL, i % 2 ? to : NULL, from, places, offsets, 3, 2, 6000, 6000, 2, 7000, 7000, sizes[i]);
        print_bits("digests", digests, sizeof digests);
        if (i % 2) print_bits("copied", to, 60000);
        pdkv_copy(to, from, places, offsets, 3, 2, 6000, 6000, 2, 7000, 7000, sizes[i]);
        print_bits("copied", to, 60000);
    }
}
#endif

#ifdef SAMPLER
static void call_all(void) {
    enum { ROWS = 12, VOCAB = 5003 };
    for (int64_t dtype = FLOAT32; dtype <= BFLOAT16; dtype++)
        for (int filter = 0; filter < 5; filter++) {
            double *table = room_of(7 * ROWS * 8);
            uint64_t *keys = (uint64_t *)(table + 4 * ROWS);
            int64_t tokens[ROWS];
            for (int i = 0; i < ROWS; i++) {
                table[i] = 0.0625 * (1 + i % 4), table[ROWS + i] = filter == 1 ? 50 : filter == 4 ? 700 : 0;
                table[2 * ROWS + i] = filter == 2 ? 0.9 : filter == 4 ? 0.8 : 1.0;
                table[3 * ROWS + i] = filter == 3 ? -4.0 : -INFINITY;
                keys[i] = draw_word(), keys[ROWS + i] = (uint64_t)i % 3, keys[2 * ROWS + i] = draw_word();
            }
            float *logits = numbers(ROWS * VOCAB, dtype);
            if (pdkv_race(logits, table, tokens, ROWS, VOCAB, VOCAB, dtype, 1)) printf("bits failed\n");
            print_bits("race", tokens, sizeof tokens);
            if (dtype != FLOAT32) continue;
            int64_t rows[] = {3, 8}, places[] = {1, 0};
            float p[] = {1.1f, 1.3f, 0.5f, 0.0f, 0.25f, 0.125f};
            int32_t *counts = room_of(2 * VOCAB * 4);
            for (int i = 0; i < 2 * VOCAB; i++) counts[i] = draw_word() % 9 ? 0 : (int32_t)(draw_word() % 8);
            pdkv_penalize(logits, counts, rows, places, p, 2, VOCAB, VOCAB, 1);
            pdkv_mask(logits, rows, (uint32_t *)bytes(2 * ((VOCAB + 31) / 32) * 4), 2, VOCAB, VOCAB, 1);
            print_bits("penalized-and-masked", logits, ROWS * VOCAB * 4);
        }
}
#endif

#ifdef RANS
static void call_all(void) {
    enum { ROWS = 40, COLUMNS_ = 19, COUNT = ROWS * COLUMNS_, SYMBOLS = 16 };
    rans_symbol *table = room_of(RANS_TABLES * 256 * sizeof(rans_symbol));
    uint32_t *slots = room_of(RANS_TABLES * 4096 * 4);
    for (int t = 0; t < RANS_TABLES; t++)
        for (uint32_t s = 0, start = 0; s < SYMBOLS; s++) {
            const uint32_t frequency = s == SYMBOLS - 1 ? 4096 - start : 17 + 15 * s;
            table[t * 256 + s] = (rans_symbol){((uint64_t)1 << 44) / frequency + 1, frequency, start};
            for (uint32_t i = 0; i < frequency; i++) slots[t * 4096 + start + i] = s << 24 | frequency << 12 | i;
            start += frequency;
        }
    uint8_t *symbols = bytes(COUNT), *contexts = bytes(COUNT), *again = room_of(COUNT);
    for (int i = 0; i < COUNT; i++) symbols[i] %= SYMBOLS, contexts[i] %= RANS_TABLES;
    const rans_rows rows = {contexts, ROWS, COLUMNS_, 4};
    uint32_t states[RANS_LANES];
    uint16_t *words = room_of(COUNT * 2);
    const int64_t num_words = pdkv_rans_encode(words, COUNT, states, symbols, &rows, table);
    print_bits("words", words + COUNT - num_words, (size_t)num_words * 2);
    print_bits("states", states, sizeof states);
    if (pdkv_rans_decode(again, states, (char *)(words + COUNT - num_words), num_words, &rows, slots)) printf("bits damaged\n");
    printf("bits round-trip %d\n", memcmp(symbols, again, COUNT));
}
#endif

int main(void) {
    state = 0x9e3779b97f4a7c15;
    call_all();
    return 0;
}
