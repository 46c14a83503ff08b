"""The contents and hits of each tier of KV, as operators see them: engines' pools, and the stores below them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from pdkv.router.engines.state import EngineState
from pdkv.wire.reports import ConnectorStats


def describe_caches(
    engines: Sequence[EngineState], names: Mapping[int, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """JSON-ready: {"engines": [each that has reported]}. `names`: the API keys' names, by the owner of their KV.

    For each engine: the blocks of its pool by class, its prompts' tokens by source, its tiers, fastest first, and its
    connectors over stores. Values and bytes of a tier are those that this engine wrote, and `keys` has the bytes of
    those with terms; a tier that does not know them reports only its hits. For each connector: seconds of loads and
    saves, and the share of them that was hidden behind computation, which is absent if there were none.
    """
    return {
        "engines": [
            {
                "name": engine.name,
                "role": engine.role,
                "blocks": msgspec.to_builtins(engine.load.blocks),
                "prompt_tokens": msgspec.structs.asdict(engine.load.sources),
                "tiers": [
                    _describe_tier(part, stats, names)
                    for part, stats in sorted(engine.load.connectors.items())
                    if stats.held is not None
                ],
                "stores": [
                    _describe_times(part, stats)
                    for part, stats in sorted(engine.load.connectors.items())
                    if stats.load_seconds or stats.save_seconds
                ],
            }
            for engine in engines
            if engine.load is not None
        ]
    }


def _describe_tier(part: str, stats: ConnectorStats, names: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    told = {"tier": part, "hits": stats.tier_hits, "failures": stats.tier_failures}
    if stats.held is None or not stats.held.capacity:
        return told
    held = stats.held
    told |= {"values": held.values, "bytes": held.num_bytes, "capacity": held.capacity, "evictions": held.evicted}
    keys = {", ".join(names[owner]): num_bytes for owner, num_bytes in held.owned.items() if owner in names}
    return told | {"keys": keys} if keys else told


def _describe_times(part: str, stats: ConnectorStats) -> dict[str, Any]:
    loads = _share("load", stats.load_seconds, stats.hidden_load_seconds)
    return {"connector": part} | loads | _share("save", stats.save_seconds, stats.hidden_save_seconds)


def _share(what: str, seconds: float, hidden: float) -> dict[str, float]:
    return {f"{what}_seconds": seconds, f"hidden_{what}_share": hidden / seconds} if seconds else {}
