"""Exchanges between the ranks of one model on one host: each writes its part into shared memory, signals that, and
reads all parts.

The ranks are joined by socket pairs that their launcher has made: none of them listens, so no other process can
connect. The memory is a memfd without a name. Nothing spins: a waiting rank sleeps on a socket, which also reports a
dead rank.
"""

import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Sequence

import torch

from pdkv.base.clock import MONOTONIC
from pdkv.errors import ConfigError, RankError, RankGone, RankTimeout
from pdkv.models.shard import Shard

SLOT_BYTES = 1 << 20
"""Bytes of a rank's part of one exchange; larger ones are split."""

_NUM_SLOTS = 2
"""Per rank, used in turn: who has heard of everybody's exchange n knows that all of them have read n - 1."""

_VERSION = 1
_HELLO = struct.Struct("<QQQ")  # version, rank, number of ranks
_WORD = struct.Struct("<QQ")  # number of the exchange, bytes of each part
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RankMemory:
    """One rank's end. Single-threaded."""

    def __init__(self, shard: Shard, peers: Sequence[socket.socket], timeout_s: float) -> None:
        """Meet the other ranks.

        Args:
            peers: a SOCK_SEQPACKET socket to each other rank, in their order; owned from now on.
            timeout_s: limit of this meeting and, until it is changed, of every later wait.

        Raises:
            RankTimeout, RankGone: not all ranks came.
            ConfigError: the memory cannot be allocated.
        """
        assert len(peers) == shard.size - 1, (len(peers), shard)
        self.timeout_s = timeout_s
        self._shard = shard
        self._number = 0
        self._broken = False
        others = [rank for rank in range(shard.size) if rank != shard.rank]
        self._peers = dict(zip(others, peers, strict=True))
        for peer in peers:
            peer.setblocking(False)
        try:
            memory = self._meet()
        except BaseException:
            self.close()
            raise
        # (slot, rank, byte)
        self._slots: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8).view(
            _NUM_SLOTS, shard.size, SLOT_BYTES
        )

    def exchange(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts, (size, *part.shape), valid until the second exchange after this one begins.

        Args:
            part: of any layout, at most SLOT_BYTES, of the same shape and type on all ranks.

        Raises:
            RankTimeout: a rank did not come in time; the ranks cannot be used any more.
            RankGone: a rank went away, or exchanges something different.
        """
        if self._broken or self._slots is None:
            raise RankGone(f"{self}: another rank was lost before")
        self._number += 1
        parts = self._slots[self._number % _NUM_SLOTS, :, : part.nbytes].view(part.dtype)
        parts = parts.view(self._shard.size, *part.shape)
        parts[self._shard.rank].copy_(part)
        word = _WORD.pack(self._number, part.nbytes)
        deadline = MONOTONIC.now() + self.timeout_s
        self._broken = True  # until everybody has said the same
        for rank in self._peers:
            self._send(rank, word, deadline)
        for rank in self._peers:
            said = self._receive(rank, deadline)
            if said != word:
                raise RankGone(f"{self}: rank {rank} is not at exchange {_WORD.unpack(word)}: it sent {said.hex()}")
        self._broken = False
        return parts

    def close(self) -> None:
        """Leave, which the other ranks notice. Idempotent."""
        self._slots = None
        for peer in self._peers.values():
            peer.close()

    def __str__(self) -> str:
        return f"rank {self._shard.rank} of {self._shard.size}"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _meet(self) -> mmap.mmap:
        """Rank 0 makes the memory and gives it to the others; all hear of all."""
        rank, size, deadline = self._shard.rank, self._shard.size, MONOTONIC.now() + self.timeout_s
        num_bytes = _NUM_SLOTS * size * SLOT_BYTES
        fd = _make_memory(num_bytes) if rank == 0 else -1
        try:
            for other in self._peers:
                self._send(other, _HELLO.pack(_VERSION, rank, size), deadline, [fd] if rank == 0 else [])
            for other in self._peers:
                said, fds = self._receive_fds(other, deadline)
                fd = fds[0] if fds else fd
                if said != _HELLO.pack(_VERSION, other, size) or (fd < 0 and other == 0):
                    raise RankGone(f"{self}: rank {other} sent {said.hex()} instead of its greeting")
            if os.fstat(fd).st_size != num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RankGone(f"{self}: rank 0's memory is not {num_bytes} sealed bytes")
            return mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise ConfigError(f"{self}: the ranks' shared memory cannot be mapped: {error.strerror}") from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _send(self, rank: int, data: bytes, deadline: float, fds: Sequence[int] = ()) -> None:
        while True:
            try:
                socket.send_fds(self._peers[rank], [data], list(fds)) if fds else self._peers[rank].send(data)
                return
            except BlockingIOError:
                self._wait(rank, select.POLLOUT, deadline)
            except OSError as error:
                raise self._gone(rank, error.strerror) from None

    def _receive(self, rank: int, deadline: float) -> bytes:
        while True:
            try:
                data = self._peers[rank].recv(64)
            except BlockingIOError:
                self._wait(rank, select.POLLIN, deadline)
                continue
            except OSError as error:
                raise self._gone(rank, error.strerror) from None
            if not data:
                raise self._gone(rank, "its end is closed")
            return data

    def _receive_fds(self, rank: int, deadline: float) -> tuple[bytes, list[int]]:
        self._wait(rank, select.POLLIN, deadline)
        try:
            data, fds, _, _ = socket.recv_fds(self._peers[rank], 64, 1)
        except OSError as error:
            raise self._gone(rank, error.strerror) from None
        if not data:
            raise self._gone(rank, "its end is closed")
        return data, fds

    def _wait(self, rank: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._peers[rank], event)
        if not poll.poll(max(deadline - MONOTONIC.now(), 0.0) * 1000):
            raise RankTimeout(f"{self}: rank {rank} did not come in time")

    def _gone(self, rank: int, why: str | None) -> RankError:
        return RankGone(f"{self}: rank {rank} went away: {why}")


def _make_memory(num_bytes: int) -> int:
    """A memfd of that size, which cannot be resized. Raises ConfigError."""
    fd = os.memfd_create("pdkv-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # else a page that cannot be had is a SIGBUS in a forward pass
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"cannot allocate {num_bytes} bytes of shared memory for the ranks: {error.strerror}"
        ) from error
    return fd
