"""Adds up the counts of connectors: over ranks, over the parts of a connector, over transfers."""

from collections.abc import Iterable, Mapping
from typing import Literal

from pdkv.connectors.base import Stats, TransferOutcome
from pdkv.errors import KVCorrupted, TransferCancelled, TransferTimeout
from pdkv.kv_store.base import Held, TierCounts
from pdkv.wire.reports import ConnectorStats, TierHeld, largest_owners


def sum_stats(stats: Iterable[Stats]) -> dict[str, ConnectorStats]:
    """The sum, part by part."""
    total: dict[str, ConnectorStats] = {}
    for one in stats:
        for part, counts in one.items():
            total[part] = total[part] + counts if part in total else counts
    return total


def stats_under(name: str, stats: Stats) -> dict[str, ConnectorStats]:
    """The same counts as parts of `name`."""
    return {f"{name}/{part}" if part else name: counts for part, counts in stats.items()}


def stats_of_tiers(tiers: Mapping[str, TierCounts]) -> dict[str, ConnectorStats]:
    """The counts of a store's tiers."""
    return {
        name: ConnectorStats(
            tier_hits=tier.hits,
            tier_failures=tier.failures,
            held=_told(tier.held),
            read_bytes=tier.read.num_bytes,
            read_seconds=tier.read.seconds,
        )
        for name, tier in tiers.items()
    }


def _told(held: Held) -> TierHeld:
    return TierHeld(held.values, held.num_bytes, held.capacity, held.evicted, largest_owners(held.owned))


def stats_of_transfer(direction: Literal["send", "receive"], outcome: TransferOutcome) -> ConnectorStats:
    """The counts of one transfer that ended on this rank. If no byte moved there was nothing to do; a cancel is not a
    failure.
    """
    saves = direction == "send"
    failed = int(bool(outcome.code) and outcome.code != TransferCancelled.code)
    ended = int(not outcome.code and outcome.num_bytes > 0)
    return ConnectorStats(
        saves=ended if saves else 0,
        loads=0 if saves else ended,
        saved_bytes=outcome.num_bytes if saves else 0,
        loaded_bytes=0 if saves else outcome.num_bytes,
        failed_saves=failed if saves else 0,
        failed_loads=0 if saves else failed,
        timeouts=int(outcome.code == TransferTimeout.code),
        damaged_values=outcome.num_damaged,
        corrupted_transfers=int(outcome.code == KVCorrupted.code),
    )
