/* Lists of ints as arrays, called through ctypes (kernels/int_lists.py) with the GIL: numpy's own way takes ten times as
 * long for each number.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* The bytes of an array of int64, or of int32 where `width` is 4, with the numbers of a list or tuple.
 * NULL, with an exception set: one is no int, or too large. */
PyObject *pdkv_array_of(PyObject *numbers, int64_t width) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(numbers);
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, n * (Py_ssize_t)width);
    if (bytes == NULL)
        return NULL;
    int64_t *wide = (int64_t *)PyByteArray_AS_STRING(bytes);
    int32_t *narrow = (int32_t *)PyByteArray_AS_STRING(bytes);
    for (Py_ssize_t i = 0; i < n && i < PySequence_Fast_GET_SIZE(numbers); i++) { /* a number's own code may shorten it */
        long long number = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(numbers, i));
        if (number == -1 && PyErr_Occurred())
            goto failed;
        if (width == sizeof(int64_t)) {
            wide[i] = number;
        } else if (number == (int32_t)number) {
            narrow[i] = (int32_t)number;
        } else {
            PyErr_Format(PyExc_OverflowError, "%lld is no 32-bit integer", number);
            goto failed;
        }
    }
    if (PySequence_Fast_GET_SIZE(numbers) == n)
        return bytes;
    PyErr_SetString(PyExc_RuntimeError, "the list changed while it was read");
failed:
    Py_DECREF(bytes);
    return NULL;
}
