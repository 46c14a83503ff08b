"""Values in host memory: each process writes its own segment, and reads all.

Segments are named in a directory. A launch keeps them as memfds and names them there by their addresses; a directory
without addresses gets a file for each process that opens it, and belongs on a tmpfs. A process that opens the store
writes the first segment without another writer, keeping its values: so a restarted engine finds its own. A launch names
each segment after its owner, ENGINE.RANK-…, and each engine asks for its own segments (`segment`).
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from pdkv.base.clock import MONOTONIC, Clock, unix_time, unix_time_ns
from pdkv.base.log_limit import LogLimit
from pdkv.errors import ConfigError, StoreUnavailable, StoreUnsupported
from pdkv.host.held_file import ADDRESS, HeldFile
from pdkv.host.host_id import host_id
from pdkv.host.private_directory import PrivateDirectory
from pdkv.kv_store.base import (
    Arrived,
    Buffer,
    Held,
    Lent,
    LockPages,
    Scattered,
    ScatteringStore,
    Sized,
    TierCounts,
    tier_name,
)
from pdkv.kv_store.host_segment import MIN_BYTES, PAGE_BYTES, Found, Key, Segment, format_segment, key_of
from pdkv.kv_store.host_writer import SegmentWriter
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.terms import NO_TERMS, Terms

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 1 << 30
_MAX_SHUNNED = 4096
_CLOCK_TICK_NS = 100_000_000  # more than two changes of a directory may lie apart and have one time
_QUIET_S = 60.0  # between log lines about segments that cannot be opened
_ASK_AGAIN_S = 1.0  # between looks whether a segment that another process wrote is free
_SEGMENT = ".segment"


class HostStore(ScatteringStore):
    """Least recently used values of its own segment are evicted. Those of other segments are read and never changed."""

    medium: ClassVar[str] = "memory"
    own: SegmentWriter | None
    """The segment that this process writes; None: all segments belong to other processes."""

    def __init__(
        self,
        directory: str | Path,
        options: StoreOptions | None = None,
        unix_time: Callable[[], float] = unix_time,
        clock: Clock = MONOTONIC,
    ) -> None:
        """`capacity` is used for a segment made here; `segment` chooses among a launch's segments. `unix_time`: the
        clock by which values expire.

        Raises:
            ConfigError: the directory is not only this user's, or there is no memory for a segment's index.
        """
        options = options or StoreOptions()
        self._wanted = "" if options.segment is None else f"{options.segment}."
        if options.capacity is not None and options.capacity < MIN_BYTES:
            raise ConfigError(
                f"host://{directory}: capacity must be at least {MIN_BYTES} bytes, got {options.capacity}"
            )
        self._directory = PrivateDirectory(directory, "host memory")
        self._where = f"host memory {self._directory.path}"
        self.scope = _scope_of(self._directory.fd, is_launch=any(n.endswith(ADDRESS) for n in self._names()))
        self._unix_time = unix_time
        self._clock = clock
        self._lock = threading.Lock()
        self._num_calls = 0
        self._num_hits = 0
        self._closed = False
        self._others: dict[str, Segment] = {}
        self._refused: set[str] = set()
        self._looked_at = -1  # the directory's time of modification then
        self._looks_again = False  # also without a change
        self._log_limit = LogLimit(_QUIET_S)
        self._shunned: OrderedDict[tuple[str, int, int], None] = OrderedDict()  # deleted, but not ours to delete
        self._asked_at = self._clock.now()  # for a segment to write
        try:
            self._own_name, self.own = self._take_segment(options.capacity)
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise ConfigError(f"{self._where}: {error.strerror}") from None
            raise

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._call():
            numbers = list(map(key_of, keys))
            lows = np.array([low for low, _ in numbers], np.uint64)
            elsewhere = np.zeros(len(keys), bool)
            for segment in self._others.values():
                elsewhere |= segment.may_have(lows)
            in_own = self.own or ()
            there = zip(numbers, elsewhere.tolist(), strict=True)
            return [(maybe or number in in_own) and self._find(number) is not None for number, maybe in there]

    def peek(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        with self._call():
            return [
                self._read(key_of(key), Scattered(buffer), _tell_nobody, is_use=False)
                for key, buffer in zip(keys, out, strict=True)
            ]

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.put_on_terms(items, {})

    def put_on_terms(self, items: Sequence[tuple[bytes, Buffer]], terms: Mapping[bytes, Terms]) -> None:
        with self._call():
            own = self._writer()
            for key, value in reversed(items):
                number = key_of(key)
                if number in own or self._find_elsewhere(number) is None:
                    own.put(number, value, key, terms.get(key, NO_TERMS))

    def terms_of(self, keys: Sequence[bytes]) -> Mapping[bytes, Terms]:
        own = self.own
        found = own.terms_of(map(key_of, keys)) if own is not None else []
        return {key: terms for key, terms in zip(keys, found, strict=False) if terms != NO_TERMS}

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._call():
            for number in map(key_of, keys):
                if self.own is not None:
                    self.own.remove(number)
                while (elsewhere := self._find_elsewhere(number)) is not None:
                    self._shun(elsewhere[0], elsewhere[2])

    def lock_pages(self, lock: LockPages) -> None:
        if self.own is not None:
            self.own.segment.lock_pages(lock)

    def lend(self, key: bytes) -> Lent | None:
        with self._call():
            own = self.own
            found = None if own is None else own.find(key_of(key), is_use=True)
            view = None if own is None or found is None else own.segment.view(found)
            if own is None or found is None or view is None:
                return None
            return Lent(view, partial(self._was_there, own.segment, found))

    def _was_there(self, segment: Segment, found: Found) -> bool:
        """Whether a lent value was still there when it had been read, which counts as a hit."""
        was_there = segment.is_there(found)
        with self._lock:
            self._num_hits += was_there
        return was_there

    def contains_own(self, keys: Sequence[bytes]) -> list[bool]:
        """The keys in this process's own segment."""
        with self._call():
            own = self.own
            return [own is not None and key_of(key) in own for key in keys]

    def discard(self, keys: Sequence[bytes] | None) -> int:
        """Discard values of this process's own segment; writers of other segments are told, too."""
        with self._call():
            own = self.own
            return own.discard(None if keys is None else list(map(key_of, keys))) if own is not None else 0

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> list[bool]:
        with self._call():
            own = self.own
            return own.pin(list(map(key_of, keys)), ttl_s) if own is not None else [False] * len(keys)

    def unpin(self, keys: Sequence[bytes] | None) -> int:
        with self._call():
            own = self.own
            return own.unpin(None if keys is None else list(map(key_of, keys))) if own is not None else 0

    def count_held(self) -> Held:
        own = self.own
        return own.count() if own is not None else Held()

    @property
    def own_capacity(self) -> int | None:
        return self.count_held().capacity

    def expect(self, keys: Sequence[bytes]) -> None:
        if self.own is not None:
            self.own.expect(map(key_of, keys))

    def unexpect(self, keys: Sequence[bytes]) -> None:
        if self.own is not None:
            self.own.unexpect(list(map(key_of, keys)))

    @property
    def look_ahead_bytes(self) -> int:
        return self.count_held().capacity // 2

    def coldest(self, num_bytes: int) -> list[Sized]:
        own = self.own
        return own.coldest(num_bytes) if own is not None else []

    def count_tiers(self) -> Mapping[str, TierCounts]:
        return {tier_name(0, self): TierCounts(self._num_hits, 0, self.count_held())}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            is_unused = not self._num_calls
        if is_unused:
            self._release()

    # --- one key ----------------------------------------------------------------------------------------------------

    def _find(self, key: Key, *, is_use: bool = True) -> tuple[Segment, Found] | None:
        if self.own is not None and (found := self.own.find(key, is_use=is_use)) is not None:
            return self.own.segment, found
        elsewhere = self._find_elsewhere(key)
        return None if elsewhere is None else elsewhere[1:]

    def _find_elsewhere(self, key: Key) -> tuple[str, Segment, Found] | None:
        for name, segment in self._others.items():
            found = segment.find(key)
            if found is not None and (name, found.entry, found.version) not in self._shunned:
                return name, segment, found
        return None

    def _read_all(self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived) -> list[bool]:
        with self._call():
            found = [
                self._read(key_of(key), buffers, partial(arrived, index))
                for index, (key, buffers) in enumerate(zip(keys, out, strict=True))
            ]
        with self._lock:
            self._num_hits += sum(found)
        return found

    def _read(self, key: Key, out: Scattered, arrived: Callable[[int], None], *, is_use: bool = True) -> bool:
        place = self._find(key, is_use=is_use)
        return place is not None and place[1].size == len(out) and place[0].read(place[1], out, arrived)

    def _shun(self, name: str, found: Found) -> None:
        with self._lock:
            self._shunned[name, found.entry, found.version] = None
            if len(self._shunned) > _MAX_SHUNNED:
                self._shunned.popitem(last=False)

    # --- segments ---------------------------------------------------------------------------------------------------

    def _take_segment(self, asked: int | None) -> tuple[str, SegmentWriter | None]:
        """Take the first segment without a writer or, in a directory without a launch's, make a new one."""
        names = self._names()
        name, writer = self._take_free(names)
        if writer is not None:
            found = writer.segment.num_pages * PAGE_BYTES
            if asked is not None and found != asked // PAGE_BYTES * PAGE_BYTES:
                logger.warning(
                    "%s: capacity=%d is not taken: segment %s, which is there, has %d bytes; remove it for another",
                    self._where, asked, name, found,
                )  # fmt: skip
            return name, writer
        if any(name.endswith(ADDRESS) for name in names):
            logger.warning(
                "%s: all segments belong to other processes: this one reads them, and writes none", self._where
            )
            return "", None
        return self._make_segment(len(names), asked or DEFAULT_CAPACITY)

    def _take_free(self, names: Sequence[str]) -> tuple[str, SegmentWriter | None]:
        """The first of these segments that this process may write and that has no writer."""
        for name in names:
            if name.endswith(ADDRESS) and not name.startswith(self._wanted):
                continue
            segment = self._open(name, os.O_RDWR)
            if segment is not None and _lock(segment.fd):
                return name, SegmentWriter(segment, self._clock)
            if segment is not None:
                segment.close()
        return "", None

    def _writer(self) -> SegmentWriter:
        """The own segment's writer. One whose writer was still there when this store was opened may be free by now.

        Raises:
            StoreUnsupported: there is none. What others have written can be read all the same.
        """
        with self._lock:
            if self.own is None and self._clock.now() >= self._asked_at + _ASK_AGAIN_S:
                self._asked_at = self._clock.now()
                self._own_name, self.own = self._take_free(self._names())
                self._others = {name: other for name, other in self._others.items() if name != self._own_name}
            if self.own is None:
                raise StoreUnsupported(f"{self._where}: all segments belong to other processes")
            return self.own

    def _make_segment(self, number: int, capacity: int) -> tuple[str, SegmentWriter]:
        name = f"{number}-{secrets.token_hex(4)}{_SEGMENT}"
        temporary = f".{name}"
        try:
            os.close(self._directory.create(temporary))
            fd = self._directory.open(temporary, os.O_RDWR)
            assert fd is not None
            format_segment(fd, capacity)
            segment = Segment(fd, writable=True, unix_time=self._unix_time)
            _lock(fd)  # before anybody finds it
            self._directory.rename(temporary, name)
        except BaseException:
            self._directory.remove(temporary)
            raise
        return name, SegmentWriter(segment, self._clock)

    def _open(self, name: str, flags: int) -> Segment | None:
        """None: it is gone, or none, which is said once; or it cannot be opened now, as without descriptors."""
        if name in self._refused:
            return None
        try:
            fd = self._directory.open(name, os.O_RDONLY if name.endswith(ADDRESS) else flags)
            if fd is not None and name.endswith(ADDRESS):
                with os.fdopen(fd, "rb") as file:
                    fd = msgspec.json.decode(file.read(), type=HeldFile).open(flags)
            return None if fd is None else Segment(fd, writable=flags == os.O_RDWR, unix_time=self._unix_time)
        except (FileNotFoundError, StoreUnavailable, msgspec.MsgspecError) as error:
            self._refused.add(name)
            logger.warning("%s: %s: %s", self._where, name, error)
        except OSError as error:
            self._looks_again = True
            if self._log_limit.passes():
                logger.warning("%s: %s cannot be opened now: %s", self._where, name, error)
        return None

    def _names(self) -> list[str]:
        with self._directory.entries() as entries:
            return sorted(e.name for e in entries if e.name[0] != "." and e.name.endswith((_SEGMENT, ADDRESS)))

    def _look_around(self) -> None:
        """See which segments are there, if the directory has changed. One that has gone is let go of."""
        changed_at = os.fstat(self._directory.fd).st_mtime_ns
        if changed_at == self._looked_at and not self._looks_again:
            return
        self._looks_again = False
        is_over = unix_time_ns() > changed_at + _CLOCK_TICK_NS
        names = [name for name in self._names() if name != self._own_name]
        self._looked_at = changed_at if is_over else -1
        opened = ((name, self._others.get(name) or self._open(name, os.O_RDONLY)) for name in names)
        self._others = {name: segment for name, segment in opened if segment is not None}

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self._where} is closed")
            self._num_calls += 1
        try:
            with self._lock:
                self._look_around()
            yield
        except OSError as error:
            raise StoreUnavailable(f"{self._where}: {error.strerror}") from error
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._lock:
            self._num_calls -= 1
            is_unused = self._closed and not self._num_calls
        if is_unused:
            self._release()

    def _release(self) -> None:
        for segment in self._others.values():
            segment.close()
        if self.own is not None and self.own.segment.fd >= 0:
            fcntl.flock(self.own.segment.fd, fcntl.LOCK_UN)  # the mapping, which may live on, has a descriptor, too
            self.own.segment.close()
        self._directory.close()


def _scope_of(directory: int, *, is_launch: bool) -> str:
    """A name for a directory that no other host has, since the same path is another directory there. What a launch
    keeps is reached through its processes; files by all who see the directory.
    """
    status = os.fstat(directory)
    where = host_id() if is_launch else host_id().split()[0]
    return hashlib.blake2b(f"{where} {status.st_dev} {status.st_ino}".encode(), digest_size=8).hexdigest()


def _tell_nobody(stop: int) -> None:
    """A callback for a read whose reader does not need its progress."""


def _lock(fd: int) -> bool:
    """Whether this process writes the segment from now on, until it closes `fd`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
