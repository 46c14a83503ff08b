"""What the fuzzer of stored values damages: each kind of store under its own connector.

An engine's connector here is the real one, over its real store, with a KnownStore between the two.
"""

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import store_servers
from damage import MUTATIONS, KnownStore

from pdkv.connectors.memory.connector import MemoryStoreConnector
from pdkv.connectors.store.base import StoreConnector
from pdkv.connectors.store.shared_storage import SharedStorageConnector
from pdkv.connectors.store.url import StoreUrlConnector
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.file_store import file_name

sys.path.append(str(Path(__file__).parents[2] / "examples" / "custom_connector"))
from pdkv_sqlite import SQLiteConnector

STORES: dict[str, KnownStore] = {}
"""Of each engine, by its name."""


class _Known(StoreConnector):
    """A store connector whose store is noted."""

    def open_store(self) -> KVStore:
        STORES[self.config.engine] = KnownStore(super().open_store())
        return STORES[self.config.engine]


class KnownUrl(_Known, StoreUrlConnector):
    """`store`."""


class KnownSharedStorage(_Known, SharedStorageConnector):
    """`shared_storage`."""


class KnownMemory(_Known, MemoryStoreConnector):
    """`memory` with mode=store."""


class KnownSQLite(_Known, SQLiteConnector):
    """The example's."""


_OF_FILES = ("flip", "truncate", "extend", "zero", "garble", "zero_tail", "old_format")
"""Mutations of a file's own bytes, which the file store itself has to notice."""


class Subject:
    """A store of values that engines share; `directory`: where they are files."""

    damaged_share = 0.6  # of a round's values
    stays_damaged = False  # for another reader, whatever one reader finds out

    def __init__(self, connector: type[_Known], directory: Path | None = None, **options: str) -> None:
        """`options`: "{engine}" in a value is the engine's name."""
        self.connector = f"damage_subjects:{connector.__name__}"
        self.mutations = [*MUTATIONS, *(f"file_{name}" for name in _OF_FILES if directory is not None)]
        self._options = {"lookup_timeout_s": "60", "transfer_timeout_s": "60", **options}
        self._directory = directory

    def options(self, engine: str) -> Mapping[str, str]:
        """--connector-config of that engine."""
        own = {name: text.replace("{engine}", engine) for name, text in self._options.items()}
        if engine == "foreign-layout":  # values of as many bytes
            own |= {"tokens_per_value": "192", "layer_groups": "3"}
        return own

    def take_saved(self, engine: str) -> dict[bytes, bytes]:
        """What it has saved since this was asked last."""
        saved, STORES[engine].saved = STORES[engine].saved, {}
        return saved

    def take_read(self, engine: str) -> set[bytes]:
        """What it has read since this was asked last."""
        asked, STORES[engine].num_asked = STORES[engine].num_asked, {}
        return set(asked)

    def replace(self, name: bytes, value: bytes, rng: random.Random) -> None:
        """Put another value there, as somebody with access to the store could."""
        STORES[rng.choice(["writer", "reader"])].replace(name, value)  # of tiers the reader's own fast one, too

    def damage(self, name: bytes, value: bytes, mutation: str, rng: random.Random) -> bool:
        """Make another value of it; False: the mutation changes nothing of this one."""
        if mutation.startswith("file_"):
            return self._damage_file(name, mutation.removeprefix("file_"), rng)
        changed = MUTATIONS[mutation](value, rng)
        if changed != value:
            self.replace(name, changed, rng)
        return changed != value

    def _damage_file(self, name: bytes, mutation: str, rng: random.Random) -> bool:
        assert self._directory is not None
        path = self._directory / file_name(name)
        before = path.read_bytes()
        if mutation == "old_format":  # with the CRC-32 that files had once
            head, rest = before[:512], before[512:]
            after = head.replace(b'"},"value"', b'","crc32":"0badc0de"},"value"')[:512] + rest
        else:
            after = MUTATIONS[mutation](before, rng)
        path.write_bytes(after)
        return after != before


class HostSubject(Subject):
    """Host memory: each engine has a segment of its own, which nobody else changes."""

    stays_damaged = True

    def replace(self, name: bytes, value: bytes, rng: random.Random) -> None:
        STORES["writer"].replace(name, value)


KINDS = (
    "memory://", "host", "file", "redis", "lmcache", "mooncake", "s3", "tiers", "shared_storage", "sqlite", "memory",
)  # fmt: skip


@contextlib.contextmanager
def subject_of(kind: str, directory: Path) -> Iterator[Subject]:
    """One of KINDS, empty; its server runs as long as the block. Skips where the server is not installed."""
    match kind:
        case "redis" | "lmcache" | "mooncake" | "s3":
            with store_servers.SERVERS[kind]() as server:
                yield Subject(KnownUrl, url=server.url)
        case "memory://":
            yield Subject(KnownUrl, url=f"memory://{directory}")
        case "host":
            yield HostSubject(KnownUrl, url=f"host://{directory}/segments")
        case "file":
            yield Subject(KnownUrl, directory / "values", url=f"file://{directory}/values")
        case "tiers":
            url = f"memory://{directory}-{{engine}},file://{directory}/values"
            yield Subject(KnownUrl, directory / "values", url=url)
        case "shared_storage":
            yield Subject(KnownSharedStorage, directory / "values", path=f"{directory}/values")
        case "sqlite":
            yield Subject(KnownSQLite, path=f"{directory}/kv.db")
        case "memory":
            yield Subject(KnownMemory, mode="store", fabric=str(directory))
        case _:
            raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
