/* Holders of many blocks at once, called through ctypes (kernels/block_pool.py) with the GIL: it takes microseconds.
 *
 * The arrays are those of engine/block_pool.py, which has the same in Python. A state has a bit per kind of holder
 * (together `held`) and one for content.
 */
#include <stdint.h>

typedef struct {
    uint8_t *states;       /* by block */
    int64_t *num_in_state; /* by state */
    int64_t *places;       /* by block, in the free queue; -1: not there */
    int64_t held;
} Pool;

static inline void set_state(const Pool *pool, int64_t block, int before, int after) {
    pool->states[block] = (uint8_t)after;
    pool->num_in_state[before]--;
    pool->num_in_state[after]++;
}

/* One more holder of the kind `bit`, counted in `counts`, for each block, as often as it is named. Returns how many
 * left the free queue. */
int64_t pdkv_hold(const Pool *pool, int32_t *counts, const int64_t *blocks, int64_t n, int64_t bit) {
    int64_t num_taken = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t block = blocks[i];
        int before = pool->states[block];
        counts[block]++;
        if (!(before & pool->held)) {
            pool->places[block] = -1;
            num_taken++;
        }
        if (!(before & bit))
            set_state(pool, block, before, before | (int)bit);
    }
    return num_taken;
}

/* One holder less, the last block first. Whom nobody holds any more goes to `cached` or, without content, to `empty`;
 * `num_free` says how many. Returns -1, or the place in `blocks` of one without such a holder: those before it keep
 * theirs, those behind it do not. */
int64_t pdkv_release(const Pool *pool, int32_t *counts, const int64_t *blocks, int64_t n, int64_t bit, int64_t *cached,
                     int64_t *empty, int64_t *num_free) {
    num_free[0] = num_free[1] = 0;
    for (int64_t i = n - 1; i >= 0; i--) {
        int64_t block = blocks[i];
        if (counts[block] <= 0)
            return i;
        if (--counts[block])
            continue;
        int before = pool->states[block], after = before & ~(int)bit;
        set_state(pool, block, before, after);
        if (after & pool->held)
            continue;
        if (after)
            cached[num_free[0]++] = block;
        else
            empty[num_free[1]++] = block;
    }
    return -1;
}
