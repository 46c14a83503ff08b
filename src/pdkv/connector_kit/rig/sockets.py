"""Finds the sockets of a process that others can send to, through /proc, and sends garbage to each."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"  # net/tcp_states.h
_UNIX_ACCEPTS = 0x10000  # __SO_ACCEPTCON
_UNIX_TYPES = {1: socket.SOCK_STREAM, 2: socket.SOCK_DGRAM, 5: socket.SOCK_SEQPACKET}
_SOCKET_LINK = "socket:["
_SEND_TIMEOUT_S = 1.0


class Listener(NamedTuple):
    """The address of a listening socket, or of one that takes datagrams."""

    family: int
    address: tuple[str, int] | str
    type: int = socket.SOCK_STREAM

    def __str__(self) -> str:
        return f"{socket.AddressFamily(self.family).name} {self.address!r}"


def listeners(pid: int) -> list[Listener]:
    """All listening TCP and unix sockets of a process, and its unix sockets that take datagrams.

    A unix socket with a removed path is left out: it cannot be connected to any more.
    """
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith(_SOCKET_LINK):
                inodes.add(link[len(_SOCKET_LINK) : -1])
    return [*_tcp(pid, inodes), *_unix(pid, inodes)]


def _tcp(pid: int, inodes: set[str]) -> Iterator[Listener]:
    for name, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in _lines(pid, name):
            fields = line.split()
            if fields[3] != _LISTENING or fields[9] not in inodes:
                continue
            address, _, port = fields[1].partition(":")
            words = struct.unpack(f">{size // 4}I", bytes.fromhex(address))
            host = socket.inet_ntop(family, struct.pack(f"={size // 4}I", *words))
            local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            yield Listener(family, (local, int(port, 16)))


def _unix(pid: int, inodes: set[str]) -> Iterator[Listener]:
    for line in _lines(pid, "unix"):
        fields = line.split()
        if len(fields) < 8 or fields[6] not in inodes:
            continue
        kind = _UNIX_TYPES.get(int(fields[4], 16))  # others' sockets and those about to close may have type 0
        open_to_all = kind == socket.SOCK_DGRAM or int(fields[3], 16) & _UNIX_ACCEPTS
        if kind is None or not open_to_all:
            continue
        path = fields[7]
        if path.startswith("@"):
            yield Listener(socket.AF_UNIX, "\0" + path[1:], kind)
        elif os.path.exists(path):
            yield Listener(socket.AF_UNIX, path, kind)


def _lines(pid: int, name: str) -> list[str]:
    path = Path(f"/proc/{pid}/net/{name}")
    return path.read_text().splitlines()[1:] if path.exists() else []


def garbage() -> list[bytes]:
    """Frames that no protocol expects: nothing, noise, huge lengths, half a message, deep nesting."""
    noise = bytes((i * 37 + 11) % 256 for i in range(4096))
    return [
        b"",
        b"\0",
        noise,
        noise * 64,
        b"\xff" * 16,
        struct.pack("<Q", 1 << 62) + b"x",
        struct.pack(">I", 0x7FFFFFFF) + b"x",
        struct.pack("<I", 100) + b"only a part of a hundred bytes",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\0NULL" + b"\0" * 48,  # a ZeroMQ greeting
        b"\x91" * 5000,  # arrays in arrays, in msgpack
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",  # a pickle
    ]


def send_garbage(listener: Listener) -> list[socket.socket]:
    """Send all of it, each frame on its own connection; some stay open. Returns those (the caller closes them)."""
    kept = []
    for index, data in enumerate(garbage()):
        connection = socket.socket(listener.family, listener.type)
        # A queue of datagrams that is not read (UCX has one) is soon full, which is also fine.
        connection.settimeout(0.0 if listener.type == socket.SOCK_DGRAM else _SEND_TIMEOUT_S)
        with contextlib.suppress(OSError):  # refused and reset connections are fine, too
            connection.connect(listener.address)
            connection.sendall(data)
        if index % 3:
            connection.close()
        else:
            kept.append(connection)
    return kept
