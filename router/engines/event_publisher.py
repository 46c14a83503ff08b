"""Publishes what a launch's engines have cached, in the form of vLLM's KV events: keys, never tokens."""

import asyncio
import errno
import os
import socket as sockets
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC, unix_time
from pdkv.errors import ConfigError
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.doorkeeper import Doorkeeper
from pdkv.wire.engine_server import is_readable
from pdkv.wire.messages import BlockRemoved, BlockStored, KVEvent

MAX_UNREAD = 10_000
"""Batches that wait for a subscriber; it misses what comes meanwhile, and sees that by the numbers."""

MAX_SUBSCRIPTION_BYTES = 4096
"""All messages of a subscriber are shorter, including a handshake."""

PAUSE_S = 30.0
"""Seconds between two times that everything is told again."""


class EventPublisher:
    """A socket of its own, in a context of its own. Lives in one event loop, once it `begins`."""

    def __init__(self, endpoint: str, key: ClusterKey | None) -> None:
        """`key`: subscribers must have it, too; None: for ipc://, which only this user can open. Raises ConfigError."""
        self._path = _claimed(endpoint)
        self._number = 0
        self._ranks: dict[str, int] = {}  # by engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell_all: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = -PAUSE_S
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.XPUB)
        socket.linger = 0
        socket.set_hwm(MAX_UNREAD)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscriber counts
        self._doorkeeper = None if key is None else Doorkeeper(self._context, key)
        mask = os.umask(0o177)
        try:
            if self._doorkeeper is not None:
                self._doorkeeper.guard(socket)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot publish KV events at {endpoint}: {error}") from None
        finally:
            os.umask(mask)
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        if self._doorkeeper is not None:
            self._doorkeeper.start([self.endpoint])
        self._fd = socket.fileno()

    def begin(self, tell_all: Callable[[], None]) -> None:
        """Begin, in the running event loop. `tell_all` has engines say again what they have, for a new subscriber."""
        self._loop, self._tell_all = asyncio.get_running_loop(), tell_all
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def publish(self, engine: str, events: Sequence[KVEvent]) -> None:
        """Publish changes of an engine's cache; each engine is a rank of data parallelism."""
        if engine not in self._ranks:
            self._ranks[engine] = next(rank for rank in count() if rank not in self._ranks.values())
        payload = msgspec.msgpack.encode([unix_time(), [_told(event) for event in events], self._ranks[engine]])
        self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._number += 1
        self._read()  # the send may have swallowed the signal

    def forget(self, engine: str) -> None:
        """An engine is removed, and has nothing: another one may have its rank."""
        self._ranks.pop(engine, None)

    def close(self) -> None:
        """End it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._socket.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        is_new = False
        while not self._socket.closed and is_readable(self._socket):
            is_new |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\1"
        if is_new and self._timer is None and self._loop is not None:
            wait_s = max(self._told_at + PAUSE_S - MONOTONIC.now(), 0.0)
            self._timer = self._loop.call_later(wait_s, self._tell)

    def _tell(self) -> None:
        self._timer, self._told_at = None, MONOTONIC.now()
        self._tell_all()


def _claimed(endpoint: str) -> Path | None:
    """The path of ipc://, where ZeroMQ would replace whatever is there. Raises ConfigError if that is in use."""
    if not endpoint.startswith("ipc://"):
        return None
    path = Path(endpoint.removeprefix("ipc://"))
    with sockets.socket(sockets.AF_UNIX) as other:
        other.setblocking(False)
        if path.exists() and not (path.is_socket() and other.connect_ex(str(path)) == errno.ECONNREFUSED):
            raise ConfigError(f"cannot publish KV events at {endpoint}: something else has this path")
    return path


def _told(event: KVEvent) -> dict[str, Any]:
    """An event as vLLM has it, with all fields that its own decoder asks for."""
    match event:
        case BlockStored():
            of_chain = {"parent_block_hash": event.parent, "token_ids": (), "block_size": HASH_BLOCK_SIZE}
            return _keys("BlockStored", event.keys) | of_chain | {"lora_id": None, "lora_name": None}
        case BlockRemoved():
            return _keys("BlockRemoved", event.keys)
        case _:
            return {"type": "AllBlocksCleared"}


def _keys(kind: str, keys: Sequence[bytes]) -> dict[str, Any]:
    return {"type": kind, "block_hashes": keys, "medium": "GPU"}
