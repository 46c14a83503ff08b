"""Builds a running engine from its configuration: model, connector, executor, core; or one more rank of an engine."""

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from pdkv.assemble.core import build_core
from pdkv.assemble.platform import describe_platform
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.version import VERSION
from pdkv.config import EngineConfig, HandoffConfig, is_paced, paced_part
from pdkv.connectors.base import Built, ConnectorConfig, KVConnectorMetadata, SchedulerConnector
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.connectors.plan import NO_PLAN, ConnectorPlan
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.drafting import Drafting
from pdkv.engine.proposers.base import Proposer
from pdkv.engine.proposers.registry import make_proposer
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.dtype import resolve_quantization
from pdkv.engine.worker.executor import Executor, InProcessExecutor, ModelExecutor, resolve_device
from pdkv.engine.worker.masks import GrammarMasks, Masks
from pdkv.engine.worker.ranks.executor import MultiProcessExecutor, OtherRanks
from pdkv.engine.worker.ranks.follower import FirstRank
from pdkv.engine.worker.ranks.masks import RankMasks, pack
from pdkv.engine.worker.ranks.messages import encode
from pdkv.errors import ConfigError, ModelError
from pdkv.grammar.matching.host import GrammarHost
from pdkv.host.memory_limits import check_host_memory, share_for_pools
from pdkv.kernels.compiled import load_all
from pdkv.models.config import ModelConfig, load_model_config
from pdkv.models.identity import ModelSource
from pdkv.models.parallel import ALONE, DeviceRanks, TensorParallel, join_ranks
from pdkv.models.parallel_symmetric import over_symmetric_memory
from pdkv.models.shard import Shard
from pdkv.models.weight_files import loaded_bytes
from pdkv.sampling.logits_processors import ModelInfo, ProcessorSet
from pdkv.sampling.params import DRAWS
from pdkv.wire.kv import EngineCard, KVLayout

CPU_STEP_TOKENS = 2048
GPU_STEP_TOKENS = 8192

_Executor = TypeVar("_Executor", bound=ModelExecutor)


class RankPlace(NamedTuple):
    """Where one rank of an engine finds the others."""

    rank: int
    sockets: Sequence[socket.socket]  # rank 0: one to each other rank, in order; other ranks: one to rank 0
    peers: Sequence[socket.socket]  # one to each other rank, in order, for data exchanged in a forward pass
    store: Path  # a file made by the ranks, in a private directory
    start_timeout_s: float  # limit of each wait before the engine is ready
    wake_fd: int = -1  # rank 0: a byte written here wakes the engine's loop


def _nothing(*_: object) -> None:
    """The default notification, which does nothing."""


class _Plan(NamedTuple):
    """The input of all parts of an engine, the same on each of its ranks."""

    config: EngineConfig
    handoff: HandoffConfig
    connector: ConnectorPlan | None
    name: str
    epoch: str
    kv_shards: int
    model: ModelConfig
    limits: SchedulerLimits
    proposer: Proposer | None
    processors: ProcessorSet
    hands_off: bool = False  # what its role is for

    @classmethod
    def read(
        cls,
        config: EngineConfig,
        handoff: HandoffConfig | None,
        connector: ConnectorPlan | None,
        name: str,
        epoch: str,
        kv_shards: int,
        proposer: Proposer | None,
    ) -> "_Plan":
        """Read the configuration. Raises ConfigError for a missing, broken or unsupported model directory, or an
        unknown processor.
        """
        if config.sizes_itself and config.max_kv_cache_memory is None:  # no launch has shared the host's memory out
            config = replace(
                config, max_kv_cache_memory=share_for_pools(1, loaded_bytes(config.model, config.quantization))
            )
        model = resolve_quantization(
            config,
            load_model_config(config.model, config.max_model_len, config.ignore_config_fields),
            resolve_device(config),
        )
        if handoff is not None and connector is None:
            connector = plan_connector(handoff.connector, handoff.connector_config)
        handoff = handoff or HandoffConfig()
        proposer = proposer or make_proposer(config.speculative_config)
        limits = _limits(config, handoff, proposer)
        info = ModelInfo(model.vocab_size, tuple(model.eos_token_ids), config.model)
        processors = ProcessorSet.load(config.logits_processors, info)
        return cls(config, handoff, connector, name, epoch, kv_shards, model, limits, proposer, processors)

    @property
    def hit_tokens(self) -> int:
        """The multiples of tokens at which KV stored by other engines ends; 0: the engine finds nothing by content."""
        return 0 if self.connector is None else self.connector.hit_spacing(self.config.block_size)

    def layout_of(self, executor: ModelExecutor) -> KVLayout:
        """The executor's layout. KV that may have gone through a lossy codec has other keys than exact KV, wherever it
        is.
        """
        codec = "" if self.connector is None else self.connector.codec
        return msgspec.structs.replace(executor.layout, codec=codec)

    def make_drafting(self) -> Drafting | None:
        """What decides how many guesses are verified; None: nothing is guessed."""
        if self.proposer is None:
            return None
        on_device = resolve_device(self.config).type != "cpu"  # where a step with guesses waits for its tokens
        adapts = self.proposer.options.adaptive
        return Drafting(self.proposer.num_tokens, adapts=adapts, is_costly=on_device or self.proposer.is_costly)

    def open_model(self) -> ModelSource:
        """The weights; their identity is computed while they are loaded. Raises ModelError."""
        kind: type[ModelSource] = paced_part("paced:PacedSource") if is_paced(self.config.model) else ModelSource
        return kind(self.config.model, self.model)

    def make_grammars(self, notify: Callable[[], None]) -> GrammarHost:
        """The object that matches the grammars of requests; starts nothing."""
        config, model, limits = self.config, self.model, self.limits
        return GrammarHost(
            config.model,
            model.vocab_size,
            model.eos_token_ids,
            notify,
            time_s=config.grammar_time_s,
            memory_bytes=config.grammar_memory,
            num_processes=config.grammar_processes,
            num_requests=limits.max_num_seqs,
            num_drafts=limits.num_draft_tokens,
        )


def build_engine(
    config: EngineConfig,
    handoff: HandoffConfig | None = None,
    connector: ConnectorPlan | None = None,
    *,
    name: str,
    epoch: str,
    role: str = "any",
    kv_shards: int = 1,
    place: RankPlace | None = None,
    notify: Callable[[], None] = _nothing,
    on_progress: Callable[[str], None] = _nothing,
    on_identity: Callable[[str], None] = _nothing,
    proposer: Proposer | None = None,
) -> EngineCore:
    """Load the model and make an engine around it, in this process; with config.tp > 1, its rank 0.

    Args:
        handoff: None: an engine without a connector.
        connector: the connector's plan; None: that of the connector named by `handoff`.
        kv_shards: number of parts that stored KV heads are cut into, the same in all engines.
        place: how to reach the other ranks, for config.tp > 1.
        notify: thread-safe; the connector and the grammar matcher call it to wake the engine's loop.
        on_progress: called with descriptions of slow steps.
        on_identity: called with the model's identity once, as soon as it is known: before the load, or after it.
        proposer: guesses tokens of requests that decode, instead of that of config.speculative_config; the same on
            every rank.

    Raises:
        ConfigError: a wrong value, model directory or connector.
        RankError: another rank failed.
    """
    plan = _Plan.read(config, handoff, connector, name, epoch, kv_shards, proposer)._replace(hands_off=role != "any")
    if config.tp > 1 and place is None:
        raise ConfigError(f"tp={config.tp} needs one process per rank: use `pd launch`, which starts them")
    grammars = plan.make_grammars(notify)
    with plan.open_model() as source:
        on_progress("loading weights")
        executor, identity = _load(source, on_identity, lambda: _make_executor(plan, source, place, grammars))
    on_progress(f"allocating {executor.num_blocks} KV blocks")
    built: Built | None = None
    try:
        _check_pool_memory(plan.config, executor)
        table = LocalBlockTable(executor.num_blocks)
        built = _build_connector(plan, identity, executor, notify, block_table=table)
        return _connect(plan, identity, role, built, table, executor, grammars)
    except BaseException:
        _shut_down(executor, built)
        raise


def run_rank(
    config: EngineConfig,
    handoff: HandoffConfig | None = None,
    connector: ConnectorPlan | None = None,
    *,
    name: str,
    epoch: str,
    kv_shards: int = 1,
    place: RankPlace,
    on_progress: Callable[[str], None] = _nothing,
    on_identity: Callable[[str], None] = _nothing,
    on_ready: Callable[[], None] = _nothing,
    proposer: Proposer | None = None,
) -> None:
    """Run one of the other ranks of an engine, the rank 0 of which `build_engine` makes in another process; returns
    when rank 0 stops.

    Args:
        on_identity: called with the model's identity once; every rank computes it, over all of the weights.
        on_ready: called when this rank can run steps.

    Raises:
        ConfigError: a wrong value, model directory or connector.
        RankError: another rank failed.
    """
    rank = place.rank
    first = FirstRank(place.sockets[0], rank, timeout_s=config.rank_timeout_s, start_timeout_s=place.start_timeout_s)
    executor: InProcessExecutor | None = None
    built: Built | None = None
    try:
        plan = _Plan.read(config, handoff, connector, name, epoch, kv_shards, proposer)
        with plan.open_model() as source:
            masks = RankMasks(first.hear_masks)
            executor, identity = _load(source, on_identity, lambda: _load_rank(plan, source, place, masks))
        executor.num_blocks = first.wait_to_attach(executor.num_blocks, identity)
        on_progress(f"allocating {executor.num_blocks} KV blocks")
        _check_pool_memory(plan.config, executor)
        built = _build_connector(plan, identity, executor, first.notify, rank=rank)
        worker = None if built is None else built.worker()
        (info,) = executor.attach(None if built is None else built.kv_cache(), worker)
        first.attached(info)
        on_ready()
        first.follow(executor, KVConnectorMetadata if worker is None else worker.metadata_type)
    except Exception as error:
        first.give_up(error)
        raise
    finally:
        if executor is not None:
            _shut_down(executor, built)
        first.close()


def _check_pool_memory(config: EngineConfig, executor: ModelExecutor) -> None:
    """Refuse this rank's pool if it was asked for and does not fit into the host's memory. Raises ConfigError."""
    if config.in_host_memory and not config.sizes_itself:
        size_bytes = executor.num_blocks * executor.layout.block_bytes
        check_host_memory(size_bytes, f"{executor.num_blocks} KV blocks (--kv-cache-memory)")


def _limits(config: EngineConfig, handoff: HandoffConfig, proposer: Proposer | None) -> SchedulerLimits:
    on_cpu = resolve_device(config).type == "cpu"
    most = config.max_num_batched_tokens or max(CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS, config.max_num_seqs)
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=most,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        kv_load_timeout_s=handoff.kv_load_timeout_s,
        num_draft_tokens=0 if proposer is None else proposer.num_tokens,
        decodes_with_loads=on_cpu,
    )


def _load(
    source: ModelSource, on_identity: Callable[[str], None], make: Callable[[], _Executor]
) -> tuple[_Executor, str]:
    """Make an executor while the identity of the loaded weights is computed, and report it. Compiled kernels come
    first.

    Raises:
        ModelError: a file changed in the meantime, or another rank has loaded another model.
    """
    load_all()
    known = source.known()
    if known is not None:
        on_identity(known)
    executor = make()
    try:
        identity = source.identity()
        if known is None:
            on_identity(identity)
        for rank, other in enumerate(executor.models_of_other_ranks, 1):
            if other != identity:
                raise ModelError(
                    f"rank 0 has loaded model {identity}, but rank {rank} has loaded {other}: the files changed in "
                    "the meantime"
                )
    except BaseException:
        executor.shutdown()
        raise
    return executor, identity


def _make_executor(plan: _Plan, source: ModelSource, place: RankPlace | None, grammars: GrammarHost) -> ModelExecutor:
    """The engine's only rank, or its first one with the others."""
    eos, timeout_s = plan.model.eos_token_ids, plan.config.rank_timeout_s
    if place is None or plan.config.tp == 1:
        return _load_rank(plan, source, None, GrammarMasks(grammars, eos))
    others = OtherRanks(place.sockets, wake_fd=place.wake_fd, start_timeout_s=place.start_timeout_s)
    try:
        with others.explained():
            masks = GrammarMasks(grammars, eos, lambda step: others.tell(encode(pack(step)), timeout_s))
            local = _load_rank(plan, source, place, masks)
            return MultiProcessExecutor(local, others, timeout_s=timeout_s)
    except BaseException:
        others.close()
        raise


def _join(config: EngineConfig, place: RankPlace) -> TensorParallel:
    shard = Shard(place.rank, config.tp)
    device = resolve_device(config, shard)
    ranks = join_ranks(shard, device, place.peers, place.store, place.start_timeout_s)
    if not isinstance(ranks, DeviceRanks):
        return ranks
    assert place.store is not None, "ranks on CUDA need a rendezvous file"
    symmetric = place.store.with_name(f"{place.store.name}.symmetric")
    return over_symmetric_memory(ranks, device, symmetric, place.start_timeout_s)


def _load_rank(plan: _Plan, source: ModelSource, place: RankPlace | None, masks: Masks) -> InProcessExecutor:
    """`place`: None for the engine's only rank."""
    kind: type[InProcessExecutor] = InProcessExecutor
    if is_paced(plan.config.model):
        kind = paced_part("paced_engine:PacedExecutor")
    return kind(
        plan.model,
        plan.config,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        parallel=ALONE if place is None else _join(plan.config, place),
        weights=source.files,
        grouped=plan.connector is None or "windows" in plan.connector.layouts,
        carries_drafter=plan.hands_off and plan.connector is not None and "drafter" in plan.connector.layouts,
        hit_tokens=plan.hit_tokens,
        proposer=plan.proposer,
        processors=plan.processors,
        masks=masks,
        start_timeout_s=None if place is None else place.start_timeout_s,
    )


def _build_connector(
    plan: _Plan,
    identity: str,
    executor: ModelExecutor,
    notify: Callable[[], None],
    *,
    rank: int = 0,
    block_table: BlockTable | None = None,
) -> Built | None:
    """One rank's connector; None for an engine without."""
    if plan.connector is None:
        return None
    connector_config = ConnectorConfig(
        engine=plan.name,
        epoch=plan.epoch,
        layout=plan.layout_of(executor),
        num_blocks=executor.num_blocks,
        plan=plan.connector,
        model=identity,
        rank=rank,
        tp=plan.config.tp,
        kv_shards=plan.kv_shards,
        kv_checksum=plan.handoff.kv_checksum,
        device=resolve_device(plan.config).type,
        block_table=block_table,
        reserves_pool=not plan.config.sizes_itself,
    )
    return build_connector(connector_config, notify)


def _connect(
    plan: _Plan,
    identity: str,
    role: str,
    built: Built | None,
    block_table: BlockTable,
    executor: ModelExecutor,
    grammars: GrammarHost,
) -> EngineCore:
    """Give the pool to the executor and the card to the core."""
    scheduler_side = None if built is None else built.scheduler()
    worker = None if built is None else built.worker()
    known = plan.connector or NO_PLAN
    ranks = executor.attach(None if built is None else built.kv_cache(), worker)
    card = EngineCard(
        engine=plan.name,
        epoch=plan.epoch,
        role=role,
        pid=os.getpid(),
        **known.on_card(),
        model=identity,
        layout=plan.layout_of(executor),
        hash_block_size=HASH_BLOCK_SIZE,
        num_blocks=executor.num_blocks,
        max_model_len=executor.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        tp=plan.config.tp,
        rank_blobs=[rank.blob for rank in ranks] if worker is not None else [],
        rank_pids=[rank.pid for rank in ranks],
        version=VERSION,
        wire_versions=known.wire_versions if plan.connector is not None else {},
        platform=describe_platform(resolve_device(plan.config)),
        alike=sorted({name for part in (known, *known.parts) for name in part.alike}),
        kv_checksum=plan.handoff.kv_checksum if plan.connector is not None else "off",
        draws=DRAWS,
    )
    model = plan.model

    def shutdown() -> None:
        grammars.close()
        _shut_down(executor, built, scheduler_side)

    core = build_core(
        card=card,
        executor=executor,
        connector=scheduler_side,
        block_table=block_table if built is None or built.block_table is None else built.block_table,
        handoff=plan.handoff,
        limits=plan.limits,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        hit_tokens=plan.hit_tokens,
        grammars=grammars,
        processors=plan.processors,
        drafting=plan.make_drafting(),
        preemption=plan.config.preemption,
        prefix_caching=plan.config.enable_prefix_caching,
        shutdown=shutdown,
    )
    weakref.finalize(core, grammars.close)  # otherwise its thread would keep its processes alive
    return core


def _shut_down(executor: Executor, built: Built | None, scheduler_side: SchedulerConnector | None = None) -> None:
    """Shut down the worker side, the scheduler side, then shared objects."""
    executor.shutdown()
    if scheduler_side is not None:
        scheduler_side.shutdown()
    if built is not None:
        built.shutdown()
