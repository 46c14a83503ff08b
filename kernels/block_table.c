/* Many blocks at once in the table of connectors/arena/block_table.py, which has the same for one block: what it says about
 * the order of stores holds here. Called through ctypes (kernels/block_table.py) with the GIL: it takes microseconds.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define NO_UNIT (-1)

/* What others read is written by one store of 8 bytes each. */
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELAXED)
#define FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)

typedef struct {
    int64_t *generations, *published; /* by block */
    uint8_t *keys;                    /* by unit */
    uint64_t *entries;                /* (num_sets, ways), tag << 32 | unit + 1, 0: empty */
    int64_t *slots;                   /* by unit, where its entry is; NO_UNIT: nowhere */
    int64_t num_blocks, keys_per_block, num_sets, ways;
} Table;

/* Enter a unit's key into the index. A full set loses an entry. */
static void insert(const Table *table, int64_t unit, const uint8_t *key) {
    uint32_t tag;
    uint64_t set;
    memcpy(&tag, key + 4, sizeof tag);
    memcpy(&set, key + 8, sizeof set);
    int64_t first = (int64_t)(set & (uint64_t)(table->num_sets - 1)) * table->ways, slot = first;
    while (slot < first + table->ways && table->entries[slot])
        slot++;
    if (slot == first + table->ways) {
        slot = first + unit % table->ways;
        table->slots[(table->entries[slot] & 0xffffffff) - 1] = NO_UNIT;
    }
    STORE(table->entries[slot], (uint64_t)tag << 32 | (uint64_t)(unit + 1));
    table->slots[unit] = slot;
}

/* Block i of a list; -1, with an exception set: it is none of the table's. */
static int64_t block_of(const Table *table, PyObject *blocks, Py_ssize_t i) {
    int64_t block = PyLong_AsLongLong(PyList_GET_ITEM(blocks, i));
    if (block >= 0 && block < table->num_blocks)
        return block;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "there is no block %lld", (long long)block);
    return -1;
}

/* Bump the generations of the blocks in a list, then withdraw their keys. */
PyObject *pdkv_reuse_blocks(const Table *table, PyObject *blocks) {
    Py_ssize_t n = PyList_GET_SIZE(blocks);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t block = block_of(table, blocks, i);
        if (block < 0)
            return NULL;
        STORE(table->generations[block], table->generations[block] + 1);
    }
    FENCE(); /* before any byte of the new content */
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t first = block_of(table, blocks, i) * table->keys_per_block;
        for (int64_t unit = first; unit < first + table->keys_per_block; unit++) {
            if (table->slots[unit] != NO_UNIT) {
                STORE(table->entries[table->slots[unit]], 0);
                table->slots[unit] = NO_UNIT;
            }
        }
    }
    Py_RETURN_NONE;
}

/* Make the blocks in a list findable by their keys, a list of bytes, `keys_per_block` for each. */
PyObject *pdkv_publish_blocks(const Table *table, PyObject *blocks, PyObject *keys) {
    Py_ssize_t n = PyList_GET_SIZE(blocks), per_block = (Py_ssize_t)table->keys_per_block;
    int wrong = PyList_GET_SIZE(keys) != n * per_block;
    for (Py_ssize_t i = 0; !wrong && i < n * per_block; i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        wrong = !PyBytes_Check(key) || PyBytes_GET_SIZE(key) != KEY_BYTES;
    }
    if (wrong)
        return PyErr_Format(PyExc_ValueError, "%zd blocks need %zd keys of %d bytes each", n, per_block, KEY_BYTES);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t block = block_of(table, blocks, i);
        if (block < 0)
            return NULL;
        int64_t valid = table->generations[block] + 1, first = block * table->keys_per_block;
        if (table->published[block] == valid)
            continue;
        for (Py_ssize_t j = 0; j < per_block; j++)
            memcpy(table->keys + (first + j) * KEY_BYTES, PyBytes_AS_STRING(PyList_GET_ITEM(keys, i * per_block + j)),
                   KEY_BYTES);
        FENCE(); /* the content and its keys are there before they count */
        STORE(table->published[block], valid);
        for (Py_ssize_t j = 0; j < per_block; j++)
            insert(table, first + j, table->keys + (first + j) * KEY_BYTES);
    }
    Py_RETURN_NONE;
}
