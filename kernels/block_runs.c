/* Block lists on the wire, called through ctypes (kernels/block_runs.py, which says how they are made up) with the GIL:
 * it takes microseconds.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <endian.h>
#include <stdint.h>
#include <string.h>

enum { COLUMNS = 3, HEAD = 5, COLUMN_HEAD = 9, FORM = 2 };
#define MAX_BLOCK_ID ((uint64_t)1 << 40)

/* Both take a whole word where there is room for one before `end`: a loop over its bytes takes ten times as long. What
 * `put` writes behind its own bytes is written later. */
static inline void put(uint8_t *at, uint64_t value, int width, const uint8_t *end) {
    if (end - at >= 8) {
        value = htole64(value);
        memcpy(at, &value, 8);
        return;
    }
    for (int i = 0; i < width; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static inline uint64_t get(const uint8_t *at, int width, const uint8_t *end) {
    uint64_t value = 0;
    if (end - at >= 8) {
        memcpy(&value, at, 8);
        value = le64toh(value);
        return width < 8 ? value & (((uint64_t)1 << 8 * width) - 1) : value;
    }
    for (int i = 0; i < width; i++)
        value |= (uint64_t)at[i] << 8 * i;
    return value;
}

/* The bytes that name `n` blocks and their generations. NULL, with an exception set: one is below 0. */
static PyObject *packed(const int64_t *ids, const int64_t *generations, int64_t n) {
    int64_t *columns = PyMem_Malloc(COLUMNS * sizeof *columns * (size_t)(n ? n : 1));
    if (columns == NULL)
        return PyErr_NoMemory();
    int64_t *firsts = columns, *counts = columns + n, *versions = columns + 2 * n, num_runs = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i && (uint64_t)ids[i] - (uint64_t)ids[i - 1] == 1 && generations[i] == generations[i - 1]) {
            counts[num_runs - 1]++;
            continue;
        }
        firsts[num_runs] = ids[i];
        counts[num_runs] = 1;
        versions[num_runs++] = generations[i];
    }
    int64_t smallest[COLUMNS] = {0}, size = HEAD + COLUMNS * COLUMN_HEAD;
    int width[COLUMNS] = {0};
    for (int c = 0; c < COLUMNS && num_runs; c++) {
        const int64_t *column = columns + c * n;
        int64_t least = column[0], most = column[0];
        for (int64_t i = 1; i < num_runs; i++) {
            least = column[i] < least ? column[i] : least;
            most = column[i] > most ? column[i] : most;
        }
        if (least < 0) {
            PyMem_Free(columns);
            return PyErr_Format(PyExc_ValueError, "a block list cannot name %lld", (long long)least);
        }
        for (uint64_t rest = (uint64_t)(most - least); rest; rest >>= 8)
            width[c]++;
        smallest[c] = least;
        size += num_runs * width[c];
    }
    PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (out != NULL) {
        uint8_t *at = (uint8_t *)PyBytes_AS_STRING(out), *end = at + size;
        put(at, FORM, 1, end);
        put(at + 1, (uint64_t)num_runs, 4, end);
        at += HEAD;
        for (int c = 0; c < COLUMNS; c++) {
            put(at, (uint64_t)smallest[c], 8, end);
            put(at + 8, (uint64_t)width[c], 1, end);
            at += COLUMN_HEAD;
            for (int64_t i = 0; i < num_runs; i++, at += width[c])
                put(at, (uint64_t)(columns[c * n + i] - smallest[c]), width[c], end);
        }
    }
    PyMem_Free(columns);
    return out;
}

PyObject *pdkv_pack_blocks(PyObject *ids, PyObject *generations) {
    Py_buffer a, b;
    if (PyObject_GetBuffer(ids, &a, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(generations, &b, PyBUF_SIMPLE)) {
        PyBuffer_Release(&a);
        return NULL;
    }
    PyObject *out;
    if (a.len == b.len)
        out = packed(a.buf, b.buf, a.len / (Py_ssize_t)sizeof(int64_t));
    else
        out = PyErr_Format(PyExc_ValueError, "%zd bytes of generations for %zd bytes of blocks", b.len, a.len);
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return out;
}

typedef struct {
    const uint8_t *rests, *end; /* the end of all that can be read */
    uint64_t smallest;
    int width;
} Column;

/* The bytes' runs, 0 or more; -1: they are no list of blocks. */
static int64_t parse(const uint8_t *data, int64_t size, Column *columns) {
    if (size < HEAD || data[0] != FORM)
        return -1;
    int64_t num_runs = (int64_t)get(data + 1, 4, data + size), offset = HEAD;
    for (Column *column = columns; column < columns + COLUMNS; column++) {
        if (size - offset < COLUMN_HEAD)
            return -1;
        *column = (Column){data + offset + COLUMN_HEAD, data + size, get(data + offset, 8, data + size), data[offset + 8]};
        offset += COLUMN_HEAD;
        if (column->width > 8 || column->smallest > INT64_MAX || num_runs * column->width > size - offset)
            return -1;
        offset += num_runs * column->width;
    }
    return offset == size ? num_runs : -1;
}

/* A run's value; beyond INT64_MAX where it is none. */
static inline uint64_t value_of(const Column *column, int64_t run) {
    if (!column->width)
        return column->smallest;
    uint64_t rest = get(column->rests + run * column->width, column->width, column->end);
    return rest > INT64_MAX ? UINT64_MAX : column->smallest + rest;
}

/* How many blocks there are; -1: that cannot be, or more than `most`. */
static int64_t count(const Column *counts, int64_t num_runs, int64_t most) {
    int64_t num_blocks = 0;
    if (num_runs > most)
        return -1;
    if (!counts->width && counts->smallest == 1)
        return num_runs;
    for (int64_t i = 0; i < num_runs; i++) {
        uint64_t more = value_of(counts, i);
        if (!more || more > (uint64_t)(most - num_blocks))
            return -1;
        num_blocks += (int64_t)more;
    }
    return num_blocks;
}

/* Fills in the ids and the generations of so many blocks. 0: a number that neither can be. */
static int fill(const Column *columns, int64_t num_runs, int64_t *ids, int64_t *generations) {
    for (int64_t i = 0; i < num_runs; i++) {
        uint64_t first = value_of(columns, i), more = value_of(columns + 1, i), generation = value_of(columns + 2, i);
        if (first > MAX_BLOCK_ID || generation > INT64_MAX)
            return 0;
        for (; more; more--) {
            *ids++ = (int64_t)first++;
            *generations++ = (int64_t)generation;
        }
    }
    return 1;
}

/* Two rows of int64, block ids and generations; None: no blocks could be meant by that, or more than `most`. */
PyObject *pdkv_unpack_blocks(PyObject *data, int64_t most) {
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
        return NULL;
    Column columns[COLUMNS];
    int64_t num_runs = parse(view.buf, view.len, columns);
    int64_t n = num_runs < 0 ? -1 : count(columns + 1, num_runs, most);
    PyObject *out = n < 0 ? Py_NewRef(Py_None) : PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(2 * n * 8));
    if (n >= 0 && out != NULL) {
        int64_t *ids = (int64_t *)PyByteArray_AS_STRING(out);
        if (!fill(columns, num_runs, ids, ids + n))
            Py_SETREF(out, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&view);
    return out;
}
