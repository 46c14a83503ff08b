"""The worker side of `p2p`: pieces out of this rank's pool over groups of two, and into it.

Sending: each rank of a peer has a lane; its thread owns the link to it. Receiving: each link of a peer has a thread.
A message lands only in a receive that was posted here, and a link that fails or stops in the middle of a piece is torn
down, with what it has posted, before its transfer ends.
"""

import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.io_lanes import Lane, LaneConfig
from pdkv.connectors.p2p_group import Group, GroupFactory
from pdkv.connectors.p2p_listener import Link, LinkLimits, LinkListener
from pdkv.connectors.p2p_pieces import BUFFER_BYTES, PieceBuffers, PiecePool, messages_of, piece_ids, plan_blocks
from pdkv.connectors.p2p_wire import Accepted, Address, Control, Delivered, Hello, Offer, Welcome, refusal
from pdkv.connectors.peers import PeerCards
from pdkv.connectors.planning import Ids
from pdkv.connectors.push import Incoming, PushPiece, PushWorker
from pdkv.connectors.transfer_worker import JOIN_TIMEOUT_S, Job
from pdkv.connectors.units import UnitPart
from pdkv.errors import (
    IncompatiblePeers,
    KVNotFound,
    PdkvError,
    PeerGone,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from pdkv.messages import EngineCard

if TYPE_CHECKING:
    import torch

IN_FLIGHT = 2
"""Messages posted at a time: while one travels, the next is gathered, or the last one scattered."""

MAX_OFFERS = 3
"""Links on which one piece is offered, where the receiver closes them at that moment."""

REGISTRATION_S = 1.0
"""How long an offer waits for its receive: another rank may have named the blocks before this one heard of them."""

MAX_KNOWN_RECEIVES = 4096
"""Receives that were registered once: an offer for one of them that has ended is refused at once."""


@dataclass(frozen=True, kw_only=True)
class P2POptions:
    """--connector-config of this connector."""

    host: str = "127.0.0.1"  # the address at which peers reach this host
    timeout_s: float = 20.0  # deadline of one batch to one rank
    handshake_timeout_s: float = 5.0
    idle_s: float = 60.0  # a link without traffic closes after so long
    max_groups: int = 64  # links of this rank in each direction


class P2PPeers(PeerCards):
    """Peers with the addresses of their ranks."""

    def address(self, card: EngineCard, rank: int) -> Address:
        """Raises IncompatiblePeers for a card that names none."""
        try:
            return msgspec.msgpack.decode(card.rank_blobs[rank], type=Address)
        except (IndexError, msgspec.DecodeError) as error:
            raise IncompatiblePeers(
                f"engine {card.engine} (connector {card.connector}): its card names no address of rank {rank}: {error}"
            ) from error

    def _accept(self, peer: tuple[str, str], card: EngineCard) -> None:
        super()._accept(peer, card)
        for rank in range(card.tp):
            self.address(card, rank)


class _Outbound:
    """A lane's link to a peer's rank, made when it is needed."""

    def __init__(self, buffers: PieceBuffers) -> None:
        self.buffers = buffers
        self.control: Control | None = None
        self.group: Group | None = None

    def interrupt(self) -> None:
        """By any thread: whatever the lane's thread waits for, it wakes up, and the link ends."""
        control, group = self.control, self.group
        if control is not None:
            control.interrupt()
        if group is not None:
            group.interrupt()

    def close(self) -> None:
        """Tear the group down, then the connection. Idempotent."""
        if self.group is not None:
            self.group.close()
        if self.control is not None:
            self.control.close()
        self.group = self.control = None


class _Plan(NamedTuple):
    """A piece as messages of the own pool."""

    offer: Offer
    ids: Ids  # blocks or units; the first one is number `first` of the request
    first: int
    part: UnitPart | None  # None: whole blocks


class P2PWorker(PushWorker):
    """One rank's side."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], options: P2POptions, peers: P2PPeers
    ) -> None:
        lanes = LaneConfig(
            num_shared=0, idle_s=options.idle_s, max_lanes=options.max_groups, thread_name="pdkv-p2p-send"
        )
        self._peers = peers
        super().__init__(config, notify, peers, timeout_s=options.timeout_s, lanes=lanes)
        self.num_groups = 0  # made for sending, since the start
        self._options = options
        self._token = secrets.token_bytes(16)
        self._pool: PiecePool | None = None
        self._factory: GroupFactory | None = None
        self.listener: LinkListener | None = None
        self._busy_lock = threading.Lock()
        self._busy: dict[Job, set[_Outbound | Link]] = {}  # links that a job's pieces travel on now
        self._registered = threading.Condition()
        self._known: OrderedDict[TransferKey, None] = OrderedDict()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        self._pool = PiecePool(kv_cache, self.config.layout)
        self._factory = GroupFactory(self._options.host, kv_cache.device.type)
        limits = LinkLimits(self._options.max_groups, 2 * self._options.idle_s, self._options.handshake_timeout_s)
        self.listener = LinkListener(self.config, self._factory, self._token, limits, self._take)
        self.start_threads()

    def handshake(self) -> bytes:
        assert self._factory is not None, "register_kv_caches comes first"
        assert self.listener is not None
        factory = self._factory
        address = Address(factory.host, self.listener.port, self._token, factory.backend)
        return msgspec.msgpack.encode(address)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        super().update_peers(added, removed)
        if self.listener is not None:
            for card in removed:
                self.listener.drop(card.engine, card.epoch)

    def shutdown(self) -> None:
        super().shutdown()
        if self.listener is not None:
            self.listener.close(JOIN_TIMEOUT_S)
        self._factory = self._pool = None

    def interrupt(self, job: Job) -> bool:
        """Break the links that the job is on, off the step thread; its threads then end it."""
        with self._busy_lock:
            is_busy = job in self._busy
        if is_busy:
            threading.Thread(target=self._break, args=(job,), name="pdkv-p2p-break", daemon=True).start()
        return True

    def _break(self, job: Job) -> None:
        with self._busy_lock:  # no link goes on to another job meanwhile
            for link in self._busy.get(job, ()):
                link.interrupt()

    @contextmanager
    def _travels(self, job: Job, link: "_Outbound | Link") -> Iterator[None]:
        """Let `interrupt` know where the job is."""
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

    def make_scratch(self, lane: Lane) -> _Outbound:
        assert self._pool is not None
        return _Outbound(self._pool.buffers())

    def close_scratch(self, lane: Lane, scratch: _Outbound) -> None:
        scratch.close()

    def send(self, job: Job, piece: PushPiece, scratch: _Outbound) -> int:
        with self._travels(job, scratch):
            return self._send_piece(job, piece, scratch)

    def _send_piece(self, job: Job, piece: PushPiece, scratch: _Outbound) -> int:
        plan = self._plan(piece)
        try:
            control = self._offer(job, piece, plan.offer, scratch)
        except (PeerGone, TransferTimeout):
            scratch.close()
            raise
        try:
            assert scratch.group is not None
            num_bytes = self._send_messages(job, plan, scratch.group, scratch.buffers)
            if not isinstance(control.expect(job.remaining_s()), Delivered):
                raise TransferError("the receiver did not say that it has the piece")
        except BaseException:
            scratch.close()  # the receiver waits for what will not come
            raise
        return num_bytes

    def _plan(self, piece: PushPiece) -> _Plan:
        """Whole blocks where both sides have the same ones, else units."""
        assert self._pool is not None
        send, heads, own, theirs = piece.send, piece.heads, self.config.layout, piece.card.layout
        whole = own.block_size == theirs.block_size and own.num_kv_heads == theirs.num_kv_heads == heads.num_heads
        part = None if whole else UnitPart(heads.first, heads.first + heads.num_heads, 0, own.num_layers)
        ids = piece_ids(
            send.block_ids, own.block_size, send.start, send.stop, table_start=send.start, in_units=not whole
        )
        runs: list[tuple[int, int]] = []
        first = send.start // own.block_size
        if whole:
            table = send.ticket.block_ids(theirs.block_size)
            skipped = first - send.ticket.start // theirs.block_size
            runs = plan_blocks(send.block_ids, table[skipped : skipped + len(send.block_ids)], first, own.block_bytes)
        offer = Offer(
            transfer_id=send.key[0],
            attempt=send.key[1],
            first_head=heads.peer_first,
            num_heads=heads.num_heads,
            start=send.start,
            stop=send.stop,
            form="blocks" if whole else "units",
            runs=runs,
            per_message=max(BUFFER_BYTES // self._pool.message_bytes(1, part), 1),
            timeout_s=self._options.timeout_s,
        )
        return _Plan(offer, ids, send.start // self._unit_tokens(offer), part)

    def _offer(self, job: Job, piece: PushPiece, offer: Offer, scratch: _Outbound) -> Control:
        """Connect where there is no link, offer, and wait for the receiver to be ready."""
        for number in range(MAX_OFFERS):
            if scratch.control is None or not scratch.control.is_open:
                scratch.close()
                self._connect(job, piece, scratch)
            assert scratch.control is not None
            try:
                if not isinstance(scratch.control.ask(offer, job.remaining_s()), Accepted):
                    raise PeerGone("the receiver answers something else")
                return scratch.control
            except PeerGone:  # it was closed as idle at that moment; nothing was sent, so a new link may have the offer
                scratch.close()
                if number == MAX_OFFERS - 1:
                    raise
        raise AssertionError("unreachable")

    def _connect(self, job: Job, piece: PushPiece, scratch: _Outbound) -> None:
        """Make the link and its group.

        Raises:
            TransferError: it cannot be had within the job's deadline, or is refused.
        """
        assert self._factory is not None
        card, rank = piece.card, piece.heads.peer_rank
        address = self._peers.address(card, rank)
        if address.backend != self._factory.backend:
            raise TransferError(f"{address.backend} in engine {card.engine}, {self._factory.backend} here")
        peer = f"engine {card.engine} rank {rank}"
        timeout_s = min(job.remaining_s(), self._options.handshake_timeout_s)
        try:
            connection = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            kind = TransferTimeout if isinstance(error, TimeoutError) else PeerGone
            raise kind(f"{peer} cannot be reached: {error}") from error
        scratch.control = Control(connection, peer)
        mine = self.config
        hello = Hello(address.token, mine.engine, mine.epoch, mine.rank, card.engine, card.epoch, rank, timeout_s)
        if not isinstance(scratch.control.ask(hello, timeout_s), Welcome):
            raise PeerGone(f"{peer} answers something else")
        scratch.group = self._factory.make(scratch.control, rank=0, timeout_s=timeout_s)
        self.num_groups += 1

    def _send_messages(self, job: Job, plan: _Plan, group: Group, buffers: PieceBuffers) -> int:
        pool = self._pool
        assert pool is not None
        num_bytes = 0
        for message in messages_of(plan.offer, self._unit_tokens(plan.offer)):
            if group.num_posted == IN_FLIGHT:
                group.wait(job.remaining_s())
            job.check()
            ids = plan.ids[message.positions - plan.first]
            tensor = pool.direct(ids) if message.is_direct else pool.gather(ids, plan.part, buffers)
            group.send(tensor)
            num_bytes += tensor.numel()
        while group.num_posted:
            group.wait(job.remaining_s())
        return num_bytes

    def _unit_tokens(self, offer: Offer) -> int:
        """Tokens of what an offer's positions count."""
        return self.config.layout.block_size if offer.form == "blocks" else HASH_BLOCK_SIZE

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
            TransferError: the link cannot be used any more; its transfer has failed.
        """
        try:
            job, plan = self._expect(offer)
        except TransferError as error:
            link.control.send(refusal(error), self._options.handshake_timeout_s)
            return
        timeout_s = min(offer.timeout_s, self._options.timeout_s)
        try:
            with self._travels(job, link):
                link.control.send(Accepted(), timeout_s)
                num_bytes = self._receive_messages(job, plan, link, time.monotonic() + timeout_s)
        except BaseException as error:
            link.close()  # nothing lands from here on
            self.leave(job)
            code = error.code if isinstance(error, PdkvError) else TransferError.code
            self.stop_jobs(lambda other: other is job, code)
            raise
        self.leave(job)
        self.landed(job, offer.first_head, offer.num_heads, offer.start, offer.stop, num_bytes)
        link.control.send(Delivered(), timeout_s)

    def _expect(self, offer: Offer) -> tuple[Job, _Plan]:
        """The receive that an offer is for, entered, and its messages.

        Raises:
            TransferError: nobody wants that here.
        """
        key = (offer.transfer_id, offer.attempt)
        with self._registered:
            self._registered.wait_for(lambda: key in self._known, min(offer.timeout_s, REGISTRATION_S))
        job, incoming = self.find_incoming(key)
        incoming.check_range(offer.first_head, offer.num_heads, offer.start, offer.stop)
        layout = self.config.layout
        if offer.form == "blocks" and offer.num_heads != layout.num_kv_heads:
            raise TransferError(f"blocks of {offer.num_heads} heads into blocks of {layout.num_kv_heads}")
        in_units = offer.form == "units"
        first_head, last_head = offer.first_head, offer.first_head + offer.num_heads
        part = UnitPart(first_head, last_head, 0, layout.num_layers) if in_units else None
        ids = piece_ids(
            incoming.block_ids, layout.block_size, offer.start, offer.stop,
            table_start=incoming.ticket.start, in_units=in_units,
        )  # fmt: skip
        if not self.enter(job):
            raise KVNotFound("the transfer has ended", transfer_id=key[0], attempt=key[1])
        return job, _Plan(offer, ids, offer.start // self._unit_tokens(offer), part)

    def _receive_messages(self, job: Job, plan: _Plan, link: Link, deadline: float) -> int:
        pool, group = self._pool, link.group
        assert pool is not None
        assert group is not None
        buffers = link.buffers = link.buffers or pool.buffers()
        num_bytes = 0
        landing: deque[tuple[Ids, torch.Tensor | None]] = deque()  # what was posted; None: it needs no scatter

        def land() -> None:
            group.wait(max(deadline - time.monotonic(), 1e-3))
            ids, image = landing.popleft()
            if image is not None:
                pool.scatter(ids, plan.part, image, buffers)

        for message in messages_of(plan.offer, self._unit_tokens(plan.offer)):
            if len(landing) == IN_FLIGHT:
                land()
            if job.stop_code:
                raise TransferCancelled("the receiver gave the transfer up")
            ids = plan.ids[message.positions - plan.first]
            if message.is_direct:
                tensor = pool.direct(ids)
            else:
                tensor = buffers.next(pool.message_bytes(ids.size, plan.part))
            group.receive(tensor)
            num_bytes += tensor.numel()
            landing.append((ids, None if message.is_direct else tensor))
        while landing:
            land()
        return num_bytes
