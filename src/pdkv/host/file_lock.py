"""An exclusive lock on a file. Waiting for it has a deadline and can be given up from another thread."""

import contextlib
import fcntl
import os
import threading

from pdkv.base.service_thread import start_thread
from pdkv.errors import ServerBusy


class FileLock:
    """flock(2) on a descriptor that the lock owns from now on. Used by one thread, except for `give_up`.

    The kernel's wait has no deadline, so a daemon thread waits; one that gets the lock too late releases it at once.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._state = threading.Lock()  # guards the flags
        self._locked = False
        self._over = False  # no longer wanted: the waiting thread closes the descriptor
        self._changed = threading.Event()

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the lock. False: the time has passed, `give_up` was called, or there are no locks or threads."""
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locked = True
                return True
            start_thread(threading.Thread(target=self._wait, name="pdkv-file-lock", daemon=True))
        except (OSError, ServerBusy):
            os.close(self._fd)
            return False
        self._changed.wait(timeout_s)
        with self._state:
            self._over = not self._locked
            return self._locked

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            with self._state:
                self._locked = not self._over
        if not self._locked:
            os.close(self._fd)
        self._changed.set()

    def give_up(self) -> None:
        """End a wait. Thread-safe."""
        self._changed.set()

    def release(self) -> None:
        """Release an acquired lock."""
        assert self._locked
        os.close(self._fd)
