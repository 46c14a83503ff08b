"""Small pieces: the source gathers units into registered slots, the reader (fetch.py) reads slots whole.

The source gathers the next chunk while the reader reads and scatters the last one. From host memory the message thread
itself gathers. If a device must be waited for, a separate thread gathers.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import NamedTuple

from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.wire import Dropped, Freed, Gather, Gathered, RankBlob, Refused, Reset
from pdkv.connectors.step_done import ON_HOST, StepDone
from pdkv.connectors.transfer.block_runs import unpack_blocks
from pdkv.connectors.transfer.planning import Ids
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.errors import KVNotFound, TransferError, TransferTimeout
from pdkv.kernels.streams import streams_of

logger = logging.getLogger(__name__)

MAX_UNITS = 2048
"""The most units of one request: scattered ones must fit into a message."""

STEP_TIMEOUT_S = 10.0
"""Seconds to wait for the step that computed a hand-off's KV: hand-offs leave when it has ended, so hardly any are
needed.
"""

MAX_OPEN_REQUESTS = 256
"""The most requests of one peer, on the source's side; more are refused."""


class Chunk(NamedTuple):
    """Units [first, stop) of a request, and their layers."""

    first: int
    stop: int
    layer_start: int
    layer_stop: int


def plan_chunks(num_units: int, num_layers: int, layer_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut units into chunks of at most `chunk_bytes`, by layers if one unit is too large. Both sides cut the same way.

    Args:
        layer_bytes: bytes of one layer of one unit's image.

    Raises:
        ValueError: not even one layer fits.
    """
    if layer_bytes > chunk_bytes:
        raise ValueError(f"one layer of a unit has {layer_bytes} bytes, more than a slot of {chunk_bytes}")
    layers = min(chunk_bytes // layer_bytes, num_layers)
    units = max(chunk_bytes // (layer_bytes * num_layers), 1)
    return [
        Chunk(first, min(first + units, num_units), layer, min(layer + layers, num_layers))
        for first in range(0, num_units, units)
        for layer in range(0, num_layers, layers)
    ]


def part_of(part: UnitPart, chunk: Chunk) -> UnitPart:
    """The part of a request in a chunk, with layers counted from the request's first one."""
    first = part.layer_start
    return part._replace(layer_start=first + chunk.layer_start, layer_stop=first + chunk.layer_stop)


@dataclass(eq=False, slots=True)
class _Request:
    """A reader's request: the chunks still to be gathered, and the slots that it holds."""

    blob: RankBlob
    message: Gather
    units: Ids
    chunks: deque[tuple[int, Chunk]]
    slots: set[int] = field(default_factory=set)


class _Ready(NamedTuple):
    """A chunk with its slot."""

    request: _Request
    number: int
    chunk: Chunk
    slot: int
    after: StepDone


class GatherSource:
    """Gathers for peers. Everything except `_fill` and `_run` runs on the endpoint's message thread, which never waits.

    A slot is reused once its reader has freed it or is gone; a later read then sees another generation.

    Args:
        guard: a context, for an offer's number, in which its blocks may be read. Raises KVNotFound.
    """

    def __init__(
        self, endpoint: NixlEndpoint, units: UnitPool, guard: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        self.after: StepDone = ON_HOST  # of KV handed off before it; offered KV has been waited for
        self._endpoint = endpoint
        self._pool = units
        self._guard = guard
        self._requests: dict[tuple[str, int], _Request] = {}
        self._turns: deque[_Request] = deque()  # requests with chunks to gather
        num_slots = endpoint.slots.count
        self._free = list(range(num_slots))
        self._busy: set[int] = set()  # slots that `_run` fills: free when it has, whatever becomes of their requests
        self._most = max(num_slots // 2, 1)  # slots of one peer: a stuck one leaves some to others
        endpoint.handle(Gather, self._on_gather)
        endpoint.handle(Freed, self._on_freed)
        endpoint.handle(Dropped, self._on_dropped)
        endpoint.handle(Reset, self._on_reset)
        endpoint.add_work(self._gather_next)
        self._waiting: queue.SimpleQueue[_Ready | None] = queue.SimpleQueue()
        # Runs from the first chunk on that must wait for something.
        self._thread = ServiceThread(self._run, lambda: self._waiting.put(None), "pdkv-nixl-gather")

    def forget(self, agents: list[str]) -> None:
        """Forget readers that are gone. On the message thread."""
        for key in [key for key in self._requests if key[0] in agents]:
            self._end(key)

    def _on_gather(self, blob: RankBlob, message: Gather) -> None:
        try:
            request = self._accept(blob, message)
        except (KVNotFound, ValueError):
            self._endpoint.try_send(blob, Refused(message.request, KVNotFound.code))
            return
        self._requests[blob.agent, message.request] = request
        self._turns.append(request)

    def _accept(self, blob: RankBlob, message: Gather) -> _Request:
        """Accept a request. Raises KVNotFound or ValueError if it cannot be served here."""
        wanted = unpack_blocks(message.units, MAX_UNITS)
        num_open = sum(agent == blob.agent for agent, _ in self._requests)
        if (
            wanted is None
            or not wanted.ids.size
            or num_open >= MAX_OPEN_REQUESTS
            or (blob.agent, message.request) in self._requests
        ):
            raise KVNotFound("the request cannot be served")
        units = wanted.ids
        part = message.part
        if (
            not 0 <= part.head_start < part.head_stop <= self._pool.num_heads
            or not 0 <= part.layer_start < part.layer_stop <= self._pool.num_layers
            or units.max() >= self._pool.num_units
        ):
            raise KVNotFound("no such units")
        layer_bytes = self._pool.unit_bytes(part) // part.num_layers
        chunk_bytes = min(message.chunk_bytes, self._endpoint.slot_bytes)
        chunks = plan_chunks(units.size, part.num_layers, layer_bytes, chunk_bytes)
        return _Request(blob, message, units, deque(enumerate(chunks)))

    def _on_freed(self, blob: RankBlob, message: Freed) -> None:
        request = self._requests.get((blob.agent, message.request))
        if request is not None and message.slot in request.slots - self._busy:
            request.slots.remove(message.slot)
            self._free.append(message.slot)

    def _on_dropped(self, blob: RankBlob, message: Dropped) -> None:
        self._end((blob.agent, message.request))

    def _on_reset(self, blob: RankBlob, message: Reset) -> None:
        keep = set(message.open_requests)
        for agent, number in [key for key in self._requests if key[0] == blob.agent]:
            if number not in keep:
                self._end((agent, number))

    def _end(self, key: tuple[str, int]) -> None:
        request = self._requests.pop(key, None)
        if request is not None:
            self._free.extend(request.slots - self._busy)
            request.slots.clear()
            request.chunks.clear()

    def _gather_next(self) -> bool:
        """Gather one chunk of the next request that may have a slot."""
        for _ in range(len(self._turns)):
            request = self._turns.popleft()
            if not request.chunks:
                continue
            self._turns.append(request)
            if self._free and self._slots_of(request.blob.agent) < self._most:
                self._gather(request)
                return True
        return False

    def _slots_of(self, agent: str) -> int:
        return sum(len(request.slots) for (name, _), request in self._requests.items() if name == agent)

    def _gather(self, request: _Request) -> None:
        number, chunk = request.chunks.popleft()
        slot = self._free.pop()
        request.slots.add(slot)
        ready = _Ready(request, number, chunk, slot, self.after)
        if self._pool.on_cpu and ready.after is ON_HOST:
            self._tell(ready, *self._fill(ready))
            return
        self._thread.start()
        self._busy.add(slot)
        self._waiting.put(ready)

    def _run(self, stopping: Event) -> None:
        """The thread that waits for the device."""
        streams_of(self._pool.kv_cache.device).use()
        while (ready := self._waiting.get()) is not None:
            try:
                filled = self._fill(ready)
            except Exception:  # whatever the error was, the next chunk is gathered
                logger.exception("a chunk is not gathered")
                filled = 0, TransferError.code
            self._endpoint.post(partial(self._filled, ready, *filled))

    def _filled(self, ready: _Ready, generation: int, code: str) -> None:
        """Finish a chunk after `_run`."""
        self._busy.discard(ready.slot)
        if ready.slot in ready.request.slots:
            self._tell(ready, generation, code)
        else:  # its reader left in the meantime
            self._free.append(ready.slot)

    def _fill(self, ready: _Ready) -> tuple[int, str]:
        """Gather a chunk into its slot. Returns the slot's generation, and why the chunk is missing if it is."""
        message, chunk = ready.request.message, ready.chunk
        part = part_of(message.part, chunk)
        units = ready.request.units[chunk.first : chunk.stop]
        size = units.size * self._pool.unit_bytes(part)
        try:
            with self._guard(message.offer):
                memory, generation = self._endpoint.slots.begin(ready.slot)
                self._pool.gather(units, part, memory[:size], after=ready.after, timeout_s=STEP_TIMEOUT_S)
        except (KVNotFound, TransferTimeout) as error:
            return 0, error.code
        return generation, ""

    def _tell(self, ready: _Ready, generation: int, code: str) -> None:
        """Tell the reader of a chunk, or that no further one will come."""
        request = ready.request
        if code:  # the offer is over; the reader may still be at an earlier slot
            request.chunks.clear()
            self._endpoint.try_send(request.blob, Refused(request.message.request, code))
            return
        gathered = Gathered(request.message.request, ready.number, ready.slot, generation)
        if not self._endpoint.try_send(request.blob, gathered):
            request.chunks.clear()  # its reader is gone or will time out: it keeps the slot until that is known

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.stop()


def no_offer(offer: int) -> AbstractContextManager[None]:
    """The guard of a source without offers: leased blocks may be read."""
    if offer:
        raise KVNotFound("nothing is offered here")
    return nullcontext()
