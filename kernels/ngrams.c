/* Guesses by looking up the last tokens of a text in texts, called through ctypes (kernels/ngrams.py, which says what
 * is found) with the GIL: it takes microseconds.
 */
#include <stdint.h>

enum { PROBES = 32, HINTED = 1 << 20 };

typedef struct {
    const int32_t *tokens;
    int32_t *previous, *table; /* by position; by hash: the last position behind a gram, 0 for none */
    int64_t size, num_indexed, bits, gram, last_at, last_size;
} Text;

typedef struct {
    const int32_t *tokens; /* whose last ones are looked up */
    int64_t size, text, min, max, follows, place, wanted;
} Job;

static inline uint32_t hash(const int32_t *end, int64_t gram, int64_t bits) {
    uint32_t h = 0;
    for (int64_t i = 1; i <= gram; i++)
        h = (h ^ (uint32_t)end[-i]) * 0x9E3779B1u;
    return h >> (32 - bits);
}

static void extend(Text *text, int64_t stop) {
    int64_t p = text->num_indexed < text->gram ? text->gram : text->num_indexed + 1;
    for (; p < stop; p++) {
        int32_t *at = text->table + hash(text->tokens + p, text->gram, text->bits);
        text->previous[p] = *at;
        *at = (int32_t)p;
        text->num_indexed = p;
    }
}

static inline int64_t common(const int32_t *a, int64_t m, const int32_t *b, int64_t n, int64_t most) {
    int64_t count = 0;
    most = most < m ? most : m;
    most = most < n ? most : n;
    while (count < most && a[-1 - count] == b[-1 - count])
        count++;
    return count;
}

/* The length of the best match; *at is the position behind it. */
static int64_t find(Text *text, const Job *job, int64_t *at) {
    const int32_t *end = job->tokens + job->size;
    int64_t best = 0;
    if (job->follows) {
        int64_t p = text->last_at + job->size - text->last_size;
        text->last_size = job->size;
        text->last_at = p;
        if (job->size && p > 0 && p < text->size && text->tokens[p - 1] == end[-1]) {
            *at = p;
            return HINTED;
        }
    }
    if (job->size < text->gram)
        return 0;
    int64_t p = text->table[hash(end, text->gram, text->bits)];
    for (int probe = 0; p > 0 && probe < PROBES && best < job->max; probe++, p = text->previous[p]) {
        int64_t length = p < text->size ? common(text->tokens + p, p, end, job->size, job->max) : 0;
        if (length > best) {
            best = length;
            *at = p;
        }
    }
    if (best < job->min)
        return 0;
    if (job->follows)
        text->last_at = *at;
    return best;
}

/* For each of `n` jobs: looks up its tokens, and leaves guesses in row `place` of `guesses` (rows of `width`) if no
 * earlier job of that place had a longer match. `counts` and `lengths` are by place, 0 at first.
 */
void pdkv_look_up(Text *texts, const Job *jobs, int64_t n, int32_t *guesses, int64_t width, int64_t *counts,
                  int64_t *lengths, double factor) {
    for (int64_t i = 0; i < n; i++) {
        const Job *job = jobs + i;
        Text *text = texts + job->text;
        int is_own = text->tokens == job->tokens;
        if (is_own)
            text->size = job->size;
        extend(text, is_own ? text->size : text->size + 1);
        int64_t at = 0, length = find(text, job, &at);
        if (length <= lengths[job->place])
            continue;
        int64_t wanted = job->wanted < width ? job->wanted : width, room = text->size - at, back = room;
        if (factor > 0 && length < HINTED && (double)wanted > factor * (double)length)
            wanted = (int64_t)(factor * (double)length) + 1;
        if (!is_own && wanted > room)
            wanted = room;
        int32_t *out = guesses + job->place * width;
        int64_t count = 0; /* a text that repeats itself goes on so, for longer than it is */
        for (; count < wanted; count++) {
            int32_t token = count < back ? text->tokens[at + count] : out[count - back];
            if (token < 0)
                break; /* the end of an output */
            out[count] = token;
        }
        if (count) {
            counts[job->place] = count;
            lengths[job->place] = length;
        }
    }
}
