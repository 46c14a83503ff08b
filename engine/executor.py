"""Executors run the steps of an engine on its ranks. In-process: one rank, on the thread that schedules."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from pdkv.config import EngineConfig
from pdkv.connectors.base import WorkerConnector
from pdkv.engine.host_memory import bound_kernel_caches, keep_freed_memory
from pdkv.engine.kv_cache import allocate_pool, check_pool, kv_cache_bytes, make_layout, num_blocks_that_fit
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.runner import ModelRunner
from pdkv.engine.threads import StepThreads
from pdkv.errors import ConfigError
from pdkv.messages import EngineCard
from pdkv.model_config import ModelConfig, resolve_max_model_len
from pdkv.models.loader import load_decoder


class Executor(ABC):
    """What the engine core knows of its ranks."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step on all ranks and return their common output. Blocks; raises what a rank raised."""

    @abstractmethod
    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Between steps: tell the connector's worker sides which engines came and went."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the ranks and give everything back. Idempotent."""


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that the engine computes on.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


class InProcessExecutor(Executor):
    """One rank in this process. Two phases, since a connector may own the KV pool and needs to know its size first.

    The constructor loads the model and sizes the pool: `layout` and `num_blocks` are then known, the connector can be
    built. `attach` takes the pool and the connector's worker side; after it steps can run.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig, *, max_num_batched_tokens: int) -> None:
        """Load the weights; on CUDA also run `max_num_batched_tokens` tokens to measure the memory that a step takes.

        Raises:
            ModelError: the weights are missing or broken.
            ConfigError: no such device, or no room for a single KV block.
        """
        self.device = resolve_device(config)
        if self.device.type == "cpu":
            keep_freed_memory()
            bound_kernel_caches()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        dtype = model_config.dtype if config.dtype == "auto" else config.dtype
        self.max_model_len = resolve_max_model_len(model_config, config.max_model_len)
        self.layout = make_layout(model_config, block_size=config.block_size, dtype=dtype)
        self._max_num_seqs = config.max_num_seqs
        self._model = load_decoder(
            config.model,
            model_config,
            dtype=getattr(torch, dtype),
            device=self.device,
            max_model_len=self.max_model_len,
        )
        self.num_blocks = num_blocks_that_fit(
            self.layout, kv_cache_bytes(self._model, config, min(max_num_batched_tokens, self.max_model_len))
        )
        self._threads = StepThreads(model_config, dtype, torch.get_num_threads()) if self.device.type == "cpu" else None
        self._runner: ModelRunner | None = None
        self._worker: WorkerConnector | None = None

    def attach(self, kv_pool: torch.Tensor | None, worker: WorkerConnector | None) -> None:
        """Take the connector's pool (None: allocate one) and worker side, and register the one with the other.

        Raises:
            ConfigError: the pool has another shape or dtype than `layout` and `num_blocks` say.
        """
        if kv_pool is None:
            kv_pool = allocate_pool(self.layout, self.num_blocks, self.device)
        check_pool(kv_pool, self.layout, self.num_blocks)
        if worker is not None:
            worker.register_kv_caches(kv_pool)
        self._worker = worker
        self._runner = ModelRunner(
            self._model, kv_pool, max_num_seqs=self._max_num_seqs, max_model_len=self.max_model_len, worker=worker
        )
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepOutput:
        assert self._runner is not None, "attach comes first"
        if self._threads is not None:
            self._threads.use_for(plan.num_tokens)
        return self._runner.execute(plan)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        if self._worker is not None:
            self._worker.update_peers(added, removed)

    def shutdown(self) -> None:
        worker, self._worker, self._runner = self._worker, None, None
        if worker is not None:
            worker.shutdown()
