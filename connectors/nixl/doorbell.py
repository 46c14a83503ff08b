"""Wakes a rank's message thread: NIXL has no descriptor to wait on for notifications.

Who has sent a notification to an agent on its host writes a byte into that one's pipe after it. A byte means "look",
nothing else: one too many costs a look, and one that got lost is made up for by the slow polling of the message thread.

The pipe has no name. A peer opens it through /proc/<pid>/fd/<fd>, which the kernel allows to processes of the same
user only (as it does the copies between processes, for which the bell rings): strangers cannot knock at all.
"""

import contextlib
import logging
import os
import select
import threading
from collections import OrderedDict

import msgspec

from pdkv.host.process_info import process_start_time

logger = logging.getLogger(__name__)

MAX_OPEN = 256
"""Peers whose bells are kept open."""

_DRAIN_BYTES = 65536
"""All that a pipe holds: one call forgets the rings so far, however fast somebody rings on."""


class DoorbellAddress(msgspec.Struct, frozen=True, array_like=True):
    """How a peer on the same host gets at a bell; travels in the engine's card."""

    pid: int
    start_time: int  # of the process: tells a recycled pid
    fd: int
    inode: int


class Doorbell:
    """A pipe for peers, and an eventfd for oneself."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the own end for writing keeps it open
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pid = os.getpid()
        start_time = process_start_time(pid)
        assert start_time is not None
        self.address = DoorbellAddress(pid, start_time, self._write_fd, os.fstat(self._write_fd).st_ino)
        self._poll = select.poll()
        for fd in (self._read_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self._lock = threading.Lock()  # guards what follows
        self._open: OrderedDict[DoorbellAddress, int] = OrderedDict()  # descriptors of peers' pipes
        self._closed = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody rings or wakes, and forget all of that so far. False: nobody did, or it is closed.

        For one thread, which is done before `close`.
        """
        if self._closed:
            return False
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        with contextlib.suppress(BlockingIOError):
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._read_fd in ready:
                os.read(self._read_fd, _DRAIN_BYTES)
        return bool(ready)

    def ring(self, address: DoorbellAddress) -> None:
        """Wake the owner of another doorbell, if it is there; its pipe may be full, then it will look anyway."""
        with self._lock:
            if self._closed:
                return
            fd = self._open.get(address)
            if fd is None:
                fd = _open_pipe(address)
                if fd is None:
                    return
                self._open[address] = fd
                if len(self._open) > MAX_OPEN:
                    os.close(self._open.popitem(last=False)[1])
            try:
                os.write(fd, b"\0")
            except BlockingIOError:
                pass
            except OSError:  # its owner is gone
                os.close(self._open.pop(address))

    def forget(self, address: DoorbellAddress) -> None:
        """Its owner is gone. Idempotent."""
        with self._lock:
            if (fd := self._open.pop(address, None)) is not None:
                os.close(fd)

    def wake(self) -> None:
        """Wake who waits here. Does not block, whatever its thread is doing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Give the descriptors back, when nobody waits any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for fd in (self._read_fd, self._write_fd, self._wake_fd, *self._open.values()):
                os.close(fd)
            self._open.clear()


def _open_pipe(address: DoorbellAddress) -> int | None:
    """The pipe that an address means, for writing; None: it is not there (any more), or not ours to open."""
    path = f"/proc/{address.pid}/fd/{address.fd}"
    link = f"pipe:[{address.inode}]"
    try:
        if address.fd < 0 or os.readlink(path) != link or process_start_time(address.pid) != address.start_time:
            return None  # never open what may be something else
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        logger.debug("no doorbell at %s: %s", path, error)
        return None
    if os.fstat(fd).st_ino == address.inode:
        return fd
    os.close(fd)
    return None
