"""A vLLM KV connector that runs a content-addressed pdkv connector inside vLLM (docs/vllm.md).

vLLM loads `PdkvConnector` by kv_connector_module_path. kv_connector_extra_config: connector (a registry name), config
(its options), staging_tokens (KV that may be in transit, or visible to peers), peers_dir (shared_memory: where engines
find one another), save_wait_s (of a producer: a step ends when its saved KV can be found, at the latest after this many
seconds).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from pdkv.connectors.base import NO_TRANSFERS, TransferResults
from pdkv.vllm.engine import VllmEngine, layout_identity
from pdkv.vllm.scheduler import Identity, ScheduledRequest, VllmScheduler
from pdkv.vllm.staging import StepOrders
from pdkv.vllm.worker import VllmWorker


@dataclass
class PdkvMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders."""

    orders: StepOrders


@dataclass
class PdkvResults(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The results of the worker's transfers."""

    results: TransferResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Never called: with tensor_parallel_size=1 there is nothing to aggregate."""
        raise NotImplementedError("the adapter supports only tensor_parallel_size=1")


class PdkvConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the adapter: the scheduler's or the worker's, depending on `role`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for unsupported options, models or engines."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        engine = self._engine = VllmEngine(vllm_config, kv_cache_config)
        layout = engine.layout
        self._scheduler: VllmScheduler | None = None
        self._worker: VllmWorker | None = None
        self._results = NO_TRANSFERS
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = VllmScheduler(
                engine.built.scheduler(),
                Identity(engine.model, layout_identity(vllm_config, kv_cache_config, layout), layout.block_size),
                num_staging_blocks=engine.num_staging_blocks,
                unit_tokens=engine.plan.hit_spacing(layout.block_size) or layout.block_size,
                saves=transfer.is_kv_producer,
            )
        else:
            only_produces = transfer.is_kv_producer and not transfer.is_kv_consumer
            self._worker = VllmWorker(
                engine.built.worker(),
                layout,
                num_staging_blocks=engine.num_staging_blocks,
                pool=engine.built.kv_cache(),
                table=engine.built.block_table,
                wake=engine.wake,
                save_wait_s=float(engine.extra.get("save_wait_s", 5.0)) if only_produces else 0.0,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether saves must be delivered: no, a dropped save is a miss, so a preempted request may finish."""
        return False

    # --- scheduler side -------------------------------------------------------------------------------------------

    @property
    def _of_scheduler(self) -> VllmScheduler:
        assert self._scheduler is not None, "a call for the scheduler's side"
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._engine.poll_peers(self._of_scheduler.update_peers)
        self._of_scheduler.add(request)
        found = self._of_scheduler.match(request.request_id, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._of_scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PdkvMetadata:
        self._engine.poll_peers(self._of_scheduler.update_peers)
        orders = self._of_scheduler.step(
            _scheduled(scheduler_output), scheduler_output.finished_req_ids, self._engine.take_peer_change()
        )
        return PdkvMetadata(orders)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The decision for a finished request: blocks are free at once, since everything to be saved has been
        copied.
        """
        return False, None

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, PdkvResults):
            self._of_scheduler.update(meta.results)

    def reset_cache(self) -> bool:
        """vLLM's reset of the prefix cache, as after an update of the weights, with reset_connector=True."""
        return self._of_scheduler.reset()

    # --- worker side ----------------------------------------------------------------------------------------------

    @property
    def _of_worker(self) -> VllmWorker:
        assert self._worker is not None, "a call for the worker's side"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._of_worker.register(kv_caches)
        if self._engine.peers is not None:
            self._engine.peers.publish(self._engine.card(self._of_worker.handshake()))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous: they begin after the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is waited for in a forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are copied after the forward pass."""

    def wait_for_save(self) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PdkvMetadata)
        self._of_worker.finish_step(meta.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The results of transfers. A failed load counts as finished: vLLM then computes it or fails it."""
        self._results, ended = self._of_worker.collect()
        return KVConnectorTransferResults(
            finished_recving=ended.finished | ended.failed, failed_recving=set(ended.failed)
        )

    def build_connector_worker_meta(self) -> PdkvResults | None:
        results, self._results = self._results, NO_TRANSFERS
        return PdkvResults(results) if results else None

    def shutdown(self) -> None:
        side = self._worker or self._scheduler
        if side is not None:
            self._worker = self._scheduler = None
            side.shutdown()
            self._engine.shutdown()


def _scheduled(output: Any) -> Iterator[ScheduledRequest]:
    """vLLM's step, request by request."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        start = new.num_computed_tokens
        yield ScheduledRequest(new.req_id, start, start + counts[new.req_id], new.block_ids[0], True)
    cached = output.scheduled_cached_reqs
    for request_id, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        own = blocks[0] if blocks is not None else []
        resumed = request_id in cached.resumed_req_ids
        yield ScheduledRequest(request_id, start, start + counts[request_id], own, resumed)
