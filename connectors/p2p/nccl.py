"""Moves pieces between two distinct GPUs over an NCCL group of two, which its ends make over the link.

NCCL refuses two ranks on one GPU: such ranks exchange KV over the link's sockets (`why_not_nccl`).

Each end has its own stream, on which it gathers what is sent and scatters what has arrived; NCCL orders a message after
earlier work on that stream, and later work after the message. CUDA's waits have no deadlines, so events are polled.
torch's watchdog would end the process for a late message or a lost peer, so it is disabled.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Store

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.p2p.wire import Control, Put
from pdkv.connectors.transfer.units import COPY_TIMEOUT_S
from pdkv.errors import PeerGone, TransferError, TransferTimeout
from pdkv.kernels.streams import streams_of

if TYPE_CHECKING:
    from pdkv.connectors.p2p.pieces import MovePlan
    from pdkv.connectors.transfer.planning import Ids
    from pdkv.connectors.transfer.units import UnitPool

logger = logging.getLogger(__name__)

MAX_POSTED = 4
"""Batches in flight at a time, each in its own device memory."""

LOOK_S = 0.2
"""Seconds between checks whether an awaited message is still wanted, and the peer still there."""

_NO_WATCHDOG = timedelta(days=1)


def make_nccl(store: Store, rank: int, device: torch.device) -> Any:
    """torch.distributed's group of two ranks, of which this is one, with its communicator. Raises RuntimeError."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # 3, the default, ends the process for a lost peer
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NO_WATCHDOG
    group = nccl(store, rank, 2, options)
    group.eager_connect_single_device(device)  # now, while the link is there for it alone
    return group


class NcclGroup:
    """One end. One thread uses it; any may `interrupt` it. Messages are matched in order.

    Args:
        rank: 0 for the end that dialed.
        device: the device of this end's pool.
        make_s: longest time to make the group.

    Raises:
        TransferTimeout: the other end does not come.
        PeerGone: it is gone.
    """

    def __init__(self, control: Control, rank: int, device: torch.device, make_s: float) -> None:
        self._peer = 1 - rank
        self._control = control
        self._posted: deque[tuple[Any, torch.Tensor, Ids]] = deque()
        streams = streams_of(device)
        self._stream, self._done = streams.make_stream(), streams.make_event()
        self._backend: Any = _Making(_LinkStore(control, MONOTONIC.now() + make_s), rank, device).wait(make_s)

    def send_piece(self, plan: "MovePlan", units: "UnitPool", remaining_s: Callable[[], float]) -> None:
        """Send a piece that is in its blocks; returns when it has left them. Raises a TransferError: close."""
        assert plan.part is not None, "pieces between GPUs must be units"
        with self._stream.on():
            for ids in plan.batches():
                self._post(self._backend.send, units.gather_images(ids, plan.part), ids)
                if len(self._posted) == MAX_POSTED:
                    self._wait(remaining_s)
            while self._posted:
                self._wait(remaining_s)

    def receive_piece(self, plan: "MovePlan", units: "UnitPool", remaining_s: Callable[[], float]) -> None:
        """Receive a piece; returns when it is in its blocks. Raises a TransferError: close."""
        part = plan.part
        assert part is not None, "pieces between GPUs must be units"
        with self._stream.on():
            for ids in plan.batches():
                self._post(self._backend.recv, units.new_images(ids, part), ids)
                if len(self._posted) == MAX_POSTED:
                    units.scatter_images(*self._wait(remaining_s), part)
            while self._posted:
                units.scatter_images(*self._wait(remaining_s), part)
            self._reach(remaining_s)

    def interrupt(self) -> None:
        """Wake the waiting thread from any thread. Since NCCL may take long, a separate thread does it."""
        backend = self._backend
        if backend is not None:
            threading.Thread(target=_abort, args=(backend,), name="pdkv-p2p-abort", daemon=True).start()

    def close(self) -> None:
        """Tear the group down: nothing lands, and no posted memory is read any more. Idempotent.

        Raises:
            TransferTimeout: the device still has copies for the group to make, so their blocks must not be released.
        """
        backend, self._backend = self._backend, None
        if backend is None:
            return
        _abort(backend)
        with self._stream.on():
            self._done.record()
        self._done.synchronize(COPY_TIMEOUT_S)
        self._posted.clear()

    def _post(self, operation: Any, images: "torch.Tensor", ids: "Ids") -> None:
        try:
            work = operation([images.view(-1).view(torch.uint8)], self._peer, 0)
        except RuntimeError as error:
            raise PeerGone(f"the group is broken: {error}") from error
        self._posted.append((work, images, ids))

    def _wait(self, remaining_s: Callable[[], float]) -> tuple["Ids", "torch.Tensor"]:
        """Wait until the oldest message is through."""
        work, images, ids = self._posted[0]  # where it stays until then
        try:
            work.wait()  # of NCCL: later work on this stream comes after the message
        except RuntimeError as error:
            raise PeerGone(f"the group is broken: {error}") from error
        self._reach(remaining_s)
        self._posted.popleft()
        return ids, images

    def _reach(self, remaining_s: Callable[[], float]) -> None:
        """Wait until the stream has done all of its work."""
        self._done.record()
        while True:
            left_s = remaining_s()
            try:
                self._done.synchronize(min(left_s, LOOK_S))
            except TransferTimeout:
                if self._control.connection.has_left:
                    raise PeerGone("the other end of a group is gone") from None
                if left_s <= LOOK_S:
                    raise
            else:
                return


class _Making:
    """A group in the making, on a separate thread: NCCL waits for the other end without a deadline."""

    def __init__(self, store: "_LinkStore", rank: int, device: torch.device) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards the next two
        self._backend: Any = None
        self._is_given_up = False
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(rank, device), name="pdkv-p2p-nccl", daemon=True).start()

    def wait(self, timeout_s: float) -> Any:
        """The group. Raises TransferTimeout, PeerGone."""
        has_ended = self._ended.wait(timeout_s)
        with self._lock:
            if self._backend is not None:
                return self._backend
            self._is_given_up = True
        if not has_ended:
            raise TransferTimeout(f"no NCCL group between two GPUs was made within {timeout_s:g} s")
        raise self._store.failure or PeerGone(f"no group between two GPUs: {self._error}") from self._error

    def _run(self, rank: int, device: torch.device) -> None:
        try:
            streams_of(device).use()
            backend = make_nccl(self._store, rank, device)
        except Exception as error:  # whatever the error was, `wait` reports it
            self._error = error
        else:
            with self._lock:
                if self._is_given_up:
                    _abort(backend)
                else:
                    self._backend = backend
        self._ended.set()


class _LinkStore(Store):
    """The torch.distributed store with the keys by which a group's ends find each other, over their link.

    torch's TCPStore would need another port, into which anyone could write.
    """

    def __init__(self, control: Control, deadline: float) -> None:
        super().__init__()
        self._control = control
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self.failure: TransferError | None = None  # made into a RuntimeError by C++

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value and tell the peer."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._control.send(Put(key, self._values[key]), self._deadline - MONOTONIC.now())

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        while key not in self._values:
            try:
                frame = self._control.expect(self._deadline - MONOTONIC.now())
                if not isinstance(frame, Put):
                    raise TransferError(f"expected a value while a group is made, got {type(frame).__name__}")
            except TransferError as error:
                self.failure = error
                raise
            self._values[frame.key] = frame.value
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all values are here by now."""
        return all(key in self._values for key in keys)

    def clone(self) -> "_LinkStore":
        """This store itself: the link is the only connection, so no separate one can be made."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """No effect: the link's own deadline counts."""


def _abort(backend: Any) -> None:
    """End a group at once, whatever it is doing."""
    try:
        backend.abort()
    except RuntimeError as error:
        logger.warning("a group between two GPUs does not end: %s", error)
