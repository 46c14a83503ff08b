"""The sending side of a push over NIXL: offers blocks to the receiver, which reads them and then checks whether the
offer still stands.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pdkv.connectors.nixl.memory import Permit
from pdkv.connectors.nixl.wire import Offer, OfferDigests, RankBlob, Taken
from pdkv.connectors.nixl.worker import NixlPush
from pdkv.connectors.peer.push_worker import PushPiece, piece_ids, range_of
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import KVNotFound, PdkvError, TransferError


class _Offered(NamedTuple):
    """A batch that the receiver may read."""

    job: Job
    agent: str  # the receiver's, which alone may report that it has taken the batch
    num_bytes: int
    permit: Permit


class PushSender:
    """The offers of one rank. Thread-safe."""

    def __init__(self, worker: NixlPush) -> None:
        self._worker = worker
        self._endpoint = worker.endpoint
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the next one
        self._offers: dict[int, _Offered] = {}

    def listen(self) -> None:
        """Handle messages to senders."""
        self._endpoint.handle(Taken, self._on_taken)

    def offer(self, job: Job, piece: PushPiece, blob: RankBlob, *, whole: bool) -> None:
        """Let the receiver read the batch, and digest it meanwhile; the receiver reports when it has both.

        Args:
            whole: both engines cut blocks the same way.

        Raises:
            TransferError: there are too many already, or the receiver cannot be told.
        """
        send, layout = piece.send, self._worker.config.layout
        ids = piece_ids(
            send.block_ids, layout.block_size, send.start, send.stop, table_start=send.start, in_units=not whole
        )
        per_id = len(piece.layers) * layout.layer_bytes if whole else self._worker.units.unit_bytes(piece.part)
        permit = self._endpoint.permits.give()
        if permit is None:
            raise TransferError("too many offers are open already", key=send.key)
        number = next(self._numbers)
        with self._lock:
            self._offers[number] = _Offered(job, blob.agent, int(ids.size) * per_id, permit)
        name, first_head = send.ticket.key[:2], piece.heads.first
        message = Offer(*name, number, *permit, whole, pack_blocks(ids), first_head, range_of(piece))
        try:
            digests = self._worker.begin_digests(piece)
            self._endpoint.send(blob, message)
            if digests is not None:  # also of withdrawn offers: they may have been read before
                self._endpoint.send(blob, OfferDigests(number, digests.finish()))
        except (PdkvError, ValueError) as error:
            self.withdraw(job)
            raise error if isinstance(error, TransferError) else TransferError(str(error)) from None

    def withdraw(self, job: Job) -> None:
        """Withdraw the job's offers: later readers of its blocks see that the permit is gone."""
        with self._lock:
            numbers = [number for number, offered in self._offers.items() if offered.job is job]
            for number in numbers:
                self._endpoint.permits.withdraw(self._offers.pop(number).permit)

    @contextmanager
    def offered(self, offer: int) -> Iterator[None]:
        """A context in which an offer's blocks are gathered. Raises KVNotFound if there is no such offer (any more)."""
        with self._lock:
            offered = self._offers.get(offer)
        if offered is None or not self._worker.enter(offered.job):
            raise KVNotFound("the offer is over")
        try:
            yield
        finally:
            self._worker.leave(offered.job)

    def _on_taken(self, blob: RankBlob, message: Taken) -> None:
        with self._lock:
            offered = self._offers.get(message.offer)
            if offered is None:
                return
            if offered.agent != blob.agent:
                raise TransferError(f"offer {message.offer} was made to agent {offered.agent}")
            del self._offers[message.offer]
        self._endpoint.permits.withdraw(offered.permit)
        self._worker.end_job(offered.job, message.code, 0 if message.code else offered.num_bytes)
