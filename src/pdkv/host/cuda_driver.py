"""CUDA driver calls that torch does not offer: memory that other processes map, and its size.

By ctypes, since libcuda.so.1 has one name and one interface whatever version of CUDA torch was built with. torch's own
allocator is not enough: it hands out parts of segments, and cannot export expandable ones.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

HANDLE_BYTES = 64
"""Size of the handle by which another process opens an allocation."""

_LAZY_ENABLE_PEER_ACCESS = 1  # cuda.h: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaDriverError(RuntimeError):
    """A call that failed, with the driver's name for the reason."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call}: {reason} ({code})")
        self.is_out_of_memory = code == _OUT_OF_MEMORY


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_Pointer = ctypes.c_uint64  # CUdeviceptr
_SIGNATURES = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemAlloc_v2": [ctypes.POINTER(_Pointer), ctypes.c_size_t],
    "cuMemFree_v2": [_Pointer],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(_Pointer), ctypes.POINTER(ctypes.c_size_t), _Pointer],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), _Pointer],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Pointer), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Pointer],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
}


def allocate(device: int, num_bytes: int) -> int:
    """Allocate memory, aligned to 256 bytes, not zeroed; returns its address. Raises CudaDriverError."""
    pointer = _Pointer()
    with _context(device):
        _call("cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
    return pointer.value


def free(device: int, address: int) -> None:
    """Free an allocation. Raises CudaDriverError."""
    with _context(device):
        _call("cuMemFree_v2", address)


def export_memory(device: int, address: int) -> bytes:
    """The handle by which another process on this host opens an allocation. Raises CudaDriverError."""
    handle = _IpcHandle()
    with _context(device):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def open_memory(device: int, handle: bytes) -> int:
    """Map an allocation of another process for a device, which may differ from the one it is on.

    Raises:
        CudaDriverError: it is gone, cannot be reached from that device, or is this process's own.
    """
    pointer = _Pointer()
    with _context(device):
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _IpcHandle.from_buffer_copy(handle),
            _LAZY_ENABLE_PEER_ACCESS,
        )
    return pointer.value


def close_memory(device: int, address: int) -> None:
    """Unmap an allocation opened by `open_memory`. Raises CudaDriverError."""
    with _context(device):
        _call("cuIpcCloseMemHandle", address)


def lock_pages(device: int, address: int, num_bytes: int) -> None:
    """Page-lock this process's host memory, which takes all of it. Raises CudaDriverError."""
    with _context(device):
        _call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE)


def unlock_pages(device: int, address: int) -> None:
    """End what `lock_pages` began. Raises CudaDriverError."""
    with _context(device):
        _call("cuMemHostUnregister", address)


def size_from(device: int, address: int) -> int:
    """Bytes of the allocation from an address in it on, according to the driver. Raises CudaDriverError."""
    base, size = _Pointer(), ctypes.c_size_t()
    with _context(device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value + size.value - address


@contextmanager
def _context(device: int) -> Iterator[None]:
    """Make the device's primary context, which torch uses, too, this thread's context."""
    _call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(device: int) -> int:
    """Retained once for the life of this process. `device` as torch numbers them."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    assert context.value is not None
    return context.value


@cache
def _driver() -> ctypes.CDLL:
    """Load the driver. Raises CudaDriverError if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError("libcuda.so.1", -1, str(error)) from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    if code := driver.cuInit(0):
        raise CudaDriverError("cuInit", code, "no CUDA device can be used")
    return driver


def _call(name: str, *arguments: object) -> None:
    """Make a call. Raises CudaDriverError unless the driver reports success."""
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        reason = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(reason))
        raise CudaDriverError(name, code, (reason.value or b"unknown").decode())
