"""The process that holds Mooncake's client. Its library is loaded nowhere else.

It logs, hangs and may crash, and it lets every client of its ports read and write its memory (`tcp_transport.cpp`: a
peer names addresses). So its process contains nothing but values in transit: an engine shares one memfd with it per
connection, and nothing else.

A connection is a stream socket and a memfd, both sent by the engine. `TAKEN` goes, then `Call`s come and `Outcome`s go,
one at a time.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pdkv.host.linux import set_process_name

MAX_CONTROL_BYTES = 1 << 12
"""The most bytes of a message on the control socket."""

Verb = Literal["contains", "get", "put", "delete"]

LENGTH = struct.Struct("<I")
"""Length of each Call and Outcome, sent before it."""

TAKEN = b"\n"
"""What the process says first on a connection."""

FOUND_NONE = -704
"""A Mooncake error code (mooncake-store/include/types.h): the key does not exist."""
NO_ROOM, BAD_SIZE, NOT_READY, LEASE_EXPIRED, RPC_FAILED, RPC_TIMED_OUT = -200, -600, -703, -707, -900, -901
TRANSFER_FAILED = -800

_QUIET = frozenset({NO_ROOM, BAD_SIZE, NOT_READY, FOUND_NONE, -705, -706, LEASE_EXPIRED, RPC_FAILED, RPC_TIMED_OUT})
"""Failures that end the call for certain; after a failed transfer, something may still be written."""

_MAX_REASON = 512  # characters; a longer message of the control socket would be cut
_MAX_ARENAS = 32  # more than calls of an engine at a time; those count whose call hangs, and may still write to them
_LEAST_TIMEOUT_S = 5.0  # within which a client that hangs comes back


class Start(msgspec.Struct, frozen=True):
    """First message to the process, which answers with `Ready`."""

    master: str  # host:port
    local_host: str  # this host's address as the master sees it
    metadata_server: str
    timeout_s: float  # of one call


class Ready(msgspec.Struct, frozen=True):
    """The client accepts calls; or it could not start, for the reason given, and the process ends."""

    error: str = ""
    is_final: bool = False  # the next one would fail in the same way


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A batch. `get` writes to, and `put` reads from, the arena at `starts`."""

    verb: Verb
    names: Sequence[str]
    starts: Sequence[int]
    sizes: Sequence[int]
    arena_bytes: int


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Mooncake's result for each name: 1 or 0 for `contains`, the size for `get`, else 0; errors are negative."""

    codes: Sequence[int]
    error: str = ""  # instead of all codes


def main(control_fd: int) -> None:
    """Serve until the engine is gone, or too many calls hang."""
    set_process_name("pdkv-mooncake")
    control = socket.socket(fileno=control_fd)
    request = control.recv(MAX_CONTROL_BYTES)
    if not request:
        return
    _silence()
    client, ready = _open_client(msgspec.msgpack.decode(request, type=Start))
    with contextlib.suppress(BrokenPipeError):  # the engine is gone, as the loop will see
        control.send(msgspec.msgpack.encode(ready))
    arenas = set[_Arena]()
    while client is not None and len(arenas) < _MAX_ARENAS:
        data, fds, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 2)
        if not data:
            return
        connection, arena = socket.socket(fileno=fds[0]), _Arena(client, fds[1])
        arenas.add(arena)
        threading.Thread(target=_serve, args=[client, connection, arena, arenas], daemon=True).start()


def _silence() -> None:
    """Silence the library: Python's messages still go to standard error, the library's go to MC_LOG_DIR."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _open_client(start: Start) -> tuple[Any, Ready]:
    timeout_s = max(start.timeout_s, _LEAST_TIMEOUT_S)
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", f"{timeout_s * 1000:.0f}")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", f"{timeout_s:.0f}")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        hint = ", which RDMA's user space has: apt install libibverbs1" if "libibverbs" in str(error) else ""
        reason = str(error)[:_MAX_REASON]
        return None, Ready(f"the library of mooncake cannot be loaded: {reason}{hint}", is_final=True)
    client = MooncakeDistributedStore()
    setup = {
        "local_hostname": start.local_host,
        "metadata_server": start.metadata_server,
        "global_segment_size": "0",  # lends no memory: values would go with the engine
        "local_buffer_size": "0",
        "protocol": "tcp",
        "master_server_addr": start.master,
    }
    code = client.setup(setup)
    if code:
        return None, Ready(f"it does not answer as Mooncake's master does (setup: {code})")
    return client, Ready()


class _Arena:
    """The memory of a connection's values, known to the client."""

    def __init__(self, client: Any, fd: int) -> None:
        self._client = client
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._size = self.address = 0

    def resize(self, size: int) -> None:
        """Map the arena again if the engine has enlarged it.

        Raises:
            RuntimeError: the client refuses it.
        """
        if size == self._size:
            return
        self.unmap()
        self._memory = mmap.mmap(self._fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._size = size
        code = self._client.register_buffer(self.address, size)
        if code:
            raise RuntimeError(f"register_buffer: {code}")

    def unmap(self) -> None:
        if self._memory is not None:
            self._client.unregister_buffer(self.address)
            self._memory = None
            self._size = 0

    def close(self) -> None:
        self.unmap()
        os.close(self._fd)


def _serve(client: Any, connection: socket.socket, arena: _Arena, arenas: set[_Arena]) -> None:
    """Serve one connection. An arena that may still be written to stays as it is, and counts."""
    is_quiet = True
    with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):  # the engine waits no longer
        connection.sendall(TAKEN)
        while is_quiet and (head := stream.read(LENGTH.size)):
            outcome = _answer(client, msgspec.msgpack.decode(stream.read(*LENGTH.unpack(head)), type=Call), arena)
            is_quiet = not outcome.error and all(code >= 0 or code in _QUIET for code in outcome.codes)
            answer = msgspec.msgpack.encode(outcome)
            connection.sendall(LENGTH.pack(len(answer)) + answer)
    if is_quiet:
        arena.close()
        arenas.discard(arena)


def _answer(client: Any, call: Call, arena: _Arena) -> Outcome:
    try:
        arena.resize(call.arena_bytes)
        return Outcome(_run(client, call, arena.address))
    except (OSError, RuntimeError, ValueError) as error:
        return Outcome((), f"{call.verb}: {error}")


def _run(client: Any, call: Call, base: int) -> Sequence[int]:
    names = list(call.names)
    addresses = [base + start for start in call.starts]
    match call.verb:
        case "contains":
            return client.batch_is_exist(names)  # type: ignore[no-any-return]
        case "get":
            return client.batch_get_into(names, addresses, list(call.sizes))  # type: ignore[no-any-return]
        case "put":
            return client.batch_put_from(names, addresses, list(call.sizes))  # type: ignore[no-any-return]
        case "delete":
            return client.batch_remove(names, True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # at once: threads may hang in the library
