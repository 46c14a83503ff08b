/* What prompts.c does between products: packing keys and values, and weighing scores. Included once for each instruction
 * set, behind lanes.h and as that is. IS_PAIRED: bfloat16 stays what it is, in pairs; else it is widened. Of each set
 * prompts.c says WIDTH, how many floats are worked on at once, FOR_ISA(vector), FOR_ISA(wholes) and functions of them.
 */
#define ROW_INLINE static inline __attribute__((always_inline, target(ISA)))
#define vector FOR_ISA(vector)
#define wholes FOR_ISA(wholes)
#define PER_WORD (IS_PAIRED ? 2 : 1)         /* numbers in 4 bytes */
#define CHUNK_KEYS (16 * PER_WORD)           /* of values */
#define VALUE_CHUNKS (KEYS / CHUNK_KEYS)     /* of a tile */

/* 16 words from the i-th of a head's on: floats, or pairs of bfloat16 as they are; zeros behind its end. */
ROW_INLINE words16 FOR_ISA(read_words)(const prompts *a, const char *from, int64_t i, const int dtype) {
    const int64_t count = a->head_size / PER_WORD - i;
    const int as = IS_PAIRED ? FLOAT32 : dtype; /* a pair is as long as a float */
    return (words16)(count >= 16 ? FOR_ISA(load)(from, i, 16, as) : FOR_ISA(load)(from, i, count, as));
}

/* Keys [from, to) of the tile, with zeros for those beside them up to multiples of 16: panels of 32 keys, of chunks of 16
 * words. */
ROW_INLINE void FOR_ISA(pack_keys)(const prompts *a, const int64_t *places, int64_t from, int64_t to, char *packed,
                                   const int dtype) {
    const int64_t chunks = query_chunks(a, PER_WORD);
    for (int64_t key = from / 16 * 16; key < to; key += 16) {
        char *const panel = packed + key / COLUMNS * chunks * CHUNK_BYTES + key % COLUMNS * 4;
        for (int64_t c = 0; c < chunks; c++) {
            words16 rows[16];
            for (int64_t i = 0; i < 16; i++) {
                rows[i] = (words16){0};
                if (key + i < from || key + i >= to) continue;
                const char *const own = (const char *)a->keys + bytes_of(places[key + i], dtype);
                rows[i] = FOR_ISA(read_words)(a, own, c * 16, dtype);
            }
            FOR_ISA(write_transposed)(rows, panel + c * CHUNK_BYTES);
        }
    }
}

/* Values [from, to) of the tile, with zeros for the others up to `stop`, a multiple of 32: panels of 32 of a head's
 * numbers, of chunks of 16 keys, or of 16 pairs. Whether all of them are finite. */
ROW_INLINE int FOR_ISA(pack_values)(const prompts *a, const int64_t *places, int64_t from, int64_t to, int64_t stop,
                                    char *packed, const int dtype) {
    vector bad = {0};
    for (int64_t step = 0; step < stop / PER_WORD; step++)
        for (int64_t d = 0; d < a->head_size; d += WIDTH) {
            wholes words = {0};
            for (int64_t i = 0; i < PER_WORD; i++) {
                const int64_t key = step * PER_WORD + i;
                if (key < from || key >= to) continue;
                const vector numbers = FOR_ISA(get)(a->values, places[key] + d, dtype);
                bad += numbers - numbers; /* 0, or NaN */
                words |= IS_PAIRED && i == 0 ? FOR_ISA(lower_halves)((wholes)numbers) : (wholes)numbers;
            }
            char *const panel = packed + d / COLUMNS * VALUE_CHUNKS * CHUNK_BYTES + d % COLUMNS * 4;
            memcpy(panel + step * 128, &words, sizeof words);
        }
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) sum += bad[i];
    return sum == 0.0f;
}

/* Some rows' queries, chunk by chunk. */
ROW_INLINE void FOR_ISA(lay_out_queries)(const prompts *a, const piece *of, const some_rows *s, const int dtype) {
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t at = (a->q_rows[of->run] + query_of(a, of, s, r)) * a->row_stride + head_of(a, of, s, r) * a->head_size;
        for (int64_t c = 0; c < query_chunks(a, PER_WORD); c++) {
            const words16 words = FOR_ISA(read_words)(a, (const char *)a->qkv + bytes_of(at, dtype), c * 16, dtype);
            memcpy(s->queries + (c * s->rows + r) * 64, &words, sizeof words);
        }
    }
}

/* The highest of one row's scores [from, to), not below `top`; the others become -inf. NaN is none. */
ROW_INLINE float FOR_ISA(top_of)(float *scores, int64_t rows, int64_t panels, int64_t from, int64_t to, float top) {
    vector most = (vector){0} + top;
    for (int64_t i = 0; i < panels * COLUMNS; i += WIDTH) {
        vector numbers;
        float *const own = scores + i / COLUMNS * rows * COLUMNS + i % COLUMNS;
        memcpy(&numbers, own, sizeof numbers);
        if (i < from || i + WIDTH > to) {
            wholes key;
            for (int l = 0; l < WIDTH; l++) key[l] = (int)i + l;
            const wholes seen = (key >= (int)from) & (key < (int)to);
            numbers = (vector)(((wholes)numbers & seen) | ((wholes)((vector){0} - INFINITY) & ~seen));
            memcpy(own, &numbers, sizeof numbers);
        }
        most = FOR_ISA(larger)(numbers, most);
    }
    return FOR_ISA(highest)(most);
}

/* One row's weights, 2^(score * scale - top), in chunks of 64 bytes for each row. They are added to its 16 totals, lane by
 * lane, which are multiplied by `earlier` first. */
ROW_INLINE void FOR_ISA(weigh)(const float *scores, int64_t rows, int64_t panels, float scale, float top, float earlier,
                               float *totals, char *weights) {
    vector sums[16 / WIDTH] = {{0}};
    for (int64_t p = 0; p < panels; p++)
        for (int i = 0; i < COLUMNS; i += WIDTH) {
            vector numbers;
            memcpy(&numbers, scores + p * rows * COLUMNS + i, sizeof numbers);
            const vector weight = FOR_ISA(power_of_two)(FOR_ISA(fused)(numbers, (vector){0} + scale, (vector){0} - top));
            sums[i % 16 / WIDTH] += weight;
            const int64_t key = p * COLUMNS + i;
            FOR_ISA(put_weights)(weights + key / CHUNK_KEYS * rows * 64 + key % CHUNK_KEYS * (4 / PER_WORD), weight);
        }
    for (int l = 0; l < 16; l += WIDTH) {
        vector total;
        memcpy(&total, totals + l, sizeof total);
        total = total * earlier + sums[l / WIDTH];
        memcpy(totals + l, &total, sizeof total);
    }
}

/* Weights of some rows' scores; what was summed up before is multiplied by what it weighs now. Whether all rows see all
 * keys of these panels. */
ROW_INLINE int FOR_ISA(weigh_rows)(const prompts *a, const piece *of, some_rows *s, const keys_tile *t,
                                   const int64_t panels) {
    float before[16], earlier[16] = {0};
    int see_all = 1;
    memcpy(before, s->tops, sizeof before);
    for (int64_t r = 0; r < s->rows; r++) {
        const keys_seen seen = keys_of(a, of, s, t, r);
        see_all &= seen.from == 0 && seen.to == panels * COLUMNS;
        s->tops[r] = FOR_ISA(top_of)(t->scores + r * COLUMNS, s->rows, panels, seen.from, seen.to, before[r]);
    }
    for (int l = 0; l < 16; l += WIDTH) {
        vector then, now;
        memcpy(&then, before + l, sizeof then), memcpy(&now, s->tops + l, sizeof now);
        now = FOR_ISA(power_of_two)((then - now) * t->scale);
        memcpy(earlier + l, &now, sizeof now);
    }
    for (int64_t r = 0; r < s->rows; r++) {
        const float top = s->tops[r] * t->scale;
        FOR_ISA(weigh)(t->scores + r * COLUMNS, s->rows, panels, t->scale, top < -FLT_MAX ? -FLT_MAX : top, earlier[r],
                       s->totals + r * 16, t->weights + r * 64);
        if (!s->has_begun || earlier[r] == 1.0f) continue;
        for (int64_t d = 0; d < a->head_size; d += WIDTH) {
            float *const own = s->sums + (d / COLUMNS * s->rows + r) * COLUMNS + d % COLUMNS;
            vector sums;
            memcpy(&sums, own, sizeof sums);
            sums *= earlier[r];
            memcpy(own, &sums, sizeof sums);
        }
    }
    return see_all;
}

/* Add weighed values, of panels of 32 keys, to sums of `rows` rows, which are among `stride`. */
ROW_INLINE void FOR_ISA(add_values)(const prompts *a, const some_rows *s, const char *values, const char *weights,
                                    float *sums, int64_t rows, int64_t panels, run_tile *run) {
    for (int64_t p = 0; p * COLUMNS < a->head_size; p++) {
        const tile product = {.weights = values + p * VALUE_CHUNKS * CHUNK_BYTES, .x = weights,
                              .sums = sums + p * s->rows * COLUMNS, .chunks = panels * COLUMNS / CHUNK_KEYS,
                              .is_first = !s->has_begun, .turn = -1};
        run(&product, (int)rows);
    }
}

/* Some rows by one tile of keys. */
ROW_INLINE void FOR_ISA(attend_rows)(const prompts *a, const piece *of, some_rows *s, const keys_tile *t, run_tile *run,
                                     const int dtype) {
    const int64_t chunks = query_chunks(a, PER_WORD), rows = s->rows, stop = keys_of(a, of, s, t, rows - 1).to;
    const int64_t panels = (stop + COLUMNS - 1) / COLUMNS;
    if (stop <= 0 || keys_of(a, of, s, t, 0).from >= KEYS) return;
    for (int64_t p = 0; p < panels; p++) {
        const tile product = {.weights = t->keys + p * chunks * CHUNK_BYTES, .x = s->queries,
                              .sums = t->scores + p * rows * COLUMNS, .chunks = chunks, .is_first = 1, .turn = -1};
        run(&product, (int)rows);
    }
    const int see_all = panels == KEYS / COLUMNS ? FOR_ISA(weigh_rows)(a, of, s, t, KEYS / COLUMNS)
                                                 : FOR_ISA(weigh_rows)(a, of, s, t, panels);
    if (see_all || t->is_finite)
        FOR_ISA(add_values)(a, s, t->values, t->weights, s->sums, rows, panels, run);
    else /* a weight of 0 does not keep out what is not finite: every row gets the values that it sees */
        for (int64_t r = 0; r < rows; r++) {
            const keys_seen seen = keys_of(a, of, s, t, r);
            FOR_ISA(pack_values)(a, t->places, seen.from, seen.to, panels * COLUMNS, t->own_values, dtype);
            for (int64_t c = 0; c < VALUE_CHUNKS; c++)
                memcpy(t->own_weights + c * 64, t->weights + (c * rows + r) * 64, 64);
            FOR_ISA(add_values)(a, s, t->own_values, t->own_weights, s->sums + r * COLUMNS, 1, panels, run);
        }
    s->has_begun = 1;
}

ROW_INLINE void FOR_ISA(write_rows)(const prompts *a, const piece *of, const some_rows *s, const int dtype) {
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t query = a->out_rows[of->run] + query_of(a, of, s, r);
        const int64_t at = (query * a->heads + head_of(a, of, s, r)) * a->head_size;
        float lanes[16];
        memcpy(lanes, s->totals + r * 16, sizeof lanes);
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
        for (int64_t d = 0; d < a->head_size; d += 16) {
            const vec16 sums = FOR_ISA(load)(s->sums, (d / COLUMNS * s->rows + r) * COLUMNS + d % COLUMNS, 16, FLOAT32);
            FOR_ISA(store)(a->out, at + d, 16, sums / lanes[0], dtype);
        }
    }
}

/* A piece's queries by all keys that they see. */
ROW_INLINE void FOR_ISA(attend_piece)(const prompts *a, const piece *of, room *room, const int dtype) {
    run_tile *const run = tile_kernel(a->level, IS_PAIRED);
    const division by = divide(of->count * group_of(a), tile_rows(a->level));
    const int64_t chunks = query_chunks(a, PER_WORD), width = (a->head_size + COLUMNS - 1) / COLUMNS * COLUMNS;
    some_rows all[MAX_TILES];
    for (int64_t i = 0; i < by.tiles; i++) {
        const int64_t row = first_row(by, i), rows = first_row(by, i + 1) - row;
        all[i] = (some_rows){.row = row, .rows = rows, .queries = room->queries + row * chunks * 64,
                             .sums = room->sums + row * width, .totals = room->totals + row * 16};
        FOR_ISA(lay_out_queries)(a, of, &all[i], dtype);
        for (int r = 0; r < 16; r++) all[i].tops[r] = -FLT_MAX;
        memset(all[i].totals, 0, (size_t)rows * 16 * sizeof(float));
    }
    const int64_t earliest = a->positions[of->run] + of->first, stop = earliest + of->count;
    const int64_t begin = a->window && earliest + 1 > a->window ? earliest + 1 - a->window : 0;
    for (int64_t first = begin / KEYS * KEYS; first < stop; first += KEYS) {
        const int64_t from = begin > first ? begin - first : 0, to = stop - first < KEYS ? stop - first : KEYS;
        if (first <= begin) find_places(a, of, first, from, to, room->places);
        FOR_ISA(pack_keys)(a, room->places, from, to, room->keys, dtype);
        const int64_t padded = (to + COLUMNS - 1) / COLUMNS * COLUMNS;
        const int is_finite = FOR_ISA(pack_values)(a, room->places, from, to, padded, room->values, dtype);
        const keys_tile t = {first, is_finite, (float)(a->scale * 1.4426950408889634), room->places, room->keys,
                             room->values, room->own_values, room->weights, room->own_weights, room->scores};
        const int64_t rest = stop - first - KEYS, count = rest < 0 ? 0 : rest < KEYS ? rest : KEYS;
        find_places(a, of, first + KEYS, 0, count, room->next_places);
        for (int64_t i = 0; i < by.tiles; i++) {
            fetch(a, room->next_places, i * count / by.tiles, (i + 1) * count / by.tiles, dtype);
            FOR_ISA(attend_rows)(a, of, &all[i], &t, run, dtype);
        }
        memcpy(room->places, room->next_places, sizeof room->places);
    }
    for (int64_t i = 0; i < by.tiles; i++) FOR_ISA(write_rows)(a, of, &all[i], dtype);
}

static __attribute__((target(ISA))) void FOR_ISA(attend_any_piece)(const prompts *a, const piece *of, room *room) {
    if (IS_PAIRED || a->dtype == BFLOAT16)
        FOR_ISA(attend_piece)(a, of, room, BFLOAT16);
    else
        FOR_ISA(attend_piece)(a, of, room, FLOAT32);
}

#undef ROW_INLINE
#undef vector
#undef wholes
#undef PER_WORD
#undef CHUNK_KEYS
#undef VALUE_CHUNKS
