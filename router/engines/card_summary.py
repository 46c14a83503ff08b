"""An engine's card for operators, without what only its peers can use."""

from typing import Any

from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import LoadReport


def describe_card(card: EngineCard | None, load: LoadReport | None = None) -> dict[str, Any]:
    """The card of the latest incarnation, JSON-ready; empty before the first.

    `connector_parts` are the children, transports and tiers that the engine counts separately. If a part has several
    ways to read a peer's KV, `kv_paths` says which one is used, by part and peer.
    """
    if card is None:
        return {}
    if card.backend:  # nothing is known of its KV
        names = "epoch", "backend", "lacks", "max_model_len", "max_num_seqs"
        return {name: getattr(card, name) for name in names}
    layout = card.layout
    parts = {} if load is None else load.connectors
    return {
        "version": card.version,
        "epoch": card.epoch,
        "model": card.model,
        "max_model_len": card.max_model_len,
        "max_num_seqs": card.max_num_seqs,
        "tp": card.tp,
        "connector": card.connector,
        "connector_parts": sorted(parts),
        "kv_paths": {part: stats.paths for part, stats in sorted(parts.items()) if stats.paths},
        "kind": card.kind,
        "content_addressed": card.content_addressed,
        "orders": list(card.orders),
        "kv_layout": {
            "layers": layout.num_layers,
            "kv_heads": layout.kv_heads_of_all_ranks,
            "head_size": layout.head_size,
            "dtype": layout.dtype,
            "block_size": layout.block_size,
            "block_bytes": layout.block_bytes,
            "windows": list(layout.windows),
            "hash_block_size": card.hash_block_size,
        },
    }
