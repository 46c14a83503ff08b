"""The receiving side of a push over NIXL: threads that read what senders offer, a lane for each sender.

Nobody but these threads writes the transfers' blocks, so what is given up needs nobody's word.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from pdkv.connectors.arena.memory import NUM_WORDS
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.blocks import expand_blocks
from pdkv.connectors.nixl.fetch import Wanted
from pdkv.connectors.nixl.rank import NixlRank
from pdkv.connectors.nixl.wire import Offer, RankBlob, Taken
from pdkv.connectors.peer.push_worker import PushWorker, piece_ids
from pdkv.connectors.transfer.block_runs import unpack_blocks
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.connectors.transfer.lanes import IOLanes, LaneConfig
from pdkv.connectors.transfer.worker import JOIN_TIMEOUT_S, Job
from pdkv.errors import KVNotFound, PdkvError, StaleGeneration, TransferCancelled, TransferError, TransferTimeout

logger = logging.getLogger(__name__)

MAX_EARLY = 1024
MAX_EARLY_PER_SENDER = 512
_GRACE_S = 1.0
"""Offers may be earlier than this rank has heard of the transfer: so many of them, by so much."""

MAX_OPEN = NUM_WORDS
"""Of one sender, early or not, until they are answered: a sender has no more words to withdraw them by."""


class PushReceiver:
    """Reads offers into the blocks of their transfers. Thread-safe."""

    def __init__(self, worker: PushWorker, rank: NixlRank, lanes: LaneConfig) -> None:
        self._worker = worker
        self._rank = rank
        self._endpoint = rank.endpoint
        self._lock = threading.Lock()  # guards the next two
        self._early: list[tuple[float, RankBlob, Offer]] = []  # the oldest first
        self._open: Counter[str] = Counter()  # offers by agent that are not answered yet
        self._lanes: IOLanes[tuple[RankBlob, Offer]] = IOLanes(
            lanes,
            self._take,
            refuse=lambda item, error: self._answer(*item, TransferError.code),
            make_scratch=lambda lane: None,
            close_scratch=lambda lane, scratch: None,
            do_idle_work=lambda: False,
        )

    def listen(self) -> None:
        """Take the messages to receivers."""
        self._endpoint.handle(Offer, self._on_offer)
        self._endpoint.add_tick(self._refuse_early)

    def register(self, key: TransferKey) -> None:
        """A receive has begun; what came too early for it is read."""
        for blob, offer in self._take_early(lambda _, offer: offer.key == key):
            self._lanes.put(blob.agent, (blob, offer))

    def retire(self, agents: Iterable[str]) -> None:
        """These senders are gone."""
        self._lanes.retire(agents)

    def shutdown(self) -> None:
        """Stop the threads."""
        self._lanes.shutdown(JOIN_TIMEOUT_S)

    # --- the message thread ---------------------------------------------------------------------------------------

    def _on_offer(self, blob: RankBlob, offer: Offer) -> None:
        with self._lock:
            self._open[blob.agent] += 1
            too_many = self._open[blob.agent] > MAX_OPEN
        if too_many:
            self._answer(blob, offer, TransferError.code)
        elif self._is_known(offer.key):
            self._lanes.put(blob.agent, (blob, offer))
        elif not self._keep_early(blob, offer):
            self._answer(blob, offer, KVNotFound.code)
        elif self._is_known(offer.key):  # registered meanwhile, and `register` has seen nothing
            self.register(offer.key)

    def _keep_early(self, blob: RankBlob, offer: Offer) -> bool:
        """Whether there was room for it."""
        with self._lock:
            of_sender = sum(other.agent == blob.agent for _, other, _ in self._early)
            if len(self._early) >= MAX_EARLY or of_sender >= MAX_EARLY_PER_SENDER:
                return False
            self._early.append((time.monotonic(), blob, offer))
            return True

    def _take_early(self, is_wanted: Callable[[float, Offer], bool]) -> list[tuple[RankBlob, Offer]]:
        """Those that are not early any more."""
        with self._lock:
            taken = [(blob, offer) for since, blob, offer in self._early if is_wanted(since, offer)]
            if taken:
                self._early = [early for early in self._early if not is_wanted(early[0], early[2])]
        return taken

    def _refuse_early(self) -> None:
        """What was early for too long."""
        latest = time.monotonic() - _GRACE_S
        for blob, offer in self._take_early(lambda since, _: since < latest):
            self._answer(blob, offer, KVNotFound.code)

    def _is_known(self, key: TransferKey) -> bool:
        try:
            return bool(self._worker.find_incoming(key))
        except KVNotFound:
            return False

    def _answer(self, blob: RankBlob, offer: Offer, code: str) -> None:
        with self._lock:
            self._open[blob.agent] -= 1
            if not self._open[blob.agent]:
                del self._open[blob.agent]
        self._endpoint.try_send(blob, Taken(offer.offer, code))

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def _take(self, item: tuple[RankBlob, Offer], scratch: None) -> None:
        """Read what is offered into the transfer's blocks."""
        blob, offer = item
        code = ""
        try:
            self._read(blob, offer)
        except PdkvError as error:
            code = error.code
            logger.debug("offer of %s for %s: %s", blob.agent, offer.key, error)
        except Exception:  # whatever it was, the next offer is taken
            code = TransferError.code
            self._worker.num_unexpected_errors += 1
            logger.exception("offer of %s for %s", blob.agent, offer.key)
        self._answer(blob, offer, code)

    def _read(self, blob: RankBlob, offer: Offer) -> None:
        """Read it, then see whether it still stood: if not, its blocks may have been another request's."""
        worker, rank = self._worker, self._rank
        job, incoming = worker.find_incoming(offer.key)
        piece = offer.piece
        incoming.check_range(piece)
        layout, start = worker.config.layout, incoming.ticket.start
        if offer.whole and piece.num_heads != layout.num_kv_heads:
            raise TransferError("whole blocks are offered that are none here")
        ours = piece_ids(
            incoming.block_ids, layout.block_size, piece.start, piece.stop, table_start=start, in_units=not offer.whole
        )
        offered = unpack_blocks(offer.blocks, ours.size)
        if offered is None or offered.ids.size != ours.size:
            raise TransferError(f"agent {blob.agent} offers something else than is wanted")
        theirs = offered.ids
        reading = _Reading(job, time.monotonic() + worker.timeout_s)

        def guard() -> AbstractContextManager[None]:
            return _writing(worker, job)

        card = self._endpoint.peers.card_of(blob)
        sender = (card.engine, card.epoch)
        own = worker.digests_for(incoming, piece, sender)
        wanted = Wanted(theirs, offer.head_start, ours, piece.part, offer.offer, guard)
        num_bytes = self._read_digested(reading, blob, offer, wanted, own)
        num_bytes = num_bytes or self._read_only(reading, blob, offer, wanted)
        if rank.reader.word(reading, blob, offer.permit) != offer.nonce:
            raise StaleGeneration(f"agent {blob.agent} has withdrawn its offer")
        worker.landed(job, piece, num_bytes, offer.digests, sender, own)

    def _read_only(self, reading: "_Reading", blob: RankBlob, offer: Offer, wanted: Wanted) -> int:
        """Read blocks or units. Returns the bytes."""
        reader, part = self._rank.reader, wanted.part
        if not offer.whole:
            return reader.read_units(reading, blob, wanted)
        layers = range(part.layer_start, part.layer_stop)
        return reader.read_blocks(
            reading, blob, wanted.theirs, wanted.ours, layers, offer=offer.offer, guard=wanted.guard
        )

    def _read_digested(
        self, reading: "_Reading", blob: RankBlob, offer: Offer, wanted: Wanted, own: PieceDigests | None
    ) -> int:
        """Read and digest in one pass, where the peer's pool is mapped. Returns the bytes; 0: nothing has been read."""
        if own is None or not own.in_kernel:
            return 0
        theirs, tokens = wanted.theirs, own.tokens
        if offer.whole:
            theirs = expand_blocks(theirs, self._rank.units.units_per_block)[: tokens.units.size]
        wanted = wanted._replace(theirs=theirs, ours=tokens.units)
        digests = self._rank.reader.read_digested(reading, blob, wanted, own.pool, tokens)
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
        if time.monotonic() >= self.deadline:
            raise TransferTimeout("an offer was not read in time", transfer_id=self.job.key[0], attempt=self.job.key[1])

    def remaining_s(self) -> float:
        """Seconds until the deadline. Raises as `check` does."""
        self.check()
        return max(self.deadline - time.monotonic(), 1e-3)


@contextmanager
def _writing(worker: PushWorker, job: Job) -> Iterator[None]:
    """While a posted receive's blocks are written. Raises TransferCancelled when they may not be."""
    if not worker.enter(job):
        raise TransferCancelled("cancelled", transfer_id=job.key[0], attempt=job.key[1])
    try:
        yield
    finally:
        worker.leave(job)
