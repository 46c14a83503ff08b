"""From configuration to a running engine: model, connector, executor, core."""

import os
from collections.abc import Callable

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.base import ConnectorConfig, KVConnector, SchedulerConnector, WorkerConnector
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.connectors.registry import load_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.executor import InProcessExecutor, resolve_device
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.messages import EngineCard
from pdkv.model_config import ModelConfig, load_model_config, model_identity
from pdkv.wiring import wire_core

CPU_STEP_TOKENS = 2048
GPU_STEP_TOKENS = 8192


def _nothing(*_: object) -> None:
    """Nobody listens."""


def build_engine(
    config: EngineConfig,
    handoff: HandoffConfig | None = None,
    *,
    name: str,
    epoch: str,
    role: str = "any",
    notify: Callable[[], None] = _nothing,
    on_progress: Callable[[str], None] = _nothing,
) -> EngineCore:
    """Load the model and make an engine of one rank around it, in this process.

    Args:
        handoff: None: an engine without a connector.
        notify: thread-safe; the connector wakes the engine's loop with it.
        on_progress: is told what takes time.

    Raises:
        ConfigError: a wrong value, model directory or connector.
    """
    model_config = load_model_config(config.model)
    identity = model_identity(config.model)
    limits = _limits(config, handoff or HandoffConfig())
    on_progress("loading weights")
    executor = InProcessExecutor(model_config, config, max_num_batched_tokens=limits.max_num_batched_tokens)
    on_progress(f"allocating {executor.num_blocks} KV blocks")
    connector = None if handoff is None else _make_connector(handoff, executor, identity, name, epoch, notify)
    try:
        return _connect(connector, executor, model_config, identity, handoff, limits, name=name, epoch=epoch, role=role)
    except BaseException:
        _shut_down(executor, connector)
        raise


def _limits(config: EngineConfig, handoff: HandoffConfig) -> SchedulerLimits:
    on_cpu = resolve_device(config).type == "cpu"
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or (CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        kv_load_timeout_s=handoff.kv_load_timeout_s,
    )


def _make_connector(
    handoff: HandoffConfig,
    executor: InProcessExecutor,
    identity: str,
    name: str,
    epoch: str,
    notify: Callable[[], None],
) -> KVConnector:
    connector_config = ConnectorConfig(
        engine=name,
        epoch=epoch,
        layout=executor.layout,
        num_blocks=executor.num_blocks,
        options=handoff.connector_config,
        model=identity,
    )
    return load_connector(handoff.connector)(connector_config, notify)


def _connect(
    connector: KVConnector | None,
    executor: InProcessExecutor,
    model_config: ModelConfig,
    identity: str,
    handoff: HandoffConfig | None,
    limits: SchedulerLimits,
    *,
    name: str,
    epoch: str,
    role: str,
) -> EngineCore:
    """Give the executor its pool and the core its card."""
    block_table: BlockTable = LocalBlockTable(executor.num_blocks)
    scheduler_side: SchedulerConnector | None = None
    worker: WorkerConnector | None = None
    if connector is not None:
        block_table = connector.make_block_table()
        scheduler_side = connector.make_scheduler_side()
        worker = connector.make_worker_side(0)
    executor.attach(connector.allocate_kv_cache() if connector is not None else None, worker)
    card = EngineCard(
        engine=name,
        epoch=epoch,
        role=role,
        pid=os.getpid(),
        connector=handoff.connector if handoff is not None else "none",
        kind=connector.kind if connector is not None else "store",
        content_addressed=connector.content_addressed if connector is not None else False,
        orders=connector.orders() if connector is not None else [],
        model=identity,
        layout=executor.layout,
        hash_block_size=HASH_BLOCK_SIZE,
        num_blocks=executor.num_blocks,
        max_model_len=executor.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        rank_blobs=[worker.handshake()] if worker is not None else [],
    )
    return wire_core(
        card=card,
        executor=executor,
        connector=scheduler_side,
        block_table=block_table,
        handoff=handoff or HandoffConfig(),
        limits=limits,
        eos_token_ids=model_config.eos_token_ids,
        vocab_size=model_config.vocab_size,
        shutdown=lambda: _shut_down(executor, connector, scheduler_side),
    )


def _shut_down(
    executor: InProcessExecutor, connector: KVConnector | None, scheduler_side: SchedulerConnector | None = None
) -> None:
    """Worker side, scheduler side, then what both shared."""
    executor.shutdown()
    if scheduler_side is not None:
        scheduler_side.shutdown()
    if connector is not None:
        connector.shutdown()
