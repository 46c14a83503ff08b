"""Groups of two ranks of torch.distributed, made on demand: one end sends, the other one receives.

Gloo on CPU, NCCL on CUDA. A group that failed or was left in the middle is closed: what was posted on it lands
nowhere from then on.
"""

import logging
import threading
from collections import deque
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from pdkv.connectors.p2p_wire import Control
from pdkv.errors import PeerGone, TransferError, TransferTimeout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LET_GO = timedelta(milliseconds=1)
_NEVER_SENT = 1 << 30
"""The number of no message."""


class Group:
    """One end of a group. One thread uses it; any may `interrupt` it.

    Messages are matched in order: the n-th `send` there is the n-th `receive` here. Both return at once; `wait` waits
    for the oldest one.
    """

    def __init__(self, backend: Any, *, peer: int, on_cuda: bool) -> None:
        import torch

        self._backend = backend
        self._peer = peer
        self._on_cuda = on_cuda
        self._number = 0
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._never = torch.empty(1, dtype=torch.uint8)

    @property
    def num_posted(self) -> int:
        """Messages that nobody has waited for."""
        return len(self._posted)

    def send(self, tensor: "torch.Tensor") -> None:
        """Post a message; the tensor must stay as it is until it is waited for."""
        self._post(self._backend.send, tensor)

    def receive(self, tensor: "torch.Tensor") -> None:
        """Post a receive into the tensor, which must be as large as what is sent."""
        self._post(self._backend.recv, tensor)

    def wait(self, timeout_s: float) -> None:
        """Wait for the oldest message.

        Raises:
            TransferTimeout: it is not through in time: close the group.
            PeerGone: the peer has left, or closed its end.
        """
        work, tensor = self._posted[0]
        try:
            work.wait(timedelta(seconds=timeout_s))
            if self._on_cuda:
                _wait_for_stream(tensor.device, timeout_s)
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                raise TransferTimeout(f"a message is not through after {timeout_s:g} s") from error
            raise PeerGone(f"the group is broken: {error}") from error
        self._posted.popleft()

    def interrupt(self) -> None:
        """By any thread: what is posted fails, and so does who waits for it. Takes about a millisecond.

        A Gloo pair closes, with all that is posted on it, when a wait on it is over in vain. Here that is a wait for a
        message of its own, which nobody sends: one for a message that comes after all would take its completion away
        from the thread that needs it.
        """
        backend = self._backend
        if backend is None:
            return
        if self._on_cuda:
            backend.abort()
            return
        try:
            work = backend.recv([self._never], self._peer, _NEVER_SENT)
        except RuntimeError as error:
            logger.debug("a group is closed already: %s", error)
            return
        _let_go(work)

    def close(self) -> None:
        """Tear the group down: posted messages end, and nothing lands any more. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._on_cuda:
            backend.abort()
        while self._posted:
            work, _ = self._posted.popleft()
            _let_go(work)  # it would outlive the group
            del work

    def _post(self, operation: Any, tensor: "torch.Tensor") -> None:
        if self._backend is None:
            raise PeerGone("the group is closed")
        try:
            work = operation([tensor], self._peer, self._number)
        except RuntimeError as error:
            raise PeerGone(f"the group is broken: {error}") from error
        self._number = (self._number + 1) % _NEVER_SENT
        self._posted.append((work, tensor))


class GroupFactory:
    """Makes a rank's ends of groups."""

    def __init__(self, host: str, device_type: str) -> None:
        self.backend = "nccl" if device_type == "cuda" else "gloo"
        self.host = host

    def make(self, control: Control, *, rank: int, timeout_s: float) -> Group:
        """Meet the other end, which is at the other end of `control`; both call this, with ranks 0 and 1.

        Raises:
            TransferTimeout: it does not come.
            PeerGone: it left.
        """
        from pdkv.connectors.p2p_store import LinkStore

        store = LinkStore(control, monotonic() + timeout_s)
        make = self._make_nccl if self.backend == "nccl" else self._make_gloo
        try:
            backend = make(store, rank, timedelta(seconds=timeout_s))
        except (RuntimeError, TransferError) as error:
            if store.failure is not None:
                raise store.failure from None
            if "imed out" in str(error) or "imeout" in str(error):
                raise TransferTimeout(f"the other end of a group did not come within {timeout_s:g} s") from error
            raise PeerGone(f"no group can be made: {error}") from error
        return Group(backend, peer=1 - rank, on_cuda=self.backend == "nccl")

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


def _let_go(work: Any) -> None:
    try:
        work.wait(_LET_GO)
    except RuntimeError as error:
        logger.debug("let go of a posted message: %s", error)


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
