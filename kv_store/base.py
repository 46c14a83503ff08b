"""A KV store: keys to immutable bytes. It knows nothing of blocks, layers or requests."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pdkv.errors import StoreUnsupported
from pdkv.kv_store.read_meter import ReadTime
from pdkv.kv_store.terms import Terms

T = TypeVar("T")

Buffer = memoryview
"""Contiguous bytes (format "B"); a store fills or reads it in place."""

Arrived = Callable[[int, int], None]
"""(index of the key, stop): bytes [0, stop) of its value are in its buffer."""

Item = tuple[bytes, Buffer]
"""A key and its value."""

Sized = tuple[bytes, int]
"""A key, and the bytes of its value."""

TermsOf = Callable[[int], Terms]
"""Index of a key -> the terms of its value, once that is in its buffer."""

PROBE_KEY = bytes(32)
"""A key without a value: a store that answers for it can be reached."""

PART_BYTES = 256 << 10
"""Freshly written bytes are still in a core's cache: a reader that wants to check them is called after parts of this
size.
"""


class Scattered:
    """A value's bytes in one or more consecutive buffers."""

    def __init__(self, *buffers: Buffer) -> None:
        self.buffers = buffers
        self._ends = list(accumulate(map(len, buffers)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def stretch(self, start: int, stop: int) -> Iterator[Buffer]:
        """Bytes [start, stop), in place."""
        for number in range(bisect_right(self._ends, start), len(self.buffers)):
            buffer = self.buffers[number]
            begin = self._ends[number] - len(buffer)
            if begin >= stop:
                return
            yield buffer[max(start - begin, 0) : stop - begin]


LockPages = Callable[[npt.NDArray[np.uint8]], Callable[[], None] | None]
"""`Streams.lock_pages` of a device."""


class Lent(NamedTuple):
    """A value where it lies in a store of this process, in memory from which a device copies by itself."""

    view: memoryview
    is_there: Callable[[], bool]  # asked after reading: whether what was read was the value


class Held(NamedTuple):
    """What this process has in a store now; zeros if the store does not know."""

    values: int = 0
    num_bytes: int = 0  # memory or disk that they use
    capacity: int = 0  # bytes that they may use
    evicted: int = 0  # values evicted to make room for others since the start
    owned: Mapping[int, int] = MappingProxyType({})  # bytes by owner, of values whose terms name one


class TierCounts(NamedTuple):
    """Counts of one of the parts of a store since the start, and its content."""

    hits: int  # values read from it
    failures: int  # calls that failed, and those skipped after a failure
    held: Held = Held()
    read: ReadTime = ReadTime()


def prefixes_of(chains: Sequence[Sequence[bytes]], there: Sequence[bool]) -> list[int]:
    """For each chain, how many consecutive keys exist from its first one on. `there`: for all keys, chain after
    chain.
    """
    answers = iter(there)
    found = [[next(answers) for _ in chain] for chain in chains]
    return [each.index(False) if False in each else len(each) for each in found]


class KVStore(ABC):
    """Thread-safe. Methods may block up to the store's timeout, so they are called on a connector's threads only.

    Any method may raise StoreError (StoreUnavailable, StoreTimeout, StoreFull, StoreUnsupported) and nothing else. The
    store can be used again afterwards: it reconnects by itself. What a failed call had already done stays done.

    Keys of a batch come in the order of their prompt, first blocks first; a store that evicts drops the last of a batch
    before the first, since a prefix is useless without its beginning.
    """

    is_shared: ClassVar[bool] = True
    """Whether every process that opens the store sees the same values."""

    scope: str = ""
    """The scope of a shared store. Processes with another scope see other values; empty: shared by all."""

    medium: ClassVar[str] = "store"
    """The medium of the values for metrics and routers: "memory", "disk", or "store" for any other."""

    @property
    def asks_key_by_key(self) -> bool:
        """Whether `contains` makes a separate request for each key, so that a few rounds of few keys are cheaper."""
        return False

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a value now. An answer may be out of date when it arrives: `get` decides."""

    def count_prefixes(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
        """How many consecutive keys have a value, from the first one of each chain on.

        A store that asks key by key checks some of them, and assumes that a key's predecessors exist, too. As with
        `contains`, `get` decides.
        """
        return prefixes_of(chains, self.contains([key for chain in chains for key in chain]))

    def contains_for_all(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys every process can find: `contains`, without values that only this process has."""
        return self.contains(keys)

    @abstractmethod
    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        """Read values into `out`, one buffer per key, in one batch.

        Returns:
            Per key whether its buffer now holds the whole value. False: there is no such key, or the value is cut short
            or of another size than its buffer, the content of which is then undefined. Stores need not detect changed
            bytes: values carry their own checksum, which readers verify.
        """

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        """As `get`, and report through `arrived` how much of each value has been read, while its bytes are in the CPU
        cache of the calling thread.

        A value may start over from its beginning, as over another connection. A store need not report progress.
        """
        return self.get(keys, out)

    def peek(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        """As `get`, for a copy elsewhere: a store that evicts does not count it as a use."""
        return self.get(keys, out)

    @abstractmethod
    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Write values in one batch. Each becomes visible whole or not at all; a key that exists is left as it is.

        The buffers are not read after the return.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove those of the keys that exist."""

    # --- terms: a store without support for them ignores them; readers of values see expiry from their bytes ----------

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        """As `put`; `terms`: by key, for values that have any. Expired values are not put; a value over a quota evicts
        the owner's least recently used values, and no others.

        Raises:
            StoreFull: also for a value that is larger than its owner's quota.
        """
        self.put(items)

    def read_on_terms(
        self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        """As `read`; a store that copies what it reads, as into a faster store, does so on these terms."""
        return self.read(keys, out, arrived)

    @property
    def can_scatter(self) -> bool:
        """Whether `read_scattered` finds anything."""
        return False

    def read_scattered(
        self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        """As `read_on_terms`, but directly into the values' destinations, and from the fastest part alone. A subclass
        with its own `read` has its own `read_scattered`, too, or says that it cannot.

        A value that is not found may exist all the same: the other reads decide.
        """
        return [False] * len(keys)

    def lock_pages(self, lock: LockPages) -> None:
        """Let a device copy from this process's own values, if they lie in its memory."""
        return

    def lend(self, key: bytes) -> Lent | None:
        """A value in memory that is page-locked; None: it is to be read."""
        return None

    def terms_of(self, keys: Sequence[bytes]) -> Mapping[bytes, Terms]:
        """Terms by key, for those of this process's values that have terms; empty if the store keeps none."""
        return {}

    def forget(self, keys: Sequence[bytes] | None) -> None:
        """Note that these values (None: all) will be discarded from the store's parts: no copy between parts may bring
        one back. Does not block.
        """
        return

    def still(self, timeout_s: float) -> AbstractContextManager[None]:
        """A context in which nothing is copied between the store's parts in the background; a running copy ends first.

        Raises StoreTimeout, on entry, for one that does not end in time.
        """
        return nullcontext()

    def keep(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        """As `put_on_terms`, for values that need only be found again: slower parts may get them later, or never."""
        put_all(self, items, terms)

    def ask_part(self, part: "KVStore", call: Callable[[], T], *, writes: bool = False) -> T:
        """Run a call of one of its `parts`. Raises StoreUnavailable at once for a part that is currently left alone."""
        return call()

    def hang_up(self, *, for_good: bool = False) -> None:
        """End the running calls, which raise StoreUnavailable. Does not block. A store that cannot end them lets them
        run to their deadline.

        Args:
            for_good: a store that can end calls also refuses later ones. Otherwise the store can be used again.
        """
        return

    @property
    def problem(self) -> str:
        """Why a part of the store is currently left alone; empty: no problem is known."""
        return ""

    def on_problem(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, by any thread, whenever `problem` changes."""

    def put_into(self, part: "KVStore", items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        """As `put_on_terms`, into one of the store's `parts`, regardless of that part's write policy."""
        part.put_on_terms(items, terms)

    def contains_own(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a value that this process may remove: the values that `discard` would find."""
        return self.contains(keys)

    def discard(self, keys: Sequence[bytes] | None) -> int:
        """Remove the values that this process may remove, of these keys or (None) of all; returns how many it found.

        Raises StoreUnsupported for None if the store cannot list its keys.
        """
        if keys is None:
            raise StoreUnsupported(f"{kind_of(self)} cannot be emptied: others may use it, and it lists no keys")
        there = [key for key, is_there in zip(keys, self.contains(keys), strict=True) if is_there]
        self.delete(there)
        return len(there)

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> list[bool]:
        """Protect this process's values under these keys from eviction, for `ttl_s` (None: until `unpin`, or the end of
        the process). All of those that exist are pinned, or none.

        Returns:
            Which of the keys exist, and so are pinned.

        Raises:
            StoreFull: all pinned values together would take too much of the store.
            StoreUnsupported: this process does not control eviction.
        """
        raise StoreUnsupported(f"{kind_of(self)} evicts by its own rules: only host memory can be pinned")

    def unpin(self, keys: Sequence[bytes] | None) -> int:
        """Remove pins from these keys or (None) all; returns how many there were. Raises StoreUnsupported as `pin`."""
        raise StoreUnsupported(f"{kind_of(self)} has no pins: only host memory can be pinned")

    def parts(self) -> Mapping[str, "KVStore"]:
        """The stores that this store consists of, fastest first, under the names used by `count_tiers`."""
        return {tier_name(0, self): self}

    # --- values to be read soon; a store without support ignores this -------------------------------------------------

    @property
    def look_ahead_bytes(self) -> int:
        """Bytes of values that may be expected at a time; 0: the store ignores them."""
        return 0

    def expect(self, keys: Sequence[bytes]) -> None:
        """Note values that will be read soon, in this order: other values make room before them. Does not block."""
        return

    def unexpect(self, keys: Sequence[bytes]) -> None:
        """Note that no reader of these values is known any more. Does not block."""
        return

    def count_damaged(self) -> int:
        """Number of values since the start that the store itself found damaged, and so missing. Does not block."""
        return 0

    def count_held(self) -> Held:
        """What this process has in the store. Does not block."""
        return Held()

    @property
    def own_capacity(self) -> int | None:
        """Bytes that this process's values may use before some are evicted; None: not known. Never blocks."""
        return None

    def coldest(self, num_bytes: int) -> list[Sized]:
        """Values that would be evicted if this many more bytes were put, in the order of eviction; empty if the store
        does not know.
        """
        return []

    def count_tiers(self) -> Mapping[str, TierCounts]:
        """Counts by name, such as "0-host", if the store consists of several or knows its content. Does not block."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close connections, threads and files. Idempotent; other methods then raise StoreUnavailable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_all(store: KVStore, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
    """Put values, each with its terms if it has any."""
    if terms:
        store.put_on_terms(items, terms)
    else:
        store.put(items)


def kind_of(store: KVStore) -> str:
    """The kind of a store, such as "host" or "redis"."""
    return type(store).__name__.removesuffix("Store").lower()


def tier_name(place: int, store: KVStore) -> str:
    """The name of a store among the parts of one, such as "0-host"."""
    return f"{place}-{kind_of(store)}"


class TellingStore(KVStore):
    """A store that reports the progress of reads: it implements `read`, and `get` calls it without a callback."""

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        return self.read(keys, out, lambda index, stop: None)

    @abstractmethod
    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]: ...


class ScatteringStore(TellingStore):
    """A store that implements `read_scattered`; `read` calls it with one buffer for each value."""

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        return self._read_all(keys, [Scattered(buffer) for buffer in out], arrived)

    @property
    def can_scatter(self) -> bool:
        return True

    def read_scattered(
        self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        return self._read_all(keys, out, arrived)

    @abstractmethod
    def _read_all(self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived) -> list[bool]:
        """`read` into any buffers."""
