"""What the fuzzer of stored values damages: each kind of store under its own connector, and `memory`'s store mode.

An engine's connector here is the real one, over its real store, with a KnownStore between the two.
"""

import contextlib
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import store_servers
import torch
from damage import MUTATIONS, KnownStore

from pdkv.connectors.memory.fabric import Content, MemoryFabric, MemoryStore, StoredBlock, StoreName
from pdkv.connectors.store.base import StoreConnector
from pdkv.connectors.store.shared_storage import SharedStorageConnector
from pdkv.connectors.store.url import StoreUrlConnector
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.file_store import file_name

sys.path.append(str(Path(__file__).parents[2] / "examples" / "custom_connector"))
from pdkv_sqlite import SQLiteConnector

Value = Any
"""What a subject stores under a name: bytes, or a StoredBlock."""

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


class KnownSQLite(_Known, SQLiteConnector):
    """The example's."""


class Subject(ABC):
    """A place of values that engines share."""

    connector: str
    mutations: Sequence[str]
    is_overwritten = False  # whether saving a value replaces what is there
    damaged_share = 0.6  # of a round's values

    @abstractmethod
    def options(self, engine: str) -> Mapping[str, str]:
        """--connector-config of that engine."""

    @abstractmethod
    def take_saved(self, engine: str) -> dict[StoreName, Value]:
        """What it has saved since this was asked last."""

    @abstractmethod
    def take_read(self, engine: str) -> set[StoreName]:
        """What it has read since this was asked last."""

    @abstractmethod
    def replace(self, name: StoreName, value: Value, rng: random.Random) -> None:
        """Put another value there, as somebody with access to the store could."""

    @abstractmethod
    def damage(self, name: StoreName, value: Value, mutation: str, rng: random.Random) -> bool:
        """Make another value of it; False: the mutation changes nothing of this one."""


# --- stores of bytes ----------------------------------------------------------------------------------------------

_OF_FILES = ("flip", "truncate", "extend", "zero", "garble", "zero_tail", "old_format")
"""Mutations of a file's own bytes, which the file store itself has to notice."""


class Stored(Subject):
    """Values of a KVStore; `directory`: where they are files."""

    def __init__(self, connector: type[_Known], directory: Path | None = None, **options: str) -> None:
        """`options`: "{engine}" in a value is the engine's name."""
        self.connector = f"damage_subjects:{connector.__name__}"
        self.mutations = [*MUTATIONS, *(f"file_{name}" for name in _OF_FILES if directory is not None)]
        self._options = {"lookup_timeout_s": "60", "transfer_timeout_s": "60", **options}
        self._directory = directory

    def options(self, engine: str) -> Mapping[str, str]:
        own = {name: text.replace("{engine}", engine) for name, text in self._options.items()}
        if engine == "foreign-layout":  # values of as many bytes
            own |= {"tokens_per_value": "192", "layer_groups": "3"}
        return own

    def take_saved(self, engine: str) -> dict[StoreName, Value]:
        saved, STORES[engine].saved = STORES[engine].saved, {}
        return dict(saved)

    def take_read(self, engine: str) -> set[StoreName]:
        asked, STORES[engine].num_asked = STORES[engine].num_asked, {}
        return set(asked)

    def replace(self, name: StoreName, value: Value, rng: random.Random) -> None:
        assert isinstance(name, bytes)
        STORES[rng.choice(["writer", "reader"])].replace(name, value)  # of tiers the reader's own fast one, too

    def damage(self, name: StoreName, value: Value, mutation: str, rng: random.Random) -> bool:
        if mutation.startswith("file_"):
            return self._damage_file(name, mutation.removeprefix("file_"), rng)
        changed = MUTATIONS[mutation](value, rng)
        if changed != value:
            self.replace(name, changed, rng)
        return changed != value

    def _damage_file(self, name: StoreName, mutation: str, rng: random.Random) -> bool:
        assert self._directory is not None
        assert isinstance(name, bytes)
        path = self._directory / file_name(name)
        before = path.read_bytes()
        if mutation == "old_format":  # with the CRC-32 that files had once
            head, rest = before[:512], before[512:]
            after = head.replace(b'"},"value"', b'","crc32":"0badc0de"},"value"')[:512] + rest
        else:
            after = MUTATIONS[mutation](before, rng)
        path.write_bytes(after)
        return after != before


# --- the `memory` connector ---------------------------------------------------------------------------------------


def _flip(block: Content, rng: random.Random) -> Content:
    changed = block.clone()
    changed.view(torch.uint8).flatten()[rng.randrange(changed.nbytes)] ^= 1 << rng.randrange(8)
    return changed


_OF_BLOCKS: Mapping[str, Callable[[Content, random.Random], Content]] = {
    "flip": _flip,
    "truncate": lambda block, rng: block[:, : rng.randrange(block.shape[1])],
    "extend": lambda block, rng: torch.cat([block, block]),
    "zero": lambda block, rng: torch.zeros_like(block),
    "ones": lambda block, rng: torch.full_like(block, float("nan")),
    "garble": lambda block, rng: torch.rand(block.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))),
}


class _KnownBlocks(MemoryStore):
    """A fabric's store that notes what is put and read."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[StoreName, StoredBlock] = {}
        self.read: set[StoreName] = set()

    def get(self, name: StoreName) -> Content | None:
        self.read.add(name)
        return super().get(name)

    def put(self, name: StoreName, content: Content) -> None:
        super().put(name, content)
        self.saved[name] = self._blocks[name]

    def replace(self, name: StoreName, block: StoredBlock) -> None:
        """Whatever it is."""
        self._blocks[name] = block


class Blocks(Subject):
    """Blocks of a fabric. Engines run one after the other: what is new is of the one that has run."""

    connector = "memory"
    is_overwritten = True
    damaged_share = 0.1  # what lies behind a prompt's first damaged block is overwritten unread
    mutations = (*_OF_BLOCKS, "old_format")

    def __init__(self, fabric: str) -> None:
        self._name = fabric
        self._store = _KnownBlocks()
        made = MemoryFabric()
        made.store = self._store
        MemoryFabric.bind(fabric, made)

    def options(self, engine: str) -> Mapping[str, str]:
        return {"mode": "store", "fabric": self._name}

    def take_saved(self, engine: str) -> dict[StoreName, Value]:
        saved, self._store.saved = self._store.saved, {}
        return dict(saved)

    def take_read(self, engine: str) -> set[StoreName]:
        read, self._store.read = self._store.read, set()
        return read

    def replace(self, name: StoreName, value: Value, rng: random.Random) -> None:
        self._store.replace(name, value)

    def damage(self, name: StoreName, value: Value, mutation: str, rng: random.Random) -> bool:
        if mutation == "old_format":  # without a digest
            self._store.replace(name, StoredBlock(value.content, b""))
        else:
            self._store.replace(name, StoredBlock(_OF_BLOCKS[mutation](value.content, rng), value.digest))
        return True


# --- all of them --------------------------------------------------------------------------------------------------

KINDS = ("memory://", "file", "redis", "lmcache", "tiers", "shared_storage", "sqlite", "memory")


@contextlib.contextmanager
def subject_of(kind: str, directory: Path) -> Iterator[Subject]:
    """One of KINDS, empty; its server runs as long as the block. Skips where the server is not installed."""
    match kind:
        case "redis":
            with store_servers.redis_server() as url:
                yield Stored(KnownUrl, url=url)
        case "lmcache":
            with store_servers.lmcache_server() as url:
                yield Stored(KnownUrl, url=url)
        case "memory://":
            yield Stored(KnownUrl, url=f"memory://{directory}")
        case "file":
            yield Stored(KnownUrl, directory / "values", url=f"file://{directory}/values")
        case "tiers":
            url = f"memory://{directory}-{{engine}},file://{directory}/values"
            yield Stored(KnownUrl, directory / "values", url=url)
        case "shared_storage":
            yield Stored(KnownSharedStorage, directory / "values", path=f"{directory}/values")
        case "sqlite":
            yield Stored(KnownSQLite, path=f"{directory}/kv.db")
        case "memory":
            try:
                yield Blocks(str(directory))
            finally:
                MemoryFabric.unbind(str(directory))
        case _:
            raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
