"""Rows of the matrix of tiers: each pair of values of tiers, hand-off, topology, ranks and model is in one of them."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from store_servers import LMCacheServer, MooncakeServer, RedisServer, S3Server, StoreServer

HANDOFFS: dict[str, tuple[str, ...]] = {
    "shared_memory": ("--connector", "shared_memory"),
    "p2p": ("--connector", "p2p"),
    "nixl pull": ("--connector", "nixl", "--connector-config", "mode=pull"),
    "nixl push": ("--connector", "nixl", "--connector-config", "mode=push"),
    "store": ("--connector", "store"),
}
"""In the last one the tiers hand prompts over."""

TOPOLOGIES = ("1P1D", "2P2D")
RANKS = ((1, 1), (1, 2), (2, 1), (2, 2))
"""(ranks of a prefill engine, of a decode engine)."""

MODELS = ("one group", "windows")

HOST_VALUES = 48
"""That the host memory of all prefill engines has room for where nothing is below it: less than half of those of the
forty prompts.
"""

UPPER_VALUES = 64
"""That the host memory of all engines has room for above a lower tier: about half of what they write."""

_PAGE_BYTES = 64 << 10  # of host memory; a value of these models takes less

LOWER_BYTES = 5 << 20
"""Of a tier that has a bound: about half of what the engines write."""

AMPLE_BYTES = 256 << 20


class Tiers(NamedTuple):
    """Tiers that engines can be launched over."""

    flags: tuple[str, ...]
    names: tuple[str, ...]
    """As in metrics: 0-host, 1-redis."""

    server: StoreServer | None = None


TiersContext = contextlib.AbstractContextManager[Tiers]


@contextlib.contextmanager
def _host(row: "TierRow", directory: Path) -> Iterator[Tiers]:
    size = row.capacity if row.handoff == "store" else row.host_bytes
    yield Tiers(("--kv-host-memory", str(size)), ("0-host",))


@contextlib.contextmanager
def _files(row: "TierRow", directory: Path) -> Iterator[Tiers]:
    url = f"file://{directory}/kv?capacity={row.capacity}"
    yield Tiers(("--kv-host-memory", str(row.host_bytes), "--kv-store", url), ("0-host", "1-file"))


@contextlib.contextmanager
def _served(start: Callable[[int], StoreServer], name: str, row: "TierRow", directory: Path) -> Iterator[Tiers]:
    with start(row.capacity) as server:
        flags = ("--kv-host-memory", str(row.host_bytes), "--kv-store", server.url)
        yield Tiers(flags, ("0-host", f"1-{name}"), server)


def _redis(capacity: int) -> StoreServer:
    return RedisServer("--maxmemory", str(capacity), "--maxmemory-policy", "allkeys-lru")


def _mooncake(capacity: int) -> StoreServer:
    """Its smallest segment has 16 MiB: it evicts at a share of that."""
    size = max(capacity, 16 << 20)
    return MooncakeServer(size, f"--eviction_high_watermark_ratio={capacity / size:.2f}", "--default_kv_lease_ttl=500")


TIERS: dict[str, Callable[["TierRow", Path], TiersContext]] = {
    "host": _host,
    "host, file": _files,
    "host, redis": functools.partial(_served, _redis, "redis"),
    "host, mooncake": functools.partial(_served, _mooncake, "mooncake"),
    "host, lmcache": functools.partial(_served, lambda capacity: LMCacheServer(), "lmcache"),
    "host, s3": functools.partial(_served, lambda capacity: S3Server(), "object"),
}
"""name -> (row, directory) -> flags that choose them. LMCache's server and buckets keep all."""


class TierRow(NamedTuple):
    """One deployment."""

    tiers: str
    handoff: str
    topology: str
    ranks: tuple[int, int]
    model: str

    def __str__(self) -> str:
        return f"{self.tiers} beside {self.handoff}, {self.topology}, TP {self.ranks}, {self.model}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the topology and the hand-off; those of tiers come from TIERS."""
        count, (prefill_tp, decode_tp) = self.topology[0], self.ranks
        ranks = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
        child = "" if self.handoff == "store" else "store."
        patient = (f"{child}lookup_timeout_s=20", f"{child}transfer_timeout_s=60")  # a busy machine makes no miss
        own = (*HANDOFFS[self.handoff], "--connector-config", *patient)
        return ("--prefill", count, "--decode", count, *ranks, *own)

    @property
    def host_bytes(self) -> int:
        """Of each engine's host memory. Groups and head shards are values of their own."""
        num_parts = max(self.ranks) * (2 if self.model == "windows" else 1)
        count = int(self.topology[0])  # of prefill engines, and of decode engines
        num_values = HOST_VALUES // count if self.tiers == "host" else UPPER_VALUES // (2 * count)
        return num_values * num_parts * _PAGE_BYTES

    @property
    def capacity(self) -> int:
        """Of the lowest tier. What hands prompts over must keep them until they are read."""
        return AMPLE_BYTES if self.handoff == "store" else LOWER_BYTES


def pairs_of(row: TierRow) -> set[tuple[int, object, int, object]]:
    """Each two of its values, with their places."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def all_pairs() -> set[tuple[int, object, int, object]]:
    """Of any row."""
    values = (TIERS, HANDOFFS, TOPOLOGIES, RANKS, MODELS)
    return set().union(*(pairs_of(TierRow(*row)) for row in itertools.product(*values)))


@functools.cache
def tier_rows() -> list[TierRow]:
    """A row for each pair of tiers and hand-off, with other values that make the most new pairs, seldom ones first."""
    rows: list[TierRow] = []
    missing = all_pairs()

    def gain(row: TierRow) -> tuple[int, int]:
        return len(pairs_of(row) & missing), -sum(value in other for value in row for other in rows)

    for tiers, handoff in itertools.product(TIERS, HANDOFFS):
        candidates = (TierRow(tiers, handoff, *rest) for rest in itertools.product(TOPOLOGIES, RANKS, MODELS))
        rows.append(max(candidates, key=gain))
        missing -= pairs_of(rows[-1])
    return rows
