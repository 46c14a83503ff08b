"""Moves rows of memory over sockets, without the GIL from beginning to end: stream.c."""

import ctypes
from functools import cache

from pdkv.kernels.compiled import NUMBER, load_library


class StreamArgs(ctypes.Structure):
    """The source or target of a stream. Steps are digested while they are in the CPU cache: before they are sent, or
    after they have arrived.

    fds: blocking sockets with time limits; batches of `batch_bytes` go over `num_fds` of them in turn. A batch is
    whole steps. deadline_ns: by CLOCK_MONOTONIC. rows: (num_rows, 2): offset from `base`, length; `num_bytes` in all.
    pipe: an empty pipe, through which rows are sent without a copy, so that they must not change until the receiver has
    them; or (-1, -1).
    digests: (num_units, inner), or NULL. Each step digests `units_per_step` units, or one of `slices` of their outer
    rows. seeds, sizes, offsets, and the rows of a unit: as for `digest.add_digests`.
    """

    _fields_ = (
        ("fds", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("num_fds", "sends", "deadline_ns")),
        ("pipe", ctypes.c_int64 * 2),
        *((name, ctypes.c_void_p) for name in ("base", "rows")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_bytes", "batch_bytes", "step_bytes")),
        *((name, ctypes.c_void_p) for name in ("digests", "seeds", "sizes", "offsets")),
        *((name, ctypes.c_int64) for name in ("num_units", "units_per_step", "slices")),
        *((name, ctypes.c_int64) for name in ("outer", "outer_stride", "inner", "inner_stride", "row_bytes")),
    )


@cache
def _library() -> ctypes.CDLL | None:
    return load_library("_host", {"pdkv_stream_rows": (NUMBER, [ctypes.POINTER(StreamArgs)])})


def available() -> bool:
    """Whether the compiled kernel is available. Import torch first: it shares its OpenMP threads."""
    return _library() is not None


def stream(args: StreamArgs) -> int:
    """Move all rows; pointers must stay valid during the call, and the caller has checked all bounds.

    Returns:
        0, or the number of the error that ended it: EAGAIN for a peer that is late, EPIPE for one that is gone.
    """
    library = _library()
    assert library is not None, "ask available() first"
    return int(library.pdkv_stream_rows(ctypes.byref(args)))
