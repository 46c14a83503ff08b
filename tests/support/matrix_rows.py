"""The rows of the matrix: every backend, topology, pair of rank counts and pair of block sizes."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from store_servers import lmcache_server, redis_server

TOPOLOGIES = ("1P1D", "2P2D")
RANKS = ((1, 1), (1, 2), (2, 1), (2, 4), (4, 1))
"""(ranks of a prefill engine, of a decode engine)."""

BLOCKS = ((16, 16), (16, 32), (32, 16))
"""(block size of prefill, of decode)."""

Flags = contextlib.AbstractContextManager[tuple[str, ...]]


def _connector(name: str, *options: str) -> tuple[str, ...]:
    config = ("--connector-config", *options) if options else ()
    return ("--connector", name, *config)


@contextlib.contextmanager
def _plain(*flags: str, directory: Path) -> Iterator[tuple[str, ...]]:
    yield _connector(*(flag.format(directory=directory) for flag in flags))


@contextlib.contextmanager
def _redis(*, directory: Path) -> Iterator[tuple[str, ...]]:
    with redis_server() as url:
        yield _connector("store", f"url={url}")


@contextlib.contextmanager
def _lmcache(*, directory: Path) -> Iterator[tuple[str, ...]]:
    with lmcache_server() as url:
        yield _connector("store", f"url={url}")


BACKENDS: dict[str, Callable[..., Flags]] = {
    "shared_memory": functools.partial(_plain, "shared_memory"),
    "p2p": functools.partial(_plain, "p2p"),
    "nixl pull": functools.partial(_plain, "nixl", "mode=pull"),
    "nixl push": functools.partial(_plain, "nixl", "mode=push"),
    "shared_storage": functools.partial(_plain, "shared_storage", "path={directory}/kv"),
    "store redis": _redis,
    "store lmcache": _lmcache,
    "store tiers": functools.partial(_plain, "store", "url=memory://,file://{directory}/kv"),
    "multi": functools.partial(_plain, "multi", "connectors=shared_memory,store", "store.url=file://{directory}/kv"),
}
"""name -> (directory) -> the flags that choose it, while its servers run."""


class Row(NamedTuple):
    """One deployment."""

    backend: str
    topology: str
    ranks: tuple[int, int]
    blocks: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.backend}, {self.topology}, TP {self.ranks}, blocks {self.blocks}"

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
    """Fifteen rows: each pair of ranks meets each pair of block sizes once, and the backends take turns.

    Fifteen cannot hold every pair of a backend and a pair of ranks (45): `make matrix` does.
    """
    backends = list(BACKENDS)
    return [
        Row(backends[number % len(backends)], TOPOLOGIES[number % 2], ranks, blocks)
        for number, (ranks, blocks) in enumerate(itertools.product(RANKS, BLOCKS))
    ]
