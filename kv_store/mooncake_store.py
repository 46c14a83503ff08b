"""Values in Mooncake's store: in the memory that processes of a cluster lend to it, found by its master.

Mooncake's client runs in a process of its own (`mooncake_process.py`), and lends nothing: values outlive the engines. A
value is one object, named after its key's digest; since an object must have at least one byte, one byte follows the
value.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import ConfigError, StoreFull, StoreTimeout, StoreUnavailable
from pdkv.kv_store import mooncake_process as mooncake
from pdkv.kv_store.base import PART_BYTES, Arrived, Buffer, TellingStore
from pdkv.kv_store.connections import ConnectionPool, Deadline
from pdkv.kv_store.mooncake_host import ClientConnection, MooncakeHost
from pdkv.kv_store.mooncake_process import Verb
from pdkv.kv_store.options import BYTES_IN_FLIGHT, StoreOptions
from pdkv.kv_store.pipeline import ByteBudget

T = TypeVar("T")

_MISSES = frozenset(
    {mooncake.FOUND_NONE, mooncake.NOT_READY, mooncake.LEASE_EXPIRED, mooncake.BAD_SIZE, mooncake.TRANSFER_FAILED}
)
"""Errors of a read; the last one follows the death of the process that has lent the memory."""

_ALIGNMENT = 64
_MAX_STALE_CONNECTIONS = 64  # of the client to its master: one for each call that there was at a time


class MooncakeStore(TellingStore):
    """A call moves at most `max_bytes_in_flight` bytes at a time, through memory that the client's process shares.

    The master decides what is evicted, and when.
    """

    def __init__(self, host: str, port: int, options: StoreOptions | None = None, clock: Clock = MONOTONIC) -> None:
        """Connects on first use.

        Raises:
            ConfigError: the package is not installed.
        """
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError("the mooncake store needs the package mooncake: pip install 'pdkv[mooncake]'")
        self.options = options or StoreOptions()
        self._clock = clock
        self.what = f"Mooncake at {host}:{port}"
        self._budget = ByteBudget(self.options.max_bytes_in_flight or BYTES_IN_FLIGHT)
        timeout_s = self.options.operation_timeout_s
        self._host = MooncakeHost((host, port), self.options.metadata_server, timeout_s, self.what, clock)
        self._pool = ConnectionPool(
            lambda deadline: self._host.connect(deadline, self.options.connect_timeout_s), self.what
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        def operation(connection: ClientConnection) -> list[bool]:
            codes = self._call(connection, "contains", [_name(key) for key in keys])
            return [self._check(code) == 1 for code in codes]

        return self._run(operation) if keys else []

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        sizes = [buffer.nbytes + 1 for buffer in out]
        found = [False] * len(keys)

        def receive(connection: ClientConnection, part: range, starts: Sequence[int]) -> None:
            names = [_name(keys[index]) for index in part]
            codes = self._call(connection, "get", names, starts, [sizes[index] for index in part])
            for index, start, code in zip(part, starts, codes, strict=True):
                found[index] = code not in _MISSES and self._check(code) == sizes[index]
                if found[index]:
                    _copy(connection.arena[start : start + out[index].nbytes], out[index], partial(arrived, index))

        self._move(sizes, receive)
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        sizes = [value.nbytes + 1 for _, value in items]

        def send(connection: ClientConnection, part: range, starts: Sequence[int]) -> None:
            for index, start in zip(part, starts, strict=True):
                value = items[index][1]
                connection.arena[start : start + value.nbytes] = value
            names = [_name(items[index][0]) for index in part]
            for code in self._call(connection, "put", names, starts, [sizes[index] for index in part]):
                if code == mooncake.NO_ROOM:
                    raise StoreFull(f"{self.what} has no room: what is lent to it is full, or nothing is")
                self._check(code)

        self._move(sizes, send)

    def delete(self, keys: Sequence[bytes]) -> None:
        def operation(connection: ClientConnection) -> None:
            for code in self._call(connection, "delete", [_name(key) for key in keys]):
                if code != mooncake.FOUND_NONE:
                    self._check(code)

        if keys:
            self._run(operation)

    def close(self) -> None:
        self._pool.close()
        self._host.close()

    def _move(self, sizes: Sequence[int], move: Callable[[ClientConnection, range, Sequence[int]], None]) -> None:
        """Call `move(connection, indices, their places in the arena)` for one part of the batch after the other."""
        if not sizes:
            return

        def operation(connection: ClientConnection) -> None:
            parts = list(_parts(sizes, self._budget.limit))
            connection.reserve(max(sum(_aligned(sizes[index]) for index in part) for part in parts))
            for part in parts:
                starts = [0, *accumulate(_aligned(sizes[index]) for index in part[:-1])]
                num_bytes = sum(sizes[index] for index in part)
                self._budget.acquire(num_bytes, connection.deadline)
                try:
                    move(connection, part, starts)
                finally:
                    self._budget.release(num_bytes)

        self._run(operation)

    def _run(self, operation: Callable[[ClientConnection], T]) -> T:
        """Run it on a connection.

        Raises:
            StoreTimeout: it is not done in time.
            StoreUnavailable: there is no master, or its client ended.
        """
        try:
            return self._pool.run(operation, Deadline(self.options.operation_timeout_s, self.what, self._clock))
        except StoreTimeout:
            self._host.probe()  # raises where nobody is there: the client tries for seconds
            raise

    def _call(
        self,
        connection: ClientConnection,
        verb: Verb,
        names: Sequence[str],
        starts: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> Sequence[int]:
        """`connection.call`, repeated for each connection of the client to a master that is gone."""
        for _ in range(_MAX_STALE_CONNECTIONS):
            codes = connection.call(verb, names, starts, sizes)
            if mooncake.RPC_FAILED not in codes:
                return codes
            self._host.probe()  # raises where there is no new one
        raise StoreUnavailable(f"{self.what} does not answer as Mooncake's master does")

    def _check(self, code: int) -> int:
        """Check that a code is not an error. Raises StoreTimeout or StoreUnavailable."""
        if code >= 0:
            return code
        if code == mooncake.RPC_TIMED_OUT:
            raise StoreTimeout(f"{self.what} does not answer")
        raise StoreUnavailable(f"{self.what}: error {code}")


def _parts(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Consecutive indices with `limit` bytes together; a larger value is alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    yield range(start, len(sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _copy(source: Buffer, out: Buffer, arrived: Callable[[int], None]) -> None:
    for start in range(0, len(source), PART_BYTES):
        stop = min(start + PART_BYTES, len(source))
        out[start:stop] = source[start:stop]
        arrived(stop)


def _name(key: bytes) -> str:
    return f"pdkv-{hashlib.blake2b(key, digest_size=20).hexdigest()}"
