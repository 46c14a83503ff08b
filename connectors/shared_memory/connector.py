"""The `shared_memory` connector: engines on one host read each other's KV pools, verified by block generations.

Where KV is on GPUs, pools are mapped by CUDA IPC; the table of generations is in host memory all the same.

kind pull: a hand-off names blocks and their generations, and decode copies them. Content-addressed, too: whatever full
block any engine has computed or loaded is found by its key, so that roles are not fixed and generated text is reused.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.arena.block_table import SharedBlockTable
from pdkv.connectors.arena.memory import Arena
from pdkv.connectors.arena.peers import PeerArenas
from pdkv.connectors.base import ConnectorConfig, KVConnector, KVConnectorMetadata, SchedulerConnector, WorkerConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.peer.pull_scheduler import PullMetadata
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.shared_memory.options import SharedMemoryOptions
from pdkv.connectors.shared_memory.scheduler import SharedMemoryScheduler
from pdkv.connectors.shared_memory.worker import SharedMemoryWorker
from pdkv.connectors.transfer.lanes import DEVICE_THREADS
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pdkv.connectors.arena.device_pool import PoolDevice


class SharedMemoryConnector(KVConnector):
    """Owns the engine's arena; its block table and KV pool lie there."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="pull", content_addressed=True, own_pool="needs", layouts=("heads", "windows"),
        wire_version=2,  # no events in the card: what is published is there
    )  # fmt: skip
    metadata_type: ClassVar[type[KVConnectorMetadata]] = PullMetadata
    options_type = SharedMemoryOptions
    options: SharedMemoryOptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        if config.layout.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(f"block_size must be a multiple of {HASH_BLOCK_SIZE}, got {config.layout.block_size}")
        self._device = make_pool_device(config.device)
        self._arena = Arena(
            engine=config.engine, epoch=config.epoch, layout=config.layout, num_blocks=config.num_blocks,
            device=self._device,
        )  # fmt: skip
        self._table = SharedBlockTable(self._arena.table_arrays, self._arena.shape.table)
        self._peers = PeerArenas(config)  # of both sides: a peer is mapped once

    def make_block_table(self) -> BlockTable:
        return self._table

    def allocate_kv_cache(self) -> "torch.Tensor":
        """The pool in the arena, or on the device, as peers map it."""
        return self._arena.kv_cache()

    def make_scheduler_side(self) -> SchedulerConnector:
        return SharedMemoryScheduler(self.config, self._table, self.options, self._peers)

    def make_worker_side(self, rank: int) -> WorkerConnector:
        """This process' rank's side; `rank` is the one that the connector was built for."""
        assert rank == self.config.rank, "a connector is built for one rank"
        make: Callable[..., SharedMemoryWorker] = SharedMemoryWorker
        if self._device is not None:
            from pdkv.connectors.shared_memory.device_worker import DeviceSharedMemoryWorker

            make = partial(DeviceSharedMemoryWorker, device=self._device)
        return make(
            self.config,
            self._arena,
            self.notify,
            io_threads=self.options.io_threads or (1 if self._device is None else DEVICE_THREADS),
            load_timeout_s=self.options.load_timeout_s,
            peers=self._peers,
        )

    def shutdown(self) -> None:
        self._table.close()
        self._arena.close()


def make_pool_device(kind: str) -> "PoolDevice | None":
    """The device of that kind that this thread computes on; None: pools are in host memory."""
    if kind == "cpu":
        return None
    import torch

    from pdkv.connectors.arena.cuda_pool import CudaPoolDevice

    return CudaPoolDevice(torch.device("cuda", torch.cuda.current_device()))
