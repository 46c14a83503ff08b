"""One end of a link: its sockets, and a piece in transit. The end that dialed sends, the other one receives."""

import itertools
from typing import TYPE_CHECKING

import xxhash

from pdkv.connectors.p2p.pieces import MovePlan, PiecePool
from pdkv.connectors.p2p.sockets import Connection
from pdkv.connectors.p2p.wire import Control, End
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.connectors.transfer.planning import Bytes
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import PeerGone, TransferCancelled, TransferError, Unauthenticated

if TYPE_CHECKING:
    import torch

    from pdkv.connectors.p2p.nccl import NcclGroup


class LinkEnd:
    """The resources of a link. One thread uses it; any may `interrupt` it."""

    def __init__(self, control: Control, token: str) -> None:
        self.control = control
        self.token = token  # its name among the links of its receiver
        self.second: Connection | None = None  # once there was a large piece
        self.group: NcclGroup | None = None  # between distinct GPUs
        self._buffer: Bytes | None = None  # made for the first piece

    @property
    def is_open(self) -> bool:
        """Whether the peer has neither closed it nor sent anything unrequested."""
        return self.control.connection.is_open and (self.second is None or self.second.is_open)

    def make_group(self, rank: int, device: "torch.device", make_s: float) -> None:
        """Use NCCL for the KV of a pool on that device. Raises a TransferError: close the link."""
        from pdkv.connectors.p2p.nccl import NcclGroup

        self.group = NcclGroup(self.control, rank, device, make_s)

    def send_piece(self, job: Job, plan: MovePlan, pool: PiecePool, digests: PieceDigests | None) -> None:
        """Send a piece with an accepted offer, followed by its digests.

        Raises:
            TransferError: close the link; the receiver waits for data that will not come.
        """
        body = None
        if self.group is not None:
            self.group.send_piece(plan, pool.units, job.remaining_s)
        elif self._streams(pool, digests):
            pool.stream(plan, self._sockets(plan), digests, "send", job.remaining_s)
        else:
            body, buffer = self._start(pool, digests)
            for ids, connection in zip(plan.batches(), itertools.cycle(self._sockets(plan)), strict=False):
                rows = pool.outgoing(ids, plan.part, buffer)
                if body is not None:
                    pool.digest(body.update, ids, plan.part, buffer)
                connection.send_rows(rows, job.remaining_s())
        self.control.send(End(_result(body), b"" if digests is None else digests.finish()), job.remaining_s())

    def receive_piece(
        self, job: Job, plan: MovePlan, pool: PiecePool, digests: PieceDigests | None, timeout_s: float
    ) -> bytes:
        """Receive a piece with an accepted offer; returns the sender's digests, which follow it.

        Raises:
            TransferError: close the link; until then data in transit may still be written.
        """
        deadline = job.clock.now() + timeout_s

        def remaining_s() -> float:
            if job.stop_code:
                raise TransferCancelled("the receiver gave the transfer up")
            return max(deadline - job.clock.now(), 1e-3)

        body = None
        if self.group is not None:
            self.group.receive_piece(plan, pool.units, remaining_s)
        elif self._streams(pool, digests):
            pool.stream(plan, self._sockets(plan), digests, "receive", remaining_s)
        else:
            body, buffer = self._start(pool, digests)
            for ids, connection in zip(plan.batches(), itertools.cycle(self._sockets(plan)), strict=False):
                connection.receive_rows(pool.incoming(ids, plan.part, buffer), remaining_s())
                if body is not None:
                    pool.digest(body.update, ids, plan.part, buffer)
                pool.landed(ids, plan.part, buffer)
        end = self.control.expect(remaining_s())
        if not isinstance(end, End):
            raise TransferError(f"expected the end of a piece, got {type(end).__name__}")
        if self.control.connection.is_unix and not self.is_open:
            raise PeerGone("the sender gave up: it may have reused its blocks while they were read")
        if end.body != _result(body):
            raise Unauthenticated("a piece was altered in transit")
        return end.digests

    def interrupt(self) -> None:
        """End the link from any thread: its own thread wakes up, whatever it waits for."""
        for part in (self.control, self.second, self.group):
            if part is not None:
                part.interrupt()

    def close(self) -> None:
        """Close on its own thread: nothing lands, and nothing is read any more. Idempotent."""
        for part in (self.group, self.second, self.control):
            if part is not None:
                part.close()

    def _start(self, pool: PiecePool, digests: PieceDigests | None) -> "tuple[xxhash.xxh3_128 | None, Bytes | None]":
        """The digest of a piece's bytes, if there is no other (and the network is not trusted), and the buffer."""
        self._buffer = pool.make_buffer() if self._buffer is None else self._buffer
        control = self.control
        if control.connection.is_unix or digests is not None:
            return None, self._buffer
        return xxhash.xxh3_128(seed=control.session.seed), self._buffer

    def _streams(self, pool: PiecePool, digests: PieceDigests | None) -> bool:
        """Whether the kernel moves the whole piece: it can digest the KV, but not the bytes."""
        return pool.can_stream and (self.control.connection.is_unix or digests is not None)

    def _sockets(self, plan: MovePlan) -> list[Connection]:
        """The sockets that take batches in turn, so that one is filled while the other is read."""
        if plan.offer.num_sockets == 1:
            return [self.control.connection]
        if self.second is None or plan.offer.num_sockets != 2:
            raise TransferError(f"{plan.offer.num_sockets} sockets are offered, but the link has fewer")
        return [self.control.connection, self.second]


def _result(body: "xxhash.xxh3_128 | None") -> bytes:
    return b"" if body is None else body.digest()
