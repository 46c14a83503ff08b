"""The receiving side of a push over NIXL: who may write into this rank's blocks, and what was offered to it.

The blocks of a transfer that is given up are free when every sender that was let in has said that it writes no more.
One that is gone cannot say so: then its process has to have ended (nothing else stops a copy within a host), or, on
another host, the connection to it.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.memory import Permit
from pdkv.connectors.nixl.offers import OfferReader
from pdkv.connectors.nixl.rank import NixlRank
from pdkv.connectors.nixl.wire import Begin, Cancel, Cancelled, Granted, Offer, RankBlob, Taken, Wrote
from pdkv.connectors.nixl.writers import WriterProcesses
from pdkv.connectors.peer.push_worker import Incoming, PieceRange, PushWorker
from pdkv.connectors.transfer.lanes import LaneConfig
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import (
    KVNotFound,
    PeerGone,
    TransferCancelled,
)

logger = logging.getLogger(__name__)

MAX_EARLY = 1024
_GRACE_S = 1.0
"""Senders may be earlier than this rank has heard of the transfer: so many of them, so much."""

_REPEAT_S = 1.0
"""A cancel that nobody has confirmed is sent again after so long."""


class _Writer(NamedTuple):
    """A sender that was let in."""

    blob: RankBlob
    permit: Permit


class PushReceiver:
    """Who may write into this rank's blocks, and what was offered to it."""

    def __init__(self, worker: PushWorker, rank: NixlRank, lanes: LaneConfig) -> None:
        self._worker = worker
        self._rank = rank
        self._endpoint = rank.endpoint
        self._lock = threading.Lock()  # guards all that follows
        self._writers: dict[TransferKey, dict[str, _Writer]] = {}  # by agent
        self._stopping: dict[TransferKey, tuple[Job, float]] = {}  # cancelled at that time, writers to be heard of
        self._gone: list[tuple[TransferKey, str]] = []  # writers without a card that have not ended for certain
        self._processes = WriterProcesses()
        self._early: dict[TransferKey, list[tuple[float, RankBlob, Begin | Offer]]] = {}
        self._offers = OfferReader(worker, rank, lanes, self._landed)

    def listen(self) -> None:
        """Take the messages to receivers."""
        self._endpoint.handle(Begin, self._on_begin)
        self._endpoint.handle(Wrote, self._on_wrote)
        self._endpoint.handle(Cancelled, self._on_cancelled)
        self._endpoint.handle(Offer, self._on_offer)
        self._endpoint.add_tick(self._tick)

    def num_writers(self, key: TransferKey) -> int:
        """Senders that may write into a transfer's blocks."""
        with self._lock:
            return len(self._writers.get(key, ()))

    def shutdown(self) -> None:
        """Stop the threads that take offers."""
        self._offers.shutdown()
        with self._lock:
            self._processes.close()

    # --- the step thread ------------------------------------------------------------------------------------------

    def register(self, job: Job) -> None:
        """A receive has begun; who was too early is answered."""
        self._take_early(job.key)

    def interrupt(self, job: Job) -> bool:
        """Whether nobody may write the job's blocks; else all writers are asked to stop."""
        with self._lock:
            writers = self._writers.get(job.key)
            if not writers:
                self._writers.pop(job.key, None)
                return True
            self._stopping[job.key] = (job, time.monotonic())
            self._withdraw(writers.values())
            asked = [writer.blob for writer in writers.values()]
        self._endpoint.post(lambda: self._cancel(job.key, asked))
        return False

    def forget(self, agents: Sequence[str]) -> None:
        """These writers are gone: their transfers fail. What one is just writing may land until it has ended."""
        gone = set(agents)
        with self._lock:
            left = [(key, agent) for key, writers in self._writers.items() for agent in gone & writers.keys()]
            self._withdraw(self._writers[key][agent] for key, agent in left)
            self._gone.extend(left)
            self._processes.forget(gone - {agent for _, agent in left})
        for key in {key for key, _ in left}:
            self._worker.stop_jobs(partial(_is_received, key), PeerGone.code)
        self._offers.retire(gone)

    # --- the message thread ---------------------------------------------------------------------------------------

    def _on_begin(self, blob: RankBlob, message: Begin) -> None:
        job = self._find(message.key)
        if job is None:
            self._keep(blob, message)
            return
        with self._lock:
            wanted = not job.stop_code and job.state == "posted"
            permit = self._let_in(message.key, blob) if wanted else None
        if permit is None:
            self._endpoint.try_send(blob, Granted(*message.key, TransferCancelled.code))
        elif not self._endpoint.try_send(blob, Granted(*message.key, "", *permit)):
            self._writer_is_out(message.key, blob.agent)  # it never heard of it

    def _on_wrote(self, blob: RankBlob, message: Wrote) -> None:
        with self._lock:
            let_in = blob.agent in self._writers.get(message.key, {})
        job = self._find(message.key)
        if job is None or not let_in:
            return  # late: the transfer has ended, its writer hears so
        incoming: Incoming = job.order
        incoming.check_range(message.piece)
        self._landed(job, message.piece, message.num_bytes, message.digests, blob)

    def _landed(self, job: Job, piece: PieceRange, num_bytes: int, digests: bytes, blob: RankBlob) -> None:
        """A piece is in; with the last one nobody may write any more."""
        card = self._endpoint.peers.card_of(blob)
        self._worker.landed(job, piece, num_bytes, digests, (card.engine, card.epoch))
        if job.state == "ended":
            with self._lock:
                self._withdraw(self._writers.pop(job.key, {}).values())
                self._stopping.pop(job.key, None)

    def _on_cancelled(self, blob: RankBlob, message: Cancelled) -> None:
        self._writer_is_out(message.key, blob.agent)

    def _on_offer(self, blob: RankBlob, message: Offer) -> None:
        if self._find(message.key) is None:
            self._keep(blob, message)
        else:
            self._offers.take(blob, message)

    def _keep(self, blob: RankBlob, message: Begin | Offer) -> None:
        """Its transfer may be registered in a moment."""
        with self._lock:
            full = len(self._early) >= MAX_EARLY
            if not full:
                self._early.setdefault(message.key, []).append((time.monotonic(), blob, message))
        if full:
            self._refuse(blob, message)
        elif self._find(message.key) is not None:  # registered meanwhile, and `register` has seen nothing
            self._take_early(message.key)

    def _take_early(self, key: TransferKey) -> None:
        """Take what was too early for a transfer, soon."""
        with self._lock:
            early = self._early.pop(key, [])
        for _, blob, message in early:
            handler: Any = self._on_begin if isinstance(message, Begin) else self._on_offer
            self._endpoint.post(partial(handler, blob, message))

    def _refuse(self, blob: RankBlob, message: Begin | Offer) -> None:
        code = KVNotFound.code
        answer = Granted(*message.key, code) if isinstance(message, Begin) else Taken(message.offer, code)
        self._endpoint.try_send(blob, answer)

    def _tick(self) -> None:
        """Refuse who was too early for too long, and ask again who has not confirmed."""
        now = time.monotonic()
        with self._lock:
            late = [key for key, kept in self._early.items() if now - kept[0][0] > _GRACE_S]
            refused = [kept for key in late for kept in self._early.pop(key)]
            repeat = [key for key, (_, since) in self._stopping.items() if now - since > _REPEAT_S]
            asked = []
            for key in repeat:
                self._stopping[key] = (self._stopping[key][0], now)
                asked.append((key, [writer.blob for writer in self._writers.get(key, {}).values()]))
        self._settle_gone()
        for _, blob, message in refused:
            self._refuse(blob, message)
        for key, writers in asked:
            self._cancel(key, writers)

    def _settle_gone(self) -> None:
        """Writers that cannot say any more that they have ended: see whether they have."""
        with self._lock:
            agents = {agent for _, agent in self._gone}
            ended = {agent for agent in agents if self._processes.has_ended(agent)}
            remote = {agent for agent in agents if not self._processes.knows(agent)}
        ended |= {agent for agent in remote if self._endpoint.disconnect(agent)}
        if ended:
            with self._lock:
                out = [(key, agent) for key, agent in self._gone if agent in ended]
                self._gone = [(key, agent) for key, agent in self._gone if agent not in ended]
                self._processes.forget(ended)
            for key, agent in out:
                self._writer_is_out(key, agent)

    def _cancel(self, key: TransferKey, writers: Sequence[RankBlob]) -> None:
        for blob in writers:
            self._endpoint.try_send(blob, Cancel(*key))

    def _writer_is_out(self, key: TransferKey, agent: str) -> None:
        """It writes no more; the transfer that has to stop ends with the last of them."""
        with self._lock:
            writers = self._writers.get(key, {})
            writer = writers.pop(agent, None)
            if writer is None:
                return
            self._withdraw([writer])
            if writers:
                return
            del self._writers[key]
            stopping = self._stopping.pop(key, None)
        if stopping is not None:
            self._worker.let_go(stopping[0])

    def _let_in(self, key: TransferKey, blob: RankBlob) -> Permit | None:
        """Under the lock. None: too many write already, or its end could not be seen."""
        writers = self._writers.setdefault(key, {})
        if blob.agent not in writers:
            permit = self._endpoint.permits.give() if self._processes.watch(blob) else None
            if permit is None:
                return None
            writers[blob.agent] = _Writer(blob, permit)
        return writers[blob.agent].permit

    def _withdraw(self, writers: Iterable[_Writer]) -> None:
        """Under the lock: they see it before they write the next piece."""
        for writer in writers:
            self._endpoint.permits.withdraw(writer.permit)

    def _find(self, key: TransferKey) -> Job | None:
        try:
            return self._worker.find_incoming(key)[0]
        except KVNotFound:
            return None


def _is_received(key: TransferKey, job: Job) -> bool:
    return job.key == key and isinstance(job.order, Incoming)
