"""Bare sockets: one message from one process's memory into another's; in pieces, one message for each."""

import secrets
import socket
import struct
from typing import ClassVar

import msgspec

from pdkv.connector_kit.bench.bare import BareTransport
from pdkv.connector_kit.rig import protocol as p
from pdkv.connectors.p2p.sockets import UNIX_BUFFER_BYTES
from pdkv.connectors.transfer.planning import Bytes

_HOST = "127.0.0.1"
_READY = b"\1"


class UnixMessage(BareTransport):
    """The receiving side says when it is ready, which starts its clock."""

    family: ClassVar[socket.AddressFamily] = socket.AF_UNIX

    def __init__(self, spec: p.BareSpec) -> None:
        super().__init__(spec)
        self._region: Bytes = self.new_region()
        self._memory = self._region.data
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None

    def offer(self) -> bytes:
        self._listener = socket.socket(self.family)
        unix = self.family == socket.AF_UNIX
        self._listener.bind(f"\0pdkv-bench-{secrets.token_hex(8)}" if unix else (_HOST, 0))
        self._listener.listen(1)
        return msgspec.msgpack.encode(self._listener.getsockname())

    def connect(self, address: bytes) -> None:
        where = msgspec.msgpack.decode(address)
        connection = socket.socket(self.family)
        connection.connect(where if isinstance(where, bytes) else tuple(where))
        self._connection = self._prepared(connection)

    def send(self, in_pieces: bool, timeout_s: float) -> None:
        connection = self._met(timeout_s)
        if connection.recv(1) != _READY:
            raise ConnectionError("the receiving side is gone")
        for piece in self._pieces(self.source_offsets.tolist(), in_pieces):
            connection.sendall(piece)

    def fetch(self, in_pieces: bool, timeout_s: float) -> None:
        connection = self._met(timeout_s)
        connection.sendall(_READY)
        for piece in self._pieces(self.target_offsets.tolist(), in_pieces):
            _fill(connection, piece)

    def close(self) -> None:
        for each in (self._listener, self._connection):
            if each is not None:
                each.close()

    def _met(self, timeout_s: float) -> socket.socket:
        """The connection with a timeout for calls, each of which then moves a whole message."""
        if self._connection is None:
            assert self._listener is not None
            self._listener.settimeout(timeout_s)
            self._connection = self._prepared(self._listener.accept()[0])
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, side, struct.pack("@ll", int(timeout_s) + 1, 0))
        return self._connection

    def _prepared(self, connection: socket.socket) -> socket.socket:
        connection.setblocking(True)
        if self.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _pieces(self, offsets: list[int], in_pieces: bool) -> list[memoryview]:
        slot, size = self.slot(), self.piece_bytes
        if not in_pieces:
            return [self._memory[slot : slot + self.num_bytes]]
        return [self._memory[slot + offset : slot + offset + size] for offset in offsets]


class TcpMessage(UnixMessage):
    """Over TCP on the loopback interface."""

    family = socket.AF_INET


def _fill(connection: socket.socket, piece: memoryview) -> None:
    while len(piece):
        count = connection.recv_into(piece, len(piece), socket.MSG_WAITALL)
        if not count:
            raise EOFError("the side with the data is gone")
        piece = piece[count:]
