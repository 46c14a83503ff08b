"""vLLM's worker calls, carried out by a content-addressed connector's worker side. Imports nothing of vLLM."""

import logging
import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import TransferKey, TransferResults, WorkerConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.transfer.units import COPY_TIMEOUT_S
from pdkv.errors import ConfigError
from pdkv.kernels.streams import streams_of
from pdkv.vllm.copies import StagingCopies
from pdkv.vllm.staging import BlockPairs, StepOrders
from pdkv.wire.kv import KVLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EndedLoads(NamedTuple):
    """Requests with loads that ended in a step."""

    finished: set[str]
    failed: set[str]  # not in `finished`


class VllmWorker:
    """Copies between vLLM's blocks and the staging pool, and the connector's worker side of one rank.

    Args:
        pool: the connector's own staging pool; None: one is made here.
        table: publishes the pool's content, for a connector with peers that read it.
        wake: set by the connector's notify.
        save_wait_s: how long a step waits until its saves are visible; 0: it does not wait.
    """

    def __init__(
        self,
        worker: WorkerConnector,
        layout: KVLayout,
        *,
        num_staging_blocks: int,
        pool: "torch.Tensor | None",
        table: BlockTable | None,
        wake: threading.Event,
        save_wait_s: float,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.num_late_saves = 0  # steps with saves that were not visible in time
        self._worker = worker
        self._layout = layout
        self._num_staging_blocks = num_staging_blocks
        self._pool = pool
        self._table = table
        self._wake = wake
        self._save_wait_s = save_wait_s
        self._clock = clock
        self._copies: StagingCopies | None = None
        self._loads: dict[TransferKey, BlockPairs] = {}
        self._results: list[TransferResults] = []  # collected while a step waited

    def register(self, kv_caches: "Mapping[str, torch.Tensor]") -> None:
        """vLLM's KV cache by layer, (num_blocks, heads, block_size, 2 * head_size) in any memory order.

        Raises:
            ConfigError: layers, or sizes of blocks, that differ from vLLM's configuration.
        """
        import torch

        layout = self._layout
        caches = list({cache.data_ptr(): cache for cache in kv_caches.values()}.values())
        block_bytes = layout.layer_bytes
        found = {(cache[0].numel() * cache.element_size()) for cache in caches}
        if len(caches) != layout.num_layers or found != {block_bytes}:
            raise ConfigError(
                f"vLLM's KV cache was expected to have {layout.num_layers} layers with blocks of {block_bytes} bytes, "
                f"it has {len(caches)} with {sorted(found)}"
            )
        pool = self._pool
        if pool is None:
            pool = _make_pool(
                layout.pool_shape(self._num_staging_blocks), getattr(torch, layout.dtype), caches[0].device
            )
        self._copies = StagingCopies(caches, pool.view(self._num_staging_blocks, layout.num_layers, -1))
        self._worker.register_kv_caches(pool)

    def finish_step(self, orders: StepOrders) -> None:
        """After the forward pass, copy completed blocks out, and begin the step's transfers.

        Raises:
            TransferTimeout: a GPU does not finish the copy in time.
        """
        if orders.peers is not None:
            self._worker.update_peers(orders.peers.added, orders.peers.removed)
        if self._table is not None:
            for pairs in (orders.copies, *orders.loads.values()):
                for block_id in pairs.staging:
                    self._table.reuse(block_id)
        copies = self._copies
        assert copies is not None, "register must be called first"
        copies.copy_out(orders.copies)
        if self._table is not None:
            copies.last.wait(COPY_TIMEOUT_S)  # a peer reads what is published, and waits for nothing
            for block_id, keys in zip(orders.copies.staging, orders.keys, strict=True):
                self._table.publish(block_id, keys)
        self._loads.update(orders.loads)
        orders.inner.earlier_steps = copies.last
        self._worker.start_load_kv(orders.inner)
        self._worker.wait_for_save()
        if self._save_wait_s and orders.inner.holds:
            self._await({hold.key for hold in orders.inner.holds})

    def _await(self, keys: set[TransferKey]) -> None:
        """Collect results until these sends have ended."""
        deadline = self._clock.now() + self._save_wait_s
        while keys:
            self._wake.clear()
            results = self._worker.get_finished()
            if results:
                self._results.append(results)
                keys -= {*results.finished_sending, *results.failed_sending}
            is_over = self._clock.now() >= deadline
            if keys and (is_over or not (results or self._clock.wait(self._wake, deadline))):
                self.num_late_saves += 1
                logger.warning("saved KV is not visible after %g s; the step goes on", self._save_wait_s)
                return

    def collect(self) -> tuple[TransferResults, EndedLoads]:
        """Results since the last call. The KV of successful loads is in vLLM's blocks for all later work on its
        stream.
        """
        results = merge([*self._results, self._worker.get_finished()])
        self._results = []
        finished: set[str] = set()
        for key in results.finished_receiving:
            pairs = self._loads.pop(key, None)
            if pairs is not None:
                assert self._copies is not None
                self._copies.copy_in(pairs)
                finished.add(key.transfer_id)
        failed = {key.transfer_id for key in results.failed_receiving if self._loads.pop(key, None) is not None}
        return results, EndedLoads(finished, failed)

    def handshake(self) -> bytes:
        """The data that peers need to reach the staging pool."""
        return self._worker.handshake()

    def shutdown(self) -> None:
        """End the connector's side. Idempotent."""
        self._worker.shutdown()


def _make_pool(shape: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """A staging pool of zeros in host memory, pinned for the device."""
    return streams_of(device).make_pinned(prod(shape) * dtype.itemsize).view(dtype).view(shape)


def merge(parts: Sequence[TransferResults]) -> TransferResults:
    """Merge the results of several calls, at least one."""
    kinds = zip(*parts, strict=True)
    return TransferResults(*({key: outcome for part in kind for key, outcome in part.items()} for kind in kinds))
