"""Reads another process's memory with one copy, made by this process; the other one need not be running.

The kernel allows it to processes of the same user (and, with Yama's ptrace_scope, to its parents only).
"""

import ctypes
import errno
import os
import select
from functools import cache

import numpy as np
import numpy.typing as npt

from pdkv.host.process_info import process_start_time

MAX_PIECES = 1024
"""Pieces of one call: the kernel's UIO_MAXIOV."""

Addresses = npt.NDArray[np.int64]


class ProcessMemory:
    """The memory of one process, distinguished from a later one with the same number. Threads may share it."""

    def __init__(self, pid: int, start_time: int) -> None:
        """Raises ProcessLookupError if the process does not exist, and OSError if this one lacks a descriptor."""
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        if process_start_time(pid) != start_time:
            self.close()
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is another one now")

    def read(self, target: Addresses, source: Addresses, sizes: Addresses | int) -> None:
        """Copy `sizes[i]` bytes of its memory from source[i] on to this process's memory at target[i].

        The data is only valid if the process `is_alive` afterwards.

        Raises:
            PermissionError: the kernel does not allow it.
            ProcessLookupError: the process has ended.
            OSError: it has no such memory (EFAULT), or another error.
        """
        sizes = np.broadcast_to(np.asarray(sizes, dtype=np.int64), target.shape)
        starts = _run_starts(target, source, sizes)
        ends = np.cumsum(sizes)
        totals = np.diff(np.append(ends[starts] - sizes[starts], ends[-1:]))
        vectors = [np.stack([side[starts], totals], axis=1) for side in (target, source)]
        for first in range(0, len(starts), MAX_PIECES):
            local, remote = (vector[first : first + MAX_PIECES] for vector in vectors)
            wanted = int(totals[first : first + MAX_PIECES].sum())
            copied = _readv()(self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
            if copied != wanted:  # only a part of it: the rest does not exist
                number = ctypes.get_errno() if copied < 0 else errno.EFAULT
                raise OSError(number, f"{max(copied, 0)} of {wanted} bytes of process {self._pid}")

    def is_alive(self) -> bool:
        """Whether the process is still running, so that everything read before was its own memory."""
        poll = select.poll()  # one each: two threads must not use it at once
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the descriptor, once no thread reads any more."""
        os.close(self._pidfd)


def _run_starts(target: Addresses, source: Addresses, sizes: Addresses) -> Addresses:
    """Positions at which a piece does not continue the previous one on both sides."""
    breaks = np.ones(target.size, dtype=np.bool_)
    breaks[1:] = (np.diff(target) != sizes[:-1]) | (np.diff(source) != sizes[:-1])
    return np.flatnonzero(breaks).astype(np.int64)


@cache
def _readv() -> "ctypes._NamedFuncPointer":
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_readv
    side = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *side, *side, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call
