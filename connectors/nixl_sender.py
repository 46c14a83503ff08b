"""The sending side of a push over NIXL: grants, one-sided writes, and what is offered instead of being written.

A sender asks once per transfer and receiving rank (Begin) and may write from the answer on until the receiver cancels;
it confirms a cancel when its last write has ended. What is offered is read by the receiver: nobody has to be asked.
"""

import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pdkv.connectors.base import TransferKey
from pdkv.connectors.block_runs import make_runs
from pdkv.connectors.nixl_pull import Post
from pdkv.connectors.nixl_rank import NixlRank
from pdkv.connectors.nixl_wire import Begin, Cancel, Cancelled, Granted, Offer, RankBlob, Taken, Wrote
from pdkv.connectors.planning import unit_index
from pdkv.connectors.push import PushPiece, PushWorker
from pdkv.connectors.transfer_worker import Job
from pdkv.connectors.units import UnitPart
from pdkv.errors import KVNotFound, PdkvError, PeerGone, TransferCancelled, TransferError

MAX_REMEMBERED = 4096
"""Transfers of which a sender remembers whether it may write for them."""

_LOOK_S = 0.02

Route = tuple[TransferKey, str]
"""A transfer, and the agent at its other end."""


class PushSender:
    """Grants, writes and offers of one rank."""

    def __init__(self, worker: PushWorker, rank: NixlRank) -> None:
        self._worker = worker
        self._rank = rank
        self._endpoint = rank.endpoint
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

    def write(self, job: Job, piece: PushPiece, blob: RankBlob, posts: list[Post]) -> int:
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
            self._offers[number] = (job, int(units.size) * self._rank.units.unit_bytes(part))
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
