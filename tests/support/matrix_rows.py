"""The rows of the matrix: every backend, topology, pair of rank counts and pair of block sizes."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from small_models import NEWER
from store_servers import LMCacheServer, RedisServer, StoreServer

TOPOLOGIES = ("1P1D", "2P2D")
RANKS = ((1, 1), (1, 2), (2, 1), (2, 4), (4, 1))
"""(ranks of a prefill engine, of a decode engine)."""

WINDOW_RANKS = ((1, 1), (1, 2), (2, 1), (2, 2))
LATENT_RANKS = ((1, 2), (2, 1))

BLOCKS = ((16, 16), (16, 32), (32, 16))
"""(block size of prefill, of decode)."""


class Chosen(NamedTuple):
    """A backend that can be launched."""

    flags: tuple[str, ...]
    server: StoreServer | None = None  # the one that its engines share


Choice = contextlib.AbstractContextManager[Chosen]


def _connector(name: str, *options: str) -> tuple[str, ...]:
    config = ("--connector-config", *options) if options else ()
    return ("--connector", name, *config)


@contextlib.contextmanager
def _plain(*flags: str, directory: Path) -> Iterator[Chosen]:
    yield Chosen(_connector(*(flag.format(directory=directory) for flag in flags)))


@contextlib.contextmanager
def served(server: Callable[[], StoreServer], *, directory: Path) -> Iterator[Chosen]:
    """A store in a server."""
    with server() as running:
        yield Chosen(_connector("store", f"url={running.url}"), running)


BACKENDS: dict[str, Callable[..., Choice]] = {
    "shared_memory": functools.partial(_plain, "shared_memory"),
    "p2p": functools.partial(_plain, "p2p"),
    "p2p tcp": functools.partial(_plain, "p2p", "sockets=tcp"),
    "nixl pull": functools.partial(_plain, "nixl", "mode=pull"),
    "nixl push": functools.partial(_plain, "nixl", "mode=push"),
    "nixl pull ucx": functools.partial(_plain, "nixl", "mode=pull", "path=ucx"),
    "nixl push ucx": functools.partial(_plain, "nixl", "mode=push", "path=ucx"),
    "shared_storage": functools.partial(_plain, "shared_storage", "path={directory}/kv"),
    "store redis": functools.partial(served, RedisServer),
    "store lmcache": functools.partial(served, LMCacheServer),
    "store tiers": functools.partial(_plain, "store", "url=memory://,file://{directory}/kv"),
    "multi": functools.partial(_plain, "multi", "connectors=shared_memory,store", "store.url=file://{directory}/kv"),
}
"""name -> (directory) -> the flags that choose it, while its server runs."""

FAMILIES = (*NEWER, "deepseek_v2", "phi3")
"""Those with a row over each of FAMILY_BACKENDS; the others are the models of all rows and of the latent ones."""

FAMILY_BACKENDS = ("shared_memory", "p2p", "nixl pull", "store redis")
TWO_RANKS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3")
"""Families with experts or latent KV, each over one backend with two ranks on either side."""

HAVE_CONNECTIONS = ("p2p", "p2p tcp", "store redis", "store lmcache")
"""Engines have connections to each other, or to a server; others reach each other's memory, or files."""


class Row(NamedTuple):
    """One deployment."""

    backend: str
    topology: str
    ranks: tuple[int, int]
    blocks: tuple[int, int]
    model: str = ""
    """A family; or "windows", one with several KV groups, or "latent", one whose KV all ranks of an engine have."""

    def __str__(self) -> str:
        model = f", {self.model}" if self.model else ""
        return f"{self.backend}, {self.topology}, TP {self.ranks}, blocks {self.blocks}{model}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the topology; the backend's come from BACKENDS."""
        count = self.topology[0]
        (prefill_tp, decode_tp), (prefill_block, decode_block) = self.ranks, self.blocks
        return (
            "--prefill", count, "--decode", count,
            "--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp),
            "--prefill-block-size", str(prefill_block), "--decode-block-size", str(decode_block),
        )  # fmt: skip


def all_rows() -> list[Row]:
    """The whole matrix."""
    return [Row(*values) for values in itertools.product(BACKENDS, TOPOLOGIES, RANKS, BLOCKS)]


def cover() -> list[Row]:
    """KV read in place by unequal ranks into unequal blocks; tests/e2e has such pulls and pushes, and `make matrix`
    has every pair.
    """
    return [Row("shared_memory", "1P1D", (1, 2), (16, 32))]


def window_rows() -> list[Row]:
    """For a model with KV groups, whose blocks must be of one size."""
    return [
        Row(backend, "1P1D", pair, BLOCKS[0], "windows") for backend, pair in itertools.product(BACKENDS, WINDOW_RANKS)
    ]


def window_cover() -> list[Row]:
    """A store, and two connectors together; pulls are in other tests of such models."""
    chosen = {"store tiers": (1, 2), "multi": (2, 1)}
    return [row for row in window_rows() if chosen.get(row.backend) == row.ranks]


def latent_rows() -> list[Row]:
    """For a model with latent KV, over the backends that carry it."""
    backends = [backend for backend in BACKENDS if backend != "store lmcache"]
    return [
        Row(backend, "1P1D", pair, BLOCKS[1], "latent") for backend, pair in itertools.product(backends, LATENT_RANKS)
    ]


def family_rows() -> list[Row]:
    """Each family with each kind of connector over ranks in turn, and those that two ranks on either side share out."""
    each = itertools.product(FAMILIES, FAMILY_BACKENDS)
    rows = [Row(backend, "1P1D", RANKS[i % 3], BLOCKS[0], family) for i, (family, backend) in enumerate(each)]
    shared = zip(TWO_RANKS, itertools.cycle(FAMILY_BACKENDS), strict=False)
    return rows + [Row(backend, "1P1D", (2, 2), BLOCKS[0], family) for family, backend in shared]
