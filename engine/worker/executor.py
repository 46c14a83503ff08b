"""Executors run the steps of an engine on its ranks. In-process: one rank, on the thread that calls."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from pdkv.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from pdkv.connectors.base import NO_TRANSFERS, Stats, TransferResults, WorkerConnector
from pdkv.engine.kv.kv_groups import num_held_at_once
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.proposers.base import Place, Proposer
from pdkv.engine.worker.dtype import resolve_dtype, resolve_kv_dtype
from pdkv.engine.worker.graphs import decode_sizes, make_recorder, prompt_sizes
from pdkv.engine.worker.host_memory import bound_kernel_caches, keep_freed_memory, take_step_memory
from pdkv.engine.worker.kv_cache import (
    allocate_pool,
    check_pool,
    length_that_fits,
    make_layout,
    most_useful_blocks,
    num_blocks_that_fit,
    pool_bytes,
)
from pdkv.engine.worker.masks import Masks
from pdkv.engine.worker.memory_profile import profiled_bytes
from pdkv.engine.worker.pending import DoneStep, PendingStep
from pdkv.engine.worker.profiler import StepProfiler
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.threads import StepThreads
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.models.config import ModelConfig, load_model_config, resolve_max_model_len
from pdkv.models.decoder import Decoder
from pdkv.models.kv_scales import read_kv_scales
from pdkv.models.linear import linear_kind
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.shard import WHOLE, Shard
from pdkv.models.weight_files import WeightFiles
from pdkv.sampling.logits_processors import NO_PROCESSORS, ProcessorSet
from pdkv.wire.kv import EngineCard, KVLayout


class Ended(NamedTuple):
    """What the connector's worker sides reported between two steps."""

    transfers: TransferResults
    stats: Stats | None = None  # since the start; None: unchanged
    is_report: bool = False  # the answer to `Executor.report`


NOTHING_ENDED = Ended(NO_TRANSFERS)


class Executor(ABC):
    """The engine core's view of its ranks."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step on all ranks and return their common output. Blocks; raises what a rank raised."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Give a step to the engine's device. If the device runs asynchronously, the step has not ended on return.

        At most MAX_PENDING earlier steps may be unfinished. With an executor without its own `launch` the step has
        ended. May block: see docs/engine-loop.md. Raises what a rank raised.
        """
        return DoneStep(self.execute(plan))

    def enter_thread(self) -> None:
        """Make the calling thread run all steps from now on; by default, the thread that made the executor runs
        them.
        """

    def take_finished(self) -> Ended:
        """Between steps: transfers that have ended since the last step, as far as that is known without waiting.

        This is only an optimization: the others are in the next step's output. With tp > 1 nothing is returned, since a
        transfer has ended only once it has on every rank.
        """
        return NOTHING_ENDED

    def ask_finished(self, *, with_stats: bool = False) -> Ended:
        """Ask all ranks for `take_finished`. Blocks for their answers; raises what a rank raised.

        `with_stats`: return statistics even if no transfer has ended.
        """
        return self.take_finished()

    def report(self) -> Ended:
        """Between steps: ask all ranks for their current reports. Blocks and raises as `ask_finished`."""
        return self.ask_finished(with_stats=True)._replace(is_report=True)

    profiler: StepProfiler | None = None
    """What traces its steps; None: nothing does."""

    @abstractmethod
    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Between steps: tell the connector's worker sides which engines came and went."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the ranks and release everything. Idempotent."""


class RankInfo(NamedTuple):
    """One rank of an engine, as its card names it."""

    pid: int
    blob: bytes  # the handshake of its worker side; empty without a connector


class ModelExecutor(Executor):
    """Runs a real model. Two phases, since a connector may own the KV pool and needs to know its size first.

    Once constructed, `layout` (of one rank) and `num_blocks` are known and the connector can be built. `attach` takes
    the pool and the connector's worker side; then steps can run.
    """

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    models_of_other_ranks: Sequence[str] = ()  # identities of the loaded weights, in order

    @abstractmethod
    def attach(self, kv_pool: torch.Tensor | None, worker: WorkerConnector | None) -> list[RankInfo]:
        """Take this rank's pool from the connector (None: allocate one) and its worker side; warm up. Returns the
        ranks' information, by rank.

        Raises:
            ConfigError: the pool has another shape or dtype than `layout` and `num_blocks` say.
        """


def resolve_device(config: EngineConfig, shard: Shard = WHOLE) -> torch.device:
    """The device that a rank computes on.

    Raises:
        ConfigError: CUDA was requested but is not available, or not for each rank.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device cuda was requested, but torch finds no CUDA device")
    if not available or config.device == "cpu":
        return torch.device("cpu")
    devices = config.device_numbers or range(torch.cuda.device_count())
    if shard.size > len(devices):
        raise ConfigError(f"tp={shard.size} needs {shard.size} CUDA devices, found {len(devices)}")
    return torch.device("cuda", devices[shard.rank])


def _prepare_process(device: torch.device, num_threads: int | None) -> None:
    """Set what torch computes with in this process. `num_threads`: None leaves it as it is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # devices without a number mean this one
    if device.type == "cpu":
        keep_freed_memory()
        bound_kernel_caches()
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _make_layout(
    model_config: ModelConfig,
    config: EngineConfig,
    dtype: str,
    device: torch.device,
    shard: Shard,
    weights: WeightFiles | None,
    *,
    grouped: bool,
) -> KVLayout:
    """The layout of one rank, for a model computed in `dtype`."""
    kv_dtype = resolve_kv_dtype(config, dtype, device)
    kv_scales = () if kv_dtype == dtype else read_kv_scales(config.model, model_config.num_layers, weights)
    return make_layout(
        model_config, block_size=config.block_size, dtype=kv_dtype, shard=shard, grouped=grouped, kv_scales=kv_scales
    )


def describe_pool(config: EngineConfig) -> str:
    """What an engine's KV pool will hold, as far as that is known without its weights.

    Raises:
        ConfigError: as at the engine's start: for the model, the ranks, or a length that does not fit.
    """
    model = load_model_config(config.model, config.max_model_len, config.ignore_config_fields)
    shard = Shard(0, config.tp)
    device = resolve_device(config, shard)
    dtype = resolve_dtype(config, model, device)
    layout = _make_layout(model, config, dtype, device, shard, None, grouped=True)
    most = resolve_max_model_len(model, config.max_model_len)
    size_bytes = pool_bytes(config, device)
    if size_bytes is None:
        return f"{dtype} on {device}, a KV pool in the remaining GPU memory, requests of at most {most} tokens"
    num_blocks = min(size_bytes // layout.block_bytes, most_useful_blocks(config, layout, most))
    most = length_that_fits(config, layout, num_blocks, most)
    pool = format_bytes(num_blocks * layout.block_bytes * config.tp)
    at_once = num_blocks // num_held_at_once(layout.windows, most, layout.block_size, 0)
    return f"{dtype} on {device}, a KV pool of {pool} for {at_once} requests of the longest length, {most} tokens"


class InProcessExecutor(ModelExecutor):
    """One rank in this process: the only one, or one of several that share the forward passes."""

    _runner_type: type[ModelRunner] = ModelRunner

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        max_num_batched_tokens: int,
        parallel: TensorParallel = ALONE,
        weights: WeightFiles | None = None,
        grouped: bool = True,
        carries_drafter: bool = False,
        hit_tokens: int = 0,
        proposer: Proposer | None = None,
        processors: ProcessorSet = NO_PROCESSORS,
        masks: Masks | None = None,
        start_timeout_s: float | None = None,
    ) -> None:
        """Load the weights; on CUDA also run `max_num_batched_tokens` tokens to measure the memory that a step takes.

        Args:
            weights: the model's files, already open; None: they are opened here.
            grouped: as in `make_layout`.
            carries_drafter: whether a drafter's KV may be sent along.
            hit_tokens: as in `kept_from`.
            proposer, processors, masks: as in `ModelRunner`.
            start_timeout_s: with tp > 1, how long a rank waits for another, also on its device, until steps can run,
                since each loads and compiles at its own pace.

        Raises:
            ModelError: the weights are missing, broken, or changed while they were read.
            ConfigError: an unknown device, or no room for the KV of one request of the longest length.
            RankError: another rank failed.
        """
        shard = self.shard = parallel.shard
        self._config, self._parallel = config, parallel
        self.profiler: StepProfiler = StepProfiler()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._hit_tokens = hit_tokens
        self._proposer = proposer
        self._processors = processors
        self._masks = masks
        self._start_timeout_s = config.rank_timeout_s if start_timeout_s is None else start_timeout_s
        self._runner: ModelRunner | None = None
        self._worker: WorkerConnector | None = None
        self._like_drafters = set[str]()  # epochs of the peers that have this engine's drafter
        self.device = resolve_device(config, shard)
        on_cpu = self.device.type == "cpu"
        _prepare_process(self.device, config.threads)
        dtype = resolve_dtype(config, model_config, self.device)
        self.max_model_len = resolve_max_model_len(model_config, config.max_model_len)
        self.layout = _make_layout(model_config, config, dtype, self.device, shard, weights, grouped=grouped)
        place = Place(
            config.model, model_config.vocab_size, config.max_num_seqs, self.max_model_len, config, self.device
        )
        if proposer is not None and carries_drafter and shard.size == 1 and on_cpu and not self.layout.groups:
            self.layout = proposer.with_room(self.layout, place)
        size_bytes = pool_bytes(config, self.device)
        if size_bytes is not None:
            self._size_pool(size_bytes)  # before the weights, which may take minutes
        self._model = self._load_model(model_config, dtype, weights)
        if proposer is not None:
            proposer.attach(place._replace(max_model_len=self.max_model_len))
        self._decode_sizes = () if on_cpu else decode_sizes(config.max_num_seqs)
        self._recorder = make_recorder(self.device, enforce_eager=config.enforce_eager, num_ranks=shard.size)
        most = max_num_batched_tokens if self._recorder is not None else 0
        self._prompt_sizes = prompt_sizes(most, config.max_num_seqs)
        if size_bytes is None:
            self._size_pool(self._profile())
        self._threads = StepThreads(model_config, dtype, torch.get_num_threads(), shard.size) if on_cpu else None

    def _load_model(self, model: ModelConfig, dtype: str, weights: WeightFiles | None) -> Decoder:
        return load_decoder(
            self._config.model,
            model,
            dtype=getattr(torch, dtype),
            device=self.device,
            max_model_len=self.max_model_len,
            parallel=self._parallel,
            weights=weights,
            linears=self._config.cpu_linears,
        )

    def _profile(self) -> int:
        """Bytes of a GPU's memory for KV."""
        config, proposer = self._config, self._proposer
        return profiled_bytes(
            self._model,
            self.layout,
            utilization=config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
            max_num_tokens=self._max_num_batched_tokens,
            max_num_seqs=min(config.max_num_seqs * self._rows_each, self._max_num_batched_tokens),
            max_model_len=self.max_model_len,
            decode_sizes=self._decode_sizes,
            prompt_sizes=self._prompt_sizes,
            captures=self._recorder is not None,
            timeout_s=self._start_timeout_s,
            guess=None if proposer is None else proposer.warm_up,
        )

    @property
    def _rows_each(self) -> int:
        """The most rows of a step after which tokens are drawn for one request."""
        return 1 if self._proposer is None else 1 + self._proposer.num_tokens

    def _size_pool(self, size_bytes: int) -> None:
        sizes = self.max_model_len, self._max_num_batched_tokens, self._hit_tokens
        most = most_useful_blocks(self._config, self.layout, *sizes)
        self.take_blocks(num_blocks_that_fit(self.layout, size_bytes, most))

    def take_blocks(self, num_blocks: int) -> None:
        """Set the pool's number of blocks before the pool is attached; it limits the length of requests.

        Raises:
            ConfigError: the requested length does not fit.
        """
        sizes = self._max_num_batched_tokens, self._hit_tokens
        self.num_blocks = num_blocks
        self.max_model_len = length_that_fits(self._config, self.layout, num_blocks, self.max_model_len, *sizes)

    def attach(self, kv_pool: torch.Tensor | None, worker: WorkerConnector | None) -> list[RankInfo]:
        if kv_pool is None:
            reserved = not self._config.sizes_itself
            kv_pool = allocate_pool(self.layout, self.num_blocks, self.device, reserved=reserved)
        check_pool(kv_pool, self.layout, self.num_blocks)
        if worker is not None:
            worker.register_kv_caches(kv_pool)
        config, self._worker = self._config, worker
        self._runner = self._runner_type(
            self._model,
            kv_pool,
            self.layout,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            worker=worker,
            reports=self.shard.rank == 0,
            check_finite=config.check_finite,
            proposer=self._proposer,
            processors=self._processors,
            masks=self._masks,
            decode_sizes=self._decode_sizes,
            prompt_sizes=self._prompt_sizes,
            recorder=self._recorder,
            timeout_s=self._start_timeout_s,
        )
        on_cpu, linears = self.device.type == "cpu", linear_kind(self._model.dtype, self.device, config.cpu_linears)
        compiles = linears != "compiled" or self._model.config.latent is not None
        self._runner.warm_up(0 if on_cpu else self._max_num_batched_tokens, compiles=compiles)
        if on_cpu:
            num_rows = config.max_num_seqs * self._rows_each
            take_step_memory(self._model.step_bytes(self._max_num_batched_tokens, num_rows))
        elif self._proposer is not None:
            self._proposer.warm_up()
        self._runner.set_timeout(config.rank_timeout_s)
        self._parallel.set_timeout(config.rank_timeout_s)
        return [RankInfo(os.getpid(), worker.handshake() if worker is not None else b"")]

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.launch(plan).finish()

    def launch(self, plan: StepPlan) -> PendingStep:
        assert self._runner is not None, "attach must be called first"
        with self._threads.used_for(plan.num_tokens) if self._threads is not None else nullcontext():
            return self.profiler.run(plan, self._runner.launch)

    def enter_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def take_finished(self) -> Ended:
        # One of several ranks may not have what another has.
        return self.ask_finished() if self.shard.size == 1 else NOTHING_ENDED

    def ask_finished(self, *, with_stats: bool = False) -> Ended:
        """Ask this rank alone."""
        if self._worker is None:
            return NOTHING_ENDED
        transfers = self._worker.get_finished()
        return Ended(transfers, self._worker.get_stats()) if transfers or with_stats else NOTHING_ENDED

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        if self._worker is not None:
            self._worker.update_peers(added, removed)
        self._like_drafters -= {card.epoch for card in removed}
        own = self.layout
        self._like_drafters |= {card.epoch for card in added if own.layers_shared_with(card.layout) > own.model_layers}
        if self._proposer is not None:
            self._proposer.is_shared = bool(self._like_drafters)

    def shutdown(self) -> None:
        worker, self._worker, self._runner = self._worker, None, None
        if worker is not None:
            worker.shutdown()
        self._parallel.close()
