"""Groups of two ranks of torch.distributed, made on demand: one end sends, the other one receives.

Gloo on CPU, NCCL on CUDA. A group that failed or was left in the middle is closed: what was posted on it lands
nowhere from then on.
"""

import logging
import os
import queue
import select
import threading
from collections import deque
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from pdkv.connectors.p2p.wire import Control
from pdkv.errors import PeerGone, TransferError, TransferTimeout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LET_GO = timedelta(milliseconds=1)
_NEVER_SENT = 1 << 30
"""The number of no message."""


class Group:
    """One end of a group, and of the link beside it. One thread uses it; any may `interrupt` it.

    Messages are matched in order: the n-th `send` there is the n-th `receive` here. Both return at once; `wait` waits
    for the oldest one.

    Args:
        timeout_s: no message takes longer.
    """

    def __init__(self, backend: Any, control: Control, *, peer: int, on_cuda: bool, timeout_s: float) -> None:
        self._backend = backend
        self._control = control
        self._peer = peer
        self._number = 0
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._waiter = None if on_cuda else _GlooWaiter(timeout_s)

    def send(self, tensor: "torch.Tensor") -> None:
        """Post a message; the tensor must stay as it is until it is waited for."""
        self._post(self._backend.send, tensor)

    def receive(self, tensor: "torch.Tensor") -> None:
        """Post a receive into the tensor, which must be as large as what is sent."""
        self._post(self._backend.recv, tensor)

    def wait(self, timeout_s: float) -> None:
        """Wait for the oldest message, in the middle of a piece, where the peer has nothing to say on the link.

        Raises:
            TransferTimeout: it is not through in time: close the group.
            PeerGone: the peer has left, or closed its end, or the link was interrupted.
        """
        self._wait(timeout_s, self._control)

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait for all messages; the peer has said that it has them, and may close its end. Raises as `wait` does."""
        deadline = monotonic() + timeout_s
        while self._posted:
            self._wait(max(deadline - monotonic(), 0.0), None)

    def interrupt(self) -> None:
        """By any thread: who waits here wakes up; over Gloo it is the end of the link that wakes him."""
        backend = self._backend
        if self._waiter is None and backend is not None:
            backend.abort()

    def close(self) -> None:
        """Tear the group down: nothing lands, and nothing that is posted is read any more. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._waiter is None:
            backend.abort()
        else:
            if self._posted:
                self._close_pair(backend)
            self._waiter.close()
        self._posted.clear()

    def _wait(self, timeout_s: float, control: Control | None) -> None:
        work, tensor = self._posted[0]
        try:
            if self._waiter is not None:
                self._waiter.wait(timeout_s, control)
            else:
                work.wait(timedelta(seconds=timeout_s))
                _wait_for_stream(tensor.device, timeout_s)
        except RuntimeError as error:
            raise _typed(error, f"a message is not through after {timeout_s:g} s", "the group is broken") from error
        self._posted.popleft()

    def _close_pair(self, backend: Any) -> None:
        """A Gloo pair closes, with all that is posted on it, when a wait on it is over in vain: here, for a message
        that nobody sends.
        """
        import torch

        try:
            work = backend.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT)
            work.wait(_LET_GO)
        except RuntimeError as error:
            logger.debug("a group is closed: %s", error)

    def _post(self, operation: Any, tensor: "torch.Tensor") -> None:
        if self._backend is None:
            raise PeerGone("the group is closed")
        try:
            work = operation([tensor], self._peer, self._number)
        except RuntimeError as error:
            raise PeerGone(f"the group is broken: {error}") from error
        self._number = (self._number + 1) % _NEVER_SENT
        self._posted.append((work, tensor))
        if self._waiter is not None:
            self._waiter.add(work, tensor)


class _GlooWaiter:
    """Waits for one group's messages in Gloo, on a thread of its own.

    Gloo fails a broken connection's messages only while both ends have not met: who waits for one that travels wakes
    up at its timeout, and nothing else wakes it. So the thread that has to know waits for this one's word or for the
    link, whichever comes first, and leaves this one behind, which ends then or at that timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        """Raises TransferError where there is no room for another thread."""
        self._timeout = timedelta(seconds=timeout_s)
        self._works: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._num_done = 0
        self._wanted: float = inf  # so many done are worth a word
        self._failure = ""  # Gloo's words: its exception would know all that waited
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # that word; -1: closed
        self._num_taken = 0  # done, and `wait` has said so
        try:
            threading.Thread(target=self._run, name="pdkv-p2p-gloo", daemon=True).start()
        except RuntimeError as error:
            os.close(self._event)
            raise TransferError(f"no thread for a group: {error}") from error

    def add(self, work: Any, tensor: "torch.Tensor") -> None:
        """The next message, and its memory."""
        self._works.put((work, tensor))

    def wait(self, timeout_s: float, control: Control | None) -> None:
        """Wait for the next message, or until the link has something to say.

        Raises:
            RuntimeError: Gloo's.
            TransferTimeout, PeerGone: as `Group.wait` says.
        """
        deadline = monotonic() + timeout_s
        while not self._take():
            ready = select.poll()
            ready.register(self._event, select.POLLIN)
            if control is not None:
                ready.register(control.fileno(), select.POLLIN)
            found = [descriptor for descriptor, _ in ready.poll(max(deadline - monotonic(), 0.0) * 1000)]
            if not found:
                raise TransferTimeout(f"a message is not through after {timeout_s:g} s")
            if self._event in found:
                os.eventfd_read(self._event)
            elif not self._take():
                raise PeerGone("the link ended in the middle of a piece")
            else:
                return

    def close(self) -> None:
        """The pair is closed, or nothing is posted: let the thread end."""
        self._works.put(None)
        with self._lock:
            event, self._event = self._event, -1
        os.close(event)

    def _take(self) -> bool:
        """Whether the next message is done; if not, ask for a word. Raises Gloo's RuntimeError."""
        with self._lock:
            if self._num_done > self._num_taken:
                self._num_taken += 1
                return True
            if self._failure:
                raise RuntimeError(self._failure)
            self._wanted = self._num_taken + 1
            return False

    def _run(self) -> None:
        """The thread."""
        while (item := self._works.get()) is not None:
            failure = ""
            is_over = self._failure or self._event < 0  # then the others are not waited for, each for its timeout
            try:
                item[0].wait(_LET_GO if is_over else self._timeout)
            except RuntimeError as error:
                failure = str(error) or type(error).__name__
            del item
            with self._lock:
                self._num_done += not failure
                self._failure = self._failure or failure
                if self._event >= 0 and (failure or self._num_done >= self._wanted):
                    self._wanted = inf
                    os.eventfd_write(self._event, 1)


class GroupFactory:
    """Makes a rank's ends of groups. `timeout_s`: no message takes longer."""

    def __init__(self, host: str, device_type: str, timeout_s: float) -> None:
        self.backend = "nccl" if device_type == "cuda" else "gloo"
        self.host = host
        self._timeout_s = timeout_s

    def make(self, control: Control, *, rank: int, timeout_s: float) -> Group:
        """Meet the other end, which is at the other end of `control`; both call this, with ranks 0 and 1.

        Raises:
            TransferTimeout: it does not come.
            PeerGone: it left.
        """
        from pdkv.connectors.p2p.rendezvous import LinkStore

        store = LinkStore(control, monotonic() + timeout_s)
        make = self._make_nccl if self.backend == "nccl" else self._make_gloo
        try:
            backend = make(store, rank, timedelta(seconds=timeout_s))
        except (RuntimeError, TransferError) as error:
            if store.failure is not None:
                raise store.failure from None
            late = f"the other end of a group did not come within {timeout_s:g} s"
            raise _typed(error, late, "no group can be made") from error
        return Group(backend, control, peer=1 - rank, on_cuda=self.backend == "nccl", timeout_s=self._timeout_s)

    def _make_gloo(self, store: Any, rank: int, timeout: timedelta) -> Any:
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        # A device of its own, 0.3 ms: it listens, and keeps every connection of strangers as long as it lives.
        options._devices = [gloo.create_device(hostname=self.host)]
        options._timeout = timeout
        options._threads = 1  # of collectives, which nobody calls
        return gloo(store, rank, 2, options)

    def _make_nccl(self, store: Any, rank: int, timeout: timedelta) -> Any:
        import torch.distributed

        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, 2, options)


def _typed(error: Exception, late: str, gone: str) -> TransferError:
    """torch.distributed's error, which tells a timeout by its words only."""
    text = str(error)
    return TransferTimeout(late) if "imed out" in text or "imeout" in text else PeerGone(f"{gone}: {text}")


def _wait_for_stream(device: "torch.device", timeout_s: float) -> None:
    """Wait until what was queued on this thread's stream is done. CUDA has no wait with a deadline: it is looked at.

    Raises:
        TransferTimeout: it is not done in time.
    """
    import torch

    event = torch.cuda.current_stream(device).record_event()
    deadline, pause = monotonic() + timeout_s, threading.Event()
    while not event.query():
        if monotonic() >= deadline:
            raise TransferTimeout(f"a message is not through after {timeout_s:g} s")
        pause.wait(1e-4)
