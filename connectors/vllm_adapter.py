"""A vLLM KV connector that runs a content-addressed pdkv connector inside vLLM (docs/vllm.md).

vLLM loads `PdkvConnector` by kv_connector_module_path. kv_connector_extra_config: connector (a registry name), config
(its options), staging_tokens (KV that may be under way), save_wait_s (of a producer: a step ends when what it saved
can be found, at the latest after so many seconds).
"""

import platform
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import NO_TRANSFERS, ConnectorConfig, KVConnector, TransferResults
from pdkv.connectors.registry import load_connector
from pdkv.connectors.store_base import StoreConnector
from pdkv.connectors.vllm_scheduler import Identity, ScheduledRequest, VllmScheduler
from pdkv.connectors.vllm_staging import StepOrders
from pdkv.connectors.vllm_worker import VllmWorker
from pdkv.errors import ConfigError
from pdkv.messages import KVLayout
from pdkv.model_config import model_identity

_KNOWN = {"connector", "config", "staging_tokens", "save_wait_s"}
_STAGED_STEPS = 4
"""Steps of most tokens whose KV may be under way by default."""


@dataclass
class PdkvMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders."""

    orders: StepOrders


@dataclass
class PdkvResults(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker's transfers came to."""

    results: TransferResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Engines of one rank only: there is nothing to aggregate."""
        raise NotImplementedError("the adapter serves engines of one rank")


class PdkvConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the adapter: the scheduler's or the worker's, as `role` says."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for options, models or engines that cannot be served."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = dict(transfer.kv_connector_extra_config)
        unknown = extra.keys() - _KNOWN
        if unknown or "connector" not in extra:
            raise ConfigError(
                f"kv_connector_extra_config needs connector, and knows {', '.join(sorted(_KNOWN))}; got {sorted(extra)}"
            )
        layout = read_layout(vllm_config, kv_cache_config)
        connector_type, options = choose_connector(str(extra["connector"]), extra.get("config") or {}, layout)
        num_staging_blocks = _staging_blocks(extra, vllm_config, layout)
        self._wake = threading.Event()
        self._connector = connector_type(
            ConnectorConfig(
                engine=f"vllm-{transfer.engine_id}",
                epoch=str(transfer.engine_id),
                layout=layout,
                num_blocks=num_staging_blocks,
                options=options,
                model=_model(vllm_config),
            ),
            self._wake.set,
        )
        self._scheduler: VllmScheduler | None = None
        self._worker: VllmWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = VllmScheduler(
                self._connector.make_scheduler_side(),
                Identity(
                    _model(vllm_config), _layout_identity(vllm_config, kv_cache_config, layout), layout.block_size
                ),
                num_staging_blocks=num_staging_blocks,
                unit_tokens=lcm(layout.block_size, int(options.get("tokens_per_value", layout.block_size))),
                saves=transfer.is_kv_producer,
            )
        else:
            only_produces = transfer.is_kv_producer and not transfer.is_kv_consumer
            self._worker = VllmWorker(
                self._connector.make_worker_side(0),
                layout,
                num_staging_blocks=num_staging_blocks,
                wake=self._wake,
                save_wait_s=float(extra.get("save_wait_s", 5.0)) if only_produces else 0.0,
            )
        self._results = NO_TRANSFERS

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss: a preempted request may finish."""
        return False

    # --- scheduler side -------------------------------------------------------------------------------------------

    @property
    def _of_scheduler(self) -> VllmScheduler:
        assert self._scheduler is not None, "a call for the scheduler's side"
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._of_scheduler.add(request)
        found = self._of_scheduler.match(request.request_id, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._of_scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PdkvMetadata:
        return PdkvMetadata(self._of_scheduler.step(_scheduled(scheduler_output), scheduler_output.finished_req_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: what is saved of them has been copied."""
        return False, None

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, PdkvResults):
            self._of_scheduler.update(meta.results)

    # --- worker side ----------------------------------------------------------------------------------------------

    @property
    def _of_worker(self) -> VllmWorker:
        assert self._worker is not None, "a call for the worker's side"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._of_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous: they begin behind the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is waited for in a forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are copied behind the forward pass."""

    def wait_for_save(self) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PdkvMetadata)
        self._of_worker.finish_step(meta.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """A failed load is a finished one, too: vLLM then computes it or fails it."""
        self._results, ended = self._of_worker.collect()
        return KVConnectorTransferResults(
            finished_recving=ended.finished | ended.failed, failed_recving=set(ended.failed)
        )

    def build_connector_worker_meta(self) -> PdkvResults | None:
        results, self._results = self._results, NO_TRANSFERS
        return PdkvResults(results) if results else None

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler, self._connector):
            if side is not None:
                side.shutdown()


# --- what vLLM's configuration means ------------------------------------------------------------------------------


def read_layout(vllm_config: Any, kv_cache_config: Any) -> KVLayout:
    """The layout of a block image.

    Raises:
        ConfigError: several ranks or KV groups, another attention than full, or blocks that are no 16-token units.
    """
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size != 1:
        raise ConfigError("pdkv inside vLLM serves engines of one rank")
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(f"pdkv inside vLLM serves models with full attention in all layers, not {kinds}")
    spec = groups[0].kv_cache_spec
    layout = KVLayout(
        num_layers=len(groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        dtype_bytes=spec.dtype.itemsize,
    )
    if layout.block_bytes != spec.page_size_bytes * layout.num_layers or layout.block_size % HASH_BLOCK_SIZE:
        raise ConfigError(f"pdkv inside vLLM serves plain KV blocks of a multiple of {HASH_BLOCK_SIZE} tokens")
    return layout


def choose_connector(
    name: str, config: Mapping[str, Any], layout: KVLayout
) -> tuple[type[KVConnector], dict[str, str]]:
    """The connector's class and its options.

    Raises:
        ConfigError: no such connector, or one that is no store.
    """
    options = {key: str(value) for key, value in config.items()}
    connector = load_connector(name).for_options(options)
    if not (connector.content_addressed and connector.kind == "store"):
        raise ConfigError(f"inside vLLM a content-addressed store is needed, connector {name!r} is none")
    if options.get("load", "async") != "async":
        raise ConfigError("inside vLLM loads are asynchronous: load=async")
    if issubclass(connector, StoreConnector):
        options.setdefault("tokens_per_value", str(layout.block_size))
    return connector, options


def _staging_blocks(extra: Mapping[str, Any], vllm_config: Any, layout: KVLayout) -> int:
    """Blocks of the staging pool, block 0 among them, which nobody uses."""
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    default = _STAGED_STEPS * max(step_tokens, vllm_config.model_config.max_model_len)
    return -(-int(extra.get("staging_tokens", default)) // layout.block_size) + 1


def _model(vllm_config: Any) -> str:
    """The identity of the weights: of their files where they lie here, else their name and revision."""
    config = vllm_config.model_config
    path = Path(config.model)
    return model_identity(path) if path.is_dir() else f"{config.model}@{config.revision}"


def _layout_identity(vllm_config: Any, kv_cache_config: Any, layout: KVLayout) -> str:
    """All that the bytes of a block depend on, but for the tokens: only like engines find each other's blocks."""
    facts = {
        "vllm": vllm.__version__,
        "device": vllm_config.device_config.device_type,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "backend": vllm_config.attention_config.backend,
        "memory": kv_cache_config.kv_cache_layout,
        "cache": vllm_config.cache_config.cache_dtype,
        "block": layout.block_size,
    }
    return ",".join([layout.identity, *(f"{name}={value}" for name, value in facts.items())])


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
