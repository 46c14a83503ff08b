"""A device for tests on the CPU: streams whose work runs as late, or as early, as the recorded events allow.

Within `stream.on()` no torch operation runs at once. It is queued behind what its stream was given before and what that
waits for; until it has run, its result holds poison. So a reader that does not wait for its writer reads poison, a host
that does not wait for a copy too, and memory that is used again too early has the wrong content when its copy runs:

- `Order.LATE`: nothing runs before somebody waits for it, and then only that and what it must come behind;
- `Order.SIDE_EARLY`: what is queued on streams other than `compute` runs at once, where it waits for nothing that has
  not run. Without its wait a reader overtakes the step;
- `Order.COMPUTE_EARLY`: what is queued on `compute` runs at once. Without its wait a step overtakes a load.

Outside of `on` the host works as ever. An operation whose answer the host needs (`item`, `nonzero`) waits for its
stream, as on a device, and is counted. Copies between device and host are all non-blocking here: code that relies on a
blocking one reads poison. Only torch operations are queued: what numpy or compiled code does is the host's.

    recorded = use_recorded(monkeypatch, Order.LATE)      # from now on the CPU is such a device
    with recorded.compute.on():
        kv_cache.copy_(values)                            # a step's kernels
    step_done.record()

`check_every_call` runs a scenario again and again, each time without one line's call, and tells which nobody misses.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from pdkv.errors import TransferTimeout
from pdkv.kernels import streams
from pdkv.kernels.streams import Event, Stream, Streams

POISON_BYTE = 0xA5

Kind = Literal["record", "wait", "synchronize"]


class Call(NamedTuple):
    """A line of the code under test that makes such a call."""

    kind: Kind
    function: str
    line: int


class Order(Enum):
    """Which of the orders that events allow."""

    LATE = "late"
    SIDE_EARLY = "side early"
    COMPUTE_EARLY = "compute early"


class _Node:
    """Something queued: it runs when all before it have."""

    def __init__(self, stream: "RecordedStream", before: list["_Node"], run: Callable[[], object] | None) -> None:
        self.stream, self.before, self.run = stream, before, run
        self.has_run = False


class RecordedStreams(Streams):
    """The device. Threads may share it.

    Args:
        without: a call that does nothing, as if its line were removed.
    """

    is_host = False

    def __init__(self, order: Order = Order.LATE, *, without: Call | None = None) -> None:
        self.order = order
        self.calls: list[Call] = []
        self.num_syncs = 0  # operations for which the host waited
        self._without = without
        self._changed = threading.Condition(threading.RLock())
        self._local = threading.local()
        self._streams: list[RecordedStream] = []
        self.compute = self.make_stream()

    def make_stream(self) -> "RecordedStream":
        stream = RecordedStream(self)
        self._streams.append(stream)
        return stream

    def make_event(self) -> Event:
        return RecordedEvent(self)

    def make_pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.from_numpy(np.full(size_bytes, POISON_BYTE, np.uint8))  # now, also within a stream

    @property
    def current(self) -> "RecordedStream":
        """The thread's current stream."""
        stream: RecordedStream = getattr(self._local, "stream", self.compute)
        return stream

    def finish(self) -> None:
        """Run everything that `compute` was given, and what that waits for."""
        self.reach(self.compute.last, 0.0)

    def finish_all(self) -> None:
        """Run everything."""
        with self._changed:
            for stream in self._streams:
                self.reach(stream.last, 0.0)

    # --- of streams and events --------------------------------------------------------------------------------------

    def made(self, kind: Kind) -> bool:
        """Write the call down that called this one's caller; False: it does nothing."""
        frame = sys._getframe(2)
        call = Call(kind, frame.f_code.co_qualname, frame.f_lineno)
        with self._changed:
            self.calls.append(call)
        return call != self._without

    @contextmanager
    def entered(self, stream: "RecordedStream") -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            with _Queueing(self):
                yield
        finally:
            self._local.stream = before

    def put(self, run: Callable[[], object] | None, also_behind: "_Node | None" = None) -> _Node:
        """Queue something on the current stream."""
        stream = self.current
        with self._changed:
            before = [node for node in (stream.last, also_behind) if node is not None and not node.has_run]
            node = stream.last = _Node(stream, before, run)
            early = Order.COMPUTE_EARLY if stream is self.compute else Order.SIDE_EARLY
            if self.order is early and not before and not stream.is_held:
                self._run(node)
        return node

    def reach(self, node: _Node | None, timeout_s: float) -> None:
        """Run a node and all that it comes behind, and nothing else. Raises TransferTimeout where a stream is held."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while node is not None and not node.has_run:
                ready = _first_ready(node)
                if not ready.stream.is_held:
                    self._run(ready)
                elif not self._changed.wait(deadline - time.monotonic()):
                    raise TransferTimeout(f"the device has not come to an event within {timeout_s:g} s")

    def set_held(self, stream: "RecordedStream", is_held: bool) -> None:
        with self._changed:
            stream.is_held = is_held
            self._changed.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether this thread is the device."""
        return getattr(self._local, "is_running", False)

    def _run(self, node: _Node) -> None:
        self._local.is_running = True
        try:
            if node.run is not None:
                node.run()
        finally:
            self._local.is_running = False
            node.has_run, node.run, node.before = True, None, []
            self._changed.notify_all()


def _first_ready(node: _Node) -> _Node:
    """Of a node that has not run and all before it: one that may run now."""
    while left := [before for before in node.before if not before.has_run]:
        node = left[0]
    return node


class RecordedStream(Stream):
    """One stream. `hold` it: the device works on it no more, until `release`."""

    def __init__(self, device: RecordedStreams) -> None:
        self._device = device
        self.last: _Node | None = None
        self.is_held = False

    def on(self) -> AbstractContextManager[Any]:
        return self._device.entered(self)

    def hold(self) -> None:
        self._device.set_held(self, True)

    def release(self) -> None:
        self._device.set_held(self, False)


class RecordedEvent(Event):
    """A node of a stream."""

    def __init__(self, device: RecordedStreams) -> None:
        self._device = device
        self._node: _Node | None = None

    def record(self) -> None:
        if self._device.made("record"):
            self._node = self._device.put(None)

    def wait(self) -> None:
        if self._device.made("wait") and self._node is not None:
            self._device.put(None, also_behind=self._node)

    def query(self) -> bool:
        return self._node is None or self._node.has_run

    def synchronize(self, timeout_s: float) -> None:
        """As a host that looks: of an event that is recorded anew meanwhile it sees the last record only."""
        node = None
        if self._device.made("synchronize"):
            while self._node is not node:
                node = self._node
                self._device.reach(node, timeout_s)


class _Queueing(TorchDispatchMode):
    """Puts operations of torch into the current stream instead of running them."""

    def __init__(self, device: RecordedStreams) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = func.is_view and func is not torch.ops.aten.to.dtype  # which is one of the same dtype only
        if self._device.is_running or is_view or func.namespace == "prim":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._device.put(lambda: func(*args, **kwargs))
            return kwargs["out"] if "out" in kwargs else args[0]
        result = _empty_results(func, args, kwargs)
        if result is None:  # the host needs to know
            with self._device._changed:
                self._device.num_syncs += 1
            self._device.reach(self._device.current.last, 0.0)
            return func(*args, **kwargs)
        if not func.__name__.startswith(("empty", "new_empty")):
            self._device.put(lambda: tree_map(_fill, result, func(*args, **kwargs)))
        return result


def _empty_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Poison where an operation's results will be; None: it gives something else, or nobody knows how much."""

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def to_poison(value: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        result.untyped_storage().fill_(POISON_BYTE)
        return result

    meta_kwargs = tree_map(to_meta, kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    try:
        results = func(*tree_map(to_meta, args), **meta_kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    flat = results if isinstance(results, tuple | list) else (results,)
    if not all(isinstance(value, torch.Tensor) for value in flat):
        return None
    return tree_map(to_poison, results)


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)


def use_recorded(
    monkeypatch: pytest.MonkeyPatch, order: Order = Order.LATE, *, without: Call | None = None
) -> RecordedStreams:
    """From now on the CPU's tensors lie on a recorded device."""
    recorded = RecordedStreams(order, without=without)
    monkeypatch.setattr(streams, "HOST", recorded)
    return recorded


def check_every_call(scenario: Callable[[RecordedStreams], bool], *, but: Collection[tuple[Kind, str]] = ()) -> None:
    """A scenario is right in every order, and wrong in one of them without any one call that it makes.

    Args:
        scenario: whether the right bytes arrived.
        but: calls that another test is about, by kind and function.

    Raises:
        AssertionError: it is wrong as it stands, or a call is missed by nobody.
    """
    calls: dict[Call, None] = {}
    for order in Order:
        recorded = _run_scenario(scenario, order, None)
        assert recorded is not None, f"wrong in order {order.value}"
        calls |= dict.fromkeys(recorded.calls)
    assert calls, "the scenario orders nothing"
    looked_at = [call for call in calls if (call.kind, call.function) not in but]
    needless = [call for call in looked_at if all(_run_scenario(scenario, order, call) for order in Order)]
    assert not needless, f"nobody misses {needless}"


def _run_scenario(
    scenario: Callable[[RecordedStreams], bool], order: Order, without: Call | None
) -> RecordedStreams | None:
    """The device on which it went well; None: it did not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorded = use_recorded(monkeypatch, order, without=without)
        try:
            return recorded if scenario(recorded) else None
        except (TransferTimeout, IndexError):
            if without is None:
                raise
            return None
