"""Garbage on every socket that processes listen on: TCP and unix, streams and datagrams."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix
_TYPES = {1: socket.SOCK_STREAM, 2: socket.SOCK_DGRAM, 5: socket.SOCK_SEQPACKET}
_TIMEOUT_S = 0.5
CONNECTIONS = 4
"""To each socket at a time."""


class Listener(NamedTuple):
    """A socket that somebody else can send to."""

    family: socket.AddressFamily
    type: socket.SocketKind
    address: tuple[str, int] | str


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """Sockets of these processes, each once."""
    found: dict[Listener, None] = {}
    inodes: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM):
                    kind = socket.SocketKind(connection.type)
                    found[Listener(socket.AddressFamily(connection.family), kind, _reachable(connection.laddr))] = None
            inodes |= _sockets(process.pid)
    for listener, inode in _unix_sockets():
        if inode in inodes:
            found[listener] = None
    return list(found)


def _reachable(address: tuple[str, int]) -> tuple[str, int]:
    host, port = address
    return ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _sockets(pid: int) -> set[int]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(fd)
            if name.startswith("socket:["):
                inodes.add(int(name[8:-1]))
    return inodes


def _unix_sockets() -> Iterable[tuple[Listener, int]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8:  # without a name nobody can connect to it
            continue
        kind = _TYPES[int(fields[4], 16)]
        if int(fields[3], 16) & _ACCEPTS or kind == socket.SOCK_DGRAM:
            path = "\0" + fields[7][1:] if fields[7].startswith("@") else fields[7]
            yield Listener(socket.AF_UNIX, kind, path), int(fields[6])


def blobs(rng: random.Random) -> list[bytes]:
    """What is sent: noise, wrong lengths, half messages, other protocols."""
    noise = rng.randbytes(rng.choice((1, 7, 64, 4096)))
    return [
        noise,
        struct.pack("<I", rng.randrange(1 << 32)) + noise,
        struct.pack(">I", 1 << 31) + noise,
        struct.pack("<Q", (1 << 63) + rng.randrange(1 << 62)) + noise,
        struct.pack(">I", 64) + noise[:10],
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + noise,  # ZeroMQ's greeting, and then no message
        b"\x93\xc4\x03abc\xcf" + noise,  # MessagePack that breaks off
        b"GET /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n" + noise,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{" + noise,
        b"",
    ]


def throw(listener: Listener, rng: random.Random) -> int:
    """Several connections with something different on each; half of them stay open until the others are through.

    Returns how many were taken.
    """
    num_taken = 0
    with contextlib.ExitStack() as kept:
        for number, blob in enumerate(rng.sample(blobs(rng), CONNECTIONS)):
            sock = socket.socket(listener.family, listener.type)
            kept.callback(sock.close)
            sock.settimeout(_TIMEOUT_S)
            try:
                sock.connect(listener.address)
                if blob:
                    sock.sendall(blob)
                num_taken += 1
            except OSError:  # refused, reset or full: all of them are answers
                continue
            finally:
                if number % 2:
                    sock.close()
    return num_taken
