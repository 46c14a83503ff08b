"""The worker side of `multi`: every call goes to every child, and each result is reported under its child's key."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pdkv.connectors.base import (
    NO_TRANSFERS,
    Direction,
    KVConnectorMetadata,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.multi.wire import MultiMetadata, encode_handshake, part_name, split_card, tag
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.stats import stats_under, sum_stats
from pdkv.wire.kv import EngineCard

if TYPE_CHECKING:
    import torch


class MultiWorker(WorkerConnector):
    """The children's worker sides of one rank. The scheduler side decides what results mean together."""

    metadata_type = MultiMetadata

    def __init__(self, children: Sequence[ConnectorPlan], workers: Sequence[WorkerConnector]) -> None:
        self._children = children
        self.workers = workers
        self._hooked: list[tuple[WorkerConnector, KVConnectorMetadata]] = []  # by the layers of the current step

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        for worker in self.workers:
            worker.register_kv_caches(kv_cache)

    def handshake(self) -> bytes:
        return encode_handshake([child.name for child in self._children], [w.handshake() for w in self.workers])

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, MultiMetadata)
        parts = [
            msgspec.msgpack.decode(part, type=worker.metadata_type) if isinstance(part, msgspec.Raw) else part
            for worker, part in zip(self.workers, meta.parts, strict=True)
        ]
        self._hooked = []
        for worker, part in zip(self.workers, parts, strict=True):
            part.earlier_steps, part.this_step = meta.earlier_steps, meta.this_step
            worker.start_load_kv(part)
            if part.needs_layer_hooks:
                self._hooked.append((worker, part))
        for child, key in meta.cancels:
            self.workers[child].cancel(key, "receive")

    def wait_for_layer_load(self, layer: int) -> None:
        for worker, _ in self._hooked:
            worker.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int, kv_cache: "torch.Tensor", meta: KVConnectorMetadata) -> None:
        for worker, part in self._hooked:
            worker.save_kv_layer(layer, kv_cache, part)

    def wait_for_save(self) -> None:
        for worker in self.workers:
            worker.wait_for_save()

    def get_finished(self) -> TransferResults:
        results = [worker.get_finished() for worker in self.workers]
        if not any(results):
            return NO_TRANSFERS
        merged: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})
        for child, maps in enumerate(results):
            for target, source in zip(merged, maps, strict=True):
                target.update((tag(child, key), outcome) for key, outcome in source.items())
        return TransferResults(*merged)

    def get_stats(self) -> Stats:
        children = enumerate(zip(self._children, self.workers, strict=True))
        return sum_stats(stats_under(part_name(i, child), side.get_stats()) for i, (child, side) in children)

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        """Cancel at each child that knows the transfer, which answers; the others count an unknown one."""
        for worker in self.workers:
            worker.cancel(key, direction)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Pass peers on; one with a card that cannot be split is left out here, and logged by the scheduler side."""
        new, gone = (
            [cards for card in known if not isinstance(cards := split_card(card, self._children), str)]
            for known in (added, removed)
        )
        for index, worker in enumerate(self.workers):
            worker.update_peers([cards[index] for cards in new], [cards[index] for cards in gone])

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
