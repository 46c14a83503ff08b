"""Push over NIXL: prefill writes large runs into decode's blocks; small or differently cut pieces it offers.

A sender asks once per transfer and receiving rank (Begin) and may write from the answer on until the receiver cancels.
The receiver's blocks are free when every sender that was let in has said that it writes no more, or is gone. What is
offered is read by the receiver itself, so nobody has to be asked about it.
"""

import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.block_runs import expand_runs, make_runs
from pdkv.connectors.io_lanes import IOLanes
from pdkv.connectors.nixl_endpoint import NixlEndpoint
from pdkv.connectors.nixl_gather import GatherReader, GatherSource
from pdkv.connectors.nixl_options import NixlOptions
from pdkv.connectors.nixl_peers import NixlPeers
from pdkv.connectors.nixl_pull import cut_runs
from pdkv.connectors.nixl_wire import Begin, Cancel, Cancelled, Granted, Offer, RankBlob, Taken, Wrote
from pdkv.connectors.planning import as_ids, merge_runs, unit_index
from pdkv.connectors.push import Incoming, PushPiece, PushWorker
from pdkv.connectors.transfer_worker import JOIN_TIMEOUT_S, Job
from pdkv.connectors.units import UnitPart, UnitPool
from pdkv.errors import KVNotFound, PdkvError, PeerGone, TransferCancelled, TransferError
from pdkv.messages import EngineCard

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Transfers of which a sender remembers that it must not write for them any more."""

_GRACE_S = 1.0
"""So long a sender may be earlier than its receiver's own ranks have heard of the transfer."""

_LOOK_S = 0.02
_REPEAT_S = 1.0
"""A cancel that nobody has confirmed is sent again after so long."""

Route = tuple[TransferKey, str]
"""A transfer, and the agent at its other end."""


class NixlPushWorker(PushWorker):
    """Worker side of mode=push."""

    def __init__(
        self,
        config: ConnectorConfig,
        notify: Callable[[], None],
        peers: NixlPeers,
        endpoint: NixlEndpoint,
        options: NixlOptions,
    ) -> None:
        super().__init__(config, notify, peers, timeout_s=options.transfer_timeout_s, lanes=options.lanes)
        self.endpoint = endpoint
        self._ranks = peers
        self._options = options
        self._sender = _Sender(self)
        self._receiver = _Receiver(self, options)

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Register the pool with NIXL. Raises ConfigError."""
        self.endpoint.register(kv_cache, None)
        self.units = UnitPool(kv_cache)
        self.source = GatherSource(self.endpoint, self.units, self._sender.offered)
        self.reader = GatherReader(self.endpoint, self.units)
        self._sender.listen()
        self._receiver.listen()
        self.endpoint.add_tick(self.wake_if_late)
        self.endpoint.start()
        self.start_threads()

    def handshake(self) -> bytes:
        return self.endpoint.blob()

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        gone = [agent for card in removed for agent in self._ranks.agents_of(card.engine, card.epoch)]
        super().update_peers(added, removed)
        self.endpoint.meet([agent for card in added for agent in self._ranks.agents_of(card.engine, card.epoch)])
        if gone:
            self.endpoint.forget(gone)
            self.endpoint.post(lambda: self.source.forget(gone))
            self._receiver.forget(gone)

    def shutdown(self) -> None:
        super().shutdown()
        self._receiver.shutdown()
        self.endpoint.close()

    def register(self, job: Job, incoming: Incoming) -> None:
        self._receiver.register(job)

    def interrupt(self, job: Job) -> bool:
        """Receives ask their writers to stop; what was offered is not gathered any more."""
        if isinstance(job.order, Incoming):
            return self._receiver.interrupt(job)
        self._sender.withdraw(job)
        return True

    def send(self, job: Job, piece: PushPiece, scratch: Any) -> int | None:
        """Write the batch's runs where they are large and cut alike on both sides, else offer it."""
        layout, peer, send = self.config.layout, piece.card.layout, piece.send
        blob = self._ranks.rank(piece.card.engine, piece.card.epoch, piece.heads.peer_rank)
        if layout == peer and send.start % layout.block_size == send.ticket.start % layout.block_size == 0:
            first = (send.start - send.ticket.start) // layout.block_size
            theirs = send.ticket.block_ids(layout.block_size)[first : first + len(send.block_ids)]
            if len(theirs) != len(send.block_ids):
                raise TransferError("the ticket has too few blocks", transfer_id=send.key[0], attempt=send.key[1])
            runs = merge_runs(send.block_ids, theirs)
            few = len(runs) < self._options.gather_min_pieces
            if few or len(theirs) * layout.block_bytes >= self._options.gather_below * len(runs):
                return self._sender.write(job, piece, blob, cut_runs(runs, layout.block_bytes))
        self._sender.offer(job, piece, blob)
        return None


# --- sender -------------------------------------------------------------------------------------------------------


class _Sender:
    """Grants, writes and offers of one rank."""

    def __init__(self, worker: NixlPushWorker) -> None:
        self._worker = worker
        self._endpoint = worker.endpoint
        self._lock = threading.Lock()  # guards all that follows
        self._granted: OrderedDict[Route, bool] = OrderedDict()  # False: refused or cancelled
        self._asking: dict[Route, queue.SimpleQueue[str]] = {}
        self._writing: dict[Route, int] = {}
        self._cancelled_by: set[Route] = set()  # to be confirmed when the last write has ended
        self._numbers = itertools.count(1)
        self._offers: dict[int, tuple[Job, int]] = {}  # and bytes

    def listen(self) -> None:
        """Take the messages to senders."""
        self._endpoint.handle(Granted, self._on_granted)
        self._endpoint.handle(Cancel, self._on_cancel)
        self._endpoint.handle(Taken, self._on_taken)

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, job: Job, piece: PushPiece, blob: RankBlob, posts: list[tuple[Any, Any, Any]]) -> int:
        """Write whole blocks. Returns the bytes; raises a TransferError, and then nothing is written any more."""
        num_bytes = sum(int(sizes.sum()) for _, _, sizes in posts)
        heads, send = piece.heads, piece.send
        notice = Wrote(*send.key, heads.peer_first, heads.num_heads, send.start, send.stop, num_bytes)
        self._ask(job, blob)
        with self._permit((send.key, blob.agent), blob):
            for number, (ours, theirs, sizes) in enumerate(posts, 1):
                job.check()
                self._endpoint.write(
                    blob,
                    ours,
                    theirs,
                    sizes,
                    deadline=job.deadline,
                    check=job.check,
                    notice=notice if number == len(posts) else None,
                )
        return num_bytes

    def _ask(self, job: Job, blob: RankBlob) -> None:
        """Once per transfer and rank of the receiver: may we write? Raises a TransferError."""
        route = (job.key, blob.agent)
        with self._lock:
            if route in self._granted:
                return  # `_permit` knows the answer
            answers = self._asking[route] = queue.SimpleQueue()
        try:
            self._endpoint.send(blob, Begin(*job.key))
            while True:
                try:
                    code = answers.get(timeout=min(_LOOK_S, job.remaining_s()))
                    break
                except queue.Empty:
                    if self._endpoint.peers.agent(blob.agent) is None:
                        raise PeerGone(f"agent {blob.agent} is gone") from None
        finally:
            with self._lock:
                del self._asking[route]
        if code:
            raise KVNotFound(f"agent {blob.agent} wants nothing of it: {code}")

    @contextmanager
    def _permit(self, route: Route, blob: RankBlob) -> Iterator[None]:
        """A write, between the grant and a cancel. Raises TransferCancelled after a cancel."""
        with self._lock:
            if not self._granted.get(route, False):
                raise TransferCancelled(f"agent {blob.agent} has cancelled")
            self._writing[route] = self._writing.get(route, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._writing[route] -= 1
                if not self._writing[route]:
                    del self._writing[route]
                confirm = route in self._cancelled_by and route not in self._writing
                if confirm:
                    self._cancelled_by.remove(route)
            if confirm:
                self._endpoint.try_send(blob, Cancelled(*route[0]))

    def _on_granted(self, blob: RankBlob, message: Granted) -> None:
        route = (message.key, blob.agent)
        with self._lock:
            asking = self._asking.get(route)
            if asking is None:
                return  # nobody asks any more; the receiver's cancel will be confirmed
            self._remember(route, not message.code)
        asking.put(message.code)

    def _on_cancel(self, blob: RankBlob, message: Cancel) -> None:
        route = (message.key, blob.agent)
        with self._lock:
            self._remember(route, False)
            writing = route in self._writing
            if writing:
                self._cancelled_by.add(route)
        self._worker.stop_jobs(partial(_is_sent, message.key), TransferCancelled.code)
        if not writing:
            self._endpoint.try_send(blob, Cancelled(*message.key))

    def _remember(self, route: Route, granted: bool) -> None:
        """Under the lock. A cancel outlasts a grant that comes later."""
        self._granted[route] = granted and self._granted.get(route, True)
        while len(self._granted) > MAX_REMEMBERED:
            self._granted.popitem(last=False)

    # --- offering -------------------------------------------------------------------------------------------------

    def offer(self, job: Job, piece: PushPiece, blob: RankBlob) -> None:
        """Let the receiver read the batch's units; it will say when it has them. Raises a TransferError."""
        send, heads = piece.send, piece.heads
        block_size = self._worker.config.layout.block_size
        first = send.start // block_size * block_size
        try:
            units = unit_index(send.block_ids, block_size, send.start - first, send.stop - first)
        except ValueError as error:
            raise TransferError(str(error)) from None
        part = UnitPart(heads.first, heads.first + heads.num_heads, 0, self._worker.config.layout.num_layers)
        number = next(self._numbers)
        with self._lock:
            self._offers[number] = (job, int(units.size) * self._worker.units.unit_bytes(part))
        message = Offer(
            *send.key, number, make_runs(units.tolist()), heads.first, heads.peer_first, heads.num_heads,
            send.start, send.stop,
        )  # fmt: skip
        try:
            self._endpoint.send(blob, message)
        except (PdkvError, ValueError) as error:
            with self._lock:
                del self._offers[number]
            raise error if isinstance(error, TransferError) else TransferError(str(error)) from None

    def withdraw(self, job: Job) -> None:
        """The job has to stop: its units are gathered no more."""
        with self._lock:
            for number in [number for number, (offered, _) in self._offers.items() if offered is job]:
                del self._offers[number]

    @contextmanager
    def offered(self, offer: int) -> Iterator[None]:
        """While an offer's blocks are read. Raises KVNotFound when it does not stand (any more)."""
        with self._lock:
            job, _ = self._offers.get(offer, (None, 0))
        if job is None or not self._worker.enter(job):
            raise KVNotFound("the offer is over")
        try:
            yield
        finally:
            self._worker.leave(job)

    def _on_taken(self, blob: RankBlob, message: Taken) -> None:
        with self._lock:
            job, num_bytes = self._offers.pop(message.offer, (None, 0))
        if job is not None:
            self._worker.end_job(job, message.code, 0 if message.code else num_bytes)


def _is_sent(key: TransferKey, job: Job) -> bool:
    return job.key == key and isinstance(job.order, PushPiece)


def _is_received(key: TransferKey, job: Job) -> bool:
    return job.key == key and isinstance(job.order, Incoming)


# --- receiver -----------------------------------------------------------------------------------------------------


class _Receiver:
    """Who may write into this rank's blocks, and what was offered to it."""

    def __init__(self, worker: NixlPushWorker, options: NixlOptions) -> None:
        self._worker = worker
        self._endpoint = worker.endpoint
        self._lock = threading.Lock()  # guards all that follows
        self._writers: dict[TransferKey, dict[str, RankBlob]] = {}  # let in, by agent
        self._stopping: dict[TransferKey, tuple[Job, float]] = {}  # cancelled at that time, writers to be heard of
        self._early: dict[TransferKey, list[tuple[float, RankBlob, Begin | Offer]]] = {}
        self._lanes: IOLanes[tuple[RankBlob, Offer]] = IOLanes(
            options.lanes,
            self._take,
            make_scratch=lambda lane: None,
            close_scratch=lambda lane, scratch: None,
            do_idle_work=lambda: False,
        )

    def listen(self) -> None:
        """Take the messages to receivers."""
        self._endpoint.handle(Begin, self._on_begin)
        self._endpoint.handle(Wrote, self._on_wrote)
        self._endpoint.handle(Cancelled, self._on_cancelled)
        self._endpoint.handle(Offer, self._on_offer)
        self._endpoint.add_tick(self._tick)

    def shutdown(self) -> None:
        """Stop the threads that take offers."""
        self._lanes.shutdown(JOIN_TIMEOUT_S)

    # --- the step thread ------------------------------------------------------------------------------------------

    def register(self, job: Job) -> None:
        """A receive has begun; who was too early is answered."""
        with self._lock:
            early = self._early.pop(job.key, [])
        for _, blob, message in early:
            handler: Any = self._on_begin if isinstance(message, Begin) else self._on_offer
            self._endpoint.post(partial(handler, blob, message))

    def interrupt(self, job: Job) -> bool:
        """Whether nobody may write the job's blocks; else all writers are asked to stop."""
        with self._lock:
            writers = self._writers.get(job.key)
            if not writers:
                self._writers.pop(job.key, None)
                return True
            self._stopping[job.key] = (job, time.monotonic())
            asked = list(writers.values())
        self._endpoint.post(lambda: self._cancel(job.key, asked))
        return False

    def forget(self, agents: Sequence[str]) -> None:
        """These writers are gone: their transfers fail, and nothing of them is written any more."""
        gone = set(agents)
        with self._lock:
            touched = {key for key, writers in self._writers.items() if gone & writers.keys()}
        for key in touched:
            self._worker.stop_jobs(partial(_is_received, key), PeerGone.code)
            for agent in gone:
                self._writer_is_out(key, agent)

    # --- the message thread ---------------------------------------------------------------------------------------

    def _on_begin(self, blob: RankBlob, message: Begin) -> None:
        job = self._find(message.key)
        if job is None:
            self._keep(blob, message)
            return
        with self._lock:
            granted = not job.stop_code and job.state == "posted"
            if granted:
                self._writers.setdefault(message.key, {})[blob.agent] = blob
        code = "" if granted else TransferCancelled.code
        if not self._endpoint.try_send(blob, Granted(*message.key, code)) and granted:
            self._writer_is_out(message.key, blob.agent)  # it was never let in

    def _on_wrote(self, blob: RankBlob, message: Wrote) -> None:
        with self._lock:
            let_in = blob.agent in self._writers.get(message.key, {})
        job = self._find(message.key)
        if job is None or not let_in:
            return  # late: the transfer has ended, its writer hears so
        incoming: Incoming = job.order
        incoming.check_range(message.first_head, message.num_heads, message.start, message.stop)
        self._worker.landed(job, message.first_head, message.num_heads, message.start, message.stop, message.num_bytes)
        if job.state == "ended":
            with self._lock:
                self._writers.pop(message.key, None)

    def _on_cancelled(self, blob: RankBlob, message: Cancelled) -> None:
        self._writer_is_out(message.key, blob.agent)

    def _on_offer(self, blob: RankBlob, message: Offer) -> None:
        if self._find(message.key) is None:
            self._keep(blob, message)
        else:
            self._lanes.put(blob.agent, (blob, message))

    def _keep(self, blob: RankBlob, message: Begin | Offer) -> None:
        """Its transfer may be registered in a moment."""
        with self._lock:
            self._early.setdefault(message.key, []).append((time.monotonic(), blob, message))

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
                asked.append((key, list(self._writers.get(key, {}).values())))
        for _, blob, message in refused:
            code = KVNotFound.code
            answer = Granted(*message.key, code) if isinstance(message, Begin) else Taken(message.offer, code)
            self._endpoint.try_send(blob, answer)
        for key, writers in asked:
            self._cancel(key, writers)

    def _cancel(self, key: TransferKey, writers: Sequence[RankBlob]) -> None:
        for blob in writers:
            self._endpoint.try_send(blob, Cancel(*key))

    def _writer_is_out(self, key: TransferKey, agent: str) -> None:
        """It writes no more; the transfer that has to stop ends with the last of them."""
        with self._lock:
            writers = self._writers.get(key)
            if writers is None or writers.pop(agent, None) is None or writers:
                return
            del self._writers[key]
            stopping = self._stopping.pop(key, None)
        if stopping is not None:
            job = stopping[0]
            self._worker.end_job(job, job.stop_code)

    def _find(self, key: TransferKey) -> Job | None:
        try:
            return self._worker.find_incoming(key)[0]
        except KVNotFound:
            return None

    # --- threads that take offers ---------------------------------------------------------------------------------

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
        self._endpoint.try_send(blob, Taken(offer.offer, code))

    def _read(self, blob: RankBlob, offer: Offer) -> None:
        worker = self._worker
        job, incoming = worker.find_incoming(offer.key)
        incoming.check_range(offer.first_head, offer.num_heads, offer.start, offer.stop)
        expanded = expand_runs(offer.units)
        block_size = worker.config.layout.block_size
        first = incoming.ticket.start // block_size * block_size
        try:
            ours = unit_index(incoming.block_ids, block_size, offer.start - first, offer.stop - first)
        except ValueError as error:
            raise TransferError(str(error)) from None
        if expanded is None or len(expanded[0]) != ours.size:
            raise TransferError(f"agent {blob.agent} offers another number of units than are wanted")
        part = UnitPart(offer.first_head, offer.first_head + offer.num_heads, 0, worker.config.layout.num_layers)

        def guard() -> AbstractContextManager[None]:
            return _writing(worker, job)

        num_bytes = worker.reader.fetch(
            job, blob, as_ids(expanded[0]), offer.head_start, ours, part, offer=offer.offer, guard=guard
        )
        worker.landed(job, offer.first_head, offer.num_heads, offer.start, offer.stop, num_bytes)


@contextmanager
def _writing(worker: NixlPushWorker, job: Job) -> Iterator[None]:
    """While a posted receive's blocks are written. Raises TransferCancelled when they may not be."""
    if not worker.enter(job):
        raise TransferCancelled("cancelled", transfer_id=job.key[0], attempt=job.key[1])
    try:
        yield
    finally:
        worker.leave(job)
