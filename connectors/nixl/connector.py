"""The `nixl` connector: engines exchange KV by NIXL over UCX, within a host or between hosts, from CPU or GPU memory.

mode=pull: decode reads the blocks that prefill keeps under lease. mode=push: prefill offers KV as it is computed,
and decode reads it into the blocks that it has allocated. Either way small or differently cut pieces are gathered by
their source and read by their receiver (gather.py).
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from pdkv.connectors.arena.memory import Arena
from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    SchedulerConnector,
    Shown,
    WorkerConnector,
)
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import BLOB_VERSION
from pdkv.connectors.peer.pull_scheduler import PullMetadata, PullScheduler
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler
from pdkv.connectors.plan import INTERFACE, PUSH_ORDERS, ConnectorPlan, Requirement

if TYPE_CHECKING:
    import torch


class NixlConnector(KVConnector):
    """Its option `mode` chooses the subclass."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="pull", lends=True, own_pool="offers", layouts=("heads", "windows"),
        wire_version=BLOB_VERSION,
        requirements=(
            Requirement(("nixl_cu12", "nixl_cu13"), "pip install 'pdkv[nixl]' (with CUDA 13: nixl-cu13)"),
        ),
    )  # fmt: skip
    options_type = NixlOptions
    options: NixlOptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        self._arena: Arena | None = None
        if config.device == "cpu" and "arena" in self.options.paths:
            self._arena = Arena(
                engine=config.engine, epoch=config.epoch, layout=config.layout, num_blocks=config.num_blocks
            )
        generations = self._arena.table_arrays.generations if self._arena is not None else None
        self._table = LocalBlockTable(config.num_blocks, generations)
        self._peers = NixlPeers(config, self.options)

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        if cls is not NixlConnector:
            return super().plan(options)
        chosen = NixlPushConnector if NixlOptions.parse(options).mode == "push" else NixlPullConnector
        return msgspec.structs.replace(chosen.declares, build=f"{__name__}:{chosen.__name__}")

    def make_block_table(self) -> BlockTable:
        return self._table

    def allocate_kv_cache(self) -> "torch.Tensor | None":
        """The pool in the arena, which peers on this host map; None: path=cma or ucx, or not in host memory."""
        return None if self._arena is None else self._arena.kv_cache()

    def shutdown(self) -> None:
        if self._arena is not None:
            self._table.close()
            self._arena.close()

    def _make_endpoint(self) -> NixlEndpoint:
        """Raises ConfigError where NIXL is missing."""
        return NixlEndpoint(self.config, self._peers, self.options, self._arena)


class NixlPullScheduler(PullScheduler):
    """As that of every pull; what hand-offs name is read by peers, and has digests."""

    shown = Shown.HANDOFFS


class NixlPullConnector(NixlConnector):
    """Decode reads."""

    metadata_type: ClassVar[type[KVConnectorMetadata]] = PullMetadata

    def make_scheduler_side(self) -> SchedulerConnector:
        return NixlPullScheduler(self.config, self._table, NixlPeers(self.config, self.options))

    def make_worker_side(self, rank: int) -> WorkerConnector:
        from pdkv.connectors.nixl.pull import NixlPullWorker

        return NixlPullWorker(self.config, self.notify, self._make_endpoint(), self.options, self._table)


class NixlPushConnector(NixlConnector):
    """Prefill offers, decode reads."""

    declares = msgspec.structs.replace(NixlConnector.declares, kind="push", orders=(*PUSH_ORDERS, "concurrent"))
    metadata_type: ClassVar[type[KVConnectorMetadata]] = PushMetadata

    def make_scheduler_side(self) -> SchedulerConnector:
        return PushScheduler(self.config, NixlPeers(self.config, self.options))

    def make_worker_side(self, rank: int) -> WorkerConnector:
        from pdkv.connectors.nixl.push import NixlPushWorker

        return NixlPushWorker(self.config, self.notify, self._make_endpoint(), self.options)
