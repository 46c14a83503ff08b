"""The `nixl` connector: engines exchange KV by NIXL over UCX, within a host or between hosts, from CPU or GPU memory.

mode=pull: decode reads the blocks that prefill keeps under lease. mode=push: prefill offers KV as it is computed, and
decode reads it into the blocks that it has allocated. In both modes, small or differently cut pieces are gathered by
their source and read by their receiver (gather.py).
"""

from collections.abc import Callable, Mapping

import msgspec

from pdkv.connectors.arena.arena import Arena
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector, SchedulerConnector, Shown, WorkerConnector
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import BLOB_VERSION
from pdkv.connectors.peer.pull_scheduler import PullScheduler
from pdkv.connectors.peer.push_scheduler import PushScheduler
from pdkv.connectors.plan import CARRIED, INTERFACE, PUSH_ORDERS, ConnectorPlan, Requirement


class NixlPullScheduler(PullScheduler):
    """The pull scheduler of `nixl`; the KV named by hand-offs is read by peers, and has digests."""

    shown = Shown.HANDOFFS


class NixlConnector(KVConnector):
    """The `nixl` connector; its option `mode` says which side begins: decode reads, or prefill offers."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="pull", lends=True, own_pool="offers", layouts=(*CARRIED, "drafter"),
        wire_version=BLOB_VERSION, alike=("NIXL",),
        requirements=(
            Requirement(("nixl_cu12", "nixl_cu13"), "pip install 'pdkv[nixl]' (with CUDA 13: nixl-cu13)"),
        ),
    )  # fmt: skip
    options_type = NixlOptions

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        if NixlOptions.parse(options).mode == "pull":
            return cls.declares
        orders = (*PUSH_ORDERS, "concurrent")
        return msgspec.structs.replace(cls.declares, kind="push", orders=orders, layouts=CARRIED)

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        options = NixlOptions.parse(config.plan.options)
        arena: Arena | None = None
        if config.device == "cpu" and "arena" in options.paths:
            arena = Arena(
                engine=config.engine, epoch=config.epoch, layout=config.layout, num_blocks=config.num_blocks,
                reserves=config.reserves_pool,
            )  # fmt: skip
        table = LocalBlockTable(config.num_blocks, None if arena is None else arena.table_arrays.generations)
        peers = NixlPeers(config, options)

        def scheduler() -> SchedulerConnector:
            own = NixlPeers(config, options)
            return NixlPullScheduler(config, table, own) if options.mode == "pull" else PushScheduler(config, own)

        def worker() -> WorkerConnector:
            from pdkv.connectors.nixl.pull import NixlPullWorker
            from pdkv.connectors.nixl.push import NixlPushWorker

            endpoint = NixlEndpoint(config, peers, options, arena)
            if options.mode == "pull":
                return NixlPullWorker(config, notify, endpoint, options, table)
            return NixlPushWorker(config, notify, endpoint, options)

        if arena is None:  # path=ucx, or a pool that is not in host memory
            return Built(scheduler, worker, table)

        def shutdown() -> None:
            table.close()
            arena.close()

        return Built(scheduler, worker, table, arena.kv_cache, shutdown)
