"""The reading side of gathering (gather.py): asks peers to gather, reads their slots and scatters the content.

Memory is only written by its owner: a reader's blocks are written by its own threads, so a load can be given up without
asking the peer.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from pdkv.connectors.nixl.endpoint import NixlEndpoint, Waiting
from pdkv.connectors.nixl.gather import MAX_UNITS, Chunk, part_of, plan_chunks
from pdkv.connectors.nixl.memory import PAGE_BYTES, WORD_BYTES, generation_offset
from pdkv.connectors.nixl.wire import Dropped, Freed, Gather, Gathered, RankBlob, Refused
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.connectors.transfer.planning import Ids
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.errors import KVNotFound, StaleGeneration, TransferError

Guard = Callable[[], AbstractContextManager[None]]


class Wanted(NamedTuple):
    """A peer's units, and their destination."""

    theirs: Ids
    head_start: int  # in the peer's numbering
    ours: Ids
    part: UnitPart  # number of own units
    offer: int = 0  # the peer's number of the offer, in a push
    guard: Guard = nullcontext  # around each write into the own pool


class _Open(NamedTuple):
    """A request that waits for chunks."""

    agent: str
    number: int
    news: "queue.SimpleQueue[Gathered | Refused]"


class GatherReader:
    """Thread-safe."""

    def __init__(self, endpoint: NixlEndpoint, units: UnitPool) -> None:
        self._endpoint = endpoint
        self._pool = units
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        endpoint.handle(Gathered, self._on_news)
        endpoint.handle(Refused, self._on_news)
        endpoint.report_open_requests(self._open_requests)

    def fetch(self, job: Waiting, blob: RankBlob, wanted: Wanted) -> int:
        """Copy a peer's units into this rank's units.

        Returns:
            The bytes copied.

        Raises:
            TransferError: the peer refuses or is gone, or the job must stop.
        """
        for first in range(0, wanted.theirs.size, MAX_UNITS):
            piece = slice(first, first + MAX_UNITS)
            self._fetch(job, blob, wanted._replace(theirs=wanted.theirs[piece], ours=wanted.ours[piece]))
        return int(wanted.theirs.size) * self._pool.unit_bytes(wanted.part)

    def _fetch(self, job: Waiting, blob: RankBlob, wanted: Wanted) -> None:
        """Fetch what fits into one request."""
        part = wanted.part
        chunk_bytes = min(self._endpoint.slot_bytes, blob.slot_bytes)
        try:
            layer_bytes = self._pool.unit_bytes(part) // part.num_layers
            chunks = plan_chunks(wanted.theirs.size, part.num_layers, layer_bytes, chunk_bytes)
        except ValueError as error:
            raise TransferError(str(error)) from None
        units, head_stop = pack_blocks(wanted.theirs), wanted.head_start + part.num_heads
        with self._request(blob) as request:
            self._endpoint.send(
                blob,
                Gather(
                    request.number, units, wanted.head_start, head_stop, part.layer_start, part.layer_stop,
                    chunk_bytes, wanted.offer,
                ),
            )  # fmt: skip
            missing = dict(enumerate(chunks))
            while missing:
                gathered = self._next(job, blob, request)
                chunk = missing.pop(gathered.chunk, None)
                if chunk is None:
                    raise TransferError(f"agent {blob.agent} has gathered units that were not requested")
                self._take(job, blob, gathered, chunk, wanted)

    def _take(self, job: Waiting, blob: RankBlob, gathered: Gathered, chunk: Chunk, wanted: Wanted) -> None:
        """Read one slot and scatter it."""
        piece = part_of(wanted.part, chunk)
        size = (chunk.stop - chunk.first) * self._pool.unit_bytes(piece)
        with self._endpoint.buffers.take(job.remaining_s()) as buffer:
            self._endpoint.read_bytes(job, blob, buffer[:size], blob.slots, gathered.slot * blob.slot_bytes)
            after = buffer[-PAGE_BYTES:][:WORD_BYTES]
            offset = generation_offset(blob.slots.size, blob.slot_bytes, gathered.slot)
            self._endpoint.read_bytes(job, blob, after, blob.slots, offset)
            if int(after.view(np.int64)[0]) != gathered.generation:
                raise StaleGeneration(f"agent {blob.agent} has reused slot {gathered.slot}")
            self._endpoint.try_send(blob, Freed(gathered.request, gathered.slot))
            with wanted.guard():
                self._pool.scatter(wanted.ours[chunk.first : chunk.stop], piece, buffer[:size])

    def _next(self, job: Waiting, blob: RankBlob, request: _Open) -> Gathered:
        """Wait for a chunk. Raises a TransferError."""
        message = self._endpoint.next_answer(job, blob, request.news)
        if isinstance(message, Refused):
            raise KVNotFound(f"agent {blob.agent} refused to gather: {message.code}")
        return message

    @contextmanager
    def _request(self, blob: RankBlob) -> Iterator[_Open]:
        """Open a request. At its end the source is told that its slots are no longer read."""
        request = _Open(blob.agent, next(self._numbers), queue.SimpleQueue())
        with self._lock:
            self._open[request.number] = request
        try:
            yield request
        finally:
            with self._lock:
                del self._open[request.number]
            self._endpoint.try_send(blob, Dropped(request.number))

    def _on_news(self, blob: RankBlob, message: Gathered | Refused) -> None:
        with self._lock:
            request = self._open.get(message.request)
        if request is not None and request.agent == blob.agent:  # else it is over
            request.news.put(message)

    def _open_requests(self, agent: str) -> list[int]:
        with self._lock:
            return [number for number, request in self._open.items() if request.agent == agent]
