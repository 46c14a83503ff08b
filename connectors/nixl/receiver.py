"""The receiving side of a push over NIXL: threads that read what senders offer, a lane for each sender.

Only these threads write the transfers' blocks, so a transfer can be given up without asking the sender. A sender
digests its offers while they are read here: nothing is confirmed before its digests have arrived, too.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pdkv.connectors.arena.arena import NUM_WORDS
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.blocks import expand_blocks
from pdkv.connectors.nixl.fetch import Wanted
from pdkv.connectors.nixl.wire import Offer, OfferDigests, RankBlob, Taken
from pdkv.connectors.nixl.worker import NixlPush
from pdkv.connectors.peer.cards import Incarnation
from pdkv.connectors.peer.push_worker import piece_ids
from pdkv.connectors.transfer.block_runs import unpack_blocks
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.connectors.transfer.lanes import IOLanes, LaneConfig
from pdkv.connectors.transfer.worker import JOIN_TIMEOUT_S, Job
from pdkv.errors import KVNotFound, PdkvError, StaleGeneration, TransferCancelled, TransferError, TransferTimeout

logger = logging.getLogger(__name__)

MAX_EARLY = 1024
MAX_EARLY_PER_SENDER = 512
_GRACE_S = 5.0
"""Offers that may arrive before this rank is told of the transfer, after the steps in progress: the number, and
seconds.
"""

MAX_OPEN = NUM_WORDS
"""Open offers of one sender, early or not, until they are answered: a sender has no more words to withdraw them by."""

MAX_OPEN_BYTES = 64 << 20
"""Bytes of one sender's open offers and their digests, which are 16 bytes for 16 tokens of a layer and a shard of
heads.
"""


class _Read(NamedTuple):
    """An offer with its data in its blocks."""

    job: Job
    sender: Incarnation
    num_bytes: int
    found: bytes | None  # digests of the blocks' content; None: they are not compared
    deadline: float  # of the sender's


@dataclass(eq=False, slots=True)
class _Arrival:
    """An offer that is not answered yet. Its last two fields are set in either order, under the receiver's lock."""

    blob: RankBlob
    offer: Offer
    since: float
    digests: bytes | None = None  # the sender's
    read: _Read | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank must keep for the offer."""
        return len(self.offer.blocks) + len(self.digests or b"")


@dataclass(slots=True)
class _Sender:
    """Open offers of one sender."""

    arrivals: dict[int, _Arrival] = field(default_factory=dict)  # by offer
    num_bytes: int = 0

    def add(self, arrival: _Arrival) -> bool:
        """Returns False if there are too many; the arrival must be answered all the same."""
        self.arrivals[arrival.offer.offer] = arrival
        self.num_bytes += arrival.num_bytes
        return len(self.arrivals) <= MAX_OPEN and self.num_bytes <= MAX_OPEN_BYTES

    def add_digests(self, arrival: _Arrival, digests: bytes) -> None:
        """Add digests; without room they are dropped, and the offer fails for it."""
        has_room = self.num_bytes + len(digests) <= MAX_OPEN_BYTES
        arrival.digests = digests if has_room else b""
        self.num_bytes += len(arrival.digests)

    def remove(self, offer: int) -> None:
        """Remove an answered offer."""
        arrival = self.arrivals.pop(offer, None)
        if arrival is not None:
            self.num_bytes -= arrival.num_bytes


class PushReceiver:
    """Reads offers into the blocks of their transfers. Thread-safe."""

    def __init__(self, worker: NixlPush, lanes: LaneConfig) -> None:
        self._worker = worker
        self._endpoint = worker.endpoint
        self._lock = threading.Lock()  # guards the next two
        self._early: list[_Arrival] = []  # oldest first
        self._senders: dict[str, _Sender] = {}  # by agent; those with an open offer
        self._lanes: IOLanes[_Arrival] = IOLanes(
            lanes,
            self._take,
            refuse=lambda arrival, error: self._answer(arrival, TransferError.code),
            make_scratch=lambda lane: self._endpoint.use_device(),
            close_scratch=lambda lane, scratch: None,
            do_idle_work=lambda: False,
        )

    def listen(self) -> None:
        """Handle messages to receivers."""
        self._endpoint.handle(Offer, self._on_offer)
        self._endpoint.handle(OfferDigests, self._on_digests)
        self._endpoint.add_tick(self._refuse_late)

    def register(self, key: TransferKey) -> None:
        """Note that a receive has begun; early offers for it are read."""
        for arrival in self._take_early(lambda early: early.offer.key == key):
            self._lanes.put(arrival.blob.agent, arrival)

    def retire(self, agents: Sequence[str]) -> None:
        """Forget these senders, which are gone."""
        self._lanes.retire(agents)
        with self._lock:
            for agent in agents:
                self._senders.pop(agent, None)

    def shutdown(self) -> None:
        """Stop the threads."""
        self._lanes.shutdown(JOIN_TIMEOUT_S)

    # --- the message thread ---------------------------------------------------------------------------------------

    def _on_offer(self, blob: RankBlob, offer: Offer) -> None:
        arrival = _Arrival(blob, offer, self._worker.clock.now())
        with self._lock:
            sender = self._senders.setdefault(blob.agent, _Sender())
            if offer.offer in sender.arrivals:
                raise TransferError(f"agent {blob.agent} makes offer {offer.offer} twice")
            has_room = sender.add(arrival)
        if not has_room:
            self._answer(arrival, TransferError.code)
        elif self._is_known(offer.key):
            self._lanes.put(blob.agent, arrival)
        elif not self._keep_early(arrival):
            self._answer(arrival, KVNotFound.code)
        elif self._is_known(offer.key):  # registered in the meantime, and `register` has not seen this one
            self.register(offer.key)

    def _on_digests(self, blob: RankBlob, message: OfferDigests) -> None:
        with self._lock:
            sender = self._senders.get(blob.agent)
            arrival = sender.arrivals.get(message.offer) if sender is not None else None
            if sender is None or arrival is None:
                return  # it has been answered
            if arrival.digests is not None:
                raise TransferError(f"agent {blob.agent} sends digests of offer {message.offer} twice")
            sender.add_digests(arrival, message.digests)
            is_read = arrival.read is not None
        if is_read:
            self._confirm(arrival)

    def _keep_early(self, arrival: _Arrival) -> bool:
        """Keep an early offer. Returns whether there was room for it."""
        with self._lock:
            of_sender = sum(other.blob.agent == arrival.blob.agent for other in self._early)
            if len(self._early) >= MAX_EARLY or of_sender >= MAX_EARLY_PER_SENDER:
                return False
            self._early.append(arrival)
            return True

    def _take_early(self, is_wanted: Callable[[_Arrival], bool]) -> list[_Arrival]:
        """The early offers that can be read now."""
        with self._lock:
            taken = [early for early in self._early if is_wanted(early)]
            if taken:
                self._early = [early for early in self._early if not is_wanted(early)]
        return taken

    def _refuse_late(self) -> None:
        """Refuse offers that were early for too long, and those without digests long after they were read."""
        now = self._worker.clock.now()
        for arrival in self._take_early(lambda early: early.since < now - _GRACE_S):
            self._answer(arrival, KVNotFound.code)
        with self._lock:
            late = [
                arrival
                for sender in self._senders.values()
                for arrival in sender.arrivals.values()
                if arrival.digests is None and arrival.read is not None and arrival.read.deadline <= now
            ]
            for arrival in late:
                arrival.digests = b""
        for arrival in late:
            self._confirm(arrival)

    def _is_known(self, key: TransferKey) -> bool:
        try:
            return bool(self._worker.find_incoming(key))
        except KVNotFound:
            return False

    def _answer(self, arrival: _Arrival, code: str) -> None:
        agent, offer = arrival.blob.agent, arrival.offer.offer
        with self._lock:
            sender = self._senders.get(agent)
            if sender is not None:
                sender.remove(offer)
                if not sender.arrivals:
                    self._senders.pop(agent)
        self._endpoint.try_send(arrival.blob, Taken(offer, code))

    # --- any thread -----------------------------------------------------------------------------------------------

    def _confirm(self, arrival: _Arrival) -> None:
        """Answer an offer once data and digests have arrived."""
        read = arrival.read
        assert read is not None
        try:
            self._worker.confirm(
                read.job, arrival.offer.piece, read.num_bytes, arrival.digests or b"", read.sender, read.found
            )
        except Exception as error:
            self._fail(arrival, error)
        else:
            self._answer(arrival, "")

    def _fail(self, arrival: _Arrival, error: Exception) -> None:
        """Fail an offer; whatever the error, the next one is handled."""
        who = (arrival.blob.agent, arrival.offer.key)
        if isinstance(error, PdkvError):
            logger.debug("offer of %s for %s: %s", *who, error)
        else:
            self._worker.num_unexpected_errors += 1
            logger.error("offer of %s for %s", *who, exc_info=error)
        self._answer(arrival, error.code if isinstance(error, PdkvError) else TransferError.code)

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def _take(self, arrival: _Arrival, scratch: None) -> None:
        """Read an offer into the transfer's blocks."""
        try:
            read = self._read(arrival.blob, arrival.offer)
        except Exception as error:
            self._fail(arrival, error)
            return
        with self._lock:
            arrival.read = read
            if read.found is None:
                arrival.digests = b""
            has_digests = arrival.digests is not None
        if has_digests:
            self._confirm(arrival)

    def _read(self, blob: RankBlob, offer: Offer) -> _Read:
        """Read it, then check whether it still stood: if not, its blocks may have belonged to another request."""
        worker = self._worker
        job, incoming = worker.find_incoming(offer.key)
        piece = offer.piece
        incoming.check_range(piece)
        layout, start = worker.config.layout, incoming.ticket.start
        if offer.whole and piece.num_heads != layout.num_kv_heads:
            raise TransferError("blocks of another size are offered")
        ours = piece_ids(
            incoming.block_ids, layout.block_size, piece.start, piece.stop, table_start=start, in_units=not offer.whole
        )
        offered = unpack_blocks(offer.blocks, ours.size)
        if offered is None or offered.ids.size != ours.size:
            raise TransferError(f"agent {blob.agent} offers something other than what is wanted")
        theirs = offered.ids
        reading = _Reading(job, worker.clock.now() + worker.timeout_s)
        incoming.after.wait(reading.remaining_s())

        def guard() -> AbstractContextManager[None]:
            return _writing(worker, job)

        card = self._endpoint.peers.card_of(blob)
        sender = (card.engine, card.epoch)
        own = worker.digests_for(incoming, piece, sender)
        wanted = Wanted(theirs, offer.head_start, ours, piece.part, offer.offer, guard)
        num_bytes = self._read_digested(reading, blob, offer, wanted, own)
        num_bytes = num_bytes or self._read_only(reading, blob, offer, wanted)
        if worker.reader.word(reading, blob, offer.permit) != offer.nonce:
            raise StaleGeneration(f"agent {blob.agent} has withdrawn its offer")
        with guard():
            found = None if own is None else own.finish()
        return _Read(job, sender, num_bytes, found, reading.deadline)

    def _read_only(self, reading: "_Reading", blob: RankBlob, offer: Offer, wanted: Wanted) -> int:
        """Read blocks or units. Returns the bytes."""
        reader, part = self._worker.reader, wanted.part
        if not offer.whole:
            return reader.read_units(reading, blob, wanted)
        layers = range(part.layer_start, part.layer_stop)
        return reader.read_blocks(
            reading, blob, wanted.theirs, wanted.ours, layers, offer=offer.offer, guard=wanted.guard
        )

    def _read_digested(
        self, reading: "_Reading", blob: RankBlob, offer: Offer, wanted: Wanted, own: PieceDigests | None
    ) -> int:
        """Read and digest in one pass, if the peer's pool is mapped. Returns the bytes; 0: nothing has been read."""
        if own is None or not own.in_kernel:
            return 0
        theirs, tokens = wanted.theirs, own.tokens
        if offer.whole:
            theirs = expand_blocks(theirs, self._worker.units.units_per_block)[: tokens.units.size]
        wanted = wanted._replace(theirs=theirs, ours=tokens.units)
        digests = self._worker.reader.read_digested(reading, blob, wanted, own.pool, tokens)
        if digests is None:
            return 0
        own.take(digests)
        return len(digests) * own.pool.unit_bytes(wanted.part)


@dataclass(frozen=True)
class _Reading:
    """One offer of a receive, which itself may last until the prompt is computed."""

    job: Job
    deadline: float

    def check(self) -> None:
        """Raises TransferCancelled or TransferTimeout."""
        self.job.check()
        if self.job.clock.now() >= self.deadline:
            raise TransferTimeout("an offer was not read in time", key=self.job.key)

    def remaining_s(self) -> float:
        """Seconds until the deadline. Raises the same as `check`."""
        self.check()
        return max(self.deadline - self.job.clock.now(), 1e-3)


@contextmanager
def _writing(worker: NixlPush, job: Job) -> Iterator[None]:
    """A context in which a posted receive's blocks are written. Raises TransferCancelled if they must not be."""
    if not worker.enter(job):
        raise TransferCancelled("cancelled", key=job.key)
    try:
        yield
    finally:
        worker.leave(job)
