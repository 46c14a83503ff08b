"""The sending side of a push over NIXL: what is offered to the receiver, and, where that is wanted, one-sided writes.

An offer is read by the receiver, which then looks whether it still stands. A sender that writes asks once per transfer
and receiving rank (Begin), looks before each write whether its permit stands, and confirms a cancel when its last
write has ended.
"""

import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.blocks import Post
from pdkv.connectors.nixl.memory import Permit
from pdkv.connectors.nixl.rank import NixlRank
from pdkv.connectors.nixl.wire import Begin, Cancel, Cancelled, Granted, Offer, RankBlob, Taken, Wrote
from pdkv.connectors.peer.push_worker import PushPiece, PushWorker, range_of
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.connectors.transfer.planning import Ids, as_ids, unit_index
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import KVNotFound, PdkvError, TransferCancelled, TransferError

MAX_REMEMBERED = 4096
"""Transfers of which a sender remembers whether it may write for them."""

Route = tuple[TransferKey, str]
"""A transfer, and the agent at its other end."""


class _Offered(NamedTuple):
    """A batch that the receiver may read."""

    job: Job
    agent: str  # whose blocks it is for
    num_bytes: int
    permit: Permit


class PushSender:
    """Grants, writes and offers of one rank."""

    def __init__(self, worker: PushWorker, rank: NixlRank) -> None:
        self._worker = worker
        self._rank = rank
        self._endpoint = rank.endpoint
        self._lock = threading.Lock()  # guards all that follows
        self._permits: OrderedDict[Route, Permit | None] = OrderedDict()  # None: refused or cancelled
        self._asking: dict[Route, queue.SimpleQueue[str]] = {}
        self._writing: dict[Route, int] = {}
        self._cancelled_by: set[Route] = set()  # to be confirmed when the last write has ended
        self._numbers = itertools.count(1)
        self._offers: dict[int, _Offered] = {}

    def listen(self) -> None:
        """Take the messages to senders."""
        self._endpoint.handle(Granted, self._on_granted)
        self._endpoint.handle(Cancel, self._on_cancel)
        self._endpoint.handle(Taken, self._on_taken)

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, job: Job, piece: PushPiece, blob: RankBlob, posts: list[Post]) -> int:
        """Write whole blocks. Returns the bytes; raises a TransferError, and then nothing is written any more."""
        num_bytes = sum(int(sizes.sum()) for _, _, sizes in posts)
        send = piece.send
        notice = Wrote(*send.ticket.key, range_of(piece), num_bytes, self._worker.digests_of(piece))
        self._ask(job, send.ticket.key, blob)
        with self._writing_for((send.ticket.key, blob.agent), blob) as permit:
            for number, (ours, theirs, sizes) in enumerate(posts, 1):
                job.check()
                self._look_at(permit, job, blob)
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

    def _ask(self, job: Job, key: TransferKey, blob: RankBlob) -> None:
        """Once per transfer and rank of the receiver: may we write? Raises a TransferError."""
        route = (key, blob.agent)
        with self._lock:
            if route in self._permits:
                return  # `_writing_for` knows the answer
            answers = self._asking[route] = queue.SimpleQueue()
        try:
            self._endpoint.send(blob, Begin(*key))
            code = self._endpoint.next_answer(job, blob, answers)
        finally:
            with self._lock:
                del self._asking[route]
        if code:
            raise KVNotFound(f"agent {blob.agent} wants nothing of it: {code}")

    @contextmanager
    def _writing_for(self, route: Route, blob: RankBlob) -> Iterator[Permit]:
        """A write, between the grant and a cancel. Raises TransferCancelled after a cancel."""
        with self._lock:
            permit = self._permits.get(route)
            if permit is None:
                raise TransferCancelled(f"agent {blob.agent} has cancelled")
            self._writing[route] = self._writing.get(route, 0) + 1
        try:
            yield permit
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

    def _look_at(self, permit: Permit, job: Job, blob: RankBlob) -> None:
        """Whether the permit still stands: this process may have slept for long.

        Raises:
            TransferCancelled: the receiver has withdrawn it.
        """
        (nonce,) = self._endpoint.read_words(blob, blob.permits, permit.word, 1, deadline=job.deadline, check=job.check)
        if nonce != permit.nonce:
            raise TransferCancelled(f"agent {blob.agent} has withdrawn its permit")

    def _on_granted(self, blob: RankBlob, message: Granted) -> None:
        route = (message.key, blob.agent)
        with self._lock:
            asking = self._asking.get(route)
            if asking is None:
                return  # nobody asks any more; the receiver's cancel will be confirmed
            if route not in self._permits:  # a cancel outlasts a grant that comes later
                self._remember(route, None if message.code else Permit(message.permit, message.nonce))
        asking.put(message.code)

    def _on_cancel(self, blob: RankBlob, message: Cancel) -> None:
        route = (message.key, blob.agent)
        with self._lock:
            self._remember(route, None)
            writing = route in self._writing
            if writing:
                self._cancelled_by.add(route)
        self._worker.stop_jobs(partial(_is_sent, message.key), TransferCancelled.code)
        if not writing:
            self._endpoint.try_send(blob, Cancelled(*message.key))

    def _remember(self, route: Route, permit: Permit | None) -> None:
        """Under the lock."""
        self._permits[route] = permit
        while len(self._permits) > MAX_REMEMBERED:
            self._permits.popitem(last=False)

    # --- offering -------------------------------------------------------------------------------------------------

    def offer(self, job: Job, piece: PushPiece, blob: RankBlob, *, whole: bool) -> None:
        """Let the receiver read the batch; it will say when it has it. Raises a TransferError.

        Args:
            whole: both engines' blocks are cut alike.
        """
        send, layout = piece.send, self._worker.config.layout
        if whole:
            ids, num_bytes = as_ids(send.block_ids), len(send.block_ids) * len(piece.layers) * layout.layer_bytes
        else:
            ids = _units_of(piece, layout.block_size)
            num_bytes = int(ids.size) * self._rank.units.unit_bytes(piece.part)
        permit = self._endpoint.permits.give()
        if permit is None:
            raise TransferError("too many offers stand already", transfer_id=send.key[0], attempt=send.key[1])
        number = next(self._numbers)
        with self._lock:
            self._offers[number] = _Offered(job, blob.agent, num_bytes, permit)
        message = Offer(
            *send.ticket.key, number, *permit, whole, pack_blocks(ids), piece.heads.first, range_of(piece),
            self._worker.digests_of(piece),
        )  # fmt: skip
        try:
            self._endpoint.send(blob, message)
        except (PdkvError, ValueError) as error:
            self.withdraw(job)
            raise error if isinstance(error, TransferError) else TransferError(str(error)) from None

    def withdraw(self, job: Job) -> None:
        """The job has to stop: who reads its blocks from now on sees that it may not."""
        with self._lock:
            numbers = [number for number, offered in self._offers.items() if offered.job is job]
            for number in numbers:
                self._endpoint.permits.withdraw(self._offers.pop(number).permit)

    @contextmanager
    def offered(self, offer: int) -> Iterator[None]:
        """While an offer's blocks are gathered. Raises KVNotFound when it does not stand (any more)."""
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


def _units_of(piece: PushPiece, block_size: int) -> Ids:
    """The units of a batch. Raises a TransferError."""
    send = piece.send
    first = send.start // block_size * block_size
    try:
        return unit_index(send.block_ids, block_size, send.start - first, send.stop - first)
    except ValueError as error:
        raise TransferError(str(error)) from None


def _is_sent(key: TransferKey, job: Job) -> bool:
    return isinstance(job.order, PushPiece) and job.order.send.ticket.key == key
