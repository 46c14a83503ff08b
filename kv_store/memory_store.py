"""Values in this process's memory, shared by name, least recently used first out."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pdkv.base.clock import unix_time
from pdkv.errors import ConfigError, StoreFull, StoreUnavailable
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.terms import NO_TERMS, Ledger, Terms

DEFAULT_CAPACITY = 1 << 30

Bytes = npt.NDArray[np.uint8]


def _as_array(buffer: Buffer) -> Bytes:
    array: npt.NDArray[Any] = np.asarray(buffer)
    return array


class _Shelf:
    """The values shared by all stores of one name."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.unix_time: Callable[[], float] = unix_time
        self.num_users = 0
        self.num_bytes = 0
        self.num_evicted = 0
        self.lock = threading.Lock()
        self._values: OrderedDict[bytes, Bytes] = OrderedDict()  # least recently used first
        self._ledger: Ledger[bytes] = Ledger()

    def find(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Values by key. Found ones become the most recently used, the batch's first key last."""
        with self.lock:
            self._drop_what_is_over()
            for key in reversed(keys):
                if key in self._values:
                    self._values.move_to_end(key)
                    self._ledger.use(key)
            return [self._values.get(key) for key in keys]

    def insert(self, key: bytes, value: Bytes, terms: Terms) -> None:
        """Add a value, evicting the least recently used ones or, within a quota, only its owner's."""
        with self.lock:
            self._drop_what_is_over()
            if key in self._values or terms.are_over(self.unix_time()):
                return
            while not self._ledger.fits(terms, value.nbytes):
                self._evict(self._ledger.owned(terms.owner))
            while self.num_bytes + value.nbytes > self.capacity:
                self._evict(self._values)
            self._values[key] = value
            self.num_bytes += value.nbytes
            self._ledger.take(terms, value.nbytes)
            self._ledger.enter(key, terms)

    def terms_of(self, keys: Sequence[bytes]) -> dict[bytes, Terms]:
        """The terms of values that have some."""
        with self.lock:
            return {key: terms for key in keys if (terms := self._ledger.terms_of(key)) != NO_TERMS}

    def remove(self, keys: Sequence[bytes] | None) -> int:
        """Drop those of the keys (None: all) that exist; returns how many did."""
        with self.lock:
            found = list(self._values) if keys is None else [key for key in dict.fromkeys(keys) if key in self._values]
            for key in found:
                self._remove(key)
            return len(found)

    def check_integrity(self) -> None:
        """Recount the bytes."""
        with self.lock:
            assert self.num_bytes == sum(value.nbytes for value in self._values.values()) <= self.capacity
            owned: Counter[int] = Counter()
            for key, value in self._values.items():
                owned[self._ledger.terms_of(key).owner] += value.nbytes
            assert {owner: count for owner, count in owned.items() if owner} == self._ledger.count()

    def _drop_what_is_over(self) -> None:
        now = self.unix_time()
        while (key := self._ledger.first_over(now)) is not None:
            self._remove(key)

    def _evict(self, among: Mapping[bytes, object]) -> None:
        self._remove(next(iter(among)))
        self.num_evicted += 1

    def _remove(self, key: bytes) -> None:
        num_bytes = self._values.pop(key).nbytes
        self.num_bytes -= num_bytes
        self._ledger.give_back(self._ledger.terms_of(key), num_bytes)
        self._ledger.leave(key)


_SHELVES: dict[str, _Shelf] = {}
_SHELVES_LOCK = threading.Lock()


class MemoryStore(KVStore):
    """Stores of one name in a process see the same values; the last `close` drops them.

    Copies run outside the lock and without the interpreter lock.
    """

    is_shared: ClassVar[bool] = False
    medium: ClassVar[str] = "memory"

    def __init__(
        self, name: str = "", capacity: int | None = None, unix_time: Callable[[], float] | None = None
    ) -> None:
        """`capacity` in bytes, 1 GiB by default. `unix_time`: the clock of all stores of that name.

        Raises:
            ConfigError: the name is in use with another capacity.
        """
        with _SHELVES_LOCK:
            shelf = _SHELVES.get(name) or _Shelf(name, capacity or DEFAULT_CAPACITY)
            if capacity not in (None, shelf.capacity):
                raise ConfigError(f"memory://{name} is already open with capacity {shelf.capacity}, got {capacity}")
            shelf.unix_time = unix_time or shelf.unix_time
            shelf.num_users += 1
            self._shelf = _SHELVES[name] = shelf
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [value is not None for value in self._open_shelf().find(keys)]

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        return [
            self._copy_out(value, buffer)
            for value, buffer in zip(self._open_shelf().find(keys), out, strict=True)
        ]  # fmt: skip

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.put_on_terms(items, {})

    def put_on_terms(self, items: Sequence[tuple[bytes, Buffer]], terms: Mapping[bytes, Terms]) -> None:
        shelf = self._open_shelf()
        before = shelf.find([key for key, _ in items])
        for (key, buffer), found in zip(reversed(items), reversed(before), strict=True):
            if found is not None:
                continue
            of_value = terms.get(key, NO_TERMS)
            most = shelf.capacity if of_value.quota is None else min(of_value.quota, shelf.capacity)
            if buffer.nbytes > most:
                raise StoreFull(f"memory://{shelf.name}: {buffer.nbytes} bytes do not fit into {most}")
            shelf.insert(key, _as_array(buffer).copy(), of_value)

    def terms_of(self, keys: Sequence[bytes]) -> Mapping[bytes, Terms]:
        return self._open_shelf().terms_of(keys)

    @property
    def own_capacity(self) -> int | None:
        return self._shelf.capacity

    def delete(self, keys: Sequence[bytes]) -> None:
        self._open_shelf().remove(keys)

    def discard(self, keys: Sequence[bytes] | None) -> int:
        return self._open_shelf().remove(keys)

    def close(self) -> None:
        with _SHELVES_LOCK:
            if self._closed:
                return
            self._closed = True
            self._shelf.num_users -= 1
            if self._shelf.num_users == 0:
                del _SHELVES[self._shelf.name]

    @property
    def num_evicted(self) -> int:
        """Number of values evicted so far."""
        return self._shelf.num_evicted

    def check_integrity(self) -> None:
        """Assert that the bytes counted are those stored."""
        self._shelf.check_integrity()

    def _open_shelf(self) -> _Shelf:
        if self._closed:
            raise StoreUnavailable(f"memory://{self._shelf.name} is closed")
        return self._shelf

    @staticmethod
    def _copy_out(value: Bytes | None, buffer: Buffer) -> bool:
        if value is None or value.nbytes != buffer.nbytes:
            return False
        np.copyto(_as_array(buffer), value)
        return True
