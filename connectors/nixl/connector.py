"""The `nixl` connector: engines exchange KV by NIXL over UCX, within a host or between hosts, from CPU or GPU memory.

mode=pull: decode reads the blocks that prefill keeps under lease. mode=push: prefill writes into the blocks that
decode has allocated. Either way small or differently cut pieces are gathered by their source and read by their
receiver (gather.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    Requirement,
    SchedulerConnector,
    WorkerConnector,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.memory import GenerationTable
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.peer.pull_scheduler import PullMetadata, PullScheduler
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler
from pdkv.wire.messages import ConnectorKind


class NixlConnector(KVConnector):
    """Its option `mode` chooses the subclass, by `for_options`."""

    kind: ClassVar[ConnectorKind] = "pull"
    options_type = NixlOptions
    options: NixlOptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        self._table = GenerationTable(config.num_blocks)
        self._peers = NixlPeers(config, self.options.mode)

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> "type[NixlConnector]":
        if cls is not NixlConnector:
            return cls
        return NixlPushConnector if NixlOptions.parse(options).mode == "push" else NixlPullConnector

    @classmethod
    def requirements(cls, options: Mapping[str, str]) -> Sequence[Requirement]:
        return [Requirement(("nixl_cu12", "nixl_cu13"), "pip install 'pdkv[nixl]' (with CUDA 13: nixl-cu13)")]

    def make_block_table(self) -> BlockTable:
        return self._table

    def _make_endpoint(self) -> NixlEndpoint:
        """Raises ConfigError where NIXL is missing."""
        return NixlEndpoint(self.config, self._peers, self.options)


class NixlPullConnector(NixlConnector):
    """Decode reads."""

    kv_groups: ClassVar[bool] = True
    metadata_type: ClassVar[type[KVConnectorMetadata]] = PullMetadata

    def make_scheduler_side(self) -> SchedulerConnector:
        return PullScheduler(self.config, self._table, NixlPeers(self.config, self.options.mode))

    def make_worker_side(self, rank: int) -> WorkerConnector:
        from pdkv.connectors.nixl.pull import NixlPullWorker

        return NixlPullWorker(self.config, self.notify, self._make_endpoint(), self.options, self._table)


class NixlPushConnector(NixlConnector):
    """Prefill writes."""

    kind: ClassVar[ConnectorKind] = "push"
    kv_groups: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True
    metadata_type: ClassVar[type[KVConnectorMetadata]] = PushMetadata

    def make_scheduler_side(self) -> SchedulerConnector:
        return PushScheduler(self.config, NixlPeers(self.config, self.options.mode))

    def make_worker_side(self, rank: int) -> WorkerConnector:
        from pdkv.connectors.nixl.push import NixlPushWorker

        return NixlPushWorker(self.config, self.notify, self._make_endpoint(), self.options)
