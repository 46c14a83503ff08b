"""Pieces between two distinct GPUs: over an NCCL group of two, which its ends make by way of the link.

NCCL takes two ranks on one GPU for a mistake: these exchange KV over the link's sockets.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Store

from pdkv.connectors.p2p.wire import Control, Put
from pdkv.errors import PeerGone, TransferError, TransferTimeout

if TYPE_CHECKING:
    from pdkv.connectors.p2p.pieces import MovePlan
    from pdkv.connectors.transfer.planning import Ids
    from pdkv.connectors.transfer.units import UnitPool

MAX_POSTED = 4
"""Batches that are under way at a time, each in device memory of its own."""

_LOOK_S = 1e-4


def make_nccl(store: Store, rank: int, timeout: timedelta) -> Any:
    """torch.distributed's group of two ranks, of which this is one. Raises RuntimeError."""
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, 2, options)


class NcclGroup:
    """One end. One thread uses it; any may `interrupt` it. Messages are matched in order.

    Args:
        rank: 0 for the end that dialed.
        make_s, timeout_s: so long the group may take to be made, and a message to arrive.

    Raises:
        TransferTimeout: the other end does not come.
        PeerGone: it left.
    """

    def __init__(self, control: Control, rank: int, make_s: float, timeout_s: float) -> None:
        self._peer = 1 - rank
        self._control = control
        self._posted: deque[tuple[Any, torch.Tensor, Ids]] = deque()
        store = _LinkStore(control, monotonic() + make_s)
        try:
            self._backend: Any = make_nccl(store, rank, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise store.failure or _typed(error, make_s) from error

    def send_piece(self, plan: "MovePlan", units: "UnitPool", remaining_s: Callable[[], float]) -> None:
        """Send a piece. Raises a TransferError: close the group."""
        for ids in plan.batches():
            table, rows = _table_of(plan, units, ids)
            self._post(self._backend.send, table.index_select(0, rows), ids)
            if len(self._posted) == MAX_POSTED:
                self._wait(remaining_s())
        while self._posted:
            self._wait(remaining_s())

    def receive_piece(self, plan: "MovePlan", units: "UnitPool", remaining_s: Callable[[], float]) -> None:
        """Receive a piece. Raises a TransferError: close the group."""

        def land() -> None:
            image, ids = self._wait(remaining_s())
            table, rows = _table_of(plan, units, ids)
            table.index_copy_(0, rows, image)

        for ids in plan.batches():
            table, rows = _table_of(plan, units, ids)
            self._post(self._backend.recv, table.new_empty(rows.numel(), table.shape[1]), ids)
            if len(self._posted) == MAX_POSTED:
                land()
        while self._posted:
            land()
        if units.kv_cache.is_cuda:
            torch.cuda.current_stream().synchronize()

    def interrupt(self) -> None:
        """By any thread: who waits here wakes up. NCCL takes its time, so a thread of its own does it."""
        backend = self._backend
        if backend is not None:
            threading.Thread(target=backend.abort, name="pdkv-p2p-abort", daemon=True).start()

    def close(self) -> None:
        """Tear the group down: nothing lands, and nothing that is posted is read any more. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
        self._posted.clear()

    def _post(self, operation: Any, tensor: "torch.Tensor", ids: "Ids") -> None:
        try:
            work = operation([tensor], self._peer, 0)
        except RuntimeError as error:
            raise PeerGone(f"the group is broken: {error}") from error
        self._posted.append((work, tensor, ids))

    def _wait(self, timeout_s: float) -> tuple["torch.Tensor", "Ids"]:
        """Wait for the oldest message. CUDA has no wait with a deadline: it is looked at."""
        work, tensor, ids = self._posted.popleft()
        deadline, pause = monotonic() + timeout_s, threading.Event()
        try:
            work.wait(timedelta(seconds=timeout_s))
            event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        except RuntimeError as error:
            raise _typed(error, timeout_s) from error
        while event is not None and not event.query():
            if monotonic() >= deadline:
                raise TransferTimeout(f"a message is not through after {timeout_s:g} s")
            pause.wait(_LOOK_S)
        return tensor, ids


class _LinkStore(Store):
    """The torch.distributed store by whose keys a group's ends find each other: over the link that they have.

    Not torch's TCPStore: it needs another port, and whoever finds that may write into it.
    """

    def __init__(self, control: Control, deadline: float) -> None:
        super().__init__()
        self._control = control
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self.failure: TransferError | None = None  # what C++ has made a RuntimeError of

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value and tell the peer."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._control.send(Put(key, self._values[key]), self._deadline - monotonic())

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        while key not in self._values:
            try:
                frame = self._control.expect(self._deadline - monotonic())
                if not isinstance(frame, Put):
                    raise TransferError(f"{type(frame).__name__} while a group is made")
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
        """Whether all are here by now."""
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The link's own deadline counts."""


def _table_of(plan: "MovePlan", units: "UnitPool", ids: "Ids") -> tuple["torch.Tensor", "torch.Tensor"]:
    """The pool as a table of rows, and the numbers of the rows that a batch consists of."""
    assert plan.part is not None, "between GPUs all goes as units"
    row_bytes, rows = units.row_ids(ids, plan.part)
    cache = units.kv_cache
    return cache.view(-1).view(torch.uint8).view(-1, row_bytes), torch.from_numpy(rows).to(cache.device)


def _typed(error: Exception, timeout_s: float) -> TransferError:
    """torch.distributed's error, which tells a timeout by its words only."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return TransferTimeout(f"the other end of a group did not come within {timeout_s:g} s")
    return PeerGone(f"the group is broken: {text}")
