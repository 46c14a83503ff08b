"""The `shared_memory` connector: engines on one host read each other's KV pools, verified by block generations.

If KV is on GPUs, pools are mapped by CUDA IPC; the table of generations is in host memory in any case.

kind pull: a hand-off names blocks and their generations, and decode copies them. It is also content-addressed: any full
block that any engine has computed or loaded is found by its key, so that roles are not fixed and generated text is
reused.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.arena.arena import Arena
from pdkv.connectors.arena.block_table import SharedBlockTable
from pdkv.connectors.arena.peers import PeerArenas
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector, WorkerConnector
from pdkv.connectors.plan import CARRIED, INTERFACE, ConnectorPlan
from pdkv.connectors.shared_memory.options import SharedMemoryOptions
from pdkv.connectors.shared_memory.scheduler import SharedMemoryScheduler
from pdkv.connectors.shared_memory.worker import SharedMemoryWorker
from pdkv.connectors.transfer.lanes import DEVICE_THREADS
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.connectors.arena.device_pool import PoolDevice


class SharedMemoryConnector(KVConnector):
    """The `shared_memory` connector. Owns the engine's arena, with its block table and KV pool."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="pull", content_addressed=True, own_pool="needs", layouts=(*CARRIED, "drafter"),
        wire_version=2,  # no events in the card: published blocks can be read
        alike=("CUDA driver",),  # which opens the other's pools
    )  # fmt: skip
    options_type = SharedMemoryOptions
    scheduler_type: ClassVar[type[SharedMemoryScheduler]] = SharedMemoryScheduler
    worker_type: ClassVar[type[SharedMemoryWorker]] = SharedMemoryWorker

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        if config.layout.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(f"block_size must be a multiple of {HASH_BLOCK_SIZE}, got {config.layout.block_size}")
        options: SharedMemoryOptions = cls.options_type.parse(config.plan.options)
        device = make_pool_device(config.device)
        arena = Arena(
            engine=config.engine, epoch=config.epoch, layout=config.layout, num_blocks=config.num_blocks, device=device,
            reserves=config.reserves_pool,
        )  # fmt: skip
        table = SharedBlockTable(arena.table_arrays, arena.shape.table)
        peers = PeerArenas(config)  # of both sides: a peer is mapped once

        def worker() -> WorkerConnector:
            make: Callable[..., SharedMemoryWorker] = cls.worker_type
            if device is not None:
                from pdkv.connectors.shared_memory.device_worker import DeviceSharedMemoryWorker

                make = partial(DeviceSharedMemoryWorker, device=device)
            io_threads = options.io_threads or (1 if device is None else DEVICE_THREADS)
            timeout_s = options.load_timeout_s
            return make(config, arena, notify, io_threads=io_threads, load_timeout_s=timeout_s, peers=peers)

        def shutdown() -> None:
            table.close()
            arena.close()

        return Built(lambda: cls.scheduler_type(config, table, options, peers), worker, table, arena.kv_cache, shutdown)


def make_pool_device(kind: str) -> "PoolDevice | None":
    """The device of that kind used by this thread; None: pools are in host memory."""
    if kind == "cpu":
        return None
    import torch

    from pdkv.connectors.arena.cuda_pool import CudaPoolDevice

    return CudaPoolDevice(torch.device("cuda", torch.cuda.current_device()))
