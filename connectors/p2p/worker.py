"""The worker side of `p2p`: pieces out of this rank's pool and into it, over links between two ranks.

Sending: each rank of a peer has a lane; its thread owns the link to it. Receiving: each link of a peer has a thread.
Data is written only into a receive that was posted here, and a link that fails or stops in the middle of a piece is
torn down, with its posted receives, before its transfer ends.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.p2p.listener import Link, LinkLimits, LinkListener
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.outbound import Outbound
from pdkv.connectors.p2p.pieces import MovePlan, PiecePool, plan_receiving
from pdkv.connectors.p2p.sockets import host_id
from pdkv.connectors.p2p.wire import FRAMES_VERSION, Accepted, Address, Delivered, Offer, refusal
from pdkv.connectors.peer.auth import SECRET_BYTES
from pdkv.connectors.peer.push_worker import Incoming, PushPiece, PushWorker
from pdkv.connectors.transfer.lanes import Lane, LaneConfig
from pdkv.connectors.transfer.worker import JOIN_TIMEOUT_S, Job
from pdkv.errors import KVCorrupted, KVNotFound, PdkvError, TransferCancelled, TransferError
from pdkv.host.huge_pages import use_huge_pages
from pdkv.wire.kv import EngineCard

if TYPE_CHECKING:
    import torch

REGISTRATION_S = 5.0
"""Seconds that an offer waits for its receive: a rank is told of it after the steps in progress."""

MAX_KNOWN_RECEIVES = 4096
"""Past receives to remember: an offer for one that has ended is refused at once."""


class P2PWorker(PushWorker):
    """One rank's worker side."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], options: P2POptions, peers: P2PPeers
    ) -> None:
        lanes = LaneConfig(
            num_shared=0, idle_s=options.idle_s, max_lanes=options.max_links, thread_name="pdkv-p2p-send"
        )
        super().__init__(config, notify, peers, timeout_s=options.timeout_s, lanes=lanes)
        self.num_links = 0  # links made for sending, since the start
        self.listener: LinkListener | None = None
        self._p2p_peers = peers
        self._options = options
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._pool: PiecePool | None = None
        self._address: Address | None = None
        self._busy_lock = threading.Lock()
        self._busy: dict[Job, set[Outbound | Link]] = {}  # links that a job's pieces currently use
        self._registered = threading.Condition()
        self._known: OrderedDict[TransferKey, None] = OrderedDict()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        options = self._options
        super().register_kv_caches(kv_cache)
        if kv_cache.device.type == "cpu":
            use_huge_pages(kv_cache.data_ptr(), kv_cache.nbytes)
        self._pool = PiecePool(kv_cache, self.config.layout)
        limits = LinkLimits(options.max_links, 2 * options.idle_s, options.handshake_timeout_s, options.timeout_s)
        self.listener = LinkListener(self.config, options.host, self._secret, limits, kv_cache.device, self._take)
        self._address = Address(
            FRAMES_VERSION, host_id(), self.listener.unix_name, options.host, self.listener.port, self._secret,
            self._pool.on_host, _gpu_of(kv_cache),
        )  # fmt: skip
        self.start_threads()

    def handshake(self) -> bytes:
        assert self._address is not None, "register_kv_caches must be called first"
        return msgspec.msgpack.encode(self._address)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        super().update_peers(added, removed)
        if self.listener is not None:
            for card in removed:
                self.listener.drop(card.engine, card.epoch)

    def shutdown(self) -> None:
        super().shutdown()
        if self.listener is not None:
            self.listener.close(JOIN_TIMEOUT_S)
        self._pool = None

    # --- what has to stop -----------------------------------------------------------------------------------------

    def interrupt(self, job: Job) -> bool:
        """Break the links that the job uses; its threads then end it."""
        with self._busy_lock:  # meanwhile no link moves on to another job
            for link in self._busy.get(job, ()):
                link.interrupt()
        return True

    @contextmanager
    def _travels(self, job: Job, link: Outbound | Link) -> Iterator[None]:
        """Tell `interrupt` where the job is. Raises TransferCancelled if it must already stop."""
        with self._busy_lock:
            self._busy.setdefault(job, set()).add(link)
        try:
            if job.stop_code:
                raise TransferCancelled("cancelled")
            yield
        finally:
            with self._busy_lock:
                links = self._busy[job]
                links.discard(link)
                if not links:
                    del self._busy[job]

    # --- sending --------------------------------------------------------------------------------------------------

    def make_scratch(self, lane: Lane) -> Outbound:
        assert self._address is not None
        return Outbound(self.config, self._options, self._p2p_peers, self._address)

    def close_scratch(self, lane: Lane, scratch: Outbound) -> None:
        scratch.close()

    def send(self, job: Job, piece: PushPiece, scratch: Outbound) -> int:
        pool = self._pool
        assert pool is not None
        num_links = scratch.num_links
        with self._travels(job, scratch):
            link, plan = scratch.offer(job, piece, pool)
            self.num_links += scratch.num_links - num_links
            try:
                link.send_piece(job, plan, pool, self.begin_digests(piece))
                if not isinstance(link.control.expect(job.remaining_s()), Delivered):
                    raise TransferError("the receiver did not confirm the piece")
            except BaseException:
                scratch.close()  # the receiver waits for data that will not come
                raise
        return plan.offer.num_bytes

    # --- receiving ------------------------------------------------------------------------------------------------

    def register(self, job: Job, incoming: Incoming) -> None:
        with self._registered:
            self._known[job.key] = None
            self._known.move_to_end(job.key)
            if len(self._known) > MAX_KNOWN_RECEIVES:
                self._known.popitem(last=False)
            self._registered.notify_all()

    def _take(self, link: Link, offer: Offer) -> None:
        """Receive a piece, on the link's thread. A refused offer leaves the link as it is.

        Raises:
            TransferError: the link can no longer be used; its transfer has failed.
        """
        try:
            job, plan, pool = self._expect(offer)
            sender = (link.peer.engine, link.peer.epoch)
            own = self.digests_for(job.order, offer.piece, sender)
        except TransferError as error:
            link.control.send(refusal(error), self._options.handshake_timeout_s)
            return
        timeout_s = min(offer.timeout_s, self._options.timeout_s)
        try:
            with self._travels(job, link):
                link.control.send(Accepted(), timeout_s)
                digests = link.receive_piece(job, plan, pool, own, timeout_s)
        except BaseException as error:
            link.close()  # nothing lands from here on
            self.leave(job)
            code = error.code if isinstance(error, PdkvError) else TransferError.code
            self.stop_jobs(lambda other: other is job, code)
            raise
        self.leave(job)
        try:
            self.landed(job, offer.piece, offer.num_bytes, digests, sender, own)
        except KVCorrupted as error:  # the link is as before: nothing more of this piece comes
            link.control.send(refusal(error), timeout_s)
            return
        link.control.send(Delivered(), timeout_s)

    def _expect(self, offer: Offer) -> tuple[Job, MovePlan, PiecePool]:
        """The receive that an offer is for, entered, and where its bytes go.

        Raises:
            TransferError: it is not wanted here.
        """
        key, pool = TransferKey(offer.transfer_id, offer.attempt), self._pool
        if pool is None:
            raise TransferCancelled("this engine is stopping")
        with self._registered:
            until = self.clock.now() + min(offer.timeout_s, REGISTRATION_S)
            self.clock.wait_for(self._registered, lambda: key in self._known, until)
        job, incoming = self.find_incoming(key)
        incoming.after.wait(min(offer.timeout_s, self._options.timeout_s))
        plan = plan_receiving(offer, incoming, pool)
        if not self.enter(job):
            raise KVNotFound("the transfer has ended", key=key)
        return job, plan, pool


def _gpu_of(kv_cache: "torch.Tensor") -> str:
    """The GPU of that device, if NCCL can be used; else empty."""
    import torch.distributed

    if not kv_cache.is_cuda or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(kv_cache.device).uuid)
