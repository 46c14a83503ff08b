"""Bare transports: bytes from one process to another without overhead, the yardstick of connectors.

Each is a class with two sides: one has the data, the other gets it into its own memory. Both use regions larger than
the last-level cache, in turns.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import numpy as np

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig import protocol as p
from pdkv.connectors.transfer.planning import Bytes
from pdkv.kernels import host

LOCAL_COPY = "pdkv.connector_kit.bench.bare:LocalCopy"

_BARE: Mapping[str, str] = {
    "pdkv.connectors.memory.connector": LOCAL_COPY,
    "pdkv.connectors.shared_memory.connector": "pdkv.connector_kit.bench.bare:SharedMapping",
    "pdkv.connectors.store.shared_storage": "pdkv.connector_kit.bench.bare:FileRead",
    "pdkv.connectors.nixl.connector": "pdkv.connector_kit.bench.bare:SharedMapping",
    "pdkv.connectors.p2p.connector": "pdkv.connector_kit.bench.bare_socket:UnixMessage",
}
"""Bare transports by connector module."""

_CHOSEN: Mapping[tuple[str, str, str], str] = {
    ("pdkv.connectors.nixl.connector", "path", "ucx"): "pdkv.connector_kit.bench.bare_nixl:NixlRead",
    ("pdkv.connectors.p2p.connector", "sockets", "tcp"): "pdkv.connector_kit.bench.bare_socket:TcpMessage",
}
"""By module, with the option that selects another transport."""

_OF_STORES: Mapping[str, str] = {
    "memory": LOCAL_COPY,
    "host": "pdkv.connector_kit.bench.bare:SharedMapping",
    "file": "pdkv.connector_kit.bench.bare:FileRead",
    "redis": "pdkv.connector_kit.bench.bare_redis:RedisGet",
    "redis+unix": "pdkv.connector_kit.bench.bare_redis:RedisGet",
    "unix": "pdkv.connector_kit.bench.bare_redis:RedisGet",
    "mooncake": "pdkv.connector_kit.bench.bare_mooncake:MooncakeGet",
    **dict.fromkeys(("s3", "gs", "az"), "pdkv.connector_kit.bench.bare_objects:ObjectGet"),
}
"""Stores' bare clients by the scheme of the first URL."""


def bare_of(target: str, connector: type, options: Mapping[str, str]) -> str | None:
    """The bare transport below a connector, "module:Class"; None: there is none.

    A third party's class names its own in the attribute `bare_transport`.
    """
    own = getattr(connector, "bare_transport", None)
    if isinstance(own, str):
        return own
    if target.startswith("pdkv.connectors.store.url:"):
        return _OF_STORES.get(options.get("url", "").partition("://")[0])
    module = target.partition(":")[0]
    for (name, option, value), bare in _CHOSEN.items():
        if module == name and options.get(option) == value:
            return bare
    return _BARE.get(module)


class BareTransport(ABC):
    """One side of a bare transport. `spec` has the number of bytes to move, and the size of pieces if they are moved in
    pieces.
    """

    def __init__(self, spec: p.BareSpec) -> None:
        self.num_bytes = spec.num_bytes
        self.piece_bytes = min(spec.piece_bytes, spec.num_bytes)
        self.spec = spec
        self.num_slots = max(2, -(-spec.region_bytes // spec.num_bytes))
        self.turn = -1
        pieces = np.arange(spec.num_bytes // self.piece_bytes, dtype=np.int64) * self.piece_bytes
        rng = np.random.default_rng(0)
        self.source_offsets = rng.permutation(pieces)
        self.target_offsets = rng.permutation(pieces)

    @abstractmethod
    def offer(self) -> bytes:
        """Become the side that has the data; returns its address."""

    @abstractmethod
    def connect(self, address: bytes) -> None:
        """Become the receiving side."""

    def send(self, in_pieces: bool, timeout_s: float) -> None:
        """Take part in a move as the side with the data, if that is necessary."""

    @abstractmethod
    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        """Get num_bytes; their place is `slot()` on both sides."""

    def prepare(self) -> None:
        """Prepare a move before the clock of the receiving side starts."""

    def close(self) -> None:
        """Release all resources."""

    def slot(self) -> int:
        """Offset in bytes of this turn's data in the region."""
        return self.turn % self.num_slots * self.num_bytes

    def new_region(self) -> Bytes:
        """Memory for all turns, already faulted in."""
        return np.ones(self.num_slots * self.num_bytes, np.uint8)


BARE_SIDE = "pdkv.connector_kit.bench.bare:BareSide"


class BareSide:
    """A host's part of a bare transport."""

    def __init__(self, opened: p.BareSpec) -> None:
        """Raises ConfigError if a package is missing."""
        self._transport: BareTransport = resolve_name(opened.transport)(opened)
        self._gets = opened.address is not None
        self.address = b""
        if opened.address is None:
            self.address = self._transport.offer()
        else:
            self._transport.connect(opened.address)

    def move(self, in_pieces: bool, timeout_s: float) -> float:
        """Move once, in one piece or in pieces; returns the seconds on the receiving side."""
        transport = self._transport
        transport.turn += 1
        if not self._gets:
            transport.send(in_pieces, timeout_s)
            return 0.0
        transport.prepare()
        start = MONOTONIC.now()
        transport.fetch(in_pieces, timeout_s)
        return MONOTONIC.now() - start

    def close(self) -> None:
        """Release everything."""
        self._transport.close()


class LocalCopy(BareTransport):
    """memcpy within a process."""

    _source: Bytes
    _target: Bytes

    def offer(self) -> bytes:
        return b""

    def connect(self, address: bytes) -> None:
        self._source, self._target = self.new_region(), self.new_region()

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        source = self._source[self.slot() : self.slot() + self.num_bytes]
        target = self._target[self.slot() : self.slot() + self.num_bytes]
        if not in_pieces:
            target[:] = source
            return
        size = self.piece_bytes
        if host.available():  # one memcpy after the other, nothing else
            rows = host.Rows(1, 0, 0, 1, 0, 0, size)
            host.copy_pieces(target.ctypes.data, source.ctypes.data, self.target_offsets, self.source_offsets, rows)
            return
        for first, to in zip(self.source_offsets.tolist(), self.target_offsets.tolist(), strict=True):
            target[to : to + size] = source[first : first + size]


class SharedMapping(LocalCopy):
    """memcpy by one thread from memory that another process has written, and this one maps."""

    _fd: int = -1

    def offer(self) -> bytes:
        size = self.num_slots * self.num_bytes
        self._fd = os.memfd_create("pdkv-bench")
        os.ftruncate(self._fd, size)
        self._map(f"/proc/self/fd/{self._fd}", size)[:] = 1
        return msgspec.msgpack.encode(f"/proc/{os.getpid()}/fd/{self._fd}")

    def connect(self, address: bytes) -> None:
        size = self.num_slots * self.num_bytes
        self._source, self._target = self._map(msgspec.msgpack.decode(address, type=str), size), self.new_region()
        self._source.max()  # page tables of this process

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _map(self, path: str, size: int) -> Bytes:
        return np.memmap(path, np.uint8, "r+", shape=(size,))


class FileRead(BareTransport):
    """Reads a file's bytes, which are in the page cache."""

    _fd: int = -1
    _path: Path | None = None

    def offer(self) -> bytes:
        self._path = Path(self.spec.options["directory"]) / f"bare-{os.getpid()}"
        self._path.write_bytes(self.new_region().data)
        return msgspec.msgpack.encode(str(self._path))

    def connect(self, address: bytes) -> None:
        self._fd = os.open(msgspec.msgpack.decode(address, type=str), os.O_RDONLY)
        self._target = self.new_region()

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        slot, size = self.slot(), self.piece_bytes
        view = memoryview(self._target.data)
        if not in_pieces:
            _read(self._fd, view[slot : slot + self.num_bytes], slot)
            return
        for first, to in zip(self.source_offsets.tolist(), self.target_offsets.tolist(), strict=True):
            _read(self._fd, view[slot + to : slot + to + size], slot + first)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read(fd: int, view: Any, offset: int) -> None:
    while len(view):
        count = os.preadv(fd, [view], offset)
        if not count:
            raise EOFError(f"the file ends at {offset}")
        view, offset = view[count:], offset + count
