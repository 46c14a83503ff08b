"""Small pieces: the source gathers units into registered slots, the reader reads slots whole and scatters them.

The source gathers the next chunk while the reader reads and scatters the last one. Whoever writes memory owns it: a
reader's blocks are written by its own threads only, so a load that is given up needs nobody's word.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pdkv.connectors.block_runs import expand_runs, make_runs
from pdkv.connectors.nixl_endpoint import NixlEndpoint
from pdkv.connectors.nixl_wire import Dropped, Freed, Gather, Gathered, RankBlob, Refused, Reset
from pdkv.connectors.planning import Ids, as_ids
from pdkv.connectors.transfer_worker import Job
from pdkv.connectors.units import UnitPart, UnitPool
from pdkv.errors import KVNotFound, PeerGone, TransferError

MAX_UNITS = 2048
"""Units of one request: scattered ones must fit into a message."""

MAX_OPEN_REQUESTS = 256
"""Of one peer, on the source's side; more are refused."""

_LOOK_S = 0.02
"""So often who waits for a chunk looks whether it is still wanted."""

Guard = Callable[[], AbstractContextManager[None]]


class Chunk(NamedTuple):
    """Units [first, stop) of a request, and layers of them."""

    first: int
    stop: int
    layer_start: int
    layer_stop: int


def plan_chunks(num_units: int, num_layers: int, layer_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut units into chunks of at most `chunk_bytes`, by layers where one unit is too large. Both sides cut alike.

    Args:
        layer_bytes: of one layer of one unit's image.

    Raises:
        ValueError: not even one layer fits.
    """
    if layer_bytes > chunk_bytes:
        raise ValueError(f"one layer of a unit has {layer_bytes} bytes, a slot {chunk_bytes}")
    layers = min(chunk_bytes // layer_bytes, num_layers)
    units = max(chunk_bytes // (layer_bytes * num_layers), 1)
    return [
        Chunk(first, min(first + units, num_units), layer, min(layer + layers, num_layers))
        for first in range(0, num_units, units)
        for layer in range(0, num_layers, layers)
    ]


# --- source -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Request:
    """A reader's request: chunks that are still to be gathered, and slots that it has."""

    blob: RankBlob
    message: Gather
    units: Ids
    chunks: deque[tuple[int, Chunk]]
    slots: set[int] = field(default_factory=set)


class GatherSource:
    """Gathers for peers, on the endpoint's message thread. A slot is used again when its reader says so, or is gone.

    Args:
        guard: for an offer's number: whether its blocks may be read now, as a context. Raises KVNotFound.
    """

    def __init__(
        self, endpoint: NixlEndpoint, units: UnitPool, guard: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        self.num_gathered_bytes = 0
        self._endpoint = endpoint
        self._pool = units
        self._guard = guard
        self._requests: dict[tuple[str, int], _Request] = {}
        self._turns: deque[_Request] = deque()  # requests with chunks to gather
        num_slots = endpoint.slots.size // endpoint.slot_bytes
        self._free = list(range(num_slots))
        self._most = max(num_slots // 2, 1)  # slots of one peer: one that is stuck leaves some to others
        endpoint.handle(Gather, self._on_gather)
        endpoint.handle(Freed, self._on_freed)
        endpoint.handle(Dropped, self._on_dropped)
        endpoint.handle(Reset, self._on_reset)
        endpoint.add_work(self._gather_next)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody reads."""
        return len(self._free)

    def forget(self, agents: list[str]) -> None:
        """These readers are gone. On the message thread."""
        for key in [key for key in self._requests if key[0] in agents]:
            self._end(key)

    def _on_gather(self, blob: RankBlob, message: Gather) -> None:
        expanded = expand_runs(message.units)
        key = (blob.agent, message.request)
        part = UnitPart(message.head_start, message.head_stop, 0, self._pool.num_layers)
        wanted = expanded is not None and 0 < len(expanded[0]) <= MAX_UNITS and key not in self._requests
        inside = 0 <= part.head_start < part.head_stop <= self._pool.num_heads
        if not wanted or not inside or sum(agent == blob.agent for agent, _ in self._requests) >= MAX_OPEN_REQUESTS:
            self._endpoint.try_send(blob, Refused(message.request, KVNotFound.code))
            return
        assert expanded is not None
        units = as_ids(expanded[0])
        layer_bytes = self._pool.unit_bytes(part) // part.num_layers
        try:
            chunks = plan_chunks(
                units.size, part.num_layers, layer_bytes, min(message.chunk_bytes, self._endpoint.slot_bytes)
            )
        except ValueError:
            self._endpoint.try_send(blob, Refused(message.request, TransferError.code))
            return
        request = _Request(blob, message, units, deque(enumerate(chunks)))
        self._requests[key] = request
        self._turns.append(request)

    def _on_freed(self, blob: RankBlob, message: Freed) -> None:
        request = self._requests.get((blob.agent, message.request))
        if request is not None and message.slot in request.slots:
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
            self._free.extend(request.slots)
            request.chunks.clear()

    def _gather_next(self) -> bool:
        """One chunk of the next request that may have a slot."""
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
        message = request.message
        part = UnitPart(message.head_start, message.head_stop, chunk.layer_start, chunk.layer_stop)
        slot = self._free.pop()
        request.slots.add(slot)
        size = (chunk.stop - chunk.first) * self._pool.unit_bytes(part)
        start = slot * self._endpoint.slot_bytes
        try:
            with self._guard(message.offer):
                self._pool.gather(
                    request.units[chunk.first : chunk.stop], part, self._endpoint.slots[start : start + size]
                )
        except (KVNotFound, ValueError):  # the offer is over, or there are no such units
            self._end((request.blob.agent, message.request))
            self._endpoint.try_send(request.blob, Refused(message.request, KVNotFound.code))
            return
        self.num_gathered_bytes += size
        if not self._endpoint.try_send(request.blob, Gathered(message.request, number, slot)):
            request.chunks.clear()  # its reader is gone, or will time out; the slot stays its own until that is known


# --- reader -------------------------------------------------------------------------------------------------------


class _Open(NamedTuple):
    """A request that waits for chunks."""

    agent: str
    news: "queue.SimpleQueue[Gathered | Refused]"


class GatherReader:
    """Has peers gather, reads their slots and scatters them. Thread-safe."""

    def __init__(self, endpoint: NixlEndpoint, units: UnitPool) -> None:
        self.num_unknown = 0  # chunks of requests that are over
        self._endpoint = endpoint
        self._pool = units
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        endpoint.handle(Gathered, self._on_news)
        endpoint.handle(Refused, self._on_news)
        endpoint.report_open_requests(self._open_requests)

    def fetch(
        self,
        job: Job,
        blob: RankBlob,
        theirs: Ids,
        head_start: int,
        ours: Ids,
        part: UnitPart,
        *,
        offer: int = 0,
        guard: Guard = nullcontext,
    ) -> int:
        """Copy a peer's units `theirs`, heads from `head_start` on, to `part` of the own units `ours`.

        Args:
            guard: a context around each write into the own pool.

        Returns:
            The bytes copied.

        Raises:
            TransferError: the peer refuses or is gone, the job has to stop.
        """
        return sum(
            self._fetch(job, blob, theirs[first:stop], head_start, ours[first:stop], part, offer, guard)
            for first in range(0, theirs.size, MAX_UNITS)
            for stop in [first + MAX_UNITS]
        )

    def _fetch(
        self,
        job: Job,
        blob: RankBlob,
        theirs: Ids,
        head_start: int,
        ours: Ids,
        part: UnitPart,
        offer: int,
        guard: Guard,
    ) -> int:
        chunk_bytes = min(self._endpoint.slot_bytes, blob.slot_bytes)
        try:
            layer_bytes = self._pool.unit_bytes(part) // part.num_layers
            chunks = plan_chunks(theirs.size, part.num_layers, layer_bytes, chunk_bytes)
        except ValueError as error:
            raise TransferError(str(error)) from None
        runs = make_runs(theirs.tolist())
        with self._request(blob) as (number, news):
            head_stop = head_start + part.num_heads
            self._endpoint.send(blob, Gather(number, runs, head_start, head_stop, chunk_bytes, offer))
            for _ in chunks:
                gathered = self._next(job, blob, news)
                if not 0 <= gathered.chunk < len(chunks):
                    raise TransferError(f"agent {blob.agent} has gathered what was not asked for")
                self._take(job, blob, number, gathered, chunks[gathered.chunk], ours, part, guard)
        return int(theirs.size * self._pool.unit_bytes(part))

    def _take(
        self,
        job: Job,
        blob: RankBlob,
        number: int,
        gathered: Gathered,
        chunk: Chunk,
        ours: Ids,
        part: UnitPart,
        guard: Guard,
    ) -> None:
        """Read one slot and scatter it."""
        endpoint = self._endpoint
        piece = UnitPart(part.head_start, part.head_stop, chunk.layer_start, chunk.layer_stop)
        size = (chunk.stop - chunk.first) * self._pool.unit_bytes(piece)
        with endpoint.buffers.take(job.remaining_s()) as buffer:
            endpoint.read(
                blob,
                (endpoint.buffer_region, as_ids([endpoint.buffer_offset(buffer)])),
                (blob.slots, as_ids([gathered.slot * blob.slot_bytes])),
                size,
                deadline=job.deadline,
                check=job.check,
            )
            endpoint.try_send(blob, Freed(number, gathered.slot))
            with guard():
                self._pool.scatter(ours[chunk.first : chunk.stop], piece, buffer[:size])

    def _next(self, job: Job, blob: RankBlob, news: "queue.SimpleQueue[Gathered | Refused]") -> Gathered:
        """Wait for a chunk. Raises a TransferError."""
        while True:
            try:
                message = news.get(timeout=min(_LOOK_S, job.remaining_s()))
            except queue.Empty:
                if self._endpoint.peers.agent(blob.agent) is None:
                    raise PeerGone(f"agent {blob.agent} is gone") from None
                continue
            if isinstance(message, Refused):
                raise KVNotFound(f"agent {blob.agent} does not gather: {message.code}")
            return message

    @contextmanager
    def _request(self, blob: RankBlob) -> "Iterator[tuple[int, queue.SimpleQueue[Gathered | Refused]]]":
        """A request's number and what comes for it. At its end the source hears that nothing is read any more."""
        number = next(self._numbers)
        request = _Open(blob.agent, queue.SimpleQueue())
        with self._lock:
            self._open[number] = request
        try:
            yield number, request.news
        finally:
            with self._lock:
                del self._open[number]
            self._endpoint.try_send(blob, Dropped(number))

    def _on_news(self, blob: RankBlob, message: Gathered | Refused) -> None:
        with self._lock:
            request = self._open.get(message.request)
        if request is None or request.agent != blob.agent:
            self.num_unknown += 1
            return
        request.news.put(message)

    def _open_requests(self, agent: str) -> list[int]:
        with self._lock:
            return [number for number, request in self._open.items() if request.agent == agent]


def no_offer(offer: int) -> AbstractContextManager[None]:
    """The guard of a source that offers nothing: what is leased may be read."""
    if offer:
        raise KVNotFound("nothing is offered here")
    return nullcontext()


def expand_blocks(block_ids: Ids, units_per_block: int) -> Ids:
    """The units of whole blocks."""
    units: Ids = (block_ids[:, None] * units_per_block + np.arange(units_per_block)).ravel()
    return units
